"""Forwards that name none of their arguments are run as what they wrap; a class that nobody has seen is tried first."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build, half_right, random_ids
from covering import over
from pairs import BY_NAME, prompt
from transformers import LlamaForCausalLM

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped
from assisted.engine import verifiable as trial
from assisted.engine.parts import generate_passes, takes
from assisted.engine.verifiable import TESTED, require_verifiable

CALL = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Open(LlamaForCausalLM):
    """Passes on whatever it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Named(LlamaForCausalLM):
    """Names what it needs."""

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **kwargs)


class Blind(LlamaForCausalLM):
    """Takes positions and counts by itself."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Forgetful(LlamaForCausalLM):
    """Has a cache of its own."""

    def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Maskless(LlamaForCausalLM):
    """Leaves out the mask."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Amplifying(LlamaForCausalLM):
    """Multiplies its logits, errors included, and folds them; `off` is added in passes over several tokens."""

    gain, off = 1.0, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = torch.sin(self.gain * output.logits)
        if output.logits.shape[1] > 1:
            output.logits += self.off * torch.randn(output.logits.shape, generator=torch.Generator().manual_seed(0))
        return output


def lambda_around(model: Any) -> None:
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def wraps_around(model: Any) -> None:
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    model.forward = forward


def partial_around(model: Any) -> None:
    model.forward = functools.partial(model.forward)


def open_class(model: Any) -> None:
    model.__class__ = Open


def named_class(model: Any) -> None:
    model.__class__ = Named


WRAPPED = [lambda_around, wraps_around, partial_around, open_class, named_class]


@pytest.mark.parametrize("name", ["opt", "biogpt"])
@torch.no_grad()
def test_positions_that_a_model_reads_from_the_mask_do_not_count_padding(name: str) -> None:
    """Also where `generate` gives no positions, because the forward's own signature does not name them."""
    target = build(BY_NAME[name])
    lambda_around(target)
    model, inputs = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=3), prompt(3)
    ids = inputs.pop("ids")
    assert model.generate(ids, **inputs, **CALL).tolist() == target.generate(ids, **inputs, **CALL).tolist()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wrap", WRAPPED, ids=lambda wrap: wrap.__name__)
@torch.no_grad()
def test_a_wrapped_forward_is_run_as_what_it_wraps(wrap: Any, when: str) -> None:
    target = build(BY_NAME["llama"])
    draft = half_right(target)
    if when == "before":
        wrap(target)
    model = AssistedModelForCausalLM.from_models(target, draft=draft)
    if when == "after":
        model.generate(random_ids(target, 1, 9), **CALL)
        wrap(target)
    for rows in (1, 3):
        inputs = prompt(rows)
        ids = inputs.pop("ids")
        plain = target.generate(ids, **inputs, **CALL)
        assisted = model.generate(ids, **inputs, draft_length=3, **CALL)
        assert assisted.tolist() == plain.tolist()
        assert model.report is not None and model.report.accepted > 0


@pytest.mark.parametrize("kind", [Blind, Forgetful, Maskless])
def test_a_class_that_ignores_what_it_is_given_is_refused(kind: type) -> None:
    target = build(BY_NAME["llama"])
    target.__class__ = kind
    with pytest.raises(ValueError, match=r"target: .*(differ|fails)"):
        AssistedModelForCausalLM.from_models(target)
    target.__class__ = LlamaForCausalLM
    model = AssistedModelForCausalLM.from_models(target)
    ids = random_ids(target, 1, 9)
    model.generate(ids, **CALL)
    target.__class__ = kind
    with pytest.warns(DraftingStopped, match="cannot take back rejected tokens: .*(differ|fails)"):
        text = model.generate(ids, **CALL)
    assert text.tolist() == target.generate(ids, **CALL).tolist()
    assert model.report is not None and (model.report.way, model.report.drafted) == ("plain", 0)


@pytest.mark.parametrize("gain, off", [(200, 0.0), (1, 1e-3), (200, 0.1)])
def test_rounding_is_told_from_an_error_by_what_the_model_makes_of_it(
    gain: float, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding that a class amplifies to a thousandth of its logits; an error of that size in another one; both."""
    monkeypatch.setattr(Amplifying, "gain", gain)
    monkeypatch.setattr(Amplifying, "off", off)
    target = build(BY_NAME["llama"])
    target.__class__ = Amplifying
    if not off:
        require_verifiable(target)
        return
    with pytest.raises(ValueError, match="differ from those over one token"):
        require_verifiable(target)


@over("architecture", ARCHITECTURES)
def test_the_trial_passes_where_the_text_is_plain(architecture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TESTED", frozenset())
    require_verifiable(build(architecture))


def test_what_needs_no_trial_is_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {a.make().model_type for a in ARCHITECTURES} == TESTED
    monkeypatch.setattr(trial, "_obstacle_of_slots", lambda model, masks, run: "tried")
    target = build(BY_NAME["llama"])
    require_verifiable(target)
    lambda_around(target)
    with pytest.raises(ValueError, match="tried"):
        require_verifiable(target)


def test_a_class_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(trial, "_obstacle_of_slots", lambda model, masks, run: tried.append(model))
    target = build(BY_NAME["llama"])
    open_class(target)
    model = AssistedModelForCausalLM.from_models(target)
    for _ in range(3):
        model.generate(random_ids(target, 1, 9), **CALL)
    assert len(tried) == 1  # when the pair is made: a drafter that needs nothing else runs it in the same way
    target.double()
    model.generate(random_ids(target, 1, 9), **CALL)
    assert len(tried) == 2


def test_what_a_forward_takes() -> None:
    target = build(BY_NAME["llama"])
    assert takes(target, "position_ids") and not takes(target, "cache_params")
    assert generate_passes(target, "position_ids")
    lambda_around(target)
    assert takes(target, "position_ids") and not takes(target, "cache_params")
    assert not generate_passes(target, "position_ids")
    target.forward = lambda input_ids: None
    assert not takes(target, "position_ids")


class Wrapper(torch.nn.Module):
    """As PEFT puts one around a model: `generate` runs the model within, whose layers hold the adapter."""

    def __init__(self, model: Any):
        super().__init__()
        self.inside = [model]
        self.config = model.config

    def get_base_model(self) -> Any:
        return self.inside[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody runs the wrapper")


def test_what_is_tried_is_the_model_within_a_wrapper() -> None:
    require_verifiable(Wrapper(Open(build(BY_NAME["llama"]).config).eval()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Forgetful cannot take back"):
        require_verifiable(Wrapper(Forgetful(build(BY_NAME["llama"]).config).eval()))  # type: ignore[arg-type]
