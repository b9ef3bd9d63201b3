"""What a long context does to drafting: seconds of tokens and rounds, the first token, and peak memory, by context length.

    python benchmarks/contexts.py --out benchmarks/contexts.json --docs docs/benchmarks.md

The shipped pair (or a grown target) with YaRN angles for 40,960 positions instead of 1,024, prompts filled up with held-out
code, greedy, float32, one row. How often a draft is right changes with the length as well, so beside the speedup stands what a
round costs in tokens of plain `generate`: that is what the context does, whatever is accepted.

Decoding is timed behind a prompt that the target has read before, given as `past_key_values`, from the end of the first round
on; the first token with the prompt still to be read; peak memory in a process for each, by the high-water mark of its resident
set (VmHWM, Linux), reset before the call.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tables import about, arguments, figures, measured_with, publish, write_json
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from assisted import AssistedModelForCausalLM, DraftModel, zoo
from assisted.bench import Bars, Prompt, Rules, at_length, pad_token, read, repeated_share, speedup
from assisted.bench.grown import grow
from assisted.bench.statistics import Interval
from assisted.drafters.model_drafter import ModelDrafting
from assisted.loading.quantization import memory_bytes
from assisted.loading.vocabulary import find_tokenizer
from assisted.report import Recorder

POSITIONS, TRAINED = 40_960, 1024
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": POSITIONS / TRAINED,
    "original_max_position_embeddings": TRAINED,
}
PLAIN, COMPILED = "plain", "plain, static cache, compiled"
DRAFTS: dict[str, tuple[str, Any]] = {
    "draft, Fixed(tokens=4)": ("zoo:draft", 4),
    "draft, Adaptive()": ("zoo:draft", None),
    "ngram, Adaptive()": ("ngram", None),
    "suffix, Adaptive()": ("suffix", None),
}
"""By name: what drafts, and how long; None is the default length."""
EAGER = ', fast="eager"'
"""Behind a name: without copies of weights, of which peak memory is measured as well."""
WARM_UP = 8  # tokens


def long_model(name: str, grown: str | None = None) -> Any:
    """A shipped model that reads `POSITIONS` tokens."""
    folder = zoo.folder(name)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings, config.rope_parameters = POSITIONS, dict(YARN)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model if grown is None else grow(model, grown)


def pairs(target: Any, names: list[str], fast: str = "auto") -> dict[str, AssistedModelForCausalLM]:
    tokenizer = find_tokenizer(zoo.folder("target"))
    specs = {name: DRAFTS[name] for name in names if name in DRAFTS}
    draft = long_model("draft") if any(spec == "zoo:draft" for spec, _ in specs.values()) else None
    return {
        name: AssistedModelForCausalLM.from_models(
            target, DraftModel(draft) if spec == "zoo:draft" else spec, length, tokenizer, fast=fast
        )
        for name, (spec, length) in specs.items()
    }


class Clock(BaseStreamer):
    """When tokens came; the prompt is the first thing that a streamer gets."""

    def __init__(self) -> None:
        self.pieces: list[float] = []
        self.started = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        self.pieces.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def first(self) -> float:
        return self.pieces[1] - self.started


class Rounds:
    """What the rounds of a call came to, when each was over, and what the draft model's reading of the prompt took."""

    def __init__(self) -> None:
        self.made: list[
            tuple[float, int, int, int, float]
        ] = []  # time, drafted, accepted, committed, seconds of drafting
        self.prompt = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        round_, prompt = Recorder.round, ModelDrafting._catch_up_prompt

        def noting(recorder: Any, counts: list[tuple[int, int, int]], drafting: float, *rest: Any) -> None:
            round_(recorder, counts, drafting, *rest)
            self.made.append((time.perf_counter(), *counts[0], drafting))

        def timed(drafting: Any, text: Any) -> Any:
            started = time.perf_counter()
            found = prompt(drafting, text)
            self.prompt = max(self.prompt, time.perf_counter() - started)
            return found

        with patch.object(Recorder, "round", noting), patch.object(ModelDrafting, "_catch_up_prompt", timed):
            yield

    def result(self) -> dict[str, float]:
        """Of all rounds but the first, whose drafting reads the prompt."""
        (first, *_, reading), later = self.made[0], self.made[1:]
        tokens = sum(one[3] for one in later)
        took = self.made[-1][0] - first
        return {
            "seconds_per_token": took / tokens,
            "rounds": len(later),
            "seconds": took,
            "tokens": tokens,
            "drafted": sum(one[1] for one in later),
            "accepted": sum(one[2] for one in later),
            "drafting": sum(one[4] for one in later),
            "first_drafting": reading,
            "draft_prompt": self.prompt,
        }


