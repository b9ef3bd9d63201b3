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
# **Many requests at once: when does drafting stop paying?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it:
# notebooks [01](01_why_decoding_is_slow.ipynb) and [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import dataclasses
import itertools
import json
import math
import random
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from assisted import AssistedModelForCausalLM, Eagle, zoo
from assisted.fast.fused import fused
from assisted.heads.eagle import EagleHead
from assisted.heads.eagle_formats import load_eagle, save_eagle
from assisted.lengths import Length
from assisted.notebook import COLOURS, attempt, figure_style, show, table
from assisted.engine.recurrent import runner_for, slots_for
from assisted.engine.runner import Masks
from assisted.training.data import pack, tokenize
from assisted.zoo import corpus

TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 16-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"  (about 12 GB: in float32, since texts are compared)

torch.set_num_threads(1)
figure_style()
# on one core of a CPU: the seconds that this process computes, whatever else the machine has to do meanwhile
clock = time.perf_counter if torch.cuda.is_available() else time.process_time

# %% [markdown]
# ## Question
#
# Drafting pays because a pass of the target has time to spare. The pass has to fetch all weights from memory, for one token or for five, and while it waits
# the arithmetic units are idle. Checking four drafted tokens costs them little.
#
# A server is never alone with one request. It puts many of them into one **batch**, a row for each: a pass reads the weights once and computes a token for every row.
# So batching spends the very idleness that drafting lives on. There must be a batch size from which drafting loses. Where is it, and can we know
# beforehand?
#
# ## Your prediction
#
# The pair that comes with the package, drafts of four tokens, on one core. On the texts below a request gets about 3.4 tokens out of each pass.
# Write down the batch size at which drafting is no faster than plain decoding.
#
# ## By hand
#
# Say that a pass costs a fixed part, for fetching the weights, and a part for each token it reads:
#
# $$T(m) = t_0 + t_1 m$$
#
# With $B$ rows, a plain pass reads $B$ tokens. A verify pass reads $B(g+1)$: each row has $g$ drafted tokens and the last one before them. The draft runs
# $g$ times over $B$ tokens, at $d_0 + d_1 B$ each. A round gives $E$ tokens to every row, the target's own included. So the speedup is
#
# $$S(B) = \frac{E\,T(B)}{T(B(g+1)) + g\,(d_0 + d_1 B)}$$
#
# A toy machine: $t_0 = 20$, $t_1 = 1$, $d_0 = 1$, $d_1 = 0.05$ (milliseconds), and a draft with $g = 4$ and $E = 3.36$, the value of notebook 02 for tokens
# that are accepted four times out of five.
#
# - One row: $3.36 \cdot 21 / (25 + 4.2) = 2.42$. Fine.
# - 100 rows: $3.36 \cdot 120 / (520 + 24) = 0.74$. Drafting costs a quarter of the speed.
#
# For very large batches only $t_1$ counts: $S \to E / (g + 1 + g\,d_1/t_1)$. The numerator is at most $g + 1$, so drafting *must* lose in the end,
# with any draft that is not both free and always right. Where exactly, exercise 1 asks. By trial:

# %%
toy = dict(t0=20, t1=1, d0=1, d1=0.05)


def speedup(rows, tokens, length, t0, t1, d0, d1):
    plain = t0 + t1 * rows
    verify = t0 + t1 * rows * (length + 1)
    return tokens * plain / (verify + length * (d0 + d1 * rows))


for rows in (1, 8, 16, 23, 24, 32, 100):
    print(f"{rows:4} rows: {speedup(rows, 3.36, 4, **toy):.2f}")

# %% [markdown]
# ## From scratch
#
# The formula wants three things: costs, $E$, and the claim that $E$ does not depend on the batch. First the last one, since it is not obvious. Rows
# accept different numbers of tokens: in one round one row gets five, another row one. Then their texts have different lengths. There are two ways on.
#
# - **In step.** All rows go on from the same place. A round accepts what the least lucky row accepts.
# - **Ragged.** Every row keeps what it has. Rows are then at different places of their texts, and the cache has to bear it.
#
# To compare them without running anything twice, note what a greedy draft does: at each place it has one guess, which depends on the text before it alone.
# While guesses are accepted, that text is the target's. So one reading of the target's text by the draft tells at every place whether
# the guess there would be right.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype=torch.float32).to(device).eval()
draft = AutoModelForCausalLM.from_pretrained(zoo.resolve(DRAFT), dtype=torch.float32).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
model = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer)

