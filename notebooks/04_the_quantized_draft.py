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
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import copy
import logging

logging.disable(logging.WARNING)  # the backends say at length what they did not find
import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from assisted import AssistedModelForCausalLM, zoo
from assisted.notebook import COLOURS, attempt, figure_style, show, table
from assisted.loading.quantization import memory_bytes, quantize_copy

TARGET, DRAFT, DEVICE = "zoo:target", "zoo:draft", "cpu"
# On a GPU of 24 GB try a real pair; this notebook holds eight copies of the target at once, so take a smaller one:
# TARGET, DRAFT, DEVICE = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B", "cuda"
# In half precision near-ties may fall differently, and an assert that compares counts may then fail.

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# A draft should be cheap and should agree with the target. Notebook 03 looked for a *smaller* model. Here the draft keeps its size and loses
# *precision*: its weights are written with 8 or 4 bits instead of 32 or 16. That is called quantization.
#
# It can be done to a small draft model. It can also be done to the target itself: a 4-bit copy drafts, the original checks. Then nobody has to
# find a second model.
#
# Rounding changes the draft's next-token distribution, so it costs acceptance. How much? And is the draft faster for it?

# %% [markdown]
# ## Your prediction
#
# Write down three numbers before you read on.
#
# 1. A copy of the target with **8 bits** a weight drafts. Of 100 drafted tokens, how many does the original keep?
# 2. The same with **4 bits**.
# 3. On this CPU, how long does a pass of the 4-bit copy take, as a share of a pass of the original?

# %% [markdown]
# ## By hand
#
# With $b$ bits there are $2^b$ codes, from $-2^{b-1}$ to $2^{b-1}-1$. A row of weights gets one *scale* $s$, its largest absolute value over
# half of the range of the codes. Each weight is stored as the nearest code, and read back as code times scale:
#
# $$s = \frac{\max |w|}{(2^b-1)/2}, \qquad \text{code} = \text{round}(w / s), \qquad \hat w = \text{code} \cdot s.$$
#
# Take four bits: codes from -8 to 7, half of the range is 7.5. Our toy is the last layer of a model with three tokens, A, B and C, and two
# features. The first row has $\max|w| = 0.75$, so $s = 0.1$. Then 0.75 is 7.5 steps, the largest code is 7, and it comes back as 0.7. And -0.30
# is exactly -3 steps, and comes back unharmed.
#
# | token | weights | scale | codes | read back |
# |---|---|---|---|---|
# | A | 0.75, -0.30 | 0.10 | 7, -3 | 0.70, -0.30 |
# | B | 0.13, 0.60 | 0.08 | 2, 7 | 0.16, 0.56 |
# | C | -0.45, 0.22 | 0.06 | -8, 4 | -0.48, 0.24 |
#
# For the features (2, 1) the logits were 1.20, 0.86, -0.68 and are now 1.10, 0.88, -0.72. After the softmax:
#
# | | A | B | C |
# |---|---|---|---|
# | target, $p$ | 0.537 | 0.382 | 0.082 |
# | 4-bit draft, $q$ | 0.509 | 0.408 | 0.082 |
# | the smaller of the two | 0.509 | 0.382 | 0.082 |
#
# The last row adds up to 0.97. Notebook [02](02_the_acceptance_rule.ipynb) has shown what that is: a token drawn from $q$ is kept with
# probability $\sum_x \min(p(x), q(x)) = 1 - TV(p, q)$. So 4 bits cost this toy 3 tokens in 100. Let us check with code.

# %%
TOY = torch.tensor([[0.75, -0.30], [0.13, 0.60], [-0.45, 0.22]])
FEATURES = torch.tensor([2.0, 1.0])


def round_rows(weight, bits):
    """Codes and scales of a matrix, one scale a row: what int8 means, with any number of bits."""
    scale = weight.abs().amax(1, keepdim=True) / ((2**bits - 1) / 2)
    codes = (weight * (1 / scale)).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.to(torch.int8), scale


def overlap(p, q):
    """The probability that a token drawn from q is kept: 1 - TV(p, q)."""
    return torch.minimum(p, q).sum(-1)


codes, scale = round_rows(TOY, bits=4)
p = (TOY @ FEATURES).softmax(-1)
q = ((codes * scale) @ FEATURES).softmax(-1)
print("codes ", codes.tolist())
print("kept  ", round(float(overlap(p, q)), 3))
assert codes.tolist() == [[7, -3], [2, 7], [-8, 4]] and abs(float(overlap(p, q)) - 0.97) < 0.01

