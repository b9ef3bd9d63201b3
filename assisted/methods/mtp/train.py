"""Training multi-token-prediction heads (arXiv 2412.19437) for a target without one: one layer, unrolled over its own states as
in FastMTP (arXiv 2509.18362), or several layers in turn. Knows heads; the loss is that of `HeadTraining`, steps and files are
the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..shared.training.heads import HeadTraining
from ..shared.training.losses import Loss, require_known
from ..shared.training.method import require_positive, setting
from .formats import common_names, written_names
from .head import MTPHead, SequentialMTP, first_tensors, save_mtp


@dataclass(frozen=True)
class MTPSettings:
    """How the head is trained. Its shape is the target's."""

    _argument_group_name = "the head"

    layers: int = setting(
        1,
        "layers, each of which drafts one token in turn, and the last one also those after; N times the weights, and about the "
        "same time per step. Try one layer first",
        metavar="N",
    )
    unroll: int = setting(
        3,
        "drafted tokens that are trained; each costs as much as the first. With several layers, at least one each",
        metavar="N",
    )
    decay: float = setting(0.6, "unrolled step i has the weight decay**i in the loss")
    loss: Loss = setting("kl+tv", "divergence from the target's distribution")
    positions: int = setting(5, "drafted positions at which held-out acceptance is measured", metavar="N")

    def __post_init__(self) -> None:
        require_positive(self, "layers", "unroll", "positions")
        require_known(self.loss)
        if self.unroll < self.layers:
            raise ValueError(f"unroll: {self.unroll} is less than the {self.layers} layers, each of which needs a step")


class MTPTraining(HeadTraining):
    """An MTP head for a frozen target. Each layer starts from the target's last one with full attention and its final norm.

    Args:
        target: never changed. Its embedding and output embedding are the head's.
        settings: of the head.
        compiled: compile the target's layers and the head's.

    Raises ValueError for a target whose layers cannot serve, or whose norms have no place in a checkpoint of a head.
    """

    name = "mtp"
    options = MTPSettings
    student: MTPHead | SequentialMTP

    def __init__(self, target: PreTrainedModel, settings: MTPSettings, compiled: bool = False):
        config = target.config.get_text_config(decoder=True)
        names = written_names(config)
        common = {"fc" if part == "fuse" else part for part in common_names(config)}
        first = {n: t for n, t in first_tensors(target).items() if n in names or n.startswith("layer.")}
        if lacking := sorted(names - first.keys()):
            raise ValueError(f"target: its norms have no weights, and no format of MTP heads lacks {lacking[0]}")
        heads = []
        for index in range(settings.layers):
            copied = {name: tensor.to(torch.float32, copy=True) for name, tensor in first.items()}
            heads.append(MTPHead(target, copied, index))
            for part in common:
                setattr(heads[index], part, getattr(heads[0], part))
        self.student = head = heads[0] if len(heads) == 1 else SequentialMTP(heads)
        head.require_runs()
        super().__init__(settings, target, head.config.taps, compiled)
        self.layers = [part for head in heads for part in (head.fc, head.layer)]
        if compiled:
            for head in heads:
                head.layer.compile()

    def save(self, folder: Path) -> None:
        save_mtp(self.student, folder)

    def in_turn(self) -> Sequence[Any]:
        return [*self.student.layers] if isinstance(self.student, SequentialMTP) else [self.student]
