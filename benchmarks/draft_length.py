"""Every draft length policy on the shipped pair and on a hopeless draft, by the protocol of `assisted bench`.

    python benchmarks/draft_length.py --out benchmarks/draft_length.json

Held-out code, float32. Two baselines: plain `generate`, and this package's loop without drafts, which lacks the overhead of
`generate` and is the harder one. `cold` policies start every call knowing nothing; the others build on their earlier calls,
as they do in use.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tables import about, figures, shipped
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.bench import (
    Bars,
    Batch,
    Measured,
    Rules,
    batches,
    held_out_prompts,
    of_model,
    plain,
    race,
    repeated_share,
    speedup,
)
from assisted.lengths import AdaEDL, Confidence, DraftLength, Fixed, Heuristic, Length
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


@dataclass(frozen=True)
class Cold:
    """A policy that takes nothing over from earlier calls."""

    policy: DraftLength

    def start(self, earlier: Length | None = None) -> Length:
        return self.policy.start()


POLICIES: dict[str, DraftLength] = {
    "no drafts": Never(),
    **{f"fixed {n}": Fixed(n) for n in (1, 2, 3, 4, 6, 8)},
    "heuristic": Heuristic(),
    "confidence 0.4": Confidence(),
    "adaedl": AdaEDL(),
    "adaptive": Adaptive(),
    "adaptive, cold": Cold(Adaptive()),
}
HOPELESS = ("no drafts", "fixed 4", "heuristic", "confidence 0.4", "adaedl", "adaptive", "adaptive, cold")


def pairs() -> dict[str, tuple[AssistedModelForCausalLM, DraftModel]]:
    """The shipped pair, and the same target with a draft of the same shape that has learned nothing."""
    good, draft = shipped()
    torch.manual_seed(0)
    hopeless = AutoModelForCausalLM.from_config(good.drafter.model.config).eval()
    return {"shipped pair": (good, draft), "hopeless draft": (good, DraftModel(hopeless))}


def rows(
    pair: AssistedModelForCausalLM,
    draft: DraftModel,
    names: tuple[str, ...],
    work: list[Batch],
    rules: Rules,
    title: str,
) -> list[dict[str, Any]]:
    """A row for each policy, and one for plain `generate`."""
    own = [
        of_model(name, AssistedModelForCausalLM.from_models(pair.target, draft, POLICIES[name], pair.tokenizer))
        for name in names
    ]
    with Bars() as bars:
        measured = race(pair.target, [*plain(pair.target, False), *own], work, rules, 1, lambda *at: bars(title, at[1]))
    for one in measured:
        if one.error is not None:
            raise RuntimeError(f"{one.contestant.name}: {one.error}")
    by_name = {one.contestant.name: one for one in measured}
    return [_row(one, by_name["plain"], by_name["no drafts"]) for one in measured]


def _row(one: Measured, plainly: Measured, loop: Measured) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": one.contestant.name,
        "against_plain": asdict(speedup(plainly.seconds, one.seconds)),
        "against_no_drafts": asdict(speedup(loop.seconds, one.seconds)),
        "repeated_4grams": repeated_share(one.tokens),
    }
    if one.report is not None:
        row |= {name: getattr(one.report, name) for name in ("tokens_per_pass", "acceptance_rate", "assisted_share")}
        row["predicted_speedup"] = one.contestant.model.report.predicted_speedup  # of the last call
    return row


def overhead(prompt: torch.Tensor, model: AssistedModelForCausalLM, call: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the processor that the adaptive policy itself takes in a round, waiting for the draft's
    distribution included."""

    spent, rounds = 0.0, 0

    @dataclass(frozen=True)
    class Timed:
        def start(self, earlier: Length | None = None) -> Length:
            length = Adaptive().start()
            for name in ("budget", "go_on", "another", "observe"):
                setattr(length, name, timed(getattr(length, name), name))
            return length

    def timed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal spent, rounds
            rounds += name == "observe"
            started = time.thread_time()
            found = method(*args)
            spent += time.thread_time() - started
            return found

        return call

    model.generate(prompt, attention_mask=torch.ones_like(prompt), draft_length=Timed(), **call)
    return {"microseconds_per_round": 1e6 * spent / rounds, "rounds": rounds}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    models = pairs()
    good, _ = models["shipped pair"]
    prompts = list(islice(held_out_prompts(good.tokenizer), args.prompts))
    found = about(good, prompts=args.prompts, new_tokens=args.tokens, repeats=args.repeats, results={})
    for setting in args.settings:
        rules = Rules(args.tokens, args.repeats, **SETTINGS[setting])
        for name, (pair, draft) in models.items():
            policies = tuple(POLICIES) if name == "shipped pair" else HOPELESS
            title = f"{name}, {setting}"
            found["results"][title] = rows(pair, draft, policies, batches(prompts), rules, title)
        found["overhead"] = overhead(prompts[0].ids, good, rules.call(1))
    return found


def show(found: dict[str, Any]) -> None:
    for title, rows in found["results"].items():
        print(f"\n{title}, {found['new_tokens']} tokens")
        for row in rows:
            plain, loop = row["against_plain"], row["against_no_drafts"]
            line = f"  {row['name']:<16} {plain['ratio']:.2f} [{plain['low']:.2f}, {plain['high']:.2f}]"
            line += f"  against no drafts {loop['ratio']:.2f} [{loop['low']:.2f}, {loop['high']:.2f}]"
            if "tokens_per_pass" in row:
                line += f"  {row['tokens_per_pass']:.2f} tokens/pass, accepted {row['acceptance_rate']:.0%}"
                line += f", assisted {row['assisted_share']:.0%}"
            if row.get("predicted_speedup") is not None:
                line += f", predicted {row['predicted_speedup']:.2f}"
            print(f"{line}, repeated 4-grams {row['repeated_4grams']:.0%}")
    print(f"\nthe adaptive policy takes {found['overhead']['microseconds_per_round']:.0f} microseconds a round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of every call (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS), help="(default: all)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--read", type=Path, help="measure nothing, show the figures of this JSON")
    args = parser.parse_args()
    show(figures(args, measure))


if __name__ == "__main__":
    main()
