"""The search for the sublayers to skip while drafting, by single changes that are each tried on recent text.

Knows sublayers by index and their shares of the cost of a forward pass; the drafter carries out the trials.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..lengths.cost_model import ENOUGH, KEEP, PRIOR, DecayedMean, best_speedup

LONGEST_GAP = 64  # maximum number of rounds between two trials


class SkipSearch:
    """Coordinate descent over sets of sublayers, by predicted speedup.

    In random order, each sublayer is added to the set or removed from it. A change is kept if it predicts a higher speedup on
    the same tokens. As long as the predicted speedup is below 1, it is kept if it gets more tokens right instead. After a
    complete turn without a change, trials become half as frequent.

    Args:
        shares: each sublayer's share of the cost of a forward pass over one token.
        skipped: share of the sublayers in the initial set.
        inner: indices of the sublayers among which the initial set is spread.
        every: rounds between two trials at the start.

    Attributes:
        skipped: indices of the sublayers in the current set.
    """

    def __init__(self, shares: Sequence[float], skipped: float, inner: Sequence[int], every: int):
        self.shares = list(shares)
        count = min(max(1, round(skipped * len(shares))), len(inner))
        # the middle elements of `count` stretches of equal length
        self.skipped = frozenset(inner[(2 * part + 1) * len(inner) // (2 * count)] for part in range(count))
        self.gap = every
        self.rounds = 0
        self.right = DecayedMean()  # of the drafted tokens, those that were accepted
        self._random = random.Random(0)
        self._turn: list[int] = []
        self._changed = True

    def is_due(self) -> bool:
        """Whether to try a change in this round. Called once per round."""
        self.rounds += 1
        return self.rounds % self.gap == 0

    def candidate(self) -> frozenset[int]:
        """The next set to try, with one sublayer more or less than the current one."""
        turn = self._turn
        try:
            changed = turn.pop()
        except IndexError:  # not checked in advance, because another thread may take the last one
            if not self._changed:
                self.gap = min(2 * self.gap, max(self.gap, LONGEST_GAP))
            self._changed = False
            turn = self._random.sample(range(len(self.shares)), len(self.shares))
            changed = turn.pop()
            self._turn = turn
        return self.skipped ^ {changed}

    def judge(self, candidate: frozenset[int], hits: int, current_hits: int, tokens: int) -> None:
        """Adopt the candidate if it predicts a higher speedup.

        hits, current_hits: number of right tokens with the candidate and with the current set, of the same `tokens` ones.
        """
        level = (current_hits + 1) / (tokens + 2)
        if self.right.weight >= tokens:  # the drafts of many rounds are more reliable than one window
            level = self.acceptance
        changed = min(max(level + (hits - current_hits) / tokens, 0.0), 1.0)
        now = best_speedup(level, self.cost(self.skipped))
        then = best_speedup(changed, self.cost(candidate))
        if max(now, then) >= 1:
            better = then > now
        else:  # below 1, skipping everything would look best, so improve the acceptance first
            better = changed > level or (changed == level and len(candidate) < len(self.skipped))
        if better:
            self.skipped = candidate
            self.right.add(self.right.weight * (changed - level), weight=0)
            self._changed = True

    def learn(self, hits: float, trials: float) -> None:
        """`hits` of `trials` drafted tokens were accepted."""
        self.right.add(hits, trials, keep=KEEP**trials)

    @property
    def acceptance(self) -> float:
        """The estimated acceptance rate of the current set, 0.5 before any observation."""
        return min(max(self.right.mean(0.5, PRIOR), 0.0), 1.0)

    def cost(self, skipped: frozenset[int]) -> float:
        """Cost of a token drafted without these sublayers, in forward passes of the target, if reading weights dominates."""
        return max(0.01, 1 - sum(self.shares[index] for index in skipped))

    @property
    def hopeless(self) -> bool:
        """Whether no draft length gives a speedup with the current set."""
        return self.right.weight >= 2 * ENOUGH and best_speedup(self.acceptance, self.cost(self.skipped)) < 1
