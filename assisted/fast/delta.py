"""The gated delta rule over few columns in C, for a CPU. By operations of torch, it takes some seventy of them, longer than the
arithmetic. Deals with tensors; `fused` decides where it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch

from ..engine.delta import DeltaMixer, Read
from ..engine.libraries import READS_STATES
from ..engine.masks import Columns
from . import native
from .native import NativeLayers, NativePass, Rule
from .structs import Delta, pointer

_SHARED = 2**18  # products of a number and a state's entry from which several threads are faster
_PLAIN = torch.contiguous_format


def rule_of(mixer: DeltaMixer, order: torch.Tensor | None = None) -> Rule | None:
    """What C needs of a layer's rule, with copies of its small weights; None if C cannot run it. order: of the outputs of its
    first product, see `Product`."""
    own: Any = mixer.own
    norm: Any = mixer.gated_norm
    conv, dtype = own.conv1d, own.conv1d.weight.dtype
    small = conv.bias, own.A_log, own.dt_bias, norm.weight
    held = [part for part in (conv.weight, *small) if part is not None]
    if not all(part.is_cpu and part.dtype in (dtype, torch.float32) for part in held) or not native.is_available(dtype):
        return None
    if max(own.head_k_dim, own.head_v_dim) > native.WIDEST:
        return None
    bias, logs, shift, weight = (None if part is None else part.detach().float().contiguous() for part in small)
    assert logs is not None
    made = conv.weight.detach()[:, 0].t().float().contiguous(), bias, logs.exp().neg(), shift, weight
    keys, heads, dk, dv = own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim
    channels, shared = 2 * keys * dk + heads * dv, heads // keys
    lengths = conv.weight.shape[-1] * channels, channels, heads, heads, dv
    outputs = torch.arange(channels + heads * (dv + 2)) if order is None else order
    of_conv, gates, strengths, decays = (part.flatten() for part in mixer.arrange(own, outputs[None, None]))
    queries, of_keys, values = of_conv.split([keys * dk, keys * dk, heads * dv])
    begin = [int(part[0]) for part in (queries, of_keys, values, gates, strengths, decays)]
    apart = [
        int(part[size] - part[0]) if keys > 1 else 0
        for part, size in ((queries, dk), (values, shared * dv), (decays, shared))
    ]
    struct = Delta(
        *(pointer(part, torch.float32, length) for part, length in zip(made, lengths, strict=True)),
        *(heads, keys, dk, dv, conv.weight.shape[-1], norm.weight.dtype == dtype == torch.bfloat16),
        *(*begin, *apart, mixer.strongest, norm.variance_epsilon),
    )
    return Rule(struct, made)


class NativeMixer(DeltaMixer):
    """A `DeltaMixer` that runs in C where it can, prompts too. It uses the values that the layer's small weights have when it
    is made. In bfloat16 it rounds where the layer does; states are float32 there as well."""

    def __init__(self, own: Any, *parts: Any, **named: Any):
        super().__init__(own, *parts, **named)
        self.rule = rule_of(self)

    def over_columns(
        self, made: torch.Tensor, before: torch.Tensor, state: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, Read]:
        if not self._fits(made, before, state):
            return super().over_columns(made, before, state, columns)
        (rows, heads, dk, dv), n, (_, channels, size) = state.shape, columns.width, before.shape
        read = Read(
            before.new_empty(rows, channels, size + n),
            state.new_empty(rows, heads, n),
            state.new_empty(rows, heads, n, dk),
            state.new_empty(rows, heads, n, dv),
        )
        parents = columns.parents.contiguous() if columns.parents is not None and n > 1 else None
        return self._mix(
            made, before, state, parents, (c_void_p * 4)(*(part.data_ptr() for part in read.tensors))
        ), read

    def of_text(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        states = None if kwargs else self.states_for(hidden_states, cache)
        if states is None:
            return super().of_text(hidden_states, cache, attention_mask, **kwargs)
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        made = self.joined(hidden_states)
        if not self._fits(made, *states):
            return super().of_text(hidden_states, cache, attention_mask, **kwargs)
        mixed = self._mix(made, *states, None, None)
        if cache is not None:
            self.keep(cache, *states)
        result: torch.Tensor = self.out(mixed)
        return result

    def states_for(self, hidden: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies of the states before a prompt, [R, C, K] in its dtype and [R, H, dk, dv] float32, zeros without a past; None
        if the layer itself has to read it. hidden: [R, n, D]."""
        own: Any = self.own
        if not READS_STATES or not hidden.is_cpu:
            return None
        channels, size = own.conv1d.weight.shape[0], own.conv1d.weight.shape[-1]
        rows, past, state = len(hidden), None, None
        if cache is not None:
            if cache.is_recording_past(self.layer_idx):
                return None
            past, state = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
        shape = rows, own.num_v_heads, own.head_k_dim, own.head_v_dim
        before = hidden.new_zeros(rows, channels, size) if past is None else past.clone(memory_format=_PLAIN)
        state = torch.zeros(shape) if state is None else state.clone(memory_format=_PLAIN)
        return (before, state) if before.shape == (rows, channels, size) and state.shape[0] == rows else None

    def keep(self, cache: Any, before: torch.Tensor, state: torch.Tensor) -> None:
        """Let a cache have the states after a prompt. before: the last inputs of the convolution, [R, C, K]."""
        cache.update_conv_state(before, self.layer_idx, conv_kernel_size=self.own.conv1d.weight.shape[-1])
        cache.update_recurrent_state(state, self.layer_idx)

    def _fits(self, made: torch.Tensor, before: torch.Tensor, state: torch.Tensor) -> bool:
        """Whether the rule in C can run over these; see `over_columns`."""
        own: Any = self.own
        return (
            self.rule is not None
            and before.shape[2] == own.conv1d.weight.shape[-1]
            and made.dtype == before.dtype == own.conv1d.weight.dtype
            and made.is_cpu
            and before.is_contiguous()
            and state.is_contiguous()
            and state.dtype == torch.float32
            and not torch.compiler.is_compiling()
        )

    def _mix(
        self, made: torch.Tensor, before: torch.Tensor, state: torch.Tensor, parents: torch.Tensor | None, notes: Any
    ) -> torch.Tensor:
        """What the last product reads, [R, n, heads * dv]. notes: as `NativeLayers.run`."""
        assert self.rule is not None
        (rows, width, outputs), (_, heads, dk, dv), dtype = made.shape, state.shape, made.dtype
        made, mixed = made.contiguous(), made.new_empty(rows, width, heads * dv)
        native.loaded(dtype)[0].mix(
            *(ctypes.addressof(self.rule.struct), rows, width, pointer(parents, torch.int64, rows * (width - 1))),
            *(pointer(made, dtype, rows * width * outputs), outputs),
            *(pointer(before, dtype, before.numel()), pointer(state, torch.float32, state.numel())),
            *(
                None if notes is None else ctypes.addressof(notes),
                mixed.data_ptr(),
                _threads(rows * width * heads * dk * dv),
            ),
        )
        return mixed


