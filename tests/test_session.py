"""A text that goes on from call to call in a session: neither target nor drafter reads again what it has read."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, half_right, random_ids
from block_heads import trained_block
from covering import in_turns, over
from eagle_heads import trained_head
from methods import HEADS
from mtp_heads import trained_mtp
from pairs import BY_NAME, CALL, pair, said_by
from transformers import DynamicCache

from assisted import MTP, AssistedModelForCausalLM, DFlash, Eagle, Merged
from assisted.engine import cache
from assisted.engine import states as engine_states
from assisted.engine.cache import SlotCache, SlotLayer
from assisted.methods import DraftModel
from assisted.methods.eagle import draft as eagle

TURNS = 4
NEW = 6  # tokens of a user's turn


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[int]:
    """The columns that were written to the first layer of slots by operations of torch, by the id of all slots in use."""
    found: collections.Counter[int] = collections.Counter()
    update, make_room = SlotLayer.update, SlotLayer.make_room

    def counting(self: Any, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found[id(self.slots)] += key_states.shape[2] * (self is self.slots.layers[0])
        return update(self, key_states, *args, **kwargs)

    def used(self: Any, *args: Any) -> None:  # layers in C call it as well
        found[id(self.slots)] += 0
        make_room(self, *args)

    monkeypatch.setattr(SlotLayer, "update", counting)
    monkeypatch.setattr(SlotLayer, "make_room", used)
    return found


def turns(count: int = TURNS, rows: int = 1) -> list[torch.Tensor]:
    return list(random_ids(pair()[0], rows, NEW * count).split(NEW, 1))


def talked(model: Any, past: Any, added: list[torch.Tensor], **kwargs: Any) -> list[list[Any]]:
    """The text after each turn."""
    ids, texts = added[0][:, :0], []
    for turn in added:
        ids = model.generate(torch.cat([ids, turn], 1), past_key_values=past, **CALL | kwargs)
        texts.append(ids.tolist())
    return texts


def plain_talk(target: Any, added: list[torch.Tensor], **kwargs: Any) -> list[list[Any]]:
    """The same without a past."""
    ids, texts = added[0][:, :0], []
    for turn in added:
        ids = said_by(target, torch.cat([ids, turn], 1), **CALL | kwargs)
        texts.append(ids.tolist())
    return texts


@functools.cache
def head(version: int) -> Any:
    return trained_head(build(BY_NAME["llama"]), version)


DRAFTS: dict[str, Any] = {
    "eagle-1": lambda target: Eagle(head(1)),
    "eagle-3, chains": lambda target: Eagle(head(3), tree=False),
    "mtp": lambda target: MTP(trained_mtp(target)),
    "mtp, chains": lambda target: MTP(trained_mtp(target), tree=False),
    "dflash": lambda target: DFlash(trained_block(target, steps=30)),
    "dflash, chains": lambda target: DFlash(trained_block(target, steps=30), tree=False),
    "assistant": lambda target: HEADS["assistant"](target),
    "suffix and a head": lambda target: ["suffix", Eagle(head(3))],
    "two heads": lambda target: [Eagle(head(1)), Eagle(head(3))],
    "model": lambda target: DraftModel(half_right(target)),
    "suffix": lambda target: "suffix",
    "early-exit:1": lambda target: "early-exit:1",
    "layer-skip": lambda target: "layer-skip",
    "list": lambda target: ["suffix", DraftModel(half_right(target))],
    "merged": lambda target: Merged(("ngram", DraftModel(half_right(target)))),
    "heads": lambda target: [HEADS[head](target) for head in ("medusa", "eagle", "early-exit")],
    "merged heads": lambda target: Merged([HEADS[head](target) for head in ("eagle", "medusa", "random eagle")]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("draft,how", in_turns(list(DRAFTS), [("auto", 3), ("eager", 1), ("auto", 1), ("eager", 3)]))
def test_the_text_of_every_turn_is_plain(draft: str, how: tuple[str, int]) -> None:
    fast, rows = how
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=4, fast=fast)
    added = turns(rows=rows)
    session = model.session()
    assert talked(model, session, added) == plain_talk(target, added)
    assert session.in_slots


@over("architecture", [*ARCHITECTURES, *RECURRENT])
def test_all_architectures(architecture: Any) -> None:
    target = build(architecture)
    try:
        model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=3)
    except ValueError:
        pytest.skip("refused as a target")
    if architecture.name == "mpt":
        pytest.skip("its config has use_cache=False, and transformers itself does not continue from a past")
    added = turns(3)
    assert talked(model, model.session(), added) == plain_talk(target, added)


def test_only_new_tokens_are_read(written: collections.Counter[int]) -> None:
    """Ten turns, of which each but the first reads what was added, in the target and in the draft."""
    target = build(BY_NAME["llama"])
    draft = half_right(target)
    model = AssistedModelForCausalLM.from_models(target, draft, draft_length=3, fast="eager")
    session, ids = model.session(), turns(1)[0][:, :0]
    for number, turn in enumerate(turns(10)):
        prompt = torch.cat([ids, turn], 1)
        written.clear()
        ids = model.generate(prompt, past_key_values=session, **CALL)
        read = written[id(session._slots)], written[id(session.kept[1].runner.cache)]
        assert model.report is not None
        verified = model.report.drafted + model.report.target_passes
        unread = prompt.shape[1] if number == 0 else NEW + 1  # with the last token of the answer
        assert read[0] <= unread + verified
        # the last tokens of the text before, which were accepted without being read, and each step's own
        assert read[1] <= unread + 2 + 2 * verified
    assert ids.shape[1] == 10 * (NEW + CALL["max_new_tokens"])


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3", "dflash"])
@pytest.mark.parametrize("tree", [True, False])
def test_a_head_goes_on_as_if_it_had_read_the_whole_text(
    kind: str, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts in a session's turns what it drafts after reading the text anew, and reads only the new columns."""
    monkeypatch.setattr(eagle, "learn", lambda *args: None)  # or the second call would draft other trees
    target = build(BY_NAME["llama"])
    options = {"tree": tree, "nodes": 6}
    spec = DFlash(trained_block(target), **options) if kind == "dflash" else Eagle(head(int(kind[-1])), **options)
    model = AssistedModelForCausalLM.from_models(target, spec, draft_length=3, fast="eager")
    session, read, ids = model.session(), [], turns(1)[0][:, :0]
    module = model.drafter.head
    fuse = module.fuse
    module.fuse = lambda states: read.append(states.shape[1]) or fuse(states)
    for number, turn in enumerate(turns(10)):
        prompt = torch.cat([ids, turn], 1)
        anew = model.generate(prompt, **CALL)
        report, read[:] = model.report, []
        ids = model.generate(prompt, past_key_values=session, **CALL)
        assert ids.tolist() == anew.tolist()
        assert model.report is not None and report is not None
        assert (model.report.drafted, model.report.accepted) == (report.drafted, report.accepted)
        assert read[0] <= (NEW if number == 0 else 2 * NEW)


