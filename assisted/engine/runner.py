"""How a causal LM is run during a `generate`: its slots, its positions. The eager path.

Knows transformers' forward conventions; nothing of drafting, acceptance or text. Target and draft run through the same
class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts import Draft
from .cache import Paths, SlotCache, unsupported_layers
from .host import on_device
from .masks import Masks, column_depths
from .parts import Inject, Tap, device_of
from .prefill import Group, groups
from .rope import Change, change_of
from .shapes import WIDTHS
from .signatures import generate_passes, takes

__all__ = [
    "CachedModel",
    "CallSettings",
    "Masks",
    "Passes",
    "Runnable",
    "Runner",
    "is_rewindable",
    "is_sum_of_parts",
    "require_decoder",
    "require_rewindable",
    "without_gradients",
]


@dataclass
class CallSettings:
    """How one `generate` runs its forward passes, and whether it is over.

    Args:
        mode: of `fast.graphs.MODES`.
        over: the call has returned, so that the next one may have the captured passes.
        spent_once: seconds of the call, so far, on what later forward passes do not need again, captures above all.
    """

    mode: str = "eager"
    over: bool = False
    spent_once: float = 0.0

    @property
    def fuses(self) -> bool:
        """Whether models run in fewer operations, or from copies of their weights."""
        return self.mode != "eager"


@dataclass(frozen=True)
class Runnable:
    """A module in the form in which it is run: as it is, or as `fast.fused` has made it.

    Args:
        module: a causal LM, or a head.
        through_parts: call the model's embedding, layers, norm and head in turn, not its forward, which takes as long as a
            small layer. Only for models that consist of these parts alone: fused ones, and drafts that pass
            `is_sum_of_parts`, where an error costs speed only.
        last_only: its layers can leave out the positions of a prompt whose output nobody reads.
        copied: parameters that the module holds copies of. `fast.fused` compares them in every call.
    """

    module: Any
    through_parts: bool = False
    last_only: bool = False
    copied: Sequence[torch.Tensor] = ()


class Passes:
    """How forward passes are run: eagerly, operation by operation. `fast.graphs.Graphs` replays captured ones."""

    def run(self, runner: Runner, ids: torch.Tensor, draft: Draft | None, used: list[int] | None) -> torch.Tensor:
        """What `CachedModel.__call__` returns."""
        return runner.eager(ids, draft, used)

    def gather(self, runner: Runner, path: Paths) -> bool:
        """Move a tree's accepted columns together, as `SlotCache.commit` does; False leaves that to the cache."""
        return False


