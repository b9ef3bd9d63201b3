"""benchmarks/gpu.py: it goes on after a process that died, after a hang and after a stop; its tables can be made."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.test_bench_scripts import script

pytestmark = pytest.mark.documents

CHILD = """
import os, sys, time
from pathlib import Path
from gpu import GO_ON, NAME, Results
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
results = Results(Path(arguments["--out"]) / NAME)
for item in ("fine", "dies", "hangs", "alone", "last"):
    if results.done("speed", item) or not results.begin("speed", item):
        continue
    if item == "dies":
        os.abort()
    if item == "hangs":
        time.sleep(60)
    results.put("speed", item, {"seconds": 0.0})
    if item == "alone":
        sys.exit(GO_ON)
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("gpu", monkeypatch)


def arguments(folder: Path, minutes: float = 1.0) -> Namespace:
    return Namespace(out=folder, minutes=minutes, again=False, only=["speed"], device="cpu", size="tiny", item="")


def test_it_goes_on_after_processes_that_died_or_hang(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(gpu, "__file__", str(child))
    monkeypatch.setattr(gpu, "ITEM_SECONDS", 10)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    items = gpu.run(arguments(tmp_path))["sections"]["speed"]
    assert list(items) == ["fine", "dies", "hangs", "alone", "last"]
    assert [item for item, one in items.items() if "seconds" in one] == ["fine", "alone", "last"]
    assert "ended with -6" in items["dies"]["error"]
    assert "took more than 10 seconds" in items["hangs"]["error"]


def test_an_item_is_begun_twice_at_most(gpu: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.Results(path).begin("speed", "item")
    assert gpu.Results(path).current == ("speed", "item")  # whoever was stopped here leaves it
    assert gpu.Results(path).begin("speed", "item")
    assert not gpu.Results(path).begin("speed", "item")
    assert gpu.Results(path).done("speed", "item")
    gpu.Results(path).forget(["speed"])
    assert gpu.Results(path).begin("speed", "item")


def test_a_failed_run_has_tables(gpu: ModuleType) -> None:
    found = {"about": {}, "current": None, "sections": {name: {"item": {"error": "broke"}} for name in gpu.SECTIONS}}
    assert gpu.markdown(found).count("item: failed. broke") == len(gpu.SECTIONS)
    assert gpu.markdown({"about": {}, "current": None, "sections": {}})


def test_sections_have_measurements_and_tables(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = script("gpu_sections", monkeypatch)
    assert set(gpu.SECTIONS) == set(gpu.TITLES) == set(gpu.TABLES) == set(measurements.SECTIONS)
    for section in gpu.SECTIONS:
        for sizes in measurements.SIZES.values():
            names = [name for name, _ in measurements.SECTIONS[section](torch.device("cuda"), sizes)]
            assert len(names) == len(set(names)) > 0


def test_an_identity_item_runs(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = script("gpu_sections", monkeypatch)
    (item, measure), *_ = measurements.items("identity", "cpu", "tiny")
    result = json.loads(json.dumps(measure()))
    assert set(result["modes"]) == {"eager", "captured"}
    assert all(one["same"] == one["rows"] == 1 for one in result["modes"].values())
    assert item in gpu.markdown({"about": {}, "sections": {"identity": {item: result | {"seconds": 0.0}}}})


def test_the_joint_distribution_of_two_tokens(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measurements = script("gpu_sections", monkeypatch)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval()
    with torch.inference_mode():
        table, classes = measurements.joint(model, torch.tensor([[1, 2, 3]]))
    assert torch.isclose(table.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert {classes(first, second) for first in range(40) for second in range(40)} == {
        (row, column) for row in range(12) for column in range(7)
    } | {(12, 6)}
