"""The trainer and its methods: the loss falls, an interrupted run is the run, the target stays, what is written loads."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from dataclasses import asdict

import numpy as np
import pytest
import torch
from architectures import RECURRENT, VOCABULARY, build
from covering import one_in
from pairs import BY_NAME, CALL, no_fallback
from pairs import tokenizer as tiny_tokenizer
from transformers import AutoModelForCausalLM

from assisted import MTP, AssistedModelForCausalLM
from assisted.extras import install
from assisted.lab.training import checkpoints, trainer
from assisted.lab.training.trainer import train
from assisted.methods.assistant.train import AssistantSettings, AssistantTraining
from assisted.methods.dflash.train import BlockSettings, BlockTraining
from assisted.methods.draft_model.train import Distillation, DistillSettings, PardSettings, PardTraining, first_draft
from assisted.methods.eagle import train as eagle
from assisted.methods.eagle.formats import load_eagle
from assisted.methods.eagle.train import EagleSettings, EagleTraining, frequent_tokens
from assisted.methods.early_exit.train import EarlyExitSettings, EarlyExitTraining, dropped_layers
from assisted.methods.medusa.head import MedusaHeads
from assisted.methods.medusa.train import MedusaSettings, MedusaTraining
from assisted.methods.mtp.draft import MTPDrafting
from assisted.methods.mtp.head import load_mtp
from assisted.methods.mtp.train import MTPSettings, MTPTraining
from assisted.methods.shared.training.data import Text, Windows, pack
from assisted.methods.shared.training.method import Plan, fitting_batch, needs

PLAN = Plan(steps=6, batch=4, context=16, lr=3e-3, checkpoint_every=2, evaluate_every=3, evaluate_rows=4)
LAYERS = 4


@pytest.fixture
def target():
    return build(BY_NAME["llama"], num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def text():
    """A walk that a small model learns: each token follows from the one before."""
    walk = [3]
    for _ in range(1999):
        walk.append(3 + (5 * walk[-1] + 7) % (VOCABULARY - 3))
    stream = np.asarray(walk, dtype=np.int32)
    return Text(stream[:1500], stream[1500:], "walk")


def methods(target, text):
    tokens = tiny_tokenizer()
    return {
        "distill": lambda: Distillation(target, tokens, DistillSettings(layers=2, on_policy=0.5)),
        "pard": lambda: PardTraining(target, tokens, PardSettings(layers=2, tokens=3, on_policy=0.5)),
        "early-exit": lambda: EarlyExitTraining(target, tokens, EarlyExitSettings()),
        "medusa": lambda: MedusaTraining(target, MedusaSettings(heads=2)),
        "eagle-3": lambda: EagleTraining(target, EagleSettings(unroll=3, positions=3)),
        "eagle-3-reduced": lambda: EagleTraining(target, EagleSettings(unroll=2, draft_vocab=40), text.training),
        "p-eagle": lambda: EagleTraining(target, EagleSettings(parallel=3)),
        "eagle-1": lambda: EagleTraining(target, EagleSettings(version=1, positions=2)),
        "mtp": lambda: MTPTraining(target, MTPSettings(positions=3)),
        "mtp-layers": lambda: MTPTraining(target, MTPSettings(layers=2, positions=3)),
        "assistant": lambda: AssistantTraining(target, AssistantSettings(layers=2, positions=3)),
        "dflash": lambda: BlockTraining(target, BlockSettings(block=4, anchors=8, window=6)),
        "dspark": lambda: BlockTraining(
            target, BlockSettings(block=4, anchors=8, next_token=True, markov="gated", rank=4)
        ),
        "dflash2": lambda: BlockTraining(target, BlockSettings(block=4, anchors=8, selector=True, rank=4)),
    }


NAMES = list(methods(None, None))
KEPT = [name for name in NAMES if name != "early-exit"]


def made(name, target, text):
    return methods(target, text)[name]()


def quietly(method, text, plan, out, **kwargs):
    return train(method, text, plan, out, say=lambda line: None, **kwargs)


def rows(folder):
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def state(method):
    return {name: p.detach().clone() for name, p in method.student.named_parameters()}


# ---- what every method promises


@pytest.mark.parametrize("name", one_in(3, NAMES))
def test_an_interrupted_training_is_the_uninterrupted_one(name, text, tmp_path):
    def fresh():
        return made(name, build(BY_NAME["llama"], num_hidden_layers=LAYERS), text)

    whole = fresh()
    start = state(whole)
    quietly(whole, text, PLAN, tmp_path / "whole")
    for stop in (1, 3, None):
        part = fresh()
        quietly(part, text, PLAN, tmp_path / "parts", stop_after=stop)
    expected, found = state(whole), state(part)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert any(not torch.equal(start[key], expected[key]) for key in expected)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert not (tmp_path / "parts" / "checkpoint.pt").exists()


@pytest.mark.parametrize("during", [0, 3])
def test_ctrl_c_finishes_the_step_and_says_how_to_go_on(during, target, text, tmp_path):
    """The first one ends the step with a checkpoint, from which the run goes on as if it had not been stopped."""
    whole = made("medusa", target, text)
    quietly(whole, text, PLAN, tmp_path / "whole")

    cut = Windows(text.training, PLAN.context, PLAN.batch, PLAN.seed)

    def interrupted(step):
        if step == during:
            os.kill(os.getpid(), signal.SIGINT)
        return cut[step]

    said, handler = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(made("medusa", target, text), text, PLAN, tmp_path / "parts", say=said.append, batches=interrupted)
    assert signal.getsignal(signal.SIGINT) is handler
    assert f"step {during + 1} of 6" in said[-1] and "same command" in said[-1] and str(tmp_path / "parts") in said[-1]
    part = made("medusa", target, text)
    quietly(part, text, PLAN, tmp_path / "parts")
    assert all(torch.equal(state(part)[key], value) for key, value in state(whole).items())
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")


def test_a_second_ctrl_c_does_not_wait(target, text, tmp_path):
    def stuck(step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the step goes on")

    with pytest.raises(KeyboardInterrupt):
        train(made("medusa", target, text), text, PLAN, tmp_path, say=lambda line: None, batches=stuck)


def test_held_out_acceptance_has_an_error_bar(target, text, tmp_path):
    """From the spread of the rows: none without spread, and smaller with more rows."""
    method = made("medusa", target, text)
    quietly(method, text, dataclasses.replace(PLAN, evaluate_rows=8), tmp_path)
    last = [row for row in rows(tmp_path) if "greedy" in row][-1]
    held_out = pack(text.held_out, PLAN.context, 8)
    with torch.no_grad():
        found = [method.acceptance(row[None]) for row in held_out]
    for kind, error in (("greedy", "error"), ("sampled", "sampled_error")):
        each = torch.tensor([[getattr(one, kind) for one in row] for row in found])
        assert last[kind] == pytest.approx(each.mean(0).tolist())
        assert last[error] == pytest.approx((1.96 * each.std(0) / len(each) ** 0.5).tolist())


LOADS = {
    "distill": lambda path, target: AutoModelForCausalLM.from_pretrained(path),
    "medusa": MedusaHeads.load,
    **dict.fromkeys(("eagle-3", "eagle-3-reduced", "eagle-1"), load_eagle),
}
DRAFTS = {
    **dict.fromkeys(("distill", "pard", "assistant"), "{}"),
    "early-exit": "early-exit:2",
    "medusa": "medusa:{}",
    **dict.fromkeys(("mtp", "mtp-layers"), "mtp:{}"),
    **dict.fromkeys(("dflash", "dspark", "dflash2"), "dflash:{}"),
    **dict.fromkeys(("eagle-3", "eagle-3-reduced", "p-eagle", "eagle-1"), "eagle:{}"),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_falls_the_target_stays_and_what_is_written_loads_and_drafts(name, target, text, tmp_path):
    before = {key: tensor.clone() for key, tensor in target.state_dict().items()}
    config = target.config.to_dict()
    method = made(name, target, text)
    plan = Plan(steps=40, batch=8, context=16, lr=1e-2, evaluate_rows=8, evaluate_every=20)
    quietly(method, text, plan, tmp_path)
    if name in KEPT:
        assert before.keys() == target.state_dict().keys()
        assert all(torch.equal(tensor, before[key]) for key, tensor in target.state_dict().items())
        assert target.config.to_dict() == config
        assert not target.training
        assert all(p.grad is None and not p.requires_grad for p in target.parameters())
    if name in LOADS:
        loaded = LOADS[name](tmp_path, target)
        ours, theirs = method.student.state_dict(), loaded.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert not name.startswith("eagle") or loaded.config.taps == method.student.config.taps
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    measured = [row for row in rows(tmp_path) if "greedy" in row]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert [row["step"] for row in measured] == [0, 20, 40]
    assert all(len(row["greedy"]) == len(row["sampled"]) == len(list(method.positions)) for row in measured)
    assert sum(measured[-1]["sampled"]) > sum(measured[0]["sampled"])
    verifier = target.eval() if name in KEPT else AutoModelForCausalLM.from_pretrained(tmp_path)
    model = AssistedModelForCausalLM.from_models(
        verifier, draft=DRAFTS[name].format(tmp_path), tokenizer=tiny_tokenizer()
    )
    ids = torch.from_numpy(text.training[None, :12].astype(np.int64))
    with no_fallback():
        found = model.generate(ids, draft_length=2, **CALL)
    assert torch.equal(found, verifier.generate(ids, **CALL))
    assert model.report.drafted > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_needs_are_what_is_kept(optimizer, target, text, tmp_path):
    """The checkpoint on disk is what was announced, but for names and a step count a parameter."""
    plan = Plan(steps=2, batch=2, context=16, optimizer=optimizer)
    method = made("eagle-3", target, text)
    announced = needs(method, plan)
    quietly(method, text, plan, tmp_path, stop_after=1)
    size = (tmp_path / "checkpoint.pt").stat().st_size
    assert announced.checkpoint < size < announced.checkpoint + 40_000
    assert announced.frozen == sum(4 * p.numel() for p in target.parameters())
    assert announced.memory == announced.frozen + announced.trained + announced.gradients + announced.optimizer


def test_a_batch_is_chosen_by_memory_once(target, text, tmp_path, monkeypatch):
    """And a run that is resumed with more memory keeps it."""
    row = 16 * PLAN.context * VOCABULARY
    method = made("medusa", target, text)
    for free, batch in ((0, 8), (10**12, 8), (2 * 3 * row, 3), (1, 1)):
        assert fitting_batch(method, PLAN.context, free) == batch
    assert fitting_batch(method, PLAN.context, 2 * 5 * row, processes=2) == 4
    assert fitting_batch(method, PLAN.context, 1, processes=3) == 3
    chosen = dataclasses.replace(PLAN, batch=0)
    monkeypatch.setattr(trainer, "free_memory", lambda: 2 * 3 * row)
    quietly(made("medusa", target, text), text, chosen, tmp_path, stop_after=2)
    monkeypatch.setattr(trainer, "free_memory", lambda: 10**12)
    for _ in range(2):  # resumed, then found finished
        quietly(made("medusa", target, text), text, chosen, tmp_path)
        assert json.loads((tmp_path / "training.json").read_text())["batch"] == 3


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("factor", [1, 40])
def test_an_untrained_heads_logits_are_moderate(name, factor, text):
    """However large the target's norm is, stored as w or as 1 + w, the first loss is near that of a uniform guess."""
    target = build(BY_NAME[name], num_hidden_layers=LAYERS)
    with torch.no_grad():
        norm = target.get_submodule("model.norm")
        size = norm(torch.ones(1, 1, target.config.hidden_size))[0, 0]
        norm.weight.add_((factor - 1) * size)  # the same change for both ways to store it
        assert torch.allclose(norm(torch.ones(1, 1, target.config.hidden_size))[0, 0], factor * size)
    training = EagleTraining(target, EagleSettings(unroll=2, positions=2), text.training)
    ids = torch.from_numpy(text.training[:32].astype("int64"))[None]
    with torch.no_grad():
        _, states = next(training._unrolled(ids, training._features(ids), 2))
        assert training.student.logits(states).std(-1).mean() < 3
        if factor > 1:  # the target's own certainty
            assert training.student.norm.weight.mean() < factor * size.mean()


