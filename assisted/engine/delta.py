"""Linear attention with the gated delta rule (2412.06464) over several columns at once: chains and token trees.

A column's state follows from the committed state and the column's ancestors in closed form (2406.06484), so no state is copied
before a forward pass, each row keeps the columns that were accepted for it, and a rejected column leaves no trace. Runs the
projections, norms and weights of transformers' own layers; the columns themselves are verified like those of any target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .columns import Columns

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of [R, n, D] states: what the convolution reads [R, n, C], the output's gate, the write strength and the decay before their
activations, [R, n, any] each."""


@dataclass(frozen=True)
class Read:
    """What a layer has read in the last forward pass, until it is known which columns stay. R running rows, H heads.

    Args:
        columns: how they follow one another.
        inputs: [R, C, K + n], the convolution's, after the K before them.
        decay: [R, H, n] float32, log of the decay from the committed state to each column.
        keys, values: [R, H, n, any] float32, what each column writes.
    """

    columns: Columns
    inputs: torch.Tensor
    decay: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.nbytes for part in (self.inputs, self.decay, self.keys, self.values))

    def states_after(self, last: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """The convolution's state [R, C, K] and the recurrent state [R, H, dk, dv] after one column of each row.

        last: [R] int64. states: the same before the forward pass.
        """
        rows, width = torch.arange(len(last), device=last.device), self.columns.width
        size = self.inputs.shape[-1] - width
        window = self.columns.windows(size).to(last.device).expand(len(last), -1, -1)[rows, last]
        inputs = self.inputs.gather(2, window[:, None].expand(-1, self.inputs.shape[1], -1))
        if self.columns.ancestors is None:
            path = torch.arange(width, device=last.device) <= last[:, None]
        else:
            path = self.columns.ancestors[rows, last]
        end = self.decay[rows, :, last]  # [R, H]
        weights = (end[:, :, None] - self.decay).masked_fill(~path[:, None], float("-inf")).exp()
        written = (self.keys * weights[..., None]).transpose(-1, -2) @ self.values
        return [inputs, states[1] * end.exp()[:, :, None, None] + written]


class DeltaMixer(nn.Module):
    """Runs a layer of transformers' over several columns after its state. Prompts and all else run as the layer itself does.

    Args:
        own: the layer, not changed.
        project: its projections.
    """

    def __init__(self, own: Any, project: Callable[[Any, torch.Tensor], Projected]):
        super().__init__()
        self.own, self.project = own, project
        self.layer_idx: int = own.layer_idx
        self.norm, self.out = (own.o_norm, own.o_proj) if hasattr(own, "o_norm") else (own.norm, own.out_proj)
        self.strongest = 2.0 if getattr(own, "allow_neg_eigval", False) else 1.0

    def forward(
        self, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        columns: Columns | None = getattr(cache_params, "columns", None)
        if columns is None:
            mixed: torch.Tensor = self.own(
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return mixed
        own, (rows, width, _) = self.own, hidden_states.shape
        of_conv, gate, strength, rate = self.project(own, hidden_states)
        before, state = cache_params.states_of(self.layer_idx)
        inputs = torch.cat([before[:rows], of_conv.transpose(1, 2)], 2)
        read = self._convolved(inputs, columns)
        queries, keys, values = read.split([own.key_dim, own.key_dim, own.value_dim], 2)
        queries, keys = (_normed(part.view(rows, width, -1, own.head_k_dim).float()) for part in (queries, keys))
        queries = queries * own.head_k_dim**-0.5
        if own.num_v_heads != own.num_k_heads:
            times = own.num_v_heads // own.num_k_heads
            queries, keys = (part.repeat_interleave(times, 2) for part in (queries, keys))
        beta = (strength.sigmoid() * self.strongest).float()
        decay = -own.A_log.float().exp() * F.softplus(rate.float() + own.dt_bias)
        made, noted = delta_rule(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.view(rows, width, -1, own.head_v_dim).float().transpose(1, 2),
            decay.transpose(1, 2),
            beta.transpose(1, 2),
            state[:rows],
            columns,
        )
        cache_params.note(self.layer_idx, Read(columns, inputs, *noted))
        made = made.transpose(1, 2).to(hidden_states.dtype).reshape(-1, own.head_v_dim)
        result: torch.Tensor = self.out(self.norm(made, gate.reshape(-1, own.head_v_dim)).reshape(rows, width, -1))
        return result

    def _convolved(self, inputs: torch.Tensor, columns: Columns) -> torch.Tensor:
        """The causal convolution over each column's path, with its activation: [R, C, K + n] -> [R, n, C]."""
        conv, size = self.own.conv1d, inputs.shape[2] - columns.width
        if columns.ancestors is None:
            windows = inputs[:, :, 1:].unfold(2, size, 1)  # [R, C, n, K]
        else:
            index = columns.windows(size).flatten(1)[:, None].expand(-1, inputs.shape[1], -1)
            windows = inputs.gather(2, index).unflatten(2, (columns.width, size))
        weight = conv.weight[:, 0, -size:].float()
        made = (windows.float() * weight[:, None]).sum(3)  # rounded once, as by a convolution
        made = made if conv.bias is None else made + conv.bias.float()[:, None]
        return F.silu(made.to(inputs.dtype)).transpose(1, 2)


def delta_rule(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    columns: Columns,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The gated delta rule over n columns, each after its own path from a common state.

    Column i first multiplies the state by exp(decay), then writes beta * (value - what the state returns for its key) at its
    key; its output is what the state returns for its query. The writes of all columns solve one triangular system.

    queries, keys: [R, H, n, dk] float32, of norm 1. values: [R, H, n, dv]. decay: [R, H, n], at most 0. beta: [R, H, n].
    state: [R, H, dk, dv]. Returns the outputs [R, H, n, dv], and the decay from the state to each column, the keys, and what is
    written at them (`Read`).
    """
    width = columns.width
    beta = beta[..., None]
    if width == 1:
        to_column = decay
        recalled, found = (torch.cat([keys, queries], 2) @ state).mul(decay.exp()[..., None]).split(1, 2)
        written = beta * (values - recalled)
        made = found + (queries * keys).sum(-1, keepdim=True) * written
        return made, (to_column, keys, written)
    if columns.ancestors is None:
        to_column = decay.cumsum(2)
        path = _causal(width, decay.device)
    else:
        path = columns.ancestors[:, None]
        to_column = (path * decay[:, :, None]).sum(3)
    between = (to_column[..., None] - to_column[..., None, :]).masked_fill(~path, float("-inf")).exp()  # [R, H, n, n]
    both = torch.cat([keys, queries], 2)
    with_keys = both @ keys.transpose(-1, -2)
    with_state = both @ state * to_column.exp().repeat(1, 1, 2)[..., None]
    system = with_keys[:, :, :width] * between * beta
    written = torch.linalg.solve_triangular(
        system, beta * (values - with_state[:, :, :width]), upper=False, unitriangular=True
    )
    made = with_state[:, :, width:] + (with_keys[:, :, width:] * between) @ written
    return made, (to_column, keys, written)


def delta_mixer(module: nn.Module) -> nn.Module | None:
    """A layer with the gated delta rule as it runs over columns; None for layers of another kind."""
    project = next((project for part, project in _PROJECTIONS.items() if hasattr(module, part)), None)
    return DeltaMixer(module, project) if project is not None and hasattr(module, "A_log") else None


def _of_qwen3_5(own: Any, hidden: torch.Tensor) -> Projected:
    return own.in_proj_qkv(hidden), own.in_proj_z(hidden), own.in_proj_b(hidden), own.in_proj_a(hidden)


def _of_qwen3_next(own: Any, hidden: torch.Tensor) -> Projected:
    parts = own.fix_query_key_value_ordering(own.in_proj_qkvz(hidden), own.in_proj_ba(hidden))
    queries, keys, values, gate, strength, rate = parts
    return torch.cat([part.flatten(2) for part in (queries, keys, values)], 2), gate, strength, rate


def _of_olmo_hybrid(own: Any, hidden: torch.Tensor) -> Projected:
    of_conv = torch.cat([own.q_proj(hidden), own.k_proj(hidden), own.v_proj(hidden)], 2)
    return of_conv, own.g_proj(hidden), own.b_proj(hidden), own.a_proj(hidden)


_PROJECTIONS: dict[str, Callable[[Any, torch.Tensor], Projected]] = {
    "in_proj_qkv": _of_qwen3_5,
    "in_proj_qkvz": _of_qwen3_next,
    "g_proj": _of_olmo_hybrid,
}
"""By the name of a projection that only this family's layers have."""


def _normed(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors of norm 1 along the last axis, as transformers computes them."""
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + 1e-6)


def _causal(width: int, device: torch.device) -> torch.Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()
