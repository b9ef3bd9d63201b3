"""Medusa heads (2401.10774): the module and its checkpoint formats. Head h reads the target's state after the final norm
at token t and predicts token t + 2 + h; the target's own output predicts t + 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ...loading.files import loading
from ..shared.files import Checkpoint, Layout, Parts, find_folder, pieces, public_name, shapes_by_name, write_head

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
        self.bias = nn.Parameter(torch.zeros(layers, heads, hidden_size)) if bias else None
        self.output = nn.Parameter(torch.zeros(outputs, vocab_size, hidden_size)) if own_output else None
        self.token_map: torch.Tensor | None
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
            checkpoint, heads, layers = _opened(folder)
            file, vllm, shape = checkpoint.file, checkpoint.layout is _VLLM, checkpoint.shape
            (rows, *_), (width, *_), listed = shape("output.0") or (0,), shape("weight.0.0") or (0,), shape("token_map")
            size, hidden_size = output_size(target) if target is not None else (rows, width)
            token_map = checkpoint.tensors({"token_map": listed})["token_map"] if vllm and listed else None
            if token_map is not None:
                known = token_map.ndim == 1 and not token_map.is_floating_point() and len(token_map) > 0
                if not known or int(token_map.min()) < 0 or (target and int(token_map.max()) >= size):
                    raise ValueError(f"draft: {file} holds a token_map with ids that are no tokens of the target")
                size = len(token_map)
            own = vllm or any(shape(f"output.{h}") for h in range(heads))
            shared = vllm and not any(shape(f"output.{h}") for h in range(1, heads))
            bias = not vllm or any(name.endswith("bias") for name in checkpoint.shapes)
            with torch.device("meta"):
                new = cls(hidden_size, size, heads, layers, own, shared_output=shared, bias=bias, token_map=token_map)
            expected = shapes_by_name(new.state_dict())
            if token_map is not None and rows:
                expected["output"] = (1 if shared else heads, rows, hidden_size)
            checkpoint.require(expected)
            tensors = checkpoint.tensors(expected)
            if token_map is not None and rows != size:  # some files keep unused rows
                tensors["output"] = tensors["output"][:, token_map]
            new.to(tensors["weight"].dtype).to_empty(device="cpu").load_state_dict(tensors)
            return new

    def save(self, folder: str | Path, format: Format = "medusa", target: PreTrainedModel | None = None) -> None:
        """Write config.json and the tensors into a folder; `load` restores the same heads.

        format: "medusa", the format of the method's trainer (version 2 if the heads use the target's output); "medusa-pt",
            the pickled file of its first versions; "vllm", for vLLM up to 0.32.
        target: the heads' target. Its name is stored; the last two formats also contain its output if the heads use it.

        Raises ValueError for heads that the format cannot represent.
        """
        output = _output_of(target) if self.output is None and format != "medusa" else self.output
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
                "original_lm_head": output is not None and len(output) == 1,
                "medusa_fc_bias": self.bias is not None,
                "dtype": str(self.weight.dtype).removeprefix("torch."),
            }
            layout = _VLLM
        else:
            if self.token_map is not None or self.bias is None:
                raise ValueError(f"format: {format!r} supports no token_map and no blocks without bias; use 'vllm'")
            config = {
                "medusa_num_heads": self.heads,
                "medusa_num_layers": self.layers,
                "base_model_name_or_path": public_name(target),
                **({"version": "2"} if output is None else {}),
            }
            layout = _of_authors("", self.layers)
        held = self.state_dict()
        if output is not None:
            held["output"] = output if format == "vllm" else output.expand(self.heads, -1, -1)
        file = {"vllm": "model.safetensors", "medusa-pt": "medusa_lm_head.pt"}.get(format, "medusa_lm_head.safetensors")
        write_head(folder, config, pieces(layout, held), file)


def _output_of(target: PreTrainedModel | None) -> torch.Tensor:
    """The target's output, [1, V, H], for heads that use it."""
    module = None if target is None else target.get_output_embeddings()
    if module is None:
        raise ValueError("target: required, because these heads use its output and this format contains it")
    if getattr(module, "bias", None) is not None:
        raise ValueError("format: the target's output has a bias, which this format can't hold; use 'medusa'")
    return module.weight.detach()[None]  # type: ignore[no-any-return]


