"""Greedy decoding: token for token what plain `generate` says, in float32, over all architectures."""

import pytest
import torch
from architectures import ARCHITECTURES, VOCABULARY, build, half_right, random_ids
from covering import each_once, over
from made_tokenizers import characters
from pairs import ENDS, no_fallback, padded, said_by

from assisted import AssistedModelForCausalLM
from assisted.core import host as clock
from assisted.core.drafts import DraftingStopped
from assisted.engine.prepared import CallSettings

NEW_TOKENS = 24
WINDOW_CROSSING = (5, 20)  # prompt lengths against the windows of 8 tokens


pytestmark = pytest.mark.usefixtures("invariants")


DRAFTS = {
    "itself": lambda architecture, target: target,
    "random": lambda architecture, target: build(architecture, seed=7),
}


def both(target, model, ids, draft_length=4, **kwargs):
    """The same call, plainly and assisted; any fallback to plain decoding is an error."""
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True, "pad_token_id": 0} | kwargs
    plain = said_by(target, ids, **kwargs)
    with no_fallback(DraftingStopped):
        return plain, model.generate(ids, draft_length=draft_length, **kwargs)


@over("architecture,draft", ARCHITECTURES, list(DRAFTS), also=each_once)
def test_every_token_right_or_none_equals_plain(architecture, draft):
    """One row, shorter than a window and longer, and padded rows that end apart. What is half right is in test_methods.py."""
    target = build(architecture)
    assisted = AssistedModelForCausalLM.from_models(target, draft=DRAFTS[draft](architecture, target))
    for length in WINDOW_CROSSING if architecture.masks != "4d" else WINDOW_CROSSING[:1]:
        plain, ours = both(target, assisted, random_ids(target, 1, length, seed=length), eos_token_id=None)
        assert ours.tolist() == plain.tolist()
        assert assisted.report.new_tokens == NEW_TOKENS
        # rounding between passes of different widths may cost a token, no more
        assert draft != "itself" or assisted.report.tokens_per_pass > 3.5
    ids, mask = padded(target)
    plain, ours = both(target, assisted, ids, attention_mask=mask, eos_token_id=ENDS)
    assert ours.tolist() == plain.tolist()
    assert draft != "itself" or assisted.report.accepted > 0


@pytest.mark.parametrize("draft_length", [1, 2, 7, "confidence"])
def test_the_draft_length_changes_nothing(draft_length):
    target = build(ARCHITECTURES[0])
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    ids, mask = padded(target)
    plain, ours = both(target, model, ids, draft_length, attention_mask=mask, eos_token_id=None, max_new_tokens=60)
    assert ours.tolist() == plain.tolist()


def test_tokens_that_the_draft_lacks_are_never_drafted():
    """Even if the draft's logits of all its own tokens are below zero."""
    size = VOCABULARY - 8
    target, draft = build(ARCHITECTURES[0]), build(ARCHITECTURES[0], vocab_size=size)
    draft.lm_head = torch.nn.Linear(draft.config.hidden_size, size)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
        draft.lm_head.bias.copy_(-torch.arange(1.0, 1 + size))
    tokenizers = {"tokenizer": characters(), "draft_tokenizer": characters()}
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3, **tokenizers)
    drafted = []
    model.watch = lambda round: drafted.extend(round.draft.tokens.flatten().tolist())
    model.generate(random_ids(target, 1, 7), max_new_tokens=12, do_sample=False)
    assert drafted and max(drafted) < size


def test_a_draft_counts_what_its_drafter_has_learned_before(monkeypatch):
    """The policy would otherwise believe that drafts cost less than they do."""
    now = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    watch = clock.Stopwatch(CallSettings())
    watch.start()
    for step in (1, 5):
        now[0] += step
        watch.lap()
    assert watch.laps() == [1, 5]
    now[0] += 3  # the drafter learns
    watch.start(watch.since())
    for step in (1, 5):
        now[0] += step
        watch.lap()
    assert watch.laps() == [4, 5]
