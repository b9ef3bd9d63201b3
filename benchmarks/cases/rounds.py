"""What a draft-verify step asks of the host of a GPU, counted with recorded captures."""

import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
import torch
from shared import SAMPLED, Case, Section, about, opened
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm.auto import tqdm

from assisted import Eagle, distribution
from assisted.core import acceptance
from assisted.core import host as clock
from assisted.engine import trust
from assisted.fast.capture import Captures, CudaGraphs
from assisted.methods.shared.guarded import Guarded

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from recording import Recording, record_captures

DRAFTS = {
    "draft model, 4 tokens": ("zoo:draft", 4),
    "draft model, adaptive": ("zoo:draft", "adaptive"),
    "suffix, 4 tokens": ("suffix", 4),
    "early exit, 4 tokens": ("early-exit:2", 4),
    "Medusa, 4 tokens": ("zoo:medusa", 4),
    "EAGLE-3, 4 tokens": ("zoo:eagle3", 4),
    "EAGLE-3 chain, 4 tokens": (Eagle("zoo:eagle3", tree=False), 4),
    "EAGLE-3 chain, adaptive": (Eagle("zoo:eagle3", tree=False), "adaptive"),
    "EAGLE-3, adaptive": ("zoo:eagle3", "adaptive"),
    "suffix + EAGLE-3, 4 tokens": (["suffix", "zoo:eagle3"], 4),
}
CALLS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, **SAMPLED}}
SHOWN = ("operations", "reads", "replays", "tokens")
READS = {"item", "tolist", "numpy", "cpu", "nonzero", "equal", "__bool__", "__int__", "__float__", "__index__"}
NO_KERNEL = ("aten::_local_scalar_dense", "aten::detach_")
PROMPT = "def fibonacci(n):\n    "
SECONDS, REPLAYED = 8e-6, 2e-6  # of an operation, and of one within a replay
LAST = 8


class _Operations(TorchDispatchMode):
    """Counts the operations that run a kernel, but for those of replays, and simulates a clock."""

    def __init__(self):
        super().__init__()
        self.names, self.replays, self.replaying, self.seconds = Counter(), 0, False, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or func.name() in NO_KERNEL):
            self.names[func.name()] += not self.replaying
            self.seconds += REPLAYED if self.replaying else SECONDS
        return func(*args, **(kwargs or {}))

    def perf_counter(self):
        return self.seconds


class _Reads(TorchFunctionMode):
    """Counts the calls in which the host reads numbers of a tensor."""

    def __init__(self, operations):
        super().__init__()
        self.operations, self.count, self.depth = operations, 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        reads = getattr(func, "__name__", "") in READS and not self.operations.replaying
        self.count += reads and self.depth == 0
        self.depth += reads
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.depth -= reads


def _sorted_nucleus(processor, ids, scores, any_of_equal=False):
    return processor(ids[:, :1], scores.flatten(0, 1)).view_as(scores)


@contextmanager
def counting():
    """A context in which everything is counted as on a GPU. Yields a list that gets the numbers before every round, and whether
    all rows run in it and have more than LAST tokens to go."""
    operations, replay, record, propose = _Operations(), Recording.__call__, Recording.__init__, Guarded.propose
    found, recorded = [], 0

    def replayed(recording):
        operations.replays += 1
        operations.replaying = True
        try:
            return replay(recording)
        finally:
            operations.replaying = False

    def recording(*args):
        nonlocal recorded
        recorded += 1
        record(*args)

    def asked(captures, key):
        nonlocal recorded
        known = Captures.was_asked(captures, key)
        recorded += not known
        return known

    def proposed(drafting, text, budget):
        numbers = operations.names.total(), reads.count, operations.replays, recorded, sum(text.lengths) / text.rows
        found.append((numbers, not any(text.ended) and text.room > LAST))
        return propose(drafting, text, budget)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record_captures(patch)
        patch.setattr(Recording, "__call__", replayed)
        patch.setattr(Recording, "__init__", recording)
        patch.setattr(CudaGraphs, "was_asked", asked)
        patch.setattr(Guarded, "propose", proposed)
        patch.setattr(trust, "active_modes", list)  # the modes here only count
        patch.setattr(clock, "time", operations)
        patch.setattr(acceptance, "sample", acceptance.by_race)
        patch.setattr(distribution, "_nucleus", _sorted_nucleus)
        with _Reads(operations) as reads, operations:
            yield found


def per_round(draft, length, call, rows=1, new_tokens=64, target="zoo:target", calls=3):
    """Operations, reads, replays and tokens of a round: means over a call, without its first two rounds, those that record a
    capture or are the first of their shape, and those near the end of a row.

    target, draft, length: of the pair. call: arguments of `generate`.
    """
    with counting() as found:
        pair = opened(target, draft=draft, draft_length=length)
        ids = pair.tokenizer(PROMPT, return_tensors="pt").input_ids.repeat(rows, 1)
        more = {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0, **call}
        for _ in range(calls):  # the first ones record
            torch.manual_seed(0)
            found.clear()
            pair.generate(ids, attention_mask=torch.ones_like(ids), **more)
    rounds = [
        [new - old for old, new in zip(before, after, strict=True)]
        for (before, _), (after, regular) in pairwise(found[2:])
        if regular
    ]
    rounds = [(*counts, tokens) for *counts, recorded, tokens in rounds if not recorded]
    return {name: round(fmean(each), 1) for name, each in zip(SHOWN, zip(*rounds, strict=True), strict=True)}


def measure(args):
    torch.set_num_threads(1)
    chosen = [(name, call, rows) for name in args.drafts or DRAFTS for call in CALLS for rows in args.rows]
    rounds = [
        {"draft": name, "call": call, "rows": rows, **per_round(*DRAFTS[name], CALLS[call], rows, args.new_tokens)}
        for name, call, rows in tqdm(chosen)
    ]
    return {"about": about(args=args), "rounds": rounds}


rounds = Case(
    "rounds",
    """The host's work in a draft-verify step on a GPU: operations outside of captured functions, reads, and replays.

Counted on a CPU, where captures are recorded and replayed as CUDA graphs would be. Nothing is timed: seconds are simulated, and
adaptive lengths depend on those. Views of tensors are not counted, because they run no kernel.
""",
    measure,
    options={"rows": ([1, 4], "of a call"), "new_tokens": 64, "drafts": ([], "of: " + "; ".join(DRAFTS))},
    quick={"rows": [1], "drafts": ["suffix, 4 tokens"]},
    sections=(Section("benchmarks/gpu", "rounds"),),
    what="the shipped pair, {new_tokens} tokens",
    notes=(
        "Operations that run a kernel outside of captured functions, reads by the host, replays, and tokens of each row: means "
        "over the rounds of a call. They are counted on a CPU with recorded captures, not timed.",
    ),
    columns={"draft": "{draft}", "call": "{call}", "rows": "{rows}", **{name: f"{{{name}:g}}" for name in SHOWN}},
    rows=lambda found: found["rounds"],
)
