"""What the adaptive draft length measures on the way: seconds of a pass, and how often a drafted token is accepted.

Knows numbers; nothing of models, and nothing of what is decided by them.
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

SAMPLES = 15  # seconds of so many passes of a kind are remembered
MEMORY = 0.99  # a round: outcomes of some hundred rounds count
_SAME = 0.01  # relative change of a median that is not worth a new curve
_FORGOTTEN = 100  # passes after which a count that was not met again is forgotten
_BELIEVED = 0.5  # share of what a single pass says a column adds, while there is but a guess
_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
_MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))


def confidence_bin(confidence: float) -> int:
    """The bin of a draft's confidence, its largest probability."""
    return bisect_right(_EDGES, confidence)


def typical(samples: deque[float]) -> float:
    """The median; the least of two, one of which is likely to be a first pass."""
    return min(samples) if len(samples) < 3 else median(samples)


class Curve:
    """Seconds of a pass by a count (its columns, or the tokens asked for): medians of the recent past, filled in between.

    Args:
        longest: the largest count to know about.
        slope: guess of what each one more adds, as a share of the first, until two counts have been seen twice; a single pass
            of a larger one may raise it before.
        known: seconds by count, measured earlier; they hold until two counts have been seen here.
        one_apart: a count of one is run in another way than several: what the second one adds says nothing of the third.

    Attributes:
        seconds: by count, index 0 unused; empty while nothing is known.
        step: seconds that one more adds, on average of what was seen.
    """

    def __init__(self, longest: int, slope: float, known: Mapping[int, float] | None = None, one_apart: bool = False):
        self.longest = longest
        self.slope = slope
        self.one_apart = one_apart
        self.samples: dict[int, deque[float]] = {}
        self.typical: dict[int, float] = {}
        self.last: dict[int, int] = {}  # pass of each count that was the latest
        self.passes = 0
        self.given = known is not None
        self.seconds: list[float] = []
        self.step = 0.0
        if known:
            self._fill(dict(known))

    def see(self, count: int, seconds: float) -> None:
        """A pass: what it took."""
        changed = self._forget(count)
        samples = self.samples.setdefault(count, deque(maxlen=SAMPLES))
        samples.append(seconds)
        if len(samples) == 1:  # it may be anything, since the first pass of a shape is slow: enough for a guess
            changed |= len(self.typical) == 1
        else:
            before, now = self.typical.get(count), typical(samples)
            if before is None or abs(now - before) >= _SAME * before:
                self.typical[count] = now
                changed = True
        if changed and self.typical and (len(self.typical) > 1 or not self.given):
            self._fill(self.typical)

    def _forget(self, count: int) -> bool:
        """Drop what was not seen for long, but for the least count; this one is seen now. Says whether that was anything.

        A count that seemed dear, for a disturbance that came twice, is not met again: nothing else would put it right.
        """
        self.passes += 1
        self.last[count] = self.passes
        least, before = min(self.last), self.passes - _FORGOTTEN
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
        """Seconds for this count; the longest known where it is longer. Only once something is known."""
        return self.seconds[min(count, len(self.seconds) - 1)]

    def each(self, by_count: bool) -> float:
        """Mean seconds of the recent past, of a pass, or of one of what passes are counted by. Only once something is known."""
        seen = [(count, seconds, len(self.samples[count])) for count, seconds in self.typical.items()]
        if not seen:  # only earlier
            return self.seconds[1]
        return sum(s * n for _, s, n in seen) / sum(n * (count if by_count else 1) for count, _, n in seen)

    def _fill(self, known: dict[int, float]) -> None:
        counts = sorted(known)
        seconds = [known[count] for count in counts]
        for i in range(len(counts) - 2, -1, -1):  # less never takes longer: an outlier that came twice
            seconds[i] = min(seconds[i], seconds[i + 1])
        first, last = counts[0], counts[-1]
        start = 1 if self.one_apart and first == 1 and len(counts) > 1 else 0
        slope = self.slope * seconds[start]
        if last > counts[start]:
            slope = max((seconds[-1] - seconds[start]) / (last - counts[start]), slope / 10)
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
    """How often a drafted token is accepted once those before it are: by the draft's confidence and the position.

    A cell holds (accepted, seen, round of the last change), and the past fades round by round. One that has seen little
    leans on the one above it: (confidence, position) on the confidence, and that on a guess: where tokens are not drawn, the
    confidence taken at its word.
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
        """Of a token of this confidence at this position (0-based).

        sampled: it is drawn. Then confidence says little before anything is known, and the guess is a hopeful one: a token
        that is never proposed never shows how often it is accepted.
        """
        return self._blend((bin, _group(position)), 4, self._blend(bin, 2, _prior(bin, sampled)))

    def chain(self, longest: int) -> list[float]:
        """By position, where no confidence is known. Each leans on the one before it."""
        found, above = [], 0.5
        for position in range(longest):
            above = self._blend(("chain", position), 3, above)
            found.append(above)
        return found

    def following(self, bin: int, sampled: bool = False) -> float:
        """What `accept` may be expected to say of the token after one of this confidence.

        Behind tokens of little confidence few drafts go on: one that went on elsewhere says more of it than the guess.
        """
        return self._blend(("following", bin), 2, self._blend("following", 4, max(0.3, _prior(bin, sampled))))

    def see(self, bin: int, position: int, accepted: bool) -> None:
        self._add(bin, accepted)
        self._add((bin, _group(position)), accepted)

    def see_chain(self, position: int, accepted: bool) -> None:
        self._add(("chain", position), accepted)

    def see_following(self, bin: int, accept: float) -> None:
        self._add("following", accept)
        self._add(("following", bin), accept)

    def _blend(self, key: Any, weight: float, above: float) -> float:
        cell = self.cells.get(key)
        if cell is None:
            return above
        seen, changed = cell
        return seen.mean(above, weight, MEMORY ** (self.round - changed))

    def _add(self, key: Any, value: float) -> None:
        seen, changed = self.cells.get(key) or (Faded(), self.round)
        seen.add(value, 1.0, MEMORY ** (self.round - changed))
        self.cells[key] = seen, self.round


@dataclass
class Known:
    """What one `generate` leaves to the next.

    Args:
        verify: seconds of a pass of the target by its columns.
        draft: seconds of a draft by its forwards; of a drafter that proposes a block at once by the tokens it was asked for.
        credit: tokens a row that drafting may still lose before it pauses.
        pause: tokens of the next pause.
        paused: tokens left of this one.
        reliability: of drafted tokens.
        asks: whether the drafter asks before every token; None before its first draft.
        nodes: columns that a block has for each token of its depth, 1 for chains.
        pace: seconds of a committed token of each row in the recent past, by the costs.
        rounds, plain_at: rounds so far, and the last of them that was plain.
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
        """For the next `generate` to build on: what it adds is not seen here."""
        return replace(
            self,
            verify=self.verify.copy(),
            draft=self.draft.copy(),
            reliability=self.reliability.copy(),
            pace=self.pace.copy(),
        )

    def costs(self) -> Costs | None:
        """What the passes take; None while that is not known."""
        if not self.verify.seconds or not self.draft.seconds:
            return None
        return Costs(tuple(enumerate(self.verify.seconds))[1:], self.draft.each(by_count=self.asks is not False))

    def speedup(self) -> float | None:
        """Of the recent past against plain decoding, by the costs; None while they are not known."""
        if not self.draft.seconds or not self.pace.total:
            return None
        return self.pace.weight / self.pace.total * self.verify.at(1)


def _prior(bin: int, sampled: bool) -> float:
    return (1 + _MIDDLES[bin]) / 2 if sampled else _MIDDLES[bin]


def _group(position: int) -> int:
    return position if position < 2 else 2 + (position >= 4) + (position >= 8)
