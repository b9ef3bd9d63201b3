"""Everything that only a GPU shows, in one command: identity, speed, batches, contexts, memory, offloading.

    python benchmarks/gpu.py --all --out benchmarks/                    all sections, about 25 minutes
    python benchmarks/gpu.py --only speed memory --out benchmarks/      some of them
    python benchmarks/gpu.py --all --short --out benchmarks/            less of each, about 10 minutes
    python benchmarks/gpu.py --read benchmarks/gpu.json                 the tables of a finished run

The most valuable sections come first. Results are written after every item to OUT/gpu.json. A second call with the same file
continues after the last item; an item that failed or took too long is noted with its error and not tried again, unless with
--again. Each section runs in processes of its own, because an error on a GPU makes a process unusable. gpu_sections.py has the
measurements; this file knows only their names.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SECTIONS = ("identity", "speed", "batches", "memory", "offload", "contexts", "quantized", "sampled", "bits")
"""In the order of their value."""
ITEM_SECONDS = 300  # an item that takes longer hangs
GO_ON = 4  # the status of a process after which another one takes the next item
ATTEMPTS = 2  # how often an item may be started: once more after its process or this one was killed
NAME = "gpu.json"
Found = dict[str, Any]


class Results:
    """The file with all results: {"about": {...}, "current": [section, item], "sections": {section: {item: result}}}.

    A result has "seconds" (of the item) when it is there, "error" when it failed; "started" counts the times it was begun.
    The file is written after every change.
    """

    def __init__(self, path: Path):
        self.path = path
        empty: Found = {"about": {}, "current": None, "sections": {}}
        self.found: Found = json.loads(path.read_text()) if path.exists() else empty

    @property
    def current(self) -> tuple[str, str] | None:
        """The section and the item that was begun and has no result."""
        return tuple(self.found["current"]) if self.found["current"] else None

    def done(self, section: str, item: str) -> bool:
        """Whether there is a result or an error."""
        result = self.found["sections"].get(section, {}).get(item, {})
        return "seconds" in result or "error" in result

    def put(self, section: str, item: str, result: Found) -> None:
        """Note a result or an error."""
        self.found["sections"].setdefault(section, {})[item] = result
        self.found["current"] = None
        self.write()

    def begin(self, section: str, item: str) -> bool:
        """Note that an item is begun. False, with an error noted, if it was begun too often."""
        items = self.found["sections"].setdefault(section, {})
        started = 1 + items.get(item, {}).get("started", 0)
        if started > ATTEMPTS:
            self.put(section, item, {"error": f"its process was ended {ATTEMPTS} times"})
            return False
        items[item] = {"started": started}
        self.found["current"] = [section, item]
        self.write()
        return True

    def fail_current(self, error: str) -> bool:
        """Note an error of the item that was begun; False if there is none."""
        if self.current is None:
            return False
        self.put(*self.current, {"error": error})
        return True

    def forget(self, sections: list[str]) -> None:
        """Drop the errors of these sections."""
        for name in sections:
            items = self.found["sections"].get(name, {})
            self.found["sections"][name] = {item: one for item, one in items.items() if "error" not in one}
        self.write()

    def write(self) -> None:
        """Replace the file in one step: whoever stops this process leaves a file that can be read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".partial")
        beside.write_text(json.dumps(self.found, indent=1) + "\n")
        os.replace(beside, self.path)


def run(args: argparse.Namespace) -> Found:
    """Run the sections one after the other, each in processes of its own, until everything is done or time is up."""
    path = args.out / NAME
    deadline = time.monotonic() + 60 * args.minutes
    if args.again:
        Results(path).forget(args.only)
    for section in args.only:
        while time.monotonic() < deadline and not section_ended(section, path, deadline, args):
            pass  # the process died within an item, which is noted; another process takes the next one
    return Results(path).found


