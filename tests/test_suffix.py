"""Suffix decoding: the tree against counts by hand, its growth; corpora, memory, trees; and being the default."""

import itertools
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from architectures import build, random_ids
from covering import in_turns
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME, CALL, ENDS, prompt, tokenizer
from test_ngram import call, lines_run, text_of

from assisted import AssistedModelForCausalLM, Suffix
from assisted.core.drafts import DraftingStopped
from assisted.methods import Target, parse, read
from assisted.methods.suffix import draft as suffix
from assisted.methods.suffix.draft import SuffixDrafter, SuffixDrafting
from assisted.methods.suffix.tree import END, KEPT, SuffixTree

LONG = CALL | {"max_new_tokens": 40}
corpora = st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=3)


pytestmark = pytest.mark.usefixtures("invariants")


def tree_of(*texts, depth=5):
    tree = SuffixTree(depth)
    for number, text in enumerate(texts, start=1):
        for token in text:
            tree.append(token)
        if number < len(texts):
            tree.end()
    return tree


def followers(texts, suffix):
    """What followed a suffix in texts, and how often; a finished text is followed by its end."""
    texts = [[*text, END] for text in texts[:-1]] + [list(texts[-1])]
    n = len(suffix)
    return Counter(text[i + n] for text in texts for i in range(len(text) - n) if text[i : i + n] == suffix)


def followers_in_tree(tree, point):
    node, offset = point
    if offset < node.length:
        return {tree.text[node.start + offset]: None}  # the only one; how often is not kept
    return {token: child.count for token, child in node.children.items()}


@given(corpora, st.integers(2, 7))
def test_counts_are_those_of_substrings(texts, depth):
    """For every length at which the end of the text occurred before."""
    for stop in range(1, len(texts[-1]) + 1):
        current = [*texts[:-1], texts[-1][:stop]]
        tree = tree_of(*current, depth=depth)
        lengths = [m for m in range(1, min(depth, stop + 1)) if followers(current, current[-1][-m:])]
        assert lengths == list(range(1, len(tree.points) + 1))
        for length, point in zip(reversed(lengths), tree.points, strict=True):
            expected = followers(current, current[-1][-length:])
            found = followers_in_tree(tree, point)
            assert set(found) == set(expected)
            if point[1] == point[0].length:
                assert found == expected
                assert point[0].total == expected.total()
                del expected[END]
                assert [child.count for child in point[0].top] == sorted(expected.values(), reverse=True)[:KEPT]


@given(corpora, st.integers(2, 7), st.lists(st.integers(0, 3), max_size=12))
def test_another_text_is_followed_through_a_tree(texts, depth, other):
    tree = tree_of(*texts, [], depth=depth)
    points = []
    for token in other:
        points = tree.advance(points, token)
    known = [m for m in range(1, min(depth, len(other) + 1)) if followers([*texts, []], other[-m:])]
    assert len(points) == len(known)
    for length, point in zip(reversed(known), points, strict=True):
        assert set(followers_in_tree(tree, point)) == set(followers([*texts, []], other[-length:]))


@given(corpora, st.integers(2, 7), st.integers(1, 6))
def test_chains_follow_the_most_frequent_child(texts, depth, limit):
    tree = tree_of(*texts, depth=depth)
    for place, point in enumerate(tree.points):
        length = len(tree.points) - place
        found = tree.best_chain(point, limit, 0.2)
        assert len(found.tokens) <= limit
        assert found.parents == list(range(-1, len(found.tokens) - 1))
        path, probability = texts[-1][-length:], 1.0
        for token, said in zip(found.tokens, found.probabilities, strict=True):
            counts = followers(texts, path)
            if len(path) < depth and counts:  # they end there, and where a copy overlaps with what it writes
                assert counts[token] == max(n for follower, n in counts.items() if follower != END)
                probability *= counts[token] / counts.total()
            assert said == pytest.approx(probability)
            assert said >= 0.2
            path = [*path, token]


@given(corpora, st.integers(2, 7), st.integers(1, 6), st.integers(1, 8))
def test_trees_hold_the_chain_and_are_worth_more(texts, depth, limit, nodes):
    tree = tree_of(*texts, depth=depth)
    for point in tree.points:
        found = tree.best_tree(point, limit, 0.1, nodes)
        assert len(found.tokens) <= nodes
        assert all(parent < node for node, parent in enumerate(found.parents))
        pairs = list(zip(found.parents, found.tokens, strict=True))
        assert len(set(pairs)) == len(pairs)  # no twins
        depths = []
        for node, parent in enumerate(found.parents):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            assert found.probabilities[node] <= (1.0 if parent < 0 else found.probabilities[parent])
        assert max(depths, default=0) <= limit
        assert END not in found.tokens
        if nodes >= limit:
            chain = tree.best_chain(point, min(limit, nodes), 0.1)
            assert found.expected >= chain.expected - 1e-9
        assert found.matches(found.tokens[:1]) == min(1, len(found.tokens))


