"""The server with OpenAI's protocol, over a real socket: the same texts as `generate`, and a sentence for what it cannot do."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import pair

from assisted import AssistedModelForCausalLM, SessionPool
from assisted.audit import Server as Audited
from assisted.audit import Settings, audit
from assisted.cli.main import main
from assisted.serving import Server
from assisted.serving.server import Pieces

CHAT = {
    "messages": [{"role": "user", "content": "def mean(values):\n    total = 0\n"}],
    "max_tokens": 24,
    "temperature": 0,
}
TEXT = {"prompt": "def mean(values):\n", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def model() -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_pretrained(
        "zoo:target", draft="zoo:draft", draft_length=4, dtype=torch.float32, sessions=SessionPool()
    )


@pytest.fixture(scope="module")
def server(model: AssistedModelForCausalLM) -> Iterator[Server]:
    suffix = AssistedModelForCausalLM.from_models(model.target, "suffix", 4, tokenizer=model.tokenizer)
    suffix.sessions = model.sessions
    entries: list[dict[str, Any]] = []
    with Server({"zoo:draft": model, "suffix": suffix}, "target", ("127.0.0.1", 0), entries.append) as made:
        made.entries = entries  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made
        made.shutdown()


def sent(server: Server, path: str, body: Any, method: str = "POST", headers: Any = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    written = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, written if method == "POST" else None, headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def asked(server: Server, path: str, body: Any) -> dict[str, Any]:
    status, text = sent(server, path, body)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def alone(model: Any, ids: list[int], count: int) -> list[int]:
    given = torch.tensor([ids])
    output = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, assisted=False
    )
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("draft", ["zoo:draft", "suffix", "none", None])
def test_a_draft_for_each_request(server: Server, model: Any, draft: str | None) -> None:
    found = asked(server, "/v1/completions", TEXT | {"draft": draft})
    ids = model.tokenizer(TEXT["prompt"]).input_ids
    expected = alone(model, ids, 24)
    assert found["choices"][0]["text"] == model.tokenizer.decode(expected, skip_special_tokens=True)
    assert found["choices"][0]["finish_reason"] == ("length" if len(expected) == 24 else "stop")
    assert found["report"]["draft"] == draft or (draft is None and found["report"]["draft"] == "zoo:draft")
    assert (found["report"]["drafted"] > 0) == (draft != "none")
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(expected))


def test_a_chat_and_its_second_turn(server: Server, model: Any) -> None:
    first = asked(server, "/v1/chat/completions", CHAT)
    message = first["choices"][0]["message"]
    ids = model.tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True, return_dict=True).input_ids
    assert message == {"role": "assistant", "content": model.tokenizer.decode(alone(model, ids, 24))}
    turns = [*CHAT["messages"], message, {"role": "user", "content": "def median(values):\n"}]
    second = asked(server, "/v1/chat/completions", CHAT | {"messages": turns})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > len(ids) // 2
    ids = model.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids
    assert second["choices"][0]["message"]["content"] == model.tokenizer.decode(alone(model, ids, 24))


@pytest.mark.parametrize("stop", [[], ["return"], ["\n    ", "urn"], ["not there"]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_same_text(server: Server, path: str, stop: list[str]) -> None:
    body = (CHAT if "chat" in path else TEXT) | {"stop": stop}
    whole = asked(server, path, body)
    status, text = sent(server, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    if "chat" in path:
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        pieces, expected = (
            [c["choices"][0]["delta"]["content"] for c in chunks],
            whole["choices"][0]["message"]["content"],
        )
    else:
        pieces, expected = [c["choices"][0]["text"] for c in chunks], whole["choices"][0]["text"]
    assert "".join(pieces) == expected and not any(one in expected for one in stop)
    assert len(pieces) > 3 or stop
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["report"]["new_tokens"] == whole["report"]["new_tokens"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


def test_characters_of_several_tokens_are_sent_whole(model: Any) -> None:
    pieces: list[str] = []
    text = Pieces(model.tokenizer, [], pieces.append)
    ids = model.tokenizer("x = 'é漢😀'", add_special_tokens=False).input_ids
    text.put(torch.tensor([[1]]))
    for token in ids:
        text.put(torch.tensor([token]))
    text.end()
    assert "".join(pieces) == "x = 'é漢😀'" and not any("\ufffd" in piece for piece in pieces)


def test_sampling_and_seeds(server: Server) -> None:
    body = TEXT | {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "seed": 3}
    texts = [asked(server, "/v1/completions", body | more)["choices"][0]["text"] for more in ({}, {}, {"seed": 4})]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "body: it is not JSON"),
        ("/v1/completions", [], 400, "body: a JSON object"),
        ("/v1/completions", TEXT | {"prompt": 3}, 400, "prompt: 3 is of a type"),
        ("/v1/completions", TEXT | {"prompt": []}, 400, "prompt: give a text"),
        ("/v1/completions", TEXT | {"prompt": [10**9]}, 400, "prompt: give a text, or a list of token ids"),
        ("/v1/completions", TEXT | {"prompt": [True]}, 400, "prompt: give a text, or a list of token ids"),
        ("/v1/completions", TEXT | {"prompt": ["a", "b"]}, 400, "prompt: .* of one text"),
        ("/v1/completions", TEXT | {"n": 2}, 400, "n: 2 is not supported"),
        ("/v1/completions", TEXT | {"max_tokens": True}, 400, "max_tokens: true is of a type"),
        ("/v1/completions", TEXT | {"max_tokens": 0}, 400, "max_tokens: 0 new tokens after"),
        ("/v1/completions", TEXT | {"max_tokens": 10**6}, 400, "max_tokens: 1000000 new tokens after"),
        ("/v1/completions", TEXT | {"temperature": "hot"}, 400, "temperature: .* is of a type"),
        ("/v1/completions", TEXT | {"temperature": -1}, 400, "temperature: -1.0 is not possible"),
        ("/v1/completions", TEXT | {"temperature": 1, "top_p": 7}, 400, "top_p"),
        ("/v1/completions", TEXT | {"draft": "/etc/passwd"}, 400, "draft: '/etc/passwd' was not loaded"),
        ("/v1/completions", TEXT | {"draft_length": -3}, 400, "draft_length"),
        ("/v1/completions", TEXT | {"model": "gpt-5"}, 404, "model: 'gpt-5' is not here; ask for 'target'"),
        ("/v1/completions", TEXT | {"stop": [""]}, 400, "stop: give a text"),
        ("/v1/completions", TEXT | {"logprobs": 5}, 400, "logprobs: only"),
        ("/v1/completions", TEXT | {"unknown": 1}, 400, "unknown: 1 is not supported"),
        ("/v1/chat/completions", CHAT | {"messages": "hello"}, 400, "messages: .* is of a type"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}, 400, "messages: give a list of"),
        ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages: give a list of"),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools: .* is not supported"),
        ("/v1/embeddings", {}, 404, "path: /v1/embeddings is not here"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_get_a_sentence(
    server: Server, path: str, body: Any, status: int, message: str, stream: bool
) -> None:
    if isinstance(body, dict):
        body = body | {"stream": stream}
    found, text = sent(server, path, body)
    error = json.loads(text)["error"]
    assert (found, error["code"]) == (status, status) and re.match(message, error["message"]), text
    assert error["type"] == "invalid_request_error"
    assert server.entries[-1]["status"] == status  # type: ignore[attr-defined]


@pytest.mark.parametrize(("length", "status"), [("99999999999", 413), ("-1", 413), ("many", 413)])
def test_lengths_that_are_not_read(server: Server, length: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", length)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == status and "Content-Length" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_models_and_health(server: Server) -> None:
    status, text = sent(server, "/v1/models", None, "GET")
    (listed,) = json.loads(text)["data"]
    assert (status, listed["id"], listed["drafts"]) == (200, "target", ["zoo:draft", "suffix", "none"])
    assert sent(server, "/health", None, "GET") == (200, '{"status": "ok"}')
    assert sent(server, "/", None, "GET")[0] == 404


def test_a_client_that_leaves_ends_its_call(server: Server, model: Any) -> None:
    passes: list[Any] = []
    model.watch = passes.append
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = TEXT | {"max_tokens": 900, "stream": True, "temperature": 1.0, "draft": "zoo:draft"}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    answer.readline()
    answer.close()
    connection.close()
    until = time.monotonic() + 60
    while not any(entry["status"] == 499 for entry in server.entries):  # type: ignore[attr-defined]
        assert time.monotonic() < until
        time.sleep(0.05)
    model.watch = None
    assert sum(sum(one.kept) for one in passes) < 900
    assert asked(server, "/v1/completions", TEXT)["choices"][0]["text"]


def test_several_clients_at_once(server: Server) -> None:
    prompts = ["def mean(values):\n", "class Queue:\n", "import os\n"]
    expected = [asked(server, "/v1/completions", TEXT | {"prompt": one})["choices"][0]["text"] for one in prompts]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = asked(
            server, "/v1/completions", TEXT | {"prompt": prompts[number], "draft": ("suffix", None, "none")[number]}
        )
        found[number] = answer["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(3)] == expected


def test_an_audit_finds_nothing(server: Server, model: Any) -> None:
    subject = Audited(f"http://127.0.0.1:{server.server_port}/v1", model.tokenizer)
    prompts = [model.tokenizer(text).input_ids for text in ("def mean(values):\n", "class Queue:\n    def push(")]
    found = audit(subject, model.target, model.tokenizer, prompts, Settings(24, 4), "the target")
    assert found.is_lossless, found


def test_what_a_server_needs() -> None:
    with pytest.raises(ValueError, match="pairs: there are none"):
        Server({}, "target")
    with pytest.raises(ValueError, match="pairs: they have no tokenizer"):
        Server({"model": pair()[1]}, "target")


def test_the_command_gives_a_window_to_the_drafts_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(pairs: Any, *given: Any) -> None:
        assert {name: getattr(one.drafter, "window", None) for name, one in pairs.items()} == {
            "suffix": None,
            "zoo:draft": 64,
        }
        raise KeyboardInterrupt

    monkeypatch.setattr("assisted.serving.Server", stopped)
    argv = ["serve", "zoo:target", "--draft", "suffix", "--draft", "zoo:draft", "--draft-window", "64"]
    assert main([*argv, "--device", "cpu"]) == 130


@pytest.mark.slow
def test_the_command() -> None:
    arguments = [
        "serve",
        "zoo:target",
        "--draft",
        "suffix",
        "--draft",
        "ngram",
        "--port",
        "0",
        "--json",
        "--threads",
        "1",
    ]
    process = subprocess.Popen([sys.executable, "-m", "assisted", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        assert (about["model"], about["drafts"]) == ("zoo:target", ["suffix", "ngram", "none"])
        port = int(about["url"].split(":")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(TEXT | {"draft": "ngram"}))
        assert json.loads(connection.getresponse().read())["report"]["draft"] == "ngram"
        entry = json.loads(process.stdout.readline())
        assert (entry["status"], entry["report"]["draft"]) == (200, "ngram")
    finally:
        process.terminate()
        process.wait(30)
