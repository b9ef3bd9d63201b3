"""Three ways of decoding the same held-out code, side by side: plain, transformers' assisted generation, and ours.

Counts from outside, by a hook on the target, the same for all three. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import ast
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .modeling import AssistedModelForCausalLM
from .zoo import corpus

__all__ = ["OURS", "PEER", "PLAIN", "Comparison", "Prompt", "Way", "compare", "held_out_prompts", "repeated_share"]

PLAIN, PEER, OURS = "plain generate", "transformers assisted", "assisted"
PROMPT_TOKENS = (120, 200)
LINES_READ, LINES_LEFT = (
    6,
    5,
)  # of code before the cut and behind it, at least: something to go by, something to complete
# (num_assistant_tokens, assistant_confidence_threshold): transformers is shown at the fastest; the first is its default
PEER_SETTINGS = ((20, 0.4), (6, 0.4), (4, 0.0), (3, 0.0))
# (prompt_lookup_num_tokens, max_matching_ngram_size): where no model drafts
LOOKUP_SETTINGS = ((10, 2), (5, 3), (4, 2))
TUNING_PROMPTS = 2
MOST_CHARACTERS = 8  # of a token, about: longer texts are passed over without being tokenized

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Prompt:
    """The first half of a function.

    Args:
        source: file and function it comes from.
        text: from `def` to the cut, without the end of the last line.
        ids: [1, P] int64.
    """

    source: str
    text: str
    ids: torch.Tensor


@dataclass(frozen=True)
class Way:
    """One way of decoding all prompts.

    Args:
        name: what decodes.
        same: prompts whose tokens are those of plain `generate`.
        tokens: new tokens of all prompts.
        passes: forwards of the target that gave them, those that read the prompts included.
        drafted: tokens that the target was asked to check.
        seconds: for all prompts, a number for each repeat.
        ratios: seconds of plain `generate` over these, repeat by repeat.
    """

    name: str
    same: int
    tokens: int
    passes: int
    drafted: int
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes

    @property
    def acceptance_rate(self) -> float | None:
        """Each pass gives one token of the target's own, the others were drafted. None where nothing was drafted."""
        return (self.tokens - self.passes) / self.drafted if self.drafted else None


@dataclass(frozen=True)
class Comparison:
    """The ways side by side: the same prompts, the same number of new tokens, the same counting, interleaved.

    Args:
        ways: plain, transformers' assisted generation, ours, and what else was asked for.
        prompts: where the prompts come from.
        new_tokens: of each prompt.
        peer_setting: num_assistant_tokens and assistant_confidence_threshold that transformers was fastest with; where no
            model drafts, prompt_lookup_num_tokens and max_matching_ngram_size.
        peer_looks_up: whether it drafted by prompt lookup, for want of a draft model.
        repeated_4grams: share of the 4-grams written that occurred before in the same completion.
        threads: of torch.
        device, dtype: of the target.
    """

    ways: tuple[Way, ...]
    prompts: tuple[str, ...]
    new_tokens: int
    peer_setting: tuple[int, float]
    peer_looks_up: bool
    repeated_4grams: float
    threads: int
    device: str
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """All fields and what follows from them, ready for json."""
        ways = [
            {**asdict(way), "tokens_per_pass": way.tokens_per_pass, "acceptance_rate": way.acceptance_rate}
            for way in self.ways
        ]
        return {**asdict(self), "ways": ways}


