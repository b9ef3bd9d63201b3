"""Training early exits: a model learns to predict the next token from its own early layers (LayerSkip, arXiv 2404.16710).
All its weights change, so the result is another model than the one at the start, and its own target. Knows layers; steps
and files are the trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...engine.parts import Pass, back, find_layers, tapped
from ...extras import install
from ..shared.training.losses import Agreement, agreement
from ..shared.training.method import Method, setting

_MEASURED_EXITS = 4


@dataclass(frozen=True)
class EarlyExitSettings:
    """How the exits are trained. With neither dropout nor exits, it is plain training on the text."""

    _argument_group_name = "the exits (LayerSkip)"

    dropout: float = setting(
        0.1, "chance that the last layer is left out in a step; exponentially less for earlier layers, 0 for the first"
    )
    exit_weight: float = setting(
        0.4,
        "weight of the one exit that is trained in a step, at full depth; proportionally less for earlier exits",
        metavar="WEIGHT",
    )
    lora: int | None = setting(
        None,
        "train only low-rank changes, which are merged at the end (needs peft): for models that are too large for their "
        "optimizer state",
        metavar="RANK",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout} is not a share below 1")
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"lora: rank {self.lora} is less than 1")


def dropped_layers(layers: int, most: float, rng: np.random.Generator) -> frozenset[int]:
    """The layers left out in a step: layer l with the chance most * (exp(l ln 2 / (L - 1)) - 1)."""
    last = max(1, layers - 1)
    chance = [most * (math.exp(layer * math.log(2) / last) - 1) for layer in range(layers)]
    return frozenset(np.flatnonzero(rng.random(layers) < chance).tolist())


class EarlyExitTraining(Method):
    """A model whose early layers learn to predict through its own final norm and output layer.

    Args:
        target: trained in place; load a copy if you want to keep it.
        tokenizer: saved with the model.
        settings: how the exits are trained.
        seed: of the layers left out.
        compiled: compile the layers.

    Raises ValueError where the layers are not found, or there is only one.
    """

    name = "early-exit"
    options = EarlyExitSettings
    rate = 1e-4
    axis = "exit layer"

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: EarlyExitSettings,
        seed: int = 0,
        compiled: bool = False,
    ):
        super().__init__(settings, target, compiled)
        self.tokenizer, self.seed = tokenizer, seed
        self._layers = find_layers(target)
        count = len(self._layers)
        if count < 2:
            raise ValueError("target: it has one layer, but exits come before the last layer")
        self.student: nn.Module = target if settings.lora is None else _with_lora(target, settings.lora, seed)
        self.layers = self._layers.of(target)
        if compiled:
            for layer in self.layers:
                layer.compile()
        spread = (round(count * (i + 1) / (_MEASURED_EXITS + 1)) for i in range(_MEASURED_EXITS))
        self.positions = sorted({max(1, layer) for layer in spread})

    def loss(self, ids: Tensor, step: int) -> Tensor:
        count = len(self._layers)
        rng = np.random.default_rng((self.seed, step, 7))
        dropped = dropped_layers(count, self.about.dropout, rng)
        exit_layer = 1 + step % (count - 1)
        logits, states = self._run(ids, dropped, [exit_layer])
        loss = _next_token_loss(logits, ids)
        if not self.about.exit_weight:
            return loss
        half = max(1, len(ids) // 2)  # half the batch is enough for the exits
        early = self._exit_logits(ids[:half], states[exit_layer][:half])
        return loss + self.about.exit_weight * exit_layer / count * _next_token_loss(early, ids[:half])

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        logits, states = self._run(ids, frozenset(), self.positions)
        return [agreement(logits, self._exit_logits(ids, states[layer])) for layer in self.positions]

    def save(self, folder: Path) -> None:
        whole = self.student.merge_and_unload() if self.about.lora is not None else self.target  # type: ignore[operator]
        whole.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _run(self, ids: Tensor, dropped: frozenset[int], exits: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [B, T, V], and for each exit the states [B, T, H] after its layers."""
        own = zip(self._layers.of(self.target), self._layers.forms, strict=True)
        layers = [Pass(form) if number in dropped else layer for number, (layer, form) in enumerate(own)]
        model, taps = tapped(self.target, self._layers, exits, own=layers)
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits, {number: tap.hidden for number, tap in taps.items()}

    def _exit_logits(self, ids: Tensor, states: Tensor) -> Tensor:
        """The model's own final norm and output layer on early states, [B, T, H] -> [B, T, V]."""
        model, inject = back(self.target, self._layers, len(self._layers))
        inject.hidden = states
        return model(input_ids=ids, use_cache=False, return_dict=True).logits


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _with_lora(model: PreTrainedModel, rank: int, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(f"lora needs peft: {install('train')}") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