def test_slots_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are they copied out and in at each turn, nor does each turn need larger ones."""
    _, model = pair()
    session, grown, added = model.session(), [], turns(12)
    monkeypatch.setattr("assisted.engine.cache._GROWTH", 8)
    ids = torch.tensor(talked(model, session, added[:1], max_new_tokens=4)[0])
    monkeypatch.setattr(SlotCache, "to_dynamic", None)
    monkeypatch.setattr(SlotCache, "of", None)
    monkeypatch.setattr(
        "assisted.engine.cache._grown",
        lambda store, capacity, own=cache._grown: grown.append(1) or own(store, capacity),
    )
    for turn in added[1:]:
        ids = model.generate(torch.cat([ids, turn], 1), past_key_values=session, **CALL | {"max_new_tokens": 4})
    copies = 2 * 2 * 2  # of keys and values, in two layers, by target and draft
    assert 0 < len(grown) <= 5 * copies


@pytest.mark.parametrize("at", [0, 1, 5, 12, 20])
def test_a_changed_text_is_read_again_from_the_change_on(at: int, written: collections.Counter[int]) -> None:
    target, model = pair()
    session, added = model.session(), turns(2)
    text = torch.tensor(talked(model, session, added[:1])[0])
    changed = torch.cat([text, added[1]], 1)
    changed[0, at] = (changed[0, at] + 1) % 90 + 3
    written.clear()
    found = model.generate(changed, past_key_values=session, **CALL)
    assert found.tolist() == target.generate(changed, **CALL).tolist()
    assert model.report is not None
    unread = changed.shape[1] - max(0, at - 1)
    verified = model.report.drafted + model.report.target_passes
    assert unread <= written[id(session._slots)] <= unread + verified


def test_other_code_sees_a_dynamic_cache() -> None:
    target, model = pair()
    session, cache, added = model.session(), DynamicCache(config=target.config), turns(2)
    text = torch.tensor(talked(model, session, added[:1])[0])
    talked(target, cache, added[:1])
    assert session.get_seq_length() == cache.get_seq_length() == text.shape[1] - 1
    assert isinstance(session, DynamicCache) and session.in_slots
    branch, stored = copy.deepcopy(session), pickle.loads(pickle.dumps(session))
    assert session.in_slots and not branch.in_slots
    for held, expected in zip(session.layers, cache.layers, strict=True):
        assert torch.allclose(held.keys, expected.keys, atol=1e-5)
    assert not session.in_slots
    prompt = torch.cat([text, added[1]], 1)
    expected = target.generate(prompt, **CALL).tolist()
    for past in (session, branch, stored):
        assert target.generate(prompt, past_key_values=past, **CALL).tolist() == expected


def test_padded_prompts_and_rows_that_end_early() -> None:
    target, model = pair()
    call = CALL | {"eos_token_id": [2, *range(5, 40)]}
    ids = random_ids(pair()[0], 3, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    session, cache = model.session(), DynamicCache(config=target.config)
    for _ in range(3):
        expected = target.generate(ids, attention_mask=mask, past_key_values=cache, **call)
        found = model.generate(ids, attention_mask=mask, past_key_values=session, **call)
        assert found.tolist() == expected.tolist()
        added = random_ids(pair()[0], 3, 2, 1)
        ids, new = torch.cat([found, added], 1), found.shape[1] + 2 - mask.shape[1]
        mask = torch.cat([mask, torch.ones(3, new, dtype=torch.int64)], 1)


def test_only_the_new_tokens_as_prompt() -> None:
    """transformers also takes the new tokens alone, with a mask for all."""
    target, model = pair()
    session, cache, added = model.session(), DynamicCache(config=target.config), turns(2)
    text = talked(model, session, added[:1])[0]
    talked(target, cache, added[:1])
    new = torch.cat([torch.tensor(text)[:, -1:], added[1]], 1)
    mask = torch.ones(1, len(text[0]) + NEW, dtype=torch.int64)
    expected = target.generate(new, attention_mask=mask, past_key_values=cache, **CALL)
    assert model.generate(new, attention_mask=mask, past_key_values=session, **CALL).tolist() == expected.tolist()


def test_a_call_that_fails_leaves_the_text_before_it() -> None:
    target, model = pair()
    session, added = model.session(), turns(2)
    text = torch.tensor(talked(model, session, added[:1])[0])
    prompt = torch.cat([text, added[1]], 1)

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > prompt.shape[1] + 5:
            raise RuntimeError("no more")
        return scores

    with pytest.raises(RuntimeError, match="no more"):
        model.generate(prompt, past_key_values=session, logits_processor=[fails], **CALL)
    assert session.get_seq_length() == text.shape[1] - 1
    assert {layer.keys.shape[2] for layer in copy.deepcopy(session).layers} == {text.shape[1] - 1}
    assert model.generate(prompt, past_key_values=session, **CALL).tolist() == target.generate(prompt, **CALL).tolist()


@pytest.mark.parametrize("assisted", [True, False])
def test_rows_must_be_the_same(assisted: bool) -> None:
    _, model = pair()
    session = model.session()
    text = torch.tensor(talked(model, session, turns(1))[0])
    several = CALL | {"do_sample": True, "num_return_sequences": 2, "assisted": assisted}
    with pytest.raises(ValueError, match="past_key_values: the session has 1 rows, and this call has 2"):
        model.generate(text, past_key_values=session, **several)
    assert session.get_seq_length() == text.shape[1] - 1


def test_one_call_at_a_time() -> None:
    _, model = pair()
    session, errors = model.session(), []

    def inside(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        def other() -> None:
            try:
                model.generate(ids, past_key_values=session, **CALL)
            except ValueError as error:
                errors.append(str(error))

        if not errors:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return scores

    talked(model, session, turns(1), logits_processor=[inside])
    assert len(errors) == 1 and "session" in errors[0]


def test_another_pair_goes_on() -> None:
    """The drafter's state is that of one drafter only."""
    target, model = pair()
    other = AssistedModelForCausalLM.from_models(target, half_right(target), draft_length=3)
    session, added, ids = model.session(), turns(4), turns(1)[0][:, :0]
    expected = plain_talk(target, added)
    for number, turn in enumerate(added):
        one = (model, other)[number % 2]
        ids = one.generate(torch.cat([ids, turn], 1), past_key_values=session, **CALL)
        assert ids.tolist() == expected[number]


