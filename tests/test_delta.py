"""Hybrids with the gated delta rule in fewer operations, and the rule in C: the layers' own output, and their states."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import DELTA, LINEAR_LAYERS, RECURRENT, _entry, build, random_ids
from image_models import FAMILIES
from pairs import CALL, no_fallback
from test_parts import assert_same, snapshot
from transformers import DynamicCache

from assisted import MTP, AssistedModelForCausalLM, decoding, verification
from assisted.core.drafts import Draft
from assisted.engine.delta import DeltaMixer, inputs_of
from assisted.engine.libraries import READS_STATES
from assisted.engine.masks import Columns
from assisted.engine.recurrent import slots_for, target_runner
from assisted.engine.session import go_on
from assisted.engine.traits import Traits
from assisted.engine.trust import trust
from assisted.engine.verifiable import masks_of
from assisted.fast import delta, fused, native, products
from assisted.fast import layers as fused_layers
from assisted.fast.delta import NativeMixer
from assisted.fast.head_steps import HeadSteps
from assisted.fast.layers import DeltaLayer, FusedLayer, FusedMLP
from assisted.fast.norms import GatedNorm
from assisted.loading.packed import PackedConfig
from assisted.loading.quantization import quantize_copy
from assisted.methods.mtp import fused as heads_fused

BY_NAME = {architecture.name: architecture for architecture in RECURRENT}
NAMES = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"]
ROUNDING = 2e-4  # of states and logits, float32
PARENTS = torch.tensor([[-1, -1, 0, 1], [-1, 0, 1, 2]])

needed = pytest.mark.skipif(native.loaded(torch.float32)[0] is None, reason=native.loaded(torch.float32)[1])
over_names = pytest.mark.parametrize("name", NAMES)


BY_NAME["qwen3_5_moe"] = _entry("qwen3_5_moe", "qwen3_5_moe_text", **LINEAR_LAYERS, **DELTA)


# sizes of which whole layers run in C; those of `BY_NAME` are of all kinds
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


def built(name, **sizes):
    return build(BY_NAME[name], **sizes)


def runners(model, rows=2):
    other = fused.fused(model)
    assert other.module is not model
    masks = Traits.of(model).column_masks
    return [target_runner(one, slots_for(model, None, rows, 64, masks), masks) for one in (model, other)]


@torch.no_grad()
def compare(model, error=ROUNDING):
    """Padding, chains and trees, from which rows keep different columns; single columns; rows that have ended."""
    ids = random_ids(model, 2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    both = runners(model)
    columns = random_ids(model, 2, 5, seed=9)
    tree = Draft(columns[:, 1:], torch.tensor([4, 4]), parents=PARENTS)

    def same(run):
        one, two = (run(runner) for runner in both)
        assert torch.allclose(one, two, atol=error)

    same(lambda run: run.prefill(ids, mask))
    for draft, kept, path in (
        (tree, [3, 2], [[0, 1, 3], [0, 1]]),
        (None, [1, 4], None),
        (None, [2, 2], None),
        (tree, [2, 4], [[0, 2], [0, 1, 2, 3]]),
    ):
        same(lambda run, draft=draft: run(columns, draft))
        for run in both:
            run.commit(kept, path)
        for one, two in zip(*(run.cache.states() for run in both), strict=True):
            assert torch.allclose(one, two, atol=error)
        same(lambda run: run(columns[:, :1]))
        for run in both:
            run.commit([1, 1])
    for run in both:
        run.run_only([1])
    same(lambda run: run(columns))


@over_names
@pytest.mark.parametrize("in_c", [pytest.param(True, marks=needed), False])
@pytest.mark.parametrize("sizes", [WIDE, {}], ids=["layers", "rule"])
def test_says_the_same_over_padding_chains_and_trees(name, sizes, in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(native, "loaded", lambda *dtype: (None, "of the test"))
    model = built(name, **sizes)
    before = snapshot(model)
    layers = fused.fused(model).module.model.layers
    assert type(layers[0]) is DeltaLayer and (layers[0].linear_attn.rule is not None) == in_c
    assert not sizes or (layers[0].native is not None) == in_c
    assert isinstance(layers[1], FusedLayer) == (name != "olmo_hybrid")  # whose norms stand elsewhere
    compare(model)
    assert_same(before, snapshot(model))


@over_names
@pytest.mark.parametrize("sizes", [WIDE, {}], ids=["layers", "rule"])
@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_half_precision(name, sizes, copied, monkeypatch):
    """Every number is rounded where the layers round it; products of joined weights may add in another order."""
    if not products.packs(torch.bfloat16):
        pytest.skip("this processor does not multiply bfloat16")
    model = built(name, **sizes).to(torch.bfloat16)
    monkeypatch.setattr(fused, "may_copy", lambda parameters: copied)
    one, two = runners(model)
    ids = random_ids(model, 2, 14)
    assert torch.allclose(one.prefill(ids[:, :6], None), two.prefill(ids[:, :6], None), atol=0.1)
    own, found = one(ids[:, 6:]), two(ids[:, 6:])
    assert (own - found).abs().median() < 0.02 * own.std()


@needed
@pytest.mark.usefixtures("processor")
def test_other_processors(monkeypatch):
    for name in ("qwen3_next", "qwen3_5"):
        compare(built(name, **WIDE))
        test_half_precision(name, WIDE, False, monkeypatch)
    for sizes in ((3, 3, 24, 40), (1, 4, 16, 10)):
        for dtype in native.DTYPES:
            with monkeypatch.context() as patch:
                test_the_rule_in_c(3, "tree", sizes, dtype, patch)
            test_texts_in_c(20, sizes, dtype, monkeypatch)


@needed
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_low_bits(name, bits):
    """Products with few outputs, such as those of decays, are filled up one by one where they are joined."""
    model = quantize_copy(built(name, **WIDE).to(torch.bfloat16), PackedConfig(bits))
    layers = fused.fused(model).module.model.layers
    joined = layers[0].linear_attn.joined
    assert joined.native is not None and (joined.order is not None) == (name != "qwen3_next")
    assert layers[0].native is not None and fused.fused(model).runs == (
        "layers in C" if name == "qwen3_5" else "fused layers"
    )
    inputs = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    expected = torch.cat([module(inputs) for module in inputs_of(model.model.layers[0].linear_attn)], -1)
    assert torch.equal(joined(inputs), expected)
    one, two = runners(model)
    ids = random_ids(model, 2, 14)
    assert torch.allclose(one.prefill(ids[:, :6], None), two.prefill(ids[:, :6], None), atol=0.1)
    own, found = one(ids[:, 6:]), two(ids[:, 6:])
    assert (own - found).abs().median() < 0.02 * own.std()


@over_names
@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_reads_the_weights_as_they_are_now(name, copied, monkeypatch):
    monkeypatch.setattr(fused, "suffice_in_place", lambda modules: not copied)
    model = built(name, **WIDE)
    mixer = model.model.layers[0].linear_attn
    layers = fused.fused(model).module.model.layers
    assert fused.fused(model).module.model.layers is layers
    for change in (
        lambda: mixer.A_log.data.add_(0.5),  # unseen by version counters
        lambda: mixer.conv1d.weight.mul_(1.5),
        lambda: setattr(mixer, "dt_bias", torch.nn.Parameter(mixer.dt_bias + 0.3)),
        lambda: model.model.layers[0].input_layernorm.weight.data.add_(0.2),
    ):
        change()
        compare(model, 5 * ROUNDING)  # experts magnify it


@over_names
def test_text_is_plain(name):
    target = built(name, **WIDE)
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=4)
    # layers of OLMo's hybrids with attention, and experts, run by themselves
    passes = "layers in C" if name == "qwen3_5" and native.is_available(torch.float32) else "fused layers"
    ids = random_ids(target, 1, 8).repeat(1, 3)
    with no_fallback():
        for batch in (ids, torch.cat([ids, random_ids(target, 1, 24, seed=4)])):
            kwargs = CALL | {"max_new_tokens": 24}
            assert model.generate(batch, **kwargs).tolist() == target.generate(batch, **kwargs).tolist()
            assert model.report.passes == passes
            assert model.report.drafted > 0
    model.fast = "eager"
    model.generate(ids, **kwargs)
    assert model.report.passes == "eager"


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_another_class_keep_their_code(name):
    model = built(name)
    for part in (model.model.layers[0], model.model.layers[0].linear_attn, model.model.layers[0].linear_attn.conv1d):
        own = type(part)
        part.__class__ = type(own.__name__, (own,), {"__module__": own.__module__})
        assert not any(isinstance(layer, DeltaLayer) for layer in fused.fused(model).module.model.layers)
        part.__class__ = own
    assert isinstance(fused.fused(model).module.model.layers[0], DeltaLayer)


@needed
@pytest.mark.parametrize("fault", ["output", "state"])
def test_layers_in_c_that_compute_something_else_are_found_out(fault, monkeypatch):
    """In the columns themselves, or in what they leave to the next ones."""
    run, advance = delta.run, delta.PassRead.advance

    def wrong(*given):
        found = run(*given)
        given[-1].add_(0.1 * given[-1].flip(-1))
        return found

    def stays(self, last):
        advance(self, [max(column - 1, 0) for column in last])

    monkeypatch.setattr(*((delta, "run", wrong) if fault == "output" else (delta.PassRead, "advance", stays)))
    model = built("qwen3_5", **WIDE)
    made = fused.fused(model)
    assert made.module is model and "differ by more than rounding" in made.warning


@pytest.mark.parametrize("fault", ["output", "state"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rule_that_computes_something_else_is_found_out(name, fault, monkeypatch):
    """In the columns themselves, or in what they leave to the next ones."""
    own = DeltaMixer.over_columns

    def wrong(self, *given):
        made, read = own(self, *given)
        return (1.1 * made, read) if fault == "output" else (made, replace(read, values=3 * read.values))

    monkeypatch.setattr(NativeMixer, "over_columns", wrong)
    monkeypatch.setattr(NativeMixer, "of_text", DeltaMixer.of_text)
    model = built(name)
    monkeypatch.setattr(fused_layers.native, "NativeLayer", lambda *given: None)
    made = fused.fused(model)
    assert made.module is model and "differ by more than rounding" in made.warning


@needed
@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "olmo_hybrid"])
@pytest.mark.parametrize("ended", [False, True])
def test_states_after_a_rejection_are_those_of_a_prompt(name, ended):
    """Layers in C: whatever was drafted beside, each row's states are those of its committed text, read as a prompt."""
    model = built(name, **WIDE)
    ids, columns = random_ids(model, 3, 9), random_ids(model, 3, 5, seed=3)
    prepared, masks = fused.fused(model), Traits.of(model).column_masks
    layers = [layer for layer in prepared.module.model.layers if isinstance(layer, FusedMLP)]
    assert layers and all(layer.native is not None for layer in layers)
    run = target_runner(prepared, slots_for(model, None, 3, 64, masks), masks)
    run.prefill(ids, None)
    texts, rows = [row.tolist() for row in ids], [0, 2] if ended else [0, 1, 2]
    run.run_only(rows)
    tree = Draft(columns[:, 1:], torch.tensor([4, 4, 4]), parents=PARENTS[[0, 1, 0]])
    for draft, paths in ((tree, [[0, 1, 3], [0], [0, 2]]), (None, [[0, 1], [0, 1, 2, 3, 4], [0]])):
        run(columns, draft)
        kept = [len(path) if row in rows else 0 for row, path in enumerate(paths)]
        run.commit(kept, None if draft is None else paths)
        for row in rows:
            texts[row] += columns[row, paths[row]].tolist()
    for place, row in enumerate(run.cache.order):
        alone = target_runner(model, slots_for(model, None, 1, 64, masks), masks)
        alone.prefill(torch.tensor([texts[row]]), None)
        for one, two in zip(alone.cache.states(), run.cache.states(), strict=True):
            assert torch.allclose(one[0], two[place], atol=ROUNDING)


