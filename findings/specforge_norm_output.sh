#!/usr/bin/env bash
# specforge 0.2.0 with transformers 5.8.1 and torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29.
#
# In the config.json of an EAGLE-3 head, `norm_output` decides in vLLM, SGLang and speculators whether the head goes on from the state after
# its final norm (EAGLE-3.1). In SpecForge it decides whether the output layer reads that state at all: the head goes on from the
# state before the norm in every case. Its default is true, and that of the others false. So a head that SpecForge 0.2.0 has trained with
# `norm_output: true`, as for EAGLE-3.1, is right for the first token of a draft in these engines and wrong from the second on. Setting false
# in its config.json, or leaving the key out, makes them read it as it was trained. (SpecForge's pull request 879 of September 2026 has
# given the key its usual meaning; no release has it yet.)
#
# Output seen:
#   norm_output absent: the output layer reads the normed state: True, the next step reads it: False
#   norm_output True: the output layer reads the normed state: True, the next step reads it: False
#   norm_output False: the output layer reads the normed state: False, the next step reads it: False
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.8.1
"$work/env/bin/pip" install --quiet --no-deps specforge==0.2.0  # its servers and data sets are not needed
TORCHDYNAMO_DISABLE=1 "$work/env/bin/python" - 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import torch
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3, prepare_decoder_attention_mask
from transformers import LlamaConfig

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
COUNT = 8
for name, options, read in (("absent", {}, True), ("True", {"norm_output": True}, True), ("False", {"norm_output": False}, False)):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, pad_token_id=0, draft_vocab_size=96, **options)
    head = LlamaForCausalLMEagle3(config, attention_backend="sdpa").eval()
    torch.nn.init.uniform_(head.norm.weight, 0.5, 1.5)
    embeddings = head.embed_input_ids(torch.arange(COUNT)[None])
    with torch.no_grad():
        states = head.project_hidden_states(torch.randn(1, COUNT, 3 * 32))
        mask = prepare_decoder_attention_mask(torch.ones(1, COUNT, dtype=torch.bool), (1, COUNT), states, 0)
        following = head.backbone(embeddings, states, [[], []], mask, torch.arange(COUNT)[None])
        normed = head.norm(following)
        logits = head.compute_logits(following)
    reads = torch.allclose(logits, head.lm_head(normed), atol=1e-5)
    goes_on = bool(((following / head.norm.weight).square().mean(-1) - 1).abs().max() < 1e-3)
    print(f"norm_output {name}: the output layer reads the normed state: {reads}, the next step reads it: {goes_on}")
    assert reads is read and not goes_on
PY
