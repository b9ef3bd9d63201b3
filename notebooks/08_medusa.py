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
# # 08. Medusa
#
# **Can a model guess several tokens at once from one hidden state, and how good are the guesses?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks
# [02](02_the_acceptance_rule.ipynb) and [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import heapq
import itertools
import random
import sys
from collections import Counter
from itertools import islice

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import silu
from transformers import AutoTokenizer

from assisted import AssistedModelForCausalLM, LossyTypical, Medusa, zoo
from assisted.core.drafts import Draft
from assisted.lab.bench import held_out_prompts
from assisted.methods.shared.trees import best_paths

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, DRAFT = "zoo:target", "zoo:medusa"
# On a GPU of 24 GB try real heads, about 15 GB in float16:
# TARGET, DRAFT = "lmsys/vicuna-7b-v1.3", "FasterDecoding/medusa-vicuna-7b-v1.3"

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# So far, a second model wrote the draft, or the target's own first layers ([notebook 05](05_early_exit.ipynb)), or the
# text itself ([notebook 07](07_ngram_and_suffix.ipynb)). A model drafts one token at a time, and each token needs a
# forward pass. Copying needs none, but works only where the text repeats itself.
#
# There is a third way. Before the target chooses the next token, everything it has computed about the text is in one
# vector, its last **hidden state**. An output layer turns this vector into a probability for each token. Medusa adds
# more such layers, called **heads**. Head 1 is trained to predict the token after the next one, head 2 the token after
# that, and so on. All heads read the same vector at the same time. So a draft of four tokens needs no extra forward
# pass of a model.
#
# There is a catch. When head 1 guesses, the next token is not chosen yet, or it was just chosen and the head cannot
# read it. Head 4 guesses across four tokens that it has not read.
#
# ## Your prediction
#
# The shipped target writes Python and has four trained heads. We count how often a head's top-1 guess is the token that
# the target itself chooses at that position. For the target's own output layer this is 100 of 100, by definition. Write
# down two numbers:
#
# 1. How many of 100 are right for head 1? How many for head 4?
# 2. A pass may check 16 drafted tokens. You can distribute them over the guesses of the four heads as you like. How
#    many tokens does a pass yield on average, including the target's own?

# %%
prediction = {
    "right of 100, head 1": None,
    "right of 100, head 4": None,
    "tokens per pass, 16 nodes": None,
}

# %% [markdown]
# ## By hand: a list of guesses or a tree
#
# The target has just written a word. Head 1 guesses the word after it, and head 2 guesses the word after that. Suppose
# that we know how often their guesses are right:
#
# | | top-1 guess | second | third |
# |---|---|---|---|
# | head 1 | `.` 0.5 | `(` 0.3 | `,` 0.1 |
# | head 2 | `x` 0.4 | `y` 0.2 | |
#
# **A list** takes the top-1 guess of each head: `.` and then `x`. The target accepts `x` only if `.` was right as well.
# If the two are independent, both are right with probability 0.5 · 0.4 = 0.2. So a list of two drafted tokens yields,
# including the target's own token,
#
# $$1 + 0.5 + 0.2 = 1.7 \text{ tokens per pass.}$$
#
# The second drafted token added 0.2. The *second* guess of head 1, `(`, would have added 0.3. The guesses `.` and `(`
# cannot follow each other. They are alternatives, and drafts with alternatives form a **token tree**. A drafted token
# in a tree is called a node. The value of a node is the product of the probabilities on the path to it. Here are the
# first four nodes, ordered by value:

# %%
rates = [[0.5, 0.3, 0.1], [0.4, 0.2]]
names = [[".", "(", ","], ["x", "y"]]

values = {(a,): rates[0][a] for a in range(3)}
values |= {(a, b): rates[0][a] * rates[1][b] for a, b in itertools.product(range(3), range(2))}
rows, total = [], 1.0
for path in sorted(values, key=lambda path: -values[path])[:4]:
    total += values[path]
    rows.append([len(rows) + 1, " ".join(names[head][guess] for head, guess in enumerate(path)), values[path], total])
