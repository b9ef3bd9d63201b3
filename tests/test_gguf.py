"""Targets and drafts in GGUF files: the text is that of transformers' own reading of the file, and a pair can be saved."""

from __future__ import annotations

import copy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_hybrid, write_llama
from pairs import no_fallback
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from assisted import AssistedModelForCausalLM, DraftModel, Suffix, zoo
from assisted.fast.low_bit import LowBitLinear
from assisted.loading.gguf import read_config
from assisted.loading.packed import PackedConfig
from assisted.loading.quantization import quantize_copy
from assisted.methods import MTP

pytest.importorskip("gguf", reason="needs the `gguf` extra")

CALL: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROMPT = "ab cab ab cab ab cab ab "
KINDS = ["F32", "Q8_0"]


@pytest.fixture(scope="module", params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp(request.param) / "target.gguf", request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("one") / "target.gguf", "Q8_0")


def plainly(file: Path) -> torch.Tensor:
    """What transformers writes without this package."""
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).generate(**prompt(file), **CALL)


def prompt(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(PROMPT, return_tensors="pt")


def compare(pair: AssistedModelForCausalLM, file: Path) -> None:
    with no_fallback():
        output = pair.generate(**prompt(file), **CALL, draft_length=4)
    assert output.tolist() == plainly(file).tolist()
    assert pair.report is not None
    assert pair.report.accepted > 0


def test_a_target_in_a_file(file: Path) -> None:
    for pair in (
        AssistedModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name),
        AssistedModelForCausalLM.from_pretrained(file),
    ):
        assert isinstance(pair.tokenizer("ab").input_ids, list)  # its tokenizer lies in the same file
        compare(pair, file)


def test_a_folder_with_nothing_but_a_file(one: Path, tmp_path: Path) -> None:
    shutil.copy(one, tmp_path)
    (tmp_path / "README.md").write_text("A model.")
    compare(AssistedModelForCausalLM.from_pretrained(tmp_path, draft=str(tmp_path)), one)
    shutil.copy(one, tmp_path / "another.gguf")
    with pytest.raises(ValueError, match=r"^target: .*another\.gguf, target\.gguf.*name one"):
        AssistedModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^draft: .*name one"):
        AssistedModelForCausalLM.from_pretrained(one, draft=str(tmp_path))


def test_a_draft_in_another_folder_gets_no_file(file: Path, tmp_path: Path) -> None:
    same = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    AssistedModelForCausalLM.from_models(same).save_pretrained(tmp_path / "pair")
    draft = shutil.move(tmp_path / "pair" / "target", tmp_path / "draft")
    compare(AssistedModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, draft=str(draft)), file)


@pytest.mark.parametrize("spec", ["path", "object", "loaded"])
def test_a_draft_in_a_file(file: Path, spec: str, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    draft = {"path": str(file), "object": DraftModel(file), "loaded": loaded}[spec]
    pair = AssistedModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, draft=draft)
    compare(pair, file)
    pair.save_pretrained(tmp_path)
    compare(AssistedModelForCausalLM.from_pretrained(tmp_path), file)
    assert _is_marked(loaded)  # a caller's model is not changed


def _is_marked(model: PreTrainedModel) -> bool:
    return model.is_quantized and isinstance(model.config.quantization_config, GgufConfig)


@pytest.mark.parametrize("given", ["named", "loaded"])
def test_a_saved_pair_reads_back(file: Path, given: str, tmp_path: Path) -> None:
    if given == "named":
        pair = AssistedModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    else:
        pair = AssistedModelForCausalLM.from_models(
            AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name),
            tokenizer=AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
        )
    pair.save_pretrained(tmp_path)
    assert _is_marked(pair.target) is (given == "loaded")
    assert "gguf" not in (tmp_path / "config.json").read_text() + (tmp_path / "target" / "config.json").read_text()
    again = AssistedModelForCausalLM.from_pretrained(tmp_path)
    compare(again, file)
    text = PROMPT + " Zoë\n"
    assert again.tokenizer is not None
    assert again.tokenizer(text).input_ids == pair.tokenizer(text).input_ids
    with pytest.raises(ValueError, match="gguf_file"):
        AssistedModelForCausalLM.from_pretrained(tmp_path, gguf_file="target.gguf")


