"""Logits processors with a grammar: which are recognised, and the masks of all rows during one `generate`.

Nothing of models or drafts. `distribution.py` applies the masks, `methods/grammar.py` guesses with them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessor

from ..engine.libraries import GRAMMARS
from .matcher import Place, XGrammar, masked, matcher_of


class PrefixProcessor(LogitsProcessor):
    """Marks a logits processor whose scores of a row depend only on that row's `input_ids` and scores.

    Derive from it if `__call__` keeps no state: then all positions of a draft are processed in a few calls, whose rows end in
    drafted tokens, also in ones that are rejected later. Any other processor sees each committed prefix once, in order, which
    keeps the rows of a batch in lockstep. A processor with state that can be taken back is a `GrammarProcessor`.
    """


class GrammarProcessor(LogitsProcessor):
    """Restricts text to a grammar, in any `generate`: `GrammarProcessor(lambda: llguidance.LLMatcher(tokenizer, grammar))`.

    Serves one call, like xgrammar's processors: make a new one for every call, or `reset` it.

    Args:
        make: called once for each row of the batch. Returns a new `llguidance.LLMatcher`, `xgrammar.GrammarMatcher`,
            `outlines_core.Guide`, or `Matcher` of your own, at its beginning. An xgrammar matcher may terminate without a stop
            token: then one must follow, so that the text ends there.
    """

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.reset()

    def reset(self) -> None:
        """Forget the text, for another call."""
        self.matchers: list[Any] = []
        self.rows: list[Place] = []
        self.length = 0  # tokens of the rows in the last call

    def begin(self, rows: int) -> None:
        """Make the matchers. They start after the prompt. Raises ValueError if two rows get the same one."""
        made = [self.make() for _ in range(rows)]
        if len(set(map(id, made))) < rows:
            raise ValueError(
                "make: two rows of the batch got the same matcher; it is called once for each row, and must return a new one"
            )
        self.matchers = made
        self.rows = [Place(matcher_of(matcher)) for matcher in self.matchers]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid tokens after the text. input_ids: [B, L] int64, the text and one more token. scores: [B, V] float32.

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
        return masked(scores[:, None], masks, self.rows[0].matcher)[:, 0]


def grammar_of(processor: Any) -> Grammar | None:
    """The grammar of a logits processor that has not been called yet; None if it is of another kind, changed or in use.

    What a processor does that is in use depends on its past, so it is called as plain `generate` calls it.
    """
    if type(processor) is GrammarProcessor:
        return None if processor.matchers else Grammar(processor, "matchers")
    for (home, name), (matchers, attribute, value) in GRAMMARS.items():
        module = sys.modules.get(home)
        if module is not None and type(processor) is getattr(module, name, None):
            is_fresh = getattr(processor, attribute, None) is value
            return Grammar(processor, matchers) if is_fresh and _is_as_made(processor, module) else None
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

    Attributes:
        raised: by row, what its matcher raised after drafted tokens. Without drafts, it may go on.
    """

    def __init__(self, processor: Any, matchers: str):
        self.processor, self.matchers = processor, matchers
        self.rows: list[Place] = []
        self.start = self.size = 0  # the prompt's length, and the vocabulary size
        self.raised: dict[int, Exception] = {}

    def begin(self, prompt: torch.Tensor, size: int) -> None:
        """Start after a prompt, [B, P] int64, at the first call. size: of the vocabulary."""
        if not self.rows:
            self.start, self.size = prompt.shape[1], size
            self.processor(prompt, torch.zeros(len(prompt), size, device=prompt.device))
            if isinstance(self.processor, GrammarProcessor):
                self.rows = self.processor.rows
            else:
                self.rows = [Place(matcher_of(matcher)) for matcher in getattr(self.processor, self.matchers)]
            for row in self.rows:
                if isinstance(row.matcher, XGrammar):
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
        paths: Sequence[Sequence[tuple[int, ...] | None]],
        strict: bool,
    ) -> torch.Tensor:
        """Scores with -inf for forbidden tokens. After drafted tokens that are forbidden themselves, nothing changes.

        scores: [B, k, V]. ids: [B, S], lengths: of the same rows. rows: their numbers in the batch. paths: the drafted tokens
        before each of the k columns, by row; None for a column that nobody reads.
        """
        masks = []
        for row, own, length, of_row in zip(rows, ids, lengths, paths, strict=True):
            try:
                self.read(row, own, length)
                masks.append([None if path is None else self.mask(row, path, strict) for path in of_row])
            except Exception as error:  # of a library, or of the caller's matcher
                if strict:
                    raise
                self.raised[row] = error
                masks.append([None] * len(of_row))
        return masked(scores, masks, self.rows[0].matcher)

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
