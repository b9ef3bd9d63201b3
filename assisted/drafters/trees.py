"""Token trees for drafters: which candidate nodes to propose, and how many of them are worthwhile.

Knows tensors, probabilities, how often a draft is right, and the costs of forward passes of the target; nothing of the origin
of the candidates.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..drafts import Draft
from ..engine.host import on_device, padded
from ..lengths.costs import UNMEASURED, Costs
from ..lengths.rates import Rates
from ..text import Text

__all__ = [
    "ROOT",
    "Offers",
    "Tree",
    "best_first",
    "best_paths",
    "drawn",
    "from_lists",
    "learn",
    "top_nodes",
    "worthwhile",
    "worthwhile_size",
]

ROOT = -1  # stands for the committed text, the parent of the first nodes


def top_nodes(tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, count: int | torch.Tensor) -> Draft:
    """The best nodes of every row as a draft: best first, never a child without its parent.

    Args:
        tokens: [B, M] int64, the candidates; parents precede their children.
        parents: [B, M] int64, the parent of each candidate, -1 for children of the last committed token.
        scores: [B, M] float32, log-probabilities of the paths, hence no higher than the parent's. Candidates with -inf or
            NaN, and their descendants, are left out.
        count: number of nodes to keep, for all rows or as [B] int64.

    Returns a draft without q with at most `count` columns. Of equal scores, the earlier candidate is first. Synchronises with
    the device; its two steps on the host are `best_first` and `drawn`.
    """
    counts = [count] * len(tokens) if isinstance(count, int) else count.tolist()
    chosen = [best_first(row)[:most] for row, most in zip(scores.tolist(), counts, strict=True)]
    return drawn(tokens.tolist(), parents.tolist(), chosen, tokens.device)


def best_first(scores: Sequence[float]) -> list[int]:
    """The candidates with a score above -inf, best first; of equal ones, the earlier, so that parents precede children."""
    nodes = [node for node, score in enumerate(scores) if score > -math.inf]
    return sorted(nodes, key=scores.__getitem__, reverse=True)


def drawn(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[int]],
    device: torch.device,
) -> Draft:
    """The chosen candidates as a draft without q.

    tokens, parents: by row, as in `top_nodes`. chosen: indices of candidates, by row, parents first.
    """
    above = []
    for row, nodes in enumerate(chosen):
        column_of = {node: column for column, node in enumerate(nodes)}
        above.append([column_of.get(parents[row][node], -1) for node in nodes])
    return from_lists([[row[node] for node in nodes] for row, nodes in zip(tokens, chosen, strict=True)], above, device)


def from_lists(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None,
    device: torch.device | str,
    expected: float | None = None,
) -> Draft:
    """A draft without q from lists by row. tokens, parents: of the nodes, see `Draft`; chains have no parents."""
    return Draft(
        tokens=padded(tokens, device),
        lengths=on_device([len(row) for row in tokens], device),
        parents=None if parents is None else padded(parents, device, -1),  # filler is placed below the root
        expected=expected,
    )


def worthwhile(path_probabilities: Sequence[float], costs: Costs | None, forwards: int, limit: int) -> int:
    """How many nodes to propose: the number N with the most expected tokens per second,

        (1 + p_1 + ... + p_N) / (forwards * d + v(N + 1)),

    where v(n) is the time of the target's forward pass over n columns and d that of one of the draft's. A node is accepted
    if its whole path is. So the expected number of accepted tokens is the sum of the path probabilities.

    Args:
        path_probabilities: of the nodes, best first; means over the rows of a batch.
        costs: measured costs (`Length.costs`); None, before the first measurement, is `UNMEASURED`.
        forwards: the draft's forward passes, which do not depend on how many nodes are kept.
        limit: maximum number of nodes, at least 0.
    """
    costs = costs or UNMEASURED
    draft_seconds = forwards * costs.draft
    best, best_rate = 0, 0.0
    for nodes, tokens in enumerate(accumulate(path_probabilities[:limit], initial=1.0)):
        rate = tokens / (draft_seconds + costs.verify_seconds(nodes + 1))
        if rate > best_rate:
            best, best_rate = nodes, rate
    return best


def worthwhile_size(
    path_probabilities: Sequence[float], costs: Costs, draft_seconds: float, sizes: Sequence[int]
) -> tuple[int, float]:
    """`worthwhile` among a few sizes: the number of nodes with the most expected tokens per second, and that rate.

    Costs are measured by the number of positions, so a few sizes that recur are measured sooner than all. draft_seconds:
    of the whole draft, already spent. sizes: ascending; those above the number of candidates count as that number.
    """
    expected = list(accumulate(path_probabilities, initial=1.0))
    best, best_rate = 0, 0.0
    for size in sizes:
        nodes = min(size, len(path_probabilities))
        rate = expected[nodes] / (draft_seconds + costs.verify_seconds(nodes + 1))
        if rate > best_rate:
            best, best_rate = nodes, rate
    return best, best_rate


@dataclass
class Offers:
    """All candidates of one row, in the order in which they were found.

    Args:
        tokens: of each node.
        parents: of each node.
        depths: of each node, 1 for the root's children.
        scores: log-probability of the path to each node.
        best: the most probable nodes, best first, without those of probability 0.
        below: for each node that the draft read: its first child, and the draft's probabilities of its children, best first.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    below: dict[int, tuple[int, list[float]]] = field(default_factory=dict)

    def add(self, parent: int, tokens: list[int], sure: list[float], rates: list[float]) -> None:
        """Add children of a node, best first. sure: the draft's probabilities. rates: how often it is right at these."""
        self.below[parent] = len(self.tokens), sure
        above, depth = (0.0, 0) if parent == ROOT else (self.scores[parent], self.depths[parent])
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.depths += [depth + 1] * len(tokens)
        self.scores += [above + math.log(rate) if rate > 0 else -math.inf for rate in rates]

    def to_read(self, nodes: int, count: int, first: int) -> list[int]:
        """The candidates from index `first` on that the draft should read next, best first, at most `count`.

        Updates `best`, which holds at most `nodes` candidates. Others are not read: none of their descendants can be in it.
        """
        self.keep(nodes, first)
        return [node for node in self.best if node >= first][:count]

    def keep(self, nodes: int, first: int) -> None:
        """Update `best` with the candidates from index `first` on; at most `nodes` are kept."""
        self.best = [*self.best, *(node for node in range(first, len(self.scores)) if self.scores[node] > -math.inf)]
        self.best = sorted(self.best, key=self.scores.__getitem__, reverse=True)[:nodes]

    def unread(self, depth: int, count: int) -> list[int]:
        """The best nodes, of any level above `depth`, that the draft has not read: best first, at most `count`."""
        return [node for node in self.best if node not in self.below and self.depths[node] < depth][:count]


