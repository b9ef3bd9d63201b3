"""What the adaptive draft length measures while it runs: seconds of forward passes, and how often drafted tokens are accepted.

Knows numbers; nothing of models, and nothing of the decisions that depend on them.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from .costs import Costs
from .faded import Faded

__all__ = ["MEMORY", "Curve", "Known", "Reliability", "confidence_bin"]

SAMPLES = 15  # timings that are kept of each count
MEMORY = 0.99  # share of the past that remains after a round: about the last hundred rounds count
_SAME = 0.01  # a relative change of a median below this does not change the curve
_FORGOTTEN = 100  # forward passes after which a count that did not occur again is forgotten
_MANY = 32  # counts between two measured ones from which their difference is relied on
_BELIEVED = 0.5  # while the slope is a guess: share of the slope measured by a single forward pass that is trusted
_EXPECTED = 1.0  # rejections that confidences must have predicted until the number of actual ones counts as much
_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))


def confidence_bin(confidence: float) -> int:
    """The bin of the draft's confidence, which is its largest probability."""
    return bisect_right(_EDGES, confidence)


def typical(samples: deque[float]) -> float:
    """The median; the smaller of two samples, since the other is likely to be a slow first forward pass."""
    return min(samples) if len(samples) < 3 else median(samples)


class Curve:
    """Seconds by a count: of a forward pass by its positions, or of a draft by its forward passes or the tokens asked for.

    Medians of recent timings, interpolated between the counts that occurred.

    Args:
        longest: the largest count to estimate.
        slope: a guess of what one more adds, as a share of the seconds of the first. Used until two counts have occurred
            twice; a single timing of a larger count may raise it before.
        known: seconds by count, measured earlier. Used until two counts have occurred here.
        one_apart: a count of one runs differently from larger counts: the difference between one and two does not predict
            the difference between two and three.

    Attributes:
        seconds: by count, index 0 unused; empty while nothing is known.
        step: mean seconds that one more adds.
    """

    def __init__(self, longest: int, slope: float, known: Mapping[int, float] | None = None, one_apart: bool = False):
        self.longest = longest
        self.slope = slope
        self.one_apart = one_apart
        self.samples: dict[int, deque[float]] = {}
        self.typical: dict[int, float] = {}
        self.last: dict[int, int] = {}  # by count: the number of the last timing
        self.timings = 0
        self.given = known is not None
        self.seconds: list[float] = []
        self.step = 0.0
        if known:
            self._fill(dict(known))

    def see(self, count: int, seconds: float) -> None:
        """Take in a timing."""
        changed = self._forget(count)
        samples = self.samples.setdefault(count, deque(maxlen=SAMPLES))
        samples.append(seconds)
        if len(samples) == 1:  # the first forward pass of a shape is slow: it serves for a guess only
            changed |= len(self.typical) == 1
        else:
            before, now = self.typical.get(count), typical(samples)
            if before is None or abs(now - before) >= _SAME * before:
                self.typical[count] = now
                changed = True
        if changed and self.typical and (len(self.typical) > 1 or not self.given):
            self._fill(self.typical)

    def _forget(self, count: int) -> bool:
        """Forget counts, except for the least, that have not occurred for long. `count` occurs now. Returns whether any was
        forgotten.

        A count that seemed expensive because of two disturbed timings is not drafted to again, so no new timing corrects it.
        """
        self.timings += 1
        self.last[count] = self.timings
        least, before = min(self.last), self.timings - _FORGOTTEN
        gone = [old for old, last in self.last.items() if last < before and old > least]
        for old in gone:
            del self.last[old], self.samples[old]
            self.typical.pop(old, None)
        return bool(gone)

    def copy(self) -> Curve:
        other = copy.copy(self)  # `seconds` is never changed, but made anew
        other.samples = {count: samples.copy() for count, samples in self.samples.items()}
        other.typical, other.last = self.typical.copy(), self.last.copy()
        return other

    def at(self, count: int) -> float:
        """Seconds for this count; beyond `longest`, those of `longest`. Only once something is known."""
        return self.seconds[min(count, len(self.seconds) - 1)]

    def each(self, by_count: bool) -> float:
        """Recent mean seconds of a timing, or, by_count, of one of what it counts. Only once something is known."""
        seen = [(count, seconds, len(self.samples[count])) for count, seconds in self.typical.items()]
        if not seen:  # all was measured earlier
            return self.seconds[1]
        return sum(s * n for _, s, n in seen) / sum(n * (count if by_count else 1) for count, _, n in seen)

    def _fill(self, known: dict[int, float]) -> None:
        counts = sorted(known)
        seconds = [known[count] for count in counts]
        for i in range(len(counts) - 2, -1, -1):  # fewer never take longer: that was an outlier that occurred twice
            seconds[i] = min(seconds[i], seconds[i + 1])
        first, last = counts[0], counts[-1]
        start = 1 if self.one_apart and first == 1 and len(counts) > 1 else 0
        if last - counts[start] < _MANY <= last - first:
            start = 0  # over so many, it matters little that one runs differently
        slope = self.slope * seconds[start]
        if last > counts[start]:
            least = 10 if last - counts[start] < _MANY else 100
            slope = max((seconds[-1] - seconds[start]) / (last - counts[start]), slope / least)
        else:
            further = (
                (seen[0] - seconds[start]) / (count - last) for count, seen in self.samples.items() if count > last
            )
            slope = max(slope, _BELIEVED * min(further, default=0.0))
        filled = [0.0]
        i = 0
        for count in range(1, max(self.longest, last) + 1):
            if count <= first:
                filled.append(seconds[0] / (1 + self.slope * (first - count)))
            elif count >= last:
                filled.append(seconds[-1] + slope * (count - last))
            else:
                while counts[i + 1] < count:
                    i += 1
                share = (count - counts[i]) / (counts[i + 1] - counts[i])
                filled.append(seconds[i] + share * (seconds[i + 1] - seconds[i]))
        self.seconds, self.step = filled, slope


