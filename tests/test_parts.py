"""Parts of a model make the whole again, share its weights and hooks, and leave it as it was."""

import types
from functools import partial

import accelerate
import pytest
import torch
from architectures import ARCHITECTURES, build, random_ids
from covering import over
from pairs import BY_NAME
from torch import nn

from assisted.engine.parts import back, find_layers, front, tapped, with_children
from assisted.engine.traits import Traits


def snapshot(model):
    """Everything of a model that a part might have touched: modules, their attributes and hooks, weights, configs."""
    modules = {
        name: (id(module), type(module), {key: id(value) for key, value in vars(module).items() if key[0] != "_"})
        for name, module in model.named_modules()
    }
    children = {name: list(module._modules.items()) for name, module in model.named_modules()}
    hooks = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in model.named_modules()}
    weights = {name: (id(weight), weight.detach().clone()) for name, weight in model.state_dict(keep_vars=True).items()}
    return modules, children, hooks, weights, model.config.to_dict(), model.generation_config.to_dict()


def assert_same(before, after):
    *parts_before, weights_before, config_before, generation_before = before
    *parts_after, weights_after, config_after, generation_after = after
    assert parts_before == parts_after
    assert (config_before, generation_before) == (config_after, generation_after)
    assert weights_before.keys() == weights_after.keys()
    for name, (identity, weight) in weights_before.items():
        assert weights_after[name][0] == identity
        assert torch.equal(weights_after[name][1], weight)


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=True).logits


@over("architecture", ARCHITECTURES)
def test_front_and_back_make_the_whole(architecture):
    model = build(architecture)
    if not Traits.of(model).is_rewindable or architecture.name == "gemma3n":
        pytest.skip("has no parts that could be run one after the other")
    ids = random_ids(model, 2, 9)
    before = snapshot(model)
    whole = run(model, ids)
    layers = find_layers(model)
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    for end in range(1, len(layers)):
        first, taps = tapped(front(model, layers, end), layers, [end])
        early = run(first, ids)
        assert early.shape == whole.shape
        assert not torch.equal(early, whole)
        rest, inject = back(model, layers, end)
        inject.hidden = taps[end].hidden
        torch.testing.assert_close(run(rest, ids), whole, rtol=0, atol=1e-6)
    same, taps = tapped(model, layers, range(1, len(layers) + 1))
    assert torch.equal(run(same, ids), whole)
    last, inject = back(model, layers, len(layers))
    inject.hidden = taps[len(layers)].hidden[..., 3:, :]
    torch.testing.assert_close(run(last, ids[:, 3:]), whole[:, 3:], rtol=0, atol=1e-6)
    assert_same(before, snapshot(model))


@pytest.fixture
def model():
    return build(BY_NAME["llama"], num_hidden_layers=3)


def test_weights_are_shared(model):
    part = front(model, find_layers(model), 2)
    own = {id(weight) for weight in model.parameters()}
    assert {id(weight) for weight in part.parameters()} < own


def test_hooks_of_layers_and_of_the_model_fire(model):
    ids = random_ids(model, 1, 5)
    layers = find_layers(model)
    seen = []
    for name, module in (("model", model.model), ("0", model.model.layers[0]), ("2", model.model.layers[2])):
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    part = front(model, layers, 1)
    run(part, ids)
    assert seen == ["0", "model"]


def test_a_part_follows_what_the_model_becomes(model):
    """Parts are cheap and made anew: of the model as it stands."""
    ids = random_ids(model, 1, 5)
    layers = find_layers(model)
    model.lm_head = nn.Linear(32, 7, bias=False)
    part = front(model, layers, 1)
    assert run(part, ids).shape == (1, 5, 7)


def test_accelerates_hooks_run_the_parts(model):
    """They keep a forward that is bound to the module they were put on."""
    ids = random_ids(model, 1, 5)
    whole = run(model, ids)
    layers = find_layers(model)
    first, taps = tapped(front(model, layers, 1), layers, [1])
    early = run(first, ids)

    class Counting(accelerate.hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counting.calls += 1
            return args, kwargs

    for module in (model, model.model, model.model.layers[0]):
        accelerate.hooks.add_hook_to_module(module, Counting())
    assert find_layers(model) == layers
    Counting.calls = 0
    first, taps = tapped(front(model, layers, 1), layers, [1])
    assert torch.equal(run(first, ids), early)
    assert Counting.calls == 3
    rest, inject = back(model, layers, 1)
    inject.hidden = taps[1].hidden
    torch.testing.assert_close(run(rest, ids), whole, rtol=0, atol=1e-6)


def test_a_bound_forward_is_bound_to_the_part(model):
    ids = random_ids(model, 1, 5)
    layers = find_layers(model)
    part = front(model, layers, 1)
    early = run(part, ids)
    original = type(model.model).forward
    model.model.forward = types.MethodType(lambda self, *args, **kwargs: original(self, *args, **kwargs), model.model)
    part = front(model, layers, 1)
    assert torch.equal(run(part, ids), early)


def test_a_compiled_model_runs_its_parts_eagerly(model):
    ids = random_ids(model, 1, 5)
    layers = find_layers(model)
    part = front(model, layers, 1)
    early = run(part, ids)
    model.forward = torch.compile(model.forward)
    model.model.compile()
    part = front(model, layers, 1)
    assert torch.equal(run(part, ids), early)


def test_a_forward_of_unknown_origin_is_refused(model):
    layers = find_layers(model)
    model.model.forward = partial(print)
    with pytest.raises(ValueError, match="the forward of LlamaModel was replaced"):
        front(model, layers, 1)


def test_layers_that_are_run_in_another_order_are_not_found(model):
    class Backwards(type(model.model)):
        def forward(self, *args, **kwargs):
            layers = self._modules["layers"]
            self._modules["layers"] = layers[::-1]
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._modules["layers"] = layers

    model.model.__class__ = Backwards
    with pytest.raises(ValueError, match="does not run through a list of 3 layers"):
        find_layers(model)


def test_several_places_at_once():
    module = nn.Sequential(nn.Sequential(nn.Identity(), nn.Identity()), nn.Identity())
    others = [nn.ReLU(), nn.Tanh(), nn.GELU()]
    other = with_children(module, {("0", "0"): others[0], ("0", "1"): others[1], ("1",): others[2]})
    assert [other[0][0], other[0][1], other[1]] == others
    assert all(type(m) is nn.Identity for m in (module[0][0], module[0][1], module[1]))
