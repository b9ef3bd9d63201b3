"""The drawings of the docs: they are on the pages, can be heard, and show what the code does."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

import docs_drawings
from assisted.core.drafts import Draft
from assisted.engine.cache import SlotCache
from assisted.methods.suffix.tree import SuffixTree

pytestmark = pytest.mark.documents

ROOT = Path(__file__).parent.parent
PAGES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))}


@pytest.mark.parametrize("name", docs_drawings.DRAWINGS)
def test_is_told_and_fits(name: str) -> None:
    (svg,) = ElementTree.fromstring(docs_drawings.DRAWINGS[name]().replace("&nbsp;", " ")).findall("svg")
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    assert width == docs_drawings.WIDTH  # wider, its letters are too small on a phone
    assert svg.attrib["aria-labelledby"].split() == [svg[0].attrib["id"], svg[1].attrib["id"]]
    assert svg[0].text and len(svg[1].text or "") > 100
    for element in svg.iter("rect"):
        x, y, wide, high = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + wide <= width + 0.1 and y + high <= height, element.attrib
    for element in svg.iter():
        assert "font-size" not in element.attrib and "style" not in element.attrib  # one style: site.css


def test_every_drawing_is_on_one_page() -> None:
    shown = [name for text in PAGES.values() for name in re.findall(r"<!-- drawing: ([\w-]+) -->", text)]
    assert sorted(shown) == sorted(docs_drawings.DRAWINGS)


def test_lengths_are_those_of_the_cache() -> None:
    """The drawing's last lengths, and that what is committed is all that moves them."""
    before, keeps = zip(*docs_drawings.LENGTHS, strict=True)
    cache = SlotCache(rows=len(before), limit=16)
    cache.lengths = list(before)
    cache.place(4, torch.device("cpu"))
    assert cache.lengths == list(before)
    cache.commit(list(keeps))
    drawn = [
        int(found) for found in re.findall(r'class="bold target" text-anchor="end">(\d+)<', docs_drawings.kv_rewind())
    ]
    assert drawn == [*before, *before, *cache.lengths]


def test_mask_is_that_of_the_draft() -> None:
    page = PAGES[ROOT / "docs" / "concepts" / "tree-masks.md"]
    assert f"parents=torch.tensor([{list(docs_drawings.TREE)}])" in page  # the page builds what it shows
    parents = torch.tensor([docs_drawings.TREE])
    draft = Draft(tokens=torch.arange(4)[None], lengths=torch.tensor([4]), parents=parents)
    seen = [set(row.nonzero()[:, 0].tolist()) for row in draft.ancestors()[0]]
    assert docs_drawings.paths(docs_drawings.TREE) == seen
    picture = docs_drawings.tree_masks()
    assert picture.count("<circle") == int(draft.ancestors().sum())
    assert re.findall(r'class="bold" text-anchor="middle">(\d)<', picture) == [
        str(depth) for depth in draft.depths()[0].tolist()
    ]


def test_suffix_is_followed_as_drawn() -> None:
    words = docs_drawings.SUFFIX.split()
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tree = SuffixTree(24, [ids[word] for word in words])
    found = tree.best_chain(tree.points[-3], 3, 0.1)  # after the last three tokens
    assert found.tokens == [ids[word] for word in ("on", "the", "rug")]
    picture = docs_drawings.suffix()
    assert re.findall(r"(0\.\d\d)</text>", picture) == [f"{share:.2f}" for share in found.probabilities]
    text = " ".join(
        "".join(element.itertext()) for element in ElementTree.fromstring(picture).iter("text") if len(element)
    )
    assert text == docs_drawings.SUFFIX  # the words that are drawn
    shorter = [tree.best_chain(point, 3, 0.1).expected for point in tree.points[-2:]]
    assert max(shorter) <= found.expected  # the longest match is proposed
