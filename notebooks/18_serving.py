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
# # 18. Serving
#
# **Many users, one machine: who waits, for what, and do drafts help?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebook [12](12_batches_and_serving.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import itertools
import math
import random
import sys
import time

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, SessionPool, zoo
from assisted.lengths.policies import Never
from assisted.methods.shared.training.data import pack, tokenize
from assisted.zoo import corpus

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 16-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"

torch.set_num_threads(1)
figure_style()
# on a CPU, the processor time of this process, which does not depend on the load of the machine
clock = time.perf_counter if torch.cuda.is_available() else time.process_time

# %% [markdown]
# ## Question
#
# [Notebook 12](12_batches_and_serving.ipynb) gave all rows of a batch the same number of tokens, and found the batch size
# from which drafts lose. Real requests are not like that. They come one by one, some answers have two tokens and some
# forty, and drafts make the rows even more unequal. Users see three different things:
#
# - **time to first token**: how long until something appears. It contains the waiting for a free row, and the reading of the
#   prompt;
# - **time between tokens**: how evenly the text flows;
# - **throughput**: how many tokens all users together get in a second. It decides how many machines are needed.
#
# A draft helps the second and, up to some load, the third. What does it do to the first?
#
# ## Your prediction
#
# 24 requests wait, and four rows are decoded together, with drafts. An answer ends at its first line break, so most are
# short: 2 to 40 tokens. Think of one *round* (draft-verify step) of all running rows as the unit of time. Batch after
# batch, with each batch waiting for its longest answer, the 24 requests take 43 rounds. How many rounds are needed
#
# - if the next request takes a row as soon as its text has ended?
# - in the same way, but without drafts, where each round gives one token to each running row?

# %%
prediction = {"rows are refilled, drafts": None, "rows are refilled, no drafts": None}

# %% [markdown]
# ## By hand: six requests, two rows
#
# Six requests need 6, 2, 1, 3, 5 and 1 rounds. In **batches** of two, a batch takes as many rounds as its longest text:
#
#     batch 1: max(6, 2) = 6     batch 2: max(1, 3) = 3     batch 3: max(5, 1) = 5     together 14
#
# With **refilled rows**, a request takes the row that is free first:
#
#     row 1: 6 of request 1, then 5 of request 5      = 11
#     row 2: 2, then 1, then 3, then 1 (request 6)    = 7       together 11
#
# The third request gets its first token after 2 rounds instead of 6. The lower bound for two rows is the sum of all
# rounds divided by two, 18/2 = 9.

# %%
toy = [6, 2, 1, 3, 5, 1]


def in_batches(rounds, rows):
    """By request, the rounds (first, last) in which it runs, if each batch waits for its longest text."""
    spans, at = [], 0
    for begin in range(0, len(rounds), rows):
        batch = rounds[begin : begin + rows]
        spans += [(at, at + count) for count in batch]
        at += max(batch)
    return spans


def refilled(rounds, rows):
    """The same if the next request takes the row that is free first."""
    free, spans = [0] * rows, []
    for count in rounds:
        row = free.index(min(free))
        spans.append((free[row], free[row] + count))
        free[row] += count
    return spans


for schedule in (in_batches, refilled):
    spans = schedule(toy, 2)
    print(f"{schedule.__name__}: {max(end for _, end in spans)} rounds; the requests begin at {[b for b, _ in spans]}")
assert max(end for _, end in in_batches(toy, 2)) == 14 and max(end for _, end in refilled(toy, 2)) == 11

# %% [markdown]
# ## From scratch: the schedule of 24 real requests
#
# How many rounds does each request need? We let the library answer one after the other, in one row, and count. Nothing
# else is needed for the schedule: rows are independent, so a text needs the same rounds beside any neighbours.

# %%
target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype=torch.float32).eval()
draft = AutoModelForCausalLM.from_pretrained(zoo.resolve(DRAFT), dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
model = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer, draft_length=4)

files = random.Random(1).sample(corpus.held_out_files(), 30)
prompts = pack(tokenize(tokenizer, map(corpus.read, files)), context=48, rows=24)
line_breaks = [token for token in range(target.config.vocab_size) if tokenizer.decode([token]).startswith("\n")]
call = dict(do_sample=False, max_new_tokens=40, pad_token_id=tokenizer.pad_token_id, eos_token_id=line_breaks)
ROWS = 4


