"""Memory over many calls: the case that draws the curve, run for a while."""

import pytest

from tests.test_bench_scripts import script


@pytest.mark.slow
def test_memory_reaches_a_plateau(monkeypatch):
    shared = script("shared", monkeypatch)
    curve = shared.Worker("cases.memory", "readings", "auto", 600, 64, threads=1).answer()
    assert curve[-1] < 1.06 * curve[len(curve) // 2]
