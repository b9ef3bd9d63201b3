"""Drafting with a small causal LM (2211.17192, 2302.01318): loading it, and checking whether it shares the target's tokenizer.
The drafting itself is in shared/model_drafter.py, tree.py, pard.py, recurrent.py and other_tokenizer/.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ... import zoo
from ...engine.cross import is_encoder_decoder
from ...engine.hooks import is_offloaded
from ...engine.parts import uncompiled, unwrapped
from ...engine.traits import Traits, require_rewindable
from ...engine.trust import trust
from ...engine.verifiable import obstacle_to
from ...loading.adapters import base_path, require_in_layers, trusting
from ...loading.files import loading, local_folder, require_sound
from ...loading.gguf import load_gguf, named_in
from ...loading.quantization import load_quantized, require_runs, save_quantized
from ...loading.vocabulary import find_tokenizer, same_tokens
from ..shared.base import Room, Spec, Target, require_positive
from ..shared.files import find_folder
from ..shared.model_drafter import ModelDrafter
from ..shared.registry import heads_at, kind_of, register
from .pard import Pard2Drafter, PardDrafter, is_pard, is_pard2, load_projection
from .recurrent import RecurrentDrafter
from .tree import BEAM, CANDIDATES, TreeDrafter


@register("draft-model")
@dataclass(frozen=True)
class DraftModel(Spec):
    """A small causal LM drafts: `"Qwen/Qwen3-0.6B"`, a folder, `"zoo:draft"`, or a loaded model.

    It drafts chains. For a target with weights on a disk or in main memory, it drafts token trees instead (`DraftTree`), of a
    size that is chosen by measured costs.

    Args:
        model: Hub id, folder, GGUF file or `zoo:` name; or a PreTrainedModel, with or without a PEFT adapter.
        quantization: one of `assisted.loading.quantization.NAMES`, a transformers quantization config, or None (default).
            Must be None for a GGUF file.
        tokenizer: the draft's tokenizer, if it is not stored with the model.
        draft_window: how many of the last tokens the draft keeps keys and values of, besides those of the first 4; at least 1,
            None (default) for all. It bounds the draft's memory and the cost of its attention in long texts, where it may
            accept less. The output does not change. Not for drafts with another tokenizer, with recurrent states, or without
            4-D masks.
    """

    title = "Draft model"
    crosses = True
    has_q = True
    acceptance = (0.5, 0.85)
    quantizes = "model"
    served_as: ClassVar[str | None] = "draft-model"
    training = "assisted.methods.draft_model.train:Distillation"
    stored = ("model", "folder")

    model: str | PreTrainedModel
    quantization: Any = None
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, metadata={"saved": False})
    draft_window: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_positive(self, "draft_window")
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        object.__setattr__(self, "model", uncompiled(self.model))
        if isinstance(self.model, str) and not self.model.strip():
            raise ValueError("draft: the path is empty; name a Hub id or a folder, or leave draft out")

    def memory(self, room: Room) -> dict[str, int]:
        return room.of_model(self.quantization, self.draft_window)

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        by_path = isinstance(self.model, str)
        source = zoo.resolve(self.model) if isinstance(self.model, str) else None
        save_quantized(drafter.models[0] if by_path else self.model, path, source=source)
        own = drafter.tokenizer or tokenizer
        if own is not None:
            own.save_pretrained(path)
        if isinstance(drafter, Pard2Drafter):
            drafter.save(path)

    def chosen(self, target: Target) -> Spec:
        """The spec of another method if a Hub id that was not downloaded yet holds its heads, as config.json shows."""
        path, kind = self.model, None
        if isinstance(path, str) and self.quantization is None and local_folder(zoo.resolve(path)) is None:
            with suppress(OSError, ValueError):  # what is wrong with the path, loading says
                find_folder(path, ["config.json"])
                kind = kind_of(path)
        return self if kind is None else heads_at(kind, self)

    def load(self, target: Target, **kwargs: Any) -> ModelDrafter:
        """Load the model. If its tokenizer differs from the target's, drafts are translated.

        kwargs: Hub arguments, dtype, device_map. Raises ValueError for an unsuitable draft, OSError if the path does not
        exist.
        """
        hub = {name: value for name, value in kwargs.items() if name not in ("dtype", "device_map")}
        if isinstance(self.model, str):
            path = zoo.resolve(self.model)
            model = _loaded(path, self.quantization, **kwargs)
            path, gguf_file = named_in(path)
            tokenizer = self.tokenizer or find_tokenizer(path, **hub, **({"gguf_file": gguf_file} if gguf_file else {}))
            if tokenizer is None and (base := base_path(path, "draft", **hub)) != path:
                tokenizer = find_tokenizer(base, **trusting(path, base, **hub))
        else:
            require_in_layers(self.model, "draft")
            model = unwrapped(self.model)  # the loop cannot inspect the arguments of an adapter's wrapper
            folder = model.name_or_path
            tokenizer = self.tokenizer or (find_tokenizer(folder) if Path(folder).is_dir() else None)
        _require_usable(model)
        if is_encoder_decoder(model) and not is_encoder_decoder(unwrapped(target.model)):
            raise ValueError(
                f"draft: {type(model).__name__} is an encoder-decoder, and this target has nothing for its encoder to read; "
                "choose a causal LM"
            )
        drafter = self._drafter(target, model, tokenizer)
        if self.draft_window is not None:
            what = None if drafter.masks.trees else "takes no 4-D masks"
            what = "reads what an encoder made" if is_encoder_decoder(unwrapped(target.model)) else what
            what = "has recurrent states" if isinstance(drafter, RecurrentDrafter) else what
            what = "has another tokenizer than the target" if drafter.translates else what
            if what is not None:
                raise ValueError(
                    f"draft_window: {self.draft_window} is not possible, as this draft {what}; leave it out"
                )
            drafter.window = self.draft_window
        return drafter

    def _drafter(
        self, target: Target, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> ModelDrafter:
        """The drafter of a loaded model, which depends on its kind and its tokenizer."""
        same = same_tokens(target.model, model, target.tokenizer, tokenizer)
        if same or tokenizer is None or target.tokenizer is None:
            if Traits.of(model).is_recurrent:
                return RecurrentDrafter(model, tokenizer)
            if is_encoder_decoder(unwrapped(target.model)):
                return ModelDrafter(model, tokenizer)
            if is_pard2(model) and (projection := load_projection(model)) is not None:
                return Pard2Drafter(model, tokenizer, target.model, projection)
            if is_pard(model):
                return PardDrafter(model, tokenizer)
            offloaded = is_offloaded(unwrapped(target.model))
            return TreeDrafter(model, tokenizer, target.model) if offloaded else ModelDrafter(model, tokenizer)
        if is_encoder_decoder(unwrapped(target.model)):
            raise ValueError(
                "draft: it has another tokenizer than the target, an encoder-decoder; choose one with the same"
            )
        require_rewindable(model, "draft")  # a translation goes back to earlier prefixes
        size = Traits.of(target.model).vocabulary
        if ModelDrafter.translated is None:
            raise ValueError(
                "draft: it has another tokenizer than the target, and nothing here translates; choose another"
            )
        return ModelDrafter.translated(model, size, tokenizer, target.tokenizer)


class _Named(DraftModel):
    """A draft model that drafts in a way of its own, which the string form names."""

    crosses = False
    served_as = None

    @classmethod
    def named(cls, rest: str) -> Spec:
        """The spec for `"pard:DIR"` or `"draft-tree:DIR"`."""
        if not rest:
            raise ValueError(
                f"draft: {cls.name!r} does not name a model; write '{cls.name}:DIR' with a folder or Hub id"
            )
        return cls(rest)


@register("draft-tree")
@dataclass(frozen=True)
class DraftTree(_Named):
    """A small causal LM drafts a token tree: `"draft-tree:zoo:draft"`.

    For targets whose forward pass takes about as long for hundreds of positions as for one, above all targets with weights on
    a disk or in main memory, for which `DraftModel` drafts trees by itself. The tree contains the most probable paths. Their
    probabilities are the draft's, corrected by how often they were right. A sampled token is accepted if the target draws a
    drafted one. Models without 4-D masks get chains.

    Args:
        model, quantization, tokenizer, draft_window: as for `DraftModel`. The tokenizer must be the target's.
        nodes: a fixed tree size. None (default) chooses it by measured costs, at most 1024.
        beam: nodes that the draft reads in a forward pass, at least 1.
        candidates: children that a node may have, at least 1.
    """

    title = "Draft model, large trees"
    trees = True
    has_q = False
    not_served = "engines draft no trees of this kind; DraftModel drafts chains"

    nodes: int | None = None
    beam: int = BEAM
    candidates: int = CANDIDATES

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "nodes", "beam", "candidates")

    def _drafter(self, target: Target, *loaded: Any) -> ModelDrafter:
        """As `DraftModel`. Raises ValueError also for a draft with another tokenizer, whose tokens would be translated."""
        drafter = super()._drafter(target, *loaded)
        if isinstance(drafter, RecurrentDrafter):
            return drafter
        if drafter.translates:
            raise ValueError(
                "draft: this draft has another tokenizer than the target, so it drafts chains; use DraftModel"
            )
        return TreeDrafter(drafter.model, drafter.tokenizer, target.model, self.nodes, self.beam, self.candidates)


@register("pard")
@dataclass(frozen=True)
class Pard(_Named):
    """A causal LM that was trained for it drafts several tokens in one forward pass (PARD, 2504.18583): `"pard:DIR"`.

    `DraftModel` recognizes such a draft by its config, so that its path alone is enough; this spec sets the options.

    Args:
        model, quantization, tokenizer, draft_window: as for `DraftModel`. The tokenizer must be the target's. The config names
            the mask token as `pard_token`, `ptd_token_id` or `mask_token_id`.
        tokens: the most tokens of a draft. None (default) is the number that the draft was trained for: the config's
            `pard_tokens`, or 8. Further ones are hardly ever right.
    """

    title = "PARD drafts"
    acceptance = (0.4, 0.8)
    not_served = "hand the folder over as a draft model (DraftModel): engines that can draft in parallel recognize it"
    training = "assisted.methods.draft_model.train:PardTraining"

    tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "tokens")

    def _drafter(self, target: Target, *loaded: Any) -> ModelDrafter:
        """As `DraftModel`. Raises ValueError also for a draft without a mask token, with another tokenizer, or with recurrent
        states."""
        drafter = super()._drafter(target, *loaded)
        if isinstance(drafter, RecurrentDrafter) or drafter.translates:
            what = "recurrent states" if isinstance(drafter, RecurrentDrafter) else "another tokenizer than the target"
            raise ValueError(f"draft: this draft has {what}, so it drafts token by token; use DraftModel")
        if isinstance(drafter, Pard2Drafter):
            drafter.tokens = self.tokens or drafter.tokens
            return drafter
        return PardDrafter(drafter.model, drafter.tokenizer, self.tokens)


def _loaded(path: str, quantization: Any, **kwargs: Any) -> PreTrainedModel:
    """The model at a path. Errors say that they concern the draft."""
    folder, gguf_file = named_in(path)
    if gguf_file is not None:
        if quantization is not None:
            raise ValueError(
                f"draft_quantization: {path!r} is a GGUF file, which is quantized already; leave draft_quantization out"
            )
        return load_gguf(folder, gguf_file, "draft", **kwargs)
    require_sound(path, "draft")
    with loading("draft", path):
        model = load_quantized(path, quantization, **kwargs)
    if quantization is not None:
        require_runs(model, quantization)
    return model


def _require_usable(model: PreTrainedModel) -> None:
    """Raise ValueError for a draft that can't return to the committed text."""
    if not Traits.of(model).is_recurrent:
        require_rewindable(model, "draft")
    elif (obstacle := obstacle_to(model, trust(model))) is not None:
        raise ValueError(f"draft: {obstacle}; choose another draft")