show(table(["node", "path", "value", "tokens per pass"], rows))

# %% [markdown]
# Two nodes yield 1.8 instead of 1.7 tokens. This is the whole idea: **where a head is uncertain, its second guess has a
# higher value than the first guess of the next head.** The greedy choice is also optimal. A node never has a higher
# value than its parent, so the nodes with the highest values always form a tree.
#
# How can one pass of the target check a tree? In a forward pass, every token attends to the tokens before it. We append
# all nodes to the text, one after the other. Each node may attend to the text, to its ancestors in the tree, and to
# itself, but to nothing else. `(` must not attend to `.`, because in the path of `(` there is no `.`. A table of zeros
# and ones defines which row may attend to which column. It is called the **attention mask**:
#
# | | . | ( | . x | ( x |
# |---|---|---|---|---|
# | **.** | 1 | | | |
# | **(** | | 1 | | |
# | **. x** | 1 | | 1 | |
# | **( x** | | 1 | | 1 |
#
# The position id of a node depends on its depth. `.` and `(` both have the position directly after the text.

# %% [markdown]
# ## From scratch: heads, a tree, and its mask
#
# We start with the heads. Each head is one block, x + SiLU(Wx + b), and an output layer. The input x is the hidden
# state that the target's own output layer reads. We load the weights through the library and do the arithmetic
# ourselves.

# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=Medusa(DRAFT, tree=False), draft_length=4)
model.to("cuda" if torch.cuda.is_available() else "cpu")
target, heads = model.target, model.drafter.heads
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET), padding_side="left")


def head_logits(head, state):
    """A head's logits for the token 2 + head positions after the state's own token. state: [..., H] -> [..., V]"""
    x = state
    for weight, bias in zip(heads.weight[:, head], heads.bias[:, head]):
        x = x + silu(x @ weight.T + bias)
    output = target.get_output_embeddings().weight if heads.output is None else heads.output[head]
    return x @ output.T


state = torch.randn(3, heads.hidden_size, device=model.device, dtype=model.dtype)
library = heads(state, target.get_output_embeddings())
assert all(torch.allclose(head_logits(h, state), library[h], atol=1e-2) for h in range(heads.heads))
print(f"{heads.heads} heads of {heads.layers} block each, a hidden state of {heads.hidden_size} numbers")

# %% [markdown]
# How often are the heads right? We take functions that neither the target nor the heads were trained on. At every
# position of a text, head h guesses a token. Later, when the target has read up to there, it makes its own choice.
# `hits[h][r]` is the share of positions where guess number r of head h is the target's choice.

# %%
GUESSES = 8
prompts = list(islice(held_out_prompts(tokenizer), 32))
texts = torch.cat([prompt.ids[:, :120] for prompt in prompts[8:]]).to(model.device)

out = target(texts, output_hidden_states=True)
choice, states = out.logits.argmax(-1), out.hidden_states[-1]  # [B, T], [B, T, H]
hits = []
for h in range(heads.heads):
    guessed = head_logits(h, states).topk(GUESSES).indices[:, : -1 - h]  # at position t, the guess is about t + 2 + h
    right = guessed == choice[:, 1 + h :, None]  # the target chooses that token at position t + 1 + h
    hits.append(right.float().mean((0, 1)).tolist())

rows = [[f"head {h + 1}", *row[:3], sum(row)] for h, row in enumerate(hits)]
show(table(["", "top-1 guess", "second", "third", f"among the top {GUESSES}"], rows))
assert all(sum(near) > sum(far) for near, far in itertools.pairwise(hits))

# %% [markdown]
# This is the first answer. One guess in four is right for head 1, and one in fourteen for head 4. The share falls fast,
# because a head has to guess across tokens that it has not read. But the right token is among a head's eight best
# guesses two to five times as often as it is the top-1 guess. A tree can use this.
#
# Now we build the tree. `best_tree` takes the node with the highest value again and again, and adds the children of
# that node to the candidates.


