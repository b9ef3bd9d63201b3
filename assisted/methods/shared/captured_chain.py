"""A whole chain of drafted tokens as one captured function: what a GPU replays in place of one step after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...core import acceptance
from ...core.drafts import Draft
from ...distribution import probabilities
from ...engine.kept import Entries
from ...engine.passes import Runner, Unfused
from .base import Call, Drafting


class CapturedChain(Drafting):
    """A drafting whose chains of a known length may be captured. The attributes are those of `ChainDrafting`."""

    call: Call
    entries: Entries
    broken: torch.Tensor | None
    has_more: bool

    @functools.cached_property
    def size(self) -> int:
        """Vocabulary size of the target, which may be resized between calls."""
        return self.call.vocab_size

    def readable(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids as the model reads them."""
        return ids

    def chain_at_once(
        self,
        runner: Runner,
        ids: torch.Tensor,
        counts: list[int],
        budget: int,
        logits: Callable[[torch.Tensor], torch.Tensor],
        whole: bool = False,
        states: Unfused | None = None,
    ) -> tuple[Draft, list[torch.Tensor]] | None:
        """`draft_chain` of a model that has not read the last committed tokens, in one captured function; None where that is
        not possible. Nothing is committed.

        ids, counts, states: as for `Passes.chain`. logits: of the model's output after a token, [B, V']. whole: whether the
        model reads the last token, too. Returns what the captured function returns besides, too.
        """
        key = self.call.distribution.of_logits
        count = None if key is None else self.call.length.ahead(budget)
        if count is None:
            return None
        key = type(self), count, key, self.size, None if self.entries.known is None else len(self.entries.known)
        function = functools.partial(self._at_once, count, logits, whole)
        found = runner.passes.chain(runner, ids, counts, count - 1 + whole, key, function, states)
        if found is None:
            return None
        tokens, lengths, self.broken, *more = found
        self.has_more = False
        q = more.pop(0) if self.call.distribution.do_sample else None
        return Draft(tokens, lengths, q), more

    def _at_once(
        self,
        count: int,
        logits: Callable[[torch.Tensor], torch.Tensor],
        whole: bool,
        output: torch.Tensor,
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Tokens, [B, count], the draft's lengths, [B], whether there was NaN, [], and q if tokens are drawn."""
        distribution = self.call.distribution
        tokens: list[torch.Tensor] = []
        best, distributions = [], []
        while True:
            scores = distribution.scores_of(self.entries.logits(logits(output)))
            score, token = scores.max(-1, keepdim=True)
            if distribution.do_sample:
                q = probabilities(scores)
                token = acceptance.sample(q)[:, None]
                distributions.append(self.entries.q(q))
            best.append(score)
            tokens.append(self.entries.tokens(token))
            if len(tokens) < count or whole:
                output = read(self.readable(tokens[-1]))
            if len(tokens) == count:
                break
        found = torch.cat(best, 1)
        made = [torch.cat(tokens, 1), found.isfinite().cumprod(1).sum(1), found.isnan().any()]
        return [*made, torch.stack(distributions, 1)] if distributions else made
