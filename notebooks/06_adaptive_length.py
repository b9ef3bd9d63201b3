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

logging.disable(logging.WARNING)  # quantization backends announce themselves on import
import itertools
import math
import random

import matplotlib.pyplot as plt
import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from assisted import AssistedModelForCausalLM, zoo
from assisted.lengths.adaptive import Adaptive
from assisted.drafts import Round
from assisted.lengths import Confidence, Fixed, Heuristic, Length
from assisted.notebook import COLOURS, attempt, figure_style, show, table

TARGET, DRAFT, DEVICE = "zoo:target", "zoo:draft", "cpu"
# On a GPU of 12-24 GB try a real pair (about 9.5 GB in bfloat16):
# TARGET, DRAFT, DEVICE = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B", "cuda"
# In half precision near-ties may fall differently, and an assert that compares counts may then fail.

transformers_logging.disable_progress_bar()
torch.set_num_threads(min(2, torch.get_num_threads()))
figure_style()

# %% [markdown]
# ## Question
#
# So far a draft had a fixed length. But text is uneven. Closing brackets, boilerplate and repeated names are easy to guess, and there a draft
# of ten tokens goes through. Before a new name or a new thought even the first token is wrong, and all that follows it is wasted.
#
# The draft knows something about that: its own probabilities. A rule may look at them and stop. Which rule is best, and how much is there to
# win?

# %% [markdown]
# ## Your prediction
#
# A text changes between easy stretches, 60 tokens on average, where 97% of the drafted tokens are right, and hard ones, 20 tokens, where a
# third are. A token of the draft costs 0.3 of a pass of the target. Write down three numbers before you read on.
#
# 1. The best fixed draft length.
# 2. The speedup it brings.
# 3. The speedup of the best rule that may look at the draft's confidence.

# %% [markdown]
# ## By hand
#
# Time is counted in plain passes of the target. A forward of the draft takes $t_d$, one more column in the target's pass takes $t_v$. Say that
# lately $\rho = 1.5$ tokens came out per unit of time. Then a token is worth $1/\rho = 0.67$ units: that is what it would cost to get it later.
#
# Let $a$ be the chance that the next drafted token is accepted, once those before it are, and $S$ the product of these chances so far. A
# further token brings $S a$ tokens on average. So draft it if
#
# $$\frac{S\,a}{\rho} > t_d + t_v.$$
#
# Our toy is a draft whose next tokens would be accepted with chances 0.95, 0.90, 0.60 and 0.30. With $t_d = 0.3$ and $t_v = 0.02$ the price is
# 0.32:
#
# | token | $a$ | $S a$ | worth $S a / \rho$ | price | draft it? |
# |---|---|---|---|---|---|
# | 1 | 0.95 | 0.95 | 0.63 | 0.32 | yes |
# | 2 | 0.90 | 0.86 | 0.57 | 0.32 | yes |
# | 3 | 0.60 | 0.51 | 0.34 | 0.32 | yes, barely |
# | 4 | 0.30 | 0.15 | 0.10 | 0.32 | no |
#
# With a draft of 0.65 a token, the first is not worth it: decode plainly. With one of 0.06, the fourth is drafted as well.

# %%
TOY = [0.95, 0.90, 0.60, 0.30]


def by_hand(chances, rho, price):
    """How many tokens to draft."""
    survival = 1.0
    for drafted, a in enumerate(chances):
        survival *= a
        if survival / rho <= price:
            return drafted
    return len(chances)


print({price: by_hand(TOY, rho=1.5, price=price) for price in (0.06, 0.32, 0.65)})
assert [by_hand(TOY, 1.5, price) for price in (0.06, 0.32, 0.65)] == [4, 3, 0]

# %% [markdown]
# This is no rule of thumb. A process that starts anew after each round has the best average rate exactly when each round goes on as long as the
# next step earns at least that rate (*renewal-reward*; exercise 1 derives it).