# %%
def best_tree(rates, size):
    """The `size` nodes of highest value as (parent, head, guess, value). Parents come first; -1 is the text."""
    nodes, offered = [], [(-rate, -1, 0, guess) for guess, rate in enumerate(rates[0])]
    heapq.heapify(offered)
    while offered and len(nodes) < size:
        minus_value, parent, head, guess = heapq.heappop(offered)
        nodes.append((parent, head, guess, -minus_value))
        if head + 1 < len(rates):
            for child, rate in enumerate(rates[head + 1]):
                heapq.heappush(offered, (minus_value * rate, len(nodes) - 1, head + 1, child))
    return nodes


tree = best_tree(hits, 16)
print("nodes by head:", dict(sorted(Counter(f"head {head + 1}" for _, head, _, _ in tree).items())))
print(f"predicted: {1 + sum(value for *_, value in tree):.2f} tokens per pass")

# %% [markdown]
# Next we need the mask, and a pass of the target with it. A node attends to everything that its parent attends to, and
# to itself.


# %%
def tree_mask(parents):
    """[n, n] bool, true where the node of the row may attend to the node of the column."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def pass_over(text, tokens, parents):
    """One pass over the text and a tree after it: logits and states at the text's last token and at each node."""
    t, mask = len(text), tree_mask(parents)
    visible = torch.ones(t + len(tokens), t + len(tokens), dtype=torch.bool).tril()
    visible[t:, t:] = mask
    positions = torch.cat(
        [torch.arange(t), t - 1 + mask.sum(1)]
    )  # a node of depth d is d positions after the text's last token
    ids, visible, positions = (
        x.to(model.device) for x in (torch.tensor([text + tokens]), visible[None, None], positions[None])
    )
    out = target(ids, attention_mask=visible, position_ids=positions, output_hidden_states=True, use_cache=False)
    return out.logits[0, t - 1 :], out.hidden_states[-1][0, t - 1 :]


text, parents = prompts[0].ids[0].tolist(), [-1, -1, 0, 1]  # the tree of the mask above
tokens = [tokenizer(s, add_special_tokens=False).input_ids[0] for s in (".", "(", "x", "x")]
logits, _ = pass_over(text, tokens, parents)
alone = [
    pass_over(text + path, [], [])[0][0]
    for path in ([tokens[0]], [tokens[1]], [tokens[0], tokens[2]], [tokens[1], tokens[3]])
]
print(
    f"largest difference from a pass over each path alone: {max((a - b).abs().max().item() for a, b in zip(alone, logits[1:])):.0e}"
)
assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(alone, logits[1:])) or model.dtype != torch.float32

# %% [markdown]
# At each node, the pass over the tree gives the same logits as a pass over the node's path alone. So we can read the
# target's choices from the tree. Start at the text, go to the child that contains the target's choice, and continue
# from there. If no child contains it, the choice is the target's own token, and the round (the draft-verify step) ends.
#
# One detail decides everything. The heads read the state **from which the last token was chosen**, not the state of
# that token. The latter does not exist yet.


# %%
def decode(prompt, new_tokens, propose):
    """Greedy decoding. propose(state) gives tokens and their parents. Returns the text and the passes after the prompt."""
    logits, states = pass_over(prompt, [], [])
    text, state, passes = [*prompt, logits[0].argmax().item()], states[0], 0
    while len(text) < len(prompt) + new_tokens:
        tokens, parents = propose(state)
        logits, states = pass_over(text, tokens, parents)
        choice, node, passes = logits.argmax(-1).tolist(), -1, passes + 1
        while node is not None:
            state = states[node + 1]
            text = [*text, choice[node + 1]]
            below = (i for i, parent in enumerate(parents) if parent == node and tokens[i] == text[-1])
            node = next(below, None)
    return text[: len(prompt) + new_tokens], passes