def test_no_chain_of_calls_is_kept() -> None:
    _, model = pair()
    session, seen, ids = model.session(), [], turns(1)[0][:, :0]
    for turn in turns(4):
        ids = model.generate(torch.cat([ids, turn], 1), past_key_values=session, **CALL)
        seen.append(weakref.ref(session.kept[1]))
    gc.collect()
    assert [one() is None for one in seen] == [True, True, True, False]


def test_sampled_turns() -> None:
    """With one token to choose from, sampling is greedy, but it runs through the rules for sampled drafts."""
    target, model = pair()
    added, sampled = turns(3), {"do_sample": True, "top_k": 1}
    assert talked(model, model.session(), added, **sampled) == plain_talk(target, added)


# --- edits of a text, after calls of every kind, where the session is in slots or in transformers' layers


def changed(ids: torch.Tensor, at: int) -> torch.Tensor:
    ids = ids.clone()
    ids[:, at] = (ids[:, at] + 5) % 90 + 3
    return ids


EDITS: dict[str, Any] = {  # of the last prompt and the text after it
    "appended": lambda prompt, text: torch.cat([text, prompt[:, :4]], 1),
    "shorter": lambda prompt, text: text[:, :-6],
    "shorter than the prompt": lambda prompt, text: prompt[:, :5],
    "one token": lambda prompt, text: text[:, 4:5],
    "the same prompt": lambda prompt, text: prompt,
    "the same text": lambda prompt, text: text,
    "in the middle": lambda prompt, text: torch.cat([changed(text, 6), prompt[:, :4]], 1),
    "the first token": lambda prompt, text: torch.cat([changed(text, 0), prompt[:, :4]], 1),
    "the last token that was read": lambda prompt, text: changed(text, text.shape[1] - 2),
    "the last token": lambda prompt, text: changed(text, text.shape[1] - 1),
    "the last token of the prompt": lambda prompt, text: changed(prompt, prompt.shape[1] - 1),
    "another answer": lambda prompt, text: torch.cat([prompt, prompt[:, :3]], 1),
    "another text": lambda prompt, text: (prompt.flip(1) + 11) % 90 + 3,
}


