# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06. Adaptive length
#
# **When should drafting stop?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebook
# [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import logging
import sys

logging.disable(logging.WARNING)  # quantization backends log messages on import
import itertools
import math
import random
from collections import Counter

import matplotlib.pyplot as plt
import torch
from transformers.utils import logging as transformers_logging

from assisted import AssistedModelForCausalLM
from assisted.core.drafts import Round
from assisted.lengths import Confidence, Fixed, Length
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, DRAFT, DEVICE = "zoo:target", "zoo:draft", "cpu"
# On a GPU of 12-24 GB try a real pair (about 9.5 GB in bfloat16):
# TARGET, DRAFT, DEVICE = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "cuda"
# In half precision near-ties may be resolved differently, and an assert that compares counts may then fail.

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# So far a draft had a fixed length. But text is uneven, as the picture of notebook [05](05_early_exit.ipynb) shows. Closing
# brackets and repeated names are easy to guess, and a long draft is accepted there. Before a new name or a new idea, even
# the first token is wrong, and every token after it is wasted.
#
# The draft's own probabilities contain some information about this. A rule can look at them and stop drafting. Which rule
# is best, and how much can it gain? The library's default is such a rule, and it also runs in notebook
# [14](14_capstone.ipynb).

# %% [markdown]
# ## Your prediction
#
# The shipped target samples some texts, and the shipped draft model reads them. A drafted token costs 0.3 target forward
# passes. Write down three numbers before you read on.
#
# 1. In how many of 100 positions do both models have the same top-1 token?
# 2. The best fixed draft length on these texts.
# 3. The speedup of the best rule that may look at the draft's probabilities.

# %%
prediction = {
    "positions of 100 with the same top-1 token": None,
    "best fixed length": None,
    "speedup of the best rule": None,
}

# %% [markdown]
# ## By hand: when the next token costs more than it yields
#
# We measure time in target passes over one token. A forward pass of the draft takes $t_d$. One more position in the
# target's pass takes $t_v$. Suppose that recently $\rho = 1.5$ tokens were output per unit of time. Then a token is
# worth $1/\rho = 0.67$ units, because it would take this time to get the token later.
#
# Let $a$ be the probability that the next drafted token is accepted if all tokens before it were accepted. Let $S$ be
# the product of these probabilities so far, the **survival probability**. One more drafted token yields $S a$ tokens on
# average. So draft it if
#
# $$\frac{S\,a}{\rho} > t_d + t_v.$$
#
# In this toy example, the next tokens of the draft would be accepted with probabilities 0.95, 0.90, 0.60 and 0.30. With
# $t_d = 0.3$ and $t_v = 0.02$, the price of a token is 0.32:
#
# | token | $a$ | $S a$ | value $S a / \rho$ | price | draft it? |
# |---|---|---|---|---|---|
# | 1 | 0.95 | 0.95 | 0.63 | 0.32 | yes |
# | 2 | 0.90 | 0.86 | 0.57 | 0.32 | yes |
# | 3 | 0.60 | 0.51 | 0.34 | 0.32 | yes, barely |
# | 4 | 0.30 | 0.15 | 0.10 | 0.32 | no |
#
# At a price of 0.65, not even the first token is worthwhile, so we decode without a draft. At a price of 0.06, the fourth
# token is drafted as well.

# %%
TOY = [0.95, 0.90, 0.60, 0.30]


def by_hand(chances, rho, price):
    """The number of tokens to draft."""
    survival = 1.0
    for drafted, a in enumerate(chances):
        survival *= a
        if survival / rho <= price:
            return drafted
    return len(chances)


print({price: by_hand(TOY, rho=1.5, price=price) for price in (0.06, 0.32, 0.65)})
assert [by_hand(TOY, 1.5, price) for price in (0.06, 0.32, 0.65)] == [4, 3, 0]

# %% [markdown]
# This is more than a rule of thumb. A round is one draft-verify step. Over many rounds, the rate is highest exactly when
# each round continues as long as the next token earns at least that rate. Exercise 1 derives this result, which is called
# *renewal-reward*.

# %% [markdown]
# ## From scratch: a rule that looks at confidence
#
# First we measure the two models. The target samples a text, and the draft reads it. At each position we note the draft's
# **confidence**, the probability of its top-1 token, and whether the target's top-1 token is the same.

