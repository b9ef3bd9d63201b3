"""One case, run: every call on the target alone and on the pair, and what differs.

The target alone is a copy of the pair's target, edited alike: what a call does to the pair's target shows. Where two texts
part, the scores of the target alone are looked up: two tokens closer than rounding are a near-tie and counted apart.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import re
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from architectures import build, random_ids
from crowd import Requests
from transformers import LogitsProcessor, PreTrainedModel, WatermarkingConfig

from assisted import AssistedModelForCausalLM, SessionPool, decoding
from assisted.distribution import Draws
from assisted.engine.libraries import is_wrapper_subclass
from assisted.engine.parts import takes
from assisted.engine.session import Session
from assisted.fast import products
from assisted.fast.low_bit import LowBitLinear

from . import arguments, changes, edits
from .cases import BY_NAME, KNOWN, Call, Case, Crowd, Edit, Request, traits
from .drafts import draft_for
from .weights import weights_as

__all__ = ["NEAR", "Outcome", "run", "same_text"]

NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.15}  # of the spread of a step's scores; rounding is a tenth of it
ROUGH = {"zamba2": 1.4}  # its own scores of a text in bfloat16 differ by so much between one pass and many
CLOSE = 1e-2  # scores and logits that are returned, in float32
FEW = 300  # models kept


@dataclass
class Outcome:
    """What a case came to.

    Args:
        tokens: compared, of all rows. calls: that were compared. drafted, accepted: of the pair's reports.
        near_ties: first differences whose two tokens lie closer than rounding. refused: messages of ValueErrors of the pair
            alone. both_raise: messages where the target alone raises, too. warned: what the pair said of going without drafts.
        failures: what differs. effect: of somebody's code on the text of the target alone. traits: of texts of crowds, the
            tokens compared and the failures.
    """

    number: int | None = None
    case: Case | None = None
    tokens: int = 0
    calls: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    near_ties: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    both_raise: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    effect: changes.Effect = field(default_factory=changes.Effect)
    traits: dict[str, list[int]] = field(default_factory=dict)
    minimal: Case | None = None


@functools.lru_cache(maxsize=FEW)
def _target(architecture: str, weights: int, config: str, attention: str | None, dtype: str) -> PreTrainedModel:
    about = BY_NAME[architecture]
    if attention is not None:
        about = replace(about, attention=attention)
    return build(about, weights, **json.loads(config)).to(getattr(torch, dtype))


def _key(case: Case) -> tuple[str, int, str, str | None, str]:
    return case.architecture, case.weights, json.dumps(case.config, sort_keys=True), case.attention, case.dtype


@functools.lru_cache(maxsize=FEW)
def _draft(name: str, *key: Any) -> Any:
    target = _target(*key)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return draft_for(name, target, copy.deepcopy(target))


def run(case: Case, number: int | None = None) -> Outcome:
    """Run a case; nothing of it is left behind."""
    outcome, started = Outcome(number, case), time.perf_counter()
    undos: list[edits.Undo] = []
    random.seed(0)
    torch.manual_seed(0)
    try:
        with _settings(case), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run(case, outcome, undos)
    except Exception as error:
        outcome.failures.append(f"the fuzzer itself: {_said(error)}")
    finally:
        edits.undo(undos)
    outcome.seconds = time.perf_counter() - started
    return outcome


@contextlib.contextmanager
def _settings(case: Case) -> Iterator[None]:
    wide, check = products._WIDE, decoding.CHECK_INVARIANTS
    products._WIDE, decoding.CHECK_INVARIANTS = 1 if case.packed else wide, True
    try:
        yield
    finally:
        products._WIDE, decoding.CHECK_INVARIANTS = wide, check


def _run(case: Case, outcome: Outcome, undos: list[edits.Undo]) -> None:
    alone, target = copy.deepcopy(_target(*_key(case))), copy.deepcopy(_target(*_key(case)))
    try:
        draft = _draft(case.draft, *_key(case))
        if isinstance(draft, PreTrainedModel):
            draft = copy.deepcopy(draft)
        alone, target = (weights_as(case.weights_as, one) for one in (alone, target))
        pair = AssistedModelForCausalLM.from_models(
            target,
            draft=draft,
            draft_length=case.draft_length,
            fast=case.fast,
            exact="bits" if case.bits else None,
        )
    except (ValueError, ImportError) as error:  # of a backend that is not installed
        outcome.refused.append(f"at load: {_said(error)}")
        return
    except Exception as error:
        outcome.failures.append(f"at load: {_said(error)}")
        return
    baseline = _Undrafted(pair) if case.bits else alone
    edited = any(isinstance(step, Edit) for step in case.steps)
    talk: _Talk | None = None
    texts: dict[str, _Alone] = {}  # of crowds, by what is asked
    change, written = None, None  # the change at present, and the text without it
    for step in case.steps:
        if isinstance(step, Edit):
            change = step.name if step.name in changes.NAMES else None
            texts.clear()
            before = len(undos)
            edits.edit(step.name, step.seed, [alone, target], undos)
            assert len(undos) <= before + 1
            continue
        if isinstance(step, Crowd):
            if not _compare_crowd(step, alone, pair, outcome, texts):
                return
            continue
        talk = _Talk.begun(step, alone) if talk is None or not step.continues else talk.gone_on(step, alone)
        if not _compare(step, talk, alone, pair, outcome, baseline, edited):
            return
        if any(isinstance(other, Edit) and other.name in changes.NAMES for other in case.steps) and not step.continues:
            if change is not None:
                way = () if pair.report is None else (pair.report.way,)
                altered = () if written is None or torch.equal(talk.ids, written) else ("altered",)
                outcome.effect.add(change, "calls", *altered, *way)
            elif written is None:
                written = talk.ids
            elif not torch.equal(talk.ids, written):
                outcome.failures.append("the fuzzer itself: a change was not undone")
    _unchanged(alone, target, outcome)


class _Undrafted:
    """A pair that does not draft."""

    def __init__(self, pair: Any):
        self.pair = pair

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.pair.generate(*args, assisted=False, **kwargs)


@dataclass
class _Talk:
    """The text so far, its mask (None: left out) and the caches that the last call returned, one of each side."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    caches: tuple[Any, Any] = (None, None)

    @classmethod
    def begun(cls, call: Call, model: PreTrainedModel) -> _Talk:
        rows, longest = len(call.lengths), max(call.lengths)
        ids = random_ids(model, rows, KNOWN, KNOWN) if call.prompt == "known" else _tokens(rows, longest, call.seed)
        ids = torch.zeros_like(ids) if call.prompt == "pads" else ids
        if call.prompt == "repeats":
            ids = ids[:, : min(7, longest)].repeat(1, longest)[:, :longest]
        counted = torch.arange(longest) < torch.tensor(call.lengths)[:, None]
        mask = (counted if call.pads == "right" else counted.flip(1)).long()
        if call.pads == "shown":
            return cls(ids, None)
        return cls(ids.where(mask.bool(), 0), mask)

    def gone_on(self, call: Call, model: PreTrainedModel) -> _Talk:
        added = call.lengths[0]
        if call.continues == "cache":
            added = max(added, 1)
        before, mask = self.ids, self.mask
        if call.continues == "edit":
            before = _edited(before, call.seed)
            mask = None if mask is None else mask[:, : before.shape[1]]
        ids = torch.cat([before, _tokens(len(self.ids), added, call.seed)], 1)
        if mask is not None:
            new = ids[:, mask.shape[1] :]
            seen = new != 0 if call.hides else torch.ones_like(new)
            mask = torch.cat([mask, seen.long()], 1)
        own = self.caches[1] if call.continues == "edit" and isinstance(self.caches[1], Session) else None
        return _Talk(ids, mask, self.caches if call.continues == "cache" else (None, own))


