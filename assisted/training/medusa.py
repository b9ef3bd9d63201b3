"""Training Medusa heads (Medusa-1, arXiv 2401.10774): the target stays as it is, the heads learn its distribution further on.

Knows heads and features; steps and files are the trainer's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.parts import find_layers
from ..heads.medusa import MedusaHeads
from .features import Features
from .losses import DIVERGENCES, Agreement, agreement, divergence, log_probabilities, rows_at_once
from .method import Method

__all__ = ["MedusaSettings", "MedusaTraining"]


@dataclass(frozen=True)
class MedusaSettings:
    """What the heads are and what they learn.

    Args:
        heads: tokens that are drafted beyond the target's own next one. More reach further, and are right less often.
        layers: blocks x + SiLU(Wx + b) of each head. More learn more and cost more.
        own_output: each head has an output layer of its own (V x H numbers, started from the target's). Without, all use
            the target's: much smaller, and faster to train.
        loss: divergence from the target's distribution: "kl", "reverse-kl", "tv" or "kl+tv".
        decay: weight of head h is decay**h.
    """

    heads: int = 4
    layers: int = 1
    own_output: bool = False
    loss: str = "kl"
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"heads: {self.heads} is less than 1")
        if self.loss not in DIVERGENCES:
            raise ValueError(f"loss: {self.loss!r} is not known; one of {', '.join(DIVERGENCES)}")


class MedusaTraining(Method):
    """Medusa heads for a frozen target.

    Args:
        target: never changed.
        settings: of the heads.
        seed: of what is drawn at the start.
        compiled: compile the target's layers.
    """

    name = "medusa"
    student: MedusaHeads

    def __init__(self, target: PreTrainedModel, settings: MedusaSettings, seed: int = 0, compiled: bool = False):
        self.about = settings
        self.compiled = compiled
        self._last = len(find_layers(target))
        self._features = Features(target, [self._last], compiled)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.student = MedusaHeads.for_target(target, settings.heads, settings.layers, settings.own_output)
        self.target = target
        self.frozen = (target,)
        self.vocabulary = target.config.get_text_config(decoder=True).vocab_size
        self.places = range(1, settings.heads + 1)

    def settings(self) -> dict[str, Any]:
        return asdict(self.about)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        seen = self._features(ids)
        heads = self.about.heads
        weights = [self.about.decay**head for head in range(heads)]
        total = torch.zeros((), device=ids.device)
        slices = (
            tensor.split(rows_at_once(ids)) for tensor in (seen.states[self._last], log_probabilities(seen.logits))
        )
        for hidden, taught in zip(*slices, strict=True):  # [b, T, H], [b, T, V]
            drafted = self.student(hidden, self._said)  # [heads, b, T, V]
            for head, weight in enumerate(weights):
                ahead = 1 + head  # the target's distribution there is at the position of the token before
                apart = divergence(
                    self.about.loss, taught[:, ahead:], drafted[head, :, :-ahead], compiled=self.compiled
                )
                total = total + weight * len(hidden) * apart
        return total / (len(ids) * sum(weights))

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        seen = self._features(ids)
        drafted = self.student(seen.states[self._last], self._said)
        return [agreement(seen.logits[:, 1 + h :], drafted[h][:, : -1 - h]) for h in range(self.about.heads)]

    def save(self, folder: Path) -> None:
        self.student.save(folder, target=self.target)

    def _said(self, states: Tensor) -> Tensor:
        """The target's own output, whatever dtype it has. [..., H] -> [..., V]."""
        output = self.target.get_output_embeddings()
        return output(states.to(output.weight.dtype))
