"""The settings of a call, and a module as the call runs it. Whoever makes or runs a forward pass is given these two.

Independent of slots, masks and drafting.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..core.drafts import DraftingStopped
from .libraries import CACHE, let_compiler_patch, rotary_angles
from .needs import Needs
from .parts import Inject, Tap, tapped, unwrapped
from .ranks import ALONE, Ranks
from .trust import Code, Trust, trust


@dataclass
class CallSettings:
    """How one `generate` runs its forward passes, and whether it has returned."""

    mode: str = "eager"  # one of `fast.graphs.MODES`
    bits: bool = False  # a column's bits must not depend on what else a forward pass computes
    refills: bool = False  # a row gets another text when its own has ended, so that rows can't advance in lockstep
    over: bool = False  # the call has returned, so the next one may use the captured forward passes
    outlives: bool = False  # a session keeps the slots of the target and of the drafter after the call
    spent_once: float = 0.0  # seconds that the call has spent so far on one-time work, mainly captures
    ranks: Ranks = ALONE  # the processes that must decide alike, because each holds a part of the weights
    # what has failed in this call and only cost speed, for `report.warnings`
    warnings: list[str] = field(default_factory=list)
    source: Any = None  # the target as `fast.sources.Source` has read it for a pool, once for all texts of the call
    read: Any = None  # the target's `fast.sources.Weights`, if the call has just read them, until they are used
    _trusted: dict[int, Trust] = field(default_factory=dict)
    _checked: set[Code] = field(default_factory=set)

    @property
    def fuses(self) -> bool:
        """Whether models may run with fused operations or from copies of their weights."""
        return self.mode != "eager"

    def trust_in(self, model: nn.Module) -> Trust:
        """Whose code a model runs in this call; examined once."""
        # asked of an adapter's wrapper first, whose code counts, too; both outlive the call
        inner = id(unwrapped(model))
        if inner not in self._trusted:
            if self.mode == "compile":
                let_compiler_patch()
            self._trusted[inner] = trust(model, self._checked)
        return self._trusted[inner]

    def note(self, reason: str) -> None:
        """Record in the report that something failed which only costs speed."""
        if reason not in self.warnings:
            self.warnings.append(reason)

    def warn(self, reason: str) -> None:
        """Record it, and warn the caller, because it costs the drafts."""
        self.note(reason)
        warnings.warn(reason, DraftingStopped, stacklevel=3)

    @property
    def of_heads(self) -> CallSettings:
        """The settings for heads that call modules of the target: eager if each process holds a part of these."""
        return replace(self, mode="eager") if self.ranks.several else self


def one_by_one(layers: Iterable[nn.Module], hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
    """The output of layers, [B, n, D]. given: their further arguments."""
    for layer in layers:
        hidden_states = layer(hidden_states, use_cache=True, **given)
    return hidden_states


def through_all(
    prepared: PreparedModule, hidden: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any
) -> torch.Tensor:
    """The logits of columns, [R, n, V], through layers, norm and head. hidden: [R, n, D]. positions: [R or 1, n]. mask: as
    layers take it, or by the kinds of layers. cache: slots, with the columns placed."""
    base = prepared.module.base_model
    angles = rotary_angles(base.rotary_emb, hidden, positions)
    given = {"position_ids": positions, "position_embeddings": angles, CACHE: cache}
    made = prepared.run_layers(base.layers, hidden, attention_mask=mask, **given)
    return prepared.finished(prepared.module.lm_head(base.norm(made)))


@dataclass(frozen=True)
class PreparedModule:
    """A module as it is run: unchanged, or in the form that `fast.fused` builds."""

    module: Any  # a causal LM, or a head
    # call the embedding, layers, norm and head in turn, because the model's forward adds the cost of a small layer.
    # Only for models with no other parts: fused ones, and drafts that pass `is_sum_of_parts`, where an error costs only
    # speed.
    through_parts: bool = False
    last_only: bool = False  # its layers can skip prompt positions whose output is not used
    # the parameters that the module has copied. `fast.fused` checks them for changes in every call.
    copied: Sequence[torch.Tensor] = ()
    # bytes of its low-bit weights. Products with these round to bfloat16, whatever the module's dtype is.
    low_bit_bytes: int = 0
    warning: str | None = None  # why a faster form was built but is not used; None if nothing failed
    # it runs transformers' own code. Anything else runs whole, because its parts may not add up to it.
    is_own: bool = True
    kind: Hashable = "whole"  # distinguishes the modules of a call that run over the same slots
    # modules in it whose output is needed in addition to the forward's, by index of the hidden state
    taps: Mapping[int, Tap] = field(default_factory=dict)
    inject: Inject | None = None  # for parts and heads, the module that holds their input states
    runs: str = "eager"  # how, for `report.passes`
    # runs all layers, given their list, hidden states and a layer's further arguments
    run_layers: Callable[..., torch.Tensor] = one_by_one
    keeps_bits: bool = False  # a column has the same bits whatever else a forward pass computes
    # runs what follows the embedding if it runs `through_parts`, with the arguments of `through_all`
    run_columns: Callable[..., torch.Tensor] = through_all
    # what its forward does to embeddings before the layers, and to the head's logits, given the module; None for nothing
    enter: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    finish: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    # moves columns to earlier slots, given keys and values of all layers and [3, any] int64, the row, target and source
    # of each; returns False if it can't. None: operations of torch move them.
    move: Callable[[Sequence[torch.Tensor], torch.Tensor], bool] | None = None

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """What its first layer reads of tokens, [R, n] -> [R, n, D]. For modules that run `through_parts`, like `finished`."""
        hidden: torch.Tensor = self.module.base_model.embed_tokens(ids)
        return hidden if self.enter is None else self.enter(self.module, hidden)

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that its forward makes of its head's."""
        return logits if self.finish is None else self.finish(self.module, logits)

    def tapped(self, needs: Needs) -> PreparedModule:
        """The same module as another object that also keeps the needed hidden states of its last forward pass."""
        if not needs.states:
            return self
        module, taps = tapped(self.module, needs.layers, sorted(needs.states), needs.final_norm)
        last_only = self.last_only and max(taps) < len(needs.layers)
        return replace(self, module=module, last_only=last_only, kind=(self.kind, *taps), taps=taps)
