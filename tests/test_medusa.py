"""Medusa: which state the heads are shown, chains and trees, what is learned of them, and pairs that are saved."""

import math
from contextlib import nullcontext

import pytest
import torch
from architectures import build, random_ids
from medusa_heads import knowing, random_heads
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt, require_plain

from assisted import AssistedModelForCausalLM, Medusa, Suffix
from assisted.lengths import Costs
from assisted.lengths.adaptive import Adaptive
from assisted.methods import parse
from assisted.methods.medusa import draft as medusa

NEW = 24


pytestmark = pytest.mark.usefixtures("invariants")


def written(target, length=9, seed=3):
    """A prompt and what the target writes after it."""
    ids = random_ids(target, 1, length, seed)
    return ids, target.generate(ids, attention_mask=torch.ones_like(ids), **CALL | {"max_new_tokens": NEW})


def pair(target, heads, draft_length=4, **fields):
    return AssistedModelForCausalLM.from_models(target, draft=Medusa(heads, **fields), draft_length=draft_length)


@pytest.mark.parametrize(
    ("name", "tree"), [("llama", True), ("llama", False), ("gemma3", True), ("bloom", True), ("deepseek_v3", False)]
)
def test_heads_that_are_right_are_accepted_wholly(name, tree):
    target = build(BY_NAME[name])
    ids, text = written(target)
    model = pair(target, knowing(target, text, ids.shape[1] - 1), tree=tree)
    require_plain(model, ids, **CALL | {"max_new_tokens": NEW})
    report = model.report
    assert report.acceptance_rate > (0.5 if tree and name != "bloom" else 0.99)
    assert report.tokens_per_pass == pytest.approx(5, abs=0.6)  # four heads and the target's own


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_ragged_batches(name, tree):
    """Rows are accepted apart, end apart, and their prompts are padded: every row is shown its own state."""
    target = build(BY_NAME[name])
    given = prompt(3)
    kwargs = {"attention_mask": given["attention_mask"], "eos_token_id": ENDS}
    plain = target.generate(given["ids"], **CALL | kwargs)
    texts = [target.generate(row[mask.bool()][None], **CALL) for row, mask in zip(*given.values(), strict=True)]
    known = knowing(target, texts[1][:, :-8], texts[1].shape[1] - CALL["max_new_tokens"] - 1)
    model = pair(target, known, tree=tree)
    with no_fallback():
        assert model.generate(given["ids"], **CALL | kwargs).tolist() == plain.tolist()
        # the second row is known by heart, up to a point
        alone = model.generate(given["ids"][1:2], attention_mask=given["attention_mask"][1:2], **CALL)
    assert alone[:, 2:].tolist() == texts[1].tolist()
    assert model.report.accepted >= 8


def test_after_a_past_and_after_plain_rounds():
    """The first draft needs no more than the last state of the prompt; rounds without a draft leave their own."""
    target = build(BY_NAME["llama"])
    ids, text = written(target)
    model = pair(target, knowing(target, text, ids.shape[1] - 1))
    kwargs = CALL | {"max_new_tokens": NEW}
    first = model.generate(ids[:, :5], **CALL | {"max_new_tokens": 1}, return_dict_in_generate=True)
    past = first.past_key_values  # of the prompt; the new token was not read
    assert past.get_seq_length() == 5
    with no_fallback():
        assert model.generate(ids, past_key_values=past, **kwargs).tolist() == text.tolist()
    assert model.report.tokens_per_pass > 4
    with no_fallback():  # its warm-up rounds are plain
        assert model.generate(ids, draft_length=Adaptive(), **kwargs).tolist() == text.tolist()
    assert set(model.report.acceptance_by_position) == {1.0}


def test_trees_hold_second_guesses():
    """Where the right token is a head's second guess, a chain breaks and a tree does not."""
    target = build(BY_NAME["llama"])
    ids, text = written(target)
    heads = knowing(target, text, ids.shape[1] - 1)
    mistaken = text.where(torch.arange(text.shape[1]) % 3 > 0, 90)
    wrong = knowing(target, text, ids.shape[1] - 1, said=mistaken)
    with torch.no_grad():
        heads.output.mul_(0.3).add_(wrong.output, alpha=0.35)  # where the two differ, the wrong one is a little ahead
    found = {}
    for tree in (True, False):
        model = pair(target, heads, tree=tree)
        require_plain(model, ids, **CALL | {"max_new_tokens": NEW})
        found[tree] = model.report.tokens_per_pass
    assert found[False] < 3
    assert found[True] > 4.2  # fewer, were the states taken where a chain would have left them


def test_trees_are_no_larger_and_no_deeper_than_allowed(monkeypatch):
    target = build(BY_NAME["llama"])
    heads = random_heads(32, 96, heads=5, layers=1)
    real, drafts = medusa.MedusaDrafting._tree, []

    def watched(self, *args):
        drafts.append(real(self, *args))
        return drafts[-1]

    monkeypatch.setattr(medusa.MedusaDrafting, "_tree", watched)
    for nodes, length in ((1, 4), (5, 2), (64, 9)):
        model = pair(target, heads, draft_length=length, nodes=nodes, candidates=3)
        drafts.clear()
        with no_fallback():
            model.generate(random_ids(target, 2, 5), **CALL)
        assert max(draft.width for draft in drafts) <= nodes
        deepest = max(int(draft.depths().max()) for draft in drafts if draft.width)
        assert deepest <= min(length, 5, nodes)
        assert all(bool((draft.lengths == draft.lengths[0]).all()) for draft in drafts if draft.width < nodes)


