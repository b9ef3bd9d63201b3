"""The shipped draft, trained further in three ways for the same number of steps, and its acceptance after each.

On the text (cross-entropy), on the target's distribution over the text (KL + TV), and on the target's distribution
over sequences half of which the draft wrote itself. The same order of the text, rates and seeds. Acceptance is
counted while held-out code is written, temperature 0 and 1.
"""

import tempfile
from dataclasses import asdict

import torch.nn.functional as F
from shared import below, opened

from assisted import AssistedModelForCausalLM
from assisted.lab.training.trainer import train
from assisted.methods.draft_model.train import Distillation, DistillSettings
from assisted.methods.shared.training.data import read_text
from assisted.methods.shared.training.plan import Plan

DRAFT_LENGTH = 4
OPTIONS = {
    "prompts": 40,
    "steps": (200, "of each way"),
    "batch": (8, "sequences"),
    "context": (256, "tokens"),
    "layers": (0, "begin with so many of the target's layers, not with zoo:draft"),
    "lr": (3e-4, "learning rate"),
}
QUICK = {"steps": 2, "batch": 1, "context": 32}
SECTIONS = ()


class OnText(Distillation):
    """Plain language modelling, without the target."""

    def loss(self, ids, step):
        logits = self.student(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def drafting(target, draft, tokenizer, prompts):
    """Tokens per pass and acceptance by position at both temperatures, over the same prompts."""
    from tools.shipped import card

    model = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer)
    found = (card.drafting(model, DRAFT_LENGTH, temperature, prompts, top_p=1.0) for temperature in (0.0, 1.0))
    return {f"temperature {one.temperature:g}": asdict(one) for one in found}


def measure(args):
    pair = opened("zoo:target")
    target, tokenizer = pair.target, pair.tokenizer
    text = read_text(tokenizer, ["zoo"])
    few = {"evaluate_rows": 2} if args.quick else {}
    plan = Plan(args.steps, args.batch, args.context, lr=args.lr, bfloat16=True, **few)
    start = {"layers": args.layers} if args.layers else {"draft": "zoo:draft"}
    ways = {
        "text": OnText(target, tokenizer, DistillSettings(**start)),
        "distilled on text": Distillation(target, tokenizer, DistillSettings(**start)),
        "distilled, half on-policy": Distillation(target, tokenizer, DistillSettings(**start, on_policy=0.5)),
    }
    found = {"before": drafting(target, ways["text"].student, tokenizer, args.prompts)}
    for name, method in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            train(method, text, plan, folder)
        found[name] = drafting(target.cpu(), method.student.cpu(), tokenizer, args.prompts)
    shown = {name: getattr(plan, name) for name in ("steps", "batch", "context", "lr", "seed")}
    return {"plan": shown, "layers": args.layers or None, "ways": found, "prompts": args.prompts}


def markdown(found):
    cells = [
        [name]
        + [
            cell
            for one in way.values()
            for cell in (f"{one['tokens_per_pass']:.2f}", f"{one['acceptance_by_position'][0]:.1%}")
        ]
        for name, way in found["ways"].items()
    ]
    columns = ["trained on", *(f"{what}, T = {t}" for t in (0, 1) for what in ("tokens per pass", "accepted first"))]
    head = f"`python benchmarks/run.py on_policy`: {found['prompts']} prompts, drafts of {DRAFT_LENGTH} tokens."
    return below(head, columns, cells)