def test_a_large_vocabulary_is_reduced(target, text, monkeypatch):
    monkeypatch.setattr(eagle, "LARGE", VOCABULARY - 1)
    monkeypatch.setattr(eagle, "REDUCED", 30)
    assert EagleTraining(target, EagleSettings(), text.training).settings()["draft_vocab"] == 30
    for settings, stream in (
        (EagleSettings(), None),
        (EagleSettings(version=1), text.training),
        (EagleSettings(draft_vocab=VOCABULARY), text.training),
    ):
        assert EagleTraining(target, settings, stream).student.d2t is None, "all tokens"


def test_muon_without_matrices_is_refused(target, text, tmp_path):
    with pytest.raises(ValueError, match=r"optimizer: 'muon' .* medusa has none"):
        quietly(made("medusa", target, text), text, Plan(steps=1, batch=2, context=16, optimizer="muon"), tmp_path)


def test_another_run_is_not_resumed(target, text, tmp_path):
    quietly(made("medusa", target, text), text, PLAN, tmp_path, stop_after=1)
    with pytest.raises(ValueError, match=r"heads: the checkpoint .* was written with 2, this run has 3"):
        quietly(MedusaTraining(target, MedusaSettings(heads=3)), text, PLAN, tmp_path)
    other = Text(text.training[::-1].copy(), text.held_out, "other")
    with pytest.raises(ValueError, match="text: the checkpoint"):
        quietly(made("medusa", target, text), other, PLAN, tmp_path)


