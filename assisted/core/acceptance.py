"""The acceptance rules: which drafted tokens are kept, and which token of the target follows them.

Pure functions on torch tensors. They never synchronise host and device, except `match` and `match_tree`, which run on the
host. Computing p and q from logits, end-of-sequence tokens and committing the result are left to the decoding loop.

Notation (2211.17192): p is the target's next-token distribution, q the draft's, and x_1 .. x_g are the drafted tokens of
a row. Chains are padded to n columns; `lengths` holds g for each row. Values in the padding have no effect, even -1 or NaN.
Column i of p and of q is the distribution after i drafted tokens. Results have the dtype of p and q.

In a token tree, `parents` holds the parent of each node. Column i + 1 of p is the distribution after node i; column i of q
is the distribution that node i was drawn from.

`rejection`, `block` and `rejection_tree` are exact under one condition (non-anticipation): whether x_i is proposed may
depend on x_1 .. x_{i-1} and on the distributions after them, but not on x_i or on later tokens. Dropping a token because
its own probability is low changes the output distribution. `match` and `match_tree` are exact for any draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """The outcome of verification, per row."""

    accepted: Tensor
    """[B] int64: number of drafted tokens kept, 0 .. lengths."""
    token: Tensor
    """[B] int64: the target's token after them: the correction, or the bonus token if all were kept."""


def match(tokens: list[int], choice: list[int]) -> tuple[range, int]:
    """Keep drafted tokens as long as they equal the target's own choice. One row, on the host.

    Exact for any draft, because every output token is taken from `choice`; needs no q.

    tokens: the g drafted tokens. choice: at least g + 1 tokens, the target's argmax (greedy) or sample (sample-match) after
    each prefix. Returns the indices of the kept tokens, and the target's token after them.
    """
    # keep x_i while it equals the choice y_i; emit y at the first difference, or after the last drafted token
    accepted = next((i for i, token in enumerate(tokens) if token != choice[i]), len(tokens))
    return range(accepted), choice[accepted]


def match_tree(tokens: list[int], parents: list[int], choice: list[int]) -> tuple[list[int], int]:
    """`match` on a token tree: from the root, descend as long as the target's choice is a drafted child. One row, on the host.

    tokens, parents: of the n nodes. `parents` holds node indices, -1 for children of the last committed token; parents
    precede their children. choice: at least n + 1 tokens; entry 0 follows the last committed token, entry i + 1 follows
    node i. Returns the nodes of the path in order, and the target's token after them.
    """
    path, here = [], -1
    # parents precede their children, so one loop suffices; of siblings with equal tokens the first is taken
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == here and token == choice[here + 1]:
            path.append(node)
            here = node
    return path, choice[here + 1]


def matched_tree(tokens: Tensor, parents: Tensor, lengths: Tensor, choice: Tensor) -> Tensor:
    """The path of `match_tree` by row, without the host: [B, n] int64, node indices in order, padded with -1.

    tokens, parents: [B, n] int64. lengths: [B] int64. choice: [B, n + 1] int64, see there.
    """
    kept = _drafted(lengths, tokens.shape[1])
    here = torch.full_like(lengths, -1)
    for i in range(tokens.shape[1]):
        kept[:, i] &= (parents[:, i] == here) & (tokens[:, i] == _at(choice, here + 1))
        here = here.masked_fill(kept[:, i], i)
    return _in_order(kept)


