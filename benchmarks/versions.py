"""Two versions of this package on the shipped pair, in one run: whole calls alternate between two processes.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before . --threads 1 --out benchmarks/versions.json

Each process imports the package of its folder, and nothing else differs. The script asks both for the same call, one after the
other, in changing order. The result is the seconds of the first version over those of the second, the median over prompts of
the ratio at each: above 1 the second one is faster. Texts and drafts of the two are compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

CASES: dict[str, tuple[str, Any, str, int]] = {
    "suffix, adaptive": ("suffix", "adaptive", "float32", 1),
    "draft model, 4 tokens": ("zoo:draft", 4, "float32", 1),
    "draft model, adaptive": ("zoo:draft", "adaptive", "float32", 1),
    "EAGLE-3 trees, adaptive": ("zoo:eagle3", "adaptive", "float32", 1),
    "Medusa trees, adaptive": ("zoo:medusa", "adaptive", "float32", 1),
    "draft model, 4 tokens, batch of 4": ("zoo:draft", 4, "float32", 4),
    "suffix, adaptive, bfloat16": ("suffix", "adaptive", "bfloat16", 1),
}
"""By name: draft, draft length, dtype, rows."""


def serve(threads: int) -> None:
    """Answer lines of JSON, one call each, with its seconds and its text."""
    import torch
    from transformers import AutoTokenizer

    from assisted import AssistedModelForCausalLM, zoo

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    pairs: dict[str, Any] = {}
    for line in sys.stdin:
        name, text, rows, new = json.loads(line)
        draft, length, dtype, _ = CASES[name]
        if name not in pairs:
            pairs[name] = AssistedModelForCausalLM.from_pretrained(
                "zoo:target", draft=draft, draft_length=length, dtype=getattr(torch, dtype)
            )
        pair = pairs[name]
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :160].repeat(rows, 1)
        call = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        started = time.perf_counter()
        output = pair.generate(ids, attention_mask=torch.ones_like(ids), **call)
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, output[0, ids.shape[1] :].tolist(), pair.report.drafted]), flush=True)


class Version:
    """A process with one version of the package."""

    def __init__(self, folder: Path, threads: int):
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, *request: Any) -> list[Any]:
        """Seconds, text and drafted tokens of one call. request: the case, the prompt, rows, new tokens."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer: list[Any] = json.loads(self.process.stdout.readline())
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of the two versions, the older first")
    parser.add_argument("--prompts", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each call (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.threads)
    if len(args.folders) != 2:
        parser.error("FOLDER: give the folders of two versions")
    versions = [Version(folder, args.threads) for folder in args.folders]
    texts = [path.read_text() for path in sorted(Path("assisted/drafters").glob("*.py"))[1 : 1 + args.prompts]]
    rows: dict[str, Any] = {}
    for name, (*_, batch) in CASES.items():
        ratios, same, drafted = [], 0, [0, 0]
        for text in texts:
            found: list[list[list[Any]]] = [[], []]
            for repeat in range(args.repeats + 1):
                for number in (0, 1) if repeat % 2 else (1, 0):
                    found[number].append(versions[number].call(name, text, batch, args.new_tokens))
            # the first call of each warms up
            one, two = (median(seconds for seconds, *_ in calls[1:]) for calls in found)
            ratios.append(one / two)
            same += found[0][-1][1] == found[1][-1][1]
            drafted = [sum(call[2] for call in calls) + have for calls, have in zip(found, drafted, strict=True)]
        ratios.sort()
        rows[name] = {
            "speedup": round(median(ratios), 3),
            "from": round(ratios[0], 3),
            "to": round(ratios[-1], 3),
            "same_texts": f"{same}/{len(texts)}",
            "drafted": drafted,
        }
        print(f"{name:36} {rows[name]['speedup']:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]  same {same}/{len(texts)}")
    if args.out:
        args.out.write_text(
            json.dumps({"arguments": vars(args) | {"folders": None, "out": None}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
