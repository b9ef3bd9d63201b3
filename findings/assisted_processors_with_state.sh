#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28; 5.24.0 does the same.
#
# `generate(guidance_scale=...)`, classifier-free guidance, and a SynthID watermark write another greedy text with
# `prompt_lookup_num_tokens=` or with an assistant than without, and nothing warns of it. Their processors, which are transformers' own,
# keep a state: a cache that one new token is read into in each call, and the contexts seen so far. Assisted generation calls them for
# every position of a draft, and nothing takes back what they have kept of rejected ones. With `assistant_early_exit=`, guidance raises
# IndexError. The other watermark and repetition_penalty, which keep nothing, give the same text in all ways.
#
# Output seen, where "drafted" is prompt lookup and an assistant with the target's own weights:
#   guidance_scale: drafted texts equal: [False, False]
#   SynthID watermark: drafted texts equal: [False, False]
#   other watermark: drafted texts equal: [True, True]
#   repetition_penalty: drafted texts equal: [True, True]
#   guidance_scale and early exit: IndexError
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM, SynthIDTextWatermarkingConfig, WatermarkingConfig

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.12)
ids = torch.randint(3, 60, (1, 6)).repeat(1, 4)
call = dict(max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
drafts = {"prompt_lookup_num_tokens": 5}, {"assistant_model": copy.deepcopy(model)}


def equal(**more):
    plain = model.generate(ids, **call, **more)
    return [model.generate(ids, **call, **more, **draft).equal(plain) for draft in drafts]


keys = SynthIDTextWatermarkingConfig(keys=list(range(10, 20)), ngram_len=5, context_history_size=16)
for name, more, expected in (
    ("guidance_scale", {"guidance_scale": 1.5}, False),
    ("SynthID watermark", {"watermarking_config": keys}, False),
    ("other watermark", {"watermarking_config": WatermarkingConfig(bias=2.5, context_width=2)}, True),
    ("repetition_penalty", {"repetition_penalty": 1.3}, True),
):
    found = equal(**more)
    print(f"{name}: drafted texts equal: {found}")
    assert found == [expected, expected]
try:
    model.generate(ids, **call, guidance_scale=1.5, assistant_early_exit=1)
except IndexError:
    print("guidance_scale and early exit: IndexError")
else:
    raise SystemExit("guidance_scale and early exit: no error")
PY
