"""Which drafted tokens are kept, and which token of the target's own follows them.

Knows torch alone: pure functions on tensors without host-device synchronisation, but for `match` and `match_tree`, which walk
on the host. How p and q are made from logits, what an end-of-sequence token means and what is done with the verdict belong to
the decoding loop.

Notation, after 2211.17192: p is the target's next-token distribution, q the draft's, x_1 .. x_g the drafted tokens of a row.
Chains are padded to n columns with a count per row (`lengths`, the g of that row); what lies in the padding has no
effect, be it -1 or NaN. Column i of p and q is the distribution after i drafted tokens. Results stay in the dtype of p and q.

In a tree, `parents` says which node each hangs from, column i + 1 of p is the distribution after node i, and column
i of q the distribution that node i was drawn from.

With `rejection`, `block` and `rejection_tree`, whether x_i is proposed may depend on x_1 .. x_{i-1} and on the
distributions after them, never on x_i or what follows: dropping a token for its own low probability changes the
distribution of the output. `match` and `match_tree` allow any draft whatever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What one verification pass decided, per row."""

    accepted: Tensor
    """[B] int64: drafted tokens kept, 0 .. lengths."""
    token: Tensor
    """[B] int64: the target's own token after them: the correction, or the bonus when all were kept."""


def match(tokens: list[int], choice: list[int]) -> tuple[range, int]:
    """Keep drafted tokens while they are what the target chose itself. Of one row, on the host.

    tokens: the g drafted ones. choice: at least g + 1, the target's argmax (greedy) or its own draw (sample-match) after each
    prefix. Lossless for any draft, since the output is read off `choice`; needs no q. Returns the places of what is kept, and
    the target's own token after it.
    """
    # keep x_i while x_i = y_i, and emit y at the first disagreement, or after the last drafted token
    accepted = next((i for i, token in enumerate(tokens) if token != choice[i]), len(tokens))
    return range(accepted), choice[accepted]


def match_tree(tokens: list[int], parents: list[int], choice: list[int]) -> tuple[list[int], int]:
    """The walk of `match` on a token tree, of one row: from the root, descend while the target's choice is a drafted child.

    tokens, parents: of the n nodes; parents hold node indices, -1 for the children of the last committed token, and come
    before their children. choice: at least n + 1, first after the last committed token, 1 + i after node i. Returns the nodes
    of the path in order, and the target's own token after them.
    """
    path, here = [], -1
    # a child stands behind its parent, so one pass meets each when its turn comes; of twins, the first
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == here and token == choice[here + 1]:
            path.append(node)
            here = node
    return path, choice[here + 1]


def rejection(
    tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None
) -> Verdict:
    """Speculative sampling (2211.17192, 2302.01318): the output follows p exactly, P(accept) = 1 - TV(p, q).

    tokens: [B, n] int64, lengths: [B] int64, p: [B, n+1, V] the target's distribution after each prefix, q: [B, n,
    V] the distribution each token was really drawn from: one-hot for an argmax, truncated where the draft's sampling was.
    """
    accept = rejection_probabilities(tokens, p, q)
    # stop at the first token with u_i >= p(x_i) / q(x_i) ...
    accepted = first_failure(accept, uniforms(accept, generator), lengths)
    # ... and emit y ~ max(p - q, 0); without a failure y ~ p
    distribution = emitted_distribution(p, q, torch.ones_like(p[..., 0]), accepted, lengths)
    return Verdict(accepted, sample(distribution, generator))


def block(tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None) -> Verdict:
    """Block verification (2403.10444): as exact as `rejection`, and never fewer tokens in expectation.

    Arguments as for `rejection`.
    """
    h, weights = block_probabilities(tokens, lengths, p, q)
    # tau = max { i : u_i <= h_i }: a failure does not end the block, a later success redeems it
    accepted = last_success(h, uniforms(h, generator), lengths)
    # emit y ~ max(p_tau P - Q, 0); with the whole block kept y ~ P
    distribution = emitted_distribution(p, q, weights, accepted, lengths)
    return Verdict(accepted, sample(distribution, generator))


