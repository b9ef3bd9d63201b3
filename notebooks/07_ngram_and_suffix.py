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
# # 07. n-gram and suffix
#
# **Can the text so far write the draft, for free?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: [notebook 03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, run this first:
# %pip install "assisted[notebooks]"

# %% tags=["setup"]
import random
from collections import Counter

import matplotlib.pyplot as plt
import torch

from assisted import AssistedModelForCausalLM, NGram, Suffix
from assisted.drafters.ngram import NGramIndex
from assisted.notebook import COLOURS, attempt, figure_style, show, table

TARGET = "zoo:target"  # there is no draft model in this notebook
# On a GPU of 12-24 GB try a real model: TARGET = "Qwen/Qwen3-4B"  (about 8 GB in bfloat16)

torch.set_num_threads(1)
figure_style()

# %% [markdown]
# ## Question
#
# In the notebooks before, a small model wrote the draft: a few tokens that the target then checks in one pass. The small model takes memory and time.
#
# But much of what a model writes has stood in its text before. Rename a variable in a function, and nine tenths of the answer is the question. Names, phrases, indentation and
# table rows come again and again. So look up where the last few tokens occurred before, and copy what followed them. No second model, no training, and the look-up takes
# some ten microseconds.
#
# When is that a good draft, and when is it not?
#
# ## Your prediction
#
# Draft eight tokens at a time by copying. A target pass gives at least one token and at most nine. How many tokens does a pass give
#
# - when the target repeats a function with one name changed,
# - when it writes a paragraph that has not been written before?
#
# Write down two numbers between 1 and 9.

# %% [markdown]
# ## By hand
#
# One toy text for the whole notebook. The target has written so far:
#
#     the cat sat on the mat and the cat sat on the
#
# **n-gram.** The last two words, *on the*, occurred before. What followed them was *mat and the cat ...*. Copy it. This is known as prompt lookup. If there are several
# occurrences, take the most recent one; if the last four words occur, better still: longer matches are right more often.
#
# **Suffix.** The n-gram method trusts one occurrence. The other way is to count. The last word alone, *the*, was followed by something three times: *cat*, *mat*, *cat*.
# So *cat* has a share of 2/3, and after *the cat* came *sat on* each time. The last two words, *on the*, have been followed by *mat* once of one time: share 1.
#
# Each match length has its own continuation. How many of its tokens will come true? If the shares are right, a token is accepted with the product of the shares down
# to it, and the **expected number of accepted tokens** is the sum of these products. Propose the continuation with the largest sum.

# %%
toy = "the cat sat on the mat and the cat sat on the".split()

after_the = Counter(b for a, b in zip(toy, toy[1:]) if a == "the")
print("after 'the':", dict(after_the))

one_word = [2 / 3, 2 / 3, 2 / 3]  # cat sat on: three tokens for a match of one word
two_words = [1, 1, 1, 1]  # mat and the cat
show(
    table(
        ["match", "continuation", "expected tokens"],
        [["the", "cat sat on", sum(one_word)], ["on the", "mat and the cat", float(sum(two_words))]],
    )
)

# %% [markdown]
# A match of one word may propose three tokens, one of two words six, and so on: a short match deserves a short proposal. The second line wins, whether or not the cat sits on
# the mat again.
#
# Nothing here is a probability that anybody vouches for. A count of one of one is a share of 1, and it is often wrong. That is no danger to the output. The target decides about
# every token: a drafted token is kept when it is what the target chooses itself, and otherwise the target's choice stands ([notebook 02](02_the_acceptance_rule.ipynb)).
# This works for any draft, also for one that comes from nowhere.
#
# ## From scratch
#
# First the n-gram look-up. A copy that reaches the end of the text goes on with itself, so loops are followed.


# %%
def ngram(text, budget, longest=4, shortest=2):
    """Copy what followed the longest match of the text's end, the most recent one."""
    for n in range(longest, shortest - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:]:
                period = text[place:]
                return [period[i % len(period)] for i in range(budget)]
    return []


