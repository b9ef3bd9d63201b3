"""Targets with recurrent layers: the text is plain `generate`'s, the states are those of what was committed, and what
can't be exact is refused."""

import functools
import random
import re
import warnings
from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, REFUSED, build, random_ids
from covering import in_turns, some
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import METHODS, Method
from pairs import CALL, ENDS, Listener, no_fallback, padded, said_by
from recurrent_table import PAGE, section, table
from test_sampling import ALPHA, PROMPT, VOCABULARY, counts, exact_distribution, p_value
from test_sampling import NEW_TOKENS as SAMPLED
from test_sampling import tiny as tiny_llama
from transformers import AutoModelForCausalLM, DynamicCache

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft, DraftingStopped
from assisted.engine import recurrent
from assisted.engine import verifiable as trial
from assisted.engine.agreement import apart
from assisted.engine.delta import Read
from assisted.engine.masks import Columns
from assisted.engine.recurrent import ColumnModel, RecurrentCache, RecurrentModel, slots_for, target_runner
from assisted.engine.runner import CachedModel
from assisted.engine.stepped import Steps
from assisted.engine.traits import Traits
from assisted.engine.trust import trust
from assisted.engine.verifiable import masks_of, require_verifiable
from assisted.methods.shared.base import Drafter, Drafting

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + RECURRENT + REFUSED}
NAMES = [architecture.name for architecture in RECURRENT]
ROUNDING = 2e-4  # of states and logits, float32
LONG = 60

ONE_BY_ONE = ["mamba", "falcon_mamba", "jamba", "nemotron_h", "zamba", "zamba2"]
"""Their own passes over several tokens start from an empty state, or compute something else."""
DELTA = ["qwen3_next", "qwen3_5", "olmo_hybrid"]
COPIED = [name for name in NAMES if name not in ONE_BY_ONE]
ALONE = ["mamba", "mamba2", "falcon_mamba"]  # without attention

WAYS = [*NAMES, *(f"{name}, eager" for name in DELTA)]
KINDS = ("mamba", "jamba", "zamba2", "mamba2", "lfm2", "bamba", "kimi_linear", "qwen3_5", "olmo_hybrid, eager")
"""One of each kind: run one by one, with attention, in shared blocks; copied, a convolution alone, with attention, with gates;
over columns, and read again."""
over_recurrent = pytest.mark.parametrize("name", some(NAMES, KINDS))
over_copied = pytest.mark.parametrize(
    "name", some([f"{name}, eager" if name in DELTA else name for name in COPIED], KINDS)
)
over_ways = pytest.mark.parametrize("name", some(WAYS, KINDS))


pytestmark = pytest.mark.usefixtures("invariants")


class Oracle(Drafter):
    """Knows what plain decoding says, and is right about each drafted token as `is_right(round, position)` says.

    known: [B, n], the plain output. fails: rounds in which it raises.
    """

    def __init__(self, known, is_right, width=4, fails=()):
        self.known, self.is_right, self.width, self.fails = known, is_right, width, fails

    def start(self, call):
        return OracleDrafting(self)


class OracleDrafting(Drafting):
    def __init__(self, oracle):
        self.oracle = oracle
        self.round = -1

    def propose(self, text, budget):
        oracle = self.oracle
        self.round += 1
        if self.round in oracle.fails:
            raise RuntimeError("out of luck")
        width = min(oracle.width, budget)
        known = torch.nn.functional.pad(oracle.known, (0, width))
        after = zip(known, text.lengths, strict=True)
        tokens = torch.stack([row[length : length + width] for row, length in after])
        for position in range(width):
            if not oracle.is_right(self.round, position):
                tokens[:, position] = (tokens[:, position] + 1) % 90 + 3
        return Draft(tokens, torch.full((text.rows,), width))


def mostly(round, position):
    return (round * 7 + position * 3) % 5 != 0


def never_whole(round, position):
    return position != 3


_MODELS = {}


def model_of(name):
    """The target, and a pair whose drafter is for a test to choose. Not to be changed otherwise."""
    if name not in _MODELS:
        name_of_target, _, fast = name.partition(", ")
        target = build(BY_NAME[name_of_target]).requires_grad_(False)
        # a fixed length, since the default one stops drafting on a slow machine after a first draft that is all wrong
        options = {"draft": build(ARCHITECTURES[0]), "draft_length": 4, "fast": fast or "auto"}
        pair = AssistedModelForCausalLM.from_models(target, **options)
        _MODELS[name] = target, pair
    return _MODELS[name]


