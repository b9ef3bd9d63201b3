"""`assisted shrink-vocabulary`: the arguments, and what is printed. The draft is changed elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .arguments import add_text, option, print_json, target_and_tokenizer


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `shrink-vocabulary` into the parser. command: makes a parser with a function to run and a text."""
    text = "copy a draft so that it predicts only the most frequent tokens of a text"
    shrink = command("shrink-vocabulary", _shrink, text, page="shrink-vocabulary")
    option(shrink, "draft", "draft model, EAGLE-3 head or block drafter: folder or Hub id", metavar="DRAFT")
    option(shrink, "--target", "Hub id, folder or zoo: name", required=True)
    option(shrink, "--tokens", "number of tokens to keep", type=int, required=True, metavar="N")
    option(shrink, "--out", "new or empty folder for the copy", type=Path, required=True, metavar="DIR")
    add_text(shrink, "count", "count")


def _shrink(args: argparse.Namespace) -> None:
    import numpy as np

    from ..lab.training.shrink import shrink_vocabulary
    from ..lab.training.written import write
    from ..methods.shared.training.data import read_text

    target, tokenizer = target_and_tokenizer(args.target)
    text = read_text(tokenizer, args.text or (), args.dataset, args.documents)
    if args.written:
        text = replace(text, training=np.concatenate([text.training, write(target, text.training, args.written)]))
    found = shrink_vocabulary(args.draft, args.tokens, text, args.out, target)
    if args.json:
        print_json({"folder": str(args.out), **found})
        return
    print(f"{args.out}: {found['tokens']:,} of {found['of']:,} tokens, {found['coverage']:.2%} of the held-out text")
