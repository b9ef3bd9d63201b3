"""Text that the target writes itself, which is what a draft has to foresee. Knows plain generation; the rest is the trainer's.

Medusa (2401.10774) and EAGLE (2401.15077) both gain by it over text by others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .data import Text

__all__ = ["with_written", "write"]

TEMPERATURES = (0.0, 0.7, 1.0)  # in turn: heads draft for all of them
_PROMPT, _LENGTH = 64, 512  # tokens of a beginning, and with its continuation
_ROWS = 2048  # at most, at once


def with_written(target: PreTrainedModel, text: Text, tokens: int, folder: Path, seed: int) -> Text:
    """A text and what the target writes behind beginnings of it, side by side in one stream.

    Args:
        target: moved to the accelerator if there is one.
        text: what the beginnings are taken from.
        tokens: how many are written, at least.
        folder: keeps them, as written.npy, so that a resumed training does not write again.
        seed: of what is drawn.
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
    """Continuations of random places of a stream [N], a third of them greedy, the others drawn at 0.7 and 1. Returns [M] int32.

    Raises ValueError for a stream that has no room for a beginning.
    """
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None) or _LENGTH
    length = min(_LENGTH, context)
    prompt = min(_PROMPT, length // 2)
    if len(stream) <= prompt:
        raise ValueError(f"text: {len(stream)} tokens are too few to go on from {prompt} of them; give more text")
    rows = _rows(target, length)
    rounds = -(-tokens // (rows * length))
    rng = np.random.default_rng(seed)
    pieces = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for number in tqdm(range(rounds), desc="the target writes", unit="batch"):
            starts = rng.integers(len(stream) - prompt, size=rows)
            begun = np.stack([stream[start : start + prompt] for start in starts]).astype(np.int64)
            ids = torch.from_numpy(begun).to(target.device)
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            found = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length - prompt,
                eos_token_id=None,
                pad_token_id=0,
                **(sampling if temperature else {"do_sample": False}),
            )
            pieces.append(found.cpu().numpy().astype(np.int32).ravel())
    return np.concatenate(pieces)


def _rows(target: PreTrainedModel, length: int) -> int:
    """How many texts are written at once: as many as have their keys and values in a quarter of the free memory."""
    config = target.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, config.num_attention_heads)
    row = 2 * config.num_hidden_layers * heads * width * target.dtype.itemsize * length
    free = torch.cuda.mem_get_info(target.device)[0] // 4 if target.device.type == "cuda" else 2**28
    return min(_ROWS, max(1, free // row))