def both(name, ids, is_right=mostly, width=4, fails=(), **kwargs):
    """What plain `generate` says, what an oracle's pair says, and the pair's report."""
    target, model = model_of(name)
    kwargs = CALL | {"max_new_tokens": 24} | kwargs
    plain = said_by(target, ids, **kwargs)
    known = plain if isinstance(plain, torch.Tensor) else plain.sequences
    model.drafter = Oracle(known, is_right, width, fails)
    return plain, model.generate(ids, draft_length=width, **kwargs), model.report


# --- the text


@pytest.mark.parametrize("name,is_right", in_turns(WAYS, [never_whole, lambda *_: True, lambda *_: False]))
def test_one_row_equals_plain(name, is_right):
    ids = random_ids(model_of(name)[0], 1, 20, seed=20)
    with no_fallback():
        plain, ours, report = both(name, ids, is_right)
    assert ours.tolist() == plain.tolist()
    assert report.new_tokens == 24
    assert (report.accepted > 0) == is_right(1, 0)


@over_ways
def test_padded_batch_with_rows_that_end_apart_equals_plain(name):
    ids, mask = padded(model_of(name)[0])
    with no_fallback():
        plain, ours, report = both(name, ids, attention_mask=mask, eos_token_id=ENDS)
        assert ours.tolist() == plain.tolist()
        plain, ours, report = both(name, ids, attention_mask=mask)
    assert ours.tolist() == plain.tolist()
    assert report.accepted > 0


@over_ways
def test_a_prompt_of_one_token_equals_plain(name):
    plain, ours, _ = both(name, torch.tensor([[5]]))
    assert ours.tolist() == plain.tolist()


@over_copied
def test_drafts_that_are_never_right_to_the_end_are_read_again_seldom(name):
    """One forward a round; the tail is read in a pass of its own only where it has grown long."""
    target, _ = model_of(name)
    ids = random_ids(target, 1, 9, seed=2)
    both(name, ids)  # the trial of the target is over
    widths = []

    def count(module, args, kwargs):
        widths.append(kwargs["input_ids"].shape[1])

    plain = target.generate(ids, **(CALL | {"max_new_tokens": LONG}))
    hook = target.register_forward_pre_hook(count, with_kwargs=True)
    try:
        _, model = model_of(name)
        model.drafter = Oracle(plain, never_whole, width=5)
        ours = model.generate(ids, draft_length=5, **(CALL | {"max_new_tokens": LONG}))
    finally:
        hook.remove()
    assert ours.tolist() == plain.tolist()
    report = model.report
    assert report.tokens_per_pass > 3.5
    extra = len(widths) - 1 - report.target_passes  # the prompt's
    assert 0 < extra <= LONG / recurrent._LAG
    assert max(widths[1:]) <= recurrent._LAG + 4 + 6


@pytest.mark.parametrize("name,fails", in_turns(WAYS, [0, 1, 3]))
def test_a_drafter_that_fails_leaves_the_right_states(name, fails):
    ids = random_ids(model_of(name)[0], 1, 9, seed=3)
    with pytest.warns(UserWarning, match="continuing without drafts"):
        plain, ours, report = both(name, ids, never_whole, fails=[fails])
    assert ours.tolist() == plain.tolist()
    assert (report.accepted > 0) == (fails > 0)


@over_ways
def test_scores_and_a_streamer(name):
    target, _ = model_of(name)
    ids = random_ids(target, 1, 9, seed=5)
    streamer = Listener()
    plain, ours, _ = both(name, ids, return_dict_in_generate=True, output_logits=True)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert close(torch.stack(ours.logits), torch.stack(plain.logits))
    model_of(name)[1].generate(ids, streamer=streamer, **CALL)
    begin, *tokens, end = streamer.heard
    assert end == "end"
    assert [*begin[0], *(token for step in tokens for token in step)] == plain.sequences[
        0, : 9 + CALL["max_new_tokens"]
    ].tolist()


