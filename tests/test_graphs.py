"""Captured passes, replayed on a CPU as a CUDA graph would be: every token that plain `generate` says, whatever is captured."""

import copy
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from covering import in_turns, one_in, over
from eagle_heads import trained_head
from methods import HEADS, LISTS, METHODS
from pairs import CALL, ENDS, no_fallback, padded, prompt, said_by
from recording import Recording, record_captures
from test_needs import BESIDE, check_states
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny
from transformers import AutoModelForCausalLM
from trees import Planted

from assisted import AssistedModelForCausalLM, Eagle, Merged, decoding, zoo
from assisted.core.drafts import Draft, DraftingStopped
from assisted.engine import libraries, trust
from assisted.engine import passes as shapes
from assisted.engine import runner as runtime
from assisted.engine.cache import SlotCache
from assisted.engine.prepared import CallSettings, PreparedModule
from assisted.engine.recurrent import slots_for, target_runner
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast import capture, fused, graphs
from assisted.fast.capture import CudaGraphs
from assisted.fast.graphs import Graphs
from assisted.fast.static_buffers import StaticBuffers

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + RECURRENT}
OVER_COLUMNS = [
    "qwen3_next",
    "mamba",
    "qwen3_5",
    "olmo_hybrid",
    "falcon_mamba",
    "jamba",
    "nemotron_h",
    "zamba",
    "zamba2",
]
"""Recurrent models whose states follow the columns of a pass; those of others are copied."""
WITH_SLOTS = [a for a in ARCHITECTURES if a.masks != "2d" and a.name != "llama4"]
ROUNDING = 1e-3
RECORD, CAPTURES_FOR = CudaGraphs.record, graphs.captures_for


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    monkeypatch.setattr(decoding, "CHECK_INVARIANTS", True)
    record_captures(monkeypatch)


def pair(name="llama", **kwargs):
    target = build(BY_NAME[name])
    kwargs = {"draft": half_right(target), "draft_length": 4, "fast": "auto"} | kwargs
    return target, AssistedModelForCausalLM.from_models(target, **kwargs)


def served(model, rows=1, limit=200, mode="auto"):
    """A runner with captured passes, and what holds them."""
    holder = Graphs()
    settings = CallSettings(mode)
    masks = Traits.of(model).column_masks or Traits.of(model).masks
    runner = target_runner(fused.prepare(model, settings), slots_for(model, None, rows, limit, masks), masks)
    holder.serve(runner, model, settings)
    return runner, holder


@torch.inference_mode()
def passes(runner, ids, count):
    """So many passes over one token each."""
    for column in range(count):
        logits = runner(ids[:, column, None])
        runner.commit([1] * len(ids))
    return logits


def check(target, model, rows=4):
    ids, mask = padded(target, rows, seed=4)
    kwargs = CALL | {"attention_mask": mask, "eos_token_id": ENDS, "max_new_tokens": 24}
    plain = target.generate(ids, **kwargs)
    for _ in range(2):
        with no_fallback(DraftingStopped):
            assert model.generate(ids, **kwargs).tolist() == plain.tolist()


SERVED = in_turns(METHODS, ["llama", "gemma3", "gpt2"])


@pytest.mark.parametrize("method,name", [one for one in SERVED if not one.values[0].refuses(BY_NAME[one.values[1]])])
def test_every_method_says_what_the_target_says(name, method):
    target, model = pair(name, draft=method.draft(build(BY_NAME[name])))
    check(target, model)
    check(target, model, 1)
    assert model.graphs.replays > 0
    assert model.graphs.reason is None


DRAFTED = [("chains", 1), ("chains", 3), ("trees", 3), ("trees", 1), ("drawn chains", 1), ("drawn chains", 3)]


@pytest.mark.parametrize("drafted,rows", in_turns(DRAFTED, [1, 3]))
def test_a_trained_head_is_captured_as_a_draft_model_is(drafted, rows):
    kind, version = drafted
    target = build(BY_NAME["llama"])
    head = trained_head(target, version)
    _, model = pair(draft=Eagle(head, tree=kind == "trees"))
    ids = random_ids(target, rows, 12, seed=4)
    mask = torch.ones_like(ids)
    mask[-1, : 2 * rows - 2] = 0
    kwargs = CALL | {"attention_mask": mask, "do_sample": kind == "drawn chains", "max_new_tokens": 16}
    said = []
    for fast in ("eager", "auto", "auto"):
        model.fast = fast
        torch.manual_seed(0)
        with no_fallback():
            text = model.generate(ids, **kwargs).tolist()
        counts = (model.report.drafted, model.report.accepted)
        said.append((text, None if kind == "trees" else counts))  # trees go by what was learned and measured before
    assert said[0] == said[1] == said[2]
    assert model.drafter.graphs.replays > 3
    assert model.drafter.graphs.reason is None


