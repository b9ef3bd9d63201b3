"""`assisted plan`: the arguments, and where the result goes. The counting is done elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .arguments import DEFAULT, DTYPES, add_draft_window, dtype_name, print_or_write

_OPTIONS = {"memory": "vram", "rows": "batch", "drafted": "draft-length"}
"""The command's names for arguments that have other names in Python."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `plan` into the parser. command: makes a parser with a function to run and a text."""
    text = "estimate the memory that a pair needs, and which variants fit on a card, without downloading weights"
    plan = command("plan", _plan, text, page="plan", file="the plan")
    plan.add_argument("target", metavar="TARGET", help="Hub id, folder, zoo: name or GGUF file")
    plan.add_argument(
        "--draft", help="Hub id, folder, zoo: name, self:nf4, suffix, suffix+self:nf4, ... (default: suffix)"
    )
    plan.add_argument(
        "--vram",
        dest="memory",
        metavar="SIZE",
        help="memory of the card, such as 12 or 12GB (default: free memory of this machine)",
    )
    plan.add_argument(
        "--card",
        dest="card_name",
        metavar="NAME",
        help="name of the card, such as 'RTX 4070', for its memory and bandwidth",
    )
    plan.add_argument(
        "--context", type=int, default=8192, metavar="N", help="tokens of prompt and answer together" + DEFAULT
    )
    plan.add_argument(
        "--batch", dest="rows", type=int, default=1, metavar="N", help="sequences decoded together" + DEFAULT
    )
    plan.add_argument(
        "--quantization",
        metavar="NAME",
        help="number format of the target: nf4, int8, ... (default: the best that fits)",
    )
    plan.add_argument("--draft-quantization", metavar="NAME", help="number format of a draft model")
    add_draft_window(plan)
    plan.add_argument(
        "--draft-length",
        dest="drafted",
        type=int,
        default=16,
        metavar="N",
        help="tokens of the longest draft" + DEFAULT,
    )
    plan.add_argument(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        help="dtype of the models (default: bfloat16 on a card, the checkpoint's on a CPU)",
    )
    plan.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="device to plan for (default: a card if one is named, else this machine's)",
    )
    plan.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a checkpoint")


def _plan(args: argparse.Namespace) -> None:
    import torch

    from ..lab.plan import plan

    given = {name: value for name, value in vars(args).items() if name not in ("alone", "command", "json")}
    given["dtype"] = None if args.dtype in (None, "auto") else getattr(torch, args.dtype)
    try:
        found = plan(**given)
    except ValueError as error:
        name, _, text = str(error).partition(":")
        if name not in _OPTIONS:
            raise
        raise ValueError(f"{_OPTIONS[name]}:{text}") from error
    print_or_write(args.json, found.to_dict(), str(found))
