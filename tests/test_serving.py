"""The server with OpenAI's protocol, over a real socket: the same texts as `generate`, and a sentence for what it cannot do."""

from __future__ import annotations

import collections
import contextlib
import gc
import http.client
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from automata import Automaton
from pairs import pair
from test_many import parts_read
from test_threads import in_threads

from assisted import AssistedModelForCausalLM, GrammarProcessor, SessionPool
from assisted.cli.main import main
from assisted.extras import install
from assisted.lab.audit import Server as Audited
from assisted.lab.audit import Settings, audit
from assisted.serving import Server
from assisted.serving.answers import Answers, Pieces
from assisted.serving.fields import Refused
from assisted.serving.line import Line

CHAT = {
    "messages": [{"role": "user", "content": "def mean(values):\n    total = 0\n"}],
    "max_tokens": 24,
    "temperature": 0,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TEXT = {"prompt": "def mean(values):\n", "max_tokens": 24, "temperature": 0}
POST = b"POST %b HTTP/1.1\r\n%b\r\n%b"  # path, headers, body
both_paths = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@pytest.fixture(scope="module")
def model() -> AssistedModelForCausalLM:
    return AssistedModelForCausalLM.from_pretrained(
        "zoo:target", draft="zoo:draft", draft_length=4, dtype=torch.float32, sessions=SessionPool()
    )


@contextlib.contextmanager
def served(pairs: dict[str, Any], **options: Any) -> Iterator[Server]:
    """A server of these pairs, with these options."""
    entries: list[dict[str, Any]] = []
    with Server(pairs, "target", ("127.0.0.1", 0), entries.append, **options) as made:
        made.entries = entries  # type: ignore[attr-defined]
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def server(model: AssistedModelForCausalLM) -> Iterator[Server]:
    suffix = AssistedModelForCausalLM.from_models(model.target, "suffix", 4, tokenizer=model.tokenizer)
    suffix.sessions = model.sessions
    with served({"zoo:draft": model, "suffix": suffix}) as made:
        yield made


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
    mask = torch.ones_like(given)
    output = model.generate(given, attention_mask=mask, max_new_tokens=count, do_sample=False, assisted=False)
    return output[0, len(ids) :].tolist()


def until(holds: Any) -> None:
    """Wait until this holds."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def events(text: str) -> list[dict[str, Any]]:
    """What a stream has sent, which ends as the protocol says."""
    *written, last = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(one) for one in written]


def content(choice: dict[str, Any]) -> str:
    said: str = choice["text"] if "text" in choice else choice.get("message", choice.get("delta"))["content"]
    return said


def error_of(sent: tuple[int, str]) -> tuple[int, str]:
    return sent[0], json.loads(sent[1])["error"]["message"]


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
@both_paths
def test_a_stream_has_the_same_text(server: Server, path: str, stop: list[str]) -> None:
    body = (CHAT if "chat" in path else TEXT) | {"stop": stop}
    whole = asked(server, path, body)
    status, text = sent(server, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, counts = events(text)
    assert status == 200 and {chunk["object"] for chunk in chunks} == {chunks[0]["object"]}
    assert "chat" not in path or chunks[0]["object"] == "chat.completion.chunk"
    pieces, expected = [content(c["choices"][0]) for c in chunks], content(whole["choices"][0])
    assert "".join(pieces) == expected and not any(one in expected for one in stop)
    assert len(pieces) > 3 or stop
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]
    details = {"prompt_tokens_details": counts["usage"]["prompt_tokens_details"]}
    assert counts["choices"] == [] and counts["usage"] == whole["usage"] | details
    assert counts["report"]["new_tokens"] == whole["report"]["new_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_characters_of_several_tokens_are_sent_whole(model: Any) -> None:
    pieces: list[str] = []
    text = Pieces(model.tokenizer, [], pieces.append)
    ids = model.tokenizer("x = 'é漢😀'", add_special_tokens=False).input_ids
    for token in ids:
        text.add([token])
    text.end()
    assert "".join(pieces) == "x = 'é漢😀'" and not any("\ufffd" in piece for piece in pieces)


def test_sampling_and_seeds(server: Server) -> None:
    body = TEXT | {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "seed": 3}
    texts = [asked(server, "/v1/completions", body | more)["choices"][0]["text"] for more in ({}, {}, {"seed": 4})]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "body: it is not JSON"),
        ([], 400, "body: a JSON object"),
        (TEXT | {"prompt": 3}, 400, "prompt: 3 is of a type"),
        (TEXT | {"prompt": []}, 400, "prompt: give a text"),
        (TEXT | {"prompt": [10**9]}, 400, "prompt: give a text, or a list of token ids"),
        (TEXT | {"prompt": ["a", "b"]}, 400, "prompt: .* of one text"),
        (TEXT | {"n": 17}, 400, "n: 17 is not possible; give 1 to 16"),
        (TEXT | {"presence_penalty": 1}, 400, "presence_penalty: 1 is not supported; .* or give 0"),
        (TEXT | {"max_tokens": 0}, 400, "max_tokens: 0 is not possible; give 1 to 1018"),
        (TEXT | {"temperature": -1}, 400, "temperature: -1 is not possible; give 0 to 1000"),
        (TEXT | {"draft": "/etc/passwd"}, 400, 'draft: "/etc/passwd" was not loaded'),
        (TEXT | {"model": "gpt-5"}, 404, "model: \"gpt-5\" is not here; ask for 'target'"),
        (TEXT | {"stop": [""]}, 400, "stop: give a text"),
        (TEXT | {"logprobs": 21}, 400, "logprobs: 21 is not possible; give 0 to 20"),
        (CHAT | {"top_logprobs": 2}, 400, "top_logprobs: they come with logprobs"),
        (TEXT | {"unknown": 1}, 400, "unknown: 1 is not supported"),
        (CHAT | {"messages": []}, 400, "messages: give a list of"),
        (CHAT | {"tools": [{"type": "function"}]}, 400, "tools: .* is not supported"),
        (CHAT | {"tools": [TOOL]}, 400, "tools: the model's chat template does not use them"),
        (CHAT | {"tool_choice": "required"}, 400, 'tool_choice: .* or give "auto" or "none"'),
        (CHAT | {"chat_template_kwargs": {"thinks": 1}}, 400, "chat_template_kwargs: .* not use"),
        (CHAT | {"response_format": {"type": "json_schema"}}, 400, "response_format: .* give {"),
        ({}, 404, "path: /v1/embeddings is not here"),
    ],
)
def test_bad_requests_get_a_sentence(server: Server, body: Any, status: int, message: str) -> None:
    path = "/v1/completions" if body != {} else "/v1/embeddings"
    if isinstance(body, dict):
        path = "/v1/chat/completions" if "messages" in body else path
        body = body | {"stream": "prompt" in body}
    found, text = sent(server, path, body)
    error = json.loads(text)["error"]
    assert (found, error["code"]) == (status, status) and re.match(message, error["message"]), text
    assert error["type"] == "invalid_request_error"
    assert server.entries[-1]["status"] == status  # type: ignore[attr-defined]


NESTED: Any = [[[[{"a": [None]}]]]]
HALF, LARGE = "\ud800", 10**23
NOT_NUMBERS: list[Any] = ["1", [1], {}, True, float("nan"), float("inf"), float("-inf"), LARGE, -LARGE, NESTED]
NOT_WHOLE = [*NOT_NUMBERS, 1.5, 1e300]
NOT_TEXTS: list[Any] = [3, True, {}, NESTED, HALF, f"a{HALF}"]
HOSTILE: dict[str, list[Any]] = {
    **{name: [*NOT_NUMBERS, -1e-300, -1] for name in ("top_p", "min_p")},
    "temperature": [*NOT_NUMBERS, -1, -1e-300, 1e-300, 5e-324, 1001],
    **{name: [*NOT_WHOLE, 0, -1] for name in ("max_tokens", "max_completion_tokens")},
    **{"top_k": [*NOT_WHOLE, -2, 2**31], "seed": [*NOT_WHOLE, 2**64, -(2**63) - 1]},
    **{"draft_length": [*NOT_WHOLE, 0, -1], "logprobs": [one for one in NOT_WHOLE if one is not True] + [21, -1]},
    "stream": [1, 0, "true", [], {}, NESTED],
    **{"model": [*NOT_TEXTS, "", "x" * 10**6], "draft": [*NOT_TEXTS, "", "x" * 10**6], "user": NOT_TEXTS},
    "stop": [*NOT_TEXTS, "", [""], [None], [[]], ["a", HALF], [True], ["a"] * 17, "a" * 257, "a" * 10**6],
    "stream_options": [1, "a", [], True, {"include_usage": "yes"}, {"include_usage": None}, {"a": NESTED}],
    **{name: [True, False, 17, 0, 1.5, LARGE, "1", [], NESTED, float("nan")] for name in ("n", "best_of")},
    "repetition_penalty": [True, 1.1, -1, float("nan"), "1"],
    **{name: [False, 0.5, -LARGE, "0", NESTED] for name in ("presence_penalty", "frequency_penalty")},
    **{name: [0, 1, "false", True, NESTED] for name in ("echo", "store")},
    "logit_bias": [{"5": 100}, [], False, {"5": HALF}],
    "tools": [{}, False, [{"type": "function"}], [None]],
    "response_format": [{"type": "json"}, {"type": "text", "more": 1}, {"type": "json_schema"}, "text", True, [NESTED]],
    **{"tool_choice": ["required", {}, True, NESTED], "modalities": [["audio"], "text"], "min_tokens": [3, False]},
    **{"metadata": [1, [], HALF], "service_tier": ["flex", 1], "parallel_tool_calls": [0, "no"]},
    "chat_template_kwargs": [1, [], {"tools": []}, {"chat_template": "a"}, {"a b": 1}, {HALF: 1}],
    **{name: [1, True, HALF, NESTED, "", {}] for name in ("unknown", "Temperature", "", "\u0000", "é", "x" * 10**5)},
    HALF: [1],
}
"""Values that a field cannot have, at either path."""
PROMPTS: list[Any] = [
    *json.loads(
        '[0, 1.5, true, {}, [], "", [[]], [null], [true], [1.0], [-1], [4096], ["a"], [["a", 1]], [[1, 2]], ["a", "b"]]'
    ),
    *([1, "a"], [LARGE], HALF, [HALF], NESTED, [1] * 1024, "a b " * 1024),
]
MESSAGE = {"role": "user", "content": "a"}
CALLED = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
NOT_OF_A_MESSAGE: list[Any] = [None, 1, True, [], {}, ["a"], [{"type": "text"}], HALF, NESTED]
MORE_OF_A_MESSAGE: list[Any] = [
    *({"tool_calls": [{}]}, {"tool_calls": [CALLED]}, {"name": 1}, {HALF: "a"}, {"content": "a b " * 1024}),
    {"content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]},
    {"content": [{"type": "text", "text": 1}]},
]
CALLS: list[Any] = [[{"function": {"name": "a", "arguments": given}}] for given in ("{", "[]")]
MESSAGES: list[Any] = [
    *json.loads('["a", {}, [], [null], [[]], ["a"], [1], [{}], [{"role": "user"}], [{"content": "a"}]]'),
    *([MESSAGE, None], [[MESSAGE]]),
    *([MESSAGE | {key: value}] for key in MESSAGE for value in NOT_OF_A_MESSAGE),
    *([MESSAGE | more] for more in MORE_OF_A_MESSAGE),
    *([{"role": "assistant", "tool_calls": calls}] for calls in (*CALLS, {"a": 1})),
]


@both_paths
def test_what_no_field_can_be_is_an_error_that_names_it(server: Server, path: str) -> None:
    base, own, values = (CHAT, "messages", MESSAGES) if "chat" in path else (TEXT, "prompt", PROMPTS)
    other = {"messages": "prompt", "prompt": "messages"}[own]
    base = {**base, "temperature": 1.0}
    for name, hostile in (HOSTILE | {own: values, other: [*PROMPTS, *MESSAGES]}).items():
        for value in hostile:
            status, text = sent(server, path, base | {name: value})
            error = json.loads(text)["error"]
            assert 400 <= status < 500 and error["message"].startswith(f"{name[:60]}:"), (name, str(value)[:60], text)
            assert len(text) < 1000 and server.entries[-1]["status"] == status  # type: ignore[attr-defined]
    assert asked(server, path, base)["choices"]


@both_paths
def test_values_at_the_ends_of_their_ranges_and_nothing(server: Server, path: str) -> None:
    base = CHAT if "chat" in path else TEXT
    ends: dict[str, list[Any]] = {
        **{"temperature": [0, 1000, 1e-30], "top_p": [0, 1, 1e-300], "min_p": [0, 1], "top_k": [-1, 0, 1, 2**31 - 1]},
        **{"seed": [0, -(2**63), 2**64 - 1], "draft_length": [1, 2**31 - 1], "stop": [[], "a" * 256, ["a"] * 16]},
        **{"n": [1, 2], "tools": [[]], "user": [""], "stream_options": [{}], "response_format": [{"type": "text"}]},
        **{"logprobs": [False], "tool_choice": ["none", "auto"], "parallel_tool_calls": [True]},
        **{"service_tier": ["auto", "default"], "modalities": [["text"]], "min_tokens": [0], "top_logprobs": [0]},
        **{"presence_penalty": [0, 0.0], "frequency_penalty": [0], "logit_bias": [{}], "store": [False]},
        **{"chat_template_kwargs": [{}], "prompt_cache_key": ["a"], "safety_identifier": ["a"], "best_of": [1]},
        **{"metadata": [{"a": "b"}]},
    }
    nothing = dict.fromkeys({*HOSTILE, "prompt" if "chat" in path else "messages"} - {HALF, "max_tokens"})
    for some in (nothing, *({name: value} for name, values in ends.items() for value in values)):
        assert asked(server, path, {**base, "temperature": 1.0, "max_tokens": 3, **some})["choices"], some
    message = [{**MESSAGE, "refusal": None, "name": "a"}]
    assert asked(server, "/v1/chat/completions", CHAT | {"messages": message, "max_tokens": 3})["choices"]


BODIES: dict[str, bytes] = {
    **{"nothing": b"", "no JSON": b"{'prompt': 1}", "two objects": b"{}{}", "cut": json.dumps(TEXT).encode()[:-1]},
    **{"not UTF-8": b'{"prompt": "\xff\xfe\xfd"}', "half a character": b'{"prompt": "\xc3"}'},
    **{"UTF-16": json.dumps([1]).encode("utf-16"), "a number": b"1", "null": b"null"},
    "nested too deeply": b"[" * 10**6,
    "nested too deeply in an object": b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
}
NESTED_IN = zip(["prompt", "stop", "logit_bias"] * 2, [100, 300, 600, 900, 960, 1000], strict=True)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        *(pytest.param(body, "body", id=name) for name, body in BODIES.items()),
        *((f'{{"prompt": "a", "{name}": {"[" * n}{"]" * n}}}'.encode(), f"({name}|body)") for name, n in NESTED_IN),
        *(
            (f'{{"prompt": "a", "{name}": {"9" * 5000}}}'.encode(), name)
            for name in ("temperature", "seed", "max_tokens", "n", "unknown")
        ),
    ],
)
def test_bodies_that_cannot_be_read_or_written(server: Server, body: bytes, named: str) -> None:
    """No object of JSON, one that nests deeper than it can be written again, and integers of more digits than Python reads."""
    status, message = error_of(sent(server, "/v1/completions", body))
    assert status == 400 and re.match(f"{named}: ", message), message


def test_a_body_that_is_too_large_gets_its_answer(server: Server) -> None:
    """Though the server closes a connection whose other end still writes."""
    for path, status, begins in (("completions", 413, "Content-Length: 16777217"), ("embeddings", 404, "path: ")):
        found, message = error_of(sent(server, f"/v1/{path}", b"a" * (2**24 + 1)))
        assert found == status and message.startswith(begins)


def connected(server: Server, written: bytes, room: int = 0) -> socket.socket:
    """A client that has written this. room: bytes of what it may be sent unread."""
    made = socket.socket()
    if room:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    made.settimeout(60)
    made.connect(("127.0.0.1", server.server_port))
    made.sendall(written)
    return made


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    written = json.dumps(body).encode()
    return POST % (path.encode(), b"Content-Length: %d\r\n" % len(written), written)


def answered(client: socket.socket) -> tuple[int, str]:
    with client, client.makefile("rb") as read:
        head, _, text = read.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("written", "status", "message"),
    [
        (POST % (b"/v1/completions", b"Content-Length: 9\r\n", b"{}"), 408, "Content-Length: of 9 bytes, 2 have come within"),
        (POST % (b"/v1/completions", b"Content-Length: 9\r\n", b""), 408, "Content-Length: of 9 bytes, 0 have come within"),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Le", 411, "Content-Length: none"),
        (b"POST /v1/completions HT", 400, "request: Bad request version"),
        (b"GET /nowhere HTTP/1.1\r\nA: b", 404, "path: /nowhere is not here"),
    ],
)  # fmt: skip
def test_a_request_that_never_comes_whole_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch, written: bytes, status: int, message: str
) -> None:
    monkeypatch.setattr(server, "arrives_in", 0.2)
    slow = connected(server, written)
    assert asked(server, "/v1/completions", TEXT)["choices"]  # it holds nobody up
    found, text = answered(slow)
    assert found == status and text.startswith(message), text


def test_a_request_that_trickles_in_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit for each byte would never be reached."""
    monkeypatch.setattr(server, "arrives_in", 0.5)
    monkeypatch.setattr(server, "drains_for", 0)
    for written in (b"GET /health HTTP/1.1\r\n", request(TEXT)[:-50]):
        slow = connected(server, written)
        slow.settimeout(0.02)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            for _ in range(3000):
                slow.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    slow.recv(2**16)


@pytest.mark.parametrize(
    ("written", "status", "named"),
    [
        (b"PUT /v1/completions HTTP/1.1\r\n\r\n", 405, "request"),
        (b"HEAD /health HTTP/1.1\r\n\r\n", 405, "request"),
        (b"nonsense\r\n\r\n", 400, "request"),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"a" * 70000), 414, "request"),
        (b"GET / HTTP/x\r\n\r\n", 400, "request"),
        *(
            (POST % (b"/v1/completions", b"Content-Length: %b\r\n" % length, b""), 413, "Content-Length")
            for length in (b"16777217", b"99999999999", b"9" * 5000, b"-1", b"many", b"1.0")
        ),
        (POST % (b"/v1/completions", b"", b""), 411, "Content-Length"),
    ],
)
def test_what_is_no_request(server: Server, written: bytes, status: int, named: str) -> None:
    found, text = answered(connected(server, written))
    assert found == status and text.startswith(f"{named}: ")


