"""Reads the files of block drafters as z-lab, DeepSpec, SpecForge, speculators and transformers (Muse Glimmer) write them, and
writes speculators' format. Covers tensor names, the numbering of layers, and what each producer leaves out. Reading is strict.

No published checkpoint was available for a test: the layouts are those that vLLM, speculators, z-lab's code and transformers
read, tested on synthetic files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from ..loading.files import fields_of, loading, write_json
from .block import BlockHead
from .block_config import FULL, SLIDING, BlockConfig
from .eagle_config import LAYER_FIELDS
from .eagle_formats import VERSION, draft_mask, require_fields, rope_of, speculators_config
from .files import find_file, find_folder, read_tensors, require_tensors

__all__ = ["is_block", "load_block", "require_block", "save_block"]

_SPECULATORS = ("dflash", "dspark", "dflash2")
_MUSE = "muse_glimmer_assistant"
_MARKS = ("DFlash", "DSpark", "Domino", "JetSpec")  # in the architectures of a block drafter
_UNREAD = ("Domino", "JetSpec", "Laguna", "DFlare")
_COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")  # of the target, for speculators' training
_RENAMED = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))
_SELECTOR = ("conv_size", "conv_group_size", "selector_rank", "selector_top_k")
_FILE = "model.safetensors"


def load_block(path: str | Path, target: PreTrainedModel, **hub: Any) -> BlockHead:
    """Load a block drafter from a path (a folder, a `zoo:` name or a Hub id), in its stored dtype, on the CPU.

    Copies of the target's embedding and output embedding in the files are left out. hub: download options.

    Raises ValueError for a drafter of another kind or made for a target of other sizes, and for a missing, unknown or misshapen
    tensor, with its name.
    """
    folder = find_folder(path, **hub)
    with loading("draft", folder):
        file, config = _checked(folder, target)
        tensors = {_own(name): tensor for name, tensor in read_tensors(file).items() if name not in _COPIES}
        known, dtype = tensors.pop("t2d", None), tensors["fc.weight"].dtype
        if not dtype.is_floating_point:
            raise ValueError(f"draft: {file} holds fc.weight in {dtype}; floating point is expected")
        shared: dict[str, Any] = {}
        for name, field, module in (
            ("embed_tokens.weight", "own_embedding", target.get_input_embeddings()),
            ("lm_head.weight", "own_output", target.get_output_embeddings()),
        ):
            if name in tensors and config.draft_vocab_size == config.vocab_size and _is_copy(tensors[name], module):
                del tensors[name]
                shared[field] = False
        config = replace(config, **shared)
        head = BlockHead(config).to(dtype)
        head.load_state_dict(tensors)
        if known is not None and not torch.equal(known.bool(), draft_mask(head)):
            raise ValueError(f"draft: {folder} holds t2d and d2t that name different tokens")
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
    config, folder = head.config, Path(folder)
    kind = "dflash2" if config.selector_rank else "dspark" if config.markov or config.confidence else "dflash"
    window = {} if config.sliding_window is None else {"sliding_window": config.sliding_window}
    fields = {
        "architectures": [{"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}.get(kind, "DFlash2DraftModel")],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.next_token,
        "sliding_window_non_causal": not config.sliding_causal,
        "is_causal": config.causal,
        "dtype": str(head.dtype).removeprefix("torch."),
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_cap,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_markov,
        "conv_kernel_size": config.conv_size,
        **{name: getattr(config, name) for name in _SELECTOR[1:]},
        "transformer_layer_config": {
            "model_type": "qwen3",
            **{name: getattr(config, name) for name in LAYER_FIELDS},
            "attention_bias": config.bias,
            "layer_types": list(config.kinds),
            "rope_parameters": dict(config.rope),
            "tie_word_embeddings": False,
            **window,
        },
        "speculators_config": speculators_config(kind, config.drafts, target),
    }
    tensors = dict(head.state_dict())
    if head.d2t is not None:
        tensors["t2d"] = draft_mask(head)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", fields)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(held, folder / _FILE, metadata={"format": "pt"})


def _own(name: str) -> str:
    """Our name of a stored tensor."""
    return next((new + name.removeprefix(old) for old, new in _RENAMED if name.startswith(old)), name)


def _is_copy(tensor: Tensor, module: Any) -> bool:
    """Whether a stored tensor is the weight of the target's module."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.is_meta or weight.shape != tensor.shape or not weight.is_floating_point():
        return False
    return torch.equal(weight.detach().cpu().to(tensor.dtype), tensor)


