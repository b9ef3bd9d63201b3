"""The notebooks: each has the common form, agrees with its source, runs, and makes a page.

Whether they run is a matter of minutes: `make notebooks-check`. Everything else is read from the files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from assisted.notebook import kit as notebook

ROOT = Path(__file__).parent.parent
pytest.importorskip("jupytext", reason="pip install '.[notebooks]'")
nbformat = pytest.importorskip("nbformat", reason="pip install '.[notebooks]'")


def load(path: Path) -> ModuleType:
    """A script that is in no package."""
    name = f"{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, render, chart = (
    load(ROOT / path) for path in ("notebooks/build.py", "notebooks/render.py", "benchmarks/chart.py")
)
SOURCES = build.sources()
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@every_source
def test_form_and_agreement(source: Path) -> None:
    assert build.check(source).problems == []


@every_source
def test_links_between_notebooks(source: Path) -> None:
    linked = set(re.findall(r"\(([\w/.]+\.(?:ipynb|md|py))\b", source.read_text(encoding="utf-8")))
    assert linked <= {f"{path.stem}.ipynb" for path in SOURCES}


@every_source
def test_output_as_it_was_written(source: Path) -> None:
    """Of the build that made the files: nothing raised, exercises open, answers right, no path of a machine."""
    there = nbformat.read(build.target(source), as_version=4)
    assert build.problems(there, source.stem) == []


@every_source
def test_page(source: Path) -> None:
    page = render.render(build.target(source))
    assert page.markdown.startswith(f"# {source.stem[:2]}. ")
    assert len(re.findall(r'<div data-piece="\d+"></div>', page.markdown)) == len(page.pieces)
    names = [name for piece in page.pieces for name in re.findall(r'\bid="([^"]+)"', piece)]
    assert len(names) == len(set(names))
    for piece in page.pieces:
        assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(["']?http""", piece), "asks another host"


@pytest.mark.notebooks
@every_source
def test_runs(source: Path) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="pip install '.[notebooks]'")
    assert build.build(source, write=False).problems == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="processes are watched through a pipe with a name")
def test_no_kernel_outlives_a_build(tmp_path: Path) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="pip install '.[notebooks]'")
    shutil.copy(ROOT / "notebooks" / "build.py", tmp_path)
    pipe = tmp_path / "pipe"
    cell = f"import time\n\nheld = open({str(pipe)!r}, 'w', buffering=1)\nheld.write('up\\n')\ntime.sleep(600)\n"
    (tmp_path / "99_try.py").write_text(f"# %%\n{cell}", encoding="utf-8")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen([sys.executable, tmp_path / "build.py", "--run-only"], stderr=subprocess.DEVNULL) as building:
        assert select.select([reader], [], [], 120)[0], "no kernel came up"
        assert os.read(reader, 10) == b"up\n"
        building.terminate()
        assert building.wait(120) == 128 + signal.SIGTERM
    assert os.read(reader, 10) == b"", "nobody holds the other end any more"
    os.close(reader)


def test_all_are_listed() -> None:
    listed = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    for source in SOURCES:
        page = render.render(build.target(source))
        assert f"| [{page.title}]({page.slug}.ipynb) | {page.question} | {page.before} |" in listed


