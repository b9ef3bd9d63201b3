"""A pair is saved with whatever drafts for it and drafts the same when it is read; every option of every draft survives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from methods import METHODS, Method
from pairs import CALL, pair, prompt
from test_methods import assisted_without_fallback
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM, EarlyExit, LayerSkip
from assisted.methods import METHODS as SPECS
from assisted.methods import parse, read

OF_A_FOLDER = ("pard", "eagle-1, chains", "eagle-3, trees", "mtp, chains", "assistant, trees", "dflash, chains")


def test_a_model_card_says_what_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AssistedModelForCausalLM.from_models(pair()[0], draft="suffix")
    for origin, base in ((str(tmp_path), None), ("somebody/something", "somebody/something")):
        monkeypatch.setattr(model.target, "name_or_path", origin)
        model.save_pretrained(tmp_path)
        card = ModelCard.load(tmp_path / "README.md")
        assert (card.data.library_name, card.data.tags) == ("transformers", ["assisted", "speculative-decoding"])
        assert card.data.base_model == base and str(tmp_path) not in card.content
        (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_pushed_pair_is_tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", lambda self, name, **kwargs: pushed.append((name, kwargs)))
    model = AssistedModelForCausalLM.from_models(pair()[0], draft="suffix")
    model.push_to_hub("me/mine", private=True, tags=["code"])
    assert pushed == [("me/mine", {"private": True, "tags": ["assisted", "speculative-decoding", "code"]})]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_pair_is_saved_with_its_draft(method: Method, tmp_path: Path) -> None:
    target = pair()[0]
    model = AssistedModelForCausalLM.from_models(target, draft=method.draft(target), draft_length=4)
    model.save_pretrained(tmp_path)
    again = AssistedModelForCausalLM.from_pretrained(tmp_path)
    assert type(again.drafter) is type(model.drafter)
    for mine, theirs in zip(model.drafter.modules, again.drafter.modules, strict=True):
        ours, read_back = mine.state_dict(), theirs.state_dict()
        assert ours.keys() == read_back.keys()
        assert all(weight.equal(read_back[name]) for name, weight in ours.items())
    texts = [assisted_without_fallback(one, prompt()["ids"], **CALL).tolist() for one in (model, again)]
    assert texts[0] == texts[1]
    if model.drafter.modules and not method.tree:  # the size of a tree depends on time
        assert again.report.accepted == model.report.accepted
    if method.name in OF_A_FOLDER:
        named = [] if method.name == "pard" else [f"{model.spec.name}:{tmp_path / 'draft'}"]
        for draft in (str(tmp_path / "draft"), *named):
            by_path = AssistedModelForCausalLM.from_models(target, draft=draft)
            assert type(by_path.drafter) is type(model.drafter)


def another(option: dataclasses.Field[Any]) -> Any:
    """A value that is not the default of an option."""
    kind, default = str(option.type), option.default
    if "bool" in kind:
        return default is not True
    if "int" in kind:
        return 5 if default is None else default // 2
    if "float" in kind:
        return 0.5 if default == 0 else default / 2
    return {"position": "last", "quantization": "int8"}[option.name]


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("candidates", "combined", "merged", "auto")])
def test_every_option_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    kind: Any = SPECS[name]
    options = {
        one.name: another(one)
        for one in dataclasses.fields(kind)
        if one.metadata.get("saved", True) and one.name not in ("model", "path", "tokenizer", "corpus", "memory_file")
    }
    where = {} if kind.stored is None else {kind.stored[0]: "./a"}
    spec = kind(**where, **options)
    found: Any = read(json.loads(json.dumps(spec.written("draft"))), tmp_path)
    assert type(found) is kind
    assert {option: getattr(found, option) for option in options} == options


def test_a_number_in_a_string() -> None:
    assert parse("layer-skip:0.3") == LayerSkip(0.3) and parse("early-exit:2") == EarlyExit(2)
