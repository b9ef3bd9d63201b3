"""How a pair is read and written: a target with what belongs to it, of a Hub id, a folder, a GGUF file, an adapter, or a saved
pair; and the folder of a saved pair.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from . import lengths, zoo
from . import methods as drafters
from .calls.inputs import Settings
from .calls.words import Asked
from .configuration import AssistedConfig
from .engine.parts import device_of
from .engine.traits import Traits
from .engine.verifiable import require_verifiable
from .extras import DTYPES
from .loading.adapters import base_path, has_adapter, require_in_layers, restore_magnitudes, save_adapter, trusting
from .loading.classes import auto_class
from .loading.files import copy_processor, inside, loading, require_sound, write_index
from .loading.gguf import named_in, place_of, read_config, unmarked
from .loading.quantization import (
    load_from_gguf,
    remedy,
    require_readable,
    require_whole_head,
    save_target,
    unpack,
    with_recorded,
)
from .loading.vocabulary import find_tokenizer
from .methods import Drafter, Spec, Target

CARD_TAGS = ["assisted", "speculative-decoding"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CARD = """---
library_name: transformers
tags:
{tags}
{base}---

# A target with a draft

{target} and the draft {draft}, which proposes tokens that the target verifies: the output is the target's own, sooner.
Saved by `assisted`, which has to be installed:

    from assisted import AssistedModelForCausalLM

    model = AssistedModelForCausalLM.from_pretrained("{name}")

The folder `target` is an ordinary model of transformers. Check the licenses of both models before you publish the folder.
"""
_OTHERS = 2  # drafts of single calls that are kept
_SNAPSHOT = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_HUB_ARGUMENTS = (*_SNAPSHOT, "proxies", "trust_remote_code")


@dataclass(frozen=True)
class Loaded:
    """A target and what belongs to it."""

    # target, tokenizer, settings: those of the pair
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    settings: Settings
    origin: str  # where the target was read
    for_draft: dict[str, Any]  # arguments for loading the draft
    folder: Path | None  # of the saved pair that names the draft; None if the caller does


def load(
    name: str,
    draft: Any,
    draft_length: Any,
    parsed: Callable[..., Settings],
    tokenizer: PreTrainedTokenizerBase | None,
    model_args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Loaded:
    """Load a target. The arguments are those of `AssistedModelForCausalLM.from_pretrained`; kwargs: its further ones.

    parsed: the settings, of a draft and a draft length.
    """
    path, gguf_file = zoo.resolve(name), kwargs.pop("gguf_file", None)
    if gguf_file is None:
        path, gguf_file = named_in(path)
    config = kwargs.pop("config", None)
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    for_adapter = {**hub, **(kwargs.get("adapter_kwargs") or {})}
    if gguf_file is None:
        require_sound(path, "target")
    with loading("target", path):
        base = base_path(path, "target", **for_adapter)
        own = trusting(path, base, **hub, **_only(kwargs, "subfolder", "code_revision"))
        if gguf_file is not None:
            config = read_config(base, gguf_file, config, **own)
        elif config is None:
            config = AutoConfig.from_pretrained(base, **own)
    saved, folder = isinstance(config, AssistedConfig), None
    if saved:
        place = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, **_only(hub, *_SNAPSHOT)))
        path = str(inside(place, "target", "target"))
        require_sound(path, "target")
        base = base_path(path, "target", **for_adapter)
        if draft is None:
            draft, folder = drafters.read(config.draft, place), place
        if draft_length is None:
            draft_length = lengths.from_dict(config.draft_length)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    else:
        kwargs["config"] = config
    require_readable(config, path, "target")
    settings = parsed(draft, draft_length)
    kwargs = trusting(path, base, **_with_dtype(config, kwargs))
    of_file, origin = dict[str, Any](), base  # an adapter's folder holds none of the base model's heads
    if gguf_file is not None:
        target = load_from_gguf(path, gguf_file, *model_args, **kwargs)
        of_file = {"gguf_file": gguf_file, **_only(kwargs, "subfolder")}
        origin = place_of(path, gguf_file, kwargs)
    else:
        with loading("target", path, remedy(config, kwargs)):
            kind, own = auto_class(config.target if saved else config), _only(kwargs, "trust_remote_code")
            kwargs = with_recorded(AutoConfig.from_pretrained(base, **own) if saved else config, kwargs)
            target = kind.from_pretrained(path, *model_args, **kwargs)
            restore_magnitudes(target, path, "target", **for_adapter)
    side = padding_side(target)
    found = tokenizer or find_tokenizer(path, **hub, **of_file, **side)
    if found is None and base != path:
        found = find_tokenizer(base, **trusting(path, base, **hub), **side)
    for_draft = _only(hub, *(name for name in hub if name != "revision"))
    for_draft |= {} if folder is None else {"trust_remote_code": False}
    return Loaded(target, found, settings, origin, for_draft, folder)


def draft_for(
    target: PreTrainedModel,
    spec: Spec,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | None,
    hub: dict[str, Any],
) -> tuple[Spec, Drafter]:
    """The spec as it was chosen for a target, and its drafter. path: where the target was read. hub: Hub arguments.

    Raises ValueError for a target that cannot verify drafts, and for a draft that does not fit.
    """
    require_in_layers(target, "target")
    require_whole_head(target)
    unpack(target)
    require_verifiable(target)
    device = device_of(target)
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}
    about = Target(target, tokenizer, path)
    spec = spec.chosen(about)
    drafters.require_fitting(spec, target)
    return spec, spec.load(about, dtype=target.dtype, **placed, **hub)


def other_pair(pair: Any, asked: Asked, tokenizer: PreTrainedTokenizerBase | None) -> Any:
    """The pair that runs a call: the target with the draft that was asked for, set as this pair is.

    Raises ValueError or OSError for drafts that do not fit.
    """
    draft, of_draft = asked.draft, asked.draft_tokenizer
    own: Any = getattr(pair.drafter, "model", None)
    if draft is None or (draft is own and of_draft in (None, getattr(pair.drafter, "tokenizer", None))):
        return pair
    key = (draft if isinstance(draft, (str, Spec)) else id(draft), id(of_draft))
    if key not in pair.other_pairs:
        try:
            other = pair.from_models(
                pair.target, draft, tokenizer=pair.tokenizer or tokenizer, draft_tokenizer=of_draft
            )
        except (ValueError, OSError) as error:
            raise (OSError if isinstance(error, OSError) else ValueError)(f"assistant_model: {error}") from error
        pair.other_pairs = dict([*pair.other_pairs.items(), (key, (asked, other))][-_OTHERS:])
    named = draft if isinstance(draft, str) else getattr(draft, "name_or_path", "") or type(draft).__name__
    other = pair.other_pairs[key][1]
    named = repr(draft) if isinstance(draft, Spec) else named
    other.settings = replace(pair.settings, spec=other.spec, named=named)
    other.watch, other._warned, other._recorded = pair.watch, pair._warned, pair._recorded
    return other


def save(pair: Any, folder: Path, custom_generate: bool, kwargs: dict[str, Any]) -> None:
    """Write a pair into a folder. The arguments are those of `AssistedModelForCausalLM.save_pretrained`; kwargs: those of the
    target's own."""
    folder.mkdir(parents=True, exist_ok=True)
    target = pair.target
    if has_adapter(target):
        save_adapter(target, folder / "target", "target", **kwargs)
    else:
        target = unmarked(target)
        save_target(target, folder / "target", **kwargs)
    if kwargs.get("is_main_process") is False:
        return
    write_index(folder, "target")
    if pair.tokenizer is not None:
        pair.tokenizer.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder / "target")
    if Traits.of(pair.target).reads:
        copy_processor(pair.target.name_or_path, folder, folder / "target")
    settings = pair.settings
    settings.spec.save(pair.drafter, folder / "draft", pair.tokenizer)
    pair.config.draft_length = lengths.to_dict(settings.draft_length)
    config = copy.copy(pair.config)
    if target is not pair.target:
        config.target = target.config
    config.save_pretrained(folder)
    if custom_generate:
        config.save_entry(folder)
    if not (card := folder / "README.md").exists():
        card.write_text(_card(pair, folder.name), encoding="utf-8")


