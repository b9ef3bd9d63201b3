"""`assisted doctor`: the arguments, and where the report goes. Knows arguments alone until the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import (
    DEFAULT,
    add_json_file,
    add_machine,
    add_target,
    device,
    require_tokenizer,
    use_threads,
    write_json,
)

__all__ = ["add"]


def add(commands: Any) -> None:
    """Put `doctor` into the parser."""
    text = "Measure what a draft would bring here, on your text, and what holds it back. See docs/howto/doctor.md."
    doctor = commands.add_parser(
        "doctor", help="what to expect of a draft here, and what holds it back", description=text
    )
    doctor.set_defaults(command=_doctor)
    add_json_file(doctor, "found")
    add_target(doctor, doctor, "Hub id, folder, zoo: name, or grown:SIZE (the shipped target at that size)")
    doctor.add_argument(
        "--draft",
        action="append",
        metavar="DRAFT",
        help="Hub id, folder, zoo: name, self:nf4, suffix, ...; several times to compare (default: suffix)",
    )
    doctor.add_argument("--draft-quantization", metavar="NAME", help="nf4, fp4, int8, int4, ... (default: none)")
    doctor.add_argument(
        "--text", metavar="PATH", help="a file or folder whose text is gone on with (default: held-out code)"
    )
    doctor.add_argument("--prompts", type=int, default=8, help="at most" + DEFAULT)
    doctor.add_argument("--max-new-tokens", type=int, default=48, help="of each prompt" + DEFAULT)
    doctor.add_argument("--longest", type=int, default=15, metavar="N", help="the longest draft to consider" + DEFAULT)
    doctor.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token" + DEFAULT)
    doctor.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens before the passes that are timed (default: the prompts', 512, 2048)",
    )
    doctor.add_argument("--seconds", type=float, default=90.0, help="for all measuring, about" + DEFAULT)
    add_machine(doctor, dtype="the checkpoint's on a CPU, else bfloat16")


def _doctor(args: argparse.Namespace) -> None:
    import torch

    from ..bench.bars import Bars
    from ..bench.grown import load_target
    from ..doctor.diagnosis import Settings
    from ..doctor.examine import examine
    from ..doctor.findings import told
    from ..modeling import AssistedModelForCausalLM

    use_threads(args.threads)
    settings = Settings(
        prompts=args.prompts,
        new_tokens=args.max_new_tokens,
        longest=args.longest,
        temperature=args.temperature,
        contexts=tuple(args.contexts) if args.contexts else None,
        seconds=args.seconds,
    )
    where = device(args.device)
    half = None if where == "cpu" else torch.bfloat16
    target, tokenizer = load_target(args.target, args.dtype or half, where)
    require_tokenizer(tokenizer, args.target)
    drafts: dict[str, Any] = {name: name for name in args.draft or ["suffix"]}
    if isinstance(target, AssistedModelForCausalLM):  # a saved pair
        drafts = drafts if args.draft else {"its own draft": target.spec}
        target = target.target
    with Bars() as bars:
        found = examine(
            target,
            drafts,
            tokenizer,
            text=args.text,
            settings=settings,
            draft_quantization=args.draft_quantization,
            name=args.target,
            progress=bars,
        )
    if args.json != "-":
        print(told(found))
    written = write_json(args.json, {**found.to_dict(), "told": told(found)})
    if written is not None:
        print(written)
