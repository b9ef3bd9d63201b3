"""Trained drafts: kinds of drafts, losses and ways of training, each with the same tokens of the same text."""

import json
import math
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from shared import Case, Section, about, opened, paired, raced, rows_of

from assisted import MTP, DFlash, DraftModel, Eagle, Pard
from assisted.lab.bench import Rules, read
from assisted.lengths.policies import Never

TRAININGS = {
    "MTP": ("mtp", "--unroll", "3"),
    "EAGLE-3": ("eagle", "--unroll", "3", "--loss", "kl+tv"),
    "DFlash": ("dflash", "--anchors", "16"),
    "DSpark": ("dflash", "--anchors", "16", "--markov", "vanilla", "--next-token"),
    "PARD": ("pard", "--layers", "2", "--tokens", "7"),
    "draft model": ("distill", "--layers", "2"),
}
"""What follows `assisted train`, by the name of the row."""
CHAINS = {"MTP": MTP, "EAGLE-3": Eagle, "DFlash": DFlash, "DSpark": DFlash}
TRAINING = {
    "model": "zoo:target",
    "text": (["zoo"], "to train on, as for `assisted train`"),
    "steps": (400, "of each training"),
    "batch": (8, "sequences of a training step"),
    "context": (128, "tokens of a training sequence"),
}
NO_DRAFT = "no draft"
VOCABULARY = ("embed_tokens", "lm_head", "markov_w1", "markov_w2")  # weights that grow with the vocabulary


def train_one(args, folder, *own):
    """Train into a folder that is not finished. own: what follows `assisted train`; it may override the plan."""
    if (folder / "training.json").exists():
        return
    method, *options = own
    plan = ["--batch", args.batch, "--context", args.context, "--steps", args.steps, "--optimizer", "muon"]
    plan += ["--lr", "2e-3", "--matrix-lr", "0.02", "--evaluate-every", max(1, args.steps // 2)]
    plan += ["--evaluate-rows", 2] if args.quick else []
    command = [method, "--target", args.model, "--text", *args.text, *plan, "--out", folder, *options]
    subprocess.run([sys.executable, "-m", "assisted", "train", *map(str, command)], check=True)


def trained(folder):
    """How many numbers a drafter has, and how its training went."""
    sizes = {False: 0, True: 0}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                grows = any(part in name for part in VOCABULARY)
                sizes[grows] += math.prod(tensors.get_slice(name).get_shape())
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    settings = json.loads((folder / "training.json").read_text())
    tokens = math.prod(settings[name] for name in ("steps", "batch", "context"))
    held_out = [line for line in lines if "greedy" in line][-1]
    return {"layers": sizes[False], "vocabulary": sizes[True], "tokens": tokens, "held_out": held_out}


def measure_drafts(args):
    folders = {name: Path(args.work) / name.lower().replace(" ", "-") for name in args.heads}
    for name, folder in folders.items():
        train_one(args, folder, *TRAININGS[name], *(("--dtype", "bfloat16", "--bfloat16") if args.bfloat16 else ()))
    if args.train_only:
        sys.exit()
    pair = opened(args.model, dtype="bfloat16" if args.bfloat16 else "float32")
    drafts = {NO_DRAFT: ("suffix", Never())}
    for name, folder in folders.items():
        spec = (Pard if name == "PARD" else DraftModel)(str(folder))
        spec = CHAINS[name](str(folder), tree=False) if name in CHAINS else spec
        drafts |= {f"{name}, {length}": (spec, length) for length in (4, 7)}
    methods, prompts = paired(pair.target, pair.tokenizer, drafts), read(["code"], pair.tokenizer, args.prompts)
    rules = {f"{temperature:g}": Rules(args.new_tokens, temperature=temperature) for temperature in (0.0, 0.8)}
    return {
        **{"about": about(pair, args), "new_tokens": args.new_tokens, "model": args.model},
        "compiled": not args.no_compile,
        "trained": {name: trained(folder) for name, folder in folders.items()},
        "races": {
            name: raced(args, pair, methods, prompts, each, target=args.model).to_dict() for name, each in rules.items()
        },
    }


def rows_of_drafts(found):
    """With the draft's name and length, what is known of its training, and both of its races."""
    greedy, sampled = map(rows_of, found["races"].values())
    for name, row in greedy.items():
        draft, _, length = name.removeprefix("assisted ").rpartition(", ")
        if draft in found["trained"] or name == NO_DRAFT:
            yield {"draft": draft or NO_DRAFT, "length": length * bool(draft), "known": found["trained"].get(draft)} | {
                "greedy": row,
                "sampled": sampled[name],
                "drafting": (row.draft or 0.0) * row.milliseconds_per_token * (row.tokens_per_pass or 1.0),
            }


def of_known(show):
    return lambda row: show(row["known"]) if row["known"] else ""


drafts = Case(
    "drafts",
    """The trained drafts that people use, side by side: MTP, DFlash, DSpark, PARD, EAGLE-3 and a two-layer draft model, about
equally large and trained on the same tokens of the same text, interleaved in one run.

    python benchmarks/run.py drafts --work drafts --train-only      # about an hour on one core; goes on where it was stopped
    python benchmarks/run.py drafts --work drafts --json --pages

Held-out code, chains of fixed lengths, the same number of new tokens for all. A drafter whose folder in `--work` is finished is
not trained again. With `--model FOLDER --text PATH ...`, for another target and text.
""",
    measure_drafts,
    options={
        **TRAINING,
        "prompts": 8,
        "repeats": 2,
        "new_tokens": 64,
        "no_compile": False,
        "work": ("drafts", "folder of the trained drafters"),
        "heads": (list(TRAININGS), "the drafters"),
        "train_only": (False, "train and measure nothing"),
        "bfloat16": (False, "train in it, with a target in it"),
    },
    quick={"steps": 2, "batch": 1, "context": 32, "heads": ["MTP"], "work": "/tmp/drafts-quick"},
    sections=tuple(Section("benchmarks/trained-drafts", name, (name,)) for name in ("drafts", "drafts_smollm2")),
    what="`{model}`, {tokens:,} tokens of training for each drafter, {prompts} prompts of held-out code, {new_tokens} new "
    "tokens, chains of a fixed length, {dtype}",
    notes=(
        'All methods take turns in one run. "1 - TV" is the share of tokens accepted when sampling, at the first and at the '
        "fifth drafted position of held-out text. Speedup is over plain `generate` in its fastest mode{unless}, with a 95% "
        "interval.",
    ),
    words=lambda found: {
        "tokens": next(iter(found["trained"].values()))["tokens"],
        "unless": "" if found["compiled"] else " without a compiler",
    },
    columns={
        "draft": "{draft}",
        "weights of layers": of_known(lambda known: f"{known['layers'] / 1e6:.2f} M"),
        "over the vocabulary": of_known(lambda known: f"{known['vocabulary'] / 1e6:.2f} M"),
        "1 - TV": of_known(lambda known: ", ".join(f"{share:.0%}" for share in known["held_out"]["sampled"][:5:4])),
        "draft length": "{length}",
        "tokens per pass, T = 0": lambda row: f"{row['greedy'].tokens_per_pass or 1:.2f}",
        "T = 0.8": lambda row: f"{row['sampled'].tokens_per_pass or 1:.2f}",
        "draft ms a round, T = 0": lambda row: f"{row['drafting']:.2f}" if row["length"] else "",
        "speedup, T = 0": lambda row: row["greedy"].speedup or "",
        "T = 0.8 ": lambda row: row["sampled"].speedup or "",
    },
    rows=rows_of_drafts,
)
