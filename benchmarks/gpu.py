"""Drafting on a GPU, with passes called one operation after the other (eager) and captured in CUDA graphs.

    python benchmarks/gpu.py --out benchmarks/gpu.json

Targets: the shipped one in float32, and the same grown to about 1 and 7 billion parameters in bfloat16 (`assisted.bench.grown`:
the same text at the cost of a large model). Everyone continues the same pieces of Python, greedily, as many tokens; the ways
take turns at every prompt, speeds are medians. Two tables: what a pass takes, and what generating brings.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import assisted
from assisted import AssistedModelForCausalLM, DraftModel, zoo
from assisted.bench.grown import load_target
from assisted.drafters.model_drafter import ModelDrafter
from assisted.engine.cache import SlotCache
from assisted.engine.runner import CachedModel, CallSettings, Runnable
from assisted.fast.fused import fused
from assisted.fast.graphs import Graphs
from assisted.fast.runner import open_runner

PROMPT = 160  # tokens
VERIFIED = 5  # columns of a verify pass: a draft of four tokens
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
Generate = Callable[..., torch.Tensor]


@dataclass
class Way:
    """One way to generate: its calls, and what came of them.

    Args:
        generate: as plain `generate`.
        model: the pair behind it, None where the target runs alone or through transformers.
    """

    generate: Generate
    model: AssistedModelForCausalLM | None = None
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by prompt
    texts: dict[int, list[int]] = field(default_factory=dict)


def prompts(device: str) -> list[torch.Tensor]:
    """Beginnings of files of this package, [1, n] each."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    folder = Path(assisted.__file__).parent
    texts = [(folder / name).read_text() for name in FILES]
    return [tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT].to(device) for text in texts]


def contestants(target: PreTrainedModel, modes: list[str]) -> dict[str, Way]:
    """Everyone who can serve this target on this machine; the others are named and left out."""
    draft = AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=target.dtype).to(target.device)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ways = {
        "plain generate": Way(target.generate),
        "transformers, assistant_model, 4 tokens": Way(
            lambda ids, **k: target.generate(ids, assistant_model=draft, **k)
        ),
    }
    for name, (spec, length) in DRAFTS.items():
        for mode in modes:
            try:
                model = AssistedModelForCausalLM.from_models(
                    target, draft=spec, draft_length=length, fast=FAST.get(mode, mode)
                )
            except Exception as error:  # what is not installed, or does not fit this target
                print(f"left out: {name}: {str(error)[:160]}")
                break
            ways[f"{name}: {mode}"] = Way(model.generate, model)
    return ways


def run(way: Way, number: int, ids: torch.Tensor, new: int) -> None:
    """One call, its end tokens ignored."""
    _wait(ids.device)
    started = time.perf_counter()
    output = way.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    _wait(ids.device)
    way.seconds.setdefault(number, []).append(time.perf_counter() - started)
    way.texts[number] = output[0, ids.shape[1] :].tolist()


def race(ways: dict[str, Way], inputs: list[torch.Tensor], new: int, repeats: int, what: str) -> list[dict[str, Any]]:
    """Tokens a second of every way, and against plain: the median over prompts of the ratio at each."""
    for name, way in ways.items():
        short = way.model is None or name.endswith("eager")
        for number, ids in enumerate(inputs[:1] if short else inputs):
            for _ in range(1 if short else 2):
                run(way, number, ids, 8 if short else new)
        way.seconds.clear()
        if way.model is not None:
            way.model.reset_totals()
    order = list(ways)
    for _ in tqdm(range(repeats), desc=what, unit="round"):
        for number, ids in enumerate(inputs):
            for name in order:
                run(ways[name], number, ids, new)
            order = order[1:] + order[:1]
    rows = []
    plain = ways["plain generate"]
    for name, way in ways.items():
        typical = {number: statistics.median(seconds) for number, seconds in way.seconds.items()}
        ratios = [statistics.median(plain.seconds[number]) / seconds for number, seconds in typical.items()]
        row = {
            "way": name,
            "tokens_per_second": round(new / statistics.mean(typical.values()), 1),
            "times_plain": round(statistics.median(ratios), 2),
            "same_as_plain": sum(way.texts[number] == plain.texts[number] for number in typical),
            "prompts": len(typical),
        }
        if way.model is not None:
            row |= {
                "tokens_per_pass": round(way.model.totals.tokens_per_pass, 2),
                "acceptance_rate": round(way.model.totals.acceptance_rate or 0.0, 3),
                "captured": way.model.graphs.captured,
                "eager_because": way.model.graphs.reason or way.model.graphs.obstacle,
            }
        rows.append(row)
    return rows