def rejection_tree(
    tokens: Tensor, parents: Tensor, lengths: Tensor, p: Tensor, q: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Verdict]:
    """Speculative sampling on a token tree: at each node its children are tried in turn, each against what is left of p.

    tokens, parents: [B, n] int64, nodes as `match_tree` has them, siblings in the order in which they were drawn. lengths: [B]
    int64, nodes per row. p: [B, n+1, V], q: [B, n, V] the distribution each node was really drawn from, given the
    path to it and its older siblings: its drafter's own distribution where siblings were drawn independently, even by different
    drafters (2305.09781), `taken_out` of it where no token was drawn twice (2402.12374, 2402.14160). Returns the
    path, [B, n] int64 node indices in order padded with -1, and the verdict.
    """
    kept, distribution, _ = tree_walk(tokens, parents, lengths, p, q, uniforms(q[..., 0], generator))
    return _in_order(kept), Verdict(kept.sum(-1), sample(distribution, generator))


def rejection_probabilities(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """[B, n]: the probability min(1, p(x_i) / q(x_i)) of keeping x_i, all before it kept."""
    n = tokens.shape[1]
    return _ratio(_of(tokens, p[:, :n]), _of(tokens, q)).clamp(max=1)


def block_probabilities(tokens: Tensor, lengths: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """h: [B, n], column i-1 holding h_i of 2403.10444; weights: [B, n+1], column i holding its p_i."""
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
    # h_i = S_i / (S_i + 1 - p_i) for i < g, 0/0 being 1;  h_g = p_g
    denominator = S + (1 - p_i)  # in this order: exactly S where p_i = 1
    inner = torch.where(denominator > 0, S / denominator, 1)
    h = weights[:, 1:].clone()
    h[:, :-1] = torch.where(_drafted(lengths - 1, n)[:, :-1], inner, h[:, :-1])
    return h, weights


def tree_walk(
    tokens: Tensor, parents: Tensor, lengths: Tensor, p: Tensor, q: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk of `rejection_tree`, given its uniforms u [B, n].

    Returns which nodes are kept, [B, n] bool; the distribution of the token after them, [B, V]; and with which probability each
    node was kept, [B, n], 0 where the walk did not meet it.
    """
    n = tokens.shape[1]
    drafted = _drafted(lengths, n)
    here, left = (
        torch.full_like(lengths, -1),
        p[:, 0],
    )  # the node that the walk has come to, and what is left of its distribution
    kept, accept = torch.zeros_like(drafted), torch.zeros_like(u)
    # a parent stands before its children and they in the order of their draws: one pass meets each when its turn comes
    for i in range(n):
        met = drafted[:, i] & (parents[:, i] == here)
        x, distribution = tokens[:, i : i + 1], q[:, i]
        # keep x if u < p(x) / q(x); a token that q does not have was not drawn from it ...
        p_x, q_x = _of(x, left[:, None]).squeeze(-1), _of(x, distribution[:, None]).squeeze(-1)
        accept[:, i] = _ratio(p_x, q_x).clamp(max=1).where(met & (q_x > 0), 0)
        kept[:, i] = u[:, i] < accept[:, i]
        # ... and go on to its children; otherwise the next sibling is tried against max(p - q, 0)
        rest = residual(left, distribution, torch.ones_like(p_x)).where(met.unsqueeze(-1), left)
        left = p[:, i + 1].where(kept[:, i : i + 1], rest)
        here = torch.where(kept[:, i], i, here)
    return kept, left, accept


def taken_out(tokens: Tensor, parents: Tensor, lengths: Tensor, q: Tensor) -> Tensor:
    """The distributions of siblings drawn without replacement: q without the older siblings' tokens, normalised.

    q: [B, n, V], the draft's distribution at each node's parent. Returns [B, n, V]; 0 everywhere where no token is left.
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
    """[B]: how many tokens stand before the first of which uniforms >= probabilities ([B, n] both), lengths if there is
    none."""
    success = (uniforms < probabilities) & _drafted(lengths, probabilities.shape[1])
    return success.cumprod(-1).sum(-1)


def last_success(probabilities: Tensor, uniforms: Tensor, lengths: Tensor) -> Tensor:
    """[B]: the count of tokens up to the last of which uniforms < probabilities ([B, n] both), 0 if there is none."""
    n = probabilities.shape[1]
    success = (uniforms < probabilities) & _drafted(lengths, n)
    count = torch.arange(1, n + 1, device=lengths.device)
    return F.pad(count.where(success, 0), (1, 0)).amax(-1)


def residual(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """max(weight * p - q, 0) normalised, or p where that is 0 everywhere. p, q: [..., V], weight: [...]."""
    excess = (weight.unsqueeze(-1) * p - q).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total, p)


def emitted_distribution(p: Tensor, q: Tensor, weights: Tensor, accepted: Tensor, lengths: Tensor) -> Tensor:
    """[B, V]: the distribution of the token after the kept ones: the residual at a rejection, p after a whole chain.

    p: [B, n+1, V], q: [B, n, V], weights: [B, n+1] the factor of p in the residual, accepted and lengths: [B].
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
    """Independent draws in [0, 1): u < 1 always, u < 0 never."""
    return torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One index per row, [..., V] -> [...] int64. The rows need not sum to 1; one without any mass gives index 0.

    Unlike torch.multinomial it checks nothing, hence waits for nothing and cannot raise on the device.
    """
    return (by_inversion if probabilities.device.type == "cpu" else by_race)(probabilities, generator)


def by_race(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`sample` by an exponential race: with E_x ~ Exp(1), argmax_x p(x) / E_x falls on x with probability p(x) / sum p."""
    race = probabilities / torch.empty_like(probabilities).exponential_(generator=generator)
    # E may round to 0, and 0 / 0 would win the argmax
    return race.where(probabilities > 0, -1).argmax(-1)


def by_inversion(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`sample` by one uniform number: the first x up to which there is more mass than u sum p. Many draws are dear on a CPU."""
    mass = probabilities.double().cumsum(-1)
    below_1 = 1 - 2**-52  # u sum p must not round to sum p
    u = torch.rand((*mass.shape[:-1], 1), generator=generator, dtype=mass.dtype, device=mass.device) * below_1
    index = torch.searchsorted(mass, u * mass[..., -1:], right=True)[..., 0]
    return index.where(index < mass.shape[-1], 0)


def _drafted(lengths: Tensor, n: int) -> Tensor:
    """[B, n] bool: True on the drafted columns of each row, False on its padding."""
    return torch.arange(n, device=lengths.device) < lengths.unsqueeze(-1)


def _in_order(kept: Tensor) -> Tensor:
    """The kept nodes as a path, [B, n] bool -> [B, n] int64 padded with -1: children come after their parents."""
    n = kept.shape[1]
    path = torch.arange(n, device=kept.device).where(kept, n).sort(-1).values
    return path.masked_fill(path == n, -1)


def _at(values: Tensor, column: Tensor) -> Tensor:
    """values[b, column[b]]: [B, m], [B] -> [B]."""
    return values.gather(1, column.unsqueeze(-1)).squeeze(-1)


def _of(tokens: Tensor, distributions: Tensor) -> Tensor:
    """The probability of each token under the distribution at its column: [B, n], [B, n, V] -> [B, n]."""
    return distributions.gather(-1, tokens.clamp(0, distributions.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, with 0/0 = 0: a token that the target forbids is never kept."""
    return torch.where(numerator > 0, numerator / denominator, 0)
