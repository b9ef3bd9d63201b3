"""The shipped heads, EAGLE-3 and Medusa, against the shipped draft, in chains and in trees."""

import json
from dataclasses import fields, is_dataclass

from shared import SAMPLED, Race, Section

from assisted import Eagle, Medusa, Merged
from assisted.lab.bench import Rules
from assisted.lab.bench.table import percent

DRAFTED = 4  # tokens: the fixed draft length, and what the shipped Medusa heads reach
DRAFTS = {
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
OPTIONS = {"repeats": 2}
QUICK = {"drafts": ["Medusa, list", "EAGLE-3, chain of 4"]}
SECTIONS = (Section("benchmarks/which-draft", "heads"),)


def races(args):
    return {
        "Temperature 0, 48 tokens": Race(DRAFTS),
        "Temperature 0.8, top-p 0.95, 48 tokens": Race(DRAFTS, rules=Rules(48, **SAMPLED)),
    }


def _written(draft, length=None):
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


TABLE = {
    "columns": ("`draft=`", "tokens per pass", "speedup", "drafted", "drafting", "same tokens", "repeated 4-grams"),
    "note": "Drafted is the mean number of tokens that a pass checks. Drafting is its share of the time.",
    "`draft=`": lambda row: f"`{_written(*DRAFTS[row.name])}`" if row.name in DRAFTS else "",
    "drafted": lambda row: f"{row.drafted_per_pass:.1f}",
    "drafting": lambda row: percent(row.draft),
}
