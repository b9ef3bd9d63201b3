"""EAGLE-2's dynamic token tree (2406.16858): as wide and as deep as the head is sure of what follows.

Knows the head as it is run, the law of the call and the draft length, and learns how far the head is to be believed; what
becomes of the tree is the loop's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..drafts import Draft
from ..host import on_device
from ..text import Text
from .base import Call
from .head_runner import HeadRunner
from .rates import Rates
from .trees import top_nodes, worthwhile

__all__ = ["Level", "Limits", "grow", "learn"]


@dataclass(frozen=True)
class Limits:
    """How large a tree may be.

    Args:
        depth: the most levels.
        top_k: nodes of each level that are read, and tokens offered below each.
        nodes: to propose, at most.
        if_they_pay: fewer, where more would cost more than they bring.
    """

    depth: int
    top_k: int
    nodes: int
    if_they_pay: bool


class Level(NamedTuple):
    """What was offered below the nodes of one level.

    nodes: [B, w] int64, these nodes among all that were offered, -1 for the committed text. first: number of the first one
    offered here. tokens: [B, w, k] int64. sure: [B, w, k] float32, the head's probabilities. going: [B] bool, rows that it
    was offered in.
    """

    nodes: torch.Tensor
    first: int
    tokens: torch.Tensor
    sure: torch.Tensor
    going: torch.Tensor


@torch.no_grad()
def grow(
    runner: HeadRunner, call: Call, text: Text, state: torch.Tensor, rates: Rates, limits: Limits
) -> tuple[Draft, list[Level], float, torch.Tensor]:
    """The tree of the most probable paths, their levels read one after the other by the head.

    Each level offers the `top_k` best tokens below each of the nodes that were read; the `top_k` most probable of them are
    read next. Of all that were offered the best are kept. The levels stay in the head's slots, to be rewound by the caller.

    Args:
        state: [B, H], the head's after the committed text.
        rates: how often what the head is sure of to some degree is right.

    Returns the draft, without q; what was offered, for `learn`; how many of the draft's tokens are expected to be accepted in
    an unfinished row; and whether the head's logits were no numbers, [] bool.
    """
    top_k, nodes = limits.top_k, limits.nodes
    law, length = call.law, call.length
    rows, device = text.rows, state.device
    going = ~torch.tensor(text.ended, device=device)
    states, ancestors = state[:, None], torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)
    scores = torch.zeros(rows, 1, device=device)  # of the nodes that were just read, log-probabilities of their paths
    numbers = torch.full((rows, 1), -1, device=device)  # of these nodes, among all that were offered
    read = Draft.empty(rows, text.ids.device)  # every node that was read
    offered: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # tokens, parents, scores of each level, [B, m]
    seen: list[Level] = []
    count, levels = 0, 0
    broken = torch.zeros((), dtype=torch.bool, device=device)
    for depth in range(limits.depth):
        width = states.shape[1]
        logits = runner.logits(states)
        if depth == 0:
            broken = logits.isnan().any()
        laws, vocabulary = _log_laws(runner, call, text, logits, read)
        if length.needs_law:
            going = going & length.go_on(depth, laws[:, 0].exp().to(text.ids.device)).to(device)
            if not going.any():
                break
        levels = depth + 1
        found, tokens = laws.topk(min(top_k, laws.shape[-1]))
        if vocabulary is not None:
            tokens = vocabulary[tokens]
        sure = found.exp()
        seen.append(Level(numbers, count, tokens, sure, going))
        paths = (scores[:, :, None] + rates.of(sure).log()).flatten(1)
        if rows > 1:  # a single one is drafted for
            paths = paths.masked_fill(~going[:, None], -torch.inf)
        tokens, above = tokens.flatten(1), numbers.repeat_interleave(found.shape[-1], 1)
        offered.append((tokens, above, paths))
        if levels == limits.depth or not length.another(levels):
            break
        scores, best = paths.topk(min(top_k, paths.shape[1]))
        parents = best // found.shape[-1]  # places among the nodes that were just read
        numbers, count = count + best, count + paths.shape[1]
        tokens = tokens.gather(1, best)
        states = states.gather(1, parents[:, :, None].expand(-1, -1, states.shape[-1]))
        own = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(rows, -1, -1)
        ancestors = torch.cat([ancestors.gather(1, parents[:, :, None].expand(-1, -1, ancestors.shape[-1])), own], -1)
        if law.processors:
            read = _joined(read, tokens, parents, width)
        states = runner.level(tokens, states, levels, ancestors)
        runner.cache.commit([best.shape[1]] * rows)
    if not offered:
        return Draft.empty(rows, text.ids.device), [], 0.0, broken
    tokens, above, paths = (torch.cat(parts, 1).to(text.ids.device) for parts in zip(*offered, strict=True))
    unfinished = torch.tensor(text.unfinished, device=text.ids.device)
    worth = paths[unfinished].exp().nan_to_num().sort(1, descending=True).values.mean(0)[:nodes].tolist()
    costs, kept = length.costs, nodes
    if limits.if_they_pay:
        kept = worthwhile(worth, costs, levels * costs.draft if costs else 0.0, nodes)
    return top_nodes(tokens, above, paths, kept), seen, sum(worth[:kept]), broken


def learn(rates: Rates, offered: list[Level], text: Text, counts: list[int]) -> None:
    """Take in which of the tokens that were offered on the way of the text were right.

    offered: by `grow`. text: with what was committed since. counts: how many tokens that was, by row.
    """
    device = offered[0].sure.device
    committed = on_device(counts, device)
    start = on_device(text.lengths, device) - committed
    ids = text.ids.to(device)
    reached = torch.full_like(committed, -1)  # the node that the text has come to
    places, hits, asked = [], [], []
    for depth, level in enumerate(offered):
        token = ids.gather(1, (start + depth).clamp(max=ids.shape[1] - 1)[:, None])
        here = level.nodes == reached[:, None]  # [B, w], at most one
        at = here.int().argmax(1)[:, None, None].expand(-1, 1, level.tokens.shape[-1])
        right = level.tokens.gather(1, at)[:, 0] == token
        places.append(level.sure.gather(1, at)[:, 0])
        hits.append(right)
        asked.append(here.any(1) & level.going & (depth < committed))
        child = level.first + at[:, 0, 0] * right.shape[1] + right.int().argmax(1)
        reached = torch.where(asked[-1] & right.any(1), child, -2)  # -2: no node
    rates.see(torch.stack(places), 0, torch.stack(hits), torch.stack(asked))


def _log_laws(
    runner: HeadRunner, call: Call, text: Text, logits: torch.Tensor, read: Draft
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities after the nodes that were read last, [B, k, n]; and the token of each column, None for its number.

    logits: [B, k, Vd].
    """
    head, law = runner.head, call.law
    if not law.processors:
        laws, vocabulary = logits.float(), None if head.d2t is None else head.draft_tokens
    else:
        last = range(read.width - logits.shape[1], read.width)  # the committed text alone, before any node was read
        full = head.over_all(logits).to(text.ids.device)
        laws, vocabulary = law.node_scores(text.ids, text.lengths, full, read, last).to(logits.device), None
    # where a processor allows nothing that the head can say
    return laws.log_softmax(-1).nan_to_num(nan=-torch.inf), vocabulary


def _joined(read: Draft, tokens: torch.Tensor, parents: torch.Tensor, width: int) -> Draft:
    """The nodes read so far and one level more. parents: [B, k], places among the last `width` of them."""
    device = read.tokens.device
    above = parents.to(device) + (
        read.width - width
    )  # -1 for children of the committed text, which is one place itself
    before = torch.empty_like(read.tokens) if read.parents is None else read.parents
    return Draft(
        torch.cat([read.tokens, tokens.to(device)], 1),
        read.lengths + tokens.shape[1],
        parents=torch.cat([before, above], 1),
    )
