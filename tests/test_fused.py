"""Fused models say what their model says, notice when its weights change, and leave what they do not know as it is."""

import warnings

import pytest
import torch
from architectures import ARCHITECTURES, build, half_right, random_ids
from covering import over
from pairs import BY_NAME
from test_delta import NAMES as HYBRIDS
from test_delta import built as hybrid
from test_delta import compare
from test_parts import assert_same, snapshot

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.engine.trust import Trust
from assisted.fast import families, fused, native, products
from assisted.methods.shared import model_drafter

LLAMAS = ["llama", "mistral", "mistral-window", "qwen2", "qwen3"]
FAMILY = [
    *LLAMAS,
    *(
        "ministral",
        "mixtral",
        "qwen2-window",
        "qwen2_moe",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "phi3",
        "phi3-window",
    ),
    *(
        "stablelm",
        "olmo",
        "olmo2",
        "olmo3",
        "granite",
        "cohere",
        "cohere2",
        "starcoder2",
        "starcoder2-window",
        "smollm3",
    ),
    *("glm", "glm4", "nemotron", "exaone4", "ernie4_5", "seed_oss", "hunyuan_v1_dense", "arcee", "apertus", "helium"),
    "gpt_oss",
]
"""The architectures whose layers have a form."""
ROUNDING = 1e-4  # the random models' logits have a spread of some units


def both(model, rows=2, slots=64):
    other = fused.fused(model)
    assert other.module is not model
    return [CachedModel(m, SlotCache(rows, slots), Traits.of(model).masks) for m in (model, other)]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_knows_its_families_alone(architecture, monkeypatch):
    monkeypatch.setattr(products, "_WIDE", 10**9)  # otherwise others have their products packed
    model = build(architecture)
    assert (fused.fused(model).module is not model) == (architecture.name in FAMILY)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILY)
def test_says_the_same_over_padding_chains_and_trees(name):
    model = build(BY_NAME[name])
    before = snapshot(model)
    ids = random_ids(model, 2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    one, two = both(model)
    assert torch.allclose(one.prefill(ids, mask), two.prefill(ids, mask), atol=ROUNDING)
    columns = random_ids(model, 2, 5, seed=9)
    tree = Draft(columns[:, 1:], torch.tensor([4, 4]), parents=torch.tensor([[-1, -1, 0, 1], [-1, 0, 1, 2]]))
    for kept in ([1, 3], [2, 1]):  # rows of different lengths from the second round on
        assert torch.allclose(one(columns, tree), two(columns, tree), atol=ROUNDING)
        for run in (one, two):
            run.commit(kept)
    assert_same(before, snapshot(model))


@over("architecture", ARCHITECTURES)
def test_text_is_plain_where_every_product_is_packed(architecture, monkeypatch):
    monkeypatch.setattr(products, "_WIDE", 1)
    target = build(architecture)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    ids = random_ids(target, 1, 9)
    kwargs = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of drafting that failed
        output = model.generate(ids, draft_length=4, **kwargs)
    assert model.report.accepted > 0
    assert output.tolist() == model.generate(ids, assisted=False, **kwargs).tolist()


@torch.no_grad()
def test_reads_the_weights_as_they_are_now():
    model = build(BY_NAME["llama"])
    ids = random_ids(model, 1, 8)
    first = fused.fused(model).module
    assert fused.fused(model).module.model.layers is first.model.layers  # nothing is made twice
    for change in (
        lambda: model.model.layers[0].mlp.gate_proj.weight.data.mul_(1.01),  # unseen by version counters
        lambda: model.model.layers[1].self_attn.k_proj.weight.add_(0.01),
        lambda: model.model.layers[0].input_layernorm.weight.data.mul_(2.0),
        lambda: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight * 0.5)),
    ):
        change()
        one, two = both(model, rows=1)
        assert torch.allclose(one.prefill(ids, None), two.prefill(ids, None), atol=ROUNDING)


