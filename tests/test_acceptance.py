"""The acceptance rules, checked against the distribution they must leave untouched.

Sampling cannot see an error of 1e-5, so the rules are enumerated: every drafted chain, every outcome of the uniforms,
the distribution of the emitted token, completed with the target's distribution. tools/mutants.py shows what the
enumeration can see.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from assisted.core import acceptance
from assisted.core.acceptance import (
    block,
    block_probabilities,
    by_inversion,
    by_race,
    emitted_distribution,
    first_failure,
    last_success,
    match,
    match_tree,
    matched_tree,
    rejection,
    rejection_probabilities,
    residual,
    sample,
    top1,
)

EXACT = 1e-12  # float64 rounding of a few hundred sums
ALPHA = 1e-4  # seeds are fixed: these either pass for ever or show an error
RULES = {"rejection": rejection, "block": block}

# A distribution over sequences: tables[k] is [V^k, V], the next-token distribution after each prefix of k tokens (a
# base-V number).
Tables = list[Tensor]


def random_tables(depth: int, V: int, rng: torch.Generator, sharpness: float = 1.0, zeros: float = 0.0) -> Tables:
    tables = []
    for k in range(depth):
        distribution = torch.empty(V**k, V, dtype=torch.float64).exponential_(generator=rng) ** sharpness
        dropped = torch.rand(distribution.shape, generator=rng) < zeros
        dropped[torch.arange(len(distribution)), distribution.argmax(-1)] = False
        tables.append(normalised(distribution.masked_fill(dropped, 0)))
    return tables


def normalised(distribution: Tensor) -> Tensor:
    return distribution / distribution.sum(-1, keepdim=True)


def one_hot(tables: Tables) -> Tables:
    return [
        torch.nn.functional.one_hot(distribution.argmax(-1), distribution.shape[-1]).to(distribution.dtype)
        for distribution in tables
    ]


def top_k(tables: Tables, k: int) -> Tables:
    return [
        normalised(distribution.where(distribution >= distribution.topk(k).values[:, -1:], 0))
        for distribution in tables
    ]


def halves(tables: Tables, first: bool) -> Tables:
    """All mass on the first half of the vocabulary, or on the rest."""
    V = tables[0].shape[-1]
    inside = (torch.arange(V) < V // 2) == first
    return [normalised(distribution.where(inside, 0)) for distribution in tables]


def all_chains(g: int, V: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(V), repeat=g))).reshape(V**g, g)


def prefix(chains: Tensor, k: int, V: int) -> Tensor:
    """The first k tokens of each chain as a base-V number."""
    number = torch.zeros(len(chains), dtype=torch.int64)
    for i in range(k):
        number = number * V + chains[:, i]
    return number


def along(tables: Tables, chains: Tensor) -> Tensor:
    """[B, depth, V]: the distributions met along each chain."""
    V = tables[0].shape[-1]
    distributions = [table[prefix(chains, k, V)] for k, table in enumerate(tables)]
    return torch.stack(distributions, 1) if distributions else torch.zeros(len(chains), 0, V, dtype=torch.float64)


def chosen(distributions: Tensor, chains: Tensor) -> Tensor:
    """[B, g]: the probability of each drafted token under distributions [B, g, V]."""
    return distributions.gather(-1, chains.unsqueeze(-1)).squeeze(-1)


def completed(mass: Tables, target: Tables) -> Tensor:
    """Mass left after 1, 2, ... tokens (mass[k]: [V^k]), completed with the target's distribution to its whole depth."""
    for k in range(1, len(target)):
        mass[k + 1] += (mass[k].unsqueeze(-1) * target[k]).flatten()
    return mass[-1]


def joint(target: Tables) -> Tensor:
    distribution = torch.ones(1, dtype=torch.float64)
    for table in target:
        distribution = (distribution.unsqueeze(-1) * table).flatten()
    return distribution


