#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29; 5.24.0 does the same.
#
# Assisted generation, here prompt lookup, sets the layers of a sliding-window cache to keep what has left the window, so that it can take
# drafts back, and does not unset it. If the cache goes on with plain `generate`, as in the next turn of a chat, nothing takes the old keys away
# any more: they grow with the text, where a cache of a plain turn stays at the window. The text is the same.
#
# Output seen, with a window of 8:
#   first turn plain: 7 keys a layer after it, 7 after a plain turn of 60 tokens
#   first turn prompt lookup: 7 keys a layer after it, 67 after a plain turn of 60 tokens
#   same text: True
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import torch
from transformers import MistralConfig, MistralForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=8)).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=0.2)
ids = torch.randint(3, 60, (1, 6)).repeat(1, 4)
call = dict(do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)
texts, found = [], []
for name, drafts in (("plain", {}), ("prompt lookup", {"prompt_lookup_num_tokens": 4})):
    first = model.generate(ids, max_new_tokens=20, **call, **drafts)
    cache = first.past_key_values
    kept = [cache.layers[0].keys.shape[2]]
    texts.append(model.generate(first.sequences, max_new_tokens=60, past_key_values=cache, **call).sequences)
    kept.append(cache.layers[0].keys.shape[2])
    found.append(kept)
    print(f"first turn {name}: {kept[0]} keys a layer after it, {kept[1]} after a plain turn of 60 tokens")
same = texts[0].equal(texts[1])
print(f"same text: {same}")
assert same and found == [[7, 7], [7, 67]]
PY
