"""Distilling a draft: a small model learns the target's distribution, on text and on what it writes itself.

DistillSpec, arXiv 2310.08461. Knows two models with one tokenizer; steps and files are the trainer's.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .. import zoo
from ..engine.parts import find_layers
from ..loading.vocabulary import find_tokenizer, same_tokens
from .features import Features
from .losses import DIVERGENCES, Agreement, agreement, divergence, log_probabilities, rows_at_once
from .method import Method

__all__ = ["DistillSettings", "Distillation", "first_draft"]

_LEAST_PROMPT = 8  # tokens of text that a draft writes behind


@dataclass(frozen=True)
class DistillSettings:
    """Which draft, and how it learns.

    Args:
        draft: a model to go on from, a path; None makes one of the target's own layers.
        layers: how many of those, evenly chosen.
        loss: divergence from the target's distribution: "kl", "reverse-kl", "tv" or "kl+tv". 1 - TV is what is
        accepted; KL learns
            faster from afar.
        on_policy: share of the sequences that the draft writes itself behind a beginning of the text, so that it learns
            where it really goes. Each costs a generation by the draft.
    """

    draft: str | None = None
    layers: int | None = None
    loss: str = "kl+tv"
    on_policy: float = 0.0

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.layers is None):
            raise ValueError(
                "draft, layers: give one of them, a model to go on from or a number of the target's layers"
            )
        if self.loss not in DIVERGENCES:
            raise ValueError(f"loss: {self.loss!r} is not known; one of {', '.join(DIVERGENCES)}")
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy: {self.on_policy} is no share between 0 and 1")


class Distillation(Method):
    """A draft model for a frozen target with the same tokenizer.

    Args:
        target: never changed.
        tokenizer: the target's; saved beside the draft.
        settings: which draft, and how it learns.
        compiled: compile the target's layers.

    Raises ValueError for a draft with another tokenizer.
    """

    name = "distill"
    student: PreTrainedModel

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: DistillSettings,
        compiled: bool = False,
    ):
        self.about = settings
        self.compiled = compiled
        self.tokenizer = tokenizer
        self._features = Features(target, compiled=compiled)
        if settings.draft is None:
            self.student = first_draft(target, settings.layers or 1)
        else:
            path = zoo.resolve(settings.draft)
            self.student = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            if not same_tokens(target, self.student, tokenizer, find_tokenizer(path)):
                raise ValueError(
                    f"draft: {settings.draft} has another tokenizer than the target, whose distribution it can't learn"
                )
        self.frozen = (target,)
        self.vocabulary = target.config.get_text_config(decoder=True).vocab_size

    def settings(self) -> dict[str, Any]:
        return asdict(self.about)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        own = int(torch.binomial(torch.tensor(float(len(ids))), torch.tensor(self.about.on_policy)))
        if own:
            ids = torch.cat([self.written(ids[:own]), ids[own:]])
        taught = self._features(ids).logits
        drafted = self.student(input_ids=ids, use_cache=False).logits
        shared = min(taught.shape[-1], drafted.shape[-1])  # vocabularies may be padded
        total = torch.zeros((), device=ids.device)
        rows = rows_at_once(ids)
        for wanted, said in zip(taught.split(rows), drafted.split(rows), strict=True):
            apart = divergence(
                self.about.loss, log_probabilities(wanted[..., :shared]), said[..., :shared], compiled=self.compiled
            )
            total = total + apart * len(said)
        return total / len(ids)

    @torch.no_grad()
    def written(self, ids: Tensor) -> Tensor:
        """What the draft writes behind a beginning of each text, which is of one random length: [B, T] int64, as `ids`."""
        length = ids.shape[1]
        least = min(_LEAST_PROMPT, length - 1)
        kept = int(torch.randint(least, max(least + 1, length // 2), ()))
        self.student.eval()
        found = self.student.generate(
            ids[:, :kept],
            attention_mask=torch.ones_like(ids[:, :kept]),
            max_new_tokens=length - kept,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        self.student.train()
        return found

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        taught = self._features(ids).logits
        drafted = self.student(input_ids=ids, use_cache=False).logits
        shared = min(taught.shape[-1], drafted.shape[-1])
        return [agreement(taught[..., :shared], drafted[..., :shared])]

    def matrices(self) -> list[nn.Parameter]:
        layers = find_layers(self.student).of(self.student)
        return [p for layer in layers for p in layer.parameters() if p.ndim == 2 and p.requires_grad]

    def save(self, folder: Path) -> None:
        self.student.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@torch.no_grad()
def first_draft(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the target's kind with `layers` of its layers, evenly chosen, first and last among them; float32.

    Raises ValueError where the target has fewer.
    """
    places = find_layers(target)
    count = len(places)
    if not 1 <= layers <= count:
        raise ValueError(f"layers: {layers} is not between 1 and the target's {count}")
    chosen = [round(i * (count - 1) / max(1, layers - 1)) for i in range(layers)]
    config = copy.deepcopy(target.config)
    inner = config.get_text_config(decoder=True)
    inner.num_hidden_layers = layers
    kinds = getattr(inner, "layer_types", None)
    if kinds is not None:
        inner.layer_types = [kinds[place] for place in chosen]
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = ".".join(places.path) + "."
    wanted = draft.state_dict()
    for name, tensor in target.state_dict().items():
        if name.startswith(path):
            number, _, rest = name.removeprefix(path).partition(".")
            if int(number) not in chosen:
                continue
            name = f"{path}{chosen.index(int(number))}.{rest}"
        wanted[name].copy_(tensor)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft
