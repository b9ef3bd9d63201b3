"""The drawings of the docs as SVG, one function each, by name in DRAWINGS; `<!-- drawing: NAME -->` puts one on a page.

A drawing is 360 units wide, so that its letters can be read on a phone. Its caption stands beside it, on a phone below it. Its
colors are those of site.css for either scheme: `draft`, `target`, `kept`, `gone`, and the page's own. What it says about
the package (TREE, SUFFIX, LENGTHS) is compared with the code by tests/test_drawings.py.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

WIDTH = 360
LENGTHS = ((5, 4), (3, 1))  # of each row: committed entries, and what it keeps of the last token and a draft of three
TREE = (-1, 0, 0, 2)  # parents of a, b, c, d
SUFFIX = "the cat sat on the mat the cat sat on the rug the cat sat in the sun the cat sat"
START = "Once"
WAY = {
    START: (
        ("modeling.py", "takes the arguments"),
        ("generation.py", "prepares inputs"),
        ("calls/admission.py", "may it be drafted?"),
        ("calls/assembly.py", "puts parts together"),
    ),
    "Each round": (
        ("decoding.py", "runs the round"),
        ("methods/shared/guarded.py", "watches over drafts"),
        ("methods/shared/chain.py", "drafts tokens"),
        ("engine/runner.py", "runs forward passes"),
        ("engine/cache.py", "keeps keys, values"),
        ("verification.py", "picks the rule"),
        ("core/acceptance.py", "accepts tokens"),
        ("core/text.py", "commits them"),
        ("core/report.py", "counts them"),
    ),
}
"""Files that a greedy call with a draft model enters, and what they do; tests/test_way_of_a_call.py compares them with such a
call."""
FIGURES, PRODUCTS = (
    json.loads((Path(__file__).parent / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    for name in ("gpu_first_run", "instructions")
)


# Pieces


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, words: str = "", kind: str = "") -> str:
    """A rectangle with words in its middle. kind: a colour, and of `solid`, `dashed` and `faint` what it is."""
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'
    return rect + (
        text(x + width / 2, y + height / 2 + 4.5, words, kind.replace("faint", ""), "middle") if words else ""
    )


def line(points: Sequence[tuple[float, float]], kind: str = "", arrow: bool = True) -> str:
    """A line through these points, with a head at its end."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    (x0, y0), (x, y) = points[-2:]
    long = max(1e-9, ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5)
    dx, dy = 6 * (x - x0) / long, 6 * (y - y0) / long
    head = (
        f"M{x - dx - dy / 2:g} {y - dy + dx / 2:g}L{x:g} {y:g}L{x - dx + dy / 2:g} {y - dy - dx / 2:g}" if arrow else ""
    )
    return f'<path d="{path}{head}" class="{kind}"/>'


def cross(x: float, y: float, width: float, height: float) -> str:
    return line([(x + 4, y + height - 4), (x + width - 4, y + 4)], "gone", arrow=False)


def paths(parents: Sequence[int]) -> list[set[int]]:
    """Each node and those above it."""
    found: list[set[int]] = []
    for node, parent in enumerate(parents):
        found.append({node} | (found[parent] if parent >= 0 else set()))
    return found


def drawn(name: str, title: str, told: str, caption: str, height: float, parts: Iterable[str]) -> str:
    """The figure. told: the drawing in words, for those who cannot see it; caption: HTML, read after its title."""
    return (
        f'<figure class="drawing"><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-labelledby="{name}-title {name}-text"><title id="{name}-title">{title}</title>'
        f'<desc id="{name}-text">{" ".join(told.split())}</desc>\n'
        + "\n".join(parts)
        + f"\n</svg><figcaption><strong>{title}</strong>{caption}</figcaption></figure>"
    )


# Drawings


def kv_rewind() -> str:
    left, cell, high, slots = 44, 28, 24, 9
    parts = []
    for stage, title in enumerate(("Before the round", "Verify: four entries are written", "Accept: the lengths move")):
        top = 100 * stage
        parts += [text(0, top + 13, title, "bold"), text(WIDTH, top + 13, "length", "", "end")]
        for row, (length, keeps) in enumerate(LENGTHS):
            y = top + 24 + 32 * row
            parts.append(text(0, y + 16.5, f"row {row}"))
            for slot in range(slots):
                x, new = left + cell * slot, slot - length
                words = "abcd"[new] if stage and 0 <= new < 4 else ""
                if new < 0:
                    kind = "solid"
                elif not words:
                    kind = "faint dashed"
                elif stage == 1:
                    kind = "draft dashed" if new else "solid"
                else:
                    kind = ("kept solid" if new else "solid") if new < keeps else "faint dashed"
                parts.append(box(x + 1, y, cell - 2, high, words, kind))
                if stage == 2 and words and new >= keeps:
                    parts.append(cross(x + 1, y, cell - 2, high))
            length += keeps if stage == 2 else 0
            x = left + cell * length
            parts.append(f'<path d="M{x} {y - 4}v{high + 8}" class="target thick"/>')
            parts.append(text(WIDTH, y + 16.5, str(length), "bold target", "end"))
    told = """
    Two rows of nine slots. Row 0 has 5 committed entries, row 1 has 3. The verifying pass writes four entries after each
    length: the last committed token a, and the draft b, c, d. Row 0 accepts all, and its length becomes 9. Row 1 rejects
    b, so its length becomes 4. The entries b, c, d stay where they are, above the length, until the next round overwrites
    them."""
    caption = """
    <ol><li>A line marks each row's <b class='target'>length</b>. Slots after it are free, whatever they hold.</li><li>The
    pass writes the last committed token <i>a</i> and the <b class='draft'>draft</b> <i>b c d</i> after the
    length.</li><li>Row 0 <b class='kept'>accepts</b> the draft. Row 1 rejects <i>b</i>: its entries are not erased, the
    next round overwrites them.</li></ol>"""
    return drawn("kv-rewind", "A rewind moves a number, not the cache", told, caption, 290, parts)


def tree_masks() -> str:
    names, above = "abcd", paths(TREE)
    depths = [len(path) for path in above]
    path = above[3]
    at = {0: (62, 84), 1: (26, 142), 2: (98, 142), 3: (98, 200)}
    parts = [text(0, 13, "The draft", "bold"), text(150, 13, "Who attends to whom", "bold")]
    parts += [box(34, 26, 56, 26, "text", "solid"), line([(62, 52), (62, 71)], arrow=False)]
    for node, parent in enumerate(TREE):
        kind = "target" if node in path else "draft"
        x, y = at[node]
        if parent >= 0:
            x0, y0 = at[parent]
            parts.append(line([(x0, y0 + 13), (x, y - 13)], kind, arrow=False))
        parts.append(box(x - 14, y - 13, 28, 26, names[node], f"{kind} solid"))
    left, top, cell = 178, 50, 27
    parts.append(text(left + 25, top - 8, "text", "", "middle"))
    for node in range(4):
        parts.append(
            text(
                left + 54 + cell * node + cell / 2,
                top - 8,
                names[node],
                "target" if node in path else "draft",
                "middle",
            )
        )
    for node in range(4):
        y, kind = top + cell * node, "target" if node in path else "draft"
        parts += [
            text(left - 14, y + 18, names[node], kind, "middle"),
            box(left, y + 1, 50, cell - 2, "", f"{kind} solid"),
        ]
        for other in range(4):
            seen = other in above[node]
            parts.append(
                box(
                    left + 55 + cell * other, y + 1, cell - 2, cell - 2, "", f"{kind} solid" if seen else "faint dashed"
                )
            )
            if seen:
                parts.append(
                    f'<circle cx="{left + 54 + cell * other + cell / 2:g}" cy="{y + cell / 2:g}" r="3.5" class="{kind}"/>'
                )
    y = top + 4 * cell + 22
    parts.append(text(left + 48, y, "depth", "", "end"))
    parts += [
        text(left + 54 + cell * node + cell / 2, y, str(depth), "bold", "middle") for node, depth in enumerate(depths)
    ]
    told = """
    A tree: a follows the text, b and c follow a, d follows c. Its mask: every node attends to all of the text and to
    itself; b also attends to a; c to a; d to a and c. c and d do not attend to b. The depths of a, b, c, d are 1, 2, 2,
    3."""
    caption = """
    <p>One forward pass reads the text and all four nodes. A row of the mask says what a node attends to: the text and the
    path above it. The path <b class='target'>a c d</b> never sees <b class='draft'>b</b>, so its logits are those of the
    text <i>a c d</i> alone. <i>b</i> and <i>c</i> have the same depth, hence the same position.</p>"""
    return drawn("tree-masks", "A tree and its mask", told, caption, 220, parts)


