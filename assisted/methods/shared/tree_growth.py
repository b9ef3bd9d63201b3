"""Growing a token tree from a model's best next tokens: the loop of EAGLE-2 (2406.16858) and of SpecExec (2406.02532). The
model reads the tree a few nodes at a time; how, the reader of each method knows.

The tree is built on the host, from the few best tokens after each node. For so few numbers, Python lists are faster than the
many small tensor operations that would be needed otherwise, on CPUs and accelerators alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch

from ...core.drafts import Draft
from ...core.host import now, on_device
from ...core.text import Text
from ...distribution import probabilities
from ...fast.head_steps import Shape, TreeInC
from ...lengths.base import Length
from ...lengths.rates import EDGES, Rates
from .base import Call
from .trees import Rows, chosen_nodes

ROOT = -1  # stands for the committed text, the parent of the first nodes


class NodeReader:
    """Reads a token tree a few nodes at a time, and knows what it has read. A subclass overrides `read`.

    Attributes:
        tokens, parents: by row, of the columns read so far; rows are filled up. Parents are columns, -1 for the committed text.
        vocabulary: the token ids of the logits' entries, [Vd] int64; None for 0, 1, ...
    """

    vocabulary: torch.Tensor | None = None

    def __init__(self, rows: int):
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.parents: list[list[int]] = [[] for _ in range(rows)]

    @property
    def columns(self) -> int:
        """Number of columns read."""
        return len(self.tokens[0])

    def add(self, tokens: Rows, parents: Rows) -> None:
        """Add the columns of a forward pass, as many in every row."""
        for row, (new, above) in enumerate(zip(tokens, parents, strict=True)):
            self.tokens[row] += new
            self.parents[row] += above

    def read(self, tokens: Rows, parents: Rows, depths: Rows) -> torch.Tensor:
        """Read nodes, by row; rows may have different numbers of them, and are filled up.

        parents: columns that were read before, -1 for the committed text. depths: 1 for its children. Returns the logits after
        each node, [B, n, Vd], zeros for rows that don't run.
        """
        raise NotImplementedError

    def logits(self) -> torch.Tensor:
        """The same, of the nodes that were read last."""
        raise NotImplementedError

    def over_all(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, n, Vd] -> [B, n, V], -inf for tokens without a logit."""
        return logits

    def draft(self, device: torch.device) -> Draft:
        """The columns as a draft, for processors that depend on the prefix."""
        if not self.columns:
            return Draft.empty(len(self.tokens), device)
        tokens, parents = on_device([self.tokens, self.parents], device).unbind()
        return Draft(tokens, tokens.new_full((len(tokens),), self.columns), parents=parents)


@dataclass(frozen=True)
class Limits:
    """Limits of a tree."""

    depth: int  # maximum number of levels
    beam: int  # nodes that the model reads in a forward pass
    candidates: int  # children of a node
    nodes: int  # maximum number of nodes in the draft
    room: int  # maximum number of nodes that are read
    # only the children of the nodes that were read last are read, as by a head that needs their states; otherwise the
    # best nodes of any level
    by_level: bool = False


