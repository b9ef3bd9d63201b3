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
# **A pass may check N drafted tokens. How should they be spent?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks [02](02_the_acceptance_rule.ipynb) and [08](08_medusa.ipynb).*

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
from assisted.drafters.trees import COLUMN, best_paths, top_nodes, worthwhile
from assisted.drafts import Draft
from assisted.notebook import COLOURS, Picture, attempt, figure_style, show, table

TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.set_grad_enabled(False)
figure_style()

# %% [markdown]
# ## Question
#
# A chain of drafted tokens has a weak point: its first wrong token. Everything behind it is lost, however good it was. So why draft only one continuation? A **token tree** offers
# several: two candidates for the next token, three for the one after, and so on. The target checks all of them in one pass and follows the branch that it agrees with.
#
# Say that a pass may check N drafted tokens, the **nodes** of the tree. They can be a chain of N. They can be a bush: two children below every node. Or anything between.
#
# Which tree of N nodes gets the most tokens accepted?
#
# ## Your prediction
#
# You may spend 16 nodes. A chain of 16 from the small draft of this package gets a little over 3 tokens out of a pass, the target's own included. What does the *best* tree of 16 nodes get?
# Write down a number.

# %% [markdown]
# ## By hand
#
# A toy draft knows three tokens. Whatever came before, it says: *a* with probability 0.6, *b* with 0.3, *c* with 0.1. Suppose that the draft is right about how sure it is. Then
#
# - a path is as probable as the product of its tokens: *a a b* has 0.6 · 0.6 · 0.3,
# - a node is accepted when the text runs through it, so its chance **is** the probability of its path,
# - the expected number of accepted tokens is the **sum of the path probabilities of all nodes**.
#
# So the best tree of N nodes holds the N most probable paths. A parent is at least as probable as its child, so the N most probable paths always form a tree.

# %%
distribution = {"a": 0.6, "b": 0.3, "c": 0.1}


def worth(path):
    return math.prod(distribution[token] for token in path)


trees = {
    "chain": ["a", "aa", "aaa", "aaaa", "aaaaa", "aaaaaa"],
    "binary, two levels": ["a", "b", "aa", "ab", "ba", "bb"],
    "the six most probable paths": ["a", "aa", "b", "aaa", "ab", "ba"],
}
show(table(["tree", "nodes", "expected tokens accepted"], [[k, len(v), sum(map(worth, v))] for k, v in trees.items()]))

# %% [markdown]
# Six nodes each. The chain spends its last nodes on paths of probability 0.08 and 0.05; the full binary tree spends one on *bb*, 0.09. The best-first tree has none below 0.18.
#
# ## From scratch
#
# **Grow.** Keep a heap of all nodes that could be added. Take the most probable one, add it, let the draft say what may follow it (its eight best tokens), and put these on the heap. After N steps
# the tree holds the N most probable paths; and since nodes are added best first, its first 8 nodes are the best tree of 8.
#
# One thing has to be corrected. Our target is greedy, and a greedy target takes the likeliest token far more often than the draft's probabilities say: the draft was trained on text,
# where the second best comes up, too. So the draft's distribution is sharpened before it is believed: raised to the power `sharp`, and normalised. We take 2, and look at what 1 gives in
# the picture.


# %%
def grow(draft, cache, last, count, sharp=2.0, width=8):
    """The `count` most probable paths behind the token `last`, as (tokens, parents, path probabilities); best first.

    cache: the draft's keys and values of everything before `last`; it is left as it was.
    """
    tokens, parents, worths, heap = [], [], [], []

    def offer(path, parent, log_worth):
        """What may follow a node: one draft pass over its path."""
        row = torch.tensor([[last, *path]], device=draft.device)
        logits = draft(row, past_key_values=cache).logits[0, -1].float()
        cache.crop(-row.shape[1])
        sure, which = (sharp * logits).log_softmax(-1).topk(width)
        for log_share, token in zip(sure.tolist(), which.tolist()):
            heapq.heappush(heap, (-(log_worth + log_share), token, parent, path))

    offer([], -1, 0.0)
    while len(tokens) < count:
        negative, token, parent, path = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        worths.append(math.exp(-negative))
        if len(tokens) < count:
            offer([*path, token], len(tokens) - 1, -negative)
    return tokens, parents, worths