def first_call(model: Any, session: Any, prompt: torch.Tensor, **more: Any) -> torch.Tensor:
    return model.generate(prompt, past_key_values=session, **CALL | more)


def ended(model: Any, session: Any, prompt: torch.Tensor) -> torch.Tensor:
    free = model.target.generate(prompt, **CALL)
    return first_call(model, session, prompt, eos_token_id=int(free[0, prompt.shape[1] + 5]))


def raised(model: Any, session: Any, prompt: torch.Tensor, **more: Any) -> torch.Tensor:
    text = first_call(model, session, prompt)
    longer = torch.cat([text, prompt[:, :3]], 1)

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > longer.shape[1] + 4:
            raise RuntimeError("no more")
        return scores

    with pytest.raises(RuntimeError, match="no more"):
        first_call(model, session, longer, logits_processor=[fails], **more)
    return text


def plain_between(model: Any, session: Any, prompt: torch.Tensor) -> torch.Tensor:
    text = first_call(model, session, prompt)
    return first_call(model, session, torch.cat([text, prompt[:, :3]], 1), assisted=False)


def padded(model: Any, session: Any, prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    return first_call(model, session, prompt, attention_mask=mask)


def by_another_pair(model: Any, session: Any, prompt: torch.Tensor) -> torch.Tensor:
    return first_call(AssistedModelForCausalLM.from_models(model.target, "ngram"), session, prompt)


BEFORE: dict[str, Any] = {
    "a call": first_call,
    "a plain call": functools.partial(first_call, assisted=False),
    "an end token": ended,
    "a call that raised": raised,
    "a plain call that raised": functools.partial(raised, assisted=False),
    "plain calls between": plain_between,
    "padding": padded,
    "another pair": by_another_pair,
}
EDITED = ["qwen3_next", "llama", "jamba", "lfm2", "gemma3", "zamba2"]
ANY = {one.name: one for one in [*ARCHITECTURES, *RECURRENT]}


def held_by(layer: Any) -> list[torch.Tensor]:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    parts = (*states, getattr(layer, "keys", None), getattr(layer, "values", None))
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("before,name", in_turns(list(BEFORE), EDITED))
def test_an_edited_text_is_that_of_plain_generate(before: str, name: str) -> None:
    """Every edit in turn; then the text goes on. Keys, values and states are those of plain `generate`, too."""
    target = build(ANY[name])
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=3)
    prompt = random_ids(target, 2 if before in ("padding", "an end token") else 1, 12, 3)
    for what, edit in EDITS.items():
        session = model.session()
        new = edit(prompt, BEFORE[before](model, session, prompt))
        # pad tokens count as padding if a mask is left out, and a prompt may not end in it
        shown = {"attention_mask": torch.ones_like(new)} if bool((new[:, -1] == 0).any()) else {}
        plain = target.generate(new, return_dict_in_generate=True, **shown, **CALL)
        found = model.generate(new, past_key_values=session, **shown, **CALL)
        assert found.tolist() == plain.sequences.tolist(), what
        if plain.get("past_key_values") is not None:
            for layer, expected in zip(copy.deepcopy(session).layers, plain.past_key_values.layers, strict=True):
                for mine, theirs in zip(held_by(layer), held_by(expected), strict=True):
                    assert torch.allclose(mine, theirs, atol=1e-3 * max(1.0, theirs.abs().max().item())), what
        longer = torch.cat([found, prompt[:, :5]], 1)
        expected = target.generate(longer, **CALL)
        assert model.generate(longer, past_key_values=session, **CALL).tolist() == expected.tolist(), what


