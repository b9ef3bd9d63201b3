#!/usr/bin/env bash
# torchao 0.18.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28.
#
# `Int4WeightOnlyConfig` has no packing format that runs on a CPU, whatever its group size: the default asks for mslk, which is for
# CUDA. The format "opaque", which was for CPUs, is now a config of its own in torchao.prototype. And `quantize_` leaves a layer as it
# is, without a warning, where its inputs are no multiple of the group size (128 by default): with 192 inputs, the default config seems
# to succeed on a CPU, and nothing is quantized. Only the log at level INFO says so.
#
# Output seen:
#   128 inputs, default: ImportError
#   192 inputs, default: Parameter, 0 warnings
#   plain_int32: NotImplementedError
#   opaque: ValueError
#   prototype: Int4OpaqueTensor
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 torchao==0.18.0
"$work/env/bin/python" - <<'PY'
import warnings

import torch
from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int4WeightOnlyConfig, quantize_


def of(config, inputs=128):
    layer = nn.Sequential(nn.Linear(inputs, 64, bias=False)).bfloat16()
    try:
        quantize_(layer, config())
    except Exception as error:
        return type(error).__name__
    return type(layer[0].weight).__name__


found = {"128 inputs, default": of(Int4WeightOnlyConfig)}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["192 inputs, default"] = f"{of(Int4WeightOnlyConfig, 192)}, {len(caught)} warnings"
for kind in ("plain_int32", "opaque"):
    found[kind] = of(lambda kind=kind: Int4WeightOnlyConfig(group_size=64, int4_packing_format=kind))
found["prototype"] = of(lambda: PrototypeInt4WeightOnlyConfig(group_size=64))
for name, what in found.items():
    print(f"{name}: {what}")
assert list(found.values()) == ["ImportError", "Parameter, 0 warnings", "NotImplementedError", "ValueError", "Int4OpaqueTensor"]
PY
