"""The next-token distribution: turns logits into scores, with the caller's logits processors, and scores into probabilities.

The same code makes p (the target's distribution) and q (the draft's). Knows transformers' logits processors; nothing of
models, caches or acceptance.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import NoneType

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TopPLogitsWarper,
)

from .core.drafts import Draft
from .core.host import on_device
from .core.lossy import LossyTypical
from .core.text import Text
from .engine.libraries import processors
from .engine.trust import blamed
from .grammars.processor import Grammar, PrefixProcessor, grammar_of

# These depend on the scores alone, not on the prefix: one call processes all positions of a draft.
_PREFIX_FREE = processors(
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
# Of these, those that treat all tokens alike.
_BY_RANK = _PREFIX_FREE - processors("SuppressTokensLogitsProcessor")
# These forbid end tokens in texts that are too short: they depend on the length of the prefix alone.
_NOT_YET = processors("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")
# Stateless functions of a row's own prefix and scores: they may be called with prefixes that end in drafted tokens.
_PREFIX_READING = processors(
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)
# Those that are told how long the prompt or the whole text is.
_FOR_ONE_PROMPT = processors(
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)

COLDEST = 1e-30  # temperature; logits divided by less are no numbers of float32
_TOP_K = (32, 256)  # numbers of most probable tokens among which the nucleus is searched, in this order
_DRAWN = 1024  # positions for which numbers are drawn at a time
_ROUNDING = 2**-31  # of a sum, for each summand: ten times the largest seen in sums over 49k and 262k tokens


def require_temperature(temperature: float) -> None:
    """Raise ValueError for a temperature that makes no distribution of logits; 0 stands for greedy decoding."""
    if temperature != 0 and not COLDEST <= temperature < math.inf:
        raise ValueError(
            f"temperature: {temperature} is not possible; give at least {COLDEST}, or 0 for greedy decoding"
        )


def require_seed(seed: int, bits: int = 64) -> None:
    """Raise ValueError for a seed that torch's generators, or what is computed from it, do not take."""
    if not -(2 ** (bits - 1)) <= seed < 2**bits:
        raise ValueError(f"seed: {seed} is not possible; give an integer of at most {bits} bits")


class Draws:
    """A uniform number for each row and position of a call: what is drawn at a position then depends on its distribution alone.
    rows: batch size B. seed: None takes one number of torch's default generator."""

    def __init__(self, rows: int, seed: int | None = None):
        self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        self.numbers = torch.empty(rows, 0, dtype=torch.float64)

    def sample(self, p: torch.Tensor, lengths: Sequence[int], depths: torch.Tensor | None = None) -> torch.Tensor:
        """The first token of each distribution p, [B, k, V], whose cumulative probability is above the number of its position.

        lengths: tokens of each row. depths: [B, k - 1], how many tokens further the columns after the first are. Returns
        [B, k] int64.
        """
        positions = torch.tensor(lengths)[:, None]
        if depths is not None:
            positions = positions + torch.nn.functional.pad(depths.cpu(), (1, 0))
        while self.numbers.shape[1] <= int(positions.max()):
            more = torch.rand(len(self.numbers), _DRAWN, dtype=torch.float64, generator=self.generator)
            self.numbers = torch.cat([self.numbers, more], 1)
        sums = p.double().cumsum(-1)
        found = self.numbers.gather(1, positions).to(p.device)[..., None]
        return (sums > found * sums[..., -1:]).int().argmax(-1)


