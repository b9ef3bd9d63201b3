"""Where texts of a greedy race differ from plain's: how close the two tokens were in the target's own scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from .prompts import Batch


@torch.no_grad()
def largest_gap(
    target: PreTrainedModel, batches: Sequence[Batch], right: Sequence[list[int]], wrote: Sequence[list[int]]
) -> float | None:
    """By how much the worse of the two tokens at a row's first difference is behind the best one, the largest over the rows.

    In standard deviations of the target's logits, from a forward pass of its own over the common text: rounding in half
    precision moves logits by some hundredths of one.

    right, wrote: new tokens of every row, batch by batch, by plain decoding and by another contestant.

    Returns None if no row differs.
    """
    gaps = []
    for prompt, row, other in zip(_prompts(batches), right, wrote, strict=True):
        pairs = enumerate(zip(row, other, strict=False))
        at = next((at for at, (one, two) in pairs if one != two), None)
        if at is None:
            continue
        text = torch.cat([prompt, torch.tensor(row[:at], dtype=prompt.dtype, device=prompt.device)])
        scores = target(input_ids=text[None].to(target.device)).logits[0, -1].double()
        gaps.append(float((scores.max() - scores[[row[at], other[at]]].min()) / scores.std()))
    return max(gaps, default=None)


def _prompts(batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """Every row's prompt without its padding, [P] int64."""
    for batch in batches:
        for ids, mask in zip(batch.ids, batch.attention_mask, strict=True):
            yield ids[mask.bool()]
