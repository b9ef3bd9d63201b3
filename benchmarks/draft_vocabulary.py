"""A draft that predicts the most frequent tokens only: tokens per pass by their number, and the time of an output layer.

    python benchmarks/draft_vocabulary.py --out benchmarks/draft_vocabulary.json --docs docs/howto/shrink-vocabulary.md

The shipped draft and EAGLE-3 head, reduced by `assisted shrink-vocabulary`; held-out code; chains of 4 tokens; forward passes
are counted. Then one row through an output layer of SmolLM2-135M's shape, in CPU time of one thread, with the step that fills
the logits of the other tokens.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from torch import nn
from transformers import set_seed

from assisted import AssistedModelForCausalLM, DraftModel, Eagle
from assisted.bench import read
from assisted.engine.kept import kept_rows, over_all
from assisted.training.data import read_text
from assisted.training.shrink import shrink_vocabulary

SIZES = (256, 512, 1024, 2048)
TEMPERATURES = (0.0, 0.8)
DRAFTED = 4
WIDTH, VOCABULARY, KEPT = 576, 49152, (2048, 4096, 8192, 16384)  # of SmolLM2-135M


def measure(args: Any) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:target", draft="zoo:draft")
    target, tokenizer = pair.target, pair.tokenizer
    text = read_text(tokenizer, ["zoo"])
    prompts = [prompt.ids for prompt in read(["code"], tokenizer, args.prompts)]
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("draft model", "zoo:draft"), ("EAGLE-3", "zoo:eagle3")):
            for size in (*SIZES, None):
                found: dict[str, Any] = {"coverage": 1.0}
                where = path
                if size is not None:
                    where = str(Path(folder) / f"{name}-{size}")
                    found = shrink_vocabulary(path, size, text, where, target)
                draft = DraftModel(where) if name == "draft model" else Eagle(where, tree=False)
                model = AssistedModelForCausalLM.from_models(target, draft, DRAFTED, tokenizer)
                passes = []
                for temperature in TEMPERATURES:
                    model.reset_totals()
                    sampled = {"temperature": temperature, "do_sample": True, "top_k": 0} if temperature else {}
                    for number, ids in enumerate(prompts):
                        set_seed(number)
                        greedy = {} if temperature else {"do_sample": False}
                        model.generate(ids, max_new_tokens=args.new_tokens, eos_token_id=None, **sampled, **greedy)
                    passes.append(model.totals.tokens_per_pass)
                points.append({"draft": name, "tokens": size, "coverage": found["coverage"], "tokens_per_pass": passes})
    return {
        "about": about(pair, prompts=args.prompts),
        "new_tokens": args.new_tokens,
        "points": points,
        "milliseconds": {str(size): head(size) for size in (*KEPT, VOCABULARY)},
    }


@torch.no_grad()
def head(size: int, repeats: int = 60) -> float:
    """CPU time of one row through an output layer over `size` tokens of SmolLM2's, in milliseconds: the median."""
    output = nn.Linear(WIDTH, VOCABULARY, bias=False)
    tokens = torch.arange(size) * (VOCABULARY // size)
    reduced = output if size == VOCABULARY else kept_rows(output, tokens)
    state, taken = torch.randn(1, 1, WIDTH), []
    for _ in range(repeats):
        began = time.process_time()
        logits = reduced(state)
        if size < VOCABULARY:
            over_all(logits, tokens, VOCABULARY)
        taken.append(time.process_time() - began)
    return 1e3 * statistics.median(taken)


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    its = found["about"]
    lines = [
        f"`python benchmarks/draft_vocabulary.py`: {its['prompts']} prompts of held-out code, {found['new_tokens']} new "
        f"tokens, chains of {DRAFTED} tokens, {its['dtype']}. Coverage is the share of the held-out text's tokens that can be "
        "drafted.",
        "",
    ]
    cells = [
        [
            point["draft"],
            "all 4,096" if point["tokens"] is None else f"{point['tokens']:,}",
            f"{point['coverage']:.1%}",
            *(f"{passes:.2f}" for passes in point["tokens_per_pass"]),
        ]
        for point in found["points"]
    ]
    head = ("draft", "tokens kept", "coverage", "tokens per pass, T = 0", "T = 0.8")
    lines += [*markdown_table(head, cells), ""]
    lines += ["An output layer of SmolLM2-135M's shape, one row, float32, one thread of CPU time:", ""]
    of_size = [[f"{int(size):,}", f"{milliseconds:.2f}"] for size, milliseconds in found["milliseconds"].items()]
    return "\n".join([*lines, *markdown_table(("tokens kept of 49,152", "ms"), of_size)])


def main() -> None:
    numbers = {"--new-tokens": (64, "of each prompt")}
    parser = arguments(
        __doc__, ("--prompts", "--threads", "--out", "--docs", "--read"), prompts=12, threads=1, numbers=numbers
    )
    publish(markdown(figures(parser.parse_args(), measure)), parser.parse_args().docs, "draft-vocabulary")


if __name__ == "__main__":
    main()
