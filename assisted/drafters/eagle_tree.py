"""How an EAGLE head reads a token tree level by level, for EAGLE-2's dynamic trees (2406.16858).

Knows the head's runner. tree_growth.py chooses the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.host import filled
from ..engine.tree_reader import NodeReader
from ..heads.runner import HeadRunner


class LevelReader(NodeReader):
    """The levels that the head has read, in its slots after the committed text. The caller rewinds the cache.

    Args:
        runner: of the head, which has read all committed tokens but the last.
        state: [B, H], the head's state after them.
        room: the largest number of columns that are read.
    """

    def __init__(self, runner: HeadRunner, state: torch.Tensor, room: int):
        super().__init__(len(state))
        self.runner = runner
        self.level = runner.root(state, room)
        self.first = -1  # column of the last level's first node; the committed text counts as a level of one node
        self.vocabulary = None if runner.head.d2t is None else runner.head.draft_tokens

    def logits(self) -> torch.Tensor:
        """Logits [B, n, Vd] after the nodes of the last level."""
        return self.runner.logits(self.level.states)

    def over_all(self, logits: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = self.runner.head.over_all(logits)
        return full

    def read(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], depths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Read a level: children of nodes of the last level."""
        tokens, parents = filled(tokens), filled(parents, self.first)
        above = [[parent - self.first for parent in row] for row in parents]
        self.first = self.columns
        self.add(tokens, parents)
        self.level = self.runner.level(tokens, above, self.level)
        self.runner.cache.commit([len(tokens[0])] * len(tokens))
        return self.logits()
