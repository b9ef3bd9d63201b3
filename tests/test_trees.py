"""Token trees: the best nodes in any candidates, how many of them pay, and trees of ranked choices, against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assisted.lengths.cost_model import COLUMN, UNMEASURED, Costs, best_size
from assisted.methods.shared.trees import best_paths

COSTS = Costs(((1, 1.0), (2, 1.1), (5, 1.2), (9, 2.0)), 0.1)


@given(
    st.lists(st.floats(0, 1), max_size=8),
    st.integers(0, 5),
    st.none() | st.lists(st.integers(0, 9), min_size=1).map(sorted),
)
def test_the_best_size_makes_the_most_tokens_a_second(probabilities, forwards, sizes):
    probabilities = sorted(probabilities, reverse=True)

    def seconds(nodes):
        return forwards * COSTS.draft + COSTS.verify_seconds(nodes + 1)

    possible = range(len(probabilities) + 1) if sizes is None else [min(n, len(probabilities)) for n in sizes]
    rates = {nodes: (1 + sum(probabilities[:nodes])) / seconds(nodes) for nodes in possible}
    size, rate = best_size(probabilities, seconds, sizes)
    assert rates[size] == pytest.approx(max(rates.values())) == rate


def size_of(probabilities, costs):
    return best_size(probabilities, lambda nodes: costs.draft + costs.verify_seconds(nodes + 1))[0]


def test_the_best_size_before_anything_is_measured():
    assert size_of([0.9, 0.5, COLUMN * 2.5, COLUMN / 2], UNMEASURED) == 3
    assert size_of([], UNMEASURED) == 0
    assert size_of([COLUMN / 2], UNMEASURED) == 0


@pytest.mark.parametrize(
    ("columns", "seconds"), [(1, 1.0), (2, 1.1), (3, 1.1 + 0.1 / 3), (5, 1.2), (7, 1.6), (9, 2.0), (11, 2.4)]
)
def test_costs_lie_on_lines_between_and_behind_what_was_measured(columns, seconds):
    assert COSTS.verify_seconds(columns) == pytest.approx(seconds)


def test_costs_of_one_count_only():
    assert Costs(((1, 2.0),), 0.1).verify_seconds(6) == pytest.approx(2.0 * (1 + 5 * COLUMN))
    assert UNMEASURED.verify_seconds(6) == pytest.approx(1 + 5 * COLUMN)


levels = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.3, 0.5, 1.0]), max_size=3), max_size=3)


@given(levels, st.integers(0, 20))
def test_best_paths_against_all_paths(rates, count):
    tree = best_paths(rates, count)
    paths = [
        path for depth in range(1, len(rates) + 1) for path in itertools.product(*map(range, map(len, rates[:depth])))
    ]
    worth = [math.prod(rates[level][rank] for level, rank in enumerate(path)) for path in paths]
    best = sorted((value for value in worth if value > 0), reverse=True)[:count]
    assert list(tree.worth) == pytest.approx(best)
    places = set()
    for node, (parent, depth, rank) in enumerate(zip(tree.parents, tree.depths, tree.ranks, strict=True)):
        assert parent < node
        assert depth == (1 if parent < 0 else tree.depths[parent] + 1)
        above = 1.0 if parent < 0 else tree.worth[parent]
        assert tree.worth[node] == pytest.approx(above * rates[depth - 1][rank])
        places.add((parent, rank))
    assert len(places) == len(tree.parents)


def test_worth_is_the_probability_of_a_path():
    tree = best_paths([[0.6, 0.3], [0.5]], 4)
    assert tree.worth == pytest.approx((0.6, 0.3, 0.3, 0.15))