class PassRead:
    """What the layers of a forward pass have read, as `Read`, all in one tensor.

    Args:
        layers: of the pass.
        stores: keys and values of each with attention, the states of each other one.
        columns, rows: of the pass.
    """

    def __init__(self, layers: NativeLayers, stores: Sequence[torch.Tensor], columns: Columns, rows: int):
        self.layers, self.stores, self.rows, self.width = layers, stores, rows, columns.width
        self.parents = None if columns.parents is None or self.width == 1 else columns.parents.contiguous()
        sizes = [size for layer in layers.layers for size in _noted(layer.rule, layer.dtype, rows, self.width)]
        self.notes, at, places = torch.empty(sum(sizes), dtype=torch.uint8), 0, []
        first = self.notes.data_ptr()
        for size in sizes:
            places.append(first + at)
            at += size
        self.places = (c_void_p * len(places))(*places)
        self.of_stores, _ = layers.places(stores, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of what was read."""
        return self.notes.nbytes

    def advance(self, last: Sequence[int]) -> None:
        """Let the states become those after a column of each row, -1 for those that stay. last: [R]."""
        wanted = (c_int64 * self.rows)(*last)
        self.layers.library.advance(
            *(ctypes.addressof(self.layers.addresses), len(self.layers.layers), self.rows, self.width),
            *(pointer(self.parents, torch.int64, self.rows * (self.width - 1)), ctypes.addressof(wanted)),
            *(ctypes.addressof(self.of_stores), ctypes.addressof(self.places), _threads(self.notes.numel())),
        )


def _noted(rule: Rule | None, dtype: torch.dtype, rows: int, width: int) -> list[int]:
    """Bytes of what a layer notes: inputs, decays, keys, and what is written (`Read`). Each begins a line of memory."""
    if rule is None:
        return [0] * 4
    own, floats = rule.struct, torch.float32.itemsize
    sizes = [rows * rule.channels * (own.size + width) * dtype.itemsize]
    sizes += [rows * width * own.heads * count * floats for count in (1, own.dk, own.dv)]
    return [-(-size // 64) * 64 for size in sizes]


def run(
    layers: NativeLayers,
    hidden: torch.Tensor,
    stores: Sequence[torch.Tensor],
    around: dict[str | None, NativePass],
    columns: Columns,
    logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PassRead]:
    """Run layers, some with the delta rule, over several columns.

    hidden: [R, n, D]. stores: two for each layer, as `PassRead`. around: of layers with attention, empty without any.
    logits: as `NativeLayers.run`. Returns the outputs, [layers, R, n, D], and what was read.
    """
    rows, width, _ = hidden.shape
    read = PassRead(layers, stores, columns, rows)
    passes = around or {None: NativePass.without_slots(rows, width)}
    for one in passes.values():
        one.follow(read.parents)
    made = hidden.new_empty(len(layers.layers), *hidden.shape)
    layers.run(hidden.contiguous(), stores, passes, made=made, logits=logits, notes=read.places)
    return made, read


def fits(hidden: torch.Tensor, states: Sequence[torch.Tensor] | None) -> bool:
    """Whether columns [R, n, D] can run in C with the states of a layer, [R, C, K] and [R, H, dk, dv]."""
    return (
        states is not None
        and hidden.shape[:-1].numel() <= native.AT_ONCE
        and states[0].dtype == hidden.dtype
        and states[1].dtype == torch.float32
        and all(state.is_cpu and state.is_contiguous() for state in states)
        and not torch.compiler.is_compiling()
    )


def _threads(products: int) -> int:
    return torch.get_num_threads() if products >= _SHARED else 1
