"""Targets on a disk."""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import accelerate
import torch
from shared import SAMPLED, Case, Section, about, opened, written
from transformers import AutoModelForCausalLM

from assisted import AssistedModelForCausalLM, DraftTree, zoo
from assisted.engine.hooks import offloading_hooks
from assisted.lab.bench import read
from assisted.lengths import Adaptive, Fixed

SIZES = (1, 16, 64, 256, 1024)
# title: target, new tokens, tree sizes (None: chosen by measured costs), arguments of generate, share of the prompts
CASES = {
    "greedy, 48 tokens": ("zoo:target", 48, SIZES, {}, 1.0),
    "temperature 0.8, top-p 0.95, 48 tokens": ("zoo:target", 48, (16, 64, 256), {"do_sample": True, **SAMPLED}, 1.0),
    "0.25 billion parameters, greedy, 32 tokens": ("grown:0.25b", 32, (64, 256, None), {}, 0.5),
}


class Counted(Mapping):
    """A hook's weights. Counts the bytes that are read, and drops them from the page cache.

    total: one list for all hooks, with the number of bytes.
    """

    def __init__(self, weights, folder, total):
        self.weights, self.folder, self.total = weights, folder, total

    def __getitem__(self, name):
        value = self.weights[name].clone()  # until here, it is a view of the file
        self.total[0] += value.nbytes
        file = os.open(self.folder / f"{self.weights.prefix}{name}.dat", os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        return value

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


def on_disk(target, folder):
    """Move a target's weights to files. Returns the list that counts the bytes read from them."""
    accelerate.disk_offload(target, str(folder), execution_device=torch.device("cpu"))
    os.sync()  # only what is written can be dropped
    total = [0]
    for hook in offloading_hooks(target):
        hook.weights_map = Counted(hook.weights_map, folder, total)
    return total


def timed(model, prompts, total, tokens, call):
    """What the calls for all prompts read and took, and their texts."""
    texts = []
    total[0], began = 0, time.perf_counter()
    for prompt in prompts:
        torch.manual_seed(0)
        texts.append(written(model, prompt.ids, tokens, **call))
    return {"seconds": time.perf_counter() - began, "bytes": total[0], "tokens": sum(map(len, texts))}, texts


def measure(args):
    earlier = args.only and args.path and args.path.exists()
    found = json.loads(args.path.read_text()) if earlier else {}
    draft = AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=torch.float32)
    for title, (name, tokens, sizes, call, part) in CASES.items():
        if args.only and not title.startswith(args.only):
            continue
        alone = opened(name)
        target, tokenizer = alone.target, alone.tokenizer
        size = sum(p.nbytes for p in target.parameters())
        prompts = read(["code"], tokenizer, max(1, round(args.prompts * part)))
        tokens = min(tokens, 8) if args.quick else tokens
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            work = (on_disk(target, Path(folder)), tokens, call)
            plain, expected = timed(target, prompts, *work)
            rows = {"plain `generate`": plain | {"passes": float(plain["tokens"]), "same": 1.0, "draft_seconds": 0.0}}
            for nodes in sizes[:1] if args.quick else sizes:
                length = Adaptive() if nodes is None else Fixed(64)
                pair = AssistedModelForCausalLM.from_models(target, DraftTree(draft, nodes=nodes), length, tokenizer)
                if nodes is None:  # the first call measures costs
                    timed(pair, prompts[:1], *work)
                    pair.reset_totals()
                row, texts = timed(pair, prompts, *work)
                rows["size by measured costs" if nodes is None else f"tree of {nodes}"] = row | {
                    "passes": row["tokens"] / pair.totals.tokens_per_pass,
                    "same": sum(map(list.__eq__, texts, expected)) / len(texts),
                    "draft_seconds": pair.totals.draft_seconds,
                }
        found[title] = {"rows": rows, "model_bytes": size, "prompts": len(prompts), "dtype": "float32"}
        found["about"] = about(pair, args, repeats=1)
        args.save(found)
    return found


def rows_of_offload(found):
    """By title, rows with what a token takes, beside that of plain `generate`."""
    tables = {}
    for title, case in found.items():
        if title != "about":
            plain = case["rows"]["plain `generate`"]
            rows = tables[
                f"**{title}** ({case['prompts']} prompts, {case['dtype']}, {case['model_bytes'] / 1e6:.0f} MB)"
            ] = []
            for name, row in case["rows"].items():
                fewer, faster = (
                    plain[key] / plain["tokens"] * row["tokens"] / row[key] for key in ("bytes", "seconds")
                )
                shares = {"fewer": fewer, "faster": faster, "read": row["bytes"] / 1e6 / row["tokens"]}
                shares["per_pass"] = 1 / (row["passes"] / row["tokens"])
                rows.append({"name": name, **shares, **({"same": row["same"]} if "temperature" not in title else {})})
    return tables


offload = Case(
    "offload",
    """Targets on a disk: how often their weights are read for a text, with token trees of several sizes and without drafts.

Every weight is read from the disk in every forward pass: the case drops it from the page cache at once. The shipped target
shows how many tokens a forward pass yields for a tree of each size. The grown one, which writes the same text, shows bytes and
seconds at 0.25 billion parameters.
""",
    measure,
    options={
        "prompts": 4,
        "only": (None, "begins the titles of the cases that are measured; the others' figures in the file stay"),
        "folder": (None, "on the disk to read from"),
    },
    quick={"only": "greedy"},
    sections=(Section("howto/offload", "offload"),),
    what="held-out code",
    notes=(
        "End tokens are ignored. Every weight is read from the disk in every forward pass. Tokens per pass include the "
        "target's own token and the pass that reads the prompt. The speedup is in seconds, from one run of each. It depends "
        "on the disk and on the processor.",
    ),
    columns={
        **{"": "{name}", "tokens per pass": "{per_pass:.2f}", "MB read per token": "{read:.1f}"},
        **{"times fewer bytes": "{fewer:.2f}", "speedup": "{faster:.2f}", "same texts": "{same:.0%}"},
    },
    rows=rows_of_offload,
)
