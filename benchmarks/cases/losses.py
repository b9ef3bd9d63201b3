"""Which loss trains a head that is accepted most often: the same head, budget and seeds with every loss.

Held-out acceptance from each run's training.jsonl; no time is measured. Runs that are finished in `--work` are not repeated.
With `--model FOLDER --text PATH ...`, for another target and text.
"""

import json
from pathlib import Path

from cases.drafts import TRAINING, TRAININGS, train_one
from shared import Section, below

LOSSES = ("kl", "kl+tv", "nla", "lk-hybrid")
HEADS = ("EAGLE-3", "MTP")
OPTIONS = {
    **TRAINING,
    "steps": (200, "of each training"),
    "rows": (128, "held-out sequences"),
    "seeds": (2, "trainings of each kind"),
    "work": ("losses", "folder of the trained heads"),
    "heads": (list(HEADS), "that are trained"),
}
QUICK = {"steps": 2, "batch": 1, "context": 32, "rows": 2, "seeds": 1, "heads": ["MTP"], "work": "/tmp/losses-quick"}
SECTIONS = (Section("benchmarks/trained-drafts", "losses"),)


def measure(args):
    runs = []
    for seed in range(args.seeds):
        for head in args.heads:
            for loss in LOSSES:
                folder = Path(args.work) / f"{head.lower()}-{loss}-{seed}"
                rows = ("--evaluate-rows", args.rows, "--evaluate-every", args.steps)
                train_one(args, folder, *TRAININGS[head], "--loss", loss, "--seed", seed, *rows)
                lines = (folder / "training.jsonl").read_text().splitlines()
                runs.append({"head": head, "loss": loss, "seed": seed, **json.loads(lines[-1])})
    return {**{name: getattr(args, name) for name in ("model", "steps", "batch", "context", "rows")}, "runs": runs}


def markdown(found):
    tokens = found["steps"] * found["batch"] * found["context"]
    order = sorted(found["runs"], key=lambda run: (HEADS.index(run["head"]), LOSSES.index(run["loss"]), run["seed"]))
    cells = [
        [run["head"], f"`{run['loss']}`", run["seed"]]
        + [" ".join(f"{share:.1%}" for share in run[kind]) for kind in ("sampled", "greedy")]
        for run in order
    ]
    sampled, greedy = (max(half for run in order for half in run[error]) for error in ("sampled_error", "error"))
    head = (
        f"`python benchmarks/run.py losses`: `{found['model']}`, {tokens:,} tokens of training for each run, {found['rows']} "
        f"held-out sequences of {found['context']} tokens, the same for all, teacher-forced, by drafted position. The 95% "
        f"intervals over sequences are ± {sampled:.1%} or less for 1 - TV and ± {greedy:.1%} or less for the top-1 token."
    )
    return below(head, ("head", "loss", "seed", "1 - TV", "top-1 token is the target's"), cells)