QUANTIZED = [Method("self", lambda target: "self:int8-torchao"), Method("self, roughly", lambda target: "self:int4")]
COMBINED = Method("combined", lambda target: ["suffix", "self:int4"])


@functools.cache
def plainly(name):
    """What a target writes without drafts, after one row and after a ragged batch."""
    target, _ = model_of(name)
    ids, mask = padded(target)
    calls = [(ids[:n], CALL | {"attention_mask": mask[:n], "eos_token_id": ENDS}) for n in (1, 4)]
    return [(ids, kwargs, target.generate(ids, **kwargs).tolist()) for ids, kwargs in calls]


@pytest.mark.parametrize(
    "method,name",
    [
        case
        for kind in (DELTA, [name for name in NAMES if name not in DELTA])
        for case in in_turns([*METHODS, *QUANTIZED, COMBINED], kind)
    ],
)
def test_every_method_serves_it_exactly_or_refuses(method, name):
    """Each method meets a target that reads trees and one that doesn't."""
    if method in [*QUANTIZED, COMBINED]:
        pytest.importorskip("torchao")
        pytest.importorskip("optimum.quanto")
    target, _ = model_of(name)
    try:
        model = AssistedModelForCausalLM.from_models(target, draft=method.draft(target), draft_length=4)
    except ValueError as error:
        assert re.match("(draft|target)", str(error))
        return
    for ids, kwargs, plain in plainly(name):
        with no_fallback():
            assert model.generate(ids, **kwargs).tolist() == plain
    assert model.totals.drafted > 0
    assert model.totals.accepted > 0 or method not in QUANTIZED


# --- caches of the caller


@pytest.mark.parametrize("name", [*ALONE, *(f"{name}, eager" for name in DELTA)])
def test_the_cache_that_is_returned_goes_on(name):
    """Others are in test_continued.py."""
    target, _ = model_of(name)
    ids, mask = padded(target)
    kwargs = {"attention_mask": mask, "return_dict_in_generate": True}
    for batch, more in ((ids[:1], {}), (ids, kwargs | {"eos_token_id": ENDS})):
        plain, ours, _ = both(name, batch, never_whole, **({"return_dict_in_generate": True} | more))
        assert ours.sequences.tolist() == plain.sequences.tolist()
        assert type(ours.past_key_values) is DynamicCache
        for theirs, layer in zip(plain.past_key_values.layers, ours.past_key_values.layers, strict=True):
            assert type(layer) is type(theirs)
            for one, other in zip(tensors(theirs), tensors(layer), strict=True):
                assert one.shape == other.shape
                assert not other.is_inference()
                assert close(other, one)


def close(one, two):
    """Up to rounding, for tensors that may be large."""
    return bool((one - two).abs().max() < 10 * ROUNDING * max(1.0, two.abs().max().item()))


def tensors(layer):
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    kept = [*states, getattr(layer, "keys", None), getattr(layer, "values", None)]
    return [tensor for tensor in kept if tensor is not None]


# --- sampling


class Mixture(Drafter, Drafting):
    """Drafts from the target's own distribution mixed with a uniform one, which is often right and always known."""

    def __init__(self, target):
        self.target = target

    def start(self, call):
        return self

    def propose(self, text, budget):
        ids, distributions = text.ids[:, : text.lengths[0]], []
        for _ in range(min(2, budget)):
            distributions.append(0.8 * self.target(ids).logits[:, -1].softmax(-1) + 0.2 / VOCABULARY)
            ids = torch.cat([ids, torch.multinomial(distributions[-1], 1)], 1)
        tokens = ids[:, text.lengths[0] :]
        return Draft(tokens, torch.full((text.rows,), len(distributions)), torch.stack(distributions, 1))


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param("lfm2", {}, id="lfm2", marks=pytest.mark.slow),
        pytest.param("qwen3_5", {"temperature": 0.6, "top_p": 0.9}, id="qwen3_5"),
    ],
)
def test_sampling_follows_the_targets_distribution(name, setting):
    """Rows come in small batches: a large one accepts what its least lucky row accepts, nothing."""
    fields = {"vocab_size": VOCABULARY, "eos_token_id": None, "bos_token_id": None, "hidden_size": 16}
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(BY_NAME[name].make(**fields)).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.ndim >= 2:
                weight.mul_(20)
    model = AssistedModelForCausalLM.from_models(target, draft=tiny_llama(1))
    model.drafter = Mixture(target)
    kwargs = {"top_k": 0} | setting
    torch.manual_seed(21)
    call = {"max_new_tokens": SAMPLED, "do_sample": True, "num_return_sequences": 4, "draft_length": 2}
    with no_fallback():
        outputs = [model.generate(PROMPT, **call, **kwargs) for _ in range(500)]
    assert model.totals.accepted > 500
    distribution = exact_distribution(target, **kwargs)
    assert distribution.max() < 0.7
    assert p_value(counts(torch.cat(outputs)), distribution) > ALPHA


