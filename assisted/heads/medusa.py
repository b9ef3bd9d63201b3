"""Medusa heads (2401.10774): the module and its checkpoint formats. Head h reads the target's state after the final norm
at token t and predicts token t + 2 + h; the target's own output predicts t + 1.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..loading.files import loading
from .files import Checkpoint, Layout, find_folder, public_name, write_head

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
Format = Literal["medusa", "medusa-pt", "vllm"]


class MedusaHeads(nn.Module):
    """Several heads, computed together. Each has `layers` blocks x + SiLU(Wx + b), then an output over the vocabulary.

    New blocks are the identity, so training starts with the output of the unchanged state.

    Args:
        hidden_size: H, of the target's states.
        vocab_size: V, of the output; smaller than the target's with a `token_map`.
        heads: number of heads. Each predicts one token further.
        layers: blocks in each head.
        own_output: the heads have their own output matrices (zero until trained or copied). False uses the target's, so a head
            is only as large as its blocks.
        shared_output: with own_output, one matrix for all heads.
        bias: blocks have b.
        token_map: [V] int64, the target's token of each output; None if they are the same.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        heads: int,
        layers: int = 1,
        own_output: bool = True,
        *,
        shared_output: bool = False,
        bias: bool = True,
        token_map: torch.Tensor | None = None,
    ):
        super().__init__()
        self.hidden_size, self.vocab_size, self.heads, self.layers = hidden_size, vocab_size, heads, layers
        self.weight = nn.Parameter(torch.zeros(layers, heads, hidden_size, hidden_size))
        outputs = 1 if shared_output else heads
        self.bias: nn.Parameter | None
        self.output: nn.Parameter | None
        self.token_map: torch.Tensor | None
        self.register_parameter("bias", nn.Parameter(torch.zeros(layers, heads, hidden_size)) if bias else None)
        self.register_parameter(
            "output", nn.Parameter(torch.zeros(outputs, vocab_size, hidden_size)) if own_output else None
        )
        self.register_buffer("token_map", token_map)

    def forward(
        self, hidden: torch.Tensor, output: Callable[[torch.Tensor], torch.Tensor], count: int | None = None
    ) -> torch.Tensor:
        """Logits of the first `count` heads (None: all).

        hidden: [..., H], the target's states after the final norm. output: the target's output embedding, called if the heads
        have none. Returns [heads, ..., V]; entry h, at the state of token t, predicts token t + 2 + h.
        """
        count = self.heads if count is None else min(count, self.heads)
        x = hidden.reshape(1, -1, self.hidden_size).expand(count, -1, -1).to(self.weight)
        for layer in range(self.layers):
            moved = x @ self.weight[layer, :count].mT  # [heads, N, H]
            x = x + F.silu(moved if self.bias is None else moved + self.bias[layer, :count, None])
        if self.output is None:
            logits = output(x.to(hidden.dtype))
        elif len(self.output) == 1:
            logits = F.linear(x, self.output[0])
        else:
            logits = x @ self.output[:count].mT
        return logits.view(count, *hidden.shape[:-1], -1)

    def tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """The target's tokens for indices of the logits, int64 of any shape."""
        return columns if self.token_map is None else self.token_map[columns]

    @classmethod
    def for_target(
        cls, target: PreTrainedModel, heads: int = 4, layers: int = 1, own_output: bool = False
    ) -> MedusaHeads:
        """New heads to train for a target, in float32 on its device. Own outputs are copies of the target's."""
        vocab_size, hidden_size = output_size(target)
        new = cls(hidden_size, vocab_size, heads, layers, own_output)
        if new.output is not None:
            with torch.no_grad():
                new.output.copy_(target.get_output_embeddings().weight)
        return new.to(target.device)

    @classmethod
    def load(cls, path: str | Path, target: PreTrainedModel | None = None, **hub: Any) -> MedusaHeads:
        """Load heads from a path (a folder, a `zoo:` name or a Hub id), in their stored dtype. hub: download options.

        Numbers of heads and layers are taken from the tensors, because published configs have wrong ones. With a target, all
        sizes must match it.

        Raises ValueError for a missing, unknown or misshapen tensor, with its name.
        """
        folder = find_folder(path, **hub)
        with loading("draft", folder):
            checkpoint, names = _opened(folder)
            file, shapes = checkpoint.file, checkpoint.shapes
            vllm = names is _VLLM
            heads, layers = names.size(shapes)
            if heads * layers > max(1, len(shapes)):
                raise ValueError(
                    f"draft: {file} counts up to {heads} heads of {layers} layers with {len(shapes)} tensors; some are missing"
                )
            found = checkpoint.tensors()
            token_map = found.pop("token_map", None) if vllm else None
            outputs = [name for name in (names.output.format(h=h, n=layers) for h in range(heads)) if name in found]
            first = found.get(names.weight.format(h=0, l=0), torch.empty(0))
            if target is not None:
                size, hidden_size = output_size(target)
            else:
                size, hidden_size = len(found[outputs[0]]) if outputs else 0, len(first)
            if token_map is not None:
                known = token_map.ndim == 1 and not token_map.is_floating_point() and len(token_map) > 0
                if not known or int(token_map.min()) < 0 or (target and int(token_map.max()) >= size):
                    raise ValueError(f"draft: {file} holds a token_map with ids that are no tokens of the target")
                for name in outputs:  # some files keep unused rows
                    found[name] = found[name][token_map] if len(found[name]) == size else found[name]
                size = len(token_map)
            with torch.device("meta"):
                new = cls(
                    hidden_size,
                    size,
                    heads,
                    layers,
                    own_output=bool(outputs) or vllm,
                    shared_output=vllm and len(outputs) == 1,
                    bias=not vllm or any(name.endswith("bias") for name in found),
                )
            there = {name: tuple(tensor.shape) for name, tensor in found.items()}
            replace(checkpoint, shapes=there).require({name: part.shape for name, part in names.of(new).items()}, {})
            new.to(first.dtype).to_empty(device="cpu")
            new.token_map = token_map
            with torch.no_grad():
                for name, part in names.of(new).items():
                    part.copy_(found[name])
            return new

    def save(self, folder: str | Path, format: Format = "medusa", target: PreTrainedModel | None = None) -> None:
        """Write config.json and the tensors into a folder; `load` restores the same heads.

        format: "medusa", the format of the method's trainer (version 2 if the heads use the target's output); "medusa-pt",
            the pickled file of its first versions; "vllm", for vLLM up to 0.32.
        target: the heads' target. Its name is stored; the last two formats also contain its output if the heads use it.

        Raises ValueError for heads that the format cannot represent.
        """
        heads = self._with_output(target) if self.output is None and format != "medusa" else self
        base = public_name(target)
        if format == "vllm":
            whole = output_size(target)[0] if target is not None else self.vocab_size
            if self.token_map is not None and target is None:
                raise ValueError("target: required, because a token_map is stored with the target's vocabulary size")
            config = {
                "model_type": "medusa",
                "architectures": ["MedusaModel"],
                "num_heads": self.heads,
                "num_hidden_layers": self.layers,
                "hidden_size": self.hidden_size,
                "vocab_size": whole,
                "truncated_vocab_size": self.vocab_size,
                "original_lm_head": heads.output is not None and len(heads.output) == 1,
                "medusa_fc_bias": self.bias is not None,
                "dtype": str(self.weight.dtype).removeprefix("torch."),
            }
            tensors = _VLLM.of(heads)
            if self.token_map is not None:
                tensors["token_map"] = self.token_map
        else:
            if self.token_map is not None or self.bias is None:
                raise ValueError(f"format: {format!r} supports no token_map and no blocks without bias; use 'vllm'")
            config = {
                "medusa_num_heads": self.heads,
                "medusa_num_layers": self.layers,
                "base_model_name_or_path": base,
                **({"version": "2"} if heads.output is None else {}),
            }
            tensors = _MEDUSA.of(heads)
        file = {"vllm": "model.safetensors", "medusa-pt": "medusa_lm_head.pt"}.get(format, "medusa_lm_head.safetensors")
        write_head(folder, config, tensors, file)

    def _with_output(self, target: PreTrainedModel | None) -> MedusaHeads:
        """The same heads with a copy of the target's output, one for all of them."""
        module = None if target is None else target.get_output_embeddings()
        if module is None:
            raise ValueError("target: required, because these heads use its output and this format contains it")
        if getattr(module, "bias", None) is not None:
            raise ValueError("format: the target's output has a bias, which this format can't hold; use 'medusa'")
        other = copy.copy(self)
        other._parameters = {**self._parameters, "output": nn.Parameter(module.weight.detach()[None])}
        return other


