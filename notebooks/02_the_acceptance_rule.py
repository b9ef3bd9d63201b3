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
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import itertools
import random
import sys
from collections import Counter

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer

from assisted import AssistedModelForCausalLM, acceptance, zoo

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# Notebook [01](01_why_decoding_is_slow.ipynb) found spare capacity. A forward pass over five tokens costs little more
# than a pass over one. If a **draft**, a small model for example, guesses the next four tokens, then the **target**, the
# model whose output we want, can check all of them in one pass.
#
# Some guesses are wrong. The **acceptance rule** decides which drafted tokens to accept. Every draft of this course
# relies on it, so its promise has to be strict. The output text must have *exactly* the
# distribution that the target alone would give it. Then nobody has to ask whether the answers got worse.
#
# This notebook uses two letters. **p** is the target's distribution of the next token, and **q** is the draft's. Each of
# them gives a probability to every token of the vocabulary.
#
# ## Your prediction
#
# Here is a vocabulary of four tokens, with the two distributions at one position in the text:
#
# | token | A | B | C | D |
# |---|---|---|---|---|
# | target, p | 0.50 | 0.30 | 0.15 | 0.05 |
# | draft, q | 0.40 | 0.20 | 0.30 | 0.10 |
#
# The draft samples a token from q. The output must follow p. Write down two numbers before you go on.
#
# 1. How often, at best, can the token be accepted?
# 2. Now four tokens are drafted in a row, each under these conditions. How many tokens does one forward pass of the
#    target yield on average?

# %%
prediction = {
    "accepted, of 100 drafted tokens": None,
    "tokens per pass, four drafted": None,
}

# %% [markdown]
# ## By hand: the only rule that gives p
#
# Suppose that the rule accepts a drafted token x with probability accept(x). If it rejects the token, it samples
# another one from some distribution r. Then a token x can be output in two ways:
#
# $$\underbrace{q(x)\,\text{accept}(x)}_{\text{drafted and accepted}} \;+\; \underbrace{P(\text{rejected})\; r(x)}_{\text{sampled after a rejection}} \;=\; p(x)$$
#
# We require that the sum is p(x). Everything else follows from this.
#
# 1. **How much can be accepted?** The first term alone must not exceed p(x), so accept(x) is at most p(x)/q(x). It is a
#    probability, so it is at most 1. The largest value that is allowed is **accept(x) = min(1, p(x)/q(x))**. Then the
#    first term is min(p(x), q(x)).
# 2. **Which part is missing?** The second term has to supply p(x) − min(p(x), q(x)), which is max(p(x) − q(x), 0). This
#    leaves no choice. r is this expression, divided by its sum. It is called the **residual**.
# 3. **Do the sums agree?** A rejection happens with probability 1 − Σ min(p, q). The missing parts add up to Σ p − Σ
#    min(p, q), which is the same number. They agree.
#
# C and D are drafted too often, so half of them are rejected. A and B are drafted too rarely. They are always accepted,
# and after a rejection one of them is sampled.

# %%
p = [0.50, 0.30, 0.15, 0.05]
q = [0.40, 0.20, 0.30, 0.10]

accept = [min(1.0, a / b) for a, b in zip(p, q)]
accepted_part = [b * k for b, k in zip(q, accept)]
missing = [max(a - b, 0.0) for a, b in zip(p, q)]
rejected = 1 - sum(accepted_part)
output_p = [k + rejected * m / sum(missing) for k, m in zip(accepted_part, missing)]

columns = zip("ABCD", p, q, accept, accepted_part, missing, output_p)
show(table(["token", "p", "q", "accept", "drafted and accepted", "missing", "output"], list(columns)))
print(f"accepted: {sum(accepted_part):.2f}, rejected: {rejected:.2f}, missing: {sum(missing):.2f}")

# %% [markdown]
# The last column is p again. So the first answer is **0.8**, the sum of the smaller of the two probabilities over all
# tokens.
#
# This number is related to a well-known distance. The **total variation** of two distributions, TV, is half the sum of
# |p − q|, and Σ min(p, q) = 1 − TV. The probability a that a drafted token is accepted is called the **acceptance
# rate** of the draft. It is
#
# $$a = 1 - \mathrm{TV}(p, q).$$
#
# No exact rule can do better. A token x cannot be drafted and accepted more often than it is drafted, q(x), nor more
# often than it may be output, p(x).
#
# ### Several drafted tokens in a row
#
# Check them from left to right. While tokens are accepted, the text before the next token has the right distribution,
# so the same argument applies again. At the first rejection, sample from the residual and stop. The tokens after it
# were drafted for another text. If all g tokens are accepted, the target's forward pass has computed one more
# distribution, the one after the last drafted token. Sample from it. This token is called the **bonus token**.
#
# So a forward pass yields one token for certain, a second one if the first was accepted, a third one if the first two
# were accepted, and so on. If each is accepted with probability a,
#
# $$E(a, g) = 1 + a + a^2 + \dots + a^g = \frac{1 - a^{g+1}}{1 - a}.$$
#
# For a = 0.8 and g = 4 this is 1 + 0.8 + 0.64 + 0.512 + 0.4096 = **3.3616**, the second answer. These are tokens per
# pass. They are not a speedup, because drafting takes time as well. Notebook [03](03_choosing_a_draft.ipynb) takes this
# time into account.

