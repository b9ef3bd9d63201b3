"""What each of two processes runs for test_tensor_parallel.py, under torchrun: `ranks.py FOLDER [CASE ...]`.

Each process loads its part of a target from FOLDER and writes the outcomes of all cases there, by name.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from architectures import build, half_right, random_ids
from eagle_heads import random_head
from medusa_heads import knowing_what_follows
from pairs import BY_NAME
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from assisted import AssistedModelForCausalLM, DraftTree, Eagle, LayerSkip, Medusa
from assisted.core.drafts import Draft, DraftingStopped
from assisted.core.text import Text
from assisted.engine.ranks import ranks_of
from assisted.methods.shared.base import Call, Drafter, Drafting

TOKENS = 24
CALL = {"max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
GREEDY = CALL | {"do_sample": False}
SAMPLED = CALL | {"do_sample": True, "temperature": 1.5}


def whole() -> PreTrainedModel:
    """The target in one piece, with the same weights in both processes."""
    return build(BY_NAME["llama"], num_hidden_layers=3, num_key_value_heads=2)


def prompt(rows: int = 1) -> torch.Tensor:
    """A text that repeats, so that lookups draft, too."""
    return random_ids(whole(), rows, 6, seed=1).repeat(1, 3)


class Clock:
    """Seconds that differ between the processes, as if each had been disturbed at other moments."""

    def __init__(self, rank: int):
        self.noise = torch.Generator().manual_seed(rank)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += float(torch.rand(1, generator=self.noise)) ** 4
        return self.now


class Failing(Drafter, Drafting):
    """Drafts one token; fails in one process, and proposes another token than the other process before."""

    def __init__(self, rank: int, fails_at: int):
        self.rank, self.left = rank, fails_at

    def start(self, call: Call) -> Drafting:
        return self

    def propose(self, text: Text, budget: int) -> Draft:
        self.left -= 1
        if self.left == 0 and self.rank == 1:
            raise RuntimeError("this process only")
        tokens = torch.full((text.rows, 1), 5 + self.rank * (self.left == 3))
        return Draft(tokens, torch.ones(text.rows, dtype=torch.int64))


class Cases:
    """All cases, by name. folder: of the target and the draft. rank: of the process."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.target = AutoModelForCausalLM.from_pretrained(
            folder / "target", dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
        )
        self.whole = whole()
        self.like = half_right(self.whole, noise=0.05)

    def run(self, draft: Any, call: dict[str, Any], rows: int = 1, target: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Text and counts of a call of a new pair. draft: a drafter, or what a caller passes."""
        own = isinstance(draft, Drafter)
        pair = AssistedModelForCausalLM.from_models(target or self.target, draft=None if own else draft, **kwargs)
        if own:
            pair.drafter = draft
        ids, rounds = prompt(rows), []
        pair.watch = lambda round: rounds.append(round.drafted)
        text = pair.generate(ids, attention_mask=torch.ones_like(ids), **call).tolist()
        return {"text": text, "rounds": rounds, "accepted": pair.report.accepted}

    def plain(self, rows: int = 1, **call: Any) -> list[list[int]]:
        ids = prompt(rows)
        return self.target.generate(ids, attention_mask=torch.ones_like(ids), **(call or GREEDY)).tolist()

    def plainly(self) -> dict[str, Any]:
        return {"text": self.plain(), "rows": self.plain(3)}

    def greedily(self) -> dict[str, Any]:
        heads, head = knowing_what_follows(self.whole), random_head(self.whole)
        drafts = {
            "draft model": self.like,
            "draft tree": DraftTree(self.like, nodes=12),
            "suffix": "suffix",
            "recycle": "recycle",
            "several": ["suffix", self.like],
            "early exit": "early-exit",
            "early exit 1": "early-exit:1",
            "layer skip": LayerSkip(0.25, window=8, every=1),
            "eagle": Eagle(head),
            "medusa": Medusa(heads),
        }
        found = {name: self.run(draft, GREEDY, draft_length=4) for name, draft in drafts.items()}
        for name in ("draft model", "draft tree", "layer skip"):
            found[f"{name}, rows"] = self.run(drafts[name], GREEDY, rows=3)
        return found

    def loaded(self) -> dict[str, Any]:
        """Through the package's own `from_pretrained`."""
        pair = AssistedModelForCausalLM.from_pretrained(
            self.folder / "target", draft=str(self.folder / "draft"), dtype=torch.float32, tp_plan="auto"
        )
        ids = prompt()
        text = pair.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY).tolist()
        return {"text": text, "parts": ranks_of(pair.target).size, "draft's": ranks_of(pair.drafter.model).size}

    def with_other_files(self) -> dict[str, Any]:
        """Costs that an earlier process left, which the other process does not find."""
        file = self.folder / f"costs-{self.rank}.json"
        os.environ["ASSISTED_COSTS"] = str(file)
        try:
            self.run(self.like, GREEDY)
            return self.run(self.like, GREEDY) | {"file": file.exists()}
        finally:
            os.environ["ASSISTED_COSTS"] = ""

    def with_other_clocks(self) -> dict[str, Any]:
        """Every decision that depends on measured seconds."""
        before, found = time.perf_counter, {}
        time.perf_counter = Clock(self.rank)
        try:
            for name, draft in {
                "chains": self.like,
                "lookups": ["suffix", self.like],
                "trees": DraftTree(self.like),
                "exits": "early-exit",
            }.items():
                found[name] = self.run(draft, GREEDY | {"max_new_tokens": 60})
        finally:
            time.perf_counter = before
        return found | {"text": self.plain(**(GREEDY | {"max_new_tokens": 60}))}

    def sampled(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, draft in {"draft model": self.like, "suffix": "suffix", "early exit": "early-exit:1"}.items():
            torch.manual_seed(7)
            found[name] = self.run(draft, SAMPLED, draft_length=3)
            torch.manual_seed(7)
            found[name] |= {"in one piece": self.run(draft, SAMPLED, target=self.whole, draft_length=3)["text"]}
        torch.manual_seed(7)
        return found | {"rows": self.run(self.like, SAMPLED, rows=3)}

    def sampled_with_other_seeds(self) -> dict[str, Any]:
        torch.manual_seed(self.rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.run(self.like, SAMPLED, draft_length=3)
        return found | {"warned": [str(warning.message) for warning in caught if "random" in str(warning.message)]}

    def with_other_criteria(self) -> dict[str, Any]:
        """As with a limit of seconds: the process with rank 1 stops at the tenth token."""
        start = prompt().shape[1]

        def enough(ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
            return self.rank == 1 and ids.shape[1] >= start + 10

        return self.run(self.like, GREEDY | {"stopping_criteria": [enough]}, draft_length=3)

    def with_a_drafter_that_fails(self) -> dict[str, Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = self.run(Failing(self.rank, 8), GREEDY, draft_length=3)
        return found | {"warned": [str(w.message) for w in caught if issubclass(w.category, DraftingStopped)]}

    def with_other_prompts(self) -> dict[str, Any]:
        pair = AssistedModelForCausalLM.from_models(self.target, draft="suffix")
        return {"error": _error(lambda: pair.generate(prompt() + self.rank, **GREEDY))}

    def copies(self) -> dict[str, Any]:
        return {"error": _error(lambda: AssistedModelForCausalLM.from_models(self.target, draft="self:int8"))}


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "none"


NAMES = [name for name in vars(Cases) if name[0] != "_" and name not in ("run", "plain")]


def main(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # a process that waits in vain fails
    rank = dist.get_rank()
    cases = Cases(folder, rank)
    found = {name: getattr(cases, name)() for name in names}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or NAMES)
