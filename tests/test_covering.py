"""The cover leaves no pair of argument and trait out that the product has, and nothing more is slow than it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from architectures import ARCHITECTURES, RECURRENT
from covering import PARTS, cases, cover, each_once, goals_of, nothing_else, traits
from methods import METHODS
from test_methods import trees_once


def split(params: list[Any]) -> tuple[list[Any], list[Any]]:
    """The cases that run, and all."""
    return [param.values for param in params if not param.marks], [param.values for param in params]


@pytest.mark.parametrize(
    ("arguments", "also"),
    [((METHODS,), trees_once), (("ab", "xyz"), each_once), ((), nothing_else)],
    ids=["methods", "two arguments", "architectures alone"],
)
def test_every_pair_is_met(arguments: Any, also: Any) -> None:
    run, everything = split(cases([*ARCHITECTURES, *RECURRENT], *arguments, also=also))
    met = set().union(*(goals_of(case, also) for case in run))
    assert met == set().union(*(goals_of(case, also) for case in everything))
    assert len(run) < len(everything) / 2


def test_chains_and_trees_meet_every_trait_and_every_architecture_a_tree() -> None:
    """And every kind of method all that differs in the parts of a target, and every method every kind of mask."""
    run, _ = split(cases(ARCHITECTURES, METHODS, also=trees_once))
    known = set().union(*map(traits, ARCHITECTURES))

    def lacking(name: str, of: Callable[[Any], Any], *starts: str) -> set[str]:
        return {t for t in known - set().union(*(traits(a) for a, m in run if of(m) == name)) if t.startswith(starts)}

    for method in METHODS:
        assert not lacking(method.kinds[1], lambda m: m.kinds[1], "")
        assert not lacking(method.kinds[0], lambda m: m.kinds[0], *PARTS)
        assert not lacking(method.name, lambda m: m.name, "masks", "attention")
    for architecture in ARCHITECTURES:
        assert any(m.tree and not m.refuses(a) for a, m in run if a is architecture)


def test_the_search_is_greedy_and_the_same_every_time() -> None:
    goals = [{1, 2}, {3}, {1, 2, 3}, {4}, {3, 4}, set()]
    assert cover(goals) == {2, 3}
    assert [param.marks for param in cases(ARCHITECTURES)] == [param.marks for param in cases(ARCHITECTURES)]


def test_what_architectures_differ_in_is_read_from_their_configs() -> None:
    of = {architecture.name: traits(architecture) for architecture in ARCHITECTURES}
    assert {"masks 4d", "positions rotary", "keys shared by heads", "mlp dense"} <= of["llama"]
    assert {"masks dict", "layers sliding_attention", "softcap", "attention eager"} <= of["gemma2"]
    assert {"positions ALiBi", "masks 2d", "ALiBi from the cumulative sum of the 2-D mask"} <= of["bloom"] & of[
        "falcon-alibi"
    ]
    assert {"keys latent", "mlp routed"} <= of["deepseek_v2"]
    assert {"positions learned, or none", "embedding tied"} <= of["gpt2"]