# %%
compare(prediction, dict(zip(prediction, (100 * sum(accepted_part), sum(0.8**i for i in range(5))))))

# %% [markdown]
# ## From scratch: the rule in a few lines
#
# A text needs distributions that depend on the tokens before. We keep the toy example. After token number i, both
# distributions are shifted by i positions. Whatever the last token was, the two distributions overlap by 0.8.
#
# `judge` is the whole rule. `write` works in **rounds** until the text is long enough. A round is one draft-verify
# step. It drafts g tokens and then checks them with one pass of the target.


# %%
def after(distribution, token):
    """The distribution of the token after `token`: the toy distribution, shifted."""
    return distribution[-token:] + distribution[:-token]


def judge(drafted, P, Q, u):
    """P: the target's distributions at each drafted position and one more; Q: the draft's; u: uniform numbers.

    Returns the number of accepted tokens, and the distribution of the target's own token after them.
    """
    for i, x in enumerate(drafted):
        if u[i] >= P[i][x] / Q[i][x]:
            missing = [max(a - b, 0) for a, b in zip(P[i], Q[i])]
            return i, [m / sum(missing) for m in missing]
    return len(drafted), P[-1]


def write(rule, length, g, rng):
    """Returns a text of at least `length` tokens after token 0, and the number of target passes it took."""
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
# First we count the passes, on a long text with four drafted tokens in each round.

# %%
text, passes = write(judge, 40_000, 4, random.Random(0))
a = sum(accepted_part)
expected = 1 + a + a**2 + a**3 + a**4
print(f"{len(text)} tokens in {passes} passes: {len(text) / passes:.3f} tokens per pass, expected {expected:.4f}")
assert abs(len(text) / passes - expected) < 0.06  # four standard errors

# %% [markdown]
# Then we check the distribution. We write the first three tokens very often, and count each of the 4 × 4 × 4 = 64
# possible texts. The probability of a text is the product of three probabilities of the target. Counts never fit
# perfectly. The **chi-square test** adds up the squared differences, each in units of its variance. The p-value
# is the probability that chance alone gives a sum at least as large. If it is below 0.001, we conclude that the text
# does not have the target's distribution. (A correct rule fails one test in a thousand, so the seeds are fixed here.)
#
# We also test a broken rule. It accepts tokens correctly, but after a rejection it samples from p itself. "The draft
# was wrong, so ask the target" sounds right, and many first attempts do it.


# %%
def broken_judge(drafted, P, Q, u):
    accepted, distribution = judge(drafted, P, Q, u)
    return accepted, P[accepted]  # not the residual


def chi_square(counts, distribution):
    """The p-value of counts, given probabilities by outcome. Outcomes expected fewer than 5 times share a cell."""
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

# %% [markdown]
# ## The library's call: the same rule over whole drafts
#
# `assisted.acceptance` contains the rules as functions on batched tensors. The rule has three parts.
# `rejection_probabilities` computes how likely each token is to be accepted under rejection sampling. `first_failure`
# counts the tokens before the first rejection. `emitted_distribution` gives the residual, or the distribution of the
# bonus token. On random distributions and with the same random numbers, they give the same results as `judge`.

# %%
B, g, V = 500, 3, 6
P = torch.rand(B, g + 1, V, dtype=torch.float64).pow(3)
Q = torch.rand(B, g, V, dtype=torch.float64).pow(3)
P, Q = P / P.sum(-1, keepdim=True), Q / Q.sum(-1, keepdim=True)
drafted = acceptance.sample(Q)  # [B, g]: each token is sampled from its distribution
u = torch.rand(B, g, dtype=torch.float64)

lengths = torch.full([B], g)
accepted = acceptance.first_failure(acceptance.rejection_probabilities(drafted, P, Q), u, lengths)
distribution = acceptance.emitted_distribution(P, Q, torch.ones(B, g + 1, dtype=torch.float64), accepted, lengths)

