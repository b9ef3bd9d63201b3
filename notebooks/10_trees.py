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
# # 10. Trees
#
# **One forward pass can check N drafted tokens. How should we use them?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks
# [02](02_the_acceptance_rule.ipynb) and [08](08_medusa.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import heapq
import math
import random
import sys
import time
from itertools import pairwise, product

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache

from assisted import AssistedModelForCausalLM, DraftTree, Merged, acceptance
from assisted.core.drafts import Draft
from assisted.lab import bench
from assisted.methods.shared.trees import best_paths, chosen_nodes

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table, token_tree

# %%
TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
figure_style()
# on a CPU, the processor time of this process, which does not depend on the load of the machine
clock = time.perf_counter if torch.cuda.is_available() else time.process_time

# %% [markdown]
# ## Question
#
# [Notebook 08](08_medusa.ipynb) drafted a tree because its heads were often wrong. [Notebook 09](09_eagle.ipynb) ended
# with a head that is right more often and drafts a chain. A chain has a weak point, its first wrong token: every token
# after it is lost, even if it was good. So does a good draft need a tree, too?
#
# A **token tree** contains several continuations: for example two candidates for the next token, and three for the
# token after it. The target checks all of them in one forward pass and follows the branch that it agrees with.
#
# Suppose that a pass may check N drafted tokens, the **nodes** of the tree. They can form a chain of N tokens, a bush
# with two children below every node, or anything in between.
#
# Which tree of N nodes gets the most tokens accepted?
#
# ## Your prediction
#
# You may use 16 nodes. A chain of 16 tokens from this package's small draft yields a little over 3 tokens per pass,
# including the target's own. How many does the *best* tree of 16 nodes yield? Write down a number.

# %%
prediction = {
    "tokens per pass, best tree of 16 nodes": None,
}

# %% [markdown]
# ## By hand: six nodes, three trees
#
# A toy draft has a vocabulary of three tokens. After any text, its distribution is 0.6 for *a*, 0.3 for *b* and 0.1 for
# *c*. Suppose that these probabilities are calibrated. Then
#
# - the probability of a path is the product of the probabilities of its tokens: *a a b* has 0.6 · 0.6 · 0.3;
# - a node is accepted if the target's text goes through it, so it is accepted with the probability of its path;
# - the expected number of accepted tokens is the **sum of the path probabilities of all nodes**.
#
# So the best tree of N nodes consists of the N most probable paths. A parent is at least as probable as its child, so
# the N most probable paths always form a tree.

# %%
distribution = {"a": 0.6, "b": 0.3, "c": 0.1}


def probability(path):
    return math.prod(distribution[token] for token in path)


trees = {
    "chain": ["a", "aa", "aaa", "aaaa", "aaaaa", "aaaaaa"],
    "binary, two levels": ["a", "b", "aa", "ab", "ba", "bb"],
    "the six most probable paths": ["a", "aa", "b", "aaa", "ab", "ba"],
}
show(
    table(
        ["tree", "nodes", "expected accepted tokens"], [[k, len(v), sum(map(probability, v))] for k, v in trees.items()]
    )
)

# %% [markdown]
# Each tree has six nodes. The chain uses its last nodes for paths of probability 0.08 and 0.05. The full binary tree
# uses one for *bb*, with 0.09. The best-first tree has no node below 0.18.
#
# ## From scratch: grow, check, walk
#
# **Grow the tree.** Keep a heap of all nodes that could be added. Take the most probable node and add it to the tree.
# Then run the draft to get the eight most probable tokens after this node, and put them on the heap. After N steps the
# tree consists of the N most probable paths. The nodes are added best first, so the first 8 nodes are the best tree of
# 8 nodes.
#
# One correction is needed. Our target decodes greedily, so it always takes its top-1 token. The draft was trained on
# text, where other tokens appear too. Its top-1 probability is therefore too low for a greedy target. We **sharpen**
# the draft's distribution: we raise it to the power `sharp` and normalize it. We use 2, and the figure shows why.


