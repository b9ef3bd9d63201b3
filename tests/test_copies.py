"""Copies of a pair, by `copy.deepcopy`, pickle, `torch.save` and a spawned process: the same text, and nothing shared.

Trainers copy the model that they are given to have one to compare with.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import build, half_right, random_ids
from covering import first_of_kinds, in_turns, only
from methods import METHODS, half_heard
from pairs import BY_NAME, no_fallback, tokenizer
from test_quantization import MODULES, llama
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM, Combined, DraftModel, Suffix
from assisted.core.drafts import DraftingStopped
from assisted.loading.quantization import NAMES, quantize_copy

CALL: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MORE: dict[str, Callable[[PreTrainedModel], Any]] = {
    "combined": lambda target: Combined((Suffix(remember=True), half_right(target))),
    "another tokenizer": lambda target: DraftModel(half_right(target), tokenizer=tokenizer(first='"')),
}
RUN = first_of_kinds(METHODS) | {*MORE, *(f"self:{name}" for name in NAMES[::3])}
KINDS = [*(method.name for method in METHODS), *MORE, *(f"self:{name}" for name in NAMES)]


@functools.cache
def pair_of(kind: str) -> AssistedModelForCausalLM:
    """A pair that has generated before, so that it holds what calls leave behind."""
    if kind.startswith("self:"):
        target: PreTrainedModel = llama(hidden=64, inner=128, layers=2)
        draft: Any = kind
    else:
        target = build(BY_NAME["llama"], num_hidden_layers=3)
        draft = (MORE | {method.name: method.draft for method in METHODS})[kind](target)
    own = tokenizer() if kind == "another tokenizer" else None
    pair = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4, tokenizer=own)
    text(pair)
    return pair


def text(pair: AssistedModelForCausalLM) -> list[int]:
    ids = random_ids(pair.target, 1, 12, seed=1)
    with no_fallback(DraftingStopped):  # that early exit pays nothing here is fine
        return pair.generate(ids, attention_mask=torch.ones_like(ids), **CALL)[0].tolist()


def through_torch(pair: AssistedModelForCausalLM) -> AssistedModelForCausalLM:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[AssistedModelForCausalLM], AssistedModelForCausalLM]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": through_torch,
}


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    module = MODULES.get(request.param.removeprefix("self:"), "torch")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"not installed: {module}")
    return str(request.param)


def storages(pair: AssistedModelForCausalLM) -> set[int]:
    """Where the numbers of the target and the draft lie."""
    found = set()
    for model in (pair.target, *pair.drafter.modules):
        for tensor in (*model.parameters(), *model.buffers()):
            found |= {part.untyped_storage().data_ptr() for part in parts(tensor)}
    return found - {0}


def parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors within a shell, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]


@pytest.mark.parametrize("kind,way", only(in_turns(KINDS, list(WAYS)), RUN), indirect=["kind"])
def test_a_copy_writes_the_same_and_shares_nothing(kind: str, way: str) -> None:
    pair = pair_of(kind)
    expected, drafted = text(pair), pair.report.drafted
    other = WAYS[way](pair)
    assert text(other) == expected
    assert other.report.drafted > 0 or drafted == 0
    assert not storages(pair) & storages(other)
    with torch.no_grad():
        for parameter in other.target.parameters():
            parameter.zero_()
    assert text(other) != expected
    assert text(pair) == expected
    assert pair.report.drafted > 0 or drafted == 0


@pytest.mark.parametrize("name,way", in_turns(list(NAMES), list(WAYS)))
def test_quantized_targets(name: str, way: str) -> None:
    pytest.importorskip(MODULES[name])
    pair = AssistedModelForCausalLM.from_models(quantize_copy(llama(hidden=64, inner=128, layers=2), name))
    expected = text(pair)
    other = WAYS[way](pair)
    assert text(other) == expected
    assert not storages(pair) & storages(other)


def test_a_copy_looks_up_what_was_remembered() -> None:
    target = build(BY_NAME["llama"])
    pair = AssistedModelForCausalLM.from_models(target, draft=Suffix(corpus=half_heard(target), remember=True))
    text(pair)
    other = copy.deepcopy(pair)
    assert other.drafter.past.text == pair.drafter.past.text != []
    assert other.drafter.lock is not pair.drafter.lock
    text(other)
    assert len(other.drafter.past.text) > len(pair.drafter.past.text)


def test_a_long_corpus_is_copied() -> None:
    """Its tree is deeper than Python calls itself, if it is followed node by node."""
    target = build(BY_NAME["llama"])
    corpus = random_ids(target, 4, 3000, seed=5).tolist()
    pair = AssistedModelForCausalLM.from_models(target, draft=Suffix(corpus=corpus))
    other = copy.deepcopy(pair)
    assert other.drafter.corpus.text == pair.drafter.corpus.text
    assert text(other) == text(pair)


def _write(pairs: list[AssistedModelForCausalLM], ends: Any) -> None:
    torch.set_num_threads(1)
    ends.send([(text(pair), pair.report.drafted) for pair in pairs])


@pytest.mark.slow
def test_spawned_processes() -> None:
    """All kinds in one process, which takes seconds to start."""
    pairs = [pair_of(kind) for kind in KINDS if not kind.startswith("self:") or kind == "self:int8-torchao"]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_write, args=(pairs, there))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    for pair, (written, drafted) in zip(pairs, found, strict=True):
        assert written == text(pair)
        assert drafted > 0 or pair.report.drafted == 0
