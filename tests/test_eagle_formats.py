"""Checkpoints of EAGLE heads, in every format they are published in: written by hand, as the formats say, and read back."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_ids
from eagle_heads import features_of, random_head
from pairs import pair
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from assisted import zoo
from assisted.loading import files
from assisted.methods import DraftModel, Eagle, parse
from assisted.methods.eagle.formats import load_eagle, save_eagle
from assisted.methods.eagle.head import EagleConfig, EagleHead
from assisted.methods.medusa.head import MedusaHeads
from assisted.methods.shared.files import public_name
from assisted.methods.shared.registry import kind_of
from assisted.methods.shared.training.masks import unrolled_mask

VOCABULARY, WIDTH, DRAFT = 96, 32, 40
IDS = "eagle_aux_hidden_state_layer_ids"

# As EAGLE-1's authors write it; what is left out has its default.
EAGLE_1 = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1},
    **{"vocab_size": VOCABULARY, "rms_norm_eps": 1e-5},
}
EAGLE_3 = EAGLE_1 | {
    **{"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT, "target_hidden_size": WIDTH}
}
SPECULATORS = {
    **{"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": DRAFT},
    **{"norm_before_residual": False, IDS: [1, 2]},
    "transformer_layer_config": {name: value for name, value in EAGLE_1.items() if name != "architectures"},
}


@pytest.fixture(scope="module")
def target():
    return pair()[0]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layer(prefix: str, fused: int) -> dict[str, torch.Tensor]:
    """What both versions call the same."""
    products = {"q": (32, fused), "k": (16, fused), "v": (16, fused), "o": (WIDTH, 32)}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": shape for name, shape in products.items()}
    shapes |= {"mlp.gate_proj": (48, WIDTH), "mlp.up_proj": (48, WIDTH), "mlp.down_proj": (WIDTH, 48)}
    shapes |= {"post_attention_layernorm": (WIDTH,)}
    return {f"{prefix}{name}.weight": noise(*shapes[name], seed=place) for place, name in enumerate(shapes, 1)}


def eagle_1() -> dict[str, torch.Tensor]:
    return {"fc.weight": noise(WIDTH, 2 * WIDTH), "fc.bias": noise(WIDTH), **layer("layers.0.", WIDTH)}


def eagle_3(prefix: str = "midlayer.", taps: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.arange(DRAFT) * 2 + 5
    return {
        "fc.weight": noise(WIDTH, taps * WIDTH),
        **layer(prefix, 2 * WIDTH),
        f"{prefix}hidden_norm.weight": noise(WIDTH, seed=9),
        f"{prefix}input_layernorm.weight": noise(WIDTH, seed=10),
        "norm.weight": noise(WIDTH, seed=11),
        "lm_head.weight": noise(DRAFT, WIDTH, seed=12),
        "d2t": tokens - torch.arange(DRAFT),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, tokens, True),
    }


def speculators() -> dict[str, torch.Tensor]:
    return eagle_3("layers.0.", taps=2) | {"embed_tokens.weight": noise(VOCABULARY, WIDTH)}


CHECKPOINTS = {"eagle-1": (EAGLE_1, eagle_1), "eagle-3": (EAGLE_3, eagle_3), "speculators": (SPECULATORS, speculators)}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def say(head: EagleHead, target: Any) -> torch.Tensor:
    """Its logits over two steps, of the target's own features."""
    ids = random_ids(target, 1, 10)
    with torch.no_grad():
        states = head.fuse(features_of(target, head, ids)[:, :-1])
        logits = []
        for _ in range(2):
            states = head(head.embed(ids[:, 1:], target), states)
            logits.append(head.logits(states, target))
    return torch.stack(logits)


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_read_and_written_again_without_loss(name, pickled, target, tmp_path):
    config, tensors = CHECKPOINTS[name][0], CHECKPOINTS[name][1]()
    head = load_eagle(write(tmp_path / "given", config, tensors, pickled), target)
    again = tmp_path / "again"
    save_eagle(head, again, "speculators" if name == "speculators" else "eagle", target)
    held = load_file(again / "model.safetensors")
    assert held.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        assert held[tensor_name].dtype == tensor.dtype
        assert torch.equal(held[tensor_name], tensor)
    assert load_eagle(again, target).config == head.config


