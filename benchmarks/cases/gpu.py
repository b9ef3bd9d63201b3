"""What only a GPU shows: which sections there are, how their items are run, and their tables. gpu_sections.py measures."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
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
    "identity": "Texts against plain `generate`",
    "sampled": "Sampled tokens against their distribution",
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
        parts += [f"**{title}**"] * bool(items) + list(TABLES.get(section, rows_table)(measured) if measured else ())
        parts += [f"{item}: failed. {one['error']}" for item, one in items.items() if "error" in one]
    return page(*parts)


Parts = Iterator[str | list[str]]


def identity_table(items: Found) -> Parts:
    """One row for each target and draft: rows with plain's tokens, eagerly and captured."""
    columns: dict[str, Any] = {"target, draft": lambda one: one[0]}
    for mode in next(iter(items.values()))["modes"]:
        for title, form in {
            "same texts": "{same} of {rows}{gap}",
            "tokens per forward pass": "{tokens_per_pass:.2f}",
            "captured passes": "{captured}",
        }.items():
            columns[f"{mode}: {title}"] = lambda one, mode=mode, form=form: of_mode(one[1]["modes"][mode], form)
    yield shown(columns, items.items())


def of_mode(mode: Found, form: str) -> str:
    gap = mode["largest_gap"]
    return form.format(**mode, gap="" if gap is None else f" (gap {gap:.3f})")


RACED: dict[str, Any] = {
    "": "{name}",
    "tokens/s": lambda row: "failed" if row["error"] else f"{1e3 / row['milliseconds_per_token']:.0f}",
    "times the fastest plain mode": "{speedup[ratio]:.2f} [{speedup[low]:.2f}, {speedup[high]:.2f}]",
    "tokens per forward pass": lambda row: "" if row["error"] else f"{row['tokens_per_pass'] or 0:.2f}",
    "same texts": lambda row: "" if row["error"] or row["same"] is None else f"{row['same']} of {row['rows']}",
    "repeated 4-grams": lambda row: "" if row.get("repeated_4grams") is None else f"{row['repeated_4grams']:.0%}",
}


def race_table(items: Found) -> Parts:
    """Every race's methods."""
    for item, one in items.items():
        (point,) = one["result"]["points"]
        yield from (f"{item}:", shown(RACED, point["rows"]))


def speed_table(items: Found) -> Parts:
    """Milliseconds of forward passes, which earlier runs measured here, then the races."""
    rows = [
        {"target": item, "forward passes": mode, **times}
        for item, one in items.items()
        for mode, times in one.get("passes", {}).items()
    ]
    if rows:
        yield shown({title: lambda row, title=title: row[title] for title in rows[0]}, rows)
    yield from race_table(items)


def memory_table(items: Found) -> Parts:
    def gib(name: str) -> Any:
        return lambda row: f"{row[1][name] / 2**30:.2f}"

    columns = {
        **{"load": lambda row: row[0], "plan, GiB": gib("plan"), "used on the card": gib("used")},
        **{name: gib(name) for name in ("reserved", "allocated")},
        "plan against used": lambda row: f"{row[1]['plan'] / row[1]['used'] - 1:+.1%}",
    }
    yield shown(columns, items.items())


def rows_table(items: Found) -> Parts:
    """Items whose rows are plain figures."""
    rows = [{"": item, **row} for item, one in items.items() for row in one["rows"]]

    def cell(row: Found, name: str) -> Any:
        return f"{value:.3g}" if isinstance(value := row.get(name, ""), float) else value

    yield shown({name: lambda row, name=name: cell(row, name) for row in rows for name in row}, rows)


def bits_table(items: Found) -> Parts:
    """What it costs; then, over all drafts and lengths, how many have the bytes of the text without drafts."""
    if costs := {item: one for item, one in items.items() if item.endswith("cost")}:
        yield from rows_table(costs)
    rows = []
    for item, one in items.items():
        for kind in ("greedy", "sampled"):
            found = [row for row in one["rows"] if row.get("sampled") is (kind == "sampled")]
            if found:
                hashes = ", ".join(sorted({row["plain"] for row in found}))
                same, alone = (summed(row.get(name, "0 of 0") for row in found) for name in ("same", "rows alone"))
                alone = alone if kind == "greedy" else ""
                rows.append(
                    {"item": item, "kind": kind, "drafts": len(found), "same": same, "alone": alone, "hash": hashes}
                )
    columns = {"": "{item}", "tokens": "{kind}", "drafts": "{drafts}", "the bytes of no draft": "{same}"}
    columns |= {"rows with the bytes that they have alone": "{alone}", "hash": "{hash}"}
    yield shown(columns, rows) if rows else ""


def summed(counts: Any) -> str:
    """Of counts such as "2 of 3"."""
    return " of ".join(
        str(sum(map(int, each))) for each in zip(*(count.split(" of ") for count in counts), strict=True)
    )


TABLES = {"identity": identity_table, "speed": speed_table, "memory": memory_table, "bits": bits_table}
TABLES |= dict.fromkeys(("copies", "batches", "quantized"), race_table)


gpu = Case(
    "gpu",
    """Everything that only a GPU shows: identity, speed, batches, contexts, memory, offloading; as much as 12 minutes allow.

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
