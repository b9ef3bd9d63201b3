"""The whole measurement in one call: load a pair, choose who takes part, race at every batch size and context, sum up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ... import zoo
from ...core.host import now
from ...loading.backends import find, placed
from ...methods import METHODS, DraftModel, parse
from ...methods.shared.registry import split
from ...modeling import AssistedModelForCausalLM
from . import methods as who
from . import prompts as texts
from .clock import Progress, silent
from .methods import Method, of_model
from .prompts import Batch, Prompt
from .protocol import Measured, Rules, race, require_room, stream
from .results import Point, Result, Row, largest_gap, machine, point_name, summed_up, timed_row

HEAT_BATCHES = 2  # on which transformers' settings are compared, at least, and one of every category


def measure(
    target: str = "zoo:target",
    draft: Any = None,
    drafts: Sequence[Any] | None = None,
    prompts: Sequence[str] = tuple(texts.SETS),
    count: int = 4,
    rules: Rules = Rules(),  # noqa: B008  (frozen)
    batch: Sequence[int] = (1,),
    context: Sequence[int] = (),
    compiled: bool = True,
    progress: Progress = silent,
    draft_window: int | None = None,
    **kwargs: Any,
) -> Result:
    """Measure the speedup from drafting: plain `generate`, transformers' own drafting, this package without a draft, and its
    drafters.

    Args:
        target: Hub id, folder, `zoo:` name or saved pair.
        draft: a draft model, also for transformers; as for `AssistedModelForCausalLM.from_pretrained`. The default is
            `"zoo:draft"` for `"zoo:target"`, a saved pair's own, otherwise none.
        drafts: the methods: strings, specs or lists of them; "a+b" is ["a", "b"]. The default is `default_drafts`.
        prompts, count: sets, question files or datasets (see `prompts.read`), and how many of each category; at least as many
            as a batch has rows.
        rules: tokens, repeats, temperature.
        batch: rows decoded together; several numbers are measured one after the other.
        context: lengths that all prompts are brought to; without any, they keep theirs.
        compiled: whether plain `generate` also takes part with a static cache and a compiled forward.
        progress: called with what is being done and the share of it that is done.
        draft_window: of the methods that keep keys and values of a draft.
        **kwargs: for loading the pair: dtype, device_map, draft_length, draft_quantization, ...

    Raises ValueError, naming the argument, for what cannot be measured, and if plain decoding fails.
    """
    for argument, value in (("count", count), ("batch", min(batch, default=0)), ("context", min(context, default=1))):
        if value < 1:
            raise ValueError(f"{argument}: {value} is nothing to measure; give 1 or more")
    pair, name = load(target, draft, **kwargs)
    tokenizer = pair.tokenizer
    if tokenizer is None:
        raise ValueError(f"target: {target} has no tokenizer, which the prompts need")
    found = texts.read(prompts, tokenizer, max(count, *batch))
    require_room(pair.target, max(context, default=1), rules)  # before the shorter ones are measured
    chosen = default_drafts(pair, name, target) if drafts is None else _named(drafts, pair, name)
    own = [who.undrafted(pair.target)]
    for one in who.assisted(pair.target, chosen, tokenizer, pair.draft_length, draft_window):
        own.append(one)
        progress("loading drafters", (len(own) - 1) / len(chosen))
    plain = who.plain(pair.target, compiled)
    others = [*transformers_assisted(pair), *who.lookups(pair.target)]
    points = []
    lengths: list[int | None] = [*sorted(context)]
    for length in lengths or [None]:
        brought = found if length is None else texts.at_length(found, tokenizer, length)
        for rows in sorted(batch):
            at = "" if len(batch) * max(1, len(context)) == 1 else f"{point_name(rows, length)}: "
            measured = point(pair, plain, others, own, brought, rules, rows, _prefixed(at, progress))
            points.append(replace(measured, context=length))
    about = machine(pair.target.device, pair.target.dtype)
    return Result(target, name, rules, texts.sources(found), tuple(points), about)


def point(
    pair: AssistedModelForCausalLM,
    plain: Sequence[Method],
    others: Sequence[Method],
    own: Sequence[Method],
    prompts: Sequence[Prompt],
    rules: Rules,
    batch: int = 1,
    progress: Progress = silent,
    streams: bool = True,
) -> Point:
    """One race: plain decoding, the fastest of transformers' settings, and the other methods.

    Args:
        pair: all methods decode with its target.
        plain: plain decoding in its modes; the fastest is 1.00.
        others: transformers' own drafting; only the fastest of each family takes part.
        own: the other methods.
        prompts, rules, batch: the work; `batch` rows are decoded together. With a limit of `rules.seconds`, which is for
            everything, nothing is streamed.
        progress: as for `race`.
        streams: whether to also measure the time until the first token, and memory, in another repeat.
    """
    started = now()
    pad = pad_token(pair.tokenizer)
    batches = texts.batches(prompts, batch, pad)
    if any("compiled" in one.setting for one in plain):
        torch.compiler.reset()  # code compiled for other shapes counts against a limit
    best, heat = _quickest(pair, others, batches, rules, progress) if others else ([], ())
    left = None if rules.seconds is None else rules.seconds - (now() - started)
    measured = race(pair.target, [*plain, *best, *own], batches, replace(rules, seconds=left), pad, progress)
    if left is None and streams:
        stream(pair.target, measured, batches, rules, pad, progress)
    if rules.greedy:
        ran = [one for one in measured if one.error is None]
        for one in ran[1:]:  # than plain's first mode
            one.largest_gap = largest_gap(pair.target, batches, ran[0].tokens, one.tokens)
    baseline, rows = summed_up(measured, batches, rules.greedy)
    return Point(batch, None, baseline, rows, heat)


def brief(
    pairs: Mapping[str, AssistedModelForCausalLM],
    prompts: int,
    rules: Rules,
    progress: Progress = silent,
) -> Result:
    """Decode held-out code for the time of `rules`, for the demo: plain, by transformers' own drafting, by this package without
    a draft, by the pairs.

    Unlike in `measure`, plain `generate` takes part only in its default mode, not compiled. transformers drafts with the
    first pair's model, or by prompt lookup if it has none. Nothing is streamed.

    Args:
        pairs: of the same target, by the name of their row; the first one with its tokenizer.
        prompts: functions to complete, see `short_prompts`.
        rules: tokens, repeats at most, and seconds for everything.
        progress: called with what is being done and the share of it that is done.

    Raises ValueError if there are not enough prompts, ModuleNotFoundError without the held-out text.
    """
    pair = next(iter(pairs.values()))
    found = texts.short_prompts(pair.tokenizer, prompts)
    plain = who.plain(pair.target, compiled=False)
    tried = transformers_assisted(pair) or who.lookups(pair.target)
    own = [who.undrafted(pair.target), *(of_model(name, model) for name, model in pairs.items())]
    measured = point(pair, plain, tried, own, found, rules, progress=progress)
    about = machine(pair.target.device, pair.target.dtype)
    return Result(pair.target.name_or_path, None, rules, texts.sources(found), (measured,), about)


def _quickest(
    pair: AssistedModelForCausalLM,
    tried: Sequence[Method],
    batches: list[Batch],
    rules: Rules,
    progress: Progress,
) -> tuple[list[Method], tuple[Row, ...]]:
    """A short race over some of the batches. Returns the fastest method of every family, and the rows of all."""
    firsts = list({batch.category: batch for batch in reversed(batches)}.values())
    more = [batch for batch in batches if not any(batch is first for first in firsts)]
    some = [*firsts, *more[: max(0, HEAT_BATCHES - len(firsts))]]
    short, said = replace(rules, repeats=1, seconds=None), _prefixed("transformers' settings, ", progress)
    uncounted = [replace(one, counted=False) for one in tried]
    measured = race(pair.target, uncounted, some, short, pad_token(pair.tokenizer), said)
    best = {one.name for one in fastest(measured)}
    return [one for one in tried if one.name in best], tuple(map(timed_row, measured))


def fastest(tried: Sequence[Measured]) -> list[Method]:
    """The fastest method of every family; a failed one if all failed."""
    families: dict[str, list[Measured]] = {}
    for one in tried:
        families.setdefault(one.method.family, []).append(one)
    best = []
    for members in families.values():
        ran = [one for one in members if one.error is None]
        best.append(min(ran, key=lambda one: one.typical) if ran else members[0])
    return [one.method for one in best]


def load(target: str, draft: Any = None, **kwargs: Any) -> tuple[AssistedModelForCausalLM, str | None]:
    """The pair, and the name of its draft, None if it drafts by copying text. target, draft, kwargs: as for `measure`."""
    if draft is None and target == "zoo:target":
        draft = "zoo:draft"
    pair = AssistedModelForCausalLM.from_pretrained(target, draft=draft, **kwargs)
    if draft is None and pair.spec.quantizes == "model":
        draft = "its own draft"  # of a saved pair
    return pair, draft if draft is None or isinstance(draft, str) else repr(draft)


def default_drafts(pair: AssistedModelForCausalLM, draft: str | None, target: str = "") -> dict[str, Any]:
    """Every drafter that this target and draft allow, by the name of its row.

    draft: the name of the pair's draft, None for no model. target: its name, which says which of the shipped heads fit.
    """
    quantizes = find(placed("int8", pair.target.device.type))[0].is_installed
    strings = [spec.sample for spec in METHODS.values() if spec.sample and (quantizes or not spec.quantizes)]
    strings += zoo.heads_of(target)
    if draft is not None:
        both = [f"suffix+{draft}"] if pair.spec.quantizes == "model" else []
        strings = [draft, *both, *(name for name in strings if name != draft)]
    return _named(strings, pair, draft)


def _named(drafts: Sequence[Any], pair: AssistedModelForCausalLM, draft: str | None) -> dict[str, Any]:
    """Specs by name. The pair's own draft is not loaded again."""
    return {entry if isinstance(entry, str) else _written(entry): _spec(entry, pair, draft) for entry in drafts}