def section_ended(section: str, path: Path, deadline: float, args: argparse.Namespace) -> bool:
    """Run a section in a process. False if the process ended before the section did, so that another one has to go on."""
    options = ["--section", section, "--out", str(args.out), "--device", args.device, "--size", args.size]
    options += ["--item", args.item] if args.item else []
    process = subprocess.Popen([sys.executable, __file__, *options], start_new_session=True)
    began, last = time.monotonic(), None
    while process.poll() is None:
        time.sleep(0.5)
        item = Results(path).current
        if item != last:
            began, last = time.monotonic(), item
        if time.monotonic() > deadline:
            stop(process)
            print(f"{section}: time is up", file=sys.stderr)
            return True
        if time.monotonic() - began > ITEM_SECONDS:
            stop(process)
            return not Results(path).fail_current(f"took more than {ITEM_SECONDS} seconds")
    if process.returncode in (0, GO_ON):
        return process.returncode == 0
    noted = Results(path).fail_current(f"its process ended with {process.returncode}")
    print(f"{section}: a process ended with {process.returncode}", file=sys.stderr)
    return not noted


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def work(args: argparse.Namespace) -> None:
    """The items of one section, in this process. Ends with the status GO_ON after an error of the device, and after every item
    of a section that measures memory."""
    import gpu_sections as measurements

    results = Results(args.out / NAME)
    if not results.found["about"]:
        results.found["about"] = measurements.about(args.device)
        results.write()
    for item, measure in measurements.items(args.section, args.device, args.size):
        if args.item not in item:
            continue
        if results.done(args.section, item) or not results.begin(args.section, item):
            continue
        print(f"{args.section}: {item}", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            result = measure()
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:400]}"
            results.put(args.section, item, {"error": text})
            print(f"  failed: {text}", file=sys.stderr, flush=True)
            if measurements.is_of_device(error):
                sys.exit(GO_ON)
        else:
            results.put(args.section, item, {**result, "seconds": round(time.monotonic() - started, 1)})
        measurements.tidy()
        if args.section in measurements.ALONE:
            sys.exit(GO_ON)


def markdown(found: Found) -> str:
    """All sections as Markdown."""
    about = found["about"]
    named = ", ".join(f"{name} {about[name]}" for name in ("torch", "transformers") if name in about)
    lines = [f"`python benchmarks/gpu.py --all`: {about.get('processor', 'no device yet')}, {named}, greedy."]
    lines[0] += f" {about['note']}" if "note" in about else ""
    for section in SECTIONS:
        items = found["sections"].get(section, {})
        measured = {item: one for item, one in items.items() if "seconds" in one}
        if items:
            lines += ["", f"**{TITLES[section]}**", ""]
        if measured:
            lines += list(TABLES[section](measured))
        lines += [f"\n{item}: failed. {one['error']}" for item, one in items.items() if "error" in one]
    return "\n".join(lines)


