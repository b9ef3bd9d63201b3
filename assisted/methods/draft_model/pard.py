"""PARD (2504.18583): a causal LM drafts a chain in one forward pass. Mask tokens after the text predict one further token each.
A PARD-2 draft (2605.08632) also reads the target's hidden states, projected and added to its embeddings; the projection is in a
file of its own beside the draft. Knows the draft's slots; loading is in draft.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.drafts import Draft, Round
from ...core.host import on_device
from ...core.text import Text
from ...engine.cache import SlotCache
from ...engine.cross import Encoded
from ...engine.needs import Needs
from ...engine.parts import unwrapped, with_children
from ...engine.prepared import CallSettings
from ...engine.runner import CachedModel
from ...engine.traits import Traits
from ...fast.fused import prepare
from ..shared.base import Call, Drafting
from ..shared.files import Checkpoint, Layout, find_folder, shapes_by_name
from ..shared.model_drafter import ModelDrafter, ModelDrafting

TOKENS = 8
"""Of a draft, where its config has no `pard_tokens`: what published drafts were trained for. Further masks were never seen."""
_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
FILE = "warp_model.bin"
_LAYOUT = Layout("the projection of a PARD-2 draft", ((r"", "target_proj."),))
SCALE = 0.02  # of what is added, where the config has none


def is_pard(model: PreTrainedModel) -> bool:
    """Whether a model's config says that it was trained for parallel drafting."""
    config = model.config
    named = any(getattr(config, key, None) is not None for key in _KEYS[:2])  # other models have a mask_token_id, too
    return named or getattr(config, "spd_type", None) in ("pard", "pard2")


def mask_token(model: PreTrainedModel) -> int:
    """The id of the mask token. Raises ValueError if the config names none, or none of the draft's tokens."""
    config, size = model.config, Traits.of(model).vocabulary
    key = next((key for key in _KEYS if getattr(config, key, None) is not None), None)
    if key is None:
        raise ValueError(
            f"draft: the config names no mask token ({', '.join(_KEYS)}), so this is not a PARD draft; pass its path alone, "
            "and it drafts token by token"
        )
    token = getattr(config, key)
    if type(token) is not int or not 0 <= token < size:
        raise ValueError(f"draft: {key}: {token!r} is not a token of the draft, whose vocabulary size is {size}")
    return token


