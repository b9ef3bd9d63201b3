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
# # 16. Hybrids
#
# **A recurrent state has no length to shorten. What does a rejected token cost?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks [02](02_the_acceptance_rule.ipynb)
# and [15](15_mtp_and_block_drafters.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import copy
import random
import sys

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from assisted import MTP, AssistedModelForCausalLM, zoo
from assisted.engine.delta import Read, delta_rule
from assisted.engine.masks import Columns

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET = "zoo:hybrid"  # nine layers with the gated delta rule, and three with attention, as in Qwen3.5
# On a GPU of 24 GB try TARGET = "Qwen/Qwen3.5-4B"  (about 9 GB in bfloat16; texts may then differ by rounding)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# A layer with attention keeps a key and a value for **every** token. If the target rejects the last three tokens of a
# draft, we forget the last three rows, and that is all.
#
# In many new models (Qwen3.5, Granite 4, LFM2, Nemotron-H), most layers have no keys and values. They have one **state**
# of fixed size, into which every token has been mixed. This makes long texts cheap. But the verification pass has mixed
# the whole draft into the state, the rejected tokens too. There is no row to forget.
#
# What has to be done after a rejection, and what does it cost: forward passes, positions that are read twice, or memory?
#
# ## Your prediction
#
# Below, the hybrid writes 60 tokens. Each round drafts 4 tokens, and one guess in six is wrong.
# Without drafts it needs 60 passes. How many passes does it need
#
# - if the states are copied before each round, and after a rejection the copy is restored and the accepted tokens are
#   read again in a **pass of their own**?
# - if they are read again **in front of the next draft**, in the same pass?

# %%
prediction = {"a pass of their own": None, "in front of the next draft": None}

# %% [markdown]
# ## By hand: what a write destroys
#
# In a layer with the **delta rule**, the state is a small table. A token comes with a key (which row of the table), a
# value, and a strength. It reads what the table returns for its key, and writes the *difference* to its value:
#
# $$S \leftarrow S + \beta\, k\,(v - S^\top k)^\top$$
#
# Take a table of two rows, keys that are simply "row 1" and "row 2", and strength 1:
#
# | token | key | value | the table returns | it writes u | the table after it |
# |---|---|---|---|---|---|
# | a | 1 | 5 | 0 | +5 | 5, 0 |
# | b | 2 | 3 | 0 | +3 | 5, 3 |
# | c | 1 | 8 | 5 | +3 | 8, 3 |
#
# Now c is rejected. Which table was there before? The table says (8, 3), and the token says "row 1 becomes 8". **Every
# number could have been there**: 5, 7 or 100. The write has destroyed it.

# %%
after_c = set()
for before in (5, 7, 100):
    table_of_two = torch.tensor([before, 3.0])
    key, value = torch.tensor([1.0, 0.0]), 8.0
    table_of_two += key * (value - table_of_two @ key)  # the delta rule
    after_c.add(tuple(table_of_two.tolist()))
print("after c:", after_c)
assert after_c == {(8.0, 3.0)}, "three different tables become the same one"

# %% [markdown]
# There are three remedies, and a better one:
#
# 1. **Copy and replay.** Copy the table before the draft. After a rejection, restore the copy and read the accepted tokens
#    again.
# 2. **A state for each position.** Keep the table after a, after b and after c, and choose one. Nothing is read again. The memory
#    grows with the draft.
# 3. **Undo.** Keep u = +3, and subtract it. This works here. But real layers also let the state *decay* by a factor at
#    each token. To undo it, we have to divide by the factor, and with a strong decay only rounding errors come back.
# 4. **Don't write yet.** Keep the table as it was, and what each token *would* write: its key and u. When it is known how
#    many tokens stay, add their writes. Nothing has to be undone. A pair (k, u) is much smaller than a table.
#
# ## From scratch: four ways through one layer
#
# The gated delta rule (arXiv 2412.06464) first lets the state decay by a factor $a$, then writes. `step` is one token.
# The state has `dk` rows and `dv` columns.


# %%
def step(state, k, v, decay, beta):
    """One token. state: [dk, dv]. Returns the next state, and what was written at the key."""
    state = decay * state
    u = beta * (v - k @ state)
    return state + torch.outer(k, u), u


