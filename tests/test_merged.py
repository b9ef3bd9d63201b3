"""Merged drafters: one tree of their chains, with every path once and every candidate's own distribution."""

from dataclasses import replace

import pytest
import torch
from architectures import build, half_right, random_ids
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME, CALL, no_fallback, require_plain
from transformers import LogitsProcessorList

from assisted import AssistedModelForCausalLM, Merged, Suffix
from assisted.core.drafts import Draft
from assisted.distribution import Distribution
from assisted.methods.shared.trees import merge

pytestmark = pytest.mark.usefixtures("invariants")


chains = st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=5), min_size=1, max_size=4)


@given(st.lists(chains, min_size=1, max_size=3))
def test_merging_keeps_every_path_once(drafts_by_row):
    """Rows of chains, as many drafts as the longest row has."""
    count = max(map(len, drafts_by_row))
    drafts = []
    for number in range(count):
        rows = [row[number] if number < len(row) else [] for row in drafts_by_row]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [9] * (width - len(row)) for row in rows]).view(len(rows), width).long()
        drafts.append(Draft(tokens, torch.tensor([len(row) for row in rows])))
    tree = merge(drafts)
    for row, its_chains in enumerate(drafts_by_row):
        paths = {tuple(tree.prefix(row, node)) for node in range(int(tree.lengths[row]))}
        assert len(paths) == int(tree.lengths[row])  # no node twice
        assert paths == {tuple(chain[: n + 1]) for chain in its_chains for n in range(len(chain))}
        assert all(int(tree.parents[row, node]) < node for node in range(int(tree.lengths[row])))


def test_a_merged_tree_of_trees():
    chain = Draft(torch.tensor([[1, 2]]), torch.tensor([2]))
    tree = Draft(torch.tensor([[1, 3, 2, 4]]), torch.tensor([4]), parents=torch.tensor([[-1, -1, 0, 2]]))
    merged = merge([chain, tree])
    assert merged.tokens.tolist() == [[1, 2, 3, 4]]
    assert merged.parents.tolist() == [[-1, 0, -1, 1]]


def distribution(*tokens, vocabulary=6):
    """[1, n, V]: a distribution of its own for every token, which it gives some of its mass to."""
    distributions = torch.rand(1, len(tokens), vocabulary, generator=torch.Generator().manual_seed(sum(tokens)))
    return distributions / distributions.sum(-1, keepdim=True)


def chain(*tokens, q=None):
    return Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), q)


def test_every_candidate_keeps_the_distribution_that_it_was_drawn_from():
    one, two = distribution(1, 2, 3), distribution(1, 4)
    tree = merge([chain(1, 2, 3, q=one), chain(1, 4, q=two)])
    # the second 1 is a leaf: it counts as tried, and what follows it hangs on the first
    assert tree.tokens.tolist() == [[1, 2, 3, 1, 4]]
    assert tree.parents.tolist() == [[-1, 0, 1, -1, 0]]
    assert tree.q.equal(torch.cat([one, two], 1))


def test_certain_candidates_come_last_and_need_no_twin():
    q = distribution(1, 2)
    tree = merge([chain(1, 3), chain(5), chain(1, 2, q=q)])
    assert tree.tokens.tolist() == [[1, 2, 3, 5]]
    assert tree.parents.tolist() == [[-1, 0, 0, -1]]
    assert tree.q[:, :2].equal(q)
    assert tree.q[0, 2:].argmax(-1).tolist() == [3, 5] and tree.q[0, 2:].amax(-1).tolist() == [1, 1]


def test_rows_may_have_trees_of_different_sizes():
    one = Draft(torch.tensor([[1, 2], [3, 0]]), torch.tensor([2, 1]), torch.rand(2, 2, 6))
    two = Draft(torch.tensor([[1], [0]]), torch.tensor([1, 0]), torch.rand(2, 1, 6))
    tree = merge([one, two])
    assert tree.lengths.tolist() == [3, 1]
    assert tree.tokens[0].tolist() == [1, 2, 1] and tree.parents[0].tolist() == [-1, 0, -1]
    assert tree.tokens[1, 0] == 3 and tree.parents[1].tolist() == [-1] * 3
    assert tree.q[0, 2].equal(two.q[0, 0]) and tree.q[1, 0].equal(one.q[1, 0])


def test_drawing_accepts_more_than_proposing_the_most_probable():
    """Of a draft that is half right, at a temperature at which its argmax is seldom what the target draws."""
    target = build(BY_NAME["llama"])
    members = half_right(target), half_right(target, 2)
    model = AssistedModelForCausalLM.from_models(target, draft=Merged(members), draft_length=3)
    ids = random_ids(target, 8, 12, seed=3)
    start = model.drafter.start
    argmax = Distribution(LogitsProcessorList(), do_sample=False)
    rates = []
    torch.manual_seed(0)
    for begin in (start, lambda call: start(replace(call, distribution=argmax))):
        model.drafter.start = begin
        with no_fallback():
            model.generate(ids, **CALL | {"do_sample": True, "top_k": 0, "temperature": 3.0, "max_new_tokens": 60})
        rates.append(model.report.tokens_per_pass)
    assert rates[0] > rates[1]


def test_drafters_that_take_turns_are_refused():
    target = build(BY_NAME["llama"])
    with pytest.raises(ValueError, match=r"draft: .*name them one by one"):
        AssistedModelForCausalLM.from_models(target, draft=Merged((["suffix", "ngram"], "recycle")))
    with pytest.raises(ValueError, match="at least two"):
        Merged(("suffix",))


def test_merged_trees_within_merged_trees():
    target = build(BY_NAME["llama"])
    inner = Merged((half_right(target), Suffix()))
    model = AssistedModelForCausalLM.from_models(target, draft=Merged((inner, half_right(target, 2))), draft_length=3)
    ids = random_ids(target, 1, 12, seed=3)
    require_plain(model, ids, **CALL)
    with no_fallback():
        model.generate(ids, **CALL | {"do_sample": True})
    assert model.report.accepted > 0
