"""The shipped pair against plain `generate` and transformers' own drafting: greedy, sampled, eight rows; float32, bfloat16.

The methods are the pair at several draft lengths, the shipped EAGLE head, the suffix drafter, and this package's loop without
drafts, which shows the gain from the way forward passes are run. "compiled" is fast="compile".
"""

from itertools import product

from shared import SAMPLED, Race, Section

from assisted import Eagle
from assisted.lab.bench import Rules
from assisted.lengths import Confidence, Fixed
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

HEAD = Eagle("zoo:eagle3", tree=False)
DRAFTS = {
    "no draft, this loop": ("ngram", Never()),
    "draft, Adaptive()": ("zoo:draft", Adaptive()),
    **{f"draft, {length}": ("zoo:draft", length) for length in (Fixed(4), Confidence(0.4, 8))},
    "suffix, Adaptive()": ("suffix", Adaptive()),
    "EAGLE chain, Adaptive()": (HEAD, Adaptive()),
    "EAGLE tree, Adaptive()": (Eagle("zoo:eagle3", tree=True), Adaptive()),
    "suffix and draft, Adaptive()": (["suffix", "zoo:draft"], Adaptive()),
    "suffix and EAGLE chain, Adaptive()": (["suffix", HEAD], Adaptive()),
    "no draft, this loop, compiled": ("ngram", Never(), "compile"),
    "suffix, Adaptive(), compiled": ("suffix", Adaptive(), "compile"),
    "EAGLE chain, Adaptive(), compiled": (HEAD, Adaptive(), "compile"),
    "EAGLE chain, Fixed(tokens=3), compiled": (HEAD, Fixed(3), "compile"),
}


def title(dtype: str, rows: int, sampled: bool) -> str:
    words = ["bfloat16"] * (dtype != "float32") + ["batch 8"] * (rows > 1)
    words += ["temperature 0.8", "top-p 0.95", "128 tokens"] if sampled else ["greedy", "48 tokens"]
    text = ", ".join(words)
    return text if dtype == "bfloat16" else text[0].upper() + text[1:]


CASES = {title(*one): one for one in product(("float32", "bfloat16"), (1, 8), (False, True))}
QUICK = {"only": "Greedy", "drafts": ["no draft, this loop", "draft, Adaptive()", "EAGLE chain, Adaptive()"]}
SECTIONS = (
    Section("benchmarks/which-draft", "single", titles=tuple(t for t, (_, rows, _) in CASES.items() if rows == 1)),
    Section("benchmarks/batches", "batches", ("shipped_pair",), tuple(t for t, (_, r, _) in CASES.items() if r > 1)),
)


def races(args):
    return {
        title: Race(
            DRAFTS,
            dtype=dtype,
            rules=Rules(128, **SAMPLED) if sampled else Rules(48),
            rows=rows,
            share=4 if rows > 1 else 1,
            peers=rows == 1,
        )
        for title, (dtype, rows, sampled) in CASES.items()
    }
