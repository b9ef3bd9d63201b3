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
# # 19. A timeline
#
# **What does the machine do during one round, and for how much of it does it do nothing?**
#
# *About 20 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks
# [01](01_why_decoding_is_slow.ipynb) and [03](03_choosing_a_draft.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import itertools
import random
import sys
import time

import matplotlib.pyplot as plt
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %%
TARGET, DRAFT = "zoo:target", "zoo:draft"
# On a GPU of 12-24 GB try a real pair: TARGET, DRAFT = "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"  (about 9.5 GB in bfloat16)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
figure_style()
print("The timeline is that of", "the GPU's kernels" if DEVICE == "cuda" else "torch's operations on this processor")

# %% [markdown]
# ## Question
#
# All notebooks before this one counted passes, and timed them as a whole. What happens *inside*? A forward pass is a
# program in Python. It starts some hundreds of operations: multiply, add, norm, softmax. On a GPU each of them is a
# **kernel** that the processor launches, and the GPU computes while Python prepares the next one. If the kernels are
# short, the GPU waits for Python.
#
# Drafting makes this worse: a round runs a small model several times, and a small model has short operations. How many operations
# does a round start, and for what share of the time does none of them run?
#
# ## Your prediction
#
# The shipped target has 16 layers, and the draft has 2. A round drafts 4 tokens and verifies them. Write down
#
# - how many operations of torch a round starts if the model's own code runs;
# - what share of the round's time, in percent, *no* operation runs, because Python is busy with something else.

# %%
prediction = {"operations in a round, the model's own code": None, "time without an operation (%)": None}

# %% [markdown]
# ## By hand: five kernels and a slow launcher
#
# Python needs 5 µs to launch a kernel. The GPU needs 2 µs to run it. Launching and running overlap: while the GPU runs
# one kernel, Python prepares the next.
#
#     Python   |-- 1 --|-- 2 --|-- 3 --|-- 4 --|-- 5 --|
#     GPU              |1|     |2|     |3|     |4|     |5|        25 + 2 = 27 µs, busy for 10 µs
#
# The GPU is idle for 17 of 27 µs, 63%. With kernels of 20 µs, it is the other way round: Python is ahead, the GPU works
# all the time after the first launch, and 5 + 5 · 20 = 105 µs pass. **The longer of the two decides.**
#
# To shorten the first case, launch fewer kernels (*fuse* several operations into one), or record the whole sequence once and start
# it with a single launch (a *CUDA graph*).

# %%


