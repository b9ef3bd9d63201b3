"""The settings and results of `assisted doctor`: examine.py measures them, findings.py puts them into words."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...distribution import require_temperature
from ..bench.statistics import Interval
from .forecast import Expected, Spent
from .passes import Comparison, Memory, PassTimes


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
    """A short measured run of whole calls, in turns with plain `generate`."""

    way: str  # "draft length 4", "adaptive"
    speedup: Interval  # measured, over the fastest plain mode
    predicted: float | None  # for exactly these calls, prompts included; None for an adaptive length
    same: int | None  # number of texts equal to the baseline's, out of `texts`; None when sampled
    texts: int
    spent: Spent | None = None  # after the prompts, as measured
    foretold: Spent | None = None  # the same as predicted


@dataclass(frozen=True)
class Diagnosis:
    """One draft. What would help: the highest expected speedup if drafting took half the time, and so on."""

    draft: str
    error: str | None = None  # why it could not be used; everything else is then empty
    warned: str | None = None
    proposed: float = 0.0  # share of the rounds in which it proposed anything
    acceptance_by_position: tuple[float, ...] = ()  # given that the tokens before were accepted
    draft_seconds: float = 0.0  # of a drafted token, or of a whole draft if `blocks`
    pass_seconds: float = 0.0  # of a round without a draft
    blocks: bool = False  # it proposes all tokens at once, in the same time for every length
    tree_columns: float | None = None  # drafted tokens that a pass verifies at the best length; None for chains
    translated: bool = False  # its tokenizer differs from the target's
    comparison: Comparison | None = None  # with the target; None if it is no model with the same vocabulary
    expected: tuple[Expected, ...] = ()  # by draft length; the first, 0, is this package without drafts
    best: int = 0  # the draft length of at least 1 with the highest expected speedup
    if_twice_as_fast: float = 0.0
    if_columns_cost_half: float = 0.0  # further tokens in a pass
    if_half_as_wrong: float = 0.0
    checks: tuple[Check, ...] = ()

    @property
    def speedup(self) -> Interval:
        """The expected speedup at the best length."""
        return self.expected[self.best].speedup


@dataclass(frozen=True)
class Examination:
    """Everything that was measured."""

    target: str
    way: str | None  # how its calls run, and why without shortcuts: "own forward: ..."; None if with them
    machine: dict[str, Any]  # processor, device, dtype, threads, versions
    parameters: int
    text: str  # the source of the prompts
    prompts: int  # decoded with each draft, at most
    checked: int  # decoded by the baseline
    prompt_tokens: int  # median length of a prompt
    new_tokens: int
    temperature: float
    passes: tuple[PassTimes, ...]
    memory: Memory
    plain_way: str  # the fastest plain mode
    plain_seconds: float  # its time per token, without the prompt
    undrafted: Interval | None  # speed of this package without drafts, relative to that; None if no draft was measured
    repeated_4grams: float  # share of the generated 4-grams that occurred before in their text
    drafts: tuple[Diagnosis, ...]
    lacking: tuple[str, ...] = ()  # names that the installed versions of other packages lack, with what each costs

    def to_dict(self) -> dict[str, Any]:
        """All fields and the share of the memory's speed, for JSON."""
        return {**asdict(self), "memory": {**asdict(self.memory), "share": self.memory.share}}
