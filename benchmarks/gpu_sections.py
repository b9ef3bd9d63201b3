"""The measurements of the case `gpu`: every section is a list of items, every item a function that returns figures.

Targets: the shipped one, and the same grown to about 1 and 7 billion parameters (`tools.grown`: the same text at the
cost of a large model). All methods continue pieces of Python, in turns, by the protocol of `assisted bench`.
"""

from __future__ import annotations

import argparse
import gc
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
import torch
import transformers
from cases.memory import call_twice, counted
from shared import NO_DRAFT, long_model, paired, raced
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import assisted
from assisted import AssistedModelForCausalLM, DraftModel, DraftTree, Eagle, zoo
from assisted.engine.cache import SlotCache
from assisted.engine.prepared import CallSettings
from assisted.engine.runner import CachedModel
from assisted.fast.fused import prepare
from assisted.fast.graphs import Graphs
from assisted.lab.bench import Method, Prompt, Rules, pad_token, peers
from assisted.lab.bench.clock import now
from assisted.lab.bench.results import machine
from assisted.lab.doctor.passes import bandwidth, memory
from assisted.lab.grown import shipped_head
from assisted.lengths import Adaptive, Fixed
from assisted.loading.packed import PackedConfig
from assisted.loading.vocabulary import find_tokenizer
from assisted.methods.shared.model_drafter import ModelDrafter
from tools.grown import load_target, save

