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
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import random
import sys
from statistics import median

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.lab.doctor.passes import Written, pass_times
from assisted.lab.doctor.passes import compare as compare_pair
from assisted.loading.vocabulary import Vocabulary, shared_tokens

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, slider, table

# %%
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
# With any draft, the output is exact (notebook [02](02_the_acceptance_rule.ipynb)). So the choice of a draft is only about
# speed. This notebook turns the choice into one formula, which all later notebooks use. In
# notebook [14](14_capstone.ipynb) you choose between measured drafts. Two numbers count.
#
# - The **acceptance rate** a is the probability that a drafted token is accepted. A bigger draft guesses better.
# - The **cost** c is the time for drafting one token, in units of a target forward pass over one token. A smaller draft
#   is faster.
#
# A bigger draft raises both. When is the higher acceptance worth the higher cost?
#
# ## Your prediction
#
# Here are two drafts for the same target:
#
# | | acceptance rate a | cost c |
# |---|---|---|
# | the big one | 0.9 | 0.4 |
# | the fast one | 0.7 | 0.1 |
#
# Which one makes the target faster? What is its speedup over the target without a draft? Write down both answers before
# you go on.

# %%
prediction = {
    "the faster one, big or fast": None,
    "its speedup": None,
}

# %% [markdown]
# ## By hand: a big draft and a fast one
#
# A **round**, or draft-verify step, drafts g tokens. The target then checks them in one forward pass over g + 1 tokens:
# the last token of the text and the drafted ones. We measure time in units of a target pass over one token.
#
# - Drafting takes c g.
# - Checking takes v(g + 1), where v(k) is the cost of a pass over k tokens. (Notebook 01: it is more than 1, but much
#   less than k.)
# - The round yields E(a, g) = 1 + a + … + a^g tokens (notebook 02).
#
# The baseline, autoregressive decoding, yields one token per unit of time. So the **speedup** is the number of tokens
# divided by the time:
#
# $$S(a, c, g) = \frac{E(a, g)}{v(g+1) + c\,g}$$
#
# Notebook 01 measured v on the machine at hand. The example uses round numbers of the kind that a small CPU gives. A pass
# over one to four tokens costs 1, 1.2, 1.3 and 1.4, and a pass over a few more costs 1.4.
#
# Take g = 2. The big draft has E = 1 + 0.9 + 0.81 = 2.71, and the round takes 1.3 + 0.8 = 2.1, so S = 1.29. The fast
# draft has E = 2.19, and the round takes 1.3 + 0.2 = 1.5, so S = 1.46.

# %%
V = [1.0, 1.2, 1.3, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4]  # V[k - 1] is v(k)


def expected_tokens(a, g):
    return sum(a**i for i in range(g + 1))


def speedup(a, c, g, v=V):
    return expected_tokens(a, g) / (v[g] + c * g)


rows = [
    [g, expected_tokens(0.9, g), expected_tokens(0.7, g), speedup(0.9, 0.4, g), speedup(0.7, 0.1, g)] for g in range(9)
]
show(table(["draft length g", "tokens per pass, big", "fast", "speedup, big", "fast"], rows))

# %% [markdown]
# The big draft yields more tokens per pass at every draft length. Its best speedup is 1.38, while the fast draft
# reaches 1.55. **It yields more tokens per pass, and it is slower.** That is why an accepted length is not a speedup.
#
# With one drafted token, the calculation is short. Drafting is worthwhile if 1 + a > v(2) + c, that is
#
# $$a > c + v(2) - 1.$$
#
# The acceptance rate has to cover the cost of the drafted token and of the wider pass. Try other drafts with the
# sliders. The curve shows all draft lengths. Below the grey line, drafting loses time.

# %%
ACCEPTANCES = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95]
COSTS = [0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8]
LENGTHS = range(len(V))


def curves(a, c):
    return {"no draft": (LENGTHS, [1.0] * len(V)), "with a draft": (LENGTHS, [speedup(a, c, g) for g in LENGTHS])}


def sentence(a, c):
    best = max(LENGTHS, key=lambda g: speedup(a, c, g))
    if best == 0:
        return "The best choice is not to draft."
    return (
        f"Best draft length {best}: {expected_tokens(a, best):.2f} tokens per pass, speedup {speedup(a, c, best):.2f}."
    )


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

# %%
compare(prediction, dict(zip(prediction, ("fast", max(speedup(0.7, 0.1, g) for g in range(9))))))

