"""What a matrix product over a few columns takes on this CPU: torch's own, without oneDNN, and from a packed weight.

    python benchmarks/products.py --threads 1 --out benchmarks/products.json --docs docs/concepts/fast-path.md

All ways in turns, over more weights than caches hold; the least of all rounds, which is what disturbs least on a busy machine.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from tables import arguments, write_docs
from torch import nn

from assisted.bench import machine
from assisted.products import PackedLinear, packs

COLUMNS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
OUTER, INNER = 4096, 1024
_BYTES = 2**28


@torch.no_grad()
def measure(dtype: torch.dtype, rounds: int) -> dict[str, dict[int, float]]:
    """Milliseconds of one product, by way and columns."""
    weight_bytes = OUTER * INNER * torch.finfo(dtype).bits // 8
    modules = [nn.Linear(INNER, OUTER, bias=False).to(dtype) for _ in range(_BYTES // weight_bytes)]
    packed = [PackedLinear.of(module) for module in modules]
    ways = {"torch": (True, modules), "torch, oneDNN off": (False, modules), "packed": (True, packed)}
    found: dict[str, dict[int, float]] = {}
    for columns in COLUMNS:
        inputs = torch.randn(columns, INNER).to(dtype)
        for _ in range(rounds):
            for way, (onednn, products) in ways.items():
                with torch.backends.mkldnn.flags(enabled=onednn):
                    started = time.perf_counter()
                    for product in products:
                        product(inputs)
                    took = 1000 * (time.perf_counter() - started) / len(products)
                best = found.setdefault(way, {})
                best[columns] = min(took, best.get(columns, took))
    return found


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        f"`python benchmarks/products.py`: a {OUTER} x {INNER} weight, CPU threads: {about['threads']}, "
        f"torch {about['torch']}, {about['processor']}. Milliseconds, the least of {about['rounds']} rounds.",
        "",
        "| columns | " + " | ".join(map(str, COLUMNS)) + " |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for dtype, ways in found["milliseconds"].items():
        for way, times in ways.items():
            lines.append(f"| {dtype}, {way} | " + " | ".join(f"{times[str(n)]:.2f}" for n in COLUMNS) + " |")
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__, repeats=10).parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.read:
        found = json.loads(args.read.read_text())
    else:
        types = [dtype for dtype in (torch.bfloat16, torch.float32) if packs(dtype)]
        times = {str(dtype).removeprefix("torch."): measure(dtype, args.repeats) for dtype in types}
        about = machine(torch.device("cpu"), torch.float32) | {"rounds": args.repeats}
        found = json.loads(json.dumps({"about": about, "milliseconds": times}))
    print(markdown(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    write_docs(args.docs, markdown(found))


if __name__ == "__main__":
    main()
