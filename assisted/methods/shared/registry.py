"""The registry of methods: makes specs from a caller's `draft=` and from saved pairs. Methods are those of this package, of
other installed packages (entry points of the group `assisted.methods`), and your own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ... import zoo
from ...engine.parts import unwrapped
from ...engine.traits import Traits
from ...extras import Registry, did_you_mean
from ...loading.files import fields_of, loading, local_folder
from .base import Spec

S = TypeVar("S", bound=type[Spec])


def _require(name: str, spec: Any) -> None:
    if not (isinstance(spec, type) and issubclass(spec, Spec)):
        raise TypeError(f"{spec!r} is not a subclass of assisted.methods.Spec")
    if getattr(spec, "name", None) != name:
        raise ValueError(f"{spec.__name__} needs @register({name!r})")


METHODS: Registry[type[Any]] = Registry("assisted.methods", _require)
"""Every method by name, which is the prefix of its string form and its name in config.json. `METHODS[name].named(rest)` makes
the spec for `"name:rest"`; a method without a string form has no `named`."""

_DEFAULT, _MODEL = "suffix", "draft-model"


def register(name: str) -> Callable[[S], S]:
    """Makes a spec known by its name: `@register("eagle")` above the class. Raises ValueError for another method's name."""

    def add(spec: S) -> S:
        spec.name = name
        METHODS[name] = spec
        return spec

    return add


def parse(draft: Any, quantization: Any = None, window: int | None = None) -> Spec:
    """The spec for a caller's `draft`.

    draft: a Hub id, a folder, "zoo:NAME", "METHOD" or "METHOD:DETAILS", a spec, a causal LM with or without a PEFT adapter,
        an object that a method takes (`Spec.takes`), or a list of these; "ONE+ANOTHER" is the list of the two. None is
        "suffix", which needs no second model.
    quantization: of a draft model that is given by path.
    window: the `draft_window` of all drafts that have one.

    Raises ValueError for unknown names, and for a quantization or a window that does not apply, TypeError for other types.
    """
    spec = _parse(_DEFAULT if draft is None else draft, quantization)
    if quantization is not None and not any(part.quantizes == "model" for part in spec.parts()):
        what = f"'{_DEFAULT}', the default draft," if draft is None else repr(draft)
        raise ValueError(f"draft_quantization: {what} does not load a model that could be quantized")
    return spec if window is None else _windowed(spec, window)


def _windowed(spec: Any, window: int) -> Spec:
    """The spec with this `draft_window`, in all its parts that have one. Raises ValueError if none has."""
    if not _has_window(spec):
        raise ValueError(
            f"draft_window: {window} is not possible, as {type(spec).__name__} keeps no keys and values of its own that could "
            "be dropped; leave it out"
        )
    parts = spec.parts()
    if parts[0] is spec:
        return replace(spec, draft_window=window)
    return replace(spec, drafters=tuple(_windowed(part, window) if _has_window(part) else part for part in parts))


def windows(drafts: Sequence[Any], window: int | None) -> list[int | None]:
    """The `draft_window` of each of several drafts: None for those that have none. Raises ValueError if no draft has one."""
    if window is None or len(drafts) == 1:
        return [window] * len(drafts)
    found = [window if _may_have_window(draft) else None for draft in drafts]
    if not any(found):
        raise ValueError(
            f"draft_window: {window} is not possible, as no draft keeps keys and values of its own; leave it out"
        )
    return found


def _may_have_window(draft: Any) -> bool:
    try:
        return _has_window(parse(draft))
    except (ValueError, TypeError, OSError):  # loading will tell what is wrong with it
        return True


def _has_window(spec: Spec) -> bool:
    parts = spec.parts()
    return hasattr(spec, "draft_window") if parts[0] is spec else any(map(_has_window, parts))


def heads_at(kind: str, spec: Any) -> Spec:
    """The spec of a method whose heads are at the path of a draft model's spec."""
    made: Spec = METHODS[kind](spec.model)
    return made if spec.draft_window is None else _windowed(made, spec.draft_window)