@pytest.mark.parametrize("heads,make", in_turns(LISTS, [list, Merged]))
def test_several_heads_in_a_list(heads, make):
    target = build(BY_NAME["llama"])
    _, model = pair(draft=make([HEADS[head](target) for head in heads]))
    check(target, model)
    check(target, model, 1)
    assert model.graphs.replays > 0
    assert model.graphs.reason is None


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_the_states_of_replays(beside):
    model = check_states(build(BY_NAME["llama"]), beside, calls=3)
    assert model.graphs.replays > 0
    assert model.graphs.reason is None


@over("architecture", WITH_SLOTS)
def test_every_architecture_replays_or_says_why_not(architecture):
    target, model = pair(architecture.name)
    check(target, model)
    for holder in (model.graphs, model.drafter.graphs):
        assert (holder.replays > 0) == (holder.reason is None)
        assert holder.reason is None or "waits for the device" in holder.reason


@pytest.mark.parametrize("draft,name", in_turns(["recycle", "suffix"], OVER_COLUMNS))
def test_states_over_columns_are_captured(name, draft):
    """Chains and token trees."""
    target, model = pair(name, draft=draft)
    check(target, model)
    captured = model.graphs.captured
    check(target, model)
    assert model.graphs.reason is None
    assert model.graphs.replays > 5
    assert 0 < captured <= model.graphs.captured <= captured + 1  # what was learned may change a tree's size


@pytest.mark.parametrize("draft", ["mtp", pytest.param("early-exit:2", marks=pytest.mark.slow)])
def test_the_shipped_hybrid_is_captured(draft):
    """With its head, and parts of it."""
    model = AssistedModelForCausalLM.from_pretrained("zoo:hybrid", draft=draft, draft_length=6, dtype=torch.float32)
    ids = random_ids(model.target, 2, 12, seed=4)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for rows in (2, 1):
        with no_fallback():
            assert model.generate(ids[:rows], **kwargs).tolist() == said_by(model.target, ids[:rows], **kwargs).tolist()
    assert model.graphs.replays > 2
    assert model.graphs.reason is None


@pytest.mark.parametrize("name,sampled", [("qwen3_next", False), ("nemotron_h", False), ("qwen3_next", True)])
def test_a_draft_with_states_is_captured(name, sampled):
    target = build(BY_NAME["llama"])
    draft = build(BY_NAME[name])
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3, fast="auto")
    if not sampled:
        check(target, model)
        check(target, model, 1)
    said = []
    for fast in ("eager", "auto", "auto"):
        model.fast = fast
        torch.manual_seed(0)
        with no_fallback():
            text = model.generate(random_ids(target, 2, 9), **CALL | {"do_sample": sampled, "max_new_tokens": 12})
        said.append((text.tolist(), model.report.drafted, model.report.accepted))
    assert said[0] == said[1] == said[2]
    assert model.drafter.graphs.replays > 5
    assert model.drafter.graphs.reason is None


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_states_of_two_texts_in_turns(name):
    """A session that another call interrupts keeps its slots and states."""
    target, model = pair(name, draft="suffix")
    kwargs = CALL | {"max_new_tokens": 8}
    texts = {seed: (random_ids(target, 1, 9, seed=seed), model.session()) for seed in (3, 5)}
    for turn in range(3):
        for seed, (ids, session) in texts.items():
            made = model.generate(ids, past_key_values=session, **kwargs)
            assert made.tolist() == target.generate(ids, **kwargs).tolist()
            texts[seed] = torch.cat([made, random_ids(target, 1, 3, seed=turn)], 1), session
    assert model.graphs.replays > 20
    assert model.graphs.reason is None


@pytest.mark.parametrize("name", ["bloom", "llama4"])
def test_slots_side_by_side_run_eagerly(name):
    target, model = pair(name)
    check(target, model)
    assert model.graphs.replays == model.graphs.captured == 0


