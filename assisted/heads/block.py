"""Block drafters: DFlash (2602.06036), DSpark (DeepSpec's report) and DFlash2 (z-lab). A few layers draft a block of tokens in
one forward pass; the target's hidden states are their context. Knows one block; nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .base import StateHead
from .eagle_config import LAYER_FIELDS, EagleConfig

Markov = Literal["vanilla", "gated", "rnn"]
FULL, SLIDING = "full_attention", "sliding_attention"
_MARKOVS = ("vanilla", "gated", "rnn")


def block_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """The hidden states that z-lab's drafters of so many layers read, as indices into transformers' `hidden_states`: from the
    second layer to the fourth from the end."""
    spread = (
        [target_layers // 2] if layers == 1 else [1 + j * (target_layers - 4) / (layers - 1) for j in range(layers)]
    )
    return tuple(sorted({min(max(1, round(layer) + 1), target_layers) for layer in spread}))


@dataclass(frozen=True)
class BlockConfig:
    """The sizes of a block drafter, and which parts it has.

    Args:
        hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: of its layers; hidden_size is H.
        vocab_size: V, the target's.
        taps: indices into transformers' `hidden_states` of the target.
        target_hidden_size: Ht; None (default) for H.
        draft_vocab_size: Vd, the number of tokens that it can draft; None (default) for all V.
        num_hidden_layers: decoder layers.
        block_size: rows of a block, the anchor included.
        next_token: each row predicts the token after its position, so that a block drafts `block_size` tokens (DeepSpec). False
            (default): each row but the anchor's predicts the token at its position, one fewer (z-lab).
        mask_token_id: the token whose embedding stands for tokens that are not known; None (default) for `mask_embedding`.
        layer_types: "full_attention" or "sliding_attention" of each layer; None (default) for full attention everywhere.
        sliding_window: sliding layers attend to positions less than this far back.
        causal, sliding_causal: full and sliding layers attend to no later row of the block. False by default.
        hidden_act, rms_norm_eps, max_position_embeddings, rope: of the layers, as in transformers.
        bias: the attention's projections have biases.
        own_embedding, own_output: it has an embedding [V, H] or an output embedding [Vd, H] of its own, not the target's.
        embedding_scale: multiplies the rows of the embedding; None (default) embeds as the target's module does.
        logit_scale, logit_cap: logits become cap * tanh(scale * logits / cap); no cap by default.
        markov: DSpark's correction by the token before: "vanilla", "gated" or "rnn". None (default) has none.
        markov_rank: r.
        confidence: it predicts the acceptance rate of each token. confidence_markov: from the token before, too.
        conv_size, conv_group_size: positions that a local convolution of DFlash2 reads, and channels that share a kernel. 0
            (default) has no convolutions.
        selector_rank, selector_top_k: of DFlash2's candidate selector. 0 (default) has none.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    taps: tuple[int, ...]
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    num_hidden_layers: int = 2
    block_size: int = 8
    next_token: bool = False
    mask_token_id: int | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: int | None = None
    causal: bool = False
    sliding_causal: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e6})
    bias: bool = False
    own_embedding: bool = False
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
        for name, value in (
            ("target_hidden_size", self.hidden_size),
            ("draft_vocab_size", self.vocab_size),
            ("layer_types", (FULL,) * self.num_hidden_layers),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("taps", "layer_types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        reduced = self.draft_vocab_size != self.vocab_size
        for wrong, said in (
            (not self.taps, "taps: name at least one of the target's hidden states"),
            (self.drafts < 1, f"block_size: a block of {self.block_size} drafts nothing"),
            (
                len(self.kinds) != self.num_hidden_layers or not {*self.kinds} <= {FULL, SLIDING},
                f"layer_types: {self.kinds} are not {self.num_hidden_layers} of {FULL} and {SLIDING}",
            ),
            (
                SLIDING in self.kinds and (self.sliding_window or 0) < self.block_size,
                f"sliding_window: {self.sliding_window} is less than the block of {self.block_size}",
            ),
            (
                self.markov not in (None, *_MARKOVS),
                f"markov: {self.markov!r} is not known; one of {', '.join(_MARKOVS)}",
            ),
            ((self.markov is None) != (self.markov_rank == 0), "markov, markov_rank: one without the other"),
            (self.markov == "rnn" and not self.next_token, "markov: 'rnn' is defined for next-token rows only"),
            (self.confidence_markov and self.markov is None, "confidence_markov: there is no Markov head"),
            (self.markov is not None and self.selector_rank > 0, "markov, selector_rank: only one of them"),
            (reduced and self.selector_rank > 0, "selector_rank: a selector needs the whole vocabulary"),
            (reduced and not self.own_output, "own_output: a reduced vocabulary needs an output embedding of its own"),
            (
                self.conv_size > 0 and self.hidden_size % self.conv_group_size > 0,
                "conv_group_size: must divide hidden_size",
            ),
        ):
            if wrong:
                raise ValueError(said)

    @property
    def kinds(self) -> tuple[str, ...]:
        """`layer_types`."""
        return self.layer_types or ()

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
        return Qwen3Config(
            **{name: getattr(self, name) for name in LAYER_FIELDS},
            rope_parameters=dict(self.rope),
            attention_bias=self.bias,
            tie_word_embeddings=False,
        )


class BlockHead(StateHead):
    """Drafts a block of tokens in one forward pass. With T, the position of the last committed token (the anchor):

        c = hidden_norm(fc(taps))                     one state per committed position before T, the same for all layers
        b = E[anchor, mask, mask, ...]                the rows of the block, at T, T + 1, ...
        each layer: queries from b; keys and values from c and from b; all with rotary positions
        logits = output(norm(b))

    A row of the block attends to the whole context and to all rows of the block, later ones included. DSpark and DFlash2 then
    correct the logits of each row by the token that was drafted before (`after`).

    Whole sequences, as in training, are read in the same way: the context goes to a `DynamicCache`, and several blocks follow,
    whose rows are told apart by a mask.

    Args:
        config: its shape.
    """

    config: BlockConfig
    title = "block drafter"

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        width, size = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.shares_output = not config.own_output
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.randn(width) * 0.02)
        layer = config.of_layer()
        self.fc = nn.Linear(len(config.taps) * (config.target_hidden_size or width), width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config, layer, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layer)
        if config.own_output:
            self.lm_head = nn.Linear(width, size, bias=False)
        if config.markov is not None:
            self.markov_head = _Markov(config)
        if config.confidence:
            read = width + config.markov_rank * config.confidence_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1)})
        if config.selector_rank:
            self.candidate_selector = _Selector(config)
        reduced = size != config.vocab_size
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64) if reduced else None)

    def fuse(self, features: Tensor) -> Tensor:
        """The context c, [..., H], of the target's concatenated states, [..., taps * Ht]."""
        return self.hidden_norm(self.fc(features.to(self.device, self.dtype)))

    def remember(self, states: Tensor, position_ids: Tensor, cache: Cache) -> None:
        """Put the keys and values of a context into the cache. states: [B, n, H], from `fuse`. position_ids: [B or 1, n]
        int64."""
        angles = self.rotary_emb(states, position_ids)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.keys(states, angles), index)  # type: ignore[operator]

    def forward(self, embeddings: Tensor, position_ids: Tensor, masks: Mapping[str, Tensor], cache: Cache) -> Tensor:
        """The final states of blocks, [B, n, H]; n is a multiple of `block_size`. Their keys and values are added to the cache.

        embeddings: from `embed_block`. position_ids: [B or 1, n] int64. masks: from `masks`. cache: with the context.
        """
        angles, hidden = self.rotary_emb(embeddings, position_ids), embeddings
        for index, (layer, kind) in enumerate(zip(self.layers, self.config.kinds, strict=True)):
            hidden = layer(hidden, angles, masks[kind], cache, index)
        return self.norm(hidden)

    def masks(self, seen: Tensor, ahead: Tensor) -> dict[str, Tensor]:
        """The attention masks by kind of layer, [B or 1, 1, n, m] bool.

        seen: [B or 1, n or 1, m] bool, the keys that belong to each row's context or block. ahead: [B or 1, n, m] int64, how
        far each key's position lies ahead of the row's.
        """
        config, found = self.config, {}
        for kind in {*config.kinds}:
            mask = seen.expand(-1, ahead.shape[1], -1)
            if config.causal if kind == FULL else config.sliding_causal:
                mask = mask & (ahead <= 0)
            found[kind] = (mask if kind == FULL else mask & (ahead > -(config.sliding_window or 0)))[:, None]
        return found

    def block_ids(self, anchors: Tensor) -> Tensor:
        """The tokens of each anchor's block, [..., 1] int64 -> [..., block_size]."""
        return F.pad(anchors, (0, self.config.block_size - 1), value=self.config.mask_token_id or 0)

    def embed_block(self, ids: Tensor, target: PreTrainedModel) -> Tensor:
        """The rows of blocks, [B, n, H] in its dtype. ids: [B, n] int64, from `block_ids`, one or several blocks in a row."""
        embeddings = self.embed(ids, target)
        if self.config.mask_token_id is None:
            is_anchor = torch.arange(ids.shape[1], device=embeddings.device) % self.config.block_size == 0
            embeddings = embeddings.where(is_anchor[:, None], self.mask_embedding)
        return embeddings

    def embed(self, ids: Tensor, target: PreTrainedModel) -> Tensor:
        """As `StateHead.embed`: ids [...] int64 -> [..., H] in its dtype, scaled as the config says."""
        scale, own = self.config.embedding_scale, target.get_input_embeddings()
        if scale is None or self.config.own_embedding or own.weight.is_meta:
            return super().embed(ids, target)
        rows = F.embedding(ids.to(own.weight.device), own.weight)  # type: ignore[arg-type]
        return rows.to(self.device, self.dtype) * scale

    def logits(self, states: Tensor, target: PreTrainedModel | None = None) -> Tensor:
        """Logits [..., Vd] of final states [..., H], before any correction. target: needed unless it has its own output."""
        logits = self.lm_head(states) if self.config.own_output else super().logits(states, target)
        cap, scale = self.config.logit_cap, self.config.logit_scale
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def after(
        self, tokens: Tensor, states: Tensor, logits: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of drafted positions, corrected by the token before each, [..., Vd]: minus infinity for tokens that the
        selector does not offer. And the memory of the drafted tokens, [..., r], for the next position; None without one.

        tokens: [...] int64, the target's ids. states: [..., H]. logits: [..., Vd], uncorrected. memory: None at the first.
        """
        if self.config.selector_rank:
            return self.candidate_selector(tokens, states, logits), None
        if self.config.markov is None:
            return logits, None
        bias, memory = self.markov_head(tokens, states, memory)
        return logits + bias.to(logits.dtype), memory

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor:
        """The predicted acceptance rate of drafted positions before sigmoid, [...] float32. tokens, states: as for `after`."""
        if self.config.confidence_markov:
            states = torch.cat([states, self.markov_head.markov_w1(tokens)], -1)
        return self.confidence_head["proj"](states)[..., 0].float()


class _Layer(nn.Module):
    """A decoder layer of Qwen3 whose keys and values may come from a context, perhaps with DFlash2's convolutions."""

    def __init__(self, config: BlockConfig, layer: Qwen3Config, index: int):
        super().__init__()
        plain = Qwen3DecoderLayer(layer, index)
        self.self_attn: Any = plain.self_attn
        self.mlp: nn.Module = plain.mlp
        self.input_layernorm: nn.Module = plain.input_layernorm
        self.post_attention_layernorm: nn.Module = plain.post_attention_layernorm
        self.size = config.head_dim
        self.attention_conv = _Convolution(config) if config.conv_size else None
        self.mlp_conv = _Convolution(config) if config.conv_size else None

    def keys(self, states: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, n, D] of states [B, n, H]."""
        part = self.self_attn
        keys = part.k_norm(part.k_proj(states).unflatten(-1, (-1, self.size))).transpose(1, 2)
        return _turned(keys, angles), part.v_proj(states).unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: Cache, index: int) -> Tensor:
        def attention(states: Tensor) -> Tensor:
            part = self.self_attn
            queries = part.q_norm(part.q_proj(states).unflatten(-1, (-1, self.size))).transpose(1, 2)
            keys, values = cache.update(*self.keys(states, angles), index)
            made = F.scaled_dot_product_attention(
                _turned(queries, angles), keys, values, mask, scale=part.scaling, enable_gqa=True
            )
            attended: Tensor = part.o_proj(made.transpose(1, 2).flatten(2))
            return attended

        hidden = hidden + _convolved(self.attention_conv, attention, self.input_layernorm(hidden))
        return hidden + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden))


class _Convolution(nn.Module):
    """DFlash2's kernels over the last few rows of a block: one before a sublayer and one after it, both from its input.

    Starts as the identity, so that a drafter without convolutions is the same.
    """

    def __init__(self, config: BlockConfig):
        super().__init__()
        taps, width, self.group = config.conv_size, config.hidden_size, config.conv_group_size
        self.block = config.block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * width // self.group, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def kernels(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Both kernels at every row, [B, n, taps, H] each. states: [B, n, H]."""
        shape = (*self.base_kernel.shape[:2], -1)
        moved = self.kernel_projection(states).unflatten(-1, shape).repeat_interleave(self.group, -1)
        before, after = (moved + self.base_kernel).unbind(-3)
        return before, after

    def forward(self, states: Tensor, kernel: Tensor) -> Tensor:
        """[B, n, H] -> [B, n, H]. Nothing is read from before a block."""
        blocks, taps = states.unflatten(1, (-1, self.block)), kernel.shape[-2]
        back = [F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block] for tap in range(taps)]
        return (kernel * torch.stack(back, -2).flatten(1, 2)).sum(-2)


