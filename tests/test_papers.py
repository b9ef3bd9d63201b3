"""docs/papers.md: what it names is there, and it holds every paper that the code cites and no other."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_api import resolved

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "papers.md"
NUMBER = re.compile(r"(?<![\d.])\d{4}\.\d{5}(?!\d)")


@dataclass(frozen=True)
class Entry:
    """A row of a table: the paper's number, None where there is no paper, and the names in the column before the last."""

    number: str | None
    names: tuple[str, ...]
    line: str


def entries() -> list[Entry]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[-1] == "page" or set(line) <= set("|-"):
            continue
        link = re.fullmatch(r"\[([\d.]+)\]\(https://arxiv\.org/abs/\1\)", cells[0])
        found.append(Entry(link and link[1], tuple(re.findall(r"`([\w.]+)`", cells[-2])), line))
    return found


def cited() -> dict[str, list[str]]:
    """The papers that the package cites, in docstrings and comments, and where."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "assisted").rglob("*.py")):
        for number in NUMBER.findall(file.read_text(encoding="utf-8")):
            found.setdefault(number, []).append(file.relative_to(ROOT).as_posix())
    return found


def test_rows_are_read() -> None:
    assert len(entries()) > 25
    for entry in entries():
        assert entry.names, entry.line
        assert entry.number is not None or not NUMBER.search(entry.line), entry.line


@pytest.mark.parametrize("name", sorted({name for entry in entries() for name in entry.names}))
def test_what_is_named_is_there(name: str) -> None:
    assert callable(resolved(f"assisted.{name}"))


def test_every_paper_cited_is_in_the_index() -> None:
    missing = {number: files for number, files in cited().items() if number not in {e.number for e in entries()}}
    assert not missing, f"cited and not in {PAGE.name}: {missing}"


def test_every_paper_in_the_index_is_cited() -> None:
    without = [number for entry in entries() if (number := entry.number) is not None and number not in cited()]
    assert not without, f"in {PAGE.name}, cited nowhere in assisted/: {without}"


def test_what_implements_a_paper_cites_it() -> None:
    """In its module, or, for a name of the package, in the module that defines it."""
    for entry in entries():
        if entry.number is None:
            continue
        files = {
            Path(importlib.import_module(resolved(f"assisted.{name}").__module__).__file__ or "")
            for name in entry.names
        }
        texts = [file.read_text(encoding="utf-8") for file in files]
        assert any(entry.number in text for text in texts), f"{entry.names} do not cite {entry.number}"