def matched(tokens: Tensor, lengths: Tensor, choice: Tensor) -> acceptance.Verdict:
    """`match` row by row. tokens: [B, n], lengths: [B], choice: [B, n + 1]."""
    rows = zip(tokens.tolist(), lengths.tolist(), choice.tolist(), strict=True)
    kept, emitted = zip(*(match(row[:length], wanted) for row, length, wanted in rows), strict=True)
    assert all(places == range(len(places)) for places in kept)
    return acceptance.Verdict(torch.tensor(list(map(len, kept))), torch.tensor(emitted))


def tv(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


# --------------------------------------------------------------------------------------------------------------------
# Enumeration of a rule


@dataclass(frozen=True)
class Rule:
    """A rule in two halves: how likely each uniform succeeds, and what follows from the uniforms."""

    probabilities: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(tokens, lengths, p, q) -> [B, n]"""
    decide: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(tokens, lengths, p, q, uniforms) -> accepted [B], distribution of the emitted token [B, V]"""


def shipped(rule: Callable[..., acceptance.Verdict]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The public function itself, given its uniforms, and caught handing its distribution to `sample`."""

    def decide(tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        with (
            mock.patch.object(acceptance, "uniforms", return_value=u),
            mock.patch.object(acceptance, "sample", return_value=lengths) as drawn,
        ):
            verdict = rule(tokens, lengths, p, q)
        return verdict.accepted, drawn.call_args.args[0]

    return decide


REJECTION = Rule(lambda tokens, lengths, p, q: rejection_probabilities(tokens, p, q), shipped(rejection))
BLOCK = Rule(lambda tokens, lengths, p, q: block_probabilities(tokens, lengths, p, q)[0], shipped(block))
EXACT_RULES = {"rejection": REJECTION, "block": BLOCK}


@dataclass(frozen=True)
class Outcomes:
    """Every (chain, pattern of successes) with its probability, and what the rule made of it."""

    chains: Tensor  # [B, g]
    probability: Tensor  # [B]
    accepted: Tensor  # [B]
    distribution: Tensor  # [B, V]


def enumerate_rule(rule: Rule, target: Tables, drawn: Tables, lengths: Tensor | None = None) -> Outcomes:
    """Chains are drawn from `drawn`; lengths: [V^g], per chain, g if not given."""
    g, V = len(drawn), target[0].shape[-1]
    chains = all_chains(g, V)
    weight = chosen(along(drawn, chains), chains).prod(-1)
    lengths = torch.full((V**g,), g) if lengths is None else lengths
    # every pattern of successes for every chain
    patterns = torch.tensor(list(itertools.product([True, False], repeat=g))).reshape(2**g, g)
    chains, weight, lengths = (x.repeat_interleave(len(patterns), 0) for x in (chains, weight, lengths))
    success = patterns.repeat(V**g, 1)
    # what stands in the padding must not matter
    p, q = along(target, chains), along(drawn, chains)
    column = torch.arange(g + 1)
    padding = column[:g] >= lengths.unsqueeze(-1)
    tokens = chains.masked_fill(padding, -1)
    p = p.masked_fill((column > lengths.unsqueeze(-1)).unsqueeze(-1), torch.nan)
    q = q.masked_fill(padding.unsqueeze(-1), torch.nan)

    a = rule.probabilities(tokens, lengths, p, q).masked_fill(padding, 0.5)
    accepted, distribution = rule.decide(tokens, lengths, p, q, torch.where(success, 0.0, 1.0).double())
    assert ((a >= 0) & (a <= 1))[weight > 0].all()
    assert (accepted <= lengths).all() and not padding.gather(1, (accepted - 1).clamp(min=0).unsqueeze(-1))[
        accepted > 0
    ].any()
    return Outcomes(chains, weight * torch.where(success, a, 1 - a).prod(-1), accepted, distribution)


def output_error(rule: Rule, target: Tables, drawn: Tables, **kwargs: Tensor | Tables) -> float:
    """TV between the distribution of the first g+1 tokens of the output and the target's own."""
    outcomes = enumerate_rule(rule, target, drawn, **kwargs)  # type: ignore[arg-type]
    V = target[0].shape[-1]
    mass = [torch.zeros(V**k, dtype=torch.float64) for k in range(len(target) + 1)]
    for k in range(len(drawn) + 1):
        rows = (outcomes.accepted == k) & (outcomes.probability > 0)
        emitted = outcomes.probability[rows].unsqueeze(-1) * outcomes.distribution[rows]  # [rows, V]
        first = prefix(outcomes.chains[rows], k, V).unsqueeze(-1) * V
        mass[k + 1].index_add_(0, (first + torch.arange(V)).flatten(), emitted.flatten())
    return tv(completed(mass, target), joint(target))


def expected_accepted(rule: Rule, target: Tables, drawn: Tables) -> float:
    outcomes = enumerate_rule(rule, target, drawn)
    return float((outcomes.probability * outcomes.accepted).sum())


LAWS = ["random", "sharp", "zeros", "one-hot draft", "one-hot target", "identical", "nearly identical", "disjoint"]
LAWS += ["truncated draft", "truncated target", "uniform draft", "one token shared"]


def pair_of_distributions(kind: str, V: int, g: int, seed: int) -> tuple[Tables, Tables]:
    """Target to depth g+1, draft to depth g."""
    rng = torch.Generator().manual_seed(1000 * seed + 10 * V + g)
    sharpness = 6.0 if kind == "sharp" else 1.0
    zeros = 0.4 if kind == "zeros" else 0.0
    p, q = (random_tables(g + 1, V, rng, sharpness, zeros) for _ in range(2))
    match kind:
        case "one-hot draft":
            q = one_hot(q)
        case "one-hot target":
            p = one_hot(p)
        case "identical":
            q = p
        case "nearly identical":
            q = [normalised(distribution * (1 + 1e-9 * noise)) for distribution, noise in zip(p, q, strict=True)]
        case "disjoint":
            p, q = halves(p, True), halves(q, False)
        case "truncated draft":
            q = top_k(q, 2)
        case "truncated target":
            p = top_k(p, 2)
        case "uniform draft":
            q = [torch.full_like(distribution, 1 / V) for distribution in q]
        case "one token shared":
            p = [
                normalised(distribution + half) for distribution, half in zip(one_hot(p), halves(p, True), strict=True)
            ]
            q = [
                normalised(distribution + half) for distribution, half in zip(one_hot(p), halves(q, False), strict=True)
            ]
    return p, q[:g]


def stopped_lengths(V: int, g: int, seed: int) -> Tensor:
    """[V^g]: a random stopping rule that looks at the tokens drafted so far, never at the next."""
    rng = torch.Generator().manual_seed(seed)
    chains, lengths = all_chains(g, V), torch.full((V**g,), g)
    for k in reversed(range(g)):
        stops = torch.rand(V**k, generator=rng) < 0.35
        lengths = torch.where(stops[prefix(chains, k, V)], k, lengths)
    return lengths


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", LAWS)
def test_output_distribution_is_the_targets(rule: str, kind: str) -> None:
    for V, g, seed in itertools.product([3, 4, 5], [1, 2, 3], range(3)):
        target, draft = pair_of_distributions(kind, V, g, seed)
        assert output_error(EXACT_RULES[rule], target, draft) < EXACT, (V, g, seed)
        for lengths in (torch.full((V**g,), g - 1), stopped_lengths(V, g, seed)):
            assert output_error(EXACT_RULES[rule], target, draft, lengths=lengths) < EXACT, (V, g, seed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_output_distribution_is_the_targets_on_any_distributions(data: st.DataObject) -> None:
    V, g = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    # few distinct weights, so that ties, zeros and equal distributions are common
    weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 1e-9]), min_size=V, max_size=V).filter(any)

    def tables(depth: int) -> Tables:
        rows = [data.draw(st.lists(weights, min_size=V**k, max_size=V**k)) for k in range(depth)]
        return [normalised(torch.tensor(row, dtype=torch.float64)) for row in rows]

    target, draft = tables(g + 1), tables(g)
    for rule in EXACT_RULES.values():
        assert output_error(rule, target, draft) < EXACT


