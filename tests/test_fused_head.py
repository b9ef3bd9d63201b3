"""EAGLE-3 and MTP heads in fewer operations say what the heads say, and are the heads themselves where they could not."""

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build
from eagle_heads import random_head
from mtp_heads import random_mtp
from pairs import ROUNDING, pair
from test_native import LLAMA, needed, with_own_epsilons
from transformers import LlamaForCausalLM

from assisted.engine.cache import SlotCache
from assisted.fast import native
from assisted.fast.layers import FusedLayer
from assisted.methods.eagle import fused as module
from assisted.methods.eagle.fused import fused_head, source_of
from assisted.methods.shared.runner import HeadRunner

KINDS = {
    "plain": {},
    "qwen3 layer": {"layer": "qwen3"},
    "two layers": {"num_hidden_layers": 2},
    "norm before residual": {"norm_before_residual": True},
    "norms before the fusion": {"fc_norm": True, "norm_output": True},
    "one norm before it": {"norm_before_fc": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "fc_bias": True},
    "biases of the heads alone": {"qkv_bias": True},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "scaled angles": {"rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "one key head": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_says_is_what_the_head_says(kind):
    """Over a prompt, single columns behind it and a level of a tree, the second row padded on the left."""
    target = pair()[0]
    head = with_own_epsilons(random_head(target, 3, **KINDS[kind]))
    other = fused_head(head)
    assert all(isinstance(layer, FusedLayer) for layer in other.module.layers)
    assert other.module.fc.weight is head.fc.weight
    _compare(target, head, other, ROUNDING)


BY_NAME = {architecture.name: architecture for architecture in [*ARCHITECTURES, *RECURRENT]}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_next", "qwen3_5", "exaone4", "gemma3"])
def test_an_mtp_head_of_a_known_family(name):
    target = build(BY_NAME[name])
    head = with_own_epsilons(random_mtp(target))
    other = fused_head(head)
    assert isinstance(other.module.layer, FusedLayer)
    assert head.layer is not other.module.layer
    _compare(target, head, other, ROUNDING)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_mtp_heads_of_other_families_are_left_alone(name):
    head = random_mtp(build(BY_NAME[name]))
    assert fused_head(head).module is head


def test_an_mtp_head_whose_faster_form_differs_is_left_alone(monkeypatch):
    head = random_mtp(build(BY_NAME["qwen3_5"]))
    monkeypatch.setattr(FusedLayer, "forward", lambda self, states, **kwargs: 1.1 * states)
    made = fused_head(head)
    assert made.module is head and made.warning.startswith("the MTP head runs as it is")


@needed
@pytest.mark.parametrize("kind", ["plain", "norm before residual", "two layers", "norms before the fusion", "biases"])
def test_layers_in_c(kind, monkeypatch):
    """A head of half precision rounds in another place now and then."""
    target = LlamaForCausalLM(LLAMA).eval().to(torch.bfloat16)
    head = random_head(target, 3, **KINDS[kind]).to(torch.bfloat16)
    other = fused_head(head)
    calls, run = [], native.NativeLayers.one
    monkeypatch.setattr(native.NativeLayers, "one", lambda *args: calls.append(0) or run(*args))
    _compare(target, head, other, 0.06)
    assert len(calls) == 2 * 4 * len(head.layers)


def _compare(target, head, other, error):
    width = target.config.hidden_size
    for mask in (None, torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])):
        first = torch.zeros(2, 1, dtype=torch.int64) if mask is None else -(1 - mask).sum(1, keepdim=True)
        runners = [HeadRunner(part, target, SlotCache(len(first), 32), first, mask) for part in (head, other)]
        generator = torch.Generator().manual_seed(0)

        def step(columns, run, runners=runners, generator=generator):
            tokens = torch.randint(3, 96, (2, columns), generator=generator)
            states = torch.randn(2, columns, width, generator=generator).to(head.dtype)
            with torch.no_grad():
                one, two = (run(runner, tokens, states) for runner in runners)
                assert torch.allclose(one, two, atol=error)
                assert torch.allclose(runners[0].logits(one), runners[1].logits(two), atol=error)

        def passed(runner, tokens, states):
            made = runner(tokens, states)
            runner.cache.commit([tokens.shape[1]] * 2)
            return made

        step(5, lambda runner, tokens, states: runner.read(tokens, states, [5, 5]))
        for columns in (1, 2):
            step(columns, passed)
        step(
            3,
            lambda runner, tokens, states: (
                runner.level(tokens.tolist(), [[0, 0, 0]] * 2, runner.root(states[:, 0], 3)).states
            ),
        )


def test_heads_that_are_left_alone():
    target = pair()[0]
    first = random_head(target, 1)
    assert fused_head(first).module is first
    half = random_head(target, 3).to(torch.float16)
    hooked = random_head(target, 3)
    hooked.layers[0].self_attn.register_forward_hook(lambda *args: None)
    for head in (half, hooked):
        assert fused_head(head).module.layers is head.layers


def test_one_that_turned_out_to_be_another_is_not_used(monkeypatch):
    head = random_head(pair()[0], 3)
    monkeypatch.setattr(module._First, "forward", lambda self, embeddings, states, **kwargs: states)
    other = fused_head(head).module
    assert other.layers is head.layers
    states = torch.randn(2, 1, 2, 32)
    assert torch.allclose(other.logits(other(*states)), head.logits(head(*states)), atol=ROUNDING)


def test_a_weight_that_is_written_into_shows():
    head = random_head(pair()[0], 3)
    before = source_of(head)
    assert source_of(head).same(before)
    with torch.no_grad():
        head.layers[0].mlp.gate_proj.weight[0, 0] += 1
    assert not source_of(head).same(before)
    assert not source_of(head.to(torch.float64)).same(before)