# %% [markdown]
# ## From scratch
#
# We need texts, a clock that cannot be disturbed, and rules. First the text and the clock: a simulated pair of models. The confidence is that
# of the draft, and here it is honest: a token with confidence 0.8 is right in 80% of the cases. Rules speak the library's language, so that the
# library's own can be put in as well:
#
# - `budget(unfinished)`: the most tokens of this round, 0 for a plain pass; the argument names the rows of the batch that still grow;
# - `go_on(position, q, drawn)`: the draft has run, its distribution is q: propose a token drawn from it? (With `drawn` false: its likeliest one.)
# - `another(position)`: run the draft once more?
# - `observe(round)`: what became of the round: tokens drafted, accepted and kept in each row, and the seconds it took.


# %%
def text(tokens, seed=0, honest=lambda confidence: confidence):
    """Confidence of the draft and whether the target agrees, token by token; easy and hard stretches take turns."""
    rng, hard, found = random.Random(seed), False, []
    for _ in range(tokens):
        if rng.random() < (1 / 20 if hard else 1 / 60):
            hard = not hard
        confidence = min(0.999, max(0.1, rng.betavariate(2, 4) if hard else rng.betavariate(30, 1)))
        found.append((confidence, rng.random() < honest(confidence)))
    return found


def simulate(policy, words, draft, column=0.02):
    """Speedup over plain decoding, and tokens drafted and accepted. draft, column: what these cost."""
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
        spent = forwards * draft, 1 + column * drafted
        rule.observe(Round.counted([(drafted, accepted, accepted + 1)], *spent))
        at, time = at + accepted + 1, time + sum(spent)
        drafted_all, accepted_all = drafted_all + drafted, accepted_all + accepted
    return at / time, drafted_all, accepted_all


def distribution(confidence):
    """[1, 12], a distribution whose largest probability this is."""
    return torch.tensor([[confidence] + [(1 - confidence) / 11] * 11])


# %% [markdown]
# Now the rule of the table. It knows the prices and takes the confidence for $a$. There are two decisions, because a forward of the draft is
# dear and a column is cheap: *before* a forward nobody knows the next confidence, so the last one stands in for it; *after* it the forward is
# paid, and only the column is left to weigh. Where not even the first token is worth its price, the rule decodes plainly for a while: the
# dearer a look, the longer.


# %%
class Renewal(Length):
    """Draft while the next token earns at least the average rate."""

    needs_q = True

    def __init__(self, draft, column=0.02, maximum=16):
        self.draft, self.column, self.maximum = draft, column, maximum
        self.tokens = self.time = 20.0  # of the recent past: begin as if it had been plain
        self.last, self.off = 1.0, 0  # the last confidence; plain rounds still to come

    def start(self, earlier=None):
        return Renewal(self.draft, self.column, self.maximum)

    def worth(self, chance):
        """In units of time, what a token with this chance is worth."""
        return chance * min(1.0, self.time / self.tokens)  # it never costs more than a plain pass

    def budget(self, unfinished):
        self.survival, self.off = 1.0, max(0, self.off - 1)
        return 0 if self.off else self.maximum

    def go_on(self, position, q, drawn=False):
        self.last = float(q.max())
        self.survival *= self.last
        if position == 0 and self.worth(self.survival) < self.draft + self.column:
            self.off = 1 + int(20 * self.draft)  # a hard stretch: looks take a twentieth of the time
        return torch.tensor([self.worth(self.survival) > self.column])

    def another(self, position):
        return self.worth(self.survival * self.last) > self.draft + self.column

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
# `draft_length=` takes a number, a policy of the library, or an object like ours with a `start` method. On the real pair we compare the
# simplest rule, written by hand, with the library's `Confidence`: stop before a token of which the draft is less than 40% sure. Tokens and
# counts are equal.


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
    """Tokens, and target passes, drafted, accepted, tokens per pass."""
    model.reset_totals()
    inputs = [tokenizer(prompt, return_tensors="pt").to(DEVICE) for prompt in PROMPTS]
    kwargs = {"max_new_tokens": 64, "do_sample": False, "draft_length": policy}
    tokens = [model.generate(**one, **kwargs)[0].tolist() for one in inputs]
    done = model.totals
    return tokens, (done.target_passes, done.drafted, done.accepted, round(done.tokens_per_pass, 2))


