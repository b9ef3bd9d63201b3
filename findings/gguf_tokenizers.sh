#!/usr/bin/env bash
# transformers 5.23.0, gguf 0.19.0, xllamacpp 2026.10.11549 (llama.cpp), torch 2.13.0 (CPU), Python 3.11, seen on 2026-11-29.
#
# `AutoTokenizer.from_pretrained(gguf_file=...)` gives other tokens than llama.cpp, at no level above INFO in the log:
# - A file names the way in which its tokenizer cuts text into words, tokenizer.ggml.pre. transformers knows 23 of these names, and takes
#   GPT-2's way for all others: for those of SmolLM and SmolLM2, StarCoder, StableLM 2 (which is Qwen 2's under another name),
#   Seed-Coder and DeepSeek Coder. Merges across its borders are never made: spaces before a digit, brackets before a word.
# - If a file does not say whether a text begins with BOS, llama.cpp begins it so where the name is that of Llama 3. Those that were
#   written in 2024 often do not say.
# - tokenizer.ggml.add_space_prefix = false, which forbids the space before a text of a SentencePiece vocabulary, is read and not used.
#
# Output seen, where Ġ is a space, ĉ a tab and Ċ a line break:
#   gpt-2           transformers ( a Ġ Ġ 1 ĉ a ! Ċ    llama.cpp ( a Ġ Ġ 1 ĉ a ! Ċ
#   smollm          transformers ( a Ġ Ġ 1 ĉ a ! Ċ    llama.cpp ( a ĠĠ 1 ĉ a ! Ċ
#   starcoder       transformers ( a Ġ Ġ 1 ĉ a ! Ċ    llama.cpp ( a ĠĠ 1 ĉ a ! Ċ
#   qwen2           transformers (a Ġ Ġ 1 ĉa !Ċ       llama.cpp (a Ġ Ġ 1 ĉa !Ċ
#   stablelm2       transformers ( a Ġ Ġ 1 ĉ a ! Ċ    llama.cpp (a Ġ Ġ 1 ĉa !Ċ
#   seed-coder      transformers ( a Ġ Ġ 1 ĉ a ! Ċ    llama.cpp (a Ġ Ġ 1 ĉa ! Ċ
#   deepseek-coder  transformers ( a Ġ Ġ 1 ĉ a ! Ċ    llama.cpp ( a ĠĠ 1 ĉa ! Ċ
#   llama-bpe, nothing about BOS: transformers ! llama.cpp <s> !
#   no space: transformers ▁ab llama.cpp ab
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 gguf==0.19.0 xllamacpp==2026.10.11549
"$work/env/bin/python" - "$work" 2>"$work/log" <<'PY' || { tail "$work/log"; exit 1; }
import json
import sys
import urllib.request

import gguf
import numpy as np
import xllamacpp
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

MERGES = ["( a", "Ġ Ġ", "ĉ a", "! Ċ"]
BYTES = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
WORDS = ["▁", "a", "b", "▁a", "ab", "▁ab"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *WORDS]
WIDTH = 64


def written(tokens, model, split, kinds, **more):
    writer = gguf.GGUFWriter(f"{sys.argv[1]}/{split}.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    for name, value in (("context_length", 512), ("embedding_length", WIDTH), ("feed_forward_length", WIDTH)):
        writer.add_uint32(f"llama.{name}", value)
    for name, value in (("block_count", 1), ("attention.head_count", 2), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.eye(WIDTH, dtype=np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_llama_cpp(file, text):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx = file, 256
    options.n_parallel, options.port, options.hostnames = 1, 0, ["127.0.0.1"]
    options.cpuparams.n_threads = 1
    server = xllamacpp.Server(options)
    body = json.dumps({"content": text, "add_special": True}).encode()
    request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as found:
        return json.load(found)["tokens"]


def both(text, tokens, model, split, kinds, **more):
    written(tokens, model, split, kinds, **more)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=f"{split}.gguf")
    found = tokenizer(text).input_ids, of_llama_cpp(f"{sys.argv[1]}/{split}.gguf", text)
    return [" ".join(tokens[number] for number in ids) for ids in found]


GPT2, QWEN2 = "( a Ġ Ġ 1 ĉ a ! Ċ", "(a Ġ Ġ 1 ĉa !Ċ"
KINDS = [3, 3, 3] + [1] * (len(BYTES) - 3)
for split, *expected in (
    ("gpt-2", GPT2, GPT2),
    ("smollm", GPT2, "( a ĠĠ 1 ĉ a ! Ċ"),
    ("starcoder", GPT2, "( a ĠĠ 1 ĉ a ! Ċ"),
    ("qwen2", QWEN2, QWEN2),
    ("stablelm2", GPT2, QWEN2),
    ("seed-coder", GPT2, "(a Ġ Ġ 1 ĉa ! Ċ"),
    ("deepseek-coder", GPT2, "( a ĠĠ 1 ĉa ! Ċ"),
):
    found = both("(a  1\ta!\n", BYTES, "gpt2", split, KINDS, token_merges=MERGES, add_bos_token=False)
    print(f"{split:<15} transformers {found[0]:<20} llama.cpp {found[1]}", flush=True)
    assert found == expected
found = both("!", BYTES, "gpt2", "llama-bpe", KINDS, token_merges=MERGES)
print(f"llama-bpe, nothing about BOS: transformers {found[0]} llama.cpp {found[1]}", flush=True)
assert found == ["!", "<s> !"]
scores = [0.0] * 259 + [-float(number) for number in range(len(WORDS))]
kinds = [3, 3, 3] + [6] * 256 + [1] * len(WORDS)
found = both("ab", PIECES, "llama", "default", kinds, token_scores=scores, add_bos_token=False, add_space_prefix=False)
print(f"no space: transformers {found[0]} llama.cpp {found[1]}", flush=True)
assert found == ["▁ab", "ab"]
PY
