"""Text to train on: files, a dataset or the shipped models' corpus, tokenized and cut into windows of one length. Knows
texts and a tokenizer. The windows of a step are a function of the seed and the step alone."""

from __future__ import annotations

import glob
import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ....extras import install
from ....zoo import corpus

HELD_OUT = 0.05  # share of the documents that are never trained on
HELD_OUT_FILES = 100  # of the shipped models' held-out text
TEXT_COLUMNS = ("text", "content", "completion")
_AT_ONCE = 256  # documents given to the tokenizer together


@dataclass(frozen=True)
class Text:
    """Tokens to train on and tokens to measure on. Each is one stream, with an end token after every document."""

    training: np.ndarray  # [N] int32
    held_out: np.ndarray  # [M] int32, of other documents than `training`
    source: str  # where they come from, as the caller wrote it

    @staticmethod
    def empty() -> Text:
        """No text, to which others are added."""
        return Text(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), "")


class Windows:
    """Windows of a stream [N], `batch` per step: `windows[step]` is [batch, context] int64.

    Every window comes once per epoch, in an order drawn from the seed. Each epoch cuts the stream at other positions. Raises
    ValueError for a stream that is too short.
    """

    def __init__(self, stream: np.ndarray, context: int, batch: int, seed: int):
        if len(stream) < 2 * context:
            raise ValueError(
                f"context: windows of {context} tokens need a text of at least {2 * context}, this one has {len(stream)}; "
                "give more text or a smaller context"
            )
        self.stream = stream
        self.context = context
        self.batch = batch
        self.seed = seed
        self.an_epoch = len(stream) // context - 1
        self._epoch = -1
        self._starts = np.empty(0, dtype=np.int64)

    def __getitem__(self, step: int) -> torch.Tensor:
        first = step * self.batch
        starts = [self._start(number) for number in range(first, first + self.batch)]
        rows = np.stack([self.stream[start : start + self.context] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))

    def _start(self, number: int) -> int:
        epoch, index = divmod(number, self.an_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            shift = rng.integers(self.context)
            self._starts = shift + self.context * rng.permutation(self.an_epoch)
            self._epoch = epoch
        return int(self._starts[index])


def pack(stream: np.ndarray, context: int, rows: int) -> torch.Tensor:
    """At most `rows` windows of a stream, evenly spread and without overlap: [N, context] int64."""
    count = len(stream) // context
    if count == 0:
        raise ValueError(f"context: the held-out text has {len(stream)} tokens, fewer than {context}; give more text")
    chosen = np.linspace(0, count - 1, min(rows, count)).round().astype(np.int64)
    return torch.from_numpy(stream[: count * context].reshape(count, context)[chosen].astype(np.int64))


def read_text(
    tokenizer: PreTrainedTokenizerBase, text: Sequence[str] = (), dataset: str | None = None, limit: int | None = None
) -> Text:
    """Read and tokenize the text that a command names. Raises ValueError where there is none.

    text: files, folders (their UTF-8 text files) or patterns; or "zoo" for the standard library, with sympy and networkx held
    out. dataset, limit: as for `read_dataset`.
    """
    if "zoo" in text:
        if len(text) > 1 or dataset is not None:
            raise ValueError("text: 'zoo' has its own held-out text and cannot be combined with other text")
        files = corpus.held_out_files()
        held_out = map(corpus.read, random.Random(1).sample(files, min(HELD_OUT_FILES, len(files))))
        return Text(
            tokenize(tokenizer, map(corpus.read, corpus.training_files())), tokenize(tokenizer, held_out), "zoo"
        )
    if not text and dataset is None:
        raise ValueError(
            "text: nothing to train on; give --text with files or folders, --text zoo, --dataset, or --chats"
        )
    documents = [*read_files(text), *(read_dataset(dataset, limit) if dataset else ())]
    training, kept = _split(documents)
    source = ", ".join([*text, *([dataset] if dataset else [])])
    return Text(tokenize(tokenizer, training), tokenize(tokenizer, kept), source)


def read_files(paths: Iterable[str]) -> Iterator[str]:
    """The text of files, of all files in folders, and of files that match patterns. In folders, files that are not UTF-8 are
    skipped. Raises ValueError for a path that matches nothing, and for a named file that is not UTF-8."""
    for path in paths:
        if Path(path).is_dir():
            yield from filter(None, (_text_of(file) for file in sorted(Path(path).rglob("*")) if file.is_file()))
            continue
        files = [Path(path)] if Path(path).is_file() else sorted(map(Path, glob.glob(path, recursive=True)))
        if not files:
            raise ValueError(f"text: {path!r} is neither a file nor a folder and matches none")
        for file in filter(Path.is_file, files):
            if (found := _text_of(file)) is None:
                raise ValueError(f"text: {file} is not UTF-8 text")
            yield found


def read_dataset(name: str, limit: int | None = None) -> Iterator[str]:
    """The documents of a dataset, at most `limit`: of a Hub id or a folder that the `datasets` library reads, with a text
    column. name: "NAME", "NAME:SPLIT" or "NAME:CONFIG:SPLIT"; the default split is "train"."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"--dataset needs the datasets library: {install('train')}") from error
    path, *rest = name.split(":")
    split = rest.pop() if rest else "train"
    rows = datasets.load_dataset(path, *rest, split=split)
    column = next((known for known in TEXT_COLUMNS if known in rows.column_names), None)
    if column is None:
        raise ValueError(
            f"dataset: {name!r} has the columns {', '.join(rows.column_names)}, none of {', '.join(TEXT_COLUMNS)}; "
            "write its text to files and pass --text"
        )
    yield from (row[column] for row in islice(rows, limit))


def tokenize(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> np.ndarray:
    """One stream with an end token after each document, [N] int32."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = [np.empty(0, dtype=np.int32)]
    remaining = iter(documents)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    while some := list(islice(remaining, _AT_ONCE)):
        if backend is not None:  # without offsets: twice as fast
            encoded = [found.ids for found in backend.encode_batch_fast(some, add_special_tokens=False)]
        else:
            encoded = tokenizer(some, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
        pieces += [np.asarray([*ids, *end], dtype=np.int32) for ids in encoded]
    return np.concatenate(pieces)


def _split(documents: list[str]) -> tuple[list[str], list[str]]:
    """The documents to train on and those held out. A document's content decides, so that other documents do not matter.

    Of fewer than twenty documents, the end of each is held out.
    """
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise ValueError("text: it is empty")
    if len(documents) * HELD_OUT < 1:
        cuts = [int(len(document) * (1 - HELD_OUT)) for document in documents]
        pairs = list(zip(documents, cuts, strict=True))
        return [document[:cut] for document, cut in pairs], [document[cut:] for document, cut in pairs]
    ranked = sorted(set(documents), key=lambda document: hashlib.sha256(document.encode()).digest())
    count = max(1, int(len(ranked) * HELD_OUT))
    chosen = set(ranked[:count])
    return [d for d in documents if d not in chosen], [d for d in documents if d in chosen]


def _text_of(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
