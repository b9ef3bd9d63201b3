"""The loop around the forward passes."""

import gc
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
from shared import Case, Section, about, heading, opened, page, paired, shown

from assisted import AssistedModelForCausalLM, DraftModel, decoding, generation
from assisted.calls.costs import CallLengths
from assisted.core.report import Recorder
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel
from assisted.fast import fused
from assisted.lab.bench import Bars, Rules, pad_token, read, speedup
from assisted.lab.bench.clock import turns
from assisted.lengths import Fixed
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never
from assisted.methods.eagle.draft import EagleDrafting
from assisted.methods.eagle.head import EagleHead
from assisted.methods.shared.chain import ChainDrafting
from assisted.methods.shared.guarded import Guarded
from assisted.methods.shared.lookup import Lookup
from assisted.methods.shared.model_drafter import ModelDrafting
from assisted.methods.shared.runner import HeadRunner

WARM_UP = 2  # calls
DRAFTS = {
    "no draft, this loop": ("ngram", Never()),
    "draft, Fixed(tokens=4)": ("zoo:draft", Fixed(4)),
    "draft, Adaptive()": ("zoo:draft", Adaptive()),
    "suffix, Adaptive()": ("suffix", Adaptive()),
    "EAGLE-3, Adaptive()": ("zoo:eagle3", Adaptive()),
}
"""By name: the draft and its length."""
PASSES = {
    (generation, "read_prompt"): "target",
    (CachedModel, "prefill"): "prompt",
    (CachedModel, "__call__"): "placed",
    (HeadRunner, "_read_first"): "prompt",
    (HeadRunner, "__call__"): "placed",
    (HeadRunner, "level"): "placed",
    (HeadRunner, "logits"): "alone",
    (EagleHead, "fuse"): "alone",
}
"""The functions that run a model, and the method of `Passes` that makes the call which repeats it."""
CAUSES = {
    "passes": list(PASSES),
    "looking for changed weights": [(fused, "fused")],
    "drafting around passes": [(ModelDrafting, "propose"), (EagleDrafting, "propose"), (Lookup, "propose")],
    "the chain of a draft": [(ChainDrafting, "draft_chain")],
    "accepting": [(decoding, "judge")],
    "learning from the verdict": [(Guarded, "observe")],
    "slots": [(CachedModel, "commit"), (SlotCache, "rewind"), (SlotCache, "commit"), (CachedModel, "run_only")],
    "counting": [(Recorder, "see")],
    "the loop": [(generation, "decode")],
    "preparing a call": [(AssistedModelForCausalLM, "generate")],
}
"""The functions of each cause. Their time excludes that of the other functions that they call."""

now = time.perf_counter
READ_PROMPT = CachedModel.prefill


class Clocks:
    """The seconds of each cause, without those of other causes inside it. causes: some of CAUSES."""

    def __init__(self, causes=tuple(CAUSES)):
        self.causes = causes
        self.seconds = dict.fromkeys(causes, 0.0) | {"draft lengths": 0.0}
        self.within = []  # seconds already counted, for each function that has not returned

    @contextmanager
    def running(self):
        """Inside, the functions are timed."""
        with ExitStack() as stack:
            for cause in self.causes:
                for owner, name in CAUSES[cause]:
                    stack.enter_context(
                        patch.object(owner, name, self.timing(getattr(owner, name), cause, owner, name))
                    )
            start = CallLengths.start

            def with_length(*args):
                length = start(*args)
                for name in ("budget", "go_on", "run_again", "observe"):
                    setattr(length, name, self.timing(getattr(length, name), "draft lengths"))
                return length

            if len(self.causes) > 1:
                stack.enter_context(patch.object(CallLengths, "start", with_length))
            yield

    def timing(self, function, cause, owner=None, name=""):
        def run(*args, **kwargs):
            self.noted(function, (owner, name), args, kwargs)
            self.within.append(0.0)
            started = now()
            try:
                return function(*args, **kwargs)
            finally:
                took = now() - started
                self.seconds[cause] += took - self.within.pop()
                if self.within:
                    self.within[-1] += took

        return run

    def noted(self, function, place, args, kwargs):
        """Called before each of the functions."""


class Passes(Clocks):
    """The forward passes of a call, to be run again: their arguments, and the lengths of their slots."""

    def __init__(self):
        super().__init__(("passes",))
        self.made = []

    def noted(self, function, place, args, kwargs):
        if not self.within:
            self.made.append(getattr(self, PASSES[place])(function, *args, **kwargs))

    def alone(self, method, *args):
        return partial(method, *args)

    def placed(self, method, runner, *args, **kwargs):
        cache, lengths = runner.cache, list(runner.cache.lengths)

        def again():
            cache.lengths = lengths
            method(runner, *args, **kwargs)

        return again

    def prompt(self, method, runner, *args):
        def again():
            cache = runner.cache
            cache.start = None
            for layer in cache.slot_layers:
                layer.filled = 0
            method(runner, *args)

        return again

    def target(self, method, call, lent):
        """The target reads its prompt through its own forward; it is read again in the way of a draft."""
        return self.prompt(READ_PROMPT, call.target, call.inputs.ids, None)

    def again(self):
        """Run all passes again. Returns the seconds that it takes."""
        gc.collect()
        with torch.inference_mode():
            started = now()
            for again in self.made:
                again()
            return now() - started


def pairs_of(target):
    """A target with every draft that fits it, by name."""
    pair = opened(target, "zoo:draft")
    drafts = {
        name: (DraftModel(pair.drafter.model) if spec == "zoo:draft" else spec, length)
        for name, (spec, length) in DRAFTS.items()
        if spec != "zoo:eagle3" or target == "zoo:target"
    }
    return {one.name: one.model for one in paired(pair.target, pair.tokenizer, drafts)}


