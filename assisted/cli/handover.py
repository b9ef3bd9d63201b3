"""`assisted handover`: the arguments, and what is printed. The folder is written elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from .arguments import STORED, option, print_json

ENGINES = ("vllm", "sglang", "trtllm", "llamacpp")  # those of assisted.lab.handover, whose import takes seconds


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `handover` into the parser. command: makes a parser with a function to run and a text."""
    text = "write a pair into a folder that a serving engine reads, with the command that starts the engine"
    handover = command("handover", _handover, text)
    handover.description = f"{handover.description} See docs/integrations/handover.md."
    option(handover, "engine", "serving engine; trtllm is TensorRT-LLM", choices=ENGINES)
    option(handover, "pair", "saved pair, or a target: Hub id, folder, zoo: name", metavar="PAIR")
    option(handover, "--out", "new or empty folder for the result", required=True, metavar="DIR")
    drafts = "Hub id, folder, zoo: name, ngram, suffix, or mtp for the target's own multi-token prediction layers"
    option(handover, "--draft", f"{drafts} (default: a saved pair's own, else suffix)")
    text = "tokens that the engine drafts (default: the pair's if it is fixed, else one that suits the method)"
    option(handover, "--draft-length", text, type=int, metavar="N")
    option(handover, "--dtype", "dtype of the weights (default: the checkpoint's)", choices=STORED)


def _handover(args: argparse.Namespace) -> None:
    from ..lab.handover import hand_over

    found = hand_over(args.engine, args.pair, args.out, args.draft, args.draft_length, args.dtype)
    if args.json:
        print_json(found.to_dict())
        return
    print(found)
    for note in found.notes:
        print(note, file=sys.stderr)
