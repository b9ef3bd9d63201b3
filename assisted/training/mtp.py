"""Training multi-token-prediction heads (arXiv 2412.19437) for a target without one, as FastMTP does (arXiv 2509.18362): one
layer, unrolled over its own states. Knows heads; the loss is that of `HeadTraining`, steps and files are the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..heads.mtp import MTPHead, first_tensors, save_mtp
from ..heads.mtp_formats import written_names
from .heads import HeadTraining
from .losses import Loss, require_known
from .method import Method, Start
from .plan import require_positive, setting


@dataclass(frozen=True)
class MTPSettings:
    """How the head is trained. Its shape is the target's."""

    _argument_group_name = "the head"

    unroll: int = setting(
        3, "steps in which the head reads its own states in training; each costs as much as the first", metavar="N"
    )
    decay: float = setting(0.6, "unrolled step i has the weight decay**i in the loss")
    loss: Loss = setting("kl+tv", "divergence from the target's distribution")
    positions: int = setting(5, "drafted positions at which held-out acceptance is measured", metavar="N")

    def __post_init__(self) -> None:
        require_positive(self, "unroll", "positions")
        require_known(self.loss)


class MTPTraining(HeadTraining):
    """An MTP head for a frozen target. It starts from the target's last layer with full attention and its final norm.

    Args:
        target: never changed. Its embedding and output embedding are the head's.
        settings: of the head.
        compiled: compile the target's layers and the head's.

    Raises ValueError for a target whose layers cannot serve, or whose norms have no place in a checkpoint of a head.
    """

    name = "mtp"
    options = MTPSettings
    student: MTPHead

    def __init__(self, target: PreTrainedModel, settings: MTPSettings, compiled: bool = False):
        names = written_names(target.config.get_text_config(decoder=True))
        tensors = {
            name: tensor.to(torch.float32, copy=True)
            for name, tensor in first_tensors(target).items()
            if name in names or name.startswith("layer.")
        }
        if lacking := sorted(names - tensors.keys()):
            raise ValueError(f"target: its norms have no weights, and no format of MTP heads lacks {lacking[0]}")
        self.student = head = MTPHead(target, tensors)
        head.require_runs()
        super().__init__(settings, target, head.config.taps, compiled)
        self.layers = (head.fc, head.layer)
        if compiled:
            head.layer.compile()

    @classmethod
    def make(cls, settings: MTPSettings, start: Start) -> Method:
        return cls(start.target, settings, start.compiled)

    def save(self, folder: Path) -> None:
        save_mtp(self.student, folder)
