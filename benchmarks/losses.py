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
from typing import Any

from drafts import TRAININGS, train_one
from tables import arguments, figures, markdown_table, publish

LOSSES = ("kl", "kl+tv", "nla", "lk-hybrid")
HEADS = ("EAGLE-3", "MTP")
COLUMNS = ("head", "loss", "seed", "1 - TV", "top-1 token is the target's")


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
    plan = {name: getattr(args, name) for name in ("model", "steps", "batch", "context", "rows")}
    return {**plan, "runs": runs}


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    tokens = found["steps"] * found["batch"] * found["context"]
    kinds = {"sampled": "sampled_error", "greedy": "error"}
    cells = [
        [
            run["head"],
            f"`{run['loss']}`",
            run["seed"],
            *(" ".join(f"{share:.1%}" for share in run[kind]) for kind in kinds),
        ]
        for run in sorted(
            found["runs"], key=lambda run: (HEADS.index(run["head"]), LOSSES.index(run["loss"]), run["seed"])
        )
    ]
    sampled, greedy = (max(half for run in found["runs"] for half in run[error]) for error in kinds.values())
    about = (
        f"`python benchmarks/losses.py`: `{found['model']}`, {tokens:,} tokens of training for each run, {found['rows']} "
        f"held-out sequences of {found['context']} tokens, the same for all, teacher-forced, by drafted position. The 95% "
        f"intervals over sequences are ± {sampled:.1%} or less for 1 - TV and ± {greedy:.1%} or less for the top-1 token."
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
