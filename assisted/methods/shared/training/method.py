"""What the trainer needs from a method: the module to train, a loss, a measure of acceptance, and how to save the result. Also
how settings are written down, how long and how fast something is trained, and how much memory that needs. Knows modules and
numbers; nothing of steps."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from ....engine.traits import Traits
from .data import Text
from .features import Features
from .losses import Agreement, divergence, log_probabilities, summed

_BATCH = 8


def setting(default: Any, help: str, **options: Any) -> Any:
    """A field of a settings dataclass. Its metadata is what `transformers.HfArgumentParser` makes an option from.

    Args:
        default: the field's default.
        help: one sentence or less, also shown in the documentation.
        options: further arguments of `add_argument`, such as metavar.
    """
    return field(default=default, metadata={"help": help, **options})


def require_positive(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name}: {getattr(settings, name)} is less than 1")


@dataclass(frozen=True)
class Plan:
    """How long and how fast a method is trained."""

    _argument_group_name = "plan"

    steps: int = setting(1000, "optimizer steps", metavar="N")
    batch: int = setting(
        0,
        "sequences per step, of all processes together; more is steadier and slower; 0 takes 8, or fewer where memory is short",
        metavar="N",
    )
    context: int = setting(256, "tokens per sequence; drafts rarely need more than they are used with", metavar="N")
    lr: float = setting(1e-3, "peak learning rate of AdamW; lower it if the loss jumps")
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon trains matrices of layers with Muon and the rest with AdamW: fewer steps from random weights"
    )
    matrix_lr: float = setting(0.02, "peak learning rate of Muon", metavar="LR")
    warmup: float = setting(0.04, "share of the steps in which the rates rise", metavar="SHARE")
    cooldown: float = setting(0.5, "share of the steps, at the end, in which the rates fall to 0", metavar="SHARE")
    weight_decay: float = setting(0.01, "weight decay of matrices", metavar="DECAY")
    clip: float = setting(1.0, "largest norm of the gradient", metavar="NORM")
    seed: int = setting(0, "seed of the order of the text and of all random draws")
    bfloat16: bool = setting(False, "compute in bfloat16 (autocast): half the memory for activations, often faster")
    evaluate_every: int | None = setting(
        None, "steps between measurements on held-out text (default: ten measurements per run)", metavar="N"
    )
    evaluate_rows: int = setting(
        32, "number of held-out sequences to measure; more give a narrower interval", metavar="N"
    )
    checkpoint_every: int = setting(100, "steps between checkpoints; each replaces the one before", metavar="N")

    def __post_init__(self) -> None:
        require_positive(self, "steps", "context", "evaluate_rows", "checkpoint_every")
        if self.batch < 0:
            raise ValueError(f"batch: {self.batch} is less than 0")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: {self.seed} is not possible; give 0 to {2**32 - 1}")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer: {self.optimizer!r} is not known; one of adamw, muon")
        if not (0 <= self.warmup <= 1 and 0 <= self.cooldown <= 1 and self.warmup + self.cooldown <= 1):
            raise ValueError(f"warmup, cooldown: {self.warmup} and {self.cooldown} are not shares of one run")

    def rate(self, step: int) -> float:
        """The share of the peak rates at `step`. It rises linearly, stays at 1, and falls linearly to 0 at the end."""
        done = (step + 0.5) / self.steps
        rise = done / self.warmup if self.warmup else 1.0
        fall = (1 - done) / self.cooldown if self.cooldown else 1.0
        return min(1.0, rise, fall)

    @property
    def evaluations(self) -> int:
        """Steps between measurements."""
        return self.evaluate_every or max(1, self.steps // 10)


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