class Runner:
    """A module over the slots of what it has read, and how its forward passes are run.

    Args:
        runnable: the module, not changed.
        cache: its slots.
        context: positions that it knows.

    Attributes:
        passes: how its forward passes are run.
        settings: of the call.
        kind: tells apart the runners of a call that share slots.
        taps: modules whose output counts as well as the forward's.
        inject: the module that holds the hidden states to go on from, for parts and heads.
    """

    kind: Hashable = "whole"
    taps: Sequence[Tap] = ()
    inject: Inject | None = None

    def __init__(self, runnable: Runnable, cache: SlotCache, device: torch.device, context: int):
        self.runnable, self.cache, self.device, self.context = runnable, cache, device, context
        self.passes, self.settings = Passes(), CallSettings()

    @property
    def is_capturable(self) -> bool:
        """Whether forward passes can be run by `static_forward`."""
        raise NotImplementedError

    def eager(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """One forward pass, the reference for every other way of running it: see `CachedModel.__call__`."""
        raise NotImplementedError

    def static_forward(
        self,
        ids: torch.Tensor,
        known: torch.Tensor,
        first: torch.Tensor,
        parents: torch.Tensor | None,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """The same forward pass as a function of tensors alone: the host reads nothing that changes between passes.

        ids: [R, n] int64. known: [R, 1] int64, slots that count in each row. first: [R, 1] int64, position of column 0.
        parents: [R, n - 1] int64 of a tree, None for chains. visible: [R, top] bool, False where a prompt was padded, of the
        slots that are looked at: at least n after the longest row. Returns [R, n, V].
        """
        raise NotImplementedError

    def run_only(self, rows: list[int]) -> None:
        """Run these rows alone until told otherwise, since rows that have ended would waste time."""
        self.cache.run_only(rows)

    def by_groups(self, width: int, read: Callable[[list[int], int], torch.Tensor]) -> torch.Tensor:
        """Read a prompt of `width` columns in the groups of rows that take the least work. Taps hold the states of all rows.

        read: a forward pass over these rows, from this column on. Returns the output at the last column, [rows, 1, ...];
        this method returns that of all rows, [B, 1, ...].
        """
        cache, rows = self.cache, sorted(self.cache.running)
        apart = (
            self.is_capturable and not cache.layers and cache.visible is not None and cache.visible.shape[1] <= width
        )
        parts: list[Group] = groups(cache.visible, rows, self.device) if apart else [(rows, 0)]
        if parts == [(cache.order, 0)]:
            return read(rows, 0)
        last: torch.Tensor | None = None
        states: list[torch.Tensor] = []
        for rows, first in parts:
            with cache.reading(rows, first):
                part = read(rows, first)
            if last is None:
                last = part.new_zeros(cache.rows, *part.shape[1:])
                states = [tap.hidden.new_zeros(cache.rows, width, tap.hidden.shape[-1]) for tap in self.taps]
            last[rows] = part
            for of_all, tap in zip(states, self.taps, strict=True):
                of_all[rows, first:] = tap.hidden
        for of_all, tap in zip(states, self.taps, strict=True):
            tap.hidden = of_all
        assert last is not None
        return last


class CachedModel(Runner):
    """A causal LM and the slots of what it has read.

    Args:
        model: any decoder-only causal LM, or the form in which it is run; it is not changed.
        cache: its slots.
        masks: the masks that it takes, `Masks.of(model)`.
    """

    in_lockstep = False  # whether all rows of a batch must keep the same number of columns
    change: Change | None = None  # of the rotary embedding's angles, where this call may reach it
    masks: Masks

    def __init__(self, model: PreTrainedModel | Runnable, cache: SlotCache, masks: Masks):
        runnable = model if isinstance(model, Runnable) else Runnable(model)
        self.model: Any = runnable.module
        context = _context(self.model.config.get_text_config(decoder=True))
        super().__init__(runnable, cache, device_of(self.model), context)
        self.last_only = runnable.last_only
        self.masks = masks
        self._takes_cache = "past_key_values" if takes(self.model, "past_key_values") else "cache_params"
        self._takes_positions = takes(self.model, "position_ids")
        # a model that `generate` gives no positions counts them itself, padding included
        self._counts_padding = self._takes_positions and not generate_passes(self.model, "position_ids")
        self._takes_logits_to_keep = takes(self.model, "logits_to_keep")
        change = change_of(self.model)
        if change is not None and cache.limit + WIDTHS[-1] > change.position:
            self.change, self.in_lockstep = change, True

    def prefill(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Read a prompt, [B, P] int64, in the model's own way. Returns the logits after it, [B, 1, V]."""
        self.cache.hide(attention_mask)

        def read(rows: list[int], first: int) -> torch.Tensor:
            mask = None if attention_mask is None else attention_mask[rows, first:]
            kwargs: dict[str, Any] = {"attention_mask": mask}
            if self._takes_positions:
                if mask is None:
                    kwargs["position_ids"] = torch.arange(first, ids.shape[1], device=self.device)[None]
                else:
                    kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0).to(self.device)
            if self._takes_logits_to_keep:
                kwargs["logits_to_keep"] = 1
            if self.last_only:
                kwargs["last_only"] = True
            return self._forward(ids[rows, first:], kwargs)[:, -1:]

        logits = self.by_groups(ids.shape[1], read)
        self.cache.begin_rounds(ids.shape[1])
        return logits

    def __call__(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """One forward over n columns behind each row's length; nothing is kept before `commit`.

        ids: [B, n] int64, the last committed token and then the draft's tokens. draft: its tree, if it is no chain.
        used: how many columns of each row matter, None for all; the others may lie behind the end of the context.
        Returns [B, n, V], zeros for rows that don't run.
        """
        return self.passes.run(self, ids, draft, used)

    def eager(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        cache, width = self.cache, ids.shape[1]
        rows = cache.running
        if rows != list(range(cache.rows)):
            ids = ids[rows]
            used = None if used is None else [used[row] for row in rows]
            draft = None if draft is None or draft.parents is None else draft.of_rows(rows)
        cache.place(width, self.device)
        depths = column_depths(draft, width, self.device)
        kwargs: dict[str, Any] = {}
        if self._takes_positions:
            kwargs["position_ids"] = self._positions(depths, used)
        if not self.masks.trees:
            kwargs["attention_mask"] = cache.mask(width, self.device)
        elif width > 1 or len(rows) > 1 or cache.visible is not None or set(self.masks.windows.values()) != {None}:
            known = cache.ends(self.device)
            visible = None if cache.visible is None else cache.visible[rows].to(self.device)
            kwargs["attention_mask"] = self.masks.made(known, depths, draft, visible, cache.top, self.model.dtype)
        return cache.spread(self._forward(ids, kwargs))

    def static_forward(
        self,
        ids: torch.Tensor,
        known: torch.Tensor,
        first: torch.Tensor,
        parents: torch.Tensor | None,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        width, top = ids.shape[1], visible.shape[1]
        self.cache.place_at(known, width, top)
        draft = None if parents is None else Draft(ids[:, 1:], known[:, 0], parents=parents)
        depths = column_depths(draft, width, self.device)
        positions = (first + depths).clamp(max=self.context - 1)  # columns that do not matter may lie after the end
        masks = self.masks.made(known, depths, draft, visible, top, self.model.dtype)
        return self._forward(ids, {"position_ids": positions, "attention_mask": masks})

    def part(
        self, model: PreTrainedModel, kind: Hashable, taps: Sequence[Tap] = (), inject: Inject | None = None
    ) -> CachedModel:
        """A part of the model over the same slots, run in the same way. kind: which part it is."""
        part = CachedModel(replace(self.runnable, module=model), self.cache, self.masks)
        part.passes, part.settings = self.passes, self.settings
        part.kind, part.taps, part.inject = kind, taps, inject
        return part

    @property
    def is_capturable(self) -> bool:
        """Whether passes can be run by `static_forward`: those that take 2-D masks, or states, cannot; nor those whose columns
        beyond the last one that counts would change something."""
        return self.masks.trees and not self.cache.right_aligned and not self.in_lockstep and not self._counts_padding

    def commit(self, counts: list[int], path: Paths | None = None) -> None:
        """Keep `counts[b]` of the columns of the last forward: its first ones, or those of a tree's accepted `path`."""
        if path is not None and all(column == to for columns in path for to, column in enumerate(columns)):
            path = None
        moved = path is not None and self.passes.gather(self, path)
        self.cache.commit(counts, None if moved else path)

    def catch_up(self) -> None:
        """Let the cache hold all that is committed; of slots it is always true."""

    def room(self, lengths: list[int]) -> int:
        """Positions left behind the longest of these texts before the model's context ends, or its angles change."""
        # aligned rows lie side by side, those that have ended too
        aligned = 0 if self.masks.trees else max(self.cache.lengths) + 1
        ahead = max(0, -min(self.cache.padding))  # of the slots, where a caller's positions began later
        room = self.context - max(*lengths, aligned) - ahead
        own = None if self.change is None else self.change.room(max(self._first_positions()))
        return room if own is None else min(room, own)

    def _first_positions(self) -> list[int]:
        """The position of the next token of every running row."""
        counts = self.cache.known if self._counts_padding else self.cache.unpadded
        return [counts[row] for row in self.cache.running]

    def _positions(self, depths: torch.Tensor, used: list[int] | None) -> torch.Tensor:
        """Positions of the forward just placed, [B, n]. Columns that do not matter have one that every model knows."""
        positions = on_device(self._first_positions(), self.device)[:, None] + depths
        if used is None or self.cache.top <= self.context:
            return positions
        return positions.masked_fill(depths >= on_device(used, self.device)[:, None], 0)

    def _forward(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if self.runnable.through_parts and "logits_to_keep" not in kwargs:  # not the prompt
            return self._through_parts(ids, kwargs)
        kwargs[self._takes_cache] = self.cache
        return self.model(input_ids=ids.to(self.device), use_cache=True, return_dict=True, **kwargs).logits

    def _through_parts(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        base = self.model.base_model
        hidden = base.embed_tokens(ids.to(self.device))
        rotary = base.rotary_emb(hidden, position_ids=kwargs["position_ids"])
        for layer in base.layers:
            hidden = layer(
                hidden,
                attention_mask=kwargs.get("attention_mask"),
                position_ids=kwargs["position_ids"],
                position_embeddings=rotary,
                past_key_values=self.cache,
                use_cache=True,
            )
        return self.model.lm_head(base.norm(hidden))


@torch.no_grad()
def is_sum_of_parts(model: PreTrainedModel) -> bool:
    """Whether a model is no more than its embedding, layers, norm and head: tried on a few tokens."""
    base, masks = model.base_model, Masks.of(model)
    parts = all(hasattr(base, name) for name in ("embed_tokens", "rotary_emb", "layers", "norm"))
    if not parts or not hasattr(model, "lm_head") or not masks.trees or len(masks.windows) > 1:
        return False
    ids = torch.arange(8, device=device_of(model))[None] % model.config.get_text_config(decoder=True).vocab_size
    logits = []
    for through_parts in (False, True):
        runner = CachedModel(Runnable(model, through_parts), SlotCache(1, ids.shape[1]), masks)
        runner.prefill(ids[:, :4], None)
        try:
            logits.append(runner(ids[:, 4:]))
        except (TypeError, AttributeError, ValueError):  # submodules that want to be called in another way
            return False
    return torch.equal(*logits)


def without_gradients(*models: nn.Module) -> AbstractContextManager[Any]:
    """The mode to run models in: inference mode, where tensors are cheaper to make, but no_grad for models with layers of
    quanto's. Its weights are shells around other tensors, and torch makes no views of a shell in inference mode."""
    quanto = sys.modules.get("optimum.quanto")  # a process that never imported it has no such layers to look for
    layer = getattr(quanto, "QModuleMixin", None)
    if layer is not None and any(isinstance(module, layer) for model in models for module in model.modules()):
        return torch.no_grad()
    return torch.inference_mode()


def _context(config: Any) -> int:
    """How many positions a model has; MPT calls them by a name of its own."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or sys.maxsize


def is_rewindable(model: PreTrainedModel) -> bool:
    """Whether a model's cache can go back to any earlier prefix by lowering a length: keys and values, nothing else."""
    return not _unslotted(model)


def require_decoder(model: PreTrainedModel, role: str) -> None:
    """Refuse what is no decoder-only causal LM with a ValueError. role: "target" or "draft", for the message."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{role}: {name} is an encoder-decoder; only decoder-only causal LMs can be assisted")
    if not model.can_generate():
        raise ValueError(
            f"{role}: {name} has no language-model head to generate with; load it with AutoModelForCausalLM"
        )


def require_rewindable(model: PreTrainedModel, role: str) -> None:
    """Refuse a model whose state cannot take back tokens. role: "target" or "draft", for the message.

    Raises ValueError: encoder-decoders, recurrent states (Mamba, linear attention, hybrids), caches of a kind of their own.
    """
    require_decoder(model, role)
    if kinds := _unslotted(model):
        raise ValueError(
            f"{role}: {type(model).__name__} keeps {', '.join(kinds)}, which cannot take back rejected tokens. A {role} of "
            "this kind can't go back to an earlier prefix; choose a pure attention model."
        )


def _unslotted(model: PreTrainedModel) -> list[str]:
    """What a model keeps of its past that slots can't hold."""
    if getattr(model, "_is_stateful", False):
        return ["a recurrent state"]
    if not model._supports_default_dynamic_cache():
        return ["a cache of its own kind"]
    return unsupported_layers(model.config.get_text_config(decoder=True))
