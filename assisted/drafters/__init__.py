"""The methods of drafting, one file each, and how a caller's `draft=` becomes one of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeGuard

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
    "read",
    "written",
]

METHODS: dict[str, type[Any]] = {"draft-model": DraftModel, "self": QuantizedSelf}
"""Every method by the name that a string begins with and config.json holds. `METHODS[name].named(rest)` is the spec behind
`"name:rest"`; a name that takes no string has no `named`."""

_PLANNED = ("early-exit", "layer-skip", "ngram", "suffix", "recycle", "medusa", "eagle")


def parse(draft: Any, quantization: Any = None) -> Spec:
    """The spec behind what a caller may write as `draft`.

    draft: a Hub id, a folder, "zoo:NAME", "METHOD" or "METHOD:DETAILS", a spec, or (from_models) a causal LM.
    quantization: of a draft model that is named by a string.

    Raises ValueError for what is not known, TypeError for what is no spec at all.
    """
    if draft is None:
        raise ValueError(
            "draft: none given. Name a small model of the target's family (a Hub id, a folder, 'zoo:draft'), or "
            "'self:nf4' for a quantized copy of the target."
        )
    spec = _parse(draft, quantization)
    if quantization is not None and not isinstance(spec, DraftModel):
        raise ValueError(f"draft_quantization: {draft!r} loads no model of its own that could be quantized")
    return spec


def _parse(draft: Any, quantization: Any) -> Spec:
    if _is_spec(draft):
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
            f"draft: {type(draft).__name__} is no draft spec; give a string, a causal LM or one of "
            + ", ".join(method.__name__ for method in METHODS.values())
        )
    method, _, rest = draft.partition(":")
    if method in _PLANNED:
        raise ValueError(f"draft: {draft!r} is not available in this version; give a draft model or 'self:nf4'")
    if hasattr(METHODS.get(method), "named"):
        return METHODS[method].named(rest)
    return DraftModel(draft, quantization)


def _is_spec(draft: Any) -> TypeGuard[Spec]:
    return isinstance(draft, tuple(METHODS.values()))


def written(spec: Spec) -> dict[str, Any]:
    """A spec as config.json holds it. Models are no part of it: they are saved beside it."""
    name = next(name for name, kind in METHODS.items() if isinstance(spec, kind))
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}  # type: ignore[arg-type]
    if isinstance(spec, DraftModel):
        fields = {"quantization": spec.quantization}
    plain = {key: value.to_dict() if hasattr(value, "to_dict") else value for key, value in fields.items()}
    return {"method": name, **plain}


def read(fields: dict[str, Any] | None, folder: Path) -> Spec:
    """The spec that `written` wrote; a draft model lies in `folder/draft`. Raises ValueError for an unknown method."""
    values = dict(fields or {})
    method = METHODS.get(values.pop("method", ""))
    if method is None:
        raise ValueError(f"draft: this version does not know the saved method {fields!r}; pass draft=")
    if method is DraftModel:
        return DraftModel(str(folder / "draft"), values.get("quantization"))
    return method(**values)
