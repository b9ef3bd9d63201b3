"""EAGLE (2401.15077, 2406.16858, 2503.01840): a trained head drafts from the target's hidden states, in KV slots of its own.
For committed tokens these hold the result of true features; what it computes for drafted tokens is removed after every round.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ...core.drafts import Draft, Round
from ...core.host import on_device, padded
from ...core.text import Text, tokens_from
from ...engine.cache import SlotCache
from ...engine.kept import Entries
from ...engine.needs import Needs
from ...engine.parts import device_of, few_ids, find_layers, unwrapped
from ...engine.prepared import PreparedModule
from ...engine.recurrent import slots_for, target_runner
from ...engine.session import can_go_on, go_on
from ...engine.traits import Traits, require_verifiable_cache
from ...engine.trust import Trust
from ...engine.window import holds_end_of
from ...fast.fused import prepare
from ...fast.graphs import Graphs
from ...fast.sources import Source
from ...lengths.cost_model import UNMEASURED, best_size
from ...lengths.rates import Rates
from ..shared.base import Call, Drafter, HeadSpec, Room, Target, require_positive
from ..shared.chain import ChainDrafting
from ..shared.heads import Head, StateHead
from ..shared.registry import register
from ..shared.runner import HeadRunner, LevelReader
from ..shared.tree_at_once import Blind, Worth, grow_at_once, table_of
from ..shared.tree_growth import ROOT, Growing, Limits, NodeReader, grow, grow_in_c, learn, shape_of
from .formats import is_eagle, load_eagle, require_eagle, save_eagle
from .fused import fused_head, source_of
from .head import EagleHead

TOP_K_CPU, TOP_K = 4, 10
NODES_CPU, NODES = 16, 60
Unread = tuple[torch.Tensor, torch.Tensor, list[int]]
"""Columns of committed text that the head has not read: tokens, [B, n] int64, features, [B, n, F], and their number by row."""
ENOUGH, FEW = 200, 0.02  # drafts, and the share of accepted first tokens below which something is wrong with a head


@dataclass(frozen=True)
class EagleOptions(HeadSpec):
    """The options of heads that draft from the target's hidden states, and then from their own."""

    trained = trees = has_q = True

    path: Any
    tree: bool | None = None
    top_k: int | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "top_k", "nodes")

    def load(self, target: Target, **kwargs: Any) -> EagleDrafter:
        """Load the head and locate the hidden states that it reads. kwargs: dtype, device_map, Hub arguments.

        Raises ValueError for an invalid checkpoint, for a target that it does not fit, and for a target whose hidden states
        cannot be read.
        """
        model = unwrapped(target.model)
        require_verifiable_cache(model)
        head = self.path
        if not isinstance(head, StateHead):
            head = self.read_head(target, model, **kwargs)
            output = model.get_output_embeddings()
            head.to(device_of(model if output is None else output), model.dtype)
        return self.drafter(head, needs_of(head, model))

    def read_head(self, target: Target, model: PreTrainedModel, **kwargs: Any) -> StateHead:
        """The head at `path`. model: the target's, without an adapter's wrapper."""
        raise NotImplementedError

    def drafter(self, head: Any, needs: Needs) -> EagleDrafter:
        """The drafter of a loaded head. needs: see `needs_of`."""
        return EagleDrafter(self, head, needs)


@dataclass(frozen=True)
class WindowOptions(EagleOptions):
    """The options of those that keep keys and values of their own."""

    draft_window: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "draft_window")

    def memory(self, room: Room) -> dict[str, int]:
        """That of the head's keys and values."""
        if not room.per_token:
            return {}
        return {"keys and values": room.within(self.draft_window) * room.dtype.itemsize * room.per_token[-1]}


