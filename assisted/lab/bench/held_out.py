"""Prompts from the sources of sympy and networkx, on which the shipped models were not trained: how files are cut."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from ...zoo import corpus

LINES_READ, LINES_LEFT = 6, 5  # of code before a cut and after it, at least
LINES_EDITED = 6  # of a function to be edited, at least
WORDS = 40  # of a docstring, at least
# code, directives, headings, formulas, tables, private names
_NO_PROSE = re.compile(r">>>|::|\.\. |[=\-~^]{4}|\$|\||__")


def files() -> list[Path]:
    """The held-out files without tests, always in the same order."""
    found = [path for path in corpus.held_out_files() if "tests" not in path.parts]
    random.Random(0).shuffle(found)
    return found


def name_of(path: Path) -> str:
    """The path of a file from its package on: `sympy/core/add.py`."""
    package = next(index for index, part in enumerate(path.parts) if part in corpus.HELD_OUT_PACKAGES)
    return "/".join(path.parts[package:])


def text(characters: int) -> str:
    """The beginning of the joined sources, to fill a context with. characters: how many."""
    found, length = [], 0
    for path in reversed(files()):  # prompts are taken from the other end
        found.append(corpus.read(path))
        length += len(found[-1])
        if length >= characters:
            break
    return "\n\n".join(found)[:characters]


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Name and beginning, short ones first, of each top-level function, cut before a statement."""
    lines = source.splitlines()
    for function in _top_functions(source):
        documented = ast.get_docstring(function, clean=False) is not None
        code = function.body[1 if documented else 0 :]
        first = function.lineno if not documented else function.body[0].end_lineno or function.lineno
        last = (function.end_lineno or function.lineno) - LINES_LEFT
        for cut in sorted({node.lineno - 1 for top in code for node in ast.walk(top) if isinstance(node, ast.stmt)}):
            if first + LINES_READ <= cut <= last:
                yield function.name, "\n".join(lines[function.lineno - 1 : cut]).rstrip()


def edits(source: str) -> Iterator[tuple[str, str]]:
    """A function, a request to rename its first argument, and the new function's head. The prompt has most of the answer."""
    lines = source.splitlines()
    for function in _top_functions(source):
        if not function.args.args or (function.end_lineno or 0) - function.body[0].lineno < LINES_EDITED:
            continue
        old = function.args.args[0].arg
        whole = lines[function.lineno - 1 : function.end_lineno]
        head = whole[: max(1, function.body[0].lineno - function.lineno)]
        renamed = re.sub(rf"\b{old}\b", f"{old}_given", "\n".join(head))
        request = f"# The same function, its argument `{old}` renamed to `{old}_given`"
        yield function.name, "\n".join([*whole, "", "", request, renamed])


def records(source: str) -> Iterator[tuple[str, str]]:
    """A JSON list of a file's functions, cut after the beginning of a record, short ones first."""
    listed = [
        {
            "name": function.name,
            "line": function.lineno,
            "arguments": [argument.arg for argument in function.args.args],
            "documented": ast.get_docstring(function) is not None,
            "statements": len(function.body),
        }
        for function in _top_functions(source)
    ]
    for count in range(2, len(listed)):
        whole = json.dumps(listed[:count], indent=2).removesuffix("\n]")
        yield f"{count} functions", f'{whole},\n  {{\n    "name":'


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Plain sentences of the documentation, cut after two thirds of their words."""
    for node in ast.walk(_parsed(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(ast.get_docstring(node) or ""))
        prose = [part for part in paragraphs if not _NO_PROSE.search(part) and part.rstrip().endswith(".")]
        whole = "\n\n".join(prose)
        words = list(re.finditer(r"\S+", whole))
        if len(words) >= WORDS:
            yield getattr(node, "name", "the module"), whole[: words[2 * len(words) // 3].start()].rstrip()


def _top_functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in _parsed(source).body if isinstance(node, ast.FunctionDef)]


def _parsed(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # escapes in the sources
        return ast.parse(source)
