"""EAGLE-3 and MTP heads with fewer operations. In so small a layer, launching operations takes most of the time of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..engine.agreement import agree
from ..engine.cache import SlotCache
from ..engine.hooks import any_touched
from ..engine.parts import with_children
from ..engine.prepared import PreparedModule
from ..fast import delta, native
from ..fast.families import is_known
from ..fast.fused import fused_product
from ..fast.head_steps import EagleSteps, Shape, TreeInC
from ..fast.layers import FusedLayer, fused_layer
from ..fast.native import NativeProduct
from ..fast.norms import Called, Norm, norm_of
from ..fast.products import PackedLinear, Product, may_copy
from ..fast.shared import Angles, Shared
from ..fast.sources import Modules, Source, Weights
from .eagle import EagleHead
from .mtp import MTPHead, SequentialMTP

_NO_FORM = "its layer, its norms or its output have no form in C"
_NO_TABLE = "the target's input embedding is not a plain table of the head's dtype and vocabulary"


def source_of(head: EagleHead | MTPHead | SequentialMTP) -> Source:
    """Everything a fused head is made from; it stays valid while this is the same."""
    on_host = head.device.type == "cpu"
    return Source(
        Modules.of(head.modules()), Weights.of(head.parameters(), on_host), Weights.of(head.buffers(), on_host)
    )


def fused_head(head: EagleHead | MTPHead | SequentialMTP) -> PreparedModule:
    """The same head with fewer operations and its current weights. Layers stay unfused if the output would differ or copies are
    not allowed. EAGLE-1 heads, which use the target's output embedding, are not changed, and no MTP heads of unknown families.

    An EAGLE-3 head of bfloat16 runs in C with weights and inputs of 8 bits. It drafts in two thirds of the time, and as many
    of its tokens are accepted.
    """
    if isinstance(head, SequentialMTP):
        made = [_fused_mtp(layer) for layer in head.layers]
        layers = nn.ModuleList([one.module for one in made])
        warning = next((one.warning for one in made if one.warning), None)
        return PreparedModule(with_children(head, {("layers",): layers}), warning=warning)
    if isinstance(head, MTPHead):
        return _fused_mtp(head)
    if head.config.version == 1:
        return PreparedModule(head)
    children: dict[tuple[str, ...], nn.Module] = {("lm_head",): fused_product(head.lm_head, in_8_bits=True)}
    if not may_copy(head.parameters()) or any_touched(head.modules()):
        return PreparedModule(with_children(head, children))
    if head.config.slides:
        warning = "the EAGLE head's layers run as they are: there is no faster form of layers with a sliding window"
        return PreparedModule(with_children(head, children), warning=warning)
    angles = Angles(head.rotary_emb, head.config.of_layer(), head.dtype)
    shared = Shared(angles)
    first, *others = head.layers
    own = [_First(first, shared), *(FusedLayer(layer, shared, True, in_8_bits=True) for layer in others)]
    own[-1].is_last = True
    of_taps = getattr(head, "fc_norm", ())
    children |= {
        ("fc",): PackedLinear.of(head.fc, in_8_bits=True),
        ("norm",): Called(Norm(head.norm)),
        **({("fc_norm",): nn.ModuleList(Called(Norm(norm)) for norm in of_taps)} if of_taps else {}),
        ("layers",): nn.ModuleList(own),
        ("rotary_emb",): angles,
    }
    other: Any = with_children(head, children)
    if _agree(head, other):
        other.steps_with = functools.partial(_eagle_steps, head, other)
        return PreparedModule(other, last_only=True)
    warning = "the EAGLE head's layers run as they are: the logits of their faster form differ by more than rounding"
    return PreparedModule(with_children(head, {("lm_head",): children[("lm_head",)]}), warning=warning)


def _fused_mtp(head: MTPHead) -> PreparedModule:
    if not may_copy(head.parameters()) or any_touched(head.modules()) or not is_known(head.layer):
        return PreparedModule(head)
    angles = Angles(head.rotary_emb, head.layer_config, head.dtype)
    children: dict[tuple[str, ...], nn.Module] = {
        ("layer",): fused_layer(head.layer, Shared(angles), True, True),
        ("rotary_emb",): angles,
        ("fc",): PackedLinear.of(head.fc) if PackedLinear.gains(head.fc) else head.fc,
    }
    for name, norm in head.named_children():
        if name.endswith("norm") and not isinstance(norm, nn.Identity):
            children[name,] = Called(norm_of(norm))
    if not head.shares_output:
        children["output",] = fused_product(head.output)
    other: Any = with_children(head, children)
    other.in_c = head_in_c(head, children[("layer",)], angles)
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


def _in_two_steps(head: MTPHead, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
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
    """The `forward` of an MTP head in C.

    Args:
        head: the head.
        layer: its fused layer, which has a form in C.
        angles: of its positions.
    """

    def __init__(self, head: MTPHead, layer: Any, angles: Angles):
        norms = [getattr(head, f"{name}_norm") for name in ("embed", "hidden", "end")]
        factors = [None if isinstance(norm, nn.Identity) else norm_of(norm).factor() for norm in norms]
        self.floats = delta.FloatHead(delta.FloatProduct([head.fc]), factors, layer.floats)
        self.layer, self.angles, self.shares_output = layer, angles, head.shares_output

    def __call__(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor | None:
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
        weight = _embeddings(target.get_input_embeddings(), torch.float32)
        if not (self.shares_output and isinstance(product, delta.FloatProduct)) or table is None:
            return "the output embedding has no form in C"
        if weight is None or product.outputs > len(weight):  # a drafted token may have no embedding
            return _NO_TABLE
        return HeadSteps(self.layer, delta.TokenSteps(self.floats, weight, table, product))


class HeadSteps:
    """The steps of a head in C, in one text of a call.

    layer: the fused one. steps: of tensors; those of EAGLE-3 heads grow trees and fuse features, too.
    """

    def __init__(self, layer: FusedLayer, steps: EagleSteps | delta.TokenSteps):
        self.layer, self.steps, self.logits = layer, steps, steps.logits
        self._of_eagle = steps if isinstance(steps, EagleSteps) else None

    def __call__(self, ids: torch.Tensor, states: torch.Tensor, cache: SlotCache, first: int) -> torch.Tensor | None:
        """As `HeadRunner.__call__`; None for columns that cannot run in C. first: position of the text's first column."""
        where = self._place(states, cache, first, ids.shape[1])
        return None if where is None else self.steps(ids, states, *where)

    def chain(
        self, state: torch.Tensor, cache: SlotCache, first: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `HeadRunner.chain`."""
        where = self._place(state[:, None], cache, first, count)
        return None if where is None else self.steps.chain(state, *where, count)

    def tree(self, state: torch.Tensor, cache: SlotCache, first: int, shape: Shape) -> TreeInC | None:
        """As `HeadRunner.tree`."""
        where = None if self._of_eagle is None else self._place(state[:, None], cache, first, shape.limits[-1])
        return None if self._of_eagle is None or where is None else self._of_eagle.tree(state, *where, shape)

    def fuse(self, features: torch.Tensor) -> torch.Tensor | None:
        """As `Head.fuse`; None if that does not run in C."""
        fuses = self._of_eagle is not None and self._of_eagle.of_features is not None and self._fits(features, ())
        return self._of_eagle.fuse(features) if fuses else None  # type: ignore[union-attr]

    def _fits(self, states: torch.Tensor, stores: Sequence[torch.Tensor]) -> bool:
        """Whether columns can run in C."""
        kinds = {states.dtype, *(store.dtype for store in stores)}
        is_plain = states.is_cpu and all(store.is_contiguous() for store in stores)
        few = states.shape[1] <= native.AT_ONCE and not torch.compiler.is_compiling()
        return kinds == {self.steps.dtype} and is_plain and few

    def _place(
        self, states: torch.Tensor, cache: SlotCache, first: int, width: int
    ) -> tuple[Sequence[torch.Tensor], int, int] | None:
        """Keys and values, and slot and position of the first of `width` columns; None for columns that cannot run in C."""
        cache.place(width, states.device)
        stores, place = self.layer.stores(cache), cache.start
        if not isinstance(place, int) or stores is None or not self._fits(states, stores):
            return None
        position = place + first
        return (stores, place, position) if 0 <= position <= self.steps.positions - width else None


def _eagle_steps(head: EagleHead, other: Any, target: PreTrainedModel) -> HeadSteps | str:
    """The steps in C of an EAGLE-3 head with the embeddings of a target, or why there are none. other: the fused head."""
    (layer, *more), config = other.layers, head.config
    product = getattr(other.lm_head, "run", None)
    output = product.native if isinstance(product, Product) else None
    norms = [layer.before_attention, layer.of_state, other.norm.run]
    table = other.rotary_emb.table
    embeddings = _embeddings(getattr(head, "embed_tokens", None) or target.get_input_embeddings(), head.dtype)
    if more:
        return "it has several layers"
    if layer.native is None or output is None or table is None or not all(type(norm) is Norm for norm in norms):
        return _NO_FORM
    if embeddings is None or config.vocab_size > len(embeddings):
        return _NO_TABLE
    if not output.dtype == layer.native.dtype == head.dtype:
        return "its layer and its output have different dtypes"
    tokens, size = None if head.d2t is None else head.draft_tokens, len(head.draft_tokens)
    options = layer.norm_before_residual, config.norm_output
    weights = [(norm.weight.detach(), norm.epsilon) for norm in norms]
    product, taps, epsilon = _of_features(other)
    parts = layer.native, weights, output, embeddings, tokens, size, table
    return HeadSteps(layer, EagleSteps(*parts, *options, product, taps, epsilon))


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


def _embeddings(own: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of an embedding that C can look up; None for others."""
    if type(own) is not nn.Embedding or own.max_norm is not None or any_touched([own]):
        return None
    weight = own.weight.detach()
    return weight if weight.is_cpu and weight.dtype == dtype and weight.is_contiguous() else None


def head_in_c(head: MTPHead, layer: Any, angles: Angles) -> HeadInC | None:
    """The head in C; None if its layer has no such form. layer: the fused one."""
    return None if layer.floats is None or head.fc.weight.dtype != torch.float32 else HeadInC(head, layer, angles)


class _First(FusedLayer):
    """EAGLE-3's first layer, whose attention reads embedding and state, concatenated."""

    def __init__(self, layer: Any, shared: Shared):
        super().__init__(layer, shared, True, in_8_bits=True)
        self.of_state = Norm(layer.hidden_norm)
        self.norm_before_residual: bool = layer.norm_before_residual

    def forward(self, embeddings: torch.Tensor, states: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        normed = self.of_state(states)
        beside = torch.cat([self.before_attention(embeddings), normed], -1)
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
