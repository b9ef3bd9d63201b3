"""Verification of a draft: choose the acceptance rule (greedy or sampling, chain or tree, per row or in lockstep), apply it.

Knows the distribution, the acceptance rules and the text; nothing of models or of how a draft was made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import acceptance
from .distribution import Distribution, probabilities
from .drafts import Draft, levels
from .engine.host import on_device, padded
from .text import Text

__all__ = ["Outcome", "judge", "judge_in_lockstep"]


@dataclass(frozen=True)
class Outcome:
    """The result of verifying a draft, per row. The fields are those of `Round`."""

    drafted: list[int]
    depths: list[int]
    accepted: list[int]
    kept: list[int]
    path: list[list[int]] | None = None


def judge(draft: Draft, logits: torch.Tensor, distribution: Distribution, text: Text) -> Outcome:
    """Accept drafted tokens and commit them, each row independently. logits: [B, n + 1, V], see `Round`."""
    plain = not distribution.processors and not distribution.do_sample and not text.keep_scores
    scores = logits if plain else distribution.scores(text.ids, text.lengths, logits, draft, text.unfinished)
    tokens, lengths, parents, width = draft.tokens, draft.lengths, draft.parents, draft.width
    nodes = verdict = None
    if distribution.lossy is not None:
        nodes, verdict = distribution.lossy.judge(draft, probabilities(scores))
    elif distribution.do_sample and draft.q is not None:
        p = probabilities(scores)
        if parents is None:
            verdict = acceptance.block(tokens, lengths, p, draft.q)
        else:
            nodes, verdict = acceptance.rejection_tree(tokens, parents, lengths, p, draft.q)
    else:
        choice = acceptance.sample(probabilities(scores)) if distribution.do_sample else acceptance.top1(scores)
    if verdict is None:
        results = [choice]
    else:
        results = [verdict.accepted[:, None], verdict.token[:, None], *([] if nodes is None else [nodes])]
    # the only device-to-host transfer of a round
    rows = torch.cat([lengths[:, None], tokens, *([] if parents is None else [parents]), *results], 1).tolist()
    new, path, depths = [], [], []
    for count, *row in rows:
        drafted, above, about = row[:count], row[width:][:count], row[width if parents is None else 2 * width :]
        if verdict is not None:
            accepted, token, *order = about
            walk = (order or range(width))[:accepted]
        elif parents is not None:
            walk, token = acceptance.match_tree(drafted, above, about)
        else:
            walk, token = acceptance.match(drafted, about)
        new.append([*(drafted[node] for node in walk), token])
        path.append([0, *(node + 1 for node in walk)])  # column 0 holds the last committed token
        depths.append(count if parents is None else levels(above))
    if parents is not None and (text.keep_scores or text.keep_logits):
        index = padded(path, logits.device)[:, :, None].expand(-1, -1, logits.shape[-1])
        scores, logits = scores.gather(1, index), logits.gather(1, index)
    kept = text.extend(new, scores, logits)
    # rows that had ended commit nothing; a row that ends within its draft commits only the tokens up to there
    accepted = [min(len(tokens) - 1, count) for tokens, count in zip(new, kept, strict=True)]
    return Outcome([row[0] for row in rows], depths, accepted, kept, None if parents is None else path)


def judge_in_lockstep(draft: Draft, logits: torch.Tensor, distribution: Distribution, text: Text) -> Outcome:
    """Accept and commit one token at a time, all rows together, as long as every row accepts its draft.

    Logits processors, stopping criteria and streamers see what autoregressive decoding shows them: each committed prefix
    once, in order. So the result is exact for any of them, but the row that accepts least limits the batch. Rows that had
    ended follow their chain of padding. If a row ends in this step, the step stops there, because the tokens drafted after
    its end are not padding.
    """
    rows, before = text.rows, text.padded_rows
    every = torch.arange(rows, device=logits.device)
    padded = on_device([row in before for row in range(rows)], logits.device) if before else None
    accepted = [0] * rows
    column = torch.zeros_like(draft.lengths)  # the column of `logits` that each row has reached
    on_host = [0] * rows
    steps = []  # all columns that they have passed through
    for step in range(draft.width + 1):
        ids = text.ids[:, : text.lengths[0]]
        after = logits[every, column]
        scores = distribution.ordered_scores(ids, after)
        token, child = _choose(scores, draft, column, distribution.do_sample)
        if padded is not None:
            child = child.masked_fill(padded, step + 1)
        children = child.tolist()
        text.extend_in_lockstep(token, scores, after.float())
        steps.append(on_host)
        column, on_host = child, children
        accepted = [count + int(node > 0) for count, node in zip(accepted, children, strict=True)]
        if text.done or not all(children) or text.padded_rows != before:
            break
    for row in before:
        accepted[row] = 0
    drafted = depths = draft.lengths.tolist()
    if draft.parents is None:
        return Outcome(drafted, depths, accepted, [len(steps)] * rows)
    depths = [levels(above[:count]) for above, count in zip(draft.parents.tolist(), drafted, strict=True)]
    path = [list(columns) for columns in zip(*steps, strict=True)]
    return Outcome(drafted, depths, accepted, [len(steps)] * rows, path)


def _choose(
    scores: torch.Tensor, draft: Draft, column: torch.Tensor, do_sample: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token, [B] int64, and the column of the drafted node with that token, [B] int64, 0 if there is none.

    scores: [B, V]; column: [B] int64, of the last token before it.
    """
    width = draft.width
    above = torch.arange(width, device=column.device) if draft.parents is None else draft.parents + 1
    is_next = above == column[:, None]
    if not do_sample or draft.q is None:
        choice = acceptance.sample(probabilities(scores)) if do_sample else acceptance.top1(scores)
        drafted = torch.arange(width, device=column.device) < draft.lengths[:, None]
        held = is_next & drafted & (draft.tokens == choice[:, None])
        # the first of siblings with equal tokens; column 0 if no node has the token
        return choice, torch.nn.functional.pad(held.int(), (1, 0)).argmax(1)
    # keep the children of the last token as a tree of depth 1; the other nodes become unreachable
    tokens, parents = draft.tokens.where(is_next, -1), torch.where(is_next, -1, width)
    p = probabilities(scores)[:, None].expand(-1, width + 1, -1)
    path, verdict = acceptance.rejection_tree(tokens, parents, draft.lengths, p, draft.q)
    child = torch.nn.functional.pad(path + 1, (0, 1))[:, 0]
    token = torch.nn.functional.pad(tokens, (1, 0)).gather(1, child[:, None])[:, 0]
    return torch.where(child > 0, token, verdict.token), child
