"""Who takes part: plain `generate` in the stack's modes, transformers' own drafting, and the drafters of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import CompileConfig, PreTrainedModel

from ...engine.libraries import compile_anywhere
from ...lengths.policies import Never
from ...loading.quantization import memory_bytes
from ...methods.shared.registry import windows
from ...modeling import AssistedModelForCausalLM

Generate = Callable[..., torch.Tensor]

# num_assistant_tokens and assistant_confidence_threshold of transformers' assisted generation; the first is its default
PEERS = ((20, 0.4), (6, 0.4), (4, 0.0), (3, 0.0))
# prompt_lookup_num_tokens and max_matching_ngram_size of its prompt lookup
LOOKUPS = ((10, 2), (5, 3), (4, 2))


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Args:
        name: of its row.
        family: "plain", "transformers assisted", "transformers lookup", "no draft" or "assisted". The fastest plain one is
            1.00; "no draft" is this package's loop alone, which tells what drafting adds.
        generate: is called like a model's `generate`: ids [B, P] int64, attention_mask, streamer, and the same keywords for
            all; returns [B, P + new] int64.
        setting: its settings, for the JSON.
        model: the pair, if it is one of this package's; its report gives more figures.
        counted: whether a hook on the target counts its forward passes, in a repeat of its own. The baseline needs none: it
            takes one for every token. Nor could it: a hook would make a compiled forward compile again.
        draft_bytes: bytes of weights that it holds besides the target's.
    """

    name: str
    family: str
    generate: Generate
    setting: dict[str, Any] = field(default_factory=dict)
    model: AssistedModelForCausalLM | None = None
    counted: bool = True
    draft_bytes: int = 0


def plain(target: PreTrainedModel, compiled: bool = True) -> list[Method]:
    """Plain `generate` of a target in every mode that may be the fastest.

    compiled: also with a static cache and a compiled forward; on a CPU this needs a C++ compiler and some minutes.
    """
    found = _in_both_modes(target, [Method("plain", "plain", target.generate, {"cache": "dynamic"}, counted=False)])
    if compiled:
        generate = partial(target.generate, cache_implementation="static")
        if target.device.type == "cpu":  # elsewhere it compiles by itself
            compile_anywhere(config := CompileConfig(mode="default"))
            generate = partial(generate, compile_config=config)
        setting = {"cache": "static", "compiled": True}
        found.append(Method("plain, static cache, compiled", "plain", generate, setting, counted=False))
    return found


def peers(target: PreTrainedModel, draft: PreTrainedModel, tokenizers: tuple[Any, Any] | None = None) -> list[Method]:
    """transformers' assisted generation of a target with a draft model, at every setting. tokenizers: those of both models, if
    they differ."""
    kwargs = {} if tokenizers is None else {"tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}
    weights = _bytes_beside(target, [draft])
    found = []
    for count, threshold in PEERS:
        name = f"transformers assisted {count}, {threshold:g}"
        setting = {"num_assistant_tokens": count, "assistant_confidence_threshold": threshold}
        run = partial(_with_assistant, target, draft, setting, **kwargs)
        found.append(Method(name, "transformers assisted", run, setting, draft_bytes=weights))
    return _in_both_modes(target, found)


def lookups(target: PreTrainedModel) -> list[Method]:
    """transformers' prompt lookup, at every setting."""
    found = []
    for count, ngram in LOOKUPS:
        name = f"transformers lookup {count}, {ngram}"
        setting = {"prompt_lookup_num_tokens": count, "max_matching_ngram_size": ngram}
        found.append(Method(name, "transformers lookup", partial(target.generate, **setting), setting))
    return _in_both_modes(target, found)


def assisted(
    target: PreTrainedModel,
    drafts: Mapping[str, Any],
    tokenizer: Any = None,
    draft_length: Any = None,
    draft_window: int | None = None,
) -> Iterator[Method]:
    """This package's drafters. One that cannot be loaded takes part all the same, and fails with the error from loading it.

    drafts: by the name of the row, what `AssistedModelForCausalLM.from_models` takes as draft. It also gets target, tokenizer
        and draft_length, and draft_window if it has one.
    """
    each = windows([*drafts.values()], draft_window)
    for (name, draft), window in zip(drafts.items(), each, strict=True):
        try:
            model = AssistedModelForCausalLM.from_models(target, draft, draft_length, tokenizer, draft_window=window)
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            yield Method(f"assisted {name}", "assisted", partial(_fail, error), {"draft": name})
        else:
            yield of_model(f"assisted {name}", model)


def undrafted(target: PreTrainedModel) -> Method:
    """This package's loop, forward passes and kernels, without a draft."""
    model = AssistedModelForCausalLM.from_models(target, "suffix", Never())
    return replace(of_model("assisted, no draft", model), family="no draft")


def of_model(name: str, model: AssistedModelForCausalLM, counted: bool = False) -> Method:
    """A loaded pair, `model`, in the row `name`. Nobody else may generate with it during a race, which reads its totals.

    counted: also count its forward passes with a hook, which agrees with the totals and takes another repeat.
    """
    weights = _bytes_beside(model.target, model.drafter.modules)
    setting = {"draft_length": repr(model.draft_length)}
    return Method(name, "assisted", model.generate, setting, model, counted, weights)


def _in_both_modes(target: PreTrainedModel, found: list[Method]) -> list[Method]:
    """The same methods, and again without oneDNN where that may be faster."""
    half = target.device.type == "cpu" and target.dtype == torch.bfloat16
    if not half or not torch.backends.mkldnn.is_available():
        return found  # in half precision on a CPU, oneDNN's products over one row take longer than the default ones
    off = {"onednn": False}
    return found + [
        replace(
            one,
            name=f"{one.name}, oneDNN off",
            generate=partial(_without_onednn, one.generate),
            setting=one.setting | off,
        )
        for one in found
    ]


def _without_onednn(generate: Generate, *args: Any, **kwargs: Any) -> torch.Tensor:
    onednn = torch.backends.mkldnn
    # flags() sets the ones that are left out to defaults, with a warning
    with onednn.flags(False, onednn.deterministic, onednn.allow_tf32, onednn.fp32_precision):
        return generate(*args, **kwargs)


def _with_assistant(
    target: PreTrainedModel, draft: PreTrainedModel, setting: Mapping[str, Any], *args: Any, **kwargs: Any
) -> torch.Tensor:
    wanted = {**setting, "num_assistant_tokens_schedule": "constant", "eos_token_id": None}
    before = draft.generation_config
    draft.generation_config = copy(before)
    for name, value in wanted.items():  # which transformers reads only there
        setattr(draft.generation_config, name, value)
    try:
        return target.generate(*args, assistant_model=draft, **kwargs)
    finally:
        draft.generation_config = before


def _fail(error: Exception, *args: Any, **kwargs: Any) -> torch.Tensor:
    raise error


def _bytes_beside(target: PreTrainedModel, modules: Sequence[torch.nn.Module]) -> int:
    return memory_bytes(torch.nn.ModuleList([target, *modules])) - memory_bytes(target)