# %%
def grow(draft, cache, last, count, sharp=2.0, width=8):
    """The `count` most probable paths after the token `last`: (tokens, parents, path probabilities), best first.

    cache: the draft's keys and values of all tokens before `last`. It is the same afterwards.
    """
    tokens, parents, probabilities, heap = [], [], [], []

    def offer(path, parent, log_probability):
        """Put the possible next tokens of a node on the heap. This takes one draft pass over its path."""
        row = torch.tensor([[last, *path]], device=draft.device)
        logits = draft(row, past_key_values=cache).logits[0, -1].float()
        cache.crop(-row.shape[1])
        sure, which = (sharp * logits).log_softmax(-1).topk(width)
        for log_share, token in zip(sure.tolist(), which.tolist()):
            heapq.heappush(heap, (-(log_probability + log_share), token, parent, path))

    offer([], -1, 0.0)
    while len(tokens) < count:
        negative, token, parent, path = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        probabilities.append(math.exp(-negative))
        if len(tokens) < count:
            offer([*path, token], len(tokens) - 1, -negative)
    return tokens, parents, probabilities


# %% [markdown]
# **Check the tree.** All nodes go through the target in one pass. Two things make this possible. First, a mask lets
# every node attend to the text and to its own **ancestors**, but not to its siblings. Second, the position id of a node
# is that of the last token of the text plus the depth of the node. So siblings have the same position id.
#
# **Walk along the tree.** Start at the end of the text. If a child contains the target's choice, go to this child and
# repeat.


# %%
def tree_mask(parents):
    """[n][n]: True where the column's node is the row's node or one of its ancestors."""
    mask = [[False] * len(parents) for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = list(mask[parent])
        mask[node][node] = True
    return mask


def check(target, ids, tokens, parents):
    """The target's logits after the text, [0], and after each node, [1 + node], from one pass."""
    seen = torch.tensor(tree_mask(parents))
    text, every = len(ids), len(ids) + len(tokens)
    mask = torch.ones(every, every, dtype=torch.bool).tril()
    mask[text:, text:] = seen
    positions = torch.cat([torch.arange(text), text - 1 + seen.sum(1)])
    row = torch.tensor([[*ids, *tokens]])
    inputs = [thing.to(target.device) for thing in (row, mask[None, None], positions[None])]
    return target(input_ids=inputs[0], attention_mask=inputs[1], position_ids=inputs[2]).logits[0, text - 1 :]


def walk(tokens, parents, choice):
    """The accepted nodes, in order. choice: the target's token after the text, [0], and after each node, [1 + node]."""
    path, here = [], -1
    while True:
        child = next((n for n, p in enumerate(parents) if p == here and tokens[n] == choice[here + 1]), None)
        if child is None:
            return path
        path.append(child)
        here = child


# %% [markdown]
# We try it on one prompt, a function that is cut off in the middle. It comes from a package that the shipped models
# were not trained on. The target continues greedily for 36 tokens. We grow a tree of 24 nodes somewhere in this text.

# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, draft_length=8)
target, draft, tokenizer = model.target, model.drafter.models[0], model.tokenizer
NEW, GREEDY = 36, {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 36}

prompts = bench.read(["code", "prose"], tokenizer, 2)
texts = []
for prompt in prompts:
    written = model.generate(prompt.ids.to(model.device), **GREEDY, assisted=False)[0].tolist()
    texts.append((written, prompt.ids.shape[1]))

ids, begin = texts[0]
at = begin + 21
cache = DynamicCache(config=draft.config)
draft(torch.tensor([ids[: at - 1]], device=draft.device), past_key_values=cache)
tokens, parents, probabilities = grow(draft, cache, ids[at - 1], 24)
logits = check(target, ids[:at], tokens, parents)
path = walk(tokens, parents, logits.argmax(-1).tolist())

print("text:    ", repr(tokenizer.decode(ids[at - 12 : at])))
print("accepted:", [tokenizer.decode([tokens[node]]) for node in path])
assert [tokens[node] for node in path] == ids[at : at + len(path)] or target.dtype != torch.float32  # as the baseline

# %% [markdown]
# Here is the tree, with one node per line. Each node has its token and the probability of its path in the sharpened
# distribution. The nodes are numbered from the best to the worst, and the slider shows the first ones only. Filled
# green nodes are accepted. Click a node to fold the nodes below it.

# %% tags=["folded"]
show(token_tree([tokenizer.decode([token]) for token in tokens], parents, probabilities, path))

# %% [markdown]
# ## The library's call: `DraftTree` and `Merged`
#
# A `Draft` contains one token tree per row: the tokens, and the parent of each token. It computes the mask and the
# depths. `match_tree` is the walk, and `chosen_nodes` makes a draft of the nodes that were chosen. All of them agree with
# our code. The pass over the tree gives the same logits as a separate pass over each path.

# %%
as_draft = Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), parents=torch.tensor([parents]))
assert as_draft.ancestors()[0].tolist() == tree_mask(parents)
assert as_draft.depths()[0].tolist() == [sum(row) for row in tree_mask(parents)]

