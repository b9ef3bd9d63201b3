"""What the trainer needs from a method: the module to train, a loss, a measure of acceptance, and how to save the result.
Also how much memory a training needs. Knows modules; nothing of steps."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ....engine.traits import Traits
from .data import Text
from .features import Features
from .losses import Agreement, divergence, log_probabilities, summed
from .plan import Plan

_BATCH = 8


@dataclass(frozen=True)
class Start:
    """What a training starts from."""

    target: Any  # loaded for this training; only early exits change it
    tokenizer: Any  # of the target
    text: Text  # to train on
    seed: int  # of everything that is drawn
    compiled: bool  # whether layers and losses are compiled


class Method(ABC):
    """What is trained for a target: a draft, a head, or early exits."""

    name: str  # shown and written to training.json
    options: type[Any]  # the dataclass of the settings; the command's options are its fields
    rate: float | None = None  # the peak learning rate, where the plan's is too high
    about: Any  # the settings
    student: nn.Module  # what is trained; its parameters that require no gradients stay as they are
    frozen: Sequence[nn.Module] = ()  # the modules that are run and never changed, the target first
    layers: Sequence[
        nn.Module
    ] = ()  # of the student, whose matrices Muon may train: no embeddings and no output layers
    axis: str = "position"  # what acceptance is measured along; or "exit layer"
    positions: Sequence[int] = (1,)  # the numbers on that axis
    vocabulary: int  # V, of the logits

    def __init__(self, about: Any, target: PreTrainedModel, compiled: bool = False, taps: Sequence[int] | None = None):
        """target: or what is trained in its place. compiled: whether layers and losses are compiled. taps: of a target that is
        never changed, the hidden states that are read (`Features`); None for a target that is trained."""
        self.about, self.target, self.compiled = about, target, compiled
        self.vocabulary = Traits.of(target).vocabulary
        if taps is not None:
            self.frozen = (target,)
            self._features = Features(target, taps, compiled)

    @classmethod
    def make(cls, settings: Any, start: Start) -> Method:
        """The method as `assisted train` runs it: its class gets what it has arguments for, out of `settings`, an instance of
        `options`, `stream`, the training text [N], and the fields of `start`."""
        given = {"settings": settings, "stream": start.text.training, **vars(start)}
        return cls(**{name: given[name] for name in inspect.signature(cls).parameters if name in given})

    def settings(self) -> dict[str, Any]:
        """What decides the result besides the plan, ready for json. A checkpoint of other settings is not resumed."""
        return asdict(self.about)

    @abstractmethod
    def loss(self, ids: Tensor, step: int) -> Tensor:
        """A scalar of a batch, ids [B, T] int64. May draw from torch's generator, which was seeded for this step."""

    @abstractmethod
    def acceptance(self, ids: Tensor) -> list[Agreement]:
        """Teacher-forced acceptance on a text, one for each of `positions`. ids: [B, T] int64."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the result in the format that its drafter loads."""

    def divergence(self, target_logits: Tensor, draft_logits: Tensor, columns: Any = slice(None)) -> Tensor:
        """The mean divergence of the draft's distributions, [B, n, V], from the target's at these columns of [B, T, V]: a
        scalar."""

        def of_rows(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
            log_p = log_probabilities(target_logits)[:, columns]
            return len(log_p) * divergence(self.about.loss, log_p, draft_logits, compiled=self.compiled)

        return summed(of_rows, target_logits, draft_logits) / len(target_logits)

    def matrices(self) -> list[nn.Parameter]:
        """What Muon may train."""
        return [p for layer in self.layers for p in layer.parameters() if p.ndim == 2 and p.requires_grad]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [p for p in self.student.parameters() if p.requires_grad]


@dataclass(frozen=True)
class Needs:
    """Bytes that a training takes, without the activations, which are a few times the float32 logits of a batch."""

    frozen: int
    trained: int
    gradients: int
    optimizer: int
    checkpoint: int
    logits: int

    @property
    def memory(self) -> int:
        return self.frozen + self.trained + self.gradients + self.optimizer

    def __str__(self) -> str:
        mib = {name: f"{size / 2**20:.1f} MiB" for name, size in vars(self).items()}
        listed = ", ".join(f"{name} {mib[name]}" for name in ("frozen", "trained", "gradients", "optimizer"))
        return (
            f"memory: {self.memory / 2**20:.1f} MiB ({listed}) and activations (logits of a batch: {mib['logits']})\n"
            f"disk: {self.checkpoint / 2**19:.1f} MiB while a checkpoint replaces another, {mib['checkpoint']} otherwise"
        )


def fitting_batch(method: Method, context: int, free: int, processes: int = 1) -> int:
    """Sequences per step: 8, or as many as leave half of the memory free, at least one for each process.

    free: bytes; 0 if they are not known. A step is taken to hold its logits four times: the target's, the student's, their
    log-probabilities and the gradient.
    """
    rows = free // 2 // (4 * 4 * context * method.vocabulary) if free else _BATCH
    return max(1, min(_BATCH, rows) // processes) * processes


def needs(method: Method, plan: Plan) -> Needs:
    """What a training takes, counted from its parameters."""
    gradients = sum(p.nbytes for p in method.trained())
    # AdamW keeps two numbers for each of a parameter's, Muon one
    optimizer = 2 * gradients - (sum(p.nbytes for p in method.matrices()) if plan.optimizer == "muon" else 0)
    mine = {id(p) for p in method.student.parameters()}
    others = {id(p): p for module in method.frozen for p in module.parameters() if id(p) not in mine}
    return Needs(
        frozen=sum(p.nbytes for p in others.values()),
        trained=sum(p.nbytes for p in method.student.parameters()),
        gradients=gradients,
        optimizer=optimizer,
        checkpoint=gradients + optimizer,
        logits=4 * plan.batch * plan.context * method.vocabulary,
    )