SIZES = pytest.mark.parametrize("sizes", [(2, 4, 8, 8), (3, 3, 24, 40), (1, 4, 16, 10)], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def mixer_of(sizes, dtype, seed):
    """A layer with write strengths up to 2, and with decays from none to all."""
    keys, heads, dk, dv = sizes
    model = build(BY_NAME["olmo_hybrid"])
    config = type(model.config)(
        **{
            **model.config.to_dict(),
            "linear_num_key_heads": keys,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": dk,
            "linear_value_head_dim": dv,
        }
    )
    torch.manual_seed(seed)
    own = type(model.model.layers[0].linear_attn)(config, 0)
    assert own.allow_neg_eigval
    with torch.no_grad():
        own.o_norm.weight.normal_()
        own.dt_bias.normal_(std=4)
    own = own.to(dtype).eval()
    return NativeMixer(own, norm=GatedNorm(own.o_norm)), config.hidden_size


def assert_near(one, two):
    """Of bfloat16, most numbers have the same bits: they are rounded at the same places."""
    assert one.dtype == two.dtype
    if one.dtype == torch.bfloat16:
        assert (one == two).float().mean() > 0.9
    atol = 1e-4 if one.dtype == torch.float32 else 0.03
    assert torch.allclose(one, two, rtol=atol, atol=atol)


@needed
@torch.no_grad()
@DTYPES
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["column", "chain", "tree", "wide chain"])
@SIZES
def test_the_rule_in_c(rows, kind, sizes, dtype, monkeypatch):
    """Against operations of torch, over random numbers."""
    mixer, hidden = mixer_of(sizes, dtype, rows)
    own, (_, heads, dk, dv) = mixer.own, sizes
    width = {"column": 1, "chain": 4, "tree": 5, "wide chain": 20}[kind]
    draft = None
    if kind == "tree":
        draft = Draft(torch.zeros(rows, 4).long(), torch.full((rows,), 4), parents=PARENTS[[0, 1, 0][:rows]])
    columns = Columns.of(width, draft, torch.device("cpu"))
    parts = mixer.joined(2 * torch.randn(rows, width, hidden, dtype=dtype))
    before, state = torch.randn(rows, own.conv_dim, 4, dtype=dtype), torch.randn(rows, heads, dk, dv)
    given = parts, before, state, columns
    two, read_two = DeltaMixer.over_columns(mixer, *given)
    monkeypatch.setattr(DeltaMixer, "over_columns", None)  # it does not fall back
    one, read_one = mixer.over_columns(*given)
    assert_near(one, two)
    last = torch.arange(rows) % width
    after = (read.states_after(last, [before, state], columns) for read in (read_one, read_two))
    for part, other in zip(*after, strict=True):
        assert_near(part, other)
    assert [part.nbytes for part in read_one.tensors] == [part.nbytes for part in read_two.tensors]


