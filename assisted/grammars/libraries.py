"""The matchers of xgrammar, llguidance and outlines_core as matchers of this package, without importing these libraries."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .matcher import Matcher, unpacked


class XGrammar(Matcher):
    """xgrammar.GrammarMatcher. After its stop token, xgrammar's processor repeats the mask that allowed it.

    A matcher that terminates without a stop token reads none. Here, one must follow, because only that ends the text.
    """

    open_ended = True  # xgrammar leaves the logits after its mask as they are
    ended = False  # type: ignore[assignment]

    size: int | None = None  # that it was compiled for; None if that is the size of the logits

    def __init__(self, matcher: Any):
        self.matcher, self.last = matcher, 0
        self.unread = False  # whether the stop token followed a matcher that had terminated without it

    def allowed(self, size: int) -> torch.Tensor:
        size, terminated = self.size or size, self.matcher.is_terminated()
        if terminated and (self.unread or not self.ended):
            return torch.isin(torch.arange(size), torch.tensor(self.matcher.stop_token_ids))
        mask = torch.full((1, -(-size // 32)), -1, dtype=torch.int32)
        if terminated:
            self.matcher.rollback(1)
        try:
            self.matcher.fill_next_token_bitmask(mask)
        except RuntimeError as error:  # its own says how many words of 32 tokens it wants
            raise ValueError(
                f"make: this xgrammar.GrammarMatcher is for a vocabulary of another size than the {size} logits; give "
                "vocab_size=model.config.vocab_size to TokenizerInfo.from_huggingface"
            ) from error
        if terminated:
            self.matcher.accept_token(self.last)
        return mask[0]

    def advance(self, token: int) -> bool:
        if self.matcher.is_terminated():
            self.ended = self.unread = token in self.matcher.stop_token_ids  # type: ignore[misc]
            return self.ended
        if not self.matcher.accept_token(token):
            return False
        self.last = token
        self.ended = token in self.matcher.stop_token_ids and self.matcher.is_terminated()  # type: ignore[misc]
        return True

    def rollback(self, count: int) -> None:
        count -= self.unread
        self.ended = self.unread = False  # type: ignore[misc]
        if count:
            self.matcher.rollback(count)


class LLGuidance(Matcher):
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
            if token not in unpacked(self.allowed(0)).nonzero():
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


class OutlinesCore(Matcher):
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
    ("xgrammar", "GrammarMatcher"): XGrammar,
    ("llguidance", "LLMatcher"): LLGuidance,
    ("outlines_core", "Guide"): OutlinesCore,
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
        f"make: {type(matcher).__name__} is not a matcher; return a subclass of assisted.grammars.Matcher or one of {known}"
    )
