"""The next-token distribution: turns logits into scores, with the caller's logits processors, and scores into probabilities.

The same code makes p (the target's distribution) and q (the draft's). Knows transformers' logits processors; nothing of
models, caches or acceptance.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from .drafts import Draft
from .engine.host import on_device
from .engine.libraries import processors
from .engine.trust import blamed
from .lossy import LossyTypical

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
)
# Those that are told how long the prompt or the whole text is.
_FOR_ONE_PROMPT = processors(
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)

_TOP_K = (32, 256)  # numbers of most probable tokens among which the nucleus is searched, in this order
_ROUNDING = 2**-31  # of a sum, for each summand: ten times the largest seen in sums over 49k and 262k tokens


@dataclass(frozen=True)
class Distribution:
    """How the next token is chosen from the logits.

    Args:
        processors: the logits processors that `generate` prepared, in order.
        do_sample: draw from the distribution; otherwise take its argmax.
        lossy: the inexact acceptance rule, if the caller has explicitly asked for it.
    """

    processors: LogitsProcessorList
    do_sample: bool
    lossy: LossyTypical | None = None

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether every committed prefix must be processed once, in order: a processor may depend on more than its prefix."""
        return not all(map(_is_known, self.processors))

    def for_draft(self) -> Distribution:
        """The distribution for drafts: without processors that must see committed prefixes only."""
        return Distribution(LogitsProcessorList(filter(_is_known, self.processors)), self.do_sample)

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
        if rows is not None and len(rows) < len(logits):
            scores = logits.to(torch.float32, copy=True)
            own_lengths = [lengths[row] for row in rows]
            scores[rows] = self.scores(ids[rows], own_lengths, logits[rows], draft.of_rows(rows), nodes=nodes)
            return scores
        scores = logits.float()
        for processor in self.processors:
            scores = self._apply(processor, ids, lengths, scores, draft, nodes)
        return scores

    def ordered_scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores after the committed text of equally long rows, processed exactly as in autoregressive decoding.

        ids: [B, L] int64, logits: [B, V] -> [B, V] float32.
        """
        return self.processors(ids, logits.to(dtype=torch.float32, copy=True))

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
            return _nucleus(processor, ids, scores)
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


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """[..., V] processed scores -> [..., V] float32 probabilities."""
    return torch.softmax(scores, -1)


def _nucleus(processor: TopPLogitsWarper, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Top-p on scores [B, k, V] -> [B, k, V]. Searches the nucleus of each row among its most probable tokens first.

    The processor sorts the whole vocabulary, which takes ten times as long. Only two kinds of rows need that: the nucleus ends
    among equal scores, of which that sort chooses some, or so close to top_p that sums in another order may differ.
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
    of_the_batch = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    kind = type(processor)
    return kind in _PREFIX_FREE | _NOT_YET | _PREFIX_READING and not of_the_batch and blamed([kind]) is None


def _prefixes(ids: torch.Tensor, lengths: list[int], draft: Draft, nodes: Sequence[int]) -> list[list[torch.Tensor]]:
    """The prefix that ends with each of `nodes` (-1: the committed text alone), by row and node; each [L] int64."""
    return [
        [torch.cat([ids[row, :length], ids.new_tensor(draft.prefix(row, node))]) for node in nodes]
        for row, length in enumerate(lengths)
    ]


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
