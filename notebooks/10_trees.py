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
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import hashlib
import heapq
import html
import json
import math
import random
from itertools import accumulate, product

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache

from assisted import AssistedModelForCausalLM, Merged, acceptance, bench
from assisted.drafters.trees import best_paths, top_nodes, worthwhile
from assisted.drafts import Draft
from assisted.lengths.costs import COLUMN
from assisted.notebook import COLOURS, Picture, attempt, figure_style, show, table

TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
figure_style()

# %% [markdown]
# ## Question
#
# A chain of drafted tokens has a weak point, its first wrong token. Every token after it is lost, however good it was.
# So why draft only one continuation? A **token tree** contains several: for example two candidates for the next token,
# three for the one after, and so on. The target checks all of them in one forward pass and follows the branch that it
# agrees with.
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

# %% [markdown]
# ## By hand
#
# A toy draft has a vocabulary of three tokens. After any text, its distribution is 0.6 for *a*, 0.3 for *b* and 0.1 for
# *c*. Suppose that these probabilities are calibrated. Then
#
# - the probability of a path is the product of the probabilities of its tokens: *a a b* has 0.6 · 0.6 · 0.3;
# - a node is accepted if the target's text goes through it, so its acceptance rate **is** the probability of its path;
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
# ## From scratch
#
# **Grow the tree.** Keep a heap of all nodes that could be added. Take the most probable one, add it, run the draft to
# get its eight most probable next tokens, and put these on the heap. After N steps the tree consists of the N most
# probable paths. Nodes are added best first, so the first 8 nodes are the best tree of 8 nodes.
#
# One correction is needed. Our target decodes greedily, so it takes its top-1 token every time. The draft was trained
# on text, where other tokens appear too, so its top-1 probability is too low for a greedy target. So we sharpen the
# draft's distribution before we use it: we raise it to the power `sharp` and normalise it. We use 2, and the figure
# also shows the result for 1.


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
# **Check the tree.** All nodes go through the target in one pass. Two things make that possible. With the mask, every
# node attends to the text and to its own **ancestors**, but not to its siblings. The position id of a node is that of
# the text plus its depth, so siblings have the same position id.
#
# **Walk along the tree.** Start at the end of the text. If a child contains the target's choice, go to this child, and
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
# Here is the tree. Click a node to fold or unfold the nodes below it. Move the slider to add nodes best first. The
# number next to a token is the probability of its path in the sharpened distribution. Nodes that the target accepts are
# green.


# %%
def layout(parents):
    """(depth, height) of each node. Leaves are below one another, and a parent is level with its first child."""
    children = {node: [c for c, p in enumerate(parents) if p == node] for node in range(-1, len(parents))}
    positions, leaf = {}, 0

    def put(node, depth):
        nonlocal leaf
        first = leaf
        for child in children[node]:
            put(child, depth + 1)
        positions[node] = (depth, first)
        leaf = max(leaf, first + 1)

    put(-1, 0)
    return positions


def draw_nodes(tokens, parents, probabilities, path, positions):
    """The SVG elements of every node: a line from its parent, a dot and its token."""
    parts = []
    for node, parent in enumerate(parents):
        (x, y), (px, py) = [(30 + 78 * d, 20 + 25 * h) for d, h in (positions[node], positions[parent])]
        paint = COLOURS["accepted"] if node in path else COLOURS["draft"]
        word = html.escape(repr(tokenizer.decode([tokens[node]]))[1:-1].replace(" ", "\u2423")[:8])
        parts.append(
            f'<g data-node="{node}" tabindex="0"><path d="M{px} {py}C{px + 30} {py} {x - 45} {y} {x} {y}" fill="none" '
            f'stroke="{paint}" stroke-opacity=".6"/><circle cx="{x}" cy="{y}" r="5" fill="{paint}"/>'
            f'<text x="{x + 2}" y="{y - 8}">{word} {probabilities[node]:.2f}</text>'
            f'<text class="more" x="{x + 9}" y="{y + 5}"></text></g>'
        )
    return "".join(parts)


