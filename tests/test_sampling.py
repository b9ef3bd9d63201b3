"""Sampling: the distribution of the output is the target's own, by chi-square over whole sequences."""

import collections
import itertools
import math

import pytest
import torch
from scipy import stats
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from assisted import AssistedModelForCausalLM

VOCABULARY = 5  # sequences of 3 new tokens: 125 outcomes
NEW_TOKENS = 3
ALPHA = 1e-4
# A total variation of 0.07 from the right distribution, that of the smallest known mutant, is found with a power above 0.999
# at this many sequences. Noncentrality n * sum (p-q)^2/q >= 4 n TV^2 = 200 against 124 degrees of freedom.
SEQUENCES = 10_200
PROMPT = torch.tensor([[1, 3, 2, 4]])

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.7},
    "repetition penalty": {"repetition_penalty": 1.5},
    "several": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2},
}


pytestmark = pytest.mark.usefixtures("invariants")


def tiny(seed, layers=1):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special)).eval()


def towards(target, draft):
    """The draft somewhere between the two: often right, never sure."""
    with torch.no_grad():
        for weight, aim in zip(draft.parameters(), target.parameters(), strict=True):
            weight.lerp_(aim, 0.6)
    return draft


@pytest.fixture(scope="module")
def pair():
    target = tiny(0)
    return target, AssistedModelForCausalLM.from_models(target, draft=towards(target, tiny(1)))


class Doubled:
    """A processor the library has never met: it must see committed prefixes only, one after another."""

    def __call__(self, input_ids, scores):
        return scores * (1.0 + 0.5 * (input_ids.shape[1] % 2))


def exact_distribution(target, new_tokens=NEW_TOKENS, **kwargs):
    """The distribution of so many tokens after the prompt: plain `generate` gives the scores after every prefix."""
    distribution = torch.ones(1, dtype=torch.float64)
    prefixes = PROMPT
    for _ in range(new_tokens):
        seen = torch.ones_like(prefixes)  # otherwise the pad token, once generated, would be hidden
        call = {"max_new_tokens": 1, "do_sample": True, "return_dict_in_generate": True, "output_scores": True}
        out = target.generate(prefixes, attention_mask=seen, **call, **kwargs)
        distribution = (distribution[:, None] * torch.softmax(out.scores[0].double(), -1)).flatten()
        step = torch.arange(VOCABULARY).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCABULARY, 0), step], 1)
    return distribution


def counts(sequences):
    new = sequences[:, PROMPT.shape[1] :]
    base = VOCABULARY ** torch.arange(new.shape[1] - 1, -1, -1)
    return torch.bincount((new * base).sum(1), minlength=VOCABULARY ** new.shape[1])


def p_value(observed, distribution):
    """Chi-square with rare outcomes pooled; an impossible outcome that occurred gives 0."""
    expected = distribution * observed.sum()
    if observed[distribution < 1e-12].any():
        return 0.0
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return stats.chisquare(observed.numpy(), (expected * observed.sum() / expected.sum()).numpy()).pvalue


def require_distribution(model, seed, new_tokens=NEW_TOKENS, rows=SEQUENCES, **settings):
    """Raise AssertionError unless texts drawn with drafts, of which some are accepted, follow the target's distribution."""
    torch.manual_seed(seed)
    settings = {"top_k": 0} | settings
    ids = model.generate(PROMPT, max_new_tokens=new_tokens, do_sample=True, num_return_sequences=rows, **settings)
    assert 0 < model.report.accepted < model.report.drafted
    assert not model.report.warnings
    assert p_value(counts(ids), exact_distribution(model.target, new_tokens, **settings)) > ALPHA


FEW_TOKENS = {"do_sample": True, "top_k": 3, "temperature": 0.7, "eos_token_id": None, "pad_token_id": 0}


