"""Rollouts of GRPO with and without drafts: forward passes, acceptance while the policy is trained, and rewards.

    python benchmarks/rollouts.py --out benchmarks/rollouts.json --docs docs/howto/rl-rollouts.md

Each step samples groups of completions for some prompts. A completion's reward is the share of its lines that parse as the
body of the function. The policy is trained on the completions of plain `generate` (2402.03300, without a reference model), and
before each step all drafts write completions with the same weights. Time is that of the processor (one thread), which other
programs hardly change. Draft lengths are fixed, so that counts do not depend on time.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any

import torch
from tables import about, arguments, figures, publish

from assisted import AssistedModelForCausalLM, Suffix
from assisted.bench.table import markdown_table, percent
from assisted.drafts import Round
from assisted.lengths.policies import Never
from assisted.loading.quantization import quantize_copy

HEADERS = (
    *("def mean(values):", "def area(width, height):", "def is_even(number):", "def load(path):"),
    *("def first(items):", "def to_string(value):", "def get_name(self):", "def total(prices):"),
)
GROUP = 8
PARTS = 4  # of the training, in the second table
Rows = Sequence[Sequence[int]]


def reward(header: str, text: str) -> float:
    """The share of a body's lines, from the first one, that parse together as the body of the function."""
    lines = text.rstrip().split("\n")
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join([header, *lines[:count], ""]))
        except (SyntaxError, ValueError):
            continue
        return count / len(lines)
    return 0.0


def in_groups(pair: AssistedModelForCausalLM, prompts: Sequence[torch.Tensor], call: Any, **more: Any) -> Rows:
    """One `generate` for each prompt."""
    pad, found = call["pad_token_id"], []
    for prompt in prompts:
        output = pair.generate(prompt[None], num_return_sequences=GROUP, **call, **more)[:, len(prompt) :]
        found += [_until(row.tolist(), pad) for row in output]
    return found


def in_rows(pair: AssistedModelForCausalLM, prompts: Sequence[torch.Tensor], call: Any) -> Rows:
    """All completions in as many rows as a group has."""
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    answers = {one.index: one.new_tokens.tolist() for one in pair.generate_many(repeated, rows=GROUP, **call)}
    return [_until(answers[number], call["pad_token_id"]) for number in range(len(repeated))]


def _until(tokens: list[int], pad: int) -> list[int]:
    return tokens[: tokens.index(pad)] if pad in tokens else tokens


def train(
    target: Any, optimizer: torch.optim.Optimizer, prompts: Sequence[torch.Tensor], rows: Rows, rewards: Any
) -> None:
    """One step on groups of completions."""
    target.train()
    optimizer.zero_grad()
    for number, prompt in enumerate(prompts):
        own = slice(number * GROUP, (number + 1) * GROUP)
        group, found = rows[own], torch.tensor(rewards[own])
        advantages = (found - found.mean()) / (found.std() + 1e-4)
        new = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in group], batch_first=True)
        written = torch.arange(new.shape[1]) < torch.tensor([[len(row)] for row in group])
        ids = torch.cat([prompt.expand(GROUP, -1), new], 1)
        logits = target(input_ids=ids).logits[:, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        (-(advantages[:, None] * chosen * written).sum() / written.sum() / len(prompts)).backward()
    torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
    optimizer.step()
    target.eval()


@torch.no_grad()
def kept(target: Any, first: Any, prompts: Sequence[torch.Tensor], rows: Rows) -> list[bool]:
    """For each token of the rows, whether the most probable one is that of the first weights."""
    found: list[bool] = []
    for number, row in enumerate(rows):
        prompt = prompts[number // GROUP]
        ids = torch.cat([prompt, torch.tensor(row, dtype=torch.int64)])[None]
        now, before = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1) for model in (target, first))
        found += (now == before).tolist()
    return found


def ways(target: Any, tokenizer: Any, length: int) -> dict[str, tuple[AssistedModelForCausalLM, Callable[..., Rows]]]:
    def drafted(draft: Any) -> AssistedModelForCausalLM:
        return AssistedModelForCausalLM.from_models(target, draft, length, tokenizer=tokenizer)

    memory = Suffix(remember=True)
    return {
        "plain `generate`": (drafted("suffix"), partial(in_groups, assisted=False)),
        "no drafts": (drafted("suffix"), partial(in_groups, draft_length=Never())),
        "suffix": (drafted("suffix"), in_groups),
        "suffix, remembers": (drafted(memory), in_groups),
        "draft model": (drafted("zoo:draft"), in_groups),
        "8-bit copy": (drafted("self:int8"), in_groups),
        "8-bit copy of the first weights": (drafted(quantize_copy(target, "int8")), in_groups),
        "`generate_many`, no drafts": (drafted("suffix"), _without(in_rows)),
        "`generate_many`, suffix, remembers": (drafted(memory), in_rows),
    }


