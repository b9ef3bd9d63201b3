"""Resident memory of one process over many calls of changing shapes: plain `generate`, this package, and its `fast="eager"`.

Each runs in a process of its own and makes the same calls, with random prompt lengths, batch sizes, draft lengths and numbers
of new tokens. The shipped target, float32, greedy, with the default draft, "suffix".
"""

import random
import resource
import sys
from pathlib import Path

import torch
from shared import Section, Worker, about, below, heading, opened

WAYS = {"plain": "plain `generate`", "eager": '`fast="eager"`', "auto": "default"}
EVERY = 10  # calls between two readings
OPTIONS = {"calls": (1000, "of each kind"), "longest": (64, "prompt, in tokens")}
QUICK = {"calls": 20}
SECTIONS = (Section("benchmarks/memory", "memory"),)


def resident():
    """MiB of this process; its maximum where the system does not report the current value."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def readings(way, calls, longest):
    """Before the first call and after every tenth."""
    pair = opened("zoo:target")
    pair.fast = "auto" if way == "plain" else way
    size = pair.config.get_text_config().vocab_size
    numbers = random.Random(0)
    found = [resident()]
    for call in range(1, calls + 1):
        rows, length = numbers.choice((1, 1, 1, 2, 3, 4)), numbers.randint(2, longest)
        new, draft_length = numbers.randint(2, 5), numbers.choice((None, None, 2, 4, 7))
        ids = torch.randint(5, size, (rows, length), generator=torch.Generator().manual_seed(call))
        others = {"assisted": False} if way == "plain" else {"draft_length": draft_length}
        pair.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **others)
        if call % EVERY == 0:
            found.append(resident())
            print(f"{way}: {call} calls, {found[-1]:.0f} MiB", file=sys.stderr)
    return [round(reading, 1) for reading in found]


def measure(args):
    runs = {
        way: Worker("cases.memory", "readings", way, args.calls, args.longest, threads=args.threads) for way in WAYS
    }
    found = {way: run.answer() for way, run in runs.items()}
    return {"about": about(calls=args.calls, longest=args.longest, every=EVERY), "mebibytes": found}


def markdown(found):
    its, curves = found["about"], found["mebibytes"]
    last = its["calls"] // its["every"]
    shown = sorted({0, 1, *(last * tenth // 10 for tenth in (1, 2, 4, 5, 6, 8, 10))})
    head = heading(
        "memory",
        its,
        f"{its['calls']} calls of the shipped target, {its['dtype']}",
        f"Prompts of 2 to {its['longest']} tokens, 1 to 4 rows, 2 to 5 new tokens and draft lengths of 2, 4, 7 and adaptive "
        "are drawn at random. The table shows the resident set in MiB.",
    )
    rows = [
        [WAYS[way], *(f"{curve[place]:.0f}" for place in shown), f"{curve[last] / curve[last // 2] - 1:.1%}"]
        for way, curve in curves.items()
    ]
    calls = [str(place * its["every"]) for place in shown]
    return below(head, ["after calls", *calls, "growth over the last half"], rows)