for row in range(B):
    ours, our_distribution = judge(drafted[row].tolist(), P[row].tolist(), Q[row].tolist(), u[row].tolist())
    assert ours == accepted[row]
    assert torch.allclose(torch.tensor(our_distribution, dtype=torch.float64), distribution[row], atol=1e-12)
print(f"{B} rounds with equal results. Rounds that accept 0, 1, 2, 3 tokens: {torch.bincount(accepted).tolist()}")

# %% [markdown]
# Sampling can only fail to find an error. Adding up all cases proves that there is none. For one token, x is sampled with
# probability q(x), accepted with accept(x), and otherwise replaced by a sample from the residual. The sum is p up to
# rounding, for every row of the random distributions.

# %%
every_token = torch.arange(V).expand(B, V)  # every token is the drafted one once
accept_each = acceptance.rejection_probabilities(every_token, P[:, :1].expand(B, V, V), Q[:, :1].expand(B, V, V))
one = torch.ones(B, dtype=torch.float64)
accepted_share = Q[:, 0] * accept_each
rejected_share = (1 - accepted_share.sum(-1, keepdim=True)) * acceptance.residual(P[:, 0], Q[:, 0], one)
error = (accepted_share + rejected_share - P[:, 0]).abs().sum(-1) / 2
print(f"largest total variation between output and p: {error.max():.1e}")
assert error.max() < 1e-12

# %% [markdown]
# `generate` does all of this with real models. For a sampled chain of tokens it uses **block verification**. This rule
# is also exact. It judges the drafted tokens together and accepts at least as many on average. It has to pass the same
# test.
#
# So we test the whole system, models included. We sample four tokens after a prompt many times, and allow only the two
# most probable tokens at each position. This leaves 16 texts, and their probabilities can be computed from the target
# alone. (The forward pass over the prompt yields the first token. Two tokens are drafted after it.)

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
print(f"{model.totals.accepted} of {model.totals.drafted} drafted tokens were accepted")
assert set(seen) <= set(target_distribution) and chi_square(seen, target_distribution) > 0.001

# %% [markdown]
# Greedy decoding is the special case in which p puts all probability on the top-1 token. A drafted token is accepted if
# and only if it is the top-1 token. So the output has the same tokens. (This holds in float32. In half precision, a
# pass over several tokens rounds differently from a pass over one, and a near-tie can change the token.)

# %%
greedy = dict(do_sample=False, max_new_tokens=40)
assisted = model.generate(**inputs, **greedy)
passes = model.report.target_passes
baseline = model.generate(**inputs, **greedy, assisted=False)
if model.dtype == torch.float32:
    assert assisted.tolist() == baseline.tolist()
print(f"target passes: {passes} with a draft, {model.report.target_passes} without")

# %% [markdown]
# ## The picture: what is accepted and what is replaced
#
# The first panel shows the toy distributions. The green part is common to both, and it can be accepted. The part of the
# draft above it is rejected. The part of the target above it is the residual, which is as large as the rejected part.
#
# The second panel shows the chi-square test text by text. Each point is the difference between one of the 64 counts and
# its expected value, in standard deviations. Chance nearly always stays within the grey band.

# %% tags=["folded"]
figure, (left, right) = plt.subplots(2, 1, figsize=(4.7, 6.6))
positions = torch.arange(4)
common = [min(pair) for pair in zip(p, q)]
surplus = [b - c for b, c in zip(q, common)]
left.bar(positions - 0.21, q, 0.38, color="none", edgecolor=COLOURS["draft"], linewidth=1.5)
left.bar(positions + 0.21, p, 0.38, color="none", edgecolor=COLOURS["target"], linewidth=1.5)
left.bar(positions - 0.21, common, 0.38, color=COLOURS["accepted"], alpha=0.45)
left.bar(positions + 0.21, common, 0.38, color=COLOURS["accepted"], alpha=0.45)
left.bar(positions - 0.21, surplus, 0.38, bottom=common, color=COLOURS["rejected"], alpha=0.45)
left.bar(positions + 0.21, missing, 0.38, bottom=common, color=COLOURS["bonus"], alpha=0.45)
left.set_xticks(positions, list("ABCD"))
left.set(title="Left bar: draft, right bar: target", ylabel="probability", ylim=(0, 0.6))
labels = (("residual", "bonus", 0.45, 0.46, 0.75, 0.52), ("rejected", "rejected", 1.9, 0.26, 1.95, 0.36))
for word, name, x, y, at, height in (*labels, ("accepted", "accepted", 1.25, 0.17, 2.45, 0.2)):
    left.annotate(word, (x, y), (at, height), color=COLOURS[name], arrowprops=dict(arrowstyle="-", color=COLOURS[name]))

