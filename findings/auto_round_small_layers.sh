#!/usr/bin/env bash
# auto-round 0.16.1, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29.
#
# AutoRound without calibration (`iters=0, disable_opt_rtn=True`, which rounds the files without loading a model) also quantizes layers
# whose number of outputs is no multiple of 32, such as `in_proj_a` and `in_proj_b` of a Qwen3.5 with 16 heads of linear attention. On a
# CPU, its own loader finds no kernel for them and puts in a module that raises a TypeError in the first forward pass; loading itself
# raises nothing. With 32 heads, the checkpoint runs.
#
# Output seen:
#   32 heads: runs
#   16 heads: TypeError: unsupported operand type(s) for +: 'NoneType' and 'str'
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 auto-round==0.16.1
cat >"$work/run.py" <<'PY'
import os
import sys

import torch
from auto_round import AutoRound
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

SIZES = dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32)
SIZES |= dict(num_key_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, pad_token_id=0, eos_token_id=1)

if __name__ == "__main__":  # auto-round starts processes
    found = []
    for heads in (32, 16):
        plain, packed = f"{sys.argv[1]}/{heads}", f"{sys.argv[1]}/{heads}-packed"
        types = ["linear_attention", "full_attention"]
        config = Qwen3_5TextConfig(**SIZES, linear_num_key_heads=heads, linear_num_value_heads=heads, layer_types=types)
        torch.manual_seed(0)
        Qwen3_5ForCausalLM(config).save_pretrained(plain)
        words = Tokenizer(models.WordLevel({chr(i): i for i in range(96)}, unk_token=chr(2)))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(plain)
        rounding = AutoRound(plain, scheme="W4A16", iters=0, disable_opt_rtn=True, device_map="cpu")
        rounding.quantize_and_save(packed, format="auto_round")
        model = AutoModelForCausalLM.from_pretrained(packed)
        try:
            with torch.no_grad():
                model(torch.arange(5, 20)[None])
            said = "runs"
        except TypeError as error:
            said = f"TypeError: {error}"
        found.append(f"{heads} heads: {said}")
    print(*found, sep="\n", file=open(os.environ["FOUND"], "w"))
    assert found == ["32 heads: runs", "16 heads: TypeError: unsupported operand type(s) for +: 'NoneType' and 'str'"], found
PY
FOUND="$work/found" "$work/env/bin/python" "$work/run.py" "$work" >"$work/log" 2>&1 || { tail "$work/log"; exit 1; }
cat "$work/found"
