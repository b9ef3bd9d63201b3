"""The runs of `assisted doctor`: timed forward passes, recorded drafts, and a race against the autoregressive baseline."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core.host import now
from ...core.report import Report
from ...engine.traits import Traits
from ...fast import native
from ...lengths.cost_model import COLUMN, Costs, Timings
from ...lengths.policies import Never
from ...methods import ModelDrafter
from ...modeling import AssistedModelForCausalLM
from ..bench.clock import FirstToken, Progress, turns
from ..bench.methods import plain
from ..bench.protocol import Rules, gave_up
from .diagnosis import Settings
from .forecast import Drafts, Recorded, Step, expect, marks, tree_columns
from .passes import Comparison, PassTimes, Written, compare, pass_times

COLUMNS = tuple(range(1, 17))
SOME_COLUMNS = (1, 2, 4, 8, 16)  # at longer contexts
CONTEXTS = (512, 2048)  # in addition to that of the prompts
UNDRAFTED = "assisted, no drafts"
CHECKED = 2  # the fewest prompts that are decoded: a single one does not show how much they differ
FOR_PASSES, FOR_RECORDS = 0.2, 0.35  # shares of the time; the rest is for the race
WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Found:
    """The recorded run of a draft. calls: the rounds of each. prompt_seconds: that the draft needs to read a prompt."""

    model: AssistedModelForCausalLM
    calls: list[list[Step]]
    drafts: Drafts
    best: int
    comparison: Comparison | None
    prompt_seconds: float
    warned: str | None


@dataclass
class Run:
    """Measured calls of one way of decoding: time, time to the first token, and tokens of each call."""

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    wrote: list[list[int]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)  # of this package's ways

    @property
    def per_token(self) -> float:
        """Seconds per token after the first one."""
        return (sum(self.seconds) - sum(self.first)) / sum(len(new) - 1 for new in self.wrote)


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
        first, *others = (min(context, room) for context in chosen)
        slow_rows = self.target.device.type == "cpu" and self.target.dtype != torch.float32
        modes = (True, False) if slow_rows and torch.backends.mkldnn.is_available() else (None,)
        plans = [(first, COLUMNS, onednn) for onednn in modes]
        plans += [(context, SOME_COLUMNS, None) for context in others]
        text, seconds = torch.cat(self.prompts), self.settings.seconds * FOR_PASSES / len(plans)

        def timed(before: int, context: int, columns: tuple[int, ...], onednn: bool | None) -> PassTimes:
            def part(share: float) -> None:
                progress("timing passes", (before + share) / len(plans))

            return pass_times(self.target, text, context, columns, seconds=seconds, onednn=onednn, progress=part)

        return tuple(timed(number, *one) for number, one in enumerate(plans))

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
        run = partial(self.generate, model.generate, draft_length=policy)
        texts: list[torch.Tensor] = []
        deadline = now() + settings.seconds * FOR_RECORDS / of
        progress(f"recording {draft}", 0.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy.begin()
            torch.manual_seed(0)
            run(self.prompts[0], max_new_tokens=WARM_UP)
            policy.calls.clear()  # of the warm-up
            for number, ids in enumerate(self.prompts):
                if number >= CHECKED and now() > deadline:
                    break
                policy.begin()
                torch.manual_seed(number)
                texts.append(torch.cat([ids, torch.tensor(run(ids), device=ids.device)]))
                progress(f"recording {draft}", (number + 1) / len(self.prompts))
        comparison = None
        if type(model.drafter) is ModelDrafter:
            read = zip(texts, self.prompts, policy.calls, strict=False)
            written = [Written(text, len(ids), starts(call)) for text, ids, call in read]
            comparison = compare(self.target, model.drafter.model, written, settings.temperature, settings.longest)
        drafts, prompt_seconds = _priced(policy, measured)
        each = [expect(drafts, length, 1.0) for length in range(1, settings.longest + 1)]
        best = min(each, key=lambda one: one.milliseconds_per_token).length
        told = [one for one in model.totals.warnings if not one.startswith(native.LACKING)]  # the report's head says it
        warned = "; ".join(dict.fromkeys([*gave_up(caught), *told])) or None
        return Found(model, policy.calls, drafts, best, comparison, prompt_seconds, warned)

    def race(self, found: Mapping[str, Found], progress: Progress) -> tuple[str, dict[str, Run]]:
        """Run the baseline and each draft, at its best length and adaptively, in turns, until the time is over.

        Returns the name of the fastest plain mode, and the runs by way, transformers' own `generate` first.
        """
        ways: dict[str, Callable[..., Any]] = {one.name: one.generate for one in plain(self.target, compiled=False)}
        plain_ways, models = list(ways), {}
        for draft, one in found.items():
            ways.setdefault(UNDRAFTED, partial(one.model.generate, draft_length=Never()))  # any of the pairs will do
            for length in (one.best, "adaptive"):
                ways[way(draft, length)] = partial(one.model.generate, draft_length=length)
                models[way(draft, length)] = one.model
        prompts = self.prompts[: min((len(one.calls) for one in found.values()), default=1)]
        runs = {name: Run() for name in ways}
        for name, generate in ways.items():  # adaptive lengths need longer to measure their costs
            warm_up = self.settings.new_tokens // 2 if name.endswith("adaptive") else WARM_UP
            self.generate(generate, prompts[0], max_new_tokens=warm_up)
        left = self.settings.seconds * (1 - FOR_PASSES - FOR_RECORDS)
        checking = partial(progress, "checking")
        for name, _, number in turns(list(ways), 1, len(prompts), left, checking, least=CHECKED):
            torch.manual_seed(number)
            clock = FirstToken(self.target.device)
            runs[name].wrote.append(self.generate(ways[name], prompts[number], streamer=clock))
            runs[name].seconds.append(now(self.target.device) - clock.started)
            runs[name].first.append(clock.seconds)
            if name in models and (report := models[name].report) is not None:
                runs[name].reports.append(report)
        return min(plain_ways, key=lambda name: sum(runs[name].seconds)), runs


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
    once, draft = (median(each) for each in zip(*(one.of_draft for one in later), strict=True))
    # a round also judges and commits, and the load of the machine changes over time
    slower = median(one.verify_seconds / passes.verify_seconds(1 + one.drafted) for one in later)
    firsts = [call[0] for call in policy.calls if call]
    read_prompt = median(one.draft_seconds - once - draft * one.asked for one in firsts)
    calls = tuple(marks(call, policy.tokens) for call in policy.calls)
    costs = Costs(tuple((columns, seconds * slower) for columns, seconds in passes.verify), draft)
    return Drafts(calls, costs, blocks, tree_columns(later, policy.tokens), once), max(0.0, read_prompt)
