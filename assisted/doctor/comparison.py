"""How near a draft's distribution is to its target's, on text that the target wrote: the bound on what can be accepted.

Knows two models of one vocabulary. Nothing of how the text was drafted but where each draft began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel

__all__ = ["Comparison", "Written", "compare"]


@dataclass(frozen=True)
class Written:
    """A text that was written with drafts.

    Args:
        ids: [P + N] int64, prompt and new tokens.
        prompt: P.
        starts: the new tokens that a draft began with, counted from 0.
    """

    ids: torch.Tensor
    prompt: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Two distributions side by side.

    Args:
        overlap: 1 minus the total variation of the two distributions at temperature 1, mean over the text: how often the best
            possible coupling lets a sampled token pass (2211.17192).
        agreement: share of the text at which both find the same token likeliest: what greedy drafts live on.
        best_by_position: how often a token drafted first, second, ... is accepted, those before it having been, if nothing is
            lost: the mean of 1 minus the total variation, at the temperature of the text. Of the drafts that were begun.
        cosine: mean cosine of the last hidden states, None where their sizes differ. A diagnostic, no predictor: two models
            that were trained apart may say the same from states that have nothing in common.
        tokens: that were looked at.
    """

    overlap: float
    agreement: float
    best_by_position: tuple[float, ...]
    cosine: float | None
    tokens: int


@torch.inference_mode()
def compare(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    texts: Sequence[Written],
    temperature: float,
    longest: int,
) -> Comparison:
    """Read the texts with both models.

    Args:
        target, draft: their ids mean the same.
        texts: written by the target, or by both.
        temperature: they were written at; 0 is greedy.
        longest: positions of a draft to look at.
    """
    overlaps, agreements, cosines = [], [], []
    survived, begun = torch.zeros(longest + 1), torch.zeros(longest + 1)  # by position: drafts that got to it
    for text in texts:
        ids = text.ids.to(target.device)[None]
        logits, states = _read(target, ids, text.prompt)
        guesses, guessed_from = _read(draft, ids.to(draft.device), text.prompt)
        guesses = guesses.to(logits.device)
        size = min(logits.shape[-1], guesses.shape[-1])  # vocabularies may be padded
        p, q = logits[:, :size], guesses[:, :size]
        overlaps.append(_overlap(p.softmax(-1), q.softmax(-1)))
        agreements.append((p.argmax(-1) == q.argmax(-1)).float())
        if states.shape == guessed_from.shape:
            cosines.append(torch.cosine_similarity(states.float(), guessed_from.to(states.device).float(), dim=-1))
        p, q = _law(p, temperature), _law(q, temperature)
        words = ids[0, text.prompt :, None]
        passing = (q.gather(1, words) / p.gather(1, words).clamp(min=1e-30)).clamp(max=1)[:, 0].cpu()
        best = _overlap(p, q).cpu()
        for start in text.starts:
            # of texts from the target's distribution, the product of min(1, q/p) is how likely a draft is to get so far
            reach = passing[start : start + longest - 1].cumprod(0)
            reach = torch.cat([torch.ones(1), reach])[: len(best) - start]
            survived[1 : len(reach) + 1] += reach * best[start : start + len(reach)]
            begun[1 : len(reach) + 1] += 1
    shares = torch.where(begun > 0, survived / begun.clamp(min=1), torch.zeros(()))
    shares[0] = 1
    by_position = [min(1.0, (after / before).item()) for before, after in pairwise(shares) if before > 1e-3]
    return Comparison(
        overlap=torch.cat(overlaps).mean().item(),
        agreement=torch.cat(agreements).mean().item(),
        best_by_position=tuple(by_position),
        cosine=torch.cat(cosines).mean().item() if cosines else None,
        tokens=sum(map(len, overlaps)),
    )


def _read(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits before every new token, [N, V] float32, and the last hidden states behind them, [N, D]."""
    out = model(ids[:, :-1], use_cache=False, output_hidden_states=True)
    return out.logits[0, prompt - 1 :].float(), out.hidden_states[-1][0, prompt - 1 :]


def _law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N, V] logits -> [N, V] probabilities; at temperature 0 all on the likeliest token."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def _overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """1 minus the total variation, [N, V] twice -> [N]."""
    return torch.minimum(p, q).sum(-1)
