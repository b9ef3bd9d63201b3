"""The notebooks' helpers: exercises, figures, tables and sliders."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import pytest
from kit import COLOURS, INK, attempt, compare, figure_style, show, slider, table, token_tree


def doubled(candidate) -> None:
    assert candidate(3) == 6, f"twice 3 is 6, not {candidate(3)}.\nA second line."


@pytest.mark.parametrize(
    ("solution", "said"),
    [
        (lambda x: 2 * x, "Correct.\n"),
        (lambda x: x, "Not solved yet: twice 3 is 6, not 3.\n"),
        (lambda x: None, "Not solved yet: twice 3 is 6, not None.\n"),
    ],
)
def test_attempt_says_what_is_missing(solution, said: str, capsys: pytest.CaptureFixture) -> None:
    attempt(doubled, solution)
    assert capsys.readouterr().out == said


def test_attempt_shows_the_line_of_the_solution_that_raised(capsys: pytest.CaptureFixture) -> None:
    def helper(x):
        return x + "a"  # here

    def solution(x):
        return helper(x)

    attempt(doubled, solution)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Not solved yet: TypeError: unsupported operand type(s) for +: 'int' and 'str'"
    line = helper.__code__.co_firstlineno + 1
    assert second == f'  in helper, line {line}: return x + "a"  # here'

    def asks_torch(x):
        return json.loads(x)  # the error is raised in another file

    attempt(doubled, asks_torch)
    assert (
        capsys.readouterr().out.splitlines()[1].endswith("return json.loads(x)  # the error is raised in another file")
    )

    def broken_check(candidate) -> None:
        raise KeyError("not the reader's error")

    attempt(broken_check, solution)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_compare_shows_predictions_beside_measurements(capsys: pytest.CaptureFixture) -> None:
    compare({"copied": 3, "fresh": None}, {"copied": 2.5, "fresh": 1.0})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["your", "prediction", "measured"]
    assert lines[2:] == [["copied", "3", "2.50"], ["fresh", "-", "1.00"]]
    with pytest.raises(ValueError, match="prediction"):
        compare({"copied": 3}, {"copy": 2})


def test_an_exercise_still_to_be_written_is_no_error(capsys: pytest.CaptureFixture) -> None:
    def nothing(x):
        raise NotImplementedError

    def silent(candidate) -> None:
        if candidate != 1:
            raise AssertionError

    attempt(doubled, nothing)
    attempt(silent, 2)
    assert capsys.readouterr().out.splitlines() == [
        "Not solved yet: the function is still to be written.",
        "Not solved yet: the check does not hold.",
    ]


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#1e1e1e", "#1e2129"])
@pytest.mark.parametrize("colour", [INK, *COLOURS.values()])
def test_colours_can_be_seen_on_light_and_on_dark(colour: str, ground: str) -> None:
    assert contrast(colour, ground) >= 3.2


def test_figures_have_no_ground_of_their_own() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context():
        figure_style()
        assert matplotlib.rcParams["figure.facecolor"] == matplotlib.rcParams["axes.facecolor"] == "none"
        assert matplotlib.rcParams["text.color"] == INK


def test_table_in_both_forms(capsys: pytest.CaptureFixture) -> None:
    made = table(["draft", "tokens", "rate"], [["a & b", 3, 0.5], ["none", 12, 1.0]])
    show(made)
    assert capsys.readouterr().out.splitlines() == [
        "draft  tokens  rate",
        "-----  ------  ----",
        "a & b       3  0.50",
        "none       12  1.00",
    ]
    page = ElementTree.fromstring(made._repr_html_())
    assert [cell.text for cell in page.iter("td")] == ["a & b", "3", "0.50", "none", "12", "1.00"]
    with pytest.raises(ValueError, match="rows"):
        table(["a"], [[1, 2]])


def states(picture) -> dict:
    return json.loads(re.search(r"const data = (.*?\})(?:, parents = .*)?;\n", picture.text).group(1))


def test_slider_holds_every_state() -> None:
    controls = {"acceptance": [0.5, 0.9], "length": [1, 2, 4]}
    picture = slider(
        controls,
        lambda a, g: {"target": ([0, 1, 2], [0, a, g]), "draft": ([0, 2], [g, g])},
        text=lambda a, g: f"{a} < {g}",
        start=(0.9, 2),
        xlabel="x",
        ylabel="y",
    )
    data = states(picture)
    assert data["values"] == [["0.5", "0.9"], ["1", "2", "4"]]
    assert data["text"] == [f"{a} < {g}" for a, g in itertools.product(*controls.values())]
    assert len(data["d"]) == 6 and all(len(paths) == 2 for paths in data["d"])
    # before any script runs, it shows the state asked for
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", picture.text, re.DOTALL).group(0))
    curves = [path for path in svg.iter("path") if path.get("class") == "curve"]
    assert [path.get("d") for path in curves] == data["d"][4]
    assert [path.get("stroke") for path in curves] == [COLOURS["target"], COLOURS["draft"]]
    assert "0.9 &lt; 2" in picture.text
    assert [float(value) for value in re.findall(r'value="(\d+)"', picture.text)] == [1, 1]


def test_slider_asks_no_other_host_and_is_small() -> None:
    picture = slider({"g": range(1, 13)}, lambda g: {"e": (range(20), [g * x for x in range(20)])})
    assert not re.search(r"(src|href)=|https?://", picture.text)
    assert len(picture.text) < 12_000


def test_slider_refuses() -> None:
    flat = {"e": ([0, 1], [1, 1])}
    with pytest.raises(ValueError, match="controls"):
        slider({"g": []}, lambda g: flat)
    with pytest.raises(ValueError, match="start"):
        slider({"g": [1]}, lambda g: flat, start=(2,))
    with pytest.raises(ValueError, match="series"):
        slider({"g": [1, 2]}, lambda g: flat if g == 1 else {"other": ([0, 1], [1, 1])})


def test_token_tree_opens_unfolded() -> None:
    #  0 "a" - 2 "<b>" - 4 "e"
    #       \ 3 " d"
    #  1 "c"
    words, parents = ["a", "c", "<b>", " d", "e"], [-1, -1, 0, 0, 2]
    picture = token_tree(words, parents, [0.6, 0.3, 0.2, 0.1, 0.05], accepted=[0, 2])
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", picture.text, re.DOTALL).group(0))
    nodes = {int(group.get("data-node")): group for group in svg.iter("g")}
    assert list(nodes) == [0, 2, 4, 3, 1], "each node stands above the nodes below it"
    assert all(group.get("style") is None for group in nodes.values()), "nothing is hidden before a script runs"
    across = {node: int(re.search(r"\((\d+) ", group.get("transform")).group(1)) for node, group in nodes.items()}
    depths = {node: (x - min(across.values())) // 22 for node, x in across.items()}
    assert depths == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    assert [node for node, group in nodes.items() if group.find("circle").get("fill") != "none"] == [0, 2]
    assert nodes[2].find("text").text == "<b> 0.20" and nodes[3].find("text").text == "\u2423d 0.10"
    assert "5 nodes: the target accepts 2 and adds one token of its own." in picture.text
    assert "let folded = new Set();" in picture.text
    assert states(picture)["order"] == [0, 2, 4, 3, 1]
    assert not re.search(r"(src|href)=|https?://", picture.text)


def test_token_tree_refuses() -> None:
    with pytest.raises(ValueError, match="at least one node"):
        token_tree([], [], [])
    with pytest.raises(ValueError, match="probabilities"):
        token_tree(["a"], [-1], [])
    for parents in ([-1, 1], [0, -1], [-2, -1]):
        with pytest.raises(ValueError, match="parents"):
            token_tree(["a", "b"], parents, [0.5, 0.5])
