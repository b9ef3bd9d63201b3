"""MTP heads with fewer operations, and in C."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...engine.agreement import agree
from ...engine.cache import SlotCache
from ...engine.hooks import any_touched
from ...engine.parts import with_children
from ...engine.prepared import PreparedModule
from ...fast import delta
from ...fast.families import form_of, is_known
from ...fast.fused import fused_product
from ...fast.head_steps import NO_TABLE, HeadSteps, embeddings_in_c
from ...fast.layers import fused_layer
from ...fast.norms import Called
from ...fast.products import PackedLinear, may_copy
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
        ("layer",): fused_layer(head.layer, Shared(angles), True, True),
        ("rotary_emb",): angles,
        ("fc",): PackedLinear.of(head.fc) if PackedLinear.gains(head.fc) else head.fc,
    }
    for name, norm in head.named_children():
        if name.endswith("norm") and not isinstance(norm, nn.Identity):
            children[name,] = Called(form.norm_of(norm))
    if not head.shares_output:
        children["output",] = fused_product(head.output)
    other: Any = with_children(head, children)
    other.in_c = head_in_c(head, other.layer, angles)
    if other.in_c is not None:
        other.steps_with = other.in_c.steps
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


class HeadInC:
    """The `forward` of an MTP head in C. layer: its fused one, which has a form in C. angles: of its positions."""

    def __init__(self, head: MTPHead, layer: Any, angles: Angles):
        norms = [getattr(head, f"{name}_norm") for name in ("embed", "hidden", "end")]
        form = form_of(head.layer)
        factors = [None if isinstance(norm, nn.Identity) else form.norm_of(norm).factor() for norm in norms]
        self.floats = delta.FloatHead(delta.FloatProduct([head.fc]), factors, layer.floats)
        self.layer, self.angles, self.shares_output = layer, angles, head.shares_output

    def __call__(
        self, embeddings: Tensor, states: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor | None:
        """As `MTPHead.forward`; None for columns that cannot run in C."""
        layer = self.layer
        if embeddings.dtype != states.dtype or not delta.fits(states, ()):
            return None
        stores = layer.stores(cache) or layer.slots_to_read(states, mask, cache)
        if stores is None or not delta.fits(states, stores):
            return None
        around = layer.shared.around(states, mask, self.angles(states, positions), cache, layer.index)
        return self.floats(embeddings, states, stores, around)

    def steps(self, target: Any) -> HeadSteps | str:
        """Its steps in texts of one row, with the embeddings of a target, or why there are none."""
        product, table = getattr(target.get_output_embeddings(), "run", None), self.angles.table
        weight = embeddings_in_c(target.get_input_embeddings(), torch.float32)
        if not (self.shares_output and isinstance(product, delta.FloatProduct)) or table is None:
            return "the output embedding has no form in C"
        if weight is None or product.outputs > len(weight):  # a drafted token may have no embedding
            return NO_TABLE
        return HeadSteps(self.layer, delta.TokenSteps(self.floats, weight, table, product))


def head_in_c(head: MTPHead, layer: Any, angles: Angles) -> HeadInC | None:
    """The head in C; None if its layer has no such form. layer: the fused one."""
    if layer.floats is None or head.fc.weight.dtype != torch.float32 or head.window is not None:
        return None
    return HeadInC(head, layer, angles)
