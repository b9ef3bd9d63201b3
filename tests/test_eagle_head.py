"""The EAGLE head as a module: whole sequences at once, token by token, and the steps that it is trained over."""

from __future__ import annotations

import pytest
import torch
from architectures import random_ids
from eagle_heads import features_of, random_head
from pairs import ROUNDING, pair
from transformers import DynamicCache

from assisted.methods.eagle.config import default_taps
from assisted.methods.eagle.head import windowed
from assisted.methods.shared.training.masks import unrolled_mask

SHAPES = [
    {"version": 1},
    {"version": 1, "layer": "qwen3", "num_hidden_layers": 2, "fc_bias": False},
    {"version": 3},
    {"version": 3, "draft_vocab_size": 40, "own_embedding": True, "taps": (1, 2)},
    {"version": 3, "layer": "qwen3", "num_hidden_layers": 2, "norm_before_residual": True, "fc_norm": True},
    {"version": 3, "norm_before_fc": True, "norm_output": True, "qkv_bias": True},
]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: ", ".join(f"{k}={v}" for k, v in shape.items()))
def head(request):
    return random_head(pair()[0], **request.param)


@pytest.fixture(scope="module")
def given(head):
    """The target, embeddings of token i + 1 and what the head makes of feature i, for two rows of 9 columns."""
    target = pair()[0]
    ids = random_ids(target, 2, 10)
    with torch.no_grad():
        return target, head.embed(ids[:, 1:], target), head.fuse(features_of(target, head, ids)[:, :-1])


@torch.no_grad()
def test_attention_reads_the_embedding_before_the_state():
    """The first half of its inputs, as in EAGLE-3's code (2503.01840): where those weights are 0, embeddings change nothing."""
    target = pair()[0]
    head = random_head(target, 3)
    attention, half = head.layers[0].self_attn, head.config.hidden_size
    states, *embeddings = torch.randn(3, 1, 5, half)
    assert not torch.equal(*(head(one, states) for one in embeddings))
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).weight[:, :half] = 0
    assert torch.equal(*(head(one, states) for one in embeddings))


@torch.no_grad()
def test_a_sliding_window_is_a_mask_of_the_last_positions():
    """As speculators/models/eagle3/attention.py (2026-08-20) has it: a key is seen if it is later than `query - window`."""
    target = pair()[0]
    full = random_head(target, num_hidden_layers=2)
    kinds = ("sliding_attention", "full_attention")
    head = random_head(target, num_hidden_layers=2, layer_types=kinds, sliding_window=3)
    ids, places = random_ids(target, 1, 10), torch.arange(9)
    states, embeddings = full.fuse(features_of(target, full, ids)[:, :-1]), full.embed(ids[:, 1:], target)
    causal = places <= places[:, None]
    near = (causal & (places > places[:, None] - 3))[None, None]
    kwargs = {"position_embeddings": full.rotary_emb(states, places[None])}
    first = full.layers[0](embeddings, states, attention_mask=near, **kwargs)
    expected = full.layers[1](first, attention_mask=causal[None, None], **kwargs)
    assert torch.allclose(head(embeddings, states), expected, atol=1e-6)
    assert not torch.allclose(full(embeddings, states), expected, atol=1e-3)
    # a tree: nodes 4 and 5 continue nodes 2 and 3, which continue text of two tokens
    tree = torch.tensor([[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1]]).bool()[None, None]
    assert windowed(tree, 2, 3, "cpu").long().tolist() == [[[[0, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]]]]


@torch.no_grad()
def test_training_steps_are_the_steps_of_a_draft(head, given):
    """Column i of step s is what a head says that read true features up to column i, and then s times its own states."""
    _, embeddings, first = given
    columns, steps = 9, 3
    cache, states, positions = DynamicCache(), first, torch.arange(columns)[None]
    trained = []
    for step in range(steps):
        read = embeddings.roll(-step, 1)
        states = head(read, states, positions + step, unrolled_mask(columns, step), cache)
        trained.append(states)
    for column in range(columns - steps):
        cache = DynamicCache()
        seen = torch.ones(column + 1, column + 1, dtype=torch.bool).tril()[None, None]
        known = slice(0, column + 1)
        state = head(embeddings[:, known], first[:, known], positions[:, known], seen, cache)[:, -1:]
        for step in range(steps):
            assert torch.allclose(state[:, 0], trained[step][:, column], atol=ROUNDING)
            place = column + step + 1
            seen = torch.ones(1, 1, 1, place + 1, dtype=torch.bool)
            state = head(embeddings[:, place : place + 1], state, torch.tensor([[place]]), seen, cache)


def test_the_parts_that_are_the_targets():
    target, _ = pair()
    one, three = random_head(target, 1), random_head(target, 3)
    ids = random_ids(target, 1, 4)
    assert torch.equal(one.embed(ids, target), target.get_input_embeddings()(ids))
    states = torch.randn(1, 4, 32)
    assert torch.equal(one.logits(states, target), target.get_output_embeddings()(states))
    assert torch.equal(one.fuse(states), states)
    with pytest.raises(ValueError, match="target"):
        one.logits(states)
    assert three.logits(states).shape == (1, 4, 96)
    names = [name for name, _ in one.named_parameters()]
    assert not any("embed" in name or "lm_head" in name for name in names)


def test_frequencies_are_not_rounded():
    head = random_head(pair()[0], 3)
    before = head.rotary_emb.inv_freq.clone()
    head.bfloat16()
    assert head.dtype == torch.bfloat16
    assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(head.rotary_emb.inv_freq, before)


def test_a_draft_vocabulary_is_set():
    head = random_head(pair()[0], 3, draft_vocab_size=3)
    head.draft_tokens = torch.tensor([4, 7, 90])
    assert head.draft_tokens.tolist() == [4, 7, 90]
    assert head.d2t.tolist() == [4, 6, 88]
    for wrong in ([4, 7], [7, 4, 90], [4, 4, 90]):
        with pytest.raises(ValueError, match="draft_tokens"):
            head.draft_tokens = torch.tensor(wrong)
    with pytest.raises(ValueError, match="draft_tokens"):
        random_head(pair()[0], 3).draft_tokens = torch.arange(96)


@pytest.mark.parametrize(
    ("layers", "taps"), [(32, (2, 16, 29)), (16, (2, 8, 13)), (6, (2, 3, 3)), (2, (1, 1, 2)), (1, (1, 1, 1))]
)
def test_default_taps(layers, taps):
    assert default_taps(layers) == taps


@pytest.mark.parametrize("normed", [False, True])
@torch.no_grad()
def test_the_residual_is_the_state_or_the_normed_state(normed):
    """A first layer whose attention and MLP add nothing returns its residual."""
    head = random_head(pair()[0], version=3, norm_before_residual=normed)
    layer = head.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    embeddings, states = torch.randn(2, 1, 4, head.config.hidden_size)
    expected = layer.hidden_norm(states) if normed else states
    assert torch.allclose(head(embeddings, states), expected, atol=1e-6)
    assert not torch.allclose(layer.hidden_norm(states), states, atol=1e-2)
