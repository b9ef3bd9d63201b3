"""How each family of models names its multi-token prediction (MTP) layers, in safetensors and in GGUF files: a table, by which
`mtp_formats` reads and writes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Layout:
    """How a family names an MTP layer. {k} counts the MTP layers from 0, {n} goes on from the target's layers."""

    root: str  # the beginning of all names
    layer: str  # all others follow the root
    embed_norm: str
    hidden_norm: str
    fuse: str
    end_norm: str  # "" if there is none
    hidden_first: bool = False  # the order of the columns of `fuse`
    stacked: bool = False  # whether experts are written as one tensor
    copies: tuple[str, ...] = ()  # of the target's embedding and head
    renamed: tuple[tuple[str, str], ...] = ()  # beginnings of names in transformers' layer and in the checkpoint

    def stored(self, name: str, k: int, layers: int) -> str:
        """The name in the checkpoint. layers: of the target."""
        part, dot, rest = name.partition(".")
        if part == "layer":
            rest = next((new + rest.removeprefix(old) for old, new in self.renamed if rest.startswith(old)), rest)
            rest = self.layer + rest
        else:
            rest = getattr(self, part) + dot + rest
        return (self.root + rest).format(k=k, n=layers + k)

    def parts(
        self, name: str, shape: tuple[int, ...], k: int, layers: int, stacked: bool
    ) -> dict[str, tuple[int, ...]]:
        """The tensors of a checkpoint that make one of ours: itself, or those of each expert, in the order of their rows."""
        experts = re.fullmatch(r"layer\.mlp\.experts\.(gate_up|down)_proj", name)
        if stacked or experts is None:
            return {self.stored(name, k, layers): shape}
        kinds = experts[1].split("_")
        names = (f"layer.mlp.experts.{e}.{kind}_proj.weight" for e in range(shape[0]) for kind in kinds)
        return dict.fromkeys((self.stored(part, k, layers) for part in names), (shape[1] // len(kinds), shape[2]))


_NEXTN = Layout(
    *("model.layers.{n}.", "", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = Layout("mtp.", "layers.{k}.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_QWEN_STACKED = replace(_QWEN, stacked=True)
SPECULATORS = Layout(
    *("mtp_layers.{k}.", "", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), stacked=True
)
_ERNIE = Layout("model.mtp_", "block.{k}.", "emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}", "")
FAMILIES = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _NEXTN),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "exaone4"), _QWEN),
    "qwen3_5_moe_text": _QWEN_STACKED,
    "exaone_moe": replace(_QWEN, renamed=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),)),
    "hy_v3": replace(
        _NEXTN,
        end_norm="final_layernorm",
        copies=(*_NEXTN.copies, "shared_head.weight"),
        renamed=(
            ("mlp.gate.", "mlp.router.gate."),
            ("mlp.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.shared_experts.", "mlp.shared_mlp."),
        ),
    ),
    "mimo": replace(SPECULATORS, root="model.mtp_layers.{k}.", hidden_first=True, stacked=False),
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, renamed=(("mlp.gate.moe_statics.", "mlp.moe_statics."),)),
    "longcat_flash": Layout(
        *("model.mtp.", "layers.{k}.", "layers.{k}.enorm.m", "layers.{k}.hnorm.m", "layers.{k}.eh_proj", "norm"),
        copies=("embed_tokens.weight",),
        renamed=(("mlp.", "transformer_layer.mlp."),),
    ),
}
"""By the model_type of the text config."""
BUILT_AS = {"mimo": "qwen2", "longcat_flash": "deepseek_v3"}
"""Families whose MTP layer is a layer of another class: transformers has none for MiMo, and LongCat's is a dense one."""
REFUSED = (
    ("mimo_v2", r"model\.mtp\.", "the MTP layers of MiMo-V2 (model.mtp.*) are not supported"),
    ("nemotron_h", r"mtp\.layers\.", "the MTP layers of Nemotron-H (mtp_layers_block_type) are not supported"),
    ("deepseek_v4", r"mtp\.\d+\.[eh]_proj\.", "the MTP layers of DeepSeek-V4 (mtp.0.e_proj, h_proj) are not supported"),
    ("deepseek_v4", r"mtp\.", "mtp.* without enorm is a DSpark drafter and not an MTP layer"),
)
"""The beginning of a model_type, the tensors, and what to say of them."""
GGUF_KINDS = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
GGUF_COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
GGUF_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "attn_norm": "layers.{k}.input_layernorm",
    "post_attention_norm": "layers.{k}.post_attention_layernorm",
    **{f"attn_{x}": f"layers.{{k}}.self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "layers.{k}.self_attn.o_proj",
    **{f"attn_{x}_norm": f"layers.{{k}}.self_attn.{x}_norm" for x in "qk"},
    **{f"ffn_{x}": f"layers.{{k}}.mlp.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "layers.{k}.mlp.gate",
    "ffn_gate_inp_shexp": "layers.{k}.mlp.shared_expert_gate",
    **{f"ffn_{x}_shexp": f"layers.{{k}}.mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), "layers.{k}.mlp.experts.gate_up_proj"),
    "ffn_down_exps": "layers.{k}.mlp.experts.down_proj",
}
"""llama.cpp's names of the tensors of Qwen's MTP layers, after `blk.{n}.`, and those in Qwen's checkpoints, after `mtp.`
(conversion/qwen.py, read in November 2026): 1 is added to every norm, and the stacked experts' rows are in two tensors."""
