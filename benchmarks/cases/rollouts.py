"""Rollouts of a policy that is trained."""

import ast
import copy
import time
from functools import partial
from statistics import mean, stdev

import torch
from shared import Case, Section, about, heading, opened, page, shown

from assisted import AssistedModelForCausalLM, Suffix
from assisted.lab.bench import pad_token
from assisted.lab.bench.table import percent
from assisted.lengths.policies import Never
from assisted.loading.quantization import quantize_copy

HEADERS = (
    *("def mean(values):", "def area(width, height):", "def is_even(number):", "def load(path):"),
    *("def first(items):", "def to_string(value):", "def get_name(self):", "def total(prices):"),
)
GROUP = 8
PARTS = 4  # of the training, in the second table
PLAIN = "plain `generate`"


def reward(header, text):
    """The share of a body's lines, from the first one, that parse together as the body of the function."""
    lines = text.rstrip().split("\n")
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join([header, *lines[:count], ""]))
        except (SyntaxError, ValueError):
            continue
        return count / len(lines)
    return 0.0


def in_groups(pair, prompts, call, **more):
    """One `generate` for each prompt."""
    found = []
    for prompt in prompts:
        output = pair.generate(prompt[None], num_return_sequences=GROUP, **call, **more)[:, len(prompt) :]
        found += [_until(row.tolist(), call["pad_token_id"]) for row in output]
    return found


def in_rows(pair, prompts, call, **more):
    """All completions in as many rows as a group has."""
    repeated = [prompt for prompt in prompts for _ in range(GROUP)]
    answers = {one.index: one.new_tokens.tolist() for one in pair.generate_many(repeated, rows=GROUP, **call, **more)}
    return [_until(answers[number], call["pad_token_id"]) for number in range(len(repeated))]


def _until(tokens, pad):
    return tokens[: tokens.index(pad)] if pad in tokens else tokens


def train(target, optimizer, prompts, rows, rewards):
    """One step on groups of completions."""
    target.train()
    optimizer.zero_grad()
    for number, prompt in enumerate(prompts):
        own = slice(number * GROUP, (number + 1) * GROUP)
        group, found = rows[own], torch.tensor(rewards[own])
        advantages = (found - found.mean()) / (found.std() + 1e-4)
        new = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in group], batch_first=True)
        written = torch.arange(new.shape[1]) < torch.tensor([[len(row)] for row in group])
        ids = torch.cat([prompt.expand(GROUP, -1), new], 1)
        logits = target(input_ids=ids).logits[:, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
        (-(advantages[:, None] * chosen * written).sum() / written.sum() / len(prompts)).backward()
    torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
    optimizer.step()
    target.eval()


@torch.no_grad()
def kept(target, first, prompts, rows):
    """For each token of the rows, whether the most probable one is that of the first weights."""
    found = []
    for number, row in enumerate(rows):
        prompt = prompts[number // GROUP]
        ids = torch.cat([prompt, torch.tensor(row, dtype=torch.int64)])[None]
        now, before = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1].argmax(-1) for model in (target, first))
        found += (now == before).tolist()
    return found


def ways(target, tokenizer, length):
    def drafted(draft):
        return AssistedModelForCausalLM.from_models(target, draft, length, tokenizer=tokenizer)

    memory = Suffix(remember=True)
    return {
        PLAIN: (drafted("suffix"), partial(in_groups, assisted=False)),
        "no drafts": (drafted("suffix"), partial(in_groups, draft_length=Never())),
        "suffix": (drafted("suffix"), in_groups),
        "suffix, remembers": (drafted(memory), in_groups),
        "draft model": (drafted("zoo:draft"), in_groups),
        "8-bit copy": (drafted("self:int8"), in_groups),
        "8-bit copy of the first weights": (drafted(quantize_copy(target, "int8")), in_groups),
        "`generate_many`, no drafts": (drafted("suffix"), partial(in_rows, draft_length=Never())),
        "`generate_many`, suffix, remembers": (drafted(memory), in_rows),
    }


def completions(model, run, prompts, titles, call):
    """The completions of one way, and its figures."""
    rounds = []
    model.watch = rounds.append
    model.reset_totals()
    began = time.process_time()
    rows = run(model, prompts, call)
    seconds, model.watch = time.process_time() - began, None
    texts = model.tokenizer.batch_decode(rows, skip_special_tokens=True)
    figures = {"tokens": sum(map(len, rows)), "passes": len(rounds) or None, "seconds": seconds}
    figures |= {"drafted": model.totals.drafted, "accepted": model.totals.accepted}
    return rows, figures | {"rewards": list(map(reward, titles, texts))}


