"""Many prompts through a batch with a fixed number of rows: a row whose text has ended gets the next prompt, the others go on.

transformers prepares processors and criteria with the first prompt; the rounds are those of `decoding`. Knows drafters by their
interface. A new prompt is read into the slots of its row alone, all but its last token, which the next round reads.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..calls.admission import why_plain
from ..calls.assembly import assemble, running
from ..calls.inputs import LoopInputs
from ..core.host import now
from ..core.text import Text
from ..decoding import decode
from ..distribution import Distribution, needs_prompt
from ..engine.libraries import pad_token
from ..engine.prepared import CallSettings
from ..engine.session import renew
from ..engine.traits import Traits, change_of
from ..engine.verifiable import masks_of
from ..generation import Generation
from ..methods import Drafting

_NOT_HERE = {  # arguments of `generate` that belong to a single batch
    "attention_mask": "prompts have no padding here",
    "custom_generate": "leave it out",
    "input_ids": "give the prompts as the first argument",
    "inputs": "give the prompts as the first argument",
    "inputs_embeds": "give token ids",
    "lossy_typical": "leave it out",
    "num_return_sequences": "give the prompt as often",
    "past_key_values": "leave it out",
    "position_ids": "leave it out",
    "return_dict_in_generate": "leave it out",
    "sessions": "leave it out",
    "streamer": "answers come as they end",
}
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


@dataclass(frozen=True)
class Answer:
    """One answer.

    Args:
        index: of the prompt, from 0.
        ids: [L] int64, the prompt and the new tokens.
        prompt_tokens: how many of them are the prompt.
    """

    index: int
    ids: torch.Tensor
    prompt_tokens: int

    @property
    def new_tokens(self) -> torch.Tensor:
        """The new tokens, [n] int64."""
        return self.ids[self.prompt_tokens :]


class Rows(Text):
    """Rows that end one by one, and get other texts. It is `done` as soon as a row has ended whose text was not taken."""

    def __init__(self, rows: int, criteria: Any, pad: int | None, device: torch.device):
        super().__init__(torch.zeros(rows, 0, dtype=torch.int64, device=device), criteria, pad, None)
        self.lengths = [1] * rows  # a row without a text has a token, too, for passes over all rows
        self.ended = [True] * rows
        self.limits = [0] * rows
        self.prompts_of: dict[int, tuple[int, int]] = {}  # by row: index and length of its prompt

    @property
    def done(self) -> bool:
        return any(self.ended[row] for row in self.prompts_of) or not self.prompts_of

    @property
    def in_lockstep(self) -> bool:
        return False

    def begin(self, row: int, index: int, prompt: torch.Tensor, limit: int) -> None:
        """Give a row a text. prompt: [P] int64. limit: of its tokens, the prompt included."""
        width = len(prompt)
        self._make_room(width + 1)
        self.ids[row, :width] = prompt
        self._latest[row] = []
        self.lengths[row], self.limits[row], self.row_tokens[row] = width, limit, 0
        self.ended[row], self.prompts_of[row] = False, (index, width)

    def take(self) -> Iterator[tuple[int, Answer]]:
        """The rows whose texts have ended, and their answers."""
        for row in [row for row in self.prompts_of if self.ended[row]]:
            index, width = self.prompts_of.pop(row)
            yield row, Answer(index, self.ids[row, : self.lengths[row]].clone(), width)

    def _extend_row(self, row: int, new: list[int], scores: Any, logits: Any) -> int:
        count = super()._extend_row(row, new[: self.limits[row] - self.lengths[row]], scores, logits)
        self.ended[row] |= self.lengths[row] >= self.limits[row]
        return count


class Preparation(Generation):
    """What transformers prepares for a call, instead of its output."""

    def _loop(self, inputs: LoopInputs) -> Any:
        if inputs.config.get_generation_mode() not in ("greedy_search", "sample"):
            raise ValueError("num_beams: generate_many is greedy or samples; call generate for other modes")
        return inputs


def generate_many(
    preparation: Preparation, prompts: Iterable[Any], rows: int, kwargs: dict[str, Any]
) -> Iterator[Answer]:
    """See `AssistedModelForCausalLM.generate_many`. kwargs: of `generate`."""
    for name, instead in _NOT_HERE.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: generate_many does not take it; {instead}, or call generate")
    if rows < 1:
        raise ValueError(f"rows: {rows} rows hold no text; give 1 or more")
    device = preparation.pair.device
    waiting = (_ids(prompt, number).to(device) for number, prompt in enumerate(prompts))
    first = next(waiting, None)
    if first is None:
        return iter(())
    mask = torch.ones_like(first[None])
    inputs = preparation.run(first[None], kwargs.pop("generation_config", None), kwargs | {"attention_mask": mask})
    run = _Run(preparation, inputs, rows)
    return run.answers(enumerate(itertools.chain([first], waiting)))


class _Run:
    """The state of one `generate_many`."""

    def __init__(self, generation: Generation, inputs: LoopInputs, rows: int):
        pair, settings, config = generation.pair, generation.settings, inputs.config
        _require_possible(inputs, pair, settings)
        self.recorder, self.drafter = generation.recorder, pair.drafter
        self.new, self.most = config.max_new_tokens, config.max_length
        # each row has a limit of its own
        criteria = StoppingCriteriaList([one for one in inputs.criteria if type(one) is not MaxLengthCriteria])
        criteria.append(MaxLengthCriteria(sys.maxsize))
        self.text = text = Rows(rows, criteria, pad_token(config), inputs.ids.device)
        distribution = Distribution(inputs.processors, config.do_sample)
        length = generation.start_length(rows, distribution.do_sample)
        of_rows = replace(inputs, ids=text.ids, kwargs={inputs.cache_name: inputs.cache})
        self.call = call = assemble(pair, of_rows, settings, text, distribution, length)
        call.target.cache.begin_rounds()
        self.drafting = call.drafting()
        _require_renewal(call.own, type(pair.spec).__name__)

    def answers(self, prompts: Iterator[tuple[int, torch.Tensor]]) -> Iterator[Answer]:
        """The answers in the order in which they end."""
        call, text, free = self.call, self.text, list(range(self.text.rows))
        self.recorder.row_tokens, self.recorder.warnings = [], call.settings.warnings
        while True:
            with running(call.inputs.model, self.drafter):
                for row in list(free):
                    if (found := next(prompts, None)) is not None:
                        self._begin(row, *found)
                        free.remove(row)
                decode(call.target, self.drafting, text, call.distribution, call.length, None, self.recorder)
                ended = list(text.take())
            if not ended:
                return
            free += [row for row, _ in ended]
            self.recorder.row_tokens += [text.row_tokens[row] for row, _ in ended]
            for _, answer in ended:
                yield answer

    def _begin(self, row: int, index: int, prompt: torch.Tensor) -> None:
        width, target = len(prompt), self.call.target
        if width > target.context:
            raise ValueError(
                f"prompts: number {index} has {width} tokens, but the target's context ends at {target.context}"
            )
        self.text.begin(row, index, prompt, width + self.new if self.new is not None else max(self.most, width + 1))
        started = now()
        renew(target, row, prompt[None, :-1])
        self.recorder.read_prompt(now() - started)
        self.call.length.renew(row)
        if self.drafting.drafting is not None:
            try:
                self.drafting.drafting.renew(self.text, row)
            except Exception as error:
                self.drafting.stop(f"Drafting failed ({type(error).__name__}: {error}); continuing without drafts.")


def _require_possible(inputs: LoopInputs, pair: Any, settings: CallSettings) -> None:
    """Raise ValueError for targets, drafts, processors and criteria that can't change texts row by row."""
    model, needs = inputs.model, pair.drafter.needs
    trusted = settings.trust_in(model)
    reason = why_plain(inputs, needs, settings) or trusted.forward
    if reason is None and (further := inputs.constants):
        reason = f"the model's forward is given {min(further)}"
    if reason is None and Traits.of(model).is_recurrent:
        reason = "it keeps recurrent states"
    if reason is None:
        is_lockstep = not masks_of(model, trusted, settings.fuses).trees or change_of(model) is not None
        reason = "the target's rows advance in lockstep" if is_lockstep or settings.ranks.several else None
    if reason is not None:
        raise ValueError(f"target: {reason}; generate_many cannot run it, so call generate with batches")
    for one in inputs.processors:
        if needs_prompt(one):
            raise ValueError(f"{type(one).__name__}: it may depend on the first prompt; leave its setting out")
    for criterion in inputs.criteria:
        if type(criterion) not in _CRITERIA:
            raise ValueError(f"stopping_criteria: {type(criterion).__name__} may depend on the batch; leave it out")
    if needs.states or needs.split:
        raise ValueError(
            f"draft: {type(pair.spec).__name__} reads the target's states, which generate_many does not keep; draft with "
            "text (suffix, ngram) or with a model"
        )


def _require_renewal(drafting: Drafting | None, name: str) -> None:
    parts = () if drafting is None else drafting.parts()
    if drafting is not None and not parts and type(drafting).renew is Drafting.renew:
        raise ValueError(
            f"draft: {name} can't begin with another text while others go on; draft with text (suffix, ngram) or with a model"
        )
    for part in parts:
        _require_renewal(part, name)


def _ids(prompt: Any, number: int) -> torch.Tensor:
    """A prompt's tokens, [P] int64: of a list of ids, a tensor [P] or [1, P], or what a tokenizer returns, without padding."""
    found = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
    if isinstance(found, str):
        raise ValueError(f"prompts: number {number} is text; pass token ids, such as tokenizer(text).input_ids")
    ids = torch.as_tensor(found)
    if hasattr(prompt, "keys") and (mask := prompt.get("attention_mask")) is not None and ids.shape[:-1] in ((), (1,)):
        ids = ids[torch.as_tensor(mask).view(ids.shape) != 0]
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    if ids.ndim != 1 or not len(ids) or ids.is_floating_point():
        raise ValueError(
            f"prompts: number {number} has the shape {tuple(ids.shape)}; pass token ids of one text, [P] or [1, P]"
        )
    return ids.long()