# %%
PROMPTS = [
    "def mean(values):\n",
    "class Stack:\n    def push(self, item):\n",
    "for line in open(path):\n    ",
    "import os\n\ndef list_files(folder):\n",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "def read_config(path, default=None):\n    if not",
    "class Node:\n    def __init__(self, value):\n",
]
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, device_map=DEVICE)
tokenizer = model.tokenizer


@torch.no_grad()
def measured(prompt, new_tokens=112):
    """The new tokens; and for each of them the draft's confidence, and whether the top-1 tokens agree."""
    inputs = tokenizer(prompt, return_tensors="pt").to(DEVICE)
    counts = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    out = model.generate(**inputs, **counts, do_sample=True, temperature=1.0, top_k=0, assisted=False)
    start = inputs.input_ids.shape[1]
    p, q = (one(out).logits[0, start - 1 : -1].float() for one in (model.target, model.drafter.model))
    return out[0, start:].tolist(), list(zip(q.softmax(-1).amax(-1).tolist(), (p.argmax(-1) == q.argmax(-1)).tolist()))


texts = [measured(prompt) for prompt in PROMPTS]
WORDS = [word for _, words in texts for word in words]
agreed = sum(agrees for _, agrees in WORDS)
print(f"The top-1 tokens agree at {agreed} of {len(WORDS)} positions.")

# %% [markdown]
# Next we need a clock that nothing can disturb. The simulated clock adds up given costs, and a drafted token is accepted
# where the top-1 tokens agree. (After a wrong token, it still takes the confidences on the target's text. A real draft
# reads its own.) A rule has the library's four methods, so the library's own rules run here as well:
#
# - `budget` returns the maximum length of this round, or 0 to skip drafting;
# - `go_on` decides after the draft's forward pass whether to propose a token;
# - `run_again` decides whether to run the draft once more;
# - `observe` receives the result of the round.


# %%
def simulate(policy, words, draft, verify=0.02):
    """Speedup, drafted and accepted tokens. draft, verify: costs of a draft pass and of one more verified position."""
    rule, at, time, drafted_all, accepted_all = policy.start(None), 0, 0.0, 0, 0
    end = len(words) - 32
    while at < end:
        budget, drafted, forwards = rule.budget([0]), 0, 0
        while drafted < budget:
            forwards += 1
            if rule.needs_q and not bool(rule.go_on(drafted, distribution(words[at + drafted][0]))[0]):
                break
            drafted += 1
            if drafted == budget or not rule.run_again(drafted):
                break
        agreed = [agrees for _, agrees in words[at : at + drafted]]
        accepted = agreed.index(False) if False in agreed else drafted
        spent = forwards * draft, 1 + verify * drafted
        rule.observe(Round.counted([(drafted, accepted, accepted + 1)], *spent))
        at, time = at + accepted + 1, time + sum(spent)
        drafted_all, accepted_all = drafted_all + drafted, accepted_all + accepted
    return at / time, drafted_all, accepted_all


def distribution(confidence):
    """A distribution [1, 99] with this value as its largest probability."""
    return torch.tensor([[confidence] + [(1 - confidence) / 98] * 98])


# %% [markdown]
# The rule of the table takes the confidence for $a$ and decides twice. *Before* a forward pass of the draft, the next
# confidence is unknown, so the rule uses the last one. *After* it, the rule compares the token's value with the cost of one
# more position only.


# %%
class Renewal(Length):
    """Draft while the next token earns at least the average rate."""

    needs_q = True

    def __init__(self, draft, verify=0.02, maximum=16):
        self.draft, self.verify, self.maximum = draft, verify, maximum
        self.tokens = self.time = 20.0  # recent sums; they start at the baseline's rate
        self.survival, self.last = 1.0, 1.0  # the product of the confidences in this round, and the last one

    def start(self, earlier=None):
        return Renewal(self.draft, self.verify, self.maximum)

    def value(self, chance):
        """The value of a token with this probability, in units of time."""
        return chance * min(1.0, self.time / self.tokens)  # a token never costs more than a target pass

    def budget(self, unfinished):
        self.survival = 1.0
        return self.maximum

    def go_on(self, position, q, drawn=False):
        self.last = float(q.max())
        self.survival *= self.last
        return torch.tensor([self.value(self.survival) > self.verify])

    def run_again(self, position):
        return self.value(self.survival * self.last) > self.draft + self.verify

    def observe(self, round):
        self.tokens = 0.99 * self.tokens + round.kept[0]
        self.time = 0.99 * self.time + round.draft_seconds + round.verify_seconds