by_library, by_ourselves = run(Confidence(threshold=0.4, maximum=8)), run(Threshold())
assert by_library == by_ourselves

# %% [markdown]
# The rules differ in what they draft, never in what comes out. `Adaptive` is the default: the rule of this notebook, with costs and chances
# that it measures on the way. It follows the clock, so its counts differ from run to run.

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
# More drafted tokens give fewer passes. (Many are accepted here: at temperature 0 this small model soon repeats itself, and that flatters every
# draft.) Whether it is faster depends on what a drafted token costs, and tokens per pass do not say it. So back to the clock that counts
# exactly.

# %% [markdown]
# ## The picture
#
# Six ways to choose the length, over the cost of the draft. Two of them cheat, to show what is possible: the *oracle* sees which tokens the
# target will agree with, and *fixed, best in hindsight* takes the best of all fixed lengths, plain decoding among them, after trying them on
# this very text. `Heuristic` (two tokens more after a draft that was accepted as a whole, else one less) and `Confidence(0.4)` are the rules of
# transformers.


# %%
def oracle(words, draft, column=0.02):
    """Drafts exactly the tokens that will be accepted. A drafted token costs draft + column, a round 1."""
    wrong = sum(not agrees for _, agrees in words)
    right = len(words) - wrong
    return max(1.0, len(words) / (wrong + right * (draft + column)))


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
print("best fixed length at 0.3:", max(LENGTHS, key=lambda g: simulate(Fixed(g), WORDS, 0.3)[0]))

# %%
looks = {
    "oracle": (COLOURS["plain"], ":"),
    "Adaptive()": (COLOURS["accent"], "--"),
    "Renewal, ours": (COLOURS["accepted"], "-"),
    "Confidence(0.4)": (COLOURS["draft"], "-"),
    "Heuristic()": (COLOURS["bonus"], "-."),
    "fixed, best in hindsight": (COLOURS["target"], "--"),
}
fig, axes = plt.subplots(figsize=(7, 4))
for name, (colour, line) in looks.items():
    axes.plot(COSTS, curves[name], line, color=colour, label=name, lw=2)
axes.axhline(1, color=COLOURS["plain"], lw=1)
axes.set(xlabel="cost of a drafted token, in passes of the target", ylabel="speedup over plain decoding")
axes.set(xlim=(0, 0.82), ylim=(0.4, 4.8))
axes.legend(loc="upper right")
plt.show()
best = max(curves["Heuristic()"][4], curves["fixed, best in hindsight"][4])
assert curves["Renewal, ours"][4] > best and curves["Adaptive()"][4] > best
assert min(curves["Renewal, ours"]) > 0.99 and min(curves["Adaptive()"]) > 0.99

# %% [markdown]
# The column 0.3 has the answers to your predictions.
#
# With a draft that costs next to nothing, every rule gains. The dearer it is, the more the rules part. Heuristic and threshold know no prices:
# from a cost of 0.4 and 0.5 on they are slower than no draft at all. The two renewal rules follow the price: they stay above the best fixed
# length and end at plain decoding. `Adaptive` had to measure what ours was told; it makes up for that by looking more than one token ahead and
# at the rate of the last few rounds. The oracle shows how much remains: a confidence says how likely a token is, not what it will be.
#
# What this run cannot show: real texts and draft models. Confidence is seldom honest, costs must be measured, and the first hundred tokens go
# into that. The library's documentation has the measurements on real pairs; there the gain over a well-chosen fixed length is often a few per
# cent or nothing, and the protection from a bad one is most of the use.

