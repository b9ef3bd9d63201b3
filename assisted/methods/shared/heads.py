"""What heads share that read the target's hidden states (`BlockHead`), and those among them that then continue from their own
states (`EagleHead`, `MTPHead`, `SequentialMTP`)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from ...engine.kept import over_all
from ...engine.parts import device_of, find_layers


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """The sizes of a head that reads the target's last states."""

    hidden_size: int  # H, the target's. vocab_size: V.
    vocab_size: int
    # the hidden state that it reads: the output of the final norm, whose index is the number of layers
    taps: tuple[int, ...]
    max_position_embeddings: int = 131_072  # of its layers

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size


class StateHead(nn.Module):
    """A head that reads hidden states of the target."""

    # its taps, perhaps last_normed, vocab_size, hidden_size, target_hidden_size, max_position_embeddings: as in `EagleConfig`
    config: Any
    title: str  # what it is, for messages
    shares_output: bool  # it predicts tokens with the target's output embedding
    # of the prompt, it reads the last token's state alone: some targets compute no other (Gemma 4's layers that share keys)
    reads_end = False
    # [Vd] int64, the offset from a draft token's id to the target's; None if the head's vocabulary is the full one
    d2t: torch.Tensor | None
    fc: nn.Linear  # combines its inputs
    rotary_emb: nn.Module  # the positions of its layers

    def steps_with(self, target: PreTrainedModel) -> Any:
        """Its steps in C with a target's embeddings (`steps.HeadSteps`), or the reason why there are none."""
        return "its layers run as they are"

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def draft_tokens(self) -> torch.Tensor:
        """[Vd] int64, the target's ids of the tokens that the head can draft, ascending."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.device)
        return torch.arange(len(self.d2t), device=self.device) + self.d2t

    @draft_tokens.setter
    def draft_tokens(self, tokens: torch.Tensor) -> None:
        if self.d2t is None or tokens.shape != self.d2t.shape or bool((tokens.diff() <= 0).any()):
            raise ValueError(
                f"draft_tokens: {tuple(tokens.shape)} ids given; a draft vocabulary of {len(self.draft_tokens)} out of "
                f"{self.config.vocab_size} tokens needs as many different ids, ascending"
            )
        self.d2t.copy_(tokens.to(self.d2t.device) - torch.arange(len(tokens), device=self.d2t.device))

    def states_of(self, layers: int) -> list[int]:
        """The indices of its taps in `Needs.states`. layers: of the target."""
        normed = getattr(self.config, "last_normed", True)
        return [tap + (tap == layers and not normed) for tap in self.config.taps]

    def embed(self, ids: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
        """Embeddings [..., H] of the target's ids [...]. A head without its own embedding uses the target's."""
        own: Any = getattr(self, "embed_tokens", None) or target.get_input_embeddings()
        device = device_of(own) if own.weight.is_meta else own.weight.device
        return own(ids.to(device)).to(self.device, self.dtype)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The head's input states, [..., H] in its dtype, from the target's hidden states, [..., F]; here the same."""
        return features.to(self.device, self.dtype)

    def logits(self, states: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Logits [..., Vd] over the draft vocabulary, in the head's dtype, from the states [..., H] that a step returned; here
        by the target's output embedding.

        Raises ValueError without a target.
        """
        if target is None:
            raise ValueError(f"target: None given; an {self.title} predicts tokens with its target's output embedding")
        output = target.get_output_embeddings()
        weight = getattr(output, "weight", states)  # a fused one has no weight
        device = device_of(output) if weight.is_meta else weight.device
        return output(states.to(device, weight.dtype)).to(states.device)

    def over_all(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., Vd] -> [..., V], minus infinity for tokens that the head cannot draft."""
        return logits if self.d2t is None else over_all(logits, self.draft_tokens, self.config.vocab_size)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> StateHead:
        """Move and cast; buffers stay float32: the frequencies of rotary embeddings, and what routers add to their scores."""
        kept = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            place, _, own = name.rpartition(".")
            setattr(self.get_submodule(place), own, buffer.to(self.get_buffer(name).device))
        return self


class Head(StateHead):
    """Column i combines the target's feature of token i with token i + 1, and predicts token i + 2."""

    needs_mask = False  # it needs an attention mask even where all slots are visible

    def resume(self, states: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        """The input states [B, n, W] of text, from those of `fuse`, which may be changed. last: [B, H] in the head's dtype,
        what it has returned for the column before; None if there is none."""
        return states

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """One step for every column. Returns the new states, [B, n, H], which are the next step's `states`.

        embeddings: [B, n, H], of token i + 1. states: [B, n, H], of feature i (`fuse`) or from the last step.
        position_ids: [B or 1, n] int64, of feature i, ascending from 0 by default. attention_mask: [B or 1, 1, n, m] bool,
        true where a column may attend; None is causal, and allowed only without a cache. cache: transformers', with one entry
        per layer. last_only: return only the last column's states, [B, 1, H].
        """
        raise NotImplementedError


def with_row(states: torch.Tensor | None, row: int, state: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """States of all rows, [B, H] or none, as another object in which one row's is replaced, [H]. Where there is none, zeros."""
    if states is not None:
        states = states.clone()
    elif state is not None:
        states = state.new_zeros(rows, *state.shape)
    if states is not None:
        states[row] = 0 if state is None else state
    return states


def rotary_like(
    target: PreTrainedModel, kinds: Iterable[str], parameters: Any = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A rotary embedding as the target's layers share, and what it takes besides positions, by the type of a layer.

    kinds: those types. parameters: its `rope_parameters`, None for the target's. Raises ValueError for a target without one.
    """
    own = getattr(target.get_submodule(".".join(find_layers(target).path[:-1])), "rotary_emb", None)
    if own is None:
        raise ValueError(f"target: {type(target).__name__} has no rotary embedding that its layers share")
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    if parameters is not None:
        config.rope_parameters = copy.deepcopy(parameters)
    several = "layer_type" in inspect.signature(own.forward).parameters
    return built(type(own), config), {kind: {"layer_type": kind} if several else {} for kind in kinds}


def built(kind: Any, *args: Any) -> nn.Module:
    """A module of a target's class. Raises ValueError if these arguments do not make one."""
    try:
        made: nn.Module = kind(*args)
    except Exception as error:
        raise ValueError(f"target: {kind.__name__} cannot be built ({type(error).__name__}: {error})") from error
    return made