@pytest.mark.parametrize("draft", one_in(3, [None, "suffix", "early-exit:1"]))
def test_sampling_follows_the_targets_distribution(draft, monkeypatch):
    monkeypatch.setattr(CudaGraphs, "confirms", False)  # a call's first round already has the captured chain
    target = tiny(0, layers=2)
    model = AssistedModelForCausalLM.from_models(
        target, draft=tiny(1, layers=2) if draft is None else draft, draft_length=2, fast="auto"
    )
    torch.manual_seed(21)
    kwargs = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": SEQUENCES // 6, "top_k": 0}
    ids = torch.cat([model.generate(PROMPT, **kwargs) for _ in range(6)])
    assert p_value(counts(ids), exact_distribution(target, 4, top_k=0)) > ALPHA
    held = {**model.graphs.captures.held, **(model.drafter.graphs.captures.held if draft is None else {})}
    assert {key[0] for key in held} >= ({"compute"} if draft == "suffix" else {"compute", "chain"})


@pytest.mark.parametrize("low_bits", [False, True])
@torch.inference_mode()
def test_low_bit_weights_round_to_half_precision(monkeypatch, low_bits):
    """Two ways to run a float32 model with low-bit weights differ by the rounding of bfloat16, and both are right."""

    def rounded(outputs):
        logits = outputs[0]
        return [logits + 0.03 * logits.std() * torch.randn_like(logits), *outputs[1:]]

    monkeypatch.setattr(CudaGraphs, "record", lambda self, run, device, tried: lambda: rounded(run()))
    monkeypatch.setattr(fused, "fused", lambda model, trusted, **read: PreparedModule(model, low_bit_bytes=low_bits))
    model = build(BY_NAME["llama"]).requires_grad_(False)
    runner, holder = served(model)
    runner.prefill(random_ids(model, 1, 9), None)
    for _ in range(4):
        runner(random_ids(model, 1, 2))
    assert (holder.reason is None) == low_bits
    assert bool(holder.replays) == low_bits


def held_by(layer):
    """Keys, values and states."""
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    found = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3_next", "nemotron_h"])
@torch.inference_mode()
def test_random_rounds_give_the_logits_of_the_eager_path(name):
    """Rows that leave and come back, chains and trees of every width, a padded prompt, slots that have to grow."""
    model = build(BY_NAME[name]).requires_grad_(False)
    eager, _ = served(model, 4, 120, "eager")
    replayed, holder = served(model, 4, 120)
    ids, mask = random_ids(model, 4, 9), torch.ones(4, 9, dtype=torch.int64)
    mask[1, :4] = 0
    for run in (eager, replayed):
        run.prefill(ids, mask)
    random = torch.Generator().manual_seed(0)
    for seed in range(60 if eager.cache.can_rewind else 25):
        rows = [[0, 1, 2, 3], [3, 1], [1], [2, 0, 3]][int(torch.randint(4, (), generator=random))]
        width = 1 + seed % 5
        columns = random_ids(model, 4, width, seed=seed)
        draft, path = None, None
        counts = [1 + (row + seed) % width if row in rows else 0 for row in range(4)]
        if seed % 2:
            parents = torch.stack(
                [
                    torch.tensor([int(torch.randint(-1, n, (), generator=random)) for n in range(width - 1)])
                    for _ in range(4)
                ]
            ).long()
            draft = Draft(columns[:, 1:], torch.full((4,), width - 1), parents=parents.view(4, width - 1))
            path = [[0, *torch.randint(width, (width - 1,), generator=random).sort().values.tolist()] for _ in range(4)]
        logits = []
        for run in (eager, replayed):
            run.run_only(rows)
            logits.append(run(columns, draft))
            run.commit(counts, path)
        assert (logits[0] - logits[1])[rows].abs().max() < ROUNDING
        assert logits[1][[row for row in range(4) if row not in rows]].abs().sum() == 0
        if max(eager.cache.lengths) > 90 and eager.cache.can_rewind:
            for run in (eager, replayed):
                run.cache.rewind([20 + row for row in range(4)])
    assert eager.cache.known == replayed.cache.known
    config = model.config.get_text_config(decoder=True)
    for one, two in zip(eager.cache.to_dynamic(config).layers, replayed.cache.to_dynamic(config).layers, strict=True):
        for kept, other in zip(held_by(one), held_by(two), strict=True):
            assert (kept - other).abs().max() < ROUNDING
    assert holder.replays > 20
    assert holder.reason is None


