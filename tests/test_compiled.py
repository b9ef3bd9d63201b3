"""Passes compiled for a CPU: plain `generate`'s tokens, from code that is made once for all shapes."""

import warnings

import pytest
import torch
from architectures import build, half_right, random_ids
from pairs import BY_NAME

from assisted import AssistedModelForCausalLM, Merged, capture, decoding, products


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"no C++ compiler: {error}")
    monkeypatch.setattr(decoding, "CHECK_INVARIANTS", True)
    monkeypatch.setattr(products, "_WIDE", 1)  # tiny models' products are packed, too
    torch._dynamo.reset()


def codes():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def says_what_plain_says(model, ids, **kwargs):
    kwargs = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of drafting that failed
        output = model.generate(ids, **kwargs)
    assert model.report.drafted > 0
    assert output.tolist() == model.generate(ids, assisted=False, **kwargs).tolist()


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_one_code_serves_every_shape(name):
    target = build(BY_NAME[name])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4, fast="compile")
    before = codes()
    for length in (9, 30, 5):
        says_what_plain_says(model, random_ids(target, 1, length))
        assert model.totals.accepted > 0
    assert model.graphs.reason is None and model.graphs.replays > 0
    assert model.drafter.graphs.reason is None and model.drafter.graphs.replays > 0
    for length, drafted in ((13, 2), (9, 6), (40, 3)):  # other columns and slots
        says_what_plain_says(model, random_ids(target, 1, length), draft_length=drafted)
    assert codes() - before <= 4  # of each model one over one column and one over several
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(-1)  # of which there is a copy
    says_what_plain_says(model, random_ids(target, 1, 9))


@pytest.mark.slow
def test_batches_and_trees(monkeypatch):
    monkeypatch.setattr(capture, "_FROZEN", {"freezing": True})  # trying out products takes minutes
    target = build(BY_NAME["llama"])
    drafts = Merged([half_right(target), half_right(target, seed=5)])
    model = AssistedModelForCausalLM.from_models(target, draft=drafts, draft_length=3, fast="compile")
    ids = random_ids(target, 3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for _ in range(2):
        says_what_plain_says(model, ids, attention_mask=mask)
    assert model.graphs.reason is None and model.graphs.replays > 0
