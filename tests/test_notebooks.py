"""The notebooks: each has the common form, agrees with its source, runs, and makes a page.

Whether they run is a matter of minutes: `make notebooks-check`. Everything else is read from the files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
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

import kit
import pytest

from assisted.moved import MovedFinder

pytestmark = pytest.mark.documents

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


build, render, addressing = (load(ROOT / "notebooks" / name) for name in ("build.py", "render.py", "address.py"))
SOURCES = build.sources()
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@every_source
def test_form_and_agreement(source: Path) -> None:
    assert build.check(source).problems == []


@every_source
def test_links_between_notebooks(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    linked = set(re.findall(r"\(([\w/.]+\.(?:ipynb|md|py))\b", text))
    assert linked <= {f"{path.stem}.ipynb" for path in SOURCES}
    for later in SOURCES[SOURCES.index(source) + 1 :][:1]:
        assert f"({later.stem}.ipynb)" in text.rpartition("## References")[2]


@every_source
def test_modules_are_imported_by_their_names_of_today(source: Path) -> None:
    for name in re.findall(r"^from (assisted\.[\w.]+) import", source.read_text(encoding="utf-8"), re.MULTILINE):
        assert MovedFinder().find_spec(name, None, None) is None, name


@every_source
def test_output_as_it_was_written(source: Path) -> None:
    """Of the build that made the files: nothing raised, exercises open, answers right, no path of a machine."""
    there = nbformat.read(build.target(source), as_version=4)
    assert build.problems(there, source.stem) == []


@every_source
def test_student_version_holds_no_answer(source: Path) -> None:
    cells = build.read(source).cells
    others = [cell for cell in build.student(build.read(source)).cells if "exercise" not in build.tags(cell)]
    handed = "\n".join(cell.source for cell in others)  # an exercise may be an answer with an error planted in it
    answers = [cell.source for cell in cells if "answer" in build.tags(cell)]
    given = {line.strip() for text in answers for line in text.splitlines() if len(line.strip()) > 40}
    assert [line for line in given if line in handed and not line.startswith("def ")] == []


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


@pytest.mark.notebooks
@pytest.mark.parametrize(
    "source", [path for path in SOURCES if build.with_chat(build.read(path))], ids=lambda path: path.stem
)
def test_runs_without_the_chat_model(source: Path) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="pip install '.[notebooks]'")
    assert build.build(source, write=False, models="shipped").problems == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="processes are watched through a pipe with a name")
def test_no_kernel_outlives_a_build(tmp_path: Path) -> None:
    for module in ("nbclient", "ipykernel"):
        pytest.importorskip(module, reason="pip install '.[notebooks]'")
    there = tmp_path / "notebooks"
    there.mkdir()
    for name in ("mkdocs.yml", "notebooks/build.py", "notebooks/address.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    pipe = tmp_path / "pipe"
    cell = f"import time\n\nheld = open({str(pipe)!r}, 'w', buffering=1)\nheld.write('up\\n')\ntime.sleep(600)\n"
    (there / "99_try.py").write_text(f"# %%\n{cell}", encoding="utf-8")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with subprocess.Popen([sys.executable, there / "build.py", "--run-only"], stderr=subprocess.DEVNULL) as building:
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
from kit import attempt

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
def check_1(candidate, seed=1):
    assert candidate(seed) == seed, "one"

# %% tags=["exercise"]
attempt(check_1, lambda x: ...)

# %% [markdown] tags=["answer"]
# The same:
# - in every case

# %% tags=["answer"]
attempt(check_1, lambda x: x)

# %% [markdown] tags=["open"]
# ### Open ends
#
# - Find out.
# - Find out more.
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
    assert cells[-2].metadata == {"tags": ["answer"], "jupyter": {"source_hidden": True}}
    assert cells[-3].source.startswith("<details>\n<summary>Answer</summary>\n\nThe same:")


def test_the_address_takes_the_place_of_the_word_that_stands_for_it(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One setting: with an address, no notebook and no page names REPOSITORY any more; without one, both explain it."""
    address = "https://github.com/someone/assisted"
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    lines = [build.read(source).cells[1].source for source in SOURCES]
    for text in [*lines, *(text for text in pages if "git clone" in text and "REPOSITORY" in text)]:
        assert "REPOSITORY` is the address" in text or "REPOSITORY is the address" in text
        named = addressing.addressed(text, address)
        assert "REPOSITORY" not in named and f"git clone --depth 1 {address} repository" in named
    monkeypatch.setattr(build, "repository", lambda: address)
    made = build.read(small)
    assert made.cells[0].source.endswith(
        "(https://colab.research.google.com/github/someone/assisted/blob/main/notebooks/99_try.ipynb)"
    )
    monkeypatch.setattr(render, "repository", lambda: address)
    nbformat.write(made, small.with_suffix(".ipynb"))
    assert "badge" not in render.render(small.with_suffix(".ipynb")).markdown, (
        "the site asks no other host for a picture"
    )
    page = render.render(build.target(SOURCES[0])).markdown
    assert f"colab.research.google.com/github/someone/assisted/blob/main/notebooks/{SOURCES[0].stem}.ipynb" in page
    assert addressing.colab("a.ipynb", "https://example.org/someone/assisted") == addressing.colab("a.ipynb", "") == ""


