"""Tiny randomly initialised models, one per decoder-only architecture that the tests run over.

Each entry says how its forward wants to be told what a token may see. Nothing here knows about drafting or acceptance;
what the entries claim of positions is checked in test_architectures.py, and of masks in test_runtime.py.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

Made = TypeVar("Made")
VOCABULARY = 96
WINDOW = 8
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Offered to every config; each takes the names it knows.
COMMON = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}
DROPOUTS = (
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "embd_pdrop"),
    *("embed_dropout", "emb_pdrop", "hidden_dropout", "hidden_dropout_prob", "layerdrop", "resid_dropout"),
    *("resid_pdrop", "router_jitter_noise"),
)


@dataclass(frozen=True)
class Architecture:
    """One architecture at a size that decodes in milliseconds.

    masks: what `attention_mask` gives, over a cache that keeps every slot, the logits of the plain forward.
        "4d"      one mask [B, 1, n, kv] for every layer
        "window"  one mask [B, 1, n, kv], the sliding window already applied, for every layer
        "dict"    {layer type: mask [B, 1, n, kv]}, for a model whose layers differ
        "2d"      the padding mask [B, kv]: the model builds a bias from it or from the slots, so chains only
    attention: the implementation to ask for; eager wants additive masks, sdpa boolean ones.
    positions: whether forward honours position_ids.
    note: what else is peculiar about it.
    """

    name: str
    make: partial[PretrainedConfig]
    masks: str = "4d"
    attention: str = "sdpa"
    positions: bool = True
    note: str = ""


def tiny(model_type: str, **fields: Any) -> PretrainedConfig:
    """The config of `model_type` at test size; `fields` win over the common sizes."""
    kind = CONFIG_MAPPING[model_type]
    known = set(kind.__dataclass_fields__) | set(kind.attribute_map)
    common = {
        name: size for name, size in COMMON.items() if name in known and kind.attribute_map.get(name) not in fields
    }
    common |= {name: 0.0 for name in DROPOUTS if name in known}
    return kind(**(common | SPECIAL | fields))


def _entry(
    name: str, model_type: str | None = None, about: dict[str, Any] | None = None, **fields: Any
) -> Architecture:
    return Architecture(name, partial(tiny, model_type or name, **fields), **(about or {}))


EAGER = {"attention": "eager"}
ONE_WINDOW = {"masks": "window"}
MIXED = {"masks": "dict"}
BY_SLOT = {"masks": "2d", "attention": "eager"}

MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
ROUTED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
BY_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
SUMMED = {"positions": False, "note": "ALiBi from the cumulative sum of the 2-D mask"}
# Where embeddings are scaled up, a tied head repeats the current token for ever.
UNTIED = {"tie_word_embeddings": False}

ARCHITECTURES = [
    _entry("llama"),
    _entry("mistral", sliding_window=None),
    _entry("mistral-window", "mistral", ONE_WINDOW, sliding_window=WINDOW),
    _entry("ministral", about=MIXED, **MIXED_LAYERS),
    _entry("mixtral", sliding_window=None),
    _entry("qwen2"),
    _entry("qwen2-window", "qwen2", MIXED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    _entry("qwen2_moe"),
    _entry("qwen3"),
    _entry("qwen3_moe"),
    _entry("gemma"),
    _entry("gemma2", about=MIXED | EAGER, **UNTIED, **MIXED_LAYERS),
    _entry("gemma3", "gemma3_text", MIXED, **UNTIED, **MIXED_LAYERS),
    _entry(
        *("gemma3n", "gemma3n_text", MIXED | {"note": "the last two layers read the keys and values of earlier ones"}),
        **(UNTIED | BY_LAYER | MIXED_LAYERS | {"layer_types": 2 * MIXED_LAYERS["layer_types"]}),
        **{
            "laurel_rank": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    _entry("gemma4", "gemma4_text", MIXED, **UNTIED, **BY_LAYER, **MIXED_LAYERS),
    _entry("phi"),
    _entry("phi3"),
    _entry("phi3-window", "phi3", ONE_WINDOW, sliding_window=WINDOW),
    _entry("phimoe"),
    _entry("gpt2"),
    _entry(
        "gpt_neo",
        about=BY_SLOT | {"note": "causality and the local window are counted in slots, from the end of the cache"},
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    ),
    _entry("gpt_neox"),
    _entry("gptj", about=EAGER, rotary_dim=4),
    _entry("gpt_bigcode"),
    _entry("codegen", about=EAGER, rotary_dim=4),
    _entry("opt", ffn_dim=48, word_embed_proj_dim=32),
    _entry("xglm", about=EAGER, ffn_dim=48, **UNTIED),
    _entry("biogpt"),
    _entry("falcon", new_decoder_architecture=True, num_kv_heads=2),
    _entry(
        *("falcon-alibi", "falcon", SUMMED | {"masks": "2d"}),
        **(UNTIED | {"alibi": True, "multi_query": False, "parallel_attn": False}),
    ),
    _entry("bloom", about=BY_SLOT | SUMMED, **UNTIED),
    _entry("mpt", about=BY_SLOT | {"positions": False, "note": "ALiBi from slots"}, **UNTIED, num_hidden_layers=3),
    _entry("stablelm"),
    _entry("olmo"),
    _entry("olmo2"),
    _entry("olmo3", about=MIXED, **MIXED_LAYERS),
    _entry("olmoe"),
    _entry("granite"),
    _entry("granitemoe"),
    _entry("cohere", logit_scale=1.0),
    _entry("cohere2", about=MIXED, logit_scale=1.0, **MIXED_LAYERS),
    _entry("starcoder2", sliding_window=None),
    _entry("starcoder2-window", "starcoder2", ONE_WINDOW, sliding_window=WINDOW),
    _entry("smollm3", no_rope_layer_interval=2),
    _entry("gpt_oss", about=MIXED | EAGER, **MIXED_LAYERS),
    _entry("deepseek_v2", **ROUTED, **LATENT),
    _entry("deepseek_v3", **ROUTED, **LATENT),
    _entry("glm"),
    _entry("glm4"),
    _entry("glm4_moe", **ROUTED),
    _entry("nemotron"),
    _entry("exaone4", about=MIXED, **MIXED_LAYERS),
    _entry("mellum", about=MIXED, num_mtp_layers=1, **MIXED_LAYERS),
    _entry("ernie4_5"),
    _entry("seed_oss"),
    _entry("hunyuan_v1_dense"),
    _entry("persimmon"),
    _entry("jetmoe", kv_channels=8),
    _entry(
        "dbrx",
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    _entry("arcee"),
    _entry("apertus"),
    _entry("helium"),
    _entry("nanochat"),
    _entry("diffllama"),
    _entry("minimax_m2"),
    _entry(
        "llama4",
        "llama4_text",
        MIXED
        | {
            "note": "chunks are of logical positions; layers without rope scale queries by slot once a row has "
            "floor_scale (8192) tokens, and there ragged rows differ"
        },
        attention_chunk_size=WINDOW,
        no_rope_layer_interval=2,
        intermediate_size_mlp=48,
    ),
]

# Their layers keep states. They run over columns, so that only what is committed changes the states.
RECURRENT = [
    _entry("mamba2", about=EAGER, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8),
    _entry("qwen3_next", **LINEAR_LAYERS, **DELTA),
    _entry("qwen3_5", "qwen3_5_text", **LINEAR_LAYERS, **DELTA),
    _entry("olmo_hybrid", **LINEAR_LAYERS),
    _entry("kimi_linear", **LINEAR_LAYERS, linear_head_dim=8, linear_num_heads=4, **LATENT),
    _entry("lfm2", about={"note": "the state is a convolution's past only"}, layer_types=["conv", "full_attention"]),
    _entry("bamba", attn_layer_indices=[1], **MAMBA_2),
    _entry("falcon_h1", mamba_d_ssm=64, mamba_d_head=8, **MAMBA_2),
    _entry("granitemoehybrid", layer_types=["mamba", "attention"], shared_intermediate_size=48, **MAMBA_2),
    _entry("mamba", about=EAGER, state_size=8),
    _entry("falcon_mamba", about=EAGER, state_size=8),
    _entry("jamba", attn_layer_period=2, attn_layer_offset=1, **MAMBA),
    _entry(
        "nemotron_h",
        layers_block_type=["mamba", "attention"],
        **{"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    _entry("zamba", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, **MAMBA),
    _entry("zamba2", layers_block_type=["mamba", "hybrid"], mamba_d_state=8, n_mamba_heads=8, chunk_size=8),
]

# Their caches hold more than keys and values, and nothing that can be put back.
REFUSED = [
    _entry("rwkv", about=EAGER, context_length=256),
    _entry("xlstm", about=EAGER, hidden_size=64, num_heads=4, qk_dim_factor=1.0),
    _entry("minimax", **LINEAR_LAYERS, block_size=16),
    _entry("recurrent_gemma", lru_width=32, attention_window_size=WINDOW, block_types=["recurrent", "attention"]),
    _entry(
        "deepseek_v32",
        about={"note": "keys of an indexer that ignores padding: plain batched generation differs from rows alone"},
        **({"index_topk": 6, "index_head_dim": 16, "index_n_heads": 2} | ROUTED | LATENT),
    ),
]


def _known(architectures: list[Architecture]) -> list[Architecture]:
    """Those that this version of transformers has."""
    return [architecture for architecture in architectures if architecture.make.args[0] in CONFIG_MAPPING]


ARCHITECTURES, RECURRENT, REFUSED = map(_known, (ARCHITECTURES, RECURRENT, REFUSED))


def build(architecture: Architecture, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A float32 model in eval mode whose weights depend only on the architecture, the overrides and `seed`."""
    config = architecture.make(**config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=architecture.attention, dtype=torch.float32
        )
    _spread(model, torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def _spread(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Redraw the matrices so wide that layers outweigh the embedding: greedy text then varies."""
    embedding = model.get_input_embeddings().weight
    for weight in model.parameters():
        if weight.ndim >= 2:
            scale = 0.25 if weight is embedding else 3.0 * weight.shape[-1] ** -0.5
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """The same for models of the same class, config and weights."""
    found = hashlib.sha1(f"{type(model)} {model.config.to_json_string()}".encode())
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tensor.device}".encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def made_once(make: Callable[..., Made]) -> Callable[..., Made]:
    """What `make` makes of a model, made once for all models with the same fingerprint. Each caller gets a copy."""
    known: dict[str, Made] = {}

    @functools.wraps(make)
    def copied(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Made:
        key = f"{fingerprint(model)} {args} {kwargs}"
        if key not in known:
            known[key] = make(model, *args, **kwargs)
        return copy.deepcopy(known[key])

    return copied


def half_right(model: PreTrainedModel, seed: int = 1, noise: float | None = None) -> PreTrainedModel:
    """An independent copy of `model` that says the same next token about half of the time.

    Every matrix moves by `noise` times its own spread, in a direction that `seed` fixes. None looks for the noise by
    bisection over random text.
    """
    other = copy.deepcopy(model)
    _move(other, model, _moves(model, seed), _noise_of_half(model, seed) if noise is None else noise)
    return other


def _moves(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight.detach().std() * torch.randn(weight.shape, generator=generator)
        for name, weight in model.named_parameters()
        if weight.ndim >= 2
    }


@made_once
def _noise_of_half(model: PreTrainedModel, seed: int) -> float:
    other, moves = copy.deepcopy(model), _moves(model, seed)
    low, high = 0.0, 2.0
    for _ in range(8):
        middle = (low + high) / 2
        _move(other, model, moves, middle)
        right = agreement(model, other)
        if abs(right - 0.5) < 0.05:
            break
        low, high = (middle, high) if right > 0.5 else (low, middle)
    return middle


@torch.no_grad()
def _move(other: PreTrainedModel, model: PreTrainedModel, moves: dict[str, Tensor], noise: float) -> None:
    here, there = dict(model.named_parameters()), dict(other.named_parameters())
    for name, move in moves.items():
        there[name].copy_(here[name] + noise * move)


@torch.no_grad()
def agreement(first: PreTrainedModel, second: PreTrainedModel, seed: int = 0, rows: int = 8, length: int = 32) -> float:
    """The share of positions of random text at which both models say the same next token."""
    ids = random_ids(first, rows, length, seed)
    return (first(ids).logits.argmax(-1) == second(ids).logits.argmax(-1)).float().mean().item()


def random_ids(model: PreTrainedModel, rows: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens [rows, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(max(SPECIAL.values()) + 1, vocabulary, (rows, length), generator=generator)
