"""A suffix tree of bounded depth with counts, which grows token by token: pure Python on lists of ints."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

END = -1  # marks the end of a finished text; not a token
ENDLESS = sys.maxsize  # length of an edge that grows with the text
KEPT = 4  # number of most frequent children that a node keeps in order

# shared by all nodes at the end of endless edges, which have no children
_NO_CHILDREN: dict[int, Node] = {}
_NO_TOP: list[Node] = []


class Node:
    """A node and the edge that leads to it. The edge's tokens are `text[start : start + length]` of the tree.

    count: how often the first token of the edge occurred after the path before it. total: the sum of the children's counts.
    top: the most frequent children in order; of equally frequent ones, the most recent first. END is counted in `total`
    but never in `top`, because it cannot be proposed.
    """

    __slots__ = ("children", "count", "length", "start", "top", "total")

    def __init__(self, start: int, length: int, count: int):
        self.start = start
        self.length = length
        self.count = count
        self.total = 0
        self.children = _NO_CHILDREN
        self.top = _NO_TOP

    def follow(self, child: Node, token: int) -> None:
        """Count one more occurrence of `child`, whose edge begins with `token`."""
        self.total += 1
        top = self.top
        if token == END or (top and top[0] is child):
            return
        if child in top:
            rank = top.index(child)
        elif len(top) < KEPT:
            rank = len(top)
            top.append(child)
        elif top[-1].count <= child.count:
            rank = KEPT - 1
            top[-1] = child
        else:
            return
        while rank and top[rank - 1].count <= child.count:
            top[rank - 1], top[rank] = child, top[rank - 1]
            rank -= 1


Point = tuple[Node, int]
"""A position in a tree: a node, and how many tokens of the edge that leads to it have been read."""


@dataclass(frozen=True)
class Continuation:
    """A tree of tokens that may follow a point, parents first."""

    tokens: list[int]  # of the nodes
    parents: list[int]  # the parent of each node, -1 for the point itself
    probabilities: list[float]  # relative frequency of the path to each node

    @property
    def expected(self) -> float:
        """Expected number of right tokens, according to the counts."""
        return sum(self.probabilities)

    def matches(self, text: list[int]) -> int:
        """How many of a text's first tokens lie on a path of this tree."""
        child = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        node = -1
        for depth, token in enumerate(text):
            node = child.get((node, token), -1)
            if node < 0:
                return depth
        return len(text)


