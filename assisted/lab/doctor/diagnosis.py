"""The settings and results of `assisted doctor`: examine.py measures them, findings.py puts them into words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...distribution import require_temperature
from ..bench.statistics import Interval
from .comparison import Comparison
from .forecast import Expected
from .passes import Memory, PassTimes


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        prompts: number of prompts, at most.
        new_tokens: per prompt. Small models loop at temperature 0 after some 50 tokens, and loops make every draft look better.
        longest: draft length of the recorded runs, and the longest that is considered.
        temperature: 0 is greedy.
        contexts: context lengths at which forward passes are timed; None takes that of the prompts, and longer ones that fit
            into the target's context.
        seconds: for everything, about; with a slow target, fewer prompts are decoded.
    """

    prompts: int = 8
    new_tokens: int = 48
    longest: int = 15
    temperature: float = 0.0
    contexts: tuple[int, ...] | None = None
    seconds: float = 90.0

    def __post_init__(self) -> None:
        for name, least in (("prompts", 1), ("new_tokens", 8), ("longest", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is too few to measure; give {least} or more")
        require_temperature(self.temperature)
        if not self.seconds > 0:
            raise ValueError(f"seconds: {self.seconds} is not possible; give more than 0")
        for context in self.contexts or ():
            if context < 1:
                raise ValueError(f"contexts: {context} tokens are too few; give 1 or more")


@dataclass(frozen=True)
class Check:
    """A short measured run of whole calls, in turns with plain `generate`.

    Args:
        way: "draft length 4", "adaptive".
        speedup: measured, over the fastest plain mode.
        predicted: for exactly these calls, prompts included; None for an adaptive length.
        same: number of texts equal to the baseline's, out of `texts`; None when sampled.
        texts: number of generated texts.
    """

    way: str
    speedup: Interval
    predicted: float | None
    same: int | None
    texts: int


@dataclass(frozen=True)
class Diagnosis:
    """One draft.

    Args:
        error: why it could not be used; everything else is then empty.
        proposed: share of the rounds in which it proposed anything.
        acceptance_by_position: of the first, second, ... drafted token, given that those before it were accepted.
        draft_seconds: of a drafted token, or of a whole draft if `blocks`.
        pass_seconds: of a round without a draft.
        blocks: it proposes all tokens at once, in the same time for every length.
        tree_columns: mean number of drafted tokens that a pass verifies at the best length; None for chains.
        translated: its tokenizer differs from the target's.
        comparison: with the target's distribution; None if the draft is not a model with the same vocabulary.
        expected: by draft length; the first, 0, is this package without drafts.
        best: the draft length of at least 1 with the highest expected speedup.
        if_twice_as_fast, if_columns_cost_half, if_half_as_wrong: the highest expected speedup if drafting took half the
            time, if further tokens in a pass cost half, if the draft were wrong half as often.
        checks: measured runs.
    """

    draft: str
    error: str | None = None
    warned: str | None = None
    proposed: float = 0.0
    acceptance_by_position: tuple[float, ...] = ()
    draft_seconds: float = 0.0
    pass_seconds: float = 0.0
    blocks: bool = False
    tree_columns: float | None = None
    translated: bool = False
    comparison: Comparison | None = None
    expected: tuple[Expected, ...] = ()
    best: int = 0
    if_twice_as_fast: float = 0.0
    if_columns_cost_half: float = 0.0
    if_half_as_wrong: float = 0.0
    checks: tuple[Check, ...] = ()

    @property
    def speedup(self) -> Interval:
        """The expected speedup at the best length."""
        return self.expected[self.best].speedup


@dataclass(frozen=True)
class Examination:
    """Everything that was measured.

    Args:
        way: how its calls run, as in `Report`, and why they take no shortcuts: "own forward: ..."; None if they do.
        machine: processor, device, dtype, threads, versions.
        text: the source of the prompts.
        prompts, checked: numbers of prompts decoded with each draft, at most, and by the baseline.
        prompt_tokens: median length of a prompt.
        plain_way, plain_seconds: the fastest plain mode, and its time per token, without the prompt.
        undrafted: speed of this package without drafts, relative to that; None if no draft was measured.
        repeated_4grams: share of the generated 4-grams that occurred before in their text: loops make every draft look better.
        lacking: names that the installed versions of other packages lack, with what each costs.
    """

    target: str
    way: str | None
    machine: dict[str, Any]
    parameters: int
    text: str
    prompts: int
    checked: int
    prompt_tokens: int
    new_tokens: int
    temperature: float
    passes: tuple[PassTimes, ...]
    memory: Memory
    plain_way: str
    plain_seconds: float
    undrafted: Interval | None
    repeated_4grams: float
    drafts: tuple[Diagnosis, ...]
    lacking: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields and the share of the memory's speed, for JSON."""
        return {**asdict(self), "memory": {**asdict(self.memory), "share": self.memory.share}}
