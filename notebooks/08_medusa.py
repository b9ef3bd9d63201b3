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
# **Can a model guess several tokens at once from what it knows already, and what are such guesses worth?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks [02](02_the_acceptance_rule.ipynb) and
# [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, run this first:  %pip install "assisted[notebooks]"

# %% tags=["setup"]
import heapq
import itertools
from collections import Counter
from itertools import islice

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import silu
from transformers import AutoTokenizer

from assisted import AssistedModelForCausalLM, LossyTypical, Medusa, zoo
from assisted.bench import held_out_prompts
from assisted.drafters.trees import best_paths, worthwhile
from assisted.drafts import Draft
from assisted.notebook import COLOURS, attempt, figure_style, show, table

TARGET, DRAFT = "zoo:target", "zoo:medusa"
# On a GPU of 24 GB try real heads: TARGET, DRAFT = "lmsys/vicuna-7b-v1.3", "FasterDecoding/medusa-vicuna-7b-v1.3"  (about 15 GB in float16)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# So far a second model wrote the draft, a token at a time. Each token cost a pass of that model, and the model had to be found, loaded and
# kept in memory.
#
# The target may know more than it says. Before it names the next token, all it has worked out about the text stands in one vector, its last
# **hidden state**. An output layer reads the vector and gives each token a probability. Medusa adds more such readers, called **heads**. Head
# 1 is trained to name the token after the next one, head 2 the token behind that, and so on. All heads read the same vector at once. A draft
# of four tokens costs no pass at all.
#
# There is a catch. When head 1 guesses, the next token has not been chosen yet, or has just been chosen and the head does not see it. Head 4 guesses
# across four tokens that it has not read.
#
# ## Your prediction
#
# The shipped target writes Python and has four trained heads. Count how often a head's best guess is what the target itself says there, once
# it gets there. For the output layer that is 100 of 100, by definition. Write down two numbers:
#
# 1. How many of 100 for head 1? How many for head 4?
# 2. A pass may check 16 drafted tokens. You can spend them as you like among the guesses of the four heads. How many tokens does a pass give on average,
#    the target's own included?

# %% [markdown]
# ## By hand
#
# The target has just written a word. Head 1 guesses what stands behind it, head 2 what stands behind that. Say we know how often their
# guesses are right:
#
# | | best guess | second | third |
# |---|---|---|---|
# | head 1 | `.` 0.5 | `(` 0.3 | `,` 0.1 |
# | head 2 | `x` 0.4 | `y` 0.2 | |
#
# **A list** takes the best guess of each head: `.` and behind it `x`. The target keeps `x` only if `.` was right as well, and both are right
# with probability 0.5 · 0.4 = 0.2, if we take the two to be independent. So a list of two drafted tokens gives, with the target's own token,
#
# $$1 + 0.5 + 0.2 = 1.7 \text{ tokens per pass.}$$
#
# The second drafted token was worth 0.2. Head 1's *second* guess, `(`, would have been worth 0.3. The two guesses `.` and `(` cannot stand
# behind each other, they are alternatives: a **tree**. A drafted token in a tree is called a node, and a node is worth the product of the
# chances on the way to it. The first four nodes in the order of their worth:

# %%
rates = [[0.5, 0.3, 0.1], [0.4, 0.2]]
names = [[".", "(", ","], ["x", "y"]]

worth = {(a,): rates[0][a] for a in range(3)}
worth |= {(a, b): rates[0][a] * rates[1][b] for a, b in itertools.product(range(3), range(2))}
rows, total = [], 1.0
for path in sorted(worth, key=lambda path: -worth[path])[:4]:
    total += worth[path]
    rows.append([len(rows) + 1, " ".join(names[head][guess] for head, guess in enumerate(path)), worth[path], total])
show(table(["node", "path", "worth", "tokens per pass"], rows))

