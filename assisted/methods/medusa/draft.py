"""Medusa (2401.10774) and blockwise parallel decoding (1811.03115): several heads draft from the target's last hidden state.
Drafting needs no forward pass: all heads read the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...core.acceptance import top1
from ...core.drafts import Draft, Round
from ...core.host import on_device
from ...core.text import Text
from ...engine.needs import Needs
from ...engine.parts import device_of, unwrapped
from ...engine.traits import Traits, require_verifiable_cache
from ...lengths.rates import Rates
from ..eagle.draft import HeadDrafting
from ..shared.base import Call, Drafter, HeadSpec, Room, Target, require_positive
from ..shared.heads import with_row
from ..shared.registry import register
from ..shared.tree_at_once import Blind, Worth, grow_at_once, table_of
from ..shared.tree_growth import ROOT, Growing, Limits, Offers
from .head import MedusaHeads, output_size, require_medusa

NODES_CPU, NODES = 24, 64


@register("medusa")
@dataclass(frozen=True)
class Medusa(HeadSpec):
    """Trained heads draft a token tree from the target's last hidden state: `"medusa:DIR"`.

    Args:
        path: folder, `zoo:` name or Hub id of heads trained for this target, in any of Medusa's formats; or `MedusaHeads`.
        tree: True (default) drafts a tree of several candidates per head. False drafts the top-1 token of each head, a chain
            of the policy's draft length (blockwise parallel decoding, 1811.03115), for large batches, where every drafted
            token adds to the cost of verification. Targets that cannot verify trees get chains.
        candidates: candidates of each head that the tree may use, at least 1.
        nodes: a fixed tree size, at least 1. By default it is chosen by measured cost, at most 64 nodes on an accelerator and
            24 on a CPU.
    """

    title = "Medusa heads"
    trained = trees = True
    acceptance = (0.45, 0.7)
    served_as = "medusa"
    training = "assisted.methods.medusa.train:MedusaTraining"

    path: str | MedusaHeads
    tree: bool = True
    candidates: int = 8
    nodes: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "candidates", "nodes")

    def memory(self, room: Room) -> dict[str, int]:
        if not isinstance(self.path, str):
            return {}
        return {self.title: require_medusa(self.path, room.target) * room.dtype.itemsize}

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        of_modelopt = isinstance(fields.get("medusa"), dict)
        return of_modelopt or "medusa_num_heads" in fields or fields.get("model_type") == "medusa"

    def load(self, target: Target, **kwargs: Any) -> MedusaDrafter:
        """Load the heads and locate the hidden states that they read. kwargs: dtype, Hub arguments.

        Raises ValueError for invalid heads, for a target that they do not fit, and for a target whose hidden states cannot be
        read.
        """
        model = unwrapped(target.model)
        require_verifiable_cache(model)
        try:
            needs = Needs.of_states(model, -1)
        except Exception as error:
            raise ValueError(f"draft: Medusa heads cannot be used with this target: {error}") from error
        size, hidden_size = output_size(model)
        heads = self.path
        if isinstance(heads, str):
            device = device_of(model.get_output_embeddings())  # that of the last hidden states
            heads = MedusaHeads.load(heads, model, **kwargs).to(device, kwargs.get("dtype", model.dtype))
        if heads.hidden_size != hidden_size or (heads.token_map is None and heads.vocab_size not in (0, size)):
            raise ValueError(
                f"draft: these heads have hidden size {heads.hidden_size} and vocabulary size {heads.vocab_size}, the target "
                f"{hidden_size} and {size}; heads work only with the model that they were trained for"
            )
        return MedusaDrafter(self, heads.eval(), model, needs)


class MedusaDrafter(Drafter):
    """Loaded heads, which are not changed, and statistics of how often they are right. They may share the target's output
    embedding, and read its last hidden state."""

    def __init__(self, spec: Medusa, heads: MedusaHeads, target: PreTrainedModel, needs: Needs):
        self.spec, self.heads, self.target, self.needs = spec, heads, target, needs
        self.rates = {do_sample: Rates(heads.heads) for do_sample in (False, True)}
        self.worth = {do_sample: Worth() for do_sample in (False, True)}  # of trees
        self.drafts = self.accepted = 0  # drafts, and those whose first token was accepted

    @property
    def sizes_trees(self) -> bool:
        """Whether drafts are trees: requested by the spec, and the target can verify them."""
        return self.spec.tree and Traits.of(self.target).masks.trees

    reads_prompt = False  # heads read the last state alone

    @property
    def modules(self) -> list[nn.Module]:
        return [self.heads]

    def save(self, folder: Path) -> None:
        """Save the heads in a format that the spec reads."""
        plain = self.heads.token_map is None and self.heads.bias is not None
        self.heads.save(folder, "medusa" if plain else "vllm", self.target)

    def start(self, call: Call) -> MedusaDrafting:
        return MedusaDrafting(self, call)


class MedusaDrafting(HeadDrafting):
    """The heads' guesses during one `generate`.

    If the last accepted token of a round is at position t, the target's own token at t + 1 is committed as well. Head h then
    predicts position t + 2 + h, which is depth h + 1 of the draft.
    """

    drafter: MedusaDrafter

    def __init__(self, drafter: MedusaDrafter, call: Call):
        super().__init__(drafter, call)
        # the target's hidden state of the last but one committed token of each row, [B, H]; None if it has read nothing
        (self.last,) = drafter.needs.states
        known = any(call.target.cache.lengths)
        self.states: torch.Tensor | None = call.states[self.last][:, -1] if known else None

    def renew(self, text: Text, row: int, call: Call) -> None:
        of_row = call.states[self.last][0, -1] if call.states else None
        self.states = with_row(self.states, row, of_row, text.rows)

    def _draft(self, text: Text, budget: int) -> Draft:
        assert self.states is not None  # where the target has read nothing, nothing is drafted
        if self.trees:
            return self._tree(text, budget, self.states)
        heads = self.drafter.heads
        logits = heads(self.states, self.drafter.target.get_output_embeddings(), budget)  # [D, B, V]
        tokens = heads.tokens(top1(logits)).T.to(text.ids.device)
        return Draft(tokens, torch.full_like(tokens[:, 0], tokens.shape[1]))

    def observe(self, round: Round) -> None:
        """Keep the hidden states of the committed tokens, whichever drafter proposed them, and judge the last guesses."""
        counts, path = round.kept, round.path
        hidden = round.states[self.last]
        last = [max(count, 1) - 1 for count in counts]  # of ended rows, any
        if path is not None:
            last = [columns[index] for columns, index in zip(path, last, strict=True)]
        self.states = hidden[torch.arange(len(counts), device=hidden.device), on_device(last, hidden.device)]
        self.learn(round)

    def _best(self, budget: int, states: torch.Tensor) -> torch.Tensor:
        """The best tokens of the first `budget` heads after states [B, H]: probabilities and ids, [D, B, 2 k] float64."""
        heads = self.drafter.heads
        logits = heads(states, self.drafter.target.get_output_embeddings(), budget).float()  # [D, B, V]
        best, columns = logits.softmax(-1).topk(min(self.drafter.spec.candidates, logits.shape[-1]))
        return torch.cat([best.double(), heads.tokens(columns).double()], -1)

    def _tree_at_once(self, text: Text, limits: Limits, states: torch.Tensor) -> Draft | None:
        """`_tree` in one captured function. Its size is chosen by what the last trees were worth."""
        spec, rates, length = self.drafter.spec, self.rates, self.call.length
        if not self.worth.recent or states.device != text.ids.device:
            return None

        def run(given: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
            levels = iter(self._best(limits.depth, given))  # the same after every node of a level

            def read(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
                return next(levels)[:, None].expand(-1, tokens.shape[1], -1)

            return grow_at_once(limits, rates.ranks, lambda best: best, table, next(levels), read)

        weights = tuple(weight.data_ptr() for weight in self.drafter.heads.parameters())
        table = table_of(rates, text.ids.device).to(text.ids.device, non_blocking=True)
        found = self.call.target.compute(("medusa", limits, weights), run, states, table)
        if found is None:
            return None
        nodes = spec.nodes or self.worth.size(limits.nodes, 1, length.costs)
        self.blind, draft = Blind.drafted(found[0].clone(), limits, text, nodes, sum(self.worth.recent[:nodes]))
        return draft

    def _tree(self, text: Text, budget: int, states: torch.Tensor) -> Draft:
        """A tree of the most probable paths for each unfinished row, of a worthwhile size and at most `budget` levels."""
        drafter, spec = self.drafter, self.drafter.spec
        most = spec.nodes or (NODES_CPU if states.device.type == "cpu" else NODES)
        candidates = min(spec.candidates, drafter.heads.vocab_size or self.call.vocab_size)
        limits = Limits(min(budget, drafter.heads.heads), most, candidates, most, 0, by_level=True)
        if (draft := self._tree_at_once(text, limits, states)) is not None:
            return draft
        levels = self._best(limits.depth, states).tolist()
        if any(math.isnan(levels[0][row][0]) for row in text.unfinished):
            raise FloatingPointError("the heads' logits are not a number")
        grown = Growing(text, [Offers() for _ in text.ended], [], [[ROOT] for _ in text.ended])
        for level, of_rows in enumerate(levels):
            for row in text.unfinished:
                offered, half = grown.offers[row], len(of_rows[row]) // 2
                sure, tokens = of_rows[row][:half], list(map(int, of_rows[row][half:]))
                first, rates = len(offered.tokens), self.rates.at(sure, level)
                for node in grown.reading[row]:  # after all of these, a head's guesses are the same
                    offered.add(node, tokens, sure, rates)
                offered.keep(most, first)
                grown.reading[row] = offered.unread(limits.depth, most, first)
        return self.best_of(grown, most)
