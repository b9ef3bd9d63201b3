"""A model's own `generate` with a saved pair's folder as `custom_generate`, as code does that holds a model and no pair."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from pairs import CALL, no_fallback, pair, prompt
from test_threads import in_threads
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import DraftingStopped
from assisted.lab.handover.custom_generate import report_of

HOSTED: dict[str, Any] = CALL | {"trust_remote_code": True}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies code into a folder of the user's."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def saved(folder: Path, draft: Any, **kwargs: Any) -> tuple[Any, str]:
    """A target, and the folder of a pair."""
    target = copy.deepcopy(pair()[0])
    AssistedModelForCausalLM.from_models(target, draft, draft_length=4).save_pretrained(
        folder, custom_generate=True, **kwargs
    )
    return target, str(folder)


@pytest.mark.parametrize("draft", ["suffix", "early-exit:1", ["ngram", "recycle"], "a model"], ids=str)
def test_the_text_is_plain_and_drafted(draft: Any, tmp_path: Path) -> None:
    target, folder = saved(tmp_path / "pair", pair()[1].drafter.model if draft == "a model" else draft)
    ids = prompt(3)["ids"]
    expected = target.generate(ids, **CALL)
    assert report_of(target) is None
    for _ in range(2):
        with no_fallback(DraftingStopped):
            text = target.generate(ids, custom_generate=folder, **HOSTED)
        assert text.tolist() == expected.tolist()
        report = report_of(target)
        assert report is not None and report.drafted > 0 and report.way == "shortcuts"
    assert target.generate(ids, **CALL).tolist() == expected.tolist()  # without it, the model is as before


def test_arguments_reach_the_pair(tmp_path: Path) -> None:
    target, folder = saved(tmp_path / "pair", "suffix")
    ids = prompt()["ids"]
    target.generate(ids, custom_generate=folder, draft_length=2, draft="recycle", **HOSTED)
    report = report_of(target)
    assert report is not None and report.drafted > 0 and len(report.acceptance_by_position) <= 2
    target.generate(ids, custom_generate=folder, assisted=False, **HOSTED)
    report = report_of(target)
    assert report is not None and report.drafted == 0 and report.way == "plain"
    with pytest.raises(ValueError, match="sufix"):
        target.generate(ids, custom_generate=folder, draft="sufix", **HOSTED)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(ids, custom_generate=folder, trust_remote_code=False, **CALL)


def test_sampled_text_is_the_pairs(tmp_path: Path) -> None:
    target, folder = saved(tmp_path / "pair", pair()[1].drafter.model)
    ids, sampled = prompt()["ids"], {"do_sample": True, "top_k": 5}
    own = AssistedModelForCausalLM.from_models(pair()[0], pair()[1].drafter.model, draft_length=4)
    torch.manual_seed(3)
    expected = own.generate(ids, **(CALL | sampled))
    torch.manual_seed(3)
    assert target.generate(ids, custom_generate=folder, **(HOSTED | sampled)).tolist() == expected.tolist()


def test_a_repository_whose_model_has_the_entry(tmp_path: Path) -> None:
    """transformers puts the function in place of the model's `generate`, which the pair calls again."""
    target, _ = saved(tmp_path / "pair", "suffix")
    target.save_pretrained(tmp_path / "repo")
    (tmp_path / "pair" / "custom_generate").rename(tmp_path / "repo" / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "repo", trust_remote_code=True)
    ids = prompt()["ids"]
    assert model.generate(ids, **CALL).tolist() == target.generate(ids, **CALL).tolist()
    report = report_of(model)
    assert report is not None and report.drafted > 0
    expected = target.generate(ids, **CALL).tolist()
    assert in_threads(lambda number: model.generate(ids, **CALL).tolist(), 3) == [expected] * 3
    assert model.generate(ids, num_beams=2, **CALL).tolist() == target.generate(ids, num_beams=2, **CALL).tolist()


def test_copies_make_their_own(tmp_path: Path) -> None:
    target, folder = saved(tmp_path / "pair", "suffix")
    ids = prompt()["ids"]
    expected = target.generate(ids, custom_generate=folder, **HOSTED).tolist()
    other = copy.deepcopy(target)
    assert report_of(other) is None
    assert other.generate(ids, custom_generate=folder, **HOSTED).tolist() == expected
    assert pickle.loads(pickle.dumps(vars(target)["_assisted_pair"])).pair is None


def test_no_path_of_this_machine_is_written(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "pair", pair()[1].drafter.model)
    text = (Path(folder) / "custom_generate" / "generate.py").read_text()
    assert str(tmp_path) not in text and "draft-model" in text
    AssistedModelForCausalLM.from_models(pair()[0]).save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other" / "custom_generate").exists()
    with pytest.raises(ValueError, match="hf upload"):
        pair()[1].save_pretrained(tmp_path / "pushed", push_to_hub=True, custom_generate=True)


def test_without_the_package_the_error_names_it(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "pair", "suffix")
    code = "import sys; sys.modules['assisted'] = None; import runpy; runpy.run_path(sys.argv[1])"
    run = fresh.run(code, Path(folder) / "custom_generate" / "generate.py")
    assert run.returncode != 0 and "custom_generate: the Python package `assisted`" in run.stderr
