"""A window over a draft's keys and values: which slots are kept, what is drafted from them, and that they are few."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import drafts_of
from architectures import RECURRENT, build, half_right, random_ids
from block_heads import trained_block
from covering import in_turns, one_in, only
from eagle_heads import random_head, trained_head
from methods import in_parallel
from mtp_heads import trained_layers, trained_mtp
from pairs import BY_NAME, CALL, ENDS, no_fallback, prompt, require_plain, tokenizer
from test_session import plain_talk, talked, turns, written
from transformers import DynamicCache

from assisted import (
    MTP,
    Assistant,
    AssistedModelForCausalLM,
    Combined,
    DFlash,
    DraftModel,
    DraftTree,
    Eagle,
    Medusa,
    NGram,
    Suffix,
)
from assisted.engine.cache import SlotCache
from assisted.engine.session import go_on
from assisted.engine.window import AHEAD, SINKS, dropped_from, holds_end_of, keep_last, slots_for_window
from assisted.methods import Target, parse, read
from assisted.methods.eagle.draft import EagleDrafting
from assisted.methods.shared import model_drafter
from assisted.methods.shared.model_drafter import ModelDrafting
from assisted.methods.shared.registry import windows

__all__ = ["written"]  # a fixture
WINDOW = 8
pytestmark = pytest.mark.usefixtures("invariants")

DRAFTS: dict[str, Any] = {
    "draft model": lambda target: half_right(target),
    "trees": lambda target: DraftTree(half_right(target), nodes=12, beam=4, candidates=4),
    "pard": lambda target: in_parallel(half_right(target)),
    "eagle-1, chains": lambda target: Eagle(trained_head(target, 1), tree=False),
    "eagle-3, trees": lambda target: Eagle(trained_head(target, 3)),
    "p-eagle": lambda target: Eagle(random_head(target, 3, mask_token_id=3)),
    "mtp, chains": lambda target: MTP(trained_mtp(target), tree=False),
    "mtp, trees": lambda target: MTP(trained_mtp(target)),
    "mtp layers, trees": lambda target: MTP(trained_layers(target, steps=30)),
    "dflash, chains": lambda target: DFlash(trained_block(target, steps=30), tree=False),
    "dflash, trees": lambda target: DFlash(trained_block(target, steps=30)),
    "list": lambda target: ["suffix", half_right(target), Eagle(trained_head(target, 3))],
}
SOME = ("draft model", "trees", "eagle-3, trees", "mtp, trees", "dflash, trees", "list")


def filled_cache(lengths: list[int], mask: torch.Tensor | None = None, capacity: int = 64) -> SlotCache:
    """Slots whose keys are 100 * row + slot."""
    cache = SlotCache(len(lengths), capacity)
    rows = torch.arange(len(lengths))[:, None] * 100 + torch.arange(max(lengths))
    states = rows[:, None, :, None].float()
    cache.hide(mask)
    cache.update(states, -states, 0)
    cache.begin_rounds()
    cache.rewind(lengths)
    return cache


def held(cache: SlotCache, row: int) -> list[int]:
    return cache.layers[0].keys[cache.order.index(row), 0, : cache.lengths[row], 0].int().tolist()


def test_the_first_and_the_last_tokens_are_kept() -> None:
    mask = torch.ones(3, 30, dtype=torch.int64)
    mask[1, :20] = 0
    mask[2, :5] = 0
    cache = filled_cache([30, 30, 26], mask)
    cache.run_only([2, 0])  # stored in another order
    positions, known = cache.unpadded, cache.known
    keep_last(cache, WINDOW)
    assert held(cache, 0) == [0, 1, 2, 3, *range(22, 30)]
    assert held(cache, 1) == [*range(120, 130)]  # ten tokens: only the padding is gone
    assert held(cache, 2) == [205, 206, 207, 208, *range(218, 226)]
    assert (cache.layers[0].values == -cache.layers[0].keys).all()
    assert (cache.unpadded, cache.known) == (positions, known)
    assert cache.visible is None and dropped_from(cache) == [18, 20, 14]
    assert cache.capacity == cache.layers[0].keys.shape[2] <= slots_for_window(WINDOW) + AHEAD
    cache.rewind([28, 30, 26])
    assert held(cache, 0)[-1] == 27 and cache.unpadded == [28, *positions[1:]]


def test_slots_are_dropped_in_steps() -> None:
    most = slots_for_window(WINDOW)
    assert most == SINKS + WINDOW + WINDOW // 4
    for length, left in ((most, most), (most + 1, SINKS + WINDOW)):
        cache = filled_cache([length])
        keep_last(cache, WINDOW)
        assert cache.lengths == [left]
    cache = filled_cache([40])
    keep_last(cache, None)
    assert cache.lengths == [40] and cache.limit == 64


def test_memory_shrinks_once_and_slots_then_stay_in_place() -> None:
    cache = filled_cache([1500], capacity=4000)
    keep_last(cache, WINDOW)
    assert cache.layers[0].keys.shape[2] == cache.capacity == cache.limit == slots_for_window(WINDOW) + AHEAD
    store = cache.layers[0].keys
    cache.place(5, torch.device("cpu"))
    cache.update(*(torch.full((1, 1, 5, 1), 7.0) for _ in range(2)), 0)
    cache.commit([5])
    keep_last(cache, WINDOW)
    assert cache.layers[0].keys is store and held(cache, 0) == [0, 1, 2, 3, 1497, 1498, 1499, *[7] * 5]


def test_what_holds_the_end_of_a_text() -> None:
    cache = filled_cache([30])
    assert holds_end_of(cache, 3)
    keep_last(cache, WINDOW)
    assert holds_end_of(cache, 23) and not holds_end_of(cache, 22)
    go_on(cache, 25, 64)
    assert cache.known == [25] and held(cache, 0) == [0, 1, 2, 3, 22, 23, 24]


# ---- what is drafted


@pytest.mark.parametrize("parallel", [False, True])
@torch.no_grad()
def test_a_draft_comes_from_the_tokens_that_are_kept(parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round, the draft alone gives the same tokens if a mask shows each token what it saw when it was read, with the
    positions of the text."""
    target = build(BY_NAME["llama"])
    draft = in_parallel(half_right(target)) if parallel else half_right(target)
    model = AssistedModelForCausalLM.from_models(target, draft, draft_length=3, draft_window=WINDOW)
    drafts = drafts_of(monkeypatch, ModelDrafting)
    ids = prompt(length=20)["ids"]
    with no_fallback():
        model.generate(ids, **CALL | {"max_new_tokens": 50})
    seen = [(rows[0], proposed) for rows, _, proposed, _ in drafts]
    size, (first, _) = len(seen[-1][0]) + 3, seen[0]
    visible = torch.ones(size, size, dtype=torch.bool).tril()  # the prompt sees itself
    kept, known = list(range(len(first))), len(first)
    for tokens, proposed in seen:
        known = min(known, len(tokens) - 1)  # the last one is read again
        kept = [column for column in kept if column < known]
        if len(kept) > slots_for_window(WINDOW):
            kept = kept[:SINKS] + kept[-WINDOW:]
        for row in range(known, size):
            visible[row, : row + 1] = False
            visible[row, [*kept, *range(known, row + 1)]] = True
        if parallel:
            ids = torch.tensor([[*tokens, *[3] * (proposed.width - 1)]])
        else:
            ids = torch.tensor([[*tokens, *proposed.tokens[0, :-1].tolist()]])
        end = ids.shape[1]
        logits = draft(ids, attention_mask=visible[None, None, :end, :end]).logits[0, len(tokens) - 1 :]
        assert proposed.tokens[0].tolist() == logits.argmax(-1).tolist()
        kept += range(known, len(tokens))
        known = len(tokens)
        if not parallel:  # accepted tokens stay, and they have seen the same
            kept += range(known, known + proposed.width - 1)
            known += proposed.width - 1
    assert len(kept) <= slots_for_window(WINDOW) + 8 < len(seen[-1][0])