for name, policy in {"always 4": Fixed(4), "renewal": Renewal(draft=0.3)}.items():
    speedup, drafted, accepted = simulate(policy, WORDS, draft=0.3)
    print(f"{name:9} speedup {speedup:.2f}, {accepted} of {drafted} drafted tokens accepted")

# %% [markdown]
# ## The library's call: `draft_length=`
#
# `draft_length=` accepts a number, a policy of the library, or an object like ours with a `start` method. On the pair
# itself we compare the simplest rule, written by hand, with the library's `Confidence`. It stops before a token if the
# confidence is below 40%. Tokens and counts are equal.


# %%
class Threshold(Length):
    needs_q = True

    def start(self, earlier=None):
        return Threshold()

    def budget(self, unfinished):
        return 8

    def go_on(self, position, q, drawn=False):
        return (q.amax(-1) >= 0.4) | torch.tensor(position == 0)


def run(policy):
    """The tokens, and the counts: target passes, drafted, accepted, tokens per pass."""
    inputs = tokenizer(PROMPTS[0], return_tensors="pt").to(DEVICE)
    tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False, draft_length=policy)[0].tolist()
    done = model.report
    return tokens, (done.target_passes, done.drafted, done.accepted, round(done.tokens_per_pass, 2))


by_library, by_ourselves = run(Confidence(threshold=0.4, maximum=8)), run(Threshold())
assert by_library == by_ourselves
adaptive = run(Adaptive())
assert adaptive[0] == by_library[0]  # a rule changes the drafts, and never the output
print("target passes, drafted, accepted, tokens per pass:", by_library[1])

# %% [markdown]
# The rule changes the drafts, and never the output. The library's default is `Adaptive`. It is the rule of this notebook,
# with two differences. It measures the costs during decoding, and it counts how often tokens of each confidence were
# accepted.
#
# ## The picture: six rules at every cost
#
# The first panel shows one of the texts. Each bar is a token, its height is the draft's confidence, and its color shows
# whether the target agrees. Easy and hard stretches alternate.
#
# The second panel compares six rules for different costs of the draft. Two of them cheat, to show the limits. The *oracle*
# sees which tokens the target will accept. *Fixed, best in hindsight* takes the best fixed length for these very texts.
# `Heuristic` and `Confidence(0.4)` are the rules of transformers. The library has the second one only.


# %%
class Heuristic(Length):
    """Two tokens more after a draft that was accepted as a whole, and one fewer otherwise."""

    tokens = 5

    def start(self, earlier=None):
        return Heuristic()

    def budget(self, unfinished):
        return self.tokens

    def observe(self, round):
        full = round.accepted[0] == round.drafted[0]
        self.tokens = min(self.tokens + 2, 20) if full else max(1, self.tokens - 1)


# %%
def oracle(words, draft, verify=0.02):
    """Drafts exactly the tokens that will be accepted. A drafted token costs draft + verify, and a round costs 1."""
    wrong = sum(not agrees for _, agrees in words)
    right = len(words) - wrong
    return max(1.0, len(words) / (wrong + right * (draft + verify)))


LENGTHS = (1, 2, 3, 4, 6, 8)
COSTS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8]
fixed = {c: {0: 1.0} | {g: simulate(Fixed(g), WORDS, c)[0] for g in LENGTHS} for c in COSTS}
curves = {
    "oracle": [oracle(WORDS, c) for c in COSTS],
    "no draft": [1.0] * len(COSTS),
    "fixed, best in hindsight": [max(fixed[c].values()) for c in COSTS],
    "Heuristic()": [simulate(Heuristic(), WORDS, c)[0] for c in COSTS],
    "Confidence(0.4)": [simulate(Confidence(0.4, 16), WORDS, c)[0] for c in COSTS],
    "Renewal, ours": [simulate(Renewal(c), WORDS, c)[0] for c in COSTS],
    "Adaptive()": [simulate(Adaptive(), WORDS, c)[0] for c in COSTS],
}
shown = [COSTS.index(c) for c in (0.05, 0.1, 0.3, 0.6)]
rows = [[name, *(found[i] for i in shown)] for name, found in curves.items()]
show(table(["speedup at draft cost", *(str(COSTS[i]) for i in shown)], rows))
print("best fixed length at cost 0.3:", max(fixed[0.3], key=fixed[0.3].get))

