"""Linear modules of 8 and 4 bits on a CPU: every shape and number of columns, joining, and models that hold them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import no_fallback
from test_quantization import llama, logits
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from assisted import AssistedModelForCausalLM, zoo
from assisted.fast import low_bit as fast_low_bit
from assisted.fast import native
from assisted.fast.fused import fused
from assisted.fast.layers import FusedLayer
from assisted.fast.low_bit import CardLinear, LowBitLinear, NativeLinear, joined, low_bit
from assisted.fast.products import Product
from assisted.loading import packed, quantization
from assisted.loading.packed import PackedConfig
from assisted.loading.quantization import load_quantized, memory_bytes, quantize_copy, resolve, save_quantized
from assisted.methods.quantized_self import CopyDrafter

ERROR = {8: 0.02, 4: 0.15}  # relative, of products with Gaussian weights and inputs
SHAPES = [(1, 64), (17, 33), (30, 40), (48, 32), (64, 576), (100, 80), (129, 16)]
CALL = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture(params=["of torch", "in C"], autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "of torch":
        monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "of the test"))
        monkeypatch.setattr(native, "lacking", lambda reason: None)
    elif not native.is_available():
        pytest.skip(native.loaded()[1])


def linear(outputs: int, inputs: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.no_grad()
def test_every_shape_and_number_of_columns(bits: int, outputs: int, inputs: int) -> None:
    """The kernels read beyond the end of other widths than they were written for; a thousand columns take another way."""
    module = linear(outputs, inputs, bias=True)
    made = low_bit(module, bits)
    for shape in ((inputs,), (1, 1, inputs), (2, 3, inputs), (40, inputs), (1000, inputs)):
        given = torch.randn(shape)
        expected, found = module(given), made(given)
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert (found - expected).norm() / expected.norm() < ERROR[bits] * (2 if outputs == 1 else 1)
    given = torch.randn(3, inputs)
    expected = made(given)
    for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.float32):  # a cast of the model
        found = made.to(dtype)(given.to(dtype))
        assert found.dtype == dtype
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_the_number_of_columns_does_not_compile_it_again(bits: int) -> None:
    """A copy that was not used for a while reads many columns at once, in the middle of an answer."""
    made, compiled = low_bit(linear(96, 192), bits), []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    for run in (made, made.raw):
        compiled.clear()
        torch._dynamo.reset()
        ours = torch.compile(run, backend=backend, dynamic=True)
        for columns in (5, 2, 32, 33, 128):
            given = torch.randn(1, columns, 192, dtype=torch.bfloat16)
            assert torch.allclose(ours(given), run(given), atol=0.1)
        assert len(compiled) == 1


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_a_row_does_not_depend_on_the_others(bits: int) -> None:
    made, given = low_bit(linear(96, 64), bits), torch.randn(9, 64)
    assert torch.equal(made(given)[4:5], made(given[4:5]))


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_zeros_and_transposed_weights(bits: int) -> None:
    empty = linear(32, 32)
    nn.init.zeros_(empty.weight)
    assert torch.equal(low_bit(empty, bits)(torch.randn(2, 32)), torch.zeros(2, 32))
    module = linear(48, 64, bias=True)
    transposed = Conv1D(48, 64)
    transposed.weight.data, transposed.bias.data = module.weight.data.t().contiguous(), module.bias.data
    given = torch.randn(3, 64)
    assert torch.equal(low_bit(transposed, bits)(given), low_bit(module, bits)(given))


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_joined_modules_hold_no_weight_twice(bits: int) -> None:
    parts = [low_bit(linear(rows, 64), bits) for rows in (128, 64, 64)]
    given, before = torch.randn(2, 64), memory_bytes(*parts)
    expected = torch.cat([part(given) for part in parts], -1)
    whole = joined(parts)
    assert whole is not None
    assert torch.equal(whole(given), expected)
    assert torch.equal(torch.cat([part(given) for part in parts], -1), expected)
    scales = whole.scales.nbytes
    assert memory_bytes(whole, *parts) == before + scales
    again = joined(parts)
    assert again is not None and again.packed.data_ptr() == whole.packed.data_ptr()


def test_what_cannot_be_joined() -> None:
    one = low_bit(linear(64, 64), 8)
    for others in (
        [low_bit(linear(64, 64), 4)],
        [low_bit(linear(64, 32), 8)],
        [low_bit(linear(64, 64, bias=True), 8)],
        [linear(64, 64)],
    ):
        assert joined([one, *others]) is None
    assert joined([one]) is one
    assert joined([linear(64, 64)]) is None


def test_outputs_are_filled_up_where_c_joins_products() -> None:
    """Those of modules whose outputs are no multiple of the layout's."""
    modules = [low_bit(linear(rows, 64), 8) for rows in (64, 40, 8, 64)]
    inputs = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = torch.cat([module(inputs) for module in modules], -1)
    whole, product = joined(modules), Product(modules, True)
    in_c = isinstance(modules[0], NativeLinear)
    assert whole is not None and whole.out_features == (224 if in_c else 176) and (product.order is not None) == in_c
    assert torch.equal(product(inputs), expected)