@pytest.mark.parametrize("draft", ["eagle-1, chains", "eagle-3, chains", "mtp, chains", "dflash, chains"])
@torch.no_grad()
def test_heads_draft_from_what_is_kept(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the first token of each draft of a head, and for all tokens of a block."""
    target = build(BY_NAME["llama"])
    with torch.enable_grad():  # to train it
        spec = DRAFTS[draft.replace("eagle-3, chains", "eagle-3, trees")](target)
    spec = replace(spec, tree=False)
    model = AssistedModelForCausalLM.from_models(target, spec, draft_length=3, draft_window=WINDOW)
    drafts, head = drafts_of(monkeypatch, EagleDrafting), model.drafter.head
    with no_fallback():
        model.generate(prompt(length=20)["ids"], **CALL | {"max_new_tokens": 50})
    seen = [(rows[0], proposed) for rows, _, proposed, _ in drafts]
    size = len(seen[-1][0])
    visible, kept, known = torch.zeros(size, size, dtype=torch.bool), [], 0
    for tokens, proposed in seen:
        columns = len(tokens) - 1  # the last token has no state
        if len(kept) > slots_for_window(WINDOW):
            kept = kept[:SINKS] + kept[-WINDOW:]
        for column in range(known, columns):
            visible[column, [*kept, *range(known, column + 1)]] = True
        kept, known = [*kept, *range(known, columns)], columns
        ids = torch.tensor([tokens])
        states = target(ids, output_hidden_states=True).hidden_states
        fused = head.fuse(torch.cat([states[tap][:, :-1] for tap in head.config.taps], -1))
        if draft.startswith("dflash"):
            expected = block_after(head, target, fused, kept, tokens[-1])[: proposed.width]
        else:
            mask = visible[None, None, :columns, :columns]
            made = head(head.embed(ids[:, 1:], target), fused, torch.arange(columns)[None], mask)
            expected = [int(head.logits(made[:, -1], target).argmax(-1))]
        assert proposed.tokens[0, : len(expected)].tolist() == expected
    assert len(kept) <= slots_for_window(WINDOW) + 4 < known


def block_after(head: Any, target: Any, states: torch.Tensor, kept: list[int], anchor: int) -> list[int]:
    """The top-1 tokens of a block after a text of which these columns are kept."""
    cache, columns = DynamicCache(), torch.tensor([kept])
    head.remember(states[:, kept], columns, cache)
    rows = states.shape[1] + torch.arange(head.config.block_size)[None]
    masks = head.masks(
        torch.ones(1, 1, len(kept) + rows.shape[1], dtype=torch.bool),
        torch.cat([columns, rows], 1)[:, None] - rows[:, :, None],
    )
    made = head(head.embed_block(head.block_ids(torch.tensor([[anchor]])), target), rows, masks, cache)
    found: list[int] = head.logits(made[:, head.config.first_row :], target)[0].argmax(-1).tolist()
    return found


@pytest.mark.parametrize(("draft", "fast"), only(in_turns(list(DRAFTS), ["auto", "eager"]), SOME))
def test_texts_are_plain_and_slots_few(draft: str, fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(
        target, DRAFTS[draft](target), draft_length=3, draft_window=WINDOW, fast=fast
    )
    caches: dict[int, SlotCache] = {}
    longest: list[int] = []

    def watched(cache: SlotCache, window: int | None) -> None:
        caches[id(cache)] = cache
        keep_last(cache, window)
        longest.append(max(cache.lengths))

    monkeypatch.setattr(model_drafter, "keep_last", watched)
    monkeypatch.setattr("assisted.methods.shared.runner.keep_last", watched)
    for rows in (1, 3):
        inputs = prompt(rows, 40)
        kwargs = CALL | {"attention_mask": inputs["attention_mask"], "max_new_tokens": 60}
        kwargs["eos_token_id"] = ENDS if rows > 1 else None
        require_plain(model, inputs["ids"], **kwargs)
    assert longest and max(longest) <= slots_for_window(WINDOW)
    assert all(cache.capacity <= slots_for_window(WINDOW) + AHEAD + 32 for cache in caches.values())
    if draft != "p-eagle":
        assert model.totals.accepted > 0


@pytest.mark.parametrize("draft", one_in(2, ["draft model", "pard", "eagle-3, trees", "mtp, chains", "dflash, chains"]))
def test_turns_of_a_session_go_on_from_what_is_kept(draft: str, written: Any) -> None:
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=3, draft_window=WINDOW)
    added, session = turns(), model.session()
    talked(model, session, added)  # at first, faster forms of the models are compared with the models
    session = model.session()
    written.clear()
    with no_fallback():
        assert talked(model, session, added) == plain_talk(target, added)
    assert len(written) == 2  # of the target and of the draft, for the whole talk
    edited = torch.cat([random_ids(target, 1, 12, seed=5), added[0]], 1)  # another text: what is missing is read anew
    assert model.generate(edited, past_key_values=session, **CALL).tolist() == target.generate(edited, **CALL).tolist()


def test_drafting_goes_on_until_the_context_ends() -> None:
    """Positions are those of the text, so the context ends where it ended without a window; and no position is after it."""
    target = build(BY_NAME["gpt2"], n_positions=64)
    ids = random_ids(target, 2, 20, seed=3)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    counts = []
    for window in (None, WINDOW):
        model = AssistedModelForCausalLM.from_models(target, copy.deepcopy(target), draft_length=5, draft_window=window)
        require_plain(model, ids, attention_mask=mask, **CALL | {"max_new_tokens": 44})
        assert model.report is not None
        counts.append(model.report.drafted)
    assert counts[1] >= 0.9 * counts[0]


# ---- as it is given, saved and refused


def test_where_a_window_is_given(tmp_path: Path) -> None:
    assert parse("./a/b", window=64) == DraftModel("./a/b", draft_window=64)
    assert parse("eagle:a", window=64) == Eagle("a", draft_window=64)
    assert parse("dflash:a", window=64) == DFlash("a", draft_window=64)
    assert parse("mtp", window=64) == MTP(draft_window=64)
    listed = parse(["suffix", "./a/b", ["ngram", "mtp"]], window=64)
    inner = Combined((NGram(), MTP(draft_window=64)))
    assert listed == Combined((Suffix(), DraftModel("./a/b", draft_window=64), inner))
    for spec in (DraftModel("./a", draft_window=64), Eagle("./a", draft_window=64), MTP("./a", draft_window=64)):
        assert read(spec.written("draft"), tmp_path).draft_window == 64  # type: ignore[attr-defined]


def test_a_window_for_several_drafts_is_that_of_those_that_have_one() -> None:
    assert windows(["suffix", "./a/b", ["ngram", "mtp"], "self:int8"], 64) == [None, 64, 64, None]
    assert windows(["suffix", "mtp"], None) == [None, None]
    assert windows(["suffix"], 64) == [64]  # an error when it is loaded
    assert windows(["suffix", "ngram:0"], 64) == [None, 64]  # the same
    with pytest.raises(ValueError, match="draft_window: 64 is not possible, as no draft keeps keys and values"):
        windows(["suffix", "ngram"], 64)


def test_a_saved_pair_keeps_its_window(tmp_path: Path) -> None:
    target = build(BY_NAME["llama"])
    for name, draft in enumerate((half_right(target), Eagle(trained_head(target, 3)))):
        pair = AssistedModelForCausalLM.from_models(target, draft, draft_window=WINDOW)
        pair.save_pretrained(tmp_path / str(name))
        assert AssistedModelForCausalLM.from_pretrained(tmp_path / str(name)).drafter.window == WINDOW


def test_what_has_no_window_is_refused() -> None:
    target = build(BY_NAME["llama"])
    recurrent = build(next(one for one in RECURRENT if one.name == "qwen3_5"))
    for draft, said in (
        ("suffix", "as Suffix keeps no keys and values of its own"),
        ("early-exit", "as EarlyExit keeps no"),
        ("self:int8", "as QuantizedSelf keeps no"),
        ("auto", "as Auto keeps no"),
        (Medusa("./a"), "as Medusa keeps no"),
        (Assistant("./a"), "as Assistant keeps no"),
        (["suffix", "ngram"], "as Combined keeps no"),
        (build(BY_NAME["bloom"]), "as this draft takes no 4-D masks"),
        (recurrent, "as this draft has recurrent states"),
    ):
        with pytest.raises(ValueError, match=rf"draft_window: 8 is not possible, {said}"):
            AssistedModelForCausalLM.from_models(target, draft, draft_window=WINDOW)
    other = DraftModel(half_right(target), tokenizer=tokenizer(first="A"), draft_window=WINDOW)
    with pytest.raises(ValueError, match="this draft has another tokenizer"):
        other.load(Target(target, tokenizer()))
    for kind in (DraftModel, Eagle, DFlash, MTP):
        with pytest.raises(ValueError, match="draft_window: 0 is not possible"):
            kind("a", draft_window=0)
