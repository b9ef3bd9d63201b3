"""Training EAGLE heads: EAGLE-1 (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840), from the target's states on the way.

Knows heads and features; steps and files are the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..engine.parts import find_layers
from ..engine.tapped import find_final_norm
from ..heads.eagle import EagleConfig, EagleHead, unrolled_mask
from ..heads.eagle_formats import save_eagle
from .features import Features, Seen
from .losses import DIVERGENCES, Agreement, agreement, divergence, log_probabilities, rows_at_once
from .method import Method

__all__ = ["EagleSettings", "EagleTraining", "frequent_tokens"]

TOKEN_WEIGHT = 0.1  # of the token loss beside the features' in EAGLE-1


@dataclass(frozen=True)
class EagleSettings:
    """What the head is and what it learns.

    Args:
        version: 3, or 1 (also for EAGLE-2, which drafts otherwise).
        taps: the target's states that EAGLE-3 reads, as indices into transformers' `hidden_states`; None for 2, L // 2, L - 3.
        layers: decoder layers of the head.
        unroll: EAGLE-3: steps of the training-time test, in which the head reads its own states. As many as are drafted;
            each costs as much as the first. EAGLE-1 has one.
        decay: weight of unrolled step i is decay**i.
        loss: EAGLE-3: divergence from the target's distribution: "kl", "reverse-kl", "tv" or "kl+tv".
        norms: EAGLE-3: norms the features of each tap, and begins the residual with normed states: a target's states are large
            (the shipped one's 60 to 120 in the root mean square), and larger the deeper. False is the paper's head.
        draft_vocab: EAGLE-3: the head proposes only so many tokens, the most frequent of the text; None for all. Saves time
            where the vocabulary is large.
        noise: EAGLE-1: features are moved by up to so much, so that the head bears its own errors.
        positions: how many drafted tokens held-out acceptance is measured for.
        format: of the files, "eagle" or "speculators".
    """

    version: int = 3
    taps: tuple[int, ...] | None = None
    layers: int = 1
    unroll: int = 7
    decay: float = 0.8
    loss: str = "kl"
    norms: bool = True
    draft_vocab: int | None = None
    noise: float = 0.1
    positions: int = 5
    format: Literal["eagle", "speculators"] = "eagle"

    def __post_init__(self) -> None:
        for name in ("layers", "unroll", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")
        if self.loss not in DIVERGENCES:
            raise ValueError(f"loss: {self.loss!r} is not known; one of {', '.join(DIVERGENCES)}")
        if self.version == 1 and self.draft_vocab is not None:
            raise ValueError("draft_vocab: an EAGLE-1 head says tokens through the target's output, all of them")


def frequent_tokens(stream: np.ndarray, count: int, vocabulary: int) -> Tensor:
    """The `count` most frequent tokens of a stream, ascending; of equally frequent ones the first. [count] int64."""
    if not 1 <= count <= vocabulary:
        raise ValueError(f"draft_vocab: {count} is not between 1 and the target's {vocabulary} tokens")
    counts = np.bincount(stream, minlength=vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


class EagleTraining(Method):
    """An EAGLE head for a frozen target.

    Args:
        target: never changed.
        settings: of the head.
        stream: the training text, [N]; only a reduced vocabulary needs it.
        seed: of the head's first weights.
        compiled: compile the target's layers and the head's.
    """

    name = "eagle"
    student: EagleHead

    def __init__(
        self,
        target: PreTrainedModel,
        settings: EagleSettings,
        stream: np.ndarray | None = None,
        seed: int = 0,
        compiled: bool = False,
    ):
        self.about = settings
        self.target = target
        self.compiled = compiled
        fields: dict[str, Any] = {"num_hidden_layers": settings.layers}
        if settings.version == 3:
            fields |= {"fc_norm": settings.norms, "norm_before_residual": settings.norms}
        if settings.taps is not None:
            fields["taps"] = settings.taps
        if settings.draft_vocab is not None:
            fields["draft_vocab_size"] = settings.draft_vocab
        config = EagleConfig.for_target(target, settings.version, **fields)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = EagleHead(config)
        self._tokens: Tensor | None = None
        if settings.draft_vocab is not None:
            if stream is None:
                raise ValueError("stream: a reduced vocabulary is chosen by it, and none was given")
            self._tokens = frequent_tokens(stream, settings.draft_vocab, config.vocab_size)
            head.draft_tokens = self._tokens
        self._start(head, target)
        self.student = head
        self.frozen = (target,)
        self.vocabulary = target.config.get_text_config(decoder=True).vocab_size
        self.places = range(1, settings.positions + 1)
        self._features = Features(target, config.taps, compiled)
        if compiled:
            for layer in head.layers:
                attention: Any = layer.self_attn
                attention.config._attn_implementation = "eager"  # its backward, compiled, is the faster one
                layer.compile()

    def settings(self) -> dict[str, Any]:
        return {**asdict(self.about), "taps": list(self.student.config.taps)}

    def loss(self, ids: Tensor, step: int) -> Tensor:
        seen = self._features(ids)
        if self.about.version == 1:
            return self._feature_loss(ids, seen)
        weights = [self.about.decay**place for place in range(self.about.unroll)]
        columns = ids.shape[1] - self.about.unroll
        log_p, counts = self._taught(seen.logits)
        total = torch.zeros((), device=ids.device)
        for step_ahead, states in enumerate(self._unrolled(ids, seen, self.about.unroll), 1):
            there = slice(step_ahead, step_ahead + columns)
            apart = self._token_loss(log_p[:, there], counts[:, there], states)
            total = total + weights[step_ahead - 1] * apart
        return total / sum(weights)

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        head, steps = self.student, self.about.positions
        seen = self._features(ids)
        columns = ids.shape[1] - steps
        found = []
        for ahead, states in enumerate(self._unrolled(ids, seen, steps), 1):
            drafted = head.over_all(head.logits(states, self.target))
            found.append(agreement(seen.logits[:, ahead : ahead + columns], drafted))
        return found

    def matrices(self) -> list[nn.Parameter]:
        return [p for module in (self.student.fc, self.student.layers) for p in module.parameters() if p.ndim == 2]

    def save(self, folder: Path) -> None:
        save_eagle(self.student, folder, self.about.format, self.target)

    def _unrolled(self, ids: Tensor, seen: Seen, steps: int) -> Iterator[Tensor]:
        """The head's states for each drafted position in turn, [B, T - steps, H]: column i of the first says token i + 2.

        At every place of the text a draft begins; it is fed the tokens of the text and, from the second on, its own states.
        """
        head = self.student
        columns = ids.shape[1] - steps
        if columns < 1:
            raise ValueError(f"context: {ids.shape[1]} tokens are too few to unroll {steps} steps")
        places = torch.arange(columns, device=ids.device)[None]
        states = head.fuse(self._inputs(seen)[:, :columns])
        embeddings = head.embed(ids[:, 1:], self.target)  # column i is token i + 1
        cache = DynamicCache()
        for step in range(steps):
            mask = _mask(columns, step, embeddings)
            states = head(embeddings[:, step : step + columns], states, places + step, mask, cache)
            yield states

    def _inputs(self, seen: Seen) -> Tensor:
        return torch.cat([seen.states[tap] for tap in self.student.config.taps], -1)

    def _taught(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distribution over the head's vocabulary, [B, T, Vd], and where it counts: where the target's
        own choice is in that vocabulary, [B, T]."""
        if self._tokens is None:
            return log_probabilities(logits), torch.ones(logits.shape[:-1], device=logits.device)
        tokens = self._tokens.to(logits.device)
        return log_probabilities(logits[..., tokens]), torch.isin(logits.argmax(-1), tokens).float()

    def _token_loss(self, log_p: Tensor, counts: Tensor, states: Tensor) -> Tensor:
        """log_p: [B, n, Vd], counts: [B, n], states: [B, n, H]. Returns a scalar."""
        total = torch.zeros((), device=states.device)
        slices = (tensor.split(rows_at_once(states)) for tensor in (log_p, counts, states))
        for taught, weights, some in zip(*slices, strict=True):
            said = self.student.logits(some, self.target)
            apart = divergence(self.about.loss, taught, said, weights, self.compiled)
            total = total + apart * weights.sum()
        return total / counts.sum().clamp(min=1)

    def _feature_loss(self, ids: Tensor, seen: Seen) -> Tensor:
        """EAGLE-1: feature i and token i + 1 give feature i + 1, which gives token i + 2."""
        features = self._inputs(seen)
        moved = features + self.about.noise * (2 * torch.rand_like(features) - 1)
        embeddings = self.student.embed(ids[:, 1:], self.target)
        mask = _mask(embeddings.shape[1], 0, embeddings)
        states = self.student(embeddings, self.student.fuse(moved[:, :-1]), attention_mask=mask)
        near = F.smooth_l1_loss(states.float(), features[:, 1:].float())
        log_p, counts = self._taught(seen.logits[:, 1:])
        return near + TOKEN_WEIGHT * self._token_loss(log_p, counts, states)

    @torch.no_grad()
    def _start(self, head: EagleHead, target: PreTrainedModel) -> None:
        """EAGLE-3 has a norm and an output of its own, which begin as the target's where they fit."""
        output = target.get_output_embeddings().weight
        if head.config.version == 1 or output.shape[1] != head.config.hidden_size:
            return
        head.lm_head.weight.copy_(output if self._tokens is None else output[self._tokens.to(output.device)])
        norm = target.get_submodule(".".join(find_final_norm(target, find_layers(target))))
        scale = norm(torch.ones(1, 1, head.config.hidden_size, dtype=output.dtype, device=output.device))[0, 0]
        if bool((scale > 0).all()):  # an RMS norm, whichever way it keeps its weight
            head.norm.weight.copy_(scale)


def _mask(columns: int, step: int, like: Tensor) -> Tensor:
    """`unrolled_mask` as numbers to add, which every kind of attention takes: [1, 1, n, (step + 1) * n]."""
    seen = unrolled_mask(columns, step, like.device)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, float("-inf"))
