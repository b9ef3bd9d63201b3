"""`assisted train distill | pard | early-exit | medusa | eagle | mtp | dflash | assistant`: the arguments, and what they start.

A method's options are the fields of its settings and of the plan. Reading them imports torch, so a method's parser is made
when it runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import DEFAULT, STORED, add_json, add_text, dtype_name, option, print_json, target_and_tokenizer, typed

if TYPE_CHECKING:
    from transformers import HfArgumentParser

    from ..methods.shared.training.method import Method

TRAININGS = {
    "distill": "train a small draft on the target's distribution",
    "pard": "train a small draft to predict several tokens in one forward pass",
    "early-exit": "train a model to predict from its own early layers",
    "medusa": "train heads on the last hidden state, each for one token further ahead",
    "eagle": "train one layer that continues from the target's hidden states",
    "mtp": "train a multi-token-prediction head, a layer of the target's own kind",
    "dflash": "train a block drafter: DFlash, DSpark (--markov) or DFlash2 (--selector)",
    "assistant": "train small layers that read the target's keys and values",
}


class _Unread(argparse.ArgumentParser):
    """Leaves all arguments to the command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return argparse.Namespace(command=self.get_default("command"), alone=None, rest=args), []


class _Option(argparse.Action):
    """An option as HfArgumentParser adds it, but with one spelling, with its default in the help, and bools as flags."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        nargs: Any = None,
        const: Any = None,
        help: str = "",
        **more: Any,
    ):
        default = more.get("default")
        if const is False:  # the complement that HfArgumentParser adds to a flag that is on, with the flag's own text
            help, default = f"turn --{dest.replace('_', '-')} off", None
        help += "" if default is None or default is False else DEFAULT
        super().__init__(option_strings[-1:], dest, 0 if nargs == "?" else nargs, const, help=help, **more)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def add(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `train METHOD` into the parser. command: makes a parser with a function to run, a text and a group."""
    about = "Train a draft for a target, which is not changed. See docs/howto/train.md."
    train = commands.add_parser("train", help="train a draft model, heads or early exits", description=about)
    train.set_defaults(alone=train)
    methods = train.add_subparsers(metavar="METHOD", parser_class=_Unread)
    for name, text in TRAININGS.items():
        command(name, functools.partial(_train, name), text, methods)

    def parse(*args: Any) -> Any:
        """Add the methods of other packages first. Looking for them takes a while, which other commands are spared."""
        from importlib.metadata import entry_points

        for name in {point.name for point in entry_points(group="assisted.methods")} - methods.choices.keys():
            command(name, functools.partial(_train, name), f"train {name}", methods)
        return known(*args)

    known, train.parse_known_args = train.parse_known_args, parse


def options(method: str) -> HfArgumentParser:
    """The parser of one method. It gives the method's settings, the plan, and a namespace with everything else."""
    from transformers import HfArgumentParser

    from ..engine.libraries import add_settings
    from ..methods.shared.training.method import Plan

    parser = HfArgumentParser(
        prog=f"assisted train {method}",
        usage="%(prog)s --target TARGET --out FOLDER (--text PATH ... | --dataset NAME | --chats N) [options]",
        description=(text := TRAININGS.get(method, f"train {method}"))[0].upper() + text[1:] + ".",
        formatter_class=argparse.HelpFormatter,
    )
    parser.register("action", None, _Option)
    parser.register("action", "store_false", functools.partial(_Option, nargs="?", const=False))
    option(parser, "--target", "Hub id, folder or zoo: name; early-exit trains a copy of it", required=True)
    option(parser, "--out", "folder to write to, and to resume from", type=Path, required=True, metavar="FOLDER")
    kinds = ("auto", "float32", "bfloat16")
    parser.add_argument("--dtype", type=dtype_name, default="float32", choices=kinds, help="dtype of the target")
    option(parser, "--attention", "attention of the target: eager, sdpa, ... (default: its own)", metavar="NAME")
    option(parser, "--compile", "compile layers, which is faster after a minute or so", False)
    parser.add_argument("--store", type=dtype_name, default="float32", choices=STORED, help="dtype of the files")
    option(parser, "--stop-after", "stop with a checkpoint after N steps in total", type=int, metavar="N")
    add_json(parser)
    text = parser.add_argument_group("text")
    add_text(text, "train on", "use")
    option(
        text, "--chats", "add N tokens of conversations that an instruct target has with itself", type=int, metavar="N"
    )
    pieces = "make half of the chats about pieces of these: files, folders, patterns; or zoo"
    option(text, "--about", pieces, nargs="+", metavar="PATH")
    trained = _method(method)
    for kind in (trained.options, Plan):
        add_settings(parser, kind)
    if trained.rate is not None:
        parser.set_defaults(lr=trained.rate)
    return parser


def _method(name: str) -> type[Method]:
    """The training of this name. Raises ValueError for a method that is not trained."""
    from ..methods import METHODS

    for place in filter(None, (spec.training for spec in METHODS.values())):
        method: type[Method] = pkgutil.resolve_name(place)
        if method.name == name:
            return method
    raise ValueError(f"METHOD: {name!r} has no training")


def _train(name: str, found: argparse.Namespace) -> None:
    parser = options(name)
    settings, plan, args, unknown = parser.parse_args_into_dataclasses(
        found.rest, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    import torch

    from ..lab.training.trainer import train
    from ..lab.training.written import with_chats, with_written
    from ..methods.shared.training.data import Text, read_text
    from ..methods.shared.training.method import Start

    chosen = {} if args.attention is None else {"attn_implementation": args.attention}
    target, tokenizer = target_and_tokenizer(args.target, dtype=args.dtype, **chosen)
    target.name_or_path = args.target  # heads may record it: the name that was given, not this machine's folder
    if args.chats and not args.text and args.dataset is None:
        text = Text.empty()
    else:
        text = read_text(tokenizer, args.text or (), args.dataset, args.documents)
    if args.about and not args.chats:
        parser.error("--about: only with --chats")
    if args.chats:
        about = [read_text(tokenizer, [path]).training for path in args.about or ()]
        text = with_chats(target, tokenizer, text, args.chats, args.out, plan.seed, about)
    if args.written:
        text = with_written(target, text, args.written, args.out, plan.seed)
    folder = train(
        _method(name).make(settings, Start(target, tokenizer, text, plan.seed, args.compile)),
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
