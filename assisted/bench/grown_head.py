"""Heads of a small target, made to fit its grown version: they read the same numbers among more.

Knows where `grown` puts the small model's hidden states; nothing of measuring.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .. import zoo
from ..heads.eagle import EagleHead
from ..heads.eagle_formats import load_eagle
from .grown import layer_places

__all__ = ["grow_head", "shipped_head"]


def shipped_head(grown: PreTrainedModel) -> EagleHead:
    """`"zoo:eagle3"` for the shipped target grown."""
    small = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
    return grow_head(load_eagle(str(zoo.folder("eagle3")), small), small, grown)


@torch.no_grad()
def grow_head(head: EagleHead, small: PreTrainedModel, grown: PreTrainedModel) -> EagleHead:
    """An EAGLE-3 head that proposes for a grown target what `head` proposes for the small one, up to rounding.

    The layer stays as small as it is; only what reads the target's states is as wide as these. A head trained for a model
    of the grown size would be wider, so that its drafts would cost more.

    Args:
        head: made for `small`; not changed.
        small: the model that was grown.
        grown: what `grow` made of it. The new head goes to its device, in its dtype.

    Raises ValueError for an EAGLE-1 head, whose states are as wide as the target's, and for one that reads what leaves the
    final norm.
    """
    config, layers = head.config, small.config.num_hidden_layers
    if config.version != 3 or layers in config.taps:
        raise ValueError("head: only EAGLE-3 heads that read the layers' own states can be made to fit a grown target")
    places = layer_places(layers, grown.config.num_hidden_layers)
    width, wide, taps = config.target_hidden_size or config.hidden_size, grown.config.hidden_size, len(config.taps)
    larger = replace(
        config,
        taps=tuple(places[tap - 1] + 1 for tap in config.taps),
        target_hidden_size=wide,
        own_embedding=True,
    )
    other = EagleHead(larger)
    own = head.state_dict()
    if not config.own_embedding:
        own["embed_tokens.weight"] = small.get_input_embeddings().weight
    read = torch.arange(taps * wide).view(taps, -1)[:, :width]
    # a norm over a wider state divides by less, which its weights and the epsilon make good
    narrower = math.sqrt(width / wide)
    norms = {f"fc_norm.{tap}.weight": torch.arange(width) for tap in range(taps)} | {
        "input_norm.weight": read.flatten()
    }
    for name, place in norms.items():
        if name in own:
            own[name] = _wider(own[name] * narrower, place, other.get_parameter(name))
    own["fc.weight"] = _wider(own["fc.weight"], read.flatten(), other.fc.weight)
    other.load_state_dict(own)
    for norm in _norms(other):
        norm.variance_epsilon *= narrower**2
    return other.to(grown.device, grown.dtype).eval()


def _wider(part: torch.Tensor, places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Zeros as wide as `like`, the columns of `part` in their places."""
    wide = torch.zeros(like.shape, dtype=part.dtype, device=part.device)
    wide[..., places.to(part.device)] = part
    return wide


def _norms(head: Any) -> list[Any]:
    """What norms the target's states."""
    return [*getattr(head, "fc_norm", []), *([head.input_norm] if hasattr(head, "input_norm") else [])]
