"""A trained head in one file of another package: it reads the last token and the target's last hidden state before that.

The package's entry point is `small = "small_head:Small"` in the group `assisted.methods`.
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
from transformers import PreTrainedModel

from assisted.core.drafts import Draft, Round
from assisted.core.text import Text
from assisted.engine.needs import Needs
from assisted.methods import register
from assisted.methods.shared.base import Call, Drafter, HeadSpec, Target
from assisted.methods.shared.chain import ChainDrafting
from assisted.methods.shared.files import find_folder
from assisted.methods.shared.training.losses import Agreement, agreement
from assisted.methods.shared.training.method import Method, Start, setting


class SmallNet(nn.Module):
    """Token ids [...] int64 and the states [..., H] one token before them -> logits [..., V] of the next token."""

    def __init__(self, vocabulary: int, width: int, hidden_size: int):
        super().__init__()
        self.last = nn.Embedding(vocabulary, width)
        self.seen = nn.Linear(hidden_size, width, bias=False)
        self.next = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        return self.next(self.last(ids) + self.seen(states))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "small"}))


class SmallDrafting(ChainDrafting):
    """states: [B, H], those of the last but one committed token of each row."""

    def __init__(self, drafter: SmallDrafter, call: Call):
        super().__init__(call)
        self.net = drafter.net
        (self.index,) = drafter.needs.states
        self.states = call.states[self.index][:, -1]

    def propose(self, text: Text, budget: int) -> Draft:
        def read(tokens: Tensor) -> Tensor:
            return self.net(tokens[:, -1], self.states)

        return self.draft_chain(text, budget, read(text.last_tokens()), read)

    def observe(self, round: Round) -> None:
        states = round.states[self.index]
        last = [(round.columns(row) or [0])[-1] for row in range(len(states))]
        self.states = states[torch.arange(len(states)), last]


class SmallDrafter(Drafter):
    def __init__(self, net: SmallNet, target: PreTrainedModel):
        self.net, self.save = net, net.save
        self.needs = Needs.of_states(target, -1)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.net]

    def start(self, call: Call) -> SmallDrafting:
        return SmallDrafting(self, call)


@register("small")
@dataclass(frozen=True)
class Small(HeadSpec):
    """`"small:DIR"`, or the folder alone. path: of the head."""

    title = "Small head"
    trained = has_q = True
    acceptance = (0.1, 0.4)
    training = "small_head:SmallTraining"

    path: str

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        return fields.get("model_type") == "small"

    def load(self, target: Target, **kwargs: Any) -> SmallDrafter:
        tensors = load_file(find_folder(self.path) / "model.safetensors")
        net = SmallNet(*tensors["last.weight"].shape, tensors["seen.weight"].shape[1])
        net.load_state_dict(tensors)
        return SmallDrafter(net.to(target.model.device, target.model.dtype).eval(), target.model)


@dataclass(frozen=True)
class SmallSettings:
    _argument_group_name = "the head"

    width: int = setting(8, "of its states")


class SmallTraining(Method):
    name = "small"
    options = SmallSettings
    rate = 1e-1

    @classmethod
    def make(cls, settings: SmallSettings, start: Start) -> Method:
        return cls(settings, start.target, start.seed)

    def __init__(self, settings: SmallSettings, target: Any, seed: int):
        super().__init__(settings, target)
        torch.manual_seed(seed)
        self.target, self.frozen = target, (target,)
        self.student = SmallNet(self.vocabulary, settings.width, target.config.hidden_size)

    def logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's and the head's, [B, T - 1, V]."""
        with torch.no_grad():
            found = self.target(input_ids=ids, output_hidden_states=True)
        return found.logits[:, 1:], self.student(ids[:, 1:], found.hidden_states[-1][:, :-1])

    def loss(self, ids: Tensor, step: int) -> Tensor:
        target, own = self.logits(ids)
        return F.cross_entropy(own.flatten(0, 1), target.softmax(-1).flatten(0, 1))

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        return [agreement(*self.logits(ids))]

    def save(self, folder: Path) -> None:
        self.student.save(folder)
