"""The text of the shipped models: Python's standard library to train on; sympy and networkx are held out. Knows where the
files are and which are left out. Knows nothing of tokens or models."""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from pathlib import Path

HELD_OUT_PACKAGES = ("sympy", "networkx")

# Folders of generated tables: a small model learns nothing from thousands of near-identical lines.
_SKIPPED_PARTS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
_MAX_LINE = 400  # characters; longer lines are embedded data
_MAX_TABLE_SHARE = 0.35  # share of digits, backslashes and quotes above which a file is a table


def training_files() -> list[Path]:
    """The `.py` files of this interpreter's standard library, including tests, sorted, without duplicates and tables."""
    return _clean(Path(sysconfig.get_paths()["stdlib"]))


def held_out_files() -> list[Path]:
    """The `.py` files of sympy and networkx. No model was trained on them; this project's figures are measured on them.

    Raises ModuleNotFoundError when neither is installed (they come with torch).
    """
    files: list[Path] = []
    for name in HELD_OUT_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            files += _clean(Path(spec.origin).parent)
    if not files:
        raise ModuleNotFoundError("the held-out text is the source of sympy and networkx: pip install sympy networkx")
    return files


def read(path: Path) -> str:
    """The text of a source file; "" if it is not UTF-8, like a few encoding tests of the standard library."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _clean(root: Path) -> list[Path]:
    seen: set[str] = set()
    kept: list[Path] = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        if _SKIPPED_PARTS & set(path.relative_to(root).parts):
            continue
        text = read(path)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if len(text) < 200 or digest in seen or _is_table(text):
            continue
        seen.add(digest)
        kept.append(path)
    return kept


def _is_table(text: str) -> bool:
    if max(map(len, text.splitlines()), default=0) > _MAX_LINE:
        return True
    tabular = sum(map(text.count, "0123456789\\'\""))
    return tabular > _MAX_TABLE_SHARE * len(text)
