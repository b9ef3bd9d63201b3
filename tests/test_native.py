"""The kernels in C: products and layers are the model's own, and a column has the same bits whatever else is computed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import torch.nn.functional as F
from conftest import PROCESSORS
from covering import in_turns
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.engine.agreement import agree
from assisted.engine.cache import SlotCache
from assisted.engine.needs import Needs
from assisted.engine.parts import find_layers
from assisted.engine.prepared import one_by_one, through_all
from assisted.engine.runner import CachedModel
from assisted.engine.session import go_on
from assisted.engine.traits import Traits
from assisted.fast import fused, native, products
from assisted.fast.low_bit import NativeLinear, low_bit
from assisted.loading.packed import PackedConfig
from assisted.loading.quantization import quantize_copy

needed = pytest.mark.skipif(not native.is_available(), reason=native.loaded()[1])
SIZES = {"vocab_size": 320, "num_hidden_layers": 2, "max_position_embeddings": 512}
LLAMA = LlamaConfig(
    hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **SIZES
)
CONFIGS: dict[str, Any] = {
    "grouped": LLAMA,
    "one key head of five": LlamaConfig(
        hidden_size=320, intermediate_size=128, num_attention_heads=5, num_key_value_heads=1, head_dim=64, **SIZES
    ),
    "wide heads, biases": Qwen2Config(
        hidden_size=256, intermediate_size=320, num_attention_heads=2, num_key_value_heads=2, **SIZES
    ),
    "norms of heads": Qwen3Config(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=96, **SIZES
    ),
}
WEIGHTS = {bits: PackedConfig(int(bits), input_bits=given) for bits, given in ((8, 16), (8.8, 8), (4, 16), (4.8, 8))}
IN_PLACE = 32.5, 16.5
# 32: everything in float32; 32.5 and 16.5: weights are read where the model has them; 8.8 and 4.8: inputs of 8 bits, too
BITS = [32, 16, *IN_PLACE, 8, 8.8, 4, 4.8]
KINDS = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
# of a row that has read seven tokens: the last of them, and five nodes
PARENTS = torch.tensor([[-1, 0, 0, -1, 3]])


def of_weight(module: nn.Linear, bits: float) -> native.NativeProduct:
    """The product with a weight of 16 or 32 bits."""
    weight = F.pad(module.weight, (0, -module.in_features % native.GROUP))
    parts = [weight[:17], weight[17:]] if bits in IN_PLACE else native.packed(weight)
    return native.NativeProduct(parts, weight.shape[1], int(bits))


@pytest.fixture(autouse=True)
def _too_large_for_copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    given = getattr(request.node, "callspec", None)
    if given is not None and given.params.get("bits") in IN_PLACE:
        monkeypatch.setattr(fused, "may_copy", lambda parameters: False)


PRODUCTS: dict[float, Any] = {
    16: lambda module: of_weight(module, 16),
    16.5: lambda module: of_weight(module, 16.5),
    8: lambda module: low_bit(module, 8, 16).native_product,
    8.8: lambda module: low_bit(module, 8, 8).native_product,
    4: lambda module: low_bit(module, 4, 16).native_product,
    4.8: lambda module: low_bit(module, 4, 8).native_product,
}


def with_own_epsilons(module: nn.Module) -> Any:
    """The same module, in which no norm has the epsilon of the norms around it."""
    for at, part in enumerate(module.modules()):
        for name in {"variance_epsilon", "eps"} & vars(part).keys():
            setattr(part, name, 10.0 ** -(2 + at % 3))
    return module


def built(name: str, bits: float = 16) -> Any:
    config = copy.deepcopy(CONFIGS[name])
    torch.manual_seed(0)
    model = KINDS[config.model_type](config).eval()
    for name_, parameter in model.named_parameters():  # norms and biases that matter
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name_ else 0.0, 0.2)
    with_own_epsilons(model)
    model = model if bits >= 32 else model.to(torch.bfloat16)
    return model if bits >= 16 else quantize_copy(model, WEIGHTS[bits])


def ids_of(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 300, (rows, count), generator=torch.Generator().manual_seed(seed))


def runner(model: Any, rows: int = 1) -> CachedModel:
    return CachedModel(
        model, SlotCache(rows, 256), Traits.of(model.module if hasattr(model, "module") else model).masks
    )


@needed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 40), (192, 576), (576, 192), (320, 96), (64, 4704)])
@torch.no_grad()
def test_products(bits: float, outputs: int, inputs: int) -> None:
    """Compared in float64 with the weight that the product's own columns of the unit matrix show."""
    torch.manual_seed(1)
    dtype = torch.float32 if bits >= 32 else torch.bfloat16
    module = nn.Linear(inputs, outputs, bias=False).to(dtype)
    columns = F.pad(torch.randn(21, inputs), (0, -inputs % 32)).to(dtype)
    turned = copy.deepcopy(module)  # whose weight lies the other way around
    turned.weight.data = turned.weight.data.t().contiguous().t()
    if bits >= 16:
        product, weight = of_weight(module, bits), module.weight
    else:
        low = low_bit(module, int(bits), 16 if bits in (8, 4) else 8)
        assert isinstance(low, NativeLinear) and low.input_bits == (16 if bits in (8, 4) else 8)
        product, weight = low.native_product, low(torch.eye(inputs, dtype=torch.bfloat16)).t()
        assert (weight.double() - module.weight.double()).norm() < (
            0.01 if bits >= 8 else 0.1
        ) * module.weight.double().norm()
    made = product(columns)[:, :outputs].double()
    read = columns.double()
    if bits in (8.8, 4.8):  # a scale for each 32 inputs
        steps = read.view(21, -1, 32).abs().amax(-1, keepdim=True) / 127
        read = ((read.view(21, -1, 32) / steps).round() * steps).view(21, -1)
    expected = read[:, :inputs] @ weight.double().t()
    # a weight of 4 bits that is shown has been rounded to bfloat16
    near = 2**-6 if bits < 32 else 2**-20 if inputs < 1000 else 2**-18
    assert (made - expected).abs().max() < near * expected.abs().max()
    for some in range(1, 21):
        assert torch.equal(product(columns[:some].contiguous())[:, :outputs].double(), made[:some])
        assert torch.equal(product(columns[some:].contiguous())[:, :outputs].double(), made[some:])
    many = columns.repeat(14, 1)[:289]  # more than are computed together
    assert torch.equal(product(many)[:, :outputs].double(), made.repeat(14, 1)[:289])
    if bits in IN_PLACE:
        with pytest.raises(ValueError, match="rows"):
            native.NativeProduct([module.weight.t()], outputs, int(bits))
        return
    again = of_weight(turned, bits) if bits >= 16 else PRODUCTS[bits](turned)
    assert torch.equal(again(columns)[:, :outputs].double(), made)


