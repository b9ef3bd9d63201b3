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
# # 15. MTP and block drafters
#
# **What does a layer draft that ships inside the checkpoint, and why does a block drafter guess all its tokens at once?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks [08](08_medusa.ipynb) and
# [09](09_eagle.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import copy
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.utils.capture import capture_output
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import MTP, AssistedModelForCausalLM, DFlash, zoo
from assisted.lab.bench import held_out_prompts
from assisted.lab.training.trainer import train
from assisted.methods.dflash.train import BlockSettings, BlockTraining
from assisted.methods.mtp.train import MTPSettings, MTPTraining
from assisted.methods.shared.training.data import Text, tokenize
from assisted.methods.shared.training.method import Plan
from assisted.zoo import corpus

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, SHIPPED = "zoo:target", "zoo:hybrid"  # both heads are trained for TARGET; SHIPPED has an MTP layer of its own
# On a GPU of 24 GB, a checkpoint with an MTP layer: SHIPPED = "Qwen/Qwen3.5-4B"  (about 9 GB in bfloat16)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# The drafts of [notebook 09](09_eagle.ipynb) were trained by somebody after the target was finished. The two kinds of
# drafts that most people use in 2026 are made differently:
#
# - **MTP** (multi-token prediction). DeepSeek-V3, Qwen3.5, GLM-4.5 and others are trained with one more decoder layer,
#   which predicts the token *after* the next one. It helps the training, and it is published in the checkpoint. For
#   drafting, this layer is used again and again: one run for each drafted token.
# - **Block drafters** (DFlash). A few layers fill in a whole block of masked tokens in *one* run. No guess waits for
#   another.
#
# A run for every token, or one run for all: what does each of them cost, and what does each of them know?
#
# ## Your prediction
#
# Give both the same text, the same target and the same few hundred steps of training. Then measure how often their
# guess is right at position 1 and at position 5 of a draft, on text that neither has seen. Write down position 5 as a
# percentage of position 1: 100 means that the fifth guess is as good as the first.

# %%
prediction = {"MTP layer, position 5 (% of position 1)": None, "block drafter, position 5 (% of position 1)": None}

# %% [markdown]
# ## By hand: a city of two words
#
# The target writes names of two words. After *to*, it writes *New York* or *Los Angeles*, each with probability 1/2.
# *Los* is never followed by *York*.
#
# **One after the other** (MTP). The draft samples the first word, reads it, and then knows the second word. Every pair
# that it proposes is possible, and both words are accepted with probability 1.
#
# **All at once** (block). Both words are guessed in the same run, so the second row doesn't know what was sampled in
# the first row. The best that it can do is the distribution of the second word over *all* first words: *York* 1/2,
# *Angeles* 1/2. The acceptance rule of [notebook 02](02_the_acceptance_rule.ipynb) compares it with the target's
# distribution *after the first word*, which is certain. So the second word is accepted with probability
# $\sum_y \min(p(y \mid x), q(y)) = 1/2$.

# %%
pairs = {("New", "York"): 0.5, ("Los", "Angeles"): 0.5}


def shares(position):
    """The distribution of the word at one position, over everything before."""
    found = {}
    for words, probability in pairs.items():
        found[words[position]] = found.get(words[position], 0) + probability
    return found


q = shares(1)
second = sum(p * min(1.0, q[words[1]]) for words, p in pairs.items())  # p(second | first) is 1
one_by_one, at_once = 1 + 1 + 1, 1 + 1 + second  # the last 1 is the first word, the first one the target's own token
show(table(["draft", "runs", "tokens per pass"], [["one after the other", 2, one_by_one], ["all at once", 1, at_once]]))
assert at_once == 2.5

# %% [markdown]
# So the block loses half a token and saves a run. With longer drafts both numbers grow: an MTP layer runs $g$ times
# for $g$ tokens, a block drafter once, and the later a row is, the more it would have to know about the rows before it.
#
# ## From scratch: a layer that works, and what is in it
#
# ### First, drafts that work
#
# The shipped hybrid has an MTP layer in its checkpoint, which its makers trained on 7.4 million tokens. One word is
# enough to use it. For the other target, they trained a block drafter, on 3.7 million tokens. We let both targets
# continue eight functions that are cut off in the middle, from packages that neither the models nor the drafts have
# seen.

