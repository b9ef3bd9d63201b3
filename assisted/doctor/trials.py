"""The runs of `assisted doctor`: timed forward passes, recorded drafts, and a race against the autoregressive baseline.

Knows models and the clock. examine.py evaluates the results.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bench.clock import FirstToken, Progress, now, turns
from ..bench.contestants import plain
from ..bench.protocol import Rules
from ..drafters import ModelDrafter
from ..drafts import DraftingStopped
from ..engine.traits import Traits
from ..lengths.cost_model import COLUMN, Costs, Timings
from ..lengths.policies import Never
from ..modeling import AssistedModelForCausalLM
from .comparison import Comparison, Written, compare
from .diagnosis import Settings
from .forecast import Drafts, expect, marks, tree_columns
from .passes import PassTimes, pass_times
from .recording import Recorded, Step

__all__ = ["UNDRAFTED", "Found", "Race", "Trials", "starts", "way"]

COLUMNS = tuple(range(1, 17))
SOME_COLUMNS = (1, 2, 4, 8, 16)  # at longer contexts
CONTEXTS = (512, 2048)  # in addition to that of the prompts
UNDRAFTED = "assisted, no drafts"
CHECKED = 2  # the fewest prompts that are decoded: a single one does not show how much they differ
FOR_PASSES, FOR_RECORDS = 0.2, 0.35  # shares of the time; the rest is for the race
WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Found:
    """The result of a draft's recorded run."""

    draft: str
    model: AssistedModelForCausalLM
    drafts: Drafts
    best: int
    written: list[Written]
    rounds: list[list[Step]]
    comparison: Comparison | None
    prompt_seconds: float  # that the draft needs to read a prompt
    warned: str | None


@dataclass(frozen=True)
class Race:
    """The results of the measured runs, by way: time, time to the first token, and tokens of each call."""

    seconds: dict[str, list[float]]
    first: dict[str, list[float]]
    wrote: dict[str, list[list[int]]]
    plain_way: str

    @property
    def prompts(self) -> int:
        return len(self.seconds[self.plain_way])

    def per_token(self, way: str) -> float:
        """Seconds per token after the first one."""
        tokens = sum(len(new) - 1 for new in self.wrote[way])
        return (sum(self.seconds[way]) - sum(self.first[way])) / tokens


