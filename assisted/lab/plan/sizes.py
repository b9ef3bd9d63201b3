"""Bytes that a pair takes on a device, part by part, and how fast it should be, from shapes alone.

Uses the same rules as loading, the slots and the fast path. Of the parts, weights, keys and values, copies and logits are
counted; activations and libraries are estimates that were fitted to measured peaks (docs/howto/plan.md). Reading the weights
takes a pass's time, and acceptance says how many passes are saved. Speeds are ranges, because acceptance depends on the text
and passes reach only a share of the bandwidth. `assisted doctor` measures both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...calls.costs import numbers_read
from ...engine.passes import WIDTHS, slots_for
from ...engine.recurrent import slots_for as slots_of
from ...engine.recurrent import target_runner
from ...engine.verifiable import expected_masks
from ...engine.window import most_slots
from ...fast.fused import copy_bytes
from ...fast.products import copied_in
from ...lengths.cost_model import best_speedup
from ...loading.quantization import stored_bytes
from ...methods.shared.base import Room, Spec
from .shapes import Shapes

MIB = 2**20
# Of a CPU measured by benchmarks/run.py plan, of a GPU by benchmarks/run.py gpu on an H100.
_LIBRARIES = {"cpu": 30 * MIB, "cuda": 768 * MIB}  # code and workspaces that a first call loads
_FAST = {"cpu": 42 * MIB, "cuda": 64 * MIB}  # of the fast path besides copies: tables, kernels, workspaces of captures
_TAKEN = {"cpu": 0.6, "cuda": 1.0}  # activations of a layer that exist at once
_MASK = {"cpu": 27, "cuda": 0}  # bytes of the prompt's mask and of what it is made from, for each pair of tokens
_GRAPHS = 12  # captured shapes of a call; an assumption


@dataclass(frozen=True)
class Part:
    """One part of the memory."""

    name: str
    bytes: int
    counted: bool = True  # from shapes; otherwise it is estimated


@dataclass(frozen=True)
class Use:
    """How a pair is used."""

    context: int = 8192  # tokens of prompt and answer together
    rows: int = 1  # sequences at once
    drafted: int = 16  # tokens of the longest draft
    dtype: torch.dtype | None = None  # in which the models compute; None takes the target's own
    device: str = "cuda"  # or "cpu"
    quantization: str | None = None  # of the target, a name of `loading.quantization.NAMES`; None keeps the weights
    draft_quantization: str | None = None  # the same for a draft model
    fast: bool = True  # False counts no copies and no captured passes, as `fast="eager"`
    fp8: bool = True  # the device multiplies in FP8

    def __post_init__(self) -> None:
        for name in ("context", "rows", "drafted"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: {value!r} is not a number of 1 or more")
        if self.device not in _LIBRARIES:
            raise ValueError(f"device: {self.device!r} is not known; use {' or '.join(_LIBRARIES)}")


def parts(target: Shapes, spec: Spec, use: Use, draft: Shapes | None = None, memory: int | None = None) -> list[Part]:
    """What a call takes at its peak.

    target: in its checkpoint's dtype unless `use` names another. spec: of the draft. draft: its shapes, if the spec is a draft
    model. memory: bytes of the device; limits what may be copied on a CPU. Raises ValueError for a quantization that is unknown
    or that no layer fits, and for trained heads of another target.
    """
    dtype = use.dtype or target.model.dtype
    found = [Part("target: weights", weight_bytes(target, use, use.quantization, dtype))]
    states = _of_states(target, use, dtype.itemsize) | {"recurrent states": recurrent_bytes(target, use, verified=True)}
    found += [Part(f"target: {name}", size) for name, size in states.items() if size]
    found += _of_draft(target, spec, draft, use, dtype)
    if use.fast and use.device == "cpu" and use.quantization is None and still_quantized(target, use) is None:
        copies = copy_bytes(target.model, dtype, memory)
        found += [Part("copies of weights for fast products", copies)] if copies else []
    words = target.config.vocab_size
    # scores of the target and, where q is used, of the draft, in float32, and what processors make of them
    found.append(Part("logits of a pass", 3 * 4 * use.rows * (use.drafted + 1) * words))
    # a prompt that fills the context: one layer's activations, and the mask where attention needs one
    computed = (copied_in(dtype) or dtype) if use.device == "cpu" else dtype
    layer = int(_TAKEN[use.device] * use.rows * use.context * _per_token(target, computed))
    found.append(Part("activations of the prompt", layer + _MASK[use.device] * use.context**2, False))
    if use.fast and use.device == "cuda":
        found.append(Part("captured passes", _GRAPHS * use.rows * WIDTHS[4] * _per_token(target, dtype), False))
    found.append(Part("libraries", _LIBRARIES[use.device] + (_FAST[use.device] if use.fast else 0), False))
    return found


def still_quantized(shapes: Shapes, use: Use) -> str | None:
    """The quantization of a loaded model. transformers (5.23) unpacks MXFP4 on a CPU, and FP8 on any device without products in
    FP8: the model is then an ordinary one."""
    on_cpu = use.device == "cpu"
    unpacked = {"mxfp4": on_cpu, "fp8": on_cpu or not use.fp8}.get(shapes.quantized or "", False)
    return None if unpacked else shapes.quantized


def is_unpacked(shapes: Shapes, use: Use) -> bool:
    """Whether the weights of a quantized checkpoint take what those of an ordinary one take. compressed-tensors (0.20) unpacks
    them in the first forward pass, on every device, in modules of its own."""
    return shapes.quantized is not None and still_quantized(shapes, use) in (None, "compressed-tensors")


def weight_bytes(shapes: Shapes, use: Use, quantization: str | None, dtype: torch.dtype) -> int:
    """Bytes of a model's weights. Those of a quantized checkpoint stay as they are stored, or are unpacked. Raises ValueError
    for a quantization of a model that is quantized already."""
    if shapes.quantized is not None and quantization is not None:
        raise ValueError(
            f"quantization: {shapes.name!r} is quantized already ({shapes.quantized}); leave quantization out"
        )
    if shapes.stored is not None and shapes.quantized is not None and not is_unpacked(shapes, use):
        return shapes.stored
    return stored_bytes(shapes.model, quantization, dtype)


def _widest(use: Use, window: int | None = None) -> int:
    """Slots of each row: on a GPU rounded up, as captured passes read few numbers of slots. window: of a draft."""
    needed = most_slots(window, use.context + use.drafted)
    return slots_for(needed + WIDTHS[-1]) if use.fast and use.device == "cuda" else needed


def recurrent_bytes(shapes: Shapes, use: Use, verified: bool) -> int:
    """Bytes of a model's recurrent states: of a draft model with the copy that it returns to; of a target (`verified`) with
    what verifying the longest draft takes besides: a copy, or what layers keep of each column. A forward pass of the engine
    without data shows it."""
    copied, model = 2 * use.rows * shapes.states.fixed, shapes.model
    if not verified or not copied:
        return copied
    masks = expected_masks(model, use.fast)
    ids = torch.zeros(use.rows, 1 + use.drafted, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            cache = slots_of(model, None, use.rows, 2 * ids.shape[1], masks)
            runner = target_runner(model, cache, masks)
            runner.prefill(ids, None)
            runner(ids)
            runner.commit([ids.shape[1]] * use.rows)
        return cache.state_bytes
    except Exception:  # models whose code reads values
        return copied


def _of_states(shapes: Shapes, use: Use, itemsize: int, window: int | None = None) -> dict[str, int]:
    """Keys and values, and the recurrent states of a draft model."""
    keys = use.rows * _widest(use, window) * itemsize * sum(shapes.states.per_token)
    sizes = {"keys and values": keys, "recurrent states": recurrent_bytes(shapes, use, verified=False)}
    return {name: size for name, size in sizes.items() if size}


def _of_draft(target: Shapes, spec: Spec, draft: Shapes | None, use: Use, dtype: torch.dtype) -> list[Part]:

    def of_model(quantization: Any, window: int | None = None) -> dict[str, int]:
        if draft is None:
            return {}
        if window is not None and draft.states.fixed:
            raise ValueError(
                f"draft_window: {window} is not possible, as this draft has recurrent states; leave it out"
            )
        how = use.draft_quantization or (quantization if isinstance(quantization, str) else None)
        found = {"weights": weight_bytes(draft, use, how, dtype), **_of_states(draft, use, dtype.itemsize, window)}
        if use.fast and use.device == "cpu" and how is None and still_quantized(draft, use) is None:
            found["copies of weights"] = copy_bytes(draft.model, dtype, None)
        return found

    def within(window: int | None) -> int:
        return use.rows * _widest(use, window)

    per_token, states = target.states.per_token, use.rows * target.states.fixed
    room = Room(target.model, dtype, within(None), per_token, of_model, within, target.path, states)
    return [Part(f"draft: {name}", size) for one in spec.parts() for name, size in one.memory(room).items() if size]


def _per_token(target: Shapes, dtype: torch.dtype) -> int:
    config = target.config
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    heads = max(target.states.per_token, default=2 * config.hidden_size)
    return int(dtype.itemsize * (4 * config.hidden_size + 3 * inner + 3 * heads))


_LONGEST = 15
_LEAST_COST = 0.01  # of a target pass, for a draft that reads no weights
_LAUNCH = 0.03  # of a target pass, for the layers of a draft whose weights are read in no time
_WIDER = (0.005, 0.04)  # of a pass, for each further position that it verifies
_LAYER = (300e-6, 30e-6)  # seconds of a layer at least, launched op by op and captured in a graph; an assumption
_LOOP = 0.97  # the controller switches drafts off that do not pay, and this is what finding out costs


@dataclass(frozen=True)
class Speed:
    """A prediction, low and high."""

    plain: tuple[float, float]  # tokens per second without drafts
    times: tuple[float, float]  # speedup by drafts


def predict(
    target: Shapes,
    spec: Spec,
    weights: int,
    drafts: int,
    states: int,
    bandwidth: tuple[float, float],
    offloaded: int = 0,
    bus: tuple[float, float] = (1.0, 1.0),
    draft_layers: int = 0,
) -> Speed:
    """The speed of one row.

    weights, drafts, states: bytes of the target's weights, of the draft's, and of the keys and values at half of the context.
    bandwidth: bytes per second. offloaded: bytes of the weights that cross the bus in each pass, and the bus's bandwidth.
    draft_layers: that a draft's pass runs.
    """
    reads = [read_per_pass(target, weights, 1 + length) + states for length in range(_LONGEST + 1)]

    def taken(side: int) -> list[float]:
        """Seconds of a pass by draft length. Of offloaded layers, all experts cross the bus: they are one tensor."""
        least = target.layers * _LAYER[side]
        return [max(least, max(0, read - offloaded) / bandwidth[side] + offloaded / bus[side]) for read in reads]

    def speedup(side: int, cost: float, wider: float) -> float:
        """At the best draft length. wider: what each further position adds to reading the weights."""
        acceptance = max(one.acceptance[side] for one in spec.parts())
        passes = [took / seconds[side][0] + (0.0 if offloaded else wider) * n for n, took in enumerate(seconds[side])]
        return best_speedup(acceptance, cost, range(len(passes)), passes.__getitem__)

    seconds = taken(0), taken(1)
    draft_share = max(draft_layers * _LAYER[1], drafts / bandwidth[1]) / seconds[1][0]
    cost = draft_share + (_LAUNCH if drafts else _LEAST_COST) * (0.2 if offloaded else 1)
    slow, fast = speedup(0, 1.5 * cost, _WIDER[1]), speedup(1, cost, _WIDER[0])
    return Speed((1 / seconds[0][0], 1 / seconds[1][0]), (max(_LOOP, slow), max(1.0, fast)))


def read_per_pass(target: Shapes, weights: int, positions: int = 1) -> int:
    """Bytes of the weights that a pass reads: not an untied embedding, and of experts only those that are expected to be chosen
    by one of the positions."""
    return int(weights * (numbers_read(target.model, positions) / target.numbers))
