"""Measured costs from one process to the next, in a file that the user names, so that a first short answer knows them. Greedy
text does not depend on them; sampled text keeps its distribution, but is drawn with other random numbers.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cost_model import Costs

VARIABLE = "ASSISTED_COSTS"
"""The environment variable with the path of the file. Without it, costs are neither read nor written."""
_MOST = 256  # entries; older ones are dropped
_LARGEST = 2**24  # characters that are read; a file of so many entries has fewer
_WIDEST = 2**16  # positions of a forward pass
_CHANGED = 0.1  # relative change from which an entry is written again
_LOCK = threading.Lock()
_WRITTEN: dict[str, Costs] = {}  # by this process, which spares reading the file after every call
_WARNED: set[str] = set()  # files, each of which is named once


def recall(key: str) -> Costs | None:
    """The costs that were remembered last; None if there are none, or if the file cannot be read."""
    return _read().get(key)


def remember(key: str, costs: Costs) -> None:
    """Keep costs for later processes, unless the file has nearly the same. A file that cannot be written is left alone, and one
    warning says so.

    key: of everything that the costs depend on.
    """
    file = _file()
    if file is None:
        if os.environ.get(VARIABLE):
            _warn("its path cannot be resolved")
        return
    with _LOCK:
        if key in _WRITTEN and _near(_WRITTEN[key], costs):
            return
        _WRITTEN[key] = costs
        known = _read()
        if _near(known.pop(key, None), costs):
            return
        kept = [*known.items(), (key, costs)][-_MOST:]
        text = json.dumps({key: asdict(costs) for key, costs in kept}) + "\n"
        try:
            if os.path.lexists(file) and not file.is_file():
                _warn("it is not a regular file")
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"{file.name}.", dir=file.parent) as folder:
                partial = Path(folder, file.name)
                partial.write_text(text, encoding="utf-8")
                partial.replace(file)  # another process reads the old file or the new one, never a part
        except OSError as error:
            _warn(f"{type(error).__name__}: {error.strerror or error}")


def _warn(reason: str) -> None:
    """Once for a file, since later calls fail for the same reason."""
    named = os.environ[VARIABLE]
    if named not in _WARNED:
        _WARNED.add(named)
        warnings.warn(f"{VARIABLE}: costs are not kept in {named!r}: {reason}", stacklevel=3)


def _file() -> Path | None:
    """The file itself, not a link to it; None if nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    try:
        return Path(os.path.realpath(Path(named).expanduser())) if named else None
    except (OSError, RuntimeError):  # a user without a home
        return None


def _read() -> dict[str, Costs]:
    """What the file holds. It may have been written by another version, by hand, or by nobody's good will."""
    file, found = _file(), None
    try:
        if file is not None and file.is_file():  # a pipe would be waited for
            with file.open(encoding="utf-8") as opened:
                found = json.loads(opened.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {key: costs for key, entry in entries if (costs := _costs(entry)) is not None}


def _costs(entry: Any) -> Costs | None:
    """An entry of the file; None for numbers that nobody can have measured, which no arithmetic need bear."""
    try:
        costs = Costs(**entry)
        positions, seconds = zip(*costs.verify, strict=True)
        possible = max(positions) <= _WIDEST and all(1e-9 < s < 1e6 for s in seconds) and costs.draft < 1e6
        return costs if possible else None
    except (TypeError, ValueError, OverflowError):
        return None


def _near(before: Costs | None, now: Costs) -> bool:
    if before is None:
        return False
    pairs = [(before.draft, now.draft), *((before.verify_seconds(n), now.verify_seconds(n)) for n in (1, 4, 8))]
    return all(abs(new - old) <= _CHANGED * max(new, old) for old, new in pairs)
