"""A head made to fit a grown target proposes what it proposes for the small one."""

import pytest
import torch
from architectures import random_ids
from eagle_heads import random_head
from test_grown import ROUNDING, WIDE, small

from assisted.lab.grown import grow, grow_head

TAPS = (1, 2, 3)
KINDS = {
    "plain": {},
    "a norm for each tap": {"fc_norm": True},
    "one norm before the fusion": {"norm_before_fc": True},
    "an embedding of its own": {"own_embedding": True},
    "a bias": {"fc_bias": True},
    "reduced vocabulary": {"draft_vocab_size": 40},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_the_same(kind):
    model = small(num_hidden_layers=4)
    head = random_head(model, 3, taps=TAPS, **KINDS[kind])
    large = grow(model, WIDE)
    fits = grow_head(head, model, large)
    ids = random_ids(model, 2, 9)
    logits = []
    for target, one in ((model, head), (large, fits)):
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[tap] for tap in one.config.taps], -1)
        logits.append(one.logits(one(one.embed(ids, target), one.fuse(features))))
    assert torch.allclose(*logits, atol=ROUNDING)


def test_heads_that_cannot_be_grown():
    model = small(num_hidden_layers=4)
    large = grow(model, WIDE)
    for head in (random_head(model, 1), random_head(model, 3, taps=(1, 2, 4))):
        with pytest.raises(ValueError, match="EAGLE-3"):
            grow_head(head, model, large)