@register("eagle")
@dataclass(frozen=True)
class Eagle(WindowOptions):
    """A trained EAGLE head drafts: `"eagle:DIR"`. The checkpoint determines whether it is EAGLE-1, EAGLE-3 or P-EAGLE, which
    drafts chains in one forward pass.

    Args:
        path: folder, `zoo:` name or Hub id of a checkpoint trained for this target, in the format of EAGLE's authors, of
            SpecForge or of speculators; or an `EagleHead`.
        tree: True drafts token trees (EAGLE-2) if the target can verify them. False drafts chains, for large batches, where
            every drafted token adds to the cost of verification. None (default) drafts trees for greedy decoding and chains
            for sampling: a sampled chain with q has about as many accepted tokens as a tree of several times its size, whose
            nodes must match the target's own sample.
        top_k: nodes of each level that the head reads, and candidates after each. None (default) is 10 on an accelerator, as
            in the paper, and 4 on a CPU. The draft length limits the depth.
        nodes: a fixed tree size. By default it is chosen by measured cost, at most 60 nodes on an accelerator and 16 on a CPU.
        draft_window: as for `DraftModel`.
    """

    title = "EAGLE heads"
    acceptance = (0.55, 0.85)
    served_as = "eagle3"
    training = "assisted.methods.eagle.train:EagleTraining"

    path: str | EagleHead

    def memory(self, room: Room) -> dict[str, int]:
        if isinstance(self.path, str):
            require_eagle(self.path, room.target)
        return HeadSpec.memory(self, room) | super().memory(room)

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        return is_eagle(fields, folder)

    def read_head(self, target: Target, model: PreTrainedModel, **kwargs: Any) -> StateHead:
        assert isinstance(self.path, str)
        return load_eagle(self.path, model, **kwargs)

    def drafter(self, head: Any, needs: Needs) -> EagleDrafter:
        if self.tree and head.config.mask_token_id is not None:
            raise ValueError("tree: True is not possible, as a P-EAGLE head drafts chains; leave tree out")
        return super().drafter(head, needs)


