"""The trained drafts that people use, side by side: MTP, DFlash, DSpark, PARD, EAGLE-3 and a two-layer draft model, about
equally large and trained on the same tokens of the same text, interleaved in one run.

    python benchmarks/run.py drafts --work drafts --train-only      # about an hour on one core; goes on where it was stopped
    python benchmarks/run.py drafts --work drafts --json --pages

Held-out code, chains of fixed lengths, the same number of new tokens for all. A drafter whose folder in `--work` is finished is
not trained again. With `--model FOLDER --text PATH ...`, for another target and text.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

from safetensors import safe_open
from shared import Section, about, below, heading, opened, paired, raced

from assisted import MTP, DFlash, DraftModel, Eagle, Pard
from assisted.lab.bench import Result, Rules, read
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
KINDS = {"MTP": MTP, "EAGLE-3": Eagle, "DFlash": DFlash, "DSpark": DFlash}
TRAINING = {
    "model": "zoo:target",
    "text": (["zoo"], "to train on, as for `assisted train`"),
    "steps": (400, "of each training"),
    "batch": (8, "sequences of a training step"),
    "context": (128, "tokens of a training sequence"),
}
OPTIONS = {
    **TRAINING,
    "prompts": 8,
    "repeats": 2,
    "new_tokens": 64,
    "no_compile": False,
    "work": ("drafts", "folder of the trained drafters"),
    "heads": (list(TRAININGS), "the drafters"),
    "cpu_time": (False, "for a busy machine; with one thread"),
    "train_only": (False, "train and measure nothing"),
    "bfloat16": (False, "train in it, with a target in it"),
}
QUICK = {"steps": 2, "batch": 1, "context": 32, "heads": ["MTP"], "work": "/tmp/drafts-quick"}
SECTIONS = tuple(Section("benchmarks/trained-drafts", name, (name,)) for name in ("drafts", "drafts_smollm2"))
NO_DRAFT = "no draft"
VOCABULARY = ("embed_tokens", "lm_head", "markov_w1", "markov_w2")  # weights that grow with the vocabulary
COLUMNS = (
    *(
        "draft",
        "weights of layers",
        "over the vocabulary",
        "1 - TV",
        "draft length",
        "tokens per pass, T = 0",
        "T = 0.8",
    ),
    *("draft ms a round, T = 0", "speedup, T = 0", "T = 0.8"),
)


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


def spec(name, folder):
    """What drafts chains from a folder."""
    if name in KINDS:
        return KINDS[name](str(folder), tree=False)
    return (Pard if name == "PARD" else DraftModel)(str(folder))


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


def measure(args):
    folders = {name: Path(args.work) / name.lower().replace(" ", "-") for name in args.heads}
    for name, folder in folders.items():
        train_one(args, folder, *TRAININGS[name], *(("--dtype", "bfloat16", "--bfloat16") if args.bfloat16 else ()))
    if args.train_only:
        sys.exit()
    if args.cpu_time:
        time.perf_counter = time.process_time
    pair = opened(args.model, dtype="bfloat16" if args.bfloat16 else "float32")
    drafts = {NO_DRAFT: ("suffix", Never())}
    drafts |= {f"{name}, {n}": (spec(name, folder), n) for name, folder in folders.items() for n in (4, 7)}
    methods = paired(pair.target, pair.tokenizer, drafts)
    prompts = read(["code"], pair.tokenizer, args.prompts)
    races = {}
    for temperature in (0.0, 0.8):
        rules = Rules(args.new_tokens, temperature=temperature)
        races[f"{temperature:g}"] = raced(args, pair, methods, prompts, rules, target=args.model).to_dict()
    return {
        "about": about(pair, args),
        "new_tokens": args.new_tokens,
        "model": args.model,
        "cpu_time": args.cpu_time,
        "compiled": not args.no_compile,
        "trained": {name: trained(folder) for name, folder in folders.items()},
        "races": races,
    }


def markdown(found):
    its, of_drafts = found["about"], found["trained"]
    (tokens,) = {one["tokens"] for one in of_drafts.values()}
    modes = "its fastest mode" if found["compiled"] else "its fastest mode without a compiler"
    head = heading(
        "drafts",
        its,
        f"`{found['model']}`, {tokens:,} tokens of training for each drafter, {its['prompts']} prompts of held-out code, "
        f"{found['new_tokens']} new tokens, chains of a fixed length, {its['dtype']}",
        'All methods take turns in one run. "1 - TV" is the share of tokens accepted when sampling, at the first and at the '
        f"fifth drafted position of held-out text. Speedup is over plain `generate` in {modes}, with a 95% interval.",
        "Other processes ran meanwhile: times are CPU time of this one, and rough." if found["cpu_time"] else "",
    )
    greedy, sampled = ({row.name: row for row in Result.from_dict(r).points[0].ran} for r in found["races"].values())
    cells = []
    for name, row in greedy.items():
        drafter, _, length = name.removeprefix("assisted ").rpartition(", ")
        known, each = of_drafts.get(drafter), (row, sampled[name])
        if known is None and name != NO_DRAFT:
            continue
        sizes = ["", ""] if known is None else [f"{known[key] / 1e6:.2f} M" for key in ("layers", "vocabulary")]
        sure = [] if known is None else known["held_out"]["sampled"]
        drafting = (row.draft or 0.0) * row.milliseconds_per_token * (row.tokens_per_pass or 1.0)
        cells.append(
            [
                drafter or NO_DRAFT,
                *sizes,
                ", ".join(f"{share:.0%}" for share in sure[:5:4]),
                length if drafter else "",
                *(f"{one.tokens_per_pass or 1:.2f}" for one in each),
                f"{drafting:.2f}" if drafter else "",
                *("" if one.speedup is None else str(one.speedup) for one in each),
            ]
        )
    return below(head, COLUMNS, cells)
