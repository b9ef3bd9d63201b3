#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0, torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-28; 5.24.0 does the same.
#
# `from_pretrained(gguf_file=...)` leaves the rotary scaling of a GGUF file out of the config, at no level above INFO in the log. That is the
# tensor rope_freqs.weight, into which llama.cpp's converter writes the scaling of Llama 3.1, 3.2 and 3.3, and the keys
# rope.scaling.* of linear and YaRN scaling. The rotary base is read for most architectures, but not for StarCoder 2 (999999 there)
# and StableLM. The model loads, and its text is another one: llama.cpp, or the original checkpoint, computes other logits.
#
# Output seen:
#   llama, linear 4: read default; logits of the original off by more than 1: True, equal without scaling: True
#   llama, as Llama 3.2: read default; logits of the original off by more than 1: True, equal without scaling: True
#   starcoder2, base 999999: read 10000
#   stablelm, base 999999: read 10000
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 accelerate==1.15.0
"$work/env/bin/python" - "$work" <<'PY'
import sys

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HIDDEN, INNER, HEADS, WORDS, BASE = 64, 96, 4, 64, 500000.0
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


def writer_of(kind, name, base):
    writer = gguf.GGUFWriter(f"{sys.argv[1]}/{name}.gguf", kind)
    writer.add_context_length(131072)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(base)
    return writer


def written(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def original(scaling):
    torch.manual_seed(0)
    rope = {"rope_theta": BASE, **scaling}
    sizes = dict(vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=HEADS)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=131072, rope_parameters=rope)).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def write_llama(model, name):
    writer = writer_of("llama", name, BASE)
    scaling = model.config.rope_parameters
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    else:  # as convert_hf_to_gguf.py does
        plain = BASE ** -(torch.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
        factors = plain / ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")[0]
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for key, weight in model.state_dict().items():
        if "q_proj" in key or "k_proj" in key:  # as convert_hf_to_gguf.py permutes them
            weight = weight.view(HEADS, 2, -1, HIDDEN).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight",)), weight.contiguous().numpy())
    written(writer)


ids = torch.randint(0, WORDS, (1, 300), generator=torch.Generator().manual_seed(0))
for name, scaling in (("linear 4", LINEAR), ("as Llama 3.2", LLAMA3)):
    model, unscaled = original(scaling), original({"rope_type": "default"})
    write_llama(model, name)
    read = AutoModelForCausalLM.from_pretrained(sys.argv[1], gguf_file=f"{name}.gguf", dtype=torch.float32)
    with torch.no_grad():
        right, found, without = (which(ids).logits for which in (model, read, unscaled))
    kind, off = read.config.rope_parameters["rope_type"], bool((found - right).abs().max() > 1)
    equal = torch.allclose(found, without, atol=1e-3)
    print(f"llama, {name}: read {kind}; logits of the original off by more than 1: {off}, equal without scaling: {equal}")
    assert kind == "default" and off and equal
for kind in ("starcoder2", "stablelm"):
    writer = writer_of(kind, kind, 999999.0)
    writer.add_tensor("output_norm.weight", torch.ones(HIDDEN).numpy())
    written(writer)
    found = AutoConfig.from_pretrained(sys.argv[1], gguf_file=f"{kind}.gguf").rope_parameters["rope_theta"]
    print(f"{kind}, base 999999: read {found:.0f}")
    assert found == 10000
PY
