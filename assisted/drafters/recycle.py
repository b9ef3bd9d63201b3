"""Token recycling (2408.08696): the target's own second thoughts, kept in a table and unrolled into a token tree.

Every verified node leaves its most probable successors behind, also where it was rejected. Knows tensors and logits;
needs no model of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch

from ..drafts import Draft, Round
from ..text import Text
from .base import Call, Drafter, Drafting, Spec, Target
from .trees import best_paths

__all__ = ["RANKS", "RecyclingDrafter", "Shape", "TokenRecycling", "shape"]

RANKS = (0.62, 0.09, 0.046, 0.022, 0.015, 0.011, 0.011, 0.008)
"""How often the next token was the successor of each rank, where the table knew the token before it: the shipped target on
held-out code, the mean of greedy text and of text sampled at temperature 0.8, top-p 0.95. They fix the shape of the tree."""

NODES_CPU, NODES = 16, 64


@dataclass(frozen=True)
class TokenRecycling(Spec):
    """A table of each token's last seen best successors drafts a token tree: `"recycle"`.

    Costs one gather a level and a top-k of the logits that the target computes anyway. It learns only from the text at
    hand, so it starts slowly and pays on long outputs.

    Args:
        nodes: of the tree. None takes 64 on an accelerator, where a pass over many tokens costs little more than one over
            one (the paper takes about 80), and 16 on a CPU, where each has its price.
        successors: kept for each token. The table takes 4 bytes for each, times the vocabulary.
    """

    name: ClassVar[str] = "recycle"
    trained: ClassVar[bool | None] = False
    trees: ClassVar[bool | None] = True
    has_q: ClassVar[bool | None] = False

    nodes: int | None = None
    successors: int = 8

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes: {self.nodes} is no tree; give 1 or more")
        if not 1 <= self.successors <= len(RANKS):
            raise ValueError(f"successors: {self.successors} cannot be kept; give 1 to {len(RANKS)}")

    @classmethod
    def named(cls, rest: str) -> TokenRecycling:
        """The spec behind `"recycle"`."""
        if rest:
            raise ValueError(
                f"draft: 'recycle:{rest}' is not known; write 'recycle', or TokenRecycling(...) for its options"
            )
        return cls()

    def load(self, target: Target, **kwargs: object) -> RecyclingDrafter:
        """Nothing to load."""
        nodes = self.nodes or (NODES_CPU if target.model.device.type == "cpu" else NODES)
        return RecyclingDrafter(nodes, self.successors)


class RecyclingDrafter(Drafter):
    """Keeps nothing between calls: a table that outlives a call would let one text's speed tell of another's words.

    Args:
        nodes, successors: of the tree and of each token.
    """

    def __init__(self, nodes: int, successors: int):
        self.nodes, self.successors = nodes, successors

    def start(self, call: Call) -> RecyclingDrafting:
        return RecyclingDrafting(self, call)


@dataclass(frozen=True)
class Shape:
    """A tree before it has tokens: which successor of which node stands where. Nodes level by level.

    Args:
        parents: the node above each, -1 for the root.
        ranks: the place of each in its parent's row of the table.
        worth: probability that the text runs through each, from RANKS.
        levels: first node of every level, and the number of nodes.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    worth: tuple[float, ...]
    levels: tuple[int, ...] = field(repr=False)


@functools.cache
def shape(nodes: int, depth: int, successors: int) -> Shape:
    """The tree of the `nodes` paths most often taken, at most `depth` deep, each node with at most `successors` children.

    The probability of a path is taken for the product of how often its ranks were right. One successor makes a chain.
    """
    best = best_paths([RANKS[:successors]] * depth, nodes)
    order = sorted(range(len(best.depths)), key=best.depths.__getitem__)
    place = {node: number for number, node in enumerate(order)} | {-1: -1}
    return Shape(
        parents=tuple(place[best.parents[node]] for node in order),
        ranks=tuple(best.ranks[node] for node in order),
        worth=tuple(best.worth[node] for node in order),
        levels=tuple(sum(d < level for d in best.depths) for level in range(1, max(best.depths) + 2)),
    )


