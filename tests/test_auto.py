"""`draft="auto"`: what is chosen, that it is said, that the pair stores the choice, and that nothing is downloaded."""

import json
import logging
import socket

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, random_ids
from eagle_heads import random_head
from huggingface_hub import constants
from pairs import CALL
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from assisted import AssistedModelForCausalLM, QuantizedSelf, Suffix
from assisted.methods import MTP, Combined, Eagle, auto
from assisted.methods.eagle.formats import save_eagle
from assisted.methods.mtp.head import MTPHead, first_tensors, save_mtp


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No network, and an empty cache of the Hub."""

    def refuse(*args):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "assisted")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "assisted"]


def small(folder=None, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, **fields)).eval()
    if folder is not None:
        model.save_pretrained(folder)
    return model


def test_a_small_target_without_heads_gets_its_text(said):
    model = AssistedModelForCausalLM.from_models(build(ARCHITECTURES[0]), draft="auto")
    assert isinstance(model.spec, Suffix)
    (line,) = said()
    assert line.startswith("draft='auto' chose 'suffix': ") and "does not gain from it" in line


def test_a_large_target_gets_a_copy_as_well_where_it_fits(monkeypatch, said):
    monkeypatch.setattr(auto, "LEAST", 1)
    model = AssistedModelForCausalLM.from_models(small(), draft="auto")
    assert model.spec.parts() == [Suffix(), QuantizedSelf("int8")]
    assert "a copy in 8 bits fits" in said()[-1]
    monkeypatch.setattr(auto, "free_memory", lambda: 1000)
    assert isinstance(AssistedModelForCausalLM.from_models(small(), draft="auto").spec, Suffix)
    assert "that are free" in said()[-1]


def with_its_head(target, folder):
    """A checkpoint of the target with the tensors of an MTP head in its file."""
    target.save_pretrained(folder / "target")
    save_mtp(MTPHead(target, first_tensors(target)), folder / "head")
    file = folder / "target" / "model.safetensors"
    save_file(load_file(file) | load_file(folder / "head" / "model.safetensors"), file, {"format": "pt"})
    return folder / "target"


def test_the_checkpoints_own_head_comes_first(tmp_path, said):
    target = build(next(architecture for architecture in RECURRENT if architecture.name == "qwen3_5"))
    model = AssistedModelForCausalLM.from_pretrained(with_its_head(target, tmp_path), draft="auto")
    assert model.spec == MTP()
    assert said() == ["draft='auto' chose 'mtp': the target's checkpoint has an MTP head"]
    ids = random_ids(target, 1, 9)
    assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
    assert model.report.drafted > 0


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (True, "announces 1 MTP layer (mtp_num_hidden_layers), but none of its files holds their tensors"),
        (False, "holds mtp.fc.weight_packed, of a quantization that cannot be read"),
    ],
)
def test_mtp_layers_that_are_passed_over_are_named(lost, why, tmp_path, said):
    folder = with_its_head(build(next(a for a in RECURRENT if a.name == "qwen3_5")), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight_packed"] = tensors.pop("mtp.fc.weight")
    kept = {name: tensor for name, tensor in tensors.items() if not lost or not name.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"mtp_num_hidden_layers": 1}))
    model = AssistedModelForCausalLM.from_pretrained(folder, draft="auto")
    assert isinstance(model.spec, Suffix)
    (line,) = said()
    assert line.startswith("draft='auto' chose 'suffix': ") and '"mtp" is passed over: ' in line and why in line


def test_tensors_that_are_no_head_of_this_family_are_not_taken(tmp_path):
    """Qwen3 has no MTP layers, so its head is stored in the layout of speculators."""
    model = AssistedModelForCausalLM.from_pretrained(with_its_head(small(), tmp_path), draft="auto")
    assert isinstance(model.spec, Suffix)


def test_the_shipped_target_gets_its_head_and_the_pair_stores_it(tmp_path, said):
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="auto")
    assert isinstance(model.spec, Eagle)
    assert said() == ["draft='auto' chose 'zoo:eagle3': it was trained for this target"]
    model.save_pretrained(tmp_path)
    again = AssistedModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again.spec, Eagle)
    ids = random_ids(model.target, 1, 9)
    assert again.generate(ids, **CALL).tolist() == model.target.generate(ids, **CALL).tolist()
    assert again.report.drafted > 0


def test_in_a_list_the_pair_stores_the_choice():
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=["suffix", "auto"])
    assert isinstance(model.spec, Combined)
    assert [type(part) for part in model.spec.parts()] == [Suffix, Eagle]


@pytest.mark.parametrize("named", [True, False])
def test_downloaded_heads_that_name_the_target_are_found(named, tmp_path, said):
    target = small(tmp_path / "target")
    snapshot = tmp_path / "hub" / "models--someone--head" / "snapshots" / ("0" * 40)
    refs = snapshot.parents[1] / "refs"
    for folder in (snapshot, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text("0" * 40)
    save_eagle(random_head(target, 3), snapshot, "speculators", target)
    config = snapshot / "config.json"
    fields = json.loads(config.read_text())
    fields["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target") if named else "someone/else"
    config.write_text(json.dumps(fields))
    model = AssistedModelForCausalLM.from_pretrained(tmp_path / "target", draft="auto")
    assert isinstance(model.spec, Eagle if named else Suffix)


def test_auto_takes_no_details():
    with pytest.raises(ValueError, match="auto:best"):
        AssistedModelForCausalLM.from_models(build(ARCHITECTURES[0]), draft="auto:best")
