"""The ways to draft that the fuzzer draws from: those of the end-to-end tests, and some more."""

from __future__ import annotations

import functools
from typing import Any

from architectures import ARCHITECTURES, RECURRENT, Architecture, build, half_right
from methods import METHODS, half_heard
from transformers import PreTrainedModel

from assisted import Combined, DraftModel, Merged, NGram, Suffix

__all__ = [
    "APART",
    "COPIES",
    "FOR_STATES",
    "FROM_TEXT",
    "HEADS",
    "IN_LOCKSTEP",
    "KINDS",
    "NAMES",
    "draft_for",
    "refuses",
]

_BY_NAME = {method.name: method.draft for method in METHODS}
_REFUSES = {method.name: method.refuses for method in METHODS}
APART = [one for one in RECURRENT if one.name in ("qwen3_next", "qwen3_5", "olmo_hybrid", "mamba", "jamba", "zamba")]

NAMES: dict[str, int] = {  # and how often each is drawn; those that are trained first take a second
    **{name: 4 for name in _BY_NAME},
    "draft-model": 12,
    "itself": 6,
    "stranger": 2,
    "llama": 2,
    "recurrent": 2,
    "ngram": 6,
    "suffix": 8,
    "recycle": 6,
    "combined": 5,
    "pard": 3,
    "pard, continued": 2,
    "p-eagle": 1,
    "combined texts": 4,
    "failing member": 2,
    "self:int8-torchao": 3,
    "eagle-1, chains": 1,
    "eagle-3, trees": 1,
    "medusa": 3,
    "blockwise": 2,
    "heads": 2,
    "merged heads": 2,
}
FROM_TEXT = ("ngram", "suffix", "suffix tree", "recycle", "combined texts", "llama")  # any target can have these
HEADS = {  # in crowds, where one head has many texts
    **{name: 1 for name in ("eagle-1, chains", "eagle-3, trees", "eagle-3, window", "p-eagle", "medusa", "blockwise")},
    **{name: 1 for name in ("mtp, chains", "mtp, trees", "assistant, chains", "assistant, trees", "dflash, chains")},
    **{name: 1 for name in ("dspark, trees", "heads", "merged heads", "recurrent, rows apart", "layer-skip")},
    **{name: 1 for name in ("early-exit", "self:int8-torchao")},
}
FOR_STATES = (  # in crowds, for targets with states
    *("ngram", "suffix", "suffix tree", "combined texts", "llama", "recurrent, rows apart"),
    *("medusa", "blockwise", "eagle-1, chains", "eagle-3, trees"),
)
COPIES = ("draft-model", "itself", "combined")  # of such a target, if their rows need not advance in lockstep
IN_LOCKSTEP = ("recurrent", "recycle")  # which crowds refuse
KINDS = {  # of the table of crowds
    "EAGLE heads": ("eagle-1, chains", "eagle-3, trees", "eagle-3, window", "p-eagle"),
    "MTP heads": ("mtp, chains", "mtp, trees"),
    "Medusa heads": ("medusa", "blockwise"),
    "block heads": ("dflash, chains", "dspark, trees"),
    "assistants": ("assistant, chains", "assistant, trees"),
    "early exit": ("early-exit", "early-exit:1"),
    "layer-skip": ("layer-skip",),
    "text drafts": ("ngram", "suffix", "suffix tree", "recycle", "combined texts"),
    "recurrent drafts": ("recurrent, rows apart",),
    "quantized drafts": ("self:int8-torchao",),
    "lists of drafts": ("combined", "pard, continued", "failing member", "heads", "merged", "merged heads"),
    "draft models": (*("draft-model", "draft-model, window", "draft-tree", "pard", "itself", "stranger", "llama"),),
}
_heard = functools.lru_cache(maxsize=8)(half_heard)


class _Failing(NGram):
    """Its drafts are right, but it cannot learn from the fourth round on."""

    def load(self, target: Any, **kwargs: Any) -> Any:
        drafter = super().load(target, **kwargs)
        start = drafter.start

        def failing(call: Any) -> Any:
            drafting, seen = start(call), []

            def observe(round: Any) -> None:
                seen.append(round)
                if len(seen) > 3:
                    raise RuntimeError("this member cannot learn")

            drafting.observe = observe
            return drafting

        drafter.start = failing
        return drafter


@functools.cache
def refuses(name: str, architecture: Architecture) -> bool:
    """Whether a draft says when it is loaded that it cannot serve an architecture."""
    return name in _REFUSES and _REFUSES[name](architecture)


def draft_for(name: str, target: PreTrainedModel, rebuilt: PreTrainedModel) -> Any:
    """What is passed as `draft=`. rebuilt: the same weights in another object, which a draft may be."""
    if name.startswith("suffix"):
        tree = {"tree": True, "min_probability": 0.01} if name == "suffix tree" else {}
        return Suffix(corpus=_corpus(target), **tree)
    if name in _BY_NAME:
        return _BY_NAME[name](target)
    if name == "itself":
        return rebuilt
    if name == "stranger":
        other = type(rebuilt)(rebuilt.config)
        return other.eval()
    if name == "llama":
        return build(ARCHITECTURES[0])
    if name.startswith("recurrent"):
        return _recurrent(target, RECURRENT if name == "recurrent" else APART)
    if name == "combined":
        return Combined((Suffix(corpus=_corpus(target)), DraftModel(half_right(target))))
    if name == "pard, continued":
        return Combined((_BY_NAME["pard"](target), Suffix(corpus=_corpus(target))))
    if name == "failing member":
        return Combined((_Failing(3, 1), Suffix(corpus=_corpus(target))))
    if name.endswith("heads"):
        heads = [_BY_NAME[head](target) for head in ("early-exit:1", "eagle-1, chains", "medusa")]
        return Merged(heads) if name == "merged heads" else Combined(heads[::-1])
    if name == "combined texts":
        return Combined((NGram(3, 1), Suffix()))
    return name


def _recurrent(target: PreTrainedModel, kinds: list[Architecture]) -> PreTrainedModel:
    """A recurrent or hybrid draft model; which, its target's size decides."""
    return build(kinds[sum(p.numel() for p in target.parameters()) % len(kinds)])


def _corpus(target: PreTrainedModel) -> Any:
    """Half of what a target would write; none for one whose context is too short to hear it."""
    return _heard(target) if getattr(target.config, "max_position_embeddings", 2048) > 64 else None
