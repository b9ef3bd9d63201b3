"""MTP (2412.19437, 2509.18362): the multi-token-prediction head of the target's own checkpoint drafts. Slots, chains and trees
are those of EAGLE heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...engine.needs import Needs
from ..eagle.draft import EagleDrafter, EagleDrafting, WindowOptions
from ..shared.base import Call, Room, Spec, Target
from ..shared.heads import StateHead
from ..shared.registry import register
from . import fused as mtp_fused  # noqa: F401  (registers the fused forms)
from .formats import is_mtp, stored_mtp
from .head import MTPHead, SequentialMTP, load_mtp, save_mtp


@register("mtp")
@dataclass(frozen=True)
class MTP(WindowOptions):
    """The multi-token-prediction head that was trained with the target drafts: `"mtp"`, or `"mtp:DIR"`, or `"mtp:FILE.gguf"`.

    If a checkpoint has several such layers, each drafts one token in turn, and the last one also those after.

    Args:
        path: folder, GGUF file or Hub id of a checkpoint with the head, for a target whose own has lost it, as quantized ones
            often have; or an `MTPHead` or `SequentialMTP`. None (default) is the checkpoint that the target was loaded from.
        tree, top_k, nodes, draft_window: as for `Eagle`.
    """

    title = "MTP heads"
    trained = False  # it comes with the target
    acceptance = (0.5, 0.85)
    not_served = "engines read MTP layers from the target's own checkpoint, so there is nothing to hand over"
    training = "assisted.methods.mtp.train:MTPTraining"

    path: str | MTPHead | SequentialMTP | None = None

    @classmethod
    def named(cls, rest: str) -> Spec:
        """The spec for `"mtp"` or `"mtp:DIR"`."""
        return cls(rest or None)

    def memory(self, room: Room) -> dict[str, int]:
        """That of all layers, by the headers of the checkpoint. Raises ValueError if these lack any."""
        path, layers, numbers = self.path or room.path, 1, _numbers(room.target)
        if isinstance(path, str):
            layers, numbers = stored_mtp(path, room.target.config.get_text_config(decoder=True))
        elif path is not None:
            layers = len(path.layers) if isinstance(path, SequentialMTP) else 1
            numbers = sum(tensor.numel() for tensor in path.state_dict().values())
        each = {name: layers * size for name, size in super().memory(room).items()}
        return {self.title: numbers * room.dtype.itemsize} | each

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        return is_mtp(fields, folder)

    def read_head(self, target: Target, model: PreTrainedModel, **kwargs: Any) -> StateHead:
        path = self.path or target.path
        if not isinstance(path, str):
            raise ValueError(
                "draft: 'mtp' reads the head of the target's checkpoint, and this target was not loaded from one; write "
                "'mtp:DIR' with the folder or Hub id of a checkpoint that has the head"
            )
        return load_mtp(path, model, **kwargs)

    def drafter(self, head: Any, needs: Needs) -> EagleDrafter:
        head.require_runs()
        return MTPDrafter(self, head, needs)


class MTPDrafter(EagleDrafter):
    """A loaded head, which is not changed."""

    def save(self, folder: Path) -> None:
        save_mtp(self.head, folder)

    def start(self, call: Call) -> MTPDrafting:
        return MTPDrafting(self, call)


class MTPDrafting(EagleDrafting):
    """As an EAGLE head's. The report warns of a head that is hardly ever right, as a wrongly read one would be."""

    suspicion = (
        "the first token that the MTP head drafts is hardly ever accepted: the head may be of another checkpoint, or "
        "its norms may have been shifted twice when it was converted"
    )


def _numbers(target: PreTrainedModel) -> int:
    """How many numbers a head has: those of the target's last layer, of a fusion and of three norms."""
    config = target.config.get_text_config(decoder=True)
    lists = (
        part for part in target.modules() if isinstance(part, nn.ModuleList) and len(part) == config.num_hidden_layers
    )
    layer = next(lists, [nn.Module()])[-1]
    return sum(p.numel() for p in layer.parameters()) + 2 * config.hidden_size**2 + 3 * config.hidden_size
