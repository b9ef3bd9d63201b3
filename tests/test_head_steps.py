"""EAGLE-3 heads in C: what they draft is what the head says, and trees are those that grow in Python."""

import pytest
import torch
from covering import in_turns
from eagle_heads import random_head, trained_head
from pairs import CALL, said_by
from test_fused_head import KINDS
from test_native import LLAMA, needed, with_own_epsilons
from transformers import LlamaForCausalLM

from assisted import AssistedModelForCausalLM, Eagle
from assisted.distribution import Distribution
from assisted.engine.agreement import apart
from assisted.fast import head_steps
from assisted.lengths import Confidence
from assisted.methods.eagle.draft import HeadDrafting
from assisted.methods.eagle.fused import fused_head
from assisted.methods.shared.runner import HeadRunner

pytestmark = [needed, pytest.mark.usefixtures("invariants")]
FORMS = ["plain", "norm before residual", "norms before the fusion", "reduced vocabulary", "biases", "qwen3 layer"]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval()


def pair_of(target, kind="plain", draft_length=5, **options):
    head = with_own_epsilons(trained_head(target, 3, **KINDS[kind]))
    return AssistedModelForCausalLM.from_models(target, draft=Eagle(head, **options), draft_length=draft_length)


def trees(monkeypatch, model, ids, in_c, **kwargs):
    """The text of a call, and its trees."""
    grown = []
    with monkeypatch.context() as patch:
        sized = HeadDrafting.best_of

        def best_of(self, tree, most):
            grown.append((tree.offers, tree.forwards))
            return sized(self, tree, most)

        patch.setattr(HeadDrafting, "best_of", best_of)
        if not in_c:
            patch.setattr(HeadRunner, "tree", lambda *args: None)
        return model.generate(ids, **CALL, **kwargs), grown


