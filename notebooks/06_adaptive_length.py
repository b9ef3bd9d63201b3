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
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import logging

logging.disable(logging.WARNING)  # quantization backends log messages on import
import itertools
import math
import random

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from assisted import AssistedModelForCausalLM, zoo
from assisted.drafts import Round
from assisted.lengths import Confidence, Fixed, Heuristic, Length
from assisted.lengths.adaptive import Adaptive
from assisted.notebook import COLOURS, attempt, figure_style, show, table

TARGET, DRAFT, DEVICE = "zoo:target", "zoo:draft", "cpu"
# On a GPU of 12-24 GB try a real pair (about 9.5 GB in bfloat16):
# TARGET, DRAFT, DEVICE = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "cuda"
# In half precision near-ties may be resolved differently, and an assert that compares counts may then fail.

transformers_logging.disable_progress_bar()
torch.set_num_threads(min(2, torch.get_num_threads()))
figure_style()

# %% [markdown]
# ## Question
#
# So far a draft had a fixed length. But text is uneven. Closing brackets, boilerplate and repeated names are easy to
# guess. There, all tokens of a ten-token draft are accepted. Before a new name or a new idea, even the first token is
# wrong, and every token after it is wasted.
#
# The draft has some information about this: its own probabilities. A rule can look at them and stop drafting. Which
# rule is best, and how much can it gain?

# %% [markdown]
# ## Your prediction
#
# A text alternates between easy stretches, with 60 tokens on average, and hard ones, with 20 tokens on average. In easy
# stretches 97% of the drafted tokens are right, in hard ones about a third. A drafted token costs 0.3 target forward
# passes. Write down three numbers before you read on.
#
# 1. The best fixed draft length.
# 2. The speedup at this length.
# 3. The speedup of the best rule that may look at the draft's confidence.

# %% [markdown]
# ## By hand
#
# We measure time in target passes over one token. A forward pass of the draft takes $t_d$. One more position in the
# target's pass takes $t_v$. Suppose that recently $\rho = 1.5$ tokens were output per unit of time. Then a token is
# worth $1/\rho = 0.67$ units, because this is the time that it would take to get it later.
#
# Let $a$ be the probability that the next drafted token is accepted if all tokens before it were accepted. Let $S$ be
# the product of these probabilities so far, the **survival probability**. One more drafted token yields $S a$ tokens on
# average. So draft it if
#
# $$\frac{S\,a}{\rho} > t_d + t_v.$$
#
# In our toy example, the next tokens of the draft would be accepted with probabilities 0.95, 0.90, 0.60 and 0.30. With
# $t_d = 0.3$ and $t_v = 0.02$, the price of a token is 0.32:
#
# | token | $a$ | $S a$ | value $S a / \rho$ | price | draft it? |
# |---|---|---|---|---|---|
# | 1 | 0.95 | 0.95 | 0.63 | 0.32 | yes |
# | 2 | 0.90 | 0.86 | 0.57 | 0.32 | yes |
# | 3 | 0.60 | 0.51 | 0.34 | 0.32 | yes, barely |
# | 4 | 0.30 | 0.15 | 0.10 | 0.32 | no |
#
# If the price is 0.65, not even the first token is worthwhile, so we decode without a draft. If it is 0.06, the fourth
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
# This is not just a rule of thumb. Call one draft-verify step a round, and consider a process that starts again after
# each round. Its average rate is highest exactly when each round continues as long as the next step earns at least that
# rate. This result is called *renewal-reward*, and exercise 1 derives the rule from it.

# %% [markdown]
# ## From scratch
#
# We need texts, a clock that nothing can disturb, and rules. We start with the text and the clock, which together
# simulate a pair of models. The confidence is the draft's, and in this simulation it is calibrated: a token with
# confidence 0.8 is right in 80% of the cases. A rule has the same methods as in the library, so we can also run the
# library's own rules:
#
# - `budget(unfinished)` returns the maximum number of tokens in this round, or 0 to skip drafting. The argument lists
#   the unfinished rows of the batch.
# - `go_on(position, q, drawn)` decides after the draft's forward pass. Its distribution is q. Should we propose a token
#   sampled from it? (If `drawn` is false, the draft proposes the top-1 token.)
# - `another(position)` decides whether to run the draft once more.
# - `observe(round)` receives the result of the round: the drafted, accepted and output tokens of each row, and the
#   seconds it took.