choice = logits.argmax(-1).tolist()
assert acceptance.match_tree(tokens, parents, choice)[0] == path

best = chosen_nodes([tokens], [parents], [range(8)], as_draft.tokens.device)
assert best.tokens[0].tolist() == tokens[:8] and best.parents[0].tolist() == parents[:8]

furthest = 0.0
for node, row in enumerate(tree_mask(parents)):
    alone = [*ids[:at], *(tokens[n] for n, seen in enumerate(row) if seen)]
    there = target(torch.tensor([alone], device=target.device)).logits[0, -1]
    furthest = max(furthest, float((there - logits[node + 1]).abs().max()))
assert furthest < 1e-3 or target.dtype != torch.float32
print(f"largest difference of a logit between the tree pass and the path alone: {furthest:.0e}")

# %% [markdown]
# In practice you write one line. `draft="draft-tree:zoo:draft"` drafts such trees with a draft model, and
# `draft="zoo:eagle3"` with the head of notebook 09. Both grow the tree level by level instead of node by node, so that
# the draft runs once per level (EAGLE-2, arXiv 2406.16858). `draft="recycle"` uses a tree of fixed shape. **SpecInfer**
# (arXiv 2305.09781) builds a tree in another way. Several drafters write one chain each, and the chains are merged.
# Beginnings that they share are stored once. In this package, that is `Merged([...])`.
#
# ## The picture: tokens per pass by size and shape
#
# Now we answer the question. At *every* position of four texts of 36 new tokens, we grow the best tree of 32 nodes and
# note which nodes are on the target's path. The first N nodes are the best tree of N nodes, so this gives the result
# for all N at once. Then we replay the decoding. We start at the first position, accept the tokens that a tree of N
# nodes gives, jump to the position after them, and count passes.


# %% tags=["folded"]
def paths_everywhere(count, sharp):
    """For each text and position, the path probabilities of a tree of `count`, and its nodes on the target's path."""
    found = []
    for text, start in texts:
        cache = DynamicCache(config=draft.config)
        draft(torch.tensor([text[:start]], device=draft.device), past_key_values=cache)
        found.append({})
        for position in range(start + 1, len(text)):
            grown, above, probabilities = grow(draft, cache, text[position - 1], count, sharp)
            child = {(p, t): n for n, (p, t) in enumerate(zip(above, grown))}
            here, on_path = -1, []
            for token in text[position:-1]:
                here = child.get((here, token))
                if here is None:
                    break
                on_path.append(here)
            found[-1][position] = probabilities, on_path
            draft(torch.tensor([[text[position - 1]]], device=draft.device), past_key_values=cache)
    return found


def tokens_per_pass(accepted):
    """accepted(number of the text, position): how many drafted tokens are accepted there."""
    passes = 0
    for number, (text, start) in enumerate(texts):
        position = start + 1
        while position < len(text):
            position += accepted(number, position) + 1
            passes += 1
    return sum(len(text) - start - 1 for text, start in texts) / passes


# %%
sizes = [1, 2, 4, 8, 16, 32]
curves, trees_found = {}, {}
for name, most, sharp in (("dynamic", 32, 2.0), ("not sharpened", 16, 1.0)):
    found = trees_found[name] = paths_everywhere(most, sharp)
    curves[name] = [tokens_per_pass(lambda t, p: sum(node < n for node in found[t][p][1])) for n in sizes if n <= most]