# %% tags=["folded"]
styles = {
    "oracle": (COLOURS["plain"], ":"),
    "Adaptive()": (COLOURS["accent"], "-"),
    "fixed, best in hindsight": (COLOURS["target"], "--"),
    "Renewal, ours": (COLOURS["accepted"], "-"),
    "Confidence(0.4)": (COLOURS["draft"], "-."),
    "Heuristic()": (COLOURS["bonus"], "-."),
}
fig, (bars, lines) = plt.subplots(2, 1, figsize=(4.7, 7.2), height_ratios=[1, 1.9])
for wanted, name in ((True, "accepted"), (False, "rejected")):
    some = [(i, confidence) for i, (confidence, agrees) in enumerate(texts[1][1][:80]) if agrees == wanted]
    bars.bar(*zip(*some, strict=True), width=0.85, color=COLOURS[name], label="agrees" if wanted else "differs")
bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
bars.set(ylabel="draft's confidence", xlabel="80 tokens of one text", ylim=(0, 1), xlim=(-1, 80), xticks=[])
for name, (color, line) in styles.items():
    lines.plot(COSTS, curves[name], line, color=color, label=name, lw=2)
lines.axhline(1, color=COLOURS["plain"], lw=1)
lines.text(0.01, 0.98, "no draft", color=COLOURS["plain"], va="top")
lines.set(xlabel="cost of a drafted token, in target passes", ylabel="speedup", xlim=(0, 0.82))
lines.legend(loc="upper right")
plt.show()

# %%
RULES = ("Heuristic()", "Confidence(0.4)", "Renewal, ours", "Adaptive()")
compare(
    prediction,
    dict(
        zip(
            prediction,
            (
                round(100 * sum(agrees for _, agrees in WORDS) / len(WORDS)),
                max(fixed[0.3], key=fixed[0.3].get),
                max(curves[name][COSTS.index(0.3)] for name in RULES),
            ),
        )
    ),
)

# %% [markdown]
# The top-1 tokens agree at 68 of 100 positions. The column for cost 0.3 answers the other two predictions. The best fixed
# length is 2 and gives 1.28, and the best rule gives 1.34.
#
# - **The heuristic and the threshold ignore the cost.** From a cost of 0.4 on, they are slower than no draft at all.
# - **Our rule reacts to the cost, but trusts the confidence.** In the first panel, many short bars are green, so this draft's
#   confidence is too low. Where drafting is cheap, our rule stops too early. It also tries one token in every round, and
#   loses where drafting is expensive.
# - **`Adaptive` is close to the best fixed length or above it at every cost**, without any information about the pair at
#   the start. At a cost of 0.8 it stops drafting.
#
# This run has less than a thousand tokens of one pair. On other pairs, the gain over a well-chosen fixed length is often a
# few per cent or nothing. The main benefit is protection from a badly chosen length.
#
# ## When it loses: a draft that is sure and wrong
#
# Take a draft with the confidences measured above that is right in 2% of the cases. Our rule trusts the confidence and
# loses time. The library's rule counts the accepted tokens and stops drafting.

# %%
rng = random.Random(0)
HOPELESS = [(confidence, rng.random() < 0.02) for confidence, _ in WORDS]
rules = {"no draft": Never(), "fixed, 4": Fixed(4), "Heuristic()": Heuristic(), "Confidence(0.4)": Confidence(0.4, 16)}
rules |= {"Renewal, ours": Renewal(0.3), "Adaptive()": Adaptive()}
hopeless = {name: simulate(rule, HOPELESS, 0.3) for name, rule in rules.items()}
show(table(["rule", "speedup", "drafted", "accepted"], [[name, *found] for name, found in hopeless.items()]))

# %% [markdown]
# An adaptive rule gains nothing on an even text, where a well-chosen number is as good. A number is also the right choice
# if sampled runs must be repeatable token by token. A rule that depends on the clock drafts differently each time,
# although the output distribution is the same.

# %% [markdown]
# ## Takeaway
#
# > Draft the next token while its survival probability times the value of a token exceeds its price,
# > $S a / \rho > t_d + t_v$. A rule that ignores the price is tuned for one machine, and a confidence has to be
# > calibrated before it is a probability. Where no draft is worthwhile, the best length is zero. Decide **before** the
# > token is sampled.

