"""The shipped pair against plain `generate` and transformers' own drafting, by the protocol of `assisted bench`.

    python benchmarks/shipped_pair.py --out benchmarks/shipped_pair.json \\
        --docs docs/benchmarks/{which-draft,batches}.md

Held-out functions cut in the middle: greedy, sampled, eight at a time; float32 and bfloat16. The methods are the pair at
several draft lengths, the shipped EAGLE head, the suffix drafter, and this package's loop without drafts, which shows the gain
from the way forward passes are run. "compiled" is fast="compile".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tables import arguments, figures, paired, publish, raced, races, shipped

from assisted import AssistedModelForCausalLM, Eagle
from assisted.bench import Method, Rules, lookups, read, transformers_assisted
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
PARTS = {
    "single": [title for title, (_, rows, _) in CASES.items() if rows == 1],
    "batches": [title for title, (_, rows, _) in CASES.items() if rows > 1],
}
"""The sections of the docs, by their marker."""
COLUMNS = ("speedup", "ms per token", "tokens per pass", "accepted", "same tokens", "repeated 4-grams")


def methods(pair: AssistedModelForCausalLM, draft: Any, compiled: bool) -> list[Method]:
    """The loop alone, the draft at several lengths, the head, and two drafters together; some with compiled forward passes."""
    head = Eagle("zoo:eagle3", tree=False)
    adaptive = {"suffix": "suffix", "EAGLE chain": head, "EAGLE tree": Eagle("zoo:eagle3", tree=True)}
    adaptive |= {"suffix and draft": ["suffix", draft], "suffix and EAGLE chain": ["suffix", head]}
    eager: dict[str, tuple[Any, Any]] = {"no draft, this loop": ("ngram", Never())}
    eager |= {f"draft, {_short(length)}": (draft, length) for length in LENGTHS}
    eager |= {f"{name}, Adaptive()": (spec, Adaptive()) for name, spec in adaptive.items()}
    found = paired(pair.target, pair.tokenizer, eager)
    if compiled:
        again = ("no draft, this loop", "suffix, Adaptive()", "EAGLE chain, Adaptive()")
        more = {f"{name}, compiled": eager[name] for name in again}
        more["EAGLE chain, Fixed(tokens=3), compiled"] = (head, Fixed(3))
        found += paired(pair.target, pair.tokenizer, more, "compile")
    return found


def measure(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for title, (rules, batch, dtype) in CASES.items():
        pair, draft = shipped(dtype)
        # transformers' assisted generation takes no batches
        others = [*transformers_assisted(pair), *lookups(pair.target)] if batch == 1 else []
        prompts = read(["code"], pair.tokenizer, 4 * args.prompts if batch > 1 else args.prompts)
        own = methods(pair, draft, not args.no_compile)
        result = raced(args, pair, own, prompts, rules, batch, others, draft="zoo:draft").to_dict()
        found |= {"about": found.get("about", result["machine"]), title: result}
    return found


def _short(length: Any) -> str:
    return "Adaptive()" if isinstance(length, Adaptive) else str(length)


def markdown(found: dict[str, Any], titles: Sequence[str] = tuple(CASES)) -> str:
    """The tables as they stand in docs."""
    return races({title: found[title] for title in ("about", *titles)}, "shipped_pair", COLUMNS)


def main() -> None:
    args = arguments(__doc__).parse_args()
    found = figures(args, measure)
    for part, titles in PARTS.items():
        pages = [page for page in args.docs if f"<!-- {part}:begin -->" in page.read_text()]
        publish(markdown(found, titles), pages, part)


if __name__ == "__main__":
    main()
