"""What drafters need of the target: hidden states that are transformers' own, and several heads in one list."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, build, random_ids
from covering import in_turns, over
from methods import HEADS, LISTS, dflash, mtp
from pairs import CALL, ENDS, padded, said_by
from test_methods import assisted_without_fallback
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny
from test_sampling import NEW_TOKENS as SAMPLED
from transformers import PreTrainedModel

from assisted import MTP, AssistedModelForCausalLM, Merged
from assisted.core.drafts import Draft, Round
from assisted.core.text import Text
from assisted.engine.needs import NOTHING, Needs
from assisted.methods.shared.base import Call, Drafter, Drafting, Spec, Target

BY_NAME = {architecture.name: architecture for architecture in [*ARCHITECTURES, *RECURRENT]}


pytestmark = pytest.mark.usefixtures("invariants")


def test_needs_unite():
    target = build(BY_NAME["llama"], num_hidden_layers=4)
    one, last, split = Needs.of_states(target, 2), Needs.of_states(target, -1, 1), Needs(one_layers(target), split=True)
    both = one | last | split | NOTHING
    assert both == NOTHING | split | last | one
    assert (both.states, both.split, len(both.layers)) == ({1, 2, 4}, True, 4)
    assert both.final_norm == last.final_norm == ("model", "norm")
    assert Needs.of_states(target, 5).final_norm == ()  # the last layer's output, before the norm
    with pytest.raises(ValueError, match=r"\[6\] of a target with 4 layers"):
        Needs.of_states(target, 6)
    with pytest.raises(ValueError, match="0"):
        Needs.of_states(target, 0)


def one_layers(target: PreTrainedModel) -> Any:
    return Needs.of_states(target).layers


# -- the states themselves


@dataclass(frozen=True)
class Watch(Spec):
    """Proposes nothing and keeps the states of every committed token, or proposes what is known, in trees if possible."""

    name: ClassVar[str] = "watch"

    known: Any = None

    def load(self, target: Target, **kwargs: Any) -> Watcher:
        layers = target.model.config.get_text_config().num_hidden_layers
        return Watcher(Needs.of_states(target.model, *range(1, layers + 1)), self.known)


class Watcher(Drafter):
    def __init__(self, needs: Needs, known: Any):
        self.needs, self.known = needs, known

    def start(self, call: Call) -> Drafting:
        self.last = Watching(self, call)
        return self.last


class Watching(Drafting):
    def __init__(self, drafter: Watcher, call: Call):
        self.known, self.trees = drafter.known, call.target.masks.trees and not call.target.in_lockstep
        assert set(call.states) == drafter.needs.states
        prompt = {index: list(states.clone()) for index, states in call.states.items()}
        self.seen = {index: [[row] for row in rows] for index, rows in prompt.items()}
        self.earlier: Round | None = None

    def propose(self, text: Text, budget: int) -> Draft:
        if self.known is None:
            return Draft.empty(text.rows)
        tokens = torch.stack([self.known[row, length : length + 3] for row, length in enumerate(text.lengths)])
        lengths = torch.tensor([0 if ended else 3 for ended in text.ended])
        tokens[:, 2] = (tokens[:, 2] + 1) % 90
        if not self.trees:
            return Draft(tokens, lengths)
        both = torch.stack([(tokens + 7) % 90, tokens], 2).flatten(1)
        return Draft(both, 2 * lengths, parents=torch.tensor([-1, -1, 1, 1, 3, 3]).expand_as(both).contiguous())

    def observe(self, round: Round) -> None:
        for index, rows in self.seen.items():
            assert round.states[index].shape[:2] == round.logits.shape[:2]
            for row, parts in enumerate(rows):
                if round.kept[row]:
                    parts.append(round.states[index][row, list(round.columns(row))])
        if self.earlier is not None:
            assert len(self.earlier.states) == 0
            with pytest.raises(KeyError, match="earlier forward pass"):
                self.earlier.states[1]
        self.earlier = round


def require_own_states(target: PreTrainedModel, watcher: Watcher, output: torch.Tensor, padding: list[int]) -> None:
    """Every committed token's states are those of one forward pass of the target over the row's text."""
    for row, hidden in enumerate(padding):
        seen = {index: torch.cat(rows[row])[hidden:] for index, rows in watcher.last.seen.items()}
        width = len(next(iter(seen.values())))
        assert width >= 12 - hidden
        text = output[row, hidden : hidden + width][None]
        wanted = target(text, attention_mask=torch.ones_like(text), output_hidden_states=True).hidden_states
        for index, states in seen.items():
            scale = wanted[index].abs().max()
            torch.testing.assert_close(states / scale, wanted[index][0] / scale, rtol=0, atol=2e-4)


@torch.no_grad()
def check_states(target: PreTrainedModel, beside: list[str], recurrent: bool = False, calls: int = 1) -> Any:
    """What the target of a list sends to a drafter is transformers' own, in every one of some calls. Returns the pair.

    beside: the drafters beside it. If there are none, it drafts.
    """
    ids, padding = random_ids(target, 3, 12, seed=4), [0, 3, 5]
    mask = (torch.arange(12) >= torch.tensor(padding)[:, None]).long()
    ids = ids.where(mask.bool(), 0)
    call = CALL | {"attention_mask": mask, "use_cache": True, "eos_token_id": None if recurrent else ENDS}
    plain = target.generate(ids, **call)
    known = torch.nn.functional.pad(plain, (0, 4), value=3)
    draft = [Watch(None if beside else known), *(beside or [Watch()])]
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=3)
    for _ in range(calls):
        assert assisted_without_fallback(model, ids, **call).tolist() == plain.tolist()
        assert model.report.drafted > 0
        require_own_states(target, model.drafter.members[0], plain, padding)
    return model


BESIDE = {"alone": [], "split": ["early-exit:1"], "measured": ["early-exit"]}
# gemma3n's layers pass on several states, and the hidden_states of models without attention begin after the first layer;
# nemotron_h and zamba2 compute something else for one token than for a text
OTHERS = ("gemma3n", "mamba", "mamba2", "falcon_mamba", "nemotron_h", "zamba2")
WITH_STATES = [one for one in BY_NAME.values() if one.name not in OTHERS]


def can_be_run(architecture, beside):
    return beside == "alone" or architecture not in RECURRENT


@over("architecture,beside", WITH_STATES, list(BESIDE), where=can_be_run)
def test_states_are_transformers_own(architecture, beside):
    """Of the prompt, of chains and trees, of a split target's two parts, of rows that end early."""
    check_states(build(architecture), BESIDE[beside], architecture in RECURRENT)


