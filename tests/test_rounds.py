"""What a draft-verify step asks of the host of a GPU, counted with recorded captures: it may only become less."""

import importlib
import sys
from pathlib import Path

import pytest

# by rows: operations outside of captured functions, reads by the host, and replays, of a round
MOST = {
    ("draft model, 4 tokens", "greedy"): {1: (15, 1, 2), 4: (19, 1, 2)},
    ("draft model, 4 tokens", "sampled"): {1: (18, 1, 3), 4: (22, 1, 3)},
    ("draft model, adaptive", "greedy"): {1: (15.9, 1.2, 2), 4: (19, 1, 2)},
    ("EAGLE-3 chain, adaptive", "greedy"): {1: (23, 1, 3)},
    ("suffix, 4 tokens", "greedy"): {1: (10.6, 1, 1), 4: (12.6, 1, 1)},
    ("suffix, 4 tokens", "sampled"): {1: (11, 1, 2), 4: (13.1, 1, 2)},
    ("early exit, 4 tokens", "greedy"): {1: (18, 1, 2), 4: (22, 1, 2)},
    ("early exit, 4 tokens", "sampled"): {1: (21, 1, 3), 4: (25, 1, 3)},
    ("Medusa, 4 tokens", "greedy"): {1: (18.2, 2, 2.3), 4: (20.1, 2, 2.3)},
    ("Medusa, 4 tokens", "sampled"): {1: (26.5, 2.2, 3.5), 4: (26.2, 2.1, 3.8)},
    ("EAGLE-3, 4 tokens", "greedy"): {1: (48, 5, 7), 4: (52, 5, 7)},
    ("EAGLE-3, 4 tokens", "sampled"): {1: (26, 1, 4), 4: (30, 1, 4)},
    ("EAGLE-3, adaptive", "greedy"): {1: (54.5, 11.5, 6.8)},
    ("EAGLE-3 chain, 4 tokens", "greedy"): {1: (23, 1, 3), 4: (27, 1, 3)},
    ("EAGLE-3 chain, 4 tokens", "sampled"): {1: (26, 1, 4), 4: (30, 1, 4)},
}
CASES = [
    pytest.param(
        draft,
        call,
        rows,
        marks=pytest.mark.slow if (call, rows) != ("greedy", 1) and not draft.startswith("draft") else (),
    )
    for (draft, call), by_rows in MOST.items()
    for rows in by_rows
]


@pytest.mark.parametrize(("draft", "call", "rows"), CASES)
def test_a_round_asks_no_more_of_the_host(draft, call, rows, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    case, most = importlib.import_module("cases.rounds"), MOST[draft, call][rows]
    found = case.per_round(*case.DRAFTS[draft], case.CALLS[call], rows, new_tokens=64 if "adaptive" in draft else 32)
    for name, limit in zip(case.SHOWN, most, strict=False):
        assert found[name] <= limit + 0.05, f"{name}: {found[name]} a round, where there were {limit}"
        assert found[name] > 0.9 * limit - 0.05, f"{name}: only {found[name]} a round now; lower {limit} in this table"


@pytest.mark.parametrize("rows,most", [(1, (12.6, 1, 2)), pytest.param(4, (14.6, 1, 2), marks=pytest.mark.slow)])
def test_a_round_of_a_hybrid(rows, most, monkeypatch):
    """Eagerly it takes 822 operations. One of the replays moves the states."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    case = importlib.import_module("cases.rounds")
    found = case.per_round("suffix", 4, case.CALLS["greedy"], rows, new_tokens=32, target="zoo:hybrid")
    for name, limit in zip(case.SHOWN, most, strict=False):
        assert 0.9 * limit - 0.05 < found[name] <= limit + 0.05, f"{name}: {found[name]} a round, not {limit}"
