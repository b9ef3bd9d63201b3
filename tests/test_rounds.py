"""What a draft-verify step asks of the host of a GPU, counted with recorded captures: it may only become less."""

import importlib
import sys
from pathlib import Path

import pytest

# by rows: operations outside of captured functions, reads by the host, and replays, of a round
MOST = {
    ("draft model, 4 tokens", "greedy"): {1: (12, 1, 2), 4: (14, 1, 2)},
    ("draft model, 4 tokens", "sampled"): {1: (15, 1, 3), 4: (17, 1, 3)},
    ("draft model, adaptive", "greedy"): {1: (12, 1, 2), 4: (14, 1, 2)},
    ("suffix, 4 tokens", "greedy"): {1: (8.2, 1, 1), 4: (9.2, 1, 1)},
    ("suffix, 4 tokens", "sampled"): {1: (8, 1, 2), 4: (9.2, 1, 2)},
    ("early exit, 4 tokens", "greedy"): {1: (15, 1, 2), 4: (17, 1, 2)},
    ("early exit, 4 tokens", "sampled"): {1: (18, 1, 3), 4: (20, 1, 3)},
    ("Medusa, 4 tokens", "greedy"): {1: (16.9, 1, 2.3), 4: (17.9, 1, 2.3)},
    ("Medusa, 4 tokens", "sampled"): {1: (19, 1, 3), 4: (20.6, 1, 3)},
    ("EAGLE-3, 4 tokens", "greedy"): {1: (21.2, 1, 2.2), 4: (23, 1, 2.2)},
    ("EAGLE-3, 4 tokens", "sampled"): {1: (21, 1, 3), 4: (23, 1, 3)},
    ("EAGLE-3, adaptive", "greedy"): {1: (21.8, 1, 2.3)},
    ("EAGLE-3 chain, 4 tokens", "greedy"): {1: (18, 1, 2), 4: (20, 1, 2)},
    ("EAGLE-3 chain, 4 tokens", "sampled"): {1: (21, 1, 3), 4: (23, 1, 3)},
    ("EAGLE-3 chain, adaptive", "greedy"): {1: (18, 1, 2)},
    ("suffix + EAGLE-3, 4 tokens", "greedy"): {1: (13.4, 1, 1.2)},
    # what suffix adds to a chain of the head is looked up on the host, which reads the chain for it
    ("suffix + EAGLE-3, 4 tokens", "sampled"): {4: (24, 2, 3)},
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


@pytest.mark.parametrize("rows,most", [(1, (9.1, 1, 2)), pytest.param(4, (10.1, 1, 2), marks=pytest.mark.slow)])
def test_a_round_of_a_hybrid(rows, most, monkeypatch):
    """Eagerly it takes 822 operations. One of the replays moves the states."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path])
    case = importlib.import_module("cases.rounds")
    found = case.per_round("suffix", 4, case.CALLS["greedy"], rows, new_tokens=32, target="zoo:hybrid")
    for name, limit in zip(case.SHOWN, most, strict=False):
        assert 0.9 * limit - 0.05 < found[name] <= limit + 0.05, f"{name}: {found[name]} a round, not {limit}"
