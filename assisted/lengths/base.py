"""When to stop drafting. A policy is what the caller writes down; a `Length` is its memory during one `generate`.

Knows numbers and confidences, nothing of models. To stay exact under sampling a policy decides from the draft's distribution
before a token is drawn from it, never from the token (non-anticipation): `Length.go_on` is called in that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..drafts import Round
from .costs import Costs

__all__ = ["DraftLength", "Length"]


class Length:
    """A policy at work during one `generate`. What it does not override, it does not care about. All that it is told comes as
    arguments: nobody sets its attributes."""

    needs_q = False
    """Whether `go_on` looks at the distribution; a policy that does not spares the draft a softmax and a synchronisation."""

    predicted_speedup: float | None = None
    """Against plain decoding, for the draft lengths it chooses; None where nothing is predicted."""

    costs: Costs | None = None
    """What was measured of the two models, where a policy does; None before."""

    def leave_size(self) -> None:
        """The drafter weighs by `costs` how much of the budget pays: the policy is to say only how deep it may go, and whether.
        Called before the first round, by drafters that do."""

    def budget(self, unfinished: Sequence[int]) -> int:
        """The most tokens to draft this round; 0 decodes one token plainly. Called once, at the start of every round.

        unfinished: the rows of the batch that still grow.
        """
        raise NotImplementedError

    def another(self, position: int) -> bool:
        """Whether to run the draft for one more token, at `position` (0-based, at least 1). Asked before its forward."""
        return True

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        """Which rows propose a token at `position` (0-based). Asked before it is drawn from q, and only if `needs_q`.

        q: [B, V] float32, the draft's distribution there. drawn: the token is drawn from q and accepted as often as
        q overlaps with the target's distribution: also where neither is sure of a token, these may be nearly the
        same. Otherwise it is the likeliest one of each row. Returns [B] bool, on q's device or, where it was decided
        there, on the host. Rows that said no once are not asked again.
        """
        return q.new_ones(len(q), dtype=torch.bool)

    def observe(self, round: Round) -> None:
        """What became of the round; called after every one, those without a draft included."""

    def end(self) -> None:
        """The call is over. What was measured is kept for later ones; whatever else belongs to the call is let go here."""


class DraftLength(Protocol):
    """What a caller passes as `draft_length`: immutable, shared between calls."""

    def start(self, earlier: Length | None = None) -> Length:
        """The policy's memory for one `generate`. earlier: the one of the model's last call with this policy, if any."""
        ...
