"""Measures what speedup to expect of a draft on this machine and text, and what limits it; then checks the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...engine.libraries import lost
from ...engine.traits import Traits
from ...engine.trust import trust
from ...fast import native
from ...fast.fused import why_not_in_c
from ...fast.low_bit import LowBitLinear
from ...lengths.base import Costs
from ...methods.shared.registry import windows
from ...methods.shared.training.data import read_files
from ...modeling import AssistedModelForCausalLM
from ..bench.clock import Progress, silent
from ..bench.measure import pad_token
from ..bench.prompts import held_out_prompts
from ..bench.results import machine
from ..bench.statistics import repeated_share, speedup
from .diagnosis import Check, Diagnosis, Examination, Settings
from .forecast import Drafts, Expected, Spent, Step, expect, half_as_wrong, spend
from .passes import memory
from .trials import UNDRAFTED, Found, Run, Trials, way

PROMPT_TOKENS = 160  # of the caller's own text
FEWEST_TOKENS = 8
SEEN = 5  # the fewest rounds that reached a position for which its acceptance is reported
_CHARACTERS = 8  # per token, at most on average


def examine(
    target: PreTrainedModel,
    drafts: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    text: str | None = None,
    settings: Settings | None = None,
    draft_quantization: Any = None,
    name: str = "target",
    progress: Progress = silent,
    draft_window: int | None = None,
) -> Examination:
    """Measure a target and one draft or more.

    Args:
        target: the target.
        drafts: what `AssistedModelForCausalLM.from_models` takes as draft, by name. They are loaded before measuring.
            For one that raises an error, the diagnosis has the error alone.
        tokenizer: the target's.
        text: a file or a folder; None or "zoo" takes held-out code.
        settings: what is measured.
        draft_quantization: of drafts that are given by a path.
        name: of the target.
        progress: called with the current step and the share of it that is done.
        draft_window: of the drafts that keep keys and values.

    Raises ValueError for text that is too short, and if no draft can be loaded.
    """
    settings = settings or Settings()
    prompts = [ids.to(target.device) for ids in read_prompts(text, tokenizer, settings)]
    longest = max(map(len, prompts))
    context = Traits.of(target).context
    if longest + settings.new_tokens > context:
        raise ValueError(f"new_tokens: {settings.new_tokens} after {longest} do not fit into a context of {context}")
    models: dict[str, AssistedModelForCausalLM] = {}
    refused: dict[str, str] = {}
    each = windows([*drafts.values()], draft_window)
    for (draft, given), window in zip(drafts.items(), each, strict=True):
        try:
            models[draft] = AssistedModelForCausalLM.from_models(
                target, given, tokenizer=tokenizer, draft_quantization=draft_quantization, draft_window=window
            )
        except (ValueError, TypeError, OSError, ImportError) as error:
            refused[draft] = f"{type(error).__name__}: {error}"
    if refused and not models:
        reasons = "; ".join(f"{draft} ({reason})" for draft, reason in refused.items())
        raise ValueError(f"draft: nothing to measure, since none could be loaded: {reasons}")
    trials = Trials(target, settings, prompts, pad_token(tokenizer))
    passes = trials.passes(progress)
    found = {draft: trials.record(draft, model, passes[0], len(models), progress) for draft, model in models.items()}
    plain_way, runs = trials.race(found, progress)
    plain = runs[plain_way]
    low = [module for module in target.modules() if isinstance(module, LowBitLinear)]  # whose weights are no parameters
    lacking = lost()
    if why := why_not_in_c(target, bool(low)):  # kernels that are not here, in which it could run
        lacking["kernels in C"] = f"{native.COST}, because {why}"
    return Examination(
        target=name,
        way=_way(target),
        machine=machine(target.device, target.dtype),
        parameters=target.num_parameters() + sum(module.in_features * module.out_features for module in low),
        text="held-out code" if text in (None, "zoo") else str(text),
        prompts=max((len(one.calls) for one in found.values()), default=0),
        checked=len(plain.seconds),
        prompt_tokens=int(median(map(len, prompts))),
        new_tokens=settings.new_tokens,
        temperature=settings.temperature,
        passes=passes,
        memory=memory(target, passes[0].seconds[1]),
        plain_way=plain_way,
        plain_seconds=plain.per_token,
        undrafted=speedup([plain.seconds], [runs[UNDRAFTED].seconds]) if found else None,
        repeated_4grams=repeated_share(plain.wrote),
        drafts=tuple(
            Diagnosis(draft, error=refused[draft])
            if draft in refused
            else _diagnosis(draft, found[draft], plain, runs, settings)
            for draft in drafts
        ),
        lacking=tuple(f"{name} ({cost})" for name, cost in lacking.items() if not cost.startswith("nothing")),
    )


def _way(target: PreTrainedModel) -> str | None:
    trusted = trust(target)
    if trusted.between is not None:
        return f"plain: {trusted.between}"
    return None if trusted.is_own else f"own forward: {trusted.forward}"


def read_prompts(text: str | None, tokenizer: Any, settings: Settings) -> list[torch.Tensor]:
    """Ids [P] of each prompt, cut from evenly spread positions of the text. text: as for `examine`."""
    if text in (None, "zoo"):
        return [prompt.ids[0] for prompt in islice(held_out_prompts(tokenizer), settings.prompts)]
    if not Path(str(text)).exists():
        raise ValueError(f"text: {text} does not exist; give a file, a folder, or zoo for held-out code")
    pieces = _pieces("\n".join(read_files([str(text)])), settings.prompts)
    encoded = [tokenizer(piece, return_tensors="pt").input_ids[0, :PROMPT_TOKENS].long() for piece in pieces]
    long_enough = [ids for ids in encoded if len(ids) >= FEWEST_TOKENS]
    if not long_enough:
        raise ValueError(f"text: {text} is too little text for a prompt of {FEWEST_TOKENS} tokens; give more")
    return long_enough


def _pieces(text: str, count: int) -> list[str]:
    size = PROMPT_TOKENS * _CHARACTERS
    offsets = [number * max(0, len(text) - size // 2) // count for number in range(count)]
    starts = {0 if offset == 0 else text.find("\n", offset) + 1 for offset in offsets}
    return [text[start : start + size] for start in sorted(starts)]


def _acceptance(rounds: Sequence[Step], longest: int) -> Iterator[float]:
    """Acceptance at each position, given that the tokens before it were accepted, up to the last position that was reached
    often enough. A text that ends within a draft rejects nothing."""
    for position in range(longest):
        reached = [
            one.accepted > position
            for one in rounds
            if one.drafted > position and (one.accepted > position or one.committed > one.accepted == position)
        ]
        if len(reached) < SEEN:
            return
        yield sum(reached) / len(reached)


def _diagnosis(draft: str, found: Found, plain: Run, runs: Mapping[str, Run], settings: Settings) -> Diagnosis:
    """plain: the baseline's run. runs: of all, by way."""
    # the machine may have been busier before the race, as its passes over one token show
    scale = runs[UNDRAFTED].per_token / found.drafts.costs.verify[0][1]
    verify = tuple((columns, seconds * scale) for columns, seconds in found.drafts.costs.verify)
    costs = Costs(verify, found.drafts.costs.draft * scale)
    drafts = replace(found.drafts, costs=costs)

    def expected(drafts: Drafts) -> tuple[Expected, ...]:
        return tuple(expect(drafts, length, plain.per_token) for length in range(settings.longest + 1))

    def highest(drafts: Drafts) -> float:
        return max(one.speedup.ratio for one in expected(drafts)[1:])

    cheaper = tuple((columns, (seconds + verify[0][1]) / 2) for columns, seconds in verify)
    rounds = [one for call in found.calls for one in call]
    with_room = [one for call in found.calls for one in call[:-1]] or rounds
    right = next(iter(runs.values())).wrote  # transformers' own generate
    checks = []
    for length in (found.best, "adaptive"):
        name = way(draft, length)
        run = runs[name]
        same = sum(a == b for a, b in zip(run.wrote, right, strict=True))
        check = Check(
            way=name.removeprefix(f"{draft}, "),
            speedup=speedup([plain.seconds], [run.seconds]),
            predicted=None,
            same=same if settings.temperature == 0 else None,
            texts=len(run.seconds),
        )
        checks.append(check if length == "adaptive" else _predicted(check, found, drafts, plain, run))
    return Diagnosis(
        draft=draft,
        warned=found.warned,
        proposed=sum(one.drafted > 0 for one in with_room) / len(with_room),
        acceptance_by_position=tuple(_acceptance(rounds, settings.longest)),
        draft_seconds=costs.draft,
        pass_seconds=verify[0][1],
        blocks=drafts.blocks,
        tree_columns=None if drafts.columns is None else drafts.columns[found.best],
        translated=found.model.drafter.translates,
        comparison=found.comparison,
        expected=expected(drafts),
        best=found.best,
        if_twice_as_fast=highest(replace(drafts, costs=Costs(verify, costs.draft / 2), once=drafts.once / 2)),
        if_columns_cost_half=highest(replace(drafts, costs=Costs(cheaper, costs.draft))),
        if_half_as_wrong=highest(half_as_wrong(drafts)),
        checks=tuple(checks),
    )


def _predicted(check: Check, found: Found, drafts: Drafts, plain: Run, run: Run) -> Check:
    """The check with the expected speedup of exactly its calls at the best length, prompts included, and the time's parts."""
    calls = len(run.seconds)
    each = [spend(drafts, text, found.best) for text in drafts.calls[:calls]]
    foretold = Spent(*(sum(getattr(one, part) for one in each) for part in ("passes", "draft", "verify")))
    prompts = sum(run.first) + found.prompt_seconds * calls
    draft = max(0.0, sum(one.draft_seconds for one in run.reports) - found.prompt_seconds * calls)
    verify = sum(one.verify_seconds - one.prompt_seconds for one in run.reports)
    other = max(0.0, sum(run.seconds) - prompts - draft - verify)
    spent = Spent(sum(one.target_passes for one in run.reports), draft, verify, other)
    predicted = sum(plain.seconds) / (prompts + foretold.draft + foretold.verify)
    return replace(check, predicted=predicted, spent=spent, foretold=foretold)
