"""The time of products in C by the instructions that they use, which this processor can do.

    python benchmarks/instructions.py --threads 2 --out benchmarks/instructions.json --docs docs/concepts/fast-path.md

All run in turns, over more weights than a core's cache holds. The minimum over repeats counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from assisted.fast.products import PackedLinear

COLUMNS = (1, 2, 5, 8, 16, 40)
OUTER, INNER = 4096, 1024
_WEIGHTS = 12
NAMES = {
    "amx_tile": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512 with VNNI",
    "avx512f": "AVX512",
    "avx_vnni": "AVX2 with VNNI",
    "avx2": "AVX2",
}
"""By the one of its instructions that sets it apart: the first of these that a processor has."""
KINDS: dict[str, Callable[[nn.Linear], Any]] = {
    "bfloat16": lambda module: PackedLinear.of(module.to(torch.bfloat16)),
    "8 bits, inputs in 8": lambda module: low_bit(module, 8, 8).native_product,
    "4 bits, inputs in 8": lambda module: low_bit(module, 4, 8).native_product,
}


@torch.no_grad()
def measure(args: Any) -> dict[str, Any]:
    inputs = [torch.randn(columns, INNER).to(torch.bfloat16) for columns in COLUMNS]
    ways: dict[tuple[str, str], list[Any]] = {}
    for names in native.PROCESSORS:
        if not native.processor_flags().issuperset(names):
            continue
        native.loaded.cache_clear()
        with patch.object(native, "PROCESSORS", (names,)):
            for kind, make in KINDS.items():
                title = next(title for name, title in NAMES.items() if name in names)
                ways[kind, title] = [make(nn.Linear(INNER, OUTER, bias=False)) for _ in range(_WEIGHTS)]
    native.loaded.cache_clear()
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    for (kind, title), number, _ in turns(list(ways), len(COLUMNS), args.repeats):
        started = time.perf_counter()
        for product in ways[kind, title]:
            product(inputs[number])
        took = 1000 * (time.perf_counter() - started) / _WEIGHTS
        best, columns = found[kind].setdefault(title, {}), str(COLUMNS[number])
        best[columns] = min(took, best.get(columns, took))
    about = machine(torch.device("cpu"), torch.bfloat16) | {"rounds": args.repeats}
    return {"about": about, "milliseconds": found}


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        f"`python benchmarks/instructions.py`: a {OUTER} x {INNER} weight, CPU threads: {about['threads']}, "
        f"torch {about['torch']}, {about['processor']}. Milliseconds, the least of {about['rounds']} rounds.",
        "",
    ]
    rows = (
        [kind, title, *(f"{times[str(columns)]:.2f}" for columns in COLUMNS)]
        for kind, titles in found["milliseconds"].items()
        for title, times in titles.items()
    )
    return "\n".join([*lines, *markdown_table(["weights", "columns", *map(str, COLUMNS)], rows)])


def main() -> None:
    args = arguments(__doc__, repeats=20).parse_args()
    publish(markdown(figures(args, measure)), args.docs, "instructions")


if __name__ == "__main__":
    main()