def measure_target(target, prompts, repeats, new_tokens, bars):
    pairs = pairs_of(target)
    tokenizer = next(iter(pairs.values())).tokenizer
    texts = read(["code"], tokenizer, prompts)
    call = Rules(new_tokens).call(pad_token(tokenizer))
    for pair in pairs.values():
        for _ in range(WARM_UP):
            run(pair, texts[0], call)
        pair.reset_totals()
    seconds = {name: torch.zeros(3, repeats, prompts, dtype=torch.float64) for name in pairs}
    measuring = partial(bars, f"{target}, overhead")
    for name, number, repeat in turns(list(pairs), prompts, repeats, progress=measuring):
        seconds[name][:, repeat, number] = torch.tensor(timed(pairs[name], texts[number], call), dtype=torch.float64)
    totals = {name: pair.totals for name, pair in pairs.items()}
    causes = {name: Clocks() for name in pairs}
    finding = partial(bars, f"{target}, causes")
    for name, number, _ in turns(list(pairs), prompts, progress=finding):  # last, because clocks slow a call down
        with causes[name].running():
            run(pairs[name], texts[number], call)
    return [row(target, name, seconds[name], causes[name].seconds, totals[name]) for name in pairs]


def run(pair, prompt, call):
    pair.generate(prompt.ids, attention_mask=torch.ones_like(prompt.ids), **call)


def timed(pair, prompt, call):
    """Seconds of a call, of its forward passes alone, and of its forward passes inside the call."""
    passes = Passes()
    gc.collect()
    with passes.running():
        started = now()
        run(pair, prompt, call)
        whole = now() - started
    return whole, passes.again(), passes.seconds["passes"]


def row(target, name, seconds, causes, totals):
    """seconds: [3, R, N], what `timed` returned for R repeats over N prompts."""
    whole, alone, within = seconds.tolist()
    took, _, passes = seconds.sum((1, 2)).tolist()
    return {
        "target": target,
        "name": name,
        "overhead": beside_passes(alone, whole),
        "overhead_within": beside_passes(within, whole),
        "milliseconds_per_token": 1e3 * took / totals.new_tokens,
        "microseconds_per_round": 1e6 * (took - passes) / totals.target_passes,
        "tokens_per_pass": totals.tokens_per_pass,
        "acceptance_rate": totals.acceptance_rate,
        "causes": {cause: spent / sum(causes.values()) for cause, spent in causes.items()},
    }


def beside_passes(passes, whole):
    share = speedup(passes, whole)
    return {"ratio": 1 - share.ratio, "low": 1 - share.high, "high": 1 - share.low}


def measure(args):
    global now
    if args.cpu_time:
        now = time.process_time
    found = []
    with Bars() as bars:
        for target in args.targets:
            found += measure_target(target, args.prompts, args.repeats, args.new_tokens, bars)
    return {"about": about(args=args, clock="process time" if args.cpu_time else "wall time"), "rows": found}


def text_of(found):
    its, rows = found["about"], found["rows"]
    targets = list(dict.fromkeys(one["target"] for one in rows))
    names = [one["name"] if len(targets) == 1 else f"{one['target']}, {one['name']}" for one in rows]
    head = heading(
        "overhead",
        its,
        f"{', '.join(f'`{target}`' for target in targets)}, {its['prompts']} prompts, {its['new_tokens']} tokens each, "
        f"temperature 0, {its['repeats']} repeats, {its['clock']}, {its['dtype']}",
        "Overhead is the time of a call beyond that of its forward passes, as a share of the call. The first column takes the "
        "time of the passes, the prompt's included, from running them again alone right after the call. The second one takes "
        "it from the call itself. Both are medians over repeats, with a 95% bootstrap interval. The overhead of a round is "
        "that of the second column divided by the rounds.",
    )

    def share(name):
        return f"{{{name}[ratio]:.1%}} [{{{name}[low]:.1%}}, {{{name}[high]:.1%}}]"

    columns = {
        **{
            "draft": "{title}",
            "overhead, run again": share("overhead"),
            "overhead, in the call": share("overhead_within"),
        },
        **{"a round": "{microseconds_per_round:.0f} µs", "ms per token": "{milliseconds_per_token:.2f}"},
        "tokens per pass": "{tokens_per_pass:.2f}",
    }
    rows = [{"title": name, **one} for name, one in zip(names, rows, strict=True)]
    causes = [{"cause": cause} for cause in rows[0]["causes"] if cause != "passes"]
    shares = {"": "{cause}"}
    shares |= {one["title"]: lambda row, one=one: f"{one['causes'][row['cause']]:.1%}" for one in rows}
    title = (
        "This table shows the causes, as shares of a call. They come from runs with clocks inside, which take a little longer. "
        "A cause does not include the time of another cause that it calls."
    )
    return page(head, shown(columns, rows), title, shown(shares, causes))


overhead = Case(
    "overhead",
    """The overhead of a `generate` over the forward passes of its models, as a share of the call, and by cause.

After every call, its forward passes run again alone: the same passes of target and draft, in the same order, over the same
tokens and slots, by the same runners, including those over the prompts. The difference is overhead: preparing the call,
accepting, choosing draft lengths, drafting around passes, counting, and the first use of its slots. Float32, one row, held-out
code. For a CPU only, where a pass is finished when its call returns.
""",
    measure,
    options={
        "prompts": 6,
        "repeats": 5,
        "new_tokens": 96,
        "targets": (["zoo:target", "grown:0.25b"], "to measure"),
        "cpu_time": (False, "the seconds of this process alone, where others keep the machine busy"),
    },
    quick={"targets": ["zoo:target"], "prompts": 1},
    sections=(Section("benchmarks/the-loop", "overhead"),),
    markdown=text_of,
)
