"""Whether an engine can take a pair: its drafting method, its models, its heads. Errors say what to use instead. Nothing is
written here."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel

from ...engine.traits import Traits
from ...extras import reject
from ...loading.adapters import has_adapter
from ...loading.gguf import unmarked
from ...methods import Spec
from ...methods.eagle.head import EagleHead
from .engines import DRAFTS, ENGINES, NORMS, Engine

MTP = "mtp"


def kind_of(engine: str, spec: Spec, draft: Any = None) -> str:
    """The engine's method for a spec. Raises ValueError, with the draft's name and what to use instead, if it has none.

    draft: as the caller wrote it, None for a saved pair's or the default.
    """
    has = ENGINES[engine]
    kind = spec.served_as
    if kind in has.kinds:
        return str(kind)
    others = [DRAFTS.get(known, f"'{known}'") for known in has.kinds if known != MTP]
    instead = f"use {', '.join(others[:-1])} or {others[-1]}"
    if engine == "llamacpp" and kind == "eagle3":
        instead = (
            "a GGUF file of it could not be verified by reading it back. llama.cpp's own convert_hf_to_gguf.py converts heads "
            f"without fc_norm (--target-model-dir names the target); or {instead}"
        )
    if len(spec.parts()) > 1:
        named = " or ".join(repr(part.name) for part in spec.parts())
        instead = f"hand over one of its drafts ({named}) by draft=, or {instead}"
    if spec.not_served:
        instead = f"{spec.not_served}; {instead}"
    shown = draft if isinstance(draft, str) else spec.name
    raise ValueError(f"draft: {has.title} cannot draft with {shown!r}: {instead}")


def plain_model(model: Any, role: str) -> PreTrainedModel:
    """A model that can be saved as an ordinary checkpoint. Raises ValueError for adapters and packed weights."""
    if has_adapter(model):
        raise ValueError(
            f"{role}: it has a PEFT adapter; merge it (merge_and_unload), save the result and hand that over"
        )
    found = unmarked(model)
    if getattr(found.config, "quantization_config", None) is not None or getattr(found, "is_quantized", False):
        raise ValueError(
            f"{role}: it is quantized, and its checkpoint is not written again; hand over the unquantized model, or give the "
            "engine the quantized folder itself"
        )
    return found


def draft_model(engine: Engine, pair: Any, notes: list[str]) -> tuple[PreTrainedModel, bool]:
    """The draft with as many tokens as the target, and whether it has another tokenizer."""
    drafter, spec = pair.drafter, pair.spec
    model = plain_model(spec.model if isinstance(spec.model, PreTrainedModel) else drafter.models[0], "draft")
    size, own = (Traits.of(one).vocabulary for one in (pair.target, model))
    if drafter.translates:
        if not engine.translates:
            raise ValueError(
                f"draft: its tokenizer is not the target's, and {engine.title} does not translate between the two; use a draft "
                "with the target's tokenizer (assisted train distill makes one), or 'ngram'"
            )
        return model, True
    if own != size:
        model = copy.deepcopy(model)
        model.resize_token_embeddings(size, mean_resizing=False)
        changed = "cut" if own > size else "padded"
        notes.append(f"The draft's vocabulary was {changed} from {own} to the target's {size} entries.")
    return model, False


def require_head(engine: Engine, head: EagleHead, target: PreTrainedModel) -> None:
    """Raise ValueError for a head that the engine would read differently or not at all, or could not run with the target."""
    config, architecture = head.config, type(target).__name__
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    ignored = [name for name in NORMS if getattr(config, name) and name not in engine.norms]
    reads_normed, is_other = config.last_normed and layers in config.taps, len(ignored) > 0
    reject(
        {
            f"draft: {engine.title} cannot run an EAGLE-3 head with a {architecture}, whose hidden states it does not hand to "
            "heads; use a draft model or 'ngram'": architecture in engine.without_taps,
            f"draft: it is an EAGLE-1 head, and only EAGLE-3 heads are handed over to {engine.title}; train one (assisted "
            "train eagle), or use a draft model": config.version != 3,
            f"draft: it is a P-EAGLE head, which is not handed over to {engine.title}; give the engine the head's own folder, "
            "or use a draft model": config.mask_token_id is not None,
            f"draft: the EAGLE-3 head has a sliding window, and {engine.title} is not known to run one; give the engine the "
            "head's own folder, or use a draft model": config.slides,
            f"draft: the EAGLE-3 head reads the target's last state after the final norm, and {engine.title} hands it over "
            "before the norm; train it with other taps, or use a draft model": reads_normed,
            f"draft: the EAGLE-3 head has {' and '.join(ignored)}, which {engine.title} ignores, so it would run a different "
            "head; train it with assisted train eagle --no-norms, hand it over to vllm, or use a draft model": is_other,
        }
    )
