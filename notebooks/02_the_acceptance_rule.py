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
# # 02. The acceptance rule
#
# **Why is the output exact, although a weaker model wrote most of it?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebook [01](01_why_decoding_is_slow.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import itertools
import random
from collections import Counter

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

from assisted import AssistedModelForCausalLM, acceptance, zoo
from assisted.notebook import COLOURS, attempt, figure_style, show, table

TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# Notebook 01 found room to spare. A pass over five tokens costs little more than a pass over one. If somebody guesses the next four tokens, one
# pass can judge all of them.
#
# A small model, the **draft**, makes the guess. It is wrong at times. The large model, the **target**, has to decide which of the drafted tokens
# stay. The rule it uses is called the **acceptance rule**.
#
# What we want of the rule is strict: the text that comes out must have exactly the distribution that the target alone would have given it. Not similar, the
# same. Then nobody has to ask whether the answers got worse.
#
# Two words for the rest of the notebook. The **distribution** `p` is the target's distribution of the next token, a probability for each token. The distribution `q` is
# the draft's.
#
# ## Your prediction
#
# Here is a vocabulary of four tokens, and the two distributions at one place in the text:
#
# | token | A | B | C | D |
# |---|---|---|---|---|
# | target, p | 0.50 | 0.30 | 0.15 | 0.05 |
# | draft, q | 0.40 | 0.20 | 0.30 | 0.10 |
#
# The draft draws a token from q. How often can it be kept, at best, if what comes out must follow p? And if four tokens are drafted in a row, each like
# this, how many tokens does one pass of the target give on average? Write down two numbers before you go on.

# %% [markdown]
# ## By hand
#
# Let the rule keep a drafted token x with probability keep(x). If it refuses, it draws another token from some distribution r. Then a token x comes out
# in two ways:
#
# $$\underbrace{q(x)\,\text{keep}(x)}_{\text{drafted and kept}} \;+\; \underbrace{P(\text{refused})\; r(x)}_{\text{drawn after a refusal}} \;=\; p(x)$$
#
# That the sum is p(x) is the demand. Everything else follows from it.
#
# 1. **How much may be kept?** The first part alone must not be more than p(x), so keep(x) is at most p(x)/q(x). It is a probability, so it is at most 1. The
#    most that is allowed is **keep(x) = min(1, p(x)/q(x))**. Then the first part is min(p(x), q(x)).
# 2. **What is missing?** The second part has to supply p(x) − min(p(x), q(x)), which is max(p(x) − q(x), 0). There is no choice left: r is
#    this, divided by its sum. It is called the **residual**.
# 3. **Does it fit?** A refusal happens with probability 1 − Σ min(p, q). The missing parts add up to Σ p − Σ min(p, q), the same number. It fits.
#
# C and D are drafted too often: half of them go. A and B are drafted too rarely: they are always kept, and after a refusal they are what comes instead.

# %%
p = [0.50, 0.30, 0.15, 0.05]
q = [0.40, 0.20, 0.30, 0.10]

keep = [min(1.0, a / b) for a, b in zip(p, q)]
kept = [b * k for b, k in zip(q, keep)]
missing = [max(a - b, 0.0) for a, b in zip(p, q)]
refused = 1 - sum(kept)
comes_out = [k + refused * m / sum(missing) for k, m in zip(kept, missing)]

columns = zip("ABCD", p, q, keep, kept, missing, comes_out)
show(table(["token", "p", "q", "keep", "drafted and kept", "missing", "comes out"], list(columns)))
print(f"kept: {sum(kept):.2f}, refused: {refused:.2f}, missing: {sum(missing):.2f}")