# %%
NEW, LENGTH = 40, 4
call = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
hybrid = AssistedModelForCausalLM.from_pretrained(SHIPPED, draft=MTP(tree=False), draft_length=LENGTH)
blocks = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DFlash("zoo:dflash", tree=False), draft_length=LENGTH)
prompts = [prompt.ids for prompt in itertools.islice(held_out_prompts(hybrid.tokenizer), 8)]


def tokens_per_pass(model, **more):
    model.reset_totals()
    for ids in prompts:
        model.generate(ids, **call, **more)
    return model.totals.tokens_per_pass


decoded = {"no draft": tokens_per_pass(hybrid, assisted=False), "MTP layer of the checkpoint": tokens_per_pass(hybrid)}
decoded["shipped block drafter"] = tokens_per_pass(blocks)
rates = [f"{rate:.0%}" for rate in blocks.totals.acceptance_by_position]
rows = [[name, TARGET if "block" in name else SHIPPED, number] for name, number in decoded.items()]
show(
    table(
        ["drafts of four tokens", "target", "tokens per pass"],
        [*rows[:2], ["no draft", TARGET, tokens_per_pass(blocks, assisted=False)], rows[2]],
    )
)
print("the block drafter's guesses that were accepted, by position:", *rates)
assert decoded["MTP layer of the checkpoint"] > 2 and decoded["shipped block drafter"] > 1.5

# %% [markdown]
# With the layer, the hybrid needs less than a third of its forward passes; with the block drafter, the other target needs
# half of them. The block drafter has read half as much text; its first guess is right twice in three times, and its fourth
# hardly ever. Why? What does such a layer compute, and how does a block drafter differ?
#
# ### One layer, arranged in two ways
#
# Both are ordinary decoder layers. They differ in what their rows are and in what the rows may read.
#
# | | rows | each row reads | runs |
# |---|---|---|---|
# | MTP | pairs: the target's state of token i, and token i + 1 | itself and the pairs before it | one per token |
# | block | the last token, then masks | **all** states of the target, and all rows of the block, also later ones | one |
#
# So one function for a layer is enough. `context` has rows that are only read. The queries come from `rows` alone.


# %%
def norm(x, module):
    return module.weight * x * (x.pow(2).mean(-1, keepdim=True) + target.config.rms_norm_eps).rsqrt()


def rotate(x, positions, speeds):
    """Rotary positions of x [n, heads, size] -> [heads, n, size]."""
    angles = (positions[:, None] * speeds)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).transpose(0, 1)


def layer(part, rows, positions, speeds, causal, context=None):
    """A decoder layer: rows [n, H] read themselves and, before them, the context [m, H]. positions: [m + n]."""
    attention, mlp, n = part.self_attn, part.mlp, len(rows)
    x = norm(rows, part.input_layernorm)
    read = x if context is None else torch.cat([context, x])
    query, key, value = (
        linear(source, one.weight).unflatten(-1, (-1, 64))  # heads of 64 numbers
        for source, one in ((x, attention.q_proj), (read, attention.k_proj), (read, attention.v_proj))
    )
    if hasattr(attention, "q_norm"):  # DFlash's layers are those of Qwen3, which norm queries and keys
        query, key = norm(query, attention.q_norm), norm(key, attention.k_norm)
    query, key = rotate(query, positions[-n:], speeds), rotate(key, positions, speeds)
    groups = len(query) // len(key)
    key, value = key.repeat_interleave(groups, 0), value.transpose(0, 1).repeat_interleave(groups, 0)
    seen = scaled_dot_product_attention(query, key, value, is_causal=causal)
    rows = rows + linear(seen.transpose(0, 1).flatten(1), attention.o_proj.weight)
    x = norm(rows, part.post_attention_layernorm)
    return rows + linear(silu(linear(x, mlp.gate_proj.weight)) * linear(x, mlp.up_proj.weight), mlp.down_proj.weight)