# %% [markdown]
# ## From scratch
#
# A real model is many such matrices. We round each of them, except the embedding: it also serves as the last layer of this model, and the usual
# backends leave it alone too. The rounded weights are put back as ordinary floats: that shows what the rounding does to the text. It does not
# save memory, so we count by hand the bytes that the codes would take.

# %%
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype="auto", device_map=DEVICE).eval()
small = AutoModelForCausalLM.from_pretrained(zoo.resolve(DRAFT), dtype="auto", device_map=DEVICE).eval()


def rounded_copy(model, bits, group=None):
    """A copy whose matrices went through codes of so many bits, and the bytes that the codes and scales would take.

    group: weights that share a scale; None gives each row one.
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
print(f"{memory_bytes(target) / 2**20:.1f} MiB as it is, {our_bytes / 2**20:.1f} MiB with 8 bits")

# %% [markdown]
# Why 9.1 MiB and not a quarter of 27? The embedding stays as it was, 3 MiB of it. In a model of billions of parameters it is a much smaller
# share.
#
# Now a text to measure on: the target writes on after a few beginnings of Python code, each token drawn from its own distribution. On that text the two
# distributions are compared at every position. The mean overlap is the acceptance rate of the first token of a draft when sampling. No draw is involved
# in the comparison, so the number is not noisy.

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
]


def written(model, prompt, new_tokens=64):
    """Text drawn from the model's own distribution; and where the part that it wrote begins."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=new_tokens, pad_token_id=0
    )
    return out, ids.shape[1]


@torch.no_grad()
def distributions(model):
    """The model's next-token distribution at every place where the target wrote: [N, V]."""
    return torch.cat([model(ids).logits[0, start - 1 : -1].float().softmax(-1) for ids, start in TEXTS])


TEXTS = [written(target, prompt) for prompt in PROMPTS]
P = distributions(target)
print(len(P), "places;  kept with 8 bits:", f"{float(overlap(P, distributions(ours)).mean()):.1%}")

# %% [markdown]
# ## The library's call
#
# `draft="self:int8-torchao"` does the same with real 8-bit storage. The codes are ours, every one, and so is what becomes of the draft: the
# same drafted tokens are accepted, in as many passes.

# %%
theirs = quantize_copy(target, "int8-torchao")
for name, layer in target.named_modules():
    if isinstance(layer, nn.Linear) and name != "lm_head":
        codes, _ = round_rows(layer.weight.data.float(), bits=8)
        assert torch.equal(codes, theirs.get_submodule(name).weight.qdata)


def counts(model, draft_length=4):
    """Greedy decoding of the prompts: the tokens; target passes, drafted and accepted tokens, tokens per pass."""
    model.reset_totals()
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(DEVICE)
        out = model.generate(**inputs, max_new_tokens=48, do_sample=False, draft_length=draft_length)
        texts.append(out[0].tolist())
    done = model.totals
    return texts, (done.target_passes, done.drafted, done.accepted, round(done.tokens_per_pass, 2))


pair = AssistedModelForCausalLM.from_pretrained(TARGET, draft="self:int8-torchao", device_map=DEVICE)
by_library = counts(pair)
by_hand = counts(AssistedModelForCausalLM.from_models(target, draft=ours, tokenizer=tokenizer))
assert by_library == by_hand
print("passes, drafted, accepted, tokens per pass:", by_library[1])

# %% [markdown]
# The output is that of the target alone. It has to be: only the draft was rounded, and the target checks every token with its own weights.

# %%
for prompt, assisted_text in zip(PROMPTS, by_library[0], strict=True):
    inputs = tokenizer(prompt, return_tensors="pt").to(DEVICE)
    plain = pair.generate(**inputs, max_new_tokens=48, do_sample=False, assisted=False)
    assert plain[0].tolist() == assisted_text

# %% [markdown]
# ## The picture
#
# All formats at once. Our own copies have one scale for every 64 weights and 2 to 8 bits. The backends' formats are the ones that the library
# knows: `nf4` and `fp4` (bitsandbytes, 4 bits, codes that are *not* evenly spaced), `int4` and `int8-quanto` (quanto), `int8-torchao` (torchao)
# and `int8` (bitsandbytes, which rounds the activations too). The small draft model is shown as it is, with 8 bits (torchao) and as `nf4`.

# %%
MIB = memory_bytes(target)
curve = []
for bits in range(2, 9):
    model, size = rounded_copy(target, bits, group=64)
    curve.append((size / MIB, float(overlap(P, distributions(model)).mean()), bits))

