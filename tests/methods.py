"""Every method of drafting, as the end-to-end tests call it: one line a method, run over all architectures.

Knows the strings and specs that a caller writes; nothing of what the tests ask of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from architectures import Architecture, build, half_right, made_once, random_ids
from assistant_heads import trained_assistant
from block_heads import trained_block
from eagle_heads import random_head, trained_head
from medusa_heads import knowing_what_follows
from mtp_heads import trained_mtp
from transformers import PreTrainedModel

from assisted import MTP, Assistant, DFlash, DraftModel, DraftTree, Eagle, LayerSkip, Medusa, Merged, NGram, Suffix
from assisted.engine.traits import Traits

__all__ = ["HEADS", "LISTS", "METHODS", "Method"]

LAYERS_OF_THEIR_OWN = {
    *("biogpt", "bloom", "codegen", "falcon", "falcon-alibi", "gemma2", "gemma3n", "gemma4"),
    *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "opt", "xglm"),
}
"""Architectures whose layers need more than hidden states, positions, a mask and a cache, or attention other than sdpa."""

WITHOUT_KEYS_TO_SHARE = {
    *("biogpt", "bloom", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt", "xglm", "llama4"),
    *("deepseek_v2", "deepseek_v3"),
}
"""Architectures without rotary embeddings in halves, or whose keys and values have different sizes."""


@dataclass(frozen=True)
class Method:
    """A way to draft.

    Args:
        name: of the tests.
        draft: what is passed as `draft=` for a target.
        refuses: whether this method can't serve an architecture, and says so when it is loaded.
        accepts: whether some drafted token can be expected to be right over 24 new tokens of a random model.
        tree: whether it drafts trees where the target reads them.
        alike: methods of this kind run the same parts of a target, and differ in what is drafted; None: like no other.
    """

    name: str
    draft: Callable[[PreTrainedModel], Any]
    refuses: Callable[[Architecture], bool] = lambda architecture: False
    accepts: bool = True
    tree: bool = False
    alike: str | None = None

    @property
    def kinds(self) -> tuple[str, str]:
        """What meets every trait of an architecture: the parts of a target that are run, and the way of verifying drafts."""
        return self.alike or self.name, "trees" if self.tree else "chains"


@made_once
def half_heard(target: PreTrainedModel) -> list[list[int]]:
    """What a target writes, every sixth token changed: a corpus that is right most of the time. No text of a tiny model
    repeats itself within a few tokens."""
    ids = random_ids(target, 8, 20, seed=20)
    kwargs = {"max_new_tokens": 48, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    written = target.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    written[:, 5::6] = 3
    return written.tolist()


def in_parallel(draft: PreTrainedModel) -> PreTrainedModel:
    """The model, which now says that it was trained for parallel drafting."""
    draft.config.update({"spd_type": "pard", "pard_token": 3})
    return draft


def shares_keys(architecture: Architecture) -> bool:
    """Some layers read the keys and values that earlier layers made in the same pass."""
    return architecture.name == "gemma3n"


def takes_2d_masks(architecture: Architecture) -> bool:
    return not Traits.of(build(architecture)).masks.trees


def stacks_states(architecture: Architecture) -> bool:
    """Its layers hand on several versions of the hidden states."""
    return architecture.name == "gemma3n"


def eagle_3(target: PreTrainedModel) -> Eagle:
    """A head that has learned what the target writes, where the target can be tapped."""
    try:
        return Eagle(trained_head(target, 3, steps=15, unrolled=1), tree=True)
    except ValueError:
        return Eagle(random_head(target, 3), tree=True)


def windowed_eagle(target: PreTrainedModel) -> Eagle:
    return replace(eagle_3(target), draft_window=3)


def shares_no_keys(architecture: Architecture) -> bool:
    return architecture.name in WITHOUT_KEYS_TO_SHARE


def parallel(target: PreTrainedModel) -> Eagle:
    """A P-EAGLE head that was never trained."""
    return Eagle(random_head(target, 3, mask_token_id=3))


def draft_tree(target: PreTrainedModel) -> DraftTree:
    return DraftTree(half_right(target), nodes=24, beam=4, candidates=4)


def suffix_tree(target: PreTrainedModel) -> Suffix:
    return Suffix(corpus=half_heard(target), tree=True, min_probability=0.01)


def mtp(target: PreTrainedModel) -> Any:
    return trained_mtp(target, steps=15, unrolled=1)


def assistant(target: PreTrainedModel) -> Assistant:
    return Assistant(trained_assistant(target))


def assistant_of_chains(target: PreTrainedModel) -> Assistant:
    return Assistant(trained_assistant(target), tree=False)


def dflash(target: PreTrainedModel) -> DFlash:
    return DFlash(trained_block(target, steps=24), tree=False)


def dspark(target: PreTrainedModel) -> DFlash:
    return DFlash(trained_block(target, steps=24, next_token=True, markov="vanilla", markov_rank=4))


def has_own_layers(architecture: Architecture) -> bool:
    return architecture.name in LAYERS_OF_THEIR_OWN


METHODS = [
    Method("draft-model", half_right, alike="models"),
    Method("pard", lambda target: in_parallel(half_right(target)), alike="models"),
    Method(
        "draft-model, window", lambda target: DraftModel(half_right(target), draft_window=3), refuses=takes_2d_masks
    ),
    Method("draft-tree", draft_tree, tree=True, alike="models"),
    Method("merged", lambda target: Merged((half_right(target), half_right(target, 2))), tree=True, alike="models"),
    Method("early-exit", lambda target: "early-exit", refuses=shares_keys, alike="early exits"),
    Method("early-exit:1", lambda target: "early-exit:1", refuses=shares_keys, alike="early exits"),
    Method("layer-skip", lambda target: LayerSkip(0.25, window=8, every=1), refuses=shares_keys),
    Method("ngram", lambda target: NGram(3, 1), accepts=False, alike="lookup"),
    Method("suffix", lambda target: Suffix(corpus=half_heard(target)), alike="lookup"),
    Method("suffix tree", suffix_tree, tree=True, alike="lookup"),
    Method("recycle", lambda target: "recycle", accepts=False, tree=True, alike="lookup"),
    Method("medusa", lambda target: Medusa(knowing_what_follows(target)), tree=True, alike="heads on one state"),
    Method("blockwise", lambda target: Medusa(knowing_what_follows(target), tree=False), alike="heads on one state"),
    Method("eagle-1, chains", lambda target: Eagle(trained_head(target, 1, steps=15, unrolled=1), tree=False)),
    Method("eagle-3, trees", eagle_3, refuses=stacks_states, tree=True),
    Method("eagle-3, window", windowed_eagle, refuses=stacks_states, tree=True),
    Method("p-eagle", parallel, refuses=stacks_states, accepts=False),
    Method("mtp, chains", lambda target: MTP(mtp(target), tree=False), refuses=has_own_layers, alike="mtp"),
    Method("mtp, trees", lambda target: MTP(mtp(target)), refuses=has_own_layers, tree=True, alike="mtp"),
    Method("assistant, chains", assistant_of_chains, refuses=shares_no_keys, alike="assistant"),
    Method("assistant, trees", assistant, refuses=shares_no_keys, tree=True, alike="assistant"),
    Method("dflash, chains", dflash, refuses=stacks_states, alike="blocks"),
    Method("dspark, trees", dspark, refuses=stacks_states, tree=True, alike="blocks"),
]

HEADS = {
    "eagle": lambda target: Eagle(trained_head(target, 3, steps=15, unrolled=1)),
    "eagle-1": lambda target: Eagle(trained_head(target, 1, steps=15, unrolled=1), tree=False),
    "random eagle": lambda target: Eagle(random_head(target, 3, seed=7, taps=(1, 2)), tree=False),
    "medusa": lambda target: Medusa(knowing_what_follows(target)),
    "assistant": assistant,
    "early-exit": lambda target: "early-exit:1",
    "layer-skip": lambda target: "layer-skip:0.25",
    "suffix": lambda target: Suffix(tree=True),
}
"""Methods that read the target's states, or run parts of it; for lists of several."""

LISTS = [
    ("eagle", "random eagle"),
    ("eagle", "eagle-1", "suffix"),
    ("suffix", "eagle", "medusa"),
    ("medusa", "random eagle"),
    ("eagle", "early-exit"),
    ("early-exit", "suffix", "eagle", "medusa"),
    ("layer-skip", "medusa", "early-exit"),
]
