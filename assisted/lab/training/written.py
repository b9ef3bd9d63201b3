"""Text that the target generates itself, since that is what a draft has to predict. Knows `generate`. Heads trained on it
do better than on text by others, for Medusa (arXiv 2401.10774) and EAGLE (arXiv 2401.15077).

Conversations that a chat model has with itself need no dataset of questions: given the beginning of a user's turn, it writes
question and answer (Magpie, arXiv 2406.08464). Half of them can be about pieces of given text, which the target is asked to
edit, quote or explain."""

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

from ...engine.traits import Traits
from ...lengths.policies import Never
from ...methods.shared.training.data import HELD_OUT, Text
from ...modeling import AssistedModelForCausalLM
from ..plan.shapes import Shapes

TEMPERATURES = (0.0, 0.7, 1.0)  # used in turn, as heads draft for all of them
_PROMPT, _LENGTH = 64, 512  # tokens of a prompt, and of a prompt with its continuation
_ROWS = 2048  # of a batch, at most
_MEMORY = 2**30  # bytes for the keys and values of a batch on a CPU


def with_written(target: PreTrainedModel, text: Text, tokens: int, folder: Path, seed: int) -> Text:
    """A text, followed by continuations of pieces of it that the target generates, at least `tokens` in all.

    The target is moved to the accelerator if there is one. folder: keeps the continuations in written.npy, so that a resumed
    training does not generate them again.
    """
    kept = folder / "written.npy"
    state = PartialState()
    with state.main_process_first():
        if not kept.exists():
            target.to(state.device)
            stream = write(target, text.training, tokens, seed)
            folder.mkdir(parents=True, exist_ok=True)
            np.save(kept, stream)
    return replace(text, training=np.concatenate([text.training, np.load(kept)]))


@torch.no_grad()
def write(target: PreTrainedModel, stream: np.ndarray, tokens: int, seed: int = 0) -> np.ndarray:
    """Random pieces of a stream [N] with continuations: a third greedy, a third each sampled at temperature 0.7 and 1.

    Returns [M] int32. Raises ValueError for a stream that is shorter than a prompt.
    """
    length = min(_LENGTH, Traits.of(target).context)
    prompt = min(_PROMPT, length // 2)
    if len(stream) <= prompt:
        raise ValueError(f"text: {len(stream)} tokens are too few for prompts of {prompt}; give more text")
    rows, writer = rows_of(target, length), writer_of(target)
    rng = np.random.default_rng(seed)
    pieces: list[list[int]] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for number in tqdm(range(-(-tokens // (rows * length))), desc="the target generates text", unit="batch"):
            starts = rng.integers(len(stream) - prompt, size=rows)
            prompts = [stream[start : start + prompt].tolist() for start in starts]
            found = continued(writer, prompts, length - prompt, None, **sampling(number))
            pieces += [begun + more for begun, more in zip(prompts, found, strict=True)]
    return np.asarray(pieces, dtype=np.int32).ravel()


def sampling(number: int) -> dict[str, Any]:
    """Arguments of `generate` for a batch: greedy, or at one of the temperatures, in turn."""
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def continued(
    writer: PreTrainedModel, prompts: Sequence[list[int]], tokens: int, end: int | None, **sampling: Any
) -> list[list[int]]:
    """The new tokens of each prompt, `tokens` at most, up to the end token, which is included."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=writer.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=writer.device)
    found = writer.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, eos_token_id=end, pad_token_id=0, **sampling
    )
    rows: list[list[int]] = found[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def writer_of(target: PreTrainedModel) -> PreTrainedModel:
    """The target behind this package's loop. It never drafts: a seed then gives the same text, however fast the machine is."""
    return AssistedModelForCausalLM.from_models(target, draft_length=Never())


def rows_of(target: PreTrainedModel, length: int) -> int:
    """The batch size: as many rows as have room for their keys and values in a quarter of the free memory."""
    row = max(1, sum(Shapes.of_config(target.config).states.per_token) * target.dtype.itemsize * length)
    free = torch.cuda.mem_get_info(target.device)[0] // 4 if target.device.type == "cuda" else _MEMORY
    return min(_ROWS, max(1, free // row))


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
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
