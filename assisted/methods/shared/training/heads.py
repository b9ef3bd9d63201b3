"""What the trainings of heads share that draft from the target's hidden states, and then from their own: the steps of a draft,
unrolled over a text, and their loss. Knows heads and features; nothing of how a head is made or saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ....engine.needs import find_final_norm
from ....engine.parts import find_layers
from ..heads import Head
from .features import Seen, plain_output, rounded_products
from .losses import Agreement, agreement, divergence, divergence_of_states, log_probabilities, summed
from .masks import unrolled_mask
from .method import Method

SPREAD = 2.0  # standard deviation of the logits of a head that has learned nothing, at most


class HeadTraining(Method):
    """A head for a frozen target. Its settings have `unroll`, `decay`, `loss` and `positions`.

    Args:
        settings: of the head.
        target: never changed.
        taps: the hidden states that the head reads.
        compiled: compile the target's layers and the loss.
    """

    student: Any  # a Head

    def __init__(self, settings: Any, target: PreTrainedModel, taps: Sequence[int], compiled: bool = False):
        super().__init__(settings, target, compiled, taps)
        self.positions = range(1, settings.positions + 1)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        seen = self._features(ids)
        weights = [self.about.decay**i for i in range(self.about.unroll)]
        log_p, counts = self._taught(seen.logits)
        total = torch.zeros((), device=ids.device)
        for weight, (there, states) in zip(weights, self._unrolled(ids, seen, len(weights)), strict=True):
            total = total + weight * self._token_loss(log_p[:, there], counts[:, there], states)
        return total / sum(weights)

    @torch.no_grad()
    def acceptance(self, ids: Tensor) -> list[Agreement]:
        seen = self._features(ids)
        return [
            agreement(seen.logits[:, there], self._drafted(states))
            for there, states in self._unrolled(ids, seen, self.about.positions)
        ]

    def _drafted(self, states: Tensor) -> Tensor:
        """The head's logits over the whole vocabulary, without gradients: [..., H] -> [..., V]."""
        head = self.student
        with torch.no_grad(), rounded_products(self._features.rounded and head.shares_output):
            return head.over_all(head.logits(states, self.target))

    def _unrolled(self, ids: Tensor, seen: Seen, steps: int) -> Iterator[tuple[slice, Tensor]]:
        """The head's states for each drafted position in turn, [B, T - steps, H], and where the target's logits for the same
        tokens are. Column i of the first predicts token i + 2.

        A draft starts at every position of the text. It reads the text's tokens and, from the second position on, the states
        of the position before. Several heads in turn (`in_turn`) read the whole text each; the last one goes on alone.
        """
        heads, columns = self.in_turn(), columns_of(ids, steps)
        positions = torch.arange(columns, device=ids.device)[None]
        states = heads[0].fuse(self._inputs(seen)[:, :columns])
        embeddings = heads[0].embed(ids[:, 1:], self.target)  # column i is token i + 1
        cache = DynamicCache()
        for step in range(steps):
            head = heads[min(step, len(heads) - 1)]
            mask = causal_mask(columns, max(0, step + 1 - len(heads)), embeddings)
            states = head(embeddings[:, step : step + columns], states, positions + step, mask, cache)
            yield slice(step + 1, step + 1 + columns), states

    def in_turn(self) -> Sequence[Head]:
        """Which heads draft the positions, in turn."""
        return [self.student]

    def _inputs(self, seen: Seen) -> Tensor:
        return torch.cat([seen.states[tap] for tap in self.student.config.taps], -1)

    def _taught(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's log-probabilities over the head's vocabulary, [B, T, Vd], and the weight of each position, [B, T]: 1
        where that vocabulary has the target's top-1 token, else 0."""
        return log_probabilities(logits), torch.ones(logits.shape[:-1], device=logits.device)

    def _token_loss(self, log_p: Tensor, counts: Tensor, states: Tensor) -> Tensor:
        """log_p: [B, n, Vd], counts: [B, n], states: [B, n, H]. Returns a scalar."""
        output = self.target.get_output_embeddings()
        if self.student.shares_output and plain_output(output) and states.device.type == "cpu":
            found = divergence_of_states(self.about.loss, log_p, states, counts, output, self._features.rounded)
            return found / counts.sum().clamp(min=1)

        def of_rows(taught: Tensor, weights: Tensor, some: Tensor) -> Tensor:
            drafted = self.student.logits(some, self.target)
            return divergence(self.about.loss, taught, drafted, weights, self.compiled) * weights.sum()

        return summed(of_rows, log_p, counts, states) / counts.sum().clamp(min=1)


def columns_of(ids: Tensor, steps: int) -> int:
    """At how many columns of a text a draft of so many steps can start. Raises ValueError if at none."""
    if ids.shape[1] <= steps:
        raise ValueError(f"context: {ids.shape[1]} tokens are too few to unroll {steps} steps")
    return ids.shape[1] - steps


def causal_mask(columns: int, step: int, like: Tensor) -> Tensor:
    """`unrolled_mask` as an additive mask, which every attention implementation takes: [1, 1, n, (step + 1) * n]."""
    seen = unrolled_mask(columns, step, like.device)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, float("-inf"))


@torch.no_grad()
def start_norm(weight: Tensor, output: Tensor, target: PreTrainedModel) -> None:
    """Initialize the weight [H] of a head's last norm from the target's, where that fits. output: [Vd, H], the output embedding
    that follows."""
    norm = target.get_submodule(".".join(find_final_norm(target, find_layers(target))))
    like = target.get_output_embeddings().weight
    scale = norm(torch.ones(1, 1, len(weight), dtype=like.dtype, device=like.device))[0, 0]
    if bool((scale > 0).all()):  # an RMS norm, however it stores its weight
        weight.copy_(scale)
    # the states are random at first, and such logits would be far from every distribution: the loss of the first steps
    spread = float(((output * weight) ** 2).sum(1).mean().sqrt())
    weight.mul_(min(1.0, SPREAD / spread))
