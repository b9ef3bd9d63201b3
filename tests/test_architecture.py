"""The house: how many files tell the story, and where private names of others stand. `make lint` checks who imports whom."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from torch import nn

import assisted

pytestmark = pytest.mark.documents

PACKAGE = Path(assisted.__file__).parent
LIBRARIES = PACKAGE / "engine" / "libraries.py"
OF_MODULES = {*vars(nn.Module()), *vars(nn.Module)}
"""The dictionaries of nn.Module, and what else every module has, in every version."""


def test_the_story_is_told_in_few_files():
    assert len(list(PACKAGE.glob("*.py"))) <= 17


def test_the_reading_list_is_short():
    page = (PACKAGE.parent / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+\.py)` \|", page.partition("## Reading list")[2].partition("\n## ")[0], re.M)
    lines = [len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in listed]
    assert 5 < len(listed) <= 10
    assert sum(lines) <= 2085, dict(zip(listed, lines, strict=True))


def test_the_way_of_a_call_goes_down():
    """The rooms on the page, in order: none imports one that stands before it."""
    page = (PACKAGE.parent / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\d\. \*\*`([\w/]+?)(?:\.py|/)`\*\*", page, re.M)
    assert 5 < len(rooms) <= 8
    files = [
        [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else (PACKAGE / room).glob("*.py")
        for room in rooms
    ]
    for at, (room, own) in enumerate(zip(rooms, files, strict=True)):
        imported = {name for path in own for name in _imported(path)}
        assert not imported & {*rooms[:at]}, room


def _imported(path):
    """The first names of the modules of this package that a file imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            yield from [node.module.split(".")[0]] if node.module else (alias.name for alias in node.names)


def test_every_wing_says_what_it_is_for():
    for room in PACKAGE.glob("*/__init__.py"):
        assert importlib.import_module(f"assisted.{room.parent.name}").__doc__


def test_private_names_of_other_packages_stand_in_one_file():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py") if path != LIBRARIES}
    own = (
        {name for tree in trees.values() for name in _defined(tree)} | OF_MODULES | {"_field_defaults"}
    )  # of named tuples, and documented
    elsewhere = {
        f"{path.relative_to(PACKAGE)}, line {node.lineno}: {name}"
        for path, tree in trees.items()
        for node, name in _private(tree)
        if name not in own and "assisted" not in name
    }
    assert not elsewhere


def _defined(tree):
    """Names that this file gives to something."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.keyword(arg=str(name)):  # written into a dictionary of attributes
                yield name


def _private(tree):
    """Names that begin with an underscore: attributes, imports, and strings of one word, which getattr may be given."""
    parts_of_texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="sys")):
                names = []
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if id(node) not in parts_of_texts:
                names = [name]
            case ast.Import(names=imported) | ast.ImportFrom(names=imported, level=0):
                parts = [*(alias.name for alias in imported), getattr(node, "module", None) or ""]
                names = [name for part in parts for name in part.split(".")]
            case _:
                names = []
        yield from ((node, name) for name in names if name.isidentifier() and re.match("_(?!_)", name))
