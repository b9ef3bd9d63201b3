"""MTP heads: the module against its formula, and what they draft, in chains and in trees."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from alone import one_and_four, require_best_paths, require_chains, slots_apart
from architectures import ARCHITECTURES, RECURRENT, build, random_ids
from covering import in_turns, one_in
from eagle_heads import features_of
from mtp_heads import random_layers, random_mtp, trained_mtp
from pairs import CALL, ENDS, ROUNDING, require_plain
from safetensors.torch import load_file, save_file
from test_eagle import Reference
from transformers import AutoModelForCausalLM, DynamicCache

from assisted import MTP, AssistedModelForCausalLM, zoo
from assisted.engine.cache import SlotCache
from assisted.lab.plan import plan
from assisted.methods import METHODS, parse
from assisted.methods.eagle import draft as eagle
from assisted.methods.mtp.draft import MTPDrafter, MTPDrafting
from assisted.methods.mtp.head import MTPHead, first_tensors, load_mtp, save_mtp
from assisted.methods.mtp.train import MTPSettings, MTPTraining
from assisted.methods.shared.base import Room
from assisted.methods.shared.runner import HeadRunner
from assisted.methods.shared.training.masks import unrolled_mask

BY_NAME = {architecture.name: architecture for architecture in [*ARCHITECTURES, *RECURRENT]}
FILE = "model.safetensors"
SHIPPED_WITH_ONE = ["deepseek_v3", "glm4_moe", "ernie4_5", "exaone4", "qwen3_next", "qwen3_5"]
OTHERS = ["llama", "qwen2", "qwen3", "olmo", "olmo2", "gemma3", "phi3-window", "mixtral", "gpt_oss", "llama4"]

pytestmark = pytest.mark.usefixtures("invariants")


def hybrid() -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.folder("hybrid"))


def llama() -> Any:
    return build(BY_NAME["llama"])


def assisted(
    target: Any, head: MTPHead | None = None, tree: bool | None = None, draft_length: Any = 4
) -> AssistedModelForCausalLM:
    spec = MTP(trained_mtp(target) if head is None else head, tree=tree)
    return AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=draft_length)


# ---- the module


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(states: torch.Tensor) -> torch.Tensor:
    """Llama's rotary embedding: pairs (i, i + D/2) of [n, heads, D] by the angle n / 10000^(2i/D)."""
    half = states.shape[-1] // 2
    angles = torch.arange(len(states))[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin, (one, two) = angles.cos()[:, None], angles.sin()[:, None], states.split(half, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


@torch.no_grad()
def test_one_step_is_the_formula():
    """x = fuse(embed_norm(E) ; hidden_norm(h)), a Llama layer, end_norm: written out, with random weights everywhere."""
    target, columns, generator = llama(), 6, torch.Generator().manual_seed(3)
    tensors = {n: torch.rand(t.shape, generator=generator) - 0.3 for n, t in first_tensors(target).items()}
    head = MTPHead(target, tensors)
    embeddings, features = torch.randn(2, columns, 32, generator=generator)
    w = {name.removeprefix("layer.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    x = torch.cat([rms(embeddings, w["embed_norm"]), rms(features, w["hidden_norm"])], -1) @ w["fuse"].T
    normed = rms(x, w["input_layernorm"])
    q, k, v = (
        (normed @ w[f"self_attn.{name}_proj"].T).view(columns, heads, 8)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    q, k, v = turned(q), turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    seen = scores.masked_fill(~torch.ones(columns, columns, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    y = x + torch.einsum("hqk,khd->qhd", seen, v).flatten(1) @ w["self_attn.o_proj"].T
    inner = rms(y, w["post_attention_layernorm"])
    gate = torch.nn.functional.silu(inner @ w["mlp.gate_proj"].T)
    y = y + (gate * (inner @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    found = head(embeddings[None], head.fuse(features[None]))
    assert torch.allclose(found[0], rms(y, w["end_norm"]), rtol=1e-4, atol=1e-3)
    assert torch.equal(head.logits(found, target), target.lm_head(found))


@pytest.mark.parametrize("name", [*OTHERS, *SHIPPED_WITH_ONE])
@torch.no_grad()
def test_steps_with_a_cache_are_the_whole_at_once(name):
    """Also for targets with recurrent layers: the head's own layer has full attention."""
    target = build(BY_NAME[name])
    head = random_mtp(target)
    head.require_runs()
    embeddings, states = torch.randn(2, 2, 7, 32, generator=torch.Generator().manual_seed(0))
    whole, cache = head(embeddings, states), DynamicCache()
    for column in range(7):
        one, seen = slice(column, column + 1), torch.ones(1, 1, 1, column + 1, dtype=torch.bool)
        step = head(embeddings[:, one], states[:, one], torch.tensor([[column]]), seen, cache)
        assert torch.allclose(step, whole[:, one], atol=ROUNDING)
    assert len(cache) == 1


@torch.no_grad()
def test_a_head_is_built_of_the_targets_parts():
    target = llama()
    first = first_tensors(target)
    head = MTPHead(target, first)
    layer = target.model.layers[-1]
    states = torch.randn(1, 5, 32)
    angles = target.model.rotary_emb(states, torch.arange(5)[None])
    assert torch.equal(head.layer(states, position_embeddings=angles), layer(states, position_embeddings=angles))
    assert head.tensors().keys() == first.keys()
    assert all(torch.equal(tensor, first[name]) for name, tensor in head.tensors().items())
    assert layer.self_attn.layer_idx == 1
    assert head.config.taps == (2,)
    # a norm of none, and an output embedding of its own
    without = MTPHead(target, {name: tensor for name, tensor in first.items() if name != "end_norm.weight"})
    made = head.end_norm(without(states, states))
    assert torch.allclose(made, head(states, states), atol=1e-5)
    own = MTPHead(target, {**first, "output.weight": torch.randn(96, 32)})
    assert torch.equal(own.logits(states), own.output(states))
    with pytest.raises(ValueError, match="target: None given; an MTP head"):
        head.logits(states)


def test_buffers_are_not_rounded():
    head = random_mtp(build(BY_NAME["deepseek_v3"]))
    bias, frequencies = head.layer.mlp.gate.e_score_correction_bias, head.rotary_emb.inv_freq.clone()
    head.bfloat16()
    assert head.dtype == torch.bfloat16
    assert torch.equal(head.rotary_emb.inv_freq, frequencies)
    assert head.layer.mlp.gate.e_score_correction_bias.dtype == bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("fuse.weight"), "lacks tensor fuse.weight"),
        (lambda tensors: tensors.pop("layer.mlp.up_proj.weight"), "lacks tensor layer.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"more": torch.ones(2)}), "unknown tensor more"),
        (lambda tensors: tensors.update({"embed_norm.weight": torch.ones(31)}), r"embed_norm.weight of shape \[31\]"),
    ],
)
def test_tensors_are_checked_by_name(change, said):
    target = llama()
    tensors = first_tensors(target)
    change(tensors)
    with pytest.raises(ValueError, match=said):
        MTPHead(target, tensors)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", "no rotary embedding"),
        ("falcon", "cannot run by itself.*alibi"),
        ("gemma2", "cannot run by itself.*softcap"),
        ("gpt_neox", "does not keep keys and values"),
        ("bamba", "cannot be built from a config and an index"),
        ("mamba2", "none of its layers has full attention"),
    ],
)
def test_targets_whose_layers_cannot_serve(name, said):
    with pytest.raises(ValueError, match=f"target: .*{said}"):
        random_mtp(build(BY_NAME[name])).require_runs()


# ---- drafting


@pytest.mark.parametrize("name,batch", in_turns(["llama", "deepseek_v3", "qwen3_5"], [1, 0]))
def test_chains_are_the_heads_own(name, batch):
    target = build(BY_NAME[name])
    head, inputs = trained_mtp(target), one_and_four(target)[batch]
    model = assisted(target, head, tree=False)
    require_chains(Reference(target, head), model, inputs, eos_token_id=ENDS if batch else None)


@pytest.mark.parametrize("batch", [0, 1], ids=["one row", "padded rows"])
def test_trees_are_the_heads_best_paths(batch):
    target = llama()
    head, inputs = trained_mtp(target), one_and_four(target)[batch]
    model = assisted(target, head, tree=True, draft_length=3)
    require_best_paths(Reference(target, head), model, inputs, 4, eos_token_id=ENDS if batch else None)


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_kept_rows_are_those_of_a_fresh_prefill(tree):
    """After every round the slots hold the columns of true states, and nothing of what was drafted."""
    target = llama()
    head = trained_mtp(target, unrolled=1)  # often wrong at later positions

    def fresh(ids: torch.Tensor) -> list[torch.Tensor]:
        runner = HeadRunner(head, target, SlotCache(1, 64), torch.zeros(1, 1, dtype=torch.int64))
        runner.read(ids[:, 1:], head.fuse(features_of(target, head, ids)[:, :-1]), [ids.shape[1] - 1])
        return runner.cache.stores

    found = slots_apart(assisted(target, head, tree), one_and_four(target)[0], fresh, MTPDrafting)
    assert len(found) > 4
    assert max(found) < 1e-5


# ---- what a report, a pair and a plan say


def test_a_head_that_is_never_right_is_reported(monkeypatch):
    monkeypatch.setattr(eagle, "ENOUGH", 10)
    target = llama()
    wrong = random_mtp(target)
    with torch.no_grad():
        wrong.fc.weight.zero_()
        wrong.end_norm.weight.zero_()
    good, bad = assisted(target, tree=False), assisted(target, wrong, tree=False)
    inputs = one_and_four(target)[0]
    for model in (good, bad):
        model.generate(**inputs, **(CALL | {"max_new_tokens": 30}))
    assert good.report.warnings == ()
    (said,) = bad.report.warnings
    assert "hardly ever accepted" in said and "another checkpoint" in said and "shifted twice" in said


def test_strings():
    assert parse("mtp") == MTP()
    assert parse("mtp:org/name") == MTP("org/name")
    assert METHODS["mtp"] is MTP
    with pytest.raises(ValueError, match="top_k"):
        MTP(top_k=0)
    with pytest.raises(ValueError, match=r"draft: 'mtp' reads the head of the target's checkpoint.*mtp:DIR"):
        AssistedModelForCausalLM.from_models(llama(), draft="mtp")


@pytest.mark.parametrize("name", one_in(2, ["deepseek_v3", "glm4_moe", "exaone4", "qwen3_next", "qwen3_5"]))
def test_a_head_in_the_targets_own_checkpoint(name, tmp_path):
    """As published: the head's tensors are among those of the target, and transformers does not load them."""
    target = build(BY_NAME[name])
    head = trained_mtp(target)
    target.save_pretrained(tmp_path / "whole")
    save_mtp(head, tmp_path / "head")
    weights = {n: t for folder in ("whole", "head") for n, t in load_file(tmp_path / folder / FILE).items()}
    save_file(weights, tmp_path / "whole" / FILE, {"format": "pt"})
    model = AssistedModelForCausalLM.from_pretrained(tmp_path / "whole", draft="mtp", draft_length=3)
    inputs = one_and_four(target)[0]
    require_plain(model, **inputs, **CALL)
    assert model.report.acceptance_by_position[0] > 0.6
    model.save_pretrained(tmp_path / "pair")
    assert isinstance(AssistedModelForCausalLM.from_pretrained(tmp_path / "pair").drafter, MTPDrafter)
    with pytest.raises(ValueError, match=r"draft: .*(holds no MTP layers|none of its files holds)"):
        AssistedModelForCausalLM.from_pretrained(tmp_path / "pair", draft="mtp")


def test_a_head_in_the_checkpoint_of_an_adapters_base_model(tmp_path):
    """The folder of an adapter holds no layers of the base model."""
    peft = pytest.importorskip("peft")
    target = build(BY_NAME["qwen3_next"])
    head = trained_mtp(target)
    target.save_pretrained(tmp_path / "whole")
    save_mtp(head, tmp_path / "head")
    weights = {n: t for folder in ("whole", "head") for n, t in load_file(tmp_path / folder / FILE).items()}
    save_file(weights, tmp_path / "whole" / FILE, {"format": "pt"})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    for draft in ("mtp", "auto"):
        model = AssistedModelForCausalLM.from_pretrained(tmp_path / "adapter", draft=draft, draft_length=3)
        assert isinstance(model.drafter, MTPDrafter)
        require_plain(model, **one_and_four(target)[0], **CALL)
        assert model.report.accepted


@pytest.mark.parametrize("number", [1, 3])
def test_what_a_plan_reads_of_a_head(number, tmp_path):
    """As many layers as there are, in a folder or in memory; and the errors that loading raises."""
    target = build(BY_NAME["deepseek_v3"])
    head = random_mtp(target) if number == 1 else random_layers(target, number)
    save_mtp(head, tmp_path / "head")
    room = Room(target, torch.float32, 10, (16, 24), lambda model: {}, lambda window: 10)
    own = sum(tensor.numel() for tensor in head.state_dict().values())
    for path in (head, str(tmp_path / "head")):
        assert MTP(path).memory(room) == {"MTP heads": 4 * own, "keys and values": 10 * 4 * 24 * number}


def test_a_plan_raises_what_loading_raises(tmp_path):
    build(BY_NAME["deepseek_v3"]).save_pretrained(tmp_path / "target")
    said, draft = [], f"mtp:{tmp_path / 'target'}"
    for call in (AssistedModelForCausalLM.from_pretrained, functools.partial(plan, device="cpu", context=64)):
        with pytest.raises(ValueError, match=r"draft: .*(holds no MTP layers|none of its files holds)") as error:
            call(str(tmp_path / "target"), draft=draft)
        said.append(str(error.value))
    assert said[0] == said[1]
    planned = {part.name: part.bytes for part in plan("zoo:hybrid", "mtp", device="cpu", context=64).best.parts}
    assert planned["draft: MTP heads"] == 4 * sum(
        t.numel() for t in load_mtp("zoo:hybrid", hybrid()).tensors().values()
    )


def test_what_can_be_trained_can_be_stored(tmp_path):
    for name in ("qwen3", "ernie4_5", "deepseek_v3", "gpt_oss"):
        target = build(BY_NAME[name])
        method = MTPTraining(target, MTPSettings(unroll=2))
        loss = method.loss(random_ids(target, 2, 12), 0)
        loss.backward()
        assert loss.isfinite()
        method.save(tmp_path / name)
        expected = method.student.tensors()
        found = load_mtp(tmp_path / name, target).tensors()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    with pytest.raises(ValueError, match="target: its norms have no weights"):
        MTPTraining(build(BY_NAME["olmo"]), MTPSettings())
    with pytest.raises(ValueError, match=r"lacks tensor embed_norm\.bias"):
        MTPTraining(build(BY_NAME["stablelm"]), MTPSettings())


@torch.no_grad()
def test_training_steps_are_the_steps_of_a_draft():
    """Column i of step s is what a head says that read true states up to column i, and then s times its own."""
    target = llama()
    head, ids = random_mtp(target), random_ids(target, 2, 10)
    embeddings, first = head.embed(ids[:, 1:], target), features_of(target, head, ids)[:, :-1]
    cache, states, positions = DynamicCache(), first, torch.arange(9)[None]
    reference = Reference(target, head)
    for step in range(3):
        states = head(embeddings.roll(-step, 1), states, positions + step, unrolled_mask(9, step), cache)
        text = ids[0].tolist()
        logits = reference.logits(text[:6], text[6 : 6 + step])
        assert torch.allclose(head.logits(states[0, 4], target), logits, atol=ROUNDING)