# %%
SCRIPT = """<script>(function () {
  const parents = $parents, path = $path;
  for (const root of document.querySelectorAll('[data-key="$key"]')) {
    const groups = [...root.querySelectorAll("[data-node]")], input = root.querySelector("input");
    const button = root.querySelector("button"), inner = new Set(parents.filter(p => p >= 0));
    let folded = new Set(inner);
    const above = n => parents[n] < 0 ? [] : [parents[n], ...above(parents[n])];
    const draw = () => {
      const count = Number(input.value), accepted = path.filter(n => n < count).length;
      root.querySelector("output").textContent = count;
      root.querySelector(".sentence").textContent =
        count + " nodes: the target accepts " + accepted + " and adds one token of its own.";
      groups.forEach((group, n) => {
        group.style.display = n >= count || above(n).some(m => folded.has(m)) ? "none" : "";
        const below = parents.filter((p, m) => m < count && above(m).includes(n)).length;
        group.querySelector(".more").textContent = folded.has(n) && below ? "+" + below : "";
      });
    };
    const turn = n => { folded.has(n) ? folded.delete(n) : inner.has(n) && folded.add(n); draw(); };
    groups.forEach((group, n) => {
      group.addEventListener("click", () => turn(n));
      group.addEventListener("keydown", event => { if (event.key === "Enter") turn(n); });
    });
    button.addEventListener("click", () => { folded = new Set(folded.size ? [] : inner); draw(); });
    input.addEventListener("input", draw);
    draw();
  }
})();</script>"""


# %%
def token_tree(tokens, parents, probabilities, path):
    """A tree that can be folded, as one piece of HTML. Without scripts it shows the whole tree."""
    positions = layout(parents)
    wide = 130 + 78 * max(d for d, _ in positions.values())
    tall = 40 + 25 * max(h for _, h in positions.values())
    key = "t" + hashlib.sha256(repr((tokens, parents)).encode()).hexdigest()[:10]
    script = SCRIPT.replace("$parents", json.dumps(parents)).replace("$path", json.dumps(path)).replace("$key", key)
    style = (
        ".token-tree text {fill: currentColor; font: 12px sans-serif} .token-tree .more {font-weight: bold} "
        ".token-tree g {cursor: pointer} .token-tree svg {max-width: 100%; height: auto; display: block}"
    )
    nodes = draw_nodes(tokens, parents, probabilities, path, positions)
    return Picture(
        f'<div class="token-tree" data-key="{key}"><style>{style}</style>'
        f'<label>nodes <output>{len(tokens)}</output> <input type="range" min="1" max="{len(tokens)}" '
        f'value="{len(tokens)}"></label> <button type="button">fold or unfold all</button>'
        f'<div class="sentence">{len(tokens)} nodes: the target accepts {len(path)} and adds one token of its own.</div>'
        f'<svg viewBox="0 0 {wide} {tall}" width="{wide}" role="img" aria-label="a token tree">'
        f'<circle cx="30" cy="20" r="5" fill="currentColor"/>{nodes}</svg>{script}</div>',
        "a token tree",
    )


show(token_tree(tokens, parents, probabilities, path))

# %% [markdown]
# ## The library's call
#
# A `Draft` contains one token tree per row: the tokens, and the parent of each. It computes the mask and the depths.
# `match_tree` is the walk, and `top_nodes` picks the best nodes of many candidates. All of them agree with our code.
# The pass over the tree gives the same logits as a separate pass over each path.

# %%
as_draft = Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), parents=torch.tensor([parents]))
assert as_draft.ancestors()[0].tolist() == tree_mask(parents)
assert as_draft.depths()[0].tolist() == [sum(row) for row in tree_mask(parents)]

choice = logits.argmax(-1).tolist()
assert acceptance.match_tree(tokens, parents, choice)[0] == path

best = top_nodes(as_draft.tokens, as_draft.parents, torch.tensor([probabilities]).log(), 8)
assert best.tokens[0].tolist() == tokens[:8] and best.parents[0].tolist() == parents[:8]

furthest = 0.0
for node, row in enumerate(tree_mask(parents)):
    alone = [*ids[:at], *(tokens[n] for n, seen in enumerate(row) if seen)]
    there = target(torch.tensor([alone], device=target.device)).logits[0, -1]
    furthest = max(furthest, float((there - logits[node + 1]).abs().max()))
assert furthest < 1e-3 or target.dtype != torch.float32
print(f"largest difference of a logit between the tree pass and the path alone: {furthest:.0e}")

