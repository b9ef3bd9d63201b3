"""Architectures whose layers have a form: in few operations and in C they say what transformers' own layers say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build, random_ids
from pairs import BY_NAME
from test_fused import FAMILY
from test_native import needed, with_own_epsilons
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from assisted.core.drafts import Draft
from assisted.engine.agreement import agree
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast import fused, native
from assisted.fast.families import FORMS

# wide enough for the kernels in C
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "granite": {
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 2.5},
    },
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "seed_oss": {"attention_out_bias": True, "mlp_bias": True},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
}
"""Further settings of a family's config, tested beside the usual ones."""
OF_EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]

LEARNED: list[Any] = [
    pytest.param("gpt_oss", lambda layer: layer.self_attn.sinks.data.fill_(float("-inf")), id="sinks"),
    pytest.param("apertus", lambda layer: layer.mlp.act_fn.alpha_p.data.add_(1.5), id="for positive numbers"),
    pytest.param("apertus", lambda layer: layer.mlp.act_fn.alpha_n.data.add_(1.5), id="for negative numbers"),
    pytest.param("apertus", lambda layer: layer.mlp.act_fn.beta.fill_(-1.0), id="beta"),
]
"""Numbers that a layer has learned beside its matrices, and what changes them in place."""
CASES = [(name, given) for name in FAMILY for given in ({}, VARIANTS.get(name)) if given is not None]


def built(name: str, dtype: torch.dtype = torch.float32, **given: Any) -> Any:
    model = build(BY_NAME[name], **(WIDE | given))
    torch.manual_seed(0)
    for of_norm, parameter in model.named_parameters():  # norms and biases that matter
        if parameter.dim() == 1 or "norm" in of_norm:
            nn.init.normal_(parameter, 1.0 if "norm.weight" in of_norm else 0.0, 1.0 if "sinks" in of_norm else 0.2)
    return with_own_epsilons(model).to(dtype)


