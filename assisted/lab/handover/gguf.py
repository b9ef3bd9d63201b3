"""Writes a model and its tokenizer into a GGUF file for llama.cpp, and reads it back to compare. Knows the tensors of the
Llama and Qwen families and byte-level BPE tokenizers. Anything else is refused: llama.cpp's own converter has the whole
list. Needs the package gguf (the extra `gguf`)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...engine.libraries import gguf_splits
from ...extras import install
from ...loading.gguf import load_gguf
from ...loading.gguf_tokenizer import GPT2, SPLITS
from ...loading.vocabulary import find_tokenizer

_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}
"""By model type, which is also GGUF's name of the architecture: whether the rotary halves of q and k are interleaved there."""
_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_OF_TRANSFORMERS = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o")
_ELSE = "llama.cpp's own convert_hf_to_gguf.py may know it; or hand over to vllm or sglang"
_SAMPLE = (
    "def mean(values):\n    return sum(values) / len(values)  # 12.5 of 1234\n\n\tÜber 3 naïve cafés 東京 🙂 it's  x\n"
)


def require_writable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, role: str) -> None:
    """Check that a GGUF file can hold a model and its tokenizer, before anything is written.

    role: "target" or "draft", for the message. Raises ValueError with the role and the reason; ImportError that names the extra
    if the package gguf is missing.
    """
    _gguf()
    config = model.config
    kind = config.model_type
    if kind not in _PERMUTED:
        raise ValueError(
            f"{role}: models of type {kind!r} are not written as GGUF, only {', '.join(_PERMUTED)}; {_ELSE}"
        )
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{role}: its rotary scaling {rope['rope_type']!r} is not written as GGUF; {_ELSE}")
    if getattr(config, "use_sliding_window", False):
        raise ValueError(f"{role}: its sliding window is not written as GGUF; {_ELSE}")
    if config.hidden_act != "silu":
        raise ValueError(f"{role}: llama.cpp computes this architecture with silu, not {config.hidden_act!r}; {_ELSE}")
    if model.dtype not in _KINDS:
        raise ValueError(
            f"{role}: its dtype {model.dtype} is not written as GGUF; load it as float32, float16 or bfloat16"
        )
    _pre_tokenizer(_tokenizer_fields(tokenizer, role), role)


def write_gguf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, role: str, kind: str | None = None
) -> None:
    """Write a GGUF file in the model's dtype (norms and biases in float32), then read it back with transformers.

    role: "target" or "draft", for messages. kind: of matrices, such as "Q4_0", in place of the dtype; what is read then
    differs, and is not compared. Raises as `require_writable`, and ValueError if what is read differs: the file is then
    removed.
    """
    require_writable(model, tokenizer, role)
    try:
        _write(model, tokenizer, file, role, kind or _KINDS[model.dtype])
        if kind is None:
            _require_same(model, tokenizer, file, role)
    except ValueError:
        file.unlink(missing_ok=True)
        raise


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, role: str, stores: str) -> None:
    gguf = _gguf()
    config: Any = model.config
    kind = config.model_type
    writer = gguf.GGUFWriter(file, kind)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(stores, f"MOSTLY_{stores}")])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, tokenizer, config.vocab_size, role)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ValueError(f"{role}: GGUF has no place for its tensor {name!r}; {_ELSE}")
        values = tensor.detach().cpu().float()
        if _PERMUTED[kind] and ".self_attn.q_proj." in name:
            values = _interleaved(values, config.num_attention_heads)
        if _PERMUTED[kind] and ".self_attn.k_proj." in name:
            values = _interleaved(values, config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType[stores if values.ndim > 1 else "F32"]
        writer.add_tensor(known, gguf.quants.quantize(values.contiguous().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in GGUF's order for Llama: of each head, its two rotary halves take turns. values: [heads * D, ...]."""
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)


def _tokenizer_fields(tokenizer: PreTrainedTokenizerBase | None, role: str) -> dict[str, Any]:
    """The content of a tokenizer.json. Raises ValueError if the tokenizer is missing or not a byte-level BPE."""
    if tokenizer is None:
        raise ValueError(f"{role}: a GGUF file contains the tokenizer, and none was found; pass one with the pair")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    fields: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model = fields.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"{role}: only byte-level BPE tokenizers are written as GGUF; {_ELSE}")
    return fields


def _pre_tokenizer(fields: dict[str, Any], role: str) -> str:
    """llama.cpp's name of the way a tokenizer splits text. Raises ValueError if it has none that fits."""
    found = fields.get("pre_tokenizer") or {}
    parts = found.get("pretokenizers", [found])
    *cuts, last = [_cut(part) for part in parts]
    is_byte_level = parts[-1].get("type") == "ByteLevel" and not parts[-1].get("add_prefix_space")
    if is_byte_level and None not in cuts and not fields["model"].get("dropout"):
        theirs = {name: (gguf_splits().get(name),) for name in _OF_TRANSFORMERS}
        for name, splits in {"gpt-2": (GPT2,), **theirs, **SPLITS}.items():
            ignores = bool(fields["model"].get("ignore_merges")) is (name in ("llama-bpe", "tekken"))
            normalized = name in theirs or fields.get("normalizer") is None
            if [*splits] == ([*cuts, last] if last else cuts) and ignores and normalized:
                return name
    raise ValueError(f"{role}: its tokenizer splits text in a way that has no name in GGUF; {_ELSE}")


def _cut(part: dict[str, Any]) -> str | None:
    """The regular expression by which a part of a pre-tokenizer cuts text; None if it does not, or in another way."""
    if part.get("type") == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return part["pattern"].get("Regex")
    if part.get("type") == "Digits" and part.get("individual_digits"):
        return r"\p{N}"
    return GPT2 if part.get("type") == "ByteLevel" and part.get("use_regex", True) else None


def add_tokenizer(writer: Any, tokenizer: Any, size: int, role: str) -> None:
    gguf = _gguf()
    fields = _tokenizer_fields(tokenizer, role)
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [gguf.TokenType.UNUSED] * size
    for token, number in fields["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for added in fields["added_tokens"]:
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(fields, role))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in fields["model"]["merges"]])
    for name in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    first = tokenizer("x").input_ids[:1]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _require_same(model: PreTrainedModel, tokenizer: Any, file: Path, role: str) -> None:
    """Read a file with transformers and compare weights and ids. Raises ValueError with the first difference."""
    try:
        read = load_gguf(str(file.parent), str(file.absolute()), role, dtype=model.dtype).state_dict()
    except ValueError as error:
        raise ValueError(f"{role}: {file.name} cannot be read back ({error}); {_ELSE}") from error
    for name, tensor in model.state_dict().items():
        if name not in read or not torch.equal(read[name].cpu(), tensor.detach().cpu()):
            raise ValueError(f"{role}: {name} is not the same when {file.name} is read back; {_ELSE}")
    back = find_tokenizer(str(file))
    ids = None if back is None else back(_SAMPLE, add_special_tokens=False).input_ids
    if ids != tokenizer(_SAMPLE, add_special_tokens=False).input_ids:
        raise ValueError(f"{role}: its tokenizer splits text differently when {file.name} is read back; {_ELSE}")


def _gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ImportError(f"handover: writing GGUF files needs the package gguf: {install('gguf')}") from error
