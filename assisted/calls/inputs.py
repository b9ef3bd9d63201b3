"""What a call is given: its settings, and what transformers' `generate` has prepared for its loop over tokens.
Knows nothing of how a call runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from .. import lengths
from .. import methods as drafters
from ..core.lossy import LossyTypical
from ..engine.cross import Encoded
from ..engine.libraries import CACHE, CACHE_NAMES, is_of_caller
from ..engine.pool import SessionPool, require_pool
from ..fast.graphs import require_mode
from ..methods import DraftModel, Spec


@dataclass(frozen=True)
class Settings:
    """The settings of a pair, or of one call."""

    spec: Spec  # the draft
    draft_length: lengths.DraftLength  # when to stop drafting
    # fast, exact: how forward passes run and how exactly, see `AssistedModelForCausalLM.from_pretrained`
    fast: str = "auto"
    exact: str | None = None
    sessions: SessionPool | None = None  # what earlier calls have read; None reads every prompt whole
    drafts: bool = True  # whether to draft
    lossy: LossyTypical | None = None  # a rule that accepts more than the target's distribution, for this call
    named: str | None = None  # what drafts, for the report, if the call has named it

    @classmethod
    def parsed(
        cls,
        draft: Any,
        draft_length: Any,
        draft_quantization: Any,
        draft_window: int | None,
        tokenizers: tuple[Any, Any],
        **further: Any,
    ) -> Settings:
        """Those that the arguments of `from_pretrained` or `from_models` say. tokenizers: the target's and the draft's, or
        None. further: `fast`, `exact`, `sessions`. Raises ValueError with the name of an argument that is not possible."""
        spec = drafters.parse(draft, draft_quantization, draft_window)
        for name, given in zip(("tokenizer", "draft_tokenizer"), tokenizers, strict=True):
            if given is not None and not hasattr(given, "get_vocab"):
                raise ValueError(f"{name}: {given!r} is not a tokenizer; pass AutoTokenizer.from_pretrained(...)")
        if tokenizers[1] is not None:
            if not isinstance(spec, DraftModel):
                raise ValueError(
                    f"draft_tokenizer: {type(spec).__name__} is not a single model with a tokenizer; leave it out, or, in a "
                    "list, write DraftModel(PATH, tokenizer=...)"
                )
            spec = replace(spec, tokenizer=tokenizers[1])
        return cls(spec, lengths.resolve(draft_length), **further).possible()

    @property
    def verifies(self) -> bool:
        """Whether the loop of this package runs: without drafts, too, bits are those of the same forward passes."""
        return self.drafts or self.exact is not None

    def possible(self) -> Settings:
        """The same. Raises ValueError with the name of a setting that is not possible."""
        require_mode(self.fast, self.exact)
        require_pool(self.sessions)
        return self

    def of_call(
        self,
        draft_length: Any,
        assisted: bool = True,
        lossy: LossyTypical | None = None,
        sessions: SessionPool | None = None,
        cache: Any = None,
    ) -> Settings:
        """Those of one call, whose arguments these are. cache: its `past_key_values`.

        Raises ValueError for settings that exclude each other.
        """
        if lossy is not None and not assisted:
            raise ValueError("lossy_typical: has no effect without drafts; leave it out, or pass assisted=True")
        pool = require_pool(self.sessions if sessions is None else sessions)
        if cache is not None and sessions is not None:
            raise ValueError(f"sessions: {CACHE} holds what has been read; pass one of the two")
        require_mode(self.fast, self.exact)
        if self.exact is not None and lossy is not None:
            raise ValueError("lossy_typical: is not possible with exact='bits'")
        policy = self.draft_length if draft_length is None else lengths.resolve(draft_length)
        pool = pool if cache is None else None
        return replace(self, draft_length=policy, sessions=pool, drafts=assisted, lossy=lossy)


class Setting:
    """An attribute of a pair that reads and replaces the field of this name in its `settings`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, pair: Any, owner: type) -> Any:
        return self if pair is None else getattr(pair.settings, self.name)

    def __set__(self, pair: Any, value: Any) -> None:
        pair.settings = replace(pair.settings, **{self.name: value})


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
        return self.kwargs[self.cache_name]

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
        return self.kwargs.get("inputs_embeds")

    @property
    def width(self) -> int:
        """How many columns the prompt has."""
        return self.ids.shape[1] if self.embeddings is None else self.embeddings.shape[1]

    @property
    def mask(self) -> torch.Tensor | None:
        """[B, any] int64, the attention mask, also of the past."""
        return self.kwargs.get("attention_mask")

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
