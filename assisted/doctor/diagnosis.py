"""What `assisted doctor` looks at, and what it found: numbers alone.

How they are measured is doctor.py, how they are put into words findings.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..bench.statistics import Interval
from .comparison import Comparison
from .forecast import Expected
from .passes import Memory, PassTimes

__all__ = ["Check", "Diagnosis", "Examination", "Settings"]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        prompts: how many, at most.
        new_tokens: of each. Small models loop at temperature 0 after some 50 tokens, and loops flatter every draft.
        longest: draft length of the recorded runs, and the longest that is considered.
        temperature: 0 is greedy.
        contexts: tokens before the passes that are timed; None takes that of the prompts, and more as far as the target's
            context goes.
        seconds: for everything, about; where the target is slow, fewer prompts are decoded.
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
        if self.temperature < 0:
            raise ValueError(f"temperature: {self.temperature} is not possible; give 0 or more")
        if not self.seconds > 0:
            raise ValueError(f"seconds: {self.seconds} is no time; give more than 0")
        for context in self.contexts or ():
            if context < 1:
                raise ValueError(f"contexts: {context} tokens are no context; give 1 or more")


@dataclass(frozen=True)
class Check:
    """A short measured run, in turns with plain `generate`, whole calls.

    Args:
        way: "draft length 4", "adaptive".
        speedup: measured, over the fastest plain mode.
        predicted: for these very calls, the reading of the prompts included; None for what is not predicted.
        same: texts that are plain decoding's, of `texts`; None when sampled.
        texts: that were written.
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
        draft: as it was named.
        error: why it was refused; everything else is then empty.
        warned: what it warned of while drafting.
        proposed: share of the rounds in which it proposed anything.
        acceptance_by_position: of the tokens drafted first, second, ..., those before them having been accepted.
        draft_seconds, pass_seconds: of a drafted token, or of a whole draft where `blocks`; and of a round without a draft.
        blocks: it proposes all at once, in the same time whatever the length.
        tree_columns: tokens that a pass checks at the best length, the mean; None for chains.
        translated: it has another tokenizer than the target.
        comparison: its distribution against the target's; None where no model of the same vocabulary drafts.
        expected: by draft length, 0 first: what this package takes without drafts.
        best: the draft length of at least 1 with the highest expected speedup.
        if_twice_as_fast, if_columns_cost_half, if_half_as_wrong: the highest expected speedup if the draft took half as
            long, if further columns of a pass cost half as much, if it were wrong half as often.
        checks: measured.
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
        """Expected at the best length."""
        return self.expected[self.best].speedup


@dataclass(frozen=True)
class Examination:
    """Everything that was measured.

    Args:
        target: as it was named.
        note: what to know of figures with this target, None for nothing.
        machine: processor, device, dtype, threads, versions.
        parameters: of the target.
        text: where prompts come from.
        prompts: decoded with each draft, at most; `checked` of them plainly as well.
        prompt_tokens: of a prompt, the median.
        new_tokens: of each.
        temperature: of the decoding.
        passes: seconds of passes, by context.
        memory: a pass against the memory's speed.
        plain_way: the fastest plain mode.
        plain_seconds: of a token that it decodes, without the prompt.
        undrafted: speed of this package without drafts, over that; None where no draft was measured.
        repeated_4grams: share of the 4-grams written that occurred before in their text: loops flatter every draft.
        drafts: a diagnosis each.
    """

    target: str
    note: str | None
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

    def to_dict(self) -> dict[str, Any]:
        """All fields and the share of the memory's speed, ready for json."""
        return {**asdict(self), "memory": {**asdict(self.memory), "share": self.memory.share}}
