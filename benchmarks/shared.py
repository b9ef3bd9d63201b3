"""Shared by the benchmarks: pairs, races by the protocol of `assisted bench`, processes of their own, tables and pages."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.lab.bench import (
    Bars,
    Measured,
    Method,
    Point,
    Prompt,
    Result,
    Row,
    Rules,
    lookups,
    machine,
    of_model,
    plain,
    point,
    read,
    sources,
    transformers_assisted,
)
from assisted.lab.bench.table import CELLS as BENCH
from assisted.lab.bench.table import markdown_table, percent

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # for `tools`
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
COLUMNS = ("speedup", "ms per token", "tokens per pass", "accepted", "same tokens", "repeated 4-grams")
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
RACE_OPTIONS: dict[str, Any] = {
    "prompts": 16,
    "repeats": 3,
    "no_compile": False,
    "only": (None, "begins the titles of the races that are run"),
    "drafts": ([], "the names of the rows that take part"),
}
Drafts = Mapping[str, tuple[Any, ...]]
"""By the name of the row: the draft, its length and, unless it is "auto", `fast=`."""


@dataclass(frozen=True)
class Section:
    """A part of a page that a case writes.

    Args:
        page: in docs/, without its ending.
        marker: of the comments around it.
        files: the figures' names; the default is the case's own.
        titles: the races that it shows; without any, all.
    """

    page: str
    marker: str = "measured"
    files: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Race:
    """Methods that decode the same prompts in turns, beside plain `generate`.

    Args:
        drafts: those of this package, or a function of the pair that returns them.
        target, draft, dtype: of the pair.
        rules: tokens and sampling; the repeats are those of the options.
        rows: decoded together.
        kind: of the prompts.
        share: of the number of prompts in the options.
        peers: whether transformers' own drafting takes part, and with a draft model or by lookup alone.
    """

    drafts: Drafts | Callable[[AssistedModelForCausalLM], Drafts]
    target: str = "zoo:target"
    draft: str = "zoo:draft"
    dtype: str = "float32"
    rules: Rules = Rules(48)  # noqa: RUF009  (frozen)
    rows: int = 1
    kind: str = "code"
    share: float = 1.0
    peers: bool = False


# Measuring


def opened(
    target: str, draft: Any = "suffix", dtype: str = "float32", device: str = "cpu", **more: Any
) -> AssistedModelForCausalLM:
    """A pair by the name of its target, which may be one of `tools.grown`."""
    from tools.grown import load_target

    kind = getattr(torch, dtype)
    if target.startswith("grown:"):
        model, tokenizer = load_target(target, kind, torch.device(device))
        return AssistedModelForCausalLM.from_models(model, draft=draft, tokenizer=tokenizer, **more)
    more |= {"device_map": device} if device != "cpu" else {}
    return AssistedModelForCausalLM.from_pretrained(target, draft=draft, dtype=kind, **more)


def paired(target: PreTrainedModel, tokenizer: Any, drafts: Drafts, fast: str = "auto") -> list[Method]:
    """A method with this target for every draft."""
    return [
        of_model(
            name, AssistedModelForCausalLM.from_models(target, draft, length, tokenizer, fast=next(iter(how), fast))
        )
        for name, (draft, length, *how) in drafts.items()
    ]


def loadable(target: PreTrainedModel, tokenizer: Any, drafts: Drafts) -> list[Method]:
    """The same, of all drafts that can be loaded. The others are left out with a message."""
    found = []
    for name, one in drafts.items():
        try:
            found += paired(target, tokenizer, {name: one})
        except Exception as error:  # a package that is not installed, too little memory
            print(f"left out: {name}: {str(error)[:160]}", file=sys.stderr, flush=True)
    return found


def raced(
    args: argparse.Namespace,
    pair: AssistedModelForCausalLM,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    rules: Rules,
    rows: int = 1,
    others: Sequence[Method] = (),
    target: str = "zoo:target",
    draft: str | None = None,
) -> Result:
    """One race by the protocol of `assisted bench`: plain `generate`, the fastest of `others`, and the methods.

    args: prompts, repeats and no_compile.
    """
    rules = replace(rules, repeats=args.repeats)
    modes = plain(pair.target, compiled=not args.no_compile)
    with Bars() as bars:
        measured = point(pair, modes, others, methods, prompts, rules, rows, bars, streams=False)
    return Result(target, draft, rules, sources(prompts), (measured,), about(pair, args))


def run_races(races: Mapping[str, Race], args: argparse.Namespace, save: Callable[[Any], None]) -> dict[str, Any]:
    """The results by title, and `about`, the environment of the first. args: RACE_OPTIONS, quick and device."""
    found: dict[str, Any] = {}
    for title, race in races.items():
        if args.only and not title.startswith(args.only):
            continue
        pair = opened(race.target, race.draft, race.dtype, args.device)
        drafts = race.drafts(pair) if callable(race.drafts) else race.drafts
        chosen = {
            name: (_loaded(spec, pair), *how)
            for name, (spec, *how) in drafts.items()
            if (name in args.drafts or not args.drafts) and not (args.no_compile and "compile" in how[1:])
        }
        count = max(race.rows, round(args.prompts * race.share), 1)
        others = [*(transformers_assisted(pair) if race.rows == 1 else []), *lookups(pair.target)] if race.peers else []
        rules = replace(race.rules, new_tokens=min(8, race.rules.new_tokens)) if args.quick else race.rules
        methods = loadable(pair.target, pair.tokenizer, chosen)
        prompts = read([race.kind], pair.tokenizer, count)
        draft = race.draft if race.draft != "suffix" else None
        result = raced(args, pair, methods, prompts, rules, race.rows, others, race.target, draft)
        found |= {"about": found.get("about", result.machine), title: result.to_dict()}
        save(found)
    return found


def _loaded(spec: Any, pair: AssistedModelForCausalLM) -> Any:
    """A draft with the pair's own draft model in place of its name."""
    if isinstance(spec, list):
        return [_loaded(one, pair) for one in spec]
    return DraftModel(pair.drafter.models[0]) if spec == "zoo:draft" and pair.spec.quantizes == "model" else spec


