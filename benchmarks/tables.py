"""Shared by the scripts of this folder: options, the shipped pair, a race by the protocol, tables, sections of the docs."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.bench import (
    Bars,
    Measured,
    Method,
    Point,
    Prompt,
    Result,
    Row,
    Rules,
    machine,
    of_model,
    plain,
    point,
    sources,
)
from assisted.bench.table import CELLS as BENCH
from assisted.bench.table import markdown_table, percent

sys.path.insert(0, str(Path(__file__).parent.parent))  # for scripts that import from tools/
Cell = Callable[[Row], Any]
CELLS: dict[str, Cell] = {
    "speedup": BENCH["speedup"],
    "ms per token": BENCH["ms/token"],
    "tokens per pass": BENCH["tokens/pass"],
    "accepted": BENCH["accepted"],
    "first token accepted": lambda row: percent(next(iter(row.acceptance_by_position), None)),
    "same tokens": BENCH["same"],
    "repeated 4-grams": BENCH["4-grams"],
}
"""The cells of a row, by the title of the column."""
OPTIONS = ("--prompts", "--repeats", "--threads", "--no-compile", "--out", "--docs", "--read")


def arguments(
    doc: str | None,
    only: Sequence[str] = OPTIONS,
    prompts: int = 16,
    repeats: int = 3,
    threads: int | None = None,
    numbers: Mapping[str, tuple[int, str]] | None = None,
) -> argparse.ArgumentParser:
    """The common options of scripts, and the script's own that are whole numbers.

    doc: the description. only: which of OPTIONS. prompts, repeats, threads: defaults. numbers: default and text, by name.
    """
    default = "(default: %(default)s)"
    own_choice = default if threads else "(default: torch's own choice)"
    options: dict[str, dict[str, Any]] = {
        "--prompts": {"type": int, "default": prompts, "help": f"of each kind {default}"},
        "--repeats": {"type": int, "default": repeats, "help": f"timed repeats {default}"},
        "--threads": {"type": int, "default": threads, "help": f"torch threads {own_choice}"},
        "--no-compile": {"action": "store_true", "help": "leave out what has to be compiled first, plain or not"},
        "--out": {"type": Path, "help": "write the figures here as JSON"},
        "--docs": {"type": Path, "nargs": "*", "default": [], "help": "files whose measured section is rewritten"},
        "--read": {"type": Path, "help": "measure nothing, take the figures from this JSON"},
    }
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in only:
        parser.add_argument(name, **options[name])
    for name, (value, text) in (numbers or {}).items():
        parser.add_argument(name, type=int, default=value, metavar="N", help=f"{text} {default}")
    return parser


def shipped(dtype: torch.dtype = torch.float32) -> tuple[AssistedModelForCausalLM, DraftModel]:
    """The shipped pair, and a spec that drafts with the same draft model again."""
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", dtype=dtype)
    return pair, DraftModel(pair.drafter.models[0])


def paired(
    target: PreTrainedModel, tokenizer: Any, drafts: Mapping[str, tuple[Any, Any]], fast: str = "auto"
) -> list[Method]:
    """A method with this target for every draft and draft length, which are given by the name of the row."""

    def loaded(draft: Any, length: Any) -> AssistedModelForCausalLM:
        return AssistedModelForCausalLM.from_models(target, draft, length, tokenizer, fast=fast)

    return [of_model(name, loaded(draft, length)) for name, (draft, length) in drafts.items()]


def raced(
    args: argparse.Namespace,
    pair: AssistedModelForCausalLM,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    rules: Rules,
    batch: int = 1,
    others: Sequence[Method] = (),
    target: str = "zoo:target",
    draft: str | None = None,
) -> Result:
    """One race by the protocol of `assisted bench`: plain `generate`, the fastest of `others`, and the methods."""
    rules = replace(rules, repeats=args.repeats)
    modes = plain(pair.target, compiled=not args.no_compile)
    with Bars() as bars:
        measured = point(pair, modes, others, methods, prompts, rules, batch, bars, streams=False)
    machine = about(pair, prompts=args.prompts, repeats=args.repeats)
    return Result(target, draft, rules, sources(prompts), (measured,), machine)


def required(measured: Sequence[Measured]) -> list[Measured]:
    """The same list. Raises RuntimeError if a method failed."""
    for one in measured:
        if one.error is not None:
            raise RuntimeError(f"{one.method.name}: {one.error}")
    return list(measured)


def about(pair: AssistedModelForCausalLM, **more: Any) -> dict[str, Any]:
    """The environment of a measurement, and more."""
    return {**machine(pair.target.device, pair.target.dtype), **more}


def figures(args: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]]) -> dict[str, Any]:
    """The figures of `--read`, or those of `measure` with `--threads` threads. They are written to `--out`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    found = json.loads(args.read.read_text()) if args.read else measure(args)
    write_json(args.out, found)
    return found


