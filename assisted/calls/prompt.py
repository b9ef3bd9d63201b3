"""How the prompt gets into a target's slots, as `generate` reads it, and how the caller gets what the slots hold at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from ..core.text import Text
from ..engine.cache import SlotCache
from ..engine.libraries import CACHE, prefill, with_prompt_of
from ..engine.pool import Lent
from ..engine.runner import CachedModel
from ..engine.session import Session, can_go_on, go_on
from .assembly import Assembly
from .inputs import LoopInputs


def read_prompt(call: Assembly, lent: Lent | None) -> torch.Tensor:
    """Read a call's prompt into the target's slots as its own `generate` does. Returns the logits after it, [B, 1, V]."""
    inputs, target = call.inputs, call.target
    if inputs.encoded is not None:
        logits = target.prefill(inputs.ids, inputs.mask)
    else:
        logits = _read_in_parts(target, inputs, call.session if lent is None else lent)
    positions = inputs.kwargs.get("position_ids")  # autoregressive decoding continues from the last ones
    target.cache.begin_rounds(inputs.width, None if positions is None else _last_positions(positions, call.text.rows))
    return logits


def _read(target: CachedModel, inputs: LoopInputs) -> torch.Tensor:
    """Read a prompt that is no encoder's, as `read_prompt` does.

    If the caller gets the KV, the padding before short prompts is read as well: only the caller's next turn may use it.
    """
    model, input_ids = _OverSlots(target.model), inputs.ids
    kwargs = inputs.kwargs | {inputs.cache_name: target.cache}
    tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    by_column = all(tensor.shape[:2] == input_ids.shape for tensor in tensors.values())

    def read(rows: list[int], first: int) -> torch.Tensor:
        part: dict[str, Any] = {n: tensor[rows, first:] for n, tensor in tensors.items()} if by_column else {}
        if target.last_only:
            part["last_only"] = True
        output = prefill(type(target.model), model, input_ids[rows, first:], inputs.config, {**kwargs, **part})
        return output.logits[:, -1:].to(input_ids.device)

    try:
        # with a caller's past, the mask is longer; of a prompt in chunks, only the last chunk's hidden states are there
        whole = inputs.returns_cache and not target.settings.bits  # then a cache has no keys and values of padding
        if whole or not by_column or getattr(inputs.config, "prefill_chunk_size", None) is not None:
            return read(list(range(len(input_ids))), 0)
        return target.by_groups(input_ids.shape[1], read)
    except IndexError as error:
        if input_ids.shape[1] > target.context:
            raise ValueError(
                f"input_ids: the prompt has {input_ids.shape[1]} tokens, but the target's context ends at {target.context}"
            ) from error
        raise


def _read_in_parts(target: CachedModel, inputs: LoopInputs, marks: Session | Lent | None) -> torch.Tensor:
    """As `_read`, and keep the states after parts of the prompt, where slots can't go back to them."""
    cache, taps, hidden = target.cache, target.prepared.taps.values(), []
    if marks is None or cache.can_rewind or target.settings.bits:
        return _read(target, inputs)
    for end in marks.ends:
        tensors = {name: value[..., :end] for name, value in inputs.kwargs.items() if isinstance(value, torch.Tensor)}
        config = with_prompt_of(end, inputs.config)
        _read(target, replace(inputs, ids=inputs.ids[:, :end], kwargs=inputs.kwargs | tensors, config=config))
        hidden.append([tap.hidden for tap in taps])
        cache.begin_rounds(end)
        marks.mark(cache, inputs.ids[:, : end + 1])
        go_on(cache, end, cache.limit)
    logits = _read(target, inputs)
    if hidden:
        for tap, *parts in zip(taps, *hidden, strict=True):
            tap.hidden = torch.cat([*parts, tap.hidden], 1)
    return logits


class _OverSlots:
    """A model that keeps our slots where its `generate` would drop its cache for a long prompt (Phi-3)."""

    def __init__(self, model: Any):
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(*args, **kwargs)
        cache = kwargs.get(CACHE)
        return inputs | {CACHE: cache} if isinstance(cache, SlotCache) else inputs


def _last_positions(positions: torch.Tensor, rows: int) -> list[int]:
    """Position of each row's last column. positions: [B or 1, any] int64, or [any, B or 1, any] with equal last columns."""
    return positions.view(-1, *positions.shape[-2:])[-1, :, -1].expand(rows).tolist()


def read_to_the_end(target: CachedModel, text: Text) -> None:
    """Complete the KV to what transformers' `generate` returns, which includes the end token of a row that ended early and
    the padding after it."""
    target.catch_up()
    target.run_only(list(range(text.rows)))
    cache, shortest, longest = target.cache, min(text.lengths), max(text.lengths)
    if shortest < longest:
        cache.rewind([known - length + shortest for known, length in zip(cache.known, text.lengths, strict=True)])
        target(text.output()[:, shortest - 1 : longest - 1])
        cache.commit([longest - shortest] * text.rows)


def hand_back(call: Assembly, drafts: Any, given: DynamicCache | StaticCache) -> None:
    """Put what the target's slots hold into the cache that the caller passed or receives. drafts: see `Assembly.kept_by`."""
    target, inputs = call.target, call.inputs
    ids = None if inputs.embeddings is not None or inputs.beside else call.text.output()
    if not isinstance(given, Session) or not given.is_read_whole or ids is None or not _holds(target, ids):
        _fill(given, target, inputs.model.config.get_text_config(decoder=True))
    elif can_go_on(target.cache):
        given.keep(target.cache, ids, drafts)
    else:
        given.keep_copy(target.cache, ids, None, inputs.mask)
    if inputs.encoded is not None:
        inputs.encoded.hand_back()


def leave(call: Assembly, drafts: Any, lent: Lent) -> None:
    """Leave what the target's slots hold to later calls with the same pool. drafts: see `Assembly.kept_by`."""
    if _holds(call.target, read := call.text.output()):
        lent.keep(call.target.cache, read, drafts)


def _holds(target: CachedModel, ids: torch.Tensor) -> bool:
    """Whether a target's slots hold a text from its first token on."""
    return all(known == ids.shape[1] - 1 for known in target.cache.known)


def _fill(given: DynamicCache | StaticCache, target: CachedModel, config: Any) -> None:
    """Fill a cache from the target's slots."""
    if isinstance(given, DynamicCache):
        windowed = given.layer_class_to_replicate is None
        given.layers = target.cache.to_dynamic(config if windowed else None).layers
        return
    for index, layer in enumerate(target.cache.to_dynamic(None).layers):
        if layer.is_initialized:
            given.update(layer.keys, layer.values, index)
