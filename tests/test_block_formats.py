"""Checkpoints of block drafters, in every format they are published in: written by hand, as the formats say, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import VOCABULARY, build
from block_heads import random_block
from covering import in_turns
from pairs import BY_NAME
from safetensors.torch import load_file, save_file
from test_block import VARIANTS

from assisted.methods import DFlash, parse
from assisted.methods.dflash.formats import load_block, require_block, save_block
from assisted.methods.dflash.head import BlockHead
from assisted.methods.eagle.config import FULL, SLIDING
from assisted.methods.shared.registry import kind_of

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-6},
}
LAYERS = SIZES | {"model_type": "qwen3", "vocab_size": VOCABULARY, "rope_theta": 1e6}
DFLASH = {"mask_token_id": 5, "target_layer_ids": [0, 1]}
OF_DSPARK = {"markov_rank": 6, "markov_head_type": "gated"}
ZLAB = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "num_target_layers": 2,
    "dflash_config": DFLASH,
}
ZLAB_2 = LAYERS | {
    **{"architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": [SLIDING] * 2, "sliding_window": 9},
    "dflash_config": DFLASH
    | {"block_size": 5, "conv_group_size": 8, "conv_kernel_size": 2, "selector_rank": 6, "selector_top_k": 7}
    | {"output_multiplier": 0.5, "final_logit_softcapping": 20.0},
}
DEEPSPEC_DFLASH = LAYERS | DFLASH | {"architectures": ["Qwen3DFlashModel"], "block_size": 5, "num_anchors": 512}
DEEPSPEC = DEEPSPEC_DFLASH | {
    **{"architectures": ["Qwen3DSparkModel"], "markov_rank": 6, "markov_head_type": "rnn"},
    **{"enable_confidence_head": True, "confidence_head_with_markov": True},
}
SPECFORGE = LAYERS | {
    **{"architectures": ["DSparkDraftModel"], "block_size": 5},
    "dflash_config": DFLASH | OF_DSPARK | {"projector_type": "dspark"},
}
SPECULATORS = {
    **{"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 5, "mask_token_id": 5},
    **{"speculators_config": {"algorithm": "dflash"}, "aux_hidden_state_layer_ids": [1, 2]},
    **{"draft_vocab_size": VOCABULARY, "transformer_layer_config": LAYERS},
}
MUSE = SIZES | {
    **{"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 5},
    **{"mask_token_id": 5, "target_layer_ids": [0, 1], "sliding_window": 8},
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
}
EQUAL = {"mask_token_id": 5, "rope": {"rope_type": "default", "rope_theta": 1e6}, "max_position_embeddings": 256}
WINDOW = {"layer_types": (SLIDING, SLIDING), "sliding_window": 9}
VLLM = {"last_normed": False}
DSPARK = {"markov_rank": 6, "next_token": True}

CONV = {"conv_size": 2, "conv_group_size": 8, "selector_rank": 6}
DFLASH_2 = WINDOW | CONV | {"selector_top_k": 7, "logit_scale": 0.5, "logit_cap": 20.0}


def inner(**fields: Any) -> dict[str, Any]:
    return ZLAB | {"dflash_config": DFLASH | fields}


MODELOPT = inner(projector_type="dspark", shift_label=True, use_confidence_head=True, **OF_DSPARK)
MODELOPT_DSPARK = DSPARK | {"markov": "gated", "confidence": True, "confidence_markov": True}

NEMOTRON = inner(attention_sink_bias=True, causal=True, use_swa=True, swa_window_size=9, sample_from_anchor=False) | {
    **{
        "architectures": ["Qwen3DSparkModel"],
        "pard_token": 5,
        "dflash_query_causal": True,
        "attention_sink_bias": True,
    },
    **{"layer_types": [SLIDING] * 2, "sliding_window": 9, "dspark_markov_rank": 6, "draft_vocab_size": None},
    "eagle_aux_hidden_state_layer_ids": [1, 2],
}
NEMOTRON_DSPARK = WINDOW | {
    **{"markov": "vanilla", "markov_rank": 6, "sinks": True, "causal": True, "sliding_causal": True},
    "last_normed": False,
}

FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z-lab": (ZLAB, {}),
    "z-lab, next token": (ZLAB | {"sample_from_anchor": True}, {"next_token": True}),
    "z-lab, sliding": (ZLAB | {"layer_types": [SLIDING] * 2, "sliding_window": 9}, WINDOW | {"sliding_causal": True}),
    "z-lab, sliding, both directions": (
        ZLAB | {"layer_types": [SLIDING] * 2, "sliding_window": 9, "is_causal": False},
        WINDOW,
    ),
    "z-lab, causal": (inner(causal=True), {"causal": True}),
    "z-lab, DFlash2": (ZLAB_2, DFLASH_2),
    "DeepSpec": (DEEPSPEC, DSPARK | {"markov": "rnn", "confidence": True, "confidence_markov": True}),
    "DeepSpec, DFlash": (DEEPSPEC_DFLASH, {"next_token": True}),
    # the labels of specforge 0.2.0, OnlineDSparkModel, begin with the token after the anchor: run on 2026-11-29
    "SpecForge": (SPECFORGE, DSPARK | {"markov": "gated"}),
    "speculators, DFlash": (SPECULATORS, VLLM),
    "speculators, DSpark": (
        SPECULATORS | {"speculators_model_type": "dspark", "markov_rank": 6, "markov_head_type": "vanilla"},
        DSPARK | VLLM | {"markov": "vanilla"},
    ),
    "speculators, DFlash2": (
        SPECULATORS
        | {"speculators_model_type": "dflash2", "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6},
        VLLM | CONV,
    ),
    "speculators, reduced": (
        SPECULATORS | {"draft_vocab_size": 40, "sample_from_anchor": True},
        VLLM | {"next_token": True, "draft_vocab_size": 40, "own_output": True},
    ),
    "speculators, causal window": (
        SPECULATORS
        | {"transformer_layer_config": LAYERS | {"layer_types": [SLIDING, FULL], "sliding_window": 9}}
        | {"sliding_window_non_causal": False},
        VLLM | {"layer_types": (SLIDING, FULL), "sliding_window": 9, "sliding_causal": True},
    ),
    # SGLang's parse_dflash_draft_config takes both names for it (sgl-project/sglang, 2026-09)
    "z-lab, query zero": (inner(query_zero_predicts_next=True), {"next_token": True}),
    # NVIDIA/Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py, 2026-08-21
    "ModelOpt, DSpark": (MODELOPT, MODELOPT_DSPARK),
    "ModelOpt, sliding": (
        inner(use_swa=True, swa_window_size=9, causal=False) | {"layer_types": [FULL] * 2, "sliding_window": 9},
        WINDOW,
    ),
    # nvidia-modelopt 0.47.0 wrote such files on 2026-11-29, with dflash_attention_sink
    "ModelOpt, sinks": (inner(attention_sink_bias=True, causal=False) | {"attention_sink_bias": True}, {"sinks": True}),
    # the drafters of Nemotron 3.5, as ggml-org/llama.cpp pull 27804 and NVIDIA/Model-Optimizer pull 2149 have them, 2026-08
    "Nemotron 3.5, DSpark": (NEMOTRON, NEMOTRON_DSPARK),
    # turboderp-org/exllamav3 issue 390, 2026-09-21
    "DFlash2, older trainer": (ZLAB_2, DFLASH_2),
    "transformers": (MUSE, WINDOW | {"rope": {"rope_type": "default", "rope_theta": 500000.0}}),
}
"""By producer: config.json, and how it differs from a DFlash drafter of fill-in rows that reads the hidden states 1 and 2."""


@pytest.fixture(scope="module")
def target() -> Any:
    return build(BY_NAME["llama"])


def stored(name: str, target: Any, folder: Path) -> BlockHead:
    """Write a checkpoint as this producer does, and return what it is to be read as."""
    fields, differs = FORMATS[name]
    head = random_block(target, **(EQUAL | {"taps": (1, 2)} | differs))
    tensors = {own: tensor.clone() for own, tensor in head.state_dict().items()}
    if head.d2t is not None:
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, head.draft_tokens, True)
    if name == "transformers":
        tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
        tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    if name == "ModelOpt, DSpark":
        for own in [own for own in tensors if own.startswith(("markov_head.", "confidence_head."))]:
            other = own.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj")
            tensors[other] = tensors.pop(own)
    if name == "DFlash2, older trainer":
        for own in [own for own in tensors if own.endswith("codebook")]:
            tensors[f"{own}.weight"] = tensors.pop(own)
    if name.startswith("DeepSpec"):  # frozen copies
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    if name == "speculators, DSpark":
        tensors["verifier_norm.weight"] = torch.ones(32)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return head


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name, target, tmp_path):
    head = stored(name, target, tmp_path)
    found = load_block(tmp_path, target)
    assert found.config == head.config
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(found.state_dict()[own], tensor) for own, tensor in head.state_dict().items())
    assert kind_of(tmp_path) == "dflash"
    assert parse(str(tmp_path)) == DFlash(str(tmp_path))


@pytest.mark.parametrize(("variant", "dtype"), in_turns(list(VARIANTS), [torch.float32, torch.bfloat16]))
def test_what_is_written_is_read_back(variant, dtype, target, tmp_path):
    head = random_block(target, **VARIANTS[variant]).to(dtype)
    save_block(head, tmp_path, target)
    found = load_block(tmp_path, target)
    assert found.config == head.config
    assert found.dtype == dtype
    assert all(torch.equal(found.state_dict()[own], tensor) for own, tensor in head.state_dict().items())
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["sample_from_anchor"] is head.config.next_token
    assert fields["sliding_window_non_causal"] is not head.config.sliding_causal


def test_own_embeddings_that_differ_are_kept(target, tmp_path):
    stored("DeepSpec", target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_block(tmp_path, target)
    assert found.config.own_output and not found.config.own_embedding
    states = torch.randn(2, 32)
    assert torch.equal(found.logits(states), states @ tensors["lm_head.weight"].T)


def test_a_drafter_of_one_layer_is_no_eagle_head(target, tmp_path):
    head = random_block(target, num_hidden_layers=1, mask_token_id=5, taps=(1, 2))
    (tmp_path / "config.json").write_text(json.dumps(ZLAB | {"num_hidden_layers": 1, "draft_vocab_size": VOCABULARY}))
    save_file(dict(head.state_dict()), tmp_path / "model.safetensors")
    assert kind_of(tmp_path) == "dflash"
    assert load_block(tmp_path, target).config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("fc.weight", None, "lacks tensor fc.weight"),
        ("norm.weight", torch.ones(31), r"norm.weight of shape \[31\]; expected \[32\]"),
        ("fc.weight", torch.ones(32, 63), "63 numbers, which are not those of 2 layers"),
        ("fc.weight", torch.ones(32, 62), "hidden states of width 31; the target's have 32"),
        ("mtp.0.fc.weight", torch.ones(2), "DeepSeek-V4-Flash"),
    ],
    ids=str,
)
def test_tensors_are_checked_by_name(name, tensor, said, target, tmp_path):
    stored("z-lab", target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: tensor}
    save_file({own: one for own, one in tensors.items() if one is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"^draft: .*({said})"):
        load_block(tmp_path, target)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (inner(projector_type="domino"), "is a Domino drafter, which cannot be read"),
        (ZLAB | {"architectures": ["JetSpecDraftModel"]}, "is a JetSpec drafter"),
        (ZLAB | {"architectures": ["XPressDraftModel"]}, "is a XPress drafter"),
        (ZLAB | {"architectures": ["DFlashLagunaForCausalLM"]}, "is a Laguna drafter"),
        (ZLAB | {"dspark_block_size": 7}, "DSpark drafter of DeepSeek-V4-Flash"),
        (inner(mask_token_id=None), "mask_token_id is missing"),
        (inner(mask_token_id=VOCABULARY), "the target has no embedding of token 96"),
        (inner(target_layer_ids=None), "target_layer_ids is None, but it has to list"),
        (inner(target_layer_ids=[-1, 1]), r"reads the hidden states \(0, 2\); those of the target are 1 .. 2"),
        (inner(target_layer_ids=[0, 2]), r"reads the hidden states \(1, 3\)"),
        (ZLAB | {"vocab_size": 90}, "a vocabulary of 90; the target's has 96"),
        (ZLAB | {"hidden_size": 64}, r"fc.weight of shape \[32, 64\]; expected \[64, 64\]"),
        (inner(query_zero_predicts_next=True, sample_from_anchor=False), "query_zero_predicts_next: False and True"),
        (ZLAB | {"block_size": 1}, "block_size: a block of 1 drafts nothing"),
        (ZLAB | {"dflash_config": 3}, "dflash_config: 3 is not an object"),
        (ZLAB | {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        (ZLAB | {"layer_types": [SLIDING] * 2}, "sliding_window: None is not a number of positions"),
        (DEEPSPEC | {"block_size": None}, "block_size is missing"),
    ],
)
def test_configs_are_checked(fields, said, target, tmp_path):
    stored("z-lab", target, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for read in (load_block, require_block):
        with pytest.raises(ValueError, match=said):
            read(tmp_path, target)
    assert kind_of(tmp_path) == "dflash"


def test_a_whole_vocabulary_may_have_maps(target, tmp_path):
    stored("z-lab", target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    maps = {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64), "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}
    save_file(tensors | maps, tmp_path / "model.safetensors")
    assert load_block(tmp_path, target).d2t is None
    save_file(tensors | maps | {"d2t": maps["d2t"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t: its ids are not 96 different tokens"):
        load_block(tmp_path, target)
