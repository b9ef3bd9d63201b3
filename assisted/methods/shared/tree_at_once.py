"""A token tree that grows on the device in one captured function: what a GPU does instead of `tree_growth.grow`, without a
look at the host between two levels. The host learns what was grown with the verdict (`Round.notes`).
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...core.drafts import Draft, Round
from ...core.host import pinned
from ...core.text import Text
from ...lengths.cost_model import KEEP_LOCAL, UNMEASURED, Costs, best_size
from ...lengths.rates import EDGES, Rates
from .tree_growth import ROOT, Growing, Limits, Offers

SIZES = (3, 7, 15, 31)  # nodes of trees: with the last committed token, as many columns as a captured pass has
Read = Callable[..., torch.Tensor]
"""As `passes.Chained` reads a level."""


def grow_at_once(
    limits: Limits, ranks: int, best: Read, table: torch.Tensor, output: torch.Tensor, read: Read
) -> list[torch.Tensor]:
    """The tree of the most probable paths, `by_level`, without a look at a policy.

    ranks: of the rates in `table`, from `table_of`. best: the `candidates` best tokens after outputs [B, n, ...], best first:
    probabilities and ids, [B, n, 2 c] float64. output: [B, ...], after the committed text.

    Returns one tensor, side by side: the draft's lengths, [B, 1], its tokens and parents, [B, n] each, and notes for `Blind`.
    The best nodes of a level are read, also those that are not among the best of the tree: nothing below them is, either.
    """
    *lines, edges = table.split([(table.numel() - len(EDGES)) // 2] * 2 + [len(EDGES)])
    base, slope = (line.view(-1, ranks, len(EDGES) + 1) for line in lines)  # [levels, ranks, bins]
    rank = torch.arange(limits.candidates, device=table.device).clamp(max=ranks - 1)
    output, above, parent = output[:, None], table.new_zeros(len(output), 1), rank.new_full((len(output), 1), ROOT)
    tokens, sures, scores, parents, nodes, found = [], [], [], [], [], 0
    for depth in range(limits.depth):
        sure, ids = best(output).chunk(2, -1)  # [B, n, c]
        cell, level = (rank, torch.bucketize(sure.contiguous(), edges, right=True)), min(depth, len(base) - 1)
        rate = (base[level][cell] + slope[level][cell] * sure).clamp(max=1)
        score = (above[:, :, None] + torch.where(sure > 0, rate, 0).log()).flatten(1)
        tokens.append(ids.flatten(1).long())
        sures.append(sure.flatten(1))
        scores.append(score)
        parents.append(parent[:, :, None].expand_as(sure).flatten(1))
        if depth + 1 < limits.depth:
            place = score.sort(stable=True, descending=True).indices[:, : limits.beam]
            parent, above = found + place, score.gather(1, place)
            nodes.append(parent)
            output = read(tokens[-1].gather(1, place), place // sure.shape[-1])
        found += score.shape[1]
    of_all = torch.cat(tokens, 1)
    worth, chosen = (part[:, : limits.nodes] for part in torch.cat(scores, 1).sort(stable=True, descending=True))
    column = torch.arange(chosen.shape[1], device=table.device).expand_as(chosen)
    columns = F.pad(torch.zeros_like(of_all), (0, 1), value=-1).scatter(1, chosen, column)  # the last one is the root's
    above = columns.gather(1, torch.cat(parents, 1).gather(1, chosen) % columns.shape[1])
    is_node = worth > -math.inf
    notes = chosen, *nodes, of_all, torch.cat([worth, *sures], 1).view(torch.int64)
    draft = is_node.sum(1, keepdim=True), of_all.gather(1, chosen), above.where(is_node, -1)
    return [torch.cat([*draft, *notes], 1)]


def table_of(rates: Rates, device: torch.device) -> torch.Tensor:
    """What `grow_at_once` needs to know, float64: base and slope of each cell, and the edges of the bins. It is on the host,
    to be copied to the device."""
    return pinned([*itertools.chain(*rates.fitted()), *EDGES], device, torch.float64)


def reads(limits: Limits) -> list[int]:
    """How many nodes are read of each level, the committed text counted as the first."""
    found = [1]
    for _ in range(1, limits.depth):
        found.append(min(limits.beam, found[-1] * limits.candidates))
    return found


class Worth:
    """What the nodes of recent trees were worth, best first, and the size of the next one."""

    def __init__(self) -> None:
        self.recent: list[float] = []  # path probabilities, means over recent trees

    def see(self, worth: Sequence[float]) -> None:
        """Take in a tree. worth: from `Growing.worth`."""
        pairs = itertools.zip_longest(self.recent, worth, fillvalue=0.0)
        self.recent = [KEEP_LOCAL * old + (1 - KEEP_LOCAL) * new for old, new in pairs] if self.recent else list(worth)

    def size(self, most: int, forwards: int, costs: Costs | None) -> int:
        """The nodes of the next tree, at most `most`, before it is grown. forwards: of the draft."""
        known = costs or UNMEASURED
        drafting, sizes = forwards * known.draft, [size for size in SIZES if size < most] or [most]
        return best_size(self.recent, lambda nodes: drafting + known.verify_seconds(nodes + 1), sizes)[0] or sizes[0]


class Blind(NamedTuple):
    """A tree that the host has not seen. text: committed before it. notes: [B, m] int64, as the function has returned them."""

    limits: Limits
    text: Text
    notes: torch.Tensor

    @staticmethod
    def drafted(made: torch.Tensor, limits: Limits, text: Text, nodes: int, expected: float) -> tuple[Blind, Draft]:
        """The tree, and its best `nodes` as a draft. made: by `grow_at_once`. expected: as `Draft` has it."""
        most = min(limits.nodes, limits.candidates * sum(reads(limits)))
        length, tokens, parents, notes = made.split([1, most, most, made.shape[1] - 1 - 2 * most], 1)
        lengths = length[:, 0].clamp(max=nodes)
        draft = Draft(tokens[:, :nodes], lengths, None, parents[:, :nodes], expected, notes=notes)
        return Blind(limits, text, notes), draft

    def grown(self, round: Round) -> Growing:
        """The tree, once it is verified. Its nodes' parents and depths are left out."""
        known = round.notes if round.draft.notes is self.notes else None
        offers, each, read = [], self.limits.candidates, sum(reads(self.limits))
        kept = min(self.limits.nodes, each * read)
        for row in self.notes.tolist() if known is None else known:
            parts = iter(row)
            chosen, nodes, tokens = (list(itertools.islice(parts, count)) for count in (kept, read - 1, each * read))
            numbers = array("d", array("q", parts).tobytes()).tolist()
            worth, sure = numbers[:kept], numbers[kept:]
            offered = Offers(tokens, scores=[-math.inf] * len(tokens))
            for node, score in zip(chosen, worth, strict=True):
                offered.scores[node] = score
            offered.best = [node for node in chosen if offered.scores[node] > -math.inf]
            starts = range(0, len(tokens), each)
            offered.below = {node: (at, sure[at : at + each]) for node, at in zip([ROOT, *nodes], starts, strict=True)}
            offers.append(offered)
        return Growing(self.text, offers, [], [])