print(ngram(toy, budget=4))
assert ngram(toy, budget=4) == ["mat", "and", "the", "cat"]

# %% [markdown]
# Now suffix decoding (arXiv 2411.04975). For every match length, follow the most frequent token, then the most frequent one after that, and multiply the shares. Stop below 0.1.
# Among equals the more recent one goes first.


# %%
def follow(text, places, limit, known):
    """The most frequent continuation of these places, and how many of its tokens to expect. known: tokens still counted."""
    copy, share, expected = [], 1.0, 0.0
    while len(copy) < limit:
        going = [place for place in places if place + len(copy) < len(text)]
        if not going or len(copy) >= known:  # one occurrence is left, or longer than what is counted: the latest leads
            token = (text + copy)[max(places) + len(copy)]
        else:
            counts, latest = Counter(), {}
            for place in going:
                token = text[place + len(copy)]
                counts[token] += 1
                latest[token] = place
            token = max(counts, key=lambda t: (counts[t], latest[t]))
            share *= counts[token] / len(going)
            places = [place for place in going if text[place + len(copy)] == token]
        if share < 0.1:
            break
        copy.append(token)
        expected += share
    return copy, expected


def suffix(text, budget, longest=24, per_match=3):
    """Of all match lengths the continuation with the most expected tokens, the longest match among equals."""
    best, worth = [], 0.0
    for m in range(min(longest, len(text) - 1), 0, -1):
        places = [place for place in range(m, len(text)) if text[place - m : place] == text[-m:]]
        if places:
            copy, expected = follow(text, places, min(budget, per_match * m), known=longest + 1 - m)
            if expected > worth:
                best, worth = copy, expected
    return best


assert suffix(toy, budget=4) == ["mat", "and", "the", "cat"]
print(suffix(toy, budget=4))

# %% [markdown]
# And how do we measure them? Here something comes to our help. Whether a copied token is accepted depends only on what the target writes. So **the finished text tells
# everything**: go through it, draft at every step, compare with what came. No model is needed. We call this a *replay*.


# %%
def replay(text, start, propose, length=8):
    """The passes over `text` from `start` on, each as (tokens drafted, tokens accepted). The first token needs no draft."""
    at, passes = start + 1, []
    while at < len(text):
        draft = propose(text[:at], min(length, len(text) - at - 1))
        kept = 0
        while kept < len(draft) and draft[kept] == text[at + kept]:
            kept += 1
        passes.append((len(draft), kept))
        at += kept + 1  # the token behind them is the target's own
    return passes


print(replay(toy + "mat and the dog ran off".split(), len(toy), ngram))

# %% [markdown]
# The first token, *mat*, comes with the pass that reads the prompt. Then *and the cat sat* is drafted: two tokens are right, and the target says *dog* where the draft said *cat*.
# *The dog* has not occurred before, so nothing is drafted for *ran*, and each of the last two passes gives one token.
#
# ## The library's call
#
# The same two methods are `NGram` and `Suffix`, or `draft="ngram"` and `draft="suffix"`. The library keeps a hash table and a tree of counts, so that a look-up doesn't read the whole
# text again. We let the target write twice: greedy, and sampled at temperature 1. The prompt is a function, cut in the middle.

# %%
SOURCE = '''def summarise(values, low, high):
    """Mean and spread of the values that lie between low and high."""
    inside = [value for value in values if low <= value <= high]
    if not inside:
        raise ValueError("no value lies between low and high")
    mean = sum(inside) / len(inside)
    spread = max(inside) - min(inside)
    return mean, spread
'''
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=Suffix(), draft_length=8)
tokenizer = model.tokenizer
prompt = tokenizer(SOURCE[:130], return_tensors="pt").input_ids.to(model.device)
start = prompt.shape[1]