files = random.Random(1).sample(corpus.held_out_files(), 30)
prompts = pack(tokenize(tokenizer, map(corpus.read, files)), context=48, rows=32).to(device)
ROWS, NEW, LENGTH = len(prompts), 33, 4  # the first new token comes with the prompt; 32 are left to draft
call = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)

text = model.generate(prompts, attention_mask=torch.ones_like(prompts), assisted=False, **call)
with torch.no_grad():
    guesses = draft(input_ids=text).logits.argmax(-1)[:, prompts.shape[1] - 1 : -1]
right = guesses.eq(text[:, prompts.shape[1] :])  # [rows, new tokens]: would the draft have guessed it?
print(
    f"{ROWS} rows; guesses that are right, everywhere: {right.float().mean():.0%}, by row from"
    f" {right.float().mean(1).min():.0%} to {right.float().mean(1).max():.0%}"
)

# %% [markdown]
# Both ways can now be counted. `room` is what may still be drafted: the last token of a text is the target's own.


# %%
def agreed(row, place, room):
    """How many guesses in a row are right from here on, of `room`."""
    count = 0
    while count < room and right[row, place + count]:
        count += 1
    return count


def rounds_ragged(rows, length):
    """Rounds that each row needs for its text when it goes its own way."""
    found = []
    for row in rows:
        place, rounds = 1, 0
        while place < NEW:
            place += agreed(row, place, min(length, NEW - place - 1)) + 1
            rounds += 1
        found.append(rounds)
    return found


def rounds_in_step(rows, length):
    """Rounds that all rows need together when each round stops at the first wrong guess of any row."""
    place, rounds = 1, 0
    while place < NEW:
        place += min(agreed(row, place, min(length, NEW - place - 1)) for row in rows) + 1
        rounds += 1
    return rounds


eight = range(8)
print("rounds of 8 rows, each its own way:", rounds_ragged(eight, LENGTH))
print("in lockstep:", rounds_in_step(eight, LENGTH), "for all of them; plain decoding:", NEW - 1)

# %% [markdown]
# ## The library's call
#
# `generate` takes batches as always. Rows go their own ways: each has a length of its own in the cache, and a row that has ended is not computed any more. The
# report counts a pass once for every row that takes part. That must be the sum of the rounds above, to the last pass.


# %%
def passes(rows, **more):
    ids = prompts[rows[0] : rows[-1] + 1]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), draft_length=LENGTH, **call, **more)
    assert output.equal(text[rows[0] : rows[-1] + 1]), "the text is plain decoding's, whatever the batch"
    return model.report.target_passes


assert passes(eight) == sum(rounds_ragged(eight, LENGTH))
print(model.report.target_passes, "passes of a row; tokens per pass", round(model.report.tokens_per_pass, 2))

# %% [markdown]
# The library, too, has to go in lockstep sometimes: for instance when it is handed a logits processor that it does not know, since that may look at all rows
# and wants to be shown each token once, in order. Here is one that does nothing at all.


# %%
class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


assert passes(eight, logits_processor=LogitsProcessorList([Unknown()])) == 8 * rounds_in_step(eight, LENGTH)
print(model.report.target_passes, "passes of a row; tokens per pass", round(model.report.tokens_per_pass, 2))

# %% [markdown]
# ### What a pass costs
#
# Now the costs. Passes of both models are timed behind 64 tokens of context, run the way `generate` runs them here: with slots for keys and values and
# a length for each row, which is not moved between the passes, so that each overwrites what the last one wrote. Costs are shown in units of the target's pass
# over one token, since the machine is not yours. Passes take turns, and the fastest of all turns counts, since the machine may be busy.


