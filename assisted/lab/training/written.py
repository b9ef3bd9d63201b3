"""Text that the target generates itself, since that is what a draft has to predict. Knows `generate`. Heads trained on it
do better than on text by others, for Medusa (arXiv 2401.10774) and EAGLE (arXiv 2401.15077)."""

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

from ...engine.traits import Traits
from ...lengths.policies import Never
from ...methods.shared.training.data import Text
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
