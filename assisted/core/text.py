"""The committed text of one `generate`: token ids, finished rows, stopping criteria and the streamer.

Knows nothing of models or drafts. The criteria see every new prefix of a row once, in order. Tokens after the first prefix
that stops are dropped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from .host import on_device

_ROW_BY_ROW = {EosTokenCriteria, MaxLengthCriteria, StopStringCriteria}  # they depend on a row's own prefix alone
NOT_DRAWABLE = "probability tensor contains either `inf`, `nan` or element < 0"  # what `torch.multinomial` says
_FEW = 64  # columns whose places are listed on the host
_GROWTH = 4096  # tokens of a row; the first allocation for a longer limit, which then doubles


class Text:
    """The committed tokens of a batch.

    Args:
        prompt: [B, P] int64.
        criteria: the stopping criteria that `generate` prepared.
        pad_token: fills rows that end before the others; None if there is no end token.
        streamer: receives every committed token, or None.
        keep_scores, keep_logits: whether to store the processed scores and the logits of every committed token.

    Attributes:
        max_length: maximum number of tokens in a row, including the prompt.
        ids: [B, S] int64, S at most max_length; the first `lengths[b]` tokens of row b are committed. Replaced when it grows.
        lengths: committed tokens per row, prompt included; B ints.
        ended: whether each row has ended; B bools.
        row_tokens: new tokens per row, without padding; B ints.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        criteria: StoppingCriteriaList,
        pad_token: int | None,
        streamer: Any,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ):
        rows, width = prompt.shape
        self.prompt_length = width
        # a tokenizer's `model_max_length` may be 1e30; if the prompt has already reached the limit, transformers generates one
        # token, too
        limit = min([sys.maxsize, *(c.max_length for c in criteria if type(c) is MaxLengthCriteria)])
        self.max_length = max(width + 1, math.ceil(limit))
        self.ids = prompt
        self._make_room(width + 1)
        self.lengths = [width] * rows
        self.ended = [False] * rows
        self.row_tokens = [0] * rows
        self._latest: list[list[int]] = [[] for _ in range(rows)]  # the tokens that `extend` has committed last, by row
        self.criteria = criteria
        self.pad_token = pad_token
        self.streamer = streamer
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        # by row, one [V] tensor per token
        self.scores: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self.logits: list[list[torch.Tensor]] = [[] for _ in range(rows)]
        self.pads_ended_rows = any(hasattr(c, "eos_token_id") for c in criteria)
        self._eos = {t for c in criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.flatten().tolist()}
        self._only_lengths_and_eos = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in criteria)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def done(self) -> bool:
        return all(self.ended)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the rows that have not ended."""
        return [row for row, ended in enumerate(self.ended) if not ended]

    @property
    def padding(self) -> int:
        """The token that fills ended rows."""
        return self.pad_token or 0

    @property
    def padded_rows(self) -> list[int]:
        """The ended rows that receive padding. Empty if ended rows continue until all rows have ended."""
        return [row for row, ended in enumerate(self.ended) if ended] if self.pads_ended_rows else []

    @property
    def in_lockstep(self) -> bool:
        """Whether rows must stay equally long: a criterion or the streamer may look at the whole batch, or at the time."""
        if self.rows == 1:
            return False
        if self.streamer is not None or any(type(c) not in _ROW_BY_ROW for c in self.criteria):
            return True
        return not self.pads_ended_rows and not self._only_lengths_and_eos  # ended rows continue until all have ended

    @property
    def room(self) -> int:
        """How many more tokens fit into the shortest unfinished row."""
        return self.max_length - min(self.lengths[row] for row in self.unfinished)

    def alone(self, row: int) -> Text:
        """A copy of a row's text, as after a prompt that is all of it but its last token."""
        width = self.lengths[row] - 1
        one = Text(self.ids[row : row + 1, :width], StoppingCriteriaList(), self.pad_token, None)
        one.ids[0, width], one.lengths = self.ids[row, width], [width + 1]
        return one

    def last_tokens(self) -> torch.Tensor:
        """The last committed token of each row, [B, 1] int64."""
        if self.rows == 1:
            return self.ids[:, self.lengths[0] - 1 : self.lengths[0]]
        return self.ids.gather(1, on_device([[length - 1] for length in self.lengths], self.ids.device))

    def prompts(self, attention_mask: torch.Tensor | None) -> list[list[int]]:
        """The tokens of each row's prompt, without padding. attention_mask: [B, P]; None if there is no padding."""
        rows = self.ids[:, : self.prompt_length].tolist()
        if attention_mask is None:
            return rows
        shown = attention_mask.bool().tolist()
        return [
            [token for token, is_text in zip(*row, strict=True) if is_text] for row in zip(rows, shown, strict=True)
        ]

    def since(self, starts: Sequence[int]) -> list[list[int]]:
        """The tokens of each row from column `starts[b]` on: the last ones of `extend`, which the host knows, or one
        transfer to the host, of the longest new part."""
        ends = zip(starts, self.lengths, self._latest, strict=True)
        if all(start >= length - len(latest) for start, length, latest in ends):
            counts = [length - start for length, start in zip(self.lengths, starts, strict=True)]
            return [latest[len(latest) - count :] for latest, count in zip(self._latest, counts, strict=True)]
        if self.rows == 1:  # a slice is faster than the index needed for several rows
            return self.ids[:, starts[0] : self.lengths[0]].tolist()
        counts = [length - start for length, start in zip(self.lengths, starts, strict=True)]
        columns = on_device(list(starts), self.ids.device)[:, None] + torch.arange(max(counts), device=self.ids.device)
        new = self.ids.gather(1, columns.clamp(max=self.ids.shape[1] - 1)).tolist()
        return [row[:count] for row, count in zip(new, counts, strict=True)]

    def extend(self, tokens: list[list[int]], scores: torch.Tensor | None, logits: torch.Tensor | None) -> list[int]:
        """Commit new tokens to the unfinished rows, each up to the first prefix that stops it.

        tokens: new tokens of each row. scores, logits: [B, k, V] of these tokens; needed if they are stored. Returns the
        number of committed tokens per row (0 for rows that had ended).
        """
        kept = [0] * self.rows
        tokens = [
            [] if ended else new[: self.max_length - length]
            for new, length, ended in zip(tokens, self.lengths, self.ended, strict=True)
        ]
        self._make_room(max(length + len(new) for new, length in zip(tokens, self.lengths, strict=True)))
        self._write(tokens)
        for row, new in enumerate(tokens):
            if self.ended[row]:
                continue
            kept[row] = self._extend_row(row, new, scores, logits)
            self.row_tokens[row] += kept[row]
        self._latest = [new[:count] for new, count in zip(tokens, kept, strict=True)]
        return kept

    def extend_in_lockstep(self, tokens: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Commit one token to all rows, as autoregressive decoding does. tokens: [B] int64; scores, logits: [B, V]."""
        if self.pads_ended_rows:
            ended = on_device(self.ended, tokens.device)
            tokens = tokens.where(~ended, torch.full_like(tokens, self.padding))
        length = self.lengths[0]
        self._make_room(length + 1)
        self.ids[:, length] = tokens
        self.lengths, self._latest = [length + 1] * self.rows, [[] for _ in range(self.rows)]
        for row in range(self.rows):
            self.row_tokens[row] += not (self.ended[row] and self.pads_ended_rows)
            self._remember(row, scores[row], logits[row])
        stopped = self.criteria(self.ids[:, : length + 1], self._scores_so_far()).tolist()
        self.ended = [ended or stop for ended, stop in zip(self.ended, stopped, strict=True)]
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())

    def tell(self, row: int, reason: str) -> None:
        """Note, where rows have reports of their own, why one of them gets no drafts any more."""

    def fail(self, row: int) -> None:
        """There is nothing to draw a row's next token from."""
        raise RuntimeError(NOT_DRAWABLE)

    def output(self) -> torch.Tensor:
        """All rows as one tensor, [B, longest] int64; shorter rows are filled with the pad token."""
        longest = max(self.lengths)
        ids = self.ids[:, :longest].clone()
        if min(self.lengths) < longest:
            columns = torch.arange(longest, device=ids.device)
            filler = columns >= torch.tensor(self.lengths, device=ids.device)[:, None]
            ids.masked_fill_(filler, self.padding)
        return ids

    def stacked(self, kept: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        """Stored scores or logits as `generate` returns them: one [B, V] tensor per step, zeros for rows that had ended."""
        blank = torch.zeros_like(kept[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in kept])
            for step in range(max(map(len, kept)))
        )

    def _extend_row(self, row: int, new: list[int], scores: torch.Tensor | None, logits: torch.Tensor | None) -> int:
        start = self.lengths[row]
        if self._only_lengths_and_eos and self.streamer is None and not (self.keep_scores or self.keep_logits):
            stop = next((i + 1 for i, token in enumerate(new) if token in self._eos), None)
            count = len(new) if stop is None else stop
            self.ended[row] = stop is not None or start + count >= self.max_length
            self.lengths[row] = start + count
            return count
        count = 0
        for count, token in enumerate(new, start=1):
            self.lengths[row] = start + count
            self._remember(
                row,
                scores[row, count - 1] if scores is not None else None,
                logits[row, count - 1] if logits is not None else None,
            )
            seen = self._scores_so_far() if self.rows == 1 else None
            self.ended[row] = bool(self.criteria(self.ids[row : row + 1, : start + count], seen)[0])
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if self.ended[row]:
                break
        return count

    def _write(self, tokens: list[list[int]]) -> None:
        """Write new tokens after those of each row, in one operation."""
        if self.rows == 1:
            start = self.lengths[0]
            self.ids[0, start : start + len(tokens[0])] = on_device(tokens[0], self.ids.device)
            return
        places = [
            [row, length + place, token]
            for row, (new, length) in enumerate(zip(tokens, self.lengths, strict=True))
            for place, token in enumerate(new)
        ]
        if places:
            row, column, token = on_device(list(zip(*places, strict=True)), self.ids.device)
            self.ids[row, column] = token

    def _make_room(self, length: int) -> None:
        """Make room for rows of `length` tokens, in a copy of `ids`."""
        held = self.ids.shape[1]
        if length > held:
            more = min(self.max_length - held, max(held, _GROWTH))
            self.ids = torch.nn.functional.pad(self.ids, (0, more))

    def _remember(self, row: int, scores: torch.Tensor | None, logits: torch.Tensor | None) -> None:
        if self.keep_scores and scores is not None:
            self.scores[row].append(scores)
        if self.keep_logits and logits is not None:
            self.logits[row].append(logits.float())

    def _scores_so_far(self) -> tuple[torch.Tensor, ...] | None:
        return self.stacked(self.scores) if self.keep_scores and self.scores[0] else None


def tokens_from(text: Text, starts: list[int], width: int) -> torch.Tensor:
    """`width` tokens of each row from the column `starts[b]` on, [B, width] int64; after the end of a row, any tokens."""
    if text.rows == 1:
        return text.ids[:, starts[0] : starts[0] + width]
    last = text.ids.shape[1] - 1
    if width > _FEW:
        columns = on_device(starts, text.ids.device)[:, None] + torch.arange(width, device=text.ids.device)
        return text.ids.gather(1, columns.clamp(max=last))
    places = [[min(start + place, last) for place in range(width)] for start in starts]
    return text.ids.gather(1, on_device(places, text.ids.device).long())
