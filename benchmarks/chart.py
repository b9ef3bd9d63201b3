"""The charts that the docs show, drawn from the figures in this folder: one function each, by name in CHARTS."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from svg import BLUE, GREEN, GREY, ORANGE, PURPLE, Bar, bars, curves, groups, shares

FOLDER = Path(__file__).parent
FIGURES = FOLDER / "smollm2_kernels.json"
TIMES = "Speedup over the fastest plain mode; lines: 95% intervals"
PEERS = {  # of transformers' own drafting, whichever settings were its fastest
    "transformers assisted": "transformers, draft model",
    "transformers lookup": "transformers, lookup",
}
HEAD = '["suffix", "zoo:smollm2-eagle3"]'
SHOWN = {  # method -> its name in the chart
    "plain": "plain generate",
    "plain, static cache, compiled": "plain, compiled",
    "transformers lookup": "transformers prompt lookup",
    "no draft": "assisted, no draft",
    '"self:int8"': "assisted, 8-bit copy",
    '"suffix"': "assisted, suffix draft",
    HEAD: "assisted, suffix and EAGLE-3",
    '"self:int4"': "assisted, 4-bit copy",
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _rows(race: Mapping[str, Any], shown: Mapping[str, str]) -> list[Bar]:
    """The methods of a race that are in `shown`, there by name or, of transformers' own, by family."""
    found = []
    for row in race["points"][0]["rows"]:
        known = shown.get(row["name"]) or shown.get(row["family"] if row["family"].startswith("transformers") else "")
        if known:
            color = {"plain": GREY, "assisted": BLUE}.get(row["family"], ORANGE)
            found.append(Bar(known, row["speedup"]["ratio"], color, row["speedup"]["low"], row["speedup"]["high"]))
    return found


def _panels(name: str, titles: Mapping[str, str], shown: Mapping[str, str]) -> str:
    """A panel for each of these races of a file, which has the title that the race is given here."""
    found = read(name)
    return bars({short: _rows(found[title], shown) for title, short in titles.items()}, TIMES)


def home() -> str:
    races = read(FIGURES.stem)
    return bars({title: _rows(race, SHOWN) for title, race in races.items() if title != "about"}, TIMES)


def kinds() -> str:
    """The chat model by kind of request."""
    (race,) = (race for title, race in read(FIGURES.stem).items() if title != "about")
    shown = {
        "transformers lookup": ("transformers prompt lookup", ORANGE),
        '"suffix"': ("suffix", BLUE),
        '"self:int8"': ("8-bit copy", GREEN),
        HEAD: ("suffix and EAGLE-3", PURPLE),
    }
    rows = {}
    for kind, label in {"chat": "questions", "edit": "edits of code", "quote": "quotes", "JSON": "JSON"}.items():
        found = []
        for row in race["points"][0]["rows"]:
            name, color = shown.get(row["name"]) or shown.get(row["family"]) or ("", "")
            if name:
                found.append(Bar(name, row["by_category"][kind]["ratio"], color))
        rows[label] = found
    return groups(rows, "Speedup over the fastest plain mode")


def summary() -> str:
    """transformers' fastest, the default draft and the fastest draft, without compiled passes, in several races."""
    shipped, grown = read("shipped_pair"), read("grown")
    (chat,) = (race for title, race in read(FIGURES.stem).items() if title != "about")
    races = {
        "135 M chat, bfloat16": chat,
        "7 M, float32": shipped["Greedy, 48 tokens"],
        "7 M, float32, sampled": shipped["Temperature 0.8, top-p 0.95, 128 tokens"],
        "0.25 B, bfloat16": grown["0.25 B, greedy, 48 tokens"],
        "1 B, bfloat16": grown["1 B, greedy, 48 tokens"],
        "0.25 B, batch of 8": grown["0.25 B, batch 8, greedy, 48 tokens"],
    }
    rows = {}
    for label, race in races.items():
        ran = [row for row in race["points"][0]["rows"] if row["error"] is None and "compiled" not in row["name"]]
        chosen = {
            "transformers' fastest draft": (ORANGE, [row for row in ran if row["family"].startswith("transformers")]),
            '"suffix", the default draft': (
                GREEN,
                [row for row in ran if row["name"] in ('"suffix"', "suffix, Adaptive()")],
            ),
            "assisted's fastest draft": (
                BLUE,
                [row for row in ran if row["family"] == "assisted" and "no draft" not in row["name"]],
            ),
        }
        rows[label] = [
            Bar(name, best["ratio"], color, best["low"], best["high"])
            for name, (color, some) in chosen.items()
            if some
            for best in [max((row["speedup"] for row in some), key=lambda speedup: speedup["ratio"])]
        ]
    return groups(rows, TIMES)