SMALL = """
# %% [markdown]
# # 99. A try
#
# **What is it?**
#
# *About 1 minute to read. Before it: notebooks [01](01_a.ipynb) and [02](02_b2.ipynb).*

# %% tags=["colab"]
# %pip install nothing

# %% tags=["setup"]
from assisted.notebook import attempt

# %% [markdown]
# ## Question
# Several:
# - one
# - two
#
# ## Takeaway
#
# > None.

# %% tags=["check"]
def check_1(candidate):
    assert candidate == 1, "one"

# %% tags=["exercise"]
attempt(check_1, ...)

# %% tags=["answer"]
attempt(check_1, 1)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "99_try.py"
    path.write_text(SMALL.lstrip(), encoding="utf-8")
    return path


def test_reading_gives_the_same_each_time(small: Path) -> None:
    assert nbformat.writes(build.read(small)) == nbformat.writes(build.read(small))
    cells = build.read(small).cells
    assert cells[1].source == "# %pip install nothing"  # a build must not install
    assert cells[-1].metadata == {"tags": ["answer"], "jupyter": {"source_hidden": True}}


def test_student_version_gives_nothing_away(small: Path) -> None:
    made = build.read(small)
    made.cells[2].outputs = [nbformat.v4.new_output("stream", text="3")]
    handed = build.student(made)
    assert not any("answer" in build.tags(cell) for cell in handed.cells)
    assert not any(cell.get("outputs") for cell in handed.cells)
    assert made.cells[2].outputs, "the copy is another notebook"


def test_problems_are_found(small: Path) -> None:
    made = build.read(small)
    made.cells[2].source += "\nx = 1" * build.CELL_LINES
    text = dict(output_type="stream", name="stdout")
    made.cells[2].outputs = [nbformat.v4.new_output(**text, text="read from " + "/home" + "/somebody/model\n")]
    made.cells[-2].outputs = [nbformat.v4.new_output(**text, text="Correct.\n")]
    made.cells[-1].outputs = [nbformat.v4.new_output(**text, text="Not solved yet: one\n")]
    found = "\n".join(build.problems(made, "98_other"))
    for words in (
        "98. ",
        "headings",
        "three exercises",
        "41 lines",
        "path of this machine",
        "is an exercise",
        "is an answer",
    ):
        assert words in found


def test_a_page_of_a_notebook(small: Path) -> None:
    made = build.read(small)
    svg = f'<?xml version="1.0"?>\n<svg width="9pt" viewBox="0 0 9 9"><g id="a" style="fill: {notebook.INK}"/></svg>'
    made.cells[2].outputs = [
        nbformat.v4.new_output("stream", text="three ``` ticks\n"),
        nbformat.v4.new_output("display_data", data={"image/svg+xml": svg, "text/plain": "<Figure>"}),
        nbformat.v4.new_output("display_data", data={"text/html": "<p>a</p>\n\n<script>1 < 2</script>"}),
    ]
    nbformat.write(made, small.with_suffix(".ipynb"))
    page = render.render(small.with_suffix(".ipynb"))
    assert (page.title, page.question, page.before) == ("99. A try", "What is it?", "01, 02")
    assert "%pip" not in page.markdown
    assert "```` { .text .no-copy .output }\nthree ``` ticks\n````" in page.markdown
    assert "Several:\n\n- one\n- two" in page.markdown
    assert '??? success "Answer"\n    ``` { .python }\n    attempt(check_1, 1)' in page.markdown
    assert "currentColor" in page.pieces[0] and 'id="f0-a"' in page.pieces[0] and "<?xml" not in page.pieces[0]
    assert page.filled('<div data-piece="1"></div>') == '<div class="shown"><p>a</p>\n\n<script>1 < 2</script></div>'


def test_folded_code_shows_its_output(small: Path) -> None:
    small.write_text(SMALL.lstrip().replace('["setup"]', '["setup", "folded"]'), encoding="utf-8")
    made = build.read(small)
    made.cells[2].outputs = [nbformat.v4.new_output("stream", text="three\n")]
    assert made.cells[2].metadata.jupyter.source_hidden
    nbformat.write(made, small.with_suffix(".ipynb"))
    page = render.render(small.with_suffix(".ipynb"))
    assert '??? note "The code"\n    ``` { .python }\n    from assisted' in page.markdown
    assert "\n``` { .text .no-copy .output }\nthree\n```" in page.markdown


def test_ink_is_the_same_in_figures_and_pages() -> None:
    assert render.INK == notebook.INK
    assert notebook.INK not in notebook.COLOURS.values(), "a curve would lose its colour on the site"


def test_chart_shows_what_was_measured() -> None:
    drawn = ElementTree.fromstring(chart.chart())
    words = [text.text for text in drawn.iter("text")]
    races = len(json.loads(chart.FIGURES.read_text())) - 1  # beside what was measured on
    assert words.count("1.00") >= races > 0  # others may be as fast as the fastest plain mode
    assert all(words.count(name) == races for name in chart.SHOWN.values())


def test_unknown_notebook_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        build.main(["--only", "77"])
    assert "77" in capsys.readouterr().err


def test_machine_paths() -> None:
    for shown in ("/home/" + "me/x", '"/root/' + 'x"', "in /tmp/" + "x"):
        assert build.MACHINE_PATH.search(shown)
    for shown in ("</work", "a/tmp/b", "https://host/home/page", textwrap.dedent("1/var/2")):
        assert not build.MACHINE_PATH.search(shown)