# %%
def text(tokens, seed=0, chance_of=lambda confidence: confidence):
    """For each token, the draft's confidence and whether the target agrees. Easy and hard stretches alternate."""
    rng, hard, found = random.Random(seed), False, []
    for _ in range(tokens):
        if rng.random() < (1 / 20 if hard else 1 / 60):
            hard = not hard
        confidence = min(0.999, max(0.1, rng.betavariate(2, 4) if hard else rng.betavariate(30, 1)))
        found.append((confidence, rng.random() < chance_of(confidence)))
    return found


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
            if drafted == budget or not rule.another(drafted):
                break
        agreed = [agrees for _, agrees in words[at : at + drafted]]
        accepted = agreed.index(False) if False in agreed else drafted
        spent = forwards * draft, 1 + verify * drafted
        rule.observe(Round.counted([(drafted, accepted, accepted + 1)], *spent))
        at, time = at + accepted + 1, time + sum(spent)
        drafted_all, accepted_all = drafted_all + drafted, accepted_all + accepted
    return at / time, drafted_all, accepted_all


def distribution(confidence):
    """A distribution [1, 12] with this value as its largest probability."""
    return torch.tensor([[confidence] + [(1 - confidence) / 11] * 11])


# %% [markdown]
# Next we write the rule of the table. It uses given prices and takes the confidence for $a$. A forward pass of the
# draft is expensive, and one more position in the target's pass is cheap. So there are two decisions. *Before* a
# forward pass of the draft, the next confidence is unknown, and the rule uses the last one instead. *After* it, the
# forward pass is already spent, so the rule only compares the token's value with the cost of one more position. Where
# even the first token is not worth its price, the rule stops drafting for a while. The more expensive the draft, the
# longer it stops.


# %%
class Renewal(Length):
    """Draft while the next token earns at least the average rate."""

    needs_q = True

    def __init__(self, draft, verify=0.02, maximum=16):
        self.draft, self.verify, self.maximum = draft, verify, maximum
        self.tokens = self.time = 20.0  # recent sums; they start at the baseline's rate
        self.last, self.off = 1.0, 0  # the last confidence; rounds left without drafting

    def start(self, earlier=None):
        return Renewal(self.draft, self.verify, self.maximum)

    def value(self, chance):
        """The value of a token with this probability, in units of time."""
        return chance * min(1.0, self.time / self.tokens)  # a token never costs more than a target pass

    def budget(self, unfinished):
        self.survival, self.off = 1.0, max(0, self.off - 1)
        return 0 if self.off else self.maximum

    def go_on(self, position, q, drawn=False):
        self.last = float(q.max())
        self.survival *= self.last
        if position == 0 and self.value(self.survival) < self.draft + self.verify:
            self.off = 1 + int(20 * self.draft)  # a hard stretch: tries take a twentieth of the time
        return torch.tensor([self.value(self.survival) > self.verify])

    def another(self, position):
        return self.value(self.survival * self.last) > self.draft + self.verify

    def observe(self, round):
        self.tokens = 0.99 * self.tokens + round.kept[0]
        self.time = 0.99 * self.time + round.draft_seconds + round.verify_seconds


WORDS = text(4000)
for name, policy in {"always 4": Fixed(4), "renewal": Renewal(draft=0.3)}.items():
    speedup, drafted, accepted = simulate(policy, WORDS, draft=0.3)
    print(f"{name:9} speedup {speedup:.2f}, {accepted} of {drafted} drafted tokens accepted")

# %% [markdown]
# ## The library's call
#
# `draft_length=` accepts a number, a policy of the library, or an object like ours with a `start` method. On the real
# pair we compare the simplest rule, written by hand, with the library's `Confidence`. It stops before a token if the
# draft's top-1 probability is below 40%. Tokens and counts are equal.


# %%
class Threshold(Length):
    needs_q = True

    def start(self, earlier=None):
        return Threshold()

    def budget(self, unfinished):
        return 8

    def go_on(self, position, q, drawn=False):
        return (q.amax(-1) >= 0.4) | torch.tensor(position == 0)


