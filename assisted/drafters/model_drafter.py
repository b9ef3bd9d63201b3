"""A causal LM that drafts chains: its slots, and what it reads each round of what the target committed since.

2211.17192, 2302.01318. Knows a loaded model; where it comes from is the spec's (draft_model.py, quantized_self.py).
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafts import Draft, Round
from ..engine.cache import SlotCache
from ..engine.hooks import is_untouched
from ..engine.host import on_device
from ..engine.recurrent import RecurrentCache, is_recurrent
from ..engine.runner import CachedModel, CallSettings, Masks, Runnable, is_sum_of_parts
from ..fast.fused import fused
from ..fast.graphs import Graphs
from ..fast.runner import open_runner
from ..text import Text
from .base import Call, Drafter, Drafting
from .chain import ChainDrafting

__all__ = ["ModelDrafter", "ModelDrafting"]


class ModelDrafter(Drafter):
    """A causal LM that drafts chains.

    Args:
        model: the draft, not changed. Its vocabulary is the target's, up to padding rows at the end.
        tokenizer: the draft's own, saved beside it; None where none was found.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        self.model = model
        self.tokenizer = tokenizer
        self.masks = Masks.of(model)
        self.graphs = Graphs()

    @functools.cached_property
    def _is_sum_of_parts(self) -> bool:
        return is_sum_of_parts(self.model)

    def runner(self, cache: SlotCache, settings: CallSettings) -> CachedModel:
        """The draft over these slots."""
        return open_runner(
            self.model, lambda form: CachedModel(form, cache, self.masks), settings, self.graphs, self.fused
        )

    def fused(self, model: PreTrainedModel) -> Runnable:
        """The draft in fewer operations; without the outer forward where it consists of its submodules alone."""
        runnable = fused(model)
        through_parts = runnable.through_parts or (is_untouched(model) and self._is_sum_of_parts)
        return replace(runnable, through_parts=through_parts)

    def start(self, call: Call) -> Drafting:
        return (RecurrentDrafting if is_recurrent(self.model) else ModelDrafting)(self, call)