# %% [markdown]
# **MTP.** `fuse` makes one vector out of the token's embedding and the target's state, each with a norm. The layer runs,
# and the target's own output layer names the next token. For the token after that there is no state of the target, so
# the layer continues from its own, as EAGLE does.
#
# **Block.** `fc` makes one vector out of the tapped states of every earlier token. The block's first row is the last
# token of the text, and the others are one trained mask vector. The row at position *p* guesses the token at *p*.


# %%
def top1(states):
    return target.get_output_embeddings()(states).argmax(-1)


@torch.no_grad()
def draft_mtp(head, text, states, g):
    """g tokens, in g runs. states: [len(text) - 1, H], after the target's final norm."""
    tokens, own = torch.tensor(text[1:]), states
    for _ in range(g):
        both = torch.cat([norm(embed(tokens), head.embed_norm), norm(own, head.hidden_norm)], -1)
        rows, places = linear(both, head.fc.weight), torch.arange(len(tokens))
        out = norm(layer(head.layer, rows, places, head.rotary_emb.inv_freq, causal=True)[-1:], head.end_norm)
        tokens, own = torch.cat([tokens, top1(out)]), torch.cat([own, out])  # its own state, instead of the target's
    return tokens[-g:].tolist()


@torch.no_grad()
def draft_block(head, text, states, g):
    """At most as many tokens as the block has masks, in one run. states: [len(text) - 1, taps * H]."""
    context = norm(linear(states, head.fc.weight), head.hidden_norm)
    masks = head.mask_embedding.expand(head.config.block_size - 1, -1)
    rows = torch.cat([embed(torch.tensor(text[-1:])), masks])
    places = torch.arange(len(context) + len(rows))
    for part in head.layers:
        rows = layer(part, rows, places, head.rotary_emb.inv_freq, causal=False, context=context)
    return top1(norm(rows, head.norm))[1 : 1 + g].tolist()


# %% [markdown]
# Both need weights. We train both for the shipped target on the sources of ten modules of the standard library: **40
# steps of 4 x 80 tokens each, 13,000 tokens in all.** This shows that the code trains, and no more: the hybrid's layer
# has read almost six hundred times as much. The MTP layer starts as a copy of the target's last layer, and the block
# drafter starts from random weights.

# %% tags=["measured"]
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
embed = target.get_input_embeddings()

NAMES = "argparse ast collections/__init__ dataclasses difflib http/client logging/__init__ statistics textwrap unittest/mock".split()
library = Path(copy.__file__).parent
training = tokenize(tokenizer, [(library / f"{name}.py").read_text(encoding="utf-8") for name in NAMES])
held_out = tokenize(tokenizer, map(corpus.read, corpus.held_out_files()[:12]))
text = Text(training, held_out, "ten modules of the standard library")
plan = Plan(40, batch=4, context=80, lr=2e-3, optimizer="muon", evaluate_every=40, evaluate_rows=16)
methods = {
    "MTP layer": MTPTraining(target, MTPSettings(unroll=2)),
    "block drafter": BlockTraining(target, BlockSettings(layers=2, block=8, anchors=32)),
}
here, losses = {}, {}
for name, method in methods.items():
    with tempfile.TemporaryDirectory() as folder, capture_output():  # no progress bar here
        train(method, text, plan, folder, say=lambda line: None)
        lines = [json.loads(line) for line in (Path(folder) / "training.jsonl").read_text().splitlines()]
    losses[name] = [line["loss"] for line in lines if "loss" in line]
    here[name] = [line["greedy"] for line in lines if "greedy" in line][-1][:5]
    print(f"{name}: loss {losses[name][0]:.2f} before, {losses[name][-1]:.2f} after {plan.steps} steps")
    assert losses[name][-1] < losses[name][0]
mtp, block = (method.student.eval() for method in methods.values())

# %% [markdown]
# Now we decode with them. The loop is that of notebook 09: one pass of the target reads the text and the draft, and the
# guesses that equal the target's choices are kept.


