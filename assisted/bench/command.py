"""`assisted bench`: the arguments, and where the result goes. Knows arguments and files; the measuring is done elsewhere."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["add"]

_DEFAULT = " (default: %(default)s)"


def add(commands: Any, device: Callable[[str], str]) -> None:
    """Put `bench` into the parser. device: what --device names, checked."""
    text = "Measure what drafting is worth, against plain generate and transformers' own drafting. See docs/howto/bench.md."
    parser = commands.add_parser(
        "bench", help="measure a pair against plain decoding, on prompts of several kinds", description=text
    )
    parser.set_defaults(command=lambda args: _bench(args, device))
    pair = parser.add_argument_group("the pair")
    pair.add_argument("--target", default="zoo:target", help="Hub id, folder, zoo: name or saved pair" + _DEFAULT)
    pair.add_argument("--draft", help="a draft model, for transformers as well (default: zoo:draft for zoo:target)")
    pair.add_argument(
        "--drafts",
        nargs="+",
        metavar="DRAFT",
        help="what takes part: draft strings; a+b is both together (default: all that the pair allows)",
    )
    pair.add_argument("--draft-quantization", metavar="NAME", help="nf4, int8, ... of --draft (default: none)")
    pair.add_argument(
        "--draft-length", type=_int_or_name, metavar="N", help='tokens a round, or "adaptive", ... (default: adaptive)'
    )
    pair.add_argument(
        "--dtype", default=None, choices=("auto", "float32", "bfloat16", "float16"), help="(default: chosen)"
    )
    pair.add_argument("--device", default="auto", help="cpu, cuda, ..." + _DEFAULT)
    pair.add_argument("--threads", type=int, help="of the CPU (default: torch's own choice)")
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
    work.add_argument("--count", type=int, default=4, help="prompts of each category, no fewer than --batch" + _DEFAULT)
    work.add_argument("--new-tokens", type=int, default=48, help="of each prompt; end tokens are ignored" + _DEFAULT)
    work.add_argument("--repeats", type=int, default=3, help="timed rounds over all prompts" + _DEFAULT)
    work.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token" + _DEFAULT)
    work.add_argument("--top-p", type=float, default=1.0, help=_DEFAULT.strip())
    work.add_argument("--seed", type=int, default=0, help="of the sampling" + _DEFAULT)
    work.add_argument("--batch", type=int, nargs="+", default=[1], metavar="B", help="rows decoded together" + _DEFAULT)
    work.add_argument(
        "--context", type=int, nargs="+", default=[], metavar="P", help="bring all prompts to these lengths, in turn"
    )
    out = parser.add_argument_group("the result")
    out.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything that was measured (- or nothing: print it)",
    )
    out.add_argument("--html", type=Path, metavar="FILE", help='write a page with plots; needs "assisted[bench]"')
    out.add_argument("--read", type=Path, metavar="FILE", help="measure nothing, show what --json wrote")


def _bench(args: argparse.Namespace, device: Callable[[str], str]) -> None:
    from .page import page
    from .plots import require_matplotlib
    from .table import table

    if args.html is not None:
        require_matplotlib()  # not after an hour of measuring
    result = _read(args.read) if args.read is not None else _measure(args, device(args.device))
    written = json.dumps(result.to_dict(), indent=1)
    if args.json not in (None, "-"):
        Path(args.json).write_text(written + "\n")
    if args.html is not None:
        args.html.write_text(page(result), encoding="utf-8")
    print(written if args.json == "-" else table(result), flush=True)


def _measure(args: argparse.Namespace, device: str) -> Any:
    import dataclasses

    import torch

    from .bars import Bars
    from .measure import measure
    from .protocol import Rules

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    placed: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device}}
    if args.dtype is not None:
        placed["dtype"] = args.dtype
    if args.draft_quantization is not None:
        placed["draft_quantization"] = args.draft_quantization
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
            draft_length=args.draft_length,
            **placed,
        )
    return dataclasses.replace(result, command=shlex.join(["assisted", *sys.argv[1:]]))


def _read(path: Path) -> Any:
    from .results import Result

    try:
        return Result.from_dict(json.loads(path.read_text()))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"read: {path} is nothing that --json wrote ({type(error).__name__}: {error})") from None


def _int_or_name(value: str) -> int | str:
    return int(value) if value.isdecimal() else value