def test_models_and_health(server: Server) -> None:
    status, text = sent(server, "/v1/models", None, "GET")
    (listed,) = json.loads(text)["data"]
    assert (status, listed["id"], listed["drafts"]) == (200, "target", ["zoo:draft", "suffix", "none"])
    assert sent(server, "/health", None, "GET") == (200, '{"status": "ok"}')
    assert sent(server, "/", None, "GET")[0] == 404


def left(server: Server) -> int:
    """How many clients have left."""
    return sum(entry["status"] == 499 for entry in server.entries)  # type: ignore[attr-defined]


LONG = {**TEXT, "max_tokens": 900, "temperature": 1.0, "top_k": 0, "draft": "zoo:draft"}


@pytest.mark.parametrize("stream", [True, False])
@both_paths
def test_a_client_that_leaves_ends_its_call(
    server: Server, model: Any, stream: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "looks_every", 0.02)
    passes: list[Any] = []
    waits, goes_on = threading.Event(), threading.Event()

    def watch(one: Any) -> None:
        passes.append(one)
        waits.set()
        assert goes_on.wait(60)  # until the server has noticed

    monkeypatch.setattr(model, "watch", watch)
    body = LONG | {"stream": stream} | ({"messages": CHAT["messages"]} if "chat" in path else {})
    del body["prompt" if "chat" in path else "draft"]
    known = left(server)
    client = connected(server, request(body, path))
    assert waits.wait(60)
    inline = connected(server, request(body, path))  # waits for the first one, and leaves as well
    client.close()
    inline.close()
    until(lambda: left(server) == known + 2)
    goes_on.set()
    assert asked(server, "/v1/completions", TEXT | {"draft": "suffix"})["choices"][0]["text"]
    assert sum(sum(one.kept) for one in passes) < 900 and len(passes) < 10


