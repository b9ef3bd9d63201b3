"""How far a draft's distribution is from the target's, computed from their logits. Knows tensors. Sampled drafts are
accepted at a rate of 1 - TV = sum min(p, q) on average (arXiv 2211.17192), so losses are made of it.

On a CPU, losses and their gradients are computed together, a few tokens at a time, because logits over a large vocabulary do
not fit into its caches, and each pass over them takes as long as a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .features import rounded_products

Loss = Literal["kl", "reverse-kl", "tv", "kl+tv", "nla", "lk-hybrid"]
_IMPOSSIBLE = -100.0  # log-probability of tokens that a distribution excludes
_LEAST = 1e-5  # acceptance whose logarithm is taken
_SHIFT = 3.0  # of lk-hybrid, from KL to TV as acceptance grows; the paper's best
CACHED = 2**17  # logits whose loss is computed at once: 512 KiB, since half a dozen such tensors are in use
PRODUCT = 2**24  # logits of one product, 64 MiB: each product reads all weights, so it should have many rows


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # where p is 0, log q may also be minus infinity
    return (log_p.exp() * (log_p.clamp(min=_IMPOSSIBLE) - log_q.clamp(min=_IMPOSSIBLE))).sum(-1)


def _total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def _hybrid(log_p: Tensor, log_q: Tensor) -> Tensor:
    weight = (-_SHIFT * _acceptance(log_p, log_q).detach()).exp()
    return weight * _kl(log_p, log_q) + (1 - weight) * _total_variation(log_p, log_q)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _kl,
    "reverse-kl": lambda log_p, log_q: _kl(log_q, log_p),
    "tv": _total_variation,
    "kl+tv": lambda log_p, log_q: _kl(log_p, log_q) + _total_variation(log_p, log_q),
    "nla": lambda log_p, log_q: -_acceptance(log_p, log_q).clamp(min=_LEAST).log(),
    "lk-hybrid": _hybrid,
}
"""Divergences of DistillSpec (arXiv 2310.08461) and LK losses (arXiv 2602.23881) by name. They take log-probabilities log_p
(the target's) and log_q (the draft's), [..., V] -> [...]. With the acceptance a = sum min(p, q), nla is -log a, and lk-hybrid
is w KL + (1 - w) TV, where w = exp(-3 a) has no gradient."""


def require_known(loss: str) -> None:
    """Raises ValueError for a loss that is not among DIVERGENCES."""
    if loss not in DIVERGENCES:
        raise ValueError(f"loss: {loss!r} is not known; one of {', '.join(DIVERGENCES)}")


def log_probabilities(logits: Tensor) -> Tensor:
    """The target's log-probabilities, float32, without gradients. [..., V] -> [..., V]."""
    return F.log_softmax(logits.detach().float(), -1)