def _split(name: str, shape: tuple[int, ...]) -> Parts:
    """`weight.{layer}.{head}`, `bias.{layer}.{head}` and `output.{head}` of the tensors of `MedusaHeads`."""
    places = {"weight": shape[:2], "bias": shape[:2], "output": shape[:1]}.get(name, ())
    return {".".join((name, *map(str, place))): shape[len(places) :] for place in product(*map(range, places))}


def _layout(title: str, block: str, output: str, *read_past: str) -> Layout:
    """block, output: the stored names of a part of a block, of which head and layer, and of an output."""
    names = (r"(weight|bias)\.(\d+)\.(\d+)", block), (r"output\.(\d+)", output)
    return Layout(title, names, read_past, _split)


def _of_authors(begin: str, layers: int) -> Layout:
    """begin: of all names. layers: of each head."""
    title = _TITLES[begin]
    others = rf"(?!{re.escape(begin)}).*"
    return _layout(title, rf"{begin}\3.\2.linear.\1", rf"{begin}\1.{layers}.weight", others)


_TITLES = {
    "": "Medusa heads of their authors",
    "medusa_head.": "Medusa-2 heads beside their model",
    "medusa_heads.": "Medusa heads of ModelOpt, beside their model",
}
"""By what all names begin with."""
_VLLM = _layout("Medusa heads for vLLM", r"blocks.\3.layers.\2.\1", r"lm_heads.\1.weight")
_PLACED = re.compile(r"(blocks\.|medusa_heads?\.|)(\d+)\.(?:layers\.(\d+)|(\d+)\.linear)\.weight")
"""What a name begins with, and the numbers of a head and a layer, for vLLM and from the authors."""


def require_medusa(path: str | Path, target: PreTrainedModel, **hub: Any) -> int:
    """Check the width of the heads at a path, without reading their weights, and return how many numbers they have. target: may
    be on the meta device. hub: download options.

    Raises ValueError if the heads were made for a target of another width.
    """
    found, _, _ = _opened(find_folder(path, **hub))
    first, (_, width) = found.shape("weight.0.0"), output_size(target)
    if first is not None and first[-1] != width:
        raise ValueError(
            f"draft: {found.file} was made for hidden states of width {first[-1]}; the target's have {width}"
        )
    return found.numbers


def _opened(folder: Path) -> tuple[Checkpoint, int, int]:
    """The checkpoint of heads in its layout, and their number and that of their layers, from the largest indices in names.
    Raises ValueError for more than there are tensors."""
    found = Checkpoint.open(folder, FILES, needs_config=False)
    placed = [match for name in found.shapes if (match := _PLACED.fullmatch(name))]
    begin = max((match[1] for match in placed), default="")
    places = [(int(match[2]), int(match[3] or match[4])) for match in placed if match[1] == begin]
    heads, layers = (max(numbers) + 1 for numbers in zip((0, 0), *places, strict=True))
    found = found.under(_VLLM if begin == "blocks." else _of_authors(begin, layers))
    if heads * layers > max(1, len(found.shapes)):
        raise ValueError(
            f"draft: {found.file} counts up to {heads} heads of {layers} layers with {len(found.shapes)} tensors; some are "
            "missing"
        )
    return found, heads, layers


def output_size(target: PreTrainedModel) -> tuple[int, int]:
    """V and H of a target's output embedding. Raises ValueError if it has none."""
    module = target.get_output_embeddings()
    if module is None:
        raise ValueError(f"target: {type(target).__name__} has no output embedding that heads could use")
    if hasattr(module, "out_features"):  # quantized weights are packed
        return module.out_features, module.in_features
    return tuple(module.weight.shape)
