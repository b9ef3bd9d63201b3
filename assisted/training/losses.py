"""How far a draft's distribution is from the target's, computed from their logits. Knows tensors. Sampled drafts are
accepted at a rate of 1 - TV = sum min(p, q) on average (arXiv 2211.17192), so losses are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Literal["kl", "reverse-kl", "tv", "kl+tv", "nla", "lk-hybrid"]
_IMPOSSIBLE = -100.0  # log-probability of tokens that a distribution excludes
_LEAST = 1e-5  # acceptance whose logarithm is taken
_SHIFT = 3.0  # of lk-hybrid, from KL to TV as acceptance grows; the paper's best


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
    each = (_fused if compiled else _divergences)(name, log_p, draft_logits)
    if weights is None:
        return each.mean()
    return (each * weights).sum() / weights.sum().clamp(min=1)


def _divergences(name: str, log_p: Tensor, draft_logits: Tensor) -> Tensor:
    return DIVERGENCES[name](log_p, F.log_softmax(draft_logits.float(), -1))


_fused = torch.compile(_divergences, dynamic=False)


@dataclass(frozen=True)
class Agreement:
    """How often a draft would be accepted, given both distributions at the same positions."""

    greedy: float  # share of positions with the same top-1 token: the acceptance rate at temperature 0
    sampled: float  # mean of 1 - TV: the acceptance rate at temperature 1


@torch.no_grad()
def agreement(target_logits: Tensor, draft_logits: Tensor) -> Agreement:
    """The agreement of logits [..., V] at the same positions."""
    same = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
    log_p, log_q = (F.log_softmax(logits.float(), -1) for logits in (target_logits, draft_logits))
    return Agreement(same.item(), 1 - _total_variation(log_p, log_q).mean().item())