@dataclass(frozen=True)
class _Names:
    """The tensor names of a format. h: head, l: layer, n: number of layers."""

    weight: str
    bias: str
    output: str
    repeats: bool  # a shared output is stored once per head

    def of(self, heads: MedusaHeads) -> dict[str, torch.Tensor]:
        """All tensors by name, as views."""
        found = {}
        for h in range(heads.heads):
            for l in range(heads.layers):
                found[self.weight.format(h=h, l=l)] = heads.weight[l, h]
                if heads.bias is not None:
                    found[self.bias.format(h=h, l=l)] = heads.bias[l, h]
        if heads.output is not None:
            count = heads.heads if self.repeats else len(heads.output)
            for h, matrix in enumerate(heads.output.expand(count, -1, -1)):
                found[self.output.format(h=h, n=heads.layers)] = matrix
        return found

    def size(self, names: Iterable[str]) -> tuple[int, int]:
        """Numbers of heads and layers, from the largest indices in these names."""
        pattern = re.escape(self.weight).replace(r"\{h\}", r"(\d+)").replace(r"\{l\}", r"(\d+)")
        places = [match.groups() for name in names if (match := re.fullmatch(pattern, name))]
        heads, layers = ({int(place[i]) for place in places} for i in (0, 1))
        return max(heads, default=0) + 1, max(layers, default=0) + 1


