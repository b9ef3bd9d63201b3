"""EAGLE-2's dynamic token tree (2406.16858): as wide and as deep as the head is sure of what follows.

Knows the head as it is run, the distribution of the call and the draft length, and learns how far the head is to be
believed; what becomes of the tree is the loop's.

The head's few best tokens of each level are read on the host, and the tree is kept there: so few numbers cost less in lists
than the calls of tensors that they would take, on a CPU and on an accelerator, which these calls would not keep busy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

import torch

from ..distribution import probabilities
from ..drafts import Draft
from ..engine.host import filled, on_device
from ..heads.runner import HeadRunner
from ..lengths.rates import Rates
from ..text import Text
from .base import Call
from .trees import drawn, worthwhile

__all__ = ["Grown", "Limits", "Offers", "grow", "learn"]

ROOT = -1  # number of the committed text, below which the first nodes hang


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


@dataclass
class Offers:
    """All that the head offered in one row, level by level.

    Args:
        tokens: of each node.
        parents: the node that it was offered below.
        scores: log-probabilities of the paths.
        best: the most probable nodes, best first, those of probability 0 left out.
        below: for each node that was read the first one offered below it, and the head's probabilities of these, best
            first.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    below: dict[int, tuple[int, list[float]]] = field(default_factory=dict)

    def add(self, parent: int, tokens: list[int], sure: list[float], rates: list[float]) -> None:
        """Offer tokens below a node, best first. sure: their probabilities by the head. rates: how often it is right."""
        self.below[parent] = len(self.tokens), sure
        above = 0.0 if parent == ROOT else self.scores[parent]
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.scores += [above + math.log(rate) if rate > 0 else -math.inf for rate in rates]

    def to_read(self, first: int, limits: Limits) -> list[int]:
        """After a level, which of its nodes to read, best first. first: the number of its first one.

        A node that is none of the best any more has none of them below it either: it is not read.
        """
        self.best = [*self.best, *(node for node in range(first, len(self.scores)) if self.scores[node] > -math.inf)]
        self.best = sorted(self.best, key=self.scores.__getitem__, reverse=True)[: limits.nodes]
        return [node for node in self.best if node >= first][: limits.top_k]


class Grown(NamedTuple):
    """A tree for every row.

    draft: without q. offers: by row; of those that have ended none.
    """

    draft: Draft
    offers: list[Offers]


@torch.no_grad()
def grow(runner: HeadRunner, call: Call, text: Text, state: torch.Tensor, rates: Rates, limits: Limits) -> Grown:
    """The tree of the most probable paths, their levels read one after the other by the head.

    Each level offers the `top_k` best tokens below each of the nodes that were read; the `top_k` most probable of them are
    read next, where they are among the best so far. Of all that were offered the best are kept. The host waits for every
    level. The levels stay in the head's slots, to be rewound by the caller.

    Args:
        state: [B, H], the head's after the committed text.
        rates: how often what the head is sure of to some degree is right.

    Raises FloatingPointError where the head's logits after the text are no numbers.
    """
    distribution, length = call.distribution, call.length
    going = [not ended for ended in text.ended]
    offers = [Offers() for _ in going]
    reading = [[ROOT]] * text.rows  # the nodes of each row that were just read
    level = runner.root(state, limits.depth * limits.top_k)
    read = _Read(text)
    levels = 0
    for depth in range(limits.depth):
        logits = runner.logits(level.states)
        if depth == 0 and math.isnan(float(logits.sum())):
            raise FloatingPointError("the head's logits are not a number")
        distributions, vocabulary = _laws(runner, call, text, logits, read)
        if length.needs_q:
            wanted = length.go_on(depth, distributions[:, 0].to(text.ids.device)).tolist()
            going = [before and now for before, now in zip(going, wanted, strict=True)]
            if not any(going):
                break
        levels = depth + 1
        found, best = distributions.topk(min(limits.top_k, distributions.shape[-1]))
        sure, tokens = found.tolist(), (best if vocabulary is None else vocabulary[best]).tolist()
        firsts = [len(offered.tokens) for offered in offers]
        for row, offered in enumerate(offers):
            if going[row]:
                for node, its_tokens, its_sure in zip(reading[row], tokens[row], sure[row], strict=False):
                    offered.add(node, its_tokens, its_sure, rates.at(its_sure))
        above = reading
        reading = [offered.to_read(first, limits) for offered, first in zip(offers, firsts, strict=True)]
        width = max(map(len, reading))
        if width == 0 or levels == limits.depth or not length.another(levels):
            break
        next_tokens = filled(
            [[offered.tokens[node] for node in nodes] for offered, nodes in zip(offers, reading, strict=True)]
        )
        parents = filled(
            [
                [nodes.index(offered.parents[node]) for node in below]
                for offered, nodes, below in zip(offers, above, reading, strict=True)
            ]
        )
        if distribution.processors:
            read.add(next_tokens, parents)
        level = runner.level(next_tokens, parents, level)
        runner.cache.commit([width] * text.rows)
    if levels == 0:
        return Grown(Draft.empty(text.rows, text.ids.device), [])
    worths = [[math.exp(offers[row].scores[node]) for node in offers[row].best] for row in text.unfinished]
    worth = [sum(place) / len(worths) for place in zip_longest(*worths, fillvalue=0.0)]
    kept = worthwhile(worth, length.costs, levels, limits.nodes) if limits.if_they_pay else limits.nodes
    draft = drawn(
        [offered.tokens for offered in offers],
        [offered.parents for offered in offers],
        [offered.best[:kept] for offered in offers],
        text.ids.device,
    )
    return Grown(replace(draft, expected=sum(worth[:kept])), offers)


