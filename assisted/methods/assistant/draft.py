"""Gemma 4's assistants as drafts: a step reads the keys and values that the target already has, so nothing of a draft is kept,
and a session or a rejected token costs nothing. Chains and trees are grown as by EAGLE heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ...core.drafts import Draft, Round
from ...core.host import filled, on_device
from ...core.text import Text
from ...engine.needs import Needs
from ...engine.parts import unwrapped
from ...engine.runner import CachedModel
from ..eagle.draft import EagleDrafter, EagleOptions, HeadDrafting
from ..shared.base import Call, HeadSpec, Room, Target
from ..shared.heads import Head, with_row
from ..shared.registry import register
from ..shared.tree_growth import NodeReader
from ..shared.trees import Rows
from .head import AssistantHead, Keys, is_assistant, load_assistant, require_kind, save_assistant, sources_of


@register("assistant")
@dataclass(frozen=True)
class Assistant(EagleOptions):
    """An assistant of Gemma 4 drafts, or one trained in that form for another target: its folder, or `"assistant:ID"`.

    Args:
        path: folder or Hub id of the assistant; or the model in memory, of transformers' class or an `AssistantHead`.
        tree, top_k, nodes: as for `Eagle`.
        position: position of all steps: "next" (default) is the newest token's, as in transformers; "last" is the one before,
            as in vLLM and SGLang. Try the other one if the first drafted token is hardly ever accepted.
    """

    title = "Gemma 4 assistants"
    acceptance = (0.5, 0.9)
    training = "assisted.methods.assistant.train:AssistantTraining"
    not_served = "give the engine the assistant's own folder"

    path: str | PreTrainedModel | AssistantHead
    position: Literal["next", "last"] = "next"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position not in ("next", "last"):
            raise ValueError(f"position: {self.position!r} is not known; give 'next' or 'last'")

    def memory(self, room: Room) -> dict[str, int]:
        """That of its weights: keys and values are the target's."""
        return HeadSpec.memory(self, room)

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        return is_assistant(fields)

    @classmethod
    def takes(cls, draft: Any) -> bool:
        if isinstance(draft, PreTrainedModel):
            return is_assistant({"model_type": draft.config.model_type})
        return isinstance(draft, AssistantHead)

    def load(self, target: Target, **kwargs: Any) -> EagleDrafter:
        """As `EagleOptions`; also raises ValueError for a head made for a target with other keys and values."""
        drafter = super().load(target, **kwargs)
        model, head = unwrapped(target.model), drafter.head
        if (found := sources_of(model, head.sources)) != head.sources:
            raise ValueError(
                f"draft: this assistant reads keys and values of {head.sources}, but the target has {found}; load it with "
                "this target"
            )
        return drafter

    def read_head(self, target: Target, model: PreTrainedModel, **kwargs: Any) -> Head:
        if isinstance(self.path, str):
            return load_assistant(self.path, model, **kwargs)
        own: Any = self.path  # of transformers' class
        fields = own.config.to_dict()
        require_kind(fields, type(own).__name__)
        return AssistantHead(model, fields, own.state_dict())

    def drafter(self, head: Any, needs: Needs) -> EagleDrafter:
        return AssistantDrafter(self, head, needs)


class AssistantDrafter(EagleDrafter):
    """A loaded assistant, which is not changed, and statistics of how often it is right."""

    head: AssistantHead
    spec: Assistant
    reads_prompt = False

    def save(self, folder: Path) -> None:
        save_assistant(self.head, folder)

    def start(self, call: Call) -> AssistantDrafting:
        return AssistantDrafting(self, call)