# %%
def ready(network, rows):
    """A model that has read 64 tokens in each row."""
    masks = Masks.of(network)
    run = runner_for(network)(fused(network), slots_for(network, None, rows, 96, masks), masks)
    run.prefill(text[:rows, :64], None)
    return run


def pass_seconds(run, rows, columns):
    ids = text[:rows, 64 : 64 + columns]
    for _ in range(2):  # the first one fetches what the pass before has pushed out of the processor's caches
        start = clock()
        run(ids).argmax(-1).tolist()  # on an accelerator this waits for the result
        seconds = clock() - start
        run.commit([0] * rows)  # keep nothing
    return seconds


SIZES = (1, 2, 4, 8, 16, 32)
timed = {}
with torch.no_grad():
    for rows in SIZES:
        large, small = ready(target, rows), ready(draft, rows)
        timed |= {("plain", rows): (large, 1), ("verify", rows): (large, LENGTH + 1), ("draft", rows): (small, 1)}
    samples = {key: [] for key in timed}
    for turn in range(16):
        for (kind, rows), (run, columns) in timed.items():
            samples[kind, rows].append(pass_seconds(run, rows, columns))
unit = min(samples["plain", 1])
cost = {key: min(taken) / unit for key, taken in samples.items()}
show(
    table(
        ["rows", "plain pass", "verify pass, 5 columns", "draft pass"],
        [(rows, cost["plain", rows], cost["verify", rows], cost["draft", rows]) for rows in SIZES],
    )
)

# %% [markdown]
# Then the two lines are fitted, $T(m) = t_0 + t_1 m$ to plain and verify passes together, $d_0 + d_1 B$ to the draft's. Each point is weighed by one over its
# size, so that small passes count as much as large ones.