written = {}
for name, options in {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}.items():
    torch.manual_seed(3)
    output = model.generate(prompt, max_new_tokens=96, eos_token_id=None, pad_token_id=0, **options)[0].tolist()
    passes, report = replay(output, start, suffix), model.report
    assert len(passes) == report.target_passes
    assert sum(drafted for drafted, _ in passes) == report.drafted
    assert sum(kept for _, kept in passes) == report.accepted
    written[name] = output
    print(f"{name}: {report.target_passes} passes, {report.accepted} of {report.drafted} drafted tokens accepted")

# %% [markdown]
# Our replay and the library agree in every count: passes, drafted, accepted. The greedy text is also that of plain decoding, and the n-gram tables agree at every place
# of the text.

# %%
plain = model.generate(prompt, max_new_tokens=96, eos_token_id=None, pad_token_id=0, do_sample=False, assisted=False)
assert plain[0].tolist() == written["greedy"] or model.dtype != torch.float32

pair = AssistedModelForCausalLM.from_models(model.target, draft=NGram(), draft_length=8)
output = pair.generate(prompt, max_new_tokens=96, eos_token_id=None, pad_token_id=0, do_sample=False)[0].tolist()
assert output == written["greedy"] or model.dtype != torch.float32
print(f"n-gram, greedy: {pair.report.target_passes} passes, {pair.report.accepted} of {pair.report.drafted} accepted")

index = NGramIndex(2, 4)
for place, token in enumerate(written["greedy"]):
    index.append(token)
    found = index.match()
    mine = ngram(written["greedy"][: place + 1], 8)
    assert mine == ([] if found is None else index.continuation(found[1], 8))

print(tokenizer.decode(written["greedy"][start:])[:220])

# %% [markdown]
# (`NGram` drafts less after wrong drafts, so its passes are not quite those of our `ngram`; exercise 3 is about that.)
#
# Look at the greedy text. The small target has begun to repeat itself. **Loops flatter every drafter that copies**: a loop is the easiest thing in the world to draft. Keep that in
# mind when somebody shows you a speedup of a small model at temperature 0.
#
# ## The picture
#
# Four texts of about the same length:
#
# - an **edit**: the function above stands in the prompt, and the answer is the same function with `values` renamed to `readings`,
# - the target's **greedy** text, with its loops,
# - the target's **sampled** text at temperature 1,
# - **fresh prose**: a paragraph that repeats nothing on purpose.
#
# The first and the last weren't written by the small target, which is too small to follow an instruction. They are replayed: the counts are those of a target that writes just
# this. Each box is a token, each gap between boxes ends a pass.

# %%
PROSE = """The ferry left before dawn, so nobody on the quay noticed how low it sat in the water. Grain for three villages lay
under wet canvas, together with a piano that had travelled further than most of the crew. Halfway across, fog swallowed both
banks. Old Maren cut the engine and listened; gulls usually argue near land. Only silence answered, then a bell,
faint, somewhere left. He turned toward it without hurry, as his mother had taught him."""


def ids(words):
    return tokenizer(words, add_special_tokens=False).input_ids


question, answer = ids(SOURCE), ids(SOURCE.replace("values", "readings"))
about = ids("Write a short scene on a river.\n")
texts = {
    "edit": (question + answer[:96], len(question)),
    "greedy": (written["greedy"], start),
    "sampled, T = 1": (written["sampled"], start),
    "fresh prose": (about + ids(PROSE)[:96], len(about)),
}
replayed = {name: replay(text, begin, suffix) for name, (text, begin) in texts.items()}
per_pass = {name: sum(kept + 1 for _, kept in p) / len(p) for name, p in replayed.items()}
wrong = {name: sum(drafted - kept for drafted, kept in p) / len(p) for name, p in replayed.items()}
assert per_pass["edit"] > 2 * per_pass["fresh prose"]