def required(measured: Sequence[Measured]) -> list[Measured]:
    """The same list. Raises RuntimeError if a method failed."""
    for one in measured:
        if one.error is not None:
            raise RuntimeError(f"{one.method.name}: {one.error}")
    return list(measured)


def about(pair: AssistedModelForCausalLM | None = None, args: argparse.Namespace | None = None, **more: Any) -> Any:
    """The environment of a measurement; of the options, how many prompts, repeats and new tokens; and more."""
    place = (pair.target.device, pair.target.dtype) if pair is not None else (torch.device("cpu"), torch.float32)
    counts = {name: value for name in ("prompts", "repeats", "new_tokens") if (value := getattr(args, name, None))}
    return {**machine(*place), **counts, **more}


def written(model: Any, ids: torch.Tensor, tokens: int, **more: Any) -> list[int]:
    """The new tokens of a call, greedy unless told otherwise. ids: [1, P]."""
    call = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **call)[0, ids.shape[1] :].tolist()


class Worker:
    """A function in a process of its own, also of an interpreter without this package: see worker.py.

    The function gets the settings, in JSON. If it returns a function, that one is called with the arguments of each `ask`;
    if not, `answer` is what it returned.
    """

    def __init__(
        self,
        module: str,
        function: str,
        *settings: Any,
        python: str = sys.executable,
        threads: int | None = None,
        cwd: Path | None = None,
        quiet: Path | None = None,
        **env: str,
    ):
        """module: of this folder. threads, env: of the process. quiet: a file for its messages."""
        known = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        self.name = f"{module}.{function}"
        self.process = subprocess.Popen(
            [python, str(FOLDER / "worker.py"), module, function, str(threads or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if quiet is None else quiet.open("a"),
            text=True,
            cwd=cwd,
            env={"PYTHONPATH": str(FOLDER.parent), **os.environ, **known, **env},
        )
        self._say(settings)

    def ask(self, *arguments: Any) -> Any:
        """What the function returns. Raises RuntimeError if its process ends."""
        self._say(arguments)
        return self.answer()

    def answer(self) -> Any:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"{self.name}: its process has ended, {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _say(self, words: Any) -> None:
        with suppress(BrokenPipeError):  # `answer` tells
            print(json.dumps(words), file=self.process.stdin, flush=True)


# Tables and pages


def heading(name: str, its: Mapping[str, Any], what: str, *sentences: str) -> str:
    """The paragraph above a table. name: of the case; its: what `about` gave; what: was measured."""
    command = f"python benchmarks/run.py {name}{its.get('options', '')}"
    versions = ", ".join(f"{library} {its[library]}" for library in ("torch", "transformers"))
    return " ".join(
        [
            f"`{command}`: {what}, CPU threads: {its['threads']}, {its['processor']}, {versions}.",
            *filter(None, sentences),
        ]
    )


ENDS = "End tokens are ignored, and all methods take turns in one run."
RATIOS = (
    "The speedup is over the fastest plain mode, with a 95% bootstrap interval. Tokens per pass include the target's own "
    "token and the forward pass over the prompt. A repeated 4-gram occurred earlier in the same text: small models loop, and "
    "loops flatter every drafter."
)


def races_text(
    name: str, found: Mapping[str, Any], columns: Sequence[str] = COLUMNS, note: str = "", named: str = "", **more: Cell
) -> str:
    """A heading and the tables of races. found: `about`, and results by their titles. The others: as for `table`."""
    its = found["about"]
    lines = [heading(name, its, f"{its['prompts']} prompts, {its['dtype']}", ENDS, RATIOS, note)]
    for title, result in found.items():
        if title != "about":
            (measured,) = Result.from_dict(result).points
            lines += ["", f"**{title}**", "", *table(measured, columns, named, **more)]
    return "\n".join(lines)


def table(point: Point, columns: Sequence[str] = COLUMNS, named: str = "", **more: Cell) -> list[str]:
    """A Markdown table of the methods, and the errors of those that failed.

    columns: titles of CELLS or of `more`. named: the title of the names' column. more: further cells by title.
    """
    cells = {**CELLS, **more}
    rows = [[row.name.removeprefix("assisted "), *(cells[title](row) for title in columns)] for row in point.ran]
    failed = [f"{row.name} failed: {row.error}" for row in point.rows if row.error is not None]
    return [*markdown_table([named, *columns], rows), *failed]


def titled(head: str, tables: Mapping[str, Sequence[str]]) -> str:
    """A heading, and tables (lines) below their titles."""
    return "\n".join([head, *(line for title, lines in tables.items() for line in ("", title, "", *lines))])


def below(head: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A heading and one table."""
    return "\n".join([head, "", *markdown_table(columns, rows)])


def write_json(path: Path | None, found: Any) -> None:
    """Write figures in the format of this folder's files; without a path, do nothing."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def publish(text: str, docs: Iterable[Path], marker: str = "measured") -> None:
    """Print a section, and write it between the two markers of every file in `docs`."""
    print(text)
    for path in docs:
        head, begin, rest = path.read_text().partition(f"<!-- {marker}:begin -->")
        _, end, tail = rest.partition(f"<!-- {marker}:end -->")
        if not end:
            raise ValueError(f"{path} has no <!-- {marker}:begin --> and <!-- {marker}:end -->")
        path.write_text(f"{head}{begin}\n{folded(text)}\n{end}{tail}")


def folded(text: str) -> str:
    """The text, with each paragraph that begins with a command in a fold: readers look for the table below it."""
    return re.sub(r"^(?=`python benchmarks/)", '??? note "How it was measured"\n\n    ', text, flags=re.MULTILINE)
