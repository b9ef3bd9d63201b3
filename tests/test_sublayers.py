"""What is left out of a model leaves the residual stream as it is; the model itself stays whole."""

import pytest
import torch
from architectures import ARCHITECTURES, build, random_ids
from covering import over
from pairs import BY_NAME
from test_parts import assert_same, run, snapshot

from assisted import AssistedModelForCausalLM
from assisted.engine.parts import find_layers
from assisted.engine.sublayers import Nothing, find_sublayers, without
from assisted.engine.traits import Traits

WHOLE = {
    "gemma3n": "adds a path of its own beside attention and MLP",
    "gemma4": "adds inputs of its own to every layer",
}


@over("architecture", ARCHITECTURES, also=lambda one: [one.name] if one.name in WHOLE else [])
def test_attention_and_mlp_are_told_apart(architecture):
    """Or else layers are left out as a whole; the model stays as it was."""
    model = build(architecture)
    if not Traits.of(model).is_rewindable:
        pytest.skip("has no layers of attention and MLP")
    before = snapshot(model)
    layers = find_layers(model)
    sublayers = find_sublayers(model, layers)
    if architecture.name in WHOLE:
        assert [len(s.modules) for s in sublayers] == [0] * len(layers)
    else:
        assert [s.layer for s in sublayers] == [place for place in range(len(layers)) for _ in ("attention", "mlp")]
        assert all(s.modules for s in sublayers)
    assert all(0 < s.share < 1 for s in sublayers)
    assert sum(s.share for s in sublayers) < 1
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt", "dbrx", "gemma2", "falcon", "jetmoe", "qwen3_moe"])
def test_a_sublayer_left_out_is_one_whose_output_is_nothing(name):
    """Against the same model with the sublayer's last matrix set to zero."""
    model = build(BY_NAME[name])
    ids = random_ids(model, 2, 9)
    layers = find_layers(model)
    sublayers = find_sublayers(model, layers)
    whole = run(model, ids)
    for index, sublayer in enumerate(sublayers):
        ours = run(without(model, layers, sublayers, [index]), ids)
        assert not torch.equal(ours, whole)
        zeroed = build(BY_NAME[name])
        layer = layers.of(zeroed)[sublayer.layer]
        for path, _ in sublayer.modules:
            for weight in layer.get_submodule(".".join(path)).parameters():
                weight.data.zero_()
        torch.testing.assert_close(ours, run(zeroed, ids), rtol=0, atol=1e-5)
    assert torch.equal(run(model, ids), whole)


def test_a_layer_without_any_of_its_sublayers_is_not_run():
    model = build(BY_NAME["llama"], num_hidden_layers=3)
    layers = find_layers(model)
    sublayers = find_sublayers(model, layers)
    seen = []
    for place, layer in enumerate(layers.of(model)):
        layer.input_layernorm.register_forward_hook(lambda *_, place=place: seen.append(place))
    run(without(model, layers, sublayers, [2, 3, 4]), random_ids(model, 1, 4))
    assert seen == [0, 2]


def test_a_layer_put_together_in_its_own_way_is_left_out_as_a_whole():
    model = build(BY_NAME["llama"])

    class Doubling(type(model.model.layers[1])):
        def forward(self, hidden_states, *args, **kwargs):
            return 2 * super().forward(hidden_states, *args, **kwargs)

    model.model.layers[1].__class__ = Doubling
    found = find_sublayers(model, find_layers(model))
    assert [(s.layer, len(s.modules)) for s in found] == [(0, 1), (0, 1), (1, 0)]


def test_what_a_layer_raises_without_attention_and_mlp_is_in_the_report():
    model = build(BY_NAME["llama"])

    class Needing(type(model.model.layers[1])):
        def forward(self, hidden_states, *args, **kwargs):
            if type(self.mlp) is Nothing:
                raise TypeError("where is it?")
            return super().forward(hidden_states, *args, **kwargs)

    model.model.layers[1].__class__ = Needing
    found = find_sublayers(model, find_layers(model))
    assert [(s.layer, len(s.modules)) for s in found] == [(0, 1), (0, 1), (1, 0)]
    assert [s.error is not None for s in found] == [False, False, True]
    ours = AssistedModelForCausalLM.from_models(model, draft="layer-skip")
    ours.generate(random_ids(model, 1, 4), max_new_tokens=4, do_sample=False, pad_token_id=0)
    (warning,) = ours.report.warnings
    assert warning.startswith("1 of 2 layers can be skipped as a whole only")
    assert "TypeError: where is it?" in warning


def test_experts_count_as_far_as_they_are_active():
    dense, routed = (build(BY_NAME[name]) for name in ("qwen3", "qwen3_moe"))
    shares = [find_sublayers(model, find_layers(model))[1].share for model in (dense, routed)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)  # two of four experts, each half as wide
