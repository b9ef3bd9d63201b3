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
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: nothing; you need Python and a little patience.*

# %% tags=["colab"]
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import time

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer, Qwen3Config

from assisted import AssistedModelForCausalLM, zoo
from assisted.doctor.passes import memory, pass_times
from assisted.notebook import COLOURS, attempt, figure_style, show, table

TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# A language model reads a text and gives a probability to every possible next token. A **token** is a word or a piece of one. Running the model once over some tokens is
# called a **pass**.
#
# To write, the model is run in a loop. Read the prompt, choose the next token, append it, run again. A hundred new tokens are a hundred passes, one after the other: the
# second token can't be chosen before the first one is known. This is called **decoding**, and it is slow.
#
# But why is a pass slow? What does the machine spend the time on, and is all of it needed?
#
# ## Your prediction
#
# One pass over one token takes some time; call it 1. Instead of one token, let the same model read **eight** tokens in one pass. How long does that take? Eight times as
# long? Write down a number before you go on.

# %% [markdown]
# ## By hand
#
# Take round numbers, which stay with us for the whole notebook.
#
# | | |
# |---|---|
# | the model | 7 billion weights, 2 bytes each |
# | the machine | fetches 100 GB from memory in a second, computes 1000 billion operations in a second |
#
# A pass has to do two things.
#
# - **Fetch the weights.** All of them are used for every token, and they are far too many for the processor's own small memories. That is 7 × 2 = 14 GB, so 0.14 s.
# - **Compute.** Each weight is multiplied with a number and added to a sum: 2 operations for each token. That is 14 billion operations a token, so 0.014 s.
#
# Fetching and computing go on at the same time, so the pass takes as long as the longer of the two. For one token that is 0.14 s, and for nine tenths of it the
# arithmetic stands idle.
#
# Now let the pass read k tokens. The weights are fetched **once**, and each is used k times while it is there. Only the arithmetic grows:

# %%
WEIGHTS, BYTES = 7e9, 2
BANDWIDTH, OPERATIONS = 100e9, 1e12


def pass_time(k, weights=WEIGHTS, bytes_per_weight=BYTES, bandwidth=BANDWIDTH, operations=OPERATIONS):
    """Seconds of a pass over k tokens if the machine is as fast as it can be."""
    fetch = weights * bytes_per_weight / bandwidth
    compute = 2 * weights * k / operations
    return max(fetch, compute)


rows = [[k, 0.14, 0.014 * k, pass_time(k), pass_time(k) / k] for k in (1, 2, 5, 8, 10, 20, 40)]
show(table(["tokens in the pass", "fetch", "compute", "the pass", "per token"], rows, digits=3))

# %% [markdown]
# Up to ten tokens the pass costs what one token costs. Behind that it grows with every token. The flat part and the slope together look like a
# roof, and the picture is called a **roofline**. The place where it bends is the **knee**, here at 10 tokens.
#
# So a prompt of 500 tokens is read in little time, many tokens in one pass. Writing 500 tokens takes 500 passes, each over one token, each on the flat part of the roof.
#
# ### What else is fetched
#
# For each token that it has read, a model keeps some numbers, so that it need not read the token again: a **key** and a **value** in every layer. Together they are
# called the **KV cache**, and every pass fetches all of it.
#
# If our model has 32 layers, each with 8 heads for keys and values of 128 numbers, a token takes 2 × 32 × 8 × 128 numbers of 2 bytes: 131 072 bytes. For a text of 1000 tokens
# that is 0.13 GB, little beside 14 GB of weights. At 100 000 tokens it is 13 GB, nearly as much.

# %% [markdown]
# ## From scratch
#
# Now with a model. The one that ships in the package is tiny, so that it runs anywhere; it writes Python, of
# a poor kind. Here is the loop, and a function for the bytes.


