"""`assisted doctor`: the arguments, and where the report goes. The measuring is done elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .arguments import (
    add_loading,
    add_target,
    add_temperature,
    device,
    option,
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
    drafts = "Hub id, folder, zoo: name, self:nf4, suffix, suffix+zoo:draft, ...; repeat to compare (default: suffix)"
    option(doctor, "--draft", drafts, action="append", metavar="DRAFT")
    option(
        doctor, "--text", "a file or folder whose text the target continues (default: held-out code)", metavar="PATH"
    )
    option(doctor, "--count", "prompts to decode, at most", 8, before="--prompts", dest="prompts", metavar="COUNT")
    option(doctor, "--max-new-tokens", "new tokens per prompt", 48, dest="new_tokens", metavar="MAX_NEW_TOKENS")
    option(doctor, "--longest", "longest draft to consider", 15, metavar="N")
    add_temperature(doctor)
    contexts = "context lengths at which forward passes are timed (default: the prompts', 512, 2048)"
    option(doctor, "--contexts", contexts, type=int, nargs="+", metavar="N")
    option(doctor, "--quick", "get a first impression with 2 prompts, short texts and drafts, and one context", False)
    option(doctor, "--seconds", "approximate time for all measurements", 90.0)
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
        given = (args.text, settings, args.draft_quantization, args.target, bars, args.draft_window)
        found = examine(target, drafts, tokenizer, *given)
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
