"""Drafting with a causal LM: a small model of the same vocabulary, or a quantized copy of the target.

2211.17192, 2302.01318. The draft keeps slots of its own and reads, each round, what the target committed since.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import acceptance, zoo
from ..cache import SlotCache
from ..drafts import Draft
from ..law import probabilities
from ..quantization import load_quantized
from ..runtime import BareModel, CachedModel, Masks, is_sum_of_parts, is_untouched, require_rewindable
from ..text import Text
from ..vocabulary import find_tokenizer, require_same
from .base import Call, Drafter, Drafting, Target

__all__ = ["DraftModel", "ModelDrafter"]


@dataclass(frozen=True)
class DraftModel:
    """A small causal LM drafts: `"Qwen/Qwen3-0.6B"`, a folder, `"zoo:draft"`, or a model already loaded.

    Args:
        model: Hub id, folder or `zoo:` name; or a PreTrainedModel.
        quantization: one of `assisted.quantization.NAMES`, a transformers quantization config, or None (default).
        tokenizer: the draft's tokenizer, where it does not lie beside the model.
    """

    model: str | PreTrainedModel
    quantization: Any = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def load(self, target: Target, **kwargs: Any) -> ModelDrafter:
        """Load the model (kwargs: Hub arguments, dtype, device_map) and check that its tokens are the target's.

        Raises ValueError for a draft that cannot serve, OSError where nothing is found at the path.
        """
        hub = {name: value for name, value in kwargs.items() if name not in ("dtype", "device_map")}
        if isinstance(self.model, str):
            path = zoo.resolve(self.model)
            tokenizer = self.tokenizer or find_tokenizer(path, **hub)
            model = load_quantized(path, self.quantization, **kwargs)
        else:
            model = self.model
            folder = model.name_or_path
            tokenizer = self.tokenizer or (find_tokenizer(folder) if Path(folder).is_dir() else None)
        require_rewindable(model, "draft")
        require_same(target.model, model, target.tokenizer, tokenizer)
        return ModelDrafter(model, target.model.config.get_text_config(decoder=True).vocab_size)


class ModelDrafter(Drafter):
    """A causal LM that drafts chains.

    Args:
        model: the draft, not changed. Its vocabulary is the target's, up to padding rows at the end.
        vocab_size: columns of the target's logits.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, vocab_size: int):
        self.model = model
        self.vocab_size = vocab_size
        self.masks = Masks.of(model)

    @functools.cached_property
    def _is_sum_of_parts(self) -> bool:
        return is_sum_of_parts(self.model)

    @property
    def runner(self) -> type[CachedModel]:
        """How the draft is run: where its submodules are all there is to it, without the outer forward."""
        return BareModel if is_untouched(self.model) and self._is_sum_of_parts else CachedModel

    def start(self, call: Call) -> ModelDrafting:
        return ModelDrafting(self, call)


