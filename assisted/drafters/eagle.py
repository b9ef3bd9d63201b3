"""EAGLE (2401.15077, 2406.16858, 2503.01840): a trained head goes on from the target's hidden states.

The head keeps slots of its own: of verified tokens it holds what it made of the target's true features, and what it made of
its own guesses is dropped after every round. Knows the tapped target; the head's module and formats are in heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafts import Draft, Round
from ..engine.cache import SlotCache
from ..engine.host import on_device, padded
from ..engine.parts import Layers, few_ids, find_layers, unwrapped
from ..engine.runner import Masks, require_rewindable
from ..engine.tapped import TappedModel, find_final_norm
from ..fast.graphs import Graphs
from ..fast.sources import Source
from ..heads.eagle import EagleHead
from ..heads.eagle_formats import load_eagle, save_eagle
from ..heads.fused import fused_head, source_of
from ..heads.runner import HeadRunner
from ..lengths.rates import Rates
from ..text import Text
from .base import Call, Drafter, HeadSpec, Target
from .chain import ChainDrafting
from .eagle_tree import Limits, Offers, grow, learn

__all__ = ["Eagle", "EagleDrafter", "find_taps"]

TOP_K_CPU, TOP_K = 4, 10
NODES_CPU, NODES = 16, 60


@dataclass(frozen=True)
class Eagle(HeadSpec):
    """A trained EAGLE head drafts: `"eagle:DIR"`; which of EAGLE-1 and EAGLE-3 it is, the checkpoint tells.

    Args:
        path: folder, `zoo:` name or Hub id of a checkpoint, made for this very target, in the format of EAGLE's authors, of
            SpecForge or of speculators; or an `EagleHead`.
        tree: draft token trees (EAGLE-2) where the target can verify them; False drafts chains: for large batches, where every
            column has its price. None (default) drafts trees for a greedy target and chains when sampling: drawn and accepted
            by its distribution, a chain gets about as far as a tree of several times its size, of which the target
            draws one node.
        top_k: nodes of each level that are read, and tokens tried below each. None (default) takes 10 on an accelerator, as
            the paper does, and 4 on a CPU. A tree is as deep as the draft length allows.
        nodes: of a tree, in every round. None (default) takes as many as pay, by what was measured of the target: at most 60
            on an accelerator, 16 on a CPU.
    """

    name: ClassVar[str] = "eagle"
    trained: ClassVar[bool | None] = True
    trees: ClassVar[bool | None] = True
    has_q: ClassVar[bool | None] = True

    path: str | EagleHead
    tree: bool | None = None
    top_k: int | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("top_k", "nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is no tree; give 1 or more")

    @classmethod
    def named(cls, rest: str) -> Eagle:
        """The spec behind `"eagle:DIR"`."""
        if not rest:
            raise ValueError(
                "draft: 'eagle' names no checkpoint; write 'eagle:DIR' with the folder or Hub id of a head"
            )
        return cls(rest)

    def load(self, target: Target, **kwargs: Any) -> EagleDrafter:
        """Read the head and find what it goes on from in the target. kwargs: dtype, device_map and how to download.

        Raises ValueError for a checkpoint that is not as it should be, and for a target that it does not fit or that does
        not show its hidden states.
        """
        model = unwrapped(target.model)
        require_rewindable(model, "target")
        head = load_eagle(self.path, model, **kwargs) if isinstance(self.path, str) else self.path
        if isinstance(self.path, str):
            output = model.get_output_embeddings()
            head.to(model.device if output is None else output.weight.device, model.dtype)
        layers, final_norm = find_taps(model, head)
        slow = model.device.type == "cpu"
        return EagleDrafter(
            head,
            layers,
            final_norm,
            tree=self.tree,
            top_k=self.top_k or (TOP_K_CPU if slow else TOP_K),
            nodes=self.nodes,
        )


class EagleDrafter(Drafter):
    """A head, and where the target shows what it goes on from.

    Args:
        head: the head, not changed.
        layers, final_norm: of the target (`find_layers`, `find_final_norm`).
        tree, top_k, nodes: see `Eagle`.
    """

    def __init__(
        self,
        head: EagleHead,
        layers: Layers,
        final_norm: tuple[str, ...] = (),
        tree: bool | None = None,
        top_k: int = TOP_K,
        nodes: int | None = None,
    ):
        self.head = head
        self.layers = layers
        self.final_norm = final_norm
        self.tree, self.top_k, self.nodes = tree, top_k, nodes
        self.graphs = Graphs()
        self.rates = {do_sample: Rates() for do_sample in (False, True)}
        self._drafting: tuple[Source, EagleHead] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made from: it makes its own fast head."""
        return {**self.__dict__, "_drafting": None}

    @property
    def most(self) -> int:
        """Nodes of a tree, at most."""
        return self.nodes or (NODES_CPU if self.head.device.type == "cpu" else NODES)

    @property
    def drafting_head(self) -> EagleHead:
        """The head in the form in which it is fastest to run."""
        source = source_of(self.head)
        if self._drafting is None or not self._drafting[0].same(source):
            self._drafting = source, fused_head(self.head)
        return self._drafting[1]

    @property
    def modules(self) -> list[nn.Module]:
        return [self.head]

    def save(self, folder: Path) -> None:
        """Write the heads, so that the spec reads them from there."""
        save_eagle(self.head, folder)

    def run_target(self, model: PreTrainedModel, cache: SlotCache, masks: Masks) -> TappedModel:
        return TappedModel(model, cache, masks, self.layers, self.head.config.taps, self.final_norm)

    def start(self, call: Call) -> EagleDrafting:
        return EagleDrafting(self, call)


