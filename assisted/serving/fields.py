"""What a request may contain: the fields of both endpoints, their types and ranges, and a sentence for everything else.

Knows JSON; nothing of HTTP or of models.
"""

from __future__ import annotations

import json
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_k", "seed", "logprobs", "draft_length"), int),
    **dict.fromkeys(("stream", "return_tokens_as_token_ids"), bool),
    **dict.fromkeys(("model", "draft", "user"), str),
    **{"messages": list, "prompt": (str, list), "stop": (str, list), "stream_options": dict},
}
"""What may be asked for, and the types."""
_RANGES: dict[str, tuple[int, int]] = {
    **{"temperature": (0, 1000), "top_p": (0, 1), "min_p": (0, 1), "top_k": (-1, 2**31 - 1)},
    **{"draft_length": (1, 2**31 - 1), "seed": (-(2**63), 2**64 - 1)},
}
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("n", "best_of", "repetition_penalty"), 1),
    **{"logit_bias": {}, "tools": [], "echo": False, "store": False, "response_format": {"type": "text"}},
}
"""What may not, unless it asks for nothing."""
_STOPS, _STOP = 16, 256  # stop strings, and characters of each: `generate` compares every one with the whole vocabulary


class Refused(ValueError):
    """A request that cannot be answered. message: for the client. status: of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def read(data: bytes) -> dict[str, Any]:
    """The fields of a request, without those that are null. Raises Refused if it is not a JSON object."""
    try:
        body = json.loads(data, parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise Refused(f"body: it is not JSON ({error})") from error
    if not isinstance(body, dict):
        raise Refused("body: a JSON object is expected")
    return {name: value for name, value in body.items() if value is not None}


def require(name: str, value: Any, path: str) -> None:
    """Raise Refused for a field that a path does not know, or whose value has not its type or is out of its range."""
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{name[:60]}: it has half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise Refused(f"{name[:60]}: it is nested too deeply") from error
    if name == {CHAT: "prompt", TEXT: "messages"}[path]:
        raise Refused(f"{name}: {path} does not take it; ask {TEXT if path == CHAT else CHAT}, or leave it out")
    if name not in _FIELDS:
        neutral = _NEUTRAL.get(name)
        if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
            raise Refused(f"{name[:60]}: {shown(value)} is not supported; leave it out")
        return
    kinds: Any = _FIELDS[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise Refused(f"{name}: {shown(value)} is of a type that it cannot have")
    least, most = _RANGES.get(name, (0, 0))
    if name in _RANGES and not least <= value <= most:
        raise Refused(f"{name}: {shown(value)} is not possible; give {least} to {most}")
    if name == "stream_options" and not all(isinstance(one, bool) for one in value.values()):
        raise Refused(f'{name}: {shown(value)} is not supported; give {{"include_usage": true}}')


def stops(value: str | list[Any]) -> list[str]:
    """Stop strings as a list. Raises Refused for others than texts, and for too many or too long ones."""
    found = [value] if isinstance(value, str) else value
    if len(found) > _STOPS or not all(isinstance(one, str) and 0 < len(one) <= _STOP for one in found):
        raise Refused(f"stop: give a text, or a list of at most {_STOPS} texts, of 1 to {_STOP} characters each")
    return found


def messages(value: list[Any]) -> list[dict[str, str]]:
    """The messages of a chat, without what is null in them. Raises Refused for any without role and content, and for all that
    is not text."""
    found = [{key: part for key, part in one.items() if part is not None} for one in value if isinstance(one, dict)]
    texts = all(isinstance(part, str) for one in found for part in one.values())
    if not found or len(found) < len(value) or not texts or not all({"role", "content"} <= one.keys() for one in found):
        raise Refused('messages: give a list of {"role": ..., "content": ...} with texts')
    return found


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value)[:60]


def _number(digits: str) -> int | float:
    """Of JSON. Python does not read integers of thousands of digits, and no field takes them."""
    return int(digits) if len(digits) < 40 else float(digits)
