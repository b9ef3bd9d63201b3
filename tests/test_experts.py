"""Mixtures of experts: how many experts several positions choose, and what that does to the costs that are assumed at first."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from architectures import build, half_right, random_ids
from pairs import BY_NAME, CALL
from transformers import GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from assisted import AssistedModelForCausalLM
from assisted.calls.costs import expected_experts, growth, numbers_read
from assisted.engine.traits import experts_of
from assisted.lab.plan.shapes import Shapes
from assisted.lab.plan.sizes import predict, read_per_pass
from assisted.lengths import COLUMN, Adaptive
from assisted.methods import parse

accelerate = pytest.importorskip("accelerate")
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MIXTURES: dict[str, tuple[Any, tuple[int, int]]] = {
    "mixtral": (MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2), (8, 2)),
    "qwen3_moe": (Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=128, num_experts_per_tok=8), (128, 8)),
    "gpt_oss": (GptOssConfig(**SMALL, num_local_experts=32, num_experts_per_tok=4), (32, 4)),
}


@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (32, 4), (128, 8), (4, 4)])
def test_the_expected_number_is_that_of_random_choices(experts: int, chosen: int) -> None:
    assert expected_experts(experts, chosen, 1) == pytest.approx(chosen)
    drawn, trials = random.Random(0), 1500
    for positions in (2, 5, 17):
        seen = [len({e for _ in range(positions) for e in drawn.sample(range(experts), chosen)}) for _ in range(trials)]
        assert expected_experts(experts, chosen, positions) == pytest.approx(sum(seen) / trials, rel=0.02)
    counts = [expected_experts(experts, chosen, positions) for positions in range(1, 200)]
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert all(before > after - 1e-9 > -1e-8 for before, after in itertools.pairwise(steps))  # ever fewer new ones
    assert counts[-1] <= experts


@pytest.mark.parametrize("name", MIXTURES)
def test_a_pass_reads_the_experts_of_all_its_positions(name: str) -> None:
    config, (experts, chosen) = MIXTURES[name]
    shapes = Shapes.of_config(config)
    assert experts_of(shapes.config) == (experts, chosen)
    inside = sum(p.numel() for n, p in shapes.model.named_parameters() if ".experts." in n)
    beside = shapes.numbers - inside - shapes.model.get_input_embeddings().weight.numel()
    assert numbers_read(shapes.model) == pytest.approx(beside + inside * chosen / experts)
    assert numbers_read(shapes.model, 1000) == pytest.approx(beside + inside, rel=1e-6)
    assert 1 < growth(shapes.model, 2) < growth(shapes.model, 5) < (beside + inside) / beside
    assert read_per_pass(shapes, 2 * shapes.numbers, 5) == pytest.approx(2 * numbers_read(shapes.model, 5), abs=1)


def test_dense_models_read_the_same() -> None:
    shapes = Shapes.of_config(LlamaConfig(**SMALL))
    assert growth(shapes.model, 16) == 1
    assert numbers_read(shapes.model, 16) == numbers_read(shapes.model)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_plan_expects_less_of_drafts(name: str) -> None:
    """A mixture gains less than a dense model that reads as much for a token, and less than one whose experts never differ."""
    config, _ = MIXTURES[name]
    shapes, spec = Shapes.of_config(config), parse("suffix")
    bandwidth = (1e9, 2e9)
    mixture = predict(shapes, spec, 2 * shapes.numbers, 0, 0, bandwidth)
    dense = predict(Shapes.of_config(LlamaConfig(**SMALL)), spec, 2 * shapes.numbers, 0, 0, bandwidth)
    assert mixture.times[1] < dense.times[1]
    # offloaded experts of a layer cross the bus together
    every = 2 * shapes.numbers
    offloaded = predict(shapes, spec, every, 0, 0, bandwidth, every, (1e8, 2e8))
    assert offloaded.times[1] > mixture.times[1]


def test_the_first_guess_of_a_position() -> None:
    target = build(BY_NAME["mixtral"])
    pair = AssistedModelForCausalLM.from_models(target, draft="suffix")
    ids = random_ids(target, 2, 8, seed=1)
    for rows in (1, 2):
        pair.generate(ids[:rows], attention_mask=torch.ones_like(ids[:rows]), **CALL)
        guess = pair.length.policy.position_cost
        assert guess == pytest.approx(rows * COLUMN + (growth(target, 5 * rows, rows) - 1) / 4)
    assert Adaptive(position_cost=0.3).start().known.verify.slope == 0.3
    assert Adaptive().start().known.verify.slope == COLUMN
    dense = AssistedModelForCausalLM.from_models(build(BY_NAME["llama"]), draft="suffix")
    for rows, expected in ((1, None), (2, 2 * COLUMN)):
        dense.generate(ids[:rows], attention_mask=torch.ones_like(ids[:rows]), **CALL)
        assert dense.length.policy.position_cost == expected


def test_all_experts_of_an_offloaded_layer_are_fetched() -> None:
    """So a pass over many positions costs no more bytes, and no position is expected to."""
    target = accelerate.cpu_offload(build(BY_NAME["mixtral"]), execution_device=torch.device("cpu"))
    fetched: list[str] = []
    for name, module in target.named_modules():
        if name.endswith(".experts"):
            mapping = module._hf_hook.weights_map
            module._hf_hook.weights_map = Counted(mapping, fetched)
    whole = build(BY_NAME["mixtral"])
    pair = AssistedModelForCausalLM.from_models(target, draft=half_right(whole, noise=0.1))
    ids = random_ids(whole, 1, 8, seed=1)
    mask = torch.ones_like(ids)
    assert (
        pair.generate(ids, attention_mask=mask, **CALL).tolist()
        == whole.generate(ids, attention_mask=mask, **CALL).tolist()
    )
    assert pair.length.policy.position_cost is None
    assert set(fetched) == {"gate_up_proj", "down_proj"}


class Counted:
    """A mapping of weights that notes which are read."""

    def __init__(self, weights: Any, fetched: list[str]):
        self.weights, self.fetched = weights, fetched

    def __getitem__(self, name: str) -> Any:
        self.fetched.append(name)
        return self.weights[name]
