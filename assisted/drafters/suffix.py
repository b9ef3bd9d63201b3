"""Suffix decoding (2411.04975): what followed the same words before, in this text and in texts given beforehand.

Knows a tree of counts a row and the choice between its match lengths; needs no model and no training.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..drafts import Draft, Round
from ..lengths.faded import Faded
from ..text import Text
from .base import Call, Drafter, Spec, Target
from .lookup import NOTHING, Lookup, Proposal
from .suffix_tree import Continuation, Point, SuffixTree

__all__ = ["Suffix", "SuffixDrafter"]

REMEMBERED = 1 << 17  # tokens of past outputs that are kept
MEMORY = 0.95  # share of the past in how often the counts were right
PRIOR = 4.0  # tokens that the counts promised, half of which came: what is taken for measured at first


@dataclass(frozen=True)
class Suffix(Spec):
    """Copies what most often followed the last tokens: `"suffix"`, the default where no draft is named.

    For every length at which the end of the text occurred before, the most frequent continuation is followed; the one with
    the most expected tokens is proposed. Needs no second model and next to no time.

    Args:
        max_match: longest match that is looked for, in tokens. Longer tells apart more of a text that repeats almost, and
            costs time and memory in proportion where it repeats.
        min_probability: stop before a token that followed less often than this. Lower pays where the target checks many
            tokens for the price of one.
        per_match: most tokens proposed for each token matched (alpha in the paper): a long match deserves a long proposal.
        tree: propose the most probable continuations as a token tree instead of the best chain, where the target can
            verify trees. A few percent more tokens a pass, for about as many more columns: worth it where columns are free.
        nodes: of the tree.
        corpus: texts to look up beside the row's own, as strings (the target's tokenizer reads them) or ids: earlier
            answers, the code base at hand. Read once when the drafter is loaded; not saved with the pair.
        remember: look up past outputs of this model object, too. Off by default: how fast one text comes then tells what
            is in another one, so do not share such a model between users who must not learn of each other. Earlier calls
            never change what is generated, only how fast.
    """

    name: ClassVar[str] = "suffix"
    trained: ClassVar[bool | None] = False
    trees: ClassVar[bool | None] = True
    has_q: ClassVar[bool | None] = False

    max_match: int = 24
    min_probability: float = 0.1
    per_match: float = 3.0
    tree: bool = False
    nodes: int = 8
    corpus: Sequence[str | Sequence[int]] | None = field(default=None, metadata={"saved": False})
    remember: bool = False

    def __post_init__(self) -> None:
        if self.max_match < 1:
            raise ValueError(f"max_match: {self.max_match} matches nothing; give 1 or more")
        if not 0 < self.min_probability <= 1:
            raise ValueError(f"min_probability: {self.min_probability} is not possible; give more than 0, at most 1")
        if self.per_match <= 0:
            raise ValueError(f"per_match: {self.per_match} proposes nothing; give more than 0")
        if self.nodes < 1:
            raise ValueError(f"nodes: {self.nodes} is no tree; give 1 or more")
        if isinstance(self.corpus, str):
            raise ValueError("corpus: one string; give a list of texts")

    @classmethod
    def named(cls, rest: str) -> Suffix:
        """The spec behind `"suffix"`."""
        if rest:
            raise ValueError(f"draft: 'suffix:{rest}' is not known; write 'suffix', or Suffix(...) for its options")
        return cls()

    def load(self, target: Target, **kwargs: Any) -> SuffixDrafter:
        """Read the corpus, if there is one.

        Raises ValueError for texts without a tokenizer to read them, and for ids that the target does not know.
        """
        size = target.model.config.get_text_config(decoder=True).vocab_size
        texts = [_ids(text, target, size) for text in self.corpus or ()]
        return SuffixDrafter(self, texts)


def _ids(text: str | Sequence[int], target: Target, size: int) -> list[int]:
    if isinstance(text, str):
        if target.tokenizer is None:
            raise ValueError("corpus: texts need the target's tokenizer; pass tokenizer=, or give ids")
        tokenizer: Any = target.tokenizer
        text = tokenizer(text, add_special_tokens=False).input_ids
    ids = [int(token) for token in text]
    for token in ids:
        if not 0 <= token < size:
            raise ValueError(f"corpus: {token} is no token of the target, which has {size}")
    return ids


class SuffixDrafter(Drafter):
    """The texts that all calls look up: the corpus, and past outputs where they are remembered.

    Args:
        spec: the options.
        corpus: token ids of the texts given beforehand.
    """

    def __init__(self, spec: Suffix, corpus: Iterable[list[int]] = ()):
        self.spec = spec
        self.depth = spec.max_match + 1  # a match and the token behind it
        self.corpus = self._tree(corpus)
        self.past: SuffixTree | None = self._tree(()) if spec.remember else None
        self.lock = threading.Lock()  # past outputs: one call may add to them while another one reads

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made from: its own lock."""
        with self.lock:
            past = copy.deepcopy(self.past)  # another call may go on adding to it
        return {**self.__dict__, "past": past, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.Lock())

    def start(self, call: Call) -> SuffixDrafting:
        return SuffixDrafting(self, call)

    def remember(self, outputs: Iterable[list[int]]) -> None:
        """Add finished outputs to those that later calls look up. The oldest half is forgotten when there are too many."""
        if self.past is None:
            return
        with self.lock:
            if len(self.past.text) > REMEMBERED:
                fresh = SuffixTree(self.depth)
                for token in self.past.text[-REMEMBERED // 2 :]:
                    fresh.end() if token < 0 else fresh.append(token)
                self.past = fresh
            for tokens in outputs:
                _add(self.past, tokens)

    def _tree(self, texts: Iterable[list[int]]) -> SuffixTree:
        tree = SuffixTree(self.depth)
        for tokens in texts:
            _add(tree, tokens)
        return tree


def _add(tree: SuffixTree, tokens: list[int]) -> None:
    for token in tokens:
        tree.append(token)
    tree.end()


class _Row:
    """What one row has to look up: its own tree, and where its end lies in those of all rows."""

    def __init__(self, depth: int):
        self.own = SuffixTree(depth)
        self.prompt = 0  # tokens
        self.elsewhere: dict[SuffixTree, _Place] = {}

    def points(self, tree: SuffixTree) -> list[Point]:
        """Where the row's suffixes lie in another tree."""
        text, now = self.own.text, _Place(len(tree.text), len(self.own.text), [])
        last = self.elsewhere.get(tree)
        if last is not None and last.size == now.size and now.read - last.read < tree.depth:
            now.points, new = last.points, text[last.read :]
        else:  # a tree that has grown may have cut the edges that the points lay on
            new = text[-tree.depth :]
        for token in new:
            now.points = tree.advance(now.points, token)
        self.elsewhere[tree] = now
        return now.points


@dataclass
class _Place:
    """size: tokens the tree had. read: tokens of the row that were followed. points: where that led."""

    size: int
    read: int
    points: list[Point]


class SuffixDrafting(Lookup):
    """The rows' trees during one `generate`, and how much of what the counts promised came true.

    What followed once is taken for certain by the counts, so they promise too much: `expected` is corrected by what the
    text brought. The choice between match lengths isn't: there the counts alone decided as well when it was tried.
    """

    def __init__(self, drafter: SuffixDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.spec = drafter.spec
        self.makes_trees = self.spec.tree and call.target.masks.trees
        self.rows: dict[int, _Row] = {}
        self.waiting: dict[int, Continuation] = {}  # by row, not judged yet
        self.kept = Faded(PRIOR / 2, PRIOR)  # of the tokens that the counts promised, those that came
        self.text: Text | None = None

    def read(self, row: int, tokens: list[int]) -> None:
        if row not in self.rows:
            self.rows[row] = _Row(self.drafter.depth)
            self.rows[row].prompt = len(tokens)
        for token in tokens:
            self.rows[row].own.append(token)
        if row in self.waiting:
            proposed = self.waiting.pop(row)
            self.kept.add(proposed.matches(tokens), proposed.expected, MEMORY)

    def look_up(self, row: int, budget: int) -> Proposal:
        state = self.rows[row]
        found = self._best(state.own, state.own.points, budget)
        with self.drafter.lock:
            for tree in (self.drafter.corpus, self.drafter.past):
                if tree is not None and tree.text:
                    other = self._best(tree, state.points(tree), budget)
                    found = max(found, other, key=lambda c: c.expected)
        if not found.tokens:
            return NOTHING
        self.waiting[row] = found
        expected = found.expected * min(1.0, self.kept.mean())
        return Proposal(found.tokens, expected, found.parents if self.makes_trees else None)

    def propose(self, text: Text, budget: int) -> Draft:
        self.text = text
        return super().propose(text, budget)

    def observe(self, round: Round) -> None:
        if self.drafter.past is not None and self.text is not None and self.text.done:
            self.catch_up(self.text)
            counts = self.text.row_tokens
            rows = self.rows.values()
            self.drafter.remember(r.own.text[r.prompt : r.prompt + n] for r, n in zip(rows, counts, strict=True) if n)

    def _best(self, tree: SuffixTree, points: list[Point], budget: int) -> Continuation:
        """The continuation worth most over all match lengths, the longest match first among equals."""
        spec = self.spec
        best, worth = Continuation([], [], []), 0.0
        for place, point in enumerate(points):
            match = len(points) - place
            limit = min(budget, max(1, int(spec.per_match * match)))
            if worth >= limit:  # shorter matches can bring no more than this
                break
            if self.makes_trees:
                found = tree.likeliest_tree(point, limit, spec.min_probability, spec.nodes)
            else:
                found = tree.likeliest(point, limit, spec.min_probability)
            if found.expected > worth:
                best, worth = found, found.expected
        return best
