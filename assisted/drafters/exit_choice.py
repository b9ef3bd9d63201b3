"""The choice of the exit layer by the speedup that measurements predict (shadow acceptance, 2504.05598).

Knows acceptance rates and costs by layer; the drafter measures them.
"""

from __future__ import annotations

import statistics

from ..lengths.cost_model import ENOUGH, KEEP, KEEP_LOCAL, PRIOR, SAMPLES, DecayedMean, best_speedup

MARGIN = 1.05  # factor by which another layer must look better, because the estimates are noisy
SHADOWS = 8  # maximum number of layers measured in one round
LONGEST_GAP = 64  # maximum number of rounds between two measurements


class ExitChoice:
    """Statistics of the exits of one model. They determine which layer drafts, but never what is accepted.

    count: number of layers in the model. given: always exit after this layer, without measuring; None to choose. The attribute
    `layer` is the number of layers that draft at present.
    """

    def __init__(self, count: int, given: int | None = None):
        self.count = count
        self.given = given
        self.layer = given or max(1, count // 4)
        self.right = [DecayedMean() for _ in range(count)]  # accepted tokens of each exit
        self.costs: tuple[tuple[int, float], ...] = ()  # replaced, not changed: another thread may be reading it
        self.drafted = DecayedMean()  # draft length
        self.rounds = 0
        self.measurements = 0
        self.next = 0

    def to_measure(self) -> list[int] | None:
        """The layers to measure in this round, or None. Called once per round; measurements become rarer with time.

        The layer in use is measured by its drafts. The others take turns in evenly spread groups.
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
        self.right[layer].add(hits, trials, keep=KEEP**trials)

    def learn_cost(self, layer: int, cost: float) -> None:
        """A drafted token of this exit took the time of `cost` forward passes of the whole target."""
        # more than 0.99 is noise or hopeless, because fewer layers are never more expensive
        self.costs = (*self.costs, (layer, min(cost, 0.99)))[-SAMPLES:]

    def acceptance(self, layer: int) -> float:
        """The estimated acceptance rate, 0.5 before any observation."""
        return self.right[layer].mean(0.5, PRIOR)

    def cost(self, layer: int) -> float:
        """Estimated cost of a drafted token, in forward passes of the target.

        The median over all measurements of the line from the measured exit to the whole forward pass. Below the measured layer,
        the cost per layer is assumed to be no lower than the measured one.
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
        """The predicted speedup of this exit at the best draft length from `shortest` to `longest`."""
        return best_speedup(self.acceptance(layer), self.cost(layer), range(shortest, longest + 1))

    def decide(self, drafted: float, budget: int) -> None:
        """Switch to the layer with the highest predicted speedup.

        drafted: length of the last draft. budget: its maximum length. With another layer, the policy is assumed to draft at
        least the average length, and up to the budget.
        """
        self.drafted.add(drafted, keep=KEEP_LOCAL)
        if self.given is not None:
            return
        lengths = min(max(1, round(self.drafted.mean())), budget), budget
        known = [layer for layer in range(1, self.count) if self.right[layer].weight >= 2 * PRIOR]
        best = max(known, key=lambda layer: self.speedup(layer, *lengths), default=self.layer)
        if self.speedup(best, *lengths) > MARGIN * self.speedup(self.layer, *lengths):
            self.layer = best

    @property
    def hopeless(self) -> bool:
        """Whether no draft length gives a speedup with the layer in use. If it was chosen, this holds for all known layers."""
        return self.right[self.layer].weight >= 2 * ENOUGH and self.speedup(self.layer) < 1
