"""Conversations of a chat model with itself: whole, reproducible, kept for a resumed training, and of both temperatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import END, MARKED_TEMPLATE, save_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from assisted.cli.main import main
from assisted.lab.training import written as chats
from assisted.methods.shared.training.data import HELD_OUT, Text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with random weights, which often ends its turns."""
    path = tmp_path_factory.mktemp("chat")
    size = save_tokenizer(path, MARKED_TEMPLATE)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, **sizes, **heads)).eval()
    end = AutoTokenizer.from_pretrained(path).eos_token_id
    with torch.no_grad():
        model.lm_head.weight[end] *= 4
    model.save_pretrained(path)
    return path


@pytest.fixture
def loaded(folder: Path) -> tuple[LlamaForCausalLM, Any]:
    return LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def converse(*args: Any, **keywords: Any) -> np.ndarray:
    return np.concatenate(list(chats.conversations(*args, **keywords)))


def test_conversations_are_as_the_template_renders_them(loaded: tuple[Any, Any]) -> None:
    target, tokenizer = loaded
    stream = converse(target, tokenizer, 2000, seed=1)
    assert stream.dtype == np.int32
    assert 2000 <= len(stream) < 6000
    text = tokenizer.decode(stream)
    opening = chats._rendered(tokenizer, "x").partition("x")[0]
    assert text.startswith(opening)
    assert text.count(opening) >= 3
    assert text.count("<assistant>") >= 3
    assert END in text  # answers end where the model ended them
    assert np.array_equal(stream, converse(target, tokenizer, 2000, seed=1))
    assert not np.array_equal(stream[:500], converse(target, tokenizer, 500, seed=2)[:500])


def test_answers_are_the_targets_own(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of different lengths in one batch, and the first batch greedy."""
    target, tokenizer = loaded
    called = []

    def recorded(writer, prompts, most, end, own=chats.continued, **sampling):
        called.append((prompts, most, sampling, own(writer, prompts, most, end, **sampling)))
        return called[-1][-1]

    monkeypatch.setattr(chats, "continued", recorded)
    converse(target, tokenizer, 2000, seed=0)
    prompts, most, sampling, answers = called[1]  # after the questions
    assert sampling == {"do_sample": False}
    assert len({len(prompt) for prompt in prompts}) > 1
    for prompt, answer in list(zip(prompts, answers, strict=True))[:4]:
        alone = target.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=most, eos_token_id=tokenizer.eos_token_id
        )
        assert alone[0, len(prompt) :].tolist()[:16] == answer[:16]


def test_what_cannot_talk_is_named(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokenizer = loaded
    monkeypatch.setattr(chats, "continued", lambda *args, **sampling: [[] for _ in args[1]])
    with pytest.raises(ValueError, match="chats: the target asks nothing"):
        converse(target, tokenizer, 10)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chats: the target's tokenizer has no chat template"):
        converse(target, tokenizer, 10)


def test_some_are_held_out_and_all_are_kept(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    target, tokenizer = loaded
    text = chats.with_chats(target, tokenizer, Text.empty(), 1000, tmp_path, 0)
    assert text.source == "chats"
    both = len(text.training) + len(text.held_out)
    assert len(text.held_out) == both - int(both * (1 - HELD_OUT)) > 0
    again = chats.with_chats(None, None, text, 1000, tmp_path, 0)  # type: ignore[arg-type]  # nothing is generated again
    assert np.array_equal(again.training[: len(text.training)], text.training)
    assert len(again.training) == 2 * len(text.training)


def test_the_command_needs_no_other_text(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "head"
    argv = ["train", "eagle", "--target", str(folder), "--out", str(out), "--chats", "3000", "--steps", "2"]
    argv += ["--batch", "2", "--context", "32", "--unroll", "2", "--positions", "2", "--draft-vocab", "300"]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["held_out"] is not None
    assert json.loads((out / "training.json").read_text())["draft_vocab"] == 300
    assert (out / "chats.npz").is_file()


def test_an_interrupted_run_goes_on_with_the_next_batch(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    target, tokenizer = loaded
    batches = chats.conversations(target, tokenizer, 4000, seed=3)
    whole = [next(batches), next(batches)]
    assert np.array_equal(next(chats.conversations(target, tokenizer, 4000, seed=3, first=1)), whole[1])
    chats._write(tmp_path / "chats.npz", whole[:1])
    tokens = len(whole[0]) + 1  # one more batch, which is smaller as less is missing
    text = chats.with_chats(target, tokenizer, Text.empty(), tokens, tmp_path, 3)
    assert np.array_equal(text.training[: len(whole[0]) // 2], whole[0][: len(whole[0]) // 2])
    assert len(chats._read(tmp_path / "chats.npz")) == 2


def test_half_are_about_the_documents(loaded: tuple[Any, Any]) -> None:
    target, tokenizer = loaded
    first, second = (tokenizer(text * 100).input_ids for text in ("one two three ", "def of(x): return x "))
    about = [np.asarray(ids, dtype=np.int32) for ids in (first, second)]
    batches = chats.conversations(target, tokenizer, 4000, about=about)
    free, bound = tokenizer.decode(next(batches)), tokenizer.decode(next(batches))
    requests = [request for request in chats._REQUESTS if request in bound]
    assert requests and not any(request in free for request in requests)
    assert "one two three" in bound and "def of(x)" in bound
    with pytest.raises(ValueError, match="about: 10 tokens are too few"):
        next(chats.conversations(target, tokenizer, 10, about=[about[0][:10]]))


def test_about_needs_chats(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("abcdefgh" * 200)
    given = ["--target", str(folder), "--out", str(tmp_path / "out"), "--text", str(tmp_path / "text.txt")]
    with pytest.raises(SystemExit):
        main(["train", "eagle", *given, "--about", "zoo"])
    assert "--about: only with --chats" in capsys.readouterr().err
