"""What is installed beside this package: entries that other packages add, and the command that adds an extra. And names as
people type them: what a misspelled one may have meant, and the short names of dtypes.

An extra's command depends on how the package was installed: from a package index, from an archive, or from a clone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

NAME = "assisted"
T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """What callers choose by name: this package's own entries, and those of other installed packages.

    The latter are entry points of a group. They are loaded when their name is first looked up, or when all entries are listed.
    One that fails costs its own entry alone, with one warning.

    Args:
        group: of the entry points, such as "assisted.methods".
        require: raises an exception for a name and something that cannot be its entry.
        own: this package's entries.
    """

    def __init__(self, group: str, require: Callable[[str, Any], None], own: Mapping[str, T] | None = None):
        self.group, self.require = group, require
        self._entries = dict(own or {})
        self._tried: set[EntryPoint] = set()
        self._lock = threading.RLock()  # an entry point may register itself while it is loaded

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            self._load(name)
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self.require(name, entry)
        taken = self._entries.get(name, entry)
        if taken is not entry and repr(taken) != repr(entry):  # a class that is defined again replaces itself
            raise ValueError(f"{name!r} is the name of {taken!r}")
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _load(self, name: str | None = None) -> None:
        with self._lock:
            for point in _points(self.group, *_places()):
                if point in self._tried or name not in (None, point.name):
                    continue
                self._tried.add(point)
                before = self._entries.copy()
                try:
                    self[point.name] = point.load()
                except Exception as error:
                    self._entries = before
                    warnings.warn(
                        f"{self.group}: {point.name!r} cannot be used, since its entry point {point.value!r} raised "
                        f"{type(error).__name__}: {error}",
                        stacklevel=3,
                    )


def _places() -> Iterator[tuple[str, int]]:
    """Where packages are installed, and when something was last installed there."""
    for place in sys.path:
        try:
            yield place, os.stat(place or ".").st_mtime_ns
        except OSError:
            yield place, 0


@lru_cache(maxsize=8)
def _points(group: str, *places: tuple[str, int]) -> tuple[EntryPoint, ...]:
    """The entry points of a group: reading the records of some hundred packages takes longer than a tiny model's answer."""
    return tuple(entry_points(group=group))


def install(extra: str) -> str:
    """The command for an extra, which works from any folder."""
    try:
        origin = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # a clone that is imported without being installed
        origin = {"dir_info": {}, "url": Path(__file__).parents[1].as_uri()}
    if not origin:
        return f'pip install "{NAME}[{extra}]"'
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {editable}"{unquote(urlsplit(origin["url"]).path)}[{extra}]"'
    repository = origin.get("vcs_info")
    url = f"{repository['vcs']}+{origin['url']}@{repository['commit_id']}" if repository else origin["url"]
    return f'pip install "{NAME}[{extra}] @ {url}"'


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def reject(wrong: Mapping[str, bool]) -> None:
    """Raise ValueError with the first of these messages whose condition holds."""
    if found := [said for said, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(found[0])


def closest(word: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known word that is spelled most like `word`; None if none is. alike: of 1, how similar it has to be."""
    return next(iter(get_close_matches(word, list(known), 1, alike)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: a suggestion, or nothing."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found!r}?"
