"""What is audited: an object with `generate`, or a server with OpenAI's interface. Knows how to ask, not what is right."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class NotOffered(Exception):
    """The subject does not offer what a check needs. Its text is the reason."""


@dataclass(frozen=True)
class Sampled:
    """What a subject wrote.

    Args:
        text: without the prompt.
        tokens: the new tokens.
        logprobs: of these tokens, natural logarithms; None if the subject does not say.
        named: the subject named the tokens; otherwise they are those of the text, which may be others.
    """

    text: str
    tokens: list[int]
    logprobs: list[float] | None = None
    named: bool = True


class Subject(Protocol):
    """An engine with its drafts switched on."""

    name: str

    def write(
        self,
        prompt: list[int],
        count: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | None = None,
        logprobs: bool = False,
    ) -> Sampled:
        """Continue a prompt by at most `count` tokens, without top-k or top-p. Raises `NotOffered`."""

    def json_object(self, request: str, schema: Mapping[str, Any], seed: int) -> str | None:
        """The answer to a request whose form a JSON schema prescribes; None if it reached its limit of tokens before it ended.
        Raises `NotOffered`."""


class Model:
    """An object with `generate`, such as a pair or a model of transformers.

    Args:
        model: the object.
        tokenizer: its tokenizer.
        options: further arguments of `generate` that switch drafts on, such as `{"assistant_model": draft}`.
        name: for the report.
    """

    def __init__(self, model: Any, tokenizer: Any, options: Mapping[str, Any] | None = None, name: str = ""):
        self.model, self.tokenizer, self.options = model, tokenizer, dict(options or {})
        self.name = name or type(model).__name__

    def write(
        self,
        prompt: list[int],
        count: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | None = None,
        logprobs: bool = False,
    ) -> Sampled:
        """As `Subject.write`: continue a prompt by at most `count` tokens, with a temperature, a seed, a string to stop at, and
        logprobs if these are wanted."""
        if seed is not None:
            torch.manual_seed(seed)
        ids = torch.tensor([prompt], device=self.model.device)
        call: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            call = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        if stop is not None:
            call |= {"stop_strings": [stop], "tokenizer": self.tokenizer}
        if logprobs:
            call |= {"return_dict_in_generate": True, "output_logits": True}
        call |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": count}
        try:
            made = self.model.generate(input_ids=ids, **call, **self.options)
        except ValueError as error:
            if stop is None and not logprobs:
                raise
            raise NotOffered(f"generate raises ValueError: {error}") from error
        tokens = (made.sequences if logprobs else made)[0, len(prompt) :].tolist()
        rows = zip(made.logits, tokens, strict=False) if logprobs else ()
        found = [float(row[0].float().log_softmax(-1)[token]) for row, token in rows] if logprobs else None
        return Sampled(decoded(self.tokenizer, tokens), tokens, found)

    def json_object(self, request: str, schema: Mapping[str, Any], seed: int) -> str | None:
        """As `Subject.json_object`: the answer to a request, by a schema, with a seed."""
        raise NotOffered("generate takes no JSON schema")


class Server:
    """A server with OpenAI's `/completions`.

    Args:
        url: up to and including `/v1`.
        tokenizer: of the model that it serves.
        model: its name there; None takes the first of `/models`.
        seconds: to wait for an answer.

    Raises ConnectionError if there is no such server.
    """

    def __init__(self, url: str, tokenizer: Any, model: str | None = None, seconds: float = 300.0):
        self.url, self.tokenizer, self.seconds = url.rstrip("/"), tokenizer, seconds
        if model is None:
            listed = self._ask("/models", None).get("data") or []
            if not listed:
                raise ValueError(f"model: {self.url}/models names none; give its name")
            model = listed[0]["id"]
        self.model = model
        self.name = f"{model} at {self.url}"
        self._ids: dict[str, list[int]] | None = None

    def write(
        self,
        prompt: list[int],
        count: int,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | None = None,
        logprobs: bool = False,
    ) -> Sampled:
        """As `Subject.write`: continue a prompt by at most `count` tokens, with a temperature, a seed, a string to stop at, and
        logprobs if these are wanted."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": temperature}
        # top-k of 0 and -1 means all tokens to llama.cpp and vLLM; "return_tokens_as_token_ids" is vLLM's
        body |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "return_tokens_as_token_ids": True}
        body |= {} if seed is None else {"seed": seed}
        body |= {} if stop is None else {"stop": [stop]}
        choice = self._ask("/completions", body)["choices"][0]
        text, tokens, found = choice.get("text") or "", *self._tokens(choice.get("logprobs"))
        named = tokens is not None
        if tokens is None:
            tokens = self.tokenizer(text, add_special_tokens=False).input_ids
        if logprobs and found is None:
            raise NotOffered("its answers have no log probabilities")
        return Sampled(text, tokens, found, named)

    def json_object(self, request: str, schema: Mapping[str, Any], seed: int) -> str | None:
        """As `Subject.json_object`: the answer to a request, by a schema, with a seed."""
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        body = {"model": self.model, "messages": [{"role": "user", "content": request}], "response_format": form}
        body |= {"max_tokens": 200, "temperature": 1.0, "seed": seed}
        choice = self._ask("/chat/completions", body)["choices"][0]
        return None if choice.get("finish_reason") == "length" else choice["message"]["content"] or ""

    def _tokens(self, about: Any) -> tuple[list[int] | None, list[float] | None]:
        """Tokens and log probabilities of an answer; None where it has none that can be read."""
        if not about:
            return None, None
        if about.get("content"):  # one object for each token, as in answers of chats and of llama.cpp
            entries = about["content"]
            tokens = [entry.get("id") for entry in entries]
            found = [entry.get("logprob") for entry in entries]
            return (None if None in tokens else tokens), (None if None in found else found)
        shown, found = about.get("tokens"), about.get("token_logprobs")
        if not shown:
            return None, found
        return self._by_name(shown), found

    def _by_name(self, shown: Sequence[str]) -> list[int] | None:
        """The ids of tokens that are shown as `token_id:N` or as text; None if a text is that of no token or of several."""
        if all(str(one).startswith("token_id:") for one in shown):
            return [int(str(one).removeprefix("token_id:")) for one in shown]
        if self._ids is None:
            self._ids = {}
            for token in range(len(self.tokenizer)):
                self._ids.setdefault(decoded(self.tokenizer, [token]), []).append(token)
        found = [self._ids.get(str(one), []) for one in shown]
        return [ids[0] for ids in found] if all(len(ids) == 1 for ids in found) else None

    def _ask(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip()[:200]
            raise NotOffered(f"{path} answered {error.code}: {said}") from error
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            raise ConnectionError(f"url: {self.url}{path} cannot be asked ({error}); is the server running?") from error


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
