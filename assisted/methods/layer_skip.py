"""Layer skipping: the target drafts for itself without some of its sublayers (2309.08168, 2410.06916). They are searched for
during generation, by single changes that are each tried on recent text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.acceptance import top1
from ..core.drafts import Draft, Round
from ..core.text import Text, tokens_from
from ..engine.cache import SlotCache
from ..engine.needs import Needs
from ..engine.parts import Layers, find_layers, try_out, unwrapped
from ..engine.runner import CachedModel
from ..engine.sublayers import Sublayer, find_sublayers, without
from ..engine.traits import require_rewindable
from ..lengths.cost_model import ENOUGH, KEEP, PRIOR, DecayedMean, best_speedup
from .shared.base import Call, Spec, Target
from .shared.part import PartDrafter, PartDrafting
from .shared.registry import register

LEAST = 4  # minimum number of tokens per row in a trial
LONGEST_GAP = 64  # maximum number of rounds between two trials


@register("layer-skip")
@dataclass(frozen=True)
class LayerSkip(Spec):
    """The target drafts for itself, skipping attention and MLP sublayers: `"layer-skip"`, `"layer-skip:0.5"`.

    Needs no training and no memory of its own. Worthwhile for large models, whose middle layers change little. The set of
    skipped sublayers is improved during generation and kept for later calls.

    Args:
        skipped: share of the sublayers to skip at the start, in (0, 1). They are evenly spread, without the first and the last
            layer. Default 0.45. This is only the starting point of the search.
        window: number of newest tokens on which a change is tried, at least 8. Default 32; more are less noisy but cost more.
        every: rounds between two trials at the start, at least 1. Default 4. Trials become rarer when they find no
            improvement.
    """

    title = "Layer skipping"
    has_q = True
    acceptance = (0.5, 0.8)
    sample = "layer-skip"

    skipped: float = 0.45
    window: int = 32
    every: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.skipped < 1:
            raise ValueError(
                f"skipped: {self.skipped} is not possible; give a share of the sublayers, above 0 and below 1"
            )
        if self.window < 8:
            raise ValueError(f"window: {self.window} is too short to compare sublayers; give at least 8 tokens")
        if self.every < 1:
            raise ValueError(f"every: {self.every} is not possible; give at least 1 round")

    @classmethod
    def named(cls, rest: str) -> LayerSkip:
        """The spec for `"layer-skip:0.5"`."""
        try:
            return cls(float(rest)) if rest else cls()
        except ValueError as error:
            raise ValueError(
                f"draft: 'layer-skip:{rest}' names no share of sublayers; write 'layer-skip:0.5' or just 'layer-skip'"
            ) from error

    def load(self, target: Target, **kwargs: Any) -> SkipDrafter:
        """Find the target's sublayers and check on a few tokens that it runs without them; if not, raise ValueError."""
        model = unwrapped(target.model)
        require_rewindable(model, "target")
        try:
            layers = find_layers(model)
            sublayers = find_sublayers(model, layers)
            # fails if later layers reuse the keys and values of earlier ones
            try_out(
                without(model, layers, sublayers, [i for i, s in enumerate(sublayers) if s.layer < len(layers) - 1])
            )
        except Exception as error:
            raise ValueError(
                f"draft: layer skipping cannot be used with this target, {type(model).__name__}: it does not run without some "
                f"of its layers ({type(error).__name__}: {error})"
            ) from error
        return SkipDrafter(layers, sublayers, self)


