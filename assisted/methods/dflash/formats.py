"""Reads the files of block drafters as z-lab, DeepSpec, SpecForge, ModelOpt, NeMo Automodel, speculators and transformers (Muse
Glimmer) write them, and writes speculators' format. `_LAYOUTS` and `_KEYS` say who calls what by which name; the rest covers
the numbering of layers, and what each producer leaves out. Reading is strict.

No published checkpoint was available for a test: the layouts are those that vLLM, speculators, z-lab's code and transformers
read, tested on synthetic files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..eagle.config import FULL, SLIDING
from ..eagle.formats import PAST, TAPS, checked_values, head_as_speculators, layer_of
from ..shared.files import Checkpoint, Layout, agreed, load_head, refuse, require_head, tensors_of, write_head
from .config import BlockConfig
from .head import BlockHead

__all__ = ["is_block", "load_block", "require_block", "save_block"]

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
_MUSE = "muse_glimmer_assistant"
_MARKS = ("DFlash", "DSpark", "Domino", "JetSpec", "XPress")  # in the architectures of a block drafter
_REFUSED = {
    f"(?i).*{kind}": f"it is a {kind} drafter, which cannot be read; DFlash, DSpark and DFlash2 can"
    for kind in ("Domino", "JetSpec", "Laguna", "DFlare", "XPress")
} | {
    r"mtp\.|dspark_block_size$": "it holds the DSpark drafter of DeepSeek-V4-Flash (mtp.*), which cannot be read: its layers "
    "are not Qwen3's",
}
_LAYOUTS = (
    Layout("a block drafter of z-lab, DeepSpec, SpecForge, NeMo Automodel or speculators", read_past=PAST),
    Layout("Muse Glimmer's assistant", ((r"fc\.", "encoder.fc."), (r"hidden_norm\.", "encoder.output_norm_enc."))),
    Layout("a DSpark drafter of ModelOpt", ((r"markov_head\.", ""), (r"confidence_head\.proj\.", "confidence_proj."))),
    Layout("a DFlash2 drafter of an older trainer", ((r"(candidate_selector\.\w+_codebook)", r"\1.weight"),), PAST),
)
_NAMES = (
    *("fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    *("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
)
"""Tensors that tell the layouts apart."""
_SAME = ("draft_vocab_size", "block_size", "last_normed", "conv_group_size", "selector_rank", "selector_top_k")
_KEYS = {
    **{name: (name,) for name in _SAME},
    # the second names, here and below, are NVIDIA's
    "mask_token_id": ("mask_token_id", "pard_token"),
    "markov_rank": ("markov_rank", "dspark_markov_rank"),
    "sinks": ("attention_sink_bias",),
    "next_token": ("sample_from_anchor", "query_zero_predicts_next", "shift_label"),
    "causal": ("is_causal", "causal", "dflash_query_causal"),
    "embedding_scale": ("input_embedding_scale",),
    "logit_scale": ("output_multiplier",),
    "logit_cap": ("final_logit_softcapping",),
    "markov": ("markov_head_type",),
    "confidence": ("enable_confidence_head", "use_confidence_head"),
    "confidence_markov": ("confidence_head_with_markov",),
    "conv_size": ("conv_kernel_size",),
}
"""The names in configs of what is in `BlockConfig`, first speculators'."""


def load_block(path: str | Path, target: PreTrainedModel, **hub: Any) -> BlockHead:
    """Load a block drafter from a path (a folder, a `zoo:` name or a Hub id), in its stored dtype, on the CPU.

    Copies of the target's embedding and output embedding in the files are left out. hub: download options.

    Raises ValueError for a drafter of another kind or made for a target of other sizes, and for a missing, unknown or misshapen
    tensor, with its name and the layout that fits best.
    """
    return load_head(path, target, BlockHead, _opened, hub, ("embed_tokens.weight", "lm_head.weight"))


def require_block(path: str | Path, target: PreTrainedModel, **hub: Any) -> BlockConfig:
    """Check the drafter at a path, as `load_block` takes it, without reading its weights, and return its config. target: may be
    on the meta device. hub: download options.

    Raises ValueError where `load_block` does, except for what only the weights show.
    """
    return require_head(path, target, BlockHead, _opened, hub)