@pytest.mark.parametrize("flag", [{"qkv_bias": True}, {}, {"attention_bias": False}], ids=str)
def test_biases_of_queries_keys_and_values(flag, target, tmp_path):
    """Qwen2's layers have them: yuhuili/EAGLE-Qwen2-7B-Instruct, as sgl-project/sglang pull 33966 (2026-08-07) lists it, and
    `qkv_bias` in SafeAILab/EAGLE eagle/model/cnets1.py (2026-02-19)."""
    biases = {f"layers.0.self_attn.{n}_proj.bias": noise(size) for n, size in (("q", 32), ("k", 16), ("v", 16))}
    fields = EAGLE_1 | {"architectures": ["Qwen2ForCausalLM"]} | flag
    head = load_eagle(write(tmp_path / "given", fields, eagle_1() | biases), target)
    dropped = load_eagle(write(tmp_path / "without", EAGLE_1, eagle_1()), target)
    assert not torch.allclose(say(dropped, target), say(head, target))
    with pytest.raises(ValueError, match=r"unknown tensor layers\.0\.self_attn\.k_proj\.bias and 2 more"):
        load_eagle(write(tmp_path / "given", EAGLE_1 | {"qkv_bias": False}, eagle_1() | biases), target)
    with pytest.raises(ValueError, match=r"lacks tensor layers\.0\.self_attn\.k_proj\.bias and 2 more"):
        load_eagle(write(tmp_path / "given", EAGLE_1 | {"qkv_bias": True}, eagle_1()), target)
    assert head.layers[0].self_attn.o_proj.bias is None
    assert torch.equal(head.layers[0].self_attn.k_proj.bias, biases["layers.0.self_attn.k_proj.bias"])
    save_eagle(head, tmp_path / "again")
    assert torch.equal(say(load_eagle(tmp_path / "again", target), target), say(head, target))


@pytest.mark.parametrize(
    ("fields", "theta", "kind"),
    [
        ({}, 10000.0, "default"),
        ({"rope_theta": 5e5}, 5e5, "default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, "default"),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e5, "linear"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, 5e5, "linear"),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 5e5, "default"),
    ],
)
def test_rotary_parameters_flat_and_nested(fields, theta, kind, target, tmp_path):
    head = load_eagle(write(tmp_path / "given", EAGLE_1 | fields, eagle_1()), target)
    assert head.config.rope["rope_theta"] == theta
    assert head.config.rope["rope_type"] == kind
    assert head.config.rope.get("factor") == (2.0 if kind == "linear" else None)
    save_eagle(head, tmp_path / "again")
    again = load_eagle(tmp_path / "again", target)
    assert again.config == head.config
    assert torch.equal(again.rotary_emb.inv_freq, head.rotary_emb.inv_freq)
    expected = 1 / theta ** (torch.arange(0, 8, 2) / 8) / (2.0 if kind == "linear" else 1.0)
    assert torch.allclose(head.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize(
    ("fields", "taps", "normed"),
    [
        ({}, (2, 4, 5), False),  # L = 8
        ({IDS: [1, 3, 8]}, (1, 3, 8), False),
        ({"eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5), False),
        ({"eagle_config": {IDS: [0, 3, 7]}}, (1, 4, 8), False),
        ({"eagle_config": {IDS: [2, 4, 5]}}, (2, 4, 5), False),
        ({"eagle_config": {IDS: [1, 4, 8]}}, (1, 4, 8), False),
        ({"eagle_config": {IDS: [2, 4, 5]}, "qkv_bias": False}, (3, 5, 6), False),
        ({"eagle_config": {IDS: [1, 3, 7], "last_normed": True}}, (2, 4, 8), True),
        ({"target_layer_ids": [1, 3, 7]}, (2, 4, 8), True),
    ],
    ids=[
        *("left out", "hidden states", "layers", "layers with the first and the last", "hidden states in eagle_config"),
        *("hidden states with the last", "as this package once wrote", "the normed last state", "DeepSpec"),
    ],
)
def test_tapped_layers(fields, taps, normed, target, tmp_path):
    """vLLM gives state L before the final norm (its pull 46788, 2026-06-26), and so does SGLang (32334, 2026-07-24)."""
    deep = type(target)(type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 8}))
    head = load_eagle(write(tmp_path / "given", EAGLE_3 | fields, eagle_3()), deep)
    assert (head.config.taps, head.config.last_normed) == (taps, normed)
    for format in ("eagle", "speculators"):
        save_eagle(head, tmp_path / format, format, deep)
        config = load_eagle(tmp_path / format, deep).config
        assert (config.taps, config.last_normed) == (taps, normed)
    fields = json.loads((tmp_path / "eagle" / "config.json").read_text())
    assert fields[IDS] == list(taps)
    assert fields["eagle_config"][IDS] == [tap - (taps[0] <= 2) for tap in taps]


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("fc.weight"), r"lacks tensor .*fc\.weight"),
        (lambda tensors: tensors.update({"extra.weight": noise(2)}), r"unknown tensor extra\.weight"),
        (lambda tensors: tensors.update({"fc.weight": noise(2, 3)}), r"fc\.weight of shape \[2, 3\]"),
    ],
    ids=["missing", "extra", "misshapen"],
)
def test_tensors_are_checked(name, change, said, target, tmp_path):
    config, tensors = CHECKPOINTS[name][0], CHECKPOINTS[name][1]()
    change(tensors)
    with pytest.raises(ValueError, match=said):
        load_eagle(write(tmp_path, config, tensors), target)


