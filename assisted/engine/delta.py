"""Linear attention with the gated delta rule (2412.06464) over several columns at once: chains and token trees.

A column's state follows from the committed state and the column's ancestors in closed form (2406.06484), so no state is copied
before a forward pass, each row keeps the columns that were accepted for it, and a rejected column leaves no trace. Runs the
projections, norms and weights of transformers' own layers; the columns themselves are verified like those of any target.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .masks import Columns

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of [R, n, D] states: what the convolution reads [R, n, C], the output's gate, the write strength and the decay before their
activations, [R, n, any] each."""


@dataclass(frozen=True)
class Read:
    """What a layer has read in the last forward pass, until it is known which columns stay. R running rows, H heads."""

    inputs: torch.Tensor  # [R, C, K + n], the convolution's, after the K before them
    decay: torch.Tensor  # [R, H, n] float32, log of the decay from the committed state to each column
    # keys, values: [R, H, n, any] float32, what each column writes
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [self.inputs, self.decay, self.keys, self.values]

    def states_after(
        self, last: torch.Tensor | int, states: list[torch.Tensor], columns: Columns
    ) -> list[torch.Tensor]:
        """The convolution's state [R, C, K] and the recurrent state [R, H, dk, dv] after one column of each row.

        last: [R] int64, or a column of every row of a chain. states: the same before the forward pass. columns: how they
        follow one another.
        """
        width = self.decay.shape[2]
        size = self.inputs.shape[-1] - width
        if isinstance(last, int):  # slices, not masks
            kept = last + 1
            inputs, keys, values = (
                self.inputs[:, :, kept : kept + size],
                self.keys[:, :, :kept],
                self.values[:, :, :kept],
            )
            end = self.decay[:, :, kept - 1 : kept]
            if kept > 1:
                keys = keys * (end - self.decay[:, :, :kept]).exp_()[..., None]
            return [inputs, torch.addcmul(keys.transpose(-1, -2) @ values, states[1], end.exp()[..., None])]
        rows = torch.arange(len(last), device=last.device)
        window = columns.windows(size).to(last.device).expand(len(last), -1, -1)[rows, last]
        inputs = self.inputs.gather(2, window[:, None].expand(-1, self.inputs.shape[1], -1))
        if columns.ancestors is None:
            path = torch.arange(width, device=last.device) <= last[:, None]
        else:
            path = columns.ancestors[rows, last]
        end = self.decay[rows, :, last]  # [R, H]
        weights = (end[:, :, None] - self.decay).masked_fill(~path[:, None], float("-inf")).exp()
        written = (self.keys * weights[..., None]).transpose(-1, -2) @ self.values
        return [inputs, states[1] * end.exp()[:, :, None, None] + written]


