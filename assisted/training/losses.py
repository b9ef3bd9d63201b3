"""How far a draft's distribution is from the target's, from their logits.

Knows tensors. What is accepted when drafting is 1 - TV on average (arXiv 2211.17192), which is why TV is among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DIVERGENCES", "Agreement", "agreement", "divergence", "log_probabilities", "rows_at_once"]

_IMPOSSIBLE = -100.0  # log-probability of what a distribution excludes


def _forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # where p is 0, log q may be minus infinity, too
    return (log_p.exp() * (log_p.clamp(min=_IMPOSSIBLE) - log_q.clamp(min=_IMPOSSIBLE))).sum(-1)


def _reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_q.exp() * (log_q.clamp(min=_IMPOSSIBLE) - log_p.clamp(min=_IMPOSSIBLE))).sum(-1)


def _total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def _mixed(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _forward_kl(log_p, log_q) + _total_variation(log_p, log_q)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _forward_kl,
    "reverse-kl": _reverse_kl,
    "tv": _total_variation,
    "kl+tv": _mixed,
}
"""By name, of log-probabilities log_p (the target's) and log_q (the draft's), [..., V] -> [...]; after DistillSpec
(arXiv 2310.08461)."""


def log_probabilities(logits: Tensor) -> Tensor:
    """The target's log-probabilities, float32, without gradients. [..., V] -> [..., V]."""
    return F.log_softmax(logits.detach().float(), -1)


def rows_at_once(like: Tensor) -> int:
    """Rows of [B, ...] whose logits are made together: those of one stay in a CPU's caches, an accelerator wants all."""
    return 1 if like.device.type == "cpu" else max(1, len(like))


def divergence(
    name: str, log_p: Tensor, draft_logits: Tensor, weights: Tensor | None = None, compiled: bool = False
) -> Tensor:
    """A divergence from the target's distribution to the draft's, averaged over positions.

    Args:
        name: one of DIVERGENCES.
        log_p: [..., V], the target's (`log_probabilities`).
        draft_logits: [..., V].
        weights: [...] of each position, ones when None; a position of weight 0 does not count.
        compiled: whether to fuse it: faster where the vocabulary is large and the processor is slow.

    Returns a scalar, float32.
    """
    apart = (_fused if compiled else _apart)(name, log_p, draft_logits)
    if weights is None:
        return apart.mean()
    return (apart * weights).sum() / weights.sum().clamp(min=1)


def _apart(name: str, log_p: Tensor, draft_logits: Tensor) -> Tensor:
    return DIVERGENCES[name](log_p, F.log_softmax(draft_logits.float(), -1))


_fused = torch.compile(_apart, dynamic=False)


@dataclass(frozen=True)
class Agreement:
    """How often a draft would be accepted, from distributions at the same positions.

    Args:
        greedy: share of positions where both have the same likeliest token: acceptance at temperature 0.
        sampled: mean of 1 - TV: acceptance at temperature 1.
    """

    greedy: float
    sampled: float


@torch.no_grad()
def agreement(target_logits: Tensor, draft_logits: Tensor) -> Agreement:
    """Of logits [..., V] at the same positions."""
    same = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
    log_p, log_q = (F.log_softmax(logits.float(), -1) for logits in (target_logits, draft_logits))
    return Agreement(same.item(), 1 - _total_variation(log_p, log_q).mean().item())
