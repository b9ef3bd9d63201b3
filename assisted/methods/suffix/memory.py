"""Past outputs in a file, so that `Suffix(memory_file=PATH)` finds them in the next process.

One safetensors file of token ids with the tokenizer's identity. It is replaced as a whole, so a reader finds the old or the new
one, and only its owner may read it. What cannot be read or written costs drafts, never text.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .tree import END

_LOCK = threading.Lock()  # of this process; another one may lose the texts of a call that ends in the same milliseconds
_HEADER = 1 << 16  # bytes; a larger file than this and the tokens was not written here


class OtherTokenizer(ValueError):
    """The file holds the tokens of another tokenizer."""


class Memory:
    """The texts in a file.

    Args:
        path: of the file, which need not exist.
        tokenizer: the target's.
        size: of the target's vocabulary.
        limit: maximum number of tokens; the oldest texts are dropped.

    Raises ValueError if the path is not that of a file.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: Any, size: int, limit: int):
        self.path = Path(os.path.realpath(Path(path).expanduser()))  # the file itself is replaced, not a link to it
        if os.path.lexists(self.path) and not self.path.is_file():
            raise ValueError(f"memory_file: {self.path} is not a file; name a file, which is made if there is none")
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
        self.identity = hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
        self.size, self.limit = size, limit
        self._warned = False

    def read(self) -> list[int]:
        """All tokens, with END after each text; none, with one warning, if the file is damaged.

        Raises OtherTokenizer for a file of another tokenizer.
        """
        if not self.path.exists():
            return []
        try:
            if self.path.stat().st_size > 4 * self.limit + _HEADER:
                raise ValueError("it is larger than any that was written here")
            with safe_open(self.path, framework="pt") as file:
                about, tokens = file.metadata() or {}, file.get_tensor("tokens")
            if about["tokenizer"] == self.identity and int(about["crc32"]) != _checksum(tokens):
                raise ValueError("its checksum is another one")
            found: list[int] = tokens.tolist()
            if about["tokenizer"] == self.identity and not all(END <= token < self.size for token in found):
                raise ValueError("it has tokens that the target does not have")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            self._warn(f"cannot be read ({error}), so what it held is forgotten")
            return []
        if about["tokenizer"] != self.identity:
            raise OtherTokenizer(
                f"memory_file: {self.path} holds tokens of another tokenizer; name another file for this target, or delete it"
            )
        return found

    def add(self, texts: Iterable[list[int]]) -> None:
        """Add texts to what the file holds now, other processes' texts included."""
        new = [token for text in texts for token in (*text, END)]
        if not new:
            return
        with _LOCK:
            try:
                tokens = torch.tensor(cut([*self.read(), *new], self.limit), dtype=torch.int32)
                about = {"tokenizer": self.identity, "crc32": str(_checksum(tokens))}
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=f".{self.path.name}.", dir=self.path.parent) as folder:
                    partial = Path(folder, self.path.name)
                    with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                        file.write(save({"tokens": tokens}, about))
                    partial.replace(self.path)
            except (OSError, OtherTokenizer) as error:
                self._warn(f"cannot be written ({error}), so later processes will not find these texts")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"memory_file: {self.path} {what}.", stacklevel=2)


def cut(tokens: list[int], limit: int) -> list[int]:
    """The last texts with at most `limit` tokens together, each with its END; of a longer text, the last tokens."""
    if len(tokens) <= limit:
        return tokens
    kept = tokens[-limit:]
    whole = kept.index(END) + 1
    return kept if tokens[-limit - 1] == END or whole == len(kept) else kept[whole:]


def _checksum(tokens: torch.Tensor) -> int:
    return zlib.crc32(tokens.numpy().tobytes())
