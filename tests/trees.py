"""Random token trees, for property tests and as drafts, and the plain walk over parents that says what they mean."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import strategies as st

from assisted.core.drafts import Draft
from assisted.core.text import Text
from assisted.methods.shared.base import Drafter, Drafting

__all__ = ["Planted", "any_parents", "walk"]


def any_parents(rows: int, width: int) -> Any:
    """A strategy for parents [B][n]: of each node any earlier one, or -1."""
    return st.lists(st.tuples(*(st.integers(-1, node - 1) for node in range(width))), min_size=rows, max_size=rows)


def walk(parents: Any, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


class Planted(Drafter, Drafting):
    """Random trees that hold the first tokens of `truth` [B, L] somewhere, among wrong branches and twins."""

    def __init__(self, truth: torch.Tensor, seed: int = 0):
        self.truth = truth.tolist()
        self.random = random.Random(seed)

    def start(self, call: Any) -> Drafting:
        assert call.target.masks.trees
        return self

    def propose(self, text: Text, budget: int) -> Draft:
        trees = [self.tree(self.truth[row][text.lengths[row] :], budget) for row in range(text.rows)]
        width = max(map(len, trees))
        filler = [(-1, self.random.randrange(3, 90)) for _ in range(width)]
        nodes = torch.tensor([(tree + filler)[:width] for tree in trees]).view(text.rows, width, 2)
        return Draft(nodes[..., 1], torch.tensor([len(tree) for tree in trees]), parents=nodes[..., 0])

    def tree(self, truth: list[int], budget: int) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        depths, last, known = {-1: 0}, -1, 0
        for _ in range(self.random.randrange(2, 10)):
            right = known < min(len(truth), budget) and self.random.random() < 0.6
            parent = last if right else self.random.randrange(-1, len(nodes))
            if depths[parent] == budget:
                continue
            token = truth[known] if right else self.random.choice([*range(3, 90), *truth[:budget]])
            depths[len(nodes)] = depths[parent] + 1
            if right:
                last, known = len(nodes), known + 1
            nodes.append((parent, token))
        return nodes
