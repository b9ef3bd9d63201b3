"""What a drafter proposes, a token tree per row, and what became of it: the two objects that a draft-verify step passes on.

Knows tensors alone: nothing of models, caches or how a proposal is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Draft", "Round", "levels"]


@dataclass(frozen=True)
class Draft:
    """A token tree per row. Nodes come after their parents; rows may be shorter than the widest one.

    Args:
        tokens: [B, n] int64, the proposed tokens; columns from `lengths[b]` on are filler.
        lengths: [B] int64, how many nodes of each row count.
        q: [B, n, V], the distribution that each token was really drawn from, given the path to it and its older siblings
            (one-hot where it was an argmax; `acceptance.taken_out` where siblings never repeat a token), or None where
            the drafter has none. Siblings then stand in the order in which they were drawn.
        parents: [B, n] int64, the column of each node's parent, -1 for children of the last committed token and for
            filler. None says that every row is a chain.
        expected: how many of the tokens are expected to be accepted, on average over the unfinished rows; None where the
            drafter has no estimate before the target has seen them.
        member: of a drafter made of several, the number of the one whose draft this is; then its own member, if it is
            made of several itself.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    q: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    expected: float | None = None
    member: tuple[int, ...] = ()

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu") -> Draft:
        """No proposal for any row: the target's next pass is plain decoding. device: of the tensors."""
        return Draft(
            tokens=torch.zeros(rows, 0, dtype=torch.int64, device=device),
            lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    @property
    def width(self) -> int:
        """Columns of the widest row."""
        return self.tokens.shape[1]

    def is_that_of(self, proposed: Draft | None) -> bool:
        """Whether this is what was proposed, by whatever drafters it was handed on."""
        return proposed is not None and self.tokens is proposed.tokens

    def checked(self, rows: int, vocabulary: int, device: torch.device) -> Draft:
        """The same draft, if it can be one: what a drafter of somebody else's may have made wrong would fail in the target, or
        change its text. Looks at values, so it waits for the device.

        rows: of the batch. vocabulary: ids that the target knows. device: of the text.

        Raises TypeError for dtypes, ValueError for shapes, devices and values.
        """
        parts = {"tokens": self.tokens, "lengths": self.lengths, "parents": self.parents, "q": self.q}
        shapes: dict[str, tuple[int, ...]] = {"tokens": (rows, self.width), "lengths": (rows,)}
        shapes |= {"parents": (rows, self.width), "q": (rows, self.width, vocabulary)}
        for name, tensor in parts.items():
            if tensor is None and name in ("parents", "q"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: a tensor is expected, got {type(tensor).__name__}")
            if tensor.shape != shapes[name]:
                raise ValueError(f"{name}: shape {list(shapes[name])} is expected, got {list(tensor.shape)}")
            if tensor.dtype != torch.int64 and not (name == "q" and tensor.is_floating_point()):
                raise TypeError(
                    f"{name}: {'a floating dtype' if name == 'q' else 'int64'} is expected, got {tensor.dtype}"
                )
            if tensor.device != device:
                raise ValueError(f"{name}: on {device} is expected, got {tensor.device}")
        if not bool(((self.lengths >= 0) & (self.lengths <= self.width)).all()):
            raise ValueError(f"lengths: from 0 to {self.width} are possible, got {self.lengths.tolist()}")
        if not bool(((self.tokens >= 0) & (self.tokens < vocabulary)).all()):
            raise ValueError(f"tokens: ids from 0 to {vocabulary - 1} are possible, got {self.tokens.tolist()}")
        columns = torch.arange(self.width, device=device)
        if self.parents is not None and not bool(((self.parents >= -1) & (self.parents < columns)).all()):
            raise ValueError(f"parents: -1 or an earlier column is expected, got {self.parents.tolist()}")
        counts = columns < self.lengths[:, None]
        if self.q is not None and not bool(_is_distribution(self.q)[counts].all()):
            raise ValueError("q: each row has to be a distribution: numbers from 0 on that add up to 1")
        return self

    def of_rows(self, rows: list[int]) -> Draft:
        """The trees of some rows, without q."""
        parents = None if self.parents is None else self.parents[rows]
        return Draft(self.tokens[rows], self.lengths[rows], parents=parents)

    def with_chains(self, rows: list[int], token: int) -> Draft:
        """The same draft, but with a chain of one token, as long as the draft is wide, in some rows; their q means nothing."""
        tokens, lengths = self.tokens.clone(), self.lengths.clone()
        tokens[rows], lengths[rows] = token, self.width
        parents = None if self.parents is None else self.parents.clone()
        if parents is not None:
            parents[rows] = torch.arange(-1, self.width - 1, device=parents.device)
        return Draft(tokens, lengths, self.q, parents)

    def depths(self) -> torch.Tensor:
        """Distance of each node from the last committed token, which has depth 0. Returns [B, n] int64."""
        rows, width = self.tokens.shape
        if self.parents is None:
            return torch.arange(1, width + 1, device=self.tokens.device).expand(rows, width)
        return self.ancestors().sum(-1)

    def ancestors(self) -> torch.Tensor:
        """Which nodes lie on the path to which, each node on its own. Returns [B, n, n] bool: [b, i, j] = j is on i's path.

        For the tree a(b, c(d)):

                a b c d
            a   1
            b   1 1
            c   1   1
            d   1   1 1
        """
        rows, width = self.tokens.shape
        own = torch.eye(width, dtype=torch.bool, device=self.tokens.device)
        if self.parents is None:
            return torch.ones_like(own).tril().expand(rows, width, width)
        above = torch.arange(width, device=self.tokens.device) == self.parents[:, :, None]
        # paths twice as long with every product: a few operations where a walk would take some for every node
        found = (above | own).float()
        for _ in range((width - 1).bit_length()):
            found = (found @ found).clamp_(max=1)
        return found > 0

    def prefix(self, row: int, node: int) -> list[int]:
        """The tokens on the path to a node, the node's own included; the empty list for node -1."""
        if self.parents is None:
            return self.tokens[row, : node + 1].tolist()
        path: list[int] = []
        while node >= 0:
            path.append(int(self.tokens[row, node]))
            node = int(self.parents[row, node])
        return path[::-1]


@dataclass(frozen=True)
class Round:
    """One draft-verify step: a draft, the target's forward pass over it, and what became text. The drafter, the draft length
    policy and the report all get this one object.

    Args:
        draft: what was proposed; empty where nothing was.
        logits: [B, n + 1, V], the target's: column 0 after the last token of the text, column i + 1 after node i.
        unfinished: the rows that had not ended before.
        asked: whether a drafter was asked for a draft; it may have had none.
        drafted: nodes of each row.
        depths: levels of each row's tree, which is the length of a chain.
        accepted: how many tokens of each row's draft became text.
        kept: tokens that were added to each row, the target's own included; 0 for rows that had ended, unless rows are in
            lockstep.
        path: of each row the columns of `logits` that its new tokens were taken from, in order, at least as many; None for
            chains, whose columns are the first ones.
        draft_seconds, verify_seconds: what drafting and all the rest took.
    """

    draft: Draft
    logits: torch.Tensor
    unfinished: Sequence[int]
    asked: bool
    drafted: list[int]
    depths: list[int]
    accepted: list[int]
    kept: list[int]
    path: list[list[int]] | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @staticmethod
    def counted(
        rows: Sequence[tuple[int, int, int]],
        draft_seconds: float = 0.0,
        verify_seconds: float = 0.0,
        asked: bool = True,
    ) -> Round:
        """A round of chains of which nothing but numbers is known, to try a draft length policy with: tokens drafted, accepted
        and kept in each row."""
        drafted, accepted, kept = (list(numbers) for numbers in zip(*rows, strict=True))
        nothing = torch.empty(len(rows), 1, 0)
        return Round(
            draft=Draft.empty(len(rows)),
            logits=nothing,
            unfinished=range(len(rows)),
            asked=asked,
            drafted=drafted,
            depths=drafted,
            accepted=accepted,
            kept=kept,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
        )

    def columns(self, row: int) -> Sequence[int]:
        """The columns of `logits` that a row's new tokens were taken from."""
        return range(self.kept[row]) if self.path is None else self.path[row][: self.kept[row]]

    def mean(self, counts: list[int]) -> float:
        """Of the unfinished rows."""
        return sum(counts[row] for row in self.unfinished) / len(self.unfinished)


def levels(parents: Sequence[int]) -> int:
    """How deep a row's tree is. parents: of its nodes, -1 for the first level."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _is_distribution(q: torch.Tensor) -> torch.Tensor:
    """Which of [..., V] are distributions, but for rounding. Returns [...] bool, False for what is not a number."""
    tolerance = 1e-3 if q.dtype in (torch.float32, torch.float64) else 0.05
    return (q >= 0).all(-1) & ((q.float().sum(-1) - 1).abs() <= tolerance)