def _parse(draft: Any, quantization: Any) -> Spec:
    if isinstance(draft, Spec):
        if quantization is not None:
            raise ValueError(f"draft_quantization: give it in the spec, {type(draft).__name__}(..., quantization=...)")
        return _at_path(draft) if draft.quantizes == "model" else draft
    if isinstance(draft, (list, tuple)):
        return METHODS["combined"](tuple(_parse(part, quantization) for part in draft))
    if not isinstance(draft, (str, os.PathLike)):  # for which other packages need not be asked
        for kind in METHODS.values():
            if kind.takes(draft):
                return kind(draft)  # type: ignore[no-any-return]
    if isinstance(unwrapped(draft), PreTrainedModel):
        if quantization is not None:
            raise ValueError(
                "draft_quantization: the draft is already loaded; quantize it when loading, or pass its path as draft"
            )
        return METHODS[_MODEL](draft)
    if isinstance(draft, os.PathLike):  # always a path, even if it has the name of a method
        return _at_path(METHODS[_MODEL](os.fspath(draft), quantization))
    if not isinstance(draft, str):
        raise TypeError(
            f"draft: {type(draft).__name__} is not a draft spec; give a string, a causal LM or one of "
            + ", ".join(method.__name__ for method in METHODS.values())
        )
    method, _, rest = draft.partition(":")
    has_method = hasattr(METHODS.get(method), "named")
    parts = split(draft)
    if len(parts) > 1:
        if not all(parts):
            raise ValueError(f"draft: {draft!r} names nothing before or after a +; write it as suffix+zoo:draft")
        return METHODS["combined"](tuple(_parse(part, quantization) for part in parts))
    if has_method:
        return METHODS[method].named(rest)
    return _at_path(METHODS[_MODEL](draft, quantization))


def split(drafts: str) -> list[str]:
    """The drafts that a string such as suffix+zoo:draft names. A Hub id has no "+", but the path of a folder may have some."""
    parts, found = drafts.split("+"), []
    while parts:
        names = ("+".join(parts[:count]) for count in range(len(parts), 1, -1))
        found.append(next((name for name in names if _is_path(name)), parts[0]))
        del parts[: found[-1].count("+") + 1]
    return found


def _is_path(draft: str) -> bool:
    """Whether a draft is at an existing path, alone or after the name of its method."""
    method, _, path = draft.partition(":")
    return os.path.exists(draft) or (hasattr(METHODS.get(method), "named") and os.path.exists(path))


def _at_path(spec: Any) -> Spec:
    """The spec for a path, whose files show whether it holds trained heads or a draft model."""
    kind = kind_of(spec.model) if isinstance(spec.model, str) else None
    if kind is None:
        _require_place(spec.model)
        return spec
    if spec.quantization is not None:
        raise ValueError(
            f"draft_quantization: {spec.model} holds trained heads, which cannot be quantized; leave draft_quantization out"
        )
    return heads_at(kind, spec)


def _require_place(model: Any) -> None:
    """Reject a single word that is no folder, before the Hub is asked: it is a misspelled method more often than a model."""
    if not isinstance(model, str) or ":" in model or "/" in model or Path(model).exists() or local_folder(model):
        return
    known = [name for name, method in METHODS.items() if hasattr(method, "named")]
    raise ValueError(
        f"draft: {model!r} is neither a method ({', '.join(known)}) nor a folder, and a Hub id has a slash, as in "
        f"Qwen/Qwen3-0.6B{did_you_mean(model, known)}"
    )


def kind_of(path: str | Path) -> str | None:
    """The method of the heads at a path; None for anything else, or if nothing is found.

    path: a folder, a `zoo:` name, or a Hub id, of which only the local copy is read. Raises ValueError for an unknown kind of
    speculator.
    """
    folder = local_folder(zoo.resolve(str(path)))
    if folder is None:
        return None
    try:
        fields = fields_of(folder / "config.json")
    except (OSError, ValueError):
        return None
    found = next((name for name, method in METHODS.items() if method.reads(fields, folder)), None)
    classes = fields.get("architectures")
    classes = classes if isinstance(classes, list) else []
    named = [name for name in (*classes, fields.get("model_type")) if "speculator" in str(name).lower()]
    kind = fields.get("speculators_model_type", next(iter(named), None))
    if found is None and kind is not None:
        raise ValueError(f"draft: {folder} is a speculator of kind {kind!r}, which no installed method reads")
    return found


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


def require_fitting(spec: Spec, target: PreTrainedModel) -> None:
    """Raise ValueError for a method that can't draft for an encoder-decoder, if the target is one."""
    if not Traits.of(target).crosses:
        return
    for part in spec.parts():
        if part is not spec:
            require_fitting(part, target)
        elif not part.crosses:
            raise ValueError(
                f"draft: {type(part).__name__} reads or runs parts of a causal LM, and {type(target).__name__} is an "
                'encoder-decoder; use "suffix", "ngram", "self:int8" or a smaller model with the same tokenizer'
            )
