"""Every draft length policy on the shipped pair and on a hopeless draft, by the protocol of `assisted bench`.

    python benchmarks/draft_length.py --out benchmarks/draft_length.json

Held-out code, float32. Two baselines: plain `generate`, and this package's loop without drafts, which is faster. `cold`
policies start every call without measurements; the others keep those of earlier calls, as they do in use.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from overhead import Causes
from tables import about, arguments, figures, paired, required, shipped
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.bench import (
    Bars,
    Batch,
    Interval,
    Measured,
    Rules,
    batches,
    held_out_prompts,
    plain,
    race,
    repeated_share,
    speedup,
)
from assisted.lengths import Confidence, DraftLength, Fixed, Length
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_p": 0.95}}


@dataclass(frozen=True)
class Cold:
    """A policy that forgets earlier calls."""

    policy: DraftLength

    def start(self, earlier: Length | None = None) -> Length:
        return self.policy.start()


POLICIES: dict[str, DraftLength] = {
    "no drafts": Never(),
    **{f"fixed {n}": Fixed(n) for n in (1, 2, 3, 4, 6, 8)},
    "confidence 0.4": Confidence(),
    "adaptive": Adaptive(),
    "adaptive, cold": Cold(Adaptive()),
}
HOPELESS = ("no drafts", "fixed 4", "confidence 0.4", "adaptive", "adaptive, cold")


def drafts() -> tuple[AssistedModelForCausalLM, dict[str, DraftModel]]:
    """The shipped pair; its draft, and an untrained one of the same shape."""
    pair, draft = shipped()
    torch.manual_seed(0)
    hopeless = AutoModelForCausalLM.from_config(pair.drafter.model.config).eval()
    return pair, {"shipped pair": draft, "hopeless draft": DraftModel(hopeless)}


def rows(
    pair: AssistedModelForCausalLM,
    draft: DraftModel,
    names: Sequence[str],
    work: list[Batch],
    rules: Rules,
    title: str,
) -> list[dict[str, Any]]:
    """A row for each policy, and one for plain `generate`."""
    methods = [
        *plain(pair.target, False),
        *paired(pair.target, pair.tokenizer, {name: (draft, POLICIES[name]) for name in names}),
    ]
    with Bars() as bars:
        measured = required(race(pair.target, methods, work, rules, 1, lambda *at: bars(title, at[1])))
    by_name = {one.method.name: one for one in measured}
    return [_row(one, by_name["plain"], by_name["no drafts"]) for one in measured]


def _row(one: Measured, plainly: Measured, loop: Measured) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": one.method.name,
        "against_plain": asdict(speedup(plainly.seconds, one.seconds)),
        "against_no_drafts": asdict(speedup(loop.seconds, one.seconds)),
        "repeated_4grams": repeated_share(one.tokens),
    }
    if one.report is not None:
        row |= {name: getattr(one.report, name) for name in ("tokens_per_pass", "acceptance_rate", "assisted_share")}
        row["predicted_speedup"] = one.method.model.report.predicted_speedup  # of the last call
    return row


def of_the_policy(prompt: torch.Tensor, model: AssistedModelForCausalLM, call: dict[str, Any]) -> dict[str, float]:
    """Microseconds that the adaptive policy itself takes in a round, waiting for the draft's distribution included."""
    causes = Causes()
    with causes.timed():
        model.generate(prompt, attention_mask=torch.ones_like(prompt), draft_length=Cold(Adaptive()), **call)
    rounds = model.report.target_passes
    return {"microseconds_per_round": 1e6 * causes.seconds["draft lengths"] / rounds, "rounds": rounds}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pair, chosen = drafts()
    prompts = list(islice(held_out_prompts(pair.tokenizer), args.prompts))
    found = about(pair, prompts=args.prompts, new_tokens=args.tokens, repeats=args.repeats, results={})
    for setting in args.settings:
        rules = Rules(args.tokens, args.repeats, **SETTINGS[setting])
        for name, draft in chosen.items():
            policies = tuple(POLICIES) if name == "shipped pair" else HOPELESS
            title = f"{name}, {setting}"
            found["results"][title] = rows(pair, draft, policies, batches(prompts), rules, title)
        found["overhead"] = of_the_policy(prompts[0].ids, pair, rules.call(1))
    return found


def show(found: dict[str, Any]) -> None:
    for title, rows in found["results"].items():
        print(f"\n{title}, {found['new_tokens']} tokens")
        for row in rows:
            line = f"  {row['name']:<16} {Interval(**row['against_plain'])}"
            line += f"  against no drafts {Interval(**row['against_no_drafts'])}"
            if "tokens_per_pass" in row:
                line += f"  {row['tokens_per_pass']:.2f} tokens/pass, accepted {row['acceptance_rate']:.0%}"
                line += f", assisted {row['assisted_share']:.0%}"
            if row.get("predicted_speedup") is not None:
                line += f", predicted {row['predicted_speedup']:.2f}"
            print(f"{line}, repeated 4-grams {row['repeated_4grams']:.0%}")
    print(f"\nthe adaptive policy takes {found['overhead']['microseconds_per_round']:.0f} microseconds a round")


def main() -> None:
    numbers = {"--tokens": (256, "new tokens of every call")}
    parser = arguments(__doc__, ("--prompts", "--repeats", "--threads", "--out", "--read"), numbers=numbers)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS), help="(default: all)")
    show(figures(parser.parse_args(), measure))


if __name__ == "__main__":
    main()
