"""The command line, run in this process on tiny stand-ins for the shipped pair."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_heads import random_head
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TextStreamer

import assisted
from assisted import AssistedModelForCausalLM, Suffix, chat, zoo
from assisted.cli import main as cli
from assisted.cli.arguments import Renamed
from assisted.cli.chat import _brought
from assisted.cli.main import main
from assisted.cli.watch import Pieces, Watch
from assisted.core.report import Report
from assisted.extras import install
from assisted.lab.bench import Rules
from assisted.methods.eagle.formats import save_eagle

CONTEXT = 512
PROMPT = "def add(self, other):\n    "
END = "<|endoftext|>"
# Leaves out the token that ended an answer, as the shipped template does.
BARE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MARKED_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None = BARE_TEMPLATE) -> int:
    """A byte-level BPE that knows a little Python. Returns its size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([inspect.getsource(argparse)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return len(fast)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `draft`, a target with some noise in it: often right, not always."""
    root = tmp_path_factory.mktemp("zoo")
    size = save_tokenizer(root / "target")
    save_tokenizer(root / "draft")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,  # logits far apart: no near-ties
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(root / "target")
    save_eagle(random_head(model, 3, taps=(1, 1, 1)), root / "eagle3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.04 * torch.randn_like(parameter))
    model.save_pretrained(root / "draft")
    return root


@pytest.fixture(autouse=True)
def shipped(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_MODELS", stand_ins)
    monkeypatch.delenv("ASSISTED_TRACEBACK", raising=False)


@pytest.fixture
def pair(shipped: None) -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft")


@pytest.fixture
def held_out() -> None:
    pytest.importorskip("sympy")
    pytest.importorskip("networkx")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command, which is told `typed` on standard input; gives what it printed, and with --json what that says."""

    def run(*argv: str, typed: str | None = None, code: int = 0) -> Any:
        if typed is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert main([*argv]) == code
        printed = capsys.readouterr()
        if "--json" not in argv or code:
            return printed
        return list(map(json.loads, printed.out.splitlines())) if argv[0] == "chat" else json.loads(printed.out)

    return run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[AssistedModelForCausalLM]:
    """The pairs that are loaded from now on."""
    found: list[AssistedModelForCausalLM] = []
    load = AssistedModelForCausalLM.from_pretrained

    def kept(*args: Any, **kwargs: Any) -> AssistedModelForCausalLM:
        found.append(load(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(AssistedModelForCausalLM, "from_pretrained", kept)
    return found


# Arguments, errors, exit codes


OF_PAIRS = ["--json", "--target", "--draft", "--draft-quantization", "--draft-length"]


@pytest.mark.parametrize(
    ("argv", "options"),
    [
        ([], []),
        (["zoo"], []),
        (["zoo", "list"], ["--json"]),
        *(([name], OF_PAIRS) for name in ("demo", "generate", "chat")),
        (["doctor"], ["--json", "--device", "--dtype", "--draft", "--text"]),
        (["bench"], ["--json", "--target", "--drafts", "--prompts", "--context", "--batch", "--html"]),
    ],
)
def test_help(argv: list[str], options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*argv, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "usage: assisted" in out and all(option in out for option in options)


@pytest.mark.parametrize("argv", [[], ["zoo"], ["train"]], ids=str)
def test_a_group_of_commands_alone_prints_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*argv, "--help"])
    assert alone == capsys.readouterr().out != ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"assisted {assisted.__version__}\n"


@pytest.mark.parametrize("argv", [[], *([name] for name in cli._EXAMPLES if name != "assisted")], ids=str)
def test_help_has_80_columns_and_examples_that_parse(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*argv, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for line in lines[lines.index("examples:") + 1 :]:
        assert cli._parser().parse_args(shlex.split(line.rpartition("|")[2])[1:]).command


def test_standard_error_has_nothing_that_a_user_cannot_act_on() -> None:
    """transformers imports torchao where it is installed, and torchao logs several lines about its own kernels."""
    argv = [sys.executable, "-m", "assisted", "generate", "def f(", "--max-new-tokens", "2", "--quiet"]
    done = subprocess.run(
        [*argv, "--draft", "self:int8", "--dtype", "bf16"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("started", ["script", "module"])
def test_help_imports_neither_torch_nor_transformers(started: str) -> None:
    """As the command `assisted` and as `python -m assisted`."""
    names = "sorted({'assisted.modeling', 'torch', 'transformers'} & {*sys.modules})"
    code = f"import atexit, sys; atexit.register(lambda: print({names})); sys.argv = ['/bin/assisted', '--help']"
    run = "from assisted.cli.main import main; main()"
    if started == "module":
        code, run = (
            code.replace("/bin/assisted", "-m"),
            "import runpy; runpy.run_module('assisted', run_name='__main__')",
        )
    done = subprocess.run([sys.executable, "-c", f"{code}\n{run}"], capture_output=True, text=True, check=True)
    assert "usage: assisted" in done.stdout and done.stdout.endswith("\n[]\n")


TARGET = ("--target", "zoo:target")
NUMBERS = {
    "--temperature 1e-300": "temperature: 1e-300 is not possible",
    "--temperature nan": "temperature: nan is not possible",
    "--temperature inf": "temperature: inf is not possible",
    "--temperature -1": "temperature: -1.0 is not possible",
    "--temperature 1 --top-p nan": "top_p: nan is no number",
    f"--seed {10**23}": f"seed: {10**23} is not possible",
    f"--seed {-(2**63) - 1}": "seed: -9223372036854775809 is not possible",
}
ERRORS = [
    *((("generate", PROMPT, *argv.split()), message) for argv, message in NUMBERS.items()),
    *((("chat", *TARGET, *argv.split()), message) for argv, message in NUMBERS.items()),
    (("generate", PROMPT, "--draft-length", "often"), "draft_length: 'often' is not known"),
    (("generate", PROMPT, "--draft-length", "0"), "draft_length: 0 is not possible"),
    (("generate", PROMPT, "--target", "zoo:nope"), "zoo:nope is not in the zoo"),
    (("generate", PROMPT, "--target", "./nowhere", "--draft", "zoo:draft"), "nowhere"),
    (("generate", PROMPT, "--draft", "ngram:0"), "max_ngram: 0"),
    (("generate", PROMPT, "--draft", "zoo:draft", "--draft-quantization", "int99"), "int99"),
    (
        ("generate", PROMPT, "--draft-window", "8"),
        "draft_window: 8 is not possible, as Suffix keeps no keys and values",
    ),
    (("generate", PROMPT, "--draft", "zoo:draft", "--draft-window", "0"), "draft_window: 0 is not possible; give 1 or"),
    (("generate", PROMPT, "--draft-quantization", "nf4"), "draft_quantization: 'suffix', the default draft"),
    (("generate", PROMPT, "--device", "abacus"), "device: abacus is not here"),
    (("generate", PROMPT, "--top-p", "0.9"), "top_p: has no effect at temperature 0"),
    (("generate", PROMPT, "--target", "BARE", "--draft", "BARE"), "has no tokenizer beside it"),
    (("generate", ""), "the prompt is empty"),
    # Python keeps such bytes of an argument, and of standard input in some locales, as halves of surrogate pairs
    (("generate", "a\udcff"), "prompt: it is not UTF-8 (surrogates not allowed at character 1)"),
    (("chat", *TARGET), "message: it is not UTF-8 (surrogates not allowed at character 1)"),
    (("chat", "--target", "PLAIN", "--draft", "zoo:draft"), "no chat template"),
    (("serve", "zoo:target", "--port", "99999"), "port: 99999 is none"),
]


@pytest.mark.parametrize(("argv", "message"), ERRORS)
def test_errors_are_one_line_for_people(
    argv: tuple[str, ...], message: str, run: Callable[..., Any], tmp_path: Path
) -> None:
    for name in {"BARE", "PLAIN"} & {*argv}:
        LlamaForCausalLM.from_pretrained(zoo.folder("target")).save_pretrained(tmp_path / name)
        if name == "PLAIN":
            save_tokenizer(tmp_path / name, template=None)
    words = [str(tmp_path / word) if word in ("BARE", "PLAIN") else word for word in argv]
    found = run(*words, typed="a\udcff" if message.startswith("message:") else "x = 1\n", code=2)
    assert message in found.err.splitlines()[-1] and found.err.splitlines()[-1].startswith("assisted: error: ")
    assert "Traceback" not in found.err and found.out == ""


@pytest.mark.parametrize("target", ["zoo:target", "folder"])
def test_without_a_draft_the_text_itself_drafts(
    target: str, stand_ins: Path, run: Callable[..., Any], loaded: list[AssistedModelForCausalLM]
) -> None:
    named = str(stand_ins / "target") if target == "folder" else target
    argv = ["generate", PROMPT, "--target", named, "--max-new-tokens", "16", "--json"]
    completion = run(*argv)["completion"]
    assert loaded[0].spec == Suffix()
    assert completion == run(*argv, "--plain")["completion"]


@pytest.mark.parametrize(
    ("argv", "meant"),
    [(["gnerate"], "generate"), (["train", "distil"], "distill"), (["zoo", "lst"], "list"), (["frobnicate"], None)],
    ids=str,
)
def test_a_misspelled_command(argv: list[str], meant: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert (f"did you mean {meant!r}?" in capsys.readouterr().err) == (meant is not None)


@pytest.mark.parametrize("name", ["plan zoo:target", "train eagle", "bench", "zoo list"])
def test_an_unknown_option_shows_the_usage_of_its_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--target", "zoo:target", "--text", "zoo", "--out", "D"] if name == "train eagle" else []
    with pytest.raises(SystemExit):
        main([*name.split(), *needed, "--wrong"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: assisted {name.removesuffix(' zoo:target')} ") and "arguments: --wrong" in said


def test_a_traceback_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSISTED_TRACEBACK", "1")
    with pytest.raises(ValueError, match="not in the zoo"):
        main(["generate", PROMPT, "--target", "zoo:nope"])


def test_an_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AssistedModelForCausalLM, "from_pretrained", interrupted)
    assert main(["generate", PROMPT]) == 130
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


# generate


def test_generate_json(pair: AssistedModelForCausalLM, run: Callable[..., Any]) -> None:
    argv = ["generate", PROMPT, "--max-new-tokens", "24", "--draft-length", "3", "--draft", "zoo:draft"]
    result = run(*argv, "--json")
    inputs = pair.tokenizer(PROMPT, return_tensors="pt")
    wanted = pair.target.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert result["prompt"] == PROMPT
    assert result["completion"] == pair.tokenizer.decode(wanted, skip_special_tokens=True)
    assert result["report"]["new_tokens"] == len(wanted)
    assert 0 < result["report"]["accepted"] < result["report"]["drafted"]  # the stand-ins are worth testing on
    assert len(result["report"]["acceptance_by_position"]) == 3


def test_an_option_is_of_one_kind_in_all_commands_and_old_names_say_the_new_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kinds: dict[str, set[Any]] = {}
    (commands,) = (one for one in cli._parser()._actions if one.choices)
    for command in commands.choices.values():
        for action in command._actions:
            hidden = action.help == argparse.SUPPRESS
            assert hidden == isinstance(action, Renamed)
            for name in () if hidden else action.option_strings:
                kinds.setdefault(name, set()).add(action.type)
    assert {kind for name in ("--count", "--max-new-tokens") for kind in kinds[name]} == {int}
    assert kinds["--prompts"] | kinds["--draft"] <= {None, str}  # words
    for argv, name in (
        ("demo --prompts 3", "count"),
        ("doctor --prompts 3", "prompts"),
        ("bench --new-tokens 3", "max_new_tokens"),
    ):
        assert getattr(cli._parser().parse_args(argv.split()), name) == 3
        assert f"assisted: {argv.split()[1]} is called --" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "bench", "doctor", "audit", "serve", "plan"])
def test_where_a_draft_is_named_it_can_have_a_window(command: str) -> None:
    words = {"generate": [PROMPT], "audit": ["zoo:target"], "plan": ["zoo:target"]}.get(command, [])
    given = cli._parser().parse_args([command, *words, "--draft", "zoo:draft", "--draft-window", "64"])
    assert given.draft_window == 64


def test_generate_with_a_window(run: Callable[..., Any], loaded: list[AssistedModelForCausalLM]) -> None:
    argv = ["generate", PROMPT, "--max-new-tokens", "24", "--draft", "zoo:draft", "--json"]
    completion = run(*argv, "--draft-window", "8")["completion"]
    assert loaded[0].drafter.window == 8
    assert completion == run(*argv, "--plain")["completion"]


def test_generate_streams_the_text_and_reports_on_stderr(run: Callable[..., Any]) -> None:
    argv = ["generate", PROMPT, "--max-new-tokens", "24"]
    streamed, quiet = run(*argv), run(*argv, "--quiet")
    assert streamed.out == quiet.out == run(*argv, "--json")["completion"] + "\n"
    assert "target passes" in streamed.err and "target passes" not in quiet.err


def test_generate_reads_standard_input(run: Callable[..., Any]) -> None:
    piped = run("generate", "-", "--max-new-tokens", "8", "--json", typed=PROMPT)
    assert piped["prompt"] == PROMPT
    assert piped["completion"] == run("generate", PROMPT, "--max-new-tokens", "8", "--json")["completion"]


def test_generate_samples_by_seed(run: Callable[..., Any]) -> None:
    argv = ["generate", PROMPT, "--max-new-tokens", "16", "--temperature", "2", "--top-k", "50", "--top-p", "0.9"]
    texts = [run(*argv, "--json", "--seed", seed)["completion"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


# chat

CHAT = ["chat", *TARGET, "--max-new-tokens", "12"]
TURNS = [*CHAT, "--json"]


def test_chat_is_generating_from_the_whole_conversation(
    pair: AssistedModelForCausalLM, run: Callable[..., Any]
) -> None:
    messages = ["def first(a):", "def second(b, c):", "class Third:"]
    replies = run(*TURNS, typed="\n".join(messages))
    ids = torch.zeros(1, 0, dtype=torch.int64)
    for message, reply in zip(messages, replies, strict=True):
        assert reply["message"] == message
        assert reply["cached_tokens"] == max(0, ids.shape[1] - 1)  # all that was written but its last token
        ids = torch.cat([ids, pair.tokenizer(message, return_tensors="pt").input_ids], 1)
        assert reply["prompt_tokens"] == ids.shape[1]
        prompt, ids = ids, pair.target.generate(ids, max_new_tokens=12, do_sample=False)
        assert ids[0, -1] != pair.tokenizer.eos_token_id
        assert reply["reply"] == pair.tokenizer.decode(ids[0, prompt.shape[1] :])


@pytest.mark.parametrize("template", [BARE_TEMPLATE, MARKED_TEMPLATE])
def test_an_answer_that_ended_is_extended(template: str, pair: AssistedModelForCausalLM) -> None:
    """The end token stays where the template writes it, and goes where it doesn't; either way the cache is used."""
    pair.tokenizer.chat_template = template
    conversation = chat.Conversation(pair)
    written = pair.tokenizer("a = 1").input_ids
    ending = pair.target.generate  # an answer of our choice, ended by the end token

    def answer(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        said = torch.tensor([[*ids[0].tolist(), *written, 0]])
        pair.target(said[:, kwargs["past_key_values"].get_seq_length() : -1], past_key_values=kwargs["past_key_values"])
        return said

    pair.generate = answer  # type: ignore[method-assign]
    first = conversation.say("b = 2", max_new_tokens=16)
    del pair.generate
    assert (first.text, first.cached_tokens) == ("a = 1", 0)
    second = conversation.say("c = 3", max_new_tokens=8, do_sample=False)
    assert second.cached_tokens == first.prompt_tokens + len(written)
    rendered = pair.tokenizer.apply_chat_template(conversation.messages[:3], add_generation_prompt=True, tokenize=False)
    assert pair.tokenizer.decode(conversation.ids[: second.prompt_tokens]) == rendered
    ids = torch.tensor([conversation.ids[: second.prompt_tokens]])
    assert conversation.ids == ending(ids, max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.parametrize("first", ["", "def mean(values):\n    return 1\n"])
def test_a_rewritten_conversation_is_read_from_the_change_on(first: str, pair: AssistedModelForCausalLM) -> None:
    pair.tokenizer.chat_template = first + "{{ messages | length }} {{ messages[-1]['content'] }}"
    conversation, same = chat.Conversation(pair), len(pair.tokenizer(first).input_ids)
    for count in (1, 3):
        reply = conversation.say("a = 1", max_new_tokens=8, do_sample=False)
        ids = pair.tokenizer(f"{first}{count} a = 1", return_tensors="pt").input_ids
        assert reply.cached_tokens == (max(0, same - 1) if count > 1 else 0)
        assert conversation.ids == pair.target.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist()


def test_chat_reset_quit_and_system(run: Callable[..., Any]) -> None:
    first, again = run(*TURNS, typed="x = 1\n\n/reset\nx = 1\n/quit\nx = 1\n")
    assert first["reply"] == again["reply"]
    assert again["cached_tokens"] == 0
    (told,) = run(*TURNS, "--system", "import os", typed="x = 1\n")
    assert told["prompt_tokens"] > first["prompt_tokens"]


def test_chat_streams(run: Callable[..., Any]) -> None:
    text = "def first(a):\ndef second(b, c):\n"
    streamed = run(*CHAT, typed=text)
    assert streamed.out == "".join(turn["reply"] + "\n" for turn in run(*TURNS, typed=text))
    assert streamed.err.count("prompt tokens cached") == 2


def test_chat_alone_is_with_the_chat_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(zoo, "resolve", lambda path: asked.append(path) or (_ for _ in ()).throw(ValueError("stop")))
    assert main(["chat"]) == 2
    assert asked == ["zoo:smollm2"]


def test_chat_has_commands(run: Callable[..., Any]) -> None:
    captured = run(*CHAT, typed="/help\n/rest\n")
    assert captured.out == ""
    assert captured.err.count("/reset  start a new conversation") == 2
    assert "/rest is no command" in captured.err


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ('"""\nx = 1\n\ny = 2\n"""\nz\n', ["x = 1\n\ny = 2", "z"]),
        ('"""x = 1"""\n', ["x = 1"]),
        ('"""x = 1\n  y = 2"""\n', ["x = 1\n  y = 2"]),
        ('"""\n/help\nx\n', ["/help\nx"]),  # it is not ended
        ("x = 1\\\n  y = 2\\\n\n\n  z  \n", ["x = 1\n  y = 2", "z"]),
        ("/usr/bin has it\n", ["/usr/bin has it"]),
    ],
)
def test_several_lines_are_one_message(typed: str, messages: list[str], run: Callable[..., Any]) -> None:
    assert [turn["message"] for turn in run(*TURNS, typed=typed)] == messages


@pytest.mark.parametrize("show", [[], ["--show-drafts"]])
def test_an_answer_that_is_cut_goes_on(show: list[str], run: Callable[..., Any]) -> None:
    (whole,) = run(*TURNS, "--max-new-tokens", "24", typed="x = 1\n")
    error, first, more, after = run(*TURNS, typed="/more\nx = 1\n/more\ny = 2\n")
    assert error["error"].startswith("message: there is no answer")
    assert first["cut"] and first["reply"] + more["reply"] == whole["reply"] and more["message"] == "/more"
    assert more["cached_tokens"] == more["prompt_tokens"] - 1  # nothing is read again
    assert after["cached_tokens"] == first["prompt_tokens"] + 23
    shown = run(*CHAT, *show, typed="x = 1\n/more\n")
    assert re.sub("\x1b\\[[0-9]*m", "", shown.out) == first["reply"] + "\n" + more["reply"] + "\n"
    assert shown.err.count("[The answer was cut after 12 tokens; /more goes on.]") == 2


def test_ctrl_c_stops_an_answer(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """Its beginning stays in the conversation."""
    (whole,) = run(*TURNS, "--max-new-tokens", "16", typed="x = 1\n")
    put, before, seen = TextStreamer.put, signal.getsignal(signal.SIGINT), []

    def interrupted(self: Any, value: torch.Tensor) -> None:
        put(self, value)
        seen.append(value)
        if len(seen) == 4:  # the prompt and three tokens
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TextStreamer, "put", interrupted)
    shown = run(*CHAT, typed="x = 1\n/more\n")
    assert "[The answer was stopped; /more goes on.]" in shown.err and "[4 tokens in" in shown.err
    assert shown.out.replace("\n", "") == whole["reply"].replace("\n", "")
    assert signal.getsignal(signal.SIGINT) is before


def test_settings_and_the_system_message_are_changed_in_a_chat(run: Callable[..., Any]) -> None:
    given = ["--temperature", "0.7", "--seed", "5", "--system", "import os", "--draft-length", "3"]
    (expected,) = run(*TURNS, *given, typed="x = 1\n")
    commands = ["/set temperature 0.7", "/set seed 5", "/system import os", "x = 1"]
    (found,) = run(*TURNS, "--draft-length", "3", typed="\n".join(commands) + "\n")
    assert found["reply"] == expected["reply"] and found["prompt_tokens"] == expected["prompt_tokens"]
    wrong = ["/set temperature hot", "/set top_p 0.5", "/set heat 1", "/set temperature -1", "/set max_new_tokens 0"]
    *errors, found = run(*TURNS, typed="\n".join([*wrong, "/set max_new_tokens 3", "x = 1"]))
    assert [one["error"].split()[0] for one in errors] == ["/set:", "top_p:", "/set:", "temperature:", "/set:"]
    assert found["report"]["new_tokens"] == 3
    said = run(*CHAT, typed="/set\n/system\n/system import os\n/system\n").err.splitlines()
    assert said[0].startswith("temperature 0.0, top_p None")
    assert said[1:] == ["There is no system message.", "import os"]


def test_a_conversation_is_saved_and_loaded(tmp_path: Path, run: Callable[..., Any]) -> None:
    file = tmp_path / "a file.json"
    (first,) = run(*TURNS, "--system", "import os", typed=f"x = 1\n/save {file}\n")
    saved = json.loads(file.read_text())
    assert [one["content"] for one in saved] == ["import os", "x = 1", first["reply"]]
    _, found, again = run(*TURNS, typed=f"z\n/load {file}\ny = 2\n/save {file}\n/clear\nx = 1\n")
    assert again["reply"] == first["reply"]  # the system message was loaded
    added = [{"role": "user", "content": "y = 2"}, {"role": "assistant", "content": found["reply"]}]
    assert json.loads(file.read_text()) == [*saved, *added]
    (tmp_path / "bad").write_text('[{"role": 1}]')
    commands = ["/save", f"/save {tmp_path}", "/load", f"/load {tmp_path / 'none'}", f"/load {tmp_path / 'bad'}"]
    errors = [turn["error"] for turn in run(*TURNS, typed="\n".join(commands))]
    assert len(errors) == 5 and "has no saved conversation (messages: give a list" in errors[4]


def test_chat_says_what_it_lacks_before_the_first_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = chat.Conversation.prepare

    def warning(self: Any, **kwargs: Any) -> None:
        prepare(self, **kwargs)
        for _ in range(2):
            warnings.warn("The kernels in C do not run here", stacklevel=1)

    monkeypatch.setattr(chat.Conversation, "prepare", warning)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
    sys.stdin.isatty = lambda: True  # type: ignore[method-assign]
    assert main(CHAT) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("zoo:target, drafted by suffix.") and lines[1:] == ["The kernels in C do not run here"]


def test_chat_compares_with_the_same_turn_without_drafts() -> None:
    """The prompt takes its time with and without drafts, so it counts for both."""
    report = Report(
        new_tokens=13,
        target_passes=4,
        seconds=9.0,
        draft_seconds=1.0,
        verify_seconds=5.0,
        prompt_seconds=3.0,
        plain_seconds_per_token=0.5,
        row_tokens=(13,),
    )
    said = _brought(SimpleNamespace(report=report, length=None))
    assert "1.50 times as fast as without drafts (500.0 ms per token)" in said  # (3 + 12 * 0.5) / 6


def test_chat_is_prepared_without_a_trace(pair: AssistedModelForCausalLM) -> None:
    alone, prepared = chat.Conversation(pair), chat.Conversation(pair)
    prepared.prepare(do_sample=False)
    assert (prepared.ids, prepared.messages) == ([], [])
    assert prepared.say("a", 8, do_sample=False) == alone.say("a", 8, do_sample=False)


def test_chat_shows_what_was_drafted(run: Callable[..., Any]) -> None:
    """The same text, with colours around the tokens that were drafted and accepted."""
    text, argv = "def first(a):\ndef second(b, c):\n", ["--draft-length", "3", "--draft", "zoo:draft"]
    found = run(*TURNS, *argv, typed=text)
    shown = run(*CHAT, "--show-drafts", *argv, typed=text).out
    assert re.sub("\x1b\\[[0-9]*m", "", shown) == "".join(turn["reply"] + "\n" for turn in found)
    coloured = shown.count("\x1b[36m")
    assert 0 < coloured == shown.count("\x1b[0m") <= sum(turn["report"]["accepted"] for turn in found)


def test_chat_goes_on_after_a_message_that_is_too_long(run: Callable[..., Any]) -> None:
    first, refused, after = run(*TURNS, typed=f"x = 1\n{'y = 2; ' * CONTEXT}\nz = 3\n")
    assert "/reset" in refused["error"]
    assert after["prompt_tokens"] > first["prompt_tokens"] + 12  # the first turn is still part of it


def test_chat_stops_where_the_context_ends(pair: AssistedModelForCausalLM) -> None:
    conversation = chat.Conversation(pair)
    length = 0
    while length < CONTEXT - 8:
        length = len(pair.tokenizer(message := "x" * (length + 1)).input_ids)
    conversation.say(message, max_new_tokens=100, do_sample=False)
    assert len(conversation.ids) <= CONTEXT


# demo

SMALL = ["--count", "2", "--max-new-tokens", "8", "--repeats", "1", "--target"]
GROWN = "grown:128x128x3x8x4"


@pytest.mark.usefixtures("held_out")
def test_demo_json(run: Callable[..., Any]) -> None:
    """A grown target writes the shipped one's text, with the shipped draft and head."""
    result = run("demo", *SMALL, GROWN, "--draft-length", "3", "--json")
    assert result["target"] == GROWN
    rows = result["points"][0]["rows"]
    assert [row["family"] for row in rows] == ["plain", "transformers assisted", "no draft", "assisted", "assisted"]
    assert [row["name"] for row in rows[2:]] == ["assisted, no draft", "with zoo:draft", "with zoo:eagle3"]
    loop = rows[2]
    assert (loop["tokens_per_pass"], loop["acceptance_rate"], loop["by_drafting"], loop["same"]) == (1, None, None, 2)
    assert all((row["by_drafting"] is not None) == (row["family"] == "assisted") for row in rows)
    assert len(set(result["prompts"]["code"])) == 2
    assert all(row["same"] == row["rows"] == 2 and len(row["seconds"]) == 1 for row in rows)
    plain, transformers, _, drafted, _ = rows  # the last one's head has random weights
    assert (plain["tokens_per_pass"], plain["acceptance_rate"], plain["speedup"]["ratio"]) == (1, None, 1)
    for row in (transformers, drafted):
        assert row["tokens_per_pass"] > 1
        assert 0 < row["acceptance_rate"] <= 1
        assert 0 <= row["repeated_4grams"] < 1


@pytest.mark.usefixtures("held_out")
def test_demo_without_a_terminal_is_plain_text(run: Callable[..., Any]) -> None:
    out = run("demo", *SMALL, GROWN, "--count", "1").out
    assert "\x1b" not in out and "\r" not in out
    assert "zoo:draft" in out and "~" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[-1] for row in rows if row[:1] == ["plain"]] == ["1.00"]
    assert [row[2] for row in rows if row[:1] == ["with"]] == ["yes", "yes"]
    assert "the same text, at a higher cost" in out
    assert [row[3] for row in rows if row[:3] == ["assisted,", "no", "draft"]] == ["yes"]
    assert "…" not in out  # the table fits


@pytest.mark.usefixtures("held_out")
def test_demo_without_a_draft_model(run: Callable[..., Any]) -> None:
    """Trees included; transformers is then shown with prompt lookup."""
    rows = run("demo", *SMALL, "zoo:target", "--draft", "recycle", "--json")["points"][0]["rows"]
    assert [row["family"] for row in rows] == ["plain", "transformers lookup", "no draft", "assisted"]
    assert all(row["same"] == 2 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("held_out")
def test_demo_names_what_transformers_drafts_with(run: Callable[..., Any]) -> None:
    assert "prompt lookup" in run("demo", *SMALL, "zoo:target", "--draft", "recycle").out


@pytest.mark.usefixtures("held_out")
def test_demo_on_a_terminal_strikes_what_is_rejected(
    pair: AssistedModelForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = pytest.importorskip("rich.console")
    from assisted.cli import demo

    screen = io.StringIO()
    terminal = console.Console(file=screen, force_terminal=True, color_system="standard", width=100, height=40)
    monkeypatch.setattr(demo, "_console", lambda: terminal)
    monkeypatch.setattr(demo, "PACE", 0)
    demo.show({"assisted": pair}, 1, Rules(8, 1, seconds=36.0), live_tokens=24)
    assert "\x1b[9;31m" in screen.getvalue()  # red, struck through
    assert pair.drafter.__class__.__name__ == "ModelDrafter"  # as it was


def test_no_color_means_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from assisted.cli import demo

    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert demo._console().is_terminal
    monkeypatch.setenv("NO_COLOR", "1")
    assert not demo._console().is_terminal
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not demo._console().is_terminal


def test_demo_without_rich_names_the_extra(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "assisted.cli.demo", raising=False)
    assert install("demo") in run("demo", code=2).err


def test_a_watch_sees_what_happened(pair: AssistedModelForCausalLM) -> None:
    seen: list[tuple[list[int], list[int], list[int]]] = []
    watch = Watch(lambda w: seen.append((list(w.tokens), list(w.waiting), list(w.rejected))))
    pair.watch = watch.see
    ids = pair.tokenizer(PROMPT, return_tensors="pt").input_ids
    output = pair.generate(ids, max_new_tokens=24, do_sample=False, streamer=watch)
    report = pair.report
    assert watch.tokens == output[0, ids.shape[1] :].tolist()
    assert sum(watch.drafted) == report.accepted
    assert sum(len(struck) for _, _, struck in seen) == report.drafted - report.accepted
    assert sum(len(pencil) for _, pencil, _ in seen) == report.drafted
    for before, after in pairwise(seen):
        assert after[0][: len(before[0])] == before[0]  # what is committed stays


def test_pieces_join_to_the_text(pair: AssistedModelForCausalLM) -> None:
    text = "x = 'naïve — ☃'\n\n    y = 1\n"
    pieces = Pieces(pair.tokenizer)
    assert "".join(map(pieces.add, pair.tokenizer(text).input_ids)) == text


# zoo


def test_zoo_list(stand_ins: Path, run: Callable[..., Any]) -> None:
    rows = run("zoo", "list", "--json")
    assert [row["name"] for row in rows] == [f"zoo:{name}" for name in (*zoo.NAMES, *zoo.PACKAGED)]
    assert rows[0]["folder"] == str(stand_ins / "target")
    assert rows[0]["bytes"] > 0
    lines = run("zoo", "list").out.splitlines()
    assert "MiB" in lines[0]
    assert "missing" in lines[2]
