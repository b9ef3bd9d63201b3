"""Costs that outlive a process: written once, read at the first call, never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assisted import AssistedModelForCausalLM
from assisted.lengths import Adaptive, remembered
from assisted.lengths.costs import Costs

COSTS = Costs(((1, 0.01), (2, 0.011), (8, 0.02)), 0.002)
# long enough that some length of a draft occurs twice: its first timing does not count
CALL = {"max_new_tokens": 96, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
IDS = torch.arange(200, 216)[None]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "costs.json"
    monkeypatch.setenv(remembered.VARIABLE, str(path))
    monkeypatch.setattr(remembered, "_WRITTEN", {})
    return path


def pair() -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", dtype=torch.float32)


def test_what_is_remembered_is_recalled(file: Path) -> None:
    assert remembered.recall("a") is None
    remembered.remember("a", COSTS)
    assert remembered.recall("a") == COSTS
    assert remembered.recall("b") is None
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_nearly_the_same_is_not_written_again(file: Path) -> None:
    remembered.remember("a", COSTS)
    before = file.stat().st_mtime_ns, file.read_text()
    remembered.remember("a", Costs(COSTS.verify, COSTS.draft * 1.05))
    assert (file.stat().st_mtime_ns, file.read_text()) == before
    slower = Costs(COSTS.verify, COSTS.draft * 2)
    remembered.remember("a", slower)
    assert remembered.recall("a") == slower


def test_the_oldest_are_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 3)
    for key in "abcd":
        remembered.remember(key, COSTS)
    assert list(json.loads(file.read_text())) == ["b", "c", "d"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": 3}', '{"a": {"verify": []}}', '{"a": {"draft": 1, "other": 2}}']
)
def test_a_broken_file_is_no_file(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert remembered.recall("a") is None
    remembered.remember("a", COSTS)
    assert remembered.recall("a") == COSTS


def test_it_can_be_switched_off_and_need_not_be_writable(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    for value in ("", str(tmp_path / "taken" / "costs.json")):
        monkeypatch.setenv(remembered.VARIABLE, value)
        remembered.remember("a", COSTS)
        assert remembered.recall("a") is None
    assert not file.exists()


def test_a_first_call_starts_from_what_an_earlier_process_measured(file: Path) -> None:
    first = pair()
    text = first.generate(IDS, **CALL)
    assert first.length.costs is not None
    (key,) = json.loads(file.read_text())
    kept = remembered.recall(key)
    other = pair()
    other.draft_length = Adaptive()
    seen = []
    start = other.drafter.start_length
    other.drafter.start_length = lambda policy, earlier=None: seen.append(policy.costs) or start(policy, earlier)
    assert other.generate(IDS, **CALL).tolist() == text.tolist()
    assert seen == [kept]
    other.generate(IDS, **CALL)
    assert seen[1] is None  # the second starts from the first
    own = Adaptive(costs=COSTS)
    other.generate(IDS, **CALL, draft_length=own)
    assert seen[2] == COSTS  # what the caller gave comes first


def test_calls_of_other_kinds_do_not_share_costs(file: Path) -> None:
    model = pair()
    model.generate(IDS, **CALL)
    model.generate(IDS.repeat(2, 1), **CALL)
    model.generate(IDS, **CALL | {"do_sample": True})
    model.fast = "eager"
    model.generate(IDS, **CALL)
    assert len(json.loads(file.read_text())) == 4


def test_the_default_is_the_users_cache(tmp_path: Path) -> None:
    command = "from assisted.lengths import remembered; print(remembered._file())"
    own = {name: value for name, value in os.environ.items() if name not in (remembered.VARIABLE, "XDG_CACHE_HOME")}
    for more, expected in (
        ({"XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "assisted" / "costs.json"),
        ({"HOME": str(tmp_path)}, tmp_path / ".cache" / "assisted" / "costs.json"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", command], env=own | more, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == str(expected)
