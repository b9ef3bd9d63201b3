"""Times of a target's forward passes by number of tokens, and the share that reading weights from memory takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core.acceptance import top1
from ...core.host import now, timed
from ...engine.prepared import CallSettings
from ...engine.recurrent import slots_for, target_runner
from ...engine.verifiable import masks_of
from ...fast.fused import prepare
from ...fast.graphs import Graphs
from ...loading.quantization import memory_bytes

_COPIES = 8
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class PassTimes:
    """Times of forward passes after a context of one length, batch 1."""

    context: int  # tokens that were read before
    onednn: bool | None  # whether oneDNN computed products, if a CPU has the choice; else None
    seconds: dict[int, float]  # medians by number of tokens in a pass (its columns), with the argmax of the logits


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that a copy reads and writes: the slowest and the fastest of several copies."""

    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """A forward pass over one token, relative to the time that reading its weights from memory takes."""

    weight_bytes: int | None  # that a pass reads; None for a mixture of experts, where that depends on the tokens
    # of a copy. Reading alone is often faster, by up to a half; shares are uncertain by as much.
    bandwidth: Bandwidth
    seconds: float  # of a pass over one token

    @property
    def share(self) -> tuple[float, float] | None:
        """The share of the memory's speed that a pass reaches, by the fastest and the slowest copy. Above 1, caches help."""
        if self.weight_bytes is None:
            return None
        rate = self.weight_bytes / self.seconds
        return rate / self.bandwidth.high, rate / self.bandwidth.low


@torch.inference_mode()
def pass_times(
    target: PreTrainedModel,
    ids: torch.Tensor,
    context: int,
    columns: Sequence[int],
    repeats: int = 9,
    seconds: float = 10.0,
    onednn: bool | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> PassTimes:
    """Time forward passes of each width in turns, after one or more untimed turns.

    Args:
        target: a causal LM, run as `generate` of this package runs it.
        ids: [S] int64, text to read; it is repeated if it is too short.
        context: tokens read before.
        columns: the widths, ascending.
        repeats: timed turns, at most; after `seconds` no more begin, but at least one runs.
        onednn: switch it on or off meanwhile; None leaves it as it is.
        progress: called after each pass with the share that is done.
    """
    settings, widest = CallSettings("auto"), columns[-1]
    masks = masks_of(target, settings.trust_in(target))
    # recurrent states cannot undo a pass over one token: each turn leaves one more
    cache = slots_for(target, None, 1, context + widest + repeats + 3, masks)
    run = Graphs().serve(target_runner(prepare(target, settings), cache, masks), target, settings)
    uncounted = 1 if target.device.type == "cpu" else 3  # the first turns capture passes and compare them
    text = ids.to(target.device).repeat(-(-(context + widest) // len(ids)))[None]
    found: dict[int, list[float]] = {width: [] for width in columns}
    with nullcontext() if onednn is None else torch.backends.mkldnn.flags(enabled=onednn):
        run.prefill(text[:, :context], None)
        deadline = now() + seconds
        for repeat in range(repeats + uncounted):
            if repeat > uncounted and now() > deadline:
                break
            for number, width in enumerate(columns):
                started = now()
                top1(run(text[:, context : context + width])).tolist()  # waits for the device
                took = now() - started
                run.commit([1 if run.in_lockstep and width == 1 else 0])
                if repeat >= uncounted:
                    found[width].append(took)
                progress((repeat + (number + 1) / len(columns)) / (repeats + uncounted))
    settings.over = True
    return PassTimes(context, onednn, {width: median(taken) for width, taken in found.items()})


def bandwidth(device: torch.device) -> Bandwidth:
    """Bandwidth of the memory, by copies that are larger than caches; on a CPU, with as many threads as torch uses."""
    size = 2**27 if device.type == "cpu" else 2**29
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    _, *seconds = [timed(lambda: copy.copy_(source), device)[1] for _ in range(_COPIES + 1)]
    return Bandwidth(2 * size / max(seconds), 2 * size / min(seconds))


def memory(target: PreTrainedModel, seconds: float) -> Memory:
    """The memory of a target's device. seconds: of a forward pass over one token."""
    config: Any = target.config.get_text_config(decoder=True)
    read = None
    if not any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        words, output = target.get_input_embeddings().weight, target.get_output_embeddings()
        read = memory_bytes(target) - (0 if output is not None and output.weight is words else words.nbytes)
    return Memory(read, bandwidth(target.device), seconds)
