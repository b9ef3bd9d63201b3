"""Checks with a few tokens whether a target can verify drafts: whether several tokens in one forward pass give what `generate`
computes for them one by one.

Uses runner.py and recurrent.py. Some forwards ignore their positions, masks or cache, start from an empty state,
or compute something else for several tokens at once. Architectures covered by the tests need no check. All models with
states, all other classes and all models that run somebody's code are checked.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from ..core.drafts import Draft
from .agreement import apart, rounding_of
from .cross import Encoded, alone
from .hooks import looked_over
from .libraries import CACHE, RESETS_ANGLES, cannot_draft, without_gradients
from .masks import Masks
from .needs import NOTHING, Needs
from .parts import device_of, few_ids, unwrapped
from .prepared import PreparedModule
from .recurrent import RecurrentCache, RecurrentModel, slots_for, target_runner
from .session import go_on
from .traits import Traits, change_of, require_verifiable_cache
from .trust import Code, Trust, trust

_LEAST_ROUNDING = 16  # times the dtype's epsilon, relative to the logits; 1 to 4 occur where states matter little
_MOVED = 8  # times the dtype's epsilon, by which results of modules are moved to see what a model makes of rounding
_TRIES = 4  # to move them; few moves, if any, take a number past the middle between two that inputs are rounded to
_AMPLIFIED = 4  # times the most that changes; up to 1 occurs where layers round their inputs to 8 bits
_WRONG = rounding_of(torch.bfloat16)  # no rounding is this large
_KEEPS = ((1, 3), (3, 1), (2, 3))  # columns that two rows keep of three, in each round of the trial
_LONG = 40  # tokens of the longer prompt, unless a sliding window asks for more
_LONGEST = 512
_STEPPED = frozenset({"falcon_mamba", "jamba", "mamba", "nemotron_h", "zamba", "zamba2"})
"""Model types whose states can't be copied, as the trials find: their layers run one column after the other."""
_FROM_STATES, _FROM_CACHE = "continuing from a state", "continuing from its cache"  # what trials do
_MANY = 16  # results kept for a model that changes
_PLAIN = ("torch.nn.", "transformers.", "assisted.", "peft.")  # whose modules treat every token by itself, but for
_ROUNDED = ("torch.nn.quantized.", "transformers.integrations.")  # these
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_MIXED = {torch.float64: 3e-4, torch.float32: 3e-4}
_MIXED_HALF = 0.005  # of the logits' deviation; modules that mix tokens move them by 0.01 to 0.15, others by 1e-6
_OUTLIERS = (1000.0, 30.0)  # times the mean of an embedding's numbers; fewer where these overflow
_SMALL = 2**12  # numbers of a buffer that a forward pass might change
_WARNED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_TRIED: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, str | None]] = weakref.WeakKeyDictionary()

_NAMES = (
    "apertus arcee biogpt codegen cohere cohere2 dbrx deepseek_v2 deepseek_v3 diffllama ernie4_5 exaone4 falcon gemma gemma2 "
    "gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe "
    "helium hunyuan_v1_dense jetmoe llama llama4_text mellum minimax_m2 ministral mistral mixtral mpt nanochat nemotron olmo "
    "olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 "
    "bloom xglm"
)
TESTED = frozenset(_NAMES.split())
"""Model types of transformers for which the tests compare the output with that of transformers' `generate`."""


def require_verifiable(model: PreTrainedModel) -> None:
    """Raise ValueError with the reason if a target cannot verify drafts, see `obstacle_to`, or does not run at all."""
    model = unwrapped(model)  # the model inside an adapter's wrapper is what runs
    require_verifiable_cache(model)
    reason = obstacle_to(model, trust(model))
    if reason is not None:
        _require_forward(model)
        raise ValueError(f"target: {reason}. Generate with the model itself, or choose another target.")


@torch.no_grad()
def _require_forward(model: PreTrainedModel) -> None:
    """Raise ValueError with a model's own error if it does not run without drafts, either, as some quantized ones."""
    try:
        if not Traits.of(model).crosses:
            with _attributes_kept(model), _buffers_kept(model):
                model(input_ids=few_ids(model), use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"target: {type(model).__name__} does not run, with or without drafts ({type(error).__name__}: {error}); check its "
            "quantization and its dtype"
        ) from error


