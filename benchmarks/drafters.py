"""Every drafter on the shipped target, by the protocol of `assisted bench`: free text and text that is copied.

    python benchmarks/drafters.py --out benchmarks/drafters.json --docs docs/methods/index.md

Free: held-out functions, cut in the middle. Copied: a held-out function, to be written again with another argument. Float32,
temperature 0, the default draft length.
"""

from __future__ import annotations

import warnings
from typing import Any

from tables import about, arguments, failures, figures, measured_with, plainly, publish, same, share, shipped, table

from assisted import Merged
from assisted.bench import Bars, Point, Result, Row, Rules, assisted, point, read, sources

DRAFTS: dict[str, Any] = {
    '"suffix"': "suffix",
    '"ngram"': "ngram",
    '"recycle"': "recycle",
    '"early-exit"': "early-exit",
    '"layer-skip"': "layer-skip",
    '"self:int8"': "self:int8",
    '"zoo:draft"': "zoo:draft",
    '"zoo:draft-other-tokenizer"': "zoo:draft-other-tokenizer",
    '"zoo:medusa"': "zoo:medusa",
    '"zoo:eagle3"': "zoo:eagle3",
    '["suffix", "zoo:draft"]': ["suffix", "zoo:draft"],
    'Merged(["zoo:draft", "suffix"])': Merged(("zoo:draft", "suffix")),
}
KINDS = {"Free text": "code", "Copied text": "edits"}


def measure(args: Any) -> dict[str, Any]:
    pair, _ = shipped()
    chosen = {name: DRAFTS[name] for name in args.only or DRAFTS}
    own = list(assisted(pair.target, chosen, pair.tokenizer))
    plain = plainly(pair, args)
    machine = about(pair, prompts=args.prompts, repeats=args.repeats)
    found: dict[str, Any] = {"about": machine}
    rules = Rules(new_tokens=48, repeats=args.repeats)
    for title, kind in KINDS.items():
        prompts = read([kind], pair.tokenizer, args.prompts)
        with Bars() as bars:
            measured = point(pair, plain, [], own, prompts, rules, progress=bars)
        found[title] = Result("zoo:target", None, rules, sources(prompts), (measured,), machine).to_dict()
    return found


def cost(row: Row, measured: Point) -> str:
    """Of one drafted token, in plain tokens."""
    if not row.draft or not row.drafted_per_pass:
        return ""
    plain = next(other for other in measured.rows if other.name == measured.baseline)
    drafting = row.draft * row.milliseconds_per_token * row.tokens_per_pass / row.drafted_per_pass
    return f"{drafting / plain.milliseconds_per_token:.3f}"


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    text = measured_with(found["about"], "python benchmarks/drafters.py")
    lines = [f"{text} Draft cost: of one drafted token, in plain tokens."]
    for title in KINDS:
        (measured,) = Result.from_dict(found[title]).points
        columns = {
            "times plain": lambda row: row.speedup,
            "tokens per pass": lambda row: f"{row.tokens_per_pass:.2f}",
            "accepted": lambda row: share(row.acceptance_rate),
            "draft cost": lambda row, measured=measured: cost(row, measured),
            "same tokens": same,
            "repeated 4-grams": lambda row: share(row.repeated_4grams),
        }
        lines += ["", f"**{title}**", "", *table(measured, columns, "`draft=`"), *failures([measured])]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(DRAFTS), help="these drafters (default: all)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*early exits.*")
    publish(markdown(figures(args, measure)), args.docs)


if __name__ == "__main__":
    main()
