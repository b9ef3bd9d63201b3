"""Early exit and layer skipping on one model: acceptance and speedup by exit layer, against plain `generate`.

    python benchmarks/exit_layers.py --out benchmarks/exit_layers.json

Held-out code, the same prompts and number of new tokens for all (end tokens ignored), float32, greedy. Every contestant
takes its turn at every prompt; the ratio to plain is formed prompt by prompt, its interval by bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shipped_pair import Run, counts, interval, ours, race
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.comparison import held_out_prompts, repeated_share

PROMPT_TOKENS = (120, 200)


def measure(path: str, layers: list[int] | None, draft_length: int, prompts: int, repeats: int, tokens: int) -> dict:
    """What every exit layer, the chosen one and layer skipping come to."""
    folder = zoo.resolve(path)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target.generation_config.eos_token_id = None  # everybody writes the same number of tokens
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    names = [f"early-exit:{layer}" for layer in layers or range(1, count)] + ["early-exit", "layer-skip"]
    models = {name: AssistedModelForCausalLM.from_models(target, draft=name) for name in names}
    texts = list(islice(held_out_prompts(tokenizer, PROMPT_TOKENS), prompts))
    inputs = [(p.ids, torch.ones_like(p.ids)) for p in texts]
    kwargs = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 1}
    runs: dict[str, Run] = {"plain": lambda ids, mask: target.generate(ids, attention_mask=mask, **kwargs)}
    runs |= {name: ours(model, draft_length, **kwargs) for name, model in models.items()}
    result = race(runs, inputs, repeats, "exit layers")
    rows: list[dict[str, Any]] = []
    for name, taken in result["taken"].items():
        wrote = result["wrote"][name]
        same = sum(torch.equal(a, b) for a, b in zip(wrote, result["wrote"]["plain"], strict=True))
        row = {"name": name, **interval(result["taken"]["plain"], taken), "same": f"{same}/{len(wrote)}"}
        row["repeated_4grams"] = repeated_share([r.tolist() for batch in wrote for r in batch])
        if name in models:
            row |= counts(models[name], runs[name], inputs)
            row["layers"] = getattr(models[name].drafter, "exit_layer", None)
        rows.append(row)
    return {
        "model": path,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "layers": count,
        "draft_length": draft_length,
        "prompts": prompts,
        "repeats": repeats,
        "new_tokens": tokens,
        "rows": rows,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['model']}, {found['layers']} layers, drafts of {found['draft_length']}, greedy")
    print(f"{'':16} {'times plain':>20} {'accepted':>9} {'first':>6} {'tokens/pass':>12} {'same':>7} {'layers':>7}")
    for row in found["rows"]:
        ratio = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        if "tokens_per_pass" not in row:
            print(f"{row['name']:16} {ratio:>20} {'':29} {row['same']:>7}")
            continue
        first = row["acceptance_by_position"][0]
        print(
            f"{row['name']:16} {ratio:>20} {row['acceptance_rate']:9.1%} {first:6.1%} {row['tokens_per_pass']:12.2f} "
            f"{row['same']:>7} {row['layers'] or '':>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:target", help="a folder, a Hub id or a zoo: name (default zoo:target)")
    parser.add_argument("--layers", type=int, nargs="*", help="exit layers to try (default: all)")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = measure(args.model, args.layers, args.draft_length, args.prompts, args.repeats, args.new_tokens)
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
