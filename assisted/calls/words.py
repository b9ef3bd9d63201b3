"""What a call asks for in transformers' words: which of them stand for a draft here, which raise an error, and how settings
of its arguments, its config and the model's own config add up.

Knows transformers' arguments and configs; knows nothing of how a call runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from ..distribution import require_temperature
from ..extras import closest
from ..lengths import Adaptive, Confidence, DraftLength, Fixed
from ..methods import NGram

OTHER_MODES = {  # with their counterparts here, if any
    "assistant_model": "make the pair with draft=THE MODEL",
    "assistant_tokenizer": "make the pair with draft_tokenizer=, or pass assistant_model= with it",
    "assistant_early_exit": 'make the pair with draft="early-exit:LAYER"',
    "prompt_lookup_num_tokens": 'make the pair with draft="ngram"',
    "use_mtp": 'make the pair with draft="mtp"',
    "custom_generate": "leave it out",
    "synced_gpus": "leave it out",
}
SET_MODES = ("assistant_early_exit", "prompt_lookup_num_tokens", "use_mtp")  # those in a GenerationConfig
_OTHER_SETTINGS = (  # settings of transformers' own drafting, without effect here
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
)
_COUNT: tuple[Any, Callable[[Any], bool], str] = (int, lambda value: value > 0, "a number of tokens, 1 or more")
_ASKED: dict[
    str, tuple[Any, Callable[[Any], bool], str]
] = {  # settings of transformers that a call may have: their types, what else holds for them, and both in words
    "num_assistant_tokens": _COUNT,
    "num_assistant_tokens_schedule": (
        str,
        lambda value: value in ("constant", "heuristic", "heuristic_transient"),
        '"constant", "heuristic" or "heuristic_transient"',
    ),
    "assistant_confidence_threshold": ((int, float), lambda value: 0 <= value <= 1, "a probability in [0, 1]"),
    "prompt_lookup_num_tokens": _COUNT,
    "max_matching_ngram_size": _COUNT,
}
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ALIKE = 0.8  # of 1: a name this similar to an argument is taken for a misspelling
_USUAL_TOKENS, _USUAL_NGRAM = 20, 2  # what transformers takes where only another of these settings is given


def _set_by(given: GenerationConfig | None, own: GenerationConfig | None) -> dict[str, Any]:
    """The settings of transformers' drafting in a caller's config that differ from the model's own config. Equal ones were not
    chosen for this call: pipelines pass a copy of the model's config."""
    names = (*SET_MODES, *_OTHER_SETTINGS)
    values = {name: getattr(given, name, None) for name in names}
    return {name: value for name, value in values.items() if value != getattr(own, name, None)}


