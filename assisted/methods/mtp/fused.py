"""MTP heads with fewer operations, and in C."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...engine.agreement import agree
from ...engine.cache import SlotCache
from ...engine.hooks import any_touched
from ...engine.parts import with_children
from ...engine.prepared import PreparedModule
from ...fast.families import form_of, is_known
from ...fast.fused import fused_product
from ...fast.head_steps import NO_TABLE, HeadSteps, NativeHead, embeddings_in_c
from ...fast.layers import fused_layer
from ...fast.norms import Called, Norm
from ...fast.products import PackedLinear, Product, may_copy
from ...fast.shared import Angles, Shared
from ..eagle.fused import fused_head
from .head import MTPHead, SequentialMTP


@fused_head.register
def _(head: SequentialMTP) -> PreparedModule:
    made = [fused_mtp(layer) for layer in head.layers]
    layers = nn.ModuleList([one.module for one in made])
    warning = next((one.warning for one in made if one.warning), None)
    return PreparedModule(with_children(head, {("layers",): layers}), warning=warning)


@fused_head.register
def fused_mtp(head: MTPHead) -> PreparedModule:
    """The same head with fewer operations and its current weights; unchanged if its family is not known."""
    if not may_copy(head.parameters()) or any_touched(head.modules()) or not is_known(head.layer):
        return PreparedModule(head)
    form = form_of(head.layer)
    angles = Angles(head.rotary_emb, head.layer_config, head.dtype, form)
    children: dict[tuple[str, ...], nn.Module] = {
        ("layer",): fused_layer(head.layer, Shared(angles), True),
        ("rotary_emb",): angles,
        ("fc",): PackedLinear.of(head.fc),
    }
    for name, norm in head.named_children():
        if name.endswith("norm") and not isinstance(norm, nn.Identity):
            children[name,] = Called(form.norm_of(norm))
    if not head.shares_output:
        children["output",] = fused_product(head.output)
    other: Any = with_children(head, children)
    other.steps_with = functools.partial(mtp_steps, head, other)
    numbers = torch.randn(2, 1, 4, head.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(head.dtype)
    with torch.no_grad():
        expected, found = (_in_two_steps(part, *numbers) for part in (head, other))
    if agree(found, expected, head.dtype):
        return PreparedModule(other)
    return PreparedModule(
        head, warning="the MTP head runs as it is: the states of its faster form differ by more than rounding"
    )


def _in_two_steps(head: MTPHead, embeddings: Tensor, states: Tensor) -> Tensor:
    """A head's states after four columns, [1, 4, H] each. The second step reads the slots of the first, as in a call."""
    cache, made = SlotCache(1, 4), []
    cache.begin_rounds()
    for first in (0, 2):
        cache.place(2, states.device)
        columns = slice(first, first + 2)
        seen = torch.ones(2, cache.top, dtype=torch.bool).tril(first)[None, None]
        made.append(head(embeddings[:, columns], states[:, columns], torch.arange(first, first + 2)[None], seen, cache))
        cache.commit([2])
    return torch.cat(made, 1)


def mtp_steps(head: MTPHead, other: Any, target: PreTrainedModel) -> HeadSteps | str:
    """Its steps in C in texts of one row, with the embeddings of a target, or why there are none. other: the fused head."""
    if head.window is not None:
        return "its attention has a sliding window"
    layer, join, table, dtype = other.layer, other.fc.product.native, other.rotary_emb.table, head.dtype
    product: Any = getattr(target.get_output_embeddings() if head.shares_output else other.output, "run", None)
    output = product.native if isinstance(product, Product) else None
    modules = other.embed_norm, other.hidden_norm, other.end_norm
    norms: list[Norm | None] = [None if isinstance(norm, nn.Identity) else norm.run for norm in modules]
    in_c = [None if norm is None else norm.in_c(dtype) for norm in norms]
    lacks = any(norm is not None and one is None for norm, one in zip(norms, in_c, strict=True))
    if getattr(layer, "native", None) is None or not layer.native.is_whole or join is None or table is None or lacks:
        return "its layer or its norms have no form in C"
    if output is None:
        return "the output embedding has no form in C"
    if {layer.native.dtype, join.dtype, output.dtype} != {dtype} or (
        layer.form.turns_in_floats and dtype != torch.float32
    ):
        return "its parts have different dtypes"
    weight = embeddings_in_c(target.get_input_embeddings(), dtype)
    if weight is None or product.outputs > len(weight):  # a drafted token may have no embedding
        return NO_TABLE
    parts = layer.native, in_c, output, weight, None, product.outputs, table
    return HeadSteps(layer, NativeHead(*parts, normed_residual=False, normed_output=True, join=join))
