"""When to stop drafting. A policy is what the caller writes down; a `Length` is its memory during one `generate`.

Knows numbers and confidences, nothing of models. To stay exact under sampling a policy decides from the draft's law
before a token is drawn from it, never from the token (non-anticipation): `Length.go_on` is called in that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from .drafts import Round

__all__ = ["AdaEDL", "Confidence", "Costs", "DraftLength", "Fixed", "Heuristic", "Length", "resolve"]


@dataclass(frozen=True)
class Costs:
    """What passes take on a machine, in seconds.

    Args:
        verify: pairs (columns, seconds of a pass of the target over so many tokens of each row), columns ascending.
        draft: seconds of a forward of the draft, on average; of a drafter that proposes a block at once, of a block.
    """

    verify: tuple[tuple[int, float], ...]
    draft: float

    def __post_init__(self) -> None:
        pairs = tuple((int(columns), float(seconds)) for columns, seconds in self.verify)
        columns = [pair[0] for pair in pairs]
        if not pairs or columns[0] < 1 or sorted(set(columns)) != columns or min(s for _, s in pairs) <= 0:
            raise ValueError(
                f"verify: {self.verify!r} are no costs; give pairs of columns (ascending, from 1) and seconds"
            )
        if not self.draft >= 0:
            raise ValueError(f"draft: {self.draft} is no cost; give the seconds of a forward of the draft")
        object.__setattr__(self, "verify", pairs)


class Length:
    """A policy at work during one `generate`. What it does not override, it does not care about. All that it is told comes as
    arguments: nobody sets its attributes."""

    needs_law = False
    """Whether `go_on` looks at the law; a policy that does not spares the draft a softmax and a synchronisation."""

    predicted_speedup: float | None = None
    """Against plain decoding, for the draft lengths it chooses; None where nothing is predicted."""

    costs: Costs | None = None
    """What was measured of the two models, where a policy does; None before."""

    def leave_size(self) -> None:
        """The drafter weighs by `costs` how much of the budget pays: the policy is to say only how deep it may go, and whether.
        Called before the first round, by drafters that do."""

    def budget(self, unfinished: Sequence[int]) -> int:
        """The most tokens to draft this round; 0 decodes one token plainly. Called once, at the start of every round.

        unfinished: the rows of the batch that still grow.
        """
        raise NotImplementedError

    def another(self, position: int) -> bool:
        """Whether to run the draft for one more token, at `position` (0-based, at least 1). Asked before its forward."""
        return True

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        """Which rows propose a token at `position` (0-based). Asked before it is drawn from q, and only if `needs_law`.

        q: [B, V] float32, the draft's law there. drawn: the token is drawn from q and accepted as often as q overlaps with
        the target's law: also where neither is sure of a token, these may be nearly the same. Otherwise it is the likeliest
        one of each row. Returns [B] bool, on q's device or, where it was decided there, on the host. Rows that said no once
        are not asked again.
        """
        return q.new_ones(len(q), dtype=torch.bool)

    def observe(self, round: Round) -> None:
        """What became of the round; called after every one, those without a draft included."""

    def end(self) -> None:
        """The call is over. What was measured is kept for later ones; whatever else belongs to the call is let go here."""


class DraftLength(Protocol):
    """What a caller passes as `draft_length`: immutable, shared between calls."""

    def start(self, earlier: Length | None = None) -> Length:
        """The policy's memory for one `generate`. earlier: the one of the model's last call with this policy, if any."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always draft the same number of tokens.

    Args:
        tokens: draft length, at least 1.
    """

    tokens: int = 4

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(
                f"draft_length: {self.tokens} is not possible; draft at least 1 token, or pass assisted=False"
            )

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Fixed(self)


@dataclass(frozen=True)
class Confidence:
    """Draft until the draft model is unsure: the rule of transformers' `assistant_confidence_threshold`.

    Args:
        threshold: stop before a token whose law has no probability above this; in [0, 1]. Higher pays where the draft is
            slow against the target.
        maximum: the most tokens of a round, at least 1.
    """

    threshold: float = 0.4
    maximum: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold: {self.threshold} is no probability; give a number in [0, 1]")
        if self.maximum < 1:
            raise ValueError(f"maximum: {self.maximum} is not possible; draft at least 1 token")

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Confidence(self)


@dataclass(frozen=True)
class Heuristic:
    """Two tokens more after a draft that was accepted as a whole, one less after any other: the schedule of transformers'
    `num_assistant_tokens_schedule="heuristic"`. A batch counts as accepted where every row's draft was.

    Args:
        start_tokens: draft length of the first round, at least 1.
        maximum: the most tokens of a round, at least `start_tokens`.
    """

    start_tokens: int = 5
    maximum: int = 20

    def __post_init__(self) -> None:
        if self.start_tokens < 1:
            raise ValueError(f"start_tokens: {self.start_tokens} is not possible; draft at least 1 token")
        if self.maximum < self.start_tokens:
            raise ValueError(f"maximum: {self.maximum} is less than start_tokens, {self.start_tokens}")

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _Heuristic(self, earlier)


@dataclass(frozen=True)
class AdaEDL:
    """Draft while a lower bound on the acceptance, from the entropy of the draft's law, stays above a threshold. 2410.18351.

    Stop before a token if 1 - sqrt(gamma * H(q)) < threshold, H in nats. After every round the threshold moves by `step`,
    smoothed: up while fewer than `acceptance` of the drafted tokens are accepted, down otherwise.

    Args:
        gamma: how fast the bound falls with the entropy; above 0. The paper's value.
        threshold: at the start, in [0, 1].
        acceptance: acceptance rate to aim at, in [0, 1]. Higher drafts less.
        step: how far a round moves the threshold, before smoothing.
        acceptance_memory, threshold_memory: weight of the past in the two moving averages, in [0, 1).
        maximum: the most tokens of a round, at least 1.
    """

    gamma: float = 0.2
    threshold: float = 0.5
    acceptance: float = 0.9
    step: float = 0.01
    acceptance_memory: float = 0.5
    threshold_memory: float = 0.9
    maximum: int = 16

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"gamma: {self.gamma} is not possible; give a number above 0")
        for name in ("threshold", "acceptance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is no probability; give a number in [0, 1]")
        for name in ("acceptance_memory", "threshold_memory"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is no weight; give a number in [0, 1)")
        if self.maximum < 1:
            raise ValueError(f"maximum: {self.maximum} is not possible; draft at least 1 token")

    def start(self, earlier: Length | None = None) -> Length:
        """The policy at work: see `DraftLength.start`."""
        return _AdaEDL(self, earlier)


class _Fixed(Length):
    def __init__(self, policy: Fixed):
        self.policy = policy

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.policy.tokens


class _Confidence(Length):
    needs_law = True

    def __init__(self, policy: Confidence):
        self.policy = policy

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.policy.maximum

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        if position == 0:  # one token is always proposed
            return super().go_on(position, q)
        return q.amax(-1) >= self.policy.threshold


class _Heuristic(Length):
    def __init__(self, policy: Heuristic, earlier: Length | None):
        self.policy = policy
        self.tokens: int = earlier.tokens if isinstance(earlier, _Heuristic) else policy.start_tokens

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.tokens

    def observe(self, round: Round) -> None:
        rows = round.unfinished
        if not any(round.drafted[row] for row in rows):
            return
        full = all(round.accepted[row] == round.depths[row] for row in rows)
        self.tokens = min(self.tokens + 2, self.policy.maximum) if full else max(1, self.tokens - 1)


class _AdaEDL(Length):
    needs_law = True

    def __init__(self, policy: AdaEDL, earlier: Length | None):
        self.policy = policy
        known = isinstance(earlier, _AdaEDL)
        self.threshold: float = earlier.threshold if known else policy.threshold  # type: ignore[union-attr]
        self.acceptance: float | None = earlier.acceptance if known else None  # type: ignore[union-attr]

    def budget(self, unfinished: Sequence[int]) -> int:
        return self.policy.maximum

    def go_on(self, position: int, q: torch.Tensor, drawn: bool = False) -> torch.Tensor:
        if position == 0:  # one token is always proposed
            return super().go_on(position, q)
        entropy = torch.special.entr(q).sum(-1)
        return 1 - (self.policy.gamma * entropy).sqrt() >= self.threshold

    def observe(self, round: Round) -> None:
        drafted = round.mean(round.depths)
        if drafted == 0:
            return
        policy = self.policy
        rate = round.mean(round.accepted) / drafted
        past = rate if self.acceptance is None else self.acceptance
        self.acceptance = policy.acceptance_memory * past + (1 - policy.acceptance_memory) * rate
        step = policy.step if self.acceptance < policy.acceptance else -policy.step
        moved = self.threshold + (1 - policy.threshold_memory) * step
        self.threshold = min(1.0, max(0.0, moved))


def policies() -> dict[str, type]:
    """The package's policies by name: what `draft_length` may be as a string, and what config.json holds."""
    from .controller import Adaptive  # it builds on this module

    return {"adaptive": Adaptive, "fixed": Fixed, "confidence": Confidence, "heuristic": Heuristic, "adaedl": AdaEDL}


