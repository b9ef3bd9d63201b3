"""What a pool of sessions and a memory on disk save: reading of prompts that begin alike, and drafts after a restart.

    python benchmarks/sessions.py --out benchmarks/sessions.json --docs docs/howto/memory.md

The pool: questions that follow one document, with and without a pool, each call with a new question. Time is that of the
processor (one thread), from the call to its first token. The memory: one process answers requests of a project and ends; a new
one gets the same requests again, and other requests of that project, each with the memory and without it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tables import about, answer, arguments, figures, in_own_process, publish

from assisted import AssistedModelForCausalLM, SessionPool, Suffix
from assisted.bench import at_length, read
from assisted.bench.clock import FirstToken
from assisted.bench.table import markdown_table, percent

POOLS = {  # target, draft, tokens of the document; shipped models have a context of 1,024 tokens
    "SmolLM2, suffix": ("zoo:smollm2", "suffix", 2000),
    "SmolLM2, EAGLE-3 head": ("zoo:smollm2", "zoo:smollm2-eagle3", 2000),
    "shipped target, draft model": ("zoo:target", "zoo:draft", 900),
    "shipped hybrid, MTP head": ("zoo:hybrid", "mtp", 900),
}
MEMORIES = {"SmolLM2": "zoo:smollm2", "shipped target": "zoo:target"}
QUESTION = 24  # tokens


class Processor(FirstToken):
    """The first token, by the processor's time."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.started = time.process_time()

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if self._pieces == 2:
            self.seconds = time.process_time() - self.started


