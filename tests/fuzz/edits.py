"""Changes of a model between two calls, as a caller may make them: of numbers, of modules, of what runs along with them.

An edit is made to every model alike, from the same seed, so that two copies of a model remain copies.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["NAMES", "edit", "undo"]

Undo = Callable[[], None]


def _matrix(model: nn.Module, chance: random.Random) -> nn.Parameter:
    return chance.choice([p for p in model.parameters() if p.ndim >= 2 and len(p) > 1])


def _linear(model: nn.Module, chance: random.Random) -> tuple[nn.Module, str, nn.Linear]:
    """A linear layer, its parent and its name there; any leaf with a weight where there is none."""
    found = [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    return chance.choice(found)


def _generator(chance: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(chance.randrange(10**6))


def _noise(weight: torch.Tensor, chance: random.Random) -> torch.Tensor:
    return torch.randn(weight.shape, generator=_generator(chance)).to(weight.dtype) * weight.float().std().item()


# --- numbers


def data_flip(model: Any, chance: random.Random) -> None:
    weight = _matrix(model, chance)
    weight.data = weight.data.flip(chance.choice((0, -1))).contiguous()


def data_copy_flip(model: Any, chance: random.Random) -> None:
    weight = _matrix(model, chance)
    weight.data.copy_(weight.data.flip(chance.choice((0, -1))))


def data_permute(model: Any, chance: random.Random) -> None:
    weight = _matrix(model, chance)
    weight.data.copy_(weight.data[torch.randperm(len(weight), generator=_generator(chance))])


def data_swap(model: Any, chance: random.Random) -> None:
    """Two rows of a matrix change places."""
    weight = _matrix(model, chance)
    one, two = chance.sample(range(len(weight)), 2)
    weight.data[[one, two]] = weight.data[[two, one]]


def add_element(model: Any, chance: random.Random) -> None:
    weight = _matrix(model, chance)
    with torch.no_grad():
        weight.view(-1)[chance.randrange(weight.numel())] += 8.0


def data_element(model: Any, chance: random.Random) -> None:
    weight = _matrix(model, chance)
    weight.data.view(-1)[chance.randrange(weight.numel())] -= 8.0


def add_noise(model: Any, chance: random.Random) -> None:
    weight = _matrix(model, chance)
    with torch.no_grad():
        weight.add_(_noise(weight, chance))


def norms(model: Any, chance: random.Random) -> None:
    """The vectors, gains and biases, of every other module."""
    for weight in [p for p in model.parameters() if p.ndim == 1][:: chance.choice((1, 2))]:
        weight.data.copy_(weight.data.flip(0) * 1.5)


def optimizer_step(model: Any, chance: random.Random) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for weight in model.parameters():
        weight.grad = _noise(weight, chance) if weight.ndim >= 2 else torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()


def load_state(model: Any, chance: random.Random) -> None:
    assign = chance.random() < 0.5
    state = {
        name: value + 0.3 * _noise(value, chance) if value.is_floating_point() and value.ndim >= 2 else value.clone()
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=assign)


# --- modules and what they hold


def new_parameter(model: Any, chance: random.Random) -> None:
    _, _, linear = _linear(model, chance)
    linear.weight = nn.Parameter(linear.weight.detach().flip(0).clone())


def new_linear(model: Any, chance: random.Random) -> None:
    parent, name, linear = _linear(model, chance)
    other = copy.deepcopy(linear)
    with torch.no_grad():
        other.weight.add_(_noise(other.weight, chance))
    setattr(parent, name, other)


def new_layer(model: Any, chance: random.Random) -> None:
    """The layers change places."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and type(module[0]) is type(module[1]):
            other = copy.deepcopy(module[0])
            for weight in other.parameters():
                weight.data.mul_(0.7)
            for old, new in zip(module[0].modules(), other.modules(), strict=True):
                if hasattr(old, "layer_idx"):
                    new.layer_idx = old.layer_idx
            module[0] = other
            return


def inv_freq(model: Any, chance: random.Random) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                buffer.mul_(0.5)


def new_rotary(model: Any, chance: random.Random) -> None:
    for parent in list(model.modules()):
        if isinstance(getattr(parent, "rotary_emb", None), nn.Module):
            parent.rotary_emb = copy.deepcopy(parent.rotary_emb)
            inv_freq(parent.rotary_emb, chance)


