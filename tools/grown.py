"""Write a grown target (`assisted.lab.grown`) into a folder that AutoModelForCausalLM loads.

python -m tools.grown zoo:target --size 1b --out DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from assisted.cli.arguments import DEFAULT, STORED, target_and_tokenizer
from assisted.cli.arguments import device as chosen_device
from assisted.lab.grown import PREFIX, RECORD, SHAPES, grow, parse


def load_target(
    name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target as the scripts in benchmarks/ name it, and its tokenizer.

    Args:
        name: "grown:SIZE" is the shipped target, grown to a size of SHAPES or to five numbers (see `grow`), made in memory;
            otherwise a Hub id, a folder, a GGUF file or "zoo:NAME".
        dtype: None takes the checkpoint's own.
        device: of the target.
    """
    is_grown, size = name.startswith(PREFIX), name.removeprefix(PREFIX)
    if is_grown:
        parse(size)  # before anything is loaded
    placed: dict[str, Any] = {} if is_grown or str(device) == "cpu" else {"device_map": {"": device}}
    model, tokenizer = target_and_tokenizer("zoo:target" if is_grown else name, dtype=dtype or "auto", **placed)
    return grow(model, size, device=device) if is_grown else model, tokenizer


def save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a grown model, its tokenizer and a README that says what it is; AutoModelForCausalLM loads the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record, vocabulary = getattr(model.config, RECORD), model.config.vocab_size
    shape = parse(record["size"])
    (folder / "README.md").write_text(
        f"# A grown model, for measuring\n\n"
        f"This is `{record['from']}` in a larger shape (hidden x intermediate x layers x heads x key-value heads: {shape}),\n"
        f"{model.num_parameters() / 1e9:.2f} billion parameters. The added weights are computed and change nothing: its\n"
        f"text is that of the small model, its cost that of a large one. Its vocabulary ({vocabulary}) is the small\n"
        f"one's, so the output layer is cheaper than a real model's. Do not use it for anything but measuring.\n\n"
        f"Made by `python -m tools.grown`, size {record['size']}, seed {record['seed']}.\n",
        encoding="utf-8",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write a grown model into a folder. argv: the arguments; None takes those of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.grown",
        description="Write a small Llama in a larger shape, to measure the cost of that size.",
    )
    parser.add_argument("model", help="Hub id, folder or zoo: name of a Llama")
    parser.add_argument(
        "--size",
        required=True,
        help=f"{', '.join(SHAPES)}, or HIDDENxINTERMEDIATExLAYERSxHEADSxKV_HEADS; same text, at the cost of that size",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written")
    parser.add_argument("--dtype", default="bfloat16", choices=STORED, help=DEFAULT.strip())
    parser.add_argument("--device", default="auto", help="that computes it" + DEFAULT)
    parser.add_argument("--seed", type=int, default=0, help="of the new random weights" + DEFAULT)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    try:
        parse(args.size)  # before anything is loaded
        small, tokenizer = target_and_tokenizer(args.model, dtype=torch.float32)
        model = grow(small, args.size, device=chosen_device(args.device), dtype=dtype, seed=args.seed)
    except ValueError as error:
        parser.error(str(error))
    save(model, args.out, tokenizer)
    if args.json:
        print(
            json.dumps({"folder": str(args.out), "parameters": model.num_parameters(), "dtype": args.dtype}, indent=2)
        )
    else:
        print(f"{args.out}: {model.num_parameters() / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
