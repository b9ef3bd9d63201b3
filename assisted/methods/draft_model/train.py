"""Distilling a draft: a small model is trained on the target's distribution, over a text and over its own continuations.
DistillSpec, arXiv 2310.08461. A PARD draft is trained to predict several tokens in one forward pass, with a conditional drop of
rows (arXiv 2504.18583). Knows two models with one tokenizer; steps and files are the trainer's."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ... import zoo
from ...engine.parts import find_layers
from ...engine.traits import Traits
from ...loading.gguf import load_model
from ...loading.vocabulary import find_tokenizer, same_tokens
from ..shared.training.losses import Agreement, Loss, agreement, require_known
from ..shared.training.masks import rows_of, seen_by
from ..shared.training.method import Method, require_positive, setting
from .pard import TOKENS

_SHORTEST_PROMPT = 8  # tokens of text that a draft continues


@dataclass(frozen=True)
class DistillSettings:
    """Which draft is trained, and on what."""

    _argument_group_name = "the draft"

    draft: str | None = setting(None, "model to continue from: Hub id, folder or zoo: name")
    layers: int | None = setting(
        None, "without --draft: start from this many of the target's own layers, evenly chosen", metavar="N"
    )
    loss: Loss = setting(
        "kl+tv",
        "divergence from the target's distribution; when sampling, 1 - TV is accepted, but KL learns faster in the beginning",
    )
    on_policy: float = setting(
        0.0,
        "share of the sequences that the draft itself writes, as continuations of beginnings of the text; each costs a "
        "generation by the draft",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.layers is None):
            raise ValueError(
                "draft, layers: give one of them, a model to continue from or a number of the target's layers"
            )
        require_known(self.loss)
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"on_policy: {self.on_policy} is not a share between 0 and 1")


class Distillation(Method):
    """A draft model for a frozen target with the same tokenizer.

    Args:
        target: never changed.
        tokenizer: the target's; saved with the draft.
        settings: which draft is trained, and on what.
        compiled: compile the layers of both models.
        student: the model to continue from, where it is not in a folder; `settings.draft` then only names it.

    Raises ValueError for a draft with another tokenizer.
    """

    name = "distill"
    options = DistillSettings
    student: PreTrainedModel

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: DistillSettings,
        compiled: bool = False,
        student: PreTrainedModel | None = None,
    ):
        super().__init__(settings, target, compiled, taps=())
        self.tokenizer = tokenizer
        if student is not None:
            self.student = student
        elif settings.draft is None:
            self.student = first_draft(target, settings.layers or 1)
        else:
            path = zoo.resolve(settings.draft)
            self.student = load_model(path, "draft", dtype=torch.float32)
            if not same_tokens(target, self.student, tokenizer, find_tokenizer(path)):
                raise ValueError(
                    f"draft: {settings.draft} has another tokenizer than the target, whose distribution it can't learn"
                )
        self.layers = find_layers(self.student).of(self.student)
        if compiled:
            for layer in self.layers:
                layer.compile()

    def mixed(self, ids: Tensor) -> Tensor:
        """A batch of which the draft itself writes its share. [B, T] int64, as `ids`."""
        own = int(torch.binomial(torch.tensor(float(len(ids))), torch.tensor(self.about.on_policy)))
        return torch.cat([self.written(ids[:own]), ids[own:]]) if own else ids

    def loss(self, ids: Tensor, step: int) -> Tensor:
        return self.divergence(*self._logits(self.mixed(ids)))

    @torch.no_grad()
    def written(self, ids: Tensor) -> Tensor:
        """The draft's continuations of beginnings of the texts, all of one random length: [B, T] int64, like `ids`."""
        length = ids.shape[1]
        shortest = min(_SHORTEST_PROMPT, length - 1)
        kept = int(torch.randint(shortest, max(shortest + 1, length // 2), ()))
        self.student.eval()
        with torch.compiler.set_stance("force_eager"):  # each length would be compiled anew
            found = self.student.generate(
                ids[:, :kept],
                attention_mask=torch.ones_like(ids[:, :kept]),
                max_new_tokens=length - kept,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        self.student.train()
        return found

    def acceptance(self, ids: Tensor) -> list[Agreement]:
        return [agreement(*self._logits(ids))]

    def save(self, folder: Path) -> None:
        self.student.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _logits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The target's and the draft's, [B, T, V] each: padded vocabularies are cut to the entries that both have."""
        both = self._features(ids).logits, self.student(input_ids=ids, use_cache=False).logits
        shared = min(logits.shape[-1] for logits in both)
        return both[0][..., :shared], both[1][..., :shared]


@torch.no_grad()
def first_draft(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A float32 model of the target's architecture with `layers` of its layers, evenly chosen, including first and last.

    Raises ValueError where the target has fewer.
    """
    found = find_layers(target)
    count = len(found)
    if not 1 <= layers <= count:
        raise ValueError(f"layers: {layers} is not between 1 and the target's {count}")
    chosen = [round(i * (count - 1) / max(1, layers - 1)) for i in range(layers)]
    config = copy.deepcopy(target.config)
    inner = config.get_text_config(decoder=True)
    inner.num_hidden_layers = layers
    kinds = getattr(inner, "layer_types", None)
    if kinds is not None:
        inner.layer_types = [kinds[layer] for layer in chosen]
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = ".".join(found.path) + "."
    wanted = draft.state_dict()
    for name, tensor in target.state_dict().items():
        if name.startswith(path):
            number, _, rest = name.removeprefix(path).partition(".")
            if int(number) not in chosen:
                continue
            name = f"{path}{chosen.index(int(number))}.{rest}"
        wanted[name].copy_(tensor)
    draft.generation_config = copy.deepcopy(target.generation_config)
    return draft


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
