"""The race: all methods decode the same prompts to the same length, in turns, warmed up and repeated.

Notes what a call took, what it wrote and how many forward passes it needed; results.py sums that up.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ...core.drafts import DraftingStopped
from ...core.host import now, timed
from ...core.report import Report
from ...distribution import require_seed, require_temperature
from ...engine.traits import Traits
from .clock import FirstToken, Progress, silent, turns
from .methods import Method
from .prompts import Batch


@dataclass(frozen=True)
class Rules:
    """What is the same for everybody.

    Args:
        new_tokens: of every row; end tokens are ignored.
        repeats: timed repeats over all prompts; one untimed repeat goes before.
        temperature: 0 takes the top-1 token; above 0, tokens are sampled from the whole vocabulary, without top-k.
        top_p: the nucleus to sample from.
        seed: of the sampling. Every method gets the same seed at the same prompt; every repeat has another one.
        seconds: a timed repeat begins only if it would end this long after the start; one is always made. None: no limit.
    """

    new_tokens: int = 48
    repeats: int = 3
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is nothing to measure; give 1 or more")
        require_temperature(self.temperature)
        require_seed(self.seed, 32)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is no probability; give more than 0 and at most 1")
        if self.temperature == 0 and self.top_p < 1:
            raise ValueError("top_p: has no effect at temperature 0; give a temperature as well")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def call(self, pad: int) -> dict[str, Any]:
        """The keywords of every `generate`."""
        sampling: dict[str, Any] = {"do_sample": False}
        if not self.greedy:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {"max_new_tokens": self.new_tokens, "eos_token_id": None, "pad_token_id": pad, **sampling}


@dataclass
class Measured:
    """What was measured of one method.

    Args:
        method: who.
        seconds: [R, N] of R timed repeats over N batches.
        tokens: new tokens of every row, batch by batch, as written in the first timed repeat.
        passes: the target's forward passes times their rows, those over the prompts included. A hook counts them in the repeat
            that warms up. None where nothing was counted.
        drafted: tokens that these forward passes checked.
        first_token, all_tokens: seconds until a streamer got the first token, and the end, batch by batch, in repeats of their
            own.
        working_bytes: the most that a call allocated on top of what was allocated before; None where unknown.
        report: the package's own, over all timed repeats.
        largest_gap: as of `Row`.
        warned: a warning, such as that a drafter failed and the rest was decoded without it.
        error: why it failed; all else is then empty.
    """

    method: Method
    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    passes: int | None = None
    drafted: int = 0
    first_token: list[float] = field(default_factory=list)
    all_tokens: list[float] = field(default_factory=list)
    working_bytes: int | None = None
    report: Report | None = None
    largest_gap: float | None = None
    warned: str | None = None
    error: str | None = None

    @property
    def typical(self) -> float:
        """Seconds over all batches, the median over repeats."""
        return median(map(sum, self.seconds))


def race(
    target: PreTrainedModel,
    methods: Sequence[Method],
    batches: Sequence[Batch],
    rules: Rules,
    pad: int = 0,
    progress: Progress = silent,
) -> list[Measured]:
    """Let all methods decode all batches in turns. One that raises is out, with its error; the others continue.

    Forward passes are counted in one repeat, which also warms up. Methods that are not counted warm up with the longest
    prompt of each category. The other repeats are timed.

    Args:
        target: whose forward passes are counted, and whose device is waited for.
        rules: tokens, repeats, temperature.
        pad: the token that pads rows.
        progress: called with what is being done and the share of it that is done, in [0, 1].

    Raises ValueError for a batch that the target's context has no room for.
    """
    started = now()
    runner = _Runner(target, rules, pad, batches)
    entries = [Measured(method) for method in methods]
    with _quiet():
        for done, one in enumerate(entries, 1):
            _unless_out(one, runner.warm_up)
            progress("warming up", done / len(entries))
        gc.collect()
        running = _running(entries)
        for one in running:
            if one.method.model is not None:
                one.method.model.reset_totals()
        seconds = None if rules.seconds is None else rules.seconds - (now() - started)
        measuring = partial(progress, "measuring")
        for one, number, repeat in turns(running, len(batches), rules.repeats, seconds, measuring):
            _unless_out(one, runner.timed, number, repeat)
    for one in _running(entries):
        if one.method.model is not None:
            one.report = one.method.model.totals
    return entries


def stream(
    target: PreTrainedModel,
    entries: Sequence[Measured],
    batches: Sequence[Batch],
    rules: Rules,
    pad: int = 0,
    progress: Progress = silent,
    repeats: int = 1,
) -> None:
    """Let those that got through a race decode again, and note when the first token comes and how much memory is allocated.

    entries: what `race` returned; the figures are added to them. repeats: over all batches. target, batches, rules, pad,
    progress: as for `race`.
    """
    runner = _Runner(target, rules, pad, batches)
    with _quiet():
        for one, number, _ in turns(_running(entries), len(batches), repeats, None, partial(progress, "first tokens")):
            _unless_out(one, runner.stream, number)


def require_room(target: PreTrainedModel, longest: int, rules: Rules) -> None:
    """Raises ValueError if a prompt of `longest` tokens and the new tokens do not fit into the target's context."""
    room = Traits.of(target).context
    if longest + rules.new_tokens > room:
        raise ValueError(
            f"context: prompts of up to {longest} tokens and {rules.new_tokens} new ones do not fit into the target's "
            f"context of {room}"
        )


