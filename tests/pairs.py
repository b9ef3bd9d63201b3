"""Tiny pairs of a target and a half-right draft, and the same call made twice: plainly and assisted.

For the end-to-end tests. Knows the face of the package and nothing of what a test asks of it.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from architectures import ARCHITECTURES, SPECIAL, VOCABULARY, build, fingerprint, half_right, random_ids
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from assisted import AssistedModelForCausalLM
from assisted.engine.hooks import is_touched

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
CALL = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": SPECIAL["pad_token_id"]}
ENDS = [2, *range(5, 11)]  # many end tokens, so that rows end at different times
ROUNDING = 1e-4  # float32 sums in another order, on logits of about 3


def pair(name: str = "llama") -> tuple[PreTrainedModel, AssistedModelForCausalLM]:
    """The target, and the target with a draft that is right about half of the time, so that acceptance is ragged."""
    return _built(name)


@functools.cache
def _built(name: str) -> tuple[PreTrainedModel, AssistedModelForCausalLM]:
    target = build(BY_NAME[name])
    return target, AssistedModelForCausalLM.from_models(target, draft=half_right(target), draft_length=4)


@contextmanager
def no_fallback(kind: type[Warning] = Warning) -> Iterator[None]:
    """A warning of this kind is an error in here: decoding without drafts would hide what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", kind)
        yield


def plainly(ids: torch.Tensor | None, name: str = "llama", **kwargs: Any) -> Any:
    """What the target's own `generate` returns."""
    return pair(name)[0].generate(ids, **(CALL | kwargs))


_TEXTS: dict[str, torch.Tensor] = {}


def said_by(target: PreTrainedModel, ids: torch.Tensor | None = None, **call: Any) -> Any:
    """What a target's own `generate` returns. The same greedy call of the same weights is made once, whichever test makes it,
    if all its arguments are plain values and tensors, and no module has hooks or a forward of its own.

    Not for tests that change a target elsewhere than in its weights and its config, or patch what it calls: that is not seen.
    """
    inputs = () if ids is None else (ids,)
    anew = call.get("do_sample") is not False or call.get("return_dict_in_generate")
    anew = anew or any(map(is_touched, target.modules()))
    key = None if anew else _told([target, *inputs, *sorted(call.items())])
    if key is None:
        return target.generate(*inputs, **call)
    if key not in _TEXTS:
        _TEXTS[key] = target.generate(*inputs, **call)
    return _TEXTS[key].clone()


def _told(value: Any) -> str | None:
    """The same for values that are the same, None if that is not known."""
    if isinstance(value, PreTrainedModel):
        return f"{fingerprint(value)} {value.config._attn_implementation} {value.generation_config.to_json_string()}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, (list, tuple)):
        parts = [_told(part) for part in value]
        return None if None in parts else f"[{' '.join(map(str, parts))}]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


def assistedly(ids: torch.Tensor | None, name: str = "llama", draft_length: Any = 4, **kwargs: Any) -> Any:
    """What the pair returns; drafts were accepted on the way and nothing fell back to plain decoding."""
    model = pair(name)[1]
    with no_fallback():
        output = model.generate(ids, draft_length=draft_length, **(CALL | kwargs))
    assert model.report is not None
    assert model.report.accepted > 0
    return output


def require_plain(model: AssistedModelForCausalLM, *inputs: Any, **call: Any) -> torch.Tensor:
    """Raise AssertionError unless a greedy call writes what the target's own `generate` does, without a warning. The output."""
    with no_fallback():
        ours: torch.Tensor = model.generate(*inputs, **call)
    assert ours.tolist() == said_by(model.target, *inputs, **call).tolist()
    return ours


class Listener:
    """A streamer that remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def padded(
    target: PreTrainedModel, rows: int = 4, length: int = 12, seed: int | None = None, step: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and their mask [rows, length], each row with so many more pads on the left than the one before."""
    ids = random_ids(target, rows, length, rows if seed is None else seed)
    mask = (torch.arange(length) >= step * torch.arange(rows)[:, None]).long()
    return ids.where(mask.bool(), SPECIAL["pad_token_id"]), mask


def prompt(rows: int = 1, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch whose rows but the first are padded on the left, each more than the one before."""
    ids = random_ids(pair()[0], rows, length, seed)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return {"ids": ids.where(mask.bool(), SPECIAL["pad_token_id"]), "attention_mask": mask}


def tokenizer(
    entries: int = VOCABULARY, first: str = "!", special: tuple[str, str, str] = ("<pad>", "<s>", "</s>")
) -> PreTrainedTokenizerFast:
    """One token a character, from `first` on in the order of code points, behind the special tokens."""
    tokens = itertools.chain(special, map(chr, itertools.count(ord(first))))
    vocabulary = {token: number for number, token in enumerate(itertools.islice(tokens, entries))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    pad, bos, eos = special
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, bos_token=bos, eos_token=eos)
