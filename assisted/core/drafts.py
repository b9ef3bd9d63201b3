"""The two objects that a draft-verify step passes on: a draft (a token tree per row) and its outcome.

Tensors only; knows nothing of models, caches or acceptance rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Draft", "DraftingStopped", "Round", "levels"]


class DraftingStopped(UserWarning):
    """A draft failed, or a call cannot be drafted for: this costs the speedup, never a token."""


@dataclass(frozen=True)
class Draft:
    """A token tree per row. Parents precede their children. Rows may have different numbers of nodes.

    Args:
        tokens: [B, n] int64, the proposed tokens; columns from `lengths[b]` on are filler.
        lengths: [B] int64, the number of nodes in each row.
        q: [B, n, V], the distribution that each token was actually drawn from, given the path to it and its older
            siblings: one-hot for an argmax, `core.acceptance.taken_out` for siblings drawn without replacement. Siblings must
            be in the order in which they were drawn. None if the drafter has no distributions.
        parents: [B, n] int64, the column of each node's parent; -1 for children of the last committed token and for
            filler. None if every row is a chain.
        expected: expected number of accepted tokens, averaged over the unfinished rows. None if the drafter cannot
            estimate it.
        member: if several drafters are combined, the index of the one that made this draft, then the index within that
            one if it is a combination itself.
        continued: if another drafter continued its chains (`Drafting.fill`), the draft as it was before.
        notes: [B, m] int64, what the drafter has to learn of its own work on a device; see `Round.notes`.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    q: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    expected: float | None = None
    member: tuple[int, ...] = ()
    continued: Draft | None = None
    notes: torch.Tensor | None = None

    @staticmethod
    def empty(rows: int, device: torch.device | str = "cpu") -> Draft:
        """No proposal for any row: the next forward pass of the target decodes one token. device: of the tensors."""
        return Draft(
            tokens=torch.zeros(rows, 0, dtype=torch.int64, device=device),
            lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    @property
    def width(self) -> int:
        """Number of columns, n."""
        return self.tokens.shape[1]

    def is_that_of(self, proposed: Draft | None) -> bool:
        """Whether this draft is `proposed`, perhaps copied with other fields (`member`) on its way through other drafters."""
        return proposed is not None and self.tokens is proposed.tokens

    def checked(self, rows: int, vocabulary: int, device: torch.device) -> Draft:
        """This draft, checked. An invalid draft of a third-party drafter would fail in the target, or change the output.

        Reads values, so it synchronises with the device. rows: in the batch. vocabulary: number of token ids of the target.
        device: of the text. Raises TypeError for wrong dtypes, ValueError for wrong shapes, devices and values.
        """
        parts = {"tokens": self.tokens, "lengths": self.lengths, "parents": self.parents, "q": self.q}
        shapes: dict[str, tuple[int, ...]] = {"tokens": (rows, self.width), "lengths": (rows,)}
        shapes |= {"parents": (rows, self.width), "q": (rows, self.width, vocabulary)}
        for name, tensor in parts.items():
            if tensor is None and name in ("parents", "q"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.shape != shapes[name]:
                raise ValueError(f"{name}: expected shape {list(shapes[name])}, got {list(tensor.shape)}")
            if tensor.dtype != torch.int64 and not (name == "q" and tensor.is_floating_point()):
                raise TypeError(
                    f"{name}: expected {'a floating-point dtype' if name == 'q' else 'int64'}, got {tensor.dtype}"
                )
            if tensor.device != device:
                raise ValueError(f"{name}: expected a tensor on {device}, got {tensor.device}")
        if not bool(((self.lengths >= 0) & (self.lengths <= self.width)).all()):
            raise ValueError(f"lengths: expected values from 0 to {self.width}, got {self.lengths.tolist()}")
        if not bool(((self.tokens >= 0) & (self.tokens < vocabulary)).all()):
            raise ValueError(f"tokens: expected ids from 0 to {vocabulary - 1}, got {self.tokens.tolist()}")
        columns = torch.arange(self.width, device=device)
        if self.parents is not None and not bool(((self.parents >= -1) & (self.parents < columns)).all()):
            raise ValueError(f"parents: expected -1 or an earlier column, got {self.parents.tolist()}")
        counts = columns < self.lengths[:, None]
        if self.q is not None and not bool(_is_distribution(self.q)[counts].all()):
            raise ValueError("q: each row must be a probability distribution: nonnegative numbers with sum 1")
        return self

    def of_rows(self, rows: list[int]) -> Draft:
        """The trees of the given rows, without q."""
        parents = None if self.parents is None else self.parents[rows]
        return Draft(self.tokens[rows], self.lengths[rows], parents=parents)

    def with_chains(self, rows: list[int], token: int) -> Draft:
        """The same draft, but the given rows hold a chain of copies of one token, as deep as the deepest tree: deeper nodes
        would take positions that the draft was not made for. Their q is meaningless."""
        tokens, lengths = self.tokens.clone(), self.lengths.clone()
        tokens[rows], lengths[rows] = token, self.width
        parents = None if self.parents is None else self.parents.clone()
        if parents is not None:
            above = torch.arange(-1, self.width - 1, device=parents.device)
            parents[rows] = above.where(above + 1 < self.depths().max(), -1) if self.width else above
        return Draft(tokens, lengths, self.q, parents, notes=self.notes)

    def depths(self) -> torch.Tensor:
        """Depth of each node, [B, n] int64; the last committed token has depth 0."""
        if self.parents is None:
            return torch.arange(1, self.width + 1, device=self.tokens.device).expand_as(self.tokens)
        return self.ancestors().sum(-1)

    def ancestors(self) -> torch.Tensor:
        """[B, n, n] bool: whether node j lies on the path to node i, node i included.

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
        # entry 0 is the root, which is its own parent; each step doubles the path length covered: log2(n) steps, each O(n^2)
        jump = torch.nn.functional.pad(self.parents + 1, (1, 0))
        found = torch.nn.functional.pad(own, (0, 0, 1, 0)).expand(rows, -1, -1)
        for _ in range((width - 1).bit_length()):
            found = found | found.gather(1, jump[:, :, None].expand(-1, -1, width))
            jump = jump.gather(1, jump)
        return found[:, 1:]

    def prefix(self, row: int, node: int) -> list[int]:
        """The tokens on the path to a node, its own included; empty for node -1."""
        if self.parents is None:
            return self.tokens[row, : node + 1].tolist()
        path: list[int] = []
        while node >= 0:
            path.append(int(self.tokens[row, node]))
            node = int(self.parents[row, node])
        return path[::-1]


@dataclass(frozen=True)
class Round:
    """The record of one draft-verify step. The drafter, the draft length policy and the report receive it.

    Args:
        draft: the draft, perhaps empty.
        logits: [B, n + 1, V], the target's. Column 0 follows the last committed token, column i + 1 follows node i.
        unfinished: the rows that had not ended before this step.
        asked: whether the drafter was called; it may have proposed nothing.
        drafted: number of nodes, per row.
        depths: depth of the tree, per row; the length of a chain.
        accepted: number of drafted tokens that were committed, per row.
        kept: number of committed tokens, the target's own included, per row. 0 for rows that had ended, unless rows are
            in lockstep.
        path: per row the columns of `logits` that its new tokens were chosen from, in order, perhaps followed by more.
            None for chains, where these are the first columns.
        draft_seconds, verify_seconds: time spent drafting, with what the drafter learned after the step before; and the rest.
        states: [B, n + 1, D] each, the hidden states that the drafter needs of the target (`Drafter.needs`), by index. Valid
            until the target's next forward pass: read them in `observe`, and copy what you keep.
        notes: the draft's notes, by row, if the host has read them with the verdict.
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
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    notes: list[list[int]] | None = None

    @staticmethod
    def counted(
        rows: Sequence[tuple[int, int, int]],
        draft_seconds: float = 0.0,
        verify_seconds: float = 0.0,
        asked: bool = True,
    ) -> Round:
        """A step without tensors, for testing draft length policies. rows: (drafted, accepted, kept) of each row's chain."""
        drafted, accepted, kept = (list(numbers) for numbers in zip(*rows, strict=True))
        about = Draft.empty(len(rows)), torch.empty(len(rows), 1, 0), range(len(rows)), asked
        return Round(*about, drafted, drafted, accepted, kept, None, draft_seconds, verify_seconds)

    def columns(self, row: int) -> Sequence[int]:
        """The columns of `logits` that a row's new tokens were chosen from."""
        return range(self.kept[row]) if self.path is None else self.path[row][: self.kept[row]]

    def mean(self, counts: list[int]) -> float:
        """Mean over the unfinished rows."""
        return sum(counts[row] for row in self.unfinished) / len(self.unfinished)


def levels(parents: Sequence[int]) -> int:
    """Depth of one row's tree. parents: of its nodes, -1 for the first level."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _is_distribution(q: torch.Tensor) -> torch.Tensor:
    """Which of [..., V] are probability distributions up to rounding. Returns [...] bool; False if there is a NaN."""
    tolerance = 1e-3 if q.dtype in (torch.float32, torch.float64) else 0.05
    return (q >= 0).all(-1) & ((q.float().sum(-1) - 1).abs() <= tolerance)
