"""Trees that grow on the device in one function: the same as those that the host grows, and what it learns of them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build, random_ids
from eagle_heads import random_head
from medusa_heads import random_heads
from pairs import BY_NAME, CALL, require_plain
from recording import record_captures
from transformers import MaxLengthCriteria, StoppingCriteriaList

from assisted import AssistedModelForCausalLM, Eagle, Medusa
from assisted.core.drafts import Draft, Round
from assisted.core.text import Text
from assisted.lengths.rates import Rates
from assisted.methods.shared.tree_at_once import Blind, Worth, grow_at_once, reads, table_of
from assisted.methods.shared.tree_growth import Limits, NodeReader, grow

SIZE, WIDTH = 11, 6


class Model(NodeReader):
    """Its state after a token depends on the token and on the state after its parent."""

    def __init__(self, rows, candidates):
        super().__init__(rows)
        self.weights = torch.randn(WIDTH, SIZE), torch.randn(SIZE, WIDTH), torch.randn(WIDTH, WIDTH)
        self.states, self.first, self.number = torch.randn(rows, 1, WIDTH), -1, candidates

    def after(self, states, tokens):
        return torch.tanh(states @ self.weights[2] + self.weights[1][tokens])

    def read(self, tokens, parents, depths):
        above = torch.tensor([[parent - self.first for parent in row] for row in parents])
        self.first = self.columns
        self.add(tokens, parents)
        states = self.states.gather(1, above[:, :, None].expand(-1, -1, WIDTH))
        self.states = self.after(states, torch.tensor(tokens))
        return self.logits()

    def logits(self):
        return 4 * self.states @ self.weights[0]

    def found(self, states):
        sure, tokens = (4 * states @ self.weights[0]).softmax(-1).topk(self.number)
        return torch.cat([sure.double(), tokens.double()], -1)


def learned(levels=1):
    rates = Rates(levels)
    for _ in range(30):
        sure = torch.rand(3).sort(descending=True).values.tolist()
        rates.learn([(sure, level, [bool(torch.rand(()) < 0.4), False, False]) for level in range(levels)])
    return rates


def heads_for(target):
    return random_heads(target.config.hidden_size, target.config.vocab_size)


def nothing_yet():
    return Text(torch.zeros(1, 1, dtype=torch.int64), StoppingCriteriaList([MaxLengthCriteria(9)]), 0, None)


class Plain:
    processors, do_sample = [], False


class Anything:
    needs_q = reads_top = False


@pytest.mark.parametrize("rates", [Rates(), None])
@pytest.mark.parametrize("sizes", [(1, 4, 4, 3), (4, 4, 4, 16), (5, 3, 3, 60), (3, 2, 4, 7)])
@torch.no_grad()
def test_the_tree_is_that_of_the_host(sizes, rates):
    depth, beam, candidates, nodes = sizes
    limits = Limits(depth, beam, candidates, nodes, depth * beam, by_level=True)
    for seed in range(8):
        torch.manual_seed(seed)
        model, known = Model(1, candidates), rates or learned()
        start = model.states
        call: Any = SimpleNamespace(distribution=Plain, length=Anything)
        text = nothing_yet()
        expected = grow(model, call, text, None, known, limits, lambda grown: True)
        states = start

        def read(tokens, places, model=model):
            nonlocal states
            states = model.after(states.gather(1, places[:, :, None].expand(-1, -1, WIDTH)), tokens)
            return states

        table = table_of(known, torch.device("cpu"))
        (made,) = grow_at_once(limits, known.ranks, model.found, table, start[:, 0], read)
        blind, draft = Blind.drafted(made, limits, text, nodes, 1.0)
        host = expected.draft(nodes, expected.worth())
        count = int(host.lengths)
        assert draft.lengths.tolist() == host.lengths.tolist()
        assert draft.tokens[:, :count].tolist() == host.tokens.tolist()
        assert draft.parents[:, :count].tolist() == host.parents.tolist()
        assert (draft.parents[:, count:] == -1).all()
        nothing = Round.counted([(0, 0, 1)])
        grown = blind.grown(nothing)
        assert grown.worth() == pytest.approx(expected.worth(), abs=1e-9)
        (offered,), (of_host,) = grown.offers, expected.offers
        assert offered.below[-1] == of_host.below[-1]
        assert len(offered.below) == sum(reads(limits)) >= len(of_host.below)


def test_how_many_nodes_are_read():
    assert reads(Limits(4, 10, 10, 60, 40)) == [1, 10, 10, 10]
    assert reads(Limits(3, 64, 8, 64, 0)) == [1, 8, 64]


def test_sizes_are_those_of_captured_passes():
    worth = Worth()
    worth.see([0.9, 0.8, 0.7] + [0.001] * 57)
    assert worth.size(60, 1, None) == 3
    for _ in range(200):
        worth.see([0.9] * 60)
    assert worth.size(60, 1, None) == 31
    assert worth.size(2, 1, None) == 2


def test_notes_that_nobody_has_read_are_read():
    """As where rows advance in lockstep, or another drafter has merged the draft."""
    made = torch.cat(
        [torch.tensor([[1, 5, -1, 0, 5]]), torch.tensor([[-0.5, 0.6]], dtype=torch.float64).view(torch.int64)], 1
    )
    limits = Limits(1, 1, 1, 1, 1, by_level=True)
    blind, draft = Blind.drafted(made, limits, nothing_yet(), 1, 0.6)
    other = Round.counted([(0, 0, 1)])
    assert blind.grown(other).offers[0].below == {-1: (0, [0.6])}
    assert draft.notes is blind.notes and blind.grown(other).worth() == [pytest.approx(math.exp(-0.5))]


@pytest.mark.parametrize("method", ["eagle", "medusa"])
@pytest.mark.parametrize("rows", [1, 3])
def test_recorded_trees_change_no_token(method, rows, monkeypatch):
    record_captures(monkeypatch)
    target = build(BY_NAME["llama"])
    head = Eagle(random_head(target)) if method == "eagle" else Medusa(heads_for(target))
    model = AssistedModelForCausalLM.from_models(target, draft=head, draft_length=3)
    ids, noted = random_ids(target, rows, 12, seed=1), []
    model.watch = lambda round: noted.append(round.draft.notes is not None and round.notes is not None)
    for _ in range(3):
        require_plain(model, ids, **CALL)
    assert sum(noted) > len(noted) // 2


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_logits_that_are_no_numbers_end_drafting(method, monkeypatch):
    record_captures(monkeypatch)
    target = build(BY_NAME["llama"])
    head = random_head(target) if method == "eagle" else heads_for(target)
    spec = Eagle(head) if method == "eagle" else Medusa(head)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=3)
    ids = random_ids(target, 1, 12, seed=1)
    for _ in range(2):
        require_plain(model, ids, **CALL)
    with torch.no_grad():
        next(head.parameters()).fill_(float("nan"))
    with pytest.warns(UserWarning, match="not a number"):
        found = model.generate(ids, **CALL)
    assert found.tolist() == target.generate(ids, **CALL).tolist()


def test_a_draft_keeps_its_notes_where_rows_are_filled_up():
    notes = torch.ones(2, 3, dtype=torch.int64)
    draft = Draft(torch.zeros(2, 2, dtype=torch.int64), torch.tensor([2, 2]), notes=notes)
    assert draft.with_chains([1], 0).notes is notes
