"""The scripts in benchmarks/: their committed figures can be read and drawn, and the functions that they replace exist."""

from __future__ import annotations

import importlib
import json
import re
import sys
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
    "instructions",
    "losses",
    "many_engines",
    "many_users",
    "memory",
    "offload",
    "overhead",
    "plan",
    "products",
    "rollouts",
    "schemas",
    "self_drafts",
    "sessions",
    "shipped_pair",
    "step",
)

CHAT = ("kernels", "kernels_sampled", "bfloat16", "bfloat16_sampled", "float32", "48_tokens", "without_bfloat16")
SECTIONS = {
    "benchmarks/batches": [("batches", "shipped_pair"), ("smollm2", "smollm2_batches", "smollm2_batches_without_amx")],
    "benchmarks/chat-model": [("smollm2", *(f"smollm2_{name}" for name in CHAT)), ("step", "step")],
    "benchmarks/larger-targets": [("grown", "grown")],
    "benchmarks/long-contexts": [("contexts", "contexts")],
    "benchmarks/memory": [("memory", "memory")],
    "benchmarks/other-engines": [(name, name) for name in ("engines", "engines_kernels", "engines_tiles")],
    "benchmarks/the-loop": [("overhead", "overhead")],
    "benchmarks/trained-drafts": [(name, name) for name in ("drafts", "drafts_smollm2", "losses")],
    "benchmarks/which-draft": [("single", "shipped_pair"), ("heads", "heads")],
    "concepts/fast-path": [
        ("measured", "products"),
        ("instructions", "instructions"),
        ("compile-wait", "compile_wait"),
    ],
    "howto/many-users": [("engines", "many_engines"), ("many", "many_users")],
    "howto/memory": [("sessions", "sessions")],
    "howto/rl-rollouts": [("rollouts", "rollouts")],
    "howto/draft-window": [("draft-window", "draft_window")],
    "howto/offload": [("offload", "offload")],
    "howto/plan": [("plan", "plan")],
    "howto/quantize": [("quality", "quality")],
    "howto/tool-calls-and-json": [("grammar", "grammar"), ("schemas", "schemas")],
    "howto/shrink-vocabulary": [("draft-vocabulary", "draft_vocabulary")],
    "integrations/handover": [("handover", "handover")],
    "methods/eagle": [
        ("smollm2", "smollm2_1_thread_bfloat16", "smollm2_1_thread_float32"),
        ("smollm2_head", "smollm2_head"),
    ],
    "methods/early-exit": [("self-drafts", "self_drafts")],
    "methods/index": [("measured", "drafters")],
    "methods/mtp": [("hybrid", "hybrid")],
    "methods/quantized-self": [("copies", "copies")],
}
"""By page: the marker of each measured section, and the files of figures that it is made from."""


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


@pytest.mark.parametrize(
    ("page", "marker", "files"), [(p, marker, files) for p, each in SECTIONS.items() for marker, *files in each]
)
def test_pages_show_the_committed_figures(
    page: str, marker: str, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A section is what `--read` makes of the figures. After a change of either, run the script with `--read` and `--docs`."""
    found = [json.loads((FOLDER / f"{name}.json").read_text()) for name in files]
    if marker == "smollm2":
        text = script("smollm2", monkeypatch).page(found)
    elif files == ["shipped_pair"]:
        pair = script("shipped_pair", monkeypatch)
        text = pair.markdown(found[0], pair.PARTS[marker])
    else:
        made_by = re.sub("_(kernels|tiles|smollm2)$", "", files[0])
        text = script(made_by, monkeypatch).markdown(found[0])
    (shown,) = re.findall(
        rf"(?s)<!-- {marker}:begin -->\n(.*?)\n<!-- {marker}:end -->", (ROOT / "docs" / f"{page}.md").read_text()
    )
    assert shown == script("tables", monkeypatch).folded(text)


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
    known |= {"0.94 [0.87, 0.99]", "0.98 [0.93, 1.02]"}  # of layer skipping: its page has the command, not the file
    for page in (ROOT / "README.md", *DOCS):
        quoted = re.findall(r"\d\.\d\d\s\[\d\.\d\d,\s\d\.\d\d\]", page.read_text(encoding="utf-8"))
        assert not {" ".join(each.split()) for each in quoted} - known, page


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
