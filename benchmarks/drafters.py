"""Every drafter on the shipped target, interleaved in one run: free text and text that is copied.

    python benchmarks/drafters.py --out benchmarks/drafters.json --docs docs/methods/index.md

Free: held-out functions, cut in the middle. Copied: a held-out function, then its first half again under another
name, to be gone on with. Float32, the same number of new tokens for all (end tokens ignored), temperature 0.
Every contestant takes its turn at every prompt; the ratio to plain is formed prompt by prompt.
"""

from __future__ import annotations

import argparse
import gc
import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shipped_pair import Run, interval, machine, ours, race, write_docs
from shipped_pair import counts as counts_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, Merged, zoo
from assisted.comparison import held_out_prompts, repeated_share

TARGET = "zoo:target"
DRAFTS: dict[str, Any] = {
    '"suffix"': "suffix",
    '"ngram"': "ngram",
    '"recycle"': "recycle",
    '"early-exit"': "early-exit",
    '"layer-skip"': "layer-skip",
    '"self:int8"': "self:int8",
    '"zoo:draft"': "zoo:draft",
    '"zoo:draft-other-tokenizer"': "zoo:draft-other-tokenizer",
    '["suffix", "zoo:draft"]': ["suffix", "zoo:draft"],
    'Merged(["zoo:draft", "suffix"])': Merged(("zoo:draft", "suffix")),
}
NEW_TOKENS = {"free text": 48, "copied text": 48}


def prompts(tokenizer: Any, kind: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for prompt in islice(held_out_prompts(tokenizer), count):
        text = prompt.text if kind == "free text" else _begun_again(prompt.text)
        ids = tokenizer(text, return_tensors="pt").input_ids
        found.append((ids, torch.ones_like(ids)))
    return found


def _begun_again(function: str) -> str:
    """A function, and its first half once more under another name."""
    lines = function.split("\n")
    name = lines[0].split("(")[0].removeprefix("def ").strip()
    half = "\n".join(lines[: (len(lines) + 1) // 2])
    return f"{function}\n\n\n" + half.replace(f"def {name}", f"def {name}_again", 1)


def measure(names: list[str], count: int, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        **machine(),
        "prompts": count,
        "repeats": repeats,
    }
    folder = zoo.folder("target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target.generation_config.eos_token_id = None
    models = {}
    for name in names:
        models[name] = AssistedModelForCausalLM.from_models(target, draft=DRAFTS[name], tokenizer=tokenizer)
    for kind, new_tokens in NEW_TOKENS.items():
        inputs = prompts(tokenizer, kind, count)
        kwargs = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 1}
        runs: dict[str, Run] = {"plain": lambda ids, mask, kw=kwargs: target.generate(ids, attention_mask=mask, **kw)}
        runs |= {name: ours(model, None, **kwargs) for name, model in models.items()}
        gc.collect()
        result = race(runs, inputs, repeats, kind)
        plain = result["taken"]["plain"]
        rows = []
        for name, taken in result["taken"].items():
            wrote = result["wrote"][name]
            same = sum(torch.equal(a, b) for a, b in zip(wrote, result["wrote"]["plain"], strict=True))
            row: dict[str, Any] = {"name": name, **interval(plain, taken), "same": f"{same}/{len(wrote)}"}
            if name in models:
                row |= counts(models[name], runs[name], inputs, sum(plain) / (len(plain) * new_tokens))
            rows.append(row)
        completions = [batch[0].tolist() for batch in result["wrote"]["plain"]]
        found[kind] = {"repeated_4grams": repeated_share(completions), "new_tokens": new_tokens, "rows": rows}
    return found


def counts(model: AssistedModelForCausalLM, run: Run, inputs: list[Any], plain_seconds: float) -> dict[str, Any]:
    """What it did over all prompts, once. plain_seconds: of a token."""
    found = counts_of(model, run, inputs)
    t = model.totals
    cost = t.draft_seconds / t.drafted / plain_seconds if t.drafted else None
    return {**found, "draft_cost": cost, "assisted_share": t.assisted_share}


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"`python benchmarks/drafters.py`: {found['prompts']} held-out functions, temperature 0, float32, CPU threads: "
        f"{found['threads']}, torch {found['torch']}, transformers {found['transformers']}, default draft length, all "
        "contestants interleaved in one run. Times plain: seconds of plain `generate` over seconds, with a 95% bootstrap "
        "interval over prompts. Draft cost: of one drafted token, in plain tokens.",
    ]
    for kind, part in found.items():
        if not isinstance(part, dict):
            continue
        lines += [
            "",
            f"**{kind.capitalize()}**, {part['new_tokens']} new tokens, {part['repeated_4grams']:.0%} repeated 4-grams",
            "",
            "| `draft=` | times plain | tokens per pass | accepted | draft cost | same tokens |",
            "|---|---|---|---|---|---|",
        ]
        for row in part["rows"]:
            if row["name"] == "plain":
                continue
            cost = "" if row["draft_cost"] is None else f"{row['draft_cost']:.3f}"
            lines.append(
                f"| `{row['name']}` | {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}] "
                f"| {row['tokens_per_pass']:.2f} | {row['acceptance_rate']:.0%} | {cost} | {row['same']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(DRAFTS), help="these drafters (default: all)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--docs", type=Path, nargs="*", default=[], help="files whose measured section is rewritten")
    parser.add_argument("--read", type=Path, help="measure nothing, take the figures from this JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*early exits.*")
    found = (
        json.loads(args.read.read_text())
        if args.read
        else measure(args.only or list(DRAFTS), args.prompts, args.repeats)
    )
    print(markdown(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    write_docs(args.docs, markdown(found))


if __name__ == "__main__":
    main()
