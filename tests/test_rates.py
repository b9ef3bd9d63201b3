"""Rates: what is learned of guesses that come with a probability."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assisted.lengths.rates import Rates

GUESSES = torch.tensor([[0.7, 0.15]])
ASKED = torch.tensor([True])


def test_guesses_are_taken_at_their_word_before_anything_is_seen():
    guesses = torch.rand(3, 4, 5).sort(-1, descending=True).values
    assert torch.allclose(Rates().of(guesses), guesses)
    assert torch.allclose(Rates(3).of(guesses, torch.arange(3)[:, None, None]), guesses)


def test_rates_follow_what_is_seen():
    rates = Rates(2)
    both = GUESSES.expand(2, 2)
    right = torch.tensor([[True, False], [False, True]])
    for _ in range(200):
        rates.see(both, torch.tensor([[0], [1]]), right, torch.tensor([True, True]))
    first, second = rates.of(both, torch.tensor([[0], [1]])).tolist()
    assert first[0] > 0.85 > 0.15 > first[1]
    assert second[0] < 0.15 < 0.85 < second[1]
    rates.see(GUESSES, 0, torch.tensor([[False, False]]), ASKED)
    assert 0.8 < rates.of(GUESSES)[0, 0] < first[0]


def test_what_is_as_sure_at_another_rank_is_another_guess():
    rates = Rates()
    for _ in range(50):
        rates.see(torch.tensor([[0.15, 0.14]]), 0, torch.tensor([[True, False]]), ASKED)
    best, second = rates.of(torch.tensor([0.15, 0.15])).tolist()
    assert best > 0.8
    assert second < 0.1


def test_levels_lean_on_each_other_while_little_was_seen():
    rates = Rates(2)
    for _ in range(50):
        rates.see(GUESSES, 0, torch.tensor([[False, False]]), ASKED)
    assert rates.of(GUESSES, 1)[0, 0] < 0.2
    for _ in range(50):
        rates.see(GUESSES, 1, torch.tensor([[True, False]]), ASKED)
    assert rates.of(GUESSES, 1)[0, 0] > 0.8
    assert rates.of(GUESSES, 0)[0, 0] < 0.2


def test_places_that_the_text_did_not_come_to_teach_nothing():
    rates = Rates()
    rates.see(GUESSES.expand(2, 2), 0, torch.tensor([[True, False], [False, True]]), torch.tensor([False, False]))
    assert torch.allclose(rates.of(GUESSES), GUESSES)


def test_what_is_impossible_stays_so():
    rates = Rates()
    nothing = torch.tensor([[0.0, float("nan")]])
    rates.see(nothing, 0, torch.tensor([[True, True]]), ASKED)
    assert rates.of(nothing).tolist() == [[0.0, 0.0]]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.booleans()), max_size=30), st.floats(0, 1))
@settings(max_examples=50)
def test_rates_are_probabilities(seen, probability):
    rates = Rates(3)
    for guess, level, right in seen:
        rates.see(torch.tensor([[guess]]), level, torch.tensor([[right]]), ASKED)
    found = rates.of(torch.tensor([probability]), 2).item()
    assert 0 <= found <= 1 + 1e-6


def test_learned_in_inference_mode_and_out_of_it():
    rates = Rates()
    for place in (torch.inference_mode, torch.no_grad):
        with place():
            rates.see(GUESSES, 0, torch.tensor([[True, False]]), ASKED)
            rates.of(GUESSES)
    assert rates.seen.sum() == pytest.approx(2 * (1 + 0.99))
