"""Quantized drafts: each name loads, stays close, survives saving to the bit, and keeps off the shapes its backend fails on."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import in_turns
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

from assisted import AssistedModelForCausalLM
from assisted.extras import install
from assisted.fast import native
from assisted.fast.low_bit import LowBitLinear
from assisted.loading.backends import find
from assisted.loading.quantization import (
    NAMES,
    load_quantized,
    memory_bytes,
    quantize_copy,
    resolve,
    save_quantized,
)

MODULES = {
    "nf4": "bitsandbytes",
    "fp4": "bitsandbytes",
    "int8": "torch",
    "int4": "torch",
    "int4-int8": "torch",
    "int8-bitsandbytes": "bitsandbytes",
    "int4-quanto": "optimum.quanto",
    "int8-quanto": "optimum.quanto",
    "int8-torchao": "torchao",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of a linear layer on Gaussian weights and inputs. Measured: 4 bits 0.07-0.17, 8 bits 0.005-0.013;
# a layer read in the wrong order is off by more than 1.
LAYER_ERROR = {name: 0.02 if name.startswith("int8") else 0.2 for name in MODULES}
IDS = torch.arange(24).view(2, 12)
PROJECTIONS = 7  # linear layers of one Llama block
PACKED = {"int8", "int4", "int4-int8"}  # these quantize the output head, too


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(MODULES[request.param])
    return str(request.param)


def llama(
    folder: Path | None = None,
    hidden: int = 64,
    inner: int = 128,
    dtype: torch.dtype = torch.float32,
    tie: bool = False,
    layers: int = 1,
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    if folder is not None:
        model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits


@torch.no_grad()
def layer_errors(model: PreTrainedModel, original: PreTrainedModel) -> dict[str, float]:
    """Relative error of every quantized layer against the original in float32, on one row and on seven."""
    errors = {}
    generator = torch.Generator().manual_seed(1)
    for path, layer in original.named_modules():
        if isinstance(layer, nn.Linear) and is_quantized(model.get_submodule(path)):
            for rows in (1, 7):
                x = torch.randn(1, rows, layer.in_features, generator=generator).to(model.dtype)
                expected = nn.functional.linear(x.float(), layer.weight.float())
                error = (model.get_submodule(path)(x).float() - expected).norm() / expected.norm()
                errors[f"{path}, {rows} rows"] = error.item()
    return errors


def is_quantized(module: nn.Module) -> bool:
    return isinstance(module, LowBitLinear) or type(getattr(module, "weight", None)) not in (nn.Parameter, type(None))


def quantized_layers(model: PreTrainedModel) -> set[str]:
    return {path for path, module in model.named_modules() if is_quantized(module)}


def count(name: str) -> int:
    """How many linear layers of one Llama block and its head are quantized."""
    return PROJECTIONS + (name in PACKED)


def fingerprint(model: PreTrainedModel) -> str:
    digest = hashlib.sha256(model.config.to_json_string().encode() + model.generation_config.to_json_string().encode())
    for key, value in sorted(model.state_dict().items()):
        digest.update(f"{key} {value.dtype} {value.data_ptr()}".encode() + value.view(torch.uint8).numpy().tobytes())
    digest.update(repr([type(module) for module in model.modules()]).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("name,dtype", in_turns(NAMES, DTYPES), indirect=["name"])
def test_every_name_loads_and_stays_close(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    original = llama(tmp_path, dtype=dtype)
    model = load_quantized(str(tmp_path), name, dtype=dtype)
    assert model.dtype == dtype
    assert not model.training
    assert len(quantized_layers(model)) == count(name)
    assert torch.isfinite(logits(model)).all()
    errors = layer_errors(model, original)
    assert len(errors) == 2 * count(name)
    assert max(errors.values()) < LAYER_ERROR[name], errors


def test_tied_and_untied_heads_stay_as_they_are(name: str, tmp_path: Path) -> None:
    if name in PACKED:
        pytest.skip("its head is quantized beside the embedding, which stays")
    for tie in (True, False):
        original = llama(tmp_path / str(tie), tie=tie)
        model = load_quantized(str(tmp_path / str(tie)), name)
        assert torch.equal(model.lm_head.weight, original.lm_head.weight)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tie


def test_a_list_of_ones_own_does_not_quantize_a_tied_head(tmp_path: Path) -> None:
    pytest.importorskip("optimum.quanto")
    llama(tmp_path, tie=True)
    own = QuantoConfig("int8", modules_to_not_convert=[".*mlp"])
    model = load_quantized(str(tmp_path), own)
    assert quantized_layers(model) == {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"}
    assert own.modules_to_not_convert == [".*mlp"]


@pytest.mark.parametrize("name,dtype", in_turns(NAMES, [torch.bfloat16, torch.float32]), indirect=["name"])
def test_a_saved_draft_computes_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also after forwards: the first one repacks bitsandbytes' 4-bit weights in place on some CPUs."""
    original = llama(tmp_path / "source", dtype=torch.float32)
    model = load_quantized(str(tmp_path / "source"), name, dtype=dtype)
    expected = logits(model)
    for turn in ("once", "again"):  # the second time from what the first wrote
        save_quantized(model, tmp_path / turn)
        model = load_quantized(str(tmp_path / turn))
        assert model.dtype == dtype
        assert len(quantized_layers(model)) == count(name)
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(load_quantized(str(tmp_path / "once"), name)), expected)
    # For anyone else the folder is the original's checkpoint.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    assert torch.equal(plain.model.layers[0].mlp.up_proj.weight, original.model.layers[0].mlp.up_proj.weight.to(dtype))


