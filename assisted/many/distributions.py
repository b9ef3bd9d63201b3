"""The distributions of a batch whose rows have settings of their own: a row's processors see the scores of that row alone.

Knows `Distribution`; nothing of models, or of who asks for a row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from ..core.acceptance import top1
from ..core.drafts import Draft
from ..core.host import is_out_of_memory
from ..distribution import Distribution, Draws, probabilities
from ..grammars.processor import Grammar


class OfRows(Distribution):
    """A distribution for each row, which may change between rounds.

    In a batch in which some row is drawn, a greedy row has the one-hot distribution of its top-1 token, and a row with numbers
    of its own (`Draws`) that of the token which they draw. So one acceptance rule is exact for all rows at once.

    own: by row, the target's distribution and that for drafts; None for a row without a text. failed: why a row's grammar
    cannot go on. Both are shared with `for_draft`.
    """

    def __init__(
        self,
        own: list[tuple[Distribution, Distribution] | None],
        drafts: bool = False,
        failed: dict[int, Exception] | None = None,
    ):
        object.__setattr__(self, "own", own)
        object.__setattr__(self, "drafts", drafts)
        object.__setattr__(self, "failed", {} if failed is None else failed)

    own: list[tuple[Distribution, Distribution] | None]
    failed: dict[int, Exception]

    def give(self, row: int, own: Distribution | None) -> None:
        """Give a row another distribution."""
        self.own[row] = None if own is None else (own, replace(own.for_draft(), draws=own.draws))

    def for_draft(self) -> OfRows:
        return OfRows(self.own, True, self.failed)

    @property
    def _present(self) -> list[Distribution]:
        return [pair[self.drafts] for pair in self.own if pair is not None]

    @property
    def do_sample(self) -> bool:  # type: ignore[override]
        return any(one.do_sample for one in self._present)

    @property
    def processors(self) -> LogitsProcessorList:  # type: ignore[override]
        """Those of the rows, if all have the same. Otherwise, only whether there are any means something."""
        kinds: list[Any] = [one for one, _ in self._groups(range(len(self.own)))]
        if len(kinds) == 1 and kinds[0].draws is None:
            return kinds[0].processors
        return LogitsProcessorList([part for one in kinds for part in (*one.processors, one.draws) if part is not None])

    @property
    def of_logits(self) -> Hashable | None:  # type: ignore[override]
        keys = {one.of_logits for one in self._present}
        return keys.pop() if len(keys) == 1 else None

    @property
    def by_rank(self) -> bool:  # type: ignore[override]
        return self.of_logits is not None

    @property
    def in_order(self) -> bool:  # type: ignore[override]
        return any(one.in_order for one in self._present)

    @property
    def may_have_grammars(self) -> bool:
        return True

    def grammar(self, row: int) -> tuple[Grammar | None, int]:
        pair = self.own[row]
        return (None, 0) if pair is None or row in self.failed else pair[0].grammar(0)

    def _groups(self, rows: Sequence[int]) -> Iterator[tuple[Distribution, list[int]]]:
        """The distributions of these rows, each with all rows for which it computes the same."""
        groups: dict[Any, tuple[Distribution, list[int]]] = {}
        for row in rows:
            if (pair := self.own[row]) is not None:
                key = id(pair[0]) if pair[0].of_logits is None else pair[0].of_logits
                groups.setdefault(key, (pair[self.drafts], []))[1].append(row)
        yield from groups.values()

    def scores(
        self,
        ids: torch.Tensor,
        lengths: list[int],
        logits: torch.Tensor,
        draft: Draft,
        rows: list[int] | None = None,
        nodes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        groups = list(self._groups(range(len(logits)) if rows is None else rows))
        if len(groups) == 1 and groups[0][0].draws is None and not groups[0][0].grammars:
            return groups[0][0].scores(ids, lengths, logits, draft, rows, nodes)
        scores, is_drawn = logits.to(torch.float32, copy=True), self.do_sample
        for own, members in groups:
            of_members, counts = draft.of_rows(members), [lengths[row] for row in members]
            try:
                found = own.scores(ids[members], counts, scores[members], of_members, None, nodes)
            except Exception as error:  # of a library, or of the caller's matcher
                if self.drafts or not own.grammars or is_out_of_memory(error):
                    raise
                self.failed.setdefault(members[0], error)
                continue
            if own.grammars and self.drafts:  # where nothing is allowed, the target rejects what is drawn
                found = found.masked_fill((found == -torch.inf).all(-1, keepdim=True), 0.0)
            if own.draws is not None:
                found = _drawn(own.draws, found, counts, of_members, nodes)
            elif is_drawn and not own.do_sample:
                found = _certain(found, top1(found))
            scores[members] = found
        return scores


def _drawn(
    draws: Draws, scores: torch.Tensor, lengths: list[int], draft: Draft, nodes: Sequence[int] | None
) -> torch.Tensor:
    """Scores of which only the tokens can be drawn that a row's numbers draw from scores [1, k, V] after these nodes; NaN where
    there is nothing to draw from."""
    depths = torch.nn.functional.pad(draft.depths().cpu(), (1, 0))
    if nodes is not None:
        depths = depths[:, [node + 1 for node in nodes]]
    p, first = probabilities(scores), depths[:, :1]
    tokens = draws.sample(p, [lengths[0] + int(first)], (depths - first)[:, 1:])
    return _certain(scores, tokens).masked_fill(p[..., :1].isnan(), torch.nan)


def _certain(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Scores [B, k, V] of which only the tokens [B, k] can be drawn."""
    return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[..., None], 0.0)
