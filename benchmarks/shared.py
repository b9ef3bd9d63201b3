"""Shared by the benchmarks: what a case is, pairs, races by the protocol of `assisted bench`, processes of their own, pages."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from assisted import AssistedModelForCausalLM, DraftModel, zoo
from assisted.lab.bench import (
    Bars,
    Method,
    Prompt,
    Result,
    Row,
    Rules,
    at_length,
    lookups,
    machine,
    of_model,
    plain,
    point,
    read,
    sources,
    transformers_assisted,
)
from assisted.lab.bench.methods import undrafted
from assisted.lab.bench.table import CELLS as BENCH
from assisted.lab.bench.table import markdown_table
from assisted.lab.grown import grow
from assisted.loading.vocabulary import find_tokenizer

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # for `tools`
NO_DRAFT = "no draft"
"""The row of this package without a draft."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 1024}
Cell = str | Callable[[Any], Any] | None
Drafts = Mapping[str, tuple[Any, Any]]
"""By the name of the row: the draft and its length; None is the default length."""
CELLS: dict[str, Callable[[Row], Any]] = {
    "speedup": BENCH["speedup"],
    "over no draft": BENCH["by drafting"],
    "ms per token": BENCH["ms/token"],
    "tokens per pass": BENCH["tokens/pass"],
    "accepted": BENCH["accepted"],
    "first token": BENCH["first token"],
    "same tokens": BENCH["same"],
    "repeated 4-grams": BENCH["4-grams"],
}
"""The cells of a race's row, by the title of the column."""
COLUMNS = ("speedup", "over no draft", "ms per token", "tokens per pass", "accepted", "same tokens", "repeated 4-grams")
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
RACE_OPTIONS: dict[str, Any] = {
    "prompts": 16,
    "repeats": 3,
    "no_compile": False,
    "only": (None, "begins the titles of the races that are run"),
    "drafts": ([], "the names of the rows that take part"),
}
BUSY = "Other programs ran meanwhile, so times are CPU time of this process."
ENDS = "End tokens are ignored, and all methods take turns in one run."
RATIOS = (
    "The speedup is over the fastest {mode}, with a 95% bootstrap interval. Tokens per pass include the target's own "
    "token and the forward pass over the prompt. A repeated 4-gram occurred earlier in the same text: small models loop, and "
    "loops flatter every drafter."
)


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
        context: tokens of every prompt, which models read that have YaRN angles; the time of the first token is measured, too.
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
    context: int | None = None


@dataclass(frozen=True)
class Case:
    """What is measured, and how pages show it.

    Args:
        name: in commands, and of the file of its figures.
        about: what is measured; the first line is in the list of cases.
        measure: makes the figures from the options.
        races: in its place, the races by title, made from the options.
        options: defaults, with a help text unless run.py has one, by name.
        quick: the options of the smallest measurement.
        sections: of pages.
        what, notes: the heading; formatted with the figures, with what is in their `about`, and with `words`.
        words: of the figures, for the heading.
        columns: by title, a format of a row's fields, or a function of the row; or what makes these from the figures.
            Of races, None for those of CELLS.
        rows: of the figures, the rows of the table; or of several tables, by what stands above them. None: as they are.
        above: of races: what stands above a table.
        markdown: the whole text, in place of all these.
        check: of the figures; it may end the process.
    """

    name: str
    about: str
    measure: Callable[[argparse.Namespace], Any] | None = None
    races: Callable[[argparse.Namespace], Mapping[str, Race]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    sections: tuple[Section, ...] = ()
    what: str = ""
    notes: tuple[str, ...] = ()
    words: Callable[[Any], Mapping[str, Any]] = lambda found: {}
    columns: Any = field(default_factory=lambda: dict.fromkeys(COLUMNS))
    rows: Callable[[Any], Any] = lambda found: found["rows"]
    above: str = "**{title}**"
    markdown: Callable[[Any], str] | None = None
    check: Callable[[Any], None] | None = None

    def text(self, found: Any) -> str:
        """The figures as they stand in docs/."""
        if self.markdown is not None:
            return self.markdown(found)
        its = found.get("about", found)
        known = {**found, **its, **self.words(found)}
        if self.races is None:
            tables = self.rows(found)
            columns = self.columns(found) if callable(self.columns) else self.columns
            tables = tables if isinstance(tables, dict) else {"": tables}
            tables = {title: shown(columns, rows) for title, rows in tables.items()}
            head = heading(
                self.name, its, self.what.format_map(known), *(note.format_map(known) for note in self.notes)
            )
        else:
            ratios = RATIOS.format(mode="plain mode that needs no compiler" if its.get("no_compile") else "plain mode")
            head = heading(self.name, its, f"{its['dtype']}", ENDS, ratios, *self.notes)
            races = {title: one for title, one in found.items() if title != "about"}
            tables = {
                f"{self.above.format(title=title, **one)} ({sum(map(len, one['prompts'].values()))} prompts)": self.race(
                    one
                )
                for title, one in races.items()
            }
        return page(head, *(part for each in tables.items() for part in each))

    def race(self, result: Mapping[str, Any]) -> list[str]:
        """A table of a race's methods, and the errors of those that failed. result: as in a file."""
        cells: dict[str, Cell] = {"": lambda row: row.name.removeprefix("assisted ")}
        cells |= {title: form or CELLS[title] for title, form in self.columns.items()}
        (measured,) = Result.from_dict(result).points
        failed = [f"{row.name} failed: {row.error}" for row in measured.rows if row.error is not None]
        return [*shown(cells, measured.ran), *failed]


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


def long_model(name: str, dtype: torch.dtype, device: Any = "cpu", size: str | None = None) -> PreTrainedModel:
    """A shipped model that reads 40,960 tokens instead of 1,024. size: what it is grown to."""
    folder = zoo.folder(name)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 40 * config.max_position_embeddings
    config.rope_parameters = dict(YARN)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).to(device)
    return model if size is None else grow(model, size, device=device)


