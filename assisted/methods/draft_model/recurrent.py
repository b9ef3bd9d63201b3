"""A causal LM with recurrent states that drafts chains: Mamba 2, linear attention, hybrids."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.drafts import Draft, Round
from ...core.text import Text, tokens_from
from ...engine.cache import SlotCache
from ...engine.cross import Encoded
from ...engine.needs import Needs
from ...engine.prepared import CallSettings
from ...engine.recurrent import slots_for, target_runner
from ...engine.runner import CachedModel
from ...engine.trust import trust
from ...engine.verifiable import masks_of
from ...fast.fused import prepare
from ..shared.base import Call, Drafting
from ..shared.model_drafter import ModelDrafter, ModelDrafting


class RecurrentDrafter(ModelDrafter):
    """A draft that returns to the committed text by a copy of its states. Its rows advance in lockstep unless its layers run
    over columns (`engine.delta`). For the arguments see `ModelDrafter`."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        super().__init__(model, tokenizer)
        self.masks = masks_of(model, trust(model))
        self.needs = Needs(lockstep=not self.masks.trees)

    def runner(self, cache: SlotCache, settings: CallSettings, encoded: Encoded | None = None) -> CachedModel:
        kind = CachedModel if self.needs.lockstep else target_runner
        model = self.kept.of(self.model)
        return self.graphs.serve(kind(prepare(model, settings, self.fused), cache, self.masks), model, settings)

    def start(self, call: Call) -> Drafting:
        return RecurrentDrafting(self, call)


class RecurrentDrafting(ModelDrafting):
    """Drafting with a model that has recurrent states.

    Invariant between rounds: slots and states hold the committed text up to the start of the last round. Drafted tokens are
    removed at once; those that were committed are read again in the next round's first forward pass.
    """

    nbytes = Drafting.nbytes  # its states can't go back to an earlier token

    def _draft(self, runner: CachedModel, text: Text, budget: int) -> Draft:
        logits = self._read_committed(runner, text)
        with runner.cache.borrowed():
            return self.chain_of(runner, text, budget, logits)

    def _unread(self, runner: CachedModel, text: Text) -> tuple[torch.Tensor, list[int]]:
        """As `ModelDrafting`, of running rows."""
        known = runner.cache.known
        running = range(text.rows) if runner.cache.right_aligned else text.unfinished
        unread = [text.lengths[row] - known[row] if row in running else 0 for row in range(text.rows)]
        return tokens_from(text, known, max(unread)), unread

    def observe(self, round: Round) -> None:
        """Nothing to do: `propose` has already removed the draft."""

    def _slots(self, rows: int) -> SlotCache:
        return slots_for(self.drafter.model, None, rows, self.call.limit, self.drafter.masks)