def _checked(folder: Path, target: PreTrainedModel) -> tuple[Path, BlockConfig]:
    """The file of the weights, and the config. Nothing is allocated."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"draft: {folder} holds no config.json")
    fields = fields_of(folder / "config.json")
    named = str([fields.get("architectures"), fields.get("model_type"), _settings(fields).get("projector_type")])
    for kind in _UNREAD:
        if kind.lower() in named.lower():
            raise ValueError(
                f"draft: {folder} is a {kind} drafter, which cannot be read; DFlash, DSpark and DFlash2 can"
            )
    file, found = find_file(folder, (_FILE, "pytorch_model.bin"))
    if "dspark_block_size" in fields or any(name.startswith("mtp.") for name in found):
        raise ValueError(
            f"draft: {folder} holds the DSpark drafter of DeepSeek-V4-Flash (mtp.*), which cannot be read: its layers are not "
            "Qwen3's"
        )
    shapes = {_own(name): shape for name, shape in found.items() if name not in _COPIES}
    for part in (fields, fields.get("transformer_layer_config") or {}):
        sized = {name: value for name, value in part.items() if name != "draft_vocab_size"} if part is fields else part
        require_fields(sized, shapes, folder / "config.json")
    wanted = target.config.get_text_config(decoder=True)
    config = _config_of(fields, shapes, wanted, folder)
    for name, given, own in (
        ("a vocabulary of", config.vocab_size, wanted.vocab_size),
        ("hidden states of width", config.target_hidden_size, wanted.hidden_size),
    ):
        if given != own:
            raise ValueError(f"draft: {folder} was made for {name} {given}; the target's: {own}")
    if min(config.taps) < 1 or max(config.taps) > wanted.num_hidden_layers:
        raise ValueError(
            f"draft: {folder} reads the hidden states {config.taps}; those of the target are 1 .. {wanted.num_hidden_layers}"
        )
    rows = target.get_input_embeddings()
    most = wanted.vocab_size if rows is None else max(wanted.vocab_size, getattr(rows, "num_embeddings", 0))
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < most:
        raise ValueError(f"draft: {folder}: mask_token_id: the target has no embedding of token {config.mask_token_id}")
    with torch.device("meta"):
        outline = BlockHead(config)
    expected: dict[str, Any] = {name: tensor.shape for name, tensor in outline.state_dict().items()}
    if outline.d2t is not None and "t2d" in shapes:
        expected["t2d"] = (config.vocab_size,)
    require_tensors(shapes, expected, folder)
    return file, config


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with those of `dflash_config` at the top."""
    inner = fields.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise ValueError(f"draft: dflash_config: {inner!r} is not an object")
    return {**fields, **inner}


def _config_of(
    fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], wanted: Any, folder: Path
) -> BlockConfig:
    """The config of any producer. wanted: the target's text config."""
    of_speculators, is_muse = "speculators_model_type" in fields, fields.get("model_type") == _MUSE
    own, kind = _settings(fields), fields.get("speculators_model_type")
    layer = (fields.get("transformer_layer_config") or {}) if of_speculators else fields
    ids = own.get(key := "aux_hidden_state_layer_ids" if of_speculators else "target_layer_ids")
    if not (isinstance(ids, list) and ids and all(type(tap) is int for tap in ids)):
        raise ValueError(
            f"draft: {folder} is no block drafter, or its config.json is incomplete: {key} is {ids!r}, but it has to list the "
            "target's layers that the drafter reads"
        )
    taps = tuple(ids if of_speculators else (tap + 1 for tap in ids))  # others count layers from 0
    # raw DeepSpec files predict the next token and do not say so; all others say so, or do not
    of_deepspec = not (of_speculators or is_muse or "dflash_config" in fields)
    if (block := own.get("block_size", 16 if "dflash_config" in fields else None)) is None:
        raise ValueError(f"draft: {folder}: block_size is missing")
    mask = own.get("mask_token_id")
    if mask is None and "mask_embedding" not in shapes:
        raise ValueError(f"draft: {folder}: mask_token_id is missing")
    defaults = Qwen3Config()
    values = {name: getattr(defaults, name) if layer.get(name) is None else layer[name] for name in LAYER_FIELDS} | {
        "vocab_size": layer.get("vocab_size") or wanted.vocab_size
    }
    layers = values["num_hidden_layers"]
    kinds = layer.get("layer_types") or [SLIDING if is_muse else FULL] * layers
    window = layer.get("sliding_window") if SLIDING in kinds else None
    causal = own.get("causal", own.get("is_causal"))
    if window is None:
        sliding_causal = False
    elif of_speculators:
        sliding_causal = not own.get("sliding_window_non_causal", True)
    elif is_muse or of_deepspec:
        sliding_causal = False
    else:  # z-lab's code and vLLM: sliding layers are causal unless the file says otherwise
        sliding_causal = True if causal is None else bool(causal)
    rank, markov = own.get("markov_rank") or 0, own.get("markov_head_type")
    if "fc.weight" not in shapes:
        raise ValueError(f"draft: {folder} lacks tensor fc.weight")
    width = shapes["fc.weight"][-1]
    if width % len(taps):
        raise ValueError(
            f"draft: {folder} holds fc.weight for {width} numbers, which are not those of {len(taps)} layers"
        )
    convolved, selected = own.get("conv_kernel_size") or 0, own.get("selector_rank") or 0
    scale, cap = own.get("output_multiplier"), own.get("final_logit_softcapping")
    return BlockConfig(
        **values,
        taps=taps,
        target_hidden_size=width // len(taps),
        draft_vocab_size=own.get("draft_vocab_size"),
        block_size=block,
        next_token=bool(own.get("sample_from_anchor", kind == "dspark" or of_deepspec)),
        mask_token_id=mask,
        layer_types=tuple(kinds),
        # transformers includes the position that lies a whole window back
        sliding_window=window + 1 if window is not None and is_muse else window,
        causal=bool(causal),
        sliding_causal=sliding_causal,
        rope=rope_of(layer, 1e6),
        bias=bool(layer.get("attention_bias", False)),
        own_embedding="embed_tokens.weight" in shapes,
        own_output="lm_head.weight" in shapes,
        embedding_scale=own.get("input_embedding_scale"),
        logit_scale=1.0 if scale is None else float(scale),
        logit_cap=float(cap) if cap else None,
        markov=(markov or "vanilla") if rank else None,
        markov_rank=rank,
        confidence=bool(own.get("enable_confidence_head", False)),
        confidence_markov=bool(rank and own.get("enable_confidence_head") and own.get("confidence_head_with_markov")),
        conv_size=convolved,
        conv_group_size=own.get("conv_group_size") or 16,
        selector_rank=selected,
        selector_top_k=own.get("selector_top_k") or 16,
    )