PROMPTS = ["def mean(values):\n", "class Stack:\n    def push(self, item):\n", "for line in open(path):\n    "]
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, device_map=DEVICE)


def run(policy):
    """The tokens, and the counts: target passes, drafted, accepted, tokens per pass."""
    model.reset_totals()
    inputs = [tokenizer(prompt, return_tensors="pt").to(DEVICE) for prompt in PROMPTS]
    kwargs = {"max_new_tokens": 64, "do_sample": False, "draft_length": policy}
    tokens = [model.generate(**one, **kwargs)[0].tolist() for one in inputs]
    done = model.totals
    return tokens, (done.target_passes, done.drafted, done.accepted, round(done.tokens_per_pass, 2))


by_library, by_ourselves = run(Confidence(threshold=0.4, maximum=8)), run(Threshold())
assert by_library == by_ourselves

# %% [markdown]
# The rules change what is drafted, but never the output. `Adaptive` is the default. It is the rule of this notebook,
# with costs and acceptance probabilities that it measures during decoding. It depends on the clock, so its counts
# differ from run to run.

# %%
policies = {
    "2": 2,
    "4": 4,
    "8": 8,
    "Heuristic()": Heuristic(),
    "Confidence(0.4)": Confidence(0.4),
    "Adaptive()": Adaptive(),
}
rows = []
for name, policy in policies.items():
    tokens, counted = run(policy)
    assert tokens == by_library[0]
    rows.append([name, *counted])
show(table(["draft_length", "target passes", "drafted", "accepted", "tokens per pass"], rows))

# %% [markdown]
# More drafted tokens mean fewer passes. (Many are accepted here. With greedy decoding, this small model soon repeats
# itself, which makes every draft look good.) Whether decoding gets faster depends on the cost of a drafted token, and
# tokens per pass do not contain this cost. So we return to the simulated clock.

# %% [markdown]
# ## The picture
#
# We compare six ways to choose the draft length, for different costs of the draft. Two of them cheat, to show what is
# possible. The *oracle* sees which tokens the target will accept. *Fixed, best in hindsight* tries all fixed lengths on
# this very text, including no draft at all, and takes the best. `Heuristic` and `Confidence(0.4)` are the rules of
# transformers. `Heuristic` drafts two tokens more after a draft that was accepted as a whole, and one fewer otherwise.


# %%
def oracle(words, draft, verify=0.02):
    """Drafts exactly the tokens that will be accepted. A drafted token costs draft + verify, and a round costs 1."""
    wrong = sum(not agrees for _, agrees in words)
    right = len(words) - wrong
    return max(1.0, len(words) / (wrong + right * (draft + verify)))


LENGTHS = (1, 2, 3, 4, 6, 8, 12)
COSTS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8]
WORDS = text(3000)
curves = {
    "oracle": [oracle(WORDS, c) for c in COSTS],
    "fixed, best in hindsight": [max([1.0] + [simulate(Fixed(g), WORDS, c)[0] for g in LENGTHS]) for c in COSTS],
    "Heuristic()": [simulate(Heuristic(), WORDS, c)[0] for c in COSTS],
    "Confidence(0.4)": [simulate(Confidence(0.4, 16), WORDS, c)[0] for c in COSTS],
    "Renewal, ours": [simulate(Renewal(c), WORDS, c)[0] for c in COSTS],
    "Adaptive()": [simulate(Adaptive(), WORDS, c)[0] for c in COSTS],
}
show(table(["speedup at draft cost", *map(str, COSTS)], [[name, *found] for name, found in curves.items()]))
print("best fixed length at cost 0.3:", max(LENGTHS, key=lambda g: simulate(Fixed(g), WORDS, 0.3)[0]))

# %%
styles = {
    "oracle": (COLOURS["plain"], ":"),
    "Adaptive()": (COLOURS["accent"], "--"),
    "Renewal, ours": (COLOURS["accepted"], "-"),
    "Confidence(0.4)": (COLOURS["draft"], "-"),
    "Heuristic()": (COLOURS["bonus"], "-."),
    "fixed, best in hindsight": (COLOURS["target"], "--"),
}
fig, axes = plt.subplots(figsize=(7, 4))
for name, (colour, line) in styles.items():
    axes.plot(COSTS, curves[name], line, color=colour, label=name, lw=2)
