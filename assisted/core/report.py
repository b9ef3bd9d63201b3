"""Counts and times of `generate`, and how they are shown.

`Recorder` collects them in the loop, round by round. A caller reads the `Report` afterwards.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .drafts import Round
from .host import now

__all__ = ["Recorder", "Report"]

_WAYS = {
    "shortcuts": "with shortcuts",
    "own forward": "the target ran through its own forward",
    "plain": "decoded without drafts",
}


@dataclass(frozen=True, repr=False)
class Report:
    """Counts and times of one `generate`, or of several in `model.totals`. Tokens are counted over all rows of a batch.

    Args:
        new_tokens: generated tokens, with end tokens, without padding.
        target_passes: the target's forward passes after the prompt, each times its unfinished rows. The autoregressive
            baseline needs one for each token.
        drafted: proposed tokens.
        accepted: proposed tokens that became output.
        acceptance_by_position: share of the first, second, ... tokens of a draft that were accepted, out of the drafts that
            had one; in a token tree, of any node at that depth.
        seconds: time of the whole call.
        draft_seconds: time spent drafting, with what drafters learn from the outcome.
        verify_seconds: time spent in the target's forward passes, prompt included; 0 for a call with `assisted=False`, where
            they are not timed separately.
        prompt_seconds: the part of that for the prompt.
        once_seconds: one-time work, which later calls like this one do not repeat: compiling, copies of weights and their
            comparison, captures.
        cached_tokens: columns of the prompt that an earlier call or another row had read and that were not read again.
        shared_tokens: the part of these that another row of the batch had read.
        plain_seconds_per_token: mean time of the target's forward passes over one token; None if every pass had a draft, or
            none was timed.
        predicted_speedup: committed tokens per second relative to the same loop without drafts, from the costs that the draft
            length policy measured; None if it measures none, and in the totals.
        assisted_share: share of the tokens that come from rounds with drafting enabled, in [0, 1]; trial drafts count.
        row_tokens: generated tokens of each row.
        state_bytes: that the target's recurrent states took, with copies of them and with what is kept of a forward pass; 0
            without such states.
        way: how the last call ran: "shortcuts", with everything that `fast` allows; "own forward", where every forward pass of
            the target is the one that transformers or somebody else wrote; or "plain", without drafts.
        because: why it did not take the shortcuts; None if it could.
        passes: what the target's forward passes after the last call's prompt ran as, where they could: "eager", "packed
            products", "fused layers", "layers in C", "compiled passes" or "CUDA graphs". None for plain
            calls and `generate_many`.
        draft: what drafted in the last call, if the call named it (`assistant_model`, `prompt_lookup_num_tokens`); None for the
            pair's own draft.
        warnings: what failed and cost only speed: a draft, a capture, a faster form of a model whose output differed, kernels
            in C that are not here. Those that cost the drafts were also given as Python warnings, and so were the kernels once.
    """

    new_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_by_position: tuple[float, ...] = ()
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prompt_seconds: float = 0.0
    once_seconds: float = 0.0
    cached_tokens: int = 0
    shared_tokens: int = 0
    plain_seconds_per_token: float | None = None
    predicted_speedup: float | None = None
    assisted_share: float = 0.0
    row_tokens: tuple[int, ...] = ()
    state_bytes: int = 0
    way: str = "shortcuts"
    because: str | None = None
    passes: str | None = None
    draft: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per forward pass of the target over a row, with the target's own (bonus) token of each pass.

        The first token comes from the pass over the prompt and is not counted.
        """
        return (self.new_tokens - len(self.row_tokens)) / self.target_passes if self.target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def other_seconds(self) -> float:
        """The rest of `seconds`: what transformers prepares for a call, processors and criteria, streamers, Python."""
        return max(0.0, self.seconds - self.draft_seconds - self.verify_seconds - self.once_seconds)

    def to_dict(self) -> dict[str, Any]:
        """All fields and the two ratios, for JSON."""
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
            parts = {
                "reading the prompt": self.prompt_seconds,
                "drafting": self.draft_seconds,
                "verifying": self.verify_seconds - self.prompt_seconds,
                "one-time work": self.once_seconds,
                "other": self.other_seconds,
            }
            lines.append("time: " + ", ".join(f"{took:.2f} s {name}" for name, took in parts.items()))
        if self.cached_tokens:
            shared = f", {self.shared_tokens} of them by another row" if self.shared_tokens else ""
            lines.append(f"{self.cached_tokens} tokens of the prompt were known and not read again{shared}")
        if self.predicted_speedup is not None:
            lines.append(f"predicted speedup over no draft {self.predicted_speedup:.2f}")
        if self.assisted_share < 1:
            lines.append(f"{self.assisted_share:.0%} of the tokens were generated with drafting enabled")
        if self.draft is not None:
            lines.append(f"drafted by: {self.draft}")
        if self.because is not None:
            lines.append(f"{_WAYS[self.way]}: {self.because}")
        lines += [f"warning: {reason}" for reason in self.warnings]
        return "\n".join(lines)

    __repr__ = __str__  # the text, where a notebook or a console shows the value

    def _repr_html_(self) -> str:
        """The lines as a table, for notebooks."""
        rows = (line.partition(": ") if ": " in line else ("", "", line) for line in html.escape(str(self)).split("\n"))
        cells = "".join(f"<tr><th>{name}</th><td style='text-align: left'>{said}</td></tr>" for name, _, said in rows)
        return f"<table>{cells}</table>"

    def _rate(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


_ADDED = (
    *("seconds", "draft_seconds", "verify_seconds", "prompt_seconds", "once_seconds", "plain_seconds"),
    *("cached_tokens", "shared_tokens", "tokens"),
    *("plain_tokens", "assisted_tokens", "target_passes", "drafted", "accepted"),
)


@dataclass
class Recorder:
    """Counts during a `generate`; `add` merges another one for totals.

    watch: called with every round, to draw or measure it.
    warnings: as in `CallSettings`, which adds to the same list.
    started: when the call began, by the clock; None once it is over.
    """

    watch: Callable[[Round], None] | None = None
    started: float | None = None
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    prompt_seconds: float = 0.0
    once_seconds: float = 0.0
    cached_tokens: int = 0
    shared_tokens: int = 0
    plain_seconds: float = 0.0
    tokens: int = 0
    plain_tokens: int = 0
    assisted_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted_speedup: float | None = None
    row_tokens: list[int] = field(default_factory=list)
    ended_rows: list[int] = field(default_factory=list)  # tokens of the rows of the call's earlier texts
    state_bytes: int = 0
    way: str = "shortcuts"
    because: str | None = None
    passes: str | None = None
    draft: str | None = None
    warnings: list[str] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def ran(self, way: str, because: str | None) -> None:
        """Record how the call runs; see `Report`."""
        self.way, self.because = way, because

    def follow(self, row_tokens: list[int], warnings: list[str]) -> None:
        """Begin another text of the call, a segment of speech for example. The lists grow, and a running call reports them."""
        self.ended_rows += self.row_tokens
        self.row_tokens, self.warnings = row_tokens, warnings

    def read_prompt(self, seconds: float) -> None:
        """Record the forward pass over a prompt."""
        self.verify_seconds += seconds
        self.prompt_seconds += seconds

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

    def count_plain(self, output: Any, prompt_length: int) -> None:
        """Count a run without drafts: one forward pass per token, where the first token comes from the pass over the prompt."""
        sequences = output["sequences"] if isinstance(output, Mapping) else output
        rows, new = sequences.shape[0], sequences.shape[1] - prompt_length
        self.row_tokens = [new] * rows
        self.target_passes = rows * (new - 1)

    def stop(self) -> None:
        """End the call."""
        if self.started is not None:
            self.seconds, self.started = now() - self.started, None

    def add(self, other: Recorder) -> None:
        """Merge the counts of another call."""
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.row_tokens += other.ended_rows + other.row_tokens
        self.state_bytes = max(self.state_bytes, other.state_bytes)
        self.way, self.because, self.passes, self.draft = other.way, other.because, other.passes, other.draft
        self.warnings += [reason for reason in other.warnings if reason not in self.warnings]
        for mine, theirs in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            mine[: len(theirs)] = [a + b for a, b in zip(mine, theirs, strict=False)]

    def report(self) -> Report:
        """The counts and times so far, also for another thread than the one that counts."""
        accepted_at, drafted_at = list(self.accepted_at), list(self.drafted_at)
        accepted_at += [0] * (len(drafted_at) - len(accepted_at))
        same = {name: value for name, value in vars(self).items() if name in Report.__dataclass_fields__}
        computed = {
            "new_tokens": sum(self.ended_rows + self.row_tokens),
            "acceptance_by_position": tuple(a / d for a, d in zip(accepted_at, drafted_at, strict=False) if d),
            "seconds": self.seconds if self.started is None else now() - self.started,
            "plain_seconds_per_token": self.plain_seconds / self.plain_tokens if self.plain_tokens else None,
            "assisted_share": self.assisted_tokens / self.tokens if self.tokens else 0.0,
            "row_tokens": tuple(self.ended_rows + self.row_tokens),
            "warnings": tuple(self.warnings),
        }
        return Report(**same | computed)


def _count(at: list[int], rows: Iterable[int]) -> None:
    """Add one at positions 0 .. k-1 for each k in rows."""
    for k in rows:
        at += [0] * (k - len(at))
        for position in range(k):
            at[position] += 1