# %%
fig, axes = plt.subplots(figsize=(7, 2.9))
for row, (name, passes) in enumerate(replayed.items()):
    at, y = 0.0, len(replayed) - row
    boxes = {"accepted": [], "target": []}
    for _, kept in passes:
        boxes["accepted"] += [(at + place, 0.82) for place in range(kept)]
        boxes["target"].append((at + kept, 0.82))
        at += kept + 1.6
    for name_of, spans in boxes.items():
        axes.broken_barh(spans, (y - 0.25, 0.5), facecolors=COLOURS[name_of])
    axes.text(0, y + 0.34, f"{name}: {per_pass[name]:.2f} tokens a pass, {wrong[name]:.1f} wrong guesses a pass")
axes.text(0, 0.25, "copied and accepted", color=COLOURS["accepted"], weight="bold")
axes.text(48, 0.25, "the target's own token, one a pass", color=COLOURS["target"], weight="bold")
axes.set(ylim=(0.1, 4.75), xlabel="96 new tokens of each text, a gap behind each pass", xticks=[], yticks=[])
axes.spines["left"].set_visible(False)
plt.show()

# %% [markdown]
# Opposite outcomes from the same method. In the edit, runs of eight copied tokens end where the draft length ends them. In fresh prose nearly every pass gives
# its one token, and the guesses are wrong.
#
# What this one picture can't show: how large each share is in *your* text. It has one text of each kind.
#
# ## When it loses
#
# Copying costs nothing, but checking does. Every wrong guess is one more column in the target's pass. Say that a column adds a share $\kappa$ of a pass over one token. Then
# a pass with $n$ drafted tokens costs $1 + \kappa n$, and drafting is worth
#
# $$ S = \frac{\text{tokens}}{\sum_{\text{passes}} (1 + \kappa\, n)} $$
#
# times plain decoding. [Notebook 01](01_why_decoding_is_slow.ipynb) measures passes over one token and over many: a column costs next to nothing where a pass waits for memory, several
# percent on a small CPU, and more and more as a batch fills the machine.


# %%
def times_plain(passes, column):
    return sum(kept + 1 for _, kept in passes) / sum(1 + column * drafted for drafted, _ in passes)


prices = [0.0, 0.02, 0.05, 0.1, 0.3]
rows = [[name, *(times_plain(passes, price) for price in prices)] for name, passes in replayed.items()]
show(table(["S at a column price of", *map(str, prices)], rows))

assert times_plain(replayed["fresh prose"], 0.0) >= 1  # for nothing, a guess can't hurt
assert times_plain(replayed["fresh prose"], 0.3) < 1 < times_plain(replayed["edit"], 0.3)

# %% [markdown]
# So it loses
#
# - on text that repeats nothing, as soon as a column has a price,
# - in large batches, where every column has its full price,
# - at high temperature, where even what repeats is drawn anew.
#
# The losses are small, for a look-up *knows* when it has nothing to say, and a **back-off** makes them smaller: after wrong drafts propose less, then pause (exercise 3). The
# library's `NGram` does so. With the default draft length, which adapts, columns that don't pay are not proposed at all ([notebook 06](06_adaptive_length.ipynb)).
#
# One more warning. Looking up what was written for *other people* would find more. It would also tell them, by the time an answer takes, what others have written. The library
# doesn't do it unless it is told to.
#
# ## Takeaway
#
# > **Copying is a draft for nothing.** What it is worth depends on the text alone: much where the answer repeats its prompt or itself, nothing where it doesn't. Since the finished text
# > decides what would have been accepted, you can replay the texts you have and know the number of passes before you run anything. Looping text flatters every copy.

