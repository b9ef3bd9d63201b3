"""How long and how fast something is trained, and how settings are written down. Knows numbers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


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
