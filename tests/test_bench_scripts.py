"""The scripts in benchmarks/: their committed figures can be read and drawn, and the functions that they replace exist."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
WITH_FIGURES = (
    "contexts",
    "copies",
    "draft_vocabulary",
    "draft_window",
    "drafters",
    "drafts",
    "engines",
    "exit_layers",
    "grammar",
    "grown",
    "handover",
    "heads",
    "many_engines",
    "many_users",
    "memory",
    "offload",
    "overhead",
    "plan",
    "products",
    "rollouts",
    "self_drafts",
    "sessions",
    "shipped_pair",
    "step",
)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sympy")
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", WITH_FIGURES)
def test_committed_figures_can_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = script(name, monkeypatch)
    text = found.markdown(json.loads((FOLDER / f"{name}.json").read_text()))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 2
    assert text.startswith(f"`python benchmarks/{name}.py")


def test_what_overhead_times_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    overhead = script("overhead", monkeypatch)
    with overhead.Passes().noted(), overhead.Causes().timed():
        pass


def test_the_constants_that_the_simulation_varies_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    simulated = importlib.import_module("simulated")
    homes = (simulated.cost_model, simulated.adaptive)
    assert all(any(hasattr(home, name) for home in homes) for name in simulated.CONSTANTS)
    accepted = simulated.tree_acceptance(0, False, 1.0, 20)
    assert accepted == sorted(accepted)


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("chart")


def test_home_chart_shows_what_was_measured(chart: ModuleType) -> None:
    words = [text.text for text in ElementTree.fromstring(chart.chart()).iter("text")]
    races = len(json.loads(chart.FIGURES.read_text())) - 1  # beside what was measured on
    assert words.count("1.00") >= races > 0  # others may be as fast as the fastest plain mode
    assert all(words.count(name) == races for name in chart.SHOWN.values())


def test_charts_are_drawn_inside_their_borders(chart: ModuleType) -> None:
    for name, draw in chart.CHARTS.items():
        drawing = ElementTree.fromstring(draw())
        width, height = map(float, drawing.attrib["viewBox"].split()[2:])
        bars = list(drawing.iter("rect"))
        assert bars or list(drawing.iter("path")), name
        for bar in bars:
            x, y, wide, high = (float(bar.attrib[side]) for side in ("x", "y", "width", "height"))
            assert x >= 0 and x + wide <= width and y >= 0 and y + high <= height, name
        for text in drawing.iter("text"):
            assert 0 <= float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) <= height, (name, text.text)


def test_every_chart_is_on_a_page(chart: ModuleType) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    assert set(re.findall(r"<!-- chart: (\w+) -->", pages)) == set(chart.CHARTS)


def test_sections_that_scripts_name_are_there() -> None:
    """Where the docstring of a script says `--docs PAGE`, the page exists and has a section for it."""
    for path in FOLDER.glob("*.py"):
        docstring = path.read_text(encoding="utf-8").split('"""')[1]
        for page in re.findall(r"docs/[\w/-]+\.md", docstring):
            assert ":begin -->" in (ROOT / page).read_text(encoding="utf-8"), (path.name, page)