@needed
@pytest.mark.skipif(not READS_STATES, reason="in this version of transformers a cache hands out no states")
@torch.no_grad()
@DTYPES
@pytest.mark.parametrize("width", [1, 2, 70])
@SIZES
def test_texts_in_c(width, sizes, dtype, monkeypatch):
    """Against the layer's own prompt, with padding, and a second text after it."""
    mixer, hidden = mixer_of(sizes, dtype, width)
    config = build(BY_NAME["olmo_hybrid"]).config  # layer 0 is the one
    caches, made = [DynamicCache(config=config) for _ in range(2)], ([], [])
    for count, mask in ((width, torch.ones(2, width).long()), (3, None), (1, None)):
        text = 2 * torch.randn(2, count, hidden, dtype=dtype)
        if mask is not None and width > 2:
            mask[0, :2] = 0
        made[0].append(DeltaMixer.of_text(mixer, text, caches[0], mask))
        with monkeypatch.context() as patch:
            patch.setattr(DeltaMixer, "of_text", None)
            made[1].append(mixer.of_text(text, caches[1], mask))
    for one, two in zip(*made, strict=True):
        assert_near(one, two)
    own, found = (cache.layers[0] for cache in caches)
    assert_near(found.conv_states[0], own.conv_states[0])
    assert torch.allclose(
        found.recurrent_states[0], own.recurrent_states[0], atol=1e-4 if dtype == torch.float32 else 0.03
    )
    assert found.has_previous_state == own.has_previous_state