READS_ON = ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2", "bamba", "falcon_h1", "granitemoehybrid"]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", [*READS_ON, "jamba"])
def test_an_edited_text_is_read_again_from_the_last_state_before_the_change(name: str, rows: int) -> None:
    """Those before each call, before the end of a long prompt and at earlier changes are kept. Jamba can't read on at all."""
    target = build(ANY[name])
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=3)
    session, reused = model.session(), []
    calls = CALL | {"eos_token_id": None, "max_new_tokens": 20}
    a, b = random_ids(target, rows, 60, 3).split([40, 20], 1)

    def said(prompt: torch.Tensor, **more: Any) -> torch.Tensor:
        seen = torch.ones_like(prompt)  # left out, it would hide pad tokens of the text
        text = model.generate(prompt, attention_mask=seen, past_key_values=session, **calls | more)
        assert text.tolist() == target.generate(prompt, attention_mask=seen, **calls).tolist()
        reused.append(model.report.cached_tokens)
        return text

    text = said(a)  # read: 39 tokens, and the last
    longer = torch.cat([text, b], 1)  # goes on from 59 tokens; 79 and the last
    text = said(longer)
    said(longer)
    said(text)
    said(changed(longer, 79))
    said(changed(longer, 65))
    said(changed(longer, 30))  # nothing lies before; from now on, 30 tokens do
    said(changed(longer, 35), assisted=False)
    said(changed(longer, 32))
    said(longer[:, :25])
    expected = [0, 59, 79, 99, 79, 59, 0, 0, 30, 0]
    if name == "jamba":
        expected = [0] * len(expected)
    assert reused == expected


def test_a_call_that_fails_leaves_no_states_of_its_prompt() -> None:
    target = build(ANY["qwen3_5"])
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=3)
    session, prompt = model.session(), random_ids(target, 1, 40, 3)
    longer = torch.cat([first_call(model, session, prompt), prompt], 1)
    other = changed(longer, longer.shape[1] - 8)

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        first_call(model, session, longer, logits_processor=[fails])
    assert first_call(model, session, other).tolist() == target.generate(other, **CALL).tolist()
    assert model.report.cached_tokens == longer.shape[1] - prompt.shape[1] - 1


