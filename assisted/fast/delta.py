"""The gated delta rule over few columns in C, and whole layers of hybrids, for float32 on a CPU. By operations of torch, such a
layer takes some seventy of them, longer than the arithmetic. Deals with tensors; `fused` decides where it is used.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.delta import DeltaMixer, Projected, Read
from ..engine.libraries import READS_STATES
from ..engine.masks import Columns
from . import native, structs, variants
from .structs import Floats, HybridLayer, HybridPass, MtpHead, Shape, columns_of, offset, pointer, pointers, require

MOST = 2**14  # numbers of a head's values over all columns, which lie on the stack
_SHARED = 2**18  # products of a number and a state's or a weight's entry from which several threads are faster
_COLUMNS = 256  # of a forward pass; for more, torch's products are as fast
_PLAIN = torch.contiguous_format
_BLOCK = 32  # outputs that lie together; they are filled up to a multiple


@functools.cache
def loaded() -> tuple[Any, str]:
    """The compiled library and an empty string, or None and why there is none."""
    library, reason = native.prebuilt_or_compiled(variants.of_delta(native.processor_flags()))
    if library is not None:
        structs.require_layout(library, *structs.OF_DELTA)
        library.mix.argtypes = [c_void_p, c_int64, c_int64, c_void_p, *[structs.Columns] * 4, *[c_void_p] * 13, c_int]
        library.mix_texts.argtypes = [c_void_p, c_int64, c_int64, *[structs.Columns] * 4, *[c_void_p] * 9, c_int]
        library.mix_texts.restype = None
        library.layers.argtypes = [c_void_p, c_int64, *[c_void_p] * 5]
        library.step_of_states.argtypes = [c_void_p] * 7
        library.step_of_tokens.argtypes = [*[c_void_p] * 4, c_int64, *[c_void_p] * 4]
        library.greedy_chain.argtypes = [*[c_void_p] * 4, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 3]
        for run in (library.layers, library.step_of_states, library.step_of_tokens, library.greedy_chain):
            run.restype = c_int64
        library.advance.argtypes = [c_void_p, *[c_int64] * 3, *[c_void_p] * 4, c_int]
        library.multiply.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int]
        library.layer_numbers.argtypes, library.layer_numbers.restype = [c_void_p], c_int64
        library.mix.restype = library.advance.restype = library.multiply.restype = None
    return library, reason


class NativeMixer(DeltaMixer):
    """A `DeltaMixer` that runs in C where it can, prompts too. It uses the model's own weights, at the address that they have
    now. In bfloat16 it rounds where the layer does; states are float32 there as well."""

    def over_columns(
        self, projected: Projected, before: torch.Tensor, state: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, Read]:
        rows, heads, dk, dv = state.shape
        n, size = columns.width, before.shape[2]
        if n * dv > MOST or not self._fits(projected, before, state):
            return super().over_columns(projected, before, state, columns)
        dtype = before.dtype
        inputs = None if dtype == torch.float32 else torch.cat([before, projected[0].transpose(1, 2)], 2)
        given, past = [*map(_in_floats, projected)], _in_floats(before)
        noted = past.new_empty(rows, past.shape[1], size + n) if inputs is None else None
        decay, keys = state.new_empty(rows, heads, n), state.new_empty(rows, heads, n, dk)
        written, made = state.new_empty(rows, heads, n, dv), state.new_empty(rows, n, heads * dv)
        read = state.new_empty(rows, n, past.shape[1])
        parents = columns.parents.contiguous() if columns.parents is not None and n > 1 else None
        weights, shape = self.weights(), self.shape(dtype)
        own = noted, decay, keys, written, made, read
        loaded()[0].mix(
            ctypes.addressof(shape),
            *(rows, n, pointer(parents, torch.int64, rows * (n - 1))),
            *map(columns_of, given),
            *_of_weights(weights, shape),
            *(_floats(past, rows * past.shape[1] * size), _floats(state, state.numel())),
            *(None if part is None else part.data_ptr() for part in own),
            _threads(rows * n * heads * dk * dv),
        )
        inputs = noted if inputs is None else inputs
        assert inputs is not None
        return made.to(dtype), Read(inputs, decay, keys, written)

    def of_text(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        states = None if kwargs else self.states_for(hidden_states, cache)
        if states is None:
            return super().of_text(hidden_states, cache, attention_mask, **kwargs)
        (before, state), (rows, n, _), like = states, hidden_states.shape, hidden_states.new_empty(0)
        (heads, dk, dv), channels = state.shape[1:], before.shape[1]
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(like.dtype)
        projected = self.arrange(self.own, self.joined(hidden_states))
        if not self._fits(projected, before, state):
            return super().of_text(hidden_states, cache, attention_mask, **kwargs)
        given, before = [*map(_in_floats, projected)], _in_floats(before)
        made, read = state.new_empty(rows, n, heads * dv), state.new_empty(rows, n, channels)
        weights, shape = self.weights(), self.shape(like.dtype)
        loaded()[0].mix_texts(
            *(ctypes.addressof(shape), rows, n),
            *map(columns_of, given),
            *_of_weights(weights, shape),
            *(
                _floats(before, rows * channels * shape.size),
                _floats(state, state.numel()),
                made.data_ptr(),
                read.data_ptr(),
            ),
            _threads(rows * n * heads * dk * dv),
        )
        if cache is not None:
            self.keep(cache, projected[0].transpose(1, 2), state)
        result: torch.Tensor = self.out(made.to(like.dtype))
        return result

    def states_for(self, hidden: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copies of the states before a prompt, [R, C, K] in its dtype and [R, H, dk, dv] float32, zeros without a past; None
        if the layer itself has to read it. hidden: [R, n, D]."""
        own: Any = self.own
        if not READS_STATES or not hidden.is_cpu:
            return None
        channels, size = own.conv1d.weight.shape[0], own.conv1d.weight.shape[-1]
        rows, past, state = len(hidden), None, None
        if cache is not None:
            if cache.is_recording_past(self.layer_idx):
                return None
            past, state = cache.get_conv_state(self.layer_idx), cache.get_recurrent_state(self.layer_idx)
        shape = rows, own.num_v_heads, own.head_k_dim, own.head_v_dim
        before = hidden.new_zeros(rows, channels, size) if past is None else past.clone(memory_format=_PLAIN)
        state = torch.zeros(shape) if state is None else state.clone(memory_format=_PLAIN)
        return (before, state) if before.shape == (rows, channels, size) and state.shape[0] == rows else None

    def keep(self, cache: Any, inputs: torch.Tensor, state: torch.Tensor) -> None:
        """Let a cache have the states after a prompt. inputs: of the convolution, [R, C, K or more]."""
        cache.update_conv_state(inputs, self.layer_idx, conv_kernel_size=self.own.conv1d.weight.shape[-1])
        cache.update_recurrent_state(state, self.layer_idx)

    def _fits(self, projected: Projected, before: torch.Tensor, state: torch.Tensor) -> bool:
        """Whether the rule in C can run over these; see `over_columns`."""
        own: Any = self.own
        norm: Any = self.gated_norm
        conv, dtype, n = own.conv1d, before.dtype, projected[0].shape[1]
        return (
            dtype in (torch.float32, torch.bfloat16)
            and conv.weight.shape[-1] == before.shape[2]
            and all(part is None or part.dtype == dtype for part in (conv.weight, conv.bias, *projected))
            and all(part.dtype in (dtype, torch.float32) for part in (own.A_log, own.dt_bias, norm.weight))
            and all(part.is_cpu for part in (conv.weight, own.A_log, own.dt_bias, norm.weight, before))
            and _is_plain(state)
            and before.is_contiguous()
            and all(part.stride(-1) == 1 and part.stride(0) == n * part.stride(1) for part in projected)
            and not torch.compiler.is_compiling()
        )

    def weights(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the arguments in C, the convolution's as [K, C]."""
        own: Any = self.own
        norm: Any = self.gated_norm
        small = own.conv1d.bias, own.A_log, own.dt_bias, norm.weight
        conv = own.conv1d.weight.detach()[:, 0].t().float().contiguous()
        return conv, *(None if part is None else _in_floats(part.detach()).contiguous() for part in small)

    def shape(self, dtype: torch.dtype) -> ctypes.Structure:
        """dtype: of the layer."""
        own: Any = self.own
        norm: Any = self.gated_norm
        sizes = own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim, own.conv1d.weight.shape[-1]
        halves = dtype == torch.bfloat16, norm.weight.dtype == dtype == torch.bfloat16
        return Shape(*sizes, self.strongest, norm.variance_epsilon, *map(int, halves))


class FloatProduct:
    """The concatenated outputs of several linear modules for one input, from a copy of their weights.

    Args:
        modules: of float32.
        order: of all outputs, [out] int64; None for their own.
    """

    def __init__(self, modules: Sequence[nn.Linear], order: torch.Tensor | None = None):
        biases = [module.bias for module in modules if module.bias is not None]
        weight = torch.cat([module.weight.detach() for module in modules])
        bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        self.outputs, self.inputs = weight.shape
        blocks = F.pad(weight, (0, 0, 0, -self.outputs % _BLOCK)).view(-1, _BLOCK, self.inputs)
        packed = native.in_large_pages(blocks.transpose(1, 2).contiguous().view(torch.uint8))
        self.held, self.modules = (packed, bias), modules
        packed_bytes = blocks.numel() * torch.float32.itemsize
        self.struct = Floats(pointer(packed, torch.uint8, packed_bytes), _floats(bias, self.outputs), *weight.shape)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], of a single module."""
        if not fits(inputs, ()):
            made: torch.Tensor = self.modules[0](inputs)
            return made
        inputs, columns = inputs.contiguous(), inputs.shape[:-1].numel()
        made = inputs.new_empty(*inputs.shape[:-1], self.outputs)
        given = ctypes.addressof(self.struct), _floats(inputs, columns * self.inputs), columns, made.data_ptr()
        loaded()[0].multiply(*given, _threads(columns * self.outputs * self.inputs))
        return made


class FloatLayer:
    """A layer of products, norms and either attention or the delta rule. It uses copies of all weights.

    Args:
        products: for the mixer's input, of the mixer's output, of gate and up together, of down.
        norms: what the norms before mixer and MLP multiply by, [hidden], and their epsilons.
        fields: the further fields of the struct, with tensors for addresses.
    """

    def __init__(
        self,
        products: Sequence[FloatProduct],
        norms: Sequence[tuple[torch.Tensor, float]],
        fields: Mapping[str, Any],
    ):
        tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        self.held = products, norms, tensors
        (first, mixer_epsilon), (second, mlp_epsilon) = norms
        self.hidden, self.entries = products[1].outputs, sum(part.outputs * part.inputs for part in products)
        before = [_floats(norm, self.hidden) for norm in (first, second)]
        epsilons = mixer_epsilon, mlp_epsilon
        plain = {name: value for name, value in fields.items() if name not in tensors}
        self.struct = HybridLayer(
            *(product.struct for product in products), *before, *epsilons, self.hidden, products[3].inputs, **plain
        )
        lengths = dict.fromkeys(("query_norm", "key_norm"), self.struct.head_size)
        lengths |= zip(_WEIGHTS, _lengths(self.struct.shape), strict=True)
        for name, tensor in tensors.items():
            setattr(self.struct, name, _floats(tensor, lengths[name]))
        self.is_attention = bool(self.struct.is_attention)
        self.numbers: int = loaded()[0].layer_numbers(ctypes.addressof(self.struct))

    def of_stores(self, rows: int, capacity: int) -> tuple[int, int]:
        """Numbers of its keys and of its values, with so many slots; or of its two states."""
        own, shape = self.struct, self.struct.shape
        if self.is_attention:
            return (rows * own.key_heads * capacity * own.head_size,) * 2
        return rows * _channels(shape) * shape.size, rows * shape.heads * shape.dk * shape.dv

    def noted(self, rows: int, width: int) -> tuple[int, int, int, int]:
        """How many numbers a pass notes: inputs, decays, keys, and what is written (`Read`)."""
        if self.is_attention:
            return 0, 0, 0, 0
        shape, columns = self.struct.shape, rows * width
        of_columns = (columns * shape.heads * count for count in (1, shape.dk, shape.dv))
        return rows * _channels(shape) * (shape.size + width), *of_columns


def attention_layer(
    products: Sequence[Sequence[nn.Linear]],
    norms: Sequence[tuple[torch.Tensor, float]],
    of_heads: Sequence[tuple[torch.Tensor, float]],
    sizes: tuple[int, int, int],
    turned: int,
    is_gated: bool,
    scaling: float,
) -> FloatLayer:
    """A layer with rotary attention.

    products, norms: as `FloatLayer`. of_heads: the same for queries and keys, or nothing. sizes: query heads, key heads, and
    numbers of a head, of which `turned` turn. is_gated: each query head has a gate after it.
    """
    query_heads, key_heads, size = sizes
    order = None
    if is_gated:
        own = torch.arange(2 * query_heads).view(-1, 2)
        beside = torch.arange(2 * query_heads, 2 * (query_heads + key_heads))
        heads = torch.cat([own[:, 0], beside, own[:, 1]])
        order = (heads[:, None] * size + torch.arange(size)).flatten()
    into, *others = products
    fields: dict[str, Any] = dict(zip(("query_heads", "key_heads", "head_size"), sizes, strict=True))
    fields |= {"is_attention": 1, "turned": turned, "is_gated": int(is_gated), "scaling": scaling}
    if of_heads:
        (fields["query_norm"], fields["query_epsilon"]), (fields["key_norm"], fields["key_epsilon"]) = of_heads
    return FloatLayer([FloatProduct(into, order), *map(FloatProduct, others)], norms, fields)


def delta_layer(
    products: Sequence[Sequence[nn.Linear]], norms: Sequence[tuple[torch.Tensor, float]], mixer: NativeMixer
) -> FloatLayer:
    """A layer with the delta rule. products, norms: as `FloatLayer`. mixer: of the layer."""
    own: Any = mixer.own
    into, *others = products
    outputs = sum(module.out_features for module in into)
    order = torch.cat(mixer.arrange(own, torch.arange(outputs)[None, None]), -1).flatten()
    weights = zip(_WEIGHTS, mixer.weights(), strict=True)
    copies = {name: weight.clone() for name, weight in weights if weight is not None}
    fields = {"shape": mixer.shape(torch.float32), **copies}
    return FloatLayer([FloatProduct(into, order), *map(FloatProduct, others)], norms, fields)


class PassRead:
    """What the layers of a forward pass have read, as `Read`, all in one tensor.

    Args:
        layers: of the pass.
        stores: keys and values of each with attention, the states of each other one.
        columns, rows: of the pass.
    """

    def __init__(
        self,
        layers: Sequence[FloatLayer],
        stores: Sequence[torch.Tensor],
        columns: Columns | None,
        rows: int,
        width: int,
    ):
        self.layers, self.stores, self.rows, self.width = layers, stores, rows, width
        sizes = [size for layer in layers for size in layer.noted(rows, width)]
        self.notes, at, places = torch.empty(sum(sizes)), 0, []
        first = self.notes.data_ptr()
        for size in sizes:
            places.append(first + at * torch.float32.itemsize)
            at += size
        self.each = (c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
        self.places = (c_void_p * len(places))(*places)
        self.of_stores = _of_stores(layers, stores, rows)
        tree = columns is not None and columns.parents is not None and width > 1
        self.parents = columns.parents.contiguous() if tree else None  # type: ignore[union-attr]

    @property
    def nbytes(self) -> int:
        """Bytes of what was read."""
        return self.notes.nbytes

    def advance(self, last: Sequence[int]) -> None:
        """Let the states become those after a column of each row, -1 for those that stay. last: [R]."""
        wanted = (c_int64 * self.rows)(*last)
        loaded()[0].advance(
            *(ctypes.addressof(self.each), len(self.layers), self.rows, self.width),
            *(pointer(self.parents, torch.int64, self.rows * (self.width - 1)), ctypes.addressof(wanted)),
            *(ctypes.addressof(self.of_stores), ctypes.addressof(self.places), _threads(self.notes.numel())),
        )


def fits(hidden: torch.Tensor, stores: Sequence[torch.Tensor]) -> bool:
    """Whether columns can run in C. hidden: [..., D]."""
    return (
        hidden.dtype == torch.float32
        and hidden.is_cpu
        and hidden.shape[:-1].numel() <= _COLUMNS
        and not torch.compiler.is_compiling()
        and all(map(_is_plain, stores))
    )


def run(
    layers: Sequence[FloatLayer],
    hidden: torch.Tensor,
    stores: Sequence[torch.Tensor],
    around: native.NativePass | None,
    columns: Columns | None,
) -> tuple[torch.Tensor, PassRead]:
    """Run layers of the same width, one after the other, over several columns.

    hidden: [R, n, D]. stores: two for each layer, as `PassRead`. around: of passes with attention. columns: of passes with the
    delta rule. Returns the outputs, [layers, R, n, D], and what was read.
    """
    hidden, (rows, width, size) = hidden.contiguous(), hidden.shape
    read = PassRead(layers, stores, columns, rows, width)
    made = hidden.new_empty(len(layers), rows, width, size)
    struct, _buffer = _pass(layers, hidden, stores, around, read.parents)
    own = ctypes.addressof(read.each), len(layers), ctypes.addressof(struct)
    given = _floats(hidden, rows * width * layers[0].hidden), ctypes.addressof(read.of_stores)
    require(loaded()[0].layers(*own, *given, ctypes.addressof(read.places), made.data_ptr()))
    return made, read


def read_text(
    layer: FloatLayer, hidden: torch.Tensor, stores: Sequence[torch.Tensor], around: native.NativePass | None
) -> torch.Tensor:
    """Run a layer over texts, [R, n, D], or over parts of them. stores: of attention, keys and values with room for them; else
    the states before, [R, C, K] and [R, H, dk, dv], which become those after. around: of attention. Returns [R, n, D]."""
    hidden = hidden.contiguous()
    made, each = torch.empty_like(hidden), (c_void_p * 1)(ctypes.addressof(layer.struct))
    of_stores = _of_stores([layer], stores, len(hidden))
    struct, _buffer = _pass([layer], hidden, stores, around, None)
    given = ctypes.addressof(each), 1, ctypes.addressof(struct), _floats(hidden, hidden.numel())
    require(loaded()[0].layers(*given, ctypes.addressof(of_stores), None, made.data_ptr()))
    return made


class FloatHead:
    """An MTP head with one layer. It uses copies of all weights.

    Args:
        fuse: of embedding and state.
        norms: what those of embedding, of state and at the end multiply by, [hidden], and their epsilons; None for no norm.
        layer: with attention.
    """

    def __init__(self, fuse: FloatProduct, norms: Sequence[tuple[torch.Tensor, float] | None], layer: FloatLayer):
        self.held, self.layer = (fuse, norms), layer
        addresses = (None if norm is None else _floats(norm[0], layer.hidden) for norm in norms)
        self.struct = MtpHead(fuse.struct, *addresses, *(0.0 if norm is None else norm[1] for norm in norms))

    def __call__(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        stores: Sequence[torch.Tensor],
        around: native.NativePass,
    ) -> torch.Tensor:
        """A step over several columns. embeddings, states: [R, n, D]. stores: keys and values. Returns states [R, n, D]."""
        embeddings, states = embeddings.contiguous(), states.contiguous()
        made = torch.empty_like(states)
        struct, _buffer = _pass([self.layer], states, stores, around, None, 4 * self.layer.hidden)
        of_stores = _of_stores([self.layer], stores, len(states))
        own = ctypes.addressof(self.struct), ctypes.addressof(self.layer.struct), ctypes.addressof(struct)
        columns = (_floats(part, states.shape[:-1].numel() * self.layer.hidden) for part in (embeddings, states))
        require(loaded()[0].step_of_states(*own, *columns, ctypes.addressof(of_stores), made.data_ptr()))
        return made


class TokenSteps:
    """Steps of an MTP head over columns of one row, with little around them: operations of torch would take longer.

    Args:
        head: the head.
        embeddings: of tokens, [V, hidden].
        angles: cosines and signed sines of all positions, [1, P, 1, head size].
        output: from states to logits.
    """

    dtype = torch.float32

    def __init__(
        self, head: FloatHead, embeddings: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], output: FloatProduct
    ):
        self.head, self.output, self.angles = head, output, tuple(part.contiguous() for part in angles)
        self.logits = output
        self.embeddings, self.positions = embeddings, angles[0].shape[1]
        self.table = _floats(embeddings, len(embeddings) * head.layer.hidden), len(embeddings)
        self.width = self.capacity = 0  # of the columns and slots that there are buffers for

    def __call__(
        self, ids: torch.Tensor, states: torch.Tensor, stores: Sequence[torch.Tensor], place: int, position: int
    ) -> torch.Tensor:
        """ids: [1, n] int64. states: [1, n, hidden]. stores: keys and values. place, position: the slot and the position of the
        first column, which sees all slots up to its own, as the others do. Returns states [1, n, hidden]."""
        ids, states, width = ids.contiguous(), states.contiguous(), ids.shape[1]
        made = torch.empty_like(states)
        self._begin(stores, width, place, position, self.head.layer.entries * width)
        given = pointer(ids, torch.int64, width), _floats(states, width * self.head.layer.hidden)
        wrong = loaded()[0].step_of_tokens(*self.structs, *self.table, *given, self.of_stores, made.data_ptr())
        require(wrong, ids, len(self.embeddings))
        return made

    def chain(
        self, state: torch.Tensor, stores: Sequence[torch.Tensor], place: int, position: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable tokens, one after the other. state: [1, hidden], after the text. stores: keys and values. place,
        position: of the first token. Returns `count` tokens, [1, count] int64, and their logits. The last one is not read."""
        state, numbers = state.clone(memory_format=_PLAIN), self.output.outputs
        tokens, best = state.new_empty(1, count, dtype=torch.int64), state.new_empty(1, count + numbers)
        self._begin(stores, 1, place, position, max(self.head.layer.entries, numbers * self.output.inputs))
        wrong = loaded()[0].greedy_chain(
            *(*self.structs, *self.table, ctypes.addressof(self.output.struct)),
            *(_floats(state, self.head.layer.hidden), self.of_stores, count, tokens.data_ptr()),
            *(best.data_ptr(), best.data_ptr() + count * best.itemsize),
        )
        require(wrong, tokens, len(self.embeddings))
        return tokens, best[:, :count]

    def _begin(self, stores: Sequence[torch.Tensor], width: int, place: int, position: int, products: int) -> None:
        """Set the structs of a step. products: of a number and a weight."""
        if width > self.width or stores[0].shape[2] > self.capacity:
            self._make_room(max(width, self.width), stores[0].shape[2])
        struct, size = self.struct, self.angles[0].shape[-1]
        struct.width, struct.places = width, offset(self.places, torch.int64, place, width)
        struct.threads = _threads(products)
        struct.cos, struct.sin = (offset(part, torch.float32, position * size, width * size) for part in self.angles)
        self.of_stores = _of_stores([self.head.layer], stores, 1)

    def _make_room(self, width: int, capacity: int) -> None:
        layer, threads = self.head.layer, torch.get_num_threads()
        self.width, self.capacity, self.places = width, capacity, torch.arange(capacity)
        numbers = width * (layer.numbers + 5 * layer.hidden)
        self.buffer = torch.empty(numbers + threads * capacity)
        self.struct = HybridPass(rows=1, angles=1, capacity=capacity, top=capacity, buffer=self.buffer.data_ptr())
        self.struct.scratch = self.buffer.data_ptr() + numbers * self.buffer.itemsize
        self.structs = tuple(map(ctypes.addressof, (self.head.struct, layer.struct, self.struct)))


