"""The measurements of the case `gpu`: every section is a list of items, every item a function that returns figures.

Targets: the shipped one, and the same grown to about 1 and 7 billion parameters (`tools.grown`: the same text at the
cost of a large model). All methods continue pieces of Python greedily, in turns, by the protocol of `assisted bench`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import accelerate
import cases.contexts as long_contexts
import torch
import transformers
from cases.memory import call_twice, counted
from shared import paired, raced
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import assisted
from assisted import MTP, AssistedModelForCausalLM, DraftModel, DraftTree, Eagle, Merged, zoo
from assisted.engine.cache import SlotCache
from assisted.engine.prepared import CallSettings
from assisted.engine.runner import CachedModel
from assisted.fast.fused import prepare
from assisted.fast.graphs import Graphs
from assisted.lab.audit import Model, Settings, audit
from assisted.lab.bench import Bars, Method, Prompt, Rules, batches, pad_token, peers
from assisted.lab.bench.clock import now
from assisted.lab.bench.results import largest_gap, machine
from assisted.lab.doctor.passes import bandwidth, memory
from assisted.lab.grown import shipped_head
from assisted.lengths import Adaptive, Fixed
from assisted.lengths.policies import Never
from assisted.loading.packed import PackedConfig
from assisted.loading.vocabulary import find_tokenizer
from assisted.methods.shared.model_drafter import ModelDrafter
from tools.grown import load_target, save

Measure = Callable[[], dict[str, Any]]
GB = 10**9
PROMPT = 160  # tokens
TRAINING_SECONDS = 480
PROFILED, MOST_KERNELS = 10, 16  # forward passes, and rows of the table
TEMPERATURE = 0.8  # where tokens are sampled
WAYS = {"sampled": {"temperature": TEMPERATURE, "top_p": 0.95}, "greedy": {}}
"""Sampled text first: greedy text of a grown target repeats itself, which flatters every draft."""
VERIFIED = 5  # columns of a verifying forward pass: a draft of four tokens
MODES = {"eager": "eager", "captured": "auto"}  # how forward passes run, and the `fast=` for it
PASSES = {**MODES, "compiled and captured": "compile"}
HYBRID = "hybrid in float32"
FULL = ("float32", "bfloat16")
"""Dtypes in which every draft is compared with plain `generate`; the other targets take SOME of the drafts."""
TARGETS = (*FULL, "float16", "nf4", "int8", HYBRID)
SOME = ("zoo:draft", "zoo:draft, adaptive", "suffix", "zoo:eagle3", "zoo:medusa")
OF_HYBRIDS = ("MTP, chains", "MTP, trees", "suffix", "recycle", "self:nf4", "early-exit:8")
SIMPLE = (
    "zoo:draft",
    "suffix",
    "zoo:eagle3",
    "zoo:medusa",
    "self:nf4",
    "self:int8",
    "ngram",
    "recycle",
    "early-exit:8",
)
DRAFTS: dict[str, tuple[Any, Any]] = {
    **{name: (name, 4) for name in (*SIMPLE, "layer-skip", "zoo:draft-other-tokenizer")},
    "zoo:draft, adaptive": ("zoo:draft", "adaptive"),
    "suffix and zoo:eagle3": (["suffix", "zoo:eagle3"], "adaptive"),
    "draft-tree:zoo:draft": ("draft-tree:zoo:draft", 8),
    "merged trees": (Merged(["zoo:draft", "suffix"]), 8),
    **{f"zoo:draft in {how}": (DraftModel("zoo:draft", quantization=how), 4) for how in ("nf4", "int8")},
}
"""By name: the draft and its length."""
MTPS: dict[str, tuple[Any, Any]] = {"MTP, chains": (MTP(tree=False), 3), "MTP, trees": (MTP(tree=True), 8)}
"""Of hybrids."""
NO_DRAFT: dict[str, tuple[Any, Any]] = {"no draft, this loop": ("ngram", Never())}
FEW = NO_DRAFT | {
    "draft model, 4 tokens": ("zoo:draft", 4),
    "draft model, adaptive": ("zoo:draft", "adaptive"),
    "suffix, adaptive": ("suffix", "adaptive"),
}
COPIES = NO_DRAFT | {
    f"self:{how}, {length}": (f"self:{how}", length) for length in (4, "adaptive") for how in ("int4", "nf4")
}
PEER = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}


@dataclass(frozen=True)
class Sizes:
    """How large everything is: of a run, or of one that only tries the script."""

    targets: dict[str, torch.dtype]
    batched: str  # the target of several sections
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    capped: str  # the target that does not fit
    new_tokens: int
    passes: int
    prompts: int
    repeats: int
    cap: int = 12 * GB
    compiled: bool = True
    trained: str = "zoo:smollm2"  # the target of the section `train`, and further arguments of its command
    training: tuple[str, ...] = (
        *("--chats", "600000", "--steps", "3000"),
        *("--dtype", "bfloat16", "--bfloat16", "--store", "bfloat16"),
    )
    trees: tuple[int | None, ...] = (None, 64)  # nodes, None for a size by measured costs


CARD = Sizes(
    {"grown:1b": torch.bfloat16, "grown:8b": torch.bfloat16},
    *("grown:1b", (8, 32), (16384, 512), "grown:8b", 64, 50, 2, 2),
)
TINY = Sizes(
    *({"zoo:target": torch.float32}, "zoo:target", (2,), (64,), "zoo:target", 6, 2, 1, 1),
    compiled=False,
    trained="zoo:target",
    training=("--text", "zoo", "--steps", "2", "--batch", "2", "--context", "32"),
    trees=(64,),
)
SIZES = {"full": CARD, "quick": TINY}


def serve(device: str, size: str) -> Callable[..., Any]:
    """For a Worker: the machine; or the names of a section's items, in the order of their value; or the figures of one, or its
    error, which is "lost" where the process can't be used any more. size: a name of SIZES."""
    transformers.logging.set_verbosity_error()

    def job(section: str | None = None, item: str | None = None) -> Any:
        if section is None:
            return about(torch.device(device))
        items = dict(SECTIONS[section](torch.device(device), SIZES[size]))
        if item is None:
            return list(items)
        started = time.monotonic()
        try:
            return {**items[item](), "seconds": round(time.monotonic() - started, 1)}
        except Exception as error:
            lost = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
            lost = lost and not isinstance(error, torch.OutOfMemoryError)
            return {"error": f"{type(error).__name__}: {str(error)[:400]}", "lost": lost}
        finally:
            tidy()

    return job