@torch.inference_mode()
def test_a_model_is_captured_at_its_second_pass_and_then_every_shape_at_once():
    model = build(BY_NAME["llama"])
    runner, holder = served(model)
    ids = random_ids(model, 1, 60)
    runner.prefill(ids[:, :20], None)
    assert [(passes(runner, ids[:, n, None], 1), holder.captured, holder.replays)[1:] for n in (20, 21, 22)] == [
        (0, 0),
        (1, 1),
        (1, 2),
    ]
    for width in (3, 4, 3, 4):  # both are captured as four columns
        runner(ids[:, 23 : 23 + width])
    assert (holder.captured, holder.replays) == (2, 6)


@pytest.mark.parametrize("name,rows,do_sample", [("llama", 1, False), ("llama", 2, True), ("qwen3_next", 1, False)])
def test_a_call_after_warm_up_captures_nothing(name, rows, do_sample):
    target = build(BY_NAME[name], max_position_embeddings=1024)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), fast="auto")
    state = torch.get_rng_state()
    assert model.warm_up(rows=rows, do_sample=do_sample) > 6
    assert torch.equal(torch.get_rng_state(), state)
    assert model.report is None
    assert model.totals.new_tokens == 0
    assert not model.measured.lengths
    holders = model.graphs, model.drafter.graphs
    captured = [passes_of(holder) for holder in holders]
    for length in (10, 300, 600, 10):
        ids = random_ids(target, rows, length, seed=length)
        kwargs = CALL | {"max_new_tokens": 24, "do_sample": do_sample}
        made = model.generate(ids, **kwargs)
        assert do_sample or made.tolist() == said_by(target, ids, **kwargs).tolist()
    assert [passes_of(holder) for holder in holders] == captured
    assert [holder.reason for holder in holders] == [None, None]
    assert model.graphs.replays > 20


def passes_of(holder):
    """The shapes of captured forward passes."""
    return {shape for shape in holder.captures.held if isinstance(shape, capture.Shape)}


def test_what_differs_when_it_is_captured_ahead_runs_eagerly(monkeypatch):
    target, model = pair()
    model.generate(random_ids(target, 1, 12), **CALL)
    replay = CudaGraphs.replay
    monkeypatch.setattr(CudaGraphs, "replay", lambda self, shape: [part + 1 for part in replay(self, shape)])
    model.graphs.ahead(1, 200)
    assert "captured ahead" in model.graphs.reason


@torch.inference_mode()
def test_slots_that_grow_are_captured_anew(monkeypatch):
    monkeypatch.setattr(graphs, "_AHEAD", 64)
    model = build(BY_NAME["llama"], max_position_embeddings=1024)
    runner, holder = served(model, limit=600)
    ids = random_ids(model, 1, 400)
    runner.prefill(ids[:, :120], None)
    passes(runner, ids[:, 120:], 10)
    small = holder.buffers
    assert (small.capacity, holder.captured) == (256, 1)
    logits = passes(runner, ids[:, 130:], 170)
    assert holder.buffers is not small
    assert (holder.buffers.capacity, holder.captured) == (512, 1)
    assert (logits[:, 0] - model(ids[:, :300]).logits[:, -1]).abs().max() < ROUNDING


@torch.inference_mode()
@pytest.mark.parametrize("length", [20, 500])
def test_prompts_are_read_into_the_slots_of_captured_passes(monkeypatch, length):
    """So that they exist once. `take` would move them."""
    monkeypatch.setattr(graphs, "_AHEAD", 256)
    monkeypatch.setattr(StaticBuffers, "take", None)
    model, holder = build(BY_NAME["llama"], max_position_embeddings=1024), Graphs()
    for rows, seed in ((3, 0), (2, 1), (3, 2)):
        ids, settings = random_ids(model, rows, length + 20, seed=seed), CallSettings("auto")
        runner = CachedModel(PreparedModule(model), SlotCache(rows, 600), Traits.of(model).masks)
        holder.serve(runner, model, settings)
        runner.prefill(ids[:, :length], None)
        logits = passes(runner, ids[:, length:], 20)
        assert (logits[:, 0] - model(ids).logits[:, -1]).abs().max() < ROUNDING
        own = [layer.keys for layer in holder.buffers.slots.layers]
        assert [layer.keys.data_ptr() for layer in runner.cache.layers] == [keys.data_ptr() for keys in own]
        settings.over = True
    assert holder.replays > 50


