"""Half precision: passes of different widths round differently, so a near-tie may fall the other way, and nothing else may."""

import pytest
import torch
from architectures import ARCHITECTURES, build, half_right, random_ids
from transformers import DynamicCache

from assisted import AssistedModelForCausalLM

NEW_TOKENS = 48
# A bfloat16 has 8 bits: sums of a few rounded terms differ by a few units of 2**-8 of the largest logit; float16 has 11.
MARGINS = {torch.bfloat16: 6 * 2**-8, torch.float16: 6 * 2**-11}


def margins(model, ids, prompt_length):
    """How far below the largest logit each new token lies, decoding one token at a time, relative to the largest."""
    cache, found = DynamicCache(config=model.config), []
    logits = model(ids[:, :prompt_length], past_key_values=cache).logits[:, -1].float()
    for position in range(prompt_length, ids.shape[1]):
        token = ids[:, position : position + 1]
        found.append((logits.amax(-1) - logits.gather(1, token)[:, 0]) / logits.abs().amax(-1))
        logits = model(token, past_key_values=cache).logits[:, -1].float()
    return torch.stack(found, 1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", MARGINS, ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window"])
def test_every_token_is_the_argmax_or_a_near_tie(name, dtype):
    target = build(next(a for a in ARCHITECTURES if a.name == name)).to(dtype)
    model = AssistedModelForCausalLM.from_models(target, draft=half_right(target))
    for seed in range(4):
        ids = random_ids(target, 1, 10, seed)
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, draft_length=5)
        assert model.report.accepted > 0
        assert margins(target, out, ids.shape[1]).max() <= MARGINS[dtype]


@torch.no_grad()
def test_a_wrong_token_is_found():
    """The margin of tokens that are not near-ties is far above the bound."""
    target = build(ARCHITECTURES[0]).to(torch.bfloat16)
    ids = random_ids(target, 1, 30)
    assert margins(target, ids, 10).median() > 10 * MARGINS[torch.bfloat16]