for name, colour, place in (("the broken rule", COLOURS["rejected"], 0.93), ("the rule", COLOURS["accepted"], 0.03)):
    spread = [(counts[name][t] - ROWS * exact[t]) / (ROWS * exact[t] * (1 - exact[t])) ** 0.5 for t in exact]
    right.plot(spread, "o", markersize=4, color=colour)
    words = f"{name}: p-value {chi_square(counts[name], exact):.1g}"
    right.text(0.03, place, words, color=colour, transform=right.transAxes)
right.axhspan(-3, 3, color=COLOURS["plain"], alpha=0.2, linewidth=0)
right.set(
    title="64 texts of three tokens",
    xlabel="text, AAA to DDD",
    ylabel="difference in standard deviations",
    ylim=(-16, 16),
)
plt.show()

# %% [markdown]
# This test cannot show everything. An error that is small enough hides in the noise of any number of samples. That is
# why the library's tests add up all cases, as above. They must also detect errors that were planted on purpose.
#
# ## When it loses: bad drafts, and a rule that is wrong
#
# **Exactness does not make decoding fast.** A bad draft is as exact as a good one, but more of its tokens are rejected.
# At a = 0.3, four drafted tokens give E(0.3, 4) = 1.43 tokens per pass. The work on the rejected tokens is lost.
#
# **Exactness has a condition.** `q` must be the distribution that the token was really sampled from. The following rule
# looks like a harmless saving. If the sampled token has a low q, the draft does not propose it, and the target writes
# this token itself.

# %%
distribution = [0.0] * 4
for x in range(4):
    if q[x] < 0.25:  # sampled, but not proposed: the target samples from p
        distribution = [have + q[x] * share for have, share in zip(distribution, p)]
    else:
        own = [m / sum(missing) for m in missing]
        distribution = [have + q[x] * (1 - accept[x]) * share for have, share in zip(distribution, own)]
        distribution[x] += q[x] * accept[x]

show(table(["token", "p", "output"], list(zip("ABCD", p, distribution))))
print(f"total variation: {sum(abs(a - b) for a, b in zip(p, distribution)) / 2:.3f}")

# %% [markdown]
# A and C are output too often. The proposed tokens no longer follow q, because the decision to leave out B and D looked
# at the sampled token. A rule may also look at q as a whole and stop *before* sampling, for example because q is flat.
# That is exact. The principle is called **non-anticipation**. Every rule for the draft length in this package follows it
# (notebook [06](06_adaptive_length.ipynb)).
#
# ## Takeaway
#
# > Accept a drafted token x with probability min(1, p(x)/q(x)). After a rejection, sample from max(p − q, 0),
# > normalized, and stop. If all tokens are accepted, sample one more from p. The output has the target's distribution,
# > whatever the draft is. The draft only determines how many tokens a forward pass yields. A token is accepted with
# > probability a = 1 − TV(p, q). A pass yields (1 − a^(g+1))/(1 − a) tokens if a is the same everywhere.

# %% [markdown]
# ## Exercises
#
# ### 1. Acceptance rate from two distributions
#
# Write `acceptance_of(p, q)`. It returns the probability that a token sampled from q is accepted, computed as 1 − TV(p,
# q). p and q are lists.


# %% tags=["check"]
def check_1(candidate, p=p, q=q, seed=3):
    rng = random.Random(seed)
    assert candidate([1.0, 0.0], [0.0, 1.0]) == 0, (
        "The distributions have no token in common, so nothing can be accepted."
    )
    pairs = [([rng.random() for _ in range(5)], [rng.random() for _ in range(5)]) for _ in range(20)]
    for a, b in [(p, q), *pairs]:
        a, b = [x / sum(a) for x in a], [x / sum(b) for x in b]
        found = sum(y * min(1, x / y) for x, y in zip(a, b))
        wrong = f"For one pair of distributions, q(x) accept(x) adds up to {found:.4f}, not {candidate(a, b):.4f}."
        assert abs(candidate(a, b) - found) < 1e-9, wrong


# %% tags=["exercise"]
def acceptance_of(p, q):
    raise NotImplementedError


attempt(check_1, acceptance_of)


# %% tags=["answer"]
def acceptance_of_answer(p, q):
    return 1 - sum(abs(a - b) for a, b in zip(p, q)) / 2


attempt(check_1, acceptance_of_answer)

