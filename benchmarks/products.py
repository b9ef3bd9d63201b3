"""The time of a matrix product over a few columns on this CPU: torch's own, without oneDNN, with a packed weight, and in C.

    python benchmarks/products.py --threads 1 --out benchmarks/products.json --docs docs/concepts/fast-path.md

All ways run in turns, over more weights than caches hold. The minimum over repeats counts: a busy machine disturbs it least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from tables import arguments, figures, publish
from torch import nn

from assisted.bench import machine
from assisted.bench.clock import turns
from assisted.bench.table import markdown_table
from assisted.fast import native
from assisted.fast.low_bit import low_bit
from assisted.fast.products import PackedLinear, packs

COLUMNS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
OUTER, INNER = 4096, 1024
_BYTES = 2**28


@torch.no_grad()
def least(dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of one product, by way and columns."""
    weight_bytes = OUTER * INNER * torch.finfo(dtype).bits // 8
    modules = [nn.Linear(INNER, OUTER, bias=False).to(dtype) for _ in range(_BYTES // weight_bytes)]
    ways: dict[str, tuple[bool, list[Any]]] = {"torch": (True, modules), "torch, oneDNN off": (False, modules)}
    ways["packed"] = True, without_kernels(lambda: [PackedLinear.of(module) for module in modules])
    if native.is_available(dtype):
        ways["in C"] = True, [PackedLinear.of(module) for module in modules]
    return timed(ways, dtype, rounds)


@torch.no_grad()
def least_of_low_bits(bits: int, rounds: int) -> dict[str, dict[str, float]]:
    """The same of weights of 8 or 4 bits."""
    modules = [nn.Linear(INNER, OUTER, bias=False) for _ in range(4)]
    copies = _BYTES // (OUTER * INNER * bits // 8) // len(modules)
    ways = {"torch": (True, without_kernels(lambda: [low_bit(m, bits) for m in modules * copies]))}
    if native.is_available():
        ways["in C"] = True, [low_bit(module, bits) for module in modules * copies]
    return timed(ways, torch.bfloat16, rounds)


def without_kernels(make: Callable[[], list[Any]]) -> list[Any]:
    with patch.object(native, "loaded", lambda *dtype: (None, "of this benchmark")):
        return make()


def timed(
    ways: dict[str, tuple[bool, list[Any]]], dtype: torch.dtype, rounds: int, columns: Sequence[int] = COLUMNS
) -> dict[str, dict[str, float]]:
    """Milliseconds of one product, by way and columns. ways: whether oneDNN is on, and the products."""
    found: dict[str, dict[str, float]] = {}
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


def measure(args: Any) -> dict[str, Any]:
    types = [dtype for dtype in (torch.bfloat16, torch.float32) if packs(dtype)]
    about = machine(torch.device("cpu"), torch.float32) | {"rounds": args.repeats}
    milliseconds = {str(dtype).removeprefix("torch."): least(dtype, args.repeats) for dtype in types}
    milliseconds |= {f"{bits} bits": least_of_low_bits(bits, args.repeats) for bits in (8, 4)}
    return {"about": about, "milliseconds": milliseconds}


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        f"`python benchmarks/products.py`: a {OUTER} x {INNER} weight, CPU threads: {about['threads']}, "
        f"torch {about['torch']}, {about['processor']}. Milliseconds, the least of {about['rounds']} rounds.",
        "",
    ]
    rows = (
        [f"{dtype}, {way}", *(f"{times[str(columns)]:.2f}" for columns in COLUMNS)]
        for dtype, ways in found["milliseconds"].items()
        for way, times in ways.items()
    )
    return "\n".join([*lines, *markdown_table(["columns", *map(str, COLUMNS)], rows)])


def main() -> None:
    args = arguments(__doc__, repeats=10).parse_args()
    publish(markdown(figures(args, measure)), args.docs)


if __name__ == "__main__":
    main()