def paired(target: PreTrainedModel, tokenizer: Any, drafts: Drafts, lenient: bool = False) -> list[Method]:
    """This package without a draft, and with every draft. lenient: leave out, with a message, what cannot be loaded."""
    found = [replace(undrafted(target), name=NO_DRAFT)]
    for name, (spec, length) in drafts.items():
        try:
            pair = AssistedModelForCausalLM.from_models(target, spec, length, tokenizer)
        except Exception as error:  # a package that is not installed, too little memory
            if not lenient:
                raise
            print(f"left out: {name}: {str(error)[:160]}", file=sys.stderr, flush=True)
        else:
            found.append(of_model(name, pair))
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
    context: int | None = None,
) -> Result:
    """One race by the protocol of `assisted bench`: plain `generate`, the fastest of `others`, and the methods.

    args: prompts, repeats and no_compile. context: tokens that all prompts get; then the first token is measured, too.
    """
    prompts = prompts if context is None else at_length(prompts, pair.tokenizer, context)
    rules = replace(rules, repeats=args.repeats)
    modes = plain(pair.target, compiled=not args.no_compile)
    with Bars() as bars:
        measured = point(pair, modes, others, methods, prompts, rules, rows, bars, streams=context is not None)
    return Result(target, draft, rules, sources(prompts), (measured,), about(pair, args))


def run_races(races: Mapping[str, Race], args: argparse.Namespace) -> dict[str, Any]:
    """The results by title, and `about`, the environment of the first. args: RACE_OPTIONS, quick, device and save."""
    found: dict[str, Any] = {}
    for title, race in races.items():
        if args.only and not title.startswith(args.only):
            continue
        if race.context is None:
            pair = opened(race.target, race.draft, race.dtype, args.device)
        else:
            models = (long_model(name, getattr(torch, race.dtype), args.device) for name in ("target", "draft"))
            pair = AssistedModelForCausalLM.from_models(*models, tokenizer=find_tokenizer(zoo.folder("target")))
        drafts = race.drafts(pair) if callable(race.drafts) else race.drafts
        chosen = {
            name: (_loaded(spec, pair), length)
            for name, (spec, length) in drafts.items()
            if name in args.drafts or not args.drafts
        }
        count = max(race.rows, round(args.prompts * race.share), 1)
        others = [*(transformers_assisted(pair) if race.rows == 1 else []), *lookups(pair.target)] if race.peers else []
        rules = replace(race.rules, new_tokens=min(8, race.rules.new_tokens)) if args.quick else race.rules
        methods = paired(pair.target, pair.tokenizer, chosen, lenient=True)
        prompts = read([race.kind], pair.tokenizer, count)
        draft = race.draft if race.draft != "suffix" else None
        result = raced(args, pair, methods, prompts, rules, race.rows, others, race.target, draft, race.context)
        found |= {"about": found.get("about", result.machine), title: result.to_dict()}
        args.save(found)
    return found


