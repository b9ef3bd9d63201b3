"""Which loss trains a head that is accepted most often: the same head, budget and seeds with every loss.

    python benchmarks/losses.py --work losses --out benchmarks/losses.json --docs docs/benchmarks/trained-drafts.md
    python benchmarks/losses.py --read benchmarks/losses.json --docs docs/benchmarks/trained-drafts.md

Held-out acceptance from each run's training.jsonl; no time is measured. Runs that are finished in `--work` are not repeated.
With `--model FOLDER --text PATH ...`, for another target and text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from drafts import TRAININGS, train_one
from tables import arguments, figures, markdown_table, publish

LOSSES = ("kl", "kl+tv", "nla", "lk-hybrid")
HEADS = ("EAGLE-3", "MTP")
COLUMNS = ("head", "loss", "1 - TV", "top-1 token is the target's")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for seed in range(args.seeds):
        for head in args.only:
            for loss in LOSSES:
                folder = args.work / f"{head.lower()}-{loss}-{seed}"
                rows = ("--evaluate-rows", args.rows, "--evaluate-every", args.steps)
                train_one(args, folder, *TRAININGS[head], "--loss", loss, "--seed", seed, *rows)
                lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
                runs.append({"head": head, "loss": loss, "seed": seed, **lines[-1]})
    plan = {name: getattr(args, name) for name in ("model", "steps", "batch", "context", "rows", "seeds")}
    return {**plan, "runs": runs}


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    tokens = found["steps"] * found["batch"] * found["context"]
    of_rows, of_seeds, cells = [], [], []
    for head in dict.fromkeys(run["head"] for run in found["runs"]):
        for loss in LOSSES:
            runs = [run for run in found["runs"] if (run["head"], run["loss"]) == (head, loss)]
            shown = []
            for kind, error in (("sampled", "sampled_error"), ("greedy", "error")):
                positions = list(zip(*(run[kind] for run in runs), strict=True))
                shown.append(" ".join(f"{mean(shares):.1%}" for shares in positions))
                of_seeds += [max(shares) - min(shares) for shares in positions]
                of_rows += [half for run in runs for half in run[error]]
            cells.append([head, f"`{loss}`", *shown])
    about = (
        f"`python benchmarks/losses.py`: `{found['model']}`, {tokens:,} tokens of training for each run, {found['rows']} "
        f"held-out sequences of {found['context']} tokens, the same for all. Shares are the mean of {found['seeds']} seeds, by "
        f"drafted position, teacher-forced. The 95% interval over sequences is ± {max(of_rows):.1%} or less, and the seeds "
        f"differ by {max(of_seeds):.1%} or less."
    )
    return "\n".join([about, "", *markdown_table(COLUMNS, cells)])


def parser() -> argparse.ArgumentParser:
    numbers = {
        "--steps": (200, "of each training"),
        "--batch": (8, "sequences of a training step"),
        "--context": (128, "tokens of a training sequence"),
        "--rows": (128, "held-out sequences"),
        "--seeds": (2, "trainings of each kind"),
    }
    found = arguments(__doc__, ("--threads", "--out", "--docs", "--read"), numbers=numbers)
    found.add_argument("--work", type=Path, default=Path("losses"), help="holds the trained heads (default: losses)")
    found.add_argument("--model", default="zoo:target", help="the target (default: %(default)s)")
    found.add_argument("--text", nargs="+", default=["zoo"], help="to train on, as for `assisted train` (default: zoo)")
    found.add_argument("--only", nargs="+", default=list(HEADS), choices=HEADS, help="heads to train (default: all)")
    return found


def main() -> None:
    args = parser().parse_args()
    publish(markdown(figures(args, measure)), args.docs, "losses")


if __name__ == "__main__":
    main()