# %% [markdown]
# In practice you write one line. `draft="zoo:eagle3"` drafts such trees, level by level instead of node by node, so
# that the head runs once per level (EAGLE-2, arXiv 2406.16858). `draft="recycle"` uses a tree of fixed shape.
# **SpecInfer** (arXiv 2305.09781) builds a tree in another way. Several drafters write one chain each, and the chains
# are merged, with shared beginnings stored once. In this package, that is `Merged([...])`.
#
# ## The picture
#
# Now we answer the question. At *every* position of four texts of 36 new tokens, we grow the best tree of 32 nodes and
# note which of its nodes are on the target's path. The first N nodes are the best tree of N nodes, so this gives the
# result for all N at once. Then we replay: start at the first position, accept the tokens that a tree of N nodes gives,
# jump to the position after them, and count passes.


# %%
def paths_everywhere(sharp):
    """For each text and each position in it, the nodes of the tree of 32 on the target's path, in order."""
    found = []
    for text, start in texts:
        cache = DynamicCache(config=draft.config)
        draft(torch.tensor([text[:start]], device=draft.device), past_key_values=cache)
        found.append({})
        for position in range(start + 1, len(text)):
            grown, above, _ = grow(draft, cache, text[position - 1], 32, sharp)
            child = {(p, t): n for n, (p, t) in enumerate(zip(above, grown))}
            here, on_path = -1, []
            for token in text[position:-1]:
                here = child.get((here, token))
                if here is None:
                    break
                on_path.append(here)
            found[-1][position] = on_path
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
curves = {}
for name, sharp in {"dynamic": 2.0, "dynamic, not sharpened": 1.0}.items():
    found = paths_everywhere(sharp)
    curves[name] = [tokens_per_pass(lambda t, p: sum(node < n for node in found[t][p])) for n in sizes]

# %% [markdown]
# Chains, binary trees and fixed shapes do not need to be grown. Only the **rank** of the target's token in the draft's
# distribution matters. Rank 0 is the draft's top-1 token. One draft pass over the text gives all ranks. A *static* tree
# has a fixed shape, such as "the second most probable token after the top-1 token". Which shape is best? The most
# probable one, given how often each rank was right (`best_paths`; Sequoia, arXiv 2402.12374, computes the best fixed
# tree from such rates). We measure these rates on the same texts, which is the best case for the static tree.

# %%
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
full = [(2 ** (d + 1) - 2, measured(best_paths([[0.5, 0.5]] * d, 2 ** (d + 1) - 2))) for d in (1, 2, 3, 4)]

# %% [markdown]
# We also run the library itself. A chain of fixed length must need exactly as many passes as our replay. SpecInfer
# merges the chains of the draft model and of the suffix drafter ([notebook 07](07_ngram_and_suffix.ipynb)).


# %%
def run(pair, length):
    pair.reset_totals()
    for prompt, (text, start) in zip(prompts, texts):
        output = pair.generate(prompt.ids.to(pair.device), **GREEDY, draft_length=length)[0].tolist()
        assert output == text or target.dtype != torch.float32  # every tree is exact
    return pair.totals.drafted / pair.totals.target_passes, pair.totals.tokens_per_pass


for length in (2, 8):
    ours = curves["chain"][sizes.index(length)]
    assert abs(run(model, length)[1] - ours) < 1e-9 or target.dtype != torch.float32

both = AssistedModelForCausalLM.from_models(target, draft=Merged([DRAFT, "suffix"]), tokenizer=tokenizer)
merged = [run(both, length) for length in (2, 4, 8)]
show(table(["SpecInfer, draft and suffix: nodes per pass", "tokens per pass"], [list(point) for point in merged]))

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 3.6), width_ratios=[3, 2])
ink = {"dynamic": "accepted", "dynamic, not sharpened": "plain", "static": "accent", "chain": "target"}
for name, values in curves.items():
    left.plot(sizes, values, "--" if "not" in name else "-", color=COLOURS[ink[name]], marker="o", markersize=3)
left.plot(*zip(*full), color=COLOURS["draft"], marker="o", markersize=3)
left.plot(*zip(*merged), "D", color=COLOURS["bonus"], markersize=6)
left.set(xscale="log", xlabel="nodes N checked in a pass", ylabel="tokens per pass", xlim=(0.9, 36))
left.set_xticks(sizes, map(str, sizes))
left.minorticks_off()
labels = [("dynamic", 0), ("static", 1), ("dynamic, not sharpened", 2), ("chain", 3)]
for name, line in labels:
    left.text(0.02, 0.97 - 0.075 * line, name, color=COLOURS[ink[name]], transform=left.transAxes, va="top")
