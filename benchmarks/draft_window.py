"""What a window over a draft's keys and values costs in acceptance: tokens per pass by the length of the text and the window.

    python benchmarks/draft_window.py --work drafts --out benchmarks/draft_window.json --docs docs/howto/draft-window.md

Pieces of held-out text of the shipped target, continued up to the given lengths; chains of 4 tokens. Only tokens and forward
passes are counted. With `--work`, also the drafters that `benchmarks/drafts.py` has trained there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from transformers import set_seed

from assisted import MTP, AssistedModelForCausalLM, DFlash, DraftModel, Eagle
from assisted.engine.window import AHEAD, slots_for_window
from assisted.training.data import read_text

LENGTHS = (256, 512, 768, 1000)  # tokens of the text at the end; the target's context is 1024
WINDOWS = (64, 128, 256, None)
TEMPERATURES = (0.0, 0.8)
DRAFTED = 4


def drafts(work: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"draft model": DraftModel("zoo:draft"), "EAGLE-3": Eagle("zoo:eagle3", tree=False)}
    if work is not None:
        found["MTP"] = MTP(str(work / "mtp"), tree=False)
        found["DFlash"] = DFlash(str(work / "dflash"), tree=False)
    return found


def measure(args: Any) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft")
    target, tokenizer, new = pair.target, pair.tokenizer, args.new_tokens
    stream = torch.from_numpy(read_text(tokenizer, ["zoo"]).held_out).long()
    longest = max(LENGTHS)
    starts = torch.linspace(0, len(stream) - longest - 1, args.prompts).long().tolist()
    points = []
    for name, draft in drafts(args.work).items():
        for window in WINDOWS:
            model = AssistedModelForCausalLM.from_models(target, draft, DRAFTED, tokenizer, draft_window=window)
            for length in LENGTHS:
                for temperature in TEMPERATURES:
                    sampled = {"temperature": temperature} if temperature else {}
                    model.reset_totals()
                    for start in starts:
                        set_seed(start)
                        ids = stream[None, start : start + length - new]
                        model.generate(
                            ids, max_new_tokens=new, do_sample=bool(temperature), top_k=0, eos_token_id=None, **sampled
                        )
                    totals = model.totals
                    point = {"draft": name, "window": window, "length": length, "temperature": temperature}
                    points.append({**point, "tokens_per_pass": totals.tokens_per_pass, "accepted": totals.accepted})
    return {"about": about(pair, prompts=args.prompts), "new_tokens": new, "points": points}


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    its = found["about"]
    lines = [
        f"`python benchmarks/draft_window.py`: tokens per pass of chains of {DRAFTED} tokens, over the last "
        f"{found['new_tokens']} tokens of {its['prompts']} pieces of held-out code, {its['dtype']}. Slots are those that are "
        "allocated for a row."
    ]
    for temperature in TEMPERATURES:
        cells = []
        for point in found["points"]:
            if point["temperature"] != temperature or point["length"] != LENGTHS[0]:
                continue
            window = point["window"]
            same = [p for p in found["points"] if p["draft"] == point["draft"] and p["window"] == window]
            of_length = {p["length"]: p["tokens_per_pass"] for p in same if p["temperature"] == temperature}
            slots = "all" if window is None else str(slots_for_window(window) + AHEAD)
            each = (f"{of_length[length]:.2f}" for length in LENGTHS)
            cells.append([point["draft"], "none" if window is None else str(window), slots, *each])
        head = ("draft", "`draft_window`", "slots", *(f"{length} tokens" for length in LENGTHS))
        lines += ["", f"**Temperature {temperature:g}**", "", *markdown_table(head, cells)]
    return "\n".join(lines)


def main() -> None:
    numbers = {"--new-tokens": (64, "of each text")}
    only = ("--prompts", "--threads", "--out", "--docs", "--read")
    parser = arguments(__doc__, only, prompts=12, threads=1, numbers=numbers)
    parser.add_argument("--work", type=Path, help="where benchmarks/drafts.py has trained its drafters")
    publish(markdown(figures(parser.parse_args(), measure)), parser.parse_args().docs, "draft-window")


if __name__ == "__main__":
    main()