# %%
@torch.no_grad()
def see(text):
    """One target pass. Returns its choice after each token, and the hidden states after each layer."""
    out = target(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    return out.logits[0].argmax(-1).tolist(), out.hidden_states


def decode(draft, head, prompt, new_tokens, g):
    """Greedy decoding. Returns the text and the number of target passes after the prompt."""
    choice, hidden = see(prompt)
    text, passes = [*prompt, choice[-1]], 0
    while len(text) < len(prompt) + new_tokens:
        states = torch.cat([hidden[tap] for tap in head.config.taps], -1)[0, : len(text) - 1]
        drafted = draft(head, text, states, g)
        choice, hidden = see(text + drafted)
        right = [a == b for a, b in zip(drafted, choice[len(text) - 1 :])]
        accepted, passes = (right + [False]).index(False), passes + 1
        text = text + choice[len(text) - 1 :][: accepted + 1]
    return text[: len(prompt) + new_tokens], passes


ways = {"MTP layer": (draft_mtp, mtp), "block drafter": (draft_block, block)}
ours = {name: decode(*way, prompts[0][0].tolist(), NEW, LENGTH) for name, way in ways.items()}

# %% [markdown]
# ## The library's call: `MTP` and `DFlash`
#
# `draft="mtp"` reads the layer from the target's own checkpoint, and `draft="dflash:..."` reads a block drafter from a
# folder or the Hub. A head in memory is possible, too. The text, and the number of passes, must be those of our loop.

# %% tags=["measured"]
specs = {"MTP layer": MTP(mtp, tree=False), "block drafter": DFlash(block, tree=False)}
models = {}
for name, spec in specs.items():
    models[name] = AssistedModelForCausalLM.from_models(target, draft=spec, tokenizer=tokenizer, draft_length=LENGTH)
    output = models[name].generate(prompts[0], **call)[0].tolist()
    assert output == ours[name][0], "the text is the target's"
    # the first pass of the report reads the prompt
    assert models[name].report.target_passes - ours[name][1] in (0, 1)
    print(f"{name}: {ours[name][1]} passes from scratch, {models[name].report.target_passes} by the library")

# %% [markdown]
# ## The picture: what is known at each position
#
# The table has the shares of right guesses at positions 1 to 5 of a draft, on text that was not trained on, and the
# tokens per pass in greedy decoding with drafts of four tokens. It begins with the most training. Of the two shipped
# drafts only the tokens per pass are given, as the layer belongs to another target. The next two rows are of our two methods after
# 400 steps of 8 x 128 tokens. They are copied from `benchmarks/drafts.json`, and
# `docs/benchmarks/trained-drafts.md` compares all methods in the same way. Our forty steps come last.

# %% tags=["measured"]
LONG = {"MTP layer": [0.450, 0.433, 0.430, 0.426, 0.421], "block drafter": [0.289, 0.174, 0.109, 0.090, 0.072]}
DECODED = {"MTP layer": 2.27, "block drafter": 1.43}  # tokens per pass, chains of four
nothing = [""] * 5
rows = [["no draft", *nothing, decoded["no draft"]]]
rows += [["MTP layer of the checkpoint, 7.4 million tokens", *nothing, decoded["MTP layer of the checkpoint"]]]
rows += [["shipped block drafter, 3.7 million tokens", *nothing, decoded["shipped block drafter"]]]
rows += [[f"{name}, 410,000 tokens", *LONG[name], DECODED[name]] for name in LONG]
rows += [[f"{name}, 13,000 tokens", *here[name], tokens_per_pass(model)] for name, model in models.items()]
show(table(["draft", *"12345", "tokens per pass"], rows))

# %% [markdown]
# The less training, the fewer tokens. After forty steps, both have learned hardly more than which tokens are frequent, so
# the last two rows say little. The two rows after 410,000 tokens answer the question:

# %%
measured = {
    name: round(100 * LONG[who][4] / LONG[who][0]) for name, who in zip(prediction, ("MTP layer", "block drafter"))
}
compare(prediction, measured)
assert min(measured.values()) < 40 < 80 < max(measured.values())

# %% [markdown]
# The fifth guess of the MTP layer is nearly as good as its first, because it has read the four tokens before. The fifth
# row of the block is right a quarter as often as the first. This is the city of two words again, for four words in
# between.
#
# What does the block gain? The lower panel computes the speedup from the upper panel: $S(g) = E(g) / (1 + 0.05\,g + c)$,
# where a pass over $g + 1$ positions costs $1 + 0.05\,g$ and each run of a layer 1/16 of a target pass, because the target has 16
# layers. For MTP, $c = g/16$. For the block, $c = 2/16$ for any length. The dashed line is a block drafter that does not
# exist: it is as often right as the MTP layer, at every position.


# %%
def expected(rates, g):
    """Tokens per pass of drafts of g tokens: 1 + a1 + a1 a2 + ... Each rate is among rounds that got there."""
    return 1 + sum(itertools.accumulate(rates[:g], lambda x, y: x * y))


def speedups(rates, runs):
    return [expected(rates, g) / (1 + 0.05 * g + runs(g) / 16) for g in range(1, 6)]


curves = {
    "MTP layer": speedups(LONG["MTP layer"], lambda g: g),
    "block drafter": speedups(LONG["block drafter"], lambda g: 2),
    "a block as right as MTP": speedups(LONG["MTP layer"], lambda g: 2),
}
show(table(["speedup at length", *"12345"], [[name, *values] for name, values in curves.items()]))

# %% tags=["folded", "measured"]
figure, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.4))
paint = {
    "MTP layer": COLOURS["accepted"],
    "block drafter": COLOURS["draft"],
    "a block as right as MTP": COLOURS["draft"],
}
places = range(1, 6)
for name in LONG:
    top.plot(places, LONG[name], "o-", color=paint[name], markersize=4)
    top.plot(places, here[name], "o:", color=paint[name], markersize=3)
    top.text(5.1, LONG[name][4], name, color=paint[name], va="center")
