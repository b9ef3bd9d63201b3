"""Whether a draft is worth its time: averages that forget, the cost of forward passes, and the speedup of a draft.

Everything that decides how much to draft uses these: draft lengths, trees, lists of drafters, early exits, the plan and the
doctor. Pure Python on numbers; knows nothing of models. The page "Cost model" derives the formulas. The constants were chosen
by simulation, `python benchmarks/simulated.py --sweep`, which shows what half and twice each of them does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from statistics import median

__all__ = [
    "COLUMN",
    "UNMEASURED",
    "Costs",
    "DecayedMean",
    "Timings",
    "best_size",
    "best_speedup",
    "expected_tokens",
    "speedup",
    "verify_cost",
]

KEEP = 0.99
"""Share of the past that remains after a round in acceptance rates: about a hundred rounds count. Fewer are noisy, more are
slow to follow a text that changes its nature."""
KEEP_LOCAL = 0.9
"""The same where the last paragraph matters more than the last page, and for seconds: about ten rounds count."""
PRIOR = 4.0
"""Observations that a guess counts for in a rate. Fewer make the first rejections look like a rule, more hide what is peculiar
to this draft."""
ENOUGH = 32
"""Observations from which an estimate is relied on alone, and drafting may be called hopeless. A rate then has a standard error
below 0.1."""
SAMPLES = 15
"""Timings that are kept of each number of positions. Their median bears seven that were disturbed."""
COLUMN = 0.02
"""What one more position is assumed to add to a forward pass of the target until it is measured, as a share of the forward
pass over one position. Typical of CPUs; accelerators are below it."""


@dataclass(slots=True)
class DecayedMean:
    """A ratio of two sums that forget: accepted to drafted tokens, for example, or seconds to tokens.

    Args:
        total: sum of the observed values.
        weight: sum of their weights.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0, keep: float = 1.0) -> None:
        """Take in one more observation. value, weight: are added to the sums. keep: share of the past that remains."""
        self.total = keep * self.total + value
        self.weight = keep * self.weight + weight

    def mean(self, prior: float = 0.0, strength: float = 0.0) -> float:
        """The average. prior: a guess, which counts as `strength` observations, and alone if there are none."""
        weight = self.weight + strength
        return (self.total + strength * prior) / weight if weight else prior

    def faded(self, keep: float = 1.0) -> DecayedMean:
        """A copy of which a share `keep` remains."""
        return DecayedMean(keep * self.total, keep * self.weight)


Knots = tuple[tuple[int, float], ...]
"""Pairs of a count and seconds, counts ascending."""


@dataclass(frozen=True)
class Costs:
    """What forward passes take on a machine, in seconds.

    Args:
        verify: pairs (positions, seconds of a forward pass of the target over that many tokens of each row), positions
            ascending from 1.
        draft: mean seconds of a forward pass of the draft. Of a drafter that proposes a block at once: of a block.
    """

    verify: Knots
    draft: float

    def __post_init__(self) -> None:
        pairs = tuple((int(positions), float(seconds)) for positions, seconds in self.verify)
        if (
            not pairs
            or pairs[0][0] < 1
            or any(a[0] >= b[0] for a, b in pairwise(pairs))
            or min(seconds for _, seconds in pairs) <= 0
        ):
            raise ValueError(
                f"verify: {self.verify!r} are no costs; give pairs of positions (ascending, from 1) and seconds"
            )
        if not self.draft >= 0:
            raise ValueError(f"draft: {self.draft} is no cost; give the seconds of a forward pass of the draft")
        object.__setattr__(self, "verify", pairs)

    def verify_seconds(self, positions: int) -> float:
        """Seconds of a forward pass of the target. Interpolated linearly, and extrapolated beyond what was measured; from a
        single measurement with `COLUMN`."""
        if len(self.verify) == 1:
            known, seconds = self.verify[0]
            return seconds * (1 + COLUMN * (positions - known))
        at = min(max(bisect_left(self.verify, positions, key=itemgetter(0)), 1), len(self.verify) - 1)
        (left, low), (right, high) = self.verify[at - 1 : at + 1]
        return high if positions == right else low + (high - low) * (positions - left) / (right - left)


UNMEASURED = Costs(verify=((1, 1.0),), draft=0.0)
"""The costs to assume before anything is measured, in forward passes over one position. Drafting takes no time."""