def call_of(rules: Rules) -> dict[str, Any]:
    return rules.call(pad_token(find_tokenizer(zoo.folder("target"))))


def generate(run: Callable[..., Any], prompt: Prompt, call: dict[str, Any], **more: Any) -> torch.Tensor:
    return run(prompt.ids, attention_mask=torch.ones_like(prompt.ids), **(call | more))


def prefix(target: Any, prompt: Prompt) -> Any:
    """The keys and values of all of a prompt but its last token."""
    with torch.inference_mode():
        return target(prompt.ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values


def decode_plainly(run: Callable[..., Any], prompt: Prompt, past: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    clock = Clock()
    given = {} if past is None else {"past_key_values": copy.deepcopy(past)}
    output = generate(run, prompt, call, streamer=clock, **given)
    tokens = len(clock.pieces) - 2
    return {"seconds_per_token": (clock.pieces[-1] - clock.pieces[1]) / tokens}, output


def decode_assisted(pair: Any, prompt: Prompt, past: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    rounds = Rounds()
    with rounds.noted():
        output = generate(pair.generate, prompt, call, past_key_values=copy.deepcopy(past))
    return rounds.result(), output


def measure_context(target: Any, own: dict[str, Any], context: int, args: Any, bars: Bars) -> list[dict[str, Any]]:
    """Everybody behind prompts of one length, in turns."""
    tokenizer, call = find_tokenizer(zoo.folder("target")), call_of(Rules(args.new_tokens))
    prompts = at_length(read(["code"], tokenizer, args.prompts), tokenizer, context)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [[] for _ in range(args.repeats)] for name in [PLAIN, *own]}
    same = dict.fromkeys(found, 0)
    repeated: list[list[int]] = []
    for place, prompt in enumerate(prompts):
        past = prefix(target, prompt)
        ways: dict[str, Callable[[dict[str, Any]], Any]] = {
            PLAIN: partial(decode_plainly, target.generate, prompt, past),
            **{name: partial(decode_assisted, pair, prompt, past) for name, pair in own.items()},
        }
        order = list(ways)
        expected = None
        for name in order:
            ways[name](call | {"max_new_tokens": WARM_UP})
        for repeat in range(args.repeats):
            for name in order:
                result, output = ways[name](call)
                found[name][repeat].append(result)
                if repeat == 0:
                    new = output[0, context:].tolist()
                    if name == PLAIN:
                        expected = new
                        repeated.append(new)
                    else:
                        same[name] += new == expected
            order = [PLAIN, *order[2:], *order[1:2]]
        bars(f"context {context}", (place + 1) / len(prompts))
    rows = [summed(name, found, context) | {"same": same[name], "prompts": args.prompts} for name in found]
    rows[0]["repeated_4grams"] = repeated_share(repeated)
    if args.compiled and context <= args.compiled_up_to:
        rows.insert(1, measure_compiled(target, prompts, call, context, args.repeats))
    return rows


def measure_compiled(target: Any, prompts: list[Prompt], call: Any, context: int, repeats: int) -> dict[str, Any]:
    """Plain `generate`'s fastest mode behind short contexts. It takes no cache, so it reads the prompt each time."""
    from assisted.bench import plain

    torch._dynamo.reset()
    run = plain(target)[-1].generate
    decode_plainly(run, prompts[0], None, call)
    taken = [[decode_plainly(run, prompt, None, call)[0] for prompt in prompts] for _ in range(repeats)]
    each = [one["seconds_per_token"] for row in taken for one in row]
    return {"name": COMPILED, "context": context, "milliseconds_per_token": 1e3 * median(each)}


def summed(name: str, found: dict[str, Any], context: int) -> dict[str, Any]:
    def table(of: str) -> list[list[float]]:
        return [[one["seconds_per_token"] for one in row] for row in found[of]]

    runs = [one for row in found[name] for one in row]
    row: dict[str, Any] = {
        "name": name,
        "context": context,
        "speedup": vars(speedup(table(PLAIN), table(name))),
        "milliseconds_per_token": 1e3 * median(one["seconds_per_token"] for one in runs),
    }
    if name in (PLAIN, COMPILED):
        return row
    total = {key: sum(one[key] for one in runs) for key in runs[0]}
    plain = sum(map(sum, table(PLAIN))) / len(runs)
    return row | {
        "tokens_per_pass": total["tokens"] / total["rounds"],
        "acceptance_rate": total["accepted"] / total["drafted"] if total["drafted"] else 0.0,
        "milliseconds_per_round": 1e3 * total["seconds"] / total["rounds"],
        "plain_tokens_per_round": total["seconds"] / total["rounds"] / plain,
        "drafting_share": total["drafting"] / total["seconds"],
        "drafting_microseconds": 1e6 * total["drafting"] / total["rounds"],
        "first_drafting_milliseconds": 1e3 * total["first_drafting"] / len(runs),
        "draft_prompt_milliseconds": 1e3 * total["draft_prompt"] / len(runs),
    }


def measure_first(target: Any, own: dict[str, Any], context: int, args: Any, bars: Bars) -> dict[str, Any]:
    """Seconds until a streamer has the first token, prompt included, over plain's: [ratio, low, high] by name."""
    tokenizer, call = find_tokenizer(zoo.folder("target")), call_of(Rules(2))
    prompts = at_length(read(["code"], tokenizer, args.prompts), tokenizer, context)
    ways = {PLAIN: target.generate} | {name: pair.generate for name, pair in own.items()}
    taken: dict[str, list[list[float]]] = {name: [[] for _ in range(args.first_repeats)] for name in ways}
    order = list(ways)
    for repeat in range(args.first_repeats):
        for place, prompt in enumerate(prompts):
            for name in order:
                clock = Clock()
                generate(ways[name], prompt, call, streamer=clock)
                taken[name][repeat].append(clock.first)
            order = order[1:] + order[:1]
            done = (repeat + (place + 1) / len(prompts)) / args.first_repeats
            bars(f"context {context}, first token", done)
    return {
        name: {
            "milliseconds": 1e3 * median(chain.from_iterable(rows)),
            "over_plain": vars(speedup(rows, taken[PLAIN])),
        }
        for name, rows in taken.items()
    }


def high_water_mark() -> int:
    """Bytes of the resident set, at most, since it was reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def child(args: Any) -> None:
    """One contestant in a process of its own: peak memory of a second call, weights included."""
    if args.threads:
        torch.set_num_threads(args.threads)
    (context,) = args.contexts
    target = long_model("target", args.grown)
    name = args.child.removesuffix(EAGER)
    own = pairs(target, [name], "auto" if name == args.child else "eager")
    call = call_of(Rules(args.new_tokens))
    tokenizer = find_tokenizer(zoo.folder("target"))
    (prompt,) = at_length(read(["code"], tokenizer, 1), tokenizer, context)
    run = own[name].generate if own else target.generate
    short = Prompt(prompt.source, prompt.category, prompt.text, prompt.ids[:, -64:])
    generate(run, short, call, max_new_tokens=WARM_UP)  # what is made once
    Path("/proc/self/clear_refs").write_text("5")
    generate(run, prompt, call)
    draft = own[name].drafter.model if own else None
    slots = 0
    if draft is not None:
        config = draft.config
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        slots = 2 * 4 * heads * (context + args.new_tokens)
    print(
        json.dumps(
            {"peak": high_water_mark(), "draft": 0 if draft is None else memory_bytes(draft), "draft_slots": slots}
        )
    )


def measure_memory(context: int, names: list[str], args: Any, bars: Bars) -> dict[str, Any]:
    """Peak bytes by contestant, each in a process of its own."""
    found = {}
    for place, name in enumerate(names):
        command = [sys.executable, __file__, "--child", name, "--contexts", str(context)]
        command += ["--new-tokens", str(args.new_tokens), *(["--grown", args.grown] if args.grown else [])]
        command += ["--threads", str(torch.get_num_threads())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found[name] = json.loads(done.stdout.splitlines()[-1])
        bars(f"context {context}, memory", (place + 1) / len(names))
    plain = found[PLAIN]["peak"]
    for one in found.values():
        one["over_plain"] = one["peak"] - plain
        one["goal"] = one["draft"] + one["draft_slots"] + 0.05 * plain
    return found


def measure(args: Any) -> dict[str, Any]:
    target = long_model("target", args.grown)
    own = pairs(target, args.contestants)
    machine = about(next(iter(own.values())), prompts=args.prompts, repeats=args.repeats, new_tokens=args.new_tokens)
    machine["target"] = f"grown:{args.grown}" if args.grown else "zoo:target"
    found: dict[str, Any] = {"about": machine, "rows": [], "first": {}, "memory": {}}
    with Bars() as bars:
        for context in args.contexts:
            found["rows"] += measure_context(target, own, context, args, bars)
            if args.first_repeats and context <= args.first_up_to:
                found["first"][str(context)] = measure_first(target, own, context, args, bars)
            write_json(args.out, found)  # a long measurement, of which nothing is to be lost
        for context in args.memory:
            found["memory"][str(context)] = measure_memory(
                context, [PLAIN, *own, *(name + EAGER for name in own)], args, bars
            )
    return found


def markdown(found: dict[str, Any]) -> str:
    """The section as it stands in docs."""
    lines = [
        measured_with(found["about"], "python benchmarks/contexts.py").partition(" Times plain")[0]
        + f" Target: `{found['about']['target']}`, YaRN angles, {found['about']['new_tokens']} tokens behind each prompt; 1.00 "
        "is plain `generate`, not compiled. Drafting: of the rounds behind the first one.",
        "",
        "| context | | times plain | ms per token | tokens per pass | accepted | a round, in plain tokens "
        "| drafting, of a round | drafting, µs a round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        (plain,) = (one for one in found["rows"] if one["name"] == PLAIN and one["context"] == row["context"])
        times = f"{plain['milliseconds_per_token'] / row['milliseconds_per_token']:.2f}"
        if "speedup" in row:
            times = str(Interval(**row["speedup"]))
        cells = [str(row["context"]), row["name"], times, f"{row['milliseconds_per_token']:.2f}"]
        if "tokens_per_pass" in row:
            cells += [
                f"{row['tokens_per_pass']:.2f}",
                f"{row['acceptance_rate']:.0%}",
                f"{row['plain_tokens_per_round']:.2f}",
                f"{row['drafting_share']:.1%}",
                f"{row['drafting_microseconds']:.0f}",
            ]
        else:
            cells += ["1.00", "", f"{row['milliseconds_per_token'] / plain['milliseconds_per_token']:.2f}", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += kept_up(found["rows"])
    if found["first"]:
        lines += ["", "Until the first token, over plain:", "", "| context | plain, ms | " + _names(found) + " |"]
        lines.append("|---" * (2 + len(_drafts(found))) + "|")
        for context, row in found["first"].items():
            ratios = [str(Interval(**row[name]["over_plain"])) for name in _drafts(found)]
            lines.append(f"| {context} | {row[PLAIN]['milliseconds']:.0f} | " + " | ".join(ratios) + " |")
        lines += ["", "Behind the first token a drafter reads the prompt as well, milliseconds (once a call):", ""]
        lines += ["| context | " + _names(found) + " |", "|---" * (1 + len(_drafts(found))) + "|"]
        for context in dict.fromkeys(row["context"] for row in found["rows"]):
            rows = {row["name"]: row for row in found["rows"] if row["context"] == context}
            reading = [f"{rows[name]['first_drafting_milliseconds']:.1f}" for name in _drafts(found)]
            lines.append(f"| {context} | " + " | ".join(reading) + " |")
    if found["memory"]:
        lines += [
            "",
            "Peak memory over plain's (resident set), MiB, and what the draft's weights and slots take, and 5% of plain's:",
            "",
        ]
        lines += ["| context | plain | | over plain | draft and slots | and 5% |", "|---|---|---|---|---|---|"]
        for context, by_name in found["memory"].items():
            for name, one in by_name.items():
                if name != PLAIN:
                    cells = [one["over_plain"], one["draft"] + one["draft_slots"], one["goal"]]
                    lines.append(
                        f"| {context} | {by_name[PLAIN]['peak'] / 2**20:.0f} | {name} | "
                        + " | ".join(f"{cell / 2**20:.1f}" for cell in cells)
                        + " |"
                    )
    return "\n".join(lines)


def kept_up(rows: list[dict[str, Any]]) -> list[str]:
    """How much of the speedup behind the shortest context is left behind the others."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    first = {row["name"]: row for row in rows if row["context"] == contexts[0] and "tokens_per_pass" in row}
    if len(contexts) < 2 or not first:
        return []
    lines = ["", f"Speedup against that behind {contexts[0]} tokens; in brackets at equal tokens per pass:", ""]
    lines += ["| context | " + " | ".join(first) + " |", "|---" * (1 + len(first)) + "|"]
    for context in contexts[1:]:
        cells = []
        for name, base in first.items():
            (row,) = (row for row in rows if row["context"] == context and row["name"] == name)
            alone = base["plain_tokens_per_round"] / row["plain_tokens_per_round"]
            cells.append(f"{row['speedup']['ratio'] / base['speedup']['ratio']:.2f} ({alone:.2f})")
        lines.append(f"| {context} | " + " | ".join(cells) + " |")
    return lines


def _drafts(found: dict[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys(row["name"] for row in found["rows"]) if name in DRAFTS]


def _names(found: dict[str, Any]) -> str:
    return " | ".join(_drafts(found))


def main() -> None:
    parser = arguments(__doc__, prompts=3, repeats=3)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 1024, 4096, 16384, 32768], help="tokens of prompts"
    )
    parser.add_argument("--contestants", nargs="+", choices=list(DRAFTS), default=list(DRAFTS), metavar="NAME")
    parser.add_argument("--new-tokens", type=int, default=64, help="behind each prompt (default: %(default)s)")
    parser.add_argument("--grown", metavar="SIZE", help="of the target, such as 0.25b; the shipped one when left out")
    parser.add_argument("--first-repeats", type=int, default=3, help="of the first token; 0 leaves it out (default: 3)")
    parser.add_argument("--first-up-to", type=int, default=16384, metavar="P", help="longest prompt that is timed so")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[512, 16384], metavar="P", help="contexts of peak memory"
    )
    parser.add_argument(
        "--compiled-up-to",
        type=int,
        default=4096,
        metavar="P",
        help="longest prompt behind which plain generate is compiled as well: prompts are then read under a mask of P x P "
        "numbers (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="512 and 2048 tokens, little of everything")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.compiled = not args.no_compile
    if args.child:
        child(args)
        return
    if args.quick:
        args.contexts, args.memory, args.compiled = [512, 2048], [512], False
        args.prompts, args.repeats, args.first_repeats, args.new_tokens = 2, 1, 1, 32
    publish(markdown(figures(args, measure)), args.docs, "contexts")


if __name__ == "__main__":
    main()