def serve(rows, **more):
    """All answers by request, their order, and the rounds, each with the tokens of each row."""
    seen, answers = [], []
    model.watch = lambda round: seen.append(list(round.kept))
    for answer in model.generate_many(prompts, rows=rows, **call, **more):
        answers.append((answer.index, answer.new_tokens.tolist(), len(seen)))
    model.watch = None
    return {index: tokens for index, tokens, _ in answers}, [index for index, *_ in answers], seen, answers


def rounds_of_each(**more):
    ends = [ended for *_, ended in serve(1, **more)[3]]
    return [after - before for before, after in itertools.pairwise([0, *ends])]


needs, needs_without = rounds_of_each(), rounds_of_each(draft_length=Never())
print("rounds with drafts:   ", needs)
print("rounds without drafts:", needs_without)
planned = {
    "batches, drafts": in_batches(needs, ROWS),
    "refilled, drafts": refilled(needs, ROWS),
    "batches, no drafts": in_batches(needs_without, ROWS),
    "refilled, no drafts": refilled(needs_without, ROWS),
}
lasts = {name: max(end for _, end in spans) for name, spans in planned.items()}
waits = {name: sum(begin for begin, _ in spans) / len(spans) for name, spans in planned.items()}
show(table(["4 rows", "rounds", "mean wait for a row, rounds"], [[n, lasts[n], waits[n]] for n in planned]))
compare(prediction, dict(zip(prediction, (lasts["refilled, drafts"], lasts["refilled, no drafts"]))))

# %% [markdown]
# So a draft *does* help the time to first token, though it drafts no first token: the requests before end sooner, and
# rows become free sooner.
#
# ## The library's call: `generate_many`
#
# `generate_many` takes any number of prompts and yields answers as they end. It must need exactly the rounds of our
# schedule, for each number of rows, and each answer must be that of `generate` for its prompt alone.

# %%
for rows in (2, 4, 8):
    answers, order, seen, _ = serve(rows)
    assert len(seen) == max(end for _, end in refilled(needs, rows)), "our schedule and the library's differ"
    print(f"{rows} rows: {len(seen)} rounds, the first answers are those of the requests {order[:6]}")
for index in range(0, 24, 6):
    alone = model.generate(prompts[index : index + 1], assisted=False, **call)[0, prompts.shape[1] :].tolist()
    assert answers[index] == alone

# %% [markdown]
# ### A prompt that was read before
#
# The other part of the time to first token is the reading of the prompt. If prompts begin alike, a `SessionPool` keeps what was
# read. We count the tokens that are not read again.

# %%
document = "def area(width, height):\n    return width * height\n\n\ndef half(value):\n    return value / 2\n"
questions = ["\n\ndef mean(values):\n", "\n\ndef median(values):\n", "\n\ndef mean(values):\n"]
pooled = AssistedModelForCausalLM.from_models(
    target, draft=draft, tokenizer=tokenizer, draft_length=4, sessions=SessionPool(max_bytes=2**28)
)
lines = []
for question in questions:
    ids = tokenizer(document + question, return_tensors="pt").input_ids
    output = pooled.generate(ids, max_new_tokens=16, do_sample=False)
    assert output.equal(model.generate(ids, max_new_tokens=16, do_sample=False, assisted=False))
    lines.append([question.strip(), ids.shape[1], ids.shape[1] - pooled.report.cached_tokens])
show(table(["question", "tokens of the prompt", "tokens read"], lines))
assert lines[0][2] == lines[0][1] and all(read < 0.5 * length for _, length, read in lines[1:])

# %% [markdown]
# Whoever measures this time learns whether somebody else has asked the same. So a server needs a pool for each user.
#
# ### Time between tokens
#
# A round brings its tokens together. With drafts, some tokens come in a burst, and the next round takes a little longer. The
# **mean** time between tokens hides this. We look at the text of one busy row: how many tokens come with each round?