def table(header: Iterable[str], rows: Iterable[list[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    from assisted.lab.bench.table import (
        markdown_table,  # takes seconds, which processes that measure nothing needn't spend
    )

    return markdown_table(list(header), rows)


def identity_table(items: Found) -> Iterator[str]:
    """One row for each target and draft: rows with plain's tokens, eagerly and captured."""
    rows = []
    for item, one in items.items():
        cells = []
        for mode in one["modes"].values():
            gap = mode["largest_gap"]
            near = "" if gap is None else f" (gap {gap:.3f})"
            cells += [f"{mode['same']} of {mode['rows']}{near}", f"{mode['tokens_per_pass']:.2f}", mode["captured"]]
        rows.append([item, *cells])
    modes = next(iter(items.values()))["modes"]
    titles = [
        f"{mode}: {title}" for mode in modes for title in ("same texts", "tokens per forward pass", "captured passes")
    ]
    yield from table(["target, draft", *titles], rows)


def race_table(items: Found) -> Iterator[str]:
    """Every race's methods."""
    for item, one in items.items():
        for (point,) in (one["result"]["points"],):
            yield f"\n{item}:\n"
            rows = []
            for row in point["rows"]:
                if row["error"] is not None:
                    rows.append([row["name"], "failed", "", "", ""])
                    continue
                speedup = row["speedup"]
                times = f"{speedup['ratio']:.2f} [{speedup['low']:.2f}, {speedup['high']:.2f}]" if speedup else ""
                rate = 1e3 / row["milliseconds_per_token"]
                cells = [f"{rate:.0f}", times, f"{row['tokens_per_pass'] or 0:.2f}"]
                rows.append([row["name"], *cells, f"{row['same']} of {row['rows']}"])
            columns = ["", "tokens/s", "times the fastest plain mode", "tokens per forward pass", "same texts"]
            yield from table(columns, rows)


def speed_table(items: Found) -> Iterator[str]:
    """Milliseconds of forward passes, then the races."""
    rows = [[item, mode, *times.values()] for item, one in items.items() for mode, times in one["passes"].items()]
    if rows:
        header = next(iter(next(iter(items.values()))["passes"].values()))
        yield from table(["target", "forward passes", *header], rows)
    yield from race_table(items)


def memory_table(items: Found) -> Iterator[str]:
    gib = 2**30
    rows = []
    for item, one in items.items():
        sizes = [f"{one[name] / gib:.2f}" for name in ("plan", "used", "reserved", "allocated")]
        rows.append([item, *sizes, f"{one['plan'] / one['used'] - 1:+.1%}"])
    columns = ["load", "plan, GiB", "used on the card", "reserved", "allocated", "plan against used"]
    yield from table(columns, rows)


def rows_table(items: Found) -> Iterator[str]:
    """Items whose rows are plain figures."""
    columns = list(dict.fromkeys(name for one in items.values() for row in one["rows"] for name in row))
    cells = [
        [item, *(f"{v:.3g}" if isinstance(v := row.get(name, ""), float) else v for name in columns)]
        for item, one in items.items()
        for row in one["rows"]
    ]
    yield from table(["", *columns], cells)


def bits_table(items: Found) -> Iterator[str]:
    """What it costs; then, over all drafts and lengths, how many have the bytes of the text without drafts."""
    if costs := {item: one for item, one in items.items() if item.endswith("cost")}:
        yield from [*rows_table(costs), ""]
    rows = []
    for item, one in items.items():
        for sampled in (False, True):
            found = [row for row in one["rows"] if row.get("sampled") is sampled]
            counts = [[int(n) for n in row["same"].split(" of ")] for row in found]
            alone = [[int(n) for n in row.get("rows alone", "0 of 0").split(" of ")] for row in found]
            if found:
                same, rows_alone = (
                    " of ".join(str(sum(n)) for n in zip(*each, strict=True)) for each in (counts, alone)
                )
                kind = "sampled" if sampled else "greedy"
                hashes = sorted({row["plain"] for row in found})
                rows.append([item, kind, len(found), same, "" if sampled else rows_alone, ", ".join(hashes)])
    columns = ["", "tokens", "drafts", "the bytes of no draft", "rows with the bytes that they have alone", "hash"]
    yield from table(columns, rows) if rows else ()


TITLES = {
    "identity": "Texts against plain `generate`",
    "speed": "Speed",
    "batches": "Batches",
    "memory": "Memory against `assisted plan`",
    "offload": "A target larger than a card of 12 GB",
    "contexts": "Contexts",
    "quantized": "Quantized targets",
    "sampled": "Sampled tokens against their distribution",
    "bits": 'To the bit: `exact="bits"`',
}
TABLES = {
    "identity": identity_table,
    "speed": speed_table,
    "batches": race_table,
    "memory": memory_table,
    "offload": rows_table,
    "contexts": rows_table,
    "quantized": race_table,
    "sampled": rows_table,
    "bits": bits_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help=f"folder of {NAME} (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=25, help="stop after these (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="try again what failed")
    parser.add_argument("--item", metavar="TEXT", default="", help="only the items with this in their name")
    parser.add_argument(
        "--short", dest="size", action="store_const", const="short", default="full", help="less of everything"
    )
    parser.add_argument(
        "--quick", dest="size", action="store_const", const="tiny", help="tiny targets, to try the script"
    )
    parser.add_argument("--device", default="cuda", help="the device (default: %(default)s)")
    parser.add_argument("--read", type=Path, help="measure nothing, print the tables of this file")
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose `gpu` section is rewritten")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, not as tables")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=("full", "short", "tiny"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        work(args)
        return
    if not (args.all or args.only or args.read):
        parser.error("give --all, --only SECTION or --read FILE")
    args.only = list(args.only or SECTIONS)
    found = json.loads(args.read.read_text()) if args.read else run(args)
    text = markdown(found)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    from shared import publish

    publish(text, args.docs, "gpu")


if __name__ == "__main__":
    main()
