"""Draft: depths, ancestors and prefixes of chains and of random trees, against a plain walk over parents."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import any_parents, walk

from assisted.core.drafts import Draft
from assisted.engine import masks

trees = st.tuples(st.integers(1, 3), st.integers(0, 7)).flatmap(lambda shape: any_parents(*shape))  # [B][n]


def tree(parents):
    shape = len(parents), len(parents[0])
    tokens = torch.arange(10, 10 + shape[0] * shape[1]).view(shape)
    lengths = torch.full(shape[:1], shape[1])
    return Draft(tokens, lengths, parents=torch.tensor(parents, dtype=torch.int64).view(shape))


def check(draft, parents):
    """Everything a draft says of its nodes is what the walk says."""
    width = len(parents[0])
    depths, ancestors = draft.depths(), draft.ancestors()
    assert depths.shape == (len(parents), width)
    assert ancestors.shape == (len(parents), width, width)
    assert ancestors.dtype == torch.bool
    for row, of_row in enumerate(parents):
        for node in range(width):
            path = walk(of_row, node)
            assert depths[row, node] == len(path)
            assert ancestors[row, node].nonzero()[:, 0].tolist() == path
            assert draft.prefix(row, node) == draft.tokens[row, path].tolist()
        assert draft.prefix(row, -1) == []


@settings(max_examples=80, deadline=None)
@given(trees)
def test_trees(parents):
    check(tree(parents), parents)


@settings(max_examples=40, deadline=None)
@given(trees)
def test_columns_of_trees(parents):
    """With the last committed token, an ancestor of all, before them; on the host and by operations."""
    draft, width = tree(parents), len(parents[0])
    with pytest.MonkeyPatch.context() as patch:
        for few in (masks.FEW, -1):
            patch.setattr(masks, "FEW", few)
            depths, seen = masks.column_depths(draft, width + 1, "cpu"), masks.column_ancestors(draft)
            assert depths.tolist() == [[0, *of_row] for of_row in draft.depths().tolist()]
            assert depths.dtype == torch.int64
            assert seen[:, :, 0].all()
            assert not seen[:, 0, 1:].any()
            assert torch.equal(seen[:, 1:, 1:], draft.ancestors())
            known = torch.tensor([[4], [0], [6]])[: len(parents)]
            made = masks.Masks(True, {"full": None}, False).made(known, depths, draft, None, 9 + width, torch.float32)
            expected = torch.zeros(len(parents), width + 1, 9 + width, dtype=torch.bool)
            for row, length in enumerate(known[:, 0].tolist()):
                expected[row, :, :length] = True
                expected[row, :, length : length + width + 1] = seen[row]
            assert torch.equal(made, expected[:, None])


@pytest.mark.parametrize("width", [0, 1, 5])
def test_a_chain_is_the_tree_of_only_children(width):
    parents = [list(range(-1, width - 1))] * 2
    draft = tree(parents)
    check(draft, parents)
    check(dataclasses.replace(draft, parents=None), parents)


def test_empty_and_frozen():
    draft = Draft.empty(3)
    assert draft.width == 0
    assert draft.tokens.shape == (3, 0)
    assert draft.lengths.tolist() == [0, 0, 0]
    assert draft.parents is None
    assert draft.q is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        draft.tokens = torch.ones(3, 1)


def test_chains_are_no_deeper_than_the_trees_beside_them():
    """Of four nodes, two levels deep; the nodes that are left over stand below the root."""
    parents = torch.tensor([[-1, -1, 0, 1], [-1, -1, -1, -1]])
    draft = Draft(torch.tensor([[5, 6, 7, 8], [0, 0, 0, 0]]), torch.tensor([4, 0]), parents=parents)
    changed = draft.with_chains([1], 9)
    assert changed.tokens.tolist() == [[5, 6, 7, 8], [9, 9, 9, 9]]
    assert changed.parents.tolist() == [[-1, -1, 0, 1], [-1, 0, -1, -1]]
    assert changed.depths().tolist() == [[1, 1, 2, 2], [1, 2, 1, 1]]
    chain = Draft(torch.tensor([[5, 6, 7]] * 2), torch.tensor([3, 0])).with_chains([1], 9)
    assert chain.parents is None and chain.lengths.tolist() == [3, 3]