# %% [markdown]
# Two nodes give 1.8 instead of 1.7. That is the whole idea: **where a head is unsure, its second guess is worth more than another head's
# first.** The greedy choice is also the best one: a node is never worth more than its parent, so taking the most valuable nodes always gives
# a tree.
#
# How can one pass of the target check a tree? In a pass every token looks at the tokens before it. The nodes are laid side by side behind the
# text, and each node may look at the text, at the nodes above it, and at itself. Nothing else: `(` must not see `.`, since in its own story
# `.` was never written. Which column may look at which is a table of zeros and ones, the **attention mask**:
#
# | | . | ( | . x | ( x |
# |---|---|---|---|---|
# | **.** | 1 | | | |
# | **(** | | 1 | | |
# | **. x** | 1 | | 1 | |
# | **( x** | | 1 | | 1 |
#
# And each node stands at the place in the text that its depth says: `.` and `(` both stand directly behind the text.

# %% [markdown]
# ## From scratch
#
# First the heads. Each is one block, x + SiLU(Wx + b), and an output layer. The input x is the state that the target's own output layer
# reads. We load the weights through the library and do the arithmetic ourselves.

# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=Medusa(DRAFT, tree=False), draft_length=4)
model.to("cuda" if torch.cuda.is_available() else "cpu")
target, heads = model.target, model.drafter.heads
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET), padding_side="left")


def head_logits(head, state):
    """What a head says about the token 2 + head places behind the state's own token. state: [..., H] -> [..., V]"""
    x = state
    for weight, bias in zip(heads.weight[:, head], heads.bias[:, head]):
        x = x + silu(x @ weight.T + bias)
    output = target.get_output_embeddings().weight if heads.output is None else heads.output[head]
    return x @ output.T


state = torch.randn(3, heads.hidden_size, device=model.device, dtype=model.dtype)
library = heads(state, target.get_output_embeddings())
assert all(torch.allclose(head_logits(h, state), library[h], atol=1e-2) for h in range(heads.heads))
print(f"{heads.heads} heads of {heads.layers} block each, a state of {heads.hidden_size} numbers")

# %% [markdown]
# How often are they right? Take functions that neither the target nor the heads were trained on. At every place of a text, head h guesses;
# the target, when it has read up to there, says what *it* would write. `hits[h][r]` is the share of places where guess number r of head h is
# that token.

# %%
GUESSES = 8
prompts = list(islice(held_out_prompts(tokenizer), 32))
texts = torch.cat([prompt.ids[:, :120] for prompt in prompts[8:]]).to(model.device)

out = target(texts, output_hidden_states=True)
choice, states = out.logits.argmax(-1), out.hidden_states[-1]  # [B, T], [B, T, H]
hits = []
for h in range(heads.heads):
    guessed = head_logits(h, states).topk(GUESSES).indices[:, : -1 - h]  # of place t: about the token at t + 2 + h
    right = guessed == choice[:, 1 + h :, None]  # which the target chooses at place t + 1 + h
    hits.append(right.float().mean((0, 1)).tolist())

rows = [[f"head {h + 1}", *row[:3], sum(row)] for h, row in enumerate(hits)]
show(table(["", "best guess", "second", "third", f"among the best {GUESSES}"], rows))
assert all(sum(near) > sum(far) for near, far in itertools.pairwise(hits))

# %% [markdown]
# The first answer: one guess in four for head 1, and one in fourteen for head 4. It falls fast, since a head has to guess across tokens that
# it has not read. But the right token is among a head's best eight two to five times as often as it is the very best. That is what a tree can
# use.
#
# Now the tree. `best_tree` takes the most valuable node again and again, and offers that node's children next.


# %%
def best_tree(rates, size):
    """The `size` nodes of most worth, each as (parent, head, guess, worth); parents come first, -1 stands for the text."""
    nodes, offered = [], [(-rate, -1, 0, guess) for guess, rate in enumerate(rates[0])]
    heapq.heapify(offered)
    while offered and len(nodes) < size:
        minus_worth, parent, head, guess = heapq.heappop(offered)
        nodes.append((parent, head, guess, -minus_worth))
        if head + 1 < len(rates):
            for child, rate in enumerate(rates[head + 1]):
                heapq.heappush(offered, (minus_worth * rate, len(nodes) - 1, head + 1, child))
    return nodes


tree = best_tree(hits, 16)
print("nodes by head:", dict(sorted(Counter(f"head {head + 1}" for _, head, _, _ in tree).items())))
print(f"promised: {1 + sum(worth for *_, worth in tree):.2f} tokens per pass")

