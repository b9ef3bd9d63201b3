"""Block drafters for tiny models: random ones, ones that have learned by heart what a model writes, and their formula.

For the tests of heads and drafters. Knows the head's module and training; nothing of drafting.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from architectures import made_once
from eagle_heads import NEW, features_of, learn, written
from transformers import PreTrainedModel

from assisted.methods.dflash.config import BlockConfig
from assisted.methods.dflash.head import BlockHead
from assisted.methods.dflash.train import after, draft_blocks, teacher_forced
from assisted.methods.eagle.config import SLIDING

__all__ = ["Reference", "random_block", "trained_block"]


def random_block(target: PreTrainedModel, seed: int = 0, **fields: Any) -> BlockHead:
    """A drafter of the target's sizes that was never trained, whose parts all matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = BlockHead(BlockConfig.for_target(target, **({"block_size": 5} | fields))).eval()
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if name.endswith(("codebook", "kernel", "kernel_projection.weight", "mask_embedding", "sink_bias")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                elif name.endswith("norm.weight"):
                    parameter.add_(torch.rand_like(parameter) * 0.5)
    if head.d2t is not None:
        head.draft_tokens = torch.arange(head.config.vocab_size)[-2 * len(head.d2t) + 1 :: 2]
    return head


@made_once
def trained_block(target: PreTrainedModel, steps: int = 40, seed: int = 0, **fields: Any) -> BlockHead:
    """A drafter that has learned by heart what the target writes: most of its drafts there are right."""
    head = random_block(target, seed, **fields)
    ids, lengths = written(target)
    features = features_of(target, head, ids).clone()
    drafts = head.config.drafts
    anchors = (lengths - NEW - 1)[:, None] + torch.arange(NEW + 1 - drafts)  # as in a call, after the prompt
    labels = after(ids, anchors + 1, drafts)
    if head.d2t is not None:
        known = torch.full((head.config.vocab_size,), -100)
        known[head.draft_tokens] = torch.arange(len(head.draft_tokens))
        labels = known[labels]

    def loss_of() -> torch.Tensor:
        states = draft_blocks(head, target, ids, features, anchors)
        logits, base = teacher_forced(head, target, states, after(ids, anchors, drafts))
        loss = torch.zeros(())
        for some in (base, logits) if head.config.selector_rank else (logits,):
            losses = torch.nn.functional.cross_entropy(some.movedim(-1, 1).clamp(min=-50), labels, reduction="none")
            loss = loss + losses[labels >= 0].mean()
        return loss

    learn(target, [p for p in head.parameters() if p.requires_grad], loss_of, steps, lr=5e-3)
    return head


def rms(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + D / 2) of [n, heads, D] by the angle position / 10^(6 * 2i / D)."""
    half = states.shape[-1] // 2
    angles = positions[:, None] / 1e6 ** (torch.arange(half) / half)
    cos, sin, (one, two) = angles.cos()[:, None], angles.sin()[:, None], states.split(half, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Reference:
    """What a block drafter says after a text, by the papers' formulas, from the text alone: no cache, no batch, no padding."""

    def __init__(self, target: Any, head: BlockHead):
        self.target, self.head, self.config = target, head, head.config
        self.w = {name.removesuffix(".weight"): tensor for name, tensor in head.state_dict().items()}
        self.rows = functools.cache(self.rows)  # type: ignore[method-assign]

    @torch.no_grad()
    def rows(self, text: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The final states of the drafted tokens, [D, H], and their logits without a correction."""
        config, w, last = self.config, self.w, len(text) - 1
        features = features_of(self.target, self.head, torch.tensor([text]))[0, :last]
        context = rms(features @ w["fc"].T, w["hidden_norm"])
        embedding = self.target.get_input_embeddings().weight
        mask = w["mask_embedding"] if config.mask_token_id is None else embedding[config.mask_token_id]
        b = torch.stack([embedding[text[-1]], *[mask] * (config.block_size - 1)])
        positions = torch.arange(last + config.block_size)
        for index, kind in enumerate(config.kinds):
            read = functools.partial(self.attention, index, kind, context, positions)
            b = b + self.sublayer(index, "attention_conv", "input_layernorm", b, read)
            b = b + self.sublayer(index, "mlp_conv", "post_attention_layernorm", b, functools.partial(self.mlp, index))
        states = rms(b, w["norm"])[0 if config.next_token else 1 :]
        output = w["lm_head"] if config.own_output else self.target.get_output_embeddings().weight
        return states, states @ output.T

    def sublayer(self, index: int, name: str, norm: str, b: torch.Tensor, run: Any) -> torch.Tensor:
        normed = rms(b, self.w[f"layers.{index}.{norm}"])
        base = self.w.get(f"layers.{index}.{name}.base_kernel")
        if base is None:
            return run(normed)
        moved = (normed @ self.w[f"layers.{index}.{name}.kernel_projection"].T).view(len(b), *base.shape[:2], -1)

        def convolved(side: int, rows: torch.Tensor) -> torch.Tensor:
            found = torch.zeros_like(rows)
            for row in range(len(rows)):
                for tap in range(min(base.shape[1], row + 1)):
                    for channel in range(rows.shape[1]):
                        group = channel // self.config.conv_group_size
                        kernel = base[side, tap, channel] + moved[row, side, tap, group]
                        found[row, channel] += kernel * rows[row - tap, channel]
            return found

        return convolved(1, run(convolved(0, normed)))

    def attention(
        self, index: int, kind: str, context: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        config, w, last = self.config, self.w, len(context)

        def heads(name: str, states: torch.Tensor) -> torch.Tensor:
            return (states @ w[f"layers.{index}.self_attn.{name}_proj"].T).unflatten(-1, (-1, config.head_dim))

        read = torch.cat([context, rows])
        q = turned(rms(heads("q", rows), w[f"layers.{index}.self_attn.q_norm"]), positions[last:])
        k = turned(rms(heads("k", read), w[f"layers.{index}.self_attn.k_norm"]), positions)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), heads("v", read).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        for row in range(len(rows)):
            for key in range(len(read)):
                later = key > last + row and (config.sliding_causal if kind == SLIDING else config.causal)
                far = kind == SLIDING and key <= last + row - (config.sliding_window or 0)
                if later or far:
                    scores[:, row, key] = -torch.inf
        if config.sinks:
            sinks = w[f"layers.{index}.self_attn.attention_sink_bias"][:, None, None].expand(-1, len(rows), 1)
            scores = torch.cat([scores, sinks], -1)
        made = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(read)], v).flatten(1)
        return made @ w[f"layers.{index}.self_attn.o_proj"].T

    def mlp(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.w[f"layers.{index}.mlp.{name}_proj"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T

    @torch.no_grad()
    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """[V], of the token after the committed text and the drafted path."""
        config, w, (states, base) = self.config, self.w, self.rows(tuple(text))
        memory = torch.zeros(config.markov_rank)
        logits = base[len(path)]
        for place, token in enumerate([text[-1], *path]):
            if config.markov is None:
                break
            e, z = w["markov_head.markov_w1"][token], states[place]
            if config.markov == "gated":
                gate = w["markov_head.gate_proj"] @ torch.cat([z, e]) + w["markov_head.gate_proj.bias"]
                e = gate.sigmoid() * e
            if config.markov == "rnn":
                joint = w["markov_head.joint_proj"] @ torch.cat([memory, e, z]) + w["markov_head.joint_proj.bias"]
                gate, new, e = joint.split(config.markov_rank)
                memory, e = gate.sigmoid() * memory + (1 - gate.sigmoid()) * new.tanh(), e.tanh()
            logits = base[place] + w["markov_head.markov_w2"] @ e
        if config.selector_rank:
            before = w["candidate_selector.predecessor_codebook"][[text[-1], *path][-1]]
            read = before * (w["candidate_selector.hidden_projection"] @ states[len(path)])
            best = logits.topk(config.selector_top_k).indices
            edges = w["candidate_selector.successor_codebook"][best] @ read
            logits = torch.full_like(logits, -torch.inf).index_put((best,), logits[best] + edges)
        if self.head.d2t is None:
            return logits
        full = logits.new_full((config.vocab_size,), -torch.inf)
        full[self.head.draft_tokens] = logits
        return full

    def chain(self, text: list[int], count: int) -> list[int]:
        path: list[int] = []
        for _ in range(min(count, self.config.drafts)):
            path.append(int(self.logits(text, path).argmax()))
        return path