_MEDUSA = _Names("{h}.{l}.linear.weight", "{h}.{l}.linear.bias", "{h}.{n}.weight", repeats=True)
_VLLM = _Names("blocks.{h}.layers.{l}.weight", "blocks.{h}.layers.{l}.bias", "lm_heads.{h}.weight", repeats=False)
_LAYOUTS = (
    ("blocks.", Layout("Medusa heads for vLLM"), _VLLM),
    (
        "medusa_head.",
        Layout("Medusa-2 heads beside their model", ((r"medusa_head\.", ""),), (r"(?!medusa_head\.).*",)),
        _MEDUSA,
    ),
    ("", Layout("Medusa heads of their authors"), _MEDUSA),
)
"""What one of the names begins with, and how the others are read."""


def require_medusa(path: str | Path, target: PreTrainedModel, **hub: Any) -> int:
    """Check the width of the heads at a path, without reading their weights, and return how many numbers they have. target: may
    be on the meta device. hub: download options.

    Raises ValueError if the heads were made for a target of another width.
    """
    found, names = _opened(find_folder(path, **hub))
    first, (_, width) = found.shapes.get(names.weight.format(h=0, l=0)), output_size(target)
    if first is not None and first[-1] != width:
        raise ValueError(
            f"draft: {found.file} was made for hidden states of width {first[-1]}; the target's have {width}"
        )
    return found.numbers


def _opened(folder: Path) -> tuple[Checkpoint, _Names]:
    """The checkpoint of heads, without the tensors of a model beside them, and how its format names tensors."""
    found = Checkpoint.open(folder, FILES, needs_config=False)
    layout, names = next(
        (layout, names)
        for mark, layout, names in _LAYOUTS
        if any(name.startswith(mark) for name in found.shapes or [""])
    )
    return found.under(layout), names


def output_size(target: PreTrainedModel) -> tuple[int, int]:
    """V and H of a target's output embedding. Raises ValueError if it has none."""
    module = target.get_output_embeddings()
    if module is None:
        raise ValueError(f"target: {type(target).__name__} has no output embedding that heads could use")
    if hasattr(module, "out_features"):  # quantized weights are packed
        return module.out_features, module.in_features
    return tuple(module.weight.shape)
