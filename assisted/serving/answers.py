"""Requests answered by pairs of one target: prompts, settings of `generate`, pieces of text, tool calls, log probabilities.

Knows `generate` and `fields`; nothing of HTTP. Requests run one at a time (`line`), or as rows of a batch (`together`).
"""

from __future__ import annotations

import inspect
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from ..core.host import now
from ..core.report import Recorder, Report
from ..extras import install
from ..grammars import GrammarProcessor
from ..lengths.policies import Never
from ..many.rows import CHUNK
from ..modeling import AssistedModelForCausalLM
from . import fields
from .fields import CHAT, TEXT, Refused
from .line import Line, Place, require_client
from .metrics import Metrics
from .together import Together, Until, in_row

NO_DRAFT = "none"
_CALL, _CALL_ENDS = "<tool_call>", "</tool_call>"  # Hermes' and Qwen's, with JSON between them
_SPACES = {"whitespace_pattern": r"[\x20\n\r\t]{0,32}"}  # JSON allows any number, and a model may repeat them
_OF_THE_TEMPLATE = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_SUMS = (
    "new_tokens",
    "target_passes",
    "drafted",
    "accepted",
    "seconds",
    "draft_seconds",
    "verify_seconds",
    "prompt_seconds",
)
Show = Callable[[int, str], None]


