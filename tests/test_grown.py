"""Grown targets: the small model's logits, text and acceptance in a larger shape."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build, random_ids
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.lab import grown
from assisted.lab.grown import SHAPES, Shape, grow
from tools.grown import load_target
from tools.grown import main as write_grown

WIDE = Shape(96, 160, 5, 12, 4)
ROUNDING = 1e-4  # float32 sums in another order, on logits of about 3


def small(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    model = build(BY_NAME["llama"], seed, **overrides)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # as after training: no norm weight is 1, no bias 0
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            assert "bias" not in name or parameter.abs().max() > 0
    return model


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        ({}, WIDE),
        ({"tie_word_embeddings": True}, WIDE),
        ({"attention_bias": True, "mlp_bias": True}, WIDE),
        ({"num_key_value_heads": 4}, WIDE),  # groups of 1 in groups of 3
        ({"num_key_value_heads": 1}, WIDE),  # a group of 4 in two of 3
        ({"num_key_value_heads": 1}, Shape(64, 48, 2, 8, 8)),  # in four of 1
        ({"num_key_value_heads": 2}, Shape(40, 64, 3, 5, 5)),  # in groups of 1, with a head to spare
        ({"rms_norm_eps": 0.1}, WIDE),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}, WIDE),
        ({}, Shape(32, 48, 2, 4, 2)),  # its own
    ],
)
def test_logits_are_the_same(overrides: dict[str, Any], shape: Shape) -> None:
    model = small(**overrides)
    large = grow(model, shape)
    ids = random_ids(model, 2, 20, seed=3)
    with torch.no_grad():
        expected, found = model(ids).logits, large(ids).logits
    assert (found - expected).abs().max() < ROUNDING
    assert large.config.num_hidden_layers == shape.layers == len(large.model.layers)
    assert large.model.layers[0].self_attn.q_proj.weight.shape == (shape.heads * 8, shape.hidden_size)
    assert large.config.num_key_value_heads == shape.kv_heads


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 4))
def test_query_heads_stay_with_their_keys(keys: int, group: int, large_group: int, spare: int) -> None:
    large_keys = keys * -(-group // large_group) + spare
    config = SimpleNamespace(num_attention_heads=keys * group, num_key_value_heads=keys, head_dim=1)
    shape = Shape(large_keys * large_group, 1, 1, large_keys * large_group, large_keys)
    (to, queries), (key_to, key_of) = grown.head_rows(config, shape)
    assert sorted(queries.tolist()) == list(range(keys * group))
    assert len(set(to.tolist())) == len(to)
    assert len(set(key_to.tolist())) == len(key_to) <= large_keys
    of = dict(zip(key_to.tolist(), key_of.tolist(), strict=True))
    for large, small_head in zip(to.tolist(), queries.tolist(), strict=True):
        assert of[large // large_group] == small_head // group


def test_added_weights_are_ordinary_numbers() -> None:
    model = small(attention_bias=True)
    large = grow(model, WIDE)
    for name, weight in large.named_parameters():
        assert weight.isfinite().all()
        if not any(part in name for part in ("o_proj", "down_proj", "embed_tokens")):  # these must write zeros
            assert (weight != 0).all(), name
    first, added = large.model.layers[0].self_attn.k_proj.weight, large.model.layers[1].self_attn.k_proj.weight
    own = model.model.layers[0].self_attn.k_proj.weight
    assert torch.equal(first[:16, :32], own)
    assert 0.8 < added.std() / own.std() < 1.25
    assert not torch.equal(first[:16, 32:64], added[:16, 32:64])


def test_bfloat16_is_as_near_as_the_small_model_in_bfloat16() -> None:
    model = small()
    large = grow(model, WIDE, dtype=torch.bfloat16)
    ids = random_ids(model, 4, 20, seed=6)
    with torch.no_grad():
        exact = model(ids).logits
        apart = (large(ids).logits.float() - exact).std()
        own = (model.to(torch.bfloat16)(ids).logits.float() - exact).std()
    assert large.dtype == torch.bfloat16
    assert apart < 2 * own


def test_the_seed_says_what_is_drawn() -> None:
    model = small()
    one, same, other = (grow(model, WIDE, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.layers.1.mlp.up_proj.weight"], other["model.layers.1.mlp.up_proj.weight"])


def test_the_small_model_is_not_changed() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    grow(model, WIDE)
    assert model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("name", "millions"), [("0.25b", 250), ("1b", 1000), ("8b", 8000)])
def test_presets_have_about_the_parameters_of_their_name(name: str, millions: int) -> None:
    shape = SHAPES[name]
    head, mlp = 64, 3 * shape.hidden_size * shape.intermediate_size
    attention = 2 * shape.hidden_size * head * (shape.heads + shape.kv_heads)
    layer = attention + mlp + 2 * shape.hidden_size
    parameters = shape.layers * layer + 4096 * shape.hidden_size
    assert abs(parameters / 1e6 - millions) < 0.13 * millions  # a real vocabulary is missing
    assert grown.parse(str(shape)) == shape


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("2b", "size: '2b' is not known"),
        ("64x64x2", "size: '64x64x2' is not known"),
        ("64x64x2x5x5", "hidden_size: 64 cannot be divided by 5"),
        ("64x64x2x8x3", "heads: 8 cannot be divided by 3"),
        ("64x64x0x8x4", "layers: 0 is no size"),
        ("24x64x2x4x2", "hidden_size: 24 is too small for this model; give 32 or more"),
        ("64x64x1x8x4", "layers: 1 is too small"),
        ("64x64x2x2x2", "kv_heads: 2 is too small for this model; give 4 or more"),
    ],
)
def test_what_cannot_be_is_refused(shape: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow(small(), shape)


def test_only_llamas_grow() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be grown"):
        grow(build(BY_NAME["gpt2"]), WIDE)


def test_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", Shape(256, 640, 17, 4, 2))
    write_grown(["zoo:target", "--size", "tiny", "--out", str(tmp_path), "--dtype", "bfloat16", "--json"])
    printed = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert printed["parameters"] == model.num_parameters()
    assert "for measuring" in (tmp_path / "README.md").read_text()
    assert model.config.assisted_grown == {"from": "target", "size": "tiny", "seed": 0}
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    in_memory, _ = load_target("grown:tiny", torch.bfloat16)
    assert all(torch.equal(value, in_memory.state_dict()[name]) for name, value in model.state_dict().items())


def test_targets_by_name() -> None:
    small, _ = load_target("zoo:target", torch.float32)
    assert small.config.num_hidden_layers == 16
    large, tokenizer = load_target("grown:256x640x17x4x2", torch.float32)
    assert large.config.num_hidden_layers == 17
    ids = tokenizer("def mean(values):\n", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.allclose(large(ids).logits, small(ids).logits, atol=1e-3)
    with pytest.raises(ValueError, match="size: 'huge' is not known"):
        load_target("grown:huge")


@pytest.mark.slow
def test_the_shipped_pair_grown() -> None:
    """Greedy text and acceptance at a quarter of a billion parameters."""
    model, tokenizer = load_target("zoo:target", torch.float32)
    large, _ = load_target("grown:0.25b", torch.float32)
    ids = tokenizer("def mean(values):\n    total = 0\n", return_tensors="pt").input_ids
    call = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    reports = []
    for target in (model, large):
        pair = AssistedModelForCausalLM.from_models(target, draft="zoo:draft", draft_length=4, tokenizer=tokenizer)
        assert torch.equal(pair.generate(ids, **call), model.generate(ids, **call))
        reports.append(pair.report)
    assert reports[0].acceptance_by_position == reports[1].acceptance_by_position
    assert abs(large.num_parameters() / 1e6 - 252) < 1
