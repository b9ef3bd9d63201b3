"""The shipped heads, EAGLE-3 and Medusa, against the shipped draft, in chains and in trees, interleaved in one run.

    python benchmarks/heads.py --out benchmarks/heads.json --docs docs/benchmarks/which-draft.md
    python benchmarks/heads.py --read benchmarks/heads.json --docs docs/benchmarks/which-draft.md      # the tables again

Held-out functions, cut in the middle; float32; the same number of new tokens for all (end tokens ignored); temperature 0 and
0.8; by the protocol of `assisted bench`. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from tables import arguments, figures, paired, publish, raced, races, shipped

from assisted import Eagle, Medusa, Merged
from assisted.bench import Rules, held_out_prompts
from assisted.bench.table import percent

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
COLUMNS = ("`draft=`", "tokens per pass", "speedup", "drafted", "drafting", "same tokens", "repeated 4-grams")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All methods at every temperature."""
    pair, _ = shipped()
    prompts = list(islice(held_out_prompts(pair.tokenizer), args.prompts))
    methods = paired(pair.target, pair.tokenizer, CONTESTANTS)
    found: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        rules = Rules(args.new_tokens, args.repeats, temperature, 0.95 if temperature else 1.0)
        title = f"Temperature {temperature:g}{', top-p 0.95' if temperature else ''}, {args.new_tokens} tokens"
        result = raced(args, pair, methods, prompts, rules).to_dict()
        found |= {"about": result["machine"], title: result}
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


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    cells = {
        "`draft=`": lambda row: f"`{_written(*CONTESTANTS[row.name])}`" if row.name in CONTESTANTS else "",
        "drafted": lambda row: f"{row.drafted_per_pass:.1f}",
        "drafting": lambda row: percent(row.draft),
    }
    note = " Drafted is the mean number of tokens that a pass checks. Drafting is its share of the time."
    return races(found, "heads", COLUMNS, note, **cells)


def main() -> None:
    args = arguments(__doc__, repeats=2, numbers={"--new-tokens": (48, "of each prompt")}).parse_args()
    publish(markdown(figures(args, measure)), args.docs, "heads")


if __name__ == "__main__":
    main()
