"""Files that others wrote: absurd sizes, folders that lead out, code that nobody named. Refused by name, and before anything is
allocated or run."""

import json
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build, half_right
from eagle_heads import random_head
from pairs import CALL, pair, prompt
from safetensors.torch import save_file
from transformers import dynamic_module_utils

from assisted import AssistedModelForCausalLM
from assisted import methods as drafters
from assisted.loading.files import inside, require_sound
from assisted.methods.eagle.formats import load_eagle, save_eagle
from assisted.methods.eagle.head import EagleHead
from assisted.methods.medusa.head import MedusaHeads

ABSURD = [4000, 10**18, 0, -1, "2", 1.5, float("nan"), float("inf"), True, [2], {}]
EAGLE_SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
EAGLE_SIZES += ["head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size"]


@pytest.fixture(scope="module")
def target():
    return build(ARCHITECTURES[0])


@pytest.fixture
def bounded(monkeypatch):
    """No storage above a megabyte, and no head made for real of sizes that no tensor has."""
    made = EagleHead.__init__

    def init(self, config):
        real = torch.empty(0).device.type != "meta"
        largest = max(config.hidden_size, config.intermediate_size, config.vocab_size, config.num_hidden_layers)
        assert not real or largest < 1000, "allocated"
        assert config.num_hidden_layers < 100, "built"
        made(self, config)

    monkeypatch.setattr(EagleHead, "__init__", init)
    tracemalloc.start()
    yield
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def changed(folder: Path, file: str, **fields):
    known = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(known | fields))
    return folder


@pytest.mark.parametrize("format", ["eagle-1", "eagle", "speculators"])
@pytest.mark.parametrize("name", EAGLE_SIZES)
def test_sizes_of_a_head_are_bounded_by_its_tensors(name, format, target, tmp_path, bounded):
    head = random_head(target, 1 if format == "eagle-1" else 3)
    save_eagle(head, tmp_path, "speculators" if format == "speculators" else "eagle", target)
    own = json.loads((tmp_path / "config.json").read_text())
    for value in ABSURD:
        fields = {name: value}
        if format == "speculators" and name not in ("draft_vocab_size", "target_hidden_size"):
            fields = {"transformer_layer_config": own["transformer_layer_config"] | fields}
        changed(tmp_path, "config.json", **(own | fields))
        with pytest.raises(ValueError, match=r"^draft: ") as caught:
            load_eagle(tmp_path, target)
        assert str(tmp_path) in str(caught.value)
        assert name in str(caught.value) or "vocabulary" in str(caught.value) or "shape" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": "bent"}),
        ("hidden_act", "bent"),
        ("hidden_act", 3),
        ("layer_types", 5),
        ("eagle_config", [1]),
        ("eagle_aux_hidden_state_layer_ids", "1"),
        ("eagle_aux_hidden_state_layer_ids", [1, "2", 3]),
        ("max_position_embeddings", 10**18),
    ],
)
def test_other_fields_of_a_head(name, value, target, tmp_path):
    save_eagle(random_head(target), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    if name.startswith("eagle_aux"):
        del fields["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {name: value}))
    with pytest.raises(ValueError, match=r"^draft: ") as caught:
        load_eagle(tmp_path, target)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["999999999999.0.linear.weight", "0.999999999999.linear.weight"])
def test_heads_that_only_a_name_counts_up_to(name, target, tmp_path):
    MedusaHeads.for_target(target, heads=2).save(tmp_path)
    tensors = {name: torch.zeros(32, 32), "0.0.linear.weight": torch.zeros(32, 32)}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"^draft: .*medusa_lm_head\.safetensors counts up to .* missing"):
        MedusaHeads.load(tmp_path, target)


@pytest.mark.parametrize(
    "token_map", [torch.tensor([-1, 2]), torch.tensor([5, 10**9]), torch.ones(2), torch.ones(0).long()]
)
def test_a_token_map_that_leads_nowhere(token_map, target, tmp_path):
    MedusaHeads.for_target(target, heads=2).save(tmp_path, "vllm", target)
    tensors = {f"blocks.{h}.layers.0.weight": torch.zeros(32, 32) for h in range(2)}
    tensors |= {"lm_heads.0.weight": torch.zeros(len(token_map), 32), "token_map": token_map}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"^draft: .*token_map"):
        MedusaHeads.load(tmp_path, target)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
