"""What the layers share in a forward pass: angles, masks, and the slots that they write to, each computed once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.cache import SlotCache, SlotLayer
from ..engine.libraries import rotary_angles
from . import native

_KNOWN = ("transformers.", "assisted.")  # packages whose rotary embeddings follow their `rope_type`
_TABLE = 2**13  # positions with tabulated angles


class Angles(nn.Module):
    """The rotary embedding in the layout of heads: cosines and signed sines. On a CPU they come from a table if they depend on
    the position alone.

    Attributes:
        turn: [D] int64, for each number of a head the one that it turns with; None if they are half a head apart.
    """

    def __init__(self, rotary: nn.Module, config: Any, dtype: torch.dtype):
        super().__init__()
        self.rotary = [rotary]  # in a list, because it is the model's submodule
        self.rope_type = kind = getattr(rotary, "rope_type", "default")
        self.original_max_seq_len = getattr(rotary, "original_max_seq_len", config.max_position_embeddings)
        self.config = getattr(rotary, "config", config)
        # the angles of other types may depend on more than the position
        fixed = kind in ("default", "linear", "llama3") and type(rotary).__module__.startswith(_KNOWN)
        device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
        known = min(config.max_position_embeddings, _TABLE) if fixed and device.type == "cpu" else 0
        place = torch.zeros(1, 1, dtype=torch.int64, device=device)
        turned = rotary_angles(rotary, torch.zeros(1, dtype=dtype, device=device), place)
        turned = turned[0].shape[-1]
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rest, self.turn = size - turned, None  # numbers of a head that do not turn
        if self.rest:
            self.turn = torch.arange(size, device=device)
            self.turn[:turned] = self.turn[:turned].roll(turned // 2)
        self.whole = known == config.max_position_embeddings  # every position of the context is in the table
        self.table = None if known == 0 else self._angles(torch.zeros(1, dtype=dtype), torch.arange(known)[None])

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: gives dtype and device. position_ids: [B or 1, n] int64. Returns two tensors, [B or 1, n, 1, D]."""
        table, is_compiling = self.table if hidden.device.type == "cpu" else None, torch.compiler.is_compiling()
        # no values are read from a GPU, nor by a compiler; compiled passes stay within the context
        last = 0 if is_compiling or table is None else int(position_ids.max())
        if (
            table is None
            or position_ids.dim() > 2  # three rows of positions are those of text and of images
            or last >= table[0].shape[1]
            or (is_compiling and not self.whole)
        ):
            return self._angles(hidden, position_ids)
        cos, sin = table
        if not is_compiling and position_ids.numel() == 1:  # views take less time
            return cos[:, last : last + 1], sin[:, last : last + 1]
        return cos[0, position_ids], sin[0, position_ids]

    def _angles(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (part[:, :, None] for part in rotary_angles(self.rotary[0], hidden, position_ids))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return (F.pad(cos, (0, self.rest), value=1.0), F.pad(sin, (0, self.rest))) if self.rest else (cos, sin)


class Shared:
    """Values that all layers of a model would compute from the same inputs, computed once per forward pass.

    Args:
        angles: what computes the layers' angles; None if no layer has any.

    Attributes:
        turn: see `Angles`.
    """

    def __init__(self, angles: Angles | None) -> None:
        self.turn = None if angles is None else angles.turn
        self.mask: tuple[Any, torch.Tensor] | None = None
        self.passed: tuple[Any, Any, native.NativePass] | None = None

    def around(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        index: int,
    ) -> native.NativePass:
        """What the native layers of this forward pass share. index: of one of them."""
        known = self.passed
        if known is None or known[0] is not mask or known[1] is not angles[0]:
            rows, width, _ = hidden.shape
            if cache.start is None:  # a prompt, of which `width` columns have been counted
                first, end = cache.first, cache.layers[index].filled + cache.first
                places = torch.arange(end - width, end)[None]
            else:
                first, end, places = 0, cache.top, _places(cache, width)
            seen = None if mask is None else mask[:, 0]
            known = self.passed = mask, angles[0], native.NativePass(*angles, places, seen, rows, first, end)
        return known[2]

    def additive(self, mask: torch.Tensor | None, dtype: torch.dtype, beside: int) -> torch.Tensor | None:
        """The additive mask that sdpa would compute in every layer, repeated for `beside` joined heads, [.., beside * n, m]."""
        if mask is None:
            return None
        if torch.compiler.is_compiling():  # it shares the computation by itself
            return _additive(mask, dtype, beside)
        known = self.mask
        if known is None or known[0] is not mask:
            known = self.mask = mask, _additive(mask, dtype, beside)
        return known[1]


def _places(cache: SlotCache, width: int) -> torch.Tensor:
    """The slot that each column is written to, [R or 1, n]."""
    places = cache.start + torch.arange(width)[None] if isinstance(cache.start, int) else cache.start
    assert places is not None
    return places


def slots_of_layer(cache: Any, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`slots_of` a single layer."""
    found = slots_of(cache, (index,))
    return None if found is None else (found[0], found[1])


def slots_of(cache: Any, indices: Sequence[int]) -> list[torch.Tensor] | None:
    """Keys and values of layers that write to their slots themselves; None if this forward pass needs others."""
    # `start` is None while a prompt is read
    if torch.compiler.is_compiling() or not isinstance(cache, SlotCache) or cache.start is None:
        return None
    found: list[torch.Tensor] = []
    layers, top, count = cache.layers, cache.top, len(cache.layers)
    for index in indices:
        layer: Any = layers[index] if index < count else None
        if type(layer) is not SlotLayer or not layer.is_initialized or not layer.keys.is_cpu:
            return None
        if not top <= cache.capacity == layer.keys.shape[2]:
            layer.make_room(top, layer.keys, layer.values)
            if len(indices) > 1 and layer.keys.shape[2] != cache.capacity:
                return None  # layers that run together have as many
        found += (layer.keys, layer.values)
    return found


def _additive(mask: torch.Tensor, dtype: torch.dtype, beside: int) -> torch.Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.repeat(1, 1, beside, 1) if beside > 1 else mask