# %% [markdown]
# **Check.** All nodes go through the target in one pass. Two things make that possible: every node sees the text and its own **ancestors**, not its siblings (the mask), and its
# position is that of the text plus its depth, so siblings have the same position. **Walk.** Start at the text's end; go to the child that holds the target's choice, if there is one; repeat.


# %%
def tree_mask(parents):
    """[n][n]: True where the column is an ancestor of the row's node, or the node itself."""
    mask = [[False] * len(parents) for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = list(mask[parent])
        mask[node][node] = True
    return mask


def check(target, ids, tokens, parents):
    """The target's logits after the text, [0], and after each node, [1 + node]: one pass."""
    seen = torch.tensor(tree_mask(parents))
    text, every = len(ids), len(ids) + len(tokens)
    mask = torch.ones(every, every, dtype=torch.bool).tril()
    mask[text:, text:] = seen
    places = torch.cat([torch.arange(text), text - 1 + seen.sum(1)])
    row = torch.tensor([[*ids, *tokens]])
    inputs = [thing.to(target.device) for thing in (row, mask[None, None], places[None])]
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
# Try it on one prompt: a function of a package that the shipped models have never seen, cut in the middle. The target goes on greedily for 36 tokens, and we grow a tree
# of 24 nodes somewhere in its text.

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
tokens, parents, worths = grow(draft, cache, ids[at - 1], 24)
logits = check(target, ids[:at], tokens, parents)
path = walk(tokens, parents, logits.argmax(-1).tolist())

print("text:    ", repr(tokenizer.decode(ids[at - 12 : at])))
print("accepted:", [tokenizer.decode([tokens[node]]) for node in path])
assert [tokens[node] for node in path] == ids[at : at + len(path)] or target.dtype != torch.float32  # as plain decoding

# %% [markdown]
# Here is the tree. Click a node to fold or unfold what is below it, and move the slider to add nodes best first. The number behind a token is the probability of the path to it, by the sharpened draft; green
# is what the target accepts.


# %%
def layout(parents):
    """Where each node stands: (depth, height), the leaves below one another, a parent level with its first child."""
    children = {node: [c for c, p in enumerate(parents) if p == node] for node in range(-1, len(parents))}
    places, leaf = {}, 0

    def put(node, depth):
        nonlocal leaf
        first = leaf
        for child in children[node]:
            put(child, depth + 1)
        places[node] = (depth, first)
        leaf = max(leaf, first + 1)

    put(-1, 0)
    return places


def drawn(tokens, parents, worths, path, places):
    """The SVG elements of every node: a line from its parent, a dot, its token."""
    parts = []
    for node, parent in enumerate(parents):
        (x, y), (px, py) = [(30 + 78 * d, 20 + 25 * h) for d, h in (places[node], places[parent])]
        paint = COLOURS["accepted"] if node in path else COLOURS["draft"]
        word = html.escape(repr(tokenizer.decode([tokens[node]]))[1:-1].replace(" ", "\u2423")[:8])
        parts.append(
            f'<g data-node="{node}" tabindex="0"><path d="M{px} {py}C{px + 30} {py} {x - 45} {y} {x} {y}" fill="none" '
            f'stroke="{paint}" stroke-opacity=".6"/><circle cx="{x}" cy="{y}" r="5" fill="{paint}"/>'
            f'<text x="{x + 2}" y="{y - 8}">{word} {worths[node]:.2f}</text>'
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
      const count = Number(input.value), kept = path.filter(n => n < count).length;
      root.querySelector("output").textContent = count;
      root.querySelector(".sentence").textContent =
        count + " nodes: the target accepts " + kept + " and adds one token of its own.";
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
def token_tree(tokens, parents, worths, path):
    """A tree to be unfolded: one piece of HTML. Without scripts it is the picture of the whole tree."""
    places = layout(parents)
    wide = 130 + 78 * max(d for d, _ in places.values())
    tall = 40 + 25 * max(h for _, h in places.values())
    key = "t" + hashlib.sha256(repr((tokens, parents)).encode()).hexdigest()[:10]
    script = SCRIPT.replace("$parents", json.dumps(parents)).replace("$path", json.dumps(path)).replace("$key", key)
    style = (
        ".token-tree text {fill: currentColor; font: 12px sans-serif} .token-tree .more {font-weight: bold} "
        ".token-tree g {cursor: pointer} .token-tree svg {max-width: 100%; height: auto; display: block}"
    )
    nodes = drawn(tokens, parents, worths, path, places)
    return Picture(
        f'<div class="token-tree" data-key="{key}"><style>{style}</style>'
        f'<label>nodes <output>{len(tokens)}</output> <input type="range" min="1" max="{len(tokens)}" '
        f'value="{len(tokens)}"></label> <button type="button">fold or unfold all</button>'
        f'<div class="sentence">{len(tokens)} nodes: the target accepts {len(path)} and adds one of its own.</div>'
        f'<svg viewBox="0 0 {wide} {tall}" width="{wide}" role="img" aria-label="a token tree">'
        f'<circle cx="30" cy="20" r="5" fill="currentColor"/>{nodes}</svg>{script}</div>',
        "a token tree",
    )


show(token_tree(tokens, parents, worths, path))

# %% [markdown]
# ## The library's call
#
# A `Draft` is a token tree per row: tokens, and the parent of each. It knows its mask and its depths; `match_tree` is the walk; `top_nodes` picks the best nodes of many candidates. All of them
# agree with what we wrote. And the pass over the tree gives the same logits as running each path alone.

# %%
as_draft = Draft(torch.tensor([tokens]), torch.tensor([len(tokens)]), parents=torch.tensor([parents]))
assert as_draft.ancestors()[0].tolist() == tree_mask(parents)
assert as_draft.depths()[0].tolist() == [sum(row) for row in tree_mask(parents)]

choice = logits.argmax(-1).tolist()
assert acceptance.match_tree(tokens, parents, choice)[0] == path

best = top_nodes(as_draft.tokens, as_draft.parents, torch.tensor([worths]).log(), 8)
assert best.tokens[0].tolist() == tokens[:8] and best.parents[0].tolist() == parents[:8]

furthest = 0.0
for node, row in enumerate(tree_mask(parents)):
    alone = [*ids[:at], *(tokens[n] for n, seen in enumerate(row) if seen)]
    there = target(torch.tensor([alone], device=target.device)).logits[0, -1]
    furthest = max(furthest, float((there - logits[node + 1]).abs().max()))
assert furthest < 1e-3 or target.dtype != torch.float32
print(f"largest difference between a logit of the tree pass and of the path alone: {furthest:.0e}")

# %% [markdown]
# In real use you write one line: `draft="zoo:eagle3"` drafts such trees, level by level instead of node by node, so that the head runs once a level (EAGLE-2, arXiv 2406.16858);
# `draft="recycle"` has a tree of fixed shape. **SpecInfer** (arXiv 2305.09781) makes a tree in another way: several drafters write a chain each, and the chains are merged, what they share
# being there once. That is `Merged([...])`.
#
# ## The picture
#
# Now the question. At *every* place of four texts of 36 new tokens, grow the best tree of 32 nodes and note which of its nodes lie on the target's path. As the first N nodes are the best tree of
# N, this gives all N at once. Then replay: start at the first place, accept what a tree of N gives, jump behind it, and count passes.


# %%
def paths_everywhere(sharp):
    """For each text and each place in it: the nodes of the tree of 32 that the target's text runs through, in order."""
    found = []
    for text, start in texts:
        cache = DynamicCache(config=draft.config)
        draft(torch.tensor([text[:start]], device=draft.device), past_key_values=cache)
        found.append({})
        for place in range(start + 1, len(text)):
            grown, above, _ = grow(draft, cache, text[place - 1], 32, sharp)
            child = {(p, t): n for n, (p, t) in enumerate(zip(above, grown))}
            here, on_path = -1, []
            for token in text[place:-1]:
                here = child.get((here, token))
                if here is None:
                    break
                on_path.append(here)
            found[-1][place] = on_path
            draft(torch.tensor([[text[place - 1]]], device=draft.device), past_key_values=cache)
    return found


def tokens_per_pass(accepted):
    """accepted(number of the text, place): how many drafted tokens are kept there."""
    passes = 0
    for number, (text, start) in enumerate(texts):
        place = start + 1
        while place < len(text):
            place += accepted(number, place) + 1
            passes += 1
    return sum(len(text) - start - 1 for text, start in texts) / passes


# %%
sizes = [1, 2, 4, 8, 16, 32]
curves = {}
for name, sharp in {"dynamic": 2.0, "dynamic, draft taken at its word": 1.0}.items():
    found = paths_everywhere(sharp)
    curves[name] = [tokens_per_pass(lambda t, p: sum(node < n for node in found[t][p])) for n in sizes]

# %% [markdown]
# Chains, binary trees and fixed shapes need no growing. Only the **rank** of the target's token in the draft's distribution matters: rank 0 is the draft's first guess. One draft pass over the text
# tells all ranks. A *static* tree has a fixed shape: "the second best token below the best one" and so on. Which shape? The most probable one, by how often each rank was right
# (`best_paths`; Sequoia, arXiv 2402.12374, computes the best fixed tree from such rates). We measure these rates on the same texts, which is the best case for it.

# %%
ranks = []
for text, _ in texts:
    logits = draft(torch.tensor([text], device=draft.device)).logits[0].float()
    own = logits[:-1].gather(1, torch.tensor(text[1:], device=draft.device)[:, None])
    ranks.append([0, *(logits[:-1] > own).sum(1).tolist()])


def follow(tree, number, place):
    """How far the target's ranks run through a tree of ranks, given as {(parent, rank): node}."""
    here, kept = -1, 0
    for rank in ranks[number][place:-1]:
        here = tree.get((here, rank))
        if here is None:
            break
        kept += 1
    return kept


def measured(shape):
    tree = {(p, r): n for n, (p, r) in enumerate(zip(shape.parents, shape.ranks))}
    return tokens_per_pass(lambda number, place: follow(tree, number, place))


seen = [rank for row, (_, start) in zip(ranks, texts) for rank in row[start:]]
rates = [sum(rank == r for rank in seen) / len(seen) for r in range(8)]
print("how often each rank is right:", [round(rate, 2) for rate in rates])
curves["chain"] = [measured(best_paths([[1.0]] * n, n)) for n in sizes]
curves["static"] = [measured(best_paths([rates] * n, n)) for n in sizes]
full = [(2 ** (d + 1) - 2, measured(best_paths([[0.5, 0.5]] * d, 2 ** (d + 1) - 2))) for d in (1, 2, 3, 4)]

# %% [markdown]
# Two runs of the library itself. A chain of fixed length must take exactly as many passes as our replay says; and SpecInfer merges the chains of the draft and of the suffix drafter
# ([notebook 07](07_ngram_and_suffix.ipynb)).


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
show(table(["SpecInfer, draft and suffix: nodes a pass", "tokens a pass"], [list(point) for point in merged]))

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(7, 3.6), width_ratios=[3, 2])
ink = {"dynamic": "accepted", "dynamic, draft taken at its word": "plain", "static": "accent", "chain": "target"}
for name, values in curves.items():
    left.plot(sizes, values, "--" if "word" in name else "-", color=COLOURS[ink[name]], marker="o", markersize=3)
left.plot(*zip(*full), color=COLOURS["draft"], marker="o", markersize=3)
left.plot(*zip(*merged), "D", color=COLOURS["bonus"], markersize=6)
left.set(xscale="log", xlabel="nodes N checked in a pass", ylabel="tokens per pass", xlim=(0.9, 36))
left.set_xticks(sizes, map(str, sizes))
left.minorticks_off()
labels = [("dynamic", 0), ("static", 1), ("dynamic, draft taken at its word", 2), ("chain", 3)]
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
    xscale="log", xlabel="nodes N", ylabel="tokens per unit of pass cost", xlim=(0.9, 36), title="price of a column"
)
right.set_xticks(sizes, map(str, sizes))
right.minorticks_off()
plt.show()

