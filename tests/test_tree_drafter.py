"""Token trees of a draft model: what it reads, which nodes it proposes, and that large ones change no token."""

from __future__ import annotations

import random

import pytest
import torch
from architectures import build, half_right, random_ids
from pairs import BY_NAME, CALL, require_plain, tokenizer

from assisted import AssistedModelForCausalLM, DraftModel, DraftTree
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.lengths import Adaptive, Costs
from assisted.lengths.cost_model import COLUMN, Timings
from assisted.methods.draft_model.tree import LARGEST, TreeDrafter, TreeReader
from assisted.methods.shared.tree_growth import Offers

SOME = ["llama", "gpt2", "qwen2", "gemma2", "mistral"]  # learned positions, windows, several masks


@pytest.mark.parametrize("name", SOME)
@torch.no_grad()
def test_nodes_read_in_parts_have_the_logits_of_their_paths(name: str) -> None:
    """Two ragged rows, nodes of several depths in one forward pass, more slots than a window."""
    model, choose = build(BY_NAME[name]), random.Random(1)
    masks = Traits.of(model).masks
    runner = CachedModel(model, SlotCache(2, 64), masks)
    ids = random_ids(model, 2, 12, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    runner.prefill(ids, mask)
    reader = TreeReader(runner, 20, lambda logits: logits)
    paths: list[list[list[int]]] = [[], []]
    for width in (1, 3, 5, 4):
        before = reader.columns
        parents = [[choose.randrange(-1, before) for _ in range(width)] for _ in range(2)]
        tokens = [[choose.randrange(3, 90) for _ in range(width)] for _ in range(2)]
        for row in range(2):
            paths[row] += [
                [*(paths[row][parent] if parent >= 0 else []), token]
                for parent, token in zip(parents[row], tokens[row], strict=True)
            ]
        depths = [[len(path) for path in paths[row][before:]] for row in range(2)]
        logits = reader.read(tokens, parents, depths)
        for row in range(2):
            for column in range(width):
                path = torch.tensor([paths[row][before + column]])
                alone = model(torch.cat([ids[row : row + 1, 3 * row :], path], 1)).logits[0, -1]
                assert torch.allclose(logits[row, column], alone, atol=1e-4)
    draft = reader.draft(ids.device)
    assert [draft.prefix(1, node) for node in range(draft.width)] == paths[1]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_a_tree_of_1024_nodes_changes_no_token(name: str) -> None:
    target = build(BY_NAME[name])
    ids = random_ids(target, 1, 12, seed=1)
    spec = DraftTree(half_right(target), nodes=LARGEST)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=12)
    widths = []
    model.watch = lambda round: widths.append(round.draft.width)
    require_plain(model, ids, **CALL)
    assert max(widths) == LARGEST
    assert model.report.tokens_per_pass > 2


def test_the_nodes_are_the_most_probable_paths() -> None:
    """With all nodes read, no path outside the tree is more probable than one inside."""
    offers = Offers()
    offers.add(-1, [5, 6], [0.7, 0.2], [0.7, 0.2])
    offers.keep(4, 0)
    assert offers.unread(9, 1) == [0]
    offers.add(0, [7, 8], [0.5, 0.1], [0.5, 0.1])
    offers.keep(4, 2)
    assert offers.unread(9, 8) == [2, 1, 3]  # of any level, best first
    assert offers.unread(2, 8) == [1]  # children of the others would be too deep
    offers.add(1, [9, 9], [0.9, 0.0], [0.9, 0.0])
    offers.keep(4, 4)
    assert [round(2.718281828 ** offers.scores[node], 3) for node in offers.best] == [0.7, 0.35, 0.2, 0.18]


def test_the_measured_slope_over_many_positions_counts() -> None:
    """Otherwise the guess of 2% a position would keep trees small whose nodes cost nothing."""
    curve = Timings(17, COLUMN, one_apart=True)
    for count in (65, 1, 65, 1):
        curve.add(count, 1.0)
    costs = Costs(curve.knots, 0.0)
    assert costs.verify_seconds(257) < 1.1


def test_adaptive_lets_trees_be_deep_unless_told_otherwise() -> None:
    for policy, depth in ((Adaptive(), 64), (Adaptive(maximum=5), 5)):
        length = policy.start()
        length.drafter_sizes_tree()
        assert not length.needs_q
        assert length.budget([0]) == depth


def test_a_resident_target_gets_chains_from_a_draft_model() -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)
    assert not isinstance(model.drafter, TreeDrafter)
    assert AssistedModelForCausalLM.from_models(target, draft=DraftTree(half_right(target))).drafter.sizes_trees


def test_what_is_refused() -> None:
    target = build(BY_NAME["llama"])
    with pytest.raises(ValueError, match="nodes: 0 is not possible"):
        DraftTree("anywhere", nodes=0)
    with pytest.raises(ValueError, match="'draft-tree' does not name a model"):
        AssistedModelForCausalLM.from_models(target, draft="draft-tree:")
    other = DraftTree(half_right(target), tokenizer=tokenizer(first="0"))
    with pytest.raises(ValueError, match="drafts chains; use DraftModel"):
        AssistedModelForCausalLM.from_models(target, draft=other, tokenizer=tokenizer())
    assert issubclass(DraftTree, DraftModel)
