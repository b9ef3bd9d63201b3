"""Training EAGLE heads on the target's hidden states: EAGLE-1 (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840) and P-EAGLE (arXiv
2602.01469). Knows heads and features; steps and files are the trainer's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...engine.libraries import set_attention
from ...engine.traits import Traits
from ..shared.training.features import Seen
from ..shared.training.heads import HeadTraining, causal_mask, start_norm
from ..shared.training.losses import Agreement, Loss, agreement, log_probabilities, require_known
from ..shared.training.masks import rows_of, seen_by
from ..shared.training.method import require_positive, setting
from .formats import save_eagle
from .head import EagleConfig, EagleHead

LARGE, REDUCED = 65_536, 32_768  # a vocabulary, and how many of a larger one's tokens a head proposes
KEEP, LEAST = 0.7, 0.2  # P-EAGLE: depth j has a row at KEEP**j of the positions, but at the share LEAST or more
TOKEN_WEIGHT = 0.1  # of the token loss in EAGLE-1, relative to that of the features


@dataclass(frozen=True)
class EagleSettings:
    """What the head is and how it is trained."""

    _argument_group_name = "the head"

    version: Literal[1, 3] = setting(3, "EAGLE-3, or EAGLE-1, whose heads EAGLE-2 also drafts with")
    taps: list[int] | None = setting(
        None,
        "EAGLE-3: the target's hidden states that the head reads, as indices into transformers' `hidden_states` (default: 2, "
        "L // 2, L - 3)",
        metavar="N",
    )
    layers: int = setting(1, "decoder layers of the head", metavar="N")
    unroll: int = setting(
        7,
        "EAGLE-3: steps in which the head reads its own states in training, best as many as will be drafted; each costs as "
        "much as the first",
        metavar="N",
    )
    decay: float = setting(0.8, "unrolled step i has the weight decay**i in the loss")
    loss: Loss = setting("kl", "EAGLE-3: divergence from the target's distribution")
    norms: bool = setting(
        True,
        "EAGLE-3: normalize each tap's features and the start of the residual stream, because a target's states are large "
        "and grow with depth; the head of the paper does not",
    )
    draft_vocab: int | None = setting(
        None,
        "EAGLE-3: propose only the N most frequent tokens of the text, which saves time where the vocabulary is large "
        "(default: all of up to 65,536 tokens, 32,768 of more)",
        metavar="N",
    )
    noise: float = setting(0.1, "EAGLE-1: largest noise added to features, so that the head tolerates its own errors")
    positions: int = setting(5, "drafted positions at which held-out acceptance is measured", metavar="N")
    parallel: int | None = setting(
        None, "P-EAGLE: draft this many tokens in one forward pass, by masks, instead of step by step", metavar="N"
    )
    format: Literal["eagle", "speculators"] = setting("eagle", "format of the files")

    def __post_init__(self) -> None:
        require_positive(self, "layers", "unroll", "positions")
        require_known(self.loss)
        require_positive(self, *(["parallel"] if self.parallel is not None else []))
        if self.version == 1 and self.parallel is not None:
            raise ValueError("parallel: an EAGLE-1 head drafts step by step; train version 3")
        if self.version == 1 and self.draft_vocab is not None:
            raise ValueError("draft_vocab: an EAGLE-1 head has the target's output layer, with all its tokens")


def frequent_tokens(stream: np.ndarray, count: int, vocabulary: int) -> Tensor:
    """The `count` most frequent tokens of a stream, ascending; ties go to the lower id. [count] int64."""
    if not 1 <= count <= vocabulary:
        raise ValueError(f"draft_vocab: {count} is not between 1 and the target's {vocabulary} tokens")
    counts = np.bincount(stream, minlength=vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


class EagleTraining(HeadTraining):
    """An EAGLE head for a frozen target.

    Args:
        target: never changed.
        settings: of the head.
        stream: the training text, [N], from which a reduced vocabulary is chosen; without it, none is reduced by default.
        seed: of the head's initial weights.
        compiled: compile the target's layers and the head's.
    """

    name = "eagle"
    options = EagleSettings
    student: EagleHead

    def __init__(
        self,
        target: PreTrainedModel,
        settings: EagleSettings,
        stream: np.ndarray | None = None,
        seed: int = 0,
        compiled: bool = False,
    ):
        size = Traits.of(target).vocabulary
        if settings.version == 3 and settings.draft_vocab is None and size > LARGE and stream is not None:
            settings = replace(settings, draft_vocab=REDUCED)
        reduced = settings.draft_vocab if settings.draft_vocab != size else None
        fields: dict[str, Any] = {"num_hidden_layers": settings.layers}
        if settings.version == 3:
            fields |= {"fc_norm": settings.norms, "norm_before_residual": settings.norms}
        if settings.parallel is not None:  # `mask_hidden` tells masks from text, so that any token can be the mask
            fields |= {"mask_token_id": size - 1, "parallel_tokens": settings.parallel}
        if settings.taps is not None:
            fields["taps"] = tuple(settings.taps)
        if reduced is not None:
            fields["draft_vocab_size"] = reduced
        config = EagleConfig.for_target(target, settings.version, **fields)
        super().__init__(settings, target, config.taps, compiled)
        self.positions = range(1, (settings.parallel or settings.positions) + 1)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = EagleHead(config)
        self._tokens: Tensor | None = None
        if reduced is not None:
            if stream is None:
                raise ValueError("stream: a reduced vocabulary is chosen from the training text, and none was given")
            self._tokens = frequent_tokens(stream, reduced, config.vocab_size)
            head.draft_tokens = self._tokens
        self._start(head, target)
        self.student, self.layers = head, (head.fc, head.layers)
        if compiled:
            for layer in head.layers:
                attention: Any = layer.self_attn
                set_attention(attention.config, "eager")  # its backward, compiled, is the faster one
                layer.compile()

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "taps": list(self.student.config.taps)}

    def loss(self, ids: Tensor, step: int) -> Tensor:
        if self.about.parallel is None:
            return self._feature_loss(ids, self._features(ids)) if self.about.version == 1 else super().loss(ids, step)
        anchors, depths = rows_of(ids.shape[1] - 1, self.about.parallel, KEEP, LEAST, ids.device)
        logits, states = self.parallel(ids, anchors, depths)
        log_p, counts = self._taught(logits)
        there = anchors + depths + 1
        return self._token_loss(log_p[:, there], counts[:, there], states)

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        if self.about.parallel is None:
            return super().acceptance(ids)
        anchors, depths = rows_of(ids.shape[1] - 1, self.about.parallel, 1.0, 1.0, ids.device)
        logits, states = self.parallel(ids, anchors, depths)
        found = []
        for here in (depths == depth for depth in range(self.about.parallel)):
            drafted = self.student.logits(states[:, here], self.target)
            found.append(agreement(logits[:, (anchors + depths + 1)[here]], self.student.over_all(drafted)))
        return found

    def save(self, folder: Path) -> None:
        save_eagle(self.student, folder, self.about.format, self.target)

    def parallel(self, ids: Tensor, anchors: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
        """P-EAGLE (2602.01469): masks after some of the text's columns, as in PARD's training.

        ids: [B, T] int64. anchors, depths: [N] int64, see `rows_of`. Returns the target's logits over the text, [B, T, V],
        and the head's states, [B, N, H]. Row i predicts token anchors[i] + depths[i] + 2.
        """
        head, seen = self.student, self._features(ids)
        is_text = depths == 0
        features = self._inputs(seen)[:, anchors].where(is_text[:, None], head.mask_hidden)
        read = ids[:, 1:][:, anchors].where(is_text, head.config.mask_token_id or 0)
        hidden = torch.zeros(len(anchors), len(anchors), device=ids.device)
        mask = hidden.masked_fill(~seen_by(anchors, depths), float("-inf"))[None, None]
        return seen.logits, head(head.embed(read, self.target), head.fuse(features), (anchors + depths)[None], mask)

    def _taught(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._tokens is None:
            return super()._taught(logits)
        own = logits[..., self._tokens.to(logits.device)]
        # the largest logits are compared because argmax is slow on a CPU
        return log_probabilities(own), (own.amax(-1) == logits.amax(-1)).float()

    def _feature_loss(self, ids: Tensor, seen: Seen) -> Tensor:
        """EAGLE-1: feature i and token i + 1 predict feature i + 1, which predicts token i + 2."""
        features = self._inputs(seen)
        moved = features + self.about.noise * (2 * torch.rand_like(features) - 1)
        embeddings = self.student.embed(ids[:, 1:], self.target)
        mask = causal_mask(embeddings.shape[1], 0, embeddings)
        states = self.student(embeddings, self.student.fuse(moved[:, :-1]), attention_mask=mask)
        near = F.smooth_l1_loss(states.float(), features[:, 1:].float())
        log_p, counts = self._taught(seen.logits[:, 1:])
        return near + TOKEN_WEIGHT * self._token_loss(log_p, counts, states)

    @torch.no_grad()
    def _start(self, head: EagleHead, target: PreTrainedModel) -> None:
        """Initialize the norm and output layer of an EAGLE-3 head from the target's, where they fit."""
        output = target.get_output_embeddings().weight
        if head.config.version == 1 or output.shape[1] != head.config.hidden_size:
            return
        head.lm_head.weight.copy_(output if self._tokens is None else output[self._tokens.to(output.device)])
        start_norm(head.norm.weight, head.lm_head.weight, target)