class SkipDrafter(PartDrafter):
    """A target's layers and sublayers, and the search for the sublayers to skip. spec: the options of the search."""

    def __init__(self, layers: Layers, sublayers: list[Sublayer], spec: LayerSkip):
        self.needs = Needs(layers)
        self.sublayers = sublayers
        self.window = spec.window
        inner = [index for index, sublayer in enumerate(sublayers) if 0 < sublayer.layer < len(layers) - 1]
        self.search = SkipSearch(
            [sublayer.share for sublayer in sublayers], spec.skipped, inner or list(range(len(sublayers))), spec.every
        )

    @property
    def skipped(self) -> list[Sublayer]:
        """The sublayers that drafting skips at present."""
        return [self.sublayers[index] for index in sorted(self.search.skipped)]

    def start(self, call: Call) -> SkipDrafting:
        errors = [sublayer.error for sublayer in self.sublayers if sublayer.error is not None]
        if errors:
            call.settings.note(
                f"{len(errors)} of {len(self.needs.layers)} layers can be skipped as a whole only, as one fails without its "
                f"attention and MLP ({errors[0]})"
            )
        return SkipDrafting(self, call)

    def part(self, target: PreTrainedModel, skipped: frozenset[int]) -> PreTrainedModel:
        """The target, in the form that a call runs, without the given sublayers."""
        return without(target, self.needs.layers, self.sublayers, skipped)


