"""Long contexts: seconds of tokens and rounds, the first token, and peak memory, by context length.

    python benchmarks/contexts.py --out benchmarks/contexts.json --docs docs/benchmarks/long-contexts.md

The shipped pair (or a grown target) has YaRN angles for 40,960 positions instead of 1,024. Prompts are filled up with held-out
code; greedy, float32, one row. Acceptance changes with the length as well, so the cost of a round in tokens of plain `generate`
stands next to the speedup. It shows the effect of the context whatever is accepted.

Decoding is timed from the end of the first round on, after a prompt given as `past_key_values`. The first token is timed
without these, so the prompt is read. Peak memory is measured in one process each: the high-water mark of its resident set
(VmHWM, Linux), reset before the call.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tables import (
    about,
    answer,
    arguments,
    figures,
    in_own_process,
    measured_with,
    paired,
    publish,
    required,
    write_json,
)
from transformers import AutoConfig, AutoModelForCausalLM

from assisted import AssistedModelForCausalLM, DraftModel, zoo
from assisted.bench import (
    Bars,
    Interval,
    Measured,
    Method,
    Prompt,
    Rules,
    at_length,
    batches,
    pad_token,
    plain,
    read,
    repeated_share,
    speedup,
    stream,
)
from assisted.bench.clock import FirstToken, now, turns
from assisted.bench.table import markdown_table
from assisted.drafts import Round
from assisted.loading.vocabulary import find_tokenizer
from tools.grown import grow

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
"""By name: the draft and its length; None is the default length."""
EAGER = ', fast="eager"'
"""After a name: without copies of weights. Peak memory is measured for these as well."""
WARM_UP = 8  # tokens


def long_model(
    name: str,
    grown: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A shipped model that reads `POSITIONS` tokens. grown: a size to grow it to."""
    folder = zoo.folder(name)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings, config.rope_parameters = POSITIONS, dict(YARN)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    return model.to(device) if grown is None else grow(model, grown, device=device)


def methods(target: Any, names: Sequence[str], fast: str = "auto") -> list[Method]:
    """Those of DRAFTS that are named; one draft model for all."""
    specs = {name: DRAFTS[name] for name in names}
    if any(spec == "zoo:draft" for spec, _ in specs.values()):
        draft = DraftModel(long_model("draft", dtype=target.dtype, device=target.device))
        specs = {name: (draft if spec == "zoo:draft" else spec, length) for name, (spec, length) in specs.items()}
    return paired(target, find_tokenizer(zoo.folder("target")), specs, fast)


def prompts_of(count: int, context: int, device: torch.device | str = "cpu") -> list[Prompt]:
    """Held-out code of a length, on a device."""
    tokenizer = find_tokenizer(zoo.folder("target"))
    found = at_length(read(["code"], tokenizer, count), tokenizer, context)
    return [replace(prompt, ids=prompt.ids.to(device)) for prompt in found]


def call_of(new_tokens: int) -> dict[str, Any]:
    return Rules(new_tokens).call(pad_token(find_tokenizer(zoo.folder("target"))))


def generate(run: Callable[..., Any], prompt: Prompt, call: dict[str, Any], **more: Any) -> list[int]:
    """The new tokens."""
    output = run(prompt.ids, attention_mask=torch.ones_like(prompt.ids), **(call | more))
    return output[0, prompt.ids.shape[1] :].tolist()