class _Markov(nn.Module):
    """DSpark's correction of logits by the token before, of low rank."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.kind, rank, width = config.markov, config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, tokens: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        before = self.markov_w1(tokens)
        if self.kind == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat([states, before], -1))) * before
        elif self.kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            gate, new, before = self.joint_proj(torch.cat([memory, before, states], -1)).chunk(3, -1)
            memory = memory + (1 - torch.sigmoid(gate)) * (torch.tanh(new) - memory)
            before = torch.tanh(before)
        return self.markov_w2(before), memory


class _Selector(nn.Module):
    """DFlash2's choice among the top-k tokens of each row, by how well each follows the token before."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.top_k = min(config.selector_top_k, config.vocab_size)
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(shape) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(shape) * 0.02)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, tokens: Tensor, states: Tensor, logits: Tensor, candidates: Tensor) -> Tensor:
        """[..., k], of candidates [..., k] after the tokens [...]."""
        reads = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        edges = (self.successor_codebook[candidates] * reads[..., None, :]).sum(-1)
        return logits.gather(-1, candidates) + edges.to(logits.dtype)

    def forward(self, tokens: Tensor, states: Tensor, logits: Tensor) -> Tensor:
        candidates = logits.topk(self.top_k, -1).indices
        scores = self.scores(tokens, states, logits, candidates)
        return torch.full_like(logits, float("-inf")).scatter(-1, candidates, scores)


def _convolved(convolution: _Convolution | None, sublayer: Any, states: Tensor) -> Tensor:
    """A sublayer between its two convolutions. states: [B, n, H], its normed input."""
    if convolution is None:
        made: Tensor = sublayer(states)
        return made
    before, after = convolution.kernels(states)
    return convolution(sublayer(convolution(states, before)), after)


def _turned(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [B, heads, n, D]: pairs (i, i + D / 2). angles: cosines and sines, [B or 1, n, D]."""
    cos, sin = (part[:, None] for part in angles)
    one, two = heads.chunk(2, -1)
    return heads * cos + torch.cat([-two, one], -1) * sin