@needed
@pytest.mark.skipif("amx_int8" not in native.processor_flags(), reason="this processor has no AMX")
@pytest.mark.parametrize("bits", [16, 16.5, 8, 8.8, 4, 4.8])
@torch.no_grad()
def test_without_tiles(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system that grants no tiles."""
    model, ids = built("grouped", bits), ids_of(40)
    run_, path = runner(fused.fused(model)), ids_of(6, seed=1)
    module = nn.Linear(96, 64, bias=False).to(torch.bfloat16)
    columns = torch.randn(21, 96).to(torch.bfloat16)
    product = PRODUCTS[bits](module)
    made = [torch.cat([run_.prefill(ids, None), run_(path)], 1), product(columns)]
    flags = native.processor_flags() - {"amx_int8"}
    monkeypatch.setattr(native, "processor_flags", lambda: flags)
    native.loaded.cache_clear()
    try:
        assert not hasattr(native.loaded()[0], "may_use_tiles")
        run_ = runner(fused.fused(model))
        found = [torch.cat([run_.prefill(ids, None), run_(path)], 1), product(columns)]
    finally:
        native.loaded.cache_clear()
    assert agree(found[0], made[0], torch.bfloat16) and agree(found[1], made[1], torch.bfloat16)
    assert bits not in (8.8, 4.8) or torch.equal(found[1], made[1])


def test_the_library_of_float32_is_asked_for_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none on processors with AMX, either."""
    library, flags = object(), {name for names in native.PROCESSORS for name in names}
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "processor_flags", lambda: flags)
    monkeypatch.setattr(native, "prebuilt_or_compiled", lambda variant: (library, ""))
    monkeypatch.setattr(native, "declared", lambda library: library)
    monkeypatch.setattr(native, "ready", {})
    native.loaded.cache_clear()
    try:
        assert native.loaded(torch.float32) == (library, "")
    finally:
        native.loaded.cache_clear()


