"""The tiny models are worth testing on, and take the masks and positions that their entries claim."""

from __future__ import annotations

import inspect

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, REFUSED, Architecture, agreement, build, half_right, random_ids
from covering import cases
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from assisted.engine.libraries import DummyLayer

ROUNDING = 1e-4  # float32 sums in another order, on logits of about 3
PAST, NEW = 20, 4  # beyond every window
CHAIN = [-1, 0, 1, 2]
TREE = [-1, 0, 0, 2]  # a root, its two children, a child of the second


@pytest.fixture(scope="module", params=cases(ARCHITECTURES))
def case(request: pytest.FixtureRequest) -> tuple[Architecture, PreTrainedModel]:
    return request.param, build(request.param)


def test_greedy_text_varies(case: tuple[Architecture, PreTrainedModel]) -> None:
    _, model = case
    ids = random_ids(model, rows=6, length=10, seed=3)
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    distinct = [len(set(row[10:].tolist())) for row in text]
    assert sum(distinct) / len(distinct) > 6


def test_same_seed_same_weights(case: tuple[Architecture, PreTrainedModel]) -> None:
    architecture, model = case
    again, other = build(architecture), build(architecture, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_half_right_is_independent_and_half_right(case: tuple[Architecture, PreTrainedModel]) -> None:
    _, model = case
    before = [weight.clone() for weight in model.parameters()]
    other = half_right(model)
    assert 0.2 < agreement(model, other, seed=77) < 0.95
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(model.parameters(), other.parameters(), strict=True))


@torch.no_grad()
def test_masks(case: tuple[Architecture, PreTrainedModel]) -> None:
    """Four new nodes, over a cache where two slots of the second row are dead, have the logits of their paths alone."""
    architecture, model = case
    if architecture.masks == "2d":
        pytest.skip("takes no 4-D mask")
    ids = random_ids(model, rows=2, length=PAST + NEW, seed=5)
    used = torch.tensor([PAST, PAST - 2])
    for parents in (CHAIN, TREE):
        above = _ancestors(parents)  # [n, n]
        queries = used[:, None] + above.sum(-1) - 1  # [B, n] logical positions
        keys = torch.cat([torch.arange(PAST).expand(2, -1), queries], dim=1)  # [B, kv] likewise
        alive = torch.arange(PAST) < used[:, None]
        visible = torch.cat([alive[:, None].expand(-1, NEW, -1), above.expand(2, -1, -1)], dim=-1)  # [B, n, kv]

        cache = DynamicCache()
        model(ids[:, :PAST], past_key_values=cache, use_cache=True)
        mask = _mask(architecture, model, visible, queries, keys)
        logits = model(ids[:, PAST:], attention_mask=mask, position_ids=queries, past_key_values=cache).logits
        for row, node in torch.cartesian_prod(torch.arange(2), torch.arange(NEW)).tolist():
            path = torch.cat([ids[row, : used[row]], ids[row, PAST:][above[node]]])
            alone = model(path[None]).logits[0, -1]
            assert (logits[row, node] - alone).abs().max() < ROUNDING


@torch.no_grad()
def test_padding_mask(case: tuple[Architecture, PreTrainedModel]) -> None:
    """A padded row continued from its cache under the 2-D mask has the logits of the row alone, for every model."""
    _, model = case
    ids = random_ids(model, rows=1, length=PAST + NEW, seed=5)
    alone = model(ids).logits[:, PAST:]
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 2).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    logits = None
    for past, until in ((0, PAST + 2), (PAST + 2, PAST + 2 + NEW)):
        where = {"position_ids": positions[:, past:until]} if _takes(model, "position_ids") else {}
        logits = model(padded[:, past:until], attention_mask=mask[:, :until], past_key_values=cache, **where).logits
    assert (logits - alone).abs().max() < ROUNDING


@torch.no_grad()
def test_positions(case: tuple[Architecture, PreTrainedModel]) -> None:
    architecture, model = case
    ids = random_ids(model, rows=1, length=10)
    honoured = False
    if _takes(model, "position_ids"):
        spread = model(ids, position_ids=3 * torch.arange(10)[None] + 1).logits
        honoured = bool((spread - model(ids).logits).abs().max() > 10 * ROUNDING)
    assert honoured == architecture.positions


def test_logits_to_keep(case: tuple[Architecture, PreTrainedModel]) -> None:
    assert _takes(case[1], "logits_to_keep")


def test_cache_holds_keys_and_values_only(case: tuple[Architecture, PreTrainedModel]) -> None:
    assert not _keeps_more(case[1])


@pytest.mark.parametrize("architecture", RECURRENT + REFUSED, ids=lambda architecture: architecture.name)
def test_other_caches_hold_more(architecture: Architecture) -> None:
    model = build(architecture)
    ids = random_ids(model, rows=1, length=10)
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    assert text.shape[1] > ids.shape[1]
    assert _keeps_more(model)


def _keeps_more(model: PreTrainedModel) -> bool:
    if model._is_stateful:  # some of these bring a cache of their own
        return True
    plain = {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}
    return any(type(layer) not in plain for layer in DynamicCache(config=model.config).layers)


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _ancestors(parents: list[int]) -> Tensor:
    """[n, n] bool: whether node j is node i or above it."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] |= above[parent]
    return above


def _mask(
    architecture: Architecture, model: PreTrainedModel, visible: Tensor, queries: Tensor, keys: Tensor
) -> Tensor | dict[str, Tensor]:
    """What the entry's `masks` says: visible [B, n, kv] bool, queries [B, n] and keys [B, kv] logical positions."""
    config = model.config.get_text_config()
    distance = queries[:, :, None] - keys[:, None, :]
    kinds = {"full_attention": visible}
    if (window := getattr(config, "sliding_window", None)) is not None:
        kinds["sliding_attention"] = visible & (distance < window)
    if (chunk := getattr(config, "attention_chunk_size", None)) is not None:
        kinds["chunked_attention"] = visible & (queries[:, :, None] // chunk == keys[:, None, :] // chunk)
    masks = {kind: mask[:, None] for kind, mask in kinds.items()}
    if architecture.attention == "eager":
        lowest = torch.finfo(model.dtype).min
        masks = {kind: torch.zeros(mask.shape).masked_fill(~mask, lowest) for kind, mask in masks.items()}
    if architecture.masks == "dict":
        return {kind: masks[kind] for kind in set(config.layer_types)}
    return masks["sliding_attention" if architecture.masks == "window" else "full_attention"]
