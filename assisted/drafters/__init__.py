"""The methods of drafting, one file each, and how a caller's `draft=` becomes one of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from transformers import PreTrainedModel

from ..files import inside, loading
from ..heads.kinds import kind_of
from ..parts import unwrapped
from .base import Call, Drafter, Drafting, Spec, Target
from .combined import Combined
from .draft_model import DraftModel, ModelDrafter
from .eagle import Eagle
from .early_exit import EarlyExit
from .layer_skip import LayerSkip
from .medusa import Medusa
from .merged import Merged
from .ngram import NGram
from .quantized_self import QuantizedSelf
from .recycle import TokenRecycling
from .suffix import Suffix

__all__ = [
    "METHODS",
    "Call",
    "Combined",
    "DraftModel",
    "Drafter",
    "Drafting",
    "Eagle",
    "EarlyExit",
    "LayerSkip",
    "Medusa",
    "Merged",
    "ModelDrafter",
    "NGram",
    "QuantizedSelf",
    "Spec",
    "Suffix",
    "Target",
    "TokenRecycling",
    "parse",
    "read",
    "with_heads",
    "with_models",
    "written",
]

METHODS: dict[str, type[Any]] = {
    "draft-model": DraftModel,
    "self": QuantizedSelf,
    "early-exit": EarlyExit,
    "layer-skip": LayerSkip,
    "ngram": NGram,
    "suffix": Suffix,
    "recycle": TokenRecycling,
    "medusa": Medusa,
    "eagle": Eagle,
    "combined": Combined,
    "merged": Merged,
}
"""Every method by the name that a string begins with and config.json holds. `METHODS[name].named(rest)` is the spec behind
`"name:rest"`; a name that takes no string has no `named`."""

_HEADS: tuple[type[Any], ...] = (Eagle, Medusa)
"""Specs of trained heads: their `path` is a folder, and `Drafter.save` writes one."""


def parse(draft: Any, quantization: Any = None) -> Spec:
    """The spec behind what a caller may write as `draft`.

    draft: a Hub id, a folder, "zoo:NAME", "METHOD" or "METHOD:DETAILS", a spec, or a causal LM, with a PEFT adapter around it
        or without. None is "suffix", which needs no second model.
    quantization: of a draft model that is named by a string.

    Raises ValueError for what is not known, TypeError for what is no spec at all.
    """
    spec = Suffix() if draft is None else _parse(draft, quantization)
    loaded = spec.drafters if isinstance(spec, Combined) else (spec,)
    if quantization is not None and not any(isinstance(part, DraftModel) for part in loaded):
        what = "'suffix', the default draft," if draft is None else repr(draft)
        raise ValueError(f"draft_quantization: {what} loads no model of its own that could be quantized")
    return spec


def _parse(draft: Any, quantization: Any) -> Spec:
    if _is_spec(draft):
        if quantization is not None:
            raise ValueError(
                f"draft_quantization: write it into the spec, {type(draft).__name__}(..., quantization=...)"
            )
        return _at_path(draft) if isinstance(draft, DraftModel) else draft
    if isinstance(draft, (list, tuple)):
        return Combined(tuple(_parse(part, quantization) for part in draft))
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


def _is_spec(draft: Any) -> TypeGuard[Spec]:
    return isinstance(draft, tuple(METHODS.values()))


def written(spec: Spec, folder: str = "draft") -> dict[str, Any]:
    """A spec as config.json holds it. A draft model is no part of it: it is saved beside it, in `folder`."""
    name = next(name for name, kind in METHODS.items() if isinstance(spec, kind))
    if isinstance(spec, DraftModel):
        fields: dict[str, Any] = {"folder": folder, "quantization": spec.quantization}
    elif isinstance(spec, (Combined, Merged)):
        parts = [written(parse(part), f"{folder}-{place}") for place, part in enumerate(spec.drafters)]
        return {"method": name, "drafters": parts}
    else:
        saved = [field.name for field in dataclasses.fields(spec) if field.metadata.get("saved", True)]  # type: ignore[arg-type]
        fields = {name: getattr(spec, name) for name in saved}
        if isinstance(spec, _HEADS):
            fields["path"] = folder
    plain = {key: value.to_dict() if hasattr(value, "to_dict") else value for key, value in fields.items()}
    return {"method": name, **plain}


def with_models(spec: Spec, drafter: Drafter, folder: str = "draft") -> Iterator[tuple[str, DraftModel, ModelDrafter]]:
    """Every draft model of a spec, with the folder that `written` names for it and what was loaded."""
    if isinstance(spec, DraftModel) and isinstance(drafter, ModelDrafter):
        yield folder, spec, drafter
    elif isinstance(spec, (Combined, Merged)):
        for place, (part, member) in enumerate(zip(spec.drafters, drafter.members, strict=True)):  # type: ignore[attr-defined]
            yield from with_models(parse(part), member, f"{folder}-{place}")


def with_heads(spec: Spec, drafter: Drafter, folder: str = "draft") -> Iterator[tuple[str, Drafter]]:
    """Every drafter of a spec that has trained heads, with the folder that `written` names for them."""
    if isinstance(spec, _HEADS):
        yield folder, drafter
    elif isinstance(spec, (Combined, Merged)):
        for place, (part, member) in enumerate(zip(spec.drafters, drafter.members, strict=True)):  # type: ignore[attr-defined]
            yield from with_heads(parse(part), member, f"{folder}-{place}")


def read(fields: dict[str, Any] | None, folder: Path) -> Spec:
    """The spec that `written` wrote; draft models and heads lie in folders of `folder`.

    Raises ValueError for an unknown method, for fields that it cannot have, and for a folder that leads out of `folder`.
    """
    with loading("draft", folder / "config.json"):
        return _read(fields, folder)


def _read(fields: dict[str, Any] | None, folder: Path) -> Spec:
    values = dict(fields or {})
    method = METHODS.get(values.pop("method", ""))
    if method is None:
        raise ValueError(f"draft: this version does not know the saved method {fields!r}; pass draft=")
    if method is DraftModel:
        named = inside(folder, values.get("folder", "draft"), "draft.folder")
        return DraftModel(str(named), values.get("quantization"))
    if method in (Combined, Merged):
        return method(tuple(_read(part, folder) for part in values["drafters"]))
    if method in _HEADS:
        values["path"] = str(inside(folder, values["path"], "draft.path"))
    unknown = values.keys() - {field.name for field in dataclasses.fields(method)}
    if unknown:
        raise ValueError(f"draft: {folder / 'config.json'}: {min(unknown)} is no field of {method.__name__}")
    return method(**values)