Measure = Callable[[], dict[str, Any]]
Items = Iterator[tuple[str, Measure]]
Drafts = Mapping[str, tuple[Any, Any]]
"""By name: the draft and its length."""
GB = 10**9
PROMPT = 160  # tokens
TRAINING_SECONDS = 480
PROFILED, MOST_KERNELS = 10, 16  # forward passes, and rows of the table
WAYS = {"sampled": {"temperature": 0.8, "top_p": 0.95}, "greedy": {}}
"""Sampled text first: greedy text of a grown target repeats itself, which flatters every draft."""
VERIFIED = 5  # columns of a verifying forward pass: a draft of four tokens
PASSES = {"eager": "eager", "captured": "auto", "compiled and captured": "compile"}
"""How forward passes run, and the `fast=` for it."""
FEW: Drafts = {
    "draft model, 4 tokens": ("zoo:draft", 4),
    "draft model, adaptive": ("zoo:draft", "adaptive"),
    "suffix, adaptive": ("suffix", "adaptive"),
}
COPIES: Drafts = {
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


CARD = Sizes(
    {"grown:1b": torch.bfloat16, "grown:8b": torch.bfloat16},
    *("grown:1b", (8, 32), (16384, 512), "grown:8b", 64, 50, 2, 2),
)
TINY = Sizes(
    *({"zoo:target": torch.float32}, "zoo:target", (2,), (64,), "zoo:target", 6, 2, 1, 1),
    compiled=False,
    trained="zoo:target",
    training=("--text", "zoo", "--steps", "2", "--batch", "2", "--context", "32"),
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


def head_of(name: str, target: PreTrainedModel) -> Eagle:
    return Eagle("zoo:eagle3" if name == "zoo:target" else shipped_head(target), tree=False)


def loaded(path: Any, how: str, device: torch.device) -> PreTrainedModel:
    """A folder's model in 4 bits of this package, or in 4 or 8 bits by bitsandbytes."""
    config: Any = PackedConfig(4)
    if how == "nf4":
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    elif how == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=config, device_map={"": device}
    )


def new_tokens(run: Callable[..., Any], ids: torch.Tensor, **call: Any) -> list[Any]:
    """The new tokens of each row."""
    return run(ids, attention_mask=torch.ones_like(ids), **call)[:, ids.shape[1] :].tolist()


def captures(pair: AssistedModelForCausalLM, key: str = "eager_because") -> dict[str, Any]:
    """The number of captured forward passes, or why there are none."""
    return {"captured": pair.graphs.captured, key: pair.graphs.reason or pair.graphs.obstacle or ""}


# -- rounds and forward passes ----------------------------------------------------------------------------------------------


def rounds(device: torch.device, sizes: Sizes) -> Items:
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
    drafts = {**FEW, "suffix, 4 tokens": ("suffix", 4), "EAGLE-3, 4 tokens": (head_of(name, target), 4)}
    call, rows = Rules(sizes.new_tokens, **WAYS[way]).call(pad_token(tokenizer)), []
    for method in paired(target, tokenizer, drafts):
        pair: Any = method.model
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
        own = alone[1 if method.name == NO_DRAFT else VERIFIED]
        row = {"a round, ms": whole, "drafting, ms": 1e3 * found.draft_seconds / found.target_passes}
        row |= {"the target's pass, ms": own, "outside of it, ms": whole - own, "tokens": found.tokens_per_pass}
        rows.append({"draft": method.name, **row, **captures(pair, "eager because")})
    return {"rows": rows}


def modes_on(device: torch.device) -> list[str]:
    return [*PASSES] if device.type == "cuda" else [*PASSES][:2]


def forward_passes(device: torch.device, sizes: Sizes) -> Items:
    """Forward passes of every target: how long they take, and what they are made of, kernel by kernel."""
    for name in reversed(sizes.targets):
        yield f"{name}, times", partial(times_of, name, device, sizes)
        for mode in modes_on(device):
            yield f"{name}, kernels, {mode}", partial(kernels_of, name, mode, device, sizes)


def times_of(name: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of forward passes by mode, and the share of the time that reading the weights takes at least."""
    target, tokenizer = load_target(name, sizes.targets[name], device)
    draft, (prompt,) = drafted_by(target), prompts_of(tokenizer, 1, device)

    def taken(model: PreTrainedModel, columns: int, mode: str, bare: bool = False) -> float:
        return 1e3 / median(rate(model, prompt.ids, columns, mode, sizes.passes, bare) for _ in range(3))

    rows = []
    for mode in modes_on(device):
        several = taken(target, VERIFIED, mode)
        row = {"passes": mode, "draft step, ms": round(taken(draft, 1, mode, bare=True), 3)}
        row |= {"over 1 position, ms": round(taken(target, 1, mode), 3)}
        row |= {f"over {VERIFIED} positions, ms": round(several, 3)}
        rows.append(row | {"of the memory bound": round(memory(target, several / 1e3).share[0], 3)})
    return {"rows": rows}


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


@torch.inference_mode()
def rate(model: PreTrainedModel, ids: torch.Tensor, columns: int, mode: str, count: int, bare: bool = False) -> float:
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


# -- races ------------------------------------------------------------------------------------------------------------------


def speed(device: torch.device, sizes: Sizes) -> Items:
    """`generate` with every target, against its fastest plain mode."""
    for way in WAYS:
        for name in sizes.targets:
            yield f"{name}, {way}", partial(race_of, device, sizes, name, speed_drafts, way=way, peer=True)


def speed_drafts(name: str, target: PreTrainedModel) -> Drafts:
    head = head_of(name, target)
    return {**FEW, "EAGLE-3, 4 tokens": (head, 4), "EAGLE-3, adaptive": (head, "adaptive")}


def copied(device: torch.device, sizes: Sizes) -> Items:
    """4-bit copies of the target as drafts: torch's own product, and bitsandbytes'."""
    for name in reversed(sizes.targets):
        yield name, partial(race_of, device, sizes, name, COPIES)


def batched(device: torch.device, sizes: Sizes) -> Items:
    """Rows decoded together."""
    for rows in sizes.batches:
        yield f"{sizes.batched}, {rows} rows", partial(race_of, device, sizes, sizes.batched, rows=rows)


def contexts(device: torch.device, sizes: Sizes) -> Items:
    """Decoding after long prompts; the rotary angles reach 40,960 positions."""
    small = replace(sizes, compiled=False)
    for context in sizes.contexts:
        yield f"{sizes.batched}, {context} tokens", partial(race_of, device, small, sizes.batched, context=context)


def quantized_targets(device: torch.device, sizes: Sizes) -> Items:
    """Targets in 4 and 8 bits: of this package, and of bitsandbytes. They are not compiled."""
    small, name = replace(sizes, compiled=False), sizes.batched
    for how in ("int4", "nf4", "int8") if device.type == "cuda" else ("int4",):
        yield f"{name}, {how}", partial(race_of, device, small, name, how=how)


def bits(device: torch.device, sizes: Sizes) -> Items:
    """What `exact="bits"` costs: the same race in both ways."""
    for name in reversed(sizes.targets):
        for exact in ("bits", None):
            yield f"{name}, {exact or 'ordinary'}", partial(race_of, device, sizes, name, exact=exact)


def offload(device: torch.device, sizes: Sizes) -> Items:
    """Token trees for a target of which a part stays in main memory: of 64 nodes, and of a size chosen by measured costs."""
    few = replace(sizes, compiled=False, prompts=1, repeats=1, new_tokens=min(32, sizes.new_tokens))
    yield sizes.capped, partial(race_of, device, few, sizes.capped, trees_of, way="greedy", offloaded=True)


def trees_of(name: str, target: PreTrainedModel) -> Drafts:
    draft = drafted_by(target)
    return {
        "tree of 64": (DraftTree(draft, nodes=64), Fixed(64)),
        "size by measured costs": (DraftTree(draft), Adaptive()),
    }


def race_of(
    device: torch.device,
    sizes: Sizes,
    name: str,
    drafts: Drafts | Callable[[str, PreTrainedModel], Drafts] = FEW,
    way: str = "sampled",
    rows: int = 1,
    how: str | None = None,
    context: int | None = None,
    peer: bool = False,
    offloaded: bool = False,
    exact: str | None = None,
) -> dict[str, Any]:
    """A race by the protocol, and for each pair the number of captured forward passes, or why none are.

    drafts: those that cannot be loaded are left out with a message. how: the target's bits. context: of prompts. peer: whether
    transformers' assisted generation takes part. offloaded: whether a part of the target stays in main memory. exact: of pairs.
    """
    tokenizer, dtype = find_tokenizer(zoo.folder("target")), sizes.targets.get(name, torch.bfloat16)
    if how is not None:
        with tempfile.TemporaryDirectory() as folder:
            saved(name, device, Path(folder))
            target = loaded(folder, how, device)
    elif context is not None:
        target = long_model("target", dtype, device, size_of(name))
        draft = DraftModel(long_model("draft", dtype, device))
        drafts = {title: (draft if spec == "zoo:draft" else spec, n) for title, (spec, n) in FEW.items()}
    else:
        target, _ = load_target(name, dtype, device)
    target = dispatched(target, sizes.cap) if offloaded else target
    chosen = drafts(name, target) if callable(drafts) else drafts
    own = paired(target, tokenizer, chosen, lenient=True)
    pairs: dict[str, Any] = {one.name: one.model for one in own}
    for pair in pairs.values():
        pair.exact = exact
        if context is None and not offloaded:
            pair.warm_up(PROMPT + sizes.new_tokens + 16, rows, do_sample=way == "sampled")
    theirs: list[Method] = [one for one in peers(target, drafted_by(target)) if one.setting == PEER] if peer else []
    count = rows * max(1, sizes.prompts // rows)
    rules = argparse.Namespace(prompts=count, repeats=sizes.repeats, threads=None, no_compile=not sizes.compiled)
    prompts, wanted = prompts_of(tokenizer, count, device), Rules(sizes.new_tokens, **WAYS[way])
    shown = name + (f" in {how}" if how else "")
    result = raced(rules, own[-1].model, [*theirs, *own], prompts, wanted, rows, target=shown, context=context)
    return {"result": result.to_dict(), "graphs": {title: captures(pair) for title, pair in pairs.items()}}


def dispatched(target: PreTrainedModel, cap: int) -> PreTrainedModel:
    """A target of which a part stays in main memory, on a card with `cap` bytes; on a CPU, its layers."""
    if target.device.type != "cuda":
        for layer in target.model.layers:
            accelerate.cpu_offload(layer, execution_device=target.device)
        return target
    device, room = target.device, {0: cap - 3 * GB, "cpu": 1000 * GB}
    kinds = target._no_split_modules and list(target._no_split_modules)
    places = accelerate.infer_auto_device_map(target, max_memory=room, no_split_module_classes=kinds)
    target = accelerate.dispatch_model(target.cpu(), places)
    tidy()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(device).total_memory)
    return target


def size_of(name: str) -> str | None:
    return name.removeprefix("grown:") if name.startswith("grown:") else None


def saved(name: str, device: torch.device, folder: Path, long: bool = False) -> None:
    """Write a target into a folder. long: one that reads more tokens than it was trained on."""
    if long:
        target, tokenizer = (
            long_model("target", torch.bfloat16, device, size_of(name)),
            find_tokenizer(zoo.folder("target")),
        )
    else:
        target, tokenizer = load_target(name, torch.bfloat16, device)
    if size_of(name):
        save(target, folder, tokenizer)
    else:
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    del target
    tidy()


# -- memory -----------------------------------------------------------------------------------------------------------------

LOADS: tuple[dict[str, Any], ...] = (
    {"context": 2048},
    {"context": 2048, "draft": "zoo:draft"},
    {"context": 2048, "quantization": "nf4"},
    {"context": 8192, "rows": 8, "draft": "zoo:draft"},
)
"""Of the same grown target. Weights are random where nothing is said of text: memory does not depend on them."""


def memory_loads(device: torch.device, sizes: Sizes) -> Items:
    """The peak of a load and two calls, beside the plan."""
    for load in LOADS if sizes is not TINY else [{"context": 256}]:
        title = ", ".join(f"{name} {value}" for name, value in load.items())
        yield title, partial(memory_of, load, device, sizes)


def memory_of(load: dict[str, Any], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """GiB: planned, in use on the card after the calls, and torch's peaks. The card has to be otherwise empty."""
    load = {"dtype": "bfloat16", **load}
    keywords = {name: load[name] for name in ("draft", "fast") if name in load}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
        saved(sizes.batched, device, Path(folder), long=True)
        if keywords.get("draft") == "zoo:draft":  # one that reads as many tokens as the target
            keywords["draft"] = beside
            long_model("draft", torch.bfloat16).save_pretrained(beside)
            find_tokenizer(zoo.folder("draft")).save_pretrained(beside)
        plan = counted({**load, **keywords, "target": folder}, device.type)["plan"]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if load.get("quantization"):
            pair = AssistedModelForCausalLM.from_models(loaded(folder, load["quantization"], device), **keywords)
        else:
            more = {"dtype": getattr(torch, load["dtype"]), "device_map": {"": device}, **keywords}
            pair = AssistedModelForCausalLM.from_pretrained(folder, **more)
    call_twice(pair, load.get("rows", 1), load["context"])
    row = {"plan, GiB": plan}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        row |= {"used on the card": total - free, "reserved": torch.cuda.max_memory_reserved(device)}
        row |= {"allocated": torch.cuda.max_memory_allocated(device)}
    return {"rows": [{name: value / 2**30 for name, value in row.items()}]}


# -- training ---------------------------------------------------------------------------------------------------------------

SHARD = 16 * 2**20  # bytes of a file, at most


def train(device: torch.device, sizes: Sizes) -> Items:
    """An EAGLE-3 head for a target, trained on text that the target writes, beside the shipped head."""
    yield sizes.trained, partial(trained, device, sizes)


def trained(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Tokens per forward pass with both heads. The new one is in head/, and in shards/ of the folder of the results."""
    out = Path(os.environ["OUT"]).resolve()
    command = ["assisted", "train", "eagle", "--target", sizes.trained, "--out", str(out / "head"), *sizes.training]
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=sys.stderr, timeout=TRAINING_SECONDS)
    (out / "shards").mkdir(exist_ok=True)
    for path in sorted((out / "head").glob("*.*")):
        content = path.read_bytes()
        for number, first in enumerate(range(0, len(content), SHARD)):
            (out / "shards" / f"{path.name}.{number:03}").write_bytes(content[first : first + SHARD])
    target, tokenizer = load_target(sizes.trained, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    shipped, rows = f"zoo:{sizes.trained.removeprefix('zoo:')}-eagle3".replace("target-", ""), []
    for title, spec in ((shipped, shipped), ("new", str(out / "head"))):
        pair = AssistedModelForCausalLM.from_models(target, Eagle(spec, tree=False), 4, tokenizer)
        for one in prompts_of(tokenizer, 4 * sizes.prompts, device):
            new_tokens(pair.generate, one.ids, **Rules(sizes.new_tokens, **WAYS["sampled"]).call(pad_token(tokenizer)))
        rows.append({"head": title, "tokens per forward pass": pair.totals.tokens_per_pass})
    return {"rows": rows}


SECTIONS: dict[str, Callable[[torch.device, Sizes], Items]] = {
    "rounds": rounds,
    "speed": speed,
    "copies": copied,
    "batches": batched,
    "contexts": contexts,
    "passes": forward_passes,
    "quantized": quantized_targets,
    "offload": offload,
    "bits": bits,
    "memory": memory_loads,
    "train": train,
}
