"""Several candidates at one node: the rules for token trees, checked against the distribution they must leave untouched.

As in test_acceptance.py: every drafted tree, every outcome of the uniforms, the distribution of the emitted token,
completed with the target's distribution. tools/mutants.py shows what the enumeration can see.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_acceptance import (
    ALPHA,
    EXACT,
    Tables,
    along,
    chosen,
    completed,
    joint,
    normalised,
    one_hot,
    p_value,
    pair_of_distributions,
    prefix,
    random_tables,
    tv,
)
from torch import Tensor

from assisted import lockstep, verification
from assisted.core import acceptance
from assisted.core.acceptance import rejection, rejection_tree, residual, sample, taken_out, tree_walk
from assisted.core.drafts import Draft
from assisted.distribution import Distribution
from assisted.methods.shared.trees import merge


@dataclass(frozen=True)
class Drafted:
    """Every tree that may be drafted, one a row, and how likely it is."""

    draft: Draft
    weight: Tensor


def nodes(draft: Draft, V: int) -> Tensor:
    """[B, n+1]: which node of the V-ary tree of all texts each column stands for, counted level by level from the root, 0."""
    found = torch.zeros(len(draft.tokens), draft.width + 1, dtype=torch.int64)
    for i in range(draft.width):
        above = found.gather(1, (draft.parents[:, i : i + 1] + 1).clamp(min=0))[:, 0]
        found[:, i + 1] = (above * V + 1 + draft.tokens[:, i]).where(i < draft.lengths, 0)
    return found


def distributions_after(draft: Draft, tables: Tables) -> Tensor:
    """[B, n+1, V]: the distribution at the root and after each node."""
    return torch.cat(tables)[nodes(draft, tables[0].shape[-1])]


def distributions_before(draft: Draft, tables: Tables) -> Tensor:
    """[B, n, V]: the distribution at each node's parent."""
    found = nodes(draft, tables[0].shape[-1]).gather(1, (draft.parents + 1).clamp(min=0))
    return torch.cat(tables)[found]


def drawn_trees(parents: list[int], tables: Tables, replacement: bool) -> Drafted:
    """All assignments of tokens to a tree of a fixed shape whose siblings are drawn one after the other from one
    distribution."""
    V, n = tables[0].shape[-1], len(parents)
    tokens = torch.tensor(list(itertools.product(range(V), repeat=n))).reshape(V**n, n)
    draft = Draft(tokens, torch.full((V**n,), n), parents=torch.tensor(parents).expand(V**n, n))
    full = q = distributions_before(draft, tables)
    if not replacement:
        q = taken_out(draft.tokens, draft.parents, draft.lengths, q)
    weight = torch.ones(V**n, dtype=torch.float64)
    for node in range(n):
        distribution = full[:, node].clone()
        for older in range(node) if not replacement else ():
            if parents[older] == parents[node]:
                distribution.scatter_(1, tokens[:, older : older + 1], 0)
        distribution[distribution.sum(-1) == 0, 0] = 1  # nothing is left to draw from: some token that does not count
        weight *= normalised(distribution).gather(1, tokens[:, node : node + 1])[:, 0]
    return Drafted(replace(draft, q=q), weight)


def merged_chains(*members: tuple[Tables, bool]) -> Drafted:
    """All chains of several drafters, merged; those that say False are certain of theirs (tables of one-hot
    distributions) and bring no q."""
    V = members[0][0][0].shape[-1]
    chains = [torch.tensor(list(itertools.product(range(V), repeat=len(tables)))) for tables, _ in members]
    picks = torch.tensor(list(itertools.product(*(range(len(c)) for c in chains))))
    weight = torch.ones(len(picks), dtype=torch.float64)
    drafts = []
    for place, (tables, has_q) in enumerate(members):
        tokens = chains[place][picks[:, place]]
        q = along(tables, tokens)
        weight *= chosen(q, tokens).prod(-1)
        drafts.append(Draft(tokens, torch.full((len(picks),), tokens.shape[1]), q if has_q else None))
    possible = weight > 0
    some = [Draft(d.tokens[possible], d.lengths[possible], None if d.q is None else d.q[possible]) for d in drafts]
    return Drafted(merge(some), weight[possible])


