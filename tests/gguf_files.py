"""Tiny Llamas in GGUF files, with a tokenizer of single bytes in them, and the shipped hybrid with its MTP layer, written by
gguf's own writer with the names and changes of llama.cpp's converter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 96, 2, 4, 2, 16
SPECIAL = ["<pad>", "<s>", "</s>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_llama(
    file: Path,
    kind: str = "F32",
    seed: int = 0,
    stated: Any = None,
    more: Any = None,
    model: str = "llama",
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """kind: of the matrices, "F32" or a type that gguf can write, such as "Q8_0"; norms are always F32. stated: further
    metadata, without the architecture. more: further tensors. model: the architecture. tokenizer: other metadata of the
    tokenizer than that of a byte-level one, or more."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    about: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*SPECIAL, *bytes_to_unicode().values(), "ab"],
        "merges": ["a b"],
        "padding_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | (tokenizer or {})
    tokens = about["tokens"]
    file.parent.mkdir(parents=True, exist_ok=True)
    writer: Any = gguf.GGUFWriter(file, model)
    for name, value in (
        {"block_count": LAYERS, "rope.dimension_count": HEAD, "rope.freq_base": 10000.0} | (stated or {})
    ).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{model}.{name}", value)
    for name, values in (more or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    about.setdefault("token_type", [3 if token in SPECIAL else 1 for token in tokens])  # control, normal
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for name, value in about.items():
        if value is not None:
            kinds[type(value)](f"tokenizer.ggml.{name}", value)
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
    return _finished(writer, file)


QWEN = {  # conversion/qwen.py and gguf-py's tensor names, read in November 2026
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    # of GLM, by conversion/glm.py and deepseek.py
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}


def add_qwen(
    writer: Any, tensors: dict[str, torch.Tensor], layers: int, kind: str = "F32", model: str = "qwen35"
) -> None:
    """Tensors of a Qwen or GLM checkpoint, as llama.cpp stores them. layers: of the target. kind: of wide matrices. model: the
    architecture."""
    import gguf

    for name, tensor in tensors.items():
        in_layer = re.match(r"(model|mtp)\.layers\.(\d+)\.(.*)", name)
        of_mtp = name.startswith("mtp.")
        block = layers * of_mtp + int(in_layer[2] if in_layer else 0)
        stem = (in_layer[3] if in_layer else name).removesuffix(".weight").removesuffix(".bias")
        own = "ffn_norm" if model == "deepseek2" and stem == "post_attention_layernorm" else QWEN[stem]
        place = (f"blk.{block}." if in_layer or of_mtp else "") + own
        values = tensor.float()
        if stem.endswith("A_log"):
            values = -values.exp()
        if "norm" in stem and stem != "linear_attn.norm" and model.startswith("qwen"):
            values = values + 1
        values = values.squeeze().contiguous()
        stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 and values.shape[-1] % 32 == 0 else "F32"]
        ending = "" if stem.endswith(("A_log", "_bias")) else ".bias" if name.endswith(".bias") else ".weight"
        writer.add_tensor(place + ending, gguf.quants.quantize(values.numpy(), stored), raw_dtype=stored)


def write_tensors(
    file: Path, tensors: dict[str, torch.Tensor], layers: int, announced: int = 1, kind: str = "qwen35", **more: Any
) -> Path:
    """A GGUF file with these tensors of a checkpoint alone, and `more` under llama.cpp's names."""
    import gguf

    writer: Any = gguf.GGUFWriter(file, kind)
    if announced:
        writer.add_nextn_predict_layers(announced)
    add_qwen(writer, tensors, layers, model=kind)
    for name, tensor in more.items():
        writer.add_tensor(name, tensor.float().numpy())
    return _finished(writer, file)


def write_hybrid(file: Path, kind: str = "F32", mtp: bool = True) -> Path:
    """The shipped hybrid (zoo:hybrid) with its tokenizer. kind: of wide matrices. mtp: with its MTP layer."""
    import gguf
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    from assisted import zoo
    from assisted.lab.handover.gguf import add_tokenizer

    source = Path(zoo.folder("hybrid"))
    config: Any = AutoConfig.from_pretrained(source)
    writer: Any = gguf.GGUFWriter(file, "qwen35")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers + mtp)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_uint32("qwen35.full_attention_interval", 4)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    if mtp:
        writer.add_nextn_predict_layers(1)
    add_tokenizer(writer, AutoTokenizer.from_pretrained(source), config.vocab_size, "target")
    tensors = load_file(source / "model.safetensors")
    held = {name: tensor for name, tensor in tensors.items() if mtp or not name.startswith("mtp.")}
    add_qwen(writer, held, config.num_hidden_layers, kind)
    return _finished(writer, file)


def _finished(writer: Any, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
