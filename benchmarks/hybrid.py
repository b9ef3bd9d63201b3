"""The shipped hybrid and the shipped target with each kind of draft: tokens per pass, speed, bytes of states.

    python -m assisted train eagle --target zoo:hybrid --text zoo ... --out eagle3      # see docs/methods/mtp.md
    python -m assisted train mtp --target zoo:target --text zoo ... --out mtp           # as in benchmarks/drafts.py
    python benchmarks/hybrid.py --eagle eagle3 --target-mtp mtp --out benchmarks/hybrid.json --docs docs/methods/mtp.md

Without `--eagle`, the hybrid has no EAGLE head, and without `--target-mtp`, the target has no MTP head. transformers' own
`generate(use_mtp=True)` takes part; where it cannot run, its error is below the table. All drafts have a fixed length, which
shows what they are worth, except in the last row of each target.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tables import about, arguments, figures, markdown_table, paired, publish, raced

from assisted import MTP, AssistedModelForCausalLM
from assisted.bench import Method, Result, Rules, read
from assisted.lengths.policies import Never

NO_DRAFT = "no draft"
THEIRS = "transformers, use_mtp"
TEMPERATURES = (0.0, 0.8)


def drafts_of(name: str, args: Any) -> dict[str, tuple[Any, Any]]:
    """Drafts and draft lengths, by the name of the row."""
    length = args.draft_length
    found: dict[str, tuple[Any, Any]] = {NO_DRAFT: ("suffix", Never()), "suffix": ("suffix", length)}
    is_hybrid = name == "zoo:hybrid"
    if not is_hybrid:
        found["draft model"] = "zoo:draft", length
    if is_hybrid or args.target_mtp:
        head = None if is_hybrid else args.target_mtp
        found["MTP, chains"] = MTP(head, tree=False), length
        found["MTP, longer chains"] = MTP(head, tree=False), 2 * length
        found["MTP, trees"] = MTP(head, tree=True), 2 * length
    if not is_hybrid or args.eagle:
        found["EAGLE-3, chains"] = f"eagle:{args.eagle}" if is_hybrid else "zoo:eagle3", length
    found["8-bit copy"] = "self:int8", length
    found["auto, default length"] = "auto", None
    return found


def measure(args: Any) -> dict[str, Any]:
    races: dict[str, Any] = {}
    for name in ("zoo:hybrid", "zoo:target"):
        pair = AssistedModelForCausalLM.from_pretrained(name, draft="mtp" if name == "zoo:hybrid" else "zoo:draft")
        prompts = read(["code"], pair.tokenizer, args.prompts)
        for temperature in TEMPERATURES:
            theirs = Method(THEIRS, "transformers MTP", partial(pair.target.generate, use_mtp=True), {"use_mtp": True})
            methods = [theirs, *paired(pair.target, pair.tokenizer, drafts_of(name, args))]
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
        f"{found['draft_length']} tokens, longer chains twice as many, and trees twice that depth. Speed is relative to plain "
        "`generate`, and to this package's loop without a draft."
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
        failed = [f"{row.name} cannot run: {row.error}" for row in measured.rows if row.error is not None]
        lines += ["", f"**`{title.replace(',', '`,', 1)}**", "", *markdown_table(head, cells)]
        lines += ["", *failed] if failed else []
    return "\n".join(lines)


def main() -> None:
    numbers = {"--draft-length": (3, "tokens of every draft"), "--new-tokens": (64, "of each prompt")}
    parser = arguments(__doc__, prompts=8, repeats=3, threads=1, numbers=numbers)
    parser.add_argument("--eagle", metavar="FOLDER", help="an EAGLE-3 head for the hybrid")
    parser.add_argument("--target-mtp", metavar="FOLDER", help="an MTP head for zoo:target")
    publish(markdown(figures(parser.parse_args(), measure)), parser.parse_args().docs, "hybrid")


if __name__ == "__main__":
    main()