class EagleDrafter(Drafter):
    """A loaded head, which is not changed, and statistics of how often it is right. needs: see `needs_of`."""

    head: Any

    def __init__(self, spec: EagleOptions, head: StateHead, needs: Needs):
        self.spec, self.head, self.needs = spec, head, needs
        self.window = spec.draft_window if isinstance(spec, WindowOptions) else None
        self.graphs = Graphs()
        self.rates = {do_sample: Rates() for do_sample in (False, True)}
        self.worth = {do_sample: Worth() for do_sample in (False, True)}  # of trees
        self.why_not_in_c: str | None = None  # of the steps of the last call that has drafted
        self.drafts = self.accepted = 0  # drafts, and those whose first token was accepted
        self._fused: tuple[Source, PreparedModule] | None = None
        self._table: torch.Tensor | None = None  # of `table_on`

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached fused head: a copy creates its own."""
        return {**self.__dict__, "_fused": None}

    def capture_ahead(self, rows: int, longest: int) -> None:
        self.graphs.ahead(rows, longest)

    @property
    def top_k(self) -> int:
        """Nodes of each level that the head reads."""
        return self.spec.top_k or (TOP_K_CPU if self.head.device.type == "cpu" else TOP_K)

    @property
    def most(self) -> int:
        """Maximum number of nodes in a tree."""
        return self.spec.nodes or (NODES_CPU if self.head.device.type == "cpu" else NODES)

    def table_on(self, device: torch.device, rates: Rates) -> torch.Tensor:
        """`table_of` some rates, at the same address in every round."""
        table = table_of(rates, device)
        if self._table is None or self._table.device != device:
            with torch.inference_mode(False):
                self._table = torch.empty_like(table, device=device)
        return self._table.copy_(table, non_blocking=True)

    def fused(self, head: Any, trusted: Trust) -> PreparedModule:
        """The head in fewer operations, created anew if its weights have changed."""
        if not trusted.is_own:
            return PreparedModule(head)
        source = source_of(head)
        if self._fused is None or not self._fused[0].same(source):
            self._fused = source, fused_head(head)
        return self._fused[1]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.head]

    def save(self, folder: Path) -> None:
        """Save the head in a format that the spec reads."""
        save_eagle(self.head, folder)

    def start(self, call: Call) -> HeadDrafting:
        return EagleDrafting(self, call)


class HeadDrafting(ChainDrafting):
    """Chains, or trees of a worthwhile size."""

    suspicion = ""  # what the report says of a head that is hardly ever right; nothing by default
    proposed: Draft | None = None  # until it is verified

    def __init__(self, drafter: Any, call: Call):
        super().__init__(call)
        self.drafter = drafter
        wanted = not call.distribution.do_sample if drafter.spec.tree is None else drafter.spec.tree
        self.trees = wanted and call.target.masks.trees
        self.rates = drafter.rates[call.distribution.do_sample]
        self.grown: Growing | None = None  # the proposed tree, until it is verified
        self.blind: Blind | None = None  # the same of one that the host has not seen yet
        self.worth = drafter.worth[call.distribution.do_sample]

    def limits(self, depth: int) -> Limits:
        """Those of a tree that grows level by level: the head reads the best `top_k` nodes of each."""
        top_k = self.drafter.top_k
        return Limits(depth, top_k, top_k, self.drafter.most, depth * top_k, by_level=True)

    def best_tree(self, reader: NodeReader, logits: torch.Tensor | None, text: Text, limits: Limits) -> Draft:
        """A tree within limits, of a worthwhile size, or of a fixed one.

        logits: [B, 1, Vd], after the committed text; None asks the reader for them.
        """
        return self.best_of(grow(reader, self.call, text, logits, self.rates, limits, self.goes_on), limits.nodes)

    def goes_on(self, grown: Growing) -> bool:
        """Whether a tree grows by one more level."""
        return self.runs_again(grown.forwards + 1)

    def best_of(self, grown: Growing, most: int) -> Draft:
        """The best nodes of a tree, at most `most`: as many as are worthwhile, unless their number is fixed."""
        self.grown, worth = grown, grown.worth()
        if self.drafter.spec.nodes is None:
            costs = self.call.length.costs or UNMEASURED
            drafting = self.forwards(grown) * costs.draft
            most, _ = best_size(worth, lambda nodes: drafting + costs.verify_seconds(nodes + 1))
        return grown.draft(most, worth)

    def forwards(self, grown: Growing) -> int:
        """The head's forward passes for a tree."""
        return grown.forwards + 1

    def propose(self, text: Text, budget: int) -> Draft:
        self.require_numbers()
        self.grown = None
        known = self.call.target.cache.lengths
        # the target has read nothing yet of a refilled row whose prompt is one token
        has_states = all(known[row] for row in text.unfinished)
        self.proposed = draft = self._draft(text, budget) if has_states else Draft.empty(text.rows, text.ids.device)
        return draft

    def _draft(self, text: Text, budget: int) -> Draft:
        """As `propose`."""
        raise NotImplementedError

    def learn(self, round: Round) -> None:
        """Learn how often the head is right, and note the suspicion if hardly any draft's first token was accepted."""
        drafter = self.drafter
        if self.blind is not None:
            self.grown = self.blind.grown(round)
            if any(math.isnan(self.grown.offers[row].below[ROOT][1][0]) for row in round.unfinished):
                self.broken = torch.tensor(True)
        if self.grown is not None:
            learn(self.rates, self.grown.offers, self.grown.text, round.kept)
            self.worth.see(self.grown.worth())
            self.grown = self.blind = None  # later rounds may be drafted by others
        self.see_lengths(round, self.proposed)
        if not round.draft.is_that_of(self.proposed):
            return
        drafter.drafts += sum(count > 0 for count in round.drafted)
        drafter.accepted += sum(count > 0 for count in round.accepted)
        if self.suspicion and drafter.drafts >= ENOUGH and drafter.accepted < FEW * drafter.drafts:
            self.call.settings.note(self.suspicion)


