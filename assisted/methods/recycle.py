"""Token recycling (2408.08696): a table of the target's most probable successors of each token, unrolled into a token tree.
Every verified node updates the table, even if it was rejected.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..core.drafts import Draft, Round
from ..core.text import Text
from ..engine.parts import device_of
from ..engine.traits import Traits
from .shared.base import Call, Drafter, Drafting, Room, Spec, Target, require_positive
from .shared.registry import register
from .shared.trees import Tree, best_paths

RANKS = (0.62, 0.09, 0.046, 0.022, 0.015, 0.011, 0.011, 0.008)
"""How often the next token was the successor of each rank, if the table knew the token before it. They determine the tree's
shape. Measured with the shipped target on held-out code: the mean over greedy text and text sampled at temperature 0.8, top-p
0.95."""

NODES_CPU, NODES = 16, 64


@register("recycle")
@dataclass(frozen=True)
class TokenRecycling(Spec):
    """A table with the latest top successors of each token drafts a token tree: `"recycle"`.

    Costs one gather per level, and a top-k of the logits that the target computes anyway. It learns from the current text
    only, so it starts slowly and is worthwhile for long outputs.

    Args:
        nodes: size of the tree. None (default) is 64 on an accelerator, where a forward pass over many tokens costs little
            more than over one (the paper uses about 80), and 16 on a CPU, where each token adds to the cost.
        successors: number kept for each token, 1 to 8. The table takes 4 bytes times successors times vocabulary size.
    """

    title = "Token recycling"
    crosses = True
    trees = True
    acceptance = (0.1, 0.4)
    sample = "recycle"

    nodes: int | None = None
    successors: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "nodes")
        if not 1 <= self.successors <= len(RANKS):
            raise ValueError(f"successors: {self.successors} is not possible; give 1 to {len(RANKS)}")

    def memory(self, room: Room) -> dict[str, int]:
        return {"table of successors": 4 * self.successors * Traits.of(room.target).vocabulary}

    @classmethod
    def named(cls, rest: str) -> TokenRecycling:
        """The spec for `"recycle"`."""
        if rest:
            raise ValueError(
                f"draft: 'recycle:{rest}' is not known; write 'recycle', or TokenRecycling(...) for its options"
            )
        return cls()

    def load(self, target: Target, **kwargs: object) -> RecyclingDrafter:
        """Nothing to load."""
        nodes = self.nodes or (NODES_CPU if device_of(target.model).type == "cpu" else NODES)
        return RecyclingDrafter(nodes, self.successors)


class RecyclingDrafter(Drafter):
    """Has no state between calls: otherwise the speed of one call would reveal the text of another."""

    def __init__(self, nodes: int, successors: int):
        self.nodes, self.successors = nodes, successors

    def start(self, call: Call) -> RecyclingDrafting:
        return RecyclingDrafting(self, call)


@functools.cache
def shape(nodes: int, depth: int, successors: int) -> Tree:
    """The tree of the `nodes` most probable paths, at most `depth` deep, with at most `successors` children per node, by level.

    The probability of a path is the product of the RANKS along it. With one successor, the tree is a chain.
    """
    return best_paths([RANKS[:successors]] * depth, nodes).by_level()


class RecyclingDrafting(Drafting):
    """The table of one `generate`, [V + 1, successors] int32, -1 for unknown entries; the last row stands for no token.

    All rows of the batch share the table. They come from one caller and often have a common subject.
    """

    def __init__(self, drafter: RecyclingDrafter, call: Call):
        self.call = call
        self.nodes, self.successors = drafter.nodes, drafter.successors
        self.nothing = call.vocab_size  # the table's last row
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
        known = tokens >= 0  # descendants of unknown nodes are unknown, so the known ones form a tree
        counts = known.sum(1)
        worth = (known * torch.tensor(tree.worth, device=device)).sum()
        width, expected = torch.stack([counts.max().float(), worth]).tolist()
        if not width:
            return Draft.empty(text.rows, device)
        expected /= len(text.unfinished)
        order = (~known).sort(stable=True).indices[:, : int(width)]  # known nodes first
        kept = known.gather(1, order)
        tokens = tokens.gather(1, order).where(kept, 0)
        if not self.trees:
            return Draft(tokens, counts, expected=expected)
        number = torch.nn.functional.pad(known.cumsum(1) - 1, (1, 0), value=-1)  # index among the known nodes
        above = torch.tensor(tree.parents, device=device).expand(text.rows, -1).gather(1, order)
        return Draft(tokens, counts, parents=number.gather(1, above + 1).where(kept, -1), expected=expected)

    def observe(self, round: Round) -> None:
        """Update the table with every verified node, whichever drafter proposed it."""
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

    def _unrolled(self, tree: Tree, last: torch.Tensor) -> torch.Tensor:
        """The tree's tokens after each row's last token, -1 if unknown. last: [B, 1] int64 -> [B, nodes] int64."""
        ranks = torch.tensor(tree.ranks, device=last.device)
        parents = torch.tensor(tree.parents, device=last.device)
        tokens = last  # column 0 holds the root
        for start, stop in pairwise(tree.levels):
            above = tokens[:, parents[start:stop] + 1]
            below = self.table[above.where(above >= 0, self.nothing), ranks[start:stop]].long()
            tokens = torch.cat([tokens, below], 1)
        return tokens[:, 1:]

    def _of_prompt(self, text: Text) -> torch.Tensor:
        """The initial table: actual successors in the prompt, most recent first, since the target computes no logits there."""
        found: dict[int, dict[int, None]] = {}  # token -> successors, the most recent last
        for tokens in text.prompts(self.call.attention_mask):
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
