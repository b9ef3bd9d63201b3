"""A causal LM that drafts token trees, best path first (SpecExec, 2406.02532), for targets whose forward pass costs about as
much for hundreds of positions as for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.drafts import Draft, Round
from ...core.host import filled, on_device
from ...core.text import Text
from ...engine.parts import unwrapped
from ...engine.runner import CachedModel
from ...engine.traits import Traits
from ...lengths.cost_model import KEEP_LOCAL, DecayedMean, best_size
from ...lengths.rates import Rates
from ..shared.base import Call, Drafting
from ..shared.model_drafter import ModelDrafter, ModelDrafting
from ..shared.tree_growth import ROOT, Growing, Limits, NodeReader, grow, learn
from ..shared.trees import Rows

LARGEST = 1024  # nodes of a tree
BEAM = 32  # nodes that the draft reads in a forward pass
CANDIDATES = 16  # children of a node
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # few sizes, so that the costs of each are soon known
_PASSES = 16  # forward passes of the draft that even a small tree may take
_FIRST = 64  # nodes of a tree while the costs are unknown
_GROWTH = 4  # a tree has at most this many times the nodes of the largest one before it


class TreeDrafter(ModelDrafter):
    """A causal LM that drafts trees wherever both models take 4-D masks, and chains elsewhere. For the options see
    `DraftTree`."""

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
        self.seconds = DecayedMean()  # of a forward pass of the draft over `beam` nodes, with the choice of the nodes

    @property
    def sizes_trees(self) -> bool:
        """Whether both models take trees."""
        return self.masks.trees and Traits.of(self.target).masks.trees

    def start(self, call: Call) -> Drafting:
        return TreeDrafting(self, call) if self.sizes_trees and call.target.masks.trees else super().start(call)


class TreeDrafting(ModelDrafting):
    """One `generate` with trees. What the draft reads of a tree is removed from its slots in the same round."""

    drafter: TreeDrafter

    def __init__(self, drafter: TreeDrafter, call: Call):
        super().__init__(drafter, call)
        self.rates = drafter.rates[call.distribution.do_sample]
        self.grown: Growing | None = None  # until it is verified

    def _draft(self, runner: CachedModel, text: Text, budget: int) -> Draft:
        logits = self._read_committed(runner, text)
        with runner.cache.borrowed():
            return self._grown(runner, text, logits[:, None], budget)

    def observe(self, round: Round) -> None:
        """Learn how often the draft is right, and what it costs. Its slots hold committed text only."""
        grown, self.grown = self.grown, None
        took = (0.0, 0) if grown is None else (grown.seconds, grown.forwards)
        seconds, passes = self.call.settings.ranks.largest(list(took))
        self.drafter.seconds.add(seconds, passes, keep=KEEP_LOCAL**passes)
        if grown is not None:
            learn(self.rates, grown.offers, grown.text, round.kept)

    def _grown(self, runner: CachedModel, text: Text, logits: torch.Tensor, depth: int) -> Draft:
        """The tree of the most probable paths, at most `depth` deep. logits: [B, 1, V], after the committed text.

        It grows until another forward pass would cost more than it is expected to gain.
        """
        drafter, costs = self.drafter, self.call.length.costs  # made anew every time
        chosen = drafter.nodes is None and costs is not None
        most = min(LARGEST, _GROWTH * drafter.largest) if chosen else drafter.nodes or _FIRST
        room = 2 * most + _PASSES * drafter.beam  # many nodes that were read are no longer among the best in the end
        reader = TreeReader(runner, room, lambda logits: self.fitted(logits, text))
        limits = Limits(depth, drafter.beam, drafter.candidates, most, room)
        each = drafter.seconds.mean()

        def size(grown: Growing) -> tuple[int, float]:
            """The most worthwhile size, and its tokens per second."""
            seconds, worth = grown.forwards * each, grown.worth()
            if costs is None or not chosen:
                return len(worth), 0.0
            return best_size(worth, lambda nodes: seconds + costs.verify_seconds(nodes + 1), SIZES)

        def goes_on(grown: Growing) -> bool:
            """Whether another forward pass is expected to gain more tokens per second than the tree has without it."""
            return not chosen or each == 0 or _gain(grown) > size(grown)[1] * each

        grown = self.grown = grow(reader, self.call, text, logits, self.rates, limits, goes_on)
        kept, _ = size(grown)
        drafter.largest = max(drafter.largest, kept)
        return grown.draft(kept, grown.worth())


def _gain(grown: Growing) -> float:
    """Expected accepted tokens, per row, among the children of the nodes that would be read next.

    A node passes on to its children the share of its path probability that the nodes read last passed on.
    """
    had = got = gain = 0.0
    for offered, nodes, following in zip(grown.offers, grown.above, grown.reading, strict=True):
        gain += sum(math.exp(offered.scores[node]) for node in following)
        for node in nodes:
            first, sure = offered.below[node]
            had += 1.0 if node == ROOT else math.exp(offered.scores[node])
            got += sum(math.exp(score) for score in offered.scores[first : first + len(sure)])
    return gain * got / had / len(grown.text.unfinished) if had else 0.0


class TreeReader(NodeReader):
    """The nodes of a token tree that a model has read, in the slots after the committed text.

    Nodes may be read in any order in which parents precede their children, those of one forward pass at different depths. Each
    node attends to what its parent attends to, and to itself. The slots remain filled; the caller rewinds the cache.

    Args:
        runner: a model that takes 4-D masks (`Masks.trees`). It has read all committed tokens, the last one included.
        room: the largest number of columns that are read.
        fitted: maps the model's logits to the target's vocabulary.
    """

    def __init__(self, runner: CachedModel, room: int, fitted: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(runner.cache.rows)
        self.fitted = fitted
        cache = runner.cache
        self.runner = runner
        self.known = cache.ends(runner.device)  # [R, 1]
        self.first = on_device(runner.first_positions(), runner.device)[:, None]
        slots = torch.arange(max(cache.lengths[row] for row in cache.running) + room, device=runner.device)
        seen = cache.hide_padding(slots < self.known)
        self.seen = seen[:, None]  # [R, 1 + columns, S] bool, the slots that the root and each column attend to
        self.places = slots.repeat(len(seen), 1)  # [R, S], the index of each slot's token in its row's text

    def read(self, tokens: Rows, parents: Rows, depths: Rows) -> torch.Tensor:
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
        return self.fitted(cache.spread(logits))
