"""Many prompts on one processor: tokens per second, forward passes, and time between a text's tokens, by the number of rows.

    python benchmarks/many_users.py --out benchmarks/many_users.json --docs docs/howto/many-users.md

Prompts of held-out code with different lengths, answers that end after different numbers of tokens. Batches wait for their
longest text; `generate_batch` is transformers' continuous batching, without drafts; `generate_many` gives the row of a text
that has ended to the next prompt. Time is that of the processor (one thread), which other programs hardly change.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import quantiles
from typing import Any

import torch
from tables import about, arguments, figures, publish
from transformers import ContinuousBatchingConfig, GenerationConfig

from assisted import AssistedModelForCausalLM
from assisted.bench import read
from assisted.bench.table import markdown_table
from assisted.lengths.policies import Never

TARGETS = {"shipped target": "zoo:target", "SmolLM2": "zoo:smollm2"}
Answers = dict[int, list[int]]


def batches(
    model: AssistedModelForCausalLM, prompts: Sequence[torch.Tensor], rows: int, call: Any, **more: Any
) -> Answers:
    """Groups of prompts as they come, padded on the left."""
    found = {}
    for start in range(0, len(prompts), rows):
        group = prompts[start : start + rows]
        width = max(map(len, group))
        ids = torch.stack([torch.nn.functional.pad(one, (width - len(one), 0)) for one in group])
        mask = torch.stack([(torch.arange(width) >= width - len(one)).long() for one in group])
        output = model.generate(ids, attention_mask=mask, **call, **more)
        for row in range(len(group)):
            found[start + row] = output[row, width:].tolist()
    return found


def many(
    model: AssistedModelForCausalLM, prompts: Sequence[torch.Tensor], rows: int, call: Any, **more: Any
) -> Answers:
    return {a.index: a.new_tokens.tolist() for a in model.generate_many(prompts, rows=rows, **call, **more)}


def continuous(model: AssistedModelForCausalLM, prompts: Sequence[torch.Tensor], rows: int, call: Any) -> Answers:
    """transformers' continuous batching, with room for as many texts: without a number of blocks, it takes all free memory."""
    results = model.target.generate_batch(
        [one.tolist() for one in prompts],
        generation_config=GenerationConfig(**call),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=rows, max_batch_tokens=256),
    )
    return {int(name.rpartition("_")[2]): found.generated_tokens for name, found in results.items()}


def ways(pairs: dict[str, AssistedModelForCausalLM]) -> dict[str, Callable[..., Answers]]:
    suffix, draft, alone = pairs["suffix"], pairs.get("draft"), pairs["alone"]
    found: dict[str, Callable[..., Answers]] = {
        "`generate` in batches, no drafts": partial(batches, suffix, assisted=False),
        "`generate` in batches, suffix": partial(batches, suffix),
        "`generate_batch`": partial(continuous, alone),
        "`generate_many`, no drafts": partial(many, suffix, draft_length=Never()),
        "`generate_many`, suffix": partial(many, suffix),
    }
    if draft is not None:
        found["`generate_many`, draft model"] = partial(many, draft)
    return found


def measure_target(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    path = TARGETS[name]
    pairs = {"suffix": AssistedModelForCausalLM.from_pretrained(path, draft="suffix", dtype=torch.float32)}
    pairs["alone"] = AssistedModelForCausalLM.from_pretrained(path, draft="suffix", dtype=torch.float32)
    target, tokenizer = pairs["suffix"].target, pairs["suffix"].tokenizer
    if name == "shipped target":
        pairs["draft"] = AssistedModelForCausalLM.from_models(target, "zoo:draft", tokenizer=tokenizer)
    numbers = random.Random(0)
    texts = [one.ids[0] for one in read(["code"], tokenizer, args.prompts)]
    prompts = [text[-numbers.randint(16, len(text)) :] for text in texts]
    ends = _ends(pairs["suffix"], prompts, args.new_tokens)
    call = {
        "max_new_tokens": args.new_tokens,
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id or tokenizer.eos_token_id,
    }
    rows_of = [rows for rows in (1, 4, 8, 16) if rows <= args.most_rows]
    expected: Answers | None = None
    made = []
    for rows in rows_of:
        for way, run in ways(pairs).items():
            if rows == 1 and way != "`generate` in batches, no drafts" and "suffix" not in way:
                continue
            run(prompts=prompts[: rows + 1], rows=rows, call=call)  # makes what is made only once
            seen: list[tuple[int, float]] = []
            for pair in pairs.values():
                pair.watch = lambda round: seen.append((sum(round.kept), time.process_time()))  # noqa: B023
            began = time.process_time()
            found = run(prompts=prompts, rows=rows, call=call)
            seconds = time.process_time() - began
            found = {number: _until(answer, ends) for number, answer in found.items()}
            if expected is None:
                expected = found
            tokens = sum(map(len, found.values()))
            gaps = [after - before for (_, before), (_, after) in pairwise(seen)]
            made.append(
                {
                    "target": name,
                    "way": way,
                    "rows": rows,
                    "seconds": seconds,
                    "tokens": tokens,
                    "rounds": len(seen) or None,
                    "gap_95": quantiles(gaps, n=20)[-1] if len(gaps) > 20 else None,
                    "same": sum(found[number] == answer for number, answer in expected.items()),
                }
            )
            for pair in pairs.values():
                pair.watch = None
    return made


def _ends(model: AssistedModelForCausalLM, prompts: Sequence[torch.Tensor], new: int) -> list[int]:
    """Tokens that some texts have: with these as end tokens, answers end after different numbers of tokens."""
    counts: dict[int, int] = {}
    for prompt in prompts[:8]:
        for token in set(model.generate(prompt[None], max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()):
            counts[token] = counts.get(token, 0) + 1
    return [token for token, count in sorted(counts.items()) if count == 2][:3]


def _until(tokens: list[int], ends: list[int]) -> list[int]:
    """An answer without the padding after its end."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", dtype=torch.float32)
    machine = about(pair, prompts=args.prompts, new_tokens=args.new_tokens)
    return {"about": machine, "rows": [row for name in args.targets for row in measure_target(name, args)]}


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        f"`python benchmarks/many_users.py`: {about['prompts']} prompts, at most {about['new_tokens']} new tokens each, "
        f"greedy, float32, CPU threads: {about['threads']}, {about['processor']}, torch {about['torch']}, transformers "
        f"{about['transformers']}. Times are the processor's.",
    ]
    for target in dict.fromkeys(row["target"] for row in found["rows"]):
        lines += ["", f"**{target}**", ""]
        header = ["rows", "", "tokens/s", "tokens per forward pass", "ms between rounds, 95th percentile", "same texts"]
        lines += markdown_table(
            header,
            (
                [
                    str(row["rows"]),
                    row["way"],
                    f"{row['tokens'] / row['seconds']:.0f}",
                    "" if row["rounds"] is None else f"{row['tokens'] / row['rounds']:.2f}",
                    "" if row["gap_95"] is None else f"{1e3 * row['gap_95']:.0f}",
                    f"{row['same']}/{about['prompts']}",
                ]
                for row in found["rows"]
                if row["target"] == target
            ),
        )
    return "\n".join(lines)


def main() -> None:
    numbers = {"--new-tokens": (64, "at most, of each answer"), "--most-rows": (16, "decoded together")}
    only = ("--prompts", "--threads", "--out", "--docs", "--read")
    parser = arguments(__doc__, only, prompts=32, threads=1, numbers=numbers)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="to measure")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    args = parser.parse_args()
    found = figures(args, measure)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    publish(markdown(found), args.docs, "many")


if __name__ == "__main__":
    main()
