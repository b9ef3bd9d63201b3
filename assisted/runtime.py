"""How a causal LM is run during a `generate`: its slots, its masks, its positions. The eager path.

Knows transformers' forward conventions; nothing of drafting, acceptance or text. Target and draft run through the same
class.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from .cache import SlotCache, unsupported_layers
from .drafts import Draft

__all__ = [
    "CachedModel",
    "Masks",
    "is_rewindable",
    "is_sum_of_parts",
    "is_untouched",
    "require_decoder",
    "require_rewindable",
]


@dataclass(frozen=True)
class Masks:
    """What kind of attention mask a model reads.

    Args:
        trees: it reads 4-D masks, so that rows of different lengths and token trees can share a forward. Otherwise
            (ALiBi, flash attention, chunked attention) slots are kept right-aligned and only chains are verified.
        windows: the sliding window of each layer type, None for full attention. One entry: one mask for all layers;
            several: a dict of masks by layer type.
        additive: eager attention adds the mask; sdpa takes booleans.
    """

    trees: bool
    windows: dict[str, int | None]
    additive: bool

    @staticmethod
    def of(model: PreTrainedModel) -> Masks:
        config = model.config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if not kinds:
            kinds = {"full_attention" if window is None else "sliding_attention"}
        attention = config._attn_implementation
        readable = (
            attention in ("sdpa", "eager")
            and not _counts_slots(config)
            and kinds <= {"full_attention", "sliding_attention"}
            and getattr(config, "attention_chunk_size", None) is None
            and "position_ids" in inspect.signature(model.forward).parameters
        )
        windows = {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
        return Masks(trees=readable, windows=windows, additive=attention == "eager")


class CachedModel:
    """A causal LM and the slots of what it has read.

    Args:
        model: any decoder-only causal LM; it is not changed.
        cache: its slots.
        masks: what it reads, `Masks.of(model)`.
        bare: call its submodules (embedding, layers, norm, head) in rounds, not its forward, which takes as long as a small
            layer. Only for models that are no more than these: fused ones, which say so themselves, and drafts of which
            `is_sum_of_parts` is true, since a wrong draft costs speed only.
    """

    in_step = False  # whether all rows of a batch must keep the same number of columns

    def __init__(self, model: PreTrainedModel, cache: SlotCache, masks: Masks, bare: bool = False):
        self.model = model
        self.bare = bare or getattr(model, "is_sum_of_parts", False)
        self.cache = cache
        self.masks = masks
        self.device = model.device
        parameters = inspect.signature(model.forward).parameters
        self._context = _context(model.config.get_text_config(decoder=True))
        self._takes_cache = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    def prefill(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Read a prompt, [B, P] int64, in the model's own way. Returns the logits after it, [B, 1, V]."""
        kwargs: dict[str, Any] = {"attention_mask": attention_mask}
        if self._takes_positions:
            if attention_mask is None:
                kwargs["position_ids"] = torch.arange(ids.shape[1], device=self.device)[None]
            else:
                kwargs["position_ids"] = (attention_mask.long().cumsum(1) - 1).clamp(min=0).to(self.device)
        if self._takes_logits_to_keep:
            kwargs["logits_to_keep"] = 1
        self.cache.hide(attention_mask)
        logits = self._forward(ids, kwargs)[:, -1:]
        self.cache.begin_rounds(ids.shape[1])
        return logits

    def __call__(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """One forward over n columns behind each row's length; nothing is kept before `commit`.

        ids: [B, n] int64, the last committed token and then the draft's tokens. draft: its tree, if it is no chain.
        used: how many columns of each row matter, None for all; the others may lie behind the end of the context.
        Returns [B, n, V], zeros for rows that don't run.
        """
        cache, width = self.cache, ids.shape[1]
        rows = cache.running
        if rows != list(range(cache.rows)):
            ids = ids[rows]
            used = None if used is None else [used[row] for row in rows]
            draft = None if draft is None or draft.parents is None else _of_rows(draft, rows)
        cache.place(width, self.device)
        depths = _column_depths(draft, width, self.device)
        kwargs: dict[str, Any] = {}
        if self._takes_positions:
            kwargs["position_ids"] = self._positions(depths, used)
        if not self.masks.trees:
            kwargs["attention_mask"] = cache.mask(width, self.device)
        elif width > 1 or len(rows) > 1 or cache.visible is not None or set(self.masks.windows.values()) != {None}:
            kwargs["attention_mask"] = self._masks(depths, draft)
        return cache.spread(self._forward(ids, kwargs))

    def run_only(self, rows: list[int]) -> None:
        """Let passes be over these rows alone until told otherwise: those that have ended cost time for nothing."""
        self.cache.run_only(rows)

    def commit(self, counts: list[int], path: torch.Tensor | None = None) -> None:
        """Keep `counts[b]` of the columns of the last forward: its first ones, or those of a tree's accepted `path`."""
        self.cache.commit(counts, path)

    def catch_up(self) -> None:
        """Let the cache hold all that is committed; of slots it is always true."""

    def room(self, lengths: list[int]) -> int:
        """Positions left behind the longest of these texts before the model's context ends."""
        # aligned rows lie side by side, those that have ended too
        aligned = 0 if self.masks.trees else max(self.cache.lengths) + 1
        return self._context - max(*lengths, aligned)

    def _positions(self, depths: torch.Tensor, used: list[int] | None) -> torch.Tensor:
        """Positions of the forward just placed, [B, n]. Columns that do not matter have one that every model knows."""
        positions = self.cache.positions(self.device) + depths
        if used is None or self.cache.top <= self._context:
            return positions
        return positions.masked_fill(depths >= torch.tensor(used, device=self.device)[:, None], 0)

    def _forward(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if self.bare and "logits_to_keep" not in kwargs:  # not the prompt
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

    def _masks(self, depths: torch.Tensor, draft: Draft | None) -> torch.Tensor | dict[str, torch.Tensor]:
        """The 4-D masks of the forward just placed: which slots each column may look at, [B, 1, n, top]."""
        cache = self.cache
        slots = torch.arange(cache.top, device=self.device)
        behind = torch.tensor([cache.lengths[row] for row in cache.running], device=self.device)[:, None]
        where = behind + depths  # [B, n]: a column's place in its row's text
        if draft is None or draft.parents is None:
            places = slots  # a chain lies in its slots as it lies in the text
            seen = slots <= where[:, :, None]
        else:
            columns = behind + torch.arange(depths.shape[1], device=self.device)
            places = slots.repeat(len(behind), 1).scatter(1, columns, where)[:, None]
            seen = (slots < behind)[:, None].repeat(1, depths.shape[1], 1)
            seen = seen.scatter(2, columns[:, None].expand(-1, depths.shape[1], -1), _column_ancestors(draft))
        if cache.visible is not None:
            hidden = min(cache.visible.shape[1], cache.top)
            seen = seen.clone()
            seen[:, :, :hidden] &= cache.visible[cache.running, :hidden].to(self.device)[:, None]
        masks = {
            kind: self._dressed(seen if window is None else seen & (places > where[:, :, None] - window))
            for kind, window in self.masks.windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _dressed(self, seen: torch.Tensor) -> torch.Tensor:
        seen = seen[:, None]
        if not self.masks.additive:
            return seen
        dtype = self.model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def is_untouched(model: PreTrainedModel) -> bool:
    """Whether calling a model's forward does nothing but run it: no hooks (offloading, counting), no replaced forward."""
    outer = (model, model.base_model)
    return not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in outer)


@torch.no_grad()
def is_sum_of_parts(model: PreTrainedModel) -> bool:
    """Whether a model is no more than its embedding, layers, norm and head: tried on a few tokens."""
    base, masks = model.base_model, Masks.of(model)
    parts = all(hasattr(base, name) for name in ("embed_tokens", "rotary_emb", "layers", "norm"))
    if not parts or not hasattr(model, "lm_head") or not masks.trees or len(masks.windows) > 1:
        return False
    ids = torch.arange(8, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
    logits = []
    for bare in (False, True):
        runner = CachedModel(model, SlotCache(1, ids.shape[1]), masks, bare)
        runner.prefill(ids[:, :4], None)
        try:
            logits.append(runner(ids[:, 4:]))
        except (TypeError, AttributeError, ValueError):  # submodules that want to be called in another way
            return False
    return torch.equal(*logits)


def _of_rows(draft: Draft, rows: list[int]) -> Draft:
    """The trees of some rows."""
    assert draft.parents is not None
    return Draft(draft.tokens[rows], draft.lengths[rows], parents=draft.parents[rows])


def _column_depths(draft: Draft | None, width: int, device: torch.device) -> torch.Tensor:
    """Depth of every column of a forward, the last committed token being depth 0. Returns [B or 1, n]."""
    if draft is None or draft.parents is None:
        return torch.arange(width, device=device)[None]
    return torch.nn.functional.pad(draft.depths(), (1, 0)).to(device)


def _column_ancestors(draft: Draft) -> torch.Tensor:
    """Draft.ancestors with the last committed token, which every node sees, as column 0. Returns [B, n + 1, n + 1]."""
    seen = torch.nn.functional.pad(draft.ancestors(), (1, 0, 1, 0))
    seen[:, :, 0] = True
    return seen


def _context(config: Any) -> int:
    """How many positions a model has; MPT calls them by a name of its own."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or sys.maxsize


def _counts_slots(config: Any) -> bool:
    """The model builds a bias or its causality from the order of slots (ALiBi, GPT-Neo), not from a 4-D mask."""
    alibi = getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi"
    return bool(alibi) or config.model_type in ("bloom", "mpt", "gpt_neo")


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