def compare(
    model: AssistedModelForCausalLM,
    prompts: int = 8,
    new_tokens: int = 48,
    repeats: int = 5,
    seconds: float = 36.0,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    progress: Progress = lambda what, share: None,
    also: Mapping[str, AssistedModelForCausalLM] | None = None,
) -> Comparison:
    """Decode held-out code three ways, and more, at temperature 0.

    Args:
        model: the pair. transformers is given the same draft model; where none drafts, it looks up the prompt.
        prompts: how many. Those that the target ends before `new_tokens` are passed over.
        new_tokens: of each prompt.
        repeats: the most timed rounds over all prompts; each follows one that is not timed.
        seconds: for everything: no timed round begins that would end later. One is always made.
        prompt_tokens: the fewest and the most tokens of a prompt.
        progress: told what is being done, and the share of it that is done, in [0, 1].
        also: further pairs of the same target, by the name of their row.

    Raises ValueError where there are not enough prompts, ModuleNotFoundError without the held-out text.
    """
    for name, value in (("prompts", prompts), ("new_tokens", new_tokens), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name}: {value} is nothing to measure; give 1 or more")
    deadline = time.perf_counter() + seconds
    run = _Runner(model, new_tokens, also)
    chosen, expected = _choose(run, prompts, prompt_tokens, progress)
    inputs = [prompt.ids.to(model.target.device) for prompt in chosen]
    setting = run.setting = _fastest(run, inputs[:TUNING_PROMPTS], progress)
    outcomes = {PLAIN: expected}
    with _peer_setting(run.draft, setting):
        drafting = [name for name in run.ways if name != PLAIN]
        for number, name in enumerate(drafting):
            outcomes[name] = [run.counted(name, ids) for ids in inputs]
            progress("checking the tokens", (number + 1) / len(drafting))
        taken = _race(run, inputs, repeats, deadline, progress)
    return Comparison(
        ways=tuple(_way(name, outcomes[name], expected, taken[name], taken[PLAIN]) for name in run.ways),
        prompts=tuple(prompt.source for prompt in chosen),
        new_tokens=new_tokens,
        peer_setting=setting,
        peer_looks_up=run.draft is None,
        repeated_4grams=repeated_share([outcome.tokens for outcome in expected]),
        threads=torch.get_num_threads(),
        device=str(model.target.device),
        dtype=str(model.target.dtype).removeprefix("torch."),
    )


