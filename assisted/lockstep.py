"""Verification of a draft one token at a time, all rows together, for what must see each committed prefix in order.

Uses the parts of verification.py.
"""

from __future__ import annotations

import torch

from .core import acceptance
from .core.drafts import Draft, levels
from .core.host import on_device
from .core.text import NOT_DRAWABLE, Text
from .distribution import Distribution
from .verification import Outcome, Top1, drawable


def judge_in_lockstep(
    draft: Draft,
    logits: torch.Tensor,
    distribution: Distribution,
    text: Text,
    top1: Top1 = acceptance.top1,
    *_: object,
) -> Outcome:
    """Accept and commit one token at a time, all rows together, as long as every row accepts its draft.

    Logits processors, stopping criteria and streamers see what autoregressive decoding shows them: each committed prefix
    once, in order. So the result is exact for any of them, but the row that accepts least limits the batch. Rows that had
    ended follow their chain of padding. If a row ends in this step, the step stops there, because the tokens drafted after
    its end are not padding. Takes what `judge` takes; nothing is captured here.
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
        scores = distribution.ordered_scores(ids, after, text.unfinished)
        token, child, invalid = _choose(scores, draft, column, distribution, text, top1)
        if padded is not None:
            child = child.masked_fill(padded, step + 1)
        children, not_drawable = torch.stack([child, invalid]).tolist()
        if any(not_drawable):
            raise RuntimeError(NOT_DRAWABLE)
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
    scores: torch.Tensor,
    draft: Draft,
    column: torch.Tensor,
    distribution: Distribution,
    text: Text,
    top1: Top1 = acceptance.top1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The next token, [B] int64, the column of the drafted node with that token, [B] int64, 0 if there is none, and whether
    there was nothing to draw from, [B] bool.

    scores: [B, V]; column: [B] int64, of the last token before it.
    """
    width = draft.width
    above = torch.arange(width, device=column.device) if draft.parents is None else draft.parents + 1
    is_next = above == column[:, None]
    invalid = torch.zeros_like(column, dtype=torch.bool)
    do_sample, draws = distribution.do_sample, distribution.draws
    if do_sample:
        p, invalid = drawable(scores)
    if not do_sample or draws is not None or draft.q is None:
        if draws is not None and do_sample:
            choice = draws.sample(p[:, None], text.lengths)[:, 0]
        else:
            choice = acceptance.sample(p) if do_sample else top1(scores)
        drafted = torch.arange(width, device=column.device) < draft.lengths[:, None]
        held = is_next & drafted & (draft.tokens == choice[:, None])
        # the first of siblings with equal tokens; column 0 if no node has the token
        return choice, torch.nn.functional.pad(held.int(), (1, 0)).argmax(1), invalid
    # keep the children of the last token as a tree of depth 1; the other nodes become unreachable
    tokens, parents = draft.tokens.where(is_next, -1), torch.where(is_next, -1, width)
    every = p[:, None].expand(-1, width + 1, -1)
    path, verdict = acceptance.rejection_tree(tokens, parents, draft.lengths, every, draft.q)
    child = torch.nn.functional.pad(path + 1, (0, 1))[:, 0]
    token = torch.nn.functional.pad(tokens, (1, 0)).gather(1, child[:, None])[:, 0]
    return torch.where(child > 0, token, verdict.token), child, invalid