def test_a_client_that_does_not_read_holds_nobody_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "name", "target" + "x" * 100000)  # large events fill the system's buffers sooner
    endless = request({"prompt": "def a", "max_tokens": 99, "temperature": 0, "stream": True})
    known = left(server)
    clients = [connected(server, endless, 2048) for _ in range(2)]
    assert asked(server, "/v1/completions", TEXT)["choices"]
    monkeypatch.setattr(server, "takes_in", 0.1)
    clients.append(connected(server, endless, 2048))
    until(lambda: left(server) > known)  # the last one does not take a piece in time
    for client in clients:
        client.close()
    until(lambda: left(server) == known + 3)


def test_several_clients_at_once(server: Server) -> None:
    prompts = ["def mean(values):\n", "class Queue:\n", "import os\n"]
    expected = [asked(server, "/v1/completions", TEXT | {"prompt": one})["choices"][0]["text"] for one in prompts]
    drafts = ("suffix", None, "none")

    def ask(number: int) -> str:
        body = TEXT | {"prompt": prompts[number], "draft": drafts[number]}
        return asked(server, "/v1/completions", body)["choices"][0]["text"]

    assert in_threads(ask, 3) == expected


class Clients:
    """Requests to `Answers` from threads of their own. `comes` is called in the next round; pieces are noted in their order."""

    def __init__(self, model: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch):
        self.model, self.answers, self.events = model, answers, list[tuple[int, str]]()
        self.found: dict[int, Any] = {}
        self.threads: list[threading.Thread] = []
        self.left: list[threading.Event] = []
        self.comes: Any = None
        monkeypatch.setattr(model, "watch", self._watch)

    def _watch(self, round: Any) -> None:
        if self.comes is not None:
            comes, self.comes = self.comes, None
            comes()

    def ask(self, body: dict[str, Any]) -> int:
        number = len(self.threads)
        self.left.append(threading.Event())

        def write() -> None:
            try:
                show = lambda choice, piece: self.events.append((number, piece))  # noqa: E731
                self.found[number] = self.answers.write(body, "messages" in body, show, self.left[number])
            except Exception as error:
                self.found[number] = error

        inside = sum(self.answers.line.counts)
        self.threads.append(threading.Thread(target=write, daemon=True))
        self.threads[number].start()
        until(lambda: sum(self.answers.line.counts) > inside or not self.threads[number].is_alive())
        return number

    def end(self) -> dict[int, Any]:
        for thread in self.threads:
            thread.join(120)
        until(lambda: self.answers.line.counts == (0, 0))  # the batch ends after its last text
        return self.found


