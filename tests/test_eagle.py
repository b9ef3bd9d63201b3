"""EAGLE as a drafter: what it proposes is what the head says of the true features, in chains and in trees."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from alone import Alone, one_and_four, require_best_paths, require_chains, rows_of, watched
from architectures import ARCHITECTURES, RECURRENT, REFUSED, build, random_ids
from eagle_heads import features_of, random_head, trained_head
from pairs import CALL, ENDS, ROUNDING, no_fallback, pair, said_by
from test_sampling import require_distribution, tiny

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.engine.recurrent import slots_for, target_runner
from assisted.engine.traits import Traits
from assisted.engine.trust import trust
from assisted.lengths.rates import Rates
from assisted.methods import Eagle
from assisted.methods.eagle import draft as module

BY_NAME = {architecture.name: architecture for architecture in [*ARCHITECTURES, *RECURRENT]}


pytestmark = pytest.mark.usefixtures("invariants")


@functools.cache
def learned(version: Any = 3, **fields: Any) -> Any:
    """A head of the shared target that is mostly right after the prompts of `prompt`."""
    if version == "sliding":
        version, fields = 3, {"layer_types": ("sliding_attention",), "sliding_window": 6}
    return trained_head(pair()[0], version, **fields)


def assisted(
    version: Any = 3, tree: bool | None = True, draft_length: Any = 4, **options: Any
) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_models(
        pair()[0], draft=Eagle(learned(version), tree=tree, **options), draft_length=draft_length
    )


class Reference(Alone):
    """Of a head that reads features."""

    def __init__(self, target: Any, head: Any, first: int = 0):
        self.target, self.head, self.first = target, head, first

    @functools.cache  # noqa: B019
    def known(self, *text: int) -> torch.Tensor:
        return self.head.fuse(features_of(self.target, self.head, torch.tensor([text]))[:, self.first : -1])

    @functools.cache  # noqa: B019
    @torch.no_grad()
    def read(self, text: tuple[int, ...], path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """States that the head goes on from, [1, n, H], and its own after the last token, [1, 1, H]."""
        states = torch.cat(self.read(text, path[:-1]), 1) if path else self.known(*text)
        tokens = torch.tensor([[*text, *path][self.first + 1 :]])
        positions = self.first + torch.arange(tokens.shape[1])[None]
        return states, self.head(self.head.embed(tokens, self.target), states, positions)[:, -1:]

    @torch.no_grad()
    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """[V] after the committed text and a drafted path. The first features are left out, as behind a caller's past."""
        state = self.read(tuple(text), tuple(path))[1][0, 0]
        return self.head.over_all(self.head.logits(state, self.target))


@pytest.mark.parametrize(("version", "batch"), [(1, 1), (3, 0), ("sliding", 1)])
def test_chains_are_the_heads_own(version, batch):
    target, model = pair()[0], assisted(version, tree=False)
    inputs = one_and_four(target)[batch]
    require_chains(Reference(target, learned(version)), model, inputs, eos_token_id=ENDS if batch else None)
    assert model.report.accepted < model.report.drafted


@pytest.mark.parametrize(
    ("version", "nodes", "batch"), [(1, None, 0), (3, None, 1), (3, 4, 0), (3, 4, 1), ("sliding", None, 1)]
)
def test_trees_are_the_heads_best_paths(version, nodes, batch):
    target, model = pair()[0], assisted(version, top_k=3, draft_length=3, nodes=nodes)
    inputs = one_and_four(target)[batch]
    require_best_paths(Reference(target, learned(version)), model, inputs, 3, eos_token_id=ENDS if batch else None)


