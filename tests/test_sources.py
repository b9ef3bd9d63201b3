"""What a faster copy was made from is compared at every call: no edit of a model goes unseen, whatever it leaves in place."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from architectures import build, half_right, random_ids
from fuzz.edits import EDITS as FUZZED
from pairs import BY_NAME
from test_trust import ROLLED, Dynamic, derived
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from assisted import AssistedModelForCausalLM
from assisted.engine.hooks import has_hooks
from assisted.fast import fused, native, products, sources
from assisted.fast.sources import Modules, Weights

CALL = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def data_columns(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data[:, torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))]


def data_rectangle(model: Any) -> None:
    """Two columns trade places in two rows, and back in two others: sums of rows and of columns stay."""
    weight = model.lm_head.weight
    weight.data[::2, :16] = weight.data[::2, :16].flip(1)
    weight.data[1::2, :16] = weight.data[1::2, :16].flip(1)


def longer_context(model: Any) -> None:
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
    model.model.rotary_emb = LlamaRotaryEmbedding(config)


def angle_scaling(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.3


def swapped_modules(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def swapped_layers(model: Any) -> None:
    one, two = model.model.layers
    one.self_attn, two.self_attn = two.self_attn, one.self_attn
    one.self_attn.layer_idx, two.self_attn.layer_idx = 0, 1


def own_angles(model: Any) -> None:
    model.model.rotary_emb = Dynamic(300)


def other_class(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = derived(type(mlp))


def whole_forward(model: Any) -> None:
    model.__class__ = derived(type(model), ROLLED)


def of_the_fuzzer(name: str) -> Callable[[Any], None]:
    @functools.wraps(FUZZED[name])
    def edit(model: Any) -> None:
        FUZZED[name](model, random.Random(1))

    return edit


EDITS: list[Callable[[Any], None]] = [
    *map(of_the_fuzzer, ("data_copy_flip", "norms", "inv_freq", "scaling", "epsilon", "act_fn")),
    *(data_columns, data_rectangle, longer_context, own_angles, angle_scaling, swapped_modules, swapped_layers),
    *(other_class, whole_forward),
]


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _louder(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def _turned_less(q: Any, k: Any, *args: Any, **kwargs: Any) -> Any:
    return q, k


PATCHES = {
    "a norm's class": (LlamaRMSNorm, "forward", _louder(LlamaRMSNorm.forward)),
    "a function of the layers' code": (modeling_llama, "apply_rotary_pos_emb", _turned_less),
    "a function that this one calls": (modeling_llama, "rotate_half", lambda x: x),
    "the attention function": (
        modeling_llama.ALL_ATTENTION_FUNCTIONS,
        "_global_mapping",
        modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping
        | {"sdpa": lambda *args, scaling, **kwargs: sdpa_attention_forward(*args, scaling=0.2 * scaling, **kwargs)},
    ),
    "linear modules": (nn.Linear, "forward", _louder(nn.Linear.forward)),
    "linear products": (torch.nn.functional, "linear", _louder(torch.nn.functional.linear)),
}


def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, AssistedModelForCausalLM, torch.Tensor]:
    monkeypatch.setattr(products, "_WIDE", 1)
    target = build(BY_NAME["llama"])
    return target, AssistedModelForCausalLM.from_models(target, draft=half_right(target)), random_ids(target, 2, 9)


def texts(target: Any, model: AssistedModelForCausalLM, ids: torch.Tensor) -> tuple[list[Any], list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return (
            target.generate(ids, attention_mask=torch.ones_like(ids), **CALL).tolist(),
            model.generate(ids, attention_mask=torch.ones_like(ids), draft_length=3, **CALL).tolist(),
        )


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@torch.no_grad()
def test_an_edited_model_is_run_as_it_is_now(edit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    target, model, ids = pair(monkeypatch)
    before, assisted = texts(target, model, ids)
    assert assisted == before and fused.fused(target).module is not target
    edit(target)
    plain, assisted = texts(target, model, ids)
    assert plain != before  # or the edit would prove nothing
    assert assisted == plain


@torch.no_grad()
def test_a_packed_model_is_run_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_WIDE", 1)
    target = build(BY_NAME["gemma"])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    ids = random_ids(target, 2, 9)
    before, assisted = texts(target, model, ids)
    assert assisted == before and fused.fused(target).module is not target
    weight = target.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.flip(0)
    plain, assisted = texts(target, model, ids)
    assert plain != before and assisted == plain
    with patched(nn.Linear, "forward", _louder(nn.Linear.forward)):
        plain, assisted = texts(target, model, ids)
        assert plain != before and assisted == plain


@torch.no_grad()
def test_hooks_on_all_modules_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model, ids = pair(monkeypatch)
    before, _ = texts(target, model, ids)

    def louder(module: nn.Module, args: Any, output: Any) -> Any:
        return 3 * output if isinstance(module, LlamaRMSNorm) else output

    handle = nn.modules.module.register_module_forward_hook(louder)
    try:
        assert has_hooks(target)
        plain, assisted = texts(target, model, ids)
    finally:
        handle.remove()
    assert plain != before and assisted == plain


@torch.no_grad()
def test_within_autocast_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    target, model, ids = pair(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.fused(target).module is target
        model.generate(ids, draft_length=3, **CALL)
    assert fused.fused(target).module is not target


@pytest.fixture(params=[True, False], ids=["in C", "in torch"])
def hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(native, "loaded", lambda dtype: (None, ""))
    elif not native.is_available():
        pytest.skip("nothing runs in C here")


@pytest.mark.usefixtures("hashed")
def test_a_change_anywhere_in_a_large_matrix_is_noticed() -> None:
    """Which is hashed in several parts, the last of which is shorter, also than a step."""
    weight = torch.zeros(3, 2**16 + 5)
    before = Weights.of([weight], True)
    for place in (0, 7, 2**16 - 1, 2**16, 2**17 + 3, weight.numel() - 1):
        weight.view(-1)[place] = 1e-30
        assert not before.same(Weights.of([weight], True))
        weight.view(-1)[place] = 0
    assert before.same(Weights.of([weight], True))
    assert not before.same(Weights.of([weight[:, :-1]], True))


@pytest.mark.usefixtures("hashed")
def test_changes_are_noticed() -> None:
    weights = [torch.randn(96, 200), torch.randn(200), torch.randn(40, 16), torch.randn(30, 37), torch.randn(300, 64).T]
    weights += [torch.randn(1, 9).T, torch.randn(9, 2)[:, 0].clone()]
    weights += [torch.randn(5, 7).bfloat16(), torch.randn(3, 4, 6), torch.tensor(2.0), torch.eye(16), torch.arange(9)]
    before = Weights.of(weights, True)
    assert before.same(Weights.of(weights, True))
    assert not before.same(Weights.of([weights[0].clone(), *weights[1:]], True))  # another tensor
    assert not before.same(Weights.of(weights, False))
    for weight in weights:
        flat = (weight if weight.is_contiguous() else weight.T).data.view(-1)
        for place in range(0, flat.numel(), 1 + flat.numel() // 100):
            kept = flat[place].clone()
            flat[place] += 1  # unseen by version counters
            assert not before.same(Weights.of(weights, True))
            flat[place] = kept
            assert before.same(Weights.of(weights, True))


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("shape", [(64, 48), (48,), (3, 8, 6), (31, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_entries_that_trade_places_are_noticed(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    before = Weights.of([weight], True)
    flat = weight.view(-1)
    for _ in range(200):
        one, two = torch.randint(flat.numel(), (2,), generator=generator).tolist()
        if flat[one] == flat[two]:
            continue
        flat[[one, two]] = flat[[two, one]]
        assert not before.same(Weights.of([weight], True))
        flat[[one, two]] = flat[[two, one]]
        assert before.same(Weights.of([weight], True))


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_trade_places_are_noticed_where_all_entries_are_alike(dtype: torch.dtype) -> None:
    """Rows and columns of permutations have the same sums; opposite numbers differ in a single bit."""
    for weight in (torch.eye(48)[torch.randperm(48)], torch.randn(48, 1).sign().repeat(1, 48)):
        weight = weight.to(dtype)
        before = Weights.of([weight], True)
        for one, two in torch.combinations(torch.arange(48)).tolist():
            if torch.equal(weight[one], weight[two]):
                continue
            weight.data[[one, two]] = weight.data[[two, one]]
            assert not before.same(Weights.of([weight], True))
            weight.data[[one, two]] = weight.data[[two, one]]


@pytest.mark.usefixtures("hashed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_entries_that_leave_the_sums_of_rows_and_columns_are_noticed(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=generator).to(dtype)
    for _ in range(100):
        row, other = torch.randperm(64, generator=generator)[:2].tolist()
        column, further = torch.randperm(48, generator=generator)[:2].tolist()
        corners = [row, row, other, other], [column, further, column, further]
        weight.data[corners] = torch.tensor([1.5, -0.25, -0.25, 1.5], dtype=dtype)
        before = Weights.of([weight], True)
        weight.data[corners] = torch.tensor([-0.25, 1.5, 1.5, -0.25], dtype=dtype)
        assert not before.same(Weights.of([weight], True))


def test_values_that_their_owner_keeps_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = build(BY_NAME["llama"]), list[int]()
    own = sources.checksum
    monkeypatch.setattr(sources, "checksum", lambda tensor: (read.append(tensor.numel()), own(tensor))[1])
    sources.keep_steady([model])
    first = Weights.of(model.parameters(), True)
    assert len(read) == len(first.tensors)
    model.lm_head.weight.data[0, 0] += 1
    again = Weights.of(model.parameters(), True)
    assert first.same(again) and len(read) == len(first.tensors)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert not first.same(Weights.of(model.parameters(), True)) and len(read) == len(first.tensors) + 1


def test_attributes_are_compared_by_what_they_are() -> None:
    module = nn.LayerNorm(4)
    module.extra = torch.zeros(3)
    before = Modules.of([module])
    assert before.same(Modules.of([module]))
    module.extra = torch.zeros(3)  # another one, which nobody may ask whether it is equal
    assert not before.same(Modules.of([module]))


def test_no_model_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_WIDE", 1)
    for name in ("llama", "gemma"):
        model = build(BY_NAME[name])
        assert fused.fused(model).module is not model
        layers = weakref.ref(model.model.layers)
        del model
        gc.collect()
        assert layers() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(5, 8), (3, 7), (1, 1), (4, 1)])
def test_every_changed_number_changes_the_checksum_that_other_devices_take(dtype: torch.dtype, shape: Any) -> None:
    tensor = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)

    def checksum() -> torch.Tensor:
        return sources._checksum_by_parts(tensor)

    before = checksum()
    for row in range(shape[0]):
        for column in range(shape[1]):
            old = tensor[row, column].clone()
            tensor[row, column] += 1
            assert not torch.equal(checksum(), before)
            tensor[row, column] = old
    assert torch.equal(checksum(), before)
    if shape[1] > 1:
        swapped = tensor.flip(1).contiguous()
        assert not torch.equal(sources._checksum_by_parts(swapped), before)
