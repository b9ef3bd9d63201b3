"""Early exit: the target's first layers draft, and its other layers complete their work (LayerSkip, 2404.16710). The exit layer
is the one with the highest speedup that measurements predict (shadow acceptance, 2504.05598).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core.acceptance import top1
from ...core.drafts import Draft, Round
from ...core.host import timed
from ...core.text import Text
from ...distribution import Distribution, probabilities
from ...engine.agreement import agree
from ...engine.cache import SlotCache
from ...engine.needs import Needs
from ...engine.parts import Layers, few_ids, find_layers, unwrapped
from ...engine.runner import CachedModel
from ...engine.split import Begun, Split
from ...engine.traits import Traits, require_rewindable
from ...lengths.cost_model import ENOUGH, KEEP, KEEP_LOCAL, PRIOR, SAMPLES, DecayedMean, best_speedup
from ..shared.base import Call, Room, Spec, Target
from ..shared.part import PartDrafter, PartDrafting
from ..shared.registry import register

MEASURED_COLUMNS = 8  # maximum per round: for every measured layer, each column goes through the output embedding
MARGIN = 1.05  # factor by which another layer must look better, because the estimates are noisy
SHADOWS = 8  # maximum number of layers measured in one round
LONGEST_GAP = 64  # maximum number of rounds between two measurements


@register("early-exit")
@dataclass(frozen=True)
class EarlyExit(Spec):
    """The target's first layers draft for it: `"early-exit"`, `"early-exit:6"`.

    Worthwhile for models trained for early exits (LayerSkip's recipe, early-exit losses); others have low acceptance rates.
    Needs no memory of its own, because weights and KV are the target's; recurrent states are copied.

    Args:
        exit_layer: how many layers draft, from 1 to all but one. None (default) chooses the number with the highest
            predicted speedup and keeps measuring. Give a number if the model card names one.
    """

    title = "Early exit"
    has_q = True
    acceptance = (0.3, 0.7)
    sample = "early-exit"
    training = "assisted.methods.early_exit.train:EarlyExitTraining"

    exit_layer: int | None = None

    def memory(self, room: Room) -> dict[str, int]:
        return {"copy of the recurrent states": room.states}

    @classmethod
    def named(cls, rest: str) -> EarlyExit:
        """The spec for `"early-exit:6"`."""
        if rest and not rest.isdecimal():
            raise ValueError(f"draft: 'early-exit:{rest}' names no layer; write 'early-exit:6' or just 'early-exit'")
        return cls(int(rest) if rest else None)

    def load(self, target: Target, **kwargs: Any) -> ExitDrafter:
        """Find the target's layers and check on a few tokens that its two parts compute the same as the whole.

        Raises ValueError if the target cannot be run in two parts, or if it does not have this exit_layer.
        """
        model = unwrapped(target.model)
        traits = Traits.of(model)
        if not (traits.is_recurrent and traits.masks.trees):  # states that change at a commit only can be lent
            require_rewindable(model, "target")
        try:
            layers = find_layers(model)
        except Exception as error:
            raise ValueError(f"draft: early exit cannot be used with this target: {error}") from error
        count = len(layers)
        if count < 2:
            raise ValueError(f"draft: early exit needs a target with at least 2 layers, this one has {count}")
        if self.exit_layer is not None and not 1 <= self.exit_layer < count:
            raise ValueError(
                f"draft: exit_layer {self.exit_layer} is not possible; give a number from 1 to {count - 1}"
            )
        if not traits.is_recurrent:
            for end in {1, count // 2, count - 1} if self.exit_layer is None else {self.exit_layer}:
                _require_whole(model, layers, end)
        return ExitDrafter(layers, self.exit_layer, split=not traits.is_recurrent)


class ExitDrafter(PartDrafter):
    """A target's layers and the statistics of early exits.

    exit_layer: see `EarlyExit`. split: verification goes on after the layers that drafted, and now and then measures the other
    exits. Not with recurrent states, which the layers that drafted have put back.
    """

    def __init__(self, layers: Layers, exit_layer: int | None = None, split: bool = True):
        self.needs = Needs(layers, split=split)
        self.choice = ExitChoice(len(layers), exit_layer)

    @property
    def exit_layer(self) -> int:
        """How many layers draft at present."""
        return self.choice.layer

    def start(self, call: Call) -> ExitDrafting:
        return ExitDrafting(self, call)


class ExitDrafting(PartDrafting):
    """One `generate` with early exit."""

    def __init__(self, drafter: ExitDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.split = Split(call.target)

    def propose(self, text: Text, budget: int) -> Draft:
        choice = self.drafter.choice
        self.text, self.before = text, list(text.lengths)
        self.end, self.budget = choice.layer, budget
        measured = choice.to_measure() if self.drafter.needs.split else None
        part = self.split.front(self.end)
        read: list[dict[int, torch.Tensor]] = []

        def draft() -> Draft:
            return self.draft_with(part, text, budget, lambda: read.append(dict(part.states)))

        if measured is None:
            self.proposed = draft()
        else:
            self.proposed, seconds = timed(draft, part.device)
            self.seconds = seconds / sum(states[self.end].shape[-2] for states in read)  # of a forward pass
        if self.drafter.needs.split:
            self.split.begin(self.proposed, self.end, read, measured)
        return self.proposed

    def observe(self, round: Round) -> None:
        if not self.has_proposed(round):
            return
        choice, split, accepted = self.drafter.choice, self.split, round.accepted
        for row in round.unfinished:
            choice.learn(self.end, accepted[row], min(accepted[row] + 1, round.drafted[row]))
        if split.measured:
            (cost,) = self.call.settings.ranks.largest([self.seconds / split.seconds])
            choice.learn_cost(self.end, cost)
            self._measure(round)
            split.measured = {}
        choice.decide(round.draft.width, self.budget)
        if choice.hopeless:
            layer = choice.layer
            self.drafter.warn_hopeless(
                f"with an exit after {layer} of {choice.count} layers",
                choice.acceptance(layer),
                choice.cost(layer),
                "Early exits need a model that was trained for them; choose another draft for this one.",
            )

    def _measure(self, round: Round) -> None:
        """Compare the other exits with the target at the newly committed positions."""
        text, distribution, draft, logits = self.text, self.call.distribution, round.draft, round.logits
        grown = [(row, round.kept[row]) for row in round.unfinished]
        at = [(row, column) for column in range(logits.shape[1]) for row, new in grown if column < new]
        rows, columns = (list(numbers) for numbers in zip(*at[:MEASURED_COLUMNS], strict=True))
        measured, device = self.split.measured, self.call.target.device
        states = [hidden[..., rows, columns, :].to(device) for hidden in measured.values()]
        exits = self.split.exits(torch.cat(states, -2)[..., None, :, :]).to(logits.device).split(len(rows))

        def scores_at(logits: torch.Tensor) -> torch.Tensor:
            scores = (
                distribution.scores(text.ids, self.before, logits, draft) if distribution.processors else logits.float()
            )
            return scores[rows, columns]

        wanted = scores_at(logits)
        index = torch.tensor(rows), torch.tensor(columns)
        shares = [
            _agreement(scores_at(logits.index_put(index, own.to(logits.dtype))), wanted, distribution) for own in exits
        ]
        for end, share in zip(measured, torch.stack(shares).tolist(), strict=True):
            self.drafter.choice.learn(end, share, len(rows))


class ExitChoice:
    """Statistics of the exits of one model. They determine which layer drafts, but never what is accepted.

    count: number of layers in the model. given: always exit after this layer, without measuring; None to choose. The attribute
    `layer` is the number of layers that draft at present.
    """

    def __init__(self, count: int, given: int | None = None):
        self.count = count
        self.given = given
        self.layer = given or max(1, count // 4)
        self.right = [DecayedMean() for _ in range(count)]  # accepted tokens of each exit
        self.costs: tuple[tuple[int, float], ...] = ()  # replaced, not changed: another thread may be reading it
        self.drafted = DecayedMean()  # draft length
        self.rounds = 0
        self.measurements = 0
        self.next = 0

    def to_measure(self) -> list[int] | None:
        """The layers to measure in this round, or None. Called once per round; measurements become rarer with time.

        The layer in use is measured by its drafts. The others take turns in evenly spread groups.
        """
        self.rounds += 1
        if self.given is not None or self.rounds <= self.next:
            return None
        self.next = self.rounds + min(self.rounds // 8, LONGEST_GAP)
        stride = -(-(self.count - 1) // SHADOWS)
        first = 1 + self.measurements % stride
        self.measurements += 1
        return [layer for layer in range(first, self.count, stride) if layer != self.layer] or None

    def learn(self, layer: int, hits: float, trials: float) -> None:
        """`hits` of `trials` tokens of this exit were, or would have been, accepted."""
        self.right[layer].add(hits, trials, keep=KEEP**trials)

    def learn_cost(self, layer: int, cost: float) -> None:
        """A drafted token of this exit took the time of `cost` forward passes of the whole target."""
        # more than 0.99 is noise or hopeless, because fewer layers are never more expensive
        self.costs = (*self.costs, (layer, min(cost, 0.99)))[-SAMPLES:]

    def acceptance(self, layer: int) -> float:
        """The estimated acceptance rate, 0.5 before any observation."""
        return self.right[layer].mean(0.5, PRIOR)

    def cost(self, layer: int) -> float:
        """Estimated cost of a drafted token, in forward passes of the target.

        The median over all measurements of the line from the measured exit to the whole forward pass. Below the measured layer,
        the cost per layer is assumed to be no lower than the measured one.
        """
        costs = self.costs
        if not costs:
            return layer / self.count
        found = []
        for measured, cost in costs:
            line = cost + (1 - cost) * (layer - measured) / (self.count - measured)
            found.append(line if layer > measured else max(line, cost * layer / measured))
        return statistics.median(found)

    def speedup(self, layer: int, shortest: int = 1, longest: int = 8) -> float:
        """The predicted speedup of this exit at the best draft length from `shortest` to `longest`."""
        return best_speedup(self.acceptance(layer), self.cost(layer), range(shortest, longest + 1))

    def decide(self, drafted: float, budget: int) -> None:
        """Switch to the layer with the highest predicted speedup.

        drafted: length of the last draft. budget: its maximum length. With another layer, the policy is assumed to draft at
        least the average length, and up to the budget.
        """
        self.drafted.add(drafted, keep=KEEP_LOCAL)
        if self.given is not None:
            return
        lengths = min(max(1, round(self.drafted.mean())), budget), budget
        known = [layer for layer in range(1, self.count) if self.right[layer].weight >= 2 * PRIOR]
        best = max(known, key=lambda layer: self.speedup(layer, *lengths), default=self.layer)
        if self.speedup(best, *lengths) > MARGIN * self.speedup(self.layer, *lengths):
            self.layer = best

    @property
    def hopeless(self) -> bool:
        """Whether no draft length gives a speedup with the layer in use. If it was chosen, this holds for all known layers."""
        return self.right[self.layer].weight >= 2 * ENOUGH and self.speedup(self.layer) < 1


def _agreement(ours: torch.Tensor, theirs: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Expected number of accepted tokens among N tokens drafted with scores [N, V], given the target's scores [N, V]."""
    if not distribution.do_sample:
        return (top1(ours) == top1(theirs)).sum().float()
    return torch.minimum(probabilities(ours), probabilities(theirs)).sum().nan_to_num()


@torch.no_grad()
def _require_whole(model: PreTrainedModel, layers: Layers, end: int) -> None:
    """Raises ValueError if the two parts do not compute the same logits as the whole model."""
    masks = Traits.of(model).masks
    ids = few_ids(model, 8)
    cache = SlotCache(1, ids.shape[1] + 1, right_aligned=not masks.trees)
    target = CachedModel(model, cache, masks, Needs(layers, split=True))
    target.prefill(ids[:, :4], None)
    draft = Draft(ids[:, 5:], torch.tensor([3]))
    whole = target(ids[:, 4:], draft).float()  # not committed
    try:
        split = Split(target)
        part = split.front(end)
        part(ids[:, 4:])
        begun = Begun(draft, end, dict(part.states), list(target.cache.lengths))
        target.cache.commit([ids.shape[1] - 4])
        part(ids[:, :1])  # anything that layers pass on besides hidden states now belongs to another token
        target.cache.rewind([4])
        parts = split.finish(begun, ids[:, 4:], draft).float()
    except Exception as error:
        raise ValueError(
            f"draft: early exit cannot be used with this target, {type(model).__name__}: its layers from {end} on do not run "
            f"without those before them ({type(error).__name__}: {error})"
        ) from error
    if not agree(parts, whole, model.dtype):
        raise ValueError(
            f"draft: early exit cannot be used with this target, {type(model).__name__}: layers 0 to {end - 1} and then the "
            "others do not give the same result as all layers in one forward pass"
        )
