"""Measured costs from one process to the next, in a small file, so that a first short answer starts from known costs.

Knows `Costs` and a file. Costs decide how much is drafted, never which text is generated.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .costs import Costs

__all__ = ["VARIABLE", "recall", "remember"]

VARIABLE = "ASSISTED_COSTS"
"""The environment variable with the path of the file; set to nothing, costs are neither read nor written."""
_MOST = 256  # entries; older ones are dropped
_CHANGED = 0.1  # relative change from which an entry is written again
_LOCK = threading.Lock()
_WRITTEN: dict[str, Costs] = {}  # by this process, which spares reading the file after every call


def recall(key: str) -> Costs | None:
    """The costs that were remembered last; None if there are none, or if the file cannot be read."""
    entry = _read().get(key)
    try:
        return Costs(**entry) if isinstance(entry, dict) else None
    except (TypeError, ValueError):  # written by another version, or by hand
        return None


def remember(key: str, costs: Costs) -> None:
    """Keep costs for later processes, unless the file has nearly the same. A file that cannot be written is left alone.

    key: of everything that the costs depend on.
    """
    file = _file()
    if file is None:
        return
    with _LOCK:
        if key in _WRITTEN and _near(_WRITTEN[key], costs):
            return
        _WRITTEN[key] = costs
        known = _read()
        if key in known and _near(recall(key), costs):
            return
        known.pop(key, None)
        kept = dict([*known.items(), (key, asdict(costs))][-_MOST:])
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(kept) + "\n", encoding="utf-8")
            partial.replace(file)  # another process reads the old file or the new one, never a part
        except OSError:
            return


def _file() -> Path | None:
    """The file, None if nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    folder = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(folder).expanduser() / "assisted" / "costs.json"
    except RuntimeError:  # a user without a home
        return None


def _read() -> dict[str, Any]:
    file = _file()
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _near(before: Costs | None, now: Costs) -> bool:
    if before is None:
        return False
    pairs = [(before.draft, now.draft), *((before.verify_seconds(n), now.verify_seconds(n)) for n in (1, 4, 8))]
    return all(abs(new - old) <= _CHANGED * max(new, old) for old, new in pairs)
