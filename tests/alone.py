"""What a head says of a text alone: the checks that what is drafted in a call, from slots, in batches, is just that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architectures import random_ids
from pairs import CALL, ROUNDING, no_fallback

from assisted.core.drafts import Draft
from assisted.lengths.rates import Rates
from assisted.methods.eagle.draft import EagleDrafting
from assisted.methods.shared.base import Drafting

__all__ = [
    *("Alone", "drafts_of", "one_and_four", "require_best_paths", "require_chains", "rows_of", "slots_apart"),
    "watched",
]


class Alone:
    """What a head says after a text, worked out from the text alone: no cache, no batch, no padding."""

    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """[V] after the committed text and a drafted path."""
        raise NotImplementedError

    def chain(self, text: list[int], count: int) -> list[int]:
        path: list[int] = []
        for _ in range(count):
            path.append(int(self.logits(text, path).argmax()))
        return path

    def tree(self, text: list[int], depth: int, top_k: int) -> dict[tuple[int, ...], float]:
        """Every path that EAGLE-2 offers, and its log-probability."""
        offered: dict[tuple[int, ...], float] = {}
        frontier: dict[tuple[int, ...], float] = {(): 0.0}
        for _ in range(depth):
            level: dict[tuple[int, ...], float] = {}
            for path, score in frontier.items():
                found, tokens = self.logits(text, list(path)).log_softmax(-1).topk(top_k)
                for more, token in zip(found.tolist(), tokens.tolist(), strict=True):
                    level[(*path, token)] = score + more
            offered |= level
            frontier = dict(sorted(level.items(), key=lambda entry: -entry[1])[:top_k])
        return offered


def one_and_four(target: Any) -> list[dict[str, torch.Tensor]]:
    """A single prompt, and four of which three are padded on the left; what `trained_head` has seen."""
    one = random_ids(target, 1, 20, seed=20)
    four, mask = random_ids(target, 4, 12, seed=4), torch.ones(4, 12, dtype=torch.int64)
    for row in range(4):
        mask[row, : 2 * row] = 0
    return [
        {"input_ids": one, "attention_mask": torch.ones_like(one)},
        {"input_ids": four.where(mask.bool(), 0), "attention_mask": mask},
    ]


@contextmanager
def watched(
    patch: pytest.MonkeyPatch, look: Callable[[Any, Draft, int], None], kind: type[Drafting] = EagleDrafting
) -> Any:
    """Meanwhile `look(text, draft, budget)` sees every proposal; returns how many there were."""
    counted, propose = [0], kind.propose

    def looked(self: Drafting, text: Any, budget: int) -> Draft:
        draft = propose(self, text, budget)
        counted[0] += 1
        look(text, draft, budget)
        return draft

    with patch.context() as inner:
        inner.setattr(kind, "propose", looked)
        yield counted


def drafts_of(
    patch: pytest.MonkeyPatch, kind: Any, look: Callable[[Any], None] = lambda drafting: None
) -> list[tuple[list[list[int]], list[int], Draft, list[int]]]:
    """Of every draft from now on: the text of each row, the rows that had not ended, the draft, and slots that were kept."""
    seen, propose = [], kind.propose

    def looked(self: Any, text: Any, budget: int) -> Draft:
        rows = [text.ids[row, :length].tolist() for row, length in enumerate(text.lengths)]
        draft = propose(self, text, budget)
        assert self.runner is not None
        look(self)
        seen.append((rows, text.unfinished, draft, list(self.runner.cache.known)))
        return draft

    patch.setattr(kind, "propose", looked)
    return seen


def rows_of(text: Any, mask: torch.Tensor) -> list[tuple[int, list[int]]]:
    """The unfinished rows of a text without their padding."""
    hidden = (1 - mask).sum(1).tolist()
    return [(row, text.ids[row, hidden[row] : text.lengths[row]].tolist()) for row in text.unfinished]


def require_chains(
    alone: Any, model: Any, inputs: dict[str, torch.Tensor], kind: type[Drafting] = EagleDrafting, **call: Any
) -> Any:
    """Round after round, rows of a batch that commit different numbers of tokens get the head's own chains. The output."""

    def look(text: Any, draft: Draft, budget: int) -> None:
        for row, committed in rows_of(text, inputs["attention_mask"]):
            assert draft.tokens[row].tolist() == alone.chain(committed, budget)

    with pytest.MonkeyPatch.context() as patch, watched(patch, look, kind) as counted, no_fallback():
        output = model.generate(**inputs, **(CALL | call))
    assert counted[0] > 1
    assert model.report.accepted > 3
    return output


def require_best_paths(
    alone: Alone,
    model: Any,
    inputs: dict[str, torch.Tensor],
    top_k: int,
    kind: type[Drafting] = EagleDrafting,
    **call: Any,
) -> None:
    """Of all that the head offers, also where few nodes are kept: what lies behind the others is not even read."""

    def look(text: Any, draft: Draft, budget: int) -> None:
        for row, committed in rows_of(text, inputs["attention_mask"]):
            offered = alone.tree(committed, budget, top_k)
            drafted = [tuple(draft.prefix(row, node)) for node in range(int(draft.lengths[row]))]
            best = sorted(offered.values(), reverse=True)[: len(drafted)]
            assert [offered[path] for path in drafted] == pytest.approx(best, abs=ROUNDING)
            assert len(set(drafted)) == len(drafted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rates, "learn", lambda *args: None)  # the head is taken at its word
        with watched(patch, look, kind) as counted, no_fallback():
            model.generate(**inputs, **(CALL | {"max_new_tokens": 12} | call))
    assert counted[0] > 1
    assert model.report.accepted > 3


def slots_apart(
    model: Any, inputs: dict[str, torch.Tensor], fresh: Callable[[torch.Tensor], list[torch.Tensor]], kind: Any
) -> list[float]:
    """After each round: how far keys and values of committed tokens are from those that `fresh` makes of the text [1, T]."""
    found, propose = [], kind.propose

    def compared(self: Any, text: Any, budget: int) -> Draft:
        draft = propose(self, text, budget)
        ids = text.ids[:, : text.lengths[0]]
        known = ids.shape[1] - 1
        assert self.runner is not None and self.runner.cache.known == [known]
        stores = zip(self.runner.cache.stores, fresh(ids), strict=True)
        found.append(max(float((ours[:, :, :known] - theirs[:, :, :known]).abs().max()) for ours, theirs in stores))
        return draft

    with pytest.MonkeyPatch.context() as patch, no_fallback():
        patch.setattr(kind, "propose", compared)
        model.generate(**inputs, **CALL)
    assert 0 < model.report.accepted < model.report.drafted
    return found
