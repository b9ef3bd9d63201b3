"""The methods of drafting, one file each, and how a caller's `draft=` becomes one of them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .base import Call, Drafter, Drafting, Spec, Target
from .draft_model import DraftModel, ModelDrafter
from .quantized_self import QuantizedSelf

__all__ = [
    "METHODS",
    "Call",
    "DraftModel",
    "Drafter",
    "Drafting",
    "ModelDrafter",
    "QuantizedSelf",
    "Spec",
    "Target",
    "parse",
]

METHODS: dict[str, type] = {"draft-model": DraftModel, "quantized-self": QuantizedSelf}

_PLANNED = ("early-exit", "layer-skip", "ngram", "suffix", "recycle", "medusa", "eagle")


def parse(draft: Any, quantization: Any = None) -> Spec:
    """The spec behind what a caller may write as `draft`.

    draft: a Hub id, a folder, "zoo:NAME", "self:QUANTIZATION", a spec, or (from_models) a causal LM.
    quantization: of a draft model that is named by a string.

    Raises ValueError for what is not known, TypeError for what is no spec at all.
    """
    if draft is None:
        raise ValueError(
            "draft: none given. Name a small model of the target's family (a Hub id, a folder, 'zoo:draft'), or "
            "'self:nf4' for a quantized copy of the target."
        )
    if isinstance(draft, (DraftModel, QuantizedSelf)):
        if quantization is not None:
            raise ValueError(
                f"draft_quantization: write it into the spec, {type(draft).__name__}(..., quantization=...)"
            )
        return draft
    if isinstance(draft, PreTrainedModel):
        if quantization is not None:
            raise ValueError(
                "draft_quantization: the draft is already loaded; quantize it when loading, or name it by path"
            )
        return DraftModel(draft)
    if not isinstance(draft, str):
        raise TypeError(
            f"draft: {type(draft).__name__} is no draft spec; give a string, a DraftModel or a QuantizedSelf"
        )
    method, _, rest = draft.partition(":")
    if method == "self":
        if quantization is not None:
            raise ValueError('draft_quantization: "self:NAME" names its quantization already')
        return QuantizedSelf(rest or "nf4")
    if method in _PLANNED:
        raise ValueError(f"draft: {draft!r} is not available in this version; give a draft model or 'self:nf4'")
    return DraftModel(draft, quantization)
