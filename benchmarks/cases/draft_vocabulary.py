"""A draft that predicts the most frequent tokens only: tokens per pass by their number, and the time of an output layer.

The shipped draft and EAGLE-3 head, reduced by `assisted shrink-vocabulary`; held-out code; chains of 4 tokens; forward passes
are counted. Then one row through an output layer of SmolLM2-135M's shape, in CPU time of one thread, with the step that fills
the logits of the other tokens.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from shared import Section, about, below, heading, opened
from torch import nn
from transformers import set_seed

from assisted import AssistedModelForCausalLM, DraftModel, Eagle
from assisted.engine.kept import kept_rows, over_all
from assisted.lab.bench import read
from assisted.lab.training.shrink import shrink_vocabulary
from assisted.methods.shared.training.data import read_text

DRAFTED = 4
WIDTH, VOCABULARY, KEPT = 576, 49152, (2048, 4096, 8192, 16384)  # of SmolLM2-135M
OPTIONS = {"prompts": 12, "new_tokens": 64, "sizes": ([256, 512, 1024, 2048], "tokens that are kept")}
QUICK = {"sizes": [512]}
SECTIONS = (Section("howto/shrink-vocabulary", "draft-vocabulary"),)


def measure(args):
    pair = opened("zoo:target", "zoo:draft")
    target, tokenizer = pair.target, pair.tokenizer
    text = read_text(tokenizer, ["zoo"])
    prompts = [prompt.ids for prompt in read(["code"], tokenizer, args.prompts)]
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in (("draft model", "zoo:draft"), ("EAGLE-3", "zoo:eagle3")):
            for size in (*args.sizes, None):
                found, where = {"coverage": 1.0}, path
                if size is not None:
                    where = str(Path(folder) / f"{name}-{size}")
                    found = shrink_vocabulary(path, size, text, where, target)
                draft = DraftModel(where) if name == "draft model" else Eagle(where, tree=False)
                model = AssistedModelForCausalLM.from_models(target, draft, DRAFTED, tokenizer)
                passes = []
                for sampled in ({"do_sample": False}, {"temperature": 0.8, "do_sample": True, "top_k": 0}):
                    model.reset_totals()
                    for number, ids in enumerate(prompts):
                        set_seed(number)
                        model.generate(ids, max_new_tokens=args.new_tokens, eos_token_id=None, **sampled)
                    passes.append(model.totals.tokens_per_pass)
                points.append({"draft": name, "tokens": size, "coverage": found["coverage"], "tokens_per_pass": passes})
    milliseconds = {str(size): head(size) for size in (*KEPT, VOCABULARY)}
    its = about(pair, args)
    return {"about": its, "new_tokens": args.new_tokens, "points": points, "milliseconds": milliseconds}


@torch.no_grad()
def head(size, repeats=60):
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


def markdown(found):
    its = found["about"]
    words = heading(
        "draft_vocabulary",
        its,
        f"{its['prompts']} prompts of held-out code, {found['new_tokens']} new tokens, chains of {DRAFTED} tokens, "
        f"{its['dtype']}",
        "Coverage is the share of the held-out text's tokens that can be drafted.",
    )
    cells = [
        [
            point["draft"],
            "all 4,096" if point["tokens"] is None else f"{point['tokens']:,}",
            f"{point['coverage']:.1%}",
            *(f"{passes:.2f}" for passes in point["tokens_per_pass"]),
        ]
        for point in found["points"]
    ]
    columns = ("draft", "tokens kept", "coverage", "tokens per pass, T = 0", "T = 0.8")
    layer = "An output layer of SmolLM2-135M's shape, one row, float32, one thread of CPU time:"
    sizes = [[f"{int(size):,}", f"{milliseconds:.2f}"] for size, milliseconds in found["milliseconds"].items()]
    return "\n\n".join([below(words, columns, cells), below(layer, ("tokens kept of 49,152", "ms"), sizes)])
