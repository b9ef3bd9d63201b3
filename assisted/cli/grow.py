"""`assisted grow`: the arguments, and where the model goes. The work is done elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from .arguments import DEFAULT, STORED, device, print_json


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `grow` into the parser. command: makes a parser with a function to run and a text."""
    grow = command("grow", _grow, "write a small Llama in a larger shape, to measure the cost of that size")
    grow.add_argument("model", help="Hub id, folder or zoo: name of a Llama")
    grow.add_argument(
        "--size",
        required=True,
        help="0.25b, 1b, 8b, or HIDDENxINTERMEDIATExLAYERSxHEADSxKV_HEADS; same text, at the cost of that size",
    )
    grow.add_argument("--out", type=Path, required=True, help="the folder that is written")
    grow.add_argument("--dtype", default="bfloat16", choices=STORED, help=DEFAULT.strip())
    grow.add_argument("--device", default="auto", help="that computes it" + DEFAULT)
    grow.add_argument("--seed", type=int, default=0, help="of the new random weights" + DEFAULT)


def _grow(args: argparse.Namespace) -> None:
    import torch

    from ..bench import grown

    grown.parse(args.size)  # before anything is loaded
    small, tokenizer = grown.load_target(args.model, torch.float32)
    dtype = getattr(torch, args.dtype)
    model = grown.grow(small, args.size, device=device(args.device), dtype=dtype, seed=args.seed)
    grown.save(model, args.out, tokenizer)
    if args.json:
        print_json({"folder": str(args.out), "parameters": model.num_parameters(), "dtype": args.dtype})
    else:
        print(f"{args.out}\n{grown.note(model)}")