@pytest.fixture
def clients(model: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> Clients:
    return Clients(model, Answers(server.answers.pairs, "target", 64, 60.0, 4, 8), monkeypatch)


ENDLESS = {"prompt": "def a", "max_tokens": 40, "temperature": 0, "draft": "zoo:draft"}


def test_a_second_client_is_answered_while_the_first_is(
    clients: Clients, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's call goes on in a row, and what it has read is not read again; the second one's first token comes before
    the first one's last, and a third one, who cannot join, has the next turn."""
    other, read = ENDLESS | {"prompt": "import os\n" * 9, "max_tokens": 12}, parts_read(monkeypatch)
    first = ENDLESS | {"prompt": "class Queue:\n    def push(self, value):\n        self.values.append(value)\n"}
    clients.comes = lambda: [clients.ask(other), clients.ask(ENDLESS | {"n": 2, "max_tokens": 5})]
    clients.ask(first)
    found = clients.end()
    for number, body in enumerate((first, other)):
        ids = model.tokenizer(body["prompt"]).input_ids
        expected = alone(model, ids, body["max_tokens"])
        assert found[number]["choices"][0]["text"] == model.tokenizer.decode(expected, skip_special_tokens=True)
        assert found[number]["report"]["ran"] == "rows" and found[number]["report"]["new_tokens"] == len(expected)
        assert found[number]["report"]["row_tokens"] == (len(expected),)
    assert sum(read) == len(model.tokenizer(other["prompt"]).input_ids) - 1 and max(read) == 8
    order = [number for number, _ in clients.events]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)
    assert found[2]["report"]["ran"] == "alone: n is 2"
    text = clients.answers.metrics.text(0, 0)
    assert 'assisted:answers_total{model_name="target",way="rows"} 2' in text
    assert 'assisted:answers_total{model_name="target",way="alone"} 1' in text


def test_rows_have_grammars_of_their_own(clients: Clients, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a text that was begun alone, where the grammar goes on from the answer's first token."""

    def grammar(self: Any, schema: dict[str, Any]) -> GrammarProcessor:
        last = len(schema["required"])
        edges = {at: dict.fromkeys(range(40 + 9 * at, 300 + 9 * at), min(at + 1, last)) for at in range(last + 1)}
        return GrammarProcessor(lambda: Automaton(edges, size=model.config.vocab_size))

    monkeypatch.setattr(Answers, "grammar", grammar)
    schemas = [{"type": "object", "required": [*"abcdefghijkl"[:count]]} for count in (9, 3)]
    forms = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": one}}} for one in schemas
    ]
    bodies = [ENDLESS | {"max_tokens": 24} | form for form in (*forms, {})]
    clients.comes = lambda: [clients.ask(body) for body in bodies[1:]]
    clients.ask(bodies[0])
    found, ids = clients.end(), torch.tensor([model.tokenizer(ENDLESS["prompt"]).input_ids])
    for number, schema in enumerate((*schemas, None)):
        own = {} if schema is None else {"logits_processor": [grammar(None, schema)]}
        new = model.target.generate(ids, max_new_tokens=24, do_sample=False, **own)[0, ids.shape[1] :]
        assert found[number]["choices"][0]["text"] == model.tokenizer.decode(new, skip_special_tokens=True), number
        assert found[number]["report"]["ran"] == "rows"


def test_a_client_alone_is_answered_as_without_rows(server: Server, model: Any, clients: Clients) -> None:
    """In as many forward passes, over one row each."""
    calls: list[int] = []
    clients.comes = None
    model.watch = lambda round: calls.append(len(round.kept))
    other = Answers(server.answers.pairs, "target", 64, 60.0, 1)
    found = [answers.write(dict(ENDLESS), False) for answers in (other, clients.answers, other)]
    assert found[1]["report"]["target_passes"] == found[0]["report"]["target_passes"] and {*calls} == {1}
    assert [one["report"]["ran"].split(":")[0] for one in found] == ["alone"] * 3 and found[1]["report"][
        "ran"
    ] == "alone"
    assert found[1]["choices"] == found[0]["choices"] == found[2]["choices"]


def test_a_client_that_leaves_frees_its_row(clients: Clients, model: Any) -> None:
    def come() -> None:
        numbers = [clients.ask(ENDLESS | {"prompt": text, "max_tokens": 900}) for text in ("class A", "for x in")]
        clients.comes = lambda: [clients.left[number].set() for number in (0, *numbers)]

    clients.comes = come
    clients.ask(ENDLESS | {"max_tokens": 900})
    last = clients.ask(ENDLESS | {"max_tokens": 12})
    found = clients.end()
    assert all(isinstance(found[number], ConnectionAbortedError) for number in range(4) if number != last)
    expected = alone(model, model.tokenizer(ENDLESS["prompt"]).input_ids, 12)
    assert found[last]["choices"][0]["text"] == model.tokenizer.decode(expected)


def test_a_seed_gives_one_text_whoever_else_asks(clients: Clients) -> None:
    body = ENDLESS | {"temperature": 1.0, "seed": 7, "max_tokens": 20}
    first = clients.answers.write(body, False)["choices"][0]["text"]
    clients.comes = lambda: [clients.ask(body), clients.ask(body | {"seed": 8}), clients.ask(ENDLESS | {"top_k": 3})]
    clients.ask(ENDLESS)
    found = clients.end()
    assert found[1]["choices"][0]["text"] == first != found[2]["choices"][0]["text"]
    assert found[0]["choices"] == found[3]["choices"] and found[2]["report"]["ran"] == "rows"


@pytest.mark.parametrize("stop", ["return", "\n    ", ["urn", "("]])
def test_stop_strings_of_rows(clients: Clients, stop: Any) -> None:
    body = ENDLESS | {"stop": stop}
    expected = clients.answers.write(body, False)["choices"]
    clients.comes = lambda: [clients.ask(body), clients.ask(ENDLESS)]
    clients.ask(body | {"draft": "zoo:draft"})
    found = clients.end()
    assert found[0]["choices"] == found[1]["choices"] == expected and found[2]["choices"] != expected


def test_drafts_that_rows_cannot_run_are_told(model: Any, server: Server) -> None:
    pairs = {"recycle": AssistedModelForCausalLM.from_models(model.target, "recycle", 4, tokenizer=model.tokenizer)}
    answers = Answers(pairs, "target", 64, 60.0, 4)
    found = answers.write(TEXT, False)
    assert found["report"]["ran"].startswith("alone: draft: ")
    assert found["choices"] == server.answers.write(TEXT, False)["choices"]


def test_an_error_in_a_batch_ends_its_rows_alone(clients: Clients, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("out of order")

    def come() -> None:
        clients.ask(ENDLESS)
        monkeypatch.setattr("assisted.many.reading.take_over", fail)

    clients.comes = come
    clients.ask(ENDLESS)
    assert all("out of order" in str(error) for error in clients.end().values())
    monkeypatch.undo()
    assert clients.answers.write(ENDLESS, False)["report"]["ran"] == "alone"


def test_an_audit_finds_nothing(server: Server, model: Any) -> None:
    subject = Audited(f"http://127.0.0.1:{server.server_port}/v1", model.tokenizer)
    prompts = [model.tokenizer(text).input_ids for text in ("def mean(values):\n", "class Queue:\n    def push(")]
    found = audit(subject, model.target, model.tokenizer, prompts, Settings(24, 4), "the target")
    assert found.is_lossless and not [one for one in found.findings if one.verdict == "failed"], found  # seeds included


OSLO = "<tool_call>Oslo</tool_call>"
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}{% endif %}{% if thinks %}<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "more", "rendered"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}], {}, "<user>a\nb\n"),
        ([{"role": "developer", "content": "a"}, MESSAGE], {}, "<system>a\n<user>a\n"),
        ([MESSAGE, {"role": "assistant", "content": None, "annotations": []}], {}, "<user>a\n<assistant>\n"),
        ([MESSAGE, {"role": "assistant", "content": None, "tool_calls": [CALLED]}], {}, f"<user>a\n<assistant>{OSLO}\n"),
        ([MESSAGE, {"role": "tool", "content": "3", "tool_call_id": "1"}], {}, "<user>a\n<tool>3\n"),
        ([MESSAGE], {"tools": [TOOL]}, "<user>a\nweather"),
        ([MESSAGE], {"tools": [TOOL], "tool_choice": "none"}, "<user>a\n"),
        ([MESSAGE], {"chat_template_kwargs": {"thinks": True}}, "<user>a\n<think>"),
        ([MESSAGE], {"chat_template_kwargs": {"thinks": False}}, "<user>a\n"),
    ],
)  # fmt: skip
def test_what_the_chat_template_is_given(
    server: Server, model: Any, messages: list[Any], more: Any, rendered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", MARKED)
    found = asked(server, "/v1/chat/completions", CHAT | {"max_tokens": 4, "messages": messages} | more)
    ids = model.tokenizer(rendered, add_special_tokens=False).input_ids
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert content(found["choices"][0]) == model.tokenizer.decode(alone(model, ids, 4))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "a", "arguments": {"b": "é"}}\n</tool_call>', [("a", {"b": "é"})]),
        ('<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b", "arguments": {}}', [("a", {}), ("b", {})]),
        ('<tool_call>{"name": "a", "arguments": {"b": "</tool_call>"}}</tool_call>', [("a", {"b": "</tool_call>"})]),
        ('<tool_call>{"name": "a", "argum', []),
        ('<tool_call>{"name": 1}</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": []}</tool_call>', []),
        ('<tool_call>{"name": "a"}</tool_call> and more', []),
        ("<tool_call>\n<function=a>\n</function>\n</tool_call>", []),
        ("<tool_call>" + "[" * 5000, []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools(
    server: Server, model: Any, text: str, calls: list[Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text in the template's format becomes calls, and any other stays the text that it is."""
    asked(server, "/v1/completions", TEXT)
    monkeypatch.setattr(model.tokenizer, "chat_template", MARKED)
    written = model.tokenizer("So: " + text, add_special_tokens=False).input_ids[:900]

    def generate(given: torch.Tensor, streamer: Any, **call: Any) -> torch.Tensor:
        streamer.put(given)
        for token in written:
            streamer.put(torch.tensor([token]))
        streamer.end()
        return given

    monkeypatch.setattr(model, "generate", generate)
    body = CHAT | {"messages": [MESSAGE], "tools": [TOOL], "stream": stream, "max_tokens": 901}
    status, answer = sent(server, "/v1/chat/completions", body)
    assert status == 200
    if stream:
        chunks = [event["choices"][0] for event in events(answer)]
        said, reason = "".join(map(content, chunks)), chunks[-1]["finish_reason"]
        found = chunks[-1]["delta"].get("tool_calls", [])
        assert [one.pop("index") for one in found] == list(range(len(calls)))
    else:
        (choice,) = json.loads(answer)["choices"]
        said, reason = content(choice), choice["finish_reason"]
        found = choice["message"].get("tool_calls", [])
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found] == calls
    assert said == ("So: " if calls else model.tokenizer.decode(written))
    assert reason == ("tool_calls" if calls else "stop")
    assert len({one["id"] for one in found}) == len(calls)
    if len(calls) == 2 and not stream:
        (choice,) = asked(server, "/v1/chat/completions", body | {"parallel_tool_calls": False})["choices"]
        assert len(choice["message"]["tool_calls"]) == 1


@both_paths
def test_several_answers_to_one_request(server: Server, path: str) -> None:
    base = CHAT if "chat" in path else TEXT
    one = asked(server, path, base | {"stop": "\n    "})
    three = asked(server, path, base | {"n": 3, "stop": "\n    "})
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert [choice | {"index": 0} for choice in three["choices"]] == one["choices"] * 3
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    body = base | {"n": 2, "temperature": 1.0, "seed": 5, "draft_length": 3, "max_tokens": 60}
    choices = asked(server, path, body)["choices"]
    assert len({json.dumps(choice | {"index": 0}) for choice in choices}) == 2
    pieces = ["", ""]
    for event in events(sent(server, path, body | {"stream": True})[1]):
        for choice in event["choices"]:
            pieces[choice["index"]] += content(choice)
    assert pieces == list(map(content, choices))


@pytest.mark.parametrize("stream", [False, True])
@both_paths
def test_log_probabilities_are_the_targets(server: Server, model: Any, path: str, stream: bool) -> None:
    is_chat = "chat" in path
    more = {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3, "return_tokens_as_token_ids": True}
    body = (CHAT if is_chat else TEXT) | more | {"max_tokens": 8, "n": 2}
    if stream:
        chunks = [event["choices"][0] for event in events(sent(server, path, body | {"stream": True})[1])]
        choices = [one for one in chunks if one["logprobs"]]
    else:
        choices = asked(server, path, body)["choices"]
    assert len(choices) == 2 and choices[0]["logprobs"] == choices[1]["logprobs"]
    if is_chat:
        ids = model.tokenizer.apply_chat_template(
            CHAT["messages"], add_generation_prompt=True, return_dict=True
        ).input_ids
    else:
        ids = model.tokenizer(TEXT["prompt"]).input_ids
    new = alone(model, ids, 8)
    expected = model.target(torch.tensor([ids + new[:-1]])).logits[0, len(ids) - 1 :].float().log_softmax(-1)
    about = choices[0]["logprobs"]
    if is_chat:
        entries = about["content"]
        values = [one["logprob"] for one in entries]
        tops = [[top["logprob"] for top in one["top_logprobs"]] for one in entries]
        assert b"".join(bytes(one["bytes"]) for one in entries).decode() == model.tokenizer.decode(new)
        assert [one["token"] for one in entries] == [model.tokenizer.decode([token]) for token in new]
    else:
        values, tops = about["token_logprobs"], [list(one.values()) for one in about["top_logprobs"]]
        assert about["tokens"] == [f"token_id:{token}" for token in new]
        plain = asked(server, path, TEXT | {"logprobs": 0, "max_tokens": 8})["choices"][0]["logprobs"]
        assert plain["top_logprobs"] is None and "".join(plain["tokens"]) == model.tokenizer.decode(new)
    torch.testing.assert_close(torch.tensor(values), expected.gather(1, torch.tensor(new)[:, None])[:, 0])
    torch.testing.assert_close(torch.tensor(tops), expected.topk(3).values)


def test_log_probabilities_that_need_too_much_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.answers, "logits_bytes", 4 * server.answers.vocabulary * 10)
    assert asked(server, "/v1/completions", TEXT | {"logprobs": 1, "max_tokens": 10})["choices"]
    status, text = sent(server, "/v1/completions", TEXT | {"logprobs": 1, "max_tokens": 6, "n": 2})
    assert status == 400 and "give a max_tokens of at most 10" in text


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is not None, reason="it is installed")
@pytest.mark.parametrize(
    "more", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}]
)
def test_json_needs_an_extra(server: Server, more: dict[str, Any]) -> None:
    found = error_of(sent(server, "/v1/chat/completions", CHAT | {"response_format": more}))
    assert found == (400, f"response_format: JSON needs llguidance: {install('grammar')}")