class PardDrafter(ModelDrafter):
    """A causal LM that drafts in one forward pass. Otherwise as `ModelDrafter`. tokens: the most tokens of a draft; None for as
    many as it was trained for."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, tokens: int | None = None):
        super().__init__(model, tokenizer)
        self.mask, trained = mask_token(model), getattr(model.config, "pard_tokens", TOKENS)
        if type(trained) is not int or trained < 1:
            raise ValueError(f"draft: pard_tokens: {trained!r} is not a number of tokens, at least 1")
        self.tokens: int = tokens or trained

    def start(self, call: Call) -> Drafting:
        return PardDrafting(self, call)


class PardDrafting(ModelDrafting):
    """The draft's slots during one `generate`.

    Invariant between rounds: the slots hold the text up to the start of the last round, and no masks.
    """

    drafter: PardDrafter

    def _draft(self, runner: CachedModel, text: Text, budget: int) -> Draft:
        rows = self._read(runner, text, min(budget, self.drafter.tokens))
        return self.draft_chain(text, min(budget, self.drafter.tokens), next(rows), lambda tokens: next(rows))

    def observe(self, round: Round) -> None:
        """Nothing to do: only committed tokens were kept."""

    def _read(self, runner: CachedModel, text: Text, count: int) -> Iterator[torch.Tensor]:
        """Read what was committed since the last round, and `count - 1` masks after it, which are not kept. Yields `fitted`
        logits, [B, V], after the text and after each mask.

        The columns of a row, with c for committed tokens and m for masks:   c c c m m m
        Rows with fewer unread tokens have padding at their end:             c m m m . .
        """
        cache = runner.cache
        own, unread = self._unread(runner, text)
        width, first = max(unread) + count - 1, on_device(unread, text.ids.device)[:, None] - 1
        ids = F.pad(self.readable(own), (0, count - 1))
        ids = ids.masked_fill(torch.arange(width, device=ids.device) > first, self.drafter.mask)
        used = [0 if ended else read + count - 1 for read, ended in zip(unread, text.ended, strict=True)]
        logits = runner(ids, used=used)
        cache.commit(unread)
        rows = torch.arange(text.rows, device=logits.device)
        return (self.fitted(logits[rows, first[:, 0].to(logits.device) + ahead], text) for ahead in range(count))


def is_pard2(model: PreTrainedModel) -> bool:
    config = model.config
    return bool(getattr(config, "pard2", False)) or getattr(config, "spd_type", None) == "pard2"


def load_projection(model: PreTrainedModel) -> nn.Linear | None:
    """The projection beside a draft, in its dtype and on its device; None with a warning if the file is not there.

    Raises ValueError for a file with other tensors than the config says.
    """
    config, path = model.config, model.name_or_path
    try:
        folder = find_folder(path, [FILE])
        if not path or not (folder / FILE).is_file():
            raise FileNotFoundError(f"{path or 'a draft in memory'} has no {FILE}")
    except OSError as error:
        warnings.warn(
            f"draft: {error}, from which a PARD-2 draft reads the target's states: it drafts from tokens alone, and is right "
            "less often",
            stacklevel=2,
        )
        return None
    inner = config.get_text_config(decoder=True).hidden_size
    made = nn.Linear(config.pard2_target_dim, inner, bias=bool(getattr(config, "pard2_proj_bias", False)))
    shapes = shapes_by_name(made.state_dict())
    found = Checkpoint.open(folder, (FILE,), needs_config=False).under(_LAYOUT)
    found.require(shapes)
    made.load_state_dict(found.tensors(shapes))
    return made.to(model.device, model.dtype).requires_grad_(False)


class Embedding(nn.Module):
    """An embedding whose output gets something added, given where a forward pass begins in each row and how wide it is."""

    added: Callable[[list[int], int], Tensor]

    def __init__(self, own: nn.Module, cache: SlotCache):
        super().__init__()
        self.own, self.cache = own, cache

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.own(ids)
        return made + self.cache.of_running(self.added(self.cache.known, ids.shape[1])).to(made)


class Pard2Runner(CachedModel):
    """A causal LM with this embedding. Its passes are not captured, because what is added changes."""

    is_capturable = False  # type: ignore[assignment]
    embedding: Embedding


class Pard2Drafter(PardDrafter):
    """Otherwise as `PardDrafter`. target: whose states it reads.

    Raises ValueError for a target without the states that the config names, or with states of another size.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        target: PreTrainedModel,
        projection: nn.Linear,
        tokens: int | None = None,
    ):
        super().__init__(model, tokenizer, tokens)
        inner, states = unwrapped(target), model.config.pard2_target_layers
        try:
            self.needs = Needs.of_states(inner, *states)
        except ValueError as error:
            raise ValueError(f"draft: pard2_target_layers: {error}") from error
        count, width = len(self.needs.layers), inner.config.get_text_config(decoder=True).hidden_size
        if len(states) * width != projection.in_features:
            raise ValueError(
                f"draft: this PARD-2 draft reads {projection.in_features} numbers a token, but {len(states)} states of the "
                f"target have {len(states) * width}; it was made for another target"
            )
        self.taps = [state if state >= 0 else count + 1 + state for state in states]
        self.projection, self.scale = projection, float(getattr(model.config, "pard2_scale", SCALE))

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model, self.projection]

    @property
    def nothing(self) -> Tensor:
        """[H], what zeros are projected to."""
        weight, bias = self.projection.weight, self.projection.bias
        return weight.new_zeros(len(weight)) if bias is None else self.scale * bias

    def projected(self, states: Any) -> Tensor:
        """What is added to embeddings, [B, n, H], for states by index, [B, n, D] each."""
        weight = self.projection.weight
        return self.scale * self.projection(torch.cat([states[tap].to(weight) for tap in self.taps], -1))

    def save(self, folder: Path) -> None:
        """Write the projection beside the draft."""
        tensors = self.projection.state_dict()
        torch.save({f"target_proj.{name}": tensor.cpu() for name, tensor in tensors.items()}, folder / FILE)

    def runner(self, cache: SlotCache, settings: CallSettings, encoded: Encoded | None = None) -> CachedModel:
        """As `ModelDrafter`, without captured passes. encoded: None, since it refuses encoder-decoders."""
        model = self.kept.of(self.model)
        prepared, inner = prepare(model, settings, self.fused), model.get_input_embeddings()
        path = next(name for name, module in model.named_modules() if module is inner)
        embedding = Embedding(inner, cache)
        made = replace(prepared, module=with_children(prepared.module, {tuple(path.split(".")): embedding}))
        runner = Pard2Runner(made, cache, self.masks)
        runner.embedding = embedding
        return runner

    def start(self, call: Call) -> Pard2Drafting:
        return Pard2Drafting(self, call)