# --------------------------------------------------------------------------------------------------------------------
# What the papers promise beyond exactness


@st.composite
def table_pairs(draw: st.DrawFn) -> tuple[Tables, Tables]:
    V, g = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sharpness, zeros = draw(st.sampled_from([0.3, 1.0, 5.0])), draw(st.sampled_from([0.0, 0.3]))
    target, draft = (random_tables(g + 1, V, rng, sharpness, zeros) for _ in range(2))
    return target, draft[:g]


@settings(max_examples=60, deadline=None)
@given(table_pairs())
def test_block_never_accepts_fewer_than_rejection(pair: tuple[Tables, Tables]) -> None:
    assert expected_accepted(BLOCK, *pair) >= expected_accepted(REJECTION, *pair) - EXACT


def test_block_can_accept_more_than_rejection() -> None:
    pair = pair_of_distributions("random", 4, 3, 0)
    assert expected_accepted(BLOCK, *pair) > expected_accepted(REJECTION, *pair) + 0.01


@settings(max_examples=60, deadline=None)
@given(table_pairs())
def test_rejection_accepts_with_one_minus_tv(pair: tuple[Tables, Tables]) -> None:
    p, q = pair[0][0][0], pair[1][0][0]
    V = len(p)
    accept = rejection_probabilities(torch.arange(V).unsqueeze(-1), p.expand(V, 2, V), q.expand(V, 1, V)).squeeze(-1)
    assert float((q * accept).sum()) == pytest.approx(1 - tv(p, q), abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_one_hot_q_makes_all_rules_one(seed: int) -> None:
    """Per chain, the joint distribution of (tokens kept, token emitted) under rejection, block and sample-match."""
    V, g = 4, 3
    target, _ = pair_of_distributions("random", V, g, seed)
    chain = all_chains(g, V)[13 * seed : 13 * seed + 1]
    draft = [torch.nn.functional.one_hot(chain[:, k], V).double().expand(V**k, V) for k in range(g)]
    distributions = []
    for rule in EXACT_RULES.values():
        outcomes = enumerate_rule(rule, target, draft)
        distribution = torch.zeros(g + 1, V, dtype=torch.float64)
        distributions.append(
            distribution.index_add(0, outcomes.accepted, outcomes.probability.unsqueeze(-1) * outcomes.distribution)
        )
    draws = all_chains(g + 1, V)
    rows = len(draws)
    verdict = matched(chain.expand(rows, g), torch.full((rows,), g), draws)
    weight = chosen(along(target, chain).expand(rows, g + 1, V), draws).prod(-1)
    of_match = torch.zeros(g + 1, V, dtype=torch.float64)
    of_match.index_put_((verdict.accepted, verdict.token), weight, accumulate=True)
    for distribution in distributions:
        torch.testing.assert_close(distribution, of_match, rtol=0, atol=EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_one_hot_distributions_are_greedy(rule: str) -> None:
    V, g, B = 3, 4, 500
    rng = torch.Generator().manual_seed(0)
    choice = torch.randint(V, (B, g + 1), generator=rng)
    tokens = torch.where(torch.rand(B, g, generator=rng) < 0.7, choice[:, :g], torch.randint(V, (B, g), generator=rng))
    lengths = torch.randint(g + 1, (B,), generator=rng)
    p, q = (torch.nn.functional.one_hot(x, V).float() for x in (choice, tokens))
    verdict, greedy = RULES[rule](tokens, lengths, p, q, rng), matched(tokens, lengths, choice)
    assert verdict.accepted.equal(greedy.accepted) and verdict.token.equal(greedy.token)


# --------------------------------------------------------------------------------------------------------------------
# match and match_tree


def walk(tokens: list[int], parents: list[int], choice: list[int]) -> tuple[list[int], int]:
    """match_tree by its definition: level by level, each child looked for among all nodes."""
    path: list[int] = []
    node = -1
    while True:
        wanted = choice[node + 1]
        child = next((i for i in range(len(tokens)) if parents[i] == node and tokens[i] == wanted), None)
        if child is None:
            return path, wanted
        path.append(child)
        node = child


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_match_tree_is_the_plain_walk(data: st.DataObject) -> None:
    n, V = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3))
    token = st.integers(0, V - 1)
    tokens = [data.draw(token) for _ in range(n)]
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    choice = [data.draw(token) for _ in range(n + 1)]
    more = [data.draw(token) for _ in range(data.draw(st.integers(0, 2)))]  # after nodes that this row does not have
    path, emitted = match_tree(tokens, parents, choice + more)
    assert (path, emitted) == walk(tokens, parents, choice)
    columns = torch.tensor([[*tokens, *more[1:]], [*parents, *more[1:]]]).view(2, 1, -1)
    (on_device,) = matched_tree(*columns, torch.tensor([n]), torch.tensor([choice + more[1:]])).tolist()
    assert on_device == path + [-1] * (len(on_device) - len(path))


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9])
def test_a_chain_is_a_tree(n: int) -> None:
    rng = torch.Generator().manual_seed(n)
    for _ in range(200):
        choice = torch.randint(2, (n + 1,), generator=rng).tolist()
        right = (torch.rand(n, generator=rng) < 0.9).tolist()
        tokens = [chosen if is_right else 1 - chosen for chosen, is_right in zip(choice, right, strict=False)]
        kept, emitted = match(tokens, choice)
        assert match_tree(tokens, list(range(-1, n - 1)), choice) == ([*kept], emitted)


