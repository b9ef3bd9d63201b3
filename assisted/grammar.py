"""Grammars: logits processors that forbid tokens by what a row has written so far, with masks for every node of a draft.

Knows matchers, which accept a token and take it back, and the processors of xgrammar and outlines, without importing these
libraries. Nothing of models or drafts; `distribution.py` applies the masks, `drafters/grammar.py` guesses with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessor

__all__ = ["GrammarProcessor", "Matcher", "PrefixProcessor"]


class PrefixProcessor(LogitsProcessor):
    """Marks a logits processor whose scores of a row depend on that row's `input_ids` and scores alone.

    Derive from it if `__call__` keeps no state: then all positions of a draft are processed in a few calls, whose rows end in
    drafted tokens, also in ones that are rejected later. Any other processor sees each committed prefix once, in order, which
    keeps the rows of a batch in lockstep. A processor with state that can be taken back is a `GrammarProcessor`.
    """


class Matcher:
    """Where one row is in a grammar. Derive from it for a grammar of your own; see `GrammarProcessor`."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete, so that nothing changes this state: the end token was accepted, say."""
        raise NotImplementedError

    def allowed(self, size: int) -> torch.Tensor:
        """The tokens that may come next: [at most size] bool, or a bit mask, [at most ceil(size / 32)] int32, on the CPU.

        size: vocabulary size of the logits. Tokens after the end of the mask are forbidden. No token at all is an error. Also
            asked once the text has ended, where `generate` has no end token or another one.
        """
        raise NotImplementedError

    def advance(self, token: int) -> bool:
        """Go on with a token. False if it is not allowed; the state is then as before."""
        raise NotImplementedError

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""
        raise NotImplementedError

    def settle(self) -> None:
        """The text so far was committed, and will not be taken back. Does nothing by default."""


