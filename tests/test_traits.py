"""What a model can do, in one record that follows its config and its forward."""

import gc
import weakref

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build
from transformers import AutoModelForCausalLM

from assisted.engine.agreement import ROUNDING, agree, apart
from assisted.engine.traits import Traits, require_rewindable

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def test_models_of_one_kind_share_a_record():
    one, other = build(ARCHITECTURES[0]), build(ARCHITECTURES[0])
    assert Traits.of(one) is Traits.of(one) is Traits.of(other)


def test_a_changed_config_is_another_record():
    model = build(BY_NAME["mistral"])
    before = Traits.of(model)
    model.config.sliding_window = 7
    model.config.max_position_embeddings = 99
    after = Traits.of(model)
    assert set(after.masks.windows.values()) == {7} and after.context == 99
    assert before.context != 99
    model.set_attn_implementation("eager")
    assert Traits.of(model).masks.additive and not after.masks.additive


def test_a_replaced_forward_is_another_record():
    model = build(ARCHITECTURES[0])
    assert Traits.of(model).takes_logits_to_keep
    own = model.forward

    def forward(input_ids=None, attention_mask=None, past_key_values=None, use_cache=None, return_dict=None):
        return own(input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values)

    model.forward = forward
    traits = Traits.of(model)
    assert not traits.takes_positions and not traits.takes_logits_to_keep and not traits.masks.trees


def test_no_model_is_kept():
    model = build(ARCHITECTURES[0])
    model.forward = model.forward  # an attribute of the object
    Traits.of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.states
@pytest.mark.parametrize("architecture", RECURRENT, ids=lambda architecture: architecture.name)
def test_recurrent_models_are_not_rewindable(architecture):
    model = AutoModelForCausalLM.from_config(architecture.make())
    traits = Traits.of(model)
    assert traits.is_recurrent and not traits.is_rewindable
    with pytest.raises(ValueError, match=r"draft: .* keeps "):
        require_rewindable(model, "draft")


def test_logits_that_differ_by_rounding_agree():
    expected = torch.randn(2, 3, 50)
    assert apart(expected, expected) == 0
    assert agree(expected + 1e-5 * torch.randn_like(expected), expected, torch.float32)
    assert not agree(expected + 1e-2 * torch.randn_like(expected), expected, torch.float32)
    assert agree(expected + 1e-2 * torch.randn_like(expected), expected, torch.bfloat16)
    assert apart(expected + 0.5, expected) == pytest.approx(0.5 / expected.std().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_number_that_is_none_never_agrees(dtype):
    expected = torch.randn(1, 3, 50)
    found = expected.clone()
    found[0, 0, 0] = float("nan")
    assert not agree(found, expected, dtype) and not agree(expected, found, dtype)
    assert agree(found, found.clone(), dtype)


def test_masked_tokens_are_equal():
    expected = torch.randn(1, 3, 50)
    expected[..., :5] = -float("inf")
    assert agree(expected.clone(), expected, torch.float32)
    assert agree(expected + 1e-6, expected, torch.float32)
    assert not agree(expected.nan_to_num(neginf=-1e4), expected, torch.float32)


def test_by_position_one_of_many_may_differ():
    expected = torch.randn(1, 5, 50)
    found = expected.clone()
    found[0, 0] += 3
    assert apart(found, expected) > 1 and apart(found, expected, by_position=True) == 0