class EagleDrafting(ChainDrafting):
    """The head's slots during one `generate`.

    Invariant before each round: row b's slots hold its first `cache.lengths[b]` columns, true features all of them; the
    features of the columns up to the last committed token are in `unread`. Column s is the feature of one token with the
    token behind it, hence the last committed token has none.
    """

    def __init__(self, drafter: EagleDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        wanted = not call.distribution.do_sample if drafter.tree is None else drafter.tree
        self.trees = wanted and call.target.masks.trees
        self.runner: HeadRunner | None = None
        self.unread: list[tuple[torch.Tensor, list[int]]] = []  # features [B, m, F] and how many count in each row
        self.rates = drafter.rates[call.distribution.do_sample]
        self.text: Text | None = None
        self.offers: list[Offers] = []  # of the tree that was proposed, until the target has chosen
        # of the prompt's columns the last ones are shown: a caller's past and chunks read before them are not
        self.prompt: list[torch.Tensor] = []  # its states, until the head is first run
        if isinstance(call.target, TappedModel):
            self.prompt = self._states(call.target)
            self.first = call.target.cache.positions(self.prompt[0].device) - self.prompt[0].shape[1]

    def propose(self, text: Text, budget: int) -> Draft:
        if not isinstance(self.call.target, TappedModel):
            raise TypeError("EAGLE needs the target to be run by EagleDrafter.run_target")
        if self.broken is not None and self.broken:
            raise FloatingPointError("the head's logits are not a number")
        drafter = self.drafter
        self.text, self.offers = text, []
        runner = self._begun(text)
        runner.cache.run_only(text.unfinished)
        state = self._read_committed(runner, text)
        known = runner.cache.known
        try:
            if self.trees:
                limits = Limits(budget, drafter.top_k, drafter.most, drafter.nodes is None)
                grown = grow(runner, self.call, text, state, self.rates, limits)
                self.offers = grown.offers
                return grown.draft
            return self._chain(runner, text, state, budget)
        finally:
            runner.cache.rewind(known)

    def observe(self, round: Round) -> None:
        """Keep the features of what became text, whoever drafted it."""
        target, counts, path = self.call.target, round.kept, round.path
        if not isinstance(target, TappedModel):
            return
        features, width = torch.cat(self._states(target), -1), max(counts)
        if path is not None:
            kept = padded([columns[:width] for columns in path], features.device)[:, :, None]
            features = features.gather(1, kept.expand(-1, -1, features.shape[-1]))
        self.unread.append((features[:, :width], counts))
        if self.text is not None and self.offers:
            learn(self.rates, self.offers, self.text, counts)
            self.offers = []

    def _states(self, target: TappedModel) -> list[torch.Tensor]:
        """What was tapped in the target's last pass: [B, n, Ht] each."""
        device = self.drafter.head.device
        return [target.states(tap).to(device) for tap in self.drafter.head.config.taps]

    def _begun(self, text: Text) -> HeadRunner:
        """The head as it is run; at first with nothing read, and the prompt's features to be read."""
        if self.runner is None:
            call, drafter = self.call, self.drafter
            features, first = torch.cat(self.prompt, -1), self.first
            if text.prompt_length == 0:  # embeddings, of no token that the head could read: it begins behind them
                first = first + features.shape[1] - 1
                features = features[:, -1:]
            rows, width = features.shape[:2]
            self.skipped = text.prompt_length - width  # columns of the text without a feature
            mask = call.attention_mask[:, -width:] if call.attention_mask is not None and text.prompt_length else None
            self.runner = HeadRunner(drafter.drafting_head, call.target.model, call.limit + drafter.most, first, mask)
            drafter.graphs.serve(self.runner, drafter.head, call.settings)
            if self.runner.cache.visible is not None:  # whatever the target made of padding, it must be numbers
                features = features.masked_fill(~self.runner.cache.visible.to(features.device)[:, :, None], 0)
            self.unread.insert(0, (features, [width] * rows))
            self.prompt = []
        return self.runner

    def _read_committed(self, runner: HeadRunner, text: Text) -> torch.Tensor:
        """Read what was committed since the last round. Returns the state after it, [B, H], of rows that have grown.

        Rows behind by fewer tokens than others are filled up on the right; the filler is not kept.
        """
        cache = runner.cache
        features, behind = _joined(self.unread)
        totals = [known + count + self.skipped + 1 for known, count in zip(cache.known, behind, strict=True)]
        if totals != text.lengths:
            raise RuntimeError(f"features of {totals} tokens a row were seen, of {text.lengths} that were committed")
        width = features.shape[1]
        starts = on_device([known + self.skipped + 1 for known in cache.known], text.ids.device)[:, None]
        columns = starts + torch.arange(width, device=text.ids.device)
        tokens = text.ids.gather(1, columns.clamp(max=text.ids.shape[1] - 1))
        self.unread = []
        return runner.read(tokens, runner.head.fuse(features), behind)

    def _chain(self, runner: HeadRunner, text: Text, state: torch.Tensor, budget: int) -> Draft:
        device = text.ids.device

        def logits() -> torch.Tensor:
            return runner.head.over_all(runner.logits(state)).to(device)

        def read(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal state
            state = runner(tokens, state[:, None])[:, -1]
            runner.cache.commit([1] * text.rows)
            return logits()

        return self.draft_chain(text, budget, logits(), read)


def _joined(blocks: list[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[int]]:
    """One block of features out of several, rows without gaps: [B, m, F], and how many count in each row."""
    if len(blocks) == 1:
        return blocks[0]
    features = torch.cat([block for block, _ in blocks], 1)
    rows = list(zip(*(counts for _, counts in blocks), strict=True))
    totals = [sum(counts) for counts in rows]
    starts, used = [], 0
    for block, _ in blocks:
        starts.append(used)
        used += block.shape[1]
    places = [
        [start + column for start, count in zip(starts, counts, strict=True) for column in range(count)]
        for counts in rows
    ]
    if all(row == list(range(used)) for row in places):
        return features, totals
    index = padded(places, features.device)[:, :, None]
    return features.gather(1, index.expand(-1, -1, features.shape[-1])), totals


def find_taps(model: PreTrainedModel, head: EagleHead) -> tuple[Layers, tuple[str, ...]]:
    """Where the target's layers and its final norm are; tried on a few tokens.

    Raises ValueError for a target that does not show what the head goes on from, or not in its sizes.
    """
    config = head.config
    refused = f"draft: this EAGLE-{config.version} head cannot serve {type(model).__name__}: "
    try:
        size = model.config.get_text_config(decoder=True).vocab_size
        if config.vocab_size != size:
            raise ValueError(f"it was made for a vocabulary of {config.vocab_size}, the target's has {size}")
        layers = find_layers(model)
        final_norm = find_final_norm(model, layers) if len(layers) in config.taps else ()
        if not all(1 <= tap <= len(layers) for tap in config.taps):
            raise ValueError(f"it reads the hidden states {config.taps} of a target with {len(layers)} layers")
        masks, ids = Masks.of(model), few_ids(model)
        cache = SlotCache(1, ids.shape[1], right_aligned=not masks.trees)
        target = TappedModel(model, cache, masks, layers, config.taps, final_norm)
        with torch.no_grad():
            target.prefill(ids, None)
            for tap in config.taps:
                shape = tuple(target.states(tap).shape)
                if shape != (1, ids.shape[1], config.target_hidden_size):
                    raise ValueError(
                        f"hidden state {tap} of {ids.shape[1]} tokens is {shape}, not {config.target_hidden_size} wide"
                    )
            width = head.embed(ids, model).shape[-1]
            if width != config.hidden_size:
                raise ValueError(f"the target's embedding is {width} wide, the head's states {config.hidden_size}")
            if config.version == 1 and model.get_output_embeddings() is None:
                raise ValueError("the target has no output embedding, which says what the head's states mean")
    except Exception as error:
        raise ValueError(refused + str(error)) from error
    return layers, final_norm
