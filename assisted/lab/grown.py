"""Grown targets: a small Llama's function at the cost of a large one, for measuring where no large model can be had.

Every added width, head and layer is computed and changes nothing: it writes zeros, or zeros read it. A head of the small
model is made to fit: it reads the same numbers out of wider states.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .. import zoo
from ..engine.libraries import attention_of
from ..methods.eagle.formats import load_eagle
from ..methods.eagle.head import EagleHead

PREFIX = "grown:"  # of names: "grown:SIZE" is the shipped target at that size
RECORD = "assisted_grown"  # in config.json: what was grown, and how


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama. The head size stays the small model's, because its rotary angles depend on it.

    Args:
        hidden_size: of the residual stream.
        intermediate_size: of the MLP.
        layers, heads, kv_heads: how many; `heads` divides `hidden_size`, `kv_heads` divides `heads`.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}: {value} is no size; give 1 or more")
        for name, whole, part in (
            ("hidden_size", self.hidden_size, self.heads),
            ("heads", self.heads, self.kv_heads),
        ):
            if whole % part:
                raise ValueError(f"{name}: {whole} cannot be divided by {part}; give a multiple")

    def __str__(self) -> str:
        return "x".join(map(str, astuple(self)))


SHAPES = {
    "0.05b": Shape(512, 1408, 16, 8, 2),
    "0.25b": Shape(1024, 2816, 22, 16, 4),
    "1b": Shape(2048, 8192, 16, 32, 8),
    "8b": Shape(4096, 14336, 32, 64, 16),
}
"""Sizes by name, with heads of 64. "1b" has the layers of Llama 3.2 1B. "8b" has those of Llama 3.1 8B, with 64 heads of 64 in
place of 32 heads of 128: as many weights, and as many bytes of keys and values. The vocabulary stays the small model's, so
embedding and output layer cost less than a real model's. "8b" has 7.0 billion parameters, Llama 3.1 8B has 8.0; a forward pass
of the latter also reads the 0.5 billion of its output layer."""


@torch.no_grad()
def grow(
    model: LlamaForCausalLM,
    shape: Shape | str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A larger model that computes the small one's logits, up to rounding.

    The residual stream is zero beyond the small model's width. The modules that write into it (embedding, output and down
    projections) have zeros there, and only zeros in added layers. Norms divide by a larger width; their weights and the
    epsilon make up for that. All other added weights are drawn from the normal distribution with the mean and deviation of
    the small model's weights, so products are computed from ordinary numbers. Added layers are spread evenly. The small
    model's hidden states are the first columns of those after the layers of `layer_positions`.

    Args:
        model: a Llama; not changed.
        shape: a name of SHAPES, "HIDDENxINTERMEDIATExLAYERSxHEADSxKV_HEADS", or a Shape; nothing may be smaller than in
            the model.
        device, dtype: of the grown model; None takes the small one's. It is made there tensor by tensor, without a second copy.
        seed: of the drawn weights, which are the same on one kind of device.

    Raises ValueError for a model that is no Llama or does not fit into the shape.
    """
    size, shape = str(shape), parse(shape)
    _require_room(model, shape)
    small = model.config
    dtype = model.dtype if dtype is None else dtype
    device = torch.device(model.device if device is None else device)
    config = LlamaConfig.from_dict(
        small.to_dict()
        | {
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": _head_size(small),
            "rms_norm_eps": small.rms_norm_eps * small.hidden_size / shape.hidden_size,
            RECORD: {"from": Path(model.name_or_path).name or "a model in memory", "size": size, "seed": seed},
        }
    )
    with torch.device("meta"):
        grown = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(small))
    grown.to_empty(device=device)
    grown.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    grown.tie_weights()
    generator = torch.Generator(device).manual_seed(seed)
    _fill(model, grown, shape, generator)
    grown.generation_config = model.generation_config
    return grown.eval()


