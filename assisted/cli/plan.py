"""`assisted plan`: the arguments, and where the result goes. The counting is done elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from .arguments import add_draft_window, add_dtype, option, print_or_write

_OPTIONS = {"memory": "vram", "rows": "batch", "drafted": "draft-length"}
"""The command's names for arguments that have other names in Python."""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `plan` into the parser. command: makes a parser with a function to run and a text."""
    text = "estimate the memory that a pair needs, and which variants fit on a card, without downloading weights"
    plan = command("plan", _plan, text, page="plan", file="the plan")
    option(plan, "target", "Hub id, folder, zoo: name or GGUF file", metavar="TARGET")
    option(plan, "--draft", "Hub id, folder, zoo: name, self:nf4, suffix, suffix+self:nf4, ... (default: suffix)")
    memory = "memory of the card, such as 12 or 12GB (default: free memory of this machine)"
    option(plan, "--vram", memory, dest="memory", metavar="SIZE")
    card = "name of the card, such as 4070 or 'RTX 4060 Ti 16GB', for its memory and bandwidth"
    option(plan, "--card", card, dest="card_name", metavar="NAME")
    option(plan, "--context", "tokens of prompt and answer together", 8192, metavar="N")
    option(plan, "--batch", "sequences decoded together", 1, dest="rows", metavar="N")
    formats = "number format of the target: nf4, int8, ... (default: the best that fits)"
    option(plan, "--quantization", formats, metavar="NAME")
    option(plan, "--draft-quantization", "number format of a draft model", metavar="NAME")
    add_draft_window(plan)
    option(plan, "--draft-length", "tokens of the longest draft", 16, dest="drafted", metavar="N")
    add_dtype(plan, "bfloat16 on a card, the checkpoint's on a CPU")
    where = "device to plan for (default: a card if one is named, else this machine's)"
    option(plan, "--device", where, choices=("cuda", "cpu"))
    option(plan, "--trust-remote-code", "run code that comes with a checkpoint", False)


def _plan(args: argparse.Namespace) -> None:
    import torch

    from ..lab.plan import plan

    given = {name: value for name, value in vars(args).items() if name not in ("alone", "command", "parser", "json")}
    given["dtype"] = None if args.dtype in (None, "auto") else getattr(torch, args.dtype)
    try:
        found = plan(**given)
    except ValueError as error:
        name, _, text = str(error).partition(":")
        if name not in _OPTIONS:
            raise
        raise ValueError(f"{_OPTIONS[name]}:{text}") from error
    print_or_write(args.json, found.to_dict(), str(found))
