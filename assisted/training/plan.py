"""How long and how fast something is trained. Knows numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPTIMIZERS", "Plan"]

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Plan:
    """How long and how fast a method is trained.

    Args:
        steps: optimizer steps.
        batch: sequences a step, of all processes together. More is steadier and slower.
        context: tokens a sequence. Drafts rarely need more than they are used with.
        lr: peak learning rate of AdamW. Lower it when the loss jumps.
        optimizer: "adamw", or "muon" for the matrices and AdamW for embeddings, norms and output layers: fewer steps for
            what starts from nothing.
        matrix_lr: peak rate of Muon.
        warmup: share of the steps in which the rates rise.
        cooldown: share of the steps, at the end, in which they fall to 0.
        weight_decay: of matrices.
        clip: the longest gradient, as a norm.
        seed: of the order of the text and of all that is drawn.
        bfloat16: autocast: faster where the hardware knows it, and half the memory of activations.
        evaluate_every: steps between measurements on held-out text; None measures ten times.
        evaluate_rows: held-out sequences measured.
        checkpoint_every: steps between checkpoints; each replaces the one before.
    """

    steps: int
    batch: int = 8
    context: int = 256
    lr: float = 1e-3
    optimizer: str = "adamw"
    matrix_lr: float = 0.02
    warmup: float = 0.04
    cooldown: float = 0.5
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    bfloat16: bool = False
    evaluate_every: int | None = None
    evaluate_rows: int = 16
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context", "evaluate_rows", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: {self.optimizer!r} is not known; one of {', '.join(OPTIMIZERS)}")
        if not (0 <= self.warmup <= 1 and 0 <= self.cooldown <= 1 and self.warmup + self.cooldown <= 1):
            raise ValueError(f"warmup, cooldown: {self.warmup} and {self.cooldown} are no shares of one run")

    def rate(self, step: int) -> float:
        """The share of the peak rates at `step`: up, level, and down to 0 at the end, in straight lines."""
        place = (step + 0.5) / self.steps
        rise = place / self.warmup if self.warmup else 1.0
        fall = (1 - place) / self.cooldown if self.cooldown else 1.0
        return min(1.0, rise, fall)

    @property
    def evaluations(self) -> int:
        """Steps between measurements."""
        return self.evaluate_every or max(1, self.steps // 10)
