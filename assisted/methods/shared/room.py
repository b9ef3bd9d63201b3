"""What `assisted plan` asks a method: the memory that a call with it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Room:
    """A call whose memory is counted, from shapes alone (`assisted plan`).

    Args:
        target: on the meta device.
        dtype: that the models compute in.
        tokens: for which keys and values are kept, of all rows together.
        per_token: numbers that the target's layers keep for a token, each of them.
        of_model: counts a causal LM of the draft's own, loaded in this quantization and with this window: bytes by part.
        within: `tokens` of a draft with this `draft_window`, or None.
        path: the folder or Hub id of the target's files; None if only its config is known.
        states: bytes of the target's recurrent states, without copies.
    """

    target: PreTrainedModel
    dtype: torch.dtype
    tokens: int
    per_token: tuple[int, ...]
    of_model: Callable[..., dict[str, int]]
    within: Callable[[int | None], int]
    path: str | None = None
    states: int = 0
