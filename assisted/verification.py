"""Verification of a draft: choose the acceptance rule (greedy or sampling, chain or tree), apply it to each row.

Knows the distribution, the acceptance rules and the text; nothing of models, kernels or of how a draft was made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .core import acceptance
from .core.drafts import Draft, levels
from .core.host import padded
from .core.text import Text
from .distribution import Distribution, probabilities

Top1 = Callable[[torch.Tensor], torch.Tensor]
"""Finds the top-1 token of scores, [..., V] -> [...] int64, as `core.acceptance.top1` does; a target has the fastest way."""
Compute = Callable[..., list[torch.Tensor] | None]
"""As `Runner.compute`."""
Move = Callable[[torch.Tensor], object]
"""As `Passes.mover` makes it: takes the columns of an accepted path, [B, m] int64."""


class Outcome(NamedTuple):
    """The result of verifying a draft, per row. The first fields are those of `Round`, in the same order. moved: whether the
    target's columns are where a chain's would be."""

    drafted: list[int]
    depths: list[int]
    accepted: list[int]
    kept: list[int]
    path: list[list[int]] | None = None
    notes: list[list[int]] | None = None
    moved: bool = False


def judge(
    draft: Draft,
    logits: torch.Tensor,
    distribution: Distribution,
    text: Text,
    top1: Top1 = acceptance.top1,
    compute: Compute = lambda *given, moves: None,
    mover: Callable[[int], Move | None] = lambda columns: None,
) -> Outcome:
    """Accept drafted tokens and commit them, each row independently.

    logits: [B, n + 1, V], see `Round`. compute: runs functions of tensors as one captured operation. mover: as
    `Runner.mover`.
    """
    parents, width, scores, found, moved = draft.parents, draft.width, None, None, False
    if distribution.do_sample and distribution.of_logits is not None and not text.keep_scores:
        found, moved = _judged_at_once(draft, logits, distribution, compute, mover)
    if found is None:
        plain = not distribution.processors and not distribution.do_sample and not text.keep_scores
        scores = logits if plain else distribution.scores(text.ids, text.lengths, logits, draft, text.unfinished)
        found = _judged(draft, scores, distribution, text.lengths, top1)
    walks = distribution.do_sample and _walks(distribution, draft)
    drafts, new, path, depths = [], [], [], []
    noted = found if draft.notes is None else torch.cat([found, draft.notes], 1)
    for row in (rows := noted.tolist()):  # the only device-to-host transfer of a round
        not_drawable, row = (row[: width + 1], row[width + 1 :]) if distribution.do_sample else ((), row)
        count, row = row[0], row[1:]
        drafted, above, about = row[:count], row[width:][:count], row[width if parents is None else 2 * width :]
        if walks:
            accepted, token, *order = about
            walk = (order or range(width))[:accepted]
        elif parents is not None:
            walk, token = acceptance.match_tree(drafted, above, about)
        else:
            walk, token = acceptance.match(drafted, about)
        columns = [0, *(node + 1 for node in walk)]  # column 0 holds the last committed token
        valid = next((i for i, column in enumerate(columns) if not_drawable and not_drawable[column]), len(columns))
        new.append([*(drafted[node] for node in walk), token][:valid])
        path.append(columns)
        drafts.append(count)
        depths.append(count if parents is None else levels(above))
    if parents is not None and (text.keep_scores or text.keep_logits):
        index = padded(path, logits.device)[:, :, None].expand(-1, -1, logits.shape[-1])
        scores, logits = None if scores is None else scores.gather(1, index), logits.gather(1, index)
    kept = text.extend(new, scores, logits)
    for row in text.unfinished:
        if len(new[row]) < len(path[row]):
            text.fail(row)
    # rows that had ended commit nothing; a row that ends within its draft commits only the tokens up to there
    accepted = [min(len(columns) - 1, count) for columns, count in zip(path, kept, strict=True)]
    notes = None if draft.notes is None else [row[-draft.notes.shape[1] :] for row in rows]
    return Outcome(drafts, depths, accepted, kept, None if parents is None else path, notes, moved)


def _judged(
    draft: Draft,
    scores: torch.Tensor,
    distribution: Distribution,
    text_lengths: Sequence[int] = (),
    top1: Top1 = acceptance.top1,
    waits: bool = True,
) -> torch.Tensor:
    """What the host needs to know of a verdict, by row: if tokens are drawn, where there is nothing to draw from; the draft's
    length, tokens and parents; and the target's choices, or what is accepted, the token after it and its nodes.

    scores: [B, n + 1, V]. waits: whether the host may look at them.
    """
    tokens, lengths, parents = draft.tokens, draft.lengths, draft.parents
    if not distribution.do_sample:
        return _side_by_side(lengths[:, None], tokens, parents, top1(scores))
    p, invalid = drawable(scores, waits)
    nodes, drafted = None, (invalid, lengths[:, None], tokens, parents)
    if distribution.lossy is not None:
        nodes, verdict = distribution.lossy.judge(draft, p)
    elif distribution.draws is not None:
        return _side_by_side(*drafted, distribution.draws.sample(p, text_lengths, draft.depths()))
    elif draft.q is None:
        return _side_by_side(*drafted, acceptance.sample(p))
    elif parents is None:
        verdict = acceptance.block(tokens, lengths, p, draft.q)
    else:
        nodes, verdict = acceptance.rejection_tree(tokens, parents, lengths, p, draft.q)
    return _side_by_side(*drafted, verdict.accepted[:, None], verdict.token[:, None], nodes)


def _walks(distribution: Distribution, draft: Draft) -> bool:
    """Whether the path is found on the device, when tokens are drawn; otherwise the host matches the target's choices."""
    return distribution.lossy is not None or (distribution.draws is None and draft.q is not None)