def copy_and_replay(state, tokens, kept):
    """Returns the state after the kept tokens, steps that were run, numbers that were stored beside the state."""
    saved = state.clone()
    for token in tokens:
        state, _ = step(state, *token)
    if kept < len(tokens):
        state = saved
        for token in tokens[:kept]:
            state, _ = step(state, *token)
    return state, len(tokens) + (kept if kept < len(tokens) else 0), saved.numel()


def state_per_position(state, tokens, kept):
    states = [state]
    for token in tokens:
        states.append(step(states[-1], *token)[0])
    return states[kept], len(tokens), sum(one.numel() for one in states[1:])


def undo(state, tokens, kept):
    written = []
    for token in tokens:
        state, u = step(state, *token)
        written.append(u)
    for (k, _, decay, _), u in list(zip(tokens, written))[: kept - 1 if kept else None : -1]:
        state = (state - torch.outer(k, u)) / decay
    return state, len(tokens), sum(len(token[0]) + len(u) + 1 for token, u in zip(tokens, written))


# %% [markdown]
# The fourth way computes what a token would write from the **unchanged** state. Token $i$ sees the state, decayed by all
# factors up to $i$, and the earlier writes, each decayed by the factors after it:
#
# $$u_i = \beta_i \Big( v_i - G_i\, S^\top k_i - \sum_{j<i} \tfrac{G_i}{G_j} (k_j \cdot k_i)\, u_j \Big), \qquad
# S_n = G_n S + \sum_{j \le n} \tfrac{G_n}{G_j}\, k_j u_j^\top$$
#
# where $G_i$ is the product of the first $i$ factors. A token's place in the pass is called a column.


# %%
def columns(state, tokens, kept):
    """What each column writes, while the state stays as it is. Then the state after the kept ones, in one sum."""
    total, written = [], []  # G_i, and u_i
    for k, v, decay, beta in tokens:
        total.append(decay * (total[-1] if total else 1.0))
        seen = total[-1] * (k @ state)
        for (other, *_), earlier, u in zip(tokens, total, written):
            seen = seen + total[-1] / earlier * (other @ k) * u
        written.append(beta * (v - seen))
    stored = sum(len(k) + len(u) + 1 for (k, *_), u in zip(tokens, written))
    if not kept:
        return state, len(tokens), stored
    end = total[kept - 1]
    new = end * state + sum(end / total[j] * torch.outer(tokens[j][0], written[j]) for j in range(kept))
    return new, len(tokens), stored


# %% [markdown]
# We try all four on random tokens, with every number of kept tokens, and compare with the state after one token after
# the other.


# %%
def some_tokens(count, dk, dv, weakest=0.6):
    """Random tokens: key of length 1, value, decay, strength."""
    keys = torch.nn.functional.normalize(torch.randn(count, dk), dim=1)
    decays = torch.rand(count) * (1 - weakest) + weakest
    return list(zip(keys, torch.randn(count, dv), decays, torch.rand(count)))


DK, DV = 32, 64  # of one head of the shipped hybrid
state, tokens = torch.randn(DK, DV), some_tokens(5, DK, DV)
rows = []
for way in (copy_and_replay, state_per_position, undo, columns):
    found = [way(state.clone(), tokens, kept) for kept in range(6)]
    truth = [state_per_position(state, tokens, kept)[0] for kept in range(6)]
    error = max((one[0] - right).abs().max().item() for one, right in zip(found, truth))
    rows.append([way.__name__, found[2][1], found[2][2], f"{error:.0e}"])
    assert error < 1e-4
show(table(["five tokens read, two kept", "steps", "numbers stored", "largest error"], rows))

# %% [markdown]
# All four give the same state. Replay runs two more steps, a state per position stores 20 times as many numbers as the
# columns do. Now the same with strong decay, where some tokens multiply the state by as little as 0.001:

# %%
strong = some_tokens(5, DK, DV, weakest=0.0)
strong = [(k, v, decay * 0.03, beta) for k, v, decay, beta in strong]
truth = state_per_position(state, strong, 1)[0]
errors = {way.__name__: (way(state.clone(), strong, 1)[0] - truth).abs().max().item() for way in (undo, columns)}
print({name: f"{error:.0e}" for name, error in errors.items()})
assert errors["columns"] < 1e-4 < errors["undo"], "divided by tiny factors, rounding errors become large"