# --- the states


@pytest.mark.parametrize("name", some(COPIED, KINDS))
@settings(max_examples=15)
@given(data=st.data())
def test_the_states_are_those_of_the_committed_tokens(name, data):
    """Random rounds, then: states, keys, values and the next logits of a model that read the text at once."""
    target, _ = model_of(name)
    rows, prompt = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 6))
    text = random_ids(target, rows, 60, seed=data.draw(st.integers(0, 9)))
    runner = reader(target, text[:, :prompt])
    length = prompt
    for _ in range(data.draw(st.integers(1, 5))):
        width = data.draw(st.integers(1, 6))
        kept = 1 if width == 1 else data.draw(st.integers(1, width))
        wrong = text[:, length : length + width].clone()
        wrong[:, kept:] = (wrong[:, kept:] + 1) % 90 + 3
        logits = runner(wrong)
        assert logits.shape[:2] == (rows, width)
        runner.commit([kept] * rows)
        length += kept
        assert runner.cache.known == [length] * rows
        if data.draw(st.booleans()):
            runner.catch_up()
    runner.catch_up()
    fresh = reader(target, text[:, :length])
    for own, other in zip(runner.cache.layers, fresh.cache.layers, strict=True):
        for one, two in zip(tensors(own), tensors(other), strict=True):
            if one.ndim == 4 and one.shape[2] == runner.cache.capacity:  # slots
                one, two = one[:, :, :length], two[:, :, :length]
            assert close(one, two)
    assert close(runner(text[:, length : length + 3]), fresh(text[:, length : length + 3]))


def reader(target, prompt):
    config = target.config.get_text_config(decoder=True)
    masks = replace(Traits.of(target).masks, trees=False)
    runner = RecurrentModel(target, RecurrentCache(len(prompt), 256, config), masks)
    runner.prefill(prompt, None)
    return runner


@over_recurrent
@settings(max_examples=15)
@given(data=st.data())
def test_the_states_of_each_row_are_those_of_its_own_path(name, data):
    """Random rounds over chains and trees, from which each row keeps a path of its own: its states are those of a model that
    read the row's text at once."""
    target, _ = model_of(name)
    rows, prompt = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    chance = random.Random(data.draw(st.integers(0, 999)))
    masks = Traits.of(target).column_masks
    runner = target_runner(target, slots_for(target, None, rows, 256, masks), masks)
    texts = random_ids(target, rows, prompt, seed=rows).tolist()
    runner.prefill(torch.tensor([text[:-1] or text for text in texts]), None)
    texts = [text if len(text) > 1 else [*text, 5] for text in texts]
    for _ in range(data.draw(st.integers(1, 5))):
        width = data.draw(st.integers(0, 6))
        running = sorted(chance.sample(range(rows), chance.randint(1, rows)))
        tokens = [[chance.randrange(3, 90) for _ in range(width)] for _ in range(rows)]
        parents = [[chance.randint(-1, node - 1) for node in range(width)] for _ in range(rows)]
        tree = width > 0 and data.draw(st.booleans())
        if not tree:
            parents = [list(range(-1, width - 1))] * rows
        draft = Draft(
            torch.tensor(tokens).long().view(rows, width),
            torch.full((rows,), width),
            parents=torch.tensor(parents) if tree else None,
        )
        runner.run_only(running)
        runner(torch.cat([torch.tensor([text[-1:] for text in texts]), draft.tokens], 1), draft)
        paths, counts = [], []
        for row in range(rows):
            node = chance.randint(-1, width - 1)
            path = []
            while node >= 0:
                path.insert(0, node)
                node = parents[row][node]
            paths.append([0, *(node + 1 for node in path)])
            counts.append(len(path) + 1 if row in running else 0)
            if row in running:
                texts[row] += [tokens[row][node] for node in path] + [chance.randrange(3, 90)]
        runner.commit(counts, paths if tree else None)
    runner.run_only(list(range(rows)))
    after = runner(torch.tensor([text[-1:] for text in texts]))
    for row, text in enumerate(texts):
        assert runner.cache.known[row] == len(text) - 1
        fresh = target_runner(target, slots_for(target, None, 1, 256, masks), masks)
        read = max(1, prompt - 1)
        fresh.prefill(torch.tensor([text[:read]]), None)
        fresh.cache.begin_rounds(read)
        for token in text[read:-1]:
            fresh(torch.tensor([[token]]))
            fresh.commit([1])
        place = runner.cache.order.index(row)
        for one, two in zip(runner.cache.states(), fresh.cache.states(), strict=True):
            assert close(one[place], two[0])
        assert close(after[row], fresh(torch.tensor([text[-1:]]))[0])