@pytest.mark.parametrize("beside", [[], ["early-exit:2"], ["early-exit"]], ids=["alone", "split", "measured"])
def test_all_states_of_a_deeper_target(beside):
    """States before, at and after the split."""
    check_states(build(BY_NAME["llama"], num_hidden_layers=5), beside, calls=3)


# -- several heads


@functools.cache
def spec_of(name: str, head: str) -> Any:
    return (HEADS | {"mtp": lambda target: MTP(mtp(target)), "dflash": dflash})[head](target_of(name))


@functools.cache
def target_of(name: str) -> PreTrainedModel:
    return build(BY_NAME[name])


OF_LLAMA = [
    *(("mtp", "eagle", "suffix"), ("dflash", "eagle", "suffix")),
    *(("assistant", "eagle", "suffix"), ("assistant", "eagle", "early-exit")),
]


@pytest.mark.filterwarnings("ignore:draft. with")  # that a tiny model has no layers to spare
@pytest.mark.parametrize(
    "name,heads,make",
    [
        *(
            pytest.param(
                name, *case.values, marks=case.marks if number in (0, 1 + place // 2 % 3) else pytest.mark.slow
            )
            for number, name in enumerate(("llama", "gemma3", "gpt2", "bloom"))
            for place, case in enumerate(in_turns(LISTS, [list, Merged]))
        ),
        *(("llama", heads, make) for heads in OF_LLAMA for make in (list, Merged)),
    ],
)
def test_several_heads_in_a_list(name, heads, make):
    """Token by token what plain `generate` writes: one row, a ragged batch, and another turn over the cache returned."""
    target = target_of(name)
    model = AssistedModelForCausalLM.from_models(
        target, draft=make([spec_of(name, head) for head in heads]), draft_length=4
    )
    one = random_ids(target, 1, 20, seed=20)
    plain = said_by(target, one, **CALL)
    assert assisted_without_fallback(model, one, **CALL).tolist() == plain.tolist()

    (four, mask), caches = padded(target), [None, None]
    call = CALL | {"eos_token_id": ENDS, "return_dict_in_generate": True, "use_cache": True}
    for _ in range(2):
        plain = target.generate(four, attention_mask=mask, past_key_values=caches[0], **call)
        ours = assisted_without_fallback(model, four, attention_mask=mask, past_key_values=caches[1], **call)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        caches = [plain.past_key_values, ours.past_key_values]
        four = torch.cat([plain.sequences, random_ids(target, 4, 3, seed=9)], 1)
        mask = torch.nn.functional.pad(mask, (0, four.shape[1] - mask.shape[1]), value=1)
    assert model.totals.accepted > 0


@pytest.mark.parametrize("heads", [("eagle", "medusa"), ("random eagle", "medusa"), ("early-exit", "medusa")])
def test_a_head_knows_as_much_among_others_as_alone(heads):
    """Where all others are mostly wrong, the one that is right has its tokens accepted: it read the states of every round."""
    target = target_of("llama")
    ids = random_ids(target, 1, 20, seed=20)

    def tokens_per_pass(draft: Any) -> float:
        model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=4)
        assisted_without_fallback(model, ids, **CALL)
        return model.report.tokens_per_pass

    alone = [tokens_per_pass(spec_of("llama", head)) for head in heads]
    assert max(alone) > 2
    assert tokens_per_pass(Merged([spec_of("llama", head) for head in heads])) >= max(alone) - 0.2


@pytest.mark.parametrize(
    "heads,make",
    in_turns([("eagle", "random eagle"), ("eagle-1", "medusa"), ("early-exit", "eagle", "suffix")], [list, Merged]),
)
def test_several_heads_follow_the_targets_distribution(heads, make):
    target = tiny(0, layers=2)
    draft = make([HEADS[head](target) for head in heads])
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=2)
    torch.manual_seed(23)
    kwargs = {"top_k": 0, "temperature": 0.7}
    ids = assisted_without_fallback(
        model, PROMPT, max_new_tokens=SAMPLED, do_sample=True, num_return_sequences=SEQUENCES, **kwargs
    )
    assert model.report.accepted > 0
    assert p_value(counts(ids), exact_distribution(target, **kwargs)) > ALPHA