# %% [markdown]
# ### The whole model
#
# Now with the hybrid itself. To count exactly, the draft is the target's own greedy text, with about one token in six replaced
# by a wrong one. A copy of the cache is a copy of everything: states, and keys and values.

# %%
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
prompt = tokenizer("class Stack:\n    def push(self, item):\n", return_tensors="pt").input_ids
NEW, LENGTH = 60, 4
call = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=1)
plain = target.generate(prompt, **call)[0].tolist()


rng = random.Random(5)
mistakes = {at for at in range(prompt.shape[1], len(plain)) if rng.random() < 1 / 6}


def guesses(text, count):
    """The next tokens of the target's text, with some mistakes."""
    places = range(len(text), min(len(text) + count, len(plain)))
    return [plain[at] + (at in mistakes) for at in places]


def read(tokens, cache):
    return target(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0].argmax(-1).tolist()


# %%
@torch.no_grad()
def decode(length, most):
    """States are copied, and accepted tokens are read again: in a pass of their own if there are more than `most`.

    Returns the text, the passes after the prompt, and the positions in them."""
    cache = DynamicCache(config=target.config)
    text = prompt[0].tolist()
    text, unread, passes, positions = [*text, read(text, cache)[-1]], [], 0, 0
    while len(text) < len(plain):
        drafted = guesses(text, min(length, len(plain) - len(text) - 1))
        block = [*unread, text[-1], *drafted]
        saved = copy.deepcopy(cache)
        choice = read(block, cache)[len(unread) :]
        passes, positions = passes + 1, positions + len(block)
        accepted = [a == b for a, b in zip([*drafted, None], choice)].index(False)
        kept, unread = block[: len(block) - len(drafted) + accepted], []
        text = text + choice[: accepted + 1]
        if accepted < len(drafted):
            cache, unread = saved, kept
            if len(unread) > most:
                read(kept, cache)
                passes, positions, unread = passes + 1, positions + len(kept), []
    return text, passes, positions


ways = {"a pass of their own": decode(LENGTH, 0), "in front of the next draft": decode(LENGTH, 16)}
assert all(text == plain for text, *_ in ways.values()), "the text is the target's"
show(table(["accepted tokens are read again in", "passes", "positions"], [[n, p, s] for n, (_, p, s) in ways.items()]))
compare(prediction, {name: passes for name, (_, passes, _) in ways.items()})

# %% [markdown]
# Reading again in front of the next draft costs hardly any pass. It costs positions, and positions are cheap as long as a
# pass has time to spare ([notebook 01](01_why_decoding_is_slow.ipynb)). There is a catch: if the next draft is rejected
# as well, the restored copy is still the old one, so the accepted tokens of *both* rounds are read again, and so on.
# Therefore more than 16 unread tokens get a pass of their own, here and in the library.
#
# ## The library's call: copies with `fast="eager"`, columns otherwise
#
# The library uses columns for layers with the gated delta rule. With `fast="eager"`, where only the model's own code
# runs, it copies. We check three things. Its layer writes what our `columns` writes, for our tokens:

# %%
k, v, decay, beta = (torch.stack(part) for part in zip(*tokens))
both = torch.cat([k, k])  # queries, which do not matter here, then keys
as_heads = (part[None, None] for part in (both, v, decay.log(), beta))  # one row, one head
of_all, states = Columns(len(tokens)), [torch.zeros(1, 1, 4), state[None, None]]
_, noted = delta_rule(*as_heads, state[None, None], of_all)
layer_read = Read(torch.zeros(1, 1, 4 + len(tokens)), *noted)
for kept in range(1, 6):
    theirs = layer_read.states_after(torch.tensor([kept - 1]), states, of_all)[1][0, 0]
    assert torch.allclose(theirs, columns(state, tokens, kept)[0], atol=1e-4)
print("the library's layer and ours agree for every number of kept tokens")

# %% [markdown]
# Both ways write the text of plain `generate`, here with the MTP layer of the checkpoint as the draft. And the bytes in
# the report are those that we compute by hand:

# %%
linear = [kind for kind in target.config.layer_types if kind == "linear_attention"]
heads, taps = target.config.linear_num_value_heads, target.config.linear_conv_kernel_dim
channels = 2 * target.config.linear_num_key_heads * DK + heads * DV  # what the short convolution reads
ONE = len(linear) * 4 * (heads * DK * DV + channels * taps)  # bytes of all states of one text, in float32


