"""The house: how many files tell the story, and names that have moved. Who imports whom is checked by `make lint`."""

import importlib
from pathlib import Path

import pytest

import assisted

PACKAGE = Path(assisted.__file__).parent
MOVED = {
    "assisted.bench.diagnosis": "assisted.doctor.diagnosis",
    "assisted.bench.doctor": "assisted.doctor.examine",
    "assisted.bench.findings": "assisted.doctor.findings",
    "assisted.controller": "assisted.lengths.adaptive",
    "assisted.law": "assisted.distribution",
    "assisted.quantization": "assisted.loading.quantization",
}


def test_the_story_is_told_in_few_files():
    assert len(list(PACKAGE.glob("*.py"))) <= 17


def test_every_wing_says_what_it_is_for():
    for room in PACKAGE.glob("*/__init__.py"):
        assert importlib.import_module(f"assisted.{room.parent.name}").__doc__


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_documented_names_that_moved_are_still_there(old, new):
    moved = importlib.import_module(new)
    spec = moved.__spec__
    assert importlib.import_module(old) is moved
    assert moved.__spec__ is spec
    assert moved.__name__ == new