def _scale(model: Any, names: Sequence[str], factor: float) -> None:
    for module in model.modules():
        for name in names:
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, module.__dict__[name] * factor)


def scaling(model: Any, chance: random.Random) -> None:
    _scale(model, ("scaling", "scale_attn"), chance.choice((0.5, 2.0)))


def epsilon(model: Any, chance: random.Random) -> None:
    _scale(model, ("variance_epsilon", "eps", "epsilon"), 1e5)


def act_fn(model: Any, chance: random.Random) -> None:
    for module in model.modules():
        for name in ("act_fn", "act", "activation_fn", "activation", "ffn_act"):
            if isinstance(getattr(module, name, None), nn.Module):
                setattr(module, name, nn.Tanh())


def resize(model: Any, chance: random.Random) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model.resize_token_embeddings(model.config.get_text_config().vocab_size + 4)


def to_half(model: Any, chance: random.Random) -> None:
    model.to(torch.bfloat16)


def tie(model: Any, chance: random.Random) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight.shape == embedding.weight.shape:
        head.weight = embedding.weight


# --- what runs along, and can be taken away again


def wrap_lambda(model: Any, chance: random.Random) -> Undo:
    """A forward without named arguments; its text is the same."""
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return lambda: model.__dict__.pop("forward", None)


def wrap_layer(model: Any, chance: random.Random) -> Undo:
    """A linear layer's forward, replaced by one that says something else."""
    _, _, linear = _linear(model, chance)
    forward = linear.forward
    linear.forward = lambda *args, **kwargs: 1.3 * forward(*args, **kwargs)
    return lambda: linear.__dict__.pop("forward", None)


def hook(model: Any, chance: random.Random) -> Undo:
    _, _, linear = _linear(model, chance)
    return linear.register_forward_hook(lambda module, args, output: output * 0.7).remove


def norm_hook(model: Any, chance: random.Random) -> Undo:
    found = [module for module in model.modules() if "Norm" in type(module).__name__]
    if not found:
        return lambda: None
    return chance.choice(found).register_forward_pre_hook(lambda module, args: (args[0] * 0.7 + 0.1, *args[1:])).remove


def class_patch(model: Any, chance: random.Random) -> Undo:
    """The forward of a class of norms, activations or MLPs. Copies have the same class, which is patched once."""
    classes = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.")}
    found = [kind for kind in classes if any(part in kind.__name__ for part in ("Norm", "MLP", "Activation"))]
    if not found:
        return lambda: None
    kind = chance.choice(sorted(found, key=lambda kind: kind.__name__))
    forward = kind.forward
    if getattr(forward, "patched", False):
        return lambda: None

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        return tuple(1.2 * part for part in output) if isinstance(output, tuple) else 1.2 * output + 0.05

    patched.patched = True  # type: ignore[attr-defined]
    kind.forward = patched
    return lambda: setattr(kind, "forward", forward)


EDITS: dict[str, Callable[[Any, random.Random], Undo | None]] = {
    function.__name__: function
    for function in (
        *(data_flip, data_copy_flip, data_permute, data_swap, add_element, data_element, add_noise, norms),
        *(optimizer_step, load_state, new_parameter, new_linear, new_layer, inv_freq, new_rotary, scaling, epsilon),
        *(act_fn, resize, to_half, tie, wrap_lambda, wrap_layer, hook, norm_hook, class_patch),
    )
}
NAMES = (*EDITS, "undo", "undo")  # "undo" takes back the last of those that can be taken back


def edit(name: str, seed: int, models: Sequence[PreTrainedModel], undos: list[Undo]) -> None:
    """Change models that are copies of each other, and note how it is taken back."""
    if name == "undo":
        if undos:
            undos.pop()()
        return
    made = [EDITS[name](model, random.Random(seed)) for model in models]
    taken_back = [undo for undo in made if undo is not None]
    if taken_back:
        undos.append(lambda: [undo() for undo in reversed(taken_back)] and None)


def undo(undos: list[Undo]) -> None:
    """Take back all that can be."""
    while undos:
        undos.pop()()
