#!/usr/bin/env bash
# transformers 5.23.0, bitsandbytes 0.50.2, torch 2.13.0 (CPU), accelerate 1.15.0, Python 3.11, seen on 2026-11-28; transformers 5.24.0 does
# the same.
#
# `llm_int8_skip_modules` replaces the default list, in which the output head is. If the head shares its weight with the embedding (SmolLM2,
# Llama 3.2, small Qwen), any list without "lm_head" gives the head the module of bitsandbytes and leaves it the embedding's
# ordinary weight. The model loads without a warning, and its first forward pass raises an AttributeError (8 bits) or an
# AssertionError without a text (4 bits). With an untied head, the same config quantizes the head, and works.
#
# Output seen:
#   8 bits, tied, skip q_proj: AttributeError
#   8 bits, tied, skip q_proj and lm_head: runs
#   8 bits, untied, skip q_proj: runs
#   4 bits, tied, skip q_proj: AssertionError
#   4 bits, tied, skip q_proj and lm_head: runs
#   4 bits, untied, skip q_proj: runs
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 bitsandbytes==0.50.2 accelerate==1.15.0
"$work/env/bin/python" - "$work" <<'PY'
import sys

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
for bits in (8, 4):
    for tied, skipped, expected in (
        (True, ["q_proj"], "AttributeError" if bits == 8 else "AssertionError"),
        (True, ["q_proj", "lm_head"], "runs"),
        (False, ["q_proj"], "runs"),
    ):
        LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)).save_pretrained(folder := f"{sys.argv[1]}/{tied}")
        config = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, llm_int8_skip_modules=skipped)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.float32)
        try:
            with torch.no_grad():
                model(torch.arange(5, 25)[None])
            found = "runs"
        except Exception as error:
            found = type(error).__name__
        print(f"{bits} bits, {'tied' if tied else 'untied'}, skip {' and '.join(skipped)}: {found}")
        assert found == expected
PY
