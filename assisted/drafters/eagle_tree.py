"""EAGLE-2's dynamic token tree (2406.16858): its shape follows the head's confidence.

Knows the head's runner, the distribution of the call and the draft length. Verification is left to the loop.

The tree is built on the host, from the few best tokens of each level. For so few numbers, Python lists are faster than the
many small tensor operations that would be needed otherwise, on CPUs and accelerators alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import torch

from ..distribution import probabilities
from ..drafts import Draft
from ..engine.host import filled, on_device
from ..heads.runner import HeadRunner
from ..lengths.rates import Rates
from ..text import Text
from .base import Call
from .trees import ROOT, Offers, drawn, worthwhile

__all__ = ["Grown", "Limits", "grow"]


@dataclass(frozen=True)
class Limits:
    """Limits of the size of a tree.

    Args:
        depth: maximum number of levels.
        top_k: nodes of each level that the head reads, and candidates after each.
        nodes: maximum number of nodes in the draft.
        only_worthwhile: propose fewer nodes if that makes more tokens per second.
    """

    depth: int
    top_k: int
    nodes: int
    only_worthwhile: bool


class Grown(NamedTuple):
    """A tree for every row.

    draft: without q. offers: by row; empty for rows that have ended.
    """

    draft: Draft
    offers: list[Offers]


@torch.no_grad()
def grow(runner: HeadRunner, call: Call, text: Text, state: torch.Tensor, rates: Rates, limits: Limits) -> Grown:
    """Grow the tree of the most probable paths level by level.

    A level holds the `top_k` best tokens after each node that was read. The `top_k` most probable of these are read next, if
    they are among the best nodes so far. In the end, the best nodes of all levels are kept. Each level synchronises with the
    device. The levels remain in the head's slots; the caller rewinds them.

    Args:
        state: [B, H], the head's state after the committed text.
        rates: how often the head is right at a given confidence.

    Raises FloatingPointError if the head's logits after the text contain NaN.
    """
    distribution, length = call.distribution, call.length
    going = [not ended for ended in text.ended]
    offers = [Offers() for _ in going]
    reading = [[ROOT]] * text.rows  # by row, the nodes that were read last
    level = runner.root(state, limits.depth * limits.top_k)
    read = _Read(text)
    levels = 0
    for depth in range(limits.depth):
        logits = runner.logits(level.states)
        if depth == 0 and math.isnan(float(logits.sum())):
            raise FloatingPointError("the head's logits are not a number")
        distributions, vocabulary = _distributions(runner, call, text, logits, read)
        if length.needs_q:
            wanted = length.go_on(depth, distributions[:, 0].to(text.ids.device)).tolist()
            going = [before and now for before, now in zip(going, wanted, strict=True)]
            if not any(going):
                break
        levels = depth + 1
        found, best = distributions.topk(min(limits.top_k, distributions.shape[-1]))
        sure, tokens = found.tolist(), (best if vocabulary is None else vocabulary[best]).tolist()
        firsts = [len(offered.tokens) for offered in offers]
        for row, offered in enumerate(offers):
            if going[row]:
                for node, its_tokens, its_sure in zip(reading[row], tokens[row], sure[row], strict=False):
                    offered.add(node, its_tokens, its_sure, rates.at(its_sure))
        above = reading
        reading = [
            offered.to_read(limits.nodes, limits.top_k, first) for offered, first in zip(offers, firsts, strict=True)
        ]
        width = max(map(len, reading))
        if width == 0 or levels == limits.depth or not length.another(levels):
            break
        next_tokens = filled(
            [[offered.tokens[node] for node in nodes] for offered, nodes in zip(offers, reading, strict=True)]
        )
        parents = filled(
            [
                [nodes.index(offered.parents[node]) for node in below]
                for offered, nodes, below in zip(offers, above, reading, strict=True)
            ]
        )
        if distribution.processors:
            read.add(next_tokens, parents)
        level = runner.level(next_tokens, parents, level)
        runner.cache.commit([width] * text.rows)
    if levels == 0:
        return Grown(Draft.empty(text.rows, text.ids.device), [])
    worths = [[math.exp(offers[row].scores[node]) for node in offers[row].best] for row in text.unfinished]
    worth = [sum(of_rows) / len(worths) for of_rows in zip_longest(*worths, fillvalue=0.0)]
    kept = worthwhile(worth, length.costs, levels, limits.nodes) if limits.only_worthwhile else limits.nodes
    draft = drawn(
        [offered.tokens for offered in offers],
        [offered.parents for offered in offers],
        [offered.best[:kept] for offered in offers],
        text.ids.device,
    )
    return Grown(replace(draft, expected=sum(worth[:kept])), offers)


def _distributions(
    runner: HeadRunner, call: Call, text: Text, logits: torch.Tensor, read: _Read
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities after the nodes that were read last, [B, k, n], and the token ids of the n entries, None for 0 .. n-1.

    The probabilities are NaN where the processors forbid every token of the head's vocabulary. logits: [B, k, Vd].
    """
    head, distribution = runner.head, call.distribution
    if not distribution.processors:
        return probabilities(logits.float()), None if head.d2t is None else head.draft_tokens
    draft = read.draft()
    last = range(draft.width - logits.shape[1], draft.width)  # -1, the committed text alone, before any node was read
    full = head.over_all(logits).to(text.ids.device)
    scores = distribution.scores(text.ids, text.lengths, full, draft, text.unfinished, last)
    return probabilities(scores).to(logits.device), None


class _Read:
    """All nodes that were read, for processors that depend on the prefix."""

    def __init__(self, text: Text):
        self.device = text.ids.device
        self.columns: list[tuple[list[int], list[int]]] = [([], []) for _ in text.lengths]  # tokens, parents
        self.width = 1  # of the last level; the committed text counts as a level of one node

    def add(self, tokens: list[list[int]], parents: list[list[int]]) -> None:
        """Add a level. parents: by row, indices within the level above."""
        start = len(self.columns[0][0]) - self.width  # -1 for children of the committed text
        for (all_tokens, all_parents), new, above in zip(self.columns, tokens, parents, strict=True):
            all_tokens += new
            all_parents += [start + index for index in above]
        self.width = len(tokens[0])

    def draft(self) -> Draft:
        width = len(self.columns[0][0])
        if width == 0:
            return Draft.empty(len(self.columns), self.device)
        both = on_device(self.columns, self.device)
        return Draft(both[:, 0], on_device([width] * len(self.columns), self.device), parents=both[:, 1])
