"""Drafting with a quantized copy of the target (2502.10424, 2503.13565): a similar distribution at a fraction of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..loading.quantization import quantize_copy, require_runs
from .base import Spec, Target
from .model_drafter import ModelDrafter

__all__ = ["QuantizedSelf"]


@dataclass(frozen=True)
class QuantizedSelf(Spec):
    """A quantized copy of the target drafts for it: `"self:nf4"`.

    Worthwhile if memory bandwidth is the bottleneck and the low-bit kernels are fast; rarely on a CPU or for small models.

    Args:
        quantization: one of `assisted.loading.quantization.NAMES`, or a transformers quantization config. Default "nf4".
    """

    name: ClassVar[str] = "self"
    trained: ClassVar[bool | None] = False
    trees: ClassVar[bool | None] = False
    has_q: ClassVar[bool | None] = True

    quantization: Any = "nf4"

    @classmethod
    def named(cls, rest: str) -> QuantizedSelf:
        """The spec for `"self:nf4"`."""
        return cls(rest or "nf4")

    def load(self, target: Target, **kwargs: Any) -> ModelDrafter:
        """Quantize a copy of the target in memory; the target itself is not changed.

        Raises ImportError that names the extra to install if the backend is missing; ValueError for an unknown name, and for a
        target that does not run in this quantization.
        """
        model = quantize_copy(target.model, self.quantization)
        require_runs(model, self.quantization)
        return ModelDrafter(model)
