#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28; 5.24.0 does the same.
#
# `generate` with MiniMax (Text-01, M1) writes another text for a prompt that is padded on the left in a batch than for the same prompt
# alone. The logits after the prompt are equal; those after each further token are not, with a right attention_mask and without a
# warning. The row without padding is right. So is a batch with `use_cache=False`, and a Bamba, another hybrid, in the same batch.
# RecurrentGemma differs from the first token on: its recurrent layers read the padding.
#
# Output seen, where "apart" is the largest difference of logits, in their standard deviations:
#   MiniMax, padded: first token apart by more than 0.1: False, later tokens: True
#   MiniMax, not padded: first token apart by more than 0.1: False, later tokens: False
#   MiniMax, padded, use_cache=False: first token apart by more than 0.1: False, later tokens: False
#   RecurrentGemma, padded: first token apart by more than 0.1: True, later tokens: True
#   Bamba, padded: first token apart by more than 0.1: False, later tokens: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
"$work/env/bin/python" - <<'PY'
import torch
from transformers import BambaConfig, BambaForCausalLM, MiniMaxConfig, MiniMaxForCausalLM
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

SIZES = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
CALL = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
CALL |= dict(return_dict_in_generate=True, output_logits=True)


def made(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


experts = dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1, layer_types=["linear_attention", "full_attention"])
minimax = made(MiniMaxForCausalLM, MiniMaxConfig(**SIZES, **experts, block_size=16))
gemma = made(RecurrentGemmaForCausalLM, RecurrentGemmaConfig(**SIZES, lru_width=64, block_types=["recurrent", "attention"]))
mamba = dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_state=8, mamba_d_head=16, mamba_chunk_size=8)
bamba = made(BambaForCausalLM, BambaConfig(**SIZES, **mamba))
short, long = (torch.randint(5, 90, (1, n), generator=torch.Generator().manual_seed(n)) for n in (8, 14))
batch = torch.cat([torch.cat([torch.zeros(1, 6, dtype=torch.long), short], 1), long])


def apart(model, row, **more):
    alone = model.generate((short, long)[row], **CALL).logits
    together = model.generate(batch, attention_mask=(batch != 0).long(), **CALL, **more).logits
    return [float((a[0] - b[row]).abs().max() / a.std()) > 0.1 for a, b in zip(alone, together)]


for name, model, row, more, expected in (
    ("MiniMax, padded", minimax, 0, {}, (False, True)),
    ("MiniMax, not padded", minimax, 1, {}, (False, False)),
    ("MiniMax, padded, use_cache=False", minimax, 0, {"use_cache": False}, (False, False)),
    ("RecurrentGemma, padded", gemma, 0, {}, (True, True)),
    ("Bamba, padded", bamba, 0, {}, (False, False)),
):
    first, *later = apart(model, row, **more)
    print(f"{name}: first token apart by more than 0.1: {first}, later tokens: {any(later)}")
    assert (first, any(later)) == expected
PY