def _without(run: Callable[..., Rows]) -> Callable[..., Rows]:
    return lambda pair, prompts, call: run(pair, prompts, call | {"draft_length": Never()})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", dtype=torch.float32)
    target, tokenizer = pair.target, pair.tokenizer
    assert tokenizer is not None
    headers = HEADERS[: args.prompts]
    texts = [tokenizer(f"{header}\n", return_tensors="pt").input_ids[0] for header in headers]
    first = copy.deepcopy(target)
    methods = ways(target, tokenizer, args.draft_length)
    pad = target.generation_config.pad_token_id
    pad = target.generation_config.eos_token_id if pad is None else pad
    call = {
        "max_new_tokens": args.new_tokens,
        "do_sample": True,
        "top_k": 0,
        "stop_strings": ["\n\n", "\ndef", "\nclass", "\nif"],
        "tokenizer": tokenizer,
        "pad_token_id": pad,
    }
    optimizer = torch.optim.AdamW(target.parameters(), lr=args.rate * 1e-6, weight_decay=0.0)
    steps = []
    for step in range(args.steps):
        at = [(2 * step + number) % len(texts) for number in range(2)]
        prompts, titles = [texts[one] for one in at], [headers[one] for one in at for _ in range(GROUP)]
        made: dict[str, Any] = {}
        for name, (model, run) in methods.items():
            rounds: list[Round] = []
            model.watch = rounds.append
            model.reset_totals()
            began = time.process_time()
            rows = run(model, prompts, call)
            seconds = time.process_time() - began
            model.watch = None
            rewards = [
                reward(title, tokenizer.decode(row, skip_special_tokens=True))
                for title, row in zip(titles, rows, strict=True)
            ]
            totals = model.totals
            made[name] = {
                "tokens": sum(map(len, rows)),
                "passes": len(rounds) or None,
                "drafted": totals.drafted,
                "accepted": totals.accepted,
                "seconds": seconds,
                "rewards": rewards,
            }
            if name == "plain `generate`":
                own, given = rows, rewards
        same = kept(target, first, prompts, own)
        began = time.process_time()
        train(target, optimizer, prompts, own, given)
        steps.append({"ways": made, "same": mean(same), "training": time.process_time() - began})
        print(
            step,
            f"{mean(given):.2f} {mean(same):.2f}",
            {n: w["accepted"] for n, w in made.items() if w["accepted"]},
            flush=True,
        )
    more = {"steps": args.steps, "new_tokens": args.new_tokens, "draft_length": args.draft_length, "rate": args.rate}
    return {"about": about(pair, prompts=len(headers), **more), "steps": steps}


def markdown(found: dict[str, Any]) -> str:
    about, steps = found["about"], found["steps"]
    lines = [
        f"`python benchmarks/rollouts.py`: {about['steps']} steps with 2 of {about['prompts']} prompts and {GROUP} completions "
        f"of each, at most {about['new_tokens']} new tokens, temperature 1, float32, drafts of at most {about['draft_length']} "
        f"tokens, learning rate {about['rate']}e-6, CPU threads: {about['threads']}, {about['processor']}, torch "
        f"{about['torch']}, transformers {about['transformers']}. Seconds are the processor's, for a step.",
        "",
    ]
    header = ["", "forward passes", "tokens per forward pass", "accepted", "seconds", "mean reward"]
    cells, parts = [], []
    for name in steps[0]["ways"]:
        own = [step["ways"][name] for step in steps]
        tokens, drafted = sum(one["tokens"] for one in own), sum(one["drafted"] for one in own)
        rewards = [value for one in own for value in one["rewards"]]
        passes = sum(one["passes"] or 0 for one in own)
        error = stdev(rewards) / len(rewards) ** 0.5
        cells.append(
            [
                name,
                str(passes) if passes else "",
                f"{tokens / passes:.2f}" if passes else "",
                percent(sum(one["accepted"] for one in own) / drafted) if drafted else "",
                f"{mean(one['seconds'] for one in own):.2f}",
                f"{mean(rewards):.3f} ± {error:.3f}",
            ]
        )
        if drafted:
            parts.append([name, *(_share(part) for part in _parts(own))])
    lines += markdown_table(header, cells)
    size = len(steps) // PARTS
    titles = [f"steps {1 + size * part} to {size * (part + 1)}" for part in range(PARTS)]
    same = [percent(mean(step["same"] for step in part)) for part in _parts(steps)]
    gained = [
        f"{mean(r for s in part for r in s['ways']['plain `generate`']['rewards']):.2f}" for part in _parts(steps)
    ]
    lines += ["", "**Accepted while the policy is trained**", ""]
    lines += markdown_table(
        ["", *titles], [["*mean reward*", *gained], ["*same most probable token as at first*", *same], *parts]
    )
    lines += ["", f"A training step takes {mean(step['training'] for step in steps):.1f} seconds."]
    return "\n".join(lines)


def _parts(values: Sequence[Any]) -> list[Sequence[Any]]:
    size = len(values) // PARTS
    return [values[size * part : size * (part + 1)] for part in range(PARTS)]


def _share(rounds: Sequence[dict[str, Any]]) -> str:
    drafted = sum(one["drafted"] for one in rounds)
    return percent(sum(one["accepted"] for one in rounds) / drafted) if drafted else "-"


def main() -> None:
    numbers = {
        "--steps": (24, "of training"),
        "--new-tokens": (64, "at most, of each completion"),
        "--draft-length": (4, "tokens, at most"),
        "--rate": (200, "learning rate, in millionths"),
    }
    only = ("--prompts", "--threads", "--out", "--docs", "--read")
    parser = arguments(__doc__, only, prompts=8, threads=1, numbers=numbers)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    args = parser.parse_args()
    found = figures(args, measure)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    publish(markdown(found), args.docs, "rollouts")


if __name__ == "__main__":
    main()
