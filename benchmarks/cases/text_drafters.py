"""Drafters that copy text."""

import random
import re
import statistics
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from shared import Case, page, shown
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from assisted.core.text import Text
from assisted.methods.ngram import NGram, NGramDrafting
from assisted.methods.suffix.draft import Suffix, SuffixDrafter, SuffixDrafting
from assisted.methods.suffix.tree import Continuation

BUDGET = 8
DRAFTERS = {
    "ngram": lambda call: NGramDrafting(NGram(), call),
    "suffix": lambda call: SuffixDrafting(SuffixDrafter(Suffix()), call),
    "suffix tree": lambda call: SuffixDrafting(SuffixDrafter(Suffix(tree=True)), call),
}


def code(length):
    """Words, signs and runs of spaces of the standard library, numbered by first occurrence."""
    numbers, ids = {}, []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces = re.findall(r"\w+|\s+|.", path.read_text(encoding="utf-8", errors="replace"))
        ids += [numbers.setdefault(piece, len(numbers)) for piece in pieces]
        if len(ids) >= length:
            return ids[:length]
    raise ValueError(f"contexts: the standard library has {len(ids)} tokens, {length} were asked for")


TEXTS = {
    "code": code,
    "loop": lambda length: [index % 40 for index in range(length)],
    "random": lambda length: random.Random(0).choices(range(50_000), k=length),
}


def rounds_of(make, ids, context, rounds):
    """Rounds after `context` tokens. Drafted tokens are accepted if the text continues with them."""
    call = SimpleNamespace(attention_mask=None, encoded=None, target=SimpleNamespace(masks=SimpleNamespace(trees=True)))
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


def measure(args):
    points = []
    for text in args.texts:
        ids = TEXTS[text](max(args.contexts) + args.rounds * (BUDGET + 1) + BUDGET + 2)
        for name, make in DRAFTERS.items():
            for context in args.contexts:
                points.append({"text": text, "drafter": name, **rounds_of(make, ids, context, args.rounds)})
    return {"budget": BUDGET, "torch": torch.__version__, "points": points}


FIGURES = {
    **{"µs a round": "{median_microseconds:.1f}", "90th percentile": "{p90_microseconds:.1f}"},
    **{"tokens a round": "{tokens_per_round:.1f}", "prompt, ms": "{prompt_milliseconds:.1f}"},
}
text_drafters = Case(
    "text_drafters",
    """Microseconds per round of the drafters that copy text, by context length. They must not grow with it.

A round reads the tokens that the last one committed and proposes up to 8. The texts: "code", Python's own library, a word or
a run of spaces a token; "loop", a line of 40 tokens repeated; "random" tokens, where nothing repeats. Median and 90th
percentile of the rounds after each length, and the time to read the prompt. No model is run.
""",
    measure,
    options={
        "rounds": (200, "timed after each context"),
        "contexts": ([1024, 2048, 4096, 8192, 16384, 32768], "tokens before the rounds"),
        "texts": (list(TEXTS), "that are continued"),
    },
    quick={"rounds": 20, "contexts": [1024]},
    markdown=lambda found: page(
        f"`python benchmarks/run.py text_drafters`: drafts of up to {found['budget']} tokens, torch {found['torch']}.",
        shown({"text": "{text}", "drafter": "{drafter}", "context": "{context}", **FIGURES}, found["points"]),
    ),
)