def test_leaves_alone_what_somebody_hangs_on_to():
    model = build(BY_NAME["llama"])
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: None)
    assert fused.fused(model).module is model
    handle.remove()
    assert fused.fused(model).module is not model
    model.train()
    assert fused.fused(model).module is model


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_hidden_states_that_were_once_asked_for(name, monkeypatch):
    """transformers' hooks stay on a model; they record nothing in other calls, and are no reason to run it slowly."""
    monkeypatch.setattr(products, "_WIDE", 1)
    model, ids = build(BY_NAME[name]), torch.arange(3, 9)[None]
    states = model(ids, output_hidden_states=True).hidden_states
    assert any(layer._forward_hooks for layer in model.model.layers)
    made = fused.fused(model).module
    assert made is not model
    assert torch.allclose(made(ids, use_cache=False).logits, model(ids).logits, atol=ROUNDING)
    assert len(model(ids, output_hidden_states=True).hidden_states) == len(states)


@pytest.mark.quant
def test_leaves_alone_weights_that_are_more_than_numbers():
    model = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="self:int8-torchao", dtype=torch.float32)
    with torch.inference_mode():
        assert fused.fused(model.drafter.model).module is model.drafter.model
    ids = random_ids(model.target, 1, 12, seed=3)
    model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=1, draft_length=3)
    assert model.report.accepted > 0


def test_a_layer_that_computes_something_else_is_found_out():
    model = build(BY_NAME["llama"])
    model.model.layers[1].self_attn.scaling *= 3.0  # read from the layer, therefore right
    assert fused.fused(model).module is not model
    model = build(BY_NAME["llama"])
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(model.model.layers[0].mlp.down_proj, torch.nn.ReLU())
    assert fused.fused(model).module is not model  # whatever stands there is called
    one, two = both(model, rows=1)
    ids = random_ids(model, 1, 8)
    with torch.no_grad():
        assert torch.allclose(one.prefill(ids, None), two.prefill(ids, None), atol=ROUNDING)
    model = build(BY_NAME["llama"])

    class Doubled(type(model.model.layers[0])):
        def forward(self, hidden_states, **kwargs):
            return 2 * super().forward(hidden_states, **kwargs)

    Doubled.__name__, Doubled.__module__ = "LlamaDecoderLayer", "transformers.models.other"
    model.model.layers[0].__class__ = Doubled
    assert fused.fused(model).module is model


@torch.no_grad()
class Renamed(torch.nn.Module):
    """Stands for a quantizer's linear module. given: the name that it has for the number of its outputs."""

    def __init__(self, linear, given):
        super().__init__()
        self.weight = torch.nn.Parameter(linear.weight.detach(), requires_grad=False)
        setattr(self, given, len(linear.weight))

    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, self.weight)


@pytest.mark.parametrize(("given", "is_fused"), [("out_features", True), ("outfeatures", True), ("width", False)])
@torch.no_grad()
def test_linear_modules_of_quantizers_name_their_outputs_as_they_like(given, is_fused):
    model = build(BY_NAME["llama"])
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Renamed(getattr(layer.self_attn, name), given))
    made, ids = fused.fused(model, Trust()), random_ids(model, 2, 12)
    assert (made.module is not model) == is_fused
    one, two = (CachedModel(m, SlotCache(2, 64), Traits.of(model).masks).prefill(ids, None) for m in (model, made))
    assert torch.allclose(one, two, atol=ROUNDING)


def test_large_models_run_from_their_own_weights(monkeypatch):
    monkeypatch.setattr(products, "_ALWAYS", 0)
    monkeypatch.setattr(products, "free_memory", lambda: 0)
    model = build(BY_NAME["qwen2"])
    one, two = both(model, rows=1)
    ids = random_ids(model, 1, 8)
    assert torch.allclose(one.prefill(ids, None), two.prefill(ids, None), atol=ROUNDING)
    assert two.model.model.layers[0].heads.weight is None


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_of_any_size(name, copied, monkeypatch):
    """Wide products of parts that stay are packed; large models run from their own weights."""
    monkeypatch.setattr(products, "_WIDE", 1)
    if not copied:
        monkeypatch.setattr(products, "_ALWAYS", 0)
        monkeypatch.setattr(products, "free_memory", lambda: 0)
    model = hybrid(name)
    assert (fused.copy_bytes(model, torch.float32) > 0) == copied
    compare(model)


