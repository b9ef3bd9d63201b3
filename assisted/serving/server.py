"""OpenAI's chat and text completions over HTTP for one user or a few: a draft for each request, a report with each answer.

Knows HTTP and the protocol's answers. Requests are answered in `answers`, and wait there for each other, never for a client.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..core.host import now
from ..many.rows import CHUNK
from ..modeling import AssistedModelForCausalLM
from . import fields
from .answers import Answers, Show
from .fields import CHAT, TEXT, Refused
from .line import LEFT

__all__ = ["Refused", "Server"]

_MOST = 2**24  # bytes of a request
_GET = ("/v1/models", "/metrics", "/health")
_CROWDED = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class Server(ThreadingHTTPServer):
    """Answers `POST /v1/chat/completions` and `/v1/completions`, `GET /v1/models`, `/metrics` and `/health`.

    Args:
        pairs: of one target, by the names of their drafts, the default first. "none" is added, which drafts nothing.
        name: of the model, for requests.
        address: host and port; port 0 takes any free one.
        log: called with a dictionary for each request.
        key: that requests must have as `Authorization: Bearer KEY`, all but those for `/health`; None asks for none.
        origins: of web pages whose scripts may ask, such as "https://example.org", or "*" for all; no others may.
        queue: how many requests may wait for their turn.
        rows: how many requests are answered together, as far as that is possible; 1 answers one after the other.
        chunk: tokens of prompts that are read between two pieces of other answers.

    Attributes, all but the last in seconds:
        arrives_in: within which a request must be here.
        takes_in: within which a client must take a piece of its answer.
        looks_every: after which a request that waits looks whether its client is still there.
        drains_for: for which a client may go on sending after its answer.
        waits_for: for which a request may wait for its turn.
        connections: that may be open at once; further ones get status 503.

    Raises ValueError if there is no pair, or no tokenizer, and for fewer rows or tokens than 1.
    """

    arrives_in, takes_in, looks_every, drains_for = 60.0, 30.0, 0.5, 5.0
    waits_for, connections = 600.0, 512
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        pairs: Mapping[str, AssistedModelForCausalLM],
        name: str,
        address: tuple[str, int] = ("127.0.0.1", 8000),
        log: Callable[[dict[str, Any]], None] = lambda entry: None,
        key: str | None = None,
        origins: Sequence[str] = (),
        queue: int = 64,
        rows: int = 4,
        chunk: int = CHUNK,
    ):
        if key is not None and not key.isascii():
            raise ValueError("key: it goes into a header of HTTP, so give ASCII characters only")
        self.answers = Answers(pairs, name, queue, self.waits_for, rows, chunk)
        self.name, self.log, self.key, self.origins = name, log, key, origins
        self.started, self.open, self.counting = int(time.time()), 0, threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, unless too many are open. request: its socket. client_address: of the
        other end."""
        with self.counting:
            crowded = self.open >= self.connections
            self.open += not crowded
        if not crowded:
            super().process_request(request, client_address)
            return
        self.answers.metrics.add("assisted:requests_total", 1, 'status="503"')
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_CROWDED)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What the thread does. request: a socket. client_address: of its other end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.counting:
                self.open -= 1