# %%
busy = max(range(24), key=lambda index: needs[index])
_, _, alone_rounds, marks = serve(1)
begin = [0, *(ended for *_, ended in marks)][busy]
burst = [kept[0] for kept in alone_rounds[begin : begin + needs[busy]]]
print(f"request {busy}: {burst} tokens by round, {sum(burst) / len(burst):.2f} on average")
assert sum(burst) == len(answers[busy])

# %% [markdown]
# ## The picture: what refilled rows gain, and where drafts stop
#
# In the upper two panels, each bar is a request and each line is a row. The lower panel measures throughput with
# `generate_many`, with and without drafts, relative to one row without drafts. Times are processor times on the machine that made
# this page.

# %% tags=["measured"]
SIZES = (1, 2, 4, 8, 16)
spent = {(rows, name): [] for rows in SIZES for name in ("drafts", "no drafts")}
more_prompts = torch.cat([prompts, prompts[:8]])
for rows, name in list(spent) * 2:
    policy = {"drafts": 4, "no drafts": Never()}[name]
    start = clock()
    tokens = sum(len(a.new_tokens) for a in model.generate_many(more_prompts, rows=rows, draft_length=policy, **call))
    spent[rows, name].append((clock() - start) / tokens)
base = min(spent[1, "no drafts"])
throughput = {key: base / min(seconds) for key, seconds in spent.items()}
show(
    table(
        ["rows", "no drafts", "drafts", "gain by drafts"],
        [
            [
                n,
                throughput[n, "no drafts"],
                throughput[n, "drafts"],
                throughput[n, "drafts"] / throughput[n, "no drafts"],
            ]
            for n in SIZES
        ],
    )
)

# %% tags=["folded", "measured"]
figure, panels = plt.subplots(3, 1, figsize=(4.8, 7.4), height_ratios=[2, 2, 3])
for axes, name in zip(panels, ("batches, drafts", "refilled, drafts")):
    free = [0] * ROWS
    for index, (begin, end) in enumerate(planned[name]):
        row = index % ROWS if name.startswith("batches") else free.index(min(free))
        free[row] = end
        colour = COLOURS["accepted"] if index % 2 else COLOURS["draft"]
        axes.broken_barh([(begin + 0.08, end - begin - 0.16)], (row - 0.35, 0.7), facecolors=colour)
    axes.set(title=f"{name}: {lasts[name]} rounds", xlim=(0, lasts["batches, drafts"] + 1), yticks=[])
    axes.spines["left"].set_visible(False)
panels[1].set_xlabel("rounds")
for name, colour in (("drafts", "draft"), ("no drafts", "plain")):
    values = [throughput[rows, name] for rows in SIZES]
    panels[2].plot(SIZES, values, "o-", color=COLOURS[colour], markersize=4)
    panels[2].text(17.5, values[-1], name, color=COLOURS[colour], va="bottom" if name == "drafts" else "top")
panels[2].set(title="tokens per second, relative", xlabel="rows", ylim=(0, None), xlim=(0.9, 40))
panels[2].set_xscale("log", base=2)
panels[2].xaxis.set_major_formatter(lambda value, _: f"{value:g}")
plt.show()

# %% [markdown]
# - **Refilled rows leave no gaps.** In batches, a row whose text has ended is empty until the longest one ends.
# - **The two curves come closer with each doubling.** A row more uses the same idle arithmetic as a drafted token.
#   Where they meet, drafts only cost. It is further to the right than in notebook 12's batches, because refilled rows
#   end at different times: a text with drafts frees its row early, and the next one takes it.
# - **Throughput and waiting want different things.** More rows give more tokens per second, and each round takes longer
#   for everyone.
#
# This run cannot show what a server on a GPU does. There, 4 to 16 rows leave most of the arithmetic unused.
# `docs/howto/many-users.md` has the library's measurements beside those of transformers' continuous batching.
#
# ## When it loses: long prompts, and many rows
#
# **A long prompt stops everyone.** A new prompt is read in a pass of its own, while the other rows wait. Their users see
# a gap in the middle of a text. Servers such as vLLM read long prompts in parts, between the rounds of the others.
#
# **Texts of equal length.** If all texts end together, refilling gains nothing. Our 24 requests as if they all needed
# 12 rounds:

# %%
same = [12] * 24
for schedule in (in_batches, refilled):
    print(f"{schedule.__name__}: {max(end for _, end in schedule(same, ROWS))} rounds")
assert max(end for _, end in in_batches(same, ROWS)) == max(end for _, end in refilled(same, ROWS))

# %% [markdown]
# **The end of the queue.** When no request waits, rows stay empty, as in a batch. The longer the last text, the worse. Here,
# the rows are free at different times:

# %%
ends = [0] * ROWS
for count in needs:
    ends[ends.index(min(ends))] += count
print("the rows are free after", ends, "rounds; with equal shares it would be", math.ceil(sum(needs) / ROWS))

# %% [markdown]
# **More rows than the arithmetic can carry.** From some number of rows on, drafts cost more than they bring. The default
# draft length (`"adaptive"`) measures this and stops. Beyond about sixteen rows, hand the pair over to a server
# ([notebook 14](14_capstone.ipynb)).
#
# ## Takeaway
#
# > Users wait for a row, for their prompt to be read, and then for tokens. Refill rows, keep what was read, and draft: each
# > shortens one of the three, and drafts also free rows earlier. Drafts and rows compete for the same idle arithmetic,
# > so measure throughput with the number of rows that you will have, and report waiting times as well as their mean.

# %% [markdown]
# ## Exercises
#
# ### 1. Requests that arrive
#
# A request i arrives at round `arrivals[i]` (ascending) and needs `rounds[i]` rounds. It takes the row that is free
# first, but never before it has arrived. Write `first_tokens(arrivals, rounds, rows)`. It returns how many rounds each
# request waits before it begins.


# %% tags=["check"]
def check_1(candidate, seed=0):
    assert candidate([0, 0, 0], [3, 1, 2], 2) == [0, 0, 1], "Three at once on two rows: the third waits for one round."
    assert candidate([0, 5], [3, 3], 1) == [0, 0], "The row is idle when the second one arrives, so nobody waits."
    rng = random.Random(seed)
    rows, count = rng.randint(1, 3), 12
    arrivals = sorted(rng.randrange(12) for _ in range(count))
    rounds = [rng.randint(1, 6) for _ in range(count)]
    waiting, running, begun, now = list(range(count)), [], {}, 0
    while waiting:  # round by round
        running = [(index, left) for index, left in running if left]
        while waiting and arrivals[waiting[0]] <= now and len(running) < rows:
            index = waiting.pop(0)
            begun[index] = now
            running.append((index, rounds[index]))
        running, now = [(index, left - 1) for index, left in running], now + 1
    wanted = [begun[index] - arrivals[index] for index in range(count)]
    found = candidate(arrivals, rounds, rows)
    assert list(found) == wanted, f"Arrivals {arrivals}, rounds {rounds}, {rows} rows: {wanted}, not {found}."


# %% tags=["exercise"]
def my_first_tokens(arrivals, rounds, rows):
    return [begin for begin, _ in refilled(rounds, rows)]  # as if all had been there from the beginning


attempt(check_1, my_first_tokens)


# %% tags=["answer"]
def first_tokens(arrivals, rounds, rows):
    free, waits = [0] * rows, []
    for arrival, count in zip(arrivals, rounds):
        row = free.index(min(free))
        begin = max(free[row], arrival)
        waits.append(begin - arrival)
        free[row] = begin + count
    return waits


attempt(check_1, first_tokens)

# %% [markdown]
# ### 2. What the mean hides
#
# A text gets `burst[i]` tokens with round i, and round i takes `seconds[i]`. All tokens of a round appear together.
# Write `gaps(burst, seconds)`: the time between each token and the one before it, beginning with the first round, whose
# first token comes `seconds[0]` after the token before. A round may bring no token to this text (others had the machine). Then the
# next token has waited for both.