# %% [markdown]
# Then the mask, and a pass of the target under it. A node sees what its parent sees, and itself.


# %%
def tree_mask(parents):
    """[n, n] bool, true where the node of the row may look at the node of the column."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def pass_over(text, tokens, parents):
    """One pass over the text and a tree behind it: logits and states at the last token of the text and at each node."""
    t, mask = len(text), tree_mask(parents)
    sees = torch.ones(t + len(tokens), t + len(tokens), dtype=torch.bool).tril()
    sees[t:, t:] = mask
    places = torch.cat(
        [torch.arange(t), t - 1 + mask.sum(1)]
    )  # a node of depth d stands d places behind the text's last token
    ids, sees, places = (x.to(model.device) for x in (torch.tensor([text + tokens]), sees[None, None], places[None]))
    out = target(ids, attention_mask=sees, position_ids=places, output_hidden_states=True, use_cache=False)
    return out.logits[0, t - 1 :], out.hidden_states[-1][0, t - 1 :]


text, parents = prompts[0].ids[0].tolist(), [-1, -1, 0, 1]  # the tree of the mask above
tokens = [tokenizer(s, add_special_tokens=False).input_ids[0] for s in (".", "(", "x", "x")]
logits, _ = pass_over(text, tokens, parents)
alone = [
    pass_over(text + path, [], [])[0][0]
    for path in ([tokens[0]], [tokens[1]], [tokens[0], tokens[2]], [tokens[1], tokens[3]])
]
print(
    f"largest difference from reading each path alone: {max((a - b).abs().max().item() for a, b in zip(alone, logits[1:])):.0e}"
)
assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(alone, logits[1:])) or model.dtype != torch.float32

# %% [markdown]
# The pass over the tree says of each node what a pass over its path alone would have said. So the target can read its own choices off the
# tree: start at the text, go to the child that holds the target's choice, and on from there. Where no child holds it, that choice is the
# target's own token of this round.
#
# One detail decides over everything: the heads read the state **from which the last token was chosen**, not the state of that token. That one
# does not exist yet.


# %%
def decode(prompt, new_tokens, propose):
    """Greedy decoding. propose(state) gives a draft, as tokens and parents. Returns the text, and the passes behind the prompt's."""
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
plain, listed, treed = (
    decode(prompt, NEW, propose) for propose in (lambda state: ([], []), propose_list, propose_tree)
)
rows = [
    [name, passes, (NEW - 1) / passes]
    for name, (_, passes) in {"no draft": plain, "list": listed, "tree of 16": treed}.items()
]
show(table(["", "passes", "tokens per pass"], rows))
assert (plain[0] == listed[0] == treed[0] and treed[1] < listed[1] < plain[1]) or model.dtype != torch.float32

# %% [markdown]
# The same text three times, in fewer passes. (The prompt's own pass gives the first token and is not counted.) It is more than the rates
# promised: those were counted on text that people wrote, and what a small model writes greedily is easier to guess.
#
# ## The library's call
#
# `Medusa(..., tree=False)` drafts the list. It must take exactly our passes and our text.

# %%
ids = prompts[0].ids.to(model.device)
ours, library = listed, model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
print(
    model.report.target_passes,
    "passes, by position:",
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
    torch.tensor(best_paths(some, 30).worth), torch.tensor([worth for *_, worth in best_tree(some, 30)])
)

# %% [markdown]
# Our tree has one shape for all places of all texts. The library's tree is another one in every round: where a head is sure the tree is deep,
# where it is not the tree is wide. A head is mostly too sure, so the library does not take its word for long. It counts how often guesses of
# this head, rank and confidence were right before. The counts start empty, so on a first text a tree that was measured beforehand can be the
# better one, as it is here. `nodes=16` asks for 16 nodes in every round; left out, the tree is as large as pays.


# %%
def pair(nodes):
    return AssistedModelForCausalLM.from_models(
        target, draft=Medusa(heads, nodes=nodes), draft_length=4, tokenizer=tokenizer
    )


