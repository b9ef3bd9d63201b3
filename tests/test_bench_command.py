"""`assisted bench` from arguments to files: the table, the JSON and the page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from architectures import half_right
from pairs import pair as built
from pairs import tokenizer as letters

from assisted.cli.main import main
from assisted.extras import install
from assisted.lab import bench
from assisted.lab.bench import plots
from assisted.lab.bench.table import CELLS, page

SMALL = ["--count", "1", "--max-new-tokens", "8", "--repeats", "1", "--no-compile", "--threads", "1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    target = built("llama")[0]
    for name, model in (("target", target), ("draft", half_right(target))):
        model.save_pretrained(root / name)
        letters().save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec-bench") / "question.jsonl"
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": ["f(x)=" * (n + 1)]} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def result(folders: Path, questions: Path) -> bench.Result:
    """Two lengths of context; one drafter cannot be loaded."""
    pytest.importorskip("sympy")
    return bench.measure(
        str(folders / "target"),
        str(folders / "draft"),
        ["suffix", str(folders / "draft"), "early-exit:99"],
        [str(questions)],
        1,
        bench.Rules(new_tokens=8, repeats=1),
        context=[24, 12],
        compiled=False,
        draft_length=3,  # an adaptive one may draft nothing on a busy machine
    )


def command(folders: Path, questions: Path, *more: str) -> list[str]:
    pair = ["--target", str(folders / "target"), "--draft", str(folders / "draft")]
    return ["bench", *pair, "--prompts", str(questions), *SMALL, *more]


def test_a_table_and_a_file(
    folders: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.json"
    argv = command(folders, questions, "--drafts", "suffix", f"ngram+{folders / 'draft'}", "--json", str(file))
    monkeypatch.setattr(sys, "argv", ["assisted", *argv])
    assert main(argv) == 0
    out = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["command"].startswith("assisted bench --target")
    assert written["machine"]["dtype"] == "float32" and written["machine"]["threads"] == 1
    assert list(written["prompts"]) == ["a", "b"]
    (point,) = written["points"]
    rows = point["rows"]
    assert [row["family"] for row in rows] == [
        "plain",
        "transformers assisted",
        "transformers lookup",
        "no draft",
        *["assisted"] * 2,
    ]
    assert len(point["heat"]) == len(bench.methods.PEERS) + len(bench.methods.LOOKUPS)
    assert rows[0]["speedup"] == {"ratio": 1, "low": 1, "high": 1}
    assert all(row["same"] == row["rows"] == 2 and set(row["by_category"]) == {"a", "b"} for row in rows)
    assert all(row["first_token_milliseconds"] > 0 for row in rows)
    for row in rows:
        assert any(line.startswith(row["name"]) and "2/2" in line for line in out.splitlines())
    assert main(["bench", "--read", str(file)]) == 0
    assert capsys.readouterr().out == out
    assert main(["bench", "--read", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written


@pytest.mark.parametrize(
    ("argv", "draft", "drafts"),
    [
        ([], None, None),
        (["--draft", "suffix"], "suffix", None),
        (["--draft", "suffix", "--draft", "zoo:draft"], "zoo:draft", ["suffix", "zoo:draft"]),
        (["--draft", "zoo:draft", "--drafts", "ngram", "recycle"], "zoo:draft", ["ngram", "recycle"]),
    ],
    ids=str,
)
def test_drafts_to_compare(
    argv: list[str], draft: str | None, drafts: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        sys.modules["assisted.lab.bench.measure"], "measure", lambda target, *more, **kwargs: seen.append(more) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        main(["bench", *argv])
    assert seen[0][:2] == (draft, drafts)


def test_a_sampled_run_and_a_batch(folders: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--drafts", "suffix", "--temperature", "0.8", "--top-p", "0.9", "--batch", "2", "--json"]
    assert main(command(folders, questions, *argv)) == 0
    result = json.loads(capsys.readouterr().out)
    (point,) = result["points"]
    plain, peer, *_, ours = point["rows"]
    assert point["batch"] == 2
    assert "batch" in peer["error"] and peer["speedup"] is None  # transformers drafts for one row only
    assert plain["same"] is ours["same"] is None
    assert plain["rows"] == ours["rows"] == 4
    assert "failed: transformers assisted" in bench.table(bench.Result.from_dict(result))


def test_a_result_survives_json(result: bench.Result) -> None:
    assert bench.Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_sweep_has_a_point_for_each_length(result: bench.Result) -> None:
    assert [(point.batch, point.context) for point in result.points] == [(1, 12), (1, 24)]
    shown = bench.table(result)
    assert "Batch 1, context 12; 1.00 is plain" in shown and "Batch 1, context 24" in shown
    assert shown.count("failed: assisted early-exit:99: ValueError") == 2
    marked = bench.markdown(result)
    assert marked.count("| assisted suffix |") == 2
    assert all(line.count("|") == len(CELLS) + 1 for line in marked.splitlines() if line.startswith("|"))


class _Page(HTMLParser):
    """The tags that are open at the end, and the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.points: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href"):
                self.points.append(value or "")
            if name == "id":
                self.names.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_needs_nothing_beside_it(result: bench.Result) -> None:
    pytest.importorskip("matplotlib")
    text = page(replace(result, target="a <b>", command="assisted bench --x '<'"))
    parsed = _Page()
    parsed.feed(re.sub(r"<!doctype html>", "", text))
    assert parsed.open == []
    assert all(point.startswith("#") for point in parsed.points)
    assert {point[1:] for point in parsed.points} <= set(parsed.names)
    assert len(parsed.names) == len(set(parsed.names))
    assert "@import" not in text and "<script" not in text and "<link" not in text
    assert set(re.findall(r"url\(([^)]{0,2})", text)) <= {"#p"}
    assert "prefers-color-scheme: dark" in text and plots.INK not in text and "currentColor" in text
    assert "a &lt;b&gt;" in text and "<b>" not in text
    titles = re.findall(r"<h2>([^<]*)</h2><div role", text)
    assert [title.partition(" (")[0] for title in titles] == [
        "Speedup",
        "Accepted, by position in the draft",
        "Milliseconds a token: where they go",
        "Speedup against the length of the context",
    ]


def test_a_page_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--target", "nowhere", "--html", str(tmp_path / "page.html")]) == 2
    assert install("bench") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-new-tokens", "0"], "new_tokens: 0"),
        (["--top-p", "0.5"], "top_p: has no effect"),
        (["--batch", "0"], "batch: 0 is nothing"),
        (["--context", "0"], "context: 0 is nothing"),
        (["--context", "4000"], "context"),
        (["--count", "0"], "count: 0"),
        (["--device", "abacus"], "device: abacus is not here"),
        (["--read", "/dev/null"], "read: /dev/null is not a file that --json wrote"),
    ],
)
def test_errors_name_the_argument(
    argv: list[str], message: str, folders: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sympy")
    assert main(command(folders, questions, "--drafts", "suffix", *argv)) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.slow
def test_a_compiled_forward_takes_part(folders: Path, questions: Path) -> None:
    from assisted.lab.bench import methods

    pair, _ = bench.load(str(folders / "target"))
    batches = bench.batches(bench.read([str(questions)], pair.tokenizer, 2))
    compiled: Any = methods.plain(pair.target)[-1]
    plain, one = bench.race(
        pair.target, [*methods.plain(pair.target, False), compiled], batches, bench.Rules(8, 1), pad=0
    )
    assert one.error is None, one.error
    assert one.tokens == plain.tokens and one.passes is None
    _, rows = bench.summed_up([plain, one], batches, greedy=True)
    assert rows[1].tokens_per_pass == 1