@pytest.mark.parametrize("batch", [1], ids=["padded rows"])
def test_what_became_of_the_guesses_on_the_way_is_learned(batch, monkeypatch):
    """Of every place that the text came to: how sure the head was there, and which of its tokens was right."""
    target, head = pair()[0], learned(3)
    reference, inputs = Reference(target, head), one_and_four(target)[batch]
    before: dict[int, list[int]] = {}
    texts: list[Any] = []
    places = [0]
    learn = Rates.learn

    def look(text: Any, draft: Draft, budget: int) -> None:
        before.clear()
        before.update(rows_of(text, inputs["attention_mask"]))
        texts[:] = [text]

    def learned_of(self: Rates, outcomes: list[tuple[list[float], int, list[bool]]]) -> None:
        hidden = (1 - inputs["attention_mask"]).sum(1).tolist()
        left = list(outcomes)
        for row, committed in before.items():
            now = texts[0].ids[row, hidden[row] : texts[0].lengths[row]].tolist()
            new = now[len(committed) :]
            for depth, token in enumerate(new):
                found, tokens = reference.logits(committed, new[:depth]).softmax(-1).topk(3)
                if depth > 0 and (not left or left[0][0] != pytest.approx(found.tolist(), abs=ROUNDING)):
                    break  # the text left the nodes that were read
                sure, level, right = left.pop(0)
                assert (sure, level) == (pytest.approx(found.tolist(), abs=ROUNDING), 0)
                assert right == [offered == token for offered in tokens.tolist()]
                places[0] += 1
                if not any(right):
                    break
        assert not left
        learn(self, outcomes)

    monkeypatch.setattr(Rates, "learn", learned_of)
    with watched(monkeypatch, look), no_fallback():
        model = assisted(3, top_k=3, draft_length=3)
        model.generate(**inputs, **(CALL | {"eos_token_id": ENDS if batch else None, "max_new_tokens": 12}))
    assert places[0] > model.report.target_passes
    rates = model.drafter.rates
    assert rates[False].seen > 0
    assert rates[True].seen == 0


@pytest.mark.parametrize(
    ("tree", "greedy", "sampled"), [(None, True, False), (True, True, True), (False, False, False)]
)
def test_where_trees_are_drafted(tree, greedy, sampled):
    model, inputs = assisted(3, tree), one_and_four(pair()[0])[0]
    trees: set[bool] = set()
    with pytest.MonkeyPatch.context() as patch:
        with watched(patch, lambda text, draft, budget: trees.add(draft.parents is not None)), no_fallback():
            for do_sample, expected in ((False, greedy), (True, sampled)):
                trees.clear()
                model.generate(**inputs, **(CALL | {"do_sample": do_sample}))
                assert trees == {expected}


def test_a_tree_of_so_many_nodes():
    """A number is taken at its word, as a draft length is."""
    target = pair()[0]
    widths: set[int] = set()
    for draft_length in (3, "adaptive"):
        with pytest.MonkeyPatch.context() as patch:
            with watched(patch, lambda text, draft, budget: budget > 2 and widths.add(draft.width)), no_fallback():
                model = assisted(3, draft_length=draft_length, top_k=4, nodes=7)
                model.generate(**one_and_four(target)[0], **CALL)
    assert 7 in widths
    assert max(widths) == 7


@pytest.mark.parametrize("tree", [False, True])
def test_a_callers_past(tree, monkeypatch):
    """Features of the past are not there: the head begins with those of the new columns, at their own positions."""
    target, head = pair()[0], learned(3)
    model = assisted(3, tree=tree)
    inputs = one_and_four(target)[0]
    first = target.generate(**inputs, **(CALL | {"max_new_tokens": 4}), return_dict_in_generate=True)
    turn = torch.cat([first.sequences, random_ids(target, 1, 5)], 1)
    reference = Reference(target, head, first.past_key_values.get_seq_length())

    def look(text: Any, draft: Draft, budget: int) -> None:
        committed = text.ids[0, : text.lengths[0]].tolist()
        count = 1 if tree else budget  # a tree's first node is the best of the first level
        assert draft.tokens[0, :count].tolist() == reference.chain(committed, count)

    monkeypatch.setattr(Rates, "learn", lambda *args: None)
    plain = target.generate(turn, **CALL)
    with watched(monkeypatch, look) as counted, no_fallback():
        ours = model.generate(turn, past_key_values=first.past_key_values, **CALL)
    assert ours.tolist() == plain.tolist()
    assert counted[0] > 2