@pytest.mark.quant
@pytest.mark.parametrize("given", ["named", "loaded"])
def test_a_quantized_copy_of_a_target_in_a_file(one: Path, given: str) -> None:
    pytest.importorskip("torchao")
    if given == "named":
        pair = AssistedModelForCausalLM.from_pretrained(one, draft="self:int8-torchao")
    else:
        target = AutoModelForCausalLM.from_pretrained(one.parent, gguf_file=one.name)
        pair = AssistedModelForCausalLM.from_models(target, draft="self:int8-torchao")
    compare(pair, one)


def test_dtype_and_config_are_passed_on(one: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(
        one.parent, gguf_file=one.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    assert pair.dtype == torch.bfloat16
    assert not pair.target.is_quantized


@pytest.mark.parametrize("config", [PackedConfig(8), PackedConfig(4, input_bits=8), PackedConfig(8).to_dict()])
def test_a_target_is_quantized_after_it_was_read(file: Path, config: Any) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(file, quantization_config=config, dtype=torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    expected = quantize_copy(read, config)
    assert isinstance(pair.target.lm_head, LowBitLinear)
    ids = prompt(file).input_ids
    assert torch.equal(pair.target(ids).logits, expected(ids).logits)
    pair.generate(**prompt(file), **CALL, draft_length=4)
    assert pair.report is not None and pair.report.accepted > 0


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
SCALED = {
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"factor": 4.0}),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        YARN,
    ),
    "llama3": ({"rope.freq_base": 500000.0}, {"factor": 32.0, **LLAMA3}),
}


