"""What the scripts beside this one share: the shipped target, tables of rows, and the measured sections of the docs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.bench import Contestant, Point, Row, machine, plain


def arguments(doc: str | None, prompts: int = 16, repeats: int = 3) -> argparse.ArgumentParser:
    """The options that every script has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=prompts, help="of each kind (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out what has to be compiled first, plain or not"
    )
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose measured section is rewritten")
    parser.add_argument("--read", type=Path, help="measure nothing, take the figures from this JSON")
    return parser


def shipped(dtype: torch.dtype = torch.float32) -> tuple[AssistedModelForCausalLM, DraftModel]:
    """The shipped pair, and a spec that drafts with the same draft model again."""
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", dtype=dtype)
    return pair, DraftModel(pair.drafter.models[0])


def about(pair: AssistedModelForCausalLM, **more: Any) -> dict[str, Any]:
    """What figures were measured with."""
    return {**machine(pair.target.device, pair.target.dtype), **more}


def measured_with(found: dict[str, Any], command: str) -> str:
    """The sentence above a table. found: what `about` gave."""
    return (
        f"`{command}`: {found['prompts']} prompts, {found['dtype']}, CPU threads: {found['threads']}, torch {found['torch']}, "
        f"transformers {found['transformers']}, end tokens ignored, all contestants in turns in one run. Times plain: against "
        "the fastest plain mode, with a 95% bootstrap interval. Tokens per pass include the target's own token and the pass "
        "that reads the prompt. Repeated 4-grams: a small model loops, and loops flatter every drafter."
    )


def figures(args: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]]) -> dict[str, Any]:
    """Those of `--read`, or what `measure` finds on `--threads` threads; written to `--out`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    found = json.loads(args.read.read_text()) if args.read else measure(args)
    write_json(args.out, found)
    return found


def write_json(path: Path | None, found: Any) -> None:
    """As the files beside this one are; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def publish(text: str, docs: Sequence[Path], marker: str = "measured") -> None:
    """Print a section and put it into the docs that were asked for."""
    print(text)
    write_docs(docs, text, marker)


def table(point: Point, columns: dict[str, Any], named: str = "") -> list[str]:
    """A Markdown table of all that got through. columns: title to a function of a row."""
    lines = [f"| {named} | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for row in point.rows:
        if row.error is None:
            lines.append(
                f"| {row.name.removeprefix('assisted ')} | "
                + " | ".join(str(cell(row)) for cell in columns.values())
                + " |"
            )
    return lines


def plainly(pair: AssistedModelForCausalLM, args: argparse.Namespace) -> list[Contestant]:
    """Plain `generate`, in the modes that were asked for."""
    return plain(pair.target, compiled=not args.no_compile)


def same(row: Row) -> str:
    return "" if row.same is None else f"{row.same}/{row.rows}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def failures(points: Sequence[Point]) -> list[str]:
    return [f"{row.name} failed: {row.error}" for point in points for row in point.rows if row.error is not None]


def write_docs(paths: Sequence[Path], text: str, marker: str = "measured") -> None:
    """Replace what stands between the two markers of each file."""
    for path in paths:
        head, begin, rest = path.read_text().partition(f"<!-- {marker}:begin -->")
        _, end, tail = rest.partition(f"<!-- {marker}:end -->")
        if not end:
            raise ValueError(f"{path} has no <!-- {marker}:begin --> and <!-- {marker}:end -->")
        path.write_text(f"{head}{begin}\n{text}\n{end}{tail}")
