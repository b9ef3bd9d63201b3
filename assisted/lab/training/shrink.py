"""Reduces the vocabulary that a draft predicts, after its training: its output layer keeps the most frequent tokens of a text.
Knows draft models, EAGLE-3 heads and block drafters; how they draft then is elsewhere (`engine.kept`, `d2t` of heads).
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ...engine.kept import KEY, kept_rows, kept_tokens, written
from ...loading.files import fields_of, write_json
from ...methods.dflash.formats import load_block, save_block
from ...methods.dflash.head import BlockHead
from ...methods.eagle.formats import load_eagle, save_eagle
from ...methods.eagle.head import EagleHead
from ...methods.eagle.train import frequent_tokens
from ...methods.shared.files import find_folder
from ...methods.shared.heads import StateHead
from ...methods.shared.registry import kind_of
from ...methods.shared.training.data import Text


def shrink_vocabulary(draft: str, tokens: int, text: Text, out: str | Path, target: PreTrainedModel) -> dict[str, Any]:
    """Write a copy of a draft model, an EAGLE-3 head or a block drafter that predicts the most frequent tokens of a text only.

    Args:
        draft: Hub id, folder or `zoo:` name.
        tokens: N, how many are kept, below the number that the draft predicts.
        text: whose training part is counted; the coverage is measured on the held-out part.
        out: a new or empty folder.
        target: of a head.

    Returns {"tokens": N, "of": those before, "coverage": the share of the held-out tokens that can still be drafted}.

    Raises ValueError for a draft that predicts tokens with the target's output layer, and for a number that is not smaller.
    """
    out, kind = Path(out), kind_of(draft)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out: {out} is not empty; name a new folder")
    source = find_folder(draft)
    if kind is None:
        return _shrink_model(source, tokens, text, out)
    loaders: dict[str, Any] = {"eagle": load_eagle, "dflash": load_block}
    if kind not in loaders:
        raise ValueError(
            f"draft: {draft!r} holds heads of the method {kind!r}, whose files have no place for a reduced vocabulary"
        )
    head: StateHead = loaders[kind](draft, target)
    before, kept = head.draft_tokens.cpu(), _most_frequent(text, tokens, head.draft_tokens.cpu())
    made: Any = shrunk_head(head, kept, target)
    (save_eagle if isinstance(made, EagleHead) else save_block)(made, out)
    found = {"tokens": len(kept), "of": len(before), "coverage": coverage(text, kept)}
    path = out / "config.json"
    write_json(path, {**fields_of(path), f"{KEY}_coverage": found["coverage"]})
    return found


def coverage(text: Text, kept: Tensor) -> float:
    """The share of the held-out tokens that are kept."""
    return round(float(np.isin(text.held_out, kept.numpy()).mean()), 6)


@torch.no_grad()
def shrunk_head(head: StateHead, tokens: Tensor, target: PreTrainedModel) -> StateHead:
    """A copy of a head that drafts these tokens only. tokens: [N] int64, ascending, of those that it drafts.

    Raises ValueError for a head whose kind has no output layer of its own.
    """
    fields: dict[str, Any] = {"draft_vocab_size": len(tokens)}
    if isinstance(head, BlockHead):
        fields["own_output"] = True
    elif not isinstance(head, EagleHead) or head.shares_output:
        raise ValueError(f"draft: an {head.title} of this kind predicts tokens with the target's output layer")
    kind: type[Any] = type(head)
    made: StateHead = kind(replace(head.config, **fields)).to(head.device, head.dtype)
    own = head.draft_tokens.cpu()
    rows = torch.searchsorted(own, tokens)
    output: Any = target.get_output_embeddings() if head.shares_output else head.lm_head
    state = {name: tensor for name, tensor in head.state_dict().items() if name != "d2t"}
    state["lm_head.weight"] = kept_rows(output, rows).weight
    if "markov_head.markov_w2.weight" in state:
        state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][rows]
    state["d2t"] = made.state_dict()["d2t"]
    made.load_state_dict(state)
    made.draft_tokens = tokens
    return made.eval()


def _shrink_model(source: Path, tokens: int, text: Text, out: Path) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(source)
    size = config.get_text_config(decoder=True).vocab_size
    before = kept_tokens(config)
    kept = _most_frequent(text, tokens, torch.arange(size) if before is None else before)
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, out / file.name)
    found = written(kept, size, coverage(text, kept), text.source)
    write_json(out / "config.json", {**fields_of(source / "config.json"), KEY: found})
    return {name: found[name] for name in ("tokens", "of", "coverage")}


def _most_frequent(text: Text, tokens: int, own: Tensor) -> Tensor:
    """The most frequent of a draft's tokens, [N] int64, ascending."""
    if not 1 <= tokens < len(own):
        raise ValueError(f"tokens: {tokens} is not between 1 and {len(own) - 1}, as the draft predicts {len(own)}")
    counted = text.training[np.isin(text.training, own.numpy())]
    if not len(counted):
        raise ValueError("text: none of the draft's tokens is in the text")
    size = int(own[-1]) + 1
    ranks = np.full(size, -1)
    ranks[own.numpy()] = np.arange(len(own))
    return own[frequent_tokens(ranks[counted], tokens, len(own))]