left.text(0.02, 0.97 - 0.3, "binary", color=COLOURS["draft"], transform=left.transAxes, va="top")
left.text(0.02, 0.97 - 0.375, "SpecInfer, two chains", color=COLOURS["bonus"], transform=left.transAxes, va="top")

for price in (0.0, 0.02, 0.05, 0.15):
    gain = [tokens / (1 + price * n) for tokens, n in zip(curves["dynamic"], sizes)]
    top = max(range(len(gain)), key=gain.__getitem__)
    right.plot(sizes, gain, color=COLOURS["accepted"], alpha=1 - 4 * price)
    right.plot(sizes[top], gain[top], "o", color=COLOURS["accepted"])
    right.text(36, gain[-1], f"{price:g}", va="center")
right.set(
    xscale="log", xlabel="nodes N", ylabel="tokens per unit of pass cost", xlim=(0.9, 36), title="cost of a position"
)
right.set_xticks(sizes, map(str, sizes))
right.minorticks_off()
plt.show()

print("tokens per pass with 16 nodes:", {name: round(values[sizes.index(16)], 2) for name, values in curves.items()})
at32 = {name: values[-1] for name, values in curves.items()}
assert at32["dynamic"] > at32["chain"]

# %% [markdown]
# Left: more nodes never yield fewer tokens, but the gain depends on the shape. Up to four nodes, a chain is nearly as
# good as any tree. The first guess is right so often that depth is more useful than width. Then the chain stops
# gaining, because outside a loop no draft is right thirty times in a row. The binary tree wastes half of each level.
# The static tree goes deep along the first guesses and adds a few alternatives. The dynamic tree does the same where
# the draft is confident, and adds alternatives where it is not. Without sharpening it adds too many alternatives: a
# tree that is grown by probabilities is only as good as the probabilities. Here, SpecInfer's two chains yield no more
# than one chain with the same number of nodes. A second drafter helps only where it is right and the first one is
# wrong.
#
# This run has limits. Four texts of 36 tokens are few, and the small target repeats itself in greedy decoding. Trust
# the order of the curves, not their height.
#
# ## When it loses
#
# **Positions have a cost.** In the right panel, each node adds a share of a target pass to the cost of the pass, and
# the dot marks the best N. At cost 0 the largest tree wins. At 0.15, as on a busy machine, a few nodes are best. And
# drafting a tree is not free either.
#
# **Sampling is different.** A candidate in a tree is accepted only if the target *samples* this token. A chain that was
# sampled from a known distribution $q$ does better, because its tokens are accepted with probability $\min(1, p/q)$.
# Take the toy draft and a target with exactly the same distribution, at temperature 1:

# %%
p = torch.tensor([[0.6, 0.3, 0.1]] * 7, dtype=torch.float64)
chain = torch.tensor([[0, 0, 1, 0, 2, 1]])
accepted = acceptance.rejection_probabilities(chain, p[None], p[None, :6])[0]
print("acceptance probabilities of the chain's tokens:", accepted.tolist())
print(f"accepted of six: chain sampled from q {float(accepted.cumprod(0).sum()):.2f}, ", end="")
print(f"best tree of six {sum(map(probability, trees['the six most probable paths'])):.2f}")
assert float(accepted.cumprod(0).sum()) == 6

# %% [markdown]
# With a perfect draft, all six tokens of a chain are accepted, but fewer than two of a tree. So in sampling, a chain is
# the better use of the nodes. The exception is a tree whose candidates are also sampled from $q$ and verified with the
# rule of exercise 2. The library's EAGLE drafts trees in greedy decoding and chains in sampling.
#
# ## Takeaway
#
# > **The expected number of accepted tokens is the sum of the path probabilities of the nodes.** So take the most
# > probable paths: deep where the draft is confident, wide where it is not. Stop where the next path yields less than
# > its position costs. Where positions are expensive, draft a short chain.

# %% [markdown]
# ## Exercises
#
# ### 1. The mask, by hand
#
# Six nodes have the parents `[-1, 0, 0, -1, 2, 3]`. The first and the fourth are children of the text. Draw the tree on
# paper. Then write down the mask, 6 by 6, with 1 where the row's node attends to the column's node. Also write down the
# depth of each node (children of the text have depth 1). Do not use code.