def column_bytes(n):
    """What is kept of a pass over n columns: key, write, decay, and the convolution's inputs."""
    return len(linear) * 4 * (n * heads * (DK + DV + 1) + channels * (taps + n))


reports = {}
for fast in ("eager", "auto"):
    model = AssistedModelForCausalLM.from_models(
        target, draft=MTP(TARGET, tree=False), tokenizer=tokenizer, draft_length=LENGTH, fast=fast
    )
    assert model.generate(prompt, **call)[0].tolist() == plain
    reports[fast] = model.report
    print(f'fast="{fast}": {model.report.target_passes} passes, {model.report.state_bytes:,} bytes of states')
assert reports["eager"].state_bytes == 2 * ONE, "the states, and a copy"
assert reports["auto"].state_bytes == ONE + column_bytes(LENGTH + 1), "the states, and what five columns would write"
assert reports["eager"].target_passes == reports["auto"].target_passes

# %% [markdown]
# ## The picture: what each way pays
#
# The upper panel counts the positions that the target reads for a new token, by draft length, with our planted
# drafts. The lower panel shows the memory of one text.

# %%
LENGTHS = (1, 2, 4, 6, 8, 12)
counts = {}
for length in LENGTHS:
    for name, most in (("a pass of their own", 0), ("in front", 16)):
        text, passes, positions = decode(length, most)
        assert text == plain
        counts[name, length] = passes, positions / (NEW - 1)


def rounds(length):
    """Rounds and positions if nothing is read again."""
    text, found = plain[: prompt.shape[1] + 1], []
    while len(text) < len(plain):
        drafted = guesses(text, min(length, len(plain) - len(text) - 1))
        right = [a == b for a, b in zip(drafted, plain[len(text) :])]
        text = plain[: len(text) + [*right, False].index(False) + 1]
        found.append(1 + len(drafted))
    return found


for length in LENGTHS:
    counts["columns", length] = len(rounds(length)), sum(rounds(length)) / (NEW - 1)
memory = {
    "copies": [2 * ONE for _ in LENGTHS],
    "a state per position": [ONE * (length + 2) for length in LENGTHS],
    "columns": [ONE + column_bytes(length + 1) for length in LENGTHS],
}
names = ("a pass of their own", "in front", "columns")
header = ["drafted tokens", *(f"passes, {name}" for name in names)]
show(table(header, [[length, *(counts[name, length][0] for name in names)] for length in LENGTHS]))
assert all(counts["a pass of their own", g][0] >= counts["in front", g][0] >= counts["columns", g][0] for g in LENGTHS)

# %% tags=["folded"]
figure, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.4))
paint = {"a pass of their own": "rejected", "in front": "draft", "columns": "accepted"}
label = {"a pass of their own": "again, own pass", "in front": "again, in front", "columns": "columns"}
for name, colour in paint.items():
    values = [counts[name, length][1] for length in LENGTHS]
    top.plot(LENGTHS, values, "o-", color=COLOURS[colour], markersize=4)
    lift = {"a pass of their own": -0.12, "in front": 0.12, "columns": 0}[name]
    top.text(12.2, values[-1] + lift, label[name], color=COLOURS[colour], va="center")
top.set(title="positions read for a new token", xlabel="drafted tokens", xlim=(0.5, 17), ylim=(0, None), xticks=LENGTHS)
paint = {"copies": "draft", "a state per position": "bonus", "columns": "accepted"}
for name, colour in paint.items():
    below.plot(LENGTHS, [value / 2**20 for value in memory[name]], "o-", color=COLOURS[colour], markersize=4)
    lift = {"copies": -0.12, "columns": 0.16}.get(name, 0)
    below.text(12.2, memory[name][-1] / 2**20 + lift, name, color=COLOURS[colour], va="center")
below.set(title="MiB of one text", xlabel="drafted tokens", xlim=(0.5, 18.5), ylim=(0, None), xticks=LENGTHS)
plt.show()

