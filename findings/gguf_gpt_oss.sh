#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0, numpy 2.4.6, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29; transformers 5.24.0 does the same.
#
# transformers has code for GGUF files of gpt-oss, and `AutoConfig.from_pretrained(gguf_file=...)` raises a TypeError for each that states its
# rotary scaling, as llama.cpp's converter writes it: "only 0-dimensional arrays can be converted to Python scalars". For a value it takes
# the first part of a field, which is the length of the key's name, in an array.
#
# Output seen:
#   gpt-oss, yarn 32: TypeError
#   first part of the field: [27], the length of gpt-oss.rope.scaling.factor: 27; contents: 32.0
#   gpt-oss, no scaling: read
#   llama, yarn 32: read
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6
"$work/env/bin/python" - "$work" <<'PY'
import sys

import gguf
import numpy
from transformers import AutoConfig


def read(kind, scaled):
    writer = gguf.GGUFWriter(f"{sys.argv[1]}/model.gguf", kind)
    writer.add_context_length(131072)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_vocab_size(96)
    if scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_tensor("output_norm.weight", numpy.ones(64, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        AutoConfig.from_pretrained(sys.argv[1], gguf_file="model.gguf")
    except TypeError:
        return "TypeError"
    return "read"


found = [read("gpt-oss", True)]
print(f"gpt-oss, yarn 32: {found[0]}")
name = "gpt-oss.rope.scaling.factor"
field = gguf.GGUFReader(f"{sys.argv[1]}/model.gguf").fields[name]
first, contents = field.parts[0].tolist(), field.contents()
print(f"first part of the field: {first}, the length of {name}: {len(name)}; contents: {contents}")
for kind, scaled in (("gpt-oss", False), ("llama", True)):
    found.append(read(kind, scaled))
    print(f"{kind}, {'yarn 32' if scaled else 'no scaling'}: {found[-1]}")
assert found == ["TypeError", "read", "read"] and first == [len(name)] and contents == 32.0
PY