@dataclass
class Offers:
    """All candidates of one row, in the order in which they were found."""

    tokens: list[int] = field(default_factory=list)  # of each node
    parents: list[int] = field(default_factory=list)  # of each node
    depths: list[int] = field(default_factory=list)  # of each node, 1 for the root's children
    scores: list[float] = field(default_factory=list)  # log-probability of the path to each node
    best: list[int] = field(default_factory=list)  # the most probable nodes, best first, without those of probability 0
    # for each node that the draft read: its first child, and the draft's probabilities of its children, best first
    below: dict[int, tuple[int, list[float]]] = field(default_factory=dict)

    def add(self, parent: int, tokens: list[int], sure: list[float], rates: list[float]) -> None:
        """Add children of a node, best first. sure: the draft's probabilities. rates: how often it is right at these."""
        self.below[parent] = len(self.tokens), sure
        above, depth = (0.0, 0) if parent == ROOT else (self.scores[parent], self.depths[parent])
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.depths += [depth + 1] * len(tokens)
        self.scores += [above + math.log(rate) if rate > 0 else -math.inf for rate in rates]

    def keep(self, nodes: int, first: int) -> None:
        """Update `best` with the candidates from index `first` on; at most `nodes` are kept."""
        self.best = [*self.best, *(node for node in range(first, len(self.scores)) if self.scores[node] > -math.inf)]
        self.best = sorted(self.best, key=self.scores.__getitem__, reverse=True)[:nodes]

    def unread(self, depth: int, count: int, first: int = 0) -> list[int]:
        """The best nodes, from index `first` on and of any level above `depth`, that the draft has not read: best first, at
        most `count`. Nodes that are not among the best are not read: none of their descendants can be."""
        return [n for n in self.best if n >= first and n not in self.below and self.depths[n] < depth][:count]


@dataclass
class Growing:
    """The trees of all rows while they grow."""

    text: Text  # the committed text
    offers: list[Offers]  # by row
    # above, reading: by row, the nodes whose children were added last, and those to be read next
    above: list[list[int]]
    reading: list[list[int]]
    forwards: int = 0  # forward passes over nodes so far
    seconds: float = 0.0  # that these took, with the choice of the nodes

    def worth(self) -> list[float]:
        """Path probabilities of the best nodes, best first: means over the unfinished rows."""
        rows = [[math.exp(self.offers[b].scores[node]) for node in self.offers[b].best] for b in self.text.unfinished]
        return [sum(of_rows) / len(rows) for of_rows in zip_longest(*rows, fillvalue=0.0)]

    def draft(self, nodes: int, worth: Sequence[float]) -> Draft:
        """The best `nodes` nodes as a draft without q. worth: as `worth` returned it."""
        device, best = self.text.ids.device, [offered.best[:nodes] for offered in self.offers]
        if not any(best):
            return Draft.empty(self.text.rows, device)
        tokens, parents = [offered.tokens for offered in self.offers], [offered.parents for offered in self.offers]
        return replace(chosen_nodes(tokens, parents, best, device), expected=sum(worth[:nodes]))


@torch.no_grad()
def grow(
    reader: NodeReader,
    call: Call,
    text: Text,
    logits: torch.Tensor | None,
    rates: Rates,
    limits: Limits,
    goes_on: Callable[[Growing], bool],
) -> Growing:
    """Grow the tree of the most probable paths.

    The model reads the best nodes that it has not read, at most `beam` in each forward pass, until none of them is among the
    best `nodes`, or `goes_on` returns False. Each forward pass synchronises with the device. The nodes remain in the reader's
    slots; the caller rewinds them.

    Args:
        logits: [B, 1, Vd], after the committed text; None asks the reader for them.
        rates: how often the draft is right at a given probability.
        goes_on: asked before every forward pass.

    Raises FloatingPointError if the logits after the text contain NaN.
    """
    length = call.length
    logits = reader.logits() if logits is None else logits
    if bool(logits.isnan().any()):
        raise FloatingPointError("the draft's logits are not a number")
    grown = Growing(text, [Offers() for _ in text.ended], [], [[] if ended else [ROOT] for ended in text.ended])
    columns: list[dict[int, int]] = [{ROOT: -1} for _ in text.ended]  # by row: column of each node that was read
    began = None
    while True:
        distributions, vocabulary = _distributions(reader, call, text, logits)
        found, best = distributions.topk(min(limits.candidates, distributions.shape[-1]))
        sure, tokens = found.tolist(), (best if vocabulary is None else vocabulary[best]).tolist()
        if length.needs_q:
            wanted = length.go_on(grown.forwards, distributions[:, 0].to(text.ids.device)).tolist()
            grown.reading = [nodes if goes else [] for nodes, goes in zip(grown.reading, wanted, strict=True)]
        began = began or now()  # the device has done its work: the numbers are on the host
        grown.seconds = now() - began
        grown.above, grown.reading = grown.reading, []
        for row, (offered, nodes) in enumerate(zip(grown.offers, grown.above, strict=True)):
            first = len(offered.tokens)
            for node, its_tokens, its_sure in zip(nodes, tokens[row], sure[row], strict=False):
                offered.add(node, its_tokens, its_sure, rates.at(its_sure))
            offered.keep(limits.nodes, first)
            # a row whose policy ended its draft reads no more
            grown.reading.append(
                offered.unread(limits.depth, limits.beam, first if limits.by_level else 0) if nodes else []
            )
        width = max(map(len, grown.reading))
        if width == 0 or reader.columns + width > limits.room or not goes_on(grown):
            return grown
        for row, nodes in enumerate(grown.reading):
            columns[row] |= {node: reader.columns + place for place, node in enumerate(nodes)}
        each = list(zip(grown.offers, grown.reading, columns, strict=True))
        logits = reader.read(
            [[offered.tokens[node] for node in nodes] for offered, nodes, _ in each],
            [[column[offered.parents[node]] for node in nodes] for offered, nodes, column in each],
            [[offered.depths[node] for node in nodes] for offered, nodes, _ in each],
        )
        grown.forwards += 1


