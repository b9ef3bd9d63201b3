"""What a pool of sessions and a memory on disk save."""

import tempfile
import time
from pathlib import Path
from statistics import mean

import torch
from shared import Case, Section, Worker, about, heading, opened, page, shown, written

from assisted import SessionPool, Suffix
from assisted.lab.bench import at_length, read
from assisted.lab.bench.clock import FirstToken

POOLS = {  # target, draft, tokens of the document; shipped models have a context of 1,024 tokens
    "SmolLM2, suffix": ("zoo:smollm2", "suffix", 2000),
    "SmolLM2, EAGLE-3 head": ("zoo:smollm2", "zoo:smollm2-eagle3", 2000),
    "shipped target, draft model": ("zoo:target", "zoo:draft", 900),
    "shipped hybrid, MTP head": ("zoo:hybrid", "mtp", 900),
}
MEMORIES = {"SmolLM2": "zoo:smollm2", "shipped target": "zoo:target"}
QUESTION = 24  # tokens


class Processor(FirstToken):
    """The first token, by the processor's time."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.started = time.process_time()

    def put(self, value):
        super().put(value)
        if self._pieces == 2:
            self.seconds = time.process_time() - self.started


def pool_of(name, args):
    target, draft, prefix = POOLS[name]
    model = opened(target, draft)
    document = at_length(read(["code"], model.tokenizer, 1), model.tokenizer, prefix)[0].ids
    asked = read(["code"], model.tokenizer, args.prompts + 2)
    prompts = [torch.cat([document, one.ids[:, :QUESTION]], 1) for one in asked]
    call = {"max_new_tokens": args.new_tokens, "do_sample": False}
    model.generate(prompts[0][:, -QUESTION:], **call)  # makes what is made only once
    pool = SessionPool()
    for prompt in prompts[-2:]:  # fills the pool; of a hybrid, the second one marks where the document ends
        model.generate(prompt, sessions=pool, **call)
    found = {"cold": [], "warm": []}
    for prompt in prompts[: args.prompts]:
        for kind, runs in found.items():
            clock = Processor()
            output = model.generate(prompt, sessions=pool if kind == "warm" else None, streamer=clock, **call)
            runs.append((clock.seconds, output.tolist(), model.report.cached_tokens, model.report.target_passes))
    columns = {kind: list(zip(*runs, strict=True)) for kind, runs in found.items()}
    passes = {kind: sum(each[3]) + args.prompts for kind, each in columns.items()}
    return {
        **{"name": name, "tokens": prompts[0].shape[1], "not_read": mean(columns["warm"][2])},
        **{kind: mean(each[0]) for kind, each in columns.items()},
        "same": sum(map(list.__eq__, columns["cold"][1], columns["warm"][1])),
        "tokens_per_pass": {kind: args.new_tokens * args.prompts / count for kind, count in passes.items()},
        **{"pool_bytes": pool.nbytes, "texts": len(pool)},
    }


def answered(target, first, count, tokens, memory):
    """Answers requests of one project in this process. Returns what was drafted, and the texts."""
    model = opened(target, Suffix(memory_file=memory) if memory else "suffix")
    asked = read(["code"], model.tokenizer, first + count)[first:]
    texts = [written(model, one.ids, tokens) for one in asked]
    totals = model.totals.to_dict()
    kept = ("new_tokens", "target_passes", "drafted", "accepted", "tokens_per_pass", "acceptance_rate")
    return {name: totals[name] for name in kept} | {"texts": texts}


def memories_of(name, args):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "memory")

        def run(first, memory):
            settings = (MEMORIES[name], first, args.prompts, args.new_tokens, memory)
            return Worker("cases.sessions", "answered", *settings, threads=args.threads).answer()

        run(0, str(path))
        known = path.read_bytes()
        for what, first in (("the same requests again", 0), ("other requests of the project", args.prompts)):
            path.write_bytes(known)
            cold, warm = run(first, None), run(first, str(path))
            same = sum(map(list.__eq__, cold.pop("texts"), warm.pop("texts")))
            rows.append({"name": f"{name}, {what}", "cold": cold, "warm": warm, "same": same})
        rows[-1]["bytes"] = len(known)
    return rows


COLD_WARM = ("cold", "warm")


def text_of(found):
    its = found["about"]
    head = heading(
        "sessions", its, f"{its['prompts']} prompts each, {its['new_tokens']} new tokens, greedy, {its['dtype']}"
    )
    same = f"{{same}}/{its['prompts']}"
    pools = {
        **{"": "{name}", "tokens of a prompt": "{tokens}", "not read again": "{not_read:.0f}"},
        **{"seconds without": "{cold:.2f}", "with": "{warm:.3f}"},
        "times as fast": lambda row: f"{row['cold'] / row['warm']:.0f}",
        **{"same texts": same, "tokens per pass without": "{tokens_per_pass[cold]:.2f}"},
        "with ": "{tokens_per_pass[warm]:.2f}",
    }
    memories = {
        "": "{name}",
        **{f"{'accepted ' * (k == 'cold')}{k}": f"{{{k}[accepted]}} ({{{k}[acceptance_rate]:.0%}})" for k in COLD_WARM},
        **{f"{'tokens per pass ' * (k == 'cold')}{k} ": f"{{{k}[tokens_per_pass]:.2f}}" for k in COLD_WARM},
        "same texts": same,
    }
    first = "**A pool of sessions**: questions after one document. Seconds are the processor's, until the first token."
    second = '**A memory on disk**: `"suffix"` in a new process, cold and with what another process wrote.'
    return page(head, first, shown(pools, found["pools"]), second, shown(memories, found["memories"]))


sessions = Case(
    "sessions",
    """What a pool of sessions and a memory on disk save: reading of prompts that begin alike, and drafts after a restart.

The pool: questions that follow one document, with and without a pool, each call with a new question. Time is that of the
processor (one thread), from the call to its first token. The memory: one process answers requests of a project and ends; a new
one gets the same requests again, and other requests of that project, each with the memory and without it.
""",
    lambda args: {
        "about": about(args=args),
        "pools": [pool_of(name, args) for name in args.pools],
        "memories": [row for name in args.memories for row in memories_of(name, args)],
    },
    options={
        **{"prompts": 8, "new_tokens": 32},
        "pools": (list(POOLS), "that are measured"),
        "memories": (list(MEMORIES), "targets whose memory is"),
    },
    quick={"pools": ["shipped target, draft model"], "memories": ["shipped target"]},
    sections=(Section("howto/memory", "sessions"),),
    markdown=text_of,
)
