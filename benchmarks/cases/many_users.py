"""Many prompts on one processor: tokens per second, forward passes, and time between a text's tokens, by the number of rows.

Prompts of held-out code with different lengths, answers that end after different numbers of tokens. Batches wait for their
longest text; `generate_batch` is transformers' continuous batching, without drafts; `generate_many` gives the row of a text
that has ended to the next prompt. Time is that of the processor (one thread), which other programs hardly change.
"""

import random
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from statistics import quantiles

import torch
from shared import Section, about, heading, opened, titled
from transformers import ContinuousBatchingConfig, GenerationConfig

from assisted import AssistedModelForCausalLM
from assisted.lab.bench import pad_token, read
from assisted.lab.bench.table import markdown_table
from assisted.lengths.policies import Never

TARGETS = {"shipped target": "zoo:target", "SmolLM2": "zoo:smollm2"}
OPTIONS = {
    "prompts": 32,
    "new_tokens": 64,
    "rows": ([1, 4, 8, 16], "decoded together"),
    "targets": (list(TARGETS), "to measure"),
}
QUICK = {"prompts": 3, "rows": [1, 2], "targets": ["shipped target"]}
SECTIONS = (Section("howto/many-users", "many"),)


def batches(model, prompts, rows, call, **more):
    """Groups of prompts as they come, padded on the left."""
    found = {}
    for start in range(0, len(prompts), rows):
        group = prompts[start : start + rows]
        width = max(map(len, group))
        ids = torch.stack([torch.nn.functional.pad(one, (width - len(one), 0)) for one in group])
        mask = torch.stack([(torch.arange(width) >= width - len(one)).long() for one in group])
        output = model.generate(ids, attention_mask=mask, **call, **more)
        found |= {start + row: output[row, width:].tolist() for row in range(len(group))}
    return found


def many(model, prompts, rows, call, **more):
    return {a.index: a.new_tokens.tolist() for a in model.generate_many(prompts, rows=rows, **call, **more)}


def continuous(model, prompts, rows, call):
    """transformers' continuous batching, with room for as many texts: without a number of blocks, it takes all free memory."""
    results = model.target.generate_batch(
        [one.tolist() for one in prompts],
        generation_config=GenerationConfig(**call),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=rows, max_batch_tokens=256),
    )
    return {int(name.rpartition("_")[2]): found.generated_tokens for name, found in results.items()}


def ways(pairs):
    suffix = pairs["suffix"]
    found = {
        "`generate` in batches, no drafts": partial(batches, suffix, assisted=False),
        "`generate` in batches, suffix": partial(batches, suffix),
        "`generate_batch`": partial(continuous, pairs["alone"]),
        "`generate_many`, no drafts": partial(many, suffix, draft_length=Never()),
        "`generate_many`, suffix": partial(many, suffix),
    }
    return found | ({"`generate_many`, draft model": partial(many, pairs["draft"])} if "draft" in pairs else {})


def measure_target(name, args):
    pairs = {kind: opened(TARGETS[name]) for kind in ("suffix", "alone")}
    target, tokenizer = pairs["suffix"].target, pairs["suffix"].tokenizer
    if name == "shipped target":
        pairs["draft"] = AssistedModelForCausalLM.from_models(target, "zoo:draft", tokenizer=tokenizer)
    numbers = random.Random(0)
    texts = [one.ids[0] for one in read(["code"], tokenizer, args.prompts)]
    prompts = [text[-numbers.randint(16, len(text)) :] for text in texts]
    ends = _ends(pairs["suffix"], prompts, args.new_tokens)
    call = {"max_new_tokens": args.new_tokens, "do_sample": False, "pad_token_id": pad_token(tokenizer)}
    call |= {"eos_token_id": ends} if ends else {}
    expected, made, seen = None, [], []
    for rows in args.rows:
        for way, run in ways(pairs).items():
            if rows == 1 and way != "`generate` in batches, no drafts" and "suffix" not in way:
                continue
            run(prompts=prompts[: rows + 1], rows=rows, call=call)  # makes what is made only once
            seen.clear()
            for pair in pairs.values():
                pair.watch = lambda round: seen.append((sum(round.kept), time.process_time()))
            began = time.process_time()
            found = run(prompts=prompts, rows=rows, call=call)
            seconds = time.process_time() - began
            for pair in pairs.values():
                pair.watch = None
            found = {number: _until(answer, ends) for number, answer in found.items()}
            expected = expected or found
            gaps = [after - before for (_, before), (_, after) in pairwise(seen)]
            made.append(
                {
                    **{"target": name, "way": way, "rows": rows, "seconds": seconds},
                    "tokens": sum(map(len, found.values())),
                    "rounds": len(seen) or None,
                    "gap_95": quantiles(gaps, n=20)[-1] if len(gaps) > 20 else None,
                    "same": sum(found[number] == answer for number, answer in expected.items()),
                }
            )
    return made


def _ends(model, prompts, new):
    """Tokens that some texts have: with these as end tokens, answers end after different numbers of tokens."""
    counts = Counter()
    for prompt in prompts[:8]:
        counts.update(set(model.generate(prompt[None], max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()))
    return [token for token, count in sorted(counts.items()) if count == 2][:3]


def _until(tokens, ends):
    """An answer without the padding after its end."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def measure(args):
    rows = [row for name in args.targets for row in measure_target(name, args)]
    return {"about": about(args=args), "rows": rows}


def markdown(found):
    its = found["about"]
    head = heading(
        "many_users",
        its,
        f"{its['prompts']} prompts, at most {its['new_tokens']} new tokens each, greedy, {its['dtype']}",
        "Times are the processor's.",
    )
    columns = ["rows", "", "tokens/s", "tokens per forward pass", "ms between rounds, 95th percentile", "same texts"]
    tables = {}
    for row in found["rows"]:
        tables.setdefault(f"**{row['target']}**", []).append(
            [
                *(row["rows"], row["way"], f"{row['tokens'] / row['seconds']:.0f}"),
                "" if row["rounds"] is None else f"{row['tokens'] / row['rounds']:.2f}",
                "" if row["gap_95"] is None else f"{1e3 * row['gap_95']:.0f}",
                f"{row['same']}/{its['prompts']}",
            ]
        )
    return titled(head, {target: markdown_table(columns, rows) for target, rows in tables.items()})
