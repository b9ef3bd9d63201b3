"""Engines in processes of their own, for `Worker`: this package, transformers, vLLM, OpenVINO and llama.cpp, perhaps in an
interpreter that has only one of them. Each function here gets settings and returns one that decodes prompts greedily."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""For the process of any engine."""
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}  # of OpenVINO's prompt lookup
SIMPLE = {"size_n": 3, "size_m": 8}  # of llama.cpp's lookup: tokens to look up, tokens to draft
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}  # vLLM's
ROWS = 16  # that vLLM decodes together at most
Prompts = Sequence[dict[str, Any]]
"""Each with its `text` and its `ids`."""
Job = Callable[[Prompts, int], dict[str, Any]]


def opened(engine: str, settings: dict[str, Any]) -> Job:
    """A job decodes prompts, so many of them together, and answers with texts (ids, or how many), seconds and steps."""
    run, version = {"own": own, "vllm": vllm, "openvino": openvino, "llama": llama}[engine](settings)

    def job(prompts: Prompts, rows: int = 1) -> dict[str, Any]:
        began, worked = time.perf_counter(), time.process_time()
        texts, steps = run(prompts, rows)
        seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
        gaps = [after - before for before, after in pairwise(steps)]
        made = {"tokens": sum(text if isinstance(text, int) else len(text) for text in texts), "steps": len(steps)}
        made["gap_95"] = quantiles(gaps, n=20)[-1] if len(gaps) > 20 else None
        return {**seconds, **made, "version": version, "texts": texts}

    return job


Run = Callable[[Prompts, int], tuple[list[Any], list[float]]]


