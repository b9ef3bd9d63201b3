"""Every drafter on the shipped target, by the protocol of `assisted bench`: free text and text that is copied.

    python benchmarks/drafters.py --out benchmarks/drafters.json --docs docs/methods/index.md

Free: held-out functions, cut in the middle. Copied: a held-out function, to be repeated with a renamed argument. Float32,
temperature 0, the default draft length.
"""

from __future__ import annotations

import warnings
from typing import Any

from tables import arguments, figures, publish, raced, races, shipped

from assisted import Merged
from assisted.bench import Row, Rules, assisted, read

DRAFTS: dict[str, Any] = {
    '"suffix"': "suffix",
    '"ngram"': "ngram",
    '"recycle"': "recycle",
    '"early-exit"': "early-exit",
    '"layer-skip"': "layer-skip",
    '"self:int8"': "self:int8",
    '"self:int8-bitsandbytes"': "self:int8-bitsandbytes",
    '"zoo:draft"': "zoo:draft",
    '"zoo:draft-other-tokenizer"': "zoo:draft-other-tokenizer",
    '"zoo:medusa"': "zoo:medusa",
    '"zoo:eagle3"': "zoo:eagle3",
    '["suffix", "zoo:draft"]': ["suffix", "zoo:draft"],
    'Merged(["zoo:draft", "suffix"])': Merged(("zoo:draft", "suffix")),
}
KINDS = {"Free text": "code", "Copied text": "edits"}
COLUMNS = ("speedup", "tokens per pass", "accepted", "draft cost", "same tokens", "repeated 4-grams")


def measure(args: Any) -> dict[str, Any]:
    pair, _ = shipped()
    own = list(assisted(pair.target, {name: DRAFTS[name] for name in args.only or DRAFTS}, pair.tokenizer))
    found: dict[str, Any] = {}
    for title, kind in KINDS.items():
        prompts = read([kind], pair.tokenizer, args.prompts)
        result = raced(args, pair, own, prompts, Rules(new_tokens=48)).to_dict()
        found |= {"about": result["machine"], title: result}
    return found


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    note = " Draft cost: of one drafted token, in plain tokens."
    return races(found, "drafters", COLUMNS, note, named="`draft=`", **{"draft cost": _cost})


def _cost(row: Row) -> str:
    """The cost of one drafted token in plain tokens."""
    if not row.draft or not row.drafted_per_pass or row.speedup is None:
        return ""
    # of the time of a forward pass and its draft, in plain tokens, the share spent drafting; by drafted tokens
    return f"{row.draft * row.tokens_per_pass / row.speedup.ratio / row.drafted_per_pass:.3f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", choices=list(DRAFTS), help="these drafters (default: all)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*early exits.*")
    publish(markdown(figures(args, measure)), args.docs)


if __name__ == "__main__":
    main()