# %% [markdown]
# ## When it loses
#
# Take a draft that is hopeless and does not know it: its confidence looks as before, and it is right in 2% of the cases. Our rule believes the
# confidence and walks into it. The library's counts how often tokens of each confidence were accepted, keeps an account of gains and losses,
# and stops drafting.

# %%
HOPELESS = text(3000, honest=lambda confidence: 0.02)
rules = {"fixed, 4": Fixed(4), "Heuristic()": Heuristic(), "Confidence(0.4)": Confidence(0.4, 16)}
rules |= {"Renewal, ours": Renewal(0.3), "Adaptive()": Adaptive()}
hopeless = {name: simulate(rule, HOPELESS, 0.3) for name, rule in rules.items()}
show(table(["rule", "speedup", "drafted", "accepted"], [[name, *found] for name, found in hopeless.items()]))
assert hopeless["Adaptive()"][0] > 0.95 > 0.6 > hopeless["Renewal, ours"][0]

# %% [markdown]
# An adaptive rule also loses where there is nothing to adapt to: on an even text a well-chosen number does as well, and it costs no measuring.
# And where runs must be repeatable to the draw, take a number: a rule that follows the clock drafts differently each time. The distribution of the
# output is the same.

# %% [markdown]
# ## Takeaway
#
# > Draft the next token while its chance to survive, times the worth of a token, exceeds what it costs: $S a / \rho > t_d + t_v$. A rule
# > without prices is tuned for one machine. Where no draft pays, the best length is zero. And decide **before** the token is drawn.

# %% [markdown]
# ## Exercises
#
# **1. Derive the rule.** Rounds come in kinds. A kind has a probability and a list of chances as in the toy. A round with $n$ drafted tokens
# takes $1 + n \cdot \text{price}$ and brings $1 + S_1 + \dots + S_n$ tokens. Choose a length for each kind so that the long-run rate, mean
# tokens over mean time, is as high as possible. Write `best_lengths(kinds, price)`: the lengths, one a kind, and the rate.
#
# Hint: for a guess of the rate $\rho$, give each kind the length with the largest tokens $- \rho\,\cdot$ time. With these lengths work out the
# rate; it is at least the guess. Repeat until nothing changes.


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
        assert math.isclose(rate(kinds, lengths, price), found, rel_tol=1e-6), "the rate is not that of the lengths"
        assert found > wanted - 1e-9, f"price {price}: rate {found:.4f}, and {wanted:.4f} is possible"


# %% tags=["exercise"]
def best_lengths(kinds, price):
    raise NotImplementedError  # your code; rate(kinds, lengths, price) is there to be used


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
# At the best rate each kind stops where one more token would bring less than $\rho$ times its price: $S a < \rho \cdot \text{price}$, the rule.
# (In the second kind two poor tokens come before two good ones: there it can be right to look further than one step.)
#
# **2. Calibrate.** The confidence of a real draft is not the acceptance. So count: `rounds` is a list of `(confidences, accepted)`, the
# confidences of the drafted tokens and how many of them were accepted. Write `calibrate(rounds, bins=5)`: for each of so many equal bins of the
# confidence the share of accepted tokens, `None` for an empty bin. Mind the tokens *behind* the first rejection: nobody has judged them.


# %% tags=["check"]
def check_2(calibrate):
    rng, rounds = random.Random(3), []
    for _ in range(4000):
        confidences = [rng.uniform(0.2, 0.999) for _ in range(6)]
        right = [rng.random() < confidence**2 for confidence in confidences]
        rounds.append((confidences, right.index(False) if False in right else 6))
    found = calibrate(rounds, 5)
    assert len(found) == 5 and found[0] is None, "five bins, and nothing is known of the first"
    for i in range(1, 5):
        low, high = i / 5, (i + 1) / 5
        truth = (high**3 - low**3) / (3 * (high - low))  # the mean of confidence ** 2 in the bin
        words = "were tokens behind the first rejection counted?" if found[i] < truth else "are rejections counted?"
        assert abs(found[i] - truth) < 0.04, f"bin {low:.1f} to {high:.1f}: {found[i]:.2f}, not {truth:.2f}; {words}"


