"""Medusa (2401.10774) and blockwise parallel decoding (1811.03115): several heads draft from the target's last hidden state.
Drafting needs no forward pass: all heads read the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
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
from ...lengths.cost_model import UNMEASURED, best_size
from ...lengths.rates import Rates
from ..shared.base import Call, Drafter, Drafting, HeadSpec, Room, Target, require_positive
from ..shared.heads import with_row
from ..shared.registry import register
from ..shared.tree_at_once import Blind, Worth, grow_at_once, reads, table_of
from ..shared.tree_growth import Limits
from ..shared.trees import best_paths, from_lists
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
        return "medusa_num_heads" in fields or fields.get("model_type") == "medusa"

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


class MedusaDrafting(Drafting):
    """The heads' guesses during one `generate`.

    If the last accepted token of a round is at position t, the target's own token at t + 1 is committed as well. Head h then
    predicts position t + 2 + h, which is depth h + 1 of the draft.
    """

    def __init__(self, drafter: MedusaDrafter, call: Call):
        self.call = call
        self.drafter = drafter
        self.rates = drafter.rates[call.distribution.do_sample]
        self.worth = drafter.worth[call.distribution.do_sample]
        self.blind: Blind | None = None  # the proposed tree, if the host has not seen it
        self.broken = False  # the last round had logits that are not a number
        self.text: Text | None = None
        # by row, then by head: the best tokens and their probabilities, until they are verified
        self.guesses: dict[int, list[tuple[list[int], list[float]]]] = {}
        # the target's hidden state of the last but one committed token of each row, [B, H]; None if it has read nothing
        (self.last,) = drafter.needs.states
        known = any(call.target.cache.lengths)
        self.states: torch.Tensor | None = call.states[self.last][:, -1] if known else None

    def renew(self, text: Text, row: int, call: Call) -> None:
        of_row = call.states[self.last][0, -1] if call.states else None
        self.states = with_row(self.states, row, of_row, text.rows)

    def propose(self, text: Text, budget: int) -> Draft:
        self.text = text
        known = self.call.target.cache.lengths
        if self.states is None or not all(known[row] for row in text.unfinished):  # as of prompts of one token
            return Draft.empty(text.rows, text.ids.device)
        if self.drafter.sizes_trees and self.call.target.masks.trees:
            return self._tree(text, budget, self.states)
        heads = self.drafter.heads
        logits = heads(self.states, self.drafter.target.get_output_embeddings(), budget)  # [D, B, V]
        tokens = heads.tokens(top1(logits)).T.to(text.ids.device)
        return Draft(tokens, torch.full_like(tokens[:, 0], tokens.shape[1]))

    def observe(self, round: Round) -> None:
        """Keep the hidden states of the committed tokens, whichever drafter proposed them, and judge the last guesses."""
        counts, path = round.kept, round.path
        if self.blind is not None:
            self._see(self.blind, round)
            self.blind = None  # later rounds may be drafted by others
        hidden = round.states[self.last]
        last = [max(count, 1) - 1 for count in counts]  # of ended rows, any
        if path is not None:
            last = [columns[index] for columns, index in zip(path, last, strict=True)]
        self.states = hidden[torch.arange(len(counts), device=hidden.device), on_device(last, hidden.device)]
        self._learn(counts)

    def _see(self, blind: Blind, round: Round) -> None:
        """Take over the guesses of a tree that was drafted without a look at them."""
        grown, read = blind.grown(round), reads(blind.limits)
        self.worth.see(grown.worth())
        firsts = [sum(read[:level]) for level in range(len(read))]
        for row in round.unfinished:
            offered = grown.offers[row]
            blocks = [list(offered.below.values())[place] for place in firsts]
            self.guesses[row] = [(offered.tokens[start : start + len(sure)], sure) for start, sure in blocks]
            if math.isnan(blocks[0][1][0]):
                self.broken = True

    def _learn(self, counts: list[int]) -> None:
        """Compare each head whose earlier heads were right with the committed token. counts: committed tokens of each row."""
        if self.text is None or not self.guesses:
            return
        new = self.text.since([length - count for length, count in zip(self.text.lengths, counts, strict=True)])
        outcomes = []
        for row, guesses in self.guesses.items():
            for head, ((guessed, sure), token) in enumerate(zip(guesses, new[row], strict=False)):
                right = [guess == token for guess in guessed]
                outcomes.append((sure, head, right))
                if not any(right):
                    break
        if outcomes:
            self.rates.learn(outcomes)
        self.guesses = {}

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
        drafter, spec, growing = self.drafter, self.drafter.spec, text.unfinished
        if self.broken:
            raise FloatingPointError("the heads' logits are not a number")
        most = spec.nodes or (NODES_CPU if states.device.type == "cpu" else NODES)
        candidates = min(spec.candidates, drafter.heads.vocab_size or self.call.vocab_size)
        depth = min(budget, drafter.heads.heads)
        limits = Limits(depth, most, candidates, most, 0, by_level=True)
        if (draft := self._tree_at_once(text, limits, states)) is not None:
            return draft
        best = self._best(budget, states)
        half, table = best.shape[-1] // 2, best.tolist()
        sure = [[of_row[:half] for of_row in of_head] for of_head in table]
        tokens = [[list(map(int, of_row[half:])) for of_row in of_head] for of_head in table]
        trees = [best_paths([], 0)] * text.rows
        for row in growing:
            if math.isnan(sure[0][row][0]):
                raise FloatingPointError("the heads' logits are not a number")
            self.guesses[row] = [(t[row], s[row]) for t, s in zip(tokens, sure, strict=True)]
            trees[row] = best_paths([self.rates.at(of_head[row], head) for head, of_head in enumerate(sure)], most)
        worth = [sum(of_rows) / len(growing) for of_rows in zip_longest(*(t.worth for t in trees), fillvalue=0.0)]
        self.worth.see(worth)
        costs = self.call.length.costs or UNMEASURED
        count = spec.nodes or best_size(worth, lambda nodes: costs.draft + costs.verify_seconds(nodes + 1))[0]
        trees = [tree.cut(count) for tree in trees]
        chosen = [
            [tokens[depth - 1][row][rank] for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
            for row, tree in enumerate(trees)
        ]
        return from_lists(chosen, [tree.parents for tree in trees], text.ids.device, sum(worth[:count]))
