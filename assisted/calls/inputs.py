"""What transformers' `generate` prepared for its loop over tokens. Knows its arguments; knows nothing of how a call runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from ..engine.cross import Encoded
from ..engine.libraries import CACHE_NAMES, is_of_caller

_CONSTANTS = (bool, int, float, str)
_TEXT = {"input_ids", "inputs_embeds", "attention_mask", "logits_to_keep", "use_cache", "position_ids", *CACHE_NAMES}


def beside_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` that are neither text nor constants: pictures, sounds and what describes them."""

    def is_nothing(value: Any) -> bool:
        # {}: for a model that reads images too, generate prepares their features, and finds none in text
        return value is None or isinstance(value, _CONSTANTS) or (isinstance(value, dict) and not value)

    return {name: value for name, value in kwargs.items() if name not in _TEXT and not is_nothing(value)}


@dataclass(frozen=True)
class LoopInputs:
    """The inputs of a loop over tokens."""

    model: Any  # the target without an adapter's wrapper
    ids: torch.Tensor  # [B, P] int64, the prompt, which is empty beside `inputs_embeds`
    # processors, criteria: lists of transformers' logits processors and stopping criteria
    processors: Any
    criteria: Any
    config: GenerationConfig  # the settings of the call
    # arguments of the model's forward, with the cache. Of an encoder-decoder, those of its decoder.
    kwargs: dict[str, Any]
    encoded: Encoded | None = None  # of an encoder-decoder, what its encoder has read

    @property
    def cache_name(self) -> str:
        """The argument in which `generate` passes the cache of this model."""
        return next((name for name in CACHE_NAMES if self.kwargs.get(name) is not None), CACHE_NAMES[0])

    @property
    def cache(self) -> DynamicCache | StaticCache:
        """The caller's cache, or the one that transformers made. Of an encoder-decoder, that of its self-attention."""
        found: DynamicCache | StaticCache = self.kwargs[self.cache_name]
        return found

    @cached_property
    def returns_cache(self) -> bool:
        """Whether the caller gets the KV, including that of the prompt's padding."""
        given = self.cache if self.encoded is None else self.encoded.cache
        return bool(self.config.return_dict_in_generate) or is_of_caller(given)

    @property
    def known(self) -> int:
        """How many tokens the cache holds."""
        past = self.kwargs.get(self.cache_name)
        return 0 if past is None else int(past.get_seq_length())

    @property
    def embeddings(self) -> torch.Tensor | None:
        """[B, P, D], of a prompt whose ids may also be in the text."""
        found: torch.Tensor | None = self.kwargs.get("inputs_embeds")
        return found

    @property
    def width(self) -> int:
        """How many columns the prompt has."""
        return self.ids.shape[1] if self.embeddings is None else self.embeddings.shape[1]

    @property
    def mask(self) -> torch.Tensor | None:
        """[B, any] int64, the attention mask, also of the past."""
        found: torch.Tensor | None = self.kwargs.get("attention_mask")
        return found

    @property
    def own_mask(self) -> torch.Tensor | None:
        """[B, P] int64, the part of the attention mask that belongs to the prompt's ids; None if there is none."""
        before = -1 if self.mask is None else self.mask.shape[1] - self.ids.shape[1]
        return None if self.mask is None or before < 0 else self.mask[:, before:]

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments for the model's own forward that do not depend on the position, for every forward pass."""
        return {n: value for n, value in self.kwargs.items() if n not in _TEXT and isinstance(value, _CONSTANTS)}

    @property
    def beside(self) -> dict[str, Any]:
        """See `beside_text`."""
        return beside_text(self.kwargs)
