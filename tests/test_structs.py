"""What crosses into C: wrong tensors and ids raise errors where C would read other memory; structs are as C lays them out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import RECURRENT, build, random_ids
from eagle_heads import random_head, trained_head
from mtp_heads import random_mtp
from pairs import CALL
from test_delta import WIDE
from test_native import LLAMA, built, needed
from torch import nn
from transformers import LlamaForCausalLM

from assisted import MTP, AssistedModelForCausalLM, Eagle
from assisted.engine.cache import SlotCache
from assisted.fast import fused, native, structs
from assisted.fast.head_steps import Shape
from assisted.fast.norms import Norm
from assisted.fast.structs import OtherLayout, offset, pointer, require_layout
from assisted.methods.eagle.fused import fused_head
from assisted.methods.shared.runner import HeadRunner

HYBRID = next(architecture for architecture in RECURRENT if architecture.name == "qwen3_5")


@pytest.mark.parametrize(
    ("tensor", "dtype", "length"),
    [
        (torch.zeros(4, dtype=torch.int32), torch.int64, 4),
        (torch.zeros(4, dtype=torch.float64), torch.float32, 4),
        (torch.zeros(4, dtype=torch.float16), torch.bfloat16, 4),
        (torch.zeros(4), torch.float32, 5),
        (torch.zeros(0), torch.float32, 1),
        (torch.zeros(4, 4).t(), torch.float32, 16),
        (torch.zeros(8)[::2], torch.float32, 4),
        (torch.zeros(1).expand(4), torch.float32, 4),
        (torch.zeros(4, device="meta"), torch.float32, 4),
    ],
)
def test_addresses_of_other_tensors_are_refused(tensor: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    with pytest.raises(ValueError, match=f"takes {length} contiguous numbers of {dtype}"):
        pointer(tensor, dtype, length)


def test_addresses() -> None:
    numbers = torch.zeros(8)
    assert pointer(None, torch.float32, 8) is None
    assert pointer(numbers, torch.float32, 8) == numbers.data_ptr()
    assert offset(numbers, torch.float32, 5, 3) == numbers.data_ptr() + 20
    with pytest.raises(ValueError, match="takes 9"):
        offset(numbers, torch.float32, 5, 4)


@needed
@pytest.mark.parametrize("name", [part.__name__ for part in structs.STRUCTS])
def test_a_library_with_another_struct_is_refused(name: str) -> None:
    """One field more, at the end of each struct in turn."""
    library = native.loaded()[0]
    require_layout(library, *structs.STRUCTS)
    own = getattr(structs, name)
    other = type(name, (ctypes.Structure,), {"_fields_": (*own._fields_, ("further", ctypes.c_int64))})
    with pytest.raises(OtherLayout, match="lays out its structs in another way"):
        require_layout(library, *(other if part is own else part for part in structs.STRUCTS))


# ---- Layers, products and slots ----


def _pass(end: int = 3, seen: torch.Tensor | None = None, places: Any = (2,), first: int = 0) -> native.NativePass:
    """Over columns of one row of the small Llama. places: their slots."""
    angles = torch.ones(1, len(places), 1, 32), torch.zeros(1, len(places), 1, 32)
    return native.NativePass(*angles, torch.tensor([list(places)]), seen, 1, first, end)


def _layer() -> Any:
    layer: Any = fused.fused(built("grouped", 32)).module.model.layers[0]
    return layer.alone


def _run(**changes: Any) -> None:
    """A pass over one column of a layer, with some of its arguments changed."""
    given = {"hidden": torch.zeros(1, 1, 128), "keys": torch.zeros(1, 2, 8, 32), "values": torch.zeros(1, 2, 8, 32)}
    given |= {"around": _pass(), **changes}
    _layer().one(given["hidden"], given["keys"], given["values"], given["around"], given.get("beside"))


def _norm() -> Any:
    return Norm(nn.LayerNorm(32)).in_c(torch.float32)


SLOTS = torch.zeros(1, 2, 8, 32)
SCALES = torch.zeros(8, dtype=torch.float64, device="meta")
WRONG: dict[str, Callable[[], Any]] = {
    "hidden states of another dtype": lambda: _run(hidden=torch.zeros(1, 1, 128).double()),
    "narrow hidden states": lambda: _run(hidden=torch.zeros(1, 1, 96)),
    "keys of another dtype": lambda: _run(keys=torch.zeros(1, 2, 8, 32).bfloat16()),
    "values that lie apart": lambda: _run(values=torch.zeros(1, 8, 2, 32).transpose(1, 2)),
    "values with fewer slots": lambda: _run(values=torch.zeros(1, 2, 6, 32)),
    "keys of fewer heads": lambda: _run(keys=torch.zeros(1, 1, 8, 32)),
    "a slot that is not there": lambda: _run(around=_pass(9, places=(8,))),
    "a slot before the first": lambda: _run(around=_pass(3, places=(-1,))),
    "one of several slots": lambda: _run(hidden=torch.zeros(1, 3, 128), around=_pass(8, places=(6, 7, 8))),
    "columns that see slots that are not there": lambda: _run(around=_pass(3, torch.ones(1, 1, 9).bool())),
    "narrow inputs beside": lambda: _run(beside=torch.zeros(1, 1, 64)),
    "a product's inputs": lambda: native.NativeProduct(native.packed(torch.zeros(32, 64)), 64, 32)(torch.zeros(2, 32)),
    "a product's weights": lambda: native.NativeProduct(native.packed(torch.zeros(32, 64)), 96, 32),
    "a product's scales": lambda: native.NativeProduct(native.packed(torch.zeros(64, 64).char()), 64, 8, SCALES),
    "a norm's weight": lambda: native.NativeNorm(Norm(nn.LayerNorm(32).bfloat16()), 3, torch.float32),
    "a norm's inputs": lambda: _norm()(torch.zeros(2, 32).bfloat16()),
    "a move from nowhere": lambda: native.move([SLOTS.clone()], torch.tensor([[0], [1], [8]])),
    "a move to a row that is not there": lambda: native.move([SLOTS.clone()], torch.tensor([[1], [1], [2]])),
    "moves in 32 bits": lambda: native.move([SLOTS.clone()], torch.tensor([[0], [1], [2]]).int()),
}


@needed
@pytest.mark.parametrize("kind", WRONG)
@torch.no_grad()
def test_what_c_could_not_read_raises(kind: str) -> None:
    native.loaded(torch.float32)
    _run()
    with pytest.raises((ValueError, IndexError, RuntimeError, NotImplementedError)):
        WRONG[kind]()


# ---- Ids ----


def eagle() -> Any:
    """The steps of a head in C, and arguments for them: states, slots, the place and position of the first column."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LLAMA).eval()
    return _in_c(fused_head(random_head(target, 3)), target)


