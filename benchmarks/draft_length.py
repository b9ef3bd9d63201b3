"""Every draft length policy on the shipped pair and on a hopeless draft, against plain decoding, interleaved in one run.

    python benchmarks/draft_length.py --out benchmarks/draft_length.json

Held-out code, the same number of new tokens for all (end tokens ignored), float32. Two baselines: plain `generate`, and
this package's loop without drafts, which lacks the overhead of `generate` and is the harder one. `cold` policies start
every call knowing nothing; the others build on their earlier calls, as they do in use.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from shipped_pair import Never, machine
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM
from assisted.comparison import held_out_prompts, repeated_share
from assisted.controller import Adaptive
from assisted.lengths import AdaEDL, Confidence, DraftLength, Fixed, Heuristic, Length

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0},
}


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
Run = Callable[[torch.Tensor, int], torch.Tensor]


def pairs() -> dict[str, AssistedModelForCausalLM]:
    """The shipped pair, and the same target with a draft of the same shape that has learned nothing."""
    good = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft", dtype=torch.float32)
    good.target.generation_config.eos_token_id = None  # everybody writes the same number of tokens
    torch.manual_seed(0)
    random_draft = AutoModelForCausalLM.from_config(good.drafter.model.config).eval()
    hopeless = AssistedModelForCausalLM.from_models(good.target, draft=random_draft, tokenizer=good.tokenizer)
    return {"shipped pair": good, "hopeless draft": hopeless}


def contestants(model: AssistedModelForCausalLM, names: tuple[str, ...], call: dict[str, Any]) -> dict[str, Run]:
    def plain(ids: torch.Tensor, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model.target.generate(ids, attention_mask=torch.ones_like(ids), **call)

    def assisted(policy: DraftLength) -> Run:
        def run(ids: torch.Tensor, seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return model.generate(ids, attention_mask=torch.ones_like(ids), draft_length=policy, **call)

        return run

    return {"plain": plain} | {name: assisted(POLICIES[name]) for name in names}


def race(
    model: AssistedModelForCausalLM, runs: dict[str, Run], prompts: list[torch.Tensor], repeats: int, what: str
) -> list[dict[str, Any]]:
    """A row for each contestant. They take turns at every prompt; who begins changes."""
    taken: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in runs}
    completions: dict[str, list[list[int]]] = {name: [] for name in runs}
    reports: dict[str, list[Any]] = {name: [] for name in runs}
    names = list(runs)
    for name in names:  # warm up, and let policies learn what they may take over
        runs[name](prompts[0], 0)
    for repeat in tqdm(range(repeats), desc=what, unit="round"):
        for number, ids in enumerate(prompts):
            for name in names:
                model.report = None
                started = time.perf_counter()
                out = runs[name](ids, 1000 * repeat + number)
                taken[name][number].append(time.perf_counter() - started)
                completions[name] += out[:, ids.shape[1] :].tolist()
                if model.report is not None:
                    reports[name].append(model.report)
            names = names[1:] + names[:1]
    times = {name: [statistics.median(prompt) for prompt in of] for name, of in taken.items()}
    rows = []
    for name in runs:
        row: dict[str, Any] = {
            "name": name,
            "against_plain": interval(times["plain"], times[name]),
            "against_no_drafts": interval(times["no drafts"], times[name]),
            "repeated_4grams": repeated_share(completions[name]),
        }
        if reports[name]:
            row |= {
                field: statistics.mean(getattr(report, field) for report in reports[name])
                for field in ("tokens_per_pass", "acceptance_rate", "assisted_share")
            }
            predicted = [r.predicted_speedup for r in reports[name] if r.predicted_speedup is not None]
            row["predicted_speedup"] = statistics.mean(predicted) if predicted else None
        rows.append(row)
    return rows


def interval(baseline: list[float], other: list[float]) -> dict[str, float]:
    """Median over the prompts of the ratio of seconds, with a 95% bootstrap interval over prompts."""
    rng = random.Random(0)
    ratios = [a / b for a, b in zip(baseline, other, strict=True)]
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"ratio": statistics.median(ratios), "low": medians[50], "high": medians[1949]}


def overhead(prompt: torch.Tensor, model: AssistedModelForCausalLM, call: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the processor that the adaptive policy itself takes in a round, waiting for the draft's law included."""

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


def measure(count: int, tokens: int, repeats: int, settings: list[str]) -> dict[str, Any]:
    models = pairs()
    prompts = [p.ids for p in islice(held_out_prompts(models["shipped pair"].tokenizer), count)]
    found: dict[str, Any] = {
        **machine(),
        "prompts": count,
        "new_tokens": tokens,
        "repeats": repeats,
        "results": {},
    }
    for setting in settings:
        call = SETTINGS[setting] | {"max_new_tokens": tokens, "pad_token_id": 1}
        for pair, model in models.items():
            names = tuple(POLICIES) if pair == "shipped pair" else HOPELESS
            title = f"{pair}, {setting}"
            found["results"][title] = race(model, contestants(model, names, call), prompts, repeats, title)
        found["overhead"] = overhead(prompts[0], models["shipped pair"], call)
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
    if args.threads:
        torch.set_num_threads(args.threads)
    found = (
        json.loads(args.read.read_text())
        if args.read
        else measure(args.prompts, args.tokens, args.repeats, args.settings)
    )
    show(found)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
