"""The interface of every drafting method: a spec (its configuration), a drafter (what it loaded) and a drafting (one call)."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...core.drafts import Draft, Round
from ...core.text import Text
from ...distribution import Distribution
from ...engine.cross import Encoded
from ...engine.needs import NOTHING, Needs
from ...engine.prepared import CallSettings
from ...engine.runner import CachedModel
from ...engine.traits import Traits
from ...lengths.base import DraftLength, Length
from ...loading.files import inside
from .files import Checkpoint, find_folder
from .room import Room

__all__ = ["Call", "Drafter", "Drafting", "HeadSpec", "Room", "Spec", "Target", "require_positive"]

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Target:
    """The target as a spec sees it when it loads a drafter.

    Args:
        model: the target; must not be changed.
        tokenizer: its tokenizer; None if none was found or given.
        path: folder or Hub id that it was loaded from; None for a model created in memory.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    path: str | None = None


@dataclass(frozen=True)
class Call:
    """One `generate` as a drafter sees it.

    Args:
        attention_mask: [B, P] of the prompt; None if there is no padding.
        distribution: how tokens are chosen from logits, without processors that must see committed prefixes only.
        length: decides when to stop drafting.
        limit: maximum number of tokens in a row.
        target: the target as it runs in this call, with the KV of all committed tokens but the last, for drafters that use
            parts of it. A drafter that writes after the committed slots must remove that (`cache.rewind`) before it returns
            or raises.
        settings: how models run in this call, for drafters that capture CUDA graphs (`graphs.Graphs`).
        earlier: of a text that goes on in a session: the drafting of the call before, by the same drafter. This call may take
            over what it has read. A weak reference, because draftings keep their calls.
        shared, forks: how many tokens the two texts begin with; whether the earlier drafting must stay as it is: take a copy.
        states: [B, P', D] each, the prompt's hidden states that the drafter needs (`Drafter.needs`), by index. P' is below P
            if the caller passed past keys and values, or read the prompt in chunks. Valid until the target's next forward
            pass: take what you keep in `Drafter.start`. It may be kept without copying.
        encoded: of an encoder-decoder, what its encoder has read in this call.
    """

    attention_mask: torch.Tensor | None
    distribution: Distribution
    length: Length
    limit: int
    target: CachedModel
    settings: CallSettings = field(default_factory=CallSettings)
    earlier: weakref.ref[Drafting] | None = None
    shared: int = 0
    forks: bool = False
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    encoded: Encoded | None = None

    def before(self, kind: type[_Kind]) -> _Kind | None:
        """The earlier drafting, if there is one and it is of this kind."""
        found = None if self.earlier is None else self.earlier()
        return found if isinstance(found, kind) else None

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target's logits in this call; a target may be resized between calls."""
        return Traits.of(self.target.model).vocabulary


