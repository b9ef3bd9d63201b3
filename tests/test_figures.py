"""Speedups in sentences are figures of a table: of the page's own, of a page that it links to, or of a file that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
CALCULATED = ("concepts/cost-model.md", "learn/explore.md")  # with formulas, from assumed costs
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.as_posix().endswith(CALCULATED)),
]
SPEED = re.compile(r"\btimes (as|the)\b|speedup|times[.,;]|×|ms per token|s per token")
NUMBER = re.compile(r"(?<![\w.\-])(\d+\.\d+)(?![\w.]|\s*(?:GB|GiB|MB|KiB|%|billion|B\b))")


def parts(page: Path) -> tuple[str, list[list[str]]]:
    """The page's text without blocks of code, and its tables: the rows of each."""
    prose, tables, is_code = [], [[]], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif line.lstrip().startswith("|"):
            tables[-1].append(line)
        elif not is_code:
            prose.append(line)
            if tables[-1]:
                tables.append([])
    return "\n".join(prose), tables


@cache
def tabled(page: Path) -> set[float]:
    """The numbers in the tables of a page, and what every row gains over the one without a draft."""
    found: set[float] = set()
    for table in parts(page)[1]:
        rows = [[float(x) for x in re.findall(r"\d+(?:\.\d+)?", line)] for line in table]
        found.update(*rows)
        for line, base in zip(table, rows, strict=True):
            if "no draft" in line:
                gains = (row[0] / base[0] for row in rows if row and base)
                found.update(each for gain in gains if gain for each in (gain, 1 / gain))
    return found | {each / 1000 for each in found}  # a sentence may say seconds where a table says milliseconds


def numbers(value: Any) -> Iterator[float]:
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(each)
    if isinstance(value, float):
        yield value


def test_sentences_about_speed_have_figures_of_tables() -> None:
    invented = []
    for page in PAGES:
        prose = parts(page)[0]
        targets = (
            (page.parent / name).resolve()
            for name in re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text(encoding="utf-8"))
        )
        known = tabled(page).union(*map(tabled, filter(Path.is_file, targets)))
        for name in re.findall(r"benchmarks/\w+\.json", prose):
            known |= set(numbers(json.loads((ROOT / name).read_text())))
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*- )", prose):
            for sentence in re.split(r"(?<=[.:;])\s", " ".join(paragraph.split())):
                claims = NUMBER.findall(sentence) if SPEED.search(sentence) else []
                for claim in claims:
                    if not any(round(each, len(claim.partition(".")[2])) == float(claim) for each in known):
                        invented.append(f"{page.relative_to(ROOT)}: {claim} in: {sentence}")
    assert not invented, "\n".join(invented)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_front_pages_repeat_figures_of_other_pages(name: str) -> None:
    """Their tables hold no figures of their own, and the last column is what a row gains over the one without a draft."""
    page = ROOT / name
    targets = ((page.parent / link).resolve() for link in re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text("utf-8")))
    known = set().union(*map(tabled, filter(Path.is_file, targets)))
    for table in parts(page)[1]:
        measured = {line: row for line in table if (row := re.findall(r"(?<![\d.])\d+\.\d\d\b", line))}
        assert known.issuperset(float(figure) for row in measured.values() for figure in row), name
        bases = [float(row[0]) for line, row in measured.items() if "without a draft" in line]
        for line, row in measured.items() if bases else ():
            if gain := line.split("|")[-2].strip():
                assert float(gain) == round(float(row[0]) / bases[0], len(gain.partition(".")[2])), line


def test_a_wrong_figure_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    table = "| | speedup |\n|---|---|\n| no draft | 1.50 |\n| suffix | 3.01 |\n"
    monkeypatch.setitem(globals(), "PAGES", [page])
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for sentence, is_right in (
        ("It is 3.0 times as fast, and 2.0 times as fast as without a draft.", True),
        ("It is 3.1 times as fast.", False),
        ("The package takes 3.1 GB.", True),
    ):
        page.write_text(f"{sentence}\n\n{table}")
        tabled.cache_clear()
        if is_right:
            test_sentences_about_speed_have_figures_of_tables()
        else:
            with pytest.raises(AssertionError, match=r"3\.1 in: It is"):
                test_sentences_about_speed_have_figures_of_tables()
    tabled.cache_clear()