def propose_list(state):
    return [head_logits(h, state).argmax().item() for h in range(heads.heads)], list(range(-1, heads.heads - 1))


def propose_tree(state):
    guesses = [head_logits(h, state).topk(GUESSES).indices.tolist() for h in range(heads.heads)]
    return [guesses[head][guess] for _, head, guess, _ in tree], [parent for parent, *_ in tree]


NEW = 40
prompt = prompts[0].ids[0].tolist()
baseline, listed, treed = (
    decode(prompt, NEW, propose) for propose in (lambda state: ([], []), propose_list, propose_tree)
)
rows = [
    [name, passes, (NEW - 1) / passes]
    for name, (_, passes) in {"no draft": baseline, "list": listed, "tree of 16": treed}.items()
]
show(table(["", "passes", "tokens per pass"], rows))
assert (baseline[0] == listed[0] == treed[0] and treed[1] < listed[1] < baseline[1]) or model.dtype != torch.float32

# %% [markdown]
# The three runs write the same text, with fewer and fewer passes. (The pass over the prompt yields the first token and
# is not counted.) The tokens per pass are higher than the rates predicted. The rates were counted on text that people
# wrote, and greedy text of a small model is easier to guess.
#
# ## The library's call: `Medusa`
#
# `Medusa(..., tree=False)` drafts the list. It must need the same number of passes as our loop, and write the same
# text.

# %%
ids = prompts[0].ids.to(model.device)
ours, library = listed, model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
print(
    model.report.target_passes,
    "passes, acceptance by position:",
    [round(share, 2) for share in model.report.acceptance_by_position],
)
if model.dtype == torch.float32:
    assert library[0].tolist() == ours[0]
    assert model.report.target_passes == ours[1]

parents = [parent for parent, *_ in tree]
draft = Draft(torch.zeros(1, 16).long(), torch.tensor([16]), parents=torch.tensor([parents]))
assert torch.equal(draft.ancestors()[0], tree_mask(parents))

some = [sorted(torch.rand(5).tolist(), reverse=True) for _ in range(4)]
assert torch.allclose(
    torch.tensor(best_paths(some, 30).worth), torch.tensor([value for *_, value in best_tree(some, 30)])
)

# %% [markdown]
# Our tree has the same shape at all positions of all texts. The library builds a new tree in every round. Where a head
# is confident, the tree is deep. Where it is not, the tree is wide. Heads are mostly overconfident, so the library
# corrects their probabilities. It counts how often earlier guesses with the same head, rank and confidence were right.
# The counts start empty. On a first text, a tree that was measured beforehand can therefore be better, as it is here.
# `nodes=16` sets a fixed tree size of 16 nodes. By default, the size is chosen by cost.


# %%
def pair(nodes):
    return AssistedModelForCausalLM.from_models(
        target, draft=Medusa(heads, nodes=nodes), draft_length=4, tokenizer=tokenizer
    )


dynamic = pair(16)
library = dynamic.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
print(f"{dynamic.report.target_passes} passes, {dynamic.report.tokens_per_pass:.2f} tokens per pass")
assert library[0].tolist() == baseline[0] or model.dtype != torch.float32

# %% [markdown]
# ## The picture: how fast heads get worse
#
# We decode eight functions that are cut off in the middle, forty tokens each, as one batch. We use lists of one to four
# tokens, and trees of 1 to 24 nodes.

# %%
batch = tokenizer([prompt.text for prompt in prompts[:8]], return_tensors="pt", padding=True).to(model.device)
greedy = dict(max_new_tokens=NEW, do_sample=False)
lists, trees = {}, {}
expected = model.generate(**batch, **greedy, assisted=False)
for g in (1, 2, 3, 4):
    output = model.generate(**batch, **greedy, draft_length=g)
    lists[g] = model.report.tokens_per_pass
    assert output.equal(expected) or model.dtype != torch.float32
