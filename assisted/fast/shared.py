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
from .families import LLAMA, Form

_KNOWN = ("transformers.", "assisted.")  # packages whose rotary embeddings follow their `rope_type`
_TABLE = 2**13  # positions with tabulated angles


class Angles(nn.Module):
    """The rotary embedding in the layout of heads: cosines and signed sines. On a CPU they come from a table if they depend on
    the position alone.

    Args:
        rotary: the model's.
        form: of the layers.

    Attributes:
        turn: [D] int64, for each number of a head the one that it turns with; None if they are half a head apart.
        turned: how many numbers of a head turn.
        kinds: of layers, if each has angles of its own.
    """

    def __init__(self, rotary: nn.Module, config: Any, dtype: torch.dtype, form: Form = LLAMA):
        super().__init__()
        self.rotary, self.form = [rotary], form  # in a list, because it is the model's submodule
        self.rope_type = types = getattr(rotary, "rope_type", "default")
        self.kinds: tuple[str, ...] = tuple(types) if isinstance(types, dict) else ()
        self.original_max_seq_len = getattr(rotary, "original_max_seq_len", config.max_position_embeddings)
        self.config = getattr(rotary, "config", config)
        # the angles of other types may depend on more than the position
        known_types = {*types.values()} if isinstance(types, dict) else {types}
        fixed = known_types <= {"default", "linear", "llama3"} and type(rotary).__module__.startswith(_KNOWN)
        device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
        known = min(config.max_position_embeddings, _TABLE) if fixed and device.type == "cpu" else 0
        place = torch.zeros(1, 1, dtype=torch.int64, device=device)
        turned = self._given(torch.zeros(1, dtype=dtype, device=device), place, *self.kinds[:1])
        self.turned = int(turned[0].shape[-1])
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rest, self.turn = size - self.turned, None  # numbers of a head that do not turn
        if self.rest or form.pairs:
            self.turn = torch.arange(size, device=device)
            own = self.turn[: self.turned]
            self.turn[: self.turned] = own ^ 1 if form.pairs else own.roll(self.turned // 2)
        self.whole = known == config.max_position_embeddings  # every position of the context is in the table
        self.tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind in (self.kinds or (None,)) if known else ():
            self.tables[kind] = self._angles(torch.zeros(1, dtype=dtype), torch.arange(known)[None], kind)

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those of all positions, where all layers share them."""
        return self.tables.get(None)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """hidden: gives dtype and device. position_ids: [B or 1, n] int64. layer_type: one of `kinds`. Returns two tensors,
        [B or 1, n, 1, D]; without a layer type, those of all kinds by name, if there are any."""
        if self.kinds and layer_type is None:
            return {kind: self(hidden, position_ids, kind) for kind in self.kinds}
        is_compiling = torch.compiler.is_compiling()
        table = self.tables.get(layer_type) if hidden.device.type == "cpu" else None
        # no values are read from a GPU, nor by a compiler; compiled passes stay within the context
        last = 0 if is_compiling or table is None else int(position_ids.max())
        if (
            table is None
            or position_ids.dim() > 2  # three rows of positions are those of text and of images
            or last >= table[0].shape[1]
            or (is_compiling and not self.whole)
        ):
            return self._angles(hidden, position_ids, layer_type)
        cos, sin = table
        if not is_compiling and position_ids.numel() == 1:  # views take less time
            return cos[:, last : last + 1], sin[:, last : last + 1]
        return cos[0, position_ids], sin[0, position_ids]

    def _given(self, hidden: torch.Tensor, position_ids: torch.Tensor, *kind: str) -> Any:
        """What the model's module makes of positions, of layers of a kind."""
        found = rotary_angles(self.rotary[0], hidden, position_ids, **({"layer_type": kind[0]} if kind else {}))
        return tuple(torch.cat([part, part], -1) for part in found) if self.form.angles_once else found

    def _angles(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, kind: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = self._given(hidden, position_ids, *() if kind is None else (kind,))
        cos, sin = (part[:, :, None] for part in given)
        half = sin.shape[-1] // 2
        if self.form.pairs:
            if not self.form.angles_of_pairs:
                cos, sin = (part[..., :half].repeat_interleave(2, -1) for part in (cos, sin))
            sin = torch.stack([-sin[..., ::2], sin[..., 1::2]], -1).flatten(-2)
        else:
            sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return (F.pad(cos, (0, self.rest), value=1.0), F.pad(sin, (0, self.rest))) if self.rest else (cos, sin)


class Shared:
    """Values that all layers of a model would compute from the same inputs, computed once per forward pass.

    Args:
        angles: what computes the layers' angles; None if no layer has any.

    Attributes:
        turn, turned: see `Angles`.
    """

    def __init__(self, angles: Angles | None) -> None:
        self.turn = None if angles is None else angles.turn
        self.turned = 0 if angles is None else angles.turned
        self.in_floats = angles is not None and angles.form.turns_in_floats
        # by the kind of the layers, which may have masks and angles of their own
        self.masks: dict[str | None, tuple[Any, torch.Tensor]] = {}
        self.passed: dict[str | None, tuple[Any, Any, native.NativePass]] = {}

    def around(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        index: int,
        kind: str | None = None,
    ) -> native.NativePass:
        """What the native layers of a kind share in this forward pass. index: of one of them."""
        known = self.passed.get(kind)
        if known is None or known[0] is not mask or known[1] is not angles[0]:
            rows, width, _ = hidden.shape
            if cache.start is None:  # a prompt, of which `width` columns have been counted
                first, end = cache.first, cache.layers[index].filled + cache.first
                places = torch.arange(end - width, end)[None]
            else:
                first, end, places = 0, cache.top, _places(cache, width)
            seen = None if mask is None else mask[:, 0]
            seen = seen if seen is None or seen.dtype == torch.bool else seen == 0  # of additive ones
            cos, sin = (part.float() if self.in_floats else part for part in angles)
            made = native.NativePass(cos, sin, places, seen, rows, first, end, hidden.dtype)
            known = self.passed[kind] = mask, angles[0], made
        return known[2]

    def additive(
        self, mask: torch.Tensor | None, dtype: torch.dtype, beside: int, kind: str | None = None
    ) -> torch.Tensor | None:
        """The additive mask that sdpa would compute in every layer of a kind, repeated for `beside` joined heads,
        [.., beside * n, m]."""
        if mask is None:
            return None
        if torch.compiler.is_compiling():  # it shares the computation by itself
            return _additive(mask, dtype, beside)
        known = self.masks.get(kind)
        if known is None or known[0] is not mask:
            known = self.masks[kind] = mask, _additive(mask, dtype, beside)
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
