"""Whether two models share a tokenizer, and which bytes the tokens of a tokenizer stand for. Knows tokenizers and
vocabulary sizes; nothing of model states or drafts. Vocabularies of equal size may differ, so the maps token -> id are
compared. Tokens of different tokenizers are compared as bytes, because each tokenizer writes spaces in its own way."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..engine.traits import Traits
from .files import fields_of, loading
from .gguf import load_tokenizer, named_in

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_BYTES = {chr(value): value for value in _PRINTABLE}
_BYTES |= {chr(256 + i): value for i, value in enumerate(value for value in range(256) if value not in _PRINTABLE)}
"""The byte of each character in byte-level names: printable bytes represent themselves, others are numbered from 256."""
_CONTEXTS = ("x", "\n")  # to tokenize a text after other text: the first that forms no common token with it is used


def find_tokenizer(path: str | None, **hub: object) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a model's folder, GGUF file or Hub repository, None if there is none.

    Warns, naming the file, and returns None if it cannot be read. `same_tokens` raises if it is needed.
    """
    try:
        return _tokenizer(path, **hub)
    except (ImportError, ValueError) as error:
        warnings.warn(f"The tokenizer beside the model is ignored: {error}", stacklevel=3)
        return None


def _tokenizer(path: str | None, **hub: Any) -> PreTrainedTokenizerBase | None:
    """Like `find_tokenizer`, but raises ValueError that names the file for a tokenizer that cannot be read."""
    if not path:
        return None
    path, gguf_file = named_in(path)
    if gguf_file is not None:
        hub = {**hub, "gguf_file": gguf_file}
    folder = Path(path)
    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).exists()]
    if folder.is_dir() and not present and "gguf_file" not in hub:
        return None
    try:
        with loading("tokenizer", path):
            if hub.get("gguf_file") is not None:
                return load_tokenizer(path, **hub)
            return AutoTokenizer.from_pretrained(path, **hub)
    except OSError as error:
        if present:
            raise ValueError(f"tokenizer: {_broken(present) or error}") from error
        return None
    except ValueError as error:
        if not present and not folder.is_dir():
            return None  # a Hub repository without a tokenizer of a known kind
        raise ValueError(f"tokenizer: {found}" if (found := _broken(present)) else str(error)) from error


def _broken(files: list[Path]) -> str | None:
    """Which of a tokenizer's files cannot be read, and why; None if all can."""
    for file in files:
        try:
            if file.suffix == ".json":
                fields_of(file)
            if file.name == "tokenizer.json":
                Tokenizer.from_file(str(file))
        except BaseException as error:  # a panic of Rust code is not an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            return str(error) if str(file) in str(error) else f"{file} is broken: {error}"
    return None


def same_tokens(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
) -> bool:
    """Whether both models use the same tokenizer. Their vocabularies may be padded to different sizes.

    Raises ValueError if this is undecidable: the sizes differ and a tokenizer is missing.
    """
    sizes = [Traits.of(model).vocabulary for model in (target, draft)]
    if target_tokenizer is None or draft_tokenizer is None:
        if sizes[0] == sizes[1]:
            return True
        missing = "tokenizer" if target_tokenizer is None else "draft_tokenizer"
        path = (target if target_tokenizer is None else draft).name_or_path
        if Path(path or "-").is_dir():
            _tokenizer(path)  # raises if it is missing because it is broken
        raise ValueError(
            f"draft: its vocabulary has {sizes[1]} entries, the target's {sizes[0]}. Both tokenizers are needed to decide "
            "whether they differ in padding only or whether the draft must be translated. Pass "
            f"{missing}=AutoTokenizer.from_pretrained(...)."
        )
    # Added tokens may differ between the models of a family, as long as shared ones have the same id. A smaller vocabulary
    # trained on the same text is a different tokenizer even if its ids agree, because it splits text differently.
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    agree = all(theirs.get(token, number) == number for token, number in ours.items())
    return agree and _learned(target_tokenizer) == _learned(draft_tokenizer)


def shared_tokens(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Target id -> draft id of shared tokens: those with the same bytes, special tokens with the same name, and the end token.

    Raises ValueError if no token with text is shared.
    """
    shared = {target.by_bytes[piece]: number for piece, number in draft.by_bytes.items() if piece in target.by_bytes}
    if not shared:
        raise ValueError(
            "draft: its tokenizer shares no token with the target's, so its drafts cannot be translated; choose a draft "
            "whose tokenizer covers the same characters"
        )
    shared |= {target.specials[name]: number for name, number in draft.specials.items() if name in target.specials}
    if target.end is not None and draft.end is not None:
        shared.setdefault(target.end, draft.end)
    return shared


class Vocabulary:
    """The bytes of a tokenizer's tokens, and how it splits text. Immutable; independent of the caller's tokenizer.

    tokenizer: not changed; a Rust backend is copied, and otherwise it is used later on.
    """

    size: int  # of the model's vocabulary; tokens with larger ids are ignored
    specials: dict[str, int]  # the id of each special token, by name
    pieces: list[bytes | None]  # the bytes of each id; None for special tokens and for ids without a token
    by_bytes: dict[bytes, int]  # bytes -> the id of the token that stands for them
    end: int | None  # id of the end token
    prefix: list[int]  # ids that the tokenizer adds before a prompt, such as a beginning-of-text token
    prepends: bool  # whether it adds a space before a text

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int):
        self.size = size
        special = set(tokenizer.all_special_ids)
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        names = {number: name for name, number in tokenizer.get_vocab().items() if 0 <= number < size}
        self.specials = {name: number for number, name in names.items() if number in special}
        notation = _Notation.of(tokenizer)
        self.pieces = [None] * size
        for number, name in names.items():
            if number not in special:
                self.pieces[number] = added[number].encode() if number in added else notation.bytes_of(name)
        # if bytes have both an ordinary token and an escaped one ("<0x0A>"), the tokenizer uses the ordinary one
        order = sorted(names, key=lambda number: (notation.is_escaped(names[number]), number))
        self.by_bytes = {}
        for number in order:
            if piece := self.pieces[number]:
                self.by_bytes.setdefault(piece, number)
        end = tokenizer.eos_token_id
        self.end = end if isinstance(end, int) and end < size else None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer: Any = tokenizer
        if backend is not None:  # a copy, because calls of the caller's tokenizer change its padding and truncation
            self._tokenizer = Tokenizer.from_str(backend.to_str())
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        self._contexts = [(context, self.tokens(context)) for context in _CONTEXTS]
        self.prefix = self._prefix(tokenizer)
        joined = (b"".join(self.pieces[number] or b"" for number in self.tokens(probe)) for probe in ("a", "1", "."))
        self.prepends = any(piece.startswith(b" ") for piece in joined)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text at the beginning, without the prefix."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        ids = ids.ids if hasattr(ids, "ids") else ids
        return ids if max(ids, default=0) < self.size else [number for number in ids if number < self.size]

    def continuation_tokens(self, text: str) -> list[int]:
        """Token ids of a text that follows other tokens, so that no space is added before it."""
        if self.prepends:
            for context, before in self._contexts:
                whole = self.tokens(context + text)
                if whole[: len(before)] == before:
                    return whole[len(before) :]
        return self.tokens(text)

    def byte_tokens(self, data: bytes) -> list[int]:
        """One token id per byte, for incomplete characters. Empty if the vocabulary lacks such tokens."""
        ids = [self.by_bytes.get(bytes([value])) for value in data]
        return [] if None in ids else ids  # type: ignore[return-value]

    def _prefix(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        whole = tokenizer("a", return_attention_mask=False).input_ids
        text = self.tokens("a")
        starts = [at for at in range(len(whole)) if text and whole[at : at + len(text)] == text]
        before = whole[: starts[0]] if starts else [number for number in whole if number == tokenizer.bos_token_id]
        return [number for number in before if number < self.size]


class _Notation:
    """How the names of a tokenizer's tokens represent bytes.

    byte_level: one printable character per byte (GPT-2). escapes: "<0x0A>" stands for that byte. replaced: pairs of a
    string and its meaning, such as "▁" for a space (SentencePiece) or the mark of a token that ends a word (BPE). continued:
    the mark of a token that continues a word (WordPiece); other tokens begin one.
    """

    def __init__(self, decoders: list[dict[str, Any]]):
        by_type = {decoder["type"]: decoder for decoder in decoders}
        self.byte_level = "ByteLevel" in by_type
        self.escapes = "ByteFallback" in by_type
        self.replaced = [(d["replacement"], " ") for d in decoders if d["type"] == "Metaspace"]
        for decoder in decoders:
            if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
                self.replaced.append((decoder["pattern"]["String"], decoder["content"]))
        self.continued = by_type["WordPiece"]["prefix"] if "WordPiece" in by_type else None
        if "BPEDecoder" in by_type:
            self.replaced.append((by_type["BPEDecoder"]["suffix"], " "))

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> _Notation:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return cls(_flat(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else [])
        names = tokenizer.get_vocab()
        if any("▁" in name for name in names):
            return cls([{"type": "Metaspace", "replacement": "▁"}, {"type": "ByteFallback"}])
        return cls([{"type": "ByteLevel"}] if all(character in names for character in "ĠĊ") else [])

    def bytes_of(self, name: str) -> bytes:
        if self.byte_level:
            values = [_BYTES.get(character) for character in name]
            return name.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if self.is_escaped(name):
            return bytes([int(name[3:5], 16)])
        if self.continued is not None:
            return (name.removeprefix(self.continued) if name.startswith(self.continued) else " " + name).encode()
        for written, meant in self.replaced:
            name = name.replace(written, meant)
        return name.encode(errors="replace")

    def is_escaped(self, name: str) -> bool:
        return self.escapes and len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for inner in decoder["decoders"] for part in _flat(inner)] if "decoders" in decoder else [decoder]


def _learned(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
