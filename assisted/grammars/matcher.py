"""Where a row is in a grammar: the interface of matchers, and one that is moved along drafts with the masks on its way;
and the matchers of grammar libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


class Matcher:
    """Where one row is in a grammar. Derive from it for a grammar of your own; see `GrammarProcessor`."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete, so that nothing changes this state: the end token was accepted, say."""
        raise NotImplementedError

    def allowed(self, size: int) -> torch.Tensor:
        """The tokens that may come next: [at most size] bool, or a bit mask, [at most ceil(size / 32)]
        int32, on the CPU.

        size: vocabulary size of the logits. Tokens after the end of the mask are forbidden. No token at all is an error. Also
            asked once the text has ended, where `generate` has no end token or another one.

        Raises ValueError if the grammar cannot go on.
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


class Place:
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
            self.masks[path] = unpacked(self.matcher.allowed(size))[:size] if inside else None
        mask = self.masks[path]
        if strict and self.outside is not None:
            self.go(())
            if bool(unpacked(self.matcher.allowed(size)).any()):
                raise ValueError(
                    f"logits_processor: the grammar does not allow token {self.outside}, which another logits processor "
                    "forced, or which its vocabulary lacks; make it for the size of the logits, model.config.vocab_size"
                )
        if strict and not path and (mask is None or not bool(mask.any())):
            raise ValueError(
                f"logits_processor: the grammar allows no token of this vocabulary after {self.committed} new tokens, so no "
                "text satisfies it from there; check the grammar or schema, and that it was compiled for this tokenizer and "
                "knows its end token"
            )
        return mask


def unpacked(mask: torch.Tensor) -> torch.Tensor:
    """A mask as [n] bool; a bit mask is [ceil(n / 32)] int32, lowest bit first."""
    if mask.dtype == torch.bool:
        return mask
    bits = torch.arange(32, dtype=torch.int32)
    return ((mask[:, None] >> bits) & 1).bool().flatten()


def masked(scores: torch.Tensor, masks: Sequence[Sequence[torch.Tensor | None]], matcher: Matcher) -> torch.Tensor:
    """Scores [B, k, V] with -inf where masks, [at most V] bool by row and column, forbid a token. None forbids nothing."""
    size, allowed = scores.shape[-1], torch.ones(scores.shape, dtype=torch.bool)
    for row, of_row in enumerate(masks):
        for column, mask in enumerate(of_row):
            if mask is not None:
                allowed[row, column, : len(mask)] = mask
                if len(mask) < size and not getattr(matcher, "open_ended", False):
                    allowed[row, column, len(mask) :] = False
    return scores.masked_fill(~allowed.to(scores.device), -torch.inf)


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
    """llguidance.LLMatcher. What it takes back does not always include an end token, so those are read by a copy. It takes back
    nothing in grammars with `max_tokens=` or `stop=` (1.9), so there, copies read all tokens.
    """

    ended = False  # type: ignore[assignment]
    takes_back: bool | None = None  # None before the first token, as only then it can be tried

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
        if matcher.is_accepting() or not self.takes_back:
            before, matcher = matcher, matcher.deep_copy()
        if matcher.is_stopped():  # an end token is all that may follow, and changes nothing
            if token not in unpacked(self.allowed(0)).nonzero():
                return False
            self.ended = True  # type: ignore[misc]
        elif matcher.try_consume_tokens([token]) != 1:
            return False
        elif self.takes_back is None:
            trial = matcher.deep_copy()
            trial.rollback(1)
            self.takes_back = not trial.is_error()
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
            return kind(matcher)
    known = ", ".join(f"{package}.{name}" for package, name in _MATCHERS)
    raise ValueError(
        f"make: {type(matcher).__name__} is not a matcher; return a subclass of assisted.grammars.Matcher or one of {known}"
    )