dynamic = pair(16)
library = dynamic.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
print(f"{dynamic.report.target_passes} passes, {dynamic.report.tokens_per_pass:.2f} tokens per pass")
assert library[0].tolist() == plain[0] or model.dtype != torch.float32

# %% [markdown]
# ## The picture
#
# Eight functions that are cut in the middle, forty tokens each, decoded as one batch. Once with lists of one to four tokens, once with trees
# of 1 to 24 nodes.

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

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.3), width_ratios=[1, 1.2])
places = range(heads.heads + 1)
best = [1.0, *(row[0] for row in hits)]
any_of = [1.0, *(sum(row) for row in hits)]
paint = [COLOURS["target"]] + [COLOURS["draft"]] * heads.heads
left.bar(places, any_of, 0.7, color="none", edgecolor=paint, linewidth=1.5)
left.bar(places, best, 0.7, color=paint)
for place, value in list(enumerate(best))[1:]:
    left.text(place, value + 0.015, f"{value:.0%}", ha="center", va="bottom", fontsize=9)
left.set_xticks(places, ["own\noutput", *range(1, heads.heads + 1)])
left.annotate(
    f"among its best {GUESSES}",
    (1.35, any_of[1]),
    (1.5, 0.72),
    color=COLOURS["draft"],
    arrowprops={"arrowstyle": "-", "color": COLOURS["draft"]},
)
left.set(title="right guesses", xlabel="head", ylabel="share of places", ylim=(0, 1.05))

right.plot(list(trees), list(trees.values()), "o-", color=COLOURS["accepted"])
right.plot(list(lists), list(lists.values()), "o-", color=COLOURS["draft"])
right.text(13, trees[16] - 0.15, "tree", color=COLOURS["accepted"])
right.text(4.8, lists[4] - 0.03, "list: four heads, and it ends", color=COLOURS["draft"])
right.axhline(1, color=COLOURS["plain"], linestyle=":", linewidth=1.5)
right.text(24, 1.02, "no draft", color=COLOURS["plain"], ha="right")
right.set(title="what a pass gives", xlabel="drafted tokens in a pass", ylabel="tokens per pass", ylim=(0.9, None))
plt.show()

# %% [markdown]
# A list of four is hardly better than a list of two: the third and the fourth head are seldom right *and* reached. A tree goes on growing,
# and ever more slowly. With 16 nodes a pass gives about two tokens, the second answer.
#
# What this one run cannot show: how good heads are for a large target, whose state says more of what follows. And a small model repeats
# itself when it decodes greedily, and repetition is easy to guess. So these are short continuations of several texts, and still kinder to the
# heads than text that people wrote.
#
# ## When it loses
#
# **Nodes are not free.** A pass over n columns takes longer than a pass over one. Say that each further column adds a share c of a pass. Then
# drafting N nodes can be at most (tokens per pass) / (1 + cN) times as fast as no draft. With the tokens per pass just counted:

# %%
shares = (0.0, 0.02, 0.05, 0.1)
rows = [[f"tree of {nodes}", *(tokens / (1 + c * nodes) for c in shares)] for nodes, tokens in trees.items()]
show(table(["at most, times as fast", *(f"c = {c:g}" for c in shares)], rows))

# %% [markdown]
# On an accelerator with a large model c is small, and trees of some sixty nodes are common. On a processor it is several percent, and the
# best tree is a small one. This is why the library measures what columns cost, and leaves out nodes that do not pay.
#
# **A head has not read what stands in between.** In the toy tree `x` was offered below `.` and below `(`, with the same chance. No text
# behaves like that. A draft that reads its own guesses is right more often; notebook [09](09_eagle.ipynb) builds one.
#
# **And there is a rule that is not exact.** When sampling, a tree is checked by the target's own draws: the target draws a token at the text,
# goes on if a child holds it, draws again. What comes out has the target's distribution whatever the tree holds. But draws miss the tree. Medusa's
# paper offers another rule against that, **typical acceptance**: keep a drafted token x if the target finds it likely enough,
#
# $$p(x) > \min\big(\varepsilon,\ \delta\, e^{-H(p)}\big), \qquad H \text{ the entropy of } p,$$
#
# even where the target would have drawn another one. That keeps more. Does it keep the distribution? Notebook 02 had a test for that: sample three
# tokens behind a prompt many times, only the three likeliest tokens allowed at each place, and compare the counts of the 27 texts with what
# the target alone gives them, by chi-square.

