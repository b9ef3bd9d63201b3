"""Packed products are the modules' own, for any number of columns."""

import copy

import pytest
import torch
from pairs import CALL, pair, prompt
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from assisted import AssistedModelForCausalLM
from assisted.engine import trust
from assisted.fast import native, products
from assisted.fast.products import PackedLinear, Product, may_copy, packs

TYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2**-6}


def linear(inner: int, outer: int, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(inner + outer)
    return nn.Linear(inner, outer, bias=bias).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide", [1, 10**9])
@pytest.mark.parametrize("large", [1, 10**9])
def test_products_are_the_modules_own(dtype, bias, wide, large, monkeypatch):
    if not packs(dtype):
        pytest.skip("this processor does not multiply the type")
    monkeypatch.setattr(products, "_WIDE", wide)
    monkeypatch.setattr(products, "_LARGE", large)
    modules = [linear(48, outer, bias, dtype) for outer in (64, 16, 16)]
    together, alone = Product(modules, True), Product(modules[:1], True)
    for shape in ((1,), (2,), (3,), (4,), (33,), (2, 1), (1, 3), (2, 20)):
        inputs = torch.randn(*shape, 48).to(dtype)
        expected = torch.cat([module(inputs) for module in modules], -1)
        assert torch.allclose(together(inputs), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
        assert torch.allclose(alone(inputs), modules[0](inputs), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
        packed = PackedLinear.of(modules[0])(inputs)
        assert torch.allclose(packed, modules[0](inputs), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_a_packed_module_is_the_module_in_everything_else():
    module = linear(512, 512, True)
    other = PackedLinear.of(module)
    assert PackedLinear.gains(module) and not PackedLinear.gains(linear(8, 8)) and not PackedLinear.gains(other)
    assert isinstance(other, nn.Linear) and other.weight is module.weight and other.bias is module.bias
    assert (other.in_features, other.out_features) == (512, 512)
    with pytest.raises(RuntimeError, match="dtype"):  # torch's own words
        other(torch.zeros(1, 512, dtype=torch.float64))


def test_what_is_not_copied():
    assert may_copy([torch.zeros(4, 4)])
    assert not may_copy([torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float16)])
    assert not may_copy([torch.zeros(4, 4, device="meta")])


def test_copies_need_room(monkeypatch):
    monkeypatch.setattr(products, "_ALWAYS", 0)
    for free, fits in ((0, False), (4 * 64 - 1, False), (4 * 64, True)):
        monkeypatch.setattr(products, "free_memory", lambda free=free: free)
        assert may_copy([torch.zeros(4, 4)]) == fits


class Widths(TorchDispatchMode):
    """Notes the shapes of weights and numbers of columns that oneDNN is asked for: it keeps something for each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, int, int]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.mkldnn._linear_pointwise.default:
            inputs = args[0]
            self.seen.add((inputs.shape[:-1].numel(), inputs.shape[-1], found.shape[-1]))
        return found


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernels_are_few_whatever_is_multiplied(dtype, monkeypatch):
    if not packs(dtype):
        pytest.skip("this processor does not multiply the type")
    monkeypatch.setattr(products, "_WIDE", 1)
    monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "of the test"))
    modules = [linear(32, 64, dtype=dtype), linear(32, 16, dtype=dtype)]
    together, packed = Product(modules, True), PackedLinear.of(modules[0])
    with Widths() as widths:
        for columns in (*range(1, 80), *range(80, 5000, 67)):
            inputs = torch.randn(columns, 32).to(dtype)
            assert torch.allclose(packed(inputs), modules[0](inputs), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
            together(inputs[None])
    assert 0 < len({columns for columns, *_ in widths.seen}) <= 32


def test_kernels_are_few_over_calls_of_all_shapes(monkeypatch):
    monkeypatch.setattr(products, "_WIDE", 1)
    monkeypatch.setattr(trust, "active_modes", list)  # this one only counts
    target, _ = pair()
    model = AssistedModelForCausalLM.from_models(copy.deepcopy(target), "suffix")
    with Widths() as widths:
        for call in range(24):
            inputs = prompt(1 + call % 5, 13 + 5 * call, seed=call)
            model.generate(
                inputs.pop("ids"),
                **inputs,
                **CALL | {"max_new_tokens": 4},
                draft_length=1 + call % 9 if call % 2 else None,
            )
    assert 0 < len({columns for columns, *_ in widths.seen}) <= 32