def test_how_many_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose loss makes the fewest tokens be read again go first; all are counted, and copies have them."""
    target = build(ANY["lfm2"])
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=3)
    monkeypatch.setattr(engine_states, "MOST_SAVED", 3)
    session, text, sizes = model.session(), random_ids(target, 1, 40, 3), []
    for added in (40, 30, 20):
        text = first_call(model, session, text)
        sizes.append(session.nbytes)
        text = torch.cat([text, random_ids(target, 1, added, added)], 1)
    assert [*session.saved.by_length] == [39, 99, 149]  # and not 59, 119
    copied = copy.deepcopy(session)
    assert copied.nbytes == session.nbytes
    monkeypatch.setattr(engine_states, "MOST_SAVED_BYTES", 0)
    first_call(model, session, text)
    assert not session.saved.layers
    first_call(model, copied, text[:, :120])
    assert model.report.cached_tokens == 99
    session.forget()
    assert session.nbytes == 0


def test_pad_tokens_in_a_text_without_a_mask() -> None:
    """`generate` hides them in a prompt, though they were read as ordinary tokens when they were generated."""
    target, model = pair()
    session, prompt = model.session(), random_ids(target, 1, 12, 3)
    text = first_call(model, session, prompt, pad_token_id=None)
    longer = torch.cat([text, prompt[:, :4]], 1)
    call = CALL | {"pad_token_id": int(text[0, 16])}
    assert model.generate(longer, past_key_values=session, **call).tolist() == target.generate(longer, **call).tolist()


def test_a_copy_of_a_session_knows_its_text() -> None:
    target, model = pair()
    session, prompt = model.session(), random_ids(target, 1, 12, 3)
    new = EDITS["in the middle"](prompt, first_call(model, session, prompt))
    for other in (copy.deepcopy(session), pickle.loads(pickle.dumps(session))):
        assert first_call(model, other, new).tolist() == target.generate(new, **CALL).tolist()


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_session_of_states_alone(name: str) -> None:
    """It does not know how many tokens they have read, so the text is read whole, and the report says so."""
    target = build(ANY[name])
    model = AssistedModelForCausalLM.from_models(target, "suffix", draft_length=3)
    added = turns(3)
    assert talked(model, model.session(), added) == plain_talk(target, added)
    assert "is read whole" in model.report.warnings[0]


@pytest.mark.parametrize("name", ["mpt", "llama"])
@pytest.mark.parametrize("assisted", [True, False])
def test_a_session_of_a_model_whose_config_leaves_caches_out(name: str, assisted: bool) -> None:
    """As MPT's does. Read so, transformers would add the whole text to the cache in every forward pass."""
    target = build(next(architecture for architecture in ARCHITECTURES if architecture.name == name))
    target.generation_config.use_cache = False
    model = AssistedModelForCausalLM.from_models(target, draft="suffix", draft_length=4)
    session, ids = model.session(), random_ids(target, 1, 12)
    for _ in range(2):
        expected = target.generate(ids, **CALL)
        assert model.generate(ids, past_key_values=session, assisted=assisted, **CALL).equal(expected)
        ids = torch.cat([expected, ids[:, :3]], 1)
    with pytest.raises(ValueError, match="use_cache: False leaves a session nothing to keep"):
        model.generate(ids, past_key_values=session, use_cache=False, **CALL)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_beams_in_the_middle_of_a_session(name: str) -> None:
    """transformers repeats no rows of a cache for them: the whole text is read by plain `generate`, and the session goes on."""
    target = build(BY_NAME[name])
    model = AssistedModelForCausalLM.from_models(target, draft="suffix")
    session, call = model.session(), CALL | {"max_new_tokens": 4}
    text = model.generate(random_ids(target, 1, 20), past_key_values=session, **call)
    beams = model.generate(text, past_key_values=session, num_beams=2, **call)
    assert beams.tolist() == target.generate(text, num_beams=2, **call).tolist()
    assert model.generate(text, past_key_values=session, **call).tolist() == target.generate(text, **call).tolist()
    assert model.report is not None and model.report.cached_tokens > 19
