"""Checks with a few tokens whether a target can verify drafts, and raises an error with the reason if it can't.

Uses runner.py and recurrent.py. Some forwards ignore their positions, masks or cache, start from an empty state,
or compute something else for several tokens at once. Architectures covered by the tests need no check. All models with
states, all other classes and all replaced forwards are checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafts import Draft
from .cache import SlotCache
from .parts import device_of, unwrapped
from .recurrent import RecurrentCache, RecurrentModel, is_recurrent
from .runner import CachedModel, Masks, require_decoder, require_rewindable, without_gradients

__all__ = ["TESTED", "require_verifiable"]

_ROUNDING = 3e-4  # relative to the logits' standard deviation, in float32
_HALF_ROUNDING = 0.1  # in half precision
_LEAST_ROUNDING = 16  # times the dtype's epsilon, relative to the logits; 1 to 4 occur where states matter little
_TRIED: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, str | None]] = weakref.WeakKeyDictionary()


_NAMES = (
    "apertus arcee biogpt codegen cohere cohere2 dbrx deepseek_v2 deepseek_v3 diffllama ernie4_5 exaone4 falcon gemma gemma2 "
    "gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe "
    "helium hunyuan_v1_dense jetmoe llama llama4_text minimax_m2 ministral mistral mixtral mpt nanochat nemotron olmo olmo2 "
    "olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 "
    "bloom xglm"
)
TESTED = frozenset(_NAMES.split())
"""Model types of transformers for which the tests compare the output with that of transformers' `generate`."""


def require_verifiable(model: PreTrainedModel) -> None:
    """Check that a target computes the same for several tokens in one forward pass as for the same tokens one by one.

    The check runs a few tokens, once per device and dtype; unchanged `TESTED` models of transformers are exempt.
    Raises ValueError with the reason.
    """
    model = unwrapped(model)  # the model inside an adapter's wrapper is what runs
    recurrent = is_recurrent(model)
    if not recurrent:
        require_rewindable(model, "target")
        if _is_tested(model):
            return
    require_decoder(model, "target")
    tried = _TRIED.setdefault(model.base_model, {})
    forward, replaced = type(model).forward, vars(model).get("forward")
    key = (device_of(model), model.dtype, id(forward), id(replaced))
    if key not in tried:
        tried[key] = _obstacle(model) if recurrent else _obstacle_of_slots(model)
    if tried[key]:
        what = "keeps a recurrent state and " if recurrent else ""
        raise ValueError(
            f"target: {type(model).__name__} {what}cannot take back rejected tokens: {tried[key]}. "
            "Generate with the model itself, or choose another target."
        )


def _is_tested(model: PreTrainedModel) -> bool:
    """Whether a model runs code of transformers that the tests cover."""
    made = getattr(type(model).forward, "__module__", "")
    known = model.config.get_text_config(decoder=True).model_type in TESTED
    own = vars(model)
    # accelerate wraps the model's forward to move inputs and weights
    inner = own.get("_old_forward") if "_hf_hook" in own else own.get("forward")
    unchanged = inner is None or getattr(inner, "__func__", None) is type(model).forward
    return known and made.startswith("transformers.models.") and unchanged


def _obstacle_of_slots(model: PreTrainedModel) -> str | None:
    """Why a model without states can't verify drafts over slots; None if it can. The check uses two rows that keep different
    numbers of tokens, and a token tree if the masks allow one."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(7, 31, device=device_of(model)).view(2, 12) * 7919) % size
    try:
        with without_gradients(model):
            # each row alone and without a cache, independent of the code under test
            expected = torch.cat([_logits(model, row[None]) for row in ids])
            masks = Masks.of(model)
            runner = CachedModel(model, SlotCache(2, 32, right_aligned=not masks.trees), masks)
            found = [(runner.prefill(ids[:, :5], None)[:, -1], expected[:, 4])]
            found.append((runner(ids[:, 5:8]), expected[:, 5:8]))
            runner.commit([1, 3])
            columns = torch.stack([ids[0, 6:9], ids[1, 8:11]])
            wanted = torch.stack([expected[0, 6:9], expected[1, 8:11]])
            found.append((runner(columns), wanted))
            if masks.trees:
                # the last two columns both follow the first one
                tree = Draft(columns[:, 1:], torch.tensor([2, 2]), parents=torch.tensor([[-1, -1], [-1, -1]]))
                paths = [torch.cat([ids[row, :end], columns[row, 2:]])[None] for row, end in ((0, 7), (1, 9))]
                beside = torch.cat([_logits(model, path)[:, -1:] for path in paths])
                found.append((runner(columns, tree), torch.cat([wanted[:, :2], beside], 1)))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"continuing from its cache fails ({type(error).__name__}: {error})"
    half = model.dtype not in (torch.float32, torch.float64)
    limit = _HALF_ROUNDING if half else _ROUNDING
    for logits, wanted in found:
        apart = (_difference(logits.float(), wanted, robust=half) / wanted.std()).item()
        if not apart <= limit:  # NaN included
            return (
                "its forward passes over several tokens differ from the same tokens read at once without a cache "
                f"(by {apart:.2g} of the logits' standard deviation; up to {limit:.2g} could be rounding)"
            )
    return None


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a text, [1, n, V] float32."""
    made: torch.Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits
    return made.float()


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why a model can't continue exactly from a copy of its states; None if it can. Checked on 12 tokens of two rows."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(7, 31, device=device_of(model)).view(2, 12) * 7919) % size
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
        return f"continuing from a state fails ({type(error).__name__}: {error})"
    if changed:
        return f"it keeps its state in its own modules ({changed[0]}), not in the cache"
    spread = expected.std()
    half = model.dtype not in (torch.float32, torch.float64)
    # Where the state matters little, an empty one gives almost the same logits; rounding is the lower bound.
    least = _LEAST_ROUNDING * torch.finfo(model.dtype).eps * expected.square().mean().sqrt()
    telling = torch.maximum(0.25 * _difference(forgotten, expected), least) / spread
    limit = min(_HALF_ROUNDING if half else _ROUNDING, telling.item())
    for logits, wanted, what in (
        (together, expected, "its forward pass over several tokens differs from the same tokens one by one"),
        (put_back, expected[:, 2:], "it does not continue correctly from a restored state"),
    ):
        apart = (_difference(logits, wanted, robust=half) / spread).item()
        if not apart <= limit:  # NaN included
            return f"{what} (by {apart:.2g} of the logits' standard deviation; up to {limit:.2g} could be rounding)"
    return None


def _difference(logits: torch.Tensor, expected: torch.Tensor, robust: bool = False) -> torch.Tensor:
    """Root mean square. robust: take the median over positions. In half precision, rounding occasionally routes a token to
    another expert, while a wrong state shows at every position."""
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
    """Restore the tensors that modules keep as plain attributes. At the end, the yielded list names those that changed."""
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
