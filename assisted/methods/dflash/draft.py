"""DFlash (2602.06036), DSpark (DeepSpec) and DFlash2: a trained drafter predicts a block of tokens in one forward pass, whose
context is the target's hidden states. What is kept between rounds and calls is as with EAGLE heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...core.drafts import Draft
from ...core.host import filled, on_device
from ...core.text import Text
from ...engine.needs import Needs
from ...engine.passes import Inputs
from ...engine.prepared import PreparedModule
from ...engine.trust import Trust
from ..eagle.draft import EagleDrafter, EagleDrafting, WindowOptions
from ..shared.base import Call, HeadSpec, Room, Target
from ..shared.heads import StateHead
from ..shared.registry import register
from ..shared.runner import HeadRunner
from ..shared.tree_growth import Growing, Limits, NodeReader
from ..shared.trees import Rows
from .formats import is_block, load_block, require_block, save_block
from .head import BlockHead


class BlockRunner(HeadRunner):
    """A block drafter with its slots. Slot s holds the target's state of token s, whatever was drafted for it. Args: as for
    `HeadRunner`."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.prepared = replace(self.prepared, inject=None)  # a block begins with tokens alone

    def read(self, tokens: Tensor, states: Tensor, counts: Sequence[int]) -> Tensor:
        """Keep the context of committed text, `counts[b]` columns of row b, and draft the block after it.

        tokens: [B, n] int64, of the columns after: the last one of each row is the anchor. states: [B, n, H], from
        `BlockHead.fuse`. Rows with fewer columns are padded on the right. Returns the block's final states, [B, block_size, H],
        zeros for rows that don't run.
        """
        cache, width = self.cache, states.shape[1]
        columns = torch.arange(width, device=self.device)
        if cache.layers:
            cache.place(width, self.device)
            positions = cache.ends(self.device) + columns + cache.of_running(self.first)
            self.head.remember(cache.of_running(states), positions.clamp(min=0), cache)
            cache.commit(list(counts))
        else:
            # rows that have ended may have moved to the end already
            self.head.remember(states[cache.order], (columns + self.first[cache.order]).clamp(min=0), cache)
            cache.begin_rounds()
            cache.rewind(list(counts))
        last = on_device([max(count - 1, 0) for count in counts], tokens.device)
        anchors = tokens.gather(1, last[:, None])
        return self.passes.run(self, self.head.block_ids(anchors), None, None)

    def eager(self, ids: Tensor, draft: Draft | None = None, used: list[int] | None = None) -> Tensor:
        """The pass over a block itself. ids: [B, block_size] int64."""
        cache, ids = self.cache, self.cache.of_running(ids)
        cache.place(ids.shape[1], self.device)
        slots, known = torch.arange(cache.top, device=self.device), cache.ends(self.device)
        seen = cache.hide_padding(slots < known + ids.shape[1])
        return cache.spread(self._block(ids, known, seen, slots, cache.of_running(self.first)))

    def static_forward(self, inputs: Inputs) -> Tensor:
        ids, known, first, _, visible = inputs
        block, top = self.head.config.block_size, visible.shape[1]
        self.cache.place_at(known, block, top)
        slots = torch.arange(top, device=self.device)
        seen = ((slots < known) & visible) | ((slots >= known) & (slots < known + block))
        # a captured pass may have more columns, which no row of the block may see
        made = self._block(ids[:, :block], known, seen, slots, first - known)
        return F.pad(made, (0, 0, 0, ids.shape[1] - block))

    def _block(self, ids: Tensor, known: Tensor, seen: Tensor, slots: Tensor, first: Tensor) -> Tensor:
        """ids: [R, n]. known, first: [R, 1], valid slots and the position of slot 0. seen: [R, top] bool. slots: [top]."""
        own = known + torch.arange(ids.shape[1], device=self.device)
        rows, masks = self.head.embed_block(ids, self.target), self.head.masks(seen[:, None], slots - own[:, :, None])
        return self.head(rows, (own + first).clamp(min=0), masks, self.cache)


class Block(NodeReader):
    """What a drafted block predicts, given the tokens before. It needs no further forward pass of the drafter's layers.

    Args:
        runner: whose head it is.
        states: [B, block_size, H], as the runner returned them.
        anchors: [B, 1] int64, the last committed tokens.
        least: the lowest confidence at which a token is drafted; 0 ignores the confidence.
    """

    def __init__(self, runner: BlockRunner, states: Tensor, anchors: Tensor, least: float = 0.0):
        super().__init__(len(states))
        self.head, self.least = runner.head, least
        self.states = states[:, self.head.config.first_row :]
        self.base = runner.logits(self.states)
        self.vocabulary = None if self.head.d2t is None else self.head.draft_tokens
        anchors = anchors.to(self.states.device)
        self._logits, self._memory = self._after(torch.zeros_like(anchors), anchors, None)

    def _after(self, places: Tensor, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The logits of drafted tokens, [B, n, Vd], and the head's memory: see `BlockHead.after`. `sure` is [B, n] bool: which
        of them are to be drafted, which does not depend on the tokens themselves.

        places: [B, n] int64, which tokens of the draft. tokens: [B, n], the one before each.
        """
        states, base = (
            of_all.gather(1, places[:, :, None].expand(-1, -1, of_all.shape[-1])) for of_all in (self.states, self.base)
        )
        self.sure = torch.ones_like(tokens, dtype=torch.bool)
        if self.least > 0:
            self.sure = torch.sigmoid(self.head.confidence(tokens, states)) >= self.least
        return self.head.after(tokens, states, base, memory)

    def logits(self) -> Tensor:
        """[B, 1, Vd], of the first drafted token; minus infinity if it is not to be drafted."""
        return self._logits.masked_fill(~self.sure[:, :, None], float("-inf"))

    def over_all(self, logits: Tensor) -> Tensor:
        return self.head.over_all(logits)

    def read(self, tokens: Rows, parents: Rows, depths: Rows) -> Tensor:
        tokens, parents, depths = filled(tokens), filled(parents, -1), filled(depths, 1)
        read, above, places = on_device([tokens, parents, depths], self.states.device).unbind()
        memory = self._memory
        if memory is not None:  # that of the root, then of the columns
            memory = memory.gather(1, (above + 1)[:, :, None].expand(-1, -1, memory.shape[-1]))
        logits, memory = self._after(places, read, memory)
        if self._memory is not None and memory is not None:
            self._memory = torch.cat([self._memory, memory], 1)
        self.add(tokens, parents)
        return logits.masked_fill(~self.sure[:, :, None], float("-inf"))

    def chain(self, place: int, tokens: Tensor) -> Tensor:
        """[B, Vd], of the drafted token `place`, after those of the chain. tokens: [B, 1], the one before."""
        if place > 0:
            tokens = tokens.to(self.states.device)
            self._logits, self._memory = self._after(torch.full_like(tokens, place), tokens, self._memory)
        return self._logits[:, 0]


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
