"""The time of products in C by the instructions that they use, which this processor can do.

    python benchmarks/instructions.py --threads 2 --out benchmarks/instructions.json --docs docs/concepts/fast-path.md

All run in turns, over more weights than a core's cache holds. The minimum over repeats counts. `assisted/fast/processors.json`
is told whether AVX512-BF16 takes less time than AVX512 on this model of a processor, over one column and five.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from products import INNER, OUTER, timed
from tables import arguments, figures, publish
from torch import nn

from assisted.bench import machine
from assisted.bench.table import markdown_table
from assisted.fast import native
from assisted.fast.low_bit import low_bit
from assisted.fast.products import PackedLinear

COLUMNS = (1, 2, 5, 8, 16, 40)
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
    ways: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    for names in native.PROCESSORS:
        if not native.processor_flags().issuperset(names):
            continue
        native.loaded.cache_clear()
        title = next(title for name, title in NAMES.items() if name in names)
        with patch.object(native, "PROCESSORS", (names,)):
            for kind, make in KINDS.items():
                ways[kind][title] = True, [make(nn.Linear(INNER, OUTER, bias=False)) for _ in range(_WEIGHTS)]
    native.loaded.cache_clear()
    found = {kind: timed(titles, torch.bfloat16, args.repeats, COLUMNS) for kind, titles in ways.items()}
    about = machine(torch.device("cpu"), torch.bfloat16) | {"rounds": args.repeats}
    about["processor_model"] = native.processor_model()
    return {"about": about, "milliseconds": found}


def write_table(found: dict[str, Any], file: Path) -> None:
    """List this model of a processor if its products by AVX512-BF16 are faster than in float32, or else strike it out."""
    times = found["milliseconds"]["bfloat16"]
    direct = times.get("AVX512-BF16")
    if direct is None:
        return
    in_float32 = times.get("AVX512 with VNNI") or times["AVX512"]
    known = json.loads(file.read_text())
    known.pop(found["about"]["processor_model"], None)
    if direct["1"] + direct["5"] < in_float32["1"] + in_float32["5"]:
        known[found["about"]["processor_model"]] = found["about"]["processor"]
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


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
    found = figures(args, measure)
    if "processor_model" in found["about"]:  # figures of before this was noted name none
        write_table(found, Path(native.__file__).with_name("processors.json"))
    publish(markdown(found), args.docs, "instructions")


if __name__ == "__main__":
    main()