formats = {name: quantize_copy(target, name) for name in ("int8", "int8-quanto", "nf4", "fp4", "int4")}
formats["int8-torchao"] = theirs
drafts = {"as it is": small, "int8": quantize_copy(small, "int8-torchao"), "nf4": quantize_copy(small, "nf4")}


def point(model):
    return memory_bytes(model) / MIB, float(overlap(P, distributions(model)).mean())


of_formats = {name: point(model) for name, model in formats.items()}
of_drafts = {name: point(model) for name, model in drafts.items()}
show(
    table(
        ["draft", "bytes against the target", "kept, sampling"],
        [["target, " + n, f"{x:.0%}", f"{y:.1%}"] for n, (x, y) in sorted(of_formats.items(), key=lambda i: -i[1][1])]
        + [["small draft, " + n, f"{x:.0%}", f"{y:.1%}"] for n, (x, y) in of_drafts.items()],
    )
)

# %% [markdown]
# Now the time, and let it speak where it is bad news. A pass over one token, all formats and the original in turns, forty times. We take the
# processor time of one thread, which other programs on the machine disturb little. These are ratios on one machine with this small model.
# Nothing is asserted on them.

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
turns = [{name: seconds(*job) for name, job in jobs.items()} for _ in range(43)][3:]  # the first ones warm up
total = {name: sum(turn[name] for turn in turns) for name in jobs}
cost = {name: found / total["target"] for name, found in total.items()}
cost_of_formats = {name: cost["target", name] for name in formats}
cost_of_drafts = {name: cost["small", name] for name in drafts}
v5 = cost["five tokens"]

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.7))
xs, ys, bits = zip(*curve, strict=True)
left.plot(xs, ys, "o-", color=COLOURS["target"], markersize=4, lw=1.3)
for x, y, b in curve[:2]:
    left.annotate(f"{b} bits", (x, y), xytext=(7, -5), textcoords="offset points", color=COLOURS["target"])
left.text(0.28, 0.81, "copies of the target\nwith 2 to 8 bits", color=COLOURS["target"], va="center")
left.scatter(*zip(*of_formats.values(), strict=True), color=COLOURS["accent"], marker="s", s=28, zorder=3)
left.text(0.28, 0.69, "backends' formats", color=COLOURS["accent"], va="center")
left.plot(*zip(*of_drafts.values(), strict=True), "^-", color=COLOURS["draft"], markersize=6, lw=1)
left.text(0.112, 0.64, "small\ndraft", color=COLOURS["draft"], va="top")
left.set(xlabel="bytes against the target", ylabel="kept, sampling", ylim=(0, 1.04), xlim=(0.1, 0.45))
left.set_title("Acceptance")
left.set_xticks([0.1, 0.2, 0.3, 0.4])
right.axhline(1, color=COLOURS["plain"], lw=1, ls="--")
right.plot([x / 100 for x in range(10, 46)], [x / 100 for x in range(10, 46)], color=COLOURS["plain"], lw=1)
right.text(0.44, 0.29, "if bytes were all", color=COLOURS["plain"], ha="right", va="top")
right.text(0.44, 0.93, "target", color=COLOURS["plain"], va="top", ha="right")
for names, places, costs, colour, mark in (
    (formats, of_formats, cost_of_formats, COLOURS["accent"], "s"),
    (drafts, of_drafts, cost_of_drafts, COLOURS["draft"], "^"),
):
    right.scatter([places[n][0] for n in names], [costs[n] for n in names], color=colour, marker=mark, s=28, zorder=3)
    for n in names:
        up = {"nf4": 4, "fp4": -10, "as it is": -11}.get(n, -3)  # out of each other's way
        right.annotate(n, (places[n][0], costs[n]), (7, up), textcoords="offset points", color=colour, fontsize=8)
right.set(xlabel="bytes against the target", ylabel="time of a pass against the target's", yscale="log")
right.set(xlim=(0.1, 0.45), ylim=(0.05, 10))
right.set_xticks([0.1, 0.2, 0.3, 0.4])
right.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10"])
right.set_title("Time, this machine")
plt.show()

# %% [markdown]
# Left: eight bits cost about one token in a hundred, four bits some eight, three bits nearly twenty, two bits half. The small draft model loses
# almost nothing to 8 bits and one or two tokens to 4: most of its mistakes are its own, and a little rounding adds few.
#
# Right: the backends' formats lie far above the line on which time follows bytes. A pass of this model lasts a few milliseconds, and most of
# that is not reading weights but starting some hundreds of small operations. A quantized layer starts more of them: it reads codes, multiplies
# by scales, and only then does its product. The same happens to the small draft: rounded, it moves to fewer bytes and to more time. Here time
# follows operations, not bytes.
#
# What one run cannot show: the acceptance of other models. QuantSpec reports that large targets keep more
# than 90 of 100 tokens of a 4-bit copy. The times belong to this machine, this model
# and these versions of the backends; on a GPU with a model of several billion parameters the right panel is another one.