@torch.inference_mode()
def test_a_path_at_the_end_of_the_slots():
    """Rounded up, its columns would lie behind them."""
    model = build(BY_NAME["llama"], max_position_embeddings=1024)
    runner, holder = served(model, limit=100)
    ids = random_ids(model, 1, 320)
    runner.prefill(ids[:, :240], None)
    path = [[0, 2, 3, 4, 4]]
    draft = Draft(ids[:, 1:5], torch.tensor([4]), parents=torch.tensor([[-1, -1, 1, 2]]))
    for start in (240, 240, 240, 251):
        runner.cache.rewind([240])
        if start > 240:
            runner.eager(ids[:, 240:start])
            runner.commit([start - 240])
        runner(ids[:, start : start + 5], draft)
        runner.commit([4], path)
    assert ("gather", 1, 8) in holder.captures.held
    assert runner.cache.lengths == [255]
    text = torch.cat([ids[:, :252], ids[:, [253, 254, 255]], ids[:, 300:301]], 1)
    assert (runner.eager(ids[:, 300:301])[0, 0] - model(text).logits[0, -1]).abs().max() < ROUNDING


class Certain(Planted):
    """Its trees with a distribution that each token was drawn from."""

    def propose(self, text, budget):
        draft = super().propose(text, budget)
        return replace(draft, q=torch.nn.functional.one_hot(draft.tokens, 96).float())


