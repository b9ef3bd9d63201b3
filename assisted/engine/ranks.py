"""The processes among which a model's weights are divided: tensor or expert parallel, as transformers loads it under torchrun.

A forward pass of such a model waits for all processes. So they must draft, verify and stop alike: otherwise they wait for each
other forever, or mix different texts. Knows torch.distributed and numbers; nothing of drafts or models' forwards.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from ..core.host import is_out_of_memory


class Ranks:
    """A group of processes that run the same call on parts of the same weights. Every process calls every method, in the same
    order. A single process exchanges nothing.

    Args:
        group: of torch.distributed; None for a single process.
        device: where tensors are exchanged.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: str = "cpu"):
        self.group, self.device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)
        self.several = self.size > 1
        self.is_first = not self.several or dist.get_rank(group) == 0

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over all processes. The seconds of a step are those of the slowest process."""
        if not self.several:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
        return shared.tolist()

    def agree(self, *facts: int) -> list[bool]:
        """Whether all processes have the same value of each fact, an integer below 2^53."""
        if not self.several:
            return [True] * len(facts)
        found = self.largest([*facts, *(-fact for fact in facts)])
        return [high == -low for high, low in zip(found[: len(facts)], found[len(facts) :], strict=True)]

    def first(self, value: Any) -> Any:
        """The value of the first process. Anything that can be pickled."""
        if not self.several:
            return value
        shared = [value]
        dist.broadcast_object_list(shared, group=self.group, device=torch.device(self.device), group_src=0)
        return shared[0]

    def share_generator(self, device: torch.device) -> bool:
        """Give all processes the state of the first one's default generator of this device. Returns whether they differed."""
        if not self.several:
            return False
        if device.type == "cpu":
            state = torch.get_rng_state()
        else:
            state = torch.get_device_module(device).get_rng_state(device)
        if all(self.agree(zlib.crc32(state.numpy().tobytes()))):
            return False
        state = self.first(state)
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
        return True

    def may_go_on(self, error: Exception) -> bool:
        """Whether this process may go on after an error in its share of the work. All processes raise other errors alike; but
        if one of them runs out of memory, the others wait for it in the middle of a forward pass."""
        return not (self.several and is_out_of_memory(error))


ALONE = Ranks()


def ranks_of(*models: nn.Module) -> Ranks:
    """The processes that hold parts of these models' weights.

    Raises ValueError if the processes form more than one dimension, where some of them work on other texts.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    from torch.distributed.tensor import DTensor  # takes long to import

    weights = (weight for model in models for weight in model.parameters())
    mesh = next((weight.device_mesh for weight in weights if isinstance(weight, DTensor)), None)
    if mesh is None:
        return ALONE
    if mesh.ndim != 1:
        raise ValueError(
            f"target: its weights are divided among processes in {mesh.ndim} dimensions ({mesh.mesh_dim_names}); drafting "
            "supports one, tensor parallel or expert parallel"
        )
    return Ranks(mesh.get_group(), mesh.device_type)


def fingerprint(*values: Any) -> int:
    """A number for `Ranks.agree` that stands for numbers and lists of numbers."""
    return zlib.crc32(repr(values).encode())


def waits_for_others(model: nn.Module) -> bool:
    """Whether each forward pass waits for processes with other texts: fully sharded data parallel, DeepSpeed's ZeRO-3."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return is_fsdp_managed_module(model) or is_deepspeed_zero3_enabled()