def mtp() -> Any:
    target = build(HYBRID, **WIDE)
    return _in_c(fused_head(random_mtp(target)), fused.fused(target).module)


def _in_c(head: Any, target: Any) -> Any:
    runner = HeadRunner(head, target, SlotCache(1, 32), torch.zeros(1, 1, dtype=torch.int64))
    hidden, vocabulary = target.config.hidden_size, target.config.vocab_size
    runner.read(torch.tensor([[5, 6, 7]]), torch.randn(1, 3, hidden), [3])
    assert runner.steps is not None
    runner.cache.place(4, torch.device("cpu"))
    stores, start = runner.steps.layer.stores(runner.cache), runner.cache.start
    return runner.steps.steps, torch.randn(1, 2, hidden), (stores, start, start), vocabulary


@needed
@pytest.mark.parametrize("made", [eagle, mtp])
@torch.no_grad()
def test_ids_without_an_embedding_raise(made: Callable[[], Any]) -> None:
    steps, states, where, vocabulary = made()
    last = torch.tensor([[vocabulary - 1, 0]])
    assert steps(last, states, *where).isfinite().all()
    for wrong in (-1, vocabulary, 2**40):
        with pytest.raises(IndexError, match=f"token {wrong} has no embedding; the table has {vocabulary} rows"):
            steps(torch.tensor([[3, wrong]]), states, *where)
    with pytest.raises(ValueError, match=r"contiguous numbers of torch\.int64"):
        steps(last.int(), states, *where)
    with pytest.raises(ValueError, match=r"contiguous numbers of torch\.float32"):
        steps(last, states.double(), *where)


