"""Suffix decoding (2411.04975): copies what followed the same tokens before, in this text and in given texts. Keeps a suffix
tree with counts per row and chooses between match lengths.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.drafts import Round
from ...core.text import Text
from ...engine.traits import Traits
from ...lengths.cost_model import KEEP_LOCAL, PRIOR, DecayedMean
from ..shared.base import Call, Drafter, Spec, Target, require_positive
from ..shared.lookup import NOTHING, Lookup, Proposal
from ..shared.registry import register
from .memory import Memory
from .tree import END, Continuation, Point, SuffixTree

REMEMBERED = 1 << 17  # maximum number of kept tokens of past outputs


@register("suffix")
@dataclass(frozen=True)
class Suffix(Spec):
    """Copies what most often followed the last tokens: `"suffix"`, the default draft.

    For each match length, that is, for each suffix of the text that occurred before, it follows the most frequent
    continuation. The continuation with the most expected tokens is proposed. Needs no second model and almost no time.

    Args:
        max_match: the longest match, in tokens. Larger values distinguish more contexts in text with near-repetitions; time
            and memory for repeated text grow in proportion.
        min_probability: stop before a token if the relative frequency of the path to it is below this. Lower values are
            worthwhile if verifying many tokens costs the target little more than one.
        per_match: maximum number of proposed tokens per matched token (alpha in the paper).
        tree: propose the most probable continuations as a token tree instead of the best chain, if the target can verify
            trees. Gives a few percent more tokens per forward pass for about as many more drafted tokens, so it is worthwhile
            if verifying them costs almost nothing.
        nodes: size of the tree.
        corpus: texts to look up besides the row's own, as strings (tokenized with the target's tokenizer) or ids, such as
            earlier answers or a code base. Read once when the drafter is loaded; not saved with the pair.
        remember: also look up past outputs of this model object. Past outputs never change what is generated, only how fast.
            But the speed of one call then reveals whether its text occurred in another, so do not share such a model between
            users who must not learn about each other. Off by default.
        memory_file: a file in which past outputs are remembered from process to process, at most 131,072 tokens. Made if there
            is none, readable for its owner only, and neither encrypted nor saved with the pair. Name one for each user and
            project. Includes `remember`. Off by default.
    """

    title = "Suffix"
    crosses = True
    trees = True
    acceptance = (0.05, 0.7)
    sample = served_as = "suffix"

    max_match: int = 24
    min_probability: float = 0.1
    per_match: float = 3.0
    tree: bool = False
    nodes: int = 8
    corpus: Sequence[str | Sequence[int]] | None = field(default=None, metadata={"saved": False})
    remember: bool = False
    memory_file: str | os.PathLike[str] | None = field(default=None, metadata={"saved": False})

    def __post_init__(self) -> None:
        if self.max_match < 1:
            raise ValueError(f"max_match: {self.max_match} matches nothing; give 1 or more")
        if not 0 < self.min_probability <= 1:
            raise ValueError(f"min_probability: {self.min_probability} is not possible; give more than 0, at most 1")
        if self.per_match <= 0:
            raise ValueError(f"per_match: {self.per_match} proposes nothing; give more than 0")
        require_positive(self, "nodes")
        if self.memory_file is not None and not (
            isinstance(self.memory_file, (str, os.PathLike)) and str(self.memory_file)
        ):
            raise ValueError(f"memory_file: {self.memory_file!r} is not a path; name a file, or leave it out")
        if isinstance(self.corpus, str):
            raise ValueError("corpus: got one string; give a list of texts")

    @classmethod
    def named(cls, rest: str) -> Suffix:
        """The spec for `"suffix"`."""
        if rest:
            raise ValueError(f"draft: 'suffix:{rest}' is not known; write 'suffix', or Suffix(...) for its options")
        return cls()

    def load(self, target: Target, **kwargs: Any) -> SuffixDrafter:
        """Read the corpus and the memory, if there are any.

        Raises ValueError for texts and a memory if there is no tokenizer, for ids that the target does not have, and for a
        memory of another tokenizer.
        """
        size = Traits.of(target.model).vocabulary
        texts = [_ids(text, target, size) for text in self.corpus or ()]
        if self.memory_file is None:
            return SuffixDrafter(self, texts)
        if target.tokenizer is None:
            raise ValueError(
                "memory_file: only the target's tokenizer tells whose tokens a file holds; pass tokenizer="
            )
        return SuffixDrafter(self, texts, Memory(self.memory_file, target.tokenizer, size, REMEMBERED))


def _ids(text: str | Sequence[int], target: Target, size: int) -> list[int]:
    if isinstance(text, str):
        if target.tokenizer is None:
            raise ValueError("corpus: texts need the target's tokenizer; pass tokenizer=, or give token ids")
        tokenizer: Any = target.tokenizer
        text = tokenizer(text, add_special_tokens=False).input_ids
    ids = [int(token) for token in text]
    for token in ids:
        if not 0 <= token < size:
            raise ValueError(f"corpus: {token} is not a token of the target, whose vocabulary size is {size}")
    return ids


class SuffixDrafter(Drafter):
    """The texts shared by all calls: the corpus (token ids of each text) and, if they are remembered, past outputs, of earlier
    processes as well if there is a memory."""

    def __init__(self, spec: Suffix, corpus: Iterable[list[int]] = (), memory: Memory | None = None):
        self.spec = spec
        self.depth = spec.max_match + 1  # a match and the token after it
        self.corpus = SuffixTree(self.depth, _ended(corpus))
        self.memory = memory
        self.past = SuffixTree(self.depth) if spec.remember or memory else None
        if self.past is not None and memory is not None:
            self.past.extend(memory.read())
        self.lock = threading.Lock()  # one call may add past outputs while another one reads them

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock: a copy creates its own."""
        with self.lock:
            past = copy.deepcopy(self.past)  # another call may continue to add to it
        return {**self.__dict__, "past": past, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.Lock())

    def start(self, call: Call) -> SuffixDrafting:
        return SuffixDrafting(self, call)

    def remember(self, outputs: Collection[list[int]]) -> None:
        """Add finished outputs for later calls to look up. When there are too many tokens, the oldest half is dropped."""
        if self.past is None:
            return
        with self.lock:
            if len(self.past.text) > REMEMBERED:
                self.past = SuffixTree(self.depth, self.past.text[-REMEMBERED // 2 :])
            self.past.extend(_ended(outputs))
        if self.memory is not None:
            self.memory.add(outputs)


def _ended(texts: Iterable[list[int]]) -> Iterator[int]:
    """All tokens of several texts, with END after each."""
    for tokens in texts:
        yield from tokens
        yield END


class _Row:
    """One row's own tree, and the points of its suffixes in the shared trees."""

    def __init__(self, depth: int):
        self.own = SuffixTree(depth)
        self.prompt = 0  # number of tokens
        # by tree: its number of tokens, how many of the row were read in it, and the points
        self.elsewhere: dict[SuffixTree, tuple[int, int, list[Point]]] = {}

    def points(self, tree: SuffixTree) -> list[Point]:
        """The points of the row's suffixes in another tree."""
        text = self.own.text
        size, read, points = self.elsewhere.get(tree, (-1, 0, []))
        new = text[read:]
        # if the tree has grown, edges with points on them may have been split
        if size != len(tree.text) or len(new) >= tree.depth:
            points, new = [], text[-tree.depth :]
        points = tree.after(points, new)
        self.elsewhere[tree] = len(tree.text), len(text), points
        return points


class SuffixDrafting(Lookup):
    """The rows' trees during one `generate`, and how reliable their counts are.

    The counts are too optimistic: a continuation that was seen once has the relative frequency 1. So `expected` is corrected
    by the measured acceptance. The choice between match lengths uses the raw counts, since correcting them did not improve it.
    """

    def __init__(self, drafter: SuffixDrafter, call: Call):
        super().__init__(call)
        self.drafter = drafter
        self.spec = drafter.spec
        self.makes_trees = self.spec.tree and call.target.masks.trees
        self.rows: dict[int, _Row] = {}
        self.waiting: dict[int, Continuation] = {}  # by row, until it is judged
        self.remembered: set[int] = set()  # rows whose output later calls can look up
        self.kept = DecayedMean()  # accepted tokens, of those that the counts predicted

    def read(self, row: int, tokens: list[int]) -> None:
        if row not in self.rows:
            self.rows[row] = _Row(self.drafter.depth)
            self.rows[row].prompt = len(tokens)
        self.rows[row].own.extend(tokens)
        if row in self.waiting:
            proposed = self.waiting.pop(row)
            self.kept.add(proposed.matches(tokens), proposed.expected, KEEP_LOCAL)

    def renew(self, text: Text, row: int, call: Call) -> None:
        self.rows.pop(row, None)
        self.waiting.pop(row, None)
        self.remembered.discard(row)
        super().renew(text, row, call)

    def look_up(self, row: int, budget: int) -> Proposal:
        found = self._found(row, budget)
        if not found.tokens:
            return NOTHING
        self.waiting[row] = found
        expected = found.expected * min(1.0, self.kept.mean(0.5, PRIOR))
        return Proposal(found.tokens, expected, found.parents if self.makes_trees else None)

    def look_up_after(self, row: int, drafted: Sequence[int], budget: int) -> list[int]:
        return self._found(row, budget, drafted).tokens

    def observe(self, round: Round) -> None:
        if self.drafter.past is not None and self.text is not None and self.text.done:
            self.catch_up(self.text)
            ended = [row for row in self.rows if self.text.ended[row] and row not in self.remembered]
            outputs = [(self.rows[row], self.text.row_tokens[row]) for row in ended]
            self.remembered.update(ended)
            self.drafter.remember([row.own.text[row.prompt : row.prompt + count] for row, count in outputs if count])

    def _found(self, row: int, budget: int, drafted: Sequence[int] = ()) -> Continuation:
        """The best continuation in all trees. drafted: tokens that follow the row's text; a chain continues them."""
        state = self.rows[row]
        best = self._best(state.own, state.own.points, budget, drafted)
        with self.drafter.lock:
            for tree in (self.drafter.corpus, self.drafter.past):
                if tree is not None and tree.text:
                    best = max(best, self._best(tree, state.points(tree), budget, drafted), key=lambda c: c.expected)
        return best

    def _best(self, tree: SuffixTree, points: list[Point], budget: int, drafted: Sequence[int]) -> Continuation:
        """The continuation with the most expected tokens over all match lengths; of equal ones, that of the longest match.
        points: of the text's suffixes. drafted: as for `_found`."""
        spec = self.spec
        points = tree.after(points, drafted) if drafted else points
        best, worth = Continuation([], [], []), 0.0
        for number, point in enumerate(points):
            match = len(points) - number
            limit = min(budget, max(1, int(spec.per_match * match)))
            if worth >= limit:  # shorter matches cannot exceed this
                break
            if self.makes_trees and not drafted:
                found = tree.best_tree(point, limit, spec.min_probability, spec.nodes)
            else:
                found = tree.best_chain(point, limit, spec.min_probability, drafted)
            if found.expected > worth:
                best, worth = found, found.expected
        return best