# %% [markdown]
# ## Exercises
#
# ### 1. Derive the rule
#
# There are several kinds of rounds. Each kind has a probability and a list of acceptance
# probabilities as in the toy example. A round with $n$ drafted tokens takes $1 + n \cdot \text{price}$ and yields
# $1 + S_1 + \dots + S_n$ tokens. Choose a length for each kind so that the long-run rate, mean tokens divided by mean
# time, is as high as possible. Write `best_lengths(kinds, price)`. It returns the lengths, one for each kind, and the
# rate.
#
# Hint. Start with a guess of the rate $\rho$. Give each kind the length with the largest value of tokens
# $- \rho\,\cdot$ time. Compute the rate for these lengths. It is at least as high as the guess. Repeat until nothing
# changes.


# %% tags=["check"]
def rate(kinds, lengths, price):
    tokens = time = 0.0
    for (probability, chances), n in zip(kinds, lengths, strict=True):
        survival = list(itertools.accumulate(chances[:n], lambda s, a: s * a))
        tokens, time = tokens + probability * (1 + sum(survival)), time + probability * (1 + n * price)
    return tokens / time


def check_1(best_lengths, a=0.4, c=0.32, seed=0):
    rng = random.Random(seed)
    kinds = [(0.5, TOY), (0.3, [a, a, 0.9, 0.9]), (0.2, [rng.random() for _ in range(4)])]
    for price in (c, 0.02, rng.uniform(0.05, 0.3), 0.65):
        every = itertools.product(range(5), repeat=3)
        wanted = max(rate(kinds, lengths, price) for lengths in every)
        lengths, found = best_lengths(kinds, price)
        assert math.isclose(rate(kinds, lengths, price), found, rel_tol=1e-6), "the rate does not belong to the lengths"
        assert found > wanted - 1e-9, f"price {price}: the rate is {found:.4f}, but {wanted:.4f} is possible"


# %% tags=["exercise"]
def best_lengths(kinds, price):
    raise NotImplementedError  # your code; you can use rate(kinds, lengths, price)


attempt(check_1, best_lengths)


# %% tags=["answer"]
def best_lengths_answer(kinds, price):
    def gain(chances, n, rho):
        return 1 + sum(math.prod(chances[:k]) for k in range(1, n + 1)) - rho * (1 + n * price)

    rho, before = 1.0, None
    while rho != before:
        lengths = [max(range(len(a) + 1), key=lambda n, a=a: gain(a, n, rho)) for _, a in kinds]
        rho, before = rate(kinds, lengths, price), rho
    return lengths, rho


attempt(check_1, best_lengths_answer)

# %% [markdown] tags=["answer"]
# At the best rate, each kind stops where one more token would yield less than $\rho$ times its price,
# $S a < \rho \cdot \text{price}$. This is the rule. (In the second kind, two poor tokens come before two good ones.
# There it can be right to look more than one step ahead.)

# %% [markdown]
# ### 2. Calibrate
#
# The confidence of a real draft differs from its acceptance rate, so we count. `rounds` is a list of pairs
# `(confidences, accepted)`, with the confidences of the drafted tokens and the number of accepted ones. Write
# `calibrate(rounds, bins=5)`. It divides the confidence into equal bins and returns the share of accepted tokens for
# each bin, or `None` for an empty bin. Be careful with the tokens *after* the first rejection, because they were never
# checked.


# %% tags=["check"]
def check_2(calibrate, seed=3):
    rng, rounds = random.Random(seed), []
    power = rng.uniform(0.5, 3)
    for _ in range(12_000):
        confidences = [rng.uniform(0.2, 0.999) for _ in range(6)]
        right = [rng.random() < confidence**power for confidence in confidences]
        rounds.append((confidences, right.index(False) if False in right else 6))
    found = calibrate(rounds, 5)
    assert len(found) == 5 and found[0] is None, "return five bins; the first one is empty"
    for i in range(1, 5):
        low, high = i / 5, (i + 1) / 5
        truth = (high ** (power + 1) - low ** (power + 1)) / ((power + 1) * (high - low))  # the mean in the bin
        hint = "Were tokens after the first rejection counted?" if found[i] < truth else "Are rejections counted?"
        assert abs(found[i] - truth) < 0.04, f"bin {low:.1f} to {high:.1f}: {found[i]:.2f}, not {truth:.2f}. {hint}"


# %% tags=["exercise"]
def calibrate(rounds, bins=5):
    raise NotImplementedError  # your code


