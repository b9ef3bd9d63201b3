"""Conversations that a chat model has with itself: given the beginning of a user's turn, it writes question and answer
(Magpie, arXiv 2406.08464). So a head for it can be trained without a dataset of questions, on the target's own text. Half
of them can be about pieces of given text, which the target is asked to edit, quote or explain."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ...methods.shared.training.data import HELD_OUT, Text
from .written import continued, rows_of, sampling, writer_of

_QUESTION, _ANSWER = 96, 320  # new tokens, at most
_PIECE = 160  # tokens of a document in a question
_REQUESTS = (
    "Repeat the following text word for word.",
    "Repeat the following, and correct its mistakes.",
    "Write the following again with better names and comments.",
    "Explain the following, line by line.",
    "Quote the most important sentence or line of the following, and say why you chose it.",
    "Give the main points of the following as JSON.",
    "Change the following as little as you can, so that a beginner understands it.",
    "Continue the following.",
)
_MARK = "\N{WHITE SQUARE}\N{WHITE CIRCLE}\N{WHITE SQUARE}"  # stands for the user's message in the rendered template


def with_chats(
    target: PreTrainedModel,
    tokenizer: Any,
    text: Text,
    tokens: int,
    folder: Path,
    seed: int,
    about: Sequence[np.ndarray] = (),
) -> Text:
    """A text, which may be empty, and conversations of the target with itself, at least `tokens`; some of them are held out.

    The target is moved to the accelerator if there is one. folder: keeps the conversations in chats.npz, batch by batch, so
    that an interrupted run goes on where it stopped. about: streams of documents, each [N]; half of the conversations are about
    pieces of them, as many of each. Raises ValueError without a chat template, and for a target that asks nothing.
    """
    kept = folder / "chats.npz"
    state = PartialState()
    with state.main_process_first():
        batches = _read(kept)
        missing = tokens - sum(map(len, batches))
        if missing > 0:
            target.to(state.device)
            folder.mkdir(parents=True, exist_ok=True)
            for batch in conversations(target, tokenizer, missing, seed, about, len(batches)):
                batches.append(batch)
                _write(kept, batches)
    stream = np.concatenate(_read(kept))
    cut = int(len(stream) * (1 - HELD_OUT))
    training, held_out = np.concatenate([text.training, stream[:cut]]), np.concatenate([text.held_out, stream[cut:]])
    return replace(text, training=training, held_out=held_out, source=", ".join(filter(None, [text.source, "chats"])))


@torch.no_grad()
def conversations(
    target: PreTrainedModel,
    tokenizer: Any,
    tokens: int,
    seed: int = 0,
    about: Sequence[np.ndarray] = (),
    first: int = 0,
) -> Iterator[np.ndarray]:
    """Batches of conversations of one question and one answer, each batch [M] int32, as the chat template renders them.

    Questions are sampled at temperature 1 within the nucleus of 0.95, answers a third greedy, a third each at temperature 0.7
    and 1. A batch is a function of the seed and its number alone; `first` is the first one's. Raises as `with_chats` does.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chats: the target's tokenizer has no chat template; leave --chats out, or take an instruct model"
        )
    for stream in about:
        if len(stream) <= _PIECE:
            raise ValueError(f"about: {len(stream)} tokens are too few for pieces of {_PIECE}; give more text")
    rows = min(rows_of(target, 2 * _PIECE + _ANSWER), max(1, tokens // _ANSWER))
    writer = writer_of(target)
    with torch.random.fork_rng(), tqdm(total=tokens, desc="the target talks to itself", unit="token") as bar:
        for number in itertools.count(first):
            if bar.n >= tokens:
                return
            torch.manual_seed(seed * 1_000_003 + number)
            asked = (
                _questions(writer, tokenizer, rows)
                if number % 2 == 0 or not about
                else _requests(tokenizer, about, rows, np.random.default_rng((seed, number)))
            )
            prompts = [
                tokenizer(_rendered(tokenizer, text), add_special_tokens=False).input_ids for text in asked if text
            ]
            if not prompts:
                raise ValueError("chats: the target asks nothing where a user's turn begins; give --text or --dataset")
            answers = continued(writer, prompts, _ANSWER, tokenizer.eos_token_id, **sampling(number // 2))
            batch = [token for pair in zip(prompts, answers, strict=True) for ids in pair for token in ids]
            bar.update(len(batch))
            yield np.asarray(batch, dtype=np.int32)


def _questions(writer: PreTrainedModel, tokenizer: Any, rows: int) -> list[str]:
    """What the target asks where a user's turn begins."""
    opening = _rendered(tokenizer, _MARK).partition(_MARK)[0]
    # a template that opens with the message itself: whatever follows an end of a text
    begun = tokenizer(opening, add_special_tokens=False).input_ids or [tokenizer.eos_token_id]
    ask = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
    found = continued(writer, [begun] * rows, _QUESTION, tokenizer.eos_token_id, **ask)
    return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in found]


def _requests(tokenizer: Any, about: Sequence[np.ndarray], rows: int, rng: np.random.Generator) -> list[str]:
    found = []
    for row in range(rows):
        stream = about[row % len(about)]
        start, length = rng.integers(len(stream) - _PIECE), rng.integers(_PIECE // 4, _PIECE)
        piece = tokenizer.decode(stream[start : start + length], skip_special_tokens=True).strip()
        found.append(f"{_REQUESTS[rng.integers(len(_REQUESTS))]}\n\n{piece}")
    return found


def _read(path: Path) -> list[np.ndarray]:
    if not path.exists():
        return []
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _write(path: Path, batches: list[np.ndarray]) -> None:
    partial = path.with_name("chats.partial.npz")
    np.savez(partial, *batches)
    os.replace(partial, path)  # an interrupted write must not cost the batches before


def _rendered(tokenizer: Any, message: str) -> str:
    """A conversation that the target is about to answer."""
    messages = [{"role": "user", "content": message}]
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text
