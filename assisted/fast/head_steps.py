"""Heads of one layer in C, of EAGLE-3 and MTP: steps over the columns of one row, and the token trees that grow from them.
Operations of torch would take longer than the head. `HeadSteps` places the columns of a call. Knows tensors and the library of
`native`; nothing of drafting."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_double
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.cache import SlotCache
from ..engine.hooks import any_touched
from . import native
from .layers import FusedLayer
from .native import NativeLayer, NativeNorm, NativeProduct
from .structs import TREE_NODES, Head, Norm, Pass, Product, Tree, offset, pointer, require


@dataclass(frozen=True)
class Shape:
    """The limits of a tree, and how its candidates are judged.

    Args:
        limits: its depth, the columns of a step, the candidates after each, the best ones that are kept, and all columns.
        base, slope, edges, ranks: the rate of a candidate by its probability and its rank, see `lengths.rates.Rates`.
    """

    limits: tuple[int, int, int, int, int]
    base: Sequence[float]
    slope: Sequence[float]
    edges: Sequence[float]
    ranks: int


class NativeHead:
    """A head in C.

    Args:
        layer: its layer. Without `join`, its product of queries, keys and values takes embedding and state together.
        norms: of embedding, of state and at the end; None for no norm.
        output: from states to logits.
        embeddings: of the target's tokens, [any, hidden].
        tokens: [Vd] int64, the target's tokens that can be drafted; None for all.
        vocabulary: Vd.
        angles: cosines and signed sines of all positions, [1, P, 1, head size].
        normed_residual, normed_output: as `EagleConfig.norm_before_residual` and `norm_output`.
        join: from embedding and state, side by side, to what the layer reads.
        fuse: from features, the target's hidden states side by side, to states; None if `fuse` is not used.
        tap_norms: weights of the norm of each of these, none if they are not normed.
        tap_epsilon: of these norms.

    All of one dtype, on a CPU.
    """

    def __init__(
        self,
        layer: NativeLayer,
        norms: Sequence[NativeNorm | None],
        output: NativeProduct,
        embeddings: torch.Tensor,
        tokens: torch.Tensor | None,
        vocabulary: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        normed_residual: bool,
        normed_output: bool,
        join: NativeProduct | None = None,
        fuse: NativeProduct | None = None,
        tap_norms: Sequence[torch.Tensor] = (),
        tap_epsilon: float = 0.0,
    ):
        self.layer, self.output, self.vocabulary = layer, output, vocabulary
        self.held = embeddings.contiguous(), tokens, norms, join
        self.angles, self.positions = tuple(part.contiguous() for part in angles), angles[0].shape[1]
        self.rows, self.hidden = embeddings.shape
        self.dtype, self.library = layer.dtype, layer.library
        self.sizes = layer.sizes[0], max(layer.sizes[1], 0 if join is None else join.inputs)
        self.struct = Head(
            *(layer.struct, output.struct, pointer(self.held[0], self.dtype, self.rows * self.hidden)),
            *(Norm() if norm is None else norm.struct for norm in norms),
            Product() if join is None else join.struct,
            *(pointer(tokens, torch.int64, vocabulary), self.rows, vocabulary, normed_residual, normed_output),
        )
        self.of_features, self.tap_norms = fuse, torch.cat([*tap_norms]) if tap_norms else None
        if fuse is not None:
            self.struct.fuse, self.struct.taps = fuse.struct, max(1, len(tap_norms))
            self.struct.tap_norms, self.struct.tap_epsilon = (
                pointer(self.tap_norms, self.dtype, fuse.inputs),
                tap_epsilon,
            )
        self.address = ctypes.addressof(self.struct)
        self.room = 0, 0  # columns and slots that there are buffers for

    def __call__(
        self, ids: torch.Tensor, states: torch.Tensor, stores: Sequence[torch.Tensor], place: int, position: int
    ) -> torch.Tensor:
        """ids: [1, n] int64. states: [1, n, hidden]. stores: keys and values. place, position: the slot and the position of the
        first column, which sees all slots up to its own, as the others do. Returns states [1, n, hidden]."""
        ids, states, width = ids.contiguous(), states.contiguous(), ids.shape[1]
        made, room = torch.empty_like(states), states.new_empty(3 * width, self.hidden)
        capacity = stores[0].shape[2]
        struct = self._pass(width, capacity, position)
        struct.places = offset(self.places, torch.int64, place, width)
        given = pointer(ids, torch.int64, width), pointer(states, self.dtype, width * self.hidden), *self._slots(stores)
        own = self.address, ctypes.addressof(struct)
        require(self.library.step_of_head(*own, *given, capacity, room.data_ptr(), made.data_ptr()), ids, self.rows)
        return made

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., Vd]."""
        made = self._product(self.library.logits_of_head, self.output, states)
        return made[..., : self.vocabulary]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """As `EagleHead.fuse`, [..., F] -> [..., hidden], of a head that was made with `fuse`."""
        assert self.of_features is not None
        return self._product(self.library.fuse_features, self.of_features, features)

    def _product(self, run: Any, product: NativeProduct, given: torch.Tensor) -> torch.Tensor:
        columns, threads = given.reshape(-1, given.shape[-1]).contiguous(), torch.get_num_threads()
        made, room = columns.new_empty(len(columns), product.outputs), torch.empty_like(columns)
        scratch = torch.empty(threads * self._of_thread(len(columns), product))
        parts = (part.data_ptr() for part in (room, made, scratch))
        run(self.address, pointer(columns, self.dtype, len(columns) * product.inputs), len(columns), *parts, threads)
        return made.view(*given.shape[:-1], -1)

    def tree(
        self, state: torch.Tensor, stores: Sequence[torch.Tensor], place: int, position: int, shape: Shape
    ) -> TreeInC:
        """A tree that has not grown. state: [1, hidden], after the text. stores: keys and values. place, position: of the first
        node."""
        return TreeInC(self, state, stores, place, position, shape)

    def chain(
        self, state: torch.Tensor, stores: Sequence[torch.Tensor], place: int, position: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable tokens, one after the other. As `tree`. Returns `count` tokens, [1, count] int64, and their
        probabilities. The last one is not read."""
        tree = self.tree(state, stores, place, position, Shape((count, 1, 1, count, count), (0.0,), (1.0,), (), 1))
        while not (broken := math.isnan(tree.read())) and tree.add():
            pass
        tokens, sure, found = tree.nodes[:1, :count], tree.sure[None, :count], tree.struct.found
        tokens[:, found:], sure[:, found:] = 0, math.nan if broken else -math.inf  # the draft ends before these
        return tokens, sure

    def _of_thread(self, columns: int, product: NativeProduct) -> int:
        """Numbers that a product needs of its inputs, for each thread."""
        return columns * (product.inputs // native.GROUP) * self.library.of_group

    def _slots(self, stores: Sequence[torch.Tensor]) -> list[int | None]:
        """The addresses of keys and values."""
        layer, capacity = self.layer.struct, stores[0].shape[2]
        return [pointer(store, self.dtype, layer.key_heads * capacity * layer.head_size) for store in stores]

    def _pass(self, width: int, capacity: int, position: int) -> ctypes.Structure:
        """The struct of a step over so many columns at most, from a position on."""
        if width > self.room[0] or capacity > self.room[1]:
            self._make_room(max(width, self.room[0]), max(capacity, self.room[1]))
        struct, size = self.columns, self.angles[0].shape[-1]
        struct.rows = struct.angles = 1
        struct.width, struct.first, struct.slots, struct.starts = width, 0, None, None
        struct.cos, struct.sin = (offset(part, self.dtype, position * size, width * size) for part in self.angles)
        return struct

    def _make_room(self, width: int, capacity: int) -> None:
        self.room, self.places = (width, capacity), torch.arange(capacity)
        threads = torch.get_num_threads()
        of_thread = native.of_thread(self.library, self.sizes[1], width, capacity + 3 * native.TILE)
        self.buffers = torch.empty(width * self.sizes[0], dtype=self.dtype), torch.empty(threads * of_thread)
        self.columns = Pass(threads=threads, at_once=width, of_thread=of_thread)
        self.columns.buffer, self.columns.scratch = (part.data_ptr() for part in self.buffers)


class TreeInC:
    """A token tree of one row that grows level by level. See `NativeHead.tree`."""

    def __init__(
        self,
        head: NativeHead,
        state: torch.Tensor,
        stores: Sequence[torch.Tensor],
        place: int,
        position: int,
        shape: Shape,
    ):
        depth, beam, candidates, nodes, room = shape.limits
        self.candidates = candidates = min(candidates, head.vocabulary)
        size, capacity, most = head.hidden, stores[0].shape[2], candidates * (1 + room)
        self.head, self.stores, self.capacity = head, stores, capacity
        self.nodes = torch.empty(len(TREE_NODES), most, dtype=torch.int64)
        self.scores, self.sure = torch.empty(most, dtype=torch.float64), torch.empty(most)
        self.best = torch.empty(nodes + 1, dtype=torch.int64)
        numbers = state.new_empty(6 * beam * size + beam * head.output.outputs + 2 * beam * head.angles[0].shape[-1])
        numbers[:size] = state[0]
        indices = torch.empty(beam * (place + depth + 5) + 1, dtype=torch.int64)
        rates = [(c_double * len(part))(*part) for part in (shape.base, shape.slope, shape.edges)]
        scratch = torch.empty(torch.get_num_threads() * head._of_thread(beam, head.output))
        self.held = numbers, indices, scratch

        def laid_out(buffer: torch.Tensor, *sizes: int) -> list[int]:
            """The addresses of parts of a buffer."""
            ends = [buffer.data_ptr()]
            for length in sizes:
                ends.append(ends[-1] + length * buffer.itemsize)
            return ends

        states, before, space, logits, angles = laid_out(
            numbers, beam * size, beam * size, 4 * beam * size, beam * head.output.outputs
        )
        ids, places, starts, reading, slots = laid_out(indices, beam, beam, beam + 1, beam)
        self.struct = Tree(
            *(depth, beam, candidates, nodes, room),
            *rates,
            shape.ranks,
            len(shape.edges) + 1,
            *(row.data_ptr() for row in self.nodes),
            *(part.data_ptr() for part in (self.scores, self.sure, self.best)),
            reading,
            known=place,
            states=states,
            before=before,
            space=space,
            logits=logits,
            angles=angles,
            ids=ids,
            places=places,
            slots=slots,
            starts=starts,
            scratch=scratch.data_ptr(),
        )
        self.address, self.columns = ctypes.addressof(self.struct), head._pass(beam, capacity, position)

    def read(self) -> float:
        """Read a level, at first none, and find the candidates after its nodes. Returns the probability of the best one
        after the best node, which is NaN if a logit is."""
        head, columns = self.head, ctypes.addressof(self.columns)
        slots = head._slots(self.stores)
        sure: float = head.library.read_level(head.address, columns, self.address, *slots, self.capacity)
        return sure

    def add(self) -> int:
        """Add these candidates. Returns how many nodes can be read next."""
        width: int = self.head.library.add_level(self.head.address, self.address)
        return width

    def found(self) -> dict[str, Any]:
        """The nodes as lists: the fields of `tree_growth.Offers`."""
        count = self.struct.found
        tokens, parents, depths, _, children = self.nodes[:, :count].tolist()
        scores, sure = self.scores[:count].tolist(), self.sure[:count].tolist()
        firsts = ({-1: 0} if count else {}) | {node: first for node, first in enumerate(children) if first >= 0}
        return {
            "tokens": tokens,
            "parents": parents,
            "depths": depths,
            "scores": scores,
            "best": self.best[: self.struct.kept].tolist(),
            "below": {node: (first, sure[first : first + self.candidates]) for node, first in firsts.items()},
        }


NO_TABLE = "the target's input embedding is not a plain table of the head's dtype and vocabulary"


class HeadSteps:
    """The steps of a head in C, in one text of a call. layer: the fused one."""

    def __init__(self, layer: FusedLayer, steps: NativeHead):
        self.layer, self.steps, self.logits = layer, steps, steps.logits

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
        where = self._place(state[:, None], cache, first, shape.limits[-1])
        return None if where is None else self.steps.tree(state, *where, shape)

    def fuse(self, features: torch.Tensor) -> torch.Tensor | None:
        """As `Head.fuse`; None if that does not run in C."""
        if self.steps.of_features is not None and self._fits(features, ()):
            return self.steps.fuse(features)
        return None

    def _fits(self, states: torch.Tensor, stores: Sequence[torch.Tensor]) -> bool:
        """Whether columns can run in C."""
        fit = all(store.dtype == self.steps.dtype and store.is_contiguous() for store in stores)
        few = states.shape[1] <= native.AT_ONCE and not torch.compiler.is_compiling()
        return states.dtype == self.steps.dtype and states.is_cpu and fit and few

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


def embeddings_in_c(own: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of an embedding that C can look up; None for others."""
    if type(own) is not nn.Embedding or own.max_norm is not None or any_touched([own]):
        return None
    weight = own.weight.detach()
    return weight if weight.is_cpu and weight.dtype == dtype and weight.is_contiguous() else None