@pytest.mark.parametrize("kind", [Planted, Certain])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_verdict_on_a_sampled_tree_moves_its_columns(monkeypatch, kind, rows):
    """The slots hold what a plain pass over the text computes."""
    target = build(BY_NAME["llama"])
    ids, moved, move = random_ids(target, rows, 9), [], StaticBuffers.move
    monkeypatch.setattr(StaticBuffers, "move", lambda buffers, path: moved.append(path) or move(buffers, path))
    call = {**CALL, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
    call.pop("do_sample")
    said = target.generate(ids, **call)
    model = AssistedModelForCausalLM.from_models(target, draft="ngram", draft_length=4, fast="auto")
    model.drafter = kind(said)
    for _ in range(3):
        moved.clear()
        with no_fallback():
            found = model.generate(ids, do_sample=True, temperature=1e-6, return_dict_in_generate=True, **call)
        assert found.sequences.tolist() == said.tolist()
    assert any(row != list(range(len(row))) for path in moved for row in path.tolist())
    assert any(key[0] == "compute" and key[1][-1] for key in model.graphs.captures.held)
    plain = target(said[:, :-1]).past_key_values
    for one, two in zip(found.past_key_values.layers, plain.layers, strict=True):
        assert (one.keys - two.keys).abs().max() < ROUNDING


def test_captures_outlive_a_call_and_serve_fewer_rows():
    target, model = pair()
    check(target, model, 4)
    known = model.graphs.buffers
    check(target, model, 2)
    assert model.graphs.buffers is known
    check(target, model, 6)
    assert model.graphs.buffers is not known


def test_captures_are_bounded(monkeypatch):
    monkeypatch.setattr(CudaGraphs, "most", 3)
    target, model = pair(draft="suffix", draft_length=6)
    for rows in (4, 1, 3):
        check(target, model, rows)
    assert 0 < model.graphs.captured <= 3


class Reads(torch.nn.SiLU):
    def forward(self, hidden):
        return super().forward(hidden) if hidden.abs().max().item() >= 0 else hidden


class Masked(torch.nn.SiLU):
    def forward(self, hidden):
        hidden = super().forward(hidden)
        hidden[hidden > 1e9] = 0
        return hidden


class Remembers(torch.nn.SiLU):
    """Something decided on the host, anew for each pass."""

    calls = 0

    def forward(self, hidden):
        self.calls += 1
        return super().forward(hidden) + (self.calls > 400)


@pytest.mark.parametrize("kind", [Reads, Masked])
def test_a_model_that_reads_numbers_runs_eagerly(kind, monkeypatch):
    monkeypatch.setattr(trust, "_is_own_file", lambda file: True)  # as if transformers had such a model
    target, model = pair()
    for layer in target.model.layers:
        layer.mlp.act_fn = kind()
    check(target, model)
    assert "waits for the device" in model.graphs.reason
    for _ in range(2):  # also the call after the one that found it
        assert model.report.warnings == (f"forward passes of LlamaForCausalLM are not captured: {model.graphs.reason}",)
        check(target, model)
    assert model.graphs.captured == model.graphs.replays == 0
    assert model.drafter.graphs.reason is None  # the draft is another model


def test_a_replay_that_differs_is_not_relied_on(monkeypatch):
    class Wrong(Recording):
        def __call__(self):
            for output in super().__call__():
                output += 1.0 + torch.arange(output.shape[-1]) % 3
            return self.outputs

    monkeypatch.setattr(CudaGraphs, "record", lambda self, run, device, tried: Wrong(run))
    target, model = pair(draft="suffix")
    check(target, model)
    assert "replay and forward pass differ" in model.graphs.reason
    assert model.report.warnings == (f"forward passes of LlamaForCausalLM are not captured: {model.graphs.reason}",)


def test_what_changed_in_a_model_is_noticed():
    """Weights that were written into are read anew; weights elsewhere, or another computation, are captured anew."""
    target, model = pair(draft="suffix")
    check(target, model)
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    known = model.graphs.buffers
    check(target, model)
    assert model.graphs.buffers is known
    weight = target.model.layers[0].mlp.down_proj
    weight.weight = torch.nn.Parameter(0.7 * weight.weight)
    check(target, model)
    assert model.graphs.buffers is not known
    known = model.graphs.buffers
    target.model.layers[0].self_attn.scaling *= 0.5  # nothing of it shows outside
    check(target, model)
    assert model.graphs.buffers is not known
    assert model.graphs.reason is None


def test_hooks_are_called_and_adapters_are_left_alone():
    target, model = pair(draft="suffix")
    seen = []
    hook = target.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    replays = model.graphs.replays
    check(target, model, 1)
    assert "has hooks" in model.graphs.obstacle
    assert model.report.warnings == (f"forward passes of LlamaForCausalLM are not captured: {model.graphs.obstacle}",)
    assert model.graphs.replays == replays
    assert len(seen) > 4
    hook.remove()
    check(target, model)
    assert model.graphs.obstacle is None
    assert model.graphs.replays > replays
    type(target.model.layers[0].mlp.act_fn).__module__, own = (
        "peft.tuners",
        type(target.model.layers[0].mlp.act_fn).__module__,
    )
    try:
        check(target, model, 1)
        assert "adapter" in model.graphs.obstacle
    finally:
        type(target.model.layers[0].mlp.act_fn).__module__ = own


def test_replaced_forwards_and_compiled_modules_run_eagerly():
    target, model = pair(draft="suffix")
    own = target.model.layers[0].forward
    target.model.layers[0].forward = lambda *args, **kwargs: own(*args, **kwargs)
    check(target, model, 1)
    assert model.report.way == "own forward"
    assert "was replaced" in model.report.because
    assert model.graphs.replays == 0


def test_one_call_at_a_time_has_the_captures():
    """A call inside another one, here from its streamer, runs eagerly."""
    target, model = pair()
    ids = random_ids(target, 1, 12)
    check(target, model, 1)
    plain = target.generate(ids, **CALL)
    inner = []

    class Streamer:
        def put(self, tokens):
            if not inner and model.graphs._settings is not None and not model.graphs._settings.over:
                before = model.graphs.replays
                inner.append((model.generate(ids, **CALL), model.graphs.replays - before))

        def end(self):
            pass

    assert model.generate(ids, streamer=Streamer(), **CALL).tolist() == plain.tolist()
    assert inner[0][0].tolist() == plain.tolist()
    assert inner[0][1] == 0


def test_threads_get_the_right_tokens():
    """And each of their forward passes is replayed, as in one call after the other."""
    target, model = pair()
    prompts = [random_ids(target, 1, 12, seed=seed) for seed in range(4)]
    plain = [target.generate(ids, **CALL).tolist() for ids in prompts]
    found, counts = [None] * 4, [model.graphs.replays]
    for _ in range(2):
        for ids in prompts:
            model.generate(ids, **CALL)
        counts.append(model.graphs.replays)

    def work(number):
        for _ in range(2):
            found[number] = model.generate(prompts[number], **CALL).tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == plain
    assert model.graphs.replays - counts[2] == 2 * (counts[2] - counts[1]) > 0


def test_a_call_that_fails_gives_the_captures_back():
    target, model = pair()
    check(target, model, 1)

    class Fails:
        def put(self, tokens):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(random_ids(target, 1, 12), streamer=Fails(), **CALL)
    before = model.graphs.replays
    check(target, model, 1)
    assert model.graphs.replays > before


def test_what_is_not_a_number_does_not_stay_in_the_slots():
    """Slots behind a text are looked at with weight zero; what lies there has to be a number."""
    target, model = pair(draft="suffix")
    check(target, model)
    layer = target.model.layers[1].mlp.down_proj
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.fill_(float("nan"))
    model.generate(random_ids(target, 1, 60), **CALL)
    with torch.no_grad():
        layer.weight.copy_(before)
    check(target, model)


@torch.inference_mode()
def test_slots_behind_a_text_that_moves_in_are_zero():
    model = build(BY_NAME["llama"])
    runner, holder = served(model)
    ids = random_ids(model, 1, 30)
    runner.prefill(ids[:, :9], None)
    for n in range(9, 12):
        runner(ids[:, n, None])
        runner.commit([1])
    buffers, cache = holder.buffers, slots_for(model, None, 1, 200, Traits.of(model).masks)
    CachedModel(model, cache, Traits.of(model).masks).prefill(ids[:, :5], None)
    for layer in buffers.slots.layers:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    kept = [layer.keys[:, :, :5].clone() for layer in cache.layers]
    buffers.take(cache)
    for layer, keys in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys[:, :, :5], keys)
        assert not layer.keys[:, :, 5:].any() and not layer.values[:, :, 5:].any()