attempt(check_2, calibrate)


# %% tags=["answer"]
def calibrate_answer(rounds, bins=5):
    seen, accepted_count = [0] * bins, [0] * bins
    for confidences, accepted in rounds:
        for position, confidence in enumerate(confidences[: accepted + 1]):  # the first rejected one was checked, too
            index = min(bins - 1, int(confidence * bins))
            seen[index] += 1
            accepted_count[index] += position < accepted
    return [k / n if n else None for k, n in zip(accepted_count, seen, strict=True)]


attempt(check_2, calibrate_answer)

# %% [markdown]
# ### 3. Why decide before sampling
#
# This rule is tempting. Sample a token from $q$, and if its *own* probability is below a threshold, drop it and let the
# target write this token. Work out the output distribution. Write `distribution_if_dropped(p, q, threshold)`, the
# distribution of the next token, by adding up all cases. Either the drafted token is dropped and the target samples from
# $p$, or it goes through the acceptance rule of notebook [02](02_the_acceptance_rule.ipynb). Should the result be $p$?
# Decide before you run the check, which samples the rule and counts.


# %% tags=["check"]
def check_3(distribution_if_dropped, p=(0.2, 0.5, 0.3), q=(0.6, 0.3, 0.1), seed=0):
    rng, tokens = random.Random(seed), range(len(p))
    missing = [max(a - b, 0.0) for a, b in zip(p, q)]

    def output(threshold):
        (x,) = rng.choices(tokens, q)
        if q[x] < threshold:
            return rng.choices(tokens, p)[0]
        return x if rng.random() < p[x] / q[x] else rng.choices(tokens, missing)[0]

    for threshold in (0.0, 1.0, sorted(q)[-2], max(q)):
        found = distribution_if_dropped(torch.tensor(p), torch.tensor(q), threshold)
        assert found.shape == (len(p),) and abs(float(found.sum()) - 1) < 1e-5, "return probabilities that sum to 1"
        counts = Counter(output(threshold) for _ in range(8_000))
        for x in tokens:
            share = counts[x] / 8_000
            assert abs(float(found[x]) - share) < 0.03, (
                f"with threshold {threshold:.2f}, token {x} was output in {share:.1%} of all cases, not {found[x]:.1%}"
            )


# %% tags=["exercise"]
def distribution_if_dropped(p, q, threshold):
    raise NotImplementedError  # your code


attempt(check_3, distribution_if_dropped)


# %% tags=["answer"]
def distribution_if_dropped_answer(p, q, threshold):
    judged = q.where(q >= threshold, 0)  # drafted and not dropped
    accepted = judged * torch.minimum(p / q, torch.ones_like(p))
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    return accepted + (judged.sum() - accepted.sum()) * residual + (1 - judged.sum()) * p


attempt(check_3, distribution_if_dropped_answer)

# %% [markdown] tags=["answer"]
# Take $p = (0.2, 0.5, 0.3)$, $q = (0.6, 0.3, 0.1)$ and a threshold of 0.4. The total variation between the output and $p$
# is 0.10. After a rejection of the first token, the residual assumes that the other two were drafted as often as in $q$,
# but they were always dropped. So the parts no longer add up to $p$. A rule that looks at $q$ *before* sampling, like all
# rules in this notebook, either drafts from the whole of $q$ or not at all. Both give $p$. (With greedy decoding, or where
# the target's own sample decides, any rule is exact.)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you measure.
#
# - **A better Renewal.** Use your `calibrate` inside `Renewal`, and give it the costs as measured. How close does it come
#   to `Adaptive()`? Which part of the remaining distance to the oracle can no rule cover?
# - **Another signal.** A rule may look at the whole of $q$, at the position in the line, or at the text so far. Find a
#   signal that predicts agreement better than the confidence, and turn it into a rule.

# %% [markdown]
# ## References
#
# - Leviathan and others. The best fixed length. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - SpecDec++. When to stop, as a decision problem. [arXiv 2405.19715](https://arxiv.org/abs/2405.19715)
# - AdaEDL. Stopping on the draft's entropy. [arXiv 2410.18351](https://arxiv.org/abs/2410.18351)
# - DISCO. A learned stopping rule. [arXiv 2405.04304](https://arxiv.org/abs/2405.04304)
#
# Next, notebook [07](07_ngram_and_suffix.ipynb). These rules work for any draft. Is there one that needs no model and costs
# nothing?