class RecyclingDrafting(Drafting):
    """The table of one `generate`, [V + 1, successors] int32, -1 where nothing was seen; its last row stands for no token.

    One table for all rows of the batch: they come from one caller, mostly with one subject, and teach each other.
    """

    def __init__(self, drafter: RecyclingDrafter, call: Call):
        self.nodes, self.successors = drafter.nodes, drafter.successors
        self.nothing = call.vocab_size  # the table's last row
        self.call = call
        self.trees = call.target.masks.trees
        self.text: Text | None = None
        self.table = torch.empty(0)
        self.lengths: list[int] = []  # of the text before the round
        self.growing = torch.empty(0)  # [B, 1] bool, rows that had not ended before the round

    def propose(self, text: Text, budget: int) -> Draft:
        if self.text is None:
            self.text = text
            self.table = self._of_prompt(text)
            self._begin_round(text)
        if self.trees:
            tree = shape(self.nodes, budget, self.successors)
        else:
            tree = shape(min(self.nodes, budget), budget, 1)
        device = text.ids.device
        tokens = self._unrolled(tree, text.last_tokens().where(self.growing, self.nothing))
        known = tokens >= 0  # below an unknown node all are unknown: what is left is a tree
        counts = known.sum(1)
        worth = (known * torch.tensor(tree.worth, device=device)).sum()
        width, expected = torch.stack([counts.max().float(), worth]).tolist()
        if not width:
            return Draft.empty(text.rows, device)
        expected /= len(text.unfinished)
        order = (~known).sort(stable=True).indices[:, : int(width)]  # known ones first
        kept = known.gather(1, order)
        tokens = tokens.gather(1, order).where(kept, 0)
        if not self.trees:
            return Draft(tokens, counts, expected=expected)
        number = torch.nn.functional.pad(known.cumsum(1) - 1, (1, 0), value=-1)  # of a node among the known ones
        above = torch.tensor(tree.parents, device=device).expand(text.rows, -1).gather(1, order)
        return Draft(tokens, counts, parents=number.gather(1, above + 1).where(kept, -1), expected=expected)

    def observe(self, round: Round) -> None:
        """Learn from every verified node, whoever proposed it."""
        text, draft = self.text, round.draft
        if text is None:
            return
        device = text.ids.device
        last = text.ids.gather(1, torch.tensor(self.lengths, device=device)[:, None] - 1)
        drafted = torch.arange(draft.width, device=device) < draft.lengths[:, None]
        real = torch.cat([self.growing, drafted & self.growing], 1)
        tokens = torch.cat([last, draft.tokens], 1).where(real, self.nothing)
        best = round.logits.topk(min(self.successors, round.logits.shape[-1])).indices  # [B, n + 1, k]
        self.table[tokens.flatten(), : best.shape[-1]] = best.flatten(0, 1).to(device, torch.int32)
        self.table[self.nothing] = -1
        self._begin_round(text)

    def _begin_round(self, text: Text) -> None:
        self.lengths = list(text.lengths)
        self.growing = ~torch.tensor(text.ended, device=text.ids.device)[:, None]

    def _unrolled(self, tree: Shape, last: torch.Tensor) -> torch.Tensor:
        """The tree's tokens below each row's last one, -1 where the table knows none. last: [B, 1] -> [B, nodes]."""
        ranks = torch.tensor(tree.ranks, device=last.device)
        parents = torch.tensor(tree.parents, device=last.device)
        tokens = last  # column 0 holds the root
        for start, stop in pairwise(tree.levels):
            above = tokens[:, parents[start:stop] + 1]
            below = self.table[above.where(above >= 0, self.nothing), ranks[start:stop]].long()
            tokens = torch.cat([tokens, below], 1)
        return tokens[:, 1:]

    def _of_prompt(self, text: Text) -> torch.Tensor:
        """The prompt's own successors, the most recent first: the target's are not computed for it."""
        ids = text.ids[:, : text.prompt_length].tolist()
        mask = self.call.attention_mask
        shown = [[True] * text.prompt_length] * text.rows if mask is None else mask.bool().tolist()
        found: dict[int, dict[int, None]] = {}  # token -> successors, the most recent last
        for row, visible in zip(ids, shown, strict=True):
            tokens = [token for token, is_text in zip(row, visible, strict=True) if is_text]
            for token, successor in pairwise(tokens):
                successors = found.setdefault(token, {})
                successors.pop(successor, None)
                successors[successor] = None
        k = self.successors
        table = torch.full((self.nothing + 1, k), -1, dtype=torch.int32)
        if found:
            rows = [[*reversed(successors), *[-1] * k][:k] for successors in found.values()]
            table[list(found)] = torch.tensor(rows, dtype=torch.int32)
        return table.to(text.ids.device)
