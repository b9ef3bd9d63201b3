"""Targets that are divided between two processes (tensor parallel, gloo on a CPU): both write what plain `generate` writes, and
take every decision alike."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import half_right
from pairs import CALL, pair, prompt
from ranks import TOKENS, whole
from test_docs import blocks
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from assisted.core.drafts import Draft, DraftingStopped
from assisted.core.text import Text
from assisted.engine import trust
from assisted.engine.prepared import CallSettings
from assisted.engine.ranks import ALONE, Ranks, fingerprint, ranks_of
from assisted.methods.shared.base import Drafting
from assisted.methods.shared.guarded import Agreed

SECONDS = 500  # both processes import torch on what may be a busy machine; a process that waits in vain gives up sooner


def torchrun(script: Path, *args: str) -> str:
    """What two processes that run a script print. Fails unless both end well in time."""
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        *args,
    ]
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-5000:]
    return said


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcomes of all cases of ranks.py, by process."""
    folder = tmp_path_factory.mktemp("ranks")
    whole().save_pretrained(folder / "target")
    half_right(whole(), noise=0.05).save_pretrained(folder / "draft")
    torchrun(Path(__file__).parent / "ranks.py", str(folder))
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
    return first, second


@pytest.mark.slow
class TestTwoProcesses:
    def test_have_the_same_outcomes(self, found) -> None:
        first, second = found
        # these also say what was warned of, and who wrote a file
        different = {"with_a_drafter_that_fails", "with_other_files"}
        assert {name for name in first if first[name] != second[name]} == different

    def test_write_the_text_of_plain_generate(self, found) -> None:
        plain = found[0]["plainly"]
        for name, outcome in found[0]["greedily"].items():
            assert outcome["text"] == plain["rows" if name.endswith(", rows") else "text"], name
            assert any(map(any, outcome["rounds"])), name
        for name in ("draft model", "draft tree", "recycle", "several", "layer skip", "medusa", "draft model, rows"):
            assert found[0]["greedily"][name]["accepted"] > 0, name
        assert found[0]["loaded"] == {"text": plain["text"], "parts": 2, "draft's": 1}

    def test_decide_alike_with_other_clocks(self, found) -> None:
        outcomes = found[0]["with_other_clocks"]
        plain = outcomes.pop("text")
        for name, outcome in outcomes.items():
            assert outcome["text"] == plain, name
            assert len({tuple(drafted) for drafted in outcome["rounds"]}) > 1, name  # drafting was switched off and on

    def test_decide_alike_with_other_remembered_costs(self, found) -> None:
        first, second = (process["with_other_files"] for process in found)
        assert (first.pop("file"), second.pop("file")) == (True, False)
        assert first == second
        assert first["text"] == found[0]["plainly"]["text"]

    def test_draw_the_same_samples(self, found) -> None:
        outcomes = found[0]["sampled"]
        assert len(outcomes.pop("rows")["text"]) == 3
        for name, outcome in outcomes.items():
            assert outcome["text"] == outcome["in one piece"], name
        assert outcomes["draft model"]["accepted"] > 0

    def test_share_the_seed_of_the_first(self, found) -> None:
        outcome = found[0]["sampled_with_other_seeds"]
        assert len(outcome["text"][0]) == prompt_length(found) + TOKENS
        assert len(outcome["warned"]) == 1

    def test_stop_at_the_same_token(self, found) -> None:
        text = found[0]["with_other_criteria"]["text"][0]
        assert text == found[0]["plainly"]["text"][0][: prompt_length(found) + 10]

    def test_stop_drafting_together(self, found) -> None:
        first, second = (process["with_a_drafter_that_fails"] for process in found)
        assert [len(first.pop("warned")), len(second.pop("warned"))] == [1, 1]
        assert first == second
        assert first["text"] == found[0]["plainly"]["text"]
        assert first["rounds"][:7] == [[1], [1], [1], [1], [0], [1], [1]]  # in the fifth round they drafted differently
        assert not any(map(any, first["rounds"][7:]))

    def test_refuse_what_would_go_wrong(self, found) -> None:
        assert found[0]["with_other_prompts"]["error"].startswith("input_ids: ")
        assert found[0]["copies"]["error"].startswith("draft: 'self:int8' ")


@pytest.mark.slow
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "howto" / "offload.md").read_text(encoding="utf-8")
    (script,) = [block.text for block in blocks(page) if "torch.distributed" in block.text]
    (tmp_path / "tp.py").write_text(script)
    said = torchrun(tmp_path / "tp.py")
    assert said.count("def mean(values):") == 1
    assert "48 new tokens" in said


def prompt_length(found: tuple[dict[str, Any], dict[str, Any]]) -> int:
    return len(found[0]["plainly"]["text"][0]) - TOKENS


class Other(Ranks):
    """A process beside another one, which has other values of some facts."""

    def __init__(self, agrees: list[bool]):
        super().__init__()
        self.several, self.agrees = True, agrees

    def agree(self, *facts: int) -> list[bool]:
        return self.agrees


class OneToken(Drafting):
    def propose(self, text: Text, budget: int) -> Draft:
        return Draft(torch.tensor([[5]]), torch.tensor([1]))


def proposed(agrees: list[bool]) -> tuple[Draft, Agreed]:
    """What a process proposes beside another one, and its drafting afterwards."""
    text = Text(prompt()["ids"], StoppingCriteriaList([MaxLengthCriteria(30)]), None, None)
    drafting = Agreed(OneToken(), CallSettings(ranks=Other(agrees)), 99, text, False)
    return drafting.propose(text, 1), drafting


def test_a_process_alone_exchanges_nothing() -> None:
    assert ranks_of(pair()[0]) is ALONE
    assert ALONE.largest([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.agree(1, 2) == [True, True]
    assert ALONE.first("it") == "it"
    assert not ALONE.share_generator(torch.device("cpu"))
    assert ALONE.may_go_on(torch.OutOfMemoryError())


def test_data_parallel_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes with other texts, which wait for each other in every forward pass: transformers sets `synced_gpus`."""
    target, model = pair()
    for name in ("transformers.generation.utils", "assisted.engine.ranks"):
        monkeypatch.setattr(f"{name}.is_fsdp_managed_module", lambda module: True)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *group: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(trust, "_is_own_file", lambda file: True)  # torch's own, where there are processes
    ids = prompt()["ids"]
    with pytest.warns(DraftingStopped, match="every process must run"):
        text = model.generate(ids, **CALL)
    assert text.tolist() == target.generate(ids, **CALL).tolist()


def test_other_texts_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="different texts"):
        proposed([False, True, True])


def test_other_drafts_are_not_verified() -> None:
    draft, drafting = proposed([True, False, True])
    assert draft.width == 0
    assert drafting.drafting is not None
    assert proposed([True, True, True])[0].width == 1


def test_a_failure_elsewhere_stops_drafting() -> None:
    with pytest.warns(DraftingStopped, match="another process"):
        _, drafting = proposed([True, False, False])
    assert drafting.drafting is None
    assert drafting.settings.warnings == ["Drafting failed in another process; continuing without drafts."]


def test_out_of_memory_is_raised_where_others_wait() -> None:
    assert not Other([]).may_go_on(torch.OutOfMemoryError())
    assert Other([]).may_go_on(ValueError())


def test_fingerprints_differ() -> None:
    assert fingerprint([1, 2], None) == fingerprint([1, 2], None) != fingerprint([2, 1], None)
    assert fingerprint([[1]], [2]) != fingerprint([[1], [2]])
