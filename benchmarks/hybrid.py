"""The shipped hybrid and the shipped target with each kind of draft: tokens per pass, speed, bytes of states.

    python -m assisted train eagle --target zoo:hybrid --text zoo ... --out eagle3      # see docs/methods/mtp.md
    python benchmarks/hybrid.py --eagle eagle3 --threads 1 --out benchmarks/hybrid.json --docs docs/methods/mtp.md

Without `--eagle`, the hybrid has no EAGLE head. All drafts have a fixed length, which shows what they are worth, except in the
last row of each target.
"""

from __future__ import annotations

from typing import Any

from tables import about, arguments, figures, markdown_table, paired, publish, raced

from assisted import MTP, AssistedModelForCausalLM
from assisted.bench import Result, Rules, read
from assisted.lengths.policies import Never

NO_DRAFT = "no draft"
TEMPERATURES = (0.0, 0.8)


def drafts_of(name: str, args: Any) -> dict[str, tuple[Any, Any]]:
    """Drafts and draft lengths, by the name of the row."""
    length = args.draft_length
    found: dict[str, tuple[Any, Any]] = {NO_DRAFT: ("suffix", Never()), "suffix": ("suffix", length)}
    if name == "zoo:hybrid":
        found["MTP, chains"] = MTP(tree=False), length
        found["MTP, trees"] = MTP(tree=True), 2 * length
        if args.eagle:
            found["EAGLE-3, chains"] = f"eagle:{args.eagle}", length
    else:
        found["draft model"] = "zoo:draft", length
        found["EAGLE-3, chains"] = "zoo:eagle3", length
    found["8-bit copy"] = "self:int8", length
    found["auto, default length"] = "auto", None
    return found


def measure(args: Any) -> dict[str, Any]:
    races: dict[str, Any] = {}
    for name in ("zoo:hybrid", "zoo:target"):
        pair = AssistedModelForCausalLM.from_pretrained(name, draft="mtp" if name == "zoo:hybrid" else "zoo:draft")
        prompts = read(["code"], pair.tokenizer, args.prompts)
        for temperature in TEMPERATURES:
            methods = paired(pair.target, pair.tokenizer, drafts_of(name, args))
            rules = Rules(args.new_tokens, temperature=temperature)
            result = raced(args, pair, methods, prompts, rules, target=name)
            states = {method.name: method.model.report.state_bytes for method in methods if method.model is not None}
            races[f"{name}, temperature {temperature:g}"] = {"result": result.to_dict(), "states": states}
    return {
        "about": about(pair, prompts=args.prompts, repeats=args.repeats),
        "new_tokens": args.new_tokens,
        "draft_length": args.draft_length,
        "races": races,
    }


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    its = found["about"]
    lines = [
        f"`python benchmarks/hybrid.py`: {its['prompts']} prompts of held-out code, {found['new_tokens']} new tokens, "
        f"{its['dtype']}, CPU threads: {its['threads']}, {its['processor']}, torch {its['torch']}. Drafts have "
        f"{found['draft_length']} tokens, trees twice that depth. Speed is relative to plain `generate` in its fastest mode, "
        "and to this package's loop without a draft."
    ]
    for title, race in found["races"].items():
        (measured,) = Result.from_dict(race["result"]).points
        rows = {row.name: row for row in measured.ran}
        baseline = rows[NO_DRAFT]
        assert baseline.milliseconds_per_token
        cells = []
        for name, row in rows.items():
            assert row.milliseconds_per_token
            states = race["states"].get(name)
            cells.append(
                [
                    name,
                    "1.00" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
                    f"{row.milliseconds_per_token:.2f}",
                    "" if row.speedup is None else f"{row.speedup.ratio:.2f}",
                    f"{baseline.milliseconds_per_token / row.milliseconds_per_token:.2f}",
                    "" if states is None else f"{states / 2**10:.0f}",
                ]
            )
        head = ("draft", "tokens per pass", "ms a token", "speedup", "over no draft", "KiB of states")
        lines += ["", f"**`{title.replace(',', '`,', 1)}**", "", *markdown_table(head, cells)]
    return "\n".join(lines)


def main() -> None:
    numbers = {"--draft-length": (3, "tokens of every draft"), "--new-tokens": (64, "of each prompt")}
    parser = arguments(__doc__, prompts=8, repeats=3, threads=1, numbers=numbers)
    parser.add_argument("--eagle", metavar="FOLDER", help="an EAGLE-3 head for the hybrid")
    publish(markdown(figures(parser.parse_args(), measure)), parser.parse_args().docs, "hybrid")


if __name__ == "__main__":
    main()
