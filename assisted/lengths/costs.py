"""What passes take on a machine, in seconds, by the number of their positions.

Knows numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Costs"]


@dataclass(frozen=True)
class Costs:
    """What passes take on a machine, in seconds.

    Args:
        verify: pairs (columns, seconds of a pass of the target over so many tokens of each row), columns ascending.
        draft: seconds of a forward of the draft, on average; of a drafter that proposes a block at once, of a block.
    """

    verify: tuple[tuple[int, float], ...]
    draft: float

    def __post_init__(self) -> None:
        pairs = tuple((int(columns), float(seconds)) for columns, seconds in self.verify)
        columns = [pair[0] for pair in pairs]
        if not pairs or columns[0] < 1 or sorted(set(columns)) != columns or min(s for _, s in pairs) <= 0:
            raise ValueError(
                f"verify: {self.verify!r} are no costs; give pairs of columns (ascending, from 1) and seconds"
            )
        if not self.draft >= 0:
            raise ValueError(f"draft: {self.draft} is no cost; give the seconds of a forward of the draft")
        object.__setattr__(self, "verify", pairs)