def test_a_checkpoint_from_before_a_setting_existed(target, text, tmp_path):
    """It is that of a run with the setting's default: `layers` of MTP heads, for one."""
    quietly(made("mtp", target, text), text, PLAN, tmp_path, stop_after=3)
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path)
    del state["about"]["layers"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"layers: the checkpoint .* was written with 1, this run has 2"):
        quietly(made("mtp-layers", target, text), text, PLAN, tmp_path)
    quietly(made("mtp", target, text), text, PLAN, tmp_path)
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [*range(PLAN.steps)]


def test_settings_have_names_of_their_own(target, text):
    """What is written down of a run would otherwise lose some."""
    for name in NAMES:
        assert not made(name, target, text).settings().keys() & asdict(PLAN).keys()


def test_a_result_is_not_made_again(target, text, tmp_path):
    quietly(made("eagle-3", target, text), text, PLAN, tmp_path)
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    said = []
    train(made("eagle-3", target, text), text, PLAN, tmp_path, say=said.append)
    assert said[-1] == f"{tmp_path} already holds the result"
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(
        ValueError, match=r"steps: the result in .* was written with 6, this run has 7; give the same or another folder"
    ):
        quietly(made("eagle-3", target, text), text, dataclasses.replace(PLAN, steps=7), tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run(target, text, tmp_path, monkeypatch):
    method = made("medusa", target, text)
    monkeypatch.setattr(method, "loss", lambda ids, step: next(method.student.parameters()).sum() * torch.nan)
    with pytest.raises(ValueError, match="lr: the loss is nan at step 0"):
        quietly(method, text, PLAN, tmp_path)


def test_a_save_that_is_interrupted_costs_nothing(tmp_path, monkeypatch):
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "checkpoint.pt"
    checkpoints.save(path, model, [], 7)

    def half(state, file):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(path, model, [], 8)
    assert checkpoints.resume(path, model, []) == 7


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Plan, {"steps": 0}, "steps: 0"),
        (Plan, {"batch": -1}, "batch: -1"),
        (Plan, {"steps": 1, "seed": -1}, "seed: -1"),
        (Plan, {"steps": 1, "seed": 10**23}, "seed: 1"),
        (Plan, {"steps": 1, "optimizer": "sgd"}, "optimizer: 'sgd' is not known; one of adamw, muon"),
        (Plan, {"steps": 1, "warmup": 0.7, "cooldown": 0.7}, "warmup, cooldown: 0.7 and 0.7"),
        (DistillSettings, {}, "draft, layers: give one of them"),
        (DistillSettings, {"layers": 1, "on_policy": 2}, "on_policy: 2 is not a share"),
        (DistillSettings, {"layers": 1, "loss": "l2"}, r"loss: 'l2' is not known; one of kl, reverse-kl, tv, kl\+tv"),
        (EagleSettings, {"unroll": 0}, "unroll: 0 is less than 1"),
        (EagleSettings, {"version": 1, "draft_vocab": 8}, "draft_vocab: an EAGLE-1 head"),
        (MedusaSettings, {"heads": 0}, "heads: 0 is less than 1"),
        (MTPSettings, {"layers": 3, "unroll": 2}, "unroll: 2 is less than the 3 layers"),
    ],
)
def test_settings_that_cannot_be(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_rates_rise_stay_and_fall():
    plan = Plan(steps=100, warmup=0.1, cooldown=0.5)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 + 0.1 * i for i in range(10)])
    assert set(rates[10:50]) == {1.0}
    assert rates[50:] == pytest.approx([0.99 - 0.02 * i for i in range(50)])


