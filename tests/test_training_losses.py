"""Divergences between distributions, and agreement: what they are worth where that is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assisted.methods.shared.training import losses
from assisted.methods.shared.training.losses import (
    DIVERGENCES,
    agreement,
    divergence,
    divergence_of_states,
    log_probabilities,
)


def logits(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(sorted(DIVERGENCES)), st.integers(2, 30))
def test_a_divergence_is_zero_for_equal_distributions_alone(seed, name, vocabulary):
    target, draft = logits(seed, 3, 4, vocabulary), logits(seed + 1, 3, 4, vocabulary)
    assert divergence(name, log_probabilities(target), target + 5.0).item() == pytest.approx(0, abs=1e-6)
    assert divergence(name, log_probabilities(target), draft).item() > 0


def test_they_are_what_they_are_called():
    target, draft = logits(0, 5, 7), logits(1, 5, 7)
    p, q = target.softmax(-1), draft.softmax(-1)
    expected = {
        "kl": (p * (p / q).log()).sum(-1).mean(),
        "reverse-kl": (q * (q / p).log()).sum(-1).mean(),
        "tv": 1 - torch.minimum(p, q).sum(-1).mean(),
    }
    expected["kl+tv"] = expected["kl"] + expected["tv"]
    accepted = torch.minimum(p, q).sum(-1)
    share = (-3 * accepted).exp()
    expected["nla"] = -accepted.log().mean()
    expected["lk-hybrid"] = (share * (p * (p / q).log()).sum(-1) + (1 - share) * (1 - accepted)).mean()
    assert expected.keys() == DIVERGENCES.keys()
    for name, value in expected.items():
        torch.testing.assert_close(divergence(name, log_probabilities(target), draft), value)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_excluded_tokens_are_no_trouble(name):
    """Of the target's, of the draft's, and of both: a finite loss and finite gradients."""
    target, draft = logits(0, 2, 6), logits(1, 2, 6)
    target[:, :2] = -torch.inf
    draft[:, 1:3] = -torch.inf
    draft.requires_grad_()
    loss = divergence(name, log_probabilities(target), draft)
    loss.backward()
    assert loss.isfinite()
    assert draft.grad.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_disjoint_distributions_are_no_trouble(name):
    """Nothing is accepted: the loss is finite and larger than anywhere else, and so are its parts' gradients."""
    target, draft = (
        torch.tensor([[5.0, 3.0, -torch.inf, -torch.inf]]),
        torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0]]),
    )
    draft.requires_grad_()
    loss = divergence(name, log_probabilities(target), draft)
    loss.backward()
    near = divergence(name, log_probabilities(target), torch.tensor([[1.0, -8.0, 1.0, 2.0]]))
    assert loss.isfinite()
    assert loss > near
    assert draft.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(DIVERGENCES.keys() - {"lk-hybrid"}))
def test_gradients_are_those_of_differences(name):
    target = logits(0, 2, 5).double()
    draft = logits(1, 2, 5).double().requires_grad_()
    log_p = target.log_softmax(-1)
    assert torch.autograd.gradcheck(
        lambda draft: DIVERGENCES[name](log_p, draft.log_softmax(-1)), draft, eps=1e-6, atol=1e-5
    )


def test_the_weight_of_the_hybrid_has_no_gradient():
    log_p = logits(0, 2, 5).double().log_softmax(-1)
    draft = logits(1, 2, 5).double().requires_grad_()

    def gradient(loss):
        return torch.autograd.grad(loss.sum(), draft, retain_graph=True)[0]

    log_q = draft.log_softmax(-1)
    share = (-3 * torch.minimum(log_p, log_q).exp().sum(-1, keepdim=True)).exp().detach()
    kl, tv = (gradient(DIVERGENCES[name](log_p, log_q)) for name in ("kl", "tv"))
    torch.testing.assert_close(gradient(DIVERGENCES["lk-hybrid"](log_p, log_q)), share * kl + (1 - share) * tv)


