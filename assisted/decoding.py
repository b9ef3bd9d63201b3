"""The loop: draft, one target forward, accept, commit. Written for B rows with ragged acceptance and for token trees.

Knows the parts by their interfaces: drafters propose, the target verifies, acceptance judges, the text takes the tokens.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass

import torch

from . import acceptance
from .drafters.base import Drafting
from .drafts import Draft
from .host import on_device, padded
from .law import Law, probabilities
from .lengths import Length
from .report import Recorder
from .runtime import CachedModel
from .text import Text

__all__ = ["CHECK_INVARIANTS", "decode"]

_PACKAGE = __name__.split(".")[0]
CHECK_INVARIANTS = False  # tests switch it on: every round then checks that slots and text agree


def decode(
    target: CachedModel,
    drafting: Drafting | None,
    text: Text,
    law: Law,
    length: Length,
    logits: torch.Tensor,
    recorder: Recorder,
) -> None:
    """Extend `text` until every row has ended.

    logits: [B, 1, V], the target's after the prompt. They judge the empty draft, which yields the first token.
    """
    judge = _judge_in_step if law.in_order or text.in_step or (target.in_step and text.rows > 1) else _judge
    earlier = target.cache.known[0] - text.lengths[0]  # columns of a past that the text does not repeat
    judge(Draft.empty(text.rows, text.ids.device), logits, law, text)
    while not text.done:
        unfinished = text.unfinished
        if judge is _judge:
            target.run_only(unfinished)
        started, once = time.perf_counter(), target.spent_once()
        room = target.room([text.lengths[row] + earlier for row in unfinished])
        length.unfinished = unfinished
        budget = min(length.budget(), text.room - 1, room - 1)
        drafts = drafting is not None and budget > 0
        draft, drafting = _propose(drafting, text, budget, logits.shape[-1])
        drafted, once_drafted = time.perf_counter(), target.spent_once()
        proposed, used = draft, None
        if judge is _judge:
            used = [0 if ended else 1 + draft.width for ended in text.ended]
        elif text.padded_rows:  # the padding is read into their KV, as plain decoding reads it
            draft = draft.with_chains(text.padded_rows, text.padding)
        logits = target(torch.cat([text.last_tokens(), draft.tokens], 1), draft, used).to(text.ids.device)
        outcome = judge(draft, logits, law, text)
        target.commit(outcome.kept, outcome.path)
        # what a capture takes says nothing of what the next round will
        drafting_once, verifying_once = once_drafted - once, target.spent_once() - once_drafted
        seconds = (drafted - started - drafting_once, time.perf_counter() - drafted - verifying_once)
        drafting = _learn(drafting, proposed, logits, outcome.accepted)
        counts = [(outcome.drafted[row], outcome.accepted[row], outcome.kept[row]) for row in unfinished]
        recorder.round(counts, *seconds, drafts)
        length.observe(counts, *seconds)
        if CHECK_INVARIANTS:
            _check(target, text, earlier)


@dataclass(frozen=True)
class _Outcome:
    """What a round came to, by row: tokens drafted, accepted, committed; and the columns of the forward to keep, in order, at
    least as many, for a tree; None for chains (the first ones)."""

    drafted: list[int]
    accepted: list[int]
    kept: list[int]
    path: list[list[int]] | None = None


def _propose(drafting: Drafting | None, text: Text, budget: int, vocabulary: int) -> tuple[Draft, Drafting | None]:
    """The next draft. A drafter that fails costs speed, never the answer: the rest is decoded plainly.

    What drafters of other packages propose is checked: this package's own are tested, and looking at values waits for the
    device.
    """
    if drafting is not None and budget > 0:
        try:
            draft = drafting.propose(text, budget)
            if type(drafting).__module__.split(".")[0] != _PACKAGE:
                if not isinstance(draft, Draft):
                    raise TypeError(f"propose: a Draft is expected, got {type(draft).__name__}")
                draft = draft.checked(text.rows, vocabulary, text.ids.device)
            return draft, drafting
        except Exception as error:
            # The drafter is somebody's model on somebody's device: whatever it raises, the target can go on.
            _give_up(error)
            drafting = None
    return Draft.empty(text.rows, text.ids.device), drafting


def _learn(drafting: Drafting | None, draft: Draft, logits: torch.Tensor, accepted: list[int]) -> Drafting | None:
    """Tell the drafter what became of its draft; one that fails here is done with, too."""
    if drafting is not None:
        try:
            drafting.observe(draft, logits, accepted)
        except Exception as error:
            _give_up(error)
            drafting = None
    return drafting


def _give_up(error: Exception) -> None:
    warnings.warn(f"Drafting failed ({type(error).__name__}: {error}); decoding plainly.", stacklevel=3)


def _judge(draft: Draft, logits: torch.Tensor, law: Law, text: Text) -> _Outcome:
    """Accept and commit, every row on its own."""
    plain = not law.processors and not law.do_sample and not text.keep_scores
    scores = logits if plain else law.scores(text.ids, text.lengths, logits, draft, text.unfinished)
    tokens, lengths, parents, width = draft.tokens, draft.lengths, draft.parents, draft.width
    nodes = verdict = None
    if law.lossy is not None:
        nodes, verdict = law.lossy.judge(draft, probabilities(scores))
    elif law.do_sample and draft.q is not None:
        p = probabilities(scores)
        if parents is None:
            verdict = acceptance.block(tokens, lengths, p, draft.q)
        else:
            nodes, verdict = acceptance.rejection_tree(tokens, parents, lengths, p, draft.q)
    else:
        choice = acceptance.sample(probabilities(scores)) if law.do_sample else scores.argmax(-1)
    if verdict is None:
        told = [choice] if parents is None else [choice, parents]
    else:
        told = [verdict.accepted[:, None], verdict.token[:, None], *([] if nodes is None else [nodes])]
    # whatever the rule, the only transfer to the host of a round
    rows = torch.cat([lengths[:, None], tokens, *told], 1).tolist()
    new, path = [], []
    for count, *row in rows:
        drafted, about = row[:width], row[width:]
        if verdict is not None:
            accepted, token, *order = about
            walk = (order or range(width))[:accepted]
        elif parents is not None:
            walk, token = acceptance.match_tree(drafted[:count], about[width + 1 :][:count], about)
        else:
            walk, token = acceptance.match(drafted[:count], about)
        new.append([*(drafted[node] for node in walk), token])
        path.append([0, *(node + 1 for node in walk)])  # column 0 holds the last committed token
    if parents is not None and (text.keep_scores or text.keep_logits):
        index = padded(path, logits.device)[:, :, None].expand(-1, -1, logits.shape[-1])
        scores, logits = scores.gather(1, index), logits.gather(1, index)
    kept = text.extend(new, scores, logits)
    # a row that has ended takes nothing; one that ends in mid-draft takes no more than was kept
    accepted = [min(len(tokens) - 1, count) for tokens, count in zip(new, kept, strict=True)]
    return _Outcome([row[0] for row in rows], accepted, kept, None if parents is None else path)


def _judge_in_step(draft: Draft, logits: torch.Tensor, law: Law, text: Text) -> _Outcome:
    """Accept and commit a token at a time, all rows together, for as long as every row agrees with its draft.

    Processors, criteria and streamers see what plain decoding shows them: each committed prefix once, in order. Exact
    for any of them; a batch accepts what its least lucky row accepts. Rows that have ended follow their chain of padding; a
    row that ends here ends the block, since what was drafted after its end is no padding.
    """
    rows, before = text.rows, text.padded_rows
    every = torch.arange(rows, device=logits.device)
    padded = on_device([row in before for row in range(rows)], logits.device) if before else None
    accepted = [0] * rows
    column = torch.zeros_like(draft.lengths)  # of the forward, that each row has come to
    on_host = [0] * rows
    steps = []  # the columns that they came by
    for step in range(draft.width + 1):
        ids = text.ids[:, : text.lengths[0]]
        after = logits[every, column]
        scores = law.ordered_scores(ids, after)
        token, child = _choose(scores, draft, column, law.do_sample)
        if padded is not None:
            child = child.masked_fill(padded, step + 1)
        children = child.tolist()
        text.extend_in_step(token, scores, after.float())
        steps.append(on_host)
        column, on_host = child, children
        accepted = [count + int(node > 0) for count, node in zip(accepted, children, strict=True)]
        if text.done or not all(children) or text.padded_rows != before:
            break
    for row in before:
        accepted[row] = 0
    path = None if draft.parents is None else [list(columns) for columns in zip(*steps, strict=True)]
    return _Outcome(draft.lengths.tolist(), accepted, [len(steps)] * rows, path)


def _choose(
    scores: torch.Tensor, draft: Draft, column: torch.Tensor, do_sample: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token that follows, [B] int64, and the column of the drafted node that holds it, 0 where none does.

    scores: [B, V]; column: [B] int64, where the last token before it stands.
    """
    width = draft.width
    above = torch.arange(width, device=column.device) if draft.parents is None else draft.parents + 1
    is_next = above == column[:, None]
    if not do_sample or draft.q is None:
        choice = acceptance.sample(probabilities(scores)) if do_sample else scores.argmax(-1)
        drafted = torch.arange(width, device=column.device) < draft.lengths[:, None]
        held = is_next & drafted & (draft.tokens == choice[:, None])
        # of twins the first, and column 0 where none holds it
        return choice, torch.nn.functional.pad(held.int(), (1, 0)).argmax(1)
    # these are a tree of depth 1; no other node can be reached, nor does it hold a token
    tokens, parents = draft.tokens.where(is_next, -1), torch.where(is_next, -1, width)
    p = probabilities(scores)[:, None].expand(-1, width + 1, -1)
    path, verdict = acceptance.rejection_tree(tokens, parents, draft.lengths, p, draft.q)
    child = torch.nn.functional.pad(path + 1, (0, 1))[:, 0]
    token = torch.nn.functional.pad(tokens, (1, 0)).gather(1, child[:, None])[:, 0]
    return torch.where(child > 0, token, verdict.token), child


def _check(target: CachedModel, text: Text, earlier: int) -> None:
    """Per row: the slots hold the KV of all committed tokens but the last."""
    for row, (known, length) in enumerate(zip(target.cache.known, text.lengths, strict=True)):
        if known != earlier + length - 1:
            raise AssertionError(f"row {row}: the slots hold {known} of {earlier + length} tokens")