@over_recurrent
def test_a_pass_that_failed_can_be_run_again(name, monkeypatch):
    """States change at a commit only, and nothing of the failed pass is left."""
    target, _ = model_of(name)
    masks, ids = Traits.of(target).column_masks, random_ids(target, 1, 12, seed=1)
    runner, fresh = (target_runner(target, slots_for(target, None, 1, 64, masks), masks) for _ in range(2))
    for one in (runner, fresh):
        one.prefill(ids[:, :6], None)

    def fail(layer, read):
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(runner.cache, "note", fail)
        with pytest.raises(MemoryError):
            runner(ids[:, 6:10])
    assert torch.equal(runner(ids[:, 6:10]), fresh(ids[:, 6:10]))


@pytest.mark.parametrize("name", DELTA)
def test_half_precision_rounds_as_one_token_at_a_time_does(name):
    """Columns after a state give the logits of the model's own one-token passes, at most positions to the bit."""
    target = build(BY_NAME[name]).to(torch.bfloat16)
    masks, ids = Traits.of(target).masks, random_ids(target, 2, 14, seed=1)
    runner = target_runner(target, slots_for(target, None, 2, 64, masks), masks)
    with torch.no_grad():
        runner.prefill(ids[:, :6], None)
        found = runner(ids[:, 6:])
        cache = DynamicCache(config=target.config)
        target(ids[:, :6], past_key_values=cache, use_cache=True)
        steps = [target(ids[:, [i]], past_key_values=cache, use_cache=True).logits for i in range(6, 14)]
    assert apart(found, torch.cat(steps, 1), by_position=True) < 1e-3


def test_what_states_cannot_do_raises():
    target, _ = model_of("qwen3_5")
    ids = random_ids(target, 2, 12)
    runner = reader(target, ids[:, :6])
    tree = Draft(ids[:, 6:8], torch.tensor([2, 2]), parents=torch.tensor([[-1, -1], [-1, -1]]))
    with pytest.raises(ValueError, match=r"^draft: .*trees"):
        runner(ids[:, :3], tree)
    runner(ids[:, 6:9])
    with pytest.raises(ValueError, match=r"^counts: .*in lockstep"):
        runner.commit([1, 2])
    with pytest.raises(ValueError, match=r"(?s)^counts: .*chain"):
        runner.commit([2, 2], torch.tensor([[0, 1], [0, 1]]))
    runner.commit([2, 2])
    runner.cache.rewind([8, 8])
    with pytest.raises(ValueError, match="can't be rewound"):
        runner.cache.rewind([7, 7])

    careless = CachedModel(target, runner.cache, replace(Traits.of(target).masks, trees=False))
    runner.catch_up()
    careless(ids[:, 8:11])
    with pytest.raises(RuntimeError, match="RecurrentModel"):
        careless.commit([1, 1])


# --- who is served, who is refused


