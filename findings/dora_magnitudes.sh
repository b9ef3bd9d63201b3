#!/usr/bin/env bash
# transformers 5.23.0, peft 0.21.2, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29; transformers 5.24.0 does the same.
#
# `AutoModelForCausalLM.from_pretrained(ADAPTER)` and `model.load_adapter(ADAPTER)` read a DoRA adapter without its magnitudes. In
# peft's file, they are named `lora_magnitude_vector`, and the parameter is `lora_magnitude_vector.default.weight`: transformers looks
# for `lora_magnitude_vector.default`, reports one name as unexpected and the other as missing in a table in the log, and goes on with
# magnitudes that differ from call to call. `PeftModel.from_pretrained` reads the same folder right, and LoRA is read right by both.
#
# Output seen:
#   LoRA: PeftModel reads it, AutoModel reads it, load_adapter reads it
#   DoRA: PeftModel reads it, AutoModel lacks 2 magnitudes, load_adapter lacks 2 magnitudes
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
base, adapter = f"{sys.argv[1]}/base", f"{sys.argv[1]}/adapter"
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(base)
ids = torch.arange(5, 20)[None]


def by_hand(folder):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(folder)
    return model


def magnitudes(model):
    found = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if "lora_magnitude_vector" in n}
    return found


READERS = {
    "PeftModel": lambda folder: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder),
    "AutoModel": AutoModelForCausalLM.from_pretrained,
    "load_adapter": by_hand,
}
found = []
for kind in ("LoRA", "DoRA"):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, use_dora=kind == "DoRA", task_type="CAUSAL_LM")
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    with torch.no_grad():
        for weight in magnitudes(tuned).values():
            weight.mul_(1.5)
    tuned.save_pretrained(adapter)
    said = []
    for name, read in READERS.items():
        model = read(adapter).eval()
        with torch.no_grad():
            same = torch.equal(model(ids).logits, tuned(ids).logits)
        lacks = sum(not torch.equal(weight, magnitudes(tuned)[n]) for n, weight in magnitudes(model).items())
        said.append(f"{name} reads it" if same else f"{name} lacks {lacks} magnitudes")
    found.append(f"{kind}: {', '.join(said)}")
    print(found[-1], flush=True)
assert found == [
    "LoRA: PeftModel reads it, AutoModel reads it, load_adapter reads it",
    "DoRA: PeftModel reads it, AutoModel lacks 2 magnitudes, load_adapter lacks 2 magnitudes",
], found
PY