def drafts() -> str:
    """The shipped pair, one row."""
    shown = {
        "plain": "plain, usual mode",
        "plain, static cache, compiled": "plain, compiled",
        **PEERS,
        "no draft, this loop": "no draft",
        "draft, Adaptive()": "draft model",
        "suffix, Adaptive()": "suffix",
        "EAGLE chain, Adaptive()": "EAGLE-3 head",
        "no draft, this loop, compiled": "no draft, compiled",
        "suffix, Adaptive(), compiled": "suffix, compiled",
    }
    titles = {"Greedy, 48 tokens": "Greedy", "Temperature 0.8, top-p 0.95, 128 tokens": "Temperature 0.8"}
    return _panels("shipped_pair", titles, shown)


def larger() -> str:
    shown = {
        **PEERS,
        "suffix, Adaptive()": "suffix",
        "draft, Adaptive()": "draft model",
        "EAGLE chain, Adaptive()": "EAGLE-3 head",
        "suffix and EAGLE chain, Adaptive()": "suffix and EAGLE-3",
    }
    titles = {
        "0.25 B, greedy, 48 tokens": "0.25 B, greedy",
        "0.25 B, temperature 0.8, top-p 0.95, 128 tokens": "0.25 B, temperature 0.8",
        "1 B, greedy, 48 tokens": "1 B, greedy",
        "1 B, temperature 0.8, top-p 0.95, 128 tokens": "1 B, temperature 0.8",
    }
    return _panels("grown", titles, shown)


def batches() -> str:
    shown = {
        "no draft, this loop": "no draft",
        "suffix, Adaptive()": "suffix",
        "draft, Adaptive()": "draft model",
        "EAGLE chain, Adaptive()": "EAGLE-3 head",
        "no draft, this loop, compiled": "no draft, compiled",
        "EAGLE chain, Fixed(tokens=3), compiled": "EAGLE-3, 3, compiled",
        "EAGLE chain, Fixed(2)": "EAGLE-3, 2 tokens",
    }
    races = {
        "7 M, float32": read("shipped_pair")["Batch 8, greedy, 48 tokens"],
        "7 M, bfloat16": read("shipped_pair")["bfloat16, batch 8, greedy, 48 tokens"],
        "0.25 B, bfloat16": read("grown")["0.25 B, batch 8, greedy, 48 tokens"],
    }
    return bars({title: _rows(race, shown) for title, race in races.items()}, TIMES)


def lengths() -> str:
    shown = {"no drafts": "no drafts", "fixed 2": "2 tokens", "fixed 4": "4 tokens", "fixed 8": "8 tokens"}
    shown |= {
        "heuristic": "Heuristic()",
        "confidence 0.4": "Confidence(0.4)",
        "adaedl": "AdaEDL()",
        "adaptive": "Adaptive()",
    }
    titles = {"shipped pair": "Good draft", "hopeless draft": "Hopeless draft"}
    panels = {}
    for draft, title in titles.items():
        rows = {row["name"]: row["against_plain"] for row in read("draft_length")["results"][f"{draft}, greedy"]}
        panels[title] = [
            Bar(label, rows[name]["ratio"], BLUE if name == "adaptive" else GREY, rows[name]["low"], rows[name]["high"])
            for name, label in shown.items()
            if name in rows
        ]
    return bars(panels, "Speedup over plain generate with a dynamic cache; temperature 0")


