"""The shipped models: a target that writes Python, and two drafts and two kinds of heads for it. No download needed.

`zoo:NAME` can stand wherever a path is taken. `folder(NAME)` is the folder, which AutoModelForCausalLM loads like any other.
Heads are not models by themselves; pass them as `draft=`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["HEADS", "MODELS", "NAMES", "folder", "resolve"]

MODELS = ("target", "draft", "draft-other-tokenizer")
HEADS = ("eagle3", "medusa")
"""Trained heads for "target"."""
NAMES = (*MODELS, *HEADS)
_MODELS = Path(__file__).parent / "models"


def folder(name: str) -> str:
    """The folder of a shipped model or head. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"zoo:{name} is not shipped; one of {', '.join('zoo:' + known for known in NAMES)}")
    return str(_MODELS / name)


def resolve(path: str) -> str:
    """The folder of `zoo:NAME`; any other path unchanged."""
    scheme, colon, name = path.partition(":")
    return folder(name) if scheme == "zoo" and colon else path