def rejection(
    tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """Speculative sampling (2211.17192, 2302.01318): keep x_i with probability min(1, p(x_i) / q(x_i)), stop at a rejection.

    The output follows p exactly. If x_1 .. x_{i-1} are kept, a token x_i ~ q is kept with probability 1 - TV(p, q).

    tokens: [B, n] int64. lengths: [B] int64, drafted tokens per row. p: [B, n+1, V], the target's distribution after each
    prefix. q: [B, n, V], the distribution that each token was actually drawn from: one-hot for an argmax, truncated if the
    draft's sampling was.
    """
    accept = rejection_probabilities(tokens, p, q)
    # reject the first x_i with u_i >= p(x_i) / q(x_i) ...
    accepted = first_failure(accept, uniforms(accept, generator), lengths)
    # ... and emit y ~ max(p - q, 0), normalised; without a rejection, y ~ p
    distribution = emitted_distribution(p, q, torch.ones_like(p[..., 0]), accepted, lengths)
    return Verdict(accepted, sample(distribution, generator))


def block(tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Block verification (2403.10444): exact like `rejection`, and keeps at least as many tokens in expectation.

    tokens: [B, n] int64, lengths: [B] int64, p: [B, n+1, V], q: [B, n, V], as for `rejection`. P and Q are p and q in the
    notation of the paper; p_i and h_i are defined below.
    """
    h, weights = block_probabilities(tokens, lengths, p, q)
    # tau = max { i : u_i <= h_i }: the block is kept up to its last success, despite earlier failures
    accepted = last_success(h, uniforms(h, generator), lengths)
    # emit y ~ max(p_tau P - Q, 0), normalised; if the whole block is kept, y ~ P
    distribution = emitted_distribution(p, q, weights, accepted, lengths)
    return Verdict(accepted, sample(distribution, generator))


def rejection_tree(
    tokens: Tensor, parents: Tensor, lengths: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Verdict]:
    """Speculative sampling on a token tree: the children of a node are tried in turn, each against the residual of p so far.

    tokens, parents: [B, n] int64, nodes as in `match_tree`, siblings in the order in which they were drawn. lengths: [B]
    int64, nodes per row. p: [B, n+1, V], the target's distribution after the committed text and after each node. q: [B, n, V],
    the distribution that each node was actually drawn from, given the path to it and its older siblings. Siblings drawn
    independently, even by different drafters, keep their drafter's distribution (2305.09781). For siblings drawn without
    replacement, give `taken_out` of it (2402.12374, 2402.14160).

    Returns the path ([B, n] int64, node indices in order, padded with -1) and the verdict.
    """
    kept, distribution, _ = tree_walk(tokens, parents, lengths, p, q, uniforms(q[..., 0], generator))
    return _in_order(kept), Verdict(kept.sum(-1), sample(distribution, generator))


def rejection_probabilities(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """[B, n]: the probability min(1, p(x_i) / q(x_i)) of keeping x_i, given that all earlier tokens are kept."""
    n = tokens.shape[1]
    return _ratio(_of(tokens, p[:, :n]), _of(tokens, q)).clamp(max=1)


def block_probabilities(tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """h: [B, n], where column i-1 holds h_i of 2403.10444; weights: [B, n+1], where column i holds its p_i."""
    n = tokens.shape[1]
    p_x, q_x = _of(tokens, p[:, :n]), _of(tokens, q)
    # p_0 = 1;  p_i = min(1, p_{i-1} P(x_i) / Q(x_i))
    joint = [torch.ones_like(p[:, 0, 0])]
    for i in range(n):
        joint.append(_ratio(joint[i] * p_x[:, i], q_x[:, i]).clamp(max=1))
    weights = torch.stack(joint, -1)  # [B, n+1]
    # S_i = sum_x max(p_i P(x | x_<=i) - Q(x | x_<=i), 0)
    p_i = weights[:, 1:n]  # [B, n-1], i = 1 .. n-1
    S = (p_i.unsqueeze(-1) * p[:, 1:n] - q[:, 1:]).clamp(min=0).sum(-1)
    # h_i = S_i / (S_i + 1 - p_i) for i < g, with 0/0 = 1;  h_g = p_g
    denominator = S + (1 - p_i)  # in this order it is exactly S where p_i = 1
    inner = torch.where(denominator > 0, S / denominator, 1)
    h = weights[:, 1:].clone()
    h[:, :-1] = torch.where(_drafted(lengths - 1, n)[:, :-1], inner, h[:, :-1])
    return h, weights


def tree_walk(
    tokens: Tensor, parents: Tensor, lengths: Tensor, p: Tensor, q: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk of `rejection_tree`, given its uniform random numbers u [B, n].

    Returns the kept nodes, [B, n] bool; the distribution of the token after them, [B, V]; and the probability with which
    each node was kept, [B, n], 0 for nodes that the walk did not reach.
    """
    n = tokens.shape[1]
    drafted = _drafted(lengths, n)
    # the node that the walk has reached, and the residual of the target's distribution there
    here, left = torch.full_like(lengths, -1), p[:, 0]
    kept, accept = torch.zeros_like(drafted), torch.zeros_like(u)
    # parents precede their children, and siblings are in the order of their draws, so one loop suffices
    for i in range(n):
        met = drafted[:, i] & (parents[:, i] == here)
        x, distribution = tokens[:, i : i + 1], q[:, i]
        # keep x if u < p(x) / q(x), and never a token with q(x) = 0: it cannot have been drawn from q ...
        p_x, q_x = _of(x, left[:, None]).squeeze(-1), _of(x, distribution[:, None]).squeeze(-1)
        accept[:, i] = _ratio(p_x, q_x).clamp(max=1).where(met & (q_x > 0), 0)
        kept[:, i] = u[:, i] < accept[:, i]
        # ... and descend to its children; otherwise try the next sibling against max(p - q, 0), normalised
        rest = residual(left, distribution, torch.ones_like(p_x)).where(met.unsqueeze(-1), left)
        left = p[:, i + 1].where(kept[:, i : i + 1], rest)
        here = torch.where(kept[:, i], i, here)
    return kept, left, accept


def taken_out(tokens: Tensor, parents: Tensor, lengths: Tensor, q: Tensor) -> Tensor:
    """The distributions of siblings drawn without replacement: q without the tokens of the older siblings, normalised.

    q: [B, n, V], the draft's distribution after each node's parent. Returns [B, n, V], all 0 where no token is left.
    """
    n, V = q.shape[1:]
    order = torch.arange(n, device=q.device)
    siblings = (parents.unsqueeze(2) == parents.unsqueeze(1)) & _drafted(lengths, n).unsqueeze(1)  # [B, n, n]
    older = siblings & (order < order.unsqueeze(1))
    taken = older.to(q.dtype) @ F.one_hot(tokens.clamp(0, V - 1), V).to(q.dtype)
    rest = q.where(taken == 0, 0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, 0)


def first_failure(probabilities: Tensor, uniforms: Tensor, lengths: Tensor) -> Tensor:
    """[B]: number of tokens before the first with uniforms >= probabilities (both [B, n]); lengths if there is none."""
    success = (uniforms < probabilities) & _drafted(lengths, probabilities.shape[1])
    return success.cumprod(-1).sum(-1)


def last_success(probabilities: Tensor, uniforms: Tensor, lengths: Tensor) -> Tensor:
    """[B]: number of tokens up to the last with uniforms < probabilities (both [B, n]); 0 if there is none."""
    n = probabilities.shape[1]
    success = (uniforms < probabilities) & _drafted(lengths, n)
    count = torch.arange(1, n + 1, device=lengths.device)
    return F.pad(count.where(success, 0), (1, 0)).amax(-1)


def residual(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """max(weight * p - q, 0), normalised; p where that is 0 everywhere. p, q: [..., V], weight: [...]."""
    excess = (weight.unsqueeze(-1) * p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)


def emitted_distribution(p: Tensor, q: Tensor, weights: Tensor, accepted: Tensor, lengths: Tensor) -> Tensor:
    """[B, V]: the distribution of the token after the kept ones: the residual after a rejection, p after a whole chain.

    p: [B, n+1, V], q: [B, n, V], weights: [B, n+1] the factor of p in the residual, accepted, lengths: [B] int64.
    """
    n = q.shape[1]
    row = torch.arange(len(p), device=p.device)
    target = p[row, accepted]
    if n == 0:
        return target
    draft = q[row, accepted.clamp(max=n - 1)]
    whole = (accepted == lengths).unsqueeze(-1)
    return torch.where(whole, target, residual(target, draft, _at(weights, accepted)))


def uniforms(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Independent uniform random numbers in [0, 1), with the shape [...], dtype and device of `like`."""
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def top1(scores: Tensor) -> Tensor:
    """The index of the highest score, the first of equal ones; [..., V] -> [...] int64.

    The same as `argmax`, which takes three to five times as long over a vocabulary on a CPU.
    """
    return scores.max(-1).indices


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one index per row, [..., V] -> [...] int64. Rows need not sum to 1; an all-zero row gives index 0.

    Unlike torch.multinomial it checks nothing. So it never synchronises and cannot raise on the device.
    """
    return (by_inversion if probabilities.device.type == "cpu" else by_race)(probabilities, generator)


def by_race(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`sample`, [..., V] -> [...] int64, by an exponential race: for E_x ~ Exp(1), argmax_x p(x) / E_x is x with probability
    p(x) / sum p."""
    race = probabilities / torch.empty_like(probabilities).exponential_(generator=generator)
    # E may round to 0, and 0 / 0 would win the argmax
    return race.where(probabilities > 0, -1).argmax(-1)


def by_inversion(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`sample`, [..., V] -> [...] int64, with one uniform u: the first x whose cumulative mass exceeds u sum p. On a CPU, V
    draws would be expensive."""
    mass = probabilities.double().cumsum(-1)
    below_1 = 1 - 2**-52  # u sum p must not round to sum p
    u = torch.rand((*mass.shape[:-1], 1), generator=generator, dtype=mass.dtype, device=mass.device) * below_1
    index = torch.searchsorted(mass, u * mass[..., -1:], right=True)[..., 0]
    return index.where(index < mass.shape[-1], 0)


def _drafted(lengths: Tensor, n: int) -> Tensor:
    """[B, n] bool: True for drafted columns, False for padding."""
    return torch.arange(n, device=lengths.device) < lengths.unsqueeze(-1)


def _in_order(kept: Tensor) -> Tensor:
    """The kept nodes as a path from the root: [B, n] bool -> [B, n] int64, padded with -1."""
    n = kept.shape[1]
    path = torch.arange(n, device=kept.device).where(kept, n).sort(-1).values
    return path.masked_fill(path == n, -1)


def _at(values: Tensor, column: Tensor) -> Tensor:
    """values[b, column[b]]: [B, m], [B] -> [B]."""
    return values.gather(1, column.unsqueeze(-1)).squeeze(-1)


def _of(tokens: Tensor, distributions: Tensor) -> Tensor:
    """The probability of each token under the distribution in its column: [B, n], [B, n, V] -> [B, n]."""
    return distributions.gather(-1, tokens.clamp(0, distributions.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator with 0/0 = 0, so that a token that the target forbids is never kept."""
    return torch.where(numerator > 0, numerator / denominator, 0)