def prefix(target: Any, prompt: Prompt) -> Any:
    """The keys and values of all of a prompt but its last token."""
    with torch.inference_mode():
        return target(prompt.ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values


def decode_plainly(run: Callable[..., Any], prompt: Prompt, past: Any, call: dict[str, Any]) -> tuple[Any, list[int]]:
    """The seconds of the tokens after the first one, and the tokens written."""
    given = {} if past is None else {"past_key_values": copy.deepcopy(past)}
    clock = FirstToken(prompt.ids.device)
    new = generate(run, prompt, call, streamer=clock, **given)
    took = now(prompt.ids.device) - clock.started - clock.seconds
    return {"seconds": took, "tokens": len(new) - 1}, new


def decode_assisted(
    pair: AssistedModelForCausalLM, prompt: Prompt, past: Any, call: dict[str, Any]
) -> tuple[Any, list[int]]:
    """Sums over all rounds except the first, whose drafting reads the prompt, and the tokens written."""
    made: list[tuple[float, Round]] = []
    pair.watch = lambda round: made.append((now(prompt.ids.device), round))
    try:
        new = generate(pair.generate, prompt, call, past_key_values=copy.deepcopy(past))
    finally:
        pair.watch = None
    (began, first), later = made[0], [round for _, round in made[1:]]
    found = {
        "seconds": made[-1][0] - began,
        "tokens": sum(round.kept[0] for round in later),
        "rounds": len(later),
        "drafted": sum(round.drafted[0] for round in later),
        "accepted": sum(round.accepted[0] for round in later),
        "drafting": sum(round.draft_seconds for round in later),
        "first_drafting": first.draft_seconds,
    }
    return found, new


def measure_context(target: Any, own: Sequence[Method], context: int, args: Any, bars: Bars) -> list[dict[str, Any]]:
    """All methods after prompts of one length, in turns."""
    call, prompts = call_of(args.new_tokens), prompts_of(args.prompts, context, target.device)
    names = [PLAIN, *(one.name for one in own)]
    found: dict[str, list[list[Any]]] = {name: [[] for _ in range(args.repeats)] for name in names}
    wrote: dict[str, list[list[int]]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        past = prefix(target, prompt)  # large, so for one prompt at a time
        ways: dict[str, Callable[[dict[str, Any]], Any]] = {
            PLAIN: partial(decode_plainly, target.generate, prompt, past),
            **{one.name: partial(decode_assisted, one.model, prompt, past) for one in own},
        }
        for name in names:
            ways[name](call | {"max_new_tokens": WARM_UP})
        for name, _, repeat in turns(names, repeats=args.repeats):
            result, new = ways[name](call)
            found[name][repeat].append(result)
            if repeat == 0:
                wrote[name].append(new)
        bars(f"context {context}", (number + 1) / len(prompts))
    rows = [summed(name, found, context) | {"prompts": args.prompts} for name in names]
    for row in rows:
        row["same"] = sum(a == b for a, b in zip(wrote[row["name"]], wrote[PLAIN], strict=True))
    rows[0]["repeated_4grams"] = repeated_share(wrote[PLAIN])
    if args.compiled and context <= args.compiled_up_to:
        rows.insert(1, measure_compiled(target, prompts, call, context, args.repeats))
    return rows


def measure_compiled(target: Any, prompts: list[Prompt], call: Any, context: int, repeats: int) -> dict[str, Any]:
    """Plain `generate`'s fastest mode after short contexts. It accepts no cache, so it reads the prompt each time."""
    torch._dynamo.reset()
    run = plain(target)[-1].generate
    decode_plainly(run, prompts[0], None, call)
    taken = [decode_plainly(run, prompt, None, call)[0] for _ in range(repeats) for prompt in prompts]
    return {"name": COMPILED, "context": context, "milliseconds_per_token": 1e3 * median(map(per_token, taken))}


def per_token(one: dict[str, Any]) -> float:
    """Seconds per token."""
    return one["seconds"] / one["tokens"]


def summed(name: str, found: dict[str, list[list[Any]]], context: int) -> dict[str, Any]:
    """A method's row. found: by method, the sums of its calls, [R][N]."""
    seconds = {one: [list(map(per_token, row)) for row in found[one]] for one in (PLAIN, name)}
    row: dict[str, Any] = {
        "name": name,
        "context": context,
        "speedup": vars(speedup(seconds[PLAIN], seconds[name])),
        "milliseconds_per_token": 1e3 * median(chain(*seconds[name])),
    }
    if name == PLAIN:
        return row
    runs = list(chain(*found[name]))
    total = {key: sum(one[key] for one in runs) for key in runs[0]}
    mean = sum(map(sum, seconds[PLAIN])) / len(runs)
    return row | {
        "tokens_per_pass": total["tokens"] / total["rounds"],
        "acceptance_rate": total["accepted"] / total["drafted"] if total["drafted"] else 0.0,
        "milliseconds_per_round": 1e3 * total["seconds"] / total["rounds"],
        "plain_tokens_per_round": total["seconds"] / total["rounds"] / mean,
        "drafting_share": total["drafting"] / total["seconds"],
        "drafting_microseconds": 1e6 * total["drafting"] / total["rounds"],
        "first_drafting_milliseconds": 1e3 * total["first_drafting"] / len(runs),
    }


def measure_first(target: Any, own: Sequence[Method], context: int, args: Any, bars: Bars) -> dict[str, Any]:
    """Milliseconds until the first token, prompt included, and the ratio to plain's with its interval, by name."""
    entries = [Measured(one) for one in (*plain(target, compiled=False), *own)]
    work = batches(prompts_of(args.prompts, context))
    said = partial(bars, f"context {context}, first token")
    stream(target, entries, work, Rules(2), progress=lambda _, share: said(share), repeats=args.first_repeats)
    taken = {
        one.method.name: torch.tensor(one.first_token, dtype=torch.float64).view(-1, len(work))  # [R, N]
        for one in required(entries)
    }
    return {
        name: {
            "milliseconds": 1e3 * median(rows.flatten().tolist()),
            "over_plain": vars(speedup(rows.tolist(), taken[PLAIN].tolist())),
        }
        for name, rows in taken.items()
    }


def high_water_mark() -> int:
    """The most bytes in the resident set since the last reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def child(args: Any) -> None:
    """Peak memory of one method's second call in a process of its own, weights included."""
    if args.threads:
        torch.set_num_threads(args.threads)
    (context,) = args.contexts
    target = long_model("target", args.grown)
    name = args.child.removesuffix(EAGER)
    own = methods(target, [name] if name != PLAIN else [], "auto" if name == args.child else "eager")
    run = own[0].generate if own else target.generate
    (prompt,) = prompts_of(1, context)
    short = Prompt(prompt.source, prompt.category, prompt.text, prompt.ids[:, -64:])
    generate(run, short, call_of(WARM_UP))  # makes what is made only once
    Path("/proc/self/clear_refs").write_text("5")
    generate(run, prompt, call_of(args.new_tokens))
    draft = own[0].model.drafter.model if own else None
    slots = 0
    if draft is not None:
        config = draft.config
        heads = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        slots = 2 * 4 * heads * (context + args.new_tokens)
    draft_bytes = own[0].draft_bytes if own else 0
    print(json.dumps({"peak": high_water_mark(), "draft": draft_bytes, "draft_slots": slots}))


def measure_memory(context: int, names: list[str], args: Any, bars: Bars) -> dict[str, Any]:
    """Peak bytes by method, each in a process of its own."""
    options = ["--contexts", context, "--new-tokens", args.new_tokens, "--threads", torch.get_num_threads()]
    options += ["--grown", args.grown] if args.grown else []
    found = {}
    for number, name in enumerate(names):
        found[name] = answer(in_own_process(__file__, "--child", name, *options))
        bars(f"context {context}, memory", (number + 1) / len(names))
    plain = found[PLAIN]["peak"]
    for one in found.values():
        one["over_plain"] = one["peak"] - plain
        one["goal"] = one["draft"] + one["draft_slots"] + 0.05 * plain
    return found


def measure(args: Any) -> dict[str, Any]:
    target = long_model("target", args.grown)
    own = methods(target, args.methods)
    names = [one.name for one in own]
    machine = about(own[0].model, prompts=args.prompts, repeats=args.repeats, new_tokens=args.new_tokens)
    machine["target"] = f"grown:{args.grown}" if args.grown else "zoo:target"
    found: dict[str, Any] = {"about": machine, "rows": [], "first": {}, "memory": {}}
    with Bars() as bars:
        for context in args.contexts:
            found["rows"] += measure_context(target, own, context, args, bars)
            if args.first_repeats and context <= args.first_up_to:
                found["first"][str(context)] = measure_first(target, own, context, args, bars)
            write_json(args.out, found)  # the measurement is long
        for context in args.memory:
            everybody = [PLAIN, *names, *(name + EAGER for name in names)]
            found["memory"][str(context)] = measure_memory(context, everybody, args, bars)
    return found


def cell(name: str, form: str, otherwise: str = "") -> Callable[[dict[str, Any]], str]:
    """How a field of a row is shown. otherwise: in rows without that field, those of plain decoding."""
    return lambda row: form.format(row[name]) if name in row else otherwise


CELLS: dict[str, Callable[[dict[str, Any]], str]] = {
    "context": cell("context", "{}"),
    "": cell("name", "{}"),
    "speedup": lambda row: str(Interval(**row["speedup"])) if "speedup" in row else f"{1 / row['times']:.2f}",
    "ms per token": cell("milliseconds_per_token", "{:.2f}"),
    "tokens per pass": cell("tokens_per_pass", "{:.2f}", "1.00"),
    "accepted": cell("acceptance_rate", "{:.0%}"),
    "a round, in plain tokens": lambda row: f"{row.get('plain_tokens_per_round', row['times']):.2f}",
    "drafting, of a round": cell("drafting_share", "{:.1%}"),
    "drafting, µs a round": cell("drafting_microseconds", "{:.0f}"),
}
"""By the title of the column. A row's `times` are its milliseconds per token over those of plain decoding."""


def markdown(found: dict[str, Any]) -> str:
    """The section as it stands in docs."""
    lines = [
        measured_with(found["about"], "python benchmarks/contexts.py").partition(" The speedup")[0]
        + f" Target: `{found['about']['target']}`, YaRN angles, {found['about']['new_tokens']} tokens after each prompt. "
        "1.00 is plain `generate`, not compiled. Drafting is measured in the rounds after the first one.",
        "",
    ]
    by_context: dict[int, dict[str, Any]] = {}
    for row in found["rows"]:
        by_context.setdefault(row["context"], {})[row["name"]] = row
    drafts = [name for name in dict.fromkeys(row["name"] for row in found["rows"]) if name in DRAFTS]
    for row in found["rows"]:
        plainly = by_context[row["context"]][PLAIN]
        row["times"] = row["milliseconds_per_token"] / plainly["milliseconds_per_token"]
    lines += markdown_table(CELLS, ([show(row) for show in CELLS.values()] for row in found["rows"]))
    lines += kept_up(by_context, drafts)
    if found["first"]:
        rows = (
            [context, f"{row[PLAIN]['milliseconds']:.0f}", *(Interval(**row[name]["over_plain"]) for name in drafts)]
            for context, row in found["first"].items()
        )
        lines += [
            "",
            "Time until the first token, relative to that of plain `generate`:",
            "",
            *markdown_table(["context", "plain, ms", *drafts], rows),
        ]
        reading = (
            [context, *(f"{rows[name]['first_drafting_milliseconds']:.1f}" for name in drafts)]
            for context, rows in by_context.items()
        )
        lines += [
            "",
            "After the first token, a drafter also reads the prompt, once per call. This takes, in milliseconds:",
            "",
        ]
        lines += markdown_table(["context", *drafts], reading)
    if found["memory"]:
        lines += [
            "",
            "Peak memory (resident set) in MiB: that of plain `generate`, the excess over it, the draft's weights and slots, "
            "and these plus 5% of plain's peak:",
            "",
        ]
        sizes = (
            [context, f"{by_name[PLAIN]['peak'] / 2**20:.0f}", name]
            + [f"{size / 2**20:.1f}" for size in (one["over_plain"], one["draft"] + one["draft_slots"], one["goal"])]
            for context, by_name in found["memory"].items()
            for name, one in by_name.items()
            if name != PLAIN
        )
        lines += markdown_table(["context", "plain", "", "over plain", "draft and slots", "and 5%"], sizes)
    return "\n".join(lines)


def kept_up(by_context: dict[int, dict[str, Any]], drafts: Sequence[str]) -> list[str]:
    """How much of the speedup after the shortest context remains after the others."""
    (shortest, first), *others = by_context.items()
    if not others or not drafts:
        return []
    table = []
    for context, rows in others:
        cells = []
        for name in drafts:
            alone = first[name]["plain_tokens_per_round"] / rows[name]["plain_tokens_per_round"]
            kept = rows[name]["speedup"]["ratio"] / first[name]["speedup"]["ratio"]
            cells.append(f"{kept:.2f} ({alone:.2f})")
        table.append([context, *cells])
    return [
        "",
        f"Speedup relative to that after {shortest} tokens. In brackets: what it would be at equal tokens per pass.",
        "",
        *markdown_table(["context", *drafts], table),
    ]


def main() -> None:
    numbers = {
        "--new-tokens": (64, "after each prompt"),
        "--first-repeats": (3, "for the first token; 0 leaves it out"),
        "--first-up-to": (16384, "longest prompt for the first token"),
        # it reads prompts with a mask of P x P numbers
        "--compiled-up-to": (4096, "longest prompt after which plain generate is also compiled"),
    }
    parser = arguments(__doc__, prompts=3, repeats=3, numbers=numbers)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 1024, 4096, 16384, 32768], help="tokens of prompts"
    )
    parser.add_argument("--methods", nargs="+", choices=list(DRAFTS), default=list(DRAFTS), metavar="NAME")
    parser.add_argument("--grown", metavar="SIZE", help="of the target, such as 0.25b; the shipped one when left out")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[512, 16384], metavar="P", help="contexts of peak memory"
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