def test_quantized_weights_are_expanded(target, tmp_path):
    """Integers of 8 bits with scales, as compressed-tensors writes them."""
    name, tensors = "midlayer.self_attn.q_proj.weight", eagle_3()
    numbers, scale = (10 * tensors[name]).round().to(torch.int8), torch.full((32, 1), 0.25)
    head = load_eagle(write(tmp_path, EAGLE_3, tensors | {name: numbers, f"{name}_scale": scale}), target)
    assert torch.equal(head.layers[0].self_attn.q_proj.weight, numbers * scale)
    for less, said in (
        ({name: numbers}, f"{name} in torch.int8 without its scales"),
        ({f"{name}_scale": scale}, "quantiz"),
    ):
        held = {other: tensor for other, tensor in tensors.items() if other != name} | less
        with pytest.raises(ValueError, match=rf"^draft: .*{said}"):
            load_eagle(write(tmp_path, EAGLE_3, held), target)


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({}, 10000.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0),
        ({"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}}, 1e6),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}, 1e6),
    ],
)
def test_the_positions_of_angelslim(rope, theta, target, tmp_path):
    """As angelslim 0.5.0 makes them, class LlamaAttention of train/models/draft/llama_eagle3.py: run on 2026-11-29."""
    own = {"architectures": ["Eagle3LlamaForCausalLM"], "rope_theta": 1e6, "aux_hidden_states_layer_ids": [0, 1]}
    head = load_eagle(write(tmp_path, EAGLE_3 | own | rope, eagle_3() | {"fc.weight": noise(WIDTH, 2 * WIDTH)}), target)
    assert head.config.rope["rope_theta"] == theta
    assert head.config.taps == (1, 2)
    assert head.config.last_normed


def test_a_full_draft_vocabulary_has_no_maps(target, tmp_path):
    tensors, full = eagle_3(), EAGLE_3 | {"draft_vocab_size": VOCABULARY}
    tokens = tensors.pop("d2t")
    with pytest.raises(ValueError, match="lacks tensor d2t"):
        load_eagle(write(tmp_path, EAGLE_3, tensors), target)
    tensors["lm_head.weight"] = noise(VOCABULARY, WIDTH)
    with pytest.raises(ValueError, match="d2t"):
        load_eagle(write(tmp_path, full, tensors | {"d2t": tokens}), target)
    del tensors["t2d"]
    head = load_eagle(write(tmp_path, full, tensors), target)
    assert head.draft_tokens.tolist() == list(range(VOCABULARY))


def test_what_cannot_be_read_is_refused(target, tmp_path):
    mistral = SPECULATORS["transformer_layer_config"] | {"model_type": "mistral"}
    for fields, tensors, said in (
        (EAGLE_1 | {"vocab_size": 95}, eagle_1(), r"vocabulary of 95.*96"),
        (SPECULATORS | {"speculators_model_type": "dflash"}, speculators(), "'dflash'"),
        (SPECULATORS | {"transformer_layer_config": mistral}, speculators(), "'mistral'"),
    ):
        with pytest.raises(ValueError, match=said):
            load_eagle(write(tmp_path, fields, tensors), target)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=name):
            load_eagle(tmp_path, target)


def test_a_pickle_that_holds_more_than_tensors_is_not_run(target, tmp_path):
    write(tmp_path, EAGLE_1, {"fc.weight": noise(2)} | {"harm": Path}, pickled=True)  # type: ignore[dict-item]
    with pytest.raises(Exception, match="weights_only"):
        load_eagle(tmp_path, target)


def test_converted_both_ways(target, tmp_path):
    head = random_head(target, 3, draft_vocab_size=DRAFT)
    before = say(head, target)
    save_eagle(head, tmp_path / "a", "eagle", target)
    save_eagle(load_eagle(tmp_path / "a", target), tmp_path / "b", "speculators", target)
    save_eagle(load_eagle(tmp_path / "b", target), tmp_path / "c", "eagle", target)
    back = load_eagle(tmp_path / "c", target)
    assert torch.equal(say(back, target), before)
    assert replace(back.config, own_embedding=False) == head.config  # one of the formats always holds one
    with pytest.raises(ValueError, match="target"):
        save_eagle(head, tmp_path / "d", "speculators")
    with pytest.raises(ValueError, match="EAGLE-3"):
        save_eagle(random_head(target, 1), tmp_path / "d", "speculators", target)
    with pytest.raises(ValueError, match="'gguf'"):
        save_eagle(head, tmp_path / "d", "gguf")  # type: ignore[arg-type]


