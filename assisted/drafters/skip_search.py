"""Which sublayers to leave out while drafting: a search by single changes, each tried on text that was just written.

Knows the sublayers by number and what share of a pass each costs. How a change is tried is the drafter's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..lengths.faded import Faded
from .chain import predicted_speedup

__all__ = ["SkipSearch"]

HALF_LIFE = 200  # drafted tokens after which an observation counts half
JUDGED = 64  # drafted tokens after which a set is called hopeless
MARGIN = 1.005  # how much better a changed set must look
LONGEST_GAP = 64  # rounds between two trials, at the most


class SkipSearch:
    """Coordinate descent over sets of sublayers, by the speedup that each predicts.

    Every sublayer in turn, in random order, is added to the set or taken out of it. A change stays where it predicts a higher
    speedup on the same tokens; while no set pays, where it gets more tokens right. After a turn of all of them that changed
    nothing, trials become half as frequent.

    Args:
        shares: of a pass over one token, by sublayer.
        skipped: share of the sublayers to begin with.
        inner: those among which they are spread.
        every: rounds between two trials at the start.

    Attributes:
        skipped: the set in use.
    """

    def __init__(self, shares: Sequence[float], skipped: float, inner: Sequence[int], every: int):
        self.shares = list(shares)
        count = min(max(1, round(skipped * len(shares))), len(inner))
        # in the middle of as many stretches of equal length
        self.skipped = frozenset(inner[(2 * place + 1) * len(inner) // (2 * count)] for place in range(count))
        self.gap = every
        self.rounds = 0
        self.right = Faded()  # of the drafted tokens, those that were accepted
        self._random = random.Random(0)
        self._turn: list[int] = []
        self._changed = True

    def is_due(self) -> bool:
        """Whether to try a change in this round. Called once a round."""
        self.rounds += 1
        return self.rounds % self.gap == 0

    def candidate(self) -> frozenset[int]:
        """The next set to try: one sublayer more or less."""
        turn = self._turn
        try:
            changed = turn.pop()
        except IndexError:  # not asked for before: another thread may take the last one
            if not self._changed:
                self.gap = min(2 * self.gap, max(self.gap, LONGEST_GAP))
            self._changed = False
            turn = self._random.sample(range(len(self.shares)), len(self.shares))
            changed = turn.pop()
            self._turn = turn
        return self.skipped ^ {changed}

    def judge(self, candidate: frozenset[int], hits: int, current_hits: int, tokens: int) -> None:
        """Take the candidate where it predicts a higher speedup. hits, current_hits: tokens that it and the set in use get
        right, of the same `tokens`."""
        level = (current_hits + 1) / (tokens + 2)
        if self.right.weight >= tokens:  # drafts of many rounds know better than one window
            level = self.acceptance
        changed = min(max(level + (hits - current_hits) / tokens, 0.0), 1.0)
        now = predicted_speedup(level, self.cost(self.skipped))
        then = predicted_speedup(changed, self.cost(candidate))
        if max(now, then) >= 1:
            better = then > MARGIN * now
        else:  # among sets that all lose, leaving out everything loses least: get tokens right first
            better = changed > level or (changed == level and len(candidate) < len(self.skipped))
        if better:
            self.skipped = candidate
            self.right.add(self.right.weight * (changed - level), weight=0)
            self._changed = True

    def learn(self, hits: float, trials: float) -> None:
        """`hits` of `trials` drafted tokens were accepted."""
        self.right.add(hits, trials, keep=0.5 ** (trials / HALF_LIFE))

    @property
    def acceptance(self) -> float:
        """The estimated acceptance rate of the set in use; 0.5 where nothing is known."""
        return min(max(self.right.mean(0.5, strength=2), 0.0), 1.0)

    def cost(self, skipped: frozenset[int]) -> float:
        """Of a token drafted without these, in passes of the target, where weights read are what a pass waits for."""
        return max(0.01, 1 - sum(self.shares[index] for index in skipped))

    @property
    def hopeless(self) -> bool:
        """No draft of the set in use pays, at any length."""
        return self.right.weight >= JUDGED and predicted_speedup(self.acceptance, self.cost(self.skipped)) < 1