@needed
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bits", BITS)
def test_products_of_other_processors(bits: float) -> None:
    test_products(bits, 192, 160)
    if bits in IN_PLACE:  # many inputs are read in parts, and more columns do not stay in the first cache
        test_products(bits, 64, 4704)


@needed
@pytest.mark.parametrize("bits", [8.8, 4.8])
@torch.no_grad()
def test_integer_products_have_the_same_bits_on_all_processors(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    module, columns = nn.Linear(160, 70, bias=False), torch.randn(9, 160).to(torch.bfloat16)
    columns[3] *= 1000
    columns[5, 32:64] = 0
    made = []
    for names in PROCESSORS.values():
        if "fma" in names and native.processor_flags().issuperset(names):
            monkeypatch.setattr(native, "PROCESSORS", (names,))
            native.loaded.cache_clear()
            made.append(low_bit(module, int(bits), 8)(columns))
    native.loaded.cache_clear()
    assert len(made) > 1 or not native.processor_flags().issuperset(PROCESSORS["AVX512"])
    assert all(torch.equal(one, made[0]) for one in made)


CPUINFO = "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 25\nmodel : {}\nmodel name : AMD EPYC\nflags : {}\n"


@pytest.mark.parametrize("model,direct", [(17, True), (1000, False)], ids=["listed", "unknown"])
def test_the_model_of_the_processor_chooses_the_product(
    model: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AVX512-BF16 without tiles or float32, which round differently: equal machines must not choose by a stopwatch."""
    flags = " ".join(native.PROCESSORS[1])  # AVX512-BF16, without tiles
    monkeypatch.setattr(native, "cpuinfo", lambda: CPUINFO.format(model, flags))
    monkeypatch.setattr(native, "declared", lambda library: library)
    monkeypatch.setattr(native, "compiled", lambda name, flags: (flags, ""))
    monkeypatch.setattr(native, "ready", {})
    assert native.known_of_processor() == ({"direct"} if direct else set())
    assert native.processor_model() == f"AuthenticAMD 25 {model}"
    native.loaded.cache_clear()
    try:
        chosen = native.loaded()[0]
    finally:
        native.loaded.cache_clear()
    assert ("-mavx512bf16" in chosen) == direct and "-mavx512f" in chosen


@needed
@pytest.mark.usefixtures("processor")
@torch.no_grad()
def test_other_processors_round_to_the_nearest_number() -> None:
    """The unit matrix shows it: ties to even, infinities, and what is not a number."""
    numbers = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3e38, 3.4e38, 1e-30, float("inf"), float("-inf")]
    bias = torch.tensor([*numbers, float("nan")])
    product = native.NativeProduct(native.packed(torch.zeros(10, 32, dtype=torch.bfloat16)), 32, 16, bias=bias)
    made = product(torch.zeros(1, 32, dtype=torch.bfloat16))[0, :10]
    assert torch.equal(made[:-1], bias.to(torch.bfloat16)[:-1]) and made[-1].isnan()


@needed
@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_columns_that_lie_apart(bits: float) -> None:
    """The last columns of a batch's rows, from which an output head computes the logits after a prompt."""
    dtype = torch.float32 if bits >= 32 else torch.bfloat16
    module = nn.Linear(64, 64, bias=bits >= 16).to(dtype)
    copied = bits not in IN_PLACE
    run = (
        products.PackedLinear.of(module, copied)
        if bits >= 16
        else low_bit(module, int(bits), 16 if bits in (8, 4) else 8)
    )
    whole = torch.randn(3, 7, 64).to(dtype)
    assert torch.equal(run(whole[:, -1:]), run(whole)[:, -1:])
    joined = products.Product([run] if bits < 16 else [module], copied)
    assert joined.native is not None
    assert torch.equal(joined(whole[:, -1:]), joined(whole)[:, -1:])


@needed
@torch.no_grad()
def test_a_products_bias_is_added_before_rounding() -> None:
    module = nn.Linear(64, 64).to(torch.bfloat16)
    columns = torch.randn(3, 64).to(torch.bfloat16)
    made = native.NativeProduct(native.packed(module.weight), 64, 16, bias=module.bias)(columns)
    expected = (columns.double() @ module.weight.double().t() + module.bias.double()).to(torch.bfloat16)
    assert (made == expected).float().mean() > 0.95  # the others lie between two numbers


@needed
@pytest.mark.parametrize("bits", [8, 8.8, 4, 4.8])
@pytest.mark.parametrize("outputs", [64, 70])
@torch.no_grad()
def test_a_bias_beside_weights_of_low_bits(bits: float, outputs: int) -> None:
    """Of bfloat16, it is added before rounding, for few columns, for many (which take another way) and in compiled code."""
    torch.manual_seed(2)
    module = nn.Linear(64, outputs).to(torch.bfloat16)
    nn.init.normal_(module.bias, 0.0, 50.0)
    low = low_bit(module, int(bits), 16 if bits in (8, 4) else 8)
    bare = copy.deepcopy(low)
    bare.bias = None
    for columns in (3, 90):
        given = torch.randn(columns, 64).to(torch.bfloat16)
        product, found = bare(given).double(), low(given)
        assert (
            found.double() - product - module.bias.double()
        ).abs().max() <= 2**-8 * found.double().abs().max() + 2**-6
        assert (found == (product + module.bias.double()).to(torch.bfloat16)).float().mean() > 0.9
    compiled = torch.compile(low, backend="eager", fullgraph=True)
    assert torch.equal(compiled(given[:3]), low(given[:3]))
    exact = low.float()(given.float())  # in float32 it is added afterwards: the sum would lose too much
    assert torch.equal(exact, bare(given).float() + module.bias.float())


@needed
@pytest.mark.parametrize("bits", [8, 8.8, 4, 4.8])
@pytest.mark.parametrize("copied", [True, False])
@torch.no_grad()
def test_a_bias_that_changes_is_added_as_it_is_now(bits: float, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = built("wide heads, biases", bits), ids_of(12)
    if not copied:  # a model that is too large for copies of its weights
        monkeypatch.setattr(fused, "may_copy", lambda parameters: False)
    before = fused.fused(model).module(input_ids=ids).logits
    model.model.layers[0].self_attn.v_proj.bias.data.neg_()
    found, expected = fused.fused(model).module(input_ids=ids).logits, model(input_ids=ids).logits
    assert agree(found, expected, torch.bfloat16) and not agree(before, expected, torch.bfloat16)


@needed
@pytest.mark.parametrize("bits", IN_PLACE)
@torch.no_grad()
def test_weights_in_place_are_read_as_they_are_now(bits: float) -> None:
    """Without a copy of a matrix; a matrix may be written or replaced, and so may a bias, which is copied."""
    model, ids = built("wide heads, biases", bits), ids_of(12)
    made = fused.fused(model)
    layer = model.model.layers[0]
    assert made.copied == () and all(own.native is not None for own in made.module.model.layers)
    assert fused.fused(model).module.model.layers is made.module.model.layers
    for change in (
        lambda: layer.mlp.up_proj.weight.data.mul_(-1.5),
        lambda: setattr(layer.mlp.down_proj.weight, "data", -layer.mlp.down_proj.weight.data),
        lambda: setattr(layer.self_attn, "o_proj", copy.deepcopy(layer.self_attn.o_proj)),
        lambda: layer.self_attn.o_proj.weight.data.neg_(),
        lambda: layer.self_attn.v_proj.bias.data.neg_(),
        lambda: layer.input_layernorm.weight.data.neg_(),
    ):
        change()
        with torch.no_grad():
            found, expected = fused.fused(model).module(input_ids=ids).logits, model(input_ids=ids).logits
        assert agree(found, expected, model.dtype)
    read = fused.fused(model).module.model.layers[0].native.products[2]
    addresses = {layer.mlp.gate_proj.weight.data_ptr(), layer.mlp.up_proj.weight.data_ptr()}
    assert read.in_place and addresses < set(read.held[-3].tolist())


@needed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_layers_are_the_models(name: str, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(name, bits)
    other = fused.fused(model)
    layers = other.module.model.layers
    assert all(layer.native is not None for layer in layers)
    calls = []
    run = native.NativeLayers.run

    def counted(own: native.NativeLayers, *args: Any, **made: Any) -> None:
        calls.append(len(own.layers))
        run(own, *args, **made)

    monkeypatch.setattr(native.NativeLayers, "run", counted)
    ids, mask = ids_of(9, 2), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    columns, tree = ids_of(6, 2, seed=1), PARENTS.repeat(2, 1)
    found = []
    for one in (fused.PreparedModule(model), other):
        run_ = runner(one, 2)
        logits = [run_.prefill(ids, mask), run_(columns, Draft(columns[:, 1:], torch.tensor([9, 9]), parents=tree))]
        run_.commit([3, 2], [[0, 1, 2], [0, 4]])
        logits.append(run_(ids_of(1, 2, seed=2)))
        run_.commit([1, 1])
        logits.append(run_(ids_of(4, 2, seed=3)))
        found.append(torch.cat(logits, 1))
    # a prompt is read layer by layer, the last one for keys and values, then for one column; other passes are one call
    assert calls == [1, 1, 1, 2, 2, 2]
    assert agree(found[1], found[0], model.dtype)
    if bits >= 32:
        assert torch.allclose(found[1], found[0], atol=2e-6)


@needed
@pytest.mark.parametrize("bits", [32, 16, 16.5, 4.8])
@torch.no_grad()
def test_a_whole_model_is_one_call(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the logits of its parts, to the bit; also beside the same model whose norm after the layers is tapped."""
    model = built("grouped", bits)
    other = fused.fused(model)
    columns, tree = ids_of(6, seed=1), Draft(ids_of(5, seed=2), torch.tensor([5]), parents=PARENTS)

    def read(prepared: Any, needs: Needs) -> list[torch.Tensor]:
        run_ = CachedModel(prepared, SlotCache(1, 64), Traits.of(model).masks, needs)
        run_.prefill(ids_of(9), None)
        found = [run_(columns, tree)]
        run_.commit([2], [[0, 4]])
        found.append(run_(columns[:, :1]))
        return [*found, *(run_.states[number] for number in sorted(needs.states))]

    end = Needs.of_states(model, 1, len(find_layers(model).forms))
    expected = read(replace(other, run_columns=through_all), end)
    calls, products = [], native.NativeProduct.__call__
    monkeypatch.setattr(native.NativeProduct, "__call__", lambda *args: calls.append(0) or products(*args))
    found = read(other, Needs())
    assert len(calls) == 1  # the prompt's logits
    assert all(map(torch.equal, found, expected))
    for _ in range(2):
        again = read(other, end)
        assert len(again) == len(expected) == 4
        assert all(map(torch.equal, again, expected))


@needed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_highest_score_is_the_first_one_that_max_finds(dtype: torch.dtype) -> None:
    native.loaded(dtype)
    torch.manual_seed(0)
    for size in (1, 7, 256, 1000, 50_000):
        scores = torch.randint(-3, 4, (3, 5, size)).to(dtype)  # most are ties
        scores[0, 0] = float("-inf")
        scores[0, 1, size // 2 :] = float("nan")
        scores[1, 0, size // 3 :] = float("inf")
        for one in (scores, scores[:, :, : size - size // 5], scores[0, 0], scores.transpose(0, 1), scores[:0]):
            assert torch.equal(native.top1(one), one.max(-1).indices)
    scores = torch.randn(2, 3000).to(dtype)
    assert torch.equal(native.top1(scores.t()[:2]), scores.t()[:2].max(-1).indices)


@needed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_move_to_earlier_slots(dtype: torch.dtype) -> None:
    native.loaded(dtype)
    stores = [torch.randn(3, 2, 20, 8).to(dtype) for _ in range(4)]
    expected = [store.clone() for store in stores]
    moves = torch.tensor([[0, 0, 2], [5, 6, 1], [6, 9, 4]])
    for store in expected:
        place, target, source = moves
        store[place, :, target] = store[place, :, source]
    assert native.move(stores, moves)
    assert all(map(torch.equal, stores, expected))
    assert not native.move([*stores, torch.randn(3, 2, 20, 4).to(dtype)], moves)  # of other sizes
    assert not native.move([store.transpose(1, 2) for store in stores], moves)
    assert all(map(torch.equal, stores, expected))


@needed
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bits", BITS)
def test_layers_of_other_processors(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    test_layers_are_the_models("norms of heads", bits, monkeypatch)
    test_a_column_has_the_same_bits_alone_in_a_draft_in_a_tree_and_beside_other_rows("norms of heads", bits)
    test_a_prompt_has_the_bits_of_its_tokens_one_by_one("norms of heads", bits, monkeypatch)


def _bits(run_: CachedModel, columns: torch.Tensor, draft: Draft | None = None) -> torch.Tensor:
    found = run_(columns, draft)
    run_.commit([0] * len(columns))
    return found


@needed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_column_has_the_same_bits_alone_in_a_draft_in_a_tree_and_beside_other_rows(name: str, bits: float) -> None:
    model = fused.fused(built(name, bits))
    # three rows of it are few enough columns for the kernels in C on processors with AMX, too
    ids, path = ids_of(20), ids_of(6, seed=1)
    one = runner(model)
    one.prefill(ids, None)
    alone = []
    for column in path.split(1, 1):
        alone.append(one(column))
        one.commit([1])
    expected = torch.cat(alone, 1)

    several = runner(model)
    several.prefill(ids, None)
    for width in range(1, 7):  # a draft of any length
        assert torch.equal(_bits(several, path[:, :width]), expected[:, :width])
    # the same path among nodes of others, whose slots lie between
    others = ids_of(4, seed=5)[0].tolist()
    nodes = [path[0, 0], others[0], path[0, 1], others[1], others[2], path[0, 2], others[3], path[0, 3]]
    parents = torch.tensor([[-1, -1, 1, -1, 1, 4, 4]])
    found = _bits(several, torch.tensor([nodes]), Draft(torch.tensor([nodes[1:]]), torch.tensor([20]), parents=parents))
    assert torch.equal(found[:, [0, 2, 5, 7]], expected[:, :4])

    batch = runner(model, 3)  # rows of other lengths beside it
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, :9] = mask[2, :3] = 0
    batch.prefill(torch.cat([ids_of(20, seed=7), ids, ids_of(20, seed=8)]), mask)
    rows = torch.cat([ids_of(6, seed=9), path, ids_of(6, seed=10)])
    lone = runner(model)
    lone.prefill(ids, None)
    assert torch.equal(_bits(batch, rows)[1:2], expected)


@needed
@pytest.mark.parametrize("bits,name", in_turns(BITS, list(CONFIGS)))
@torch.no_grad()
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    name: str, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever pieces it is read: at once, after a past, or a few columns at a time."""
    model, ids = fused.fused(built(name, bits)), ids_of(23)
    single = runner(model)
    single.prefill(ids[:, :1], None)
    for column in ids[:, 1:].split(1, 1):
        single(column)
        single.commit([1])

    def read(first: int, rows: int = 1) -> CachedModel:
        run_, mask = runner(model, rows), torch.ones(rows, 23, dtype=torch.int64)
        text = ids if rows == 1 else torch.cat([ids_of(23, seed=3), ids])
        mask[: rows - 1, :5] = 0
        if first == 23:
            run_.prefill(text, mask)
            return run_
        run_.prefill(text[:, :first], None)
        go_on(run_.cache, first, 256)
        run_.prefill(text[:, first:], None)
        return run_

    expected = [store[:, :, :23] for store in single.cache.stores]
    ways = [read(23), read(23, 2), read(9)]
    monkeypatch.setattr(native, "AT_ONCE", 4)
    ways += [read(23), read(23, 2), read(9)]
    for way in ways:
        found = [store[-1:, :, :23] for store in way.cache.stores]
        assert all(map(torch.equal, found, expected))


@needed
@torch.no_grad()
def test_taps_keep_the_layers_of_one_call() -> None:
    model, ids = built("grouped", 4), ids_of(9)
    needs = Needs(find_layers(model), frozenset({1, 2}))
    one, other = (
        CachedModel(part, SlotCache(1, 64), Traits.of(model).masks, needs)
        for part in (fused.fused(model), replace(fused.fused(model), run_layers=one_by_one))
    )
    for run_ in (one, other):
        run_.prefill(ids, None)
        run_(ids_of(3, seed=1), Draft(ids_of(3, seed=1)[:, 1:], torch.tensor([2])))
    for end in (1, 2):
        assert torch.equal(one.prepared.taps[end].hidden, other.prepared.taps[end].hidden)
        assert one.prepared.taps[end].hidden.shape[1] == 3


ALONE = """
import json, sys, warnings
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from assisted import AssistedModelForCausalLM
from assisted.fast import native
told, config = [], LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=2, num_hidden_layers=1, vocab_size=99)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for dtype in (torch.bfloat16, torch.float32):
        model = LlamaForCausalLM(config).to(dtype).eval()
        for fast in ("eager", "auto", "auto"):
            pair = AssistedModelForCausalLM.from_models(model, draft="suffix", fast=fast)
            pair.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
            told.append(list(pair.report.warnings))
print(json.dumps([native.loaded()[1], told, [str(one.message) for one in seen]]))
"""


@pytest.mark.parametrize("setting", ["no compiler", "off", "no folder"])
def test_whoever_lacks_kernels_is_warned_once(setting: str, tmp_path: Path) -> None:
    given = {"no compiler": {"PATH": "", "CC": ""}, "off": {native.VARIABLE: "0"}}.get(setting, {})
    if setting == "no folder":  # the first one can't be, and the second one may be everybody's
        (tmp_path / f"assisted-{os.getuid()}").mkdir()
        (tmp_path / f"assisted-{os.getuid()}").chmod(0o777)
        (tmp_path / "file").write_text("")
        given = {native.VARIABLE: str(tmp_path / "file" / "folder"), "TMPDIR": str(tmp_path)}
    reason, told, warned = json.loads(fresh.run(ALONE, **given).stdout.splitlines()[-1])
    about = [one for one in warned if one.startswith(native.LACKING)]
    if setting == "off":
        assert reason == "ASSISTED_KERNELS is 0" and not about and not any(told)
    else:
        assert len(about) == 1 and about[0].startswith(
            f"{native.LACKING}, so {native.COST}: {reason}. {native.VARIABLE}=0 "
        )
        assert told == [[], about, about] * 2  # nothing for those that are eager


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is loaded, compiled or failed yet. The folder of temporary files."""
    monkeypatch.setattr(native, "too_slow", set())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(native.VARIABLE, str(tmp_path / "kept"))
    native.loaded.cache_clear()
    yield tmp_path
    native.loaded.cache_clear()


WITHOUT: dict[str, tuple[dict[str, str], str]] = {
    "no compiler": (
        {"PATH": "", "CC": ""},
        "no C compiler was found; install a C compiler (Debian and Ubuntu: apt install gcc",
    ),
    "no such compiler": ({"CC": "nowhere-cc -O1"}, "CC names nowhere-cc -O1, which is not here; install"),
    "a broken compiler": ({"CC": "false"}, "false failed (Command"),
    "one that says why": (
        {"CC": "SCRIPT"},
        "SCRIPT failed (a.c:1: fatal error: stdlib.h: No such file); install a C compiler",
    ),
    "a slow compiler": ({"seconds": "0.001"}, "took longer than 0.001 s; the next process tries it again"),
    "another system": ({"system": "Darwin"}, "they are for Linux on x86-64 and 64-bit ARM, and this is Darwin on"),
    "another processor": ({"machine": "riscv64"}, "64-bit ARM, and this is Linux on riscv64"),
    "an old processor": ({"flags": ""}, "they need AVX2 or AVX512, which this processor does not have"),
}


@pytest.mark.parametrize("setting", WITHOUT)
def test_why_there_are_no_kernels(setting: str, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, why = WITHOUT[setting]
    script, calls = anew / "cc", []
    script.write_text(
        "#!/bin/sh\necho 'a.c:1: fatal error: stdlib.h: No such file' >&2; echo compilation terminated. >&2; exit 1"
    )
    script.chmod(0o755)
    for name in given.keys() & {"PATH", "CC"}:
        monkeypatch.setenv(name, given[name].replace("SCRIPT", str(script)))
    for name in given.keys() & {"system", "machine"}:
        monkeypatch.setattr(native.platform, name, lambda value=given[name]: value)
    if "flags" in given:
        monkeypatch.setattr(native, "processor_flags", set)
    if "seconds" in given:
        monkeypatch.setattr(native, "SECONDS", float(given["seconds"]))
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **more: (calls.append(args), run(*args, **more))[1])
    for dtype in native.DTYPES:
        library, reason = native.loaded(dtype)
        assert library is None and why.replace("SCRIPT", str(script)) in reason, reason
    if setting == "a slow compiler":  # a process waits for it once
        assert len(calls) == 1 and not list((anew / "kept").iterdir())


@needed
@pytest.mark.parametrize("setting", ["a file in the way", "no home"])
def test_where_the_folder_cannot_be_written_another_one_is_taken(
    setting: str, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (anew / "file").write_text("")
    monkeypatch.setenv(native.VARIABLE, str(anew / "file" / "folder"))
    if setting == "no home":
        for name, value in ((native.VARIABLE, ""), ("XDG_CACHE_HOME", ""), ("HOME", "/proc/nowhere")):
            monkeypatch.setenv(name, value)
    flags, own = ("-O0", "-shared", "-fPIC", "-fopenmp", "-mavx2", "-mfma"), anew / f"assisted-{os.getuid()}"
    assert native.compiled("native.c", flags)[1] == "" and native.folder() == own
    (file,) = own.glob("native-*.so")
    assert own.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o755
    # nothing is loaded from where others may have put it, and nothing is compiled into it
    own.chmod(0o777)
    assert (
        f"{own} is not a folder of this user alone); name one in {native.VARIABLE}"
        in native.compiled("native.c", flags)[1]
    )
    own.rename(anew / "elsewhere")
    (anew / "elsewhere").chmod(0o700)
    own.symlink_to(anew / "elsewhere")
    assert f"{own} is not a folder of this user alone" in native.compiled("native.c", flags)[1]


@needed
def test_a_library_that_others_can_write_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(native.VARIABLE, str(tmp_path))
    flags = ("-O0", "-shared", "-fPIC", "-fopenmp", "-mavx2", "-mfma")
    assert native.compiled("native.c", flags)[1] == ""
    (file,) = tmp_path.glob("native-*.so")
    file.unlink()  # another file of that name: this process still runs the first one
    file.write_bytes(b"no library")
    file.chmod(0o777)
    assert native.compiled("native.c", flags)[1] == "" and file.stat().st_mode & 0o777 == 0o755


def test_a_model_without_use_for_kernels_lacks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "no C compiler was found"))
    model = built("grouped")
    assert fused.why_not_in_c(model, False) == "no C compiler was found" == fused.why_not_in_c(model.half(), True)
    assert fused.why_not_in_c(model.half(), False) == "" == fused.why_not_in_c(model.double(), False)
    narrow = LlamaForCausalLM(LlamaConfig(hidden_size=40, intermediate_size=72, num_attention_heads=2, **SIZES))
    assert fused.why_not_in_c(narrow, False) == "" == fused.why_not_in_c(built("grouped").to("meta"), False)


@needed
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["grouped", "wide heads, biases"])
def test_text_of_a_pair(name: str, bits: float) -> None:
    target = built(name, bits)
    pair = AssistedModelForCausalLM.from_models(target, draft="suffix")
    ids = ids_of(20, 2)
    made = [pair.generate(ids, max_new_tokens=24, do_sample=False, draft_length=length) for length in (1, 3, 7)]
    assert all(torch.equal(made[0], other) for other in made)
    if bits >= 32:
        assert torch.equal(made[0], target.generate(ids, max_new_tokens=24, do_sample=False))
