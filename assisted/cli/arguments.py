"""What several commands take and answer alike: arguments, where models go, JSON.

Knows argparse; torch is imported when a command runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "DEFAULT",
    "DTYPES",
    "STORED",
    "add_json_file",
    "add_machine",
    "add_target",
    "device",
    "int_or_name",
    "loading",
    "print_json",
    "require_tokenizer",
    "typed",
    "use_threads",
    "write_json",
]

DEFAULT = " (default: %(default)s)"
STORED = ("float32", "bfloat16", "float16")  # of files
DTYPES = ("auto", *STORED)


def add_json_file(parser: Any, what: str) -> None:
    """`--json [FILE]`, for `write_json`. what: is written."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help=f"write everything that was {what} (- or nothing: print it)",
    )


def add_machine(parser: Any, dtype: str) -> None:
    """`--dtype`, `--device` and `--threads`. dtype: what it is where none is named, in words."""
    parser.add_argument("--dtype", choices=DTYPES, help=f"(default: {dtype})")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ..." + DEFAULT)
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's own choice)")


def add_target(parser: argparse.ArgumentParser, group: Any, what: str) -> None:
    """The target, as the first argument or as `--target`; without either the shipped one. what: it may be, in words."""
    parser.set_defaults(target="zoo:target")
    group.add_argument("target", nargs="?", default=argparse.SUPPRESS, help=f"{what} (default: zoo:target)")
    group.add_argument("--target", dest="target", default=argparse.SUPPRESS, metavar="TARGET", help="the same by name")


def int_or_name(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value


def use_threads(count: int | None) -> None:
    """What `--threads` names; None is torch's own choice."""
    import torch

    if count is not None:
        torch.set_num_threads(count)


def device(name: str) -> str:
    """What `--device` names. Raises ValueError for what this machine does not have."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = "cpu" if accelerator is None else accelerator.type
    if name != "auto" and name.partition(":")[0] not in ("cpu", here):
        raise ValueError(f"device: {name} is not here; give {here} or auto")
    return here if name == "auto" else name


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """`--device`, `--dtype`, `--draft-quantization` and `--draft-length` as `from_pretrained` takes them."""
    where = device(args.device)
    found: dict[str, Any] = {} if where == "cpu" else {"device_map": {"": where}}
    for name in ("dtype", "draft_quantization", "draft_length"):
        if getattr(args, name) is not None:
            found[name] = getattr(args, name)
    return found


def require_tokenizer(tokenizer: Any, target: str) -> None:
    if tokenizer is None:
        raise ValueError(f"target: {target} has no tokenizer beside it, and text needs one")


def typed() -> str:
    """The command as it was typed, to be noted beside its result."""
    return shlex.join(["assisted", *sys.argv[1:]])


def print_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent), flush=True)


def write_json(file: str | None, value: Any, indent: int = 2) -> str | None:
    """Write the file that `--json` names. Where it names none, the text is given back, to be printed."""
    written = json.dumps(value, indent=indent)
    if file == "-":
        return written
    if file is not None:
        Path(file).write_text(written + "\n", encoding="utf-8")
    return None
