"""Long contexts."""

import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import median

import torch
from cases.memory import forget_peak, resident
from shared import ENDS, Case, Section, Worker, about, heading, page, paired, shown
from transformers import AutoConfig, AutoModelForCausalLM

from assisted import DraftModel, zoo
from assisted.lab.bench import (
    Bars,
    Interval,
    Measured,
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
from assisted.lab.bench.clock import FirstToken, now, turns
from assisted.loading.vocabulary import find_tokenizer

POSITIONS, TRAINED = 40_960, 1024
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": POSITIONS / TRAINED,
    "original_max_position_embeddings": TRAINED,
}
PLAIN, COMPILED = "plain", "plain, static cache, compiled"
DRAFTS = {
    "draft, Fixed(tokens=4)": ("zoo:draft", 4),
    "draft, Adaptive()": ("zoo:draft", None),
    "ngram, Adaptive()": ("ngram", None),
    "suffix, Adaptive()": ("suffix", None),
}
"""By name: the draft and its length; None is the default length."""
EAGER = ', fast="eager"'
"""After a name: without copies of weights. Peak memory is measured for these as well."""
WARM_UP = 8  # tokens


def long_model(name, grown=None, dtype=torch.float32, device="cpu"):
    """A shipped model that reads `POSITIONS` tokens. grown: a size to grow it to."""
    from assisted.lab.grown import grow

    folder = zoo.folder(name)
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings, config.rope_parameters = POSITIONS, dict(YARN)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    return model.to(device) if grown is None else grow(model, grown, device=device)


def methods(target, names, fast="auto"):
    """Those of DRAFTS that are named; one draft model for all."""
    specs = {name: DRAFTS[name] for name in names}
    if any(spec == "zoo:draft" for spec, _ in specs.values()):
        draft = DraftModel(long_model("draft", dtype=target.dtype, device=target.device))
        specs = {name: (draft if spec == "zoo:draft" else spec, length) for name, (spec, length) in specs.items()}
    return paired(target, find_tokenizer(zoo.folder("target")), specs, fast)


def prompts_of(count, context, device="cpu"):
    """Held-out code of a length, on a device."""
    tokenizer = find_tokenizer(zoo.folder("target"))
    found = at_length(read(["code"], tokenizer, count), tokenizer, context)
    return [replace(prompt, ids=prompt.ids.to(device)) for prompt in found]


def call_of(new_tokens):
    return Rules(new_tokens).call(pad_token(find_tokenizer(zoo.folder("target"))))


def generate(run, prompt, call, **more):
    """The new tokens."""
    output = run(prompt.ids, attention_mask=torch.ones_like(prompt.ids), **(call | more))
    return output[0, prompt.ids.shape[1] :].tolist()


