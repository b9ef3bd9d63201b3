"""`assisted grow`: the arguments, and where the model goes. Knows arguments alone until the command runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

__all__ = ["add"]

_DEFAULT = " (default: %(default)s)"


def add(command: Callable[..., argparse.ArgumentParser], device: Callable[[str], str]) -> None:
    """Put `grow` into the parser.

    command: makes a parser with a function to run and a text. device: what --device names, checked.
    """
    grow = command("grow", partial(_grow, device), "write a small Llama in a larger shape, for measuring")
    grow.add_argument("model", help="Hub id, folder or zoo: name of a Llama")
    grow.add_argument(
        "--size",
        required=True,
        help="0.25b, 1b, 8b, or HIDDENxINTERMEDIATExLAYERSxHEADSxKV_HEADS; the same text at the cost of that size",
    )
    grow.add_argument("--out", type=Path, required=True, help="the folder that is written")
    grow.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help=_DEFAULT.strip())
    grow.add_argument("--device", default="auto", help="where it is made" + _DEFAULT)
    grow.add_argument("--seed", type=int, default=0, help="of the weights that are drawn" + _DEFAULT)


def _grow(device: Callable[[str], str], args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from .. import zoo
    from ..vocabulary import find_tokenizer
    from . import grown

    grown.parse(args.size)  # before anything is loaded
    path = zoo.resolve(args.model)
    small = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    dtype = getattr(torch, args.dtype)
    model = grown.grow(small, args.size, device=device(args.device), dtype=dtype, seed=args.seed)
    grown.save(model, args.out, find_tokenizer(path))
    if args.json:
        written = {"folder": str(args.out), "parameters": model.num_parameters(), "dtype": args.dtype}
        print(json.dumps(written, indent=2))
    else:
        print(f"{args.out}\n{grown.note(model)}")
