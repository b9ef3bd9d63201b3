"""The benchmarks' case `gpu`: it goes on after a process that died, after a hang and after a stop; its tables can be made."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.test_bench_scripts import script

pytestmark = pytest.mark.documents

CHILD = """
import os, time

def serve(device, size):
    def job(section=None, item=None):
        if section is None or item is None:
            return ["fine", "fails", "dies", "hangs", "last"] if section else {"processor": "one"}
        if item == "fails":
            return {"error": "no", "lost": True}
        if item == "dies":
            os.abort()
        if item == "hangs":
            time.sleep(60)
        return {"seconds": 0.0, "process": os.getpid()}
    return job
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("cases.gpu", monkeypatch)


def arguments(folder: Path) -> Namespace:
    return Namespace(path=folder / "gpu.json", minutes=1.0, again=False, only=["speed"], quick=True, item="")


def test_it_goes_on_after_processes_that_died_or_hang(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu, "MODULE", "child")
    monkeypatch.setattr(gpu, "ITEM_SECONDS", 4)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    items = gpu.run(arguments(tmp_path))["sections"]["speed"]
    assert list(items) == ["fine", "fails", "dies", "hangs", "last"]
    assert [item for item, one in items.items() if "seconds" in one] == ["fine", "last"]
    assert items["fails"] == {"error": "no"}
    assert "ended with -6" in items["dies"]["error"]
    assert "took more than 4 seconds" in items["hangs"]["error"]
    assert items["fine"]["process"] != items["last"]["process"]


def test_an_item_is_begun_twice_at_most(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops the script within an item leaves it begun."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu, "MODULE", "child")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begun = {
        "about": {},
        "sections": {"speed": {"fine": {"started": 1}, "dies": {"started": 2}, "hangs": {"error": "no"}}},
    }
    (tmp_path / "gpu.json").write_text(json.dumps(begun))
    items = gpu.run(arguments(tmp_path))["sections"]["speed"]
    assert "seconds" in items["fine"] and items["dies"] == {"error": "its process was ended 2 times"}
    again = arguments(tmp_path)
    again.again, again.item = True, "hangs"
    monkeypatch.setattr(gpu, "ITEM_SECONDS", 1)
    assert "took more" in gpu.run(again)["sections"]["speed"]["hangs"]["error"]
    assert json.loads((tmp_path / "gpu.json").read_text())["about"] == {"processor": "one"}


def test_a_failed_run_has_tables(gpu: ModuleType) -> None:
    found = {"about": {}, "sections": {name: {"item": {"error": "broke"}} for name in gpu.SECTIONS}}
    assert gpu.markdown(found).count("item: failed. broke") == len(gpu.SECTIONS)
    assert gpu.markdown({"about": {}, "sections": {}})


def test_sections_have_measurements_and_tables(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = script("gpu_sections", monkeypatch)
    assert set(gpu.SECTIONS) == set(measurements.SECTIONS) >= {*gpu.ALONE}
    for section in gpu.SECTIONS:
        for sizes in measurements.SIZES.values():
            names = [name for name, _ in measurements.SECTIONS[section](torch.device("cuda"), sizes)]
            assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize(
    ("section", "number", "shows"),
    [
        ("rounds", 0, "| no draft |"),
        ("passes", 2, "| a pass by the clock |"),
        ("batches", 0, "| suffix, adaptive |"),
        ("memory", 0, "| context 256 |"),
    ],
)
def test_an_item_runs(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, section: str, number: int, shows: str) -> None:
    job = script("gpu_sections", monkeypatch).serve("cpu", "quick")
    item = job(section)[number]
    result = json.loads(json.dumps(job(section, item)))
    assert shows in gpu.markdown({"about": {}, "sections": {section: {item: result}}})
