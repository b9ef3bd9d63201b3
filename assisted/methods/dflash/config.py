"""The configuration of a block drafter, independent of the checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from transformers import PreTrainedModel, Qwen3Config

from ...extras import reject
from ..eagle.config import LAYER_FIELDS, EagleConfig, HeadConfig

Markov = Literal["vanilla", "gated", "rnn"]


def block_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """The hidden states that z-lab's drafters of so many layers read, as indices into transformers' `hidden_states`: from the
    second layer to the fourth from the end."""
    spread = [1 + j * (target_layers - 4) / (layers - 1) for j in range(layers)] if layers > 1 else [target_layers // 2]
    return tuple(sorted({min(max(1, round(layer) + 1), target_layers) for layer in spread}))


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """The sizes of a block drafter, and which parts it has. The arguments of `HeadConfig`, and these:

    Args:
        block_size: rows of a block, the anchor included.
        next_token: each row predicts the token after its position, so that a block drafts `block_size` tokens (DeepSpec). False
            (default): each row but the anchor's predicts the token at its position, one fewer (z-lab).
        mask_token_id: the token whose embedding stands for tokens that are not known; None (default) for `mask_embedding`.
        causal, sliding_causal: full and sliding layers attend to no later row of the block. False by default.
        bias: the attention's projections have biases.
        sinks: in each layer, every head of the attention has a logit of its own beside the keys', which takes a part of the
            probability and adds nothing.
        own_output: it has an output embedding [Vd, H] of its own, not the target's.
        embedding_scale: multiplies the rows of the embedding; None (default) embeds as the target's module does.
        logit_scale, logit_cap: logits become cap * tanh(scale * logits / cap); no cap by default.
        markov: DSpark's correction by the token before: "vanilla", "gated" or "rnn". None (default) has none.
        markov_rank: r.
        confidence: it predicts the acceptance rate of each token. confidence_markov: from the token before, too.
        conv_size, conv_group_size: positions that a local convolution of DFlash2 reads, and channels that share a kernel. 0
            (default) has no convolutions.
        selector_rank, selector_top_k: of DFlash2's candidate selector. 0 (default) has none.
    """

    num_hidden_layers: int = 2
    block_size: int = 8
    next_token: bool = False
    mask_token_id: int | None = None
    causal: bool = False
    sliding_causal: bool = False
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e6})
    bias: bool = False
    sinks: bool = False
    own_output: bool = False
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    markov: Markov | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_markov: bool = False
    conv_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        reduced = self.draft_vocab_size != self.vocab_size
        markovs, has_markov = get_args(Markov), self.markov is not None
        reject(
            {
                f"block_size: a block of {self.block_size} drafts nothing": self.drafts < 1,
                f"sliding_window: {self.sliding_window} is less than the block of {self.block_size}": self.slides
                and (self.sliding_window or 0) < self.block_size,
                f"markov: {self.markov!r} is not known; one of {', '.join(markovs)}": has_markov
                and self.markov not in markovs,
                "markov, markov_rank: one without the other": has_markov != (self.markov_rank > 0),
                "markov: 'rnn' is defined for next-token rows only": self.markov == "rnn" and not self.next_token,
                "confidence_markov: there is no Markov head": self.confidence_markov and not has_markov,
                "markov, selector_rank: only one of them": has_markov and self.selector_rank > 0,
                "selector_rank: a selector needs the whole vocabulary": reduced and self.selector_rank > 0,
                "own_output: a reduced vocabulary needs an output embedding of its own": reduced
                and not self.own_output,
                "conv_group_size: must divide hidden_size": self.conv_size > 0
                and self.hidden_size % self.conv_group_size > 0,
            }
        )

    @property
    def drafts(self) -> int:
        """The number of tokens that a block drafts."""
        return self.block_size - self.first_row

    @property
    def first_row(self) -> int:
        """The row of the block that predicts the first drafted token."""
        return 0 if self.next_token else 1

    @classmethod
    def for_target(cls, target: PreTrainedModel, **fields: Any) -> BlockConfig:
        """A drafter with the sizes of a target's layers. fields: overrides."""
        like = EagleConfig.for_target(target)
        same = {name: getattr(like, name) for name in LAYER_FIELDS if name not in ("hidden_act", "rms_norm_eps")}
        same |= {"num_hidden_layers": 2, "target_hidden_size": like.target_hidden_size} | fields
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        return cls(**({"taps": block_taps(layers, same["num_hidden_layers"])} | same))

    def of_layer(self) -> Qwen3Config:
        """transformers' config of the decoder layers."""
        return self._of_layer("qwen3", attention_bias=self.bias)