def outcomes(drafted: Drafted, target: Tables) -> tuple[Tensor, Tensor, Tensor, Draft]:
    """Every (tree, pattern of successes): its probability, the nodes kept, the distribution of the emitted token, its tree.

    That of `tree_walk`, and of the public function, caught handing its distribution to `sample`.
    """
    n = drafted.draft.width
    patterns = torch.tensor(list(itertools.product([True, False], repeat=n))).reshape(2**n, n)
    draft, copies = drafted.draft, len(patterns)
    success = patterns.repeat(len(draft.tokens), 1)
    tokens, parents, lengths, p, q, weight = (
        x.repeat_interleave(copies, 0)
        for x in (
            draft.tokens,
            draft.parents,
            draft.lengths,
            distributions_after(draft, target),
            draft.q,
            drafted.weight,
        )
    )
    # what stands in the padding must not matter
    padding = torch.arange(n) >= lengths[:, None]
    tokens, parents = tokens.masked_fill(padding, -1), parents.masked_fill(padding, -1)
    p[:, 1:][padding] = q[padding] = torch.nan
    u = torch.where(success, 0.0, 1.0).double()
    kept, distribution, accept = tree_walk(tokens, parents, lengths, p, q, u)
    with (
        mock.patch.object(acceptance, "uniforms", return_value=u),
        mock.patch.object(acceptance, "sample", return_value=lengths) as drawn,
    ):
        path, verdict = rejection_tree(tokens, parents, lengths, p, q)
    assert (verdict.accepted == kept.sum(-1)).all() and (drawn.call_args.args[0] == distribution).all()
    on_path = path.clamp(min=0)
    assert kept.gather(1, on_path)[path >= 0].all() and ((path >= 0).sum(-1) == verdict.accepted).all()
    assert (path.diff(dim=1) > 0)[path[:, 1:] >= 0].all()
    assert ((accept >= 0) & (accept <= 1)).all() and not kept[padding].any()
    probability = weight * torch.where(success, accept, 1 - accept).prod(-1)
    return probability, kept, distribution, Draft(tokens, lengths, parents=parents)


def output_error(drafted: Drafted, target: Tables) -> float:
    """TV between the distribution of the first tokens of the output and the target's own."""
    probability, kept, distribution, draft = outcomes(drafted, target)
    V = target[0].shape[-1]
    last = torch.where(kept, torch.arange(1, draft.width + 1), 0).amax(-1, keepdim=True)
    follows = nodes(draft, V).gather(1, last) * V + 1 + torch.arange(V)  # [rows, V]
    sizes = [V**k for k in range(len(target) + 1)]
    mass = torch.zeros(sum(sizes), dtype=torch.float64)
    possible = probability > 0
    mass.index_add_(0, follows[possible].flatten(), (probability[:, None] * distribution)[possible].flatten())
    return tv(completed(list(mass.split(sizes)), target), joint(target))


def expected_accepted(drafted: Drafted, target: Tables) -> float:
    probability, kept, _, _ = outcomes(drafted, target)
    return float((probability * kept.sum(-1)).sum())


SHAPES = {
    "two candidates": [-1, -1],
    "three candidates": [-1, -1, -1],
    "more than there are tokens": [-1] * 4,
    "a chain": [-1, 0, 1],
    "two chains": [-1, 0, -1, 2],
    "depth 2": [-1, -1, 0, 0],
    "depth 2, level by level": [-1, -1, 0, 1, 1],
}
LAWS = ["random", "sharp", "zeros", "one-hot draft", "one-hot target", "identical", "nearly identical", "disjoint"]
LAWS += ["truncated draft", "truncated target", "uniform draft", "one token shared"]


def depth(parents: list[int]) -> int:
    return max(
        (
            int(d)
            for d in Draft(
                torch.zeros(1, len(parents)).long(), torch.tensor([len(parents)]), None, torch.tensor([parents]).long()
            )
            .depths()
            .flatten()
        ),
        default=0,
    )


def tree_of_distributions(kind: str, shape: str, V: int, seed: int) -> tuple[Tables, Tables]:
    return pair_of_distributions(kind, V, depth(SHAPES[shape]), seed)


@pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without replacement"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", LAWS)
def test_output_distribution_is_the_targets(kind: str, shape: str, replacement: bool) -> None:
    for seed in range(2):
        target, draft = tree_of_distributions(kind, shape, 3, seed)
        drafted = drawn_trees(SHAPES[shape], draft, replacement)
        assert drafted.weight.sum() == pytest.approx(1)
        assert output_error(drafted, target) < EXACT