def about(device: torch.device) -> dict[str, Any]:
    """The machine, and what a copy on it reaches."""
    found = machine(device, torch.float32)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"processor": properties.name, "memory": properties.total_memory}
    return found | {"copy_tb_per_second": round(bandwidth(device).high / 1e12, 3)}


def tidy() -> None:
    """Give back what the last item held."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompts_of(tokenizer: Any, count: int, device: torch.device) -> list[Prompt]:
    """Beginnings of files of this package, on the device."""
    folder = Path(assisted.__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.name):
        text = path.read_text()
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT].to(device)
        if ids.shape[1] == PROMPT:
            found.append(Prompt(path.name, "code", text, ids))
        if len(found) == count:
            return found
    raise ValueError(f"prompts: {count} wanted, {len(found)} there")


def drafted_by(target: PreTrainedModel) -> PreTrainedModel:
    """The shipped draft on the target's device, in its dtype."""
    return AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=target.dtype).to(target.device)


def loaded(path: Any, how: str, device: torch.device) -> PreTrainedModel:
    """A folder's model in a dtype, in 4 bits of this package, or in 4 or 8 bits by bitsandbytes."""
    if how == "int4":
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=PackedConfig(4), device_map={"": device}
        )
    if how not in ("nf4", "int8"):
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, how)).to(device)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    config = config if how == "nf4" else BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=config, device_map={"": device}
    )


def new_tokens(run: Callable[..., Any], ids: torch.Tensor, mask: torch.Tensor | None = None, **call: Any) -> list[Any]:
    """The new tokens of each row."""
    mask = torch.ones_like(ids) if mask is None else mask
    return run(ids, attention_mask=mask, **call)[:, ids.shape[1] :].tolist()