# %% [markdown]
# The last column is p again. The first answer is **0.8**, the sum of the smaller one of the two distributions at each token.
#
# The number has a name of its own. The **total variation** of two distributions, TV, is half the sum of |p − q|, and Σ min(p, q) = 1 − TV. So the chance that
# a drafted token is kept, the **acceptance** a, is
#
# $$a = 1 - \mathrm{TV}(p, q).$$
#
# No exact rule can do better: a token x cannot be drafted and kept more often than it is drafted, q(x), nor more often than it may come out, p(x).
#
# ### A row of drafted tokens
#
# Judge them from the left. While tokens are kept, the next one stands behind a text that has the right distribution, so the same argument applies again. At the first
# refusal draw from the residual and stop: the tokens behind it were drafted for another text. If all g are kept, the target's pass has
# one more distribution at hand, the one behind the last token. Draw from it: the **bonus token**.
#
# So a pass gives one token for certain, a second one if the first was kept, a third one if the first two were, and so on. If each is kept with probability a,
#
# $$E(a, g) = 1 + a + a^2 + \dots + a^g = \frac{1 - a^{g+1}}{1 - a}.$$
#
# For a = 0.8 and g = 4 that is 1 + 0.8 + 0.64 + 0.512 + 0.4096 = **3.3616**, the second answer. These are tokens per pass. They are not a speedup: drafting
# took time as well. Notebook [03](03_choosing_a_draft.ipynb) does that account.

# %% [markdown]
# ## From scratch
#
# A text needs distributions that depend on what came before. We keep the toy: after token number i, both distributions are shifted by i places. Whatever the last token was, the
# draft's distribution overlaps with the target's by 0.8.
#
# `judge` is the whole rule. `write` drafts and judges in rounds until a text is long enough.


# %%
def after(distribution, token):
    """The distribution of the next token behind `token`: the toy distributions, shifted."""
    return distribution[-token:] + distribution[:-token]


def judge(drafted, P, Q, u):
    """P: the target's distributions at each place and one behind; Q: the draft's; u: uniform numbers.

    Returns how many drafted tokens are kept, and the distribution of the target's own token behind them.
    """
    for i, x in enumerate(drafted):
        if u[i] >= P[i][x] / Q[i][x]:
            missing = [max(a - b, 0) for a, b in zip(P[i], Q[i])]
            return i, [m / sum(missing) for m in missing]
    return len(drafted), P[-1]


def write(rule, length, g, rng):
    """A text of at least `length` tokens behind token 0, and the number of passes of the target that it took."""
    text, passes = [0], 0
    while len(text) <= length:
        drafted = []
        for _ in range(g):
            drafted += rng.choices(range(4), after(q, (text + drafted)[-1]))
        before = [text[-1], *drafted]
        P = [after(p, token) for token in before]
        Q = [after(q, token) for token in before[:-1]]
        accepted, distribution = rule(drafted, P, Q, [rng.random() for _ in drafted])
        text += drafted[:accepted] + rng.choices(range(4), distribution)
        passes += 1
    return text[1:], passes


# %% [markdown]
# First the count: a long text, four drafted tokens a round.

# %%
text, passes = write(judge, 40_000, 4, random.Random(0))
print(f"{len(text)} tokens in {passes} passes: {len(text) / passes:.3f} tokens per pass, expected 3.3616")
assert abs(len(text) / passes - 3.3616) < 0.06  # four standard errors

# %% [markdown]
# Then the distribution. Write the first three tokens very often, and count each of the 4 × 4 × 4 = 64 texts. How often it should come is the product of the
# target's three distributions. Counts never fit perfectly. **Chi-square** adds up the squared differences, each in units of what chance allows, and the p-value says how often chance
# alone gives a sum as large. Below 0.001 we say: this is not the
# target's distribution. (A right rule is blamed once in a thousand tests. So the seeds are fixed here.)
#
# Beside the rule we test a broken one. It keeps tokens as it should, but after a refusal it draws from p itself. "The draft was wrong, so ask the target": it sounds
# right, and many first attempts do it.


# %%
def broken_judge(drafted, P, Q, u):
    accepted, distribution = judge(drafted, P, Q, u)
    return accepted, P[accepted]  # not the residual


