#!/usr/bin/env bash
# nvidia-modelopt 0.47.0, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29; transformers 5.24.0 does the same.
#
# `AutoModelForCausalLM.from_pretrained` of an FP8 checkpoint that ModelOpt has exported raises no error and reads the weights without
# their scales: transformers does not know the method "modelopt", says so in a line of the log, skips the quantization, and takes the
# stored numbers for the weights. The model then writes noise. (Checkpoints of ModelOpt in NVFP4 have other shapes, which is an error.)
#
# Output seen:
#   quant_method: modelopt
#   weights as read: 5000 times as large as before
#   top-1 tokens that are the quantized model's: 0% as read, 95% with the scales (the inputs are not rounded then)
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 nvidia-modelopt==0.47.0 requests
"$work/env/bin/python" - "$work/packed" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import contextlib
import copy
import json
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])).bfloat16().eval()
ids = torch.randint(0, 512, (4, 64))
with contextlib.redirect_stdout(sys.stderr):
    quantized = mtq.quantize(copy.deepcopy(model), mtq.FP8_DEFAULT_CFG, lambda one: one(ids))
with torch.no_grad():
    wanted = quantized(ids).logits.argmax(-1)
export_hf_checkpoint(quantized, export_dir=sys.argv[1])
method = json.load(open(f"{sys.argv[1]}/config.json"))["quantization_config"]["quant_method"]
print("quant_method:", method)

read = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
name = "model.layers.0.mlp.up_proj.weight"
sizes = [one.get_parameter(name).float().abs().mean().item() for one in (model, read)]
print(f"weights as read: {1000 * round(sizes[1] / sizes[0] / 1000)} times as large as before")


def right():
    with torch.no_grad():
        return (read(ids).logits.argmax(-1) == wanted).float().mean().item()


before = right()
held = load_file(f"{sys.argv[1]}/model.safetensors")
for key, scale in held.items():
    if key.endswith(".weight_scale"):
        weight = read.get_parameter(key.removesuffix("_scale"))
        weight.data = (weight.data.float() * scale).to(weight.dtype)
print(f"top-1 tokens that are the quantized model's: {before:.0%} as read, {right():.0%} with the scales (the inputs are not rounded then)")
assert method == "modelopt" and sizes[1] > 1000 * sizes[0] and before < 0.05 and right() > 0.8, (sizes, before, right())
PY