def test_metrics(model: Any) -> None:
    def read(server: Server) -> dict[str, float]:
        status, text = sent(server, "/metrics", None, "GET")
        assert status == 200
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert all(
            re.fullmatch(r'[a-z_:0-9]+\{model_name="target"(,[a-z_]+="[^"]*")?\} [-+.e0-9]+', one) for one in lines
        )
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    with served({"zoo:draft": model}) as server:
        start = read(server)
        assert not any(start.values())
        answers = [asked(server, "/v1/completions", TEXT | {"n": n}) for n in (1, 2)]
        sent(server, "/v1/completions", TEXT | {"n": 99})
        found = read(server)
    label = '{model_name="target"'
    expected = {
        "vllm:prompt_tokens_total": sum(one["usage"]["prompt_tokens"] for one in answers),
        "vllm:generation_tokens_total": sum(one["usage"]["completion_tokens"] for one in answers),
        "vllm:spec_decode_num_draft_tokens_total": sum(one["report"]["drafted"] for one in answers),
        "vllm:spec_decode_num_accepted_tokens_total": sum(one["report"]["accepted"] for one in answers),
        "assisted:target_passes_total": sum(one["report"]["target_passes"] for one in answers),
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
    }
    assert {name: found[name + label + "}"] for name in expected} == expected
    reason = answers[0]["choices"][0]["finish_reason"]
    assert found[f'vllm:request_success_total{label},finished_reason="{reason}"}}'] == 3
    assert [found[f'assisted:requests_total{label},status="{status}"}}'] for status in (200, 400)] == [3, 1]
    buckets = [value for name, value in found.items() if name.startswith("vllm:time_to_first_token_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 2


def test_a_key(model: Any) -> None:
    with served({"zoo:draft": model}, key="secret") as server:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "é"}):
            headers = {name: value.encode() for name, value in given.items()}
            for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/metrics", "GET")):
                status, text = sent(server, path, TEXT, method, headers)
                assert status == 401 and json.loads(text)["error"]["message"].startswith("Authorization: ")
        assert sent(server, "/health", None, "GET")[0] == 200
        headers = {"Authorization": "Bearer secret"}
        assert sent(server, "/v1/completions", TEXT, "POST", headers)[0] == 200
        assert sent(server, "/v1/models", None, "GET", headers)[0] == 200
    with pytest.raises(ValueError, match="key: "):
        Server({"zoo:draft": model}, "target", ("127.0.0.1", 0), key="é")


