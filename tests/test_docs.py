"""Every Python block of README.md and docs/ runs as written, on the shipped models, without a network.

The blocks of one file share one namespace, top to bottom, as a reader would type them. A block that cannot run here
(a model from the Hub, say) has `<!-- not run -->` on the line before it. A page with `<!-- needs NAME -->` is skipped where
that module is not installed.
"""

from __future__ import annotations

import io
import pydoc
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import assisted
from assisted import methods as drafters
from assisted.cli.main import main
from assisted.methods.shared import registry

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
NOT_RUN = "<!-- not run -->"
NEEDS = re.compile(r"^<!-- needs (\w+) -->$", re.M)
OPENING = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})\s*(?P<info>.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text and the number of its first line."""

    language: str
    text: str
    line: int
    run: bool


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order; indented ones (in lists and tabs) included."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = OPENING.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        while number < len(lines) and lines[number].strip() != opening["fence"]:
            number += 1
        before = lines[first - 2].strip() if first >= 2 else ""
        language = re.split(r"[\s{]", opening["info"], maxsplit=1)[0]
        body = textwrap.dedent("\n".join(lines[first:number]))
        found.append(Block(language, body, first + 1, before != NOT_RUN))
        number += 1
    return found


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language in ("python", "py")]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = [page for page in PAGES if any(block.run for block in python_blocks(page))]


@pytest.mark.quant
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in NEEDS.findall(page.read_text(encoding="utf-8")):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)  # a block may save a model
    methods = dict(registry.METHODS)  # or register a method
    for module in (drafters, registry):
        monkeypatch.setattr(module, "METHODS", methods)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in python_blocks(page):
        if block.run:
            # The empty lines in front make a traceback name the line of the page.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, str(page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_is_python(page: Path) -> None:
    """Also the blocks that are not run."""
    for block in python_blocks(page):
        compile("\n" * (block.line - 1) + block.text, str(page), "exec")


NAME = re.compile(r"`(?:assisted\.)?([a-z_]+(?:\.\w+)+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_exist(page: Path) -> None:
    """Modules, and what is in them, by the names that a page gives them with or without the package's."""
    rooms = {path.stem for path in Path(assisted.__file__).parent.iterdir()}
    files = (".py", ".json", ".md", ".c", ".h")
    named = {name for name in NAME.findall(page.read_text(encoding="utf-8")) if not name.endswith(files)}
    for name in (name for name in named if name.split(".")[0] in rooms):
        assert pydoc.locate(f"assisted.{name}") is not None, name


def test_blocks_are_found() -> None:
    text = textwrap.dedent(
        """
        ```python
        a = 1
        ```
        <!-- not run -->
        ```python
        b = 2
        ```

        - a list

            ```python title="c.py"
            if a:
                c = 3
            ```

        ````text
        ```python
        d = 4
        ```
        ````
        """
    )
    found = blocks(text)
    assert [(b.language, b.run, b.line) for b in found] == [
        ("python", True, 3),
        ("python", False, 7),
        ("python", True, 13),
        ("text", True, 18),
    ]
    assert found[2].text == "if a:\n    c = 3"


COMMANDS = ROOT / "docs" / "howto" / "command-line.md"


def command_lines() -> list[str]:
    """What the page on commands tells a reader to type, but for what needs the Hub."""
    lines = [
        line for block in blocks(COMMANDS.read_text()) if block.language == "bash" for line in block.text.splitlines()
    ]
    return [line for line in lines if "Qwen/" not in line]


@pytest.mark.parametrize("line", command_lines())
def test_commands_run(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: a pipe's left side is what standard input holds."""
    left, _, right = line.rpartition("|")
    if left:
        monkeypatch.setattr("sys.stdin", io.StringIO(shlex.split(left)[1] + "\n"))
    program, *words = shlex.split(right)
    assert program == "assisted" and main(words) == 0
    assert capsys.readouterr().out.strip()


def test_every_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    known = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    named = set(re.findall(r"^\| `assisted (\w+)` \|", COMMANDS.read_text(), re.MULTILINE))
    assert named == known