@needed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("tree", [False, True])
def test_a_step_of_the_mtp_head_in_c(window, tree, dtype, monkeypatch):
    """The same drafts in C and by operations of torch. Their text is the target's own."""
    spec = MTP(tree=tree, draft_window=window)
    pair = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft=spec, draft_length=4, dtype=dtype)
    ids = pair.tokenizer("class Stack:\n    def push(self, item):\n", return_tensors="pt").input_ids
    found: dict[str, Any] = {}
    steps: list[str] = []
    kwargs = CALL | {"max_new_tokens": 40}
    for way in ("in C", "by torch"):
        drafts: list[list[int]] = []

        def judge(draft, *rest, drafts=drafts):
            drafts.append(draft.tokens.tolist())
            return verification.judge(draft, *rest)

        steps.clear()
        with monkeypatch.context() as patch, no_fallback():
            patch.setattr(decoding, "judge", judge)
            for name in ("chain", "tree"):
                own = getattr(HeadSteps, name)
                patch.setattr(HeadSteps, name, lambda *given, own=own, name=name: steps.append(name) or own(*given))
            if way == "by torch":
                patch.setattr(heads_fused, "_mtp_steps", lambda *given: "not in C")
            pair = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft=spec, draft_length=4, dtype=dtype)
            text = pair.generate(ids, **kwargs)
        assert dtype != torch.float32 or text.tolist() == pair.target.generate(ids, **kwargs).tolist()
        assert set(steps) == (set() if way == "by torch" else {"tree" if tree else "chain"})
        found[way] = drafts, pair.report.accepted / pair.report.drafted
    assert dtype != torch.float32 or found["in C"][0] == found["by torch"][0]
    assert abs(found["in C"][1] - found["by torch"][1]) < 0.1