class Reliability:
    """How often a drafted token is accepted once those before it are, by the draft's confidence and the position.

    A cell holds the share of accepted tokens and the round of its last change; the past fades with every round. A cell with
    few observations is combined with a more general one: (confidence, position) with the confidence, and the confidence with
    a guess. The guess for a token that is not sampled is the confidence itself. If fewer tokens are rejected than that
    predicts, it is raised at all confidences: a quantized copy of the target is nearly always right, even where it is unsure.
    """

    def __init__(self) -> None:
        self.round = 0
        self.cells: dict[Any, tuple[Faded, int]] = {}

    def copy(self) -> Reliability:
        other = Reliability()
        other.round = self.round
        other.cells = {key: (seen.copy(), changed) for key, (seen, changed) in self.cells.items()}
        return other

    def accept(self, bin: int, position: int, sampled: bool = False) -> float:
        """The acceptance rate of a token of this confidence at this position (0-based).

        sampled: the token is drawn. Confidence then predicts little before anything is known, and the guess is optimistic: a
        token that is never proposed never shows how often it is accepted.
        """
        return self._blend((bin, _group(position)), 4, self._blend(bin, 2, self._guess(bin, sampled)))

    def chain(self, longest: int) -> list[float]:
        """Acceptance rates by position, where no confidence is known. Each is combined with the one before it."""
        found, above = [], 0.5
        for position in range(longest):
            above = self._blend(("chain", position), 3, above)
            found.append(above)
        return found

    def following(self, bin: int, sampled: bool = False) -> float:
        """The expected `accept` of the token after one of this confidence.

        Few drafts continue after tokens of low confidence. There, drafts that continued after other tokens predict better
        than the guess.
        """
        return self._blend(("following", bin), 2, self._blend("following", 4, max(0.3, self._guess(bin, sampled))))

    def see(self, bin: int, position: int, accepted: bool, sampled: bool = False) -> None:
        self._add(bin, accepted)
        self._add((bin, _group(position)), accepted)
        self._add("rejected", not accepted, 1 - _prior(bin, sampled))

    def see_chain(self, position: int, accepted: bool) -> None:
        self._add(("chain", position), accepted)

    def see_following(self, bin: int, accept: float) -> None:
        self._add("following", accept)
        self._add(("following", bin), accept)

    def _guess(self, bin: int, sampled: bool) -> float:
        """The acceptance rate of a token of this confidence, as far as it can be told without tokens of the same confidence."""
        return 1 - (1 - _prior(bin, sampled)) * min(1.0, self._blend("rejected", _EXPECTED, 1.0))

    def _blend(self, key: Any, weight: float, above: float) -> float:
        cell = self.cells.get(key)
        if cell is None:
            return above
        seen, changed = cell
        return seen.mean(above, weight, MEMORY ** (self.round - changed))

    def _add(self, key: Any, value: float, weight: float = 1.0) -> None:
        seen, changed = self.cells.get(key) or (Faded(), self.round)
        seen.add(value, weight, MEMORY ** (self.round - changed))
        self.cells[key] = seen, self.round


@dataclass
class Known:
    """What one `generate` passes on to the next.

    Args:
        verify: seconds of a forward pass of the target by its positions.
        draft: seconds of a draft by its forward passes; of a drafter that proposes a block at once, by the tokens that it was
            asked for.
        credit: tokens per row that drafting may still lose before it pauses.
        pause: length of the next pause in tokens.
        paused: tokens left of the current pause.
        reliability: how often drafted tokens are accepted.
        asks: whether the drafter asks before every token; None before its first draft.
        nodes: mean nodes that a block has per token of its depth, 1 for chains.
        pace: recent seconds per committed token of a row, by the costs.
        rounds, plain_at: number of rounds so far, and of the last one without a draft.
    """

    verify: Curve
    draft: Curve
    credit: float
    pause: float
    paused: float = 0.0
    reliability: Reliability = field(default_factory=Reliability)
    asks: bool | None = None
    nodes: float = 1.0
    pace: Faded = field(default_factory=Faded)
    rounds: int = 0
    plain_at: int = 0

    def copy(self) -> Known:
        """For the next `generate`, which does not change the original."""
        return replace(
            self,
            verify=self.verify.copy(),
            draft=self.draft.copy(),
            reliability=self.reliability.copy(),
            pace=self.pace.copy(),
        )

    def costs(self) -> Costs | None:
        """Seconds of the forward passes; None while they are not known."""
        if not self.verify.seconds or not self.draft.seconds:
            return None
        return Costs(tuple(enumerate(self.verify.seconds))[1:], self.draft.each(by_count=self.asks is not False))

    def speedup(self) -> float | None:
        """Recent speedup over the autoregressive baseline, by the costs; None while these are not known."""
        if not self.draft.seconds or not self.pace.total:
            return None
        return self.pace.weight / self.pace.total * self.verify.at(1)


def _prior(bin: int, sampled: bool) -> float:
    return (1 + _MIDDLES[bin]) / 2 if sampled else _MIDDLES[bin]


def _group(position: int) -> int:
    return position if position < 2 else 2 + (position >= 4) + (position >= 8)
