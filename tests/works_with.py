"""The page "Works with": which programs a pair was tried in, in which version, and what came of it.

    python tests/works_with.py JUNIT.xml PAGE.md

Reads what pytest wrote on tests/test_clients.py, and the docstrings of the tests there; writes the table of the page.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTS = Path(__file__).with_name("test_clients.py")
PACKAGES = {"transformers serve": "transformers"}  # of a client that is part of one
BLOCK = re.compile(r"(?<=<!-- clients: written by `make clients-check` -->\n).*?(?=\n<!-- end of clients -->)", re.S)


def tests() -> list[tuple[str, str, str]]:
    """The name, client and docstring of every test, in order."""
    found = []
    for node in ast.parse(TESTS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            (client,) = (
                ast.literal_eval(call.args[0])
                for call in node.decorator_list
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "client"
            )
            found.append((node.name, client, " ".join((ast.get_docstring(node) or "").split())))
    return found


def outcomes(report: Path) -> dict[str, str]:
    """What became of each test in pytest's JUnit report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        found[case.attrib["name"]] = "fails" if failed else "not run" if "skipped" in kinds else "passes"
    return found


def installed(client: str) -> str:
    try:
        return version(PACKAGES.get(client, client))
    except PackageNotFoundError:
        return "not installed"


def table(results: dict[str, str]) -> str:
    rows = ["| Client | Version | What was checked | Result |", "|---|---|---|---|"]
    rows += [
        f"| {client} | {installed(client)} | {checked} | {results.get(name, 'not run')} |"
        for name, client, checked in tests()
    ]
    return "\n".join(rows)


def block(results: dict[str, str]) -> str:
    """What stands between the markers of the page."""
    python = ".".join(map(str, sys.version_info[:2]))
    tried = f"Tried with transformers {version('transformers')}, torch {version('torch')} and Python {python}."
    return f"\n{table(results)}\n\n{tried}\n"


if __name__ == "__main__":
    report, page = map(Path, sys.argv[1:])
    written, count = BLOCK.subn(lambda _: block(outcomes(report)), page.read_text(encoding="utf-8"))
    assert count == 1, f"{page} has no place for the table"
    page.write_text(written, encoding="utf-8")
