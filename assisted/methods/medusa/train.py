"""Training Medusa heads (Medusa-1, arXiv 2401.10774). They learn the frozen target's distribution at later positions. Knows
heads and features; steps and files are the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...engine.parts import find_layers
from ..shared.training.losses import Agreement, Loss, agreement, divergence, log_probabilities, require_known, summed
from ..shared.training.method import Method, require_positive, setting
from .head import MedusaHeads


@dataclass(frozen=True)
class MedusaSettings:
    """What the heads are and how they are trained."""

    _argument_group_name = "the heads"

    heads: int = setting(
        4, "tokens drafted after the target's own next token; later ones are right less often", metavar="N"
    )
    layers: int = setting(1, "blocks x + SiLU(Wx + b) of each head; more blocks learn more and cost more", metavar="N")
    own_output: bool = setting(
        False,
        "give each head its own output layer (V x H numbers, initialized from the target's): it learns more, but is much "
        "larger and slower to train than with the target's output layer",
    )
    loss: Loss = setting("kl", "divergence from the target's distribution")
    decay: float = setting(0.8, "head h has the weight decay**h in the loss")

    def __post_init__(self) -> None:
        require_positive(self, "heads")
        require_known(self.loss)


class MedusaTraining(Method):
    """Medusa heads for a frozen target.

    Args:
        target: never changed.
        settings: of the heads.
        seed: of the initial weights.
        compiled: compile the target's layers and the loss.
    """

    name = "medusa"
    options = MedusaSettings
    student: MedusaHeads

    def __init__(self, target: PreTrainedModel, settings: MedusaSettings, seed: int = 0, compiled: bool = False):
        self._last = len(find_layers(target))
        super().__init__(settings, target, compiled, [self._last])
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.student = MedusaHeads.for_target(target, settings.heads, settings.layers, settings.own_output)
        self.positions = range(1, settings.heads + 1)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        seen = self._features(ids)
        weights = [self.about.decay**head for head in range(self.about.heads)]

        def of_rows(hidden: Tensor, log_p: Tensor) -> Tensor:  # [b, T, H], [b, T, V]
            total = torch.zeros((), device=ids.device)
            for ahead, drafted in enumerate(self.student(hidden, self._output), 1):  # [b, T, V], of each head
                pair = log_p[:, ahead:], drafted[:, :-ahead]  # position t of the logits is about token t + 1
                each = divergence(self.about.loss, *pair, compiled=self.compiled)
                total = total + weights[ahead - 1] * len(hidden) * each
            return total

        total = summed(of_rows, seen.states[self._last], log_probabilities(seen.logits))
        return total / (len(ids) * sum(weights))

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        seen = self._features(ids)
        drafted = self.student(seen.states[self._last], self._output)
        return [agreement(seen.logits[:, 1 + h :], drafted[h][:, : -1 - h]) for h in range(self.about.heads)]

    def save(self, folder: Path) -> None:
        self.student.save(folder, target=self.target)

    def _output(self, states: Tensor) -> Tensor:
        """The target's own output layer, which may have another dtype. [..., H] -> [..., V]."""
        output = self.target.get_output_embeddings()
        return output(states.to(output.weight.dtype))
