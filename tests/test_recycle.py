"""Token recycling: the tree's shape, the table, drafts made of both; and trees where rows are judged in lockstep."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from architectures import build, random_ids
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME, CALL
from test_ngram import call, text_of
from test_sampling import ALPHA, NEW_TOKENS, PROMPT, Doubled, counts, exact_distribution, p_value, tiny
from transformers import LogitsProcessorList

from assisted import AssistedModelForCausalLM, TokenRecycling
from assisted.core.drafts import Round
from assisted.methods import parse, recycle
from assisted.methods.recycle import RANKS, RecyclingDrafter, RecyclingDrafting, shape

pytestmark = pytest.mark.usefixtures("invariants")


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, len(RANKS)))
def test_shapes_are_trees(nodes, depth, successors):
    tree = shape(nodes, depth, successors)
    assert len(tree.parents) == len(tree.ranks) == len(tree.worth) == tree.levels[-1] <= nodes
    pairs = list(zip(tree.parents, tree.ranks, strict=True))
    assert len(set(pairs)) == len(pairs)
    assert max(tree.ranks) < successors
    level = [next(i for i, stop in enumerate(tree.levels[1:]) if node < stop) for node in range(len(pairs))]
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert level[node] == (0 if parent < 0 else level[parent] + 1) < depth


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_shapes_hold_the_most_probable_paths(nodes, depth, successors):
    paths = [p for d in range(1, depth + 1) for p in itertools.product(range(successors), repeat=d)]
    best = sorted((math.prod(RANKS[rank] for rank in path) for path in paths), reverse=True)[:nodes]
    assert sum(shape(nodes, depth, successors).worth) == pytest.approx(sum(best))


def test_one_successor_makes_a_chain():
    assert shape(4, 9, 1).parents == (-1, 0, 1, 2)


def drafting_of(nodes=6, successors=2, vocabulary=12, mask=None, trees=True):
    where = call(mask)
    where.target.masks.trees, where.vocab_size = trees, vocabulary
    return RecyclingDrafting(RecyclingDrafter(nodes, successors), where)


def logits_for(*rows, vocabulary=12):
    """[B, n + 1, V] whose best tokens are those named, the best first."""
    logits = torch.zeros(len(rows), len(rows[0]), vocabulary)
    for row, columns in enumerate(rows):
        for column, best in enumerate(columns):
            for place, token in enumerate(best):
                logits[row, column, token] = 9.0 - place
    return logits


def seen(draft, logits):
    """The round of a draft, as far as a table learns from it."""
    counts = [(0, 0, 1)] * len(logits)
    return replace(Round.counted(counts), draft=draft, logits=logits)


def test_the_prompts_own_successors_are_known_the_most_recent_first():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    drafting = drafting_of(mask=mask)
    draft = drafting.propose(text_of([7, 5, 1, 2, 1, 3, 1], [4, 8, 4, 9, 4, 6, 4]), 1)
    assert drafting.table[1].tolist() == [3, 2]
    assert drafting.table[4].tolist() == [6, 9]  # the third is forgotten
    assert drafting.table[7].tolist() == [-1, -1]  # padding
    assert draft.tokens.tolist() == [[3, 2], [6, 9]]
    assert draft.parents.tolist() == [[-1, -1], [-1, -1]]
    assert draft.expected == pytest.approx(RANKS[0] + RANKS[1])


def test_a_successor_that_returns_is_the_most_recent_again():
    drafting = drafting_of()
    drafting.propose(text_of([1, 2, 1, 3, 1, 2, 1]), 1)
    assert drafting.table[1].tolist() == [2, 3]


def test_every_verified_node_leaves_its_successors():
    drafting = drafting_of(nodes=4)
    text = text_of([1, 2, 1])
    draft = drafting.propose(text, 2)
    assert draft.tokens.tolist() == [[2, 1]]  # the prompt knows no second successor
    logits = logits_for([(2, 4), (5, 6), (8, 9)])
    text.extend([[2, 5]], None, None)
    drafting.observe(seen(draft, logits))
    assert drafting.table[2].tolist() == [5, 6]
    assert drafting.table[1].tolist() == [8, 9]  # the rejected node's, seen last
    assert drafting.table[-1].tolist() == [-1, -1]
    assert drafting.propose(text, 2).width == 0  # nothing is known of 5


def test_unknown_nodes_are_left_out_and_the_rest_is_a_tree():
    drafting = drafting_of(nodes=6)
    text = text_of([1, 9], [2, 9])
    drafting.propose(text, 3)
    drafting.table[:] = -1
    drafting.table[9] = torch.tensor([3, 4])
    drafting.table[4] = torch.tensor([5, -1])
    draft = drafting.propose(text, 3)
    assert draft.lengths.tolist() == [3, 3]
    assert draft.tokens[0].tolist() == [3, 4, 5]
    assert draft.parents[0].tolist() == [-1, -1, 1]


def test_rows_of_a_batch_teach_each_other_and_ended_ones_are_silent():
    drafting = drafting_of()
    text = text_of([1, 2, 9], [3, 4, 9], [5, 6, 9])
    draft = drafting.propose(text, 2)
    assert draft.width == 0
    text.extend([[7], [1], [1]], None, None)
    text.ended[2] = True
    drafting.observe(seen(draft, logits_for([(7, 8)], [(1, 2)], [(1, 2)])))
    assert drafting.table[9].tolist() in ([7, 8], [1, 2])
    draft = drafting.propose(text, 2)
    assert draft.tokens[1, 0].tolist() == 2  # known from the first row's prompt
    assert draft.lengths[2] == 0


def test_learns_from_other_drafters_proposals():
    """Among several drafters it may not have been asked this round."""
    drafting = drafting_of()
    text = text_of([1, 2])
    draft = drafting.propose(text, 1)
    for new, best in ((3, (3, 4)), (5, (5, 6)), (7, (7, 8))):
        text.extend([[new]], None, None)
        drafting.observe(seen(draft, logits_for([best])))
    assert [drafting.table[token].tolist() for token in (2, 3, 5)] == [[3, 4], [5, 6], [7, 8]]


def test_chains_where_the_target_reads_no_trees():
    drafting = drafting_of(trees=False)
    draft = drafting.propose(text_of([1, 2, 1, 3, 1]), 3)
    assert draft.parents is None
    assert draft.tokens.tolist() == [[3, 1, 3]]


def test_nothing_outlives_a_call():
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft="recycle", draft_length=4)
    ids = random_ids(target, 1, 12, seed=5)
    reports = []
    for _ in range(2):
        assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
        reports.append((model.report.drafted, model.report.accepted))
    assert reports[0] == reports[1]


def test_trees_in_step_follow_the_targets_distribution():
    target = tiny(0)
    model = AssistedModelForCausalLM.from_models(target, draft=TokenRecycling(nodes=6), draft_length=2)
    kwargs = {"top_k": 0, "logits_processor": LogitsProcessorList([Doubled()])}
    torch.manual_seed(3)
    many = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "num_return_sequences": 4}
    drawn = torch.cat([model.generate(PROMPT, **many, **kwargs) for _ in range(500)])
    assert model.totals.accepted > 200
    assert p_value(counts(drawn), exact_distribution(target, **kwargs)) > ALPHA


def test_specs():
    assert parse("recycle") == TokenRecycling()
    target = build(BY_NAME["llama"])
    assert TokenRecycling().load(recycle.Target(target)).nodes == recycle.NODES_CPU
    assert TokenRecycling(nodes=5).load(recycle.Target(target)).nodes == 5
    for wrong in ({"nodes": 0}, {"successors": 0}, {"successors": 9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TokenRecycling(**wrong)
    with pytest.raises(ValueError, match="recycle:80"):
        parse("recycle:80")
