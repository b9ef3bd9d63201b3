"""Runs folders of `assisted handover` in vLLM, in one process that imports it once. For `benchmarks/handover.py`.

Reads a JSON object per line: a folder, its command, prompts as texts and as token ids, and a number of new tokens. Answers with
one line each: ids of the texts, new tokens of the prompts at temperature 0, and vLLM's counters of drafts. vLLM's own parser
reads the command, so an unknown option is an error. Each folder runs in a fork, with counters and caches of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ADDED = ("--enforce-eager", "--max-num-seqs", "1")  # nothing is compiled, one request at a time
COUNTERS = "vllm:spec_decode_num_"


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The answer for one folder."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    os.chdir(job["folder"])
    start, words = job["command"][:3], job["command"][3:]
    if start != ["python", "-m", "vllm.entrypoints.openai.api_server"]:
        raise ValueError(f"command: {' '.join(start)} does not start vLLM's server")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = EngineArgs.from_cli_args(parser.parse_args([*words, *ADDED]))
    engine.disable_log_stats = False
    model = vllm.LLM.from_engine_args(engine)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
    answers = []
    for ids in job["ids"]:
        (found,) = model.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        answers.append(list(found.outputs[0].token_ids))
    counters = {metric.name.removeprefix(COUNTERS): metric for metric in model.get_metrics()}
    tokenizer = model.get_tokenizer()
    return {
        "version": vllm.__version__,
        "tokenized": [list(tokenizer(text, add_special_tokens=False).input_ids) for text in job["texts"]],
        "answers": answers,
        "drafts": int(counters["drafts"].value),
        "accepted": [int(count) for count in counters["accepted_tokens_per_pos"].values],
    }


def forked(job: dict[str, Any]) -> str:
    """The answer of a fork as JSON, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = run(job)
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer or json.dumps({"error": "the process ended without an answer"})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    import vllm
    import vllm.engine.arg_utils

    vllm.LLM  # noqa: B018  (imported on first use)
    for line in sys.stdin:
        print(forked(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