# %%
inputs = tokenizer("def mean(values):\n    total =", return_tensors="pt").to(model.device)
following, chance = inputs.input_ids, torch.ones(1)
for _ in range(3):
    last = target(following).logits[:, -1].float().cpu()
    last[:, model.generation_config.eos_token_id] = -torch.inf
    likeliest = last.topk(3)
    chance = (chance[:, None] * likeliest.values.softmax(-1)).flatten()
    following = torch.cat([following.repeat_interleave(3, 0), likeliest.indices.reshape(-1, 1).to(model.device)], 1)
distribution = {tuple(row[-3:]): share for row, share in zip(following.tolist(), chance.tolist())}


def chi_square(counts, distribution):
    """counts and probabilities by outcome -> the p-value. Outcomes that are expected fewer than 5 times share a cell."""
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
rows, p_values, kept = [], {}, {}
for name, rule in {
    "the target's draws": {},
    "typical acceptance": {"lossy_typical": LossyTypical(epsilon=0.09, delta=0.3)},
}.items():
    seen = Counter()
    sampled.reset_totals()
    for seed in range(3):
        torch.manual_seed(seed)
        seen.update(tuple(row[-3:]) for row in sampled.generate(**inputs, **sampling, **rule).tolist())
    p_values[name], kept[name] = chi_square(seen, distribution), sampled.totals.accepted
    off = sum(abs(seen[t] / seen.total() - distribution[t]) for t in distribution) / 2
    rows.append([name, seen.total(), sampled.totals.accepted, f"{off:.2f}", f"{p_values[name]:.1g}"])
show(table(["rule", "texts", "drafted tokens kept", "total variation", "p-value"], rows))
assert p_values["the target's draws"] > 0.001 and p_values["typical acceptance"] < 1e-6
assert kept["typical acceptance"] > kept["the target's draws"]

# %% [markdown]
# A text of three tokens has room for one drafted token: the first comes with the prompt's pass, and the last is the target's own. Typical
# acceptance keeps that token every time, and the distribution is gone: with a p-value like this nobody needs another test. (The total variation of the
# exact rule is not zero either: 750 draws scatter.) The rule prefers what the heads say. It may well write good text. It does not write the
# target's text, so in this package it has to be asked for by a name that says so: `generate(..., lossy_typical=LossyTypical())`.
#
# ## Takeaway
#
# > Medusa's heads read one state of the target and guess several tokens at once, without a pass of their own. They have not read the tokens in between, so the
# > second guess of a near head is often worth more than the best guess of a far one: spend nodes by the product of the rates, in a tree, and check the tree in one pass under a
# > mask where each node sees its ancestors only. Greedy or by the target's own draws that is exact. Typical acceptance is not.

# %% [markdown]
# ## Exercises
#
# ### 1. The mask from a list of paths
#
# Published Medusa trees are written as paths: `(0,)` is the best guess of head 1, `(0, 2)` behind it the third guess of head 2. Write
# `mask_of(paths)`: the n × n table as lists of booleans, `mask[i][j]` true where node i may look at node j. The paths may stand in any order.


