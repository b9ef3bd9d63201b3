#!/usr/bin/env bash
# lm-format-enforcer 0.11.3, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29.
#
# `import lmformatenforcer.integrations.transformers` says that transformers is not installed, though it is: the module imports a class
# from `transformers.tokenization_utils`, which transformers 5 does not have, and takes any ImportError for a missing package. What it
# is for still works by hand: `TokenEnforcer.get_allowed_tokens` as `prefix_allowed_tokens_fn` of `generate`.
#
# Output seen:
#   transformers is not installed. Please install it with "pip install transformers[torch]"
#   by hand: "beta"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 lm-format-enforcer==0.11.3
"$work/env/bin/python" - 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import torch
from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData
from transformers import LlamaConfig, LlamaForCausalLM

try:
    import lmformatenforcer.integrations.transformers

    said = "imported"
except ImportError as error:
    said = str(error)
print(said)

# a vocabulary of the printable ASCII characters and an end token, 0
tokens = [(i, chr(31 + i), False) for i in range(1, 96)]
data = TokenEnforcerTokenizerData(tokens, lambda ids: "".join(chr(31 + i) for i in ids if i), 0, False, 96)
enforcer = TokenEnforcer(data, JsonSchemaParser({"enum": ["beta"]}))


def allowed(row, ids):
    found = enforcer.get_allowed_tokens(ids.tolist()).allowed_tokens
    return [i for i in found if i not in (1, 0)] or found  # no blanks, which JSON allows around the text


torch.manual_seed(0)
config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, eos_token_id=0)
model = LlamaForCausalLM(config)
ids = torch.tensor([[33, 34]])
made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, prefix_allowed_tokens_fn=allowed)
text = "".join(chr(31 + i) for i in made[0, 2:].tolist() if i)
print("by hand:", text.strip())
assert said.startswith("transformers is not installed") and text.strip() == '"beta"', (said, text)
PY