def parse(shape: Shape | str) -> Shape:
    """The shape that a name of SHAPES or five numbers stand for. Raises ValueError for anything else."""
    if isinstance(shape, Shape):
        return shape
    if shape in SHAPES:
        return SHAPES[shape]
    numbers = shape.split("x")
    if len(numbers) != 5 or not all(map(str.isdigit, numbers)):
        raise ValueError(
            f"size: {shape!r} is not known; give one of {', '.join(SHAPES)}, or HIDDENxINTERMEDIATExLAYERSxHEADSxKV_HEADS, "
            f"such as {SHAPES['0.25b']}"
        )
    return Shape(*map(int, numbers))


def layer_positions(small: int, large: int) -> list[int]:
    """Which layer of the grown model each layer of the small one becomes. The relative depth stays the same."""
    return [layer * large // small for layer in range(small)]


def shipped_head(grown: PreTrainedModel) -> EagleHead:
    """`"zoo:eagle3"` for the grown shipped target."""
    small = AutoModelForCausalLM.from_pretrained(zoo.folder("target"))
    return grow_head(load_eagle(str(zoo.folder("eagle3")), small), small, grown)


@torch.no_grad()
def grow_head(head: EagleHead, small: PreTrainedModel, grown: PreTrainedModel) -> EagleHead:
    """An EAGLE-3 head that proposes for a grown target what `head` proposes for the small one, up to rounding.

    The layer keeps its size; only the parts that read the target's states get wider. A head trained for a model of the grown
    size would be wider, and its drafts would cost more.

    Args:
        head: made for `small`; not changed.
        small: the model that was grown.
        grown: the model that `grow` made of it. The new head goes to its device, in its dtype.

    Raises ValueError for an EAGLE-1 head, whose states are as wide as the target's, and for one that reads the states after
    the final norm.
    """
    config, layers = head.config, small.config.num_hidden_layers
    if config.version != 3 or layers in config.taps:
        raise ValueError("head: only EAGLE-3 heads that read the layers' own states can be made to fit a grown target")
    positions = layer_positions(layers, grown.config.num_hidden_layers)
    width, wide, taps = config.target_hidden_size or config.hidden_size, grown.config.hidden_size, len(config.taps)
    larger = replace(
        config,
        taps=tuple(positions[tap - 1] + 1 for tap in config.taps),
        target_hidden_size=wide,
        own_embedding=True,
    )
    other, own = EagleHead(larger), head.state_dict()
    if not config.own_embedding:
        own["embed_tokens.weight"] = small.get_input_embeddings().weight
    read = (
        torch.arange(taps * wide).view(taps, -1)[:, :width].flatten()
    )  # the small model's numbers among the grown one's
    narrower = math.sqrt(width / wide)
    for name, like in other.state_dict().items():
        part = own[name]
        if part.shape != like.shape:  # it reads the target's states
            own[name] = torch.zeros(like.shape, dtype=part.dtype, device=part.device)
            # a norm over a wider state divides by less; its weights and the epsilon make up for that
            own[name][..., read[: part.shape[-1]].to(part.device)] = part * narrower if part.ndim == 1 else part
    other.load_state_dict(own)
    for norm in filter(None, [*getattr(other, "fc_norm", ()), getattr(other, "input_norm", None)]):
        norm.variance_epsilon *= narrower**2
    return other.to(grown.device, grown.dtype).eval()


Indices = tuple[torch.Tensor, torch.Tensor]  # in the large dimension, and the same entries' in the small one

_DIMENSIONS = {
    "embed_tokens": ("words", "hidden"),
    "q_proj": ("heads", "hidden"),
    "k_proj": ("keys", "hidden"),
    "v_proj": ("keys", "hidden"),
    "o_proj": ("hidden", "heads"),
    "gate_proj": ("inner", "hidden"),
    "up_proj": ("inner", "hidden"),
    "down_proj": ("hidden", "inner"),
    "lm_head": ("words", "hidden"),
}
"""What the rows and columns of a module's weight are; a norm's are hidden."""
_WRITE = ("embed_tokens", "o_proj", "down_proj")  # into the residual stream


def _fill(model: Any, grown: Any, shape: Shape, generator: torch.Generator) -> None:
    """Every parameter of the grown model: random numbers or zeros, and the small model's entries among them."""
    small, parts = model.config, dict(model.named_parameters())
    heads, keys = head_rows(small, shape)
    sizes = {"hidden": small.hidden_size, "inner": small.intermediate_size, "words": small.vocab_size}
    indices = {name: (torch.arange(size), torch.arange(size)) for name, size in sizes.items()}
    indices |= {"heads": heads, "keys": keys}
    positions = layer_positions(small.num_hidden_layers, shape.layers)
    for name, large in sorted(grown.named_parameters(), key=lambda named: ".layers." in named[0]):
        taken, module = True, name.split(".")[-2]
        if layer := re.search(r"(?<=\.layers\.)\d+", name):  # an added one has the distribution of the one before
            of = bisect_right(positions, int(layer[0])) - 1
            taken = positions[of] == int(layer[0])
            name = f"{name[: layer.start()]}{of}{name[layer.end() :]}"
        exact = parts[name].double()
        if module.endswith("norm"):
            exact = exact * math.sqrt(small.hidden_size / shape.hidden_size)
        if module in _WRITE:
            large.zero_()
        else:
            large.normal_(exact.mean().item(), exact.std(correction=0).item(), generator=generator)
        if taken:
            dimensions = _DIMENSIONS.get(module, ("hidden",))[: exact.ndim]  # a bias has rows alone
            to, which = zip(*(indices[dimension] for dimension in dimensions), strict=True)
            values = exact[_grid(which, exact.device)]
            large[_grid(to, large.device)] = values.to(large.device, large.dtype)


def _grid(indices: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The entries at these indices of each dimension."""
    return torch.meshgrid(*(each.to(device) for each in indices), indexing="ij")


def _head_size(config: Any) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def head_rows(small: Any, shape: Shape) -> tuple[Indices, Indices]:
    """Rows of the query heads, and of the key and value heads, of a layer.

    A query head reads the keys of its group. If groups are smaller than in the small model, each key head is repeated, and the
    copies stand side by side.
    """
    size = _head_size(small)
    group, large_group = small.num_attention_heads // small.num_key_value_heads, shape.heads // shape.kv_heads
    copies = math.ceil(group / large_group)
    queries, keys = [], []
    for key in range(small.num_key_value_heads):
        keys += [(key * copies + copy, key) for copy in range(copies)]
        for member in range(group):
            large_key = key * copies + member // large_group
            queries.append((large_key * large_group + member % large_group, key * group + member))
    return _rows(queries, size), _rows(keys, size)


def _rows(heads: list[tuple[int, int]], size: int) -> Indices:
    """The rows of pairs (large head, small head)."""
    within = torch.arange(size)
    to, taken = (torch.cat([head * size + within for head in side]) for side in zip(*heads, strict=True))
    return to, taken


def _require_room(model: Any, shape: Shape) -> None:
    config = model.config
    if type(model) is not LlamaForCausalLM or getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"model: {type(model).__name__} cannot be grown; give a LlamaForCausalLM that is not quantized"
        )
    group = config.num_attention_heads // config.num_key_value_heads
    copies = math.ceil(group * shape.kv_heads / shape.heads)
    for name, fewest, given in (
        ("hidden_size", config.hidden_size, shape.hidden_size),
        ("intermediate_size", config.intermediate_size, shape.intermediate_size),
        ("layers", config.num_hidden_layers, shape.layers),
        ("kv_heads", config.num_key_value_heads * copies, shape.kv_heads),
    ):
        if given < fewest:
            raise ValueError(f"{name}: {given} is too small for this model; give {fewest} or more")
