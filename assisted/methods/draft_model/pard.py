"""PARD (2504.18583): a causal LM drafts a chain in one forward pass. Mask tokens after the text predict one further token each.
Knows the draft's slots; loading is in draft_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.drafts import Draft, Round
from ...core.host import on_device
from ...core.text import Text, tokens_from
from ...engine.runner import CachedModel
from ...engine.traits import Traits
from ..shared.base import Call, Drafting
from ..shared.model_drafter import ModelDrafter, ModelDrafting

TOKENS = 8
"""Of a draft, where its config has no `pard_tokens`: what published drafts were trained for. Further masks were never seen."""
_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")


def is_pard(model: PreTrainedModel) -> bool:
    """Whether a model's config says that it was trained for parallel drafting."""
    config = model.config
    named = any(getattr(config, key, None) is not None for key in _KEYS[:2])  # other models have a mask_token_id, too
    return named or getattr(config, "spd_type", None) in ("pard", "pard2")


def mask_token(model: PreTrainedModel) -> int:
    """The id of the mask token. Raises ValueError if the config names none, or none of the draft's tokens."""
    config, size = model.config, Traits.of(model).vocabulary
    key = next((key for key in _KEYS if getattr(config, key, None) is not None), None)
    if key is None:
        raise ValueError(
            f"draft: the config names no mask token ({', '.join(_KEYS)}), so this is not a PARD draft; pass its path alone, "
            "and it drafts token by token"
        )
    token = getattr(config, key)
    if type(token) is not int or not 0 <= token < size:
        raise ValueError(f"draft: {key}: {token!r} is not a token of the draft, whose vocabulary size is {size}")
    return token


class PardDrafter(ModelDrafter):
    """A causal LM that drafts in one forward pass. Otherwise as `ModelDrafter`. tokens: the most tokens of a draft; None for as
    many as it was trained for."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, tokens: int | None = None):
        super().__init__(model, tokenizer)
        self.mask, trained = mask_token(model), getattr(model.config, "pard_tokens", TOKENS)
        if type(trained) is not int or trained < 1:
            raise ValueError(f"draft: pard_tokens: {trained!r} is not a number of tokens, at least 1")
        self.tokens: int = tokens or trained

    def start(self, call: Call) -> Drafting:
        return PardDrafting(self, call)


class PardDrafting(ModelDrafting):
    """The draft's slots during one `generate`.

    Invariant between rounds: the slots hold the text up to the start of the last round, and no masks.
    """

    drafter: PardDrafter

    def _draft(self, runner: CachedModel, text: Text, budget: int) -> Draft:
        rows = self._read(runner, text, min(budget, self.drafter.tokens))
        return self.draft_chain(text, min(budget, self.drafter.tokens), next(rows), lambda tokens: next(rows))

    def observe(self, round: Round) -> None:
        """Nothing to do: only committed tokens were kept."""

    def _read(self, runner: CachedModel, text: Text, count: int) -> Iterator[torch.Tensor]:
        """Read what was committed since the last round, and `count - 1` masks after it, which are not kept. Yields `fitted`
        logits, [B, V], after the text and after each mask.

        The columns of a row, with c for committed tokens and m for masks:   c c c m m m
        Rows with fewer unread tokens have padding at their end:             c m m m . .
        """
        cache = runner.cache
        # the last token is always read; again, if a batch in lockstep kept a row's whole draft
        cache.rewind([min(known, total - 1) for total, known in zip(text.lengths, cache.known, strict=True)])
        unread = [total - known for total, known in zip(text.lengths, cache.known, strict=True)]
        width, first = max(unread) + count - 1, on_device(unread, text.ids.device)[:, None] - 1
        ids = F.pad(self.readable(tokens_from(text, cache.known, max(unread))), (0, count - 1))
        ids = ids.masked_fill(torch.arange(width, device=ids.device) > first, self.drafter.mask)
        used = [0 if ended else read + count - 1 for read, ended in zip(unread, text.ended, strict=True)]
        logits = runner(ids, used=used)
        cache.commit(unread)
        rows = torch.arange(text.rows, device=logits.device)
        return (self.fitted(logits[rows, first[:, 0].to(logits.device) + ahead], text) for ahead in range(count))