@needed
@pytest.mark.skipif(not READS_STATES, reason="in this version of transformers a cache hands out no states")
@pytest.mark.parametrize(("rows", "chunk"), [(1, None), (2, None), (1, 7), (1, 1)])
def test_prompts_of_whole_layers_in_c(rows, chunk, monkeypatch):
    """Logits, keys, values and states after a prompt, also in pieces, are those of the model itself."""
    model = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft="suffix").target
    ids = torch.randint(5, 2000, (rows, 20), generator=torch.Generator().manual_seed(rows))
    masks, calls, own = masks_of(model, trust(model)), [], native.NativeLayers.one
    monkeypatch.setattr(
        native.NativeLayers, "one", lambda *given, **more: calls.append(given[1].shape[1]) or own(*given, **more)
    )
    run = target_runner(fused.fused(model), slots_for(model, None, rows, 32, masks), masks)
    expected = DynamicCache(config=model.config)
    calls.clear()
    with torch.inference_mode():
        for part in ids.split(chunk or 20, 1):
            if run.cache.known[0]:
                go_on(run.cache, run.cache.known[0], 32)
            found = run.prefill(part, None)[:, -1]
            logits = model(part, past_key_values=expected, use_cache=True).logits[:, -1]
            torch.testing.assert_close(found, logits, atol=2e-4, rtol=2e-4)
    assert len(calls) == 12 * -(-20 // (chunk or 20))  # each layer, each time
    for one, other in zip(run.cache.to_dynamic(model.config).layers, expected.layers, strict=True):
        names = ("keys", "values") if hasattr(one, "keys") else ("conv_states", "recurrent_states")
        for name in names:
            given, wanted = (getattr(layer, name) for layer in (one, other))
            given, wanted = (part[0] if isinstance(part, dict) else part for part in (given, wanted))
            torch.testing.assert_close(given, wanted, atol=2e-4, rtol=2e-4)


def test_a_hybrid_that_reads_images():
    """Its text model is inside another one, whose forward runs; angles of pictures come from the model's own module."""
    family = next(family for family in FAMILIES if family.name == "qwen3_5")
    target = family.build()
    made = fused.fused(target)
    assert not made.through_parts and made.runs == "fused layers"
    assert isinstance(made.module.model.language_model.layers[0], DeltaLayer | FusedLayer)
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=4)
    inputs = family.inputs(2)
    kwargs = {**inputs, **CALL, "max_new_tokens": 16}
    with no_fallback():
        assert model.generate(**kwargs).tolist() == target.generate(**kwargs).tolist()
    assert model.report.passes == "fused layers"