top.text(
    5.1, (here["MTP layer"][4] + here["block drafter"][4]) / 2 - 0.02, "40 steps", color=COLOURS["plain"], va="center"
)
top.set(
    title="right guesses by position", xlabel="position in the draft", ylim=(0, 0.5), xlim=(0.8, 7.2), xticks=places
)
for name, values in curves.items():
    below.plot(places, values, "--" if name.startswith("a ") else "o-", color=paint[name], markersize=4)
    below.text(5.1, values[-1], name, color=paint[name], va="center")
below.axhline(1, color=COLOURS["plain"], linewidth=1.2)
below.set(title="computed speedup", xlabel="drafted tokens", xlim=(0.8, 8.2), xticks=places)
plt.show()

# %% [markdown]
# - **The block's cost is flat, and so is its gain.** After the first token its curve only falls: another token costs no
#   run, but the row is so seldom right that it does not even pay for the longer verification.
# - **If its rows were as right as MTP's, the block would win at every length from three on.** This is what its authors
#   work on. DSpark adds a small correction of every row by the token before it, and DFlash2 chooses among the best
#   candidates of each row by the token before it. Both cost far less than a run of the layers.
# - **Published block drafters are much better than ours.** They have read at least a hundred times as much text. Their
#   fall from position to position remains (the paper reports 0.72 at the first and 0.63 at a later position, for chat).
#
# This run cannot show how the two compare after equal *long* training at real sizes. We have one small target, and the
# two heads with equal training have read 410,000 tokens, a hundredth of what published ones read, or less.
#
# ## When it loses: a checkpoint without its layer
#
# **The layer is lost on the way.** transformers does not load MTP layers and `save_pretrained` does not write them, so
# quantized and re-packed checkpoints often lack them. Some engines then start from random weights: the text stays exact,
# and no draft is accepted. The library raises an error that names what is missing:

# %%
try:
    AssistedModelForCausalLM.from_pretrained(TARGET, draft="mtp")
except ValueError as error:
    print(f"ValueError: {error}".replace(zoo.resolve(TARGET), TARGET)[:160])
else:
    raise AssertionError("this target has no MTP layer")

