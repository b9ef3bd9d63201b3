"""Rotary embeddings whose angles depend on how long the text has become, and what that means for passes over several tokens.

Such an embedding turns all positions of a pass in the way of the pass's last one. Autoregressive decoding turns each position
in its own way, so no pass may cover positions on both sides of a change. Knows transformers' configs; nothing of slots.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

__all__ = ["Change", "change_of", "reads_anew_at"]


@dataclass(frozen=True)
class Change:
    """Where a model's angles change.

    Args:
        position: the first position that is turned in another way than those before it.
        once: it is the only one; otherwise angles change with every further position.
    """

    position: int
    once: bool

    def room(self, first: int) -> int | None:
        """How many positions, from `first` on, a pass may cover; None for any number."""
        if first < self.position:
            return self.position - first
        return None if self.once else 1


def change_of(model: PreTrainedModel) -> Change | None:
    """Where the angles of a model change; None where they depend on the position alone."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]  # of models that mix layer types
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
    """The length of a text from which on `generate` drops the cache of a shorter one, and has the model read all of it anew
    (Phi-3's, where its angles change); None for models that never do."""
    limit = getattr(model.config, "original_max_position_embeddings", None)
    prepare = "prepare_inputs_for_generation"
    codes = [inspect.unwrap(vars(kind)[prepare]).__code__ for kind in type(model).__mro__ if prepare in vars(kind)]
    asked = any("original_max_position_embeddings" in code.co_names for code in codes)
    return int(limit) + 1 if limit is not None and asked else None
