"""Early exit: what runs how often, which layer is chosen, and that nothing is left behind when something fails."""

import warnings

import pytest
import torch
from architectures import build, random_ids
from covering import in_turns
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME, ENDS
from test_parts import assert_same, snapshot
from test_threads import in_threads

from assisted import AssistedModelForCausalLM, EarlyExit
from assisted.core.drafts import DraftingStopped
from assisted.engine import split, trust
from assisted.lengths import Confidence
from assisted.lengths.cost_model import best_speedup
from assisted.methods.early_exit import draft as early_exit
from assisted.methods.early_exit.draft import ExitChoice

CALL = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LAYERS = 6


pytestmark = [pytest.mark.filterwarnings("ignore:draft. with an exit after"), pytest.mark.usefixtures("invariants")]


def target(name="llama", enough=None, seed=0):
    """A model of six layers; with `enough`, those from there on do nothing, so that every exit behind it is right."""
    model = build(BY_NAME[name], seed, num_hidden_layers=LAYERS)
    if enough is not None:
        for layer in model.model.layers[enough:]:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
    return model


def pair(model, draft, **kwargs):
    return AssistedModelForCausalLM.from_models(model, draft=draft, draft_length=kwargs.pop("draft_length", 4))


def rows_through(module):
    """A list that every forward of a module adds its number of columns to."""
    seen = []
    module.register_forward_hook(lambda _, args, output: seen.append(output.shape[0] * output.shape[1]))
    return seen


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="draft: with an exit after")
        yield


@pytest.mark.parametrize("enough", [None, 2])
def test_no_token_passes_a_layer_twice(enough, no_fallback):
    """Through the first layer: the prompt, every drafted token and, each round, the token it starts from."""
    model = target(enough=enough)
    ours = pair(model, "early-exit:2")
    ids = random_ids(model, 1, 15)
    plain = model.generate(ids, **CALL)
    first, drafting, checking = (rows_through(model.model.layers[place]) for place in (0, 1, 2))
    assert ours.generate(ids, **CALL).tolist() == plain.tolist()
    report = ours.report
    assert (report.accepted == report.drafted) == (enough is not None)
    rounds = report.target_passes
    assert sum(first) == 15 + report.drafted + rounds
    assert sum(drafting) == sum(first)
    assert sum(checking) == 15 + report.drafted + rounds
    assert len(checking) == 1 + rounds


