"""The shipped draft, trained further in three ways for the same number of steps, and its acceptance after each.

    python benchmarks/on_policy.py --steps 200 --out benchmarks/on_policy.json

On the text (cross-entropy), on the target's distribution over the text (KL + TV), and on the target's distribution
over sequences half of which the draft wrote itself. The same order of the text, rates and seeds. Acceptance is
counted while held-out code is written, temperature 0 and 1.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from tables import arguments, write_json
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from assisted import AssistedModelForCausalLM, zoo
from assisted.training.data import read_text
from assisted.training.distill import Distillation, DistillSettings
from assisted.training.plan import Plan
from assisted.training.trainer import train
from tools.shipped import card

DRAFT_LENGTH = 4


class OnText(Distillation):
    """Plain language modelling, without the target."""

    def loss(self, ids: Tensor, step: int) -> Tensor:
        logits = self.student(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def drafting(target: Any, draft: Any, tokenizer: Any, prompts: int) -> dict[str, Any]:
    """Tokens per pass and acceptance by position at both temperatures, over the same prompts."""
    model = AssistedModelForCausalLM.from_models(target, draft=draft, tokenizer=tokenizer)
    measured = (card.drafting(model, DRAFT_LENGTH, temperature, prompts, top_p=1.0) for temperature in (0.0, 1.0))
    return {f"temperature {found.temperature:g}": asdict(found) for found in measured}


def main() -> None:
    numbers = {"--steps": (200, "of each way"), "--batch": (8, "sequences"), "--context": (256, "tokens")}
    parser = arguments(__doc__, ("--prompts", "--threads", "--out"), prompts=40, threads=1, numbers=numbers)
    parser.add_argument("--layers", type=int, help="begin with so many of the target's layers, not with zoo:draft")
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(zoo.folder("target"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(zoo.folder("target"))
    text = read_text(tokenizer, ["zoo"])
    plan = Plan(args.steps, args.batch, args.context, lr=args.lr, bfloat16=True)
    start = {"layers": args.layers} if args.layers else {"draft": "zoo:draft"}
    ways = {
        "text": OnText(target, tokenizer, DistillSettings(**start)),
        "distilled on text": Distillation(target, tokenizer, DistillSettings(**start)),
        "distilled, half on-policy": Distillation(target, tokenizer, DistillSettings(**start, on_policy=0.5)),
    }
    before = ways["text"].student
    found = {"before": drafting(target, before, tokenizer, args.prompts)}
    for name, method in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            train(method, text, plan, folder)
        found[name] = drafting(target.cpu(), method.student.cpu(), tokenizer, args.prompts)
        print(name, json.dumps(found[name]), flush=True)
    result = {
        "plan": {name: getattr(plan, name) for name in ("steps", "batch", "context", "lr", "seed")},
        "layers": args.layers,
        "ways": found,
    }
    result["prompts"], result["new_tokens"], result["draft_length"] = args.prompts, card.NEW_TOKENS, DRAFT_LENGTH
    write_json(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
