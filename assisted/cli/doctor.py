"""`assisted doctor`: the arguments, and where the report goes. The measuring is done elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .arguments import (
    DEFAULT,
    add_loading,
    add_target,
    add_temperature,
    device,
    print_or_write,
    target_and_tokenizer,
    use_threads,
)

if TYPE_CHECKING:
    from ..lab.doctor.diagnosis import Settings


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Put `doctor` into the parser. command: makes a parser with a function to run and a text."""
    text = "predict the speedup of a draft on this machine and your text, and find what limits it"
    doctor = command("doctor", _doctor, text, page="doctor", file="all results")
    add_target(doctor, doctor, "Hub id, folder or zoo: name")
    doctor.add_argument(
        "--draft",
        action="append",
        metavar="DRAFT",
        help="Hub id, folder, zoo: name, self:nf4, suffix, suffix+zoo:draft, ...; repeat to compare (default: suffix)",
    )
    doctor.add_argument(
        "--text", metavar="PATH", help="a file or folder whose text the target continues (default: held-out code)"
    )
    doctor.add_argument("--prompts", type=int, default=8, help="prompts to decode, at most" + DEFAULT)
    doctor.add_argument(
        "--max-new-tokens",
        dest="new_tokens",
        type=int,
        default=48,
        metavar="MAX_NEW_TOKENS",
        help="new tokens per prompt" + DEFAULT,
    )
    doctor.add_argument("--longest", type=int, default=15, metavar="N", help="longest draft to consider" + DEFAULT)
    add_temperature(doctor)
    doctor.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        metavar="N",
        help="context lengths at which forward passes are timed (default: the prompts', 512, 2048)",
    )
    doctor.add_argument(
        "--quick",
        action="store_true",
        help="get a first impression with 2 prompts, short texts and drafts, and one context",
    )
    doctor.add_argument("--seconds", type=float, default=90.0, help="approximate time for all measurements" + DEFAULT)
    add_loading(doctor, length=None)


def _doctor(args: argparse.Namespace) -> None:
    import torch

    from ..lab.bench.clock import Bars
    from ..lab.doctor.diagnosis import Settings
    from ..lab.doctor.examine import examine
    from ..lab.doctor.findings import told
    from ..modeling import AssistedModelForCausalLM

    use_threads(args.threads)
    args.contexts = tuple(args.contexts) if args.contexts else None
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    if args.quick:
        settings = _quick(settings)
    where = device(args.device)
    chosen = {"dtype": "auto"} if where == "cpu" else {"dtype": torch.bfloat16, "device_map": {"": where}}
    if args.dtype is not None:
        chosen["dtype"] = args.dtype
    target, tokenizer = target_and_tokenizer(args.target, **chosen)
    drafts: dict[str, Any] = {name: name for name in args.draft or ["suffix"]}
    if isinstance(target, AssistedModelForCausalLM):  # a saved pair
        drafts = drafts if args.draft else {"its own draft": target.spec}
        target = target.target
    with Bars() as bars:
        found = examine(
            target,
            drafts,
            tokenizer,
            args.text,
            settings,
            args.draft_quantization,
            args.target,
            bars,
            args.draft_window,
        )
    text = told(found)
    print_or_write(args.json, {**found.to_dict(), "told": text}, text)
    refused = [one.draft for one in found.drafts if one.error is not None]
    if refused:
        raise ValueError(f"draft: could not be loaded: {', '.join(refused)}; the report has the reasons")


def _quick(settings: Settings) -> Settings:
    """At most this much of everything."""
    least = {"prompts": 2, "new_tokens": 24, "longest": 8, "seconds": 20.0}
    smaller = {name: min(value, getattr(settings, name)) for name, value in least.items()}
    return dataclasses.replace(settings, contexts=settings.contexts or (128,), **smaller)