# %% [markdown]
# Chains, binary trees and other fixed shapes need not be grown. Only the **rank** of the target's token in the draft's
# distribution matters, where rank 0 is the draft's top-1 token. One draft pass over the text gives all ranks. A
# *static* tree has a fixed shape, such as "the second most probable token after the top-1 token". The best shape
# follows from how often each rank is right. `best_paths` computes it, and so does Sequoia (arXiv 2402.12374). We
# measure these rates on the same texts, which is the best case for the static tree.

# %% tags=["folded"]
ranks = []
for text, _ in texts:
    logits = draft(torch.tensor([text], device=draft.device)).logits[0].float()
    own = logits[:-1].gather(1, torch.tensor(text[1:], device=draft.device)[:, None])
    ranks.append([0, *(logits[:-1] > own).sum(1).tolist()])


def follow(tree, number, position):
    """How many of the target's ranks follow a path in a tree of ranks, given as {(parent, rank): node}."""
    here, accepted = -1, 0
    for rank in ranks[number][position:-1]:
        here = tree.get((here, rank))
        if here is None:
            break
        accepted += 1
    return accepted


def measured(shape):
    tree = {(p, r): n for n, (p, r) in enumerate(zip(shape.parents, shape.ranks))}
    return tokens_per_pass(lambda number, position: follow(tree, number, position))


seen = [rank for row, (_, start) in zip(ranks, texts) for rank in row[start:]]
rates = [sum(rank == r for rank in seen) / len(seen) for r in range(8)]
print("how often each rank is right:", [round(rate, 2) for rate in rates])
curves["chain"] = [measured(best_paths([[1.0]] * n, n)) for n in sizes]
curves["static"] = [measured(best_paths([rates] * n, n)) for n in sizes]
full = {2 ** (d + 1) - 2: measured(best_paths([[0.5, 0.5]] * d, 2 ** (d + 1) - 2)) for d in (1, 2, 3, 4)}

# %% [markdown]
# A replay is a calculation. So we also run the library and count its passes: a chain of fixed length, which must need
# exactly as many passes as our replay, trees of the draft model (`DraftTree`), and SpecInfer, which merges the chains
# of the draft model and of the suffix drafter ([notebook 07](07_ngram_and_suffix.ipynb)).


# %%
def run(pair, length):
    """Nodes per pass and tokens per pass. Every text is compared with the baseline's."""
    pair.reset_totals()
    for prompt, (text, start) in zip(prompts, texts):
        output = pair.generate(prompt.ids.to(pair.device), **GREEDY, draft_length=length)[0].tolist()
        assert output == text or target.dtype != torch.float32  # every tree is exact
    return pair.totals.drafted / pair.totals.target_passes, pair.totals.tokens_per_pass


for length in (2, 8):
    ours = curves["chain"][sizes.index(length)]
    assert abs(run(model, length)[1] - ours) < 1e-9 or target.dtype != torch.float32

ran = {"DraftTree": [], "SpecInfer": []}
for nodes in (2, 8, 32):
    pair = AssistedModelForCausalLM.from_models(target, draft=DraftTree(DRAFT, nodes=nodes), tokenizer=tokenizer)
    ran["DraftTree"].append(run(pair, nodes))
both = AssistedModelForCausalLM.from_models(target, draft=Merged([DRAFT, "suffix"]), tokenizer=tokenizer)
ran["SpecInfer"] = [run(both, length) for length in (2, 4, 8)]
rows = [["no draft", 0.0, 1.0], *([name, *point] for name, points in ran.items() for point in points)]
show(table(["the library's", "nodes per pass", "tokens per pass"], rows))

# %% [markdown]
# The whole argument rests on one assumption: a node is accepted with the probability of its path. We can measure this,
# too. We sort all nodes of all trees by their path probability and count how many were on the target's path.


