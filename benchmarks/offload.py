"""Targets on a disk: how often their weights are read for a text, with token trees of several sizes and without drafts.

    python benchmarks/offload.py --threads 1 --out benchmarks/offload.json --docs docs/howto/offload.md

Every weight is read from the disk in every forward pass: the script drops it from the page cache at once. The shipped target
shows how many tokens a forward pass yields for a tree of each size. The grown one, which writes the same text, shows bytes and
seconds at 0.25 billion parameters.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from tables import about, arguments, figures, publish, write_json
from transformers import AutoModelForCausalLM, PreTrainedModel

from assisted import AssistedModelForCausalLM, DraftTree, zoo
from assisted.bench import Prompt, read
from assisted.bench.table import markdown_table
from assisted.engine.hooks import offloading_hooks
from assisted.lengths import Adaptive, Fixed
from tools.grown import load_target

SIZES = (1, 16, 64, 256, 1024)
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
# title: target, dtype, new tokens, tree sizes (None: chosen by measured costs), arguments of generate, share of the prompts
CASES: dict[str, tuple[str, str, int, Sequence[int | None], dict[str, Any], float]] = {
    "greedy, 48 tokens": ("zoo:target", "float32", 48, SIZES, GREEDY, 1.0),
    "temperature 0.8, top-p 0.95, 48 tokens": ("zoo:target", "float32", 48, (16, 64, 256), SAMPLED, 1.0),
    "0.25 billion parameters, greedy, 32 tokens": ("grown:0.25b", "float32", 32, (64, 256, None), GREEDY, 0.5),
}
COLUMNS = ("", "tokens per pass", "MB read per token", "times fewer bytes", "speedup", "same texts")


class Counted(Mapping[str, torch.Tensor]):
    """A hook's weights. Counts the bytes that are read, and drops them from the page cache.

    total: one list for all hooks, with the number of bytes.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], folder: Path, total: list[int]):
        self.weights, self.folder, self.total = weights, folder, total

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.weights[name].clone()  # until here, it is a view of the file
        self.total[0] += value.nbytes
        file = os.open(self.folder / f"{self.weights.prefix}{name}.dat", os.O_RDONLY)  # type: ignore[attr-defined]
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def on_disk(target: PreTrainedModel, folder: Path) -> list[int]:
    """Move a target's weights to files. Returns the list that counts the bytes read from them."""
    accelerate.disk_offload(target, str(folder), execution_device=torch.device("cpu"))
    os.sync()  # only what is written can be dropped
    total = [0]
    for hook in offloading_hooks(target):
        hook.weights_map = Counted(hook.weights_map, folder, total)
    return total


def timed(model: Any, prompts: Sequence[Prompt], total: list[int], **call: Any) -> tuple[dict[str, float], list[Any]]:
    """What the calls for all prompts read and took, and their texts."""
    texts = []
    total[0], began = 0, time.perf_counter()
    for prompt in prompts:
        torch.manual_seed(0)
        mask = torch.ones_like(prompt.ids)
        output = model.generate(prompt.ids, attention_mask=mask, eos_token_id=None, pad_token_id=0, **call)
        texts.append(output[:, prompt.ids.shape[1] :].tolist())
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": total[0], "tokens": sum(len(text[0]) for text in texts)}, texts


def measure(args: Any) -> dict[str, Any]:
    earlier = args.only and args.out and args.out.exists()
    found: dict[str, Any] = json.loads(args.out.read_text()) if earlier else {}  # the other cases stay
    draft = AutoModelForCausalLM.from_pretrained(zoo.folder("draft"), dtype=torch.float32)
    for title, (name, dtype, tokens, sizes, sampling, part) in CASES.items():
        if args.only and not title.startswith(args.only):
            continue
        target, tokenizer = load_target(name, getattr(torch, dtype))
        size = sum(p.nbytes for p in target.parameters())
        prompts = read(["code"], tokenizer, max(1, round(args.prompts * part)))
        call = {"max_new_tokens": tokens, **sampling}
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            total = on_disk(target, Path(folder))
            rows = {}
            plain, expected = timed(target, prompts, total, **call)
            rows["plain `generate`"] = plain | {"passes": float(plain["tokens"]), "same": 1.0, "draft_seconds": 0.0}
            for nodes in sizes:
                length = Adaptive() if nodes is None else Fixed(64)
                pair = AssistedModelForCausalLM.from_models(target, DraftTree(draft, nodes=nodes), length, tokenizer)
                if nodes is None:  # the first call measures costs
                    timed(pair, prompts[:1], total, **call)
                    pair.reset_totals()
                row, texts = timed(pair, prompts, total, **call)
                totals = pair.totals
                rows["size by measured costs" if nodes is None else f"tree of {nodes}"] = row | {
                    "passes": row["tokens"] / totals.tokens_per_pass,
                    "same": sum(map(list.__eq__, texts, expected)) / len(texts),
                    "draft_seconds": totals.draft_seconds,
                }
                print(title, nodes, row, f"{totals.tokens_per_pass:.2f} tokens per pass", flush=True)
            machine = about(pair, prompts=args.prompts, repeats=1)
        found[title] = {"rows": rows, "model_bytes": size, "prompts": len(prompts), "dtype": dtype}
        found["about"] = machine
        write_json(args.out, found)
    return found


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in docs."""
    machine = found["about"]
    lines = [
        f"`python benchmarks/offload.py`: held-out code, CPU threads: {machine['threads']}, {machine['processor']}, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, end tokens ignored. Every weight is read from the disk "
        "in every forward pass. Tokens per pass include the target's own token and the pass that reads the prompt. The "
        "speedup is in seconds, from one run of each. It depends on the disk and on the processor."
    ]
    for title, case in found.items():
        if title == "about":
            continue
        rows = case["rows"]
        plain = rows["plain `generate`"]
        lines += [
            "",
            f"**{title}** ({case['prompts']} prompts, {case['dtype']}, {case['model_bytes'] / 1e6:.0f} MB)",
            "",
        ]
        cells = [
            [
                name,
                f"{row['tokens'] / row['passes']:.2f}",
                f"{row['bytes'] / row['tokens'] / 1e6:.1f}",
                f"{plain['bytes'] / plain['tokens'] / (row['bytes'] / row['tokens']):.2f}",
                f"{plain['seconds'] / plain['tokens'] / (row['seconds'] / row['tokens']):.2f}",
                f"{row['same']:.0%}" if "temperature" not in title else "",
            ]
            for name, row in rows.items()
        ]
        lines += markdown_table(list(COLUMNS), cells)
    return "\n".join(lines)


def main() -> None:
    only = ("--prompts", "--threads", "--out", "--docs", "--read")
    parser = arguments(__doc__, only, prompts=4)
    parser.add_argument(
        "--only", metavar="BEGINNING", help="of the titles of the cases that are measured (default: all)"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to read from (default: the system's for temporary files)"
    )
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "offload")


if __name__ == "__main__":
    main()