def test_the_gradient_of_nla_is_that_of_tv_divided_by_the_acceptance():
    """So it stays large where little is accepted, unlike TV's (arXiv 2602.23881)."""
    log_p = torch.tensor([[8.0, 0.0, 0.0, 0.0]]).log_softmax(-1)
    draft = torch.tensor([[-4.0, 1.0, 2.0, 0.0]], requires_grad=True)
    log_q = draft.log_softmax(-1)
    (nla,) = torch.autograd.grad(DIVERGENCES["nla"](log_p, log_q).sum(), draft, retain_graph=True)
    (tv,) = torch.autograd.grad(DIVERGENCES["tv"](log_p, log_q).sum(), draft)
    accepted = torch.minimum(log_p, log_q).exp().sum()
    assert accepted < 0.01
    torch.testing.assert_close(nla, tv / accepted)


def test_positions_of_no_weight_do_not_count():
    target, draft = logits(0, 2, 3, 5), logits(1, 2, 3, 5)
    weights = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    kept = divergence("kl", log_probabilities(target[0, ::2]), draft[0, ::2])
    torch.testing.assert_close(divergence("kl", log_probabilities(target), draft, weights), kept)
    assert divergence("kl", log_probabilities(target), draft, torch.zeros(2, 3)).item() == 0


def test_the_distribution_is_the_targets_own():
    target = logits(0, 2, 3, 5).requires_grad_()
    assert not log_probabilities(target).requires_grad
    torch.testing.assert_close(log_probabilities(target).exp(), target.softmax(-1))


def test_agreement_is_acceptance():
    target = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]).log()
    draft = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.4, 0.1]]).log()
    found = agreement(target, draft)
    assert found.greedy == 0.5
    assert found.sampled == pytest.approx((0.8 + 0.6) / 2)


@pytest.mark.parametrize("at_once", [1, 20, 10_000])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_computed_with_the_loss_are_those_of_autograd(name, at_once, monkeypatch):
    """Also where some tokens exclude others, and in pieces that end within a row."""
    monkeypatch.setattr(losses, "CACHED", at_once)
    monkeypatch.setattr(losses, "PRODUCT", 4 * at_once)
    target, states = logits(0, 3, 7, 9), logits(1, 3, 7, 4)
    target[1, 2, :4] = -torch.inf
    output = torch.nn.Linear(4, 9).requires_grad_(False)
    log_p, weights = log_probabilities(target), torch.rand(3, 7)
    states.requires_grad_()
    drafted = output(states)
    expected = (DIVERGENCES[name](log_p, drafted.log_softmax(-1)) * weights).sum()
    by_states, by_drafted = torch.autograd.grad(expected, (states, drafted), retain_graph=True)
    for found in (
        divergence(name, log_p, drafted, weights) * weights.sum(),
        divergence_of_states(name, log_p, states, weights, output),
    ):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(3 * found, states, retain_graph=True)[0], 3 * by_states)
    found = divergence(name, log_p, drafted, weights) * weights.sum()
    torch.testing.assert_close(torch.autograd.grad(found, drafted)[0], by_drafted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_layer_in_bfloat16_or_rounded_to_it(dtype):
    """What is rounded differs by rounding."""
    output = torch.nn.Linear(32, 50, bias=False, dtype=torch.bfloat16).requires_grad_(False).to(dtype)
    log_p, states, weights = (
        log_probabilities(logits(0, 2, 9, 50)),
        logits(1, 2, 9, 32).requires_grad_(),
        torch.ones(2, 9),
    )
    expected = DIVERGENCES["kl+tv"](log_p, output.float()(states).log_softmax(-1)).sum()
    wanted = torch.autograd.grad(expected, states)[0]
    output.to(dtype)
    found = divergence_of_states("kl+tv", log_p, states, weights, output, rounded=True)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, states)[0], wanted, rtol=0.05, atol=0.02)


def test_agreement_in_pieces(monkeypatch):
    pair = logits(0, 5, 7, 11), logits(1, 5, 7, 11)
    whole = agreement(*pair)
    monkeypatch.setattr(losses, "CACHED", 40)
    found = agreement(*pair)
    assert found.greedy == pytest.approx(whole.greedy)
    assert found.sampled == pytest.approx(whole.sampled)