# %% [markdown]
# ## When it loses
#
# Put both panels into the formula of notebook 03. With acceptance $a$, the cost $c$ of a drafted token and $v$ of a verify pass, both in plain
# passes of the target, a draft of $g$ tokens is worth
#
# $$S = \frac{E(a, g)}{v(g+1) + c\,g}, \qquad E(a, g) = \frac{1 - a^{g+1}}{1 - a}.$$
#
# Below, `c by bytes` is the best case: a machine on which a pass takes as long as its bytes take to be read, and $v = 1$. `c measured` is the
# time from the right panel, with the measured pass over five tokens for $v$.


# %%
def speedup(a, c, g=4, v=1.0):
    return sum(a**i for i in range(g + 1)) / (v + c * g)


rows = []
for name, places, costs in [("target, ", of_formats, cost_of_formats), ("small, ", of_drafts, cost_of_drafts)]:
    for n, (size, kept) in places.items():
        by_bytes, measured = speedup(kept, size), speedup(kept, costs[n], v=v5)
        rows.append([name + n, f"{kept:.0%}", size, costs[n], by_bytes, measured])
show(table(["draft", "kept", "c by bytes", "c measured", "S by bytes", "S measured"], rows))
print(f"v(5) measured: {v5:.2f}")

# %% [markdown]
# A quantized copy of the target guesses well, and here it costs too much. Even with a perfect kernel, $c$ is about 0.24 for 4 bits (here, with
# the embedding left as it is), and with $c = 0.24$ a round of four drafted tokens has already spent nearly one plain pass on drafting. That
# caps the speedup near 2.2. The last column has the kernels of this machine: a copy that costs about as much as the target cannot win at any
# acceptance, and most formats cost more than that.
#
# A quantized copy of the target pays where three things come together: the weights are what a pass waits for (one request at a time, billions of
# parameters); the backend has a kernel that is fast for a single token on this device; and there is no small relative of the target. A small
# draft is quantized for the sake of memory. Whether that makes it faster too is a question to the clock.

# %% [markdown]
# ## Takeaway
#
# > Quantizing a draft changes what is proposed, never what comes out. On this model eight bits cost about 1% of the drafted tokens, four bits
# > 8%, three bits nearly 20%. **Fewer bytes are not less time:** where weights are what a pass waits for, a drafted token costs its share of
# > the bytes at best; with slow kernels or a small model it can cost more than a token of the target. Measure $c$, then decide.

# %% [markdown]
# ## Exercises
#
# **1. int8 by hand.** Write `to_int8(weight)`: the codes (`torch.int8`, same shape) and the scales (one a row, shape `[rows, 1]`), so that
# `codes * scale` is within one step of the weight. Take care of rows that are all zero: they must come back as zeros, not as NaN.


# %% tags=["check"]
def check_1(to_int8):
    torch.manual_seed(1)
    weight = torch.randn(8, 64) * torch.logspace(-3, 1, 8)[:, None]
    weight[3] = 0
    codes, scale = to_int8(weight.clone())
    assert codes.dtype == torch.int8, f"codes are {codes.dtype}, and int8 was asked for"
    assert codes.shape == weight.shape and scale.shape == (8, 1), "one code a weight, one scale a row"
    back = codes * scale
    assert torch.isfinite(back).all(), "a row of zeros gives NaN: what is 0 / 0 to be?"
    assert (back[3] == 0).all(), "a row of zeros comes back as something else"
    step = weight.abs().amax(1, keepdim=True) / 127
    worst = float(((back - weight).abs() / step.clamp(min=1e-12)).max())
    assert worst < 1.01, f"a weight is off by {worst:.1f} steps: did a code overflow, or do rows share a scale?"
    assert codes.abs().amax(1)[[0, 7]].min() >= 127, "the largest weight of a row uses the whole range of the codes"


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
# **2. Why the output distribution is unchanged.** Write `output_distribution(p, q)`: the distribution of the token that comes out of one drafted token and the acceptance
# rule of notebook 02, by adding up all that can happen, not by drawing. The check rounds the toy's logits to ever fewer bits and finds the distribution
# of the output equal to $p$, each time. Do not simply return `p`: the check also hands in a rule with a wrong keep probability through `keep`,
# and there the distribution must come out wrong.