# %%
def calibration(found):
    """[(mean path probability, share of nodes on the target's path)] of six groups of nodes."""
    nodes = [
        (probability, node in on_path)
        for text, (written, start) in zip(found, texts)
        for position, (probabilities, on_path) in text.items()
        for node, probability in enumerate(probabilities)
        if position + 8 < len(written)  # there is enough text left for a path
    ]
    borders = [0.0, 0.02, 0.06, 0.15, 0.4, 0.8, 1.01]
    groups = [[node for node in nodes if low <= node[0] < high] for low, high in pairwise(borders)]
    return [tuple(sum(column) / len(group) for column in zip(*group)) for group in groups if group]


shares = {name: calibration(found) for name, found in trees_found.items()}
rows = [[name, f"{p:.2f}", f"{share:.2f}"] for name, points in shares.items() for p, share in points]
show(table(["tree", "mean path probability", "accepted"], rows))

# %% tags=["folded"]
ink = {"dynamic": "accepted", "not sharpened": "rejected", "static": "accent", "chain": "target", "binary": "draft"}
curves_drawn = {name: (sizes[: len(values)], values) for name, values in curves.items()} | {
    "binary": (list(full), list(full.values()))
}
fig, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.6), height_ratios=[3, 2.2])
height = math.inf
for name, (x, y) in sorted(curves_drawn.items(), key=lambda item: -item[1][1][-1]):
    top.plot(x, y, "--" if "not" in name else "-", color=COLOURS[ink[name]], marker="o", markersize=3)
    height = min(height - 0.3, y[-1])  # labels must not overlap
    top.text(37, height, name, color=COLOURS[ink[name]], va="center")
top.plot(*zip(*ran["DraftTree"]), "D", color=COLOURS["accepted"], markersize=7, markerfacecolor="none")
top.plot(*zip(*ran["SpecInfer"]), "s", color=COLOURS["bonus"], markersize=6)
top.text(0.03, 0.97, "◇ run: DraftTree", color=COLOURS["accepted"], transform=top.transAxes, va="top")
top.text(0.03, 0.90, "■ run: SpecInfer", color=COLOURS["bonus"], transform=top.transAxes, va="top")
top.set(xscale="log", xlabel="nodes N checked in a pass", title="tokens per pass", xlim=(0.9, 110))
top.set_xticks(sizes, map(str, sizes))
top.minorticks_off()
top.spines["bottom"].set_bounds(0.9, 36)

below.plot([0, 1], [0, 1], ":", color=COLOURS["plain"])
for name, points in shares.items():
    below.plot(*zip(*points), "o-", color=COLOURS[ink[name]], markersize=4)
below.text(0.03, 0.95, "dynamic (sharpened)", color=COLOURS[ink["dynamic"]], transform=below.transAxes, va="top")
below.text(0.03, 0.84, "not sharpened", color=COLOURS[ink["not sharpened"]], transform=below.transAxes, va="top")
below.set(xlabel="path probability of a node", title="share of nodes that are accepted", xlim=(0, 1), ylim=(0, 1))
plt.show()

# %%
at16 = {"no draft": 1.0, **{name: values[sizes.index(16)] for name, values in curves.items()}}
print("tokens per pass with 16 nodes:", {name: round(value, 2) for name, value in at16.items()})
assert at16["dynamic"] > at16["chain"]

# %%
compare(prediction, dict(zip(prediction, (at16["dynamic"],))))

# %% [markdown]
# This is the answer. With 16 nodes, the best tree yields 4.5 tokens per pass, and the chain 3.3. The upper panel shows
# where this comes from.
#
# - **Up to four nodes, a chain is nearly as good as any tree.** The first guess is right so often that depth is more
#   useful than width. Then the chain stops gaining, because a draft is rarely right thirty times in a row.
# - **The binary tree wastes half of each level.**
# - **The static tree** goes deep along the first guesses and adds a few alternatives. The dynamic tree does the same
#   where the draft is confident, and adds alternatives where it is not.
# - **The library's trees** (diamonds) are grown level by level and corrected by counts of earlier rounds. They are a
#   little below our curve, because these counts begin empty.
# - **SpecInfer's two chains** yield no more here than one chain with the same number of nodes. A second drafter helps
#   only where it is right and the first one is wrong.
#
# The lower panel explains the dashed curve. Without sharpening, the path probabilities are too low: nodes are accepted
# more often. So the tree is not deep enough and has too many alternatives. With sharpening, the best and the worst
# nodes are near the dotted line, and the probabilities in the middle are too high. A tree that is grown by probabilities
# is only as good as the probabilities.
#
# This run has limits. Four texts of 36 tokens are few, and the small target repeats itself in greedy decoding. Trust
# the order of the curves, not their height.
#
# ## When it loses: positions cost, and sampling
#
# **Positions are not free.** A pass over 1 + N positions takes longer than a pass over one. We measure how much longer
# on this machine, after the first text, and divide the tokens per pass by it. (This leaves out the time for drafting,
# which a tree needs as well.)

