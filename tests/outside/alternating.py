"""A draft length policy in one file of another package: short and long drafts in turns.

The package's entry point is `alternating = "alternating:Alternating"` in the group `assisted.lengths`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from assisted.lengths import Length


@dataclass(frozen=True)
class Alternating:
    short: int = 1
    long: int = 5

    def start(self, earlier: Length | None = None) -> Length:
        return AlternatingLength(self)


class AlternatingLength(Length):
    def __init__(self, policy: Alternating):
        self.turns = itertools.cycle((policy.short, policy.long))

    def budget(self, unfinished: Sequence[int]) -> int:
        return next(self.turns)
