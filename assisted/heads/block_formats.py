"""Reads the files of block drafters as z-lab, DeepSpec, SpecForge, ModelOpt, NeMo Automodel, speculators and transformers (Muse
Glimmer) write them, and writes speculators' format. `_LAYOUTS` and `_KEYS` say who calls what by which name; the rest covers
the numbering of layers, and what each producer leaves out. Reading is strict.

No published checkpoint was available for a test: the layouts are those that vLLM, speculators, z-lab's code and transformers
read, tested on synthetic files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Qwen3Config

from ..loading.files import loading
from .block import BlockHead
from .block_config import BlockConfig
from .eagle_config import FULL, LAYER_FIELDS, SLIDING
from .eagle_formats import as_speculators, require_fields, rope_of
from .files import (
    Checkpoint,
    Layout,
    Shapes,
    agreed,
    best_fit,
    find_folder,
    is_copy,
    read_head,
    require_fitting,
    tensors_of,
    values_of,
    write_head,
)

__all__ = ["is_block", "load_block", "require_block", "save_block"]

_SPECULATORS = ("dflash", "dspark", "dflash2")
_MUSE = "muse_glimmer_assistant"
_MARKS = ("DFlash", "DSpark", "Domino", "JetSpec")  # in the architectures of a block drafter
_UNREAD = ("Domino", "JetSpec", "Laguna", "DFlare")
_PAST = ("verifier_norm.weight", "verifier_lm_head.weight")  # the target's, for speculators' training
_LAYOUTS = (
    Layout("a block drafter of z-lab, DeepSpec, SpecForge, NeMo Automodel or speculators", (), _PAST),
    Layout("Muse Glimmer's assistant", ((r"encoder\.fc\.", "fc."), (r"encoder\.output_norm_enc\.", "hidden_norm."))),
    Layout(
        "a DSpark drafter of ModelOpt",
        (
            (r"(?=markov_w[12]\.|gate_proj\.|joint_proj\.)", "markov_head."),
            (r"confidence_proj\.", "confidence_head.proj."),
        ),
    ),
    Layout("a DFlash2 drafter of an older trainer", ((r"(candidate_selector\.\w+_codebook)\.weight", r"\1"),), _PAST),
)
_NAMES = (
    *("fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    *("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"),
)
"""Tensors that tell the layouts apart."""
_KEYS = {
    "draft_vocab_size": ("draft_vocab_size",),
    "block_size": ("block_size",),
    "mask_token_id": ("mask_token_id",),
    "next_token": ("sample_from_anchor", "query_zero_predicts_next", "shift_label"),
    "causal": ("is_causal", "causal"),
    "last_normed": ("last_normed",),
    "embedding_scale": ("input_embedding_scale",),
    "logit_scale": ("output_multiplier",),
    "logit_cap": ("final_logit_softcapping",),
    "markov": ("markov_head_type",),
    "markov_rank": ("markov_rank",),
    "confidence": ("enable_confidence_head", "use_confidence_head"),
    "confidence_markov": ("confidence_head_with_markov",),
    "conv_size": ("conv_kernel_size",),
    "conv_group_size": ("conv_group_size",),
    "selector_rank": ("selector_rank",),
    "selector_top_k": ("selector_top_k",),
}
"""The names in configs of what is in `BlockConfig`, first speculators'."""


def load_block(path: str | Path, target: PreTrainedModel, **hub: Any) -> BlockHead:
    """Load a block drafter from a path (a folder, a `zoo:` name or a Hub id), in its stored dtype, on the CPU.

    Copies of the target's embedding and output embedding in the files are left out. hub: download options.

    Raises ValueError for a drafter of another kind or made for a target of other sizes, and for a missing, unknown or misshapen
    tensor, with its name and the layout that fits best.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        checkpoint, config = _checked(folder, target)
        tensors = read_head(checkpoint, config)
        shared: dict[str, Any] = {}
        for name, field, module in (
            ("embed_tokens.weight", "own_embedding", target.get_input_embeddings()),
            ("lm_head.weight", "own_output", target.get_output_embeddings()),
        ):
            if name in tensors and config.draft_vocab_size == config.vocab_size and is_copy(tensors[name], module):
                del tensors[name]
                shared[field] = False
        head = BlockHead(replace(config, **shared)).to(tensors["fc.weight"].dtype)
        head.load_state_dict(tensors)
        return head.eval()


def require_block(path: str | Path, target: PreTrainedModel, **hub: Any) -> BlockConfig:
    """Check the drafter at a path, as `load_block` takes it, without reading its weights, and return its config. target: may be
    on the meta device. hub: download options.

    Raises ValueError where `load_block` does, except for what only the weights show.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        return _checked(folder, target)[1]