# %% tags=["exercise"]
def calibrate(rounds, bins=5):
    raise NotImplementedError  # your code


attempt(check_2, calibrate)


# %% tags=["answer"]
def calibrate_answer(rounds, bins=5):
    seen, kept = [0] * bins, [0] * bins
    for confidences, accepted in rounds:
        for place, confidence in enumerate(confidences[: accepted + 1]):  # the first rejected one was judged, too
            index = min(bins - 1, int(confidence * bins))
            seen[index] += 1
            kept[index] += place < accepted
    return [k / n if n else None for k, n in zip(kept, seen, strict=True)]


attempt(check_2, calibrate_answer)

# %% [markdown]
# **3. Why decide before the draw.** A tempting rule: draw a token from $q$, and if its *own* probability is below a threshold, drop it and let
# the target write. Work out what comes out. Write `distribution_if_dropped(p, q, threshold)`, the distribution of the next token, by adding up all cases: the
# drafted token is dropped and the target draws from $p$; or it goes through the acceptance rule of notebook [02](02_the_acceptance_rule.ipynb).
# Before you run the check: should it be $p$?


# %% tags=["check"]
def check_3(distribution_if_dropped):
    p, q = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.3, 0.1])
    without = distribution_if_dropped(p, q, 0.0)
    assert without.shape == (3,) and abs(float(without.sum()) - 1) < 1e-6, "three probabilities that add up to 1"
    assert torch.allclose(without, p, atol=1e-6), "with threshold 0 nothing is dropped, and the distribution is p"
    assert torch.allclose(distribution_if_dropped(p, q, 1.0), p, atol=1e-6), (
        "if all is dropped, the target writes alone"
    )
    found = distribution_if_dropped(p, q, 0.4)
    assert not torch.allclose(found, p, atol=1e-3), (
        "this rule does change the distribution: A is drafted, B and C never are"
    )
    assert torch.allclose(found, torch.tensor([0.28, 0.40, 0.32]), atol=1e-6), f"not {found.tolist()}"


# %% tags=["exercise"]
def distribution_if_dropped(p, q, threshold):
    raise NotImplementedError  # your code


attempt(check_3, distribution_if_dropped)


# %% tags=["answer"]
def distribution_if_dropped_answer(p, q, threshold):
    judged = q.where(q >= threshold, 0)  # drafted and not dropped
    kept = judged * torch.minimum(p / q, torch.ones_like(p))
    residual = (p - q).clamp(min=0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    return kept + (judged.sum() - kept.sum()) * residual + (1 - judged.sum()) * p


attempt(check_3, distribution_if_dropped_answer)

# %% [markdown]
# The total variation is 0.10: the rejections of A are paid back to B and C as if those had been drafted as often as $q$ says, and they were
# not. A rule that looks at $q$ *before* the draw, as all rules in this notebook do, either drafts from the whole of $q$ or not at all. Both
# give $p$. (At temperature 0, or where the target's own draw decides, any rule is fine.)

# %% [markdown]
# ## References
#
# - Leviathan and others: the best fixed length. [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
# - SpecDec++: when to stop, as a decision problem. [arXiv 2405.19715](https://arxiv.org/abs/2405.19715)
# - AdaEDL: stopping on the draft's entropy. [arXiv 2410.18351](https://arxiv.org/abs/2410.18351)
# - DISCO: a learned stopping rule. [arXiv 2405.04304](https://arxiv.org/abs/2405.04304)
#
# Next: [07. n-gram and suffix](07_ngram_and_suffix.ipynb), drafts without a model.
