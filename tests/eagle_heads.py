"""EAGLE heads for tiny models: random ones, and ones that have learned by heart what a model writes.

For the tests of heads and drafters. Knows the head's module; nothing of drafting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from alone import one_and_four
from architectures import made_once
from transformers import DynamicCache, PreTrainedModel

from assisted.engine.recurrent import slots_for, target_runner
from assisted.engine.traits import Traits
from assisted.methods.eagle.draft import needs_of
from assisted.methods.eagle.head import EagleConfig, EagleHead
from assisted.methods.shared.training.masks import unrolled_mask

__all__ = ["NEW", "features_of", "learn", "random_head", "trained_head", "unrolled_loss", "written"]

NEW = 26  # tokens that a target writes after each prompt


def random_head(target: PreTrainedModel, version: int = 3, seed: int = 0, **fields: Any) -> EagleHead:
    """A head of the target's sizes; with fewer draft tokens than the target has, every other one from 3 on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(EagleConfig.for_target(target, version, **fields)).eval()
    if head.d2t is not None:
        size = head.config.vocab_size
        head.draft_tokens = torch.arange(size)[-2 * len(head.d2t) + 1 :: 2]
    return head


_known_needs = functools.lru_cache(maxsize=4)(needs_of)


@torch.no_grad()
def features_of(target: PreTrainedModel, head: EagleHead, ids: torch.Tensor) -> torch.Tensor:
    """What a head goes on from, [B, n, F], of a text that is not padded."""
    masks = Traits.of(target).masks
    slots = slots_for(target, None, len(ids), ids.shape[1], masks)
    model = target_runner(target, slots, masks, _known_needs(head, target))
    model.prefill(ids, None)
    return torch.cat([model.states[tap] for tap in head.config.taps], -1)


@made_once
def written(target: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What a target writes, greedily, after the prompts of test_methods: ids [B, n] int64, and how many count in each row, of
    which the last `NEW` were written."""
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    texts: list[torch.Tensor] = []
    for inputs in one_and_four(target):
        made, pads = target.generate(**inputs, **kwargs), (1 - inputs["attention_mask"]).sum(1).tolist()
        texts += [row[hidden:] for row, hidden in zip(made, pads, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return ids, torch.tensor([len(text) for text in texts])


def learn(
    target: PreTrainedModel,
    parameters: Iterable[torch.Tensor],
    loss_of: Callable[[], torch.Tensor],
    steps: int,
    lr: float,
) -> None:
    """Steps of Adam over parameters of a head. The target's gradients are dropped."""
    optimizer = torch.optim.Adam(parameters, lr=lr, fused=True)
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameter in target.parameters():
        parameter.grad = None


def unrolled_loss(
    head: Any,
    target: PreTrainedModel,
    embeddings: torch.Tensor,
    states: torch.Tensor,
    wanted: torch.Tensor,
    unrolled: int,
) -> torch.Tensor:
    """Of `unrolled` steps of a head over its own states. embeddings, states: [B, n, H]. wanted: [B, n + 1], or -100."""
    cache, columns, loss = DynamicCache(), states.shape[1], torch.zeros(())
    for step in range(unrolled):
        positions = torch.arange(step, columns + step)[None]
        states = head(embeddings.roll(-step, 1), states, positions, unrolled_mask(columns, step), cache)
        logits = head.logits(states[:, : columns - 1 - step], target)
        loss = loss + torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted[:, 2 + step :])
    return loss


@made_once
def trained_head(
    target: PreTrainedModel, version: int = 3, steps: int = 30, unrolled: int = 2, seed: int = 0, **fields: Any
) -> EagleHead:
    """A head that has learned by heart what the target writes: most of its drafts there are right."""
    head = random_head(target, version, seed, **fields)
    ids, lengths = written(target)
    features = features_of(target, head, ids)[:, :-1].clone()
    with torch.no_grad():
        embeddings = head.embed(ids[:, 1:], target)
    known = torch.full((head.config.vocab_size,), -100)
    known[head.draft_tokens] = torch.arange(len(head.draft_tokens))
    wanted = known[ids].masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -100)

    def loss() -> torch.Tensor:
        return unrolled_loss(head, target, embeddings, head.fuse(features), wanted, unrolled)

    learn(target, head.parameters(), loss, steps, lr=2e-2)
    return head