# %% [markdown]
# - **A pass of their own** costs passes, the most expensive thing there is. **In front** costs positions instead.
# - **A state per position** costs memory. This is what several servers do. For a model with 397 billion weights, 90
#   MiB for a text became 360 MiB at three drafted tokens.
# - **Columns** cost no pass and no position, and up to eight drafted tokens less memory than a copy. In larger models
#   they are smaller still: a head's state has `dk * dv` numbers and a column `dk + dv + 1`, which is 16,384 and 257 in
#   Qwen3.5, and 2,048 and 97 here.
#
# This run cannot show times. The target is small, and on a CPU the copy of its states takes a few microseconds.
#
# ## When it loses: a state that was not restored
#
# **Forgetting to restore is silent.** transformers refuses to shorten the cache of a hybrid, and it is right to do so:

# %%
cache = DynamicCache(config=target.config)
with torch.no_grad():
    read(prompt[0].tolist(), cache)
try:
    cache.crop(-1)
except RuntimeError as error:
    print(f"RuntimeError: {error}"[:110])
else:
    raise AssertionError("a recurrent state was shortened")


# %% [markdown]
# What if a program shortens the keys and values only, and forgets the states? No error is raised, and nothing in the
# acceptance rate points to it. We write the same text in this way and look for the first wrong token:


# %%
@torch.no_grad()
def forgetful(length):
    """As `decode`, but after a rejection only keys and values are shortened."""
    cache, text = DynamicCache(config=target.config), prompt[0].tolist()
    text = [*text, read(text, cache)[-1]]
    accepted_tokens = drafted_tokens = 0
    while len(text) < len(plain):
        drafted = guesses(text, min(length, len(plain) - len(text) - 1))
        choice = read([text[-1], *drafted], cache)
        accepted = [a == b for a, b in zip([*drafted, None], choice)].index(False)
        text = text + choice[: accepted + 1]
        for layer, kind in zip(cache.layers, target.config.layer_types):
            if kind != "linear_attention":
                layer.keys, layer.values = (part[:, :, : len(text) - 1] for part in (layer.keys, layer.values))
        accepted_tokens, drafted_tokens = accepted_tokens + accepted, drafted_tokens + len(drafted)
    return text, accepted_tokens / max(1, drafted_tokens)


wrong, rate = forgetful(LENGTH)
first = next(at for at, (a, b) in enumerate(zip(wrong, plain)) if a != b) - prompt.shape[1]
print(f"new token {first} is the first wrong one")
print("right:", repr(tokenizer.decode(plain[prompt.shape[1] + first - 8 : prompt.shape[1] + first + 12])))
print("wrong:", repr(tokenizer.decode(wrong[prompt.shape[1] + first - 8 : prompt.shape[1] + first + 12])))
assert wrong != plain

# %% [markdown]
# So a test of a hybrid has to compare **texts or states after a rejection** with those of a fresh read. The library does
# so with twelve tokens when a pair is made, and refuses a target whose states cannot be restored.
#
# **Batches with copies.** A restored copy is as long in every row, so rows run in lockstep, with the cost that [notebook
# 12](12_batches_and_serving.ipynb) shows. Columns do not have this limit.
#
# **Trees.** A copy follows one path. Columns work for trees as well, since each column needs its ancestors only
# (exercise 1).
#
# ## Takeaway
#
# > A rejected token costs nothing in a cache of keys and values, and it has already changed a recurrent state. Nothing
# > can be taken out of the state, so either copy it and read the accepted tokens again, or keep one for each position, or,
# > best, don't change it before the verdict: keep what each token would write, and add the writes that stay.

# %% [markdown]
# ## Exercises
#
# ### 1. The state after a node of a tree
#
# The columns of a pass form a tree: `parents[i]` is the column before column i, or -1 for a column that follows the
# state itself. Write `state_after(state, keys, written, decays, parents, node)`. It returns the state after `node` and
# its ancestors, and nothing of the other columns. `decays[i]` is the factor of column i alone.


# %% tags=["check"]
def check_1(candidate, seed=0):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    parents = [-1, 0, 0, *(rng.randrange(3) for _ in range(4))]
    begin, some = torch.randn(3, 2), some_tokens(7, 3, 2)
    states, written = [], []
    for token, parent in zip(some, parents):  # one after the other, each after its own parent
        after, u = step(states[parent] if parent >= 0 else begin, *token)
        states.append(after)
        written.append(u)
    keys, decays = [token[0] for token in some], [token[2] for token in some]
    for node in range(7):
        found = candidate(begin.clone(), keys, written, decays, parents, node)
        assert found.shape == begin.shape, f"The state is {tuple(begin.shape)}, not {tuple(found.shape)}."
        assert torch.allclose(found, states[node], atol=1e-4), (
            f"Parents {parents}: the state after column {node} differs by {(found - states[node]).abs().max():.2f}."
        )