# %% [markdown]
# ## Exercises
#
# ### 1. A suffix automaton
#
# Our `suffix` reads the whole text at every step. A *suffix automaton* is a small machine that reads exactly the substrings of a text. It grows token by token, in constant
# time per token on average, and has at most $2n - 1$ states for $n \ge 2$ tokens. The longest suffix that occurred before is one look at it.
#
# Write `automaton(text)`. Return three lists over the states, state 0 being the empty string: `follow` (a dict from token to state), `link` (the state of the longest suffix
# that belongs to another state, -1 for state 0), and `length` (of the longest string that ends in the state). To append a token: make a state whose length is one more than that of
# the last state. Walk from the last state along the links and add the token wherever it leads nowhere yet. Where it leads somewhere, the state there may have to be split in two.


# %% tags=["check"]
def check_1(candidate):
    rng = random.Random(0)
    for size, symbols in [(1, 1), (8, 2), (30, 2), (40, 3), (60, 5)]:
        text = [rng.randrange(symbols) for _ in range(size)]
        follow, link, length = candidate(list(text))
        assert len(follow) <= max(2, 2 * size - 1), f"{len(follow)} states for {size} tokens: some were split too often"
        substrings = {tuple(text[i:j]) for i in range(size) for j in range(i + 1, size + 1)}
        for words in substrings:
            state = 0
            for token in words:
                assert token in follow[state], f"{words} stands in {text} and is not accepted"
                state = follow[state][token]
        count = sum(length[s] - length[link[s]] for s in range(1, len(link)))
        assert count == len(substrings), f"{count} different substrings by the lengths, {len(substrings)} by counting"
        seen = max(m for m in range(size) if any(text[i - m : i] == text[size - m :] for i in range(m, size)) or m == 0)
        last = max(range(len(length)), key=length.__getitem__)
        assert length[link[last]] == seen, f"the longest suffix seen before has {seen} tokens, not {length[link[last]]}"


# %% tags=["exercise"]
def my_automaton(text):
    follow, link, length = [{}], [-1], [0]
    for token in text:
        raise NotImplementedError
    return follow, link, length


attempt(check_1, my_automaton)


# %% tags=["answer"]
def automaton(text):
    follow, link, length, last = [{}], [-1], [0], 0
    for token in text:
        new = len(follow)
        follow.append({})
        length.append(length[last] + 1)
        link.append(0)
        state = last
        while state >= 0 and token not in follow[state]:
            follow[state][token] = new
            state = link[state]
        if state >= 0:
            there = follow[state][token]
            if length[there] > length[state] + 1:  # longer strings end there, too: split off the short ones
                follow.append(dict(follow[there]))
                length.append(length[state] + 1)
                link.append(link[there])
                short, link[there] = len(follow) - 1, len(follow) - 1
                while state >= 0 and follow[state].get(token) == there:
                    follow[state][token] = short
                    state = link[state]
                there = short
            link[new] = there
        last = new
    return follow, link, length


attempt(check_1, automaton)

# %% [markdown]
# ### 2. An adversarial text
#
# Be the adversary: write a text on which a look-up of the last token *always* has a proposal and is *never* right. Not once, at no position.
#
# Write `adversary(symbols)`: a list of $\text{symbols}^2$ tokens, each a number below `symbols`. From token $2 \cdot \text{symbols}$ on, both methods with matches of one token and
# more must propose something in every pass (but the very last one, which has no room for a draft), and nothing may be accepted. Which property of neighbouring tokens makes every copy
# wrong? (With more than ten symbols `suffix` falls silent by itself: no share is above 0.1 then.)


# %% tags=["check"]
def check_2(candidate):
    def shortest_match(text, budget):
        return ngram(text, budget, shortest=1)

    for symbols in (4, 6, 9):
        text = list(candidate(symbols))
        assert len(text) == symbols**2, f"{symbols} symbols: {len(text)} tokens instead of {symbols**2}"
        assert all(0 <= token < symbols for token in text), f"every token must be one of 0 to {symbols - 1}"
        for method in (shortest_match, suffix):
            passes = replay(text, 2 * symbols, method, length=4)
            kept = sum(kept for _, kept in passes)
            assert kept == 0, f"{symbols} symbols: {kept} copied tokens were right"
            silent = sum(drafted == 0 for drafted, _ in passes[:-1])
            assert silent == 0, f"{symbols} symbols: in {silent} passes nothing was proposed"