def shape_of(limits: Limits, rates: Rates) -> Shape:
    """What a tree that grows in C needs to know."""
    sizes = limits.depth, limits.beam, limits.candidates, limits.nodes, limits.room
    return Shape(sizes, *rates.fitted(), EDGES, rates.ranks)


def grow_in_c(tree: TreeInC, text: Text, length: Length, goes_on: Callable[[Growing], bool]) -> Growing:
    """`grow` of one row, `by_level`, by a head in C. Raises as `grow`."""
    grown = Growing(text, [], [], [])
    while True:
        sure = tree.read()
        if math.isnan(sure) and not grown.forwards:
            raise FloatingPointError("the draft's logits are not a number")
        if length.needs_q and not length.go_on(grown.forwards, torch.tensor([[sure]])).item():
            break
        if not tree.add() or not goes_on(grown):
            break
        grown.forwards += 1
    grown.offers = [Offers(**tree.found())]
    return grown


def _distributions(
    reader: NodeReader, call: Call, text: Text, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Probabilities after the nodes that were read last, [B, n, N], and the token ids of the N entries, None for 0 .. N-1.

    The probabilities are NaN where the processors forbid every token of the draft's vocabulary. logits: [B, n, Vd].
    """
    distribution = call.distribution
    if not distribution.processors:
        return probabilities(logits.float()), reader.vocabulary
    draft = reader.draft(text.ids.device)
    last = range(draft.width - logits.shape[1], draft.width)  # -1, the committed text alone, before any node was read
    full = reader.over_all(logits).to(text.ids.device)
    scores = distribution.scores(text.ids, text.lengths, full, draft, text.unfinished, last)
    return probabilities(scores).to(logits.device), None


def learn(rates: Rates, offers: list[Offers], text: Text, counts: list[int]) -> None:
    """Update the rates with the candidates along the committed text.

    offers: by row. text: including the tokens committed since then. counts: number of these tokens, by row.
    """
    new = text.since([length - count for length, count in zip(text.lengths, counts, strict=True)])
    outcomes = []
    for offered, tokens in zip(offers, new, strict=True):
        node = ROOT
        for depth, token in enumerate(tokens):
            if node not in offered.below:
                break
            child, sure = offered.below[node]
            right = [found == token for found in offered.tokens[child : child + len(sure)]]
            outcomes.append((sure, min(depth, rates.levels - 1), right))
            if not any(right):
                break
            node = child + right.index(True)
    rates.learn(outcomes)