# %% tags=["check"]
def check_1(candidate):
    small = [(0,), (1,), (0, 0), (1, 0)]
    shown = [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    assert [list(map(int, row)) for row in candidate(small)] == shown, (
        "For (0,) (1,) (0,0) (1,0) it is not the table under By hand."
    )
    paths = []
    for parent, _, guess, _ in best_tree(hits, 30):
        paths.append((*(paths[parent] if parent >= 0 else ()), guess))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
    mask = candidate([paths[i] for i in order])
    parents = [parent for parent, *_ in best_tree(hits, 30)]
    wanted = tree_mask(parents)[order][:, order]
    assert torch.equal(torch.tensor(mask).bool(), wanted), "Shuffled paths give another table than the library's."


# %% tags=["exercise"]
def mask_of(paths):
    raise NotImplementedError


attempt(check_1, mask_of)


# %% tags=["answer"]
def mask_of_answer(paths):
    # a node looks at those whose path is the beginning of its own
    return [[own[: len(other)] == other for other in paths] for own in paths]


attempt(check_1, mask_of_answer)

# %% [markdown]
# ### 2. Typical acceptance fails the test
#
# Behind the text the target's distribution is p, a list. The draft offers the tokens in `drafted` as alternatives. By typical acceptance the first of
# them that is typical is kept; if none is, the target draws from p. Write `typical_distribution(p, drafted, epsilon, delta)`: the distribution of the token
# that comes out, as a list. (The check draws from your distribution and puts it to chi-square.)


# %% tags=["check"]
def check_2(candidate):
    rule, generator = LossyTypical(epsilon=0.2, delta=0.5), torch.Generator().manual_seed(2)
    for _ in range(200):
        p = (3 * torch.randn(5, generator=generator)).softmax(-1)
        drafted = torch.randperm(5, generator=generator)[:2]
        found = torch.tensor(candidate(p.tolist(), drafted.tolist(), rule.epsilon, rule.delta))
        assert abs(found.sum() - 1) < 1e-5, "The distribution does not add up to 1."
        draft = Draft(drafted[None], torch.tensor([2]), parents=torch.tensor([[-1, -1]]))
        path, verdict = rule.judge(draft, p.expand(1, 3, 5))
        kept = drafted[path[0, 0]].item() if verdict.accepted else None
        wanted = p if kept is None else torch.eye(5)[kept]
        assert torch.allclose(found, wanted, atol=1e-5), (
            f"p = {[round(x, 2) for x in p.tolist()]}, drafted {drafted.tolist()}: kept is {kept}."
        )
        drawn = Counter(torch.multinomial(found, 400, replacement=True, generator=generator).tolist())
        if kept is not None and p[kept] < 0.9:
            assert chi_square(drawn, dict(enumerate(p.tolist()))) < 0.001, (
                "A distribution that is not p has passed the test."
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
    kept = next((x for x in drafted if p[x] > enough), None)
    return p if kept is None else [float(x == kept) for x in range(len(p))]


attempt(check_2, typical_distribution_answer)

# %% [markdown]
# ### 3. How many nodes pay?
#
# The nodes of a tree are worth w₁ ≥ w₂ ≥ …, and each further column adds a share c to the time of a pass. Write `how_many(worth, c)`: the
# number N, from 0 to all of them, with the most tokens for the time, (1 + w₁ + … + w_N) / (1 + cN). Of equal ones the smallest.


# %% tags=["check"]
def check_3(candidate):
    worth = [worth for *_, worth in best_tree(hits, 40)]
    assert candidate([0.5, 0.3, 0.2, 0.12], 0.0) == 4, "If columns are free, every node pays."
    assert candidate([0.5, 0.3, 0.2, 0.12], 0.6) == 0, "A first node worth 0.5 for a price of 0.6 does not pay."
    assert candidate([0.5, 0.3, 0.2, 0.12], 0.2) == 2, "At c = 0.2 two nodes of the toy tree give 1.8 / 1.4, the most."
    for limit in (5, 20, 40):
        assert candidate(worth[:limit], 0.02) == worthwhile(worth, None, 0.0, limit), (
            "At c = 0.02 the library takes another number of nodes."
        )


# %% tags=["exercise"]
def how_many(worth, c):
    raise NotImplementedError


attempt(check_3, how_many)


# %% tags=["answer"]
def how_many_answer(worth, c):
    return max(range(len(worth) + 1), key=lambda n: (1 + sum(worth[:n])) / (1 + c * n))


attempt(check_3, how_many_answer)

# %% [markdown]
# ## References
#
# - Cai and others. Medusa: simple LLM inference acceleration framework with multiple decoding heads. [arXiv 2401.10774](https://arxiv.org/abs/2401.10774)
# - Stern, Shazeer, Uszkoreit. Blockwise parallel decoding for deep autoregressive models. [arXiv 1811.03115](https://arxiv.org/abs/1811.03115)
#
# Next: notebook [09](09_eagle.ipynb), a head that reads its own guesses.