def captures(pair: AssistedModelForCausalLM, key: str = "eager_because") -> dict[str, Any]:
    """The number of captured forward passes, or why there are none."""
    return {"captured": pair.graphs.captured, key: pair.graphs.reason or pair.graphs.obstacle or ""}


# -- identity ---------------------------------------------------------------------------------------------------------------


def identity(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Every draft on targets of every dtype, eager and captured, one row and batches of four."""
    drafts = list(DRAFTS) if sizes is not TINY else ["zoo:draft", "suffix"]
    for kind in TARGETS if device.type == "cuda" else FULL[:1]:
        for name in drafts if kind in FULL else OF_HYBRIDS if kind == HYBRID else SOME:
            yield f"{kind}, {name}", partial(texts_of, kind, name, device, sizes)


@torch.inference_mode()
def texts_of(kind: str, name: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """How many texts are plain's, and by how much the tokens at the first differences are apart, by mode."""
    folder = zoo.folder("hybrid" if kind == HYBRID else "target")
    dtype = kind.split()[-1]
    target = loaded(folder, dtype, device)
    spec, length = (DRAFTS | MTPS)[name]
    modes: dict[str, Any] = {}
    for mode, fast in MODES.items():
        pair = AssistedModelForCausalLM.from_models(target, spec, length, find_tokenizer(folder), fast=fast)
        same = rows = 0
        gaps = []
        prompts = prompts_of(pair.tokenizer, sizes.prompts, device)
        call = Rules(sizes.new_tokens // 2).call(pad_token(pair.tokenizer))
        for size in (1, 4)[: 2 if sizes is not TINY else 1]:
            work = [one.to(device) for one in batches(prompts, size, pad_token(pair.tokenizer))]
            for batch in work:
                right, wrote = (
                    new_tokens(run, batch.ids, batch.attention_mask, **call) for run in (target.generate, pair.generate)
                )
                same += sum(map(list.__eq__, right, wrote))
                rows += len(right)
                gaps.append(largest_gap(target, [batch], right, wrote))
        known = [gap for gap in gaps if gap is not None]
        modes[mode] = {
            "same": same,
            "rows": rows,
            "largest_gap": max(known, default=None),
            "tokens_per_pass": pair.totals.tokens_per_pass,
            **captures(pair),
        }
    if dtype == "float32" and any(one["same"] < one["rows"] for one in modes.values()):
        raise AssertionError(f"other texts than plain's in float32: {modes}")
    return {"modes": modes}


# -- rounds and forward passes ----------------------------------------------------------------------------------------------


def rounds(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Milliseconds of a round, and of what it does outside of the target's forward pass."""
    for name in sizes.targets:
        for way in WAYS:
            yield f"{name}, {way}", partial(rounds_of, name, way, device, sizes)


@torch.inference_mode()
def rounds_of(name: str, way: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Of calls with one row, from the end of their first round on. The target's pass is that of captured passes alone."""
    target, tokenizer = load_target(name, sizes.targets[name], device)
    prompts = prompts_of(tokenizer, sizes.prompts, device)
    alone = {n: 1e3 / rate(target, prompts[0].ids, n, "captured", sizes.passes) for n in (1, VERIFIED)}
    head = Eagle("zoo:eagle3" if name == "zoo:target" else shipped_head(target), tree=False)
    drafts = FEW | {"suffix, 4 tokens": ("suffix", 4), "EAGLE-3, 4 tokens": (head, 4)}
    call, rows = Rules(sizes.new_tokens, **WAYS[way]).call(pad_token(tokenizer)), []
    for title, (spec, length) in drafts.items():
        pair = AssistedModelForCausalLM.from_models(target, spec, length, tokenizer)
        pair.warm_up(PROMPT + sizes.new_tokens + 16, do_sample=way == "sampled")
        ends: list[float] = []  # of the rounds of a call
        pair.watch = lambda _, ends=ends: ends.append(time.perf_counter())
        for _ in range(2):  # the first time measures nothing
            pair.reset_totals()
            each = []
            for number, one in enumerate(prompts):
                ends.clear()
                torch.manual_seed(number)
                new_tokens(pair.generate, one.ids, **call)
                each += [1e3 * (after - before) for before, after in pairwise(ends)]
        found, whole = pair.totals, sum(each) / max(1, len(each))
        own = alone[1 if title in NO_DRAFT else VERIFIED]
        row = {"a round, ms": whole, "drafting, ms": 1e3 * found.draft_seconds / found.target_passes}
        row |= {"the target's pass, ms": own, "outside of it, ms": whole - own, "tokens": found.tokens_per_pass}
        rows.append({"draft": title, **row, **captures(pair, "eager because")})
    return {"rows": rows}


def forward_passes(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Forward passes of every target: how long they take, and what they are made of, kernel by kernel."""
    for name in reversed(sizes.targets):
        yield f"{name}, times", partial(times_of, name, device, sizes)
        for mode in PASSES if device.type == "cuda" else MODES:
            yield f"{name}, kernels, {mode}", partial(kernels_of, name, mode, device, sizes)


def times_of(name: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    target, tokenizer = load_target(name, sizes.targets[name], device)
    (prompt,) = prompts_of(tokenizer, 1, device)
    found = passes(target, prompt.ids, sizes.passes)
    return {"rows": [{"passes": mode, **times} for mode, times in found.items()]}


@torch.inference_mode()
def kernels_of(name: str, mode: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The kernels of a forward pass over a few columns that take the most time; on a CPU, its operations."""
    target, tokenizer = load_target(name, sizes.targets[name], device)
    (prompt,) = prompts_of(tokenizer, 1, device)
    run = passing(target, prompt.ids, VERIFIED, mode)
    on_card = device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_card else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        started = now(device)
        for _ in range(PROFILED):
            run()
        taken = 1e6 * (now(device) - started) / PROFILED
    spent = "self_device_time_total" if on_card else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, spent))
    rows = [
        {"kernel": event.key[:80], "calls": event.count / PROFILED, "us of a pass": getattr(event, spent) / PROFILED}
        for event in events
    ]
    total = sum(row["us of a pass"] for row in rows)
    whole = {"kernel": "all", "calls": sum(row["calls"] for row in rows), "us of a pass": total}
    return {"rows": [{"kernel": "a pass by the clock", "calls": 1, "us of a pass": taken}, whole, *rows[:MOST_KERNELS]]}


# -- speed ------------------------------------------------------------------------------------------------------------------


def speed(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """`generate` with every target, against its fastest plain mode."""
    for way in WAYS:
        for name in sizes.targets:
            yield f"{name}, {way}", partial(speed_of, name, way, device, sizes)


def speed_of(name: str, way: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    target, tokenizer = load_target(name, sizes.targets[name], device)
    head = Eagle("zoo:eagle3" if name == "zoo:target" else shipped_head(target), tree=False)
    drafts = FEW | {"EAGLE-3, 4 tokens": (head, 4), "EAGLE-3, adaptive": (head, "adaptive")}
    found = [one for one in peers(target, drafted_by(target)) if one.setting == PEER]
    return race(target, tokenizer, found, drafts, device, sizes, name, way)


def copied(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """4-bit copies of the target as drafts: torch's own product, and bitsandbytes'."""
    for name, dtype in reversed(sizes.targets.items()):
        yield name, partial(few_of, device, sizes, name, dtype, drafts=COPIES)


def race(
    target: PreTrainedModel,
    tokenizer: Any,
    found: list[Method],
    drafts: Mapping[str, tuple[Any, Any]],
    device: torch.device,
    sizes: Sizes,
    name: str,
    way: str = "sampled",
    batch: int = 1,
) -> dict[str, Any]:
    """A race by the protocol, and for each pair the number of captured forward passes, or why none are. drafts: those that
    cannot be loaded are left out with a message."""
    found = found + paired(target, tokenizer, drafts, lenient=True)
    for one in found:
        if one.model is not None:
            one.model.warm_up(PROMPT + sizes.new_tokens + 16, batch, do_sample=way == "sampled")
    pairs = {one.name: one.model for one in found if one.model is not None}
    count = batch * max(1, sizes.prompts // batch)
    rules = argparse.Namespace(prompts=count, repeats=sizes.repeats, threads=None, no_compile=not sizes.compiled)
    prompts = prompts_of(tokenizer, count, device)
    how = Rules(sizes.new_tokens, **WAYS[way])
    result = raced(rules, next(iter(pairs.values())), found, prompts, how, batch, target=name)
    return {"result": result.to_dict(), "graphs": {name: captures(pair) for name, pair in pairs.items()}}


def passes(target: PreTrainedModel, ids: torch.Tensor, count: int) -> dict[str, Any]:
    """Milliseconds of forward passes by mode, and the share of the time that reading the weights takes at least."""
    draft = drafted_by(target)
    found = {}
    for mode in PASSES if ids.is_cuda else MODES:
        step = median(rate(draft, ids, 1, mode, count, bare=True) for _ in range(3))
        one, several = (median(rate(target, ids, columns, mode, count) for _ in range(3)) for columns in (1, VERIFIED))
        found[mode] = {
            "draft step, ms": round(1e3 / step, 3),
            "over 1 position, ms": round(1e3 / one, 3),
            f"over {VERIFIED} positions, ms": round(1e3 / several, 3),
            "of the memory bound": round(memory(target, 1 / several).share[0], 3),
        }
    return found


@torch.inference_mode()
def rate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    columns: int,
    mode: str,
    count: int,
    bare: bool = False,
) -> float:
    """Forward passes per second over some positions after a prompt; their keys and values are not kept."""
    run = passing(model, ids, columns, mode, bare)
    started = now(ids.device)
    for _ in range(count):
        run()
    return count / (now(ids.device) - started)


def passing(
    model: PreTrainedModel, ids: torch.Tensor, columns: int, mode: str, bare: bool = False
) -> Callable[[], Any]:
    """A function that runs such a forward pass, once it has been captured."""
    holder, drafter, settings = Graphs(), ModelDrafter(model), CallSettings(PASSES[mode])
    cache = SlotCache(1, ids.shape[1] + 64)
    prepared = prepare(model, settings, drafter.fused if bare else None)
    runner = holder.serve(CachedModel(prepared, cache, drafter.masks), model, settings)
    runner.prefill(ids, None)
    tokens = ids[:, :columns].contiguous()
    for _ in range(4):
        runner(tokens)
    if ids.is_cuda and mode != "eager" and (runner.passes is not holder or holder.reason is not None):
        raise RuntimeError(f"forward passes are not captured: {holder.reason or holder.obstacle}")
    return partial(runner, tokens)


# -- batches, quantized targets ---------------------------------------------------------------------------------------------


def batched(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Rows decoded together."""
    name = sizes.batched
    for rows in sizes.batches:
        yield f"{name}, {rows} rows", partial(few_of, device, sizes, name, sizes.targets[name], rows)


def quantized_targets(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Targets in 4 and 8 bits: of this package, and of bitsandbytes. They are not compiled."""
    small, name = replace(sizes, compiled=False), sizes.batched
    for how in ("int4", "nf4", "int8") if device.type == "cuda" else ("int4",):
        yield f"{name}, {how}", partial(few_of, device, small, name, sizes.targets[name], how=how)


def few_of(
    device: torch.device,
    sizes: Sizes,
    name: str,
    dtype: torch.dtype,
    rows: int = 1,
    how: str | None = None,
    drafts: Mapping[str, tuple[Any, Any]] = FEW,
) -> dict[str, Any]:
    if how is None:
        target, tokenizer = load_target(name, dtype, device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = saved(name, device, Path(folder))
            target = loaded(folder, how, device)
    return race(target, tokenizer, [], drafts, device, sizes, name + (f" in {how}" if how else ""), batch=rows)


def saved(name: str, device: torch.device, folder: Path, long: bool = False) -> Any:
    """Write a target into a folder; its tokenizer. long: one that reads more tokens than it was trained on."""
    target, tokenizer = load_target(name, torch.bfloat16, device)
    if long:
        target.config.max_position_embeddings = long_contexts.POSITIONS
        target.config.rope_parameters = dict(long_contexts.YARN)
    save(target, folder, tokenizer) if name.startswith("grown:") else target.save_pretrained(folder)
    del target
    tidy()
    return tokenizer


# -- memory -----------------------------------------------------------------------------------------------------------------

LOADS: tuple[dict[str, Any], ...] = (
    {"context": 2048},
    {"context": 2048, "draft": "zoo:draft"},
    {"context": 2048, "quantization": "nf4"},
    {"context": 8192, "rows": 8, "draft": "zoo:draft"},
)
"""Of the same grown target. Weights are random where nothing is said of text: memory does not depend on them."""


def memory_loads(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """The peak of a load and two calls, beside the plan."""
    for load in LOADS if sizes is not TINY else [{"context": 256}]:
        title = ", ".join(f"{name} {value}" for name, value in load.items())
        yield title, partial(memory_of, load, device, sizes)


def memory_of(load: dict[str, Any], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Bytes: planned, in use on the card after the calls, and torch's peaks. The card has to be otherwise empty."""
    load = {"dtype": "bfloat16", **load}
    keywords = {name: load[name] for name in ("draft", "fast") if name in load}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
        saved(sizes.batched, device, Path(folder), long=True)
        if keywords.get("draft") == "zoo:draft":  # one that reads as many tokens as the target
            keywords["draft"] = beside
            long_contexts.long_model("draft", dtype=torch.bfloat16).save_pretrained(beside)
            find_tokenizer(zoo.folder("draft")).save_pretrained(beside)
        found = counted({**load, **keywords, "target": folder}, device.type)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if load.get("quantization"):
            pair = AssistedModelForCausalLM.from_models(loaded(folder, load["quantization"], device), **keywords)
        else:
            more = {"dtype": getattr(torch, load["dtype"]), "device_map": {"": device}, **keywords}
            pair = AssistedModelForCausalLM.from_pretrained(folder, **more)
    call_twice(pair, load.get("rows", 1), load["context"])
    if device.type != "cuda":
        return {"used": found["plan"], "reserved": 0, "allocated": 0, **found}
    free, total = torch.cuda.mem_get_info(device)
    peaks = {"reserved": torch.cuda.max_memory_reserved(device), "allocated": torch.cuda.max_memory_allocated(device)}
    return {"used": total - free, **peaks, **found}


# -- a target larger than the card ------------------------------------------------------------------------------------------


def offload(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Token trees for a target of which a part stays in main memory: by size, and the size chosen by measured costs."""
    for nodes in sizes.trees:
        name = "size by measured costs" if nodes is None else f"tree of {nodes}"
        yield name, partial(offload_of, nodes, device, sizes)


def offload_of(nodes: int | None, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Plain `generate` and one tree size, in turns."""
    target, tokenizer = load_target(sizes.capped, torch.bfloat16 if sizes is not TINY else torch.float32, device)
    if device.type == "cuda":
        room = {0: sizes.cap - 3 * GB, "cpu": 1000 * GB}
        kinds = target._no_split_modules and list(target._no_split_modules)
        places = accelerate.infer_auto_device_map(target, max_memory=room, no_split_module_classes=kinds)
        target = accelerate.dispatch_model(target.cpu(), places)
        tidy()
        torch.cuda.set_per_process_memory_fraction(sizes.cap / torch.cuda.get_device_properties(device).total_memory)
    else:
        target = accelerate.cpu_offload(target, execution_device=device)
    moved = sum(weight.nbytes for weight in target.parameters() if weight.device.type == "meta")
    draft = AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=target.dtype).to(device)
    length = Adaptive() if nodes is None else Fixed(64)
    pair = AssistedModelForCausalLM.from_models(target, DraftTree(draft, nodes=nodes), length, tokenizer)
    call = Rules(min(32, sizes.new_tokens)).call(pad_token(tokenizer))
    prompts = prompts_of(tokenizer, min(2, sizes.prompts), device)
    texts: dict[str, list[Any]] = {}
    seconds: dict[str, float] = {}
    for name, run in {"warm": pair.generate, "plain": target.generate, "tree": pair.generate}.items():
        if name == "tree":
            pair.reset_totals()
        started = now(device)
        texts[name] = [new_tokens(run, one.ids, **call) for one in prompts]
        seconds[name] = now(device) - started
    tokens = sum(len(text[0]) for text in texts["plain"])
    return {
        "rows": [
            {
                "offloaded, GB": moved / GB,
                "plain, s per token": seconds["plain"] / tokens,
                "trees, s per token": seconds["tree"] / tokens,
                "speedup": seconds["plain"] / seconds["tree"],
                "tokens per forward pass": pair.totals.tokens_per_pass,
                "same texts": f"{sum(map(list.__eq__, texts['plain'], texts['tree']))} of {len(prompts)}",
            }
        ]
    }


# -- contexts ---------------------------------------------------------------------------------------------------------------


def contexts(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """Decoding after long prompts; the rotary angles reach 40,960 positions."""
    for context in sizes.contexts:
        yield f"{sizes.batched}, {context} tokens", partial(context_of, context, device, sizes)


def context_of(context: int, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    size = sizes.batched.removeprefix("grown:") if sizes.batched.startswith("grown:") else None
    target = long_contexts.long_model("target", size, sizes.targets[sizes.batched], device)
    named = ["draft, Fixed(tokens=4)", "draft, Adaptive()", "suffix, Adaptive()"]
    own = [*paired(target, None, NO_DRAFT), *long_contexts.methods(target, named)]
    rules = argparse.Namespace(
        prompts=min(2, sizes.prompts), repeats=sizes.repeats, new_tokens=max(8, sizes.new_tokens // 2), no_compile=True
    )
    with Bars() as bars:
        rows = long_contexts.measure_context(target, own, context, rules, bars)
    shown = ("name", "milliseconds_per_token", "tokens_per_pass", "acceptance_rate")
    plain = rows[0]["milliseconds_per_token"]
    return {
        "rows": [
            {name: row[name] for name in shown if name in row}
            | {"speedup": plain / row["milliseconds_per_token"], "same texts": f"{row['same']} of {row['prompts']}"}
            for row in rows
        ]
    }


# -- to the bit -------------------------------------------------------------------------------------------------------------

OF_BITS = (
    *("zoo:draft", "suffix", "zoo:eagle3", "zoo:medusa", "self:int8", "early-exit:8", "layer-skip", "recycle"),
    *("zoo:draft-other-tokenizer", "draft-tree:zoo:draft", "merged trees"),
)
PLAIN_AND_DRAWN: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "temperature": TEMPERATURE, "top_p": 0.95})


def bits(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """`exact="bits"`: hashes of tokens and logits under every draft."""
    for kind in ("bfloat16", "float32", "float16", "nf4") if device.type == "cuda" else ("float32",):
        yield f"{kind}, texts", partial(bits_of, kind, device, sizes)


@torch.inference_mode()
def bits_of(kind: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Whether all drafts and lengths give the bytes of `assisted=False`, greedy and sampled, in a batch and alone."""
    folder = zoo.folder("target")
    target, tokenizer = loaded(folder, kind, device), find_tokenizer(folder)
    new = min(40, sizes.new_tokens)
    short, long = (one.ids for one in prompts_of(tokenizer, 2, device))
    ids = torch.cat([short, long])
    mask = torch.ones_like(ids)
    ids[0, :90], mask[0, :90] = pad_token(tokenizer), 0
    call = {"max_new_tokens": new, "min_new_tokens": new, "return_dict_in_generate": True, "output_logits": True}

    def made(pair: Any, rows: slice, **options: Any) -> tuple[str, torch.Tensor]:
        torch.manual_seed(0)
        first = int((1 - mask[rows]).sum(1).min())
        given = {"attention_mask": mask[rows, first:], "pad_token_id": pad_token(tokenizer)}
        found = pair.generate(ids[rows, first:], **given, **({"do_sample": False} | call | options))
        tokens, logits = found.sequences[:, -new:].cpu(), torch.stack(found.logits, 1).float().cpu()
        return hashlib.sha256(tokens.numpy().tobytes() + logits.numpy().tobytes()).hexdigest()[:16], logits

    rows = []
    for name in OF_BITS if kind in FULL and sizes is not TINY else OF_BITS[:4]:
        spec = DRAFTS[name][0]
        pair = AssistedModelForCausalLM.from_models(target, spec, 4, tokenizer, exact="bits")
        for options in PLAIN_AND_DRAWN:
            plain, logits = made(pair, slice(None), assisted=False, **options)
            hashes = [made(pair, slice(None), draft_length=length, **options)[0] for length in (1, 4, "adaptive")]
            row = {"draft": name, "sampled": bool(options), "plain": plain, "same": f"{hashes.count(plain)} of 3"}
            if not options:
                alone = [made(pair, slice(place, place + 1))[1][0] for place in range(2)]
                row["rows alone"] = f"{sum(map(torch.equal, alone, logits))} of 2"
            row["tokens per forward pass"] = pair.totals.tokens_per_pass
            rows.append(row | captures(pair, "eager because"))
    different = [row for row in rows if row["same"] != "3 of 3" or row.get("rows alone", "2 of 2") != "2 of 2"]
    if different or len({(row["sampled"], row["plain"]) for row in rows}) > 2:
        raise AssertionError(f"other bits: {different or rows}")
    return {"rows": rows}


# -- sampling ---------------------------------------------------------------------------------------------------------------


def sampled(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """What `assisted audit` finds: sampled tokens against their exact distribution, greedy ones, seeds."""
    for name in ("zoo:draft", "zoo:draft, adaptive", "suffix", "zoo:eagle3", "draft-tree:zoo:draft"):
        yield name, partial(audited, name, device, sizes)


def audited(name: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """With captured passes. Raises AssertionError if a check fails."""
    folder = zoo.folder("target")
    target, tokenizer = loaded(folder, "float32", device), find_tokenizer(folder)
    pair = AssistedModelForCausalLM.from_models(target, *DRAFTS[name], tokenizer)
    prompts = [one.ids[0].tolist() for one in prompts_of(tokenizer, sizes.prompts, device)]
    settings = Settings(*((16, 4) if sizes is TINY else (48, 32)), temperature=TEMPERATURE)
    found = audit(Model(pair, tokenizer), target, tokenizer, prompts, settings)
    if not found.is_lossless:
        raise AssertionError(f"not lossless: {found.findings}")
    return {"rows": [{"check": one.check, "verdict": one.verdict, "found": one.told} for one in found.findings]}


# -- training ---------------------------------------------------------------------------------------------------------------

SHARD = 16 * 2**20  # bytes of a file, at most


def train(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Measure]]:
    """An EAGLE-3 head for a target, trained on text that the target writes, beside the shipped head."""
    yield sizes.trained, partial(trained, device, sizes)


def trained(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Tokens per forward pass with both heads. The new one is in head/, and in shards/ of the folder of the results."""
    out = Path(os.environ["OUT"]).resolve()
    command = [
        sys.executable,
        "-m",
        "assisted",
        "train",
        "eagle",
        "--target",
        sizes.trained,
        "--out",
        str(out / "head"),
    ]
    subprocess.run([*command, *sizes.training], check=True, stdout=sys.stderr, timeout=TRAINING_SECONDS)
    (out / "shards").mkdir(exist_ok=True)
    for path in sorted((out / "head").glob("*.*")):
        content = path.read_bytes()
        for number, first in enumerate(range(0, len(content), SHARD)):
            (out / "shards" / f"{path.name}.{number:03}").write_bytes(content[first : first + SHARD])
    target, tokenizer = load_target(sizes.trained, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    shipped, rows = f"zoo:{sizes.trained.removeprefix('zoo:')}-eagle3".replace("target-", ""), []
    for spec in (shipped, str(out / "head")):
        pair = AssistedModelForCausalLM.from_models(target, Eagle(spec, tree=False), 4, tokenizer)
        for one in prompts_of(tokenizer, 4 * sizes.prompts, device):
            new_tokens(pair.generate, one.ids, **Rules(sizes.new_tokens, **WAYS["sampled"]).call(pad_token(tokenizer)))
        rows.append(
            {"head": spec if spec == shipped else "new", "tokens per forward pass": pair.totals.tokens_per_pass}
        )
    return {"rows": rows}


SECTIONS: dict[str, Callable[[torch.device, Sizes], Iterator[tuple[str, Measure]]]] = {
    "rounds": rounds,
    "speed": speed,
    "copies": copied,
    "batches": batched,
    "contexts": contexts,
    "passes": forward_passes,
    "quantized": quantized_targets,
    "offload": offload,
    "identity": identity,
    "sampled": sampled,
    "bits": bits,
    "memory": memory_loads,
    "train": train,
}
