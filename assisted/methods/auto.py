"""Chooses a draft for a target out of what is there: its own MTP head, heads that name it, its text, a copy of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CacheNotFound, constants, scan_cache_dir

from .. import zoo
from ..core.host import free_memory
from ..engine.parts import device_of, unwrapped
from ..engine.ranks import ranks_of
from ..loading.backends import find, placed
from ..loading.files import fields_of
from ..loading.quantization import stored_bytes
from .mtp.formats import why_no_mtp
from .shared.base import Drafter, Spec, Target
from .shared.registry import kind_of, parse, register

LEAST = 50_000_000
"""Weights of the smallest target for which a copy in 8 bits can pay. A guess between two measured ones: forward passes of the
shipped target, 7 million weights, wait for operations; those of SmolLM2, 135 million, wait for memory."""


@register("auto")
@dataclass(frozen=True)
class Auto(Spec):
    """Chooses the draft: `"auto"`. The first of these that is there:

    1. the MTP head of the target's own checkpoint; if there are signs of one that cannot be used, the line below says why;
    2. trained heads that name this target, among the shipped ones and those in the local cache of the Hub;
    3. the text, with a copy of the target in 8 bits where it fits into half of the free memory and the target is large enough
       to gain from it.

    Nothing is downloaded. One line in the log (logger `assisted`) says what was chosen and why. A saved pair stores the choice.
    """

    title = "The best draft at hand"
    trained = trees = has_q = None  # depends on the choice
    not_served = "it chooses one of the other drafts; hand over that one"

    @classmethod
    def named(cls, rest: str) -> Spec:
        """The spec for `"auto"`. Raises ValueError for anything after it."""
        if rest:
            raise ValueError(f"draft: 'auto:{rest}' is not possible; write 'auto', or the draft itself")
        return cls()

    def chosen(self, target: Target) -> Spec:
        draft, why = _best(target)
        logging.getLogger("assisted").warning("draft='auto' chose %r: %s", draft, why)
        return parse(draft)

    def load(self, target: Target, **kwargs: Any) -> Drafter:
        return self.chosen(target).load(target, **kwargs)


def _best(target: Target) -> tuple[str, str]:
    """The draft as a caller writes it, and why."""
    model = unwrapped(target.model)
    passed = ""
    if target.path is not None:
        why_not = why_no_mtp(target.path, model.config.get_text_config(decoder=True))
        if why_not is None:
            return "mtp", "the target's checkpoint has an MTP head"
        passed = why_not and f'. "mtp" is passed over: {why_not}'
    for path in (*zoo.heads_of(target.path or ""), *_naming(target)):
        return path, f"it was trained for this target{passed}"
    why_not = _no_copy(model)
    if why_not is None:
        return "suffix+self:int8", f"no trained head is there, and a copy in 8 bits fits{passed}"
    return "suffix", f"no trained head is there, and a copy in 8 bits is out: {why_not}{passed}"


def _naming(target: Target) -> Iterator[str]:
    """The folders of heads in the Hub's local cache whose config.json names this target."""
    names = {target.path, target.model.name_or_path} - {None, ""}
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError):
        return
    for repository in sorted(repositories, key=lambda found: found.repo_id):
        for revision in repository.revisions:
            folder = revision.snapshot_path
            if (folder / "config.json").is_file() and _target_of(folder) in names and kind_of(folder) is not None:
                yield str(folder)


def _target_of(folder: Path) -> str | None:
    """The target that heads were trained for, as speculators and Medusa checkpoints name it."""
    try:
        fields = fields_of(folder / "config.json")
        found = fields.get("base_model_name_or_path") or fields["speculators_config"]["verifier"]["name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _no_copy(model: Any) -> str | None:
    """Why no copy of the target drafts; None if it can."""
    device = device_of(model)
    weights = sum({id(weight): weight.numel() for weight in model.parameters()}.values())
    if weights < LEAST:
        return f"a target of {weights / 1e6:.0f} million weights does not gain from it"
    if ranks_of(model).several:
        return "each process has only a part of the weights"
    if model.dtype not in (torch.float32, torch.float16, torch.bfloat16) or getattr(model, "is_quantized", False):
        return "the target is quantized itself"
    if not find(placed("int8", device.type))[0].is_installed:
        return "its backend is not installed"
    needed = stored_bytes(model, "int8", model.dtype, copy=True)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return None if 2 * needed <= free else f"it takes {needed / 2**30:.1f} GiB of {free / 2**30:.1f} GiB that are free"
