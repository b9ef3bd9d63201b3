"""What a GGUF file states about its model and transformers (5.10 to 5.24) leaves out of the config without a word: the rotary
scaling of every architecture, and the rotary base, head sizes, biases or attention scale of some. Knows the names of
llama.cpp's converter and of configs; reads no weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_COMPLETE = frozenset({"qwen3_5_text", "qwen3_5_moe_text", "lfm2", "gemma4_text"})
"""Models whose configs transformers makes from all that a file states."""
_FIELDS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_BIASES = {"blk.0.attn_q.bias": "attention_bias", "blk.0.ffn_up.bias": "mlp_bias"}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""llama.cpp knows Gemma's largest models, which scale attention in their own way, by their layers."""
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_HIGH, _LOW = 4.0, 1.0
"""What every published checkpoint with Llama 3's scaling has beside its factor and its length, which is 8192 in most."""


def complete(config: Any, reader: Any) -> None:
    """Set in a config that transformers made from a GGUF file what it left out. reader: the file's `GGUFReader`.

    Raises ValueError for a model that the config's class cannot be: a mixture of experts in Llama's format, and a rotary
    scaling that transformers has no name for.
    """
    if config.model_type in _COMPLETE:
        return
    kind = str(reader.fields["general.architecture"].contents())
    of_kind = {name.removeprefix(f"{kind}."): field for name, field in reader.fields.items() if name.startswith(kind)}
    stated = {name: field.contents() for name, field in of_kind.items()}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    if stated.get("expert_count") and not hasattr(config, "num_experts_per_tok"):
        raise ValueError(
            f"this is a mixture of {stated['expert_count']} experts, of which transformers makes a {config.model_type} "
            "without experts; load the original checkpoint"
        )
    for name, field in _FIELDS.items():
        if hasattr(config, field) and isinstance(stated.get(name), (int, float)) and stated[name] > 0:
            setattr(config, field, stated[name])
    for name, field in _BIASES.items():
        if hasattr(config, field) and name in tensors:
            setattr(config, field, True)
    if hasattr(config, "query_pre_attn_scalar") and config.head_dim:
        is_27b = _LAYERS_OF_27B.get(kind) == config.num_hidden_layers
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    if getattr(config, "rope_parameters", None):
        _complete_rope(config, stated, {name: data for name, data in tensors.items() if name.startswith("rope_")})


def _complete_rope(config: Any, stated: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """stated: by llama.cpp's names, without the architecture. tensors: those of the rotary embedding."""
    every = config.rope_parameters
    rope = every.get("full_attention", every)  # Gemma 3's layers with a window are not scaled
    rope["rope_theta"] = stated.get("rope.freq_base", rope["rope_theta"])
    if "sliding_attention" in every:
        local = every["sliding_attention"]
        local["rope_theta"] = stated.get("rope.freq_base_swa", local["rope_theta"])
    if "partial_rotary_factor" in rope and "rope.dimension_count" in stated:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope["partial_rotary_factor"] = stated["rope.dimension_count"] / head
    scaled = {
        field: stated[f"rope.scaling.{name}"] for name, field in _SCALING.items() if f"rope.scaling.{name}" in stated
    }
    kind = stated.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in tensors:
        rope |= scaled | {
            f"{size}_factor": tensors[f"rope_factors_{size}.weight"].tolist() for size in ("long", "short")
        }
        rope["rope_type"] = "longrope"
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    elif kind in ("linear", "yarn"):
        rope |= scaled | {"rope_type": kind}
    elif kind != "none":
        raise ValueError(f"its rotary scaling {kind!r} is none that transformers has")
    factors = tensors.get("rope_freqs.weight")
    if factors is not None and not np.allclose(factors, 1):
        _scale_as_llama3(config, rope, factors)


def _scale_as_llama3(config: Any, rope: dict[str, Any], factors: np.ndarray) -> None:
    """Set the scaling that llama.cpp's converter has turned into these factors, [head / 2] float32."""
    rope |= {"rope_type": "linear", "factor": 1.0}
    plain = ROPE_INIT_FUNCTIONS["linear"](config, torch.device("cpu"))[0]
    rope |= {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
    for length in (8192, *(2**power for power in range(10, 18))):
        rope["original_max_position_embeddings"] = length
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
        if factors.shape == scaled.shape and np.allclose((plain / scaled).numpy(), factors, rtol=1e-3):
            return
    raise ValueError("the frequencies of its rotary embedding are scaled in a way that transformers has no name for")