def learn(rates: Rates, offers: list[Offers], text: Text, counts: list[int]) -> None:
    """Take in which of the tokens that were offered on the way of the text were right.

    offers: by `grow`. text: with what was committed since. counts: how many tokens that was, by row.
    """
    starts = [length - count for length, count in zip(text.lengths, counts, strict=True)]
    first = min(starts)
    ids = text.ids[:, first : max(text.lengths)].tolist()
    outcomes = []
    for row, offered in enumerate(offers):
        node = ROOT
        for token in ids[row][starts[row] - first : text.lengths[row] - first]:
            if node not in offered.below:
                break
            child, sure = offered.below[node]
            right = [found == token for found in offered.tokens[child : child + len(sure)]]
            outcomes.append((sure, 0, right))
            if not any(right):
                break
            node = child + right.index(True)
    rates.learn(outcomes)


def _laws(
    runner: HeadRunner, call: Call, text: Text, logits: torch.Tensor, read: _Read
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities after the nodes that were read last, [B, k, n], no numbers where nothing is allowed that the head can say;
    and the token of each column, None for its number.

    logits: [B, k, Vd].
    """
    head, distribution = runner.head, call.distribution
    if not distribution.processors:
        return probabilities(logits.float()), None if head.d2t is None else head.draft_tokens
    draft = read.draft()
    last = range(draft.width - logits.shape[1], draft.width)  # the committed text alone, before any node was read
    full = head.over_all(logits).to(text.ids.device)
    scores = distribution.scores(text.ids, text.lengths, full, draft, text.unfinished, last)
    return probabilities(scores).to(logits.device), None


class _Read:
    """Every node that was read, for processors, which want to know the path to each."""

    def __init__(self, text: Text):
        self.device = text.ids.device
        self.columns: list[tuple[list[int], list[int]]] = [([], []) for _ in text.lengths]  # tokens, parents
        self.width = 1  # of the last level; the committed text is one place itself

    def add(self, tokens: list[list[int]], parents: list[list[int]]) -> None:
        """A level. parents: by row, places in the level above."""
        start = len(self.columns[0][0]) - self.width  # -1 for children of the committed text
        for (all_tokens, all_parents), new, above in zip(self.columns, tokens, parents, strict=True):
            all_tokens += new
            all_parents += [start + place for place in above]
        self.width = len(tokens[0])

    def draft(self) -> Draft:
        width = len(self.columns[0][0])
        if width == 0:
            return Draft.empty(len(self.columns), self.device)
        both = on_device(self.columns, self.device)
        return Draft(both[:, 0], on_device([width] * len(self.columns), self.device), parents=both[:, 1])