class ModelDrafting(Drafting):
    """The draft's slots during one `generate`.

    Invariant before each round: row b's slots hold the KV of its first `cache.lengths[b]` tokens, a prefix of the
    committed text (padding included, since slots mirror the text's columns).
    """

    def __init__(self, drafter: ModelDrafter, call: Call):
        self.drafter = drafter
        self.call = call
        self.runner: CachedModel | None = None
        self.proposed: Draft | None = None  # while it waits for its verdict
        self.committed: list[int] = []  # columns read of the committed text; those behind them hold the draft
        self.broken: torch.Tensor | None = None  # of the last round, one bool; read once its kernels have run

    def propose(self, text: Text, budget: int) -> Draft:
        if self.broken is not None and self.broken:
            raise FloatingPointError("the draft's logits are not a number")
        runner = self._catch_up_prompt(text)
        budget = min(budget, runner.room([text.lengths[row] for row in text.unfinished]) - 1)
        if budget < 1:
            return Draft.empty(text.rows, text.ids.device)
        cache, law, length = runner.cache, self.call.law, self.call.length
        logits = self._read_committed(runner, text)
        self.committed = cache.known  # KV of all committed tokens; what follows is speculative
        draft = Draft.empty(text.rows, text.ids.device)
        going = ~torch.tensor(text.ended, device=text.ids.device)
        laws: list[torch.Tensor] = []
        best: list[torch.Tensor] = []
        for position in range(budget):
            scores = self._scores(logits, text, draft)
            score, token = scores.max(-1)
            best.append(score)
            q = probabilities(scores) if law.do_sample or length.needs_law else None
            if q is not None and length.needs_law:
                going = going & length.go_on(position, q)
                if not going.any():
                    break
            going = going & score.isfinite()  # nothing is drawn from a law that allows only what the draft lacks
            if law.do_sample and q is not None:
                token = acceptance.sample(q)
                laws.append(q)
            draft = Draft(torch.cat([draft.tokens, token[:, None]], 1), draft.lengths + going)
            if position + 1 < budget and length.another(position + 1):
                logits = runner(self._readable(token[:, None]), used=[int(not ended) for ended in text.ended])[:, -1]
                cache.commit([1] * text.rows)
            else:
                break
        self.broken = torch.stack(best).isnan().any()
        self.proposed = Draft(draft.tokens, draft.lengths, torch.stack(laws, 1) if laws else None)
        return self.proposed

    def observe(self, draft: Draft, logits: torch.Tensor, accepted: list[int]) -> None:
        """Rewind to what became text. The last drafted token was never read: after full acceptance it still has no KV."""
        if self.runner is None or self.proposed is None:
            return
        read = max(0, draft.width - 1) if draft is self.proposed else 0  # another drafter's tokens were never read here
        cache = self.runner.cache
        cache.rewind([base + min(count, read) for base, count in zip(self.committed, accepted, strict=True)])
        self.proposed = None

    def _catch_up_prompt(self, text: Text) -> CachedModel:
        if self.runner is None:
            model = self.drafter.model
            cache = SlotCache(text.rows, self.call.limit, right_aligned=not self.drafter.masks.trees)
            self.runner = self.drafter.runner(model, cache, self.drafter.masks)
            prompt = text.ids[:, : text.prompt_length]
            self.runner.prefill(self._readable(prompt), self.call.attention_mask)
        return self.runner

    def _read_committed(self, runner: CachedModel, text: Text) -> torch.Tensor:
        """Read what was committed since the last round, at least one token a row. Returns the logits after it, [B, V].

        Rows behind by fewer tokens than others are filled up on the right; the filler is not kept.
        """
        cache = runner.cache
        # the last token is always read (again, where a batch in step kept a row's whole draft): its logits are needed
        cache.rewind([min(known, total - 1) for total, known in zip(text.lengths, cache.known, strict=True)])
        behind = [total - known for total, known in zip(text.lengths, cache.known, strict=True)]
        width = max(behind)
        if text.rows == 1:
            ids = text.ids[:, text.lengths[0] - width : text.lengths[0]]
        else:
            start = torch.tensor(text.lengths, device=text.ids.device) - torch.tensor(behind, device=text.ids.device)
            columns = start[:, None] + torch.arange(width, device=text.ids.device)
            ids = text.ids.gather(1, columns.clamp(max=text.ids.shape[1] - 1))
        used = [0 if ended else count for count, ended in zip(behind, text.ended, strict=True)]
        logits = runner(self._readable(ids), used=used)
        cache.commit(behind)
        if text.rows == 1:
            return logits[:, -1]
        last = torch.tensor(behind, device=logits.device) - 1
        return logits[torch.arange(text.rows, device=logits.device), last]

    def _scores(self, logits: torch.Tensor, text: Text, draft: Draft) -> torch.Tensor:
        """[B, V'] draft logits -> [B, V] processed scores in the target's vocabulary, on the text's device."""
        logits = _resized(logits.to(text.ids.device), self.drafter.vocab_size)
        if not self.call.law.processors:
            return logits
        return self.call.law.last_scores(text.ids, text.lengths, logits, draft)

    def _readable(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids the draft has an embedding for: padding rows of the target's vocabulary read as the draft's last entry."""
        size = self.drafter.model.config.get_text_config(decoder=True).vocab_size
        return ids if size >= self.drafter.vocab_size else ids.clamp(max=size - 1)


def _resized(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Cut or pad the last dimension: tokens that one of the two models lacks are never drafted."""
    missing = size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
