"""OpenAI's chat and text completions over HTTP for one user or a few: a draft for each request, a report with each answer.

One call of `generate` at a time; other requests wait for it, never for a client. What a request may contain is in `fields`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers.generation import BaseStreamer

from ..core.clock import now
from ..lengths.policies import Never
from ..modeling import AssistedModelForCausalLM
from . import fields
from .fields import CHAT, TEXT, Refused

__all__ = ["Pieces", "Refused", "Server"]

NO_DRAFT = "none"
_MOST = 2**24  # bytes of a request
_LEFT = "the client has left"


class Pieces(BaseStreamer):
    """The answer so far, in pieces that stay: no half of a character, and nothing that may begin a stop string.

    tokenizer: the target's. stop: texts at which the answer ends. show: called with each new piece. left: set once nobody waits
    for the answer, which ends the call.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: list[str],
        show: Callable[[str], None] | None,
        left: threading.Event | None = None,
    ):
        self.tokenizer, self.stop, self.show, self.left = tokenizer, stop, show, left
        self.ids: list[int] | None = None
        self.shown, self.stopped = "", False

    def put(self, value: torch.Tensor) -> None:
        """Take further tokens, [n] int64; the first ones are the prompt."""
        self.require_client()
        if self.ids is None:
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        if self.show is not None:
            self._emit(last=False)

    def require_client(self) -> None:
        """Raise ConnectionAbortedError once nobody waits for the answer."""
        if self.left is not None and self.left.is_set():
            raise ConnectionAbortedError(_LEFT)

    def end(self) -> None:
        """The text ends."""
        self._emit(last=True)

    def _emit(self, last: bool) -> None:
        text = self.tokenizer.decode(self.ids or [], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        places = [place for one in self.stop if (place := text.find(one)) >= 0]
        self.stopped = bool(places)
        text = text[: min(places, default=None)]
        if not last and not self.stopped:
            text = text.rstrip("\ufffd")
            begun = [size for one in self.stop for size in range(1, len(one)) if text.endswith(one[:size])]
            text = text[: len(text) - max(begun, default=0)]
        if text.startswith(self.shown) and len(text) > len(self.shown):
            if self.show is not None:
                self.show(text[len(self.shown) :])
            self.shown = text


class Server(ThreadingHTTPServer):
    """Answers `POST /v1/chat/completions` and `/v1/completions`, `GET /v1/models` and `/health`.

    Args:
        pairs: of one target, by the names of their drafts, the default first. "none" is added, which drafts nothing.
        name: of the model, for requests.
        address: host and port; port 0 takes any free one.
        log: called with a dictionary for each request.

    Attributes, all in seconds:
        arrives_in: within which a request must be here.
        takes_in: within which a client must take a piece of its answer.
        looks_every: after which a request that waits looks whether its client is still there.
        drains_for: for which a client may go on sending after its answer.

    Raises ValueError if there is no pair, or no tokenizer.
    """

    arrives_in, takes_in, looks_every, drains_for = 60.0, 30.0, 0.5, 5.0
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        pairs: Mapping[str, AssistedModelForCausalLM],
        name: str,
        address: tuple[str, int] = ("127.0.0.1", 8000),
        log: Callable[[dict[str, Any]], None] = lambda entry: None,
    ):
        if not pairs:
            raise ValueError("pairs: there are none; give at least one, by the name of its draft")
        first = next(iter(pairs.values()))
        self.pairs, self.name, self.log = {**pairs, NO_DRAFT: pairs.get(NO_DRAFT, first)}, name, log
        self.tokenizer: Any = first.tokenizer
        if self.tokenizer is None:
            raise ValueError("pairs: they have no tokenizer, and requests are text; pass tokenizer= when making a pair")
        self.context = getattr(first.target.config.get_text_config(decoder=True), "max_position_embeddings", 2**20)
        self.ids = range(min(len(self.tokenizer), len(first.target.get_input_embeddings().weight)))
        self.busy = threading.Lock()
        super().__init__(address, _Handler)

    def write(
        self,
        body: dict[str, Any],
        is_chat: bool,
        show: Callable[[str], None] | None = None,
        left: threading.Event | None = None,
    ) -> dict[str, Any]:
        """Answer a request: `text`, `finish_reason`, `usage`, `report`, and `logprobs`.

        body: the request. is_chat: it is one of a chat. show, left: as for `Pieces`; other requests wait for `show`.

        Raises ValueError for a request that cannot be answered, and ConnectionAbortedError if `left` is set.
        """
        for name, value in body.items():
            fields.require(name, value, CHAT if is_chat else TEXT)
        draft = body.get("draft", next(iter(self.pairs)))
        if draft not in self.pairs:
            raise Refused(f"draft: {fields.shown(draft)} was not loaded; there are {', '.join(map(repr, self.pairs))}")
        if body.get("model", self.name) != self.name:
            raise Refused(f"model: {fields.shown(body['model'])} is not here; ask for {self.name!r}", 404)
        stop, logprobs = fields.stops(body.get("stop", [])), body.get("logprobs", 0)
        if logprobs and (is_chat or show is not None or logprobs != 1):
            raise Refused("logprobs: only /v1/completions has them, without a stream, and of 1 token at each place")
        ids = self._ids(body, is_chat)
        call = self._sampling(body) | {"max_new_tokens": self._room(body, len(ids))}
        call |= {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        call |= {"return_dict_in_generate": True, "output_logits": True} if logprobs else {}
        call["draft_length"] = Never() if draft == NO_DRAFT else body.get("draft_length")
        text, pair = Pieces(self.tokenizer, stop, show, left), self.pairs[draft]
        given = torch.tensor([ids], device=pair.device)
        with self.busy:
            text.require_client()
            if "seed" in body:
                torch.manual_seed(body["seed"])
            output: Any = pair.generate(given, attention_mask=torch.ones_like(given), streamer=text, **call)
            report = pair.report
        new = text.ids or []
        assert report is not None
        ended = text.stopped or len(new) < call["max_new_tokens"]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new), "total_tokens": len(ids) + len(new)}
        found: dict[str, Any] = {"text": text.shown, "finish_reason": "stop" if ended else "length", "logprobs": None}
        found["usage"] = usage | {"prompt_tokens_details": {"cached_tokens": report.cached_tokens}}
        found["report"] = report.to_dict() | {"draft": draft}
        if logprobs:
            values = [
                float(row[0].float().log_softmax(-1)[token]) for row, token in zip(output.logits, new, strict=True)
            ]
            found["logprobs"] = {"tokens": [f"token_id:{token}" for token in new], "token_logprobs": values}
        return found

    def _ids(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        ids = body.get("prompt")
        if is_chat:
            messages = fields.messages(body.get("messages", []))
            if not getattr(self.tokenizer, "chat_template", None):
                raise Refused("messages: the model has no chat template; ask /v1/completions")
            try:
                ids = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                ).input_ids
            except Exception as error:  # a template raises what it wants
                raise Refused(f"messages: the chat template does not take them ({error})") from error
        elif isinstance(ids, str):
            ids = self.tokenizer(ids).input_ids
        if not ids or not all(type(one) is int and one in self.ids for one in ids):
            raise Refused("prompt: give a text, or a list of token ids of one text")
        if len(ids) >= self.context:
            field = "messages" if is_chat else "prompt"
            raise Refused(f"{field}: {len(ids)} tokens leave no room for an answer; the context has {self.context}")
        return list(ids)

    def _room(self, body: dict[str, Any], width: int) -> int:
        room = self.context - width
        for name in ("max_tokens", "max_completion_tokens"):
            if not 1 <= body.get(name, 1) <= room:
                most = f"the context has {self.context}, and {width} of the prompt"
                raise Refused(f"{name}: {fields.shown(body[name])} is not possible; give 1 to {room}, since {most}")
        wanted: int = body.get("max_completion_tokens", body.get("max_tokens", min(256, room)))
        return wanted

    def _sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        call: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
        call = {name: float(body.get(name, value)) for name, value in call.items()}
        if call["temperature"] == 0:
            return {"do_sample": False}
        return call | {"do_sample": True, "top_k": max(0, body.get("top_k", 0))}


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
        with contextlib.suppress(OSError):  # the client has left before it was told what is wrong
            super().handle()

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
        model = {"id": self.server.name, "object": "model", "owned_by": "assisted", "drafts": list(self.server.pairs)}
        known = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [model]}}
        if self.path in known:
            self._send(200, known[self.path])
        else:
            self._fail(Refused(f"path: {self.path[:60]} is not here; there are {CHAT}, {TEXT} and /v1/models", 404))

    def do_POST(self) -> None:
        try:
            if self.path not in (CHAT, TEXT):
                raise Refused(f"path: {self.path[:60]} is not here; there are {CHAT} and {TEXT}", 404)
            body, is_chat = self._body(), self.path == CHAT
            kind = "chat.completion" if is_chat else "text_completion"
            about = {"id": f"assisted-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
            about["model"] = self.server.name
            name = "delta" if body.get("stream") else "message"

            def choice(text: str, found: Mapping[str, Any] | None = None) -> dict[str, Any]:
                own: dict[str, Any] = {name: {"role": "assistant", "content": text}} if is_chat else {"text": text}
                return {"index": 0, **own, **{key: (found or {}).get(key) for key in ("finish_reason", "logprobs")}}

            def show(text: str, found: Mapping[str, Any] | None = None, **counts: Any) -> None:
                if not self.streams:
                    self._head(200, "text/event-stream")
                self.streams = True
                chunk = {**about, "object": "chat.completion.chunk"} if is_chat else about
                self._event(json.dumps({**chunk, "choices": [choice(text, found)], **counts}))

            found = self._written(body, is_chat, show if body.get("stream") else None)
            counts = {"usage": found["usage"], "report": found["report"]}
            if body.get("stream"):
                show("", found, **counts)
                self._event("[DONE]")
                self._log(200, counts)
            else:
                self._send(200, {**about, "choices": [choice(found["text"], found)], **counts}, counts)
        except OSError as error:  # the client has left, or does not take its answer
            self._log(499, {"error": {"message": str(error) or type(error).__name__}})
        except ValueError as error:  # of `generate`, too, whose arguments are those of the request
            self._fail(error)
        except Exception as error:
            self._fail(Refused(f"{type(error).__name__}: {error}", 500))

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

    def _written(self, body: dict[str, Any], is_chat: bool, show: Callable[[str], None] | None) -> dict[str, Any]:
        """`Server.write` in another thread. This one writes to the client, and ends the call if the client has left."""
        parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        left = threading.Event()

        def write() -> None:
            try:
                parts.put(self.server.write(body, is_chat, None if show is None else parts.put, left))
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
                    show(part)
        finally:
            left.set()

    def _require_client(self) -> None:
        self.connection.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            if not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionAbortedError(_LEFT)

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
        self.end_headers()

    def _event(self, text: str) -> None:
        self.connection.settimeout(self.server.takes_in)
        self.wfile.write(b"data: %b\n\n" % text.encode())

    def _log(self, status: int, about: Mapping[str, Any]) -> None:
        seconds = now() - self.began
        self.server.log({"path": self.path, "status": status, "seconds": round(seconds, 3), **about})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `Server.log` gets each request."""
