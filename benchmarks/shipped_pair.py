"""The shipped pair against plain `generate` and transformers' own drafting, by the protocol of `assisted bench`.

    python benchmarks/shipped_pair.py --out benchmarks/shipped_pair.json --docs README.md docs/benchmarks.md

Held-out functions cut in the middle: greedy, sampled, eight at a time; float32 and bfloat16. Beside the pair at several draft
lengths run the shipped EAGLE head, copies of the text, and this package's loop without drafts, which tells what is gained by
the way passes are run; "compiled" is fast="compile".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tables import about, arguments, failures, figures, measured_with, plainly, same, share, shipped, table, write_docs

from assisted import AssistedModelForCausalLM, Eagle
from assisted.bench import (
    Bars,
    Contestant,
    Result,
    Rules,
    lookups,
    of_model,
    point,
    read,
    sources,
    transformers_assisted,
)
from assisted.lengths import Confidence, Fixed
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

LENGTHS = (Adaptive(), Fixed(4), Confidence(0.4, 8))
SAMPLED = Rules(new_tokens=128, temperature=0.8, top_p=0.95)
CASES = {
    "Greedy, 48 tokens": (Rules(new_tokens=48), 1, torch.float32),
    "Temperature 0.8, top-p 0.95, 128 tokens": (SAMPLED, 1, torch.float32),
    "Batch 8, greedy, 48 tokens": (Rules(new_tokens=48), 8, torch.float32),
    "Batch 8, temperature 0.8, top-p 0.95, 128 tokens": (SAMPLED, 8, torch.float32),
    "bfloat16, greedy, 48 tokens": (Rules(new_tokens=48), 1, torch.bfloat16),
    "bfloat16, temperature 0.8, top-p 0.95, 128 tokens": (SAMPLED, 1, torch.bfloat16),
    "bfloat16, batch 8, greedy, 48 tokens": (Rules(new_tokens=48), 8, torch.bfloat16),
    "bfloat16, batch 8, temperature 0.8, top-p 0.95, 128 tokens": (SAMPLED, 8, torch.bfloat16),
}
IN_SHORT = tuple(CASES)[:2]  # of the README
COLUMNS = {
    "times plain": lambda row: row.speedup,
    "ms per token": lambda row: f"{row.milliseconds_per_token:.2f}",
    "tokens per pass": lambda row: f"{row.tokens_per_pass:.2f}",
    "accepted": lambda row: share(row.acceptance_rate),
    "same tokens": same,
    "repeated 4-grams": lambda row: share(row.repeated_4grams),
}


def contestants(pair: AssistedModelForCausalLM, draft: Any, compiled: bool) -> list[Contestant]:
    """Ours: the loop alone, the draft at several lengths, the head, and two drafters together; some with compiled passes."""

    def with_length(name: str, spec: Any, length: Any, fast: str = "auto") -> Contestant:
        model = AssistedModelForCausalLM.from_models(
            pair.target, spec, draft_length=length, tokenizer=pair.tokenizer, fast=fast
        )
        return of_model(name, model)

    found = [with_length("no draft, this loop", "ngram", Never())]
    found += [with_length(f"draft, {_short(length)}", draft, length) for length in LENGTHS]
    head = Eagle("zoo:eagle3", tree=False)
    more = {"suffix": "suffix", "EAGLE chain": head, "EAGLE tree": Eagle("zoo:eagle3", tree=True)}
    more |= {"suffix and draft": ["suffix", draft], "suffix and EAGLE chain": ["suffix", head]}
    found += [with_length(f"{name}, Adaptive()", spec, Adaptive()) for name, spec in more.items()]
    if compiled:
        found.append(with_length("no draft, this loop, compiled", "ngram", Never(), "compile"))
        for name, length in (("suffix", Adaptive()), ("EAGLE chain", Adaptive()), ("EAGLE chain", Fixed(3))):
            found.append(with_length(f"{name}, {_short(length)}, compiled", more[name], length, "compile"))
    return found


def measure(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, (rules, batch, dtype) in CASES.items():
        pair, draft = shipped(dtype)
        own, plain = contestants(pair, draft, not args.no_compile), plainly(pair, args)
        machine = about(pair, prompts=args.prompts, repeats=args.repeats)
        found.setdefault("about", machine)
        rules = replace(rules, repeats=args.repeats)
        # transformers' assisted generation takes no batches
        others = [*transformers_assisted(pair), *lookups(pair.target)] if batch == 1 else []
        prompts = read(["code"], pair.tokenizer, 4 * args.prompts if batch > 1 else args.prompts)
        with Bars() as bars:
            measured = point(pair, plain, others, own, prompts, rules, batch, bars)
        found[title] = Result("zoo:target", "zoo:draft", rules, sources(prompts), (measured,), machine).to_dict()
    return found


def _short(length: Any) -> str:
    return "Adaptive()" if isinstance(length, Adaptive) else str(length)


def markdown(found: dict[str, Any], titles: Sequence[str] = tuple(CASES)) -> str:
    """The tables as they stand in docs."""
    lines = [measured_with(found["about"], "python benchmarks/shipped_pair.py")]
    for title in titles:
        (measured,) = Result.from_dict(found[title]).points
        lines += ["", f"**{title}**", "", *table(measured, COLUMNS), *failures([measured])]
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__).parse_args()
    found = figures(args, measure)
    print(markdown(found))
    for path in args.docs:
        write_docs([path], markdown(found, IN_SHORT if path.name == "README.md" else tuple(CASES)))


if __name__ == "__main__":
    main()
