"""Rollouts of reinforcement learning: groups of sampled completions from weights that change between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_sampling import ALPHA, NEW_TOKENS, PROMPT, SEQUENCES, VOCABULARY, counts, exact_distribution, p_value, tiny

from assisted import AssistedModelForCausalLM, NGram, QuantizedSelf, Suffix

pytestmark = pytest.mark.usefixtures("invariants")

GROUP = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS}
WANTED = 3  # the token that is rewarded


def rewards(sequences: torch.Tensor) -> torch.Tensor:
    """How often the wanted token was written, [B] int64."""
    return (sequences[:, PROMPT.shape[1] :] == WANTED).sum(1)


def of_rewards(distribution: torch.Tensor) -> torch.Tensor:
    """The distribution of rewards, of that of sequences: [NEW_TOKENS + 1] float64."""
    digits = torch.arange(len(distribution))[:, None] // VOCABULARY ** torch.arange(NEW_TOKENS) % VOCABULARY
    return torch.zeros(NEW_TOKENS + 1, dtype=torch.float64).index_add(0, (digits == WANTED).sum(1), distribution)


def grpo(model: Any, optimizer: torch.optim.Optimizer, sequences: torch.Tensor) -> None:
    """One step on a group of completions: advantages are rewards less their mean, over their deviation (2402.03300)."""
    found = rewards(sequences).float()
    advantages = (found - found.mean()) / (found.std() + 1e-4)
    logits = model(input_ids=sequences, attention_mask=torch.ones_like(sequences)).logits[:, PROMPT.shape[1] - 1 : -1]
    new = sequences[:, PROMPT.shape[1] :]
    chosen = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
    optimizer.zero_grad()
    (-(advantages[:, None] * chosen).mean()).backward()
    optimizer.step()


def nudged(target: Any) -> Any:
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight, other in zip(draft.parameters(), tiny(1).parameters(), strict=True):
            weight.lerp_(other, 0.4)
    return draft


DRAFTS: dict[str, Callable[[Any], Any]] = {
    "model": nudged,
    "copy": lambda target: "self:int8",
    "memory": lambda target: Suffix(remember=True),
    "list": lambda target: [NGram(2, 1), nudged(target)],
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_rewards_have_the_distribution_of_the_present_weights(draft: str) -> None:
    target = tiny(0)
    before = of_rewards(exact_distribution(target, top_k=0))
    model = AssistedModelForCausalLM.from_models(target, DRAFTS[draft](target), draft_length=2)
    optimizer = torch.optim.AdamW(target.parameters(), lr=0.02)
    torch.manual_seed(5)
    for _ in range(6):
        grpo(model, optimizer, model.generate(PROMPT, num_return_sequences=8, **GROUP))
    now = exact_distribution(target, top_k=0)
    model.reset_totals()
    sequences = torch.cat([model.generate(PROMPT, num_return_sequences=SEQUENCES // 6, **GROUP) for _ in range(6)])
    assert model.totals.accepted > 0
    observed = torch.bincount(rewards(sequences), minlength=NEW_TOKENS + 1)
    assert p_value(observed, of_rewards(now)) > ALPHA
    assert p_value(counts(sequences), now) > ALPHA
    assert p_value(observed, before) < ALPHA, "or it would prove nothing: the policy has to have changed"


@pytest.mark.parametrize(("quantization", "fast"), [("int8", "auto"), ("int4", "eager")])
def test_a_copy_follows_the_training(quantization: str, fast: str) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(
        "zoo:target", draft=QuantizedSelf(quantization), dtype=torch.float32, fast=fast, draft_length=4
    )
    first = pair.drafter.model
    ids = torch.arange(200, 230)[None]
    call = {"max_new_tokens": 24, "do_sample": False}
    pair.generate(ids, **call)
    assert pair.drafter.model is first
    stale = AssistedModelForCausalLM.from_models(pair.target, first, draft_length=4)  # as a model of its own
    optimizer = torch.optim.AdamW(pair.parameters(), lr=3e-3)
    for _ in range(6):  # learns to count down
        optimizer.zero_grad()
        pair(input_ids=ids.flip(1), labels=ids.flip(1)).loss.backward()
        optimizer.step()
    plain = pair.target.generate(ids, **call).tolist()
    fresh = AssistedModelForCausalLM.from_models(pair.target, QuantizedSelf(quantization), draft_length=4, fast=fast)
    copied = copy.deepcopy(pair)
    accepted = []
    for model in (fresh, pair, copied, stale):
        assert model.generate(ids, **call).tolist() == plain
        assert model.report is not None
        accepted.append((model.report.drafted, model.report.accepted))
    assert accepted[0] == accepted[1] == accepted[2] != accepted[3]
    assert copied.drafter.target is copied.target is not pair.target
    made = pair.drafter.model
    assert made is not first and not any(weight.is_inference() for weight in made.parameters())
    pair.generate(ids, **call)
    assert pair.drafter.model is made


def test_a_copy_that_cannot_be_made_again_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(0)
    pair = AssistedModelForCausalLM.from_models(target, "self:int8", draft_length=2)

    def fails(*args: Any) -> Any:
        raise ValueError("quantization: of the test")

    monkeypatch.setattr("assisted.methods.quantized_self.quantize_copy", fails)
    with torch.no_grad():
        target.lm_head.weight[0, 0] += 1.0
    for attempt in range(2):
        output = pair.generate(PROMPT, max_new_tokens=8, do_sample=False)
        assert output.tolist() == target.generate(PROMPT, max_new_tokens=8, do_sample=False).tolist()
        assert pair.report is not None and pair.report.drafted > 0
        assert ["of the test" in one for one in pair.report.warnings] == [True] * (attempt == 0)