# %%
def greedy(model, ids, count):
    """Write `count` tokens, always the likeliest one. Returns the text, the passes it took and the KV cache."""
    text, step, cache, passes = ids, ids, None, 0
    for _ in range(count):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, passes = out.past_key_values, passes + 1
        step = out.logits[:, -1:].argmax(-1)  # the next pass reads this one token; the rest is in the cache
        text = torch.cat([text, step], 1)
    return text, passes, cache


def weight_bytes(model):
    """What a pass fetches. From a table of words it takes some rows only, unless the same table is the last layer."""
    total = sum(one.numel() * one.element_size() for one in [*model.parameters(), *model.buffers()])
    words, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if words is last else total - words.numel() * words.element_size()


model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, draft_length=4)
model.to("cuda" if torch.cuda.is_available() else "cpu")
target = model.target
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
prompt = tokenizer("def read_lines(path):\n", return_tensors="pt").input_ids.to(model.device)

with torch.no_grad():
    text, passes, cache = greedy(target, prompt, 40)
kv = sum(layer.keys.numel() * layer.keys.element_size() * 2 for layer in cache.layers)
print(tokenizer.decode(text[0]))
print(f"\n{passes} passes for 40 tokens; a pass fetches {weight_bytes(target) / 1e6:.1f} MB of weights,")
print(f"and at the end {kv / 1e6:.2f} MB of keys and values: {kv // (text.shape[1] - 1)} bytes a token")

# %% [markdown]
# Now the important step. Give the model the finished text, and let it read all of it in **one** pass. At every place it gives the probabilities of the next token, its **distribution** from now
# on. Are the likeliest tokens the ones that it wrote?

# %%
with torch.no_grad():
    distributions = target(text[:, :-1]).logits[:, prompt.shape[1] - 1 :]

agree = (distributions.argmax(-1) == text[:, prompt.shape[1] :]).sum().item()
print(f"one pass, {distributions.shape[1]} distributions, {agree} of 40 tokens the same")
if target.dtype == torch.float32:
    assert agree == 40

# %% [markdown]
# They are. Forty passes were needed to *write* the tokens, one is enough to *check* them. If somebody tells us what the model is about to say, the model can confirm it
# at the price of one pass.
#
# That is the idea of **speculative decoding**: a cheap **draft** guesses the next few tokens, the **target** checks all of them in one pass. What is right stays, what is wrong is
# replaced.
#
# ## The library's call
#
# `generate` of this package does that. With `assisted=False` it decodes plainly, as our loop does. Both write the same tokens; what differs is the number of passes.

# %%
options = dict(max_new_tokens=40, min_new_tokens=40, do_sample=False)
plain = model.generate(prompt, **options, assisted=False)
plain_passes = model.report.target_passes
drafted = model.generate(prompt, **options)

print("passes behind the prompt, plain:", plain_passes, " with a draft:", model.report.target_passes)
print("drafted tokens kept:", model.report.accepted, "of", model.report.drafted)
assert plain_passes == passes - 1  # the report leaves out the pass that reads the prompt
assert model.report.target_passes < plain_passes
if target.dtype == torch.float32:
    assert plain.tolist() == drafted.tolist() == text.tolist()

# %% [markdown]
# Fewer passes are not yet less time. Drafting takes time too, and a pass over five tokens may cost more than a pass over one. How much more is what we measure now,
# with the library's own functions. The number of bytes is the one that we counted.

# %%
KS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
times = pass_times(target, text[0], context=128, columns=KS, repeats=25, seconds=8)
seen = memory(target, times.seconds[1])
assert seen.weight_bytes == weight_bytes(target)

v = {k: seconds / times.seconds[1] for k, seconds in times.seconds.items()}
show(table(["tokens in the pass", "times a pass over one"], [[k, v[k]] for k in (1, 2, 4, 8, 16, 32, 64)]))