class Timings:
    """Seconds by a count, from timings: of a forward pass by its positions, or of a draft by its forward passes.

    Medians of recent timings, on lines between the counts that occurred.

    Args:
        longest: the largest count to estimate.
        slope: a guess of what one more adds, as a share of the seconds of the first. Used until two counts have occurred
            twice; a single timing of a larger count may raise it before.
        known: seconds by count, measured earlier. Used until two counts have occurred here.
        one_apart: a count of one runs differently from larger counts: the difference between one and two does not predict
            the difference between two and three.

    Attributes:
        knots: from a count of 1 to `longest` at least; empty while nothing is known.
        seconds: on the lines between the knots, by count; index 0 is unused.
        step: mean seconds that one more adds.
    """

    def __init__(self, longest: int, slope: float, known: Mapping[int, float] | None = None, one_apart: bool = False):
        self.longest, self.slope, self.one_apart = longest, slope, one_apart
        self.samples: dict[int, tuple[float, ...]] = {}
        self.typical: dict[int, float] = {}  # medians of the samples
        self.last: dict[int, int] = {}  # by count: the number of the last timing
        self.timings = 0
        self.given = bool(known)
        self.knots: Knots = ()
        self.seconds: list[float] = []
        self.step = 0.0
        if known:
            self._fit(dict(known))

    def add(self, count: int, seconds: float) -> None:
        """Take in a timing. seconds: for this count."""
        self.timings += 1
        self.last[count] = self.timings
        # a count that seemed expensive because of disturbed timings is not drafted to again, so no new timing corrects it
        least, before = min(self.last), self.timings - round(1 / (1 - KEEP))
        gone = [old for old, last in self.last.items() if last < before and old > least]
        for old in gone:
            del self.last[old], self.samples[old]
            self.typical.pop(old, None)
        samples = self.samples[count] = (*self.samples.get(count, ()), seconds)[-SAMPLES:]
        known = self.typical.get(count)
        if len(samples) > 1:  # of two the smaller, since the first pass of a shape is slow; alone it serves for a guess
            self.typical[count] = min(samples) if len(samples) == 2 else median(samples)
        changed = gone or len(samples) == 1 or self.typical[count] != known
        if changed and self.typical and (len(self.typical) > 1 or not self.given):
            self._fit(self.typical)

    def at(self, count: int) -> float:
        """Seconds for this count; beyond the last knot, those of the last. Only once something is known."""
        return self.seconds[min(count, len(self.seconds) - 1)]

    @property
    def largest(self) -> int:
        """The largest count that was timed lately or is given; 0 while nothing is known."""
        return max(self.samples, default=self.knots[-1][0] if self.given else 0)

    def each(self, by_count: bool) -> float:
        """Recent mean seconds of a timing, or, by_count, of one of what it counts. Only once something is known."""
        if not self.typical:  # all was measured earlier
            return self.at(1)
        seconds = sum(typical * len(self.samples[count]) for count, typical in self.typical.items())
        return seconds / sum(len(self.samples[count]) * (count if by_count else 1) for count in self.typical)

    def _fit(self, known: dict[int, float]) -> None:
        counts = sorted(known)
        # fewer never take longer: that was an outlier that occurred twice
        seconds = list(accumulate((known[count] for count in reversed(counts)), min))[::-1]
        first, last = counts[0], counts[-1]
        # over many positions it matters little that one runs differently
        start = int(self.one_apart and first == 1 and len(counts) > 1 and last - counts[1] < ENOUGH > last - first)
        slope = self.slope * seconds[start]
        if last > counts[start]:
            slope = (seconds[-1] - seconds[start]) / (last - counts[start])
        else:  # half of what a single timing says is believed
            rises = (
                (seen[0] - seconds[start]) / (count - last) for count, seen in self.samples.items() if count > last
            )
            slope = max(slope, min(rises, default=0.0) / 2)
        knots = list(zip(counts, seconds, strict=True))
        if first > 1:
            knots.insert(0, (1, seconds[0] / (1 + self.slope * (first - 1))))
        if last < self.longest:
            knots.append((self.longest, seconds[-1] + slope * (self.longest - last)))
        self.knots, self.step = tuple(knots), slope
        self.seconds = [0.0, knots[0][1]]
        for (left, low), (right, high) in pairwise(knots):
            each = (high - low) / (right - left)
            self.seconds += [low + each * more for more in range(1, right - left)] + [high]


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per pass of a chain, the target's own included, if each drafted token is accepted with this probability
    (2211.17192).

    Args:
        acceptance: probability that a drafted token is accepted once those before it are.
        length: drafted tokens.
    """
    return float(length + 1) if acceptance >= 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def verify_cost(length: int, rows: int = 1, position: float = 0.0) -> float:
    """Cost of the forward pass that verifies a draft, if the time of a pass is linear in the number of its positions.

    Args:
        length: drafted tokens in each row; the pass also reads the last token of the text.
        rows: of the batch. The baseline's pass reads one token of each.
        position: what each further position costs, in forward passes over one token of one row.
    """
    return (1 + position * (rows * (length + 1) - 1)) / (1 + position * (rows - 1))


def speedup(acceptance: float, cost: float, length: int, verify: float = 1.0) -> float:
    """Speedup over the autoregressive baseline of drafts of the same length: tokens of a round, divided by what it costs.

    The unit of cost is a forward pass of the target over one token of each row.

    Args:
        acceptance: probability that a drafted token is accepted once those before it are.
        cost: of a drafted token.
        length: drafted tokens.
        verify: cost of the forward pass that verifies them; see `verify_cost`.
    """
    return expected_tokens(acceptance, length) / (verify + cost * length)


def best_speedup(
    acceptance: float,
    cost: float,
    lengths: Iterable[int] = range(1, 9),
    verify: Callable[[int], float] = lambda length: 1.0,
) -> float:
    """`speedup` at the best of several draft lengths.

    Args:
        acceptance, cost: as for `speedup`.
        lengths: that are considered.
        verify: cost of the pass that verifies a draft, by its length.
    """
    return max(speedup(acceptance, cost, length, verify(length)) for length in lengths)


def best_size(
    accepted: Sequence[float], seconds: Callable[[int], float], sizes: Iterable[int] | None = None
) -> tuple[int, float]:
    """How much of a draft to propose: the number of drafted tokens N with the most expected tokens per second,

        (1 + p_1 + ... + p_N) / seconds(N),

    and that rate. Of equal ones, the smallest.

    Args:
        accepted: p, the probability that each drafted token of a chain, or node of a tree, is accepted: that of its whole path.
            Best first; in a batch, means over the rows.
        seconds: of a round that proposes so many tokens.
        sizes: that are considered, ascending; those above the number of tokens count as that number. None considers all. Costs
            are measured by size, so a few sizes that recur are measured sooner than all.
    """
    expected = list(accumulate(accepted, initial=1.0))
    most = len(accepted)
    every = range(most + 1) if sizes is None else (min(size, most) for size in sizes)
    return max(((size, expected[size] / seconds(size)) for size in every), key=itemgetter(1), default=(0, 0.0))