def test_what_a_pass_costs_bounds_the_tree():
    target = build(BY_NAME["llama"])
    model = pair(target, random_heads(32, 96, heads=3, layers=1))
    dear = Costs(((1, 1.0), (2, 9.0), (40, 300.0)), 0.0)
    with no_fallback():
        model.generate(random_ids(target, 1, 5), draft_length=Adaptive(costs=dear), **CALL)
        assert model.report.drafted == 0
        model.generate(random_ids(target, 1, 5), draft_length=4, **CALL)
    assert model.report.drafted > 0


@pytest.mark.parametrize(("name", "tree", "budget"), [("llama", True, 7), ("llama", False, 1), ("bloom", True, 1)])
def test_the_adaptive_length_leaves_the_size_of_trees_to_them(monkeypatch, name, tree, budget):
    """A chain begins with a first guess of what pays; a tree weighs its own nodes."""
    target = build(BY_NAME[name])
    model = pair(target, random_heads(32, 96, layers=1), draft_length=Adaptive(maximum=7), tree=tree)
    right, budgets = medusa.MedusaDrafting.propose, []

    def watched(self, text, budget):
        budgets.append(budget)
        return right(self, text, budget)

    monkeypatch.setattr(medusa.MedusaDrafting, "propose", watched)
    with no_fallback():
        model.generate(random_ids(target, 1, 5), **CALL)
    assert budgets[0] == budget


def test_heads_learn_of_the_guesses_whose_path_was_right():
    """The second head is right only where the first one is: it is asked nothing where the path is another."""
    target = build(BY_NAME["llama"])
    ids, text = written(target)
    model = pair(target, knowing(target, text, ids.shape[1] - 1, heads=2), candidates=1)
    seen = []
    model.drafter.rates[False].learn = seen.extend
    with no_fallback():
        model.generate(ids, **CALL | {"max_new_tokens": NEW})
    assert {level for _, level, _ in seen} == {0, 1}
    assert all(right == [True] for _, _, right in seen)
    assert all(len(sure) == 1 and sure[0] > 0.5 for sure, _, _ in seen)


def test_sampling_learns_apart_from_greedy():
    target = build(BY_NAME["llama"])
    model = pair(target, random_heads(32, 96, layers=1))
    with no_fallback():
        model.generate(random_ids(target, 1, 5), **CALL | {"do_sample": True})
    rates = model.drafter.rates
    assert rates[True].seen > 0
    assert rates[False].seen == 0


def test_saved_pairs(tmp_path):
    target = build(BY_NAME["llama"])
    ids, text = written(target)
    heads = knowing(target, text, ids.shape[1] - 1)
    heads.save(tmp_path / "heads")
    model = AssistedModelForCausalLM.from_models(
        target, draft=Medusa(str(tmp_path / "heads"), candidates=5, nodes=7), draft_length=4
    )
    model.save_pretrained(tmp_path / "pair")
    (tmp_path / "heads" / "config.json").unlink()
    read = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    assert read.spec == Medusa(str(tmp_path / "pair" / "draft"), candidates=5, nodes=7)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(read.drafter.heads.state_dict()[name], tensor)
    require_plain(read, ids, **CALL | {"max_new_tokens": NEW})
    assert read.report.tokens_per_pass > 4
    several = AssistedModelForCausalLM.from_models(target, draft=["suffix", Medusa(heads)])
    several.save_pretrained(tmp_path / "several")
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "several")
    assert again.spec.drafters == (Suffix(), Medusa(str(tmp_path / "several" / "draft-1")))


def test_heads_move_with_the_pair_and_are_counted():
    target = build(BY_NAME["llama"])
    heads = random_heads(32, 96, layers=1)
    plain = AssistedModelForCausalLM.from_models(target, draft="suffix").get_memory_footprint()
    model = pair(target, heads)
    assert model.get_memory_footprint() == plain + sum(4 * weight.numel() for weight in heads.parameters())
    model.to(torch.bfloat16)
    assert heads.weight.dtype == torch.bfloat16
    with no_fallback():
        model.generate(random_ids(target, 1, 5), **CALL)
    assert model.report.drafted > 0


def test_heads_in_another_precision_than_the_target():
    target = build(BY_NAME["llama"]).to(torch.bfloat16)
    for own in (True, False):
        heads = random_heads(32, 96, layers=1, own_output=own)
        with no_fallback():
            pair(target, heads).generate(random_ids(target, 1, 5), **CALL)
        assert heads.weight.dtype == torch.float32


def test_strings_and_options():
    assert parse("medusa:some/where") == Medusa("some/where")
    with pytest.raises(ValueError, match="medusa:DIR"):
        parse("medusa")
    with pytest.raises(ValueError, match="candidates"):
        Medusa("x", candidates=0)
    with pytest.raises(ValueError, match="nodes"):
        Medusa("x", nodes=0)


def test_heads_of_another_target_are_refused():
    target = build(BY_NAME["llama"])
    for sizes in ((31, 96), (32, 95)):
        with pytest.raises(ValueError, match="heads work only with the model that they were trained for"):
            pair(target, random_heads(*sizes))


@pytest.mark.parametrize("tree", [True, False])
def test_nan_costs_speed_only(tree):
    target = build(BY_NAME["llama"])
    ids, text = written(target)
    heads = random_heads(32, 96, layers=1)
    with torch.no_grad():
        heads.weight.fill_(math.nan)
    model = pair(target, heads, tree=tree)
    with pytest.warns(UserWarning, match="not a number") if tree else nullcontext():
        assert model.generate(ids, **CALL | {"max_new_tokens": NEW}).tolist() == text.tolist()
    assert model.report.accepted == 0