# %% [markdown]
# ### 2. Fix a planted bug
#
# This draft does not sample. It always proposes its top-1 token. The function returns the token, the probability that
# it is accepted, and the distribution after a rejection. It contains a bug that is common in practice. With it, the toy
# distributions always give A and nothing else. Find out what q is for such a draft, and fix the function.


# %% tags=["check"]
def check_2(candidate, p=p, q=q, seed=4):
    rng = random.Random(seed)
    for trial in range(20):
        a, b = [rng.random() for _ in range(4)], [rng.random() for _ in range(4)]
        a, b = ([x / sum(a) for x in a], [x / sum(b) for x in b]) if trial else (p, q)
        x, accept_x, distribution = candidate(a, b)
        assert x == b.index(max(b)), "The draft must still propose its top-1 token."
        out = [accept_x * (y == x) + (1 - accept_x) * share for y, share in enumerate(distribution)]
        off = sum(abs(u - v) for u, v in zip(out, a)) / 2
        assert off < 1e-9, f"The output differs from p by a total variation of {off:.2f}."
        assert accept_x > a[x] - 1e-9, "The rule is exact, but it could accept the token more often."


# %% tags=["exercise"]
def judge_top1(p, q):
    x = q.index(max(q))
    accept = min(1, p[x] / q[x])
    missing = [max(a - b, 0) for a, b in zip(p, q)]
    return x, accept, [m / sum(missing) for m in missing]


attempt(check_2, judge_top1)

# %% [markdown] tags=["answer"]
# The token was not sampled from q. It was certain, so the distribution it came from has probability 1 at x and 0
# elsewhere. With this distribution, the token is accepted with probability p(x)/1, and the residual is p without x.


# %% tags=["answer"]
def judge_top1_answer(p, q):
    x = q.index(max(q))
    certain = [float(y == x) for y in range(len(q))]
    accept = min(1, p[x] / certain[x])
    missing = [max(a - b, 0) for a, b in zip(p, certain)]
    return x, accept, [m / sum(missing) for m in missing]


attempt(check_2, judge_top1_answer)

# %% [markdown]
# ### 3. Tokens per pass
#
# Write `expected_tokens(a, g)`, so that E(0.8, 4) = 3.3616. Make sure that it works for a = 1.


# %% tags=["check"]
def check_3(candidate, a=0.8, g=4, seed=5):
    assert abs(candidate(0.8, 4) - 3.3616) < 1e-9, f"E(0.8, 4) is 3.3616, not {candidate(0.8, 4)}."
    assert candidate(a, 0) == 1, "Without a draft, a pass yields one token."
    assert abs(candidate(0.0, g) - 1) < 1e-12, "If nothing is accepted, a pass still yields one token."
    assert candidate(1.0, g) == g + 1, "If everything is accepted, a pass yields g + 1 tokens."
    chances = [a**n * (1 - a) for n in range(g)] + [a**g]  # of accepting 0, 1, ..., g tokens
    mean = sum((n + 1) * chance for n, chance in enumerate(chances))
    assert abs(candidate(a, g) - mean) < 1e-9, f"E({a}, {g}) is {mean:.4f}, not {candidate(a, g):.4f}."
    overlap = sum(min(pair) for pair in zip(p, q))
    text, passes = write(judge, 20_000, 2, random.Random(seed))
    found = candidate(overlap, 2)
    assert abs(found - len(text) / passes) < 0.08, "It differs from the count in the toy example at g = 2."


# %% tags=["exercise"]
def expected_tokens(a, g):
    raise NotImplementedError


attempt(check_3, expected_tokens)


# %% tags=["answer"]
def expected_tokens_answer(a, g):
    return sum(a**i for i in range(g + 1))


attempt(check_3, expected_tokens_answer)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you try.
#
# - **Two tries.** The draft samples two tokens for the same position, and the rule may accept either of them. How often,
#   at best, can one be accepted with p and q as above? Invent a rule and test it with `chi_square`.
# - **A small error.** A rule uses the broken rule in one round out of a hundred. How many texts does the test need to
#   notice it? What would you do instead of counting more texts?

# %% [markdown]
# ## References
#
# - Leviathan, Kalman, Matias. Fast inference from transformers via speculative decoding. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - Chen and others. Accelerating large language model decoding with speculative sampling. [arXiv 2302.01318](https://arxiv.org/abs/2302.01318)
# - Sun and others. Block verification accelerates speculative decoding. [arXiv 2403.10444](https://arxiv.org/abs/2403.10444)
#
# Next, notebook [03](03_choosing_a_draft.ipynb). With this rule every draft is exact, so the choice is about speed only.
# Which draft is fastest?