def test_four_bits_name_the_remedy_on_other_devices() -> None:
    with pytest.raises(RuntimeError, match=r"packed for a CPU.*load the model there instead"):
        low_bit(linear(32, 32), 4)(torch.zeros(1, 32, device="meta"))


# ---- models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_fused_layers_hold_joined_products(bits: str, dtype: torch.dtype) -> None:
    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=dtype)
    model = quantize_copy(target, bits)
    before = memory_bytes(model)
    found = fused(model)
    layer = found.module.model.layers[0]
    assert isinstance(layer, FusedLayer)
    assert isinstance(layer.heads.modules[0], LowBitLinear)
    assert layer.heads.modules[0].out_features == sum(
        getattr(model.model.layers[0].self_attn, f"{part}_proj").out_features for part in "qkv"
    )
    assert memory_bytes(model) <= before
    assert fused(model).module.model.layers is found.module.model.layers  # kept for the next call
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.packed = torch.zeros_like(model.model.layers[0].mlp.up_proj.packed)
    assert fused(model).module.model.layers is not found.module.model.layers


def _other(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights, with other scales and other packed weights in the first layer."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if "layers.0." in name and name.endswith(("scales", "packed")):
            state[name] = tensor.flip(-1 if tensor.dim() == 1 else -2)
    return state


def _in_place(name: str) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for other, tensor in _other(model).items():
            if other.endswith(name):
                model.get_buffer(other).copy_(tensor)

    return edit


def _by_data(name: str) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for other, tensor in _other(model).items():
            if other.endswith(name):
                model.get_buffer(other).data = tensor

    return edit


CHANGES = {
    "scales in place": _in_place("scales"),
    "packed in place": _in_place("packed"),
    "data of scales": _by_data("scales"),
    "data of packed": _by_data("packed"),
    "load_state_dict": lambda model: model.load_state_dict(_other(model)),
    "load_state_dict that assigns": lambda model: model.load_state_dict(_other(model), assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("bits", ["int8", "int4"])
@torch.no_grad()
def test_a_model_whose_weights_change_is_run_as_it_is_now(bits: str, change: str) -> None:
    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.float32)
    model = quantize_copy(target, bits)
    if "scales" in change and not any(
        m.scales.numel() for m in model.modules() if isinstance(m, NativeLinear) and m.bits == 4
    ):
        pytest.skip("the kernels in C read scales of 4 bits from the packed weights")
    ids = torch.arange(200, 216)[None]

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        found = fused(model).module
        assert found is not model
        return found(input_ids=ids).logits, model(input_ids=ids).logits

    before, expected = both()
    scale = expected.std()
    assert (before - expected).abs().max() < 0.1 * scale
    CHANGES[change](model)
    now, expected = both()
    assert (expected - before).abs().max() > scale  # or it would prove nothing
    # inputs of 8 bits round what differs in a last bit to another step
    assert (now - expected).abs().max() < (0.2 if bits == "int4" else 0.1) * scale
    assert fused(model).module.model.layers is fused(model).module.model.layers


@pytest.mark.parametrize("fast", ["auto", "eager"])
@pytest.mark.parametrize("draft", ["self:int8", "self:int4"])
def test_a_copy_drafts_in_the_targets_slots(draft: str, fast: str) -> None:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft=draft, dtype=torch.float32, fast=fast)
    assert isinstance(pair.drafter, CopyDrafter)
    ids = torch.arange(200, 230)[None]
    with no_fallback():
        text = pair.generate(ids, draft_length=4, **CALL)
    assert text.tolist() == pair.target.generate(ids, **CALL).tolist()
    assert pair.report is not None
    assert pair.report.acceptance_rate > (0.8 if draft == "self:int8" else 0.3)
    for _ in range(2):  # a turn that continues from the cache of the one before
        again = pair.generate(ids, assisted=True, draft_length=3, **CALL)
        assert again.tolist() == text.tolist()


def test_a_tied_embedding_stays_and_the_head_is_quantized(tmp_path: Path) -> None:
    original = llama(tmp_path, tie=True)
    model = load_quantized(str(tmp_path), "int8")
    assert isinstance(model.lm_head, LowBitLinear)
    assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)
    with torch.no_grad():
        error = (logits(model) - logits(original)).norm() / logits(original).norm()
    assert error < 0.05
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


