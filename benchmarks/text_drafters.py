"""Microseconds per round of the drafters that copy text, by context length. They must not grow with it.

    python benchmarks/text_drafters.py --out text_drafters.json

A round reads the tokens that the last one committed and proposes up to 8. The texts: "code", Python's own library, a word or
a run of spaces a token; "loop", a line of 40 tokens repeated; "random" tokens, where nothing repeats. Median and 90th
percentile of the rounds after each length, and the time to read the prompt. No model is run.
"""

from __future__ import annotations

import random
import re
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tables import arguments, write_json
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from assisted.drafters.ngram import NGram, NGramDrafting
from assisted.drafters.suffix import Suffix, SuffixDrafter, SuffixDrafting
from assisted.drafters.suffix_tree import Continuation
from assisted.text import Text

BUDGET = 8
DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "ngram": lambda call: NGramDrafting(NGram(), call),
    "suffix": lambda call: SuffixDrafting(SuffixDrafter(Suffix()), call),
    "suffix tree": lambda call: SuffixDrafting(SuffixDrafter(Suffix(tree=True)), call),
}


def code(length: int) -> list[int]:
    """Words, signs and runs of spaces of the standard library, numbered by first occurrence."""
    numbers: dict[str, int] = {}
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for piece in re.findall(r"\w+|\s+|.", path.read_text(encoding="utf-8", errors="replace")):
            ids.append(numbers.setdefault(piece, len(numbers)))
        if len(ids) >= length:
            return ids[:length]
    raise ValueError(f"contexts: the standard library has {len(ids)} tokens, {length} were asked for")


TEXTS: dict[str, Callable[[int], list[int]]] = {
    "code": code,
    "loop": lambda length: [index % 40 for index in range(length)],
    "random": lambda length: random.Random(0).choices(range(50_000), k=length),
}


def measure(make: Callable[[Any], Any], ids: list[int], context: int, rounds: int) -> dict[str, float]:
    """Rounds after `context` tokens. Drafted tokens are accepted if the text continues with them."""
    call = SimpleNamespace(attention_mask=None, target=SimpleNamespace(masks=SimpleNamespace(trees=True)))
    text = Text(torch.tensor([ids[:context]]), StoppingCriteriaList([MaxLengthCriteria(len(ids))]), None, None)
    drafting = make(call)
    started = time.perf_counter()
    drafting.propose(text, BUDGET)
    prompt = time.perf_counter() - started
    taken, accepted = [], 0
    for _ in range(rounds):
        known = text.lengths[0]
        if known + BUDGET + 1 >= len(ids):
            break
        started = time.perf_counter()
        draft = drafting.propose(text, BUDGET)
        taken.append(time.perf_counter() - started)
        tokens = draft.tokens[0].tolist()
        parents = list(range(-1, len(tokens) - 1)) if draft.parents is None else draft.parents[0].tolist()
        right = Continuation(tokens, parents, []).matches(ids[known : known + BUDGET])
        accepted += right
        text.extend([ids[known : known + right + 1]], None, None)
    return {
        "context": context,
        "rounds": len(taken),
        "median_microseconds": 1e6 * statistics.median(taken),
        "p90_microseconds": 1e6 * statistics.quantiles(taken, n=10)[-1],
        "tokens_per_round": 1 + accepted / len(taken),
        "prompt_milliseconds": 1e3 * prompt,
    }


def main() -> None:
    parser = arguments(__doc__, ("--out",), numbers={"--rounds": (200, "timed after each context")})
    contexts = [1024, 2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, help="tokens before the rounds")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=list(DRAFTERS))
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    points = []
    for text in args.texts:
        ids = TEXTS[text](max(args.contexts) + args.rounds * (BUDGET + 1) + BUDGET + 2)
        for name in args.drafters:
            for context in args.contexts:
                point = {"text": text, "drafter": name, **measure(DRAFTERS[name], ids, context, args.rounds)}
                points.append(point)
                print(
                    f"{text:<8}{name:<13}{context:>7} tokens  {point['median_microseconds']:7.1f} us a round (90%: "
                    f"{point['p90_microseconds']:7.1f})  {point['tokens_per_round']:.2f} tokens  prompt "
                    f"{point['prompt_milliseconds']:7.1f} ms",
                    flush=True,
                )
    write_json(args.out, {"budget": BUDGET, "torch": torch.__version__, "points": points})


if __name__ == "__main__":
    main()
