"""Drafting on a GPU, with forward passes run one operation at a time (eager) and captured in CUDA graphs.

    python benchmarks/gpu.py --out benchmarks/gpu.json

Targets: the shipped one in float32, and the same grown to about 1 and 7 billion parameters in bfloat16 (`assisted.bench.grown`:
the same text at the cost of a large model). All contestants continue the same pieces of Python greedily, in turns, by the
protocol of `assisted bench`. The first table has the times of forward passes, the others the speed of `generate`.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from tables import arguments, paired, raced, section, write_json
from transformers import AutoModelForCausalLM, PreTrainedModel

import assisted
from assisted import DraftModel, zoo
from assisted.bench import Contestant, Prompt, Rules, peers
from assisted.bench.clock import now
from assisted.bench.grown import load_target
from assisted.bench.table import markdown_table
from assisted.doctor.passes import bandwidth, memory
from assisted.drafters.model_drafter import ModelDrafter
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel, CallSettings, Runnable
from assisted.fast.fused import fused
from assisted.fast.graphs import Graphs
from assisted.fast.runner import open_runner

PROMPT = 160  # tokens
VERIFIED = 5  # columns of a verifying forward pass: a draft of four tokens
FILES = ("engine/cache.py", "lengths/policies.py", "text.py", "distribution.py")
FAST = {"graphs": "auto"}  # what `fast=` is for a mode
TARGETS = {"zoo:target": torch.float32, "grown:1b": torch.bfloat16, "grown:8b": torch.bfloat16}
DRAFTS: dict[str, tuple[Any, Any]] = {
    "draft model, 4 tokens": ("zoo:draft", 4),
    "draft model, adaptive": ("zoo:draft", "adaptive"),
    "draft model in nf4, 4 tokens": (DraftModel("zoo:draft", quantization="nf4"), 4),
    "suffix, 4 tokens": ("suffix", 4),
    "EAGLE-3, 4 levels": ("zoo:eagle3", 4),
}
PEER = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}


def prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """Beginnings of files of this package."""
    folder = Path(assisted.__file__).parent
    texts = {name: (folder / name).read_text() for name in FILES[:count]}
    return [
        Prompt(name, "code", text, tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT])
        for name, text in texts.items()
    ]


def drafted_by(target: PreTrainedModel) -> PreTrainedModel:
    """The shipped draft on the target's device, in its dtype."""
    return AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=target.dtype).to(target.device)


def contestants(target: PreTrainedModel, tokenizer: Any, modes: list[str]) -> list[Contestant]:
    """All that work for this target on this machine; the others are left out with a message."""
    found = [one for one in peers(target, drafted_by(target)) if one.setting == PEER]
    for name, (spec, length) in DRAFTS.items():
        for mode in modes:
            try:
                found += paired(target, tokenizer, {f"{name}: {mode}": (spec, length)}, FAST.get(mode, mode))
            except Exception as error:  # not installed, or does not fit this target
                print(f"left out: {name}: {str(error)[:160]}")
                break
    return found


def generate(
    target: PreTrainedModel, tokenizer: Any, modes: list[str], args: argparse.Namespace, name: str
) -> dict[str, Any]:
    """A race, and for each pair the number of captured forward passes, or why none are."""
    found = contestants(target, tokenizer, modes)
    pairs = {one.name: one.model for one in found if one.model is not None}
    some = next(iter(pairs.values()))
    result = raced(args, some, found, prompts(tokenizer, args.prompts), Rules(args.new_tokens), target=name)
    graphs = {
        name: {"captured": pair.graphs.captured, "eager_because": pair.graphs.reason or pair.graphs.obstacle}
        for name, pair in pairs.items()
    }
    return {"result": result.to_dict(), "graphs": graphs}


@torch.inference_mode()
def rate(model: PreTrainedModel, ids: torch.Tensor, columns: int, mode: str, passes: int, bare: bool = False) -> float:
    """Forward passes per second over some columns after a prompt; their keys and values are not kept."""
    holder, drafter, settings = Graphs(), ModelDrafter(model), CallSettings(FAST.get(mode, mode))
    cache = SlotCache(1, ids.shape[1] + 64)
    fuse = (drafter.fused if bare else fused) if mode != "compile" else Runnable
    runner = open_runner(model, lambda form: CachedModel(form, cache, drafter.masks), settings, holder, fuse)
    runner.prefill(ids, None)
    tokens = ids[:, :columns].contiguous()
    for _ in range(4):
        runner(tokens)
    if mode != "eager":
        assert runner.passes is holder and holder.reason is None, "these passes are not captured"
    started = now(ids.device)
    for _ in range(passes):
        runner(tokens)
    return passes / (now(ids.device) - started)


def passes(target: PreTrainedModel, ids: torch.Tensor, modes: list[str], count: int) -> dict[str, Any]:
    """Milliseconds of forward passes, and the share of the time that reading the weights takes at least."""
    draft = drafted_by(target)
    found: dict[str, Any] = {}
    for mode in modes:
        step = median(rate(draft, ids, 1, mode, count, bare=True) for _ in range(3))
        one, several = (median(rate(target, ids, columns, mode, count) for _ in range(3)) for columns in (1, VERIFIED))
        bound = memory(target, 1 / several)
        found["weights_gb"] = round(bound.weight_bytes / 1e9, 3)
        found[mode] = {
            "draft step, ms": round(1e3 / step, 3),
            "pass over 1, ms": round(1e3 / one, 3),
            f"pass over {VERIFIED}, ms": round(1e3 / several, 3),
            "of the memory bound": round(bound.share[0], 3),
        }
    return found


def tables(results: list[dict[str, Any]], modes: list[str]) -> str:
    """The results as Markdown."""
    rows = [
        [result["target"], mode, *(f"{value:.2f}" for value in result["passes"][mode].values())]
        for result in results
        for mode in modes
    ]
    lines = markdown_table(["target", "passes", *results[0]["passes"][modes[0]]], rows)
    per_second = {"tokens/s": lambda row: f"{1e3 / row.milliseconds_per_token:.0f}"}
    for result in results:
        columns = ("tokens/s", "times plain", "tokens per pass", "same tokens")
        lines += section(result["target"], result["generate"]["result"], columns, **per_second)
    return "\n".join(lines)


def main() -> None:
    numbers = {"--passes": (100, "forward passes of one timing"), "--new-tokens": (128, "tokens of one call")}
    parser = arguments(__doc__, ("--prompts", "--repeats", "--out"), prompts=len(FILES), numbers=numbers)
    parser.add_argument("--json", action="store_true", help="print the results as JSON, not as tables")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="which (default: %(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="measure compiled forward passes as well (minutes of compiling)"
    )
    parser.add_argument("--device", default="cuda", help="the device (default: %(default)s)")
    args = parser.parse_args()
    args.no_compile = not args.compile
    transformers.logging.set_verbosity_error()
    modes = ["eager", "graphs", *(["compile"] if args.compile else [])]
    written: dict[str, Any] = {
        "copy_tb_per_second": round(bandwidth(torch.device(args.device)).high / 1e12, 3),
        "prompt": PROMPT,
        "new_tokens": args.new_tokens,
        "results": [],
    }
    for name in args.targets:
        dtype = TARGETS.get(name, torch.bfloat16)
        target, tokenizer = load_target(name, dtype, args.device)
        (prompt,) = prompts(tokenizer, 1)
        written["results"].append(
            {
                "target": f"{name}, {str(dtype).removeprefix('torch.')}",
                "passes": passes(target, prompt.ids.to(target.device), modes, args.passes),
                "generate": generate(target, tokenizer, modes, args, name),
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
