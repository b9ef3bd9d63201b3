"""Training a draft to predict several tokens in one forward pass: PARD, with its conditional drop of rows (arXiv 2504.18583).
Knows two models with one tokenizer, as distillation does; the loss is a divergence from the target's at every depth."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...engine.traits import Traits
from ..shared.training.losses import Agreement, agreement
from ..shared.training.masks import rows_of, seen_by
from ..shared.training.plan import require_positive, setting
from .pard import TOKENS
from .train import Distillation, DistillSettings


@dataclass(frozen=True)
class PardSettings(DistillSettings):
    """Which draft is trained, and on what."""

    tokens: int = setting(
        TOKENS, "tokens that are drafted in a forward pass; each depth adds rows to every step", metavar="N"
    )
    keep: float = setting(0.7, "depth j has a row at keep**j of the positions: fewer rows are faster", metavar="SHARE")
    keep_least: float = setting(0.2, "smallest share of the positions with a row at any depth", metavar="SHARE")
    mask_token: int | None = setting(
        None,
        "id of the mask token, which texts should not contain; default: an entry of the draft without a token",
        metavar="ID",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "tokens")
        for name in ("keep", "keep_least"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not a share above 0, at most 1")


class PardTraining(Distillation):
    """A draft model for parallel drafting, for a frozen target with the same tokenizer.

    Args:
        target, tokenizer, compiled, student: as for `Distillation`.
        settings: which draft is trained, and on what.

    Raises ValueError also for a draft that takes no 4-D masks, and if no mask token is found.
    """

    name = "pard"
    options = PardSettings
    about: PardSettings

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: PardSettings,
        compiled: bool = False,
        student: PreTrainedModel | None = None,
    ):
        super().__init__(target, tokenizer, settings, compiled, student)
        self.masks = Traits.of(self.student).masks
        if not self.masks.trees:
            raise ValueError(f"draft: {type(self.student).__name__} takes no 4-D masks, which this training needs")
        self.mask = _mask_token(settings.mask_token, Traits.of(self.student).vocabulary, tokenizer)
        self.student.config.update({"spd_type": "pard", "pard_token": self.mask, "pard_tokens": settings.tokens})
        self.positions = range(1, settings.tokens + 1)

    def loss(self, ids: Tensor, step: int) -> Tensor:
        ids = self.mixed(ids)
        anchors, depths = rows_of(ids.shape[1], self.about.tokens, self.about.keep, self.about.keep_least, ids.device)
        return self.divergence(*self.parallel(ids, anchors, depths), anchors + depths)

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        anchors, depths = rows_of(ids.shape[1], self.about.tokens, 1.0, 1.0, ids.device)
        taught, drafted = self.parallel(ids, anchors, depths)
        each = [depths == depth for depth in range(self.about.tokens)]
        return [agreement(taught[:, (anchors + depths)[here]], drafted[:, here]) for here in each]

    def parallel(self, ids: Tensor, anchors: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits over a text, [B, T, V], and the draft's in all rows, [B, N, V].

        ids: [B, T] int64. anchors, depths: [N] int64, see `rows_of`.
        """
        rows = ids[:, anchors].where(depths == 0, self.mask)
        where = (anchors + depths)[None]
        masks = self.masks.dressed(seen_by(anchors, depths)[None], where[:, None], where, self.student.dtype)
        drafted = self.student(input_ids=rows, attention_mask=masks, position_ids=where, use_cache=False).logits
        logits = self._features(ids).logits
        shared = min(logits.shape[-1], drafted.shape[-1])
        return logits[..., :shared], drafted[..., :shared]


def _mask_token(given: int | None, size: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the mask token. size: of the draft's vocabulary."""
    found = given
    if found is None and len(tokenizer) < size:
        found = len(tokenizer)
    if found is None:
        found = getattr(tokenizer, "mask_token_id", None) or getattr(tokenizer, "pad_token_id", None)
    if found is None or not 0 <= found < size:
        raise ValueError(
            f"mask_token: {given} is not a token of the draft, whose vocabulary size is {size}; name one that texts do not "
            "contain"
        )
    return found