@torch.no_grad()
@pytest.mark.parametrize("name,in_c", [(name, False) for name in FAMILY] + [(name, True) for name in LLAMAS])
def test_bfloat16_is_rounded_where_the_model_rounds(name, in_c, monkeypatch):
    """Over the model's own products every number is the same, but for norms that round once: their float32 numbers may lie on
    either side of a border. Packed products add in another order."""
    if not products.packs(torch.bfloat16):
        pytest.skip("this processor does not multiply bfloat16")
    if not in_c:
        monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "of the test"))
    elif not native.is_available():
        pytest.skip(native.loaded()[1])
    model = build(BY_NAME[name])
    ids = random_ids(model, 2, 12)
    exact = model(ids).logits
    model.to(torch.bfloat16)
    own = model(ids).logits
    with monkeypatch.context() as context:
        context.setattr(fused, "may_copy", lambda parameters: False)
        found = fused.fused(model).module(ids).logits
        rounds_twice = families.form_of(model.model.layers[0]).norm.rounds
        assert torch.equal(found, own) or (not rounds_twice and (found - own).std() < 0.5 * (own - exact).std())
    other = fused.fused(model).module
    product = other.model.layers[0].heads
    assert (product.native if in_c else product.packed) is not None
    assert (other(ids).logits - exact).std() < 1.2 * (own - exact).std()


def test_float16_is_left_alone():
    model = build(BY_NAME["llama"]).to(torch.float16)
    assert fused.fused(model).module is model


@torch.no_grad()
@over("architecture", [a for a in ARCHITECTURES if a.name not in FAMILY])
def test_other_models_keep_their_layers_and_have_their_wide_products_packed(architecture, monkeypatch):
    monkeypatch.setattr(products, "_WIDE", 1)
    model = build(architecture)
    other = fused.fused(model).module
    packed = [module for module in other.modules() if type(module) is products.PackedLinear]
    own = [module for module in model.modules() if type(module) is torch.nn.Linear]
    assert {id(module.weight) for module in packed} == {id(module.weight) for module in own}
    ids = random_ids(model, 2, 9)
    assert torch.allclose(model(ids).logits, other(ids).logits, atol=ROUNDING)
    if own:
        with torch.no_grad():
            own[0].weight.data.mul_(1.5)
        assert torch.allclose(model(ids).logits, fused.fused(model).module(ids).logits, atol=ROUNDING)


def test_a_faster_form_that_differs_is_not_used_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(fused, "_near", lambda *given: False)
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft="suffix")
    ids = random_ids(target, 1, 8)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    for _ in range(2):  # the trial was in the first call
        assert model.generate(ids, **kwargs).tolist() == target.generate(ids, **kwargs).tolist()
        (warning,) = model.report.warnings
        assert warning.startswith("LlamaForCausalLM runs as it is: the logits of its faster form differ")
    assert len(model.totals.warnings) == 1


def test_nothing_is_fused_or_copied_where_that_is_not_wanted(monkeypatch):
    def refused(model, trusted, **given):
        raise AssertionError("fused")

    monkeypatch.setattr(fused, "fused", refused)
    monkeypatch.setattr(model_drafter, "fused", refused)
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    ids = random_ids(target, 1, 8)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "draft_length": 3}
    with pytest.raises(AssertionError, match="fused"):
        model.generate(ids, **kwargs)
    model.fast = "eager"
    assert model.generate(ids, **kwargs).tolist() == model.generate(ids, **kwargs, assisted=False).tolist()
    assert model.report.drafted == 0  # of the plain call
