"""Drafts inside a model's own `generate(custom_generate=FOLDER_OR_ID)`: the entry for code that holds a model, not a pair.
`save_pretrained(custom_generate=True)` writes a `custom_generate/generate.py`; transformers runs it, and it calls this
file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ... import lengths
from ... import methods as drafters
from ...core.report import Report
from ...modeling import AssistedModelForCausalLM

_KEPT = "_assisted_pair"


def drafting_with(
    draft: dict[str, Any], draft_length: dict[str, Any] | None = None, has_files: bool = False
) -> Callable[..., Any]:
    """The function that transformers calls as a repository's `generate`: that of `AssistedModelForCausalLM`, with an argument
    `draft`, which replaces the repository's. It raises ValueError if model and draft do not fit together.

    draft, draft_length: as in a saved pair's config.json. has_files: the repository's folder `draft` holds a model or a head.
    """

    def generate(
        inputs: Any = None, generation_config: Any = None, *, model: Any, draft: Any = None, **kwargs: Any
    ) -> Any:
        kept = vars(model).setdefault(_KEPT, _Kept())
        if isinstance(model, AssistedModelForCausalLM) or getattr(kept.inside, "yes", False):
            return type(model).generate(model, inputs, generation_config, **kwargs)
        place = sys._getframe(1).f_locals.get("custom_generate")  # of transformers' generate, which doesn't pass it on
        if kept.pair is None or kept.of != (place, draft):
            spec = draft if draft is not None else drafters.read(fields, _folder(place if has_files else None))
            policy = None if draft_length is None else lengths.from_dict(draft_length)
            kept.pair = AssistedModelForCausalLM.from_models(model, spec, policy, kwargs.get("tokenizer"))
            kept.of = place, draft
        kept.inside.yes = True
        try:
            return kept.pair.generate(inputs, generation_config, **kwargs)
        finally:
            kept.inside.yes = False

    fields = draft
    return generate


def report_of(model: Any) -> Report | None:
    """What the last `generate` of a model with `custom_generate=` did; None before the first."""
    kept = vars(model).get(_KEPT)
    return None if kept is None or kept.pair is None else kept.pair.report


class _Kept:
    """The pair of a model, which lives as long as the model. Copies of the model make their own."""

    def __init__(self) -> None:
        self.pair: AssistedModelForCausalLM | None = None
        self.of: Any = None  # from which repository and draft it was made
        self.inside = threading.local()  # `yes` in a thread that is in the pair's `generate`, which calls the model's

    def __reduce__(self) -> Any:  # of copies and pickles
        return _Kept, ()


def _folder(place: Any) -> Path:
    """The folder of a repository; any if `place` is None."""
    if place is None:
        return Path()
    return Path(place) if Path(place).is_dir() else Path(snapshot_download(place, allow_patterns=["draft/*", "*.json"]))
