"""The interface of draft lengths. A policy is what the caller writes down; a `Length` is its state during one `generate`.

To stay exact under sampling, a policy decides from the draft's distribution before a token is drawn from it, never from the
token (non-anticipation). `Length.go_on` is called at that point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..core.drafts import Round
from .cost_model import Costs

Columns = Callable[[int, int], int | None]
"""The columns of the captured forward pass for so many columns of so many rows; None if it is too wide to be captured."""


class Length:
    """The state of a policy during one `generate`. A subclass overrides only what it needs. All input comes as arguments:
    nobody sets its attributes."""

    needs_q = False
    """Whether `go_on` reads the distribution. Otherwise the draft is spared a softmax and a synchronisation."""

    reads_top = False
    """Whether `go_on` reads no more of q than each row's largest probability. A draft that runs in C then passes only that."""

    is_limit = False
    """Whether `budget` is a number of the caller's, which tokens that a grammar forces may not exceed either."""

    predicted_speedup: float | None = None
    """Over the autoregressive baseline, at the draft lengths it chooses; None where nothing is predicted."""

    costs: Costs | None = None
    """The measured costs of the two models, if the policy measures them; None until then."""

    def drafter_sizes_tree(self) -> None:
        """Tell the policy that the drafter chooses the size of its trees by `costs`. The policy then decides only how deep
        they may be, and whether to draft; the drafter calls neither `go_on` nor `another` unless `needs_q` is still True. Such
        drafters call it before the first round."""

    def drafter_reads_prompt(self) -> None:
        """Tell the policy that the drafter reads the prompt before its first draft. Called before the first round."""

    def prompt_read(
        self, room: int, prompt_seconds: float = 0.0, columns: Columns | None = None, is_short: bool = False
    ) -> None:
        """The target has read the prompt. Called once, before the first round; not where rows get other texts.

        Args:
            room: the most tokens that the answer may have after its first.
            prompt_seconds: that the target took.
            columns: how the target's forward passes are rounded up, if each shape of them is captured.
            is_short: the prompt is no longer than the answer may be. Until a draft is known to be hopeless, it reads such a
                prompt without being asked what that costs.
        """

    def budget(self, unfinished: Sequence[int]) -> int:
        """The most tokens to draft this round; 0 decodes one token without a draft. Called once, at the start of every round.

        unfinished: the rows of the batch that still grow.
        """
        raise NotImplementedError

    def run_again(self, position: int) -> bool:
        """Whether to run the draft for one more token, at `position` (0-based, at least 1). Called before its forward pass."""
        return True

    def ahead(self, budget: int) -> int | None:
        """How many of at most `budget` tokens to draft where a captured function drafts all of them, without asking `run_again`
        and `go_on`; None if they must be asked. Called at most once a round, after `budget`; they may be asked nevertheless."""
        return None if self.needs_q or type(self).run_again is not Length.run_again else budget

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        """Which rows propose a token at `position` (0-based). Called before the token is drawn from q, and only if `needs_q`.

        Args:
            q: [B, V] float32, the draft's distribution at this position.
            drawn: the token is sampled from q, and accepted as often as q overlaps with the target's distribution. These may
                be nearly equal even where no token is probable. Otherwise it is the top-1 token of each row.

        Returns [B] bool, on q's device, or on the host where it was decided there. A row that was False once proposes nothing
        more in this round.
        """
        return q.new_ones(len(q), dtype=torch.bool)

    def fit(self, found: Sequence[int]) -> int:
        """How many tokens to propose of chains that a drafter has found, at most the longest. Each one is verified in all rows,
        so the rows that found less pay for it, too. found: tokens of each unfinished row, in the order of `budget`."""
        return max(found)

    def observe(self, round: Round) -> None:
        """Take in the outcome of a round. Called after every round, also after those without a draft."""

    def renew(self, row: int) -> None:
        """Another text begins in this row, so nobody waits for the slowest row."""

    def observe_other(self, round: Round) -> None:
        """Take in a round in which another drafter of a combination drafted."""

    def end(self) -> None:
        """The call is over. Measurements are kept for later calls; everything else that belongs to the call is released."""


class DraftLength(Protocol):
    """What a caller passes as `draft_length`: immutable, shared between calls."""

    def start(self, earlier: Length | None = None) -> Length:
        """The policy's state for one `generate`. earlier: that of the model's last call with this policy, if any."""
        ...