def test_sizes_of_a_model_are_bounded_by_its_tensors(name, role, target, tmp_path):
    target.save_pretrained(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    for value in [10**9, 10**18, -1, 0, "2", 1.5]:
        changed(tmp_path, "config.json", **(own | {name: value}))
        with pytest.raises(ValueError, match=rf"^{role}: .*config\.json: {name}: "):
            if role == "target":
                AssistedModelForCausalLM.from_pretrained(tmp_path)
            else:
                AssistedModelForCausalLM.from_models(target, draft=str(tmp_path))


@pytest.mark.parametrize("name", ["../outside.safetensors", "ABSOLUTE"])
def test_shards_stay_inside(name, target, tmp_path):
    folder = tmp_path / "model"
    target.save_pretrained(folder)
    outside = (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    name = str(outside) if name == "ABSOLUTE" else name
    names = dict.fromkeys(target.state_dict(), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(ValueError, match=r"^target: .*weight_map: .* is outside the folder"):
        AssistedModelForCausalLM.from_pretrained(folder)


# --- a saved pair's folder


@pytest.fixture
def saved(tmp_path):
    pair()[1].save_pretrained(tmp_path / "pair")
    return tmp_path / "pair"


@pytest.mark.parametrize(
    "name", ["../outside", "..", ".", "", "draft/../../outside", "ABSOLUTE", "link", "self", 5, None]
)
@pytest.mark.parametrize("method", ["draft-model", "eagle", "medusa", "combined"])
def test_folders_stay_inside(name, method, saved):
    outside = saved.parent / "outside"
    (saved / "draft").rename(outside)
    (saved / "link").symlink_to(outside, target_is_directory=True)
    (saved / "self").symlink_to(saved, target_is_directory=True)
    name = str(outside) if name == "ABSOLUTE" else name
    draft = {"method": method, "folder" if method == "draft-model" else "path": name}
    if method == "combined":
        draft = {"method": method, "drafters": [{"method": "suffix"}, {"method": "draft-model", "folder": name}]}
    changed(saved, "config.json", draft=draft)
    with pytest.raises(ValueError, match=r"draft\.(folder|path): .* leads out of the saved pair's folder"):
        AssistedModelForCausalLM.from_pretrained(saved)


def test_a_target_that_leads_out(saved):
    (saved / "target").rename(saved.parent / "outside")
    (saved / "target").symlink_to(saved.parent / "outside", target_is_directory=True)
    with pytest.raises(ValueError, match=r"^target: .*leads out"):
        AssistedModelForCausalLM.from_pretrained(saved)


def test_a_snapshot_of_the_hub_is_read(saved):
    """Its files are links out of the folder, into ../../blobs; its folders are folders. The snapshot may be linked, too."""
    blobs, snapshot = saved.parent / "blobs", saved.parent / "snapshots" / "abc"
    blobs.mkdir()
    for number, file in enumerate(sorted(path for path in saved.rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(saved)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(number))
        link.symlink_to(blobs / str(number))
    (saved.parent / "linked").symlink_to(snapshot, target_is_directory=True)
    ids = prompt()["ids"]
    for folder in (snapshot, saved.parent / "linked"):
        model = AssistedModelForCausalLM.from_pretrained(folder)
        assert model.generate(ids, **CALL).tolist() == pair()[0].generate(ids, **CALL).tolist()
        assert model.report.drafted > 0
        assert inside(folder, "draft", "draft.folder") == folder / "draft"


# --- code


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-code"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path, monkeypatch, target):
    """Writes a model whose code lies beside it, and gives the file that appears when the code is run."""
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(folder: Path) -> Path:
        marker = tmp_path / "has-run"
        half_right(target, noise=0.1).save_pretrained(folder)
        auto = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
        changed(folder, "config.json", model_type="own-code", auto_map=auto)
        (folder / "own_code.py").write_text(CODE.format(marker=str(marker)))
        return marker

    yield write
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


TRUST = {"trust_remote_code": True}


def test_code_of_what_the_caller_names_is_run(with_code, target, tmp_path):
    marker = with_code(tmp_path / "draft")
    target.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AssistedModelForCausalLM.from_pretrained(
            tmp_path / "target", draft=str(tmp_path / "draft"), trust_remote_code=False
        )
    assert not marker.exists()
    AssistedModelForCausalLM.from_pretrained(tmp_path / "target", draft=str(tmp_path / "draft"), **TRUST)
    assert marker.exists()
    marker.unlink()
    AssistedModelForCausalLM.from_pretrained(tmp_path / "draft", **TRUST)


def test_code_of_a_saved_pairs_draft_is_not_run(with_code, saved):
    marker = with_code(saved / "draft")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AssistedModelForCausalLM.from_pretrained(saved, **TRUST)
    assert not marker.exists()
    AssistedModelForCausalLM.from_pretrained(saved, draft=str(saved / "draft"), **TRUST)
    assert marker.exists()


def test_code_of_a_saved_pairs_target_is_run(with_code, saved):
    marker = with_code(saved / "target")
    own = json.loads((saved / "config.json").read_text())
    changed(saved, "config.json", target=own["target"] | {"model_type": "own-code"})
    with pytest.raises(ValueError, match="trust_remote_code"):
        AssistedModelForCausalLM.from_pretrained(saved, trust_remote_code=False)
    assert not marker.exists()
    AssistedModelForCausalLM.from_pretrained(saved, **TRUST)
    assert marker.exists()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_code_of_an_adapters_base_model_is_not_run(role, with_code, target, tmp_path):
    peft = pytest.importorskip("peft")
    marker = with_code(tmp_path / "base")
    wrapped = peft.get_peft_model(half_right(target, noise=0.1), peft.LoraConfig(target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "adapter")
    changed(tmp_path / "adapter", "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    target.save_pretrained(tmp_path / "target")
    first = {"draft": tmp_path / "target"} if role == "target" else {"draft": tmp_path / "adapter"}
    with pytest.raises(ValueError, match="trust_remote_code"):
        AssistedModelForCausalLM.from_pretrained(
            tmp_path / ("adapter" if role == "target" else "target"), **first, **TRUST
        )
    assert not marker.exists()


def test_a_sound_folder_is_left_alone(saved):
    for folder in (saved / "target", saved / "draft", saved / "nowhere"):
        require_sound(folder, "target")
    assert drafters.read({"method": "suffix"}, saved) == drafters.Suffix()