def repeated_share(completions: list[list[int]], n: int = 4) -> float:
    """The share of n-grams that occurred before in the same completion: small models loop, and loops flatter drafters."""
    grams = [[tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for tokens in completions]
    total = sum(map(len, grams))
    return 1 - sum(len(set(g)) for g in grams) / total if total else 0.0


def held_out_prompts(tokenizer: Any, tokens: tuple[int, int] = PROMPT_TOKENS) -> Iterator[Prompt]:
    """Functions of the held-out packages cut in the middle, always the same ones: one a file, tests left out.

    tokens: the fewest and the most of a prompt.
    """
    files = [path for path in corpus.held_out_files() if "tests" not in path.parts]
    random.Random(0).shuffle(files)
    for path in files:
        package = next(place for place, part in enumerate(path.parts) if part in corpus.HELD_OUT_PACKAGES)
        for name, text in _beginnings(corpus.read(path)):
            if len(text) > MOST_CHARACTERS * tokens[1]:
                continue
            ids = tokenizer(text, return_tensors="pt").input_ids
            if tokens[0] <= ids.shape[1] <= tokens[1]:
                yield Prompt(f"{'/'.join(path.parts[package:])}: {name}", text, ids)
                break


def _beginnings(source: str) -> Iterator[tuple[str, str]]:
    """Name and beginning, short ones first, of each top-level function, cut before a statement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # other people's escapes
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    lines = source.splitlines()
    for function in functions:
        documented = ast.get_docstring(function, clean=False) is not None
        code = function.body[1 if documented else 0 :]
        first = function.lineno if not documented else function.body[0].end_lineno or function.lineno
        last = (function.end_lineno or function.lineno) - LINES_LEFT
        for cut in sorted({node.lineno - 1 for top in code for node in ast.walk(top) if isinstance(node, ast.stmt)}):
            if first + LINES_READ <= cut <= last:
                yield function.name, "\n".join(lines[function.lineno - 1 : cut]).rstrip()


@dataclass(frozen=True)
class _Outcome:
    """One completion: its tokens, the target's passes for it, and how many tokens these were asked to check."""

    tokens: list[int]
    passes: int
    drafted: int


class _Runner:
    """The three ways, by name: [1, P] int64 -> new tokens."""

    def __init__(
        self,
        model: AssistedModelForCausalLM,
        new_tokens: int,
        also: Mapping[str, AssistedModelForCausalLM] | None = None,
    ):
        self.model = model
        self.draft: PreTrainedModel | None = next(iter(model.drafter.models), None)
        self.settings = LOOKUP_SETTINGS if self.draft is None else PEER_SETTINGS
        self.setting = self.settings[0]
        self.new_tokens = new_tokens
        self.ways: dict[str, Callable[..., Any]] = {
            PLAIN: model.target.generate,
            PEER: self._peer,
            OURS: model.generate,
            **{name: pair.generate for name, pair in (also or {}).items()},
        }

    def __call__(self, name: str, ids: torch.Tensor) -> list[int]:
        mask = torch.ones_like(ids)
        output = self.ways[name](ids, attention_mask=mask, max_new_tokens=self.new_tokens, do_sample=False)
        return output[0, ids.shape[1] :].tolist()

    def counted(self, name: str, ids: torch.Tensor) -> _Outcome:
        """As a call, with a hook on the target that counts."""
        widths: list[int] = []

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            widths.append(kwargs["input_ids"].shape[1])

        hook = self.model.target.register_forward_pre_hook(note, with_kwargs=True)
        try:
            tokens = self(name, ids)
        finally:
            hook.remove()
        # what a pass reads beside drafted tokens: the prompt in the first, the last token in every other one
        return _Outcome(tokens, len(widths), sum(widths) - ids.shape[1] - (len(widths) - 1))

    def _peer(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # it warns of the way it calls itself
        try:
            if self.draft is not None:
                return self.model.target.generate(ids, assistant_model=self.draft, **kwargs)
            tokens, ngram = self.setting
            return self.model.target.generate(
                ids, prompt_lookup_num_tokens=tokens, max_matching_ngram_size=ngram, **kwargs
            )
        finally:
            logging.set_verbosity(level)


def _choose(
    run: _Runner, wanted: int, tokens: tuple[int, int], progress: Progress
) -> tuple[list[Prompt], list[_Outcome]]:
    """The first prompts that the target completes with all new tokens, and these completions by plain `generate`."""
    chosen: list[Prompt] = []
    expected: list[_Outcome] = []
    for prompt in islice(held_out_prompts(run.model.tokenizer, tokens), 4 * wanted):
        outcome = run.counted(PLAIN, prompt.ids.to(run.model.target.device))
        if len(outcome.tokens) == run.new_tokens:
            chosen.append(prompt)
            expected.append(outcome)
            progress("choosing prompts", len(chosen) / wanted)
        if len(chosen) == wanted:
            return chosen, expected
    raise ValueError(f"prompts: {wanted} wanted, the target wrote {run.new_tokens} tokens for {len(chosen)} only")


@contextmanager
def _peer_setting(draft: PreTrainedModel | None, setting: tuple[int, float]) -> Iterator[None]:
    """transformers reads how to draft from the draft's generation config, if there is a draft."""
    if draft is None:
        yield
        return
    config = draft.generation_config
    names = ("num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule")
    before = {name: getattr(config, name) for name in names}
    try:
        for name, value in zip(names, (*setting, "constant"), strict=True):
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _fastest(run: _Runner, inputs: list[torch.Tensor], progress: Progress) -> tuple[int, float]:
    """The setting that transformers' assisted generation is fastest with."""
    taken = {}
    for number, setting in enumerate(run.settings):
        run.setting = setting
        with _peer_setting(run.draft, setting):
            run(PEER, inputs[0])
            started = time.perf_counter()
            for ids in inputs:
                run(PEER, ids)
            taken[setting] = time.perf_counter() - started
        progress("tuning transformers' assisted generation", (number + 1) / len(run.settings))
    return min(taken, key=taken.__getitem__)


def _race(
    run: _Runner, inputs: list[torch.Tensor], repeats: int, deadline: float, progress: Progress
) -> dict[str, list[float]]:
    """Seconds of each way for all prompts, round by round; the ways take turns at every prompt."""
    taken: dict[str, list[float]] = {name: [] for name in run.ways}
    order = list(run.ways)
    for repeat in range(repeats):
        if repeat and time.perf_counter() + sum(seconds[-1] for seconds in taken.values()) > deadline:
            break
        for seconds in taken.values():
            seconds.append(0.0)
        for number, ids in enumerate(inputs):
            for name in order:
                started = time.perf_counter()
                run(name, ids)
                taken[name][-1] += time.perf_counter() - started
            order = order[1:] + order[:1]
            progress("measuring", (repeat + (number + 1) / len(inputs)) / repeats)
    return taken


def _way(name: str, outcomes: list[_Outcome], expected: list[_Outcome], taken: list[float], plain: list[float]) -> Way:
    return Way(
        name=name,
        same=sum(outcome.tokens == wanted.tokens for outcome, wanted in zip(outcomes, expected, strict=True)),
        tokens=sum(len(outcome.tokens) for outcome in outcomes),
        passes=sum(outcome.passes for outcome in outcomes),
        drafted=sum(outcome.drafted for outcome in outcomes),
        seconds=tuple(taken),
        ratios=tuple(reference / seconds for reference, seconds in zip(plain, taken, strict=True)),
    )
