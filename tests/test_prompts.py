"""Prompts of different lengths are read in groups: the least work there is, and the same text."""

import itertools

import pytest
import torch
from architectures import ARCHITECTURES, random_ids
from covering import over
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_heads import knowing_what_follows as knowing
from methods import eagle_3
from pairs import CALL, ROUNDING, no_fallback, pair, said_by

from assisted import AssistedModelForCausalLM, Eagle, Medusa, decoding
from assisted.engine import passes as prompts
from assisted.engine.cache import SlotCache
from assisted.engine.passes import groups
from assisted.engine.runner import CachedModel
from assisted.engine.traits import Traits
from assisted.fast import fused

CPU = torch.device("cpu")


def padded(lengths, width):
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


@pytest.fixture
def _apart(monkeypatch):
    """Every length is a group of its own."""
    monkeypatch.setattr(prompts, "_PRICE_CPU", 0)
    monkeypatch.setattr(decoding, "CHECK_INVARIANTS", True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_no_other_groups_are_less_work(lengths, price):
    """Against every way to cut the sorted rows into passes."""
    rows, width = list(range(len(lengths))), 9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "_PRICE_CPU", price)
        found = groups(padded(lengths, width), rows, CPU)
    assert sorted(row for of_group, _ in found for row in of_group) == rows
    for of_group, first in found:
        assert of_group == sorted(of_group) and width - first == max(lengths[row] for row in of_group)
    if len(rows) == 1:
        return
    ordered = sorted(lengths)
    ways = (
        [0, *cuts, len(ordered)]
        for count in range(len(ordered))
        for cuts in itertools.combinations(range(1, len(ordered)), count)
    )
    least = min(sum(price + (b - a) * ordered[b - 1] for a, b in itertools.pairwise(cuts)) for cuts in ways)
    assert sum(price + len(of_group) * (width - first) for of_group, first in found) == least


def test_some_rows_of_a_batch():
    visible = padded([4, 8, 5, 8], 9)
    assert groups(None, [0, 2], CPU) == [([0, 2], 0)]
    assert groups(visible, [2], CPU) == [([2], 4)]
    assert groups(visible, [0, 2, 3], CPU) == [([0, 2, 3], 1)]  # a pass is dearer than a few columns
    long = padded([40, 800, 50, 800], 900)
    assert sorted(groups(long, [0, 1, 2, 3], CPU)) == [([0, 2], 850), ([1, 3], 100)]


def test_rows_of_padding_alone_and_holes():
    visible = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)
    assert groups(visible, [0], CPU) == [([0], 3)]
    assert groups(visible, [0, 1], CPU) == [([0, 1], 1)]


def ragged(target, rows=4, width=14):
    ids, mask = random_ids(target, rows, width, seed=9), torch.ones(rows, width, dtype=torch.int64)
    for row, missing in enumerate((5, 0, 9, 5)):
        mask[row, :missing] = 0
    return {"input_ids": ids, "attention_mask": mask}


@over("architecture", ARCHITECTURES)
def test_a_batch_says_what_plain_says(architecture, _apart):
    target, model = pair(architecture.name)
    inputs = ragged(target)
    with no_fallback():
        output = model.generate(**inputs, **CALL, use_cache=True)
    assert output.tolist() == said_by(target, **inputs, **CALL, use_cache=True).tolist()


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_trained_heads_see_the_whole_prompt(kind, _apart, monkeypatch):
    """The same drafts, whether rows are read apart or together."""
    target = pair()[0]
    # chains: the size of a tree that pays depends on time
    spec = Eagle(eagle_3(target).path, tree=False) if kind == "eagle" else Medusa(knowing(target), tree=False)
    model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=3)
    reports = []
    for price in (0, 10**6):
        monkeypatch.setattr(prompts, "_PRICE_CPU", price)
        output = model.generate(**ragged(target), **CALL)
        assert output.tolist() == said_by(target, **ragged(target), **CALL).tolist()
        reports.append(model.report.acceptance_by_position)
    assert reports[0] == reports[1]


def test_in_chunks_and_behind_a_past(_apart):
    target, model = pair()
    inputs = ragged(target)
    expected = said_by(target, **inputs, **CALL).tolist()
    assert model.generate(**inputs, **CALL, prefill_chunk_size=3).tolist() == expected
    first = model.generate(**inputs, **(CALL | {"max_new_tokens": 4}), return_dict_in_generate=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, 4, dtype=torch.int64)], 1)
    on = {"input_ids": first.sequences, "attention_mask": mask} | CALL | {"max_new_tokens": 16}
    assert model.generate(**on, past_key_values=first.past_key_values).tolist() == expected


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.no_grad()
def test_nobody_computes_padding_or_what_nobody_reads(name, _apart, monkeypatch):
    """Columns of the layers' MLPs: those of each row's own tokens; of the last layer one a row."""
    target = pair(name)[0]
    form, inputs = fused.fused(target), ragged(target)
    model = form.module
    assert model is not target
    seen: dict[int, int] = {}
    for number, layer in enumerate(model.model.layers):
        product = layer.gate_up.raw

        def counted(normed, number=number, product=product):
            seen[number] = seen.get(number, 0) + normed.shape[:-1].numel()
            return product(normed)

        monkeypatch.setattr(layer.gate_up, "raw", counted)
    runner = CachedModel(form, SlotCache(4, 20), Traits.of(model).masks)
    logits = runner.prefill(inputs["input_ids"], inputs["attention_mask"])
    last = len(model.model.layers) - 1
    tokens = int(inputs["attention_mask"].sum())
    assert seen == {number: 4 if number == last else tokens for number in range(last + 1)}
    assert torch.allclose(logits, target(**inputs).logits[:, -1:], atol=ROUNDING)