def _loaded(spec: Any, pair: AssistedModelForCausalLM) -> Any:
    """A draft with the pair's own draft model in place of its name."""
    if isinstance(spec, list):
        return [_loaded(one, pair) for one in spec]
    return DraftModel(pair.drafter.models[0]) if spec == "zoo:draft" and pair.spec.quantizes == "model" else spec


def about(pair: AssistedModelForCausalLM | None = None, args: argparse.Namespace | None = None, **more: Any) -> Any:
    """The environment of a measurement; of the options, how many prompts, repeats and new tokens; and more."""
    place = (pair.target.device, pair.target.dtype) if pair is not None else (torch.device("cpu"), torch.float32)
    names = ("prompts", "repeats", "new_tokens", "no_compile", "cpu_time")
    counts = {name: value for name in names if (value := getattr(args, name, None))}
    return {**machine(*place), **counts, **more}


def written(model: Any, ids: torch.Tensor, tokens: int, **more: Any) -> list[int]:
    """The new tokens of a call, greedy unless told otherwise. ids: [1, P]."""
    call = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **call)[0, ids.shape[1] :].tolist()


def totals_of(model: Any, prompts: Iterable[torch.Tensor], tokens: int, **more: Any) -> Any:
    """The counts of calls for all prompts, each with a seed of its own. prompts: [1, P]."""
    model.reset_totals()
    for number, ids in enumerate(prompts):
        set_seed(number)
        written(model, ids, tokens, **more)
    return model.totals


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
            start_new_session=True,
        )
        self._say(settings)

    def ask(self, *arguments: Any, seconds: float | None = None) -> Any:
        """What the function returns. seconds: that it may take; then the process is ended.

        Raises RuntimeError if the process has ended, TimeoutError if it took too long.
        """
        self._say(arguments)
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.end()
            raise TimeoutError(self.name)
        return self.answer()

    def answer(self) -> Any:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RuntimeError(f"{self.name}: its process ended with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _say(self, words: Any) -> None:
        with suppress(BrokenPipeError):  # `answer` tells
            print(json.dumps(words), file=self.process.stdin, flush=True)


# Tables and pages


def heading(name: str, its: Mapping[str, Any], what: str, *sentences: str) -> str:
    """The paragraph above a table. name: of the case; its: what `about` gave; what: was measured."""
    versions = ", ".join(f"{library} {its[library]}" for library in ("torch", "transformers"))
    sentences = (*sentences, BUSY if its.get("cpu_time") else "")
    measured = f"{what}, CPU threads: {its['threads']}, {its['processor']}, {versions}."
    return " ".join(
        [f"`python benchmarks/run.py {name}{its.get('options', '')}`: {measured}", *filter(None, sentences)]
    )


def shown(columns: Mapping[str, Cell], rows: Iterable[Any]) -> list[str]:
    """A Markdown table, and below it the rows that are sentences.

    columns: as of a Case; a space at the end of a title tells it from another. A format without its field gives an empty cell.
    """

    def cell(form: Cell, row: Any) -> Any:
        try:
            return form.format(**row) if isinstance(form, str) else form(row)  # type: ignore[misc]
        except (KeyError, TypeError):
            if not isinstance(form, str):
                raise
            return ""

    rows = list(rows)
    cells = [[cell(form, row) for form in columns.values()] for row in rows if not isinstance(row, str)]
    said = [row for row in rows if isinstance(row, str)]
    return [*markdown_table(map(str.strip, columns), cells), *[""] * bool(said), *said]


def rows_of(result: Mapping[str, Any]) -> dict[str, Row]:
    """The methods of a race that did not fail, by name. result: as in a file."""
    return {row.name: row for row in Result.from_dict(result).points[0].ran}


def page(*parts: str | Sequence[str]) -> str:
    """Paragraphs, and tables as lines; empty ones are left out."""
    return "\n\n".join(part if isinstance(part, str) else "\n".join(part) for part in parts if part)


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