def chi_square(counts, distribution):
    """counts and probabilities by outcome -> the p-value. Outcomes that are expected fewer than 5 times share a cell."""
    total = sum(counts.values())
    rare = [outcome for outcome in distribution if total * distribution[outcome] < 5]
    cells = [(counts[outcome], total * distribution[outcome]) for outcome in distribution if outcome not in rare]
    if rare:
        cells.append((sum(counts[outcome] for outcome in rare), total * sum(distribution[outcome] for outcome in rare)))
    distance = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    degrees, distance = torch.tensor([len(cells) - 1, distance], dtype=torch.float64)
    return torch.special.gammaincc(degrees / 2, distance / 2).item()


ROWS = 40_000
exact = {(x, y, z): p[x] * after(p, x)[y] * after(p, y)[z] for x, y, z in itertools.product(range(4), repeat=3)}
counts = {}
for name, rule in {"the rule": judge, "the broken rule": broken_judge}.items():
    rng = random.Random(1)
    counts[name] = Counter(tuple(write(rule, 3, 2, rng)[0][:3]) for _ in range(ROWS))
    print(f"{name:16} p-value {chi_square(counts[name], exact):.2g}")

assert chi_square(counts["the rule"], exact) > 0.001
assert chi_square(counts["the broken rule"], exact) < 1e-6

# %% [markdown]
# ## The library's call
#
# `assisted.acceptance` holds the rules as functions on tensors, a row of a batch each. The pieces of the rule are `rejection_probabilities` (how likely each token is
# to be kept), `first_failure` (how many stand before the first refusal) and `emitted_distribution` (residual or bonus). On random distributions and the same random numbers
# they say what `judge` says.

# %%
B, g, V = 500, 3, 6
P = torch.rand(B, g + 1, V, dtype=torch.float64).pow(3)
Q = torch.rand(B, g, V, dtype=torch.float64).pow(3)
P, Q = P / P.sum(-1, keepdim=True), Q / Q.sum(-1, keepdim=True)
drafted = acceptance.sample(Q)  # [B, g]: each token is drawn from its distribution
u = torch.rand(B, g, dtype=torch.float64)

lengths = torch.full([B], g)
accepted = acceptance.first_failure(acceptance.rejection_probabilities(drafted, P, Q), u, lengths)
distribution = acceptance.emitted_distribution(P, Q, torch.ones(B, g + 1, dtype=torch.float64), accepted, lengths)

for row in range(B):
    ours, our_distribution = judge(drafted[row].tolist(), P[row].tolist(), Q[row].tolist(), u[row].tolist())
    assert ours == accepted[row]
    assert torch.allclose(torch.tensor(our_distribution, dtype=torch.float64), distribution[row], atol=1e-12)
print(f"{B} rounds judged alike; kept 0, 1, 2, 3 tokens: {torch.bincount(accepted).tolist()}")

# %% [markdown]
# Draws can only fail to find an error. Adding up all cases proves there is none. For one token: draft x with probability q(x), keep it with keep(x), else draw
# from the residual. The sum is p to the last digit, for every row of the random distributions.

# %%
everyone = torch.arange(V).expand(B, V)  # each token once as the drafted one
keeps = acceptance.rejection_probabilities(everyone, P[:, :1].expand(B, V, V), Q[:, :1].expand(B, V, V))
one = torch.ones(B, dtype=torch.float64)
kept_part = Q[:, 0] * keeps
refused_part = (1 - kept_part.sum(-1, keepdim=True)) * acceptance.residual(P[:, 0], Q[:, 0], one)
error = (kept_part + refused_part - P[:, 0]).abs().sum(-1) / 2
print(f"largest total variation from p: {error.max():.1e}")
assert error.max() < 1e-12

# %% [markdown]
# `generate` does all of it with real models. For a chain that was sampled it uses **block verification**, a rule as exact as this one that judges the
# drafted tokens together and keeps at least as many on average. It has the same test to pass.
#
# So test the whole machine, models included. Sample four tokens behind a prompt many times, with only the two likeliest tokens allowed at each place. That leaves 16
# texts, and their probabilities can be computed from the target alone. (The first token comes with the reading of the prompt; two are drafted behind it.)

# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, draft_length=2)
model.to("cuda" if torch.cuda.is_available() else "cpu")
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
inputs = tokenizer("def mean(values):\n    total =", return_tensors="pt").to(model.device)

texts, probabilities = inputs.input_ids, torch.ones(1)
for _ in range(4):
    with torch.no_grad():
        logits = model.target(texts).logits[:, -1].float().cpu()
    logits[:, model.generation_config.eos_token_id] = -torch.inf
    best = logits.topk(2)
    probabilities = (probabilities[:, None] * best.values.softmax(-1)).flatten()
    texts = torch.cat([texts.repeat_interleave(2, 0), best.indices.reshape(-1, 1).to(texts.device)], 1)
target_distribution = {tuple(row[-4:]): share for row, share in zip(texts.tolist(), probabilities.tolist())}
for row, share in sorted(target_distribution.items(), key=lambda pair: -pair[1])[:5]:
    print(f"{share:.3f}  {tokenizer.decode(row)!r}")

# %%
sampling = dict(do_sample=True, temperature=1.0, top_p=1.0, top_k=2, min_new_tokens=4, max_new_tokens=4)
seen = Counter()
model.reset_totals()
for seed in range(3):
    torch.manual_seed(seed)
    output = model.generate(**inputs, **sampling, num_return_sequences=250)
    seen.update(tuple(row[-4:]) for row in output.tolist())

print(f"{sum(seen.values())} texts, p-value {chi_square(seen, target_distribution):.2g}")
print(f"{model.totals.accepted} of {model.totals.drafted} drafted tokens were kept")
assert set(seen) <= set(target_distribution) and chi_square(seen, target_distribution) > 0.001

# %% [markdown]
# Greedy decoding is the special case where p puts everything on the likeliest token: a drafted token is kept if and only if it is that one. Then the tokens themselves
# are the same. (In float32. In half precision a pass over several tokens rounds differently from a pass over one, and a near-tie can fall to the other side.)

# %%
greedy = dict(do_sample=False, max_new_tokens=40)
assisted = model.generate(**inputs, **greedy)
passes = model.report.target_passes
plain = model.generate(**inputs, **greedy, assisted=False)
if model.dtype == torch.float32:
    assert assisted.tolist() == plain.tolist()
print(f"passes of the target: {passes} with a draft, {model.report.target_passes} without")

# %% [markdown]
# ## The picture
#
# On the left the toy distributions. The green part is what both have in common: it can be kept. What the draft has above it is refused. What the target has above it is
# the residual, and it is as large as the refused part. On the right the chi-square test, text by text: how far each of the 64 counts lies from what it should be, in standard
# deviations. Chance stays in the grey band nearly always.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), width_ratios=[1, 1.25])
places = torch.arange(4)
common = [min(pair) for pair in zip(p, q)]
surplus = [b - c for b, c in zip(q, common)]
left.bar(places - 0.21, q, 0.38, color="none", edgecolor=COLOURS["draft"], linewidth=1.5)
left.bar(places + 0.21, p, 0.38, color="none", edgecolor=COLOURS["target"], linewidth=1.5)
left.bar(places - 0.21, common, 0.38, color=COLOURS["accepted"], alpha=0.45)
left.bar(places + 0.21, common, 0.38, color=COLOURS["accepted"], alpha=0.45)
left.bar(places - 0.21, surplus, 0.38, bottom=common, color=COLOURS["rejected"], alpha=0.45)
left.bar(places + 0.21, missing, 0.38, bottom=common, color=COLOURS["bonus"], alpha=0.45)
left.set_xticks(places, list("ABCD"))
left.set(title="left bar: draft, right bar: target", ylabel="probability", ylim=(0, 0.6))
labels = (("residual", "bonus", 0.45, 0.46, 0.75, 0.52), ("refused", "rejected", 1.9, 0.26, 1.95, 0.36))
for word, name, x, y, at, height in (*labels, ("kept", "accepted", 1.25, 0.17, 2.55, 0.2)):
    left.annotate(word, (x, y), (at, height), color=COLOURS[name], arrowprops=dict(arrowstyle="-", color=COLOURS[name]))

