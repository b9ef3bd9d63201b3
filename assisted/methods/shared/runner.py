"""Runs a head during one `generate`: slots, masks and positions. Each column combines the target's feature of one token
with the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ...core.drafts import Draft
from ...core.host import filled, on_device
from ...distribution import probabilities
from ...engine.cache import SlotCache
from ...engine.parts import Inject
from ...engine.passes import Inputs, Runner
from ...engine.prepared import PreparedModule
from ...engine.session import take_over
from ...engine.window import dropped_from, keep_last
from ...fast.head_steps import HeadSteps, Shape, TreeInC
from .heads import Head, with_row
from .tree_growth import NodeReader
from .trees import Rows


class Level(NamedTuple):
    """A level of a token tree after the head has read it.

    states: [B, n, H], zeros for rows that don't run. seen: [B, n, S] bool, the slots that each column attends to. positions:
    [B, 1] int64, of the next level. ends: [B, 1] int64, its first slots, in captured functions.
    """

    states: torch.Tensor
    seen: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor | None = None


class HeadRunner(Runner):
    """A head with its slots.

    Args:
        head: the head, or its `PreparedModule`; it is not changed.
        target: the model whose embeddings it may share.
        slots: new ones, or those of an earlier call with the same text.
        first: [B, 1] int64, position of each row's first column; negative if padding precedes the text.
        attention_mask: [B, n] for the first n columns, 0 at padding; None without padding.

    Attributes:
        state: [B, H], the head's state after the text that it has read; None before, or if it is not known.
        steps: its steps in C, decided here; None for those that are captured, or run eagerly.
        why_not_in_c: the reason why there are none.
    """

    def __init__(
        self,
        head: Head | PreparedModule,
        target: PreTrainedModel,
        slots: SlotCache,
        first: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ):
        self.inject = Inject(None)  # holds the input states of a step
        prepared = head if isinstance(head, PreparedModule) else PreparedModule(head)
        prepared = replace(prepared, kind="head", inject=self.inject)
        self.head: Any = prepared.module
        context = self.head.config.max_position_embeddings
        super().__init__(prepared, slots, self.head.device, context)
        self.target = target
        self.state: torch.Tensor | None = None
        self.cache.hide(attention_mask)
        before, dropped = (-first[:, 0]).tolist(), dropped_from(slots)
        self.cache.prompt_padding = before
        self.cache.padding = [hidden - count for hidden, count in zip(before, dropped, strict=True)]
        why = "the prompt has padding" if slots.visible is not None else None
        why = "steps in C are those of one row" if slots.rows > 1 else why
        steps: HeadSteps | str = why or self.head.steps_with(target)
        self.steps = None if isinstance(steps, str) else steps
        self.why_not_in_c = steps if isinstance(steps, str) else None
        self.first = first.to(self.device) + on_device(dropped, self.device)[:, None]
        self._has_past = min(before) < 0  # then positions can't be derived from slots

    @property
    def is_capturable(self) -> bool:
        return not self._has_past

    def keep_last(self, window: int | None) -> None:
        """See `window.keep_last`."""
        before = dropped_from(self.cache)
        keep_last(self.cache, window)
        if (after := dropped_from(self.cache)) != before:
            more = [new - old for new, old in zip(after, before, strict=True)]
            self.first = self.first + on_device(more, self.device)[:, None]

    def read(self, tokens: torch.Tensor, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Read and keep committed text, `counts[b]` columns of row b. Returns the states after it, [B, H].

        tokens: [B, n] int64. states: [B, n, H], from `Head.fuse`. Rows with fewer columns are padded on the right.
        """
        if not self.cache.layers:
            self.state = self._read_first(tokens, states, counts)
        else:
            states = self(tokens, self.head.resume(states, self.state))
            self.cache.commit(list(counts))
            self.state = _last(states, counts)
        return self.state

    def take_over(self, row: int, one: HeadRunner | None) -> None:
        """Give a row what the runner of a single row has read; None, if it has read nothing."""
        take_over(self.cache, row, SlotCache(1, 0) if one is None else one.cache)
        self.first, state = self.first.clone(), None if one is None or one.state is None else one.state[0]
        self.first[row] = 0 if one is None else one.first[0]
        self._has_past |= one is not None and one._has_past
        self.state = with_row(self.state, row, state, self.cache.rows)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """As `Head.fuse`."""
        if self.steps is not None and (made := self.steps.fuse(features)) is not None:
            return made
        found = self.compute("fuse", lambda given: [self.head.fuse(given)], features)
        return self.head.fuse(features) if found is None else found[0].clone()  # the next replay overwrites it

    def read_ahead(self, tokens: torch.Tensor, states: torch.Tensor, counts: Sequence[int], masks: int) -> torch.Tensor:
        """`read`, and so many masks after each row's text, which are not kept; of a P-EAGLE head. Returns the states after the
        text and after each mask, [B, 1 + masks, H]."""
        found = []
        if not self.cache.layers:
            found, counts = [self.read(tokens, states, counts)[:, None]], [0] * len(counts)
            tokens, states = tokens[:, :0], states[:, :0]
        if found and not masks:
            return found[0]
        unknown = self.head.fuse(self.head.mask_hidden)
        ends = on_device(counts, states.device)[:, None]
        is_mask = torch.arange(states.shape[1] + masks, device=states.device) >= ends
        states = torch.where(is_mask[:, :, None], unknown, F.pad(states, (0, 0, 0, masks)))
        tokens = F.pad(tokens, (0, masks)).masked_fill(is_mask.to(tokens.device), self.head.config.mask_token_id)
        made = self(tokens, states)
        self.cache.commit(list(counts))
        wanted = (ends + torch.arange(0 if found else -1, masks, device=made.device)).clamp(min=0)
        return torch.cat([*found, made.gather(1, wanted[:, :, None].expand(-1, -1, made.shape[-1]))], 1)

    def _read_first(self, tokens: torch.Tensor, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`read` for the first columns, mostly the prompt, in forward passes over rows of similar length."""
        cache, width = self.cache, tokens.shape[1]

        def read(rows: list[int], first: int) -> torch.Tensor:
            columns = torch.arange(first, width, device=self.device)
            seen = None
            if cache.visible is not None and not (shown := cache.visible[rows, first:].to(self.device)).all():
                shown = F.pad(shown, (0, len(columns) - shown.shape[1]), value=True)[:, None, None]
                # padding attends to itself: attention to nothing is NaN
                seen = ((columns <= columns[:, None]) & shown) | (columns == columns[:, None])
            own_counts = [counts[row] - first for row in rows]
            last_only = self.prepared.last_only and min(own_counts) == len(columns)
            positions = (columns + self.first[rows]).clamp(min=0)
            given = self.head.embed(tokens[rows, first:], self.target), states[rows, first:], positions
            made = self.head(*given, seen, cache, last_only)
            return made if last_only else _last(made, own_counts)[:, None]

        state = self.by_groups(width, read)[:, 0]
        cache.begin_rounds()
        cache.rewind(list(counts))
        return state

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """A causal step over n columns after each row's length. Only `commit` keeps any of them.

        tokens: [B, n] int64. states: [B, n, H], from `Head.fuse` or an earlier step. Returns states [B, n, H], zeros for
        rows that don't run.
        """
        if self.steps and (found := self.steps(tokens, states, self.cache, int(self.first))) is not None:
            return found
        self.take(states)
        return self.passes.run(self, tokens, None, None)

    def take(self, states: torch.Tensor) -> None:
        """Let the next step read these states, [B, n, H]."""
        self.inject.hidden = states
        kind = "head", states.shape[-1]  # several MTP layers: states of another width are read by other layers
        if self.prepared.kind != kind:
            self.prepared = replace(self.prepared, kind=kind)

    def chain(self, state: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The most probable tokens after the text, each given those before, of one row in one call; None where that is not
        possible. state: [1, H], after the text. Returns `count` tokens, [1, count] int64, and their logits, [1, count]."""
        return None if self.steps is None else self.steps.chain(state, self.cache, int(self.first), count)

    def tree(self, state: torch.Tensor, shape: Shape) -> TreeInC | None:
        """A token tree after the text of one row, which grows in C; None where that is not possible. state: [1, H], after the
        text."""
        return None if self.steps is None else self.steps.tree(state, self.cache, int(self.first), shape)

    def eager(self, ids: torch.Tensor, draft: Draft | None = None, used: list[int] | None = None) -> torch.Tensor:
        """The step itself, from the states in `inject`."""
        cache, width = self.cache, ids.shape[1]
        cache.place(width, self.device)
        slots = cache.ends(self.device) + torch.arange(width, device=self.device)  # [rows, n]
        ids, states, first = map(cache.of_running, (ids, self.inject.hidden, self.first))
        given = self.head.embed(ids, self.target), states, (slots + first).clamp(min=0)
        seen = None
        # if every slot is visible, or attention is purely causal, most heads need no mask
        is_simple = cache.visible is None and (width == cache.top or width == len(slots) == 1)
        if self.head.needs_mask or not is_simple:
            seen = torch.arange(cache.top, device=self.device) <= slots[:, :, None]
            if cache.visible is not None:  # padding attends to itself: attention to nothing is NaN
                seen = cache.hide_padding(seen).scatter_(2, slots[:, :, None], True)
            seen = seen[:, None]
        return cache.spread(self.head(*given, seen, cache))

    def static_forward(self, inputs: Inputs) -> torch.Tensor:
        """As `Runner`, for chains only."""
        ids, known, first, _, visible = inputs
        cache, columns = self.cache, torch.arange(ids.shape[1], device=self.device)
        cache.place_at(known, len(columns), visible.shape[1])
        slots, own = torch.arange(cache.top, device=self.device), (known + columns)[:, :, None]
        seen = ((slots < own) & visible[:, None]) | (slots == own)
        given = self.head.embed(ids, self.target), self.inject.hidden, (first + columns).clamp(0, self.context - 1)
        return self.head(*given, seen[:, None], cache)

    def root(self, state: torch.Tensor, room: int) -> Level:
        """The committed text as the level above the first one of a token tree. state: [B, H], the head's state after the
        text. room: the largest number of columns read of the tree."""
        top = max(self.cache.lengths) + room
        slots = torch.arange(top, device=self.device)
        known = on_device(self.cache.lengths, self.device)[:, None]
        seen = slots < known
        if self.cache.visible is not None:
            hidden = min(self.cache.visible.shape[1], len(slots))
            seen[:, :hidden] &= self.cache.visible[:, :hidden].to(self.device)
        return Level(state[:, None], seen[:, None], (known + self.first).clamp(min=0))

    def level(self, tokens: Rows, parents: Rows, above: Level) -> Level:
        """A step over one level of a token tree. Only `commit` keeps any columns.

        tokens: those of the level's n columns, by row. parents: for each column, the index of its parent in the level above.
        """
        cache = self.cache
        cache.place(len(tokens[0]), self.device)
        table = self._table(tokens, parents, above)
        made = self._level(table, *(cache.of_running(part) for part in above[:3]))
        return Level(cache.spread(made.states), cache.spread(made.seen), above.positions + 1)

    def _table(self, tokens: Rows, parents: Rows, above: Level) -> torch.Tensor:
        """Tokens, parents and slots of a level's columns, [3, rows, n]: one copy of all indices to the device."""
        lengths, running, before = self.cache.lengths, self.cache.running, above.states.shape[1]
        ids = [tokens[row] for row in running]
        above_them = [[place * before + parent for parent in parents[row]] for place, row in enumerate(running)]
        slots = [range(lengths[row], lengths[row] + len(tokens[row])) for row in running]
        return on_device([ids, above_them, slots], self.device)

    def _level(self, table: torch.Tensor, states: torch.Tensor, seen: torch.Tensor, positions: torch.Tensor) -> Level:
        """`level` of the running rows, over columns that the cache has placed."""
        ids, parent, slots = table.unbind()
        # a column attends to itself and to what its parent attends to
        seen = seen.flatten(0, 1).index_select(0, parent.flatten()).view(*ids.shape, -1)
        seen.scatter_(2, slots[:, :, None], True)
        given = states.flatten(0, 1).index_select(0, parent.flatten()).view(*ids.shape, -1)
        mask = seen[:, None, :, : self.cache.top]
        made = self.head(self.head.embed(ids, self.target), given, positions, mask, self.cache)
        return Level(made, seen, positions + 1)

    def root_at(self, state: torch.Tensor, known: torch.Tensor, visible: torch.Tensor) -> Level:
        """`root` within a captured function. known: [B, 2] int64, valid slots and position of the next column. visible: [B, S]
        bool, False at a prompt's padding."""
        seen = (torch.arange(visible.shape[1], device=self.device) < known[:, :1]) & visible
        return Level(state[:, None], seen[:, None], known[:, 1:].clamp(0, self.context - 1), known[:, :1])

    def next_level(self, tokens: torch.Tensor, parents: torch.Tensor, above: Level) -> Level:
        """`level` within a captured function. tokens, parents: [B, n] int64."""
        assert above.ends is not None
        rows, columns = (torch.arange(count, device=self.device) for count in tokens.shape)
        table = torch.stack([tokens, parents + rows[:, None] * above.states.shape[1], above.ends + columns])
        self.cache.place_at(above.ends, len(columns), above.seen.shape[-1])
        states, seen, positions, _ = self._level(table, *above[:3])
        return Level(states, seen, positions.clamp(max=self.context - 1), above.ends + len(columns))

    def best(self, states: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` most probable tokens after states, best first: probabilities and ids, [..., 2 count] float64."""
        distribution = probabilities(self.logits(states).float())
        found, best = distribution.topk(min(count, distribution.shape[-1]))
        tokens = best if self.head.d2t is None else self.head.draft_tokens[best]
        return torch.cat([found.double(), tokens.double()], -1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., Vd] over the draft vocabulary."""
        return self.head.logits(states, self.target) if self.steps is None else self.steps.logits(states)


class LevelReader(NodeReader):
    """The levels that the head has read, in its slots after the committed text. The caller rewinds the cache.

    Args:
        runner: of the head, which has read all committed tokens but the last.
        state: [B, H], the head's state after them.
        room: the largest number of columns that are read.
    """

    def __init__(self, runner: HeadRunner, state: torch.Tensor, room: int):
        super().__init__(len(state))
        self.runner = runner
        self.level = runner.root(state, room)
        self.first = -1  # column of the last level's first node; the committed text counts as a level of one node
        self.vocabulary = None if runner.head.d2t is None else runner.head.draft_tokens

    def logits(self) -> torch.Tensor:
        """Logits [B, n, Vd] after the nodes of the last level."""
        return self.runner.logits(self.level.states)

    def over_all(self, logits: torch.Tensor) -> torch.Tensor:
        return self.runner.head.over_all(logits)

    def read(self, tokens: Rows, parents: Rows, depths: Rows) -> torch.Tensor:
        """Read a level: children of nodes of the last level."""
        tokens, parents = filled(tokens), filled(parents, self.first)
        above = [[parent - self.first for parent in row] for row in parents]
        self.first = self.columns
        self.add(tokens, parents)
        self.level = self.runner.level(tokens, above, self.level)
        self.runner.cache.commit([len(tokens[0])] * len(tokens))
        return self.logits()


def _last(states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[B, n, H] -> [B, H], the states of each row's column counts[b] - 1."""
    width = states.shape[1]
    last = [row * width + max(count - 1, 0) for row, count in enumerate(counts)]
    return states.flatten(0, 1).index_select(0, on_device(last, states.device))
