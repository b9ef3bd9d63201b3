"""What a request may contain: the fields of both endpoints, their types and ranges, and a sentence for everything else.

Knows JSON; nothing of HTTP or of models.
"""

from __future__ import annotations

import json
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_Kind = type | tuple[type, ...]
_BOTH: dict[str, _Kind] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_k", "seed", "draft_length", "n"), int),
    **{"stream": bool, "stop": (str, list), "stream_options": dict, "response_format": dict},
    **dict.fromkeys(("model", "draft"), str),
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), str),  # names for the asker's own use
    "metadata": dict,
}
_FIELDS: dict[str, dict[str, _Kind]] = {
    CHAT: _BOTH
    | {"messages": list, "tools": list, "chat_template_kwargs": dict, "logprobs": bool, "top_logprobs": int}
    | {"parallel_tool_calls": bool},
    TEXT: _BOTH | {"prompt": (str, list), "logprobs": int, "return_tokens_as_token_ids": bool},
}
"""What may be asked for, and the types."""
_RANGES: dict[str, tuple[int, int]] = {
    **{"temperature": (0, 1000), "top_p": (0, 1), "min_p": (0, 1), "top_k": (-1, 2**31 - 1)},
    **{"draft_length": (1, 2**31 - 1), "seed": (-(2**63), 2**64 - 1), "n": (1, 16)},
    **dict.fromkeys(("logprobs", "top_logprobs"), (0, 20)),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "top_logprobs", "priority"), (0,)),
    **dict.fromkeys(("best_of", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("echo", "store", "logprobs", "use_beam_search", "ignore_eos"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "parallel_tool_calls"), (True,)),
    **dict.fromkeys(("tools", "functions", "stop_token_ids"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **{"suffix": ("",), "modalities": (["text"],), "response_format": ({"type": "text"},)},
    **{"tool_choice": ("auto", "none"), "service_tier": ("auto", "default")},
}
"""Values that ask for nothing. What has no other value here, and no type above, is not supported."""
_STOPS, _STOP = 16, 256  # stop strings, and characters of each: `generate` compares every one with the whole vocabulary
_MESSAGES = 'messages: give a list of {"role": ..., "content": ...} with texts'


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


def checked(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields that ask for something. Raises Refused for one that a path does not know, or whose value has not its type or
    is out of its range."""
    return {name: value for name, value in body.items() if _asks(name, value, path)}


def _asks(name: str, value: Any, path: str) -> bool:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{name[:60]}: it has half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise Refused(f"{name[:60]}: it is nested too deeply") from error
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in _NEUTRAL.get(name, ())):
        return name == "tool_choice"  # "none" takes the tools away
    if name == {CHAT: "prompt", TEXT: "messages"}[path]:
        raise Refused(f"{name}: {path} does not take it; ask {TEXT if path == CHAT else CHAT}, or leave it out")
    if name not in _FIELDS[path]:
        known = _NEUTRAL.get(name, ())
        raise Refused(
            f"{name[:60]}: {shown(value)} is not supported; leave it out"
            + (f", or give {' or '.join(map(shown, known))}" if known else "")
        )
    kinds: Any = _FIELDS[path][name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise Refused(f"{name}: {shown(value)} is of a type that it cannot have")
    least, most = _RANGES.get(name, (0, 0))
    if name in _RANGES and not least <= value <= most:
        raise Refused(f"{name}: {shown(value)} is not possible; give {least} to {most}")
    if name == "stream_options" and not all(isinstance(one, bool) for one in value.values()):
        raise Refused(f'{name}: {shown(value)} is not supported; give {{"include_usage": true}}')
    return True


def stops(value: str | list[Any]) -> list[str]:
    """Stop strings as a list. Raises Refused for others than texts, and for too many or too long ones."""
    found = [value] if isinstance(value, str) else value
    if len(found) > _STOPS or not all(isinstance(one, str) and 0 < len(one) <= _STOP for one in found):
        raise Refused(f"stop: give a text, or a list of at most {_STOPS} texts, of 1 to {_STOP} characters each")
    return found


def messages(value: list[Any]) -> list[dict[str, Any]]:
    """The messages of a chat, as chat templates take them, without what is null or empty in them.

    Parts of text become one text, a line each. Raises Refused for any without role and content, and for all that is not text.
    """
    if not value:
        raise Refused(_MESSAGES)
    return [_message(one) for one in value]


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refused(_MESSAGES)
    found = {key: part for key, part in given.items() if part is not None and part != []}
    calls = found.pop("tool_calls", None)
    if calls is not None and found.get("role") != "assistant":
        raise Refused("messages: only those of an assistant have tool_calls")
    if isinstance(found.get("content"), list):
        for part in found["content"]:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = shown(part.get("type")) if isinstance(part, dict) else "another kind"
                raise Refused(f'messages: a part of {kind} is not supported; give {{"type": "text", "text": ...}}')
        found["content"] = "\n".join(part["text"] for part in found["content"])
    if found.get("role") == "assistant":
        found.setdefault("content", "")
    if found.get("role") == "developer":  # a newer name, which few templates know
        found["role"] = "system"
    if not {"role", "content"} <= found.keys() or not all(isinstance(part, str) for part in found.values()):
        raise Refused(_MESSAGES)
    return found if calls is None else {**found, "tool_calls": _calls(calls)}


def _calls(given: Any) -> list[dict[str, Any]]:
    """The calls in an assistant's message. Templates take the arguments as an object, and the protocol has them as JSON."""
    try:
        calls = []
        for one in given:
            arguments = one["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(one["function"]["name"], str) or not isinstance(arguments, dict):
                raise TypeError
            calls.append({**one, "function": {"name": one["function"]["name"], "arguments": arguments}})
        return calls
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        wanted = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
        raise Refused(f"messages: the tool_calls of an assistant are a list of {wanted}") from error


def tools(value: list[Any]) -> list[dict[str, Any]]:
    """Tools that a model may call. Raises Refused for others than functions."""
    for one in value:
        function = one.get("function") if isinstance(one, dict) and one.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wanted = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise Refused(f"tools: {shown(one)} is not supported; give {wanted}")
    return value


def schema(value: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema that a `response_format` asks for. Raises Refused for another format."""
    if value == {"type": "json_object"}:
        return {"type": "object"}
    about = value.get("json_schema")
    if value.get("type") == "json_schema" and isinstance(about, dict) and isinstance(about.get("schema"), dict):
        return about["schema"]
    wanted = '{"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
    raise Refused(f"response_format: {shown(value)} is not supported; give {wanted}")


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value)[:60]


def _number(digits: str) -> int | float:
    """Of JSON. Python does not read integers of thousands of digits, and no field takes them."""
    return int(digits) if len(digits) < 40 else float(digits)
