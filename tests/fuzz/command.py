"""The fuzzer's command: cases over processes, a bar, a table, and an exit status."""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from .cases import CHANGED, CROWDS, draw
from .changes import Effect
from .minimise import kind_of, minimised
from .running import Outcome, run

__all__ = ["main"]

RENEWED = 2000  # cases after which a process is replaced: what it holds of models stays bounded
SHOWN = 12  # messages of a kind in the table


def main(words: list[str] | None = None) -> int:
    """Returns 1 where something differed, 0 otherwise."""
    args = _parser().parse_args(words)
    if args.case is not None:
        return _one(args)
    total = Total(args.seed, args.changed, args.crowds)
    try:
        for outcome in _outcomes(args, total):
            total.add(outcome)
    except KeyboardInterrupt:
        print("interrupted; so far:")
    print(total.to_json() if args.json else total)
    return int(total.failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Compares a target's own `generate` with the pair's, token by token, over random architectures, arguments, "
        "drafts, continued turns, rows that come and go, and edits of the model between calls. A case is made from a seed and "
        "its number alone. Exit status 1 where something differs; near-ties (tokens closer than rounding) are counted apart.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--cases", type=int, help="stop after so many cases (default: 80 where nothing else stops it)")
    parser.add_argument("--tokens", type=int, help="stop after so many compared tokens")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: %(default)s)")
    parser.add_argument("--case", type=int, help="run this case alone, and say what it is")
    parser.add_argument(
        "--changed",
        type=float,
        default=CHANGED,
        help="share of cases that change the target's code (default: %(default)s)",
    )
    parser.add_argument(
        "--crowds", type=float, default=CROWDS, help="share of cases of rows that come and go (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--keep-going", action="store_true", help="do not stop after 20 failing cases")
    parser.add_argument("--no-minimise", action="store_true", help="print failing cases as they were drawn")
    return parser


def _one(args: argparse.Namespace) -> int:
    _prepare()
    case = draw(args.seed, args.case, args.changed, args.crowds)
    print(case, flush=True)
    outcome = run(case, args.case)
    print(f"{outcome.tokens} tokens in {outcome.calls} calls, {outcome.accepted} of {outcome.drafted} accepted")
    for name in ("refused", "both_raise", "warned", "near_ties", "failures"):
        for text in getattr(outcome, name):
            print(f"{name}: {text}")
    if outcome.failures and not args.no_minimise:
        print(f"smaller: {minimised(case, kind_of(outcome.failures[0]))}")
    return int(bool(outcome.failures))


def _prepare() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _case(seed: int, number: int, changed: float, crowds: float, minimises: bool) -> Outcome:
    case = draw(seed, number, changed, crowds)
    outcome = run(case, number)
    if outcome.failures and minimises:
        outcome.minimal = minimised(case, kind_of(outcome.failures[0]))
    return outcome


def _outcomes(args: argparse.Namespace, total: Total) -> Iterator[Outcome]:
    """Of the cases in turn, as they come."""
    cases = args.cases
    if cases is None and args.minutes is None and args.tokens is None:
        cases = 80
    numbers: Iterable[int] = itertools.count(args.first)
    if cases is not None:
        numbers = range(args.first, args.first + cases)
    ends = None if args.minutes is None else time.monotonic() + 60 * args.minutes

    def over() -> bool:
        late = ends is not None and time.monotonic() > ends
        enough = args.tokens is not None and total.tokens >= args.tokens
        return late or enough or (total.failed >= 20 and not args.keep_going)

    with tqdm(total=cases, unit=" cases", disable=None) as bar:
        for outcome in _in_turn(args, numbers, over) if args.jobs == 1 else _beside(args, numbers, over):
            yield outcome
            bar.update()
            bar.set_postfix(tokens=total.tokens, failed=total.failed, ties=total.near_ties)


def _in_turn(args: argparse.Namespace, numbers: Iterable[int], over: Any) -> Iterator[Outcome]:
    _prepare()
    for number in numbers:
        if over():
            return
        yield _case(args.seed, number, args.changed, args.crowds, not args.no_minimise)


def _beside(args: argparse.Namespace, numbers: Iterable[int], over: Any) -> Iterator[Outcome]:
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"), _prepare, max_tasks_per_child=RENEWED)
    left, running = iter(numbers), set[Future[Outcome]]()
    with pool:
        while True:
            free = [] if over() else itertools.islice(left, 2 * args.jobs - len(running))
            how = args.changed, args.crowds, not args.no_minimise
            running |= {pool.submit(_case, args.seed, number, *how) for number in free}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


