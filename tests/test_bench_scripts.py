"""The cases in benchmarks/: their committed figures can be read and drawn, and the functions that they replace exist."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
DOCS = sorted((ROOT / "docs").rglob("*.md"))


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module(name)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("run", monkeypatch)


def test_pages_show_the_committed_figures(run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section is what its case makes of the figures. After a change of either: `benchmarks/run.py CASE --read --pages`."""
    shown = 0
    for name in run.names():
        case = run.load(name)
        for section in case.sections:
            text = run.section_text(case, section)
            assert len([line for line in text.splitlines() if line.startswith("|")]) > 2 or name == "doctor"
            assert text.startswith(f"`python benchmarks/run.py {name}") or name in ("audits", "doctor")
            page = (ROOT / "docs" / f"{section.page}.md").read_text(encoding="utf-8")
            (found,) = re.findall(rf"(?s)<!-- {section.marker}:begin -->\n(.*?)\n<!-- {section.marker}:end -->", page)
            assert found == script("shared", monkeypatch).folded(text), name
            shown += 1
    assert shown >= 20


def test_cases_have_options_and_tables(run: ModuleType) -> None:
    for name, (_, about) in run.names().items():
        case = run.load(name)
        args = run.arguments_of(case, run.parser_of([case]).parse_args(["--quick", "--threads", "1"]))
        assert args.quick and args.threads == 1 and case.about == about
        assert (case.races is None) != (case.measure is None)
        assert case.quick.keys() <= run.options_of(case).keys()
        figures = FOLDER / f"{name}.json"
        if figures.exists():
            assert case.text(json.loads(figures.read_text(encoding="utf-8")))


def test_a_race_runs(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sympy")
    monkeypatch.setattr(time, "perf_counter", time.perf_counter)  # which --cpu-time replaces
    file = tmp_path / "contexts.json"
    run.main(["contexts", "--quick", "--cpu-time", "--json", str(file)])
    assert '| "suffix" |' in capsys.readouterr().out
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["After 128 tokens"]["points"][0]["rows"]}
    assert [*rows] == ["plain", "no draft", '"suffix"'] and found["about"]["cpu_time"]
    assert all(row["same"] == row["rows"] == 1 and row["first_token_milliseconds"] for row in rows.values())
    assert rows['"suffix"']["by_drafting"]


def test_a_worker_answers_and_its_end_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = script("shared", monkeypatch)
    (tmp_path / "twice.py").write_text(
        "def once(a):\n    print(a)\n    return 2 * a\n\n\ndef every(a):\n    return lambda b: a * b\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    assert shared.Worker("twice", "once", 3, **environment).answer() == 6
    worker = shared.Worker("twice", "every", 3, **environment)
    assert [worker.ask(2), worker.ask(4)] == [6, 12]
    worker.end()
    with pytest.raises(RuntimeError, match=r"twice\.every"):
        worker.ask(1)


def intervals(found: Any) -> Iterator[str]:
    """The speedups in figures, as pages write them."""
    if isinstance(found, dict):
        if found.keys() >= {"ratio", "low", "high"}:
            yield f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
        found = list(found.values())
    if isinstance(found, list):
        for each in found:
            yield from intervals(each)


def test_speedups_with_an_interval_are_committed_figures() -> None:
    """Also those in sentences and in tables that no script writes."""
    known = {each for file in FOLDER.glob("*.json") for each in intervals(json.loads(file.read_text()))}
    for page in (ROOT / "README.md", *DOCS):
        quoted = re.findall(r"\d\.\d\d\s\[\d\.\d\d,\s\d\.\d\d\]", page.read_text(encoding="utf-8"))
        assert not {" ".join(each.split()) for each in quoted} - known, page


def test_the_constants_that_the_simulation_varies_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    simulated = importlib.import_module("simulated")
    homes = (simulated.cost_model, simulated.adaptive)
    assert all(any(hasattr(home, name) for home in homes) for name in simulated.CONSTANTS)


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def chart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("charts")


def test_home_chart_shows_what_was_measured(chart: ModuleType) -> None:
    words = [text.text for text in ElementTree.fromstring(chart.chart()).iter(f"{SVG}text")]
    races = len(json.loads(chart.FIGURES.read_text())) - 1  # beside what was measured on
    assert words.count("1.00") >= races > 0  # others may be as fast as the fastest plain mode
    assert all(words.count(name) == races for name in chart.SHOWN.values())


def test_home_number_is_measured(chart: ModuleType) -> None:
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (race,) = (race for title, race in chart.read(chart.FIGURES.stem).items() if title != "about")
    (row,) = (row for row in race["points"][0]["rows"] if row["name"] == chart.HEAD)
    (number,) = re.findall(r'class="number"><b>([\d.]+)×</b>', home)
    assert number == f"{row['speedup']['ratio']:.1f}"
    about = chart.read(chart.FIGURES.stem)["about"]
    assert f"{about['prompts']} prompts" in home and about["threads"] == 2


def test_charts_are_drawn_inside_their_borders(chart: ModuleType) -> None:
    for name, draw in chart.CHARTS.items():
        svg = draw()
        drawing = ElementTree.fromstring(svg)
        width, height = map(float, drawing.attrib["viewBox"].split()[2:])
        assert width == 400, name
        texts = list(drawing.iter(f"{SVG}text"))
        assert texts and "currentColor" in svg and chart.INK not in svg, name
        for text in texts:
            assert 0 <= float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) <= height, (name, text.text)
        for path in drawing.iter(f"{SVG}path"):
            numbers = re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.attrib["d"])
            assert all(-5 <= float(x) <= width + 1 and -5 <= float(y) <= height + 1 for x, y in numbers), name


def test_every_chart_is_on_a_page(chart: ModuleType) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    assert set(re.findall(r"<!-- chart: (\w+) -->", pages)) == set(chart.CHARTS)
