"""The draft length policies on simulated pairs and texts, in simulated seconds: no model and no clock.

    python benchmarks/simulated.py --sweep              what half and twice each constant of the adaptive length does
    python benchmarks/simulated.py --cards              captured passes, batches, long prompts: against the best fixed length
    python benchmarks/simulated.py --at-once            the same: lengths that are chosen before a draft, or within it

A figure is the speedup over the baseline, the mean over the scenario's texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from simulation import HOPELESS, PAIRS, Pair, Run, Source, simulate

from assisted.lengths import Adaptive, DraftLength, Fixed, adaptive, cost_model, rates
from assisted.lengths.policies import Never

TOKENS = 1500
SOURCES = {
    "switching": Source(),
    "long stretches": Source(stretches=(300.0, 150.0)),
    "one regime": Source(stretches=(1e9, 1.0), confidences=((4.0, 1.5), (2.0, 4.0))),
    "confidence uninformative": Source(
        stretches=(1e9, 1.0), confidences=((3.0, 3.0), (2.0, 4.0)), power=0.0, scale=0.7
    ),
}
OVERLAPPING = Source(stretches=(1e9, 1.0), confidences=((1.5, 6.0), (2.0, 4.0)), power=0.0, scale=0.75)
MACHINES = {
    "cheap draft": PAIRS[0],
    "usual draft": PAIRS[1],
    "expensive draft": PAIRS[2],
    "expensive second position": Pair(0.12, 0.005, first_column=0.2),
    "expensive first draft pass": Pair(0.1, 0.02, start=0.3),
}


def texts(source: Source, rows: int = 1, tokens: int = TOKENS, seed: int = 0) -> list[list[tuple[float, bool]]]:
    return [source.text(tokens + 64, seed * rows + row) for row in range(rows)]


def mean(runs: Sequence[Run]) -> float:
    return sum(run.plain for run in runs) / sum(run.seconds for run in runs)


CONSTANTS = (
    *("KEEP", "KEEP_LOCAL", "PRIOR", "ENOUGH", "SAMPLES", "COLUMN"),
    *("CREDIT", "PROBE_SHARE", "STRETCH", "DRAFT", "PAUSE", "STALE"),
)
"""Those of the cost model and of the adaptive length that were chosen by simulation."""
Scenario = Callable[[DraftLength, int], float]
"""The speedup of a policy over so many texts."""


def steady(pair: Pair, source: Source, rows: int = 1, **how: Any) -> Scenario:
    """One long call for each text."""
    return lambda policy, seeds: mean(
        [simulate(policy, pair, texts(source, rows, seed=s), TOKENS, s, **how) for s in range(seeds)]
    )


def short(
    pair: Pair, source: Source, warm: bool, tokens: int = 48, calls: int = 16, rows: int = 1, **how: Any
) -> Scenario:
    """Many short calls. warm: each continues from the one before it, as the first of each seed do not."""

    def run(policy: DraftLength, seeds: int) -> float:
        runs: list[Run] = []
        for seed in range(calls * seeds):
            goes_on = warm and seed % calls
            earlier, how["captures"] = (runs[-1].length, runs[-1].captures) if goes_on else (None, None)
            runs.append(simulate(policy, pair, texts(source, rows, tokens, seed), tokens, seed, earlier, **how))
        return mean(runs)

    return run


def turning(pair: Pair, first: Source, second: Source) -> Scenario:
    """A text that changes its nature half-way."""
    return lambda policy, seeds: mean(
        [
            simulate(policy, pair, [first.text(TOKENS, s) + second.text(TOKENS + 64, s)], 2 * TOKENS, s)
            for s in range(seeds)
        ]
    )


def scenarios() -> dict[str, Scenario]:
    found: dict[str, Scenario] = {}
    for machine, pair in MACHINES.items():
        for name, source in SOURCES.items():
            found[f"{name}, {machine}"] = steady(pair, source)
        found[f"sampled, overlapping, {machine}"] = steady(pair, OVERLAPPING, sampled=True)
        for name in ("switching", "long stretches", "confidence uninformative"):
            found[f"batch of 4, {name}, {machine}"] = steady(pair, SOURCES[name], 4)
    for machine, pair in list(MACHINES.items())[:3]:
        found[f"hopeless, {machine}"] = steady(pair, HOPELESS)
        found[f"hopeless, short calls, {machine}"] = short(pair, HOPELESS, False, 256, 4)
        found[f"turns good, {machine}"] = turning(pair, HOPELESS, SOURCES["long stretches"])
        found[f"turns hopeless, {machine}"] = turning(pair, SOURCES["long stretches"], HOPELESS)
        found[f"blocks, {machine}"] = steady(pair, SOURCES["one regime"], asks=False)
        found[f"short calls, cold, {machine}"] = short(pair, SOURCES["switching"], False)
        found[f"short calls, warm, {machine}"] = short(pair, SOURCES["switching"], True)
    found["hopeless blocks"] = steady(PAIRS[1], HOPELESS, asks=False)
    found["batch of 8, few rows find something"] = steady(
        Pair(0.05, 0.15), SOURCES["one regime"], 8, asks=False, found=0.3
    )
    busy = Pair(0.3, 0.05, row=0.1)  # a processor at its limit: further columns of eight rows cost nearly half a pass
    for name, source in {**SOURCES, "hopeless": HOPELESS}.items():
        found[f"batch of 8, busy, {name}"] = steady(busy, source, 8, asks=False, found=0.5)
        for warm in (False, True):
            found[f"batch of 8, busy, short calls, {'warm' if warm else 'cold'}, {name}"] = short(
                busy, source, warm, 48, 6, rows=8, asks=False, found=0.5
            )
    for every in (50.0, 300.0):
        for machine, pair in list(MACHINES.items())[:3]:
            changing = dataclasses.replace(pair, slow=1.7, turns=every)
            for name in ("switching", "confidence uninformative"):
                found[f"speed changes every {every:g} rounds, {name}, {machine}"] = steady(changing, SOURCES[name])
            found[f"speed changes every {every:g} rounds, short calls, warm, {machine}"] = short(
                changing, SOURCES["switching"], True
            )
            found[f"speed changes every {every:g} rounds, hopeless, {machine}"] = steady(changing, HOPELESS)
    found["short calls, expensive positions"] = short(Pair(0.05, 0.6), SOURCES["one regime"], False, 96, 8)
    return found


POOR = Source(stretches=(1e9, 1.0), confidences=((3.0, 3.0), (2.0, 4.0)), power=0.0, scale=0.4)
CARDS = {  # passes of 2 to 9 ms; a capture takes 50 to 300 ms
    "7 billion, cheap draft": Pair(0.06, 0.005, first_column=0.05, capture=12.0),
    "1 billion, usual draft": Pair(0.2, 0.005, first_column=0.1, capture=50.0),
    "expensive draft": Pair(0.7, 0.01, first_column=0.1, capture=25.0),
}
ROWS = 0.003  # what a column of a further row adds there


def cards(ahead: int = 16, host: float = 0.0, at_once: bool = False) -> dict[str, Scenario]:
    """Captured passes: one row and eight, long calls and short ones, short prompts and long ones; and heads that read the
    prompt first.

    ahead: the most columns of the shapes that were captured before the calls. host, at_once: as for `simulate`, of the captured
    drafts that ask.
    """
    found: dict[str, Scenario] = {}
    written = {"switching": Source(), "informative": SOURCES["one regime"], "poor": POOR, "hopeless": HOPELESS}
    cards = {name: dataclasses.replace(pair, ahead=ahead, host=host) for name, pair in CARDS.items()}
    how = {"at_once": at_once}
    for card, one in cards.items():
        for name, source in written.items():
            for rows in (1, 8):
                pair = dataclasses.replace(one, row=ROWS if rows > 1 else 0.0)
                found[f"{card}, {name}, {rows} x {TOKENS}"] = steady(pair, source, rows, **how)
                found[f"{card}, {name}, 32 calls of {rows} x 64"] = short(pair, source, True, 64, 32, rows, **how)
    for name, source in written.items():
        pair = Pair(0.1, 0.01, first_column=0.1, capture=20.0, prompt=15.0, ahead=ahead, host=host)
        how["context"] = 16384
        found[f"16,384 tokens of context, {name}"] = steady(pair, source, **how)
        found[f"16,384 tokens of context, {name}, 32 calls of 64"] = short(pair, source, True, 64, 32, **how)
        found[f"lookup, {name}"] = steady(cards["7 billion, cheap draft"], source, asks=False, found=0.5)
        eight = dataclasses.replace(cards["1 billion, usual draft"], row=ROWS)
        found[f"lookup, {name}, 32 calls of 8 x 64"] = short(eight, source, True, 64, 32, 8, asks=False, found=0.5)
    for prompt in (6.0, 24.0, 60.0):
        for tokens in (64, 256):
            for name, source in written.items():
                head = Pair(0.15, 0.03, first_column=0.1, prompt=prompt)
                title = f"head that reads the prompt for {prompt:g} passes, {name}, 16 calls of {tokens}"
                found[title] = short(head, source, True, tokens, 16)
    for name, source in written.items():  # a prompt of 64 tokens
        head = Pair(0.15, 0.03, first_column=0.1, prompt=6.0)
        found[f"head that reads a short prompt, {name}, 16 calls of 64"] = short(
            head, source, True, 64, 16, is_short=True
        )
    return found


def against_fixed(seeds: int, ahead: int) -> dict[str, dict[str, float]]:
    """The speedups of the adaptive length and of the best fixed one in each scenario of `cards`, and their ratio."""
    fixed = [Never(), *(Fixed(n) for n in (1, 2, 4, 7, 8, 15))]
    found = {}
    for name, run in cards(ahead).items():
        own, best = run(Adaptive(), seeds), max(run(policy, seeds) for policy in fixed)
        found[name] = {"adaptive": own, "best fixed": best, "ratio": own / best}
        print(f"| {name} | {own:.3f} | {best:.3f} | {own / best:.3f} |", flush=True)
    return found


HOST = (
    0.1  # passes that a decision within a draft takes; more on an H100, where such rounds take 31 ms, with 4 tokens 19
)


def at_once(seeds: int, ahead: int) -> dict[str, dict[str, float]]:
    """The speedups of the adaptive length in each scenario of `cards` whose draft asks: asked before every token, for nothing
    and for `HOST`, and with drafts of a length that was chosen before."""
    ways = {"asked": cards(ahead), "asked, waiting": cards(ahead, HOST), "at once": cards(ahead, HOST, True)}
    found = {}
    for name in ways["asked"]:
        if not name.startswith(("lookup", "head")):
            own = found[name] = {way: scenarios[name](Adaptive(), seeds) for way, scenarios in ways.items()}
            own["ratio"] = own["at once"] / own["asked, waiting"]
            print(f"| {name} | " + " | ".join(f"{figure:.3f}" for figure in own.values()) + " |", flush=True)
    return found


def measure(policy: DraftLength, seeds: int) -> dict[str, float]:
    return {name: run(policy, seeds) for name, run in scenarios().items()}


def change(before: dict[str, float], after: dict[str, float]) -> tuple[float, float, str]:
    """Geometric mean of after / before, the smallest ratio, and its scenario."""
    ratios = {name: after[name] / before[name] for name in before}
    worst = min(ratios, key=ratios.__getitem__)
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)), ratios[worst], worst


def sweep(seeds: int) -> None:
    """What half and twice each constant does to the adaptive length."""
    usual = measure(Adaptive(), seeds)
    print("| constant | factor | mean | worst scenario |\n|---|---|---|---|")
    for name in CONSTANTS:
        homes = [module for module in (cost_model, rates, adaptive) if hasattr(module, name)]
        value = getattr(homes[0], name)
        for factor in (0.5, 2):
            changed = 1 - (1 - value) * factor if name.startswith("KEEP") else type(value)(value * factor)
            try:
                for home in homes:
                    setattr(home, name, changed)
                overall, least, where = change(usual, measure(Adaptive(), seeds))
            finally:
                for home in homes:
                    setattr(home, name, value)
            print(f"| `{name}` = {value} | {changed:g} | {overall:.3f} | {least:.3f} ({where}) |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="texts of each scenario (default: 3)")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--sweep", action="store_true", help="halve and double each constant of the adaptive length")
    way.add_argument("--cards", action="store_true", help="against the best fixed length, with captured passes")
    way.add_argument("--at-once", action="store_true", help="the same, with lengths chosen before or within a draft")
    text = "columns captured before the calls (default: 16; 0: none)"
    parser.add_argument("--ahead", type=int, default=16, help=text)
    parser.add_argument("--out", type=Path, help="file for the figures of --cards and --at-once, as JSON")
    args = parser.parse_args()
    if args.sweep:
        sweep(args.seeds)
        return
    ratios = (at_once if args.at_once else against_fixed)(args.seeds, args.ahead)
    worst = min(ratios, key=lambda name: ratios[name]["ratio"])
    print(f"{len(ratios)} scenarios; the least ratio is {ratios[worst]['ratio']:.3f} ({worst})")
    if args.out is not None:
        rounded = {name: {key: round(x, 4) for key, x in each.items()} for name, each in ratios.items()}
        args.out.write_text(json.dumps({"ahead": args.ahead, "scenarios": rounded}, indent=1) + "\n")


if __name__ == "__main__":
    main()
