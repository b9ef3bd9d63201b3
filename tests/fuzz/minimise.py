"""A failing case, made smaller for as long as it fails: steps, arguments, rows and settings are left out one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .cases import Call, Case, Crowd, Edit
from .running import run

ONE_TOKEN = ("top_k", "top_p", "temperature")  # leave one token to sample: they go with do_sample

__all__ = ["kind_of", "minimised"]


def minimised(case: Case, kind: str, runs: int = 60) -> Case:
    """The smallest case found that fails alike, in at most so many runs. kind: `kind_of` its failure."""
    left = runs
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(case):
            if left <= 0:
                return case
            left -= 1
            if kind in map(kind_of, run(candidate).failures):
                case, smaller = candidate, True
                break
    return case


def kind_of(failure: str) -> str:
    """What failed, without what it was made of: an exception's name and place, or that tokens differ."""
    if "by the pair" in failure:
        return "tokens"
    return re.sub(r"\d+", "", failure.rpartition("raises ")[2] or failure)


def _smaller(case: Case) -> Iterator[Case]:
    for number in range(len(case.steps)):
        steps = case.steps[:number] + case.steps[number + 1 :]
        first = next((step for step in steps if not isinstance(step, Edit)), None)
        if isinstance(first, Crowd) or (first is not None and first.lengths[0]):
            yield replace(case, steps=steps)
    plainer = {"config": {}, "attention": None, "dtype": "float32", "packed": False, "fast": "eager", "weights": 0}
    plainer |= {"weights_as": "", "bits": False}
    for name, value in (plainer | {"draft_length": 4}).items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
    for number, step in enumerate(case.steps):
        if not isinstance(step, Edit):
            for other in _smaller_call(step) if isinstance(step, Call) else _smaller_crowd(step):
                yield replace(case, steps=(*case.steps[:number], other, *case.steps[number + 1 :]))


def _smaller_crowd(crowd: Crowd) -> Iterator[Crowd]:
    requests, count = crowd.requests, len(crowd.requests)
    for left in (
        requests[: count // 2],
        requests[count // 2 :],
        *(requests[:n] + requests[n + 1 :] for n in range(count)),
    ):
        if left and left != requests:
            yield replace(crowd, requests=left)
    if crowd.rows > 1:
        yield replace(crowd, rows=crowd.rows - 1)
    if crowd.pool:
        yield replace(crowd, pool=False)
    for number, one in enumerate(requests):
        others = [replace(one, call=call) for call in _smaller_call(one.call)]
        plain = {"shares": 0, "told": 0, "when": 0, "patience": 999}
        others += [replace(one, **{name: value}) for name, value in plain.items() if getattr(one, name) != value]
        for other in others:
            yield replace(crowd, requests=(*requests[:number], other, *requests[number + 1 :]))


def _smaller_call(call: Call) -> Iterator[Call]:
    for name in call.arguments:
        if name not in ("max_new_tokens", "pad_token_id", "use_cache", *ONE_TOKEN):
            left = {key: value for key, value in call.arguments.items() if key != name}
            if name == "do_sample":
                left = {key: value for key, value in left.items() if key not in ONE_TOKEN}
            yield replace(call, arguments=left)
    for row in range(len(call.lengths)):
        if len(call.lengths) > 1:
            yield replace(call, lengths=call.lengths[:row] + call.lengths[row + 1 :])
    if not call.continues and len(set(call.lengths)) > 1:
        yield replace(call, lengths=(max(call.lengths),) * len(call.lengths))
    if call.prompt != "random":
        yield replace(call, prompt="random")
    if call.hides:
        yield replace(call, hides=False)
    if call.narrow:
        yield replace(call, narrow=False)
    tokens = call.arguments.get("max_new_tokens", 0)
    if tokens > 4:
        yield replace(call, arguments=call.arguments | {"max_new_tokens": tokens // 2})
