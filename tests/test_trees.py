"""Token trees: the best nodes in any candidates, how many of them pay, and trees of ranked choices, against brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assisted.drafters.trees import best_paths, top_nodes, worthwhile
from assisted.lengths.costs import COLUMN, UNMEASURED, Costs

STEPS = (0.0, -0.5, -0.5, -1.0, -math.inf, math.nan)  # few, so that ties are common


@st.composite
def candidates(draw, rows=2):
    """Parents and path scores of some nodes, parents first; a step of 0 makes a child as good as its parent."""
    count = draw(st.integers(0, 9))
    parents = [[draw(st.integers(-1, node - 1)) for node in range(count)] for _ in range(rows)]
    steps = [[draw(st.sampled_from(STEPS)) for _ in range(count)] for _ in range(rows)]
    scores = [[] for _ in range(rows)]
    for row in range(rows):
        for parent, step in zip(parents[row], steps[row], strict=True):
            scores[row].append((scores[row][parent] if parent >= 0 else 0.0) + step)
    shape = (rows, count)
    return torch.tensor(parents).view(shape).long(), torch.tensor(scores).view(shape).float()


def trees(parents, nodes):
    """All sets of so many nodes, each with its parent."""
    for chosen in itertools.combinations(range(len(parents)), nodes):
        if all(parents[node] < 0 or parents[node] in chosen for node in chosen):
            yield chosen


@given(candidates(), st.lists(st.integers(0, 10), min_size=2, max_size=2), st.booleans())
def test_top_nodes_are_the_best_tree(tree, counts, alike):
    parents, scores = tree
    rows, count = parents.shape
    tokens = torch.arange(count).repeat(rows, 1)  # a token says which candidate it was
    counts = [counts[0]] * 2 if alike else counts
    draft = top_nodes(tokens, parents, scores, counts[0] if alike else torch.tensor(counts))
    assert draft.q is None
    for row in range(rows):
        real = [node for node in range(count) if scores[row, node] > -math.inf]
        length = int(draft.lengths[row])
        assert length == min(counts[row], len(real))
        kept = draft.tokens[row, :length].tolist()
        assert set(kept) <= set(real)
        assert len(set(kept)) == length
        for place, node in enumerate(kept):  # each under its own parent, which stands before it
            above, parent = int(draft.parents[row, place]), int(parents[row, node])
            assert above < place
            assert (kept[above] if above >= 0 else -1) == parent
        found = scores[row, kept].tolist()
        assert found == sorted(found, reverse=True)
        best = max(
            sum(scores[row, list(nodes)].exp().nan_to_num().tolist()) for nodes in trees(parents[row].tolist(), length)
        )
        assert sum(math.exp(score) for score in found) == pytest.approx(best)


def test_a_draft_of_top_nodes_is_well_formed_on_its_filler_too():
    """Masks and depths are made of all columns."""
    parents, scores = (
        torch.tensor([[-1, 0, 1], [-1, 0, 1]]),
        torch.tensor([[0.0, -1.0, -2.0], [0.0, math.nan, math.nan]]),
    )
    draft = top_nodes(torch.tensor([[5, 6, 7], [5, 6, 7]]), parents, scores, 3)
    assert draft.lengths.tolist() == [3, 1]
    assert bool((draft.parents < torch.arange(3)).all())
    assert draft.depths()[0].tolist() == [1, 2, 3]


COSTS = Costs(((1, 1.0), (2, 1.1), (5, 1.2), (9, 2.0)), 0.1)


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 5), st.integers(0, 8))
def test_worthwhile_makes_the_most_tokens_a_second(probabilities, forwards, limit):
    probabilities = sorted(probabilities, reverse=True)
    rates = [
        (1 + sum(probabilities[:nodes])) / (forwards * COSTS.draft + COSTS.verify_seconds(nodes + 1))
        for nodes in range(min(limit, len(probabilities)) + 1)
    ]
    assert rates[worthwhile(probabilities, COSTS, forwards, limit)] == pytest.approx(max(rates))


def test_worthwhile_before_anything_is_measured():
    assert worthwhile([0.9, 0.5, COLUMN * 2.5, COLUMN / 2], None, 123, 4) == 3
    assert worthwhile([0.9, 0.5], None, 0, 1) == 1
    assert worthwhile([], None, 0, 4) == 0
    assert worthwhile([COLUMN / 2], None, 0, 4) == 0


def test_nodes_that_cost_nothing_are_all_taken():
    flat = Costs(((1, 1.0), (9, 1.0)), 0.1)
    assert worthwhile([0.5, 0.1, 0.01], flat, 1, 3) == 3


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


def test_a_cut_tree_keeps_the_best():
    tree = best_paths([[0.6, 0.3], [0.5]], 4)
    assert tree.worth == pytest.approx((0.6, 0.3, 0.3, 0.15))
    assert tree.cut(2).parents == (-1, -1) or tree.cut(2).parents == (-1, 0)
    assert tree.cut(9) == tree
