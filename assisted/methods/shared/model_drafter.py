"""A causal LM that drafts chains (2211.17192, 2302.01318), and its KV slots."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.drafts import Draft, Round
from ...core.host import on_device
from ...core.text import Text, tokens_from
from ...engine.cache import SlotCache
from ...engine.cross import Encoded, read_by
from ...engine.hooks import is_untouched
from ...engine.kept import Kept
from ...engine.prepared import CallSettings, PreparedModule
from ...engine.runner import CachedModel
from ...engine.session import can_go_on, go_on, take_over
from ...engine.traits import Traits
from ...engine.trust import Trust
from ...engine.window import has_ended, holds_end_of, keep_last
from ...fast.fused import fused, is_sum_of_parts, prepare
from ...fast.graphs import Graphs
from .base import Call, Drafter, Drafting
from .chain import ChainDrafting


class ModelDrafter(Drafter):
    """A causal LM that drafts chains.

    Args:
        model: the draft; not changed. Its vocabulary is the target's, except for padding at the end.
        tokenizer: the draft's own, which is saved with it; None if none was found.
    """

    model: PreTrainedModel
    window: int | None = None  # `DraftModel.draft_window`
    translated: ClassVar[type[Any] | None] = None  # the class for a draft with another tokenizer, which sets it

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        self.model = model
        self.tokenizer = tokenizer
        self.masks = Traits.of(model).masks
        self.graphs = Graphs()
        self.kept = Kept(model.config)  # the tokens that it predicts

    @functools.cached_property
    def _is_sum_of_parts(self) -> bool:
        return is_sum_of_parts(self.model)

    def runner(self, cache: SlotCache, settings: CallSettings, encoded: Encoded | None = None) -> CachedModel:
        """A runner of the draft over these slots, in the form that the call settings ask for. encoded: as in `Call`."""
        model = self.kept.of(self.model)
        prepared = read_by(prepare(model, settings, self.fused), encoded)
        return self.graphs.serve(CachedModel(prepared, cache, self.masks), model, settings)

    def capture_ahead(self, rows: int, longest: int) -> None:
        self.graphs.ahead(rows, longest)

    def fused(self, model: PreTrainedModel, trusted: Trust) -> PreparedModule:
        """The draft in fewer operations; the outer forward is skipped if it does nothing but call the submodules."""
        prepared = fused(model, trusted)
        skips = trusted.is_own and is_untouched(model) and self._is_sum_of_parts
        return replace(prepared, through_parts=prepared.through_parts or skips)

    def start(self, call: Call) -> Drafting:
        return ModelDrafting(self, call)


class ModelDrafting(ChainDrafting):
    """The draft's slots during one `generate`.

    Invariant before each round: the slots of row b hold the KV of its first `cache.lengths[b]` tokens, a prefix of the
    committed text. This includes padding, because slots mirror the columns of the text.
    """

    def __init__(self, drafter: ModelDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.own_size: int = Traits.of(drafter.model).vocabulary  # size of its embedding
        self.runner: CachedModel | None = None
        self.proposed: Draft | None = None  # until it is verified
        self.committed: list[int] = []  # slots of committed tokens, per row; later slots hold the draft

    def propose(self, text: Text, budget: int) -> Draft:
        rows = text.unfinished
        if has_ended(Traits.of(self.drafter.model).context, max(text.lengths[row] for row in rows), self.call.settings):
            return Draft.empty(text.rows, text.ids.device)
        runner = self._catch_up_prompt(text)
        runner.run_only(rows)
        keep_last(runner.cache, self.drafter.window)
        budget = min(budget, runner.room([text.lengths[row] for row in rows]) - 1)
        return self._draft(runner, text, budget) if budget > 0 else Draft.empty(text.rows, text.ids.device)

    def _draft(self, runner: CachedModel, text: Text, budget: int) -> Draft:
        ids, unread = self._unread(runner, text)
        of_output = functools.partial(self.fitted, text=text)
        found = self.chain_at_once(runner, self.readable(ids), unread, budget, of_output)
        if found is None:
            logits = self._read_committed(runner, text)
        else:
            runner.cache.commit(unread)
        self.committed = runner.cache.known  # KV of all committed tokens; what follows is speculative
        if found is None:
            self.proposed = self.chain_of(runner, text, budget, logits)
        else:
            self.proposed, _ = found
            runner.cache.commit([self.proposed.width - 1] * text.rows)
        return self.proposed

    def observe(self, round: Round) -> None:
        """Rewind to the committed text. The last drafted token was not read, so after full acceptance it has no KV yet."""
        self.see_lengths(round, self.proposed)
        if self.runner is None or self.proposed is None:
            return
        # the tokens of another drafter were not read
        read = max(0, round.draft.width - 1) if round.draft.is_that_of(self.proposed) else 0
        cache = self.runner.cache
        cache.rewind([base + min(count, read) for base, count in zip(self.committed, round.accepted, strict=True)])
        self.proposed = None

    def fitted(self, logits: torch.Tensor, text: Text) -> torch.Tensor:
        return super().fitted(self.drafter.kept.over_all(logits, self.own_size), text)

    def _catch_up_prompt(self, text: Text) -> CachedModel:
        if self.runner is None:
            slots = self._earlier_slots(text)
            slots = self._slots(text.rows) if slots is None else slots
            self.runner = self.drafter.runner(slots, self.call.settings, self.call.encoded)
            if text.prompt_length:
                prompt = text.ids[:, self.runner.cache.known[0] : text.prompt_length]
                self.runner.prefill(self.readable(prompt), self.call.attention_mask)
            else:  # the prompt consists of embeddings, which only the target can read
                self.runner.cache.begin_rounds()
        return self.runner

    def _slots(self, rows: int) -> SlotCache:
        return SlotCache(rows, self.call.limit, right_aligned=not self.drafter.masks.trees)

    def renew(self, text: Text, row: int, call: Call) -> None:
        self.renew_with(type(self)(self.drafter, call), text, row)

    def renew_with(self, one: ModelDrafting, text: Text, row: int) -> None:
        """Give a row the slots of a drafting for its text alone, which reads it."""
        slots = self._catch_up_prompt(text).cache  # first, so that its forward passes can be captured
        take_over(slots, row, one._catch_up_prompt(text.alone(row)).cache)

    def _earlier_slots(self, text: Text) -> SlotCache | None:
        """The slots of the call before, if they can be read on."""
        earlier, call = self.call.before(ModelDrafting), self.call
        if earlier is None or earlier.runner is None or earlier.drafter is not self.drafter:
            return None
        slots, padded = earlier.runner.cache, call.attention_mask is not None or not text.prompt_length
        if padded or not (can_go_on(slots) and earlier.runner.reads_on and slots.rows == text.rows):
            return None
        known = min(*slots.known, call.shared, text.prompt_length - 1)
        return go_on(slots, known, call.limit, call.forks) if holds_end_of(slots, known) else None

    @property
    def nbytes(self) -> int:
        return 0 if self.runner is None else sum(store.nbytes for store in self.runner.cache.stores)

    def _read_committed(self, runner: CachedModel, text: Text) -> torch.Tensor:
        """Read what was committed since the last round, at least one token per row. Returns `fitted` logits after it.

        Rows with fewer unread tokens than others are padded on the right; the padding is not kept.
        """
        ids, unread = self._unread(runner, text)
        used = [0 if ended else count for count, ended in zip(unread, text.ended, strict=True)]
        logits = runner(self.readable(ids), used=used)
        runner.cache.commit(unread)
        if text.rows == 1:
            return self.fitted(logits[:, -1], text)
        last = on_device(unread, logits.device) - 1
        return self.fitted(logits[torch.arange(text.rows, device=logits.device), last], text)

    def _unread(self, runner: CachedModel, text: Text) -> tuple[torch.Tensor, list[int]]:
        """The committed tokens that the draft has not read, [B, n], and their number in each row."""
        cache = runner.cache
        # the last token is always read, since its logits are needed; again, if a batch in lockstep kept a row's whole draft
        cache.rewind([min(known, total - 1) for total, known in zip(text.lengths, cache.known, strict=True)])
        unread = [total - known for total, known in zip(text.lengths, cache.known, strict=True)]
        return tokens_from(text, cache.known, max(unread)), unread

    def readable(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids within the draft's embedding: ids beyond it (padding of the target's vocabulary) become its last entry."""
        return ids if self.own_size >= self.size else ids.clamp(max=self.own_size - 1)