def members_of(kind: str, V: int, seeds: list[int], g: int) -> tuple[Tables, list[Tables]]:
    """A target, and drafters that know it in different ways."""
    target, _ = pair_of_distributions(kind, V, g, seeds[0])
    return target, [pair_of_distributions(kind, V, g, seed)[1] for seed in seeds]


@pytest.mark.parametrize("kind", LAWS)
def test_merged_chains_of_different_drafters(kind: str) -> None:
    """Each candidate has the distribution of its own drafter; twins and what they share included."""
    target, (one, two) = members_of(kind, 3, [0, 1], 2)
    assert output_error(merged_chains((one, True), (two, True)), target) < EXACT
    assert output_error(merged_chains((one, True), (one, True)), target) < EXACT  # twice the same distribution
    assert output_error(merged_chains((one, True), (two[:1], True)), target) < EXACT  # of different lengths


@pytest.mark.parametrize("kind", ["random", "sharp", "zeros"])
def test_merged_chains_of_drafters_with_and_without_a_distribution(kind: str) -> None:
    target, (one, two, three) = members_of(kind, 3, [0, 1, 2], 2)
    sure, surer = one_hot(two), one_hot(three)
    for first, second in ([(one, True), (sure, False)], [(sure, False), (one, True)], [(sure, True), (one, True)]):
        assert output_error(merged_chains(first, second), target) < EXACT
    assert output_error(merged_chains((one, True), (sure, False), (surer, False)), target) < EXACT
    assert output_error(merged_chains((one[:1], True), (two, True), (three[:1], True)), target) < EXACT


def test_merged_chains_of_three_drafters() -> None:
    target, distributions = members_of("random", 2, [0, 1, 2], 2)
    assert output_error(merged_chains(*((tables, True) for tables in distributions)), target) < EXACT


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_output_distribution_is_the_targets_on_any_distributions_and_trees(data: st.DataObject) -> None:
    V, n = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 4))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(n)]
    g = depth(parents)
    # few distinct weights, so that ties, zeros and equal distributions are common
    weights = st.lists(st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.0, 1e-9]), min_size=V, max_size=V).filter(any)

    def tables(count: int) -> Tables:
        rows = [data.draw(st.lists(weights, min_size=V**k, max_size=V**k)) for k in range(count)]
        return [normalised(torch.tensor(row, dtype=torch.float64)) for row in rows]

    target, draft = tables(g + 1), tables(g)
    for replacement in (True, False):
        assert output_error(drawn_trees(parents, draft, replacement), target) < EXACT


def true_rest(left: Tensor, distribution: Tensor) -> Tensor:
    return residual(left, distribution, torch.ones_like(left[..., 0]))


# --------------------------------------------------------------------------------------------------------------------
# What the papers promise beyond exactness


@pytest.mark.parametrize("kind", ["random", "sharp", "uniform draft", "disjoint"])
def test_more_candidates_never_accept_less(kind: str) -> None:
    for seed in range(3):
        target, draft = pair_of_distributions(kind, 4, 1, seed)
        for replacement in (True, False):
            counts = [
                expected_accepted(drawn_trees([-1] * candidates, draft, replacement), target)
                for candidates in (1, 2, 3)
            ]
            assert counts == sorted(counts)
            assert counts[0] == pytest.approx(1 - tv(target[0][0], draft[0][0]))


def test_without_replacement_all_tokens_are_enough() -> None:
    """Who proposes every token proposes the right one; drawing with replacement does not."""
    target, draft = pair_of_distributions("random", 3, 1, 0)
    assert expected_accepted(drawn_trees([-1] * 3, draft, False), target) == pytest.approx(1)
    assert expected_accepted(drawn_trees([-1] * 3, draft, True), target) < 0.99


def test_what_is_sure_to_be_proposed_is_best_tried_last() -> None:
    """Why merging puts drafters without q behind the others."""
    target, (one, two) = members_of("random", 4, [0, 1], 1)
    sure = one_hot(two)
    last = expected_accepted(merged_chains((one, True), (sure, True)), target)
    first = expected_accepted(merged_chains((sure, True), (one, True)), target)
    assert last > first + 1e-3
    assert expected_accepted(merged_chains((sure, False), (one, True)), target) == pytest.approx(last)