def said(model: Any, prepared: Any) -> torch.Tensor:
    """The logits of two rows, one with padding, whose text soon exceeds the windows: of a prompt, a tree and a chain."""
    run = CachedModel(prepared, SlotCache(2, 64), Traits.of(model).masks)
    ids, mask = random_ids(model, 2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    columns, parents = random_ids(model, 2, 6, seed=1), torch.tensor([[-1, 0, 0, -1, 3]]).repeat(2, 1)
    found = [run.prefill(ids, mask), run(columns, Draft(columns[:, 1:], torch.tensor([9, 9]), parents=parents))]
    run.commit([3, 2], [[0, 1, 2], [0, 4]])
    found.append(run(random_ids(model, 2, 1, seed=2)))
    run.commit([1, 1])
    found.append(run(random_ids(model, 2, 4, seed=3)))
    return torch.cat(found, 1)


@needed
@torch.no_grad()
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("name,given", CASES, ids=[f"{name}{'-variant' if given else ''}" for name, given in CASES])
def test_layers_in_c_are_the_models(name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    model = built(name, dtype, **given)
    other = fused.fused(model)
    layers: Any = other.module.model.layers
    of_layers = [layer.native for layer in layers]
    assert all(own is not None and own.is_whole == (name not in OF_EXPERTS) for own in of_layers)
    own, found = said(model, fused.PreparedModule(model)), said(model, other)
    assert agree(found, own, dtype)
    if name in [*OF_EXPERTS, "gemma2"] and dtype == torch.float32:  # which do not run in float64
        assert torch.allclose(found, own, atol=2e-4)
        return
    # rounded where the model rounds: no farther from the logits of a wider dtype than the model's own. In float32, packed
    # products add up one input after the other, and torch's in parts, which is up to a third nearer
    exact = said(model.to(torch.float32 if dtype == torch.bfloat16 else torch.float64), fused.PreparedModule(model))
    errors = found - exact, own - exact
    if name in OF_EXPERTS:  # rounding routes a token to another expert now and then
        error, of_model = (one.std(-1).median() for one in errors)
    else:
        error, of_model = (one.std() for one in errors)
    assert error < (1.25 if dtype == torch.bfloat16 else 1.5) * of_model


@needed
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("name", ["apertus", "gpt_oss"])
def test_sinks_and_xielu_on_other_processors(name: str) -> None:
    for dtype in native.DTYPES:
        test_layers_in_c_are_the_models(name, {}, dtype)
    test_a_column_has_the_same_bits_alone_and_in_a_tree(name)


@torch.no_grad()
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needed), False], ids=["in C", "in operations"])
@pytest.mark.parametrize("name,change", LEARNED)
def test_what_a_layer_has_learned_is_read_as_it_is_now(
    name: str, change: Any, in_c: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits without it are so far away that no test takes them for those with it."""
    if not in_c:
        monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "of the test"))

    def read(model: Any) -> torch.Tensor:
        other = fused.fused(model, bits=True)
        assert all((layer.native is not None) == in_c for layer in other.module.model.layers)
        found, own = said(model, other), said(model, fused.PreparedModule(model))
        assert agree(found, own, dtype)
        return found

    for may_copy in (True, False):
        monkeypatch.setattr(fused, "may_copy", lambda parameters, may_copy=may_copy: may_copy)
        model = built(name, dtype)
        before = read(model)
        for layer in model.model.layers:
            change(layer)
        assert not agree(before, read(model), dtype)


@torch.no_grad()
@pytest.mark.parametrize("name,dtype", [("gpt_oss", torch.bfloat16), ("apertus", torch.float32)])
def test_what_a_layer_has_learned_in_another_dtype(name: str, dtype: torch.dtype) -> None:
    """It has no form in C then."""
    model = built(name, dtype)
    for layer in model.model.layers:
        if name == "apertus":
            layer.mlp.act_fn.to(torch.bfloat16)
        else:
            layer.self_attn.sinks = nn.Parameter(layer.self_attn.sinks.float())
    other = fused.fused(model, bits=True)
    assert all(layer.native is None for layer in other.module.model.layers)
    assert agree(said(model, other), said(model, fused.PreparedModule(model)), dtype)


@pytest.mark.parametrize(
    "name,given",
    [
        ("olmo", {"clip_qkv": 4.0}),
        ("stablelm", {"qk_layernorm": True}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma2", {"use_bidirectional_attention": True}),
    ],
)
def test_settings_with_which_layers_compute_something_else(name: str, given: dict[str, Any]) -> None:
    assert fused.layers_of(build(BY_NAME[name])) is not None
    assert fused.layers_of(build(BY_NAME[name], **given)) is None


def test_other_attention_takes_no_sinks() -> None:
    model = build(BY_NAME["gpt_oss"])
    model.config._attn_implementation = "sdpa"
    assert fused.layers_of(model) is None


@needed
@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3", "olmo3", "cohere2", "granite", "phi3-window", "apertus", "gpt_oss"]
)
def test_a_column_has_the_same_bits_alone_and_in_a_tree(name: str) -> None:
    model = built(name, torch.bfloat16)
    for layer in model.model.layers if name in OF_EXPERTS else ():  # which are torch's products
        for weight in layer.mlp.experts.parameters():
            weight.zero_()
    prepared, ids, path = fused.fused(model), random_ids(model, 1, 12), random_ids(model, 1, 3, seed=1)
    masks = Traits.of(model).masks
    one, several = (CachedModel(prepared, SlotCache(1, 64), masks) for _ in range(2))
    alone = []
    for run in (one, several):
        run.prefill(ids, None)
    for column in path.split(1, 1):
        alone.append(one(column))
        one.commit([1])
    nodes = torch.tensor([[path[0, 0], 7, path[0, 1], 8, path[0, 2]]])
    tree = Draft(nodes[:, 1:], torch.tensor([4]), parents=torch.tensor([[-1, -1, 0, 1]]))
    assert torch.equal(several(nodes, tree)[:, [0, 2, 4]], torch.cat(alone, 1))


@needed
@torch.no_grad()
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_a_norm_with_weights_for_each_head(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = CohereLayerNorm((4, 32)).to(dtype)
    nn.init.normal_(norm.weight, 1.0, 0.5)
    heads = torch.randn(2, 3, 4, 32).to(dtype)
    assert agree(FORMS["Cohere"].norm_of(norm)(heads), norm(heads), dtype)


def test_the_page_names_these_families() -> None:
    page = (Path(__file__).parents[1] / "docs" / "concepts" / "fast-path.md").read_text()
    table = page.split("| layer | models |")[1].split("\n\n")[0]
    named = {
        re.sub("[^a-z0-9]", "", name.lower()) for row in table.splitlines()[2:] for name in row.split("|")[2].split(",")
    }
    assert named == {name.lower().replace("_", "") for name in FORMS}