for name, colour, place in (("the broken rule", COLOURS["rejected"], 0.93), ("the rule", COLOURS["accepted"], 0.03)):
    spread = [(counts[name][t] - ROWS * exact[t]) / (ROWS * exact[t] * (1 - exact[t])) ** 0.5 for t in exact]
    right.plot(spread, "o", markersize=4, color=colour)
    words = f"{name}: p-value {chi_square(counts[name], exact):.1g}"
    right.text(0.03, place, words, color=colour, transform=right.transAxes)
right.axhspan(-3, 3, color=COLOURS["plain"], alpha=0.2, linewidth=0)
right.set(title="64 texts of three tokens", xlabel="text, AAA to DDD", ylabel="standard deviations off", ylim=(-16, 16))
plt.show()

# %% [markdown]
# What this cannot show: an error that is small enough hides in the noise of any number of draws. That is why the library's tests add up all cases, as above, and why
# they must also find planted mistakes.
#
# ## When it loses
#
# **Exactness does not make it fast.** A bad draft is as exact as a good one, it only gets refused. At a = 0.3, four drafted tokens give E(0.3, 4) = 1.43 tokens per
# pass. The work on the refused ones is lost.
#
# **Exactness has a condition**: `q` must be the distribution that the token was really drawn from. Here is a rule that looks like a harmless saving: if the drawn token
# has a low q, do not propose it, and let the target write that token itself.

# %%
distribution = [0.0] * 4
for x in range(4):
    if q[x] < 0.25:  # drawn, but not proposed: the target draws from p
        distribution = [have + q[x] * share for have, share in zip(distribution, p)]
    else:
        own = [m / sum(missing) for m in missing]
        distribution = [have + q[x] * (1 - keep[x]) * share for have, share in zip(distribution, own)]
        distribution[x] += q[x] * keep[x]

show(table(["token", "p", "comes out"], list(zip("ABCD", p, distribution))))
print(f"total variation {sum(abs(a - b) for a, b in zip(p, distribution)) / 2:.3f}")

# %% [markdown]
# A and C come out too often. Tokens that are proposed no longer follow q, since B and D were taken out by their own value. Stopping *before* the draw, because q as
# a whole is flat, is exact: that decision does not look at the token. The principle is called non-anticipation, and every rule for the length of a draft in this package
# obeys it (notebook [06](06_adaptive_length.ipynb)).
#
# ## Takeaway
#
# > Keep a drafted token x with probability min(1, p(x)/q(x)). After a refusal draw from max(p − q, 0), normalised, and stop. If all are kept, draw one more from p.
# > What comes out has the target's distribution whatever the draft is. The draft decides only how many tokens a pass gives: a = 1 − TV(p, q), and (1 − a^(g+1))/(1 − a) of them if
# > acceptance is the same everywhere.

# %% [markdown]
# ## Exercises
#
# ### 1. Acceptance from two distributions
#
# Write `acceptance_of(p, q)`: the probability that a token drawn from q is kept, as 1 − TV(p, q). p and q are lists.


# %% tags=["check"]
def check_1(candidate):
    rng = random.Random(3)
    assert candidate([1.0, 0.0], [0.0, 1.0]) == 0, "Distributions with no token in common: nothing can be kept."
    for _ in range(20):
        a, b = [rng.random() for _ in range(5)], [rng.random() for _ in range(5)]
        a, b = [x / sum(a) for x in a], [x / sum(b) for x in b]
        found = sum(y * min(1, x / y) for x, y in zip(a, b))
        wrong = f"For one pair of distributions q(x) keep(x) adds up to {found:.4f}, not {candidate(a, b):.4f}."
        assert abs(candidate(a, b) - found) < 1e-9, wrong


# %% tags=["exercise"]
def acceptance_of(p, q):
    raise NotImplementedError


