#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28; 5.24.0 does the same.
#
# The methods of a DynamicCache that keep or repeat rows of a batch, `batch_select_indices` and `batch_repeat_interleave`, do not work
# for models with recurrent layers. For most (Qwen3-Next here) they raise an AttributeError, after the layers before were changed.
# For Falcon-H1, whose layers have keys and a state each, they change the keys alone and return. The cache then holds states of another
# number of rows, and the next forward pass fails in the middle of a layer. `reorder_cache`, for beams, is right in both.
#
# Output seen:
#   Qwen3-Next: batch_select_indices raises AttributeError
#   Qwen3-Next: reorder_cache is right
#   Falcon-H1: batch_select_indices leaves keys of 1 and states of 2 rows, the next pass raises RuntimeError
#   Falcon-H1: reorder_cache is right
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import torch
from transformers import DynamicCache, FalconH1Config, FalconH1ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(head_dim=8, bos_token_id=1, eos_token_id=2, pad_token_id=0)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
DELTA |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
MODELS = {
    "Qwen3-Next": (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, **DELTA, layer_types=["linear_attention", "full_attention"])),
    "Falcon-H1": (FalconH1ForCausalLM, FalconH1Config(**SIZES, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8)),
}
ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))


def read(model):
    cache = DynamicCache(config=model.config)
    model(ids[:, :11], past_key_values=cache, use_cache=True)
    return cache


def said(name, what, expected):
    print(f"{name}: {what}")
    assert what == expected


with torch.no_grad():
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(0)
        model = kind(config).eval()
        whole, cache = model(ids).logits[1, -1], read(model)
        try:
            cache.batch_select_indices(torch.tensor([1]))
            layer = cache.layers[0]
            states = next(iter(layer.recurrent_states.values()))
            what = f"batch_select_indices leaves keys of {len(layer.keys)} and states of {len(states)} rows"
            model(ids[1:, 11:], past_key_values=cache, use_cache=True)
        except AttributeError:
            said(name, "batch_select_indices raises AttributeError", "batch_select_indices raises AttributeError")
            assert name == "Qwen3-Next"
        except RuntimeError:
            said(name, f"{what}, the next pass raises RuntimeError",
                 "batch_select_indices leaves keys of 1 and states of 2 rows, the next pass raises RuntimeError")
        else:
            raise SystemExit(f"{name}: batch_select_indices works")
        cache = read(model)
        cache.reorder_cache(torch.tensor([1, 1]))
        found = model(ids[[1, 1], 11:], past_key_values=cache, use_cache=True).logits[:, -1]
        right = torch.allclose(found, whole.expand_as(found), atol=1e-4)
        said(name, f"reorder_cache is {'right' if right else 'wrong'}", "reorder_cache is right")
PY
