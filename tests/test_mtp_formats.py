"""Checkpoints of MTP layers, in every format they are published in: written by hand, as the formats say, and read back."""

from __future__ import annotations

import importlib.util
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen2Config
from transformers.modeling_layers import MtpModel

from assisted import zoo
from assisted.heads import files as head_files
from assisted.heads.mtp_formats import COUNTS, has_mtp, is_mtp, read_mtp, stored_mtp, write_mtp
from assisted.loading import files as loading_files

H, E = 32, 3
SIZES = {
    "vocab_size": 40,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    **EXPERTS,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = {**EXPERTS, "num_experts": E, "shared_expert_intermediate_size": 24}
SPARSE = {"mlp_layer_types": ["dense"] + ["sparse"] * 3}


# Of a checkpoint: the beginning of the layer's names, the norms of embedding and state, the product and the end norm.
NEXTN = ("model.layers.4.", *(f"model.layers.4.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))
QWEN = ("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
ON_PREFIX = ("", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
MIMO = tuple(f"model.mtp_layers.0.{name}" for name in ON_PREFIX)
SPECULATORS = tuple(f"mtp_layers.0.{name}" for name in ON_PREFIX)
ERNIE = tuple(f"model.mtp_{name}" for name in ("block.0.", "emb_norm.0", "hidden_norm.0", "linear_proj.0"))
LONGCAT = tuple(
    f"model.mtp.{name}" for name in ("layers.0.", *(f"layers.0.{n}" for n in ("enorm.m", "hnorm.m", "eh_proj")), "norm")
)
HY = (*NEXTN[:4], "model.layers.4.final_layernorm")
OURS = ("layer.", "embed_norm", "hidden_norm", "fuse", "end_norm")


class MiMoConfig(Qwen2Config):
    """Its class is in the checkpoint's repository."""

    model_type = "mimo"


FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, str]]] = {
    "qwen3_next": ("qwen3_next", {**HYBRID, **SHARED}, QWEN, {}),
    "qwen3_5": ("qwen3_5_text", HYBRID, QWEN, {}),
    "qwen3_5 experts": ("qwen3_5_moe_text", {**HYBRID, **SHARED}, QWEN, {}),
    "exaone 4.5": ("exaone4", {}, QWEN, {}),
    "exaone experts": (
        "exaone_moe",
        {**EXPERTS, **SPARSE, "num_experts": E, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
        QWEN,
        {"mlp.gate.e_score": "mlp.e_score"},
    ),
    "deepseek_v3": ("deepseek_v3", {**MLA, **ROUTED}, NEXTN, {}),
    "deepseek_v3 dense": ("deepseek_v3", {**MLA, **ROUTED, "first_k_dense_replace": 4}, NEXTN, {}),
    "deepseek_v32": ("deepseek_v32", {**MLA, **ROUTED, **INDEXED, **SPARSE}, NEXTN, {}),
    "glm4_moe": ("glm4_moe", {**ROUTED, "use_qk_norm": True, "attention_bias": True}, NEXTN, {}),
    "glm4_moe_lite": ("glm4_moe_lite", {**MLA, **ROUTED, **SPARSE}, NEXTN, {}),
    "glm_moe_dsa": ("glm_moe_dsa", {**MLA, **ROUTED, **INDEXED, **SPARSE}, NEXTN, {}),
    "hy_v3": (
        "hy_v3",
        {**EXPERTS, **SPARSE, "num_experts": E, "num_shared_experts": 1, "eos_token_id": None},
        HY,
        {
            "mlp.gate.": "mlp.router.gate.",
            "mlp.e_score_correction": "mlp.expert",
            "mlp.shared_experts": "mlp.shared_mlp",
        },
    ),
    "mimo": ("mimo", {}, MIMO, {}),
    "ernie": ("ernie4_5", {}, ERNIE, {}),
    "ernie experts": (
        "ernie4_5_moe",
        {"moe_num_experts": E, "moe_k": 2, "moe_intermediate_size": 24},
        ERNIE,
        {"mlp.gate.moe_statics": "mlp.moe_statics"},
    ),
    "longcat": ("longcat_flash", {**MLA, "ffn_hidden_size": 48}, LONGCAT, {"mlp.": "transformer_layer.mlp."}),
    "llama": ("llama", {}, SPECULATORS, {}),
    "qwen3": ("qwen3", {}, SPECULATORS, {}),
    "qwen3 experts": ("qwen3_moe", {**EXPERTS, "num_experts": E}, SPECULATORS, {}),
}
STACKED = {"qwen3_5 experts", "qwen3 experts"}
HIDDEN_FIRST = {"mimo"}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def config_of(family: str) -> Any:
    kind, fields = FAMILIES[family][:2]
    if kind == "mimo":
        return MiMoConfig(**SIZES)
    sizes = {name: size for name, size in SIZES.items() if kind != "longcat_flash" or name != "intermediate_size"}
    return AutoConfig.for_model(kind, **{**sizes, **fields, "pad_token_id": None, "bos_token_id": None})


def decoder_layer(family: str) -> torch.nn.Module:
    """A layer of transformers' class with full attention, and experts if the target has them."""
    config = config_of(family)
    if family == "mimo":
        config = Qwen2Config(**SIZES)
    if family == "longcat":
        config = AutoConfig.for_model("deepseek_v3", **{**SIZES, **MLA, **ROUTED})
        return AutoModel.from_config(config).layers[0]
    return AutoModel.from_config(config).layers[-1]


def made(family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """An MTP layer under our names."""
    heads = dict(zip(OURS[1:], [(H,), (H,), (H, 2 * H), (H,)], strict=True))
    if FAMILIES[family][2] is ERNIE:
        del heads["end_norm"]
    shapes = {f"{name}.weight": shape for name, shape in heads.items()}
    shapes |= {f"layer.{name}": tensor.shape for name, tensor in decoder_layer(family).state_dict().items()}
    return {name: noise(*shape, seed=seed + place) for place, (name, shape) in enumerate(shapes.items())}


def stored(family: str, tensors: dict[str, torch.Tensor], stacked: bool = False, k: int = 0) -> dict[str, torch.Tensor]:
    """The same layer as the family's checkpoint has it. k: of the layer, from 0."""
    _, _, begins, renamed = FAMILIES[family]
    begins = tuple(re.sub(r"\d+", lambda number: str(int(number[0]) + k), begin) for begin in begins)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name == "fuse.weight" and family in HIDDEN_FIRST:
            tensor = torch.cat([tensor[:, H:], tensor[:, :H]], dim=1)
        start = next(start for start in OURS if name.startswith(start))
        rest = name.removeprefix(start)
        for new, old in renamed.items():
            rest = rest.replace(new, old, 1) if start == "layer." and rest.startswith(new) else rest
        place = begins[OURS.index(start)] + rest
        if name.endswith("experts.gate_up_proj") and not stacked:
            for e in range(E):
                gate, up = tensor[e].chunk(2)
                found[place.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate.clone()
                found[place.replace("gate_up_proj", f"{e}.up_proj.weight")] = up.clone()
        elif name.endswith("experts.down_proj") and not stacked:
            found |= {place.replace("down_proj", f"{e}.down_proj.weight"): tensor[e].clone() for e in range(E)}
        else:
            found[place] = tensor
    return found


TARGET = {"model.embed_tokens.weight": noise(40, H), "model.layers.3.mlp.down_proj.weight": noise(H, 48)}


def write(folder: Path, tensors: dict[str, torch.Tensor], fields: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields or {}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def shard(folder: Path, tensors: dict[str, torch.Tensor], broken: dict[str, torch.Tensor]) -> Path:
    """Sharded: each of the tensors in one of two files, and others in a file that cannot be read."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    places = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name].contiguous() for name in tensors if places[name] == file}, folder / file)
    (folder / "model-2.safetensors").write_bytes(b"not a checkpoint")
    index = {"weight_map": places | dict.fromkeys(broken, "model-2.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def speculator(family: str) -> dict[str, Any]:
    return {"speculators_model_type": "mtp"} if FAMILIES[family][2] is SPECULATORS else {}


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_read_under_the_names_of_the_targets_layer(family, tmp_path):
    expected = made(family)
    folder = write(tmp_path, stored(family, expected, family in STACKED), speculator(family))
    config = config_of(family)
    before = deepcopy(vars(config))
    [layer] = read_mtp(folder, config)
    assert vars(config) == before
    require_equal(layer, expected)
    inner = {name.removeprefix("layer."): tensor for name, tensor in layer.items() if name.startswith("layer.")}
    decoder_layer(family).load_state_dict(inner, strict=True)
    assert has_mtp(folder, config_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_files_with_mtp_tensors_are_opened(family, tmp_path):
    expected = made(family)
    folder = shard(tmp_path, stored(family, expected), TARGET)
    (folder / "config.json").write_text(json.dumps(speculator(family)))
    require_equal(read_mtp(folder, config_of(family))[0], expected)
    assert has_mtp(folder, config_of(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_written_and_read_again_without_loss(family, tmp_path):
    tensors, config = made(family), config_of(family)
    before = config.to_dict()
    write_mtp([tensors], config, tmp_path)
    assert config.to_dict() == before
    held = load_file(tmp_path / "model.safetensors")
    assert held.keys() == stored(family, tensors, family in STACKED).keys()
    require_equal(held, stored(family, tensors, family in STACKED))
    [layer] = read_mtp(tmp_path, config)
    require_equal(layer, tensors)
    assert is_mtp(json.loads((tmp_path / "config.json").read_text()), tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "mimo", "ernie"])
def test_each_tensor_is_required(family, tmp_path):
    whole, config = stored(family, made(family)), config_of(family)
    for name in whole:
        less = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(ValueError, match=rf"draft: .* lacks tensor {re.escape(name)}$"):
            read_mtp(write(tmp_path, TARGET | less), config)
        with pytest.raises(ValueError, match=rf"draft: .* holds {re.escape(name)} of shape \[7\]; expected"):
            read_mtp(write(tmp_path, whole | {name: noise(7)}), config)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "mimo", "ernie", "longcat", "llama"])
def test_an_unknown_tensor_is_an_error(family, tmp_path):
    begin = FAMILIES[family][2][0]
    tensors = stored(family, made(family)) | {f"{begin}self_attn.extra.weight": noise(2)}
    with pytest.raises(ValueError, match=rf"unknown tensor {re.escape(begin)}self_attn\.extra\.weight"):
        read_mtp(write(tmp_path, tensors, speculator(family)), config_of(family))


def test_a_layer_that_is_missing_as_a_whole_is_an_error(tmp_path):
    tensors = {name: t for name, t in stored("qwen3_5", made("qwen3_5")).items() if ".layers." not in name}
    with pytest.raises(ValueError, match=r"lacks tensor mtp\.layers\.0\.input_layernorm\.weight and 10 more"):
        read_mtp(write(tmp_path, tensors), config_of("qwen3_5"))


def test_a_last_expert_that_is_missing_is_an_error(tmp_path):
    whole = stored("deepseek_v3", made("deepseek_v3"))
    less = {name: tensor for name, tensor in whole.items() if f".experts.{E - 1}." not in name}
    with pytest.raises(
        ValueError, match=rf"lacks tensor model\.layers\.4\.mlp\.experts\.{E - 1}\.down_proj\.weight and 2"
    ):
        read_mtp(write(tmp_path, less), config_of("deepseek_v3"))


def test_qwen_experts_are_read_stacked_and_one_by_one(tmp_path):
    for family in ("qwen3_5 experts", "qwen3_next"):
        expected = made(family)
        for stacked in (False, True):
            [layer] = read_mtp(write(tmp_path, stored(family, expected, stacked)), config_of(family))
            require_equal(layer, expected)


def test_the_kind_of_layer_is_told_by_the_tensors(tmp_path):
    """A target with dense layers and layers of experts: the MTP layer may be of either kind."""
    config, dense = config_of("ernie experts"), made("ernie")
    config.mlp_layer_types = ["dense", "sparse", "sparse", "sparse"]
    config.moe_layer_start_index = 1
    [layer] = read_mtp(write(tmp_path, stored("ernie", dense)), config)
    require_equal(layer, dense)


def several(family: str, number: int) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """MTP layers under our names, and all their tensors in the checkpoint. What the family has once is the same in all."""
    first = made(family)
    once = {begin for begin, place in zip(OURS, FAMILIES[family][2], strict=False) if not re.search(r"\d", place)}
    layers = [{n: t if n.split(".")[0] in once else t + k for n, t in made(family).items()} for k in range(1, number)]
    held: dict[str, torch.Tensor] = {}
    for k, layer in enumerate([first, *layers]):
        held |= stored(family, layer, family in STACKED, k)
    return [first, *layers], held


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_layers(family, number, tmp_path):
    """Read, by their headers too, and written again without loss; a tensor of the last layer that is missing has a name."""
    layers, held = several(family, number)
    config, fields = config_of(family), speculator(family)
    found = read_mtp(write(tmp_path / "read", TARGET | held, fields), config)
    assert len(found) == number
    for layer, expected in zip(found, layers, strict=True):
        require_equal(layer, expected)
    assert stored_mtp(tmp_path / "read", config) == (number, sum(tensor.numel() for tensor in held.values()))
    write_mtp(layers, config, tmp_path / "written")
    require_equal(load_file(tmp_path / "written" / "model.safetensors"), held)
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert is_mtp(written, tmp_path / "written")
    assert all(written[name] == number for name in COUNTS if name in written)
    for lost in sorted(held.keys() - stored(family, layers[0], family in STACKED).keys())[:: 7 - number]:
        less = {name: tensor for name, tensor in held.items() if name != lost}
        for read in (read_mtp, stored_mtp):
            with pytest.raises(ValueError, match=rf"draft: .* lacks tensor {re.escape(lost.split('experts')[0])}"):
                read(write(tmp_path / "less", less, fields), config)


def test_layers_that_differ_where_a_family_has_one_tensor(tmp_path):
    layers = [made("qwen3_5"), made("qwen3_5", seed=50)]
    with pytest.raises(
        ValueError, match=r"tensors: the format of qwen3_5_text has one mtp\.\S+ for all MTP layers; layer 2"
    ):
        write_mtp(layers, config_of("qwen3_5"), tmp_path)


@pytest.mark.parametrize(
    ("family", "copies"),
    [
        ("deepseek_v3", ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"]),
        ("longcat", ["model.mtp.embed_tokens.weight"]),
        ("hy_v3", ["model.layers.4.shared_head.weight"]),
    ],
)
def test_copies_of_embedding_and_head_are_left_out(family, copies, tmp_path):
    expected = made(family)
    tensors = stored(family, expected) | {name: noise(40, H) for name in copies}
    require_equal(read_mtp(write(tmp_path, TARGET | tensors), config_of(family))[0], expected)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
def test_inside_a_vision_model(family, start, tmp_path):
    expected = made(family)
    nested = {re.sub(r"^model\.", start, name): tensor for name, tensor in (TARGET | stored(family, expected)).items()}
    fields = {"model_type": "some_vision_model", "text_config": config_of(family).to_diff_dict()}
    folder = write(tmp_path, nested | {"model.visual.patch_embed.proj.weight": noise(2, 2)}, fields)
    require_equal(read_mtp(folder, config_of(family))[0], expected)
    assert has_mtp(folder, config_of(family))
    assert not is_mtp(fields, folder)


@pytest.mark.parametrize(
    ("outer", "family"), [("qwen3_5", "qwen3_5"), ("qwen3_5_moe", "qwen3_5 experts"), ("exaone4_5", "exaone 4.5")]
)
def test_the_text_config_of_a_vision_model(outer, family, tmp_path):
    config = AutoConfig.for_model(outer, text_config=config_of(family).to_dict()).get_text_config(decoder=True)
    expected = made(family)
    require_equal(read_mtp(write(tmp_path, stored(family, expected)), config)[0], expected)


def test_frequencies_of_old_files_are_left_out(tmp_path):
    expected = made("deepseek_v3")
    old = {"model.layers.4.self_attn.rotary_emb.inv_freq": noise(2)}
    require_equal(
        read_mtp(write(tmp_path, stored("deepseek_v3", expected) | old), config_of("deepseek_v3"))[0], expected
    )


def test_norms_stay_as_stored(tmp_path):
    """Qwen multiplies by 1 + w; the target's own norms are stored so, too."""
    tensors = stored("qwen3_5", made("qwen3_5"))
    tensors["mtp.norm.weight"] = torch.zeros(H)
    [layer] = read_mtp(write(tmp_path, tensors), config_of("qwen3_5"))
    assert torch.equal(layer["end_norm.weight"], torch.zeros(H))


def test_columns_of_the_embedding_come_first(tmp_path):
    tensors = stored("mimo", made("mimo"))
    tensors["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(H, H), torch.ones(H, H)], dim=1)
    [layer] = read_mtp(write(tmp_path, tensors), config_of("mimo"))
    assert torch.equal(layer["fuse.weight"], torch.cat([torch.ones(H, H), torch.zeros(H, H)], dim=1))


def squares(shape: torch.Size, scale: torch.Tensor) -> torch.Tensor:
    """Each number's scale, looked up one by one."""
    return torch.stack([torch.stack([scale[i // 128, j // 128] for j in range(shape[1])]) for i in range(shape[0])])


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_fp8_is_read_in_the_dtype_of_the_config(family, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "intermediate_size", 200)
    monkeypatch.setitem(EXPERTS, "moe_intermediate_size", 136)
    monkeypatch.setitem(FAMILIES[family][1], "moe_intermediate_size", 136)
    expected, tensors = made(family), {}
    for name, tensor in stored(family, expected).items():
        if tensor.dim() == 2 and "norm" not in name and "fc" not in name and "gate.weight" not in name:
            rows, columns = (-(-size // 128) for size in tensor.shape)
            tensors[name] = tensor.float().to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = (
                torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.5
            )
        else:
            tensors[name] = tensor
    assert any(tuple(t.shape) == (2, 1) for name, t in tensors.items() if name.endswith("_scale_inv"))
    config, folder = config_of(family), write(tmp_path / "fp8", TARGET | tensors)
    for dtype in (None, torch.float32):
        config.dtype = dtype
        by_hand = {
            name: (tensor.float() * squares(tensor.shape, tensors[f"{name}_scale_inv"])).to(dtype or torch.bfloat16)
            if f"{name}_scale_inv" in tensors
            else tensor
            for name, tensor in tensors.items()
            if not name.endswith("_scale_inv")
        }
        [layer] = read_mtp(folder, config)
        require_equal(layer, read_mtp(write(tmp_path / "plain", by_hand), config)[0])
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    with pytest.raises(
        ValueError, match=rf"{re.escape(name)} in torch.float8_e4m3fn without its scales.*mtp:ORIGINAL_ID"
    ):
        read_mtp(write(tmp_path, {n: t for n, t in tensors.items() if n != f"{name}_scale_inv"}), config)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}_scale_inv of shape \[3, 3\]"):
        read_mtp(write(tmp_path, tensors | {f"{name}_scale_inv": torch.ones(3, 3)}), config)


def test_fp8_experts_with_scales_in_powers_of_two(tmp_path):
    """Stacked experts have stacked scales; some files store only the exponents."""
    expected = made("qwen3_5 experts")
    tensors = stored("qwen3_5 experts", expected, stacked=True)
    name = "mtp.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = expected["layer.mlp.experts.gate_up_proj"].to(torch.float8_e4m3fn)
    by_expert = torch.tensor([0.5, 1.0, 4.0])[:, None, None]
    tensors[f"{name}_scale_inv"] = by_expert.to(torch.float8_e8m0fnu)
    config = config_of("qwen3_5 experts")
    config.dtype = torch.float32
    [layer] = read_mtp(write(tmp_path, tensors), config)
    assert torch.equal(layer["layer.mlp.experts.gate_up_proj"], tensors[name].float() * by_expert)


@pytest.mark.parametrize("suffix", ["weight_packed", "qweight", "weight_scale", "scales", "input_scale", "biases"])
def test_other_quantizations_are_refused(suffix, tmp_path):
    tensors = stored("qwen3_5", made("qwen3_5"))
    tensors[f"mtp.layers.0.mlp.up_proj.{suffix}"] = torch.ones(4, 4, dtype=torch.int32)
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=rf"up_proj\.{suffix}, of a quantization.*mtp:ORIGINAL_ID"):
        read_mtp(write(tmp_path, tensors), config_of("qwen3_5"))


def test_integers_are_not_weights(tmp_path):
    tensors = stored("qwen3_5", made("qwen3_5"))
    for dtype in (torch.int8, torch.int32):
        tensors["mtp.fc.weight"] = torch.ones(H, 2 * H, dtype=dtype)
        with pytest.raises(ValueError, match=rf"mtp\.fc\.weight in {dtype} without its scales"):
            read_mtp(write(tmp_path, tensors), config_of("qwen3_5"))


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "llama"])
def test_a_checkpoint_without_mtp_layers(family, tmp_path):
    folder = write(tmp_path, TARGET)
    with pytest.raises(ValueError, match=r"holds no MTP layers for a model of type \w+\. .*draft=\"mtp:ORIGINAL_ID\""):
        read_mtp(folder, config_of(family))
    assert not has_mtp(folder, config_of(family))
    assert not is_mtp(config_of(family).to_dict(), folder)
    assert not has_mtp(tmp_path / "nowhere", config_of(family))
    assert not has_mtp("org/never-downloaded", config_of(family))
    assert not has_mtp("zoo:target", config_of(family))  # it has more layers
    with pytest.raises(ValueError, match="not in the zoo"):
        has_mtp("zoo:nothing", config_of(family))


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("mimo_v2_flash", ["model.mtp.layers.0.enorm.weight"], "MiMo-V2"),
        ("nemotron_h", ["mtp.layers.0.mixer.q_proj.weight"], "mtp_layers_block_type"),
        ("deepseek_v4", ["mtp.0.enorm.weight", "mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], "e_proj, h_proj"),
        ("deepseek_v4", ["mtp.0.attn.wq_a.weight"], "DSpark"),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(kind, names, said, tmp_path):
    folder, config = write(tmp_path, TARGET | {name: noise(2) for name in names}), config_of("llama")
    monkey = type("Config", (type(config),), {"model_type": kind})(**SIZES)
    with pytest.raises(ValueError, match=rf"draft: .*{said}"):
        read_mtp(folder, monkey)
    assert not has_mtp(folder, monkey)


def test_an_embedding_of_their_own_is_refused(tmp_path):
    config = config_of("qwen3_5")
    config.mtp_use_dedicated_embeddings = True
    with pytest.raises(ValueError, match="embedding of their own"):
        read_mtp(write(tmp_path, stored("qwen3_5", made("qwen3_5"))), config)


def test_a_model_that_transformers_does_not_have(tmp_path):
    config = type("Config", (Qwen2Config,), {"model_type": "house_made"})(**SIZES)
    folder = write(tmp_path, stored("llama", made("llama")), speculator("llama"))
    for code in ({}, {"AutoModel": "modeling_house_made.Model"}):
        config.auto_map = code  # never asked about, never run
        with pytest.raises(ValueError, match="no decoder layers of type house_made"):
            read_mtp(folder, config)


def test_a_family_reads_what_speculators_wrote_for_it(tmp_path):
    expected = made("qwen3_5 experts")
    places = dict(zip(OURS, SPECULATORS, strict=True))
    tensors = {
        places[start] + n.removeprefix(start): t for n, t in expected.items() for start in OURS if n.startswith(start)
    }
    folder = write(tmp_path, tensors, {"speculators_model_type": "mtp"})
    require_equal(read_mtp(folder, config_of("qwen3_5 experts"))[0], expected)


def test_a_format_has_no_name_for_other_tensors(tmp_path):
    with pytest.raises(ValueError, match=r"tensors: the format of ernie4_5 .*got .*end_norm"):
        write_mtp([made("llama")], config_of("ernie"), tmp_path)
    with pytest.raises(ValueError, match=r"tensors: the format of llama .*end_norm"):
        write_mtp([made("ernie")], config_of("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"tensors: .*output"):
        write_mtp([made("llama") | {"output.weight": noise(40, H)}], config_of("llama"), tmp_path)


def test_views_and_parameters_are_written(tmp_path):
    tensors = made("llama")
    tensors["fuse.weight"] = tensors["fuse.weight"].T.contiguous().T
    tensors |= {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items() if name.startswith("layer.")}
    write_mtp([tensors], config_of("llama"), tmp_path)
    require_equal(
        read_mtp(tmp_path, config_of("llama"))[0], {name: tensor.detach() for name, tensor in tensors.items()}
    )


@pytest.mark.parametrize(("family", "layers"), [("glm4_moe", 46), ("deepseek_v3", 61)])
def test_transformers_reads_the_same(family, layers, tmp_path):
    """Its own loader, which knows these layers by their number in the published models."""
    config, tensors = config_of(family), made(family)
    config.num_hidden_layers, config.num_nextn_predict_layers = layers, 1
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    write_mtp([tensors], config, tmp_path / "head")
    both = load_file(tmp_path / "model.safetensors") | load_file(tmp_path / "head" / "model.safetensors")
    save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    [layer] = read_mtp(tmp_path, model.config)
    require_equal(layer, tensors)
    theirs = MtpModel.from_pretrained(model).state_dict()
    places = dict(zip(OURS, ("mtp_block.", "enorm", "hnorm", "eh_proj", "post_norm"), strict=True))
    for name, tensor in layer.items():
        start = next(start for start in OURS if name.startswith(start))
        assert torch.equal(theirs["layers.0." + places[start] + name.removeprefix(start)].to(tensor.dtype), tensor), (
            name
        )


needs_speculators = pytest.mark.skipif(
    importlib.util.find_spec("speculators") is None, reason="the speculators package is not installed"
)


@needs_speculators
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5 experts", "qwen3_next"])
def test_speculators_converts_the_same(family, tmp_path):
    from speculators.convert.mtp.converter import MTPConverter

    tensors = made(family)
    write_mtp([tensors], config_of(family), tmp_path / "family")
    theirs = MTPConverter().convert_to_state_dict(tmp_path / "family")
    folder = write(tmp_path / "converted", theirs, {"speculators_model_type": "mtp"})
    require_equal(read_mtp(folder, config_of(family))[0], tensors)


@needs_speculators
def test_speculators_reads_what_is_written(tmp_path):
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    write_mtp([made("qwen3")], config_of("qwen3"), tmp_path)
    config = MTPSpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    loaded = MTPDraftModel(config).load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not loaded.unexpected_keys
    assert not [name for name in loaded.missing_keys if name.startswith("mtp_layers.")]


def test_what_is_written_for_speculators(tmp_path):
    config = config_of("llama")
    config.architectures = ["LlamaForCausalLM"]
    config.quantization_config = {"quant_method": "fp8"}
    config._name_or_path = "/somewhere/on/this/machine"
    write_mtp([made("llama")], config, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["num_nextn_predict_layers"] == 1
    assert fields["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    layer = fields["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert layer["hidden_size"] == H
    assert "somewhere" not in json.dumps(fields)
    assert "quantization_config" not in layer


def test_a_folder_with_other_models_holds_no_mtp_layers_alone(tmp_path):
    config = config_of("qwen3_5")
    folder = write(tmp_path, TARGET | stored("qwen3_5", made("qwen3_5")))
    assert not is_mtp(config.to_dict(), folder)
    assert not is_mtp({"speculators_model_type": "eagle3"}, folder)
    assert not is_mtp({}, folder)
    for wrong in ({"model_type": "qwen3_5_text", "num_hidden_layers": "four"}, {"model_type": ["qwen3_5_text"]}):
        assert not is_mtp(wrong, folder)
    assert not is_mtp(json.loads((Path(zoo.folder("draft")) / "config.json").read_text()), Path(zoo.folder("draft")))


def test_a_hub_id_downloads_what_is_needed(tmp_path, monkeypatch):
    expected, asked = made("qwen3_5"), []
    folder = shard(tmp_path, stored("qwen3_5", expected), TARGET)

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(folder)

    monkeypatch.setattr(head_files, "snapshot_download", download)
    require_equal(read_mtp("org/model", config_of("qwen3_5"), revision="abc", trust_remote_code=True)[0], expected)
    assert [options["allow_patterns"] for _, options in asked] == [
        ["config.json", "model.safetensors.index.json"],
        ["model-0.safetensors", "model-1.safetensors"],
    ]
    assert all(name == "org/model" and options["revision"] == "abc" for name, options in asked)
    assert all("trust_remote_code" not in options for _, options in asked)
    asked.clear()
    (folder / "model.safetensors.index.json").unlink()
    write(folder, stored("qwen3_5", expected))
    require_equal(read_mtp("org/model", config_of("qwen3_5"))[0], expected)
    assert ["config.json", "model.safetensors"] in [options["allow_patterns"] for _, options in asked]


def test_a_hub_id_is_known_by_what_was_downloaded(tmp_path, monkeypatch):
    folder = write(tmp_path, TARGET | stored("qwen3_5", made("qwen3_5")))
    monkeypatch.setattr(loading_files, "try_to_load_from_cache", lambda path, name: str(folder / name))
    assert has_mtp("org/model", config_of("qwen3_5"))
    assert not has_mtp("org/model", config_of("deepseek_v3"))


def test_broken_files_are_named(tmp_path):
    folder, config = shard(tmp_path, stored("qwen3_5", made("qwen3_5")), TARGET), config_of("qwen3_5")
    (folder / "model-1.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        read_mtp(folder, config)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(OSError, match=r"model-1\.safetensors"):
        read_mtp(folder, config)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"mtp.fc.weight": "../elsewhere"}}))
    with pytest.raises(ValueError, match="outside the folder"):
        read_mtp(folder, config)
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_mtp(tmp_path / "nowhere", config)