def exact_texts(target, after, **settings):
    """The probability of each three tokens, by plain `generate` of one token at a time. after: the call after some tokens."""
    found = {(): 1.0}
    settings |= {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    for _ in range(3):
        longer = {}
        for tokens, probability in found.items():
            p = target.generate(**after(tokens), **settings).scores[0][0].double().softmax(-1)
            longer |= {(*tokens, token): probability * float(p[token]) for token in p.nonzero().flatten().tolist()}
        found = longer
    return found


def p_value_of_texts(texts, expected):
    """texts: [B, 3] tokens; expected: what `exact_texts` found."""
    drawn = collections.Counter(map(tuple, texts.tolist()))
    assert set(drawn) <= set(expected)
    observed = torch.tensor([drawn[tokens] for tokens in expected])
    return p_value(observed, torch.tensor([*expected.values()], dtype=torch.float64))


@pytest.mark.parametrize("setting", SETTINGS)
def test_batches_follow_the_targets_distribution(pair, setting):
    target, model = pair
    torch.manual_seed(11)
    kwargs = {"top_k": 0} | SETTINGS[setting]
    many = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "num_return_sequences": SEQUENCES // 2}
    model.reset_totals()
    sequences = [model.generate(PROMPT, draft_length=length, **many, **kwargs) for length in (2, "confidence")]
    assert 0 < model.totals.accepted < model.totals.drafted
    assert p_value(counts(torch.cat(sequences)), exact_distribution(target, **kwargs)) > ALPHA


@pytest.mark.parametrize("assisted", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (1e-300, 5e-324, 1e-31, math.inf, -1.0, math.nan)),
        *((name, math.nan) for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")),
        ("repetition_penalty", math.nan),
    ],
)
def test_settings_without_a_distribution_are_named(pair, name, value, assisted):
    model = pair[1]
    for given in ({name: value}, {"generation_config": GenerationConfig(**{name: 0.5, "do_sample": True})}):
        if "generation_config" in given:
            setattr(given["generation_config"], name, value)
        with pytest.raises(ValueError, match=name):
            model.generate(PROMPT, max_new_tokens=2, do_sample=True, assisted=assisted, **given)
        if assisted:
            with pytest.raises(ValueError, match=name):
                list(model.generate_many([PROMPT[0]], max_new_tokens=2, do_sample=True, **given))
    # what has no effect is no error
    model.generate(PROMPT, max_new_tokens=2, do_sample=False, assisted=assisted, **{name: value} if value > 0 else {})


@pytest.mark.parametrize("temperature", [1e-30, 1e3, 1e38])
def test_temperatures_at_the_ends_of_their_range(pair, temperature):
    target, model = pair
    made = model.generate(PROMPT, max_new_tokens=4, do_sample=True, temperature=temperature, draft_length=2)
    assert made.shape[1] > PROMPT.shape[1]
    if temperature < 1:  # the top-1 token has all of the probability
        assert torch.equal(made, target.generate(PROMPT, max_new_tokens=4, do_sample=False))


def test_an_unknown_processor_follows_the_distribution_in_step(pair):
    target, model = pair
    torch.manual_seed(12)
    kwargs = {"top_k": 0, "logits_processor": [Doubled()]}
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "draft_length": 2, **kwargs}
    model.reset_totals()
    sequences = [model.generate(PROMPT.repeat(8, 1), **call) for _ in range(375)]
    assert model.totals.accepted > 300
    assert p_value(counts(torch.cat(sequences)), exact_distribution(target, **kwargs)) > ALPHA


def test_a_distribution_that_is_wrong_is_found(pair):
    """The test's own power: a temperature of 0.8 instead of 1."""
    target, model = pair
    torch.manual_seed(13)
    out = model.generate(
        PROMPT, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, num_return_sequences=SEQUENCES, temperature=0.8
    )
    assert p_value(counts(out), exact_distribution(target, top_k=0)) < ALPHA


def test_the_enumeration_is_a_distribution(pair):
    distribution = exact_distribution(pair[0], top_k=3)
    assert distribution.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert len(distribution) == len(list(itertools.product(range(VOCABULARY), repeat=NEW_TOKENS)))