def obstacle_to(model: PreTrainedModel, trusted: Trust, needs: Needs = NOTHING, replaces: bool = True) -> str | None:
    """Why a target cannot verify drafts; None if it can.

    trusted: whose code it runs. needs: those of the call's drafters. replaces: as for `masks_of`. The check runs a few tokens,
    and again when the device, the dtype, the code or a setting of somebody's code has changed. `TESTED` models that run
    transformers' own code are exempt.
    """
    if (lacking := cannot_draft()) is not None:
        return lacking
    model = unwrapped(model)  # the model inside an adapter's wrapper is what runs
    if not RESETS_ANGLES and (change := change_of(model)) is not None and not change.once:
        return "in this version of transformers its dynamic rotary angles depend on earlier texts"
    traits = Traits.of(model)
    if not traits.is_recurrent and not traits.is_rewindable:
        return (
            f"{type(model).__name__} keeps something else than keys and values, which cannot take back rejected tokens"
        )
    is_own = trusted.is_own and not trusted.hooks
    if not traits.is_recurrent and is_own and model.config.get_text_config(decoder=True).model_type in TESTED:
        return None
    if traits.is_recurrent and masks_of(model, trusted, replaces).trees:
        return None
    own_way = () if is_own else (needs, _settings(model))
    what, trial = _FROM_STATES, partial(_obstacle, model)
    if not traits.is_recurrent:
        what, trial = _FROM_CACHE, partial(_obstacle_of_slots, model, masks_of(model, trusted), needs)
    reason = _tried(model, trusted, own_way, trial if is_own else partial(_memory, model, trusted, trial), what)
    if reason is None:
        return None
    what = "keeps a recurrent state and " if traits.is_recurrent else ""
    return f"{type(model).__name__} {what}cannot take back rejected tokens: {reason}"


def mixes_tokens(model: PreTrainedModel, trusted: Trust, note: Callable[[str], None], rows: int) -> str | None:
    """Why the result for a token depends on the other tokens of its forward pass; None if it does not.

    Some quantization chooses one scale, or the columns of outliers, for all activations of a forward pass. So a target with
    other modules than those of torch and transformers is tried: a few tokens beside ordinary ones, and beside outliers. What
    bitsandbytes' threshold changes is small, so drafting goes on, with one warning; `note` gets its sentence in every call.

    trusted: whose code it runs. rows: the most that a forward pass has, which may share a scale for each position.
    """
    model = unwrapped(model)
    kind = None if model.training else _rounding_kind(model)
    if kind is None:
        return None
    beside = rows > 1
    moved = _tried(model, trusted, ("mixes", beside), partial(_moved_by_outliers, model, beside))
    if moved is None:
        return None
    what = f"{kind} rounds a token by what else its forward pass computes, which moves logits by {moved} of their deviation"
    states = (getattr(module, "state", None) for module in looked_over(model)[0])
    threshold = max(getattr(state, "threshold", 0.0) for state in states)
    if not threshold:
        return what
    what += (
        f": llm_int8_threshold={threshold:g} takes columns with outliers out of the product, and chooses them once a forward "
        "pass. Drafts may change tokens at near-ties of that size; with llm_int8_threshold=0.0 they change none"
    )
    if model.base_model not in _WARNED:
        _WARNED.add(model.base_model)
        warnings.warn(what, stacklevel=2)
    note(what)
    return None


def _rounding_kind(model: PreTrainedModel) -> str | None:
    """What might treat tokens together: the model's quantization, or a class of modules or weights; None if nothing might."""
    modules, parameters = looked_over(model)
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in dict.fromkeys(map(type, modules)))
    others = [kind for kind in kinds if not kind.startswith(_PLAIN) or kind.startswith(_ROUNDED)]
    others += [type(module).__name__ for module in modules if "forward" in module.__dict__]
    others += [type(p).__name__ for p in parameters if type(p) is not torch.nn.Parameter or p.dtype not in _FLOATS]
    method = getattr(getattr(model.config, "quantization_config", None), "quant_method", None)
    return (
        None
        if not others
        else others[0].rpartition(".")[2]
        if method is None
        else str(getattr(method, "value", method))
    )