@pytest.mark.parametrize("tree", [False, True])
def test_sampling_with_a_reduced_vocabulary(tree):
    """What the head cannot say is sampled as often as the target would."""
    target = tiny(0, layers=2)
    head = random_head(target, 3, draft_vocab_size=target.config.vocab_size // 2)
    model = AssistedModelForCausalLM.from_models(target, draft=Eagle(head, tree=tree), draft_length=2)
    require_distribution(model, seed=3)


def test_a_broken_head_costs_speed_only():
    target = pair()[0]
    head = random_head(target, 3)
    with torch.no_grad():
        head.lm_head.weight.fill_(float("nan"))
    inputs = one_and_four(target)[0]
    for tree in (False, True):
        model = AssistedModelForCausalLM.from_models(target, draft=Eagle(head, tree=tree), draft_length=4)
        with pytest.warns(UserWarning, match="not a number"):
            ours = model.generate(**inputs, **CALL)
        assert ours.tolist() == said_by(target, **inputs, **CALL).tolist()


def test_a_head_that_changes_is_run_as_it_is():
    """Its output layer may be repacked for drafting: not for longer than its weight stays the same."""
    target = pair()[0]
    head = trained_head(target, 3)
    model = AssistedModelForCausalLM.from_models(target, draft=Eagle(head), draft_length=4)
    inputs = one_and_four(target)[0]
    drafter = model.drafter
    for weight in (head.lm_head.weight, head.layers[0].mlp.up_proj.weight):
        first = drafter.fused(head, trust(head))
        assert first.module is not head
        assert drafter.fused(head, trust(head)) is first
        with torch.no_grad():
            weight.copy_(weight.roll(1, 0).mul(1.01))
        second = drafter.fused(head, trust(head)).module
        states = torch.randn(2, 1, 2, 32)
        assert torch.allclose(second.logits(second(*states)), head.logits(head(*states)), atol=ROUNDING)
    with no_fallback():
        model.generate(**inputs, **CALL)


def test_the_head_belongs_to_the_model():
    """What a pair's modules() shows a Trainer is the target; moves and sizes are the head's, too."""
    model = assisted(3)
    assert any(part is learned(3) for part in model.drafter.modules)
    assert not any(part is learned(3) for part in model.modules())
    own = sum(p.numel() * p.element_size() for p in learned(3).parameters())
    assert model.get_memory_footprint() >= pair()[0].get_memory_footprint() + own


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_the_last_state_before_and_after_the_final_norm(name):
    """Also both at once, for two drafters: what the last layer returns, and transformers' last hidden state."""
    target = build(BY_NAME[name])
    layers, ids, kept = target.config.num_hidden_layers, random_ids(target, 1, 9), []
    last = (target.model.layers if name == "llama" else target.transformer.h)[-1]
    handle = last.register_forward_hook(
        lambda *args: kept.append(args[-1][0] if isinstance(args[-1], tuple) else args[-1])
    )
    normed = target.base_model(ids).last_hidden_state
    handle.remove()
    heads = [random_head(target, taps=(1, layers), last_normed=after) for after in (True, False)]
    needs = [module.needs_of(head, target) for head in heads]
    assert [sorted(need.states) for need in needs] == [[1, layers], [1, layers + 1]]
    masks = Traits.of(target).masks
    for some in (*needs, needs[0] | needs[1], needs[1] | needs[0]):
        runner = target_runner(target, slots_for(target, None, 1, 9, masks), masks, some)
        runner.prefill(ids, None)
        for state, expected in ((layers, normed), (layers + 1, kept[0])):
            assert state not in some.states or torch.equal(runner.states[state], expected)
    for head in heads:
        model = AssistedModelForCausalLM.from_models(target, draft=Eagle(head), draft_length=3)
        with no_fallback():
            assert model.generate(ids, **CALL).equal(target.generate(ids, **CALL))


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda one: one.name)
def test_targets_that_cannot_verify(architecture):
    target, head = build(architecture), random_head(pair()[0], 1)
    with pytest.raises(ValueError, match="target"):
        AssistedModelForCausalLM.from_models(target, draft=Eagle(head))


def test_targets_that_cannot_be_served():
    target = build(BY_NAME["gemma3n"])
    with pytest.raises(ValueError, match=r"EAGLE-3 head cannot be used with Gemma3n.*hidden state"):
        AssistedModelForCausalLM.from_models(target, draft=Eagle(random_head(target, 3)))
    deep = random_head(pair()[0], 3, taps=(1, 2, 9))
    with pytest.raises(ValueError, match="2 layers"):
        AssistedModelForCausalLM.from_models(pair()[0], draft=Eagle(deep))
    larger = random_head(pair()[0], 3, vocab_size=97)
    with pytest.raises(ValueError, match=r"97.*96"):
        AssistedModelForCausalLM.from_models(pair()[0], draft=Eagle(larger))
    for fields in ({"target_hidden_size": 48}, {"hidden_size": 48, "target_hidden_size": 32}):
        with pytest.raises(ValueError, match="width"):
            AssistedModelForCausalLM.from_models(pair()[0], draft=Eagle(random_head(pair()[0], 3, **fields)))


def test_options_are_checked():
    with pytest.raises(ValueError, match="eagle:DIR"):
        AssistedModelForCausalLM.from_models(pair()[0], draft="eagle")
    with pytest.raises(ValueError, match="top_k"):
        Eagle("dir", top_k=0)
    with pytest.raises(ValueError, match="nodes"):
        Eagle("dir", nodes=0)