# %% [markdown]
# **The wrong layout.** In DFlash's files, the row at position *p* guesses the token at *p*. In DeepSpec's, it guesses
# the token after *p*. The files look alike. Read the wrong way, each guess is one position off, and a good drafter is
# right as rarely as ours after forty steps. So if a drafter is hardly ever right at position 1, suspect the file first.
#
# **Large batches** make drafting expensive for both, as [notebook 12](12_batches_and_serving.ipynb) shows: they save
# draft runs, and a large batch has no spare capacity for verification.
#
# ## Takeaway
#
# > An MTP layer is a draft that came with the target. It reads what it has just drafted, so its guesses stay good, and
# > each costs a run. A block drafter makes all guesses in one run, so length is free, but no row knows what the others
# > say, and later rows are right less often. One trades runs for knowledge, the other knowledge for runs.

# %% [markdown]
# ## Exercises
#
# ### 1. The mask of many blocks
#
# A block drafter learns from many blocks of one text at once. The keys are the `n` tokens of the text, followed by the
# rows of all blocks, `size` rows for each anchor. A row reads the text **before** its anchor, and all rows of its own
# block. Write `blocks_mask(n, anchors, size)`. It returns a list of lists of bools: for each row, in order, whether it
# reads each key.


# %% tags=["check"]
def check_1(candidate, seed=0):
    found = candidate(3, [1], 2)
    assert [list(map(bool, row)) for row in found] == [[True, False, False, True, True]] * 2, (
        "A text of three tokens and one block of two rows at 1: both rows read token 0 and both rows of the block."
    )
    rng = random.Random(seed)
    n, size = rng.randint(5, 9), rng.randint(2, 4)
    anchors = sorted(rng.sample(range(n), 3))
    found = candidate(n, anchors, size)
    assert len(found) == 3 * size, f"Three blocks of {size} rows have {3 * size} rows, not {len(found)}."
    for number, row in enumerate(found):
        own = number // size
        assert len(row) == n + 3 * size, (
            "Each row has an entry for each token of the text and for each row of each block."
        )
        assert sum(map(bool, row[:n])) == anchors[own] and all(row[: anchors[own]]), (
            f"Row {number} has its anchor at {anchors[own]}, and reads exactly the tokens before it."
        )
        assert [i // size for i, read in enumerate(row[n:]) if read] == [own] * size, (
            f"Row {number} reads all rows of block {own}, also later ones, and no others."
        )


# %% tags=["exercise"]
def my_blocks_mask(n, anchors, size):
    raise NotImplementedError


attempt(check_1, my_blocks_mask)


# %% tags=["answer"]
def blocks_mask(n, anchors, size):
    rows = [(block, anchor) for block, anchor in enumerate(anchors) for _ in range(size)]
    return [[key < anchor for key in range(n)] + [other == block for other, _ in rows] for block, anchor in rows]


attempt(check_1, blocks_mask)

# %% [markdown]
# ### 2. What independence costs
#
# Write `second_accepted(joint)`. `joint[x][y]` is the target's probability of the two tokens x and then y. The draft
# knows these probabilities exactly. It samples both tokens at once, each from its own distribution. Return the
# probability that the second token is accepted, given that the first was. (The first always is.) For the city of two
# words it is 1/2.


# %% tags=["check"]
def check_2(candidate, seed=0):
    assert abs(candidate([[0.5, 0.0], [0.0, 0.5]]) - 0.5) < 1e-9, "For New York and Los Angeles, the result is 1/2."
    rng = random.Random(seed)
    first, then = [rng.random() for _ in range(3)], [rng.random() for _ in range(4)]
    total = sum(first) * sum(then)
    alone = [[a * b / total for b in then] for a in first]
    assert abs(candidate(alone) - 1) < 1e-9, "If the second word does not depend on the first, nothing is lost."
    joint = [[rng.random() ** 3 for _ in range(4)] for _ in range(3)]
    total = sum(map(sum, joint))
    joint = [[value / total for value in row] for row in joint]
    later = [sum(row[y] for row in joint) for y in range(4)]
    wanted = 0.0
    for row in joint:  # x is drawn with its probability, y from `later`, and kept with probability min(1, p / q)
        for y, value in enumerate(row):
            wanted += sum(row) * later[y] * min(1, value / sum(row) / later[y])
    found = candidate(joint)
    assert abs(found - wanted) < 1e-9, f"For random probabilities the result is {wanted:.4f}, not {found:.4f}."