def write_json(path: Path | None, found: Any) -> None:
    """Write figures in the format of this folder's files; without a path, do nothing."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def in_own_process(script: str, *options: object) -> subprocess.Popen[str]:
    """Start a script of this folder. `answer` reads its output."""
    return subprocess.Popen([sys.executable, script, *map(str, options)], stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> Any:
    """The JSON in the last line that a process prints. Raises RuntimeError if it fails."""
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args} failed")
    return json.loads(printed.splitlines()[-1])


def measured_with(found: dict[str, Any], command: str) -> str:
    """The sentence above a table. found: what `about` gave."""
    return (
        f"`{command}`: {found['prompts']} prompts, {found['dtype']}, CPU threads: {found['threads']}, {found['processor']}, "
        f"torch {found['torch']}, transformers {found['transformers']}. End tokens are ignored, and all methods take turns "
        "in one run. The speedup is over the fastest plain mode, with a 95% bootstrap interval. Tokens per pass include the "
        "target's own token and the forward pass over the prompt. A repeated 4-gram occurred earlier in the same text: small "
        "models loop, and loops flatter every drafter."
    )


def races(found: dict[str, Any], script: str, columns: Sequence[str], note: str = "", **more: Any) -> str:
    """What a script writes into the docs. found: `about`, and races by their titles. note: ends the sentences above the
    tables. columns, more: as for `table`."""
    lines = [measured_with(found["about"], f"python benchmarks/{script}.py") + note]
    for title, result in found.items():
        lines += section(title, result, columns, **more) if title != "about" else []
    return "\n".join(lines)


def section(title: str, result: dict[str, Any], columns: Sequence[str], named: str = "", **more: Cell) -> list[str]:
    """A title and the table of a race. result: of `raced`, as a dictionary. The others: as for `table`."""
    (measured,) = Result.from_dict(result).points
    return ["", f"**{title}**", "", *table(measured, columns, named, **more)]


def table(point: Point, columns: Sequence[str], named: str = "", **more: Cell) -> list[str]:
    """A Markdown table of the methods, and the errors of those that failed.

    columns: titles of CELLS or of `more`. named: the title of the names' column. more: further cells by title.
    """
    cells = {**CELLS, **more}
    rows = [[row.name.removeprefix("assisted "), *(cells[title](row) for title in columns)] for row in point.ran]
    failed = [f"{row.name} failed: {row.error}" for row in point.rows if row.error is not None]
    return [*markdown_table([named, *columns], rows), *failed]


def publish(text: str, docs: Iterable[Path], marker: str = "measured") -> None:
    """Print a section, and write it between the two markers of every file in `docs`."""
    print(text)
    write_docs(docs, text, marker)


def folded(text: str) -> str:
    """The text, with each paragraph that begins with a command in a fold: readers look for the table below it."""
    return re.sub(r"^(?=`python benchmarks/)", '??? note "How it was measured"\n\n    ', text, flags=re.MULTILINE)


def write_docs(paths: Iterable[Path], text: str, marker: str = "measured") -> None:
    """Replace what stands between the two markers of each file."""
    for path in paths:
        head, begin, rest = path.read_text().partition(f"<!-- {marker}:begin -->")
        _, end, tail = rest.partition(f"<!-- {marker}:end -->")
        if not end:
            raise ValueError(f"{path} has no <!-- {marker}:begin --> and <!-- {marker}:end -->")
        path.write_text(f"{head}{begin}\n{folded(text)}\n{end}{tail}")
