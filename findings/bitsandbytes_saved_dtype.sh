#!/usr/bin/env bash
# transformers 5.23.0, bitsandbytes 0.50.2, torch 2.13.0 (CPU), accelerate 1.15.0, Python 3.11, seen on 2026-11-28.
#
# `dtype=` has no effect on a checkpoint that was saved with bitsandbytes' 4-bit weights, and says so nowhere: embeddings, norms and
# logits keep the dtype that they were saved in, while `config.dtype` names the one that was asked for. The checkpoint without
# quantization follows `dtype=`. Whoever asks for float32 to compare texts exactly compares bfloat16.
#
# Output seen:
#   float32: unquantized torch.float32; 4 bits torch.bfloat16, config torch.float32
#   float16: unquantized torch.float16; 4 bits torch.bfloat16, config torch.float16
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 bitsandbytes==0.50.2 accelerate==1.15.0
"$work/env/bin/python" - "$work" <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

whole, packed = f"{sys.argv[1]}/whole", f"{sys.argv[1]}/packed"
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(whole)
four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
AutoModelForCausalLM.from_pretrained(whole, quantization_config=four, dtype=torch.bfloat16, device_map="cpu").save_pretrained(packed)
for asked in (torch.float32, torch.float16):
    plain, read = (AutoModelForCausalLM.from_pretrained(folder, dtype=asked) for folder in (whole, packed))
    print(f"{str(asked)[6:]}: unquantized {plain.dtype}; 4 bits {read.dtype}, config {read.config.dtype}")
    assert plain.dtype == asked and read.config.dtype == asked
    assert read.dtype == read.get_input_embeddings().weight.dtype == read(torch.arange(4)[None]).logits.dtype == torch.bfloat16
PY