def test_twins_go_to_the_first() -> None:
    # two roots "1"; only the second has a child, which is then out of reach
    assert match_tree([1, 1, 2], [-1, -1, 1], [1, 2, 2, 0]) == ([0], 2)


TREES = {
    "chain": ([0, 1, 2], [-1, 0, 1]),
    "full first level": ([0, 1, 2, 1], [-1, -1, -1, 1]),
    "two levels": ([0, 2, 1, 0], [-1, -1, 0, 1]),
    "twins": ([1, 1, 2, 0], [-1, -1, 1, 0]),
    "empty": ([], []),
}


@pytest.mark.parametrize("tree", TREES)
def test_sample_match_is_lossless(tree: str) -> None:
    """All draws at all nodes: the tokens on the path and the emitted one follow the target."""
    V, depth = 3, 4
    tokens, parents = TREES[tree]
    n = len(tokens)
    target = random_tables(depth, V, torch.Generator().manual_seed(n), zeros=0.2)
    to_node: list[list[int]] = [[]]  # the tokens that lead to each slot, root first
    for token, parent in zip(tokens, parents, strict=True):
        to_node.append([*to_node[parent + 1], token])
    distributions = []
    for prefix_tokens in to_node:
        number = prefix(torch.tensor([prefix_tokens], dtype=torch.int64), len(prefix_tokens), V)
        distributions.append(target[len(prefix_tokens)][number][0])
    draws = all_chains(n + 1, V)
    rows = len(draws)
    weight = chosen(torch.stack(distributions).expand(rows, n + 1, V), draws).prod(-1)
    mass = [torch.zeros(V**k, dtype=torch.float64) for k in range(depth + 1)]
    for b in range(rows):
        path, emitted = match_tree(tokens, parents, draws[b].tolist())
        k = len(path)
        output = [*(tokens[node] for node in path), emitted]
        mass[k + 1][prefix(torch.tensor([output]), k + 1, V)] += weight[b]
    assert tv(completed(mass, target), joint(target)) < EXACT


