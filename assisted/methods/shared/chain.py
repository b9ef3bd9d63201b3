"""Drafting a chain token by token: the loop shared by all drafters that compute next-token logits."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...core import acceptance
from ...core.drafts import Draft, Round
from ...core.host import on_device
from ...core.text import Text
from ...distribution import probabilities
from ...engine.kept import Entries
from ...engine.runner import CachedModel
from .base import Call
from .captured_chain import CapturedChain


class ChainDrafting(CapturedChain):
    """A drafting that chooses one token after the other with the call's distribution."""

    def __init__(self, call: Call):
        self.call, self.entries = call, Entries()  # entries: of the logits in `draft_chain`
        self.broken: torch.Tensor | None = None  # one bool: the last round had NaN logits; read in the next one
        self.has_more = False  # whether these include some after which nothing was proposed

    def fitted(self, logits: torch.Tensor, text: Text) -> torch.Tensor:
        """[..., V'] logits of the model -> [..., V], on the text's device. What one of the two lacks is never drafted."""
        logits, missing = logits.to(text.ids.device), self.size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits  # may truncate

    def runs_again(self, position: int) -> bool:
        """Whether to run the model for one more token, at `position`. Asked before its forward pass."""
        return self.call.length.run_again(position)

    def draft_chain(
        self, text: Text, budget: int, logits: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor]
    ) -> Draft:
        """Draft at most `budget` tokens per row. The model reads a token only if another one may follow.

        logits: [B, V] after the committed text, on the text's device. read: maps tokens [B, 1] to the next such logits.

        Raises FloatingPointError if the last round's logits contained NaN.
        """
        self.require_numbers()
        distribution, length = self.call.distribution, self.call.length
        going = [not ended for ended in text.ended]
        wanted_of = [0] * text.rows  # number of tokens to propose, per row
        tokens: list[torch.Tensor] = []
        distributions: list[torch.Tensor] = []
        best: list[torch.Tensor] = []
        for position in range(budget):
            scores = self.entries.logits(logits)
            if distribution.processors or distribution.do_sample:
                chain = _chain(text, tokens if distribution.processors else [])
                of_last = scores[:, None], chain, text.unfinished, [chain.width - 1]
                scores = distribution.scores(text.ids, text.lengths, *of_last)[:, 0]
            score, token = scores.max(-1, keepdim=True)
            best.append(score)
            q = probabilities(scores) if distribution.do_sample or length.needs_q else None
            if q is not None and length.needs_q:
                wanted = length.go_on(position, self.entries.q(q), distribution.do_sample).tolist()
                going = [goes and wants for goes, wants in zip(going, wanted, strict=True)]
                if not any(going):
                    break
            if distribution.do_sample and q is not None:
                token = acceptance.sample(q)[:, None]
                distributions.append(self.entries.q(q))
            tokens.append(self.entries.tokens(token))
            wanted_of = [count + goes for count, goes in zip(wanted_of, going, strict=True)]
            if position + 1 == budget or not self.runs_again(position + 1):
                break
            logits = read(tokens[-1])
        found = torch.cat(best, 1)
        self.broken, self.has_more = found.isnan().any(), len(best) > len(tokens)
        if not tokens:
            return Draft.empty(text.rows, text.ids.device)
        # where processors forbid every token that the draft has, the row's draft ends
        possible = found[:, : len(tokens)].isfinite().cumprod(1).sum(1)
        lengths = possible.minimum(on_device(wanted_of, text.ids.device))
        return Draft(torch.cat(tokens, 1), lengths, torch.stack(distributions, 1) if distributions else None)

    def chain_of(
        self,
        runner: CachedModel,
        text: Text,
        budget: int,
        logits: torch.Tensor | None = None,
        after_read: Callable[[], None] | None = None,
    ) -> Draft:
        """`draft_chain` with a model, whose slots then hold what it has read.

        logits: after the committed text; None reads its last token first. after_read: called after every forward pass, or after
        a captured chain, which then reads the last token, too.
        """
        used = [int(not ended) for ended in text.ended]
        if logits is None:
            ids, whole = self.readable(text.last_tokens()), after_read is not None
            of_output = functools.partial(self.fitted, text=text)
            found = self.chain_at_once(runner, ids, [1] * text.rows, budget, of_output, whole)
            if found is not None:
                runner.cache.commit([found[0].width + whole] * text.rows)
                if after_read is not None:
                    after_read()
                return found[0]

        def read(tokens: torch.Tensor) -> torch.Tensor:
            logits = runner(self.readable(tokens), used=used)[:, -1]
            runner.cache.commit([1] * text.rows)
            if after_read is not None:
                after_read()
            return self.fitted(logits, text)

        return self.draft_chain(text, budget, read(text.last_tokens()) if logits is None else logits, read)

    def see_lengths(self, round: Round, proposed: Draft | None) -> None:
        """Forget `broken` if all rows of a draft are as long as it is wide: NaN ends a row's draft. Lengths are on the host."""
        if round.draft.is_that_of(proposed) and not self.has_more:
            whole = all(round.drafted[row] == round.draft.width for row in round.unfinished)
            self.broken = None if whole else self.broken

    def require_numbers(self) -> None:
        """Raise FloatingPointError if the last round's logits contained NaN."""
        if self.broken is not None and self.broken:
            raise FloatingPointError("the draft's logits are not a number")


def _chain(text: Text, tokens: list[torch.Tensor]) -> Draft:
    """The chain so far, for processors that depend on the prefix. tokens: [B, 1] each."""
    if not tokens:
        return Draft.empty(text.rows, text.ids.device)
    chain = torch.cat(tokens, 1)
    return Draft(chain, chain.new_full((text.rows,), len(tokens)))
