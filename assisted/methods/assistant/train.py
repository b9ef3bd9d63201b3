"""Training an assistant in the form of Gemma 4's: small layers that attend to the keys and values of a frozen target. Knows
heads and features; the loss is that of `HeadTraining`, steps and files are the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...engine.cache import SlotCache
from ...engine.libraries import CACHE
from ...engine.parts import unwrapped
from ..shared.training.features import Features, Seen
from ..shared.training.heads import HeadTraining, columns_of
from ..shared.training.losses import Loss, require_known
from ..shared.training.method import require_positive, setting
from .head import AssistantHead, Keys, fields_for, save_assistant

_QUIET = 0.1  # the weight of the norms after attention and MLP at the start, when these know nothing yet


@dataclass(frozen=True)
class AssistantSettings:
    """The assistant's shape, and how it is trained."""

    _argument_group_name = "the assistant"

    layers: int = setting(4, "number of layers", metavar="N")
    unroll: int = setting(
        3, "steps in which it reads its own states in training; each costs as much as the first", metavar="N"
    )
    decay: float = setting(0.6, "unrolled step i has the weight decay**i in the loss")
    loss: Loss = setting("kl+tv", "divergence from the target's distribution")
    positions: int = setting(5, "drafted positions at which held-out acceptance is measured", metavar="N")

    def __post_init__(self) -> None:
        require_positive(self, "layers", "unroll", "positions")
        require_known(self.loss)


class FeaturesWithKeys(Features):
    """`Features` whose forward pass leaves all keys and values in `slots`."""

    slots: SlotCache

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Seen:
        self.slots = SlotCache(len(ids), ids.shape[1])
        logits = self._model(input_ids=ids, use_cache=True, return_dict=True, **{CACHE: self.slots}).logits
        return Seen({tap: module.hidden for tap, module in self._taps.items()}, logits)


class AssistantTraining(HeadTraining):
    """An assistant for a frozen target of any architecture that `AssistantHead` takes. At the start, it hands on the target's
    state and predicts with the target's output embedding.

    Args:
        target: never changed. Its embedding, keys and values are the assistant's.
        settings: of the assistant.
        seed: of the initial weights.
        compiled: compile the loss.
    """

    name = "assistant"
    options = AssistantSettings
    student: AssistantHead

    def __init__(self, target: PreTrainedModel, settings: AssistantSettings, seed: int = 0, compiled: bool = False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.student = head = AssistantHead(target, fields_for(target, settings.layers), None)
        super().__init__(settings, target, head.config.taps, compiled)
        self._features = self._seen = FeaturesWithKeys(target, head.config.taps)
        self.layers = (head.pre_projection, head.post_projection, head.model.layers)
        with torch.no_grad():
            eye = torch.eye(head.config.width)
            head.pre_projection.weight.copy_(torch.cat([torch.zeros_like(eye), eye], 1))
            head.post_projection.weight.copy_(eye)
            for layer in head.model.layers:
                layer.post_attention_layernorm.weight.fill_(_QUIET)
                layer.post_feedforward_layernorm.weight.fill_(_QUIET)
            output = getattr(unwrapped(target).get_output_embeddings(), "weight", None)
            if output is not None and output.shape == head.model.embed_tokens.weight.shape:
                head.model.embed_tokens.weight.copy_(output)

    def save(self, folder: Path) -> None:
        save_assistant(self.student, folder)

    def _unrolled(self, ids: Tensor, seen: Seen, steps: int) -> Iterator[tuple[slice, Tensor]]:
        """As `HeadTraining`. Column i sees the keys of the tokens 0 to i, and has the position i + 1 in all steps."""
        head, columns = self.student, columns_of(ids, steps)
        positions = torch.arange(1, columns + 1, device=ids.device)
        slots, keys = torch.arange(columns, device=ids.device), {}
        for kind, source in head.sources.items():
            layer, window = self._seen.slots.slot_layers[source.layer], head.config.window(kind)
            visible = slots < positions[:, None]
            if window is not None:
                visible &= slots > positions[:, None] - window
            stores = (store[:, :, :columns].to(head.dtype) for store in (layer.keys, layer.values))
            keys[kind] = Keys(next(stores), next(stores), visible[None, None])
        states = self._inputs(seen)[:, :columns].to(head.dtype)
        embeddings = head.embed(ids[:, 1:], self.target)  # column i is token i + 1
        for step in range(steps):
            ended, states = head(embeddings[:, step : step + columns], states, positions[None], keys)
            yield slice(step + 1, step + 1 + columns), ended