def eagle() -> str:
    wide, pitch, words = 56, 84, ("The", "cat", "sat", "on")
    parts = [text(0, 13, "Text: the target has read all but the last token")]
    for column, word in enumerate(words):
        x = pitch * column
        parts.append(box(x, 20, wide, 26, word, "solid" if column < 3 else ""))
        if column < 3:
            parts.append(line([(x + wide / 2, 46), (x + wide / 2, 84)], "target"))
        if column:  # the token goes one column to the left
            parts.append(line([(x + 10, 46), (x + 10, 58), (x - 18, 58), (x - 18, 125), (x - 28, 125)]))
        state, token = (f"f{column + 1}", words[column + 1]) if column < 3 else ("s3", "the")
        parts += [
            box(x, 86, wide, 26, state, "target solid" if column < 3 else "draft solid"),
            box(x, 112, wide, 26, token, "" if column < 3 else "draft dashed"),
            line([(x + wide / 2, 138), (x + wide / 2, 153)]),
            box(x, 155, wide, 26, "head", "draft"),
        ]
        if column >= 2:
            parts += [
                line([(x + wide / 2, 181), (x + wide / 2, 196)], "draft"),
                box(x, 198, wide, 26, f"s{column + 1}", "draft solid"),
                box(x, 224, wide, 26, ("the", "rug")[column - 2], "draft dashed"),
            ]
    x = 3 * pitch
    parts.append(line([(x - 28, 224), (x - 10, 224), (x - 10, 112), (x, 112)], "draft"))
    parts += [
        text(314, 103, "state"),
        text(314, 129, "token"),
        text(0, 218, "read once;"),
        text(0, 235, "keys, values kept"),
    ]
    told = """
    The text is The cat sat on; the target has read the first three tokens, which gives the features f1, f2, f3. The head
    reads pairs: f1 with cat, f2 with sat, f3 with on. Each feature is paired with the token after its own. From the last
    pair the head computes its state s3 and drafts the token the. The next step pairs s3 with the, and drafts rug."""
    caption = """
    <ol><li><b class='target'>f</b>: the target's hidden states, one for each token it has read. The last token has none
    yet.</li><li>The head pairs each state with the <b>next</b> token: a token shifted by one. Without the shift it would
    not know which token was sampled.</li><li>From there on it uses its <b class='draft'>own states s</b> and drafted
    tokens. They are dropped after the round.</li></ol>"""
    return drawn("eagle", "EAGLE: state and next token", told, caption, 252, parts)


