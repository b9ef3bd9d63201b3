"""Prompt lookup: the index against a search by hand, its growth, the back-off, and what it learns from the text."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from assisted import NGram
from assisted.core.text import Text
from assisted.lengths.base import Length
from assisted.methods import parse
from assisted.methods.ngram import NGramDrafting, NGramIndex
from assisted.methods.shared.lookup import LONGEST_PAUSE, Backoff

texts = st.lists(st.integers(0, 3), max_size=40)


def call(mask=None):
    target = SimpleNamespace(masks=SimpleNamespace(trees=True))
    return SimpleNamespace(attention_mask=mask, target=target, encoded=None, length=Length())


def text_of(*rows, limit=64):
    criteria = StoppingCriteriaList([MaxLengthCriteria(limit)])
    return Text(torch.tensor(rows), criteria, pad_token=0, streamer=None)


def lines_run(function):
    """How many lines of Python a call executes: a measure of work that no clock disturbs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def by_hand(text, smallest, largest):
    """(n, where the continuation begins) of the longest match of the end, the most recent one of that length."""
    for n in range(largest, smallest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if n <= len(text) and text[start : start + n] == text[-n:]:
                return n, start + n
    return None


@given(texts, st.integers(1, 3), st.integers(0, 3))
def test_finds_the_longest_and_most_recent_match(text, smallest, more):
    index = NGramIndex(smallest, smallest + more)
    for end, token in enumerate(text, start=1):
        index.append(token)
        assert index.match() == by_hand(text[:end], smallest, smallest + more)


@given(texts.filter(bool), st.integers(1, 12), st.data())
def test_a_copy_that_reaches_the_end_goes_on_with_itself(text, count, data):
    index = NGramIndex(1, 1)
    for token in text:
        index.append(token)
    place = data.draw(st.integers(0, len(text) - 1))
    grown = list(text)
    for step in range(count):
        grown.append(grown[place + step])
    assert index.continuation(place, count) == grown[len(text) :]


@pytest.mark.parametrize("text", [[1], list(range(90))], ids=["one token", "long loop"])
def test_work_a_token_does_not_grow(text):
    index = NGramIndex(2, 4)

    def grow(tokens):
        for step in range(tokens):
            index.append(text[step % len(text)])
            index.match()

    first = lines_run(lambda: grow(1000))
    lines_run(lambda: grow(8000))
    assert lines_run(lambda: grow(1000)) <= 1.1 * first


def test_backs_off_after_misses_and_recovers():
    backoff = Backoff()
    asked, drafted = 0, []
    for _ in range(200):
        tokens = backoff.allowed(8)
        drafted.append(tokens)
        if tokens:
            asked += 1
            backoff.learn(0)
    assert drafted[:4] == [8, 4, 2, 0]
    assert asked < 25
    assert max(len(run) for run in "".join("x" if t else "." for t in drafted).split("x")) == LONGEST_PAUSE
    while not backoff.allowed(8):
        pass
    backoff.learn(1)
    assert backoff.allowed(8) == 8


def test_learns_from_the_text_that_came_whoever_drafted_it():
    drafting = NGramDrafting(NGram(2, 1), call())
    text = text_of([1, 2, 3, 4, 1, 2])
    draft = drafting.propose(text, 3)
    assert draft.tokens.tolist() == [[3, 4, 1]]
    assert draft.parents is None and draft.q is None
    before = draft.expected
    assert 0 < before < 3
    text.extend([[3, 4, 1, 2]], None, None)  # all three came true
    assert drafting.propose(text, 3).expected > before
    text.extend([[9]], None, None)
    assert drafting.propose(text, 3).width == 0  # nothing like 9 before
    assert drafting.pauses[0].misses == 1


def test_padding_is_no_text():
    rows = [[0, 0, 5, 6], [5, 6, 5, 6]]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    drafting = NGramDrafting(NGram(2, 1), call(mask))
    draft = drafting.propose(text_of(*rows), 2)
    assert [drafting.indexes[row].text for row in (0, 1)] == [[5, 6], [5, 6, 5, 6]]
    assert draft.lengths.tolist() == [0, 2]
    assert draft.tokens[1].tolist() == [5, 6]
    assert draft.expected == pytest.approx((0.5 + 0.25) / 2)  # one row of two


def test_rows_that_ended_or_are_nearly_full_are_left_alone():
    drafting = NGramDrafting(NGram(1, 1), call())
    text = text_of([5, 5, 5], [5, 5, 5], [5, 5, 5], limit=6)
    text.extend([[5, 5], [5], []], None, None)
    text.ended[2] = True
    assert drafting.propose(text, 4).lengths.tolist() == [0, 1, 0]


def test_specs():
    assert parse("ngram") == NGram()
    assert parse("ngram:3") == NGram(3, 2)
    assert parse("ngram:1") == NGram(1, 1)
    for wrong in ("ngram:0", "ngram:x"):
        with pytest.raises(ValueError, match=r"max_ngram|ngram:x"):
            parse(wrong)
    with pytest.raises(ValueError, match="max_ngram"):
        NGram(2, 3)


class Two(Length):
    """Proposes two tokens of what has been found."""

    def fit(self, found):
        return min(2, max(found))


def test_rows_propose_as_many_tokens_as_fit_the_batch():
    repeats, others = [5, 6, 7, 8, 9, 10] * 3, list(range(20, 38))
    for length, rows, expected in (
        (Length(), [repeats, others], [6, 0]),
        (Two(), [repeats, others], [2, 0]),
        (Two(), [repeats, repeats], [2, 2]),
        (Two(), [others, others], [0, 0]),
        (Two(), [repeats], [6]),  # there is nobody to pay for it
    ):
        given = call()
        given.length = length
        draft = NGramDrafting(NGram(), given).propose(text_of(*rows), 6)
        assert draft.lengths.tolist() == expected
        assert draft.tokens[0].tolist() == [5, 6, 7, 8, 9, 10][: draft.width]