def pools(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, (target, draft, prefix) in POOLS.items():
        model = AssistedModelForCausalLM.from_pretrained(target, draft=draft, dtype=torch.float32)
        document = at_length(read(["code"], model.tokenizer, 1), model.tokenizer, prefix)[0].ids
        asked = read(["code"], model.tokenizer, args.prompts + 2)
        prompts = [torch.cat([document, one.ids[:, :QUESTION]], 1) for one in asked]
        call: dict[str, Any] = {"max_new_tokens": args.new_tokens, "do_sample": False}
        model.generate(prompts[0][:, -QUESTION:], **call)  # makes what is made only once
        pool = SessionPool()
        found: dict[str, list[Any]] = {"cold": [], "warm": []}
        for prompt in prompts[-2:]:  # fills the pool; of a hybrid, the second one marks where the document ends
            model.generate(prompt, sessions=pool, **call)
        for prompt in prompts[: args.prompts]:
            for kind in ("cold", "warm"):
                clock = Processor()
                output = model.generate(prompt, sessions=pool if kind == "warm" else None, streamer=clock, **call)
                report = model.report
                assert report is not None
                counts = (report.cached_tokens, report.drafted, report.accepted, report.target_passes)
                found[kind].append((clock.seconds, output.tolist(), *counts))
        columns = {kind: list(zip(*runs, strict=True)) for kind, runs in found.items()}
        rows.append(
            {
                "name": name,
                "tokens": prompts[0].shape[1],
                "not_read": mean(columns["warm"][2]),
                "cold": mean(columns["cold"][0]),
                "warm": mean(columns["warm"][0]),
                "same": sum(a == b for a, b in zip(columns["cold"][1], columns["warm"][1], strict=True)),
                "tokens_per_pass": {
                    kind: args.new_tokens * args.prompts / (sum(columns[kind][5]) + args.prompts) for kind in found
                },
                "pool_bytes": pool.nbytes,
                "texts": len(pool),
            }
        )
    return rows


def child(args: argparse.Namespace) -> None:
    """Answers requests of one project in this process, and prints what was drafted."""
    torch.set_num_threads(args.threads or 1)
    spec = Suffix(memory_file=args.memory) if args.memory else "suffix"
    began = time.process_time()
    model = AssistedModelForCausalLM.from_pretrained(args.child, draft=spec, dtype=torch.float32)
    loaded = time.process_time() - began
    asked = read(["code"], model.tokenizer, 2 * args.prompts)
    texts = []
    for one in asked[args.first : args.first + args.prompts]:
        texts.append(model.generate(one.ids, max_new_tokens=args.new_tokens, do_sample=False).tolist())
    totals = model.totals.to_dict()
    kept = ("new_tokens", "target_passes", "drafted", "accepted", "tokens_per_pass", "acceptance_rate")
    print(json.dumps({name: totals[name] for name in kept} | {"texts": texts, "load_seconds": loaded}))


def memories(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, target in MEMORIES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "memory")

            def run(first: int, memory: Path | None, target: str = target) -> dict[str, Any]:
                options: list[object] = ["--child", target, "--first", first, "--prompts", args.prompts]
                options += ["--new-tokens", args.new_tokens, "--threads", args.threads or 1]
                found = answer(in_own_process(__file__, *options, *(["--memory", memory] if memory else [])))
                assert isinstance(found, dict)
                return found

            run(0, path)
            written = path.read_bytes()
            for what, first in (("the same requests again", 0), ("other requests of the project", args.prompts)):
                path.write_bytes(written)
                cold, warm = run(first, None), run(first, path)
                same = sum(a == b for a, b in zip(cold.pop("texts"), warm.pop("texts"), strict=True))
                rows.append({"name": f"{name}, {what}", "cold": cold, "warm": warm, "same": same})
            rows[-1]["bytes"] = len(written)
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", dtype=torch.float32)
    machine = about(pair, prompts=args.prompts, new_tokens=args.new_tokens)
    return {"about": machine, "pools": pools(args), "memories": memories(args)}


def markdown(found: dict[str, Any]) -> str:
    about = found["about"]
    lines = [
        f"`python benchmarks/sessions.py`: {about['prompts']} prompts each, {about['new_tokens']} new tokens, greedy, float32, "
        f"CPU threads: {about['threads']}, {about['processor']}, torch {about['torch']}, transformers {about['transformers']}.",
        "",
        "**A pool of sessions**: questions after one document. Seconds are the processor's, until the first token.",
        "",
    ]
    header = ["", "tokens of a prompt", "not read again", "seconds without", "with", "times as fast", "same texts"]
    lines += markdown_table(
        [*header, "tokens per pass without", "with"],
        (
            [
                *(
                    row["name"],
                    str(row["tokens"]),
                    f"{row['not_read']:.0f}",
                    f"{row['cold']:.2f}",
                    f"{row['warm']:.3f}",
                ),
                *(f"{row['cold'] / row['warm']:.0f}", f"{row['same']}/{about['prompts']}"),
                *(f"{row['tokens_per_pass'][kind]:.2f}" for kind in ("cold", "warm")),
            ]
            for row in found["pools"]
        ),
    )
    lines += ["", '**A memory on disk**: `"suffix"` in a new process, cold and with what another process wrote.', ""]
    header = ["", "accepted cold", "warm", "tokens per pass cold", "warm", "same texts"]
    lines += markdown_table(
        header,
        (
            [
                row["name"],
                *(f"{row[k]['accepted']} ({percent(row[k]['acceptance_rate'])})" for k in ("cold", "warm")),
                *(f"{row[k]['tokens_per_pass']:.2f}" for k in ("cold", "warm")),
                f"{row['same']}/{about['prompts']}",
            ]
            for row in found["memories"]
        ),
    )
    return "\n".join(lines)


def main() -> None:
    numbers = {"--new-tokens": (32, "of each call"), "--first": (0, "request that --child answers first")}
    only = ("--prompts", "--threads", "--out", "--docs", "--read")
    parser = arguments(__doc__, only, prompts=8, threads=1, numbers=numbers)
    parser.add_argument("--child", metavar="TARGET", help="answer requests here and print what was drafted")
    parser.add_argument("--memory", type=Path, metavar="FILE", help="of --child")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of tables")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    found = figures(args, measure)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    publish(markdown(found), args.docs, "sessions")


if __name__ == "__main__":
    main()
