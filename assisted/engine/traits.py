"""What a causal LM can do: one record, from its config and its forward's signature. Nothing is run.

Everything that decides by the kind of model asks here. Drafting is unknown here, and so is whose code a model runs (trust.py).
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .cross import Decoder, is_encoder_decoder, position_embedding
from .delta import DeltaMixer
from .libraries import (
    STATE_LAYERS,
    DummyLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    attention_of,
    has_default_cache,
    is_stateful,
)
from .masks import Masks
from .parts import cache_argument, generate_passes, takes, unwrapped
from .stepped import by_position

SLOTS = {DummyLayer, DynamicLayer, DynamicSlidingWindowLayer}
STATES = {
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
}
"""The layers of a cache that slots can stand for: those with keys and values, and those with states."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts")
_KNOWN: dict[Hashable, Traits] = {}
_MOST = 256  # records kept
_PLAIN = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True)
class Traits:
    """What a causal LM can do."""

    vocabulary: int  # V, the size of its embedding
    layers: int  # the number of decoder layers
    context: int  # the number of positions it supports
    masks: Masks  # the attention masks it takes
    # of a recurrent model whose layers can run over columns, the masks that it then takes. They are `masks` if that
    # needs no copies of states.
    column_masks: Masks | None
    # what its cache holds that slots can't hold, for messages; empty if it holds only keys and values
    keeps: tuple[str, ...]
    is_recurrent: bool  # it keeps states in transformers' own cache layers, and nothing else except keys and values
    # the experts of a layer, and how many of them a position chooses; None without a choice
    experts: tuple[int, int] | None
    cache_argument: str  # the argument in which its forward takes a cache
    takes_positions: bool  # its forward takes positions
    # `generate` gives it positions, or it reads them from the mask. Otherwise it counts them itself, including padding.
    is_given_positions: bool
    takes_logits_to_keep: bool  # its forward can compute the last logits only
    reads: frozenset[str]  # what its prompts may hold beside text: "image", "video", "audio"
    crosses: bool  # it is an encoder-decoder. Everything else is then about its decoder.

    @property
    def is_rewindable(self) -> bool:
        """Whether the cache holds only keys and values, so that a smaller length restores any earlier prefix."""
        return not self.keeps

    @property
    def counts_padding(self) -> bool:
        """Whether padding takes positions."""
        return self.takes_positions and not self.is_given_positions

    @staticmethod
    def of(model: Any) -> Traits:
        """The traits of a model as it is now; of an adapter's wrapper, those of the model inside. The same object while neither
        its config nor its forward's signature changes."""
        model = unwrapped(model)
        model = model.whole if isinstance(model, Decoder) else model
        config = model.config.get_text_config(decoder=True)
        crosses = is_encoder_decoder(model)
        own_positions = "decoder_position_ids" if crosses else "position_ids"
        forward: dict[str, Any] = {
            "cache_argument": cache_argument(model),
            "takes_positions": takes(model, own_positions) or (crosses and position_embedding(model) is not None),
            "is_given_positions": generate_passes(model, own_positions)
            or (not crosses and takes(model, own_positions) and _counts_by_mask(model)),
            "takes_logits_to_keep": not crosses and takes(model, "logits_to_keep"),
        }
        key: Any = (type(model), attention_of(config), *forward.values(), *_values(config))
        found = _KNOWN.get(key)
        if found is None:
            if len(_KNOWN) >= _MOST:
                _KNOWN.clear()
            keeps, is_recurrent = _keeps(model, config)
            modalities = getattr(model, "input_modalities", "text")
            mixers = _mixers(model, config)
            masks = _masks(config, forward["takes_positions"], mixers is not None)
            copies = mixers is not None and not all(issubclass(kind, DeltaMixer) for kind in mixers)
            found = _KNOWN[key] = Traits(
                vocabulary=config.vocab_size,
                layers=getattr(config, "num_hidden_layers", 0),
                context=getattr(config, "max_position_embeddings", None)
                or getattr(config, "max_seq_len", None)  # MPT's
                or getattr(config, "max_target_positions", None)  # Whisper's
                or sys.maxsize,
                masks=replace(masks, trees=False) if copies else masks,
                column_masks=None if mixers is None or not masks.trees else masks,
                keeps=keeps,
                is_recurrent=is_recurrent,
                experts=experts_of(config),
                reads=frozenset([modalities] if isinstance(modalities, str) else modalities) - {"text"},
                crosses=crosses,
                **forward,
            )
        return found


def experts_of(config: Any) -> tuple[int, int] | None:
    """The experts of a layer, and how many of them a position chooses; None without a choice. config: of the decoder."""
    counts, choices = (
        [found for name in names if isinstance(found := getattr(config, name, None), int) and found > 0]
        for names in (_COUNTS, _CHOSEN)
    )
    return (counts[0], choices[0]) if counts and choices and choices[0] < counts[0] else None


def require_head(model: Any, role: str) -> None:
    """Raise ValueError unless a model can generate text. role: "target" or "draft", for the message."""
    if not model.can_generate():
        raise ValueError(
            f"{role}: {type(model).__name__} has no language-model head to generate with; load it with AutoModelForCausalLM"
        )


def require_verifiable_cache(model: Any) -> None:
    """Check that a target's cache holds keys and values, which slots can replace, and states of transformers' own kinds.

    Raises ValueError for other kinds of caches.
    """
    require_head(model, "target")
    if not Traits.of(model).is_recurrent:
        require_rewindable(model, "target")