# --------------------------------------------------------------------------------------------------------------------
# The parts


def p_value(counts: Tensor, distribution: Tensor) -> float:
    """Chi-square of counts [m] against distribution [m], rare outcomes in one bin. What has probability 0 must not occur."""
    assert counts[distribution == 0].sum() == 0
    expected = normalised(distribution) * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    return float(stats.chisquare(observed[expected > 0].numpy(), expected[expected > 0].numpy()).pvalue)


either_way = pytest.mark.parametrize("sample", [by_race, by_inversion], ids=["race", "inversion"])


@either_way
def test_sample_follows_the_distribution(sample: Callable[..., Tensor]) -> None:
    distribution = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    counts = sample(distribution.expand(200_000, 5), torch.Generator().manual_seed(0)).bincount(minlength=5)
    assert p_value(counts, distribution.double()) > ALPHA


@either_way
def test_sample_of_unnormalised_rows_of_any_rank(sample: Callable[..., Tensor]) -> None:
    distribution = torch.tensor([[[0.0, 1e-30], [7.0, 0.0]], [[0.0, 3.0], [0.0, 0.0]]])
    drawn = sample(distribution)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [[1, 0], [1, 0]]


def test_sample_never_draws_probability_zero_when_the_race_ties() -> None:
    """E = 0 gives 0/0, and argmax prefers NaN."""
    distribution = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    with mock.patch.object(torch.Tensor, "exponential_", lambda self, generator=None: self.zero_()):
        assert (distribution.gather(-1, by_race(distribution).unsqueeze(-1)) > 0).all()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_inversion_never_draws_probability_zero(u: float) -> None:
    """Not for the least and the largest number there is, whatever the mass of the row."""
    generator = torch.Generator().manual_seed(0)
    distribution = torch.rand(500, 40, generator=generator).square() * torch.rand(500, 1, generator=generator)
    distribution = distribution.where(torch.rand(distribution.shape, generator=generator) < 0.3, 0)
    distribution[:, 0] = distribution[:, -1] = 0
    distribution = distribution[distribution.sum(-1) > 0]
    with mock.patch.object(torch, "rand", lambda shape, **kwargs: torch.full(shape, u, dtype=kwargs["dtype"])):
        drawn = by_inversion(distribution)
    assert (distribution.gather(-1, drawn.unsqueeze(-1)) > 0).all()
    edge = {0.0: 0, 1 - 2**-53: -1}.get(u)
    if edge is not None:
        assert drawn.tolist() == [row.nonzero()[edge].item() for row in distribution]


