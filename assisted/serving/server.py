"""OpenAI's chat and text completions over HTTP for one user or a few: a draft for each request, a report with each answer.

One call of `generate` at a time; other requests wait. Knows requests and answers, nothing of drafting.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers.generation import BaseStreamer

from ..lengths.policies import Never
from ..modeling import AssistedModelForCausalLM

__all__ = ["Pieces", "Refused", "Server"]

NO_DRAFT = "none"
_MOST = 2**24  # bytes of a request
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_k", "seed", "logprobs", "draft_length"), int),
    **dict.fromkeys(("stream", "return_tokens_as_token_ids"), bool),
    **dict.fromkeys(("model", "draft", "user"), str),
    **{"messages": list, "prompt": (str, list), "stop": (str, list), "stream_options": dict},
}
"""What may be asked for, and the types."""
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), 1),
    **{"logit_bias": {}, "tools": [], "echo": False, "store": False, "response_format": {"type": "text"}},
}
"""What may not, unless it asks for nothing."""


class Refused(ValueError):
    """A request that cannot be answered. message: for the client. status: of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Pieces(BaseStreamer):
    """The answer so far, in pieces that stay: no half of a character, and nothing that may begin a stop string.

    tokenizer: the target's. stop: texts at which the answer ends. show: called with each new piece; may raise to end the call.
    """

    def __init__(self, tokenizer: Any, stop: list[str], show: Callable[[str], None] | None):
        self.tokenizer, self.stop, self.show = tokenizer, stop, show
        self.ids: list[int] | None = None
        self.shown, self.stopped = "", False

    def put(self, value: torch.Tensor) -> None:
        """Take further tokens, [n] int64; the first ones are the prompt."""
        if self.ids is None:
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        if self.show is not None:
            self._emit(last=False)

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

    Raises ValueError if there is no pair, or no tokenizer.
    """

    daemon_threads = True

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
        self.busy = threading.Lock()
        super().__init__(address, _Handler)

    def write(self, body: dict[str, Any], is_chat: bool, show: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Answer a request: `text`, `finish_reason`, `usage`, `report`, and `logprobs`.

        body: the request. is_chat: it is one of a chat. show: as for `Pieces`.

        Raises ValueError for a request that cannot be answered.
        """
        for name, value in body.items():
            if name not in _FIELDS and (name not in _NEUTRAL or value != _NEUTRAL[name]):
                raise Refused(f"{name}: {json.dumps(value)[:60]} is not supported; leave it out")
            kinds = _FIELDS.get(name, object)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds not in (bool, object)):
                raise Refused(f"{name}: {json.dumps(value)[:60]} is of a type that it cannot have")
        draft = body.get("draft", next(iter(self.pairs)))
        if draft not in self.pairs:
            raise Refused(f"draft: {draft!r} was not loaded; there are {', '.join(map(repr, self.pairs))}")
        if body.get("model", self.name) != self.name:
            raise Refused(f"model: {body['model']!r} is not here; ask for {self.name!r}", 404)
        stop, logprobs = body.get("stop", []), body.get("logprobs", 0)
        stop = [stop] if isinstance(stop, str) else stop
        if not all(isinstance(one, str) and one for one in stop):
            raise Refused("stop: give a text, or a list of texts")
        if logprobs and (is_chat or show is not None or logprobs != 1):
            raise Refused("logprobs: only /v1/completions has them, without a stream, and of 1 token at each place")
        ids = self._ids(body, is_chat)
        call = self._sampling(body) | {"max_new_tokens": self._room(body, len(ids))}
        call |= {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        call |= {"return_dict_in_generate": True, "output_logits": True} if logprobs else {}
        call["draft_length"] = Never() if draft == NO_DRAFT else body.get("draft_length")
        text, pair = Pieces(self.tokenizer, stop, show), self.pairs[draft]
        given = torch.tensor([ids], device=pair.device)
        with self.busy:
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
        found["report"] = {"draft": draft, **report.to_dict()}
        if logprobs:
            values = [
                float(row[0].float().log_softmax(-1)[token]) for row, token in zip(output.logits, new, strict=True)
            ]
            found["logprobs"] = {"tokens": [f"token_id:{token}" for token in new], "token_logprobs": values}
        return found

    def _ids(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        ids = body.get("prompt")
        if is_chat:
            messages = body.get("messages", [])
            texts = [one.get(key) for one in messages if isinstance(one, dict) for key in ("role", "content")]
            if not texts or len(texts) != 2 * len(messages) or not all(isinstance(text, str) for text in texts):
                raise Refused('messages: give a list of {"role": ..., "content": ...} with texts')
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
        if not ids or not all(type(one) is int and 0 <= one < len(self.tokenizer) for one in ids):
            raise Refused("prompt: give a text, or a list of token ids of one text")
        return list(ids)

    def _room(self, body: dict[str, Any], width: int) -> int:
        room = self.context - width
        wanted: int = body.get("max_completion_tokens", body.get("max_tokens", max(1, min(256, room))))
        if not 1 <= wanted <= room:
            raise Refused(
                f"max_tokens: {wanted} new tokens after {width} of the prompt are not possible; the context has {self.context}"
            )
        return wanted

    def _sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        call: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
        call = {name: float(body.get(name, value)) for name, value in call.items()}
        for name, most in (("temperature", 1e3), ("top_p", 1.0), ("min_p", 1.0)):
            if not 0 <= call[name] <= most:
                raise Refused(f"{name}: {call[name]} is not possible; give 0 to {most:g}")
        if call["temperature"] == 0:
            return {"do_sample": False}
        return call | {"do_sample": True, "top_k": max(0, body.get("top_k", 0))}


class _Handler(BaseHTTPRequestHandler):
    server: Server
    streams = False

    def setup(self) -> None:
        super().setup()
        self.began = time.perf_counter()

    def do_GET(self) -> None:
        model = {"id": self.server.name, "object": "model", "owned_by": "assisted", "drafts": list(self.server.pairs)}
        known = {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": [model]}}
        if self.path in known:
            self._send(200, known[self.path])
        else:
            self._fail(Refused(f"path: {self.path} is not here; there are {_CHAT}, {_TEXT} and /v1/models", 404))

    def do_POST(self) -> None:
        try:
            if self.path not in (_CHAT, _TEXT):
                raise Refused(f"path: {self.path} is not here; there are {_CHAT} and {_TEXT}", 404)
            body, is_chat = self._body(), self.path == _CHAT
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

            found = self.server.write(body, is_chat, show if body.get("stream") else None)
            counts = {"usage": found["usage"], "report": found["report"]}
            if body.get("stream"):
                show("", found, **counts)
                self._event("[DONE]")
                self._log(200, counts)
            else:
                self._send(200, {**about, "choices": [choice(found["text"], found)], **counts}, counts)
        except OSError as error:  # the client has left, which ended the call
            self._log(499, {"error": {"message": str(error) or type(error).__name__}})
        except ValueError as error:  # of `generate`, too, whose arguments are those of the request
            self._fail(error)
        except Exception as error:
            self._fail(Refused(f"{type(error).__name__}: {error}", 500))

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST:
            raise Refused(f"Content-Length: {length or 'none'}; send at most {_MOST} bytes", 413 if length else 411)
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(f"body: it is not JSON ({error})") from error
        if not isinstance(body, dict):
            raise Refused("body: a JSON object is expected")
        return {name: value for name, value in body.items() if value is not None}

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
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _event(self, text: str) -> None:
        self.wfile.write(b"data: %b\n\n" % text.encode())

    def _log(self, status: int, about: Mapping[str, Any]) -> None:
        seconds = time.perf_counter() - self.began
        self.server.log({"path": self.path, "status": status, "seconds": round(seconds, 3), **about})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `Server.log` gets each request."""
