"""Training early exits: a model learns to speak from its own early layers (LayerSkip, arXiv 2404.16710).

The whole model learns, so the result is another model than the one begun with, and its own target. Knows layers; steps and
files are the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..engine.parts import Pass, Tap, back, find_layers
from .losses import Agreement, agreement
from .method import Method

__all__ = ["EarlyExitSettings", "EarlyExitTraining", "dropped_layers"]

_SHOWN_EXITS = 4


@dataclass(frozen=True)
class EarlyExitSettings:
    """The recipe.

    Args:
        dropout: chance that the last layer is left out in a step; of those before it exponentially less, of the first none.
        exit_weight: of the one exit that is trained in a step, if it were at full depth; less in proportion before.
        lora: rank of low-rank changes that are trained instead of all weights, and merged at the end; None trains all.
            For a model too large for its optimizer state. Needs peft.
    """

    dropout: float = 0.1
    exit_weight: float = 0.4
    lora: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout} is no share below 1")
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"lora: rank {self.lora} is less than 1")


def dropped_layers(layers: int, most: float, rng: np.random.Generator) -> frozenset[int]:
    """The layers left out in a step: layer l with the chance most * (exp(l ln 2 / (L - 1)) - 1)."""
    last = max(1, layers - 1)
    chance = [most * (math.exp(layer * math.log(2) / last) - 1) for layer in range(layers)]
    return frozenset(np.flatnonzero(rng.random(layers) < chance).tolist())


class EarlyExitTraining(Method):
    """A model whose early layers learn to speak through its own norm and output.

    Args:
        model: trained in place; load a copy of what is to be kept.
        tokenizer: saved beside it.
        settings: the recipe.
        seed: of the layers left out.
        compiled: compile the layers.

    Raises ValueError where the layers are not found, or there is one only.
    """

    name = "early-exit"
    axis = "exit layer"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: EarlyExitSettings,
        seed: int = 0,
        compiled: bool = False,
    ):
        self.about = settings
        self.tokenizer = tokenizer
        self.seed = seed
        self.model = model
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._layers = find_layers(model)
        count = len(self._layers)
        if count < 2:
            raise ValueError("target: it has one layer, and exits lie before the last")
        self.student: nn.Module = model if settings.lora is None else _with_lora(model, settings.lora, seed)
        if compiled:
            for layer in self._layers.of(model):
                layer.compile()
        self.places = sorted({max(1, round(count * (i + 1) / (_SHOWN_EXITS + 1))) for i in range(_SHOWN_EXITS)})

    def settings(self) -> dict[str, Any]:
        return asdict(self.about)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        count = len(self._layers)
        rng = np.random.default_rng((self.seed, step, 7))
        dropped = dropped_layers(count, self.about.dropout, rng)
        exit_layer = 1 + step % (count - 1)
        logits, states = self._run(ids, dropped, [exit_layer])
        half = max(1, len(ids) // 2)  # half the batch is enough for the exits
        early = self._said(ids[:half], states[exit_layer][:half])
        share = self.about.exit_weight * exit_layer / count
        return _next_token_loss(logits, ids) + share * _next_token_loss(early, ids[:half])

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        logits, states = self._run(ids, frozenset(), self.places)
        return [agreement(logits, self._said(ids, states[place])) for place in self.places]

    def matrices(self) -> list[nn.Parameter]:
        layers = find_layers(self.model).of(self.model)
        return [p for layer in layers for p in layer.parameters() if p.ndim == 2 and p.requires_grad]

    def save(self, folder: Path) -> None:
        whole = self.student.merge_and_unload() if self.about.lora is not None else self.model  # type: ignore[operator]
        whole.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _run(self, ids: Tensor, dropped: frozenset[int], exits: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits [B, T, V], and the states [B, T, H] behind each exit's layers."""
        layers: list[nn.Module] = []
        own = self._layers.of(self.model)
        for place, (layer, form) in enumerate(zip(own, self._layers.forms, strict=True)):
            layers.append(Pass(form) if place in dropped else layer)
        taps = {number: Tap(layers[number - 1]) for number in exits}
        tapped = [taps.get(place + 1, layer) for place, layer in enumerate(layers)]
        model = self._layers.replaced(self.model, tapped)
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits, {number: tap.hidden for number, tap in taps.items()}

    def _said(self, ids: Tensor, states: Tensor) -> Tensor:
        """What the model's own norm and output make of states, [B, T, H] -> [B, T, V]."""
        model, inject = back(self.model, self._layers, len(self._layers))
        inject.hidden = states
        return model(input_ids=ids, use_cache=False, return_dict=True).logits


def _next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _with_lora(model: PreTrainedModel, rank: int, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora needs peft: pip install 'assisted[train]'") from error
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