class DeltaMixer(nn.Module):
    """Runs a layer of transformers' over several columns after its state. Prompts and all else run as the layer itself does,
    or as a derived class has them.

    Args:
        own: the layer, not changed.
        joined: its projections for one input, [R, n, D] to their outputs one after the other; by default its own modules, the
            `inputs_of` the layer.
        norm, out: its last norm, of [..., dv] and a gate of that shape, and its output projection; by default its own modules.
    """

    def __init__(
        self,
        own: Any,
        joined: Callable[[torch.Tensor], torch.Tensor] | None = None,
        norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        out: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        super().__init__()
        self.own = own
        self.modules_in, self.arrange = inputs_of(own), _kind(own)[1]
        self.joined = joined or self._together
        self.layer_idx: int = own.layer_idx
        self.gated_norm, own_out = outputs_of(own)
        self.norm, self.out = norm or self.gated_norm, out or own_out
        self.strongest = 2.0 if getattr(own, "allow_neg_eigval", False) else 1.0

    def forward(
        self, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        columns: Columns | None = getattr(cache_params, "columns", None)
        if columns is None:
            return self.of_text(hidden_states, cache_params, attention_mask, **kwargs)
        rows, (before, state) = len(hidden_states), cache_params.states_of(self.layer_idx)
        made, read = self.over_columns(self.joined(hidden_states), before[:rows], state[:rows], columns)
        cache_params.note(self.layer_idx, read)
        result: torch.Tensor = self.out(made)
        return result

    def of_text(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        """`forward` for a prompt, or a text without a cache."""
        mixed: torch.Tensor = self.own(hidden_states, cache_params=cache, attention_mask=attention_mask, **kwargs)
        return mixed

    def over_columns(
        self, made: torch.Tensor, before: torch.Tensor, state: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, Read]:
        """What lies between the projections: the input of the last one, [R, n, any], and what was read.

        made: outputs of the first ones, [R, n, any], as `joined` gives them. before: the state of the convolution, [R, C, K].
        state: [R, H, dk, dv].
        """
        own, (of_conv, gate, strength, rate) = self.own, self.arrange(self.own, made)
        inputs = torch.cat([before, of_conv.transpose(1, 2)], 2)
        read = self._convolved(inputs, columns)
        both, values = read.split([2 * own.key_dim, own.value_dim], 1)
        # shape: [R, queries and keys, H, dk, n]
        both = _normed(both.unflatten(1, (2, -1, own.head_k_dim)).float(), own.head_k_dim)
        if own.num_v_heads != own.num_k_heads:
            both = both.repeat_interleave(own.num_v_heads // own.num_k_heads, 2)
        beta = (strength.sigmoid() if self.strongest == 1 else strength.sigmoid() * self.strongest).float()
        decay = F.softplus(rate.float() + own.dt_bias) * own.A_log.float().exp().neg()
        found, noted = delta_rule(
            both.permute(0, 2, 1, 4, 3).flatten(2, 3),
            values.unflatten(1, (-1, own.head_v_dim)).float().transpose(-1, -2),
            decay.transpose(1, 2),
            beta.transpose(1, 2),
            state,
            columns,
        )
        found = self.norm(found.transpose(1, 2).to(gate.dtype), gate.unflatten(2, (-1, own.head_v_dim)))
        return found.flatten(2), Read(inputs, *noted)

    def _together(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([module(hidden) for module in self.modules_in], -1)

    def _convolved(self, inputs: torch.Tensor, columns: Columns) -> torch.Tensor:
        """The causal convolution over each column's path, with its activation: [R, C, K + n] -> [R, C, n]."""
        conv, size = self.own.conv1d, inputs.shape[2] - columns.width
        if columns.ancestors is None:
            windows = inputs[:, :, 1:].unfold(2, size, 1)  # [R, C, n, K]
        else:
            index = columns.windows(size).flatten(1)[:, None].expand(-1, inputs.shape[1], -1)
            windows = inputs.gather(2, index).unflatten(2, (columns.width, size))
        weight = conv.weight[:, 0, -size:].float()
        made = (windows.float() * weight[:, None]).sum(3)  # rounded once, as by a convolution
        made = made if conv.bias is None else made + conv.bias.float()[:, None]
        return F.silu(made.to(inputs.dtype))


def delta_rule(
    both: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    columns: Columns,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The gated delta rule over n columns, each after its own path from a common state.

    Column i first multiplies the state by exp(decay), then writes beta * (value - what the state returns for its key) at its
    key; its output is what the state returns for its query. The writes of all columns solve one triangular system.

    both: [R, H, 2n, dk] float32, the queries, scaled, and then the keys, of norm 1. values: [R, H, n, dv]. decay: [R, H, n], at
    most 0. beta: [R, H, n]. state: [R, H, dk, dv]. Returns the outputs [R, H, n, dv], and the decay from the state to each
    column, the keys, and what is written at them (`Read`).
    """
    width = columns.width
    beta, keys = beta[..., None], both[:, :, width:]
    if width == 1:
        to_column = decay
        found, recalled = (both @ state).mul(decay.exp()[..., None]).split(1, 2)
        written = beta * (values - recalled)
        made = torch.addcmul(found, both[:, :, :1] @ keys.transpose(-1, -2), written)
        return made, (to_column, keys, written)
    if columns.ancestors is None:
        to_column = decay.cumsum(2)
    else:
        to_column = decay @ columns.descendants
    # shape: [R, H, n, n], 0 beside the path
    between = (to_column[..., None] - to_column[..., None, :]).add_(columns.beside_path(decay.device)).exp_()
    with_keys = (both @ keys.transpose(-1, -2)).unflatten(2, (2, width)) * between[:, :, None]
    with_state = (both @ state).unflatten(2, (2, width)) * to_column.exp()[:, :, None, :, None]
    written = torch.linalg.solve_triangular(
        with_keys[:, :, 1] * beta, beta * (values - with_state[:, :, 1]), upper=False, unitriangular=True
    )
    return with_state[:, :, 0] + with_keys[:, :, 0] @ written, (to_column, keys, written)


def delta_mixer(module: nn.Module) -> nn.Module | None:
    """A layer with the gated delta rule as it runs over columns; None for layers of another kind."""
    return DeltaMixer(module) if hasattr(module, "A_log") and any(hasattr(module, part) for part in _KINDS) else None


def inputs_of(own: Any) -> list[nn.Module]:
    """The projections of a layer's input, in the order in which `DeltaMixer` takes their outputs."""
    return [getattr(own, name) for name in _kind(own)[0]]


def outputs_of(own: Any) -> tuple[nn.Module, nn.Module]:
    """A layer's last norm and its output projection."""
    return (own.o_norm, own.o_proj) if hasattr(own, "o_norm") else (own.norm, own.out_proj)


def _side_by_side(own: Any, made: torch.Tensor) -> Projected:
    return made.split([2 * own.key_dim + own.value_dim, own.value_dim, own.num_v_heads, own.num_v_heads], 2)


def _by_head(own: Any, made: torch.Tensor) -> Projected:
    parts = own.fix_query_key_value_ordering(*made.split([2 * (own.key_dim + own.value_dim), 2 * own.num_v_heads], 2))
    queries, keys, values, gate, strength, rate = parts
    return torch.cat([part.flatten(2) for part in (queries, keys, values)], 2), gate.flatten(2), strength, rate


_KINDS: dict[str, tuple[tuple[str, ...], Callable[[Any, torch.Tensor], Projected]]] = {
    "in_proj_qkv": (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _side_by_side),  # Qwen3.5
    "in_proj_qkvz": (("in_proj_qkvz", "in_proj_ba"), _by_head),  # Qwen3-Next
    "g_proj": (("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), _side_by_side),  # OLMo hybrid
}
"""The projections by the name of one that only this family's layers have, and how their outputs lie."""


def _kind(own: Any) -> tuple[tuple[str, ...], Callable[[Any, torch.Tensor], Projected]]:
    return next(kind for part, kind in _KINDS.items() if hasattr(own, part))


def _normed(both: torch.Tensor, size: int) -> torch.Tensor:
    """Queries and keys of norm 1, as transformers computes them, and queries scaled, [R, 2, H, dk, any]."""
    least, scales = _constants(size, both.device)
    return both / torch.linalg.vector_norm(both, dim=3, keepdim=True).hypot_(least).mul_(scales)


@functools.cache  # captured passes refer to them by address
def _constants(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):  # they outlive the mode
        return torch.tensor(1e-3, device=device), torch.tensor([size**0.5, 1.0], device=device).view(2, 1, 1, 1)