def test_student_version_gives_nothing_away(small: Path) -> None:
    made = build.read(small)
    made.cells[2].outputs = [nbformat.v4.new_output("stream", text="3")]
    handed = build.student(made)
    assert not any("answer" in build.tags(cell) for cell in handed.cells)
    assert not any(cell.get("outputs") for cell in handed.cells)
    assert made.cells[2].outputs, "the copy is another notebook"


def test_checks_are_tried_on_random_values(small: Path) -> None:
    made = build.read(small)
    told: dict[str, list[str]] = {}
    scope: dict[str, object] = {}
    exec(made.cells[4].source, scope)
    cells = build.trials(made)
    assert [cell.metadata.of for cell in cells] == ["check_1", "check_1"]
    assert len({values["seed"] for cell in cells for values in cell.metadata["values"]}) > build.TRIALS
    for name, candidates in {
        "as it is": ("lambda x: ...", "lambda x: x"),
        "turned": ("lambda x: x", "lambda x: ..."),
        "only for itself": ("lambda x: ...", "lambda x: 1"),
    }.items():
        for cell, before, now in zip(cells, ("lambda x: ...", "lambda x: x"), candidates, strict=True):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(cell.source.replace(before, now), dict(scope))
            cell.outputs = [nbformat.v4.new_output("stream", text=printed.getvalue())]
        told[name] = build.tried(cells)[0]
    assert told["as it is"] == []
    assert sum("passes unsolved" in words for words in told["turned"]) == build.TRIALS
    assert sum("the answer fails: AssertionError: one" in words for words in told["turned"]) == build.TRIALS
    assert len(told["only for itself"]) == build.TRIALS