class SkipDrafting(PartDrafting):
    """One `generate` with layer skipping. Keeps the target's top-1 tokens at each row's newest positions, for trials."""

    def __init__(self, drafter: SkipDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.text: Text | None = None
        self.choices: list[torch.Tensor] = []  # [at most `window`] int64 each
        self._parts: dict[frozenset[int], CachedModel] = {}

    def propose(self, text: Text, budget: int) -> Draft:
        search = self.drafter.search
        if self.text is None:
            self.text = text
            self.choices = [text.ids.new_zeros(0) for _ in range(text.rows)]
        self.open = text.unfinished
        width = self._width(text)
        if width and search.is_due():
            self._try_change(text, width)
        self.proposed = self.draft_with(self._part(search.skipped), text, budget)
        return self.proposed

    def observe(self, round: Round) -> None:
        if self.text is None:
            return
        best = top1(round.logits)
        for row in range(self.text.rows):
            new = best[row, list(round.columns(row))]
            self.choices[row] = torch.cat([self.choices[row], new])[-self.drafter.window :]
        if self.has_proposed(round):
            search, accepted = self.drafter.search, round.accepted
            for row in round.unfinished:
                search.learn(accepted[row], min(accepted[row] + 1, round.drafted[row]))
            if search.hopeless:
                self.drafter.warn_hopeless(
                    f"without {len(search.skipped)} of {len(search.shares)} sublayers",
                    search.acceptance,
                    search.cost(search.skipped),
                    "The model may be too small to skip any of its layers; choose another draft for it.",
                )

    def _part(self, skipped: frozenset[int]) -> CachedModel:
        target = self.call.target
        if skipped not in self._parts:
            self._parts.clear()  # sets that were tried before do not return
            part = self.drafter.part(target.bare.module, skipped)
            self._parts[skipped] = target.part(part, ("without", skipped))
        return self._parts[skipped]

    def _width(self, text: Text) -> int:
        """How many tokens of each row are used in a trial, about a window for all rows together; 0 if there are too few."""
        cache = self.call.target.cache
        known = min(len(self.choices[row]) for row in self.open)
        held = min(length - hidden for length, hidden in zip(cache.lengths, cache.padding, strict=True))
        width = min(known, held, max(LEAST, -(-self.drafter.window // len(self.open))))
        enough = width >= LEAST and 2 * width * len(self.open) >= self.drafter.window
        return width if enough and min(text.lengths) > width else 0

    def _try_change(self, text: Text, width: int) -> None:
        """Try one change of the set on the newest tokens and compare it with the set in use."""
        search = self.drafter.search
        candidate = search.candidate()
        ids = tokens_from(text, [length - 1 - width for length in text.lengths], width)
        wanted = torch.stack([self.choices[row][-width:] for row in self.open])
        hits = []
        for skipped in (candidate, search.skipped):
            with borrowed(self.call.target.cache, width):
                best = top1(self._part(skipped)(ids)).to(wanted.device)
            hits.append((best[self.open] == wanted).sum())
        of_candidate, of_current = torch.stack(hits).tolist()
        search.judge(candidate, of_candidate, of_current, wanted.numel())


class SkipSearch:
    """Coordinate descent over sets of sublayers, by predicted speedup.

    In random order, each sublayer is added to the set or removed from it. A change is kept if it predicts a higher speedup on
    the same tokens. As long as the predicted speedup is below 1, it is kept if it gets more tokens right instead. After a
    complete turn without a change, trials become half as frequent.

    Args:
        shares: each sublayer's share of the cost of a forward pass over one token.
        skipped: share of the sublayers in the initial set.
        inner: indices of the sublayers among which the initial set is spread.
        every: rounds between two trials at the start.

    Attributes:
        skipped: indices of the sublayers in the current set.
    """

    def __init__(self, shares: Sequence[float], skipped: float, inner: Sequence[int], every: int):
        self.shares = list(shares)
        count = min(max(1, round(skipped * len(shares))), len(inner))
        # the middle elements of `count` stretches of equal length
        self.skipped = frozenset(inner[(2 * part + 1) * len(inner) // (2 * count)] for part in range(count))
        self.gap = every
        self.rounds = 0
        self.right = DecayedMean()  # of the drafted tokens, those that were accepted
        self._random = random.Random(0)
        self._turn: list[int] = []
        self._changed = True

    def is_due(self) -> bool:
        """Whether to try a change in this round. Called once per round."""
        self.rounds += 1
        return self.rounds % self.gap == 0

    def candidate(self) -> frozenset[int]:
        """The next set to try, with one sublayer more or less than the current one."""
        turn = self._turn
        try:
            changed = turn.pop()
        except IndexError:  # not checked in advance, because another thread may take the last one
            if not self._changed:
                self.gap = min(2 * self.gap, max(self.gap, LONGEST_GAP))
            self._changed = False
            turn = self._random.sample(range(len(self.shares)), len(self.shares))
            changed = turn.pop()
            self._turn = turn
        return self.skipped ^ {changed}

    def judge(self, candidate: frozenset[int], hits: int, current_hits: int, tokens: int) -> None:
        """Adopt the candidate if it predicts a higher speedup.

        hits, current_hits: number of right tokens with the candidate and with the current set, of the same `tokens` ones.
        """
        level = (current_hits + 1) / (tokens + 2)
        if self.right.weight >= tokens:  # the drafts of many rounds are more reliable than one window
            level = self.acceptance
        changed = min(max(level + (hits - current_hits) / tokens, 0.0), 1.0)
        now = best_speedup(level, self.cost(self.skipped))
        then = best_speedup(changed, self.cost(candidate))
        if max(now, then) >= 1:
            better = then > now
        else:  # below 1, skipping everything would look best, so improve the acceptance first
            better = changed > level or (changed == level and len(candidate) < len(self.skipped))
        if better:
            self.skipped = candidate
            self.right.add(self.right.weight * (changed - level), weight=0)
            self._changed = True

    def learn(self, hits: float, trials: float) -> None:
        """`hits` of `trials` drafted tokens were accepted."""
        self.right.add(hits, trials, keep=KEEP**trials)

    @property
    def acceptance(self) -> float:
        """The estimated acceptance rate of the current set, 0.5 before any observation."""
        return min(max(self.right.mean(0.5, PRIOR), 0.0), 1.0)

    def cost(self, skipped: frozenset[int]) -> float:
        """Cost of a token drafted without these sublayers, in forward passes of the target, if reading weights dominates."""
        return max(0.01, 1 - sum(self.shares[index] for index in skipped))

    @property
    def hopeless(self) -> bool:
        """Whether no draft length gives a speedup with the current set."""
        return self.right.weight >= 2 * ENOUGH and best_speedup(self.acceptance, self.cost(self.skipped)) < 1


@contextmanager
def borrowed(cache: SlotCache, width: int) -> Iterator[None]:
    """A context in which the last `width` columns of every row may be overwritten. They are restored at its end."""
    low, high = min(cache.lengths) - width, max(cache.lengths)
    before = [store[:, :, low:high].clone() for store in cache.stores]
    known = cache.known
    cache.rewind([count - width for count in known])
    try:
        yield
    finally:
        cache.rewind(known)
        for store, held in zip(cache.stores, before, strict=True):  # a capture may have moved them
            store[:, :, low:high] = held
