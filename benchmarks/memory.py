"""Resident memory of one process over many calls of changing shapes: plain `generate`, this package, and its `fast="eager"`.

    python benchmarks/memory.py --out benchmarks/memory.json --docs docs/benchmarks/memory.md

Each runs in a process of its own and makes the same calls, with random prompt lengths, batch sizes, draft lengths and numbers
of new tokens. The shipped target, float32, greedy, with the default draft, "suffix".
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from tables import about, answer, arguments, figures, in_own_process, publish

from assisted import AssistedModelForCausalLM
from assisted.bench.table import markdown_table

WAYS = {"plain": "plain `generate`", "eager": '`fast="eager"`', "auto": "default"}
EVERY = 10  # calls between two readings


def resident() -> float:
    """MiB of this process; its maximum where the system does not report the current value."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def readings(way: str, calls: int, longest: int) -> list[float]:
    """Before the first call and after every tenth."""
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", dtype=torch.float32)
    pair.fast = "auto" if way == "plain" else way
    size = pair.config.get_text_config().vocab_size
    numbers = random.Random(0)
    found = [resident()]
    for call in range(1, calls + 1):
        rows, length = numbers.choice((1, 1, 1, 2, 3, 4)), numbers.randint(2, longest)
        new, draft_length = numbers.randint(2, 5), numbers.choice((None, None, 2, 4, 7))
        ids = torch.randint(5, size, (rows, length), generator=torch.Generator().manual_seed(call))
        others: dict[str, Any] = {"assisted": False} if way == "plain" else {"draft_length": draft_length}
        pair.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **others)
        if call % EVERY == 0:
            found.append(resident())
            print(f"{way}: {call} calls, {found[-1]:.0f} MiB", file=sys.stderr)
    return [round(reading, 1) for reading in found]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", dtype=torch.float32)
    options = ["--calls", args.calls, "--longest", args.longest]
    options += ["--threads", args.threads] if args.threads else []
    runs = {way: in_own_process(__file__, *options, "--way", way) for way in WAYS}
    found = {way: answer(run) for way, run in runs.items()}
    return {"about": about(pair, calls=args.calls, longest=args.longest, every=EVERY), "mebibytes": found}


def markdown(found: dict[str, Any]) -> str:
    about, curves = found["about"], found["mebibytes"]
    last = about["calls"] // about["every"]
    shown = sorted({0, 1, *(last * tenth // 10 for tenth in (1, 2, 4, 5, 6, 8, 10))})
    lines = [
        f"`python benchmarks/memory.py`: {about['calls']} calls of the shipped target, float32, threads: {about['threads']}, "
        f"torch {about['torch']}, {about['processor']}. Prompts of 2 to {about['longest']} tokens, 1 to 4 rows, 2 to 5 new "
        "tokens and draft lengths of 2, 4, 7 and adaptive are drawn at random. The table shows the resident set in MiB.",
        "",
    ]
    rows = (
        [WAYS[way], *(f"{curve[place]:.0f}" for place in shown), f"{curve[last] / curve[last // 2] - 1:.1%}"]
        for way, curve in curves.items()
    )
    header = ["after calls", *(str(place * about["every"]) for place in shown), "growth over the last half"]
    return "\n".join([*lines, *markdown_table(header, rows)])


def main() -> None:
    numbers = {"--calls": (1000, "of each kind"), "--longest": (64, "prompt, in tokens")}
    parser = arguments(__doc__, ("--threads", "--out", "--docs", "--read"), numbers=numbers)
    parser.add_argument("--way", choices=list(WAYS), help="run this one here and print its readings as JSON")
    args = parser.parse_args()
    if args.way is None:
        publish(markdown(figures(args, measure)), args.docs, "memory")
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    print(json.dumps(readings(args.way, args.calls, args.longest)))


if __name__ == "__main__":
    main()
