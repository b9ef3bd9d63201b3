"""Counts of everything that followed everything: a suffix tree of bounded depth that grows token by token.

Plain Python on lists of ints; knows nothing of drafts or models.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["END", "Continuation", "Point", "SuffixTree"]

END = -1  # stands behind a finished text; no token
ENDLESS = sys.maxsize  # length of an edge that grows with the text
KEPT = 4  # most frequent children that a node knows without looking at all of them


_NONE: dict[int, Node] = {}
_NOBODY: list[Node] = []


class Node:
    """The end of an edge. The edge's tokens are `text[start : start + length]` of its tree.

    count: how often the first token of the edge followed what leads to it. total: the sum of the children's counts, how
    often anything followed the node. top: the most frequent children, in order; the more recent before its equals. The
    end of a text counts, but is no token to propose.
    """

    __slots__ = ("children", "count", "length", "start", "top", "total")

    def __init__(self, start: int, length: int, count: int):
        self.start = start
        self.length = length
        self.count = count
        self.total = 0
        self.children = _NONE  # an endless edge is never followed to its end
        self.top = _NOBODY

    def follow(self, child: Node, token: int) -> None:
        """A child, the one that begins with `token`, was met once more."""
        self.total += 1
        top = self.top
        if token == END or (top and top[0] is child):
            return
        if child in top:
            place = top.index(child)
        elif len(top) < KEPT:
            place = len(top)
            top.append(child)
        elif top[-1].count <= child.count:
            place = KEPT - 1
            top[-1] = child
        else:
            return
        while place and top[place - 1].count <= child.count:
            top[place - 1], top[place] = child, top[place - 1]
            place -= 1


Point = tuple[Node, int]
"""A place in a tree: how many tokens of the edge that ends in a node have been read."""


@dataclass(frozen=True)
class Continuation:
    """What may follow a point: nodes in order, parents first.

    Args:
        tokens: of the nodes.
        parents: the node above each, -1 at the point itself.
        probabilities: of the path down to each node, by the counts.
    """

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]

    @property
    def expected(self) -> float:
        """Tokens of it that come true, if the counts are right."""
        return sum(self.probabilities)

    def matches(self, text: list[int]) -> int:
        """How many of a text's first tokens lie on a path of it."""
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
    """All substrings, up to `depth` tokens long, of texts that are appended token by token.

    An occurrence counts once a token follows it. `append` takes as many steps as suffixes of the text have occurred
    before, at most `depth`, and there are at most two nodes a token.

    Args:
        depth: length of the longest substring that is counted, at least 2.

    Attributes:
        points: the suffixes of the current text that have occurred before, the longest first; point i from the end is
            the suffix of i + 1 tokens. At most depth - 1.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.text: list[int] = []
        self.root = Node(0, 0, 0)
        self.root.children, self.root.top = {}, []
        self.points: list[Point] = []

    def __reduce__(self) -> Any:
        """A copy grows from the text again: its nodes lead to each other in circles, deeper than Python calls itself."""
        return _grown, (self.depth, list(self.text))

    def append(self, token: int) -> None:
        """Let the current text grow by a token."""
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
                # points further on are shorter, so they stand no deeper on this edge: they have not entered the rest of it
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
            node.start = at + 1 - offset  # beyond the depth, an edge continues as its most recent occurrence did
        self.points = known

    def end(self) -> None:
        """The current text is finished; what is appended from here on is another one."""
        self.append(END)
        self.points = []

    def advance(self, points: list[Point], token: int) -> list[Point]:
        """Where the suffixes of some other text lie in this tree, one token on. points: as `points`, of this tree."""
        text = self.text
        known: list[Point] = []
        for node, offset in [*points, (self.root, 0)]:
            if offset < node.length:
                place = node.start + offset
                if place < len(text) and text[place] == token:
                    known.append((node, offset + 1))
            elif (child := node.children.get(token)) is not None:
                known.append((child, 1))
        return known[1:] if len(known) == self.depth else known

    def _split(self, node: Node, offset: int, waiting: int) -> None:
        """Cut an edge behind `offset` tokens. waiting: suffixes on it that have not gone beyond."""
        lower = Node(node.start + offset, node.length if node.length == ENDLESS else node.length - offset, 0)
        lower.count = node.count - waiting
        lower.total, lower.children, lower.top = node.total, node.children, node.top
        first = self.text[lower.start]
        node.length = offset
        node.total, node.children, node.top = lower.count, {first: lower}, [lower] if first != END else []

    def likeliest(self, point: Point, limit: int, minimum: float) -> Continuation:
        """The chain of most frequent children, at most `limit` tokens, while its probability is at least `minimum`."""
        node, offset = point
        tokens: list[int] = []
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
        return Continuation(tokens, list(range(-1, len(tokens) - 1)), probabilities)

    def likeliest_tree(self, point: Point, limit: int, minimum: float, nodes: int) -> Continuation:
        """The `nodes` most probable continuations, at most `limit` deep, of probability at least `minimum`."""
        found = Continuation([], [], [])
        paths: list[list[int]] = []  # tokens down to each node found
        # (-probability, when met, point, parent)
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

    def _token(self, place: int, ahead: list[int]) -> int:
        """A token of the text, or, beyond its end, of what is proposed behind it: a copy may overlap with itself."""
        return self.text[place] if place < len(self.text) else ahead[place - len(self.text)]


def _grown(depth: int, text: list[int]) -> SuffixTree:
    """The tree of these texts, each of which ends with END, but the last."""
    tree = SuffixTree(depth)
    for token in text:
        tree.end() if token == END else tree.append(token)
    return tree
