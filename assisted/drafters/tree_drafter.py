"""A causal LM that drafts token trees, best path first (SpecExec, 2406.02532), for targets whose forward pass costs about as
much for hundreds of positions as for one.

Knows a loaded model, its slots, and the measured costs. The specs load it (draft_tree.py, draft_model.py).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import zip_longest

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..distribution import probabilities
from ..drafts import Draft, Round
from ..engine.parts import unwrapped
from ..engine.recurrent import is_recurrent
from ..engine.runner import CachedModel, Masks
from ..engine.tree_reader import TreeReader
from ..lengths.base import DraftLength, Length
from ..lengths.costs import Costs
from ..lengths.faded import Faded
from ..lengths.rates import Rates
from ..text import Text
from .base import Call, Drafting
from .model_drafter import ModelDrafter, ModelDrafting
from .trees import ROOT, Offers, drawn, learn, worthwhile_size

__all__ = ["BEAM", "CANDIDATES", "LARGEST", "TreeDrafter", "TreeDrafting"]

LARGEST = 1024  # nodes of a tree
BEAM = 32  # nodes that the draft reads in a forward pass
CANDIDATES = 16  # children of a node
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # few sizes, so that the costs of each are soon known
_PASSES = 16  # forward passes of the draft that even a small tree may take
_FIRST = 64  # nodes of a tree while the costs are unknown
_GROWTH = 4  # a tree has at most this many times the nodes of the largest one before it
_MEMORY = 0.9  # share of the past in the seconds of a forward pass


class TreeDrafter(ModelDrafter):
    """A causal LM that drafts trees wherever both models take 4-D masks, and chains elsewhere.

    Args:
        model, tokenizer: as for `ModelDrafter`.
        target: the target that it is loaded for.
        nodes: a fixed number of nodes; None chooses it by measured costs, at most `LARGEST`.
        beam: nodes that the draft reads in a forward pass.
        candidates: children of a node.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        target: PreTrainedModel,
        nodes: int | None = None,
        beam: int = BEAM,
        candidates: int = CANDIDATES,
    ):
        super().__init__(model, tokenizer)
        self.target = unwrapped(target)
        self.nodes, self.beam, self.candidates = nodes, beam, candidates
        self.rates = {do_sample: Rates() for do_sample in (False, True)}
        self.largest = _FIRST // _GROWTH  # number of nodes of the largest tree so far
        self.seconds = Faded()  # of a forward pass of the draft over `beam` nodes, with the choice of the nodes

    @property
    def makes_trees(self) -> bool:
        """Whether both models take trees."""
        return not is_recurrent(self.model) and self.masks.trees and Masks.of(self.target).trees

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        length = super().start_length(policy, earlier)
        if self.makes_trees:
            length.leave_size()
        return length

    def start(self, call: Call) -> Drafting:
        return TreeDrafting(self, call) if self.makes_trees and call.target.masks.trees else super().start(call)