def test_certain_candidates_are_sample_match() -> None:
    """One-hot distributions of different tokens: accepted with the sum of their probabilities."""
    target, _ = pair_of_distributions("random", 4, 1, 0)
    tokens = torch.tensor([[2, 0]])
    q = torch.nn.functional.one_hot(tokens, 4).double()
    drafted = Drafted(Draft(tokens, torch.tensor([2]), q, torch.tensor([[-1, -1]])), torch.ones(1).double())
    assert expected_accepted(drafted, target) == pytest.approx(float(target[0][0, [2, 0]].sum()))


# --------------------------------------------------------------------------------------------------------------------
# The walk


def walk_row(
    tokens: list[int], parents: list[int], length: int, p: Tensor, q: Tensor, u: list[float]
) -> tuple[list[int], Tensor]:
    """One row in plain Python: at every node its children, one after the other."""
    path: list[int] = []
    node = -1
    while True:
        left = p[node + 1]
        for child in range(length):
            if parents[child] == node:
                x = tokens[child]
                if q[child, x] > 0 and left[x] > 0 and u[child] < min(1.0, float(left[x] / q[child, x])):
                    path.append(child)
                    break
                left = true_rest(left, q[child])
        else:
            return path, left
        node = child


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_tree_walk_is_the_plain_walk(data: st.DataObject) -> None:
    B, n, V = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 8)), data.draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    junk = st.integers(-3, 12)
    rows = []
    for _ in range(B):
        length = data.draw(st.integers(0, n))
        tokens = [data.draw(st.integers(0, V - 1)) for _ in range(length)] + [
            data.draw(junk) for _ in range(n - length)
        ]
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(length)]
        rows.append((tokens, parents + [data.draw(junk) for _ in range(n - length)], length))
    tokens, parents, lengths = (torch.tensor(x, dtype=torch.int64) for x in zip(*rows, strict=True))
    p = random_tables(1, V, rng, zeros=0.3)[0].new_empty(B, n + 1, V).exponential_(generator=rng)
    q = torch.empty(B, n, V, dtype=torch.float64).exponential_(generator=rng)
    p, q = normalised(p), normalised(q)
    q[torch.arange(n) >= lengths[:, None]] = torch.nan
    u = torch.rand(B, n, generator=rng, dtype=torch.float64)
    kept, distribution, _ = tree_walk(tokens, parents, lengths, p, q, u)
    for b, (of_row, above, length) in enumerate(rows):
        path, left = walk_row(of_row, above, length, p[b], q[b], u[b].tolist())
        assert kept[b].nonzero()[:, 0].tolist() == path
        assert tv(distribution[b], left) < EXACT