def test_a_copy_of_a_pair_captures_its_own():
    target, model = pair()
    check(target, model, 1)
    other = copy.deepcopy(model)
    assert other.graphs.captured == 0
    check(other.target, other, 1)
    assert other.graphs.buffers is not model.graphs.buffers


def test_a_caller_goes_on_with_a_cache():
    target, model = pair()
    given = prompt(3)
    ids, mask = given["ids"], given["attention_mask"]
    kwargs = CALL | {"return_dict_in_generate": True, "eos_token_id": ENDS}
    for _ in range(2):
        plain = target.generate(ids, attention_mask=mask, **kwargs)
        with no_fallback():
            ours = model.generate(ids, attention_mask=mask, **kwargs)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        for one, two in zip(ours.past_key_values.layers, plain.past_key_values.layers, strict=True):
            width = two.keys.shape[2]
            assert (one.keys[:, :, :width] - two.keys).abs().max() < ROUNDING


@pytest.mark.parametrize("name", ["gpt2"])
def test_up_to_the_end_of_the_context(name):
    """These models know no position behind it, which columns that fill up a pass may have."""
    target = build(BY_NAME[name], max_position_embeddings=40).requires_grad_(False)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4, fast="auto")
    ids = random_ids(target, 2, 12)
    kwargs = CALL | {"attention_mask": torch.ones_like(ids), "max_new_tokens": 28}
    assert model.generate(ids, **kwargs).tolist() == target.generate(ids, **kwargs).tolist()
    assert model.graphs.replays > 0


def test_eager_is_eager_and_auto_is_eager_on_a_cpu(monkeypatch):
    monkeypatch.setattr(graphs, "captures_for", CAPTURES_FOR)
    for fast in ("eager", "auto"):
        target, model = pair(fast=fast)
        check(target, model, 1)
        assert model.graphs.captured == model.drafter.graphs.captured == 0


def test_the_way_may_change_between_calls():
    target, model = pair(fast="eager")
    check(target, model, 1)
    model.fast = "auto"
    check(target, model, 1)
    assert model.graphs.replays > 0
    model.fast = "quickly"
    with pytest.raises(ValueError, match="fast: 'quickly' is not known; give one of 'auto', 'eager', 'compile'"):
        check(target, model, 1)
    with pytest.raises(ValueError, match="fast: 'soon'"):
        AssistedModelForCausalLM.from_models(target, draft="suffix", fast="soon")
    with pytest.raises(ValueError, match="fast: 'soon'"):
        AssistedModelForCausalLM.from_pretrained("zoo:target", draft="suffix", fast="soon")


def test_shapes_are_rounded_up():
    assert [shapes.columns_for(n, 1) for n in (1, 2, 3, 5, 9, 33, 65, 128, 129)] == [1, 8, 8, 8, 16, 64, 96, 128, None]
    assert [shapes.columns_for(n, 16) for n in (1, 2, 5, 7, 9)] == [1, 4, 6, 8, 12]
    assert [shapes.columns_for(n, 100) for n in (1, 2, 3)] == [1, 2, 4]
    assert [shapes.rows_for(n, 6) for n in range(1, 7)] == [6] * 6
    assert [shapes.rows_for(n, 20) for n in (1, 8, 9, 17)] == [8, 8, 16, 20]
    assert [shapes.slots_for(n) for n in (1, 256, 257, 1024, 1025, 1536, 1537, 3000)] == [
        256,
        256,
        512,
        1024,
        1536,
        1536,
        2048,
        3072,
    ]
    assert list(shapes.WIDTHS) == sorted(set(shapes.WIDTHS))
    for small, large in itertools.pairwise(shapes.WIDTHS):
        assert large <= 2 * small