def learn(rates: Rates, offers: list[Offers], text: Text, counts: list[int]) -> None:
    """Update the rates with the candidates along the committed text.

    offers: by row. text: including the tokens committed since then. counts: number of these tokens, by row.
    """
    new = text.since([length - count for length, count in zip(text.lengths, counts, strict=True)])
    outcomes = []
    for offered, tokens in zip(offers, new, strict=True):
        node = ROOT
        for token in tokens:
            if node not in offered.below:
                break
            child, sure = offered.below[node]
            right = [found == token for found in offered.tokens[child : child + len(sure)]]
            outcomes.append((sure, 0, right))
            if not any(right):
                break
            node = child + right.index(True)
    rates.learn(outcomes)


@dataclass(frozen=True)
class Tree:
    """A tree whose nodes refer to the ranked candidates of their level. Best first, hence parents first.

    Args:
        parents: the parent of each node, -1 for the root.
        depths: level of each node, 1 for the root's children.
        ranks: index of each node among the candidates of its level.
        worth: probability of the path to each node.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    worth: tuple[float, ...]

    def cut(self, count: int) -> Tree:
        """The best `count` nodes."""
        return Tree(self.parents[:count], self.depths[:count], self.ranks[:count], self.worth[:count])


def best_paths(rates: Sequence[Sequence[float]], count: int) -> Tree:
    """The `count` most probable paths if all nodes of a level have the same candidates as children.

    rates: [depth][rank], probability of each candidate of a level, given that the path to it is right; in [0, 1], in any
    order. Candidates with probability 0 are left out. The probability of a path is the product along it.
    """
    orders = [sorted(range(len(level)), key=lambda rank, level=level: -level[rank]) for level in rates]  # type: ignore[misc]
    found: list[tuple[int, int, int, float]] = []  # parent, depth, rank, worth
    # (-worth, tie, depth, index in its level's order, parent, worth of the parent)
    heap: list[tuple[float, int, int, int, int, float]] = []

    def offer(depth: int, index: int, parent: int, above: float) -> None:
        if depth <= len(rates) and index < len(orders[depth - 1]):
            worth = above * rates[depth - 1][orders[depth - 1][index]]
            if worth > 0:
                heapq.heappush(heap, (-worth, len(found), depth, index, parent, above))

    offer(1, 0, -1, 1.0)
    while heap and len(found) < count:
        worth, _, depth, index, parent, above = heapq.heappop(heap)
        node = len(found)
        found.append((parent, depth, orders[depth - 1][index], -worth))
        offer(depth + 1, 0, node, -worth)  # its best child
        offer(depth, index + 1, parent, above)  # its next sibling
    parents, depths, ranks, worths = zip(*found, strict=True) if found else ((), (), (), ())
    return Tree(parents, depths, ranks, worths)
