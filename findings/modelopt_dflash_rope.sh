#!/usr/bin/env bash
# nvidia-modelopt 0.47.0 with transformers 5.14.1 and torch 2.13.0 (CPU), accelerate 1.15.0, peft 0.21.2, requests 2.34.2, Python 3.11, seen on 2026-11-29.
#
# A DFlash drafter is trained with rotary positions of base 10000, and exported with the base of its target. The trainer takes the
# target's `rope_theta` over, so that both agree, but only if the config has that attribute, which transformers 5 has moved into
# `rope_parameters`. The exporter knows both places. So the config.json of a drafter for Qwen3 (1000000) or Llama 3 (500000) names a base
# with which it was never trained, and engines that follow it get other logits than the trainer. Nothing warns of it.
#
# Output seen, where the first of a line is the target's base:
#   10000: in training 10000, in config.json 10000, logits with the base of config.json differ from the trainer's: False
#   1000000: in training 10000, in config.json 1000000, logits with the base of config.json differ from the trainer's: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.14.1 nvidia-modelopt==0.47.0 accelerate==1.15.0 peft==0.21.2 requests==2.34.2
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import contextlib
import copy
import json
import sys

import modelopt.torch.speculative as mtsp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
for theta, differs in ((10000, False), (1000000, True)):
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=8, **HEADS)
    target = Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": float(theta)}))
    drafter = {"num_hidden_layers": 2, **HEADS}
    options = {"dflash_block_size": 6, "dflash_mask_token_id": 7, "dflash_architecture_config": drafter}
    with contextlib.redirect_stdout(sys.stderr):
        mtsp.convert(target, [("dflash", options)])
        target.get_exporter().export(sys.argv[1])
    said = json.load(open(f"{sys.argv[1]}/config.json"))["rope_theta"]
    drafter = target.dflash_module.eval()
    for weight in drafter.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    positions = torch.arange(26)[None]
    inputs = torch.randn(1, 6, 64), torch.randn(1, 20, 2 * 64), positions, torch.zeros(1, 1, 6, 26)
    with torch.no_grad():
        trained = target.lm_head(drafter(*inputs))
        base = round(float(1 / drafter.rotary_emb.inv_freq[1]) ** 8)
        config = copy.deepcopy(drafter.config)
        config.rope_parameters = {"rope_type": "default", "rope_theta": said}
        drafter.rotary_emb = Qwen3RotaryEmbedding(config)
        served = target.lm_head(drafter(*inputs))
    apart = bool((trained - served).abs().max() > 0.01 * trained.std())
    print(f"{theta}: in training {base}, in config.json {said:.0f}, ", end="")
    print(f"logits with the base of config.json differ from the trainer's: {apart}")
    assert abs(base - 10000) < 10 and said == theta and apart is differs
PY