attempt(check_1, acceptance_of)


# %% tags=["answer"]
def total_variation_answer(p, q):
    return 1 - sum(abs(a - b) for a, b in zip(p, q)) / 2


attempt(check_1, total_variation_answer)

# %% [markdown]
# ### 2. Fix a planted bug
#
# This draft does not draw. It always proposes its likeliest token. The function returns how likely that token is to be kept, and the distribution after a refusal. It contains a bug that is
# common in practice: with it, the toy distributions give A, and nothing else, for ever. Find out what q is for a draft like this, and mend the function.


# %% tags=["check"]
def check_2(candidate):
    rng = random.Random(4)
    for trial in range(20):
        a, b = [rng.random() for _ in range(4)], [rng.random() for _ in range(4)]
        a, b = ([x / sum(a) for x in a], [x / sum(b) for x in b]) if trial else (p, q)
        x, keep_x, distribution = candidate(a, b)
        assert x == b.index(max(b)), "The draft must go on proposing its likeliest token."
        out = [keep_x * (y == x) + (1 - keep_x) * share for y, share in enumerate(distribution)]
        off = sum(abs(u - v) for u, v in zip(out, a)) / 2
        assert off < 1e-9, f"What comes out differs from p by a total variation of {off:.2f}."
        assert keep_x > a[x] - 1e-9, "Exact, but the token could be kept more often."


# %% tags=["exercise"]
def judge_likeliest(p, q):
    x = q.index(max(q))
    keep = min(1, p[x] / q[x])
    missing = [max(a - b, 0) for a, b in zip(p, q)]
    return x, keep, [m / sum(missing) for m in missing]


attempt(check_2, judge_likeliest)

# %% [markdown] tags=["answer"]
# The token was not drawn from q. It comes with certainty, so the distribution it was drawn from has probability 1 at x and 0 elsewhere. Then the token is kept with
# probability p(x)/1, and the residual is p without x.


# %% tags=["answer"]
def judge_likeliest_answer(p, q):
    x = q.index(max(q))
    certain = [float(y == x) for y in range(len(q))]
    keep = min(1, p[x] / certain[x])
    missing = [max(a - b, 0) for a, b in zip(p, certain)]
    return x, keep, [m / sum(missing) for m in missing]


attempt(check_2, judge_likeliest_answer)

# %% [markdown]
# ### 3. Tokens per pass
#
# Write `expected_tokens(a, g)`, so that E(0.8, 4) = 3.3616. Mind a = 1.


# %% tags=["check"]
def check_3(candidate):
    assert abs(candidate(0.8, 4) - 3.3616) < 1e-9, f"E(0.8, 4) is 3.3616, not {candidate(0.8, 4)}."
    assert candidate(0.8, 0) == 1, "Without a draft a pass gives one token."
    assert abs(candidate(0.0, 4) - 1) < 1e-12, "If nothing is kept a pass still gives one token."
    assert candidate(1.0, 4) == 5, "If everything is kept a pass gives g + 1 tokens."
    text, passes = write(judge, 20_000, 2, random.Random(5))
    assert abs(candidate(0.8, 2) - len(text) / passes) < 0.06, "It differs from the toy's own count at g = 2."


# %% tags=["exercise"]
def expected_tokens(a, g):
    raise NotImplementedError


attempt(check_3, expected_tokens)


# %% tags=["answer"]
def expected_tokens_answer(a, g):
    return sum(a**i for i in range(g + 1))


attempt(check_3, expected_tokens_answer)

# %% [markdown]
# ## References
#
# - Leviathan, Kalman, Matias. Fast inference from transformers via speculative decoding. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - Chen and others. Accelerating large language model decoding with speculative sampling. [arXiv 2302.01318](https://arxiv.org/abs/2302.01318)
# - Sun and others. Block verification accelerates speculative decoding. [arXiv 2403.10444](https://arxiv.org/abs/2403.10444)
#
# Next: notebook [03](03_choosing_a_draft.ipynb), choosing a draft.