@needed
@torch.no_grad()
def test_drafted_tokens_without_an_embedding_end_the_draft() -> None:
    """Of a table of drafted tokens that is wrong, and of a product with more outputs than the table of embeddings has rows."""
    steps, states, (stores, place, position), vocabulary = eagle()
    steps.held = (*steps.held, tokens := torch.full((vocabulary,), vocabulary))
    steps.struct.tokens = tokens.data_ptr()
    tree = steps.tree(states[:, 0], stores, place, position, Shape((2, 1, 1, 2, 2), (0.0,), (1.0,), (), 1))
    assert tree.read() > 0 and tree.add() == 1
    assert tree.read() != tree.read()  # not a number
    steps, states, (stores, place, position), vocabulary = mtp()
    steps.struct.rows = 0
    assert steps.chain(states[:, 0], stores, place, position, 2)[1][0, 1].isnan()


@pytest.mark.parametrize("made", ["eagle", "mtp"])
def test_ids_of_32_bits(made: str) -> None:
    """As numpy, ONNX and tokenizers in C++ give them, and as transformers takes them. Sessions and several rows as well."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(LLAMA).eval() if made == "eagle" else build(HYBRID, **WIDE)
    draft = Eagle(trained_head(target, 1)) if made == "eagle" else MTP(random_mtp(target))
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3)
    ids = random_ids(target, 2, 12)
    for rows in (ids[:1], ids):
        expected = target.generate(rows, **CALL)
        found = model.generate(rows.int(), **CALL)
        assert found.equal(expected) and found.dtype == torch.int64
        assert model.report.drafted > 0 and not model.report.warnings
    session = model.session()
    longer = torch.cat([model.generate(ids[:1].int(), past_key_values=session, **CALL), ids[:1]], 1)
    assert model.generate(longer.int(), past_key_values=session, **CALL).equal(target.generate(longer, **CALL))
    assert model.report.cached_tokens > 0


# ---- Weights that are views ----


@needed
@pytest.mark.parametrize("view", ["expanded", "strided", "transposed"])
@pytest.mark.parametrize("kind", ["llama", "bfloat16", "hybrid"])
def test_weights_that_are_views(kind: str, view: str) -> None:
    """Of norms, products, the embedding and what recurrent layers have beside them."""

    def viewed(weight: torch.Tensor) -> torch.Tensor:
        if view == "expanded":
            return weight[:1].expand(weight.shape) if weight.dim() == 1 else weight
        if view == "strided":
            return torch.stack([weight, weight], -1)[..., 0]
        return weight.t().contiguous().t() if weight.dim() == 2 else weight

    target = build(HYBRID, **WIDE) if kind == "hybrid" else built("norms of heads", 16 if kind == "bfloat16" else 32)
    for parameter in target.parameters():
        parameter.data = viewed(parameter.data)
    model = AssistedModelForCausalLM.from_models(target, draft="ngram", draft_length=3)
    ids = random_ids(target, 1, 12).repeat(1, 2)
    found = model.generate(ids, **CALL)
    assert model.report.way == "shortcuts" and not model.report.warnings
    if kind != "bfloat16":
        assert found.equal(target.generate(ids, **CALL))
    else:  # as the same weights without views
        for parameter in target.parameters():
            parameter.data = parameter.data.contiguous()
        assert found.equal(model.generate(ids, **CALL))