def gave_up(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """The warnings, among those caught, of drafters that failed."""
    return [str(one.message) for one in caught if issubclass(one.category, DraftingStopped)]


class _Runner:
    """Calls methods with batches on the target's device."""

    def __init__(self, target: PreTrainedModel, rules: Rules, pad: int, batches: Sequence[Batch]):
        self.target = target
        self.rules = rules
        self.batches = [batch.to(target.device) for batch in batches]
        self.call = rules.call(pad)
        require_room(target, max(batch.ids.shape[1] for batch in batches), rules)

    def warm_up(self, one: Measured) -> None:
        """A repeat that counts forward passes, with a hook. The hook disables the fast paths of pairs, so they and those that
        are not counted warm up without it."""
        # an order in which static caches are long enough for all
        longest = sorted(range(len(self.batches)), key=lambda number: -self.batches[number].ids.shape[1])
        of_each = {self.batches[number].category: number for number in reversed(longest)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if one.method.counted:
                counter = _Counter()
                with self.target.register_forward_pre_hook(counter, with_kwargs=True):
                    for number in longest:
                        counter.begin(self.batches[number].ids.shape[1])
                        self.untimed(one, number)
                one.passes, one.drafted = counter.passes, counter.drafted
            if one.method.model is not None or not one.method.counted:
                for number in longest:
                    if number in of_each.values():
                        self.untimed(one, number)
        one.warned = next(iter(gave_up(caught)), None)

    def untimed(self, one: Measured, number: int) -> None:
        wrote = {len(row) for row in self.run(one, number, seed=number)}
        if wrote != {self.rules.new_tokens}:
            raise ValueError(f"wrote {min(wrote)} tokens where {self.rules.new_tokens} were asked for")

    def timed(self, one: Measured, number: int, repeat: int) -> None:
        seed = 1000 * (repeat + 1) + number
        rows, took = timed(lambda: self.run(one, number, seed), self.target.device)
        if number == 0:
            one.seconds.append([])
        one.seconds[-1].append(took)
        if repeat == 0:
            one.tokens += rows

    def stream(self, one: Measured, number: int) -> None:
        """With a streamer; on CUDA, the allocated memory is noted as well."""
        device = self.target.device
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        streamer = FirstToken(device)
        self.run(one, number, seed=number, streamer=streamer)
        one.first_token.append(streamer.seconds)
        one.all_tokens.append(streamer.total)
        if device.type == "cuda":
            one.working_bytes = max(torch.cuda.max_memory_allocated(device) - before, one.working_bytes or 0)

    def run(self, one: Measured, number: int, seed: int, **more: Any) -> list[list[int]]:
        """New tokens, row by row."""
        batch = self.batches[number]
        torch.manual_seed(self.rules.seed + seed)
        output = one.method.generate(batch.ids, attention_mask=batch.attention_mask, **self.call, **more)
        return output[:, batch.ids.shape[1] :].tolist()


class _Counter:
    """A hook on the target's forward that counts passes over rows and the drafted tokens in them."""

    def __init__(self) -> None:
        self.passes = self.drafted = self.known = 0

    def begin(self, prompt: int) -> None:
        """The next forward pass reads a prompt of so many tokens; every later one begins with the last committed token."""
        self.known = prompt

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows, width = kwargs["input_ids"].shape
        self.passes += rows
        self.drafted += rows * (width - self.known)
        self.known = 1


def _running(entries: Sequence[Measured]) -> list[Measured]:
    return [one for one in entries if one.error is None]


def _unless_out(one: Measured, step: Callable[..., None], *args: Any) -> None:
    """Run a step of a method that has not failed before. If it raises, the method is out."""
    if one.error is not None:
        return
    try:
        step(one, *args)
    except Exception as error:  # code of other projects may raise anything; the others continue
        line = next(iter(str(error).strip().splitlines()), "")
        one.error = f"{type(error).__name__}: {line}".removesuffix(": ")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings about ignored flags and about its own calls."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
