"""The time of products in C by the instructions that they use, which this processor can do.

All run in turns, over more weights than a core's cache holds. The minimum over repeats counts. `assisted/fast/processors.json`
is told whether AVX512-BF16 takes less time than AVX512 on this model of a processor, over one column and five.
"""

import json
from pathlib import Path
from unittest.mock import patch

import torch
from cases.products import INNER, OUTER, text, timed
from shared import Section, about
from torch import nn

from assisted.fast import native
from assisted.fast.low_bit import low_bit
from assisted.fast.products import PackedLinear

COLUMNS = (1, 2, 5, 8, 16, 40)
WEIGHTS = 12
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
OPTIONS = {"repeats": 20, "note": (False, "note the result in assisted/fast/processors.json")}
SECTIONS = (Section("concepts/fast-path", "instructions"),)


@torch.no_grad()
def measure(args):
    ways = {kind: {} for kind in KINDS}
    for names in native.PROCESSORS:
        if not native.processor_flags().issuperset(names):
            continue
        native.loaded.cache_clear()
        title = next(title for name, title in NAMES.items() if name in names)
        with patch.object(native, "PROCESSORS", (names,)):
            for kind, make in KINDS.items():
                ways[kind][title] = True, [make(nn.Linear(INNER, OUTER, bias=False)) for _ in range(WEIGHTS)]
    native.loaded.cache_clear()
    times = {kind: timed(titles, torch.bfloat16, args.repeats, COLUMNS) for kind, titles in ways.items()}
    its = about(dtype="bfloat16", rounds=args.repeats, processor_model=native.processor_model())
    found = {"about": its, "milliseconds": times}
    if args.note:
        write_table(found, Path(native.__file__).with_name("processors.json"))
    return found


def write_table(found, file):
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


def markdown(found):
    return text("instructions", found, ["weights", "columns"], COLUMNS)