def test_without_matplotlib_a_line_says_so(target, text, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    said = []
    train(made("medusa", target, text), text, PLAN, tmp_path, say=said.append)
    assert any(install("train") in line for line in said)
    assert not (tmp_path / "training.png").exists()


def test_the_plot_is_a_picture_and_the_first_step_says_how_long_all_take(target, text, tmp_path):
    pytest.importorskip("matplotlib")
    said = []
    train(made("medusa", target, text), text, PLAN, tmp_path, say=said.append)
    assert sum("6 steps" in line and "measurements" in line for line in said) == 1
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", KEPT)
def test_a_target_in_half_precision_teaches(name, text):
    """What is trained stays float32."""
    target = build(BY_NAME["llama"], num_hidden_layers=LAYERS).bfloat16()
    method = made(name, target, text)
    loss = method.loss(torch.from_numpy(text.training[:64].astype(np.int64)).view(2, 32), 0)
    loss.backward()
    assert loss.isfinite()
    assert all(p.dtype == torch.float32 for p in method.trained())
    assert any(p.grad is not None and p.grad.any() for p in method.trained())


# ---- several MTP layers


def test_layers_in_turn_learn_and_draft_what_the_training_computes(target, text, tmp_path, monkeypatch):
    """Each drafted token is the training's for its position, also the last layer's own continuation."""
    method = made("mtp-layers", target, text)
    quietly(method, text, Plan(steps=60, batch=8, context=16, lr=1e-2, evaluate_every=60), tmp_path)
    first, *_, last = (row["greedy"] for row in rows(tmp_path) if "greedy" in row)
    assert last[0] > 0.5
    assert last[1] > first[1] + 0.3
    head = load_mtp(tmp_path, target)
    assert len(head.layers) == 2
    assert not torch.equal(head.layers[0].fc.weight, head.layers[1].fc.weight)

    propose, compared = MTPDrafting.propose, []

    def watched(self, text, budget):
        draft = propose(self, text, budget)
        tokens, found = draft.tokens[0, : draft.lengths[0]].tolist(), []
        ids = torch.cat([text.ids[:, : text.lengths[0]], torch.tensor([tokens[:-1]], dtype=torch.int64)], 1)
        for _, states in method._unrolled(ids, method._features(ids), len(tokens)):
            found.append(int(method.student.logits(states, target)[0, -1].argmax()))
        compared.append((tokens, found))
        return draft

    monkeypatch.setattr(MTPDrafting, "propose", watched)
    model = AssistedModelForCausalLM.from_models(
        target.eval(), MTP(str(tmp_path), tree=False), draft_length=4, fast="eager"
    )
    with no_fallback(), torch.no_grad():
        model.generate(torch.from_numpy(text.training[None, :12].astype(np.int64)), **CALL)
    assert max(len(tokens) for tokens, _ in compared) == 4
    assert all(tokens == found for tokens, found in compared)


def test_layers_are_counted_and_trained(target, text):
    one, two = (MTPTraining(target, MTPSettings(layers=layers)) for layers in (1, 2))
    assert two.student.layers[0].fc.weight.data_ptr() != two.student.layers[1].fc.weight.data_ptr()
    for field in ("trained", "gradients", "optimizer", "checkpoint"):
        assert getattr(needs(two, PLAN), field) == 2 * getattr(needs(one, PLAN), field)
    assert len(two.matrices()) == 2 * len(one.matrices())
    two.loss(torch.from_numpy(text.training[:64].astype(np.int64)).view(2, 32), 0).backward()
    assert all(p.grad is not None and p.grad.any() for p in two.matrices())


def test_layers_share_what_the_familys_checkpoints_have_once(text, tmp_path):
    """Qwen's have one fusion and one norm of each kind for all MTP layers."""
    target = build(next(one for one in RECURRENT if one.name == "qwen3_next"))
    method = MTPTraining(target, MTPSettings(layers=2, unroll=2, positions=2))
    quietly(method, text, Plan(steps=2, batch=2, context=16), tmp_path)
    head = load_mtp(tmp_path, target)
    assert torch.equal(head.layers[0].fc.weight, head.layers[1].fc.weight)
    parts = zip(head.layers[0].layer.parameters(), head.layers[1].layer.parameters(), strict=True)
    assert not all(torch.equal(one, two) for one, two in parts)


# ---- distillation


def test_a_first_draft_has_the_targets_layers(target):
    draft = first_draft(target, 2)
    ids = torch.arange(3, 15)[None]
    assert draft.config.num_hidden_layers == 2
    assert target.config.num_hidden_layers == LAYERS
    for mine, theirs in ((0, 0), (1, LAYERS - 1)):
        pairs = zip(draft.model.layers[mine].parameters(), target.model.layers[theirs].parameters(), strict=True)
        assert all(torch.equal(one, two) for one, two in pairs)
    torch.testing.assert_close(first_draft(target, LAYERS)(ids).logits, target(ids).logits)
    with pytest.raises(ValueError, match="layers: 5 is not between 1 and the target's 4"):
        first_draft(target, 5)


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "qwen3_moe", "bloom"])
def test_other_targets_give_first_drafts(architecture):
    target = build(BY_NAME[architecture])
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(first_draft(target, 2)(ids).logits, target(ids).logits)
    assert first_draft(target, 1)(ids).logits.shape == target(ids).logits.shape