@pytest.mark.parametrize("scaling", SCALED)
def test_rotary_scaling_that_transformers_does_not_read(scaling: str, tmp_path: Path) -> None:
    stated, scaled = SCALED[scaling]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=write_llama(tmp_path / "plain.gguf").name)
    config, more = copy.deepcopy(plain.config), {}
    config.rope_parameters = {"rope_type": scaling, "rope_theta": stated.get("rope.freq_base", 10000.0), **scaled}
    if scaling == "llama3":  # which llama.cpp's converter writes as factors
        found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        more["rope_freqs.weight"] = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2) / 16) / found
    right = LlamaForCausalLM(config)
    right.load_state_dict(plain.state_dict())
    file = write_llama(tmp_path / "scaled.gguf", stated=stated, more=more)
    pair = AssistedModelForCausalLM.from_pretrained(file)
    ids = torch.randint(3, 250, (1, 200), generator=torch.Generator().manual_seed(0))
    assert pair.target.config.rope_parameters == pytest.approx(config.rope_parameters)
    torch.testing.assert_close(pair(ids).logits, right(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(pair(ids).logits, plain(ids).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("model", "stated", "more", "expected"),
    [
        ("starcoder2", {"rope.freq_base": 1e6}, {}, {"rope_theta": 1e6}),
        (
            "stablelm",
            {"rope.freq_base": 1e6, "rope.dimension_count": 8},
            {},
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        ),
        ("qwen3", {"attention.key_length": 32}, {}, {"head_dim": 32}),
        ("qwen2moe", {"expert_count": 4, "expert_feed_forward_length": 48}, {}, {"moe_intermediate_size": 48}),
        (
            "gemma2",
            {"attention.key_length": 16, "final_logit_softcapping": 20.0},
            {},
            {"final_logit_softcapping": 20.0},
        ),
        ("gemma2", {"attention.key_length": 32, "block_count": 46}, {}, {"query_pre_attn_scalar": 16}),
        (
            "gemma3",
            {"attention.key_length": 32, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {},
            {"factor": 8.0},
        ),
        ("llama", {}, {"blk.0.attn_q.bias": [0.0] * 64}, {"attention_bias": True}),
        (
            "gpt-oss",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096},
            {},
            {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        ),
        (
            "phi3",
            {"rope.dimension_count": 12, "rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.5},
            {"rope_factors_long.weight": [4.0] * 6, "rope_factors_short.weight": [1.0] * 6},
            {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "long_factor": [4.0] * 6,
                "attention_factor": 1.5,
                "original_max_position_embeddings": 128,
            },
        ),
    ],
)
def test_metadata_that_transformers_does_not_read(
    model: str, stated: dict[str, Any], more: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    file = write_llama(tmp_path / "target.gguf", stated=stated, more=more, model=model)
    config = read_config(str(tmp_path), str(file))
    rope = config.rope_parameters
    found = {**config.to_dict(), **rope.get("full_attention", rope)}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("stated", "more", "said"),
    [
        ({"expert_count": 8}, {}, "a mixture of 8 experts"),
        ({"rope.scaling.type": "other"}, {}, "scaling 'other'"),
        (
            {"block_count": 3},
            {},
            "no tensor in it for 9 weights of LlamaForCausalLM, such as model.layers.2.input_layernorm",
        ),
        ({}, {"rope_freqs.weight": [1.0, 3.0, 2.0, 7.0, 1.0, 1.0, 1.0, 1.0]}, "rotary embedding are scaled"),
    ],
)
def test_what_transformers_would_read_as_another_model(stated: Any, more: Any, said: str, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "target.gguf", stated=stated, more=more)
    with pytest.raises(ValueError, match=said):
        AssistedModelForCausalLM.from_pretrained(file)


def test_what_cannot_be_honoured(one: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft_quantization"):
        AssistedModelForCausalLM.from_pretrained(one, draft=str(one), draft_quantization="nf4")
    for wrong in ("", 3):
        with pytest.raises(ValueError, match="gguf_file"):
            AssistedModelForCausalLM.from_pretrained(one.parent, gguf_file=wrong)
    with pytest.raises(OSError, match=r"none\.gguf"):
        AssistedModelForCausalLM.from_pretrained(one.parent, gguf_file="none.gguf")


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 2000, 0.5, 0.9, -1])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_broken_files_are_named(one: Path, role: str, kept: float, tmp_path: Path) -> None:
    data = one.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises((ValueError, OSError), match=r"broken\.gguf"):
        if role == "target":
            AssistedModelForCausalLM.from_pretrained(tmp_path, gguf_file="broken.gguf")
        else:
            AssistedModelForCausalLM.from_pretrained(one, draft=str(broken))


@pytest.mark.parametrize("field", ["block_count", "embedding_length", "attention.head_count", "vocab_size"])
@pytest.mark.parametrize("value", [0, 2**31 - 1, 2**32 - 1])
def test_sizes_that_the_file_does_not_hold(one: Path, field: str, value: int, tmp_path: Path) -> None:
    data, key = one.read_bytes(), f"llama.{field}".encode()
    at = data.index(key) + len(key) + 4  # behind the kind of number
    (tmp_path / "broken.gguf").write_bytes(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        AssistedModelForCausalLM.from_pretrained(tmp_path, gguf_file="broken.gguf")


def test_a_missing_package_is_named_with_its_extra(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"\[gguf\]"):
        AssistedModelForCausalLM.from_pretrained(one.parent, gguf_file=one.name)


def test_packed_weights_are_not_written(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.gguf.utils import GgufLinear

    target = AutoModelForCausalLM.from_pretrained(one.parent, gguf_file=one.name)
    pair = AssistedModelForCausalLM.from_models(target)
    target.lm_head = GgufLinear(64, 260, 8)
    with pytest.raises(ValueError, match=r"gguf_file.*dequantize=True"):
        pair.save_pretrained(tmp_path)


def test_nothing_is_said_of_what_is_as_it_should_be(one: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AssistedModelForCausalLM.from_pretrained(one.parent, gguf_file=one.name)


def test_a_file_is_parsed_once_and_only_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, weights and tokenizer need the same metadata, which takes a second for every 3,000 tokens of a vocabulary."""
    import gguf

    parsed, own = [], gguf.GGUFReader
    build = own._build_fields
    monkeypatch.setattr(own, "_build_fields", lambda *args: parsed.append(args) or build(*args))
    pair = AssistedModelForCausalLM.from_pretrained(file)
    assert pair.tokenizer is not None
    assert len(parsed) == 1
    assert gguf.GGUFReader is own
    with pytest.raises(ValueError, match=r"gguf_file: .* is not a file"):
        AssistedModelForCausalLM.from_pretrained(file.parent, gguf_file=3)
    assert gguf.GGUFReader is own
    again = file.with_name("again.gguf")
    shutil.copy(file, again)  # another file of the same name later is read anew
    AssistedModelForCausalLM.from_pretrained(again)
    assert len(parsed) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_mtp_layer_of_a_file_drafts(kind: str, tmp_path: Path) -> None:
    """As many tokens a forward pass as with the shipped checkpoint, also from the saved pair and with another copy of the
    target."""
    file = write_hybrid(tmp_path / "hybrid.gguf", kind)
    inputs = AutoTokenizer.from_pretrained(zoo.folder("hybrid"))(
        "def mean(values):\n    total = 0\n", return_tensors="pt"
    )
    call = {"max_new_tokens": 24, "do_sample": False, "draft_length": 4}

    def tokens(pair: AssistedModelForCausalLM) -> float:
        with no_fallback():
            drafted = pair.generate(**inputs, **call)
        found = pair.report.tokens_per_pass
        assert drafted.tolist() == pair.target.generate(**inputs, max_new_tokens=24, do_sample=False).tolist()
        return found

    chains = MTP(tree=False)  # the size of trees depends on measured costs
    shipped = tokens(AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft=chains))
    assert isinstance(AssistedModelForCausalLM.from_pretrained(file, draft="auto").spec, MTP)
    pair = AssistedModelForCausalLM.from_pretrained(file, draft=chains, dtype=torch.float32)
    assert tokens(pair) == shipped > 2.5
    if kind != "F32":
        return
    pair.save_pretrained(tmp_path / "pair")
    assert tokens(AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")) == shipped
    other = MTP(str(file), tree=False)
    assert tokens(AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft=other)) == shipped


def test_a_file_without_its_mtp_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_hybrid(tmp_path / "hybrid.gguf", mtp=False)
    with pytest.raises(ValueError, match=r"hybrid\.gguf holds no MTP layers.*mtp:ORIGINAL_ID"):
        AssistedModelForCausalLM.from_pretrained(file, draft="mtp")
    assert isinstance(AssistedModelForCausalLM.from_pretrained(file, draft="auto").spec, Suffix)
    assert "MTP" not in caplog.text


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "MXFP4"])
def test_types_that_transformers_cannot_expand_itself(kind: str, tmp_path: Path) -> None:
    """It reads files of this architecture without the package gguf."""
    import gguf
    from transformers.integrations.gguf.dequant import _DEQUANT, GGML_BLOCK

    known = dict(GGML_BLOCK), dict(_DEQUANT)
    made = gguf.GGMLQuantizationType[kind]
    assert made not in GGML_BLOCK
    file = write_hybrid(tmp_path / "hybrid.gguf", kind, mtp=False)
    pair = AssistedModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    (written,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.3.ffn_down.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(written.data, made))
    assert pair.target.get_submodule("model.layers.3.mlp.down_proj").weight.equal(expected)
    assert known == (GGML_BLOCK, _DEQUANT)