def test_how_a_target_is_run():
    def runs(model):
        masks = masks_of(model, trust(model))
        return type(target_runner(model, slots_for(model, None, 1, 32, masks), masks))

    for architecture in ARCHITECTURES[:6]:
        model = build(architecture)
        assert Traits.of(model).is_rewindable and not Traits.of(model).is_recurrent
        assert runs(model) is CachedModel
    for name in NAMES:
        model = model_of(name)[0]
        assert Traits.of(model).is_recurrent and not Traits.of(model).is_rewindable
        assert runs(model) is (ColumnModel if name in DELTA + ONE_BY_ONE else RecurrentModel)
        assert Traits.of(model).masks.trees == (name in DELTA)
        assert Traits.of(model).column_masks.trees
    for architecture in REFUSED:
        assert not Traits.of(build(architecture)).is_rewindable


@over_recurrent
def test_a_recurrent_model_drafts(name):
    """For itself it is always right, also in rows of different lengths; for another target the text is the target's."""
    draft, _ = model_of(name)
    for target, right in ((draft, True), (build(ARCHITECTURES[0]), False)):
        model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3)
        ids, mask = padded(target)
        for batch, seen in ((ids[:1], mask[:1]), (ids, mask)):
            for ends in (ENDS, None):
                kwargs = CALL | {"attention_mask": seen, "eos_token_id": ends}
                with no_fallback():
                    assert model.generate(batch, **kwargs).tolist() == target.generate(batch, **kwargs).tolist()
            assert model.report.drafted > 0
            assert not right or model.report.accepted == model.report.drafted


@pytest.mark.documents
def test_the_table_of_the_docs_is_what_happens():
    page = PAGE.read_text(encoding="utf-8")
    start, stop = section(page)
    assert page[start:stop] == table(), "run python tests/recurrent_table.py"


def obstacle(model):
    """Why the states of a target can't be copied and restored."""
    return trial.obstacle_to(model, trust(model), replaces=False)


def test_trying_a_model_changes_nothing_and_is_done_once(monkeypatch):
    model = build(BY_NAME["recurrent_gemma"])
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ValueError, match=r"in its own modules .*conv1d_state"):
        require_verifiable(model)
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is value for key, value in attributes.items())

    model = build(BY_NAME["qwen3_5"])
    tried = []
    monkeypatch.setattr(trial, "rounding_of", lambda dtype: tried.append(dtype) or 1.0)
    for _ in range(2):
        require_verifiable(model)
    require_verifiable(model.to(torch.bfloat16))
    assert tried == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("name,scale", in_turns(NAMES, [0.003, None, 0.02]))
def test_random_weights_are_no_reason_to_refuse(name, scale):
    """In half precision neither. Where weights are tiny, states hardly count, and what is left of the differences is
    rounding."""
    model = build(BY_NAME[name])
    if scale is not None:
        torch.manual_seed(0)
        architecture = BY_NAME[name]
        config = architecture.make(initializer_range=scale)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=architecture.attention).eval()
    require_verifiable(model)
    require_verifiable(model.to(torch.bfloat16))


@pytest.mark.parametrize("mutant", ["empty", "stale", "zeroed convolution", "noisy"])
@pytest.mark.parametrize("name", some(COPIED, ("mamba2", "bamba", "qwen3_5")))
def test_a_forward_that_loses_its_states_is_refused(name, mutant, monkeypatch):
    """Passes over several tokens only: from an empty state, from one that is not put back, from one that is a little off."""
    plain = RecurrentModel.__call__

    def broken(self, ids, draft=None, used=None):
        if mutant == "stale" and ids.shape[1] > 1:
            logits = plain(self, ids, draft, used)
            self.cache._saved = [state.clone() for state in self.cache.states()]
            return logits
        if ids.shape[1] > 1 and self.cache.lengths[0] > 1 and not self.unread.shape[1]:
            self.cache.save()
            for state in self.cache.states():
                if mutant == "noisy":
                    state.mul_(1 + 1e-2)
                elif mutant == "empty" or state.ndim == 3:
                    state.zero_()
        return plain(self, ids, draft, used)

    monkeypatch.setattr(RecurrentModel, "__call__", broken)
    assert re.search("cannot take back rejected tokens: it", obstacle(build(BY_NAME[name])))