def _judged_at_once(
    draft: Draft,
    logits: torch.Tensor,
    distribution: Distribution,
    compute: Compute,
    mover: Callable[[int], Move | None],
) -> tuple[torch.Tensor | None, bool]:
    """`_judged` as one captured operation, None where that is not possible, and whether it has moved a tree's columns."""
    move = None if draft.parents is None else mover(1 + draft.width)
    judged = functools.partial(_judged_alone, distribution, move)
    given = logits, draft.tokens, draft.lengths, draft.q, draft.parents
    found = compute(("judge", distribution.of_logits, move is not None), judged, *given, moves=move is not None)
    return (None, False) if found is None else (found[0], move is not None)


def _judged_alone(
    distribution: Distribution,
    move: Move | None,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor | None,
    parents: torch.Tensor | None,
) -> list[torch.Tensor]:
    """`_judged` as a function of tensors, for a distribution with `of_logits`. move: is given the columns of the path."""
    draft = Draft(tokens, lengths, q, parents)
    found = _judged(draft, distribution.scores_of(logits), distribution, waits=False)
    if move is not None and parents is not None:
        if _walks(distribution, draft):
            nodes = found[:, found.shape[1] - draft.width :]
        else:
            nodes = acceptance.matched_tree(tokens, parents, lengths, found[:, -1 - draft.width :])
        move(_columns(nodes))
    return [found]


def _columns(nodes: torch.Tensor) -> torch.Tensor:
    """The columns of the last committed token and of a path, [B, n], -1 for filler; filler stays in its own column."""
    own = torch.arange(1, nodes.shape[1] + 1, device=nodes.device)
    return torch.nn.functional.pad((nodes + 1).where(nodes >= 0, own), (1, 0))


def _side_by_side(*parts: torch.Tensor | None) -> torch.Tensor:
    return torch.cat([part for part in parts if part is not None], 1)


def drawable(scores: torch.Tensor, waits: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, [..., V], and where there are none, [...] bool: scores with NaN or infinity, or all tokens forbidden.

    Probabilities are uniform there, so that what follows a token has no influence on whether the token is drawn.
    """
    p = probabilities(scores)
    invalid = p[..., 0].isnan()  # one such score makes all of them NaN
    if not waits or p.device.type != "cpu" or bool(invalid.any()):  # an accelerator is not waited for
        p.masked_fill_(invalid[..., None], 1 / p.shape[-1])
    return p, invalid
