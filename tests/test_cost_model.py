"""lengths/cost_model.py: the one formula, compared with the sum that it stands for and with other places that use it."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assisted.lengths.cost_model import best_speedup, expected_tokens, speedup, verify_cost

ROOT = Path(__file__).parent.parent
SHARES = st.floats(0, 1)
LENGTHS = st.integers(0, 12)


@given(SHARES, LENGTHS)
def test_expected_tokens_is_the_sum(a: float, g: int) -> None:
    assert expected_tokens(a, g) == pytest.approx(sum(a**k for k in range(g + 1)))


@given(SHARES, st.floats(0.001, 1))
def test_the_choice_of_exits_uses_the_same(a: float, c: float) -> None:
    assert best_speedup(a, c) == pytest.approx(max(speedup(a, c, g) for g in range(1, 9)))


@given(LENGTHS, st.integers(1, 256), st.floats(0.001, 0.3))
def test_a_batch_is_linear_in_its_positions(g: int, rows: int, w: float) -> None:
    """Notebook 12: T(m) = t0 + t1 m, with T(1) = 1."""

    def seconds(positions: int) -> float:
        return (1 - w) + w * positions

    assert verify_cost(g, rows, w) == pytest.approx(seconds(rows * (g + 1)) / seconds(rows))


def test_of_notebook_12() -> None:
    """One row and 100 rows of its toy machine: 20 + m milliseconds a pass, drafted tokens at a twentieth."""
    w, c = 1 / 21, 0.05
    assert speedup(0.8, c, 4, verify_cost(4, 1, w)) == pytest.approx(2.42, abs=0.01)
    assert speedup(0.8, c, 4, verify_cost(4, 100, w)) == pytest.approx(0.74, abs=0.01)


def test_the_page_brings_values_of_these_functions() -> None:
    """The site check compares the page's script with them."""
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(ROOT / "docs_hooks.py"))
    table = json.loads(re.sub(r"</?script[^>]*>", "", hooks["_values"]()))
    assert len(table) > 100
    for a, c, g, rows, w, tokens, verify, times in table:
        assert (tokens, verify) == (expected_tokens(a, g), verify_cost(g, rows, w))
        assert times == speedup(a, c, g, verify)