def assert_same(found, expected):
    """Trees of several rounds."""
    assert len(found) == len(expected) > 1
    for ((mine,), forwards), ((theirs,), passes) in zip(found, expected, strict=True):
        assert forwards == passes
        for name in ("tokens", "parents", "depths", "best"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.scores == pytest.approx(theirs.scores, abs=1e-4)
        assert mine.below.keys() == theirs.below.keys()
        for node, (first, sure) in mine.below.items():
            assert theirs.below[node] == (first, pytest.approx(sure, abs=1e-4))


@pytest.mark.parametrize(("kind", "length"), in_turns(FORMS, [5, Confidence(0.1)]))
def test_trees_are_those_that_grow_in_python(kind, length, target, monkeypatch):
    """Of several rounds, whose outcomes change the rates; and in a second call."""
    ids = torch.arange(5, 25)[None]
    calls, read = [], head_steps.TreeInC.read
    monkeypatch.setattr(head_steps.TreeInC, "read", lambda tree: calls.append(0) or read(tree))
    plain = said_by(target, input_ids=ids, **CALL)
    one, two = pair_of(target, kind, length), pair_of(target, kind, length)
    for _ in range(2):
        text, found = trees(monkeypatch, one, ids, in_c=True)
        assert calls
        calls.clear()
        other, expected = trees(monkeypatch, two, ids, in_c=False)
        assert not calls
        assert torch.equal(text, plain)
        assert torch.equal(other, plain)
        assert_same(found, expected)


@pytest.mark.usefixtures("processor")
def test_trees_on_other_processors(target, monkeypatch):
    ids = torch.arange(5, 25)[None]
    found, expected = (
        trees(monkeypatch, pair_of(target, "norms before the fusion"), ids, in_c)[1] for in_c in (True, False)
    )
    assert_same(found, expected)


OTHERS = {
    "one candidate": ("plain", {"top_k": 1}),
    "few nodes": ("plain", {"top_k": 7, "nodes": 5}),
    "many nodes": ("plain", {"nodes": 40}),
    "more candidates than draft tokens": ("reduced vocabulary", {"top_k": 50}),
}


@pytest.mark.parametrize("limits", OTHERS)
def test_trees_of_other_limits(limits, target, monkeypatch):
    ids, (kind, options) = torch.arange(30, 40)[None], OTHERS[limits]
    one, two = pair_of(target, kind, **options), pair_of(target, kind, **options)
    _, found = trees(monkeypatch, one, ids, in_c=True)
    _, expected = trees(monkeypatch, two, ids, in_c=False)
    assert [[offers.best for offers in each] for each, _ in found] == [[o.best for o in each] for each, _ in expected]


@pytest.mark.parametrize("length", [4, Confidence(0.2)])
def test_sampled_chains_of_a_reduced_vocabulary(length, target, monkeypatch):
    """The distribution over the tokens that the head knows is the one over all, and so are the tokens drawn from it."""
    texts = []
    for by_rank in (True, False):
        if not by_rank:
            monkeypatch.setattr(Distribution, "by_rank", False)
        model = pair_of(target, "reduced vocabulary", length)
        torch.manual_seed(0)
        kwargs = {**CALL, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
        texts.append((model.generate(torch.arange(5, 25)[None], **kwargs).tolist(), model.report.drafted))
    assert texts[0] == texts[1]
    assert texts[0][1] > 10


def test_chains_are_those_of_single_steps(target, monkeypatch):
    ids = torch.arange(5, 25)[None]
    drafts = []
    for in_c in (True, False):
        model, seen = pair_of(target, tree=False), []
        start = model.drafter.start
        with monkeypatch.context() as patch:
            if not in_c:
                patch.setattr(HeadRunner, "chain", lambda *args: None)

            def watched(call, start=start, seen=seen):
                drafting = start(call)
                propose = drafting.propose
                drafting.propose = lambda *args: seen.append(propose(*args)) or seen[-1]
                return drafting

            patch.setattr(model.drafter, "start", watched)
            model.generate(ids, **CALL)
        drafts.append([draft.tokens.tolist() for draft in seen])
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 1


class Certain(Confidence):
    """A policy that reads the whole distribution."""

    def start(self, earlier=None):
        length = super().start(earlier)
        length.reads_top = False
        return length


def test_where_it_cannot_run_in_c_python_drafts(target, monkeypatch):
    """Processors, policies that ask for probabilities, batches and padding."""
    monkeypatch.setattr(head_steps.TreeInC, "read", None)
    ids = torch.arange(5, 25)[None]
    for model, kwargs in (
        (pair_of(target), {"repetition_penalty": 1.2}),
        (pair_of(target, draft_length=Certain()), {}),
    ):
        text = model.generate(ids, **CALL, **kwargs)
        assert torch.equal(text, said_by(target, input_ids=ids, **CALL, **kwargs))
        assert model.report.drafted
    two, mask = torch.cat([ids, ids.flip(1)]), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :3] = 0
    kwargs = {"input_ids": two, "attention_mask": mask, **CALL}
    assert torch.equal(model.generate(**kwargs), said_by(target, **kwargs))


def test_the_reason_why_steps_do_not_run_in_c_is_kept(target):
    ids = torch.arange(5, 25)[None]
    padded = {"attention_mask": (torch.arange(20) > 2).long()[None]}
    model = pair_of(target)
    for given, kwargs, reason in (
        (ids, {}, None),
        (torch.cat([ids, ids]), {}, "steps in C are those of one row"),
        (ids, padded, "the prompt has padding"),
        (ids, {}, None),
    ):
        model.generate(given, **CALL | kwargs)
        assert model.drafter.why_not_in_c == reason
    head = pair_of(target, "two layers").drafter.head
    assert fused_head(head).module.steps_with(target) == "it has several layers"
    head.requires_grad_(False).to(torch.float16)  # of which nothing may be copied
    assert fused_head(head).module.steps_with(target) == "its layers run as they are"


@pytest.mark.parametrize("tree", [True, False])
def test_logits_that_are_not_numbers_end_the_drafting(tree, target):
    model = pair_of(target, tree=tree)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        model.drafter.head.lm_head.weight[7, 3] = float("nan")
    with pytest.warns(UserWarning, match="not a number"):
        text = model.generate(ids, **CALL)
    assert torch.equal(text, said_by(target, input_ids=ids, **CALL))


def test_a_head_that_changes_drafts_with_its_new_weights(target, monkeypatch):
    model, ids = pair_of(target), torch.arange(5, 25)[None]
    _, before = trees(monkeypatch, model, ids, in_c=True)
    with torch.no_grad():
        model.drafter.head.lm_head.weight.mul_(-1)
    _, after = trees(monkeypatch, model, ids, in_c=True)
    assert before[0][0][0].tokens != after[0][0][0].tokens


@pytest.mark.usefixtures("processor")
def test_a_head_of_bfloat16_on_other_processors(target):
    test_a_head_of_bfloat16_runs_in_8_bits(target)


@pytest.mark.parametrize("kind", [*FORMS, "one norm before it"])
def test_features_are_fused_as_by_the_head(kind, target):
    head = random_head(target, 3, **KINDS[kind])
    if kind == "norms before the fusion":
        for norm in head.fc_norm:
            torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    steps = fused_head(head).module.steps_with(target)
    features = torch.randn(1, 5, head.fc.in_features, generator=torch.Generator().manual_seed(0))
    found = steps.fuse(features)
    assert (found is None) == (kind == "one norm before it")  # a norm of all of them does not run in C
    if found is not None:
        with torch.no_grad():
            assert torch.allclose(found, head.fuse(features), atol=1e-5)


def test_a_head_of_bfloat16_runs_in_8_bits(target):
    head = random_head(target, 3).to(torch.bfloat16)
    made = fused_head(head).module
    products = [*made.layers[0].native.products, made.lm_head.run.native, made.fc.product.native]
    assert {(product.struct.bits, product.struct.input_bits) for product in products} == {(8, 8)}
    assert head.lm_head.weight.dtype == torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 1, 6, 128, generator=generator).bfloat16()
    with torch.no_grad():
        found, expected = (part.logits(part(*states)) for part in (made, head))
    assert apart(found, expected) < 0.05