# %% tags=["exercise"]
def my_state_after(state, keys, written, decays, parents, node):
    for i in range(node + 1):  # a chain, whatever the parents say
        state = decays[i] * state + torch.outer(keys[i], written[i])
    return state


attempt(check_1, my_state_after)


# %% tags=["answer"]
def state_after(state, keys, written, decays, parents, node):
    if node < 0:
        return state
    before = state_after(state, keys, written, decays, parents, parents[node])
    return decays[node] * before + torch.outer(keys[node], written[node])


attempt(check_1, state_after)

# %% [markdown]
# ### 2. The other state
#
# The layer also has a short convolution over the last K inputs, so it keeps these: `old`, [K, C], the newest last. A
# pass reads n more inputs, `new`, [n, C], and the first `kept` of them stay. Write `inputs_after(old, new, kept)`. It
# returns the last K inputs of the text as it then is. (`kept` may be 0, and less or more than K.)


# %% tags=["check"]
def check_2(candidate, seed=0):
    torch.manual_seed(seed)
    size, n = 4, random.Random(seed).randint(5, 8)
    old, new = torch.randn(size, 2), torch.randn(n, 2)
    for kept in range(n + 1):
        found = candidate(old.clone(), new.clone(), kept)
        assert found.shape == old.shape, f"With {kept} kept, the result has the shape {tuple(found.shape)}."
        text = [*old.unbind(), *new[:kept].unbind()]
        assert torch.equal(found, torch.stack(text[-size:])), (
            f"With {kept} of {n} inputs kept, these are not the last {size} inputs of the text."
        )


# %% tags=["exercise"]
def my_inputs_after(old, new, kept):
    return torch.cat([old, new])[-4:]


attempt(check_2, my_inputs_after)


# %% tags=["answer"]
def inputs_after(old, new, kept):
    return torch.cat([old, new])[kept : kept + len(old)]


attempt(check_2, inputs_after)

# %% [markdown]
# ### 3. How much is read again?
#
# States are copied, and a draft has g tokens. Each is accepted with probability a, if those before it were. After a
# rejection, the last committed token and the accepted ones are read again, in a pass of their own. Write
# `read_again(a, g)`. It returns the expected number of positions that are read again in a round. If all are accepted,
# nothing is.


# %% tags=["check"]
def check_3(candidate, a=0.8, g=4):
    assert abs(candidate(0.5, 1) - 0.5) < 1e-9, "One token, accepted half of the time: 1 position half of the time."
    assert candidate(1.0, g) == 0, "If every token is accepted, nothing is read again."
    assert abs(candidate(0.0, g) - 1) < 1e-9, "If none is, one position is read again: the last committed token."
    rng, total, times = random.Random(0), 0, 20000
    for _ in range(times):
        accepted = 0
        while accepted < g and rng.random() < a:
            accepted += 1
        total += (accepted + 1) * (accepted < g)
    found, margin = candidate(a, g), 5 * g / times**0.5
    assert abs(found - total / times) < margin, f"In {times} rounds, {total / times:.2f} on average, not {found:.2f}."


# %% tags=["exercise"]
def my_read_again(a, g):
    return g * (1 - a)


attempt(check_3, my_read_again)


# %% tags=["answer"]
def read_again(a, g):
    return sum((n + 1) * a**n * (1 - a) for n in range(g))


attempt(check_3, read_again)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. A server has 64 texts of a hybrid and drafts of three tokens. For the shapes in the config of a model that you use,
#    compute the memory of the ways above. Which of them fit?
# 2. After `forgetful` went wrong, how long does the error last? Compare the states of a layer with the right ones, token
#    by token. Which decay factors would let it vanish?

# %% [markdown]
# ## References
#
# - Yang, Kautz and Hatamizadeh. Gated Delta Networks. [arXiv 2412.06464](https://arxiv.org/abs/2412.06464)
# - Yang and others. Parallelizing Linear Transformers with the Delta Rule over Sequence Length.
#   [arXiv 2406.06484](https://arxiv.org/abs/2406.06484)
#
# Next: what if a grammar decides which tokens are possible at all? [17. JSON and tools](17_json_and_tools.ipynb).
