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
# # 12. Batches and serving
#
# **With many requests at once, when is drafting no longer worthwhile?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks
# [01](01_why_decoding_is_slow.ipynb) and [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import itertools
import math
import random
import sys
import time

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from assisted import AssistedModelForCausalLM, zoo
from assisted.engine.recurrent import slots_for, target_runner
from assisted.engine.traits import Traits
from assisted.fast.fused import fused
from assisted.lengths.policies import Never
from assisted.methods.shared.training.data import pack, tokenize
from assisted.zoo import corpus

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 16-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"
# (about 12 GB, in float32 because texts are compared)

torch.set_num_threads(1)
figure_style()
# on a CPU, the processor time of this process, which does not depend on the load of the machine
clock = time.perf_counter if torch.cuda.is_available() else time.process_time

# %% [markdown]
# ## Question
#
# So far, one request had the whole machine. Notebooks 08 to [11](11_train_your_own_draft.ipynb) made the draft better,
# and every accepted token saved a pass. This works because a target pass has time to spare. The pass has to fetch all
# weights from memory, for one token or for five, and meanwhile the arithmetic units are idle ([notebook
# 01](01_why_decoding_is_slow.ipynb)).
#
# A server rarely handles only one request. It puts many of them into one **batch**, with one row for each. A forward
# pass reads the weights once and computes a token for every row. So batching uses the same idle time that drafting
# needs. There must be a batch size from which drafting loses. Where is it, and can we predict it?
#
# ## Your prediction
#
# Take the pair that ships with the package, drafts of four tokens, and one core. On the texts below, each pass yields
# about 3.4 tokens per request. From which batch size on is drafting no faster than the same loop without drafts?

# %%
prediction = {"rows from which drafts of 4 tokens lose": None}

# %% [markdown]
# ## By hand: two costs, and a batch size that must lose
#
# Suppose that a forward pass has a fixed cost for fetching the weights and a cost for each token that it reads:
#
# $$T(m) = t_0 + t_1 m$$
#
# With $B$ rows, a baseline pass reads $B$ tokens. A verification pass reads $B(g+1)$ tokens: in each row, the $g$
# drafted tokens and the last token before them. The draft runs $g$ times over $B$ tokens, at a cost of $d_0 + d_1 B$
# each. A round, or draft-verify step, yields $E$ tokens in every row, including the target's own. So the speedup is
#
# $$S(B) = \frac{E\,T(B)}{T(B(g+1)) + g\,(d_0 + d_1 B)}$$
#
# Take a toy machine with $t_0 = 20$, $t_1 = 1$, $d_0 = 1$, $d_1 = 0.05$ (milliseconds). The draft has $g = 4$ and
# $E = 3.36$, the value of notebook 02 for an acceptance rate of 0.8.
#
# - One row: $3.36 \cdot 21 / (25 + 4.2) = 2.42$. This is a good speedup.
# - 100 rows: $3.36 \cdot 120 / (520 + 24) = 0.74$. Drafting costs a quarter of the speed.
#
# In very large batches only $t_1$ and $d_1$ matter, and $S$ approaches $E / (g + 1 + g\,d_1/t_1)$. The numerator is at
# most $g + 1$. So every draft *must* lose in the end, unless it is both free and always right. Exercise 1 asks for the
# exact batch size. Here we try some:

# %%
toy = dict(t0=20, t1=1, d0=1, d1=0.05)


def speedup(rows, tokens, length, t0, t1, d0, d1):
    baseline = t0 + t1 * rows
    verify = t0 + t1 * rows * (length + 1)
    return tokens * baseline / (verify + length * (d0 + d1 * rows))


for rows in (1, 8, 16, 23, 24, 32, 100):
    print(f"{rows:4} rows: {speedup(rows, 3.36, 4, **toy):.2f}")

