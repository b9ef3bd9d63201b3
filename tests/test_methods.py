"""Every method over every architecture: token for token what plain `generate` says, one row and a ragged batch."""

import functools
import warnings

import pytest
import torch
from architectures import ARCHITECTURES, build, random_ids
from covering import over
from methods import METHODS
from pairs import ENDS, pair, prompt
from test_continued import HIDDEN
from test_grammar import brackets
from test_sampling import ALPHA, PROMPT, SEQUENCES, counts, exact_distribution, p_value, tiny
from test_sampling import NEW_TOKENS as SAMPLED
from test_traps import Remembers

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped

NEW_TOKENS = 24
CALL = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "use_cache": True, "pad_token_id": 0}


pytestmark = pytest.mark.usefixtures("invariants")


def assisted_without_fallback(model, ids, **kwargs):
    """What the pair says; going on without drafts after a failed one is an error here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=DraftingStopped)
        return model.generate(ids, **kwargs)


def trees_once(architecture, method):
    """Every architecture is met by a method that drafts trees; test_decoding.py meets it with chains."""
    return [architecture.name] if method.tree and not method.refuses(architecture) else []


@functools.cache
def plainly(architecture):
    """What a target of this architecture writes without drafts: after one prompt, and after a ragged batch."""
    target = build(architecture)
    one = random_ids(target, 1, 20, seed=20)
    four = random_ids(target, 4, 12, seed=4)
    mask = torch.ones_like(four)
    for row in range(4):
        mask[row, : 2 * row] = 0
    four = four.where(mask.bool(), 0)
    return [
        (ids, call, target.generate(ids, **call).tolist())
        for ids, call in (
            (one, CALL | {"eos_token_id": None}),
            (four, CALL | {"attention_mask": mask, "eos_token_id": ENDS}),
        )
    ]


@over("architecture,method", ARCHITECTURES, METHODS, also=trees_once)
def test_equals_plain(architecture, method):
    target = build(architecture)
    if method.refuses(architecture):
        with pytest.raises(ValueError, match=r"draft|target"):
            AssistedModelForCausalLM.from_models(target, draft=method.draft(target))
        return
    model = AssistedModelForCausalLM.from_models(target, draft=method.draft(target), draft_length=4)
    for ids, call, plain in plainly(architecture):
        assert assisted_without_fallback(model, ids, **call).tolist() == plain
    if method.accepts:
        assert model.totals.accepted > 0


WAYS = {
    "embeddings": lambda: {"inputs_embeds": pair()[0].get_input_embeddings()(BATCH["input_ids"]).detach() + 0.05},
    "chunks": lambda: {"prefill_chunk_size": 3},
    "processors": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
    "few tokens": lambda: {"suppress_tokens": list(range(3, 60)), "max_new_tokens": 2},
    "lockstep": lambda: {"logits_processor": [Remembers()]},
    "grammar": lambda: {"logits_processor": [brackets()]},
    **{f"hidden: {where}": lambda mask=mask: {"attention_mask": torch.tensor(mask)} for where, mask in HIDDEN.items()},
}
"""Arguments of a call, made anew for each."""
BATCH = {"input_ids": random_ids(pair()[0], 4, 12, seed=3), "attention_mask": prompt(4)["attention_mask"]}


@functools.cache
def plain_of(way, rows):
    return pair()[0].generate(**arguments(way, rows)).tolist()


def arguments(way, rows):
    call = CALL | BATCH | {"eos_token_id": ENDS} | WAYS[way]()
    if "inputs_embeds" in call:
        del call["input_ids"]
    return {name: value[:rows] if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_in_every_way_of_calling(method):
    """One row, and rows that are hidden in part and end apart; a processor of somebody's is shown each prefix once. Methods
    that are alike share the ways."""
    target = pair()[0]
    model = AssistedModelForCausalLM.from_models(target, draft=method.draft(target), draft_length=4)
    alike = [other for other in METHODS if other.kinds[0] == method.kinds[0]]
    ways = [("lockstep", 1), ("embeddings", 1), *((way, 4) for way in WAYS)]
    for way, rows in ways[alike.index(method) :: len(alike)]:
        assert assisted_without_fallback(model, None, **arguments(way, rows)).tolist() == plain_of(way, rows), way
        assert way == "few tokens" or not method.accepts or model.report.drafted > 0


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({}, marks=pytest.mark.slow, id="plain"),
        pytest.param({"temperature": 0.6, "top_p": 0.9}, id="temperature and top-p"),
    ],
)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_sampling_follows_the_targets_distribution(method, setting):
    target = tiny(0, layers=2)
    model = AssistedModelForCausalLM.from_models(target, draft=method.draft(target), draft_length=2)
    torch.manual_seed(21)
    kwargs = {"top_k": 0} | setting
    ids = model.generate(
        PROMPT, max_new_tokens=SAMPLED, do_sample=True, num_return_sequences=SEQUENCES, draft_length=2, **kwargs
    )
    assert p_value(counts(ids), exact_distribution(target, **kwargs)) > ALPHA
