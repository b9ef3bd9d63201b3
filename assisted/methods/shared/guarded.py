"""Drafting that can't harm a call: a drafter that fails costs only speed, and processes that share a target draft alike.

Knows drafters by their interface, and the processes; nothing of models or of how a draft is verified.
"""

from __future__ import annotations

from ...core.drafts import Draft, Round
from ...core.text import Text
from ...engine.prepared import CallSettings
from ...engine.ranks import fingerprint
from .base import Drafting

_PACKAGE = __name__.split(".")[0]


def guard(drafting: Drafting | None, settings: CallSettings, vocabulary: int, text: Text, do_sample: bool) -> Guarded:
    """The drafting of a call, as the loop uses it; None proposes nothing.

    vocabulary: number of the target's logits. text: the prompt.
    """
    if settings.ranks.several:
        return Agreed(drafting, settings, vocabulary, text, do_sample)
    return Guarded(drafting, settings, vocabulary)


class Guarded(Drafting):
    """Another drafting, which is dropped if it fails; from then on, nothing is proposed.

    Drafts of other packages' drafters are checked. This package's own drafters are tested instead, because reading values waits
    for the device.

    Args:
        drafting: the drafting.
        settings: those of the call.
        vocabulary: number of the target's logits.

    Attributes:
        drafting: None once it has failed.
    """

    def __init__(self, drafting: Drafting | None, settings: CallSettings, vocabulary: int):
        self.drafting = drafting
        self.settings, self.vocabulary = settings, vocabulary

    def propose(self, text: Text, budget: int) -> Draft:
        """As `Drafting.propose`; also called with a budget below 1, which asks for no draft."""
        if self.drafting is not None and budget > 0:
            try:
                draft = self.drafting.propose(text, budget)
                if _is_own(self.drafting):
                    _require_size(draft, self.vocabulary)
                    return draft
                if not isinstance(draft, Draft):
                    raise TypeError(f"propose: a Draft is expected, got {type(draft).__name__}")
                return draft.checked(text.rows, self.vocabulary, text.ids.device)
            except Exception as error:
                if not self.settings.ranks.may_go_on(error):
                    raise
                # Drafters run third-party models on any device; whatever they raise, the target can continue.
                self._fail(error)
        return Draft.empty(text.rows, text.ids.device)

    def observe(self, round: Round) -> None:
        if self.drafting is not None:
            try:
                self.drafting.observe(round)
            except Exception as error:
                self._fail(error)

    def stop(self, reason: str) -> None:
        """Propose nothing any more. reason: for the caller."""
        self.drafting = None
        self.settings.warn(reason)

    def _fail(self, error: Exception) -> None:
        self.stop(f"Drafting failed ({type(error).__name__}: {error}); continuing without drafts.")


class Agreed(Guarded):
    """The same in each of the processes that hold parts of the target. They propose only what all of them propose, as their
    forward passes of the target must match: drafts of a model that each process holds whole can differ by rounding.

    Args:
        text: the prompt.
        do_sample: whether tokens are drawn, for which all processes need the same random numbers.
    """

    def __init__(self, drafting: Drafting | None, settings: CallSettings, vocabulary: int, text: Text, do_sample: bool):
        super().__init__(drafting, settings, vocabulary)
        self.do_sample = do_sample
        self.agreed = list(text.lengths)  # tokens of each row that all processes have

    def propose(self, text: Text, budget: int) -> Draft:
        """As `Guarded.propose`. Raises RuntimeError if the processes have different texts."""
        draft = super().propose(text, budget)
        ranks, new = self.settings.ranks, text.since(self.agreed) if self.agreed != text.lengths else ()
        parents = None if draft.parents is None else draft.parents.tolist()
        same_text, same_draft, same_state = ranks.agree(
            fingerprint(text.lengths, text.ended, new),
            fingerprint(draft.tokens.tolist(), draft.lengths.tolist(), parents, draft.q is None, draft.member),
            int(self.drafting is None),
        )
        if not same_text:
            raise RuntimeError(
                "the processes among which the target is divided have written different texts; give them the same prompt, "
                "arguments, logits processors and stopping criteria"
            )
        self.agreed = list(text.lengths)
        if not same_state and self.drafting is not None:
            self.stop("Drafting failed in another process; continuing without drafts.")
        if same_draft:
            return draft
        if self.do_sample:  # they may have drawn different numbers of tokens
            ranks.share_generator(text.ids.device)
        return Draft.empty(text.rows, text.ids.device)


def _require_size(draft: Draft, vocabulary: int) -> None:
    """Raise ValueError for the draft of a head that was loaded before the target's embeddings were resized."""
    if draft.q is not None and draft.q.shape[-1] != vocabulary:
        raise ValueError(
            f"draft: its distributions are of {draft.q.shape[-1]} tokens, the target's of {vocabulary}; load one of that size"
        )


def _is_own(drafting: Drafting) -> bool:
    """Whether a drafter and all its parts belong to this package."""
    return type(drafting).__module__.split(".")[0] == _PACKAGE and all(map(_is_own, drafting.parts()))