def mtp() -> str:
    parts = [
        text(0, 13, "Text"),
        box(0, 20, 140, 26, "The cat sat", "solid"),
        box(276, 20, 62, 26, "on"),
        line([(70, 46), (70, 66)], "target"),
        box(0, 68, 140, 56, "the target's layers", "target solid"),
        line([(70, 124), (70, 142)], "target"),
        box(0, 144, 140, 26, "final norm", "target"),
        line([(140, 157), (166, 157), (166, 80), (196, 80)], "target"),
        text(153, 151, "h", "bold target", "middle"),
        line([(307, 46), (307, 70)]),
        text(300, 63, "E", "bold target", "end"),
        box(198, 72, 62, 34, "norm", "draft"),
        box(276, 72, 62, 34, "norm", "draft"),
        line([(229, 106), (229, 121)], "draft"),
        line([(307, 106), (307, 121)], "draft"),
        box(198, 123, 140, 26, "fuse", "draft"),
        line([(268, 149), (268, 162)], "draft"),
        box(198, 164, 140, 34, "MTP layer", "draft solid"),
        line([(268, 198), (268, 212)], "draft"),
        box(198, 214, 140, 26, "end norm", "draft"),
        line([(268, 240), (268, 258)], "draft"),
        text(277, 253, "s", "bold draft"),
        box(198, 260, 140, 26, "output embedding", "target"),
        line([(268, 286), (268, 302)]),
        box(237, 304, 62, 26, "the", "draft dashed"),
        line([(299, 317), (352, 317), (352, 89), (340, 89)], "draft dashed"),
        line([(268, 248), (182, 248), (182, 98), (196, 98)], "draft dashed"),
        text(0, 206, "blue: the target's own", "target"),
        text(0, 226, "orange: the head's", "draft"),
        text(0, 258, "dashed: the next step,"),
        text(0, 275, "s for h, and the for on"),
    ]
    told = """
    The target reads The cat sat; its state after the final norm is h. The next token, on, is embedded with the target's
    embedding E. Both are normed and fused, and go through the MTP layer and an end norm, which gives s. The target's
    output embedding makes of s the drafted token, the. In the next step, s takes the place of h, and the token the that
    of on."""
    caption = """
    <p>The head is a layer of the target's kind, stored in the target's checkpoint. It reads the target's state <b
    class='target'>h</b> of a token with the embedding of the token <b>after</b> it, and predicts the one after that. To
    draft further, its own state <b class='draft'>s</b> takes the place of <i>h</i>.</p>"""
    return drawn("mtp", "MTP: the layer that came with the target", told, caption, 334, parts)


def block() -> str:
    pitch, wide, start = 51, 45, 3
    parts = [text(0, 13, "Text"), text(pitch * start, 13, "Block, by position")]
    for column, word in enumerate(("The", "cat", "sat", "on", "mask", "mask", "mask")):
        x, middle = pitch * column, pitch * column + wide / 2
        if column < start:
            parts += [
                box(x, 20, wide, 26, word, "solid"),
                line([(middle, 46), (middle, 62)], "target"),
                box(x, 64, wide, 26, f"c{column + 1}", "target solid"),
                line(
                    [(middle, 90), (middle, 136), *([(pitch * start - 2, 136)] if column == 2 else [])],
                    "target",
                    column == 2,
                ),
            ]
            continue
        ahead = column - start
        parts += [
            text(middle, 38, f"T+{ahead}" if ahead else "T", "", "middle"),
            box(x, 64, wide, 26, word, "" if not ahead else "draft dashed"),
            line([(middle, 90), (middle, 108)], "draft"),
            line([(middle, 162), (middle, 178)], "draft"),
            box(
                x,
                180,
                wide,
                26,
                ("the", "rug", "and")[ahead - 1] if ahead else "",
                "draft dashed" if ahead else "faint dashed",
            ),
        ]
    parts.append(line([(wide / 2, 136), (pitch * 2 + wide / 2, 136)], "target", arrow=False))
    first, last = pitch * start, 6 * pitch + wide
    parts += [
        box(first, 110, last - first, 52, "", "draft solid"),
        text((first + last) / 2, 131, "a few layers, one pass", "draft", "middle"),
        line([((first + last) / 2, 146), (first + 14, 146)], "draft"),
        line([((first + last) / 2, 146), (last - 14, 146)], "draft"),
        text(0, 156, "keys and values,"),
        text(0, 173, "kept"),
        text(first + wide / 2, 224, "unused", "", "middle"),
        text((first + pitch + last) / 2 + 4, 224, "three drafted tokens", "draft", "middle"),
    ]
    told = """
    The target's states of The, cat, sat give c1, c2, c3, whose keys and values are kept. The block has four rows: the
    last token, on, at position T, and three masks at T+1, T+2, T+3. All rows attend to the whole context and to each
    other, in both directions, in one forward pass of a few layers. The row at T is not used; the others give the drafted
    tokens the, rug, and."""
    caption = """
    <p>One pass drafts the whole block: the last token and masks, which attend to the target's states <b
    class='target'>c</b> of the text and to each other in <b>both</b> directions. Here the row at a position predicts the
    token at that position (fill-in); in the other layout, the token after it. The rows of a block are dropped after the
    pass.</p>"""
    return drawn("block", "A block drafter: all tokens in one pass", told, caption, 230, parts)