class SuffixTree:
    """All substrings of up to `depth` tokens, with counts, of texts that are appended token by token.

    An occurrence is counted once a token follows it. `append` takes one step per suffix of the text that has occurred before,
    at most `depth`. There are at most two nodes per token.

    Args:
        depth: length of the longest counted substring, at least 2.
        text: to begin with; see `extend`.

    Attributes:
        points: the suffixes of the current text that have occurred before, longest first; `points[-n]` is the suffix of n
            tokens. At most depth - 1.
    """

    def __init__(self, depth: int, text: Iterable[int] = ()):
        self.depth = depth
        self.text: list[int] = []
        self.root = Node(0, 0, 0)
        self.root.children, self.root.top = {}, []
        self.points: list[Point] = []
        self.extend(text)

    def __reduce__(self) -> Any:
        """Copies are rebuilt from the text: copying the linked nodes would exceed Python's recursion limit."""
        return SuffixTree, (self.depth, list(self.text))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the current text; END finishes it."""
        for token in tokens:
            if token == END:
                self.end()
            else:
                self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the current text."""
        text = self.text
        at = len(text)
        text.append(token)
        points = [*self.points, (self.root, 0)]
        known: list[Point] = []
        for number, (node, offset) in enumerate(points):
            if offset < node.length:
                if text[node.start + offset] == token:
                    known.append((node, offset + 1))
                    continue
                # the remaining points are shorter suffixes; those on this edge have not passed this offset either
                self._split(node, offset, waiting=sum(other is node for other, _ in points[number:]))
            child = node.children.get(token)
            if child is not None:
                child.count += 1
                known.append((child, 1))
            else:
                child = node.children[token] = Node(at, ENDLESS, 1)
            node.follow(child, token)
        if len(known) == self.depth:
            node, offset = known.pop(0)
            node.start = at + 1 - offset  # beyond the depth, an edge continues with its most recent occurrence
        self.points = known

    def end(self) -> None:
        """Finish the current text; the next token begins another one."""
        self.append(END)
        self.points = []

    def advance(self, points: list[Point], token: int) -> list[Point]:
        """Advance the points of another text's suffixes in this tree by one token. points: in the order of `self.points`."""
        text = self.text
        known: list[Point] = []
        for node, offset in [*points, (self.root, 0)]:
            if offset < node.length:
                index = node.start + offset
                if index < len(text) and text[index] == token:
                    known.append((node, offset + 1))
            elif (child := node.children.get(token)) is not None:
                known.append((child, 1))
        return known[1:] if len(known) == self.depth else known

    def after(self, points: list[Point], tokens: Iterable[int]) -> list[Point]:
        """The same, advanced by several tokens."""
        for token in tokens:
            points = self.advance(points, token)
        return points

    def _split(self, node: Node, offset: int, waiting: int) -> None:
        """Split an edge after `offset` tokens. waiting: number of suffixes on it that have not passed this offset."""
        lower = Node(node.start + offset, node.length if node.length == ENDLESS else node.length - offset, 0)
        lower.count = node.count - waiting
        lower.total, lower.children, lower.top = node.total, node.children, node.top
        first = self.text[lower.start]
        node.length = offset
        node.total, node.children, node.top = lower.count, {first: lower}, [lower] if first != END else []

    def best_chain(self, point: Point, limit: int, minimum: float, drafted: Sequence[int] = ()) -> Continuation:
        """The chain of most frequent children: at most `limit` tokens, as long as its probability is at least `minimum`.

        drafted: tokens that follow the text, which the point has read.
        """
        node, offset = point
        tokens = [*drafted]
        limit += len(tokens)
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < limit:
            if offset == node.length:
                if not node.top:
                    break
                probability *= node.top[0].count / node.total
                if probability < minimum:
                    break
                node, offset = node.top[0], 0
            token = self._token(node.start + offset, tokens)
            if token == END:
                break
            tokens.append(token)
            probabilities.append(probability)
            offset += 1
        return Continuation(tokens[len(drafted) :], list(range(-1, len(probabilities) - 1)), probabilities)

    def best_tree(self, point: Point, limit: int, minimum: float, nodes: int) -> Continuation:
        """The `nodes` most probable continuations, at most `limit` deep, of probability at least `minimum`."""
        found = Continuation([], [], [])
        paths: list[list[int]] = []  # tokens on the path to each node found
        # (-probability, order of insertion, point, parent)
        heap: list[tuple[float, int, Point, int]] = [(-1.0, 0, point, -1)]
        met = 0
        while heap and len(found.tokens) < nodes:
            negative, _, (node, offset), above = heapq.heappop(heap)
            path = paths[above] if above >= 0 else []
            if offset == node.length:
                for child in node.top:
                    probability = -negative * child.count / node.total
                    if probability >= minimum:
                        met += 1
                        heapq.heappush(heap, (-probability, met, (child, 0), above))
                continue
            token = self._token(node.start + offset, path)
            if token == END:
                continue
            found.tokens.append(token)
            found.parents.append(above)
            found.probabilities.append(-negative)
            paths.append([*path, token])
            if len(path) + 1 < limit:
                met += 1
                heapq.heappush(heap, (negative, met, (node, offset + 1), len(paths) - 1))
        return found

    def _token(self, index: int, ahead: list[int]) -> int:
        """A token of the text or, beyond its end, of the proposal `ahead`, because a copy may overlap with itself."""
        return self.text[index] if index < len(self.text) else ahead[index - len(self.text)]