def test_residual() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0]).double(), torch.tensor([0.2, 0.6, 0.2]).double()
    assert residual(p, q, torch.tensor(1.0).double()).tolist() == pytest.approx([1, 0, 0])
    assert residual(p, p, torch.tensor(1.0).double()).equal(p)  # nothing is left: p
    assert residual(p, q, torch.tensor(0.0).double()).equal(p)


def test_uniforms_at_the_ends() -> None:
    lengths = torch.tensor([3, 3, 2, 0])
    u = torch.zeros(4, 3)
    a = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert first_failure(a, u, lengths).tolist() == [1, 0, 2, 0]
    assert last_success(a, u, lengths).tolist() == [3, 0, 2, 0]


@pytest.mark.parametrize("rule", RULES)
def test_forbidden_tokens_are_never_kept(rule: str) -> None:
    """p(x) = 0 rejects, even where q(x) = 0 too; q(x) = 0 < p(x) is the limit of the ratio and keeps."""
    p = torch.tensor([[[0.0, 0.5, 0.5]] * 2] * 1000)
    q = torch.tensor([[[0.0, 0.0, 1.0]]] * 1000)
    lengths = torch.ones(1000, dtype=torch.int64)
    forbidden = RULES[rule](torch.zeros(1000, 1, dtype=torch.int64), lengths, p, q)
    assert (forbidden.accepted == 0).all() and (forbidden.token != 0).all()
    assert (RULES[rule](torch.ones(1000, 1, dtype=torch.int64), lengths, p, q).accepted == 1).all()


