"""A simulated pair of models in simulated seconds: how much faster than plain decoding a draft length policy is.

    python tests/simulation.py

Drives a `Length` in the order in which the loop and a drafter do. Knows no model: text is a row of tokens, each with a
confidence of the draft and whether the target agrees.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from assisted.core.drafts import Draft, Round
from assisted.engine.passes import columns_among
from assisted.fast.capture import Captures, CudaGraphs
from assisted.lengths import Confidence, DraftLength, Fixed, Length
from assisted.lengths.adaptive import Adaptive

VOCABULARY = 16


@dataclass(frozen=True)
class Pair:
    """What the two models cost, in passes of the target over one token.

    Args:
        draft: a forward of the draft.
        column: what each further column adds to a pass of the target.
        first_column: what the first of them adds besides.
        noise: relative standard deviation of the times that the policy is told.
        outliers: share of them that are ten times as long.
        prompt: the draft's reading of the prompt, before its first draft of a call.
        start: what a round's first forward of the draft takes besides.
        row: what each further row adds to a pass of the target, by columns. Where the memory is the limit, it is nothing.
        slow: how many times as long everything takes while the machine is slow.
        turns: rounds after which the machine becomes slow or fast again, on average; 0 if it never does.
        capture: what the first forward pass of a captured shape takes besides, in passes of the same model. 0 where nothing is
            captured; elsewhere, rows, columns and slots are rounded up as those of captured passes are.
        ahead: the most columns of the shapes that were captured before the calls.
        host: what a decision within a draft takes besides, for which the host waits for the device.
    """

    draft: float
    column: float
    first_column: float = 0.0
    noise: float = 0.05
    outliers: float = 0.005
    prompt: float = 0.0
    start: float = 0.0
    row: float = 0.0
    slow: float = 1.0
    turns: float = 0.0
    capture: float = 0.0
    ahead: int = 0
    host: float = 0.0

    def drafting(self, forwards: int) -> float:
        """So many forwards of the draft."""
        return forwards * self.draft + (self.start if forwards else 0.0)

    def verify(self, columns: int, rows: int = 1) -> float:
        """A pass over this many columns of so many rows."""
        alone = 1 + self.column * (columns - 1) + (self.first_column if columns > 1 else 0.0)
        return alone + self.row * (rows - 1) * columns


@dataclass(frozen=True)
class Source:
    """A text that switches between predictable and unpredictable stretches (a Markov chain).

    Args:
        stretches: mean number of tokens of a predictable and of an unpredictable stretch.
        confidences: parameters of the beta distribution of the draft's confidence in either.
        power: the target agrees with probability confidence ** power: above 1, the draft is too sure of itself.
        scale: and times this.
    """

    stretches: tuple[float, float] = (60.0, 20.0)
    confidences: tuple[tuple[float, float], tuple[float, float]] = ((30.0, 1.0), (2.0, 4.0))
    power: float = 1.0
    scale: float = 1.0

    def text(self, tokens: int, seed: int = 0) -> list[tuple[float, bool]]:
        """Confidence and agreement of every token."""
        rng = random.Random(f"text {seed}")
        found, regime = [], 0
        for _ in range(tokens):
            if rng.random() < 1 / self.stretches[regime]:
                regime = 1 - regime
            confidence = min(0.999, max(1.5 / VOCABULARY, rng.betavariate(*self.confidences[regime])))
            found.append((confidence, rng.random() < self.scale * confidence**self.power))
        return found


HOPELESS = Source(confidences=((3.0, 3.0), (2.0, 4.0)), power=0.0, scale=0.02)
PAIRS = (Pair(0.05, 0.01), Pair(0.3, 0.02), Pair(0.6, 0.05))
Text = Sequence[tuple[float, bool]]


def distributions(confidences: Sequence[float]) -> torch.Tensor:
    """[B, VOCABULARY] float32 distributions whose largest probabilities these are."""
    top = torch.tensor(confidences)[:, None]
    return torch.cat([top, ((1 - top) / (VOCABULARY - 1)).expand(-1, VOCABULARY - 1)], 1)


@dataclass
class Run:
    """What a simulated `generate` came to; `length` is the policy's memory at its end."""

    tokens: int
    seconds: float
    length: Length
    plain: float  # seconds of plain decoding; both without noise
    captures: CudaGraphs
    drafted: int = 0
    drafted_at: list[int] = dataclasses.field(default_factory=list)  # tokens committed before each round with a draft

    @property
    def speedup(self) -> float:
        """Against plain decoding."""
        return self.plain / self.seconds


