"""Rotary embeddings whose angles depend on the length of the text, and how they limit passes over several tokens.

Such an embedding computes the angles of all positions in a forward pass from its last position. Autoregressive decoding
computes them for each position separately, so no forward pass may cover positions before and after a change of angles.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Change:
    """The position at which a model's rotary angles change.

    Args:
        position: the first position with other angles than those before it.
        once: the angles change only there; otherwise they change again at every later position.
    """

    position: int
    once: bool

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
