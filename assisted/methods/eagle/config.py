"""The configurations of heads with layers of their own, and of EAGLE heads among them; independent of the checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from ...engine.libraries import set_attention
from ...extras import reject

LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
)
"""The fields that have the same name and meaning in transformers' configs."""
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def default_taps(layers: int) -> tuple[int, int, int]:
    """A low, a middle and a high layer of a target, as indices into transformers' `hidden_states`: 2, L // 2, L - 3."""
    low, middle, high = sorted(min(max(1, tap), layers) for tap in (2, layers // 2, layers - 3))
    return low, middle, high


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes of a head and of its layers, and what it reads of the target.

    Args:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: of its layers; hidden_size is H.
        vocab_size: V, the target's.
        taps: indices into transformers' `hidden_states` of the target, from which the features are taken. Index L, the number
            of layers, is the output of the final norm.
        last_normed: tap L is that; False: the output of the last layer, before the final norm.
        target_hidden_size: Ht; None (default) for H.
        draft_vocab_size: Vd, the number of tokens that the head can draft; None (default) for all V.
        num_hidden_layers: decoder layers.
        layer_types: "full_attention" or "sliding_attention" of each layer; None (default) for full attention everywhere.
        sliding_window: sliding layers attend to positions less than this far back.
        hidden_act, rms_norm_eps, max_position_embeddings: of the layers, as in transformers.
        rope: transformers' `rope_parameters`, including `rope_theta`.
        own_embedding: the head has its own embedding, [V, H]; False (default) uses the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    taps: tuple[int, ...]
    last_normed: bool = True
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    num_hidden_layers: int = 1
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    own_embedding: bool = False

    def __post_init__(self) -> None:
        self._default("target_hidden_size", self.hidden_size)
        self._default("draft_vocab_size", self.vocab_size)
        object.__setattr__(self, "taps", tuple(self.taps))
        object.__setattr__(self, "layer_types", tuple(self.layer_types or (FULL,) * self.num_hidden_layers))
        kinds, count, window = self.kinds, self.num_hidden_layers, self.sliding_window
        reject(
            {
                "taps: name at least one of the target's hidden states": not self.taps,
                f"layer_types: {kinds} are not {count} of {FULL} and {SLIDING}": len(kinds) != count
                or not {*kinds} <= {FULL, SLIDING},
                f"sliding_window: {window!r} is not a number of positions, at least 1": self.slides
                and (type(window) is not int or window < 1),
            }
        )

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def kinds(self) -> tuple[str, ...]:
        """`layer_types`."""
        return self.layer_types or ()

    @property
    def slides(self) -> bool:
        """Whether any layer has a sliding window."""
        return SLIDING in self.kinds

    def _of_layer(self, kind: str, **fields: Any) -> Any:
        same = {name: getattr(self, name) for name in LAYER_FIELDS}
        return CONFIGS[kind](**same, rope_parameters=dict(self.rope), tie_word_embeddings=False, **fields)


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """The sizes of an EAGLE head and how its parts are connected. The arguments of `HeadConfig`, and these:

    Args:
        version: 1 (EAGLE-1 and EAGLE-2, which differ in how they draft) or 3. EAGLE-1 has one tap, (L,), and the target's
            vocabulary and width; in EAGLE-3, the first layer is the fused one.
        layer: "llama" (default) or "qwen3", the kind of decoder layer.
        fc_bias: `fc`, the fusion, has a bias. None (default) is true for EAGLE-1 and false for EAGLE-3.
        qkv_bias, o_bias, mlp_bias: the layer's projections have biases.
        norm_before_residual: EAGLE-3: the residual is the normed state.
        norm_before_fc: EAGLE-3: one norm over the concatenated features, before `fc`.
        fc_norm: EAGLE-3: a norm for each tap, before they are concatenated.
        norm_output: EAGLE-3: the recurrent state is the output of the final norm.
        mask_token_id: P-EAGLE (2602.01469), which is an EAGLE-3 head that drafts several tokens in one forward pass: the token
            that stands for those not yet known. None (default) for other heads.
        parallel_tokens: P-EAGLE: the most tokens that it drafts, as many as in its training.
    """

    version: int
    layer: str = "llama"
    fc_bias: bool | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    parallel_tokens: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._default("fc_bias", self.version == 1)
        mask, size = self.mask_token_id, self.hidden_size
        is_token = mask is None or (self.version == 3 and type(mask) is int and 0 <= mask < self.vocab_size)
        reject(
            {
                f"version: {self.version} is not known; 1 (also for EAGLE-2) or 3": self.version not in (1, 3),
                f"layer: {self.layer!r} is not known; one of {', '.join(CONFIGS)}": self.layer not in CONFIGS,
                "norm_before_fc, fc_norm: only one of them can be true": self.norm_before_fc and self.fc_norm,
                f"taps, target_hidden_size: EAGLE-1 reads one state as wide as its own ({size}), not {len(self.taps)} of "
                f"{self.target_hidden_size}": self.version == 1
                and (len(self.taps) != 1 or self.target_hidden_size != size),
                f"mask_token_id: {mask!r} is not a token of an EAGLE-3 head with {self.vocab_size} tokens": not is_token,
                f"parallel_tokens: {self.parallel_tokens!r} is not a number of tokens, at least 1": (
                    type(self.parallel_tokens) is not int or self.parallel_tokens < 1
                ),
            }
        )

    @classmethod
    def for_target(cls, target: PreTrainedModel, version: int = 3, **fields: Any) -> EagleConfig:
        """A head with the sizes of a target's layers. fields: overrides."""
        config = target.config.get_text_config(decoder=True)
        width, layers = config.hidden_size, config.num_hidden_layers
        heads = getattr(config, "num_attention_heads", None) or max(1, width // 64)  # a target may have none
        inner = getattr(config, "intermediate_size", None)
        same = {
            "hidden_size": width,
            "intermediate_size": inner if isinstance(inner, int) else 4 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            # not getattr, which raises if layers differ in it
            "head_dim": vars(config).get("head_dim") or width // heads,
            "vocab_size": config.vocab_size,
            "taps": (layers,) if version == 1 else default_taps(layers),
            "target_hidden_size": width,
            "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
        }
        return cls(version, **(same | fields))

    def of_layer(self) -> LlamaConfig | Qwen3Config:
        """transformers' config of the decoder layers."""
        more = {"mlp_bias": self.mlp_bias} if self.layer == "llama" else {}
        config = self._of_layer(self.layer, attention_bias=self.qkv_bias, **more)
        set_attention(config, "sdpa")
        return config