axes.axhline(1, color=COLOURS["plain"], lw=1)
axes.set(xlabel="cost of a drafted token, in target passes", ylabel="speedup")
axes.set(xlim=(0, 0.82), ylim=(0.4, 4.8))
axes.legend(loc="upper right")
plt.show()
best = max(curves["Heuristic()"][4], curves["fixed, best in hindsight"][4])
assert curves["Renewal, ours"][4] > best and curves["Adaptive()"][4] > best
assert min(curves["Renewal, ours"]) > 0.99 and min(curves["Adaptive()"]) > 0.99

# %% [markdown]
# The column for cost 0.3 answers your predictions.
#
# With a draft that costs almost nothing, every rule gains. As the draft becomes more expensive, the differences grow.
# The heuristic and the threshold ignore the cost. From a cost of 0.4 and 0.5 on, they are slower than no draft at all.
# The two renewal rules react to the cost. They stay above the best fixed length and end at the baseline. `Adaptive` has
# to measure the costs that our rule is given. It compensates for this: it looks more than one token ahead, and it uses
# the rate of the last few rounds. The oracle shows how much more is possible. A confidence gives the probability of a
# token, but not whether the target accepts it.
#
# This run cannot show real texts and draft models. Real confidence is rarely calibrated, costs must be measured, and
# the first hundred tokens are needed for that. The library's documentation contains measurements on real pairs. There
# the gain over a well-chosen fixed length is often a few per cent or nothing. The main benefit is protection from a
# badly chosen length.

# %% [markdown]
# ## When it loses
#
# Take a draft that is hopeless but confident. Its confidence looks the same as before, but it is right in 2% of the
# cases. Our rule trusts the confidence and loses time. The library's rule counts how often tokens of each confidence
# were accepted. It also tracks gains and losses, and it stops drafting.

# %%
HOPELESS = text(3000, chance_of=lambda confidence: 0.02)
rules = {"fixed, 4": Fixed(4), "Heuristic()": Heuristic(), "Confidence(0.4)": Confidence(0.4, 16)}
rules |= {"Renewal, ours": Renewal(0.3), "Adaptive()": Adaptive()}
hopeless = {name: simulate(rule, HOPELESS, 0.3) for name, rule in rules.items()}
show(table(["rule", "speedup", "drafted", "accepted"], [[name, *found] for name, found in hopeless.items()]))
assert hopeless["Adaptive()"][0] > 0.95 > 0.6 > hopeless["Renewal, ours"][0]

# %% [markdown]
# An adaptive rule also loses when there is nothing to adapt to. On an even text, a well-chosen number is as good and
# needs no measurements. If sampled runs must be repeatable token by token, use a number too. A rule that depends on the
# clock drafts differently each time, although the output distribution is the same.

# %% [markdown]
# ## Takeaway
#
# > Draft the next token while its survival probability times the value of a token exceeds its price:
# > $S a / \rho > t_d + t_v$. A rule that ignores the price is tuned for one machine. Where no draft is worthwhile, the
# > best length is zero. And decide **before** the token is sampled.

# %% [markdown]
# ## Exercises
#
# **1. Derive the rule.** There are several kinds of rounds. Each kind has a probability and a list of acceptance
# probabilities as in the toy example. A round with $n$ drafted tokens takes $1 + n \cdot \text{price}$ and yields
# $1 + S_1 + \dots + S_n$ tokens. Choose a length for each kind so that the long-run rate, mean tokens divided by mean
# time, is as high as possible. Write `best_lengths(kinds, price)`. It returns the lengths, one for each kind, and the
# rate.
#
# Hint: start with a guess of the rate $\rho$. Give each kind the length with the largest value of tokens
# $- \rho\,\cdot$ time. Compute the rate for these lengths. It is at least as high as the guess. Repeat until nothing
# changes.