for nodes in (1, 2, 4, 8, 16, 24):
    sized = pair(nodes)
    output = sized.generate(**batch, **greedy)
    trees[nodes] = sized.report.tokens_per_pass
    assert output.equal(expected) or model.dtype != torch.float32
print("lists", {n: round(t, 2) for n, t in lists.items()}, " trees", {n: round(t, 2) for n, t in trees.items()})
assert trees[4] > lists[4] and trees[24] > trees[4]

# %% tags=["folded"]
figure, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.2))
positions = range(heads.heads + 1)
best = [1.0, *(row[0] for row in hits)]
any_of = [1.0, *(sum(row) for row in hits)]
paint = [COLOURS["target"]] + [COLOURS["draft"]] * heads.heads
top.bar(positions, any_of, 0.7, color="none", edgecolor=paint, linewidth=1.5)
top.bar(positions, best, 0.7, color=paint)
for position, value in list(enumerate(best))[1:]:
    top.text(position, value + 0.015, f"{value:.0%}", ha="center", va="bottom")
top.set_xticks(positions, ["own\noutput", *range(1, heads.heads + 1)])
top.annotate(
    f"among its top {GUESSES}",
    (1.35, any_of[1]),
    (1.5, 0.72),
    color=COLOURS["draft"],
    arrowprops={"arrowstyle": "-", "color": COLOURS["draft"]},
)
top.set(title="share of right guesses, by head", ylim=(0, 1.05))

below.plot(list(trees), list(trees.values()), "o-", color=COLOURS["accepted"])
below.plot(list(lists), list(lists.values()), "o-", color=COLOURS["draft"])
below.text(13, trees[16] - 0.15, "tree", color=COLOURS["accepted"])
below.text(4.8, lists[4] - 0.03, "list: at most four tokens", color=COLOURS["draft"])
below.axhline(1, color=COLOURS["plain"], linestyle=":", linewidth=1.5)
below.text(24, 1.02, "no draft", color=COLOURS["plain"], ha="right")
below.set(title="tokens per pass", xlabel="drafted tokens in a pass", ylim=(0.9, None))
plt.show()

# %%
compare(prediction, dict(zip(prediction, (round(100 * hits[0][0]), round(100 * hits[-1][0]), trees[16]))))

# %% [markdown]
# A list of four is hardly better than a list of two, because the third and the fourth head are rarely reached and
# rarely right. Larger trees yield more tokens per pass, but each further node yields less. With 16 nodes a pass yields
# about two tokens, which is the second answer.
#
# This run cannot show how good heads are for a large target, whose hidden state contains more information about the
# following tokens. Also, a small model repeats itself in greedy decoding, and repetition is easy to guess. That is why
# we use short continuations of several texts. They are still easier for the heads than text that people wrote.
#
# ## When it loses: nodes cost, and heads are blind
#
# **Nodes are not free.** A pass over n positions takes longer than a pass over one. Suppose that each further position
# adds a share c of a pass. Then the speedup with N nodes is at most (tokens per pass) / (1 + cN). Here it is for the
# tokens per pass that we have just counted:

# %%
shares = (0.0, 0.02, 0.05, 0.1)
rows = [["no draft", *(1.0 for _ in shares)]]
rows += [[f"tree of {nodes}", *(tokens / (1 + c * nodes) for c in shares)] for nodes, tokens in trees.items()]
show(table(["speedup at most", *(f"c = {c:g}" for c in shares)], rows))