def measure(args):
    torch.manual_seed(0)
    pair = opened("zoo:target")
    target, tokenizer = pair.target, pair.tokenizer
    headers = HEADERS[: args.prompts]
    texts = [tokenizer(f"{header}\n", return_tensors="pt").input_ids[0] for header in headers]
    first = copy.deepcopy(target)
    methods = ways(target, tokenizer, args.draft_length)
    call = {"max_new_tokens": args.new_tokens, "do_sample": True, "top_k": 0, "tokenizer": tokenizer}
    call |= {"stop_strings": ["\n\n", "\ndef", "\nclass", "\nif"], "pad_token_id": pad_token(tokenizer)}
    optimizer = torch.optim.AdamW(target.parameters(), lr=args.rate * 1e-6, weight_decay=0.0)
    steps = []
    for step in range(args.steps):
        at = [(2 * step + number) % len(texts) for number in range(2)]
        prompts, titles = [texts[one] for one in at], [headers[one] for one in at for _ in range(GROUP)]
        found = {name: completions(*way, prompts, titles, call) for name, way in methods.items()}
        rows, figures = found[PLAIN]
        same = mean(kept(target, first, prompts, rows))
        began = time.process_time()
        train(target, optimizer, prompts, rows, figures["rewards"])
        training = time.process_time() - began
        steps.append({"ways": {name: one for name, (_, one) in found.items()}, "same": same, "training": training})
        print(step, f"{mean(figures['rewards']):.2f} {same:.2f}", flush=True)
    more = {"steps": args.steps, "draft_length": args.draft_length, "rate": args.rate}
    return {"about": about(pair, args, prompts=len(headers), **more), "steps": steps}


def row_of(own):
    """A way's figures over some steps."""
    rewards = [value for one in own for value in one["rewards"]]
    total = {name: sum(one[name] or 0 for one in own) for name in ("passes", "tokens", "drafted", "accepted")}
    found = {"seconds": mean(one["seconds"] for one in own), "reward": mean(rewards)}
    found["error"] = stdev(rewards) / len(rewards) ** 0.5
    found |= {"passes": total["passes"], "rate": total["tokens"] / total["passes"]} if total["passes"] else {}
    return found | ({"accepted": total["accepted"] / total["drafted"]} if total["drafted"] else {})


def text_of(found):
    its, steps = found["about"], found["steps"]
    head = heading(
        "rollouts",
        its,
        f"{its['steps']} steps with 2 of {its['prompts']} prompts and {GROUP} completions of each, at most "
        f"{its['new_tokens']} new tokens, temperature 1, {its['dtype']}, drafts of at most {its['draft_length']} tokens, "
        f"learning rate {its['rate']}e-6",
        "Seconds are the processor's, for a step.",
    )
    columns = {
        **{"": "{name}", "forward passes": "{passes}", "tokens per forward pass": "{rate:.2f}"},
        **{"accepted": "{accepted:.0%}", "seconds": "{seconds:.2f}", "mean reward": "{reward:.3f} ± {error:.3f}"},
    }
    own = {name: [step["ways"][name] for step in steps] for name in steps[0]["ways"]}
    rows = [{"name": name, **row_of(each)} for name, each in own.items()]
    size = len(steps) // PARTS
    parts = {f"steps {1 + at} to {at + size}": slice(at, at + size) for at in range(0, size * PARTS, size)}
    by_part = {"": lambda row: row[0], **{title: lambda row, part=part: row[1](part) for title, part in parts.items()}}
    kinds = [("*mean reward*", lambda part: f"{row_of(own[PLAIN][part])['reward']:.2f}")]
    same = "*same most probable token as at first*"
    kinds.append((same, lambda part: percent(mean(step["same"] for step in steps[part]))))
    for row in rows:
        if "accepted" in row:
            each = own[row["name"]]
            kinds.append((row["name"], lambda part, each=each: percent(row_of(each[part]).get("accepted")) or "-"))
    return page(
        head,
        shown(columns, rows),
        "**Accepted while the policy is trained**",
        shown(by_part, kinds),
        f"A training step takes {mean(step['training'] for step in steps):.1f} seconds.",
    )


rollouts = Case(
    "rollouts",
    """Rollouts of GRPO with and without drafts: forward passes, acceptance while the policy is trained, and rewards.

Each step samples groups of completions for some prompts. A completion's reward is the share of its lines that parse as the
body of the function. The policy is trained on the completions of plain `generate` (2402.03300, without a reference model), and
before each step all drafts write completions with the same weights. Time is that of the processor (one thread), which other
programs hardly change. Draft lengths are fixed, so that counts do not depend on time.
""",
    measure,
    options={
        **{"prompts": 8, "new_tokens": 64, "steps": (24, "of training")},
        "draft_length": (4, "tokens, at most"),
        "rate": (200, "learning rate, in millionths"),
    },
    quick={"prompts": 2, "steps": 4},
    sections=(Section("howto/rl-rollouts", "rollouts"),),
    markdown=text_of,
)
