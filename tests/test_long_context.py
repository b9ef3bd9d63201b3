"""What must not wait for, or grow with, a long prompt: the first token, and what a round of the cheap drafters looks at."""

import pytest
import torch
from architectures import build, half_right, random_ids
from pairs import BY_NAME, CALL, no_fallback, pair
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.streamers import BaseStreamer

from assisted import AssistedModelForCausalLM
from assisted.engine import trust
from assisted.methods import ModelDrafter
from assisted.methods.ngram import NGramIndex
from assisted.methods.suffix.tree import SuffixTree

SHORT, LONG = 50, 400


class Events(BaseStreamer):
    """What happened in turn: tokens that came out, and the draft's prompt."""

    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append("prompt" if value.numel() > 1 else "token")

    def end(self):
        self.seen.append("end")


@pytest.fixture
def events(monkeypatch):
    """Notes when a draft model begins to read."""
    found = Events()
    runner = ModelDrafter.runner

    def noted(self, *args):
        found.seen.append("draft reads")
        return runner(self, *args)

    monkeypatch.setattr(ModelDrafter, "runner", noted)
    return found


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_first_token_does_not_wait_for_the_draft(events, do_sample):
    target, model = pair()
    ids = random_ids(target, 1, 12, 0)
    with no_fallback():
        model.generate(ids, streamer=events, attention_mask=torch.ones_like(ids), **(CALL | {"do_sample": do_sample}))
    assert events.seen[:3] == ["prompt", "token", "draft reads"]
    assert events.seen.count("draft reads") == 1


def long_target():
    return build(BY_NAME["llama"], max_position_embeddings=2 * LONG)


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_a_text_is_read_once(monkeypatch, draft):
    """Every token goes into the index once, whatever was read before."""
    kind = NGramIndex if draft == "ngram" else SuffixTree
    append, count = kind.append, 0

    def counted(self, token):
        nonlocal count
        count += 1
        append(self, token)

    monkeypatch.setattr(kind, "append", counted)
    target = long_target()
    model = AssistedModelForCausalLM.from_models(target, draft, 4)
    for length in (SHORT, LONG):
        ids, count = random_ids(target, 1, length, 0), 0
        with no_fallback():
            model.generate(ids, attention_mask=torch.ones_like(ids), **CALL)
        assert length < count <= length + CALL["max_new_tokens"]


class Read(TorchDispatchMode):
    """Adds up the numbers of tensors of ids that operations read or write."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name not in ("slice", "select", "detach", "view", "unsqueeze", "t", "transpose", "expand", "as_strided"):
            self.numbers += sum(a.numel() for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.int64)
        return result


@pytest.mark.parametrize("draft", ["ngram", "suffix", "draft model"])
def test_a_round_looks_at_new_ids_alone(draft, monkeypatch):
    monkeypatch.setattr(trust, "active_modes", list)  # this one only counts
    target = long_target()
    model = AssistedModelForCausalLM.from_models(target, half_right(target) if draft == "draft model" else draft, 4)
    each = []
    for length in (SHORT, LONG):
        ids = random_ids(target, 1, length, 0)
        read = []
        for new in (2, 2, 26):  # once to have made what is made once
            with Read() as mode, no_fallback():
                model.generate(ids, attention_mask=torch.ones_like(ids), **(CALL | {"max_new_tokens": new}))
            read.append(mode.numbers)
        each.append((read[2] - read[1]) / model.report.target_passes)
    # masks are made of the places of all slots; nothing else may be as long as the text
    assert each[1] - each[0] < 4 * (LONG - SHORT)