# %% tags=["measured"]
before = torch.tensor([ids[: at - 1]], device=target.device)
cache = DynamicCache(config=target.config)
target(before, past_key_values=cache)


def pass_seconds(count):
    row = torch.tensor([(ids * 2)[:count]], device=target.device)
    start = clock()
    target(row, past_key_values=cache).logits[0, -1].argmax().item()  # on an accelerator this waits for the result
    seconds = clock() - start
    cache.crop(-count)
    return seconds


taken = {count: [] for count in (1, *(n + 1 for n in sizes))}
for _ in range(12):  # in turns, because the machine may be busy
    for count, seconds in taken.items():
        seconds.append(pass_seconds(count))
cost = {count: min(seconds) / min(taken[1]) for count, seconds in taken.items()}
rows = []
for n, dynamic, chain in zip(sizes, curves["dynamic"], curves["chain"]):
    rows.append([n, cost[n + 1], dynamic / cost[n + 1], chain / cost[n + 1]])
show(table(["nodes", "time of a pass", "dynamic: tokens per time", "chain: tokens per time"], rows))
best = max(rows, key=lambda row: row[2])
print(f"Here the best size is {best[0]} nodes, with {best[2]:.2f} tokens in the time of a baseline pass.")

# %% [markdown]
# The tree of 32 nodes has the most tokens per pass, and yet a smaller one can be best per unit of time. On a busy
# machine or in a large batch ([notebook 12](12_batches_and_serving.ipynb)), each position costs more, and the best tree
# is smaller still.
#
# **Sampling is different.** A candidate in a tree is accepted only if the target *samples* this token. A chain that was
# sampled from a known distribution $q$ does better, because its tokens are accepted with probability $\min(1, p/q)$.
# As an example, take the toy draft and a target with exactly the same distribution, at temperature 1:

# %%
p = torch.tensor([[0.6, 0.3, 0.1]] * 7, dtype=torch.float64)
chain = torch.tensor([[0, 0, 1, 0, 2, 1]])
accepted = acceptance.rejection_probabilities(chain, p[None], p[None, :6])[0]
print("acceptance probabilities of the chain's tokens:", accepted.tolist())
print(f"accepted of six: chain sampled from q {float(accepted.cumprod(0).sum()):.2f}, ", end="")
print(f"best tree of six {sum(map(probability, trees['the six most probable paths'])):.2f}")
assert float(accepted.cumprod(0).sum()) == 6

# %% [markdown]
# With a perfect draft, all six tokens of a chain are accepted, but fewer than two tokens of a tree. So a chain is the
# better use of the nodes in sampling. The exception is a tree whose candidates are also sampled from $q$ and verified
# with the rule of exercise 2. The library's EAGLE drafts trees in greedy decoding and chains in sampling.
#
# ## Takeaway
#
# > **The expected number of accepted tokens is the sum of the path probabilities of the nodes.** So take the most
# > probable paths. The tree is then deep where the draft is confident and wide where it is not. Stop where the next path
# > yields less than its position costs. Where positions are expensive, draft a short chain.

# %% [markdown]
# ## Exercises
#
# ### 1. The mask, by hand
#
# Six nodes have the parents `[-1, 0, 0, -1, 2, 3]`. The first and the fourth are children of the text. Draw the tree on
# paper. Then write down the mask, 6 by 6, with 1 where the row's node attends to the column's node. Also write down the
# depth of each node (children of the text have depth 1). Do not use code. If you like, change `my_parents` and do it
# for a tree of your own.