def suffix() -> str:
    match = '<tspan class="target bold">the cat sat</tspan>'
    parts = [
        text(0, 13, "The text so far; its end has occurred three times", ""),
        f'<text x="0" y="37">{match} on the mat {match} on the</text>',
        f'<text x="0" y="55">rug {match} in the sun {match}</text>',
        text(0, 88, "What followed", ""),
        box(0, 132, 84, 26, "the cat sat", "target solid"),
    ]

    def edge(x0: float, y0: float, x: float, y: float, share: str, kind: str) -> None:
        parts.append(line([(x0, y0), (x, y)], kind, arrow=False))
        parts.append(text((x0 + x) / 2, min(y0, y) + abs(y0 - y) / 2 - (7 if y <= y0 else -18), share, kind, "middle"))

    edge(84, 145, 132, 123, "2/3", "draft")
    edge(84, 145, 132, 189, "1/3", "")
    edge(170, 123, 212, 123, "2/2", "draft")
    edge(252, 123, 292, 103, "1/2", "draft")
    edge(252, 123, 292, 147, "1/2", "")
    parts += [
        box(132, 110, 38, 26, "on", "draft solid"),
        box(212, 110, 40, 26, "the", "draft solid"),
        box(292, 90, 44, 26, "rug", "draft solid"),
        text(342, 107, "…", "draft"),
        box(292, 134, 44, 26, "mat"),
        box(132, 176, 38, 26, "in"),
        line([(170, 189), (212, 189)], arrow=False),
        box(212, 176, 40, 26, "the"),
        line([(252, 189), (292, 189)], arrow=False),
        box(292, 176, 44, 26, "sun"),
        text(0, 230, "path so far", "draft"),
        text(151, 230, "0.67", "draft bold", "middle"),
        text(232, 230, "0.67", "draft bold", "middle"),
        text(314, 230, "0.33", "draft bold", "middle"),
    ]
    told = """
    The text ends in the cat sat, which has occurred three times before. It was followed by on twice and by in once; on
    was always followed by the; the by mat once and by rug once, more recently. The drafter follows on, the, rug. The
    relative frequencies of the path are two thirds, two thirds and one third."""
    caption = """
    <p>The drafter follows the <b class='draft'>most frequent</b> token from the matched <b class='target'>end of the
    text</b>, and the more recent one where two are equal: <i>rug</i>. The numbers multiply; their sum is the expected
    number of accepted tokens. The shorter matches, <i>cat sat</i> and <i>sat</i>, are followed as well, and the best sum
    is proposed.</p>"""
    return drawn("suffix", "A suffix tree after “the cat sat”", told, caption, 236, parts)


def quantized() -> str:
    left, cell, high = 116, 35, 26
    words = ("The", "cat", "sat", "on", "the", "rug", "and")
    stages = (
        ("1. Draft: the copy uses the target's cache", "8-bit copy", 28, 6),
        ("2. Remove: the copy's entries are dropped", "", 0, 6),
        ("3. Verify: the target writes its own", "target", 56, 7),
    )
    parts, top = [], 0
    for stage, (title, actor, tall, filled) in enumerate(stages):
        y = top + 24 + (max(tall, high) - high) / 2
        parts.append(text(0, top + 13, title, "bold"))
        if actor:
            kind = "draft" if stage == 0 else "target"
            parts += [
                box(0, top + 24, 96, tall, actor, f"{kind} solid"),
                line([(96, top + 24 + tall / 2), (left - 2, y + high / 2)], kind),
            ]
        for slot, word in enumerate(words):
            x, mine = left + cell * slot, slot >= 3
            if slot >= filled:
                kind, word = "faint dashed", ""
            elif not mine:
                kind = "target solid"
            else:
                kind = ("draft dashed", "faint dashed", "target solid")[stage]
            parts.append(box(x + 1, y, cell - 2, high, word, kind))
            if stage == 1 and mine and slot < filled:
                parts.append(cross(x + 1, y, cell - 2, high))
        top += 24 + max(tall, high) + (28 if stage == 0 else 16)
        if stage == 0:
            parts += [
                text(left, y + high + 17, "it reads these", "target"),
                text(left + 3 * cell, y + high + 17, "it writes these", "draft"),
            ]
    told = """
    One strip of slots with keys and values, shown three times. First the 8-bit copy reads the target's entries of The,
    cat, sat and writes its own for on, the, rug after them. Then these are removed. At last the target writes its entries
    of on, the, rug, and into the same slots."""
    caption = """
    <p>There is one cache. The <b class='draft'>copy</b> never reads the prompt: it attends to the entries that the <b
    class='target'>target</b> wrote, puts those of its draft after them, and takes them away again. The target reads the
    last token and the draft in one pass, and keeps what it accepts.</p>"""
    return drawn("quantized", "One cache for the target and its copy", told, caption, top, parts)


