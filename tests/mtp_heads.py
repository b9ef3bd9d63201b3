"""MTP heads for tiny models: random ones, and ones that have learned by heart what a model writes.

For the tests of heads and drafters. Knows the head's module; nothing of drafting.
"""

from __future__ import annotations

import torch
from architectures import made_once
from eagle_heads import features_of, learn, unrolled_loss, written
from transformers import PreTrainedModel

from assisted.methods.mtp.head import MTPHead, SequentialMTP, first_tensors

__all__ = ["random_layers", "random_mtp", "trained_layers", "trained_mtp"]


def random_mtp(target: PreTrainedModel, seed: int = 0, index: int = 0) -> MTPHead:
    """A head of the target's sizes that was never trained. index: of its layer, if there are several."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2:
            return tensor.clone()
        return torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5

    return MTPHead(target, {name: drawn(tensor) for name, tensor in first_tensors(target).items()}, index)


def random_layers(target: PreTrainedModel, number: int = 3, seed: int = 0) -> SequentialMTP:
    """Several layers that were never trained."""
    return SequentialMTP([random_mtp(target, seed + index, index) for index in range(number)])


@made_once
def trained_layers(target: PreTrainedModel, number: int = 3, steps: int = 60) -> SequentialMTP:
    """Layers that have learned by heart what the target writes, each of them one token further ahead."""
    layers = [random_mtp(target, seed=index, index=index) for index in range(number)]
    ids, lengths = written(target)
    features = features_of(target, layers[0], ids)[:, :-1].clone()
    with torch.no_grad():
        embeddings = layers[0].embed(ids[:, 1:], target)
    wanted = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -100)

    def loss_of() -> torch.Tensor:
        states, loss = features, torch.zeros(())
        for ahead, layer in enumerate(layers):
            states = layer(embeddings[:, ahead:], states[:, : embeddings.shape[1] - ahead])
            logits = layer.logits(states[:, :-1], target)
            loss = loss + torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted[:, 2 + ahead :])
        return loss

    learn(target, [p for layer in layers for p in layer.parameters()], loss_of, steps, lr=5e-3)
    return SequentialMTP(layers)


@made_once
def trained_mtp(
    target: PreTrainedModel, steps: int = 30, unrolled: int = 2, seed: int = 0, lr: float = 2e-2, blind: bool = False
) -> MTPHead:
    """A head that has learned by heart what the target writes: most of its drafts there are right.

    blind: to tokens, so that all it knows is in the states.
    """
    head = random_mtp(target, seed)
    head.require_runs()
    ids, lengths = written(target)
    features = features_of(target, head, ids)[:, :-1].clone()
    with torch.no_grad():
        embeddings = head.embed(ids[:, 1:], target)
    wanted = ids.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -100)

    def loss() -> torch.Tensor:
        if blind:
            with torch.no_grad():
                head.fc.weight[:, : head.config.hidden_size] = 0
        return unrolled_loss(head, target, embeddings, features, wanted, unrolled)

    learn(target, head.parameters(), loss, steps, lr=lr)
    if blind:
        with torch.no_grad():
            head.fc.weight[:, : head.config.hidden_size] = 0
    return head
