"""How much is accepted of a draft with a window, and of one with a smaller vocabulary: forward passes are counted."""

import tempfile
from pathlib import Path

import torch
from shared import Case, Section, about, opened, totals_of

from assisted import MTP, AssistedModelForCausalLM, DFlash, DraftModel, Eagle
from assisted.engine.window import AHEAD, slots_for_window
from assisted.lab.bench import read
from assisted.lab.training.shrink import shrink_vocabulary
from assisted.methods.shared.training.data import read_text

WINDOWS = (64, 128, 256, None)
DRAFTED = 4
WARM = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def measure_window(args):
    pair = opened("zoo:target", "zoo:draft")
    drafts = {"draft model": DraftModel("zoo:draft"), "EAGLE-3": Eagle("zoo:eagle3", tree=False)}
    if args.work is not None:
        drafts["MTP"] = MTP(str(Path(args.work) / "mtp"), tree=False)
        drafts["DFlash"] = DFlash(str(Path(args.work) / "dflash"), tree=False)
    stream = torch.from_numpy(read_text(pair.tokenizer, ["zoo"]).held_out).long()
    starts = torch.linspace(0, len(stream) - max(args.lengths) - 1, args.prompts).long().tolist()
    points = []
    for name, draft in drafts.items():
        for window in WINDOWS:
            model = AssistedModelForCausalLM.from_models(
                pair.target, draft, DRAFTED, pair.tokenizer, draft_window=window
            )
            for length in args.lengths:
                prompts = [stream[None, start : start + length - args.new_tokens] for start in starts]
                for temperature, sampled in ((0.0, {}), (0.8, WARM)):
                    totals = totals_of(model, prompts, args.new_tokens, **sampled)
                    point = {"draft": name, "window": window, "length": length, "temperature": temperature}
                    points.append(point | {name: getattr(totals, name) for name in ("tokens_per_pass", "accepted")})
    return {"about": about(pair, args), "new_tokens": args.new_tokens, "points": points}


def rows_of_window(found):
    tables = {}
    for point in found["points"]:
        rows = tables.setdefault(f"**Temperature {point['temperature']:g}**", {})
        row = rows.setdefault((point["draft"], point["window"]), {"draft": point["draft"], "window": point["window"]})
        row[f"of {point['length']}"] = point["tokens_per_pass"]
    return {title: list(rows.values()) for title, rows in tables.items()}


draft_window = Case(
    "draft_window",
    """What a window over a draft's keys and values costs in acceptance: tokens per pass by lengths of the text and the window.

Pieces of held-out text of the shipped target, continued up to the given lengths; chains of 4 tokens. Only tokens and forward
passes are counted. With `--work`, also the drafters that the case `drafts` has trained there.
""",
    measure_window,
    options={
        "prompts": 12,
        "new_tokens": 64,
        "lengths": ([256, 512, 768, 1000], "tokens of the text at the end; the target's context is 1024"),
        "work": (None, "folder of trained drafters"),
    },
    quick={"lengths": [64]},
    sections=(Section("howto/draft-window", "draft-window"),),
    what=f"tokens per pass of chains of {DRAFTED} tokens, over the last {{new_tokens}} tokens of {{prompts}} pieces of "
    "held-out code, {dtype}",
    notes=("Slots are those that are allocated for a row.",),
    columns=lambda found: {
        **{"draft": "{draft}", "`draft_window`": lambda row: row["window"] or "none"},
        "slots": lambda row: slots_for_window(row["window"]) + AHEAD if row["window"] else "all",
        **{f"{point['length']} tokens": f"{{of {point['length']}:.2f}}" for point in found["points"]},
    },
    rows=rows_of_window,
)


def measure_vocabulary(args):
    pair = opened("zoo:target", "zoo:draft")
    target, tokenizer = pair.target, pair.tokenizer
    text = read_text(tokenizer, ["zoo"])
    prompts = [prompt.ids for prompt in read(["code"], tokenizer, args.prompts)]
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("draft model", "zoo:draft"), ("EAGLE-3", "zoo:eagle3")):
            for size in (*args.sizes, None):
                found, where = {"coverage": 1.0}, path
                if size is not None:
                    where = str(Path(folder) / f"{name}-{size}")
                    found = shrink_vocabulary(path, size, text, where, target)
                draft = DraftModel(where) if name == "draft model" else Eagle(where, tree=False)
                model = AssistedModelForCausalLM.from_models(target, draft, DRAFTED, tokenizer)
                passes = [totals_of(model, prompts, args.new_tokens, **way).tokens_per_pass for way in ({}, WARM)]
                points.append({"draft": name, "tokens": size, "coverage": found["coverage"], "tokens_per_pass": passes})
    return {"about": about(pair, args), "new_tokens": args.new_tokens, "points": points}


draft_vocabulary = Case(
    "draft_vocabulary",
    """A draft that predicts the most frequent tokens only: tokens per pass by their number.

The shipped draft and EAGLE-3 head, reduced by `assisted shrink-vocabulary`; held-out code; chains of 4 tokens. Forward passes
are counted, not timed.
""",
    measure_vocabulary,
    options={"prompts": 12, "new_tokens": 64, "sizes": ([256, 512, 1024, 2048], "tokens that are kept")},
    quick={"sizes": [512]},
    sections=(Section("howto/shrink-vocabulary", "draft-vocabulary"),),
    what=f"{{prompts}} prompts of held-out code, {{new_tokens}} new tokens, chains of {DRAFTED} tokens, {{dtype}}",
    notes=("Coverage is the share of the held-out text's tokens that can be drafted.",),
    columns={
        "draft": "{draft}",
        "tokens kept": lambda row: "all 4,096" if row["tokens"] is None else f"{row['tokens']:,}",
        "coverage": "{coverage:.1%}",
        **{"tokens per pass, T = 0": "{tokens_per_pass[0]:.2f}", "T = 0.8": "{tokens_per_pass[1]:.2f}"},
    },
    rows=lambda found: found["points"],
)