def _moved_by_outliers(model: PreTrainedModel, beside: bool) -> str | None:
    """How far logits move when the tokens around have outliers; None if that is rounding. Both passes have one shape, so
    nothing else differs. beside: the tokens around are in the same row and in another one, instead of in the same row alone."""
    traits, texts, width = Traits.of(model), 4, 8
    ids = (torch.arange(7, 7 + texts * width, device=device_of(model)).view(texts, width) * 7919) % traits.vocabulary
    decoder: Any = model.get_decoder() if traits.crosses else model

    def logits(size: float, ids: torch.Tensor) -> torch.Tensor:
        rows = len(ids)

        def altered(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            if output.shape[:2] != ids.shape:
                return None
            made, numbers = output.clone(), output.shape[-1]
            spikes = torch.zeros(rows, width, numbers, device=made.device, dtype=made.dtype)
            where = torch.arange(rows * width, device=made.device).view(rows, width, 1) * 37 % numbers
            spikes.scatter_(2, where, (size * output.float().abs().mean()).to(made.dtype).expand(where.shape))
            made[:, 1:] = spikes[:, 1:]
            if beside:
                made[0] = spikes[0]
            return made

        hook = decoder.get_input_embeddings().register_forward_hook(altered) if size else None
        try:
            if traits.crosses:
                both = EncoderDecoderCache(DynamicCache(), DynamicCache())
                output: Any = alone(model, Encoded.trial(model, rows), [*range(rows)], ids, both)
            else:
                output = model(input_ids=ids, use_cache=False, return_dict=True)
            return output.logits[int(beside) :, 0].float()
        finally:
            if hook is not None:
                hook.remove()

    def of_all(size: float) -> torch.Tensor:
        return torch.cat([logits(size, some) for some in ids.split(texts if beside else 1)])

    with _attributes_kept(model), _buffers_kept(model):
        expected = of_all(0.0)
        for size in _OUTLIERS:
            if bool((found := of_all(size)).isfinite().all()):
                moved = apart(found, expected)
                return f"{moved:.2g}" if moved > _MIXED.get(model.dtype, _MIXED_HALF) else None
    return None


@contextmanager
def _buffers_kept(model: PreTrainedModel) -> Iterator[None]:
    """Restore small buffers, such as the ranges that an observer has seen."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if buffer.numel() <= _SMALL]
    try:
        yield
    finally:
        for buffer, kept in before:
            if not torch.equal(buffer, kept):
                buffer.data.copy_(kept)


def obstacle_to_reading_on(model: PreTrainedModel, trusted: Trust, refills: bool = False) -> str | None:
    """Why a prompt can't be read in two parts; None if it can. A state after the first part is tried with a few tokens: some
    layers read several tokens from an empty state only. refills: as for `masks_of`."""
    if not Traits.of(model).is_recurrent:
        return None
    masks = masks_of(model, trusted, refills=refills)

    def trial() -> str | None:
        ids = (torch.arange(7, 19, device=device_of(model))[None] * 7919) % Traits.of(model).vocabulary
        cache = slots_for(model, None, 1, ids.shape[1], masks)
        if not cache.slot_layers:
            return "states alone do not show how many tokens they have read"
        expected = target_runner(model, cache, masks).prefill(ids, None)
        reader = target_runner(model, slots_for(model, None, 1, ids.shape[1], masks), masks)
        reader.prefill(ids[:, :4], None)
        for token in ids[:, 4:7].split(1, 1):  # some layers read a token alone in another way (Zamba 2)
            reader(token)
            reader.commit([1])
        again = slots_for(model, reader.cache.to_dynamic(None), 1, ids.shape[1], masks)
        found = target_runner(model, go_on(again, 7, ids.shape[1]), masks).prefill(ids[:, 7:], None)
        difference = apart(found, expected)
        return None if difference <= rounding_of(model.dtype) else "reading on from a state gives other logits"

    return _tried(model, trusted, ("reads on", masks.trees), trial, "reading on from a state")


def obstacle_to_refills(model: PreTrainedModel, trusted: Trust) -> str | None:
    """Why a row can't get another text, all of which but the last token is read at once; None if it can. Some recurrent layers
    read a token alone in another way than several (Nemotron-H, Zamba 2)."""
    if not Traits.of(model).is_recurrent:
        return None

    def trial() -> str | None:
        ids = _rows_of_text(model, 12)[:, :12]
        difference = apart(_one_by_one(model, ids, 11)[:, 1:], _one_by_one(model, ids, 12))
        return None if difference <= rounding_of(model.dtype) else "it reads a token alone in another way than several"

    return _tried(model, trusted, ("refills",), trial, "reading a token alone")


def masks_of(model: PreTrainedModel, trusted: Trust, replaces: bool = True, refills: bool = False) -> Masks:
    """The attention masks of a call. Somebody's code gets the same 2-D masks as from `generate`, and makes its own of them. So
    does a target whose states are copied.

    Recurrent layers run over columns if that needs no copies (`engine.delta`), or if their states can't be copied. In small
    models, copies take less time than a step for each column.

    replaces: the call may run layers in another way than the model does. refills: its rows can't advance in lockstep, so
    recurrent layers run over columns wherever that is possible.
    """
    model = unwrapped(model)
    traits = Traits.of(model)
    if trusted.forward is None and not traits.is_recurrent:
        return traits.masks
    over_columns = traits.column_masks
    if over_columns is not None and replaces and trusted.is_own and not trusted.hooks:
        wanted = (
            refills
            or traits.masks.trees
            or _tried(model, trusted, (), lambda: _obstacle(model), _FROM_STATES) is not None
        )
        trial = partial(_obstacle_of_slots, model, over_columns, NOTHING)
        if wanted and _tried(model, trusted, ("columns",), trial, _FROM_CACHE) is None:
            return over_columns
    return replace(traits.masks, trees=False)


def expected_masks(model: PreTrainedModel, replaces: bool = True) -> Masks:
    """What `masks_of` returns for transformers' own code, without a trial: of a model without weights."""
    traits, kind = Traits.of(model), model.config.get_text_config(decoder=True).model_type
    if traits.column_masks is not None and replaces and (traits.masks.trees or kind in _STEPPED):
        return traits.column_masks
    return replace(traits.masks, trees=traits.masks.trees and not traits.is_recurrent)


def _tried(
    model: PreTrainedModel, trusted: Trust, about: tuple[Any, ...], trial: Callable[[], str | None], what: str = ""
) -> str | None:
    """The result of a trial, which runs again if the device, the dtype or the code has changed. what: is tried, for the reason
    why it fails; empty if nothing follows from that."""
    known = _TRIED.setdefault(model.base_model, {})
    key = (device_of(model), model.dtype, trusted.code, trusted.hooks, about)
    if key not in known:
        if len(known) >= _MANY:
            known.clear()
        try:
            with without_gradients(model):
                known[key] = trial()
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            known[key] = f"{what} fails ({type(error).__name__}: {error})" if what else None
    return known[key]


def _memory(model: PreTrainedModel, trusted: Trust, trial: Callable[[], str | None]) -> str | None:
    """The result of a trial of somebody's code, which must not remember anything: what it keeps from one forward pass for the
    next is only right where each pass reads one token."""
    records = [one for one in (*trusted.code, *trusted.hooks) if isinstance(one, Code) and (one.forward or one.between)]
    with _attributes_kept(model, trusted.holders) as changed:
        reason = trial()
    kept = [*changed, *(["a global name or a closure"] if not all(one.is_current() for one in records) else [])]
    return f"it remembers something between forward passes ({kept[0]})" if kept else reason


def _settings(model: PreTrainedModel) -> tuple[Any, ...]:
    """The switches that somebody's code may read from its modules: their values, and of other attributes the types."""
    found = (value for module in model.modules() for value in vars(module).values())
    return tuple(value if type(value) in (bool, float, str) else type(value) for value in found)


def _obstacle_of_slots(model: PreTrainedModel, masks: Masks, needs: Needs) -> str | None:
    """Why a model without states can't verify drafts over slots; None if it can. The check uses two rows that keep different
    numbers of tokens, after a short prompt and after one that is longer than a window, and a token tree if the masks allow one.
    """
    windows = [window for window in masks.windows.values() if window is not None]
    long = min(max([_LONG, *(window + 3 for window in windows)]), _LONGEST, Traits.of(model).context // 2)
    prompts = sorted({5, max(5, long)})
    difference = _largest(model, [pair for prompt in prompts for pair in _compared(model, masks, needs, prompt)])
    text = _rows_of_text(model, prompts[-1])
    limit = _allowed(model, difference, rounding_of(model.dtype), text, prompts[-1])
    if not difference <= limit:  # NaN included
        return _differs("its forward passes over several tokens differ from those over one token", difference, limit)
    return None


def _largest(model: PreTrainedModel, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference of logits and expected logits; NaN if one is NaN."""
    return float(torch.tensor([apart(*pair, by_position=_is_half(model)) for pair in pairs]).max())


def _differs(what: str, difference: float, limit: float) -> str:
    return f"{what} (by {difference:.2g} of the logits' standard deviation; up to {limit:.2g} could be rounding)"


def _allowed(model: PreTrainedModel, difference: float, limit: float, ids: torch.Tensor, prompt: int) -> float:
    """How large a difference may be. One above the limit is compared with what this model makes of rounding: its logits for
    ids [2, n], one token at a time after the prompt, where what each module returns is moved by a few roundings. Layers that
    round their inputs to 8 bits answer to few of these moves, but by 0.01; to moved embeddings alone, some never do."""
    if difference <= limit or not difference < _WRONG or _is_half(model):
        return limit
    expected = _one_by_one(model, ids, prompt)
    chance = torch.Generator(device_of(model)).manual_seed(0)

    def rounded(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.dtype not in _FLOATS:
            return None
        moved = torch.rand(output.shape, generator=chance, device=chance.device, dtype=output.dtype) * 2 - 1
        return output * (1 + _MOVED * torch.finfo(output.dtype).eps * moved.to(output.device))

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(rounded) for module in innermost]
    try:
        most = max(apart(_one_by_one(model, ids, prompt), expected) for _ in range(_TRIES))
        return max(limit, min(_WRONG, _AMPLIFIED * most))
    finally:
        for hook in hooks:
            hook.remove()


def _rows_of_text(model: PreTrainedModel, prompt: int) -> torch.Tensor:
    """Token ids [2, n] of the trial: two prompts, and what follows each."""
    longest = prompt + 3 + max(map(sum, zip(*_KEEPS, strict=True)))
    ids = torch.arange(7, 7 + 2 * longest, device=device_of(model)).view(2, longest)
    return (ids * 7919) % Traits.of(model).vocabulary


def _compared(
    model: PreTrainedModel, masks: Masks, needs: Needs, prompt: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the runner, and those of the model one token at a time, [2, n, V] each."""
    module, ids = PreparedModule(model), _rows_of_text(model, prompt)
    if Traits.of(model).crosses:
        module = Encoded.trial(model, 2).around(module)
    expected = _one_by_one(model, ids, prompt)
    runner = target_runner(module, slots_for(model, None, 2, ids.shape[1] + 3, masks), masks, needs)
    yield runner.prefill(ids[:, :prompt], None), expected[:, :1]
    here = [0, 0]  # tokens of each row that the slots hold, after the prompt

    def columns(of: torch.Tensor, shift: int) -> torch.Tensor:
        return torch.stack([of[row, shift + at : shift + at + 3] for row, at in enumerate(here)])

    for kept in _KEEPS:
        yield runner(columns(ids, prompt)), columns(expected, 1)
        runner.commit(list(kept))
        here = [at + more for at, more in zip(here, kept, strict=True)]
    wanted = columns(expected, 1)
    if masks.trees:
        # the last two columns both follow the first one
        tree = Draft(columns(ids, prompt)[:, 1:], torch.tensor([2, 2]), parents=torch.tensor([[-1, -1], [-1, -1]]))
        beside = []
        for row, at in enumerate(here):
            path = torch.cat([ids[row, : prompt + at + 1], ids[row, prompt + at + 2 : prompt + at + 3]])
            beside.append(_one_by_one(model, path[None], prompt, [row])[:, -1:])
        yield runner(columns(ids, prompt), tree), torch.cat([wanted[:, :2], torch.cat(beside)], 1)
    else:
        yield runner(columns(ids, prompt)), wanted


def _one_by_one(model: PreTrainedModel, ids: torch.Tensor, prompt: int, rows: Sequence[int] = (0, 1)) -> torch.Tensor:
    """The logits after a prompt and after every further token, as `generate` computes them, [B, 1 + n - prompt, V] float32.

    rows: of the trial that these are, which matters for the input of an encoder.
    """
    cache, traits = DynamicCache(config=model.config.get_text_config(decoder=True)), Traits.of(model)
    both = EncoderDecoderCache(cache, DynamicCache()) if traits.crosses else None
    found = []
    for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))]:
        kwargs: dict[str, Any] = {}
        if both is not None:
            output: Any = alone(model, Encoded.trial(model, 2), [*rows], ids[:, start:end], both)
            found.append(output.logits[:, -1:].float())
            continue
        if start == 0 or traits.cache_argument == CACHE:  # others get a mask for the prompt only
            kwargs["attention_mask"] = torch.ones_like(ids[:, :end])
        if traits.is_given_positions:
            kwargs["position_ids"] = torch.arange(start, end, device=ids.device)[None]
        kwargs[traits.cache_argument] = cache
        output = model(input_ids=ids[:, start:end], use_cache=True, return_dict=True, **kwargs)
        found.append(output.logits[:, -1:].float())
    return torch.cat(found, 1)


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why a model can't continue exactly from a copy of its states; None if it can. Checked on 12 tokens of two rows."""
    size = Traits.of(model).vocabulary
    ids = (torch.arange(7, 31, device=device_of(model)).view(2, 12) * 7919) % size
    prompt, end = 7, 12
    with _attributes_kept(model) as changed:
        expected = _one_by_one(model, ids, prompt)[:, 1:]

        several = _reader(model, ids[:, :prompt])
        together = several(ids[:, prompt:end]).float()
        several.commit([2, 2])
        put_back = several(ids[:, prompt + 2 : end]).float()

        forgetful = _reader(model, ids[:, :prompt])
        forgetful.cache.forget()
        forgotten = forgetful(ids[:, prompt:end]).float()
    if states := [name for name, pair in changed.items() if any(isinstance(one, torch.Tensor) for one in pair)]:
        return f"it keeps its state in its own modules ({states[0]}), not in the cache"
    # Where the state matters little, an empty one gives almost the same logits; rounding is the lower bound.
    size_of_logits = float(expected.square().mean().sqrt() / expected.std())
    least = _LEAST_ROUNDING * torch.finfo(model.dtype).eps * size_of_logits
    limit = min(rounding_of(model.dtype), max(0.25 * apart(forgotten, expected), least))
    for logits, wanted, what in (
        (together, expected, "its forward pass over several tokens differs from the same tokens one by one"),
        (put_back, expected[:, 2:], "it does not continue correctly from a restored state"),
    ):
        difference = _largest(model, [(logits, wanted)])
        limit = _allowed(model, difference, limit, ids, prompt)
        if not difference <= limit:  # NaN included
            return _differs(what, difference, limit)
    return None