@pytest.mark.parametrize("origins", [(), ("http://a.example",), ("*",)])
def test_web_pages_may_ask_if_they_are_named(model: Any, origins: tuple[str, ...]) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a, authorization"}
    with served({"zoo:draft": model}, origins=origins, key="secret") as server:
        for origin in ("http://a.example", "http://b.example"):
            allowed = "*" in origins or origin in origins
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("OPTIONS", "/v1/chat/completions", headers=asks | {"Origin": origin})
            answer = connection.getresponse()
            assert answer.status == (204 if allowed else 403 if origins else 405)
            assert answer.getheader("Access-Control-Allow-Headers") == ("x-a, authorization" if allowed else None)
            connection.close()
            headers = {"Origin": origin, "Authorization": "Bearer secret"}
            connection.request("POST", "/v1/completions", json.dumps(TEXT), headers)
            answer = connection.getresponse()
            assert answer.status == (200 if allowed else 403)
            expected = None if not allowed else "*" if "*" in origins else origin
            assert answer.getheader("Access-Control-Allow-Origin") == expected
            connection.close()


def test_a_queue_has_an_order_and_limits() -> None:
    line, order = Line(2, 60.0), []
    inside, goes_on = threading.Event(), threading.Event()

    def take(number: int) -> None:
        with line.turn(None):
            order.append(number)
            inside.set()
            assert goes_on.wait(60)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda number=number: len(line.waiting) > number)
    assert inside.wait(60)
    with pytest.raises(Refused, match=r"queue: 2 requests are waiting already") as error, line.turn(None):
        raise AssertionError
    assert error.value.status == 503
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert order == [0, 1, 2] and not line.waiting
    line.seconds = 0.0
    with line.turn(None), pytest.raises(Refused, match="queue: no turn within 0 s"), line.turn(None):
        raise AssertionError
    assert not line.waiting