@torch.inference_mode()
def rate(model: PreTrainedModel, ids: torch.Tensor, columns: int, mode: str, passes: int, bare: bool = False) -> float:
    """Passes a second over so many columns behind a prompt, none of which is kept."""
    holder, drafter = Graphs(), ModelDrafter(model)
    cache = SlotCache(1, ids.shape[1] + 64)
    fuse = (drafter.fused if bare else fused) if mode != "compile" else Runnable
    runner = open_runner(
        model, lambda form: CachedModel(form, cache, drafter.masks), CallSettings(FAST.get(mode, mode)), holder, fuse
    )
    runner.prefill(ids, None)
    tokens = ids[:, :columns].contiguous()
    for _ in range(4):
        runner(tokens)
    if mode != "eager":
        assert runner.passes is holder and holder.reason is None, "these passes are not captured"
    _wait(ids.device)
    started = time.perf_counter()
    for _ in range(passes):
        runner(tokens)
    _wait(ids.device)
    return passes / (time.perf_counter() - started)


def passes(target: PreTrainedModel, ids: torch.Tensor, modes: list[str], count: int, speed: float) -> dict[str, Any]:
    """What passes take, in milliseconds; and the share of the time in which the weights could be read at all.

    speed: bytes a second of a copy on the device, counting what is read and what is written.
    """
    draft = AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=target.dtype).to(target.device)
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    read = sum(p.numel() * p.element_size() for p in target.parameters())
    if embedding is not output:
        read -= embedding.numel() * embedding.element_size()
    found: dict[str, Any] = {"weights_gb": round(read / 1e9, 3)}
    for mode in modes:
        step = [rate(draft, ids, 1, mode, count, bare=True) for _ in range(3)]
        one = [rate(target, ids, 1, mode, count) for _ in range(3)]
        several = [rate(target, ids, VERIFIED, mode, count) for _ in range(3)]
        found[mode] = {
            "draft_step_ms": round(1e3 / statistics.median(step), 3),
            "pass_over_1_ms": round(1e3 / statistics.median(one), 3),
            f"pass_over_{VERIFIED}_ms": round(1e3 / statistics.median(several), 3),
            "share_of_memory_bound": round(read / speed * statistics.median(several), 3),
        }
    return found


def copy_speed(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    size = 2**30 if device == "cuda" else 2**24
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    other = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _wait(source.device)
        started = time.perf_counter()
        other.copy_(source)
        _wait(source.device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / min(seconds)


def tables(results: list[dict[str, Any]], modes: list[str]) -> str:
    """The results as Markdown."""
    lines = [
        f"| target | passes | draft step, ms | pass over 1, ms | pass over {VERIFIED}, ms | of the memory bound |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for mode in modes:
            row = result["passes"][mode]
            lines.append(
                f"| {result['target']} | {mode} | {row['draft_step_ms']:.2f} | {row['pass_over_1_ms']:.2f} "
                f"| {row[f'pass_over_{VERIFIED}_ms']:.2f} | {row['share_of_memory_bound']:.0%} |"
            )
    for result in results:
        lines += [
            "",
            f"| {result['target']} | tokens/s | times plain | tokens a pass | same text |",
            "|---|---|---|---|---|",
        ]
        for row in result["generate"]:
            per_pass = f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else ""
            lines.append(
                f"| {row['way']} | {row['tokens_per_second']:.0f} | {row['times_plain']:.2f} | {per_pass} "
                f"| {row['same_as_plain']} of {row['prompts']} |"
            )
    return "\n".join(lines)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="write the results here, as JSON; after every target")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, not as tables")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), help="which (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="measure compiled passes as well (minutes of compiling)")
    parser.add_argument("--passes", type=int, default=100, help="passes of one timing (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of one call (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=len(FILES), help="how many (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="calls of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda", help="the device (default: %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    modes = ["eager", "graphs", *(["compile"] if args.compile else [])]
    inputs = prompts(args.device)[: args.prompts]
    speed = copy_speed(args.device)
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    written: dict[str, Any] = {
        "machine": {"device": device, "torch": torch.__version__, "transformers": transformers.__version__},
        "copy_tb_per_second": round(speed / 1e12, 3),
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
                "passes": passes(target, inputs[0], modes, args.passes, speed),
                "generate": race(contestants(target, modes), inputs, args.new_tokens, args.repeats, name),
            }
        )
        if args.out:
            args.out.write_text(json.dumps(written, indent=1) + "\n")
        del target
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(written, indent=1) if args.json else tables(written["results"], modes))


if __name__ == "__main__":
    main()