def require_rewindable(model: Any, role: str) -> None:
    """Check that a model can discard tokens from its cache. role: "target" or "draft", for the message.

    Raises ValueError for recurrent states (Mamba, linear attention, hybrids) and other kinds of caches.
    """
    require_head(model, role)
    if keeps := Traits.of(model).keeps:
        raise ValueError(
            f"{role}: {type(model).__name__} keeps {', '.join(keeps)}, which cannot take back rejected tokens. A {role} of "
            "this kind can't go back to an earlier prefix; choose a pure attention model."
        )


def _keeps(model: Any, config: Any) -> tuple[tuple[str, ...], bool]:
    """What a model's cache holds that slots can't hold, and whether these are states in transformers' own cache layers."""
    if not has_default_cache(model):
        return (("a recurrent state" if is_stateful(model) else "a cache of its own kind",), False)
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - SLOTS
    is_recurrent = kinds <= STATES and not STATE_LAYERS.isdisjoint(_kinds(config))
    names = ["a recurrent state"] if is_stateful(model) else sorted(kind.__name__ for kind in kinds)
    return tuple(names), is_recurrent


def _mixers(model: Any, config: Any) -> set[type] | None:
    """The classes of modules that run all recurrent layers over columns; None if some layer can't, or if there is none."""
    found = by_position(model)
    layers = DynamicCache(config=config).layers if found else []
    stateful = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return {type(mixer) for mixer in found.values()} if found and len(found) == stateful else None


def _masks(config: Any, takes_positions: bool, by_columns: bool) -> Masks:
    kinds = _kinds(config)
    window = getattr(config, "sliding_window", None)
    if not kinds:
        kinds = {"full_attention" if window is None else "sliding_attention"}
    attention = attention_of(config)
    alibi = getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi"
    trees = (
        attention in ("sdpa", "eager")
        and not alibi
        and config.model_type not in ("bloom", "mpt", "gpt_neo")  # a bias, or causality, from the order of slots
        and (by_columns or kinds <= {"full_attention", "sliding_attention"})
        and getattr(config, "attention_chunk_size", None) is None
        and (takes_positions or by_columns)
    )
    if by_columns and len(kinds) > 1:  # some look for their masks under these names, whatever they call their layers
        kinds |= {"full_attention", "linear_attention"}
    windows = {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
    return Masks(trees=trees, windows=windows, additive=attention == "eager")


def _kinds(config: Any) -> set[str]:
    return {*(getattr(config, "layer_types", None) or ())}


def _values(config: Any) -> list[Hashable]:
    """The settings of a config that are numbers, texts or lists of these: all that the record depends on."""
    found: list[Hashable] = []
    for name, value in vars(config).items():
        if type(value) in _PLAIN:
            found += [name, value]
        elif isinstance(value, (list, tuple)) and all(type(part) in _PLAIN for part in value):
            found += [name, tuple(value)]
    return found


_BY_MASK: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()  # of decoders


@torch.no_grad()
def _counts_by_mask(model: Any) -> bool:
    """Whether a decoder that is given no positions counts them without padding, as OPT's does. Tried where what embeds them
    takes the mask."""
    decoder = model.get_decoder()
    kind = type(decoder)
    if kind not in _BY_MASK:
        embeds = (child for name, child in decoder.named_children() if "position" in name)
        _BY_MASK[kind] = any("attention_mask" in inspect.signature(child.forward).parameters for child in embeds)
        if _BY_MASK[kind]:
            ids = torch.arange(4, device=next(model.parameters()).device)[None]
            given: dict[str, Any] = {"attention_mask": (ids > 1).long(), "use_cache": False}
            own, other = (decoder(ids, **given, **more)[0] for more in ({}, {"position_ids": (ids - 2).clamp(min=0)}))
            _BY_MASK[kind] = torch.equal(own[:, -1], other[:, -1])
    return _BY_MASK[kind]


@dataclass(frozen=True)
class Change:
    """The position at which a model's rotary angles change."""

    position: int  # the first position with other angles than those before it
    once: bool  # the angles change only there; otherwise they change again at every later position

    def room(self, first: int) -> int | None:
        """How many positions, starting at `first`, a forward pass may cover; None for any number."""
        if first < self.position:
            return self.position - first
        return None if self.once else 1


def change_of(model: PreTrainedModel) -> Change | None:
    """Where the angles of a model change; None if they depend on the position alone. The rotary modules say so: what they
    compute need not be what the config says."""
    found: list[Change] = []
    for module in model.get_decoder().children():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer: dict[str | None, Any] = kinds if isinstance(kinds, dict) else {None: kinds}  # layer types may differ
        for layer, kind in by_layer.items():
            if kind == "longrope":
                parameters = module.config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                found.append(Change(parameters["original_max_position_embeddings"], once=True))
            elif isinstance(kind, str) and "dynamic" in kind:
                found.append(Change(module.original_max_seq_len, once=False))
    if not found:
        return None
    return Change(min(change.position for change in found), len(found) == 1 and found[0].once)


def turns_by_section(model: PreTrainedModel) -> bool:
    """Whether a model's angles come from three positions (m-rope): time, height and width, which are equal in text."""
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return "mrope_section" in parameters


def reads_anew_at(model: PreTrainedModel) -> int | None:
    """The text length at which `generate` drops the cache and reads the whole text again (Phi-3, when its angles change);
    None for models where it never does."""
    limit = getattr(model.config, "original_max_position_embeddings", None)
    prepare = "prepare_inputs_for_generation"
    codes = [inspect.unwrap(vars(kind)[prepare]).__code__ for kind in type(model).__mro__ if prepare in vars(kind)]
    asked = any("original_max_position_embeddings" in code.co_names for code in codes)
    return int(limit) + 1 if limit is not None and asked else None