# %% [markdown]
# ## From scratch: ragged rows, and rows in lockstep
#
# The formula assumes that $E$ does not depend on the batch. This is not obvious. Rows accept different numbers of
# tokens: in the same round, one row yields five tokens and another row one. Then their texts have different lengths.
# There are two ways to continue.
#
# - **In lockstep.** All rows continue from the same position. In each round, every row accepts as many tokens as the
#   row with the fewest accepted tokens.
# - **Ragged.** Every row keeps all tokens that it accepted. Then the rows are at different positions of their texts,
#   and the cache has to support this.
#
# We can compare the two ways without decoding twice. A greedy draft has one guess at each position, and the guess
# depends only on the text before it. While guesses are accepted, this text is the target's. So one draft pass over the
# target's text tells us at every position whether the guess would be right.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype=torch.float32).to(device).eval()
draft = AutoModelForCausalLM.from_pretrained(zoo.resolve(DRAFT), dtype=torch.float32).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
model = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer)

files = random.Random(1).sample(corpus.held_out_files(), 30)
prompts = pack(tokenize(tokenizer, map(corpus.read, files)), context=48, rows=32).to(device)
ROWS, NEW, LENGTH = len(prompts), 33, 4  # the first new token comes from the prompt's pass; 32 remain
call = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)

text = model.generate(prompts, attention_mask=torch.ones_like(prompts), assisted=False, **call)
with torch.no_grad():
    guesses = draft(input_ids=text).logits.argmax(-1)[:, prompts.shape[1] - 1 : -1]
right = guesses.eq(text[:, prompts.shape[1] :])  # [rows, new tokens]: would the draft have guessed it?
print(
    f"{ROWS} rows, share of right guesses: {right.float().mean():.0%} overall, by row from"
    f" {right.float().mean(1).min():.0%} to {right.float().mean(1).max():.0%}"
)

# %% [markdown]
# Now we can count the rounds for both ways. `room` is the number of tokens that may still be drafted, because the last
# token of a text is the target's own.


# %%
def agreed(row, position, room):
    """The number of consecutive right guesses from here on, at most `room`."""
    count = 0
    while count < room and right[row, position + count]:
        count += 1
    return count


def rounds_ragged(rows, length):
    """The rounds that each row needs for its text if rows are ragged."""
    found = []
    for row in rows:
        position, rounds = 1, 0
        while position < NEW:
            position += agreed(row, position, min(length, NEW - position - 1)) + 1
            rounds += 1
        found.append(rounds)
    return found


def rounds_in_lockstep(rows, length):
    """The rounds that all rows need together if each round stops at the first wrong guess of any row."""
    position, rounds = 1, 0
    while position < NEW:
        position += min(agreed(row, position, min(length, NEW - position - 1)) for row in rows) + 1
        rounds += 1
    return rounds


eight = range(8)
print("rounds of 8 ragged rows:", rounds_ragged(eight, LENGTH))
print("rounds in lockstep:", rounds_in_lockstep(eight, LENGTH), "for all rows, baseline:", NEW - 1)

# %% [markdown]
# ## The library's call: `generate` with a batch
#
# `generate` takes batches as usual. The rows are ragged. Each row has its own length in the cache, and finished rows
# are not computed any more. The report counts a forward pass once for every row that takes part. The count must equal
# the sum of the rounds above exactly.


# %%
def passes(rows, **more):
    ids = prompts[rows[0] : rows[-1] + 1]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), draft_length=LENGTH, **call, **more)
    assert output.equal(text[rows[0] : rows[-1] + 1]), "the text must be the baseline's in any batch"
    return model.report.target_passes


assert passes(eight) == sum(rounds_ragged(eight, LENGTH))
print(model.report.target_passes, "passes of a row; tokens per pass", round(model.report.tokens_per_pass, 2))

# %% [markdown]
# Sometimes the library has to run in lockstep, too. One case is a logits processor that it does not know. Such a
# processor may look at all rows, and it may need to see each token once and in order. Here is one that does nothing.


# %%
class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


assert passes(eight, logits_processor=LogitsProcessorList([Unknown()])) == 8 * rounds_in_lockstep(eight, LENGTH)
print(model.report.target_passes, "passes of a row; tokens per pass", round(model.report.tokens_per_pass, 2))

