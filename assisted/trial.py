"""Whether a target with recurrent layers can be verified at all: tried on a few tokens, refused with what was found.

Knows how such a target is run (recurrent.py). Some forwards start from an empty state, or compute something else, when they
get several tokens at once; new architectures appear all the time, so none is listed here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .quantization import without_gradients
from .recurrent import RecurrentCache, RecurrentModel, is_recurrent
from .runtime import Masks, require_decoder, require_rewindable

__all__ = ["require_verifiable"]

_ROUNDING = 3e-4  # of the logits' spread, in float32
_HALF_ROUNDING = 0.1  # in half precision
_LEAST_ROUNDING = 16  # steps of the dtype at the logits' size; 1 to 4 were measured where states hardly count
_TRIED: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def require_verifiable(model: PreTrainedModel) -> None:
    """Refuse a target that can't take back tokens, neither by a length nor by a copy of its states.

    A model with states is tried on a few tokens, once for each device and dtype: some forwards start over from an empty
    state, or compute something else, when there are several tokens. Raises ValueError that says what was found.
    """
    if not is_recurrent(model):
        require_rewindable(model, "target")
        return
    require_decoder(model, "target")
    tried = _TRIED.setdefault(model.base_model, {})
    key = (model.device, model.dtype)
    if key not in tried:
        tried[key] = _obstacle(model)
    if tried[key]:
        raise ValueError(
            f"target: {type(model).__name__} keeps a recurrent state and cannot take back rejected tokens: {tried[key]}. "
            "Generate with the model itself, or choose another target."
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why a model can't go on exactly from a copy of its states, None when it can. Tried on 12 tokens of two rows."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(7, 31, device=model.device).view(2, 12) * 7919) % size
    prompt, end = 7, 12
    try:
        with _attributes_kept(model) as changed, without_gradients(model):
            single = _reader(model, ids[:, :prompt])
            one_by_one = []
            for column in range(prompt, end):
                one_by_one.append(single(ids[:, column : column + 1]))
                single.commit([1, 1])
            expected = torch.cat(one_by_one, 1).float()

            several = _reader(model, ids[:, :prompt])
            together = several(ids[:, prompt:end]).float()
            several.commit([2, 2])
            put_back = several(ids[:, prompt + 2 : end]).float()

            forgetful = _reader(model, ids[:, :prompt])
            forgetful.cache.forget()
            forgotten = forgetful(ids[:, prompt:end]).float()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"reading on from a state fails ({type(error).__name__}: {error})"
    if changed:
        return f"it keeps its state in its own modules ({changed[0]}), not in the cache"
    spread = expected.std()
    half = model.dtype not in (torch.float32, torch.float64)
    # Where the state hardly counts, an empty one is nearly right too; but nothing is nearer than rounding.
    least = _LEAST_ROUNDING * torch.finfo(model.dtype).eps * expected.square().mean().sqrt()
    telling = torch.maximum(0.25 * _difference(forgotten, expected), least) / spread
    limit = min(_HALF_ROUNDING if half else _ROUNDING, telling.item())
    for logits, wanted, what in (
        (together, expected, "its pass over several tokens differs from the same tokens one by one"),
        (put_back, expected[:, 2:], "it does not go on from a state that was put back"),
    ):
        apart = (_difference(logits, wanted, robust=half) / spread).item()
        if not apart <= limit:  # NaN included
            return f"{what} (by {apart:.2g} of the spread of its logits; up to {limit:.2g} could be rounding)"
    return None


def _difference(logits: torch.Tensor, expected: torch.Tensor, robust: bool = False) -> torch.Tensor:
    """Root mean square. robust: the median of the positions', for half precision, where rounding sends a token to another
    expert now and then; what is wrong with a state shows at every position."""
    squares = (logits - expected).square().mean(-1)
    return (squares.median() if robust else squares.mean()).sqrt()


def _reader(model: PreTrainedModel, prompt: torch.Tensor) -> RecurrentModel:
    """A model that has read a prompt of two rows."""
    config = model.config.get_text_config(decoder=True)
    reader = RecurrentModel(model, RecurrentCache(2, 32, config), Masks.of(model))
    reader.prefill(prompt, None)
    return reader


@contextmanager
def _attributes_kept(model: PreTrainedModel) -> Iterator[list[str]]:
    """Put back the tensors that modules keep as plain attributes. Yields the names of those that changed, at the end."""
    modules = list(model.named_modules())
    before = [dict(module.__dict__) for _, module in modules]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for (name, module), attributes in zip(modules, before, strict=True):
            for key in {*attributes, *module.__dict__}:
                old, new = attributes.get(key), module.__dict__.get(key)
                if old is not new and (isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)):
                    changed.append(f"{name}.{key}")
                    if key in attributes:
                        module.__dict__[key] = old
                    else:
                        del module.__dict__[key]
