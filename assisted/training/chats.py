"""Conversations that a chat model has with itself: given the beginning of a user's turn, it writes question and answer.

So a head for a chat model can be trained without a dataset of questions (Magpie, arXiv 2406.08464), on text that the target
itself writes, which is what the head has to predict. Knows chat templates and `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .data import HELD_OUT, Text
from .written import TEMPERATURES, rows_of

__all__ = ["converse", "with_chats"]

_QUESTION, _ANSWER = 96, 320  # new tokens, at most
_MARK = "\N{WHITE SQUARE}\N{WHITE CIRCLE}\N{WHITE SQUARE}"  # stands for the user's message in the rendered template


def with_chats(target: PreTrainedModel, tokenizer: Any, text: Text, tokens: int, folder: Path, seed: int) -> Text:
    """A text, followed by conversations of the target with itself; some of them are held out.

    Args:
        target: moved to the accelerator if there is one.
        tokenizer: the target's, with a chat template.
        text: may be empty.
        tokens: how many the conversations have together, at least.
        folder: keeps them in chats.npy, so that a resumed training does not generate them again.
        seed: of sampling.

    Raises ValueError for a tokenizer without a chat template, and for a target that asks nothing.
    """
    kept = folder / "chats.npy"
    state = PartialState()
    with state.main_process_first():
        if not kept.exists():
            target.to(state.device)
            stream = converse(target, tokenizer, tokens, seed)
            folder.mkdir(parents=True, exist_ok=True)
            np.save(kept, stream)
    stream = np.load(kept)
    cut = int(len(stream) * (1 - HELD_OUT))
    training, held_out = np.concatenate([text.training, stream[:cut]]), np.concatenate([text.held_out, stream[cut:]])
    return replace(text, training=training, held_out=held_out, source=", ".join(filter(None, [text.source, "chats"])))


@torch.no_grad()
def converse(target: PreTrainedModel, tokenizer: Any, tokens: int, seed: int = 0) -> np.ndarray:
    """Conversations of one question and one answer, [M] int32, as the chat template renders them.

    Questions are sampled at temperature 1 within the nucleus of 0.95, answers a third greedy, a third each at temperature 0.7
    and 1. Raises as `with_chats` does.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chats: the target's tokenizer has no chat template; leave --chats out, or take an instruct model"
        )
    opening = _rendered(tokenizer, _MARK).partition(_MARK)[0]
    # a template that opens with the message itself: whatever follows an end of a text
    begun = tokenizer(opening, add_special_tokens=False).input_ids or [tokenizer.eos_token_id]
    rows = min(rows_of(target, len(begun) + _QUESTION + _ANSWER), max(1, tokens // _ANSWER))
    pieces: list[int] = []
    ask = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
    with torch.random.fork_rng(), tqdm(total=tokens, desc="the target talks to itself", unit="token") as bar:
        torch.manual_seed(seed)
        number = 0
        while len(pieces) < tokens:
            asked = [
                tokenizer.decode(ids, skip_special_tokens=True).strip()
                for ids in _continued(target, tokenizer, [begun] * rows, _QUESTION, ask)
            ]
            prompts = [
                tokenizer(_rendered(tokenizer, text), add_special_tokens=False).input_ids for text in asked if text
            ]
            if not prompts:
                raise ValueError("chats: the target asks nothing where a user's turn begins; give --text or --dataset")
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            number += 1
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            answers = _continued(target, tokenizer, prompts, _ANSWER, sampling if temperature else {"do_sample": False})
            before = len(pieces)
            for prompt, answer in zip(prompts, answers, strict=True):
                pieces += [*prompt, *answer]
            bar.update(len(pieces) - before)
    return np.asarray(pieces, dtype=np.int32)


def _rendered(tokenizer: Any, message: str) -> str:
    """A conversation that the target is about to answer."""
    messages = [{"role": "user", "content": message}]
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text


def _continued(
    target: PreTrainedModel, tokenizer: Any, prompts: Sequence[list[int]], tokens: int, sampling: dict[str, Any]
) -> list[list[int]]:
    """The new tokens of each prompt, up to its end token, which is included."""
    width, end = max(map(len, prompts)), tokenizer.eos_token_id
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=target.device)
    found = target.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, eos_token_id=end, pad_token_id=0, **sampling
    )
    rows = found[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]
