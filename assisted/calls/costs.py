"""The draft lengths of a pair's calls: each begins with what the last call of its kind has measured, and ends as the start of
the next one. Knows what the costs of a call depend on; nothing of how they are measured.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.host import processor
from ..engine.hooks import is_offloaded
from ..engine.parts import device_of, unwrapped
from ..engine.ranks import Ranks
from ..engine.traits import Traits
from ..lengths import COLUMN, Adaptive, DraftLength, Length, remembered
from ..loading.quantization import memory_bytes

_FEW = 4  # drafted tokens, over which the cost of a further position is averaged until it is measured
_KINDS = 16  # kinds of calls whose measurements are kept


@dataclass
class Measured:
    """What calls of a pair have measured. Of each kind of call (policy, rows, greedy or sampled, device), the last length."""

    lengths: list[tuple[Any, Length]] = field(default_factory=list)
    keys: dict[Any, str] = field(default_factory=dict)

    def of(self, kind: Any) -> Length | None:
        return next((length for other, length in self.lengths if other == kind), None)

    def keep(self, kind: Any, length: Length) -> None:
        self.lengths = [*(entry for entry in self.lengths if entry[0] != kind), (kind, length)][-_KINDS:]


@dataclass
class CallLengths:
    """The draft lengths of one call, which may have several texts."""

    pair: Any  # has the target, the drafter and `measured`; its `length` is the last one started
    policy: DraftLength  # that of the call
    ranks: Ranks  # the processes that must decide alike
    started: list[tuple[Any, Length]] = field(default_factory=list)  # by kind of call

    def start(self, rows: int, do_sample: bool) -> Length:
        """The policy's state for a text. It may continue from the measurements of the last finished call of its kind."""
        pair, policy = self.pair, self.policy
        kind = (policy, rows, do_sample, device_of(pair.target))
        found = pair.measured.of(kind)
        if found is None and isinstance(policy, Adaptive):
            costs = remembered.recall(self._key(kind)) if policy.costs is None else policy.costs
            share = share_of_weights(pair) if policy.draft_cost is None else policy.draft_cost
            costs, share = self.ranks.first(
                (costs, share)
            )  # files and parts of the weights may differ between processes
            further = _share_of_position(pair, rows) if policy.position_cost is None else policy.position_cost
            policy = replace(policy, costs=costs, draft_cost=share, position_cost=further)
        pair.length = pair.drafter.start_length(policy, found)
        self.started.append((kind, pair.length))
        return pair.length

    def end(self) -> None:
        for _, length in self.started:
            length.end()

    def remember(self) -> None:
        """Keep the costs for later processes."""
        for kind, length in self.started:
            if length.costs is not None and self.ranks.is_first:
                remembered.remember(self._key(kind), length.costs)

    def _key(self, kind: Any) -> str:
        """Names everything that the costs of a kind of call depend on: the machine, the models and how they run."""
        pair = self.pair
        ran = (kind, pair.fast, torch.get_num_threads())
        if ran not in pair.measured.keys:
            policy, rows, do_sample, device = kind
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()} {device.type}"
            models = [pair.target, *pair.drafter.modules]
            sizes = [(type(m).__name__, sum(p.numel() for p in m.parameters()), str(pair.dtype)) for m in models]
            about = [name, *ran[1:], sizes, repr(pair.config.draft), repr(policy), rows, do_sample]
            places = {str(place) for place in getattr(pair.target, "hf_device_map", {}).values()}
            if len(places) > 1:
                about.append(sorted(places))
            if is_offloaded(pair.target):
                about.append("offloaded")
            if self.ranks.several:
                about.append(f"{self.ranks.size} processes")
            pair.measured.keys[ran] = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        return str(pair.measured.keys[ran])


def share_of_weights(pair: Any) -> float | None:
    """Bytes of the draft's own weights as a share of the target's; None for a draft that has none.

    Reading weights takes most of a forward pass, so this is a guess of a draft's cost before any is measured.
    """
    if not pair.drafter.modules:
        return None
    target = memory_bytes(pair.target)
    own = memory_bytes(pair.target, *pair.drafter.modules) - target
    return own / target if own and target else None


def _share_of_position(pair: Any, rows: int) -> float | None:
    """What one more position of each row should add to a forward pass, as a share of a forward pass over one position; None
    where it is `COLUMN`.

    On a CPU, each row adds a column to compute. Of a mixture of experts, more experts are read: the mean over the first few
    positions. Of an offloaded layer, accelerate fetches all of them in any case.
    """
    target: Any = unwrapped(pair.target)
    each = COLUMN * (rows if device_of(target).type == "cpu" else 1)
    if Traits.of(target).experts is None or is_offloaded(target):
        return each if each > COLUMN else None
    return each + (growth(target, rows * (1 + _FEW), rows) - 1) / _FEW


def expected_experts(experts: int, chosen: int, positions: int) -> float:
    """Expected number of a layer's experts that at least one of the positions chooses.

    Each position chooses `chosen` of `experts`, all equally probable and independent of the other positions. So it leaves out a
    given expert with probability 1 - chosen / experts, and all positions leave it out with that probability to the power of
    their number. Routers choose similar experts for similar tokens, so in a text they are fewer.
    """
    return experts * (1 - (1 - chosen / experts) ** positions)


def numbers_read(model: PreTrainedModel, positions: int = 1) -> float:
    """Parameters that a forward pass over this many positions reads, of all rows together: not an untied embedding, and of
    experts only those that are expected to be chosen."""
    words, output = model.get_input_embeddings(), model.get_output_embeddings()
    unread = 0.0 if output is None or output.weight is words.weight else float(words.weight.numel())
    found = Traits.of(model).experts
    if found is not None:
        inside = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        unread += inside * (1 - expected_experts(*found, positions) / found[0])
    return sum(weight.numel() for weight in model.parameters()) - unread


def growth(model: PreTrainedModel, positions: int, of: int = 1) -> float:
    """How many times as much a forward pass over `positions` reads as one over `of` positions; 1 without experts."""
    if Traits.of(model).experts is None:
        return 1.0
    return numbers_read(model, positions) / numbers_read(model, of)