def _is_half(model: PreTrainedModel) -> bool:
    return model.dtype not in (torch.float32, torch.float64)


def _reader(model: PreTrainedModel, prompt: torch.Tensor) -> RecurrentModel:
    """A model that has read a prompt of two rows."""
    config = model.config.get_text_config(decoder=True)
    masks = replace(Traits.of(model).masks, trees=False)
    reader = RecurrentModel(model, RecurrentCache(2, 32, config), masks)
    reader.prefill(prompt, None)
    return reader


@contextmanager
def _attributes_kept(model: PreTrainedModel, others: Sequence[Any] = ()) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Restore the attributes of modules and of other objects. At the end, the yielded dictionary has what changed, by name."""
    owners = [*model.named_modules(), *((type(one).__name__, one) for one in others if hasattr(one, "__dict__"))]
    before = [dict(vars(owner)) for _, owner in owners]
    changed: dict[str, tuple[Any, Any]] = {}
    try:
        yield changed
    finally:
        for (name, owner), attributes in zip(owners, before, strict=True):
            for key in {*attributes, *vars(owner)}:
                old, new = attributes.get(key), vars(owner).get(key)
                if old is new or (type(old) is type(new) and type(old) in (bool, float, int, str) and old == new):
                    continue
                changed[f"{name}.{key}".lstrip(".")] = old, new
                if key in attributes:
                    vars(owner)[key] = old
                else:
                    del vars(owner)[key]
