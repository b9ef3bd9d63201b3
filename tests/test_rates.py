"""Rates: what is learned of guesses that come with a probability."""

import copy
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assisted.lengths.rates import Rates

GUESSES = (0.75, 0.15)


def test_guesses_are_taken_at_their_word_before_anything_is_seen():
    for guesses in torch.rand(12, 5).sort(-1, descending=True).values.tolist():
        assert Rates().at(guesses) == pytest.approx(guesses)
        assert Rates(3).at(guesses, 2) == pytest.approx(guesses)
        assert Rates().at(guesses, priors=[0.5] * 5) == pytest.approx([0.5] * 5)


def test_rates_follow_what_is_seen():
    rates = Rates(2)
    for _ in range(200):
        rates.learn([(GUESSES, 0, (True, False)), (GUESSES, 1, (False, True))])
    first, second = rates.at(GUESSES, 0), rates.at(GUESSES, 1)
    assert first[0] > 0.85 > 0.15 > first[1]
    assert second[0] < 0.15 < 0.85 < second[1]
    rates.learn([(GUESSES, 0, (False, False))])
    assert 0.8 < rates.at(GUESSES)[0] < first[0]


def test_what_is_as_sure_at_another_rank_is_another_guess():
    rates = Rates()
    for _ in range(50):
        rates.learn([((0.15, 0.14), 0, (True, False))])
    best, second = rates.at((0.15, 0.15))
    assert best > 0.8
    assert second < 0.1


def test_levels_lean_on_each_other_while_little_was_seen():
    rates = Rates(2)
    for _ in range(50):
        rates.learn([(GUESSES, 0, (False, False))])
    assert rates.at(GUESSES, 1)[0] < 0.2
    for _ in range(50):
        rates.learn([(GUESSES, 1, (True, False))])
    assert rates.at(GUESSES, 1)[0] > 0.8
    assert rates.at(GUESSES, 0)[0] < 0.2


def test_what_is_impossible_stays_so():
    rates = Rates()
    nothing = (0.0, float("nan"))
    rates.learn([(nothing, 0, (True, True))])
    assert rates.at(nothing) == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.booleans()), max_size=30), st.floats(0, 1))
@settings(max_examples=50)
def test_rates_are_probabilities(seen, probability):
    rates = Rates(3)
    for guess, level, right in seen:
        rates.learn([((guess,), level, (right,))])
    assert 0 <= rates.at((probability,), 2)[0] <= 1 + 1e-6


def test_the_past_fades():
    rates = Rates()
    for _ in range(2):
        rates.learn([(GUESSES, 0, (True, False))])
    assert rates.seen == pytest.approx(2 * (1 + 0.99))
    later = copy.deepcopy(rates)
    later.learn([(GUESSES, 0, (True, False))])
    assert later.seen > rates.seen == pytest.approx(2 * (1 + 0.99))


def test_rates_stay_probabilities_while_threads_learn() -> None:
    rates = Rates()
    found: list[float] = []

    def learn() -> None:
        for _ in range(300):
            rates.learn([([0.97], 0, [True])] * 3)
            base, slope = rates.fitted()
            found.append(max(b + s for b, s in zip(base, slope, strict=True)))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=learn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert max(found) <= 1 + 1e-12
    assert rates.at([1.0, 0.97]) == [min(1.0, rate) for rate in rates.at([1.0, 0.97])]


def test_a_rate_is_never_above_1_by_rounding() -> None:
    rates = Rates()
    for _ in range(200):
        rates.learn([([1.0], 0, [True])])
        assert rates.at([1.0])[0] <= 1