def test_takes_the_most_recent_of_equals():
    tree = tree_of([1, 2, 7, 1, 2, 8, 1, 2])
    assert [tree.best_chain(point, 1, 0.1).tokens for point in tree.points] == [[8], [8]]
    tree = tree_of([1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2])
    assert tree.best_chain(tree.points[0], 1, 0.1).tokens == [7]  # the more frequent of unequals


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(3, 8))
def test_loops_go_on(period, depth):
    tree = tree_of(period * 12, depth=depth)
    best = tree.best_chain(tree.points[0], 4 * len(period), 0.01)
    if depth > 2 * len(period):
        assert best.tokens == period * 4


@pytest.mark.parametrize("period", [1, 700], ids=["one token", "long loop"])
def test_work_a_token_does_not_grow(period):
    tree, steps = SuffixTree(17), itertools.count()

    def grow(tokens):
        for step in itertools.islice(steps, tokens):
            tree.append(step % period)
            tree.best_chain(tree.points[0], 8, 0.1) if tree.points else None

    grow(1400)
    first = lines_run(lambda: grow(1400))
    lines_run(lambda: grow(7000))
    assert lines_run(lambda: grow(1400)) <= 1.1 * first


def test_nodes_are_no_more_than_two_a_token():
    half = random_ids(build(BY_NAME["llama"]), 1, 400).flatten().tolist()
    tree = tree_of(half + half, depth=33)
    pending, nodes = [tree.root], 0
    while pending:
        nodes += 1
        pending += pending.pop().children.values()
    assert nodes <= 2 * 800


def drafting_of(spec, mask=None, trees=True, corpus=()):
    where = call(mask)
    where.target.masks.trees = trees
    return SuffixDrafting(SuffixDrafter(spec, corpus), where)


def test_longer_matches_may_propose_more():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for matched in (1, 2, 3):
        drafting = drafting_of(Suffix(per_match=2))
        draft = drafting.propose(text_of([*text, 0, *text[:matched]]), 8)
        assert draft.tokens.tolist() == [text[matched:][: 2 * matched]]
        assert draft.q is None and draft.parents is None
        assert draft.expected == matched  # the counts say 2 * matched; half of that until it is measured


def test_never_deeper_than_the_budget():
    for spec in (Suffix(per_match=9), Suffix(per_match=9, tree=True, nodes=12, min_probability=0.01)):
        for budget in (1, 2, 3):
            draft = drafting_of(spec).propose(text_of([1, 2, 3, 1, 2, 4, 1, 2, 3, 5, 1, 2]), budget)
            assert 0 < int(draft.depths().max()) <= budget
    assert draft.parents is not None and draft.width > 3  # a tree may have more nodes than that


def test_padding_is_no_text_and_rows_are_on_their_own():
    rows = [[0, 0, 5, 6, 7, 5], [5, 8, 5, 8, 5, 8]]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    drafting = drafting_of(Suffix(), mask)
    draft = drafting.propose(text_of(*rows), 3)
    assert [drafting.rows[row].own.text for row in (0, 1)] == [[5, 6, 7, 5], rows[1]]
    assert draft.tokens.tolist() == [[6, 7, 5], [5, 8, 5]]


def test_estimates_are_corrected_by_what_came():
    drafting = drafting_of(Suffix())
    text = text_of([1, 2, 3, 4, 5, 6, 1, 2], limit=200)
    for _ in range(6):
        first = drafting.propose(text, 3).expected
        text.extend([[3, 4, 5, 6, 1, 2]], None, None)
    assert drafting.propose(text, 3).expected > first > 1
    text.extend([[2, 2, 1]], None, None)
    drafting.propose(text, 3)
    assert drafting.kept.mean() < 1


def test_a_corpus_is_looked_up():
    found = drafting_of(Suffix(), corpus=[[1, 2, 3, 4, 5], [2, 3, 9]]).propose(text_of([7, 1, 2]), 4)
    assert found.tokens.tolist() == [[3, 4, 5]]  # the end of a text is not crossed
    # what the row itself repeats is worth as much, and nearer
    own = drafting_of(Suffix(), corpus=[[1, 2, 3, 4, 5, 6]]).propose(text_of([1, 2, 8, 9, 7, 6, 1, 2]), 3)
    assert own.tokens.tolist() == [[8, 9, 7]]


def test_a_corpus_may_be_text_or_ids():
    target = Target(build(BY_NAME["llama"]), tokenizer())
    letters = target.tokenizer("abcdef", add_special_tokens=False).input_ids
    by_text = Suffix(corpus=["abcdef"]).load(target)
    assert by_text.corpus.text == Suffix(corpus=[letters]).load(target).corpus.text == [*letters, END]
    with pytest.raises(ValueError, match="corpus: texts need the target's tokenizer"):
        Suffix(corpus=["abc"]).load(Target(target.model))
    with pytest.raises(ValueError, match="corpus: 96 is not a token"):
        Suffix(corpus=[[3, 96]]).load(target)
    with pytest.raises(ValueError, match="corpus: got one string"):
        Suffix(corpus="abc")


