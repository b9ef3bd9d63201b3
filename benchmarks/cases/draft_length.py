"""Every draft length policy on the shipped pair and on a hopeless draft.

Held-out code, float32. Two baselines: plain `generate`, and this package's loop without drafts, which is faster. `cold`
policies start every call without measurements; the others keep those of earlier calls, as they do in use.
"""

from dataclasses import dataclass

import torch
from shared import SAMPLED, about, below, heading, opened, paired, raced
from transformers import AutoModelForCausalLM

from assisted import DraftModel
from assisted.lab.bench import Interval, Result, Rules, read, speedup
from assisted.lab.bench.table import percent
from assisted.lengths import Confidence, DraftLength, Fixed
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

SETTINGS = {"greedy": {}, "sampled": SAMPLED}
OPTIONS = {
    "prompts": 16,
    "repeats": 3,
    "new_tokens": 256,
    "no_compile": (True, "always"),
    "settings": (list(SETTINGS), "how tokens are chosen"),
}
QUICK = {"settings": ["greedy"]}
SECTIONS = ()


@dataclass(frozen=True)
class Cold:
    """A policy that forgets earlier calls."""

    policy: DraftLength

    def start(self, earlier=None):
        return self.policy.start()


POLICIES = {
    "no drafts": Never(),
    **{f"fixed {n}": Fixed(n) for n in (1, 2, 3, 4, 6, 8)},
    "confidence 0.4": Confidence(),
    "adaptive": Adaptive(),
    "adaptive, cold": Cold(Adaptive()),
}
HOPELESS = ("no drafts", "fixed 4", "confidence 0.4", "adaptive", "adaptive, cold")


def measure(args):
    pair = opened("zoo:target", "zoo:draft")
    torch.manual_seed(0)
    hopeless = AutoModelForCausalLM.from_config(pair.drafter.model.config).eval()
    drafts = {"shipped pair": DraftModel(pair.drafter.models[0]), "hopeless draft": DraftModel(hopeless)}
    prompts = read(["code"], pair.tokenizer, args.prompts)
    results = {}
    for setting in args.settings:
        for name, draft in drafts.items():
            chosen = {
                policy: (draft, POLICIES[policy]) for policy in (POLICIES if name == "shipped pair" else HOPELESS)
            }
            rules = Rules(args.new_tokens, **SETTINGS[setting])
            result = raced(args, pair, paired(pair.target, pair.tokenizer, chosen), prompts, rules)
            results[f"{name}, {setting}"] = rows(result)
    return about(pair, args, results=results)


def rows(result: Result):
    """The speedups of each policy over both baselines."""
    ran = {row.name: row for row in result.points[0].ran}
    shown = ("tokens_per_pass", "acceptance_rate", "repeated_4grams")
    return [
        {
            "name": name,
            "against_plain": vars(speedup(ran["plain"].seconds, row.seconds)),
            "against_no_drafts": vars(speedup(ran["no drafts"].seconds, row.seconds)),
            **{field: getattr(row, field) for field in shown},
        }
        for name, row in ran.items()
    ]


def markdown(found):
    head = heading("draft_length", found, f"{found['prompts']} prompts, {found['new_tokens']} tokens, {found['dtype']}")
    columns = ("", "policy", "speedup over plain", "over no drafts", "tokens per pass", "accepted", "repeated 4-grams")
    cells = [
        [
            title,
            row["name"],
            *(Interval(**row[f"against_{baseline}"]) for baseline in ("plain", "no_drafts")),
            f"{row.get('tokens_per_pass', 1):.2f}",
            percent(row.get("acceptance_rate")),
            percent(row["repeated_4grams"]),
        ]
        for title, rows in found["results"].items()
        for row in rows
    ]
    return below(head, columns, cells)