# %%
def line(points):
    """Least squares of relative errors: (cost at 0, cost of one more token)."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    weights = torch.stack([1 / y, x / y], 1)
    return torch.linalg.lstsq(weights, torch.ones(len(y), 1, dtype=torch.float64)).solution[:, 0].tolist()


t0, t1 = line(
    [(rows, cost["plain", rows]) for rows in SIZES] + [(rows * (LENGTH + 1), cost["verify", rows]) for rows in SIZES]
)
d0, d1 = line([(rows, cost["draft", rows]) for rows in SIZES])
fitted = dict(t0=t0, t1=t1, d0=d0, d1=d1)
per_pass = {g: ROWS * (NEW - 1) / sum(rounds_ragged(range(ROWS), g)) for g in (1, 2, 4, 8)}
print(", ".join(f"{name} {value:.3f}" for name, value in fitted.items()))
print("tokens per pass by draft length:", {g: round(value, 2) for g, value in per_pass.items()})

# %% [markdown]
# One more thing to compare with: the clock. The same loop runs whole calls, once with drafts of four tokens and once with a draft length that
# never drafts. What reading the prompt takes is subtracted.


# %%
class Nothing(Length):
    def budget(self, unfinished):
        return 0


class Never:
    def start(self, earlier=None):
        return Nothing()


def call_seconds(rows, length, new):
    ids = prompts[:rows]
    start = clock()
    model.generate(ids, attention_mask=torch.ones_like(ids), draft_length=length, **{**call, "max_new_tokens": new})
    return clock() - start


runs = {"prompt": (Never(), 1), "plain": (Never(), NEW), "drafts": (LENGTH, NEW)}
taken = {(name, rows): [] for rows in (1, 8, 32) for name in runs}
for turn in range(3):
    for name, rows in taken:
        taken[name, rows].append(call_seconds(rows, *runs[name]))
best = {key: min(seconds) for key, seconds in taken.items()}
by_clock = {
    rows: (best["plain", rows] - best["prompt", rows]) / (best["drafts", rows] - best["prompt", rows])
    for rows in (1, 8, 32)
}
print("by the clock, on this machine:", {rows: round(value, 2) for rows, value in by_clock.items()})

# %% [markdown]
# ## The picture
#
# On the left the speedup that the formula gives for these costs and counts, for drafts of 1, 2, 4 and 8 tokens. Dots: the same costs, added up
# round by round for the first rows of the 32, drafts of 4. Crosses: the clock, drafts of 4. On the right tokens per pass, counted: the mean of all rows, a
# dot for each batch, and what would be left in lockstep.

# %%
groups = {rows: [range(first, first + rows) for first in range(0, ROWS, rows)] for rows in SIZES}
in_lockstep = {
    rows: (NEW - 1) * len(each) / sum(rounds_in_step(one, LENGTH) for one in each) for rows, each in groups.items()
}
spread = {rows: [rows * (NEW - 1) / sum(rounds_ragged(one, LENGTH)) for one in each] for rows, each in groups.items()}


def replayed(rows, g):
    """The speedup of one batch, round by round: rows that have ended drop out, and the draft has to read the prompts."""
    rounds = rounds_ragged(range(rows), g)
    ours = d0 + d1 * rows * prompts.shape[1]
    for number in range(max(rounds)):
        running = sum(count > number for count in rounds)
        ours += t0 + t1 * running * (g + 1) + g * (d0 + d1 * running)
    return (NEW - 1) * (t0 + t1 * rows) / ours


# %%
figure, (left, right_axis) = plt.subplots(1, 2, figsize=(7, 3.4))
sizes = torch.logspace(0, 7, 60, base=2).tolist()
height = -1.0
for g in reversed(per_pass):
    curve = [speedup(rows, per_pass[g], g, **fitted) for rows in sizes]
    main = g == LENGTH
    left.plot(sizes, curve, color=COLOURS["draft"], alpha=1 if main else 0.55, linewidth=2.6 if main else 1.3)
    height = max(curve[-1], height + 0.13)  # numbers do not lie on one another
    left.annotate(f" {g}", (sizes[-1], height), va="center", color=COLOURS["draft"])
dots = [replayed(rows, LENGTH) for rows in SIZES]
left.plot(SIZES, dots, "o", color=COLOURS["draft"], markersize=5)
left.annotate(
    "round by round",
    (4, dots[2]),
    xytext=(2, -12),
    textcoords="offset points",
    ha="right",
    color=COLOURS["draft"],
    fontsize=8,
)
left.plot(list(by_clock), list(by_clock.values()), "x", color=COLOURS["accent"], markersize=8, markeredgewidth=2)
left.annotate(
    "clock", (32, by_clock[32]), xytext=(0, -15), textcoords="offset points", color=COLOURS["accent"], fontsize=8
)
left.axhline(1, color=COLOURS["plain"], linewidth=1.2)
left.annotate("plain decoding", (0.9, 1), xytext=(0, -12), textcoords="offset points", color=COLOURS["plain"])
left.set(title="speedup, drafts of 1, 2, 4, 8 tokens", xlabel="rows in a batch", ylim=(0, None), xlim=(0.8, 190))
for rows, values in spread.items():
    right_axis.plot([rows] * len(values), values, ".", color=COLOURS["accepted"], alpha=0.4)
right_axis.plot(SIZES, [per_pass[LENGTH]] * len(SIZES), color=COLOURS["accepted"])
right_axis.plot(SIZES, list(in_lockstep.values()), color=COLOURS["rejected"], marker="o", markersize=4)
right_axis.annotate(
    "ragged", (32, per_pass[LENGTH]), xytext=(0, 6), textcoords="offset points", ha="right", color=COLOURS["accepted"]
)
right_axis.annotate(
    "in lockstep", (8, in_lockstep[8]), xytext=(6, 4), textcoords="offset points", color=COLOURS["rejected"]
)
right_axis.set(title="tokens per pass, drafts of 4", xlabel="rows in a batch", ylim=(0.8, None), xlim=(0.8, 40))
for axis in (left, right_axis):
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
plt.show()

# %% [markdown]
# What to see.
#
# - **Drafting loses from some batch size on.** The thick line begins well above 1 and crosses it. Longer drafts cross first: each row then brings more columns,
#   and the columns are what costs.
# - **The dots bend down earlier than the line.** A batch is done when its slowest row is done. Near the end a few rows run alone, at the price of small
#   batches. A server fills their places with new requests, and is nearer to the line.
# - **The clock follows the dots, not to the percent.** The formula leaves out what is done around the passes, attention over a text that grows, and what
#   caches of the processor make of it all. Nothing here is asserted on times.
# - **Ragged rows keep their tokens per pass; in lockstep they lose them.** With 32 rows there is nearly always one whose first guess is wrong, and
#   the batch goes on as if there were no draft, only dearer.
#
# What this one run cannot show: your crossover. On a GPU it may lie far to the right of this picture. It moves with $t_1/t_0$, which is small on an accelerator with a large model (there it takes dozens or hundreds of
# tokens to fill a pass) and large on a small CPU. These texts also repeat themselves, as a small target's greedy texts do, which flatters $E$.
#
# ## When it loses
#
# **In large batches, as shown.** What helps, in this order: shorter drafts, then none. The library's default draft length, `"adaptive"`, does both. It measures
# the costs of its own passes, adds up what the rows of the batch gain, and stops where a column costs more than all rows together get from it. Where no
# draft pays it decodes plainly and tries again now and then.
#
# **In step.** A target with recurrent layers (Mamba, linear attention) has one state for all rows, so its batches must go in lockstep. Small batches
# gain, large ones hardly.
#
# **With a draft that is itself dear for many rows.** $d_1$ grows with the draft's size as $t_1$ does with the target's.
#
# **The exception: long texts.** Each row also reads its own keys and values, and no other row shares them. Behind thousands of tokens this outweighs the
# weights. All columns of a row share that reading, so drafting can pay in large batches again (arXiv 2408.11049).
#
# ### Handing over to a server
#
# This library runs inside a Python process. For many users at once there are servers, vLLM and SGLang among them, which have speculative decoding of their own.
# What can be handed over is what was made for the target: a draft model, or an EAGLE-3 head.
#
# A saved pair is a folder of folders. The draft in it is an ordinary checkpoint, which anything that reads Hugging Face models reads.

# %%
pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft")
with tempfile.TemporaryDirectory() as folder:
    pair.save_pretrained(Path(folder) / "pair")
    print(sorted(path.name for path in (Path(folder) / "pair").iterdir() if path.is_dir()))
    saved = AutoModelForCausalLM.from_pretrained(Path(folder) / "pair" / "draft").state_dict()
original = AutoModelForCausalLM.from_pretrained(zoo.folder("draft")).state_dict()
assert saved.keys() == original.keys() and all(saved[name].equal(original[name]) for name in original)

# %% [markdown]
# An EAGLE-3 head comes in two conventions, and `save_eagle` writes both. `"eagle"` is how EAGLE's authors, SpecForge and SGLang write heads. `"speculators"` is
# the format of vLLM's project; it names the target and holds an embedding, so that the folder can be served by itself.

# %%
shipped = pair.target
head = load_eagle("zoo:eagle3", shipped)
with tempfile.TemporaryDirectory() as folder:
    for form in ("eagle", "speculators"):
        save_eagle(head, Path(folder) / form, form, shipped)
        written = json.loads((Path(folder) / form / "config.json").read_text())
        same = load_eagle(Path(folder) / form, shipped)
        assert same.config.taps == head.config.taps and same.fc.weight.equal(head.fc.weight)
        inner = written.get("eagle_config", written)
        print(
            f"{form:12} {written['architectures'][0]:24} layers it says it reads:",
            inner["eagle_aux_hidden_state_layer_ids"],
        )

# %% [markdown]
# The same head, and the two files name different layers. They count differently: `"speculators"` numbers hidden states, where 0 is the embedding; the other
# numbers layers, where 0 is the first one. Read a file with the wrong convention and the head gets the states of the neighbouring layers. Does anything fail?


# %%
def with_taps(taps):
    """The same weights, fed with other states of the target."""
    other = EagleHead(dataclasses.replace(head.config, taps=taps)).to(head.dtype)
    other.load_state_dict(head.state_dict())
    return other


words = AutoTokenizer.from_pretrained(zoo.folder("target"))
few = pack(tokenize(words, map(corpus.read, files[:8])), context=48, rows=16)
full = torch.ones_like(few)
plain = pair.generate(few, attention_mask=full, assisted=False, **call)
for name, read in (("as trained", (2, 8, 13)), ("one layer off", (1, 7, 12)), ("far off", (13, 14, 15))):
    drafting = AssistedModelForCausalLM.from_models(
        shipped, draft=Eagle(with_taps(read), tree=False), draft_length=LENGTH
    )
    assert drafting.generate(few, attention_mask=full, **call).equal(plain)
    print(f"{name:14} {read!s:13} {drafting.report.tokens_per_pass:.2f} tokens per pass")

# %% [markdown]
# Nothing fails, and every text is exact: a wrong layer costs tokens per pass, no more. On this small target, whose neighbouring states are much alike, one layer
# off is not even felt; far off costs a quarter. What it costs for another head nobody knows before it is measured. So convert with a tool that knows both
# conventions, and compare tokens per pass before and after.
#
# With folders of a real pair in these formats the servers are started like this (not run here; options change between versions, see the server's manual):
#
# ```bash
# vllm serve TARGET --speculative-config '{"method": "draft_model", "model": "pair/draft", "num_speculative_tokens": 3}'
# vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "head-speculators", "num_speculative_tokens": 3}'
# python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 --speculative-draft-model-path head-eagle \
#   --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
# ```
#
# Two things to look after. The speculators file names the target by the path that it was loaded from: load it by its Hub id before you write. And the
# numbers of tokens in these lines are fixed for all batch sizes: you have seen what that means, so choose them for the load that you expect.
#
# ## Takeaway
#
# > Batching and drafting spend the same idle time. Drafting pays up to the batch size where $E\,T(B) = T(B(g+1)) + g\,(d_0 + d_1 B)$; beyond it, draft less or
# > not at all. Tokens per pass do not fall with the batch size, as long as every row may go its own way. A number measured with one request says
# > nothing about a busy server.
#
# ## Exercises
#
# ### 1. Predict the crossover
#
# Write `crossover(tokens, length, t0, t1, d0, d1)`: the batch size $B$, not rounded, at which $S(B) = 1$. Return 0 where drafting does not even pay for the
# smallest batch, and `float("inf")` where it always pays.


# %% tags=["check"]
def check_1(candidate):
    found = candidate(3.36, 4, **toy)
    assert abs(found - 43.2 / 1.84) < 1e-6, f"the toy machine crosses at {43.2 / 1.84:.2f} rows, yours at {found}"
    assert candidate(5.0, 4, t0=20, t1=1, d0=1, d1=0) == float("inf"), "free tokens that are always right always pay"
    assert candidate(1.1, 4, t0=20, t1=1, d0=5, d1=0.1) == 0, "where the fixed part already loses, the answer is 0"
    luck = random.Random(0)
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
# E (t0 + t1 B) = t0 + t1 (g + 1) B + g (d0 + d1 B): one side gains with the fixed part, the other pays by the row
def crossing(tokens, length, t0, t1, d0, d1):
    gain = (tokens - 1) * t0 - length * d0
    price = (length + 1 - tokens) * t1 + length * d1
    if gain <= 0:
        return 0
    return gain / price if price > 0 else float("inf")


for g in per_pass:
    print(f"drafts of {g}: this machine crosses at about {crossing(per_pass[g], g, **fitted):.0f} rows")
attempt(check_1, crossing)

# %% [markdown]
# ### 2. In step
#
# Let `survival[k]` be the probability that a row accepts at least `k + 1` tokens of its draft. The rows of a batch are independent and go in lockstep.
# Write `tokens_in_step(survival, rows)`: the expected number of tokens that a round gives to each row, the target's own included.


# %% tags=["check"]
def check_2(candidate):
    assert abs(candidate([0.8, 0.64, 0.512, 0.4096], 1) - 3.3616) < 1e-9, "one row: 1 + the sum of survivals"
    survival = [0.9, 0.5, 0.3]
    exactly = [1 - 0.9, 0.9 - 0.5, 0.5 - 0.3, 0.3]  # of accepting 0, 1, 2, 3
    for rows in (2, 3):
        expected = 0.0
        for outcome in itertools.product(range(4), repeat=rows):
            chance = math.prod(exactly[count] for count in outcome)
            expected += chance * (min(outcome) + 1)
        found = candidate(survival, rows)
        assert abs(found - expected) < 1e-9, f"{rows} rows: all cases counted give {expected:.4f}, yours {found:.4f}"


# %% tags=["exercise"]
def tokens_in_step(survival, rows):
    raise NotImplementedError("when do all rows accept k tokens?")


attempt(check_2, tokens_in_step)


# %% tags=["answer"]
# the expectation of a count is the sum over k of the chance that it is at least k
def in_step_tokens(survival, rows):
    return 1 + sum(chance**rows for chance in survival)


starts = [(row, place) for row in range(ROWS) for place in range(1, NEW - LENGTH)]
lasting = [sum(agreed(row, place, LENGTH) > k for row, place in starts) / len(starts) for k in range(LENGTH)]
for rows in SIZES:
    print(
        f"{rows:2} rows: {in_step_tokens(lasting, rows):.2f} if rows were independent, {in_lockstep[rows]:.2f} counted"
    )
attempt(check_2, in_step_tokens)

# %% [markdown]
# Alone, a row does worse than its survival promises: a round begins behind a wrong guess, where the text is hard, and survival was counted everywhere. The
# hard places of different rows do not meet by agreement, so in larger batches independence is a fair guess.
#
# ### 3. Which layers does a checkpoint read?
#
# Write `taps(config, layers)`. `config` is what stands in `config.json` of an EAGLE-3 head, in either convention; `layers` is the number of layers of the
# target. Return the tapped states as a tuple, counted as hidden states (0 is the embedding). In `eagle_config` layers are counted, at the top level hidden
# states. Where neither says anything, it is `(2, layers // 2, layers - 3)`.


# %% tags=["check"]
def check_3(candidate):
    layers = shipped.config.num_hidden_layers
    for chosen in (head.config.taps, (1, 5, 14)):
        other = EagleHead(dataclasses.replace(head.config, taps=chosen))
        with tempfile.TemporaryDirectory() as folder:
            for form in ("eagle", "speculators"):
                save_eagle(other, folder, form, shipped)
                config = json.loads((Path(folder) / "config.json").read_text())
                found = tuple(candidate(config, layers))
                assert found == chosen, f"this {form} head reads {chosen}, yours says {found}"
    bare = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": None}
    assert tuple(candidate(bare, 32)) == (2, 16, 29), "a file that does not say means 2, L // 2, L - 3"


# %% tags=["exercise"]
def taps(config, layers):
    raise NotImplementedError("look in both places")


attempt(check_3, taps)


# %% tags=["answer"]
def tapped(config, layers):
    name = "eagle_aux_hidden_state_layer_ids"
    counted_in_layers = (config.get("eagle_config") or {}).get(name)
    if counted_in_layers is not None:
        return tuple(layer + 1 for layer in counted_in_layers)
    return tuple(config.get(name) or (2, layers // 2, layers - 3))


attempt(check_3, tapped)

# %% [markdown]
# ## References
#
# - Drafting and batching together, and the best draft length by batch size: [arXiv 2310.18813](https://arxiv.org/abs/2310.18813).
# - Choosing draft lengths by the load of a server: [arXiv 2406.14066](https://arxiv.org/abs/2406.14066).
# - Long contexts, where drafting pays in large batches: MagicDec, [arXiv 2408.11049](https://arxiv.org/abs/2408.11049).
# - The ways in which batches of ragged rows go wrong: [arXiv 2510.22876](https://arxiv.org/abs/2510.22876).
# - Servers: vLLM, [arXiv 2309.06180](https://arxiv.org/abs/2309.06180); SGLang, [arXiv 2312.07104](https://arxiv.org/abs/2312.07104).
# - EAGLE-3: [arXiv 2503.01840](https://arxiv.org/abs/2503.01840).