# %% [markdown]
# ### The answer, by the clock
#
# A model of costs explains. Only a clock answers. So before any formula, we measure whole calls: once with drafts of four
# tokens, and once with a policy that never drafts, in the same loop. The time for reading the prompt is subtracted.


# %% tags=["measured"]
def call_seconds(rows, length, new):
    ids = prompts[:rows]
    start = clock()
    model.generate(ids, attention_mask=torch.ones_like(ids), draft_length=length, **{**call, "max_new_tokens": new})
    return clock() - start


def crossing_rows(speedups):
    """The batch size at which the speedup is 1, between the measured ones. Infinite if it never is."""
    for (few, high), (many, low) in itertools.pairwise(speedups.items()):
        if high > 1 >= low:
            return round(few * (many / few) ** ((high - 1) / (high - low)))
    return 1 if min(speedups.values()) <= 1 else math.inf


runs = {"prompt": (Never(), 1), "baseline": (Never(), NEW), "drafts": (LENGTH, NEW)}
taken = {(name, rows): [] for rows in (1, 4, 8, 16) for name in runs}
for turn in range(2):
    for name, rows in taken:
        taken[name, rows].append(call_seconds(rows, *runs[name]))
best = {key: min(seconds) for key, seconds in taken.items()}
by_clock = {
    rows: (best["baseline", rows] - best["prompt", rows]) / (best["drafts", rows] - best["prompt", rows])
    for rows in (1, 4, 8, 16)
}
show(table(["rows", "speedup by the clock, on this machine"], [[rows, ratio] for rows, ratio in by_clock.items()]))
compare(prediction, {name: crossing_rows(by_clock) for name in prediction})

# %% [markdown]
# **This is the answer for this pair, these texts and this machine.** The rest of the notebook explains it: what a pass
# costs, what the formula makes of it, and why the formula is kinder than the clock.
#
# ### What a forward pass costs
#
# Why there? We time passes of both models after 64 tokens of context, with slots for keys and values
# and a separate length for each row, as in `generate`. Costs are in units of a target pass over one token. The passes
# take turns, and we use the fastest of all turns, because the machine may be busy.


# %%
def ready(network, rows):
    """A runner of the model that has read 64 tokens in each row."""
    masks = Traits.of(network).masks
    run = target_runner(fused(network), slots_for(network, None, rows, 96, masks), masks)
    run.prefill(text[:rows, :64], None)
    return run


def pass_seconds(run, rows, width):
    ids = text[:rows, 64 : 64 + width]
    for _ in range(2):  # the first one refills the processor's caches
        start = clock()
        run(ids).argmax(-1).tolist()  # on an accelerator this waits for the result
        seconds = clock() - start
        run.commit([0] * rows)  # commit no token
    return seconds


# %% tags=["measured"]
SIZES = (1, 2, 4, 8, 16, 32)
timed = {}
with torch.no_grad():
    for rows in SIZES:
        large, small = ready(target, rows), ready(draft, rows)
        timed |= {("baseline", rows): (large, 1), ("verify", rows): (large, LENGTH + 1), ("draft", rows): (small, 1)}
    samples = {key: [] for key in timed}
    for turn in range(16):
        for (kind, rows), (run, width) in timed.items():
            samples[kind, rows].append(pass_seconds(run, rows, width))
unit = min(samples["baseline", 1])
cost = {key: min(taken) / unit for key, taken in samples.items()}
show(
    table(
        ["rows", "baseline pass", "verification pass, 5 positions", "draft pass"],
        [(rows, cost["baseline", rows], cost["verify", rows], cost["draft", rows]) for rows in SIZES],
    )
)

# %% [markdown]
# Then we fit the two lines: $T(m) = t_0 + t_1 m$ to baseline and verification passes together, and $d_0 + d_1 B$ to the
# draft's passes. We minimize relative errors, so that small passes count as much as large ones.


