"""Tiny Llamas in GGUF files, with a tokenizer of single bytes in them, written by gguf's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 96, 2, 4, 2, 16
SPECIAL = ["<pad>", "<s>", "</s>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_llama(file: Path, kind: str = "F32", seed: int = 0) -> Path:
    """kind: of the matrices, "F32" or a type that gguf can write, such as "Q8_0"; norms are always F32."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*SPECIAL, *bytes_to_unicode().values(), "ab"]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer: Any = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])  # control, normal
    writer.add_token_merges(["a b"])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    written = (
        "attn_output",
        "ffn_down",
    )  # small, so that a token says most of what the next one is: the text repeats itself
    random = np.random.default_rng(seed)
    wanted = gguf.GGMLQuantizationType[kind]
    shapes = {"token_embd": (len(tokens), HIDDEN), "output": (len(tokens), HIDDEN)}
    norms = ["output_norm"]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norms += [f"{block}.attn_norm", f"{block}.ffn_norm"]
        shapes |= {f"{block}.attn_q": (HEADS * HEAD, HIDDEN), f"{block}.attn_output": (HIDDEN, HEADS * HEAD)}
        shapes |= {f"{block}.attn_{name}": (KV_HEADS * HEAD, HIDDEN) for name in "kv"}
        shapes |= {f"{block}.ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}.ffn_down"] = (HIDDEN, INNER)
    for name, shape in shapes.items():
        values = random.normal(0, 0.005 if name.endswith(written) else 0.2, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
