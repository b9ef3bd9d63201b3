"""A causal LM reads a token tree a few nodes at a time, in its own KV slots: what a draft model needs to grow a tree.

Knows the runner and its masks; nothing of how the nodes are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.drafts import Draft
from ..core.host import filled, on_device
from .runner import CachedModel


class NodeReader:
    """Reads a token tree a few nodes at a time, and knows what it has read. A subclass overrides `read`.

    Attributes:
        tokens, parents: by row, of the columns read so far; rows are filled up. Parents are columns, -1 for the committed text.
        vocabulary: the token ids of the logits' entries, [Vd] int64; None for 0, 1, ...
        candidates: how many of the best tokens `best` is going to be asked for after each forward pass; None if logits are.
    """

    vocabulary: torch.Tensor | None = None
    candidates: int | None = None

    def __init__(self, rows: int):
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.parents: list[list[int]] = [[] for _ in range(rows)]

    @property
    def columns(self) -> int:
        """Number of columns read."""
        return len(self.tokens[0])

    def add(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None:
        """Add the columns of a forward pass, as many in every row."""
        for row, (new, above) in enumerate(zip(tokens, parents, strict=True)):
            self.tokens[row] += new
            self.parents[row] += above

    def read(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], depths: Sequence[Sequence[int]]
    ) -> torch.Tensor | None:
        """Read nodes, by row; rows may have different numbers of them, and are filled up.

        parents: columns that were read before, -1 for the committed text. depths: 1 for its children. Returns the logits after
        each node, [B, n, Vd], zeros for rows that don't run; None if `best` has the candidates.
        """
        raise NotImplementedError

    def logits(self) -> torch.Tensor:
        """The same, of the nodes that were read last."""
        raise NotImplementedError

    def best(self) -> tuple[list[list[list[float]]], list[list[list[int]]]] | None:
        """Probabilities and ids of the candidates after the nodes that were read last, by row and node; None where they must be
        computed from logits."""
        return None

    def over_all(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, n, Vd] -> [B, n, V], -inf for tokens without a logit."""
        return logits

    def draft(self, device: torch.device) -> Draft:
        """The columns as a draft, for processors that depend on the prefix."""
        if not self.columns:
            return Draft.empty(len(self.tokens), device)
        tokens, parents = on_device([self.tokens, self.parents], device).unbind()
        return Draft(tokens, tokens.new_full((len(tokens),), self.columns), parents=parents)


class TreeReader(NodeReader):
    """The nodes of a token tree that a model has read, in the slots after the committed text.

    Nodes may be read in any order in which parents precede their children, those of one forward pass at different depths. Each
    node attends to what its parent attends to, and to itself. The slots remain filled; the caller rewinds the cache.

    Args:
        runner: a model that takes 4-D masks (`Masks.trees`). It has read all committed tokens, the last one included.
        room: the largest number of columns that are read.
    """

    def __init__(self, runner: CachedModel, room: int):
        super().__init__(runner.cache.rows)
        cache = runner.cache
        self.runner = runner
        self.known = cache.ends(runner.device)  # [R, 1]
        self.first = on_device(runner.first_positions(), runner.device)[:, None]
        slots = torch.arange(max(cache.lengths[row] for row in cache.running) + room, device=runner.device)
        seen = cache.hide_padding(slots < self.known)
        self.seen = seen[:, None]  # [R, 1 + columns, S] bool, the slots that the root and each column attend to
        self.places = slots.repeat(len(seen), 1)  # [R, S], the index of each slot's token in its row's text

    def read(
        self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], depths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        runner, cache = self.runner, self.runner.cache
        tokens, parents, depths = filled(tokens), filled(parents, -1), filled(depths, 1)
        running, width = cache.running, len(tokens[0])
        cache.place(width, runner.device)
        # one copy of all indices to the device
        table = on_device(
            [
                [tokens[row] for row in running],
                [parents[row] for row in running],
                [depths[row] for row in running],
                [list(range(cache.lengths[row], cache.lengths[row] + width)) for row in running],
            ],
            runner.device,
        )
        ids, above, depth, slots = table.unbind()
        seen = self.seen.gather(1, (above + 1)[:, :, None].expand(-1, -1, self.seen.shape[-1]))
        seen = seen.scatter(2, slots[:, :, None], True)
        where = self.known + depth - 1
        self.places = self.places.scatter(1, slots, where)
        self.seen = torch.cat([self.seen, seen], 1)
        masks = runner.masks.dressed(
            seen[..., : cache.top], self.places[:, None, : cache.top], where, runner.model.dtype
        )
        logits = runner.placed(ids, self.first + depth - 1, masks)
        cache.commit([width] * cache.rows)
        self.add(tokens, parents)
        return cache.spread(logits)
