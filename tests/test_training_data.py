"""Text to learn from: where it is found, what is held out, and how it is cut into windows."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from pairs import tokenizer as tiny_tokenizer

from assisted.extras import install
from assisted.methods.shared.training import data
from assisted.methods.shared.training.data import Windows, pack, read_dataset, read_files, read_text, tokenize
from assisted.zoo import corpus

STREAM = np.arange(1000, dtype=np.int32)  # a token tells where it stands


def test_windows_are_stretches_of_the_stream():
    windows = Windows(STREAM, context=16, batch=3, seed=1)
    for step in range(50):
        rows = windows[step]
        assert rows.shape == (3, 16)
        assert rows.dtype == torch.int64
        assert torch.equal(rows, rows[:, :1] + torch.arange(16))


def test_a_step_is_a_function_of_the_seed_and_the_step():
    one, two = (Windows(STREAM, 16, 3, seed=1) for _ in range(2))
    forward = [one[step] for step in range(60)]
    backward = [two[step] for step in reversed(range(60))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    other = Windows(STREAM, 16, 3, seed=2)
    assert any(not torch.equal(other[step], forward[step]) for step in range(60))


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_every_window_comes_once_an_epoch(batch):
    windows = Windows(STREAM, 16, batch, seed=1)
    starts = torch.cat([windows[step] for step in range(5 * windows.an_epoch // batch + 1)])[:, 0].tolist()
    shifts = set()
    for epoch in range(5):
        seen = sorted(starts[epoch * windows.an_epoch : (epoch + 1) * windows.an_epoch])
        assert seen == list(range(seen[0], seen[0] + 16 * windows.an_epoch, 16))
        shifts.add(seen[0])
    assert len(shifts) > 1  # cut elsewhere each time


def test_short_texts_are_refused():
    with pytest.raises(ValueError, match="context: windows of 16 tokens need a text of at least 32, this one has 31"):
        Windows(STREAM[:31], 16, 1, 0)
    with pytest.raises(ValueError, match="the held-out text has 15 tokens"):
        pack(STREAM[:15], 16, 1)


@pytest.mark.parametrize(("rows", "expected"), [(1, [0]), (3, [0, 480, 976]), (100, list(range(0, 992, 16)))])
def test_packed_rows_are_spread_and_apart(rows, expected):
    found = pack(STREAM, 16, rows)
    assert torch.equal(found, found[:, :1] + torch.arange(16))
    assert found[:, 0].tolist() == expected


def test_documents_end_with_the_end_token():
    tokenizer = tiny_tokenizer()
    stream = tokenize(tokenizer, ["ab", "", "c"])
    end = tokenizer.eos_token_id
    assert stream.dtype == np.int32
    assert stream.tolist() == [*tokenizer("ab").input_ids, end, end, *tokenizer("c").input_ids, end]


def test_files_folders_and_patterns(tmp_path):
    (tmp_path / "a").mkdir()
    for name, content in (("b.txt", b"two"), ("a/a.py", b"one"), ("a/odd.bin", b"\xff"), ("c.md", b"three")):
        (tmp_path / name).write_bytes(content)
    assert list(read_files([str(tmp_path)])) == ["one", "two", "three"]
    assert list(read_files([str(tmp_path / "c.md"), str(tmp_path / "*.txt")])) == ["three", "two"]
    with pytest.raises(ValueError, match="is neither a file nor a folder and matches none"):
        list(read_files([str(tmp_path / "nothing*")]))
    with pytest.raises(ValueError, match=r"odd\.bin is not UTF-8 text"):
        list(read_files([str(tmp_path / "a" / "odd.bin")]))


def test_nothing_of_what_is_held_out_is_trained_on(tmp_path):
    tokenizer = tiny_tokenizer()
    for number in range(60):
        (tmp_path / f"{number:02}.txt").write_text("!" + chr(ord('"') + number) * 3)
    text = read_text(tokenizer, [str(tmp_path)])
    assert 0 < len(text.held_out) < len(text.training)
    common = {tokenizer.eos_token_id, *tokenizer("!").input_ids}
    marks = [set(part.tolist()) - common for part in (text.training, text.held_out)]
    assert not marks[0] & marks[1]
    assert len(marks[0] | marks[1]) == 60
    (tmp_path / "more.txt").write_text("~~~")
    more = read_text(tokenizer, [str(tmp_path)])
    assert set(text.held_out.tolist()) <= set(more.held_out.tolist())  # a document more leaves them held out


def test_of_one_document_the_end_is_held_out(tmp_path):
    tokenizer = tiny_tokenizer()
    (tmp_path / "a.txt").write_text("a" * 95 + "b" * 5)
    text = read_text(tokenizer, [str(tmp_path / "a.txt")])
    assert tokenizer.decode(text.training[:-1]) == "a" * 95
    assert tokenizer.decode(text.held_out[:-1]) == "b" * 5


def test_no_text(tmp_path):
    with pytest.raises(ValueError, match="text: nothing to train on"):
        read_text(tiny_tokenizer())
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="text: it is empty"):
        read_text(tiny_tokenizer(), [str(tmp_path)])
    with pytest.raises(ValueError, match="'zoo' has its own held-out text"):
        read_text(tiny_tokenizer(), ["zoo", str(tmp_path)])


def test_the_zoos_text_holds_out_other_packages(tmp_path, monkeypatch):
    kept, held = tmp_path / "kept.py", tmp_path / "held.py"
    kept.write_text("aaaa")
    held.write_text("bbbb")
    monkeypatch.setattr(corpus, "training_files", lambda: [kept])
    monkeypatch.setattr(corpus, "held_out_files", lambda: [held])
    tokenizer = tiny_tokenizer()
    text = read_text(tokenizer, ["zoo"])
    assert tokenizer.decode(text.training[:-1]) == "aaaa"
    assert tokenizer.decode(text.held_out[:-1]) == "bbbb"
    assert text.source == "zoo"


class Rows(list):
    column_names = ("id", "text")


def test_datasets(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Rows([{"text": str(number)} for number in range(5)])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(read_dataset("a/b", 3)) == ["0", "1", "2"]
    assert list(read_dataset("a/b:c:test")) == list("01234")
    list(read_dataset("a/b:test"))
    assert asked == [
        (("a/b",), {"split": "train"}),
        (("a/b", "c"), {"split": "test"}),
        (("a/b",), {"split": "test"}),
    ]
    monkeypatch.setattr(Rows, "column_names", ("question",))
    with pytest.raises(ValueError, match="has the columns question, none of text, content, completion"):
        list(read_dataset("a/b"))


def test_datasets_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=re.escape(install("train"))):
        list(read_dataset("a/b"))


def test_a_local_dataset(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(data.read_dataset(str(tmp_path))) == ["one", "two"]
    assert Path(tmp_path).exists()
