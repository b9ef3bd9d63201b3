"""EAGLE-3 heads with fewer operations. In so small a layer, launching operations takes most of the time of a step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...engine.agreement import agree
from ...engine.hooks import any_touched
from ...engine.parts import with_children
from ...engine.prepared import PreparedModule
from ...fast import native
from ...fast.fused import fused_product
from ...fast.head_steps import NO_TABLE, HeadSteps, NativeHead, embeddings_in_c
from ...fast.layers import FusedLayer
from ...fast.native import NativeProduct
from ...fast.norms import Called, Norm
from ...fast.products import PackedLinear, Product, may_copy
from ...fast.shared import Angles, Shared
from ...fast.sources import Modules, Source, Weights
from .head import EagleHead

_NO_FORM = "its layer, its norms or its output have no form in C"


def source_of(head: Any) -> Source:
    """Everything a fused head is made from; it stays valid while this is the same."""
    weights = (Weights.of(held, head.device.type == "cpu") for held in (head.parameters(), head.buffers()))
    return Source(Modules.of(head.modules()), *weights)


@functools.singledispatch
def fused_head(head: Any) -> PreparedModule:
    """The same head with fewer operations and its current weights. Layers stay unfused if the output would differ or copies are
    not allowed. EAGLE-1 heads, which use the target's output embedding, are not changed. Other classes register theirs.

    An EAGLE-3 head of bfloat16 runs in C with weights and inputs of 8 bits. It drafts in two thirds of the time, and as many
    of its tokens are accepted.
    """
    if head.config.version == 1:
        return PreparedModule(head)
    children: dict[tuple[str, ...], nn.Module] = {("lm_head",): fused_product(head.lm_head, in_8_bits=True)}
    plain = PreparedModule(with_children(head, children))
    if not may_copy(head.parameters()) or any_touched(head.modules()):
        return plain
    warning = "the EAGLE head's layers run as they are: "
    if head.config.slides:
        return replace(plain, warning=warning + "there is no faster form of layers with a sliding window")
    angles = Angles(head.rotary_emb, head.config.of_layer(), head.dtype)
    shared = Shared(angles)
    first, *others = head.layers
    own = [_First(first, shared), *(FusedLayer(layer, shared, True, in_8_bits=True) for layer in others)]
    own[-1].is_last = True
    children |= {("fc",): PackedLinear.of(head.fc, in_8_bits=True), ("norm",): Called(Norm(head.norm))}
    children |= {("layers",): nn.ModuleList(own), ("rotary_emb",): angles}
    if head.config.fc_norm:
        children["fc_norm",] = nn.ModuleList(Called(Norm(norm)) for norm in head.fc_norm)
    other: Any = with_children(head, children)
    if _agree(head, other):
        other.steps_with = functools.partial(_eagle_steps, head, other)
        return PreparedModule(other, last_only=True)
    return replace(plain, warning=warning + "the logits of their faster form differ by more than rounding")


def _eagle_steps(head: EagleHead, other: Any, target: PreTrainedModel) -> HeadSteps | str:
    """The steps in C of an EAGLE-3 head with the embeddings of a target, or why there are none. other: the fused head."""
    (layer, *more), config = other.layers, head.config
    product = getattr(other.lm_head, "run", None)
    output = product.native if isinstance(product, Product) else None
    norms = [layer.before_attention, layer.of_state, other.norm.run]
    table = other.rotary_emb.table
    embeddings = embeddings_in_c(getattr(head, "embed_tokens", None) or target.get_input_embeddings(), head.dtype)
    if more:
        return "it has several layers"
    if layer.native is None or output is None or table is None or not all(type(norm) is Norm for norm in norms):
        return _NO_FORM
    if any(norm.in_c(head.dtype) is None for norm in norms):
        return _NO_FORM
    if embeddings is None or config.vocab_size > len(embeddings):
        return NO_TABLE
    if not output.dtype == layer.native.dtype == head.dtype:
        return "its layer and its output have different dtypes"
    tokens, size = None if head.d2t is None else head.draft_tokens, len(head.draft_tokens)
    parts = layer.native, [norm.in_c(head.dtype) for norm in norms], output, embeddings, tokens, size, table
    options = layer.norm_before_residual, config.norm_output
    product, taps, epsilon = _of_features(other)
    return HeadSteps(layer, NativeHead(*parts, *options, fuse=product, tap_norms=taps, tap_epsilon=epsilon))


def _of_features(other: Any) -> tuple[NativeProduct | None, list[torch.Tensor], float]:
    """What `EagleHead.fuse` of a fused head needs in C: its product (None where it cannot), its norms' weights and epsilon."""
    config, product = other.config, other.fc.product.native
    norms = [norm.run for norm in getattr(other, "fc_norm", ())]
    sizes = {len(norm.weight) % native.TILE for norm in norms}
    epsilons = {norm.epsilon for norm in norms} or {0.0}
    known = sizes <= {0} and len(epsilons) == 1 and all(type(norm) is Norm for norm in norms)
    if config.norm_before_fc or product is None or not known or product.outputs != config.hidden_size:
        return None, [], 0.0
    return product, [norm.weight.detach() for norm in norms], epsilons.pop()


class _First(FusedLayer):
    """EAGLE-3's first layer, whose attention reads embedding and state, concatenated."""

    def __init__(self, layer: Any, shared: Shared):
        super().__init__(layer, shared, True, in_8_bits=True)
        self.of_state = Norm(layer.hidden_norm)
        self.norm_before_residual: bool = layer.norm_before_residual

    def forward(self, embeddings: torch.Tensor, states: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        normed = self.of_state(states)
        beside = torch.cat([self.before(embeddings), normed], -1)
        residual = normed if self.norm_before_residual else states
        made = self.in_c(residual, beside=beside, **kwargs)
        return self.transform(self.attend(residual, beside, **kwargs)) if made is None else made


@torch.no_grad()
def _agree(head: EagleHead, other: EagleHead) -> bool:
    """Whether two heads give the same logits for a few columns, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    embeddings, states = torch.randn(2, 1, 4, head.config.hidden_size, generator=generator).to(head.dtype)
    expected, found = (part.logits(part(embeddings, states)) for part in (head, other))
    return agree(found, expected, head.dtype)
