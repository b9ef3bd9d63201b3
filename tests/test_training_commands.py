"""`assisted train ...`: every method from the command line, resumed, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from architectures import build
from pairs import BY_NAME
from pairs import tokenizer as tiny_tokenizer
from safetensors.torch import load_file

from assisted import zoo
from assisted.cli import train as training
from assisted.cli.main import main
from assisted.methods.eagle.train import EagleSettings
from assisted.methods.shared.training.method import Plan


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    """A target with its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("school")
    build(BY_NAME["llama"], num_hidden_layers=4).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "text.txt").write_text("abcdefgh" * 200)
    return folder


def call(school, method, out, *more):
    plan = ["--steps", "3", "--batch", "2", "--context", "16", "--evaluate-rows", "2", "--checkpoint-every", "1"]
    text = ["--text", str(school / "text.txt")]
    return main(["train", method, "--target", str(school / "target"), "--out", str(out), *text, *plan, *more])


@pytest.mark.parametrize(
    ("method", "options", "places"),
    [
        ("distill", ["--layers", "2", "--on-policy", "0.5", "--optimizer", "muon"], 1),
        ("pard", ["--layers", "2", "--tokens", "3", "--optimizer", "muon"], 3),
        ("early-exit", ["--optimizer", "muon"], 3),
        ("medusa", ["--heads", "3", "--own-output"], 3),
        ("eagle", ["--unroll", "2", "--draft-vocab", "30", "--loss", "tv"], 5),
        ("eagle", ["--version", "1"], 5),
        ("eagle", ["--unroll", "2", "--format", "speculators", "--taps", "1", "2"], 5),
        ("eagle", ["--parallel", "2", "--format", "speculators"], 2),
        ("mtp", ["--unroll", "2", "--positions", "4"], 4),
        ("assistant", ["--layers", "2", "--unroll", "2", "--positions", "4", "--optimizer", "muon"], 4),
        ("dflash", ["--block", "4", "--window", "5", "--optimizer", "muon"], 3),
        ("dflash", ["--block", "4", "--next-token", "--markov", "rnn", "--taps", "1", "2"], 4),
    ],
)
def test_every_method(school, tmp_path, capsys, method, options, places):
    assert call(school, method, tmp_path, *options, "--stop-after", "1") == 0
    capsys.readouterr()
    assert call(school, method, tmp_path, *options, "--json") == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["folder"] == str(tmp_path)
    assert result["held_out"]["step"] == 3
    assert len(result["held_out"]["greedy"]) == places
    assert "memory:" in shown.err
    assert "disk:" in shown.err
    written = json.loads((tmp_path / "training.json").read_text())
    assert written["steps"] == 3
    assert written["target"] == str(school / "target")
    assert any(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("early-exit", []),
        ("medusa", ["--own-output"]),
        ("eagle", ["--draft-vocab", "30"]),
    ],
)
def test_stored_in_half_precision(school, tmp_path, method, options):
    """What is measured at the end is what is stored."""
    assert call(school, method, tmp_path / "whole", *options) == 0
    assert call(school, method, tmp_path / "half", *options, "--store", "bfloat16") == 0
    whole, half = (
        {key: tensor for file in (tmp_path / name).glob("*.safetensors") for key, tensor in load_file(file).items()}
        for name in ("whole", "half")
    )
    assert whole.keys() == half.keys()
    for key, tensor in whole.items():
        assert torch.equal(half[key], tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
    assert json.loads((tmp_path / "half" / "training.json").read_text())["store"] == "bfloat16"


def test_heads_name_the_target_as_it_was_given(school, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "_MODELS", school)
    plan = ["--steps", "1", "--batch", "2", "--context", "16", "--evaluate-rows", "2"]
    text = ["--text", str(school / "text.txt")]
    assert main(["train", "medusa", "--target", "zoo:target", "--out", str(tmp_path), *text, *plan]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == "zoo:target"


def test_what_is_refused(school, tmp_path, capsys):
    assert call(school, "distill", tmp_path) == 2
    assert "draft, layers: give one of them" in capsys.readouterr().err
    assert call(school, "medusa", tmp_path, "--context", "2000") == 2
    assert "context: windows of 2000 tokens" in capsys.readouterr().err
    assert call(school, "medusa", tmp_path / "a", "--stop-after", "1") == 0
    assert call(school, "medusa", tmp_path / "a", "--heads", "2") == 2
    assert "heads: the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["distill", "pard", "early-exit", "medusa", "eagle", "mtp", "dflash", "assistant"])
def test_help_says_what_everything_is(method, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", method, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--checkpoint-every N" in shown
    assert "(default: 1000)" in shown
    assert "_" not in shown.replace("hidden_states", "")  # one spelling of each option
    assert f"(default: { {'early-exit': '0.0001', 'dflash': '0.0006'}.get(method, '0.001') })" in shown


def test_a_methods_parser_is_made_when_it_runs(capsys, monkeypatch):
    """It imports torch, and help must not."""
    monkeypatch.setattr(training, "options", None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    assert "early-exit" in capsys.readouterr().out
    assert "torch" not in vars(training)


def test_options_are_the_settings(capsys):
    line = "--target t --out o --text a b --taps 1 2 --no-norms --version 3 --draft-vocab 9 --bfloat16 --lr 0.5"
    settings, plan, args = training.options("eagle").parse_args_into_dataclasses(line.split(), look_for_args_file=False)
    assert settings == EagleSettings(taps=[1, 2], norms=False, draft_vocab=9)
    assert plan == Plan(bfloat16=True, lr=0.5)
    assert (args.target, args.text, args.compile, args.store) == ("t", ["a", "b"], False, "float32")
    with pytest.raises(SystemExit) as ended:
        main(["train", "eagle", *line.split(), "--version", "2"])
    assert ended.value.code == 2
    assert "argument --version: invalid choice" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["train", "eagle", *line.split(), "--unknown", "2"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --unknown 2" in capsys.readouterr().err