def summed(loss: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The sum of a loss over rows of tensors [B, ...]: one at a time on a CPU, whose caches hold its logits; all together on an
    accelerator."""
    rows = 1 if tensors[0].device.type == "cpu" else max(1, len(tensors[0]))
    total = torch.zeros((), device=tensors[0].device)
    for some in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
        total = total + loss(*some)
    return total


def divergence(
    name: str, log_p: Tensor, draft_logits: Tensor, weights: Tensor | None = None, compiled: bool = False
) -> Tensor:
    """The divergence of this name from the target's distribution to the draft's, averaged over positions: a scalar, float32.

    log_p: [..., V], the target's, from `log_probabilities`. draft_logits: [..., V]. weights: [...], one for each position; None
    is the same as ones. compiled: fuse the computation, which is faster where the vocabulary is large.
    """
    if compiled:
        each = _fused(name, log_p, draft_logits)
    elif draft_logits.device.type == "cpu":
        each = _OfLogits.apply(name, log_p, draft_logits)
    else:
        each = _divergences(name, log_p, draft_logits)
    if weights is None:
        return each.mean()
    return (each * weights).sum() / weights.sum().clamp(min=1)


def divergence_of_states(
    name: str, log_p: Tensor, states: Tensor, weights: Tensor, output: nn.Linear, rounded: bool = False
) -> Tensor:
    """The weighted sum of divergences of a draft whose logits are a frozen output layer's, on a CPU: a scalar, float32. The
    gradient by the states is computed at once, so that no logits are kept.

    name, log_p: [B, n, V], as for `divergence`. states: [B, n, H]. weights: [B, n], one for each position. output: H -> V, in
    any dtype, to which the states are cast. rounded: as for `rounded_products`.
    """
    return _OfStates.apply(name, log_p, states, weights, output.weight, output.bias, rounded)


def _divergences(name: str, log_p: Tensor, draft_logits: Tensor) -> Tensor:
    return DIVERGENCES[name](log_p, F.log_softmax(draft_logits.float(), -1))


_fused = torch.compile(_divergences, dynamic=False)


class _OfLogits(torch.autograd.Function):
    """`_divergences`, with its gradient."""

    @staticmethod
    def forward(ctx: Any, name: str, log_p: Tensor, logits: Tensor) -> Tensor:
        flat, taught = logits.reshape(-1, logits.shape[-1]), log_p.reshape(-1, log_p.shape[-1])
        each, gradient, weights = torch.empty(len(flat)), torch.empty_like(flat), torch.ones(len(flat))
        scratch = _scratch(flat)
        for first in range(0, len(flat), rows := scratch.shape[1]):
            some = slice(first, first + rows)
            each[some] = _with_gradient(name, taught[some], flat[some], weights[some], gradient[some], scratch)
        ctx.save_for_backward(gradient.view(logits.shape))
        return each.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_each: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return None, None, gradient * by_each[..., None].to(gradient.dtype)


class _OfStates(torch.autograd.Function):
    """`divergence_of_states`: the gradient by the states is that of a sum, so that it can be computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        log_p: Tensor,
        states: Tensor,
        weights: Tensor,
        output: Tensor,
        bias: Tensor | None,
        rounded: bool,
    ) -> Tensor:
        flat, weights = states.reshape(-1, states.shape[-1]).to(output.dtype), weights.flatten()
        columns = states.shape[1]
        by_states, total = torch.empty_like(flat), torch.zeros(())
        rows = max(1, min(len(flat), PRODUCT // len(output)))
        buffer = torch.empty(rows, len(output), dtype=output.dtype)  # used again, since new memory is slow
        scratch = _scratch(buffer)
        with torch.autocast("cpu", enabled=False), rounded_products(rounded):
            for first in range(0, len(flat), rows):
                read = flat[first : first + rows]
                logits = torch.mm(read, output.T, out=buffer[: len(read)])
                if bias is not None:
                    logits += bias
                at, last = first, first + len(read)
                while at < last:
                    row, column = divmod(at, columns)
                    count = min(scratch.shape[1], columns - column, last - at)
                    taught, weight = log_p[row, column : column + count], weights[at : at + count]
                    some = logits[at - first : at - first + count]
                    total += (_with_gradient(name, taught, some, weight, some, scratch) * weight).sum()
                    at += count
                torch.mm(logits, output, out=by_states[first : first + rows])
        ctx.save_for_backward(by_states.to(states.dtype).view(states.shape))
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_total: Tensor) -> tuple[Tensor | None, ...]:
        (by_states,) = ctx.saved_tensors
        return None, None, by_states * by_total.to(by_states.dtype), None, None, None, None


def _scratch(logits: Tensor) -> Tensor:
    """Memory for `_with_gradient`, [4, n, V] float32, where n tokens fit into a cache. logits: [N, V], on a CPU."""
    return torch.empty(4, max(1, min(len(logits), CACHED // logits.shape[-1])), logits.shape[-1])


def _with_gradient(
    name: str, log_p: Tensor, logits: Tensor, weights: Tensor, gradient: Tensor, scratch: Tensor
) -> Tensor:
    """The divergences [n] of a few tokens, float32. The gradients of their weighted sum by the logits are written.

    log_p, logits: [n, V]. weights: [n]. gradient: [n, V], where it is written, in any dtype; may be the logits' memory.
    scratch: [4, n or more, V], in which everything of this size is kept, since new memory takes ten times longer to write.

    The gradients of KL and TV by the logits, where p and q are probabilities and s is the sign of q - p:

        dKL = q - p        dTV = q (s - sum s q) / 2
    """
    logits = logits.float()
    q, p, third, fourth = scratch[:, : len(logits)]
    torch.softmax(logits, -1, out=q)
    # log sum exp, from its definition at one token
    total = logits.amax(-1, keepdim=True) - q.amax(-1, keepdim=True).log()
    if name == "reverse-kl" or min(float(logits.amin() - total.amax()), float(log_p.amin())) < _IMPOSSIBLE:
        with torch.enable_grad():
            found = _divergences(name, log_p, logits := logits.detach().requires_grad_())
            (by_logits,) = torch.autograd.grad(found, logits, weights)
        gradient.copy_(by_logits)
        return found.detach()
    torch.exp(log_p, out=p)
    kl = torch.sub(log_p, logits, out=third).mul_(p).sum(-1) + total[:, 0]
    away = torch.sub(q, p, out=p)
    if name == "kl":
        gradient.copy_(away.mul_(weights[:, None]))
        return kl
    each, by_kl, by_tv = _combined(name, kl, 0.5 * torch.abs(away, out=third).sum(-1))
    sign = torch.sign(away, out=third)
    sign.sub_(torch.mul(sign, q, out=fourth).sum(-1, keepdim=True)).mul_((0.5 * by_tv * weights)[:, None])
    gradient.copy_(away.mul_((by_kl * weights)[:, None]).addcmul_(sign, q))
    return each


def _combined(name: str, kl: Tensor, tv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A divergence that is a function of KL and TV, and its derivatives by both: [n] each."""
    zeros, ones = torch.zeros_like(kl), torch.ones_like(kl)
    if name == "tv":
        return tv, zeros, ones
    if name == "kl+tv":
        return kl + tv, ones, ones
    accepted = 1 - tv
    if name == "nla":
        least = accepted.clamp(min=_LEAST)
        return -least.log(), zeros, (accepted >= _LEAST) / least
    share = (-_SHIFT * accepted).exp()  # lk-hybrid
    return share * kl + (1 - share) * tv, share, 1 - share


@dataclass(frozen=True)
class Agreement:
    """How often a draft would be accepted, given both distributions at the same positions."""

    greedy: float  # share of positions with the same top-1 token: the acceptance rate at temperature 0
    sampled: float  # mean of 1 - TV: the acceptance rate at temperature 1


@torch.no_grad()
def agreement(target_logits: Tensor, draft_logits: Tensor) -> Agreement:
    """The agreement of logits [..., V] at the same positions."""
    flat = [logits.reshape(-1, logits.shape[-1]) for logits in (target_logits, draft_logits)]
    rows = len(flat[0]) if flat[0].device.type != "cpu" else max(1, CACHED // flat[0].shape[-1])
    same, distance = [], []
    for pair in zip(*(logits.split(rows) for logits in flat), strict=True):
        top = [logits.argmax(-1) for logits in pair]
        same.append((top[0] == top[1]).float())
        distance.append(_total_variation(*(F.log_softmax(logits.float(), -1) for logits in pair)))
    return Agreement(torch.cat(same).mean().item(), 1 - torch.cat(distance).mean().item())