@dataclass(frozen=True)
class Distribution:
    """How the next token is chosen from the logits."""

    processors: LogitsProcessorList  # the logits processors that `generate` prepared, in order
    do_sample: bool  # draw from the distribution; otherwise take its argmax
    lossy: LossyTypical | None = None  # the inexact acceptance rule, if the caller has explicitly asked for it
    draws: Draws | None = None  # the numbers that tokens are drawn with, if these must not depend on drafts
    # those of the processors that have one, by id of the processor. They are in use once scores were computed.
    grammars: Mapping[int, Grammar] = field(default_factory=dict)
    drafts: bool = False  # for drafts, where text outside a grammar is no error

    def __post_init__(self) -> None:
        if not self.drafts:
            found = {id(processor): grammar_of(processor) for processor in self.processors}
            object.__setattr__(
                self, "grammars", {key: grammar for key, grammar in found.items() if grammar is not None}
            )

    def _is_known(self, processor: LogitsProcessor) -> bool:
        return id(processor) in self.grammars or _is_known(processor)

    def anew(self) -> Distribution:
        """The same for another text: with grammars that have read nothing."""
        own = [copy.copy(one) if id(one) in self.grammars else one for one in self.processors]
        return replace(self, processors=LogitsProcessorList(own)) if self.grammars else self

    def grammar(self, row: int) -> tuple[Grammar | None, int]:
        """A row's grammar, None if it has none, and the row's number there."""
        return next(iter(self.grammars.values()), None), row

    @property
    def may_have_grammars(self) -> bool:
        """Whether some row has a grammar, or may get one."""
        return bool(self.grammars)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether every committed prefix must be processed once, in order: a processor may depend on more than its prefix."""
        return not all(map(self._is_known, self.processors))

    @functools.cached_property
    def by_rank(self) -> bool:
        """Whether scores depend on the logits alone, not on which tokens these are of. Then the distribution over the tokens
        that a draft knows can be computed without the others."""
        return all(type(processor) in _BY_RANK for processor in self.processors)

    @functools.cached_property
    def of_logits(self) -> Hashable | None:
        """A key that is equal for distributions that compute the same, if they depend on the logits alone (`by_rank`) and are
        described by numbers; None for others."""
        own = [(type(processor), *sorted(vars(processor).items())) for processor in self.processors]
        simple = all(isinstance(value, (int, float, str, NoneType)) for _, *fields in own for _, value in fields)
        depends = self.lossy is not None or self.draws is not None or not (self.by_rank and simple)
        return None if depends else (self.do_sample, *own)

    def scores_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed scores, [..., V] -> [..., V] float32, of a distribution with `of_logits`. On the device alone."""
        scores = logits.float().flatten(0, -2)
        nothing = scores.new_zeros(len(scores), 0, dtype=torch.int64)  # no prefix
        for processor in self.processors:
            scores = processor(nothing, scores)
        return scores.view_as(logits)

    def for_draft(self) -> Distribution:
        """The distribution for drafts: without processors that must see committed prefixes only."""
        known = LogitsProcessorList(map(_apart, filter(self._is_known, self.processors)))
        return Distribution(known, self.do_sample, grammars=self.grammars, drafts=True)

    @contextmanager
    def matching(self, text: Text) -> Iterator[None]:
        """Leave the grammars as plain `generate` does. Raises ValueError if one allowed no token."""
        try:
            yield
        except RuntimeError:  # there may have been nothing to draw from
            for grammar in self.grammars.values():
                grammar.finish(text.ids, [length + 1 for length in text.lengths])
            raise
        for grammar in self.grammars.values():
            grammar.finish(text.ids, text.lengths)

    def scores(
        self,
        ids: torch.Tensor,
        lengths: list[int],
        logits: torch.Tensor,
        draft: Draft,
        rows: list[int] | None = None,
        nodes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Processed scores after the committed text and after drafted nodes.

        ids: [B, S] int64; the first `lengths[b]` tokens of row b are committed. logits: [B, k, V]; column i follows node
        `nodes[i]` of `draft`, where -1 stands for the committed text alone. rows: to process; the others keep their logits;
        None for all. nodes: None for the committed text and then all nodes in order, so that k = n + 1. Returns [B, k, V]
        float32.
        """
        if nodes is None:
            nodes = range(-1, draft.width)
        for grammar in self.grammars.values():
            grammar.begin(ids[:, : lengths[0]], logits.shape[-1])
        if rows is None or len(rows) == len(logits):
            return self._scores(ids, lengths, logits.float(), draft, nodes, range(len(logits)))
        scores = logits.to(torch.float32, copy=True)
        own_lengths = [lengths[row] for row in rows]
        scores[rows] = self._scores(ids[rows], own_lengths, scores[rows], draft.of_rows(rows), nodes, rows)
        return scores

    def _scores(
        self,
        ids: torch.Tensor,
        lengths: list[int],
        scores: torch.Tensor,
        draft: Draft,
        nodes: Sequence[int],
        rows: Sequence[int],
    ) -> torch.Tensor:
        """Processed scores of these rows of the batch; everything else is of these rows alone."""
        for processor in self.processors:
            grammar = self.grammars.get(id(processor))
            if grammar is None:
                scores = self._apply(processor, ids, lengths, scores, draft, nodes)
            else:
                paths = _paths(draft, nodes)
                scores = grammar.masked(scores, ids, lengths, rows, paths, strict=not self.drafts)
        return scores

    def ordered_scores(
        self, ids: torch.Tensor, logits: torch.Tensor, unfinished: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Scores after the committed text of equally long rows, processed exactly as in autoregressive decoding.

        ids: [B, L] int64, logits: [B, V] -> [B, V] float32. unfinished: rows to which grammars apply;
        None for all.
        """
        scores = logits.to(dtype=torch.float32, copy=True)
        if not self.grammars:
            return self.processors(ids, scores)
        own = list(range(len(ids)) if unfinished is None else unfinished)
        lengths, nothing = [ids.shape[1]] * len(own), [[()] for _ in own]
        for processor in self.processors:
            grammar = self.grammars.get(id(processor))
            if grammar is None:
                scores = processor(ids, scores)
                continue
            grammar.begin(ids, scores.shape[-1])
            scores[own] = grammar.masked(scores[own, None], ids[own], lengths, own, nothing, strict=True)[:, 0]
        return scores

    def _apply(
        self,
        processor: LogitsProcessor,
        ids: torch.Tensor,
        lengths: list[int],
        scores: torch.Tensor,
        draft: Draft,
        nodes: Sequence[int],
    ) -> torch.Tensor:
        if type(processor) is TopPLogitsWarper and scores.device.type == "cpu":
            return _nucleus(processor, ids, scores, any_of_equal=self.drafts)
        if type(processor) in _PREFIX_FREE:
            return processor(ids[:, :1], scores.flatten(0, 1)).view_as(scores)
        if type(processor) in _NOT_YET:
            return self._not_yet(processor, lengths, scores, draft, nodes)
        return _by_length(processor, _prefixes(ids, lengths, draft, nodes), scores)

    def _not_yet(
        self,
        processor: LogitsProcessor,
        lengths: list[int],
        scores: torch.Tensor,
        draft: Draft,
        nodes: Sequence[int],
    ) -> torch.Tensor:
        """Apply one of `_NOT_YET` to scores [B, k, V]; the number of operations depends on neither rows nor nodes."""
        if hasattr(processor, "min_length"):
            enough = processor.min_length
        else:
            enough = processor.prompt_length_to_skip + processor.min_new_tokens
        if min(lengths) >= enough:
            return scores
        ends = self._ends.get(id(processor))
        if ends is None:
            vocabulary = torch.arange(scores.shape[-1], device=scores.device)
            known = torch.isin(vocabulary, processor.eos_token_id.to(scores.device))
            ends = self._ends[id(processor)] = vocabulary[known]
        if max(lengths) + draft.width < enough:
            return scores.index_fill(-1, ends, -torch.inf)
        depths = torch.nn.functional.pad(draft.depths(), (1, 0))[:, [node + 1 for node in nodes]]
        early = on_device(lengths, scores.device)[:, None] + depths.to(scores.device) < enough
        return scores.index_copy(-1, ends, scores[..., ends].masked_fill(early[:, :, None], -torch.inf))

    @functools.cached_property
    def _ends(self) -> dict[int, torch.Tensor]:
        """End-of-text tokens, [e] int64, by id of the processor."""
        return {}


def _apart(one: LogitsProcessor) -> LogitsProcessor:
    """A processor for drafts. One that keeps a tensor for the vocabulary of its first scores is copied, since a head may know
    fewer tokens than its target."""
    return copy.copy(one) if isinstance(one, SequenceBiasLogitsProcessor) else one


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """[..., V] processed scores -> [..., V] float32 probabilities."""
    return torch.softmax(scores, -1)


def _nucleus(
    processor: TopPLogitsWarper, ids: torch.Tensor, scores: torch.Tensor, any_of_equal: bool = False
) -> torch.Tensor:
    """Top-p on scores [B, k, V] -> [B, k, V]. Searches the nucleus of each row among its most probable tokens first.

    The processor sorts the whole vocabulary, which takes ten times as long. Only two kinds of rows need that: the nucleus ends
    among equal scores, of which that sort chooses some, or so close to top_p that sums in another order may differ.
    any_of_equal: for drafts, which may keep others of them: in half precision, many scores are equal.
    """
    flat = scores.flatten(0, 1)
    distribution, found = probabilities(flat), torch.empty_like(flat)
    uncertain = 1e-6 + _ROUNDING * flat.shape[-1]
    rows = torch.arange(len(flat), device=flat.device)  # whose nucleus has not been found yet
    for k in _TOP_K:
        if k >= flat.shape[-1] or len(rows) == 0:
            break
        top, at = flat[rows].topk(k, -1)
        p = distribution[rows].gather(-1, at)
        before = p.cumsum(-1) - p
        kept = before < processor.top_p  # a token is kept if those before it hold less than top_p
        kept[:, : processor.min_tokens_to_keep] = True
        ends = kept[:, :-1] & ~kept[:, 1:] & (top[:, :-1] > top[:, 1:])  # NaN has no end
        sure = ends.any(-1) & ((before - processor.top_p).abs() > uncertain).all(-1)
        if any_of_equal:
            sure = kept[:, 0] & ~kept[:, -1]
        left = top.masked_fill(~kept, processor.filter_value)
        found[rows] = torch.full_like(flat[rows], processor.filter_value).scatter_(-1, at, left)
        rows = rows[~sure]
    if len(rows):
        found[rows] = processor(ids[:, :1], flat[rows])
    return found.view_as(scores)


def needs_prompt(processor: LogitsProcessor) -> bool:
    """Whether a processor was made for one prompt, or may have been."""
    ignores = getattr(processor, "prompt_ignore_length", None) is not None
    return not _is_known(processor) or type(processor) in _FOR_ONE_PROMPT or ignores


def _is_known(processor: LogitsProcessor) -> bool:
    """Whether a processor treats each row by itself. A repetition penalty with a tensor `prompt_ignore_length` does not. A
    class that somebody has patched may not."""
    if isinstance(processor, PrefixProcessor):
        return True
    of_the_batch = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    kind = type(processor)
    return kind in _PREFIX_FREE | _NOT_YET | _PREFIX_READING and not of_the_batch and blamed([kind]) is None


def _prefixes(ids: torch.Tensor, lengths: list[int], draft: Draft, nodes: Sequence[int]) -> list[list[torch.Tensor]]:
    """The prefix that ends with each of `nodes` (-1: the committed text alone), by row and node; each [L] int64."""
    return [
        [torch.cat([ids[row, :length], ids.new_tensor(draft.prefix(row, node))]) for node in nodes]
        for row, length in enumerate(lengths)
    ]


def _paths(draft: Draft, nodes: Sequence[int]) -> list[list[tuple[int, ...] | None]]:
    """The drafted tokens on the path to each of `nodes`, by row and node; None for filler."""
    if not draft.width:
        return [[()] * len(nodes) for _ in range(len(draft.lengths))]
    parents = [range(-1, draft.width - 1)] * len(draft.lengths) if draft.parents is None else draft.parents.tolist()
    found = []
    for count, tokens, above in zip(draft.lengths.tolist(), draft.tokens.tolist(), parents, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens[:count], above[:count], strict=True):
            paths.append((*paths[parent + 1], token))
        found.append([paths[node + 1] if node < count else None for node in nodes])
    return found


def _by_length(processor: LogitsProcessor, prefixes: list[list[torch.Tensor]], scores: torch.Tensor) -> torch.Tensor:
    """Apply a processor with one call per prefix length. scores: [B, k, V] -> [B, k, V]."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, of_row in enumerate(prefixes):
        for node, prefix in enumerate(of_row):
            groups[len(prefix)].append((row, node))
    processed = scores.clone()
    for members in groups.values():
        rows, nodes = zip(*members, strict=True)
        text = torch.stack([prefixes[row][node] for row, node in members])
        processed[list(rows), list(nodes)] = processor(text, scores[list(rows), list(nodes)])
    return processed
