"""Medusa heads for tests: drawn at random, and fitted so that they know one text by heart.

Knows a target's last hidden states; nothing of drafts.
"""

from __future__ import annotations

import torch
from architectures import made_once, random_ids
from transformers import PreTrainedModel

from assisted.engine.parts import find_layers
from assisted.methods.medusa.head import MedusaHeads, output_size

__all__ = ["knowing", "knowing_what_follows", "random_heads"]

SURE = 40.0  # logit of a token that a head knows, among others at 0


def random_heads(hidden_size: int = 6, vocab_size: int = 9, heads: int = 3, layers: int = 2, **kwargs) -> MedusaHeads:
    """Heads with weights that say something."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        made = MedusaHeads(hidden_size, vocab_size, heads, layers, **kwargs)
        with torch.no_grad():
            for weight in made.parameters():
                weight.normal_()
    return made


@torch.no_grad()
def knowing(
    target: PreTrainedModel,
    texts: torch.Tensor,
    start: int,
    heads: int = 4,
    offset: int = 2,
    said: torch.Tensor | None = None,
) -> MedusaHeads:
    """Heads that say of each text what comes next, from the state at its column `start` on.

    texts: [B, n] int64; no more states in all than they have numbers, or the heads are right only here and there.
    offset: of the token that the first head names, 2 for heads as they should be. said: [B, n], what they take for the
    text.
    """
    decoder = target.get_submodule(".".join(find_layers(target).path[:-1]))
    states = decoder(texts).last_hidden_state
    size, hidden_size = output_size(target)
    made = MedusaHeads(hidden_size, size, heads).to(target.dtype)
    for head in range(heads):
        ahead = offset + head
        known = states[:, start:-ahead].flatten(0, 1).double()
        tokens = (texts if said is None else said)[:, start + ahead :].flatten()
        wanted = SURE * torch.nn.functional.one_hot(tokens, size).double()
        made.output[head] = (torch.linalg.pinv(known, rtol=1e-9) @ wanted).T
    return made


@made_once
def knowing_what_follows(target: PreTrainedModel, length: int = 20, seed: int = 20) -> MedusaHeads:
    """Heads that know what a target says after a random prompt."""
    ids = random_ids(target, 1, length, seed)
    kwargs = {"max_new_tokens": 24, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    text = target.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    return knowing(target, text, length - 1)
