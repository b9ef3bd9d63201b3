"""Token trees for drafters: which of many candidate nodes to propose, and how many of them pay.

Knows tensors, numbers and what passes of the target cost; nothing of what the candidates come from.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..drafts import Draft
from ..engine.host import on_device, padded
from ..lengths.costs import COLUMN, UNMEASURED, Costs

__all__ = ["COLUMN", "Tree", "best_first", "best_paths", "drawn", "from_lists", "top_nodes", "worthwhile"]


def top_nodes(tokens: torch.Tensor, parents: torch.Tensor, scores: torch.Tensor, count: int | torch.Tensor) -> Draft:
    """The best nodes of every row as a draft: best first, never a child without its parent.

    Args:
        tokens: [B, M] int64, the candidates; parents come before their children.
        parents: [B, M] int64, the candidate above each, -1 for children of the last committed token.
        scores: [B, M] float32, log-probabilities of the paths, hence none above its parent's. A candidate that is -inf or
            nan is no node, nor is what lies below it.
        count: how many to keep: a number for all rows, or [B] int64.

    Returns a draft without q of at most `count` columns. Of equal scores the earlier candidate goes first. Waits for the
    device; `best_first` and `drawn` are its two steps, on the host.
    """
    counts = [count] * len(tokens) if isinstance(count, int) else count.tolist()
    chosen = [best_first(row)[:most] for row, most in zip(scores.tolist(), counts, strict=True)]
    return drawn(tokens.tolist(), parents.tolist(), chosen, tokens.device)


def best_first(scores: Sequence[float]) -> list[int]:
    """The candidates that are nodes, the most probable first; of equal ones the earlier, which no parent stands behind."""
    nodes = [node for node, score in enumerate(scores) if score > -math.inf]
    return sorted(nodes, key=scores.__getitem__, reverse=True)


def drawn(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[int]],
    device: torch.device,
) -> Draft:
    """Some of the candidates as a draft without q.

    tokens, parents: by row, as in `top_nodes`. chosen: of each row, in their order, none before its parent.
    """
    above = []
    for row, nodes in enumerate(chosen):
        column = {node: column for column, node in enumerate(nodes)}
        above.append([column.get(parents[row][node], -1) for node in nodes])
    return from_lists([[row[node] for node in nodes] for row, nodes in zip(tokens, chosen, strict=True)], above, device)


def from_lists(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]] | None,
    device: torch.device | str,
    expected: float | None = None,
) -> Draft:
    """A draft without q from numbers on the host. tokens, parents: those of each row's nodes; no parents for chains."""
    return Draft(
        tokens=padded(tokens, device),
        lengths=on_device([len(row) for row in tokens], device),
        parents=None if parents is None else padded(parents, device, -1),  # filler hangs from the root
        expected=expected,
    )


def worthwhile(path_probabilities: Sequence[float], costs: Costs | None, forwards: int, limit: int) -> int:
    """How many nodes to propose: the number N that makes the most expected tokens a second,

        (1 + p_1 + ... + p_N) / (draft_seconds + v(N + 1))

    where v(n) is the seconds of a forward pass of the target over n columns, and the draft takes `forwards` forward passes of
    its own, however many nodes are kept. A node is accepted when its whole path is, hence the sum of the paths' probabilities
    is the expected number of accepted tokens.

    Args:
        path_probabilities: of the nodes, best first; of a batch, the means over its rows.
        costs: of forward passes (`Length.costs`); None, before anything was measured, takes `UNMEASURED`.
        forwards: of the draft.
        limit: the most nodes, at least 0.
    """
    costs = costs or UNMEASURED
    draft_seconds = forwards * costs.draft
    best, best_rate = 0, 0.0
    for nodes, tokens in enumerate(accumulate(path_probabilities[:limit], initial=1.0)):
        rate = tokens / (draft_seconds + costs.verify_seconds(nodes + 1))
        if rate > best_rate:
            best, best_rate = nodes, rate
    return best


@dataclass(frozen=True)
class Tree:
    """A tree of choices: which of the ranked candidates of its level each node is. Best first, hence parents first.

    Args:
        parents: the node above each, -1 for the root.
        depths: level of each, 1 for the root's children.
        ranks: which candidate of its level each is.
        worth: probability that the text runs through each.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    ranks: tuple[int, ...]
    worth: tuple[float, ...]

    def cut(self, count: int) -> Tree:
        """The best `count` nodes."""
        return Tree(self.parents[:count], self.depths[:count], self.ranks[:count], self.worth[:count])


def best_paths(rates: Sequence[Sequence[float]], count: int) -> Tree:
    """The `count` most probable paths where every level offers the same candidates below each of its nodes.

    rates: [depth][rank], how probable each candidate of a level is, given that the path to it was right; in [0, 1]. The
    candidates of a level may come in any order; one of probability 0 makes no node. A path is as probable as the product
    of its candidates.
    """
    orders = [sorted(range(len(level)), key=lambda rank, level=level: -level[rank]) for level in rates]  # type: ignore[misc]
    found: list[tuple[int, int, int, float]] = []  # parent, depth, rank, worth
    # (-worth, tie, depth, place in its level's order, parent, worth of the parent)
    heap: list[tuple[float, int, int, int, int, float]] = []

    def offer(depth: int, place: int, parent: int, above: float) -> None:
        if depth <= len(rates) and place < len(orders[depth - 1]):
            worth = above * rates[depth - 1][orders[depth - 1][place]]
            if worth > 0:
                heapq.heappush(heap, (-worth, len(found), depth, place, parent, above))

    offer(1, 0, -1, 1.0)
    while heap and len(found) < count:
        worth, _, depth, place, parent, above = heapq.heappop(heap)
        node = len(found)
        found.append((parent, depth, orders[depth - 1][place], -worth))
        offer(depth + 1, 0, node, -worth)  # its best child
        offer(depth, place + 1, parent, above)  # its next sibling
    parents, depths, ranks, worths = zip(*found, strict=True) if found else ((), (), (), ())
    return Tree(parents, depths, ranks, worths)