class TreeDrafting(ModelDrafting):
    """One `generate` with trees. What the draft reads of a tree is removed from its slots in the same round."""

    drafter: TreeDrafter

    def __init__(self, drafter: TreeDrafter, call: Call):
        super().__init__(drafter, call)
        self.rates = drafter.rates[call.distribution.do_sample]
        self.text: Text | None = None
        self.offers: list[Offers] = []  # of the proposed tree, until it is verified
        self.took: list[float] = []  # seconds of the draft's forward passes of this round

    def propose(self, text: Text, budget: int) -> Draft:
        self.text, self.offers, self.took = text, [], []
        runner = self._catch_up_prompt(text)
        runner.run_only(text.unfinished)
        budget = min(budget, runner.room([text.lengths[row] for row in text.unfinished]) - 1)
        if budget < 1:
            return Draft.empty(text.rows, text.ids.device)
        logits = self._fitted(self._read_committed(runner, text), text)
        known = runner.cache.known
        try:
            return self._grown(runner, text, logits[:, None], budget)
        finally:
            runner.cache.rewind(known)

    def observe(self, round: Round) -> None:
        """Learn how often the draft is right, and what it costs. Its slots hold committed text only."""
        seconds, passes = self.call.settings.ranks.largest([sum(self.took), len(self.took)])
        self.drafter.seconds.add(seconds, passes, keep=_MEMORY**passes)
        self.took = []
        if self.text is not None and self.offers:
            learn(self.rates, self.offers, self.text, round.kept)
            self.offers = []

    def _grown(self, runner: CachedModel, text: Text, logits: torch.Tensor, depth: int) -> Draft:
        """The tree of the most probable paths, at most `depth` deep. logits: [B, 1, V], after the committed text.

        The draft reads the best nodes that it has not read, of any level, `beam` at a time, until none of them is among the
        best, or another forward pass would cost more than it is expected to gain. Each forward pass synchronises with the
        device.

        Raises FloatingPointError if the logits after the text contain NaN.
        """
        drafter, length = self.drafter, self.call.length
        costs = length.costs  # made anew every time
        most = self._most(costs)
        room = 2 * most + _PASSES * drafter.beam  # many nodes that were read are no longer among the best in the end
        reader = TreeReader(runner, room)
        offers = [Offers() for _ in text.ended]
        columns: list[dict[int, int]] = [{ROOT: -1} for _ in offers]  # by row: column of each node that was read
        reading = [[] if ended else [ROOT] for ended in text.ended]
        if bool(logits.isnan().any()):
            raise FloatingPointError("the draft's logits are not a number")
        for forwards in range(room + 1):
            began = time.perf_counter()
            distributions = self._distributions(text, logits, reader)
            if length.needs_q:
                wanted = length.go_on(forwards, distributions[:, 0]).tolist()
                reading = [nodes if goes else [] for nodes, goes in zip(reading, wanted, strict=True)]
            self._add(distributions, offers, reading, most)
            above = reading
            reading = [offered.unread(depth, drafter.beam) for offered in offers]
            if length.needs_q:  # a row whose policy ended its draft reads no more
                reading = [nodes if before else [] for nodes, before in zip(reading, above, strict=True)]
            width = max(map(len, reading))
            if width == 0 or reader.columns + width > room:
                break
            if not self._is_worthwhile(text, offers, above, reading, forwards, costs):
                break
            for row, nodes in enumerate(reading):
                columns[row] |= {node: reader.columns + place for place, node in enumerate(nodes)}
            logits = self._fitted(
                reader.read(
                    [[o.tokens[node] for node in nodes] for o, nodes in zip(offers, reading, strict=True)],
                    [[columns[row][offers[row].parents[node]] for node in nodes] for row, nodes in enumerate(reading)],
                    [[o.depths[node] for node in nodes] for o, nodes in zip(offers, reading, strict=True)],
                ),
                text,
            )
            if logits.device.type != "cpu":
                logits[0, 0, 0].item()  # the clock waits for the device
            self.took.append(time.perf_counter() - began)
        self.offers = offers
        worth = _worths(text, offers)
        kept = self._size(worth, forwards, costs)
        drafter.largest = max(drafter.largest, kept)
        if not kept:
            return Draft.empty(text.rows, text.ids.device)
        draft = drawn(
            [offered.tokens for offered in offers],
            [offered.parents for offered in offers],
            [offered.best[:kept] for offered in offers],
            text.ids.device,
        )
        return replace(draft, expected=sum(worth[:kept]))

    def _most(self, costs: Costs | None) -> int:
        """Maximum number of nodes of this round's tree."""
        drafter = self.drafter
        if drafter.nodes is not None:
            return drafter.nodes
        if costs is None:
            return _FIRST
        return min(LARGEST, _GROWTH * drafter.largest)

    def _distributions(self, text: Text, logits: torch.Tensor, reader: TreeReader) -> torch.Tensor:
        """Probabilities [B, n, V] after the nodes that were read last. NaN where processors forbid every token."""
        distribution = self.call.distribution
        if not distribution.processors:
            return probabilities(logits.float())
        draft = reader.draft(text.ids.device)
        last = range(
            draft.width - logits.shape[1], draft.width
        )  # -1, the committed text alone, before any node was read
        return probabilities(distribution.scores(text.ids, text.lengths, logits, draft, text.unfinished, last))

    def _add(self, distributions: torch.Tensor, offers: list[Offers], reading: list[list[int]], most: int) -> None:
        """Add the most probable children of the nodes that were read last."""
        found, best = distributions.topk(min(self.drafter.candidates, distributions.shape[-1]))
        sure, tokens = found.tolist(), best.tolist()
        for row, offered in enumerate(offers):
            first = len(offered.tokens)
            for node, its_tokens, its_sure in zip(reading[row], tokens[row], sure[row], strict=False):
                offered.add(node, its_tokens, its_sure, self.rates.at(its_sure))
            offered.keep(most, first)

    def _is_worthwhile(
        self,
        text: Text,
        offers: list[Offers],
        above: list[list[int]],
        reading: list[list[int]],
        forwards: int,
        costs: Costs | None,
    ) -> bool:
        """Whether reading these nodes is expected to gain more tokens per second than the tree has without them.

        A node that is read passes on to its children the share of its path probability that the nodes read last passed on.
        above: those nodes. forwards: of the draft so far.
        """
        seconds = self.drafter.seconds.mean(strength=1e-9)
        if self.drafter.nodes is not None or costs is None or seconds == 0:
            return True
        worth = _worths(text, offers)
        _, rate = worthwhile_size(worth, costs, forwards * seconds, SIZES)
        had = got = gain = 0.0
        for offered, nodes, following in zip(offers, above, reading, strict=True):
            gain += sum(math.exp(offered.scores[node]) for node in following)
            for node in nodes:
                first, sure = offered.below[node]
                had += 1.0 if node == ROOT else math.exp(offered.scores[node])
                got += sum(math.exp(score) for score in offered.scores[first : first + len(sure)])
        return had > 0 and gain * got / had / len(text.unfinished) > rate * seconds

    def _size(self, worth: list[float], forwards: int, costs: Costs | None) -> int:
        """How many nodes to propose. worth: path probabilities, best first. forwards: of the draft."""
        drafter = self.drafter
        if drafter.nodes is not None or costs is None:
            return len(worth)
        return worthwhile_size(worth, costs, forwards * drafter.seconds.mean(strength=1e-9), SIZES)[0]


def _worths(text: Text, offers: list[Offers]) -> list[float]:
    """Path probabilities of the best nodes, best first: means over the unfinished rows."""
    rows = [[math.exp(offers[row].scores[node]) for node in offers[row].best] for row in text.unfinished]
    return [sum(of_rows) / len(rows) for of_rows in zip_longest(*rows, fillvalue=0.0)]