class Pieces:
    """The text of one row so far, in pieces that stay: no half of a character, and nothing that may begin a stop string.

    Args:
        tokenizer: the target's.
        stop: texts at which the answer ends.
        show: called with each new piece; None shows nothing.
        ends: end tokens, after which nothing follows but padding.
        held: what begins with this text is not shown.

    Attributes:
        ids: the tokens. text: all of it, once it has ended. shown: what was shown.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: list[str],
        show: Callable[[str], None] | None,
        ends: frozenset[int] = frozenset(),
        held: str = "",
    ):
        self.tokenizer, self.stop, self.show, self.ends, self.held = tokenizer, stop, show, ends, held
        self.ids: list[int] = []
        self.text = self.shown = ""
        self.stopped = False

    def add(self, tokens: list[int]) -> None:
        """Take further tokens."""
        for token in tokens:
            if self.ids and self.ids[-1] in self.ends:
                return
            self.ids.append(token)
        if self.show is not None and not self.stopped:
            self._emit(last=False)

    def end(self) -> None:
        """The text ends."""
        self._emit(last=True)

    @property
    def ended(self) -> bool:
        """Whether an end token or a stop string has come."""
        return not self.ends.isdisjoint(self.ids[-1:]) or any(one in self._decoded() for one in self.stop)

    def rest(self) -> str:
        """What was held back."""
        return self.text[len(self.shown) :]

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _emit(self, last: bool) -> None:
        text = self._decoded()
        places = [place for one in self.stop if (place := text.find(one)) >= 0]
        self.stopped = bool(places)
        self.text = text = text[: min(places, default=None)]
        if self.held and (place := text.find(self.held)) >= 0:
            text = text[:place]
        elif not last and not self.stopped:
            text = text.rstrip("\ufffd")
            marks = [*self.stop, self.held]
            begun = [size for one in marks for size in range(1, len(one)) if text.endswith(one[:size])]
            text = text[: len(text) - max(begun, default=0)]
        if text.startswith(self.shown) and len(text) > len(self.shown):
            if self.show is not None:
                self.show(text[len(self.shown) :])
            self.shown = text


class Rows(BaseStreamer):
    """The streamer of a call: its rows, and whether anybody waits for them.

    rows: a `Pieces` for each. left: set once nobody waits for the answer, which ends the call.

    Attributes:
        first: when the first token came, by `time.monotonic`.
    """

    def __init__(self, rows: list[Pieces], left: threading.Event | None = None):
        self.rows, self.left = rows, left
        self.reads, self.first = True, 0.0

    def put(self, value: torch.Tensor) -> None:
        """Take a further token of each row, [n] int64, or several of the only one; the first ones are the prompts."""
        require_client(self.left)
        if not self.reads:
            tokens = value.flatten().tolist()
            self.add([tokens] if len(self.rows) == 1 else [[one] for one in tokens])
        self.reads = False

    def add(self, tokens: list[list[int]]) -> None:
        """Take further tokens of each row."""
        self.first = self.first or time.monotonic()
        for row, new in zip(self.rows, tokens, strict=True):
            row.add(new)

    def end(self) -> None:
        """A call is over; the texts may go on in rows of a batch."""


class Answers:
    """What answers requests.

    Args:
        pairs: of one target, by the names of their drafts, the default first. "none" is added, which drafts nothing.
        name: of the model, for requests.
        queue, waits_for: how many requests may wait for their turn, and for how many seconds.
        rows, chunk: how many requests are answered together, and of how many tokens their prompts are read at a time.

    Attributes:
        logits_bytes: that the logits of an answer may take until it ends, and its log probabilities are computed.

    Raises ValueError if there is no pair, or no tokenizer.
    """

    logits_bytes = 2**30

    def __init__(
        self,
        pairs: Mapping[str, AssistedModelForCausalLM],
        name: str,
        queue: int,
        waits_for: float,
        rows: int = 1,
        chunk: int = CHUNK,
    ):
        if not pairs:
            raise ValueError("pairs: there are none; give at least one, by the name of its draft")
        first = next(iter(pairs.values()))
        self.pairs, self.name = {**pairs, NO_DRAFT: pairs.get(NO_DRAFT, first)}, name
        self.tokenizer: Any = first.tokenizer
        if self.tokenizer is None:
            raise ValueError("pairs: they have no tokenizer, and requests are text; pass tokenizer= when making a pair")
        config = first.target.config.get_text_config(decoder=True)
        self.context = getattr(config, "max_position_embeddings", 2**20)
        self.ids = range(min(len(self.tokenizer), len(first.target.get_input_embeddings().weight)))
        self.vocabulary = config.vocab_size
        ends = first.generation_config.eos_token_id
        self.ends = frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])
        self.line, self.metrics = Line(queue, waits_for), Metrics(name)
        self.together = Together(self.line, rows, chunk)
        self._library: Any = None  # of grammars, with the tokenizer as it wants it

    def write(
        self, body: dict[str, Any], is_chat: bool, show: Show | None = None, left: threading.Event | None = None
    ) -> dict[str, Any]:
        """Answer a request: `choices`, `usage` and `report`. A choice has `text`, `tool_calls`, `finish_reason`, `logprobs`.

        body: the request. is_chat: it is one of a chat. show: called with the number of a choice and a piece of its text, which
        are all but the `rest` of each choice. left: set once nobody waits.

        Raises ValueError for a request that cannot be answered, and ConnectionAbortedError if `left` is set.
        """
        arrived = time.monotonic()
        body = fields.checked(body, CHAT if is_chat else TEXT)
        draft = body.get("draft", next(iter(self.pairs)))
        if draft not in self.pairs:
            raise Refused(f"draft: {fields.shown(draft)} was not loaded; there are {', '.join(map(repr, self.pairs))}")
        if body.get("model", self.name) != self.name:
            raise Refused(f"model: {fields.shown(body['model'])} is not here; ask for {self.name!r}", 404)
        stop, count = fields.stops(body.get("stop", [])), body.get("n", 1)
        tools = fields.tools(body.get("tools", [])) if body.get("tool_choice") != "none" else []
        ids = self._ids(body, is_chat, tools)
        call = self._sampling(body) | {"max_new_tokens": self._room(body, len(ids))}
        call |= {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        top = self._top(body, is_chat, count * call["max_new_tokens"])
        call |= {} if top is None else {"return_dict_in_generate": True, "output_logits": True}
        call["draft_length"] = Never() if draft == NO_DRAFT else body.get("draft_length")
        if "response_format" in body:
            call["logits_processor"] = [self.grammar(fields.schema(body["response_format"]))]
        held = _CALL if tools and _CALL in self.tokenizer.get_chat_template() else ""

        def pieces(number: int) -> Pieces:
            shows = None if show is None else lambda piece: show(number, piece)
            return Pieces(self.tokenizer, stop, shows, self.ends, held)

        rows, pair = Rows([pieces(number) for number in range(count)], left), self.pairs[draft]
        why = self._why_alone(body, count)
        seed, counted, before = body.get("seed"), Recorder(), list[Any]()

        def asked(generation: Any) -> Any:
            counted.started = now()
            rest = call | {"max_new_tokens": call["max_new_tokens"] - len(rows.rows[0].ids)}
            about = {"new": lambda new: rows.add([new]), "left": lambda: left is not None and left.is_set()}
            for grammar in rest.get("logits_processor", ()):
                grammar.reset()
            written = list(rows.rows[0].ids)
            return in_row(generation, ids + written, rest, seed, counted, written=len(written), **about)

        key = (draft, repr(call["draft_length"])) if why is None else None
        place, queued = Place(key, asked), time.monotonic()
        output: Any = None
        with self.line.turn(left, place):
            self.metrics.observe("vllm:request_queue_time_seconds", time.monotonic() - queued)
            if key is not None and not place.joined:
                why = self.together.why_alone(key, pair, ids, call)
            if not place.joined and (why is not None or not self._starts_together(key, body, call)):
                until = None if why is not None else Until(lambda: self.line.has_next(key))
                output = self._alone(pair, [ids] * count, rows, call, body, until)
                before.append(pair.report)
                goes_on = until is not None and until.stopped and len(rows.rows[0].ids) < call["max_new_tokens"]
            else:
                goes_on = True
            if goes_on and not place.joined and not rows.rows[0].ended:
                self.together.begin(key, place, pair, ids, call)
        if place.joined:
            place.wait(left)
        for made in rows.rows:
            made.end()
        report = _sum(*before, *([counted.report()] if place.joined else []))
        way = "rows" if place.joined else "alone"
        self.metrics.add("assisted:answers_total", 1, f'way="{way}"')
        several = body.get("parallel_tool_calls", True)
        choices = [self._choice(one, call["max_new_tokens"], held, several) for one in rows.rows]
        if top is not None:
            for number, (one, made) in enumerate(zip(choices, rows.rows, strict=True)):
                logits = (step[number] for step in output.logits)
                chosen = [_likely(row, token, top) for row, token in zip(logits, made.ids, strict=False)]
                one["logprobs"] = self._in_chat(chosen, top) if is_chat else self._in_text(chosen, body)
        new = sum(len(one.ids) for one in rows.rows)
        usage = {"prompt_tokens": len(ids), "completion_tokens": new, "total_tokens": len(ids) + new}
        found = {"usage": usage | {"prompt_tokens_details": {"cached_tokens": report.cached_tokens}}}
        self.metrics.observe("vllm:time_to_first_token_seconds", rows.first - arrived)
        self.metrics.observe("vllm:e2e_request_latency_seconds", time.monotonic() - arrived)
        self.metrics.answered(usage, report.to_dict(), [one["finish_reason"] for one in choices])
        about = {"draft": draft, "ran": way if way == "rows" or why is None else f"alone: {why}"}
        return {"choices": choices, **found, "report": report.to_dict() | about}

    def _why_alone(self, body: dict[str, Any], count: int) -> str | None:
        """Why a request has to be answered alone, as far as its fields tell."""
        if self.together.rows == 1:
            return "the server has one row"
        return "it has logprobs" if "logprobs" in body else f"n is {count}" if count > 1 else None

    def _starts_together(self, key: Any, body: dict[str, Any], call: dict[str, Any]) -> bool:
        """Whether a request begins in a row: others wait for it, or its seed must give the same text beside others."""
        return self.line.has_next(key) or ("seed" in body and call["do_sample"])

    def _alone(
        self,
        pair: Any,
        ids: list[list[int]],
        rows: Rows,
        call: dict[str, Any],
        body: dict[str, Any],
        until: Until | None,
    ) -> Any:
        given = torch.tensor(ids, device=pair.device)
        if "seed" in body:
            torch.manual_seed(body["seed"])
        ends = {} if until is None else {"stopping_criteria": [until]}
        return pair.generate(given, attention_mask=torch.ones_like(given), streamer=rows, **call, **ends)

    def _choice(self, row: Pieces, most: int, held: str, several: bool) -> dict[str, Any]:
        """One text of an answer. several: it may have more than one call of a tool."""
        ended = row.stopped or len(row.ids) < most or not self.ends.isdisjoint(row.ids[-1:])
        calls = parsed(row.text[len(row.shown) :]) if held and row.text != row.shown else []
        found: dict[str, Any] = {"text": row.text, "rest": row.rest(), "logprobs": None}
        if calls:
            found |= {"text": row.shown, "rest": "", "tool_calls": calls if several else calls[:1]}
        return found | {"finish_reason": "tool_calls" if calls else "stop" if ended else "length"}

    def _ids(self, body: dict[str, Any], is_chat: bool, tools: list[Any]) -> list[int]:
        ids = body.get("prompt")
        if is_chat:
            ids = self._of_messages(body, tools)
        elif isinstance(ids, str):
            ids = self.tokenizer(ids).input_ids
        if not ids or not all(type(one) is int and one in self.ids for one in ids):
            raise Refused("prompt: give a text, or a list of token ids of one text")
        if len(ids) >= self.context:
            field = "messages" if is_chat else "prompt"
            raise Refused(f"{field}: {len(ids)} tokens leave no room for an answer; the context has {self.context}")
        return list(ids)

    def _of_messages(self, body: dict[str, Any], tools: list[Any]) -> list[int]:
        messages = fields.messages(body.get("messages", []))
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refused("messages: the model has no chat template; ask /v1/completions")
        options, template = body.get("chat_template_kwargs", {}), self.tokenizer.get_chat_template(tools=tools or None)
        for name in options:
            if name in _OF_THE_TEMPLATE or not re.search(rf"\b{re.escape(name)}\b", template):
                raise Refused(f"chat_template_kwargs: the model's chat template does not use {fields.shown(name)}")

        def rendered(**more: Any) -> Any:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more, **options)

        try:
            if tools and rendered(tools=tools, tokenize=False) == rendered(tokenize=False):
                raise Refused("tools: the model's chat template does not use them; leave them out")
            return list(rendered(tools=tools or None, return_dict=True).input_ids)
        except Refused:
            raise
        except Exception as error:  # a template raises what it wants
            raise Refused(f"messages: the chat template does not take them ({error})") from error

    def _room(self, body: dict[str, Any], width: int) -> int:
        room = self.context - width
        for name in ("max_tokens", "max_completion_tokens"):
            if not 1 <= body.get(name, 1) <= room:
                most = f"the context has {self.context}, and {width} of the prompt"
                raise Refused(f"{name}: {fields.shown(body[name])} is not possible; give 1 to {room}, since {most}")
        return body.get("max_completion_tokens", body.get("max_tokens", min(256, room)))

    def _sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        call: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
        call = {name: float(body.get(name, value)) for name, value in call.items()}
        if call["temperature"] == 0:
            return {"do_sample": False}
        return call | {"do_sample": True, "top_k": max(0, body.get("top_k", 0))}

    def _top(self, body: dict[str, Any], is_chat: bool, tokens: int) -> int | None:
        """How many of the likeliest tokens an answer lists at each place; None if it has no log probabilities."""
        if "logprobs" not in body:
            if "top_logprobs" in body:
                raise Refused("top_logprobs: they come with logprobs; give logprobs true as well")
            return None
        most = self.logits_bytes // (4 * self.vocabulary)
        if tokens > most:
            raise Refused(
                f"logprobs: of {tokens} tokens, they need too much memory; give a max_tokens of at most {most}"
            )
        return body.get("top_logprobs", 0) if is_chat else body["logprobs"]

    def grammar(self, schema: dict[str, Any]) -> GrammarProcessor:
        """A logits processor that allows the JSON of a schema only. Raises Refused for a schema that has none."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise Refused(f"response_format: JSON needs llguidance: {install('grammar')}") from error
        matcher: Any = llguidance.LLMatcher
        try:
            if self._library is None:
                ends = sorted(self.ends) or None
                self._library = llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=ends)
            grammar = matcher.grammar_from_json_schema(json.dumps({"x-guidance": _SPACES, **schema}))
            wrong = matcher.validate_grammar(grammar, self._library)
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            raise Refused(f"response_format: the JSON schema cannot be used ({wrong[:200]})")
        return GrammarProcessor(lambda: matcher(self._library, grammar))

    def _in_text(self, chosen: list[tuple[int, dict[int, float]]], body: dict[str, Any]) -> dict[str, Any]:
        """Log probabilities as /v1/completions has them."""
        names = body.get("return_tokens_as_token_ids", False)

        def named(token: int) -> str:
            return f"token_id:{token}" if names else self._text(token)

        tops = [{named(one): value for one, value in each.items()} for _, each in chosen] if body["logprobs"] else None
        values = [each[token] for token, each in chosen]
        return {"tokens": [named(token) for token, _ in chosen], "token_logprobs": values, "top_logprobs": tops}

    def _in_chat(self, chosen: list[tuple[int, dict[int, float]]], top: int) -> dict[str, Any]:
        """Log probabilities as chats have them."""

        def entry(token: int, value: float) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": value, "bytes": None if "\ufffd" in text else list(text.encode())}

        content = []
        for token, each in chosen:
            tops = [entry(one, value) for one, value in list(each.items())[:top]]
            content.append(entry(token, each[token]) | {"top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))


def _sum(first: Report, *others: Report) -> Report:
    """The report of a text that was begun alone and went on in a row."""
    for one in others:
        sums = {name: getattr(first, name) + getattr(one, name) for name in _SUMS}
        tokens = (sum(first.row_tokens) + sum(one.row_tokens),)
        warnings = tuple(dict.fromkeys((*first.warnings, *one.warnings)))
        first = replace(one, **sums, cached_tokens=first.cached_tokens, row_tokens=tokens, warnings=warnings)
    return first


def _likely(logits: torch.Tensor, token: int, top: int) -> tuple[int, dict[int, float]]:
    """A token, and the log probabilities of the `top` likeliest and of itself. logits: [V]."""
    values = logits.float().log_softmax(-1)
    best = values.topk(top)
    found = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return token, found | {token: float(values[token])}


def parsed(text: str) -> list[dict[str, Any]]:
    """The calls of tools in a text, as the protocol has them; none if it has anything else after the first one begins.

    Each is an object with `name` and `arguments` as JSON between <tool_call> and </tool_call>, as Hermes and Qwen write it
    (https://github.com/NousResearch/Hermes-Function-Calling); the last end may be missing.
    """
    calls, rest = [], text.strip()
    while rest:
        if not rest.startswith(_CALL):
            return []
        try:
            found, place = json.JSONDecoder().raw_decode(rest := rest[len(_CALL) :].lstrip())
        except (ValueError, RecursionError):
            return []
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return []
        arguments = found.get("arguments", {})
        if not isinstance(arguments, dict):
            return []
        function = {"name": found["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
        rest = rest[place:].strip()
        if rest and not rest.startswith(_CALL_ENDS):
            return []
        rest = rest.removeprefix(_CALL_ENDS).strip()
    return calls