def _spec(entry: Any, pair: AssistedModelForCausalLM, draft: str | None) -> Any:
    if isinstance(entry, str):
        if entry == draft:
            return _loaded(pair)
        if len(parts := split(entry)) > 1:
            return [_spec(part, pair, draft) for part in parts]
        return entry
    if isinstance(entry, (list, tuple)):
        return [_spec(part, pair, draft) for part in entry]
    parse(entry)  # raises TypeError if it is no draft
    return entry


def _loaded(pair: AssistedModelForCausalLM) -> Any:
    """The pair's spec, with the loaded draft model in place of its name."""
    if pair.spec.quantizes != "model":
        return pair.spec
    window = getattr(pair.spec, "draft_window", None)
    return DraftModel(pair.drafter.models[0], tokenizer=getattr(pair.drafter, "tokenizer", None), draft_window=window)


def _written(entry: Any) -> str:
    return "+".join(map(_written, entry)) if isinstance(entry, (list, tuple)) else str(entry)


def transformers_assisted(pair: AssistedModelForCausalLM) -> list[Method]:
    """transformers' assisted generation with the pair's draft model, with translated tokens if needed; [] without a model."""
    if pair.spec.quantizes != "model":
        return []
    drafter: Any = pair.drafter
    tokenizers = (pair.tokenizer, drafter.tokenizer) if drafter.translates else None
    return who.peers(pair.target, drafter.models[0], tokenizers)


def pad_token(tokenizer: Any) -> int:
    """The token that pads the rows of a batch. The mask hides it, so any token will do."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def _prefixed(prefix: str, progress: Progress) -> Progress:
    """The same progress with a prefix to its messages."""
    return lambda what, share: progress(prefix + what, share)
