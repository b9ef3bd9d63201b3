"""Grown targets in bfloat16: the shipped target's text and acceptance at the cost of 0.25 or 1 billion parameters.

    python benchmarks/grown.py --threads 1 --out benchmarks/grown.json --docs docs/benchmarks/larger-targets.md

The draft and the head are the shipped ones. Next to a target of this size they cost almost nothing, like a draft of a
thousandth of the target's size. The vocabulary of 4096 makes the target's output layer cheaper than a real one's. So the tables
show the cost of verifying several tokens on this machine, and the speedup for a given acceptance.
"""

from __future__ import annotations

from typing import Any

import torch
from shipped_pair import COLUMNS
from tables import arguments, figures, paired, publish, raced, races, write_json

from assisted import AssistedModelForCausalLM, DraftModel, Eagle
from assisted.bench import Method, Rules, lookups, read, transformers_assisted
from assisted.lengths import Fixed
from assisted.lengths.adaptive import Adaptive
from tools.grown import load_target
from tools.grown_head import shipped_head

SAMPLED = {"temperature": 0.8, "top_p": 0.95}
# title: target, rules, rows, share of the prompts, whether transformers' own drafting takes part
CASES = {
    "0.25 B, greedy, 48 tokens": ("grown:0.25b", Rules(new_tokens=48), 1, 1.0, True),
    "0.25 B, temperature 0.8, top-p 0.95, 128 tokens": ("grown:0.25b", Rules(new_tokens=128, **SAMPLED), 1, 0.5, False),
    "0.25 B, batch 8, greedy, 48 tokens": ("grown:0.25b", Rules(new_tokens=48), 8, 1.0, False),
    "1 B, greedy, 48 tokens": ("grown:1b", Rules(new_tokens=48), 1, 0.4, False),
    "1 B, temperature 0.8, top-p 0.95, 128 tokens": ("grown:1b", Rules(new_tokens=128, **SAMPLED), 1, 0.4, False),
}


def methods(pair: AssistedModelForCausalLM, batch: int) -> list[Method]:
    """The draft and the head at several lengths, alone and combined with the suffix drafter."""
    draft, head = DraftModel(pair.drafter.models[0]), shipped_head(pair.target)
    tried = {
        "draft, Adaptive()": (draft, Adaptive()),
        "draft, Fixed(5)": (draft, Fixed(5)),
        "suffix and draft, Adaptive()": (["suffix", draft], Adaptive()),
        "suffix, Adaptive()": ("suffix", Adaptive()),
        "EAGLE chain, Adaptive()": (Eagle(head, tree=False), Adaptive()),
        "EAGLE chain, Fixed(5)": (Eagle(head, tree=False), Fixed(5)),
        "suffix and EAGLE chain, Adaptive()": (["suffix", Eagle(head, tree=False)], Adaptive()),
        "EAGLE tree of 7, Adaptive()": (Eagle(head, tree=True, nodes=7), Adaptive()),
    }
    if batch > 1:
        tried = {name: one for name, one in tried.items() if "tree" not in name and "Fixed" not in name}
        tried |= {"draft, Fixed(2)": (draft, Fixed(2)), "EAGLE chain, Fixed(2)": (Eagle(head, tree=False), Fixed(2))}
    return paired(pair.target, pair.tokenizer, tried)


def measure(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, (size, rules, batch, part, peers) in CASES.items():
        if args.only and not title.startswith(args.only):
            continue
        target, tokenizer = load_target(size, getattr(torch, args.dtype))
        pair = AssistedModelForCausalLM.from_models(target, draft="zoo:draft", tokenizer=tokenizer)
        count = max(2, round(args.prompts * part))
        prompts = read(["code"], pair.tokenizer, batch * 2 if batch > 1 else count)
        others = [*transformers_assisted(pair), *lookups(pair.target)] if peers else []
        own = methods(pair, batch)
        result = raced(args, pair, own, prompts, rules, batch, others, size, "zoo:draft").to_dict()
        found |= {title: result, "about": result["machine"]}
        print(markdown(found), flush=True)
        write_json(args.out, found)
    return found


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in docs."""
    return races(found, "grown", COLUMNS)


def main() -> None:
    parser = arguments(__doc__, prompts=8, repeats=1)
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft (default: %(default)s)")
    parser.add_argument(
        "--only", metavar="BEGINNING", help="of the titles of the cases that are measured (default: all)"
    )
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "grown")


if __name__ == "__main__":
    main()
