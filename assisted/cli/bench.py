"""`assisted bench`: the arguments, and where the result goes. The measuring is done elsewhere."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import add_loading, add_target, add_temperature, loading, option, print_or_write, typed
from .terminal import columns


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `bench` into the parser. command: makes a parser with a function to run and a text."""
    text = (
        "measure a pair against the autoregressive baseline and transformers' own drafting, on prompts of several kinds"
    )
    parser = command("bench", _bench, text, page="bench", file="all results")
    pair = parser.add_argument_group("the pair")
    add_target(parser, pair, "Hub id, folder, zoo: name or saved pair")
    text = (
        "Hub id, folder, zoo: name, self:nf4, suffix, suffix+zoo:draft, ...; the first draft model is also transformers'. "
        "Repeat to compare these alone (default: zoo:draft for zoo:target, and all that the pair allows)"
    )
    option(pair, "--draft", text, action="append", metavar="DRAFT")
    option(pair, "--drafts", "the drafts to compare, in one list beside a draft model", nargs="+", metavar="DRAFT")
    add_loading(pair, length="adaptive")
    option(pair, "--no-compile", "omit plain generate with a compiled forward", False)
    work = parser.add_argument_group("the work")
    text = (
        "code, edits, json, prose; chat, for instruct models; a question.jsonl of Spec-Bench; or a dataset "
        "NAME[:CONFIG][:SPLIT]. Each is reported by its categories (default: the first four)"
    )
    work.add_argument("--prompts", nargs="+", default=["code", "edits", "json", "prose"], metavar="SET", help=text)
    option(work, "--count", "prompts per category, at least --batch", 4)
    ends = "new tokens per prompt; end tokens are ignored"
    option(work, "--max-new-tokens", ends, 48, before="--new-tokens")
    option(work, "--repeats", "timed runs over all prompts", 3)
    add_temperature(work)
    option(work, "--top-p", "top-p of the sampling", 1.0)
    option(work, "--seed", "seed of the sampling", 0)
    option(work, "--batch", "rows decoded together", [1], type=int, nargs="+", metavar="B")
    lengths = "cut or extend all prompts to each of these lengths"
    work.add_argument("--context", type=int, nargs="+", default=[], metavar="P", help=lengths)
    out = parser.add_argument_group("the result")
    option(out, "--html", "write a page with plots; needs the bench extra", type=Path, metavar="FILE")
    option(out, "--read", "show results that --json wrote, without measuring", type=Path, metavar="FILE")


def _bench(args: argparse.Namespace) -> None:
    from ..lab.bench.plots import require_matplotlib
    from ..lab.bench.table import page, table

    if args.html is not None:
        require_matplotlib()  # not after an hour of measuring
    result = _read(args.read) if args.read is not None else _measure(args)
    print_or_write(args.json, result.to_dict(), table(result, columns()), indent=1)
    if args.html is not None:
        args.html.write_text(page(result), encoding="utf-8")


def _measure(args: argparse.Namespace) -> Any:
    import dataclasses

    from ..lab.bench.clock import Bars
    from ..lab.bench.measure import measure
    from ..lab.bench.protocol import Rules
    from ..methods import parse

    given, compared = args.draft or [None], args.drafts
    models = [draft for draft in given if draft is not None and parse(draft).quantizes == "model"]
    if len(given) > 1:
        compared = [*given, *(compared or [])]
    rules = Rules(args.max_new_tokens, args.repeats, args.temperature, args.top_p, args.seed)
    work = (args.prompts, args.count, rules, args.batch, args.context)
    with Bars() as bars:
        result = measure(args.target, [*models, *given][0], compared, *work, not args.no_compile, bars, **loading(args))
    return dataclasses.replace(result, command=typed())


def _read(path: Path) -> Any:
    from ..lab.bench.results import Result

    try:
        return Result.from_dict(json.loads(path.read_text()))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"read: {path} is not a file that --json wrote ({type(error).__name__}: {error})") from None
