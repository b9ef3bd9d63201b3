"""The results: a row for each method, a point for each batch size and context, all of it as JSON."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from ...core.host import processor
from .prompts import Batch
from .protocol import Measured, Rules
from .statistics import Interval, repeated_share, speedup


@dataclass(frozen=True)
class Row:
    """One method at one point.

    Args:
        name, family, setting: of the method.
        error: why it failed; all figures are then None.
        warned: its warning, such as that a drafter gave up.
        speedup: over the fastest plain mode, for all prompts.
        by_category: the same by category.
        by_drafting: over this package without a draft, for all prompts: what drafting adds; only for this package's drafters.
        milliseconds_per_token: the median over repeats, over the new tokens of all rows.
        tokens_per_pass: new tokens divided by the target's forward passes over a row. The target's own token of each pass (the
            bonus) and the passes over the prompts count. 1 for the baseline.
        drafted_per_pass: tokens that a forward pass checks, on average.
        acceptance_rate: share of the drafted tokens that were accepted; None where nothing was drafted.
        acceptance_by_position: of the tokens drafted first, second, ...; only for this package's drafters.
        same: rows, out of `rows`, whose tokens are those of plain `generate`; None when sampled.
        largest_gap: at the first differences of the other rows, how far the worse of the two tokens is behind the best, in
            standard deviations of the target's logits: the largest. None where nothing differs or was compared.
        rows: how many were written.
        repeated_4grams: share of the written 4-grams that occurred before in the same row.
        draft, verify: share of the time for drafting, and for the target's forward passes; only for this package's drafters.
        first_token_milliseconds: until the first token came, median over batches.
        later_token_milliseconds: for each of the other tokens of these calls, median over batches.
        draft_bytes: of weights besides the target's.
        working_bytes_over_plain: what a call allocates beyond plain's and beyond `draft_bytes`; None where not measured.
        seconds: [R, N] of R repeats over N batches. All times above can be computed from them.
    """

    name: str
    family: str
    setting: dict[str, Any]
    error: str | None = None
    warned: str | None = None
    speedup: Interval | None = None
    by_category: dict[str, Interval] | None = None
    by_drafting: Interval | None = None
    milliseconds_per_token: float | None = None
    tokens_per_pass: float | None = None
    drafted_per_pass: float | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: tuple[float, ...] = ()
    same: int | None = None
    largest_gap: float | None = None
    rows: int = 0
    repeated_4grams: float | None = None
    draft: float | None = None
    verify: float | None = None
    first_token_milliseconds: float | None = None
    later_token_milliseconds: float | None = None
    draft_bytes: int = 0
    working_bytes_over_plain: int | None = None
    seconds: tuple[tuple[float, ...], ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the time, for drafting, for the target's forward passes and for the rest; empty where they are not known."""
        if self.draft is None or self.verify is None:
            return ()
        return self.draft, self.verify, max(0.0, 1 - self.draft - self.verify)


@dataclass(frozen=True)
class Point:
    """A race at one batch size and one length of context.

    Args:
        batch: rows decoded together.
        context: tokens of every prompt; None where prompts keep their lengths.
        baseline: the fastest plain mode, which is 1.00.
        rows: of all methods.
        heat: transformers' settings that were compared before, on some of the prompts: their times alone.
    """

    batch: int
    context: int | None
    baseline: str
    rows: tuple[Row, ...]
    heat: tuple[Row, ...] = ()

    @property
    def ran(self) -> list[Row]:
        """The rows of those that did not fail."""
        return [row for row in self.rows if row.error is None]

    @property
    def messages(self) -> list[str]:
        """Errors and warnings."""
        failed = [f"failed: {row.name}: {row.error}" for row in self.rows if row.error is not None]
        return failed + [f"warned: {row.name}: {row.warned}" for row in self.rows if row.warned is not None]


@dataclass(frozen=True)
class Result:
    """All that was measured, and on what.

    Args:
        target, draft: their names as given.
        rules: the same for all methods.
        prompts: where each prompt comes from, by category.
        points: one for each race; the first one is the main one.
        machine: processor, device, threads, versions.
        command: repeats the measurement.
    """

    target: str
    draft: str | None
    rules: Rules
    prompts: dict[str, list[str]]
    points: tuple[Point, ...]
    machine: dict[str, Any]
    command: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """The result that `to_dict` was called on, also after a way through JSON."""
        points = []
        for point in values["points"]:
            rows = {name: tuple(map(_row_from, point[name])) for name in ("rows", "heat")}
            points.append(Point(**point | rows))
        return cls(**values | {"rules": Rules(**values["rules"]), "points": tuple(points)})


def _row_from(values: dict[str, Any]) -> Row:
    row = {**values, "acceptance_by_position": tuple(values["acceptance_by_position"])}
    row["seconds"] = tuple(map(tuple, values["seconds"]))
    for name in ("speedup", "by_drafting"):
        if values.get(name) is not None:
            row[name] = Interval(**values[name])
    if values["by_category"] is not None:
        row["by_category"] = {category: Interval(**one) for category, one in values["by_category"].items()}
    return Row(**row)