def simulate(
    policy: DraftLength,
    pair: Pair,
    texts: Sequence[Text],
    tokens: int,
    seed: int = 0,
    earlier: Length | None = None,
    asks: bool = True,
    sampled: bool = False,
    found: float = 1.0,
    context: int = 0,
    captures: CudaGraphs | None = None,
    is_short: bool = False,
    at_once: bool = False,
) -> Run:
    """One `generate` over the rows of `texts`, `tokens` new tokens each.

    asks: the drafter asks the policy before every token; otherwise it proposes its whole budget at once, for nothing.
    sampled: drafted tokens are drawn.
    found: how likely a drafter that does not ask is to find anything for a row.
    context: tokens of the prompt.
    captures: of earlier calls; those of this call are added.
    is_short: the prompt is no longer than the answer.
    at_once: a draft is one captured function, whose length is chosen before; otherwise the policy is asked before every token.
    """
    rng, finds = random.Random(f"noise {seed}"), random.Random(f"finds {seed}")

    def taken(seconds: float) -> float:
        return seconds * max(0.2, rng.gauss(1, pair.noise)) * (10 if rng.random() < pair.outliers else 1)

    if pair.prompt and isinstance(policy, Adaptive) and policy.draft_cost is None:
        policy = dataclasses.replace(policy, draft_cost=0.7 * pair.draft)  # a share of weights is a rough guess
    length = policy.start(earlier)
    if pair.prompt:
        length.drafter_reads_prompt()
    rounding = functools.partial(columns_among, len(texts)) if pair.capture else None
    length.prompt_read(tokens, pair.prompt / pair.draft if asks else 0.0, rounding, is_short)
    at, read = [0] * len(texts), -1
    run = Run(0, 0.0, length, 0.0, captures or CudaGraphs())

    def columns(model: str, width: int, running: int) -> int:
        """Columns of a pass; the first of its shape captures it, which the policy is not told."""
        if not pair.capture:
            return width
        asked = model, running, width, context + max(at), False, False
        own = Captures.shape(run.captures, *asked)
        if own is not None and own.columns <= pair.ahead:
            run.captures.keep(own, list)
        shape = run.captures.shape(*asked)
        if shape is None or not run.captures.is_expected(shape):
            return width
        if shape not in run.captures.held:
            run.captures.keep(shape, list)
            run.seconds += pair.capture * (pair.draft if model == "draft" else 1.0)
        return shape.columns

    started, speed = False, 1.0
    while any(count < tokens for count in at):
        unfinished = [row for row, count in enumerate(at) if count < tokens]
        budget = min(length.budget(unfinished), max(tokens - at[row] for row in unfinished) - 1)
        whole = length.ahead(budget) if at_once and budget > 0 else None
        if whole is not None:
            forwards, drafted = whole, [whole if row in unfinished else 0 for row in range(len(texts))]
        else:
            forwards, drafted = _draft(length, budget, texts, at, unfinished, asks, sampled)
        if found < 1:
            drafted = [count if finds.random() < found else 0 for count in drafted]
            if any(drafted):
                width = length.fit([drafted[row] for row in unfinished])
                drafted = [min(count, width) for count in drafted]
        draft_seconds = pair.drafting(forwards) if asks else 0.0001 * forwards
        draft_seconds += 0.0 if whole is not None or not length.needs_q else pair.host * forwards
        if forwards and not started:
            draft_seconds, started = draft_seconds + pair.prompt, True
        if pair.turns and rng.random() < 1 / pair.turns:
            speed = pair.slow if speed == 1 else 1.0
        running = run.captures.rows(len(unfinished), len(texts)) if pair.capture else len(unfinished)
        if asks and forwards:
            columns("draft", max(at) - read, running)
            if forwards > 1:
                columns("draft", 1, running)
            read = max(at)
        draft_seconds *= speed
        verify_seconds = speed * pair.verify(columns("target", 1 + max(drafted), running), running)
        counts = {"drafted": drafted, "depths": drafted, "accepted": [0] * len(at), "kept": [0] * len(at)}
        if any(drafted):
            run.drafted_at.append(at[unfinished[0]])
        for row in unfinished:
            accepted = next((k for k in range(drafted[row]) if not texts[row][at[row] + k][1]), drafted[row])
            kept = min(accepted + 1, tokens - at[row])
            counts["accepted"][row], counts["kept"][row] = min(accepted, kept), kept
            at[row] += kept
            run.tokens += kept
            run.plain += kept / len(texts) * speed * pair.verify(1, len(texts))
            run.drafted += drafted[row]
        run.seconds += draft_seconds + verify_seconds
        seconds = {"draft_seconds": taken(draft_seconds), "verify_seconds": taken(verify_seconds)}
        nothing = Draft.empty(len(at))
        length.observe(Round(nothing, torch.empty(len(at), 1, 0), unfinished, budget > 0, **counts, **seconds))
    length.end()
    return run


