"""The time of a matrix product over a few columns on this CPU: torch's own, without oneDNN, with a packed weight, and in C.

All ways run in turns, over more weights than caches hold. The minimum over repeats counts: a busy machine disturbs it least.
"""

import time
from unittest.mock import patch

import torch
from shared import Section, about, below, heading
from torch import nn

from assisted.fast import native
from assisted.fast.low_bit import low_bit
from assisted.fast.products import PackedLinear, packs
from assisted.lab.bench.clock import turns

COLUMNS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
OUTER, INNER = 4096, 1024
BYTES = 2**28
OPTIONS = {"repeats": 10}
SECTIONS = (Section("concepts/fast-path"),)


@torch.no_grad()
def least(dtype, rounds):
    """Milliseconds of one product, by way and columns."""
    weight_bytes = OUTER * INNER * torch.finfo(dtype).bits // 8
    modules = [nn.Linear(INNER, OUTER, bias=False).to(dtype) for _ in range(BYTES // weight_bytes)]
    ways = {"torch": (True, modules), "torch, oneDNN off": (False, modules)}
    ways["packed"] = True, without_kernels(lambda: [PackedLinear.of(module) for module in modules])
    if native.is_available(dtype):
        ways["in C"] = True, [PackedLinear.of(module) for module in modules]
    return timed(ways, dtype, rounds)


@torch.no_grad()
def least_of_low_bits(bits, rounds):
    """The same of weights of 8 or 4 bits."""
    modules = [nn.Linear(INNER, OUTER, bias=False) for _ in range(4)]
    copies = BYTES // (OUTER * INNER * bits // 8) // len(modules)
    ways = {"torch": (True, without_kernels(lambda: [low_bit(m, bits) for m in modules * copies]))}
    if native.is_available():
        ways["in C"] = True, [low_bit(module, bits) for module in modules * copies]
    return timed(ways, torch.bfloat16, rounds)


def without_kernels(make):
    with patch.object(native, "loaded", lambda *dtype: (None, "of this benchmark")):
        return make()


def timed(ways, dtype, rounds, columns=COLUMNS):
    """Milliseconds of one product, by way and columns. ways: whether oneDNN is on, and the products."""
    found = {}
    inputs = [torch.randn(count, INNER).to(dtype) for count in columns]
    for way, number, _ in turns(list(ways), len(columns), rounds):
        onednn, products = ways[way]
        with torch.backends.mkldnn.flags(enabled=onednn):
            started = time.perf_counter()
            for product in products:
                product(inputs[number])
            took = 1000 * (time.perf_counter() - started) / len(products)
        best, count = found.setdefault(way, {}), str(columns[number])
        best[count] = min(took, best.get(count, took))
    return found


def measure(args):
    types = [dtype for dtype in (torch.bfloat16, torch.float32) if packs(dtype)]
    milliseconds = {str(dtype).removeprefix("torch."): least(dtype, args.repeats) for dtype in types}
    milliseconds |= {f"{bits} bits": least_of_low_bits(bits, args.repeats) for bits in (8, 4)}
    return {"about": about(rounds=args.repeats), "milliseconds": milliseconds}


def text(name, found, titles, columns):
    """Milliseconds of both kinds of products, those here and those of `instructions`. titles: of the first columns."""
    its = found["about"]
    note = f"Milliseconds, the least of {its['rounds']} rounds."
    rows = [
        [*((f"{kind}, {way}",) if len(titles) == 1 else (kind, way)), *(f"{times[str(n)]:.2f}" for n in columns)]
        for kind, ways in found["milliseconds"].items()
        for way, times in ways.items()
    ]
    return below(heading(name, its, f"a {OUTER} x {INNER} weight", note), [*titles, *map(str, columns)], rows)


def markdown(found):
    return text("products", found, ["columns"], COLUMNS)
