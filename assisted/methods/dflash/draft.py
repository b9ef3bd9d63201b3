"""DFlash (2602.06036), DSpark (DeepSpec) and DFlash2: a trained drafter predicts a block of tokens in one forward pass, whose
context is the target's hidden states. What is kept between rounds and calls is as with EAGLE heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core.drafts import Draft
from ...core.text import Text
from ...engine.needs import Needs
from ...engine.prepared import PreparedModule
from ...engine.trust import Trust
from ..eagle.draft import EagleDrafter, EagleDrafting, WindowOptions
from ..shared.base import Call, HeadSpec, Room, Target
from ..shared.heads import StateHead
from ..shared.registry import register
from ..shared.tree_growth import Growing, Limits
from .formats import is_block, load_block, require_block, save_block
from .head import BlockHead
from .runner import Block, BlockRunner


@register("dflash")
@dataclass(frozen=True)
class DFlash(WindowOptions):
    """A trained block drafter (DFlash, DSpark or DFlash2) drafts a block in one forward pass: `"dflash:DIR"`.

    The draft length policy chooses how many of the block's tokens are verified; none is drafted past the block.

    Args:
        path: folder, `zoo:` name or Hub id of a checkpoint trained for this target, in the format of z-lab, DeepSpec, SpecForge
            or speculators; or a `BlockHead`.
        tree: True drafts token trees of the best tokens of each row if the target can verify them. False drafts chains. None
            (default) drafts trees for greedy decoding and chains for sampling.
        top_k: candidates after each node. None (default) is 10 on an accelerator and 4 on a CPU.
        nodes: a fixed tree size. By default it is chosen by measured cost, at most 60 nodes on an accelerator and 16 on a CPU.
        min_confidence: DSpark: a draft ends before the first token whose predicted acceptance rate is lower, from 0 to 1. 0
            (default) leaves the length to the draft length policy.
        draft_window: as for `DraftModel`; the context that the block attends to.
    """

    title = "Block drafters"
    acceptance = (0.4, 0.75)
    not_served = (
        "serving engines read the published files of block drafters themselves, so there is nothing to hand over"
    )
    training = "assisted.methods.dflash.train:BlockTraining"

    path: str | BlockHead
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence: {self.min_confidence} is not a rate; give a number from 0 to 1")

    def memory(self, room: Room) -> dict[str, int]:
        """That of its weights, and of the context's keys and values in each of its layers."""
        if not isinstance(self.path, str):
            return {}
        config = require_block(self.path, room.target)
        kept = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return HeadSpec.memory(self, room) | {
            "keys and values": room.within(self.draft_window) * room.dtype.itemsize * kept
        }

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        return is_block(fields, folder)

    def read_head(self, target: Target, model: PreTrainedModel, **kwargs: Any) -> StateHead:
        assert isinstance(self.path, str)
        return load_block(self.path, model, **kwargs)

    def drafter(self, head: Any, needs: Needs) -> EagleDrafter:
        if self.min_confidence > 0 and not head.config.confidence:
            raise ValueError("min_confidence: this block drafter has no confidence head; leave it out")
        return BlockDrafter(self, head, needs)


class BlockDrafter(EagleDrafter):
    """A loaded block drafter, which is not changed."""

    spec: DFlash

    def fused(self, head: Any, trusted: Trust) -> PreparedModule:
        """The drafter unchanged."""
        return PreparedModule(head)

    def save(self, folder: Path) -> None:
        save_block(self.head, folder)

    def start(self, call: Call) -> BlockDrafting:
        return BlockDrafting(self, call)


class BlockDrafting(EagleDrafting):
    """As that of an EAGLE or MTP head, but column s holds the target's feature of token s alone, and the whole draft comes from
    one forward pass over the block after the text.
    """

    drafter: BlockDrafter
    runner_type = BlockRunner
    suspicion = (
        "the first token that the block drafter drafts is hardly ever accepted: it may be of another target, or its rows may "
        "predict another position than its config says (sample_from_anchor)"
    )

    def runs_again(self, position: int) -> bool:
        """Further tokens of the block cost nothing."""
        return True

    def forwards(self, grown: Growing) -> int:
        return 1

    def _block(self, runner: Any, text: Text, states: torch.Tensor, count: int) -> Block:
        """The first `count` tokens of the block."""
        states = states[:, : runner.head.config.first_row + count]
        return Block(runner, states, text.last_tokens(), self.drafter.spec.min_confidence)

    def _tree(self, runner: Any, text: Text, state: torch.Tensor, depth: int) -> Draft:
        """A tree of the best tokens of each row of the block, given the tokens before."""
        drafter = self.drafter
        depth, most = min(depth, drafter.head.config.drafts), drafter.most
        limits = Limits(depth, most, drafter.top_k, most, depth * most)
        block = self._block(runner, text, state, depth)
        return self.best_tree(block, block.logits(), text, limits)

    def _chain(self, runner: Any, text: Text, state: torch.Tensor, budget: int) -> Draft:
        budget = min(budget, self.drafter.head.config.drafts)
        block, device = self._block(runner, text, state, budget), text.ids.device
        sure: list[torch.Tensor] = []

        def read(tokens: torch.Tensor) -> torch.Tensor:
            logits = block.over_all(block.chain(len(sure), tokens)).to(device)
            sure.append(block.sure.to(device))
            return logits

        first = read(text.last_tokens())
        draft = self.draft_chain(text, budget, first, read)
        if self.drafter.spec.min_confidence > 0:
            # whether a token is drafted depends on those before it alone
            draft = replace(draft, lengths=draft.lengths.minimum(torch.cat(sure, 1).cumprod(1).sum(1)))
        return draft
