"""What only a GPU shows: which sections there are, how their items are run, and their tables. gpu_sections.py measures."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shared import Case, Section, Worker, page, shown

SECTIONS = {
    "rounds": "A round, and what it does outside of the target's forward pass",
    "speed": "Speed",
    "copies": "4-bit copies of the target as drafts",
    "batches": "Batches",
    "contexts": "Contexts",
    "passes": "Forward passes, kernel by kernel",
    "quantized": "Quantized targets",
    "offload": "A target larger than a card of 12 GB",
    "bits": 'To the bit: `exact="bits"`',
    "memory": "Memory against `assisted plan`",
    "train": "A head trained on text that its target writes",
}
"""In the order of their value, with their titles. The last one runs only if it is named."""
ALONE = ("memory", "offload", "train")
"""Sections that need a process for every item: what an item before left on the device would be counted."""
ITEM_SECONDS = 300  # an item that takes longer hangs,
LONGER = {"train": 590}  # but for these
ATTEMPTS = 2  # how often an item may be started: once more after this process was killed
MODULE = "gpu_sections"
Found = dict[str, Any]


def run(args: argparse.Namespace) -> Found:
    """Measure the items that have no result, one after the other, until time is up. Returns all results.

    args: the options of the case, path and quick. The file has {"about": {...}, "sections": {section: {item: result}}}. A
    result has "seconds" (of the item) when it is there, "error" when it failed; "started" counts the times it was begun. The
    file is replaced after every change.
    """
    path = args.path or Path(tempfile.gettempdir(), "gpu.json")
    deadline = time.monotonic() + 60 * args.minutes
    found: Found = json.loads(path.read_text()) if path.exists() else {"about": {}, "sections": {}}
    worker: Worker | None = None

    def put(items: Found, item: str, result: Found) -> None:
        items[item] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(beside, path)

    for section in args.only or [*SECTIONS][:-1]:
        items = found["sections"].setdefault(section, {})
        if args.again:
            items = found["sections"][section] = {name: one for name, one in items.items() if "error" not in one}
        worker = worker or started(args, path)
        found["about"] = found["about"] or worker.ask()
        for item in worker.ask(section):
            known = items.get(item, {})
            if args.item not in item or "seconds" in known or "error" in known:
                continue
            if known.get("started", 0) == ATTEMPTS:
                put(items, item, {"error": f"its process was ended {ATTEMPTS} times"})
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                break
            put(items, item, {"started": known.get("started", 0) + 1})
            print(f"{section}: {item}", file=sys.stderr, flush=True)
            worker, most = worker or started(args, path), LONGER.get(section, ITEM_SECONDS)
            try:
                result = worker.ask(section, item, seconds=min(left, most))
            except TimeoutError:
                if left < most:
                    break
                result = {"error": f"took more than {most} seconds", "lost": True}
            except RuntimeError as error:
                result = {"error": str(error), "lost": True}
            if result.pop("lost", False) or section in ALONE:
                worker.end()
                worker = None
            put(items, item, result)
        if time.monotonic() > deadline:
            print(f"{section}: time is up", file=sys.stderr)
            break
    if worker is not None:
        worker.end()
    return found


def started(args: argparse.Namespace, path: Path) -> Worker:
    """A process for items."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Worker(MODULE, "serve", device, "quick" if args.quick else "full", OUT=str(path.parent))


def markdown(found: Found) -> str:
    """All sections as Markdown."""
    about = found["about"]
    named = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers") if name in about)
    head = f"`python benchmarks/run.py gpu`: {about.get('processor', 'no device yet')}, {named}."
    parts: list[Any] = [f"{head} {about['note']}" if "note" in about else head]
    for section, title in SECTIONS.items():
        items = found["sections"].get(section, {})
        measured = {item: one for item, one in items.items() if "seconds" in one}
        parts += [f"**{title}**"] * bool(items) + tables(measured)
        parts += [f"{item}: failed. {one['error']}" for item, one in items.items() if "error" in one]
    return page(*parts)


RACED: dict[str, Any] = {
    "": "{name}",
    "tokens/s": lambda row: "failed" if row["error"] else f"{1e3 / row['milliseconds_per_token']:.0f}",
    "times the fastest plain mode": "{speedup[ratio]:.2f} [{speedup[low]:.2f}, {speedup[high]:.2f}]",
    "tokens per forward pass": lambda row: "" if row["error"] else f"{row['tokens_per_pass'] or 0:.2f}",
    "first token, ms": "{first_token_milliseconds:.0f}",
    "same texts": lambda row: "" if row["error"] or row["same"] is None else f"{row['same']} of {row['rows']}",
    "repeated 4-grams": lambda row: "" if row.get("repeated_4grams") is None else f"{row['repeated_4grams']:.0%}",
}


def tables(items: Found) -> list[Any]:
    """One table of all items whose rows are plain figures, and one for each race."""
    rows = [{"": item, **row} for item, one in items.items() for row in one.get("rows", ())]

    def cell(row: Found, name: str) -> Any:
        return f"{value:.3g}" if isinstance(value := row.get(name, ""), float) else value

    columns = {name: lambda row, name=name: cell(row, name) for row in rows for name in row}
    parts: list[Any] = [shown(columns, rows)] if rows else []
    for item, one in items.items():
        for point in one["result"]["points"] if "result" in one else ():
            timed = any(row.get("first_token_milliseconds") for row in point["rows"])
            shows = {title: form for title, form in RACED.items() if timed or not title.startswith("first")}
            parts += [f"{item}:", shown(shows, point["rows"])]
    return parts


gpu = Case(
    "gpu",
    """Everything that only a GPU shows: rounds, speed, batches, contexts, memory, offloading; as much as 12 minutes allow.

    python benchmarks/run.py gpu --json FOLDER/gpu.json                       all sections but `train`
    python benchmarks/run.py gpu --only speed train --json FOLDER/gpu.json    some of them
    python benchmarks/run.py gpu --quick                                      tiny targets, also without a GPU

The most valuable sections come first. Results are written after every item. A second call with the same file continues after
the last item; an item that failed or took too long is noted with its error and not tried again, unless with --again. Items run
in a process of their own, which is replaced after an error of the GPU.
""",
    run,
    options={
        "only": ([], f"sections: {', '.join(SECTIONS)}; all but the last by default"),
        "minutes": (12.0, "stop after these"),
        "again": (False, "try again what failed"),
        "item": ("", "only the items with this in their name"),
    },
    sections=(Section("benchmarks/gpu", "gpu"),),
    markdown=markdown,
)