# %% tags=["measured"]
def line(points):
    """Least squares of relative errors. Returns the cost at 0 and the cost of one more token."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    weights = torch.stack([1 / y, x / y], 1)
    return torch.linalg.lstsq(weights, torch.ones(len(y), 1, dtype=torch.float64)).solution[:, 0].tolist()


t0, t1 = line(
    [(rows, cost["baseline", rows]) for rows in SIZES] + [(rows * (LENGTH + 1), cost["verify", rows]) for rows in SIZES]
)
d0, d1 = line([(rows, cost["draft", rows]) for rows in SIZES])
fitted = dict(t0=t0, t1=t1, d0=d0, d1=d1)
per_pass = {g: ROWS * (NEW - 1) / sum(rounds_ragged(range(ROWS), g)) for g in (1, 2, 4, 8)}
print(", ".join(f"{name} {value:.3f}" for name, value in fitted.items()))
print("tokens per pass by draft length:", {g: round(value, 2) for g, value in per_pass.items()})

# %% [markdown]
# ## The picture: the clock, the formula, and what lies between
#
# The upper panel shows the speedup that the formula gives for these costs and counts, with drafts of 1, 2, 4 and 8
# tokens. The dots use the same costs, added up round by round for the first rows of the 32, with drafts of 4 tokens.
# The crosses are clock measurements with drafts of 4 tokens. The lower panel shows the counted tokens per pass: the
# mean over all rows, a dot for each batch, and the result in lockstep.

# %% tags=["folded"]
groups = {rows: [range(first, first + rows) for first in range(0, ROWS, rows)] for rows in SIZES}
in_lockstep = {
    rows: (NEW - 1) * len(each) / sum(rounds_in_lockstep(one, LENGTH) for one in each) for rows, each in groups.items()
}
spread = {rows: [rows * (NEW - 1) / sum(rounds_ragged(one, LENGTH)) for one in each] for rows, each in groups.items()}


def replayed(rows, g):
    """The speedup of one batch, round by round. Finished rows drop out, and the draft also reads the prompts."""
    rounds = rounds_ragged(range(rows), g)
    ours = d0 + d1 * rows * prompts.shape[1]
    for number in range(max(rounds)):
        running = sum(count > number for count in rounds)
        ours += t0 + t1 * running * (g + 1) + g * (d0 + d1 * running)
    return (NEW - 1) * (t0 + t1 * rows) / ours


# %% tags=["folded", "measured"]
figure, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.4))
sizes = torch.logspace(0, 7, 60, base=2).tolist()
height = -1.0
for g in reversed(per_pass):
    curve = [speedup(rows, per_pass[g], g, **fitted) for rows in sizes]
    main = g == LENGTH
    top.plot(sizes, curve, color=COLOURS["draft"], alpha=1 if main else 0.55, linewidth=2.6 if main else 1.3)
    height = max(curve[-1], height + 0.13)  # labels must not overlap
    right_of = dict(xytext=(6, 0), textcoords="offset points", va="center", annotation_clip=False)
    top.annotate(f"{g}", (sizes[-1], height), color=COLOURS["draft"], **right_of)
top.plot(SIZES, [replayed(rows, LENGTH) for rows in SIZES], "o", color=COLOURS["draft"], markersize=5)
top.plot(list(by_clock), list(by_clock.values()), "x", color=COLOURS["accent"], markersize=8, markeredgewidth=2)
top.axhline(1, color=COLOURS["plain"], linewidth=1.2)
words = {"●  4 tokens, round by round": "draft", "×  4 tokens, by the clock": "accent", "—  no draft": "plain"}
for number, (word, colour) in enumerate(words.items()):
    top.text(0.03, 0.2 - 0.07 * number, word, color=COLOURS[colour], transform=top.transAxes)
top.set(title="speedup, drafts of 1, 2, 4, 8 tokens", xlabel="rows in a batch", ylim=(0, None), xlim=(0.8, 190))
for rows, values in spread.items():
    below.plot([rows] * len(values), values, ".", color=COLOURS["accepted"], alpha=0.4)
below.plot(SIZES, [per_pass[LENGTH]] * len(SIZES), color=COLOURS["accepted"])
below.plot(SIZES, list(in_lockstep.values()), color=COLOURS["rejected"], marker="o", markersize=4)
above = dict(xytext=(0, 6), textcoords="offset points")
below.annotate("ragged", (32, per_pass[LENGTH]), ha="right", color=COLOURS["accepted"], **above)
below.annotate("in lockstep", (8, in_lockstep[8]), color=COLOURS["rejected"], **above)
below.set(title="tokens per pass, drafts of 4", xlabel="rows in a batch", ylim=(0.8, None), xlim=(0.8, 40))
for axis in (top, below):
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
plt.show()

# %% [markdown]
# Where does each of the three cross 1, for drafts of four tokens?

# %% tags=["measured"]
by_formula = {rows: speedup(rows, per_pass[LENGTH], LENGTH, **fitted) for rows in range(1, 200)}
by_rounds = {rows: replayed(rows, LENGTH) for rows in SIZES}
crossings = [
    ["by the clock: the answer", crossing_rows(by_clock)],
    ["costs added up, round by round", crossing_rows(by_rounds)],
    ["the formula", crossing_rows(by_formula)],
]
show(table(["drafts of 4 tokens lose from", "rows"], crossings))
for g in per_pass:
    curve = {rows: speedup(rows, per_pass[g], g, **fitted) for rows in range(1, 200)}
    print(f"by the formula, drafts of {g} lose from {crossing_rows(curve)} rows on")

# %% [markdown]
# - **The speedup falls with every row and crosses 1 at about ten rows on this CPU, at two on a newer one.** Longer drafts cross it first, because
#   each row then adds more positions to the pass.
# - **The formula is kinder than the round-by-round sum.** A batch is finished when its slowest row is finished. Near
#   the end only a few rows run, at the cost of small batches. A server replaces finished rows with new requests, so it
#   is closer to the curve. [Notebook 18](18_serving.ipynb) does that.
# - **The clock is the judge.** Both sums leave out the work around the passes, the attention over a growing text, and the
#   effects of the processor's caches. So use a formula to decide *what to try*, and a clock to decide.
# - **Ragged rows keep their tokens per pass. In lockstep the tokens per pass fall.** With 32 rows, there is nearly
#   always one whose first guess is wrong. Then the batch is as slow as without a draft, but more expensive.
#
# The baseline here is the library's loop without drafts. It drops finished rows and reads prompts with less padding, so
# it is faster than plain `generate`; against that one, the same drafts are ahead up to larger batches
# (`docs/benchmarks/batches.md`).
#
# This run cannot show your crossover. It depends on $t_1/t_0$, which is large on a small CPU. On an accelerator with a
# large model, it takes dozens or hundreds of tokens to fill a pass, so the crossover is far to the right. Also, greedy
# texts of a small target repeat themselves, which makes $E$ look better.
#
# ## When it loses: a busy server
#
# **In large batches, as shown.** Two things help, in this order: shorter drafts, then none. The library's default draft
# length, `"adaptive"`, does both. It measures the costs of its own passes and adds up the gains of all rows in the
# batch. It stops where a position costs more than all rows together gain from it. Drafting is disabled whenever it does
# not pay off, and tried again from time to time. Servers such as vLLM and SGLang draft, too. The number of drafted
# tokens is usually fixed in their command line, for all batch sizes, so choose it for the load that you expect.
# [Notebook 14](14_capstone.ipynb) hands a pair over to such a server.
#
# **In lockstep.** A target with recurrent layers (Mamba, linear attention) has one state for all rows, so its batches
# must run in lockstep. Small batches gain, large ones hardly.
#
# **Long texts are the exception.** Each row also reads its own keys and values, and rows cannot share them. After
# thousands of tokens this costs more than the weights. All positions of a row share this reading, so drafting can be
# worthwhile in large batches again (arXiv 2408.11049).
#
# ## Takeaway
#
# > Batching and drafting use the same idle time, so there is a batch size from which drafts lose: two to ten rows by the
# > clock on a small CPU. $E\,T(B) = T(B(g+1)) + g\,(d_0 + d_1 B)$ explains it and errs on the kind side. Beyond this
# > size, draft less or not at all. Tokens per pass do not fall with the batch size, as long as rows are ragged. A result
# > measured with one request does not carry over to a busy server.
#
# ## Exercises
#
# ### 1. Predict the crossover
#
# Write `crossover(tokens, length, t0, t1, d0, d1)`. It returns the batch size $B$, not rounded, at which $S(B) = 1$.
# Return 0 if drafting is not worthwhile even for the smallest batch, and `float("inf")` if it always is.


# %% tags=["check"]
def check_1(candidate, seed=0):
    found = candidate(3.36, 4, **toy)
    assert found in (0, float("inf")) or abs(speedup(found, 3.36, 4, **toy) - 1) < 1e-6, (
        f"on the toy machine, the speedup with {found} rows is {speedup(found, 3.36, 4, **toy):.3f}, not 1"
    )
    assert candidate(5.0, 4, t0=20, t1=1, d0=1, d1=0) == float("inf"), "free tokens that are always right always gain"
    assert candidate(1.1, 4, t0=20, t1=1, d0=5, d1=0.1) == 0, "if the fixed part already loses, the answer is 0"
    luck = random.Random(seed)
    for _ in range(200):
        costs = dict(t0=luck.uniform(5, 50), t1=luck.uniform(0.1, 2), d0=luck.uniform(0, 2), d1=luck.uniform(0, 0.2))
        length = luck.randint(1, 8)
        tokens = luck.uniform(1, length + 1)
        rows = candidate(tokens, length, **costs)
        if rows == 0:
            assert speedup(1e-9, tokens, length, **costs) <= 1 + 1e-9, "a small batch would still gain"
        elif rows == float("inf"):
            assert speedup(1e9, tokens, length, **costs) >= 1 - 1e-9, "a huge batch would lose"
        else:
            assert abs(speedup(rows, tokens, length, **costs) - 1) < 1e-6, "the speedup at your crossover is not 1"


# %% tags=["exercise"]
def crossover(tokens, length, t0, t1, d0, d1):
    raise NotImplementedError("solve S(B) = 1 for B")


attempt(check_1, crossover)


# %% tags=["answer"]
# E (t0 + t1 B) = t0 + t1 (g + 1) B + g (d0 + d1 B): collect the fixed part as the gain, the part per row as the price
def crossing(tokens, length, t0, t1, d0, d1):
    gain = (tokens - 1) * t0 - length * d0
    price = (length + 1 - tokens) * t1 + length * d1
    if gain <= 0:
        return 0
    return gain / price if price > 0 else float("inf")


attempt(check_1, crossing)

# %% [markdown]
# ### 2. In lockstep
#
# Let `survival[k]` be the probability that a row accepts at least `k + 1` tokens of its draft. The rows of a batch are
# independent and run in lockstep. Write `tokens_in_lockstep(survival, rows)`. It returns the expected number of tokens
# that a round yields for each row, including the target's own.


# %% tags=["check"]
def check_2(candidate, seed=0):
    luck = random.Random(seed)
    survival = list(itertools.accumulate((luck.uniform(0.3, 1) for _ in range(3)), float.__mul__))
    exactly = [before - after for before, after in itertools.pairwise([1, *survival, 0])]  # of accepting 0, 1, 2, 3
    for rows in (1, 2, 3):
        expected = 0.0
        for outcome in itertools.product(range(4), repeat=rows):
            chance = math.prod(exactly[count] for count in outcome)
            expected += chance * (min(outcome) + 1)
        found = candidate(survival, rows)
        assert abs(found - expected) < 1e-9, f"for {rows} rows, all cases give {expected:.4f}, not {found:.4f}"


# %% tags=["exercise"]
def tokens_in_lockstep(survival, rows):
    raise NotImplementedError("with what probability do all rows accept k tokens?")


attempt(check_2, tokens_in_lockstep)


# %% tags=["answer"]
# the expectation of a count is the sum over k of the probability that it is at least k
def lockstep_tokens(survival, rows):
    return 1 + sum(chance**rows for chance in survival)


starts = [(row, position) for row in range(ROWS) for position in range(1, NEW - LENGTH)]
lasting = [sum(agreed(row, position, LENGTH) > k for row, position in starts) / len(starts) for k in range(LENGTH)]
for rows in SIZES:
    print(f"{rows:2} rows: {lockstep_tokens(lasting, rows):.2f} for independent rows, {in_lockstep[rows]:.2f} counted")
attempt(check_2, lockstep_tokens)

# %% [markdown] tags=["answer"]
# A single row has fewer tokens per pass than its survival probabilities predict. A round begins after a wrong guess,
# where the text is hard, but survival was counted everywhere. The hard positions of different rows do not coincide, so
# independence is a reasonable approximation in larger batches.

# %% [markdown]
# ### 3. Positions that nobody needed
#
# A pass is a rectangle. If the rows have drafts of different lengths, it is as wide as the longest draft and the last
# token before it, and the shorter rows are padded. In row i, `drafted[i]` tokens are verified and `accepted[i]` of them
# are accepted. Write `useful(drafted, accepted)`: the share of the computed positions whose result is used. The result of
# a position is the token after it. Count the target's own token, too.


# %% tags=["check"]
def check_3(candidate, seed=0):
    assert candidate([4], [4]) == 1, "five positions, and five tokens are committed"
    assert abs(candidate([4, 0], [0, 0]) - 0.2) < 1e-9, "two rows of five positions yield one token each: 2 of 10"
    luck = random.Random(seed)
    for _ in range(20):
        drafted = [luck.randint(0, 6) for _ in range(luck.randint(2, 6))] + [7, 2]
        accepted = [luck.randint(0, count) for count in drafted]
        computed = used = 0
        for row, count in enumerate(drafted):
            for position in range(max(drafted) + 1):  # 0: the last token of the text
                computed += 1
                used += position <= accepted[row] and position <= count
        found = candidate(drafted, accepted)
        assert abs(found - used / computed) < 1e-9, (
            f"drafted {drafted}, accepted {accepted}: {used} of {computed} positions, not a share of {found:.3f}"
        )


# %% tags=["exercise"]
def useful(drafted, accepted):
    return sum(accepted) / max(1, sum(drafted))  # the acceptance rate. Is padding free?


attempt(check_3, useful)


# %% tags=["answer"]
def useful_share(drafted, accepted):
    return sum(count + 1 for count in accepted) / (len(drafted) * (max(drafted) + 1))


attempt(check_3, useful_share)

# %% [markdown] tags=["answer"]
# So in a batch, one long draft makes all rows longer. The library chooses one length for all running rows, by the sum of their gains.

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. A server gets a new request every t seconds, and each takes 33 tokens. Simulate it with the costs of this notebook:
#    once without drafts, once with drafts of 4 tokens, and once with the best length for the rows that are running. How
#    does the mean time per request depend on t?
# 2. Repeat the measurement of $t_0$ and $t_1$ after 64, 256 and 700 tokens of context. How does the crossover move? What
#    would you expect after 10 000 tokens?

# %% [markdown]
# ## References
#
# - Drafting and batching together, and the best draft length for each batch size:
#   [arXiv 2310.18813](https://arxiv.org/abs/2310.18813).
# - Choosing draft lengths by the load of a server: [arXiv 2406.14066](https://arxiv.org/abs/2406.14066).
# - Long contexts, where drafting is worthwhile in large batches: MagicDec,
#   [arXiv 2408.11049](https://arxiv.org/abs/2408.11049).
# - Typical errors with batches of ragged rows: [arXiv 2510.22876](https://arxiv.org/abs/2510.22876).
# - Servers: vLLM, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180); SGLang,
#   [arXiv 2312.07104](https://arxiv.org/abs/2312.07104).
#
# You have now seen that a speedup depends on the draft, the text, the machine and the load. The next notebook asks which
# of many correct numbers to trust: [13. Measuring honestly](13_measuring_honestly.ipynb).