class ModelDrafting(ChainDrafting):
    """The draft's slots during one `generate`.

    Invariant before each round: row b's slots hold the KV of its first `cache.lengths[b]` tokens, a prefix of the
    committed text (padding included, since slots mirror the text's columns).
    """

    def __init__(self, drafter: ModelDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.readable: int = drafter.model.config.get_text_config(decoder=True).vocab_size  # tokens that it can read
        self.size = call.vocab_size
        self.runner: CachedModel | None = None
        self.proposed: Draft | None = None  # while it waits for its verdict
        self.committed: list[int] = []  # columns read of the committed text; those behind them hold the draft

    def propose(self, text: Text, budget: int) -> Draft:
        runner = self._catch_up_prompt(text)
        runner.run_only(text.unfinished)
        budget = min(budget, runner.room([text.lengths[row] for row in text.unfinished]) - 1)
        if budget < 1:
            return Draft.empty(text.rows, text.ids.device)
        cache = runner.cache
        logits = self._read_committed(runner, text)
        self.committed = cache.known  # KV of all committed tokens; what follows is speculative
        used = [int(not ended) for ended in text.ended]

        def read(tokens: torch.Tensor) -> torch.Tensor:
            logits = runner(self._readable(tokens), used=used)[:, -1]
            cache.commit([1] * text.rows)
            return self._fitted(logits, text)

        self.proposed = self.draft_chain(text, budget, self._fitted(logits, text), read)
        return self.proposed

    def observe(self, round: Round) -> None:
        """Rewind to what became text. The last drafted token was never read: after full acceptance it still has no KV."""
        if self.runner is None or self.proposed is None:
            return
        # another drafter's tokens were never read here
        read = max(0, round.draft.width - 1) if round.draft.is_that_of(self.proposed) else 0
        cache = self.runner.cache
        cache.rewind([base + min(count, read) for base, count in zip(self.committed, round.accepted, strict=True)])
        self.proposed = None

    def _catch_up_prompt(self, text: Text) -> CachedModel:
        if self.runner is None:
            self.runner = self.drafter.runner(self._slots(text.rows), self.call.settings)
            if text.prompt_length:
                prompt = text.ids[:, : text.prompt_length]
                self.runner.prefill(self._readable(prompt), self.call.attention_mask)
            else:  # of embeddings, which are the target's own
                self.runner.cache.begin_rounds()
        return self.runner

    def _slots(self, rows: int) -> SlotCache:
        return SlotCache(rows, self.call.limit, right_aligned=not self.drafter.masks.trees)

    def _read_committed(self, runner: CachedModel, text: Text) -> torch.Tensor:
        """Read what was committed since the last round, at least one token a row. Returns the logits after it, [B, V].

        Rows behind by fewer tokens than others are filled up on the right; the filler is not kept.
        """
        cache = runner.cache
        # the last token is always read (again, where a batch in lockstep kept a row's whole draft): its logits are needed
        cache.rewind([min(known, total - 1) for total, known in zip(text.lengths, cache.known, strict=True)])
        behind = [total - known for total, known in zip(text.lengths, cache.known, strict=True)]
        width = max(behind)
        if text.rows == 1:
            ids = text.ids[:, text.lengths[0] - width : text.lengths[0]]
        else:
            columns = on_device(cache.known, text.ids.device)[:, None] + torch.arange(width, device=text.ids.device)
            ids = text.ids.gather(1, columns.clamp(max=text.ids.shape[1] - 1))
        used = [0 if ended else count for count, ended in zip(behind, text.ended, strict=True)]
        logits = runner(self._readable(ids), used=used)
        cache.commit(behind)
        if text.rows == 1:
            return logits[:, -1]
        last = on_device(behind, logits.device) - 1
        return logits[torch.arange(text.rows, device=logits.device), last]

    def _fitted(self, logits: torch.Tensor, text: Text) -> torch.Tensor:
        """[B, V'] draft logits -> [B, V] in the target's vocabulary, on the text's device."""
        return _resized(logits.to(text.ids.device), self.size)

    def _readable(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids the draft has an embedding for: padding rows of the target's vocabulary read as the draft's last entry."""
        return ids if self.readable >= self.size else ids.clamp(max=self.readable - 1)


class RecurrentDrafting(ModelDrafting):
    """The same with a draft that keeps states, for a target that does: rows are in lockstep.

    Invariant between rounds: slots and states hold what the last round had read of the committed text. Drafted tokens are
    forgotten at once, and those that became text are read with the next round's first pass.
    """

    def propose(self, text: Text, budget: int) -> Draft:
        runner = self._catch_up_prompt(text)
        budget = min(budget, runner.room(text.lengths) - 1)
        if budget < 1:
            return Draft.empty(text.rows, text.ids.device)
        cache = runner.cache
        assert isinstance(cache, RecurrentCache)
        width = text.lengths[0] - cache.known[0]
        logits = runner(self._readable(text.ids[:, text.lengths[0] - width : text.lengths[0]]))[:, -1]
        cache.commit([width] * text.rows)
        cache.save()

        def read(tokens: torch.Tensor) -> torch.Tensor:
            logits = runner(self._readable(tokens))[:, -1]
            cache.commit([1] * text.rows)
            return self._fitted(logits, text)

        try:
            return self.draft_chain(text, budget, self._fitted(logits, text), read)
        finally:
            cache.go_back()

    def observe(self, round: Round) -> None:
        """Nothing is left of the draft."""

    def _slots(self, rows: int) -> SlotCache:
        return RecurrentCache(rows, self.call.limit, self.drafter.model.config.get_text_config(decoder=True))


def _resized(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Cut or pad the last dimension: tokens that one of the two models lacks are never drafted."""
    missing = size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
