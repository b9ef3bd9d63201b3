"""What a window over a draft's keys and values costs in acceptance: tokens per pass by the length of the text and the window.

Pieces of held-out text of the shipped target, continued up to the given lengths; chains of 4 tokens. Only tokens and forward
passes are counted. With `--work`, also the drafters that the case `drafts` has trained there.
"""

from pathlib import Path

import torch
from shared import Section, about, heading, opened, titled
from transformers import set_seed

from assisted import MTP, AssistedModelForCausalLM, DFlash, DraftModel, Eagle
from assisted.engine.window import AHEAD, slots_for_window
from assisted.lab.bench.table import markdown_table
from assisted.methods.shared.training.data import read_text

WINDOWS = (64, 128, 256, None)
TEMPERATURES = (0.0, 0.8)
DRAFTED = 4
OPTIONS = {
    "prompts": 12,
    "new_tokens": 64,
    "lengths": ([256, 512, 768, 1000], "tokens of the text at the end; the target's context is 1024"),
    "work": (None, "folder of trained drafters"),
}
QUICK = {"lengths": [64]}
SECTIONS = (Section("howto/draft-window", "draft-window"),)


def measure(args):
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
                for temperature in TEMPERATURES:
                    sampled = {"temperature": temperature, "top_k": 0} if temperature else {}
                    model.reset_totals()
                    for start in starts:
                        set_seed(start)
                        ids, new = stream[None, start : start + length - args.new_tokens], args.new_tokens
                        model.generate(ids, max_new_tokens=new, do_sample=bool(sampled), eos_token_id=None, **sampled)
                    point = {"draft": name, "window": window, "length": length, "temperature": temperature}
                    totals = model.totals
                    points.append({**point, "tokens_per_pass": totals.tokens_per_pass, "accepted": totals.accepted})
    return {"about": about(pair, args), "new_tokens": args.new_tokens, "points": points}


def markdown(found):
    its, lengths = found["about"], list(dict.fromkeys(point["length"] for point in found["points"]))
    head = heading(
        "draft_window",
        its,
        f"tokens per pass of chains of {DRAFTED} tokens, over the last {found['new_tokens']} tokens of {its['prompts']} pieces "
        f"of held-out code, {its['dtype']}",
        "Slots are those that are allocated for a row.",
    )
    rows = {}
    for point in found["points"]:
        key = point["temperature"], point["draft"], point["window"]
        rows.setdefault(key, {})[point["length"]] = point["tokens_per_pass"]
    tables = {}
    for temperature in TEMPERATURES:
        cells = [
            [draft, window or "none", slots_for_window(window) + AHEAD if window else "all"]
            + [f"{row[length]:.2f}" for length in lengths]
            for (at, draft, window), row in rows.items()
            if at == temperature
        ]
        columns = ("draft", "`draft_window`", "slots", *(f"{length} tokens" for length in lengths))
        tables[f"**Temperature {temperature:g}**"] = markdown_table(columns, cells)
    return titled(head, tables)
