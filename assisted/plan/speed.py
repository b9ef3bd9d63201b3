"""How fast a pair should be: reading the weights takes a pass's time, acceptance says how many passes are saved.

Ranges, because acceptance depends on the text and passes reach only a share of the memory's bandwidth. `assisted doctor`
measures both.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..drafters import DraftModel, Eagle, EarlyExit, LayerSkip, Medusa, NGram, QuantizedSelf, Suffix, TokenRecycling
from ..drafters.base import Spec
from .shapes import Shapes

__all__ = ["ACCEPTANCE", "Speed", "expected_tokens", "predict", "read_per_pass"]

# Share of drafted tokens that are accepted, low and high. Rough: those of copies come from this project's measurements of
# SmolLM2-135M-Instruct in 8 bits; the others are guesses, as acceptance depends on the text. 2211.17192, 2503.01840 and
# 2401.10774 measure draft models, EAGLE-3 and Medusa.
ACCEPTANCE: dict[type, tuple[float, float]] = {
    DraftModel: (0.5, 0.85),
    QuantizedSelf: (0.85, 0.97),
    Eagle: (0.55, 0.85),
    Medusa: (0.45, 0.7),
    EarlyExit: (0.3, 0.7),
    LayerSkip: (0.5, 0.8),
    Suffix: (0.05, 0.7),
    NGram: (0.05, 0.6),
    TokenRecycling: (0.1, 0.4),
}
_LONGEST = 15
_LEAST_COST = 0.01  # of a target pass, for a draft that reads no weights
_LAUNCH = 0.03  # of a target pass, for the layers of a draft whose weights are read in no time
_WIDER = (0.005, 0.04)  # of a pass, for each further position that it verifies
_LOOP = 0.97  # the controller switches drafts off that do not pay, and this is what finding out costs


@dataclass(frozen=True)
class Speed:
    """A prediction, low and high.

    Args:
        plain: tokens per second without drafts.
        times: speedup by drafts.
        bytes_per_pass: that a pass over one token reads.
    """

    plain: tuple[float, float]
    times: tuple[float, float]
    bytes_per_pass: int

    @property
    def drafted(self) -> tuple[float, float]:
        """Tokens per second with drafts."""
        return self.plain[0] * self.times[0], self.plain[1] * self.times[1]


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per pass of a chain, the target's own included, if each drafted token is accepted with this probability
    (2211.17192)."""
    return float(length + 1) if acceptance >= 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def predict(
    target: Shapes,
    spec: Spec,
    weights: int,
    drafts: int,
    states: int,
    bandwidth: tuple[float, float],
    offloaded: int = 0,
    bus: tuple[float, float] = (1.0, 1.0),
) -> Speed:
    """The speed of one row.

    weights, drafts, states: bytes of the target's weights, of the draft's, and of the keys and values at half of the context.
    bandwidth: bytes per second. offloaded: bytes of the weights that cross the bus in each pass, and the bus's bandwidth.
    """
    read = read_per_pass(target, weights) + states
    resident = max(0, read - offloaded)
    seconds = [resident / rate + offloaded / way for rate, way in zip(bandwidth, bus, strict=True)]
    draft_share = drafts / bandwidth[1] / seconds[1]
    kinds = [kind for one in spec.parts() for kind in ACCEPTANCE if isinstance(one, kind)]
    low, high = [max((ACCEPTANCE[kind][side] for kind in kinds), default=0.0) for side in (0, 1)]
    cost = draft_share + (_LAUNCH if drafts else _LEAST_COST) * (0.2 if offloaded else 1)
    slow = _best(low, 1.5 * cost, 0.0 if offloaded else _WIDER[1])
    fast = _best(high, cost, 0.0 if offloaded else _WIDER[0])
    return Speed((1 / seconds[0], 1 / seconds[1]), (max(_LOOP, slow), max(1.0, fast)), read)


def read_per_pass(target: Shapes, weights: int) -> int:
    """Bytes of the weights that a pass over one token reads: not an untied embedding, and of experts only those chosen."""
    config, total = target.config, target.numbers
    words, output = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    unread = 0 if output is None or output.weight is words.weight else words.weight.numel()
    experts = next(
        (
            getattr(config, name, None)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if getattr(config, name, None)
        ),
        None,
    )
    chosen = getattr(config, "num_experts_per_tok", None)
    if isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen < experts:
        inside = sum(weight.numel() for name, weight in target.model.named_parameters() if ".experts." in name)
        unread += int(inside * (1 - chosen / experts))
    return int(weights * (1 - unread / total))


def _best(acceptance: float, cost: float, wider: float) -> float:
    lengths = range(_LONGEST + 1)
    return max(expected_tokens(acceptance, length) / (1 + length * (cost + wider)) for length in lengths)
