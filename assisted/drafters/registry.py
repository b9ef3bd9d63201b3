"""How a caller's `draft=` becomes a spec, and how a saved pair's does.

Knows specs by their interface, and the methods that were registered by name: every one of this package, and yours.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..engine.parts import unwrapped
from ..heads.kinds import kind_of
from ..loading.files import loading
from .base import Spec
from .draft_model import DraftModel

__all__ = ["METHODS", "parse", "read"]

METHODS: dict[str, type[Any]] = {}
"""Every method by the name that a string begins with and config.json holds. `METHODS[name].named(rest)` is the spec behind
`"name:rest"`; a name that takes no string has no `named`."""

_DEFAULT = "suffix"


def parse(draft: Any, quantization: Any = None) -> Spec:
    """The spec behind what a caller may write as `draft`.

    draft: a Hub id, a folder, "zoo:NAME", "METHOD" or "METHOD:DETAILS", a spec, or a causal LM, with a PEFT adapter around it
        or without. None is "suffix", which needs no second model.
    quantization: of a draft model that is named by a string.

    Raises ValueError for what is not known, TypeError for what is no spec at all.
    """
    spec = _parse(_DEFAULT if draft is None else draft, quantization)
    if quantization is not None and not any(isinstance(part, DraftModel) for part in spec.parts()):
        what = f"'{_DEFAULT}', the default draft," if draft is None else repr(draft)
        raise ValueError(f"draft_quantization: {what} loads no model of its own that could be quantized")
    return spec


def _parse(draft: Any, quantization: Any) -> Spec:
    if isinstance(draft, Spec):
        if quantization is not None:
            raise ValueError(
                f"draft_quantization: write it into the spec, {type(draft).__name__}(..., quantization=...)"
            )
        return _at_path(draft) if isinstance(draft, DraftModel) else draft
    if isinstance(draft, (list, tuple)):
        return METHODS["combined"](tuple(_parse(part, quantization) for part in draft))
    if isinstance(unwrapped(draft), PreTrainedModel):
        if quantization is not None:
            raise ValueError(
                "draft_quantization: the draft is already loaded; quantize it when loading, or name it by path"
            )
        return DraftModel(draft)
    if isinstance(draft, os.PathLike):  # always a folder, whatever its name
        return _at_path(DraftModel(os.fspath(draft), quantization))
    if not isinstance(draft, str):
        raise TypeError(
            f"draft: {type(draft).__name__} is no draft spec; give a string, a causal LM or one of "
            + ", ".join(method.__name__ for method in METHODS.values())
        )
    method, _, rest = draft.partition(":")
    if hasattr(METHODS.get(method), "named"):
        return METHODS[method].named(rest)
    return _at_path(DraftModel(draft, quantization))


def _at_path(spec: DraftModel) -> Spec:
    """The spec of what lies at a path: its files tell trained heads from a draft model."""
    kind = kind_of(spec.model) if isinstance(spec.model, str) else None
    if kind is None:
        return spec
    if spec.quantization is not None:
        raise ValueError(f"draft_quantization: {spec.model} holds trained heads, which are not quantized; leave it out")
    return METHODS[kind](spec.model)


def read(fields: dict[str, Any] | None, pair: Path) -> Spec:
    """The spec that `Spec.written` wrote; draft models and heads lie in folders of `pair`, the saved pair's.

    Raises ValueError for an unknown method, for fields that it cannot have, and for a folder that leads out of `pair`.
    """
    with loading("draft", pair / "config.json"):
        values = dict(fields or {})
        method = METHODS.get(values.pop("method", ""))
        if method is None:
            raise ValueError(f"draft: this version does not know the saved method {fields!r}; pass draft=")
        return method.read(values, pair)
