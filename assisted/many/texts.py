"""Texts in rows that end one by one and get others: what is asked of a row, its tokens, and its answer.

Knows nothing of models or drafts, or of who asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from ..calls.inputs import LoopInputs
from ..core.report import Recorder
from ..core.text import NOT_DRAWABLE, Text
from ..distribution import Distribution


@dataclass(frozen=True)
class Answer:
    """One answer.

    Args:
        index: of the prompt, from 0.
        ids: [L] int64, the prompt and the new tokens.
        prompt_tokens: how many of them are the prompt.
    """

    index: int
    ids: torch.Tensor
    prompt_tokens: int

    @property
    def new_tokens(self) -> torch.Tensor:
        """The new tokens, [n] int64."""
        return self.ids[self.prompt_tokens :]


@dataclass(eq=False)
class Asked:
    """A text that is to be written in a row.

    Args:
        index, prompt: its number, and its tokens, [P] int64.
        limit: of its tokens, the prompt included.
        distribution: how its tokens are chosen.
        ends: the tokens after which it ends. criteria: other stopping criteria, which see each prefix of it once, in order.
        new: called after each round with its new tokens.
        left: asked between rounds whether nobody waits for it any more, which ends it.
        recorder: counts its part of each round.
        inputs: what transformers has prepared for it; None takes no pool.

    Attributes:
        error: why it could not be written to its end, which concerns no other text.
    """

    index: int
    prompt: torch.Tensor
    limit: int
    distribution: Distribution
    ends: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList | None = None
    new: Callable[[list[int]], None] | None = None
    left: Callable[[], bool] = lambda: False
    recorder: Recorder | None = None
    inputs: LoopInputs | None = None
    error: Exception | None = field(default=None, init=False)


class Rows(Text):
    """Rows that end one by one, and get other texts.

    pauses: asked after each round whether there is something to do before the next one. failed: by row, errors that end it.
    """

    def __init__(self, rows: int, device: torch.device, pauses: Callable[[], bool], failed: dict[int, Exception]):
        endless = StoppingCriteriaList([MaxLengthCriteria(sys.maxsize)])  # each row has a limit of its own
        super().__init__(torch.zeros(rows, 0, dtype=torch.int64, device=device), endless, None, None)
        self.lengths = [1] * rows  # a row without a text has a token, too, for passes over all rows
        self.ended = [True] * rows
        self.asked: dict[int, Asked] = {}  # by row
        self.pauses, self.ran, self.failed = pauses, False, failed

    @property
    def done(self) -> bool:
        return any(self.ended[row] for row in self.asked) or not self.asked or (self.ran and self.pauses())

    @property
    def in_lockstep(self) -> bool:
        return False

    @property
    def room(self) -> int:
        return max(asked.limit - self.lengths[row] for row, asked in self.asked.items())

    def tell(self, row: int, reason: str) -> None:
        if (recorder := self.asked[row].recorder) is not None:
            recorder.warnings.append(reason)

    def fail(self, row: int) -> None:
        """End the row with an error: its grammar's, if that allows nothing."""
        asked, self.ended[row] = self.asked[row], True
        try:
            for grammar in asked.distribution.grammars.values():
                grammar.read(0, self.ids[row], self.lengths[row])
                grammar.mask(0, (), strict=True)
            asked.error = RuntimeError(NOT_DRAWABLE)
        except Exception as error:  # of a library, or of the caller's matcher
            asked.error = error

    def begin(self, row: int, asked: Asked) -> None:
        """Give a row a text."""
        width = len(asked.prompt)
        self._make_room(width + 1)
        self.ids[row, :width] = asked.prompt
        self._latest[row] = []
        self.lengths[row], self.row_tokens[row] = width, 0
        self.ended[row], self.asked[row] = False, asked

    def take(self) -> Iterator[tuple[int, Asked, Answer]]:
        """The rows whose texts have ended, and their answers."""
        for row in [row for row in self.asked if self.ended[row]]:
            asked = self.asked.pop(row)
            yield row, asked, Answer(asked.index, self.ids[row, : self.lengths[row]].clone(), len(asked.prompt))

    def extend(self, tokens: list[list[int]], scores: Any, logits: Any) -> list[int]:
        kept, self.ran = super().extend(tokens, scores, logits), True
        for row, asked in self.asked.items():
            if asked.new is not None and kept[row] and asked.error is None:
                asked.new(self._latest[row])
            self.ended[row] |= asked.left()
        return kept

    def _extend_row(self, row: int, new: list[int], scores: Any, logits: Any) -> int:
        asked, start = self.asked[row], self.lengths[row]
        if (error := self.failed.pop(row, None)) is not None:
            asked.error, self.ended[row], self.lengths[row] = error, True, start + 1
            return 1
        new = new[: asked.limit - start]
        count = next((place for place, token in enumerate(new, 1) if token in asked.ends), None)
        self.ended[row] = count is not None or start + len(new) >= asked.limit
        count = len(new) if count is None else count
        for place in range(1, count + 1) if asked.criteria else ():
            assert asked.criteria is not None
            if bool(asked.criteria(self.ids[row : row + 1, : start + place], None)[0]):  # type: ignore[arg-type]
                count, self.ended[row] = place, True
                break
        self.lengths[row] = start + count
        return count