def test_a_draft_writes_on_policy(target):
    method = Distillation(target, tiny_tokenizer(), DistillSettings(layers=1, on_policy=1.0))
    ids = torch.arange(3, 3 + 64).view(2, 32)
    torch.manual_seed(0)
    found = method.written(ids)
    assert found.shape == ids.shape
    assert torch.equal(found[:, :8], ids[:, :8])
    assert not torch.equal(found, ids)


def test_what_cannot_be_distilled(target, tmp_path):
    target.save_pretrained(tmp_path)
    tiny_tokenizer(first="A").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has another tokenizer"):
        Distillation(target, tiny_tokenizer(), DistillSettings(draft=str(tmp_path)))


# ---- early exits


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "deepseek_v3"])
def test_exits_speak_through_the_models_own_output(architecture):
    model = build(BY_NAME[architecture])
    method = EarlyExitTraining(model, tiny_tokenizer(), EarlyExitSettings())
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits, states = method._run(ids, frozenset(), [1, 2])
        torch.testing.assert_close(logits, model(ids).logits)
        torch.testing.assert_close(method._exit_logits(ids, states[2]), logits)
        assert not torch.allclose(method._exit_logits(ids, states[1]), logits)


def test_later_layers_are_dropped_more_often():
    plans = [dropped_layers(16, 0.1, np.random.default_rng((1, step))) for step in range(3000)]
    shares = [sum(layer in dropped for dropped in plans) / len(plans) for layer in range(16)]
    assert shares[0] == 0
    assert shares[15] == pytest.approx(0.1, abs=0.02)
    assert shares[7] < shares[15] / 2


