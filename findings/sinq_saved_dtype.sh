#!/usr/bin/env bash
# transformers 5.23.0, sinq 0.2.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29.
#
# A model that `SinqConfig` quantized in bfloat16 (its default dtype) cannot be run on a CPU after `save_pretrained` and
# `from_pretrained`: the weights that are not quantized come back in float32, also with `dtype=torch.bfloat16`, while the quantized
# layers still compute in bfloat16, so the first forward pass raises a RuntimeError. In float32, the logits are those from before.
# What reads is sinq's own code: importing sinq replaces `from_pretrained`, `save_pretrained` and `push_to_hub` of every model.
#
# Output seen, where "same" are the logits of before:
#   float32, read as float32: same, weights in float32
#   bfloat16, read as None: RuntimeError, weights in float32
#   bfloat16, read as bfloat16: RuntimeError, weights in float32
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy scipy termcolor datasets
"$work/env/bin/pip" install --quiet --no-deps sinq==0.2.0 # its dependencies for GPUs and evaluation are not needed here
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, SinqConfig

SIZES = dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
ids = torch.arange(5, 20)[None]
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(f"{sys.argv[1]}/plain")
found = []
for dtype, asked in ((torch.float32, torch.float32), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)):
    config, folder = SinqConfig(modules_to_not_convert=["lm_head"]), f"{sys.argv[1]}/{dtype}"
    model = AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/plain", dtype=dtype, quantization_config=config)
    with torch.no_grad():
        before = model(ids).logits
    model.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder, **({} if asked is None else {"dtype": asked}))
    try:
        with torch.no_grad():
            same = "same" if torch.equal(read(ids).logits, before) else "others"
    except RuntimeError:
        same = "RuntimeError"
    kept = read.model.embed_tokens.weight.dtype
    names = [str(one).removeprefix("torch.") for one in (dtype, asked, kept)]
    found.append("{}, read as {}: {}, weights in {}".format(*names[:2], same, names[2]))
    print(found[-1], flush=True)
assert found == [
    "float32, read as float32: same, weights in float32",
    "bfloat16, read as None: RuntimeError, weights in float32",
    "bfloat16, read as bfloat16: RuntimeError, weights in float32",
], found
PY