print("tokens per pass with 16 nodes:", {name: round(values[sizes.index(16)], 2) for name, values in curves.items()})
at32 = {name: values[-1] for name, values in curves.items()}
assert at32["dynamic"] > at32["chain"]

# %% [markdown]
# Left: more nodes never bring fewer tokens, and what they bring depends on the shape. Up to four nodes a chain is nearly as good as anything: the first guess is right so often that depth is worth
# more than width. Then the chain is spent: outside a loop nobody is right thirty times in a row. The binary tree wastes half of each level. The static tree goes deep on the first guesses
# and hedges a little. The dynamic tree does the same where the draft is sure, and hedges where it isn't. Taken at its word the draft hedges too much: growing by
# probabilities is only as good as the probabilities. SpecInfer's two chains bring no more here than one chain of as many nodes: a second
# drafter helps only where it is right and the first one is wrong.
#
# What this run can't show: four texts of 36 tokens are little, and the small target repeats itself at temperature 0. The order of the curves is what to take from it, not their height.
#
# ## When it loses
#
# **Columns have a price.** Right: each node adds a share of a plain pass to the cost of the pass, and the dot marks the best N. At 0 the largest tree wins. At 0.15, as on a busy machine, a
# handful of nodes is best. And drafting a tree isn't free either.
#
# **Sampling.** A tree of candidates waits for the target to *draw* one of them. A chain that was drawn from a known distribution $q$ doesn't wait: its tokens are kept with probability
# $\min(1, p/q)$. Take the toy draft and a target with exactly the same distribution, at temperature 1:

