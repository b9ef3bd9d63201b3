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
# # 03. Choosing a draft
#
# **Bigger or faster: which draft makes the target faster?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebook [02](02_the_acceptance_rule.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import random
from statistics import median

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.doctor.comparison import Written, compare
from assisted.doctor.passes import pass_times
from assisted.notebook import COLOURS, attempt, figure_style, show, slider, table
from assisted.loading.vocabulary import Vocabulary, shared_tokens

TARGET, DRAFT = "zoo:target", "zoo:draft"
DRAFTS = [DRAFT, "zoo:draft-other-tokenizer", "early-exit:8", "early-exit:4", "ngram"]
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)
# and the other drafts that suit it: DRAFTS = [DRAFT, "early-exit:18", "ngram"]

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# Any draft gives an exact text (notebook 02), so the choice of a draft is about speed alone. Two things count.
#
# - The **acceptance** a: how likely a drafted token is to be kept. A bigger draft guesses better.
# - The **cost** c: the time for drafting one token, in units of a pass of the target over one token. A smaller draft is faster.
#
# They pull in opposite directions. What is the exchange rate?
#
# ## Your prediction
#
# Two drafts for the same target:
#
# | | acceptance a | cost c |
# |---|---|---|
# | the big one | 0.9 | 0.4 |
# | the fast one | 0.7 | 0.1 |
#
# Which one makes the target faster? How many times as fast as without a draft? Write down an answer before you go on.

# %% [markdown]
# ## By hand
#
# A **round** drafts g tokens and has the target check them in one pass over g + 1 tokens: the last one of the text, and the drafted ones. In units of a plain pass over one token,
#
# - drafting takes c g,
# - checking takes v(g + 1), where v(k) is the price of a pass over k tokens (notebook 01: more than 1, much less than k),
# - the round gives E(a, g) = 1 + a + … + a^g tokens (notebook 02).
#
# Plain decoding gives one token in one unit. So the **speedup** is tokens by time:
#
# $$S(a, c, g) = \frac{E(a, g)}{v(g+1) + c\,g}$$
#
# Notebook 01 measured v on the machine at hand. For now take a round price list, of the kind that one finds on a small CPU: 1, 1.2, 1.3 and 1.4 for one to four tokens, and 1.4 for a few more.
# For the big draft and g = 2: E = 1 + 0.9 + 0.81 = 2.71, the round takes 1.3 + 0.8 = 2.1, so S = 1.29. For the fast one: E = 2.19, 1.3 + 0.2 = 1.5, S = 1.46.

# %%
V = [1.0, 1.2, 1.3, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4]  # V[k - 1] is v(k)


def expected_tokens(a, g):
    return sum(a**i for i in range(g + 1))


def speedup(a, c, g, v=V):
    return expected_tokens(a, g) / (v[g] + c * g)


rows = [
    [g, expected_tokens(0.9, g), expected_tokens(0.7, g), speedup(0.9, 0.4, g), speedup(0.7, 0.1, g)] for g in range(9)
]
show(table(["draft length g", "tokens a pass: big", "fast", "speedup: big", "fast"], rows))

# %% [markdown]
# The big draft gives more tokens in every pass, for every draft length. At its best it gives a speedup of 1.38, the fast one 1.55. **More tokens per pass, and slower.** That is why an accepted length is no
# speedup.
#
# With one token drafted, the account is short. It pays if 1 + a > v(2) + c, that is
#
# $$a > c + v(2) - 1.$$
#
# Acceptance has to pay for the drafted token and for the wider pass. Try other drafts (the curve shows all draft lengths; below the grey line, drafting loses):

