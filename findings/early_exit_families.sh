#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29; 5.24.0 does the same.
#
# `generate(assistant_early_exit=...)` works with Llama, and raises "IndexError: list index out of range" with many other families: GPT-2,
# GPT-NeoX, OPT, Bloom, Falcon, StableLM, Cohere 2, Nemotron, gpt-oss. The cache of the shortened model is made by the smaller number of layers
# in its config, and their forward pass runs all layers. The number is not put back, so that afterwards the model cannot generate at all:
# each plain call raises the same IndexError. (Setting config.num_hidden_layers again repairs it.)
#
# Output seen, where "kept" is the number of layers in the config of a model that has three:
#   Llama: early exit the same text, kept 3, then plain the same text
#   GPT-2: early exit IndexError, kept 1, then plain IndexError
#   OPT: early exit IndexError, kept 1, then plain IndexError
#   Falcon: early exit IndexError, kept 1, then plain IndexError
#   gpt-oss: early exit IndexError, kept 1, then plain IndexError
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import torch
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

torch.manual_seed(0)
SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
MODELS = {
    "Llama": LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=96)),
    "GPT-2": GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=3, n_head=4)),
    "OPT": OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64)),
    "Falcon": FalconForCausalLM(FalconConfig(**SIZES)),
    "gpt-oss": GptOssForCausalLM(GptOssConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, head_dim=16, num_local_experts=4)),
}
ids = torch.randint(3, 60, (1, 12))


def text(model, **more):
    try:
        found = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, **more)
    except IndexError:
        return "IndexError"
    return "the same text" if found.equal(right) else "another text"


for name, model in MODELS.items():
    model.eval()
    right = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    exited, kept, plain = text(model, assistant_early_exit=1), model.config.num_hidden_layers, text(model)
    print(f"{name}: early exit {exited}, kept {kept}, then plain {plain}")
    wrong = "IndexError", 1, "IndexError"
    assert (exited, kept, plain) == (("the same text", 3, "the same text") if name == "Llama" else wrong)
PY
