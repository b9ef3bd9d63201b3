"""The recipe of the shipped models: shapes, steps and rates, one frozen dataclass a model.

Change a number here and `assisted zoo train` builds another model; the model card states what these gave.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["DRAFT", "OTHER_DRAFT", "RECIPES", "TARGET", "Phase", "Recipe"]


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one context length.

    Args:
        steps: optimizer steps.
        batch: sequences a step.
        context: tokens a sequence.
        copies: share of the sequences whose second half is their first half again: small models learn late to copy.
    """

    steps: int
    batch: int
    context: int
    copies: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """One shipped model: a small Llama and how it is trained.

    Args:
        name: the folder under `assisted/zoo/models` and the name behind `zoo:`.
        vocab_size: entries of its byte-level BPE, special tokens included.
        hidden_size, intermediate_size, layers, heads, kv_heads: the Llama shape (head size 64).
        phases: stretches of training, in order.
        teacher: name of the model it is distilled from; None trains on the text alone.
        early_exit: layer dropout and early-exit losses (LayerSkip, arXiv 2404.16710).
        rates: (step, share of the peak rates), linear in between.
        matrix_lr, other_lr: peak rates of Muon (the layers' matrices) and AdamW (embedding, norms).
        seed: of the weights and of the order of the text.
        pieces: a regular expression whose matches no token crosses; None takes GPT-2's.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    phases: tuple[Phase, ...]
    rates: tuple[tuple[int, float], ...]
    teacher: str | None = None
    early_exit: bool = False
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    seed: int = 2024
    pieces: str | None = None

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def rate(self, step: int) -> float:
        """The share of the peak rates at `step`."""
        steps, shares = zip(*self.rates, strict=True)
        return float(np.interp(step + 0.5, steps, shares))


TARGET = Recipe(
    name="target",
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=512,
    layers=16,
    heads=3,
    kv_heads=1,
    phases=(Phase(1700, 16, 256), Phase(220, 8, 512), Phase(80, 4, 1024)),
    rates=((0, 0.0), (78, 1.0), (1200, 1.0), (2000, 0.0)),
    early_exit=True,
)
DRAFT = Recipe(
    name="draft",
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=384,
    layers=2,
    heads=3,
    kv_heads=1,
    phases=(Phase(900, 16, 256), Phase(100, 8, 512), Phase(40, 4, 1024)),
    rates=((0, 0.0), (31, 1.0), (572, 1.0), (1040, 0.0)),
    teacher="target",
)
OTHER_DRAFT = Recipe(
    name="draft-other-tokenizer",
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    layers=2,
    heads=2,
    kv_heads=1,
    phases=(Phase(1000, 16, 256), Phase(60, 4, 1024)),
    rates=((0, 0.0), (32, 1.0), (583, 1.0), (1060, 0.0)),
    pieces=r"\s+|\w+|[^\w\s]+",  # spaces are tokens of their own: text falls apart elsewhere than in the target
)
RECIPES = {recipe.name: recipe for recipe in (TARGET, DRAFT, OTHER_DRAFT)}
