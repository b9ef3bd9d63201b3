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
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tables import about, arguments, figures, markdown_table, paired, publish, raced

from assisted import MTP, AssistedModelForCausalLM, DFlash, DraftModel, Eagle, Pard
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
LENGTHS = (4, 7)
COLUMNS = (
    "draft",
    "weights of layers",
    "over the vocabulary",
    "1 - TV",
    "draft length",
    "tokens per pass, T = 0",
    "T = 0.8",
    "draft ms a round, T = 0",
    "speedup, T = 0",
    "T = 0.8",
)


def train(args: argparse.Namespace) -> dict[str, Path]:
    """Train what is not trained yet, each in a process of its own. Returns the folders by name."""
    folders = {name: args.work / name.lower().replace(" ", "-") for name in TRAININGS}
    folders = {name: folder for name, folder in folders.items() if name in args.only}
    dtype = ("--dtype", "bfloat16", "--bfloat16") if args.bfloat16 else ()
    for name, folder in folders.items():
        train_one(args, folder, *TRAININGS[name], *dtype)
    return folders


def train_one(args: argparse.Namespace, folder: Path, *own: object) -> None:
    """Train into a folder that is not finished. own: what follows `assisted train`; it may override the plan."""
    if (folder / "training.json").exists():
        return
    method, *options = own
    plan = ["--batch", args.batch, "--context", args.context, "--steps", args.steps, "--optimizer", "muon"]
    plan += ["--lr", "2e-3", "--matrix-lr", "0.02", "--evaluate-every", max(1, args.steps // 2)]
    command = [method, "--target", args.model, "--text", *args.text, *plan, "--out", folder, *options]
    subprocess.run([sys.executable, "-m", "assisted", "train", *map(str, command)], check=True)


def specs(folders: dict[str, Path]) -> dict[str, Any]:
    """What drafts chains from each folder, by name."""
    kinds: dict[str, Any] = {"MTP": MTP, "EAGLE-3": Eagle, "DFlash": DFlash, "DSpark": DFlash, "PARD": Pard}
    found = {}
    for name, folder in folders.items():
        kind = kinds.get(name, DraftModel)
        found[name] = kind(str(folder)) if kind in (Pard, DraftModel) else kind(str(folder), tree=False)
    return found


def trained(folder: Path) -> dict[str, Any]:
    """How many numbers a drafter has, and how its training went."""
    sizes = {False: 0, True: 0}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                grows = any(part in name for part in VOCABULARY)
                sizes[grows] += math.prod(tensors.get_slice(name).get_shape())
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    settings = json.loads((folder / "training.json").read_text())
    return {
        "layers": sizes[False],
        "vocabulary": sizes[True],
        "tokens": settings["steps"] * settings["batch"] * settings["context"],
        "held_out": [line for line in lines if "greedy" in line][-1],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    folders = train(args)
    if args.cpu_time:
        time.perf_counter = time.process_time
    pair = AssistedModelForCausalLM.from_pretrained(args.model)
    drafts: dict[str, tuple[Any, Any]] = {NO_DRAFT: ("suffix", Never())}
    drafts |= {f"{name}, {n}": (spec, n) for name, spec in specs(folders).items() for n in LENGTHS}
    methods = paired(pair.target, pair.tokenizer, drafts)
    prompts = read(["code"], pair.tokenizer, args.prompts)
    races = {}
    for temperature in TEMPERATURES:
        rules = Rules(args.new_tokens, temperature=temperature)
        races[f"{temperature:g}"] = raced(args, pair, methods, prompts, rules, target=args.model).to_dict()
    return {
        "about": about(pair, prompts=args.prompts, repeats=args.repeats),
        "new_tokens": args.new_tokens,
        "model": args.model,
        "cpu_time": args.cpu_time,
        "compiled": not args.no_compile,
        "trained": {name: trained(folder) for name, folder in folders.items()},
        "races": races,
    }


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    its, of_drafts = found["about"], found["trained"]
    (tokens,) = {one["tokens"] for one in of_drafts.values()}
    modes = "its fastest mode" if found["compiled"] else "its fastest mode without a compiler"
    busy = " Other processes ran meanwhile: times are CPU time of this one, and rough." if found["cpu_time"] else ""
    lines = [
        f"`python benchmarks/drafts.py`: `{found['model']}`, {tokens:,} tokens of training for each drafter, {its['prompts']} "
        f"prompts of held-out code, {found['new_tokens']} new tokens, chains of a fixed length, {its['dtype']}, CPU threads: "
        f'{its["threads"]}, {its["processor"]}, torch {its["torch"]}. All methods take turns in one run. "1 - TV" is the share '
        "of tokens accepted when sampling, at the first and at the fifth drafted position of held-out text. Speedup is over "
        f"plain `generate` in {modes}, with a 95% interval.{busy}",
        "",
    ]
    rows = [{row.name: row for row in Result.from_dict(race).points[0].ran} for race in found["races"].values()]
    cells = []
    for name in rows[0]:
        drafter, _, length = name.removeprefix("assisted ").rpartition(", ")
        known, cold = of_drafts.get(drafter), rows[0][name]
        if known is None and name not in (NO_DRAFT, f"assisted {NO_DRAFT}"):
            continue
        sizes = ["", ""] if known is None else [f"{known[key] / 1e6:.2f} M" for key in ("layers", "vocabulary")]
        sure = [] if known is None else known["held_out"]["sampled"]
        each = [rows[0][name], rows[1][name]]
        drafting = (cold.draft or 0.0) * (cold.milliseconds_per_token or 0.0) * (cold.tokens_per_pass or 1.0)
        cells.append(
            [
                drafter or NO_DRAFT,
                *sizes,
                f"{sure[0]:.0%}, {sure[4]:.0%}" if len(sure) > 4 else f"{sure[0]:.0%}" if sure else "",
                length if drafter else "",
                *(f"{row.tokens_per_pass or 1:.2f}" for row in each),
                f"{drafting:.2f}" if drafter else "",
                *("" if row.speedup is None else str(row.speedup) for row in each),
            ]
        )
    return "\n".join([*lines, *markdown_table(COLUMNS, cells)])


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
    found.add_argument("--only", nargs="+", default=list(TRAININGS), choices=list(TRAININGS), help="(default: all)")
    found.add_argument("--cpu-time", action="store_true", help="for a busy machine; with one thread")
    found.add_argument("--train-only", action="store_true", help="train and measure nothing")
    found.add_argument("--bfloat16", action="store_true", help="train in it, with a target in it")
    return found


def main() -> None:
    args = parser().parse_args()
    if args.train_only:
        train(args)
        return
    publish(markdown(figures(args, measure)), args.docs, args.read.stem if args.read else "drafts")


if __name__ == "__main__":
    main()
