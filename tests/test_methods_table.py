"""The table of methods: the page has what the code declares, and the methods do what they declare."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assistant_heads import random_assistant
from block_heads import random_block
from methods import in_parallel
from methods_table import LINES, PAGE, Line, section, table, tree_option
from mtp_heads import random_mtp
from pairs import said_by
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from assisted import MTP, Assistant, AssistedModelForCausalLM, Candidates, DFlash, Merged, zoo
from assisted.core.drafts import Draft, DraftingStopped
from assisted.methods import METHODS, Target, parse
from assisted.methods.shared.guarded import Guarded

PROMPT = "def mean(values):\n    total = 0\n    for value in values:\n        total"
NAMES = {
    "Candidates": Candidates,
    "Merged": Merged,
    "PromptLookupCandidateGenerator": PromptLookupCandidateGenerator,
}


@functools.cache
def shipped() -> Any:
    """The shipped target. Nobody changes it."""
    return AssistedModelForCausalLM.from_pretrained("zoo:target", dtype=torch.float32).target


NEEDS_BACKEND = {"self"}
# in a family of quantization that every CPU has; the shipped target has no MTP head, block drafter or assistant
DRAFTS: dict[str, Callable[[], Any]] = {
    "self": lambda: "self:int8-torchao",
    "pard": lambda: in_parallel(AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype="float32")),
    "mtp": lambda: MTP(random_mtp(shipped())),
    "dflash": lambda: DFlash(random_block(shipped())),
    "assistant": lambda: Assistant(random_assistant(shipped()), nodes=4),
}


@pytest.mark.documents
def test_the_page_has_the_table_that_the_code_makes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, stop = section(text)
    assert text[start:stop] == table(), "run python tests/methods_table.py"


@pytest.mark.documents
def test_every_method_has_a_line() -> None:
    assert {line.method for line in LINES} == set(METHODS)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.title)
def test_what_is_written_is_that_method(line: Line) -> None:
    for code in {*re.findall(r"`([^`]+)`", line.written), *filter(None, [line.example])}:
        assert type(parse(eval(code, NAMES))) is METHODS[line.method]


@pytest.mark.parametrize("name", METHODS)
def test_what_is_trained_is_read_from_somewhere(name: str) -> None:
    """Heads are named by where they lie; there are no others, so they cannot be left out."""
    spec = METHODS[name]
    required = [f for f in dataclasses.fields(spec) if f.default is f.default_factory is dataclasses.MISSING]
    assert spec.trained == ([field.name for field in required] == ["path"]) or spec.trained is None


def lines() -> list[Any]:
    return [
        pytest.param(line, id=line.title, marks=[pytest.mark.quant] if line.method in NEEDS_BACKEND else [])
        for line in LINES
    ]


@pytest.mark.parametrize("line", lines())
def test_methods_do_what_they_declare(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    example = line.example or re.findall(r"`([^`]+)`", line.written)[0]
    spec = parse(DRAFTS[line.method]() if line.method in DRAFTS else eval(example, NAMES))
    seen: list[Draft] = []
    propose = Guarded.propose

    def remembered(*args: Any) -> Draft:
        draft = propose(*args)
        if draft.width:
            seen.append(draft)
        return draft

    monkeypatch.setattr(Guarded, "propose", remembered)
    spec = spec.chosen(Target(shipped(), path="zoo:target"))
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    one = tokenizer(PROMPT, return_tensors="pt")
    three = tokenizer([PROMPT, "import os\n\nfor name in os.", "class Queue:\n"], return_tensors="pt", padding=True)

    def run(draft: Any, inputs: Any, **call: Any) -> tuple[list[Draft], torch.Tensor]:
        model = AssistedModelForCausalLM.from_models(shipped(), draft, draft_length=3, tokenizer=tokenizer)
        seen.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=DraftingStopped)
            output = model.generate(**inputs, max_new_tokens=16, **call)
        if not call["do_sample"]:  # exact
            assert output.tolist() == said_by(shipped(), **inputs, max_new_tokens=16, **call).tolist()
        assert seen
        return list(seen), output

    # trees: with the default options where the target is greedy, and with the option where there is one
    drafts, _ = run(spec, one, do_sample=False)
    usual = any(draft.parents is not None for draft in drafts)
    has_option = any(field.name == "tree" for field in dataclasses.fields(spec))  # type: ignore[arg-type]
    if spec.trees is None:
        assert not usual  # the parts named on the page draft chains
    else:
        assert usual == (spec.trees and tree_option(type(spec)) is not False)
    if has_option:
        drafts, _ = run(dataclasses.replace(spec, tree=True), one, do_sample=False)  # type: ignore[type-var]
        assert any(draft.parents is not None for draft in drafts) == spec.trees

    # batches: every row has drafts of its own
    drafts, output = run(spec, three, do_sample=False)
    assert len(output) == 3
    assert torch.stack([draft.lengths > 0 for draft in drafts]).any(0).sum() > 1

    # sampling: a distribution of the drafted tokens, or none
    torch.manual_seed(0)
    drafts, _ = run(spec, one, do_sample=True, temperature=0.7)
    with_distribution = any(draft.q is not None for draft in drafts)
    if spec.has_q is not None:
        assert with_distribution == spec.has_q
