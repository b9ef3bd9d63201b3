"""`assisted bench`: the arguments, and where the result goes. Knows arguments and files; the measuring is done elsewhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .arguments import (
    DEFAULT,
    add_json_file,
    add_machine,
    add_target,
    int_or_name,
    loading,
    typed,
    use_threads,
    write_json,
)

__all__ = ["add"]


def add(commands: Any) -> None:
    """Put `bench` into the parser."""
    text = "Measure what drafting is worth, against plain generate and transformers' own drafting. See docs/howto/bench.md."
    parser = commands.add_parser(
        "bench", help="measure a pair against plain decoding, on prompts of several kinds", description=text
    )
    parser.set_defaults(command=_bench)
    pair = parser.add_argument_group("the pair")
    add_target(parser, pair, "Hub id, folder, zoo: name or saved pair")
    pair.add_argument("--draft", help="a draft model, for transformers as well (default: zoo:draft for zoo:target)")
    pair.add_argument(
        "--drafts",
        nargs="+",
        metavar="DRAFT",
        help="what takes part: draft strings; a+b is both together (default: all that the pair allows)",
    )
    pair.add_argument("--draft-quantization", metavar="NAME", help="nf4, int8, ... of --draft (default: none)")
    pair.add_argument(
        "--draft-length", type=int_or_name, metavar="N", help='tokens a round, or "adaptive", ... (default: adaptive)'
    )
    add_machine(pair, dtype="chosen")
    pair.add_argument("--no-compile", action="store_true", help="leave out plain generate with a compiled forward")
    work = parser.add_argument_group("the work")
    work.add_argument(
        "--prompts",
        nargs="+",
        default=["code", "edits", "json", "prose"],
        metavar="SET",
        help="code, edits, json, prose, a question.jsonl of Spec-Bench, or a dataset NAME[:CONFIG][:SPLIT]; each is "
        "reported by its categories (default: the first four)",
    )
    work.add_argument("--count", type=int, default=4, help="prompts of each category, no fewer than --batch" + DEFAULT)
    work.add_argument("--new-tokens", type=int, default=48, help="of each prompt; end tokens are ignored" + DEFAULT)
    work.add_argument("--repeats", type=int, default=3, help="timed rounds over all prompts" + DEFAULT)
    work.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token" + DEFAULT)
    work.add_argument("--top-p", type=float, default=1.0, help=DEFAULT.strip())
    work.add_argument("--seed", type=int, default=0, help="of the sampling" + DEFAULT)
    work.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="rows decoded together" + DEFAULT)
    work.add_argument(
        "--context", type=int, nargs="+", default=[], metavar="P", help="bring all prompts to these lengths, in turn"
    )
    out = parser.add_argument_group("the result")
    add_json_file(out, "measured")
    out.add_argument("--html", type=Path, metavar="FILE", help='write a page with plots; needs "assisted[bench]"')
    out.add_argument("--read", type=Path, metavar="FILE", help="measure nothing, show what --json wrote")


def _bench(args: argparse.Namespace) -> None:
    from ..bench.page import page
    from ..bench.plots import require_matplotlib
    from ..bench.table import table

    if args.html is not None:
        require_matplotlib()  # not after an hour of measuring
    result = _read(args.read) if args.read is not None else _measure(args)
    written = write_json(args.json, result.to_dict(), indent=1)
    if args.html is not None:
        args.html.write_text(page(result), encoding="utf-8")
    print(written or table(result), flush=True)


def _measure(args: argparse.Namespace) -> Any:
    import dataclasses

    from ..bench.bars import Bars
    from ..bench.measure import measure
    from ..bench.protocol import Rules

    use_threads(args.threads)
    rules = Rules(args.new_tokens, args.repeats, args.temperature, args.top_p, args.seed)
    with Bars() as bars:
        result = measure(
            args.target,
            args.draft,
            args.drafts,
            args.prompts,
            args.count,
            rules,
            args.batch,
            args.context,
            not args.no_compile,
            bars,
            **loading(args),
        )
    return dataclasses.replace(result, command=typed())


def _read(path: Path) -> Any:
    from ..bench.results import Result

    try:
        return Result.from_dict(json.loads(path.read_text()))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"read: {path} is nothing that --json wrote ({type(error).__name__}: {error})") from None
