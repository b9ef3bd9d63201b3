"""Drafts that predict some of their tokens only: in a small draft with a large vocabulary, the output layer takes most of the
time. The other tokens get minus infinity, so they are never drafted, and the output stays exact.

Knows a model, its config and ids. Tokens are counted in lab/training/shrink.py.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .parts import with_children

KEY = "draft_vocabulary"
"""Of a draft's config: {"kept": the ids, "tokens": their number, "of": the vocabulary's size, "coverage": the share of a text's
tokens that are among them, "source": the text that was counted}."""


def written(tokens: Tensor, size: int, coverage: float, source: str) -> dict[str, Any]:
    """What a config says of a draft that predicts these tokens. tokens: [N] int64, ascending. size: of the vocabulary."""
    bits = np.zeros(size, dtype=bool)
    bits[tokens.numpy()] = True
    kept = base64.b64encode(zlib.compress(np.packbits(bits).tobytes(), 9)).decode()
    return {"kept": kept, "tokens": len(tokens), "of": size, "coverage": coverage, "source": source}


class Kept:
    """The tokens that a draft predicts, and the draft with an output layer for these alone. config: the draft's; None for all
    tokens. Raises ValueError for a config that cannot be read."""

    def __init__(self, config: Any):
        self.tokens = kept_tokens(config)
        self._made: tuple[Any, PreTrainedModel] | None = None  # with what its output layer was copied from

    def of(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model that drafts, as `with_kept_output`; made again if its weights were moved or replaced."""
        if self.tokens is None:
            return model
        weight = getattr(model.get_output_embeddings(), "weight", None)
        source = None if weight is None else (id(model), weight.data_ptr(), weight.device, weight.dtype)
        if self._made is None or self._made[0] != source:
            self._made = source, with_kept_output(model, self.tokens)
        return self._made[1]

    def over_all(self, logits: Tensor, size: int) -> Tensor:
        """The model's logits [..., N] over its whole vocabulary, [..., size]."""
        return logits if self.tokens is None else over_all(logits, self.tokens, size)

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, which a copy makes again."""
        return {**self.__dict__, "_made": None}


def kept_tokens(config: Any) -> Tensor | None:
    """The ids that a draft predicts, [N] int64, ascending; None for all. Raises ValueError for a config that cannot be read."""
    fields = getattr(config, KEY, None)
    if fields is None:
        return None
    try:
        bits = np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(fields["kept"])), dtype=np.uint8))
        tokens = torch.from_numpy(np.flatnonzero(bits))
        if (
            not 0 < len(tokens) == fields["tokens"]
            or int(tokens[-1]) >= config.get_text_config(decoder=True).vocab_size
        ):
            raise ValueError(f"{len(tokens)} ids")
    except (TypeError, KeyError, ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(
            f"draft: config.json: {KEY} cannot be read ({error}); make it again with `assisted shrink-vocabulary`"
        ) from error
    return tokens


def with_kept_output(model: PreTrainedModel, tokens: Tensor) -> PreTrainedModel:
    """The same model as another object whose logits, [..., N], are those of these tokens. Its output layer is a copy of their
    rows; everything else is shared.

    Raises ValueError for an output layer of which no rows can be copied.
    """
    output = model.get_output_embeddings()
    if type(output) is not nn.Linear or not output.weight.is_floating_point() or output.weight.is_meta:
        raise ValueError(
            f"draft: {KEY}: rows of the output layer, a {type(output).__name__}, cannot be copied; load the draft without "
            "quantization and without offloading"
        )
    path = next(name for name, module in model.named_modules() if module is output)
    return with_children(model, {tuple(path.split(".")): kept_rows(output, tokens)})


@torch.no_grad()
def kept_rows(output: nn.Linear, tokens: Tensor) -> nn.Linear:
    """A copy of some rows of an output layer."""
    device, dtype = output.weight.device, output.weight.dtype
    made = nn.Linear(output.in_features, len(tokens), output.bias is not None, device=device, dtype=dtype)
    tokens = tokens.to(device)
    made.weight.copy_(output.weight[tokens])
    if output.bias is not None:
        made.bias.copy_(output.bias[tokens])
    return made.requires_grad_(False).eval()


def over_all(logits: Tensor, tokens: Tensor, size: int) -> Tensor:
    """[..., N] logits of these tokens -> [..., size], minus infinity for all others."""
    full = logits.new_full((*logits.shape[:-1], size), float("-inf"))
    full[..., tokens.to(logits.device)] = logits
    return full


class Entries:
    """The tokens that a draft's logits are of.

    Args:
        known: [N] int64; None for all.
        size: of the vocabulary.
        alike: the distribution treats all tokens alike, so that of these can be computed without the others.
    """

    def __init__(self, known: Tensor | None = None, size: int = 0, alike: bool = False):
        self.known, self.size, self.alike = known, size, alike

    def logits(self, logits: Tensor) -> Tensor:
        """[B, N] -> [B, N] if all tokens are treated alike, or else [B, size]."""
        return logits if self.known is None or self.alike else over_all(logits, self.known, self.size)

    def q(self, q: Tensor) -> Tensor:
        """Probabilities of these logits -> [B, size]."""
        if self.known is None or not self.alike:
            return q
        return q.new_zeros(len(q), self.size).index_copy_(1, self.known, q)

    def tokens(self, places: Tensor) -> Tensor:
        """The tokens at places of these logits, any shape."""
        return places if self.known is None or not self.alike else self.known[places]