def _edited(ids: torch.Tensor, seed: int) -> torch.Tensor:
    """A text, [B, n], cut off, with another token somewhere, or both."""
    chance, width = random.Random(seed), ids.shape[1]
    kept = ids[:, : chance.choice((width, width, max(1, width - 1), chance.randint(1, width)))].clone()
    if chance.random() < 0.6:
        at = chance.choice((0, kept.shape[1] - 1, chance.randrange(kept.shape[1])))
        kept[:, at] = torch.where(kept[:, at] < 5, kept[:, at], (kept[:, at] - 4) % 80 + 5)
    return kept


def _tokens(rows: int, length: int, seed: int) -> torch.Tensor:
    """[rows, length], none of them special, all of them below the smallest vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 90, (rows, length), generator=generator)


def _generate(model: Any, call: Call, talk: _Talk, cache: Any, source: PreTrainedModel, **more: Any) -> Any:
    """The call on a model. Returns what `generate` returns, and what was streamed."""
    written = call.arguments | more
    if cache is not None:
        written.pop("cache_implementation", None)  # a call has one cache or the other
    made = arguments.made(written, source, talk.ids)
    if talk.mask is not None:
        made["attention_mask"] = talk.mask.clone()
    if cache is not None:
        made["past_key_values"] = cache
    ids = None if "inputs_embeds" in made else talk.ids.clone()
    if ids is not None and call.narrow and model is not source:
        ids = ids.int()
    torch.manual_seed(0)
    stream = made.get("streamer")
    return model.generate(ids, **made), None if stream is None else stream.values


def _compare(
    call: Call, talk: _Talk, alone: PreTrainedModel, pair: Any, outcome: Outcome, baseline: Any, edited: bool
) -> bool:
    """Run a call on both and note what differs. Returns whether the talk can go on.

    baseline: what the pair is compared with: the target alone, or the pair without drafts, from which nothing may differ.
    edited: the model changes between calls, so what a cache holds is not what the text gives now.
    """
    bits = baseline is not alone
    theirs, ours = talk.caches
    plain = assisted = error = None
    # a cache is returned with the details, or is the caller's own
    others = {"embeds", "num_beams", "cache_implementation"} & set(call.arguments)
    keeps = not others and call.arguments.get("use_cache") is not False
    more = {"return_dict_in_generate": True} if keeps else {}
    if "embeds" in call.arguments and isinstance(ours, Session):
        theirs = ours = None  # which is a plain cache to a call without tokens
    has_session = keeps and not edited and "cache_layers" not in call.arguments and call.seed % 2
    if ours is None and has_session and takes(alone, "past_key_values"):
        ours = pair.session()
    # a session is the text: states from which transformers reads on wrongly are read anew
    theirs = None if isinstance(ours, Session) and not bits else theirs
    before = copy.deepcopy(theirs)  # from which a difference is explained
    try:
        plain = _generate(baseline, call, talk, theirs, alone, **more)
    except Exception as raised:
        error = raised
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            assisted = _generate(pair, call, talk, ours, alone, **more)
        except ValueError as raised:
            if error is None:
                outcome.refused.append(_said(raised))
                return False
        except Exception as raised:
            if error is None:
                outcome.failures.append(f"{_of(call)}: only the pair raises {_said(raised)}")
                return False
    outcome.warned += [text for text in map(_warning, caught) if text]
    if error is not None:
        if assisted is None:
            outcome.both_raise.append(_said(error))
        else:
            outcome.failures.append(f"{_of(call)}: only the target alone raises {_said(error)}")
        return False
    assert plain is not None and assisted is not None
    if talk.mask is not None and bool((talk.mask.any(1) & (talk.mask[:, -1] == 0)).any()):
        outcome.failures.append(f"{_of(call)}: the pair takes a prompt that ends in padding")
        return False
    outcome.calls += 1
    if pair.report is not None:
        outcome.drafted += pair.report.drafted
        outcome.accepted += pair.report.accepted
    first, second = (_sequences(result) for result in (plain[0], assisted[0]))
    prompt = 0 if "embeds" in call.arguments else talk.ids.shape[1]
    if call.arguments.get("kept"):
        talk.ids, outcome.tokens = first, outcome.tokens + second[:, prompt:].numel()
        outside = changes.outside_kept(alone, second, prompt, call.arguments["top_p"])
        outcome.failures += [f"{_of(call)}: {where} lies outside of top_p, by the pair" for where in outside[:1]]
        return not outside
    explain = functools.partial(_scores, call, talk, alone, before, first)
    dtype = None if bits else _computed_in(alone)
    if not same_text(call, first, second, prompt, explain, outcome, dtype):
        return False
    if plain[1] != assisted[1]:
        outcome.failures.append(f"{_of(call)}: the streams differ: {plain[1]!r:.200} and {assisted[1]!r:.200}")
        return False
    # transformers returns the very tensor that processors get as "logits", so one that writes in place changes those of plain
    # `generate`. The pair returns what the page of transformers promises: the model's own
    aliased = not bits and "in place" in call.arguments.get("processors", ())
    for name in ("scores",) if aliased else ("scores", "logits"):
        if call.arguments.get(f"output_{name}") and keeps and (bits or dtype == torch.float32):
            # a temperature divides scores, and what rounding has made of them
            heat = min(1.0, call.arguments.get("temperature", 1.0)) if name == "scores" else 1.0
            close = 0.0 if bits else CLOSE / heat
            _same_details(call, name, plain[0][name], assisted[0][name], first[:, prompt:], outcome, close)
    if "embeds" in call.arguments or call.arguments.get("num_return_sequences", 1) > 1:
        talk.caches = (None, None)  # which have read on
        return True  # the text so far stays the prompt
    talk.ids = first
    talk.caches = tuple(getattr(result[0], "past_key_values", None) for result in (plain, assisted))  # type: ignore[assignment]
    return True


def _computed_in(model: PreTrainedModel) -> torch.dtype:
    coarse = any(isinstance(module, LowBitLinear) for module in model.modules())
    return torch.bfloat16 if coarse else model.dtype


def _compare_crowd(crowd: Crowd, alone: PreTrainedModel, pair: Any, outcome: Outcome, texts: dict[str, _Alone]) -> bool:
    """Run a crowd, and each of its texts on the target alone. Returns whether nothing differs.

    texts: by what is asked, those of crowds before, which the target alone does not write again.
    """
    asked = [_Alone.of(request, alone, texts) for request in crowd.requests]
    pair.sessions = SessionPool() if crowd.pool else None
    try:
        found, report = _together(crowd, asked, alone, pair, outcome)
    except ValueError as raised:
        outcome.refused.append(_said(raised))
        return True
    except Exception as raised:
        if any(one.written(alone).text is None for one in asked):
            outcome.both_raise.append(_said(raised))
            return True
        outcome.failures.append(f"crowd of {len(asked)}: raises {_said(raised)}")
        return False
    outcome.drafted += report.drafted
    outcome.accepted += report.accepted
    dtype = _computed_in(alone)
    for number, ours in found.items():
        one, request = asked[number].written(alone), crowd.requests[number]
        if one.text is None:
            if ours.shape[1] < one.talk.ids.shape[1] + request.patience:
                outcome.failures.append(f"text {number}: only the target alone raises")
                return False
            continue
        outcome.calls += 1
        text, prompt = one.text, one.talk.ids.shape[1]
        if request.patience + prompt <= ours.shape[1]:
            text = text[:, : ours.shape[1]]
        explain = functools.partial(_scores, one.request.call, one.talk, alone, None, one.text)
        compared, failed = outcome.tokens, len(outcome.failures)
        same = _same_draws(one, text, ours, outcome, dtype) if one.margins else None
        if same is None:
            same = same_text(one.request.call, text, ours, prompt, explain, outcome, dtype)
        assert outcome.case is not None
        for name in traits(outcome.case, crowd, request):
            counts = outcome.traits.setdefault(name, [0, 0])
            counts[0] += outcome.tokens - compared
            counts[1] += len(outcome.failures) > failed
        if not same:
            outcome.failures[-1:] = [f"text {number}: {told}" for told in outcome.failures[-1:]]
            return False
    return True


def _together(
    crowd: Crowd, asked: list[_Alone], alone: PreTrainedModel, pair: Any, outcome: Outcome
) -> tuple[dict[int, torch.Tensor], Any]:
    """The texts of a crowd, [1, L], by their numbers, and the report."""
    torch.manual_seed(0)
    if crowd.chunk is None:
        made = arguments.made(asked[0].request.call.arguments, alone, asked[0].talk.ids)
        answers = list(pair.generate_many([one.talk.ids for one in asked], rows=crowd.rows, **made))
        return {answer.index: answer.ids[None] for answer in answers}, pair.report
    requests, numbers = Requests(pair, crowd.rows, crowd.chunk), []
    for number, one in enumerate(asked):
        made, request = arguments.made(one.request.call.arguments, alone, one.talk.ids), crowd.requests[number]
        try:
            requests.ask(one.talk.ids[0], made, request.when, request.patience, request.draws)
            numbers.append(number)
        except ValueError as raised:
            outcome.refused.append(_said(raised))
    if requests.batch is None:
        return {}, outcome
    answers = requests.answers()
    if len(answers) != len(numbers):
        raise AssertionError(f"{len(answers)} answers to {len(numbers)} requests")
    for at, (_, each) in enumerate(requests.coming):
        if each.error is not None:
            if asked[numbers[at]].written(alone).text is not None:
                raise each.error
            outcome.both_raise.append(_said(each.error))
            del answers[at]
    return {numbers[at]: answer.ids[None] for at, answer in answers.items()}, requests.batch.recorder


@dataclass
class _Alone:
    """A request, and once it is `written` its text by the target alone, [1, L]; None where that raises. margins: of the tokens
    that it drew. Requests that differ in when they come and how long they stay have the same text."""

    request: Request
    talk: _Talk
    is_written: bool = False
    text: torch.Tensor | None = None
    margins: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, model: PreTrainedModel, texts: dict[str, _Alone]) -> _Alone:
        call, key = request.call, repr(replace(request, when=0, patience=0))
        if key in texts:
            return texts[key]
        ids = _Talk.begun(replace(call, lengths=call.lengths * 8), model).ids[call.seed % 8][None].clone()
        shared = min(request.shares, ids.shape[1])
        ids[:, :shared] = _tokens(1, KNOWN * 3, 7)[:, :shared]
        if request.told:
            plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": request.told}
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), **plain)
        texts[key] = cls(request, _Talk(ids, torch.ones_like(ids)))
        return texts[key]

    def written(self, model: PreTrainedModel) -> _Alone:
        """The same, after the target has written it."""
        if self.is_written:
            return self
        self.is_written = True
        with contextlib.suppress(Exception), self.drawing():
            self.text = _sequences(_generate(model, self.request.call, self.talk, None, model)[0])
        return self

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Meanwhile, torch draws with the numbers of the request, if it has some."""
        if self.request.draws is None:
            yield
            return
        draws, own = Draws(1, self.request.draws), torch.multinomial

        def drawn(p: torch.Tensor, num_samples: int) -> torch.Tensor:
            if not p.isfinite().all():
                return own(p, num_samples)  # which raises
            length = self.talk.ids.shape[1] + len(self.margins)
            token = draws.sample(p[:, None], [length])
            sums = p[0].double().cumsum(-1)
            self.margins.append(float((sums / sums[-1] - draws.numbers[0, length]).abs().min()))
            return token

        torch.multinomial = drawn
        try:
            yield
        finally:
            torch.multinomial = own