def require_own_drafting(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for arguments that choose or configure transformers' own drafting.

    config, kwargs: of a call of `generate`. own: the model's own config.
    """
    given = {**_set_by(config, own), **kwargs}
    for name, instead in OTHER_MODES.items():
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name}: this model has its own drafter; {instead}, or pass assisted=False")
    for name in _OTHER_SETTINGS:
        if given.get(name) is not None:
            raise ValueError(
                f"{name}: this configures transformers' own drafting, which does not run here; use draft_length and "
                "the draft specs, or pass assisted=False"
            )


@dataclass(frozen=True)
class Asked:
    """What a call asks for in transformers' words, in those of this package."""

    draft: Any  # for this call; None for the pair's own
    draft_tokenizer: Any  # of a draft model
    length: DraftLength | None  # for this call; None if nothing is said of it
    settings: dict[str, Any]  # the settings that these stand for, which are the nearest and not the same

    def __str__(self) -> str:
        given = ", ".join(f"{name} = {value!r}" for name, value in self.settings.items())
        draft = [f"draft={self.draft!r}"] if "prompt_lookup_num_tokens" in self.settings else []
        taken = " and ".join([*draft, f"draft_length={self.length!r}"])
        return f"{given}: this call drafts with {taken}, the nearest that this package has"


def asked_for(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> Asked | None:
    """What the arguments of a call ask for in transformers' words: an assistant, how long to draft, prompt lookup; None if they
    do not. config, own, kwargs: as for `require_own_drafting`.

    Raises ValueError for values that are not possible, and for two that exclude each other.
    """
    given = {**_set_by(config, own), **{name: kwargs[name] for name in _ASKED if name in kwargs}}
    settings = {name: given[name] for name in _ASKED if given.get(name) is not None}
    assistant, lookup = kwargs.get("assistant_model"), settings.get("prompt_lookup_num_tokens")
    if assistant is None and (not settings or settings.keys() == {"max_matching_ngram_size"}):
        return None
    for name, value in settings.items():
        kinds, holds, words = _ASKED[name]
        if isinstance(value, bool) or not isinstance(value, kinds) or not holds(value):
            raise ValueError(f"{name}: {value!r} is not possible; give {words}")
    others = settings.keys() - {"prompt_lookup_num_tokens", "max_matching_ngram_size"}
    if lookup is not None and (assistant is not None or others):
        other = "assistant_model" if assistant is not None else min(others)
        raise ValueError(
            f"prompt_lookup_num_tokens: it drafts from the text, and {other} is of a draft model; pass one of them"
        )
    length: DraftLength | None = None
    if lookup is not None:
        ngram = settings.get("max_matching_ngram_size", _USUAL_NGRAM)
        return Asked(NGram(max_ngram=ngram, min_ngram=1), None, Fixed(lookup), settings)
    if others:
        tokens, threshold = (settings.get(n) for n in ("num_assistant_tokens", "assistant_confidence_threshold"))
        if settings.get("num_assistant_tokens_schedule", "constant") != "constant":
            length = Adaptive()
        elif threshold:
            length = Confidence(threshold, tokens or _USUAL_TOKENS)
        else:
            length = Fixed(tokens or _USUAL_TOKENS)
    return Asked(assistant, kwargs.get("assistant_tokenizer") if assistant is not None else None, length, settings)


def without(
    asked: Asked, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The arguments of a call without what it has asked for. The caller's config is not changed."""
    names = {*asked.settings} | ({"assistant_model", "assistant_tokenizer"} if asked.draft is not None else set())
    if config is not None and asked.settings:
        config = copy.deepcopy(config)
        for name in asked.settings:
            setattr(config, name, None)
    return config, {name: value for name, value in kwargs.items() if name not in names}


def setting_of(kwargs: dict[str, Any], config: GenerationConfig | None, own: GenerationConfig | None, name: str) -> Any:
    """A setting of a call of `generate`: its argument, or that of its config, or the model's own."""
    places = (kwargs.get(name), getattr(config, name, None), getattr(own, name, None))
    return next((value for value in places if value is not None), None)


def set_in(config: GenerationConfig) -> dict[str, Any]:
    """transformers' own drafting methods that a config chooses, with their values."""
    values = {name: getattr(config, name, None) for name in SET_MODES}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def require_numbers(config: GenerationConfig | None, own: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for settings of sampling that transformers takes, but that leave nothing to draw a token from.

    config, own, kwargs: as for `require_own_drafting`.
    """

    setting = functools.partial(setting_of, kwargs, config, own)
    if not setting("do_sample"):
        return
    if isinstance(temperature := setting("temperature"), float) and temperature > 0:
        require_temperature(temperature)
    for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"):
        if isinstance(value := setting(name), float) and math.isnan(value):
            raise ValueError(f"{name}: {value} is no number; give one, or leave it out")


def require_known(kwargs: dict[str, Any], function: Callable[..., Any]) -> None:
    """Raise ValueError for what looks like a misspelled argument of `function`, and for `load_in_4bit=`."""
    own = [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind == _KEYWORD]
    for name in kwargs:
        if name in ("load_in_4bit", "load_in_8bit"):
            raise ValueError(
                f"{name}: quantize when loading: quantization_config=BitsAndBytesConfig({name}=True) for the target, or "
                f'draft_quantization="{"nf4" if "4" in name else "int8"}" for the draft alone'
            )
        if (meant := closest(name, own, _ALIKE)) is not None:
            raise ValueError(f"{name}: there is no such argument; did you mean {meant}?")


def one_of(name: str, value: Any, other: Any) -> Any:
    """An argument that transformers has another name for. Raises ValueError if both are given."""
    if value is not None and other is not None:
        theirs = name.replace("draft", "assistant") if "_" in name else "assistant_model"
        raise ValueError(f"{theirs}: this is another name of {name}, which is given, too; pass one of the two")
    return other if value is None else value
