"""Requests to a batch whose rows come and go, as a server has them."""

from __future__ import annotations

from typing import Any

import torch

from assisted import AssistedModelForCausalLM
from assisted.core.report import Recorder
from assisted.distribution import Distribution, Draws
from assisted.many import Answer
from assisted.many.rows import Batch, Preparation, asked_of
from assisted.many.texts import Asked

__all__ = ["CHUNK", "Requests"]

CHUNK = 5


class Requests:
    """Requests to a batch, which come in some rounds, and whose clients leave after some tokens."""

    def __init__(self, model: AssistedModelForCausalLM, rows: int, chunk: int | None = CHUNK):
        self.model, self.rows, self.chunk, self.round = model, rows, chunk, 0
        self.coming: list[tuple[int, Asked]] = []
        self.pieces: dict[int, list[int]] = {}
        self.batch: Any = None
        self.prepared: dict[str, Any] = {}

    def ask(
        self, prompt: torch.Tensor, call: dict[str, Any], when: int = 0, patience: int = 999, seed: int | None = None
    ) -> int:
        key = str((call, len(prompt)))  # the same preparation serves requests that are alike
        if key not in self.prepared:
            generation = Preparation.of(self.model, None, call)
            self.prepared[key] = generation, generation.inputs(prompt, call)
        generation, inputs = self.prepared[key]
        if self.batch is None:
            self.batch = Batch(generation, inputs, self.rows, self.chunk)
            self.batch.watch = self.seen
        number = len(self.coming)
        pieces = self.pieces[number] = list[int]()
        about: dict[str, Any] = {"new": pieces.extend, "left": lambda: len(pieces) >= patience}
        if seed is not None:
            about["distribution"] = Distribution(inputs.processors, True, draws=Draws(1, seed))
        self.coming.append((when, asked_of(inputs, number, prompt, recorder=Recorder(), **about)))
        return number

    def seen(self, round: Any) -> None:
        self.round += 1

    def answers(self) -> dict[int, Answer]:
        """All texts, by the number of their request."""
        waiting = sorted(self.coming, key=lambda one: one[0])

        def waits() -> bool:
            return bool(waiting) and waiting[0][0] <= self.round

        found: dict[int, Answer] = {}
        while waiting:  # a batch without texts ends, and its round does not come
            self.round = max(self.round, waiting[0][0])
            for asked, answer in self.batch.answers(lambda: waiting.pop(0)[1] if waits() else None, waits):
                assert asked.index not in found
                found[asked.index] = answer
        for number, answer in found.items():
            assert self.coming[number][1].error is not None or answer.new_tokens.tolist() == self.pieces[number]
        return found