def _same_draws(
    one: _Alone, text: torch.Tensor, ours: torch.Tensor, outcome: Outcome, dtype: torch.dtype
) -> bool | None:
    """True if the texts part where a number lies closer to another token than rounding, which is a near-tie; else None."""
    width = min(text.shape[1], ours.shape[1])
    wrong = (text[0, :width] != ours[0, :width]).nonzero().flatten().tolist()
    if not wrong:
        return None
    position = wrong[0] - one.talk.ids.shape[1]
    if position < 0 or one.margins[position] > NEAR[dtype]:
        return None
    outcome.near_ties.append(
        f"{_of(one.request.call)}: new token {position}, drawn {one.margins[position]:.2g} from another"
    )
    return True


def _sequences(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def same_text(
    call: Call,
    plain: torch.Tensor,
    ours: torch.Tensor,
    prompt: int,
    explain: Any,
    outcome: Outcome,
    dtype: torch.dtype | None,
) -> bool:
    """Note the first difference of each row. Returns whether there is none. dtype: None where nothing may be rounded."""
    if len(plain) != len(ours):
        outcome.failures.append(f"{_of(call)}: {len(plain)} rows and {len(ours)}")
        return False
    width = min(plain.shape[1], ours.shape[1])
    wrong = plain[:, :width] != ours[:, :width]
    differs = [int(row.int().argmax()) if bool(row.any()) else None for row in wrong]
    pad = call.arguments.get("pad_token_id", 0)
    for row, position in enumerate(differs):
        new = plain[row, prompt : width if position is None else position]
        outcome.tokens += int((new != pad).sum())
    if all(position is None for position in differs):
        if plain.shape == ours.shape:
            return True
        outcome.failures.append(f"{_of(call)}: {plain.shape[1]} tokens, {ours.shape[1]} by the pair")
        return False
    earliest = min(position for position in differs if position is not None)
    scores = explain()
    for row, position in enumerate(differs):
        if position is None:
            continue
        here, there = int(plain[row, position]), int(ours[row, position])
        about = f"{_of(call)}: row {row}, new token {position - prompt}: {here}, by the pair {there}"
        step = None if scores is None or position < prompt else scores[position - prompt][row].double()
        if step is None:
            outcome.failures.append(about)
            continue
        spread = step[step.isfinite()].std().item()
        gap = (step[here] - step[there]).abs().item()
        told = f"{about} (gap {gap:.3g}, spread {spread:.3g})"
        room = _near(outcome.case, dtype) * spread
        near = dtype is not None and gap <= room and (step.max() - step[here]).item() <= room
        # processors and criteria that see the whole batch carry one row's tie into the others
        if near or (outcome.near_ties and position > earliest):
            outcome.near_ties.append(told)
        else:
            outcome.failures.append(told)
    return False


def _near(case: Case | None, dtype: torch.dtype | None) -> float:
    """How close two tokens are that rounding may swap, in spreads of a step's scores."""
    if dtype is None:
        return 0.0
    rough = 0.0 if case is None or dtype == torch.float32 else ROUGH.get(case.architecture, 0.0)
    return max(NEAR[dtype], rough)


class _Follow(LogitsProcessor):
    """Has a text written once more, and keeps the scores of every step, processed but not warped for sampling.

    A call of its own would choose otherwise where two tokens tie, and its scores from there on be those of another text.
    """

    def __init__(self, text: torch.Tensor):
        self.text = text
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.steps.append(scores.clone())
        forced = torch.full_like(scores, float("-inf"))
        return forced.scatter(1, self.text[:, input_ids.shape[1]][:, None], 0.0)


def _scores(call: Call, talk: _Talk, alone: PreTrainedModel, cache: Any, text: torch.Tensor) -> Any:
    """The scores of the target alone in every step of the text that it wrote, [B, V] each."""
    follow = _Follow(text)
    own = [arguments.PROCESSORS[name]() for name in call.arguments.get("processors", ())]
    others = {name: value for name, value in call.arguments.items() if name not in ("processors", "watermarking")}
    if "watermarking" in call.arguments:  # which `generate` itself would put behind the processor that follows
        size = alone.config.get_text_config().vocab_size
        own.append(WatermarkingConfig(**arguments.WATERMARK).construct_processor(size, alone.device))
    try:
        _generate(alone, replace(call, arguments=others), talk, cache, alone, logits_processor=[*own, follow])
    except Exception:
        return None
    return follow.steps


def _same_details(
    call: Call, name: str, plain: Any, ours: Any, new: torch.Tensor, outcome: Outcome, close: float
) -> None:
    if len(plain) != len(ours):
        outcome.failures.append(f"{_of(call)}: {len(plain)} {name}, {len(ours)} by the pair")
        return
    pad = call.arguments.get("pad_token_id", 0)
    for number, (one, two) in enumerate(zip(plain, ours, strict=True)):
        rows = new[:, number] != pad
        one, two = one[rows].double(), two[rows].double()
        finite = one.isfinite()
        same = one.shape == two.shape and bool((finite == two.isfinite()).all())
        if finite.any() and (not same or (one - two)[finite].abs().max() > close):
            outcome.failures.append(f"{_of(call)}: {name} differ in lockstep {number}")
            return


def _unchanged(alone: PreTrainedModel, target: PreTrainedModel, outcome: Outcome) -> None:
    """A call changes nothing of the caller's model."""
    for (name, one), two in zip(alone.state_dict().items(), target.state_dict().values(), strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if is_wrapper_subclass(one):  # torchao's are not compared as they are
            one, two = one.dequantize(), two.dequantize()
        if not torch.equal(one, two):
            outcome.failures.append(f"the target's {name} was changed")
    for what in ("config", "generation_config"):
        if getattr(alone, what).to_dict() != getattr(target, what).to_dict():
            outcome.failures.append(f"the target's {what} was changed")


def _said(error: BaseException) -> str:
    """An error in one line, with the last two places of this package's that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/assisted/" in frame.filename]
    where = (
        ""
        if isinstance(error, ValueError)
        else "".join(f" at {f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames[-2:])
    )
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}{where}"


def _warning(caught: warnings.WarningMessage) -> str | None:
    text = str(caught.message)
    return re.sub(r"\d+", "N", text)[:110] if "without drafts" in text or "rafting" in text else None


def _of(call: Call) -> str:
    return f"call with lengths {list(call.lengths)}" + (f", continued by {call.continues}" if call.continues else "")
