"""A bound on the keys and values that a draft keeps: those of the first few tokens and of the last ones (StreamingLLM,
2309.17453; MagicDec, 2408.11049). Knows slots; when they are dropped is the drafter's decision.

Tokens keep their positions. The distribution that a draft draws from is then that of the tokens that it still sees, and the
same one judges the draft, so the target's distribution is kept.
"""

from __future__ import annotations

import torch

from ..core.host import zeros
from .cache import SlotCache, SlotLayer
from .prepared import CallSettings

SINKS = 4
"""Tokens at the beginning of a text that are always kept, because much attention goes to them (2309.17453)."""
AHEAD = 64  # slots for a draft and for text that is read late; more are added when they are needed


def slots_for_window(window: int) -> int:
    """The most slots that hold text between drafts. They are dropped in steps of a quarter of the window, which costs one copy
    of what is kept every so many tokens."""
    return SINKS + window + max(1, window // 4)


def most_slots(window: int | None, needed: int) -> int:
    """The slots of a row after a text with `needed` of them: tensors up to twice as large as a window needs stay (`_move`)."""
    kept = needed if window is None else slots_for_window(window) + AHEAD
    return needed if needed <= 2 * kept else kept


def keep_last(cache: SlotCache, window: int | None) -> None:
    """Drop the keys and values of all but the first `SINKS` and the last `window` tokens of each row, if a row has more than
    `slots_for_window`. Padding is dropped, too. None keeps everything.

    For slots that hold committed text alone and are not right-aligned. Their memory shrinks with the first drop, and then
    stays about the same.
    """
    if window is None:
        return
    cache.limit = min(cache.limit, slots_for_window(window) + AHEAD)
    if max(cache.lengths) <= slots_for_window(window):
        return
    lengths = torch.tensor(cache.lengths)[:, None]
    seen = torch.arange(max(cache.lengths)) < lengths  # [B, top], False at padding
    if cache.visible is not None:
        hidden = min(cache.visible.shape[1], seen.shape[1])
        seen[:, :hidden] &= cache.visible[:, :hidden].cpu()
    rank = seen.cumsum(1)
    kept = seen & ((rank <= SINKS) | (rank > rank[:, -1:] - window))
    counts = kept.sum(1).tolist()
    source = (~kept).int().argsort(dim=1, stable=True)[cache.order, : max(counts)]  # in storage order
    for layer in cache.slot_layers:
        if layer.is_initialized:
            _move(layer, source, cache.limit)
    cache.capacity = min((layer.keys.shape[2] for layer in cache.slot_layers if layer.is_initialized), default=0)
    dropped = [length - count for length, count in zip(cache.lengths, counts, strict=True)]
    # positions are counted from the end of the text, so they stay the same
    cache.padding = [hidden - count for hidden, count in zip(cache.padding, dropped, strict=True)]
    cache.lengths, cache.visible, cache.start = counts, None, max(counts)


def dropped_from(cache: SlotCache) -> list[int]:
    """How many slots fewer than columns of its text each row has."""
    return [prompt - now for now, prompt in zip(cache.padding, cache.prompt_padding, strict=True)]


def holds_end_of(cache: SlotCache, length: int) -> bool:
    """Whether the last of the first `length` columns of the text are there, so that reading can go on after them."""
    return all(not dropped or length - dropped > SINKS for dropped in dropped_from(cache))


def _move(layer: SlotLayer, source: torch.Tensor, capacity: int) -> None:
    """Gather slots, [B, n] int64, at the beginning. Much larger tensors are replaced by ones of `capacity` slots; others stay
    where they are, because captured passes may read them there."""
    index = source.to(layer.keys.device)[:, None, :, None]
    for name in ("keys", "values"):
        store: torch.Tensor = getattr(layer, name)
        held = store.gather(2, index.expand(-1, store.shape[1], -1, store.shape[3]))
        if store.shape[2] > 2 * capacity:
            store = zeros(store, (*store.shape[:2], max(capacity, held.shape[2]), store.shape[3]))
            setattr(layer, name, store)
        store[:, :, : held.shape[2]] = held


def has_ended(context: int, tokens: int, settings: CallSettings) -> bool:
    """Whether a text of so many tokens is too long for a draft's context, of which a call is warned once."""
    if tokens + 1 < context:
        return False
    ends = f"The draft's context ends at {context} tokens"
    if not any(said.startswith(ends) for said in settings.warnings):
        settings.warn(
            f"{ends}, and the text has {tokens}: it goes on without this draft. Choose a draft with a longer context, or one "
            "that reads text alone, such as draft='suffix'."
        )
    return True
