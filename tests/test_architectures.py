"""The tiny models are worth testing on, and take the positions that their entries claim. Their masks are in test_runtime.py."""

from __future__ import annotations

import inspect

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, agreement, build, half_right, random_ids
from covering import cases
from transformers import PreTrainedModel

ROUNDING = 1e-4  # float32 sums in another order, on logits of about 3


@pytest.fixture(scope="module", params=cases(ARCHITECTURES))
def case(request: pytest.FixtureRequest) -> tuple[Architecture, PreTrainedModel]:
    return request.param, build(request.param)


def test_greedy_text_varies(case: tuple[Architecture, PreTrainedModel]) -> None:
    _, model = case
    ids = random_ids(model, rows=6, length=10, seed=3)
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    distinct = [len(set(row[10:].tolist())) for row in text]
    assert sum(distinct) / len(distinct) > 6


def test_same_seed_same_weights(case: tuple[Architecture, PreTrainedModel]) -> None:
    architecture, model = case
    again, other = build(architecture), build(architecture, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_half_right_is_independent_and_half_right(case: tuple[Architecture, PreTrainedModel]) -> None:
    _, model = case
    before = [weight.clone() for weight in model.parameters()]
    other = half_right(model)
    assert 0.2 < agreement(model, other, seed=77) < 0.95
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(model.parameters(), other.parameters(), strict=True))


@torch.no_grad()
def test_positions(case: tuple[Architecture, PreTrainedModel]) -> None:
    architecture, model = case
    ids = random_ids(model, rows=1, length=10)
    honoured = False
    if _takes(model, "position_ids"):
        spread = model(ids, position_ids=3 * torch.arange(10)[None] + 1).logits
        honoured = bool((spread - model(ids).logits).abs().max() > 10 * ROUNDING)
    assert honoured == architecture.positions


def test_logits_to_keep(case: tuple[Architecture, PreTrainedModel]) -> None:
    assert _takes(case[1], "logits_to_keep")


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
