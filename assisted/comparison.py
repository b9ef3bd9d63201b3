"""Three ways of decoding the same held-out code, side by side: plain, transformers' assisted generation, and ours.

Counts from outside, by a hook on the target, the same for all three. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import ast
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from .modeling import AssistedModelForCausalLM
from .zoo import corpus

__all__ = ["OURS", "PEER", "PLAIN", "Comparison", "Prompt", "Way", "compare", "held_out_prompts", "repeated_share"]

PLAIN, PEER, OURS = "plain generate", "transformers assisted", "assisted"
PROMPT_TOKENS = (120, 200)
LINES_LEFT = 5  # of the function behind the cut, at least: there must be something to complete
# (num_assistant_tokens, assistant_confidence_threshold): transformers is shown at the fastest; the first is its default
PEER_SETTINGS = ((20, 0.4), (6, 0.4), (4, 0.0), (3, 0.0))
TUNING_PROMPTS = 3

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
        ways: plain, transformers' assisted generation, ours.
        prompts: where the prompts come from.
        new_tokens: of each prompt.
        peer_setting: num_assistant_tokens and assistant_confidence_threshold that transformers was fastest with.
        repeated_4grams: share of the 4-grams written that occurred before in the same completion.
        threads: of torch.
        device, dtype: of the target.
    """

    ways: tuple[Way, ...]
    prompts: tuple[str, ...]
    new_tokens: int
    peer_setting: tuple[int, float]
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
    seconds: float = 25.0,
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
    progress: Progress = lambda what, share: None,
) -> Comparison:
    """Decode held-out code three ways at temperature 0.

    Args:
        model: the pair. Its draft must be a causal LM: transformers is given the same one.
        prompts: how many. Those that the target ends before `new_tokens` are passed over.
        new_tokens: of each prompt.
        repeats: the most timed rounds over all prompts; each follows one that is not timed.
        seconds: no timed round begins later than this after the first; one is always made.
        prompt_tokens: the fewest and the most tokens of a prompt.
        progress: told what is being done, and the share of it that is done, in [0, 1].

    Raises ValueError where there are not enough prompts, ModuleNotFoundError without the held-out text.
    """
    run = _Runner(model, new_tokens)
    chosen, expected = _choose(run, prompts, prompt_tokens, progress)
    inputs = [prompt.ids.to(model.device) for prompt in chosen]
    setting = _fastest(run, inputs[:TUNING_PROMPTS], progress)
    with _peer_setting(run.draft, setting):
        counts = {}
        for number, name in enumerate(run.ways):
            counts[name] = _count(run, name, inputs, expected)
            progress("checking the tokens", (number + 1) / len(run.ways))
        taken = _race(run, inputs, repeats, seconds, progress)
    return Comparison(
        ways=tuple(
            Way(name, *counts[name], tuple(taken[name]), _ratios(taken[PLAIN], taken[name])) for name in run.ways
        ),
        prompts=tuple(prompt.source for prompt in chosen),
        new_tokens=new_tokens,
        peer_setting=setting,
        repeated_4grams=repeated_share(expected),
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
        for name, text in _halves(corpus.read(path), lambda t: tokens[0] <= len(tokenizer(t).input_ids) <= tokens[1]):
            ids = tokenizer(text, return_tensors="pt").input_ids
            yield Prompt(f"{'/'.join(path.parts[package:])}: {name}", text, ids)
            break


def _halves(source: str, fits: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Name and first half of the top-level functions that have a fitting one, cut before a statement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # other people's escapes
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    lines = source.splitlines()
    for function in functions:
        documented = ast.get_docstring(function, clean=False) is not None
        later = function.body[2 if documented else 1 :]  # a cut lies behind the docstring and a statement
        end = function.end_lineno or function.lineno
        cuts = sorted({node.lineno - 1 for top in later for node in ast.walk(top) if isinstance(node, ast.stmt)})
        for cut in cuts:
            text = "\n".join(lines[function.lineno - 1 : cut]).rstrip()
            if end - cut >= LINES_LEFT and fits(text):
                yield function.name, text
                break


class _Runner:
    """The three ways, by name: [1, P] int64 -> new tokens."""

    def __init__(self, model: AssistedModelForCausalLM, new_tokens: int):
        self.model = model
        self.draft: PreTrainedModel = model.drafter.model
        self.new_tokens = new_tokens
        self.ways: dict[str, Callable[..., Any]] = {
            PLAIN: model.target.generate,
            PEER: self._peer,
            OURS: model.generate,
        }

    def __call__(self, name: str, ids: torch.Tensor) -> list[int]:
        mask = torch.ones_like(ids)
        output = self.ways[name](ids, attention_mask=mask, max_new_tokens=self.new_tokens, do_sample=False)
        return output[0, ids.shape[1] :].tolist()

    def _peer(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.model.target.generate(ids, assistant_model=self.draft, **kwargs)


def _choose(
    run: _Runner, wanted: int, tokens: tuple[int, int], progress: Progress
) -> tuple[list[Prompt], list[list[int]]]:
    """The first prompts that the target completes with all new tokens, and these completions by plain `generate`."""
    chosen: list[Prompt] = []
    expected: list[list[int]] = []
    for prompt in islice(held_out_prompts(run.model.tokenizer, tokens), 4 * wanted):
        completion = run(PLAIN, prompt.ids.to(run.model.device))
        if len(completion) == run.new_tokens:
            chosen.append(prompt)
            expected.append(completion)
            progress("choosing prompts", len(chosen) / wanted)
        if len(chosen) == wanted:
            return chosen, expected
    raise ValueError(f"prompts: {wanted} wanted, the target wrote {run.new_tokens} tokens for {len(chosen)} only")


@contextmanager
def _peer_setting(draft: PreTrainedModel, setting: tuple[int, float]) -> Iterator[None]:
    """transformers reads how to draft from the draft's generation config."""
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
    for number, setting in enumerate(PEER_SETTINGS):
        with _peer_setting(run.draft, setting):
            run(PEER, inputs[0])
            started = time.perf_counter()
            for ids in inputs:
                run(PEER, ids)
            taken[setting] = time.perf_counter() - started
        progress("tuning transformers' assisted generation", (number + 1) / len(PEER_SETTINGS))
    return min(taken, key=taken.__getitem__)


def _count(run: _Runner, name: str, inputs: list[torch.Tensor], expected: list[list[int]]) -> tuple[int, int, int, int]:
    """Prompts with the expected tokens, new tokens, passes of the target, tokens it was asked to check."""
    widths: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    hook = run.model.target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        found = [run(name, ids) for ids in inputs]
    finally:
        hook.remove()
    read = sum(ids.shape[1] for ids in inputs) + len(widths) - len(inputs)  # the prompts, then one token a pass
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    return same, sum(map(len, found)), len(widths), sum(widths) - read


def _race(
    run: _Runner, inputs: list[torch.Tensor], repeats: int, seconds: float, progress: Progress
) -> dict[str, list[float]]:
    """Seconds of each way for all prompts, round by round; the ways take turns at every prompt."""
    taken: dict[str, list[float]] = {name: [] for name in run.ways}
    order = list(run.ways)
    started = time.perf_counter()
    for repeat in range(repeats):
        if repeat and time.perf_counter() - started > seconds:
            break
        for name in run.ways:
            taken[name].append(0.0)
        for number, ids in enumerate(inputs):
            for name in order:
                before = time.perf_counter()
                run(name, ids)
                taken[name][-1] += time.perf_counter() - before
            order = order[1:] + order[:1]
            done = (repeat + (number + 1) / len(inputs)) / repeats
            spent = (time.perf_counter() - started) / seconds if seconds > 0 else 0.0
            progress("measuring", min(1.0, max(done, spent)))
    return taken


def _ratios(plain: list[float], other: list[float]) -> tuple[float, ...]:
    return tuple(p / o for p, o in zip(plain, other, strict=True))