# %%
p = torch.tensor([[0.6, 0.3, 0.1]] * 7, dtype=torch.float64)
chain = torch.tensor([[0, 0, 1, 0, 2, 1]])
kept = acceptance.rejection_probabilities(chain, p[None], p[None, :6])[0]
print("chances that the chain's tokens are kept:", kept.tolist())
print(f"accepted of six: chain drawn from q {float(kept.cumprod(0).sum()):.2f}, ", end="")
print(f"best tree of six {sum(map(worth, trees['the six most probable paths'])):.2f}")
assert float(kept.cumprod(0).sum()) == 6

# %% [markdown]
# Of a perfect draft a chain keeps all six tokens, the tree fewer than two. So when you sample, chains are the better spending unless the candidates of a tree are drawn from
# $q$ as well and judged by the rule of exercise 2. The library's EAGLE drafts trees for greedy text and chains when sampling.
#
# ## Takeaway
#
# > **The expected number of accepted tokens is the sum of the path probabilities of the nodes.** So take the most probable paths: deep where the draft is sure, wide where it isn't, and stop where the next
# > path is worth less than its column costs. A tree is a way to spend columns. Where columns are dear, draft a short chain.

# %% [markdown]
# ## Exercises
#
# ### 1. The mask, by hand
#
# Six nodes have the parents `[-1, 0, 0, -1, 2, 3]`: the first and the fourth are children of the text. Draw the tree on paper. Then write down the mask, 6 by 6, 1 where the row's node sees
# the column's node, and the depth of each node (children of the text have depth 1). No code.


