"""Drafting with a quantized copy of the target (2502.10424, 2503.13565): a similar distribution at a fraction of the bytes. The
copy reads and writes the target's own KV slots, so it needs no cache of its own and never reads the prompt. If the target is
trained between calls, the copy is made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.drafts import Draft
from ..core.host import once
from ..core.text import Text
from ..engine.ranks import ranks_of
from ..engine.runner import CachedModel
from ..engine.traits import Traits
from ..fast.fused import prepare
from ..loading.files import without_bars
from ..loading.quantization import quantize_copy, require_runs, stored_bytes
from .draft_model.recurrent import RecurrentDrafter
from .shared.base import Call, Drafter, Drafting, Room, Spec, Target
from .shared.part import PartDrafting
from .shared.registry import register

_SAMPLE = 32  # numbers of each weight, by which a change of the target is noticed


@register("self")
@dataclass(frozen=True)
class QuantizedSelf(Spec):
    """A quantized copy of the target drafts for it: `"self:int8"`.

    Worthwhile if memory bandwidth is the bottleneck and the low-bit kernels are fast: "int8" or "int4" on a CPU, "int4" on an
    NVIDIA card, whose kernel reads the weights once for up to 16 columns; "nf4" is made for one column. When training has
    changed the target's weights, the next call makes the copy again.

    Args:
        quantization: one of `assisted.loading.quantization.NAMES`, or a transformers quantization config. Default "nf4".
    """

    title = "Quantized copy of the target"
    crosses = True
    has_q = True
    acceptance = (0.85, 0.97)
    quantizes = "target"
    sample = "self:int8"
    not_served = "the copy is made when a pair is loaded, and is no checkpoint"

    quantization: Any = "nf4"

    def memory(self, room: Room) -> dict[str, int]:
        weights = stored_bytes(room.target, str(self.quantization), room.dtype, copy=True)
        return {"quantized copy": weights, "copy of the recurrent states": room.states}

    @classmethod
    def named(cls, rest: str) -> QuantizedSelf:
        """The spec for `"self:nf4"`."""
        return cls(rest or "nf4")

    def load(self, target: Target, **kwargs: Any) -> Drafter:
        """Quantize a copy of the target in memory; the target itself is not changed.

        Raises ImportError that names the extra to install if the backend is missing; ValueError for an unknown name, and for a
        target that does not run in this quantization, or whose weights are divided among processes.
        """
        if ranks_of(target.model).several:
            raise ValueError(
                f"draft: 'self:{self.quantization}' copies the target's weights, and each process has only a part of them "
                "(tensor parallel); use a draft model, or a draft without weights such as 'suffix'"
            )
        model = quantize_copy(target.model, self.quantization)
        require_runs(model, self.quantization)
        traits = Traits.of(model)
        if not traits.is_rewindable and not traits.masks.trees:
            return RecurrentDrafter(model)
        return CopyDrafter(model, target.model, self.quantization)


class CopyDrafter(Drafter):
    """A copy of the target that drafts in the target's slots.

    Args:
        model: the copy, with the same shapes.
        target: what it was made from.
        quantization: how.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, quantization: Any):
        self.model: PreTrainedModel = model
        self.target, self.quantization = target, quantization
        self.sample = _sample(target)

    def start(self, call: Call) -> Drafting:
        if not call.target.lends_slots:
            return RecurrentDrafter(self.model).start(call)
        return CopyDrafting(self, call)

    def current(self, call: Call) -> PreTrainedModel:
        """The copy, made again if the target's weights have changed. A change that is missed costs only speed."""
        sample = _sample(self.target)
        if not torch.equal(sample, self.sample):
            self.sample = sample  # first: if the target can't be copied any more, later calls draft with the old copy
            try:
                # not in this call's inference mode: later calls may run in another one
                with once(call.settings), torch.inference_mode(False), torch.no_grad(), without_bars():
                    self.model = quantize_copy(self.target, self.quantization)
            except (ValueError, ImportError) as error:  # it has an adapter by now, or has moved to another device
                call.settings.note(f"the target has changed, and its copy could not be made again ({error})")
        return self.model


def _sample(model: PreTrainedModel) -> torch.Tensor:
    """The first numbers of every weight, [n] float32 on the host."""
    with torch.inference_mode(False), torch.no_grad():
        held = [weight for weight in model.parameters() if not weight.is_meta]  # others wait on a disk
        found = [weight.reshape(-1)[:_SAMPLE].to(model.device, torch.float32) for weight in held]
        return torch.cat(found).cpu()


class CopyDrafting(PartDrafting):
    """One `generate` with a copy of the target."""

    def __init__(self, drafter: CopyDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.runner: CachedModel | None = None

    def propose(self, text: Text, budget: int) -> Draft:
        if self.runner is None:
            copied, encoded = prepare(self.drafter.current(self.call), self.call.settings), self.call.encoded
            self.runner = self.call.target.part(copied if encoded is None else encoded.around(copied), "copy")
        return self.draft_with(self.runner, text, budget)
