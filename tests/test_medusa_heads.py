"""Medusa heads: what they compute, and every format they come in, written and read back tensor by tensor."""

import json

import pytest
import torch
from architectures import build
from medusa_heads import random_heads
from pairs import BY_NAME
from safetensors.torch import load_file, save_file
from torch import nn

from assisted.methods.medusa.head import MedusaHeads

H, V, HEADS, LAYERS = 6, 9, 3, 2
SILU = nn.functional.silu


def by_hand(heads, hidden, head, output):
    """One head as the paper writes it."""
    x = hidden
    for layer in range(heads.layers):
        x = x + SILU(nn.functional.linear(x, heads.weight[layer, head], heads.bias[layer, head]))
    return output(x) if heads.output is None else x @ heads.output[head].T


@pytest.mark.parametrize("own", [True, False])
def test_every_head_is_blocks_and_an_output(own):
    heads, output, hidden = random_heads(own_output=own), nn.Linear(H, V, bias=False), torch.randn(2, 5, H)
    logits = heads(hidden, output)
    assert logits.shape == (HEADS, 2, 5, V)
    for head in range(HEADS):
        assert torch.allclose(logits[head], by_hand(heads, hidden, head, output), atol=1e-5)
    assert torch.allclose(heads(hidden, output, 2), logits[:2], atol=1e-5)
    assert heads(hidden[0, 0], output, 99).shape == (HEADS, V)


def test_new_heads_say_what_the_target_says_and_can_learn():
    target = build(BY_NAME["llama"])
    hidden = target.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state
    plain = target.lm_head(hidden)
    for own in (True, False):
        heads = MedusaHeads.for_target(target, 2, own_output=own)
        logits = heads(hidden, target.lm_head)
        assert torch.allclose(logits, plain.expand(2, -1, -1, -1), atol=1e-5)
        logits.square().sum().backward(inputs=list(heads.parameters()))
        assert all(weight.grad.abs().sum() > 0 for weight in heads.parameters())
        assert torch.equal(target.lm_head.weight, build(BY_NAME["llama"]).lm_head.weight)


def public(heads, own=True):
    """The state dict of the authors' modules."""
    found = {}
    for h in range(HEADS):
        for layer in range(LAYERS):
            found[f"{h}.{layer}.linear.weight"] = heads.weight[layer, h].detach().clone()
            found[f"{h}.{layer}.linear.bias"] = heads.bias[layer, h].detach().clone()
        if own:
            found[f"{h}.{LAYERS}.weight"] = heads.output[h].detach().clone()
    return found


def vllm(heads):
    found = {}
    for h in range(HEADS):
        for layer in range(LAYERS):
            found[f"blocks.{h}.layers.{layer}.weight"] = heads.weight[layer, h].detach().clone()
            found[f"blocks.{h}.layers.{layer}.bias"] = heads.bias[layer, h].detach().clone()
        found[f"lm_heads.{h}.weight"] = heads.output[h].detach().clone()
    return found


def put(folder, tensors, file, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (torch.save if file.endswith(".pt") else save_file)(tensors, folder / file)
    return folder


def assert_same(read, heads):
    assert (read.heads, read.layers, read.hidden_size) == (heads.heads, heads.layers, heads.hidden_size)
    ours, theirs = read.state_dict(), heads.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)


def test_the_first_versions_pickled_file(tmp_path):
    heads = random_heads()
    folder = put(tmp_path / "a", public(heads), "medusa_lm_head.pt", medusa_num_heads=5, medusa_num_layers=1)
    assert_same(MedusaHeads.load(folder), heads)  # the tensors are counted: this config is wrong twice
    heads.save(tmp_path / "b", "medusa-pt")
    written = torch.load(tmp_path / "b" / "medusa_lm_head.pt", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in public(heads).items()
    }
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["medusa_num_heads"] == HEADS
    assert config["medusa_num_layers"] == LAYERS
    assert "version" not in config
    assert_same(MedusaHeads.load(tmp_path / "b"), heads)


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_that_is_more_than_tensors_is_not_run(tmp_path, capsys):
    folder = put(tmp_path / "a", {"0.0.linear.weight": Evil()}, "medusa_lm_head.pt")
    with pytest.raises(Exception, match="eights"):
        MedusaHeads.load(folder)
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize("own", [True, False])
def test_version_2(tmp_path, own):
    heads = random_heads(own_output=own)
    folder = put(tmp_path / "a", public(heads, own), "medusa_lm_head.safetensors", medusa_num_heads=1, version="2")
    assert_same(MedusaHeads.load(folder), heads)
    heads.half().save(tmp_path / "b")
    written = load_file(tmp_path / "b" / "medusa_lm_head.safetensors")
    assert written.keys() == public(heads, own).keys()
    assert ("version" in json.loads((tmp_path / "b" / "config.json").read_text())) != own
    assert_same(MedusaHeads.load(tmp_path / "b"), heads)