# %% tags=["check", "fixed"]
def check_1(parents, mask, depths):
    n = len(parents)
    tree = Draft(torch.zeros(1, n, dtype=torch.int64), torch.tensor([n]), parents=torch.tensor([parents]))
    assert len(mask) == n and all(len(row) == n for row in mask), f"the mask must have {n} rows of {n}"
    for node, (mine, right) in enumerate(zip(mask, tree.ancestors()[0].int().tolist())):
        assert mine[node] == 1, f"node {node} must attend to itself"
        assert list(mine) == right, f"node {node} must attend to its ancestors and itself only"
    assert list(depths) == tree.depths()[0].tolist(), (
        "the depth is the number of nodes on the path, including the node itself"
    )


# %% tags=["exercise"]
my_parents = [-1, 0, 0, -1, 2, 3]
my_mask = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],  # this is the mask of a chain; what is wrong here?
    [1, 1, 1, 1, 0, 0],
    [1, 1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1, 1],
]
my_depths = [1, 2, 3, 4, 5, 6]

attempt(check_1, my_parents, my_mask, my_depths)

# %% tags=["answer"]
mask = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
    [1, 0, 1, 0, 1, 0],
    [0, 0, 0, 1, 0, 1],
]
depths = [1, 2, 2, 1, 3, 2]

attempt(check_1, [-1, 0, 0, -1, 2, 3], mask, depths)

# %% [markdown]
# ### 2. Two candidates, one distribution
#
# At one node, two drafters sample one candidate each: $x_1 \sim q_1$ and $x_2 \sim q_2$. The first is accepted with
# probability $\min(1, p(x_1)/q_1(x_1))$. If it is rejected, the second is checked. If that is rejected too, the target
# outputs a token of its own. The output must follow $p$ exactly.
#
# Write `two_candidates(p, q1, q2, x1, x2)`. Return three things: the probability that `x1` is accepted, the probability
# that `x2` is accepted *given that `x1` was rejected*, and the distribution of the target's own token given that both
# were rejected. All distributions are lists. The version below compares both candidates with $p$ itself. The check adds
# up all pairs and reports how far the output is from $p$.


# %% tags=["check"]
def check_2(candidate, seed=1):
    rng = random.Random(seed)
    for _ in range(5):
        p, q1, q2 = (
            [weight / sum(w) for weight in w] for w in ([rng.random() ** 2 for _ in range(4)] for _ in range(3))
        )
        out = [0.0] * 4
        for x1, x2 in product(range(4), repeat=2):
            first, second, own = candidate(list(p), list(q1), list(q2), x1, x2)
            chance = q1[x1] * q2[x2]
            out[x1] += chance * first
            out[x2] += chance * (1 - first) * second
            out = [o + chance * (1 - first) * (1 - second) * share for o, share in zip(out, own)]
        far = sum(abs(a - b) for a, b in zip(out, p)) / 2
        assert far < 1e-12, f"the total variation between the output and p is {far:.3f}"
        pair = torch.tensor([[rng.choices(range(4), q1)[0], rng.choices(range(4), q2)[0]]])
        distributions = [torch.tensor(rows, dtype=torch.float64)[None] for rows in ([p, p, p], [q1, q2])]
        top = torch.tensor([[-1, -1]])
        _, _, right = acceptance.tree_walk(
            pair, top, torch.tensor([2]), *distributions, torch.ones(1, 2, dtype=torch.float64)
        )
        mine = candidate(list(p), list(q1), list(q2), *pair[0].tolist())[:2]
        assert all(abs(a - b) < 1e-9 for a, b in zip(mine, right[0].tolist())), (
            f"you return {mine}, the library {right[0].tolist()}"
        )


# %% tags=["exercise"]
def my_two_candidates(p, q1, q2, x1, x2):
    return min(1, p[x1] / q1[x1]), min(1, p[x2] / q2[x2]), p


attempt(check_2, my_two_candidates)


