"""`assisted train distill | early-exit | medusa | eagle`: the arguments, and what they start.

Knows arguments alone until a command runs; torch and models are imported then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .arguments import DEFAULT, STORED, print_json, typed

__all__ = ["add"]

Command = Callable[[str, Any, str, Any], argparse.ArgumentParser]
_LOSSES = ("kl", "reverse-kl", "tv", "kl+tv")


def add(commands: Any, command: Command) -> None:
    """Put `train METHOD` into the parser. command: makes a parser with a function to run, a text and a group."""
    about = "Train what drafts for a target, which itself is not changed. See docs/howto/train.md."
    train = commands.add_parser("train", help="distill a draft, train heads or early exits", description=about)
    methods = train.add_subparsers(required=True, metavar="METHOD")
    distill = command("distill", _distill, "a small draft learns the target's distribution", methods)
    _common(distill, lr=1e-3)
    start = distill.add_argument_group("the draft")
    start.add_argument("--draft", help="the model to go on from: Hub id, folder or zoo: name")
    start.add_argument(
        "--layers", type=int, help="instead of --draft: so many of the target's own layers, evenly chosen"
    )
    start.add_argument(
        "--loss", choices=_LOSSES, default="kl+tv", help="divergence from the target's distribution" + DEFAULT
    )
    start.add_argument(
        "--on-policy",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the sequences, written by the draft itself behind a beginning of the text" + DEFAULT,
    )

    exits = command("early-exit", _early_exit, "a model learns to speak from its own early layers", methods)
    _common(exits, lr=1e-4, target="the model to start from; what is trained is a copy")
    recipe = exits.add_argument_group("the recipe (LayerSkip)")
    recipe.add_argument("--dropout", type=float, default=0.1, help="of the last layer, less before it" + DEFAULT)
    recipe.add_argument("--exit-weight", type=float, default=0.4, help="of the exit's loss, at full depth" + DEFAULT)
    recipe.add_argument(
        "--lora", type=int, metavar="RANK", help="train low-rank changes only, merged at the end (peft)"
    )

    medusa = command("medusa", _medusa, "heads on the last hidden state, each for one token further", methods)
    _common(medusa, lr=1e-3)
    heads = medusa.add_argument_group("the heads")
    heads.add_argument("--heads", type=int, default=4, help="how many" + DEFAULT)
    heads.add_argument("--layers", type=int, default=1, help="blocks of each" + DEFAULT)
    heads.add_argument("--own-output", action="store_true", help="each has an output layer of its own: much larger")
    heads.add_argument(
        "--loss", choices=_LOSSES, default="kl", help="divergence from the target's distribution" + DEFAULT
    )
    heads.add_argument("--decay", type=float, default=0.8, help="weight of the next head, of this one's" + DEFAULT)

    eagle = command("eagle", _eagle, "one layer that goes on from the target's hidden states", methods)
    _common(eagle, lr=1e-3)
    head = eagle.add_argument_group("the head")
    head.add_argument("--version", type=int, choices=(1, 3), default=3, help="1 is for EAGLE-2, too" + DEFAULT)
    head.add_argument(
        "--taps",
        type=int,
        nargs="+",
        help="hidden states that EAGLE-3 reads, as transformers counts (default: 2, L/2, L-3)",
    )
    head.add_argument("--layers", type=int, default=1, help="decoder layers of the head" + DEFAULT)
    head.add_argument("--unroll", type=int, default=7, help="steps in which it reads its own states" + DEFAULT)
    head.add_argument("--decay", type=float, default=0.8, help="weight of the next step, of this one's" + DEFAULT)
    head.add_argument(
        "--loss", choices=_LOSSES, default="kl", help="divergence from the target's distribution" + DEFAULT
    )
    head.add_argument(
        "--no-norms",
        dest="norms",
        action="store_false",
        help="EAGLE-3 as in its paper: features and residual as they are",
    )
    head.add_argument("--draft-vocab", type=int, metavar="N", help="propose only the N most frequent tokens")
    head.add_argument("--format", choices=("eagle", "speculators"), default="eagle", help="of the files" + DEFAULT)


def _common(
    parser: argparse.ArgumentParser, lr: float, target: str = "the model that will verify; it is not changed"
) -> None:
    parser.add_argument("--target", required=True, help=f"Hub id, folder or zoo: name of {target}")
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written, and resumed from")
    parser.add_argument(
        "--dtype", default="float32", choices=("auto", "float32", "bfloat16"), help="of the target" + DEFAULT
    )
    parser.add_argument(
        "--attention", default=None, metavar="NAME", help="eager, sdpa, ... of the target (default: its own)"
    )
    text = parser.add_argument_group("text")
    text.add_argument("--text", nargs="+", default=[], metavar="PATH", help="files, folders, patterns; or zoo")
    text.add_argument("--dataset", metavar="NAME[:CONFIG][:SPLIT]", help="of the datasets library")
    text.add_argument(
        "--written",
        type=int,
        metavar="N",
        help="besides, N tokens that the target itself writes behind beginnings of the text, which is what will be drafted",
    )
    text.add_argument("--documents", type=int, metavar="N", help="take at most N from the dataset")
    plan = parser.add_argument_group("plan")
    plan.add_argument("--steps", type=int, default=1000, help=DEFAULT.strip())
    plan.add_argument("--batch", type=int, default=8, help="sequences a step" + DEFAULT)
    plan.add_argument("--context", type=int, default=256, help="tokens a sequence" + DEFAULT)
    plan.add_argument("--lr", type=float, default=lr, help="peak learning rate" + DEFAULT)
    plan.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: for matrices" + DEFAULT)
    plan.add_argument("--matrix-lr", type=float, default=0.02, help="peak rate of Muon" + DEFAULT)
    plan.add_argument("--warmup", type=float, default=0.04, help="share of the steps with rising rates" + DEFAULT)
    plan.add_argument("--cooldown", type=float, default=0.5, help="share of the steps with falling rates" + DEFAULT)
    plan.add_argument("--seed", type=int, default=0, help=DEFAULT.strip())
    plan.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 (autocast)")
    plan.add_argument("--compile", action="store_true", help="compile layers: faster after a minute or so")
    plan.add_argument("--evaluate-every", type=int, metavar="N", help="steps (default: ten times a run)")
    plan.add_argument("--evaluate-rows", type=int, default=16, metavar="N", help="held-out sequences" + DEFAULT)
    plan.add_argument("--checkpoint-every", type=int, default=100, metavar="N", help="steps" + DEFAULT)
    plan.add_argument("--store", choices=STORED, default="float32", help="dtype of the files written" + DEFAULT)
    plan.add_argument("--stop-after", type=int, metavar="N", help="stop with a checkpoint after N steps in all")


def _distill(args: argparse.Namespace) -> None:
    from ..training.distill import Distillation, DistillSettings

    settings = DistillSettings(args.draft, args.layers, args.loss, args.on_policy)
    _run(args, lambda target, tokenizer, text: Distillation(target, tokenizer, settings, args.compile))


def _early_exit(args: argparse.Namespace) -> None:
    from ..training.early_exit import EarlyExitSettings, EarlyExitTraining

    settings = EarlyExitSettings(args.dropout, args.exit_weight, args.lora)
    _run(args, lambda target, tokenizer, text: EarlyExitTraining(target, tokenizer, settings, args.seed, args.compile))


def _medusa(args: argparse.Namespace) -> None:
    from ..training.medusa import MedusaSettings, MedusaTraining

    settings = MedusaSettings(args.heads, args.layers, args.own_output, args.loss, args.decay)
    _run(args, lambda target, tokenizer, text: MedusaTraining(target, settings, args.seed, args.compile))


def _eagle(args: argparse.Namespace) -> None:
    from ..training.eagle import EagleSettings, EagleTraining

    settings = EagleSettings(
        args.version,
        tuple(args.taps) if args.taps else None,
        args.layers,
        args.unroll,
        args.decay,
        args.loss,
        norms=args.norms,
        draft_vocab=args.draft_vocab,
        format=args.format,
    )
    _run(
        args,
        lambda target, tokenizer, text: EagleTraining(target, settings, text.training, args.seed, args.compile),
    )


def _run(args: argparse.Namespace, method: Callable[[Any, Any, Any], Any]) -> None:
    """Load the target and the text, train, and say where the result is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import zoo
    from ..training.data import read_text
    from ..training.plan import Plan
    from ..training.trainer import train
    from ..training.written import with_written

    fields = {field.name for field in dataclasses.fields(Plan)}
    plan = Plan(**{name: value for name, value in vars(args).items() if name in fields})
    path = zoo.resolve(args.target)
    tokenizer = AutoTokenizer.from_pretrained(path)
    chosen = {} if args.attention is None else {"attn_implementation": args.attention}
    target = AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype, **chosen)
    target.name_or_path = args.target  # heads may write it down: the name that was given, not this machine's folder
    text = read_text(tokenizer, args.text, args.dataset, args.documents)
    if args.written:
        text = with_written(target, text, args.written, args.out, args.seed)
    folder = train(
        method(target, tokenizer, text),
        text,
        plan,
        args.out,
        stop_after=args.stop_after,
        say=lambda line: print(line, file=sys.stderr, flush=True),
        notes={"target": args.target, "command": typed(), "store": args.store},
        store=None if args.store == "float32" else getattr(torch, args.store),
    )
    if args.json:
        lines = (folder / "training.jsonl").read_text().splitlines()
        measured = [row for row in map(json.loads, lines) if "greedy" in row]
        print_json({"folder": str(folder), "held_out": measured[-1] if measured else None})
    else:
        print(folder)