# %% [markdown]
# Compare with your prediction. (These are times of one run on one machine. Another machine, or a busy minute, gives others.)
#
# ## The picture
#
# Two measurements on the machine that ran this notebook.
#
# On the left, the bare thing: one matrix of 16.8 million weights, more than most processors' own memories hold, multiplied with k columns. (In the type of numbers that this
# machine multiplies faster.) The roof comes from two measurements of its own: how fast numbers can be read, and how fast a large product is computed. On the right, passes of the model, in units of a pass over one token; the
# grey line is what k passes over one token each would take. The space between the two is what speculative decoding lives on.


# %%
def fastest(turns, *jobs):
    """Seconds of each job: the best of some turns. Other programs on the machine can only add to it."""
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
print(f"{matrix.dtype}: reads {size / read / 1e9:.1f} GB/s, {here['operations'] / 1e9:.0f} billion operations a second")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5))
ks = torch.linspace(1, 64, 400).tolist()
left.plot(ks, [pass_time(k, **here) / read for k in ks], color=COLOURS["plain"])
left.plot(KS, [seconds / read for seconds in measured], "o", color=COLOURS["accent"])
left.text(1.1, 0.72, "roofline", color=COLOURS["plain"])
left.text(1.1, max(measured) / read, "measured", color=COLOURS["accent"], va="top")
left.set(title="one large matrix", xlabel="columns k", ylabel="T(k) / time to read the matrix")

right.plot(KS, KS, color=COLOURS["plain"])
right.plot(KS, list(v.values()), "o-", color=COLOURS["target"])
right.fill_between(KS, list(v.values()), KS, color=COLOURS["accepted"], alpha=0.15, linewidth=0)
right.text(6, 11, "k passes", color=COLOURS["plain"], rotation=38)
right.text(20, 0.8, "one pass", color=COLOURS["target"])
right.set(title="the model", xlabel="tokens in the pass, k", ylabel="T(k) / T(1)")
for axes in (left, right):
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.set_yticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.minorticks_off()
left.set_ylim(0.6, 1.3 * max(measured) / read)
right.set_ylim(0.5, 80)
plt.show()

# %% [markdown]
# Three things to see.
#
# - **The roof is a bound, not a forecast.** It says what the hardware allows. Programs stay above it. (The roof is measured too: a point a little below it is noise.) On many processors one column and several columns are computed by two different
#   routines, and there is a step between them that no roofline shows.
# - **A pass over a few tokens costs more than a pass over one, but not much more.** Write v(k) = T(k)/T(1). You will meet v(5) again: the price of checking four drafted tokens.
# - **The tiny model is flat for another reason.** Its weights are small enough to stay near the processor. What takes the time is calling many small operations in a row, and their number
#   does not depend on k. Large models are flat because of the memory, small ones because of such fixed costs. Speculative decoding can use both.
#
# What this one run cannot show: the curve of *your* model. The knee depends on the machine, the type of the numbers and the routines. `assisted doctor` measures it for a
# pair.
#
# ## When it loses
#
# The space is there as long as a pass waits for memory. Serve many texts at once, and it is gone: each row of the batch brings its own tokens, and the same fetched weights are
# used for all of them anyway. In the toy:

# %%
rows = [
    [n, pass_time(n), pass_time(5 * n), f"{pass_time(5 * n) / pass_time(n):.1f} times one"]
    for n in (1, 2, 4, 8, 16, 64)
]
show(table(["texts at once", "pass, 1 token each", "pass, 5 tokens each", "five cost"], rows))
assert pass_time(5) == pass_time(1) and pass_time(5 * 64) == 5 * pass_time(64)

# %% [markdown]
# With one or two texts, checking four drafted tokens is free. With sixteen it costs as much as writing five tokens, and a guess that may be wrong can't pay any more. Notebook
# [12](12_batches_and_serving.ipynb) measures it.
#
# ## Takeaway
#
# > A pass over one token mostly waits: for weights to arrive, or for one small operation after the other. A pass over a few tokens waits as long and does more. So a model checks tokens much
# > faster than it writes them, as long as the batch is small.