# %% [markdown]
# On an accelerator with a large model, c is small, and trees of about sixty nodes are common. On a CPU it is several
# percent, and the best tree is small. This is why the library measures the cost of a position and leaves out nodes that
# are not worthwhile.
#
# **A head has not read the tokens in between.** In the toy tree, `x` had the same probability after `.` and after `(`.
# No real text behaves like this. A draft that reads its own guesses is right more often.
#
# **There is a rule that is not exact.** In sampling, a tree is verified with the target's own samples. The target
# samples a token after the text, continues if a child contains this token, and samples again. The output has the
# target's distribution, whatever the tree contains. But many samples are not in the tree. To accept more tokens, the
# Medusa paper offers another rule, **typical acceptance**. It accepts a drafted token x if the target gives it a high
# enough probability,
#
# $$p(x) > \min\big(\varepsilon,\ \delta\, e^{-H(p)}\big), \qquad H \text{ the entropy of } p,$$
#
# even where the target would have sampled another token. This accepts more tokens. Does it preserve the distribution?
# Notebook 02 introduced a test for this. We sample three tokens after a prompt many times, with only the three most
# probable tokens allowed at each position. Then we compare the counts of the 27 texts with the probabilities from the
# target alone, using the chi-square test.

# %% tags=["folded"]
inputs = tokenizer("def mean(values):\n    total =", return_tensors="pt").to(model.device)
following, chance = inputs.input_ids, torch.ones(1)
for _ in range(3):
    last = target(following).logits[:, -1].float().cpu()
    last[:, model.generation_config.eos_token_id] = -torch.inf
    top3 = last.topk(3)
    chance = (chance[:, None] * top3.values.softmax(-1)).flatten()
    following = torch.cat([following.repeat_interleave(3, 0), top3.indices.reshape(-1, 1).to(model.device)], 1)
distribution = {tuple(row[-3:]): share for row, share in zip(following.tolist(), chance.tolist())}


def chi_square(counts, distribution):
    """The p-value of counts, given probabilities by outcome. Outcomes expected fewer than 5 times share a cell."""
    total = sum(counts.values())
    rare = [outcome for outcome in distribution if total * distribution[outcome] < 5]
    cells = [(counts[outcome], total * distribution[outcome]) for outcome in distribution if outcome not in rare]
    if rare:
        cells.append((sum(counts[outcome] for outcome in rare), total * sum(distribution[outcome] for outcome in rare)))
    distance = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return torch.special.gammaincc(
        torch.tensor((len(cells) - 1) / 2).double(), torch.tensor(distance / 2).double()
    ).item()


# %%
sampling = dict(
    do_sample=True, temperature=1.0, top_p=1.0, top_k=3, min_new_tokens=3, max_new_tokens=3, num_return_sequences=250
)
sampled = pair(8)
rows, p_values, accepted = [], {}, {}
for name, rule in {
    "the target's samples": {},
    "typical acceptance": {"lossy_typical": LossyTypical(epsilon=0.09, delta=0.3)},
}.items():
    seen = Counter()
    sampled.reset_totals()
    for seed in range(3):
        torch.manual_seed(seed)
        seen.update(tuple(row[-3:]) for row in sampled.generate(**inputs, **sampling, **rule).tolist())
    p_values[name], accepted[name] = chi_square(seen, distribution), sampled.totals.accepted
    total_variation = sum(abs(seen[t] / seen.total() - distribution[t]) for t in distribution) / 2
    rows.append([name, seen.total(), sampled.totals.accepted, f"{total_variation:.2f}", f"{p_values[name]:.1g}"])
show(table(["rule", "texts", "accepted drafted tokens", "total variation", "p-value"], rows))
assert p_values["the target's samples"] > 0.001 and p_values["typical acceptance"] < 1e-6
assert accepted["typical acceptance"] > accepted["the target's samples"]

