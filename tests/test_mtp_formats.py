"""Checkpoints of MTP layers, in every format they are published in: written by hand, as the formats say, and read back."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import in_turns
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen2Config
from transformers.modeling_layers import MtpModel

from assisted import zoo
from assisted.loading import files as loading_files
from assisted.methods.mtp.formats import COUNTS, is_mtp, read_mtp, stored_mtp, why_no_mtp, write_mtp
from assisted.methods.shared import files as head_files

H, E = 32, 3
SIZES = {
    **{"vocab_size": 40, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
}
MLA = {
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    "num_key_value_heads": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
ROUTED = {**EXPERTS, **ONE_GROUP, "n_routed_experts": E, "n_shared_experts": 1, "first_k_dense_replace": 1}
INDEXED = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
HYBRID = {
    **{"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
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
        {**EXPERTS, **SPARSE, **ONE_GROUP, "num_experts": E, "num_shared_experts": 1},
        QWEN,
        {"mlp.gate.e_score": "mlp.e_score"},
    ),
    "mellum": ("mellum", {**EXPERTS, "num_experts": E}, QWEN, {}),
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
        {"mlp.gate.": "mlp.router.gate.", "mlp.e_score_correction": "mlp.expert"}
        | {"mlp.shared_experts": "mlp.shared_mlp"},
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


@pytest.mark.parametrize("family", ["qwen3_5", "mimo", "ernie"])
def test_each_tensor_is_required(family, tmp_path):
    whole, config = stored(family, made(family)), config_of(family)
    for name in whole:
        less = {other: tensor for other, tensor in whole.items() if other != name}
        with pytest.raises(ValueError, match=rf"draft: .* lacks tensor {re.escape(name)}$"):
            read_mtp(write(tmp_path, TARGET | less), config)
        with pytest.raises(ValueError, match=rf"draft: .* holds {re.escape(name)} of shape \[7\]; expected"):
            read_mtp(write(tmp_path, whole | {name: noise(7)}), config)


@pytest.mark.parametrize(
    ("family", "kept", "more", "said"),
    [
        *((name, "", FAMILIES[name][2][0] + "extra.weight", r"unknown tensor \S+extra\.weight") for name in ("llama", "ernie")),
        ("qwen3_5", r"(?!.*layers)", None, r"lacks tensor mtp\.layers\.0\.input_layernorm\.weight and 10 more"),
        ("deepseek_v3", r"(?!.*experts\.2)", None, r"lacks tensor model\.layers\.4\.mlp\.experts\.2\.down_proj\.weight and 2"),
        ("qwen3_5", "", "mtp.layers.0.mlp.up_proj.bias", r"unknown tensor mtp\.layers\.0\.mlp\.up_proj\.bias"),
    ],
)  # fmt: skip
def test_other_tensors_are_an_error(family, kept, more, said, tmp_path):
    tensors = {name: tensor for name, tensor in stored(family, made(family)).items() if re.match(kept, name)}
    tensors |= {more: noise(2)} if more else {}
    with pytest.raises(ValueError, match=said):
        read_mtp(write(tmp_path, tensors, speculator(family)), config_of(family))


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


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_read_and_written_again_without_loss(family, number, tmp_path):
    """Under the names of the target's layer, from the files that hold MTP tensors alone, by their headers too; a tensor of the
    last layer that is missing is named. No config is changed."""
    layers, held = several(family, number)
    config, fields = config_of(family), speculator(family)
    before = deepcopy(vars(config))
    folder = shard(tmp_path / "read", held, TARGET)
    (folder / "config.json").write_text(json.dumps(fields))
    assert why_no_mtp(folder, config) is None
    assert stored_mtp(folder, config) == (number, sum(tensor.numel() for tensor in held.values()))
    for layer, expected in zip(read_mtp(folder, config), layers, strict=True):
        require_equal(layer, expected)
        inner = {name.removeprefix("layer."): tensor for name, tensor in layer.items() if name.startswith("layer.")}
        decoder_layer(family).load_state_dict(inner, strict=True)
    views = [
        {n: torch.nn.Parameter(t.mT.contiguous().mT if t.dim() > 1 else t) for n, t in one.items()} for one in layers
    ]
    write_mtp(views, config, tmp_path / "written")
    assert vars(config) == before
    require_equal(load_file(tmp_path / "written" / "model.safetensors"), held)
    written = json.loads((tmp_path / "written" / "config.json").read_text())
    assert is_mtp(written, tmp_path / "written")
    assert all(written[name] == number for name in COUNTS if name in written)
    lost = max(held.keys() - (stored(family, layers[0], family in STACKED).keys() if number > 1 else set()))
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
    ("family", "more"),
    [
        ("deepseek_v3", [f"model.layers.4.{n}" for n in ("embed_tokens.weight", "shared_head.head.weight")]),
        ("glm4_moe", ["model.layers.4.self_attn.rotary_emb.inv_freq"]),
        ("longcat", ["model.mtp.embed_tokens.weight"]),
        ("hy_v3", ["model.layers.4.shared_head.weight"]),
        ("qwen3_5 experts", []),
        ("qwen3_next", []),
    ],
)
def test_what_else_a_file_may_hold(family, more, tmp_path):
    """Copies of embedding and head and frequencies of old files are left out; experts are stacked, or one by one."""
    expected = made(family)
    tensors = stored(family, expected, family not in STACKED) | {name: noise(40, H) for name in more}
    require_equal(read_mtp(write(tmp_path, TARGET | tensors), config_of(family))[0], expected)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize("start", ["model.language_model.", "language_model.model."])
def test_inside_a_vision_model(family, start, tmp_path):
    expected = made(family)
    nested = {re.sub(r"^model\.", start, name): tensor for name, tensor in (TARGET | stored(family, expected)).items()}
    fields = {"model_type": "some_vision_model", "text_config": config_of(family).to_diff_dict()}
    folder = write(tmp_path, nested | {"model.visual.patch_embed.proj.weight": noise(2, 2)}, fields)
    require_equal(read_mtp(folder, config_of(family))[0], expected)
    assert why_no_mtp(folder, config_of(family)) is None
    assert not is_mtp(fields, folder)


@pytest.mark.parametrize(("outer", "family"), [("qwen3_5", "qwen3_5"), ("exaone4_5", "exaone 4.5")])
def test_the_text_config_of_a_vision_model(outer, family, tmp_path):
    config = AutoConfig.for_model(outer, text_config=config_of(family).to_dict()).get_text_config(decoder=True)
    expected = made(family)
    require_equal(read_mtp(write(tmp_path, stored(family, expected)), config)[0], expected)


def squares(shape: torch.Size, scale: torch.Tensor) -> torch.Tensor:
    """Each number's scale, looked up one by one."""
    return torch.tensor([[scale[i // 128, j // 128] for j in range(shape[1])] for i in range(shape[0])])


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
            draw = torch.Generator().manual_seed(rows)
            tensors[f"{name}_scale_inv"] = torch.rand(rows, columns, generator=draw) + 0.5
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
    less = {n: t for n, t in tensors.items() if n != f"{name}_scale_inv"}
    with pytest.raises(ValueError, match=rf"{re.escape(name)} in \S+e4m3fn without its scales.*mtp:ORIGINAL_ID"):
        read_mtp(write(tmp_path, less), config)
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


def words(numbers: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """[n, m] of 0..15 -> [n, m / 8] int32, of which each four bits from the lowest hold the column that `order` says."""
    places = numbers.unflatten(1, (-1, 8)).tolist()
    packed = [[sum(eight[c] << 4 * i for i, c in enumerate(order)) for eight in row] for row in places]
    return torch.tensor(packed).to(torch.int32)  # wraps, as the highest bit is set


Packed = tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]
RANDOM = torch.Generator().manual_seed(5)
FP4 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def fours(rows: int, columns: int, group: int = 16) -> tuple[torch.Tensor, ...]:
    """Integers and zero points of 4 bits and scales, [rows, columns], [rows, groups] and [rows, groups], and the weight."""
    q = torch.randint(0, 16, (rows, columns), generator=RANDOM)
    z = torch.randint(0, 16, (rows, columns // group), generator=RANDOM)
    s = torch.randint(1, 9, z.shape, generator=RANDOM) / 64
    return q, z, s, (q - z.repeat_interleave(group, 1)) * s.repeat_interleave(group, 1)


def pack_quantized(rows: int, columns: int) -> Packed:
    q, _, s, _ = fours(rows, columns)
    weight = (q - 8) * s.repeat_interleave(16, 1)
    return weight, {"weight_packed": words(q), "weight_scale": s, "weight_shape": torch.tensor([rows, columns])}, {}


def pack_quantized_with_zeros(rows: int, columns: int) -> Packed:
    q, z, s, weight = fours(rows, columns)
    return weight, {"weight_packed": words(q), "weight_scale": s, "weight_zero_point": words(z.T).T.contiguous()}, {}


def pack_quantized_in_any_order(rows: int, columns: int) -> Packed:
    q, _, s, _ = fours(rows, columns)
    index = torch.randperm(columns, generator=RANDOM) // 16
    return (q - 8) * s[:, index], {"weight_packed": words(q), "weight_scale": s, "weight_g_idx": index.int()}, {}


def awq(rows: int, columns: int) -> Packed:
    q, z, s, weight = fours(rows, columns)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {"qweight": words(q.T, order), "qzeros": words(z.T, order), "scales": s.T.contiguous().half()}
    return weight, stored, {"quant_method": "awq", "bits": 4}


def gptq(rows: int, columns: int) -> Packed:
    q, z, s, weight = fours(rows, columns)
    less_one = (z - 1) & 15
    stored = {"qweight": words(q).T.contiguous(), "qzeros": words(less_one.T), "scales": s.T.contiguous().half()}
    return weight, stored, {"quant_method": "gptq", "sym": False}


def gptq_v2_in_any_order(rows: int, columns: int) -> Packed:
    q, z, s, _ = fours(rows, columns)
    index = torch.randperm(columns, generator=RANDOM) // 16
    stored = {"qweight": words(q).T.contiguous(), "qzeros": words(z.T), "scales": s.T.contiguous()}
    stored["g_idx"] = index.int()
    return (q - z[:, index]) * s[:, index], stored, {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}


def auto_round(rows: int, columns: int) -> Packed:
    """Zero points in the middle, of which some versions store 7 and others 8."""
    q, _, s, _ = fours(rows, columns)
    zeros = words(torch.full(s.T.shape, 8))
    stored = {"qweight": words(q).T.contiguous(), "qzeros": zeros, "scales": s.T.contiguous()}
    return (q - 8) * s.repeat_interleave(16, 1), stored, {"quant_method": "auto-round", "sym": True}


def eight_bits(rows: int, columns: int) -> Packed:
    q, s = torch.randint(-128, 128, (rows, columns), generator=RANDOM).to(torch.int8), torch.rand(rows, 1) + 0.5
    return q * s, {"weight": q, "weight_scale": s}, {}


def fp8_of_a_tensor(rows: int, columns: int) -> Packed:
    q, s = torch.randn(rows, columns, generator=RANDOM).to(torch.float8_e4m3fn), torch.tensor(0.25)
    return q.float() * s, {"weight": q, "weight_scale": s, "input_scale": torch.tensor(3.0)}, {}


def mxfp8(rows: int, columns: int) -> Packed:
    q = torch.randn(rows, columns, generator=RANDOM).to(torch.float8_e4m3fn)
    e = torch.randint(120, 130, (rows, columns // 16), generator=RANDOM)
    weight = q.float() * torch.exp2(e.float() - 127).repeat_interleave(16, 1)
    return weight, {"weight": q, "weight_scale": e.to(torch.uint8)}, {}


def fp4(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randint(0, 16, (rows, columns), generator=RANDOM)
    return torch.tensor(FP4)[q], (q[:, ::2] + 16 * q[:, 1::2]).to(torch.uint8)


def nvfp4(rows: int, columns: int) -> Packed:
    values, packed = fp4(rows, columns)
    s = (torch.rand(rows, columns // 16, generator=RANDOM) + 0.5).to(torch.float8_e4m3fn)
    stored = {"weight_packed": packed, "weight_scale": s, "weight_global_scale": torch.tensor([8.0])}
    return values * s.float().repeat_interleave(16, 1) / 8, stored | {"input_global_scale": torch.tensor([2.0])}, {}


def nvfp4_of_modelopt(rows: int, columns: int) -> Packed:
    values, packed = fp4(rows, columns)
    s = (torch.rand(rows, columns // 16, generator=RANDOM) + 0.5).to(torch.float8_e4m3fn)
    stored = {"weight": packed, "weight_scale": s, "weight_scale_2": torch.tensor(0.125)}
    return values * s.float().repeat_interleave(16, 1) / 8, stored | {"input_scale": torch.tensor(2.0)}, {}


def mxfp4(rows: int, columns: int) -> Packed:
    values, packed = fp4(rows, columns)
    e = torch.randint(120, 130, (rows, columns // 16), generator=RANDOM)
    weight = values * torch.exp2(e.float() - 127).repeat_interleave(16, 1)
    return weight, {"weight_packed": packed, "weight_scale": e.to(torch.uint8)}, {}


FORMATS = (
    *(pack_quantized, pack_quantized_with_zeros, pack_quantized_in_any_order, awq, gptq, gptq_v2_in_any_order),
    *(auto_round, eight_bits, fp8_of_a_tensor, mxfp8, nvfp4, nvfp4_of_modelopt, mxfp4),
)


def packed(family: str, pack: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """A checkpoint's tensors with the linear modules quantized; with their numbers in place; and the quantization_config."""
    held, numbers, method = {}, {}, {}
    for name, tensor in stored(family, made(family)).items():
        held[name] = numbers[name] = tensor
        if tensor.dim() == 2 and not name.endswith("gate.weight"):
            del held[name]
            numbers[name], parts, method = pack(*tensor.shape)
            held |= {name.removesuffix("weight") + part: given for part, given in parts.items()}
    return held, numbers, method


@pytest.mark.parametrize(("pack", "family"), in_turns(FORMATS, ["qwen3_5", "deepseek_v3"]))
def test_quantized_layers_are_expanded(family, pack, tmp_path, monkeypatch):
    """The formats of compressed-tensors, AutoAWQ, GPTQModel, AutoRound and ModelOpt, also of single experts."""
    for sizes, name, size in ((MLA, "q_lora_rank", 16), (EXPERTS, "moe_intermediate_size", 32)):
        monkeypatch.setitem(sizes, name, size)
        monkeypatch.setitem(FAMILIES[family][1], name, size)
    monkeypatch.setitem(FAMILIES[family][1], "qk_rope_head_dim", 8)
    held, numbers, method = packed(family, pack)
    config = config_of(family)
    folder = write(tmp_path / "packed", TARGET | held, {"quantization_config": method})
    [expected] = read_mtp(write(tmp_path / "numbers", numbers), config)
    for dtype in (torch.float32, None):
        config.dtype = dtype
        [layer] = read_mtp(folder, config)
        assert layer.keys() == expected.keys()
        for name, tensor in layer.items():
            wanted = expected[name].to(dtype or torch.bfloat16)
            assert torch.equal(tensor.to(wanted.dtype), wanted), name
    assert why_no_mtp(folder, config) is None
    assert stored_mtp(folder, config) == stored_mtp(tmp_path / "numbers", config)


@pytest.mark.parametrize("suffix", ["weight_packed", "qweight", "weight_scale", "scales", "input_scale", "biases"])
def test_other_quantizations_are_refused(suffix, tmp_path):
    tensors = stored("qwen3_5", made("qwen3_5"))
    tensors[f"mtp.layers.0.mlp.up_proj.{suffix}"] = torch.ones(4, 4, dtype=torch.int32)
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    folder = write(tmp_path, tensors)
    for read in (read_mtp, stored_mtp):
        with pytest.raises(ValueError, match=rf"up_proj\.{suffix}, of a quantization.*mtp:ORIGINAL_ID"):
            read(folder, config_of("qwen3_5"))
    assert f"up_proj.{suffix}, of a quantization" in why_no_mtp(folder, config_of("qwen3_5"))


@pytest.mark.parametrize(
    ("pack", "changes", "method", "said"),
    [
        (gptq, {}, {"quant_method": "auto-round", "sym": False}, "zero points of AutoRound"),
        (gptq, {"qweight": torch.ones(3, 48, dtype=torch.int32)}, {}, "32 numbers in 3 words of 32 bits"),
        (awq, {"qzeros": torch.ones(5, 6, dtype=torch.int32)}, {}, "do not fit together"),
        (pack_quantized, {"weight_packed": torch.ones(40, 4, dtype=torch.int32)}, {}, "do not fit together"),
        (nvfp4, {"weight_scale": torch.ones(48, 3)}, {}, "do not fit together"),
    ],
)
def test_packed_tensors_that_cannot_be_right_are_refused(pack, changes, method, said, tmp_path):
    held, _, own = packed("qwen3_5", pack)
    held |= {f"mtp.layers.0.mlp.up_proj.{name}": tensor for name, tensor in changes.items()}
    folder = write(tmp_path, held, {"quantization_config": own | method})
    with pytest.raises(ValueError, match=rf"draft: .*mtp\.\S+ .*{said}.*mtp:ORIGINAL_ID|draft: .*{said}.*up_proj"):
        read_mtp(folder, config_of("qwen3_5"))


SIDES = {
    "beside model.safetensors, in the index": ("model.safetensors", "model_mtp.safetensors", "all"),
    "the body renamed": ("model_backbone.safetensors", "model_mtp.safetensors", "all"),
    "as AutoRound": ("model-00001-of-00001.safetensors", "model_extra_tensors.safetensors", "all"),
    "an index without it": ("model-00001-of-00001.safetensors", "model_extra_tensors.safetensors", "body"),
    "no index": ("model.safetensors", "mtp.safetensors", "none"),
    "an index of its own": ("model.safetensors", "mtp-00001-of-00001.safetensors", "none"),
}


@pytest.mark.parametrize("side", SIDES)
def test_a_file_beside_the_models(side, tmp_path):
    """What compressed-tensors (save_mtp_tensors_to_checkpoint), AutoRound and converters for MLX write."""
    body, file, listed = SIDES[side]
    expected, config = made("qwen3_5"), config_of("qwen3_5")
    head = {name: tensor.contiguous() for name, tensor in stored("qwen3_5", expected).items()}
    (tmp_path / "config.json").write_text("{}")
    save_file(TARGET, tmp_path / body)
    save_file(head, tmp_path / file)
    places = {"all": dict.fromkeys(TARGET, body) | dict.fromkeys(head, file), "body": dict.fromkeys(TARGET, body)}
    if listed in places:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places[listed]}))
    require_equal(read_mtp(tmp_path, config)[0], expected)
    assert stored_mtp(tmp_path, config) == (1, sum(tensor.numel() for tensor in head.values()))
    assert why_no_mtp(tmp_path, config) is None
    assert loading_files.files_by_tensor(tmp_path) == dict.fromkeys(TARGET, body) | dict.fromkeys(head, file)
    (tmp_path / file).unlink()
    assert (why_no_mtp(tmp_path, config) == f"{file} is missing in {tmp_path}") == (listed == "all")


def test_an_index_that_was_left_over_does_not_decide(tmp_path):
    """transformers reads model.safetensors, so all that is in it counts, and the index names files that are gone."""
    expected = made("qwen3_5")
    tensors = stored("qwen3_5", expected)
    folder = write(tmp_path, TARGET | tensors)
    old = {"weight_map": dict.fromkeys(tensors | TARGET, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(old))
    require_equal(read_mtp(folder, config_of("qwen3_5"))[0], expected)
    loading_files.require_sound(folder, "target")


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_layers_that_only_the_config_has(where, tmp_path):
    fields = {"mtp_num_hidden_layers": 2}
    folder = write(tmp_path, TARGET, fields if where == "top" else {"text_config": fields})
    said = r"announces 2 MTP layers \(mtp_num_hidden_layers\), but none of its files holds their tensors\. .*mtp:ORIGINAL_ID"
    for read in (read_mtp, stored_mtp):
        with pytest.raises(ValueError, match=f"^draft: .*{said}"):
            read(folder, config_of("qwen3_5"))
    assert re.search(said, why_no_mtp(folder, config_of("qwen3_5")))


def test_the_headers_of_a_hub_id_follow_the_index(tmp_path, monkeypatch):
    """Also beside model.safetensors, which huggingface_hub stops at."""
    tensors = stored("qwen3_5", made("qwen3_5"))
    folder = write(tmp_path, TARGET)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model_mtp.safetensors")
    places = dict.fromkeys(TARGET, "model.safetensors") | dict.fromkeys(tensors, "model_mtp.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))

    def header(repository: str, file: str, **hub: Any) -> Any:
        assert (repository, hub) == ("org/model", {"revision": "abc"})
        return loading_files.parse_local_safetensors_file_metadata(folder / file)

    def single(repository: str, **hub: Any) -> Any:
        of_file = header(repository, "model.safetensors", **hub)
        return SimpleNamespace(
            sharded=False,
            weight_map=dict.fromkeys(of_file.tensors, "model.safetensors"),
            files_metadata={"model.safetensors": of_file},
        )

    monkeypatch.setattr(loading_files, "get_safetensors_metadata", single)
    monkeypatch.setattr(loading_files, "parse_safetensors_file_metadata", header)
    monkeypatch.setattr(loading_files, "file_exists", lambda repository, name, **hub: (folder / name).is_file())
    monkeypatch.setattr(loading_files, "hf_hub_download", lambda repository, name, **hub: str(folder / name))
    for found in (tensors.keys() | TARGET.keys(), TARGET.keys()):
        assert loading_files.headers("org/model", "org/model", "draft", {"revision": "abc"}).keys() == found
        index.unlink(missing_ok=True)


GGUF = {"qwen3_5": "qwen35", "qwen3_5 experts": "qwen35moe", "qwen3_next": "qwen3next", "glm4_moe": "glm4moe"}
GGUF |= {"glm4_moe_lite": "deepseek2"}


@pytest.mark.parametrize("family", GGUF)
def test_gguf_files(family, tmp_path):
    """llama.cpp's names and changes: 1 added to Qwen's norms, gate and up of stacked experts apart, one row as a vector,
    keys and values of latent attention apart and by heads, with the keys transposed."""
    pytest.importorskip("gguf")
    from gguf_files import write_tensors

    config, expected, kind = config_of(family), made(family), GGUF[family]
    config.dtype = torch.bfloat16
    tensors = {}
    for name, tensor in stored(family, expected, stacked=True).items():
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
            tensors |= {name.replace("gate_up_proj", half): part for half, part in halves}
        elif name.endswith("kv_b_proj.weight"):
            keys, values = tensor.view(4, 16, 16).split(8, 1)
            tensors[name.replace("kv_b", "k_b")] = keys.transpose(1, 2)
            tensors[name.replace("kv_b", "v_b")] = values
        else:
            tensors[name] = tensor
    copies = {"blk.4.nextn.embed_tokens.weight": noise(40, H), "blk.3.attn_norm.weight": noise(H)}
    file = write_tensors(tmp_path / "mtp.gguf", tensors, 4, kind=kind, **copies)
    for path in (file, tmp_path):  # a folder whose only model it is
        [layer] = read_mtp(path, config)
        assert layer.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(layer[name].float(), tensor.float(), atol=1e-6), name
    assert stored_mtp(file, config) == (1, sum(tensor.numel() for tensor in tensors.values()))
    assert why_no_mtp(file, config) is None
    ends = ("mtp.norm.weight", "d_head.norm.weight")
    less = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    for how, said in (
        ({"tensors": less}, "lacks tensor blk.4.nextn.shared_head_norm.weight"),
        ({"blk.4.attn_sinks.weight": noise(4)}, "unknown tensor blk.4.attn_sinks.weight"),
        ({"kind": "glm-dsa"}, f"for targets of the same kind, not of glm-dsa for {config.model_type}"),
        ({"tensors": {}}, "announces 1 MTP layer"),
        ({"tensors": {}, "announced": 0}, "holds no MTP layers"),
        ({"announced": 2}, "lacks tensor blk.5."),
    ):
        with pytest.raises(ValueError, match=rf"^draft: .*mtp\.gguf.* {re.escape(said)}"):
            read_mtp(write_tensors(file, **{"tensors": tensors, "layers": 4, "kind": kind} | how), config)
        assert why_no_mtp(file, config) == "" if "no MTP" in said else said in why_no_mtp(file, config)


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
    assert why_no_mtp(folder, config_of(family)) is not None
    assert not is_mtp(config_of(family).to_dict(), folder)
    assert why_no_mtp(tmp_path / "nowhere", config_of(family)) is not None
    assert why_no_mtp("org/never-downloaded", config_of(family)) is not None
    assert why_no_mtp("zoo:target", config_of(family)) is not None  # it has more layers
    with pytest.raises(ValueError, match="not in the zoo"):
        why_no_mtp("zoo:nothing", config_of(family))


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("mimo_v2_flash", ["model.mtp.layers.0.enorm.weight"], "MiMo-V2"),
        ("nemotron_h", ["mtp.layers.0.mixer.q_proj.weight"], "mtp_layers_block_type"),
        ("deepseek_v4", ["mtp.0.enorm.weight", "mtp.0.e_proj.weight", "mtp.0.h_proj.weight"], "e_proj, h_proj"),
        ("deepseek_v4", ["mtp.0.attn.wq_a.weight"], "DSpark"),
        # families that are in no table: transformers 5.23 drafts with their layers (`use_mtp`)
        (
            "bailing_hybrid",
            ["model.layers.4.hnorm.weight", "model.layers.4.enorm.weight"],
            r"holds model\.layers\.4\.enorm",
        ),
        (
            "inkling",
            ["model.mtp.layers.0.input_proj.weight"],
            r"holds model\.mtp\..* not known for a model of type inkling",
        ),
    ],
)
def test_layers_of_another_kind_are_refused_by_name(kind, names, said, tmp_path):
    folder, config = write(tmp_path, TARGET | {name: noise(2) for name in names}), config_of("llama")
    monkey = type("Config", (type(config),), {"model_type": kind})(**SIZES)
    with pytest.raises(ValueError, match=rf"draft: .*{said}"):
        read_mtp(folder, monkey)
    assert why_no_mtp(folder, monkey) is not None


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


def test_a_format_has_no_name_for_other_tensors(tmp_path):
    with pytest.raises(ValueError, match=r"tensors: the format of ernie4_5 .*got .*end_norm"):
        write_mtp([made("llama")], config_of("ernie"), tmp_path)
    with pytest.raises(ValueError, match=r"tensors: the format of llama .*end_norm"):
        write_mtp([made("ernie")], config_of("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"tensors: .*output"):
        write_mtp([made("llama") | {"output.weight": noise(40, H)}], config_of("llama"), tmp_path)


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
    assert ["model.safetensors"] in [options["allow_patterns"] for _, options in asked]


def test_a_hub_id_is_known_by_what_was_downloaded(tmp_path, monkeypatch):
    folder = write(tmp_path, TARGET | stored("qwen3_5", made("qwen3_5")))
    monkeypatch.setattr(loading_files, "try_to_load_from_cache", lambda path, name: str(folder / name))
    assert why_no_mtp("org/model", config_of("qwen3_5")) is None
    assert why_no_mtp("org/model", config_of("deepseek_v3")) is not None


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
