"""Assistants for tiny models: random ones, and ones that have learned by heart what a model writes.

For the tests of heads and drafters. Knows the head's module; nothing of drafting.
"""

from __future__ import annotations

from typing import Any

import torch
from architectures import Architecture, build, made_once, tiny
from eagle_heads import NEW, learn, written
from transformers import PreTrainedModel

from assisted.engine.needs import Needs
from assisted.engine.recurrent import slots_for, target_runner
from assisted.engine.traits import Traits
from assisted.methods.assistant.head import AssistantHead, Keys, fields_for

__all__ = ["gemma4", "keys_of", "random_assistant", "trained_assistant"]

KINDS = ["sliding_attention", "full_attention"]


def gemma4(shared: int = 0, **fields: Any) -> PreTrainedModel:
    """A tiny Gemma 4 of four layers that keep keys and values, and of others that share theirs; the window is 8 tokens, and
    heads of full attention are larger."""
    layers = 4 + shared
    sizes = {
        "tie_word_embeddings": False,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": layers,
        "num_kv_shared_layers": shared,
        "sliding_window": 8,
        "global_head_dim": 16,
        "layer_types": KINDS * (layers // 2),
    }
    return build(Architecture(f"gemma4-{shared}", lambda **more: tiny("gemma4_text", **(sizes | fields | more))))


def random_assistant(target: PreTrainedModel, seed: int = 0, centroids: bool = False, **sizes: int) -> AssistantHead:
    """An assistant of the form that was published, four layers half as wide as the target, that was never trained."""
    sizes = {"layers": 4, "hidden_size": 24, "intermediate_size": 48, **sizes}
    fields = fields_for(target, **sizes)
    if centroids:
        fields |= {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = AssistantHead(target, fields, None)
        if centroids:
            head.masked_embedding.token_ordering.copy_(torch.randperm(head.config.vocab_size))
    return head


@torch.no_grad()
def keys_of(
    target: PreTrainedModel, head: AssistantHead, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The target's last states, [B, n, Hb], and keys and values, by type of layer, of a text that is not padded."""
    masks, count = Traits.of(target).masks, ids.shape[1]
    slots = slots_for(target, None, len(ids), count, masks)
    model = target_runner(target, slots, masks, Needs.of_states(target, -1))
    model.prefill(ids[:, :1], None)
    states = [model.states[head.config.taps[0]].clone()]
    if count > 1:
        model(ids[:, 1:])  # a prompt's states are those of its last token, where layers share keys
        states.append(model.states[head.config.taps[0]])
    stores = {kind: slots.layers[source.layer] for kind, source in head.sources.items()}
    found = {kind: (layer.keys[:, :, :count], layer.values[:, :, :count]) for kind, layer in stores.items()}
    return torch.cat(states, 1), found


@made_once
def trained_assistant(
    target: PreTrainedModel, steps: int = 20, unrolled: int = 2, seed: int = 0, lr: float = 2e-2, **options: Any
) -> AssistantHead:
    """An assistant that has learned by heart what the target writes: most of its drafts there are right."""
    head = random_assistant(target, seed, **options)
    ids, lengths = written(target)
    states, stores = keys_of(target, head, ids)
    # The newest token of each anchor, [B, A]: after the prompt, as in a call. Every anchor is a row of its own.
    columns = (lengths - NEW - 1)[:, None] + torch.arange(NEW + 1 - unrolled)
    before, slots, count = columns[:, :, None], torch.arange(ids.shape[1]), columns.shape[1]
    keys = {}
    for kind, (key, value) in stores.items():
        window = head.config.window(kind)
        seen = slots < before
        if window is not None:
            seen &= slots > before - window
        flat = (one.to(head.dtype)[:, None].expand(-1, count, -1, -1, -1).flatten(0, 1) for one in (key, value))
        keys[kind] = Keys(*flat, seen.flatten(0, 1)[:, None, None])
    first = states.to(head.dtype).take_along_dim(before - 1, 1).flatten(0, 1)[:, None]
    texts = [ids.gather(1, columns + ahead).flatten()[:, None] for ahead in range(unrolled + 1)]
    with torch.no_grad():
        read = [head.embed(tokens, target) for tokens in texts]

    def loss_of() -> torch.Tensor:
        state, loss = first, torch.zeros(())
        for step in range(unrolled):
            ended, state = head(read[step], state, columns.flatten()[:, None], keys)
            loss = loss + torch.nn.functional.cross_entropy(head.logits(ended)[:, 0], texts[step + 1][:, 0])
        return loss

    learn(target, head.parameters(), loss_of, steps, lr)
    return head