# %%
ACCEPTANCES = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
COSTS = [0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
LENGTHS = range(len(V))


def curves(a, c):
    return {"no draft": (LENGTHS, [1.0] * len(V)), "with a draft": (LENGTHS, [speedup(a, c, g) for g in LENGTHS])}


def sentence(a, c):
    best = max(LENGTHS, key=lambda g: speedup(a, c, g))
    if best == 0:
        return "Best: draft nothing."
    return f"Best: {best} tokens, {expected_tokens(a, best):.2f} tokens per pass, speedup {speedup(a, c, best):.2f}."


slider(
    {"acceptance a": ACCEPTANCES, "cost c": COSTS},
    curves,
    start=(0.7, 0.1),
    xlabel="draft length g",
    ylabel="speedup S",
    ylim=(0, 4),
    text=sentence,
    colours={"no draft": COLOURS["plain"], "with a draft": COLOURS["accent"]},
)

# %% [markdown]
# ## From scratch
#
# Where does a come from? It is 1 − TV(p, q), the overlap of the two distributions, and the distributions can be looked at without drafting anything. Let the target write some texts, let both models read
# them, and compare the distributions at every place:
#
# - **overlap**: Σ min(p, q), how likely a sampled token is to be kept;
# - **agreement**: how often both find the same token likeliest, which is what counts in greedy decoding;
# - **cosine**: how alike the last hidden states are, as directions. We come to that one below.


# %%
@torch.no_grad()
def read(model, ids, prompt):
    """The logits before each new token, and the hidden states behind them."""
    out = model(ids[None, :-1], output_hidden_states=True)
    return out.logits[0, prompt - 1 :].float(), out.hidden_states[-1][0, prompt - 1 :].float()


def overlaps(target_logits, draft_logits, temperature=1.0):
    p, q = (target_logits / temperature).softmax(-1), (draft_logits / temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def look(target, draft, texts):
    """(ids, prompt length) of each text -> mean overlap, agreement and cosine."""
    found = []
    for ids, prompt in texts:
        (p, h), (q, d) = read(target, ids, prompt), read(draft, ids, prompt)
        size = min(p.shape[-1], q.shape[-1])  # one of the vocabularies may be padded
        p, q = p[:, :size], q[:, :size]
        agree = (p.argmax(-1) == q.argmax(-1)).float()
        like = torch.cosine_similarity(h, d, dim=-1) if h.shape == d.shape else torch.full_like(agree, torch.nan)
        found.append(torch.stack([overlaps(p, q), agree, like]))
    return torch.cat(found, 1).mean(1).tolist()


PROMPTS = [
    "def mean(values):\n",
    "class Queue:\n    def __init__(self",
    "for name in sorted(names):\n",
    "    try:\n        value = int(",
]
models = {name: AssistedModelForCausalLM.from_pretrained(TARGET, draft=name, draft_length=4) for name in DRAFTS}
for one in models.values():
    one.to("cuda" if torch.cuda.is_available() else "cpu")
model = models[DRAFT]
target, draft = model.target, model.drafter.model
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
prompts = [tokenizer(text, return_tensors="pt").input_ids.to(model.device) for text in PROMPTS]

# %%
sampling = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=48, min_new_tokens=48)
texts = [(model.generate(ids, **sampling, assisted=False)[0], ids.shape[1]) for ids in prompts]
overlap, agreement, cosine = look(target, draft, texts)
show(table(["", DRAFT], [["overlap, 1 - TV", overlap], ["agreement", agreement], ["cosine", cosine]]))

# %% [markdown]
# ## The library's call
#
# `assisted doctor` makes this comparison, and others, for any pair. Its function gives the same three numbers.

# %%
comparison = compare(target, draft, [Written(ids, prompt, ()) for ids, prompt in texts], temperature=1.0, longest=1)
assert abs(comparison.overlap - overlap) < 1e-5 and abs(comparison.agreement - agreement) < 1e-5
assert comparison.cosine is None or abs(comparison.cosine - cosine) < 1e-4
print(f"overlap {comparison.overlap:.2f}, agreement {comparison.agreement:.2f}, over {comparison.tokens} tokens")

# %% [markdown]
# ### Cosine similarity is a diagnostic, not the rule
#
# It is tempting to compare the models by their hidden states: a cosine near 1 looks like a good draft. The acceptance rule never sees hidden states. It sees distributions, and the distribution is the hidden state times the
# matrix of the last layer. Turn both by the same rotation: the distributions stay, the cosine does not.

# %%
turn = torch.linalg.qr(torch.randn(draft.config.hidden_size, draft.config.hidden_size))[0].to(model.device)
with torch.no_grad():
    _, states = read(draft, *texts[0])
    head = draft.get_output_embeddings().weight.float()
    logits, turned_logits = states @ head.T, (states @ turn) @ (head @ turn).T
    p, h = read(target, *texts[0])
size = min(p.shape[-1], logits.shape[-1])
rows = []
for name, q, d in (("the draft", logits, states), ("the draft, turned", turned_logits, states @ turn)):
    like = torch.cosine_similarity(h, d, dim=-1).mean().item() if h.shape == d.shape else float("nan")
    rows.append([name, like, overlaps(p[:, :size], q[:, :size]).mean().item()])
show(table(["", "cosine", "overlap"], rows))
assert abs(rows[0][2] - rows[1][2]) < 1e-3

# %% [markdown]
# Same distributions, same acceptance, and a cosine near zero. So a low cosine says nothing against a draft. Between two checkpoints of *one* draft, while it is trained to imitate the target's
# states, it may show that training makes progress. To choose between drafts, use the overlap.
#
# ### What the report says
#
# Now draft, with each draft in turn. `acceptance_by_position` says how many of the tokens drafted first, second, third and fourth were kept. Two numbers must not be confused. The report's
# `acceptance_rate` is accepted over drafted tokens, and a refusal spoils the ones behind it as well. The a of the formula is the chance of *one* token whose predecessors were
# kept. We look for the a with E(a, 4) equal to the counted tokens per pass.


# %%
def acceptance_behind(tokens_per_pass, g):
    """The a with E(a, g) = tokens_per_pass, by halving."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, g) < tokens_per_pass else (low, middle)
    return low


drafting = sampling | dict(max_new_tokens=40, min_new_tokens=40)
passes = []  # seconds of passes over 1 to 9 tokens
seconds = {name: [] for name in DRAFTS}  # of a drafted token
model.reset_totals()
for ids in prompts:  # in turns, so that a busy moment meets them all
    passes.append(pass_times(target, texts[0][0], context=64, columns=range(1, 10), repeats=5, seconds=2).seconds)
    for name, one in models.items():
        torch.manual_seed(0)
        one.generate(ids, **drafting)
        seconds[name].append(one.report.draft_seconds / max(one.report.drafted, 1))

one_pass = min(turn[1] for turn in passes)  # the best of the turns: other programs can only add to it
measured = {}
for name, one in models.items():
    a = acceptance_behind(one.totals.tokens_per_pass, 4)
    measured[name] = a, min(seconds[name]) / one_pass
    if name == "ngram":  # drafts only where it finds something
        first = one.totals.acceptance_by_position[0] if one.totals.drafted else 0.0
        measured[name] = first, measured[name][1]

# %%
rows = []
for name, one in models.items():
    by_position = " ".join(f"{share:.0%}" for share in one.totals.acceptance_by_position[:4])
    rows.append([name, one.totals.tokens_per_pass, by_position, *measured[name]])
show(table(["draft", "tokens per pass", "kept by position", "a", "c"], rows))

# %% [markdown]
# The column c is a ratio of times, measured in turns on the machine that ran this notebook, and it varies from run to run. (`early-exit:8` drafts with the first half of the target's layers. `ngram` copies what followed
# the same words earlier in the text; it costs nearly nothing, and drafts only where the text repeats. Its a is for the first token, where it drafts.
# Trained heads and trees of guesses have another account: notebooks [08](08_medusa.ipynb) to [10](10_trees.ipynb).)
#
# Compare the first a with the overlap above. They are near each other, and not equal: other texts were drafted, and acceptance is not the same at every place. Some places are easy, and
# there all four are kept; at others, none. So the formula is a guide: it takes every token to be as likely to be kept as every other.
#
# ## The picture
#
# The best speedup that any draft length can give, for every a and c, with the price list V. In the grey part the best length is 0. The points are the drafts that we measured.
# The star is the target as its own draft: always right, and never worth it.

# %%
accept = torch.linspace(0, 1, 100).tolist()
cost = torch.logspace(-2.2, 0.1, 100).tolist()
best = [[max(speedup(a, c, g) for g in LENGTHS[1:]) for a in accept] for c in cost]

figure, axes = plt.subplots(figsize=(7, 4))
axes.set(yscale="log", xlabel="acceptance a", ylabel="cost c of a drafted token", xlim=(0, 1.02), ylim=(0.0063, 1.26))
axes.contourf(accept, cost, best, levels=[0, 1], colors=[COLOURS["plain"]], alpha=0.25)
levels = [1, 1.25, 1.5, 2, 3, 4]
lines = axes.contour(accept, cost, best, levels=levels, colors=[COLOURS["target"]], linewidths=1.2)
low = [max(speedup(a, 0.05, g) for g in LENGTHS[1:]) for a in accept]  # where the lines cross c = 0.05
places = [(next(a for a, height in zip(accept, low) if height >= level), 0.05) for level in levels]
axes.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=9, manual=places)
axes.text(0.06, 0.5, "do not draft", color=COLOURS["plain"])
for name, (a, c) in measured.items():
    axes.plot(a, max(c, 0.007), "o", color=COLOURS["draft"])
    place = dict(xytext=(-6, 5), ha="right") if a < 0.5 else dict(xytext=(6, 5))
    axes.annotate(name, (a, max(c, 0.007)), textcoords="offset points", color=COLOURS["draft"], fontsize=9, **place)
axes.plot(1, 1, "*", markersize=12, color=COLOURS["accent"], clip_on=False)
axes.annotate("the target itself", (1, 1), (-92, -4), textcoords="offset points", color=COLOURS["accent"], fontsize=9)
axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["0.01", "0.03", "0.1", "0.3", "1"])
axes.minorticks_off()
plt.show()

# %% [markdown]
# Bigger is not always better, even in acceptance: among the shipped ones, half of the target guesses worse than a draft of two layers that was trained to imitate the target.
#
# Read it along the lines: drafts on one line are worth the same. From a = 0.5 and c = 0.1, making the draft ten times cheaper gives 1.35 in place of 1.17; raising a to 0.7 at the same cost gives 1.55. Further
# down the lines become vertical: when drafting is nearly free, the pass of the target is all that is left, and only acceptance helps.
#
# What this one run cannot show: your V. Here is the price list of the machine that ran this notebook, measured between the drafts above. Put it in the place of V at the top, and run again from there.

# %%
print("V =", [round(median(turn[k] / turn[1] for turn in passes), 2) for k in range(1, 10)])

# %% [markdown]
# ## When it loses
#
# **A draft that is half of the target.** At c = 0.5 one drafted token has to be kept with probability 0.7 to break even, with v(2) = 1.2.
#
# **No free room in the pass.** If checking k tokens takes as long as k passes, as in large batches, nothing helps, not even a draft that is always right and costs nothing:

# %%
crowded = [float(k) for k in range(1, 10)]
print("speedup with v(k) = k, a = 1, c = 0:", [round(speedup(1.0, 0.0, g, crowded), 2) for g in LENGTHS])
print("speedup with v(k) = k, a = 0.8, c = 0.1:", [round(speedup(0.8, 0.1, g, crowded), 2) for g in LENGTHS])
assert all(speedup(1.0, 0.0, g, crowded) <= 1 for g in LENGTHS)

# %% [markdown]
# **Two vocabularies.** The rule compares p and q token by token, so both models must mean the same by token number 17. Two models of one family usually have the same tokenizer. (Sometimes one of the tables is
# longer, with rows at the end that stand for nothing. That is not another vocabulary; the extra rows are left out.) `zoo:draft-other-tokenizer` has a tokenizer of its own:

# %%
line = "for name in sorted(names):"
other = AutoTokenizer.from_pretrained(zoo.folder("draft-other-tokenizer"))
ours = AutoTokenizer.from_pretrained(zoo.folder("target"))
for label, one in (("target", ours), ("draft", other)):
    print(f"{label:7}", [one.decode([token]) for token in one(line, add_special_tokens=False).input_ids])

ours, other = Vocabulary(ours, len(ours)), Vocabulary(other, len(other))
shared = shared_tokens(ours, other)  # target id -> draft id of what both can say in one token
print(f"{len(shared)} tokens are in both, of {ours.size} and {other.size}")

# %% [markdown]
# Such a draft can be used in two ways ([arXiv 2502.05202](https://arxiv.org/abs/2502.05202)). Either its text is cut anew by the target's tokenizer, and has to match. Or it is held to the shared tokens: all
# others get probability 0, the rest is made to add up to 1 again, and **that** distribution is the q of the rule, since it is the one drawn from. Both are exact; acceptance suffers, as the picture shows. The third
# exercise writes the second way.
#
# ## Takeaway
#
# > A draft is worth S = E(a, g) / (v(g + 1) + c g). One drafted token pays if a > c + v(2) − 1. Tokens per pass alone say nothing about speed: a smaller draft that is right less often can win.
# > Measure a as overlap or by counting, c and v as ratios of times on your own machine.

# %% [markdown]
# ## Exercises
#
# ### 1. The best length
#
# Write `best_length(a, c, v)`: the draft length with the largest speedup, 0 if none beats plain decoding. `v` is a price list as V is, so lengths go from 0 to `len(v) - 1`.


# %% tags=["check"]
def check_1(candidate):
    for a, c, best in ((0.7, 0.1, 5), (0.9, 0.4, 5), (0.2, 0.3, 0), (0.95, 0.02, 8)):
        found = candidate(a, c, V)
        assert found == best, f"a = {a}, c = {c}: {best} is best ({speedup(a, c, best):.3f}), not {found}."
    assert candidate(1.0, 0.0, crowded) == 0, "With v(k) = k no length beats plain decoding: the answer is 0."


# %% tags=["exercise"]
def best_length(a, c, v):
    raise NotImplementedError


attempt(check_1, best_length)


# %% tags=["answer"]
def best_length_answer(a, c, v):
    return max(range(len(v)), key=lambda g: speedup(a, c, g, v))  # of equals, max takes the first


attempt(check_1, best_length_answer)

# %% [markdown]
# ### 2. Break-even cost
#
# Write `break_even(a, v)`: the cost c below which some draft length pays. (Solve S = 1 for c at one length. Then think about which length allows the most.)


# %% tags=["check"]
def check_2(candidate):
    found = candidate(0.5, [1.0, 1.2])
    assert abs(found - 0.3) < 1e-9, f"With one token at most, a = 0.5 and v(2) = 1.2, c may be 0.3, not {found}."
    for a in (0.3, 0.5, 0.7, 0.9):
        c = candidate(a, V)
        cheaper, dearer = (max(speedup(a, c + step, g) for g in range(1, len(V))) for step in (-0.001, 0.001))
        assert cheaper > 1, f"a = {a}: at a cost just below {c:.3f} no length pays."
        assert dearer < 1, f"a = {a}: at a cost just above {c:.3f} some length still pays."


# %% tags=["exercise"]
def break_even(a, v):
    raise NotImplementedError


attempt(check_2, break_even)


# %% tags=["answer"]
def break_even_answer(a, v):
    return max((expected_tokens(a, g) - v[g]) / g for g in range(1, len(v)))


attempt(check_2, break_even_answer)

# %% [markdown]
# ### 3. Vocabulary mismatch
#
# Write `in_target_tokens(q, ids, size)`. `q` is the draft's distribution as a list, `ids[i]` the target's number of the draft's token i or `None` if the target does not have it, `size` the length of the
# target's vocabulary. Return the distribution that the draft draws from if it is held to shared tokens, as a list over the target's vocabulary. If it has no shared token left, raise `ValueError`.


# %% tags=["check"]
def check_3(candidate):
    found = candidate([0.5, 0.25, 0.25], [3, None, 0], 5)
    assert len(found) == 5, "The list must have a place for each of the target's tokens."
    assert found[1] == found[2] == found[4] == 0, "Tokens that the draft does not share have probability 0."
    assert abs(sum(found) - 1) < 1e-9, (
        f"It adds up to {sum(found):.3f}. What is drawn from is a distribution: it adds up to 1."
    )
    assert abs(found[3] - 2 / 3) < 1e-9, "The draft's token 0, with half of the mass, is token 3 of the target."
    rng = random.Random(0)
    p, q = [rng.random() for _ in range(5)], candidate([0.1, 0.2, 0.3, 0.4], [2, 4, None, 1], 5)
    p = [x / sum(p) for x in p]
    kept = [min(a, b) for a, b in zip(p, q)]
    out = [k + (1 - sum(kept)) * (a - k) / sum(a - k for a, k in zip(p, kept)) for a, k in zip(p, kept)]
    assert max(abs(a - b) for a, b in zip(out, p)) < 1e-9, "With this q the output does not follow p."
    try:
        candidate([0.5, 0.5], [None, None], 5)
    except ValueError:
        return
    raise AssertionError("Nothing is shared, and no ValueError was raised.")


# %% tags=["exercise"]
def in_target_tokens(q, ids, size):
    raise NotImplementedError


attempt(check_3, in_target_tokens)


# %% tags=["answer"]
def in_target_tokens_answer(q, ids, size):
    distribution = [0.0] * size
    for probability, number in zip(q, ids):
        if number is not None:
            distribution[number] += probability
    if sum(distribution) == 0:
        raise ValueError("no shared token is left")
    return [probability / sum(distribution) for probability in distribution]


attempt(check_3, in_target_tokens_answer)

# %% [markdown]
# ## References
#
# - Leviathan, Kalman, Matias. Fast inference from transformers via speculative decoding. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - Timor and others. Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous vocabularies. [arXiv 2502.05202](https://arxiv.org/abs/2502.05202)
# - Zhou and others. DistillSpec: improving speculative decoding via knowledge distillation. [arXiv 2310.08461](https://arxiv.org/abs/2310.08461)
#
# Next: notebook [04](04_the_quantized_draft.ipynb), the quantized draft.
