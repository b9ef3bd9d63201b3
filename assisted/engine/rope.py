"""Rotary embeddings whose angles depend on the length of the text, and how they limit passes over several tokens.

Such an embedding computes the angles of all positions in a forward pass from its last position. Autoregressive decoding
computes them for each position separately, so no forward pass may cover positions before and after a change of angles.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

__all__ = ["Change", "change_of", "reads_anew_at"]


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
    """Where the angles of a model change; None if they depend on the position alone."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]  # in models that mix layer types
    found = [change for kind in (parameters, *by_layer) if (change := _change(kind, config)) is not None]
    if not found:
        return None
    return Change(min(change.position for change in found), len(found) == 1 and found[0].once)


def _change(parameters: dict[str, Any], config: Any) -> Change | None:
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":
        return Change(parameters["original_max_position_embeddings"], once=True)
    return Change(config.max_position_embeddings, once=False) if "dynamic" in kind else None


def reads_anew_at(model: PreTrainedModel) -> int | None:
    """The text length at which `generate` drops the cache and reads the whole text again (Phi-3, when its angles change);
    None for models where it never does."""
    limit = getattr(model.config, "original_max_position_embeddings", None)
    prepare = "prepare_inputs_for_generation"
    codes = [inspect.unwrap(vars(kind)[prepare]).__code__ for kind in type(model).__mro__ if prepare in vars(kind)]
    asked = any("original_max_position_embeddings" in code.co_names for code in codes)
    return int(limit) + 1 if limit is not None and asked else None
