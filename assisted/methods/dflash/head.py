"""Block drafters: DFlash (2602.06036), DSpark (DeepSpec's report) and DFlash2 (z-lab). A few layers draft a block of tokens in
one forward pass; the target's hidden states are their context. Knows one block; nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ..eagle.config import FULL
from ..shared.heads import StateHead
from .config import BlockConfig


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


class _Layer(Qwen3DecoderLayer):
    """A decoder layer of Qwen3 whose keys and values may come from a context, perhaps with DFlash2's convolutions."""

    def __init__(self, config: BlockConfig, layer: Qwen3Config, index: int):
        super().__init__(layer, index)
        self.size = config.head_dim
        if config.sinks:
            self.self_attn.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))
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
            seen = mask
            if (sinks := getattr(part, "attention_sink_bias", None)) is not None:  # each is the logit of a key of zeros
                keys, values = (F.pad(heads, (0, 0, 0, 1)) for heads in (keys, values))
                scores = torch.zeros_like(mask, dtype=queries.dtype).masked_fill(~mask, float("-inf"))
                scores = scores.expand(-1, len(sinks), -1, -1)
                seen = torch.cat([scores, sinks.to(scores)[:, None, None].expand_as(scores[..., :1])], -1)
            made = F.scaled_dot_product_attention(
                _turned(queries, angles), keys, values, seen, scale=part.scaling, enable_gqa=True
            )
            return part.o_proj(made.transpose(1, 2).flatten(2))

        for norm, sublayer, convolution in (
            (self.input_layernorm, attention, self.attention_conv),
            (self.post_attention_layernorm, self.mlp, self.mlp_conv),
        ):
            states = norm(hidden)
            hidden = hidden + (sublayer(states) if convolution is None else convolution(states, sublayer))
        return hidden


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

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer between its two convolutions. states: [B, n, H], its normed input."""
        shape = (*self.base_kernel.shape[:2], -1)
        moved = self.kernel_projection(states).unflatten(-1, shape).repeat_interleave(self.group, -1)
        before, after = (moved + self.base_kernel).unbind(-3)  # [B, n, taps, H] each
        return self._over(sublayer(self._over(states, before)), after)

    def _over(self, states: Tensor, kernel: Tensor) -> Tensor:
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


def _turned(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [B, heads, n, D]: pairs (i, i + D / 2). angles: cosines and sines, [B or 1, n, D]."""
    cos, sin = (part[:, None] for part in angles)
    one, two = heads.chunk(2, -1)
    return heads * cos + torch.cat([-two, one], -1) * sin