# %% tags=["check"]
def check_2(candidate, seed=0):
    assert candidate([1, 1], [0.5, 0.25]) == [0.5, 0.25], "One token per round: the gaps are the rounds."
    assert candidate([3, 1], [0.5, 0.25]) == [0.5, 0.0, 0.0, 0.25], "Three tokens at once: two of them have no gap."
    assert candidate([0, 2], [0.5, 0.25]) == [0.75, 0.0], "A round without a token: the next one has waited for both."
    rng = random.Random(seed)
    burst, seconds = [rng.randint(0, 4) for _ in range(20)] + [1], [rng.randint(1, 8) / 8 for _ in range(21)]
    found = candidate(burst, seconds)
    assert len(found) == sum(burst), f"{sum(burst)} tokens have as many gaps, not {len(found)}."
    assert abs(sum(found) - sum(seconds)) < 1e-9, "The gaps add up to the whole time."
    times = [sum(seconds[: at + 1]) for at, count in enumerate(burst) for _ in range(count)]
    wanted = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert all(abs(a - b) < 1e-9 for a, b in zip(found, wanted)), "A gap is wrong."


# %% tags=["exercise"]
def my_gaps(burst, seconds):
    return [second / count for count, second in zip(burst, seconds) for _ in range(count)]  # spread evenly


attempt(check_2, my_gaps)


# %% tags=["answer"]
def gaps(burst, seconds):
    found, waited = [], 0.0
    for count, second in zip(burst, seconds):
        waited += second
        if count:
            found += [waited] + [0.0] * (count - 1)
            waited = 0.0
    return found


found = sorted(gaps(burst, [1.3] * len(burst)))  # a round with drafts may take 1.3 of one without
print(
    f"mean gap {sum(found) / len(found):.2f}, 95th percentile {found[int(0.95 * len(found))]:.2f}; without drafts 1.00"
)
attempt(check_2, gaps)

# %% [markdown] tags=["answer"]
# The mean falls by the tokens per round, and the 95th percentile *rises*: whoever waits for a round waits longer than without drafts.

# %% [markdown]
# ### 3. What need not be read again
#
# A pool holds texts (lists of tokens). Write `to_read(pool, prompt)`. It returns how many tokens of the prompt must
# be read: all after the longest beginning that it shares with a text of the pool. The last token of the prompt is
# always read, since its logits choose the first new token.


# %% tags=["check"]
def check_3(candidate, seed=0):
    assert candidate([], [1, 2, 3]) == 3, "An empty pool saves nothing."
    assert candidate([[1, 2, 9]], [1, 2, 3]) == 1, "Two tokens are shared, and one is read."
    assert candidate([[1, 2, 3, 4]], [1, 2, 3]) == 1, (
        "The whole prompt is in the pool, but its last token must be read."
    )
    assert candidate([[2, 3]], [1, 2, 3]) == 3, "Only beginnings count: a state depends on all tokens before it."
    rng = random.Random(seed)
    for _ in range(50):
        pool = [[rng.randrange(2) for _ in range(rng.randint(0, 6))] for _ in range(3)]
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
        shared = max(k for k in range(len(prompt) + 1) if any(text[:k] == prompt[:k] for text in pool))
        wanted = max(1, len(prompt) - shared)
        found = candidate(pool, prompt)
        assert found == wanted, f"Pool {pool}, prompt {prompt}: {wanted} tokens must be read, not {found}."


# %% tags=["exercise"]
def my_to_read(pool, prompt):
    return 0 if prompt in pool else len(prompt)


attempt(check_3, my_to_read)


# %% tags=["answer"]
def to_read(pool, prompt):
    def shared(text):
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt)))

    return max(1, len(prompt) - max(map(shared, pool), default=0))


attempt(check_3, to_read)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Sort the 24 requests by the rounds that they need, ascending and descending, before you serve them. Which order has fewer
#    rounds, and which the shorter mean wait? What if you do not know the rounds beforehand?
# 2. Let requests arrive at random, and increase their rate until the queue grows without end. At which rate does this happen
#    with drafts and without, for 4 rows and for 16?

# %% [markdown]
# ## References
#
# - Yu and others. Orca, which refills rows at every step (OSDI 2022).
# - Kwon and others. vLLM and paged attention. [arXiv 2309.06180](https://arxiv.org/abs/2309.06180)
# - Liu and others. Choosing draft lengths by the load of a server.
#   [arXiv 2406.14066](https://arxiv.org/abs/2406.14066)
#
# Next: all of this shared out the time of one machine. What does the machine do in a single round?
# [19. A timeline](19_a_timeline.ipynb).
