"""How much of a mixture of experts a forward pass reads: more positions choose more of the experts.

Knows configs and the sizes of parameters; nothing of time.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from .traits import Traits


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
