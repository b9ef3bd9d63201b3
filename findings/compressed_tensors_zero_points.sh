#!/usr/bin/env bash
# transformers 5.23.0, compressed-tensors 0.20.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29.
#
# A checkpoint with asymmetric 4-bit weights in groups, compressed-tensors' own preset W4A16_ASYM, cannot be read as it was written:
# `from_pretrained` raises a RuntimeError about mismatched sizes of every weight_zero_point. The writer packs eight zero points into a word.
# The reader makes the places for them with the same function on the meta device, where that function packs the weights but not the
# zero points. Symmetric weights (W4A16) are read, and so are asymmetric ones with `CompressedTensorsConfig(dequantize=True)`, which
# gives the right logits.
#
# Output seen, where "right" is the model before it was compressed:
#   W4A16: right
#   W4A16, dequantize=True: right
#   W4A16_ASYM: RuntimeError, zero points of q_proj stored as [16, 1]
#   W4A16_ASYM, dequantize=True: right
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0 accelerate==1.15.0
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import sys

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
ids = torch.arange(5, 20)[None]
expected = {"W4A16": "right", "W4A16, dequantize=True": "right", "W4A16_ASYM": "RuntimeError", "W4A16_ASYM, dequantize=True": "right"}
found = {}
for preset in ("W4A16", "W4A16_ASYM"):
    torch.manual_seed(0)
    model, folder = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), f"{sys.argv[1]}/{preset}"
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.detach().unflatten(1, (-1, scheme.weights.group_size))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), module.quantization_scheme.weights)
            module.weight_scale.data, module.weight_zero_point.data = scale, zero.to(module.weight_zero_point.dtype)
    with torch.no_grad():
        right = model(ids).logits
    writer = ModelCompressor.from_pretrained_model(model)
    writer.compress_model(model)
    model.save_pretrained(folder)
    writer.update_config(folder)
    stored = load_file(f"{folder}/model.safetensors").get("model.layers.0.self_attn.q_proj.weight_zero_point")
    for name, options in ((preset, {}), (f"{preset}, dequantize=True", {"quantization_config": CompressedTensorsConfig(dequantize=True)})):
        try:
            read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
            with torch.no_grad():
                found[name] = "right" if torch.allclose(read(ids).logits, right, atol=1e-4) else "wrong"
        except RuntimeError:
            found[name] = "RuntimeError"
        shape = f", zero points of q_proj stored as {list(stored.shape)}" if found[name] == "RuntimeError" else ""
        print(f"{name}: {found[name]}{shape}", flush=True)
assert found == expected, found
PY