class AssistantDrafting(HeadDrafting):
    """One `generate`. All it keeps is `state`, [B, Hb]: the target's state of the token before each row's newest one; None if
    the target has read nothing."""

    drafter: AssistantDrafter
    suspicion = (
        "the first token that the assistant drafts is hardly ever accepted: it may be of another target, or it may have "
        "been trained for the other position; try Assistant(..., position='last')"
    )

    def __init__(self, drafter: AssistantDrafter, call: Call):
        super().__init__(drafter, call)
        (self.tap,) = drafter.head.config.taps
        known = any(call.target.cache.lengths)
        self.state: torch.Tensor | None = call.states[self.tap][:, -1].clone() if known else None

    def renew(self, text: Text, row: int, call: Call) -> None:
        self.state = with_row(self.state, row, call.states[self.tap][0, -1] if call.states else None, text.rows)

    def _draft(self, text: Text, budget: int) -> Draft:
        assert self.state is not None  # where the target has read nothing, nothing is drafted
        step = Step(self.drafter.head, self.call.target, self.drafter.spec.position)
        reader = AssistantReader(step, self.state.to(step.device))
        logits = reader.first(text.last_tokens())
        if self.trees:
            return self.best_tree(reader, logits, text, self.limits(budget))
        state = reader.states

        def read(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal state
            logits, state = step(tokens, state)
            return logits[:, -1].to(text.ids.device)

        return self.draft_chain(text, budget, logits[:, -1].to(text.ids.device), read)

    def observe(self, round: Round) -> None:
        """Take the state of the last column that a token was chosen from, whichever drafter proposed."""
        states = round.states[self.tap]
        last = on_device(
            [[*round.columns(row), 0][max(count - 1, 0)] for row, count in enumerate(round.kept)], states.device
        )
        self.state = states[torch.arange(len(last), device=states.device), last]
        self.learn(round)


class Step:
    """Steps of one round, over the running rows. It reads the slots of committed tokens and writes nothing.

    head: the assistant. target: as it runs in this call, between two forward passes. position: see `Assistant`.
    """

    def __init__(self, head: AssistantHead, target: CachedModel, position: Literal["next", "last"]):
        self.head, self.target, self.device = head, target.model, head.device
        cache = self.cache = target.cache
        back = int(position == "last")
        self.positions = on_device(target.first_positions(), self.device)[:, None] - back
        lengths = [cache.lengths[row] for row in cache.running]
        visible = None if cache.visible is None else cache.of_running(cache.visible).to(self.device)
        self.keys: dict[str, Keys] = {}
        for kind, source in head.sources.items():
            window = head.config.window(kind)
            ahead = [0 if window is None else max(0, length - back - window + 1) for length in lengths]
            slots = torch.arange(min(ahead), max(lengths), device=self.device)  # no row sees others
            seen = None
            if visible is not None or min(lengths) < max(lengths):
                first, end = (on_device(some, self.device)[:, None] for some in (ahead, lengths))
                seen = (slots >= first) & (slots < end)
                if visible is not None:
                    hidden = visible[:, min(ahead) : max(lengths)]  # slots after the prompt are all visible
                    seen[:, : hidden.shape[1]] &= hidden
            layer: Any = cache.layers[source.layer]
            keys, values = (
                store[: len(lengths), :, min(ahead) : max(lengths)].to(self.device, head.dtype)
                for store in (layer.keys, layer.values)
            )
            self.keys[kind] = Keys(keys, values, None if seen is None else seen[:, None, None])

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens: [B, n] int64. states: [B, n, Hb], of what precedes each of them. Returns the logits [B, n, V] after them and
        the next states; zeros for rows that don't run."""
        head, cache = self.head, self.cache
        embeddings = head.embed(cache.of_running(tokens.to(self.device)), self.target)
        ended, states = head(embeddings, cache.of_running(states), self.positions, self.keys)
        return cache.spread(head.logits(ended)), cache.spread(states)


class AssistantReader(NodeReader):
    """The nodes that an assistant has read. A node sees the committed text and its parent's state, no other node.

    state: [B, Hb], before the newest token.
    """

    def __init__(self, step: Step, state: torch.Tensor):
        super().__init__(len(state))
        self.step, self.states = step, state[:, None]

    def first(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read the newest tokens, [B, 1] int64. Returns the logits after them, [B, 1, V]."""
        logits, self.states = self.step(tokens, self.states.to(self.step.head.dtype))
        return logits

    def read(self, tokens: Rows, parents: Rows, depths: Rows) -> torch.Tensor:
        tokens, parents = filled(tokens), filled(parents, -1)
        ids, above = on_device([tokens, parents], self.states.device).unbind()
        states = self.states.gather(1, (above + 1)[:, :, None].expand(-1, -1, self.states.shape[-1]))
        logits, states = self.step(ids, states)
        self.states = torch.cat([self.states, states], 1)
        self.add(tokens, parents)
        return logits