def summed_up(measured: Sequence[Measured], batches: Sequence[Batch], greedy: bool) -> tuple[str, tuple[Row, ...]]:
    """The name of the fastest plain mode, and a row for each method, in the order of `measured`.

    batches: what they decoded. greedy: whether texts can be compared with plain's.

    Raises ValueError if every plain mode failed: there is no baseline then.
    """
    plain = [one for one in measured if one.method.family == "plain"]
    ran = [one for one in plain if one.error is None]
    if not ran:
        errors = "; ".join(f"{one.method.name}: {one.error}" for one in plain)
        raise ValueError(f"target: plain decoding failed, and everything is measured against it ({errors})")
    baseline = min(ran, key=lambda one: one.typical)
    loop = next((one for one in measured if one.method.family == "no draft" and one.error is None), None)
    return baseline.method.name, tuple(_row(one, baseline, loop, ran[0], batches, greedy) for one in measured)


def timed_row(one: Measured) -> Row:
    """A method with its times alone, which need no baseline."""
    row = Row(one.method.name, one.method.family, one.method.setting, one.error)
    if one.error is not None:
        return row
    per_token = 1e3 * one.typical / sum(map(len, one.tokens))
    return replace(row, warned=one.warned, milliseconds_per_token=per_token, seconds=tuple(map(tuple, one.seconds)))


def _row(
    one: Measured,
    baseline: Measured,
    loop: Measured | None,
    reference: Measured,
    batches: Sequence[Batch],
    greedy: bool,
) -> Row:
    """loop: this package without a draft. reference: plain decoding in its first mode, whose tokens are the correct ones."""
    row, who = timed_row(one), one.method
    if row.error is not None:
        return row
    tokens, rows = sum(map(len, one.tokens)), len(one.tokens)
    passes, drafted, accepted = one.passes or tokens, one.drafted, tokens - (one.passes or tokens)
    report = one.report
    if report is not None:  # over all timed repeats, the drafter warm
        tokens_read = len(report.row_tokens)
        passes = report.target_passes + tokens_read
        drafted, accepted = report.drafted, report.accepted
        tokens = report.new_tokens
    categories = list(dict.fromkeys(batch.category for batch in batches))
    same = sum(wrote == right for wrote, right in zip(one.tokens, reference.tokens, strict=True))
    working = None
    if one.working_bytes is not None and baseline.working_bytes is not None:
        working = one.working_bytes - baseline.working_bytes
    return replace(
        row,
        speedup=speedup(baseline.seconds, one.seconds),
        by_category={
            category: speedup(_of_category(baseline, batches, category), _of_category(one, batches, category))
            for category in categories
        },
        by_drafting=speedup(loop.seconds, one.seconds) if loop is not None and who.family == "assisted" else None,
        tokens_per_pass=tokens / passes,
        drafted_per_pass=drafted / passes,
        acceptance_rate=accepted / drafted if drafted else None,
        acceptance_by_position=() if report is None else report.acceptance_by_position,
        same=same if greedy else None,
        largest_gap=one.largest_gap,
        rows=rows,
        repeated_4grams=repeated_share(one.tokens),
        draft=None if report is None else report.draft_seconds / report.seconds,
        verify=None if report is None else report.verify_seconds / report.seconds,
        first_token_milliseconds=1e3 * median(one.first_token) if one.first_token else None,
        later_token_milliseconds=_later(one),
        draft_bytes=who.draft_bytes,
        working_bytes_over_plain=working,
    )


def _later(one: Measured) -> float | None:
    found = [each - first for first, each in zip(one.first_token, one.all_tokens, strict=True)]
    return 1e3 * median(found) / (len(one.tokens[0]) - 1) if found and len(one.tokens[0]) > 1 else None


def _of_category(one: Measured, batches: Sequence[Batch], category: str) -> list[list[float]]:
    return [
        [took for took, batch in zip(row, batches, strict=True) if batch.category == category] for row in one.seconds
    ]


@torch.no_grad()
def largest_gap(
    target: PreTrainedModel, batches: Sequence[Batch], right: Sequence[list[int]], wrote: Sequence[list[int]]
) -> float | None:
    """By how much the worse of the two tokens at a row's first difference is behind the best one, the largest over the rows.

    In standard deviations of the target's logits, from a forward pass of its own over the common text: rounding in half
    precision moves logits by some hundredths of one.

    right, wrote: new tokens of every row, batch by batch, by plain decoding and by another method.

    Returns None if no row differs.
    """
    gaps = []
    rows = (ids[mask.bool()] for one in batches for ids, mask in zip(one.ids, one.attention_mask, strict=True))
    for prompt, row, other in zip(rows, right, wrote, strict=True):
        pairs = enumerate(zip(row, other, strict=False))
        at = next((at for at, (one, two) in pairs if one != two), None)
        if at is None:
            continue
        text = torch.cat([prompt, torch.tensor(row[:at], dtype=prompt.dtype, device=prompt.device)])
        scores = target(input_ids=text[None].to(target.device)).logits[0, -1].double()
        gaps.append(float((scores.max() - scores[[row[at], other[at]]].min()) / scores.std()))
    return max(gaps, default=None)


def point_name(batch: int, context: int | None) -> str:
    """A point in words. batch, context: its own."""
    return f"batch {batch}" + ("" if context is None else f", context {context}")


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The environment of a measurement. device, dtype: of the target."""
    from ... import __version__

    return {
        "processor": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "assisted": __version__,
    }
