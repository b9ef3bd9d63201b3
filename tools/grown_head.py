"""Heads of a small target, made to fit its grown version: they read the same numbers out of wider states."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from assisted import zoo
from assisted.methods.eagle.formats import load_eagle
from assisted.methods.eagle.head import EagleHead

from .grown import layer_positions


def shipped_head(grown: PreTrainedModel) -> EagleHead:
    """`"zoo:eagle3"` for the grown shipped target."""
    small = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
    return grow_head(load_eagle(str(zoo.folder("eagle3")), small), small, grown)


@torch.no_grad()
def grow_head(head: EagleHead, small: PreTrainedModel, grown: PreTrainedModel) -> EagleHead:
    """An EAGLE-3 head that proposes for a grown target what `head` proposes for the small one, up to rounding.

    The layer keeps its size; only the parts that read the target's states get wider. A head trained for a model of the grown
    size would be wider, and its drafts would cost more.

    Args:
        head: made for `small`; not changed.
        small: the model that was grown.
        grown: the model that `grow` made of it. The new head goes to its device, in its dtype.

    Raises ValueError for an EAGLE-1 head, whose states are as wide as the target's, and for one that reads the states after
    the final norm.
    """
    config, layers = head.config, small.config.num_hidden_layers
    if config.version != 3 or layers in config.taps:
        raise ValueError("head: only EAGLE-3 heads that read the layers' own states can be made to fit a grown target")
    positions = layer_positions(layers, grown.config.num_hidden_layers)
    width, wide, taps = config.target_hidden_size or config.hidden_size, grown.config.hidden_size, len(config.taps)
    larger = replace(
        config,
        taps=tuple(positions[tap - 1] + 1 for tap in config.taps),
        target_hidden_size=wide,
        own_embedding=True,
    )
    other, own = EagleHead(larger), head.state_dict()
    if not config.own_embedding:
        own["embed_tokens.weight"] = small.get_input_embeddings().weight
    read = (
        torch.arange(taps * wide).view(taps, -1)[:, :width].flatten()
    )  # the small model's numbers among the grown one's
    narrower = math.sqrt(width / wide)
    for name, like in other.state_dict().items():
        part = own[name]
        if part.shape != like.shape:  # it reads the target's states
            own[name] = torch.zeros(like.shape, dtype=part.dtype, device=part.device)
            # a norm over a wider state divides by less; its weights and the epsilon make up for that
            own[name][..., read[: part.shape[-1]].to(part.device)] = part * narrower if part.ndim == 1 else part
    other.load_state_dict(own)
    for norm in filter(None, [*getattr(other, "fc_norm", ()), getattr(other, "input_norm", None)]):
        norm.variance_epsilon *= narrower**2
    return other.to(grown.device, grown.dtype).eval()