# %% [markdown]
# ## Exercises
#
# ### 1. Bytes per token
#
# Write `bytes_per_token(weights, bits, kv_bytes, context)`: how many bytes a pass fetches to write one token, if the model has so many weights of so many bits each, and a KV
# cache with `kv_bytes` for each of `context` tokens. (Divide the memory's bytes a second by it, and you have the most tokens a second that plain decoding can reach.)


# %% tags=["check"]
def check_1(candidate):
    for arguments, found in (
        ((7e9, 16, 131072, 0), 14e9),
        ((7e9, 4, 131072, 0), 3.5e9),
        ((7e9, 16, 131072, 1000), 14.131072e9),
    ):
        wrong = f"{arguments} gives {candidate(*arguments)}, and should give {found}."
        assert abs(candidate(*arguments) - found) < 1, wrong
    weights = weight_bytes(target) // target.lm_head.weight.element_size()
    bits, tokens = 8 * target.lm_head.weight.element_size(), text.shape[1] - 1
    found = candidate(weights, bits, kv // tokens, tokens)
    assert found == weight_bytes(target) + kv, "It is not what our model fetches."


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
# Write `kv_bytes(config, bytes_per_number)`: the bytes that a token takes in the KV cache, from the model's configuration. You need `num_hidden_layers`, `num_key_value_heads` and `head_dim`.
# The check counts the cache of the model above, and asks for a model where heads times `head_dim` is not the hidden size.


# %% tags=["check"]
def check_2(candidate):
    size = target.lm_head.weight.element_size()
    found, wanted = candidate(target.config, size), kv // (text.shape[1] - 1)
    assert found == wanted, f"The model's cache holds {wanted} bytes a token, not {found}."
    config = Qwen3Config(
        num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128
    )
    found = candidate(config, 2)
    assert found == 114688, f"28 layers with 8 heads of 128 numbers, 2 bytes each: 114688 bytes, not {found}."


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
# Write `knee(bandwidth, operations, bytes_per_weight)`: the number of tokens up to which a pass costs what one token costs. It need not be a whole number, and the size of the model plays no
# part. Then try weights of half a byte: what does quantizing a model do to the room for drafting?


# %% tags=["check"]
def check_3(candidate):
    found = candidate(100e9, 1e12, 2)
    assert abs(found - 10) < 1e-9, f"The toy's knee is at 10 tokens, not {found}."
    for bandwidth, operations, size in ((1e12, 160e12, 2), (1e12, 160e12, 0.5), (50e9, 0.8e12, 4)):
        k = candidate(bandwidth, operations, size)
        machine = dict(bandwidth=bandwidth, operations=operations, bytes_per_weight=size)
        one = pass_time(1, **machine)
        assert pass_time(0.999 * k, **machine) == one, f"{machine}: at {k:g} tokens the roof rises already."
        assert pass_time(1.001 * k, **machine) > one, f"{machine}: at {k:g} tokens the roof is still flat."


# %% tags=["exercise"]
def knee(bandwidth, operations, bytes_per_weight):
    raise NotImplementedError


attempt(check_3, knee)

# %% [markdown] tags=["answer"]
# Fetching takes `weights * bytes_per_weight / bandwidth`, computing takes `2 * weights * k / operations`. They are equal at the knee, and the weights cancel. Weights of half a byte in
# place of two move the knee to a quarter: a pass over one token becomes four times as fast, and there is less to gain from a pass over several.


# %% tags=["answer"]
def knee_answer(bandwidth, operations, bytes_per_weight):
    return operations * bytes_per_weight / (2 * bandwidth)


attempt(check_3, knee_answer)

# %% [markdown]
# ## References
#
# - Pope and others. Efficiently scaling transformer inference. [arXiv 2211.05102](https://arxiv.org/abs/2211.05102)
# - Shazeer. Fast transformer decoding: one write-head is all you need. [arXiv 1911.02150](https://arxiv.org/abs/1911.02150)
# - Leviathan, Kalman, Matias. Fast inference from transformers via speculative decoding. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next: notebook [02](02_the_acceptance_rule.ipynb), the acceptance rule.
