"""Early exit: the target's first layers draft, its last layers finish what they began (LayerSkip, 2404.16710).

Knows parts of models and the target's slots. Which layer to leave at is measured in exit_choice.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from ..distribution import Distribution, probabilities
from ..drafts import Draft, Round
from ..engine.cache import SlotCache
from ..engine.parts import Layers, few_ids, find_layers, unwrapped
from ..engine.runner import Masks, Runnable, require_rewindable
from ..engine.split import Begun, SplitModel, timed
from ..text import Text
from .base import Call, Drafter, Spec, Target
from .chain import PartDrafting
from .exit_choice import ExitChoice

__all__ = ["EarlyExit", "ExitDrafter"]

MEASURED_COLUMNS = 8  # of a round, at the most: each goes through the head once for every layer measured
TOLERANCE = 1e-3  # of the largest logit: the parts run the same operations, and kernels may still differ


@dataclass(frozen=True)
class EarlyExit(Spec):
    """The target's first layers draft for it: `"early-exit"`, `"early-exit:6"`.

    Pays for models trained to be left early (LayerSkip's recipe, early-exit losses); others draft poorly this way. Needs
    no memory of its own: weights and KV are the target's.

    Args:
        exit_layer: how many layers draft, from 1 to all but one. None (default) measures which number predicts the
            highest speedup, and goes on measuring; give a number where the model's card names one.
    """

    name: ClassVar[str] = "early-exit"
    trained: ClassVar[bool | None] = False
    trees: ClassVar[bool | None] = False
    has_q: ClassVar[bool | None] = True

    exit_layer: int | None = None

    @classmethod
    def named(cls, rest: str) -> EarlyExit:
        """The spec behind `"early-exit:6"`."""
        if rest and not rest.isdecimal():
            raise ValueError(f"draft: 'early-exit:{rest}' names no layer; write 'early-exit:6', or 'early-exit' alone")
        return cls(int(rest) if rest else None)

    def load(self, target: Target, **kwargs: Any) -> ExitDrafter:
        """Find the target's layers and check on a few tokens that its parts make the whole.

        Raises ValueError for a model that cannot be run in two parts, and for an exit_layer that it does not have.
        """
        model = unwrapped(target.model)
        require_rewindable(model, "target")
        try:
            layers = find_layers(model)
        except Exception as error:
            raise ValueError(f"draft: early exit cannot serve this target: {error}") from error
        count = len(layers)
        if count < 2:
            raise ValueError(f"draft: early exit needs a target of at least 2 layers, this one has {count}")
        if self.exit_layer is not None and not 1 <= self.exit_layer < count:
            raise ValueError(
                f"draft: exit_layer {self.exit_layer} is not possible; give a number from 1 to {count - 1}"
            )
        for end in {1, count // 2, count - 1} if self.exit_layer is None else {self.exit_layer}:
            _require_whole(model, layers, end)
        return ExitDrafter(layers, self.exit_layer)


class ExitDrafter(Drafter):
    """What a target's layers are, and what was learned of leaving them early.

    Args:
        layers: of the target.
        exit_layer: how many of them draft; None measures.
    """

    def __init__(self, layers: Layers, exit_layer: int | None = None):
        self.layers = layers
        self.choice = ExitChoice(len(layers), exit_layer)
        self._warned = False

    @property
    def exit_layer(self) -> int:
        """How many layers draft at the moment."""
        return self.choice.layer

    def run_target(self, model: PreTrainedModel | Runnable, cache: SlotCache, masks: Masks) -> SplitModel:
        return SplitModel(model, cache, masks, self.layers)

    def start(self, call: Call) -> ExitDrafting:
        return ExitDrafting(self, call)

    def warn_if_hopeless(self) -> None:
        """Say once that no exit pays, so that nobody waits for a speedup that does not come."""
        if self._warned or not self.choice.hopeless:
            return
        self._warned = True
        layer, choice = self.exit_layer, self.choice
        warnings.warn(
            f"draft: leaving after {layer} of {choice.count} layers, {choice.acceptance(layer):.0%} of the drafted tokens are "
            f"right and each costs {choice.cost(layer):.0%} of a pass of the target: slower than no draft at all. Early exits "
            "need a model that was trained for them; choose another draft for this one.",
            stacklevel=4,
        )


class ExitDrafting(PartDrafting):
    """One `generate` with early exit."""

    def __init__(self, drafter: ExitDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.proposed: Draft | None = None  # while it waits for its verdict

    @property
    def target(self) -> SplitModel:
        """The target of this call. Raises TypeError where another drafter runs it."""
        if not isinstance(self.call.target, SplitModel):
            raise TypeError("early exit needs the target to be run by ExitDrafter.run_target")
        return self.call.target

    def propose(self, text: Text, budget: int) -> Draft:
        choice, target = self.drafter.choice, self.target
        self.text, self.before = text, list(text.lengths)
        self.end, self.budget = choice.layer, budget
        measured = choice.to_measure()
        part, tap = target.front(self.end)
        hidden: list[torch.Tensor] = []

        def draft() -> Draft:
            return self.draft_with(part, text, budget, lambda: hidden.append(tap.hidden))

        if measured is None:
            self.proposed = draft()
        else:
            self.proposed, seconds = timed(draft, target.device)
            self.seconds = seconds / len(hidden)
        target.begun = Begun(self.proposed, self.end, torch.cat(hidden, -2), list(target.cache.lengths))
        target.measured = measured
        return self.proposed

    def observe(self, round: Round) -> None:
        proposed, self.proposed = self.proposed, None
        if not round.draft.is_that_of(proposed):
            return
        choice, target, accepted = self.drafter.choice, self.target, round.accepted
        for row in round.unfinished:
            choice.learn(self.end, accepted[row], min(accepted[row] + 1, round.drafted[row]))
        if target.states:
            choice.learn_cost(self.end, self.seconds / target.seconds)
            self._measure(target, round)
            target.states = {}
        choice.decide(round.draft.width, self.budget)
        self.drafter.warn_if_hopeless()

    def _measure(self, target: SplitModel, round: Round) -> None:
        """What the other exits would have said where the text has grown, against what the target says there."""
        text, distribution, draft, logits = self.text, self.call.distribution, round.draft, round.logits
        grown = [(row, round.kept[row]) for row in round.unfinished]
        places = [(row, column) for column in range(logits.shape[1]) for row, new in grown if column < new]
        rows, columns = (list(numbers) for numbers in zip(*places[:MEASURED_COLUMNS], strict=True))
        states = [hidden[..., rows, columns, :].to(target.device) for hidden in target.states.values()]
        exits = target.exits(torch.cat(states, -2)[..., None, :, :]).to(logits.device).split(len(rows))

        def at_places(logits: torch.Tensor) -> torch.Tensor:
            scores = (
                distribution.scores(text.ids, self.before, logits, draft) if distribution.processors else logits.float()
            )
            return scores[rows, columns]

        wanted = at_places(logits)
        index = torch.tensor(rows), torch.tensor(columns)
        shares = [
            _agreement(at_places(logits.index_put(index, own.to(logits.dtype))), wanted, distribution) for own in exits
        ]
        for end, share in zip(target.states, torch.stack(shares).tolist(), strict=True):
            self.drafter.choice.learn(end, share, len(rows))


def _agreement(ours: torch.Tensor, theirs: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """How many of the tokens drawn from [N, V] scores are accepted, in expectation, against those of the target."""
    if not distribution.do_sample:
        return (ours.argmax(-1) == theirs.argmax(-1)).sum().float()
    return torch.minimum(probabilities(ours), probabilities(theirs)).sum().nan_to_num()


@torch.no_grad()
def _require_whole(model: PreTrainedModel, layers: Layers, end: int) -> None:
    """Raises ValueError where two parts do not make the logits of the whole model."""
    masks = Masks.of(model)
    ids = few_ids(model, 8)
    target = SplitModel(model, SlotCache(1, ids.shape[1] + 1, right_aligned=not masks.trees), masks, layers)
    target.prefill(ids[:, :4], None)
    draft = Draft(ids[:, 5:], torch.tensor([3]))
    whole = target(ids[:, 4:], draft).float()  # nothing of it is kept
    try:
        part, tap = target.front(end)
        part(ids[:, 4:])
        begun = Begun(draft, end, tap.hidden, list(target.cache.lengths))
        target.cache.commit([ids.shape[1] - 4])
        part(ids[:, :1])  # whatever the layers hand on beside hidden states is now of another token
        target.cache.rewind([4])
        parts = target.finish(begun, ids[:, 4:], draft).float()
    except Exception as error:
        raise ValueError(
            f"draft: early exit cannot serve this target, {type(model).__name__}: its layers from {end} on do not run "
            f"without those before them ({type(error).__name__}: {error})"
        ) from error
    if not torch.allclose(whole, parts, rtol=0, atol=TOLERANCE * float(whole.abs().max()), equal_nan=True):
        raise ValueError(
            f"draft: early exit cannot serve this target, {type(model).__name__}: layers 0 to {end - 1} and then the others "
            "do not give what all of them give in one pass"
        )