# %% [markdown]
# A text of three tokens has room for one drafted token. The first token comes from the pass over the prompt, and the
# last is the target's own. Typical acceptance accepts the drafted token every time, and the distribution is lost. With
# such a p-value, no further test is needed. (The total variation of the exact rule is not zero either, because 750
# samples scatter.) Typical acceptance prefers the guesses of the heads. Its text may be good, but it does not have the
# target's distribution. In this package, the name of its argument is a warning:
# `generate(..., lossy_typical=LossyTypical())`.
#
# ## Takeaway
#
# > Medusa's heads read one hidden state of the target and guess several tokens at once, without a forward pass of a
# > draft model. They have not read the tokens in between, so the second guess of a near head often has a higher value
# > than the top-1 guess of a far one. Put the guesses into a tree, and choose its nodes by the product of the rates.
# > Check the tree in one pass with a mask where each node attends only to its ancestors and itself. In greedy decoding,
# > or with the target's own samples, this is exact. Typical acceptance is not.

# %% [markdown]
# ## Exercises
#
# ### 1. The mask from a list of paths
#
# Published Medusa trees are written as paths. `(0,)` is the top-1 guess of head 1, and `(0, 2)` is the third guess of
# head 2 after it. Write `mask_of(paths)`. It returns the n × n table as lists of booleans. `mask[i][j]` is true if node
# i may attend to node j. The paths may be in any order.