def test_vllm(tmp_path):
    heads = random_heads()
    folder = put(tmp_path / "a", vllm(heads), "model.safetensors", model_type="medusa", num_heads=7)
    assert_same(MedusaHeads.load(folder), heads)
    heads.save(tmp_path / "b", "vllm")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == vllm(heads).keys()
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    expected = {
        "model_type": "medusa",
        "num_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": V,
        "original_lm_head": False,
        "medusa_fc_bias": True,
    }
    assert {name: config[name] for name in expected} == expected
    assert_same(MedusaHeads.load(tmp_path / "b"), heads)


def test_vllm_with_few_tokens_no_bias_and_one_output_for_all(tmp_path):
    target = build(BY_NAME["llama"])  # 96 tokens
    token_map = torch.tensor([3, 5, 90])
    heads = random_heads(32, 3, bias=False, shared_output=True, token_map=token_map)
    with pytest.raises(ValueError, match="target"):
        heads.save(tmp_path, "vllm")
    heads.save(tmp_path, "vllm", target)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (96, 3)
    assert config["original_lm_head"]
    assert not config["medusa_fc_bias"]
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {name for name in names if not name.startswith("blocks")} == {"lm_heads.0.weight", "token_map"}
    read = MedusaHeads.load(tmp_path, target)
    assert_same(read, heads)
    logits = read(torch.randn(4, 32), target.lm_head)
    assert logits.shape == (HEADS, 4, 3)
    assert read.tokens(torch.tensor([[2, 0]])).tolist() == [[90, 3]]
    for format in ("medusa", "medusa-pt"):
        with pytest.raises(ValueError, match="vllm"):
            heads.save(tmp_path / "c", format)


def test_outputs_may_keep_rows_that_the_token_map_leaves_out(tmp_path):
    target = build(BY_NAME["llama"])
    whole = random_heads(32, 96)
    folder = put(tmp_path, vllm(whole) | {"token_map": torch.tensor([4, 7])}, "model.safetensors", model_type="medusa")
    read = MedusaHeads.load(folder, target)
    assert torch.equal(read.output, whole.output[:, [4, 7]])


@pytest.mark.parametrize("format", ["vllm", "medusa-pt"])
def test_heads_that_use_the_targets_output_take_it_along_where_a_format_has_no_other_way(tmp_path, format):
    target = build(BY_NAME["llama"])
    heads = random_heads(32, 96, own_output=False)
    with pytest.raises(ValueError, match="target"):
        heads.save(tmp_path, format)
    heads.save(tmp_path, format, target)
    assert heads.output is None
    hidden = torch.randn(4, 32)
    read = MedusaHeads.load(tmp_path, target)
    assert torch.allclose(read(hidden, nn.Identity()), heads(hidden, target.lm_head), atol=1e-4)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    target = build(BY_NAME["llama"])
    good = public(random_heads(32, 96))

    def load(tensors):
        return MedusaHeads.load(put(tmp_path, tensors, "medusa_lm_head.safetensors", medusa_num_heads=HEADS), target)

    assert load(good).heads == HEADS
    for name in ("1.0.linear.bias", "0.0.linear.weight", "2.2.weight", "0.1.linear.weight"):
        with pytest.raises(ValueError, match=rf"lacks tensor {name}"):
            load({key: tensor for key, tensor in good.items() if key != name})
    with pytest.raises(ValueError, match=r"unknown tensor 0\.2\.bias"):
        load(good | {"0.2.bias": torch.zeros(96)})
    with pytest.raises(ValueError, match=r"1\.2\.weight of shape \[95, 32\].*\[96, 32\]"):
        load(good | {"1.2.weight": torch.zeros(95, 32)})
    with pytest.raises(ValueError, match=r"0\.0\.linear\.weight of shape \[6, 6\].*\[32, 32\]"):
        load(public(random_heads()))
    with pytest.raises(ValueError, match="lacks tensor"):
        load({})
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"medusa_lm_head\.safetensors"):
        MedusaHeads.load(tmp_path, target)


def test_a_path_may_be_a_hub_id(tmp_path, monkeypatch):
    heads = random_heads()
    heads.save(tmp_path)
    asked = {}

    def download(path, **kwargs):
        asked[path] = kwargs
        return str(tmp_path)

    monkeypatch.setattr("assisted.methods.shared.files.snapshot_download", download)
    read = MedusaHeads.load("someone/heads", revision="x", dtype=torch.float16, trust_remote_code=True)
    assert asked == {"someone/heads": {"revision": "x"}}
    assert_same(read, heads)