def _draft(
    length: Length, budget: int, texts: Sequence[Text], at: list[int], unfinished: list[int], asks: bool, drawn: bool
) -> tuple[int, list[int]]:
    """How many forwards the draft ran and how many tokens it proposes in each row."""
    drafted = [0] * len(texts)
    if budget < 1:
        return 0, drafted
    if not asks:
        return 1, [budget if row in unfinished else 0 for row in range(len(texts))]
    going = [row in unfinished for row in range(len(texts))]
    for position in range(budget):
        if length.needs_q:
            ahead = [text[min(place + position, len(text) - 1)][0] for text, place in zip(texts, at, strict=True)]
            wanted = length.go_on(position, distributions(ahead), drawn).tolist()
            going = [a and b for a, b in zip(going, wanted, strict=True)]
            if not any(going):
                return position + 1, drafted
        drafted = [count + goes for count, goes in zip(drafted, going, strict=True)]
        if position + 1 == budget or not length.run_again(position + 1):
            break
    return position + 1, drafted


@functools.cache
def oracle(pair: Pair, source: Source, tokens: int, seed: int = 0) -> tuple[float, str]:
    """The best rule in hindsight: a longest draft and a threshold of the confidence, tuned on this very text with the
    costs known. Returns its speedup and its name."""
    text = source.text(tokens + 64, seed)
    best = (1.0, "plain")
    for maximum in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20):
        for threshold in (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
            for first in (0, 1) if threshold else (1,):  # the threshold holds for the first token, too; or not
                speedup = _rule(pair, text, tokens, maximum, threshold, first)
                best = max(best, (speedup, f"at most {maximum}, threshold {threshold}, first {first}"))
    return best


def _rule(pair: Pair, text: Text, tokens: int, maximum: int, threshold: float, first: int) -> float:
    at, seconds = 0, 0.0
    while at < tokens:
        drafted, forwards = 0, 0
        while drafted < maximum:
            forwards += 1
            if text[at + drafted][0] < threshold and drafted >= first:
                break
            drafted += 1
        accepted = next((k for k in range(drafted) if not text[at + k][1]), drafted)
        at += accepted + 1
        seconds += pair.drafting(forwards) + pair.verify(drafted + 1)
    return at / seconds


POLICIES: dict[str, DraftLength] = {
    **{f"Fixed({n})": Fixed(n) for n in (1, 2, 3, 4, 6, 8)},
    "Confidence(0.4)": Confidence(0.4, 20),
    "Adaptive()": Adaptive(),
}


def speedups(pair: Pair, source: Source, tokens: int = 4000, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, float]:
    """Mean speedup of every policy, and of the oracle, over several texts."""
    found = {}
    for name, policy in POLICIES.items():
        runs = [simulate(policy, pair, [source.text(tokens + 64, seed)], tokens, seed) for seed in seeds]
        found[name] = sum(run.speedup for run in runs) / len(runs)
    found["oracle"] = sum(oracle(pair, source, tokens, seed)[0] for seed in seeds) / len(seeds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    columns = {
        f"draft {pair.draft}, token {pair.column}": speedups(pair, source, args.tokens, range(args.seeds))
        for source in (Source(),)
        for pair in PAIRS
    }
    columns[f"hopeless, draft {PAIRS[1].draft}, token {PAIRS[1].column}"] = speedups(
        PAIRS[1], HOPELESS, args.tokens, range(args.seeds)
    )
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in (*POLICIES, "oracle"):
        print(f"| `{name}` | " + " | ".join(f"{column[name]:.2f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
