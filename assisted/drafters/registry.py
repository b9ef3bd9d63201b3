"""The registry of methods: makes specs from a caller's `draft=` and from saved pairs.

Knows specs by their interface, and the registered methods by name: those of this package, and your own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..engine.parts import unwrapped
from ..heads.kinds import kind_of
from ..loading.files import loading, local_folder
from ..loading.names import did_you_mean
from .base import Spec
from .draft_model import DraftModel

__all__ = ["METHODS", "parse", "read"]

METHODS: dict[str, type[Any]] = {}
"""Every method by name, which is the prefix of its string form and its name in config.json. `METHODS[name].named(rest)` makes
the spec for `"name:rest"`; a method without a string form has no `named`."""

_DEFAULT = "suffix"


def parse(draft: Any, quantization: Any = None) -> Spec:
    """The spec for a caller's `draft`.

    draft: a Hub id, a folder, "zoo:NAME", "METHOD" or "METHOD:DETAILS", a spec, a causal LM with or without a PEFT adapter,
        or a list of these; "ONE+ANOTHER" is the list of the two. None is "suffix", which needs no second model.
    quantization: of a draft model that is given by path.

    Raises ValueError for unknown names and for a quantization that does not apply, TypeError for other types.
    """
    spec = _parse(_DEFAULT if draft is None else draft, quantization)
    if quantization is not None and not any(isinstance(part, DraftModel) for part in spec.parts()):
        what = f"'{_DEFAULT}', the default draft," if draft is None else repr(draft)
        raise ValueError(f"draft_quantization: {what} does not load a model that could be quantized")
    return spec


def _parse(draft: Any, quantization: Any) -> Spec:
    if isinstance(draft, Spec):
        if quantization is not None:
            raise ValueError(f"draft_quantization: give it in the spec, {type(draft).__name__}(..., quantization=...)")
        return _at_path(draft) if isinstance(draft, DraftModel) else draft
    if isinstance(draft, (list, tuple)):
        return METHODS["combined"](tuple(_parse(part, quantization) for part in draft))
    if isinstance(unwrapped(draft), PreTrainedModel):
        if quantization is not None:
            raise ValueError(
                "draft_quantization: the draft is already loaded; quantize it when loading, or pass its path as draft"
            )
        return DraftModel(draft)
    if isinstance(draft, os.PathLike):  # always a path, even if it has the name of a method
        return _at_path(DraftModel(os.fspath(draft), quantization))
    if not isinstance(draft, str):
        raise TypeError(
            f"draft: {type(draft).__name__} is not a draft spec; give a string, a causal LM or one of "
            + ", ".join(method.__name__ for method in METHODS.values())
        )
    method, _, rest = draft.partition(":")
    has_method = hasattr(METHODS.get(method), "named")
    parts = draft.split("+")
    if len(parts) > 1 and not Path(rest if has_method else draft).exists():  # a Hub id has no "+"
        if not all(parts):
            raise ValueError(f"draft: {draft!r} names nothing before or after a +; write it as suffix+zoo:draft")
        return METHODS["combined"](tuple(_parse(part, quantization) for part in parts))
    if has_method:
        return METHODS[method].named(rest)
    return _at_path(DraftModel(draft, quantization))


def _at_path(spec: DraftModel) -> Spec:
    """The spec for a path, whose files show whether it holds trained heads or a draft model."""
    kind = kind_of(spec.model) if isinstance(spec.model, str) else None
    if kind is None:
        _require_place(spec.model)
        return spec
    if spec.quantization is not None:
        raise ValueError(
            f"draft_quantization: {spec.model} holds trained heads, which cannot be quantized; leave draft_quantization out"
        )
    return METHODS[kind](spec.model)


def _require_place(model: Any) -> None:
    """Reject a single word that is no folder, before the Hub is asked: it is a misspelled method more often than a model."""
    if not isinstance(model, str) or ":" in model or "/" in model or Path(model).exists() or local_folder(model):
        return
    known = [name for name, method in METHODS.items() if hasattr(method, "named")]
    raise ValueError(
        f"draft: {model!r} is neither a method ({', '.join(known)}) nor a folder, and a Hub id has a slash, as in "
        f"Qwen/Qwen3-0.6B{did_you_mean(model, known)}"
    )


def read(fields: dict[str, Any] | None, pair: Path) -> Spec:
    """The spec for what `Spec.written` returned. Draft models and heads are in subfolders of `pair`, the saved pair's folder.

    Raises ValueError for an unknown method, for unknown fields, and for a folder outside `pair`.
    """
    with loading("draft", pair / "config.json"):
        values = dict(fields or {})
        method = METHODS.get(values.pop("method", ""))
        if method is None:
            raise ValueError(f"draft: this version does not know the saved method {fields!r}; pass draft=")
        return method.read(values, pair)
