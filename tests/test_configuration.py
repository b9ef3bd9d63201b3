"""AssistedConfig: it survives config.json, and answers as the target's configuration where it has nothing of its own."""

import copy
import json
import pickle

import pytest
import torch
from architectures import ARCHITECTURES, WINDOW
from transformers import AutoConfig, LlamaConfig

from assisted import AssistedConfig, AssistedModelForCausalLM, lengths

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
DRAFT = {"method": "draft-model", "quantization": "nf4"}
LENGTH = {"policy": "fixed", "tokens": 3}

by_target = pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "deepseek_v3"])


def config_of(name, **kwargs):
    return AssistedConfig(target=BY_NAME[name].make(), draft=DRAFT, draft_length=LENGTH, **kwargs)


def check_same(config, other):
    assert isinstance(other, AssistedConfig)
    assert type(other.target) is type(config.target)
    assert other.target.to_dict() == config.target.to_dict()
    assert (other.draft, other.draft_length) == (config.draft, config.draft_length)
    assert other.dtype == config.dtype
    assert other.architectures == config.architectures


@by_target
def test_config_json_and_back(name, tmp_path):
    config = config_of(name, architectures=["AssistedModelForCausalLM"], dtype=torch.bfloat16)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "assisted"
    assert written["target"]["model_type"] == config.target.model_type
    check_same(config, AssistedConfig.from_pretrained(tmp_path))
    check_same(config, AutoConfig.from_pretrained(tmp_path))


@by_target
def test_dict_and_copies(name):
    config = config_of(name)
    check_same(config, AssistedConfig.from_dict(config.to_dict()))
    check_same(config, copy.deepcopy(config))
    check_same(config, pickle.loads(pickle.dumps(config)))
    json.dumps(config.to_dict())


def test_the_dict_form_of_a_target():
    target = BY_NAME["gemma3"].make()
    fields = target.to_dict()
    before = copy.deepcopy(fields)
    config = AssistedConfig(target=fields)
    assert type(config.target) is type(target)
    assert config.target.to_dict() == target.to_dict()
    assert fields == before


@by_target
def test_what_it_lacks_is_the_targets(name):
    config = config_of(name)
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id"):
        assert getattr(config, field) == getattr(config.target, field)


def test_layer_types_and_windows_are_the_targets():
    config = config_of("gemma3")
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == WINDOW
    assert config.get_text_config(decoder=True) is config.target.get_text_config(decoder=True)


@pytest.mark.parametrize("config", [config_of("llama"), AssistedConfig()], ids=["with", "without a target"])
@pytest.mark.parametrize("field", ["no_such_field", "_private"])
def test_what_nobody_has_is_missing(config, field):
    assert not hasattr(config, field)
    with pytest.raises(AttributeError, match=f"AssistedConfig has no attribute '{field}'"):
        getattr(config, field)


def test_private_attributes_are_not_the_targets():
    target = LlamaConfig()
    target._somebodys = 1
    assert not hasattr(AssistedConfig(target=target), "_somebodys")


def test_a_field_of_its_own_wins():
    config = AssistedConfig(target=LlamaConfig(architectures=["LlamaForCausalLM"]), architectures=["Mine"])
    assert config.architectures == ["Mine"]
    assert config.model_type == "assisted"


def test_without_a_target():
    """transformers makes an empty one to see what differs from the defaults."""
    config = AssistedConfig()
    assert config.get_text_config() is config
    assert AssistedConfig.from_dict(config.to_dict()).target is None
    assert "assisted" in repr(config)


def test_the_targets_config_stays_as_it_was(tmp_path):
    target = BY_NAME["gemma3"].make()
    before = target.to_dict()
    config = AssistedConfig(target=target, dtype=torch.bfloat16)
    config.save_pretrained(tmp_path)
    str(config)
    config.to_dict()["target"]["vocab_size"] = 1
    assert config.target is target
    assert target.to_dict() == before


def test_no_path_of_this_machine_is_written(tmp_path):
    """Not where the target was read from, and not, for a pair that is read and saved again, where the pair was."""
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft")
    for folder in (tmp_path / "once", tmp_path / "again"):
        model.save_pretrained(folder)
        model = AssistedModelForCausalLM.from_pretrained(folder)
        for file in folder.rglob("*.json"):
            assert "_name_or_path" not in file.read_text(encoding="utf-8"), file
        assert model.config._name_or_path == str(folder / "target")


def test_the_policy_comes_back():
    config = AssistedConfig.from_dict(config_of("llama").to_dict())
    assert lengths.from_dict(config.draft_length) == lengths.Fixed(3)