# --------------------------------------------------------------------------------------------------------------------
# rejection and block end to end


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "zeros", "truncated draft"])
def test_drawn_output_follows_the_target(rule: str, dtype: torch.dtype, kind: str) -> None:
    V, g, B = 4, 3, 200_000
    rng = torch.Generator().manual_seed(1)
    target, draft = (
        [distribution.to(dtype) for distribution in tables]
        for tables in pair_of_distributions(kind, V, g, seed=2 if kind == "random" else 0)
    )
    tokens = torch.zeros(B, g, dtype=torch.int64)
    for k in range(g):
        tokens[:, k] = sample(draft[k][prefix(tokens, k, V)], rng)
    lengths = torch.arange(B) % (g + 1)
    verdict = RULES[rule](tokens, lengths, along(target, tokens), along(draft, tokens), rng)
    assert (verdict.accepted >= 0).all() and (verdict.accepted <= lengths).all()
    # the output: kept tokens, the emitted one, and the rest from the target
    output = torch.zeros(B, g + 1, dtype=torch.int64)
    for k in range(g + 1):
        kept = tokens[:, min(k, g - 1)]
        rest = sample(target[k][prefix(output, k, V)], rng)
        output[:, k] = torch.where(verdict.accepted > k, kept, rest).where(verdict.accepted != k, verdict.token)
    counts = prefix(output, g + 1, V).bincount(minlength=V ** (g + 1))
    assert p_value(counts, joint([distribution.double() for distribution in target])) > ALPHA


@pytest.mark.parametrize("rule", RULES)
def test_rows_do_not_touch_each_other(rule: str) -> None:
    """The same uniforms and draws, other neighbours and other padding: the same verdict."""
    V, g = 5, 3
    target, draft = pair_of_distributions("random", V, g, 0)
    tokens = all_chains(g, V)
    B = len(tokens)
    lengths = torch.arange(B) % (g + 1)
    p, q = along(target, tokens), along(draft, tokens)
    together = RULES[rule](tokens, lengths, p, q, torch.Generator().manual_seed(0))
    order = torch.arange(B) % 2 == 0  # every second row is replaced
    other_p, other_q = p.clone(), q.clone()
    other_p[~order], other_q[~order] = p.flip(0)[~order], torch.nan
    other_tokens, other_lengths = tokens.clone(), lengths.clone()
    other_tokens[~order], other_lengths[~order] = -1, 0
    apart = RULES[rule](other_tokens, other_lengths, other_p, other_q, torch.Generator().manual_seed(0))
    assert together.accepted[order].equal(apart.accepted[order])
    assert together.token[order].equal(apart.token[order])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_drafted(rule: str, dtype: torch.dtype) -> None:
    B, V = 50, 4
    lengths, tokens = torch.zeros(B, dtype=torch.int64), torch.zeros(B, 0, dtype=torch.int64)
    p = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=dtype).expand(B, 1, V)
    verdict = RULES[rule](tokens, lengths, p, torch.zeros(B, 0, V, dtype=dtype))
    assert (verdict.accepted == 0).all() and (verdict.token == 2).all()
    assert verdict.accepted.dtype == verdict.token.dtype == torch.int64
    assert matched(tokens, lengths, verdict.token.unsqueeze(-1)).token.equal(verdict.token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    target, draft = (
        [distribution.to(dtype) for distribution in tables] for tables in pair_of_distributions("random", 3, 2, 0)
    )
    tokens = all_chains(2, 3)
    p, q, lengths = along(target, tokens), along(draft, tokens), torch.full((9,), 2)
    h, weights = block_probabilities(tokens, lengths, p, q)
    accept = rejection_probabilities(tokens, p, q)
    distribution = emitted_distribution(p, q, weights, torch.zeros_like(lengths), lengths)
    for tensor in (h, weights, accept, distribution, acceptance.uniforms(h)):
        assert tensor.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top1_is_the_first_of_the_highest_as_argmax_takes_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 1000, 50_000):
        scores = torch.randint(0, 4, (3, 5, size), generator=generator).to(dtype)  # most are ties
        scores[0, 0] = float("-inf")
        scores[0, 1, size // 2] = float("nan")
        scores[1, 0, size // 3 :] = float("inf")
        assert top1(scores).equal(scores.argmax(-1))
        assert top1(scores.transpose(0, 1)).equal(scores.argmax(-1).T)
