"""The loop: draft, one forward pass of the target, accept, commit. For batches with ragged acceptance, and for token trees.

Knows the parts by their interfaces: drafters propose, the target verifies, a rule judges, the text takes the tokens.
"""

from __future__ import annotations

import time
import warnings

import torch

from .distribution import Distribution
from .drafters.base import Drafting
from .drafts import Draft, DraftingStopped, Round
from .engine.runner import CachedModel, CallSettings
from .lengths.base import Length
from .report import Recorder
from .text import Text
from .verification import judge, judge_in_lockstep

__all__ = ["CHECK_INVARIANTS", "decode"]

_PACKAGE = __name__.split(".")[0]
CHECK_INVARIANTS = False  # tests switch it on: every round then checks that slots and text agree


def decode(
    target: CachedModel,
    drafting: Drafting | None,
    text: Text,
    distribution: Distribution,
    length: Length,
    logits: torch.Tensor,
    recorder: Recorder,
) -> None:
    """Extend `text` until every row has ended.

    logits: [B, 1, V], the target's after the prompt. They judge the empty draft, which yields the first token.
    """
    in_lockstep = distribution.in_order or text.in_lockstep or (target.in_lockstep and text.rows > 1)
    rule = judge_in_lockstep if in_lockstep else judge
    earlier = target.cache.known[0] - text.lengths[0]  # columns of a past that the text does not repeat
    stopwatch = Stopwatch(target.settings)
    rule(Draft.empty(text.rows, text.ids.device), logits, distribution, text)
    while not text.done:
        unfinished = text.unfinished
        if not in_lockstep:
            target.run_only(unfinished)
        stopwatch.start()
        room = target.room([text.lengths[row] + earlier for row in unfinished])
        budget = min(length.budget(unfinished), text.room - 1, room - 1)
        asked = drafting is not None and budget > 0
        draft, drafting = _propose(drafting, text, budget, logits.shape[-1])
        draft_seconds = stopwatch.lap()
        verified, used = draft, None
        if not in_lockstep:
            used = [0 if ended else 1 + draft.width for ended in text.ended]
        elif text.padded_rows:  # the padding is read into their KV, as plain decoding reads it
            verified = draft.with_chains(text.padded_rows, text.padding)
        logits = target(torch.cat([text.last_tokens(), verified.tokens], 1), verified, used).to(text.ids.device)
        outcome = rule(verified, logits, distribution, text)
        target.commit(outcome.kept, outcome.path)
        became = (outcome.drafted, outcome.depths, outcome.accepted, outcome.kept, outcome.path)
        round = Round(draft, logits, unfinished, asked, *became, draft_seconds, stopwatch.lap())
        drafting = _learn(drafting, round)
        recorder.see(round)
        length.observe(round)
        if CHECK_INVARIANTS:
            _check(target, text, earlier)


class Stopwatch:
    """What steps take, without what was spent in them once and for all: that says nothing of what the next one will take.

    settings: of the call, which count the seconds of the latter kind.
    """

    def __init__(self, settings: CallSettings):
        self.settings = settings
        self.start()

    def start(self) -> None:
        """A step begins."""
        self.began = time.perf_counter() - self.settings.spent_once

    def lap(self) -> float:
        """Seconds of the step that ends here; another one begins."""
        before = self.began
        self.start()
        return self.began - before


def _propose(drafting: Drafting | None, text: Text, budget: int, vocabulary: int) -> tuple[Draft, Drafting | None]:
    """The next draft. A drafter that fails costs speed, never the answer: the rest is decoded without drafts.

    What drafters of other packages propose is checked: this package's own are tested, and looking at values waits for the
    device.
    """
    if drafting is not None and budget > 0:
        try:
            draft = drafting.propose(text, budget)
            if not _is_own(drafting):
                if not isinstance(draft, Draft):
                    raise TypeError(f"propose: a Draft is expected, got {type(draft).__name__}")
                draft = draft.checked(text.rows, vocabulary, text.ids.device)
            return draft, drafting
        except Exception as error:
            # The drafter is somebody's model on somebody's device: whatever it raises, the target can go on.
            _give_up(error)
            drafting = None
    return Draft.empty(text.rows, text.ids.device), drafting


def _is_own(drafting: Drafting) -> bool:
    """Whether a drafter is this package's, with all that it is made of."""
    return type(drafting).__module__.split(".")[0] == _PACKAGE and all(map(_is_own, drafting.parts()))


def _learn(drafting: Drafting | None, round: Round) -> Drafting | None:
    """Tell the drafter what became of its draft; one that fails here is done with, too."""
    if drafting is not None:
        try:
            drafting.observe(round)
        except Exception as error:
            _give_up(error)
            drafting = None
    return drafting


def _give_up(error: Exception) -> None:
    warnings.warn(
        f"Drafting failed ({type(error).__name__}: {error}); continuing without drafts.", DraftingStopped, stacklevel=3
    )


def _check(target: CachedModel, text: Text, earlier: int) -> None:
    """Per row: the slots hold the KV of all committed tokens but the last."""
    for row, (known, length) in enumerate(zip(target.cache.known, text.lengths, strict=True)):
        if known != earlier + length - 1:
            raise AssertionError(f"row {row}: the slots hold {known} of {earlier + length} tokens")