# %% [markdown]
# ## From scratch: counting what is accepted
#
# The acceptance rate a is 1 − TV(p, q), the overlap of the two distributions. We can compute it without drafting anything.
# The target writes some texts, both models read them, and we compare their distributions at every position:
#
# - **overlap** is Σ min(p, q), the probability that a sampled token is accepted;
# - **agreement** is the share of positions at which both have the same top-1 token, which counts in greedy decoding;
# - **cosine** is the cosine similarity of the last hidden states. We discuss it below.


# %%
@torch.no_grad()
def read(model, ids, prompt):
    """The logits for each new token, and the hidden states that they come from."""
    out = model(ids[None, :-1], output_hidden_states=True)
    return out.logits[0, prompt - 1 :].float(), out.hidden_states[-1][0, prompt - 1 :].float()


def overlaps(target_logits, draft_logits, temperature=1.0):
    p, q = (target_logits / temperature).softmax(-1), (draft_logits / temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def compare_distributions(target, draft, texts):
    """Mean overlap, agreement and cosine over texts, each of them (ids, prompt length)."""
    found = []
    for ids, prompt in texts:
        (p, h), (q, d) = read(target, ids, prompt), read(draft, ids, prompt)
        size = min(p.shape[-1], q.shape[-1])  # one of the embedding tables may be padded
        p, q = p[:, :size], q[:, :size]
        agree = (p.argmax(-1) == q.argmax(-1)).float()
        similarity = torch.cosine_similarity(h, d, dim=-1) if h.shape == d.shape else torch.full_like(agree, torch.nan)
        found.append(torch.stack([overlaps(p, q), agree, similarity]))
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
overlap, agreement, cosine = compare_distributions(target, draft, texts)
show(table(["", DRAFT], [["overlap, 1 - TV", overlap], ["agreement", agreement], ["cosine", cosine]]))

# %% [markdown]
# ## The library's call: `generate` and its report
#
# `assisted doctor` makes this comparison, and others, for any pair. The function behind it gives the same three
# numbers.

# %%
comparison = compare_pair(
    target, draft, [Written(ids, prompt, ()) for ids, prompt in texts], temperature=1.0, longest=1
)
assert abs(comparison.overlap - overlap) < 1e-5 and abs(comparison.agreement - agreement) < 1e-5
assert comparison.cosine is None or abs(comparison.cosine - cosine) < 1e-4
print(f"overlap {comparison.overlap:.2f}, agreement {comparison.agreement:.2f}, over {comparison.tokens} tokens")

# %% [markdown]
# ### Cosine similarity is a diagnostic, not the rule
#
# It is tempting to compare two models by their hidden states. A cosine near 1 looks like a good draft. But the
# acceptance rule never sees hidden states. It sees distributions, which come from the hidden state times the matrix of
# the last layer. If we rotate both in the same way, the distributions stay the same, but the cosine does not.

# %%
rotation = torch.linalg.qr(torch.randn(draft.config.hidden_size, draft.config.hidden_size))[0].to(model.device)
with torch.no_grad():
    _, states = read(draft, *texts[0])
    head = draft.get_output_embeddings().weight.float()
    logits, rotated_logits = states @ head.T, (states @ rotation) @ (head @ rotation).T
    p, h = read(target, *texts[0])
size = min(p.shape[-1], logits.shape[-1])
rows = []
for name, q, d in (("the draft", logits, states), ("the draft, rotated", rotated_logits, states @ rotation)):
    similarity = torch.cosine_similarity(h, d, dim=-1).mean().item() if h.shape == d.shape else float("nan")
    rows.append([name, similarity, overlaps(p[:, :size], q[:, :size]).mean().item()])
show(table(["", "cosine", "overlap"], rows))
assert abs(rows[0][2] - rows[1][2]) < 1e-3

# %% [markdown]
# The distributions are the same, so the acceptance rate is the same, although the cosine is near zero. A low cosine is
# no evidence against a draft. It can be useful between two checkpoints of *one* draft that is trained to imitate the
# target's states. There it may show that training makes progress. To choose between drafts, use the overlap.
#
# ### The numbers in the report
#
# Now we decode with each draft in turn. `acceptance_by_position` gives the share of drafted tokens that were accepted
# at the first, second, third and fourth position.
#
# Do not confuse two numbers. The `acceptance_rate` of the report is accepted tokens divided by drafted tokens, and one
# rejection also discards all tokens after it. The a of the formula is the probability for *one* token whose predecessors
# were all accepted. We look for the a for which E(a, 4) equals the measured tokens per pass.


# %%
def acceptance_from(tokens_per_pass, g):
    """The a with E(a, g) = tokens_per_pass, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, g) < tokens_per_pass else (low, middle)
    return low


drafting = sampling | dict(max_new_tokens=40, min_new_tokens=40)
passes = []  # seconds of target passes over 1 to 9 tokens
seconds = {name: [] for name in DRAFTS}  # per drafted token
model.reset_totals()
for ids in prompts:  # in turns, so that a busy moment affects all drafts
    passes.append(pass_times(target, texts[0][0], context=64, columns=range(1, 10), repeats=5, seconds=2).seconds)
    for name, one in models.items():
        torch.manual_seed(0)
        one.generate(ids, **drafting)
        seconds[name].append(one.report.draft_seconds / max(one.report.drafted, 1))

one_pass = min(turn[1] for turn in passes)  # the best of the turns: other programs can only add time
measured = {}
for name, one in models.items():
    a = acceptance_from(one.totals.tokens_per_pass, 4)
    measured[name] = a, min(seconds[name]) / one_pass
    if name == "ngram":  # drafts only where it finds a match
        first = one.totals.acceptance_by_position[0] if one.totals.drafted else 0.0
        measured[name] = first, measured[name][1]

# %%
rows = []
for name, one in models.items():
    by_position = " ".join(f"{share:.0%}" for share in one.totals.acceptance_by_position[:4])
    rows.append([name, one.totals.tokens_per_pass, by_position, measured[name][0]])
show(table(["draft", "tokens per pass", "acceptance by position", "a"], rows))

# %% tags=["measured"]
rows = []
for name, (a, c) in measured.items():
    best = max(LENGTHS, key=lambda g: speedup(a, c, g))
    rows.append([name, c, best, speedup(a, c, best)])
show(table(["draft", "c", "best g", "speedup S with V"], rows))

# %% [markdown]
# The cost c is a ratio of times. They were measured in turns on the machine that ran this notebook, and c varies from run
# to run. A best length of 0 means that the draft loses time at every length.
#
# `early-exit:8` drafts with the first half of the target's layers. `ngram` copies the tokens that followed the same words
# earlier in the text. It costs nearly nothing, and it drafts only where the text repeats itself. Its a is the acceptance
# rate of the first drafted token, and its S holds only for the rounds with a draft. (For trained heads and token trees
# the formula needs changes, which notebooks [08](08_medusa.ipynb) to [10](10_trees.ipynb) explain.)
#
# Compare the first a with the overlap above. The two are close but not equal. The drafted texts were different, and
# acceptance is not the same at every position. At easy positions all four tokens are accepted, at others none. The
# formula assumes that every token has the same probability of being accepted, so it is only a guide.
#
# ## The picture: speedup over acceptance and cost
#
# The figure shows the best speedup over all draft lengths, for every a and c, with the cost table V. In the grey region
# the best draft length is 0. The points are the drafts that we measured. The star is the target as its own draft, which
# is always right and never worthwhile.

# %% tags=["folded"]
accept = torch.linspace(0, 1, 100).tolist()
cost = torch.logspace(-2.2, 0.1, 100).tolist()
best = [[max(speedup(a, c, g) for g in LENGTHS[1:]) for a in accept] for c in cost]

figure, axes = plt.subplots(figsize=(4.7, 4.6))
axes.set(
    yscale="log", xlabel="acceptance rate a", ylabel="cost c of a drafted token", xlim=(0, 1.02), ylim=(0.0063, 1.26)
)
axes.contourf(accept, cost, best, levels=[0, 1], colors=[COLOURS["plain"]], alpha=0.25)
low = [max(speedup(a, 0.05, g) for g in LENGTHS[1:]) for a in accept]  # where the lines cross c = 0.05
levels = [level for level in (1, 1.25, 1.5, 2, 3, 4) if level <= max(low)]
lines = axes.contour(accept, cost, best, levels=levels, colors=[COLOURS["target"]], linewidths=1.2)
label_points = [(next(a for a, height in zip(accept, low) if height >= level), 0.05) for level in levels]
axes.clabel(lines, fmt=lambda level: f"{level:g}", fontsize=9, manual=label_points)
axes.text(0.06, 0.5, "drafting loses", color=COLOURS["plain"])
for name, (a, c) in measured.items():
    axes.plot(a, max(c, 0.007), "o", color=COLOURS["draft"])
    place = (-72, -15) if a < 0.4 else (6, 5)
    where = dict(textcoords="offset points", xytext=place)  # labels must not overlap
    axes.annotate(name.removeprefix("zoo:"), (a, max(c, 0.007)), color=COLOURS["draft"], fontsize=9, **where)
axes.plot(1, 1, "*", markersize=12, color=COLOURS["accent"], clip_on=False)
axes.annotate("the target itself", (1, 1), (-92, 12), textcoords="offset points", color=COLOURS["accent"], fontsize=9)
axes.set_yticks([0.01, 0.03, 0.1, 0.3, 1], ["0.01", "0.03", "0.1", "0.3", "1"])
axes.minorticks_off()
plt.show()

# %% [markdown]
# Bigger is not always better, even for acceptance. Among the shipped drafts, half of the target guesses worse than a
# two-layer draft that was trained to imitate the target.
#
# Read the figure along the lines. Drafts on the same line give the same speedup. Start from a = 0.5 and c = 0.1. A
# draft that is ten times cheaper gives 1.35 instead of 1.17. A draft with a = 0.7 at the same cost gives 1.55. Further
# down, the lines become vertical. When drafting is nearly free, only the target's pass takes time, and only the
# acceptance rate helps.
#
# This one run cannot show your V. Here is the cost table of the machine that ran this notebook, measured between the
# drafts above. Copy it into V at the top, and run the notebook again from there.

# %% tags=["measured"]
print("V =", [round(median(turn[k] / turn[1] for turn in passes), 2) for k in range(1, 10)])

# %% [markdown]
# ## When it loses: an expensive draft, or no spare time
#
# **The draft is half of the target.** At c = 0.5 and v(2) = 1.2, one drafted token must be accepted with probability
# 0.7 to break even.
#
# **The pass has no spare capacity.** In a large batch, checking k tokens can take as long as k passes. Then nothing helps.
# Not even a draft that is always right and costs nothing gives a speedup:

# %%
crowded = [float(k) for k in range(1, len(V) + 1)]
print("speedup with v(k) = k, a = 1, c = 0:", [round(speedup(1.0, 0.0, g, crowded), 2) for g in LENGTHS])
print("speedup with v(k) = k, a = 0.8, c = 0.1:", [round(speedup(0.8, 0.1, g, crowded), 2) for g in LENGTHS])
assert all(speedup(1.0, 0.0, g, crowded) <= 1 for g in LENGTHS)

# %% [markdown]
# **The vocabularies differ.** The rule compares p and q token by token, so token number 17 must be the same token for
# both models. Two models of one family usually have the same tokenizer. (Sometimes one of the embedding tables is
# longer, with unused rows at the end. That is not a different vocabulary. The extra rows are ignored.)
# `zoo:draft-other-tokenizer` has its own tokenizer:

# %%
line = "for name in sorted(names):"
other = AutoTokenizer.from_pretrained(zoo.folder("draft-other-tokenizer"))
ours = AutoTokenizer.from_pretrained(zoo.folder("target"))
for label, one in (("target", ours), ("draft", other)):
    print(f"{label:7}", [one.decode([token]) for token in one(line, add_special_tokens=False).input_ids])

ours, other = Vocabulary(ours, len(ours)), Vocabulary(other, len(other))
shared = shared_tokens(ours, other)  # target id -> draft id of the tokens that both have
print(f"{len(shared)} tokens are in both, of {ours.size} and {other.size}")

# %% [markdown]
# Such a draft can be used in two ways ([arXiv 2502.05202](https://arxiv.org/abs/2502.05202)). In the first, the
# target's tokenizer splits the drafted text again, and the tokens have to match. In the second, the draft may use only
# the shared tokens. All other tokens get probability 0, and the rest is normalized to sum to 1. **This** distribution
# is the q of the rule, because the token is sampled from it. Both ways are exact, but the acceptance rate is lower, as
# the figure shows. The third exercise implements the second way.
#
# ## Takeaway
#
# > A draft gives the speedup S = E(a, g) / (v(g + 1) + c g). One drafted token is worthwhile if a > c + v(2) − 1.
# > Tokens per pass alone do not determine the speed. A smaller draft that is right less often can win. Measure a as an
# > overlap or by counting, and measure c and v as ratios of times on your own machine.

# %% [markdown]
# ## Exercises
#
# ### 1. The acceptance rate from a report
#
# `rounds` is a list of pairs: how many tokens were drafted in a round, and how many of them were accepted. Write
# `rate(rounds)`. It returns the best estimate of a, the probability that a drafted token is accepted *if those before it
# were*. Be careful: the tokens after a rejection were never examined. What does accepted / drafted estimate instead? Return
# 0 if no token was examined.


# %% tags=["check"]
def check_1(candidate, a=0.7, seed=0):
    assert candidate([]) == 0, "Without a drafted token, the result is 0."
    assert candidate([(4, 4), (2, 2)]) == 1, "All tokens were accepted, so the rate is 1."
    assert abs(candidate([(4, 0), (4, 4)]) - 0.8) < 1e-9, (
        "In the first round one token was examined and rejected, in the second four were accepted: 4 of 5."
    )
    rng, rounds = random.Random(seed), []
    for _ in range(20000):
        drafted = rng.randint(0, 8)
        accepted = 0
        while accepted < drafted and rng.random() < a:
            accepted += 1
        rounds.append((drafted, accepted))
    found = candidate(rounds)
    assert abs(found - a) < 0.015, f"These rounds were made with a = {a:.3f}, and your estimate is {found:.3f}."


# %% tags=["exercise"]
def my_rate(rounds):
    drafted = sum(drafted for drafted, _ in rounds)
    return sum(accepted for _, accepted in rounds) / drafted if drafted else 0


attempt(check_1, my_rate)


# %% tags=["answer"]
def rate(rounds):
    accepted = sum(accepted for _, accepted in rounds)
    rejected = sum(accepted < drafted for drafted, accepted in rounds)  # one in each round that stopped early
    return accepted / (accepted + rejected) if accepted + rejected else 0


attempt(check_1, rate)

# %% [markdown] tags=["answer"]
# accepted / drafted gets smaller when drafts get longer, with the same draft. So don't compare it between runs of different
# lengths.

# %% [markdown]
# ### 2. Break-even cost
#
# Write `break_even(a, v)`. It returns the cost c below which at least one draft length is worthwhile. (Solve S = 1 for
# c at one length. Then think about which length allows the highest cost.)


# %% tags=["check"]
def check_2(candidate, v=V, a=0.5):
    found = candidate(0.5, [1.0, 1.2])
    assert abs(found - 0.3) < 1e-9, (
        f"With at most one token, a = 0.5 and v(2) = 1.2, the break-even cost is 0.3, not {found}."
    )
    for a in (a, 0.3, 0.7, 0.9):
        c = candidate(a, v)
        cheaper, costlier = (max(speedup(a, c + step, g, v) for g in range(1, len(v))) for step in (-0.001, 0.001))
        assert cheaper > 1, f"For a = {a}, no length is worthwhile at a cost just below {c:.3f}."
        assert costlier < 1, f"For a = {a}, some length is still worthwhile at a cost just above {c:.3f}."


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
# Write `in_target_tokens(q, ids, size)`. `q` is the draft's distribution as a list. `ids[i]` is the target's number for
# the draft's token i, or `None` if the target does not have this token. `size` is the length of the target's
# vocabulary. Return the distribution that a draft restricted to shared tokens samples from, as a list over the target's
# vocabulary. If no shared token is left, raise `ValueError`.


# %% tags=["check"]
def check_3(candidate, q=(0.5, 0.25, 0.25), seed=0):
    rng = random.Random(seed)
    size = len(q) + 2
    ids = rng.sample(range(size), len(q))
    ids[rng.randrange(len(q))] = None
    found, shared = candidate(list(q), list(ids), size), [(i, n) for i, n in enumerate(ids) if n is not None]
    assert len(found) == size, "The list must have one entry for each of the target's tokens."
    others = set(range(size)) - {n for _, n in shared}
    assert all(found[n] == 0 for n in others), "Tokens that are not shared must have probability 0."
    assert abs(sum(found) - 1) < 1e-9, (
        f"It sums to {sum(found):.3f}. The draft samples from a distribution, which sums to 1."
    )
    (i, first), *rest = shared
    for j, n in rest:
        assert abs(found[first] * q[j] - found[n] * q[i]) < 1e-9, (
            f"For the draft, token {i} is {q[i] / q[j]:.2f} times as probable as token {j}. That should not change."
        )
    try:
        candidate([0.5, 0.5], [None, None], 5)
    except ValueError:
        return
    raise AssertionError("No token is shared, but no ValueError was raised.")


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

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you measure.
#
# - **Your texts.** Replace the prompts by five of your own, in one language or style. Which draft gains, which one loses,
#   and does the order of the drafts change?
# - **A better model of acceptance.** The formula assumes the same a at every position. Suppose that half of the positions
#   are easy and half are hard, with two different rates. Predict the tokens per pass of all drafts with this model, and
#   compare with the counts.

# %% [markdown]
# ## References
#
# - Leviathan, Kalman, Matias. Fast inference from transformers via speculative decoding. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - Timor and others. Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous vocabularies. [arXiv 2502.05202](https://arxiv.org/abs/2502.05202)
# - Zhou and others. DistillSpec: improving speculative decoding via knowledge distillation. [arXiv 2310.08461](https://arxiv.org/abs/2310.08461)
#
# Next, notebook [04](04_the_quantized_draft.ipynb). A draft needs no second model. How good is a quantized copy of the
# target?