def test_stale_output_is_found(small: Path) -> None:
    def with_output(text: str, *more: str) -> nbformat.NotebookNode:
        made = build.read(small)
        made.cells[2].outputs = [
            nbformat.v4.new_output("stream", text=text),
            nbformat.v4.new_output("display_data", data={"image/svg+xml": text, "text/plain": "<Figure>"}),
        ]
        made.cells[2].metadata.tags += more
        return made

    there = with_output("12 passes, 2.84 tokens\n")
    assert build.stale(with_output("12 passes,  2.83 tokens\n"), there) == []  # the last digit
    (found,) = build.stale(with_output("12 passes, 3.55 tokens\n"), there)
    assert "3.55" in found and "2.84" in found
    assert build.stale(with_output("13 passes, 2.84 tokens\n"), there)
    assert build.stale(with_output("12 passes, 2.84 tokens\nand more\n"), there)
    assert build.stale(with_output("13 passes\n", "measured"), there) == []


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_is_compared_only_where_its_models_are(
    small: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    small.write_text(SMALL.lstrip().replace('["setup"]', '["setup", "chat"]'), encoding="utf-8")
    used = []
    monkeypatch.setattr(build, "run", lambda notebook, chat: used.append(chat) or [])
    monkeypatch.setattr(build, "tried", lambda cells: ([], 0.0))
    monkeypatch.setattr(build, "stale", lambda fresh, written: ["compared"])
    monkeypatch.setattr(build, "find_spec", lambda name: name if installed else None)
    nbformat.write(build.read(small), build.target(small))
    for models, compared in (("written", installed), ("shipped", False), ("chat", installed)):
        assert ("compared" in build.build(small, write=False, models=models).problems) is compared, models
    assert used == [True, False, True]
    problems = build.build(small, write=True).problems
    assert ("written with the chat model" in problems[0]) is not installed and len(used) == 3 + installed


@pytest.mark.parametrize(
    ("now", "before", "same"),
    [
        ("a  1.25  b", "a 1.26 b", True),
        ("a 1.25", "a 1.3", False),
        ("exit 8 of 16: 53%", "exit 8 of 16: 54%", False),
        ("error 1.1e-16", "error 2.2e-16", True),
        ("p-value 3e-122", "p-value 0.3", False),
        ("3 texts", "3 tokens", False),
    ],
)
def test_alike(now: str, before: str, same: bool) -> None:
    assert build.alike(now, before) is same


def test_problems_are_found(small: Path) -> None:
    made = build.read(small)
    made.cells[2].source += "\nx = 1" * build.CELL_LINES
    made.cells[3].source += "\n## By hand\n"
    text = dict(output_type="stream", name="stdout")
    made.cells[2].outputs = [nbformat.v4.new_output(**text, text="read from " + "/home" + "/somebody/model\n")]
    made.cells[4].source = "def check_1(candidate, words=3): ..."
    made.cells[5].outputs = [nbformat.v4.new_output(**text, text="Correct.\n")]
    made.cells[-2].outputs = [nbformat.v4.new_output(**text, text="Not solved yet: one\n")]
    made.cells[-1].source = "### Open ends"
    made.cells[-1].metadata.tags.append("opened")
    found = "\n".join(build.problems(made, "98_other"))
    for words in (
        "98. ",
        "headings",
        "three exercises",
        "does not say what is in the section",
        "no cell for the reader's prediction",
        "is not compared",
        "open-ended",
        "unknown tag",
        "argument words",
        "41 lines",
        "path of this machine",
        "is an exercise",
        "is an answer",
    ):
        assert words in found


def test_a_page_of_a_notebook(small: Path) -> None:
    made = build.read(small)
    svg = f'<?xml version="1.0"?>\n<svg width="9pt" viewBox="0 0 9 9"><g id="a" style="fill: {kit.INK}"/></svg>'
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
    answer = '??? success "Answer"\n\n    The same:\n\n    - in every case\n\n    ``` { .python }\n    attempt(check_1,'
    assert answer in page.markdown and "<summary>" not in page.markdown
    assert "currentColor" in page.pieces[0] and 'id="f0-a"' in page.pieces[0] and "<?xml" not in page.pieces[0]
    assert 'style="min-width: 9px; max-width: 14px"' in page.pieces[0]
    assert page.filled('<div data-piece="1"></div>') == '<div class="shown"><p>a</p>\n\n<script>1 < 2</script></div>'


def test_folded_code_shows_its_output(small: Path) -> None:
    small.write_text(SMALL.lstrip().replace('["setup"]', '["setup", "folded"]'), encoding="utf-8")
    made = build.read(small)
    made.cells[2].outputs = [nbformat.v4.new_output("stream", text="three\n")]
    assert made.cells[2].metadata.jupyter.source_hidden
    nbformat.write(made, small.with_suffix(".ipynb"))
    page = render.render(small.with_suffix(".ipynb"))
    assert '??? note "The code"\n\n    ``` { .python }\n    from kit' in page.markdown
    assert "\n``` { .text .no-copy .output }\nthree\n```" in page.markdown


@every_source
def test_student_version_holds_no_output(source: Path) -> None:
    for cell in nbformat.read(build.target(source, "student"), as_version=4).cells:
        assert "answer" not in build.tags(cell) and set(cell.metadata) <= {"tags", "jupyter"}
        assert not cell.get("outputs") and cell.get("execution_count") is None and "attachments" not in cell


def test_ink_is_the_same_in_figures_and_pages() -> None:
    assert render.INK == kit.INK
    assert kit.INK not in kit.COLOURS.values(), "a curve would lose its colour on the site"


def test_unknown_notebook_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        build.main(["--only", "77"])
    assert "77" in capsys.readouterr().err


def test_machine_paths() -> None:
    for shown in ("/home/" + "me/x", '"/root/' + 'x"', "in /tmp/" + "x"):
        assert build.MACHINE_PATH.search(shown)
    for shown in ("</work", "a/tmp/b", "https://host/home/page", textwrap.dedent("1/var/2")):
        assert not build.MACHINE_PATH.search(shown)


def test_the_picture_of_a_round_is_found_from_every_place() -> None:
    source = next(path for path in SOURCES if path.stem.startswith("01_"))
    for path in (build.target(source), build.target(source, "student")):
        (name,) = re.findall(r"\]\((\S*round\.svg)\)", path.read_text(encoding="utf-8"))
        assert (path.parent / name).is_file()
    page = render.render(build.target(source))
    assert "<!-- round -->" in page.markdown and "round.svg" not in page.markdown
