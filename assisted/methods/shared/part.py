"""Drafting chains with a part of the target, in its own slots."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ...core.drafts import Draft, Round
from ...core.text import Text
from ...engine.runner import CachedModel
from .base import Call, Drafter
from .chain import ChainDrafting


class PartDrafter(Drafter):
    """A drafter that runs a part of the target."""

    _warned = False

    def warn_hopeless(self, part: str, acceptance: float, cost: float, advice: str) -> None:
        """Warn once that drafting gives no speedup. cost: of a drafted token, in forward passes of the target."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"draft: {part}, {acceptance:.0%} of the drafted tokens are accepted, and each costs {cost:.0%} of a forward "
                f"pass of the target. This is slower than no draft. {advice}",
                stacklevel=4,
            )


class PartDrafting(ChainDrafting):
    """Drafting with a part of the target, in the target's own slots: the part uses the target's KV of the committed text.

    What the part writes after the committed text is always removed, even if drafting raises.
    """

    proposed: Draft | None = None  # until it is verified

    def renew(self, text: Text, row: int, call: Call) -> None:
        """Nothing to do: the target's slots hold the text."""

    def has_proposed(self, round: Round) -> bool:
        """Whether a round has verified the last draft, which is forgotten."""
        self.see_lengths(round, self.proposed)
        proposed, self.proposed = self.proposed, None
        return round.draft.is_that_of(proposed)

    def draft_with(
        self, part: CachedModel, text: Text, budget: int, after_read: Callable[[], None] | None = None
    ) -> Draft:
        """Draft at most `budget` tokens per row. part: over the target's slots. after_read: called after its forward passes."""
        if not part.lends_slots:
            self.call.settings.note(
                "the draft is a part of the target, whose states can't be lent: nothing was drafted"
            )
            return Draft.empty(text.rows, text.ids.device)
        with part.cache.borrowed():
            return self.chain_of(part, text, budget, after_read=after_read)
