"""A tree is verified in one pass: at every node the logits of its path decoded alone, whatever was read and kept before.

For every kind of mask; models that read none get chains from every drafter.
"""

import dataclasses
import functools

import pytest
import torch
from architectures import build, half_right, random_ids
from covering import in_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import METHODS
from pairs import CALL, no_fallback
from test_runtime import BY_NAME, LIMIT, ROUNDING, Rows, alone
from trees import any_parents, walk

from assisted import AssistedModelForCausalLM, Merged, Suffix, TokenRecycling
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits

TREES = ["llama", "mistral-window", "gemma2", "gemma3", "qwen3_moe", "gpt2", "deepseek_v3"]  # windows are of 8 tokens
SOFT_CAPPED = ("gemma2", "sdpa")  # scores cannot be capped there
WITHOUT_TREES = ["bloom", "mpt", "falcon-alibi"]

every_attention = pytest.mark.parametrize(
    ("name", "attention"),
    [(name, attention) for name in TREES for attention in ("eager", "sdpa") if (name, attention) != SOFT_CAPPED],
)


@functools.cache
def model_of(name, attention):
    return build(dataclasses.replace(BY_NAME[name], attention=attention)).requires_grad_(False)


class TreeRows(Rows):
    """Rounds that read trees, a tree of another shape and size in every row."""

    def tree(self):
        rows, nodes = len(self.texts), self.data.draw(st.integers(1, 7))
        parents = self.data.draw(any_parents(rows, nodes))
        lengths = [self.data.draw(st.integers(0, nodes)) for _ in range(rows)]
        draft = Draft(self.tokens(rows, nodes), torch.tensor(lengths), parents=torch.tensor(parents))
        last = self.tokens(rows, 1)
        logits = self.cached(torch.cat([last, draft.tokens], 1), draft)
        starts = [text + token for text, token in zip(self.texts, last.tolist(), strict=True)]
        # columns behind a row's length hold filler
        texts = [[start + draft.prefix(row, i) for i in range(-1, lengths[row])] for row, start in enumerate(starts)]
        self.same(
            torch.cat([logits[row, : length + 1] for row, length in enumerate(lengths)])[None],
            [[text for of_row in texts for text in of_row]],
        )
        ends = [self.data.draw(st.integers(-1, length - 1)) for length in lengths]
        paths = [[0] + [1 + i for i in walk(parents[row], end)] for row, end in enumerate(ends)]
        padded = torch.tensor([path + [0] * (nodes + 1 - len(path)) for path in paths])
        self.cached.commit([len(path) for path in paths], padded)
        self.texts = [texts[row][end + 1] for row, end in enumerate(ends)]


@every_attention
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_random_rounds_of_chains_and_trees(name, attention, data):
    rows = TreeRows(model_of(name, attention), data)
    for _ in range(data.draw(st.integers(1, 5))):
        data.draw(st.sampled_from([rows.tree, rows.chain, rows.rewind]))()
    rows.tree()
    rows.check()


@every_attention
def test_a_tree_deeper_than_the_window(name, attention):
    """The window counts places in the text, and a branch lies in its slots further apart than in the text."""
    model = model_of(name, attention)
    cached = CachedModel(model, SlotCache(1, LIMIT), Traits.of(model).masks)
    parents = [-1, 0, 0, 0, 1, 1, *range(5, 17)]  # the last branch is 15 deep
    ids = torch.arange(5, 5 + 4 + len(parents))[None]
    draft = Draft(ids[:, 4:], torch.tensor([len(parents)]), parents=torch.tensor([parents]))
    cached.prefill(ids[:, :3], None)
    logits = cached(ids[:, 3:], draft)[0]
    texts = [ids[0, :4].tolist() + draft.prefix(0, node) for node in range(-1, len(parents))]
    expected = alone(model, texts)[range(len(texts)), [len(text) - 1 for text in texts]]
    assert (logits - expected).abs().max() < ROUNDING


@pytest.fixture
def widths(monkeypatch):
    """Of all drafts that are verified, none of which may be a tree."""
    found = []
    forward = CachedModel.__call__

    def watched(self, ids, draft=None, used=None):
        if draft is not None:
            assert draft.parents is None
            found.append(draft.width)
        return forward(self, ids, draft, used)

    monkeypatch.setattr(CachedModel, "__call__", watched)
    return found


def decode_twice_the_same(target, draft, do_sample):
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4)
    ids = random_ids(target, 1, 30, seed=3).repeat(2, 1)
    ids[:, 15:] = ids[:, :15]  # something to copy
    with no_fallback():
        model.generate(ids, **CALL | {"do_sample": do_sample, "max_new_tokens": 24, "use_cache": True})


# that each of these architectures takes what each kind of method drafts is shown in test_methods.py
@pytest.mark.parametrize("method,name", in_turns([method for method in METHODS if method.tree], WITHOUT_TREES))
def test_models_that_read_no_trees_get_chains(name, method, widths):
    target = build(BY_NAME[name])
    assert not Traits.of(target).masks.trees
    if method.refuses(BY_NAME[name]):
        return
    decode_twice_the_same(target, method.draft(target), do_sample=False)
    assert max(widths) > 0 or not method.accepts


@pytest.mark.parametrize("name", WITHOUT_TREES)
def test_models_that_read_no_trees_get_chains_under_sampling(name, widths):
    target = build(BY_NAME[name])
    text = random_ids(target, 4, 30, seed=3).tolist()
    for draft in (Merged((half_right(target), Suffix(corpus=text, tree=True))), TokenRecycling()):
        decode_twice_the_same(target, draft, do_sample=True)
    assert max(widths) > 0