class Drafting:
    """The state of one drafter during one `generate`."""

    def propose(self, text: Text, budget: int) -> Draft:
        """Propose a draft that continues the committed text, on the text's device, at most `budget` (at least 1) tokens deep.

        A tree may have more nodes than that. The context size, max_length and the caller's draft length limit its depth
        only; the cache makes room for further nodes.
        """
        raise NotImplementedError

    def fill(self, text: Text, draft: Draft, budget: int) -> Draft:
        """Continue the chains of another drafter's `draft` to at most `budget` tokens, for the same forward pass of the target.
        Drafters that look up text do that if they find something; otherwise, the same object is returned."""
        return draft

    def parts(self) -> Sequence[Drafting]:
        """The draftings that it combines; empty unless it combines several."""
        return ()

    def observe(self, round: Round) -> None:
        """Learn from a round. Called after every round, even without a draft or with another drafter's."""

    def renew(self, text: Text, row: int, call: Call) -> None:
        """A row has another text, of which the target has read all but the last token; begin with it.

        call: as that of a `generate` for this text alone, whose prompt is all but its last token.
        """
        parts, earlier = self.parts(), call.before(Drafting)
        before = () if earlier is None else earlier.parts()
        for number, part in enumerate(parts):
            one = weakref.ref(before[number]) if len(before) == len(parts) else None
            part.renew(text, row, replace(call, earlier=one))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that a later call can take over (`Call.earlier`); 0 if there is nothing to take over."""
        return sum(part.nbytes for part in self.parts())


class Drafter:
    """A loaded method, shared by all calls. It must not keep state that lets one call change the output of another."""

    model: PreTrainedModel | None = None
    """The draft model, if there is one."""

    needs: Needs = NOTHING
    """What it needs of the target besides its logits: hidden states, or parts. The target of a call serves all its drafters."""

    translates = False
    """Its model has another tokenizer than the target, so that drafts are translated."""

    @property
    def models(self) -> list[PreTrainedModel]:
        """All draft models."""
        return [] if self.model is None else [self.model]

    @property
    def modules(self) -> list[nn.Module]:
        """All draft models and heads. They move to other devices with the target."""
        return list(self.models)

    def start(self, call: Call) -> Drafting:
        """Create the state of one `generate`. Must be cheap: do the work in `propose`, where a failure only costs speed."""
        raise NotImplementedError

    def capture_ahead(self, rows: int, longest: int) -> None:
        """Capture its forward passes before calls need them, for so many rows and texts of up to `longest` tokens."""

    @property
    def sizes_trees(self) -> bool:
        """Whether it drafts trees, and chooses their size by the measured costs."""
        return False

    @property
    def reads_prompt(self) -> bool:
        """Whether it reads the prompt before its first draft of a call, which takes time."""
        return bool(self.modules)

    def start_length(self, policy: DraftLength, earlier: Length | None = None) -> Length:
        """Create the state of a draft length `policy` for one `generate`; combinations hold one for each member.

        earlier: the state after the last similar call, None if there was none.
        """
        length = policy.start(earlier)
        if self.sizes_trees:
            length.drafter_sizes_tree()
        if self.reads_prompt:
            length.drafter_reads_prompt()
        return length


class Spec:
    """The configuration of a method, as the caller writes it: a frozen dataclass, made known by `@register(name)`.

    A saved pair stores its fields, except those with the metadata {"saved": False}. The class variables and `memory` are all
    that planning, benchmarks, serving engines, training and the documentation know of a method.
    """

    name: ClassVar[str]
    """The prefix of its string form, and its name in config.json. A class method `named(rest)`, if there is one, makes the spec
    for `"name:rest"`."""
    title: ClassVar[str] = ""
    """What drafts, in words: "EAGLE head"."""
    trained: ClassVar[bool | None] = False
    """It must be trained for the target. None: depends on the combined methods."""
    trees: ClassVar[bool | None] = False
    """It can propose token trees. None: depends on the combined methods."""
    has_q: ClassVar[bool | None] = False
    """Sampled drafts come with q. None: depends on the combined methods."""
    acceptance: ClassVar[tuple[float, float]] = (0.0, 0.7)
    """The usual share of drafted tokens that are accepted, low and high. Rough: those of copies come from this project's
    measurements of SmolLM2-135M-Instruct in 8 bits, the others are guesses, as acceptance depends on the text. 2211.17192,
    2503.01840 and 2401.10774 measure draft models, EAGLE-3 and Medusa."""
    quantizes: ClassVar[Literal["model", "target"] | None] = None
    """What its field `quantization` applies to: the causal LM of its field `model`, or a copy of the target."""
    sample: ClassVar[str | None] = None
    """The draft string that benchmarks try with any target; None for a method that needs more than the target."""
    served_as: ClassVar[str | None] = None
    """Which method of serving engines it is (`handover.engines`), if any."""
    not_served: ClassVar[str] = ""
    """Why no engine has it, for the message."""
    crosses: ClassVar[bool] = False
    """It can also draft for the decoder of an encoder-decoder, whose cross-attention reads an encoder's output."""
    training: ClassVar[str | None] = None
    """Where its `methods.shared.training.method.Method` is, as "module:class"."""
    stored: ClassVar[tuple[str, str] | None] = None
    """The field whose model or heads a saved pair keeps in a subfolder, and the key of that folder in config.json."""

    def load(self, target: Target, **kwargs: Any) -> Drafter:
        """Load the drafter for this target. Raises ValueError if the two cannot work together."""
        raise NotImplementedError

    def chosen(self, target: Target) -> Spec:
        """The spec to load for this target, which the pair stores: another one if this spec chooses."""
        return self

    def parts(self) -> Sequence[Spec]:
        """The specs that it combines, in order; itself if it combines none."""
        return [self]

    def memory(self, room: Room) -> dict[str, int]:
        """Bytes that it takes beside the target, by part in words. Raises ValueError if the two cannot work together."""
        return {}

    @classmethod
    def reads(cls, fields: dict[str, Any], folder: Path) -> bool:
        """Whether a folder, which a caller passes as draft, holds heads of this method. fields: of its config.json."""
        return False

    @classmethod
    def takes(cls, draft: Any) -> bool:
        """Whether an object that a caller passes as draft is one of this method's, whose spec is then `cls(draft)`."""
        return False

    def written(self, folder: str) -> dict[str, Any]:
        """The entry for config.json. folder: the subfolder of the saved pair that `save` writes to."""
        entry: dict[str, Any] = {"method": self.name}
        for one in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if self.stored is not None and one.name == self.stored[0]:
                entry[self.stored[1]] = folder
            elif one.metadata.get("saved", True):
                entry[one.name] = value.to_dict() if hasattr(value, "to_dict") else value
        return entry

    @classmethod
    def read(cls, fields: dict[str, Any], pair: Path) -> Spec:
        """The spec for what `written` returned. pair: folder of the saved pair. Raises ValueError for unknown fields."""
        if cls.stored is not None:
            own, key = cls.stored
            others = {name: value for name, value in fields.items() if name != key}
            fields = {own: str(inside(pair, fields.get(key, "draft"), f"draft.{key}")), **others}
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown:
            raise ValueError(f"draft: {pair / 'config.json'}: {min(unknown)} is not a field of {cls.__name__}")
        return cls(**fields)

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        """Save the drafter's model or heads, if it has any, where `read` looks for them.

        drafter: that `load` returned. path: the folder. tokenizer: the target's, None if there is none.
        """


def require_positive(spec: Spec, *names: str) -> None:
    """Raise ValueError for the first of these fields that is below 1; None is a default."""
    for name in names:
        value = getattr(spec, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} is not possible; give 1 or more")


class HeadSpec(Spec):
    """A method with trained heads at a path; a saved pair stores them in a subfolder."""

    stored = ("path", "path")

    @classmethod
    def named(cls, rest: str) -> Spec:
        """The spec for `"eagle:DIR"` or `"medusa:DIR"`."""
        if not rest:
            raise ValueError(
                f"draft: {cls.name!r} does not name a checkpoint; write '{cls.name}:DIR' with the folder or Hub id of heads"
            )
        spec: type[Any] = cls
        return spec(rest)

    def memory(self, room: Room) -> dict[str, int]:
        path = getattr(self, "path", None)
        if not isinstance(path, str):
            return {}
        return {self.title: Checkpoint.open(find_folder(path)).numbers * room.dtype.itemsize}

    def save(self, drafter: Any, path: Path, tokenizer: Any) -> None:
        drafter.save(path)
