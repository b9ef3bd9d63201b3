"""Layer skipping: the search keeps what pays, trials leave no trace, and what does nothing is left out."""

import itertools
import math
import warnings

import pytest
import torch
from architectures import build, random_ids
from hypothesis import given
from hypothesis import strategies as st
from pairs import BY_NAME
from test_parts import assert_same, snapshot

from assisted import AssistedModelForCausalLM, LayerSkip
from assisted.engine.cache import SlotCache
from assisted.engine.needs import Needs
from assisted.engine.parts import Tap
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast.fused import fused
from assisted.fast.layers import FusedLayer
from assisted.lengths.cost_model import best_speedup
from assisted.methods import layer_skip
from assisted.methods.layer_skip import SkipSearch

CALL = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LAYERS = 6


pytestmark = pytest.mark.usefixtures("invariants")


def target(name="llama"):
    return build(BY_NAME[name], num_hidden_layers=LAYERS)


def pair(model, **options):
    return AssistedModelForCausalLM.from_models(model, draft=LayerSkip(**options), draft_length=4)


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="draft: without")
        yield


def test_sublayers_that_do_nothing_are_left_out(no_fallback):
    model = target()
    idle = [(1, "self_attn"), (2, "mlp"), (3, "self_attn"), (3, "mlp"), (5, "self_attn")]
    for place, name in idle:
        module = getattr(model.model.layers[place], name)
        last = module.o_proj if name == "self_attn" else module.down_proj
        last.weight.data.zero_()
    ours = pair(model, window=24, every=1)
    for seed in range(6):
        ids = random_ids(model, 1, 9, seed)
        assert ours.generate(ids, **CALL).tolist() == model.generate(ids, **CALL).tolist()
    found = {(sublayer.layer, sublayer.modules[0][0][0]) for sublayer in ours.drafter.skipped}
    assert found >= set(idle)
    ours.generate(random_ids(model, 1, 9), **CALL)
    assert ours.report.acceptance_rate > 0.8


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma3"])
def test_a_trial_leaves_the_slots_as_they_were(monkeypatch, name, no_fallback):
    """Ragged rows and aligned ones; a trial writes over the newest tokens' KV."""
    model = build(BY_NAME[name])
    ours = pair(model, window=8, every=1)
    trials = []
    whole = layer_skip.SkipDrafting._try_change

    def checked(self, text, width):
        cache = self.call.target.cache
        tops = cache.lengths
        before = [[store[row, :, :top].clone() for row, top in enumerate(tops)] for store in stores(cache)]
        state = (list(cache.lengths), list(cache.padding), cache.known)
        whole(self, text, width)
        after = [[store[row, :, :top] for row, top in enumerate(tops)] for store in stores(cache)]
        assert state == (cache.lengths, cache.padding, cache.known)
        assert all(
            torch.equal(a, b) for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True)
        )
        trials.append(width)

    monkeypatch.setattr(layer_skip.SkipDrafting, "_try_change", checked)
    ids = random_ids(model, 3, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    kwargs = CALL | {"attention_mask": mask}
    assert ours.generate(ids, **kwargs).tolist() == model.generate(ids, **kwargs).tolist()
    assert len(trials) > 2


def stores(cache):
    return [store for layer in cache.layers for store in (layer.keys, layer.values)]


def test_a_set_is_tried_on_what_the_target_said(monkeypatch, no_fallback):
    """The whole model, tried on its own text, gets all of it right."""
    model = target()
    ours = pair(model, window=16, every=1)
    ours.drafter.search.skipped = frozenset()
    judged = []
    monkeypatch.setattr(ours.drafter.search, "judge", lambda candidate, *counts: judged.append(counts))
    ours.generate(random_ids(model, 2, 9), **CALL)
    assert judged
    assert all(current == tokens for _, current, tokens in judged)


def test_what_was_learned_is_kept_and_the_model_untouched(no_fallback):
    model = target()
    before = snapshot(model)
    ours = pair(model, window=8, every=1)
    start = ours.drafter.search.skipped
    ours.generate(random_ids(model, 1, 9), **CALL)
    assert ours.drafter.search.skipped != start
    assert 0 < ours.drafter.search.rounds <= ours.report.target_passes
    assert_same(before, snapshot(model))


def test_a_failed_trial_costs_speed_only(monkeypatch):
    model = target()
    ours = pair(model, window=8, every=1)
    ids = random_ids(model, 2, 9)
    plain = model.generate(ids, **CALL)
    before = snapshot(model)

    class Broken(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise ZeroDivisionError

    def candidate(target, skipped):
        part = whole(target, skipped)
        if skipped != ours.drafter.search.skipped:
            part = ours.drafter.needs.layers.replaced(part, [*ours.drafter.needs.layers.of(part)[:-1], Broken()])
        return part

    whole = ours.drafter.part
    monkeypatch.setattr(ours.drafter, "part", candidate)
    with pytest.warns(UserWarning, match=r"Drafting failed \(ZeroDivisionError"):
        assert ours.generate(ids, **CALL).tolist() == plain.tolist()
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.no_grad()
def test_fused_layers_are_skipped_like_the_models_own(name, no_fallback):
    """Otherwise a drafted token costs nearly as much as one of the target."""
    model = target(name)
    drafter = pair(model).drafter
    fast, ids = fused(model).module, random_ids(model, 2, 9)
    assert all(isinstance(layer, FusedLayer) for layer in drafter.needs.layers.of(fast))
    attention, mlp = (
        {i for i, s in enumerate(drafter.sublayers) if s.modules[0][0] == (n,)} for n in ("self_attn", "mlp")
    )
    assert len(attention) == len(mlp) == LAYERS
    for skipped in (set(), {0}, {1}, {2, 3}, {2 * LAYERS - 1}, {2 * LAYERS - 2}, attention, mlp, {1, 4, 6, 7, 11}):
        part = drafter.part(fast, frozenset(skipped))
        ours, theirs = (
            m(input_ids=ids, use_cache=False).logits for m in (part, drafter.part(model, frozenset(skipped)))
        )
        assert torch.allclose(ours, theirs, atol=1e-4), skipped


def test_drafting_does_not_touch_what_a_head_reads(no_fallback):
    """In a list with a trained head, the target keeps its states in taps."""
    model = target()
    drafter = pair(model).drafter
    tapped = CachedModel(model, SlotCache(1, 8), Traits.of(model).masks, Needs.of_states(model, 2, 4))
    part = drafter.part(tapped.bare.module, frozenset({3, 8}))
    assert any(isinstance(module, Tap) for module in tapped.model.modules())
    assert not any(isinstance(module, Tap) for module in part.modules())


def test_a_model_that_needs_all_of_its_layers_is_told_once():
    model = target()
    ours = pair(model)
    with pytest.warns(UserWarning, match=r"draft: without \d+ of 12 sublayers, \d+% of the drafted") as caught:
        for seed in range(4):
            ours.generate(random_ids(model, 2, 9, seed), **CALL)
    assert len([w for w in caught if "draft: without" in str(w.message)]) == 1


def test_refused():
    for options, message in (
        ({"skipped": 0.0}, "skipped: 0.0 is not possible"),
        ({"skipped": 1.0}, "skipped: 1.0 is not possible"),
        ({"window": 4}, "window: 4 is too short"),
        ({"every": 0}, "every: 0 is not possible"),
    ):
        with pytest.raises(ValueError, match=message):
            LayerSkip(**options)
    with pytest.raises(ValueError, match="'layer-skip:most' names no share"):
        AssistedModelForCausalLM.from_models(target(), draft="layer-skip:most")
    with pytest.raises(ValueError, match=r"layer skipping cannot be used with this target, Gemma3nForCausalLM"):
        AssistedModelForCausalLM.from_models(build(BY_NAME["gemma3n"]), draft="layer-skip")


class TestSkipSearch:
    @given(st.integers(1, 40), st.floats(0.05, 0.95))
    def test_begins_evenly_spread(self, layers, share):
        inner = list(range(2, 2 * layers + 2))
        search = SkipSearch([0.4 / layers] * (2 * layers + 4), share, inner, 4)
        skipped = sorted(search.skipped)
        assert set(skipped) <= set(inner)
        assert len(skipped) == min(max(1, round(share * (2 * layers + 4))), len(inner))
        gaps = [after - before for before, after in itertools.pairwise(skipped)]
        assert not gaps or max(gaps) - min(gaps) <= 1

    @given(st.lists(st.sampled_from([0.0, 0.0, 0.02, 0.3, 0.6]), min_size=4, max_size=24))
    def test_never_gets_worse_and_takes_all_that_costs_nothing(self, damage):
        """Each sublayer, left out, spoils a share of the tokens of its own."""
        share = 0.9 / len(damage)

        def acceptance(skipped):
            return math.prod(1 - damage[index] for index in skipped)

        def speedup(skipped):
            return best_speedup(acceptance(skipped), search.cost(skipped))

        search = SkipSearch([share] * len(damage), 0.45, range(len(damage)), 1)
        start = speedup(search.skipped)
        tokens = 10_000
        for _ in range(8 * len(damage)):
            candidate = search.candidate()
            hits = [round(tokens * acceptance(skipped)) for skipped in (candidate, search.skipped)]
            search.judge(candidate, *hits, tokens)
        assert speedup(search.skipped) >= min(start, 1) - 1e-3
        if speedup(search.skipped) > 1:
            assert {index for index, spoiled in enumerate(damage) if spoiled == 0} <= search.skipped

    def test_a_start_that_gets_nothing_right_is_left_behind(self):
        """Leaving out everything would lose least, and is no way out."""
        damage = [0.0, 0.9] * 8
        search = SkipSearch([1 / 17] * 16, 0.5, range(16), 1)
        search.skipped = frozenset(range(1, 16, 2))
        for _ in range(200):
            candidate = search.candidate()
            hits = [
                round(1000 * math.prod(1 - damage[index] for index in skipped))
                for skipped in (candidate, search.skipped)
            ]
            search.judge(candidate, *hits, 1000)
        assert search.skipped == frozenset(range(0, 16, 2))

    def test_trials_become_rare_where_nothing_changes(self):
        search = SkipSearch([0.02] * 10, 0.2, range(10), 4)
        due = []
        for number in range(2000):
            if search.is_due():
                due.append(number)
                search.judge(search.candidate(), 0, 32, 32)
        assert due[:5] == [3, 7, 11, 15, 19]
        assert len([number for number in due if number >= 1000]) <= 1000 / 64 + 1