# %% tags=["answer"]
def two_candidates(p, q1, q2, x1, x2):
    def left_over(p, q):
        rest = [max(a - b, 0.0) for a, b in zip(p, q)]
        return [r / sum(rest) for r in rest] if sum(rest) else p

    after = left_over(p, q1)  # what is left of the target's distribution after x1 was rejected
    return min(1, p[x1] / q1[x1]), min(1, after[x2] / q2[x2]), left_over(after, q2)


attempt(check_2, two_candidates)

# %% [markdown] tags=["answer"]
# This is the rule of SpecInfer, and `acceptance.rejection_tree` applies it to whole trees. If candidates are sampled
# *without* replacement, the earlier candidates must be removed from the distribution, as `acceptance.taken_out` does.

# %% [markdown]
# ### 3. Merge chains into a tree
#
# Several drafters have each drafted a chain. Most chains begin alike, and a tree needs each common beginning only once.
# Write `merged(chains)`. It returns `tokens` and `parents` of the smallest tree that contains every chain: a parent comes
# before its children, and children of the text have the parent -1.


# %% tags=["check"]
def check_3(candidate, seed=2):
    tokens, parents = candidate([[5, 7], [5, 8], [5, 7, 9]])
    assert len(tokens) == 4, f"5 - 7 - 9 and 5 - 8 need four nodes, not {len(tokens)}."
    rng = random.Random(seed)
    for _ in range(50):
        chains = [[rng.randrange(2) for _ in range(rng.randint(0, 4))] for _ in range(4)] + [[0, 1], [0, 0]]
        tokens, parents = candidate([list(chain) for chain in chains])
        assert len(tokens) == len(parents), "each node has a token and a parent"
        paths = []
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            assert -1 <= parent < node, f"node {node} comes before its parent {parent}"
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        wanted = {tuple(chain[:depth]) for chain in chains for depth in range(1, len(chain) + 1)}
        assert set(paths) == wanted, f"the tree of {chains} has other paths"
        assert len(paths) == len(wanted), f"{chains} need {len(wanted)} nodes, and the tree has {len(paths)}"


# %% tags=["exercise"]
def my_merged(chains):
    tokens, parents = [], []
    for chain in chains:  # side by side
        for depth, token in enumerate(chain):
            parents.append(len(tokens) - 1 if depth else -1)
            tokens.append(token)
    return tokens, parents


attempt(check_3, my_merged)


# %% tags=["answer"]
def merged(chains):
    tokens, parents, nodes = [], [], {}  # by parent and token
    for chain in chains:
        at = -1
        for token in chain:
            if (at, token) not in nodes:
                nodes[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = nodes[at, token]
    return tokens, parents


attempt(check_3, merged)

# %% [markdown] tags=["answer"]
# In greedy decoding, merging changes nothing but the cost. In sampling, two drafters that propose the same token have drawn it
# twice, and an exact rule has to know that (exercise 2).

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Choose another `sharp` for every depth of the tree, or learn it from the first rounds of a text. How many tokens
#    per pass do you gain with 16 nodes? Is your rule still good on prompts that you did not use to find it?
# 2. `grow` runs the draft once per node. Write a version that runs it once per level, with a limit on the nodes that it
#    extends (EAGLE-2 does this). Plot tokens per pass against the number of draft passes. Where would you stop?

# %% [markdown]
# ## References
#
# - Miao and others. SpecInfer. [arXiv 2305.09781](https://arxiv.org/abs/2305.09781)
# - Li and others. EAGLE-2, dynamic trees. [arXiv 2406.16858](https://arxiv.org/abs/2406.16858)
# - Chen and others. Sequoia, the best static tree, and sampling without replacement.
#   [arXiv 2402.12374](https://arxiv.org/abs/2402.12374)
# - Svirschevski and others. SpecExec, large trees of a draft model. [arXiv 2406.02532](https://arxiv.org/abs/2406.02532)
# - Jeon and others. Recursive Speculative Decoding. [arXiv 2402.14160](https://arxiv.org/abs/2402.14160)
# - Luo and others. Token Recycling, a tree of fixed shape. [arXiv 2408.08696](https://arxiv.org/abs/2408.08696)
#
# A tree makes the best use of a given draft. The next notebook improves the draft itself, which raises the probability
# of every path: [11. Train your own draft](11_train_your_own_draft.ipynb).