def busy(intervals):
    """The time that is covered by at least one of the intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


kernels = [(5.0 * n, 5.0 * n + 2) for n in range(1, 6)]
print(f"busy {busy(kernels):.0f} of 27 µs, idle {1 - busy(kernels) / 27:.0%}")
assert busy(kernels) == 10 and busy([(0, 4), (1, 2), (3, 6)]) == 6

# %% [markdown]
# ## From scratch: a trace of one round
#
# `torch.profiler` records every operation with its start and its end. Operations call others; we keep those that Python called
# itself. On a GPU we take the kernels instead. The library calls `watch` at the end of each round, and the
# round says how long drafting and verification took. So we know what each operation belongs to.


# %%
def trace(model, ids, new_tokens=32):
    """The full rounds of a call, [(start, begin of verification, end)], its operations, [(name, start, end)], in ms; products."""
    rounds, call = [], dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.watch = None
    model.generate(ids, **call)  # the first call prepares the model

    def note(round):
        if round.drafted[0] == 4:  # the last round may draft fewer
            rounds.append((time.perf_counter(), round.draft_seconds, round.verify_seconds))

    model.watch = note
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (DEVICE == "cuda")
    marks = []  # moments that both clocks know; the one that was noted fastest counts
    with profile(activities=activities) as profiled:
        for _ in range(20):
            before = time.perf_counter()
            with record_function("mark"):
                pass
            marks.append((time.perf_counter() - before, before))
        output = model.generate(ids, **call)
    model.watch = None
    events = profiled.events()
    of_profiler = [event.time_range.start for event in events if event.name == "mark"]
    (_, zero), origin = min(zip(marks, of_profiler))
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    called = [event for event in events if event.cpu_parent is None and event.name.startswith(("aten::", "mkldnn::"))]
    spans = [
        (event.name, (event.time_range.start - origin) / 1000, (event.time_range.end - origin) / 1000)
        for event in (on_device or called)
    ]
    ends = [((end - zero) * 1000, draft * 1000, verify * 1000) for end, draft, verify in rounds]
    linears = sum(event.name == "aten::linear" for event in events)
    return output, [(end - draft - verify, end - verify, end) for end, draft, verify in ends], spans, linears


# %%
def inside(spans, start, end):
    """The operations that begin within a span of time, cut at its end."""
    return [(name, begin, min(stop, end)) for name, begin, stop in spans if start <= begin < end]


target = AutoModelForCausalLM.from_pretrained(zoo.resolve(TARGET), dtype=torch.float32).to(DEVICE).eval()
draft = AutoModelForCausalLM.from_pretrained(zoo.resolve(DRAFT), dtype=torch.float32).to(DEVICE).eval()
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET))
ids = tokenizer("class Stack:\n    def push(self, item):\n", return_tensors="pt").input_ids.to(DEVICE)

# %% [markdown]
# ## The library's call: the model's own code, and fused layers
#
# With `fast="eager"`, the library runs the model's own code. With `"auto"`, it runs fused layers: fewer operations for the same numbers.
# (On a GPU it also captures whole passes in graphs. On a CPU, `"compiled"` needs a compiler and most of a minute, so it
# is left out here.) Both must write the text of plain `generate`.

# %%
MODES = {"the model's own code": "eager", "fused layers": "auto"}
plain = target.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
traces, reports = {}, {}
for name, fast in MODES.items():
    pair = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer, draft_length=4, fast=fast)
    output, *traces[name] = trace(pair, ids)
    assert output.equal(plain)
    reports[name] = pair.report
assert len({report.target_passes for report in reports.values()}) == 1, "the same rounds"

# %% [markdown]
# Is the trace complete? We can predict one number exactly. A pass of the model's own code multiplies by seven matrices in each layer and by
# one at the end.

# %%
own = "the model's own code"
each = 7 * target.config.num_hidden_layers + 1
of_draft = 7 * draft.config.num_hidden_layers + 1
passes = reports[own].target_passes + 1  # and the one that reads the prompt
left = traces[own][2] - passes * each
print(
    f"{traces[own][2]} products = {passes} passes of the target x {each} + {left // of_draft} of the draft x {of_draft}"
)
assert left % of_draft == 0 and left // of_draft >= reports[own].drafted

# %% [markdown]
# Now the counts of a mean round, and the times of the fastest one, which other programs disturbed least.


# %%
def fastest(rounds):
    return min(rounds, key=lambda one: one[2] - one[0])


def summary(rounds, spans):
    """Operations of a mean round, while drafting and while verifying; ms of the fastest round; its % without an operation."""
    drafting = sum(len(inside(spans, start, middle)) for start, middle, _ in rounds) / len(rounds)
    verifying = sum(len(inside(spans, middle, end)) for _, middle, end in rounds) / len(rounds)
    start, _, end = fastest(rounds)
    running = busy([span[1:] for span in inside(spans, start, end)])
    return [drafting, verifying, end - start, 100 * (1 - running / (end - start))]


# %% tags=["measured"]
summaries = {name: summary(*traces[name][:2]) for name in MODES}
header = ["", "operations, drafting", "verifying", "ms of a round", "% without an operation"]
show(table(header, [[name, *values] for name, values in summaries.items()], digits=0))
compare(prediction, dict(zip(prediction, (round(sum(summaries[own][:2])), round(summaries[own][3])))))
fewer = sum(summaries["fused layers"][:2]) / sum(summaries[own][:2])
assert DEVICE == "cuda" or fewer < 1, "fused layers start fewer operations"
print(f"fused layers start {1 - fewer:.0%} fewer operations")

# %% [markdown]
# ## The picture: one round, operation by operation
#
# The fastest round of each call. The upper row of boxes has the operations while drafting, the lower row those of the verification.
# White between boxes is time in which no operation runs: Python, the library's own work, and on this machine also
# the profiler, which takes about as long as a short operation to note it down. So a trace shows *where* time goes and exaggerates the gaps.

# %% tags=["folded", "measured"]
figure, panels = plt.subplots(2, 1, figsize=(4.8, 4.6))
quick = {name: fastest(traces[name][0]) for name in MODES}
longest = max(end - start for start, _, end in quick.values())
for axes, name in zip(panels, MODES):
    (start, middle, end), spans = quick[name], traces[name][1]
    for row, (begin, stop, colour, label) in enumerate(
        ((middle, end, "target", "verify"), (start, middle, "draft", "draft"))
    ):
        some, boxes = inside(spans, begin, stop), []
        for _, a, b in sorted(some, key=lambda one: one[1]):
            if boxes and a - sum(boxes[-1]) < longest / 1500:  # too near to be seen apart
                boxes[-1] = (boxes[-1][0], max(b, sum(boxes[-1])) - boxes[-1][0])
            else:
                boxes.append((a, b - a))
        axes.broken_barh([(a - start, width) for a, width in boxes], (row + 0.15, 0.6), facecolors=COLOURS[colour])
        axes.text(longest * 1.02, row + 0.45, f"{label}: {len(some)}", color=COLOURS[colour], va="center")
    axes.axvline(end - start, color=COLOURS["plain"], linewidth=1)
    axes.set(title=name, xlim=(0, longest * 1.3), ylim=(0, 1.9), yticks=[])
    axes.spines["left"].set_visible(False)
panels[-1].set_xlabel("ms, with the number of operations at the right")
plt.show()

# %% [markdown]
# - **Hundreds of operations for a handful of tokens.** The target's pass has the same number for one position and for
#   five. That is one more reason why a pass over five costs hardly more (notebook 01).
# - **Four runs of the draft start a good part of the operations**, though the draft has an eighth of the layers. A cheap draft is cheap
#   in weights, not in launches.
# - **Fused layers remove operations, not work.** The large products are the same. What disappears is small: copies, norms in five
#   steps, rotations.
#
# This run cannot show a GPU unless you have one. There, the boxes are kernels, and launching one takes Python about
# 5 to 10 µs whatever its size. With a small draft, the GPU idles for most of the drafting, until the passes are captured
# in graphs.
#
# ## When it loses: fewer launches, and no faster
#
# **If the operations are long, launches don't matter.** With a model of 8 billion weights in a large batch, a product takes a
# hundred times as long as its launch. Fusing and capturing then change little. We can see the effect here: the same
# layers over one position and over 256.

# %% tags=["measured"]
shares = []
for width in (1, 256):
    some = torch.randint(0, 4096, (1, width), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        target(some)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            target(some)
    called = [e for e in profiled.events() if e.cpu_parent is None and e.name.startswith("aten::")]
    spans = [(e.time_range.start, e.time_range.end) for e in called]
    length = max(end for _, end in spans) - min(start for start, _ in spans)
    shares.append([width, len(called), length / 1000, 100 * (1 - busy(spans) / length)])
show(table(["positions", "operations", "ms", "% without an operation"], shares, digits=1))
assert shares[0][1] <= shares[1][1] + 50, "the number of operations hardly depends on the width"

# %% [markdown]
# **A capture has a price.** A graph fixes shapes and addresses. Recording it takes longer than several passes, and a pass of another width
# needs another graph. A policy that changes the draft length in every round needs one for each length.
#
# **A trace is no measurement.** The profiler slows the program down, most of all its short operations. Take the *counts* from a trace,
# and the times from [notebook 13](13_measuring_honestly.ipynb)'s methods.
#
# ## Takeaway
#
# > A pass is a long list of small operations, and their number depends on the layers, not on the tokens. While they are short, the launcher
# > decides: start fewer of them, or all of them at once. A draft saves passes of the target and adds short operations of its own, so
# > launches count most exactly where drafting wants to be cheap.

# %% [markdown]
# ## Exercises
#
# ### 1. Who is waiting?
#
# Python launches n kernels, one after the other, each in L µs. Kernel i runs for `times[i]` µs. It begins when it has been
# launched and the one before it has ended. Write `makespan(L, times)`. It returns when the last kernel ends, and for how long the GPU
# was idle until then.


# %% tags=["check"]
def check_1(candidate, seed=0):
    assert tuple(candidate(5, [2] * 5)) == (27, 17), "The example above: 27 µs, 17 of them idle."
    assert tuple(candidate(5, [20] * 5)) == (105, 5), "With long kernels only the first launch is waited for."
    rng = random.Random(seed)
    for _ in range(20):
        launch, times = rng.randint(1, 9), [rng.randint(1, 20) for _ in range(rng.randint(1, 12))]
        clock, waiting, running, done, started = 0, [], None, 0, 0
        while done < len(times):  # microsecond by microsecond
            if clock and clock % launch == 0 and started < len(times):
                waiting.append(times[started])
                started += 1
            if running == 0:
                running, done = None, done + 1
            if running is None and waiting:
                running = waiting.pop(0)
            if done == len(times):
                break
            running = running - 1 if running else running
            clock += 1
        found = tuple(candidate(launch, list(times)))
        wanted = clock, clock - sum(times)
        assert found == wanted, f"Launches of {launch} µs and kernels of {times}: {wanted}, not {found}."


# %% tags=["exercise"]
def my_makespan(L, times):
    total = sum(L + time for time in times)  # nothing overlaps
    return total, total - sum(times)


attempt(check_1, my_makespan)


# %% tags=["answer"]
def makespan(L, times):
    end = 0
    for number, time_of_kernel in enumerate(times, 1):
        end = max(end, number * L) + time_of_kernel
    return end, end - sum(times)


attempt(check_1, makespan)

# %% [markdown]
# ### 2. When drafting starts more operations
#
# A pass of the target starts `target_ops` operations, a run of the draft `draft_ops`. A round drafts g tokens in g runs. Write
# `tokens_needed(target_ops, draft_ops, g)`: how many tokens must a round yield, at least, so that drafting starts no more operations for
# a token than the target alone? Then compare the answer with g + 1, the most that a round can yield.


# %% tags=["check"]
def check_2(candidate, g=4, seed=0):
    assert abs(candidate(800, 100, 4) - 1.5) < 1e-9, "800 for the pass and 400 for the drafts: 1.5 passes' worth."
    rng = random.Random(seed)
    for _ in range(20):
        target_ops, draft_ops = rng.randint(100, 1000), rng.randint(10, 500)
        found = candidate(target_ops, draft_ops, g)
        per_token = (target_ops + g * draft_ops) / found
        assert abs(per_token - target_ops) < 1e-6, (
            f"With {found:.2f} tokens, a token takes {per_token:.1f} operations, and {target_ops} without drafts."
        )


# %% tags=["exercise"]
def my_tokens_needed(target_ops, draft_ops, g):
    raise NotImplementedError


attempt(check_2, my_tokens_needed)


# %% tags=["answer"]
def tokens_needed(target_ops, draft_ops, g):
    return 1 + g * draft_ops / target_ops


attempt(check_2, tokens_needed)

# %% [markdown]
# ### 3. The gaps
#
# Write `gaps(intervals, start, end)`. It returns the list of gaps (begin, end) between `start` and `end` in which no interval is running, in order.
# Intervals may overlap, contain each other, and reach beyond `start` and `end`.


# %% tags=["check"]
def check_3(candidate, seed=0):
    assert list(map(tuple, candidate([(1, 2), (4, 5)], 0, 6))) == [(0, 1), (2, 4), (5, 6)], (
        "Three gaps, two of them at the ends."
    )
    assert list(map(tuple, candidate([], 0, 3))) == [(0, 3)], "Without an interval, all is a gap."
    rng = random.Random(seed)
    for _ in range(30):
        begins = [rng.randint(-3, 22) for _ in range(rng.randint(1, 6))]
        intervals = [(begin, begin + rng.randint(1, 6)) for begin in begins]
        free = [not any(a <= at < b for a, b in intervals) for at in range(20)]
        edges = [at for at in range(21) if (at < 20 and free[at]) != (at > 0 and free[at - 1])]
        wanted = list(zip(edges[::2], edges[1::2]))
        found = list(map(tuple, candidate(list(intervals), 0, 20)))
        assert found == wanted, f"{intervals} leave {wanted}, not {found}."


# %% tags=["exercise"]
def my_gaps(intervals, start, end):
    times = [start, *itertools.chain.from_iterable(sorted(intervals)), end]  # as if they did not overlap
    return [(a, b) for a, b in zip(times[::2], times[1::2]) if b > a]


attempt(check_3, my_gaps)


# %% tags=["answer"]
def gaps(intervals, start, end):
    found, reached = [], start
    for begin, stop in sorted(intervals):
        if begin >= end:
            break
        if begin > reached:
            found.append((reached, begin))
        reached = max(reached, stop)
    return found + [(reached, end)] * (reached < end)


attempt(check_3, gaps)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. `profiled.export_chrome_trace("trace.json")` writes a file that a browser opens at `chrome://tracing`. Find the longest operation of a round, and
#    the longest gap. What is Python doing there?
# 2. On a GPU, compare `fast="eager"`, `"auto"` and `"compiled"`. How many launches does a round have in each, and which share of the time is the GPU
#    idle?

# %% [markdown]
# ## References
#
# - PyTorch. The profiler, `torch.profiler`, and its timeline.
# - Leviathan and others. Fast Inference from Transformers via Speculative Decoding, where c is a ratio of times and launches are part of both.
#   [arXiv 2211.17192](https://arxiv.org/abs/2211.17192)
#
# This is the last notebook. [14. Capstone](14_capstone.ipynb) puts all steps together, if you have not read it yet.