# %% tags=["check"]
def check_1(mask, depths):
    tree = Draft(torch.zeros(1, 6, dtype=torch.int64), torch.tensor([6]), parents=torch.tensor([[-1, 0, 0, -1, 2, 3]]))
    assert len(mask) == 6 and all(len(row) == 6 for row in mask), "the mask has six rows of six"
    for node, (mine, right) in enumerate(zip(mask, tree.ancestors()[0].int().tolist())):
        assert mine[node] == 1, f"node {node} must see itself"
        assert list(mine) == right, f"node {node} sees its ancestors and itself, and nobody else"
    assert list(depths) == tree.depths()[0].tolist(), "the depth is the number of nodes on the path, the node included"


# %% tags=["exercise"]
my_mask = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],  # a chain's mask: what is wrong here?
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
# At one node, two drafters each draw a candidate: $x_1 \sim q_1$ and $x_2 \sim q_2$. The first is kept with probability $\min(1, p(x_1)/q_1(x_1))$. If it isn't, the second gets a chance. If that
# fails, too, the target emits a token of its own. The output must follow $p$ exactly.
#
# Write `two_candidates(p, q1, q2, x1, x2)`. Return the chance to keep `x1`, the chance to keep `x2` *given that `x1` was not kept*, and the distribution of the target's own token, given that neither
# was kept. All distributions are lists. The version below judges both candidates by $p$ itself; the check adds up all pairs and tells how far the output is from $p$.


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
        assert far < 1e-12, f"the output is {far:.3f} away from p in total variation"
        pair = torch.tensor([[rng.choices(range(4), q1)[0], rng.choices(range(4), q2)[0]]])
        distributions = [torch.tensor(rows, dtype=torch.float64)[None] for rows in ([p, p, p], [q1, q2])]
        top = torch.tensor([[-1, -1]])
        _, _, right = acceptance.tree_walk(
            pair, top, torch.tensor([2]), *distributions, torch.ones(1, 2, dtype=torch.float64)
        )
        mine = candidate(list(p), list(q1), list(q2), *pair[0].tolist())[:2]
        assert all(abs(a - b) < 1e-9 for a, b in zip(mine, right[0].tolist())), (
            f"{mine}, the library {right[0].tolist()}"
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

    after = left_over(p, q1)  # what the target still has to say once x1 was refused
    return min(1, p[x1] / q1[x1]), min(1, after[x2] / q2[x2]), left_over(after, q2)


attempt(check_2, two_candidates)

# %% [markdown]
# This is the rule of SpecInfer, and `acceptance.rejection_tree` does it for whole trees. Candidates drawn *without* replacement need the distribution without what was drawn before: `acceptance.taken_out`.
#
# ### 3. How many nodes pay?
#
# The path probabilities of the candidates are known, best first. A pass over a tree of N nodes costs $1 + \kappa N$ plain passes. Write `best_count(worths, column)`: the N with the most expected
# tokens per cost, the target's own token included. Of equals the smallest N. Nothing at all may be best.


# %% tags=["check"]
def check_3(candidate):
    rng = random.Random(2)
    for _ in range(50):
        worths = sorted((rng.random() ** 2 for _ in range(20)), reverse=True)
        counts = []
        for column in (0.0, COLUMN, 0.1, 0.4, 1.5):
            rates = [tokens / (1 + column * n) for n, tokens in enumerate(accumulate(worths, initial=1.0))]
            count = candidate(list(worths), column)
            assert 0 <= count <= 20, f"{count} nodes of 20"
            assert rates[count] > max(rates) - 1e-12, (
                f"{count} nodes at {column:g} a column; {rates.index(max(rates))} are better"
            )
            counts.append(count)
        assert counts == sorted(counts, reverse=True), "dearer columns, fewer nodes"
        assert counts[1] == worthwhile(worths, None, 0.0, 20), "the library takes another number"


# %% tags=["exercise"]
def my_best_count(worths, column):
    return sum(worth > column for worth in worths)  # every node that is worth its column. Is it?


attempt(check_3, my_best_count)


# %% tags=["answer"]
def best_count(worths, column):
    """A further node pays while its path is worth more than its column costs at the rate reached so far."""
    tokens, cost, count = 1.0, 1.0, 0
    for worth in worths:
        if worth <= column * tokens / cost:
            break
        tokens, cost, count = tokens + worth, cost + column, count + 1
    return count


attempt(check_3, best_count)

# %% [markdown]
# A node has to be worth more than its column times *the rate that the pass has reached*: time spent on a column could have been spent on another pass, which brings several tokens.
#
# ## References
#
# - Miao and others, *SpecInfer*: [arXiv 2305.09781](https://arxiv.org/abs/2305.09781)
# - Li and others, *EAGLE-2*, dynamic trees: [arXiv 2406.16858](https://arxiv.org/abs/2406.16858)
# - Chen and others, *Sequoia*, the best static tree, and sampling without replacement: [arXiv 2402.12374](https://arxiv.org/abs/2402.12374)
# - Jeon and others, *Recursive Speculative Decoding*: [arXiv 2402.14160](https://arxiv.org/abs/2402.14160)
# - Luo and others, *Token Recycling*, a tree of fixed shape: [arXiv 2408.08696](https://arxiv.org/abs/2408.08696)
#
# Next: [11. Train your own draft](11_train_your_own_draft.ipynb), which raises every path probability at once.
