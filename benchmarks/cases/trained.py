"""Trained drafts: kinds of drafts, losses and ways of training, each with the same tokens of the same text."""

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch.nn.functional as F
from safetensors import safe_open
from shared import Case, Section, about, opened, page, paired, raced, rows_of, shown

from assisted import MTP, AssistedModelForCausalLM, DFlash, DraftModel, Eagle, Pard
from assisted.lab.bench import Rules, read
from assisted.lab.training.trainer import train
from assisted.lengths.policies import Never
from assisted.methods.draft_model.train import Distillation, DistillSettings
from assisted.methods.shared.training.data import read_text
from assisted.methods.shared.training.method import Plan

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
    if args.cpu_time:
        time.perf_counter = time.process_time
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
        **{"cpu_time": args.cpu_time, "compiled": not args.no_compile},
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
        "cpu_time": (False, "for a busy machine; with one thread"),
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
        "{clock}",
    ),
    words=lambda found: {
        "tokens": next(iter(found["trained"].values()))["tokens"],
        "unless": "" if found["compiled"] else " without a compiler",
        "clock": "Other processes ran meanwhile: times are CPU time of this one, and rough." * found["cpu_time"],
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

LOSSES = ("kl", "kl+tv", "nla", "lk-hybrid")
HEADS = ("EAGLE-3", "MTP")


def measure_losses(args):
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


def text_of_losses(found):
    order = sorted(found["runs"], key=lambda run: (HEADS.index(run["head"]), LOSSES.index(run["loss"]), run["seed"]))
    tokens = found["steps"] * found["batch"] * found["context"]
    sampled, greedy = (max(half for run in order for half in run[error]) for error in ("sampled_error", "error"))
    head = (
        f"`python benchmarks/run.py losses`: `{found['model']}`, {tokens:,} tokens of "
        f"training for each run, {found['rows']} held-out sequences of {found['context']} tokens, the same for all, "
        f"teacher-forced, by drafted position. The 95% intervals over sequences are ± {sampled:.1%} or less for 1 - TV and ± "
        f"{greedy:.1%} or less for the top-1 token."
    )
    columns = {
        **{"head": "{head}", "loss": "`{loss}`", "seed": "{seed}"},
        "1 - TV": lambda run: " ".join(f"{share:.1%}" for share in run["sampled"]),
        "top-1 token is the target's": lambda run: " ".join(f"{share:.1%}" for share in run["greedy"]),
    }
    return page(head, shown(columns, order))


losses = Case(
    "losses",
    """Which loss trains a head that is accepted most often: the same head, budget and seeds with every loss.

Held-out acceptance from each run's training.jsonl; no time is measured. Runs that are finished in `--work` are not repeated.
With `--model FOLDER --text PATH ...`, for another target and text.
""",
    measure_losses,
    options={
        **TRAINING,
        "steps": (200, "of each training"),
        "rows": (128, "held-out sequences"),
        "seeds": (2, "trainings of each kind"),
        "work": ("losses", "folder of the trained heads"),
        "heads": (list(HEADS), "that are trained"),
    },
    quick={
        **{"steps": 2, "batch": 1, "context": 32, "rows": 2, "seeds": 1, "heads": ["MTP"]},
        "work": "/tmp/losses-quick",
    },
    sections=(Section("benchmarks/trained-drafts", "losses"),),
    markdown=text_of_losses,
)


class OnText(Distillation):
    """Plain language modelling, without the target."""

    def loss(self, ids, step):
        logits = self.student(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def drafting(target, draft, tokenizer, prompts):
    """Tokens per pass and acceptance by position at both temperatures, over the same prompts."""
    from tools.shipped import card

    model = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer)
    found = (card.drafting(model, 4, temperature, prompts, top_p=1.0) for temperature in (0.0, 1.0))
    return {f"temperature {one.temperature:g}": asdict(one) for one in found}


def measure_on_policy(args):
    pair = opened("zoo:target")
    target, tokenizer = pair.target, pair.tokenizer
    text = read_text(tokenizer, ["zoo"])
    few = {"evaluate_rows": 2} if args.quick else {}
    plan = Plan(args.steps, args.batch, args.context, lr=args.lr, bfloat16=True, **few)
    start = {"layers": args.layers} if args.layers else {"draft": "zoo:draft"}
    ways = {
        "text": OnText(target, tokenizer, DistillSettings(**start)),
        "distilled on text": Distillation(target, tokenizer, DistillSettings(**start)),
        "distilled, half on-policy": Distillation(target, tokenizer, DistillSettings(**start, on_policy=0.5)),
    }
    found = {"before": drafting(target, ways["text"].student, tokenizer, args.prompts)}
    for name, method in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            train(method, text, plan, folder)
        found[name] = drafting(target.cpu(), method.student.cpu(), tokenizer, args.prompts)
    plan = {name: getattr(plan, name) for name in ("steps", "batch", "context", "lr", "seed")}
    return {"plan": plan, "layers": args.layers or None, "ways": found, "prompts": args.prompts}


AT = {
    "tokens per pass": "{temperature %d[tokens_per_pass]:.2f}",
    "accepted first": "{temperature %d[acceptance_by_position][0]:.1%%}",
}
on_policy = Case(
    "on_policy",
    """The shipped draft, trained further in three ways for the same number of steps, and its acceptance after each.

On the text (cross-entropy), on the target's distribution over the text (KL + TV), and on the target's distribution
over sequences half of which the draft wrote itself. The same order of the text, rates and seeds. Acceptance is
counted while held-out code is written, temperature 0 and 1.
""",
    measure_on_policy,
    options={
        "prompts": 40,
        "steps": (200, "of each way"),
        "batch": (8, "sequences"),
        "context": (256, "tokens"),
        "layers": (0, "begin with so many of the target's layers, not with zoo:draft"),
        "lr": (3e-4, "learning rate"),
    },
    quick={"steps": 2, "batch": 1, "context": 32},
    markdown=lambda found: page(
        f"`python benchmarks/run.py on_policy`: {found['prompts']} prompts, drafts of 4 tokens.",
        shown(
            {"trained on": "{name}", **{f"{what}, T = {t}": form % t for t in (0, 1) for what, form in AT.items()}},
            [{"name": name, **way} for name, way in found["ways"].items()],
        ),
    ),
)
