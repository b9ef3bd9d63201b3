"""What forward passes cost on a machine: seconds by their number of positions, and what is assumed before they are measured.

Knows numbers alone.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["COLUMN", "UNMEASURED", "Costs"]

COLUMN = 0.02
"""What one more position is assumed to add to a forward pass of the target until it is measured, as a share of the forward
pass over one position."""


@dataclass(frozen=True)
class Costs:
    """What forward passes take on a machine, in seconds.

    Args:
        verify: pairs (positions, seconds of a forward pass of the target over that many tokens of each row), positions
            ascending from 1.
        draft: mean seconds of a forward pass of the draft. Of a drafter that proposes a block at once: of a block.
    """

    verify: tuple[tuple[int, float], ...]
    draft: float

    def __post_init__(self) -> None:
        pairs = tuple((int(positions), float(seconds)) for positions, seconds in self.verify)
        counts = [positions for positions, _ in pairs]
        if not pairs or counts[0] < 1 or sorted(set(counts)) != counts or min(s for _, s in pairs) <= 0:
            raise ValueError(
                f"verify: {self.verify!r} are no costs; give pairs of positions (ascending, from 1) and seconds"
            )
        if not self.draft >= 0:
            raise ValueError(f"draft: {self.draft} is no cost; give the seconds of a forward pass of the draft")
        object.__setattr__(self, "verify", pairs)

    def verify_seconds(self, positions: int) -> float:
        """Seconds of a forward pass of the target. Interpolated linearly, and extrapolated beyond what was measured; from a
        single measurement with `COLUMN`."""
        known = self.verify
        at = bisect_left(known, positions, key=lambda pair: pair[0])
        if at < len(known) and known[at][0] == positions:
            return known[at][1]
        if len(known) == 1:
            return known[0][1] * (1 + COLUMN * (positions - known[0][0]))
        at = min(max(at, 1), len(known) - 1)
        (left, low), (right, high) = known[at - 1 : at + 1]
        return low + (high - low) * (positions - left) / (right - left)


UNMEASURED = Costs(verify=((1, 1.0),), draft=0.0)
"""The costs to assume before anything is measured, in forward passes over one position. Drafting takes no time."""