def test_a_part_is_run_as_the_whole_is():
    target = build(BY_NAME["llama"])
    runner, holder = served(target)
    part = runner.part(target, "a part")
    assert part.cache is runner.cache
    assert part.passes is holder
    assert part.prepared.kind != runner.prepared.kind
    assert runtime.CachedModel(target, runner.cache, runner.masks).passes is not holder


class Synchronizes(torch.nn.SiLU):
    """What a capture does not survive, and no operation tells of."""

    def forward(self, hidden):
        torch.cuda.synchronize()
        return super().forward(hidden)


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(CudaGraphs, "record", RECORD)

    def move(target, model):
        target.to("cuda")
        model.to("cuda")
        return target, model

    return move


def check_on_cuda(target, model):
    ids = torch.randint(11, 90, (3, 12), generator=torch.Generator().manual_seed(5)).cuda()
    kwargs = CALL | {"attention_mask": torch.ones_like(ids)}
    plain = target.generate(ids, **kwargs)
    for _ in range(3):
        with no_fallback(DraftingStopped):
            assert model.generate(ids, **kwargs).tolist() == plain.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_cuda_graphs(on_cuda, method):
    target, model = on_cuda(*pair("llama", draft=method.draft(build(BY_NAME["llama"])), fast="auto"))
    check_on_cuda(target, model)
    assert model.graphs.replays > 0
    assert model.graphs.reason is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"mpt"}))  # whose config asks for no cache in some versions
def test_every_architecture_on_cuda(on_cuda, name):
    target = build(BY_NAME[name])
    check_on_cuda(*on_cuda(*pair(name, draft=half_right(target), fast="auto")))


@pytest.mark.gpu
def test_captures_write_into_no_memory_of_others(on_cuda):
    """Somebody frees the workspaces of products, as compiled models do, and gets their memory."""
    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
    target, model = on_cuda(target, AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=4))
    ids = torch.arange(20, 60, device="cuda")[None] % 30
    call = CALL | {"max_new_tokens": 40, "attention_mask": torch.ones_like(ids)}
    plain = target.generate(ids, **call)
    for _ in range(2):
        assert model.generate(ids, **call).tolist() == plain.tolist()
    assert model.graphs.replays > 0
    torch.cuda.synchronize()
    libraries.forget_workspaces()
    torch.cuda.empty_cache()
    others = [torch.zeros(2**20, device="cuda") for _ in range(64)]
    assert model.generate(ids, **call).tolist() == plain.tolist()
    assert all(not other.any() for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Reads, Masked, Synchronizes])
def test_a_capture_that_fails_leaves_the_device_usable(on_cuda, monkeypatch, kind):
    monkeypatch.setattr(capture, "_BROKEN", set())
    monkeypatch.setattr(trust, "_is_own_file", lambda file: True)  # as if transformers had such a model
    target, model = pair(fast="auto")
    for layer in target.model.layers:
        layer.mlp.act_fn = kind()
    target, model = on_cuda(target, model)
    check_on_cuda(target, model)
    assert model.graphs.reason is not None
    assert torch.rand(100, device="cuda").bernoulli_().isfinite().all()
    other = on_cuda(*pair(fast="auto"))
    check_on_cuda(*other)
    assert (other[1].graphs.replays > 0) == (kind is not Synchronizes)


def test_sessions_share_static_buffers(monkeypatch):
    """Two conversations and a call of its own take turns. All are captured, in the same slots at fixed addresses."""
    target, model = pair()
    texts = {name: random_ids(target, 1, 0) for name in ("one", "other")}
    sessions = {name: model.session() for name in texts}
    copies = []
    monkeypatch.setattr(StaticBuffers, "_leave", lambda self, own=StaticBuffers._leave: copies.append(1) or own(self))
    for turn in range(4):
        for name in ("one", "one", "other"):
            prompt = torch.cat([texts[name], random_ids(target, 1, 5, seed=turn + 10 * len(name))], 1)
            texts[name] = model.generate(prompt, past_key_values=sessions[name], **CALL)
            assert texts[name].tolist() == target.generate(prompt, **CALL).tolist()
        ids = random_ids(target, 1, 9, seed=turn)
        assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
    assert model.graphs.replays > 50
    turns_taken = 4 * 4 * 2  # by target and draft
    assert len(copies) < turns_taken  # a turn after a turn of the same session moves nothing
