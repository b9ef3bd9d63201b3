"""The decoding loop: draft, one forward pass of the target, accept, commit. Supports ragged batches and token trees.

Uses the parts through their interfaces: drafters propose, the target verifies, a rule judges, the text stores the tokens.
"""

from __future__ import annotations

import torch

from .core.drafts import Draft, Round
from .core.host import Stopwatch, is_out_of_memory
from .core.report import Recorder
from .core.text import Text
from .distribution import Distribution
from .engine.runner import CachedModel
from .lengths.base import Length
from .lockstep import judge_in_lockstep
from .methods.shared.guarded import Guarded
from .verification import judge

CHECK_INVARIANTS = False  # enabled by tests: every round checks that slots and text agree


def decode(
    target: CachedModel,
    drafting: Guarded,
    text: Text,
    distribution: Distribution,
    length: Length,
    logits: torch.Tensor | None,
    recorder: Recorder,
) -> None:
    """Extend `text` until every row has ended.

    logits: [B, 1, V], the target's after the prompt; they verify an empty draft. None if each row's last token is unread.
    """
    in_lockstep = distribution.in_order or text.in_lockstep or (target.in_lockstep and text.rows > 1)
    rule = judge_in_lockstep if in_lockstep else judge
    earlier = 0 if logits is None else target.cache.known[0] - text.lengths[0]  # columns of a past, not in the text
    stopwatch, learning = Stopwatch(target.settings), 0.0  # learning: seconds, which the next draft counts as its own
    if logits is not None:
        rule(Draft.empty(text.rows, text.ids.device), logits, distribution, text, target.top1)
    while not text.done:
        unfinished = text.unfinished
        if not in_lockstep:
            target.run_only(unfinished)
        stopwatch.start(learning)
        room = target.room([text.lengths[row] + earlier for row in unfinished])
        budget = min(length.budget(unfinished), text.room - 1, room - 1)
        asked = drafting.drafting is not None and budget > 0
        draft = drafting.propose(text, budget)
        stopwatch.lap()
        draft, verified, logits = _verify(target, drafting, text, draft, in_lockstep)
        outcome = rule(verified, logits, distribution, text, target.top1, target.compute, target.mover)
        target.commit(outcome.kept, outcome.path, outcome.moved)
        stopwatch.lap()
        to_draft, to_verify = stopwatch.laps()
        round = Round(draft, logits, unfinished, asked, *outcome[:5], to_draft, to_verify, target.states, outcome.notes)
        drafting.observe(round)
        learning = stopwatch.since()
        recorder.see(round)
        length.observe(round)
        if CHECK_INVARIANTS:
            _check(target, text, earlier)


def _verify(
    target: CachedModel, drafting: Guarded, text: Text, draft: Draft, in_lockstep: bool
) -> tuple[Draft, Draft, torch.Tensor]:
    """One forward pass of the target over each row's last token and the draft. If there is no memory for it, it is repeated
    without a draft, and drafting stops.

    Returns the draft, the same with what rows that ended read in lockstep, and the logits.
    """
    try:
        return draft, *_forward(target, text, draft, in_lockstep)
    except Exception as error:
        if not target.is_repeatable or not is_out_of_memory(error) or not target.settings.ranks.may_go_on(error):
            raise
        reason = str(error).splitlines()[0]
        error.__traceback__ = None  # it keeps the tensors of the failed pass
    drafting.stop(f"The target ran out of memory ({reason}); continuing without drafts, slowly and with less memory.")
    target.save_memory()
    draft = Draft.empty(text.rows, text.ids.device)
    return draft, *_forward(target, text, draft, in_lockstep)


def _forward(target: CachedModel, text: Text, draft: Draft, in_lockstep: bool) -> tuple[Draft, torch.Tensor]:
    if in_lockstep and text.padded_rows:  # their KV includes the padding, as in autoregressive decoding
        draft = draft.with_chains(text.padded_rows, text.padding)
    return draft, target(torch.cat([text.last_tokens(), draft.tokens], 1), draft).to(text.ids.device)


def _check(target: CachedModel, text: Text, earlier: int) -> None:
    """Check that each row's slots hold the KV of all committed tokens except the last."""
    for row, (known, length) in enumerate(zip(target.cache.known, text.lengths, strict=True)):
        if known != earlier + length - 1:
            raise AssertionError(f"row {row}: the slots hold {known} of {earlier + length} tokens")