def test_saving_where_it_was_loaded_from_adds_the_record(name: str, tmp_path: Path) -> None:
    llama(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    model = load_quantized(str(tmp_path), name)
    expected = logits(model)
    save_quantized(model, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == weights
    assert torch.equal(logits(load_quantized(str(tmp_path))), expected)


def test_a_model_that_is_not_quantized_is_saved_as_it_is(tmp_path: Path) -> None:
    original = llama()
    save_quantized(original, tmp_path)
    loaded = load_quantized(str(tmp_path))
    assert not quantized_layers(loaded)
    assert torch.equal(logits(loaded), logits(original))


@pytest.mark.parametrize("name,dtype", in_turns(NAMES, [torch.float32, torch.bfloat16]), indirect=["name"])
def test_a_quantized_copy_leaves_the_original_alone(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tie = dtype == torch.bfloat16
    original = llama(tmp_path / "source", dtype=dtype, tie=tie)
    expected, before = logits(original), fingerprint(original)
    copied = quantize_copy(original, name)
    quantized = logits(copied)
    assert fingerprint(original) == before
    assert torch.equal(logits(original), expected)
    assert torch.equal(quantized, logits(load_quantized(str(tmp_path / "source"), name, dtype=dtype)))
    # The embeddings stay unquantized: one copy in memory serves both.
    assert copied.get_input_embeddings().weight.data_ptr() == original.get_input_embeddings().weight.data_ptr()

    save_quantized(copied, tmp_path / "copy", source=original)
    assert torch.equal(logits(load_quantized(str(tmp_path / "copy"))), quantized)


def test_a_copy_keeps_generation_settings_and_attention(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    original = llama(tmp_path)
    original.generation_config.eos_token_id = 7
    original.set_attn_implementation("eager")
    copied = quantize_copy(original, "int8-torchao")
    assert copied.generation_config.eos_token_id == 7
    assert copied.generation_config is not original.generation_config
    assert copied.config._attn_implementation == "eager"


BAD_SHAPES = [
    ("nf4", 64, 96, {"model.layers.0.mlp.down_proj"}),  # in_features 96
    ("fp4", 64, 96, {"model.layers.0.mlp.down_proj"}),
    ("nf4", 64, 176, {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}),  # out 176, in 176
    ("int8-quanto", 64, 72, {"model.layers.0.mlp.down_proj"}),  # in_features 72: a segmentation fault in bfloat16
]


@pytest.mark.parametrize(("name", "hidden", "inner", "unfit"), BAD_SHAPES)
def test_layers_that_would_compute_nonsense_stay_unquantized(
    name: str, hidden: int, inner: int, unfit: set[str], tmp_path: Path
) -> None:
    pytest.importorskip(MODULES[name])
    original = llama(tmp_path / "source", hidden, inner, torch.bfloat16)
    with pytest.warns(UserWarning, match=f"{len(unfit)} of {PROJECTIONS} layers stay unquantized") as caught:
        model = load_quantized(str(tmp_path / "source"), name)
    assert len([w for w in caught if "unquantized" in str(w.message)]) == 1
    linear = {path for path, module in original.model.named_modules(prefix="model") if isinstance(module, nn.Linear)}
    assert quantized_layers(model) == linear - unfit
    expected = logits(model)
    assert torch.isfinite(expected).all()
    assert max(layer_errors(model, original).values()) < LAYER_ERROR[name]

    with pytest.warns(UserWarning, match="stay unquantized"):
        assert torch.equal(logits(quantize_copy(original, name)), expected)
    save_quantized(model, tmp_path / "saved")
    with warnings.catch_warnings():  # the exclusions are part of the record: nothing new to say
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(logits(load_quantized(str(tmp_path / "saved"))), expected)


@pytest.mark.parametrize("name", ["int4", "int8", "int4-quanto", "int8-bitsandbytes", "int8-torchao"])
@pytest.mark.parametrize(("hidden", "inner"), [(48, 96), (60, 70)])
def test_the_other_names_take_every_shape(name: str, hidden: int, inner: int, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[name])
    original = llama(tmp_path, hidden, inner, torch.bfloat16)
    model = load_quantized(str(tmp_path), name)
    assert len(quantized_layers(model)) == count(name)
    assert max(layer_errors(model, original).values()) < LAYER_ERROR[name]


@pytest.mark.parametrize(("name", "hidden", "inner"), [("nf4", 48, 96), ("fp4", 48, 96), ("int8-quanto", 40, 72)])
def test_a_model_of_which_no_layer_fits_is_refused(name: str, hidden: int, inner: int, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[name])
    model = llama(tmp_path, hidden, inner)
    with pytest.raises(ValueError, match=r"quantization: none of the 7 layers .*int8-torchao"):
        load_quantized(str(tmp_path), name)
    with pytest.raises(ValueError, match="quantization: none of the 7 layers"):
        quantize_copy(model, name)


def test_transposed_layers_are_guarded_too(tmp_path: Path) -> None:
    """GPT-2 stores its weights as [in, out], and bitsandbytes quantizes them."""
    pytest.importorskip("bitsandbytes")
    shape = {"n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 64}
    torch.manual_seed(0)
    original = GPT2LMHeadModel(GPT2Config(n_embd=64, n_inner=96, **shape)).eval()
    original.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="1 of 4 layers stay unquantized"):  # mlp.c_proj: in 96
        model = load_quantized(str(tmp_path), "nf4")
    error = (logits(model) - logits(original)).norm() / logits(original).norm()
    assert error < LAYER_ERROR["nf4"]


def test_memory_counts_what_is_stored(name: str, tmp_path: Path) -> None:
    llama(tmp_path, dtype=torch.bfloat16, tie=True)
    plain = load_quantized(str(tmp_path))
    rotary = 2 * 16 * 4  # two float32 buffers of half a head
    assert (
        memory_bytes(plain) == 2 * sum(weight.numel() for weight in plain.parameters()) + rotary
    )  # the tied head once

    packed, rows = 4 * 64 * 64 + 3 * 64 * 128, 4 * 64 + 2 * 128 + 64
    four_bit = (
        packed // 2 + 4 * packed // 64 + PROJECTIONS * 16 * 4
    )  # a float32 scale a block, a table of 16 values a layer
    # kernels in C have float32 scales, and outputs in multiples of 32; a head of its own, beside the embedding, has 8 bits
    in_c = native.is_available()
    scale, head = (4, 96 * 64 + 96 * 4) if in_c else (2, 96 * (64 + 2))
    activations = PROJECTIONS * 2 * 4  # quanto's two float32 scales a layer, unused
    expected = {
        "nf4": four_bit,
        "fp4": four_bit,
        "int8": packed + scale * rows + head,  # a scale a row
        "int4": (four := packed // 2 + (2 + 2) * packed // 32 + head),  # a scale and a zero point a group
        "int4-int8": four,
        "int8-bitsandbytes": packed + 4 * rows,
        "int4-quanto": packed // 2 + (2 + 2) * rows + activations,  # a scale and a shift a row
        "int8-quanto": packed + 2 * rows + activations,
        "int8-torchao": packed + (4 + 1) * rows,  # a scale and a zero point a row
    }[name]
    assert memory_bytes(load_quantized(str(tmp_path), name)) == memory_bytes(plain) - 2 * packed + expected


def test_memory_that_models_share_counts_once(name: str) -> None:
    target = llama(hidden=128, inner=256)
    pair = AssistedModelForCausalLM.from_models(target, draft=f"self:{name}")
    copied = pair.drafter.model
    heads = () if name in PACKED else (target.lm_head.weight,)
    shared = 4 * sum(weight.numel() for weight in (target.model.embed_tokens.weight, *heads))
    norms = 4 * sum(module.weight.numel() for path, module in target.named_modules() if "norm" in path)
    own = memory_bytes(copied) - shared - norms
    buffers = sum(4 * buffer.numel() for buffer in {id(b): b for b in target.buffers()}.values())
    assert memory_bytes(target, copied) == memory_bytes(target) + own == memory_bytes(copied, target, target)
    assert pair.get_memory_footprint() == memory_bytes(target, copied)
    assert memory_bytes(target) - memory_bytes(target, buffers=False) == buffers
    assert pair.get_memory_footprint(return_buffers=False) == memory_bytes(target, copied, buffers=False)
    assert pair.get_memory_footprint(return_buffers=False) < pair.get_memory_footprint()


def test_memory_after_forwards_and_against_transformers(name: str, tmp_path: Path) -> None:
    original = llama(tmp_path, inner=512)
    model = load_quantized(str(tmp_path), name)
    fresh = memory_bytes(model)
    logits(model)
    assert memory_bytes(model) <= fresh
    assert memory_bytes(model) < 0.5 * memory_bytes(original)


def test_unknown_names_list_the_known_ones() -> None:
    for unknown in ("int3", "int4-torchao", "NF4"):
        with pytest.raises(ValueError, match="quantization: .*" + ", ".join(NAMES)):
            resolve(unknown, torch.float32)
    with pytest.raises(ValueError, match=r"quantization: .* got int"):
        resolve(4, torch.float32)  # type: ignore[arg-type]
    assert resolve(None, torch.float32) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_backend_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PACKED:
        pytest.skip("it needs torch alone")
    llama(tmp_path)
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    extra = "torchao" if name == "int8-torchao" else "quant"
    for attempt in (
        lambda: resolve(name, torch.float32),
        lambda: load_quantized(str(tmp_path), name),
        lambda: resolve({"quant_method": find(name)[0].name}, torch.float32),
    ):
        with pytest.raises(ImportError, match=re.escape(install(extra))):
            attempt()


def test_configs_of_transformers_pass_through(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama(tmp_path)
    given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
    before = given.to_dict()
    for form in (given, before, {**before, "quant_method": "bitsandbytes"}, {"load_in_4bit": True}):
        resolved = resolve(form, torch.float32)
        assert resolved is not form
        assert isinstance(resolved, BitsAndBytesConfig)
    model = load_quantized(str(tmp_path), given)
    assert model.config.quantization_config.bnb_4bit_use_double_quant
    assert given.to_dict() == before
    expected = logits(model)
    save_quantized(model, tmp_path / "saved")
    assert torch.equal(logits(load_quantized(str(tmp_path / "saved"))), expected)


def test_four_bits_compute_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama(tmp_path, dtype=torch.bfloat16)
    for dtype, expected in ((None, torch.bfloat16), ("auto", torch.bfloat16), ("float16", torch.float16)):
        model = load_quantized(str(tmp_path), "nf4", dtype=dtype)
        assert model.config.quantization_config.bnb_4bit_compute_dtype == expected == model.dtype


def test_torchao_int4_is_refused_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator, which has int4")
    from torchao.quantization import Int4WeightOnlyConfig

    llama(tmp_path)
    with pytest.raises(ValueError, match="torchao has no int4 for CPUs"):
        load_quantized(str(tmp_path), TorchAoConfig(Int4WeightOnlyConfig(group_size=32)))


def test_quanto_int4_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optimum.quanto")
    from optimum.quanto.library.extensions import extension, get_extension

    def no_compiler(**_: object) -> None:
        raise RuntimeError("a compiler was started")

    monkeypatch.setattr(extension, "load", no_compiler)
    monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", None)
    llama(tmp_path)
    assert torch.isfinite(logits(load_quantized(str(tmp_path), "int4-quanto"))).all()


def test_what_is_quantized_already_is_refused(name: str, tmp_path: Path) -> None:
    llama(tmp_path / "plain")
    model = load_quantized(str(tmp_path / "plain"), name)
    with pytest.raises(ValueError, match="the model is quantized already"):
        quantize_copy(model, name)
    with pytest.raises(ValueError, match="this model is quantized, too"):
        save_quantized(model, tmp_path / "saved", source=model)
    with pytest.raises(ValueError, match="None makes no quantized copy"):
        quantize_copy(llama(), None)  # type: ignore[arg-type]


def test_checkpoints_that_were_quantized_before(tmp_path: Path) -> None:
    """Saved by transformers before a first forward, as those on the Hub are."""
    pytest.importorskip("bitsandbytes")
    llama(tmp_path / "plain")
    load_quantized(str(tmp_path / "plain"), "nf4").save_pretrained(tmp_path / "nf4")
    with pytest.raises(ValueError, match="is quantized already; leave quantization out"):
        load_quantized(str(tmp_path / "nf4"), "nf4")
    model = load_quantized(str(tmp_path / "nf4"))
    expected = logits(model)
    save_quantized(model, tmp_path / "saved")
    assert torch.equal(logits(load_quantized(str(tmp_path / "saved"))), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tied_head_that_bitsandbytes_cannot_quantize(bits: int, tmp_path: Path) -> None:
    """A list of modules to skip replaces the default, in which the head is."""
    pytest.importorskip("bitsandbytes")
    llama(tmp_path, tie=True)

    def made(*skipped: str) -> AssistedModelForCausalLM:
        config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, llm_int8_skip_modules=list(skipped))
        return AssistedModelForCausalLM.from_pretrained(tmp_path, draft="suffix", quantization_config=config)

    with pytest.raises(ValueError, match="quantization_config: 'lm_head' shares its weight"):
        made("q_proj")
    made("q_proj", "lm_head")


def test_saving_without_the_original_is_refused(name: str, tmp_path: Path) -> None:
    """Repacked weights cannot be saved, and a wrong original would be noticed by nobody."""
    original = llama(tmp_path / "plain")
    copied = quantize_copy(original, name)
    logits(copied)
    with pytest.raises(ValueError, match=r"source: the original .* is unknown; pass source="):
        save_quantized(copied, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"source: there is no checkpoint of the original at .*; pass source="):
        save_quantized(copied, tmp_path / "saved", source=str(tmp_path / "gone"))
    other = llama(tmp_path / "other")
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2)
    with pytest.raises(ValueError, match=r"source: its model\.\S+ differs from the model's; pass source="):
        save_quantized(copied, tmp_path / "saved", source=other)
    assert not (tmp_path / "saved").exists()


def test_int8_is_quiet_and_other_int8_models_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    llama(tmp_path)
    model = load_quantized(str(tmp_path), "int8-bitsandbytes")
    foreign = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False).to("cpu").eval()
    with caplog.at_level(logging.WARNING):
        logits(model)
        with pytest.raises(AttributeError):
            model(IDS, past_key_values=3)
        assert "cast" not in caplog.text
        with torch.no_grad():
            foreign(torch.randn(1, 64))
        assert "cast" in caplog.text


def test_offloaded_weights_count_once_each():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
        model.append(model[0])
    assert memory_bytes(model) == 2 * 8 * 8 * 4


def test_weights_that_the_first_forward_pass_unpacks() -> None:
    """A hook of compressed-tensors does that, and replaces the dictionary of a module's parameters. No trial may undo it."""
    plain, target = llama(), llama()
    linear = target.model.layers[0].self_attn.q_proj
    weights = dict(linear._parameters)
    del linear._parameters["weight"]
    linear.forward = functools.partial(nn.Linear.forward, linear)

    def unpacks(model: Any, args: Any) -> None:
        linear._parameters = weights
        model.ct_decompress_hook.remove()
        del model.ct_decompress_hook

    target.ct_decompress_hook = target.register_forward_pre_hook(unpacks)
    call = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = AssistedModelForCausalLM.from_models(target, "ngram").generate(IDS[:1], **call)
    assert written.tolist() == plain.generate(IDS[:1], **call).tolist()


def test_what_compressed_tensors_cannot_read_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    model.config.save_pretrained(tmp_path)

    def mismatched(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("mismatched sizes")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", mismatched)
    with pytest.raises(
        ValueError, match=r"mismatched sizes\. compressed.*CompressedTensorsConfig\(dequantize=True\) unpacks"
    ):
        AssistedModelForCausalLM.from_pretrained(str(tmp_path))