def test_low_rank_changes_are_merged(target, text, tmp_path):
    pytest.importorskip("peft")
    ids = torch.arange(3, 15)[None]
    before = target(ids).logits.detach()
    method = EarlyExitTraining(target, tiny_tokenizer(), EarlyExitSettings(lora=2))
    total = sum(p.numel() for p in target.parameters())
    assert 0 < sum(p.numel() for p in method.trained()) < total / 2
    quietly(method, text, PLAN, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, method.target(ids).logits)
    assert not torch.allclose(loaded(ids).logits, before)


def test_low_rank_changes_without_peft(target, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ImportError, match=re.escape(install("train"))):
        EarlyExitTraining(target, tiny_tokenizer(), EarlyExitSettings(lora=2))


# ---- heads


def test_medusa_heads_learn_the_distribution_further_on(target, text):
    """A head that says what the target says so much later has nothing to learn; acceptance counts the same places."""
    method = MedusaTraining(target, MedusaSettings(heads=2))
    ids = torch.from_numpy(text.training[:64].astype(np.int64)).view(2, 32)
    logits = target(ids).logits

    class Oracle(torch.nn.Module):
        def forward(self, hidden, output):
            full = logits if len(hidden) == 2 else logits[self.row : self.row + 1]
            self.row = (getattr(self, "row", 0) + 1) % 2
            return torch.stack([full.roll(-1 - head, -2) for head in range(2)])

        row = 0

    method.student = Oracle()
    assert method.loss(ids, 0).item() == pytest.approx(0, abs=1e-5)
    method.student.row = 0
    assert all(found.greedy == 1 and found.sampled == pytest.approx(1, abs=1e-5) for found in method.acceptance(ids))


