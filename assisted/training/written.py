"""Text that the target generates itself, since that is what a draft has to predict. Knows `generate`.

Written by this package's own loop, which is faster than the target's. Heads trained on such text do better than on text by
others, for Medusa (arXiv 2401.10774) and EAGLE (arXiv 2401.15077).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..engine.traits import Traits
from ..lengths.policies import Never
from ..modeling import AssistedModelForCausalLM
from .data import Text

__all__ = ["TEMPERATURES", "rows_of", "with_written", "write", "writer_of"]

TEMPERATURES = (0.0, 0.7, 1.0)  # used in turn, as heads draft for all of them
_PROMPT, _LENGTH = 64, 512  # tokens of a prompt, and of a prompt with its continuation
_ROWS = 2048  # of a batch, at most
_MEMORY = 2**30  # bytes for the keys and values of a batch on a CPU


def with_written(target: PreTrainedModel, text: Text, tokens: int, folder: Path, seed: int) -> Text:
    """A text, followed by continuations of pieces of it that the target generates.

    Args:
        target: moved to the accelerator if there is one.
        text: the pieces are taken from its training tokens.
        tokens: how many are generated, at least.
        folder: keeps them in written.npy, so that a resumed training does not generate them again.
        seed: of the pieces and of sampling.
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
    rows = rows_of(target, length)
    writer = writer_of(target)
    rounds = -(-tokens // (rows * length))
    rng = np.random.default_rng(seed)
    pieces = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for number in tqdm(range(rounds), desc="the target generates text", unit="batch"):
            starts = rng.integers(len(stream) - prompt, size=rows)
            begun = np.stack([stream[start : start + prompt] for start in starts]).astype(np.int64)
            ids = torch.from_numpy(begun).to(target.device)
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            found = writer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length - prompt,
                eos_token_id=None,
                pad_token_id=0,
                **(sampling if temperature else {"do_sample": False}),
            )
            pieces.append(found.cpu().numpy().astype(np.int32).ravel())
    return np.concatenate(pieces)


def writer_of(target: PreTrainedModel) -> PreTrainedModel:
    """The target behind this package's loop. It never drafts: a seed then gives the same text, however fast the machine is."""
    return AssistedModelForCausalLM.from_models(target, draft_length=Never())


def rows_of(target: PreTrainedModel, length: int) -> int:
    """The batch size: as many rows as have room for their keys and values in a quarter of the free memory."""
    config = target.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // max(1, config.num_attention_heads)
    row = 2 * config.num_hidden_layers * heads * width * target.dtype.itemsize * length
    free = torch.cuda.mem_get_info(target.device)[0] // 4 if target.device.type == "cuda" else _MEMORY
    return min(_ROWS, max(1, free // row))
