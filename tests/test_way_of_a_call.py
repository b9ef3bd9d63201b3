"""How much of the package one call runs: a greedy `generate` with a draft model, after the call that prepared the pair."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

import assisted
import docs_drawings
from assisted import AssistedModelForCausalLM

PACKAGE = Path(assisted.__file__).parent
CEILINGS = {"eager": (52, 2900), "auto": (62, 3770)}
"""By `fast`: files, and lines of the functions entered in them, docstrings included. On a Zen 4 they are 50 and 2,760, 58 and
3,470; other processors run other products. Lower them whenever the call allows."""


def lines_run(call):
    """The lines of this package's functions that a call enters, by file."""
    codes = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    lines = {}
    for code in codes:
        if PACKAGE in Path(code.co_filename).parents:
            source, first = inspect.getsourcelines(code)
            own = lines.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), set())
            own.update(range(first, first + len(source)))
    return lines


@pytest.mark.parametrize("fast", CEILINGS)
def test_a_call_runs_few_files(fast):
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", draft_length=4, fast=fast)
    ids = torch.arange(5, 17)[None]

    def call():
        pair.generate(ids, max_new_tokens=24, do_sample=False)

    call()  # the trials and copies of the first call are made once
    lines = lines_run(call)
    files, total = CEILINGS[fast]
    told = {name: len(own) for name, own in sorted(lines.items(), key=lambda item: -len(item[1]))}
    assert len(lines) <= files, told
    assert sum(told.values()) <= total, told
    assert {file for files in docs_drawings.WAY.values() for file, _ in files} <= told.keys()  # what the page draws