@dataclass
class Total:
    """What all cases came to."""

    seed: int
    changed: float
    crowds: float
    cases: int = 0
    calls: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    failed: int = 0
    near_ties: int = 0
    architectures: collections.Counter[str] = field(default_factory=collections.Counter)
    by_draft: dict[str, list[int]] = field(default_factory=dict)
    messages: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    effect: Effect = field(default_factory=Effect)
    traits: dict[str, list[int]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count a case, and print what failed in it."""
        case, number = outcome.case, outcome.number
        assert case is not None and number is not None
        self.cases += 1
        self.calls += outcome.calls
        self.tokens += outcome.tokens
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        self.seconds += outcome.seconds
        self.near_ties += len(outcome.near_ties)
        self.effect.merge(outcome.effect)
        for name, (tokens, failed) in outcome.traits.items():
            before = self.traits.get(name, [0, 0])
            self.traits[name] = [before[0] + tokens, before[1] + failed]
        self.architectures[case.architecture] += outcome.tokens
        counts = self.by_draft.setdefault(case.draft, [0, 0, 0])
        self.by_draft[case.draft] = [
            a + b for a, b in zip(counts, (outcome.tokens, outcome.drafted, outcome.accepted), strict=True)
        ]
        for kind in ("refused", "both_raise", "warned", "near_ties"):
            for text in getattr(outcome, kind):
                self.messages.setdefault(kind, {}).setdefault(text, []).append(number)
        if outcome.failures:
            self.failed += 1
            share = "" if self.changed == CHANGED else f" --changed {self.changed:g}"
            share += "" if self.crowds == CROWDS else f" --crowds {self.crowds:g}"
            again = f"--seed {self.seed} --case {number}{share}"
            self.failures.append(
                {"again": again, "differs": outcome.failures, "case": repr(case), "smaller": repr(outcome.minimal)}
            )
            tqdm.write(f"FAILED {again}: {case.architecture}, {case.draft}\n  " + "\n  ".join(outcome.failures[:3]))
            tqdm.write(f"  {outcome.minimal or case}")

    def to_json(self) -> str:
        """All of it."""
        compared = [name for name, tokens in self.architectures.items() if tokens]
        shown = {**vars(self), "architectures": dict(self.architectures), "architectures_compared": len(compared)}
        shown["effect"] = self.effect.counts
        return json.dumps(shown, indent=2)

    def __str__(self) -> str:
        compared = sum(1 for tokens in self.architectures.values() if tokens)
        lines = [
            f"seed {self.seed}: {self.tokens:,} tokens over {compared} architectures in {self.calls:,} calls of "
            f"{self.cases:,} cases, {self.seconds:.0f} s of processes",
            f"{self.failed} cases failed, {self.near_ties} near-ties; {self.accepted:,} of {self.drafted:,} drafted tokens "
            "accepted",
            f"\n{'draft':<20}{'tokens':>10}{'drafted':>10}{'accepted':>10}",
        ]
        for name, counts in sorted(self.by_draft.items()):
            lines.append(f"{name:<20}" + "".join(f"{count:>10,}" for count in counts))
        if self.traits:
            lines.append(f"\n{'texts in rows that come and go':<30}{'tokens':>10}{'failed':>10}")
            for name, (tokens, failed) in sorted(self.traits.items()):
                lines.append(f"{name:<30}{tokens:>10,}{failed:>10,}")
        if self.effect:
            lines += [
                "\nsomebody's code, during which the target alone wrote another text (altered):",
                *self.effect.rows(),
            ]
        titles = {
            "refused": "refused by the pair alone (ValueError)",
            "both_raise": "raised by both",
            "warned": "warnings of the pair",
            "near_ties": "near-ties",
        }
        for kind, title in titles.items():
            told = sorted(self.messages.get(kind, {}).items(), key=lambda pair: -len(pair[1]))
            if told:
                lines.append(f"\n{title}: {sum(len(numbers) for _, numbers in told)}")
                lines += [f"{len(numbers):>6}  {text} (case {numbers[0]})" for text, numbers in told[:SHOWN]]
                if len(told) > SHOWN:
                    lines.append(f"        and {len(told) - SHOWN} other messages")
        if self.failures:
            lines.append("\nfailed:")
            lines += [f"  {failure['again']}: {failure['differs'][0]}" for failure in self.failures]
        return "\n".join(lines)