def test_past_outputs_are_remembered_only_on_request():
    target = build(BY_NAME["llama"])
    ids = random_ids(target, 1, 12, seed=5)
    drafted = {}
    for remember in (False, True):
        model = AssistedModelForCausalLM.from_models(target, draft=Suffix(remember=remember), draft_length=8)
        first = model.generate(ids, **LONG)
        once = model.report.accepted
        assert model.generate(ids, **LONG).tolist() == first.tolist()
        drafted[remember] = model.report.accepted - once
    assert drafted[False] == 0
    assert drafted[True] > 20
    assert model.drafter.past.text == [*first[0, 12:].tolist(), END] * 2  # the output, not the prompt


def test_remembering_rows_of_a_batch_and_forgetting(monkeypatch):
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=Suffix(remember=True), draft_length=4)
    batch = prompt(rows=3)
    kwargs = CALL | {"eos_token_id": ENDS, "attention_mask": batch["attention_mask"]}
    out = model.generate(batch["ids"], **kwargs)
    rows = [row[12:][:count] for row, count in zip(out.tolist(), model.report.row_tokens, strict=True)]
    assert model.drafter.past.text == [token for row in rows for token in [*row, END]]
    monkeypatch.setattr(suffix, "REMEMBERED", 30)
    for _ in range(6):
        assert model.generate(batch["ids"], **kwargs).tolist() == out.tolist()
        assert len(model.drafter.past.text) < 30 + 15 + sum(map(len, rows)) + 3


def test_a_memory_that_grows_meanwhile_does_no_harm():
    drafter = SuffixDrafter(Suffix(remember=True))
    drafter.remember([[1, 2, 3, 4]])
    drafting = SuffixDrafting(drafter, call())
    text = text_of([9, 1, 2])
    assert drafting.propose(text, 1).tokens.tolist() == [[3]]
    drafter.remember([[2, 5, 6], [2, 5, 7], [1, 2, 5]])  # cuts the edge that the row stood on
    text.extend([[5]], None, None)
    assert drafting.propose(text, 1).tokens.tolist() in ([[6]], [[7]])


@pytest.mark.parametrize(("name", "tree"), in_turns(["llama", "gpt2", "gemma3"], [False, True]))
def test_exact_to_the_end_of_the_context(name, tree):
    """No draft reaches beyond max_length or the context, whatever number of nodes it has."""
    target = build(BY_NAME[name], max_position_embeddings=48)
    ids = random_ids(target, 2, 12, seed=8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    kwargs = CALL | {"attention_mask": mask, "max_new_tokens": 36}
    plain = target.generate(ids, **kwargs)
    spec = Suffix(corpus=plain.tolist(), tree=tree, nodes=12, min_probability=0.01, per_match=9)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=9)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=DraftingStopped)
        for new in (1, 2, 7, 36):
            out = model.generate(ids, **kwargs | {"max_new_tokens": new})
            assert out.tolist() == plain[:, : 12 + new].tolist()
    assert model.report.accepted > 20


def test_is_the_default():
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target)
    assert model.spec == Suffix()
    assert parse(None) == parse("suffix") == Suffix()
    assert model.drafter.model is None and model.drafter.models == []
    assert model.get_memory_footprint() > 0
    with pytest.raises(ValueError, match="draft_quantization: 'suffix', the default"):
        parse(None, "nf4")


@pytest.mark.parametrize("draft", ["ngram:3", Suffix(max_match=5, tree=True, corpus=[[3, 4]]), "recycle"])
def test_a_saved_model_without_a_draft_model(draft, tmp_path):
    target = build(BY_NAME["llama"])
    target.save_pretrained(tmp_path / "target")
    model = AssistedModelForCausalLM.from_pretrained(str(tmp_path / "target"), draft=draft)
    model.save_pretrained(tmp_path / "pair")
    assert not (tmp_path / "pair" / "draft").exists()
    again = AssistedModelForCausalLM.from_pretrained(str(tmp_path / "pair"))
    assert type(again.spec) is type(model.spec)
    assert again.spec.written("draft") == model.spec.written("draft")
    ids = random_ids(target, 1, 12, seed=2)
    assert again.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()


def test_specs():
    assert read(Suffix(corpus=["text"], max_match=9).written("draft"), Path()) == Suffix(
        max_match=9
    )  # the corpus is not saved
    for wrong in ({"max_match": 0}, {"min_probability": 0}, {"per_match": 0}, {"nodes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Suffix(**wrong)
    with pytest.raises(ValueError, match="suffix:3"):
        parse("suffix:3")
