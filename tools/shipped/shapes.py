"""The recipe of the shipped models: shapes, steps and rates, one frozen dataclass per model.

Change a number here and `python -m tools.shipped train` builds another model. The model card states what these achieved.
"""

from __future__ import annotations

from dataclasses import dataclass

from assisted.lab.grown import Shape
from assisted.methods.early_exit.train import EarlyExitSettings
from assisted.methods.shared.training.method import Plan

__all__ = ["DRAFT", "HYBRID", "OTHER_DRAFT", "RECIPES", "TARGET", "Phase", "Recipe"]


@dataclass(frozen=True)
class Phase:
    """A stretch of training at one context length.

    Args:
        steps: optimizer steps.
        batch: sequences per step.
        context: tokens per sequence.
    """

    steps: int
    batch: int
    context: int


@dataclass(frozen=True)
class Recipe:
    """One shipped model: a small Llama, or a hybrid like Qwen3.5, and how it is trained.

    Args:
        name: the folder under `assisted/zoo/models`, and the name after `zoo:`.
        vocab_size: entries of its byte-level BPE, including special tokens.
        shape: of the model; heads have size 64.
        phases: stretches of training, in order.
        warmup, cooldown: as in `Plan`.
        teacher: name of the model from which it is distilled; None trains on the text alone.
        exits: layer dropout and early-exit losses, where it is trained on the text; None for neither.
        seed: of the weights and of the order of the text.
        pieces: a regular expression. No token crosses the borders of its matches; None takes that of GPT-2.
        tokenizer: name of the model whose tokenizer it has; None trains one.
        full_attention_interval: a hybrid, in which every so many layers have full attention and the others a gated delta
            rule. None is a Llama.
    """

    name: str
    vocab_size: int
    shape: Shape
    phases: tuple[Phase, ...]
    warmup: float
    cooldown: float
    teacher: str | None = None
    exits: EarlyExitSettings | None = None
    seed: int = 2024
    pieces: str | None = None
    tokenizer: str | None = None
    full_attention_interval: int | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the whole run. Its batch and context are those of the first phase."""
        return Plan(
            steps=sum(phase.steps for phase in self.phases),
            batch=self.phases[0].batch,
            context=self.phases[0].context,
            lr=3e-3,
            optimizer="muon",
            warmup=self.warmup,
            cooldown=self.cooldown,
            seed=self.seed,
            bfloat16=True,
        )


TARGET = Recipe(
    name="target",
    vocab_size=4096,
    shape=Shape(hidden_size=192, intermediate_size=512, layers=16, heads=3, kv_heads=1),
    phases=(Phase(1700, 16, 256), Phase(220, 8, 512), Phase(80, 4, 1024)),
    warmup=0.039,
    cooldown=0.4,
    exits=EarlyExitSettings(),
)
DRAFT = Recipe(
    name="draft",
    vocab_size=4096,
    shape=Shape(hidden_size=192, intermediate_size=384, layers=2, heads=3, kv_heads=1),
    phases=(Phase(900, 16, 256), Phase(100, 8, 512), Phase(40, 4, 1024)),
    warmup=0.03,
    cooldown=0.45,
    teacher="target",
    tokenizer="target",
)
OTHER_DRAFT = Recipe(
    name="draft-other-tokenizer",
    vocab_size=2048,
    shape=Shape(hidden_size=128, intermediate_size=384, layers=2, heads=2, kv_heads=1),
    phases=(Phase(1000, 16, 256), Phase(60, 4, 1024)),
    warmup=0.03,
    cooldown=0.45,
    pieces=r"\s+|\w+|[^\w\s]+",  # spaces are separate tokens, so that the two tokenizers split text at different positions
)
HYBRID = Recipe(
    name="hybrid",
    vocab_size=4096,
    shape=Shape(hidden_size=192, intermediate_size=512, layers=12, heads=3, kv_heads=1),
    phases=(Phase(1700, 16, 256), Phase(220, 8, 512), Phase(80, 4, 1024)),
    warmup=0.039,
    cooldown=0.4,
    tokenizer="target",
    full_attention_interval=4,
)
RECIPES = {recipe.name: recipe for recipe in (TARGET, DRAFT, OTHER_DRAFT, HYBRID)}