def timeline() -> str:
    speed = {row["way"]: row for row in FIGURES["tokens_per_second"] if row["rows"] == 1}["zoo:draft"]
    passes = FIGURES["pass_over_4_columns_of_the_target_ms"]["float32"]
    left, wide = 56, 300
    ratio = speed["graphs"] / speed["eager"]
    parts: list[str] = []

    def lanes(top: float, title: str) -> None:
        parts.append(text(0, top + 13, title, "bold"))
        for lane, name in enumerate(("Python", "GPU")):
            y = top + 24 + 32 * lane
            parts.extend([text(0, y + 17, name), box(left, y, wide, 24, "", "faint dashed")])

    def filled(x: float, y: float, width: float, kind: str) -> None:
        parts.append(f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="24" class="{kind} full"/>')

    lanes(0, "Eager: one round")
    kernels = [("draft", 28)] * 4 + [("target", 156)]
    x = left + 6.0
    for kind, width in kernels:
        filled(x, 24, width, kind)
        for number in range(int(width // 9)):
            filled(x + 4 + 9 * number, 56, 3, kind)
        x += width + 3
    parts += [
        text(left + 66, 98, "draft, 4 tokens", "draft", "middle"),
        text(left + 212, 98, "verify", "target", "middle"),
    ]
    lanes(112, f"With CUDA graphs: {ratio:.1f} rounds in the same time")
    x, end = left + 2.0, left + wide
    while x < end:
        start = x
        for kind, width in [("draft", 8)] * 4 + [("target", 30)]:
            if x >= end:
                break
            filled(x, 136, min(2, end - x), kind)
            filled(x, 168, min(width, end - x), kind)
            x += width + 1
        x = start + wide / ratio
    parts += [text(left, 210, "filled: busy; between: idle")]
    told = """
    Two time lines with a lane for Python and one for the GPU. Eager: Python is busy all the time, calling one operation
    after the other, and the GPU computes for a moment and waits for the next one. With CUDA graphs: Python makes one
    short call per forward pass, the GPU computes each pass without gaps, and several rounds fit into the time of one. It
    is a sketch."""
    caption = f"""
    <p><b>A sketch, not a trace.</b> Only the number of rounds is measured: {speed["graphs"]} against {speed["eager"]}
    tokens per second with <code>"zoo:draft"</code> on one {FIGURES["machine"]["device"]}, where a pass of the target over
    4 positions takes {passes["eager"]:.1f} ms eagerly and {passes["graphs"]:.1f} ms as a graph. In eager passes of a
    small model the GPU waits for Python. A graph needs one call for a whole pass, and what is left idle is the work
    between passes.</p>"""
    return drawn("timeline", "What a GPU does in a round", told, caption, 216, parts)


def roofline() -> str:
    """A measured product. The level line is its least time, the rising one its time per token at 40 tokens."""
    times = {int(n): time for n, time in PRODUCTS["milliseconds"]["bfloat16"]["AVX512"].items()}
    reading, computing = min(times.values()), times[40] / 40
    left, bottom = 40, 190

    def at(n: float, time: float) -> tuple[float, float]:
        return left + 15 + math.log2(n) * 56, bottom - time * 100

    parts = [text(0, 13, "milliseconds"), line([(left, 24), (left, bottom), (WIDTH, bottom)], "", arrow=False)]
    for tick in (0, 0.5, 1, 1.5):
        parts.append(text(left - 8, at(1, tick)[1] + 4.5, f"{tick:g}", "", "end"))
    for n in (1, 2, 5, 8, 16, 40):
        parts.append(text(at(n, 0)[0], bottom + 18, str(n), "", "middle"))
    rising = [at(n / 4, computing * n / 4) for n in range(32, 180)]
    parts += [
        text((left + WIDTH) / 2, bottom + 38, "tokens in a forward pass", "", "middle"),
        line([at(0.85, reading), at(42, reading)], "target dashed", arrow=False),
        line(rising, "gone dashed", arrow=False),
        line([at(n, time) for n, time in times.items()], "", arrow=False),
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in (at(n, time) for n, time in times.items())),
        text(at(1, 0)[0] - 5, at(1, reading)[1] + 18, "time to read the weight", "target"),
        text(at(19, 0)[0], 44, "time to compute", "gone", "end"),
    ]
    for first, rows in ((1, "1 row"), (8, "8 rows")):
        x, end = at(first, 0)[0], at(5 * first, 0)[0]
        grows = times[5 * first] / times[first]
        parts += [
            line([(x, bottom + 54), (end, bottom + 54)], "draft"),
            text((x + end) / 2, bottom + 72, f"{rows}: {grows:.1f} times", "draft", "middle"),
        ]
    told = f"""
    A curve of milliseconds by tokens in a forward pass, from 1 to 40: about {reading:.2f} ms up to 8 tokens, then rising, and
    {times[40]:.2f} ms for 40. For one row, a draft of four takes a pass from 1 to 5 tokens, which costs little. For 8 rows it
    takes it from 8 to 40 tokens, which takes {times[40] / times[8]:.1f} times as long."""
    caption = f"""
    <p>The points are measured: a product with one bfloat16 weight of 4096 x 1024 by AVX512, on {PRODUCTS["about"]["threads"]}
    threads of an {PRODUCTS["about"]["processor"]}. With few tokens it waits for the <b class="target">weight</b> to be
    read, and further tokens are free. With many, it waits for the <b class="gone">arithmetic</b>. The dashed lines are the
    least time, and the time per token at 40 tokens. An <b class="draft">arrow</b> is what a draft of four adds to a pass,
    with the ratio of the two times: eight rows have used up the free part by themselves.</p>"""
    return drawn("roofline", "Why a batch leaves less for drafts", told, caption, 266, parts)


def call() -> str:
    """The way of a greedy call with a draft model, by WAY: once down the left, then round by round."""
    parts, y, high = [], 0.0, 24
    for title, files in WAY.items():
        parts.append(text(0, y + 13, title, "bold"))
        y += 22
        again = title != START
        for number, (file, does) in enumerate(files):
            parts += [
                box(26, y, 190, high, file, "solid" if not again else "draft" if "methods/" in file else "target"),
                text(222, y + 16.5, does),
            ]
            if number:
                parts.append(line([(121, y - 8), (121, y - 1)]))
            y += high + 8
        if again:
            top, middle = y - len(files) * (high + 8) + high / 2, y - 8 - high / 2
            parts.append(line([(26, middle), (10, middle), (10, top), (25, top)]))
        y += 10
    told = "From top to bottom, " + "; then ".join(
        ", ".join(f"{file} {does}" for file, does in files) for files in WAY.values()
    )
    caption = """
    <p>The files in which a greedy call with a draft model spends its steps. What is in the second group runs once for each
    round, until the text has ended: the <b class='draft'>draft</b>, then the <b class='target'>target</b> and what
    judges.</p>"""
    return drawn("call", "The way of one call", told + ".", caption, y, parts)


DRAWINGS: dict[str, Callable[[], str]] = {
    "call": call,
    "kv-rewind": kv_rewind,
    "tree-masks": tree_masks,
    "eagle": eagle,
    "mtp": mtp,
    "block": block,
    "suffix": suffix,
    "quantized": quantized,
    "timeline": timeline,
    "roofline": roofline,
}
