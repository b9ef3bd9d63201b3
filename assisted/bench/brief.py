"""The protocol in half a minute, for the demo: one kind of prompts, one mode of plain decoding, few contestants.

Knows the parts of the protocol; which of them are left out is said here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ..modeling import AssistedModelForCausalLM
from . import contestants as who
from . import prompts as texts
from .contestants import of_model
from .measure import pad_token, quickest, transformers_assisted
from .protocol import Rules, race
from .results import Point, Result, machine, summed_up

__all__ = ["brief"]


def brief(
    pair: AssistedModelForCausalLM,
    prompts: int = 5,
    new_tokens: int = 48,
    repeats: int = 5,
    seconds: float = 36.0,
    progress: Callable[[str, float], None] = lambda what, share: None,
    also: Mapping[str, AssistedModelForCausalLM] | None = None,
) -> Result:
    """Decode held-out code at temperature 0: plainly, by transformers' own drafting, and by the pair.

    Against `measure`: plain `generate` takes part in its usual mode alone, not compiled; transformers drafts with the same
    model, or where there is none from the prompt; nothing is streamed.

    Args:
        pair: with its tokenizer.
        prompts: functions to complete.
        new_tokens: of each.
        repeats: timed rounds, at most.
        seconds: for everything: no timed round begins that would end later. One is always made.
        progress: told what is being done, and the share of it that is done.
        also: further pairs of the same target, by the name of their row.

    Raises ValueError where there are not enough prompts, ModuleNotFoundError without the held-out text.
    """
    started = time.perf_counter()
    rules = Rules(new_tokens, repeats, seconds=seconds)
    pad = pad_token(pair.tokenizer)
    found = texts.read(["code"], pair.tokenizer, prompts)
    batches = texts.batches(found)
    plain = who.plain(pair.target, compiled=False)
    tried = transformers_assisted(pair) or who.lookups(pair.target)
    best, heat = quickest(pair, plain[0], tried, batches, rules, progress)
    own = [of_model("assisted", pair), *(of_model(name, model) for name, model in (also or {}).items())]
    left = Rules(new_tokens, repeats, seconds=seconds - (time.perf_counter() - started))
    measured = race(pair.target, [*plain, *best, *own], batches, left, pad, progress)
    baseline, rows = summed_up(measured, batches, greedy=True)
    about = machine(pair.target.device, pair.target.dtype)
    name = pair.target.name_or_path
    return Result(name, None, rules, texts.sources(found), (Point(1, None, baseline, rows, heat),), about)
