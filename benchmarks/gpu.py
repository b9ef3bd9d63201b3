"""Drafting on a GPU, with passes called one operation after the other (eager) and captured in CUDA graphs.

    python benchmarks/gpu.py --out benchmarks/gpu.json

Targets: the shipped one in float32, and the same grown to about 1 and 7 billion parameters in bfloat16 (`assisted.bench.grown`:
the same text at the cost of a large model). Everyone continues the same pieces of Python, greedily, as many tokens, in turns
at every prompt. Two tables: what a pass takes, and what generating brings.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tables import arguments, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import assisted
from assisted import AssistedModelForCausalLM, DraftModel, zoo
from assisted.bench import Bars, Batch, Contestant, Measured, Row, Rules, of_model, peers, plain, race, summed_up
from assisted.bench.clock import now
from assisted.bench.grown import load_target
from assisted.bench.table import markdown_table
from assisted.doctor.passes import bandwidth, memory
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel, Masks, is_sum_of_parts
from assisted.fast.fused import fused
from assisted.fast.graphs import CallSettings, Graphs

PROMPT = 160  # tokens
VERIFIED = 5  # columns of a verify pass: a draft of four tokens
FILES = ("engine/cache.py", "lengths/policies.py", "text.py", "distribution.py")
TARGETS = {"zoo:target": torch.float32, "grown:1b": torch.bfloat16, "grown:8b": torch.bfloat16}
DRAFTS: dict[str, tuple[Any, Any]] = {
    "draft model, 4 tokens": ("zoo:draft", 4),
    "draft model, adaptive": ("zoo:draft", "adaptive"),
    "draft model in nf4, 4 tokens": (DraftModel("zoo:draft", quantization="nf4"), 4),
    "suffix, 4 tokens": ("suffix", 4),
    "EAGLE-3, 4 levels": ("zoo:eagle3", 4),
}
PEER = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}


def prompts(device: str) -> list[Batch]:
    """Beginnings of files of this package."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    folder = Path(assisted.__file__).parent
    texts = [(folder / name).read_text() for name in FILES]
    found = [tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT].to(device) for text in texts]
    return [Batch("code", ids, torch.ones_like(ids)) for ids in found]


def drafted_by(target: PreTrainedModel) -> PreTrainedModel:
    """The shipped draft, where the target is and in its dtype."""
    return AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=target.dtype).to(target.device)


def contestants(target: PreTrainedModel, modes: list[str]) -> list[Contestant]:
    """Everyone who can serve this target on this machine; the others are named and left out."""
    found = [plain(target, compiled=False)[0]]
    found += [one for one in peers(target, drafted_by(target)) if one.setting == PEER]
    for name, (spec, length) in DRAFTS.items():
        for mode in modes:
            try:
                model = AssistedModelForCausalLM.from_models(target, draft=spec, draft_length=length, fast=mode)
            except Exception as error:  # what is not installed, or does not fit this target
                print(f"left out: {name}: {str(error)[:160]}")
                break
            found.append(of_model(f"{name}: {mode}", model))
    return found


def generate(target: PreTrainedModel, modes: list[str], inputs: list[Batch], rules: Rules) -> list[dict[str, Any]]:
    """Tokens a second of every contestant, and how much faster it is than plain decoding."""
    with Bars() as bars:
        measured = race(target, contestants(target, modes), inputs, rules, progress=bars)
    _, rows = summed_up(measured, inputs, greedy=True)
    for row in rows:
        if row.error is not None:
            print(f"left out: {row.name}: {row.error}")
    return [_row(one, row) for one, row in zip(measured, rows, strict=True) if row.error is None]


def _row(one: Measured, row: Row) -> dict[str, Any]:
    found = {
        "way": row.name,
        "tokens_per_second": round(1e3 / row.milliseconds_per_token, 1),
        "times_plain": round(row.speedup.ratio, 2),
        "same_as_plain": row.same,
        "prompts": row.rows,
    }
    model = one.contestant.model
    if model is not None:
        found |= {
            "tokens_per_pass": round(row.tokens_per_pass, 2),
            "acceptance_rate": round(row.acceptance_rate or 0.0, 3),
            "captured": model.graphs.captured,
            "eager_because": model.graphs.reason or model.graphs.obstacle,
        }
    return found