class Pard2Drafting(PardDrafting):
    """As PARD's. To the embedding of token i, the projection of the target's state of token i - 1 is added, for the first token
    that of zeros; to those of masks, the last one that is known.

    Invariant between rounds: `features[b]` are those of row b's columns from `begin[b]` on, up to the last but one.
    """

    drafter: Pard2Drafter

    def __init__(self, drafter: Pard2Drafter, call: Call):
        super().__init__(drafter, call)
        self.lengths: list[int] = []
        known = call.target.cache.known
        self.features, self.begin = [drafter.nothing[None]] * len(known), [-1] * len(known)
        if not any(known):  # rows begin later (`renew`)
            return
        made, mask = drafter.projected(call.states), call.attention_mask
        if mask is not None:  # the target's states of padding may be anything
            made = made.where(mask[:, -made.shape[1] :].bool().to(made.device)[:, :, None], drafter.nothing)
        past = call.target.cache.known[0] - made.shape[1]
        self.features, self.begin = list(made), [past] * len(made)
        earlier = call.before(Pard2Drafting)
        if earlier is not None and earlier.drafter is drafter and len(earlier.features) == len(made):
            for row, (old, first) in enumerate(zip(earlier.features, earlier.begin, strict=True)):
                if first <= past <= first + len(old):  # not yet read by the draft
                    self.features[row], self.begin[row] = torch.cat([old[: past - first], made[row]]), first

    def renew_with(self, one: ModelDrafting, text: Text, row: int) -> None:
        assert isinstance(one, Pard2Drafting)
        one.lengths, self.lengths = [text.lengths[row]], list(text.lengths)
        super().renew_with(one, text, row)
        self.features[row], self.begin[row] = one.features[0], one.begin[0]

    def propose(self, text: Text, budget: int) -> Draft:
        self.lengths = list(text.lengths)
        draft = super().propose(text, budget)
        for row, length in enumerate(text.lengths):  # what has been read is not read again, but for the last token
            drop = max(0, min(length - 2, self.runner.cache.known[row] - 1 if self.runner else 0) - self.begin[row])
            self.features[row], self.begin[row] = self.features[row][drop:], self.begin[row] + drop
        return draft

    def observe(self, round: Round) -> None:
        made = self.drafter.projected(round.states)
        for row in range(len(made)):
            columns = torch.tensor(list(round.columns(row)), dtype=torch.int64, device=made.device)
            self.features[row] = torch.cat([self.features[row], made[row, columns]])

    def readable(self, ids: Tensor) -> Tensor:
        """The same ids, whose embeddings get something added."""
        assert isinstance(self.runner, Pard2Runner)
        self.runner.embedding.added = self._added
        return super().readable(ids)

    def _added(self, starts: list[int], width: int) -> Tensor:
        """[B, n, H], added to the embeddings of n columns of each row from column starts[b] on."""
        found = []
        for start, length, features, begin in zip(starts, self.lengths, self.features, self.begin, strict=True):
            before = torch.arange(start - 1, start - 1 + width, device=features.device).clamp(max=length - 2) - begin
            known = (before >= 0) & (before < len(features))
            found.append(features[before.clamp(0, len(features) - 1)].where(known[:, None], self.drafter.nothing))
        return torch.stack(found)
