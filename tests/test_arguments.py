"""What several commands take and answer alike."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from assisted.cli.arguments import (
    add_json,
    add_loading,
    add_target,
    device,
    int_or_name,
    loading,
    option,
    print_or_write,
    require_tokenizer,
)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_json(parser, "all results")
    add_loading(parser)
    return parser.parse_args(words)


def test_what_is_left_out_is_not_handed_on() -> None:
    assert loading(parsed("--device", "cpu")) == {}
    named = parsed("--device", "cpu", "--dtype", "float32", "--draft-length", "3", "--draft-window", "64")
    assert loading(named) == {"dtype": "float32", "draft_length": 3, "draft_window": 64}


@pytest.mark.parametrize(("short", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtypes_have_short_names(short: str, name: str) -> None:
    assert parsed("--dtype", short).dtype == name


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ([], "zoo:target"),
        (["mine"], "mine"),
        (["--target", "mine"], "mine"),
        (["--drafts", "a", "b", "--target", "mine"], "mine"),
        (["mine", "--drafts", "a", "b"], "mine"),
    ],
)
def test_a_target_comes_first_or_by_name(words: list[str], target: str) -> None:
    parser = argparse.ArgumentParser()
    add_target(parser, parser.add_argument_group("the pair"), "a model")
    parser.add_argument("--drafts", nargs="+")
    assert parser.parse_args(words).target == target


def test_an_option_has_the_name_of_earlier_versions_too() -> None:
    parser = argparse.ArgumentParser()
    option(parser, "--max-new-tokens", "new tokens", 48, before="--new-tokens")
    assert [
        parser.parse_args(words).max_new_tokens for words in ([], ["--max-new-tokens", "7"], ["--new-tokens", "5"])
    ] == [48, 7, 5]
    assert "--new-tokens" not in parser.format_help().replace("--max-new-tokens", "")


def test_a_number_or_a_name() -> None:
    assert (int_or_name("4"), int_or_name("-1"), int_or_name("adaptive")) == (4, -1, "adaptive")


def test_json_goes_where_it_was_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [1, 2]}
    print_or_write(parsed().json, value, "a table")
    assert capsys.readouterr().out == "a table\n"
    print_or_write(parsed("--json").json, value, "a table")
    printed = capsys.readouterr().out
    assert json.loads(printed) == value
    file = tmp_path / "a.json"
    print_or_write(parsed("--json", str(file)).json, value, "a table")
    assert file.read_text(encoding="utf-8") == printed
    assert capsys.readouterr().out == "a table\n"


def test_refused() -> None:
    with pytest.raises(ValueError, match="device: nowhere"):
        device("nowhere")
    with pytest.raises(ValueError, match="target: some/model"):
        require_tokenizer(None, "some/model")
