#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0, xllamacpp 2026.10.11549 (llama.cpp), torch 2.13.0 (CPU), accelerate 1.15.0, Python 3.11, seen on 2026-11-29.
#
# A GGUF file can state a token that ends a turn beside EOS (tokenizer.ggml.eot_token_id), and llama.cpp also knows such tokens by their
# names, <end_of_turn> or <|im_end|>. It ends a text at each of them. `from_pretrained(gguf_file=...)` takes EOS alone into the generation
# config, so that the same file goes on after the end of its turn, up to max_new_tokens, without a warning. The end tokens of a
# checkpoint's generation_config.json are in no GGUF file.
#
# Output seen, where every next token is made to be the one that is named:
#   EOS:           llama.cpp ends, transformers writes 1 of 8 tokens
#   eot_token_id:  llama.cpp ends, transformers writes 8 of 8 tokens
#   <end_of_turn>: llama.cpp ends, transformers writes 8 of 8 tokens
#   another token: llama.cpp goes on, transformers writes 8 of 8 tokens
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 xllamacpp==2026.10.11549 accelerate==1.15.0
"$work/env/bin/python" - "$work/model.gguf" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import json
import os
import sys
import urllib.request

import gguf
import numpy as np
import torch
import xllamacpp
from transformers import AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH = 64
TOKENS = ["<unk>", "<s>", "</s>", "<over>", "<end_of_turn>", *bytes_to_unicode().values(), "ab"]
CASES = {"EOS": 2, "eot_token_id": 3, "<end_of_turn>": 4, "another token": 50}
writer = gguf.GGUFWriter(sys.argv[1], "llama")
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("gpt-2")
writer.add_token_list(TOKENS)
writer.add_token_types([3] * 5 + [1] * 257)
writer.add_token_merges(["a b"])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_eot_token_id(3)
writer.add_vocab_size(len(TOKENS))
for name, value in (("context_length", 512), ("embedding_length", WIDTH), ("feed_forward_length", WIDTH)):
    writer.add_uint32(f"llama.{name}", value)
for name, value in (("block_count", 1), ("attention.head_count", 2), ("attention.head_count_kv", 2)):
    writer.add_uint32(f"llama.{name}", value)
writer.add_layer_norm_rms_eps(1e-5)
for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
    writer.add_tensor(f"blk.0.{name}.weight", np.eye(WIDTH, dtype=np.float32))
for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
    writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
writer.add_tensor("token_embd.weight", np.ones((len(TOKENS), WIDTH), np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

options = xllamacpp.CommonParams()
options.model.path, options.n_ctx = sys.argv[1], 256
options.n_parallel, options.port, options.hostnames = 1, 0, ["127.0.0.1"]
options.cpuparams.n_threads = 1
server = xllamacpp.Server(options)
model = AutoModelForCausalLM.from_pretrained(os.path.dirname(sys.argv[1]), gguf_file="model.gguf")
for name, token in CASES.items():
    body = {"prompt": [60, 61], "n_predict": 8, "temperature": 0, "logit_bias": [[token, 1000]]}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        ends = json.load(answer)["stop_type"] == "eos"
    ids = torch.tensor([[60, 61]])
    bias = [[[token], 1000.0]]
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, sequence_bias=bias)
    count = written.shape[1] - 2
    does = "ends" if ends else "goes on"
    print(f"{name + ':':<14} llama.cpp {does}, transformers writes {count} of 8 tokens", flush=True)
    assert ends is (token < 50) and count == (1 if token == 2 else 8)
PY