def prefix(target, prompt):
    """The keys and values of all of a prompt but its last token."""
    with torch.inference_mode():
        return target(prompt.ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values


def decode_plainly(run, prompt, past, call):
    """The seconds of the tokens after the first one, and the tokens written."""
    given = {} if past is None else {"past_key_values": copy.deepcopy(past)}
    clock = FirstToken(prompt.ids.device)
    new = generate(run, prompt, call, streamer=clock, **given)
    took = now(prompt.ids.device) - clock.started - clock.seconds
    return {"seconds": took, "tokens": len(new) - 1}, new


def decode_assisted(pair, prompt, past, call):
    """Sums over all rounds except the first, whose drafting reads the prompt, and the tokens written."""
    made = []
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


def measure_context(target, own, context, args, bars):
    """All methods after prompts of one length, in turns."""
    call, prompts = call_of(args.new_tokens), prompts_of(args.prompts, context, target.device)
    names = [PLAIN, *(one.name for one in own)]
    found = {name: [[] for _ in range(args.repeats)] for name in names}
    wrote = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        past = prefix(target, prompt)  # large, so for one prompt at a time
        ways = {
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
    if not args.no_compile and context <= args.compiled_up_to:
        rows.insert(1, measure_compiled(target, prompts, call, context, args.repeats))
    return rows


def measure_compiled(target, prompts, call, context, repeats):
    """Plain `generate`'s fastest mode after short contexts. It accepts no cache, so it reads the prompt each time."""
    torch._dynamo.reset()
    run = plain(target)[-1].generate
    decode_plainly(run, prompts[0], None, call)
    taken = [decode_plainly(run, prompt, None, call)[0] for _ in range(repeats) for prompt in prompts]
    return {"name": COMPILED, "context": context, "milliseconds_per_token": 1e3 * median(map(per_token, taken))}


def per_token(one):
    """Seconds per token."""
    return one["seconds"] / one["tokens"]


def summed(name, found, context):
    """A method's row. found: by method, the sums of its calls, [R][N]."""
    seconds = {one: [list(map(per_token, row)) for row in found[one]] for one in (PLAIN, name)}
    row = {
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


def measure_first(target, own, context, args, bars):
    """Milliseconds until the first token, prompt included, and the ratio to plain's with its interval, by name."""
    entries = [Measured(one) for one in (*plain(target, compiled=False), *own)]
    work = batches(prompts_of(args.prompts, context))
    said = partial(bars, f"context {context}, first token")
    stream(target, entries, work, Rules(2), progress=lambda _, share: said(share), repeats=args.first_repeats)
    taken = {
        one.method.name: torch.tensor(one.first_token, dtype=torch.float64).view(-1, len(work))  # [R, N]
        for one in entries
    }
    return {
        name: {
            "milliseconds": 1e3 * median(rows.flatten().tolist()),
            "over_plain": vars(speedup(rows.tolist(), taken[PLAIN].tolist())),
        }
        for name, rows in taken.items()
    }


def peak_memory(name, context, tokens, grown):
    """Peak memory of one method's second call in this process, weights included."""
    target = long_model("target", grown)
    own = methods(target, [] if name == PLAIN else [name.removesuffix(EAGER)], "eager" if EAGER in name else "auto")
    run = own[0].generate if own else target.generate
    (prompt,) = prompts_of(1, context)
    generate(run, replace(prompt, ids=prompt.ids[:, -64:]), call_of(WARM_UP))  # makes what is made only once
    forget_peak()
    generate(run, prompt, call_of(tokens))
    draft, slots = own[0].model.drafter.model if own else None, 0
    if draft is not None:
        heads = draft.config.num_hidden_layers * draft.config.num_key_value_heads * draft.config.head_dim
        slots = 2 * 4 * heads * (context + tokens)
    return {"peak": resident(peak=True), "draft": own[0].draft_bytes if own else 0, "draft_slots": slots}


def measure_memory(context, names, args, bars):
    """Peak bytes by method, each in a process of its own."""
    found = {}
    for number, name in enumerate(names):
        settings = (name, context, args.new_tokens, args.grown)
        worker = Worker("cases.contexts", "peak_memory", *settings, threads=torch.get_num_threads())
        found[name] = worker.answer()
        bars(f"context {context}, memory", (number + 1) / len(names))
    plain = found[PLAIN]["peak"]
    for one in found.values():
        one["over_plain"] = one["peak"] - plain
        one["goal"] = one["draft"] + one["draft_slots"] + 0.05 * plain
    return found


def measure(args):
    target = long_model("target", args.grown)
    own = methods(target, args.methods)
    names = [one.name for one in own]
    its = about(own[0].model, args, target=f"grown:{args.grown}" if args.grown else "zoo:target")
    found = {"about": its, "rows": [], "first": {}, "memory": {}}
    with Bars() as bars:
        for context in args.contexts:
            found["rows"] += measure_context(target, own, context, args, bars)
            if args.first_repeats and context <= args.first_up_to:
                found["first"][str(context)] = measure_first(target, own, context, args, bars)
            args.save(found)  # the measurement is long
        for context in args.memory:
            everybody = [PLAIN, *names, *(name + EAGER for name in names)]
            found["memory"][str(context)] = measure_memory(context, everybody, args, bars)
    return found


def of_round(row):
    return f"{row.get('plain_tokens_per_round', row['times']):.2f}"


COLUMNS = {
    **{"context": "{context}", "": "{name}"},
    "speedup": lambda row: str(Interval(**row["speedup"])) if "speedup" in row else f"{1 / row['times']:.2f}",
    "ms per token": "{milliseconds_per_token:.2f}",
    "tokens per pass": lambda row: f"{row.get('tokens_per_pass', 1):.2f}",
    **{"accepted": "{acceptance_rate:.0%}", "a round, in plain tokens": of_round},
    **{"drafting, of a round": "{drafting_share:.1%}", "drafting, µs a round": "{drafting_microseconds:.0f}"},
}
"""A row's `times` are its milliseconds per token over those of plain decoding."""


def text_of(found):
    its = found["about"]
    head = heading(
        "contexts",
        its,
        f"{its['prompts']} prompts, {its['dtype']}, `{its['target']}` with YaRN angles, {its['new_tokens']} tokens after each "
        "prompt",
        ENDS,
        "1.00 is plain `generate`, not compiled. Drafting is measured in the rounds after the first one.",
    )
    by_context = {}
    for row in found["rows"]:
        by_context.setdefault(row["context"], {})[row["name"]] = row
    plain = {context: rows[PLAIN]["milliseconds_per_token"] for context, rows in by_context.items()}
    rows = [{**row, "times": row["milliseconds_per_token"] / plain[row["context"]]} for row in found["rows"]]
    drafts = [name for name in dict.fromkeys(row["name"] for row in rows) if name in DRAFTS]
    parts = [head, shown(COLUMNS, rows)]

    def of_drafts(title, show, each, **more):
        """A table with a column for every draft."""
        columns = {"context": lambda one: one[0], **more}
        columns |= {name: lambda one, name=name: show(one[1], name) for name in drafts}
        parts.extend([title, shown(columns, each)])

    (shortest, first), *others = by_context.items()

    def kept(row, name):
        """How much of the speedup after the shortest context remains."""
        ratio, alone = (row[name]["speedup"]["ratio"], first[name]["plain_tokens_per_round"])
        return f"{ratio / first[name]['speedup']['ratio']:.2f} ({alone / row[name]['plain_tokens_per_round']:.2f})"

    if others and drafts:
        title = (
            f"Speedup relative to that after {shortest} tokens. In brackets: what it would be at equal tokens per pass."
        )
        of_drafts(title, kept, others)
    if found["first"]:
        of_drafts(
            "Time until the first token, relative to that of plain `generate`:",
            lambda row, name: Interval(**row[name]["over_plain"]),
            found["first"].items(),
            **{"plain, ms": lambda one: f"{one[1][PLAIN]['milliseconds']:.0f}"},
        )
        of_drafts(
            "After the first token, a drafter also reads the prompt, once per call. This takes, in milliseconds:",
            lambda row, name: f"{row[name]['first_drafting_milliseconds']:.1f}",
            by_context.items(),
        )
    if found["memory"]:
        mib = lambda show: lambda row: f"{show(row) / 2**20:.1f}"  # noqa: E731
        title = (
            "Peak memory (resident set) in MiB: that of plain `generate`, the excess over it, the draft's weights and slots, "
            "and these plus 5% of plain's peak:"
        )
        columns = {
            **{"context": "{context}", "plain": lambda row: f"{row['plain'] / 2**20:.0f}", "": "{name}"},
            "over plain": mib(lambda row: row["over_plain"]),
            "draft and slots": mib(lambda row: row["draft"] + row["draft_slots"]),
            "and 5%": mib(lambda row: row["goal"]),
        }
        sizes = [
            {"context": context, "plain": by_name[PLAIN]["peak"], "name": name, **one}
            for context, by_name in found["memory"].items()
            for name, one in by_name.items()
            if name != PLAIN
        ]
        parts += [title, shown(columns, sizes)]
    return page(*parts)


contexts = Case(
    "contexts",
    """Long contexts: seconds of tokens and rounds, the first token, and peak memory, by context length.

The shipped pair (or a grown target) has YaRN angles for 40,960 positions instead of 1,024. Prompts are filled up with held-out
code; greedy, float32, one row. Acceptance changes with the length as well, so the cost of a round in tokens of plain `generate`
stands next to the speedup. It shows the effect of the context whatever is accepted.

Decoding is timed from the end of the first round on, after a prompt given as `past_key_values`. The first token is timed
without these, so the prompt is read. Peak memory is measured in one process each: the high-water mark of its resident set
(VmHWM, Linux), reset before the call.
""",
    measure,
    options={
        **{"prompts": 3, "repeats": 3, "new_tokens": 64, "no_compile": False},
        "contexts": ([512, 1024, 4096, 16384, 32768], "tokens of prompts"),
        "methods": (list(DRAFTS), "that take part"),
        "grown": (None, "size of the target, such as 0.25b; the shipped one when left out"),
        "memory": ([512, 16384], "contexts of peak memory"),
        "first_repeats": (3, "for the first token; 0 leaves it out"),
        "first_up_to": (16384, "longest prompt for the first token"),
        # it reads prompts with a mask of P x P numbers
        "compiled_up_to": (4096, "longest prompt after which plain generate is also compiled"),
    },
    quick={
        **{"contexts": [128, 256], "memory": [128], "first_repeats": 1, "new_tokens": 16},
        "methods": ["suffix, Adaptive()"],
    },
    sections=(Section("benchmarks/long-contexts", "contexts"),),
    markdown=text_of,
)
