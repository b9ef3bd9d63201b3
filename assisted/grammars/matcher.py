"""Where a row is in a grammar: the interface of matchers, and one that is moved along drafts with the masks on its way."""

from __future__ import annotations

from collections.abc import Sequence

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