def _pass(
    layers: Sequence[FloatLayer],
    hidden: torch.Tensor,
    stores: Sequence[torch.Tensor],
    around: native.NativePass | None,
    parents: torch.Tensor | None,
    more: int = 0,
) -> tuple[ctypes.Structure, torch.Tensor]:
    """The struct of a pass, and its buffer, which must outlive it. more: numbers of the buffer for a column. See `run`."""
    rows, width, _ = hidden.shape
    threads = _threads(max(layer.entries for layer in layers) * rows * width)
    top = 0 if around is None else around.most
    buffer = torch.empty(rows * width * (more + max(layer.numbers for layer in layers)) + threads * top)
    struct = HybridPass(rows, width, pointer(parents, torch.int64, rows * (width - 1)))
    if around is not None:
        for name in ("cos", "sin", "angles", "places", "first", "slots", "starts"):
            setattr(struct, name, getattr(around.struct, name))
        struct.capacity = next(stores[2 * at].shape[2] for at, layer in enumerate(layers) if layer.is_attention)
        around.require_room(struct.capacity)
    struct.threads, struct.buffer, struct.top = threads, buffer.data_ptr(), top
    struct.scratch = buffer.data_ptr() + (buffer.numel() - threads * top) * buffer.itemsize
    return struct, buffer


def _of_stores(layers: Sequence[FloatLayer], stores: Sequence[torch.Tensor], rows: int) -> Any:
    """The addresses of two tensors of each layer: keys and values, or states."""
    lengths = [size for at, layer in enumerate(layers) for size in layer.of_stores(rows, stores[2 * at].shape[2])]
    return pointers(stores, torch.float32, lengths)


def _floats(tensor: torch.Tensor | None, length: int) -> int | None:
    return pointer(tensor, torch.float32, length)


def _channels(shape: Any) -> int:
    """Of the convolution."""
    channels: int = 2 * shape.key_heads * shape.dk + shape.heads * shape.dv
    return channels


_WEIGHTS = "conv", "conv_bias", "a_log", "shift", "norm"


def _lengths(shape: Any) -> tuple[int, ...]:
    """Numbers of `_WEIGHTS`."""
    channels = _channels(shape)
    return shape.size * channels, channels, shape.heads, shape.heads, shape.dv


def _of_weights(weights: Sequence[torch.Tensor | None], shape: Any) -> list[int | None]:
    return list(map(_floats, weights, _lengths(shape)))


def _threads(products: int) -> int:
    return torch.get_num_threads() if products >= _SHARED else 1


def _in_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()
