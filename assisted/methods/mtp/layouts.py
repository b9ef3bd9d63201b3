"""How each family of models names its multi-token prediction (MTP) layers, in safetensors and in GGUF files: tables, by which
`mtp_formats` reads and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..shared.files import Layout, Parts

FIXED = ("embed_norm", "hidden_norm", "fuse", "end_norm")
"""What an MTP layer has beside a decoder layer."""


@dataclass(frozen=True)
class MTPLayout(Layout):
    """How a family names MTP layers. Our names are `0.embed_norm.weight`, `0.layer.NAME` and so on, with the number of the MTP
    layer; `names` are of transformers' layer. In stored ones, {k} is that number, and {n} goes on from the target's layers."""

    # the beginning of all names. layer: of those of a decoder layer, after it. places: of `FIXED`, after it; a family
    # may have no end norm.
    root: str = ""
    layer: str = ""
    places: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()  # of the target's embedding and head, after the root
    hidden_first: bool = False  # the hidden state's columns of `fuse` come first
    stacked: bool = False  # experts are stored as one tensor
    layers: int = 0  # of the target

    @property
    def fixed(self) -> tuple[str, ...]:
        """Those of `FIXED` that it has."""
        return FIXED[: len(self.places)]

    def stored(self, name: str) -> str:
        k, part, rest = name.split(".", 2)
        if part == "layer":
            return self.placed(self.layer + super().stored(rest), int(k))
        return self.placed(f"{self.places[FIXED.index(part)]}.{rest}", int(k))

    def placed(self, rest: str, k: int) -> str:
        """What stands after the root, with the root."""
        return (self.root + rest).format(k=k, n=self.layers + k)

    def parts(self, name: str, shape: Sequence[int]) -> Parts:
        experts = re.fullmatch(r"(\d+\.layer\.mlp\.experts\.)(gate_up|down)_proj", name)
        if self.stacked or experts is None:
            return super().parts(name, shape)
        kinds = experts[2].split("_")
        names = (f"{experts[1]}{e}.{kind}_proj.weight" for e in range(shape[0]) for kind in kinds)
        return dict.fromkeys(map(self.stored, names), (shape[1] // len(kinds), shape[2]))


@dataclass(frozen=True)
class GGUFLayout(MTPLayout):
    """llama.cpp's names (its conversion/qwen.py, glm.py and deepseek.py, read in November 2026): experts are stacked, gate and
    up apart; so are keys and values of latent attention, by heads; one row is a vector."""

    named: Callable[[str], str | None] = str  # llama.cpp's name of a module of a checkpoint with `model.layers.*`
    config: Any = None  # the target's text config

    def stored(self, name: str) -> str:
        k, part, rest = name.split(".", 2)
        if part != "layer":
            return super().stored(name)
        stem, _, ending = re.sub("_(?=bias$)", ".", rest).rpartition(".")
        place = f"model.layers.{self.layers + int(k)}.{stem}"
        return f"{self.named(place) or place}.{ending}"

    def parts(self, name: str, shape: Sequence[int]) -> Parts:
        if experts := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj", name):
            kinds = experts[2].split("_")
            size = (shape[0], shape[1] // len(kinds), shape[2])
            return {self.stored(f"{experts[1]}{kind}_proj.weight"): size for kind in kinds}
        if name.endswith(".kv_b_proj.weight"):
            heads, sizes = self.config.num_attention_heads, (self.config.qk_nope_head_dim, self.config.v_head_dim)
            stored = (self.stored(name.replace("kv_b_proj", f"{kind}_b_proj")) for kind in "kv")
            return {part: (heads, size, shape[1]) for part, size in zip(stored, sizes, strict=True)}
        return {self.stored(name): tuple(shape[1:] if len(shape) > 1 and shape[0] == 1 else shape)}


_NEXTN = MTPLayout(
    root="model.layers.{n}.",
    places=("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = MTPLayout(
    root="mtp.", layer="layers.{k}.", places=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
)
SPECULATORS = MTPLayout(
    root="mtp_layers.{k}.",
    places=("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    stacked=True,
)
_ERNIE = MTPLayout(root="model.mtp_", layer="block.{k}.", places=("emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}"))
FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _NEXTN),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "exaone4", "mellum"), _QWEN),
    "qwen3_5_moe_text": replace(_QWEN, stacked=True),
    "exaone_moe": replace(_QWEN, names=((r"mlp\.gate\.e_score", "mlp.e_score"),)),
    "hy_v3": replace(
        _NEXTN,
        places=(*_NEXTN.places[:3], "final_layernorm"),
        copies=(*_NEXTN.copies, "shared_head.weight"),
        names=(
            (r"mlp\.gate\.", "mlp.router.gate."),
            (r"mlp\.e_score_correction_bias", "mlp.expert_bias"),
            (r"mlp\.shared_experts\.", "mlp.shared_mlp."),
        ),
    ),
    "mimo": replace(SPECULATORS, root="model.mtp_layers.{k}.", hidden_first=True, stacked=False),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, names=((r"mlp\.gate\.moe_statics", "mlp.moe_statics"),)),
    "longcat_flash": MTPLayout(
        root="model.mtp.",
        layer="layers.{k}.",
        places=("layers.{k}.enorm.m", "layers.{k}.hnorm.m", "layers.{k}.eh_proj", "norm"),
        copies=("embed_tokens.weight",),
        names=((r"mlp\.", "transformer_layer.mlp."),),
    ),
}
"""By the model_type of the text config."""
BUILT_AS = {"mimo": "qwen2", "longcat_flash": "deepseek_v3"}
"""Families whose MTP layer is a layer of another class: transformers has none for MiMo, and LongCat's is a dense one."""
REFUSED = {
    r"mimo_v2.* model\.mtp\.": "the MTP layers of MiMo-V2 (model.mtp.*) are not supported",
    r"nemotron_h.* mtp\.layers\.": "the MTP layers of Nemotron-H (mtp_layers_block_type) are not supported",
    r"deepseek_v4.* mtp\.\d+\.[eh]_proj\.": "the MTP layers of DeepSeek-V4 (mtp.0.e_proj, h_proj) are not supported",
    r"deepseek_v4.* mtp\.": "mtp.* without enorm is a DSpark drafter and not an MTP layer",
}
"""A model_type and a tensor, and what to say of them."""
MARKS = r"(.*\.)?(mtp\w*|nextn)\..+|(.*\.)?(enorm|hnorm|eh_proj)\.(\w+\.)?weight"
"""Names of tensors that tell of MTP layers in a layout that is not in these tables."""
GGUF = GGUFLayout(
    root="blk.{n}.",
    places=("nextn.enorm", "nextn.hnorm", "nextn.eh_proj", "nextn.shared_head_norm"),
    copies=("nextn.embed_tokens.weight", "nextn.shared_head_head.weight"),
)
GGUF_KINDS = {
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3next": "qwen3_next",
    "glm4moe": "glm4_moe",
    "deepseek2": "glm4_moe_lite",
}
"""llama.cpp's architectures whose MTP layers are read, and their model_type. Its converter leaves out those of DeepSeek."""