# %% tags=["check"]
def check_1(candidate, seed=1):
    small = [(0,), (1,), (0, 0), (1, 0)]
    shown = [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert [list(map(int, row)) for row in candidate(small)] == shown, (
        "For (0,) (1,) (0,0) (1,0) the mask is not the table of section By hand."
    )
    rng = random.Random(seed)
    nodes = best_tree([sorted((rng.random() for _ in range(5)), reverse=True) for _ in range(4)], 30)
    paths, parents = [], [parent for parent, *_ in nodes]
    for parent, _, guess, _ in nodes:
        paths.append((*(paths[parent] if parent >= 0 else ()), guess))
    order = rng.sample(range(30), 30)
    mask = candidate([paths[i] for i in order])
    wanted = tree_mask(parents)[order][:, order]
    assert torch.equal(torch.tensor(mask).bool(), wanted), "For shuffled paths, the mask differs from `tree_mask`."


# %% tags=["exercise"]
def mask_of(paths):
    raise NotImplementedError


attempt(check_1, mask_of)


# %% tags=["answer"]
def mask_of_answer(paths):
    # a node attends to those whose path is the beginning of its own
    return [[own[: len(other)] == other for other in paths] for own in paths]


attempt(check_1, mask_of_answer)

# %% [markdown]
# ### 2. Typical acceptance fails the test
#
# After the text, the target's distribution is p, a list. The draft offers the tokens in `drafted` as alternatives.
# Typical acceptance accepts the first one of them that is typical. If none is, the target samples from p. Write
# `typical_distribution(p, drafted, epsilon, delta)`. It returns the distribution of the output token as a list. How far
# is it from p?


# %% tags=["check"]
def check_2(candidate, seed=2):
    rule, generator = LossyTypical(epsilon=0.2, delta=0.5), torch.Generator().manual_seed(seed)
    for _ in range(200):
        p = (3 * torch.randn(5, generator=generator)).softmax(-1)
        drafted = torch.randperm(5, generator=generator)[:2]
        found = torch.tensor(candidate(p.tolist(), drafted.tolist(), rule.epsilon, rule.delta))
        assert abs(found.sum() - 1) < 1e-5, "The distribution does not sum to 1."
        draft = Draft(drafted[None], torch.tensor([2]), parents=torch.tensor([[-1, -1]]))
        path, verdict = rule.judge(draft, p.expand(1, 3, 5))
        accepted = drafted[path[0, 0]].item() if verdict.accepted else None
        wanted = p if accepted is None else torch.eye(5)[accepted]
        assert torch.allclose(found, wanted, atol=1e-5), (
            f"For p = {[round(x, 2) for x in p.tolist()]} and drafted {drafted.tolist()}, the accepted token is {accepted}."
        )


# %% tags=["exercise"]
def typical_distribution(p, drafted, epsilon, delta):
    raise NotImplementedError


attempt(check_2, typical_distribution)


# %% tags=["answer"]
def typical_distribution_answer(p, drafted, epsilon, delta):
    distribution = torch.tensor(p)
    entropy = -(distribution * distribution.log()).sum()
    enough = min(epsilon, delta * torch.exp(-entropy).item())
    accepted = next((x for x in drafted if p[x] > enough), None)
    return p if accepted is None else [float(x == accepted) for x in range(len(p))]


attempt(check_2, typical_distribution_answer)

# %% [markdown]
# ### 3. Guesses are not independent
#
# For some positions of a text, `ranks[i]` lists at which rank each head had the token that was right: 0 is its top-1 guess.
# A tree is a list of paths, tuples of ranks, and it contains the beginnings of its paths: (0,), (1,), (0, 0), … The longest path that
# equals the beginning of `ranks[i]` is accepted. Write `mean_tokens(paths, ranks)`: the mean number of tokens per pass,
# including the target's own. The product of the heads' rates would be wrong. Why?


# %% tags=["check"]
def check_3(candidate, seed=3):
    both = [(0, 0), (1, 1)] * 4  # both heads are right together, or neither is
    assert abs(candidate([(0,), (0, 0)], both) - 2.0) < 1e-9, (
        "Half of the time both guesses are right: (3 + 1) / 2 tokens. The product of the rates would give 1.75."
    )
    rng = random.Random(seed)
    for _ in range(10):
        easy = [rng.random() for _ in range(30)]  # easy positions are easy for all heads
        ranks = [tuple(0 if rng.random() < ease else rng.randint(1, 3) for _ in range(3)) for ease in easy]
        leaves = [tuple(rng.randrange(3) for _ in range(rng.randint(1, 3))) for _ in range(4)] + [(0, 0)]
        paths = sorted({path[:depth] for path in leaves for depth in range(1, len(path) + 1)})
        wanted = sum(1 + max((len(p) for p in paths if right[: len(p)] == p), default=0) for right in ranks) / len(
            ranks
        )
        found = candidate(paths, ranks)
        assert abs(found - wanted) < 1e-9, f"With the paths {paths}, it is {wanted:.3f} tokens, not {found:.3f}."


# %% tags=["exercise"]
def mean_tokens(paths, ranks):
    total = 1.0
    for path in paths:  # the product of the heads' rates, for each node
        value = 1.0
        for head, rank in enumerate(path):
            value *= sum(right[head] == rank for right in ranks) / len(ranks)
        total += value
    return total


attempt(check_3, mean_tokens)


# %% tags=["answer"]
def mean_tokens_answer(paths, ranks):
    accepted = sum(right[: len(path)] == path for right in ranks for path in paths)  # each node on the way counts one
    return 1 + accepted / len(ranks)


attempt(check_3, mean_tokens_answer)

# %% [markdown] tags=["answer"]
# Some positions are easy for all heads and others for none. So deep paths are accepted more often than the product of the rates
# says. This is one reason why trees measured on text beat those that are computed from rates.

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. The rates `hits` are averages over all texts. Sort the positions by the probability of the head's top-1 guess, and
#    compute the rates for confident and for uncertain positions. How would the best tree of 16 nodes differ? How many
#    tokens per pass would two trees gain over one?
# 2. Heads that are trained on code meet another kind of text. Measure `hits` on prose and on JSON (`read` in
#    `assisted.lab.bench` gives prompts). Does the *shape* of the best tree change, or only the number of accepted tokens?

# %% [markdown]
# ## References
#
# - Cai and others. Medusa: simple LLM inference acceleration framework with multiple decoding heads. [arXiv 2401.10774](https://arxiv.org/abs/2401.10774)
# - Stern, Shazeer, Uszkoreit. Blockwise parallel decoding for deep autoregressive models. [arXiv 1811.03115](https://arxiv.org/abs/1811.03115)
#
# A head that cannot read the tokens in between is limited. The next notebook lets the head read them, and its own guesses
# as well: [09. EAGLE](09_eagle.ipynb).
