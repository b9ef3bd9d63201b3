"""Which architectures meet which arguments: every argument meets every trait of an architecture, not every architecture.

A test over a product runs the cases of a pairwise cover in `make test`. The others are `slow`, so `make test-all` runs the
product. Traits are read from the entries of architectures.py and from their configs, so that a new entry brings its own.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import pytest
from architectures import Architecture

PARTS = ("masks", "attention", "keys", "layers")
"""How traits begin that differ in what a method that runs parts of a target, or reads its keys, has to do."""
Goals = Callable[..., Iterable[Hashable]]


@functools.cache
def traits(architecture: Architecture) -> frozenset[str]:
    """What tells this architecture from others, as far as drafting, masks, caches and parts of models are concerned."""
    config = architecture.make().get_text_config()
    read = functools.partial(getattr, config)
    heads = read("num_attention_heads", 0)
    keys = next((n for name in ("num_key_value_heads", "num_kv_heads") if (n := read(name, None))), heads)
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    found = {
        f"masks {architecture.masks}",
        f"attention {architecture.attention}",
        f"positions {_positions(architecture)}",
        f"keys {'latent' if read('kv_lora_rank', None) else 'shared by heads' if keys < heads else 'of every head'}",
        f"embedding {'tied' if config.tie_word_embeddings else 'untied'}",
        f"mlp {'routed' if any(read(name, None) for name in experts) or hasattr(config, 'ffn_config') else 'dense'}",
    }
    found |= {f"layers {kind}" for kind in set(read("layer_types", None) or ())}
    found |= {"softcap"} if any(read(f"{of}_logit_softcapping", None) for of in ("attn", "final")) else set()
    found |= {f"states {kind}" for kind in ("mamba_d_state", "state_size", "linear_key_head_dim") if read(kind, None)}
    found |= {architecture.note} if architecture.note else set()  # it is peculiar
    return frozenset(found)


def _positions(architecture: Architecture) -> str:
    config = architecture.make().get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not architecture.positions:
        return "ALiBi"
    if getattr(config, "no_rope_layers", None):
        return "rotary in some layers"
    if getattr(config, "rotary_dim", None) is not None:
        return "rotary in part"
    if rope is None:
        return "learned, or none"
    if "rope_type" not in rope:
        return "rotary by layer type"
    if rope["rope_type"] != "default":
        return "rotary, scaled"
    return "rotary in part" if rope.get("partial_rotary_factor", 1.0) < 1 else "rotary"


def label(value: Any) -> str:
    if isinstance(value, tuple):
        return " + ".join(map(label, value))
    return str(getattr(value, "name", getattr(value, "__name__", value)))


def goals_of(case: Sequence[Any], also: Goals) -> set[Hashable]:
    """What a case (architecture, *arguments) shows: pairs of argument and trait, pairs of arguments, and the architecture.

    Of arguments that have `kinds`, the last one, the way of verifying, meets every trait, the others those of `PARTS`, and each
    argument every kind of mask and attention.
    """
    architecture, *arguments = case
    names = [(place, label(argument)) for place, argument in enumerate(arguments)]
    kinds = [getattr(one, "kinds", (label(one),)) for one in arguments]
    met = traits(architecture)
    parts = [trait for trait in met if trait.startswith(PARTS)]
    found: set[Hashable] = set() if names else set(met)
    for place, (*first, last) in enumerate(kinds):
        found |= set(itertools.product([(place, last)], met)) | set(
            itertools.product([(place, one) for one in first], parts)
        )
    found |= set(itertools.product(names, [trait for trait in met if trait.startswith(("masks", "attention"))]))
    return found | set(itertools.combinations(names, 2)) | set(also(*case))


def cover(goals: Sequence[set[Hashable]]) -> set[int]:
    """The cases that a greedy search takes until every goal of any case is met."""
    missing = set().union(*goals)
    heap = [(-len(found), case) for case, found in enumerate(goals)]
    heapq.heapify(heap)
    taken: set[int] = set()
    while missing:
        gain, case = heapq.heappop(heap)
        now = len(goals[case] & missing)
        if now < -gain:  # counted before others were taken
            heapq.heappush(heap, (-now, case))
        else:
            taken.add(case)
            missing -= goals[case]
    return taken


def nothing_else(*case: Any) -> Iterable[Hashable]:
    return ()


def each_once(architecture: Architecture, *arguments: Any) -> Iterable[Hashable]:
    """For `also`: every architecture is met by some argument."""
    return [("architecture", architecture.name)]


def cases(
    architectures: Sequence[Architecture],
    *arguments: Sequence[Any],
    also: Goals = nothing_else,
    where: Callable[..., bool] = lambda *case: True,
) -> list[Any]:
    """The product of architectures and arguments, as parameters; what the cover leaves out is slow.

    Args:
        also: further goals of a case.
        where: whether there is this case at all.
    """
    product = [case for case in itertools.product(architectures, *arguments) if where(*case)]
    taken = cover([goals_of(case, also) for case in product])
    return [
        pytest.param(*case, id="-".join(map(label, case)), marks=() if place in taken else pytest.mark.slow)
        for place, case in enumerate(product)
    ]


def in_turns(values: Sequence[Any], options: Sequence[Any]) -> list[Any]:
    """The product of values and options, as parameters: each value meets one option, the next in turn; the rest is slow."""
    return [
        pytest.param(value, option, id=f"{label(value)}-{label(option)}", marks=() if is_next else pytest.mark.slow)
        for place, value in enumerate(values)
        for option, is_next in ((option, place % len(options) == at) for at, option in enumerate(options))
    ]


def one_in(count: int, values: Sequence[Any]) -> list[Any]:
    """Values as parameters, of which the first of every `count` runs; the rest is slow."""
    return [
        pytest.param(value, id=label(value), marks=pytest.mark.slow if place % count else ())
        for place, value in enumerate(values)
    ]


def only(params: Sequence[Any], run: Container[str]) -> list[Any]:
    """Of parameters, those whose first value has one of these labels run; the rest is slow."""
    return [
        one if label(one.values[0]) in run else pytest.param(*one.values, id=one.id, marks=pytest.mark.slow)
        for one in params
    ]


def some(values: Sequence[Any], run: Container[str]) -> list[Any]:
    """Values as parameters, of which those with these labels run; the rest is slow."""
    return only([pytest.param(value, id=label(value)) for value in values], run)


def first_of_kinds(methods: Sequence[Any]) -> set[str]:
    """The names of ways to draft of which none drafts like one before it."""
    return set({method.alike or method.name: method.name for method in methods[::-1]}.values())


def over(names: str, *lists: Sequence[Any], **kwargs: Any) -> pytest.MarkDecorator:
    """Parametrise a test over `cases(*lists, **kwargs)`. names: as in `pytest.mark.parametrize`, the architecture first."""
    return pytest.mark.parametrize(names, cases(*lists, **kwargs))
