#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28.
#
# `generate(ids, past_key_values=DynamicCache(), use_cache=False)` neither raises nor ignores the cache. Every forward pass gets the whole
# text again, and appends its keys and values to the cache, so tokens attend to several copies of the text before them. The first new
# token is right; the text after it is another one, without a warning. Without the cache, use_cache=False only costs time. A model whose
# config says use_cache=False (MPT's default) meets this with any cache that a caller passes.
#
# Output seen:
#   lengths of the inputs of the passes: [12, 13, 14, 15, 16, 17, 18, 19], tokens in the cache 124
#   first token equal: True, text equal: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.3)
ids = torch.randint(5, 90, (1, 12))
call = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
without = model.generate(ids, use_cache=False, **call)
assert without.equal(model.generate(ids, **call))

lengths, cache = [], DynamicCache(config=model.config)
model.register_forward_pre_hook(lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
found = model.generate(ids, use_cache=False, past_key_values=cache, **call)
print(f"lengths of the inputs of the passes: {lengths}, tokens in the cache {cache.get_seq_length()}")
first, whole = found[:, 12].equal(without[:, 12]), found.equal(without)
print(f"first token equal: {first}, text equal: {whole}")
assert first and not whole and lengths == list(range(12, 20)) and cache.get_seq_length() == sum(lengths)
PY
