"""Training block drafters: DFlash (arXiv 2602.06036), DSpark (DeepSpec) and DFlash2. Blocks at random places of a text are
drafted in one forward pass, each from the target's states before its anchor. Knows heads and features; steps and files are the
trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..eagle.config import FULL, SLIDING
from ..shared.training.features import Seen
from ..shared.training.heads import start_norm
from ..shared.training.losses import DIVERGENCES, Agreement, Loss, agreement, log_probabilities, require_known, summed
from ..shared.training.method import Method, require_positive, setting
from .config import BlockConfig
from .formats import save_block
from .head import BlockHead

TOKENS, DISTANCE = 0.1, 0.9  # weights in DSpark's loss: cross-entropy, and the sum of |p - q|


@dataclass(frozen=True)
class BlockSettings:
    """What the block drafter is and how it is trained."""

    _argument_group_name = "the block drafter"

    layers: int = setting(2, "decoder layers", metavar="N")
    block: int = setting(8, "rows of a block, the last committed token's included", metavar="N")
    next_token: bool = setting(
        False, "let each row predict the token after it, as in DeepSpec, so that a block drafts one token more"
    )
    taps: list[int] | None = setting(
        None,
        "the target's hidden states that it reads, as indices into transformers' `hidden_states` (default: as many as layers, "
        "from the third to the third from the end)",
        metavar="N",
    )
    window: int | None = setting(None, "let all layers but the last attend to the last N positions only", metavar="N")
    markov: Literal["none", "vanilla", "gated", "rnn"] = setting(
        "none", "DSpark: correct each token's logits by the token before; rnn needs --next-token"
    )
    rank: int = setting(32, "rank of the Markov head or of the selector", metavar="N")
    confidence: bool = setting(
        True, "DSpark: predict the acceptance rate of each token; drafts can end where it is low"
    )
    selector: bool = setting(False, "DFlash2: local convolutions, and a choice among the best 16 tokens of each row")
    anchors: int = setting(64, "blocks in each sequence of a step", metavar="N")
    gamma: float = setting(4.0, "drafted token i, from 0, has the weight exp(-i / gamma) in the loss")
    loss: Loss = setting("kl+tv", "divergence from the target's distribution; DSpark has its own loss")

    def __post_init__(self) -> None:
        require_positive(self, "layers", "block", "rank", "anchors")
        require_known(self.loss)
        if self.gamma <= 0:
            raise ValueError(f"gamma: {self.gamma} is not positive")


class BlockTraining(Method):
    """A block drafter for a frozen target, with a mask embedding of its own. Embedding and output embedding are the target's.

    Args:
        target: never changed.
        settings: of the drafter.
        seed: of its initial weights.
        compiled: compile the target's layers.
    """

    name = "dflash"
    options = BlockSettings
    rate = 6e-4
    student: BlockHead

    def __init__(self, target: PreTrainedModel, settings: BlockSettings, seed: int = 0, compiled: bool = False):
        fields: dict[str, Any] = {"num_hidden_layers": settings.layers, "block_size": settings.block}
        if settings.taps is not None:
            fields["taps"] = tuple(settings.taps)
        if settings.window is not None:
            kinds = (SLIDING,) * (settings.layers - 1) + (FULL,)
            fields |= {"layer_types": kinds, "sliding_window": settings.window}
        if settings.markov != "none":
            confident = settings.confidence
            fields |= {"markov": settings.markov, "markov_rank": settings.rank}
            fields |= {"confidence": confident, "confidence_markov": confident}
        if settings.selector:
            fields |= {"conv_size": 2, "selector_rank": settings.rank}
        config = BlockConfig.for_target(target, next_token=settings.next_token, **fields)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.student = head = BlockHead(config)
        output = target.get_output_embeddings().weight
        if output.shape[1] == config.hidden_size:
            start_norm(head.norm.weight, output, target)
        if config.markov is not None:
            torch.nn.init.zeros_(head.markov_head.markov_w2.weight)  # at first, no correction
        super().__init__(settings, target, compiled, config.taps)
        self.layers, self.positions = (head.fc, head.layers), range(1, config.drafts + 1)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "taps": list(self.student.config.taps)}

    def loss(self, ids: Tensor, step: int) -> Tensor:
        seen = self._features(ids)
        anchors = torch.randint(1, 1 + self._last(ids), (len(ids), self.about.anchors), device=ids.device)
        states = self._drafted(ids, seen, anchors)
        weights = torch.exp(-torch.arange(states.shape[2], device=ids.device) / self.about.gamma)

        def of_rows(states: Tensor, anchors: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
            return (self._losses(states, anchors, ids, logits) * weights).sum() / (weights.sum() * anchors.shape[1])

        return summed(of_rows, states, anchors, ids, seen.logits) / len(ids)

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        last, seen = self._last(ids), self._features(ids)
        places = torch.linspace(1, last, min(last, self.about.anchors), device=ids.device).long()
        anchors = places.expand(len(ids), -1)
        states = self._drafted(ids, seen, anchors)
        taught, logits = after(seen.logits, anchors, states.shape[2]), self._logits(states, anchors, ids)[0]
        return [agreement(taught[:, :, place], logits[:, :, place]) for place in range(states.shape[2])]

    def save(self, folder: Path) -> None:
        save_block(self.student, folder, self.target)

    def _drafted(self, ids: Tensor, seen: Seen, anchors: Tensor) -> Tensor:
        features = torch.cat([seen.states[tap] for tap in self.student.config.taps], -1)
        return draft_blocks(self.student, self.target, ids, features, anchors)

    def _logits(self, states: Tensor, anchors: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return teacher_forced(self.student, self.target, states, after(ids, anchors, states.shape[2]))

    def _last(self, ids: Tensor) -> int:
        """The last column that can be an anchor: the target's distributions of all its drafted tokens are known."""
        last = ids.shape[1] - self.student.config.drafts
        if last < 1:
            raise ValueError(
                f"context: {ids.shape[1]} tokens are too few for a block of {self.student.config.block_size}"
            )
        return last

    def _losses(self, states: Tensor, anchors: Tensor, ids: Tensor, taught: Tensor) -> Tensor:
        """[B, A, D], of each drafted token. states: [B, A, D, H]. taught: [B, T, V], the target's logits."""
        head, drafts = self.student, states.shape[2]
        log_p = log_probabilities(after(taught, anchors, drafts))
        logits, base = self._logits(states, anchors, ids)
        log_q = F.log_softmax((base if head.config.selector_rank else logits).float(), -1)
        if head.config.markov is None:
            found = DIVERGENCES[self.about.loss](log_p, log_q)
        else:
            distance = DIVERGENCES["tv"](log_p, log_q)
            # the target's own text: its tokens are drawn from p, and p itself is less noisy
            found = TOKENS * DIVERGENCES["kl"](log_p, log_q) + DISTANCE * 2 * distance
            if head.config.confidence:
                sure = head.confidence(after(ids, anchors, drafts), states)
                found = found + F.binary_cross_entropy_with_logits(sure, 1 - distance.detach(), reduction="none")
        if head.config.selector_rank:
            found = found + self._chosen(states, anchors, ids, log_p, base)
        return found

    def _chosen(self, states: Tensor, anchors: Tensor, ids: Tensor, log_p: Tensor, base: Tensor) -> Tensor:
        """DFlash2's cross-entropy of the target's top-1 token among the candidates, which it is put into. [B, A, D]."""
        selector: Any = self.student.candidate_selector
        label = log_p.argmax(-1, keepdim=True)
        candidates = base.topk(selector.top_k, -1).indices
        missing = ~(candidates == label).any(-1, keepdim=True)
        candidates = torch.cat([candidates[..., :-1], candidates[..., -1:].where(~missing, label)], -1)
        scores = selector.scores(after(ids, anchors, states.shape[2]), states, base, candidates)
        place = (candidates == label).int().argmax(-1)
        return F.cross_entropy(scores.float().movedim(-1, 1), place, reduction="none")


