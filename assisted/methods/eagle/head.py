"""EAGLE heads: one decoder layer of transformers that continues from the target's hidden states (2401.15077, 2503.01840), for
training over whole sequences, and for drafting with slots of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ...engine.libraries import CACHE
from ..shared.heads import Head
from ..shared.training.masks import unrolled_mask  # noqa: F401  (an old name of it)
from .config import FULL, SLIDING, EagleConfig

_LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


class EagleHead(Head):
    """Predicts the token after next from a feature of the target and the next token's embedding, then from its own states.

    Feature i and token i + 1 give the prediction of token i + 2. Training over whole sequences, including the training-time
    test of 2503.01840, in which the head reads its own states:

        states = head.fuse(features)                        # [B, n, H]: column i of the target's states
        embeddings = head.embed(ids[:, 1:], target)         # [B, n, H]: column i is token i + 1
        cache = DynamicCache()
        for step in range(steps):
            states = head(embeddings, states, position_ids + step, unrolled_mask(n, step), cache)
            logits = head.logits(states)                    # column i predicts token i + 2 + step
            embeddings = embeddings shifted by one column   # column i is token i + 2 + step
        (a single step needs no mask or cache: head(embeddings, states))

    Args:
        config: its shape.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        self.title, self.shares_output = f"EAGLE-{config.version} head", config.version == 1
        width, layer = config.hidden_size, config.of_layer()
        taps, target_width = len(config.taps), config.target_hidden_size or width
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        fused = 2 * width if config.version == 1 else taps * target_width
        self.fc = nn.Linear(fused, width, bias=bool(config.fc_bias))
        layers = [_LAYERS[config.layer](layer, index) for index in range(config.num_hidden_layers)]
        for attention in (plain.self_attn for plain in layers if config.o_bias != config.qkv_bias):
            output = attention.o_proj
            attention.o_proj = nn.Linear(output.in_features, output.out_features, bias=config.o_bias)
        self.layers = nn.ModuleList(layers)
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        self.needs_mask = config.slides
        if config.version == 1:
            layers[0].input_layernorm = nn.Identity()
        else:
            self.layers[0] = _FusedLayer(layers[0], config)
            if config.norm_before_fc:
                self.input_norm = LlamaRMSNorm(fused, eps=config.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(target_width, eps=config.rms_norm_eps) for _ in range(taps))
            if config.mask_token_id is not None:
                self.mask_hidden = nn.Parameter(torch.zeros(1, 1, fused))  # stands for the features of unknown tokens
            self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
            self.lm_head = nn.Linear(width, config.draft_vocab_size or config.vocab_size, bias=False)
        reduced = config.draft_vocab_size != config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size or 0, dtype=torch.int64) if reduced else None)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The head's input states, [..., H], from the target's hidden states.

        features: for EAGLE-1, [..., H], the states after the final norm, used unchanged. For EAGLE-3, [..., taps * Ht], the
        concatenated tapped states.
        """
        features = features.to(self.device, self.dtype)
        if self.config.version == 1:
            return features
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def forward(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """As `Head`. last_only needs layers that support it (`fused_head`)."""
        if position_ids is None:
            position_ids = torch.arange(states.shape[1], device=states.device)[None]
        kwargs = {"position_embeddings": self.rotary_emb(states, position_ids), CACHE: cache}
        kwargs |= {"last_only": True} if last_only else {}
        masks = {FULL: attention_mask}
        if self.config.slides:
            masks[SLIDING] = windowed(attention_mask, states.shape[1], self.config.sliding_window or 1, states.device)
        hidden = (self.fc(torch.cat([embeddings, states], -1)),) if self.config.version == 1 else (embeddings, states)
        for layer, kind in zip(self.layers, self.config.kinds, strict=True):
            hidden = (layer(*hidden, attention_mask=masks[kind], **kwargs),)
        return self.norm(*hidden) if self.config.norm_output else hidden[0]

    def logits(self, states: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Logits [..., Vd] over the draft vocabulary, from the states [..., H] that a step returned.

        target: needed for EAGLE-1, whose output embedding is the target's. Raises ValueError without it.
        """
        if self.config.version == 3:
            return self.lm_head(states if self.config.norm_output else self.norm(states))
        return super().logits(states, target)


class _FusedLayer(nn.Module):
    """EAGLE-3's first layer, built from a decoder layer's parts. Its attention reads embedding and state, concatenated."""

    def __init__(self, layer: Any, config: EagleConfig):
        super().__init__()
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, size, bias=config.qkv_bias))
        self.mlp: nn.Module = layer.mlp
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm: nn.Module = layer.input_layernorm
        self.post_attention_layernorm: nn.Module = layer.post_attention_layernorm
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embeddings: torch.Tensor, states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        attended, _ = self.self_attn(torch.cat([self.input_layernorm(embeddings), normed], -1), **kwargs)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def windowed(seen: torch.Tensor | None, columns: int, window: int, device: torch.device | str) -> torch.Tensor:
    """The mask of a sliding window, [B or 1, 1, n, m] bool: of the slots that a column attends to without a window, the last
    `window`. These are one path of tokens in their order, also in a token tree. seen: that mask; None is causal."""
    if seen is None:
        seen = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()[None, None]
    return seen & (seen.flip(-1).cumsum(-1).flip(-1) <= window)