def test_a_full_queue_and_too_many_connections_are_told(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with served({"zoo:draft": model}, queue=0) as server, server.answers.line.turn(None):
        status, message = error_of(sent(server, "/v1/completions", TEXT))
        assert status == 503 and message.startswith("queue: ")
        assert 'vllm:num_requests_running{model_name="target"} 1' in sent(server, "/metrics", None, "GET")[1]
        until(lambda: server.open == 0)
        monkeypatch.setattr(server, "connections", 2)
        idle = [connected(server, b"GET /health") for _ in range(2)]
        until(lambda: server.open == 2)
        assert sent(server, "/health", None, "GET")[0] == 503
        for client in idle:
            client.close()
        until(lambda: server.open == 0)
        assert sent(server, "/health", None, "GET")[0] == 200


@pytest.mark.parametrize("count", [240, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flood_with_hostile_clients_loses_nothing(model: Any, count: int) -> None:
    """Half requests, clients that leave at once or read nothing, and more requests than the queue takes: each proper one gets
    its text, if need be after a 503 that says when to ask again, and nothing is left of any."""
    prompts = [model.tokenizer(text).input_ids for text in ("def mean(values):\n", "import os\n", "class Queue:\n")]
    expected = [model.tokenizer.decode(alone(model, ids, 2), skip_special_tokens=True) for ids in prompts]
    begun, refused = list[int](), list[int]()
    bodies = [{"prompt": ids, "max_tokens": 2, "temperature": 0} for ids in prompts]

    def proper(number: int) -> None:
        body = json.dumps(bodies[number % 3])
        while True:
            begun.append(number)
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            connection.close()
            if answer.status == 200:
                assert found["choices"][0]["text"] == expected[number % 3]
                return
            assert answer.status == 503 and answer.headers["Retry-After"] == "1", found
            refused.append(number)
            time.sleep(0.01)

    def hostile(number: int) -> None:
        begun.append(number)
        long = {**bodies[0], "max_tokens": 400, "stream": True}
        written = [request(bodies[0])[:-9], b"POST /v1/completions HTTP/1.1\r\n\r\n", request(long), request(long)]
        client = connected(server, written[number % 4], 2048)
        if number % 4 == 3:
            client.recv(1)
        client.close()

    def client(worker: int) -> None:
        for number in range(worker, count, 12):
            (hostile if number % 3 == 0 else proper)(number)

    with served({"target": model}, queue=2) as server:
        entries: list[Any] = server.entries  # type: ignore[attr-defined]
        left = []  # objects, by each request of a round; what is made only once may be made in any
        while len(left) < 2 or (min(left) >= 1.0 and len(left) < 4):
            before, known = len(gc.get_objects()), len(begun)
            assert in_threads(client, 12) == [None] * 12
            until(lambda: server.open == 0 and server.answers.line.counts == (0, 0))
            statuses = collections.Counter(entry["status"] for entry in entries)
            assert statuses[200] >= count * 2 // 3 and statuses[503] >= len(refused) > 0
            assert statuses.keys() <= {200, 400, 411, 499, 503} and statuses.total() == len(begun) - known
            entries.clear()
            refused.clear()
            gc.collect()
            left.append((len(gc.get_objects()) - before) / (len(begun) - known))
        assert min(left) < 1.0


def test_what_a_server_needs() -> None:
    with pytest.raises(ValueError, match="pairs: there are none"):
        Server({}, "target")
    with pytest.raises(ValueError, match="pairs: they have no tokenizer"):
        Server({"model": pair()[1]}, "target")


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(pairs: Any, *given: Any) -> None:
        windows = {name: getattr(one.drafter, "window", None) for name, one in pairs.items()}
        assert windows == {"suffix": None, "zoo:draft": 64}
        assert (given[0], *given[3:]) == ("target", keys.pop(), ["http://a", "*"], 3, 2, 64)
        raise KeyboardInterrupt

    monkeypatch.setattr("assisted.serving.Server", stopped)
    monkeypatch.setenv("ASSISTED_API_KEY", "of the environment")
    keys = ["of the environment", "given"]
    argv = shlex.split(
        "serve zoo:target --draft suffix --draft zoo:draft --draft-window 64 --name target --device cpu"
        " --allow-origin http://a --allow-origin * --queue 3 --rows 2 --chunk 64"
    )
    assert main([*argv, "--api-key", "given"]) == 130
    assert main(argv) == 130 and not keys


@pytest.mark.slow
def test_the_command() -> None:
    arguments = shlex.split("-m assisted serve zoo:target --draft suffix --draft ngram --port 0 --json --threads 1")
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
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