class _Handler(BaseHTTPRequestHandler):
    server: Server
    streams = is_late = False
    path, default_request_version = "", "HTTP/1.0"  # of a request whose first line cannot be read

    def setup(self) -> None:
        super().setup()
        self.began = now()
        self.timer = threading.Timer(self.server.arrives_in, self._stop_reading)
        self.timer.daemon = True
        self.timer.start()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError as error:  # the client has left before it was told what is wrong
            if self.path:
                self._gone(error)

    def finish(self) -> None:
        self.timer.cancel()
        super().finish()
        until = time.monotonic() + self.server.drains_for
        with contextlib.suppress(OSError):  # a socket closed with unread bytes takes back an answer that is on its way
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            while time.monotonic() < until and self.connection.recv(2**16):
                pass

    def _stop_reading(self) -> None:
        """End what waits for a part of the request, which then seems to have ended."""
        self.is_late = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        path, answers = self.path.partition("?")[0], self.server.answers
        if not self._admitted(free=path == "/health"):
            return
        model = {"id": self.server.name, "object": "model", "created": self.server.started, "owned_by": "assisted"}
        model["drafts"] = list(answers.pairs)
        known: dict[str, Any] = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [model]}}
        known[f"/v1/models/{self.server.name}"] = model
        if path == "/metrics":
            self._head(200, "text/plain; version=0.0.4; charset=utf-8")
            self.wfile.write(answers.metrics.text(*answers.line.counts).encode())
            self._log(200, {})
        elif path in known:
            self._send(200, known[path])
        else:
            self._fail(Refused(f"path: {path[:60]} is not here; there are {CHAT}, {TEXT}, {', '.join(_GET)}", 404))

    def do_OPTIONS(self) -> None:
        """What a browser asks before a page's script may ask something."""
        if not self.server.origins:
            self._fail(Refused("request: Unsupported method ('OPTIONS'); --allow-origin lets web pages ask", 405))
        elif self._admitted(free=True):
            self.send_response(204)
            self._allow_origin()
            asked = self.headers.get("Access-Control-Request-Headers", "")
            named = asked if re.fullmatch(r"[\w, -]{1,1000}", asked) else "Authorization, Content-Type"
            for name, value in (("Methods", "GET, POST, OPTIONS"), ("Headers", named)):
                self.send_header(f"Access-Control-Allow-{name}", value)
            self.send_header("Access-Control-Max-Age", "600")
            self.end_headers()
            self._log(204, {})

    def do_POST(self) -> None:
        try:
            path = self.path.partition("?")[0]
            if not self._admitted():
                return
            if path not in (CHAT, TEXT):
                raise Refused(f"path: {path[:60]} is not here; there are {CHAT} and {TEXT}", 404)
            body, is_chat = self._body(), path == CHAT
            kind = "chat.completion" if is_chat else "text_completion"
            about = {"id": f"assisted-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
            about["model"] = self.server.name
            if body.get("stream"):
                self._stream(body, is_chat, about)
                return
            found = self._written(body, is_chat, None)
            counts = {"usage": found["usage"], "report": found["report"]}
            choices = []
            for number, one in enumerate(found["choices"]):
                own: dict[str, Any] = {"text": one["text"]}
                if is_chat:
                    calls = {"tool_calls": one["tool_calls"]} if "tool_calls" in one else {}
                    text = one["text"] if one["text"].strip() or not calls else None
                    own = {"message": {"role": "assistant", "content": text, **calls}}
                choices.append({"index": number, **own, **_ending(one)})
            self._send(200, {**about, "choices": choices, **counts}, counts)
        except OSError as error:  # the client has left, or does not take its answer
            self._gone(error)
        except ValueError as error:  # of `generate`, too, whose arguments are those of the request
            self._fail(error)
        except Exception as error:
            self._fail(Refused(f"{type(error).__name__}: {error}", 500))

    def _stream(self, body: dict[str, Any], is_chat: bool, about: dict[str, Any]) -> None:
        """Answer with events: pieces of text, then how each choice ended, then the counts."""
        about = {**about, "object": "chat.completion.chunk"} if is_chat else about
        options = body.get("stream_options")
        apart = isinstance(options, dict) and options.get("include_usage") is True
        begun: set[int] = set()

        def send(choices: list[dict[str, Any]], **counts: Any) -> None:
            if not self.streams:
                self._head(200, "text/event-stream")
            self.streams = True
            self._event(json.dumps({**about, "choices": choices, **({"usage": None} if apart else {}), **counts}))

        def choice(number: int, text: str, ending: Mapping[str, Any], **more: Any) -> dict[str, Any]:
            own: dict[str, Any] = {"text": text}
            if is_chat:
                own = {"delta": ({} if number in begun else {"role": "assistant"}) | {"content": text} | more}
            begun.add(number)
            return {"index": number, **own, **ending}

        found = self._written(body, is_chat, lambda number, text: send([choice(number, text, _ending({}))]))
        counts = {"usage": found["usage"], "report": found["report"]}
        ended = []
        for number, one in enumerate(found["choices"]):
            calls = [{"index": at, **call} for at, call in enumerate(one.get("tool_calls", ()))]
            ended.append(choice(number, one["rest"], _ending(one), **({"tool_calls": calls} if calls else {})))
        for one in ended[:-1]:
            send([one])
        send(ended[-1:], **({} if apart else counts))
        if apart:
            send([], **counts)
        self._event("[DONE]")
        self._log(200, counts)

    def _admitted(self, free: bool = False) -> bool:
        """Whether a web page's script or anybody without the key may have what is asked for; answers those who may not.

        free: nobody needs a key.
        """
        origin, key = self.headers.get("Origin"), self.server.key
        given = self.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if origin is not None and "*" not in self.server.origins and origin not in self.server.origins:
            self._fail(Refused(f"Origin: {origin[:60]} may not ask; start the server with --allow-origin ORIGIN", 403))
        elif not free and key is not None and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            self._fail(Refused("Authorization: the key is missing or another; send 'Bearer KEY'", 401))
        else:
            return True
        return False

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length) or int(length) > _MOST:
            raise Refused(
                f"Content-Length: {length[:60] or 'none'}; send at most {_MOST} bytes", 413 if length else 411
            )
        data = self.rfile.read(int(length))
        self.timer.cancel()
        if len(data) < int(length):
            when = f" within {self.server.arrives_in:g} s" if self.is_late else ""
            raise Refused(
                f"Content-Length: of {length} bytes, {len(data)} have come{when}", 408 if self.is_late else 400
            )
        return fields.read(data)

    def _written(self, body: dict[str, Any], is_chat: bool, show: Show | None) -> dict[str, Any]:
        """`Answers.write` in another thread. This one writes to the client, and ends the call if the client has left."""
        parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        left = threading.Event()

        def write() -> None:
            try:
                shows = None if show is None else lambda *piece: parts.put(piece)
                parts.put(self.server.answers.write(body, is_chat, shows, left))
            except ValueError as error:
                parts.put(error)
            except Exception as error:
                parts.put(Refused(f"{type(error).__name__}: {error}", 500))

        threading.Thread(target=write, daemon=True).start()
        try:
            while True:
                try:
                    part = parts.get(timeout=self.server.looks_every)
                except queue.Empty:
                    self._require_client()
                    continue
                if isinstance(part, ValueError):
                    raise part
                if isinstance(part, dict):
                    return part
                if show is not None:
                    show(*part)
        finally:
            left.set()

    def _require_client(self) -> None:
        self.connection.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            if not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError(LEFT)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or that has another method."""
        self._fail(Refused(f"request: {message or explain}", 405 if code == 501 else int(code)))

    def _fail(self, error: ValueError) -> None:
        status = getattr(error, "status", 400)
        kind = "invalid_request_error" if status < 500 else "server_error"
        about = {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
        if self.streams:  # the head was sent
            self._event(json.dumps(about))
            self._log(status, about)
        else:
            self._send(status, about, about)

    def _send(self, status: int, content: Any, logged: Mapping[str, Any] | None = None) -> None:
        self._head(status, "application/json")
        self.wfile.write(json.dumps(content).encode())
        self._log(status, logged or {})

    def _head(self, status: int, kind: str) -> None:
        self.connection.settimeout(self.server.takes_in)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 503:
            self.send_header("Retry-After", "1")
        self._allow_origin()
        self.end_headers()

    def _allow_origin(self) -> None:
        origin = getattr(self, "headers", {}).get("Origin")
        if origin is not None and (origin in self.server.origins or "*" in self.server.origins):
            self.send_header("Access-Control-Allow-Origin", "*" if "*" in self.server.origins else origin)
            self.send_header("Vary", "Origin")

    def _event(self, text: str) -> None:
        self.connection.settimeout(self.server.takes_in)
        self.wfile.write(b"data: %b\n\n" % text.encode())

    def _gone(self, error: OSError) -> None:
        self._log(499, {"error": {"message": str(error) or type(error).__name__}})

    def _log(self, status: int, about: Mapping[str, Any]) -> None:
        seconds = now() - self.began
        self.server.answers.metrics.add("assisted:requests_total", 1, f'status="{status}"')
        self.server.log({"path": self.path, "status": status, "seconds": round(seconds, 3), **about})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `Server.log` gets each request."""


def _ending(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {key: choice.get(key) for key in ("finish_reason", "logprobs")}
