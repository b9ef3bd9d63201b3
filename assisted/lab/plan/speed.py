"""How fast a pair should be: reading the weights takes a pass's time, acceptance says how many passes are saved. Ranges,
because acceptance depends on the text and passes reach only a share of the bandwidth. `assisted doctor` measures both."""

from __future__ import annotations

from dataclasses import dataclass

from ...calls.costs import numbers_read
from ...lengths.cost_model import best_speedup
from ...methods.shared.base import Spec
from .shapes import Shapes

_LONGEST = 15
_LEAST_COST = 0.01  # of a target pass, for a draft that reads no weights
_LAUNCH = 0.03  # of a target pass, for the layers of a draft whose weights are read in no time
_WIDER = (0.005, 0.04)  # of a pass, for each further position that it verifies
_LAYER = (300e-6, 30e-6)  # seconds of a layer at least, launched op by op and captured in a graph; an assumption
_LOOP = 0.97  # the controller switches drafts off that do not pay, and this is what finding out costs


@dataclass(frozen=True)
class Speed:
    """A prediction, low and high."""

    plain: tuple[float, float]  # tokens per second without drafts
    times: tuple[float, float]  # speedup by drafts


def predict(
    target: Shapes,
    spec: Spec,
    weights: int,
    drafts: int,
    states: int,
    bandwidth: tuple[float, float],
    offloaded: int = 0,
    bus: tuple[float, float] = (1.0, 1.0),
    draft_layers: int = 0,
) -> Speed:
    """The speed of one row.

    weights, drafts, states: bytes of the target's weights, of the draft's, and of the keys and values at half of the context.
    bandwidth: bytes per second. offloaded: bytes of the weights that cross the bus in each pass, and the bus's bandwidth.
    draft_layers: that a draft's pass runs.
    """
    reads = [read_per_pass(target, weights, 1 + length) + states for length in range(_LONGEST + 1)]

    def taken(side: int) -> list[float]:
        """Seconds of a pass by draft length. Of offloaded layers, all experts cross the bus: they are one tensor."""
        least = target.layers * _LAYER[side]
        return [max(least, max(0, read - offloaded) / bandwidth[side] + offloaded / bus[side]) for read in reads]

    def speedup(side: int, cost: float, wider: float) -> float:
        """At the best draft length. wider: what each further position adds to reading the weights."""
        acceptance = max(one.acceptance[side] for one in spec.parts())
        passes = [took / seconds[side][0] + (0.0 if offloaded else wider) * n for n, took in enumerate(seconds[side])]
        return best_speedup(acceptance, cost, range(len(passes)), passes.__getitem__)

    seconds = taken(0), taken(1)
    draft_share = max(draft_layers * _LAYER[1], drafts / bandwidth[1]) / seconds[1][0]
    cost = draft_share + (_LAUNCH if drafts else _LEAST_COST) * (0.2 if offloaded else 1)
    slow, fast = speedup(0, 1.5 * cost, _WIDER[1]), speedup(1, cost, _WIDER[0])
    return Speed((1 / seconds[0][0], 1 / seconds[1][0]), (max(_LOOP, slow), max(1.0, fast)))


def read_per_pass(target: Shapes, weights: int, positions: int = 1) -> int:
    """Bytes of the weights that a pass reads: not an untied embedding, and of experts only those that are expected to be chosen
    by one of the positions."""
    return int(weights * (numbers_read(target.model, positions) / target.numbers))