# %% tags=["exercise"]
def my_adversary(symbols):
    return [i % symbols for i in range(symbols**2)]  # always proposes, and is always right


attempt(check_2, my_adversary)


# %% tags=["answer"]
def adversary(symbols):
    """No pair of neighbours occurs twice, so what followed a token never follows it again: a de Bruijn sequence."""
    text = []
    for a in range(symbols):
        text.append(a)
        for b in range(a + 1, symbols):
            text += [a, b]
    return text


attempt(check_2, adversary)

# %% [markdown]
# With matches of at least two tokens, it takes a text in which no *three* neighbours occur twice: a de Bruijn sequence of order three. Real text is never that hostile, but source code
# with many near-copies comes close: every copy is right for a while and wrong where it matters.
#
# ### 3. Back off
#
# Bound the loss. A back-off says how many tokens may be drafted in a pass, and learns how many were accepted. Write a class with two methods:
#
# - `allowed(length)`: how many tokens may be drafted now, at most `length`; called once a pass,
# - `learn(drafted, accepted)`: what became of them; called behind it, when something was drafted.
#
# On a hostile text at most one token in five passes may be wasted; on the edit it may cost at most a tenth more passes; and one accepted token must bring the full length back.


# %% tags=["check"]
def check_3(candidate):
    def run(text, begin, propose, backoff):
        at, passes = begin + 1, []
        while at < len(text):
            room = min(backoff.allowed(8), len(text) - at - 1)
            draft = propose(text[:at], room) if room > 0 else []
            kept = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
            if draft:
                backoff.learn(len(draft), kept)
            passes.append((len(draft), kept))
            at += kept + 1
        return passes

    fresh = candidate()
    for _ in range(6):
        fresh.learn(8, 0)
    fresh.learn(1, 1)
    assert fresh.allowed(8) == 8, "after an accepted token all eight must be allowed again"
    hostile = [b for a in range(20) for c in range(a + 1, 20) for b in (a, c)]  # no two neighbours occur twice
    passes = run(hostile, 60, lambda before, room: ngram(before, room, shortest=1), candidate())
    wasted = sum(drafted - kept for drafted, kept in passes)
    assert wasted <= 0.2 * len(passes), f"{wasted} tokens wasted in {len(passes)} passes of a hostile text"
    text, begin = texts["edit"]
    careful, careless = len(run(text, begin, suffix, candidate())), len(replay(text, begin, suffix))
    assert careful <= 1.1 * careless, f"{careful} passes for the edit, {careless} without a back-off"


# %% tags=["exercise"]
class MyBackoff:
    def allowed(self, length):
        return length  # every time

    def learn(self, drafted, accepted):
        pass


attempt(check_3, MyBackoff)


# %% tags=["answer"]
class Backoff:
    """Half as much after each miss; then pauses that double, up to sixteen passes."""

    def __init__(self):
        self.misses = self.pause = 0

    def allowed(self, length):
        if self.pause:
            self.pause -= 1
            return 0
        return max(1, length >> self.misses)

    def learn(self, drafted, accepted):
        self.misses = 0 if accepted else self.misses + 1
        self.pause = min(16, 2 ** max(0, self.misses - 2) - 1)


attempt(check_3, Backoff)

# %% [markdown]
# ## References
#
# - Oliaro and others, *SuffixDecoding*: [arXiv 2411.04975](https://arxiv.org/abs/2411.04975)
# - Yang and others, *Inference with Reference* (LLMA), copying what followed a match: [arXiv 2304.04487](https://arxiv.org/abs/2304.04487)
# - Leviathan and others, *Fast Inference from Transformers via Speculative Decoding*: [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next: [08. Medusa](08_medusa.ipynb), several heads at once.