# %% tags=["exercise"]
def my_second_accepted(joint):
    return max(sum(row[y] for row in joint) for y in range(len(joint[0])))  # the most frequent second word


attempt(check_2, my_second_accepted)


# %% tags=["answer"]
def second_accepted(joint):
    q = [sum(column) for column in zip(*joint)]
    return sum(min(value, sum(row) * share) for row in joint for value, share in zip(row, q))


attempt(check_2, second_accepted)

# %% [markdown] tags=["answer"]
# The chance that the first word is x and the second y is kept is $p(x)\,q(y)\min(1, p(y \mid x)/q(y))$, which is
# $\min(p(x, y),\, p(x)\,q(y))$.

# %% [markdown]
# ### 3. How many layers may a block drafter have?
#
# Write `layers_allowed(rates, block_rates, g, c, v)`. Drafts have g tokens, a run of one layer costs c target passes,
# and `v[g]` is the cost of a pass over g + 1 positions. The MTP layer has the acceptance rates `rates`, and the block
# drafter, of any number of layers, has `block_rates` (each among rounds that got there). Return the largest whole
# number of layers with which the block drafter is at least as fast as the MTP layer, or 0 if there is none.


# %% tags=["check"]
def check_3(candidate, g=4, c=0.06, v=(1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4), seed=0):
    rng = random.Random(seed)
    same = [0.8] * g
    found = candidate(same, same, g, c, v)
    assert found == g, f"With equal rates, the block may have as many layers as MTP has runs, {g}, and not {found}."
    for _ in range(20):
        rates, worse = ([rng.uniform(0.3, 0.9) for _ in range(g)] for _ in range(2))
        found = candidate(rates, worse, g, c, v)
        assert found == int(found) >= 0, "Return a whole number, at least 0."
        mtp = expected(rates, g) / (v[g] + g * c)
        assert found == 0 or expected(worse, g) / (v[g] + found * c) >= mtp - 1e-9, (
            f"{found} layers are slower than MTP."
        )
        assert expected(worse, g) / (v[g] + (found + 1) * c) < mtp + 1e-9, (
            f"{found + 1} layers would be fast enough, too."
        )


# %% tags=["exercise"]
def my_layers_allowed(rates, block_rates, g, c, v):
    raise NotImplementedError


attempt(check_3, my_layers_allowed)


# %% tags=["answer"]
def layers_allowed(rates, block_rates, g, c, v):
    budget = (v[g] + g * c) * expected(block_rates, g) / expected(rates, g) - v[g]  # E' / (v + n c) >= E / (v + g c)
    return max(0, int(budget / c + 1e-9))


attempt(check_3, layers_allowed)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Train the block drafter with `markov="vanilla"` (DSpark) for the same forty steps. At which position would you
#    expect the gain, and is it there?
# 2. `MTPSettings(unroll=1)` trains the layer on its first step alone. What happens to positions 2 to 5? Compare with
#    the drift of notebook 09.

# %% [markdown]
# ## References
#
# - DeepSeek-AI. DeepSeek-V3 Technical Report (multi-token prediction). [arXiv 2412.19437](https://arxiv.org/abs/2412.19437)
# - Cai and others. FastMTP. [arXiv 2509.18362](https://arxiv.org/abs/2509.18362)
# - DFlash: block drafters that read the target's states. [arXiv 2602.06036](https://arxiv.org/abs/2602.06036)
# - Stern, Shazeer and Uszkoreit. Blockwise Parallel Decoding, where guessing at once began.
#   [arXiv 1811.03115](https://arxiv.org/abs/1811.03115)
#
# Next: the hybrid whose MTP layer we used has few keys and values to rewind. What does a rejected token cost there?
# [16. Hybrids](16_hybrids.ipynb).
