"""The shipped heads, EAGLE-3 and Medusa, against the shipped draft, in chains and in trees, interleaved in one run.

    python benchmarks/heads.py --json benchmarks/heads.json --docs docs/methods/{eagle,medusa,specinfer}.md docs/benchmarks.md
    python benchmarks/heads.py --read benchmarks/heads.json --docs docs/methods/eagle.md      # the tables again, nothing run

Held-out functions, cut in the middle; float32; the same number of new tokens for all (end tokens ignored); temperature 0 and
0.8; by the protocol of `assisted bench`. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tables import CELLS, OPTIONS, about, arguments, figures, paired, publish, raced, shipped

from assisted import Eagle, Medusa, Merged
from assisted.bench import Interval, Row, Rules, held_out_prompts
from assisted.bench.table import markdown_table

TEMPERATURES = (0.0, 0.8)
DRAFTED = 4  # tokens: the fixed draft length, and what the shipped Medusa heads reach
CONTESTANTS: dict[str, tuple[Any, int | None]] = {
    "draft model, chain of 4": ("zoo:draft", DRAFTED),
    "draft model, default length": ("zoo:draft", None),
    "Medusa, list": (Medusa("zoo:medusa", tree=False), DRAFTED),
    "Medusa, tree sized by its cost (default)": ("zoo:medusa", None),
    "Medusa, tree of 16 nodes": (Medusa("zoo:medusa", nodes=16), DRAFTED),
    "EAGLE-3, chain of 4": (Eagle("zoo:eagle3", tree=False), DRAFTED),
    "EAGLE-3, default: tree sized by its cost; chain when sampling": ("zoo:eagle3", None),
    "EAGLE-3, tree of 8 nodes": (Eagle("zoo:eagle3", tree=True, nodes=8), DRAFTED),
    "EAGLE-3, tree of 32 nodes": (Eagle("zoo:eagle3", tree=True, top_k=6, nodes=32), 6),
    "SpecInfer, draft model and EAGLE-3": (Merged(("zoo:draft", Eagle("zoo:eagle3", tree=False))), DRAFTED),
}
"""By the name of the row: the draft and the draft length."""
COLUMNS = ("", "`draft=`", "tokens per pass", "times plain", "columns", "drafting", "repeated 4-grams")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All contestants at every temperature, ready for json."""
    pair, _ = shipped()
    prompts = list(islice(held_out_prompts(pair.tokenizer), args.prompts))
    found = about(pair, prompts=len(prompts), repeats=args.repeats, new_tokens=args.new_tokens)
    contestants = paired(pair.target, pair.tokenizer, CONTESTANTS)
    for temperature in TEMPERATURES:
        rules = Rules(args.new_tokens, args.repeats, temperature, 0.95 if temperature else 1.0)
        (measured,) = raced(args, pair, contestants, prompts, rules).points
        shown = [row for row in measured.ran if row.name == measured.baseline or row.family == "assisted"]
        found[f"temperature {temperature:g}"] = [_row(row) for row in shown]
    return found


def _row(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        **asdict(row.speedup),
        "repeated_4grams": row.repeated_4grams,
        "same": CELLS["same tokens"](row) or None,
    }
    if row.name in CONTESTANTS:
        counts = {"drafted_per_pass": row.drafted_per_pass, "draft_share": row.draft}
        found |= {"tokens_per_pass": row.tokens_per_pass, **counts, "written": _written(*CONTESTANTS[row.name])}
    return found


def _written(draft: Any, length: int | None = None) -> str:
    """A spec as a caller writes it: defaults are left out, the first field has no name."""
    if length is not None:
        return f"{_written(draft)}, draft_length={length}"
    if isinstance(draft, tuple):
        return f"[{', '.join(map(_written, draft))}]"
    if not is_dataclass(draft):
        return json.dumps(draft)
    first, *others = fields(draft)
    more = [f"{f.name}={getattr(draft, f.name)}" for f in others if getattr(draft, f.name) != f.default]
    return f"{type(draft).__name__}({', '.join([_written(getattr(draft, first.name)), *more])})"


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"`{row['written']}`",
        f"{row['tokens_per_pass']:.2f}",
        str(Interval(row["ratio"], row["low"], row["high"])),
        f"{row['drafted_per_pass']:.1f}",
        f"{row['draft_share']:.0%}",
        f"{row['repeated_4grams']:.0%}",
    ]


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    lines = [
        f"`python benchmarks/heads.py --prompts {found['prompts']} --repeats {found['repeats']} --threads {found['threads']} "
        f"--new-tokens {found['new_tokens']}`: held-out functions cut in the middle, batch 1, float32, a CPU, torch "
        f"{found['torch']}, transformers {found['transformers']}, all contestants in turns in one run. Tokens per pass "
        "include the target's own and the pass that reads the prompt. Times plain: against the fastest mode of plain "
        "`generate`, with a 95% bootstrap interval. "
        "Columns: drafted tokens that a pass checks, mean. Drafting: its share of the time.",
    ]
    for title, rows in found.items():
        if not isinstance(rows, list):
            continue
        plain = rows[0]
        lines += [
            "",
            f"**{title.capitalize()}{', top-p 0.95' if plain['same'] is None else ''}**. Repeated 4-grams of plain `generate`: "
            f"{plain['repeated_4grams']:.0%}. 1.00 is {plain['name']}.",
            "",
            *markdown_table(COLUMNS, map(_cells, rows[1:])),
        ]
        if plain["same"] is not None:
            others = {row["same"] for row in rows[1:]}
            lines += [
                "",
                f"The same tokens as plain `generate`: {', '.join(sorted(others))} prompts, every contestant.",
            ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, [option for option in OPTIONS if option != "--out"], repeats=2)
    parser.add_argument("--new-tokens", type=int, default=48, help="of each prompt (default: %(default)s)")
    parser.add_argument("--json", dest="out", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "heads")


if __name__ == "__main__":
    main()