class GrammarProcessor(LogitsProcessor):
    """Restricts text to a grammar, in any `generate`: `GrammarProcessor(lambda: llguidance.LLMatcher(tokenizer, grammar))`.

    Of use once, as the processors of xgrammar are: make one for every call, or `reset` it.

    Args:
        make: called once for each row of the batch. Returns an `llguidance.LLMatcher`, an `xgrammar.GrammarMatcher`, an
            `outlines_core.Guide`, or a `Matcher` of your own, at its beginning.
    """

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.reset()

    def reset(self) -> None:
        """Forget the text, for another call."""
        self.matchers: list[Any] = []
        self.rows: list[_Row] = []
        self.length = 0  # tokens of the rows in the last call

    def begin(self, rows: int) -> None:
        """Make the matchers. They start after the prompt."""
        self.matchers = [self.make() for _ in range(rows)]
        self.rows = [_Row(matcher_of(matcher)) for matcher in self.matchers]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid tokens after the text. input_ids: [B, L], with the tokens accepted so far and one more. scores: [B, V].

        Raises ValueError if the rows are not those of the last call with one more token, or if no token is allowed.
        """
        if not self.matchers:
            self.begin(len(input_ids))
        elif input_ids.shape[1] != self.length + 1 or len(input_ids) != len(self.rows):
            raise ValueError(
                f"logits_processor: this GrammarProcessor has seen {len(self.rows)} rows of {self.length} tokens, and was "
                f"given {len(input_ids)} of {input_ids.shape[1]}; make one for every call of generate, or call reset()"
            )
        else:
            for row, token in zip(self.rows, input_ids[:, -1].tolist(), strict=True):
                row.commit([token])
        self.length = input_ids.shape[1]
        strict = len(self.rows) == 1  # of several rows, those that have ended are padded
        masks = [[row.mask((), scores.shape[-1], strict or row.outside is None)] for row in self.rows]
        return _masked(scores[:, None], masks, self.rows[0].matcher)[:, 0]


class _XGrammar(Matcher):
    """xgrammar.GrammarMatcher. After its stop token, xgrammar's processor repeats the mask that allowed it."""

    open_ended = True  # xgrammar leaves the logits after its mask as they are

    size: int | None = None  # that it was compiled for; None if that is the size of the logits

    def __init__(self, matcher: Any):
        self.matcher, self.last = matcher, 0

    @property
    def ended(self) -> bool:
        return bool(self.matcher.is_terminated())

    def allowed(self, size: int) -> torch.Tensor:
        mask = torch.full((1, -(-(self.size or size) // 32)), -1, dtype=torch.int32)
        if ended := self.ended:
            self.matcher.rollback(1)
        self.matcher.fill_next_token_bitmask(mask)
        if ended:
            self.matcher.accept_token(self.last)
        return mask[0]

    def advance(self, token: int) -> bool:
        if not self.matcher.accept_token(token):
            return False
        self.last = token
        return True

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)


class _LLGuidance(Matcher):
    """llguidance.LLMatcher. What it takes back does not always include an end token, so those are read by a copy."""

    ended = False  # type: ignore[assignment]

    def __init__(self, matcher: Any):
        self.matcher = matcher
        self.before: list[Any] = []  # for each accepted token, the matcher before it if it was put aside

    def allowed(self, size: int) -> torch.Tensor:
        if self.matcher.is_error():
            raise ValueError(f"logits_processor: llguidance cannot go on: {self.matcher.get_error().splitlines()[0]}")
        return torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.int32)

    def advance(self, token: int) -> bool:
        before, matcher = None, self.matcher
        if matcher.is_error():
            return False
        if matcher.is_accepting():
            before, matcher = matcher, matcher.deep_copy()
        if matcher.is_stopped():  # an end token is all that may follow, and changes nothing
            if token not in _unpacked(self.allowed(0)).nonzero():
                return False
            self.ended = True  # type: ignore[misc]
        elif matcher.try_consume_tokens([token]) != 1:
            return False
        self.matcher = matcher
        self.before.append(before)
        return True

    def rollback(self, count: int) -> None:
        self.ended = False  # type: ignore[misc]
        for _ in range(count):
            before = self.before.pop()
            if before is None:
                self.matcher.rollback(1)
            else:
                self.matcher = before

    def settle(self) -> None:
        self.before.clear()  # a copy takes some 50 kB


class _OutlinesCore(Matcher):
    """outlines_core.Guide, which takes back 32 tokens by default and has no state after the end token."""

    ended = False  # type: ignore[assignment]

    def __init__(self, matcher: Any):
        self.matcher = matcher
        self.tokens: list[int] = []

    def allowed(self, size: int) -> torch.Tensor:
        mask = torch.zeros(-(-size // 32), dtype=torch.int32)
        self.matcher.write_mask_into(mask.data_ptr(), mask.numel(), mask.element_size())
        return mask

    def advance(self, token: int) -> bool:
        if self.matcher.accepts_tokens([token]):
            self.matcher.advance(token, False)
            self.tokens.append(token)
        elif self.matcher.is_finished() and token in self.matcher.get_tokens():
            self.ended = True  # type: ignore[misc]
        else:
            return False
        return True

    def rollback(self, count: int) -> None:
        count -= self.ended
        self.ended = False  # type: ignore[misc]
        del self.tokens[len(self.tokens) - count :]
        if count <= self.matcher.get_allowed_rollback():
            self.matcher.rollback_state(count)
        else:
            self.matcher.reset()
            for token in self.tokens:
                self.matcher.advance(token, False)


_MATCHERS: dict[tuple[str, str], type[Any]] = {  # by package and class
    ("xgrammar", "GrammarMatcher"): _XGrammar,
    ("llguidance", "LLMatcher"): _LLGuidance,
    ("outlines_core", "Guide"): _OutlinesCore,
}


def matcher_of(matcher: Any) -> Matcher:
    """A library's matcher as a `Matcher`. Raises ValueError for an object of another kind."""
    if isinstance(matcher, Matcher):
        return matcher
    for (package, name), kind in _MATCHERS.items():
        library = sys.modules.get(package)
        if library is not None and type(matcher) is getattr(library, name, None):
            adapted: Matcher = kind(matcher)
            return adapted
    known = ", ".join(f"{package}.{name}" for package, name in _MATCHERS)
    raise ValueError(
        f"make: {type(matcher).__name__} is not a matcher; return a subclass of assisted.grammar.Matcher or one of {known}"
    )


@dataclass(frozen=True)
class _Kind:
    """A library's logits processor.

    Args:
        matchers: its attribute with the matchers of all rows, which its first call fills.
        fresh: its attribute that shows whether it has been called, and the value before that.
    """

    matchers: str
    fresh: tuple[str, bool]


_PROCESSORS = {  # by module and class
    ("xgrammar.contrib.hf", "LogitsProcessor"): _Kind("matchers", ("prefilled", False)),
    ("outlines.backends.xgrammar", "XGrammarLogitsProcessor"): _Kind("_matchers", ("is_first_token", True)),
    ("outlines.backends.llguidance", "LLGuidanceLogitsProcessor"): _Kind("ll_matchers", ("is_first_token", True)),
    ("outlines.backends.outlines_core", "OutlinesCoreLogitsProcessor"): _Kind("_guides", ("is_first_token", True)),
}


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar of a logits processor that has not been called yet; None if it is of another kind, changed or in use.

    What a processor does that is in use depends on its past, so it is called as plain `generate` calls it.
    """
    if type(processor) is GrammarProcessor:
        return None if processor.matchers else Grammar(processor, "matchers")
    for (home, name), kind in _PROCESSORS.items():
        module = sys.modules.get(home)
        if module is not None and type(processor) is getattr(module, name, None):
            attribute, value = kind.fresh
            is_fresh = getattr(processor, attribute, None) is value
            return Grammar(processor, kind.matchers) if is_fresh and _is_as_made(processor, module) else None
    return None


def _is_as_made(processor: Any, module: ModuleType) -> bool:
    """Whether the code that processes the scores is the library's own, in this object and its class."""
    package = os.path.dirname(str(sys.modules[module.__name__.split(".")[0]].__file__))
    functions = [getattr(type(processor), name, None) for name in ("__call__", "process_logits")]
    own = all(f is None or f.__code__.co_filename.startswith(package) for f in functions)
    return own and not {"__call__", "process_logits"} & vars(processor).keys()


class Grammar:
    """A grammar's processor during one `generate`: where each row is, and what may come after it and after drafted tokens.

    Args:
        processor: the caller's. It is called once, with the prompt, which makes its matchers; then these are moved.
        matchers: its attribute with them. In the end they are where plain `generate` leaves them.
    """

    def __init__(self, processor: Any, matchers: str):
        self.processor, self.matchers = processor, matchers
        self.rows: list[_Row] = []
        self.start = self.size = 0  # the prompt's length, and the vocabulary size

    def begin(self, prompt: torch.Tensor, size: int) -> None:
        """Start after a prompt, [B, P] int64, at the first call. size: of the vocabulary."""
        if not self.rows:
            self.start, self.size = prompt.shape[1], size
            self.processor(prompt, torch.zeros(len(prompt), size, device=prompt.device))
            if isinstance(self.processor, GrammarProcessor):
                self.rows = self.processor.rows
            else:
                self.rows = [_Row(matcher_of(matcher)) for matcher in getattr(self.processor, self.matchers)]
            for row in self.rows:
                if isinstance(row.matcher, _XGrammar):
                    row.matcher.size = getattr(self.processor, "full_vocab_size", None)

    def read(self, row: int, ids: torch.Tensor, length: int) -> None:
        """Take in the first `length` tokens of a row, which are committed. ids: [S] int64 of the row."""
        place = self.rows[row]
        if new := ids[self.start + place.committed : length].tolist():
            place.commit(new)

    def mask(self, row: int, path: tuple[int, ...], strict: bool = False) -> torch.Tensor | None:
        """The tokens that may follow a row's committed text and drafted tokens, [at most V] bool; None if these are not in the
        grammar. strict: raise ValueError if the committed text is not, or if nothing may follow it."""
        return self.rows[row].mask(path, self.size, strict)

    def is_over(self, row: int, path: tuple[int, ...]) -> bool:
        """Whether a row's text ends with these drafted tokens."""
        place = self.rows[row]
        return place.go(path) == len(path) and place.matcher.ended

    def known(self, row: int, path: tuple[int, ...]) -> torch.Tensor | None:
        """As `mask`, if it has been computed since the committed text was last read; otherwise None."""
        return self.rows[row].masks.get(path)

    def masked(
        self,
        scores: torch.Tensor,
        ids: torch.Tensor,
        lengths: list[int],
        rows: Sequence[int],
        paths: Sequence[Sequence[tuple[int, ...]]],
        strict: bool,
    ) -> torch.Tensor:
        """Scores with -inf for forbidden tokens. After drafted tokens that are forbidden themselves, nothing changes.

        scores: [B, k, V]. ids: [B, S], lengths: of the same rows. rows: their numbers in the batch. paths: the drafted tokens
        before each of the k columns, by row.
        """
        masks = []
        for row, own, length, of_row in zip(rows, ids, lengths, paths, strict=True):
            self.read(row, own, length)
            masks.append([self.mask(row, path, strict) for path in of_row])
        return _masked(scores, masks, self.rows[0].matcher)

    def finish(self, ids: torch.Tensor, lengths: list[int]) -> None:
        """Leave the matchers before the last token of the batch, as plain `generate` does.

        Raises ValueError if a row came to a place where no token is allowed.
        """
        if not self.rows:
            return
        for row, (place, length) in enumerate(zip(self.rows, lengths, strict=True)):
            self.read(row, ids[row], max(self.start, min(length, max(lengths) - 1)))
            place.mask((), self.size, strict=True)
            place.go(())
            getattr(self.processor, self.matchers)[row] = getattr(place.matcher, "matcher", place.matcher)
        if isinstance(self.processor, GrammarProcessor):
            self.processor.length = max(lengths) - 1


class _Row:
    """Where one row's matcher is: after the committed tokens and perhaps some drafted ones.

    Attributes:
        tokens: those that it has read. moved: whether each of them changed its state; after the end, none does.
        committed: number of committed ones.
        outside: the first committed token that it rejected.
    """

    def __init__(self, matcher: Matcher):
        self.matcher = matcher
        self.tokens: list[int] = []
        self.moved: list[bool] = []
        self.committed = 0
        self.outside: int | None = None
        self.masks: dict[tuple[int, ...], torch.Tensor | None] = {}  # by drafted tokens after the committed ones

    def commit(self, new: Sequence[int]) -> None:
        if self.outside is None:
            reached = self.go(tuple(new))
            if reached < len(new):
                self.outside = new[reached]
            self.committed += reached
            self.masks = {}
            self.matcher.settle()

    def go(self, path: tuple[int, ...]) -> int:
        """Move to drafted tokens after the committed ones, as far as they are allowed. Returns how many are."""
        here = self.tokens[self.committed :]
        same = next((i for i, (a, b) in enumerate(zip(here, path, strict=False)) if a != b), min(len(here), len(path)))
        kept = self.committed + same
        if back := sum(self.moved[kept:]):
            self.matcher.rollback(back)
        del self.tokens[kept:], self.moved[kept:]
        for number, token in enumerate(path[same:], start=same):
            moves = not self.matcher.ended
            if moves and not self.matcher.advance(token):
                return number
            self.tokens.append(token)
            self.moved.append(moves)
        return len(path)

    def mask(self, path: tuple[int, ...], size: int, strict: bool = False) -> torch.Tensor | None:
        """As `Grammar.mask`."""
        if path not in self.masks:
            inside = self.outside is None and self.go(path) == len(path)
            self.masks[path] = _unpacked(self.matcher.allowed(size))[:size] if inside else None
        mask = self.masks[path]
        if strict and self.outside is not None:
            self.go(())
            if bool(_unpacked(self.matcher.allowed(size)).any()):
                raise ValueError(
                    f"logits_processor: the grammar does not allow token {self.outside}, which another logits processor "
                    "forced, or which its vocabulary lacks; make it for the size of the logits, model.config.vocab_size"
                )
        if strict and not path and (mask is None or not bool(mask.any())):
            raise ValueError(
                f"logits_processor: the grammar allows no token of this vocabulary after {self.committed} new tokens, so no "
                "text satisfies it from there; check the grammar or schema, and that it was compiled for this tokenizer"
            )
        return mask


def _unpacked(mask: torch.Tensor) -> torch.Tensor:
    """A mask as [n] bool; a bit mask is [ceil(n / 32)] int32, lowest bit first."""
    if mask.dtype == torch.bool:
        return mask
    bits = torch.arange(32, dtype=torch.int32)
    return ((mask[:, None] >> bits) & 1).bool().flatten()


def _masked(scores: torch.Tensor, masks: Sequence[Sequence[torch.Tensor | None]], matcher: Matcher) -> torch.Tensor:
    """Scores [B, k, V] with -inf where masks, [at most V] bool by row and column, forbid a token. None forbids nothing."""
    size, allowed = scores.shape[-1], torch.ones(scores.shape, dtype=torch.bool)
    for row, of_row in enumerate(masks):
        for column, mask in enumerate(of_row):
            if mask is not None:
                allowed[row, column, : len(mask)] = mask
                if len(mask) < size and not getattr(matcher, "open_ended", False):
                    allowed[row, column, len(mask) :] = False
    return scores.masked_fill(~allowed.to(scores.device), -torch.inf)