@pytest.mark.parametrize(("length", "name"), in_turns([1, 7, Confidence(0.3, 6)], ["gemma3", "bloom", "llama"]))
def test_ragged_batches_with_processors(name, length, no_fallback):
    """Drafts that end on their own have been read to their end; the others lack the last token."""
    model = build(BY_NAME[name])
    ours = pair(model, "early-exit:1", draft_length=length)
    ids = random_ids(model, 3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    kwargs = CALL | {"attention_mask": mask, "repetition_penalty": 1.3, "eos_token_id": ENDS}
    assert ours.generate(ids, **kwargs).tolist() == model.generate(ids, **kwargs).tolist()


def test_draws_that_its_own_layers_would_have_made_are_all_accepted(no_fallback):
    """Under sampling an exit behind which nothing happens has the target's own distribution."""
    model = target(enough=2)
    ours = pair(model, "early-exit:2")
    torch.manual_seed(0)
    ours.generate(random_ids(model, 2, 9), **CALL | {"do_sample": True, "temperature": 0.8, "top_p": 0.9})
    assert ours.report.acceptance_rate > 0.99


def test_drafts_that_cannot_be_finished_are_read_by_the_whole_model(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no luck")

    model = target()
    ours = pair(model, "early-exit:2")
    monkeypatch.setattr(split.Split, "finish", fail)
    monkeypatch.setattr(split.Split, "_measure", fail)
    ids = random_ids(model, 1, 9)
    with pytest.warns(DraftingStopped, match="no luck"):
        assert ours.generate(ids, **CALL).tolist() == model.generate(ids, **CALL).tolist()
    (warning,) = ours.report.warnings
    assert warning.startswith("Finishing the drafted tokens failed (RuntimeError: no luck)")


def test_a_draft_is_finished_from_where_its_front_left_it_among_others(no_fallback):
    """In a list a draft is handed on: it is still known for what the front has read."""
    model = target(enough=2)
    ours = pair(model, ["ngram", "early-exit:2"])
    ids = torch.arange(1, 16)[None]  # nothing repeats: the copies have nothing at first
    first = rows_through(model.model.layers[0])
    ours.generate(ids, **CALL | {"max_new_tokens": 6})
    report = ours.report
    assert report.accepted > 0
    assert sum(first) == 15 + report.drafted + report.target_passes


class Broken(Exception):
    pass


class Breaking(torch.nn.Module):
    """A layer that fails at a certain call."""

    def __init__(self, layer, calls, error):
        super().__init__()
        self.layer, self.calls, self.error = layer, calls, error

    def forward(self, *args, **kwargs):
        self.calls -= 1
        if self.calls == 0:
            raise self.error
        return self.layer(*args, **kwargs)


def breaking(monkeypatch, calls, error):
    """The front breaks at a certain of its passes."""
    whole = split.front

    def front(model, layers, end):
        part = whole(model, layers, end)
        own = layers.of(part)
        return layers.replaced(part, [Breaking(own[0], calls, error), *own[1:]])

    monkeypatch.setattr(split, "front", front)


@pytest.mark.parametrize(("calls", "name"), in_turns([1, 2, 4, 5, 6, 9], ["llama", "bloom"]))
def test_a_failure_while_drafting_costs_speed_only(monkeypatch, calls, name):
    model = build(BY_NAME[name])
    ours = pair(model, "early-exit:1")
    ids = random_ids(model, 3, 9)
    mask = torch.ones_like(ids)
    mask[2, :3] = 0
    before = snapshot(model)
    plain = model.generate(ids, attention_mask=mask, **CALL)
    breaking(monkeypatch, calls, Broken())
    # the fifth pass of a round reads the last drafted token, for the target
    message = r"drafted tokens failed \(Broken" if calls == 5 else r"Drafting failed \(Broken"
    with pytest.warns(UserWarning, match=message):
        assert ours.generate(ids, attention_mask=mask, **CALL).tolist() == plain.tolist()
    assert_same(before, snapshot(model))
    monkeypatch.undo()
    assert ours.generate(ids, attention_mask=mask, **CALL).tolist() == plain.tolist()


@pytest.mark.parametrize("calls", [3, 5])
def test_an_interruption_leaves_the_slots_as_they_were(monkeypatch, calls):
    model = target()
    ours = pair(model, "early-exit:2")
    caught = []
    monkeypatch.setattr(early_exit, "Split", lambda target: caught.append(target) or split.Split(target))
    before = snapshot(model)
    breaking(monkeypatch, calls, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ours.generate(random_ids(model, 2, 9), **CALL)
    assert caught[0].cache.lengths == [9, 9]  # the prompt; the first new token has no KV yet
    assert_same(before, snapshot(model))


def test_two_threads_leave_at_two_layers():
    model = target()
    ids = [random_ids(model, 1, 9, seed) for seed in range(4)]
    plain = [model.generate(row, **CALL).tolist() for row in ids]

    def write(number):
        ours = pair(model, EarlyExit((1, 4)[number]))
        return [ours.generate(row, **CALL).tolist() for row in ids]

    assert in_threads(write, 2) == [plain, plain]


@pytest.fixture
def steady_clock(monkeypatch):
    """Layers are all that takes time, whatever the machine is doing."""
    monkeypatch.setattr(ExitChoice, "learn_cost", lambda self, layer, cost: None)


@pytest.mark.usefixtures("steady_clock")
@pytest.mark.parametrize(
    ("enough", "sampling"), in_turns([2, 3, 4], [{}, {"do_sample": True, "temperature": 0.7, "top_k": 20}])
)
def test_the_layer_that_suffices_is_found(enough, sampling, no_fallback):
    model = target(enough=enough)
    ours = pair(model, "early-exit")
    torch.manual_seed(0)
    for seed in range(4):
        ours.generate(random_ids(model, 2, 9, seed), **CALL | sampling)
    choice = ours.drafter.choice
    assert ours.drafter.exit_layer == enough
    assert choice.acceptance(enough) > 0.9
    for layer in range(enough, LAYERS):
        assert choice.right[layer].mean() == pytest.approx(1, rel=1e-3)
    assert all(choice.acceptance(layer) < 0.8 for layer in range(1, enough))


def test_tokens_after_the_first_wrong_one_teach_nothing(monkeypatch):
    model = target()
    ours, taught = pair(model, "early-exit:2"), []
    learn = ExitChoice.learn
    monkeypatch.setattr(ExitChoice, "learn", lambda *told: taught.append(told[2:]) or learn(*told))
    ours.generate(random_ids(model, 1, 9), **CALL)
    assert any(hits < 3 for hits, _ in taught)  # of four, but for those at the end
    assert all(trials == hits + 1 for hits, trials in taught if hits < 3)


@pytest.mark.usefixtures("steady_clock")
def test_what_was_learned_is_kept_for_the_next_call(no_fallback):
    model = target(enough=3)
    ours = pair(model, "early-exit")
    assert ours.drafter.exit_layer == LAYERS // 4
    ours.generate(random_ids(model, 1, 9), **CALL | {"max_new_tokens": 80})
    learned = ours.drafter.exit_layer
    assert learned == 3
    first = rows_through(model.model.layers[2])
    ours.generate(random_ids(model, 1, 9), **CALL | {"max_new_tokens": 5})
    assert first[1] == 1  # after the prompt a token at a time drafts, and passes the third layer
    assert ours.report.acceptance_rate == 1


def test_an_untrained_model_is_told_once():
    model = target()
    ours = pair(model, "early-exit:5")
    ids = random_ids(model, 2, 9)
    with pytest.warns(
        UserWarning, match=r"with an exit after 5 of 6 layers, \d+% of the drafted tokens are accepted"
    ) as caught:
        ours.generate(ids, **CALL | {"max_new_tokens": 60})
        ours.generate(ids, **CALL)
    assert len([w for w in caught if "with an exit after" in str(w.message)]) == 1


def test_refused_at_load():
    model = target()
    for draft, message in (
        (EarlyExit(0), "exit_layer 0 is not possible; give a number from 1 to 5"),
        ("early-exit:6", "exit_layer 6 is not possible; give a number from 1 to 5"),
        ("early-exit:last", "'early-exit:last' names no layer"),
    ):
        with pytest.raises(ValueError, match=message):
            pair(model, draft)
    with pytest.raises(ValueError, match="at least 2 layers, this one has 1"):
        pair(build(BY_NAME["llama"], num_hidden_layers=1), "early-exit")
    with pytest.raises(ValueError, match=r"layers from 2 on do not run without those before them \(KeyError"):
        pair(build(BY_NAME["gemma3n"]), "early-exit:2")


def test_layers_that_hand_each_other_more_than_hidden_states_are_refused(monkeypatch):
    monkeypatch.setattr(trust, "_is_own_file", lambda file: True)  # as if transformers had such a model
    model = target()

    class Handed(type(model.model.layers[3])):
        def forward(self, hidden_states, *args, **kwargs):
            return super().forward(hidden_states + model.model.layers[0].seen, *args, **kwargs)

    def remember(module, args, output):
        module.seen = output.mean()

    model.model.layers[0].register_forward_hook(remember)
    model.model.layers[3].__class__ = Handed
    with pytest.raises(ValueError, match="do not give the same result as all layers in one forward pass"):
        pair(model, "early-exit:2")


class TestExitChoice:
    def test_measures_often_at_first_and_then_ever_more_rarely(self):
        choice = ExitChoice(32)
        measured = [choice.to_measure() is not None for _ in range(2000)]
        assert all(measured[:8])
        assert 50 < sum(measured) < 80
        assert sum(measured[1000:]) <= 1000 / 64

    def test_every_layer_takes_its_turn_and_few_at_a_time(self):
        choice = ExitChoice(80)
        rounds = [layers for layers in (choice.to_measure() for _ in range(20)) if layers]
        assert all(len(layers) <= 8 for layers in rounds)
        assert {layer for layers in rounds for layer in layers} | {choice.layer} == set(range(1, 80))

    def test_a_given_layer_measures_nothing_and_stays(self):
        choice = ExitChoice(8, 3)
        choice.learn(5, 100, 100)
        choice.decide(4, 4)
        assert choice.to_measure() is None
        assert choice.layer == 3

    @given(
        st.lists(st.floats(0, 1), min_size=2, max_size=12),
        st.floats(0.05, 0.5),
        st.integers(1, 8),
        st.integers(0, 8),
    )
    def test_moves_to_the_best_of_what_is_known(self, acceptances, fixed, drafted, more):
        """Costs lie on a line from `fixed` at no layer to a whole pass."""
        count = len(acceptances) + 1
        choice = ExitChoice(count)
        choice.learn_cost(choice.layer, fixed + (1 - fixed) * choice.layer / count)
        for layer, acceptance in enumerate(acceptances, start=1):
            choice.learn(layer, 1000 * acceptance, 1000)
        choice.decide(drafted, drafted + more)
        best = max(
            best_speedup(
                choice.acceptance(layer), fixed + (1 - fixed) * layer / count, range(drafted, drafted + more + 1)
            )
            for layer in range(1, count)
        )
        assert choice.speedup(choice.layer, drafted, drafted + more) >= best / 1.051

    def test_a_fixed_draft_length_asks_for_exits_that_hold_so_long(self):
        choice = ExitChoice(16)
        choice.learn(2, 50, 100)  # right enough for one token, not for six
        choice.learn(8, 90, 100)
        choice.decide(1, 1)
        assert choice.layer == 2
        for _ in range(50):
            choice.decide(6, 6)
        assert choice.layer == 8

    def test_costs_lie_on_the_line_through_what_was_measured(self):
        choice = ExitChoice(10)
        assert choice.cost(3) == pytest.approx(0.3)
        for cost in (0.5, 0.52, 5.0):  # one of them was disturbed
            choice.learn_cost(4, cost)
        assert choice.cost(4) == pytest.approx(0.52)
        assert choice.cost(7) == pytest.approx(0.76)
        assert choice.cost(1) == pytest.approx(0.28)
        early = ExitChoice(10)
        early.learn_cost(8, 0.5)
        assert [early.cost(layer) for layer in (9, 8, 4)] == pytest.approx([0.75, 0.5, 0.25])

    def test_old_observations_fade(self):
        choice = ExitChoice(4)
        choice.learn(1, 400, 400)
        for _ in range(100):
            choice.learn(1, 0, 10)
        assert choice.acceptance(1) < 0.05


@given(st.floats(0, 0.99), st.floats(0.01, 1.5), st.integers(1, 12), st.integers(0, 8))
def test_the_best_speedup_is_that_of_the_best_length(acceptance, cost, shortest, more):
    lengths = range(shortest, shortest + more + 1)
    expected = max((1 - acceptance ** (g + 1)) / (1 - acceptance) / (1 + cost * g) for g in lengths)
    assert best_speedup(acceptance, cost, lengths) == pytest.approx(expected)
