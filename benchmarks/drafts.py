"""The trained drafts that people use, side by side: MTP, DFlash, DSpark, PARD, EAGLE-3 and a two-layer draft model, about
equally large and trained on the same tokens of the same text, interleaved in one run.

    python benchmarks/drafts.py --work drafts --train-only      # about an hour on one core; goes on where it was stopped
    python benchmarks/drafts.py --work drafts --out benchmarks/drafts.json --docs docs/benchmarks/trained-drafts.md
    python benchmarks/drafts.py --read benchmarks/drafts.json --docs docs/benchmarks/trained-drafts.md      # the table again

Held-out code, chains of fixed lengths, the same number of new tokens for all. A drafter whose folder in `--work` is finished is
not trained again. With `--model FOLDER --text PATH ...`, for another target and text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tables import about, arguments, figures, markdown_table, paired, publish, raced

from assisted import MTP, AssistedModelForCausalLM, DFlash, Eagle, Pard
from assisted.bench import Result, Rules, read
from assisted.lengths.policies import Never

TRAININGS: dict[str, tuple[str, ...]] = {
    "MTP": ("mtp", "--unroll", "3"),
    "EAGLE-3": ("eagle", "--unroll", "3", "--loss", "kl+tv"),
    "DFlash": ("dflash", "--anchors", "16"),
    "DSpark": ("dflash", "--anchors", "16", "--markov", "vanilla", "--next-token"),
    "PARD": ("pard", "--layers", "2", "--tokens", "7"),
    "draft model": ("distill", "--layers", "2"),
}
"""What follows `assisted train`, by the name of the row."""
NO_DRAFT = "no draft"
TEMPERATURES = (0.0, 0.8)
VOCABULARY = ("embed_tokens", "lm_head", "markov_w1", "markov_w2")  # weights that grow with the vocabulary


def train(args: argparse.Namespace) -> dict[str, Path]:
    """Train what is not trained yet, each in a process of its own. Returns the folders by name."""
    plan = ["--batch", args.batch, "--context", args.context, "--steps", args.steps, "--optimizer", "muon"]
    plan += ["--lr", "2e-3", "--matrix-lr", "0.02", "--evaluate-every", max(1, args.steps // 2)]
    folders = {name: args.work / name.lower().replace(" ", "-") for name in TRAININGS}
    for name, options in TRAININGS.items():
        if (folders[name] / "training.json").exists():
            continue
        own = [*options, "--target", args.model, "--text", *args.text, *plan, "--out", folders[name]]
        subprocess.run([sys.executable, "-m", "assisted", "train", *map(str, own)], check=True)
    return folders


def parser() -> argparse.ArgumentParser:
    numbers = {
        "--new-tokens": (64, "of each prompt"),
        "--steps": (400, "of each training"),
        "--batch": (8, "sequences of a training step"),
        "--context": (128, "tokens of a training sequence"),
    }
    found = arguments(__doc__, prompts=8, repeats=2, threads=1, numbers=numbers)
    found.add_argument("--work", type=Path, default=Path("drafts"), help="holds the trained drafters (default: drafts)")
    found.add_argument("--model", default="zoo:target", help="the target (default: %(default)s)")
    found.add_argument("--text", nargs="+", default=["zoo"], help="to train on, as for `assisted train` (default: zoo)")
    found.add_argument("--train-only", action="store_true", help="train and measure nothing")
    return found


def main() -> None:
    args = parser().parse_args()
    if args.train_only:
        train(args)


if __name__ == "__main__":
    main()