def resolve(draft_length: int | str | DraftLength | None) -> DraftLength:
    """The policy behind what a caller may write: an int, a name of `policies`, a policy object; None is "adaptive".

    Raises ValueError for anything else.
    """
    if draft_length is None:
        draft_length = "adaptive"
    if isinstance(draft_length, int) and not isinstance(draft_length, bool):
        return Fixed(draft_length)
    if isinstance(draft_length, str):
        if draft_length in policies() and draft_length != "fixed":
            return policies()[draft_length]()
    elif hasattr(draft_length, "start"):
        return draft_length
    names = ", ".join(f'"{name}"' for name in policies() if name != "fixed")
    raise ValueError(
        f"draft_length: {draft_length!r} is not known; give a number of tokens, one of {names}, or a policy such as "
        "assisted.lengths.Confidence(threshold=0.4)"
    )


def to_dict(policy: DraftLength) -> dict[str, Any] | None:
    """A policy as plain values for config.json; None for one that this package does not know."""
    for name, kind in policies().items():
        if type(policy) is kind:
            return {"policy": name, **asdict(policy)}  # type: ignore[call-overload]
    return None


def from_dict(fields: dict[str, Any] | None) -> DraftLength:
    """The policy that `to_dict` wrote; the default for None. Raises ValueError for an unknown name or field."""
    if fields is None:
        return resolve(None)
    if not isinstance(fields, dict):
        raise ValueError(f"draft_length: the saved policy should be an object, and is {fields!r}")
    values = dict(fields)
    name = values.pop("policy", None)
    if name not in policies():
        raise ValueError(f"draft_length: this version does not know the saved policy {name!r}; pass draft_length=")
    try:
        return policies()[name](**values)
    except TypeError as error:
        raise ValueError(f"draft_length: the saved policy {name!r} cannot be made of {values}: {error}") from error