def test_a_head_names_its_target_by_no_local_path(target, tmp_path, monkeypatch):
    head = random_head(target, 3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "below").mkdir(parents=True)
    local = [zoo.folder("target"), "/no/longer/there", "./models/a", "models/of/mine", r"C:\models\a", "here/below", ""]
    for name, is_public in {
        "org/model": True,
        "gpt2": True,
        "zoo:target": True,
        **dict.fromkeys([*local, None]),
    }.items():
        written = name if is_public else None
        monkeypatch.setattr(target, "name_or_path", name)
        assert public_name(target) == written, name
        save_eagle(head, tmp_path / "head", "speculators", target)
        fields = json.loads((tmp_path / "head" / "config.json").read_text())
        assert fields["speculators_config"]["verifier"]["name_or_path"] == written
        MedusaHeads.for_target(target, 1).save(tmp_path / "medusa", target=target)
        assert json.loads((tmp_path / "medusa" / "config.json").read_text())["base_model_name_or_path"] == written
        assert load_eagle(tmp_path / "head", target).config == replace(head.config, own_embedding=True)
    assert public_name(None) is None


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_a_folder_of_heads_is_told_from_a_draft_model(name, pickled, tmp_path):
    folder = write(tmp_path, CHECKPOINTS[name][0], CHECKPOINTS[name][1](), pickled)
    assert kind_of(folder) == "eagle"
    assert parse(str(folder)) == Eagle(str(folder))
    assert parse(DraftModel(str(folder))) == Eagle(str(folder))
    assert parse(f"eagle:{folder}") == Eagle(str(folder))
    with pytest.raises(ValueError, match="draft_quantization"):
        parse(str(folder), "nf4")


def test_a_hub_id_is_told_by_what_was_downloaded(tmp_path, monkeypatch):
    folder = write(tmp_path, EAGLE_3, eagle_3())
    assert parse("org/head") == DraftModel("org/head")
    monkeypatch.setattr(files, "try_to_load_from_cache", lambda path, name: str(folder / name))
    assert parse("org/head") == Eagle("org/head")


@pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="the speculators package is not installed")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer": "qwen3"},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"draft_vocab_size": DRAFT, "num_hidden_layers": 2},
        {"rope": {"rope_type": "default", "rope_theta": 5e5}, "taps": (1, 2)},
    ],
    ids=lambda fields: ", ".join(fields) or "plain",
)
def test_speculators_reads_what_is_written(fields, target, tmp_path):
    """Its model says the same as ours, over the steps that it trains: the layers, their order and the recurrence."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    head = random_head(target, 3, **({"taps": (1, 2, 2)} | fields))
    save_eagle(head, tmp_path, "speculators", target)
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    loaded = model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not loaded.unexpected_keys
    assert {name for name in loaded.missing_keys if not name.startswith("verifier_")} <= {"rotary_emb.inv_freq"}
    said: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: said.append(output))
    ids = random_ids(target, 1, 10)
    features = features_of(target, head, ids)[:, :-1]
    with torch.no_grad():
        model.eval()(features, ids[:, 1:], torch.zeros_like(ids[:, 1:]), ttt_steps=3)
        states, cache, columns = head.fuse(features), DynamicCache(), features.shape[1]
        for step in range(3):
            read = head.embed(torch.nn.functional.pad(ids[:, 1 + step :], (0, step)), target)
            mask = unrolled_mask(columns, step)
            states = head(read, states, torch.arange(columns)[None] + step, mask, cache)
            logits = head.logits(states, target)
            assert torch.allclose(logits, said[step], atol=1e-4), step


def test_a_config_that_cannot_be(target):
    sizes = {name: getattr(EagleConfig.for_target(target), name) for name in ("hidden_size", "intermediate_size")}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
    for fields, said in (
        ({"version": 2, "taps": (1,)}, "version"),
        ({"version": 3, "taps": ()}, "taps"),
        ({"version": 1, "taps": (1, 2)}, "taps"),
        ({"version": 1, "taps": (2,), "target_hidden_size": 64}, "target_hidden_size"),
        ({"version": 3, "taps": (2,), "layer": "gpt2"}, "layer"),
        ({"version": 3, "taps": (2,), "fc_norm": True, "norm_before_fc": True}, "fc_norm"),
    ):
        with pytest.raises(ValueError, match=said):
            EagleConfig(**sizes, **fields)