def test_models_with_transposed_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 64}
    original = GPT2LMHeadModel(GPT2Config(n_embd=64, n_inner=96, **shape)).eval()
    original.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = load_quantized(str(tmp_path), "int8")
    assert sum(isinstance(module, LowBitLinear) for module in model.modules()) == 5
    assert (logits(model) - logits(original)).norm() / logits(original).norm() < 0.05


def test_modules_can_be_left_out(tmp_path: Path) -> None:
    llama(tmp_path)
    model = load_quantized(str(tmp_path), PackedConfig(8, modules_to_not_convert=["lm_head", "down_proj"]))
    assert type(model.lm_head) is nn.Linear and type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, LowBitLinear)


def test_transformers_takes_the_config_for_any_model(tmp_path: Path) -> None:
    llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=PackedConfig(4))
    assert isinstance(model.lm_head, LowBitLinear) and model.lm_head.bits == 8


def test_a_name_means_the_fastest_weights_of_a_device() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("optimum.quanto")
    for given in ("int8", PackedConfig(8), PackedConfig(8).to_dict()):
        assert resolve(given, torch.bfloat16, "cuda").quant_method == "bitsandbytes"
        assert isinstance(resolve(given, torch.bfloat16), PackedConfig)
    for given in ("int4", "int4-int8", PackedConfig(4)):
        assert isinstance(resolve(given, torch.bfloat16, "cuda"), PackedConfig)
        assert resolve(given, torch.bfloat16, "any").quant_method == "quanto"
    with pytest.raises(ValueError, match="'int4-tinygemm' is for NVIDIA cards; on a CPU, use 'int4'"):
        resolve("int4-tinygemm", torch.bfloat16)
    for device_map, expected in ((None, "cpu"), ("cpu", "cpu"), ("cuda:1", "cuda"), ({"": "cuda"}, "cuda")):
        assert quantization._device_type(device_map) == expected
    with pytest.raises(ValueError, match="bits: 3 is not possible; use 8 or 4"):
        PackedConfig(3)
    with pytest.raises(ValueError, match="input_bits: 4 is not possible; use 16 or 8"):
        PackedConfig(4, input_bits=4)


def test_an_old_card_has_other_weights_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optimum.quanto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    warned: list[str] = []
    monkeypatch.setattr(logging.get_logger("assisted.loading.backends"), "warning_once", warned.append)
    assert resolve("int4", torch.bfloat16, "cuda").quant_method == "quanto"
    assert (
        "'int4-quanto' is used instead of 'int4-tinygemm': it needs an NVIDIA card of compute capability" in warned[0]
    )