# %% tags=["check"]
def rate(kinds, lengths, price):
    tokens = time = 0.0
    for (probability, chances), n in zip(kinds, lengths, strict=True):
        survival = list(itertools.accumulate(chances[:n], lambda s, a: s * a))
        tokens, time = tokens + probability * (1 + sum(survival)), time + probability * (1 + n * price)
    return tokens / time


def check_1(best_lengths):
    kinds = [(0.5, TOY), (0.3, [0.4, 0.4, 0.9, 0.9]), (0.2, [0.99, 0.98, 0.97, 0.96])]
    for price in (0.02, 0.2, 0.32, 0.65):
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

# %% [markdown]
# At the best rate, each kind stops where one more token would yield less than $\rho$ times its price,
# $S a < \rho \cdot \text{price}$. This is the rule. (In the second kind, two poor tokens come before two good ones.
# There it can be right to look more than one step ahead.)
#
# **2. Calibrate.** The confidence of a real draft differs from its acceptance rate. So we count. `rounds` is a list of
# `(confidences, accepted)`: the confidences of the drafted tokens, and how many of them were accepted. Write
# `calibrate(rounds, bins=5)`. It divides the confidence into equal bins and returns the share of accepted tokens for
# each bin, or `None` for an empty bin. Be careful with the tokens *after* the first rejection, because they were never
# checked.


# %% tags=["check"]
def check_2(calibrate):
    rng, rounds = random.Random(3), []
    for _ in range(4000):
        confidences = [rng.uniform(0.2, 0.999) for _ in range(6)]
        right = [rng.random() < confidence**2 for confidence in confidences]
        rounds.append((confidences, right.index(False) if False in right else 6))
    found = calibrate(rounds, 5)
    assert len(found) == 5 and found[0] is None, "return five bins; the first one is empty"
    for i in range(1, 5):
        low, high = i / 5, (i + 1) / 5
        truth = (high**3 - low**3) / (3 * (high - low))  # the mean of confidence ** 2 in the bin
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
# **3. Why decide before sampling.** Here is a tempting rule: sample a token from $q$, and if its *own* probability is
# below a threshold, drop it and let the target write this token. Work out the output distribution. Write
# `distribution_if_dropped(p, q, threshold)`, the distribution of the next token, by adding up all cases. Either the
# drafted token is dropped and the target samples from $p$, or it goes through the acceptance rule of notebook
# [02](02_the_acceptance_rule.ipynb). Before you run the check, decide: should the result be $p$?


# %% tags=["check"]
def check_3(distribution_if_dropped):
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.3, 0.1])
    without = distribution_if_dropped(p, q, 0.0)
    assert without.shape == (3,) and abs(float(without.sum()) - 1) < 1e-6, "return three probabilities that sum to 1"
    assert torch.allclose(without, p, atol=1e-6), "with threshold 0, nothing is dropped, so the distribution is p"
    assert torch.allclose(distribution_if_dropped(p, q, 1.0), p, atol=1e-6), (
        "if everything is dropped, the output is the target's alone"
    )
    found = distribution_if_dropped(p, q, 0.4)
    assert not torch.allclose(found, p, atol=1e-3), (
        "this rule changes the distribution, because A is drafted but B and C never are"
    )
    assert torch.allclose(found, torch.tensor([0.28, 0.40, 0.32]), atol=1e-6), f"{found.tolist()} is not correct"


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

# %% [markdown]
# The total variation is 0.10. After a rejection of A, the residual assumes that B and C were drafted as often as in
# $q$, but they were never drafted. So the parts no longer add up to $p$. A rule that looks at $q$ *before* sampling,
# like all rules in this notebook, either drafts from the whole of $q$ or not at all. Both give $p$. (With greedy
# decoding, or where the target's own sample decides, any rule is exact.)

# %% [markdown]
# ## References
#
# - Leviathan and others. The best fixed length. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - SpecDec++. When to stop, as a decision problem. [arXiv 2405.19715](https://arxiv.org/abs/2405.19715)
# - AdaEDL. Stopping on the draft's entropy. [arXiv 2410.18351](https://arxiv.org/abs/2410.18351)
# - DISCO. A learned stopping rule. [arXiv 2405.04304](https://arxiv.org/abs/2405.04304)
#
# Next: [07. n-gram and suffix](07_ngram_and_suffix.ipynb), drafts without a model.
