"""Tokenizers and ends of a text in GGUF files: all that a file states holds, also where transformers leaves it out. The
expected tokens are those of llama.cpp (xllamacpp 2026.10.11549)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import SPECIAL, write_llama
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from assisted import AssistedModelForCausalLM
from assisted.loading.vocabulary import find_tokenizer

pytest.importorskip("gguf", reason="needs the `gguf` extra")

PAIRS = [("(", "a"), ("Ġ", "Ġ"), ("ĉ", "a"), ("!", "Ċ")]
BYTE_LEVEL = {
    "tokens": [*SPECIAL, *bytes_to_unicode().values(), *("".join(pair) for pair in PAIRS)],
    "merges": [" ".join(pair) for pair in PAIRS],
}
WORDS = ["▁", "a", "b", "▁a", "ab", "▁ab"]
SENTENCEPIECE = {
    "model": "llama",
    "pre": "default",
    "tokens": [*SPECIAL, *(f"<0x{number:02X}>" for number in range(256)), *WORDS],
    "token_type": [3, 3, 3, *[6] * 256, *[1] * len(WORDS)],
    "scores": [0.0] * 259 + [-float(number) for number in range(len(WORDS))],
    "merges": None,
    "add_bos_token": False,
}


def read(folder: Path, **stated: Any) -> Any:
    return find_tokenizer(str(write_llama(folder / "model.gguf", tokenizer=stated)))


@pytest.mark.parametrize(
    ("split", "text", "expected"),
    [
        ("gpt-2", "(a  1\ta!\n", "( a Ġ Ġ 1 ĉ a ! Ċ"),
        ("stablelm2", "(a  1\ta!\n", "(a Ġ Ġ 1 ĉa !Ċ"),
        ("seed-coder", "(a  1\ta!\n", "(a Ġ Ġ 1 ĉa ! Ċ"),
        ("smollm", "(a  1\ta!\n", "( a ĠĠ 1 ĉ a ! Ċ"),
        ("starcoder", "(a  1\ta!\n", "( a ĠĠ 1 ĉ a ! Ċ"),
        ("deepseek-coder", "(a  1\ta!\n", "( a ĠĠ 1 ĉa ! Ċ"),
    ],
)
def test_a_text_is_split_as_the_file_says(split: str, text: str, expected: str, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, pre=split, **BYTE_LEVEL)
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == expected.split()
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(text).input_ids == ids


def test_an_unknown_way_to_split_is_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^tokenizer: .*'viking'.*of the original"):
        read(tmp_path, pre="viking")


@pytest.mark.parametrize(
    ("stated", "first"),
    [
        ({}, "<s>"),
        ({"pre": "tekken"}, "<s>"),
        ({"add_bos_token": False}, "ab"),
        ({"pre": "qwen2"}, "ab"),
        ({"pre": "qwen2", "add_bos_token": True}, "<s>"),
    ],
)
def test_whether_a_text_begins_with_bos(stated: dict[str, Any], first: str, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, **stated)
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert each.convert_ids_to_tokens(each("ab").input_ids)[0] == first
        assert each("ab", add_special_tokens=False).input_ids == [259]


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, "▁ab"), ({"add_space_prefix": True}, "▁ab"), ({"add_space_prefix": False}, "ab")]
)
def test_whether_a_text_begins_with_a_space(stated: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, **SENTENCEPIECE, **stated)
    for text in ("ab", "ab ab"):
        ids = tokenizer(text).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == [expected, *["▁ab"] * text.count(" ")]
        assert tokenizer.decode(ids) == text


def test_a_text_ends_with_the_turn(tmp_path: Path) -> None:
    """Also in a saved pair, and as in llama.cpp."""
    call: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "draft_length": 4}
    ids = torch.arange(10, 30)[None]
    endless = AssistedModelForCausalLM.from_pretrained(write_llama(tmp_path / "endless.gguf"))
    text = endless.generate(ids, **call)[0, 20:].tolist()
    assert len(text) == 60
    end = text[20]
    file = write_llama(tmp_path / "model.gguf", tokenizer={"eot_token_id": end})
    pair = AssistedModelForCausalLM.from_pretrained(file)
    pair.save_pretrained(tmp_path / "pair")
    for each in (pair, AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")):
        assert each.generate(ids, **call)[0, 20:].tolist() == text[: text.index(end) + 1]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, [2]),
        ({10: "<end_of_turn>"}, [2, 10]),
        ({10: "<|end|>", 11: "<|eom_id|>"}, [2, 10, 11]),
        ({10: "<|end|>", 11: "<|return|>"}, [2]),
    ],
)
def test_ends_by_their_names(named: dict[int, str], expected: list[int], tmp_path: Path) -> None:
    tokens = [*SPECIAL, *bytes_to_unicode().values(), "ab"]
    for number, token in named.items():
        tokens[number] = token
    file = write_llama(tmp_path / "model.gguf", tokenizer={"tokens": tokens})
    ends = AssistedModelForCausalLM.from_pretrained(file).generation_config.eos_token_id
    assert (ends if isinstance(ends, list) else [ends]) == expected