def contexts() -> str:
    colors = {
        "draft, Adaptive()": ("draft model", BLUE),
        "ngram, Adaptive()": ("n-gram", ORANGE),
        "suffix, Adaptive()": ("suffix", GREEN),
    }
    rows: dict[str, list[Bar]] = {}
    for row in read("contexts")["rows"]:
        if row["name"] in colors:
            name, color = colors[row["name"]]
            bar = Bar(name, row["speedup"]["ratio"], color, row["speedup"]["low"], row["speedup"]["high"])
            rows.setdefault(f"after {row['context']:,} tokens", []).append(bar)
    return groups(rows, "Speedup over plain generate, not compiled; lines: 95% intervals")


def engines() -> str:
    rows = []
    for name, runs in read("engines")["engines"].items():
        (run,) = runs
        color = BLUE if name.startswith("assisted") else GREY if name.startswith("plain") else ORANGE
        short = name.replace('"suffix+zoo:smollm2-eagle3"', "suffix and EAGLE-3").replace(" GenAI", "").replace('"', "")
        rows.append(Bar(short, 1e3 * sum(run["seconds"]) / sum(run["tokens"]), color))
    return bars({"": rows}, "Milliseconds per token, prompt included; less is better", digits=1, line=None)


def gpu() -> str:
    rows: dict[str, list[Bar]] = {}
    for row in read("gpu_first_run")["tokens_per_second"]:
        if row["rows"] == 1:
            name = row["way"].removeprefix("zoo:")
            rows[name] = [
                Bar(label, row[mode], color)
                for mode, label, color in (("eager", "eager", GREY), ("graphs", "CUDA graphs", BLUE))
                if mode in row
            ]
    return groups(rows, "Tokens per second, one row", digits=0, line=None)


def overhead() -> str:
    named = {
        "looking for changed weights": "changed weights",
        "drafting around passes": "drafting",
        "the chain of a draft": "drafting",
        "draft lengths": "draft length",
        "accepting": "accepting",
        "preparing a call": "preparing",
    }
    rows = {}
    for row in read("overhead")["rows"]:
        causes = dict.fromkeys([*named.values(), "other"], 0.0)
        for cause, share in row["causes"].items():
            if cause != "passes":
                causes[named.get(cause, "other")] += share
        rows[row["name"].replace(", this loop", "").replace("tokens=", "").replace("Adaptive()", "adaptive")] = causes
    return shares(rows, "Share of a call that is not a forward pass, by cause")


def memory() -> str:
    found = read("memory")
    every, names = found["about"]["every"], {"plain": "plain", "eager": 'fast="eager"', "auto": "default"}
    series = {
        names[way]: [(number * every, value) for number, value in enumerate(curve)]
        for way, curve in found["mebibytes"].items()
    }
    return curves(series, "Resident memory in MiB; the axis does not begin at 0", "calls", (400, 450, 500, 550, 600))


def offload() -> str:
    titles = {"greedy, 48 tokens": "7 M", "0.25 billion parameters, greedy, 32 tokens": "0.25 B"}
    panels = {}
    for title, size in titles.items():
        case = read("offload")[title]
        per_token = {name: row["bytes"] / row["tokens"] for name, row in case["rows"].items()}
        plain = per_token.pop("plain `generate`")
        panels[f"{size}, {case['dtype']}"] = [
            Bar(name.replace("size by", "by"), plain / one) for name, one in per_token.items()
        ]
    return bars(panels, "Times fewer bytes per token than plain generate")


CHARTS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        home, kinds, summary, drafts, larger, batches, lengths, contexts, engines, gpu, overhead, memory, offload,
    )
}  # fmt: skip


def chart(name: str = "home") -> str:
    """One of CHARTS as SVG."""
    return CHARTS[name]()