def draft_blocks(head: BlockHead, target: PreTrainedModel, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """The final states of blocks, [B, A, D, H], for their D drafted tokens.

    ids: [B, T] int64. features: [B, T, F], the target's states. anchors: [B, A] int64, columns of the text.

    The keys are those of the whole text and of all blocks. A row sees the text before its anchor, and its own block. For
    two blocks of two rows, at the columns 1 and 3 of a text of four:

                 text       blocks
                 0 1 2 3    1 2 3 4
            1    1          1 1
            2    1          1 1
            3    1 1 1          1 1
            4    1 1 1          1 1
    """
    size, states = head.config.block_size, head.fuse(features)
    text = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    rows = (anchors[:, :, None] + torch.arange(size, device=ids.device)).flatten(1)
    block = torch.arange(rows.shape[1], device=ids.device) // size
    before = text[:, None] < anchors.repeat_interleave(size, 1)[:, :, None]
    own = (block == block[:, None]).expand(len(ids), -1, -1)
    masks = head.masks(torch.cat([before, own], 2), torch.cat([text, rows], 1)[:, None] - rows[:, :, None])
    cache = DynamicCache()
    head.remember(states, text, cache)
    embeddings = head.embed_block(head.block_ids(ids.gather(1, anchors)[:, :, None]).flatten(1), target)
    made: Tensor = head(embeddings, rows, masks, cache)
    return made.unflatten(1, (-1, size))[:, :, head.config.first_row :]


def teacher_forced(head: BlockHead, target: PreTrainedModel, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of drafted tokens, [B, A, D, Vd], given the text's tokens before them; and those without a correction.

    states: [B, A, D, H]. tokens: [B, A, D] int64, the one before each.
    """
    base = head.logits(states, target)
    if head.config.markov is None and not head.config.selector_rank:
        return base, base
    corrected, memory = [], None
    for place in range(states.shape[2]):
        logits, memory = head.after(tokens[:, :, place], states[:, :, place], base[:, :, place], memory)
        corrected.append(logits)
    return torch.stack(corrected, 2), base


def after(of_text: Tensor, anchors: Tensor, count: int) -> Tensor:
    """[B, T, ...] -> [B, A, count, ...]: the `count` columns of the text from each anchor on."""
    places = anchors[:, :, None] + torch.arange(count, device=anchors.device)
    return of_text[torch.arange(len(of_text), device=of_text.device)[:, None, None], places]
