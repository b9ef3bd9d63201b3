"""Token trees for drafters: drafts from lists on the host, and the best tree of candidates that are the same at all nodes.
tree_growth.py grows trees whose candidates depend on the path.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ...core.drafts import Draft
from ...core.host import filled, on_device, padded

Rows = Sequence[Sequence[int]]
"""Something of each node, by row; rows may have different numbers of them."""


def chosen_nodes(tokens: Rows, parents: Rows, chosen: Rows, device: torch.device) -> Draft:
    """Some candidates as a draft without q.

    Args:
        tokens: of the candidates, by row.
        parents: of the candidates, by row; -1 for children of the last committed token.
        chosen: indices of candidates, by row, parents first.
    """
    above = []
    for row, nodes in enumerate(chosen):
        column_of = {node: column for column, node in enumerate(nodes)}
        above.append([column_of.get(parents[row][node], -1) for node in nodes])
    return from_lists([[row[node] for node in nodes] for row, nodes in zip(tokens, chosen, strict=True)], above, device)


def from_lists(tokens: Rows, parents: Rows | None, device: torch.device | str, expected: float | None = None) -> Draft:
    """A draft without q from lists by row. tokens, parents: of the nodes, see `Draft`; chains have no parents."""
    above = [[]] * len(tokens) if parents is None else filled(parents, -1)  # filler is placed below the root
    rows = zip(map(len, tokens), filled(tokens), above, strict=True)
    table = on_device([[length, *own, *others] for length, own, others in rows], device)  # in one copy
    end = 1 + max(map(len, tokens))
    return Draft(table[:, 1:end], table[:, 0], parents=None if parents is None else table[:, end:], expected=expected)


def rows_of(draft: Draft) -> list[list[int]]:
    """The tokens of a draft by row."""
    table = torch.cat([draft.lengths[:, None], draft.tokens], 1).tolist()  # in one transfer
    return [row[1 : 1 + row[0]] for row in table]


def first_paths(draft: Draft) -> list[list[int]]:
    """By row: the tokens of a chain, or of a tree's first node, of that node's first child, and so on."""
    rows, paths = rows_of(draft), []
    if draft.parents is None:
        return rows
    for row, parents in zip(rows, draft.parents.tolist(), strict=True):
        path, here = [], -1
        for node, (token, parent) in enumerate(zip(row, parents, strict=False)):
            if parent == here:
                path.append(token)
                here = node
        paths.append(path)
    return paths


def continued(draft: Draft, rows: Rows) -> Draft:
    """The chains of another drafter after they were continued. rows: what they are now, each beginning as before. What was
    added depends on earlier tokens only, and its q is one-hot, so that sampling stays exact."""
    found, q = from_lists(rows, None, draft.tokens.device), draft.q
    if q is not None:
        certain = torch.nn.functional.one_hot(found.tokens, q.shape[-1]).to(q.dtype)
        is_drafted = torch.arange(found.width, device=q.device) < draft.lengths[:, None]
        q = torch.nn.functional.pad(q, (0, 0, 0, found.width - q.shape[1]))
        q = q.where(is_drafted[:, :, None], certain)
    return replace(found, q=q, continued=draft)


@dataclass(frozen=True)
class Tree:
    """A tree whose nodes refer to the ranked candidates of their level. Best first, hence parents first."""

    parents: tuple[int, ...]  # the parent of each node, -1 for the root
    depths: tuple[int, ...]  # level of each node, 1 for the root's children
    ranks: tuple[int, ...]  # index of each node among the candidates of its level
    worth: tuple[float, ...]  # probability of the path to each node

    def by_level(self) -> Tree:
        """The same tree with its nodes ordered by level."""
        order = sorted(range(len(self.depths)), key=self.depths.__getitem__)
        number = {node: index for index, node in enumerate(order)} | {-1: -1}
        parents = tuple(number[self.parents[node]] for node in order)
        columns = (self.depths, self.ranks, self.worth)
        return Tree(parents, *(tuple(column[node] for node in order) for column in columns))  # type: ignore[arg-type]

    @cached_property
    def levels(self) -> list[int]:
        """Index of the first node of each level, followed by the number of nodes. Of a tree ordered by level."""
        return [bisect_left(self.depths, level) for level in range(1, self.depths[-1] + 2)]


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


def merge(drafts: list[Draft]) -> Draft:
    """Merge several drafts (chains or trees) into one tree per row. Common prefixes become common paths.

    Nodes are in the order of insertion, parents first. If any draft has q, the tree has q, with one-hot distributions for the
    drafts without. These drafts are inserted last, which costs one-hot candidates nothing, so that they do not change the
    residual for the others. If drafts with q drew the same token after the same path, each of them adds a
    node, since each was drawn from its own distribution; all descendants are attached to the first of these nodes.
    """
    drafts = sorted(drafts, key=lambda draft: draft.q is None)
    starts = [0, *itertools.accumulate(draft.width for draft in drafts)]
    rows = []
    for row in range(len(drafts[0].lengths)):
        tree = _Tree()
        for draft, start in zip(drafts, starts, strict=False):
            tree.insert(draft, row, start)
        rows.append(tree)
    device = drafts[0].tokens.device
    merged = from_lists([row.tokens for row in rows], [row.parents for row in rows], device)
    if drafts[0].q is None:
        return merged
    distributions = torch.cat([_distributions(draft, drafts[0].q) for draft in drafts], 1)
    origins = padded([row.origins for row in rows], device)[:, :, None]
    return replace(merged, q=distributions.gather(1, origins.expand(-1, -1, distributions.shape[-1])))


@dataclass
class _Tree:
    """One row's tree under construction: for each node, its token, its parent, and its column in the concatenated drafts."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> the first such node

    def insert(self, draft: Draft, row: int, start: int) -> None:
        """Insert a row of a draft. start: its first column in the concatenated drafts."""
        count = int(draft.lengths[row])
        own = draft.tokens[row, :count].tolist()
        above = range(-1, count - 1) if draft.parents is None else draft.parents[row, :count].tolist()
        node_of = {-1: -1}  # node of the draft -> node of the tree
        for number, (token, parent) in enumerate(zip(own, above, strict=True)):
            child = (node_of[parent], token)
            if child not in self.known or draft.q is not None:
                self.tokens.append(token)
                self.parents.append(node_of[parent])
                self.origins.append(start + number)
            node_of[number] = self.known.setdefault(child, len(self.tokens) - 1)


def _distributions(draft: Draft, like: torch.Tensor) -> torch.Tensor:
    """The distributions of a draft's nodes, [B, n, V]; one-hot if it has no q. like: has the vocabulary size and dtype."""
    if draft.q is not None:
        return draft.q
    return torch.nn.functional.one_hot(draft.tokens.clamp(0, like.shape[-1] - 1), like.shape[-1]).to(like.dtype)
