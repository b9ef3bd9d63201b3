"""Continued turns: text and KV cache are those of plain `generate`, turn after turn, for every architecture.

Batches whose rows end early, the padding after their ends visible or hidden in the next turn, rows of their own lengths and
rows in lockstep. Each turn goes on from the cache that the last one returned.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, Architecture, build, random_ids
from covering import over
from pairs import CALL, ENDS, ROUNDING, Listener, no_fallback, padded
from transformers import DynamicCache, PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Draft
from assisted.core.text import Text
from assisted.methods.shared.base import Call, Drafter, Drafting

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + RECURRENT}
FILLER = 50  # what is drafted for rows that have ended: no padding


pytestmark = pytest.mark.usefixtures("invariants")


class Guided(Drafter):
    """Drafts what plain decoding says, with mistakes; in trees where the target reads them, with a wrong twin before each node.

    known: [B, n] int64, the plain output, prompt included.
    """

    def __init__(self, known: torch.Tensor, width: int = 4, trees: bool = False):
        self.known, self.width, self.trees = known, width, trees

    def start(self, call: Call) -> Drafting:
        return GuidedDrafting(self, self.trees and call.target.masks.trees and not call.target.in_lockstep)


class GuidedDrafting(Drafting):
    def __init__(self, drafter: Guided, trees: bool):
        self.drafter, self.trees = drafter, trees

    def propose(self, text: Text, budget: int) -> Draft:
        width = min(self.drafter.width, budget)
        known = torch.nn.functional.pad(self.drafter.known, (0, width), value=FILLER)
        tokens = torch.full((text.rows, width), FILLER)
        for row in text.unfinished:
            start = text.lengths[row]
            tokens[row] = known[row, start : start + width]
            for column in range(width):
                if (3 * (start + column) + 5 * row) % 7 == 0:
                    tokens[row, column] = (tokens[row, column] + 1) % 40 + 50
        lengths = torch.tensor([0 if ended else width for ended in text.ended])
        if not self.trees:
            return Draft(tokens, lengths)
        twins = torch.stack([(tokens + 7) % 40 + 50, tokens], 2).flatten(1)
        parents = torch.tensor([2 * (column // 2) - 1 for column in range(2 * width)])
        return Draft(twins, 2 * lengths, parents=parents.expand_as(twins).contiguous())


def same_scores(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


def never(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


MODES: dict[str, Any] = {
    "own lengths": dict,
    "max_time": lambda: {"max_time": 1000.0},
    "processor": lambda: {"logits_processor": [same_scores]},
    "criterion": lambda: {"stopping_criteria": [never]},
    "streamer": lambda: {"streamer": Listener()},
    "penalty": lambda: {"repetition_penalty": 1.3},
}


@functools.cache
def target_of(name: str, attention: str | None = None) -> tuple[PreTrainedModel, AssistedModelForCausalLM]:
    target = build(BY_NAME[name])
    if attention is not None:
        target.set_attn_implementation(attention)
    return target, AssistedModelForCausalLM.from_models(target, draft="ngram", draft_length=4)


def states(layer: Any) -> list[torch.Tensor]:
    found = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return [s for s in (*found, getattr(layer, "keys", None), getattr(layer, "values", None)) if s is not None]


def require_same_cache(ours: DynamicCache, plain: DynamicCache) -> None:
    """The same kind of layers with the same contents: every row, padding included."""
    assert ours.get_seq_length() == plain.get_seq_length()
    for index, (layer, reference) in enumerate(zip(ours.layers, plain.layers, strict=True)):
        assert type(layer) is type(reference)
        for mine, theirs in zip(states(layer), states(reference), strict=True):
            assert mine.shape == theirs.shape
            assert not mine.is_inference()
            apart = (mine - theirs).abs().flatten(1).amax(1) / max(1.0, theirs.abs().max().item())
            assert apart.max() < 10 * ROUNDING, f"layer {index}, by row: {apart.tolist()}"


def turns(name: str, mode: str, hidden: list[bool], trees: bool = False, attention: str | None = None) -> None:
    """Three turns of a padded batch, over the cache that each returns. hidden: whether the padding after the ends of the last
    turn is hidden in the next one."""
    target, model = target_of(name, attention)
    ids, mask = padded(target, seed=3)
    free = target.generate(ids, attention_mask=mask, **CALL, **MODES[mode]())
    eos = [*ENDS, int(free[0, 15]), int(free[2, 17])]  # so that rows end apart in any case
    caches: list[DynamicCache | None] = [None, None]
    uneven = False
    accepted = 0
    for turn in range(3):
        call = CALL | {"max_new_tokens": 12, "eos_token_id": eos, "return_dict_in_generate": True}
        call |= {"attention_mask": mask, "use_cache": True}
        plain = target.generate(ids, past_key_values=caches[0], **call, **MODES[mode]())
        model.drafter = Guided(plain.sequences, trees=trees)
        with no_fallback():
            ours = model.generate(ids, past_key_values=caches[1], draft_length=4, **call, **MODES[mode]())
        assert ours.sequences.tolist() == plain.sequences.tolist(), f"turn {turn}"
        require_same_cache(ours.past_key_values, plain.past_key_values)
        assert model.report is not None
        accepted += model.report.accepted
        caches = [plain.past_key_values, ours.past_key_values]
        if turn == 2:
            break
        new = plain.sequences[:, ids.shape[1] :]
        ends = torch.isin(new, torch.tensor(eos)).int().cumsum(1)
        after = ends - torch.isin(new, torch.tensor(eos)).int() > 0  # [B, new], the padding
        uneven = uneven or bool(after.any())
        more = random_ids(target, 4, 5, seed=turn)
        seen = (~after).long() if hidden[turn] else torch.ones_like(new)
        mask = torch.cat([mask, seen, torch.ones_like(more)], 1)
        ids = torch.cat([plain.sequences, more], 1)
    assert uneven
    assert accepted > 0


# pure states tell no length, and neither here nor plainly does a turn go on from them
@over(
    "architecture,mode",
    [one for one in BY_NAME.values() if one.name not in ("mamba", "mamba2", "falcon_mamba")],
    ["own lengths", "processor"],
)
def test_three_turns_of_a_batch(architecture: Architecture, mode: str) -> None:
    """A processor keeps the rows in lockstep."""
    turns(architecture.name, mode, [mode != "processor", mode == "processor"])


@pytest.mark.parametrize(
    "name,mode,trees",
    [
        (name, mode, (number + place) % 2 > 0)
        for number, name in enumerate(("llama", "gemma3", "bloom"))
        for place, mode in enumerate(mode for mode in MODES if mode != "processor")
    ],
)
def test_three_turns_of_chains_and_trees(name: str, mode: str, trees: bool) -> None:
    turns(name, mode, [False, True], trees)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3", "bloom", "qwen3_next"])
def test_long_padding_in_front_is_handed_back_as_well(name: str) -> None:
    """Prompts are read in groups, which saves their padding, but not where its KV is handed back: a next turn may see it."""
    target, model = target_of(name)
    ids = random_ids(target, 4, 100, seed=3)
    call = CALL | {"attention_mask": (torch.arange(100) >= torch.tensor([0, 90, 80, 85])[:, None]).long()}
    call |= {"return_dict_in_generate": True}
    caches: list[DynamicCache | None] = [None, None]
    for _ in range(2):
        plain = target.generate(ids, past_key_values=caches[0], **call)
        model.drafter = Guided(plain.sequences)
        with no_fallback():
            ours = model.generate(ids, past_key_values=caches[1], draft_length=4, **call)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        require_same_cache(ours.past_key_values, plain.past_key_values)
        caches = [plain.past_key_values, ours.past_key_values]
        ids = torch.cat([plain.sequences, random_ids(target, 4, 5, seed=4)], 1)
        call["attention_mask"] = torch.ones_like(ids)


# --- prompts that are hidden elsewhere than on the left

HIDDEN = {
    "holes": [[1] * 12, [1] * 5 + [0] * 3 + [1] * 4, [0] * 2 + [1] * 3 + [0] + [1] * 6, [1, 0] * 5 + [1, 1]],
    "both": [
        [0] * 2 + [1] * 3 + [0] * 6 + [1],
        [0] + [1] * 4 + [0] * 4 + [1] * 3,
        [0] * 11 + [1],
        [1] + [0] * 10 + [1],
    ],
    "a row": [[1] * 12, [0] * 12, [1] * 5 + [0] * 3 + [1] * 4, [0] * 12],
}


@pytest.mark.parametrize(
    ("name", "hidden", "rows", "mode"),
    [  # every two of these meet
        (name, hidden, (1, 4)[(number + place) % 2], ("own lengths", "processor")[(number // 2 + place) % 2])
        for number, name in enumerate(
            ("llama", "gpt2", "opt", "gemma3", "mistral-window", "bloom", "mpt", "qwen3_next")
        )
        for place, hidden in enumerate(HIDDEN)
    ],
)
def test_holes_and_rows_without_a_text(name: str, hidden: str, rows: int, mode: str) -> None:
    """Positions go on from that of the last column, whatever it is: of hidden ones it is 0."""
    target, model = target_of(name)
    some = slice(1, 2) if rows == 1 else slice(0, 4)
    ids, mask = random_ids(target, 4, 12, seed=3)[some], torch.tensor(HIDDEN[hidden])[some]
    call = CALL | {"max_new_tokens": 16, "attention_mask": mask, "use_cache": True, "return_dict_in_generate": True}
    free = target.generate(ids, **call, **MODES[mode]())
    call["eos_token_id"] = [*ENDS, int(free.sequences[0, 18])]
    plain = target.generate(ids, **call, **MODES[mode]())
    model.drafter = Guided(plain.sequences)
    with no_fallback():
        ours = model.generate(ids, draft_length=4, **call, **MODES[mode]())
    assert ours.sequences.tolist() == plain.sequences.tolist()
    require_same_cache(ours.past_key_values, plain.past_key_values)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bloom"])
def test_positions_of_the_callers(name: str) -> None:
    target, model = target_of(name)
    ids = random_ids(target, 3, 12, seed=3)
    call = CALL | {"position_ids": torch.arange(12) + torch.tensor([[0], [7], [20]])}
    plain = target.generate(ids, **call)
    model.drafter = Guided(plain)
    with no_fallback():
        assert model.generate(ids, draft_length=4, **call).tolist() == plain.tolist()


# --- rows that have ended, longer than those that go on


class OneRow(GuidedDrafting):
    """Drafts for the first row alone, and nothing once that has ended."""

    def propose(self, text: Text, budget: int) -> Draft:
        if text.ended[0]:
            return Draft.empty(text.rows)
        draft = super().propose(text, budget)
        return Draft(draft.tokens, torch.tensor([draft.width] + [0] * (text.rows - 1)))


class ForOneRow(Guided):
    def start(self, call: Call) -> Drafting:
        return OneRow(self, False)


@pytest.mark.parametrize("fast", ["auto", "eager"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral-window"])
def test_a_row_that_ended_is_longer_than_the_rest(name: str, attention: str, fast: str) -> None:
    """The last row to run, one token a pass and nothing hidden, has masks of its own slots."""
    target, model = target_of(name, attention)
    ids = random_ids(target, 3, 8, seed=1)
    text = target.generate(ids, **CALL)
    end = next(int(token) for token in text[0, 16:] if token not in text[0, 8:16] and token not in text[2, 8:])
    call = CALL | {"eos_token_id": [end]}
    plain = target.generate(ids, **call)
    model.drafter, model.fast = ForOneRow(plain), fast
    with no_fallback():
        assert model.generate(ids, draft_length=4, **call).tolist() == plain.tolist()
    model.fast = "auto"


def test_rows_in_lockstep_of_which_one_ends_within_its_draft() -> None:
    """The draft is right beyond the end, where padding takes its place; the others go on as fast as before."""
    target = build(BY_NAME["llama"])
    model = AssistedModelForCausalLM.from_models(target, draft=target, draft_length=4)
    ids = random_ids(target, 3, 12, seed=3)
    free = target.generate(ids, **CALL)
    ends = [int(token) for token in free[0, 14:] if token not in free[1:, 12:]]
    assert len(ends) > 3  # not all of them at the end of a draft
    for end in ends:
        call = CALL | {"eos_token_id": [end], "return_dict_in_generate": True, "logits_processor": [same_scores]}
        plain = target.generate(ids, **call)
        with no_fallback():
            ours = model.generate(ids, **call)
        assert ours.sequences.tolist() == plain.sequences.tolist()
        require_same_cache(ours.past_key_values, plain.past_key_values)
        assert model.report is not None and model.report.tokens_per_pass > 3


@pytest.mark.parametrize("name", ["llama", "codegen", "bloom"])
def test_a_cache_of_other_rows_is_refused(name: str) -> None:
    """Plain decoding raises; going on from the first row's past in all rows would be another call."""
    target = build(BY_NAME[name])
    model = AssistedModelForCausalLM.from_models(target, draft="ngram")
    ids = random_ids(target, 1, 9)
    first = model.generate(ids, return_dict_in_generate=True, **CALL)
    call = CALL | {"do_sample": True, "num_return_sequences": 3, "past_key_values": first.past_key_values}
    with pytest.raises(ValueError, match=r"past_key_values: it has 1 rows, and this call has 3"):
        model.generate(first.sequences, **call)
