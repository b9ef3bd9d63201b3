"""Divergences between distributions, and agreement: what they are worth where that is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assisted.training.losses import DIVERGENCES, agreement, divergence, log_probabilities


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
def test_gradients_are_those_of_differences(name):
    target = logits(0, 2, 5).double()
    draft = logits(1, 2, 5).double().requires_grad_()
    log_p = target.log_softmax(-1)
    assert torch.autograd.gradcheck(
        lambda draft: DIVERGENCES[name](log_p, draft.log_softmax(-1)), draft, eps=1e-6, atol=1e-5
    )


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