def test_a_chain_is_a_tree() -> None:
    """The same uniforms, the same verdict as `rejection`."""
    B, n, V = 300, 4, 5
    rng = torch.Generator().manual_seed(0)
    p = normalised(torch.empty(B, n + 1, V, dtype=torch.float64).exponential_(generator=rng))
    q = normalised(torch.empty(B, n, V, dtype=torch.float64).exponential_(generator=rng))
    tokens, lengths = sample(q, rng), torch.randint(n + 1, (B,), generator=rng)
    chain = rejection(tokens, lengths, p, q, torch.Generator().manual_seed(1))
    parents = torch.arange(-1, n - 1).expand(B, n)
    path, tree = rejection_tree(tokens, parents, lengths, p, q, torch.Generator().manual_seed(1))
    assert tree.accepted.equal(chain.accepted) and tree.token.equal(chain.token)
    node = torch.arange(n)
    assert path.equal(torch.where(node < chain.accepted.unsqueeze(-1), node, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_drafted(dtype: torch.dtype) -> None:
    B, V = 20, 4
    nothing, lengths = torch.zeros(B, 0, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
    p = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=dtype).expand(B, 1, V)
    path, verdict = rejection_tree(nothing, nothing, lengths, p, torch.zeros(B, 0, V, dtype=dtype))
    assert path.shape == (B, 0) and (verdict.accepted == 0).all() and (verdict.token == 2).all()
    assert path.dtype == verdict.accepted.dtype == verdict.token.dtype == torch.int64


def test_an_exhausted_draft_leaves_p() -> None:
    """All that q has was tried: a further column is never kept and takes nothing out of p."""
    tokens, parents, lengths = torch.tensor([[1, 0, 2]]), torch.tensor([[-1, -1, -1]]), torch.tensor([3])
    q = torch.tensor([0.5, 0.5, 0.0]).double().expand(1, 3, 3)
    q = taken_out(tokens, parents, lengths, q)
    assert q[0].tolist() == [[0.5, 0.5, 0], [1, 0, 0], [0, 0, 0]]
    p = torch.tensor([0.2, 0.2, 0.6]).double().expand(1, 4, 3)
    kept, distribution, accept = tree_walk(tokens, parents, lengths, p, q, torch.ones(1, 3).double())
    assert not kept.any() and accept[0, 2] == 0 and distribution[0].tolist() == pytest.approx([0, 0, 1])


def test_dtype_is_kept() -> None:
    target, draft = tree_of_distributions("random", "depth 2", 3, 0)
    drafted = drawn_trees(SHAPES["depth 2"], draft, True).draft
    p, q = distributions_after(drafted, target).float(), drafted.q.float()
    shape = drafted.tokens, drafted.parents, drafted.lengths
    _, distribution, accept = tree_walk(*shape, p, q, torch.rand(drafted.tokens.shape))
    assert distribution.dtype == accept.dtype == taken_out(*shape, q).dtype == torch.float32


@pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without replacement"])
@pytest.mark.parametrize("kind", ["random", "zeros"])
def test_drawn_output_follows_the_target(kind: str, replacement: bool) -> None:
    """The public function with its own uniforms, in float32, on trees of two candidates with two each."""
    V, B = 4, 60_000
    rng = torch.Generator().manual_seed(2)
    target, draft = (
        [distribution.float() for distribution in tables] for tables in pair_of_distributions(kind, V, 2, 0)
    )
    tokens, parents = torch.zeros(B, 6, dtype=torch.int64), torch.tensor([-1, -1, 0, 0, 1, 1]).expand(B, 6)
    lengths = torch.where(torch.arange(B) % 3 == 0, 3, 6)
    p = torch.zeros(B, 7, V)
    q = torch.zeros(B, 6, V)
    p[:, 0] = target[0]
    for node, above in enumerate([-1, -1, 0, 0, 1, 1]):
        q[:, node] = draft[0] if above < 0 else draft[1][tokens[:, above]]
        distribution = q if replacement else taken_out(tokens, parents, (node + 1) + torch.zeros_like(lengths), q)
        tokens[:, node] = sample(distribution[:, node], rng)
        seen = tokens[:, node] if above < 0 else tokens[:, above] * V + tokens[:, node]
        p[:, node + 1] = target[1 if above < 0 else 2][seen]
    q = q if replacement else taken_out(tokens, parents, lengths, q)
    path, verdict = rejection_tree(tokens, parents, lengths, p, q, rng)
    output = torch.zeros(B, 3, dtype=torch.int64)
    for k in range(3):
        kept = tokens.gather(1, path[:, k : k + 1].clamp(min=0))[:, 0]
        rest = sample(target[k][prefix(output, k, V)], rng)
        output[:, k] = torch.where(verdict.accepted > k, kept, rest).where(verdict.accepted != k, verdict.token)
    counts = prefix(output, 3, V).bincount(minlength=V**3)
    assert p_value(counts, joint([distribution.double() for distribution in target])) > ALPHA


def test_in_step_the_walk_is_the_same() -> None:
    """Judged a column at a time, with the same uniforms, a tree has the same path and the same distribution behind it."""
    target, distributions = members_of("random", 3, [0, 1], 2)
    drafted = merged_chains(*((tables, True) for tables in distributions)).draft
    B, n = drafted.tokens.shape
    p = distributions_after(drafted, target)
    u = torch.rand(B, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with mock.patch.object(acceptance, "uniforms", return_value=u):
        kept, distribution, _ = tree_walk(drafted.tokens, drafted.parents, drafted.lengths, p, drafted.q, u)
        column = torch.zeros(B, dtype=torch.int64)
        path = []
        for _ in range(n + 1):
            every = torch.arange(B)
            with mock.patch.object(acceptance, "sample", side_effect=lambda rest, generator: rest.argmax(-1)):
                scores = p[every, column].log()
                with mock.patch.object(verification, "probabilities", torch.exp):
                    token, child, _ = lockstep._choose(scores, drafted, column, Distribution([], True), mock.Mock())
            for row in (child == 0).nonzero()[:, 0].tolist():
                if len(path) == 0 or path[-1][row] > 0:
                    assert token[row] == distribution[row].argmax()
            column = torch.where(child > 0, child, column)
            path.append(child.tolist())
            if not (child > 0).any():
                break
    for row in range(B):
        assert [step[row] - 1 for step in path if step[row] > 0] == kept[row].nonzero()[:, 0].tolist()