def own(settings: dict[str, Any]) -> tuple[Run, str]:
    """This package, or transformers' own `generate` where the draft is None; or its `generate_batch`, or `generate_many`, `by`
    which several prompts are decoded. Padding after the end is part of an answer."""
    import torch

    from assisted import AssistedModelForCausalLM, __version__
    from assisted.lengths.policies import Never
    from assisted.loading.packed import PackedConfig

    draft, more = settings["draft"], {}
    if "bits" in settings:
        more["quantization_config"] = PackedConfig(settings["bits"], input_bits=settings.get("input_bits", 16))
    pair = AssistedModelForCausalLM.from_pretrained(
        settings["folder"],
        draft="suffix" if draft in (None, "none") else draft,
        draft_length=Never() if draft == "none" else None,
        dtype=getattr(torch, settings["dtype"]),
        **more,
    )
    model: Any = pair.target if draft is None else pair
    pad = pair.config.get_text_config().pad_token_id or 0
    call = {"max_new_tokens": settings["new_tokens"], "do_sample": False, "pad_token_id": pad}
    call |= {"eos_token_id": settings.get("ends")} if settings.get("ends") or settings.get("ignore_end", True) else {}
    alone = {"prompt_lookup_num_tokens": 10} if "lookup" in settings else {}

    def in_batches(texts: list[list[int]], rows: int) -> list[list[int]]:
        found = []
        for group in (texts[first : first + rows] for first in range(0, len(texts), rows)):
            width = max(map(len, group))
            ids = torch.tensor([[pad] * (width - len(text)) + text for text in group])
            mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in group])
            found += model.generate(ids, attention_mask=mask, **call, **alone)[:, width:].tolist()
        return found

    def continuous(texts: list[list[int]], rows: int) -> list[list[int]]:
        """With room for as many texts: without a number of blocks, it takes all free memory."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        room = ContinuousBatchingConfig(num_blocks=rows, max_batch_tokens=256)
        config = {"generation_config": GenerationConfig(**call), "continuous_batching_config": room}
        answers = pair.target.generate_batch(texts, **config)
        found = {int(name.rpartition("_")[2]): answer.generated_tokens for name, answer in answers.items()}
        return [found[number] for number in range(len(texts))]

    def many(texts: list[list[int]], rows: int) -> list[list[int]]:
        found = {one.index: one.new_tokens.tolist() for one in pair.generate_many(texts, rows=rows, **call)}
        return [found[number] for number in range(len(texts))]

    decode = {"generate": in_batches, "generate_batch": continuous, "generate_many": many}[
        settings.get("by", "generate")
    ]

    def run(prompts: Prompts, rows: int) -> tuple[list[Any], list[float]]:
        steps: list[float] = []
        pair.watch = lambda round: steps.append(time.process_time())
        return decode([one["ids"] for one in prompts], rows), steps

    return run, __version__


def vllm(settings: dict[str, Any]) -> tuple[Run, str]:
    """vLLM, from a folder with the weights in the dtype asked for."""
    import vllm as engine

    model = engine.LLM(
        settings["folder"],
        dtype=settings["dtype"],
        max_model_len=1024,
        max_num_seqs=ROWS,
        enable_prefix_caching=False,  # the same prompts come again
        disable_log_stats=True,
        speculative_config=NGRAM if settings.get("lookup") else None,
    )
    ignore = settings.get("ignore_end", True)
    sampling = engine.SamplingParams(temperature=0.0, max_tokens=settings["new_tokens"], ignore_eos=ignore)
    runner = model.llm_engine

    def run(prompts: Prompts, rows: int) -> tuple[list[Any], list[float]]:
        steps: list[float] = []
        found: dict[str, list[int]] = {}
        waiting, running = list(enumerate(prompts)), 0
        while waiting or running:
            while waiting and running < rows:
                number, prompt = waiting.pop(0)
                runner.add_request(str(number), {"prompt_token_ids": prompt["ids"]}, sampling)
                running += 1
            for output in runner.step():
                if output.finished:
                    found[output.request_id] = list(output.outputs[0].token_ids)
                    running -= 1
            steps.append(time.process_time())
        return [found[str(number)] for number in range(len(prompts))], steps

    return run, str(engine.__version__)


def openvino(settings: dict[str, Any]) -> tuple[Run, str]:
    """OpenVINO GenAI, which reads the GGUF file."""
    import openvino_genai

    options = {"prompt_lookup": True} if "lookup" in settings else {}
    threads = settings["threads"]
    pipeline = openvino_genai.LLMPipeline(settings["gguf"], "CPU", INFERENCE_NUM_THREADS=threads, **options)
    config = openvino_genai.GenerationConfig()
    for name, value in LOOKUP.items() if "lookup" in settings else ():
        setattr(config, name, value)
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = settings["new_tokens"], True, False
    config.do_sample = False

    def run(prompts: Prompts, rows: int) -> tuple[list[Any], list[float]]:
        counts = [pipeline.generate([one["text"]], config).perf_metrics.get_num_generated_tokens() for one in prompts]
        return counts, []

    return run, openvino_genai.__version__


def llama(settings: dict[str, Any]) -> tuple[Run, str]:
    """llama.cpp's server without HTTP, which reads the GGUF file."""
    from importlib.metadata import version

    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_parallel, options.n_ctx = settings["gguf"], 1, 2048
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = settings["threads"]
    if "lookup" in settings:
        options.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        for name, value in SIMPLE.items():
            setattr(options.speculative.ngram_simple, name, value)
    server = xllamacpp.Server(options)
    call = {"n_predict": settings["new_tokens"], "temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def run(prompts: Prompts, rows: int) -> tuple[list[Any], list[float]]:
        found = [server.handle_completions({"prompt": one["text"], **call}) for one in prompts]
        return [int(one["timings"]["predicted_n"]) for one in found], []

    return run, f"of xllamacpp {version('xllamacpp')}"


# Folders of `assisted handover`

ADDED = ("--enforce-eager", "--max-num-seqs", "1")  # nothing is compiled, one request at a time
COUNTERS = "vllm:spec_decode_num_"


def folders(engine: str) -> Callable[..., dict[str, Any]]:
    """What runs folders in vLLM or llama.cpp: each in a fork, with counters and caches of its own."""
    run = {"vllm": vllm_folder, "llamacpp": llama_folder}[engine]
    if engine == "vllm":  # imported once
        import vllm
        import vllm.engine.arg_utils

        vllm.LLM  # noqa: B018  (imported on first use)

    def forked(*job: Any) -> dict[str, Any]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                os.chdir(job[0])
                found = run(json.loads(Path("handover.json").read_text())["command"], *job[1:])
            except BaseException as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            with os.fdopen(writing, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        return json.loads(answer or '{"error": "the process ended without an answer"}')

    return forked


def vllm_folder(command: list[str], texts: list[str], ids: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Ids of the texts, new tokens of the prompts, and the engine's counters of drafts. vLLM's own parser reads the folder's
    command, so an unknown option is an error."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if command[:3] != ["python", "-m", "vllm.entrypoints.openai.api_server"]:
        raise ValueError(f"command: {' '.join(command[:3])} does not start vLLM's server")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = EngineArgs.from_cli_args(parser.parse_args([*command[3:], *ADDED]))
    engine.disable_log_stats = False
    model = vllm.LLM.from_engine_args(engine)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    found = [model.generate([{"prompt_token_ids": one}], sampling, use_tqdm=False)[0] for one in ids]
    counters = {metric.name.removeprefix(COUNTERS): metric for metric in model.get_metrics()}
    tokenizer = model.get_tokenizer()
    return {
        "version": vllm.__version__,
        "tokenized": [list(tokenizer(text, add_special_tokens=False).input_ids) for text in texts],
        "answers": [list(one.outputs[0].token_ids) for one in found],
        "drafts": int(counters["drafts"].value),
        "accepted": [int(count) for count in counters["accepted_tokens_per_pos"].values],
    }


def llama_folder(command: list[str], texts: list[str], ids: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """The same of llama.cpp, by xllamacpp. Options that `llama_server` does not know are errors."""
    from importlib.metadata import version

    import xllamacpp
    from llama_server import parameters

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = f"--host 127.0.0.1 --port {port} --metrics --parallel 1 --threads {os.environ['OMP_NUM_THREADS']}"
    server = xllamacpp.Server(parameters([*command[1:], *more.split()]))

    def asked(path: str, fields: dict[str, Any] | None = None) -> str:
        """The answer of the server; fields are sent as JSON."""
        body, kind = None if fields is None else json.dumps(fields).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, kind)) as answer:
            return answer.read().decode()

    call = {
        "n_predict": new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    each = [{"content": text, "add_special": False} for text in texts]
    found = {"version": f"xllamacpp {version('xllamacpp')}"}
    found |= {"tokenized": [json.loads(asked("/tokenize", one))["tokens"] for one in each]}
    found |= {"answers": [json.loads(asked("/completion", {"prompt": one, **call}))["tokens"] for one in ids]}
    text, metric = asked("/metrics"), r"^llamacpp:spec_decode_num_{}(\d+)$"
    places = re.findall(metric.format(r'accepted_tokens_per_pos_total\{position="(\d+)"\} '), text, re.M)
    accepted = [count for _, count in sorted((int(at), int(count)) for at, count in places)]
    return found | {"drafts": int(re.findall(metric.format("drafts_total "), text, re.M)[0]), "accepted": accepted}