@torch.inference_mode()
def rate(model: PreTrainedModel, ids: torch.Tensor, columns: int, mode: str, passes: int, bare: bool = False) -> float:
    """Passes a second over so many columns behind a prompt, none of which is kept."""
    run = model if mode == "compile" else fused(model)
    runner = CachedModel(run, SlotCache(1, ids.shape[1] + 64), Masks.of(model), bare and is_sum_of_parts(run))
    Graphs().serve(runner, model, CallSettings(mode))
    runner.prefill(ids, None)
    tokens = ids[:, :columns].contiguous()
    for _ in range(4):
        runner(tokens)
    if mode != "eager":
        assert runner.graphs is not None and runner.graphs.reason is None, "these passes are not captured"
    started = now(ids.device)
    for _ in range(passes):
        runner(tokens)
    return passes / (now(ids.device) - started)


def passes(target: PreTrainedModel, ids: torch.Tensor, modes: list[str], count: int) -> dict[str, Any]:
    """What passes take, in milliseconds; and the share of the time in which the weights could be read at all."""
    draft = drafted_by(target)
    found: dict[str, Any] = {}
    for mode in modes:
        step = median(rate(draft, ids, 1, mode, count, bare=True) for _ in range(3))
        one, several = (median(rate(target, ids, columns, mode, count) for _ in range(3)) for columns in (1, VERIFIED))
        bound = memory(target, 1 / several)
        found["weights_gb"] = round(bound.weight_bytes / 1e9, 3)
        found[mode] = {
            "draft_step_ms": round(1e3 / step, 3),
            "pass_over_1_ms": round(1e3 / one, 3),
            f"pass_over_{VERIFIED}_ms": round(1e3 / several, 3),
            "share_of_memory_bound": round(bound.share[0], 3),
        }
    return found


def tables(results: list[dict[str, Any]], modes: list[str]) -> str:
    """The results as Markdown."""
    keys = {
        "draft step, ms": "draft_step_ms",
        "pass over 1, ms": "pass_over_1_ms",
        f"pass over {VERIFIED}, ms": f"pass_over_{VERIFIED}_ms",
    }
    rows = []
    for result in results:
        for mode in modes:
            row = result["passes"][mode]
            times = [f"{row[key]:.2f}" for key in keys.values()]
            rows.append([result["target"], mode, *times, f"{row['share_of_memory_bound']:.0%}"])
    lines = markdown_table(["target", "passes", *keys, "of the memory bound"], rows)
    for result in results:
        rows = [
            [
                row["way"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['times_plain']:.2f}",
                f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else "",
                f"{row['same_as_plain']} of {row['prompts']}",
            ]
            for row in result["generate"]
        ]
        header = [result["target"], "tokens/s", "times plain", "tokens a pass", "same text"]
        lines += ["", *markdown_table(header, rows)]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, len(FILES), without=("--threads", "--no-compile", "--docs", "--read"))
    parser.add_argument("--json", action="store_true", help="print the results as JSON, not as tables")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="which (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="measure compiled passes as well (minutes of compiling)")
    parser.add_argument("--passes", type=int, default=100, help="passes of one timing (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of one call (default: %(default)s)")
    parser.add_argument("--device", default="cuda", help="the device (default: %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    modes = ["eager", "graphs", *(["compile"] if args.compile else [])]
    inputs = prompts(args.device)[: args.prompts]
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    written: dict[str, Any] = {
        "machine": {"device": device, "torch": torch.__version__, "transformers": transformers.__version__},
        "copy_tb_per_second": round(bandwidth(torch.device(args.device)).high / 1e12, 3),
        "prompt": PROMPT,
        "new_tokens": args.new_tokens,
        "results": [],
    }
    for name in args.targets:
        dtype = TARGETS.get(name, torch.bfloat16)
        target = load_target(name, dtype, args.device)[0]
        written["results"].append(
            {
                "target": f"{name}, {str(dtype).removeprefix('torch.')}",
                "passes": passes(target, inputs[0].ids, modes, args.passes),
                "generate": generate(target, modes, inputs, Rules(args.new_tokens, args.repeats)),
            }
        )
        write_json(args.out, written)
        del target
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(written, indent=1) if args.json else tables(written["results"], modes))


if __name__ == "__main__":
    main()
