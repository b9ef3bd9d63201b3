"""What a GGUF file states about its tokenizer and transformers (5.23) leaves out without a word: how most byte-level
tokenizers split text, whether a text begins with a space or the BOS token, and the tokens that end a turn. Knows the names
in llama.cpp's src/llama-vocab.cpp, read in November 2026; reads no weights."""

from __future__ import annotations

import warnings
from typing import Any

from tokenizers import Regex, decoders, pre_tokenizers

from ..engine.libraries import gguf_splits

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
SPLITS = {
    "stablelm2": (_WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "seed-coder": (_WORDS + r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "minerva-7b"), (r"\p{N}", GPT2)),
}
"""The regular expressions that cut a text one after the other, by the file's name for them."""
_AS_GPT2 = frozenset({"default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
_WITH_BOS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""Tokenizers whose texts begin with BOS if a file does not say; those of 2024 often do not."""
_TURN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
    *("<|endoftext|>", "<|end_of_text|>"),
)


def complete_tokenizer(tokenizer: Any, reader: Any) -> None:
    """Set in a tokenizer that transformers made from a GGUF file what it left out. reader: the file's `GGUFReader`.

    Warns if nothing here knows how the tokenizer splits text.
    """
    stated = _stated(reader, "model", "pre", "add_bos_token", "add_space_prefix")
    backend, name = tokenizer.backend_tokenizer, stated.get("pre")
    if stated.get("model") == "gpt2":
        if name in SPLITS:
            parts = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
        elif name is not None and gguf_splits() and name not in {*gguf_splits(), *_AS_GPT2}:
            warnings.warn(
                f"tokenizer: the GGUF file splits text as {name!r}, which transformers does not know, so tokens may differ "
                "from those that the model was trained on; pass tokenizer=AutoTokenizer.from_pretrained(...) of the original",
                stacklevel=5,
            )
        if "add_bos_token" not in stated and name in _WITH_BOS and tokenizer.bos_token_id is not None:
            tokenizer.add_bos_token = True
    elif stated.get("add_space_prefix") is False and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def end_tokens(reader: Any) -> list[int]:
    """The tokens that end a text in llama.cpp, of which transformers takes the first: EOS, and the ends of a turn and of a
    message, which a file states or which have one of the usual names."""
    stated = _stated(reader, "eos_token_id", "eot_token_id", "eom_token_id", "tokens")
    tokens = stated.pop("tokens", [])
    names = {name for name in _TURN_ENDS if name != "<|end|>" or "<|return|>" not in tokens}  # gpt-oss goes on after it
    return list(dict.fromkeys([*stated.values(), *(n for n, token in enumerate(tokens) if token in names)]))


def _stated(reader: Any, *names: str) -> dict[str, Any]:
    fields = {name: reader.fields.get(f"tokenizer.ggml.{name}") for name in names}
    return {name: field.contents() for name, field in fields.items() if field is not None}
