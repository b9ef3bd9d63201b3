"""What a `generate` did, and how it is shown.

Knows counts and seconds. `Recorder` collects during the loop, round by round; `Report` is what a caller reads afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .drafts import Round

__all__ = ["Recorder", "Report"]


@dataclass(frozen=True)
class Report:
    """What one `generate` (or, in `model.totals`, several) did. Tokens are counted over all rows of a batch.

    Args:
        new_tokens: tokens generated, end tokens included, padding not.
        target_passes: forwards of the target after the prompt was read, times the rows that were still unfinished:
            what plain decoding would need one of for each token.
        drafted: tokens proposed.
        accepted: proposed tokens that became output.
        acceptance_by_position: how often the draft was right about the first, the second, ... token of its round, of the
            times when it had one there; of a token tree, with any node of that depth.
        seconds: the whole call.
        draft_seconds: spent drafting.
        verify_seconds: spent in the target's forwards, prompt included; 0 for a call with `assisted=False`, whose passes are
            not timed apart.
        plain_seconds_per_token: of the target's passes over one token; None when every pass had a draft, or none was timed.
        predicted_speedup: committed tokens a second against plain decoding, by the costs that the draft length policy
            measured; None when it measures none, and in the totals.
        assisted_share: tokens of the rounds that asked for a draft, in [0, 1]; a try while drafting is off counts.
        row_tokens: tokens generated in each row.
    """

    new_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_by_position: tuple[float, ...] = ()
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds_per_token: float | None = None
    predicted_speedup: float | None = None
    assisted_share: float = 0.0
    row_tokens: tuple[int, ...] = ()

    @property
    def tokens_per_pass(self) -> float:
        """New tokens for each pass of the target over a row, the target's own token of each pass (bonus) included.

        The first token comes with the reading of the prompt and is not counted.
        """
        return (self.new_tokens - len(self.row_tokens)) / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and the two ratios, ready for json."""
        return {**asdict(self), "tokens_per_pass": self.tokens_per_pass, "acceptance_rate": self.acceptance_rate}

    def __str__(self) -> str:
        lines = [
            f"{self.new_tokens} new tokens in {self.seconds:.2f} s ({self._rate():.1f} tokens/s)",
            f"{self.target_passes} target passes, {self.tokens_per_pass:.2f} tokens per pass",
            f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.acceptance_rate:.0%})",
        ]
        if self.acceptance_by_position:
            lines.append("by position: " + " ".join(f"{share:.0%}" for share in self.acceptance_by_position))
        if self.verify_seconds:
            lines.append(f"time: {self.draft_seconds:.2f} s drafting, {self.verify_seconds:.2f} s verifying")
        if self.predicted_speedup is not None:
            lines.append(f"predicted speedup {self.predicted_speedup:.2f}")
        if self.assisted_share < 1:
            lines.append(f"{self.assisted_share:.0%} of the tokens were produced while drafting was on")
        return "\n".join(lines)

    def _rate(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass
class Recorder:
    """Counts during a `generate`; `add` merges another one for totals.

    watch: is shown every round, for those who draw or measure.
    """

    watch: Callable[[Round], None] | None = None
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: float = 0.0
    tokens: int = 0
    plain_tokens: int = 0
    assisted_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted_speedup: float | None = None
    row_tokens: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def see(self, round: Round) -> None:
        """Count a round."""
        rows = round.unfinished
        kept = sum(round.kept[row] for row in rows)
        drafted = sum(round.drafted[row] for row in rows)
        self.target_passes += len(rows)
        self.draft_seconds += round.draft_seconds
        self.verify_seconds += round.verify_seconds
        self.drafted += drafted
        self.accepted += sum(round.accepted[row] for row in rows)
        _count(self.drafted_at, (round.depths[row] for row in rows))
        _count(self.accepted_at, (round.accepted[row] for row in rows))
        self.tokens += kept
        if round.asked:
            self.assisted_tokens += kept
        if drafted == 0:
            self.plain_tokens += kept
            self.plain_seconds += round.verify_seconds
        if self.watch is not None:
            self.watch(round)

    def add(self, other: Recorder) -> None:
        """Merge the counts of another call."""
        for name in ("seconds", "draft_seconds", "verify_seconds", "plain_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("tokens", "plain_tokens", "assisted_tokens", "target_passes", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.row_tokens += other.row_tokens
        for mine, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]

    def report(self) -> Report:
        """The figures so far."""
        accepted_at = self.accepted_at + [0] * (len(self.drafted_at) - len(self.accepted_at))
        return Report(
            new_tokens=sum(self.row_tokens),
            target_passes=self.target_passes,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_by_position=tuple(a / d for a, d in zip(accepted_at, self.drafted_at, strict=True)),
            seconds=self.seconds,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            plain_seconds_per_token=self.plain_seconds / self.plain_tokens if self.plain_tokens else None,
            predicted_speedup=self.predicted_speedup,
            assisted_share=self.assisted_tokens / self.tokens if self.tokens else 0.0,
            row_tokens=tuple(self.row_tokens),
        )


def _count(at: list[int], rows: Iterable[int]) -> None:
    """Add one at positions 0 .. k-1 for each k in rows."""
    for k in rows:
        at += [0] * (k - len(at))
        for position in range(k):
            at[position] += 1
