"""The decoding loop: draft, one forward pass of the target, accept, commit. Supports ragged batches and token trees.

Uses the parts through their interfaces: drafters propose, the target verifies, a rule judges, the text stores the tokens.
"""

from __future__ import annotations

import time
import warnings

import torch

from .distribution import Distribution
from .drafters.base import Drafting
from .drafts import Draft, DraftingStopped, Round
from .engine.host import is_out_of_memory
from .engine.ranks import Ranks, fingerprint
from .engine.runner import CachedModel, CallSettings
from .lengths.base import Length
from .report import Recorder
from .text import Text
from .verification import judge, judge_in_lockstep

_PACKAGE = __name__.split(".")[0]
CHECK_INVARIANTS = False  # enabled by tests: every round checks that slots and text agree


def decode(
    target: CachedModel,
    drafting: Drafting | None,
    text: Text,
    distribution: Distribution,
    length: Length,
    logits: torch.Tensor,
    recorder: Recorder,
) -> Drafting | None:
    """Extend `text` until every row has ended. Returns the drafting; None if it has failed.

    logits: [B, 1, V], the target's after the prompt. They verify an empty draft, which yields the first token.
    """
    in_lockstep = distribution.in_order or text.in_lockstep or (target.in_lockstep and text.rows > 1)
    rule = judge_in_lockstep if in_lockstep else judge
    earlier = target.cache.known[0] - text.lengths[0]  # columns of a past that the text does not contain
    stopwatch, ranks = Stopwatch(target.settings), target.settings.ranks
    agreed = list(text.lengths)  # tokens of each row that all processes have
    rule(Draft.empty(text.rows, text.ids.device), logits, distribution, text)
    while not text.done:
        unfinished = text.unfinished
        if not in_lockstep:
            target.run_only(unfinished)
        stopwatch.start()
        room = target.room([text.lengths[row] + earlier for row in unfinished])
        budget = min(length.budget(unfinished), text.room - 1, room - 1)
        asked = drafting is not None and budget > 0
        draft, drafting = _propose(drafting, text, budget, logits.shape[-1], ranks)
        if ranks.several:
            draft, drafting = _agree(ranks, draft, drafting, text, agreed, distribution.do_sample)
            agreed = list(text.lengths)
        draft_seconds = stopwatch.lap()
        failed: Exception | None = None
        try:
            verified, logits = _verify(target, text, draft, in_lockstep)
        except Exception as error:
            if not target.is_repeatable or not is_out_of_memory(error) or not ranks.may_go_on(error):
                raise
            failed = error
        if failed is not None:  # outside of the handler, whose traceback keeps the failed pass's tensors
            _save_memory(target, failed)
            draft, drafting = Draft.empty(text.rows, text.ids.device), None
            verified, logits = _verify(target, text, draft, in_lockstep)
        outcome = rule(verified, logits, distribution, text)
        target.commit(outcome.kept, outcome.path)
        became = (outcome.drafted, outcome.depths, outcome.accepted, outcome.kept, outcome.path)
        draft_seconds, seconds = ranks.largest([draft_seconds, stopwatch.lap()])
        round = Round(draft, logits, unfinished, asked, *became, draft_seconds, seconds, target.states)
        drafting = _learn(drafting, round)
        recorder.see(round)
        length.observe(round)
        if CHECK_INVARIANTS:
            _check(target, text, earlier)
    return drafting


def _verify(target: CachedModel, text: Text, draft: Draft, in_lockstep: bool) -> tuple[Draft, torch.Tensor]:
    """One forward pass of the target over each row's last token and the draft. Returns what was verified, and the logits."""
    verified, used = draft, None
    if not in_lockstep:
        used = [0 if ended else 1 + draft.width for ended in text.ended]
    elif text.padded_rows:  # their KV includes the padding, as in autoregressive decoding
        verified = draft.with_chains(text.padded_rows, text.padding)
    return verified, target(torch.cat([text.last_tokens(), verified.tokens], 1), verified, used).to(text.ids.device)


def _save_memory(target: CachedModel, error: Exception) -> None:
    """Prepare a target that ran out of memory to run again, without drafts."""
    warnings.warn(
        f"The target ran out of memory ({str(error).splitlines()[0]}); continuing without drafts, slowly and with less memory.",
        DraftingStopped,
        stacklevel=3,
    )
    error.__traceback__ = None
    target.save_memory()


class Stopwatch:
    """Times steps without one-time work, which does not predict how long later steps take.

    settings: those of the call; they count the seconds of one-time work.
    """

    def __init__(self, settings: CallSettings):
        self.settings = settings
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.began = time.perf_counter() - self.settings.spent_once

    def lap(self) -> float:
        """End the step and return its seconds; begin another one."""
        before = self.began
        self.start()
        return self.began - before


def _propose(
    drafting: Drafting | None, text: Text, budget: int, vocabulary: int, ranks: Ranks
) -> tuple[Draft, Drafting | None]:
    """The next draft. A drafter that fails costs only speed: decoding continues without drafts.

    Drafts of other packages' drafters are checked. This package's own drafters are tested instead, because reading values waits
    for the device.
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
            if not ranks.may_go_on(error):
                raise
            # Drafters run third-party models on any device; whatever they raise, the target can continue.
            _give_up(error)
            drafting = None
    return Draft.empty(text.rows, text.ids.device), drafting


def _agree(
    ranks: Ranks, draft: Draft, drafting: Drafting | None, text: Text, agreed: list[int], do_sample: bool
) -> tuple[Draft, Drafting | None]:
    """The draft, if all processes have the same one; otherwise none, as their forward passes of the target must match.

    Drafts of a model that each process holds whole can differ by rounding. agreed: lengths of the rows at the last call.

    Raises RuntimeError if the processes have different texts.
    """
    of_text = fingerprint(text.lengths, text.ended, text.since(agreed) if agreed != text.lengths else ())
    parents = None if draft.parents is None else draft.parents.tolist()
    of_draft = fingerprint(draft.tokens.tolist(), draft.lengths.tolist(), parents, draft.q is None, draft.member)
    same_text, same_draft, same_state = ranks.agree(of_text, of_draft, int(drafting is None))
    if not same_text:
        raise RuntimeError(
            "the processes among which the target is divided have written different texts; give them the same prompt, "
            "arguments, logits processors and stopping criteria"
        )
    if not same_state and drafting is not None:
        warnings.warn("Drafting failed in another process; continuing without drafts.", DraftingStopped, stacklevel=3)
        drafting = None
    if same_draft:
        return draft, drafting
    if do_sample:  # they may have drawn different numbers of tokens
        ranks.share_generator(text.ids.device)
    return Draft.empty(text.rows, text.ids.device), drafting


def _is_own(drafting: Drafting) -> bool:
    """Whether a drafter and all its parts belong to this package."""
    return type(drafting).__module__.split(".")[0] == _PACKAGE and all(map(_is_own, drafting.parts()))


def _learn(drafting: Drafting | None, round: Round) -> Drafting | None:
    """Pass the round to the drafter. If it fails here, it is dropped, too."""
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
    """Check that each row's slots hold the KV of all committed tokens except the last."""
    for row, (known, length) in enumerate(zip(target.cache.known, text.lengths, strict=True)):
        if known != earlier + length - 1:
            raise AssertionError(f"row {row}: the slots hold {known} of {earlier + length} tokens")