class Trials:
    """Runs the target and its drafts on the prompts."""

    def __init__(self, target: PreTrainedModel, settings: Settings, prompts: list[torch.Tensor], pad: int):
        self.target = target
        self.settings = settings
        self.prompts = prompts
        self.call = Rules(settings.new_tokens, temperature=settings.temperature).call(pad)

    def passes(self, progress: Progress) -> tuple[PassTimes, ...]:
        """Time forward passes: all widths after the prompts' context, some widths after longer ones."""
        own = int(median(map(len, self.prompts))) + self.settings.new_tokens // 2
        room = Traits.of(self.target).context - COLUMNS[-1]
        chosen = self.settings.contexts or (own, *(further for further in CONTEXTS if own < further <= room))
        text = torch.cat(self.prompts)
        plans: list[tuple[int, tuple[int, ...], bool | None]] = [
            (min(context, room), COLUMNS if index == 0 else SOME_COLUMNS, None) for index, context in enumerate(chosen)
        ]
        slow_rows = self.target.device.type == "cpu" and self.target.dtype != torch.float32
        if slow_rows and torch.backends.mkldnn.is_available():
            context, columns, _ = plans[0]
            plans[:1] = [(context, columns, True), (context, columns, False)]
        seconds = self.settings.seconds * FOR_PASSES / len(plans)
        found = []
        for number, (context, columns, onednn) in enumerate(plans):

            def part(share: float, before: int = number) -> None:
                progress("timing passes", (before + share) / len(plans))

            part(0)
            found.append(pass_times(self.target, text, context, columns, seconds=seconds, onednn=onednn, progress=part))
        return tuple(found)

    def generate(self, model: Any, ids: torch.Tensor, **more: Any) -> list[int]:
        output = model(ids[None], attention_mask=torch.ones_like(ids)[None], **(self.call | more))
        return output[0, len(ids) :].tolist()

    def record(
        self, draft: str, model: AssistedModelForCausalLM, passes: PassTimes, of: int, progress: Progress
    ) -> Found:
        """Decode prompts with long drafts and record every round, until its share of the time is over. of: number of drafts."""
        settings = self.settings
        # a pass over more tokens never takes less time: such a measurement was disturbed
        curve = Timings(COLUMNS[-1], COLUMN, passes.seconds).seconds
        measured = Costs(tuple(enumerate(curve))[1:], 0.0)
        policy = Recorded(settings.longest, waits=self.target.device.type != "cpu", costs=measured)
        run = model.generate
        texts: list[torch.Tensor] = []
        deadline = time.perf_counter() + settings.seconds * FOR_RECORDS / of
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy.begin()
            torch.manual_seed(0)
            self.generate(run, self.prompts[0], max_new_tokens=WARM_UP, draft_length=policy)
            policy.calls.clear()  # of the warm-up
            for number, ids in enumerate(self.prompts):
                if number >= CHECKED and time.perf_counter() > deadline:
                    break
                policy.begin()
                torch.manual_seed(number)
                new = self.generate(run, ids, draft_length=policy)
                texts.append(torch.cat([ids, torch.tensor(new, device=ids.device)]))
                progress(f"recording {draft}", (number + 1) / len(self.prompts))
        calls = policy.calls
        written = [
            Written(text, len(ids), starts(rounds))
            for text, ids, rounds in zip(texts, self.prompts, calls, strict=False)
        ]
        comparison = None
        if type(model.drafter) is ModelDrafter:
            comparison = compare(self.target, model.drafter.model, written, settings.temperature, settings.longest)
        drafts, prompt_seconds = _priced(policy, measured)
        lengths = [expect(drafts, length, 1.0).milliseconds_per_token for length in range(1, settings.longest + 1)]
        warned = [str(warning.message) for warning in caught if issubclass(warning.category, DraftingStopped)]
        warned += model.totals.warnings
        return Found(
            draft=draft,
            model=model,
            drafts=drafts,
            best=1 + lengths.index(min(lengths)),
            written=written,
            rounds=calls,
            comparison=comparison,
            prompt_seconds=prompt_seconds,
            warned="; ".join(dict.fromkeys(warned)) or None,
        )

    def race(self, found: Sequence[Found], progress: Progress) -> Race:
        """Run the baseline and each draft, at its best length and adaptively, in turns, until the time is over."""
        ways: dict[str, Callable[..., Any]] = {one.name: one.generate for one in plain(self.target, compiled=False)}
        plain_ways = list(ways)
        if found:  # any of the pairs will do
            ways[UNDRAFTED] = partial(found[0].model.generate, draft_length=Never())
        for one in found:
            for length in (one.best, "adaptive"):
                ways[way(one.draft, length)] = partial(one.model.generate, draft_length=length)
        prompts = self.prompts[: min((len(one.written) for one in found), default=1)]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        first: dict[str, list[float]] = {name: [] for name in ways}
        wrote: dict[str, list[list[int]]] = {name: [] for name in ways}
        for name in ways:  # adaptive lengths need longer to measure their costs
            warm_up = self.settings.new_tokens // 2 if name.endswith("adaptive") else WARM_UP
            self.generate(ways[name], prompts[0], max_new_tokens=warm_up)
        left = self.settings.seconds * (1 - FOR_PASSES - FOR_RECORDS)
        checking = partial(progress, "checking")
        for name, _, number in turns(list(ways), 1, len(prompts), left, checking, least=CHECKED):
            torch.manual_seed(number)
            clock = FirstToken(self.target.device)
            wrote[name].append(self.generate(ways[name], prompts[number], streamer=clock))
            seconds[name].append(now(self.target.device) - clock.started)
            first[name].append(clock.seconds)
        return Race(seconds, first, wrote, min(plain_ways, key=lambda name: sum(seconds[name])))


def way(draft: str, length: int | str) -> str:
    return f"{draft}, {length if length == 'adaptive' else f'draft length {length}'}"


def starts(rounds: Sequence[Step]) -> tuple[int, ...]:
    """The index of the new token with which each draft begins. Token 0 comes from the pass over the prompt."""
    starts, index = [], 1
    for one in rounds:
        if one.drafted:
            starts.append(index)
        index += one.committed
    return tuple(starts)


def _priced(policy: Recorded, passes: Costs) -> tuple[Drafts, float]:
    """The recorded drafts with their costs, and the seconds that the draft needs to read a prompt."""
    later = [one for call in policy.calls for one in call[1:]] or [one for call in policy.calls for one in call]
    blocks = all(one.asked == 1 for one in later)
    draft = median(one.draft_seconds / one.asked for one in later)
    # a round also judges and commits, and the load of the machine changes over time
    slower = median(one.verify_seconds / passes.verify_seconds(1 + one.drafted) for one in later)
    verify = tuple((columns, seconds * slower) for columns, seconds in passes.verify)
    firsts = [call[0] for call in policy.calls if call]
    read_prompt = median(one.draft_seconds - draft * one.asked for one in firsts)
    calls = tuple(marks(call, policy.tokens) for call in policy.calls)
    return Drafts(calls, Costs(verify, draft), blocks, tree_columns(later, policy.tokens)), max(0.0, read_prompt)
