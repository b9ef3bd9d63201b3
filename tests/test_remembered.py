"""Costs that outlive a process: written once, read at the first call, never in the way."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch

from assisted import AssistedModelForCausalLM
from assisted.lengths import Adaptive, remembered
from assisted.lengths.cost_model import Costs

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


HOSTILE = {
    "deep": "[" * 100_000,
    "deep in an entry": '{"a": ' + "[" * 100_000,
    "infinite positions": '{"a": {"verify": [[1e999, 1]], "draft": 1}}',
    "many positions": '{"a": {"verify": [[1, 1], [1' + "0" * 400 + ', 2]], "draft": 1}}',
    "rather many positions": '{"a": {"verify": [[1, 1], [1000000000000, 2]], "draft": 1}}',
    "a long number": '{"a": {"verify": [[1, 1]], "draft": 1' + "0" * 400 + "}}",
    "a longer number": '{"a": {"verify": [[1, 1]], "draft": 1' + "0" * 9000 + "}}",
    "infinite seconds": '{"a": {"verify": [[1, Infinity]], "draft": 1}}',
    "no number of seconds": '{"a": {"verify": [[1, NaN]], "draft": NaN}}',
    "hardly a second": '{"a": {"verify": [[1, 5e-324], [2, 1e308]], "draft": 1e308}}',
    "no text": "\ud800",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_contents_are_no_costs(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_bytes(text.encode(errors="surrogatepass"))
    assert remembered.recall("a") is None
    remembered.remember("b", COSTS)
    assert remembered.recall("b") == COSTS
    assert remembered.recall("a") is None
    remembered.remember("a", COSTS)
    assert remembered.recall("a") == COSTS


def test_a_file_larger_than_memory_is_no_file(file: Path) -> None:
    file.parent.mkdir()
    with file.open("wb") as opened:
        opened.truncate(2**40)  # takes no room on the disk
    assert remembered.recall("a") is None
    remembered.remember("a", COSTS)
    assert remembered.recall("a") == COSTS


def test_only_regular_files_are_read_and_replaced(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pipe, link, loop = (tmp_path / name for name in ("a folder", "pipe", "link", "loop"))
    folder.mkdir()
    os.mkfifo(pipe)  # as a device is, something else than a file
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    before = sorted(tmp_path.iterdir())
    for path in (folder, pipe, link, loop, tmp_path / ("x" * 300), Path("~nobody-of-this-name/costs.json")):
        monkeypatch.setenv(remembered.VARIABLE, str(path))
        monkeypatch.setattr(remembered, "_WRITTEN", {})
        with pytest.warns(UserWarning, match="ASSISTED_COSTS: costs are not kept in '.*': "):
            remembered.remember("a", COSTS)
        assert remembered.recall("a") is None
    assert sorted(tmp_path.iterdir()) == before
    assert not list(folder.iterdir()) and pipe.is_fifo() and link.is_symlink() and loop.is_symlink()


def test_a_link_to_a_file_stays_a_link(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    monkeypatch.setenv(remembered.VARIABLE, str(link))
    for costs in (COSTS, Costs(COSTS.verify, 1.0)):
        remembered.remember("a", costs)
        assert remembered.recall("a") == costs
    assert link.is_symlink() and file.is_file()
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_it_can_be_switched_off_and_need_not_be_writable(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    for value, expected in (("", 0), (str(tmp_path / "taken" / "costs.json"), 1)):
        monkeypatch.setenv(remembered.VARIABLE, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for key in "abc":
                remembered.remember(key, COSTS)
        assert len(caught) == expected  # one in a process
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


def test_nothing_is_kept_unless_it_is_asked_for(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other costs lead to other draft lengths, hence to other random numbers for sampled text."""
    monkeypatch.delenv(remembered.VARIABLE)
    for folder in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(folder, str(tmp_path))
    remembered.remember("a", COSTS)
    assert remembered.recall("a") is None
    pair().generate(IDS, **CALL)
    assert list(tmp_path.iterdir()) == []
