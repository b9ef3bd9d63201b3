"""A trained head in one file of another package: it predicts the next token from the last one alone.

The package's entry point is `bigram = "bigram_head:Bigram"` in the group `assisted.methods`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assisted.drafters import register
from assisted.drafters.base import Call, Drafter, HeadSpec, Target
from assisted.drafters.chain import ChainDrafting
from assisted.drafts import Draft
from assisted.heads.files import find_folder
from assisted.text import Text
from assisted.training.losses import Agreement, agreement
from assisted.training.method import Method, Start
from assisted.training.plan import setting


class BigramHead(nn.Module):
    """Token ids [...] int64 -> logits [..., V]."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.last = nn.Embedding(vocabulary, width)
        self.next = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.next(self.last(ids))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "bigram"}))


class BigramDrafting(ChainDrafting):
    def __init__(self, head: BigramHead, call: Call):
        super().__init__(call)
        self.head = head

    def propose(self, text: Text, budget: int) -> Draft:
        return self.draft_chain(text, budget, self.head(text.last_tokens()[:, -1]), lambda ids: self.head(ids[:, -1]))


class BigramDrafter(Drafter):
    def __init__(self, head: BigramHead):
        self.head, self.save = head, head.save

    @property
    def modules(self) -> list[nn.Module]:
        return [self.head]

    def start(self, call: Call) -> BigramDrafting:
        return BigramDrafting(self.head, call)


@register("bigram")
@dataclass(frozen=True)
class Bigram(HeadSpec):
    """`"bigram:DIR"`, or the folder alone. path: of the head."""

    title = "Bigram head"
    trained = has_q = True
    acceptance = (0.1, 0.4)
    training = "bigram_head:BigramTraining"

    path: str

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        return fields.get("model_type") == "bigram"

    def load(self, target: Target, **kwargs: Any) -> BigramDrafter:
        tensors = load_file(find_folder(self.path) / "model.safetensors")
        head = BigramHead(*tensors["last.weight"].shape)
        head.load_state_dict(tensors)
        return BigramDrafter(head.to(target.model.device, target.model.dtype).eval())


@dataclass(frozen=True)
class BigramSettings:
    _argument_group_name = "the head"

    width: int = setting(8, "of its states")


class BigramTraining(Method):
    name = "bigram"
    options = BigramSettings
    rate = 1e-1

    @classmethod
    def make(cls, settings: BigramSettings, start: Start) -> Method:
        return cls(settings, start.target, start.seed)

    def __init__(self, settings: BigramSettings, target: Any, seed: int):
        super().__init__(settings, target)
        torch.manual_seed(seed)
        self.target, self.frozen = target, (target,)
        self.student = BigramHead(self.vocabulary, settings.width)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            likely = self.target(input_ids=ids).logits.softmax(-1)
        return F.cross_entropy(self.student(ids).flatten(0, 1), likely.flatten(0, 1))

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        return [agreement(self.target(input_ids=ids).logits, self.student(ids))]

    def save(self, folder: Path) -> None:
        self.student.save(folder)