# %% tags=["check"]
def check_2(output_distribution):
    p = (TOY @ FEATURES).softmax(-1)
    for bits in (8, 4, 3, 2):
        codes, scale = round_rows(TOY, bits)
        q = ((codes * scale) @ FEATURES).softmax(-1)
        distribution = output_distribution(p, q, torch.minimum(p / q, torch.ones(3)))
        assert distribution.shape == (3,), "the distribution of one token: three probabilities"
        assert abs(float(distribution.sum()) - 1) < 1e-5, f"the probabilities add up to {float(distribution.sum()):.3f}"
        assert torch.allclose(distribution, p, atol=1e-6), (
            f"with {bits} bits the output has another distribution than the target"
        )
    distribution = output_distribution(p, q, torch.ones(3))  # keep everything
    assert torch.allclose(distribution, q, atol=1e-6), (
        "when every drafted token is kept, the output has the draft's distribution"
    )


# %% tags=["exercise"]
def output_distribution(p, q, keep):
    """p, q: the distributions of target and draft. keep: with which probability each token is kept once it was drafted."""
    raise NotImplementedError  # P(drafted and kept) + P(something was rejected) * (what is drawn then)


attempt(check_2, output_distribution)


# %% tags=["answer"]
def output_distribution_answer(p, q, keep):
    kept = q * keep
    rejected = 1 - kept.sum()
    residual = (p - q).clamp(min=0)
    total = residual.sum()
    return kept + rejected * (residual / total if total > 0 else p)


attempt(check_2, output_distribution_answer)

# %% [markdown]
# The rule never asks where $q$ came from. With $\text{keep} = \min(1, p/q)$ the first part is $\min(p, q)$, the second $\max(p - q, 0)$, and
# together they are $p$, for 8 bits as for 2.
#
# **3. One large weight.** Some rows of real models have a single weight far larger than the others. It sets the scale for the whole row, and
# the small ones are all rounded to the same few codes. The cure is to let fewer weights share a scale. Write `grouped(weight, bits, group)`:
# the rounded weights as floats (same shape) and the bits per weight, with 16 bits for each scale. Use `round_rows`.


# %% tags=["check"]
def check_3(grouped):
    torch.manual_seed(2)
    weight = torch.randn(16, 256)
    weight[:, 5] = 40.0  # the large one
    result = grouped(weight.clone(), 4, 256)
    assert isinstance(result, tuple) and len(result) == 2, "two results: the weights and the bits per weight"
    rest = torch.arange(256) != 5
    errors, bits = {}, {}
    for group in (256, 64, 32):
        back, bits[group] = grouped(weight.clone(), 4, group)
        assert back.shape == weight.shape, "the rounded weights have the shape of the weights"
        errors[group] = float((back - weight)[:, rest].pow(2).mean())
    expected = {256: 4.0625, 64: 4.25, 32: 4.5}
    assert bits == expected, f"bits per weight are {expected}, not {bits}"
    assert errors[64] < 0.4 * errors[256], (
        "groups of 64 should spare most weights the large one: is it each row that is cut?"
    )
    assert errors[32] < 0.7 * errors[64], "groups of 32 should be better still"


# %% tags=["exercise"]
def grouped(weight, bits, group):
    raise NotImplementedError  # your code


attempt(check_3, grouped)


# %% tags=["answer"]
def grouped_answer(weight, bits, group):
    codes, scale = round_rows(weight.reshape(-1, group), bits)
    return (codes * scale).view_as(weight), bits + 16 / group


attempt(check_3, grouped_answer)

# %% [markdown]
# Four bits with groups of 64 are 4.25 bits. `nf4` works with blocks of 64 as well, and chooses its sixteen codes for weights that follow a bell
# curve.

# %% [markdown]
# ## References
#
# - Dettmers and others: QLoRA, with the 4-bit format `nf4`. [arXiv 2305.14314](https://arxiv.org/abs/2305.14314)
# - Dettmers and others: LLM.int8(), and large features. [arXiv 2208.07339](https://arxiv.org/abs/2208.07339)
# - QuantSpec: a 4-bit copy of the target drafts. [arXiv 2502.10424](https://arxiv.org/abs/2502.10424)
# - ML-SpecQD: drafts at several precisions. [arXiv 2503.13565](https://arxiv.org/abs/2503.13565)
# - Leviathan and others: the acceptance rule. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next: [05. Early exit](05_early_exit.ipynb), a draft that needs no copy at all.