def _card(pair: Any, name: str) -> str:
    """The model card of a saved pair. It names Hub ids, and no folders of this machine. name: of the folder."""
    origin = pair.target.name_or_path or ""
    is_id = _HUB_ID.fullmatch(origin) is not None and not Path(origin).exists()
    return _CARD.format(
        tags="\n".join(f"- {tag}" for tag in CARD_TAGS),
        base=f"base_model: {origin}\n" if is_id else "",
        target=f"`{origin}`" if is_id else f"A target ({type(pair.target).__name__})",
        draft=f"`{type(pair.spec).__name__}`",
        name=name,
    )


def padding_side(target: Any) -> dict[str, str]:
    """How a target's tokenizer pads: a text goes on after its last token. An encoder's input does not go on."""
    return {} if Traits.of(target).crosses else {"padding_side": "left"}


def _with_dtype(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The default dtype is half precision on an accelerator, and the checkpoint's own on a CPU."""
    if kwargs.get("dtype") in DTYPES:
        return {**kwargs, "dtype": DTYPES[kwargs["dtype"]]}
    if kwargs.get("dtype") is not None or kwargs.get("torch_dtype") is not None:
        return kwargs
    dtype: Any = "auto"
    if kwargs.get("device_map") is not None and torch.cuda.is_available():
        own = config.get_text_config(decoder=True).dtype
        if own not in (torch.float16, torch.bfloat16):
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return {**kwargs, "dtype": dtype}


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
