"""Which layer to exit at: what exits were measured to be worth, and what that predicts (shadow acceptance, 2504.05598).

Knows numbers: acceptances and costs by layer. How they are measured is the drafter's.
"""

from __future__ import annotations

import statistics

from ..lengths.faded import Faded
from .chain import predicted_speedup

__all__ = ["ExitChoice"]

HALF_LIFE = 200  # trials after which an observation counts half
BELIEVED = 8  # trials a layer needs to be chosen
JUDGED = 64  # trials after which drafting is called hopeless
MARGIN = 1.05  # how much better another layer must look: the estimates are noisy
SHADOWS = 8  # layers measured in one round, at the most
LONGEST_GAP = 64  # rounds between two measurements
MEMORY = 0.9  # share of the average draft length that a round leaves as it was
COSTS = 15  # measured costs that are remembered


class ExitChoice:
    """What was learned of the exits of one model. It changes which layer drafts, never what is accepted.

    Args:
        count: layers of the model.
        given: exit at this one and measure nothing; None chooses.

    Attributes:
        layer: how many layers draft at the moment.
    """

    def __init__(self, count: int, given: int | None = None):
        self.count = count
        self.given = given
        self.layer = given or max(1, count // 4)
        self.right = [Faded() for _ in range(count)]  # of the tokens of each exit, those that were accepted
        self.costs: tuple[tuple[int, float], ...] = ()  # made anew: another thread may be reading them
        self.drafted: float | None = None  # tokens of a draft, on average
        self.rounds = 0
        self.measurements = 0
        self.next = 0

    def to_measure(self) -> list[int] | None:
        """The layers to measure this round, None for none. Called once a round; often at first, then ever more rarely.

        The layer that drafts is measured by its drafts; the others take turns, evenly spread.
        """
        self.rounds += 1
        if self.given is not None or self.rounds <= self.next:
            return None
        self.next = self.rounds + min(self.rounds // 8, LONGEST_GAP)
        stride = -(-(self.count - 1) // SHADOWS)
        first = 1 + self.measurements % stride
        self.measurements += 1
        return [layer for layer in range(first, self.count, stride) if layer != self.layer] or None

    def learn(self, layer: int, hits: float, trials: float) -> None:
        """`hits` of `trials` tokens of this exit were, or would have been, accepted."""
        self.right[layer].add(hits, trials, keep=0.5 ** (trials / HALF_LIFE))

    def learn_cost(self, layer: int, cost: float) -> None:
        """A drafted token of this exit took `cost` passes of the whole target."""
        self.costs = (*self.costs, (layer, min(cost, 0.99)))[
            -COSTS:
        ]  # more is noise or hopeless: fewer layers are never dearer

    def acceptance(self, layer: int) -> float:
        """The estimated acceptance rate; 0.5 where nothing is known."""
        return self.right[layer].mean(0.5, strength=2)

    def cost(self, layer: int) -> float:
        """Of a drafted token, in passes of the target: on the line through what was measured and the whole pass.

        Fewer layers than measured are not taken for cheaper, layer by layer, than the measured ones.
        """
        costs = self.costs
        if not costs:
            return layer / self.count
        found = []
        for measured, cost in costs:
            line = cost + (1 - cost) * (layer - measured) / (self.count - measured)
            found.append(line if layer > measured else max(line, cost * layer / measured))
        return statistics.median(found)

    def speedup(self, layer: int, shortest: int = 1, longest: int = 8) -> float:
        """What this exit predicts, at the best draft length of a range."""
        return predicted_speedup(self.acceptance(layer), self.cost(layer), shortest, longest)

    def decide(self, drafted: float, budget: int) -> None:
        """Move to the layer that predicts the most.

        drafted: tokens of the last round's draft, budget: tokens that it might have had. What a policy drafts on average
        it may be expected to draft with another layer too, or more if that is right more often.
        """
        self.drafted = drafted if self.drafted is None else MEMORY * self.drafted + (1 - MEMORY) * drafted
        if self.given is not None:
            return
        lengths = min(max(1, round(self.drafted)), budget), budget
        known = [layer for layer in range(1, self.count) if self.right[layer].weight >= BELIEVED]
        best = max(known, key=lambda layer: self.speedup(layer, *lengths), default=self.layer)
        if self.speedup(best, *lengths) > MARGIN * self.speedup(self.layer, *lengths):
            self.layer = best

    @property
    def hopeless(self) -> bool:
        """No draft of the layer in use pays, at any length. Where it was chosen, none of another layer does."""
        return self.right[self.layer].weight >= JUDGED and self.speedup(self.layer) < 1
