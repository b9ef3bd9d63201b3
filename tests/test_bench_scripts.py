"""The scripts in benchmarks/: their committed figures can be read, and the functions that they replace exist."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
WITH_FIGURES = (
    "contexts",
    "drafters",
    "engines",
    "exit_layers",
    "grown",
    "handover",
    "heads",
    "memory",
    "offload",
    "overhead",
    "plan",
    "products",
    "shipped_pair",
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
