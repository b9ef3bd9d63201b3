#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28; 5.24.0 does the same.
#
# Jamba and Zamba, whose recurrent layers are those of Mamba 1, begin anew from an empty state in every forward pass of several tokens, also
# if a cache with states is passed in. The attention layers do read it. So a prompt in chunks (`generate(prefill_chunk_size=...)`), and
# a further turn with the cache of the turn before, give other logits than the same text at once, without a warning. After one token at
# a time the logits are right, and Bamba and Falcon-H1, with layers of Mamba 2, are right in both ways.
#
# Output seen, where "apart" is the largest difference of logits after the prompt, in their standard deviations:
#   Jamba: in chunks apart by more than 0.1: True, after a cache: True, after a cache token by token: False
#   Zamba: in chunks apart by more than 0.1: True, after a cache: True, after a cache token by token: False
#   Bamba: in chunks apart by more than 0.1: False, after a cache: False, after a cache token by token: False
#   Falcon-H1: in chunks apart by more than 0.1: False, after a cache: False, after a cache token by token: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import torch
from transformers import BambaConfig, BambaForCausalLM, DynamicCache, FalconH1Config, FalconH1ForCausalLM
from transformers import JambaConfig, JambaForCausalLM, ZambaConfig, ZambaForCausalLM

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
CALL = dict(max_new_tokens=1, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True)
HEADS = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
MODELS = {
    "Jamba": (JambaForCausalLM, JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4,
                                            use_mamba_kernels=False, num_experts=1, num_experts_per_tok=1)),
    "Zamba": (ZambaForCausalLM, ZambaConfig(**SIZES | {"num_hidden_layers": 3}, layers_block_type=["mamba", "hybrid", "hybrid"], attention_head_dim=16, mamba_d_state=8,
                                            mamba_dt_rank=4, n_mamba_heads=2, use_mamba_kernels=False)),
    "Bamba": (BambaForCausalLM, BambaConfig(**SIZES, **HEADS, attn_layer_indices=[1])),
    "Falcon-H1": (FalconH1ForCausalLM, FalconH1Config(**SIZES, **HEADS, mamba_d_ssm=64)),
}
ids = torch.randint(5, 90, (1, 14), generator=torch.Generator().manual_seed(0))


def continued(model, step):
    """The logits after the prompt, whose first eight tokens an earlier forward pass has read into a cache."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache, use_cache=True)
    if step is None:
        return model.generate(ids, past_key_values=cache, **CALL).logits[0]
    for place in range(8, 14):
        where = torch.tensor([[place]])
        logits = model(ids[:, where[0]], position_ids=where, past_key_values=cache, use_cache=True).logits[:, -1]
    return logits


with torch.no_grad():
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(0)
        model = kind(config).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3)
        whole = model.generate(ids, **CALL).logits[0]
        found = (model.generate(ids, prefill_chunk_size=8, **CALL).logits[0], continued(model, None), continued(model, 1))
        chunks, turn, stepped = (bool((logits - whole).abs().max() > 0.1 * whole.std()) for logits in found)
        print(f"{name}: in chunks apart by more than 0.1: {chunks}, after a cache: {turn}, after a cache token by token: {stepped}")
        assert not stepped and chunks == turn == (name in ("Jamba", "Zamba"))
PY