@pytest.mark.parametrize("mutant", ["stays", "first parent", "next column", "no convolution"])
@pytest.mark.parametrize("name", some(DELTA + ONE_BY_ONE, ("qwen3_5", "mamba", "jamba")))
def test_layers_that_run_over_columns_wrongly_are_not_used(name, mutant, monkeypatch):
    """States that are not advanced, trees taken for chains, states after another column, convolutions that see nothing."""
    for kind in (Read, Steps):
        after = kind.states_after

        def broken(self, last, states, after=after):
            if mutant == "stays":
                return states
            most = self.columns.width if isinstance(self, Read) else len(self.after[0])
            made = after(self, (last + 1).clamp(max=most - 1) if mutant == "next column" else last, states)
            return [torch.zeros_like(made[0]), *made[1:]] if mutant == "no convolution" else made

        monkeypatch.setattr(kind, "states_after", broken)
    if mutant == "first parent":
        monkeypatch.setattr(Columns, "of", classmethod(lambda cls, width, draft, device: cls(width)))
    model = build(BY_NAME[name])
    assert not masks_of(model, trust(model)).trees


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba", "zamba"])
def test_a_pass_that_starts_from_an_empty_state_is_found_in_half_precision(name):
    model = build(BY_NAME[name]).to(torch.bfloat16)
    assert "its forward pass over several tokens differs" in obstacle(model)
    require_verifiable(model)  # over columns


@pytest.mark.parametrize("name", ["jamba", "zamba", "bamba"])
@pytest.mark.parametrize("part", ["past_key_values", "prefill_chunk_size"])
def test_a_prompt_in_parts_that_the_model_reads_wrongly_is_warned_of(name, part):
    target = build(BY_NAME[name])
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=3)
    ids = random_ids(target, 1, 14, seed=3)

    def said(of):
        given = 5
        if part == "past_key_values":
            given = DynamicCache(config=target.config)
            target.generate(ids[:, :9], past_key_values=given, **CALL | {"max_new_tokens": 1})
        return of.generate(ids, **CALL, **{part: given}).tolist()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert said(model) == said(target)
    right = said(target) == target.generate(ids, **CALL).tolist()
    found = [str(warning.message) for warning in caught if part in str(warning.message)]
    assert right == (not found) == (name == "bamba")
    assert model.report.warnings[:1] == tuple(found)


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_a_step_that_is_clamped_in_longer_passes_only_is_the_reason(name):
    """Their one-token pass leaves out the lower limit of the time step. Where the limit is out of reach, all is well."""
    model = build(BY_NAME[name])
    assert "differs from the same tokens one by one" in obstacle(model)
    require_verifiable(model)  # over columns
    assert obstacle(build(BY_NAME[name], time_step_min=1e-9)) is None


def test_a_forward_that_fails_is_a_reason():
    model = build(BY_NAME["lfm2"])

    def fail(module, args, kwargs):
        if kwargs["input_ids"].shape[1] == 5:
            raise NotImplementedError("one token at a time")

    hook = model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(ValueError, match="NotImplementedError: one token at a time"):
            require_verifiable(model)
    finally:
        hook.remove()


def test_a_target_that_does_not_run_at_all_is_said_to():
    """As some quantized hybrids, whose error has nothing to do with drafts."""
    model = build(BY_NAME["qwen3_next"])

    def fail(*args):
        raise TypeError("no kernel for 16 outputs")

    hook = model.model.layers[0].register_forward_pre_hook(fail)
    try:
        with pytest.raises(
            ValueError, match=r"does not run, with or without drafts \(TypeError: no kernel for 16 outputs\)"
        ):
            AssistedModelForCausalLM.from_models(model)
    finally:
        hook.remove()


def test_a_target_that_was_moved_or_cast_is_tried_again(monkeypatch):
    target = build(BY_NAME["lfm2"])
    model = AssistedModelForCausalLM.from_models(target, draft=build(ARCHITECTURES[0]))
    ids = random_ids(target, 1, 9)
    monkeypatch.setattr(trial, "rounding_of", lambda dtype: -1.0)  # no trial is passed
    model.generate(ids, **CALL)
    model.to(torch.bfloat16)
    with pytest.warns(DraftingStopped, match="cannot take back rejected tokens: its forward pass"):
        text = model.generate(ids, **CALL)
    assert text.tolist() == target.generate(ids, **CALL).tolist()