def is_block(fields: Mapping[str, Any], folder: Path) -> bool:
    """Whether a folder holds a block drafter, perhaps of a kind that cannot be read. fields: of its config.json."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in _SPECULATORS
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
    architecture = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}.get(kind, "DFlash2DraftModel")
    fields = as_speculators(head, kind, architecture, fields, layer, config.drafts, target)
    write_head(folder, fields, tensors_of(head))


def _checked(folder: Path, target: PreTrainedModel) -> tuple[Checkpoint, BlockConfig]:
    """The checkpoint with our names, and the config. Nothing is allocated."""
    found = Checkpoint.open(folder)
    fields = found.fields
    values = values_of(fields, "dflash_config")
    named = str([fields.get("architectures"), fields.get("model_type"), values.get("projector_type")])
    for kind in _UNREAD:
        if kind.lower() in named.lower():
            raise ValueError(
                f"draft: {folder} is a {kind} drafter, which cannot be read; DFlash, DSpark and DFlash2 can"
            )
    if "dspark_block_size" in fields or any(name.startswith("mtp.") for name in found.shapes):
        raise ValueError(
            f"draft: {folder} holds the DSpark drafter of DeepSeek-V4-Flash (mtp.*), which cannot be read: its layers are not "
            "Qwen3's"
        )
    found = found.under(best_fit(found.shapes, _LAYOUTS, lambda layout: _NAMES))
    for part in (fields, fields.get("transformer_layer_config") or {}):
        sized = {name: value for name, value in part.items() if name != "draft_vocab_size"} if part is fields else part
        require_fields(sized, found.shapes, found.config_file)
    wanted = target.config.get_text_config(decoder=True)
    config = _config_of(values, found.shapes, wanted, folder)
    rows = target.get_input_embeddings()
    most = wanted.vocab_size if rows is None else max(wanted.vocab_size, getattr(rows, "num_embeddings", 0))
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < most:
        raise ValueError(f"draft: {folder}: mask_token_id: the target has no embedding of token {config.mask_token_id}")
    require_fitting(found, config, BlockHead, wanted)
    return found, config


def _config_of(own: Mapping[str, Any], shapes: Shapes, wanted: Any, folder: Path) -> BlockConfig:
    """The config of any producer. own: all values of config.json. wanted: the target's text config."""

    of_speculators, is_muse = "speculators_model_type" in own, own.get("model_type") == _MUSE
    layer = own.get("transformer_layer_config", {}) if of_speculators else own
    ids = own.get(key := "aux_hidden_state_layer_ids" if of_speculators else "target_layer_ids")
    if not (isinstance(ids, list) and ids and all(type(tap) is int for tap in ids)):
        raise ValueError(
            f"draft: {folder} is no block drafter, or its config.json is incomplete: {key} is {ids!r}, but it has to list the "
            "target's layers that the drafter reads"
        )
    taps = tuple(ids if of_speculators else (tap + 1 for tap in ids))  # others count layers from 0
    # raw DeepSpec files predict the next token and do not say so; all others say so, or do not
    of_deepspec = not (of_speculators or is_muse or "dflash_config" in own)
    said = ({"block_size": 16} if "dflash_config" in own else {}) | agreed(own, _KEYS)
    if "block_size" not in said:
        raise ValueError(f"draft: {folder}: block_size is missing")
    if "mask_token_id" not in said and "mask_embedding" not in shapes:
        raise ValueError(f"draft: {folder}: mask_token_id is missing")
    defaults, given = Qwen3Config(), values_of(layer)
    values = {name: given.get(name, getattr(defaults, name)) for name in LAYER_FIELDS}
    values["vocab_size"] = given.get("vocab_size", wanted.vocab_size)
    kinds = given.get("layer_types") or [SLIDING if is_muse else FULL] * values["num_hidden_layers"]
    if own.get("use_swa"):  # ModelOpt: in all layers
        kinds = [SLIDING] * len(kinds)
    windows = agreed({**own, **given}, {"window": ("swa_window_size", "sliding_window")})
    window = windows.get("window") if SLIDING in kinds else None
    if window is None:
        sliding_causal = False
    elif of_speculators:
        sliding_causal = not own.get("sliding_window_non_causal", True)
    elif is_muse or of_deepspec:
        sliding_causal = False
    else:  # z-lab's code and vLLM: sliding layers are causal unless the file says otherwise
        sliding_causal = bool(said.get("causal", True))
    if "fc.weight" not in shapes:
        raise ValueError(f"draft: {folder} lacks tensor fc.weight")
    width = shapes["fc.weight"][-1]
    if width % len(taps):
        raise ValueError(
            f"draft: {folder} holds fc.weight for {width} numbers, which are not those of {len(taps)} layers"
        )
    for name, default in (
        ("next_token", own.get("speculators_model_type") == "dspark" or of_deepspec),
        ("causal", False),
        # vLLM, which speculators train with, gives the last layer's output before the final norm; transformers after it
        ("last_normed", not of_speculators),
        ("confidence", False),
        ("confidence_markov", "use_confidence_head" in own),  # ModelOpt's always reads the token before
    ):
        said[name] = bool(said.get(name, default))
    has_markov = bool(said.get("markov_rank"))
    return BlockConfig(
        **values,
        **said
        | {
            "markov": said.get("markov", "vanilla") if has_markov else None,
            "confidence_markov": has_markov and said["confidence"] and said["confidence_markov"],
            "logit_cap": said.get("logit_cap") or None,
        },
        taps=taps,
        target_hidden_size=width // len(taps),
        layer_types=tuple(kinds),
        # transformers includes the position that lies a whole window back
        sliding_window=window + 1 if window is not None and is_muse else window,
        sliding_causal=sliding_causal,
        rope=rope_of(layer, 1e6),
        bias=bool(layer.get("attention_bias", False)),
        own_embedding="embed_tokens.weight" in shapes,
        own_output="lm_head.weight" in shapes,
    )
