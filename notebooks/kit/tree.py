"""A token tree as a picture for a notebook: an outline that can be folded, with a slider for the number of nodes
(tree.html). Knows SVG and HTML, and nothing of drafting: it is given words, parents and probabilities."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Collection, Sequence

from .slider import COLOURS, Picture, template

INDENT, ROW, LEFT = 22, 24, 10  # SVG units: of one level, of one line, of the root


def token_tree(
    words: Sequence[str],
    parents: Sequence[int],
    probabilities: Sequence[float],
    accepted: Collection[int] = (),
) -> Picture:
    """A token tree with one node per line, indented by depth. It opens unfolded, with all nodes.

    A click on a node folds the nodes below it. A slider shows the first nodes only, so give the best ones first. Accepted nodes
    are filled and bold, and a sentence counts them. Without scripts, the picture shows the whole tree.

        token_tree(["a", "b", "c"], [-1, -1, 0], [0.6, 0.3, 0.4], accepted=[0])

    Args:
        words: the text of each node.
        parents: the number of each node's parent, which comes before the node; -1 for a child of the text.
        probabilities: of each node, shown after its word.
        accepted: the numbers of the accepted nodes.

    Raises ValueError if there are no nodes, the lengths differ, or a parent does not come before its child.
    """
    if not words or not len(words) == len(parents) == len(probabilities):
        raise ValueError(
            "words, parents, probabilities: give one of each for every node, and at least one node, "
            f"not {len(words)}, {len(parents)} and {len(probabilities)}."
        )
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"parents: node {node} has parent {parent}; give -1 or a node before {node}.")
    order = _lines(parents)
    depths = [0] * len(words)
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1 if parent >= 0 else 1
    labels = [f"{_visible(word)} {probability:.2f}" for word, probability in zip(words, probabilities, strict=True)]
    wide = max(LEFT + INDENT * depth + 50 + 8 * len(label) for depth, label in zip(depths, labels, strict=True))
    groups = []
    for line, node in enumerate(order):
        above = order.index(parents[node]) if parents[node] >= 0 else -1
        paint = COLOURS["accepted" if node in accepted else "draft"]
        x = LEFT + INDENT * depths[node]
        weight = ' font-weight="bold"' if node in accepted else ""
        fill = paint if node in accepted else "none"
        groups.append(
            f'<g data-node="{node}" tabindex="0" transform="translate({x} {_y(line)})">'
            f'<path d="M{-INDENT} {(above - line) * ROW + 5}V0H-5" fill="none" stroke="{paint}"/>'
            f'<circle r="5" fill="{fill}" stroke="{paint}" stroke-width="2"/>'
            f'<text x="12" y="5"{weight}>{html.escape(labels[node])}<tspan class="more"></tspan></text></g>'
        )
    key = "t" + hashlib.sha256(repr((labels, list(parents), sorted(accepted))).encode()).hexdigest()[:10]
    data = {"parents": list(parents), "accepted": sorted(accepted), "order": order, "depths": depths}
    page = template("tree").substitute(
        key=key,
        count=len(words),
        sentence=_sentence(len(words), len(accepted)),
        wide=wide,
        tall=_y(len(words)),
        root=f'<circle cx="{LEFT}" cy="{_y(-1)}" r="5" fill="currentColor"/>'
        f'<text x="{LEFT + 12}" y="{_y(-1) + 5}">the text so far</text>',
        groups="\n".join(groups),
        data=json.dumps(data, separators=(",", ":")),
        indent=INDENT,
        row=ROW,
        left=LEFT,
        top=_y(0),
    )
    return Picture(page, f"a token tree of {len(words)} nodes")


def _lines(parents: Sequence[int]) -> list[int]:
    """The nodes from top to bottom: each before the nodes below it, siblings in their order."""
    order: list[int] = []
    waiting = [node for node in reversed(range(len(parents))) if parents[node] == -1]
    while waiting:
        order.append(waiting.pop())
        waiting += [node for node in reversed(range(len(parents))) if parents[node] == order[-1]]
    return order


def _y(line: int) -> int:
    return ROW * (line + 1) + ROW // 2


def _visible(word: str) -> str:
    """The word on one line of at most 12 characters, its white space visible."""
    written = repr(word)[1:-1].replace(" ", "\u2423")
    return written if len(written) <= 12 else written[:11] + "\u2026"


def _sentence(count: int, accepted: int) -> str:
    return f"{count} nodes: the target accepts {accepted} and adds one token of its own."
