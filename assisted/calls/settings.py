"""How a pair decodes: what loading chooses, what may be set on the pair, and what one call changes, in one object."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .. import lengths
from .. import methods as drafters
from ..core.acceptance import LossyTypical
from ..engine.libraries import CACHE
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