class Kernel:
    """torch's kernel for cards, as its sources describe it: one byte for two steps, the first one in the high bits."""

    def packed(self, levels: torch.Tensor) -> torch.Tensor:
        assert levels.shape[0] % 8 == 0 and levels.shape[1] % 32 == 0 and levels.dtype == torch.int32
        return (levels[:, ::2] << 4 | levels[:, 1::2]).to(torch.uint8)

    def product(self, given: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
        assert given.dtype == scales.dtype == torch.bfloat16 and scales.is_contiguous()
        steps = torch.stack([packed >> 4, packed & 15], -1).flatten(1).float() - 8
        scale, zero = scales.float().repeat_interleave(group, 0).unbind(-1)
        return (given.float() @ (steps.t() * scale + zero)).bfloat16()


@pytest.mark.parametrize(
    "kernel", [Kernel(), pytest.param(None, marks=pytest.mark.gpu)], ids=["described", "on a card"]
)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@torch.no_grad()
def test_four_bits_on_a_card(outputs: int, inputs: int, kernel: Kernel | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = linear(outputs, inputs, bias=True)
    if kernel is None:
        module = module.cuda()
    else:
        monkeypatch.setattr(fast_low_bit, "pack_for_tinygemm", kernel.packed)
        monkeypatch.setattr(fast_low_bit, "tinygemm", kernel.product)
    made = CardLinear.of(module.weight.float(), module.bias)
    for columns in (1, 5, 40, 1000):
        given = torch.randn(columns, inputs, device=module.weight.device)
        expected, found = module(given), made(given)
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert (found - expected).norm() / expected.norm() < ERROR[4] * (2 if outputs == 1 else 1)


def test_the_head_stays_on_a_card_and_8_bits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tmp_path)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(packed, "low_bit", lambda module, bits, input_bits: nn.Identity())
    for bits, expected in ((8, "products with 8 bits are for a CPU"), (4, None)):
        quantizer = AutoHfQuantizer.from_config(PackedConfig(bits))
        if expected:
            with pytest.raises(ValueError, match=rf"PackedConfig\(8\) does not run on this GPU, as {expected}"):
                quantizer.postprocess_model(model)
        else:
            quantizer.postprocess_model(model)
    assert type(model.lm_head) is nn.Linear and type(model.model.layers[0].mlp.up_proj) is nn.Identity


@pytest.mark.gpu
def test_a_copy_in_4_bits_drafts_on_a_card() -> None:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="self:int4", draft_length=4, device_map="cuda")
    assert any(isinstance(module, CardLinear) for module in pair.drafter.model.modules())
    ids = torch.arange(40, 60, device="cuda")[None]
    texts = [pair.generate(ids, **CALL, assisted=assisted).tolist() for assisted in (False, True)]
    assert texts[0] == texts[1] and pair.report.acceptance_rate > 0.5


def test_the_name_of_inputs_in_8_bits(tmp_path: Path) -> None:
    config = resolve("int4-int8", torch.bfloat16)
    assert isinstance(config, PackedConfig) and (config.bits, config.input_bits) == (4, 8)
    original = llama(tmp_path)
    copied = quantize_copy(original, "int4-int8")
    save_quantized(copied, tmp_path / "saved", source=original)
    again = load_quantized(str(tmp_path / "saved"))
    bits = {module.input_bits for module in again.modules() if isinstance(module, LowBitLinear)}
    assert bits == ({8} if native.is_available() else {16})
    assert again.config.quantization_config.input_bits == 8
    ids = torch.arange(8)[None]
    assert torch.equal(again(ids).logits, copied(ids).logits)


@pytest.mark.parametrize("config", [PackedConfig(8, input_bits=8), PackedConfig(4, input_bits=8)], ids=["8", "4"])
def test_a_pair_with_such_a_target_is_saved_and_read_back(config: PackedConfig, tmp_path: Path) -> None:
    """To the bit, from the pair's folder and from the target's, again and again; another quantization can be asked for."""
    original = llama(tmp_path / "original")
    name, ids = str(tmp_path / "original"), torch.arange(8)[None]
    pair = AssistedModelForCausalLM.from_pretrained(name, draft="suffix", quantization_config=config)
    expected = pair.target(ids).logits
    assert not torch.equal(expected, original(ids).logits)
    pair.save_pretrained(tmp_path / "once")
    AssistedModelForCausalLM.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "twice")
    for folder in ("once", "once/target", "twice"):
        again = AssistedModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(again.target(ids).logits, expected)
        assert again.target.config.quantization_config.to_dict() == pair.target.config.quantization_config.to_dict()
        assert again.generate(ids, **CALL).tolist() == pair.generate(ids, **CALL).tolist()
    with torch.no_grad():
        pair.target.model.norm.weight.add_(1)
    with pytest.raises(
        ValueError, match="target: its quantized weights cannot be saved, and those that they were made"
    ):
        pair.save_pretrained(tmp_path / "changed")
    other = AssistedModelForCausalLM.from_pretrained(tmp_path / "once", quantization_config=PackedConfig(4))
    assert other.target.config.quantization_config.bits == 4
    assert {m.input_bits for m in other.target.modules() if isinstance(m, LowBitLinear)} == {16}


def test_inputs_keep_their_bits_without_the_products_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "no C compiler was found"))
    llama(tmp_path)
    warned: list[str] = []
    monkeypatch.setattr(logging.get_logger("assisted.loading.packed"), "warning_once", warned.append)
    model = load_quantized(str(tmp_path), "int4-int8")
    assert warned == [
        "input_bits: inputs keep 16 bits, because the products in C do not run here: no C compiler was found"
    ]
    assert {module.input_bits for module in model.modules() if isinstance(module, LowBitLinear)} == {16}
