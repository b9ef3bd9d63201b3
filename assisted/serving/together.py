"""Requests that are answered together, as rows of a batch that come and go.

Knows batches and the line; nothing of the protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers import StoppingCriteria

from ..core.report import Recorder
from ..distribution import Distribution, Draws
from ..many.rows import Batch, Preparation, asked_of
from ..many.texts import Asked
from .line import Line, Place


class Until(StoppingCriteria):
    """Ends a call once somebody waits who could be answered together with it. waits: whether that is so."""

    def __init__(self, waits: Callable[[], bool]):
        self.waits, self.stopped = waits, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.stopped = self.waits()
        return self.stopped


class Together:
    """Batches of requests.

    Args:
        line: in which they wait.
        rows: of a batch; 1 answers one request after the other.
        chunk: see `Batch`.

    Attributes:
        impossible: why requests of a kind cannot be answered together; None for those that can, once it is known.
    """

    def __init__(self, line: Line, rows: int, chunk: int):
        if rows < 1 or chunk < 1:
            name, given = ("rows", rows) if rows < 1 else ("chunk", chunk)
            raise ValueError(f"{name}: {given} is not possible; give 1 or more")
        self.line, self.rows, self.chunk = line, rows, chunk
        self.impossible: dict[Hashable, str | None] = {}

    def why_alone(self, key: Hashable, pair: Any, ids: list[int], call: dict[str, Any]) -> str | None:
        """Why a request of this kind has to be answered alone; None if it need not. ids, call: its prompt and its settings."""
        if key not in self.impossible:
            try:
                self._open(pair, ids, call)[0].end()
                self.impossible[key] = None
            except ValueError as error:
                self.impossible[key] = str(error)
        return self.impossible[key]

    def begin(self, key: Hashable, first: Place, pair: Any, ids: list[int], call: dict[str, Any]) -> None:
        """Answer the one whose turn it is in a row, in another thread, and those who join it. ids, call: of the first one."""
        self.line.begin_batch(first)
        threading.Thread(target=self._run, args=(key, first, pair, ids, call), daemon=True).start()

    def _open(self, pair: Any, ids: list[int], call: dict[str, Any]) -> tuple[Preparation, Batch]:
        own = {name: value for name, value in call.items() if name != "draft_length"}
        generation = Preparation.of(pair, call.get("draft_length"), own)
        inputs = generation.inputs(torch.tensor(ids, device=pair.device), own)
        return generation, Batch(generation, inputs, self.rows, self.chunk)

    def _run(self, key: Hashable, first: Place, pair: Any, ids: list[int], call: dict[str, Any]) -> None:
        line, ahead, over = self.line, [first], None
        places: dict[Asked, Place] = {}
        generation = batch = None

        def take() -> Asked | None:
            while (place := ahead.pop() if ahead else line.next(key)) is not None:
                try:
                    assert place.asked is not None
                    asked = place.asked(generation)
                    places[asked] = place
                    return asked
                except Exception as error:  # of this request alone
                    line.ended(place, error)
            return None

        try:
            generation, batch = self._open(pair, ids, call)
            for asked, _ in batch.answers(take, lambda: line.has_next(key)):
                asked.recorder.stop()
                line.ended(places.pop(asked), asked.error)
        except Exception as error:
            over = error
        finally:
            if batch is not None:
                batch.close()
            if generation is not None:
                generation.end()
            line.end_batch(over)


def in_row(
    generation: Preparation, ids: list[int], call: dict[str, Any], seed: int | None, recorder: Recorder, **more: Any
) -> Asked:
    """What a request asks of a row. ids, call: its text so far and the arguments of `generate`. seed: of the numbers that draw
    its tokens. more: see `Asked`."""
    prompt = torch.tensor(ids, device=generation.pair.device)
    own = {name: value for name, value in call.items() if name != "draft_length"}
    inputs = generation.inputs(prompt, own)
    distribution = None
    if seed is not None and inputs.config.do_sample:
        distribution = Distribution(inputs.processors, True, draws=Draws(1, seed))
    return asked_of(inputs, 0, prompt, distribution, recorder=recorder, **more)