# %% tags=["check"]
def check_1(mask, depths):
    tree = Draft(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([6]), parents=torch.tensor([[-1, 0, 0, -1, 2, 3]]))
    assert len(mask) == 6 and all(len(row) == 6 for row in mask), "the mask must have six rows of six"
    for node, (mine, right) in enumerate(zip(mask, tree.ancestors()[0].int().tolist())):
        assert mine[node] == 1, f"node {node} must attend to itself"
        assert list(mine) == right, f"node {node} must attend to its ancestors and itself only"
    assert list(depths) == tree.depths()[0].tolist(), (
        "the depth is the number of nodes on the path, including the node itself"
    )


# %% tags=["exercise"]
my_mask = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],  # this is the mask of a chain; what is wrong here?
    [1, 1, 1, 1, 0, 0],
    [1, 1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1, 1],
]
my_depths = [1, 2, 3, 4, 5, 6]

attempt(check_1, my_mask, my_depths)

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

attempt(check_1, mask, depths)

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
def check_2(candidate):
    rng = random.Random(1)
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

# %% [markdown]
# This is the rule of SpecInfer, and `acceptance.rejection_tree` applies it to whole trees. If candidates are sampled
# *without* replacement, the earlier candidates must be removed from the distribution: `acceptance.taken_out`.
#
# ### 3. How many nodes are worthwhile?
#
# The path probabilities of the candidates are known, best first. A pass over a tree of N nodes costs $1 + \kappa N$
# times as much as a pass over one token. Write `best_count(probabilities, position_cost)`. It returns the N with the
# most expected tokens per cost, including the target's own token. Of equal values, return the smallest N. The best N
# may be 0.


# %% tags=["check"]
def check_3(candidate):
    rng = random.Random(2)
    for _ in range(50):
        probabilities = sorted((rng.random() ** 2 for _ in range(20)), reverse=True)
        counts = []
        for position_cost in (0.0, COLUMN, 0.1, 0.4, 1.5):
            rates = [
                tokens / (1 + position_cost * n) for n, tokens in enumerate(accumulate(probabilities, initial=1.0))
            ]
            count = candidate(list(probabilities), position_cost)
            assert 0 <= count <= 20, f"{count} nodes, but there are 20"
            assert rates[count] > max(rates) - 1e-12, (
                f"{count} nodes at a cost of {position_cost:g} per position, but {rates.index(max(rates))} are better"
            )
            counts.append(count)
        assert counts == sorted(counts, reverse=True), "at a higher cost, the number of nodes must not rise"
        assert counts[1] == worthwhile(probabilities, None, 0.0, 20), "the library returns a different number"


# %% tags=["exercise"]
def my_best_count(probabilities, position_cost):
    return sum(
        probability > position_cost for probability in probabilities
    )  # every node that yields more than its cost. Is this right?


attempt(check_3, my_best_count)


# %% tags=["answer"]
def best_count(probabilities, position_cost):
    """Add a node while its path yields more than its position costs at the rate reached so far."""
    tokens, cost, count = 1.0, 1.0, 0
    for probability in probabilities:
        if probability <= position_cost * tokens / cost:
            break
        tokens, cost, count = tokens + probability, cost + position_cost, count + 1
    return count


attempt(check_3, best_count)

# %% [markdown]
# A node must yield more than its position costs times *the rate that the pass has reached*. The time for this position
# could have been spent on another pass, which yields several tokens.
#
# ## References
#
# - Miao and others. SpecInfer. [arXiv 2305.09781](https://arxiv.org/abs/2305.09781)
# - Li and others. EAGLE-2, dynamic trees. [arXiv 2406.16858](https://arxiv.org/abs/2406.16858)
# - Chen and others. Sequoia, the best static tree, and sampling without replacement.
#   [arXiv 2402.12374](https://arxiv.org/abs/2402.12374)
# - Jeon and others. Recursive Speculative Decoding. [arXiv 2402.14160](https://arxiv.org/abs/2402.14160)
# - Luo and others. Token Recycling, a tree of fixed shape. [arXiv 2408.08696](https://arxiv.org/abs/2408.08696)
#
# Next: [11. Train your own draft](11_train_your_own_draft.ipynb), which raises every path probability at once.