def is_block(fields: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds a block drafter, perhaps of a kind that cannot be read. fields: of its config.json."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in _ARCHITECTURES
    marked = any(mark in str(fields.get("architectures")) for mark in _MARKS)
    return marked or "dflash_config" in fields or fields.get("model_type") == _MUSE


def save_block(head: BlockHead, folder: str | Path, target: PreTrainedModel | None = None) -> None:
    """Write config.json and model.safetensors in speculators' format; `load_block` restores the same drafter.

    Speculators' keys are all written, also those that have a default. The format has no place for a mask embedding and for
    scaled logits; they are written as `mask_embedding` and as z-lab's keys.

    head: what is written. target: whose name is stored, unless that is a local folder.
    """
    config = head.config
    kind = "dflash2" if config.selector_rank else "dspark" if config.markov or config.confidence else "dflash"
    fields = {
        **{names[0]: getattr(config, field) for field, names in _KEYS.items()},
        "aux_hidden_state_layer_ids": list(config.taps),
        "sliding_window_non_causal": not config.sliding_causal,
    }
    layer = {"model_type": "qwen3", "attention_bias": config.bias}
    fields = head_as_speculators(head, target, kind, _ARCHITECTURES[kind], fields, config.drafts, layer)
    write_head(folder, fields, tensors_of(head))


def _opened(folder: Path, target: PreTrainedModel) -> tuple[Checkpoint, BlockConfig]:
    """The checkpoint of any producer in its layout, and its config; the sizes in it are compared with the tensors."""
    found, wanted = Checkpoint.open(folder), target.config.get_text_config(decoder=True)
    fields, rows = found.fields, target.get_input_embeddings()
    given = checked_values(found, wanted.num_hidden_layers, "transformer_layer_config", "dflash_config")
    kinds = (*(fields.get("architectures") or ()), fields.get("model_type"), given.get("projector_type"))
    refuse(folder, (*kinds, *fields, *found.shapes), _REFUSED)
    found = found.under(*_LAYOUTS, marks=lambda layout: _NAMES)
    speculators, is_muse = fields.get("speculators_model_type"), fields.get("model_type") == _MUSE
    ids = given.get(key := "aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    if ids is None:
        raise ValueError(
            f"draft: {folder} is no block drafter, or its config.json is incomplete: {key} is {ids!r}, but it has to list the "
            "target's layers that the drafter reads"
        )
    of_deepspec = not (speculators or is_muse or "dflash_config" in fields)
    said = ({"block_size": 16} if "dflash_config" in fields else {}) | agreed(given, _KEYS)
    required = ("block_size",) if found.shape("mask_embedding") else ("block_size", "mask_token_id")
    if missing := [name for name in required if name not in said]:
        raise ValueError(f"draft: {folder}: {missing[0]} is missing")
    if not 0 <= said.get("mask_token_id", 0) < max(wanted.vocab_size, getattr(rows, "num_embeddings", 0)):
        raise ValueError(
            f"draft: {folder}: mask_token_id: the target has no embedding of token {said['mask_token_id']}"
        )
    layer = layer_of({"vocab_size": wanted.vocab_size} | given, "qwen3", 1e6)
    types = given.get("layer_types") or [SLIDING if is_muse else FULL] * layer["num_hidden_layers"]
    types = [SLIDING] * len(types) if given.get("use_swa") else types  # ModelOpt: in all layers
    window: Any = agreed(given, {"window": ("swa_window_size", "sliding_window")}).get("window")
    slides = SLIDING in types and window is not None
    # z-lab's code and vLLM: sliding layers are causal unless the file says otherwise
    said["sliding_causal"] = bool(
        slides
        and not (is_muse or of_deepspec)
        and (not given.get("sliding_window_non_causal", True) if speculators else said.get("causal", True))
    )
    *_, read = found.shape("fc.weight") or (len(ids) * wanted.hidden_size,)
    if read % len(ids):
        raise ValueError(
            f"draft: {folder} holds fc.weight for {read} numbers, which are not those of {len(ids)} layers"
        )
    defaults = {
        # SpecForge's labels begin after the anchor, too, and neither DeepSpec's nor its files say so
        "next_token": of_deepspec or any("dspark" in str(kind).lower() for kind in (*kinds, speculators)),
        # vLLM, which speculators and NVIDIA train with, gives the last layer's output before the final norm; transformers
        # after it. NVIDIA's files (Nemotron 3.5) have the ids of vLLM as well
        "last_normed": not speculators and TAPS not in fields,
        "confidence_markov": "use_confidence_head" in given,  # ModelOpt's always reads the token before
        "sinks": found.shape("layers.0.self_attn.attention_sink_bias"),
    }
    said |= {name: bool(said.get(name, defaults.get(name))) for name in (*defaults, "causal", "confidence")}
    has_markov = bool(said.get("markov_rank"))
    said["markov"] = said.get("markov", "vanilla") if has_markov else None
    said["confidence_markov"] &= has_markov and said["confidence"]
    said["logit_cap"] = said.get("logit_cap") or None
    # transformers includes the position that lies a whole window back
    said |= {"layer_types": tuple(types), "sliding_window": window + is_muse if slides else None}
    return found, BlockConfig(
        **(layer | said),
        taps=tuple(ids if speculators else (tap + 1 for tap in ids)),  # others count layers from 0
        target_hidden_size=read // len(ids),
        bias=bool(given.get("attention_bias", False)),
        own_embedding=bool(found.shape("embed_tokens.weight")),
        own_output=bool(found.shape("lm_head.weight")),
    )