def test_unrolled_states_are_those_of_drafting(target, text):
    """Step by step from one place, with what drafting has: the past's true features, then the head's own states."""
    method = made("eagle-3", target, text)
    head = method.student.eval()
    ids = torch.from_numpy(text.training[:20].astype(np.int64))[None]
    seen = method._features(ids)
    with torch.no_grad():
        found = [states for _, states in method._unrolled(ids, seen, 3)]
        place = 10
        features = head.fuse(method._inputs(seen)[:, : place + 1])
        embeddings = head.embed(ids[:, 1 : place + 2], target)
        states = head(embeddings, features)
        for step in range(3):
            torch.testing.assert_close(found[step][:, place], states[:, -1])
            # the chain so far: true features up to the place, then own states, one column more each step
            features = torch.cat([features, states[:, -1:]], 1)
            embeddings = torch.cat([embeddings, head.embed(ids[:, place + 2 + step][:, None], target)], 1)
            states = head(embeddings, features)


def test_frequent_tokens():
    stream = np.asarray([5, 5, 5, 2, 2, 7, 7, 1])
    assert frequent_tokens(stream, 3, 10).tolist() == [2, 5, 7]
    with pytest.raises(ValueError, match="draft_vocab: 11 is not between 1 and the target's 10"):
        frequent_tokens(stream, 11, 10)


def test_heads_that_cannot_be(target):
    with pytest.raises(ValueError, match=r"taps: 9 is not among the states 1 \.\. 4"):
        EagleTraining(target, EagleSettings(taps=(1, 9)))
    with pytest.raises(ValueError, match="context: 4 tokens are too few to unroll 7 steps"):
        EagleTraining(target, EagleSettings()).loss(torch.ones(1, 4, dtype=torch.int64), 0)


def test_optimizer_rates_follow_the_plan(target, text, tmp_path, monkeypatch):
    """Muon and AdamW keep the ratio of their peaks."""
    seen = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (seen.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    plan = Plan(steps=4, batch=2, context=16, lr=1e-3, optimizer="muon", warmup=0.5, cooldown=0.5)
    quietly(made("eagle-3", target, text), text, plan, tmp_path)
    assert seen == pytest.approx([1e-3 * plan.rate(number) for number in range(4)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_compiled_is_the_same(name, target, text):
    """Compiled, the head attends by another kernel; losses and gradients are the same."""
    ids = torch.from_numpy(text.training[:40].astype(np.int64)).view(2, 20)
    found = []
    for compiled in (False, True):
        if name == "eagle":
            method = EagleTraining(target, EagleSettings(unroll=3), compiled=compiled)
        else:
            method = MedusaTraining(target, MedusaSettings(heads=2), compiled=compiled)
        loss = method.loss(ids, 0)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in method.trained()]))
    (one, ours), (two, theirs) = found
    torch.testing.assert_close(one, two)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def test_a_target_writes_what_a_draft_has_to_predict(target, text, tmp_path, monkeypatch):
    """A beginning of the text, then what plain `generate` says; kept for a run that goes on."""
    from assisted.lab.training import written
    from assisted.lab.training.written import with_written, write

    monkeypatch.setattr(written, "_ROWS", 4)
    stream = write(target, text.training, 1, seed=3)
    length = min(512, target.config.max_position_embeddings)
    rows = torch.from_numpy(stream).long().view(-1, length)  # the first batch is greedy
    begun = min(64, length // 2)
    wanted = target.generate(
        rows[:2, :begun],
        attention_mask=torch.ones_like(rows[:2, :begun]),
        max_new_tokens=length - begun,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(rows[:2], wanted)
    places = "".join(map(chr, text.training)), ["".join(map(chr, row[:begun])) for row in rows.tolist()]
    assert all(row in places[0] for row in places[1])

    both = with_written(target, text, 1, tmp_path, seed=3)
    assert np.array_equal(both.training, np.concatenate([text.training, stream]))
    np.save(tmp_path / "written.npy", np.arange(7, dtype=np.int32))
    again = with_written(target, text, 1, tmp_path, seed=3)
    assert again.training[-7:].tolist() == list(range(7)) and np.array_equal(again.held_out, text.held_out)
    with pytest.raises(ValueError, match=r"^text: 3 tokens are too few"):
        write(target, text.training[:3], 1)