class EagleDrafting(HeadDrafting):
    """The head's slots during one `generate`.

    Column s combines the target's feature of one token with the token after it. Hence the last committed token has no column.
    Invariant before each round: the slots of row b hold its first `cache.lengths[b]` columns, all from true features; the
    features of its remaining columns are in `unread`; rows that have begun with another text are in `fresh`. In a session,
    slots and unread features are taken over from the call before.
    """

    drafter: EagleDrafter
    runner_type: type[HeadRunner] = HeadRunner

    def __init__(self, drafter: EagleDrafter, call: Call):
        super().__init__(drafter, call)
        # P-EAGLE: the head drafts a chain in one forward pass
        self.parallel = getattr(drafter.head, "mask_hidden", None) is not None
        self.trees = self.trees and not self.parallel
        self.runner: HeadRunner | None = None
        self.unread: list[tuple[torch.Tensor, list[int]]] = []  # features [B, m, F], and their number per row
        # hidden states of the prompt, until the head first runs; of its last columns only if the caller passed past keys and
        # values, or if the prompt was read in chunks; none if the rows begin later (`renew`)
        known = call.target.cache.unpadded
        self.prompt = self._read(call.states) if any(known) else []
        self.first = on_device(known, drafter.head.device)[:, None] - sum(part.shape[1] for part in self.prompt[:1])
        self.fresh: dict[int, tuple[EagleDrafting, Text]] = {}  # by row, another text, and a drafting for it alone
        self.skipped = [0] * len(known)  # columns of each row's text without a feature
        self.slots: SlotCache | None = None  # of the call before, until the head first runs,
        self.state: torch.Tensor | None = None  # and the head's state after what is in them
        self.taken: list[tuple[torch.Tensor, list[int]]] = []  # its features that the head has not read
        if (earlier := call.before(EagleDrafting)) is not None and earlier.drafter is drafter:
            self._take_over(earlier, call.target.cache.known[0] - self.prompt[0].shape[1])

    def _take_over(self, earlier: EagleDrafting, past: int) -> None:
        """Go on from the head's state after the call before. past: columns of the text before those in `prompt`.

        Not from a head that started in the middle of the text, and not if rows have different numbers of features.
        """
        slots = earlier.slots if earlier.runner is None else earlier.runner.cache
        features, counts = _joined(earlier._features())
        held = [0] * len(counts) if slots is None else slots.known
        lost = slots is not None and not (can_go_on(slots) and holds_end_of(slots, min(slots.known[0], past)))
        late = any(earlier.skipped) or lost or self.call.attention_mask is not None
        late |= self.call.shared <= min(held[0], past)  # the last column that it has read depends on the token after it
        if late or len({*held}) > 1 or len({*counts}) > 1 or held[0] + counts[0] < past or len(held) != len(self.first):
            return
        known = min(held[0], past)
        if known == held[0]:  # otherwise several MTP layers read a few states of zeros, which costs acceptance alone
            self.state = earlier.state if earlier.runner is None else earlier.runner.state
        if slots is not None:
            slots = go_on(slots, known, self.call.limit + self.drafter.most, self.call.forks)
        self.slots, self.first = slots, torch.zeros_like(self.first)
        self.taken = [(features[:, : past - known], [past - known] * len(counts))]

    def _features(self) -> list[tuple[torch.Tensor, list[int]]]:
        """The features that the head has not read, in the order of the text."""
        if self.runner is not None or not self.prompt:
            return self.unread
        rows, width = self.prompt[0].shape[:2]
        return [*self.taken, (torch.cat(self.prompt, -1), [width] * rows), *self.unread]

    @property
    def nbytes(self) -> int:
        slots = self.slots if self.runner is None else self.runner.cache
        stores = () if slots is None else slots.stores
        return sum(store.nbytes for store in (*stores, *(features for features, _ in self._features())))

    def _draft(self, text: Text, budget: int) -> Draft:
        runner = self._begun(text)
        self._read_fresh(runner, text)
        runner.cache.run_only(text.unfinished)
        runner.keep_last(self.drafter.window)
        if self.parallel:
            return self._ahead(runner, text, min(budget, runner.head.config.parallel_tokens))
        tokens, features, counts = unread = self._unread_columns(runner, text)
        if self._at_once_with(runner):
            at_once = self._tree_at_once if self.trees else self._chain_at_once
            if (draft := at_once(runner, text, unread, budget)) is not None:
                runner.cache.commit(counts)
                return draft
        state = runner.read(tokens, runner.fuse(features), counts)
        with runner.cache.borrowed():
            return (self._tree if self.trees else self._chain)(runner, text, state, budget)

    def observe(self, round: Round) -> None:
        """Keep the features of the committed tokens, whichever drafter proposed them."""
        counts, path = round.kept, round.path
        features, width = torch.cat(self._read(round.states), -1), max(counts)
        if path is not None:
            kept = padded([columns[:width] for columns in path], features.device)[:, :, None]
            features = features.gather(1, kept.expand(-1, -1, features.shape[-1]))
        self.unread.append((features[:, :width], counts))
        self.learn(round)

    def renew(self, text: Text, row: int, call: Call) -> None:
        """The text becomes `fresh`, and no features of the row's earlier text stay unread."""
        others = [other != row for other in range(text.rows)]
        self.unread = [
            (block, [n * kept for n, kept in zip(counts, others, strict=True)]) for block, counts in self.unread
        ]
        self.fresh[row] = type(self)(self.drafter, call), text.alone(row)

    @property
    def _taps(self) -> list[int]:
        return self.drafter.head.states_of(len(self.drafter.needs.layers))

    def _read(self, states: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The hidden states that the head reads, [B, n, Ht] each, on its device."""
        return [states[tap].to(self.drafter.head.device) for tap in self._taps]

    def _read_fresh(self, runner: HeadRunner, text: Text) -> None:
        """Read the prompts of rows that have begun with another text, except for the last column, which becomes unread."""
        for row, (one, alone) in self.fresh.items():
            own, self.skipped[row] = None, 0
            if one.prompt:
                own = one._begun(alone)
                tokens, features, (count,) = one._unread_columns(own, alone)
                if count > 1:
                    own.read(tokens[:, :-1], own.fuse(features[:, :-1]), [count - 1])
                block = features.new_zeros(text.rows, 1, features.shape[-1])
                block[row], self.skipped[row] = features[0, -1:], one.skipped[0]
                self.unread.insert(0, (block, [int(other == row) for other in range(text.rows)]))
            runner.take_over(row, own)
        self.fresh, self.drafter.why_not_in_c = {}, runner.why_not_in_c

    def _begun(self, text: Text) -> HeadRunner:
        """The head's runner. When it is created, the prompt's features become unread."""
        if self.runner is None:
            call, drafter = self.call, self.drafter
            first, mask, features = self.first, call.attention_mask, None
            if self.prompt:
                features = torch.cat(self.prompt, -1)
                if text.prompt_length == 0:  # a prompt of embeddings has no tokens for the head to read: start after it
                    first = first + features.shape[1] - 1
                    features = features[:, -1:]
                width = features.shape[1]
                if not self.taken:
                    self.skipped = [text.prompt_length - width] * text.rows
                mask = mask[:, -width:] if mask is not None and text.prompt_length else None
            settings, limit = call.settings.of_heads, call.limit + drafter.most
            head = prepare(drafter.head, settings, drafter.fused)
            slots = SlotCache(text.rows, limit) if self.slots is None else self.slots
            runner = self.runner_type(head, call.target.model, slots, first, mask)
            runner.state, drafter.why_not_in_c = self.state, runner.why_not_in_c
            self.runner = drafter.graphs.serve(runner, drafter.head, settings)
            if features is not None:
                if self.runner.cache.visible is not None:  # the target's states of padding may be NaN
                    features = features.masked_fill(~self.runner.cache.visible.to(features.device)[:, :, None], 0)
                self.unread = [*self.taken, (features, [features.shape[1]] * text.rows), *self.unread]
            self.prompt, self.taken = [], []
        return self.runner

    def _unread_columns(self, runner: HeadRunner, text: Text) -> Unread:
        """What was committed since the last round, as `HeadRunner.read` takes it, but with features in place of states."""
        cache = runner.cache
        features, counts = _joined(self.unread)
        known = [held + skipped for held, skipped in zip(cache.known, self.skipped, strict=True)]
        totals = [before + count + 1 for before, count in zip(known, counts, strict=True)]
        if totals != text.lengths:
            raise RuntimeError(f"there are features of {totals} tokens per row, but {text.lengths} were committed")
        tokens = tokens_from(text, [before + 1 for before in known], features.shape[1])
        self.unread = []
        return tokens, features, counts

    def _ahead(self, runner: HeadRunner, text: Text, budget: int) -> Draft:
        """A chain by one forward pass over the committed tokens and masks after them (2602.01469)."""
        tokens, features, counts = self._unread_columns(runner, text)
        states = runner.read_ahead(tokens, runner.fuse(features), counts, budget - 1)
        logits = iter(self.fitted(runner.head.over_all(runner.logits(states)), text).unbind(1))
        return self.draft_chain(text, budget, next(logits), lambda tokens: next(logits))

    def _tree(self, runner: HeadRunner, text: Text, state: torch.Tensor, depth: int) -> Draft:
        length, limits = self.call.length, self.limits(depth)
        if not self.call.distribution.processors and (length.reads_top or not length.needs_q):
            tree = runner.tree(state, shape_of(limits, self.rates))
            if tree is not None:
                return self.best_of(grow_in_c(tree, text, length, self.goes_on), limits.nodes)
        return self.best_tree(LevelReader(runner, state, limits.room), None, text, limits)

    def _at_once_with(self, runner: HeadRunner) -> bool:
        """Whether one captured function may read the committed columns and draft. Not where the target's weights are read in a
        function of the head, nor where states of the text are others."""
        # block drafters have no `resume`
        resumes = runner.state is not None and type(runner.head).resume is Head.resume
        return resumes and runner.steps is None and not runner.head.shares_output

    def _chain_at_once(self, runner: HeadRunner, text: Text, unread: Unread, budget: int) -> Draft | None:
        """A chain and the reading of the committed columns in one captured function; None where that is not possible."""
        tokens, features, counts = unread
        self._know_entries(runner.head, text)
        logits, states = functools.partial(self._logits, runner, text), (features, runner.head.fuse)
        found = self.chain_at_once(runner, tokens, counts, budget, logits, states=states)
        if found is None:
            return None
        draft, (runner.state,) = found
        return draft

    def _tree_at_once(self, runner: HeadRunner, text: Text, unread: Unread, budget: int) -> Draft | None:
        """The same with a tree. Its size is chosen by what the last trees were worth."""
        length, head, rates = self.call.length, runner.head, self.rates
        possible = self.worth.recent and not self.call.distribution.processors and runner.device == text.ids.device
        depth = length.ahead(budget) if possible else None
        if depth is None:
            return None
        limits, table = self.limits(depth), self.drafter.table_on(runner.device, rates)
        if limits.candidates > (head.config.vocab_size if head.d2t is None else len(head.d2t)):
            return None
        tokens, features, counts = unread
        best, steps = functools.partial(runner.best, count=limits.candidates), (depth - 1) * limits.beam
        function = functools.partial(grow_at_once, limits, rates.ranks, best, table)
        key, states = ("tree", limits, table.data_ptr()), (features, head.fuse)
        found = runner.passes.chain(runner, tokens, counts, steps, key, function, states)
        if found is None:
            return None
        made, runner.state = found
        nodes = self.drafter.spec.nodes or self.worth.size(limits.nodes, depth, length.costs)
        self.blind, draft = Blind.drafted(made, limits, text, nodes, sum(self.worth.recent[:nodes]))
        return draft

    def _know_entries(self, head: Any, text: Text) -> None:
        if head.d2t is not None and head.config.vocab_size <= self.size:
            known = head.draft_tokens.to(text.ids.device)
            self.entries = Entries(known, self.size, self.call.distribution.by_rank)

    def _logits(self, runner: HeadRunner, text: Text, state: torch.Tensor) -> torch.Tensor:
        """Logits after a state, as `draft_chain` takes them with these `entries`."""
        found = runner.logits(state)
        if self.entries.known is None:
            return self.fitted(runner.head.over_all(found), text)
        return found.to(text.ids.device)

    def _chain(self, runner: HeadRunner, text: Text, state: torch.Tensor, budget: int) -> Draft:
        count = self._greedy_count(budget)
        if count is not None and (made := runner.chain(state, count)) is not None:
            tokens, best = made
            self.broken = best.isnan().any()
            return Draft(tokens, best.isfinite().cumprod(1).sum(1))

        self._know_entries(runner.head, text)

        def read(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal state
            state = runner(tokens, state[:, None])[:, -1]
            runner.cache.commit([1] * text.rows)
            return self._logits(runner, text, state)

        return self.draft_chain(text, budget, self._logits(runner, text, state), read)

    def _greedy_count(self, budget: int) -> int | None:
        """How many tokens a draft has, at most `budget`, if that can be decided before any is drafted and each is the most
        probable one; None otherwise."""
        if self.call.distribution.processors or self.call.distribution.do_sample or self.call.length.needs_q:
            return None
        return next((count for count in range(1, budget) if not self.runs_again(count)), budget)


def _joined(blocks: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[int]]:
    """Several blocks of features as one block without gaps, [B, m, F], and the number of features per row."""
    if len(blocks) == 1:
        return blocks[0]
    rows = [
        torch.cat([features[row, : counts[row]] for features, counts in blocks]) for row in range(len(blocks[0][1]))
    ]
    return pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def needs_of(head: StateHead, model: PreTrainedModel) -> Needs:
    """The hidden states that a head reads of a target, tested on a few tokens.

    Raises ValueError if the hidden states that the head reads are not available or do not have its sizes.
    """
    config = head.config
    problem = f"draft: this {head.title} cannot be used with {type(model).__name__}: "
    try:
        traits = Traits.of(model)
        if config.vocab_size != traits.vocabulary:
            raise ValueError(
                f"it was trained for a vocabulary of {config.vocab_size}, but the target's has {traits.vocabulary}"
            )
        taps = head.states_of(len(find_layers(model)))
        needs = Needs.of_states(model, *taps)
        masks, ids = traits.masks, few_ids(model)
        target = target_runner(model, slots_for(model, None, 1, ids.shape[1], masks), masks, needs)
        with torch.no_grad():
            target.prefill(ids, None)
            columns = 1 if head.reads_end else ids.shape[1]
            for tap in taps:
                shape = tuple(target.states[tap][:, -columns:].shape)
                if shape != (1, columns, config.target_hidden_size):
                    raise ValueError(
                        f"hidden state {tap} of {ids.shape[1]} tokens has the shape {shape}; expected a width of "
                        f"{config.target_hidden_size}"
                    )
            width = head.embed(ids, model).shape[-1]
            if width != config.hidden_size:
                raise ValueError(f"the target's embedding has width {width}, the head's states {config.hidden_size}")
            if head.shares_output and model.get_output_embeddings() is None:
                raise ValueError("the target has no output embedding, which the head needs to compute logits")
    except Exception as error:
        raise ValueError(problem + str(error)) from error
    return needs
